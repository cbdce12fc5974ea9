"""Runs whose layers come to their final state at known steps."""

import torch
from torch import nn

WIDTH, LAYERS = 6, ("low", "middle", "high")


class Wave(nn.Module):
    """A layer so far from linear that two of them share nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(4 * torch.randn(WIDTH, WIDTH))

    def forward(self, rows):
        return torch.sin(rows @ self.weight)


class Fan(nn.Module):
    """Layers that all read the input, so that each comes to its final state by itself."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        for name in LAYERS:
            self.add_module(name, Wave())
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        return torch.stack([layer(rows) for layer in self.children()]).sum(0)


def run_of(**arrivals):
    """Return a run in which each layer takes its final weights at the step given, and keeps them."""
    final = Fan(seed=99).state_dict()
    steps = [0, 10, 20, 30, 40, 50]
    return {
        step: {key: final[key] if step >= arrivals[key.split(".")[0]] else start for key, start in
               Fan(seed=step).state_dict().items()} | (final if step == 50 else {})
        for step in steps
    }  # fmt: skip
