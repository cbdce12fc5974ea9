"""Joints: which pairs can be stitched, where models can be cut, and holes with their reason where one cannot."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching.joining import joints
from netkin.errors import InvalidValue, UnknownName
from stitching_worlds import Lines, Maps, Residual, built, drawn, labelled

LEAST = "agreement(method=least_squares)"


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
    assert list(found.adapters) == [("one", "one"), ("two", "two"), ("out", "out")]
    sweep = nk.stitch_all(a, b, data, data)
    assert sweep[LEAST].missing["norm", "norm"].startswith(reason)
    assert 0 <= sweep[LEAST]["two", "two"] <= 1
    with pytest.raises(InvalidValue, match=reason):
        joints(a, b, data[0], pairs=[("norm", "norm")]).raise_first()


def test_a_second_model_that_depends_on_the_batch_makes_all_holes():
    def net():
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4))

    a, b = built(lambda: nn.Sequential(nn.Linear(5, 6))), built(net, seed=1)
    found = joints(a, b, drawn(9, 5), pairs="all")
    assert not found.adapters
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


def can_be_cut(model, x, layer):
    """Tell whether a stitch could cut the model after a layer; a layer with a path around it is refused."""
    found = joints(model, model, x, pairs=[(layer, layer)])
    found.raise_first()
    return found.cuts[layer]


class TestCuts:
    x = drawn(4, 3, 12, 12)

    @pytest.mark.parametrize("layer", ["stem", "blocks", "blocks.0", "blocks.1", "blocks.0.relu", "blocks.1.relu"])
    def test_residual_blocks_are_cut_around(self, layer):
        assert can_be_cut(built(Residual), self.x, layer)

    def test_a_layer_inside_a_residual_block_is_refused_naming_the_block(self):
        model = built(Residual)
        sentence = "layer 'blocks.1.conv' of 'b' has a path around it.*beside the stitch; choose 'blocks.1', which enc"
        with pytest.raises(InvalidValue, match=sentence):
            can_be_cut(model, self.x, "blocks.1.conv")
        assert not any(module._forward_hooks for module in model.modules())

    def test_deeper_inside_the_nearest_good_module_is_named(self):
        model = nn.Sequential(built(Residual))
        model[0].blocks[0].conv = nn.Sequential(model[0].blocks[0].conv, nn.Tanh())
        with pytest.raises(InvalidValue, match="choose '0.blocks.0', which encloses both"):
            can_be_cut(model, self.x, "0.blocks.0.conv.0")

    def test_a_path_around_with_no_module_around_both_is_refused(self):
        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(5, 5)

            def forward(self, x):
                return x + self.inner(x)

        with pytest.raises(InvalidValue, match="choose a layer that all paths lead through"):
            can_be_cut(built(Skips), drawn(4, 5), "inner")

    def test_what_depends_on_the_data_is_not_cut(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 4)

            def forward(self, x):
                x = self.one(x)
                return self.two(x if x.sum() > 0 else -x)

        assert not can_be_cut(built(Branches), drawn(4, 5), "one")
