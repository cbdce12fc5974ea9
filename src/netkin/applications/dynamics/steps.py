"""The steps of a run: each against the final one on a Ray cluster, and each against every other by weights alone.

`Held` data are read several times: they stay in memory, if they fit, so that each pass gets the same batches. On a
cluster each step is a task, on all of the data; a worker keeps the data and the final model's rows from step to step,
as one process does. Steps that fail are named, and the others are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netkin.comparing.alignment import size_of_weights
from netkin.comparing.engines import worker
from netkin.comparing.engines.plain import (
    DataSpec,
    by_name,
    measures_from,
    plain_data,
    plain_device,
    plain_layers,
    plain_measures,
    plain_shape,
)
from netkin.comparing.engines.ray import Cluster, Ray
from netkin.comparing.engines.worker import Message, Task
from netkin.comparing.feed import data_name
from netkin.comparing.plan import Plan, needs_of
from netkin.comparing.sides import ModelInput, ModelSide
from netkin.comparing.spec import Spec
from netkin.errors import InvalidValue, MemoryLimit, NetkinError, NoValue, SourceError
from netkin.identity import DataDigest, Form, settings_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure, value_of
from netkin.memory import format_bytes, free_memory
from netkin.progress import reporting, with_progress
from netkin.representations import batches_of
from netkin.representations.hooks import leaves
from netkin.representations.inputs import examples_in, length_if_known
from netkin.results import Comparison, Values
from netkin.results.records import packed, unpacked
from netkin.sources.names import find_function
from netkin.sources.runs import Checkpoint, TrainingRun
from netkin.statistics.collector import Collector, Key, Study

if TYPE_CHECKING:
    from netkin.applications.dynamics import RunStudy


class Held:
    """The batches of `data`, up to `examples` examples: a list if they take at most `limit` bytes, else read each time.

    A shuffled loader that does not fit gives its batches in another order each time; every pass still gets them all.
    """

    def __init__(self, data: Any, examples: int | None, limit: int):
        if data is None:
            raise InvalidValue(
                "`data` is missing: pass a loader, an iterable of batches or one array of inputs.", argument="data"
            )
        self.name, self._data, self.asked = data_name(data), data, examples
        self._batches = _listed(batches_of(data, examples), None if _in_memory(data) else limit)
        if self._batches is None and isinstance(data, Iterator):
            raise MemoryLimit(
                f"the data are a stream of more than {format_bytes(limit)}, which is read once for each checkpoint; "
                "pass a loader, or fewer `examples`."
            )

    @property
    def is_held(self) -> bool:
        """Whether each pass gets the same batches."""
        return self._batches is not None

    @property
    def examples(self) -> int | None:
        """The number of examples, if it is known from the batches."""
        counts = [length_if_known(batch) for batch in self._batches or [None]]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def digest(self) -> str:
        """The digest of all examples in their order, as a comparison's provenance has it; they may be read for it."""
        found, uncounted = DataDigest(), ""
        total = examples_in(self._data, self.asked)
        with reporting(total, "reading the data", "examples") as report:
            for batch in self:
                length = length_if_known(batch)
                if length is None:
                    uncounted = settings_digest([uncounted, batch], strict=False)
                else:
                    found.update(batch, range(found.count, found.count + length))
                report.update(length or 0)
        return uncounted or found.hex

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches if self._batches is not None else batches_of(self._data, self.asked))


def spare_memory(device: torch.device) -> int:
    """Return how many bytes may be held on `device`: a quarter of what is free there now."""
    return free_memory(device) // 4


def _listed(batches: Iterable[Any], limit: int | None) -> list[Any] | None:
    """Return the batches, or None where they take more than `limit` bytes."""
    held, size = [], 0
    for batch in batches:
        held.append(batch)
        size += sum(prod(leaf.shape) * leaf.itemsize for _, leaf in leaves(batch) if _is_array(leaf))
        if limit is not None and size > limit:
            return None
    return held


def _in_memory(data: Any) -> bool:
    return _is_array(data) or isinstance(data, (list, Mapping))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))


# --- all pairs of steps, by weights -----------------------------------------------------------------------------------


def between_steps(run: TrainingRun, measures: Sequence[Measure], final: Comparison) -> Comparison | None:
    """Return all pairs of steps, a table for each measure and layer; None where the weights take too much memory.

    `final` is the comparison of the last step with itself, whose layers and facts hold for all.
    """
    layers, steps = [name for name in final.layers_a if name in final.layers_b], [str(step) for step in run.steps]
    tables: dict[str, Values] = {}
    for measure in measures:
        collector = _collected(run, measure, layers)
        if collector is None:
            return None
        for layer in with_progress(layers, f"{measure.id} of all {run.unit}s", "layers"):
            values, missing = _table(measure, collector, layer, steps)
            name, axes = f"{measure.id} of {layer}", (run.unit, run.unit)
            table = final.tables[measure.id]
            tables[name] = replace(
                table, quantity=replace(table.quantity, id=name), layers_a=tuple(steps), layers_b=tuple(steps),
                axes=axes, values=values, missing=missing,
            )  # fmt: skip
    widths = dict.fromkeys(steps, sum(final.widths_a.values()))
    sides = {"layers_a": tuple(steps), "layers_b": tuple(steps), "widths_a": widths, "widths_b": widths}
    return replace(final, a=run.name, b=run.name, tables=tables, **sides)  # type: ignore[arg-type]


