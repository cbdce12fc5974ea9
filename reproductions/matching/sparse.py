"""Claim 8: sparse stitches, by the Lasso and by the task loss with an L1 penalty."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import numpy as np

from netkin.applications.stitching import Stitch, sparsity
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, origin, ring
from reproductions.matching.stitches import Wanted, made, task_loss

LAYERS = {"cpu": ("Layer 5",), "gpu": ("Layer 3", "Layer 5", "Layer 7")}
PAIRS = {"cpu": 1, "gpu": 3}
ALPHAS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
PENALTIES = {"cpu": (3e-4, 1e-3, 3e-3, 1e-2), "gpu": (1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)}
RATE = {"cpu": {"rate": 1e-2, "epochs": 4, "every": 40}, "gpu": {"rate": 3e-3, "epochs": 20, "every": 1000}}
BETWEEN = (0.80, 0.85, 0.90)


@claim(
    "matching/sparsity",
    figure="Fig. 8",
    sentence="at around 80-90 % sparsity, the relative accuracy of direct matching suffers a drastic drop, however "
    "task loss matching still manages to find a meaningful alignment of the neurons",
    expected={
        "relative accuracy of direct matching at 80 to 90% sparsity": "drastic drop",
        "relative accuracy of task loss matching at 80 to 90% sparsity": "meaningful",
    },
    criterion="Relative accuracies at 80, 85 and 90% sparsity are read off the lines through the measured points, in "
    "the mean over these, over pairs and over layers. Holds if direct matching has lost at least a third of what it "
    "has without penalty, and task loss matching keeps at least 0.20 more than direct matching; in part if one of the "
    "two.",
)
def sparse_matching(lab: Lab) -> Finding:
    """Relative accuracy against the share of entries below 1e-4, for a row of penalties."""
    pairs, names = ring(lab, "tiny10", max(2, PAIRS[lab.scale]))[: PAIRS[lab.scale]], layers(lab, "tiny10")
    tracks = [(pair, names[layer]) for layer in LAYERS[lab.scale] for pair in pairs]
    direct = [[Wanted(*pair, layer, how) for how in ("least_squares", *(f"lasso(alpha={a})" for a in ALPHAS))]
              for pair, layer in tracks]  # fmt: skip
    trained = [
        [task_loss(pair, layer, l1=l1, **RATE[lab.scale]) for l1 in (0.0, *PENALTIES[lab.scale])]
        for pair, layer in tracks
    ]
    found = made(lab, [one for half in (direct, trained) for track in half for one in track])
    lines = [[_line([found[one] for one in track]) for track in half] for half in (direct, trained)]
    at = [[_read(line, BETWEEN) for line in half] for half in lines]
    whole = mean(line[0][1] for line in lines[0])
    cut, kept = (mean(value for values in half for value in values) for half in at)
    measured = {
        "relative accuracy of direct matching at 80 to 90% sparsity": Measured.over(mean(values) for values in at[0]),
        "relative accuracy of task loss matching at 80 to 90% sparsity": Measured.over(
            mean(values) for values in at[1]
        ),
        "relative accuracy of direct matching without penalty": Measured.over(line[0][1] for line in lines[0]),
        "relative accuracy of task loss matching without penalty": Measured.over(line[0][1] for line in lines[1]),
        "largest sparsity by the task loss": Measured(max(point[0] for line in lines[1] for point in line)),
    }
    grid = [0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95]
    curves = {"Relative accuracy of sparse stitches": {"sparsity": grid} | {
        words: [mean(values) for values in zip(*(_read(line, grid) for line in half), strict=True)]
        for words, half in zip(("direct", "task loss"), lines, strict=True)
    }}  # fmt: skip
    return Finding(
        verdict(cut <= whole * 2 / 3, kept - cut >= 0.2), measured, origin(lab, "tiny10"), curves, range(len(pairs))
    )


def _line(stitches: Sequence[Stitch]) -> list[tuple[float, float]]:
    """Return sparsity and relative accuracy of a row of stitches, the one without penalty first."""
    return [(sparsity(one), one.relative_accuracy) for one in stitches]


def _read(line: Sequence[tuple[float, float]], grid: Sequence[float]) -> list[float]:
    xs, ys = zip(*sorted(line), strict=True)
    return [float(value) for value in np.interp(grid, xs, ys)]
