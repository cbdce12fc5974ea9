"""The claims about learning dynamics, on toys: what they measure is what they say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from netkin.errors import SourceError
from netkin.sources.architectures import ResNet, seeded, svcca_convnet
from reproductions.laboratory import Lab, Run
from reproductions.svcca import bottom_up, recurrent


def resnet():
    return ResNet((2, 2), (4, 6))


class Shelf:
    """A laboratory whose runs are made by hand: each layer takes its final weights in the order asked for."""

    scale, device = "cpu", torch.device("cpu")

    def __init__(self, upwards=True):
        self.upwards = upwards

    def seeds(self, count):
        return range(2)

    def trained_all(self, names_and_seeds):
        return [self.trained(*one) for one in names_and_seeds]

    def trained(self, network, seed=0):
        build = resnet if network == "resnet" else lambda: svcca_convnet(width=4)
        start, end = (seeded(build, one + 2 * seed).state_dict() for one in (0, 1))
        owners = list(dict.fromkeys(key.rpartition(".")[0] for key in start))
        states = {}
        for step in (0, len(owners) // 4, len(owners) // 2, 3 * len(owners) // 4, len(owners)):
            done = owners[:step] if self.upwards else owners[len(owners) - step :]
            states[step] = {key: end[key] if key.rpartition(".")[0] in done else start[key] for key in start}
        model = build()
        model.load_state_dict(end)
        return Run(model.eval(), states, [], build)

    def probe(self, count):
        return torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def test_runs_from_the_bottom_up_hold_and_others_do_not(monkeypatch):
    # 60 examples fill the space of a linear layer of 512
    narrow = ("relu1", "relu2", "pool1", "relu3", "relu4", "relu5", "out")
    monkeypatch.setattr(bottom_up, "CONVNET", narrow)
    found = bottom_up.bottom_up(Shelf())
    assert found.verdict == "holds"
    for network in bottom_up.NETWORKS:
        assert found.measured[f"{network}: τ of depth and the step of reaching 0.9"].value > 0.7
    curve = found.curves["Each layer of the convnet and its final state"]
    assert curve["out"][-1] == pytest.approx(1)
    assert list(curve)[1:] == list(bottom_up.CONVNET)
    # from the top down a layer is as it will be only when all below it are: nothing settles before the end
    assert bottom_up.bottom_up(Shelf(upwards=False)).verdict == "does not hold"


def test_batch_norms_are_those_before_which_a_layer_stands():
    model = resnet()
    assert bottom_up._norms(model, "resnet")[:3] == [
        ("conv1", "bn1"), ("layer1.0.conv1", "layer1.0.bn1"), ("layer1.0.conv2", "layer1.0.bn2"),
    ]  # fmt: skip
    assert bottom_up._norms(model, "convnet") == [
        ("relu2", "bn1"), ("relu5", "bn2"), ("relu6", "bn3"), ("relu7", "bn4"),
    ]  # fmt: skip
    assert bottom_up._others(model, "convnet") == [
        ("relu1", "relu2"), ("pool1", "relu3"), ("relu3", "relu4"), ("relu4", "relu5"), ("bn3", "relu7"),
        ("bn4", "out"),
    ]  # fmt: skip


def test_a_batch_norm_is_nothing_to_cca():
    found = bottom_up.batch_norm(Shelf())
    for network in bottom_up.NETWORKS:
        assert found.measured[f"{network}: by CCA without the SVD"].value == pytest.approx(1, abs=1e-6)


def test_blocks_that_add_nothing_make_the_clearest_stripes(monkeypatch):
    trained = Shelf.trained

    def straight(self, network, seed=0):
        run = trained(self, network, seed)
        for module in run.model.modules():
            if type(module).__name__ == "BasicBlock":
                nn.init.zeros_(module.bn2.weight)
        return run

    monkeypatch.setattr(Shelf, "trained", straight)
    found = bottom_up.stripes(Shelf())
    assert found.measured["resnet: SVCCA of a block's input and its output"].value == pytest.approx(1, abs=1e-6)
    assert found.measured["resnet: SVCCA of a block's input and the layer inside"].value < 0.99


def test_blocks_are_looked_at_whose_skip_is_the_identity():
    assert bottom_up._outer(resnet()) == [
        ("relu", "layer1.0"), ("layer1.0", "layer1.1"), ("layer2.0", "layer2.1"),
    ]  # fmt: skip
    assert bottom_up._inner(resnet())[0] == ("relu", "layer1.0.relu1")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A laboratory with a small text, and a short training of small networks."""
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("to be or not to be, that is the question. " * 80)
    sizes = {"width": 8, "depth": 2, "window": 16, "batch": 16, "steps": 40, "rate": 0.02, "seeds": 2, "pieces": 20}
    monkeypatch.setitem(recurrent.SETTINGS, "cpu", replace(recurrent.SETTINGS["cpu"], **sizes))
    return Lab("cpu", data=tmp_path)


def test_a_stacked_lstm_is_followed(library):
    found = recurrent.recurrent(library)
    curve = found.curves["Each LSTM layer and its final state"]
    assert list(curve) == ["step", "lstm1", "lstm2"]
    assert curve["step"][-1] == 40
    np.testing.assert_allclose([curve["lstm1"][-1], curve["lstm2"][-1]], 1, atol=1e-6)
    assert found.measured["loss on held-out text"].value < np.log(17)
    gap = found.measured["lstm1 ahead of lstm2"].value
    means = [found.measured[f"{layer}: mean similarity over time"].value for layer in ("lstm1", "lstm2")]
    assert gap == pytest.approx(means[0] - means[1])


def test_the_same_seed_trains_the_same_lstm(library):
    one, other = (recurrent.followed(library, 1) for _ in range(2))
    assert one[1] == other[1]
    np.testing.assert_array_equal(one[0].to_numpy(), other[0].to_numpy())


def test_without_the_text_the_claim_is_refused(monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    with pytest.raises(SourceError, match="this claim reads tiny Shakespeare"):
        recurrent.recurrent(Lab("cpu"))
