"""``shape="dft"``: whole models, frequency by frequency."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

import netkin as nk
from netkin.comparing import explain
from netkin.errors import InvalidValue, MemoryLimit, ShapeError
from netkin.measures import measures
from netkin.statistics import Moments, Spectra
from netkin.statistics.storage import to_plain
from refusals import refused
from table_worlds import sentences

LAYERS = ["conv1", "conv2", "fc"]
READABLE = [
    name for name, found in measures().items() if found.facts.reads is Moments and name not in ("pwcca", "cka_debiased")
]
UNREADABLE = ["cka_rbf", "cka_rbf_debiased", "cka_minibatch", "pwcca", "cka_debiased"]


@pytest.fixture
def images():
    return torch.randn(50, 2, 8, 8, dtype=torch.float64)


@pytest.fixture
def nets(maps):
    """Two nets in float64, of different widths; maps of 8 × 8 and 4 × 4, and a head without space."""
    return maps().double(), maps(3).double()


def direct(measure, a, b, x, y, images):
    """Return the value of a pair from the maps themselves."""
    rows = [nk.activations(model, layer, images, shape="dft")[layer] for model, layer in ((a, x), (b, y))]
    return float(measures()[measure](Spectra.of(*rows)))


def test_every_pair_is_that_of_the_maps(nets, images):
    comparison = nk.compare(*nets, list(images.split(9)), READABLE, layers=LAYERS, shape="dft")
    a, b = (nk.activations(net, LAYERS, images, shape="dft") for net in nets)
    pairs = {(x, y): Spectra.of(a[x], b[y]) for x in LAYERS for y in LAYERS}
    for name in READABLE:
        assert not comparison[name].missing
        for (x, y), pair in pairs.items():
            plain = float(measures()[name](pair))
            assert comparison[name][x, y] == pytest.approx(plain, abs=1e-7, rel=1e-7), (name, x, y)


def test_data_in_float32_give_the_same_to_its_precision(maps, images):
    a, b = maps(), maps(3)
    names = ["cka", "cca_mean", "svcca", "nbs"]
    comparison = nk.compare(a, b, list(images.float().split(20)), names, layers=LAYERS, shape="dft")
    for name in names:
        plain = direct(name, a, b, "conv1", "conv2", images.float())
        assert comparison[name]["conv1", "conv2"] == pytest.approx(plain, abs=1e-6)


def test_the_result_says_what_it_is(nets, images):
    comparison = nk.compare(*nets, images, ["cca_mean"], layers=LAYERS, shape="dft")
    common = "dft, frequencies common to maps of different sizes"
    assert comparison.shapes_a == {"conv1": common, "conv2": common, "fc": "matrix"}
    assert comparison.widths_a == {"conv1": 4 * 64, "conv2": 5 * 16, "fc": 3}
    assert comparison.examples == 50
    table = comparison["cca_mean"]
    assert table.statistic == "Spectra"
    assert comparison.provenance["plan"].startswith("Spectra, streamed, products in float64")
    assert comparison.provenance["products"] == "float64"
    found = re.fullmatch(
        r"exact for data closed under translation; here ([\d.]+)% to ([\d.]+)% of a layer's covariance energy lies off "
        "the blocks",
        table.exactness,
    )
    rows = [nk.activations(nets[0], layer, images, shape="dft")[layer] for layer in ("conv1", "conv2")]
    shares = [100 * nk.off_block_share(maps) for maps in rows]
    assert float(found[1]) <= min(shares) + 0.1
    assert float(found[2]) >= max(shares) - 0.1


def test_layers_that_meet_their_like_alone_are_plainly_dft(nets, images):
    comparison = nk.compare(*nets, images, layers=LAYERS, shape="dft", pairs="corresponding")
    assert comparison.shapes_a == {"conv1": "dft", "conv2": "dft", "fc": "matrix"}


def test_of_many_examples_a_sample_tells_the_share(nets):
    images = torch.randn(90, 2, 8, 8, dtype=torch.float64)
    table = nk.compare(*nets, images, layers=["conv1"], shape="dft").table()
    assert table.exactness.endswith(
        "% of a layer's covariance energy lies off the blocks (on a sample of 64 of 90 examples)"
    )


def test_data_closed_under_translation_are_exact(worlds):
    base = worlds.normal(8, 2, 4, 4)
    images = torch.from_numpy(np.concatenate([np.roll(base, (i, j), (2, 3)) for i in range(4) for j in range(4)]))
    torch.manual_seed(0)
    circular = {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "dtype": torch.float64}
    net = nn.Sequential(nn.Conv2d(2, 3, **circular), nn.ReLU(), nn.Conv2d(3, 3, **circular), nn.ReLU(), nn.AvgPool2d(2))
    options = {"data": images, "measures": ["cca_mean", "cka"], "layers": ["0", "1", "3", "4"]}
    dft, flat = (nk.compare(net, shape=shape, **options) for shape in ("dft", "flatten"))
    assert dft.to_numpy() == pytest.approx(flat.to_numpy(), abs=1e-8)
    assert "here 0.0% of a layer's covariance energy" in dft["cka"].exactness


def test_larger_maps_are_averaged_down_if_asked(nets, images):
    comparison = nk.compare(*nets, images, ["cca_mean"], layers=LAYERS, shape="dft", resize="average")
    assert comparison.shapes_a["conv1"] == comparison.shapes_b["conv2"] == "dft, larger maps averaged down"
    assert comparison.provenance["resize"] == "average"
    large, small = (
        nk.activations(net, layer, images, shape="dft")[layer] for net, layer in zip(nets, LAYERS[:2], strict=True)
    )
    expected = float(nk.dft_cca(adaptive_avg_pool2d(large, 4), small))
    assert comparison["conv1", "conv2"] == pytest.approx(expected, abs=1e-9)
    assert comparison["conv1", "conv1"] == pytest.approx(direct("cca_mean", *nets, "conv1", "conv1", images), abs=1e-9)
    assert comparison["conv1", "fc"] == pytest.approx(direct("cca_mean", *nets, "conv1", "fc", images), abs=1e-9)


def test_sizes_that_do_not_divide_each_other_leave_a_hole(worlds):
    a, b = {"x": worlds.normal(20, 2, 6, 6)}, {"y": worlds.normal(20, 2, 4, 4), "z": worlds.normal(20, 2, 6, 6)}
    table = nk.compare(a, b, shape="dft").table()
    assert set(table.missing) == {("x", "y")}
    assert table.missing["x", "y"] == (
        "layer 'x' of 'a' has maps of 6 × 6 and layer 'y' of 'b' of 4 × 4, of which neither divides the other, so they "
        'share no frequencies; say resize="average" to average maps down to one size.'
    )
    assert not nk.compare(a, b, shape="dft", resize="average").table().missing


@pytest.mark.parametrize("name", UNREADABLE)
def test_measures_that_spectra_can_not_serve_are_refused_at_once(nets, images, name):
    sentence = (
        f"'{name}' can't be read from spectra, which hold moments for each frequency and no rows; with shape='dft'"
    )
    with pytest.raises(InvalidValue, match=sentence):
        nk.compare(*nets, images, ["cka", name], layers=LAYERS, shape="dft")
    assert explain(*nets, images, [name], layers=LAYERS, shape="dft").refused.startswith(sentence)


def test_layers_without_any_map_are_compared_as_ever(worlds):
    rows = {"x": worlds.normal(30, 4)}, {"y": worlds.normal(30, 3)}
    assert nk.compare(*rows, shape="dft")["x", "y"] == nk.compare(*rows)["x", "y"]
    assert nk.compare(*rows, measures="cka_rbf", shape="dft").table().statistic == "Rows"


def test_a_map_of_one_place_is_a_layer_without_space(worlds):
    X, Y = worlds.normal(30, 2, 8, 8), worlds.normal(30, 3, 1, 1)
    comparison = nk.compare({"x": X, "y": Y}, shape="dft", measures=["cca_mean"])
    assert comparison["x", "y"] == pytest.approx(nk.dft_cca(X, Y[..., 0, 0]), abs=1e-10)
    assert comparison["x", "y"] == pytest.approx(nk.dft_cca(X, Y), abs=1e-10)
    assert comparison.shapes_a == {"x": "dft", "y": "dft"}


def test_tokens_are_refused_with_shapes_that_fit(words, sentences):
    with pytest.raises(
        ShapeError, match=r"shape 'dft' does not fit an output of shape.*taken as n × tokens × features"
    ):
        nk.compare(words(), data=sentences, layers=["layer.0"], shape="dft")


def test_some_layers_by_frequency_and_some_by_their_mean(nets, images):
    mixed = nk.compare(*nets, images, layers=LAYERS, shape={"conv1": "dft", "conv2": "pool"})
    assert mixed.shapes_a == {"conv1": "dft", "conv2": "pool", "fc": "matrix"}
    large = nk.activations(nets[0], "conv1", images, shape="dft")["conv1"]
    small = nk.activations(nets[1], "conv2", images, shape="pool")["conv2"]
    assert mixed["conv1", "conv2"] == pytest.approx(float(nk.cka(Spectra.of(large, small))), abs=1e-9)
    with refused(InvalidValue, "shape"):
        nk.compare(*nets, images, shape={"conv1": "dft", "*": "positions"})


def test_one_model_alone_and_several_models(maps, images):
    models = [maps().double() for _ in range(3)]
    options = {"measures": ["cca_mean"], "layers": LAYERS, "shape": "dft"}
    alone = nk.compare(models[0], data=images, **options)
    assert alone["conv1", "conv2"] == alone["conv2", "conv1"]
    assert alone["conv1", "conv1"] == pytest.approx(1)
    many = nk.compare_many(models, images, **options)
    pair = nk.compare(models[0], models[2], images, **options)
    assert many["0", "2"].to_numpy() == pytest.approx(pair.to_numpy(), abs=1e-9)
    assert models[1].calls == 1 + 2  # and two runs of few examples, which show the layers


def test_a_saved_result_keeps_what_it_is(nets, images, tmp_path):
    comparison = nk.compare(*nets, images, layers=LAYERS, shape="dft")
    comparison.save(tmp_path / "dft.netkin")
    again = nk.load(tmp_path / "dft.netkin")
    assert again.shapes_a == comparison.shapes_a
    assert again.table().exactness == comparison.table().exactness


def test_the_plan_is_that_of_the_comparison(nets, images):
    asked = {"data": images, "measures": ["svcca", "cka"], "layers": LAYERS, "shape": "dft"}
    plan, done = explain(*nets, **asked), nk.compare(*nets, **asked)
    assert plan.measures["svcca"].startswith(
        "Spectra, streamed, products in float64, as they hold any number of examples"
    )
    assert done.provenance["plan"].startswith("Spectra, streamed, products in float64: ")
    assert plan.widths == {"a": done.widths_a, "b": done.widths_b}
    assert plan.pairs == 9
    fewer = explain(*nets, **asked, pairs="corresponding")
    assert fewer.bytes < plan.bytes


def test_the_plan_names_what_will_have_no_value(worlds):
    plan = explain({"x": worlds.normal(9, 2, 6, 6)}, {"y": worlds.normal(9, 2, 4, 4)}, shape="dft")
    assert "without a value: 1; layer 'x' of 'a' has maps of 6 × 6" in str(plan)


def test_memory_held_is_what_was_planned(worlds):
    """The sums of a pass take what the plan says, and no more than that."""
    arrays = {"x": worlds.normal(200, 12, 16, 16), "y": worlds.normal(200, 20, 8, 8)}
    plan = explain(arrays, measures=["cca_mean"], shape="dft")
    collector = nk.LayerSpectra([(["x", "y"], ["x", "y"])])
    collector.update(arrays)
    to_plain(collector, tensors := {}, "")
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held < plan.bytes < 12 * held


def test_a_limit_is_kept_with_ways_out(nets, images):
    with refused(MemoryLimit, "memory"):
        nk.compare(*nets, images, layers=LAYERS, shape="dft", memory=10_000)


def test_maps_that_change_their_size_are_refused(maps):
    batches = [torch.randn(40, 2, 8, 8), torch.randn(40, 2, 16, 16)]
    with pytest.raises(
        ShapeError,
        match="layer 'a/conv1' gave 4 channels of 16 × 16 and 4 channels of 8 × 8 before; bring all",
    ):
        nk.compare(maps(), maps(), batches, layers=["conv1"], shape="dft")
    with pytest.raises(ShapeError, match="layer 'a/conv1' gave maps of 16 × 16 and of 8 × 8 before; bring all inputs"):
        nk.compare(maps(), maps(), batches, layers=["conv1", "conv2"], shape="dft", resize="average")


def test_nan_is_refused_by_the_name_of_its_layer(maps, images):
    images = images.float()
    images[7] = torch.nan
    batches = [torch.ones_like(images[20:]), torch.zeros_like(images[:20])]

    def spoiling(model, batch):
        return model((images[20:] if batch.any() else images[:20])[: len(batch)])

    with pytest.raises(InvalidValue, match="layer 'conv1' of 'a' in batch 1 holds 256 NaN"):
        nk.compare(maps(), maps(), batches, layers="conv*", shape="dft", forward=spoiling)


def test_a_layer_that_does_not_vary_is_a_hole(worlds):
    still = np.ones((20, 2, 4, 4))
    table = nk.compare(
        {"x": still, "z": worlds.normal(20, 2, 4, 4)}, {"y": worlds.normal(20, 2, 4, 4)}, shape="dft"
    ).table()
    assert table.missing["x", "y"].startswith("layer 'a/x' is constant over the 20 examples (width 32)")
    assert 0 < table["z", "y"] < 1


def test_few_examples_are_warned_of_frequency_by_frequency(worlds):
    rows = [{"x": worlds.normal(5, 3, 4, 4)} for _ in range(2)]
    comparison = nk.compare(*rows, measures=["cca_mean"], shape="dft")
    assert (
        "5 examples are fewer than the 3 + 3 features of the two layers at each frequency" in sentences(comparison)[0]
    )


def test_three_examples_tell_no_share(worlds):
    rows = [{"x": worlds.normal(3, 1, 4, 4)} for _ in range(2)]
    assert nk.compare(*rows, shape="dft").table().exactness == "exact for data closed under translation"


def test_the_model_is_as_before(maps, images, state_of):
    model = maps().train()
    before = state_of(model)
    nk.compare(model, data=images.float(), layers=LAYERS, shape="dft")
    model.calls = 0
    assert state_of(model) == before


def test_an_interruption_keeps_what_is_finished(maps, images):
    class Interrupted:
        def __iter__(self):
            yield images.float()
            raise KeyboardInterrupt

    comparison = nk.compare(maps(), maps(), Interrupted(), layers=LAYERS, shape="dft", partial=True)
    assert comparison.examples == 50
    assert not comparison.table().missing
