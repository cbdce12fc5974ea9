"""Freeze training in company: checkpoints of a run, other tools of training, and what the first step shows."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import netkin as nk
from freezing_worlds import Net, data, same, sgd, train, update, weights
from netkin.errors import ForwardError, InvalidValue
from netkin.sources.architectures import seeded
from quickly import slow_but
from refusals import refused


@pytest.fixture
def net():
    return seeded(Net, 0)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(net, optimizer, freezing, path):
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "freezing": freezing.state_dict()}, path)


@cache
def uninterrupted(schedule):
    """Return the options of a run, the network that it trained and how that was frozen."""
    options = {"steps": 12}
    if schedule == "similarity":
        options |= {"probe": data(1)[0][0], "threshold": 0.8, "patience": 2, "past": 2, "every": 1}
    whole = seeded(Net, 0)
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    freezing = nk.FreezeTraining(whole, schedule, **options)
    train(whole, optimizer, freezing, data(12))
    return options, whole, freezing


@pytest.mark.parametrize("stop", slow_but([0, 1, 5, 6, 7, 11], 0, 6))
@pytest.mark.parametrize("schedule", ["linear", "similarity"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, schedule, stop):
    (options, whole, freezing), batches = uninterrupted(schedule), data(12)
    assert freezing.frozen == ["conv1", "conv2", "conv3"]

    first = seeded(Net, 0)
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    parted = nk.FreezeTraining(first, schedule, **options)
    train(first, optimizer, parted, batches[:stop])
    checkpointed(first, optimizer, parted, tmp_path / "half.pt")

    second, saved = seeded(Net, 5), torch.load(tmp_path / "half.pt", weights_only=True)
    optimizer = torch.optim.Adam(second.parameters(), lr=0.5)
    later = nk.FreezeTraining(second, schedule, **options)
    second.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    later.load_state_dict(saved["freezing"])
    assert (later.frozen, later.done) == (parted.frozen, stop)
    assert [p.requires_grad for p in second.parameters()] == [p.requires_grad for p in first.parameters()]
    train(second, optimizer, later, batches[stop:])
    assert same(weights(second), weights(whole))
    assert later.frozen == freezing.frozen
    assert later.history == freezing.history


def test_the_saved_schedule_takes_the_place_of_the_one_given(net):
    state = nk.FreezeTraining(net, "linear", steps=40).state_dict()
    freezing = nk.FreezeTraining(net, "linear", steps=8)
    freezing.load_state_dict(state)
    assert freezing.plan == {"conv1": 10, "conv2": 20, "conv3": 30, "out": None}
    assert freezing.steps == 40


def test_loading_an_earlier_state_thaws_what_was_not_frozen_then(net):
    freezing = nk.FreezeTraining(net, "linear", steps=4)
    early = freezing.state_dict()
    train(net, sgd(net), freezing, data(3))
    freezing.load_state_dict(early)
    assert freezing.frozen == []
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert net.train().bn1.training


def test_a_state_of_something_else_is_refused(net):
    freezing = nk.FreezeTraining(net, "linear", steps=8)
    state = freezing.state_dict()
    with pytest.raises(InvalidValue, match="the state is of a 'linear' schedule and this is 'fractions'"):
        nk.FreezeTraining(net, {"conv1": 0.5}, steps=8).load_state_dict(state)
    with pytest.raises(InvalidValue, match="the state is of the groups .'conv1', .* and these are .'conv1', 'conv2'.;"):
        nk.FreezeTraining(net, "linear", steps=8, layers=["conv1", "conv2"]).load_state_dict(state)
    with pytest.raises(InvalidValue, match="the state has format 9, and this netkin reads format 1"):
        freezing.load_state_dict(state | {"format": 9})
    with pytest.raises(InvalidValue, match="no state of `FreezeTraining`, as it has no 'format'; pass its `state_dict"):
        freezing.load_state_dict({"param_groups": []})


# --- in company -------------------------------------------------------------------------------------------------------


def test_learning_rate_schedules_go_on(net):
    optimizer = sgd(net)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    with nk.FreezeTraining(net, "linear", steps=12) as freezing:
        for batch in data(12):
            update(net, optimizer, *batch)
            schedule.step()
            freezing.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_gradient_scaling_goes_on_and_a_skipped_step_counts_as_time(net):
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    with nk.FreezeTraining(net, "linear", steps=8) as freezing:
        for number, (images, labels) in enumerate(data(8)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(net(images), labels)
            scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            freezing.step()
        assert freezing.frozen == ["conv1", "conv2", "conv3"]
        assert net.conv1.weight.grad is None
    assert all(torch.isfinite(tensor).all() for tensor in net.state_dict().values())


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return x


def test_checkpointed_groups_are_frozen_as_others_are():
    model = Checkpointed(reentrant=False)
    other = copy.deepcopy(model)
    for each in (model, other):
        each.train(each is model)  # without checkpointing, the same weights
        optimizer = sgd(each)
        with nk.FreezeTraining(each, "linear", steps=8) as freezing:
            for _ in range(8):
                optimizer.zero_grad()
                each(torch.linspace(-1, 1, 12).view(3, 4)).pow(2).sum().backward()
                optimizer.step()
                freezing.step()
            assert freezing.frozen == ["blocks.0", "blocks.1", "blocks.2"]
    assert same(weights(model), weights(other))


def test_reentrant_checkpointing_is_refused():
    model = Checkpointed(reentrant=True)
    freezing = nk.FreezeTraining(model, "linear", steps=8)
    model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    with pytest.raises(ForwardError, match="group 'blocks.0' is checkpointed with `use_reentrant=True`.*=False"):
        freezing.step()


def test_gradient_accumulation_leaves_no_gradient_behind(net):
    optimizer = sgd(net)
    with nk.FreezeTraining(net, {"conv1": 0.5}, steps=2) as freezing:
        for images, labels in data(2):
            cross_entropy(net(images), labels).backward()
        optimizer.step()
        freezing.step()
        assert net.conv1.weight.grad is None
        assert net.conv2.weight.grad is not None


@pytest.mark.slow
def test_a_compiled_model_is_frozen_like_any_other(net):
    other = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aot_eager")
    for model in (compiled, other):
        optimizer = sgd(model)
        with nk.FreezeTraining(model, "linear", steps=8) as freezing:
            train(model, optimizer, freezing, data(8))
            assert freezing.frozen == ["conv1", "conv2", "conv3"]
    for name, tensor in weights(other).items():
        torch.testing.assert_close(tensor, net.state_dict()[name])


def test_the_whole_training_can_also_be_told_by_its_number_of_steps(net):
    freezing = nk.FreezeTraining(net, "linear", steps=8)
    assert freezing.at(5) == ["conv1", "conv2"]
    assert freezing.at(5) == []
    assert (freezing.step(), freezing.frozen) == (["conv3"], ["conv1", "conv2", "conv3"])
    assert repr(freezing) == "<FreezeTraining linear: 3 of 4 groups frozen after 6 of 8 steps>"
    with refused(InvalidValue, "steps"):
        freezing.at(3)


# --- what the first step shows ----------------------------------------------------------------------------------------


class Backwards(nn.Module):
    """Registered in the opposite order of running."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def test_units_that_run_in_another_order_are_refused_with_the_right_one():
    model = Backwards()
    freezing = nk.FreezeTraining(model, steps=4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ForwardError, match="pass `layers=.'first', 'middle', 'last'.`"):
        freezing.step()
    freezing.close()
    model.zero_grad()
    with nk.FreezeTraining(model, steps=3, layers=["first", "middle", "last"]) as freezing:
        model(torch.ones(1, 4)).sum().backward()
        assert freezing.step() == ["first"]
        assert not model.first.weight.requires_grad
        assert model.middle.weight.requires_grad


