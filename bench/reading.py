"""Reading: what it takes to read all linear measures of 20 × 20 layers from moments, beside the pass that took them."""

from __future__ import annotations

from typing import Any

import torch
from clock import seconds
from torch import Tensor

import netkin as nk
from netkin.settings import exact_products
from netkin.statistics import LayerMoments, Moments

EXAMPLES = 4_000
WIDTHS = [16] * 2 + [32] * 2 + [64] * 5 + [128] * 4 + [256] * 4 + [512] * 3
LINEAR = [measure for measure in nk.measures.measures().values() if measure.facts.reads is Moments]
AT_ONCE = 100  # pairs that are prepared together


def reading(device: str = "cpu", repeats: int = 3) -> dict[str, Any]:
    """Return the time of reading every linear measure of 400 pairs, that of folding the rows in, and their ratio."""
    rows = layers(device)
    collector = _collector()
    taking = min(seconds(lambda: _taken(rows)) for _ in range(repeats))
    collector.update(rows)
    times = [seconds(lambda: _read(collector)) for _ in range(repeats)]
    return {"floor_seconds": taking, "seconds": min(times), "ratio": min(times) / taking, "measures": len(LINEAR)}


def layers(device: str = "cpu") -> dict[tuple[str, int], Tensor]:
    """Return rows of twenty layers of each of two models, related, positive and of falling variance."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(EXAMPLES, 512, generator=draw)
    rows = {}
    for model in "ab":
        for layer, width in enumerate(WIDTHS):
            shared = base @ torch.randn(512, width, generator=draw) / 22
            mixed = (shared + torch.randn(EXAMPLES, width, generator=draw) / 2).relu()
            rows[model, layer] = (mixed * torch.logspace(0, -2, width) + 0.1).to(device)
    return rows


def _collector() -> LayerMoments:
    a, b = ([(model, layer) for layer in range(len(WIDTHS))] for model in "ab")
    return LayerMoments([(a, b)], precision=torch.float64, debiased=True)


def _taken(rows: dict[tuple[str, int], Tensor]) -> float:
    collector = _collector()
    collector.update(rows)
    return float(collector[("a", 0), ("b", 0)].n)  # a number of the sums waits for them on a GPU


@torch.no_grad()
def _read(collector: LayerMoments) -> list[float]:
    """Read as a comparison does: prepared many at a time, each layer decomposed anew for this reading."""
    collector.clear_cache()
    a, b = collector.pair_blocks[0]
    pairs = [(x, y) for x in a for y in b]
    values = []
    with exact_products():
        for start in range(0, len(pairs), AT_ONCE):
            some = [collector[x, y] for x, y in pairs[start : start + AT_ONCE]]
            Moments.prepare([(pair, LINEAR) for pair in some])
            values += [float(measure(pair)) for pair in some for measure in LINEAR]
    return values
