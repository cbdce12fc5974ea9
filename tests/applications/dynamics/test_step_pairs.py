"""Measures of weights along a run: no data, and every step against every other."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, UnknownName
from refusals import refused


@pytest.fixture
def run():
    """Six epochs of a network whose atoms walk to their end, the first layer faster."""
    torch.manual_seed(0)
    start = nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=4), nn.ReLU(), nk.AtomConv2d(8, 8, 3, atoms=4), nn.Flatten())
    ways = [torch.randn_like(start[layer].atoms) for layer in (0, 2)]
    found = {}
    for epoch in range(6):
        found[epoch] = copy.deepcopy(start)
        for layer, way, share in zip((0, 2), ways, (min(1, epoch / 3), epoch / 5), strict=True):
            found[epoch][layer].atoms.data += share * way
    return found


def cosine(a, b):
    u, v = (one.detach().double().flatten() for one in (a, b))
    return float(u @ v / u.norm() / v.norm())


def test_a_run_is_followed_without_data_and_every_step_meets_every_other(run):
    series = nk.dynamics(run, measures="atom_cosine")
    assert series.layers == ("0", "2")
    assert series.comparisons[0].needs_no_data
    for layer in (0, 2):
        expected = [[cosine(a[layer].atoms, b[layer].atoms) for b in run.values()] for a in run.values()]
        np.testing.assert_allclose(series.between_steps(str(layer)), expected, atol=1e-9)
    np.testing.assert_allclose(series.own()[:, 1], series.between_steps("2")[:, -1], atol=1e-12)
    assert series.reached(0.999)["0"] == 3
    assert series.reached(0.999)["2"] is None
    assert "from the weights alone: no data were run" in str(series)


def test_the_series_is_saved_continued_and_written_as_json_with_all_pairs(run, tmp_path):
    series = nk.dynamics(run, measures=["atom_cosine", "atom_angular"], save=tmp_path / "run.netkin")
    assert nk.load(tmp_path / "run.netkin") == series
    again = nk.dynamics(run, measures=["atom_cosine", "atom_angular"], save=tmp_path / "run.netkin")
    np.testing.assert_array_equal(again.between_steps("0", "atom_angular"), series.between_steps("0", "atom_angular"))
    told = json.loads(json.dumps(nk.document(series), allow_nan=False))
    assert sorted(told["between"]["tables"]) == sorted(series.between.tables)


def test_the_page_draws_each_layer_with_its_lines(run, tmp_path):
    page = nk.report(nk.dynamics(run, measures="atom_cosine"), tmp_path / "run.html").read_text()
    assert page.count('class="framed"') == 2
    assert "0.99 from 3, 0.999 from 3" in page
    assert "0.999 not before the last" in page


def test_plain_networks_have_holes_for_atoms_and_values_for_weights():
    torch.manual_seed(0)
    run = {step: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)) for step in range(3)}
    series = nk.dynamics(run, measures=["weight_cosine", "atom_cosine", "grassmann(atoms=3)"], layers=["0"])
    assert np.isfinite(series.between_steps("0", "weight_cosine")).all()
    assert np.isfinite(series.between_steps("0", "grassmann(atoms=3)")).all()
    assert np.isnan(series.between_steps("0", "atom_cosine")).all()
    assert "`nk.share_coefficients`" in series.between["atom_cosine of 0"].missing["0", "1"]


def test_with_data_measures_of_both_kinds_go_together(run):
    series = nk.dynamics(run, torch.randn(20, 3, 8, 8), ["cka", "atom_cosine"], layers=["0", "2"])
    assert series.between_steps("0", "atom_cosine").shape == (6, 6)
    with pytest.raises(UnknownName, match="holds no 'cka of 0' of all pairs of steps; measures of weights"):
        series.between_steps("0", "cka")


def test_other_measures_still_need_data(run):
    with refused(InvalidValue, "data"):
        nk.dynamics(run, measures="cka")
