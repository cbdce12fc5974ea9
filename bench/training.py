"""Several networks trained at once against one by one: `python bench/training.py [cpu|cuda]` prints JSON.

Eight seeds of ResNet-20 (on a GPU batch 512, bf16, channels last; on a CPU batch 16) and 120 clients of a small convnet
(batch 32). Times are those of steps alone, from the difference of a longer and a shorter training; what a call
takes beside its steps is told apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from clock import ratio
from torch import Tensor, nn

import netkin as nk
from netkin.settings import exact_products
from netkin.sources.architectures import architecture, seeded

NAMES = ("seeds", "clients")


@dataclass(frozen=True)
class Task:
    """Networks and how they are trained: how many, on how large images, in which precision."""

    build: Callable[[], nn.Module]
    networks: int
    image: tuple[int, int, int]
    batch: int
    precision: str
    own_data: bool
    steps: tuple[int, int]  # of the shorter and the longer training
    goal: float

    def models(self, device: str, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
        """Return the networks, each from its own seed."""
        found = [seeded(self.build, seed).to(device, dtype) for seed in range(self.networks)]
        return [one.to(memory_format=torch.channels_last) if device == "cuda" else one for one in found]

    def data(self, device: str) -> dict[str, Any]:
        """Return noise in the shape of images, one set for all networks or one for each."""
        draw = torch.Generator().manual_seed(0)

        def part(count: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(0, 10, (count,), generator=draw)
            return torch.randn(count, *self.image, generator=draw).to(device), labels.to(device)

        if self.own_data:
            return {"data_of_each": [part(16 * self.batch) for _ in range(self.networks)]}
        return {"data": part(20 * self.batch)}


def convnet() -> nn.Module:
    """Return the network of a client: two convolutions and a linear layer for images of 3 × 32 × 32."""
    convs = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10))


def small_convnet() -> nn.Module:
    """Return a network for images of 1 × 8 × 8."""
    convs = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(256, 10))


RESNET = architecture("resnet20")
TASKS = {
    "cuda": {
        "seeds": Task(RESNET, 8, (3, 32, 32), 512, "bf16", False, (20, 120), 2.5),
        "clients": Task(convnet, 120, (3, 32, 32), 32, "float32", True, (8, 40), 15),
    },
    "cpu": {
        "seeds": Task(RESNET, 8, (3, 32, 32), 16, "float32", False, (1, 3), 1),
        "clients": Task(convnet, 120, (3, 32, 32), 32, "float32", True, (2, 6), 1),
        "small": Task(small_convnet, 24, (1, 8, 8), 32, "float32", True, (16, 80), 1),
    },
}


def training(name: str, device: str = "cpu", ways: tuple[str, ...] = ("one by one", "auto")) -> dict[str, Any]:
    """Return what a step of one network takes one by one and at once, the gain, and how far the numbers lie apart."""
    task = TASKS[device][name]
    data, found = task.data(device), dict[str, Any]()
    for way in ways:
        trained(task, device, data, 2, way)  # what is loaded and compiled at the first call is left aside
        shorter, longer = (timed(task, device, data, steps, way) for steps in task.steps)
        step = (longer - shorter) / (task.steps[1] - task.steps[0])
        found[way] = {"step_ms": 1e3 * step / task.networks, "beside_steps_s": shorter - step * task.steps[0]}
        found[way]["whole_s"] = longer
    plain = found["one by one"]
    for way in ways[1:]:
        found[way]["gain"] = plain["step_ms"] / found[way]["step_ms"]
        found[way]["gain_of_whole_call"] = plain["whole_s"] / found[way]["whole_s"]
    return found | {"networks": task.networks, "batch": task.batch, "steps": task.steps[1]} | apart(task, device)


def in_turn(name: str) -> dict[str, Any]:
    """Return the time of a whole call at once over one by one, on the CPU, for the table of goals."""
    task = TASKS["cpu"][name]
    data = task.data("cpu")
    work, floor = (lambda way=way: trained(task, "cpu", data, task.steps[1], way) for way in ("auto", "one by one"))
    return ratio(work, floor, repeats=5) | {"networks": task.networks, "batch": task.batch}


def trained(task: Task, device: str, data: dict[str, Any], steps: int, way: str) -> list[nn.Module]:
    """Train the networks for some steps."""
    recipe = nk.Recipe(
        steps=steps, batch=task.batch, lr=0.05, weight_decay=5e-4, precision=task.precision, drop_last=True
    )
    models = task.models(device)
    nk.train_many(models, recipe=recipe, method=way, progress=False, **data)
    return models


def timed(task: Task, device: str, data: dict[str, Any], steps: int, way: str) -> float:
    """Return the seconds of a training."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    trained(task, device, data, steps, way)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def apart(task: Task, device: str) -> dict[str, float]:
    """Return how far networks trained at once lie from those of one by one.

    After 20 steps in float64, and after one step at rate 1 in float32, which shows the gradients.
    """
    found = {}
    for what, steps, dtype, rate in (
        ("error_float64", 20, torch.float64, 0.05),
        ("error_first", 1, torch.float32, 1.0),
    ):
        recipe = nk.Recipe(steps=steps, batch=min(task.batch, 32), lr=rate, momentum=0.9, drop_last=True)
        at_once, plain = (task.models(device, dtype)[:6] for _ in range(2))
        data = {key: value if key == "data" else value[:6] for key, value in task.data(device).items()}
        with exact_products():
            nk.train_many(at_once, recipe=recipe, progress=False, **data)
            nk.train_many(plain, recipe=recipe, method="one by one", progress=False, **data)
        pairs = [
            (a.state_dict()[key].double(), b.state_dict()[key].double())
            for a, b in zip(at_once, plain, strict=True)
            for key in a.state_dict()
        ]
        found[what] = max(float((x - y).abs().max()) for x, y in pairs)
    return found


def table(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return the figures of `training` by task as a table."""
    head = [
        "| networks | one by one | at once | gain | of a whole call | float64, 20 steps | float32, first gradients |"
    ]
    rows = [
        f"| {name}: {one['networks']}, batch {one['batch']} | {one['one by one']['step_ms']:.2f} ms a step | "
        f"{one['auto']['step_ms']:.2f} ms | {one['auto']['gain']:.1f} | {one['auto']['gain_of_whole_call']:.1f} | "
        f"{one['error_float64']:.0e} | {one['error_first']:.0e} |"
        for name, one in figures.items()
    ]
    return [*head, "|---|---|---|---|---|---|---|", *rows]


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    every = ("one by one", "auto", "stacked", "graphs") if where == "cuda" else ("one by one", "auto", "stacked")
    print(json.dumps({name: training(name, where, every) for name in NAMES}, indent=2))
