"""Masks in training: weights that stay exactly zero with every optimizer, at once and one by one, and in a restart."""

import copy

import pytest
import torch
from torch import nn

from netkin.applications.sparsity.masks import (
    mask_of,
    masked_layers,
    masks_of,
    put_masks,
    weight_behind,
)
from netkin.applications.sparsity.sparsify import sparsify
from netkin.training import Recipe, train, train_many
from netkin.training.many import _try_forward
from sparsity_worlds import labelled, net, zeros_hold

RECIPES = {
    "sgd": Recipe(steps=12, batch=16, lr=0.1, weight_decay=0.1, clip=1.0),
    "nesterov": Recipe(steps=12, batch=16, lr=0.1, nesterov=True, weight_decay=0.01),
    "adam": Recipe(epochs=4, batch=16, optimizer="adam", lr=0.01, weight_decay=0.1),
    "adamw": Recipe(epochs=4, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.5),
    "bf16": Recipe(steps=12, batch=16, precision="bf16"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_masked_weights_are_exactly_zero_after_training(name):
    model = net()
    table = sparsify(model, 0.9, method="uniform")
    before = {key: mask.clone() for key, mask in masks_of(model).items()}
    start = model[0].weight.detach().clone()
    train(model, labelled(), RECIPES[name])
    assert zeros_hold(model)
    assert not torch.equal(model[0].weight, start)
    assert all(torch.equal(mask, before[key]) for key, mask in masks_of(model).items())
    assert sum(int((model[k].weight != 0).sum()) for k in (0, 4, 7)) == table.left


def test_an_optimizer_that_was_made_before_the_masks_goes_on():
    model, (inputs, labels) = net(), labelled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    step()  # momentum of all weights
    sparsify(model, 0.9)
    step()
    moved = [bool((layer.weight[mask_of(layer).mask] != 0).any()) for layer in masked_layers(model).values()]
    assert all(moved)
    assert all(bool((one.weight[~mask_of(one).mask] == 0).all()) for one in masked_layers(model).values())


def test_a_weight_that_is_not_finite_behind_its_mask_is_zero_all_the_same():
    model = nn.Linear(2, 2)
    put_masks(model, {"": torch.tensor([[True, False], [True, True]])})
    with torch.no_grad():
        weight_behind(model)[0, 1] = float("nan")
    assert model.weight[0, 1] == 0


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_masked_networks_are_trained_at_once_as_one_by_one(name):
    models = [net(seed, torch.float64) for seed in range(3)]
    for seed, model in enumerate(models):
        sparsify(model, 0.8, seed=seed)
    plain = copy.deepcopy(models)
    stacked = train_many(models, labelled(), RECIPES[name], method="stacked")
    single = train_many(plain, labelled(), RECIPES[name], method="one by one")
    for model, other in zip(models, plain, strict=True):
        assert zeros_hold(model)
        assert zeros_hold(other)
        assert all(torch.allclose(a.double(), b.double(), atol=1e-8)
                   for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))  # fmt: skip
    assert stacked[1][-1]["loss"] == pytest.approx(single[1][-1]["loss"])


def test_a_masked_network_has_the_operations_of_a_dense_one():
    dense, sparse = net(), net()
    sparsify(sparse, 0.9)
    inputs = labelled()[0][:4]
    assert _try_forward(sparse, inputs) == _try_forward(dense, inputs)


def test_training_that_stops_goes_on_bit_for_bit(tmp_path):
    whole, stopped, again = (net() for _ in range(3))
    for model in (whole, stopped, again):
        sparsify(model, 0.9, seed=4)
    recipe = Recipe(steps=10, batch=16, lr=0.1, weight_decay=0.01)
    train(whole, labelled(), recipe)

    class Enough(Exception):
        pass

    def stop(model, step):
        if stopping[0] and step == 5:
            raise Enough

    stopping, stop.settings = [True], "whenever it stops, it is the same hook"
    with pytest.raises(Enough):
        train(stopped, labelled(), recipe, save=tmp_path / "run.netkin", every=2, hooks=[stop])
    stopping[0] = False
    train(again, labelled(), recipe, save=tmp_path / "run.netkin", every=2, hooks=[stop])
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["stacked", "graphs"])
def test_masked_networks_are_trained_at_once_on_a_gpu(method):
    models = [net(seed, torch.float64).cuda() for seed in range(3)]
    for seed, model in enumerate(models):
        sparsify(model, 0.8, seed=seed)
    assert all(torch.equal(mask.cpu(), other) for mask, other in
               zip(masks_of(models[0]).values(), masks_of(_masked_on_the_cpu()).values(), strict=True))  # fmt: skip
    plain = copy.deepcopy(models)
    train_many(models, labelled(), RECIPES["sgd"], method=method)
    train_many(plain, labelled(), RECIPES["sgd"], method="one by one")
    for model, other in zip(models, plain, strict=True):
        assert zeros_hold(model)
        assert all(torch.allclose(a.double(), b.double(), atol=1e-8)
                   for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))  # fmt: skip


def _masked_on_the_cpu():
    model = net(0, torch.float64)
    sparsify(model, 0.8, seed=0)
    return model
