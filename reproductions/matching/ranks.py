"""At a given rank, a bottleneck trained on the task loss beats the cut by singular values.

Claim: matching/low-rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

import numpy as np

from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, ring
from reproductions.matching.stitches import Wanted, origin, shares, task_loss

RANKS = (4, 8, 16)
LAYERS = ("Layer 3", "Layer 6")
PAIRS = {"cpu": 1, "gpu": 10}


@claim(
    "matching/low-rank",
    figure="Fig. 7",
    sentence="It is clear that task loss matching outperforms least squares matching in the activation space when the "
    "rank of the transformation is fixed.",
    expected={
        f"{layer}, rank {k}: relative accuracy, task loss minus SVD": "above 0" for layer in LAYERS for k in RANKS
    },
    criterion="Holds if at Layers 3 and 6 of Tiny-10 and at each of the ranks 4, 8 and 16 a bottleneck trained on the "
    "task loss has a higher relative accuracy, in the mean over pairs, than reduced-rank regression; in part if at "
    "some.",
)
def low_rank(lab: Lab) -> Finding:
    """Relative accuracy of stitches of rank 4, 8 and 16, both ways."""
    pairs, names = ring(lab, "tiny10", PAIRS[lab.scale]), layers(lab, "tiny10")
    points = [(layer, k) for layer in LAYERS for k in RANKS]
    wanted = {
        ("SVD", layer, k): [Wanted(*pair, names[layer], f"reduced_rank(k={k})") for pair in pairs]
        for layer, k in points
    }  # fmt: skip
    wanted |= {
        ("task loss", layer, k): [task_loss(pair, names[layer], rank=k) for pair in pairs] for layer, k in points
    }
    found = shares(lab, wanted)
    gains = {(layer, k): np.subtract(found["task loss", layer, k], found["SVD", layer, k]) for layer, k in points}
    measured = {
        f"{layer}, rank {k}: relative accuracy, task loss minus SVD": Measured.over(gain)
        for (layer, k), gain in gains.items()
    }
    for (how, layer, k), values in found.items():
        measured[f"{layer}, rank {k}: relative accuracy by {how}"] = Measured.over(values)
    curves = {f"Relative accuracy at {layer}": _curve(found, layer) for layer in LAYERS}
    passed = [gain.mean() > 0 for gain in gains.values()]
    return Finding(verdict(*passed), measured, origin(lab, "tiny10"), curves, range(len(pairs)))


def _curve(found: Mapping[tuple[str, str, int], list[float]], layer: str) -> dict[str, list[Any]]:
    lines = {how: [mean(found[how, layer, k]) for k in RANKS] for how in ("SVD", "task loss")}
    return {"rank": list(RANKS), **lines}
