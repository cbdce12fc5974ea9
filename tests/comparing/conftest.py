"""Small models to compare."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from netkin.jobs import Job


class Maps(nn.Module):
    """Two convolutions, the second half as large, one in-place ReLU called after both, and a head."""

    def __init__(self, width: int = 4, stride: int = 2):
        super().__init__()
        self.conv1 = nn.Conv2d(2, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width + 1, 3, padding=1, stride=stride)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(width + 1, 3)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.fc(self.relu(self.conv2(self.drop(self.relu(self.conv1(images))))).mean((2, 3)))


class Words(nn.Module):
    """A table of words and two layers over tokens."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layer = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, input_ids, attention_mask=None):
        states = self.embed(input_ids)
        for layer in self.layer:
            states = torch.tanh(layer(states))
        return states


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def maps():
    """Return a maker of small convolutional nets, each with other weights."""
    return Maps


@pytest.fixture
def words():
    return Words


@pytest.fixture
def images():
    return torch.randn(50, 2, 8, 8)


@pytest.fixture
def doubles(maps):
    """Two nets in double precision."""
    return maps().double(), maps().double()


@pytest.fixture
def inputs(images):
    return images.double()


@pytest.fixture
def sentences():
    """Two batches of padded sentences."""
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1))
    ids = torch.randint(1, 11, (40, 7)) * mask
    whole = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.zeros(40)}
    return [{key: value[part] for key, value in whole.items()} for part in (slice(0, 25), slice(25, 40))]


class Identity(nn.Module):
    """Gives its input, and a first half of its features, as two layers."""

    def __init__(self, parts=("whole", "part")):
        super().__init__()
        for part in parts:
            self.add_module(part, nn.Identity())

    def forward(self, rows):
        for name, part in self.named_children():
            part(rows if name == "whole" else rows[:, : rows.shape[1] // 2])
        return rows


@pytest.fixture
def identity():
    return Identity


@pytest.fixture
def layers():
    """The layers of `maps` that most tests look at."""
    return ["conv1", "conv2", "fc"]


@pytest.fixture
def state_of():
    """Return a function that tells all that a comparison must not change: of the model, of chance, of torch."""

    def look(model):
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            [parameter.grad for parameter in model.parameters()],
            [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            {name: tensor.clone().tolist() for name, tensor in model.state_dict().items()},
            torch.get_rng_state().tolist(), random.getstate(),
            np.random.get_state()[1].tolist(), torch.is_grad_enabled(),
        )  # fmt: skip

    return look


@pytest.fixture
def here(ray_cluster, tmp_path, monkeypatch):
    """The folder in which a call is made, and which workers enter for it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dropped(monkeypatch):
    """The names of parts that would have been deleted."""
    found = []
    monkeypatch.setattr(Job, "drop", lambda job, name, **how: found.append(name))
    return found
