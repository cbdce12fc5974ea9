"""What every measure declares, held both ways."""

import math
from contextlib import suppress

import numpy as np
import pytest

import netkin as nk
from netkin.errors import NoValue
from netkin.measures import find, measures
from netkin.measures.registry import INVARIANCES
from netkin.statistics import Grams, Moments, Rows
from worlds import RANDOM, Worlds

NAMES = list(measures(matrices=True))
FACTS = {name: found.facts for name, found in measures(matrices=True).items()}
CHANGES = {
    "rotation": lambda worlds, X: X @ worlds.rotation(X.shape[1]),
    "scaling": lambda worlds, X: 3.7 * X,
    "translation": lambda worlds, X: X + 2 * worlds.normal(X.shape[1]),
    "invertible": lambda worlds, X: X @ worlds.invertible(X.shape[1]),
}
PROMISED = [(name, change) for name in NAMES for change in INVARIANCES if change in FACTS[name].unchanged_by]
LINEAR = [name for name in NAMES if FACTS[name].reads is Moments]
NOT_PROMISED = [(name, change) for name in NAMES for change in INVARIANCES if change not in FACTS[name].unchanged_by]


KERNELS = ("features", "gradients", "sum", "product", "hadamard", "transport")
OF_KERNELS = [
    f"{name}(kernel={kernel}{', buckets=40' if name.startswith('sketched') else ''})"
    for name in measures()
    if name.startswith(("kernel_", "sketched_"))
    for kernel in (*KERNELS, "psi")
    if name != "sketched_cka" or kernel not in ("hadamard", "transport")
]
LAYERS = {  # features and gradients, which change with them
    "rotation": lambda worlds, F, G: (F @ (Q := worlds.rotation(F.shape[1])), G @ Q),
    "scaling": lambda worlds, F, G: (5 * F, G / 5),
    "translation": lambda worlds, F, G: (F + 2 * worlds.normal(F.shape[1]), G),
    "invertible": lambda worlds, F, G: (F @ (A := worlds.invertible(F.shape[1])), G @ np.linalg.inv(A).T),
}


def closer(name, first, second):
    """Say whether the value `first` means closer layers than the value `second`."""
    return first > second if FACTS[name].higher_is_closer else first < second


@pytest.mark.parametrize("name, change", PROMISED)
def test_what_is_declared_harmless_leaves_the_value(worlds, value, name, change):
    for X, Y in (worlds.related(80, 12, 14), worlds.related(70, 5, 3)):
        before = value(name, X, Y)
        assert value(name, CHANGES[change](worlds, X), Y) == pytest.approx(before, abs=1e-7), "x changed"
        assert value(name, X, CHANGES[change](worlds, Y)) == pytest.approx(before, abs=1e-7), "y changed"


@pytest.mark.parametrize("name, change", NOT_PROMISED)
def test_what_is_not_declared_harmless_changes_the_value(worlds, value, name, change):
    X, Y = worlds.related(80, 12, 14)
    before = value(name, X, Y)
    after = (value(name, CHANGES[change](worlds, X), Y), value(name, X, CHANGES[change](worlds, Y)))
    assert max(abs(number - before) for number in after) > 1e-4


@pytest.mark.parametrize("spec", OF_KERNELS)
def test_every_setting_of_a_measure_of_kernels_declares_what_leaves_its_value(worlds, spec):
    """The layer has 50 units, of which ψ has 2,500 numbers: more than a sketch keeps as they are."""
    found = find(spec)
    (F, P), (G, Q) = worlds.related(60, 50, 7), worlds.related(60, 50, 7)

    def value(x, y):
        return float(found.function(x, y, **found.parameters))

    before = value((F, G), (P, Q))
    for change, made in LAYERS.items():
        after = value(made(worlds, F, G), (P, Q)), value((F, G), made(worlds, P, Q))
        if change in found.facts.unchanged_by:
            assert after == pytest.approx((before, before), abs=1e-6), change
        else:
            assert max(abs(number - before) for number in after) > 1e-4, change


def test_a_rotation_leaves_a_sketch_that_holds_all_numbers_of_psi(worlds):
    (F, P), (G, Q) = worlds.related(60, 40, 7), worlds.related(60, 40, 7)
    turned = LAYERS["rotation"](worlds, F, G)
    values = [nk.sketched_cka(one, (P, Q), kernel="psi", buckets=40) for one in ((F, G), turned)]
    assert values[0] == pytest.approx(values[1], abs=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "magnitude_difference"])
def test_shuffled_rows_change_the_value(worlds, value, name):
    X, Y = worlds.related(40, 6, 5)
    assert abs(value(name, X, Y[worlds.rng.permutation(40)]) - value(name, X, Y)) > 1e-3


def test_the_magnitude_difference_looks_at_means_alone(worlds, value):
    X, Y = worlds.related(40, 6, 5)
    assert value("magnitude_difference", X, Y[::-1]) == pytest.approx(value("magnitude_difference", X, Y))


