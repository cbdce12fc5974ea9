"""A probe of a `DynamicsRecorder`: what one of 512 examples costs, as a share of an epoch of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clock import ratio
from torch import nn

import netkin as nk
from netkin.sources.architectures import architecture, seeded

EXAMPLES, EPOCH = 512, 50_000  # in a probe, and in an epoch of CIFAR-10
SHAPES = ("pool", "flatten")


def probing(shape: str, batch: int = 128, steps: int = 8, repeats: int = 5, device: str = "cpu") -> dict[str, Any]:
    """Return the time of one probe over that of `steps` training steps, and over an epoch of as many as it needs.

    A ResNet-20 on noise in the shape of CIFAR images, default layers, logging `svcca` with the previous probe.
    """
    model = seeded(architecture("resnet20"), 0).to(device).train()
    recorder = nk.DynamicsRecorder(model, torch.randn(EXAMPLES, 3, 32, 32), shape=shape)
    train, count = _training(model, batch, steps, device), iter(range(10_000))
    recorder.probe(next(count))  # the first has no previous one
    figures = ratio(lambda: recorder.probe(next(count)), train, repeats)
    share = figures["ratio"] * steps * batch / EPOCH
    memory = {"bytes": recorder.memory_per_probe, "layers": len(recorder.progress[-1].previous)}
    return figures | memory | {"batch": batch, "steps": steps, "share_of_epoch": share}


def _training(model: nn.Module, batch: int, steps: int, device: str) -> Callable[[], Any]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(steps * batch, 3, 32, 32, generator=draw).to(device)
    labels = torch.randint(0, 10, (steps * batch,), generator=draw).to(device)
    recipe = nk.Recipe(epochs=1, batch=batch, lr=0.01, order="given")
    return lambda: nk.train(model, (images, labels), recipe, progress=False)


def table(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return the figures by shape as a table."""
    rows = [
        f"| `{shape}`, {found['layers']} layers | {found['seconds']:.2f} s | {found['bytes'] / 1e6:.1f} MB | "
        f"{found['share_of_epoch']:.1%} | < 5% |"
        for shape, found in figures.items()
    ]
    head = ["| one probe of 512 images | time | memory | share of an epoch of 50,000 images | goal |"]
    return [*head, "|---|---|---|---|---|", *rows]
