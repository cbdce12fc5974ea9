"""The checkpoints of a run against the final one on a Ray cluster: a task for each step, on all of the data.

A worker keeps the data and the final model's rows from step to step, as one process does. Steps that fail are named,
and the others are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from netkin.comparing.engines import worker
from netkin.comparing.engines.cluster import Cluster, Errand
from netkin.comparing.engines.ray import Ray
from netkin.comparing.engines.terms import (
    DataSpec,
    measures_of,
    plain_data,
    plain_device,
    plain_function,
    plain_layers,
    plain_measures,
    plain_shape,
)
from netkin.comparing.engines.worker import Message, as_fault, as_outcome, held
from netkin.errors import NetkinError, SourceError, ValueFault
from netkin.identity import weights_digest
from netkin.jobs import Job
from netkin.results import Comparison
from netkin.results.packing import packed, unpacked
from netkin.sources.names import find_function
from netkin.sources.runs import Checkpoint, Run

if TYPE_CHECKING:
    from netkin.applications.dynamics.dynamics import _Options, _Study

LOOKED = 16  # checkpoints that one task looks at


# --- in the process that calls ----------------------------------------------------------------------------------------


class ClusterSteps:
    """The steps of a run, examined and compared by the workers of a cluster."""

    def __init__(self, engine: Ray, run: Run, data: Any, examples: int | None, options: _Options):
        if engine.job is not None:
            raise ValueFault("`dynamics` keeps its parts beside `save`; leave `job` out of the engine.")
        self.engine, self.run = engine, run
        self.terms = terms_of_run(run, data, examples, options)
        self.call = options.call(run.name, data and plain_data(data), examples)
        self.gpus = engine.gpus if options.others["device"] == "cuda" else 0.0
        self.failed: dict[int, str] = {}

    def connect(self) -> None:
        """Reach the cluster, and share out its memory."""
        self.cluster = Cluster(self.engine.address)
        self.cluster.refuse_too_small(self.gpus)
        if self.terms["options"]["memory"] is None and not self.gpus:
            self.terms["options"]["memory"] = self.cluster.memory()
        self.terms["slots"] = max(1, self.cluster.slots(self.gpus) // len(self.cluster.nodes))

    def look(self) -> tuple[dict[int, str], dict[str, str]]:
        """Return the digests of the weights of all steps that can be read, and what all numbers depend on."""
        steps, last = list(self.run.steps[:-1]), self.run.steps[-1]
        groups = [[last], *(steps[place : place + LOOKED] for place in range(0, len(steps), LOOKED))]
        errands = [self._errand(f"look at {own[0]} to {own[-1]}", "look", own) for own in groups]
        headers = []
        for one in self._results(errands, Job(None, "look", {}), "looking at checkpoints").values():
            if isinstance(one, NetkinError):
                raise one
            headers.append(one[0])
        looked = {int(step): own for header in headers for step, own in header["steps"].items()}
        for step, own in looked.items():
            if "fault" in own:
                self._set_aside(step, as_fault(own["fault"]))
        self.weights = {step: own["weights"] for step, own in looked.items() if "weights" in own}
        return self.weights, headers[0]["question"]

    def compare(self, job: Job, names: Mapping[int, str]) -> dict[int, Comparison]:
        """Return the comparison of every step that does not fail; `names` are those of the job's parts."""
        last = self.run.steps[-1]
        order = [step for step in (last, *self.run.steps[:-1]) if step in names]  # without the final one there is none
        errands = [self._errand(names[step], "compared", [step], self.weights[step]) for step in order]
        found = self._results(errands, job, "comparing")
        made: dict[int, Comparison] = {}
        for step in order:
            one = found[names[step]]
            if isinstance(one, NetkinError):
                self._set_aside(step, one)
            else:
                made[step] = unpacked(*one)
        return made

    def _set_aside(self, step: int, fault: NetkinError) -> None:
        """Leave a step out that failed; without the final one nothing can be compared."""
        if step == self.run.steps[-1]:
            raise fault
        self.failed[step] = str(fault)

    def _results(self, errands: Sequence[Errand], job: Job, what: str) -> dict[str, Message | NetkinError]:
        return self.cluster.results(errands, job, [one.name for one in errands], what)

    def _errand(self, name: str, does: str, steps: Sequence[int], weights: str = "") -> Errand:
        told = {"terms": self.terms, "steps": list(steps), "weights": weights}
        return Errand(name, f"{__name__}:{does}", told, kept=bool(weights), gpus=self.gpus)


def terms_of_run(run: Run, data: Any, examples: int | None, options: _Options) -> dict[str, Any]:
    """Return a call of `dynamics` as plain values; what has no name is refused, with the form to give it in."""
    live = next((one for one in run.checkpoints if not isinstance(one.given, Path)), None)
    if live is not None:
        raise ValueFault(
            f"engine='ray' loads checkpoints where they run, and {live.words} is a live {type(live.given).__name__}; "
            "give a folder or files."
        )
    if run.architecture is not None and not isinstance(run.architecture, str):
        raise ValueFault(
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
        raise ValueFault("`data` is missing: name a data set, as in 'digits:test'.")
    return data


# --- in a worker ------------------------------------------------------------------------------------------------------


def look(told: Mapping[str, Any]) -> Message:
    """Read checkpoints, and return the digests of their weights, or why one can't be read."""
    study = _study(told["terms"])
    steps = {step: _looked_at(study, step) for step in told["steps"]}
    is_last = study.run.steps[-1] in told["steps"]
    if is_last and "weights" in steps[study.run.steps[-1]]:
        study.weights[study.run.steps[-1]] = steps[study.run.steps[-1]]["weights"]
        return {"steps": steps, "question": study._question}, {}
    return {"steps": steps, "question": {}}, {}


def _looked_at(study: _Study, step: int) -> dict[str, Any]:
    try:
        return {"weights": weights_digest(study.run.at(step))}
    except Exception as fault:
        return as_outcome(fault)


def compared(told: Mapping[str, Any]) -> Message:
    """Return the comparison of a step with the final one."""
    study, (step,) = _study(told["terms"]), told["steps"]
    study.weights[step] = weights_digest(study.run.at(step))
    if study.weights[step] != told["weights"]:
        raise SourceError(
            f"the weights of {study.run.unit} {step} are not the same on all machines, or have changed: "
            f"{study.weights[step]} here, and {told['weights']} before."
        )
    with worker.about(f"{study.run.unit} {step}"):
        return packed(study._compared(step))


def _study(terms: Mapping[str, Any]) -> _Study:
    """Return the study of this process, with the data and the final model that it holds."""
    return held.thing("study", lambda: _made_study(terms))


def _made_study(terms: Mapping[str, Any]) -> _Study:
    from netkin.applications.dynamics.dynamics import _Options, _Study
    from netkin.applications.dynamics.holding import Held, spare

    name, checkpoints, architecture = terms["run"]
    run = Run(name, tuple(Checkpoint(step, Path(path), unit) for step, path, unit in checkpoints), architecture)
    told = dict(terms["options"])
    for what in ("transform", "forward"):
        told[what] = told[what] and find_function(told[what])
    options = _Options.of(measures_of(terms["measures"]), **told)
    data = None
    if terms["data"] is not None:
        room = spare(torch.device("cpu")) // terms["slots"]
        data = Held(DataSpec(**terms["data"]).load(terms["whole"]), terms["examples"], room)
    return _Study(run, data, options, "", terms["slots"])