def test_what_runs_before_a_unit_is_found_by_running():
    model = Backwards()
    with nk.FreezeTraining(model, {"middle": 0.5}, steps=2) as freezing:
        assert freezing.members("middle") == ["last", "middle"]  # by registration, until the model has run
        model(torch.ones(1, 4)).sum().backward()
        assert freezing.step() == ["middle"]
        assert freezing.members("middle") == ["first", "middle"]
        assert [p.requires_grad for p in (model.first.weight, model.last.weight)] == [False, True]


def test_a_unit_that_depends_on_a_later_one_is_refused():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x) @ self.c.weight))

    model = Crossed()
    freezing = nk.FreezeTraining(model, steps=4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ForwardError, match="group 'b' depends on 'c.weight', which would still be trained"):
        freezing.step()


def test_a_unit_that_does_not_run_is_refused():
    model = Backwards()
    model.forward = lambda x: model.last(model.first(x))
    freezing = nk.FreezeTraining(model, steps=4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ForwardError, match="group 'middle' did not run in the first training step"):
        freezing.step()


def test_running_without_gradients_shows_nothing(net):
    with nk.FreezeTraining(net, steps=4) as freezing, torch.no_grad():
        net.conv2(net.conv1(data(1)[0][0]))
        assert freezing.at(1) == ["conv1"]
