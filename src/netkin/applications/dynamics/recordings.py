"""Recordings: the probes of a run as texts, numbers and tensors, in a checkpoint or in a file, and back.

`load_recording` opens such a file without the model, and makes series of it by any linear measure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch

from netkin import files
from netkin.applications.dynamics.states import (
    LayerState,
    Moment,
    ProbeExamples,
    comparison,
    reads_states,
    refuse_unfit,
)
from netkin.errors import ValueFault
from netkin.measures.registry import Measure, find
from netkin.progress import ProgressOption, reported
from netkin.results import Series
from netkin.results.records import checked

KIND = "recording"
RecorderState = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """The values of one probe: each layer against itself at the previous probe and, where requested, at the first."""

    step: int
    measure: str
    previous: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, float]:
        """The same numbers by names such as ``svcca/previous/conv1``, as loggers need them."""
        sides = {"previous": self.previous, "first": self.first}
        return {f"{self.measure}/{what}/{layer}": value for what, own in sides.items() for layer, value in own.items()}


@dataclass(frozen=True, eq=False)
class Recording:
    """The probes of a run: each layer at each step, up to a rotation, which is enough for every linear measure.

    `measures` are those that the recorder was made for; `provenance` holds the data and the call.
    """

    moments: Sequence[Moment] = field(repr=False)
    progress: Sequence[Progress] = field(repr=False)
    data: str
    run: str = "run"
    unit: str = "step"
    measures: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which probes were taken."""
        return tuple(moment.step for moment in self.moments)

    def __str__(self) -> str:
        layers = len(self.moments[-1].states) if self.moments else 0
        return (
            f"{self.run}: {len(self.steps)} probes of {layers} layers on {self.data}, {self.unit}s {list(self.steps)}"
        )

    def series(self, measures: Any = None, *, pairs: Any = "all", progress: ProgressOption = None) -> Series:
        """Return every probe against the last one, by the recorder's own measures or others; as of a recorder."""
        found = state_measures(self.measures or "svcca" if measures is None else measures)
        if not self.moments:
            raise ValueFault("no probe has been taken yet; call `recorder.probe(step)` while you train.")
        final, comparisons = self.moments[-1], []
        for moment in reported(self.moments, "measuring", f"{self.unit}s", progress):
            comparisons.append(comparison(moment, final, found, pairs, self.data, self.provenance))
            if moment is not final:
                moment.release()
        return Series(
            run=self.run, steps=self.steps, comparisons=tuple(comparisons), final_step=final.step, unit=self.unit,
            provenance=self.provenance,
        )  # fmt: skip


def state_measures(measures: Any) -> list[Measure]:
    """Return the measures requested, each once, if what a recorder keeps is enough for them."""
    asked = [measures] if isinstance(measures, (str, Measure)) or callable(measures) else measures
    found = list({measure.id: measure for measure in map(find, asked)}.values())
    if not found:
        raise ValueFault("`measures` is empty; name at least one, e.g. 'svcca'.")
    for measure in found:
        refuse_unfit(measure.id, measure.facts.unchanged_by, linear=reads_states(measure))
    return found


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Return the recording that a `DynamicsRecorder` saved at `path`."""
    state = read(path)
    header = state["header"]
    facts = {name: header[name] for name in ("data", "run", "unit", "measures", "provenance") if name in header}
    with files.damage_reported(path):
        moments, progress = _unpacked(state, header.get("unit", "step"))
        return checked(Recording, facts | {"moments": moments, "progress": progress})


def recorded(
    moments: Sequence[Moment],
    progress: Sequence[Progress],
    examples: ProbeExamples,
    about: Mapping[str, Any] | None = None,
) -> RecorderState:
    """Return the probes as a header for JSON and named tensors; `about` is added to the header."""
    header = dict(about or {}) | {
        "data": examples.name,
        "digest": examples.digest,
        "moments": [_described(moment) for moment in moments],
        "progress": [[one.step, one.measure, dict(one.previous), dict(one.first)] for one in progress],
    }
    tensors = {f"{moment.step}/{i}": state.rows for moment in moments for i, state in enumerate(moment.states.values())}
    return {"header": header, "tensors": tensors}


def restored(state: Mapping[str, Any], examples: ProbeExamples, unit: str) -> tuple[list[Moment], list[Progress]]:
    """Return the probes that `recorded` described, if they were taken on the same examples."""
    header = state["header"]
    if len(header["digest"]) != len(examples.digest):
        raise ValueFault(
            "these probes were recorded by an older netkin, which told examples apart in another way; record again."
        )
    if header["digest"] != examples.digest:
        raise ValueFault(
            f"these probes were taken on other examples of {header['data']!r} than those of {examples.name!r} given "
            "now; give the same ones, in the same order."
        )
    return _unpacked(state, unit)


def write(path: str | os.PathLike[str], state: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a recorder's state to one file."""
    arrays = {name: tensor.numpy() for name, tensor in state["tensors"].items()}
    files.write(path, KIND, state["header"], arrays, overwrite=overwrite)


def read(path: str | os.PathLike[str]) -> RecorderState:
    """Return the state that was written to `path`."""
    header, arrays = files.read(path, KIND)
    state = {"header": header, "tensors": {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}}
    with files.damage_reported(path):
        _unpacked(state, "step")
        header["data"], header["digest"]  # are asked for later
    return state


def _unpacked(state: Mapping[str, Any], unit: str) -> tuple[list[Moment], list[Progress]]:
    header, tensors = state["header"], state["tensors"]
    moments = [_moment(checked(_Described, one), tensors, unit) for one in header["moments"]]
    if any(later.step <= earlier.step for earlier, later in pairwise(moments)):
        raise ValueError("its steps do not rise")
    names = [one.name for one in fields(Progress)]
    return moments, [checked(Progress, dict(zip(names, one, strict=True))) for one in header["progress"]]


@dataclass(frozen=True)
class _Described:
    """A moment as the header has it: of each layer name, width, what one example is, any fault, and the resolution."""

    step: int
    examples: int
    layers: tuple[tuple[str, int, str, str] | tuple[str, int, str, str, float], ...]


def _described(moment: Moment) -> dict[str, Any]:
    layers = [[name, state.width, state.shape, state.fault, state.resolution] for name, state in moment.states.items()]
    return {"step": moment.step, "examples": moment.examples, "layers": layers}


def _moment(described: _Described, tensors: Mapping[str, torch.Tensor], unit: str) -> Moment:
    states = {
        name: LayerState(tensors[f"{described.step}/{i}"].cpu(), width, shape, fault, *resolution)
        for i, (name, width, shape, fault, *resolution) in enumerate(described.layers)
    }
    for name, state in states.items():
        if state.rows.ndim != 2 or not state.rows.is_floating_point() or not (state.rows.numel() or state.fault):
            raise ValueError(f"layer {name!r} has no matrix of rows")
    return Moment(described.step, unit, states, described.examples)
