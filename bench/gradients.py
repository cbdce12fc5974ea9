"""Gradients and sketches: what they take beside the forward passes, and beside one read of the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from clock import ratio
from nets import batches, forward_both, nets
from torch import Tensor

import netkin as nk
from netkin.representations.gradients import Taps, Target
from netkin.representations.hooks import inference_mode_of
from netkin.representations.layer_recorder import Recorder
from netkin.statistics.sketches import Placing, SketchSettings

BLOCKS = ["conv1", *(f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)), "fc"]


def gradients(device: str = "cpu") -> dict[str, Any]:
    """Return features and gradients at ten layers of two ResNet-18, against the two forward passes."""

    def read(models: Any, images: list[Tensor]) -> None:
        for model in models:
            recorder = Recorder(model, BLOCKS, taps=Taps(model, [Target()]))
            with inference_mode_of(model), recorder.open():
                for batch in images:
                    recorder(batch)

    return _beside_forward(read, device)


def sketched(device: str = "cpu") -> dict[str, Any]:
    """Return a comparison by sketches of features and gradients at the same layers, against the forward passes."""
    return _beside_forward(_collected, device)


def sketched_flatten(device: str = "cpu") -> dict[str, Any]:
    """Return the same of flattened maps, up to 65,536 wide."""
    return _beside_forward(partial(_collected, shape="flatten"), device)


def _collected(models: Any, images: list[Tensor], **options: Any) -> None:
    measure = "sketched_cka_uncentered(kernel=sum)"
    nk.collect(*models, images, measure, layers=BLOCKS, progress=False, **options)


def _beside_forward(work: Callable[[Any, list[Tensor]], None], device: str) -> dict[str, Any]:
    """Return the time of work on two networks beside that of their forward passes; a GPU takes more and larger ones."""
    count, size = (40, 512) if device == "cuda" else (3, 128)
    models = tuple(model.to(device) for model in nets())
    images = [batch.to(device) for batch in batches(count, size)]

    def waited(work: Callable[..., None]) -> None:
        work(models, images)
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":
        waited(work)  # what is loaded at the first call is left aside
    return ratio(lambda: waited(work), lambda: waited(forward_both), repeats=5)


def sketching() -> dict[str, Any]:
    """Return the summing of 50,000 rows of 512 numbers into 512 buckets, against one read of them."""
    rows = torch.randn(50_000, 512, generator=torch.Generator().manual_seed(0))
    ids = np.arange(len(rows))
    return ratio(lambda: Placing(SketchSettings(), ids, rows.device).sums(rows), rows.sum, repeats=15)
