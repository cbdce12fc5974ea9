"""Which modules are looked at, and by which names."""

import pytest
import torch
from torch import nn

from netkin.errors import InvalidValue, SourceError, UnknownName
from netkin.representations.hooks import recording
from netkin.representations.layers import choose, layers, modules, split_call, unwrapped
from refusals import refusals, refused


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.relu = nn.ReLU()
        self.second = nn.Linear(2, 2)


class Pairs(nn.Module):
    """Blocks that are mere lists of parts, and a list of parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]) for _ in range(2)])
        self.scales = nn.ParameterList([torch.ones(1)])
        self.norm = nn.LayerNorm(2)


def test_a_residual_net_gives_stem_blocks_and_head(residual):
    assert layers(residual) == ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]


def test_a_language_model_gives_embeddings_blocks_and_pooler(language):
    expected = ["embeddings", "places", "encoder.layer.0", "encoder.layer.1", "encoder.layer.2", "pooler"]
    assert layers(language) == expected


def test_a_flat_net_gives_all_its_children():
    assert layers(Flat()) == ["first", "relu", "second"]


def test_a_chain_gives_its_steps(chain):
    assert layers(chain) == ["0", "1", "2"]


def test_an_unrepeated_chain_gives_its_steps_too():
    assert layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]


def test_a_model_without_children_is_its_own_layer():
    assert layers(nn.Linear(2, 2)) == [""]
    assert choose(nn.Linear(2, 2), nn.Linear) == [""]


def test_lists_that_cannot_be_called_stand_for_their_parts():
    assert layers(Pairs()) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "norm"]


def test_containers_inside_a_block_are_not_opened():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert layers(nn.Sequential(block, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == ["0", "1"]


def test_a_shared_module_goes_by_its_first_name():
    relu = nn.ReLU()
    assert layers(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)) == ["0", "1", "2"]


def test_wrappers_are_looked_through(residual):
    plain = layers(residual)
    assert layers(nn.DataParallel(residual)) == plain
    assert layers(torch.compile(residual, backend="eager")) == plain
    assert unwrapped(nn.DataParallel(torch.compile(residual, backend="eager"))) is residual


def test_wrappers_inside_a_model_are_looked_through(residual):
    plain, names = layers(residual), list(modules(residual))
    residual.layer1[0] = torch.compile(residual.layer1[0], backend="eager")
    residual.layer2 = nn.DataParallel(residual.layer2)
    assert layers(residual) == plain
    assert list(modules(residual)) == names


def test_names_and_globs_and_types_choose_layers(residual):
    assert choose(residual, "fc") == ["fc"]
    assert choose(residual, "layer?.0") == ["layer1.0", "layer2.0"]
    assert choose(residual, nn.Linear) == ["fc"]
    assert choose(residual, (nn.Linear, nn.Conv2d))[:2] == ["conv1", "layer1.0.conv1"]
    assert choose(residual) == layers(residual)


def test_a_list_of_names_keeps_its_order_and_anything_else_the_models(residual):
    assert choose(residual, ["fc", "conv1", "fc"]) == ["fc", "conv1"]
    assert choose(residual, ["fc", "layer?.1", nn.Linear]) == ["layer1.1", "layer2.1", "fc"]


def test_a_single_call_can_be_chosen(residual):
    assert choose(residual, "layer1.0.relu#2") == ["layer1.0.relu#2"]
    assert choose(residual, "layer?.0.relu#2") == ["layer1.0.relu#2", "layer2.0.relu#2"]
    assert choose(residual, ["layer1.0.relu#2", "layer1.0.relu"]) == ["layer1.0.relu"]
    assert split_call("a#0") == ("a#0", None)


def test_the_model_itself_is_chosen_by_the_empty_name_only(chain):
    assert choose(chain, "") == [""]
    assert "" not in choose(chain, "*")


def test_an_unknown_name_is_refused_with_the_nearest(residual):
    refusals(
        (lambda: choose(residual, "layer3.0"), UnknownName, "layers"),
        (lambda: choose(residual, ["fc", "zzz"]), UnknownName, "layers"),
    )


def test_a_type_that_does_not_occur_is_refused_with_those_that_do(chain):
    refusals(
        (lambda: choose(chain, nn.Conv2d), UnknownName, "layers"),
        (lambda: choose(nn.ReLU(), nn.Conv2d), UnknownName, "layers"),
    )


def test_no_layers_or_no_sensible_ones_are_refused(chain):
    refusals(
        (lambda: choose(chain, []), InvalidValue, "layers"),
        (lambda: choose(chain, [3]), InvalidValue, "layers"),
        (lambda: choose(chain, chain[0]), InvalidValue, "layers"),
    )


def test_what_is_no_model_is_refused():
    with pytest.raises(InvalidValue, match=r"must be a `torch.nn.Module`; got int"):
        layers(18)
    with pytest.raises(SourceError, match="'resnet18' is no model; did you mean 'netkin:resnet18'"):
        layers("resnet18")


def test_a_type_may_be_chosen_by_its_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    assert choose(model, "Conv2d") == choose(model, "nn.Conv2d") == choose(model, nn.Conv2d) == ["0", "2"]


@pytest.fixture
def nested():
    """Chains in chains, as in a ResNet, with parts that compute nothing in evaluation mode."""
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    stage = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), block)
    model = nn.ModuleDict(
        {"layer1": stage, "layer2": nn.Sequential(nn.Linear(4, 4), nn.Identity()), "fc": nn.Linear(4, 2)}
    )
    return model


def test_a_star_stays_at_one_level_and_two_cross_dots(nested):
    assert choose(nested, "layer*") == ["layer1", "layer2"]
    assert choose(nested, "layer?") == ["layer1", "layer2"]
    assert choose(nested, "layer[!2]") == ["layer1"]
    assert choose(nested, "*.0") == ["layer1.0", "layer2.0"]
    assert choose(nested, "layer1.*.0") == ["layer1.0.0", "layer1.1.0"]
    assert choose(nested, "**.1.0") == ["layer1.1.0"]
    assert choose(nested, "**fc") == choose(nested, "**.fc") == ["fc"]


def test_a_glob_leaves_out_what_only_passes_on_the_output_of_another_match(nested):
    assert choose(nested, "**") == ["layer1.0.0", "layer1.1.0", "layer1.1.1", "layer2.0", "fc"]
    assert choose(nested, "layer2.*") == ["layer2.0"]
    assert choose(nested, "layer1.1.[12]") == ["layer1.1.1"]
    assert choose(nested, "layer1.1.2*") == ["layer1.1.2"]  # its source is not among the matches
    assert choose(nested, ["layer1", "layer1.1", "layer1.1.2"]) == ["layer1", "layer1.1", "layer1.1.2"]
    assert choose(nested, nn.Dropout) == ["layer1.1.2"]


def test_what_a_glob_leaves_out_has_the_output_of_what_it_keeps(nested):
    model = nn.Sequential(nested["layer1"], nested["layer2"], nested["fc"]).eval()
    kept, every = choose(model, "**"), [name for name in modules(model) if name]
    with recording(model, every) as outputs:
        model(torch.randn(3, 4))
    for name in set(every) - set(kept):
        assert any(
            outputs[name].shape == outputs[one].shape and torch.equal(outputs[name], outputs[one]) for one in kept
        )


def test_a_chain_with_a_forward_of_its_own_is_kept():
    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    assert choose(nn.ModuleDict({"a": Doubled(nn.Linear(2, 2))}), "**") == ["a", "a.0"]


def test_a_glob_that_would_match_deeper_layers_says_so(nested):
    with refused(UnknownName, "layers"):
        choose(nn.ModuleDict({"net": nested}), "*.1.0")
