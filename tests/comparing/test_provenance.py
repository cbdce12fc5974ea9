"""Every comparison says what it is."""

import io
import sys
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.measures import registry
from netkin.results import Comparison, Comparisons
from netkin.statistics import Moments
from table_worlds import sentences


def test_all_that_is_known_goes_along(maps, images, layers):
    loader = DataLoader(TensorDataset(images), batch_size=16)
    comparison = nk.compare(maps(), maps(6), loader, ["svcca(variance=0.95)", "cka"], layers=layers, seed=7,
                            names=("small", "large"))  # fmt: skip
    assert (comparison.a, comparison.b) == ("small", "large")
    assert (comparison.data, comparison.examples, comparison.seed) == ("TensorDataset", 50, 7)
    assert comparison.shapes_a == {"conv1": "pool", "conv2": "pool", "fc": "matrix"}
    assert comparison.widths_b == {"conv1": 6, "conv2": 7, "fc": 3}
    assert comparison.provenance["model a"] == "Maps"
    assert comparison.provenance["plan"].startswith("Moments, streamed, products in float64: ")
    assert comparison.provenance["torch"] == torch.__version__
    facts = {"pairs": "all", "resize": "none", "products": "float64", "device b": "cpu", "transform a": "none"}
    assert facts.items() <= comparison.provenance.items()
    assert comparison.version == nk.__version__
    assert comparison.complete
    table = comparison["svcca"]
    assert (table.id, table.quantity.parameters) == ("svcca(variance=0.95)", {"variance": 0.95})
    assert (table.exactness, table.statistic) == ("exact", "Moments")
    assert table.quantity.convention
    assert comparison.measures == ("svcca(variance=0.95)", "cka")


def test_how_models_are_run_goes_along(maps, images):
    def halved(images):
        return images / 2

    facts = {"shape": "positions", "resize": "average", "device": "cpu", "pairs": [("conv1", "conv2")]}
    said = nk.compare(maps(), maps(), images, transforms=(None, halved), forward=lambda model, batch: model(batch),
                      layers=["conv1", "conv2"], **facts).provenance  # fmt: skip
    assert (said["transform a"], said["transform b"].rpartition(".")[2]) == ("none", "halved")
    assert said["forward a"].endswith("<lambda>")
    assert (said["resize"], said["pairs"], said["products"]) == ("average", "1 listed", "float32")
    recorded = nk.compare({"x": images.flatten(1).double()}, pairs="corresponding").provenance
    assert (recorded["model a"], recorded["device a"], recorded["products"]) == ("recorded", "cpu", "float64")
    assert recorded["pairs"] == "corresponding"


def test_every_table_says_what_it_was_read_from(maps, images):
    names = ["cka", "cka_rbf", "cka_minibatch(batch=16)"]
    streamed = nk.compare(maps(), data=images, measures=names, shape="pool")
    kept = nk.compare(maps(), data=images, measures=names, shape="flatten")
    assert [table.statistic for table in streamed.tables.values()] == ["Moments", "Rows", "Grams"]
    assert [table.statistic for table in kept.tables.values()] == ["Rows", "Rows", "Grams"]
    whitened = nk.compare(maps(), data=images, measures="svcca")["svcca"]
    assert "; rank: eigenvalues above max(n, p)·eps·λmax" in whitened.quantity.convention


def test_data_may_have_a_name(maps, images):
    class Named(list):
        name = "my images"

    assert nk.compare(maps(), data=Named([images])).data == "my images"
    assert nk.compare(maps(), data=images).data == "Tensor"
    assert nk.compare(maps(), data=TensorDataset(images)).data == "TensorDataset"


def test_few_examples_are_a_warning_in_the_result_and_nowhere_else(maps, images):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison = nk.compare(maps(), maps(), images[:7], ["cca_mean", "svcca", "cka"], layers=["conv1", "conv2"])
    warning, biased = sentences(comparison)
    assert biased.startswith("7 examples are few for layers of")
    assert "use `cka_debiased`" in biased
    assert warning.startswith("7 examples are fewer than the 5 + 5 features of the two layers")
    assert warning.endswith("10 examples would do, and 100 would leave little of that. This holds for 8 values.")
    assert sentences(nk.compare(maps(), maps(), images[:7], ["cka_debiased"], layers=["conv1", "conv2"])) == ()


