"""Standard errors of a table: where they come from, why some are missing, and where they go."""

import copy
import pickle

import numpy as np
import pytest
from scipy import stats

from netkin import files
from netkin.results import Comparison, Match, load
from netkin.results.values import jackknife_bias, jackknife_error

MEDIAN = "medians are not smooth"
WIDE = [[[1.1e200, 2e200, 0.4]], [[0.9e200, 4e200, 0.6]], [[1e200, 3e200, 0.55]]]


def test_errors_come_from_the_replicates(made):
    table = made.jackknifed()
    for place in np.ndindex(3, 3):
        alone = table.values[place], table.replicates[(slice(None), *place)], table.chunk_sizes
        assert table.errors[place] == pytest.approx(jackknife_error(*alone), rel=1e-12)
        assert table.bias()[place] == pytest.approx(jackknife_bias(*alone), rel=1e-9)
    assert table.errors.min() > 0
    assert not table.error_reasons


def test_errors_that_are_given_stay(made):
    table = made.jackknifed(errors=np.full((3, 3), 0.25))
    assert (table.errors == 0.25).all()


def test_an_error_that_overflows_is_missing_with_a_reason(made, tmp_path):
    wide = {"rows": ("p",), "columns": ("r", "s", "t"), "bounds": (-np.inf, np.inf)}
    table = made.jackknifed(values=[[1e200, 3e200, 0.5]], replicates=WIDE, chunk_sizes=(4, 4, 4), **wide)
    assert np.isnan(table.errors[0, :2]).all()
    assert table.errors[0, 2] > 0
    reason = "the squares that the jackknife adds up are too large for float64"
    assert table.error_reasons == {("p", "r"): reason, ("p", "s"): reason}
    assert table.best_matches()["p"].margin_error is None
    kept = made.comparison(table)
    kept.save(tmp_path / "wide")
    assert load(tmp_path / "wide") == kept


def test_a_value_that_rounding_put_beyond_a_bound_lies_in_its_interval(made):
    table = made.jackknifed(values=np.full((3, 3), 1 + 1e-12), errors=np.full((3, 3), 0.25))
    low, high = table.interval()
    assert (low < table.values).all()
    assert (high == table.values).all()


def test_a_value_at_a_bound_has_a_reason_instead_of_an_error(made):
    values = np.array([[1.0, 0.5], [0.0, 1 - 1e-9]])
    table = made.jackknifed(rows=("p", "q"), columns=("r", "s"), values=values)
    assert np.isfinite(table.errors).tolist() == [[False, True], [False, False]]
    assert dict(table.error_reasons) == {
        ("p", "r"): "the value lies at the bound 1 of the measure",
        ("q", "r"): "the value lies at the bound 0 of the measure",
        ("q", "s"): "the value lies at the bound 1 of the measure",
    }


def test_an_open_end_is_no_bound(made):
    table = made.jackknifed(rows=("p",), columns=("r", "s"), values=[[0.0, 40.0]], bounds=(0, np.inf))
    assert list(table.error_reasons) == [("p", "r")]
    unbounded = made.jackknifed(rows=("p",), columns=("r",), values=[[0.0]], bounds=(-np.inf, np.inf))
    assert not unbounded.error_reasons


def test_a_missing_replicate_is_counted(made):
    replicates = made.jackknifed().replicates.copy()
    replicates[[0, 3], 1, 2] = np.nan
    table = made.jackknifed(replicates=replicates)
    assert np.argwhere(np.isnan(table.errors)).tolist() == [[1, 2]]
    assert dict(table.error_reasons) == {("conv2", "head"): "no value with 2 of the 5 chunks left out"}


def test_reasons_that_are_given_stand_and_leave_no_error(made):
    table = made.jackknifed(error_reasons={("conv1", "head"): MEDIAN})
    assert np.isnan(table.errors[0, 2])
    assert np.isfinite(table.errors).sum() == 8
    assert dict(table.error_reasons) == {("conv1", "head"): MEDIAN}
    without = made.table(error_reasons={("conv1", "head"): MEDIAN})
    assert without.errors is None
    assert without.error_reasons["conv1", "head"] == MEDIAN


def test_a_hole_has_its_own_reason(made):
    table = made.holed(error_reasons={("in", "out"): MEDIAN, ("in", "in"): MEDIAN})
    assert list(table.error_reasons) == [("in", "in")]
    replicates = np.full((3, 2, 2), np.nan)
    assert len(made.holed(replicates=replicates, chunk_sizes=(4, 4, 4)).error_reasons) == 3
    nothing = {(a, b): "dead" for a in ("in", "out") for b in ("in", "out")}
    empty = made.holed(
        values=np.full((2, 2), np.nan),
        missing=nothing,
        replicates=replicates,
        chunk_sizes=(4, 4, 4),
        bounds=(0, np.inf),
    )
    assert not empty.error_reasons


def test_intervals_are_students_and_stay_within_the_bounds(made):
    table = made.jackknifed(values=[[0.5, 0.999]], rows=("p",), columns=("r", "s"), spread=0.1)
    low, high = table.interval(0.8)
    assert (low[0, 0], high[0, 0]) == pytest.approx(stats.t.interval(0.8, 4, 0.5, table.errors[0, 0]), rel=1e-12)
    assert high[0, 1] == 1
    assert np.isnan(made.table().interval()).all()
    assert np.isnan(made.table(errors=np.ones((3, 3))).interval()).all()


