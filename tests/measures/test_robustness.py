"""Nasty matrices: each gives the right number or one clear refusal, and never NaN."""

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from netkin import measures as m
from netkin.errors import InvalidValue, NetkinError, NoValue, ShapeError
from netkin.measures import measures
from quickly import slow_after
from refusals import refused

NAMES = list(measures(matrices=True))
ABOUT_THE_ORIGIN = ("cka_uncentered", "nbs_uncentered", "eigenspace_overlap_uncentered", "magnitude_difference")
CENTRED = [name for name in NAMES if name not in ABOUT_THE_ORIGIN]
SCALE_FREE = [name for name in NAMES if "scaling" in measures()[name].facts.unchanged_by]
NORMS = [name for name in NAMES if not measures()[name].facts.precise]


@st.composite
def nasty_pairs(draw):
    """Draw two matrices with the habits of real layers: idle, repeated, tiny, huge, shifted, of low rank."""
    n, dtype = draw(st.integers(1, 9)), draw(st.sampled_from([np.float32, np.float64]))
    # few distinct values, so that equal rows, constant units and low ranks are common
    entries = st.sampled_from([0.0, 0.0, 1.0, 1.0, -1.0, 2.0, 0.1, 1 / 3, -7.5])
    pair = []
    for _ in range(2):
        X = draw(hnp.arrays(np.float64, (n, draw(st.integers(1, 6))), elements=entries))
        X = X * draw(st.sampled_from([1.0, 1.0, 1.0, 1e-20, 1e18])) * draw(st.sampled_from([1.0, 1.0, -3.3]))
        X = X + draw(st.sampled_from([0.0, 0.0, 1.0, 1e4]))
        pair.append((X if draw(st.booleans()) else np.concatenate([X, X[:, :1], 0 * X[:, :1]], axis=1)).astype(dtype))
    return tuple(pair)


