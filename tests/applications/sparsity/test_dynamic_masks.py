"""Masks that move: RigL and SET against slow transcriptions; exact numbers, memories, and restarts."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netkin.applications.sparsity.masks import bake_masks, mask_of, masked_layers, masks_of, put_masks, weight_behind
from netkin.applications.sparsity.sparse_training import DynamicMasks
from netkin.applications.sparsity.sparsify import sparsify
from netkin.errors import InvalidValue, UnknownName
from netkin.training import Recipe, train
from processes import run_ranks
from quickly import slow_but
from refusals import refusals
from sparsity_worlds import labelled


def net(seed=0, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)
        ).to(dtype)  # fmt: skip
    sparsify(model, 0.8, method="uniform", seed=seed)
    return model


def kept(model):
    return [int(mask.sum()) for mask in masks_of(model).values()]


def slow_rigl(weight, mask, gradient, share):
    """Algorithm 1 of RigL for one layer: drop the smallest, grow the largest gradients outside of what stays."""
    weight, mask, gradient = (one.ravel() for one in (weight, mask, gradient))
    active = [k for k in range(len(weight)) if mask[k]]
    count = int(share * len(active))
    dropped = sorted(active, key=lambda k: abs(weight[k]))[:count]
    stays = set(active) - set(dropped)
    grown = sorted((k for k in range(len(weight)) if k not in stays), key=lambda k: -abs(gradient[k]))[:count]
    new = np.array([k in stays or k in grown for k in range(len(weight))])
    return new, np.where(new & mask, weight, 0.0)  # what grows again just where it was dropped keeps its weight


def test_rigl_moves_masks_as_its_algorithm_does():
    model, (inputs, labels) = net(), labelled()
    inputs = inputs.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    moving = DynamicMasks("rigl", every=3, until=30, fraction=0.4)
    moving.begin(model, optimizer)
    for step in range(1, 7):
        dense = copy.deepcopy(model)  # the gradient of all weights, by plain parameters with the same values
        bake_masks(dense)
        nn.functional.cross_entropy(dense(inputs), labels).backward()
        before = {name: (layer.weight.detach().numpy().copy(), mask_of(layer).mask.numpy().copy())
                  for name, layer in masked_layers(model).items()}  # fmt: skip
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        moving.after_backward(model, step)
        optimizer.step()
        moving.after_step(model, step)
        if step % 3 == 0:
            share = 0.4 / 2 * (1 + np.cos(np.pi * step / 30))
            for name, layer in masked_layers(model).items():
                gradient = dense[int(name)].weight.grad.numpy()
                mask, weight = slow_rigl(*before[name], gradient, share)
                assert np.array_equal(mask_of(layer).mask.numpy().ravel(), mask)
                assert np.array_equal(layer.weight.detach().numpy().ravel(), weight)  # no step of weights here
                assert mask.tolist() != before[name][1].ravel().tolist()
    assert moving.moved > 0
    assert kept(model) == kept(net())


@pytest.mark.parametrize("method", ["rigl", "set"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_layer_keeps_its_number_of_weights_and_zeros_stay_zero(method, optimizer):
    model, first = net(), net()
    moving = DynamicMasks(method, every=2, until=25, fraction=0.5)
    recipe = Recipe(steps=30, batch=16, lr=0.05, weight_decay=0.1, optimizer=optimizer)
    train(model, labelled(), recipe, hooks=[moving])
    assert kept(model) == kept(first)
    assert moving.moved > 0
    assert any(not torch.equal(a, b) for a, b in zip(masks_of(model).values(), masks_of(first).values(), strict=True))
    for layer in masked_layers(model).values():
        assert bool((weight_behind(layer)[~mask_of(layer).mask] == 0).all())
    assert not any(mask_of(layer)._forward_hooks for layer in masked_layers(model).values())


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"precision": "bf16"}, {"clip": 0.5}])
@pytest.mark.parametrize("method", ["rigl", "set"])
def test_masks_move_under_autocast_loss_scaling_and_clipping(method, settings):
    model = net(dtype=torch.float32)
    moving = DynamicMasks(method, every=2, until=9, fraction=0.5)
    train(model, labelled(), steps=10, batch=16, hooks=[moving], **settings)
    assert moving.moved > 0
    assert kept(model) == kept(net())
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_set_drops_the_smallest_and_grows_only_where_nothing_was():
    model = net()
    before = {name: (layer.weight.detach().clone(), mask_of(layer).mask.clone())
              for name, layer in masked_layers(model).items()}  # fmt: skip
    moving = DynamicMasks("set", every=1, until=5, fraction=0.3)
    moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    moving.after_step(model, 1)
    for name, layer in masked_layers(model).items():
        weight, old = before[name]
        new = mask_of(layer).mask
        count = int(0.3 * int(old.sum()))
        dropped, grown = old & ~new, new & ~old
        assert int(dropped.sum()) == int(grown.sum()) == count > 0
        assert weight[dropped].abs().max() <= weight[old & new].abs().min()
        assert bool((layer.weight[grown] == 0).all())


def test_set_grows_every_masked_weight_with_the_same_chance():
    counts = torch.zeros(40)
    for seed in range(400):
        model = nn.Linear(40, 1, bias=False)
        with torch.no_grad():
            model.weight[:] = 1.0
        put_masks(model, {"": torch.arange(40)[None] < 10})
        moving = DynamicMasks("set", every=1, until=9, fraction=0.5, seed=seed)
        moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
        moving.after_step(model, 1)
        counts += mask_of(model).mask[0]
    grown = counts[10:]  # 5 of 30 each time
    assert grown.sum() == 2000
    assert abs(grown - 400 / 6).max() < 5 * (400 * 5 / 36) ** 0.5


def test_a_layer_with_little_room_moves_no_more_than_there_is():
    model = nn.Linear(10, 1, bias=False)
    put_masks(model, {"": torch.arange(10)[None] < 9})
    moving = DynamicMasks("set", every=1, until=5, fraction=0.5)
    moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    moving.after_step(model, 1)
    assert kept(model) == [9]
    assert moving.moved == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_forgets_what_is_dropped_and_what_grows(optimizer):
    model, (inputs, labels) = net(), labelled()
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    chosen = optimizer(model.parameters(), 0.01, **settings)
    moving = DynamicMasks("set", every=3, until=9, fraction=0.5)
    moving.begin(model, chosen)
    for step in range(1, 4):
        old = masks_of(model)
        chosen.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        moving.after_backward(model, step)
        chosen.step()
        moving.after_step(model, step)
    for name, layer in masked_layers(model).items():
        changed = mask_of(layer).mask ^ old[name]
        kept_on = mask_of(layer).mask & old[name]
        for key, value in chosen.state[weight_behind(layer)].items():
            if key != "step":
                assert bool((value[changed] == 0).all())
                assert bool((value[kept_on] != 0).any())


@pytest.mark.parametrize("method", ["rigl", "set"])
@pytest.mark.parametrize("stop_after", slow_but([3, 4, 5, 6], 4))
def test_training_that_stops_goes_on_bit_for_bit(tmp_path, method, stop_after):
    recipe = Recipe(steps=12, batch=16, lr=0.1, weight_decay=0.01)
    whole, again = net(), net()
    train(whole, labelled(), recipe, hooks=[DynamicMasks(method, every=2, until=11, fraction=0.4)])

    class Enough(Exception):
        pass

    stopping = [True]

    def stop(model, step):
        if stopping[0] and step > stop_after:
            raise Enough

    stop.settings = "whenever it stops, it is the same hook"

    def hooks():
        return [DynamicMasks(method, every=2, until=11, fraction=0.4), stop]

    with pytest.raises(Enough):
        train(net(), labelled(), recipe, save=tmp_path / "run.netkin", every=1, hooks=hooks())
    stopping[0] = False
    train(again, labelled(), recipe, save=tmp_path / "run.netkin", every=1, hooks=hooks())
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


def test_gradients_of_several_backward_passes_and_of_a_layer_that_runs_twice_add_up():
    layer = nn.Linear(4, 4, bias=False).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    sparsify(model, 0.5, seed=2)
    moving = DynamicMasks("rigl", every=1, until=9)
    moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    parts = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for part in parts:
        model(part).square().sum().backward()
    (found,) = moving._gradients.values()
    plain = bake_masks(copy.deepcopy(model))
    plain.zero_grad()
    plain(parts.flatten(0, 1)).square().sum().backward()
    assert torch.allclose(found, plain[0].weight.grad)


def test_gradients_that_are_not_finite_move_nothing():
    model = net()
    before = masks_of(model)
    moving = DynamicMasks("rigl", every=1, until=9)
    moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    (model(labelled()[0].double()).sum() * float("inf")).backward()
    moving.after_backward(model, 1)
    assert all(torch.equal(mask, before[name]) for name, mask in masks_of(model).items())
    assert all(weight.grad is not None for weight in model.parameters())  # loss scaling has to see them


@pytest.mark.slow
def test_rigl_refuses_a_compiled_model_whose_gradients_it_can_not_see():
    model = net().float()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InvalidValue, match="no gradient of a masked weight before step 2: a compiled model hides them"):
        train(compiled, labelled(), steps=4, hooks=[DynamicMasks("rigl", every=2, until=9)], progress=False)


def test_rigl_refuses_steps_that_it_was_not_prepared_for():
    model = net()
    moving = DynamicMasks("rigl", every=2, until=9)
    model(labelled()[0].double()).sum().backward()
    with pytest.raises(InvalidValue, match="calls `begin`, and then `after_backward` and `after_step` at each step"):
        moving.after_backward(model, 2)


def test_a_frozen_layer_keeps_its_mask_under_rigl():
    model = net()
    before = masks_of(model)
    first, *others = before
    dict(model.named_modules())[first].parametrizations.weight.original.requires_grad_(False)
    moving = DynamicMasks("rigl", every=1, until=9)
    moving.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    model(labelled()[0].double()).square().sum().backward()
    moving.after_backward(model, 1)
    after = masks_of(model)
    assert torch.equal(after[first], before[first])
    assert any(not torch.equal(after[name], before[name]) for name in others)


def test_masks_stay_from_the_given_step_on():
    moving = DynamicMasks("rigl", every=10, until=40, fraction=0.2)
    assert [moving.share(step) for step in (5, 40, 50)] == [0, 0, 0]
    assert moving.share(20) == pytest.approx(0.1)  # half of the cosine's way
    assert DynamicMasks("set", every=10, until=40, fraction=0.2).share(30) == 0.2


def test_settings_that_make_no_sense_are_refused():
    refusals(
        (lambda: DynamicMasks("rigel", until=5), UnknownName, "method"),
        (lambda: DynamicMasks(every=0, until=5), InvalidValue, "every"),
        (lambda: DynamicMasks(until=5, fraction=1.5), InvalidValue, "fraction"),
        (lambda: DynamicMasks(until=5).begin(nn.Linear(2, 2), None), InvalidValue, ""),
    )


# --- two processes, and a GPU -----------------------------------------------------------------------------------------


def process(rank, folder):
    """Train on one half of the examples in a process that knows another, and save masks and weights."""
    model = net()
    wrapped = DistributedDataParallel(model, broadcast_buffers=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    moving = DynamicMasks("rigl", every=2, until=9, fraction=0.4)
    moving.begin(wrapped, optimizer)
    inputs, labels = labelled()
    for step in range(1, 7):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[rank::2].double()), labels[rank::2]).backward()
        moving.after_backward(wrapped, step)
        optimizer.step()
        moving.after_step(wrapped, step)
    masks = {f"mask {name}": mask for name, mask in masks_of(wrapped).items()}
    torch.save(masks | {"moved": torch.tensor(moving.moved), "weight": model[5].weight.detach()}, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_move_their_masks_alike(tmp_path):
    run_ranks(process, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["moved"] > 0
    assert all(torch.equal(one, second[name]) for name, one in first.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["rigl", "set"])
def test_masks_move_on_a_gpu(method):
    model = net(dtype=torch.float32).cuda()
    moving = DynamicMasks(method, every=2, until=25, fraction=0.5)
    train(model, labelled(), steps=30, batch=16, precision="bf16", hooks=[moving])
    assert moving.moved > 0
    assert kept(model) == kept(net())
