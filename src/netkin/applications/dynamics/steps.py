"""The steps of a run: each against the final one on a Ray cluster, and each against every other by weights alone.

`Held` data are read several times: they stay in memory, if they fit, so that each pass gets the same batches. On a
cluster each step is a task, on all of the data; a worker keeps the data and the final model's rows from step to step,
as one process does. Steps that fail are named, and the others are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netkin.comparing.alignment import Pairs, size_of_weights
from netkin.comparing.all_pairs import AllPairs
from netkin.comparing.engines import (
    ClusterTask,
    DataSpec,
    plain_data,
    plain_device,
    plain_function,
    plain_layers,
    plain_measures,
    plain_shape,
    worker,
)
from netkin.comparing.engines.cluster import Cluster
from netkin.comparing.engines.ray import Ray, in_cluster_hours
from netkin.comparing.engines.worker import Message, as_fault, as_outcome, cache, measures_of
from netkin.comparing.feed import data_name
from netkin.comparing.many_models import study_of
from netkin.comparing.planning import Plan, needs_of
from netkin.comparing.request import Options
from netkin.comparing.subjects import ModelRunner
from netkin.errors import InvalidValue, MemoryLimit, NetkinError, NoValue, SourceError, WorkerError
from netkin.identity import DataDigest, Form, settings_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure, value_of
from netkin.memory import format_bytes, free_memory
from netkin.progress import reported, reporting
from netkin.representations import batches_of
from netkin.representations.hooks import leaves
from netkin.representations.inputs import examples_in, length_if_known
from netkin.results import Comparison, Values
from netkin.results.packing import packed, unpacked
from netkin.sources.names import find_function
from netkin.sources.runs import Checkpoint, Run
from netkin.statistics.collector import Collector, Key, Study

if TYPE_CHECKING:
    from netkin.applications.dynamics import DynamicsOptions, RunStudy

STEPS_PER_TASK = 16  # checkpoints that one task inspects


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


def between_steps(run: Run, measures: Sequence[Measure], final: Comparison) -> Comparison | None:
    """Return all pairs of steps, a table for each measure and layer; None where the weights take too much memory.

    `final` is the comparison of the last step with itself, whose layers and facts hold for all.
    """
    layers, steps = [name for name in final.layers_a if name in final.layers_b], [str(step) for step in run.steps]
    tables: dict[str, Values] = {}
    for measure in measures:
        collector = _collected(run, measure, layers)
        if collector is None:
            return None
        for layer in reported(layers, f"{measure.id} of all {run.unit}s", "layers"):
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


def _collected(run: Run, measure: Measure, layers: Sequence[str]) -> Collector | None:
    """Return a collector with the weights of all steps, or None where it would take too much memory."""
    (need,) = needs_of([measure])
    kind, rows = need.candidates[0], dict[Key, Mapping[str, Tensor]]()
    for step in run.steps:
        runner = ModelRunner(str(step), run.at(step), list(layers), None, None, None, None)
        weights = {
            name: {key: one.detach() for key, one in own.items()} for name, own in runner.weights(layers).items()
        }
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
    """The steps of a run, examined and compared by the workers of a cluster."""

    def __init__(self, engine: Ray, run: Run, data: Any, examples: int | None, options: DynamicsOptions):
        if engine.job is not None:
            raise InvalidValue(
                "`dynamics` keeps its parts beside `save`; leave `job` out of the engine.", argument="engine"
            )
        self.engine, self.run = engine, run
        self.terms = terms_of_run(run, data, examples, options)
        self.call = options.call(run.name, data and plain_data(data), examples)
        self.gpus = engine.gpus if options.others["device"] == "cuda" else 0.0
        self.failed: dict[int, str] = {}
        self.slots, self._stages = 1, [0.0, 0.0, 0.0]  # tasks at once; seconds of the stages of a step
        self.seconds: float | None = None  # of all steps, where a plan was made

    def connect(self) -> None:
        """Reach the cluster, and share out its memory."""
        self.cluster = Cluster(self.engine.address)
        self.cluster.refuse_too_small(self.gpus)
        if self.terms["options"]["memory"] is None and not self.gpus:
            self.terms["options"]["memory"] = self.cluster.memory()
        self.terms["slots"] = max(1, self.cluster.slots(self.gpus) // len(self.cluster.nodes))

    def explain(self) -> Plan:
        """Return the plan that a worker makes for a step, and note how many tasks run at once, and for how long."""
        self.connect()
        task = self._task("plan of a step", "explain_step", [])
        made = self._results([task], Job(None, "plan", {}), "planning")[task.name]
        if isinstance(made, NetkinError):
            raise made
        self.slots, self._stages = self.cluster.slots(self.gpus), made[0]["stages"]
        return Plan(**made[0]["plan"] | {"lines": tuple(made[0]["plan"]["lines"])})

    def cost(self, each: Plan, runs: int) -> Iterator[str]:
        """Yield the memory and the time of all steps, in which models run over the data `runs` times."""
        sizes = [format_bytes(size) for size in (each.bytes, each.limit)]
        yield f"memory: {sizes[0]} for the statistics of a task, whose limit is {sizes[1]}"
        if each.refused:
            return
        forward, others = self._stages[0] / 2 * runs, sum(self._stages[1:]) * len(self.run.steps)
        self.seconds = (forward + others) / self.slots
        yield in_cluster_hours(self.cluster, self.slots, self.seconds)

    def inspect(self) -> tuple[dict[int, str], dict[int, str], dict[str, str]]:
        """Return the digests of weights and architecture of each step that can be read, and what all depend on."""
        steps, last = list(self.run.steps[:-1]), self.run.steps[-1]
        groups = [[last], *(steps[place : place + STEPS_PER_TASK] for place in range(0, len(steps), STEPS_PER_TASK))]
        headers: list[Mapping[str, Any]] = []
        while groups:
            tasks = [self._task(f"inspection of {own[0]} to {own[-1]}", "inspect_steps", own) for own in groups]
            found = self._results(tasks, Job(None, "inspection", {}), "inspecting checkpoints")
            alone = []
            for own, one in zip(groups, found.values(), strict=True):
                if not isinstance(one, NetkinError):
                    headers.append(one[0])
                elif not isinstance(one, WorkerError):
                    raise one
                elif len(own) > 1:  # one of them was lost on every node
                    alone += [[step] for step in own]
                else:
                    self._set_aside(own[0], one)
            groups = alone
        inspected = {int(step): own for header in headers for step, own in header["steps"].items()}
        for step, own in inspected.items():
            if "fault" in own:
                self._set_aside(step, as_fault(own["fault"]))
        self.weights = {step: own["weights"] for step, own in inspected.items() if "weights" in own}
        forms = {step: inspected[step]["architecture"] for step in self.weights}
        return self.weights, forms, headers[0]["question"]

    def compare(self, job: Job, names: Mapping[int, str]) -> dict[int, Comparison]:
        """Return the comparison of every step that does not fail; `names` are those of the job's parts."""
        last = self.run.steps[-1]
        order = [step for step in (last, *self.run.steps[:-1]) if step in names]  # without the final one there is none
        tasks = [self._task(names[step], "compared", [step], self.weights[step]) for step in order]
        found = self._results(tasks, job, "comparing")
        made: dict[int, Comparison] = {}
        for step in order:
            one = found[names[step]]
            if isinstance(one, NetkinError):
                self._set_aside(step, one)
            else:
                made[step] = unpacked_step(*one)[1]
        return made

    def _set_aside(self, step: int, fault: NetkinError) -> None:
        """Leave a step out that failed; without the final one nothing can be compared."""
        if step == self.run.steps[-1]:
            raise fault
        self.failed[step] = str(fault)

    def _results(self, tasks: Sequence[ClusterTask], job: Job, what: str) -> dict[str, Message | NetkinError]:
        return self.cluster.results(tasks, job, [one.name for one in tasks], what)

    def _task(self, name: str, function: str, steps: Sequence[int], weights: str = "") -> ClusterTask:
        arguments = {"terms": self.terms, "steps": list(steps), "weights": weights}
        return ClusterTask(name, f"{__name__}:{function}", arguments, kept=bool(weights), gpus=self.gpus)


