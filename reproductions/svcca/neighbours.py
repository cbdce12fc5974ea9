"""Layers of one network: batch norms are like the layer before them; skips make stripes.

Claims: svcca/batch-norm and svcca/stripes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import nn

import netkin as nk
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab, Run
from reproductions.svcca.bottom_up import CONVNET, EXAMPLES, NETWORKS

SEEDS = {"cpu": 3, "gpu": 5}
PERFECT = 0.95
NORMS = "SVCCA of a batch norm and the layer before it"
NEARER = "how much nearer to a layer the one two on is than the next"
Pair = tuple[str, str]


@claim(
    "svcca/batch-norm",
    figure="Fig. 4",
    sentence="batch norm layers maintain nearly perfect similarity to the layer preceding them due to scaling "
    "invariance (with a slight reduction since batch norm changes the SVD directions which capture 99% of the "
    "variance).",
    expected={f"{network}: {NORMS}": "nearly perfect" for network in NETWORKS},
    control="neighbours of equal size with a convolution or a linear layer between them",
    criterion=f"Holds for a network if the mean SVCCA of batch norms with the layer before them is above {PERFECT}, "
    "and above that of the other neighbours seed by seed, both by the 95% interval of Student's t over the seeds; in "
    "part if for one of the two networks. (That CCA without the SVD gives 1 is algebra and does not count.)",
    measures=["svcca", "cca_mean"],
)
def batch_norm(lab: Lab) -> Finding:
    """Neighbouring layers of the final networks, and of those before training, place by place."""
    seeds = lab.seeds(SEEDS[lab.scale])
    measured, controls, parts = dict[str, Measured](), dict[str, Measured](), []
    for network in NETWORKS:
        runs = lab.trained_all((network, seed) for seed in seeds)
        norms, others = _norms(runs[0].model, network), _others(runs[0].model, network)
        found = [neighbours(lab, run.model, [*norms, *others]) for run in runs]
        first = [neighbours(lab, run.untrained(), norms) for run in runs]
        near, far = ([_over(one, "svcca", pairs) for one in found] for pairs in (norms, others))
        parts.append(all_of(Measured.over(near).above(PERFECT), gains(near, far).above(0)))
        controls[f"{network}: {NORMS}"] = Measured.over(far)
        measured |= {
            f"{network}: {NORMS}": Measured.over(near),
            f"{network}: before training": Measured.over(_over(one, "svcca", norms) for one in first),
            f"{network}: by CCA without the SVD": Measured.over(_over(one, "cca_mean", norms) for one in found),
        }
    return Finding(
        verdict(*parts),
        measured,
        controls,
        note="Rows are places of the feature maps, where a batch norm scales and shifts each column, which CCA does "
        "not see; the SVD before it does.",
        seeds=tuple(seeds),
    )


@claim(
    "svcca/stripes",
    figure="Fig. 4",
    sentence="In the resnet plot, we see a stripe like pattern due to skip connections inducing high similarities to "
    "previous layers.",
    expected={NEARER: "above 0"},
    control="the convnet, which has no skips",
    criterion="Holds if in the ResNet the output of a block is nearer to the block's input, by SVCCA, than the layer "
    "inside the block, which lies between them, and by more than in the convnet the layer two on is nearer than the "
    "next, seed by seed; both by the 95% interval of Student's t over the seeds.",
    measures=["svcca"],
)
def stripes(lab: Lab) -> Finding:
    """SVCCA of each block's input with its output and with its inner ReLU; blocks whose skip is the identity."""
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.trained_all((network, seed) for network in NETWORKS for seed in seeds)
    inside, outside, plain = [], [], []
    for seed in seeds:
        model = lab.trained("resnet", seed).model
        inner, outer = _inner(model), _outer(model)
        found = neighbours(lab, model, [*inner, *outer])
        inside.append(_over(found, "svcca", inner))
        outside.append(_over(found, "svcca", outer))
        plain.append(_two_on(lab, lab.trained("convnet", seed)))
    nearer = np.subtract(outside, inside)
    return Finding(
        verdict(all_of(Measured.over(nearer).above(0), gains(nearer, plain).above(0))),
        {
            NEARER: Measured.over(nearer),
            "SVCCA of a block's input and its output": Measured.over(outside),
            "SVCCA of a block's input and the layer inside": Measured.over(inside),
        },
        {NEARER: Measured.over(plain)},
        note="Rows are places of the feature maps. Without skips similarity falls with depth; a stripe is a layer that "
        "is more like an earlier one than the layers between. In the convnet: the third to the fifth convolution.",
        seeds=tuple(seeds),
    )


def neighbours(lab: Lab, model: nn.Module, pairs: Sequence[Pair]) -> nk.Comparison:
    """Return the similarities of pairs of layers within one model."""
    layers = list(dict.fromkeys(layer for pair in pairs for layer in pair))
    measures, probe = ["svcca", "cca_mean"], lab.probe(EXAMPLES[lab.scale])
    return nk.compare(model, data=probe, measures=measures, layers=layers, pairs=list(pairs), shape="positions")


def _over(comparison: nk.Comparison, measure: str, pairs: Iterable[Pair]) -> float:
    return float(np.mean([comparison[measure][pair] for pair in pairs]))


def _norms(model: nn.Module, network: str) -> list[Pair]:
    """Return each batch norm with the layer before it."""
    if network == "convnet":
        return [pair for pair in pairwise(CONVNET) if pair[1].startswith("bn")]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return [(name.replace("bn", "conv"), name) for name in names if "downsample" not in name]


def _others(model: nn.Module, network: str) -> list[Pair]:
    """Return neighbours with one weighted layer between them and maps of one size."""
    if network == "resnet":
        return [(f"{name}.relu1", f"{name}.conv2") for name, _ in _blocks(model)]
    return [pair for pair in pairwise(CONVNET) if pair[1][:4] in ("relu", "out") and pair != ("pool2", "relu6")]


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from ((name, module) for name, module in model.named_modules() if type(module).__name__ == "BasicBlock")


def _straight(model: nn.Module) -> Iterator[Pair]:
    """Yield what enters and the name of each block whose skip is the identity."""
    names = ["relu", *(name for name, _ in _blocks(model))]
    blocks = dict(_blocks(model))
    yield from ((before, name) for before, name in pairwise(names) if blocks[name].downsample is None)


def _inner(model: nn.Module) -> list[Pair]:
    return [(before, f"{name}.relu1") for before, name in _straight(model)]


def _outer(model: nn.Module) -> list[Pair]:
    return list(_straight(model))


def _two_on(lab: Lab, run: Run) -> float:
    one, two = ("relu3", "relu4"), ("relu3", "relu5")
    found = neighbours(lab, run.model, [one, two])["svcca"]
    return found[two] - found[one]
