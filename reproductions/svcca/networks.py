"""Two networks, or a network and its classes: where they are alike. The controls are networks before training.

Their batch norms hold the statistics of training images.

Claims: svcca/architectures, svcca/initialisations and svcca/classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from torch import nn

import netkin as nk
from netkin.errors import SourceError
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab, Run
from reproductions.svcca.bottom_up import CONVNET

CONVOLUTIONS = tuple(f"relu{number}" for number in range(1, 6))
PAIRS = {"cpu": 3, "gpu": 5}
EXAMPLES = {"cpu": 500, "gpu": 1_000}
PLACES = {"cpu": 1_000, "gpu": 2_000}  # images whose maps are taken place by place
SIMILAR = (("cat", "dog"), ("automobile", "truck"))
DISTANT = tuple(product(*SIMILAR))
SEEDS = {"cpu": 3, "gpu": 5}
CLASSIFIERS = ("resnet", "convnet")
LOWER = "lower layers minus higher layers, each at its own depth"
CORNER = "how much less alike the lower convnet and the upper ResNet are than any other two halves"
UNTRAINED = "the same networks before training"
BY_T = "by the 95% interval of Student's t"
Sums = dict[str, float]


@claim(
    "svcca/architectures",
    figure="Fig. 7",
    sentence="the lower layers of both models are noticeably similar to each other, and get progressively less similar "
    "as we compare higher layers. Note that the highest layers of the resnet are least similar to the lower layers of "
    "the convnet.",
    expected={LOWER: "above 0", CORNER: "above 0"},
    control=UNTRAINED,
    criterion="With the layers of both networks in halves, by DFT-CCA: the lower halves are more alike than the upper "
    "ones; and the upper half of the ResNet is less like the lower half of the convnet than any other two halves are "
    f"alike. Each holds if the difference is above 0, and above that of the same networks before training pair by "
    f"pair, {BY_T} over the pairs of networks; in part if one of the two.",
    measures=["cca_mean", "svcca"],
)
def architectures(lab: Lab) -> Finding:
    """DFT-CCA of all convolutional layers of a convnet with the blocks of a ResNet, one pair of networks a seed."""
    seeds = lab.seeds(PAIRS[lab.scale])
    lab.trained_all((network, seed) for network in ("convnet", "resnet") for seed in seeds)
    tasks = [(seed, trained) for trained in (True, False) for seed in seeds]
    found = dict(zip(tasks, lab.over(across, tasks), strict=True))
    halves = {
        trained: [_halves(found[seed, trained]["cca_mean"].values) for seed in seeds] for trained in (True, False)
    }
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for name, of in ((LOWER, _gap), (CORNER, _corner)):
        ours, before = ([of(one) for one in halves[trained]] for trained in (True, False))
        measured[name], controls[name] = Measured.over(ours), Measured.over(before)
        parts.append(all_of(measured[name].above(0), gains(ours, before).above(0)))
    for numbers, trained in ((measured, True), (controls, False)):
        numbers |= {f"halves: {name}": Measured.over(one[name] for one in halves[trained]) for name in halves[True][0]}
        sv = [_gap(_halves(found[seed, trained]["svcca"].values)) for seed in seeds]
        numbers["SVCCA, lower minus higher layers"] = Measured.over(sv)
    return Finding(
        verdict(*parts),
        measured,
        controls,
        note='Mean canonical correlation over all frequencies (`shape="dft"`) on test images; the larger of two maps '
        "is averaged down to the smaller. A ResNet's layers are its blocks.",
        curves=_curves([found[seed, True] for seed in seeds]),
        seeds=tuple(seeds),
    )


def across(lab: Lab, task: tuple[int, bool]) -> nk.Comparison:
    """Compare the convnet and the ResNet of one seed by DFT-CCA, trained or before that."""
    seed, trained = task
    runs = [lab.trained(network, seed) for network in ("convnet", "resnet")]
    convnet, resnet = (run.model if trained else lab.settled(run.untrained()) for run in runs)
    blocks = [name for name in nk.layers(resnet) if name.startswith("layer")]
    return nk.compare(
        convnet, resnet, data=lab.probe(EXAMPLES[lab.scale]), measures=["cca_mean", "svcca"],
        layers={"a": list(CONVOLUTIONS), "b": blocks}, shape="dft", resize="average", names=("convnet", "resnet"),
    )  # fmt: skip


def _halves(values: np.ndarray) -> Sums:
    """Return the mean similarity of each half of the convnet with each half of the ResNet."""
    rows, columns = values.shape[0] // 2, values.shape[1] // 2
    return {
        "lower with lower": float(values[:rows, :columns].mean()),
        "lower convnet with upper ResNet": float(values[:rows, columns:].mean()),
        "upper convnet with lower ResNet": float(values[rows:, :columns].mean()),
        "upper with upper": float(values[rows:, columns:].mean()),
    }


def _gap(halves: Sums) -> float:
    return halves["lower with lower"] - halves["upper with upper"]


def _corner(halves: Sums) -> float:
    corner = "lower convnet with upper ResNet"
    return min(value for name, value in halves.items() if name != corner) - halves[corner]


def _curves(found: list[nk.Comparison]) -> dict[str, dict[str, list]]:
    mean = np.mean([one["cca_mean"].values for one in found], axis=0)
    lines = {layer: mean[place].tolist() for place, layer in enumerate(found[0].layers_a)}
    return {"Each layer of the convnet and the blocks of the ResNet": {"block": list(found[0].layers_b), **lines}}


@claim(
    "svcca/initialisations",
    figure="Fig. App. 4",
    sentence="initial and final layers are found to be similar, with middle layers differing in representation "
    "similarity.",
    expected={"first layers minus middle layers": "above 0", "last layers minus middle layers": "above 0"},
    control=UNTRAINED,
    criterion="With the layers in thirds, the mean SVCCA of corresponding layers of two networks is higher in the "
    "first third than in the middle one, and in the last third than in the middle one. Each holds if the difference is "
    f"above 0, and above that of the same networks before training pair by pair, {BY_T} over pairs that share no "
    "network; in part if one of the two.",
    measures=["svcca"],
)
def initialisations(lab: Lab) -> Finding:
    """SVCCA of corresponding layers, feature maps place by place, of pairs that share no network."""
    seeds = lab.seeds(2 * PAIRS[lab.scale])
    runs = lab.trained_all(("convnet", seed) for seed in seeds)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    lines = {"ours": [between(lab, a.model, b.model) for a, b in pairs]}
    fresh = [tuple(lab.settled(run.untrained()) for run in pair) for pair in pairs]
    lines["control"] = [between(lab, a, b) for a, b in fresh]
    thirds = {
        key: [[float(part.mean()) for part in np.array_split(one, 3)] for one in found] for key, found in lines.items()
    }
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for name, place in (("first", 0), ("last", 2)):
        ours, before = ([one[place] - one[1] for one in thirds[key]] for key in ("ours", "control"))
        words = f"{name} layers minus middle layers"
        measured[words], controls[words] = Measured.over(ours), Measured.over(before)
        parts.append(all_of(measured[words].above(0), gains(ours, before).above(0)))
    points = {key: list(zip(*found, strict=True)) for key, found in lines.items()}
    for numbers, key in ((measured, "ours"), (controls, "control")):
        numbers |= {f"SVCCA of {layer}": Measured.over(some) for layer, some in zip(CONVNET, points[key], strict=True)}
    curve: dict[str, list] = {
        "layer": list(CONVNET),
        **line("trained", points["ours"]),
        **line("before training", points["control"]),
    }
    return Finding(
        verdict(*parts),
        measured,
        controls,
        note="Test images; the layers of the paper's footnote, each convolution with its ReLU.",
        curves={"Corresponding layers of two initialisations": curve},
        seeds=tuple(seeds),
    )


def between(lab: Lab, a: nn.Module, b: nn.Module) -> np.ndarray:
    """Return the SVCCA of each layer of one network with the same layer of the other."""
    found = nk.compare(
        a, b, data=lab.probe(PLACES[lab.scale]), measures="svcca", layers=list(CONVNET), pairs="corresponding",
        shape="positions",
    )  # fmt: skip
    return np.array([found[layer, layer] for layer in CONVNET])


@claim(
    "svcca/classes",
    figure="Fig. 6",
    sentence="the line corresponding to firetruck is clearly distinct from the two pairs of dog breeds, and the two "
    "lines in each pair are both very close to each other, reflecting the fact that each pair consists of visually "
    "similar looking images.",
    expected={f"resnet: how much nearer {first} and {second} are than an animal and a vehicle": "above 0"
              for first, second in SIMILAR},
    control=UNTRAINED,
    criterion="In the ResNet the lines of cat and dog, and those of automobile and truck, are nearer to each other "
    "than lines of an animal and a vehicle on average. Each holds if the difference of the distances is above 0, and "
    f"above that of the same network before training seed by seed, {BY_T} over the seeds; in part if one of the two.",
    measures=["cca_mean"],
)  # fmt: skip
def classes(lab: Lab) -> Finding:
    """The distance of two lines is the mean over layers, all but the logits, of the difference of their values."""
    if not {name for pair in SIMILAR for name in pair} <= set(lab.images().classes):
        raise SourceError("this claim compares cats, dogs, cars and trucks and needs CIFAR-10; pass --data DIR.")
    seeds = lab.seeds(SEEDS[lab.scale])
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    curves = {}
    for network in CLASSIFIERS:
        runs = lab.trained_all((network, seed) for seed in seeds)
        ours, before = (_sensitivities(lab, runs, trained) for trained in (True, False))
        for first, second in SIMILAR:
            name = f"{network}: how much nearer {first} and {second} are than an animal and a vehicle"
            near, chance = ([_nearer(one, first, second) for one in found] for found in (ours, before))
            measured[name], controls[name] = Measured.over(near), Measured.over(chance)
            parts += [all_of(measured[name].above(0), gains(near, chance).above(0))] if network == "resnet" else []
            ranks = Measured.over(_rank(one, first, second) for one in ours)
            measured[f"{network}: rank of {first} and {second} among 45 pairs"] = ranks
        curves[f"Sensitivity of the {network}'s layers to classes"] = _class_lines(ours)
    return Finding(
        verdict(*parts),
        measured,
        controls,
        note="CCA of each layer's channel means with the class's logit, which is DFT-CCA of the two, over the test "
        "images. CIFAR-10 has two pairs of like classes where the paper takes dog breeds and a fire truck from "
        "ImageNet. A rank of 1 is the nearest of all 45 pairs of classes.",
        curves=curves,
        seeds=tuple(seeds),
    )


def _sensitivities(lab: Lab, runs: Sequence[Run], trained: bool) -> list[nk.Comparison]:
    """Return the sensitivity of each layer to each class, of each network."""
    images = lab.images()
    models = [run.model if trained else lab.settled(run.untrained()) for run in runs]
    return [nk.class_sensitivity(model, images.test_images, names=images.classes) for model in models]


def _nearer(comparison: nk.Comparison, first: str, second: str) -> float:
    """Return how much nearer the lines of two classes are than those of an animal and a vehicle on average."""
    far = float(np.mean([distance(comparison, *pair) for pair in DISTANT]))
    return far - distance(comparison, first, second)


def distance(comparison: nk.Comparison, first: str, second: str) -> float:
    """Return how far apart the lines of two classes are, without the last layer, which is the logits themselves."""
    columns = [comparison.layers_b.index(name) for name in (first, second)]
    lines = comparison.to_numpy()[:-1, columns]
    return float(np.abs(lines[:, 0] - lines[:, 1]).mean())


def _rank(comparison: nk.Comparison, first: str, second: str) -> int:
    """Return the place of a pair among all pairs of classes, 1 for the nearest."""
    own = distance(comparison, first, second)
    return 1 + sum(distance(comparison, *other) < own for other in combinations(comparison.layers_b, 2))


def _class_lines(comparisons: Sequence[nk.Comparison]) -> dict[str, list[object]]:
    mean = np.mean([one.to_numpy()[:-1] for one in comparisons], axis=0)
    shown = {name: mean[:, comparisons[0].layers_b.index(name)].tolist() for pair in SIMILAR for name in pair}
    return {"layer": list(comparisons[0].layers_a[:-1]), **shown}
