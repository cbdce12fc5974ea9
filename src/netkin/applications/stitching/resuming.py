"""Resuming: where a training stands, in a file from which it goes on as if it had never stopped.

The order of the examples is a function of seed and epoch, so that beside the numbers the step is all there is to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from netkin import files
from netkin.applications.stitching.records import Record
from netkin.errors import FileFault
from netkin.files import Location

KIND = "task_loss"
Weights = dict[str, Tensor]


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


@dataclass(frozen=True)
class Identity:
    """Which training it is: the options on which its course depends, and the marks of models, layers and data."""

    options: dict[str, Any]
    subjects: dict[str, str]


def write(path: Location, standing: Standing, identity: Identity) -> None:
    """Write where a training stands; the file appears whole or not at all."""
    header = {
        "options": identity.options,
        "subjects": identity.subjects,
        "step": standing.step,
        "best_step": standing.best_step,
        "waited": standing.waited,
        "history": standing.history,
    }
    groups = {"first": standing.first, "now": standing.now, "best": standing.best, "adam": standing.adam}
    arrays = {f"{group}/{name}": _array(tensor) for group, own in groups.items() for name, tensor in own.items()}
    files.write(path, KIND, header, arrays)


def read(path: Location, identity: Identity, first: Weights) -> Standing | None:
    """Return where a training stood, or None where there is no file; that of another training is refused."""
    if not Path(path).exists():
        return None
    header, arrays = files.read(path, KIND)
    with files.damage_reported(path):
        _refuse_other_options(path, header["options"], identity.options)
        _refuse_other_subjects(path, header["subjects"], identity.subjects)
        groups: dict[str, dict[str, Tensor]] = {"first": {}, "now": {}, "best": {}, "adam": {}}
        for key, array in arrays.items():
            group, _, name = key.partition("/")
            groups[group][name] = torch.from_numpy(array.copy())
        rest: dict[str, Any] = {key: header[key] for key in ("step", "best_step", "waited", "history")}
    _refuse_other_start(path, groups["first"], first)
    return Standing(groups["first"], groups["now"], groups["best"], adam=groups["adam"], **rest)


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


def _refuse_other_options(path: Location, held: dict[str, Any], options: dict[str, Any]) -> None:
    for name, value in options.items():
        if held.get(name) != value:
            raise FileFault(
                f"{str(path)!r} holds a training with {name}={held.get(name)!r}, not {value!r}; give the same options, "
                "or another file."
            )


def _refuse_other_subjects(path: Location, held: dict[str, str], subjects: dict[str, str]) -> None:
    for name, mark in subjects.items():
        if held.get(name) != mark:
            raise FileFault(
                f"{str(path)!r} holds a training with other {name} ({held.get(name)}, not {mark}); give the same "
                "models, layers and data, or another file."
            )


def _refuse_other_start(path: Location, held: Weights, first: Weights) -> None:
    alike = held.keys() == first.keys() and all(_near(held[name], first[name].cpu()) for name in first)
    if not alike:
        raise FileFault(
            f"{str(path)!r} holds a training that began from another transformation; give the same one, or another "
            "file."
        )


def _near(held: Tensor, first: Tensor) -> bool:
    # solved again on another device a map may differ by rounding
    if held.shape != first.shape:
        return False
    return bool((held.double() - first.double()).norm() <= 1e-2 * first.double().norm().clamp(min=1e-30))