def test_pairs_with_more_bias_than_error_are_named(made):
    table = made.jackknifed()
    replicates = table.replicates.copy()
    replicates[:, 0, 1] += 0.2  # all replicates lie above: without examples the value grows
    shifted = made.jackknifed(replicates=replicates)
    assert shifted.bias()[0, 1] > shifted.errors[0, 1]
    assert ("conv1", "conv2") in shifted.biased()
    expected = np.argwhere(np.abs(shifted.bias()) > shifted.errors).tolist()
    assert len(shifted.biased()) == len(expected) < 9
    assert made.table().biased() == ()


@pytest.mark.parametrize("higher", [True, False])
def test_a_match_carries_the_margin_to_the_second_best(made, higher):
    table = made.jackknifed(rows=("p",), columns=("r", "s", "t"), values=[[0.2, 0.5, 0.6]], higher_is_closer=higher)
    match = table.best_matches()["p"]
    best, second = (2, 1) if higher else (0, 1)
    assert match == (table.layers_b[best], table.values[0, best])
    assert (match.layer, match.value, match.second) == (table.layers_b[best], table.values[0, best], "s")
    assert match.error == table.errors[0, best]
    sign = 1 if higher else -1
    assert match.margin == pytest.approx(sign * (table.values[0, best] - table.values[0, second]))
    apart = sign * (table.replicates[:, 0, best] - table.replicates[:, 0, second])
    assert match.margin_error == pytest.approx(jackknife_error(match.margin, apart, table.chunk_sizes), rel=1e-12)
    assert match.clear is True


def test_a_margin_within_its_interval_is_not_clear(made):
    values = [[0.5, 0.501], [0.5, 0.9]]
    matches = made.jackknifed(rows=("p", "q"), columns=("r", "s"), values=values).best_matches()
    assert [match.clear for match in matches.values()] == [False, True]


def test_shared_noise_cancels_in_a_margin(made):
    values = np.array([[0.5, 0.51]])
    noise = np.random.default_rng(0).normal(size=(5, 1, 1))
    table = made.jackknifed(rows=("p",), columns=("r", "s"), values=values, replicates=values + noise)
    match = table.best_matches()["p"]
    assert match.error > 0.5
    assert match.margin_error == pytest.approx(0, abs=1e-12)
    assert match.clear


def test_what_is_not_known_of_a_match_is_none(made):
    match = made.table().best_matches()["conv1"]
    assert (match.error, match.second, match.margin, match.margin_error, match.clear) == (
        None,
        "conv2",
        0.5,
        None,
        None,
    )
    alone = made.jackknifed(rows=("p",), columns=("r",), values=[[0.5]]).best_matches()["p"]
    assert alone.error is not None
    assert (alone.second, alone.margin, alone.clear) == (None, None, None)
    replicates = made.jackknifed().replicates.copy()
    replicates[0, 0, 0] = np.nan
    holed = made.jackknifed(replicates=replicates).best_matches()["conv1"]
    assert (holed.error, holed.margin_error, holed.clear) == (None, None, None)
    assert holed.margin == pytest.approx(0.45)


def test_a_match_is_a_pair(made):
    match = Match("a", 0.5, 0.1, "b", 0.2, 0.3, False)
    name, value = match
    assert (name, value) == match == ("a", 0.5)
    assert repr(match) == "('a', 0.5)"
    for again in (copy.deepcopy(match), pickle.loads(pickle.dumps(match))):
        assert (again, again.__dict__) == (match, match.__dict__)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_carry_the_errors(made, again):
    table = made.jackknifed(error_reasons={("conv1", "head"): MEDIAN})
    assert again(table) == table
    assert again(table) != made.jackknifed()
    assert table != made.jackknifed(seed=1, errors=table.errors, error_reasons=dict(table.error_reasons))
    assert not again(table).replicates.flags.writeable


def test_errors_are_saved_and_come_back(made, tmp_path):
    reasons = {("conv1", "head"): MEDIAN, ("conv2", "head"): MEDIAN}
    kept = made.comparison(made.jackknifed(error_reasons=reasons), made.table("nbs"))
    kept.save(tmp_path / "ab.netkin")
    assert load(tmp_path / "ab.netkin") == Comparison.load(tmp_path / "ab.netkin") == kept
    _, arrays = files.read(tmp_path / "ab.netkin")
    assert sorted(arrays) == [
        *(f"tables/cka/{name}" for name in ("errors", "replicates", "values")), "tables/nbs/values",
    ]  # fmt: skip


def test_the_long_form_has_errors_intervals_and_reasons(made):
    table = made.jackknifed(error_reasons={("conv1", "head"): MEDIAN})
    for frame in (
        made.comparison(table).to_pandas(long=True),
        made.comparison(table, made.table("nbs")).to_pandas("cka", long=True),
    ):
        assert list(frame.columns) == ["measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason"]
        assert len(frame) == 9
        assert frame.reason.tolist() == ["", "", MEDIAN, "", "", "", "", "", ""]
        assert np.array_equal(frame.error, table.errors.ravel(), equal_nan=True)
        assert np.array_equal(frame.high, table.interval()[1].ravel(), equal_nan=True)
        assert np.isnan(frame.low[2])


def test_pandas_and_xarray_show_errors(made):
    table = made.jackknifed()
    assert table.to_pandas(errors=True).loc["conv1", "head"] == table.errors[0, 2]
    assert table.to_xarray(errors=True).sel(layer_a="conv1", layer_b="head") == table.errors[0, 2]
    assert np.isnan(made.table().to_pandas(errors=True)).all(axis=None)
    data = made.comparison(table, made.table("nbs")).to_xarray()
    assert np.array_equal(data["cka replicates"].isel(chunk=2), table.replicates[2])
    mixed = made.comparison(table, made.jackknifed(id="nbs", chunks=3)).to_xarray()
    assert mixed["nbs replicates"].dims == ("chunk of 3", "layer_a", "layer_b")
