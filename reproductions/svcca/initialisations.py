"""Of two initialisations of a convnet the first and the last layers are alike, those between differ.

Claim: svcca/initialisations.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from torch import nn

import netkin as nk
from reproductions.claims import Finding, Measured, claim, line, verdict
from reproductions.laboratory import Lab
from reproductions.svcca.bottom_up import CONVNET

SEEDS = {"cpu": 3, "gpu": 3}
EXAMPLES = {"cpu": 2_000, "gpu": 5_000}


@claim(
    "svcca/initialisations",
    figure="Fig. App. 4",
    sentence="initial and final layers are found to be similar, with middle layers differing in representation "
    "similarity.",
    expected={"first layers minus middle layers": "above 0", "last layers minus middle layers": "above 0"},
    criterion="With the layers in thirds, holds if the mean SVCCA of corresponding layers is higher in the first third "
    "than in the middle one, and in the last third than in the middle one, each by more than two standard errors over "
    "the pairs of networks; in part if one of the two.",
)
def initialisations(lab: Lab) -> Finding:
    """SVCCA of corresponding layers, feature maps place by place, over all pairs of seeds."""
    seeds = lab.seeds(SEEDS[lab.scale])
    runs = lab.trained_all(("convnet", seed) for seed in seeds)
    lines = [between(lab, runs[i].model, runs[j].model) for i, j in combinations(seeds, 2)]
    thirds = [[float(part.mean()) for part in np.array_split(one, 3)] for one in lines]
    gaps = {
        "first layers minus middle layers": Measured.over(first - middle for first, middle, _ in thirds),
        "last layers minus middle layers": Measured.over(last - middle for _, middle, last in thirds),
    }
    points = list(zip(*lines, strict=True))
    return Finding(
        verdict(*(gap.value > 2 * (gap.error or 0) for gap in gaps.values())),
        gaps | {f"SVCCA of {layer}": Measured.over(values) for layer, values in zip(CONVNET, points, strict=True)},
        note="Test images; the layers of the paper's footnote, each convolution with its ReLU. The pairs of three "
        "networks are not independent, so the errors are a little too small.",
        curves={"Corresponding layers of two initialisations": {"layer": list(CONVNET), **line("SVCCA", points)}},
        seeds=tuple(seeds),
    )


def between(lab: Lab, a: nn.Module, b: nn.Module) -> np.ndarray:
    """Return the SVCCA of each layer of one network with the same layer of the other."""
    probe = lab.probe(EXAMPLES[lab.scale])
    found = nk.compare(
        a, b, data=probe, measures="svcca", layers=list(CONVNET), pairs="corresponding", shape="positions"
    )
    return np.array([found[layer, layer] for layer in CONVNET])
