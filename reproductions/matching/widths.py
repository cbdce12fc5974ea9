"""Claim 2: wider ResNet-20s stitch better."""

from __future__ import annotations

from statistics import mean

from scipy.stats import spearmanr

from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, ordered, origin, train_all
from reproductions.matching.stitches import judged, task_loss

WIDTHS = (1, 2, 3, 4)
SEEDS = 3
LAYERS = ("Conv 1", "Layer 1.1", "Layer 2.1", "Layer 3.0")


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
    found = judged(lab, [one for ones in wanted.values() for one in ones])
    shares = {key: [float(found[one].relative_accuracy or 0) for one in ones] for key, ones in wanted.items()}
    by_pair = {
        w: [mean(values) for values in zip(*(shares[w, layer] for layer in LAYERS), strict=True)] for w in WIDTHS
    }
    means = {width: Measured.over(values) for width, values in by_pair.items()}
    error = ((means[1].error or 0) ** 2 + (means[4].error or 0) ** 2) ** 0.5
    rank, p = _trend(shares)
    measured = {"rank correlation of width and relative accuracy": Measured(rank, n=sum(map(len, shares.values())))}
    measured |= {f"width {width}: relative accuracy": one for width, one in means.items()}
    measured |= {
        f"width {width}: test accuracy of the networks": Measured.over(
            lab.accuracy(network(lab, f"{kind}/{seed}")) for seed in range(SEEDS)
        )
        for width, kind in kinds.items()
    }
    curves = {"Relative accuracy by width": {"width": list(WIDTHS)} | {
        line: values for layer in LAYERS for line, values in _line(shares, layer).items()
    }}  # fmt: skip
    note = f"p = {p:.2g} for the rank correlation. {origin(lab, *kinds.values())}"
    risen = means[4].value - means[1].value > 2 * error
    return Finding(verdict(risen, rank > 0 and p < 0.05), measured, note, curves, range(SEEDS))


def _trend(shares: dict[tuple[int, str], list[float]]) -> tuple[float, float]:
    """Return the rank correlation over all stitches, each layer about its own mean, and its p-value."""
    level = {layer: mean(v for width in WIDTHS for v in shares[width, layer]) for layer in LAYERS}
    points = [(width, value - level[layer]) for (width, layer), values in shares.items() for value in values]
    found = spearmanr(*zip(*points, strict=True))
    return float(found.statistic), float(found.pvalue)


def _line(shares: dict[tuple[int, str], list[float]], layer: str) -> dict[str, list[float]]:
    points = [Measured.over(shares[width, layer]) for width in WIDTHS]
    return {layer: [one.value for one in points], f"{layer} ±": [one.error or 0.0 for one in points]}