def test_a_measure_asked_twice_is_answered_once(maps, images):
    asked = ["cka", nk.cka, "svcca(variance=0.99)", "svcca", registry.find("cka")]
    assert nk.compare(maps(), data=images, measures=asked).measures == ("cka", "svcca")
    assert nk.compare(maps(), data=images, measures=nk.nbs).measures == ("nbs",)


def test_measures_of_others_are_welcome(maps, images, monkeypatch):
    monkeypatch.setattr(registry, "_MEASURES", dict(registry.measures()))

    @nk.measure(higher_is_closer=False, bounds=(0, float("inf")), unchanged_by={"rotation"}, reference="us")
    def width_gap(moments: Moments, *, power: float = 1.0) -> torch.Tensor:
        """Return how much the widths differ."""
        return torch.tensor(float(abs(moments.x.width - moments.y.width) ** power))

    comparison = nk.compare(maps(), maps(9), images, ["width_gap(power=2)", width_gap], layers="conv1")
    assert comparison["width_gap(power=2.0)"]["conv1", "conv1"] == 25
    assert comparison["width_gap"]["conv1", "conv1"] == 5
    assert not comparison["width_gap"].higher_is_closer


def test_a_comparison_survives_the_disk(maps, images, tmp_path):
    measures = ["cka", "svcca(variance=0.9)", "cka_rbf", "cka_minibatch(batch=16)", "gulp"]
    comparison = nk.compare(maps(), maps(), images[:16], measures, shape="positions", layers=["conv1", "conv2"])
    comparison.save(tmp_path / "ab.netkin")
    assert Comparison.load(tmp_path / "ab.netkin") == comparison
    many = nk.compare_many([maps(), maps(), maps()], images, ["cka", "pwcca"])
    many.save(tmp_path / "many.netkin")
    again = Comparisons.load(tmp_path / "many.netkin")
    assert all(again[pair] == many[pair] for pair in many)


def test_quick_work_is_silent(maps, images, capfd):
    nk.compare(maps(), data=images)
    assert capfd.readouterr() == ("", "")


def test_after_two_seconds_progress_shows_on_stderr_only(maps, images, monkeypatch, capfd):
    start, passed = time.time(), [0.0]
    monkeypatch.setattr(time, "time", lambda: start + passed[0])
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)

    def slow():
        for batch in images.split(10):
            passed[0] += 0.9
            yield batch

    monkeypatch.setattr("tqdm.std.time", time.time)
    nk.compare(maps(), data=slow(), examples=50)
    assert "reading" in screen.getvalue()
    assert "/50" in screen.getvalue()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("bad", [3, ("a",), None])
def test_names_are_two(maps, images, bad):
    with pytest.raises(nk.NetkinError, match="`names` must be two texts; got"):
        nk.compare(maps(), maps(), images, names=bad)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 makes other programs")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_runs_as_a_whole_is_compared_as_one_layer_with_a_warning():
    net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.randn(20, 4)
    traced = torch.jit.trace(net.eval(), x)
    (said,) = [one for one in sentences(nk.compare(traced, net, x)) if "as one layer" in one]
    assert said.startswith("'a' is a ScriptModule, whose layers can't be seen: it is compared as one layer; compare")
    assert said.endswith("compare the network from which it was scripted or traced.")
    program = torch.export.export(net, (x,)).module()
    (said,) = [one for one in sentences(nk.compare(net, program, x)) if "as one layer" in one]
    assert said.startswith("'b' is the module of an exported program, whose layers can't be seen: it is compared")
    for found in (nk.compare(traced, traced, x, layers=[""]), nk.compare(net, net, x)):
        assert "as one layer" not in " ".join(sentences(found))
