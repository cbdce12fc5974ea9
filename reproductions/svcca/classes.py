"""Similar classes become known to a network's layers alike.

Claim: svcca/classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np

import netkin as nk
from netkin.errors import SourceError
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

SIMILAR = (("cat", "dog"), ("automobile", "truck"))
DISTANT = tuple(product(*SIMILAR))
SEEDS = {"cpu": 3, "gpu": 5}
NETWORKS = ("resnet", "convnet")


@claim(
    "svcca/classes",
    figure="Fig. 6",
    sentence="the line corresponding to firetruck is clearly distinct from the two pairs of dog breeds, and the two "
    "lines in each pair are both very close to each other, reflecting the fact that each pair consists of visually "
    "similar looking images.",
    expected={
        "resnet: distance of cat and dog": "very close",
        "resnet: distance of distant classes": "clearly distinct",
    },
    criterion="Holds if in the ResNet the lines of cat and dog, and those of automobile and truck, are nearer to each "
    "other than lines of an animal and a vehicle on average, each by more than two standard errors over the seeds; in "
    "part if one of the two pairs is.",
)
def classes(lab: Lab) -> Finding:
    """The distance of two lines is the mean over layers, all but the logits, of the difference of their values."""
    if not {name for pair in SIMILAR for name in pair} <= set(lab.images().classes):
        raise SourceError("this claim compares cats, dogs, cars and trucks and needs CIFAR-10; pass --data DIR.")
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.trained_all((network, seed) for network in NETWORKS for seed in seeds)
    found = {network: [sensitivity(lab, network, seed) for seed in seeds] for network in NETWORKS}
    distances = {network: _distances(comparisons) for network, comparisons in found.items()}
    nearer = [distances["resnet"][f"how much nearer {first} and {second} are"] for first, second in SIMILAR]
    return Finding(
        verdict(*(gap.value > 2 * (gap.error or 0) for gap in nearer)),
        {f"{network}: {name}": one for network, own in distances.items() for name, one in own.items()},
        note="CCA of each layer's channel means with the class's logit, which is DFT-CCA of the two, over the test "
        "images. CIFAR-10 has two pairs of like classes where the paper takes dog breeds and a fire truck from "
        "ImageNet. A rank of 1 is the nearest of all 45 pairs of classes.",
        curves={f"Sensitivity of the {network}'s layers to classes": _lines(found[network]) for network in NETWORKS},
        seeds=tuple(seeds),
    )


def _distances(comparisons: Sequence[nk.Comparison]) -> dict[str, Measured]:
    """Return how far apart lines of similar and of distant classes are, over the seeds."""
    far = [float(np.mean([distance(one, *pair) for pair in DISTANT])) for one in comparisons]
    measured = {"distance of distant classes": Measured.over(far)}
    for first, second in SIMILAR:
        near = [distance(one, first, second) for one in comparisons]
        gaps = [apart - close for apart, close in zip(far, near, strict=True)]
        measured[f"distance of {first} and {second}"] = Measured.over(near)
        measured[f"how much nearer {first} and {second} are"] = Measured.over(gaps)
        measured[f"rank of {first} and {second}"] = Measured.over(_rank(one, first, second) for one in comparisons)
    return measured


def sensitivity(lab: Lab, network: str, seed: int) -> nk.Comparison:
    """Return the sensitivity of each layer to each class."""
    return nk.class_sensitivity(lab.trained(network, seed).model, lab.images().test_images, names=lab.images().classes)


def distance(comparison: nk.Comparison, first: str, second: str) -> float:
    """Return how far apart the lines of two classes are, without the last layer, where all are 1."""
    columns = [comparison.layers_b.index(name) for name in (first, second)]
    lines = comparison.to_numpy()[:-1, columns]
    return float(np.abs(lines[:, 0] - lines[:, 1]).mean())


def _rank(comparison: nk.Comparison, first: str, second: str) -> int:
    """Return the place of a pair among all pairs of classes, 1 for the nearest."""
    own = distance(comparison, first, second)
    return 1 + sum(distance(comparison, *other) < own for other in combinations(comparison.layers_b, 2))


def _lines(comparisons: Sequence[nk.Comparison]) -> dict[str, list[object]]:
    mean = np.mean([one.to_numpy() for one in comparisons], axis=0)
    shown = {name: mean[:, comparisons[0].layers_b.index(name)].tolist() for pair in SIMILAR for name in pair}
    return {"layer": list(comparisons[0].layers_a), **shown}
