"""Recordings: the probes of a run as texts, numbers and tensors, in a checkpoint or in a file, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from netkin import files
from netkin.applications.dynamics.probing import Examples
from netkin.applications.dynamics.standing import Moment
from netkin.applications.dynamics.states import LayerState
from netkin.errors import ValueFault

KIND = "recording"
State = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """One probe's news: each layer against itself at the previous probe and, where asked for, at the first."""

    step: int
    measure: str
    previous: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, float]:
        """The same numbers by names such as ``svcca/previous/conv1``, as loggers want them."""
        sides = {"previous": self.previous, "first": self.first}
        return {f"{self.measure}/{what}/{layer}": value for what, own in sides.items() for layer, value in own.items()}


def recorded(moments: Sequence[Moment], progress: Sequence[Progress], examples: Examples) -> State:
    """Return the probes as a header fit for JSON and named tensors."""
    header = {
        "data": examples.name,
        "digest": examples.digest,
        "moments": [_described(moment) for moment in moments],
        "progress": [[one.step, one.measure, dict(one.previous), dict(one.first)] for one in progress],
    }
    tensors = {f"{moment.step}/{i}": state.rows for moment in moments for i, state in enumerate(moment.states.values())}
    return {"header": header, "tensors": tensors}


def restored(state: Mapping[str, Any], examples: Examples, unit: str) -> tuple[list[Moment], list[Progress]]:
    """Return the probes that `recorded` described, if they were taken on the same examples."""
    header = state["header"]
    if len(header["digest"]) != len(examples.digest):
        raise ValueFault(
            "these probes were recorded by an older netkin, which told examples apart in another way; record anew."
        )
    if header["digest"] != examples.digest:
        raise ValueFault(
            f"these probes were taken on other examples of {header['data']!r} than those of {examples.name!r} given "
            "now; give the same ones, in the same order."
        )
    return _unpacked(state, unit)


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a recorder's state to one file."""
    files.write(path, KIND, state["header"], {name: tensor.numpy() for name, tensor in state["tensors"].items()})


def read(path: str | os.PathLike[str]) -> State:
    """Return the state that was written to `path`."""
    header, arrays = files.read(path, KIND)
    state = {"header": header, "tensors": {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}}
    with files.damage_reported(path):
        _unpacked(state, "step")
        header["data"], header["digest"]  # are asked for later
    return state


def _unpacked(state: Mapping[str, Any], unit: str) -> tuple[list[Moment], list[Progress]]:
    header, tensors = state["header"], state["tensors"]
    moments = [_moment(one, tensors, unit) for one in header["moments"]]
    return moments, [Progress(*one) for one in header["progress"]]


def _described(moment: Moment) -> dict[str, Any]:
    layers = [[name, state.width, state.shape, state.fault] for name, state in moment.states.items()]
    return {"step": moment.step, "examples": moment.examples, "layers": layers}


def _moment(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], unit: str) -> Moment:
    states = {
        name: LayerState(tensors[f"{header['step']}/{i}"].cpu(), width, shape, fault)
        for i, (name, width, shape, fault) in enumerate(header["layers"])
    }
    return Moment(header["step"], unit, states, header["examples"])
