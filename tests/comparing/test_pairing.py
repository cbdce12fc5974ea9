"""Which layers are set beside each other."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, ShapeError, UnknownName
from refusals import refused


def test_corresponding_layers_have_the_same_name(maps, images, layers):
    a, b = maps(), maps()
    everything = nk.compare(a, b, images, layers=layers)
    comparison = nk.compare(a, b, images, layers=layers, pairs="corresponding")
    for layer in layers:
        assert comparison[layer, layer] == pytest.approx(everything[layer, layer], abs=1e-6)
    assert set(comparison["cka"].missing.values()) == {"this pair was not asked for"}
    assert len(comparison["cka"].missing) == 6


def test_layers_without_shared_names_correspond_by_place(worlds):
    X, Y = worlds.related(30, 3, 4)
    comparison = nk.compare({"x": X, "y": Y}, {"u": X, "v": Y}, pairs="corresponding")
    assert comparison["y", "v"] == pytest.approx(1)
    with pytest.raises(ShapeError, match="share no layer names and have 2 and 1 layers, so none correspond"):
        nk.compare({"x": X, "y": Y}, {"u": X}, pairs="corresponding")


@pytest.mark.parametrize("measures", ["cka", "cka_minibatch(batch=16)", "cka_rbf", "cca_mean"])
def test_a_list_of_pairs_is_all_there_is(maps, images, measures):
    a, b = maps(), maps()
    wanted = [("conv1", "fc"), ["conv2", "conv1"], ("conv1", "fc")]
    comparison = nk.compare(a, b, images, measures, layers=["conv1", "conv2", "fc"], pairs=wanted)
    everything = nk.compare(a, b, images, measures, layers=["conv1", "conv2", "fc"])
    assert len(comparison.table().missing) == 7
    assert comparison["conv1", "fc"] == pytest.approx(everything["conv1", "fc"], abs=1e-7)
    assert comparison["conv2", "conv1"] == pytest.approx(everything["conv2", "conv1"], abs=1e-7)


def test_a_list_of_pairs_within_one_model(maps, images):
    comparison = nk.compare(maps(), data=images, pairs=[("conv1", "fc"), ("fc", "conv1")])
    assert comparison["conv1", "fc"] == comparison["fc", "conv1"]


def test_pairs_are_the_same_for_all_models(maps, images):
    many = nk.compare_many([maps(), maps(), maps()], images, pairs=[("conv1", "fc")])
    assert all(len(comparison["cka"].missing) == len(comparison.layers_a) ** 2 - 1 for comparison in many.values())


@pytest.mark.parametrize(
    "pairs, fault, argument",
    [
        ("some", UnknownName, "pairs"),
        ([("conv1", "conv9")], UnknownName, "pairs"),
        ([], InvalidValue, "pairs"),
        (["conv1"], InvalidValue, "pairs"),
        (3, InvalidValue, "pairs"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(maps, images, pairs, fault, argument):
    with refused(fault, argument):
        nk.compare(maps(), maps(), images, pairs=pairs)


class Words(nn.Module):
    """Gives a vector for each token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids, attention_mask=None):
        return self.embed(ids)


def test_as_many_tokens_of_other_examples_are_not_paired():
    ids, masks = torch.randint(0, 9, (2, 4)), ([[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 0, 0, 0], [1, 1, 1, 0]])
    sides = [nk.ModelInput(Words(), data=[{"ids": ids, "attention_mask": torch.tensor(mask)}]) for mask in masks]
    with pytest.raises(ShapeError, match="as many tokens for a batch and not for each of its examples"):
        nk.compare(*sides, shape="tokens", layers="embed")


def test_functions_for_models_that_there_are_not_are_refused():
    model = nn.Linear(4, 3)
    for option in ({"transforms": {"A": torch.relu}}, {"forward": {"c": len}}, {"forward": 3}, {"transforms": [len]}):
        with pytest.raises(InvalidValue) as refusal:
            nk.compare(model, nn.Linear(4, 3), torch.randn(9, 4), layers="", **option)
        assert refusal.value.argument in option


def test_a_stream_of_one_model_of_many_is_read_whole():
    models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU()) for _ in range(3)]
    batches = list(torch.randn(50, 4).split(10))
    found = nk.compare_many([nk.ModelInput(model, data=iter(batches)) for model in models])
    assert {one.examples for one in found.values()} == {50}
