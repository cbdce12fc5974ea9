"""Layers settle from the bottom up; batch norms are like the layer before them; skips make stripes.

Claims: svcca/bottom-up, svcca/batch-norm and svcca/stripes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import nn

import netkin as nk
from netkin.results.trends import kendall
from reproductions.claims import Finding, Measured, claim, verdict
from reproductions.laboratory import Lab, Run

NETWORKS = ("convnet", "resnet")
SEEDS = {"cpu": 3, "gpu": 5}
EXAMPLES = {"cpu": 2_000, "gpu": 5_000}
THRESHOLDS = (0.8, 0.9, 0.95)
MARK = 0.9
# the layers of the paper's footnote, each convolution and hidden linear layer with its ReLU
CONVNET = (
    "relu1", "relu2", "bn1", "pool1", "relu3", "relu4", "relu5", "bn2", "pool2", "relu6", "bn3", "relu7", "bn4", "out",
)  # fmt: skip
Pair = tuple[str, str]


@claim(
    "svcca/bottom-up",
    figure="Fig. 4, App. 3",
    sentence="learning broadly happens ‘bottom up’ – layers closer to the input seem to solidify into their final "
    "representations with the exception of the very top layers.",
    expected={f"{network}: τ of depth and the step of reaching {MARK}": "above 0" for network in NETWORKS},
    criterion="Holds if in both networks Kendall's τ between a layer's depth and the step from which on its SVCCA "
    f"with its own final state stays at {MARK} or above, over all layers but the logits, is above 0 by more than two "
    "standard errors over the seeds; in part if in one of them.",
)
def bottom_up(lab: Lab) -> Finding:
    """Every kept state of a run against the last one; feature maps place by place."""
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.trained_all((network, seed) for network in NETWORKS for seed in seeds)
    found = {network: [followed(lab, network, seed) for seed in seeds] for network in NETWORKS}
    measured = {f"{network}: {name}": one for network in NETWORKS for name, one in _numbers(found[network]).items()}
    leading = [measured[f"{network}: τ of depth and the step of reaching {MARK}"] for network in NETWORKS]
    return Finding(
        verdict(*(one.value > 2 * (one.error or 0) for one in leading)),
        measured,
        note="SVCCA over test images; rows are places of the feature maps, as in the paper for a layer with itself. A "
        "layer that does not reach the mark before the last step ties there. Where layers tie throughout, τ counts as "
        "0. The mean over time needs no mark: τ of depth and one minus a layer's mean similarity to its final state.",
        curves={f"Each layer of the {network} and its final state": _lines(found[network]) for network in NETWORKS},
        seeds=tuple(seeds),
    )


def followed(lab: Lab, network: str, seed: int) -> nk.Series:
    """Return each layer against its own final state at every step that was kept."""
    run = lab.trained(network, seed)
    layers = list(CONVNET) if network == "convnet" else nk.layers(run.model)
    probe = lab.probe(EXAMPLES[lab.scale])
    return nk.dynamics(
        run.checkpoints, probe, model=run.model, layers=layers, pairs="corresponding", shape="positions", name=network
    )


def order(series: nk.Series, threshold: float | None, layers: Sequence[str]) -> float:
    """Return τ of depth and the step of reaching `threshold`, or of depth and the mean distance over time."""
    if threshold is None:
        means = series.mean_over_time()
        return kendall([-means.get(layer, 0.0) for layer in layers])  # a layer that was ever constant comes last
    reached = series.reached(threshold)
    return kendall([series.final_step if reached[layer] is None else reached[layer] or 0 for layer in layers])


def _numbers(runs: Sequence[nk.Series]) -> dict[str, Measured]:
    layers = runs[0].layers
    measured = {
        f"τ of depth and the step of reaching {mark}": Measured.over(order(one, mark, layers[:-1]) for one in runs)
        for mark in THRESHOLDS
    }
    measured["τ of depth and the mean over time"] = Measured.over(order(one, None, layers[:-1]) for one in runs)
    measured[f"τ at {MARK} with the logits"] = Measured.over(order(one, MARK, layers) for one in runs)
    middle = len(layers) // 2
    for name, part in (("lower half", layers[:middle]), ("upper half", layers[middle:])):
        measured[f"mean similarity over time, {name}"] = Measured.over(_mean(one, part) for one in runs)
    return measured


def _mean(series: nk.Series, layers: Sequence[str]) -> float:
    means = series.mean_over_time()
    return float(np.mean([means[layer] for layer in layers if layer in means]))  # one that was ever constant has none


def _lines(runs: Sequence[nk.Series]) -> dict[str, list[float]]:
    own = np.mean([one.own() for one in runs], axis=0)
    return {"step": list(runs[0].steps)} | {layer: own[:, i].tolist() for i, layer in enumerate(runs[0].layers)}


@claim(
    "svcca/batch-norm",
    figure="Fig. 4",
    sentence="batch norm layers maintain nearly perfect similarity to the layer preceding them due to scaling "
    "invariance (with a slight reduction since batch norm changes the SVD directions which capture 99% of the "
    "variance).",
    expected={f"{network}: SVCCA of a batch norm and the layer before it": "nearly perfect" for network in NETWORKS},
    criterion="Holds if in both networks the mean SVCCA of batch norms with the layer before them is at least 0.95, "
    "and above that of other neighbours by more than two standard errors over the seeds; in part if one of the four.",
)
def batch_norm(lab: Lab) -> Finding:
    """Neighbouring layers of the final networks, and of those before training, place by place."""
    seeds = lab.seeds(SEEDS[lab.scale])
    measured: dict[str, Measured] = {}
    conditions: list[bool] = []
    for network in NETWORKS:
        runs = [lab.trained(network, seed) for seed in seeds]
        norms, others = _norms(runs[0].model, network), _others(runs[0].model, network)
        found = [neighbours(lab, run.model, [*norms, *others]) for run in runs]
        first = [neighbours(lab, run.at(min(run.checkpoints)), norms) for run in runs]
        near, far = (np.array([_over(one, "svcca", pairs) for one in found]) for pairs in (norms, others))
        gap = Measured.over(near - far)
        conditions += [bool(near.mean() >= 0.95), gap.value > 2 * (gap.error or 0)]
        measured |= {
            f"{network}: SVCCA of a batch norm and the layer before it": Measured.over(near),
            f"{network}: before training": Measured.over(_over(one, "svcca", norms) for one in first),
            f"{network}: by CCA without the SVD": Measured.over(_over(one, "cca_mean", norms) for one in found),
            f"{network}: SVCCA of other neighbours": Measured.over(far),
        }
    return Finding(
        verdict(*conditions),
        measured,
        note="Rows are places of the feature maps, where a batch norm scales and shifts each column, which CCA does "
        "not see. Other neighbours are layers of equal size with one convolution or linear layer between them.",
        seeds=tuple(seeds),
    )


@claim(
    "svcca/stripes",
    figure="Fig. 4",
    sentence="In the resnet plot, we see a stripe like pattern due to skip connections inducing high similarities to "
    "previous layers.",
    expected={"resnet: how much nearer to a block's input its output is than the layer inside": "above 0"},
    criterion="Holds if the output of a residual block is nearer to the block's input than the layer inside the block, "
    "which lies between them, by more than two standard errors over the seeds, and in the convnet, without skips, two "
    "layers on is not nearer than one; in part if one of the two.",
)
def stripes(lab: Lab) -> Finding:
    """SVCCA of each block's input with its output and with its inner ReLU; blocks whose skip is the identity."""
    seeds = lab.seeds(SEEDS[lab.scale])
    inside, outside, plain = [], [], []
    for seed in seeds:
        model = lab.trained("resnet", seed).model
        inner, outer = _inner(model), _outer(model)
        found = neighbours(lab, model, [*inner, *outer])
        inside.append(_over(found, "svcca", inner))
        outside.append(_over(found, "svcca", outer))
        plain.append(_two_on(lab, lab.trained("convnet", seed)))
    gap, control = Measured.over(np.subtract(outside, inside)), Measured.over(plain)
    return Finding(
        verdict(gap.value > 2 * (gap.error or 0), control.value <= 0),
        {
            "resnet: how much nearer to a block's input its output is than the layer inside": gap,
            "resnet: SVCCA of a block's input and its output": Measured.over(outside),
            "resnet: SVCCA of a block's input and the layer inside": Measured.over(inside),
            "convnet: how much nearer two layers on is than one": control,
        },
        note="Rows are places of the feature maps. Without skips similarity falls with depth; a stripe is a layer that "
        "is more like an earlier one than the layers between.",
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
