"""Direct stitching: all eight layers of two Tiny-10 nets by least squares, against the two forward passes."""

from __future__ import annotations

from time import process_time
from typing import Any

import torch
from clock import ratio
from nets import forward_both, lively

from netkin.applications.stitching import fit_all
from netkin.sources.architectures import seeded, tiny10

IMAGES, BATCH = 2_000, 100
LAYERS = [f"relu{number}" for number in range(1, 9)]


def stitching(repeats: int = 5) -> dict[str, Any]:
    """Return the CPU time of fitting all stitches over that of the passes, on one thread; other load upsets it least.

    Weights and images are random: only the time is of interest.
    """
    torch.set_num_threads(1)
    nets = lively(seeded(tiny10, 0)), lively(seeded(tiny10, 1))
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(BATCH, 3, 32, 32, generator=draw) for _ in range(IMAGES // BATCH)]
    pairs = [(layer, layer) for layer in LAYERS]
    fit_all(*nets, pairs, images[:1])  # imports and first calls
    figures = ratio(lambda: fit_all(*nets, pairs, images), lambda: forward_both(nets, images), repeats, process_time)
    return figures | {"threads": 1, "images": IMAGES, "layers": len(LAYERS)}
