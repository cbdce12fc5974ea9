"""Layers settle from the bottom up, in networks for images and in a stacked LSTM.

Claims: svcca/bottom-up and svcca/recurrent. Their controls are networks that never learn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.results.series import kendall
from netkin.sources.architectures import seeded
from reproductions.claims import Finding, Measured, all_of, claim, gains, verdict
from reproductions.laboratory import Lab, Run
from reproductions.record import LESS

NETWORKS = ("convnet", "resnet")
SEEDS = {"cpu": 5, "gpu": 5}
EXAMPLES = {"cpu": 1_000, "gpu": 2_000}
PIECES = {"cpu": 200, "gpu": 1_000}  # of held-out text that states are compared on
THRESHOLDS = (0.8, 0.9, 0.95)
MARK = 0.9
LEARNED, WALK, LINE = WAYS = ("trained", "random walk", "straight line")
AFRESH = 1_000  # added to a seed for the other end of the line
# the layers of the paper's footnote, each convolution and hidden linear layer with its ReLU
CONVNET = (
    "relu1", "relu2", "bn1", "pool1", "relu3", "relu4", "relu5", "bn2", "pool2", "relu6", "bn3", "relu7", "bn4", "out",
)  # fmt: skip
TAU = f"τ of depth and the step of reaching {MARK}"
CONTROL = (
    "networks that never learn: weights that walk at random, each as far between two kept steps as in the training"
)
State = Mapping[str, Tensor]
Task = tuple[str, int, str]  # network, seed and way


@claim(
    "svcca/bottom-up",
    figure="Fig. 4, App. 3",
    sentence="learning broadly happens ‘bottom up’ – layers closer to the input seem to solidify into their final "
    "representations with the exception of the very top layers.",
    expected={f"{network}: {TAU}": "above 0" for network in NETWORKS},
    control=f"{CONTROL}; and a straight line between two random networks",
    criterion="For a network, τ is Kendall's rank correlation between a layer's depth and the step from which on its "
    f"SVCCA with its own final state stays at {MARK} or above, over all layers but the logits. The claim holds for it "
    "if τ is above 0, above that of the random walk, and above that of a straight line between two random networks, "
    "the last two seed by seed, each by the 95% interval of Student's t over the seeds. In part if for one network.",
    measures=["svcca"],
)
def bottom_up(lab: Lab) -> Finding:
    """Every kept state of a run against the last one, feature maps place by place; the controls alike."""
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.trained_all((network, seed) for network in NETWORKS for seed in seeds)
    tasks = [(network, seed, way) for network in NETWORKS for way in WAYS for seed in seeds]
    series = dict(zip(tasks, lab.over(followed, tasks), strict=True))
    parts, measured, controls = [], dict[str, Measured](), dict[str, Measured]()
    for network in NETWORKS:
        runs = {way: [series[network, seed, way] for seed in seeds] for way in WAYS}
        parts.append(_ahead(runs, runs[LEARNED][0].layers[:-1]))
        measured |= {f"{network}: {name}": one for name, one in _numbers(runs[LEARNED]).items()}
        measured |= {f"{network}: {TAU}{less}": one for less, one in _differences(runs).items()}
        controls |= {f"{network}: {name}": one for name, one in _numbers(runs[WALK]).items()}
        controls |= {f"{network}, straight line: {name}": one for name, one in _numbers(runs[LINE]).items()}
        measured[f"{network}: test accuracy"] = Measured.over(lab.trained(network, seed).accuracy for seed in seeds)
    return Finding(
        verdict(*parts),
        measured,
        controls,
        note="SVCCA over test images; rows are places of the feature maps, as in the paper for a layer with itself. A "
        "layer that does not reach the mark before the last step ties there. Where layers tie throughout, τ counts as "
        "0. The mean over time needs no mark: τ of depth and one minus a layer's mean similarity to its final state. "
        "In the controls batch norms take their statistics from training images.",
        curves={
            f"Each layer of the {network} and its final state, {way}": _lines([series[network, s, way] for s in seeds])
            for network in NETWORKS
            for way in (LEARNED, WALK)
        },
        seeds=tuple(seeds),
    )


def followed(lab: Lab, task: Task) -> nk.Series:
    """Return each layer against its own final state at every step that was kept, of a run or of a control."""
    network, seed, way = task
    run = lab.trained(network, seed)
    states: Mapping[int, State] = run.checkpoints
    if way != LEARNED:
        states = unlearned(states, run.model, lab.fresh(network, AFRESH + seed), way, seed)
        states = {step: _settled(lab, run, state) for step, state in states.items()}
    layers = list(CONVNET) if network == "convnet" else nk.layers(run.model)
    probe = lab.probe(EXAMPLES[lab.scale])
    return nk.dynamics(
        states,
        probe,
        model=run.model,
        layers=layers,
        pairs="corresponding",
        shape="positions",
        name=f"{network}, {way}",
    )


def unlearned(
    states: Mapping[int, State], model: nn.Module, other: nn.Module, way: str, seed: int
) -> dict[int, dict[str, Tensor]]:
    """Return states of a network that never learns, at the steps of a run and from the same beginning.

    Args:
        states: The states of the run by step.
        model: A network of the kind, which tells weights from statistics.
        other: Another one before training, the end of the straight line.
        way: "random walk" or "straight line".
        seed: Of the random walk.
    """
    weights = dict(model.named_parameters()).keys()
    steps = list(states)
    found = {steps[0]: dict(states[steps[0]])}
    generator, end = torch.Generator().manual_seed(seed), other.state_dict()
    for before, step in pairwise(steps):
        state = dict(found[before])
        for name in weights:
            if way == LINE:
                state[name] = torch.lerp(states[steps[0]][name], end[name].cpu(), step / steps[-1])
            else:
                drawn = torch.randn(state[name].shape, generator=generator)
                moved = torch.linalg.vector_norm((states[step][name] - states[before][name]).flatten())
                state[name] = state[name] + drawn * moved / torch.linalg.vector_norm(drawn.flatten())
        found[step] = state
    return found


def _settled(lab: Lab, run: Run, state: State) -> dict[str, Tensor]:
    """Return a state whose batch norms hold the statistics of some training images."""
    model = run.build()
    model.load_state_dict(dict(state))
    return {name: value.cpu() for name, value in lab.settled(model).state_dict().items()}


def mean_over_time(series: nk.Series) -> dict[str, float]:
    """Return each layer's mean value against its own final state over the run, by the trapezium rule.

    A layer that settles early has a high mean similarity, whatever threshold one would choose. A layer with a missing
    value has none and is left out.
    """
    steps, values = np.array(series.steps, dtype=float), series.own()
    gaps = np.diff(steps)[:, None]
    means = ((values[1:] + values[:-1]) / 2 * gaps).sum(0) / gaps.sum() if len(steps) > 1 else values[0]
    return {layer: float(mean) for layer, mean in zip(series.layers, means, strict=True) if np.isfinite(mean)}


def order(series: nk.Series, threshold: float | None, layers: Sequence[str]) -> float:
    """Return τ of depth and the step of reaching `threshold`, or of depth and the mean distance over time."""
    if threshold is None:
        means = mean_over_time(series)
        return kendall([-means.get(layer, 0.0) for layer in layers])  # a layer that was ever constant comes last
    reached = series.reached(threshold)
    return kendall([series.final_step if reached[layer] is None else reached[layer] or 0 for layer in layers])


def _ahead(runs: Mapping[str, Sequence[nk.Series]], layers: Sequence[str]) -> bool | None:
    """Tell whether trained networks settle from the bottom up, and more so than both controls."""
    taus = {way: [order(one, MARK, layers) for one in found] for way, found in runs.items()}
    beyond = [gains(taus[LEARNED], taus[way]).above(0) for way in (WALK, LINE)]
    return all_of(Measured.over(taus[LEARNED]).above(0), *beyond)


def _differences(runs: Mapping[str, Sequence[nk.Series]]) -> dict[str, Measured]:
    """Return by how much τ of trained networks is above that of each control, seed by seed."""
    taus = {way: [order(one, MARK, one.layers[:-1]) for one in found] for way, found in runs.items()}
    return {f"{LESS}the {way}": gains(taus[LEARNED], taus[way]) for way in (WALK, LINE)}


def _numbers(runs: Sequence[nk.Series]) -> dict[str, Measured]:
    layers = runs[0].layers
    measured = {TAU: Measured.over(order(one, MARK, layers[:-1]) for one in runs)}
    for mark in THRESHOLDS:
        name = f"τ of depth and the step of reaching {mark}"
        measured[name] = Measured.over(order(one, mark, layers[:-1]) for one in runs)
    measured["τ of depth and the mean over time"] = Measured.over(order(one, None, layers[:-1]) for one in runs)
    measured[f"τ at {MARK} with the logits"] = Measured.over(order(one, MARK, layers) for one in runs)
    return measured


def _lines(runs: Sequence[nk.Series]) -> dict[str, list[float]]:
    own = np.mean([one.own() for one in runs], axis=0)
    return {"step": list(runs[0].steps)} | {layer: own[:, i].tolist() for i, layer in enumerate(runs[0].layers)}


@claim(
    "svcca/recurrent",
    figure="App. 6",
    sentence="Learning dynamics of the different layers of a stacked LSTM trained on the Penn Tree Bank language "
    "modeling task. We observe a similar pattern to that of convolutional architectures trained on image data: lower "
    "layer converge faster than upper layers.",
    expected={TAU: "above 0"},
    control=CONTROL,
    criterion=f"Holds if Kendall's τ between a layer's depth and the step from which on its SVCCA with its own final "
    f"state stays at {MARK} or above is above 0, above that of the random walk, and above that of a straight line "
    "between two random networks, the last two seed by seed, each by the 95% interval of Student's t over the seeds.",
    measures=["svcca"],
)
def recurrent(lab: Lab) -> Finding:
    """Hidden states at all times as rows, on text that was not trained on."""
    seeds = lab.seeds(SEEDS[lab.scale])
    lab.text()  # refused before any training
    lab.trained_all(("lstm", seed) for seed in seeds)
    tasks = [("lstm", seed, way) for way in WAYS for seed in seeds]
    series = dict(zip(tasks, lab.over(followed_text, tasks), strict=True))
    runs = {way: [series["lstm", seed, way] for seed in seeds] for way in WAYS}
    layers = runs[LEARNED][0].layers
    found = {way: _of_text(one, layers) for way, one in runs.items()}
    losses = [_loss(lab, lab.trained("lstm", seed)) for seed in seeds]
    measured = found[LEARNED] | {"loss on held-out text": Measured.over(losses, "nats a character")}
    return Finding(
        verdict(_ahead(runs, layers)),
        measured,
        found[WALK] | {f"straight line: {name}": one for name, one in found[LINE].items()},
        note="A character LSTM of three layers on tiny Shakespeare, in place of the paper's word model on Penn "
        "Treebank, which we do not have.",
        curves={f"Each LSTM layer and its final state, {way}": _lines(runs[way]) for way in (LEARNED, WALK)},
        seeds=tuple(seeds),
    )


def followed_text(lab: Lab, task: Task) -> nk.Series:
    """Return a run's LSTM layers, or those of a control, against their final states."""
    _, seed, way = task
    run = lab.trained("lstm", seed)
    states: Mapping[int, State] = run.checkpoints
    if way != LEARNED:
        other = seeded(run.build, AFRESH + seed)
        states = unlearned(states, run.model, other, way, seed)
    probe = list(lab.held_out(PIECES[lab.scale])[0].split(100))
    return nk.dynamics(states, probe, model=run.model, layers=nn.LSTM, shape="tokens", name=f"LSTM, {way}")


def _of_text(runs: Sequence[nk.Series], layers: Sequence[str]) -> dict[str, Measured]:
    means = [mean_over_time(series) for series in runs]
    measured: dict[str, Any] = {TAU: Measured.over(order(one, MARK, layers) for one in runs)}
    measured["τ of depth and the mean over time"] = Measured.over(order(one, None, layers) for one in runs)
    return measured | {
        f"{layer}: mean similarity over time": Measured.over(mean[layer] for mean in means) for layer in layers
    }


@torch.no_grad()
def _loss(lab: Lab, run: Run) -> float:
    inputs, labels = lab.held_out(PIECES[lab.scale])
    parts = zip(inputs.split(100), labels.split(100), strict=True)
    losses = [cross_entropy(run.model(some).flatten(0, 1), truth.flatten()).item() for some, truth in parts]
    return float(np.mean(losses))