def _collected(run: TrainingRun, measure: Measure, layers: Sequence[str]) -> Collector | None:
    """Return a collector with the weights of all steps, or None where it would take too much memory."""
    (need,) = needs_of([measure])
    kind, rows = need.candidates[0], dict[Key, Mapping[str, Tensor]]()
    for step in run.steps:
        side = ModelSide(str(step), ModelInput(run.at(step), layers=list(layers)))
        weights = {name: {key: one.detach() for key, one in own.items()} for name, own in side.weights(layers).items()}
        if not rows:
            sizes = [size_of_weights(str(one), name, own) for one in run.steps for name, own in weights.items()]
            study = Study({size.key: size for size in sizes}, [])
            price = kind.cost(need.settings, study)
            if price is None or price.bytes > spare_memory(torch.device("cpu")):
                return None
            collector = kind.start(need.settings, study)
        rows |= {(str(step), name): own for name, own in weights.items()}
    collector.update({"weights": rows}, np.arange(0))
    return collector


def _table(
    measure: Measure, collector: Collector, layer: str, steps: Sequence[str]
) -> tuple[np.ndarray, dict[tuple[str, str], str]]:
    values, missing = np.full((len(steps), len(steps)), np.nan), dict[tuple[str, str], str]()
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            if measure.facts.symmetric and j < i:
                values[i, j] = values[j, i]
                missing |= {(a, b): missing[b, a]} if (b, a) in missing else {}
                continue
            try:
                values[i, j] = value_of(measure, collector.pair((a, layer), (b, layer)))
            except NoValue as reason:
                missing[a, b] = str(reason)
    return values, missing


# --- in the process that calls ----------------------------------------------------------------------------------------


