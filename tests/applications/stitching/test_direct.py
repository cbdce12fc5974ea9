"""Direct matching: every closed form against a slow road, streamed as well as whole."""

import warnings
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, Ridge

from netkin.applications.stitching.maps import METHODS, find, lasso, matched, optimality_gap
from netkin.errors import InvalidValue, NoValue, UnknownName
from netkin.statistics import LayerMoments, Moments
from quickly import slow_after


@pytest.fixture
def layers():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6)) + rng.normal(size=6)
    B = np.tanh(A @ rng.normal(size=(6, 4))) + 0.3 * rng.normal(size=(200, 4)) + 2
    return A, B


def both(A, B):
    """Return the moments of two matrices, taken at once and streamed in uneven batches."""
    streamed = LayerMoments([(["a"], ["b"])])
    for start, stop in ((0, 17), (17, 90), (90, len(A))):
        streamed.update({"a": A[start:stop], "b": B[start:stop]})
    return Moments.of(A, B), streamed["a", "b"]


def centred(A, B, affine):
    return (A - A.mean(0), B - B.mean(0)) if affine else (A, B)


@pytest.mark.parametrize("affine", [True, False])
class TestAgainstSlowRoads:
    def check(self, how, layers, expected, affine):
        A, B = layers
        for moments in both(A, B):
            found = matched(moments, how)
            assert found.weight.numpy() == pytest.approx(expected, abs=1e-8)
            shift = B.mean(0) - A.mean(0) @ expected if affine else np.zeros(B.shape[1])
            assert found.bias.numpy() == pytest.approx(shift, abs=1e-8)

    def test_least_squares(self, layers, affine):
        A, B = centred(*layers, affine)
        self.check(f"least_squares(affine={affine})", layers, np.linalg.lstsq(A, B)[0], affine)

    def test_ridge(self, layers, affine):
        expected = Ridge(alpha=3, fit_intercept=affine).fit(*layers).coef_.T
        self.check(f"ridge(alpha=3, affine={affine})", layers, expected, affine)

    def test_procrustes(self, layers, affine):
        A, B = centred(*layers, affine)
        padded = np.pad(B, ((0, 0), (0, 2)))
        u, _, v = np.linalg.svd(A.T @ padded)
        self.check(f"procrustes(affine={affine})", layers, (u[:, :4] @ v[:4])[:, :4], affine)

    def test_reduced_rank(self, layers, affine):
        A, B = centred(*layers, affine)
        M = np.linalg.lstsq(A, B)[0]
        v = np.linalg.svd(A @ M)[2][:2].T
        self.check(f"reduced_rank(k=2, affine={affine})", layers, M @ v @ v.T, affine)

    def test_lasso(self, layers, affine):
        expected = Lasso(alpha=0.2, fit_intercept=affine, tol=1e-14, max_iter=10**6).fit(*layers).coef_.T
        assert 0 < (expected == 0).mean() < 1
        self.check(f"lasso(alpha=0.2, affine={affine})", layers, expected, affine)

    def test_permutation(self, layers, affine):
        A, B = centred(*layers, affine)
        chosen = min(permutations(range(6), 4), key=lambda units: ((A[:, units] - B) ** 2).sum())
        expected = np.zeros((6, 4))
        expected[chosen, range(4)] = 1
        self.check(f"permutation(affine={affine})", layers, expected, affine)


@pytest.mark.parametrize("p, q", [(4, 2), (2, 4), (3, 3)])
def test_no_other_matching_of_units_leaves_a_smaller_distance(p, q):
    rng = np.random.default_rng(p)
    for _ in range(20):
        A, B = rng.normal(size=(30, p)) * rng.uniform(0.2, 3, p), rng.normal(size=(30, q))
        A, B = centred(A, B, True)
        found = matched(Moments.of(A, B), "permutation").weight.numpy()
        smaller, larger = min(p, q), max(p, q)
        for units in permutations(range(larger), smaller):
            other = np.zeros((p, q))
            other[(units, range(smaller)) if p > q else (range(smaller), units)] = 1
            assert ((A @ found - B) ** 2).sum() <= ((A @ other - B) ** 2).sum() + 1e-9


