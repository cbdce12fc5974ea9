"""Small models with the habits that make recording hard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """A residual block with one in-place ReLU, called twice."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images):
        return self.relu(images + self.conv2(self.relu(self.bn(self.conv1(images)))))


class Residual(nn.Module):
    """A small ResNet: stem, two stages of blocks, head."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(4), Block(4))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 5)

    def forward(self, images):
        features = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(images)))))
        return self.fc(self.pool(features).flatten(1))


class TokenLayer(nn.Module):
    """Gives a tuple, as Hugging Face layers do."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, states):
        return (torch.tanh(self.dense(states)), None)


class Encoder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.ModuleList([TokenLayer(width) for _ in range(3)])

    def forward(self, states):
        for layer in self.layer:
            states = layer(states)[0]
        return states


@dataclass
class ModelOutput(OrderedDict):
    """Both a dataclass and an ordered mapping, like its namesake in Hugging Face's library."""

    pooled: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("pooled", "last_hidden_state"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Language(nn.Module):
    """A small BERT with a table of positions that knows nothing of the examples."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embeddings = nn.Embedding(11, width)
        self.places = nn.Embedding(16, width)
        self.encoder = Encoder(width)
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids, attention_mask=None):
        places = self.places(torch.arange(input_ids.shape[1])[None])
        states = self.encoder(self.embeddings(input_ids) + places)
        return ModelOutput(pooled=self.pooler(states[:, 0]), last_hidden_state=states)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def residual():
    return Residual()


@pytest.fixture
def language():
    return Language()


@pytest.fixture
def chain():
    """A plain chain whose ReLU works in place on what came before it."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


@pytest.fixture
def images():
    return torch.randn(10, 3, 6, 6)


@pytest.fixture
def no_hooks():
    """Return a function that tells whether a model carries no forward hooks."""

    def check(model):
        return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    return check
