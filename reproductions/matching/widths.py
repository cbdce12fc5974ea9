"""Wider ResNet-20s stitch better.

Claim: matching/widths.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from scipy.stats import spearmanr

from reproductions.claims import Finding, Measured, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, ordered, train_all
from reproductions.matching.stitches import origin, shares, task_loss

WIDTHS = (1, 2, 3, 4)
SEEDS = 3
LAYERS = ("Conv 1", "Layer 1.1", "Layer 2.1", "Layer 3.0")
DEPENDENT = (
    f"The ordered pairs of {SEEDS} networks share networks, and the layers of a pair belong together: they are not "
    "independent, so the standard errors and p are too small."
)


@claim(
    "matching/widths",
    figure="Fig. 3",
    sentence="The relative accuracy for 1x-width is already very high, but a clear trend of performance increasing "
    "with width is still visible.",
    expected={"rank correlation of width and relative accuracy": "above 0"},
    criterion="Holds if the relative accuracy in the mean over layers and ordered pairs is higher at width 4 than at "
    "width 1 by more than two standard errors of the difference, and the rank correlation of width and relative "
    "accuracy over all stitches, within layers, is above 0 with p < 0.05; in part if one of the two.",
    scales=("gpu",),
)
def widths(lab: Lab) -> Finding:
    """Relative accuracy by task loss of ResNet-20s of one to four times the width, in all ordered pairs."""
    kinds = {width: f"resnet20w{width}" for width in WIDTHS}
    train_all(lab, [f"{kind}/{seed}" for kind in kinds.values() for seed in range(SEEDS)])
    wanted = {
        (width, layer): [task_loss(pair, layers(lab, kind)[layer]) for pair in ordered(lab, kind, SEEDS)]
        for width, kind in kinds.items() for layer in LAYERS
    }  # fmt: skip
    found = shares(lab, wanted)
    means = {width: Measured.over(_by_pair(found, width)) for width in WIDTHS}
    error = ((means[1].error or 0) ** 2 + (means[4].error or 0) ** 2) ** 0.5
    rank, p = _trend(found)
    measured = {"rank correlation of width and relative accuracy": Measured(rank, n=sum(map(len, found.values())))}
    measured |= {f"width {width}: relative accuracy": one for width, one in means.items()}
    for width, kind in kinds.items():
        right = [lab.accuracy(network(lab, f"{kind}/{seed}")) for seed in range(SEEDS)]
        measured[f"width {width}: test accuracy of the networks"] = Measured.over(right)
    curve: dict[str, list[Any]] = {"width": list(WIDTHS)}
    for layer in LAYERS:
        curve |= line(layer, [found[width, layer] for width in WIDTHS])
    note = f"p = {p:.2g} for the rank correlation. {DEPENDENT} {origin(lab, *kinds.values())}"
    passed = means[4].value - means[1].value > 2 * error, rank > 0 and p < 0.05
    return Finding(verdict(*passed), measured, note, {"Relative accuracy by width": curve}, range(SEEDS))


def _by_pair(found: dict[tuple[int, str], list[float]], width: int) -> list[float]:
    """Return the mean over layers for each ordered pair of networks of one width."""
    return [mean(values) for values in zip(*(found[width, layer] for layer in LAYERS), strict=True)]


def _trend(found: dict[tuple[int, str], list[float]]) -> tuple[float, float]:
    """Return the rank correlation over all stitches, each layer about its own mean, and its p-value."""
    level = {layer: mean(v for width in WIDTHS for v in found[width, layer]) for layer in LAYERS}
    points = [(width, value - level[layer]) for (width, layer), values in found.items() for value in values]
    trend = spearmanr(*zip(*points, strict=True))
    return float(trend.statistic), float(trend.pvalue)
