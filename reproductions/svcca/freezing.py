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
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab

NETS = ("convnet", "resnet")
RATES = ("constant", "cosine")  # the paper does not say how its learning rate went
PLAIN, LINEAR, TOP = SCHEDULES = ("plain", "linear", "from the top")
SEEDS = {"cpu": 3, "gpu": 5}
EPOCHS = {"cpu": 2, "gpu": 15}
ROUNDS = 5  # of timing
Task = tuple[str, str, str, int]  # network, rates, schedule and seed
Trained = dict[str, list[float]]  # the test accuracy after each epoch, and after how many steps units were frozen


@dataclass(frozen=True)
class Cost:
    """What a training step costs with 0, 1, 2, ... units frozen."""

    seconds: list[float]
    operations: list[int]
    forward: int

    def of(self, frozen: Sequence[float], steps: int, cost: Callable[[int], float]) -> float:
        """Return the mean of `cost(count)` over a training in which units are frozen after so many steps."""
        marks = [0, *frozen, steps]
        return sum((marks[count + 1] - marks[count]) * cost(count) for count in range(len(frozen) + 1)) / steps

    def time(self, frozen: Sequence[float], steps: int) -> float:
        """Return the training time over that of plain training."""
        return self.of(frozen, steps, lambda count: self.seconds[count] / self.seconds[0])

    def backward_saved(self, frozen: Sequence[float], steps: int) -> float:
        """Return the share of the operations of all backward passes that is saved."""
        whole = self.operations[0] - self.forward
        return 1 - self.of(frozen, steps, lambda count: (self.operations[count] - self.forward) / whole)


@claim(
    "svcca/freeze-training",
    figure="Fig. 5",
    sentence="Freeze Training reduces training cost and improves generalization.",
    expected={
        **{f"{net}, {rates} rate: accuracy gained by freezing": "above 0" for net in NETS for rates in RATES},
        **{f"{net}: training time, over plain": "below 1" for net in NETS},
    },
    control="freezing at the same times from the top down",
    criterion="For a network and a way of the learning rate (constant, or a falling cosine), the claim holds if linear "
    "freezing from the bottom takes less time than plain training, the test accuracy in the end is higher than that of "
    "plain training, and the gain is above that of freezing the layers at the same times from the top down; accuracies "
    "seed by seed, by the 95% interval of Student's t over the seeds. It holds as a whole if it holds for both "
    "networks and both ways, in part if for some of these four.",
    training=lambda scale, _: f"{EPOCHS[scale]} epochs",
)
def freeze_training(lab: Lab) -> Finding:
    """Train both networks plainly and with units frozen, and compare what it costs and what comes out."""
    seeds = lab.seeds(SEEDS[lab.scale])
    tasks = [
        (net, rates, schedule, seed) for net in NETS for rates in RATES for schedule in SCHEDULES for seed in seeds
    ]
    runs = dict(zip(tasks, lab.over(trained, tasks, keep=True), strict=True))
    measured, controls, curves, parts = dict[str, Measured](), dict[str, Measured](), dict[str, Any](), []
    for net in NETS:
        cost, steps = costs(lab, net), lab.total_steps(net, EPOCHS[lab.scale])
        frozen = runs[net, RATES[0], LINEAR, 0]["frozen"]
        time_over = cost.time(frozen, steps)
        for rates in RATES:
            ends = {way: [runs[net, rates, way, seed]["accuracy"][-1] for seed in seeds] for way in SCHEDULES}
            name = f"{net}, {rates} rate: accuracy gained by freezing"
            measured[name], controls[name] = gains(ends[LINEAR], ends[PLAIN]), gains(ends[TOP], ends[PLAIN])
            better = measured[name].above(0), gains(ends[LINEAR], ends[TOP]).above(0)
            parts.append(all_of(time_over < 1, *better))
            measured[f"{net}, {rates} rate: test accuracy of plain training"] = Measured.over(ends[PLAIN])
            curves |= _curve(runs, net, rates, seeds)
        measured[f"{net}: training time, over plain"] = Measured(time_over)
        saved = cost.backward_saved(frozen, steps)
        measured[f"{net}: share of all backward operations that freezing saves"] = Measured(saved)
    note = (
        f"{EPOCHS[lab.scale]} epochs. Units are the convnet's eight layers with weights and the resnet's blocks, the "
        "stem with the first and the head never frozen. Training time is taken from the times of single steps with "
        "each number of units frozen, measured in turn with the plain step; operations are counted in products and "
        "convolutions. With a rate that falls, layers frozen early miss the small rates."
    )
    return Finding(verdict(*parts), measured, controls, note, curves, list(seeds))


def trained(lab: Lab, task: Task) -> Trained:
    """Train one network from its seed."""
    net, rates, schedule, seed = task
    model, steps = lab.fresh(net, seed), lab.total_steps(net, EPOCHS[lab.scale])
    options: dict[str, Any] = {"epochs": EPOCHS[lab.scale], "schedule": rates, "warmup": 0}
    with nk.FreezeTraining(model, LINEAR, steps=steps) as freezing:
        plan = {unit: step for unit, step in freezing.plan.items() if step is not None}
        if schedule == LINEAR:
            options["hooks"] = [freezing]
            history = lab.train(model, net, seed, **options)
    if schedule != LINEAR:
        top = _freezer(dict(zip(plan.values(), reversed(freezing.groups), strict=False)))
        history = lab.train(model, net, seed, hooks=[top] if schedule == TOP else [], **options)
    return {"accuracy": [epoch["accuracy"] for epoch in history], "frozen": list(plan.values())}


def _freezer(order: dict[int, str]) -> Callable[[nn.Module, int], None]:
    """Return a hook that stops the training of the named units, each after its step."""

    def hook(model: nn.Module, step: int) -> None:
        if step in order:
            for weight in model.get_submodule(order[step]).requires_grad_(False).parameters():
                weight.grad = None

    return hook


def costs(lab: Lab, net: str) -> Cost:
    """Measure a training step with each number of units frozen, in turn with the plain step."""
    images, batch = lab.images(), lab.recipe(net).recipe.batch
    inputs, labels = images.train_images[:batch], images.train_labels[:batch]
    plain = _step(lab.fresh(net, 0), inputs, labels)
    units = nk.FreezeTraining(lab.fresh(net, 0), steps=1).groups
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


def _curve(runs: dict[Task, Trained], net: str, rates: str, seeds: Iterable[int]) -> dict[str, dict[str, list[Any]]]:
    curve: dict[str, list[Any]] = {}
    for schedule in SCHEDULES:
        of_seeds = [runs[net, rates, schedule, seed]["accuracy"] for seed in seeds]
        curve = {"epoch": list(range(1, len(of_seeds[0]) + 1))} | curve
        curve |= line(schedule, zip(*of_seeds, strict=True))
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
