from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kendalltau

from netkin.errors import NoValue
from netkin.results.series import Trend, kendall, trend


def test_layers_done_from_the_bottom_up_give_one_and_from_the_top_down_minus_one():
    assert trend([10, 20, 30, 40]) == Trend(1.0, 0.0, 2 / 24, 4, 0)
    assert trend([40, 30, 20, 10], never=1) == Trend(-1.0, 0.0, 2 / 24, 4, 1)


@pytest.mark.parametrize("kinds", [3, 6, 1000])
@pytest.mark.parametrize("n", [2, 5, 12, 40])
def test_tau_is_that_of_scipy(n, kinds):
    steps = np.random.default_rng(n * kinds).integers(kinds, size=n).tolist()
    expected = kendalltau(range(n), steps).statistic
    assert kendall(steps) == pytest.approx(0.0 if np.isnan(expected) else expected)


@pytest.mark.parametrize("n", [2, 6, 9, 30])
def test_p_without_ties_is_that_of_scipy(n):
    steps = np.random.default_rng(n).permutation(n).tolist()
    assert trend(steps).p == pytest.approx(kendalltau(range(n), steps, method="exact").pvalue)


@pytest.mark.parametrize("steps", [[1, 1, 2, 2, 3, 5], [0, 0, 0, 0, 7], [3, 2, 2, 1, 1, 1, 0], [5, 1, 5, 1]])
def test_p_with_ties_counts_all_orders(steps):
    scores = [abs(kendall(order)) for order in permutations(steps)]
    assert trend(steps).p == pytest.approx(np.mean(np.array(scores) >= abs(kendall(steps)) - 1e-12))


def test_many_layers_take_no_time_and_agree_with_the_normal_approximation():
    steps = np.random.default_rng(0).integers(40, size=150) + np.arange(150) // 20
    assert trend(steps.tolist()).p == pytest.approx(kendalltau(range(150), steps).pvalue, rel=0.05)


def test_the_error_is_the_jackknife_over_layers():
    steps = [3, 1, 4, 1, 5, 9, 2, 6]
    left = [kendalltau(range(7), np.delete(steps, i)).statistic for i in range(8)]
    assert trend(steps).error == pytest.approx(np.sqrt(7 * np.var(left)))


def test_a_rest_without_order_counts_as_none():
    # without the last layer, all tie
    left = np.array([kendall([0, 0, 5]), kendall([0, 0, 5]), kendall([0, 0, 5]), 0])
    assert trend([0, 0, 0, 5]).error == pytest.approx(np.sqrt(3 * left.var()))


def test_two_layers_have_a_trend_without_an_error():
    assert trend([1, 2]) == Trend(1.0, None, 1.0, 2, 0)
    assert str(trend([1, 2])) == "τ = 1.00, p = 1 (2 layers)"


@pytest.mark.parametrize("steps, words", [([4, 4, 4], "3 layers that reach"), ([1], "1 layer that reaches")])
def test_layers_without_order_have_no_trend(steps, words):
    with pytest.raises(NoValue, match=f"no order among {words} the threshold at the same step; choose another"):
        trend(steps)


def test_layers_that_never_arrive_are_not_said_to_arrive_together():
    with pytest.raises(NoValue, match="among 3 layers of which none reaches the threshold before the end; choose"):
        trend([9, 9, 9], never=3)


def test_the_words_say_how_sure_it_is():
    assert str(trend([1, 2, 3, 9, 9], never=2)) == (
        "τ = 0.95 ± 0.09, p = 0.033 (5 layers, 2 of them never before the end)"
    )
