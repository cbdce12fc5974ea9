"""Small networks whose live directions are known, and one that was trained."""

import pytest
import torch
from torch import nn

from netkin.sources import load_data
from netkin.sources.batches import sample
from netkin.training import trained_digits_net


@pytest.fixture(scope="session")
def digits_net():
    return trained_digits_net(0, epochs=4)


@pytest.fixture(scope="session")
def digits_data():
    return sample(load_data("digits:train"), 500), load_data("digits:test")


@pytest.fixture
def narrow_net():
    """A network in float64 whose third linear layer is fed 20 features that vary in exactly 4 directions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 20), nn.Linear(20, 6)).double()


@pytest.fixture
def narrow_conv():
    """Build a network in float64 whose layer '2' is a conv layer fed 8 channels that vary in exactly 3 directions."""

    def build(**options):
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 5, options.pop("kernel_size", 3), **options)
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))
        return nn.Sequential(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 8, 1), conv, last).double()

    return build


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