def terms_of_run(run: Run, data: Any, examples: int | None, options: DynamicsOptions) -> dict[str, Any]:
    """Return a call of `dynamics` as plain values; what has no name is refused, with the form to give it in."""
    live = next((one for one in run.checkpoints if not isinstance(one.given, Path)), None)
    if live is not None:
        raise InvalidValue(
            f"engine='ray' loads checkpoints where they run, and {live.words} is a live {type(live.given).__name__}; "
            "give a folder or files."
        )
    if run.architecture is not None and not isinstance(run.architecture, str):
        raise InvalidValue(
            "engine='ray' builds networks where they run, and `model` is a live object; give it by name, as "
            "'module:function'."
        )
    plain = options.others | {
        "layers": plain_layers(options.others["layers"]), "shape": plain_shape(options.others["shape"]),
        "device": plain_device(options.others["device"]), "transform": plain_function("transform", options.transform),
        "forward": plain_function("forward", options.others["forward"]),
    }  # fmt: skip
    return {
        "run": [run.name, [[one.step, str(one.given), one.unit] for one in run.checkpoints], run.architecture],
        "data": None if options.of_weights else asdict(plain_data(_named(data))),
        "whole": run.whole, "examples": examples, "options": plain, "measures": plain_measures(options.measures),
    }  # fmt: skip


