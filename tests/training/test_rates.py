"""Learning rates: schedules of the recipe and of torch, for one group of parameters or several."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from netkin.errors import InvalidValue
from netkin.training import Hook, Recipe, train
from refusals import refused


@pytest.mark.parametrize("schedule", ["constant", "steps", "linear", "cosine"])
def test_rates_rise_in_the_warm_up_and_then_fall(schedule):
    rates = [rate for (rate,) in Recipe(steps=12, schedule=schedule, warmup=3, lr=0.4).rates([0.4], 12)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    share = np.arange(9) / 9
    falling = {
        "constant": np.ones(9),
        "steps": np.where(share >= 0.75, 0.01, np.where(share >= 0.5, 0.1, 1)),
        "linear": 1 - share,
        "cosine": (1 + np.cos(np.pi * share)) / 2,
    }
    assert rates[3:] == pytest.approx(0.4 * falling[schedule])


def test_linear_and_cosine_end_at_a_share_of_the_rate():
    for schedule in ("linear", "cosine"):
        rates = Recipe(steps=10_000, schedule=schedule, lr=0.5, end=0.1).rates([0.5], 10_000)
        assert rates[-1][0] == pytest.approx(0.05, rel=1e-3)


def test_each_group_of_parameters_ends_at_its_own_share():
    rates = Recipe(epochs=4, schedule="cosine", end=0.5, warmup=1).rates([0.1, 0.01], 4)
    for place, first in enumerate((0.1, 0.01)):
        (alone,) = zip(*Recipe(epochs=4, schedule="cosine", end=0.5, warmup=1).rates([first], 4), strict=True)
        assert tuple(one[place] for one in rates) == alone
    assert rates[1][1] > rates[2][1] > rates[3][1] > 0.005


def test_a_schedule_of_torch_sees_all_groups():
    two = Recipe(epochs=2, schedule=lambda optimizer: LambdaLR(optimizer, [lambda step: 1, lambda step: 0.5**step]))
    assert two.rates([0.1, 0.2], 2) == [[0.1, 0.2], [0.1, 0.1]]


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3)


def labelled():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(20, 4, generator=draw), torch.randint(0, 3, (20,), generator=draw)


@pytest.mark.parametrize("schedule", [ReduceLROnPlateau, lambda optimizer: ReduceLROnPlateau(optimizer, patience=3)])
def test_a_schedule_that_waits_for_losses_is_refused(tmp_path, schedule):
    with refused(InvalidValue, "schedule"):
        train(net(), labelled(), epochs=1, schedule=schedule, save=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_computes_the_loss_itself_is_refused():
    with refused(InvalidValue, "optimizer"):
        train(net(), labelled(), epochs=1, optimizer=torch.optim.LBFGS)


class Scaling(Hook):
    """Trains a factor of the outputs beside the model, from `begin` on or later."""

    def __init__(self, at=0):
        self.factor, self.at, self.rates = nn.Parameter(torch.ones(())), at, []

    def begin(self, model, optimizer):
        self.optimizer = optimizer
        self._add(0)

    def _add(self, step):
        if step == self.at:
            self.optimizer.add_param_group({"params": [self.factor], "lr": 0.02})

    def loss(self, model, inputs, outputs, step):
        self.rates.append([group["lr"] for group in self.optimizer.param_groups])
        return (self.factor * outputs).square().mean()

    def after_step(self, model, step):
        self._add(step)


def test_a_hook_may_add_a_group_of_parameters_when_the_training_begins():
    hook = Scaling()
    train(net(), labelled(), epochs=3, batch=20, lr=0.2, schedule="linear", hooks=[hook])
    assert np.array(hook.rates) == pytest.approx(np.outer([1, 2 / 3, 1 / 3], [0.2, 0.02]))
    assert hook.factor < 1


def test_a_group_that_is_added_later_is_refused():
    with pytest.raises(InvalidValue, match="has 2 groups of parameters, and had 1 when the training began"):
        train(net(), labelled(), epochs=3, batch=20, hooks=[Scaling(at=1)])