# minibatches follow the order of the rows
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cka_minibatch"])
def test_rows_shuffled_alike_leave_the_value(worlds, value, name):
    X, Y = worlds.related(40, 6, 5)
    order = worlds.rng.permutation(40)
    assert value(name, X[order], Y[order]) == pytest.approx(value(name, X, Y), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_nearer_layers_are_called_nearer(worlds, value, name):
    X = worlds.normal(60, 6) * np.linspace(1, 2, 6) + 1
    near, far = X + 0.1 * worlds.normal(60, 6), 3 * worlds.normal(60, 6) + 4
    assert closer(name, value(name, X, near), value(name, X, far))


@pytest.mark.parametrize("name", NAMES)
def test_values_stay_within_the_bounds(worlds, value, name):
    low, high = FACTS[name].bounds
    assert low < high
    # information may be infinite, which is a refusal; nothing else may refuse these worlds
    allowed = NoValue if name == "gaussian_mutual_information" else ()
    for world in RANDOM:
        X, Y = worlds.by_name(world)
        for pair in ((X, Y), (X, X), (X, -2 * X), (X, X[::-1])):
            with suppress(allowed):
                assert low - 1e-9 <= value(name, *pair) <= high + 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if FACTS[name].symmetric])
def test_a_symmetric_measure_does_not_mind_the_order(worlds, value, name):
    for world in RANDOM:
        X, Y = worlds.by_name(world)
        if name != "gaussian_mutual_information" or "few" not in world:
            assert value(name, X, Y) == pytest.approx(value(name, Y, X), abs=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if not FACTS[name].symmetric])
def test_an_asymmetric_measure_does_mind_the_order(worlds, value, name):
    X, Y = worlds.related(60, 4, 9)
    assert abs(value(name, X, Y) - value(name, Y, X)) > 1e-3


@pytest.mark.parametrize("name", LINEAR)
def test_the_swapped_pair_gives_what_swapped_matrices_give(worlds, value, name):
    X, Y = worlds.related(60, 4, 9)
    assert float(measures()[name](Moments.of(X, Y).swapped)) == pytest.approx(value(name, Y, X), abs=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if FACTS[name].is_metric])
def test_a_metric_is_zero_on_identity_and_never_longer_by_a_detour(value, name):
    for seed in range(25):
        worlds = Worlds(seed)
        X, Y = worlds.related(30, 4, 4 + seed % 3)
        Z = X @ worlds.normal(4, 4) + worlds.normal(30, 4) * worlds.rng.uniform(0, 2)
        xy, yz, xz = (value(name, *pair) for pair in ((X, Y), (Y, Z), (X, Z)))
        assert value(name, X, X) == pytest.approx(0, abs=1e-6)
        assert min(xy, yz, xz) > 0
        assert xz <= xy + yz + 1e-9
        assert xy <= xz + yz + 1e-9
        assert yz <= xy + xz + 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if FACTS[name].is_metric])
@pytest.mark.parametrize("step", [1e-1, 1e-2, 1e-3, 1e-4])
def test_a_metric_is_one_among_near_copies_in_float32_too(value, name, step):
    for seed in range(20):
        worlds = Worlds(seed)
        X, change, aside = (worlds.normal(200, 6) for _ in range(3))
        # on a straight line, where a detour costs nothing, and a little off it
        A, B, C = (X + step * (t * change + 0.2 * t * (2 - t) * aside) for t in (0, 1, 2))
        ab, bc, ac = (value(name, *(Z.astype(np.float32) for Z in pair)) for pair in ((A, B), (B, C), (A, C)))
        assert ac <= (ab + bc) * (1 + 1e-6)
        assert ab > 0.1 * ac


def test_a_metric_is_a_symmetric_distance():
    for name in NAMES:
        if FACTS[name].is_metric:
            assert FACTS[name].symmetric
            assert not FACTS[name].higher_is_closer


def test_the_disparity_is_no_metric_as_declared(worlds, value):
    Q = worlds.orthonormal(30, 2)
    X, Y, Z = (Q @ np.array([[math.cos(angle)], [math.sin(angle)]]) for angle in (0, math.pi / 6, math.pi / 3))
    detour = value("procrustes_disparity", X, Y) + value("procrustes_disparity", Y, Z)
    assert value("procrustes_disparity", X, Z) > detour + 0.1
    assert not FACTS["procrustes_disparity"].is_metric


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_complete(name):
    found = measures()[name]
    assert found.name == name
    assert FACTS[name].reads in (Moments, Grams, Rows)
    assert FACTS[name].reference
    assert FACTS[name].convention
    assert found.summary.startswith("Return ")
    assert found.summary.endswith(".")


def test_only_measures_of_frobenius_norms_and_means_do_with_float32_products():
    plain = {name for name in LINEAR if not FACTS[name].precise}
    assert plain == {"cka", "cka_uncentered", "magnitude_difference"}
    assert [name for name, facts in FACTS.items() if facts.debiases] == ["cka_debiased"]


def test_measures_that_whiten_spell_out_the_rank_rule():
    rule = (
        "; rank: eigenvalues above max(n, p)·eps·λmax, eps of the products, "
        "and above ε²/3·(1 + √(p/n))²·max Σx², ε of the data"
    )
    spelled = {name for name in NAMES if FACTS[name].convention.endswith(rule)}
    assert spelled == {name for name in NAMES if FACTS[name].whitens}
    assert "cca_mean" in spelled


@pytest.mark.parametrize("name", [name for name in NAMES if FACTS[name].higher_is_closer])
def test_no_distance_hides_under_the_name_of_a_similarity(name):
    assert not any(word in name for word in ("distance", "difference", "disparity", "angular"))
