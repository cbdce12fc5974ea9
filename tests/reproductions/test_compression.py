"""The claim about compression, on a small network: what it measures is what it says."""

import pytest

from netkin.sources.architectures import svcca_convnet
from netkin.training import Recipe, accuracy
from reproductions import laboratory
from reproductions.laboratory import Lab, Network
from reproductions.svcca import compression


@pytest.fixture(scope="module")
def lab(tmp_path_factory, with_few_images):
    """A laboratory of digits with a small network, trained for an epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        small = {"convnet": Network(lambda: svcca_convnet(width=1), Recipe(epochs=1, batch=64, lr=0.02))}
        patch.setitem(laboratory.RECIPES, "cpu", small)
        yield with_few_images(Lab("cpu", cache=tmp_path_factory.mktemp("cache")), 600, 200)


@pytest.mark.slow
def test_the_top_of_a_network_is_the_network(lab):
    model = lab.trained("convnet", 0).model
    top = compression.Top.of(lab, model)
    assert accuracy(top.net, top.test) == pytest.approx(lab.accuracy(model))


def test_the_share_of_the_width_leaves_so_many_parameters(lab):
    net = compression.Top.of(lab, lab.trained("convnet", 0).model).net
    share, layers = compression.share_of_width(net), [net.get_submodule(name) for name in compression.LAYERS]
    before = sum(layer.weight.numel() for layer in layers)
    after = sum(share * layer.in_features * (layer.in_features + layer.out_features) for layer in layers)
    assert after / before == pytest.approx(0.35)


@pytest.mark.slow
def test_compression(lab, monkeypatch):
    monkeypatch.setitem(compression.NETS, "cpu", 2)
    found = compression.compression(lab)
    measured = {name: one.value for name, one in found.measured.items()}
    assert measured["share of the parameters"] == pytest.approx(0.35, abs=0.01)
    assert measured["share of the parameters at 0.35 of the width"] > measured["share of the parameters"]
    at_all = [lab.accuracy(lab.trained("convnet", seed).model) for seed in (0, 1)]
    assert measured["test accuracy"] == pytest.approx(sum(at_all) / 2)
    line = found.curves["Test accuracy, compressed one after the other"]["against the logits"]
    assert line[0] - line[-1] == pytest.approx(measured[compression.LOST])
    control = found.curves["Test accuracy, compressed one after the other"]["against a network before training"]
    assert control[0] - control[-1] == pytest.approx(found.controls[compression.LOST].value)


@pytest.mark.slow
def test_compression_by_directions(lab, monkeypatch):
    monkeypatch.setitem(compression.NETS, "cpu", 2)
    found = compression.compression_by_directions(lab)
    ours, control = (some[compression.LOST_BY_DIRECTIONS].value for some in (found.measured, found.controls))
    gap = found.measured[f"{compression.LOST_BY_DIRECTIONS}, less than against a network before training"].value
    assert gap == pytest.approx(control - ours)
    by_parameters = compression.compression(lab).measured
    assert ours == pytest.approx(by_parameters["test accuracy lost at 0.35 of the width"].value)
    share = by_parameters["share of the parameters at 0.35 of the width"].value
    assert found.measured["share of the parameters"].value == pytest.approx(share)
