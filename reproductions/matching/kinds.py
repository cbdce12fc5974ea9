"""Networks of other widths, of other data sets, without batch norm, or trained by another optimizer.

Claims: matching/widths, matching/other-data and matching/ways-of-training. Their control is a first network before
training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from scipy.stats import spearmanr

from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, pairs, train_all, untrained
from reproductions.matching.stitches import Wanted, length, made, number, origin, shares, task_loss

PAIRS = {"cpu": 5, "gpu": 5}
WIDTHS = (1, 2, 3)
THROUGH = {
    "cpu": ("Conv 1", "Layer 1.0", "Layer 2.0", "Layer 3.0"),
    "gpu": ("Conv 1", "Layer 1.1", "Layer 2.1", "Layer 3.0"),
}
OTHERS = {"cpu": {"tiny10-svhn": "SVHN"}, "gpu": {"tiny10-cifar100": "CIFAR-100", "tiny10-svhn": "SVHN"}}
LOWER = ("Layer 2", "Layer 4")
WAYS = {
    "tiny10-sgd": "batch norm, SGD",
    "tiny10-adam": "batch norm, Adam",
    "tiny10-plain-sgd": "no batch norm, SGD",
    "tiny10-plain-adam": "no batch norm, Adam",
}
EVERYWHERE = ("Layer 3", "Layer 6")
ENOUGH = 0.80
FRESH = "the first network before training, stitched in the same way"
TREND = "rank correlation of width and relative accuracy"
BY_T = "by the 95% interval of Student's t over the pairs"
Key = tuple[str, str]  # a kind or a direction, and a layer
Found = Mapping[Key, Sequence[float]]


@claim(
    "matching/widths",
    figure="Fig. 3",
    sentence="The relative accuracy for 1x-width is already very high, but a clear trend of performance increasing "
    "with width is still visible.",
    expected={TREND: "above 0"},
    control=FRESH,
    criterion="Holds if the rank correlation of width and relative accuracy, over the stitches of one pair number at "
    f"all widths and each layer about its own mean, is above 0, and above that from untrained first networks; {BY_T}.",
    training=length,
)
def widths(lab: Lab) -> Finding:
    """Relative accuracy by task loss of ResNet-20s of one to three times the width."""
    kinds, names = [f"resnet20w{width}" for width in WIDTHS], THROUGH[lab.scale]
    found, control = _both(lab, {kind: _pairs(lab, kind) for kind in kinds}, names)
    ours, theirs = ([_trend(one, names, k) for k in range(PAIRS[lab.scale])] for one in (found, control))
    measured, controls = {TREND: Measured.over(ours)}, {TREND: Measured.over(theirs)}
    for kind, width in zip(kinds, WIDTHS, strict=True):
        for numbers, one in ((measured, found), (controls, control)):
            numbers[f"width {width}: relative accuracy"] = Measured.over(_by_pair(one, kind, names))
        measured[f"width {width}: test accuracy of the networks"] = _accuracies(lab, kind)
    curve: dict[str, list[Any]] = {"width": list(WIDTHS)}
    for layer in names:
        curve |= line(layer, [found[kind, layer] for kind in kinds])
    return Finding(
        verdict(all_of(measured[TREND].above(0), gains(ours, theirs).above(0))),
        measured,
        controls,
        origin(lab, *kinds),
        {"Relative accuracy by width": curve},
        range(PAIRS[lab.scale]),
    )


def _pairs(lab: Lab, kind: str) -> list[tuple[str, str]]:
    return pairs(lab, kind, PAIRS[lab.scale])


def _both(
    lab: Lab, couples: Mapping[str, Sequence[tuple[str, str]]], names: Sequence[str]
) -> tuple[dict[Key, list[float]], dict[Key, list[float]]]:
    """Return relative accuracies by task loss at some layers, of trained networks and from untrained first ones."""
    places = {key: layers(lab, some[0][1].rpartition("/")[0]) for key, some in couples.items()}
    wanted: dict[tuple[bool, str, str], list[Wanted]] = {}
    for key, some in couples.items():
        for layer in names:
            wanted[True, key, layer] = [task_loss(pair, places[key][layer]) for pair in some]
            wanted[False, key, layer] = [task_loss(untrained(pair), places[key][layer]) for pair in some]
    found = shares(lab, wanted)
    ours, control = ({key[1:]: values for key, values in found.items() if key[0] is part} for part in (True, False))
    return ours, control


def _by_pair(found: Found, kind: str, names: Sequence[str]) -> list[float]:
    """Return the mean over layers, by pair."""
    return [mean(values) for values in zip(*(found[kind, layer] for layer in names), strict=True)]


def _trend(found: Found, names: Sequence[str], pair: int) -> float:
    """Return the rank correlation of width and relative accuracy over the layers of one pair number."""
    points = []
    for layer in names:
        values = [found[f"resnet20w{width}", layer][pair] for width in WIDTHS]
        points += [(width, value - mean(values)) for width, value in zip(WIDTHS, values, strict=True)]
    return float(spearmanr(*zip(*points, strict=True)).statistic)


def _accuracies(lab: Lab, kind: str) -> Measured:
    return Measured.over(lab.accuracy(network(lab, f"{kind}/{seed}")) for seed in range(PAIRS[lab.scale]))


@claim(
    "matching/other-data",
    figure="App. C.2",
    sentence="accuracy drop during stitching can be surprisingly low even when we stitch networks trained on "
    "different datasets",
    expected={
        f"{name} → CIFAR-10: relative accuracy at Layers 2 and 4": "a small loss" for name in ("SVHN", "CIFAR-100")
    },
    control=FRESH,
    criterion=f"The head of a Tiny-10 trained on one data set, the tail of one trained on another, stitched by task "
    f"loss on the second one's data, at Layers 2 and 4. Holds for a direction if the relative accuracy, in the mean "
    f"over these layers, is above {ENOUGH:.2f}, and above that from an untrained first network; pair by pair, {BY_T}. "
    "In part if for some directions.",
    training=length,
)
def other_data(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks of CIFAR-10 and of another data set, both ways."""
    others, seeds = OTHERS[lab.scale], range(PAIRS[lab.scale])
    train_all(lab, [f"{kind}/{seed}" for kind in (*others, "tiny10") for seed in seeds])
    ways = {f"{name} → CIFAR-10": (kind, "tiny10") for kind, name in others.items()}
    if lab.scale == "gpu":
        ways |= {f"CIFAR-10 → {name}": ("tiny10", kind) for kind, name in others.items()}
    couples = {way: [(f"{a}/{seed}", f"{b}/{seed}") for seed in seeds] for way, (a, b) in ways.items()}
    found, control = _both(lab, couples, LOWER)
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for way in ways:
        ours, theirs = (_by_pair(one, way, LOWER) for one in (found, control))
        name = f"{way}: relative accuracy at Layers 2 and 4"
        measured[name], controls[name] = Measured.over(ours), Measured.over(theirs)
        parts.append(all_of(measured[name].above(ENOUGH), gains(ours, theirs).above(0)))
        stitches = made(lab, [task_loss(pair, layers(lab, ways[way][1])[LOWER[0]]) for pair in couples[way]])
        right = Measured.over(number(stitch, "accuracy_b") for stitch in stitches.values())
        measured[f"{way}: test accuracy of the second network"] = right
    curve: dict[str, list[Any]] = {"layer": list(LOWER)}
    for says, one in (("", found), (", control", control)):
        curve |= {f"{way}{says}": [mean(one[way, layer]) for layer in LOWER] for way in ways}
    note = f"The paper stitches networks of ImageNet and CelebA. {origin(lab, 'tiny10', *others)}"
    return Finding(verdict(*parts), measured, controls, note, {"Relative accuracy by layer": curve}, seeds)


