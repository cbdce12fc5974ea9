"""Trainings of models and hooks that change attributes of their own: resumed, stacked, and told from others."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin import jobs
from netkin.errors import FileError, InvalidValue
from netkin.training import Hook, train
from quickly import slow_after

INPUTS = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (400,), generator=torch.Generator().manual_seed(1))


class Stop(Exception):
    """What a test ends a training with."""


def stop_at(step):
    def stop(model, now):
        if now == step:
            raise Stop

    stop.settings = "whenever it stops, it is the same hook"
    return stop


class Changing(nn.Module):
    """Changes what it holds in every forward pass, in one of several ways, and reads it."""

    def __init__(self, way):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)
        self.way, self.count, self.factor, self.seen, self.by_name = way, 0, torch.ones(1), [], {}
        self.register_buffer("later", None)

    def forward(self, inputs):
        scale = 1.0
        if self.way == "a number":
            self.count += 1
            scale = 1 + 0.1 * self.count
        elif self.way == "a tensor":
            self.factor = self.factor * 1.1
            scale = self.factor
        elif self.way == "a tensor in place":
            self.factor.mul_(1.1)
            scale = self.factor.clone()
        elif self.way == "a list":
            self.seen.append(1)
            scale = 1 + 0.1 * len(self.seen)
        elif self.way == "a mapping":
            self.by_name["steps"] = self.by_name.get("steps", 0) + 1
            scale = 1 + 0.1 * self.by_name["steps"]
        elif self.way == "a buffer that is first made":
            self.later = inputs.detach().mean(0) if self.later is None else self.later * 0.9
            scale = 1 + self.later.abs().mean()
        return self.layer(inputs) * scale


WAYS = ["a number", "a tensor", "a tensor in place", "a list", "a mapping", "a buffer that is first made"]


@pytest.mark.parametrize("way", slow_after(2, WAYS))
def test_a_model_that_changes_its_attributes_resumes_bit_for_bit(tmp_path, way):
    given = {"epochs": 2, "batch": 50, "every": 1, "save": tmp_path / "run"}
    whole, parted = Changing(way), Changing(way)
    history = train(whole, (INPUTS, LABELS), epochs=2, batch=50)
    for step in (3, 9):
        with pytest.raises(Stop):
            train(parted, (INPUTS, LABELS), **given, hooks=[stop_at(step)])
        parted = Changing(way)
    resumed = train(parted, (INPUTS, LABELS), **given, hooks=[stop_at(0)])
    assert [one["loss"] for one in resumed] == [one["loss"] for one in history]
    assert torch.equal(parted.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("way", WAYS[:5])
def test_models_that_change_their_attributes_are_not_stacked(way):
    given = {"epochs": 1, "batch": 50, "seeds": [5, 6, 7], "progress": False}
    with pytest.raises(InvalidValue, match="the forward pass changes '(count|factor|seen|by_name)' of the model"):
        nk.train_many([Changing(way) for _ in range(3)], (INPUTS, LABELS), method="stacked", **given)


class Growing(Hook):
    """Adds a penalty that grows with the steps it has counted itself."""

    def __init__(self):
        self.steps = 0

    def loss(self, model, inputs, outputs, step):
        self.steps += 1
        return 0.01 * self.steps * outputs.square().mean()


def test_a_hook_that_counts_for_itself_resumes_bit_for_bit(tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    given = {"epochs": 2, "batch": 50, "every": 1, "save": tmp_path / "run"}
    history = train(net(), (INPUTS, LABELS), epochs=2, batch=50, hooks=[Growing()])
    with pytest.raises(Stop):
        train(net(), (INPUTS, LABELS), **given, hooks=[Growing(), stop_at(5)])
    resumed = train(net(), (INPUTS, LABELS), **given, hooks=[Growing(), stop_at(0)])
    assert [one["loss"] for one in resumed] == [one["loss"] for one in history]


def test_losses_of_networks_that_are_trained_at_once_are_those_of_each():
    def nets():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(3)]

    data = (INPUTS.double(), LABELS)  # epochs of 40 steps, so that a segment of 64 ends within the second
    at_once = nk.train_many(nets(), data, epochs=4, batch=10, seeds=[0, 1, 2], method="stacked", progress=False)
    for number, history in enumerate(at_once):
        alone = train(nets()[number], data, epochs=4, batch=10, seed=number)
        assert [one["loss"] for one in history] == pytest.approx([one["loss"] for one in alone], abs=1e-9)


class Scaled(nn.Module):
    """A network whose outputs depend on something that is no weight."""

    def __init__(self, seed, scale, way):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.way = nn.Linear(4, 8), nn.Linear(8, 3), way
        if way == "buffer":
            self.register_buffer("scale", torch.tensor(scale), persistent=False)
        elif way == "list":
            self.scale = [scale]
        elif way == "hook":
            self.first.register_forward_hook(lambda module, given, output: output * scale)

    def forward(self, inputs):
        held = getattr(self, "scale", 1.0)
        return self.last(torch.tanh(self.first(inputs) * (held[0] if isinstance(held, list) else held)))


@pytest.mark.parametrize("way", slow_after(1, ["buffer", "list", "hook"]))
def test_work_on_models_that_differ_in_more_than_weights_is_not_continued(tmp_path, way):
    def compared(scale):
        models = {name: Scaled(seed, scale, way) for seed, name in enumerate("ab")}
        return nk.compare_many(models, INPUTS, "cka", save=tmp_path / "c.netkin", progress=False)["a", "b"]

    def trained(scale):
        return train(Scaled(0, scale, way), (INPUTS, LABELS), epochs=1, save=tmp_path / "t.netkin", progress=False)

    first = compared(1.0)
    assert (compared(1.0).tables["cka"].values == first.tables["cka"].values).all()
    with pytest.raises(FileError, match="differs in architecture .'.* of 'a' and '.* of 'b'"):
        compared(5.0)
    assert trained(1.0) == trained(1.0)
    with pytest.raises(FileError, match="differs in architecture .'"):
        trained(5.0)


def test_training_on_batches_with_another_value_for_all_examples_is_another(tmp_path):
    class Multiplied(nn.Linear):
        def forward(self, inputs, scale):
            return super().forward(inputs) * scale

    def trained(scale):
        torch.manual_seed(0)
        batches = [{"inputs": INPUTS, "scale": torch.tensor(scale), "labels": LABELS}]
        return train(Multiplied(4, 3), batches, epochs=1, save=tmp_path / "run", progress=False)

    assert trained(1.0) == trained(1.0)
    with pytest.raises(FileError, match="differs in data"):
        trained(9.0)


def test_a_job_whose_process_number_went_to_another_one_is_no_running_job(tmp_path):
    with jobs.Job(tmp_path / "job", "count", {}):
        pass
    state = (tmp_path / "job" / "job.json").read_text().replace(': "done"', ': "running"')
    heartbeat = jobs.read(tmp_path / "job").heartbeat
    (tmp_path / "job" / "job.json").write_text(state)
    assert jobs.read(tmp_path / "job").condition == "running"
    (tmp_path / "job" / "job.json").write_text(state.replace(heartbeat, "2020-01-01T00:00:00.000+00:00"))
    assert jobs.read(tmp_path / "job").condition == "killed"
