"""The claims about learning dynamics, on toys: what they measure is what they say."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from netkin.errors import SourceError
from netkin.sources.architectures import CharLSTM, ResNet, seeded, svcca_convnet
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Lab, Network, Run
from reproductions.svcca import bottom_up, neighbours


def resnet():
    return ResNet((2, 2), (4, 6))


class Shelf:
    """A laboratory whose runs are made by hand: each layer takes its final weights in the order asked for."""

    scale, device = "cpu", torch.device("cpu")

    def __init__(self, upwards=True):
        self.upwards = upwards

    def seeds(self, count):
        return range(3)

    def over(self, work, tasks):
        return [work(self, task) for task in tasks]

    def fresh(self, network, seed):
        return seeded(resnet if network == "resnet" else lambda: svcca_convnet(width=4), seed)

    def settled(self, model):
        return model

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
        return Run(model.eval(), states, [{"accuracy": 0.5}], build)

    def probe(self, count):
        return torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.mark.slow
def test_runs_from_the_bottom_up_hold_where_their_controls_do_not(monkeypatch):
    # 60 examples fill the space of a linear layer of 512
    narrow = ("relu1", "relu2", "pool1", "relu3", "relu4", "relu5", "out")
    monkeypatch.setattr(bottom_up, "CONVNET", narrow)
    found = bottom_up.bottom_up(Shelf())
    for network in bottom_up.NETWORKS:
        name = f"{network}: {bottom_up.TAU}"
        assert found.measured[name].value > 0.7
        assert found.controls[name].n == found.controls[f"{network}, straight line: {bottom_up.TAU}"].n == 3
    curve = found.curves["Each layer of the convnet and its final state, trained"]
    assert curve["out"][-1] == pytest.approx(1)
    assert list(curve)[1:] == list(bottom_up.CONVNET)
    # from the top down a layer is as it will be only when all below it are: nothing settles before the end
    monkeypatch.setattr(bottom_up, "NETWORKS", ("resnet",))
    assert bottom_up.bottom_up(Shelf(upwards=False)).verdict == "does not hold"


@pytest.mark.parametrize(
    "learned, walk, line, found",
    [
        ([0.8, 0.81, 0.79], [0.1, 0.1, 0.1], [0.2, 0.2, 0.2], True),
        ([0.8, 0.81, 0.79], [0.8, 0.81, 0.8], [0.2, 0.2, 0.2], None),  # the control gives as much
        ([0.8, 0.81, 0.79], [0.1, 0.1, 0.1], [0.9, 0.9, 0.91], False),  # and here more
        ([0.8, 0.1, 0.4], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], None),  # two standard errors are not enough for three
    ],
)
def test_bottom_up_is_more_than_networks_that_never_learn_show(monkeypatch, learned, walk, line, found):
    monkeypatch.setattr(bottom_up, "order", lambda one, mark, layers: one)
    assert bottom_up._ahead({"trained": learned, "random walk": walk, "straight line": line}, []).decision is found


def test_a_random_walk_is_as_long_as_the_training_and_a_line_ends_at_the_other_network():
    run, other = Shelf().trained("resnet"), seeded(resnet, 9)
    steps = list(run.checkpoints)
    walk = bottom_up.unlearned(run.checkpoints, run.model, other, "random walk", seed=0)
    name = "layer1.0.conv1.weight"
    for before, step in pairwise(steps):
        ours = (walk[step][name] - walk[before][name]).norm()
        torch.testing.assert_close(ours, (run.checkpoints[step][name] - run.checkpoints[before][name]).norm())
    assert torch.equal(walk[0][name], run.checkpoints[0][name])
    line = bottom_up.unlearned(run.checkpoints, run.model, other, "straight line", seed=0)
    torch.testing.assert_close(line[steps[-1]][name], other.state_dict()[name])
    middle = torch.lerp(run.checkpoints[0][name], other.state_dict()[name], steps[2] / steps[-1])
    torch.testing.assert_close(line[steps[2]][name], middle)


def test_batch_norms_are_those_before_which_a_layer_stands():
    model = resnet()
    assert neighbours._norms(model, "resnet")[:3] == [
        ("conv1", "bn1"), ("layer1.0.conv1", "layer1.0.bn1"), ("layer1.0.conv2", "layer1.0.bn2"),
    ]  # fmt: skip
    assert neighbours._norms(model, "convnet") == [
        ("relu2", "bn1"), ("relu5", "bn2"), ("relu6", "bn3"), ("relu7", "bn4"),
    ]  # fmt: skip
    assert neighbours._others(model, "convnet") == [
        ("relu1", "relu2"), ("pool1", "relu3"), ("relu3", "relu4"), ("relu4", "relu5"), ("bn3", "relu7"),
        ("bn4", "out"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_batch_norm_is_nothing_to_cca():
    found = neighbours.batch_norm(Shelf())
    for network in bottom_up.NETWORKS:
        assert found.measured[f"{network}: by CCA without the SVD"].value == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_blocks_that_add_nothing_make_the_clearest_stripes(monkeypatch):
    trained = Shelf.trained

    def straight(self, network, seed=0):
        run = trained(self, network, seed)
        for module in run.model.modules():
            if type(module).__name__ == "BasicBlock":
                nn.init.zeros_(module.bn2.weight)
        return run

    monkeypatch.setattr(Shelf, "trained", straight)
    found = neighbours.stripes(Shelf())
    assert found.measured["SVCCA of a block's input and its output"].value == pytest.approx(1, abs=1e-6)
    assert found.measured["SVCCA of a block's input and the layer inside"].value < 0.99


def test_blocks_are_looked_at_whose_skip_is_the_identity():
    assert neighbours._outer(resnet()) == [
        ("relu", "layer1.0"), ("layer1.0", "layer1.1"), ("layer2.0", "layer2.1"),
    ]  # fmt: skip
    assert neighbours._inner(resnet())[0] == ("relu", "layer1.0.relu1")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A laboratory with a small text, and a short training of small networks."""
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("to be or not to be, that is the question. " * 80)
    recipe = Recipe(steps=40, batch=16, lr=0.02, optimizer="adam", order="drawn")
    monkeypatch.setitem(laboratory.RECIPES["cpu"], "lstm", Network(lambda: CharLSTM(17, 8, 2), recipe, "text"))
    monkeypatch.setitem(laboratory.WINDOW, "cpu", 16)
    monkeypatch.setitem(bottom_up.SEEDS, "cpu", 2)
    monkeypatch.setitem(bottom_up.PIECES, "cpu", 20)
    return Lab("cpu", data=tmp_path, cache=tmp_path / "cache")