@claim(
    "matching/ways-of-training",
    figure="Sec. 5.1",
    sentence="We have experimented with networks with batch normalization and without batch normalization, and "
    "networks trained with different optimizers (SGD, Adam). Still, we did not encounter any cases where there were "
    "unmatchable instances.",
    expected={f"{words}: relative accuracy of the worst layer": "matchable" for words in WAYS.values()},
    control=FRESH,
    criterion=f"Holds for one of the four ways of training Tiny-10 if task loss stitches of two networks keep a "
    f"relative accuracy above {ENOUGH:.2f} at the worse of Layers 3 and 6, and above that from a first network before "
    f"training; pair by pair, {BY_T}. In part if for some.",
    training=length,
)
def ways_of_training(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks with and without batch norm, trained by SGD and by Adam."""
    train_all(lab, [f"{kind}/{seed}" for kind in WAYS for seed in range(PAIRS[lab.scale])])
    found, control = _both(lab, {kind: _pairs(lab, kind) for kind in WAYS}, EVERYWHERE)
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for kind, words in WAYS.items():
        worst = min(EVERYWHERE, key=lambda layer, kind=kind: mean(found[kind, layer]))  # type: ignore[misc]
        ours, theirs = (one[kind, worst] for one in (found, control))
        name = f"{words}: relative accuracy of the worst layer"
        measured[name], controls[name] = Measured.over(ours), Measured.over(theirs)
        parts.append(all_of(measured[name].above(ENOUGH), gains(ours, theirs).above(0)))
        measured[f"{words}: test accuracy of the networks"] = _accuracies(lab, kind)
    curve: dict[str, list[Any]] = {"layer": list(EVERYWHERE)}
    for says, one in (("", found), (", control", control)):
        curve |= {f"{words}{says}": [mean(one[kind, layer]) for layer in EVERYWHERE] for kind, words in WAYS.items()}
    curves = {"Relative accuracy by layer": curve}
    return Finding(verdict(*parts), measured, controls, origin(lab, *WAYS), curves, range(PAIRS[lab.scale]))
