"""Gradients and sketches: what they take beside the forward passes, and beside one read of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from clock import ratio
from nets import batches, forward_both, nets

import netkin as nk
from netkin.representations.activations import Reader
from netkin.representations.gradients import Taps, Target
from netkin.representations.guests import guest
from netkin.statistics.sketches import Placing, SketchSettings

BLOCKS = ["conv1", *(f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)), "fc"]


def gradients() -> dict[str, Any]:
    """Return features and gradients at ten layers of two ResNet-18, against the two forward passes."""
    models, images = nets(), batches(3)

    def read() -> None:
        for model in models:
            reader = Reader(model, BLOCKS, taps=Taps(model, [Target()]))
            with guest(model), reader.open():
                for batch in images:
                    reader(batch)

    return ratio(read, lambda: forward_both(models, images), repeats=5)


def sketched() -> dict[str, Any]:
    """Return a comparison by sketches of features and gradients at the same layers, against the forward passes."""
    models, images = nets(), batches(3)
    measure = "sketched_cka_uncentered(kernel=sum)"
    work = lambda: nk.collect(*models, images, measure, layers=BLOCKS, progress=False)  # noqa: E731
    return ratio(work, lambda: forward_both(models, images), repeats=5)


def sketching() -> dict[str, Any]:
    """Return the summing of 50,000 rows of 512 numbers into 512 buckets, against one read of them."""
    rows = torch.randn(50_000, 512, generator=torch.Generator().manual_seed(0))
    ids = np.arange(len(rows))
    return ratio(lambda: Placing(SketchSettings(), ids, rows.device).sums(rows), rows.sum, repeats=15)
