"""A round of 120 clients with atoms: all at once, against one after another.

`python bench/federated.py --device cuda` prints both on a GPU; on a CPU the network and the images are small.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from torch import nn

import netkin as nk

CLIENTS = 120


def network(side: int) -> nn.Module:
    """Return an AlexNet with three convolutions of atoms, as in section 3.3 of the paper, or a smaller one."""
    widths = (32, 64, 64) if side == 32 else (8, 16, 16)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in zip((3, *widths[:-1]), widths, (2, 1, 1), strict=True):
        layers += [nk.AtomConv2d(inputs, outputs, 3, stride=stride, padding=1, atoms=9), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * widths[-1], 10))


def clients(examples: int, side: int, device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return random images for each client, all equally many."""
    draw = torch.Generator().manual_seed(0)
    made = {str(k): torch.randn(examples, 3, side, side, generator=draw) for k in range(CLIENTS)}
    return {name: (one.to(device), (torch.arange(examples) % 10).to(device)) for name, one in made.items()}


def seconds_a_round(method: str, rounds: int, epochs: int, device: str) -> float:
    """Return the seconds of a round, of which the first and what surrounds it are not counted, nor one call before."""
    side, examples = (32, 500) if device == "cuda" else (8, 64)
    model, data, times = network(side).to(device), clients(examples, side, device), []
    for count in (1, 1, 1 + rounds):
        started = perf_counter()
        nk.federate(
            model, data, "local", coefficients="fixed", rounds=count, epochs=epochs, method=method, progress=False
        )
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return (times[2] - times[1]) / rounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="in each round")
    options = parser.parse_args()
    found = {
        method: seconds_a_round(method, options.rounds, options.epochs, options.device)
        for method in ("stacked", "one by one")
    }
    print({method: round(value, 3) for method, value in found.items()}, "seconds a round")
    print(f"at once {found['one by one'] / found['stacked']:.1f} × faster on {options.device}")
