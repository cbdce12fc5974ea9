"""Schedules: how many groups are frozen after how many steps."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from netkin.applications.freezing.schedules import fractions, linear
from netkin.errors import InvalidValue, UnknownName
from refusals import refusals, refused


@given(count=some.integers(2, 40), steps=some.integers(1, 5000))
def test_unit_i_of_l_is_trained_for_the_share_i_over_l_of_all_steps(count, steps):
    names = [f"group{number}" for number in range(1, count + 1)]
    plan = linear(names, steps)
    for number in range(1, count):
        # step t, counted from zero, still trains the group as long as t/steps < i/L
        trained = sum(Fraction(t, steps) < Fraction(number, count) for t in range(steps))
        assert plan.at[f"group{number}"] == trained
    assert plan.frozen(steps, 0) <= count - 1


def test_the_last_unit_is_never_frozen():
    plan = linear(["a", "b", "c", "d"], 8)
    assert [plan.frozen(done, 0) for done in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert plan.frozen(100, 0) == 3
    assert [plan.when(number) for number in (0, 1, 2, 3, None)] == [2, 4, 6, None, None]


def test_with_fewer_steps_than_groups_several_are_frozen_at_once():
    assert [linear(list("abcdef"), 2).frozen(done, 0) for done in (0, 1, 2)] == [0, 3, 3]


def test_fractions_are_met_exactly():
    assert fractions(["a", "b"], {"a": 0.1, "b": 0.3}, 30).at == {"a": 3, "b": 9}
    assert fractions(["a", "b"], {"a": 0.5}, 7).at == {"a": 4, "b": 7}


def test_a_fraction_of_zero_is_before_the_first_step_and_one_is_never():
    plan = fractions(["a", "b"], {"a": 0, "b": 1}, 10)
    assert [plan.frozen(done, 0) for done in (0, 10, 11)] == [1, 1, 1]


def test_a_plan_goes_on_from_its_state():
    plan = linear(["a", "b", "c"], 9)
    plan.load(linear(["a", "b", "c"], 30).state())
    assert plan.at == {"a": 10, "b": 20, "c": 30}
    assert plan.steps == 30


def test_one_unit_alone_has_no_linear_schedule():
    with pytest.raises(InvalidValue, match="'linear' freezes all groups but the last, and 'fc' is the only one"):
        linear(["fc"], 10)


def test_a_unit_before_a_frozen_one_cannot_be_live():
    refusals(
        (lambda: fractions(["a", "b"], {"a": 0.5, "b": 0.2}, 10), InvalidValue, "schedule"),
        (lambda: fractions(["a", "b"], {"b": 0.2}, 10), InvalidValue, "schedule"),
    )


def test_numbers_of_numpy_and_fractions_are_numbers():
    assert fractions(["a", "b"], {"a": np.float32(0.5), "b": Fraction(3, 4)}, 8).at == {"a": 4, "b": 6}


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan"), "half", None])
def test_a_fraction_lies_between_zero_and_one(fraction):
    with refused(InvalidValue, "schedule"):
        fractions(["a"], {"a": fraction}, 10)


def test_a_fraction_for_what_is_no_unit_is_refused():
    with refused(UnknownName, "schedule"):
        fractions(["conv1", "out"], {"conv1x": 0.5}, 10)
