"""`DynamicsRecorder`: how a model's layers change during training, recorded without saving checkpoints.

Its probes are kept in a checkpoint or in a file; `load_recording` opens such a file without the model, and makes series
of it by any linear measure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from netkin import files
from netkin.applications.dynamics.states import (
    DescribedMoment,
    LayerState,
    Moment,
    Probe,
    ProbeExamples,
    between,
    comparison,
    described_moment,
    is_first_process,
    moment_from,
    rank,
    state_measures,
)
from netkin.errors import ForwardError, InvalidValue, require_at_least
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.progress import ProgressOption, with_progress
from netkin.representations.inputs import Forward, Transform
from netkin.representations.layers import Spec, unwrapped
from netkin.representations.shapes import Shape
from netkin.results import Series
from netkin.results.records import as_record
from netkin.sources.names import by_name

Log = Callable[[int, dict[str, float]], Any]


class DynamicsRecorder:
    """Records a model's layers on the same few examples at intervals during training.

    Call `probe(step)` in the training loop, once an epoch for example; with `every` only multiples of it count. What is
    kept of a layer is no more than n · min(n, d) numbers for n examples and d features (see `states`), enough for every
    linear measure unchanged by rotation, so that `series` accepts other measures than `measures`, too.

    `probe` is an array, a batch or anything that `nk.activations` takes; its first `examples` are read once and kept.
    `measures` is one or several; the first is logged while training, each layer against its previous probe and, with
    ``first=True``, against its first. `log` is a function ``log(step, {name: value})`` or several. `forward` and
    `transform` are as in `nk.activations`.

    Under DistributedDataParallel every process may call everything; only the one of rank 0 does the work.

    Args:
        model: the model that is trained.
        probe: the examples on which it is probed.
        layers: which layers (see `nk.layers`).
        measures: one measure or several.
        shape: what one example is (see `nk.shapes`).
        every: a number of steps, of which only multiples count.
        examples: how many examples of `probe` are kept; None for all.
        batch: how many of them run at a time.
        first: whether layers are also measured against their first probe.
        log: one or several functions ``log(step, {name: value})``.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs.
        run: what the series calls the run.
        unit: what a step is, as epoch.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 8)
        >>> recorder = DynamicsRecorder(model, torch.randn(32, 4), measures="cka")
        >>> for epoch in range(3):
        ...     _ = nn.init.normal_(model.weight)  # in place of an epoch of training
        ...     news = recorder.probe(epoch)
        >>> recorder.series().steps
        (0, 1, 2)
    """

    @by_name(data="probe")
    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        *,
        layers: Spec = None,
        measures: str | Callable[..., Any] | Sequence[Any] = "svcca",
        shape: Shape | Mapping[str, Shape] = None,
        every: int | None = None,
        examples: int | None = 512,
        batch: int = 512,
        first: bool = False,
        log: Log | Iterable[Log] = (),
        forward: Forward | None = None,
        transform: Transform | None = None,
        run: str = "run",
        unit: str = "step",
    ):
        require_at_least(1, batch=batch, **({} if every is None else {"every": every}))
        if "dft" in (shape.values() if isinstance(shape, Mapping) else [shape]):
            raise InvalidValue(
                "a recorder keeps rows, and shape 'dft' has a block for each frequency; save checkpoints and use "
                "`nk.dynamics`."
            )
        self.measures, self.run, self.unit = state_measures(measures), run, unit
        self.every, self.first = every, first
        self.logs: list[Log] = [log] if callable(log) else list(log)
        self._probe = Probe(model, layers, shape, forward, transform)
        self._examples = ProbeExamples(probe, examples, batch) if is_first_process() else None
        self._moments: list[Moment] = []
        self._progress: list[Progress] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which probes were taken."""
        return tuple(moment.step for moment in self._moments)

    @property
    def progress(self) -> tuple[Progress, ...]:
        """What changed at every probe so far."""
        return tuple(self._progress)

    @property
    def memory(self) -> int:
        """The bytes that all probes so far take."""
        return sum(state.bytes for moment in self._moments for state in moment.states.values())

    @property
    def memory_per_probe(self) -> int:
        """The bytes that one probe takes, at most; a few examples are run to learn it before the first probe."""
        if self._moments:
            return max(sum(state.bytes for state in moment.states.values()) for moment in self._moments)
        return self._probe.bytes(self._kept_examples())

    def probe(self, step: int, *, anyway: bool = False) -> Progress | None:
        """Probe the model now; None where `step` is no multiple of `every`, unless `anyway`, or in other processes.

        The model is left as it was found: training mode, hooks, buffers and random states, also after an exception.
        """
        if not is_first_process() or not (anyway or self.every is None or step % self.every == 0):
            return None
        self._require_later_step(step)
        examples = self._kept_examples()
        states = self._probe.states(examples)
        self._require_same_layers(step, states)
        count = examples.count or min(len(state.rows) for state in states.values())
        self._moments.append(Moment(step, self.unit, states, count))
        self._progress.append(self._news())
        if self._progress[-1].scalars:
            for log in self.logs:
                log(step, self._progress[-1].scalars)
        return self._progress[-1]

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Be a hook of `nk.train`: probe the model before its first step."""
        if not self._moments:
            self.probe(0, anyway=True)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Be a hook of `nk.train`: probe where `every` counts steps and it is time."""
        if self.every is not None:
            self.probe(step)

    def after_epoch(self, model: nn.Module, record: Mapping[str, Any]) -> None:
        """Be a hook of `nk.train`: probe after each epoch, unless `every` counts steps."""
        if self.every is None:
            self.probe(record["step"])

    def series(self, measures: Any = None, *, pairs: Any = "all", progress: ProgressOption = None) -> Series:
        """Return every probe against the last one, by the recorder's own measures or others.

        `pairs` is "all", "corresponding" or a list of (layer, layer), as in `nk.compare`; `progress` is None (a bar in
        a terminal), False or a function of (done, total, what).
        """
        found = self.measures if measures is None else state_measures(measures)
        name, origin = self._kept_examples().name, self._provenance() if self._moments else {}
        held = Recording(self._moments, self._progress, name, self.run, self.unit, provenance=origin)
        return held.series(found, pairs=pairs, progress=progress)

    def forget(self, after: int) -> None:
        """Delete the probes after step `after`, as when training goes back to an older checkpoint."""
        self._moments = [moment for moment in self._moments if moment.step <= after]
        self._progress = [news for news in self._progress if news.step <= after]

    def finish(self) -> None:
        """End the recording: logs with a method `finish` draw or store the series now."""
        for log in self.logs if is_first_process() and self._moments else ():
            if hasattr(log, "finish"):
                log.finish(self)

    def state_dict(self) -> dict[str, Any]:
        """Return all probes as texts, numbers and tensors, fit for a checkpoint; empty in other processes."""
        return recorded(self._moments, self._progress, self._kept_examples()) if is_first_process() else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with the same examples; what was recorded here is forgotten."""
        if is_first_process() and state:
            self._moments, self._progress = restored(state, self._kept_examples(), self.unit)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all probes to one file, at once or not at all; other processes write nothing.

        A file that is there is written over only with `overwrite`. `nk.load` opens it without the model.
        """
        if is_first_process():
            about: dict[str, Any] = {"run": self.run, "unit": self.unit, "provenance": self._provenance()}
            about["measures"] = [measure.id for measure in self.measures]
            state = recorded(self._moments, self._progress, self._kept_examples(), about)
            arrays = {name: tensor.numpy() for name, tensor in state["tensors"].items()}
            files.write(path, KIND, state["header"], arrays, overwrite=overwrite)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from the probes that were saved at `path`, taken on the same examples."""
        if is_first_process():
            self.load_state_dict(read(path))

    def _news(self) -> Progress:
        """Return what the newest probe tells, and keep no decompositions but those of the probes still needed."""
        *earlier, newest = self._moments
        measure = self.measures[0]
        previous = between(earlier[-1], newest, measure) if earlier else {}
        first = between(earlier[0], newest, measure) if earlier and self.first else {}
        for moment in earlier:
            moment.clear_cache()
        return Progress(newest.step, measure.id, previous, first)

    def _provenance(self) -> dict[str, str]:
        model, examples = unwrapped(self._probe.model), self._kept_examples()
        asked = {"run": self.run, "measure": [measure.id for measure in self.measures], **self._probe.settings}
        return {
            "model": type(model).__name__,
            "statistic": "rows up to a rotation, kept by a recorder",
            "products": "float64",
            "final weights": weights_digest(model),
            "data digest": examples.digest,
            "settings digest": settings_digest(asked),
            "call": described_call("nk.DynamicsRecorder", model=model, probe=examples.name, **asked),
        }

    def _kept_examples(self) -> ProbeExamples:
        if self._examples is None:
            raise InvalidValue(f"only the process of rank 0 keeps probes; this is rank {rank()}.")
        return self._examples

    def _require_later_step(self, step: int) -> None:
        if self._moments and step <= self.steps[-1]:
            raise InvalidValue(
                f"the last probe was taken at {self.unit} {self.steps[-1]}, and {self.unit} {step} is not after it; "
                f"`recorder.forget(after={step - 1})` goes back."
            )

    def _require_same_layers(self, step: int, states: Mapping[str, LayerState]) -> None:
        before = self._moments[-1].states if self._moments else states
        changed = [name for name in {**before, **states} if (name in before) != (name in states)]
        if changed:
            raise ForwardError(
                f"layer {changed[0]!r} was recorded at only one of the {self.unit}s {self.steps[-1]} and {step}; "
                "choose `layers` that run at every probe, and the same when you go on from a file."
            )
        for name, state in states.items():
            if state.shape != before[name].shape:
                raise InvalidValue(
                    f"layer {name!r} was recorded with shape {before[name].shape!r} and now has {state.shape!r}; "
                    "go on with the same `shape`."
                )


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
            raise InvalidValue("no probe has been taken yet; call `recorder.probe(step)` while you train.")
        final, comparisons = self.moments[-1], []
        for moment in with_progress(self.moments, "measuring", f"{self.unit}s", progress):
            comparisons.append(comparison(moment, final, found, pairs, self.data, self.provenance))
            if moment is not final:
                moment.clear_cache()
        return Series(
            run=self.run, steps=self.steps, comparisons=tuple(comparisons), final_step=final.step, unit=self.unit,
            provenance=self.provenance,
        )  # fmt: skip


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Return the recording that a `DynamicsRecorder` saved at `path`."""
    state = read(path)
    header = state["header"]
    facts = {name: header[name] for name in ("data", "run", "unit", "measures", "provenance") if name in header}
    with files.damage_reported(path):
        moments, progress = _unpacked(state, header.get("unit", "step"))
        return as_record(Recording, facts | {"moments": moments, "progress": progress})


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
        "moments": [described_moment(moment) for moment in moments],
        "progress": [[one.step, one.measure, dict(one.previous), dict(one.first)] for one in progress],
    }
    tensors = {f"{moment.step}/{i}": state.rows for moment in moments for i, state in enumerate(moment.states.values())}
    return {"header": header, "tensors": tensors}


def restored(state: Mapping[str, Any], examples: ProbeExamples, unit: str) -> tuple[list[Moment], list[Progress]]:
    """Return the probes that `recorded` described, if they were taken on the same examples."""
    header = state["header"]
    if header["digest"] != examples.digest:
        raise InvalidValue(
            f"these probes were taken on other examples of {header['data']!r} than those of {examples.name!r} given "
            "now; give the same ones, in the same order."
        )
    return _unpacked(state, unit)


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
    moments = [moment_from(as_record(DescribedMoment, one), tensors, unit) for one in header["moments"]]
    if any(later.step <= earlier.step for earlier, later in pairwise(moments)):
        raise ValueError("its steps do not rise")
    names = [one.name for one in fields(Progress)]
    return moments, [as_record(Progress, dict(zip(names, one, strict=True))) for one in header["progress"]]
