"""Saved trainings with hooks: refused where a hook reads another value than before, wherever it keeps it."""

import sys
import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from netkin.errors import FileError
from netkin.training import Hook, train


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 3))


def labelled():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(20, 2, 2, generator=draw), torch.randint(0, 3, (20,), generator=draw)


WEIGHT, TABLE = 0.1, {"weight": 0.1}


def scaled(model, step):
    return model[2].weight.mul_(WEIGHT)


class Penalty(Hook):
    """Reads values from all places that a hook may keep them in, and counts its steps."""

    def __init__(self, weight, options):
        self.weight, self.options, self.steps, self.seen = weight, options, {"done": time.time()}, []

    def begin(self, model, optimizer):
        self.started = [self.options]

    def loss(self, model, inputs, outputs, step):
        return self.term(outputs) * self.weight * self.options.weight

    def term(self, outputs):
        return outputs.square().mean()

    def after_step(self, model, step):
        self.steps["done"] += step * 2
        self.seen.append(step)


@pytest.mark.parametrize("place", ["WEIGHT", "TABLE", "function", "attribute", "option", "method", "tensor"])
def test_a_hook_with_another_value_wherever_it_is_kept_is_another(tmp_path, monkeypatch, place):
    def doubled(model, step):
        scaled(model, step).mul_(TABLE["weight"])

    def trained(weight=0.1, option=0.1, mask=1.0):
        mask = torch.full((1,), mask)
        hooks = [Penalty(weight, SimpleNamespace(weight=option, started=time.time())), doubled]
        hooks += [hooks[0], lambda model, step: model[2].bias.mul_(mask)]
        return train(net(), labelled(), epochs=1, hooks=hooks, save=tmp_path / "run")

    assert trained() == trained()
    change = {
        "WEIGHT": lambda: monkeypatch.setattr(sys.modules[__name__], "WEIGHT", 0.2),
        "TABLE": lambda: monkeypatch.setitem(TABLE, "weight", 0.2),
        "function": lambda: monkeypatch.setattr(sys.modules[__name__], "scaled", lambda model, step: model[2].weight),
        "method": lambda: monkeypatch.setattr(Penalty, "term", lambda self, outputs: outputs.mean()),
    }
    given = {"attribute": {"weight": 0.2}, "option": {"option": 0.2}, "tensor": {"mask": 2.0}}
    change.get(place, lambda: None)()
    with pytest.raises(FileError, match="differs in hooks; ask"):
        trained(**given.get(place, {}))


@dataclass(frozen=True, slots=True)
class Slotted:
    rate: float


class Owner:
    """Gives a rate in every way that an object can."""

    common: ClassVar = [0.1]

    def __init__(self, rate):
        self._rate, self.made = rate, time.time()

    @property
    def rate(self):
        return self._rate

    def read(self):
        return self._rate

    def __call__(self, weight):
        return weight * self._rate

    def __getitem__(self, place):
        return self._rate


class Scaling(Hook):
    """Multiplies a weight by a rate that it reads in some way from what it was given."""

    def __init__(self, given, way):
        self.given, self.way, self.log = given, way, {}

    def after_step(self, model, step):
        log = self.log
        log[step] = self.given
        log.setdefault("began", time.time())
        model[2].weight.mul_(self.way(self))


WAYS = {
    "its own attribute": (float, lambda hook: hook.given),
    "an attribute by its name as a text": (lambda rate: SimpleNamespace(rate=rate), lambda hook: hook.given.rate),
    "a slot": (Slotted, lambda hook: hook.given.rate),
    "a property": (Owner, lambda hook: hook.given.rate),
    "a method": (Owner, lambda hook: hook.given.read()),
    "a call": (Owner, lambda hook: hook.given(1.0)),
    "an item": (Owner, lambda hook: hook.given[0]),
    "a deque": (lambda rate: deque([rate]), lambda hook: hook.given[0]),
    "items of a mapping": (lambda rate: {"a": rate}, lambda hook: sum(value for _, value in hook.given.items())),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_reads_another_rate_in_whatever_way_is_another(tmp_path, way):
    make, read = WAYS[way]

    def trained(hook):
        return train(net(), labelled(), epochs=1, hooks=[hook], save=tmp_path / "run")

    first = Scaling(make(0.5), read)
    assert trained(first) == trained(first) == trained(Scaling(make(0.5), read))  # the same one, and one made anew
    with pytest.raises(FileError, match="differs in hooks; ask"):
        trained(Scaling(make(0.9), read))


def test_a_hook_is_another_where_the_class_of_what_it_reads_has_another_value(tmp_path, monkeypatch):
    def trained():
        hook = Scaling(Owner(0.5), lambda hook: hook.given.common[0])
        return train(net(), labelled(), epochs=1, hooks=[hook], save=tmp_path / "run")

    assert trained() == trained()
    monkeypatch.setattr(Owner, "common", [0.9])
    with pytest.raises(FileError, match="differs in hooks; ask"):
        trained()
