"""The digest of data: what it costs, as a share of a forward pass; `python bench/digesting.py [cuda]` prints it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from clock import ratio
from torch import Tensor

from netkin.identity import DataDigest
from netkin.sources.architectures import architecture, seeded

NETS, BATCHES = ("tiny10", "resnet20"), (32, 128, 512)


def digesting(name: str, batch: int, count: int = 8, repeats: int = 9, device: str = "cpu") -> dict[str, float]:
    """Return the time of digesting `count` batches of noise in the shape of CIFAR images over that of a pass."""
    model = seeded(architecture(name), 0).to(device).eval()
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(batch, 3, 32, 32, generator=draw).to(device) for _ in range(count)]
    return ratio(_waited(lambda: _digested(images), device), _waited(lambda: _passed(model, images), device), repeats)


def _digested(images: list[Tensor]) -> str:
    digest = DataDigest()
    for number, batch in enumerate(images):
        digest.update(batch, range(number * len(batch), (number + 1) * len(batch)))
    return digest.hex


@torch.no_grad()
def _passed(model: Any, images: list[Tensor]) -> None:
    for batch in images:
        model(batch)


def _waited(work: Callable[[], Any], device: str) -> Callable[[], None]:
    def run() -> None:
        work()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for net in NETS:
        for size in BATCHES:
            found = digesting(net, size, device=where)
            print(
                f"{net}, batches of {size} on {where}: {found['seconds'] / 8 * 1e3:.2f} ms a batch, "
                f"{found['seconds'] / found['floor_seconds']:.1%} of the forward pass, best of both (goal: ≤ 5%)"
            )