def test_least_squares_leaves_less_than_any_neighbour(layers):
    A, B = layers
    best = matched(Moments.of(A, B), "least_squares")
    left = (best(torch.tensor(A)).numpy() - B) ** 2
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = A @ (best.weight.numpy() + 1e-3 * rng.normal(size=(6, 4))) + best.bias.numpy()
        assert ((other - B) ** 2).sum() > left.sum()


def test_fewer_examples_than_units_give_the_smallest_map(layers):
    A, B = layers[0][:4], layers[1][:4]
    expected = np.linalg.pinv(A - A.mean(0)) @ (B - B.mean(0))
    assert matched(Moments.of(A, B)).weight.numpy() == pytest.approx(expected, abs=1e-9)
    turned = matched(Moments.of(A, A @ np.linalg.qr(np.ones((6, 6)) + np.eye(6))[0]), "procrustes").weight
    assert (turned.T @ turned).numpy() == pytest.approx(np.eye(6), abs=1e-9)


def test_dead_units_are_no_trouble(layers):
    A, B = layers
    A = np.column_stack([A, np.full(len(A), 3.0), A[:, 0]])
    for how in METHODS:
        found = matched(Moments.of(A, B), how.replace("reduced_rank", "reduced_rank(k=2)"))
        assert bool(torch.isfinite(found.weight).all()), how
    expected = np.linalg.pinv(A - A.mean(0)) @ (B - B.mean(0))
    assert matched(Moments.of(A, B)).weight.numpy() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_units_of_any_size_are_matched(layers, size):
    A, B = layers
    for moments in both(A * size, B):
        assert matched(moments).weight.numpy() * size == pytest.approx(matched(Moments.of(A, B)).weight.numpy(), 1e-6)


def test_the_lasso_meets_the_conditions_of_its_optimum(layers):
    A, B = layers
    weight = lasso(Moments.of(A, B), alpha=0.05).weight.numpy()
    A, B = centred(A, B, True)
    gradient = A.T @ (B - A @ weight) / len(A)
    assert optimality_gap(weight, gradient, 0.05) < 1e-9
    assert np.abs(gradient[weight == 0]).max() <= 0.05 + 1e-9
    assert gradient[weight != 0] == pytest.approx(0.05 * np.sign(weight[weight != 0]), abs=1e-9)


