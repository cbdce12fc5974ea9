"""Saved trainings with hooks: a hook is known by its source code and by its attribute `settings`."""

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


class Penalty(Hook):
    """Counts its steps, and names in its settings what it reads."""

    def __init__(self, weight):
        self.settings, self.steps, self.seen = {"weight": weight}, 0, []

    def loss(self, model, inputs, outputs, step):
        self.steps += 1
        self.seen.append(step)
        return self.settings["weight"] * self.term(outputs)

    def term(self, outputs):
        return outputs.square().mean()


def scaling(by):
    def scale(model, step):
        model[2].weight.mul_(by)

    scale.settings = by
    return scale


def observing(seen, cache):
    """Return a hook whose closure changes while it runs."""

    def observe(model, step):
        seen.append(step)
        cache[step] = object()

    return observe


def doubling(model, step):
    model[2].weight.mul_(2)


def halving(model, step):
    model[2].weight.mul_(0.5)


@pytest.mark.parametrize("other", ["settings", "settings of a function", "another function", "a method"])
def test_a_hook_with_other_settings_or_other_code_is_another(tmp_path, monkeypatch, other):
    seen, cache = [], {}

    def trained(weight=0.1, by=0.9, last=doubling):
        hooks = [Penalty(weight), scaling(by), observing(seen, cache), last]
        return train(net(), labelled(), epochs=1, hooks=hooks, save=tmp_path / "run")

    assert trained() == trained()
    changes = {
        "settings": {"weight": 0.2},
        "settings of a function": {"by": 0.8},
        "another function": {"last": halving},
    }
    if other == "a method":
        monkeypatch.setattr(Penalty, "term", lambda self, outputs: outputs.mean())
    with pytest.raises(FileError, match="differs in hooks( .*halving'.)?; ask"):
        trained(**changes.get(other, {}))
    assert seen  # which the hook that was refused closes over as well
