"""The small network of the demo, trained on the bundled digits the same way each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from netkin.sources.architectures import digits, seeded
from netkin.sources.datasets import load_data
from netkin.training.loop import train
from netkin.training.recipe import Hook, Recipe, Record


def untrained_digits_net(seed: int) -> nn.Module:
    """Return a `netkin:digits` network as it is before training, its weights drawn from `seed`."""
    return seeded(digits, seed).eval()


def trained_digits_net(seed: int, epochs: int = 12, progress: Callable[[int, float], None] | None = None) -> nn.Module:
    """Return a `netkin:digits` network trained on `digits:train`; its first weights and its batches follow from `seed`.

    `progress(epoch, loss)` is called after each epoch with the mean loss of its batches.
    """
    model = untrained_digits_net(seed)
    falling = partial(LinearLR, start_factor=1, end_factor=0.05, total_iters=epochs - 1)
    recipe = Recipe(epochs=epochs, batch=32, optimizer="adam", rate=3e-3, schedule=falling)
    train(model, _digits(), recipe, seed=seed, hooks=[_Telling(progress)] if progress else [], progress=False)
    return model


class _Telling(Hook):
    def __init__(self, progress: Callable[[int, float], None]):
        self.progress = progress

    def after_epoch(self, model: nn.Module, record: Record) -> None:
        self.progress(int(record["epoch"]), record["loss"])


def _digits() -> tuple[Any, ...]:
    return tuple(map(torch.cat, zip(*load_data("digits:train", batch_size=10_000), strict=True)))