@pytest.mark.parametrize(
    "shape, alpha",
    slow_after(3, [((30, 60), 0.05), ((30, 60), 0.005), ((50, 80), 0.001), ((100, 20), 0.01)], several=True),
)
@pytest.mark.parametrize("scales", [1.0, 1e5])
def test_a_hard_lasso_is_solved_too(shape, alpha, scales):
    """With fewer examples than units, and units of very different size; scikit-learn may come less far."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=shape) * np.logspace(0, np.log10(scales), shape[1])
    B = A[:, :3] @ rng.normal(size=(3, 2)) + rng.normal(size=(shape[0], 2))
    weight = lasso(Moments.of(A, B), alpha=alpha).weight.numpy()
    A, B = centred(A, B, True)
    rounding = 1e-13 * scales * np.abs(A.T @ B).max() / len(A)
    assert optimality_gap(weight, A.T @ (B - A @ weight) / len(A), alpha) < 1e-7 * alpha + rounding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs = Lasso(alpha=alpha, fit_intercept=False, tol=1e-12, max_iter=5_000).fit(A, B).coef_.T
    ours, theirs = (
        ((A @ one - B) ** 2).sum() / (2 * len(A)) + alpha * np.abs(one).sum() for one in (weight, theirs)
    )  # fmt: skip
    assert ours <= theirs * (1 + 1e-12)


def test_a_strong_penalty_leaves_nothing(layers):
    assert not lasso(Moments.of(*layers), alpha=1e3).weight.any()


def test_the_baselines_do_not_look_at_the_data(layers):
    A, B = layers
    assert torch.equal(matched(Moments.of(A, B), "identity").weight, torch.eye(6, 4, dtype=torch.float64))
    drawn = matched(Moments.of(A, B), "random(seed=3)").weight
    assert torch.equal(drawn, matched(Moments.of(A * 2, B + 1), "random(seed=3)").weight)
    assert not torch.equal(drawn, matched(Moments.of(A, B), "random").weight)


@pytest.mark.parametrize("width", [3, 6, 9])
def test_known_worlds_are_recovered(width):
    rng = np.random.default_rng(width)
    A = rng.normal(size=(500, width)) * np.arange(1, width + 1) + 1
    turn = np.linalg.qr(rng.normal(size=(width, width)))[0]
    order = np.eye(width)[rng.permutation(width)]
    low = rng.normal(size=(width, 2)) @ rng.normal(size=(2, width))
    for how, truth in {
        "least_squares": low,
        "procrustes": turn,
        "permutation": order,
        "reduced_rank(k=2)": low,
    }.items():
        assert matched(Moments.of(A, A @ truth + 5), how).weight.numpy() == pytest.approx(truth, abs=1e-6)
    assert matched(Moments.of(A, A @ turn), "permutation").weight.numpy() != pytest.approx(turn, abs=0.1)
    assert matched(Moments.of(A, A @ low), "procrustes").weight.numpy() != pytest.approx(low, abs=0.1)


@pytest.mark.parametrize(
    "how, error, sentence",
    [
        ("least_square", UnknownName, "no matching method named 'least_square'; did you mean 'least_squares'[?]"),
        ("spline", UnknownName, "no matching method named 'spline'. There are least_squares, ridge"),
        ("reduced_rank(rank=3)", UnknownName, "'reduced_rank' has no parameter 'rank'; its parameters are k, affine"),
        ("identity(k=3)", UnknownName, "'identity' has no parameter 'k'; it has no parameters"),
        ("reduced_rank(k=2.5)", InvalidValue, "`k` must be of type int, like its default 8; got 2.5"),
        ("reduced_rank(k=5)", InvalidValue, "between 1 and the smaller width, 4; got 5"),
        ("ridge(alpha=0)", InvalidValue, "`alpha` must be above 0; got 0"),
        ("lasso(alpha=-1)", InvalidValue, "`alpha` must be above 0; got -1"),
        ("a b", UnknownName, "'a b' is no matching method; write a name"),
        (3, UnknownName, "3 is no matching method"),
    ],
)
def test_what_is_no_method_is_refused(layers, how, error, sentence):
    with pytest.raises(error, match=sentence):
        matched(Moments.of(*layers), how)


@pytest.mark.parametrize("how", ["least_squares", "ridge", "lasso", "reduced_rank(k=1)"])
def test_a_constant_layer_is_refused(layers, how):
    with pytest.raises(NoValue, match="`X` is constant over the 200 examples"):
        matched(Moments.of(np.ones((200, 3)), layers[1]), how)


def test_a_lasso_that_does_not_settle_says_so(layers, monkeypatch):
    monkeypatch.setattr("netkin.applications.stitching.maps.ROUNDS", 3)
    monkeypatch.setattr("netkin.applications.stitching.maps._solve_output", lambda *given: None)
    with pytest.raises(
        NoValue, match="did not settle in 75 sweeps at alpha=0.001 [(]6 neurons[)]; take a larger alpha"
    ):
        lasso(Moments.of(*layers), alpha=0.001)


def test_parameters_keep_their_types():
    assert find("ridge(alpha=2)")[1] == {"alpha": 2.0}
    assert find("lasso")[1] == {}
