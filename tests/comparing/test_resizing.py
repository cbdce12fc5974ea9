"""Maps of different sizes, averaged down to where they meet."""

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

import netkin as nk
from netkin.errors import InvalidValue, UnknownName
from refusals import refusals

MEASURES = ["cka", "cca_mean", "cka_minibatch(batch=16)", "cka_rbf"]
SIZES = {"conv1": 8, "conv2": 4}


def meeting_rows(model, layer, images, size):
    """Return the rows of one layer of a small net at one size, computed by hand."""
    maps = nk.activations(model, layer, images, shape="flatten")[layer].reshape(
        len(images), -1, SIZES[layer], SIZES[layer]
    )
    return nk.positions(adaptive_avg_pool2d(maps, size))


def test_the_larger_map_is_averaged_down(maps, images, value):
    a, b = maps(), maps(3)
    images = images[:16]
    comparison = nk.compare(
        a, b, list(images.split(6)), MEASURES, layers=list(SIZES), shape="positions", resize="average"
    )
    for table in comparison.tables.values():
        assert not table.missing
        for x in SIZES:
            for y in SIZES:
                size = min(SIZES[x], SIZES[y])
                plain = value(
                    table.quantity.name,
                    meeting_rows(a, x, images, size),
                    meeting_rows(b, y, images, size),
                    **table.quantity.parameters,
                )
                assert table[x, y] == pytest.approx(float(plain), abs=1e-5), (table.id, x, y)


def test_results_show_plain_names_and_say_what_was_done(maps, images):
    comparison = nk.compare(
        maps(), maps(), images, layers=["conv1", "conv2", "fc"], shape="positions", resize="average"
    )
    assert comparison.layers_a == ("conv1", "conv2", "fc")
    assert comparison.shapes_a["conv1"] == comparison.shapes_b["conv2"] == "positions, larger maps averaged down"
    assert comparison.shapes_a["fc"] == "matrix"
    assert comparison.widths_a == {"conv1": 4, "conv2": 5, "fc": 3}
    assert comparison.examples == 50
    assert "@" not in str(comparison)


def test_a_layer_without_a_map_meets_only_its_like(maps, images):
    table = nk.compare(maps(), maps(), images, layers=["conv1", "fc"], shape="positions", resize="average")["cka"]
    assert set(table.missing) == {("conv1", "fc"), ("fc", "conv1")}
    assert "gives 64 rows an example and layer 'fc' of 'b' 1; use a shape with one row" in table.missing["conv1", "fc"]


def test_maps_that_are_larger_one_way_and_smaller_the_other_meet_at_the_smaller_of_both():
    x, y = torch.randn(9, 2, 8, 4), torch.randn(9, 3, 4, 8)
    value = nk.compare({"x": x}, {"y": y}, shape="positions", resize="average")["x", "y"]
    rows = [nk.positions(adaptive_avg_pool2d(maps, (4, 4))) for maps in (x, y)]
    assert value == pytest.approx(float(nk.cka(*rows)), abs=1e-6)


def test_one_model_alone_and_several_models(maps, images):
    models = [maps(), maps(), maps()]
    options = {"layers": list(SIZES), "shape": "positions", "resize": "average"}
    alone = nk.compare(models[0], data=images, **options)
    assert alone["conv1", "conv2"] == alone["conv2", "conv1"]
    many = nk.compare_many(models, images, **options)
    pair = nk.compare(models[0], models[2], images, **options)
    assert many["0", "2"].to_numpy() == pytest.approx(pair.to_numpy(), abs=1e-9)
    assert models[1].calls == 2 + 1


def test_a_reason_names_an_averaged_map_with_its_size(worlds):
    still, moving = worlds.normal(9, 2, 4, 4) * 0, worlds.normal(9, 2, 2, 2)
    table = nk.compare({"x": still}, {"y": moving}, shape="positions", resize="average").table()
    assert table.missing["x", "y"].startswith("layer 'a/x@2x2' is constant over the 36 examples")


def test_other_ways_of_resizing_are_refused(maps, images):
    refusals(
        (lambda: nk.compare(maps(), data=images, shape="positions", resize="nearest"), UnknownName, "resize"),
        (lambda: nk.compare(maps(), data=images, shape="pool", resize="average"), InvalidValue, "resize"),
    )


def test_nan_is_refused_here_as_well(maps, images):
    images[7] = torch.nan
    how = {"layers": "conv*", "measures": ["cka_minibatch"], "shape": "positions", "resize": "average"}
    with pytest.raises(InvalidValue, match="the inputs in batch 0 hold 128 NaN or Inf"):
        nk.compare(maps(), data=images, **how)
    with pytest.raises(InvalidValue, match="layer 'conv1' of 'a' in batch 0 holds 256 NaN"):
        nk.compare(maps(), data=images.nan_to_num(), forward=lambda model, batch: model(images[: len(batch)]), **how)
