"""The claims about directions and classes, on toys: what they measure is what they say."""

from dataclasses import replace

import pytest
import torch

import netkin as nk
from netkin.errors import SourceError
from netkin.sources.architectures import ResNet, svcca_convnet
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Lab, Network
from reproductions.svcca import few_directions, networks, subspaces, toy

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(tmp_path_factory, with_few_images):
    """A laboratory of digits with small networks, trained for an epoch or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        small = {
            "convnet": Network(lambda: svcca_convnet(width=2), Recipe(epochs=2, batch=64, lr=0.02)),
            "resnet": Network(lambda: ResNet((1, 1, 1), (4, 4, 4)), Recipe(epochs=1, batch=64, lr=0.05)),
        }
        patch.setitem(laboratory.RECIPES, "cpu", small)
        patch.setitem(few_directions.PAIRS, "cpu", 1)
        yield with_few_images(Lab("cpu", cache=tmp_path_factory.mktemp("cache")), 1100, 200)


def test_known_subspaces(lab):
    found = subspaces.known_subspaces(lab)
    assert found.verdict == "holds"
    assert found.measured["directions kept of B"].value == 50
    assert found.measured["directions kept of C"].value == 198
    for measure, rest, value in (("cca_mean", "noise", 0.25), ("cca_mean", "other useful directions", 0.25),
                                 ("svcca", "noise", 1.0), ("svcca", "other useful directions", 0.25)):  # fmt: skip
        name = f"{measure} of two layers that share A beside {rest}"
        assert found.measured[name].value == pytest.approx(value, abs=0.01)


def test_recovered_signal(lab):
    found = subspaces.recovered_signal(lab)
    assert found.verdict == "holds"
    assert found.measured["correlation of the recovered with the original neurons"].value > 0.99999


def test_covariances_of_images_in_all_shifts_are_diagonal(lab):
    found = subspaces.diagonal_of_shifts(lab)
    assert found.verdict == "holds"
    assert found.measured[subspaces.PIXELS].value > 0.1


def test_toy_nets(lab, monkeypatch):
    for name, value in {"PAIRS": 1, "WIDTH": 100}.items():
        monkeypatch.setattr(toy, name, value)
    directions, projection = toy.toy_directions(lab), toy.toy_projection(lab)
    assert directions.measured["relative error of the networks on new points"].value < 0.02
    assert directions.measured[toy.ALIKE].value > 0.98
    few, many = (projection.measured[f"error of the output on {k} of 100 directions"].value for k in (2, 30))
    assert many < 0.05 < few
    assert projection.controls.keys() == {f"error of the output on {k} of 100 directions" for k in toy.FEW}


def test_the_tail_of_a_chain_is_the_rest_of_the_network(lab):
    model, images = lab.trained("convnet", 0).model, lab.probe(50)
    for layer in few_directions.LAYERS.values():
        with torch.no_grad():
            rest = few_directions.tail(model, layer)(nk.run_until(model, layer, images))
            torch.testing.assert_close(rest, model(images))


def test_few_directions(lab, monkeypatch):
    monkeypatch.setattr(few_directions, "COUNTS", (5, 512))
    monkeypatch.setattr(few_directions, "DRAWS", 1)
    found = few_directions.few_directions(lab)
    assert found.measured["test accuracy"].value == pytest.approx(
        sum(lab.accuracy(lab.trained("convnet", seed).model) for seed in (0, 1)) / 2
    )
    curve = found.curves["Test accuracy on k directions or neurons of fc1"]
    assert curve["random neurons"][-1] == pytest.approx(found.measured["test accuracy"].value, abs=1e-3)
    assert curve["directions"][-1] is None  # 512 were not kept
    assert 0.5 < found.measured[few_directions.KEPT].value <= 1.1
    first = next(few_directions._layers(lab, "fc1"))
    variances = first.principal.directions(first.features).var(0)[:25]  # orthonormal over the training images
    assert first.principal.patterns.square().sum(1).diff().max() <= 1e-6  # by falling variance
    assert variances.min() > 0


def test_distributed(lab, monkeypatch):
    monkeypatch.setattr(few_directions, "COUNTS", (1, 2, 3, 5, 10))
    found = few_directions.distributed(lab)
    whole = found.measured["fc1: test accuracy on 20 directions"].value
    lost = found.measured["fc1: test accuracy lost by 20 neurons of 20 directions"].value
    assert -0.05 <= lost <= whole
    assert 1 <= found.measured["fc1: neurons for each of 20 directions"].value <= 25.6


def test_single_neurons_as_directions_project_as_predicting_from_them_does(lab):
    side = next(few_directions._layers(lab, "fc1")).side
    neurons = nk.largest_neurons(side, 5, rest="predicted")
    encode, decode = few_directions.axis_aligned(side, 5).projection(5)
    torch.testing.assert_close(encode @ decode, neurons.encode @ neurons.decode, atol=1e-4, rtol=1e-3)


def test_classes_need_animals_and_vehicles(lab):
    with pytest.raises(SourceError, match="cats, dogs, cars and trucks and needs CIFAR-10; pass --data DIR"):
        networks.classes(lab)


def test_classes(lab, monkeypatch):
    renamed = replace(lab.images(), classes=CLASSES)
    monkeypatch.setattr(lab, "images", lambda: renamed)
    monkeypatch.setitem(networks.SEEDS, "cpu", 2)
    found = networks.classes(lab)
    (sensitivity,) = networks._sensitivities(lab, [lab.trained("resnet", 0)], trained=True)
    expected = sum(abs(sensitivity[layer, "cat"] - sensitivity[layer, "dog"]) for layer in sensitivity.layers_a[:-1])
    assert networks.distance(sensitivity, "cat", "dog") == pytest.approx(expected / (len(sensitivity.layers_a) - 1))
    assert "the logits themselves" in sensitivity["cca_mean"].missing[sensitivity.layers_a[-1], "cat"]
    assert 1 <= found.measured["resnet: rank of cat and dog among 45 pairs"].value <= 45
    name = "resnet: how much nearer cat and dog are than an animal and a vehicle"
    before = networks._sensitivities(lab, lab.trained_all([("resnet", 0), ("resnet", 1)]), trained=False)
    values = [networks._nearer(one, "cat", "dog") for one in before]
    assert found.controls[name].value == pytest.approx(sum(values) / 2)
