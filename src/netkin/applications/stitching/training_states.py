"""Standings: where a training is, kept as a part of a job, from which it goes on as if it had never stopped.

The order of the examples is a function of seed and epoch, so that beside the numbers the step is all there is to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from netkin import files
from netkin.applications.stitching.stitch_records import Record
from netkin.errors import FileFault
from netkin.jobs import Job

Weights = dict[str, Tensor]
Place = tuple[Job, str]  # a job, and the name of its part


@dataclass
class Standing:
    """How far a training has come: its weights at first, now and at their best, and what was recorded."""

    first: Weights
    now: Weights
    best: Weights
    step: int = 0
    best_step: int = 0
    waited: int = 0  # records since the best one
    history: list[Record] = field(default_factory=list)
    adam: dict[str, Tensor] = field(default_factory=dict)


GROUPS, COUNTS = ("first", "now", "best", "adam"), ("step", "best_step", "waited", "history")


def keep_standing(place: Place, standing: Standing) -> None:
    """Keep where a training stands; a request to cancel ends it here."""
    job, name = place
    groups = {group: getattr(standing, group) for group in GROUPS}
    arrays = {f"{group}/{key}": _array(tensor) for group, own in groups.items() for key, tensor in own.items()}
    job.keep(name, {count: getattr(standing, count) for count in COUNTS}, arrays)
    job.check()


def find_standing(place: Place, first: Weights) -> Standing | None:
    """Return where a training stood, or None where it is new; one that began elsewhere than at `first` is refused."""
    job, name = place
    part = job.find(name)
    if part is None:
        return None
    with files.damage_reported(f"{job.folder}: {name}"):
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
        for key, array in part.arrays.items():
            group, _, own = key.partition("/")
            groups[group][own] = torch.from_numpy(array.copy())
        rest: dict[str, Any] = {count: part.values[count] for count in COUNTS}
        standing = Standing(groups["first"], groups["now"], groups["best"], adam=groups["adam"], **rest)
    if standing.first.keys() != first.keys() or not all(_near(standing.first[k], first[k].cpu()) for k in first):
        raise FileFault(
            f"{str(job.folder)!r} holds a training that began from another transformation; give the same one, or "
            "another path."
        )
    return standing


def adam_state(optimizer: Adam) -> dict[str, Tensor]:
    """Return what Adam remembers, by the number of the weight and the name of the quantity."""
    state = optimizer.state_dict()["state"]
    return {f"{number}/{name}": value.detach().clone() for number, own in state.items() for name, value in own.items()}


def load_adam(optimizer: Adam, remembered: dict[str, Tensor]) -> None:
    """Let Adam remember what it did."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in remembered.items():
        number, _, name = key.partition("/")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _near(held: Tensor, first: Tensor) -> bool:
    # solved again on another device a map may differ by rounding
    if held.shape != first.shape:
        return False
    return bool((held.double() - first.double()).norm() <= 1e-2 * first.double().norm().clamp(min=1e-30))
