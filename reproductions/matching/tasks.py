"""Networks trained on other data sets, without batch norm, or by another optimizer.

Claims: matching/other-data and matching/ways-of-training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab
from reproductions.matching.nets import layers, network, ordered, train_all
from reproductions.matching.stitches import Wanted, made, number, origin, shares, task_loss

OTHERS = {"cpu": {"tiny10-svhn": "SVHN"}, "gpu": {"tiny10-cifar100": "CIFAR-100", "tiny10-svhn": "SVHN"}}
SEEDS = {"cpu": 1, "gpu": 2}
AMONG = {"cpu": (2, 4, 6), "gpu": (1, 2, 3, 4, 5, 6, 7, 8)}
WAYS = {
    "tiny10-sgd": "batch norm, SGD",
    "tiny10-adam": "batch norm, Adam",
    "tiny10-plain-sgd": "no batch norm, SGD",
    "tiny10-plain-adam": "no batch norm, Adam",
}
EVERYWHERE = {"cpu": (3, 6), "gpu": (1, 3, 5, 7)}
ONE_WAY = {"cpu": 1, "gpu": 2}  # of the two ordered pairs
ENOUGH = 0.80
CHOSEN = "The better half of the layers is chosen by the same numbers, so it is better than a half chosen beforehand."


@claim(
    "matching/other-data",
    figure="App. C.2",
    sentence="accuracy drop during stitching can be surprisingly low even when we stitch networks trained on "
    "different datasets",
    expected={"relative accuracy at the best half of the layers": "a small loss"},
    criterion=f"The head of a Tiny-10 trained on one data set, the tail of one trained on another, stitched by task "
    f"loss on the second one's data. Holds if in every direction the relative accuracy, in the mean over pairs and "
    f"the better half of the layers, is at least {ENOUGH}; in part if in some.",
)
def other_data(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks of CIFAR-10 and of another data set, both ways."""
    others, seeds = OTHERS[lab.scale], range(SEEDS[lab.scale])
    train_all(lab, [f"{kind}/{seed}" for kind in (*others, "tiny10") for seed in seeds])
    names, ways = [f"Layer {k}" for k in AMONG[lab.scale]], _ways(lab)
    wanted = {
        (way, layer): [task_loss((f"{a}/{seed}", f"{b}/{seed}"), layers(lab, b)[layer]) for seed in seeds]
        for way, (a, b) in ways.items() for layer in names
    }  # fmt: skip
    found = shares(lab, wanted)
    by_way = {way: {layer: found[way, layer] for layer in names} for way in ways}
    halves = {way: mean(_all(_better_half(by_layer))) for way, by_layer in by_way.items()}
    measured = {"relative accuracy at the best half of the layers": Measured.over(halves.values())}
    for way, by_layer in by_way.items():
        measured |= {f"{way}: {words}": one for words, one in _worths(by_layer).items()}
        measured[f"{way}: test accuracy of the second network"] = _accuracy_b(lab, wanted[way, names[0]])
    curve: dict[str, list[Any]] = {"layer": names}
    curve |= {way: [mean(values) for values in by_layer.values()] for way, by_layer in by_way.items()}
    note = f"{CHOSEN} The paper stitches networks of ImageNet and CelebA. {origin(lab, 'tiny10', *others)}"
    passed = [half >= ENOUGH for half in halves.values()]
    return Finding(verdict(*passed), measured, note, {"Relative accuracy by layer": curve}, seeds)


def _ways(lab: Lab) -> dict[str, tuple[str, str]]:
    """Return the kinds of the first and the second network by the names of their data; at gpu scale both ways."""
    others = OTHERS[lab.scale]
    ways = {f"{name} → CIFAR-10": (kind, "tiny10") for kind, name in others.items()}
    back = {f"CIFAR-10 → {name}": ("tiny10", kind) for kind, name in others.items()}
    return ways | back if lab.scale == "gpu" else ways


def _worths(by_layer: Mapping[str, list[float]]) -> dict[str, Measured]:
    """Return relative accuracies at the better half of the layers, at all, at the best one and at the worst."""
    *_, best = _better_half(by_layer)
    worst = min(by_layer, key=lambda layer: mean(by_layer[layer]))
    return {
        "relative accuracy at the best half of the layers": Measured.over(_all(_better_half(by_layer))),
        "relative accuracy over all layers": Measured.over(_all(by_layer)),
        f"relative accuracy of the best layer, {best}": Measured.over(by_layer[best]),
        f"relative accuracy of the worst layer, {worst}": Measured.over(by_layer[worst]),
    }


def _better_half(by_layer: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the better half of the layers in the mean over pairs, the best one last."""
    rising = sorted(by_layer, key=lambda layer: mean(by_layer[layer]))
    return {layer: by_layer[layer] for layer in rising[len(rising) // 2 :]}


def _all(by_layer: Mapping[str, list[float]]) -> list[float]:
    return [value for values in by_layer.values() for value in values]


def _accuracy_b(lab: Lab, wanted: Sequence[Wanted]) -> Measured:
    return Measured.over(number(stitch, "accuracy_b") for stitch in made(lab, wanted).values())


@claim(
    "matching/ways-of-training",
    figure="Sec. 5.1",
    sentence="We have experimented with networks with batch normalization and without batch normalization, and "
    "networks trained with different optimizers (SGD, Adam). Still, we did not encounter any cases where there were "
    "unmatchable instances.",
    expected={f"{words}: relative accuracy of the worst layer": "matchable" for words in WAYS.values()},
    criterion=f"Holds if for each of the four ways of training Tiny-10, task loss stitches of two networks keep a "
    f"relative accuracy of at least {ENOUGH}, in the mean over pairs, at every layer tried; in part if for some.",
)
def ways_of_training(lab: Lab) -> Finding:
    """Relative accuracy of stitches between networks with and without batch norm, trained by SGD and by Adam."""
    train_all(lab, [f"{kind}/{seed}" for kind in WAYS for seed in range(2)])
    names = [f"Layer {k}" for k in EVERYWHERE[lab.scale]]
    wanted = {
        (kind, layer): [task_loss(p, layers(lab, kind)[layer]) for p in ordered(lab, kind, 2)[: ONE_WAY[lab.scale]]]
        for kind in WAYS for layer in names
    }  # fmt: skip
    found = shares(lab, wanted)
    worst = {kind: min((found[kind, layer] for layer in names), key=mean) for kind in WAYS}
    measured = {f"{w}: relative accuracy of the worst layer": Measured.over(worst[kind]) for kind, w in WAYS.items()}
    for kind, words in WAYS.items():
        right = [lab.accuracy(network(lab, f"{kind}/{seed}")) for seed in range(2)]
        measured[f"{words}: test accuracy of the networks"] = Measured.over(right)
    curve: dict[str, list[Any]] = {"layer": names}
    curve |= {words: [mean(found[kind, layer]) for layer in names] for kind, words in WAYS.items()}
    passed = [mean(values) >= ENOUGH for values in worst.values()]
    curves = {"Relative accuracy by layer": curve}
    return Finding(verdict(*passed), measured, origin(lab, *WAYS), curves, range(2))
