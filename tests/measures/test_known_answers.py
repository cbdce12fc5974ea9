"""Worlds whose answers follow from algebra."""

import numpy as np
import pytest

from netkin import measures as m
from netkin.errors import NoValue
from netkin.measures import measures
from netkin.statistics import Moments
from transcriptions import hsic1, nbs_of_grams

RIGID = {"rotation", "scaling", "translation"}
SIMILARITIES = [name for name, found in measures(matrices=True).items() if found.facts.higher_is_closer]
DISTANCES = [name for name, found in measures(matrices=True).items() if not found.facts.higher_is_closer]
INFORMATION = "gaussian_mutual_information"

# six examples' worth of algebra: Q has orthonormal columns, X and Y share `k` of their p and q columns
P, Q, K, RIDGE = 6, 4, 2, 1e-2
SHARING = {
    "cka": K / np.sqrt(P * Q),
    "angular_cka": np.arccos(K / np.sqrt(P * Q)),
    "cka_uncentered": K / np.sqrt(P * Q),
    "cca_mean": K / Q,
    "cca_mean_squared": K / Q,
    "cca_rms": np.sqrt(K / Q),
    "svcca": K / Q,
    "svcca_by_sum": K / Q,
    "svcca_k": K / Q,
    "linear_regression_r2": K / Q,
    "eigenspace_overlap": K / P,
    "eigenspace_overlap_uncentered": K / P,
    "nbs": K / np.sqrt(P * Q),
    "nbs_uncentered": K / np.sqrt(P * Q),
    "procrustes_distance": np.sqrt(2 - 2 * K / np.sqrt(P * Q)),
    "procrustes_angular": np.arccos(K / np.sqrt(P * Q)),
    "procrustes_size_and_shape": np.sqrt(P + Q - 2 * K),
    "procrustes_disparity": 1 - K**2 / (P * Q),
    "shape_distance": np.arccos(K / np.sqrt(P * Q)),
    "magnitude_difference": 0.0,
    "gulp": np.sqrt(P / (1 + RIDGE * P) ** 2 + Q / (1 + RIDGE * Q) ** 2 - 2 * K / ((1 + RIDGE * P) * (1 + RIDGE * Q))),
}

RHO, SX, SY = np.array([0.9, 0.5, 0.2]), np.array([5.0, 2.0, 0.5]), np.array([1.0, 3.0, 2.0])
A, B = SX**2 / (SX**2).sum(), SY**2 / (SY**2).sum()
WX, WY = 0.5 * SX + 0.5, 0.5 * SY + 0.5
CORRELATED = {
    "cca_mean": RHO.mean(),
    "cca_mean_squared": (RHO**2).mean(),
    "cca_rms": np.sqrt((RHO**2).mean()),
    INFORMATION: -0.5 * np.log(1 - RHO**2).sum(),
    "pwcca": (SX * RHO).sum() / SX.sum(),
    "cka": ((SX * SY * RHO) ** 2).sum() / np.sqrt((SX**4).sum() * (SY**4).sum()),
    "nbs": (SX * SY * RHO).sum() / np.sqrt((SX**2).sum() * (SY**2).sum()),
    "linear_regression_r2": (SY**2 * RHO**2).sum() / (SY**2).sum(),
    "eigenspace_overlap": (RHO**2).mean(),
    "eigenspace_overlap_uncentered": (RHO**2).mean(),
    "procrustes_size_and_shape": np.sqrt((SX**2).sum() + (SY**2).sum() - 2 * (SX * SY * RHO).sum()),
    "shape_distance": np.arccos((WX * WY * RHO).sum() / np.sqrt((WX**2).sum() * (WY**2).sum())),
    "gulp": np.sqrt(
        ((A / (A + RIDGE)) ** 2 + (B / (B + RIDGE)) ** 2 - 2 * RHO**2 * A * B / ((A + RIDGE) * (B + RIDGE))).sum()
    ),
}

CROSSED = {"cka": 0, "cka_debiased": -0.5, "cka_minibatch": -0.5, "cka_rbf": 0, "cka_rbf_debiased": -0.5, "cca_mean": 0}


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_some_orthonormal_directions(worlds, value, name):
    X, Y = worlds.sharing(40, P, Q, K)
    assert value(name, X, Y) == pytest.approx(SHARING[name], abs=1e-10)


@pytest.mark.parametrize("name", CORRELATED)
def test_layers_with_chosen_canonical_correlations(worlds, value, name):
    X, Y = worlds.correlated(40, RHO, SX, SY)
    assert value(name, X, Y) == pytest.approx(CORRELATED[name], abs=1e-10)


@pytest.mark.parametrize("name", CROSSED)
def test_pairs_split_crosswise_are_unrelated_and_debiased_below_zero(worlds, value, name):
    assert value(name, *worlds.crossed_pairs()) == pytest.approx(CROSSED[name], abs=1e-12)