def _named(data: Any) -> Any:
    if data is None:
        raise InvalidValue("`data` is missing: name a data set, as in 'digits:test'.", argument="data")
    return data


def unpacked_step(values: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Form, Comparison]:
    """Return the form of a step's model, and the comparison of the step, that a part of the job holds."""
    return Form.from_json(values["form"]), unpacked(
        Comparison, {key: values[key] for key in values if key != "form"}, arrays
    )


# --- in a worker ------------------------------------------------------------------------------------------------------


def inspect_steps(task: Mapping[str, Any]) -> Message:
    """Read checkpoints, and return the digests of their weights, or why one can't be read."""
    study = _study(task["terms"])
    steps = {step: _inspect(study, step) for step in task["steps"]}
    is_last = study.run.steps[-1] in task["steps"]
    if is_last and "weights" in steps[study.run.steps[-1]]:
        return {"steps": steps, "question": study.question}, {}
    return {"steps": steps, "question": {}}, {}


def _inspect(study: RunStudy, step: int) -> dict[str, Any]:
    try:
        study.identify(step)
        return {"weights": study.weights[step], "architecture": study.forms[step]}
    except Exception as fault:
        outcome = as_outcome(fault)
        if outcome["of_node"]:  # another may read it
            raise
        return outcome


def explain_step(task: Mapping[str, Any]) -> Message:
    """Return the plan of one step, and the seconds of two models' forward passes, of statistics and of reading."""
    study, stages = _study(task["terms"]), [0.0, 0.0, 0.0]
    options, run = study.options, study.run
    each = options.plan(run, study.data, None)
    if study.data is not None and not each.refused:
        given, how = {"first": run.at(run.steps[0]), "final": run.final}, options.others
        asked = Options(
            how["layers"], {name: name for name in given}, how["shape"], how["resize"], options.transform,
            how["forward"], how["device"],
        )  # fmt: skip
        limits = study_of(how["memory"], how["seed"], False, 0)
        every = AllPairs(given, asked, Pairs([("first", "final")], how["pairs"]), limits, study.data, None)
        stages = every.pair_seconds(options.measures)
    plan = {name: one for name, one in vars(each).items() if name != "kinds"}
    return {"plan": plan, "stages": stages}, {}


def compared(task: Mapping[str, Any]) -> Message:
    """Return the comparison of a step with the final one."""
    study, (step,) = _study(task["terms"]), task["steps"]
    study.identify(step)
    if study.weights[step] != task["weights"]:
        raise SourceError(
            f"the weights of {study.run.unit} {step} are not the same on all machines, or have changed: "
            f"{study.weights[step]} here, and {task['weights']} before."
        )
    with worker.about(f"{study.run.unit} {step}"):
        values, arrays = packed(study.compared(step))
    return {**values, "form": study.forms[step]}, arrays


def _study(terms: Mapping[str, Any]) -> RunStudy:
    """Return the study of this process, with the data and the final model that it holds."""
    return cache.once("study", lambda: _made_study(terms))


def _made_study(terms: Mapping[str, Any]) -> RunStudy:
    from netkin.applications.dynamics import DynamicsOptions, RunStudy  # which follow steps

    name, checkpoints, architecture = terms["run"]
    run = Run(name, tuple(Checkpoint(step, Path(path), unit) for step, path, unit in checkpoints), architecture)
    given = dict(terms["options"])
    for what in ("transform", "forward"):
        given[what] = given[what] and find_function(given[what])
    options = DynamicsOptions.of(measures_of(terms["measures"]), **given)
    data = None
    if terms["data"] is not None:
        room = spare_memory(torch.device("cpu")) // terms["slots"]
        data = Held(DataSpec(**terms["data"]).load(terms["whole"]), terms["examples"], room)
    return RunStudy(run, data, options, "", terms["slots"])
