"""The lower layers of a convnet and a ResNet are alike, the higher ones less and less (DFT-CCA).

Claim: svcca/architectures.
"""

from __future__ import annotations

import numpy as np

import netkin as nk
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab

CONVNET = tuple(f"relu{number}" for number in range(1, 6))
SEEDS = {"cpu": 2, "gpu": 3}
EXAMPLES = {"cpu": 1_000, "gpu": 2_000}
Sums = dict[str, float]


@claim(
    "svcca/architectures",
    figure="Fig. 7",
    sentence="the lower layers of both models are noticeably similar to each other, and get progressively less similar "
    "as we compare higher layers. Note that the highest layers of the resnet are least similar to the lower layers of "
    "the convnet.",
    expected={"lower layers minus higher layers, each at its own depth": "above 0"},
    criterion="With the layers of both networks in halves, holds if the lower halves are more alike than the upper "
    "halves, and the upper half of the ResNet is less like the lower half of the convnet than any other two halves are "
    "alike, each by more than two standard errors over the pairs of networks; in part if one of the two.",
)
def architectures(lab: Lab) -> Finding:
    """DFT-CCA of all convolutional layers of a convnet with the blocks of a ResNet, one pair of networks a seed."""
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.trained_all((network, seed) for network in ("convnet", "resnet") for seed in seeds)
    found = [across(lab, seed) for seed in seeds]
    halves = [_halves(one["cca_mean"].values) for one in found]
    lower, upper = "lower with lower", "upper with upper"
    gap = Measured.over(one[lower] - one[upper] for one in halves)
    corner = "lower convnet with upper ResNet"
    below = Measured.over(min(value for name, value in one.items() if name != corner) - one[corner] for one in halves)
    return Finding(
        verdict(*(one.value > 2 * (one.error or 0) for one in (gap, below))),
        {
            "lower layers minus higher layers, each at its own depth": gap,
            "how much less alike the lower convnet and the upper ResNet are than any other two halves": below,
            **{f"halves: {name}": Measured.over(one[name] for one in halves) for name in halves[0]},
            "SVCCA, lower minus higher layers": Measured.over(_gap(one["svcca"].values) for one in found),
        },
        note='Mean canonical correlation over all frequencies (`shape="dft"`) on test images; the larger of two maps '
        "is averaged down to the smaller. A ResNet's layers are its blocks.",
        curves=_curves(found),
        seeds=tuple(seeds),
    )


def across(lab: Lab, seed: int) -> nk.Comparison:
    """Compare the convnet and the ResNet of one seed by DFT-CCA."""
    convnet, resnet = (lab.trained(network, seed).model for network in ("convnet", "resnet"))
    blocks = [name for name in nk.layers(resnet) if name.startswith("layer")]
    return nk.compare(
        convnet, resnet, data=lab.probe(EXAMPLES[lab.scale]), measures=["cca_mean", "svcca"],
        layers={"a": list(CONVNET), "b": blocks}, shape="dft", resize="average", names=("convnet", "resnet"),
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


def _gap(values: np.ndarray) -> float:
    halves = _halves(values)
    return halves["lower with lower"] - halves["upper with upper"]


def _curves(found: list[nk.Comparison]) -> dict[str, dict[str, list]]:
    mean = np.mean([one["cca_mean"].values for one in found], axis=0)
    lines = {layer: mean[place].tolist() for place, layer in enumerate(found[0].layers_a)}
    return {"Each layer of the convnet and the blocks of the ResNet": {"block": list(found[0].layers_b), **lines}}
