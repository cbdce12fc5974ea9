"""Pairs are prepared many at a time, and have the values that each would have alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.comparing import tabulating
from netkin.statistics import Moments
from quickly import slow_after

MEASURES = ["cka", "cca_mean", "svcca", "pwcca", "nbs", "nbs_uncentered", "shape_distance", "gulp", "cka_debiased"]


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


@pytest.fixture
def data():
    return torch.randn(200, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prepared(monkeypatch):
    """Return a list that will hold, call by call, what was prepared together."""
    calls, prepare = [], Moments.prepare

    def noted(asked):
        calls.append([(pair, [measure.name for measure in measures]) for pair, measures in asked])
        prepare(asked)

    monkeypatch.setattr(Moments, "prepare", staticmethod(noted))
    return calls


def test_a_whole_comparison_is_prepared_at_once(model, data, prepared):
    nk.compare(model, model, data, measures=MEASURES)
    assert [len(call) for call in prepared] == [25]


def test_pairs_that_do_not_fit_in_memory_together_are_prepared_after_each_other(model, data, prepared, monkeypatch):
    monkeypatch.setattr(tabulating, "AT_ONCE", 10)
    whole = nk.compare(model, model, data, measures=MEASURES)
    assert [len(call) for call in prepared] == [10, 10, 5]
    prepared.clear()
    monkeypatch.setattr(tabulating, "READ", 1)
    parts = nk.compare(model, model, data, measures=MEASURES)
    assert [len(call) for call in prepared] == [1] * 25
    for measure in MEASURES:
        assert parts[measure].values == pytest.approx(whole[measure].values, abs=1e-12)


@pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")
def test_rows_of_wide_layers_count_with_their_row_space(prepared, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    a, b = ({name: torch.randn(6, 40, generator=draw) for name in "xyz"} for _ in "ab")
    monkeypatch.setattr(tabulating, "READ", 4 * 6 * 6)  # of four pairs, or of the tenth part of one by its widths
    nk.compare(a, b, measures="svcca")
    assert [len(call) for call in prepared] == [4, 4, 1]


def test_of_a_model_with_itself_symmetric_measures_are_prepared_for_half_of_the_pairs(model, data, prepared):
    nk.compare(model, data=data, measures=["svcca", "pwcca"])
    names = [name for call in prepared for _, measures in call for name in measures]
    assert (names.count("svcca"), names.count("pwcca")) == (15, 25)


@pytest.mark.slow
def test_values_and_replicates_are_those_of_pairs_that_nothing_prepared(model, data, monkeypatch):
    ours = nk.compare(model, model, data, measures=MEASURES, errors=True, chunks=4)
    monkeypatch.delattr(Moments, "prepare")
    theirs = nk.compare(model, model, data, measures=MEASURES, errors=True, chunks=4)
    for measure in MEASURES:
        assert np.square(ours[measure].values) == pytest.approx(np.square(theirs[measure].values), rel=1e-11, abs=1e-12)
        replicates, expected = (np.square(one[measure].replicates) for one in (ours, theirs))
        assert replicates == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("measures", "threads"), slow_after(1, [("cka", [1]), ("cka_rbf", [2]), ("cka cka_rbf", [1, 2])], several=True)
)
def test_one_thread_reads_small_moments_and_all_read_rows(data, measures, threads, two_threads, monkeypatch):
    seen, value_of = {}, tabulating.value_of

    def noted(measure, pair):
        seen[measure.name] = torch.get_num_threads()
        return value_of(measure, pair)

    monkeypatch.setattr(tabulating, "value_of", noted)
    nk.compare({"x": data}, {"y": data.square()}, measures=measures.split(), progress=False)
    assert seen == dict(zip(measures.split(), threads, strict=True))


def test_a_fault_that_is_kept_leaves_the_number_of_threads(data, two_threads, monkeypatch):
    def stop(done, total, what):
        if what == "measuring":
            raise RuntimeError("stop")

    monkeypatch.setattr("netkin.progress.PAUSE", 0)
    with pytest.raises(RuntimeError, match="stop") as kept:
        nk.compare({"x": data}, {"y": data.square(), "z": data.abs()}, progress=stop)
    assert kept.tb is not None  # with the frames of all that was at work
    assert torch.get_num_threads() == 2
