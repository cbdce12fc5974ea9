"""The claim about freeze training, on toys: what it measures is what it says."""

import pytest

from netkin.sources.architectures import ResNet, svcca_convnet
from reproductions import laboratory
from reproductions.claims import Measured
from reproductions.laboratory import Lab, Recipe
from reproductions.svcca import freezing
from reproductions.svcca.freezing import Cost, Task, Trained


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of digits with small networks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        small = {
            "convnet": Recipe(lambda: svcca_convnet(width=2), epochs=2, batch=32, rate=0.02),
            "resnet": Recipe(lambda: ResNet((1, 1, 1), (2, 2, 2)), epochs=2, batch=32, rate=0.05),
        }
        patch.setitem(laboratory.RECIPES, "cpu", small)
        patch.setitem(freezing.EPOCHS, "cpu", 2)
        patch.setitem(freezing.SEEDS, "cpu", 2)
        patch.setitem(freezing.SCHEDULES, "cpu", ("plain", "linear", "similarity"))
        patch.setattr(freezing, "ROUNDS", 2)
        yield Lab("cpu", cache=tmp_path_factory.mktemp("cache"))


def test_the_cost_of_a_training_is_the_mean_over_its_steps():
    cost = Cost(seconds=[1.0, 0.5, 0.25], operations=[300, 200, 150], forward=100)
    assert cost.time([4, 8], 10) == pytest.approx(0.4 * 1 + 0.4 * 0.5 + 0.2 * 0.25)
    assert cost.backward_saved([4, 8], 10) == pytest.approx(1 - (0.4 * 200 + 0.4 * 100 + 0.2 * 50) / 200)
    assert cost.time([], 10) == 1
    assert cost.time([3, 3], 10) == pytest.approx(0.3 + 0.7 * 0.25)


def test_the_operations_of_a_step_fall_with_every_frozen_unit_down_to_the_forward_pass(lab):
    cost = freezing.costs(lab, "convnet")
    assert len(cost.seconds) == len(cost.operations) == 8
    assert cost.operations == sorted(cost.operations, reverse=True)
    # by hand: of the last layer, 512 → 10, only the product for its weights is left, two operations a multiply-add
    assert cost.operations[-1] - cost.forward == 2 * 32 * 512 * 10


def test_runs_from_one_seed_are_paired():
    values = {"plain": (0.5, 0.7), "linear": (0.52, 0.74)}
    runs = {
        Task("resnet", "constant", schedule, seed): Trained([0.1, values[schedule][seed]], [2] * (schedule == "linear"))
        for schedule in values for seed in (0, 1)
    }  # fmt: skip
    found = freezing.compared(runs, "resnet", "constant", (0, 1), Cost([1, 0.5], [3, 2], 1), 4)
    gain = found["resnet, constant rate: accuracy with linear freezing minus without"]
    assert (gain.value, gain.error, gain.n) == (pytest.approx(0.03), pytest.approx(0.01), 2)
    assert found["resnet: training time with linear freezing, over plain"].value == 0.75


def test_the_note_says_where_freezing_helps(lab):
    name = "{}, constant rate: accuracy with linear freezing minus without"
    gains = {name.format("convnet"): Measured(0.03, 0.01), name.format("resnet"): Measured(-0.03, 0.01)}
    assert "errors for convnet, constant rate, and lowers it by as much for resnet, constant" in freezing.note(
        gains, lab
    )
    assert "errors for no network and rate, and lowers it by as much for no" in freezing.note({}, lab)


@pytest.mark.slow
def test_freeze_training(lab):
    found = freezing.freeze_training(lab)
    assert set(found.curves) == {
        f"Test accuracy of the {net}, {rates} rate" for net in ("convnet", "resnet") for rates in ("constant", "steps")
    }
    for net in ("convnet", "resnet"):
        assert found.measured[f"{net}: training time with linear freezing, over plain"].value < 1
        assert 0 < found.measured[f"{net}: share of all backward operations that linear freezing saves"].value < 1
        assert f"{net}, constant rate: accuracy with similarity freezing minus without" not in found.measured
        assert f"{net}, steps rate: accuracy with similarity freezing minus without" in found.measured
    assert list(found.seeds) == [0, 1]


@pytest.mark.slow
def test_plain_runs_are_those_of_the_laboratory(lab):
    model = lab.fresh("convnet", 0)
    history = lab.train(model, "convnet", 0, epochs=2, schedule="constant")
    run = freezing.trained(lab, Task("convnet", "constant", "plain", 0))
    assert run.accuracy == [epoch["accuracy"] for epoch in history]
    assert freezing.trained(lab, Task("convnet", "constant", "linear", 0)).frozen == [
        -(-number * lab.total_steps("convnet", 2) // 8) for number in range(1, 8)
    ]
