"""Freeze training: what a training step costs by the share of frozen groups, against the step with none frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from clock import ratio
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import netkin as nk
from netkin.sources.architectures import architecture, seeded

NETS = ("resnet20", "svcca_convnet")
STEPS = 5  # of a timed training
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the units that are ever frozen, which is all but the last


def freezing(name: str, batch: int, repeats: int, device: str = "cpu") -> dict[str, Any]:
    """Return for each share of frozen groups the time of a step and what autograd keeps, over those of a plain step."""
    model = seeded(architecture(name), 0).to(device)
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(STEPS * batch, 3, 32, 32, generator=draw).to(device)
    labels = torch.randint(0, 10, (STEPS * batch,), generator=draw).to(device)
    units = nk.FreezeTraining(copy.deepcopy(model), steps=1).groups
    counts = [round(share * (len(units) - 1)) for share in SHARES]
    rows = [_row(model, units[:count], images, labels, repeats) for count in counts]
    return {"batch": batch, "units": len(units), "rows": rows}


def _row(model: nn.Module, frozen: list[str], images: Tensor, labels: Tensor, repeats: int) -> dict[str, Any]:
    plain, partly = copy.deepcopy(model), copy.deepcopy(model)
    schedule = dict.fromkeys(frozen, 0.0)
    batch = len(images) // STEPS
    with nk.FreezeTraining(partly, schedule, steps=1) if schedule else nullcontext():
        steps = [partial(_train, each, images, labels) for each in (plain, partly)]
        before, after = (kept_bytes(each.train(), images[:batch], labels[:batch]) for each in (plain, partly))
        first, then = (operations(step) for step in steps)
        row = {"frozen": len(frozen), "kept_bytes": after, "kept": after / before, "operations": then / first}
        row |= ratio(steps[1], steps[0], repeats)
        if images.is_cuda:
            row["peak"] = _peak(steps[1]) / _peak(steps[0])
    return row


def _train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    recipe = nk.Recipe(epochs=1, batch=len(images) // STEPS, lr=1e-3, weight_decay=5e-4, order="given")
    nk.train(model, (images, labels), recipe, progress=False)


def operations(step: Callable[[], None]) -> int:
    """Return how many floating-point operations a step takes in products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def kept_bytes(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Return how much autograd keeps between the forward and the backward pass, the model's own tensors aside."""
    own = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers(), images]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(model(images), labels)
    total = sum(kept.values())
    loss.backward()
    model.zero_grad()
    return total


def _peak(step: Callable[[], None]) -> int:
    """Return the most memory that a step takes on the GPU beside what is there anyway."""
    torch.cuda.reset_peak_memory_stats()
    there = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - there


def table(figures: dict[str, Any]) -> list[str]:
    """Return the lines of a table of `freezing` figures by network."""
    on_gpu = any("peak" in row for figure in figures.values() for row in figure["rows"])
    columns = ["network", "frozen groups", "time of a step", "kept for the backward pass", "operations"]
    columns += ["peak memory of a step"] if on_gpu else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, figure in figures.items():
        for row in figure["rows"]:
            cells = [f"`{name}`, batch {figure['batch']}", f"{row['frozen']} of {figure['units']}"]
            cells += [f"{row[key]:.2f}" for key in ("ratio", "kept", "operations", "peak") if key in row]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
