"""Learning dynamics: how the layers of a model change during training.

`dynamics` compares the checkpoints of a run with the final one, layer by layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netkin import jobs
from netkin.applications.dynamics.recorder import DynamicsRecorder, Progress
from netkin.applications.dynamics.steps import ClusterSteps, Held, between_steps, spare_memory, unpacked_step
from netkin.comparing.compare import compare, explain
from netkin.comparing.engines import Engine, Local, named_engine
from netkin.comparing.engines.ray import Ray
from netkin.comparing.feed import data_name
from netkin.comparing.plan import Plan, weights_alone
from netkin.comparing.sides import ModelInput, ModelSide
from netkin.errors import InvalidValue
from netkin.identity import (
    COMPARE,
    Form,
    described_call,
    form_difference,
    form_of,
    in_words,
    settings_digest,
    state_noted,
    weights_digest,
)
from netkin.jobs import Job
from netkin.measures.registry import Measure, find
from netkin.memory import format_bytes
from netkin.progress import ProgressOption, commanded, reported, showing
from netkin.representations.inputs import Forward, Transform, device_of
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparison, Series
from netkin.results.records import packed
from netkin.settings import random_states_kept
from netkin.sources.runs import Architecture, TrainingRun, open_run

__all__ = ["DynamicsRecorder", "Progress", "RunPlan", "dynamics", "explain_dynamics"]


def dynamics(
    run: Any,
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] = "svcca",
    *,
    model: Architecture | None = None,
    steps: int | Iterable[int] | None = None,
    layers: Spec = None,
    pairs: Any = None,
    shape: Shape | Mapping[str, Shape] = None,
    resize: str | None = None,
    examples: int | None = None,
    memory: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transform: Transform | None = None,
    forward: Forward | None = None,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    partial: bool = False,
    name: str | None = None,
    engine: str | Engine = "local",
    progress: ProgressOption = None,
) -> Series:
    """Return how each layer of a run came to its final state: every checkpoint against the last one.

    All checkpoints are read before the work begins; then each takes one pass. The data and the final model's rows are
    kept in memory, each up to a quarter of what is free, so that the final model runs once on each batch; beyond that
    it runs with every checkpoint. `explain_dynamics` says what a call would do. Measures of weights alone, such as
    `atom_cosine`, need no data; with these every checkpoint is also compared with every other, in the series'
    `between`.

    With `save` the series is written to that file after each step, and the same call continues there, also after the
    process was killed: finished steps lie beside the file, in a folder such as ``run.netkin.job`` (see `netkin.jobs`).
    A file of another run, other data or other options is refused unless `overwrite`, functions being known by their
    code. A step whose weights have changed is compared again. A file that can't be written, as on a full disk, ends
    nothing: an `nk.UnsavedWarning` names it, and the series is returned.

    Args:
        run: a folder, a list of files, or a mapping from steps to files, state dicts or models.
        data: a loader, an iterable of batches or one array of inputs; none for measures of weights alone.
        measures: one measure or several.
        model: the network that bare weights belong to (see `netkin.sources.runs.open_run`).
        steps: the steps to compare, or how many, evenly spread.
        layers: which layers (see `nk.layers`).
        pairs: "all", "corresponding" or a list of (layer, layer); by default all, of weights alone corresponding.
        shape: what one example is (see `nk.shapes`).
        resize: "average" averages the larger of two maps down.
        examples: the number of examples after which a pass ends.
        memory: the most bytes that statistics may take.
        seed: seed of the sample of rows that some measures read.
        device: where the models run.
        transform: a function of the inputs.
        forward: a function ``forward(model, batch)`` that runs the model.
        save: the file that grows with each step, and in which the same call continues.
        overwrite: whether something else in the file is deleted, and the work starts again.
        partial: whether Ctrl-C returns the steps that are finished.
        name: what the series calls the run.
        engine: "local" for this process, "ray" or an `nk.Ray` for a cluster: run, data and functions are then given by
            name, steps that fail are left out with the reason, and the file is written at the end.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> start, end = (nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)) for _ in range(2))
        >>> halfway = nn.Sequential(end[0], end[1], start[2])
        >>> series = dynamics({0: start, 50: halfway, 100: end}, torch.randn(60, 4), "cka")
        >>> series.reached(0.999)
        {'0': 50, '1': 50, '2': None}
    """
    opened = open_run(run, model, name=name).only(steps)
    options = DynamicsOptions.of(measures, layers, pairs, shape, resize, memory, seed, device, transform, forward)
    if isinstance(running := _engine(engine), Ray):
        apart = ClusterSteps(running, opened, data, examples, options)
        with showing(progress):
            return RunStudy(opened, None, options, apart.call).series(save, partial, overwrite, apart)
    data = opened.data(data)
    call = options.call(opened.name, data, examples)
    with showing(progress), random_states_kept(data=[data]):
        held = None if options.of_weights else Held(data, examples, spare_memory(torch.device("cpu")))
        return RunStudy(opened, held, options, call).series(save, partial, overwrite)


@dataclass(frozen=True)
class RunPlan:
    """What `dynamics` would do: the `steps` of the run, the plan of `each` pass, and forward `passes` in all.

    `refused` is the sentence with which a pass would be refused; `passes` is None where the length of the data is
    unknown.
    """

    run: str
    unit: str
    steps: tuple[int, ...]
    each: Plan
    passes: int | None
    lines: tuple[str, ...]

    @property
    def refused(self) -> str:
        return self.each.refused

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain_dynamics(
    run: Any,
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] = "svcca",
    *,
    model: Architecture | None = None,
    steps: int | Iterable[int] | None = None,
    examples: int | None = None,
    name: str | None = None,
    engine: str | Engine = "local",
    **options: Any,
) -> RunPlan:
    """Return what `dynamics` would do with the same arguments, and what that costs; nothing is compared.

    The first and the last checkpoint are read, and a few examples of the first batch are run through each to learn the
    layers; what a pass would then be refused for, over pairs or memory, is in the plan's `refused`.

    Args:
        run: a folder, a list of files, or a mapping from steps to files, state dicts or models.
        data: a loader, a list of batches or one array of inputs; none for measures of weights alone.
        measures: one measure or several.
        model: the network that bare weights belong to.
        steps: the steps to compare, or how many, evenly spread.
        examples: the number of examples after which a pass ends.
        name: what the plan calls the run.
        engine: "local", or "ray" or an `nk.Ray` for a cluster.
        **options: `layers`, `pairs`, `shape`, `resize`, `memory`, `seed`, `device`, `transform` and `forward`.

    Example:
        >>> start, end = (nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)) for _ in range(2))
        >>> plan = explain_dynamics({0: start, 50: end, 100: end}, torch.randn(60, 4), "cka")
        >>> plan.steps, plan.each.pairs, plan.passes
        ((0, 50, 100), 9, 3)
    """
    opened, asked = open_run(run, model, name=name).only(steps), DynamicsOptions.of(measures, **options)
    count, running = len(opened.steps), _engine(engine)
    apart = ClusterSteps(running, opened, data, examples, asked) if isinstance(running, Ray) else None
    each = asked.plan(opened, opened.data(data), examples) if apart is None else apart.explain()
    # half of these passes are the final model's, which runs once on each batch, or in each worker, if its rows are kept
    finals = 0 if apart is None else min(count, apart.slots) - 1
    passes = each.passes and each.passes * (count + finals) // 2
    lines = [*_plan_lines(opened, each, passes), *([] if apart is None else apart.lines(each))]
    return RunPlan(opened.name, opened.unit, opened.steps, each, passes, tuple(lines))


def _engine(engine: str | Engine) -> Engine:
    running = named_engine(engine) if engine != "distributed" else None
    if not isinstance(running, (Local, Ray)):
        raise InvalidValue("`dynamics` takes engine='local' or engine='ray', and not 'distributed'.", argument="engine")
    return running


def _plan_lines(run: TrainingRun, each: Plan, passes: int | None) -> Iterator[str]:
    count, last = len(run.steps), run.steps[-1]
    yield f"run {run.name!r}: {count} checkpoints, {run.unit}s {run.steps[0]:,} to {last:,}"
    if run.passed_over:
        yield f"  passed over: {', '.join(run.passed_over)}"
    yield f"comparisons: {count}, of each checkpoint with {run.unit} {last:,}; each of them:"
    yield from (f"  {line}" for line in each.lines)
    if each.passes == 0:
        yield "forward passes in all: none"
        return
    total = "not known before the data are read" if passes is None else f"{passes:,}"
    room = format_bytes(spare_memory(torch.device("cpu")))
    once = f"once on each batch, if the data and its rows take at most {room} each, else with every checkpoint"
    yield f"forward passes in all: {total}; the final model runs {once}"


@dataclass(frozen=True)
class DynamicsOptions:
    """The options for every step."""

    measures: list[Measure]
    transform: Transform | None
    others: dict[str, Any]  # by their names in `compare`

    @classmethod
    def of(
        cls, measures: Any, layers: Spec = None, pairs: Any = None, shape: Any = None, resize: str | None = None,
        memory: int | None = None, seed: int = 0, device: Any = None, transform: Any = None, forward: Any = None,
    ) -> DynamicsOptions:  # fmt: skip
        chosen = layers if layers is None or isinstance(layers, (str, type)) else list(layers)
        found = [find(one) for one in ([measures] if isinstance(measures, str) or callable(measures) else measures)]
        pairs = pairs or ("corresponding" if weights_alone(found) else "all")
        how = {"layers": chosen, "shape": shape, "forward": forward, "device": device, "memory": memory, "seed": seed}
        return cls(found, transform, how | {"pairs": pairs, "resize": resize})

    @property
    def of_weights(self) -> bool:
        """Whether weights alone are read, and no data."""
        return weights_alone(self.measures)

    def plan(self, run: TrainingRun, data: Any, examples: int | None) -> Plan:
        """Return the plan of comparing the first checkpoint with the final one."""
        first, last = run.steps[0], run.steps[-1]
        return explain(
            run.at(first), run.final, data, self.measures, examples=examples, transforms=self.transform,
            names=(f"{run.unit} {first}", f"{run.unit} {last}"), **self.others,
        )  # fmt: skip

    def call(self, run: str, data: Any, examples: int | None) -> str:
        """Return the call as text, for the provenance."""
        others = self.others
        source = {} if self.of_weights else {"data": data_name(data)}
        return described_call(
            "nk.dynamics", run=run, **source, measures=[one.id for one in self.measures], layers=others["layers"],
            pairs=others["pairs"], shape=others["shape"], resize=others["resize"], examples=examples,
            seed=others["seed"], transform=self.transform, forward=others["forward"],
        )  # fmt: skip

    @property
    def words(self) -> dict[str, str]:
        """What changes the numbers, as text; functions by their names and digests."""
        changing = {key: value for key, value in self.others.items() if key not in ("memory", "device")}
        facts = {key: in_words(value) for key, value in changing.items()} | {"transform": in_words(self.transform)}
        facts |= {"measures": ", ".join(measure.id for measure in self.measures)}
        return facts | {"measures digest": settings_digest([measure.function for measure in self.measures])}


class RunStudy:
    """One run on one set of data."""

    def __init__(self, run: TrainingRun, data: Held | None, options: DynamicsOptions, call: str, sharers: int = 1):
        self.run, self.data, self.options, self.call = run, data, options, call
        self.sharers = sharers  # how many processes like this one share the memory
        self.done: dict[int, Comparison] = {}
        self.failed: Mapping[int, str] = {}
        self.weights: dict[int, str] = {}
        self.forms: dict[int, str] = {}  # what each network is beside its weights, as JSON

    def series(
        self, save: str | os.PathLike[str] | None, partial: bool, overwrite: bool, apart: ClusterSteps | None = None
    ) -> Series:
        """Return the finished series; with `partial` also an unfinished one, if Ctrl-C ends the work."""
        if apart is not None:
            self._look_apart(apart, partial)
        else:  # every checkpoint is read once, so that one that is damaged or differs is named before the work
            looking = reported(self.run.steps, "looking at checkpoints", "files")
            for step in looking:
                self.identify(step)
        jobs.refuse_output(save, overwrite=overwrite)
        identity: dict[str, Any] = {}
        if save is not None:
            identity = {key.removeprefix("asked "): text for key, text in self.question.items()}
            identity["measures"] += f"; digest {identity.pop('measures digest')}"
            last = self.run.steps[-1]
            identity["architecture"] = {str(last): Form.from_json(self.forms[last]).to_dict()}
        job = Job.beside(save, "series", identity, call=self.call, overwrite=overwrite, compare=COMPARE)
        final = {str(step): model for step, model in self._live.items() if step == self.run.steps[-1]}
        with commanded(self.call), job, state_noted(job, final):
            job.expect(map(self._part, self.weights))
            try:
                waiting = self._waiting(job)
                if apart is None:
                    self._compare_all(job, waiting)
                else:
                    self.done |= apart.compare(job, {step: self._part(step) for step in waiting})
                    job.expect(map(self._part, self.done))
                    job.save(self._so_far)
            except KeyboardInterrupt:
                if not partial or not self.done:
                    raise
        return self._so_far()

    def identify(self, step: int) -> None:
        """Read a checkpoint for what identifies it."""
        model = self.run.at(step)
        self.weights[step], self.forms[step] = weights_digest(model), form_of(model).to_json()

    def _waiting(self, job: Job) -> list[int]:
        """Take the steps that are finished, and return the others.

        The final one comes first: no series is without it, and its rows are there for all others.
        """
        for step in self.weights:
            found = job.recall(self._part(step), lambda part: unpacked_step(part.values, part.arrays))
            if found is not None and not form_difference(found[0], Form.from_json(self.forms[step])):
                self.done[step] = found[1]
        return [step for step in (self.run.steps[-1], *self.run.steps[:-1]) if step in self.weights.keys() - self.done]

    def _compare_all(self, job: Job, waiting: Sequence[int]) -> None:
        """Compare the steps that are not finished, and write the series after each."""
        for step in reported(waiting, "comparing", f"{self.run.unit}s"):
            job.check()
            self.done[step] = self.compared(step)
            (values, arrays), form = packed(self.done[step]), Form.from_json(self.forms[step])
            form = form.after(self._live[step]) if step in self._live else form
            job.keep(self._part(step), {**values, "form": form.to_json()}, arrays)
            job.save(self._so_far)
        if not waiting:
            job.save(self._so_far)

    def _look_apart(self, apart: ClusterSteps, partial: bool) -> None:
        """Let a cluster read the checkpoints; those that can't be read are left out."""
        if partial:
            raise InvalidValue(
                "`partial` is for one process; with `save` the same call continues on the cluster.", argument="partial"
            )
        apart.connect()
        (self.weights, self.forms, self.question), self.failed = apart.inspect(), apart.failed

    @cached_property
    def _between(self) -> Comparison | None:
        """Every step against every other, layer by layer, by those measures that weights alone are read for."""
        measures = [measure for measure in self.options.measures if weights_alone([measure])]
        return between_steps(self.run, measures, self.done[self.run.steps[-1]]) if measures else None

    @property
    def _live(self) -> dict[int, nn.Module]:
        """The models that were given as such, which running may change."""
        return {one.step: one.source for one in self.run.checkpoints if isinstance(one.source, nn.Module)}

    def _part(self, step: int) -> str:
        return f"{self.run.unit} {step}, weights {self.weights[step]}"

    @cached_property
    def _final(self) -> nn.Module | ModelSide:
        """The final model, whose rows are kept where the batches are the same in each pass."""
        model, others = self.run.final, self.options.others
        if self.data is None or not self.data.is_held:
            return model
        source = ModelInput(
            model, layers=others["layers"], shape=others["shape"], forward=others["forward"],
            transform=self.options.transform, device=others["device"],
        )  # fmt: skip
        room = spare_memory(torch.device(others["device"] or device_of(model))) // self.sharers
        return ModelSide(f"{self.run.unit} {self.run.steps[-1]}", source, keep=room)

    def compared(self, step: int) -> Comparison:
        """Return the comparison of a step with the final one."""
        last = self.run.steps[-1]
        a: Any = self._final if step == last else self.run.at(step)
        b: Any = None if step == last else self._final
        names = (f"{self.run.unit} {step}", f"{self.run.unit} {last}")
        how: dict[str, Any] = self.options.others | {"transforms": self.options.transform, "names": names}
        found = compare(a, b, self.data, self.options.measures, **how)
        source = next(checkpoint.source for checkpoint in self.run.checkpoints if checkpoint.step == step)
        read = str(source) if isinstance(source, Path) else type(source).__name__
        own = {"checkpoint a": read, "weights a": self.weights[step]}
        return replace(found, provenance=dict(found.provenance) | own)

    @cached_property
    def question(self) -> dict[str, str]:
        """What the numbers of all steps depend on."""
        last = self.run.steps[-1]
        # where nothing is continued the final step's own pass has the digest: no need to read the data again
        seen = self.done[last].provenance.get("data digest") if last in self.done else None
        own = {"final weights": self.weights[last], "architecture": str(Form.from_json(self.forms[last]))}
        if self.data is not None:
            own |= {"data digest": seen or self.data.digest, "asked examples": str(self.data.asked)}
        return {f"asked {key}": value for key, value in self.options.words.items()} | own

    def _so_far(self) -> Series:
        passed_over = {"passed over": ", ".join(self.run.passed_over)} if self.run.passed_over else {}
        failed = {f"failed {self.run.unit} {step}": why for step, why in sorted(self.failed.items())}
        steps = sorted(self.done)
        return Series(
            run=self.run.name,
            steps=tuple(steps),
            comparisons=tuple(self.done[step] for step in steps),
            final_step=self.run.steps[-1],
            unit=self.run.unit,
            missing=tuple(step for step in self.run.steps if step not in self.done),
            between=self._between if len(self.done) == len(self.run.steps) else None,
            provenance={"call": self.call} | self.question | passed_over | failed,
        )
