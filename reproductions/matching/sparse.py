"""Sparse stitches, by the Lasso and by the task loss with an L1 penalty.

Claim: matching/sparsity.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from statistics import mean

import numpy as np

from netkin.applications.stitching import Stitch, sparsity
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, ring
from reproductions.matching.stitches import Wanted, made, origin, task_loss

LAYERS = {"cpu": ("Layer 5",), "gpu": ("Layer 3", "Layer 5", "Layer 7")}
PAIRS = {"cpu": 1, "gpu": 2}
ALPHAS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
PENALTIES = {"cpu": (0.03, 0.1, 0.2, 0.4), "gpu": (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5)}
LONGER = {"cpu": {"rate": 1e-2, "epochs": 4, "every": 40}, "gpu": {"rate": 3e-3, "epochs": 20, "every": 1000}}
BETWEEN = (0.80, 0.85, 0.90)
GRID = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
Line = list[tuple[float, float]]


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
    "has without penalty, and task loss matching keeps at least 0.20 more than direct matching; not so if no stitch "
    "is so sparse; in part if one of the two.",
)
def sparse_matching(lab: Lab) -> Finding:
    """Relative accuracy against the share of entries below 1e-4, for a row of penalties."""
    count, names = PAIRS[lab.scale], layers(lab, "tiny10")
    tracks = [(pair, names[layer]) for layer in LAYERS[lab.scale] for pair in ring(lab, "tiny10", 2)[:count]]
    rows = {
        words: [row(lab, *track) for track in tracks] for words, row in (("direct", direct), ("task loss", trained))
    }
    found = made(lab, [one for half in rows.values() for row in half for one in row])
    lines = {words: [_line([found[one] for one in row]) for row in half] for words, half in rows.items()}
    whole, cut, kept = list[float](), list[float](), list[float]()
    measured: dict[str, Measured] = {}
    for words, half in lines.items():
        whole.append(mean(line[0][1] for line in half))
        sparse = [mean(_read(line, BETWEEN)) for line in half]  # NaN where no stitch is so sparse
        (cut if words == "direct" else kept).extend(sparse)
        measured |= _numbers(words, half, [value for value in sparse if not isnan(value)])
    conditions = mean(cut) <= whole[0] * 2 / 3, mean(kept) - mean(cut) >= 0.2
    curve = {"sparsity": list(GRID)} | {words: _mean_line(half) for words, half in lines.items()}
    curves = {"Relative accuracy of sparse stitches": curve}
    return Finding(verdict(*conditions), measured, origin(lab, "tiny10"), curves, range(count))


def direct(lab: Lab, pair: tuple[str, str], layer: str) -> list[Wanted]:
    """Return the stitches by least squares, without and with a penalty."""
    return [Wanted(*pair, layer, how) for how in ("least_squares", *(f"lasso(alpha={alpha})" for alpha in ALPHAS))]


def trained(lab: Lab, pair: tuple[str, str], layer: str) -> list[Wanted]:
    """Return the stitches by task loss, without and with a penalty."""
    return [task_loss(pair, layer, l1=l1, decay=0.0, **LONGER[lab.scale]) for l1 in (0.0, *PENALTIES[lab.scale])]


def _numbers(words: str, lines: Sequence[Line], sparse: Sequence[float]) -> dict[str, Measured]:
    found = {f"relative accuracy of {words} matching at 80 to 90% sparsity": Measured.over(sparse)} if sparse else {}
    return found | {
        f"relative accuracy of {words} matching without penalty": Measured.over(line[0][1] for line in lines),
        f"largest sparsity of {words} matching": Measured(max(point[0] for line in lines for point in line)),
    }


def _mean_line(lines: Sequence[Line]) -> list[float | None]:
    means = [mean(values) for values in zip(*(_read(line, GRID) for line in lines), strict=True)]
    return [None if isnan(value) else value for value in means]


def _line(stitches: Sequence[Stitch]) -> Line:
    """Return sparsity and relative accuracy of a row of stitches, the one without penalty first."""
    return [(sparsity(one), one.relative_accuracy) for one in stitches]


def _read(line: Line, grid: Sequence[float]) -> list[float]:
    """Return relative accuracies between the points of a line, and NaN beyond the sparsest."""
    xs, ys = zip(*sorted(line), strict=True)
    return [float(value) for value in np.interp(grid, xs, ys, right=np.nan)]
