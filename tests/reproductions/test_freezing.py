"""The claim about freeze training, on toys: what it measures is what it says."""

import pytest
import torch

from netkin.sources.architectures import ResNet, svcca_convnet
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Lab, Network
from reproductions.svcca import freezing
from reproductions.svcca.freezing import Cost


@pytest.fixture(scope="module")
def lab(tmp_path_factory, with_few_images):
    """A laboratory of few digits with small networks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        small = {
            "convnet": Network(lambda: svcca_convnet(width=2), Recipe(epochs=2, batch=32, lr=0.02, drop_last=True)),
            "resnet": Network(lambda: ResNet((1, 1, 1), (2, 2, 2)), Recipe(epochs=2, batch=32, drop_last=True)),
        }
        patch.setitem(laboratory.RECIPES, "cpu", small)
        patch.setitem(freezing.EPOCHS, "cpu", 2)
        patch.setitem(freezing.SEEDS, "cpu", 2)
        patch.setattr(freezing, "ROUNDS", 2)
        yield with_few_images(Lab("cpu", cache=tmp_path_factory.mktemp("cache")), 320, 100)


def test_the_cost_of_a_training_is_the_mean_over_its_steps():
    cost = Cost(seconds=[1.0, 0.5, 0.25], operations=[300, 200, 150], forward=100)
    assert cost.time([4, 8], 10) == pytest.approx(0.4 * 1 + 0.4 * 0.5 + 0.2 * 0.25)
    assert cost.backward_saved([4, 8], 10) == pytest.approx(1 - (0.4 * 200 + 0.4 * 100 + 0.2 * 50) / 200)
    assert cost.time([], 10) == 1
    assert cost.time([3, 3], 10) == pytest.approx(0.3 + 0.7 * 0.25)


@pytest.mark.slow
def test_the_operations_of_a_step_fall_with_every_frozen_unit_down_to_the_forward_pass(lab):
    cost = freezing.costs(lab, "convnet")
    assert len(cost.seconds) == len(cost.operations) == 8
    assert cost.operations == sorted(cost.operations, reverse=True)
    # by hand: of the last layer, 512 → 10, only the product for its weights is left, two operations a multiply-add
    assert cost.operations[-1] - cost.forward == 2 * 32 * 512 * 10


def test_units_are_frozen_from_the_top_at_the_same_times(lab):
    model = lab.fresh("resnet", 0)
    order = {2: "layer3.0", 4: "layer2.0"}
    start = {name: weight.clone() for name, weight in model.named_parameters()}
    lab.train(model, "resnet", 0, hooks=[freezing._freezer(order)], epochs=1)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, start[name])}
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == {
        name for name in start if name.startswith(("layer2.0", "layer3.0"))
    }
    assert any(name.startswith("layer1.0") for name in moved)


@pytest.mark.slow
def test_freeze_training(lab):
    found = freezing.freeze_training(lab)
    assert set(found.curves) == {
        f"Test accuracy of the {net}, {rates} rate" for net in ("convnet", "resnet") for rates in ("constant", "cosine")
    }
    for net in ("convnet", "resnet"):
        assert found.measured[f"{net}: training time, over plain"].value < 1
        assert 0 < found.measured[f"{net}: share of all backward operations that freezing saves"].value < 1
        curve = found.curves[f"Test accuracy of the {net}, constant rate"]
        gain = found.measured[f"{net}, constant rate: accuracy gained by freezing"]
        assert gain.value == pytest.approx(curve["linear"][-1] - curve["plain"][-1])
        control = found.controls[f"{net}, constant rate: accuracy gained by freezing"]
        assert control.value == pytest.approx(curve["from the top"][-1] - curve["plain"][-1])
    assert list(found.seeds) == [0, 1]
