"""Freeze training: what is frozen stays exactly as it is, and what is live trains as if nothing else were there."""

import copy
import pickle
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import netkin as nk
from freezing_worlds import Net, data, same, sgd, train, update, weights
from netkin.errors import InvalidValue, UnknownName
from netkin.sources.architectures import architecture, seeded
from refusals import refusals, refused


@pytest.fixture
def net():
    return seeded(Net, 0)


# --- frozen means frozen ----------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, weight_decay=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
}


def memory_of(optimizer, parameters):
    return [copy.deepcopy(optimizer.state[parameter]) for parameter in parameters]


def alike(one, other):
    pairs = [(a, b, key) for a, b in zip(one, other, strict=True) for key in a]
    return bool(pairs) and all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for a, b, key in pairs)


@pytest.mark.parametrize("kind, set_to_none", list(product(OPTIMIZERS, (True, False))))
def test_frozen_parameters_statistics_and_optimizer_state_do_not_move(net, kind, set_to_none):
    optimizer = OPTIMIZERS[kind](net.parameters())
    freezing = nk.FreezeTraining(net, {"conv2": 0.5}, steps=8, optimizer=optimizer)
    train(net, optimizer, freezing, data(4))
    still = [*net.conv1.parameters(), *net.bn1.parameters(), *net.conv2.parameters(), *net.bn2.parameters()]
    names = [name for name in net.state_dict() if name.startswith(("conv1", "bn1", "conv2", "bn2"))]
    before, state, live = weights(net), memory_of(optimizer, still), net.conv3.weight.clone()
    assert freezing.frozen == ["conv2"]
    for images, labels in data(4):
        net.train()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in still)
        optimizer.zero_grad(set_to_none=set_to_none)
        freezing.step()
    after = weights(net)
    assert len(names) == 14
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert alike(state, memory_of(optimizer, still))
    assert not torch.equal(live, net.conv3.weight)


def test_frozen_norms_stay_in_evaluation_and_dropout_does_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with nk.FreezeTraining(model, {"0": 0}, steps=1):
        assert not model[1].training
        model.train()
        assert [module.training for module in model] == [True, False, True, True, True]
        model.eval().train()
        statistics = model[1].running_mean.clone(), model[1].num_batches_tracked.clone()
        model(torch.randn(8, 4))
        assert torch.equal(model[1].running_mean, statistics[0])
        assert torch.equal(model[1].num_batches_tracked, statistics[1])
        assert model[4].num_batches_tracked == 1


def test_spectral_norm_is_frozen_too():
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 2))
    with nk.FreezeTraining(model, {"0": 0}, steps=1):
        before = weights(model)
        model.train()(torch.randn(8, 4))
        assert same(before, weights(model))


def slow_reference(model, optimizer, batches, plan):
    """Train with what is frozen cut off by hand: detached, without gradients, its norms in evaluation mode."""
    for step, (images, labels) in enumerate(batches):
        model.train()
        frozen = [number for number, at in plan.items() if at <= step]
        for number in frozen:
            model.get_submodule(f"bn{number}").eval()
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images, detached=max(frozen, default=0)), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw fused", "adagrad"])
def test_the_weights_are_those_of_a_loop_that_cuts_the_prefix_off_by_hand(net, kind):
    other = copy.deepcopy(net)
    slow_reference(other, OPTIMIZERS[kind](other.parameters()), data(12), {1: 3, 2: 6, 3: 9})
    optimizer = OPTIMIZERS[kind](net.parameters())
    with nk.FreezeTraining(net, "linear", steps=12) as freezing:
        train(net, optimizer, freezing, data(12))
        assert freezing.plan == {"conv1": 3, "conv2": 6, "conv3": 9, "out": None}
    assert same(weights(net), weights(other))


def test_without_anything_frozen_training_is_as_ever(net):
    other = copy.deepcopy(net)
    with nk.FreezeTraining(net, {"conv1": 1}, steps=5) as freezing:
        train(net, sgd(net), freezing, data(6))
    for batch, optimizer in zip(data(6), [sgd(other)] * 6, strict=True):
        update(other, optimizer, *batch)
    assert same(weights(net), weights(other))


# --- nothing is kept for what is frozen -------------------------------------------------------------------------------


