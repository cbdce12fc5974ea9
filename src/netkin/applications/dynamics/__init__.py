"""Learning dynamics: how the layers of a model change during training.

`dynamics` compares the checkpoints of a run with the final one, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from netkin.applications.dynamics.recorder import DynamicsRecorder, Progress
from netkin.applications.dynamics.steps import ClusterSteps, Held, between_steps, spare_memory, unpacked_step
from netkin.applications.experiment import DECLARED as OF_EXPERIMENT
from netkin.applications.experiment import Experiment, ExperimentOptions
from netkin.comparing.compare import call_of
from netkin.comparing.comparer import measures_of
from netkin.comparing.engines import Engine, Local, named_engine
from netkin.comparing.engines.ray import Ray
from netkin.comparing.feed import data_name
from netkin.comparing.plan import Plan, weights_alone
from netkin.comparing.sides import ModelInput, ModelSide
from netkin.comparing.spec import DECLARED as OF_SPEC
from netkin.comparing.spec import Measures, Run, Spec, takes_options
from netkin.errors import InvalidValue
from netkin.identity import Form, described_call, form_difference, form_of, in_words, settings_digest, weights_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.memory import format_bytes
from netkin.progress import as_command, with_progress
from netkin.representations.inputs import device_of
from netkin.representations.layers import Spec as Layers
from netkin.representations.shapes import Shape
from netkin.results import Comparison, Series
from netkin.results.records import packed
from netkin.sources.runs import Architecture, TrainingRun, open_run
from netkin.training.work_plan import Planning, planned

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DynamicsRecorder", "Progress", "RunPlan", "dynamics", "explain_dynamics"]

OF_SPEC_HERE = ("layers", "shape", "resize", "memory")
DECLARED = {**OF_EXPERIMENT, **{name: OF_SPEC[name] for name in (*OF_SPEC_HERE, "examples", "seed")}}


class DynamicsOptions(ExperimentOptions, total=False):
    """The declared keywords of `dynamics`, for type checkers."""

    layers: Layers
    shape: Shape | Mapping[str, Shape]
    resize: str | None
    memory: float | None


@planned
@takes_options(without="test", declared=DECLARED)
def dynamics(
    run: Any,
    data: Any = None,
    measures: Measures = "svcca",
    *,
    model: Architecture | None = None,
    steps: int | Iterable[int] | None = None,
    pairs: Any = None,
    name: str | None = None,
    engine: str | Engine = "local",
    **options: Unpack[DynamicsOptions],
) -> Planning[RunPlan, Series]:
    """Return how each layer of a run came to its final state: every checkpoint against the last one.

    All checkpoints are read before the work begins; then each takes one pass. The data and the final model's rows are
    kept in memory, each up to a quarter of what is free, so that the final model runs once on each batch; beyond that
    it runs with every checkpoint. `explain_dynamics` says what a call would do. Measures of weights alone, such as
    `atom_cosine`, need no data; with these every checkpoint is also compared with every other, in the series'
    `between`.

    With `save` the series is written to that file after each step, and the same call continues there, also after the
    process was killed: finished steps lie beside the file, in a folder such as ``run.netkin.job`` (see `netkin.jobs`).
    A file of another run, other data or other options is refused unless `overwrite`; functions are identified by their
    source code. A step whose weights have changed is compared again. A file that can't be written, as on a full disk,
    does not stop the work: an `nk.UnsavedWarning` names it, and the series is returned.

    Args:
        run: a folder, a list of files, or a mapping from steps to files, state dicts or models.
        data: a loader, an iterable of batches or one array of inputs; none for measures of weights alone.
        measures: one measure or several.
        model: the network that bare weights belong to (see `netkin.sources.runs.open_run`).
        steps: the steps to compare, or how many, evenly spread.
        pairs: "all", "corresponding" or a list of (layer, layer); by default all, of weights alone corresponding.
        name: what the series calls the run.
        engine: "local" for this process, "ray" or an `nk.Ray` for a cluster: run, data and functions are then given by
            name, steps that fail are left out with the reason, and the file is written at the end.

    Example:
        >>> start, end = (nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)) for _ in range(2))
        >>> halfway = nn.Sequential(end[0], end[1], start[2])
        >>> series = dynamics({0: start, 50: halfway, 100: end}, torch.randn(60, 4), "cka")
        >>> series.reached(0.999)
        {'0': 50, '1': 50, '2': None}
    """
    study, experiment = _study(open_run(run, model, name=name).only(steps), data, measures, pairs, options)
    running = _engine(engine)
    yield lambda: _plan(study, data, experiment, running)
    if isinstance(running, Ray):
        apart = ClusterSteps(running, study, data, experiment.examples)
        with experiment.lending():
            return study.series(experiment, apart.call, apart)
    data = study.run.data(data)
    with experiment.lending(data=(data,)):
        if not study.of_weights:
            study.data = Held(data, experiment.examples, spare_memory(torch.device("cpu")))
        return study.series(experiment, study.call(data, experiment.examples))


def _study(
    run: TrainingRun, data: Any, measures: Any, pairs: Any, options: Mapping[str, Any]
) -> tuple[RunStudy, Experiment]:
    """Return how the steps of a run are compared, and with which models and data that is done where."""
    of_spec: dict[str, Any] = {name: options[name] for name in OF_SPEC_HERE if name in options}
    others: Any = {name: value for name, value in options.items() if name not in of_spec}
    if isinstance(of_spec.get("layers"), Iterator):
        of_spec["layers"] = list(of_spec["layers"])  # every step chooses among its own
    models: dict[str, Any] = {str(checkpoint.step): checkpoint.source for checkpoint in run.checkpoints}
    experiment, found = Experiment(models=models, data=data, **others), measures_of(measures)
    spec = Spec(
        found, pairs=pairs or ("corresponding" if weights_alone(found) else "all"), seed=experiment.seed,
        transforms=experiment.transform, forward=experiment.forward, **of_spec,
    )  # fmt: skip
    return RunStudy(run, spec, experiment.device), experiment


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


explain_dynamics = dynamics.explain


def _plan(study: RunStudy, data: Any, experiment: Experiment, running: Local | Ray) -> RunPlan:
    """Return the plan: the first and the last checkpoint are read, and a few examples are run through each."""
    opened, count, apart = study.run, len(study.run.steps), None
    if isinstance(running, Ray):
        apart = ClusterSteps(running, study, data, experiment.examples)
    each = study.plan(opened.data(data), experiment.examples) if apart is None else apart.explain()
    # half of these passes are the final model's, which runs once on each batch, or in each worker, if its rows are kept
    finals = 0 if apart is None else min(count, apart.slots) - 1
    passes = each.passes and each.passes * (count + finals) // 2
    lines = [*_plan_lines(opened, each, passes), *([] if apart is None else apart.lines(each))]
    return RunPlan(opened.name, opened.unit, opened.steps, each, passes, tuple(lines))


def _engine(engine: str | Engine) -> Local | Ray:
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


class RunStudy:
    """The steps of a run, each compared with the final one as `spec` says."""

    def __init__(self, run: TrainingRun, spec: Spec, device: Any = None, data: Held | None = None, sharers: int = 1):
        self.run, self.spec, self.device, self.data = run, spec, device, data
        self.measures = cast("list[Measure]", spec.measures)
        self.sharers = sharers  # how many processes like this one share the memory
        self.done: dict[int, Comparison] = {}
        self.failed: Mapping[int, str] = {}
        self.weights: dict[int, str] = {}
        self.forms: dict[int, str] = {}  # what each network is beside its weights, as JSON

    @property
    def of_weights(self) -> bool:
        """Whether weights alone are read, and no data."""
        return weights_alone(self.measures)

    def plan(self, data: Any, examples: int | None) -> Plan:
        """Return the plan of comparing the first checkpoint with the final one."""
        first, last = self.run.steps[0], self.run.steps[-1]
        spec = replace(self.spec, examples=examples, names=(f"{self.run.unit} {first}", f"{self.run.unit} {last}"))
        call = call_of(self.run.at(first), self.run.final, data, spec, Run(device=self.device))
        return call.explain(self.measures)

    def call(self, data: Any, examples: int | None) -> str:
        """Return the call as text, for the provenance."""
        spec, source = self.spec, {} if self.of_weights else {"data": data_name(data)}
        return described_call(
            "nk.dynamics", run=self.run.name, **source, measures=[one.id for one in self.measures], layers=spec.layers,
            pairs=spec.pairs, shape=spec.shape, resize=spec.resize, examples=examples, seed=spec.seed,
            transform=spec.transforms, forward=spec.forward,
        )  # fmt: skip

    def series(self, experiment: Experiment, call: str, apart: ClusterSteps | None = None) -> Series:
        """Return the finished series; with `partial` also an unfinished one, if Ctrl-C ends the work."""
        if apart is not None:
            self._look_apart(apart, experiment.partial)
        else:  # every checkpoint is read once, so that one that is damaged or differs is named before the work
            for step in with_progress(self.run.steps, "reading checkpoints", "files"):
                self.identify(step)
        with as_command(call), experiment.job(Series.kind, self._identity, call) as job:
            job.expect(map(self._part, self.weights), f"{self.run.unit}s")
            try:
                waiting = self._waiting(job)
                if apart is None:
                    self._compare_all(job, waiting, call)
                else:
                    self.done |= apart.compare(job, {step: self._part(step) for step in waiting})
                    job.expect(map(self._part, self.done), f"{self.run.unit}s")
                    job.save(lambda: self._so_far(call))
            except KeyboardInterrupt:
                if not experiment.partial or not self.done:
                    raise
        return self._so_far(call)

    def _identity(self) -> dict[str, Any]:
        fields: dict[str, Any] = {key.removeprefix("asked "): text for key, text in self.question.items()}
        fields["measures"] += f"; digest {fields.pop('measures digest')}"
        last = self.run.steps[-1]
        return fields | {"architecture": {str(last): Form.from_json(self.forms[last]).to_dict()}}

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

    def _compare_all(self, job: Job, waiting: Sequence[int], call: str) -> None:
        """Compare the steps that are not finished, and write the series after each."""
        for step in with_progress(waiting, "comparing", f"{self.run.unit}s"):
            job.check()
            self.done[step] = self.compared(step)
            (values, arrays), form = packed(self.done[step]), Form.from_json(self.forms[step])
            form = form.after(self._live[step]) if step in self._live else form
            job.keep(self._part(step), {**values, "form": form.to_json()}, arrays)
            job.save(lambda: self._so_far(call))
        if not waiting:
            job.save(lambda: self._so_far(call))

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
        measures = [measure for measure in self.measures if weights_alone([measure])]
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
        model, spec = self.run.final, self.spec
        if self.data is None or not self.data.is_held:
            return model
        source = ModelInput(
            model, layers=spec.layers, shape=spec.shape, forward=spec.forward, transform=spec.transforms,
            device=self.device,
        )  # fmt: skip
        room = spare_memory(torch.device(self.device or device_of(model))) // self.sharers
        return ModelSide(f"{self.run.unit} {self.run.steps[-1]}", source, keep=room)

    def compared(self, step: int) -> Comparison:
        """Return the comparison of a step with the final one."""
        last = self.run.steps[-1]
        a: Any = self._final if step == last else self.run.at(step)
        b: Any = None if step == last else self._final
        spec = replace(self.spec, names=(f"{self.run.unit} {step}", f"{self.run.unit} {last}"))
        (found,) = call_of(a, b, self.data, spec, Run(device=self.device)).compare(self.measures)
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
        spec = self.spec
        asked = {"layers": spec.layers, "shape": spec.shape, "forward": spec.forward, "seed": spec.seed,
                 "pairs": spec.pairs, "resize": spec.resize, "transform": spec.transforms}  # fmt: skip
        facts = {key: in_words(value) for key, value in asked.items()}
        facts |= {"measures": ", ".join(measure.id for measure in self.measures)}
        facts |= {"measures digest": settings_digest([measure.function for measure in self.measures])}
        return {f"asked {key}": value for key, value in facts.items()} | own

    def _so_far(self, call: str) -> Series:
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
            provenance={"call": call} | self.question | passed_over | failed,
        )