@pytest.mark.parametrize("name", NAMES)
@given(pair=nasty_pairs())
@example(pair=(np.eye(8), np.vander(np.arange(8.0), 3)))
@example(pair=(np.ones((1, 1)), np.ones((1, 1))))
def test_a_value_is_a_number_within_bounds_or_a_refusal(value, name, pair):
    low, high = measures()[name].facts.bounds
    with suppress(NetkinError):
        number = value(name, *pair)
        assert math.isfinite(number)
        assert low - 1e-9 <= number <= high + 1e-9


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("constant", [0.0, 3.0, 0.1, 1e4, 1e-20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_layer_has_no_value(worlds, value, name, constant, dtype):
    Y = worlds.normal(20, 3).astype(dtype)
    constants = np.full((20, 5), constant, dtype=dtype)
    with pytest.raises(NoValue, match="constant"):
        value(name, constants, Y)
    with pytest.raises(NoValue, match="constant"):
        value(name, Y, constants)


def test_the_reason_names_the_layer_and_the_numbers(worlds):
    with pytest.raises(
        NoValue, match="`Y` is constant over the 20 examples \\(width 5\\); a measure needs a layer that varies"
    ):
        m.cka(worlds.normal(20, 3), np.ones((20, 5)))


@pytest.mark.parametrize("name", CENTRED)
def test_one_example_has_no_value(worlds, value, name):
    with pytest.raises(NoValue):
        value(name, worlds.normal(1, 4), worlds.normal(1, 3))


@pytest.mark.parametrize("name", ["cka_debiased", "cka_rbf_debiased", "cka_minibatch"])
def test_debiasing_needs_four_examples(worlds, value, name):
    with pytest.raises(NoValue, match="at least 4 examples.*3"):
        value(name, worlds.normal(3, 4), worlds.normal(3, 3))


@pytest.mark.parametrize("name", ["cka_debiased", "cka_rbf_debiased", "cka_minibatch"])
@pytest.mark.parametrize("n", [4, 5, 7, 8, 10, 33])
@pytest.mark.parametrize("size", [1.0, 0.3, 1e-3])
def test_a_layer_that_is_one_hot_has_no_unbiased_hsic_and_no_value(worlds, value, name, n, size):
    # every two examples are equally far apart, so that HSIC₁ of the layer with itself is zero but for rounding
    with pytest.raises(NoValue, match="HSIC"):
        value(name, size * np.eye(n), worlds.normal(n, 3))


@pytest.mark.parametrize("name", ["cka_debiased", "cka_minibatch"])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_layer_that_fires_for_one_example_only_has_no_unbiased_hsic(worlds, value, name, offset, dtype):
    spike = np.zeros((7, 2), dtype=dtype)
    spike[3] = 1 / 3
    for other in (worlds.normal(7, 3), spike[::-1], np.eye(7)):
        with pytest.raises(NoValue, match="HSIC"):
            value(name, spike + dtype(offset), other.astype(dtype))


@pytest.mark.parametrize("name", ["cka_rbf", "cka_rbf_debiased"])
def test_mostly_equal_examples_leave_an_rbf_kernel_without_a_width(worlds, value, name):
    X = np.zeros((9, 2))
    X[0] = 1
    with pytest.raises(NoValue, match="more than half of the examples are the same point, so the RBF width is zero"):
        value(name, X, worlds.normal(9, 2))


@pytest.mark.parametrize("name", ["cka_rbf", "cka_rbf_debiased"])
@pytest.mark.parametrize("fraction", [1e-200, 1e-3, 1e9, 1e200])
def test_an_rbf_kernel_too_narrow_or_too_wide_gives_no_nan(worlds, value, name, fraction):
    with suppress(NetkinError):
        assert math.isfinite(value(name, *worlds.related(12, 3, 3), fraction=fraction))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_and_counted(worlds, value, name, bad):
    X, Y = worlds.related(12, 3, 4)
    Y[2, 1] = Y[5, 0] = bad
    with pytest.raises(InvalidValue, match="`Y` holds 2 NaN or Inf among 48 values; fix the model or leave out"):
        value(name, X, Y)
    with pytest.raises(InvalidValue, match="`X` holds 2 NaN or Inf among 48 values"):
        value(name, Y, X)


def test_infinities_of_both_signs_are_counted(worlds):
    X, Y = worlds.related(12, 3, 4)
    X[0, 0], X[1, 0] = math.inf, -math.inf
    with pytest.raises(InvalidValue, match="`X` holds 2 NaN or Inf among 36 values"):
        m.cka(X, Y)


@pytest.mark.parametrize("name", NAMES)
def test_unpaired_rows_are_refused_with_advice(worlds, value, name):
    with pytest.raises(
        ShapeError, match="must describe the same examples; got 12 rows and 11 rows. Run both models on the same"
    ):
        value(name, worlds.normal(12, 3), worlds.normal(11, 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4,), (4, 3, 2, 2), ()])
def test_what_is_no_matrix_is_refused(worlds, value, name, shape):
    with refused(ShapeError, "Y"):
        value(name, worlds.normal(4, 3), np.ones(shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_empty_matrices_are_refused(worlds, value, name, shape):
    with refused(ShapeError, "X"):
        value(name, np.ones(shape), worlds.normal(4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_complex_numbers_are_refused(worlds, value, name):
    with refused(InvalidValue, "X"):
        value(name, worlds.normal(8, 3) + 1j, worlds.normal(8, 3))


# --- right numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("offset", [0, 10, 1000, 1e4])
def test_huge_offsets_cost_no_more_than_two_millionths(worlds, value, name, offset):
    X, Y = worlds.related(200, 6, 5)
    X, Y = (X + offset).astype(np.float32), (Y + offset).astype(np.float32)
    exact = value(name, X.astype(np.float64), Y.astype(np.float64))
    assert value(name, X, Y) == pytest.approx(exact, abs=2e-6, rel=2e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NORMS])
def test_huge_offsets_cost_no_more_than_a_hundred_thousandth_where_layers_are_whitened(worlds, value, name):
    X, Y = worlds.related(200, 6, 5)
    X, Y = (X + 1e4).astype(np.float32), (Y + 1e4).astype(np.float32)
    assert value(name, X, Y) == pytest.approx(value(name, X.astype(np.float64), Y.astype(np.float64)), abs=1e-5)


@pytest.mark.parametrize("name", ["cka", "cka_debiased", "nbs", "procrustes_disparity", "cka_rbf", "cka_minibatch"])
def test_a_mean_a_million_times_the_spread_costs_little(worlds, value, name):
    # streamed moments stand this; two matrices at once must give the same number
    X, Y = worlds.related(200, 6, 5)
    X = (0.01 * X + 1e4).astype(np.float32)
    exact = value(name, X.astype(np.float64) - 1e4, Y)
    assert value(name, X, Y.astype(np.float32)) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("name", SCALE_FREE)
@pytest.mark.parametrize("scale", slow_after(1, [1e-20, 1e-30, 1e-36, 1e25, 1e35]))
def test_tiny_and_huge_scales_change_nothing(worlds, value, name, scale):
    X, Y = (Z.astype(np.float32) for Z in worlds.related(40, 5, 4))
    power = np.float32(2.0 ** round(math.log2(scale)))
    assert value(name, X * power, Y) == pytest.approx(value(name, X, Y), abs=1e-6)
    assert value(name, X, Y * power) == pytest.approx(value(name, X, Y), abs=1e-6)


@pytest.mark.parametrize("name", SCALE_FREE)
@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_tiny_and_huge_scales_change_nothing_in_float64(worlds, value, name, scale):
    X, Y = worlds.related(40, 5, 4)
    assert value(name, X * scale, Y) == pytest.approx(value(name, X, Y), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "scale, dtype",
    [(1e-40, np.float32), (1e38, np.float32), (1e-310, np.float64), (1e200, np.float64), (1e300, np.float64)],
)
def test_the_ends_of_the_number_range_give_a_number_or_a_refusal(worlds, value, name, scale, dtype):
    pair = [(np.clip(worlds.normal(20, 3), -2, 2) * scale).astype(dtype) for _ in range(2)]
    with suppress(NoValue):
        assert math.isfinite(value(name, *pair))


@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e18, 1e25])
def test_sizes_keep_their_scale(worlds, scale):
    X, Y = worlds.related(40, 5, 4)
    small_x, small_y = ((Z * scale).astype(np.float32) for Z in (X, Y))
    for name in ("magnitude_difference", "procrustes_size_and_shape"):
        number = measures()[name].function(small_x, small_y) / scale
        assert number == pytest.approx(measures()[name].function(X, Y), rel=1e-5)


@pytest.mark.parametrize("name", ["cka", "cka_debiased", "nbs", "cka_minibatch", "cka_rbf", "cca_mean", "svcca"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_stuck_unit_does_not_hide_the_live_ones(worlds, value, name, dtype):
    X, Y = worlds.related(300, 4, 3)
    X = (0.02 * X).astype(dtype)
    stuck = np.concatenate([X, np.full((300, 1), 1e6, dtype=dtype)], axis=1)
    assert value(name, stuck, Y.astype(dtype)) == pytest.approx(value(name, X, Y.astype(dtype)), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_raised_first(worlds, value, name, dtype):
    X, Y = (torch.tensor(Z).to(dtype) for Z in worlds.related(40, 5, 4))
    assert float(value(name, X, Y)) == pytest.approx(float(value(name, X.double(), Y.double())), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_counts_and_booleans_are_numbers(worlds, value, name):
    X, Y = worlds.rng.integers(0, 9, size=(30, 4)), worlds.normal(30, 3) > 0
    exact = value(name, X.astype(float), Y.astype(float))
    assert value(name, X, Y) == pytest.approx(exact, abs=1e-6)
    assert value(name, X.astype(np.uint8), Y) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_lists_and_awkward_memory_are_numbers_as_any(worlds, value, name):
    X, Y = worlds.related(30, 4, 3)
    frozen = X.copy()
    frozen.flags.writeable = False
    expected = value(name, X, Y)
    for same in (X.tolist(), frozen, np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2], X[::-1, ::-1][::-1, ::-1]):
        assert value(name, same, Y) == pytest.approx(expected, abs=1e-12)
    assert value(name, X[::-1], Y[::-1]) == pytest.approx(value(name, X[::-1].copy(), Y[::-1].copy()), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_idle_and_repeated_units_of_y_behave(worlds, value, name):
    X, Y = worlds.related(50, 5, 4)
    with_idle = np.concatenate([Y, np.zeros((50, 2)), np.full((50, 1), 1.0)], axis=1)
    if name not in ABOUT_THE_ORIGIN:
        assert value(name, X, with_idle) == pytest.approx(value(name, X, Y), abs=1e-9)
    if "invertible" in measures()[name].facts.unchanged_by:
        assert value(name, X, np.concatenate([Y, Y, Y[:, :2]], axis=1)) == pytest.approx(value(name, X, Y), abs=1e-9)


def test_rank_is_not_mistaken_for_rounding_with_duplicated_units(worlds):
    # eigenvalues of the second moment, not singular values, are held against the rounding
    X, Y = worlds.related(400, 12, 12)
    twice = np.concatenate([X, X @ worlds.normal(12, 12)], axis=1)
    assert m.cca_mean(twice, Y) == pytest.approx(m.cca_mean(X, Y), abs=1e-9)
    assert m.cca_mean(twice.astype(np.float32), Y.astype(np.float32)) <= 1