class ClusterSteps:
    """The steps of a run, examined and compared by the workers of a cluster; `failed` steps are left out."""

    def __init__(self, engine: Ray, study: RunStudy, data: Any, examples: int | None):
        if engine.job is not None:
            raise InvalidValue(
                "`dynamics` keeps its parts beside `save`; leave `job` out of the engine.", argument="engine"
            )
        self.engine, self.run = engine, study.run
        self.plain = _plain_study(study, data, examples)
        self.call = study.call(data and plain_data(data), examples)
        self.gpus = engine.gpus if study.device == "cuda" else 0.0
        self.failed: dict[int, str] = {}

    def connect(self) -> None:
        """Reach the cluster, and share out its memory."""
        self.cluster = Cluster(self.engine.address)
        self.cluster.require_resources(self.gpus)
        if self.plain["spec"]["memory"] is None and not self.gpus:
            self.plain["spec"]["memory"] = self.cluster.memory()
        self.plain["slots"] = max(1, self.slots // len(self.cluster.nodes))
        self._plain_here = self.cluster.ray.put(self.plain)

    @property
    def slots(self) -> int:
        """How many tasks run at once."""
        return self.cluster.slots(self.gpus)

    def explain(self) -> Plan:
        """Return the plan that a worker makes for a step."""
        self.connect()
        ((_, plan),) = self._results({"plan": {}}, "explain_step", "planning")
        if isinstance(plan, NetkinError):
            raise plan
        return Plan(**plan[0] | {"lines": tuple(plan[0]["lines"])})

    def lines(self, each: Plan) -> Iterator[str]:
        """Yield what a task takes, and how many run at once."""
        sizes = [format_bytes(size) for size in (each.bytes, each.limit)]
        yield f"memory: {sizes[0]} for the statistics of a task, whose limit is {sizes[1]}"
        yield self.cluster.words(self.gpus)

    def inspect(self) -> tuple[dict[int, str], dict[int, str], dict[str, str]]:
        """Return the digests of weights and architecture of each step that can be read, and what all depend on."""
        tasks = {step: {"step": step} for step in self.run.steps}
        found = {step: values for step, (values, _) in self._sound(tasks, "inspect_step", "inspecting checkpoints")}
        self.weights = {step: found[step]["weights"] for step in self.run.steps if step in found}
        forms = {step: found[step]["form"] for step in self.weights}
        return self.weights, forms, found[self.run.steps[-1]]["question"]

    def compare(self, job: Job, names: Mapping[int, str]) -> dict[int, Comparison]:
        """Return the comparison of every step that does not fail; `names` are those of the job's parts."""
        made, tasks = dict[int, Comparison](), {step: {"step": step, "weights": self.weights[step]} for step in names}
        for step, message in self._sound(tasks, "compared", "comparing", job):
            job.keep(names[step], *message)
            made[step] = unpacked_step(*message)[1]
        return made

    def _sound(
        self, tasks: Mapping[int, Task], function: str, what: str, job: Job | None = None
    ) -> Iterator[tuple[int, Message]]:
        """Yield what is left of each step; one that fails is left out, but for the final one."""
        for step, result in self._results(tasks, function, what, job):
            if not isinstance(result, NetkinError):
                yield step, result
            elif step == self.run.steps[-1] or not getattr(result, "model", None):
                raise result
            else:
                self.failed[step] = str(result)

    def _results(
        self, tasks: Mapping[Any, Task], function: str, what: str, job: Job | None = None
    ) -> Iterator[tuple[Any, Message | NetkinError]]:
        return self.cluster.results(f"{__name__}:{function}", self._plain_here, tasks, what, gpus=self.gpus, job=job)


def _plain_study(study: RunStudy, data: Any, examples: int | None) -> dict[str, Any]:
    """Return a call of `dynamics` as plain values; what has no name is refused, with the form to give it in."""
    run, spec = study.run, study.spec
    for checkpoint in run.checkpoints:
        if not isinstance(checkpoint.source, Path):
            by_name("run", checkpoint.source, checkpoint.words)
    if data is None and not study.of_weights:
        raise InvalidValue("`data` is missing: name a data set, as in 'digits:test'.", argument="data")
    architecture = by_name("model", run.architecture)
    plain = {name: getattr(spec, name) for name in ("pairs", "resize", "memory", "seed")}
    plain |= {"layers": plain_layers(spec.layers), "shape": plain_shape(spec.shape)}
    functions = {"transforms": by_name("transform", spec.transforms), "forward": by_name("forward", spec.forward)}
    return {
        "run": [run.name, [[one.step, str(one.source), one.unit] for one in run.checkpoints], architecture],
        "data": None if study.of_weights else asdict(plain_data(data)), "whole": run.whole, "examples": examples,
        "spec": plain, "functions": functions, "device": plain_device(study.device),
        "measures": plain_measures(study.measures),
    }  # fmt: skip


def unpacked_step(values: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Form, Comparison]:
    """Return the form of a step's model, and the comparison of the step, that a part of the job holds."""
    return Form.from_json(values["form"]), unpacked(
        Comparison, {key: values[key] for key in values if key != "form"}, arrays
    )


# --- in a worker ------------------------------------------------------------------------------------------------------


def inspect_step(plain: Mapping[str, Any], task: Task) -> Message:
    """Read a checkpoint, and return what identifies it; of the final one also what all steps depend on."""
    study, step = _study(plain), task["step"]
    with worker.about(next(str(one.source) for one in study.run.checkpoints if one.step == step)):
        study.identify(step)
    question = study.question if step == study.run.steps[-1] else {}
    return {"weights": study.weights[step], "form": study.forms[step], "question": question}, {}


def explain_step(plain: Mapping[str, Any], task: Task) -> Message:
    """Return the plan of one step."""
    study = _study(plain)
    each = study.plan(study.data, None)
    return {one.name: getattr(each, one.name) for one in fields(each) if one.name != "kinds"}, {}


def compared(plain: Mapping[str, Any], task: Task) -> Message:
    """Return the comparison of a step with the final one."""
    study, step = _study(plain), task["step"]
    with worker.about(f"{study.run.unit} {step}"):
        study.identify(step)
        if study.weights[step] != task["weights"]:
            raise SourceError(
                f"the weights of {study.run.unit} {step} are not the same on all machines, or have changed: "
                f"{study.weights[step]} here, and {task['weights']} before."
            )
        values, arrays = packed(study.compared(step))
    return {**values, "form": study.forms[step]}, arrays


def _study(plain: Mapping[str, Any]) -> RunStudy:
    """Return the study of this process, with the data and the final model that it holds."""
    return worker.cache.once("study", lambda: _made_study(plain))


def _made_study(plain: Mapping[str, Any]) -> RunStudy:
    from netkin.applications.dynamics import RunStudy  # which follows steps

    name, checkpoints, architecture = plain["run"]
    run = TrainingRun(name, tuple(Checkpoint(step, Path(path), unit) for step, path, unit in checkpoints), architecture)
    functions: dict[str, Any] = {
        what: function and find_function(function) for what, function in plain["functions"].items()
    }
    data = None
    if plain["data"] is not None:
        room = spare_memory(torch.device("cpu")) // plain["slots"]
        data = Held(DataSpec(**plain["data"]).load(plain["whole"]), plain["examples"], room)
    spec = Spec(measures_from(plain["measures"]), **plain["spec"], **functions)
    return RunStudy(run, spec, plain["device"], data, plain["slots"])
