"""Joints: which pairs can be stitched, and holes with their reason where one cannot."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching.joints import joints
from netkin.errors import UnknownName, ValueFault
from stitching_worlds import Lines, Maps, built, drawn, labelled

LEAST = "agreement(how=least_squares)"


class Middling(nn.Module):
    """Beside the way to its answers it normalises by the batch."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        states = self.one(x)
        self.norm(states)
        return self.out(self.two(states))


def test_one_layer_that_depends_on_the_batch_is_a_hole_and_the_others_are_stitched():
    a, b = built(Middling), built(Middling, seed=1)
    data = labelled(b, 5)
    reason = "layer 'norm' of 'a' gives other values for an example when other examples are in its batch, or by chance"
    found = joints(a, b, data[0])
    assert str(found.refused["norm", "norm"]).startswith(reason)
    assert list(found.meetings) == [("one", "one"), ("two", "two"), ("out", "out")]
    sweep = nk.stitch_all(a, b, data, data)
    assert sweep[LEAST].holes["norm", "norm"].startswith(reason)
    assert 0 <= sweep[LEAST]["two", "two"] <= 1
    with pytest.raises(ValueFault, match=reason):
        joints(a, b, data[0], pairs=[("norm", "norm")]).refuse()


def test_a_second_model_that_depends_on_the_batch_makes_all_holes():
    def net():
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4))

    a, b = built(lambda: nn.Sequential(nn.Linear(5, 6))), built(net, seed=1)
    found = joints(a, b, drawn(9, 5), pairs="all")
    assert not found.meetings
    assert str(found.refused["0", "0"]).startswith(
        "'b' gives other answers for an example when other examples are in its"
    )


def test_layers_that_are_not_there_are_told_with_the_model():
    a, b = built(Maps), built(Maps, seed=1)
    for options in ({"layers": {"b": ["mit"]}}, {"pairs": [("mid", "mit")]}):
        with pytest.raises(UnknownName, match="in 'new', a Maps: no layer named 'mit'; did you mean 'mid'[?]"):
            joints(a, b, drawn(9, 3, 12, 12), names=("old", "new"), **options)


def test_similarities_take_places_of_maps_and_means_of_lines():
    maps = built(Maps)
    assert joints(maps, maps, drawn(9, 3, 12, 12)).shape == ("positions", None)
    small = built(Maps, stride=2)
    assert joints(maps, small, drawn(9, 3, 12, 12), "mid").shape == ("positions", "average")
    a, b = built(Lines, 6), built(Lines, 6, seed=1)
    data = labelled(b, 3, 10)
    shape, resize = joints(a, b, data[0]).shape
    assert (sorted(shape), resize) == (["conv", "norm", "pool", "relu"], None)
    x = torch.cat([batch[0] for batch in data])
    assert torch.equal(shape["conv"](drawn(2, 3, 4)), drawn(2, 3, 4).mean(2))
    with torch.no_grad():
        expected = float(nk.cka(a.conv(x).mean(2), b.conv(x).mean(2)))
    sweep = nk.stitch_all(a, b, data, data)
    assert sweep["cka"]["conv", "conv"] == pytest.approx(expected)
    alone = nk.stitch(a, "conv", b, "conv", data, test=data)
    assert sweep[LEAST]["conv", "conv"] == pytest.approx(alone.evaluation.agreement)