@pytest.mark.slow
def test_a_stacked_lstm_is_followed(library):
    found = bottom_up.recurrent(library)
    curve = found.curves["Each LSTM layer and its final state, trained"]
    assert list(curve) == ["step", "lstm1", "lstm2"]
    assert curve["step"][-1] == 40
    np.testing.assert_allclose([curve["lstm1"][-1], curve["lstm2"][-1]], 1, atol=1e-6)
    assert found.measured["loss on held-out text"].value < np.log(17)
    assert found.controls[bottom_up.TAU].n == 2


def test_text_that_is_held_out_is_not_trained_on(library):
    inputs, _ = library.pieces()
    assert len(library.held_out(20)[0]) == 20
    assert library._text_kept == len(inputs) // 5
    assert torch.equal(library.held_out(5)[0], inputs[-5:])


def test_without_the_text_the_claim_is_refused(monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    with pytest.raises(SourceError, match="this claim reads tiny Shakespeare"):
        bottom_up.recurrent(Lab("cpu"))


def test_the_mean_over_time_weighs_steps_by_their_distance():
    values = np.array([[0.0, 0.2, np.nan], [0.5, 0.2, 1.0], [1.0, 1.0, 1.0]])
    series = SimpleNamespace(steps=(0, 10, 40), layers=("conv1", "conv2", "head"), own=lambda: values)
    expected = {"conv1": pytest.approx((2.5 + 22.5) / 40), "conv2": pytest.approx((2 + 18) / 40)}
    assert bottom_up.mean_over_time(series) == expected
    alone = SimpleNamespace(steps=(400,), layers=("conv1",), own=lambda: values[-1:, :1])
    assert bottom_up.mean_over_time(alone) == {"conv1": 1}
