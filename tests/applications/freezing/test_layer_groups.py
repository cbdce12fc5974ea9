"""Groups: which modules are frozen one after the other, and what goes along with each."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.freezing.layer_groups import LayerGroups, find_groups, has_weights, keeps_statistics
from netkin.errors import InvalidValue, UnknownName
from netkin.sources.architectures import architecture
from refusals import refused


def members(model, layers=None):
    groups = LayerGroups(model, layers)
    return {name: groups.members(number) for number, name in enumerate(groups.names)}


def test_a_residual_network_is_frozen_block_by_block_and_its_stem_with_the_first():
    found = members(architecture("resnet20")())
    assert list(found) == [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1, 2)]
    assert found["layer1.0"] == ["conv1", "bn1", "relu", "layer1.0"]
    assert found["layer3.2"] == ["layer3.2"]


def test_the_paper_s_convnet_is_frozen_layer_by_layer_and_norms_with_the_layer_before():
    found = members(architecture("svcca_convnet")())
    assert list(found) == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc1", "fc2", "out"]
    assert found["conv2"] == ["conv2", "relu2", "bn1", "pool1"]
    assert found["fc2"] == ["fc2", "relu7", "bn4"]


def test_a_transformer_is_frozen_block_by_block_and_its_embedding_with_the_first():
    found = members(architecture("vit")())
    assert found["blocks.0"] == ["embed", "blocks.0"]
    assert found["blocks.5"] == ["blocks.5", "norm"]


def test_recurrent_layers_are_groups():
    assert find_groups(architecture("char_lstm")()) == ["embedding", "lstm1", "lstm2", "out"]


def test_a_shell_around_one_model_is_looked_into():
    class Shell(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = architecture("svcca_convnet")(), nn.CrossEntropyLoss()

    assert find_groups(Shell())[:2] == ["net.conv1", "net.conv2"]


def test_weights_between_named_groups_go_with_the_next_and_norms_with_what_is_before():
    found = members(architecture("svcca_convnet")(), ["conv1", "conv3"])
    assert found == {"conv1": ["conv1", "relu1"], "conv3": ["conv2", "relu2", "bn1", "pool1", "conv3", "relu3"]}


def test_what_runs_after_the_last_named_unit_belongs_to_none():
    groups = LayerGroups(architecture("resnet20")(), ["layer1", "layer2"])
    assert [piece for piece in groups.order if groups.owner[piece] is None] == ["layer3", "fc"]


def test_units_keep_the_order_in_which_they_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert LayerGroups(model, ["1", "0"]).order == ["1", "0"]


def test_all_parameters_belong_to_a_unit_or_to_what_follows():
    model = architecture("resnet20")()
    groups = LayerGroups(model)
    names = [name for number in range(len(groups.names)) for name in groups.parameters(number)]
    assert sorted([*names, "fc.weight", "fc.bias"]) == sorted(name for name, _ in model.named_parameters())


def test_a_parameter_of_the_model_itself_goes_with_the_first_unit_until_the_model_has_run():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(1))
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x):
            return self.blocks(x + self.places) * self.scale

    model = Tokens()
    freezing = nk.FreezeTraining(model, steps=9)
    assert freezing.members("blocks.0") == ["places", "scale", "blocks.0"]
    model(torch.ones(1, 4)).sum().backward()
    freezing.step()
    assert freezing.members("blocks.0") == ["places", "blocks.0"]
    assert model.scale.requires_grad


def test_names_inside_wrappers_are_those_of_the_model():
    model = torch.nn.DataParallel(architecture("tiny10")())
    assert list(LayerGroups(model).parameters(0)) == ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"]


@pytest.mark.parametrize(
    "norm, does",
    [
        (nn.BatchNorm2d(3), True),
        (nn.BatchNorm1d(3, affine=False), True),
        (nn.BatchNorm2d(3, track_running_stats=False), False),
        (nn.InstanceNorm2d(3), False),
        (nn.InstanceNorm2d(3, track_running_stats=True), True),
        (nn.LayerNorm(3), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).parametrizations.weight[0], True),
    ],
)
def test_which_modules_change_as_they_run(norm, does):
    assert keeps_statistics(norm) is does


class NormalisedLinear(nn.Linear):
    """A layer like any other, whatever its name begins with."""


class BatchNormAct2d(nn.BatchNorm2d):
    """A norm that brings its activation."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()


@pytest.mark.parametrize(
    "module, does",
    [
        (nn.LayerNorm(3), False), (nn.BatchNorm2d(3), False), (nn.RMSNorm(3), False), (BatchNormAct2d(3), False),
        (nn.ReLU(), False), (nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), False), (NormalisedLinear(3, 3), True),
        (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), True), (nn.Embedding(3, 3), True),
    ],
)  # fmt: skip
def test_which_modules_have_weights_beside_those_of_norms(module, does):
    assert has_weights(module) is does


def test_a_unit_inside_another_is_refused():
    with refused(InvalidValue, "layers"):
        LayerGroups(architecture("resnet20")(), ["layer1", "layer1.0"])


def test_one_call_of_a_layer_is_refused():
    with refused(InvalidValue, "layers"):
        LayerGroups(architecture("resnet20")(), ["conv1#2"])


def test_an_unknown_layer_is_refused():
    with refused(UnknownName, "layers"):
        LayerGroups(architecture("svcca_convnet")(), ["conv9"])
