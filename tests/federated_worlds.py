"""A small network of atoms, clients with few examples, and what tests of federations share."""

import numpy as np
import torch
from torch import nn

from netkin.representations.filters import AtomConv2d

OPTIONS = {"rounds": 3, "lr": 0.1, "batch": 4, "coefficients": "evolving"}


def network(activation=nn.Tanh):
    torch.manual_seed(3)
    return nn.Sequential(AtomConv2d(1, 3, 3, atoms=2), activation(), nn.Flatten(), nn.Linear(12, 3)).double()


def clients(count=5, size=10):
    generator = torch.Generator().manual_seed(5)
    return {
        f"c{k}": (torch.randn(size, 1, 4, 4, generator=generator).double(), (torch.arange(size) + k) % 3)
        for k in range(count)
    }


def same(one, other, within=0.0):
    states = [(one.state(c)[n], other.state(c)[n]) for c in one.clients for n in one.state(c)]
    return all(np.abs(a - b).max() <= within for a, b in states)