def test_every_measure_has_a_known_answer():
    assert set(SHARING) | set(CORRELATED) | set(CROSSED) == set(measures(matrices=True))


@pytest.mark.parametrize("name", [n for n in SIMILARITIES if measures()[n].facts.unchanged_by >= RIGID])
def test_a_rotated_copy_is_alike(worlds, value, name):
    X, Y = worlds.rotated_copy()
    if name == INFORMATION:
        with pytest.raises(NoValue, match="8 of 8 canonical correlations are 1 at 50 examples.*the 16 features"):
            value(name, X, Y)
    else:
        assert value(name, X, Y) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in DISTANCES if measures()[n].facts.unchanged_by >= RIGID])
def test_a_rotated_copy_is_at_distance_zero(worlds, value, name):
    assert value(name, *worlds.rotated_copy()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(SHARING) - {"gulp", "magnitude_difference", "procrustes_size_and_shape"}))
def test_orthogonal_layers_are_at_the_far_end(worlds, value, name):
    facts = measures()[name].facts
    far = facts.bounds[0] if facts.higher_is_closer else facts.bounds[1]
    assert value(name, *worlds.sharing(40, 3, 5, 0)) == pytest.approx(far, abs=1e-7)


def test_orthogonal_layers_share_no_information(worlds):
    assert m.gaussian_mutual_information(*worlds.sharing(40, 3, 5, 0)) == pytest.approx(0, abs=1e-12)


def test_single_units_have_their_correlation_coefficient(worlds):
    X, Y = worlds.related(30, 1, 1)
    r = np.corrcoef(X[:, 0], Y[:, 0])[0, 1]
    assert m.cka(X, Y) == pytest.approx(r**2)
    assert m.cca_mean(X, Y) == pytest.approx(abs(r))
    assert m.nbs(X, Y) == pytest.approx(abs(r))
    assert m.pwcca(X, Y) == pytest.approx(abs(r))
    assert m.gaussian_mutual_information(X, Y) == pytest.approx(-0.5 * np.log(1 - r**2))


def test_the_cut_of_svcca_takes_the_fewest_directions(worlds):
    X, Y = worlds.correlated(60, [0.9, 0.5, 0.2], [10, 3, 1], [10, 3, 1])
    assert m.svcca(X, Y, variance=0.90) == pytest.approx(0.9)  # 100 of 110
    assert m.svcca(X, Y, variance=0.95) == pytest.approx(0.7)  # 109 of 110
    assert m.svcca(X, Y, variance=0.999) == pytest.approx(1.6 / 3)
    assert m.svcca_by_sum(X, Y, variance=0.90) == pytest.approx(0.7)  # 13 of 14
    assert m.svcca_by_sum(X, Y, variance=0.95) == pytest.approx(1.6 / 3)
    assert [m.svcca_k(X, Y, k=k) for k in (1, 2, 3, 9)] == pytest.approx([0.9, 0.7, 1.6 / 3, 1.6 / 3])


def test_rbf_kernels_of_equidistant_points_are_the_same_whatever_the_order(value):
    corners = np.eye(6)
    assert value("cka_rbf", corners, corners[[2, 0, 1, 5, 3, 4]] * 7) == pytest.approx(1)


def test_shape_distance_runs_from_cca_to_procrustes(worlds):
    X, Y = worlds.related(60, 5, 5)
    assert m.shape_distance(X, Y, alpha=0.0) == pytest.approx(np.arccos(m.cca_mean(X, Y)))
    assert m.shape_distance(X, Y, alpha=1.0) == pytest.approx(m.procrustes_angular(X, Y))


def test_shape_distance_by_covariance_does_not_tend_to_procrustes_with_more_examples(worlds):
    X, Y = worlds.related(60, 5, 5)
    many_x, many_y = (np.tile(Z, (1000, 1)) for Z in (X, Y))  # the same layers on more examples
    by_covariance = [m.shape_distance(*pair, whitening="covariance") for pair in ((X, Y), (many_x, many_y))]
    assert by_covariance[0] == pytest.approx(by_covariance[1], abs=1e-9)
    assert m.shape_distance(many_x, many_y) == pytest.approx(m.procrustes_angular(X, Y), abs=0.01)
    assert abs(by_covariance[0] - m.procrustes_angular(X, Y)) > 0.02
    for alpha, end in ((1.0, m.procrustes_angular(X, Y)), (0.0, np.arccos(m.cca_mean(X, Y)))):
        assert m.shape_distance(X, Y, alpha=alpha, whitening="covariance") == pytest.approx(end)


