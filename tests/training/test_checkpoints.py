"""Checkpoints that a training writes on its way."""

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue
from netkin.training import Checkpoints, train
from refusals import refused


def test_checkpoints_are_a_run_of_the_weights_as_the_model_uses_them(tmp_path):
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    nk.sparsify(model, 0.5)
    keep = Checkpoints(tmp_path / "run", every=3)
    train(model, (inputs, torch.arange(40) % 2), steps=6, batch=10, hooks=[keep], progress=False)
    series = nk.dynamics(tmp_path / "run", inputs, "cka", model=plain, progress=False)
    assert series.steps == (0, 3, 6)
    last = nk.dynamics({0: model, 1: model}, inputs, "cka", progress=False)
    assert series[6]["cka"].values == pytest.approx(last[1]["cka"].values, abs=1e-12)


def test_no_steps_between_checkpoints_are_refused(tmp_path):
    with refused(InvalidValue, "every"):
        Checkpoints(tmp_path, every=0)
