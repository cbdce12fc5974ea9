"""Freeze training, the lower layers frozen one after the other, costs less and generalises as well.

Claim: svcca/freeze-training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import netkin as nk
from reproductions.claims import Finding, Measured, claim, line, verdict
from reproductions.laboratory import Lab

NETS = ("convnet", "resnet")
RATES = ("constant", "steps")  # the paper does not say how its learning rate went
SCHEDULES = {"cpu": ("plain", "linear"), "gpu": ("plain", "linear", "similarity")}
SEEDS = {"cpu": 3, "gpu": 5}
EPOCHS = {"cpu": 5, "gpu": 20}
# a probe each hundredth step; with falling rates only, since at a constant rate the noise of the updates stays
PROBING: dict[str, Any] = {"measure": "cka", "threshold": 0.98, "patience": 3, "past": 3}
PROBE = 256  # images
SAME = 0.005  # half a point
ROUNDS = 5  # of timing


@dataclass(frozen=True)
class Task:
    """One training: of which network, with which learning rates, frozen how, from which seed."""

    net: str
    rates: str
    schedule: str
    seed: int


@dataclass(frozen=True)
class Trained:
    """What came out of it: the test accuracy after each epoch, and after how many steps units were frozen."""

    accuracy: list[float]
    frozen: list[int]


@dataclass(frozen=True)
class Cost:
    """What a training step costs with 0, 1, 2, ... units frozen."""

    seconds: list[float]
    operations: list[int]
    forward: int

    def of(self, frozen: Sequence[int], steps: int, cost: Callable[[int], float]) -> float:
        """Return the mean of `cost(count)` over a training in which units are frozen after so many steps."""
        marks = [0, *frozen, steps]
        return sum((marks[count + 1] - marks[count]) * cost(count) for count in range(len(frozen) + 1)) / steps

    def time(self, frozen: Sequence[int], steps: int) -> float:
        """Return the training time over that of plain training."""
        return self.of(frozen, steps, lambda count: self.seconds[count] / self.seconds[0])

    def backward_saved(self, frozen: Sequence[int], steps: int) -> float:
        """Return the share of the operations of all backward passes that is saved."""
        whole = self.operations[0] - self.forward
        return 1 - self.of(frozen, steps, lambda count: (self.operations[count] - self.forward) / whole)


@claim(
    "svcca/freeze-training",
    figure="Fig. 5",
    sentence="Freeze Training reduces training cost and improves generalization.",
    expected={
        "convnet, constant rate: accuracy with linear freezing minus without": "above 0",
        "resnet, constant rate: accuracy with linear freezing minus without": "above 0",
        "convnet: training time with linear freezing, over plain": "below 1",
        "resnet: training time with linear freezing, over plain": "below 1",
    },
    criterion="For a network and a way of the learning rate (constant, or falling in steps), the claim holds if the "
    "measured training time with linear freezing is below that of plain training, and the test accuracy, the mean over "
    "pairs of runs from the same seed, is lower by no more than half a point. It holds as a whole if it holds for both "
    "networks and both ways, in part if for some of these four.",
)
def freeze_training(lab: Lab) -> Finding:
    """Train both networks plainly and with units frozen, and compare what it costs and what comes out."""
    seeds = lab.seeds(SEEDS[lab.scale])
    tasks = [
        Task(net, rates, schedule, seed)
        for net in NETS for rates in RATES for schedule in SCHEDULES[lab.scale] for seed in seeds
        if schedule != "similarity" or rates == "steps"
    ]  # fmt: skip
    runs = dict(zip(tasks, lab.over(trained, tasks), strict=True))
    measured: dict[str, Measured] = {}
    curves: dict[str, dict[str, list[Any]]] = {}
    conditions = []
    for net in NETS:
        cost, steps = costs(lab, net), lab.total_steps(net, EPOCHS[lab.scale])
        for rates in RATES:
            found = compared(runs, net, rates, seeds, cost, steps)
            measured |= found
            curves |= _curve(runs, net, rates, SCHEDULES[lab.scale], seeds)
            gain, time_over = found[_gain(net, rates, "linear")], found[_time(net, "linear")]
            conditions.append(gain.value >= -SAME and time_over.value < 1)
    return Finding(verdict(*conditions), measured, note(measured, lab), curves, list(seeds))


def trained(lab: Lab, task: Task) -> Trained:
    """Train one network from its seed."""
    model, steps = lab.fresh(task.net, task.seed), lab.total_steps(task.net, EPOCHS[lab.scale])
    options = {"epochs": EPOCHS[lab.scale], "schedule": task.rates}
    if task.schedule == "plain":
        return Trained([epoch["accuracy"] for epoch in lab.train(model, task.net, task.seed, **options)], [])
    frozen: list[int] = []
    probing = {"probe": lab.probe(PROBE), **PROBING} if task.schedule == "similarity" else {}
    with nk.FreezeTraining(model, task.schedule, steps=steps, **probing) as freezing:
        each_step = lambda step: frozen.extend(step for _ in freezing.at(step))  # noqa: E731
        history = lab.train(model, task.net, task.seed, each_step=each_step, **options)
    return Trained([epoch["accuracy"] for epoch in history], frozen)


def costs(lab: Lab, net: str) -> Cost:
    """Measure a training step with each number of units frozen, in turn with the plain step."""
    images, batch = lab.images(), lab.recipe(net).batch
    inputs, labels = images.train_images[:batch], images.train_labels[:batch]
    plain = _step(lab.fresh(net, 0), inputs, labels)
    units = nk.FreezeTraining(lab.fresh(net, 0), steps=1).units
    ratios, operations = [1.0], [_operations(plain)]
    for count in range(1, len(units)):
        model = lab.fresh(net, 0)
        with nk.FreezeTraining(model, dict.fromkeys(units[:count], 0.0), steps=1):
            step = _step(model, inputs, labels)
            operations.append(_operations(step))
            ratios.append(median(_seconds(step) / _seconds(plain) for _ in range(ROUNDS)))
    with torch.no_grad():
        forward = _operations(lambda: lab.fresh(net, 0)(inputs))
    return Cost(ratios, operations, forward)


def compared(
    runs: dict[Task, Trained], net: str, rates: str, seeds: Iterable[int], cost: Cost, steps: int
) -> dict[str, Measured]:
    """Return accuracies, their paired differences, and what was saved, by name."""
    of = {schedule: [runs[Task(net, rates, schedule, seed)] for seed in seeds]
          for schedule in ("plain", "linear", "similarity") if Task(net, rates, schedule, 0) in runs}  # fmt: skip
    plain = of.pop("plain")
    found = {f"{net}, {rates} rate: test accuracy of plain training": Measured.over(run.accuracy[-1] for run in plain)}
    for schedule, frozen in of.items():
        pairs = zip(frozen, plain, strict=True)
        found[_gain(net, rates, schedule)] = Measured.over(
            one.accuracy[-1] - other.accuracy[-1] for one, other in pairs
        )
        found[_time(net, schedule)] = Measured.over(cost.time(run.frozen, steps) for run in frozen)
        saved = f"{net}: share of all backward operations that {schedule} freezing saves"
        found[saved] = Measured.over(cost.backward_saved(run.frozen, steps) for run in frozen)
        if schedule == "similarity":
            name = f"{net}: units frozen by similarity before the end, of {len(cost.seconds) - 1}"
            found[name] = Measured.over(len(run.frozen) for run in frozen)
    return found


def note(measured: dict[str, Measured], lab: Lab) -> str:
    """Return what the numbers say about the stronger half of the sentence, that freezing helps."""
    gains = {name: one for name, one in measured.items() if "minus without" in name and "linear" in name}
    better = [name.partition(":")[0] for name, one in gains.items() if one.error and one.value > 2 * one.error]
    worse = [name.partition(":")[0] for name, one in gains.items() if one.error and one.value < -2 * one.error]
    return (
        f"Linear freezing improves the test accuracy by more than two standard errors for {_listed(better)}, and "
        f"lowers it by as much for {_listed(worse)}. {EPOCHS[lab.scale]} epochs. Units are the convnet's eight layers "
        "with weights and the resnet's blocks, the stem with the first and the head never frozen. Training time is "
        "taken from the times of single steps with each number of units frozen, measured in turn with the plain step; "
        "operations are counted in products and convolutions. With a rate that falls, layers frozen early miss the "
        "small rates."
    )


def _listed(names: list[str]) -> str:
    return " and ".join(names) or "no network and rate"


def _gain(net: str, rates: str, schedule: str) -> str:
    return f"{net}, {rates} rate: accuracy with {schedule} freezing minus without"


def _time(net: str, schedule: str) -> str:
    return f"{net}: training time with {schedule} freezing, over plain"


def _curve(
    runs: dict[Task, Trained], net: str, rates: str, schedules: Iterable[str], seeds: Iterable[int]
) -> dict[str, dict[str, list[Any]]]:
    curve: dict[str, list[Any]] = {}
    for schedule in schedules:
        of_seeds = [
            runs[Task(net, rates, schedule, s)].accuracy for s in seeds if Task(net, rates, schedule, s) in runs
        ]
        if of_seeds:
            name = "plain" if schedule == "plain" else f"{schedule} freezing"
            curve = {"epoch": list(range(1, len(of_seeds[0]) + 1))} | curve
            curve |= line(name, zip(*of_seeds, strict=True))
    return {f"Test accuracy of the {net}, {rates} rate": curve}


def _step(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    cast = torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda)  # as in training

    def step() -> None:
        optimizer.zero_grad()
        with cast:
            loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    model.train()
    for _ in range(3):
        step()
    return step


def _seconds(step: Callable[[], None], count: int = 3) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _operations(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