def test_means_are_one_more_direction_that_layers_share_where_they_are_not_taken_off(worlds):
    X, Y = worlds.sharing(40, 3, 5, 1)
    assert m.eigenspace_overlap(X + 1, Y + 2) == pytest.approx(1 / 5)
    assert m.eigenspace_overlap_uncentered(X, Y) == pytest.approx(1 / 5)
    # the column of ones comes in where a mean makes a unit and it independent of the others
    ones = np.ones((40, 1))
    assert m.eigenspace_overlap_uncentered(np.hstack([X, ones]), np.hstack([Y, ones])) == pytest.approx(2 / 6)


@pytest.mark.parametrize("rank, spans", [(8, False), (9, True)])
def test_a_layer_that_spans_all_examples_about_the_origin_holds_the_other(worlds, rank, spans):
    X, Y = worlds.normal(9, rank), worlds.normal(9, 4)
    pair = Moments.of(X, Y).uncentred
    assert pair.spans_all is spans
    assert pair.swapped.spans_all is spans


def test_nbs_is_the_root_of_the_product_of_gram_matrices(worlds):
    X, Y = worlds.related(30, 5, 8)
    assert m.nbs_uncentered(X, Y) == pytest.approx(nbs_of_grams(X @ X.T, Y @ Y.T), abs=1e-6)


def test_cka_never_exceeds_nbs_of_the_squared_kernels(worlds):
    X, Y = worlds.related(30, 5, 8)
    squared = (np.linalg.matrix_power(Z @ Z.T, 2) for Z in (X, Y))
    assert m.cka_uncentered(X, Y) <= nbs_of_grams(*squared) + 1e-9  # eq. 14 of Tang et al. (2020)


def test_debiased_cka_of_wide_unrelated_layers_is_near_zero_and_plain_cka_is_not(worlds, value):
    X, Y = worlds.normal(60, 500), worlds.normal(60, 500)
    assert value("cka", X, Y) > 0.8
    assert abs(m.cka_debiased(X, Y)) < 0.1
    assert m.cka_debiased(X, Y) == pytest.approx(m.cka_minibatch(X, Y), abs=1e-9)


def test_pwcca_does_not_change_with_the_mean_and_is_not_plain_cca(worlds):
    X, Y = worlds.correlated(40, RHO, SX, SY)
    assert m.pwcca(X + 100, Y) == pytest.approx(m.pwcca(X, Y))
    assert m.pwcca(X, Y) != pytest.approx(m.cca_mean(X, Y), abs=0.05)


def with_shared_units(worlds, shared):
    """Return two layers of five units, `shared` of which are the same ones."""
    X, Y = worlds.related(60, 5, 5)
    Y[:, :shared] = X[:, :shared] * 2 + 1
    return X, Y


@pytest.mark.parametrize("shared", [2, 3, 4])
def test_pwcca_has_no_value_where_equal_correlations_leave_the_weights_open(worlds, shared):
    X, Y = with_shared_units(worlds, shared)
    for order in (slice(None), worlds.rng.permutation(60)):  # which changed the number
        with pytest.raises(
            NoValue, match=f"{shared} of 5 canonical correlations are equal.*weights are not determined"
        ):
            m.pwcca(X[order], Y[order])


@pytest.mark.parametrize("shared", [0, 1, 5])
def test_pwcca_has_a_value_where_at_most_one_or_all_correlations_are_one(worlds, shared):
    X, Y = with_shared_units(worlds, shared)
    order = worlds.rng.permutation(60)
    assert m.pwcca(X[order], Y[order]) == pytest.approx(m.pwcca(X, Y), abs=1e-12)
    assert m.pwcca(X, Y) == pytest.approx(1, abs=1e-12) if shared == 5 else m.pwcca(X, Y) < 0.99


def test_a_remainder_under_four_examples_is_left_out_and_counted(worlds):
    from netkin.statistics import Grams

    X, Y = worlds.related(27, 3, 4)
    assert m.cka_minibatch(X, Y, batch=8) == pytest.approx(m.cka_minibatch(X[:24], Y[:24], batch=8))
    pair = Grams.of(X, Y, batch=8)
    assert (pair.batches, pair.left_out) == (3, 3)
    assert Grams.of(X[:26], Y[:26], batch=11).left_out == 0


def test_a_short_last_batch_counts_by_its_pairs_and_peers_count_it_in_full(worlds):
    X, Y = worlds.related(40, 3, 4)

    def by_weight(weight):
        found = np.zeros(3)
        for rows in (slice(16), slice(16, 32), slice(32, 40)):
            K, L = X[rows] @ X[rows].T, Y[rows] @ Y[rows].T
            found += weight(len(K)) * np.array([hsic1(K, L), hsic1(K, K), hsic1(L, L)])
        return found[0] / np.sqrt(found[1] * found[2])

    value = m.cka_minibatch(X, Y, batch=16)
    assert value == pytest.approx(by_weight(lambda m: m * (m - 3)), abs=1e-9)
    assert abs(value - by_weight(lambda m: 1)) > 1e-3