def saved_bytes(model, images):
    """Return how many bytes autograd keeps for the backward pass, parameters aside."""
    own, kept = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}, {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(images).sum()
    total = sum(kept.values())
    loss.backward()
    return total


def test_what_comes_out_of_the_frozen_groups_needs_no_gradient(net):
    with nk.FreezeTraining(net, {"conv2": 0}, steps=1), nk.recording(net, ["conv1", "bn2", "conv3"]) as outputs:
        net(data(1)[0][0])
        assert {name: output.requires_grad for name, output in outputs.items()} == {
            "conv1": False, "bn2": False, "conv3": True,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["resnet20", "svcca_convnet"])
def test_the_memory_kept_for_the_backward_pass_shrinks_with_every_unit(name):
    model, images = seeded(architecture(name), 0), torch.randn(4, 3, 32, 32)
    sizes = []
    with nk.FreezeTraining(model, "linear", steps=len(nk.FreezeTraining(model, steps=1).groups)) as freezing:
        for _ in freezing.groups:
            sizes.append(saved_bytes(model, images))
            freezing.step()
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert sizes[-1] < 0.1 * sizes[0]


# --- giving back ------------------------------------------------------------------------------------------------------


def flags(model):
    return (
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        [module.training for module in model.modules()],
        [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
    )


@pytest.mark.parametrize("steps", [0, 1, 11])
def test_the_model_comes_back_as_it_was(net, steps):
    net.conv2.bias.requires_grad_(False)
    net.bn2.eval()
    before = flags(net)
    with nk.FreezeTraining(net, "linear", steps=12) as freezing:
        train(net, sgd(net), freezing, data(steps), train_mode=False)
    assert flags(net) == before


def test_the_model_comes_back_after_a_crash(net):
    before = flags(net)
    with pytest.raises(RuntimeError), nk.FreezeTraining(net, {"conv1": 0}, steps=2):
        net(torch.ones(1, 5))
    assert flags(net) == before


def test_norms_come_back_in_the_mode_that_was_asked_for_last(net):
    with nk.FreezeTraining(net, {"conv3": 0}, steps=2):
        net.eval()
    assert not any(module.training for module in net.modules())
    with nk.FreezeTraining(net, {"conv3": 0}, steps=2):
        net.train()
    assert all(module.training for module in net.modules())


def test_closing_twice_does_no_harm(net):
    freezing = nk.FreezeTraining(net, {"conv3": 0}, steps=2)
    freezing.close()
    net.out.weight.requires_grad_(False)
    freezing.close()
    assert not net.out.weight.requires_grad
    with pytest.raises(InvalidValue, match="the model was given back; make a new `FreezeTraining` to go on"):
        freezing.step()


def test_a_partly_frozen_model_can_be_copied_and_pickled(net):
    with nk.FreezeTraining(net, {"conv2": 0}, steps=2):
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            twin.train()
            assert [twin.bn1.training, twin.bn3.training] == [False, True]
            assert net.bn1.train.args[0] is net.bn1
            assert twin.bn1.train.args[0] is twin.bn1


# --- refusals ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def test_a_parameter_shared_by_a_frozen_and_a_live_unit_is_refused():
    with pytest.raises(InvalidValue, match="'embed.weight' and 'head.weight' are one parameter.*untie them"):
        nk.FreezeTraining(Tied(), steps=4)
    with pytest.raises(InvalidValue, match="are one parameter"):
        nk.FreezeTraining(Tied(), {"embed": 0.5}, steps=4)


def test_a_parameter_shared_within_one_unit_is_frozen_once():
    model = Tied()
    with nk.FreezeTraining(model, {"head": 0.5}, steps=2) as freezing:
        model(torch.arange(3)).sum().backward()
        assert freezing.step() == ["head"]
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_number_of_steps_may_come_from_numpy_and_is_kept_as_a_plain_one(net):
    freezing = nk.FreezeTraining(net, steps=np.int64(8))
    assert type(freezing.state_dict()["steps"]) is int
    freezing.close()
    with refused(InvalidValue, "steps"):
        nk.FreezeTraining(net, steps=True)


def test_what_cannot_be_meant_is_refused(net):
    refusals(
        (lambda: nk.FreezeTraining(net, "liner", steps=4), UnknownName, "schedule"),
        (lambda: nk.FreezeTraining(net, torch.ones(9), steps=4), InvalidValue, "schedule"),
        (lambda: nk.FreezeTraining(net), InvalidValue, "steps"),
        (lambda: nk.FreezeTraining(net, steps=0), InvalidValue, "steps"),
        (lambda: nk.FreezeTraining(nn.Sequential(nn.ReLU(), nn.ReLU()), steps=3), InvalidValue, ""),
        (lambda: nk.FreezeTraining(net, {"conv9": 0.5}, steps=4), UnknownName, "layers"),
        (lambda: nk.FreezeTraining(net, steps=4).members("conv"), UnknownName, ""),
    )


def test_a_mapping_may_be_written_in_any_order(net):
    assert nk.FreezeTraining(net, {"conv2": 0.5, "conv1": 0.25}, steps=4).plan == {"conv1": 1, "conv2": 2}


def test_an_optimizer_that_moves_what_has_no_gradient_is_refused(net):
    with pytest.raises(InvalidValue, match="`LBFGS` moves parameters without gradients"):
        nk.FreezeTraining(net, steps=4, optimizer=[sgd(net), torch.optim.LBFGS(net.parameters())])


def test_sharded_parameters_are_refused(net):
    FullyShardedDataParallel = type("FullyShardedDataParallel", (nn.Sequential,), {})
    with pytest.raises(InvalidValue, match="`FullyShardedDataParallel` keeps parameters in flat shards"):
        nk.FreezeTraining(FullyShardedDataParallel(net), steps=4)
