"""The tasks of a cluster's worker: inspect a model, plan, collect a part of the data, merge parts, read tables.

Each is a function of a call's plain values, of the task's own and of the results of other tasks, and returns a header
for JSON and arrays. Workers load models and data by name and keep them until the next call. A fault comes back as plain
values, as what a process raises can't always be unpickled elsewhere.
"""

from __future__ import annotations

import errno
import importlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__, errors
from netkin.comparing.compare import Call
from netkin.comparing.comparer import Comparer, from_arrays
from netkin.comparing.engines.plain import DataSpec, PlainCall, call_from, measures_from
from netkin.comparing.feed import HeldExamples
from netkin.comparing.many_models import Many, Survey
from netkin.comparing.plan import memory_limit
from netkin.comparing.sides import Reads
from netkin.comparing.stream import KeptLayer, Stream
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import InvalidValue, NetkinError, SourceError, WorkerError, blame
from netkin.identity import settings_digest
from netkin.progress import as_command, showing
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, loader_of, reshuffles
from netkin.results.packing import packed_columns
from netkin.sources import load_model
from netkin.sources.batches import Batches, Borrowed
from netkin.sources.names import in_short

Message = tuple[dict[str, Any], dict[str, np.ndarray]]  # what JSON can hold, and arrays by their names
Task = Mapping[str, Any]  # what a task is told beside its call, as plain values
OF_ITS_NODE = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS)  # another node may do better


def versions() -> dict[str, str]:
    """Return what must be the same on all machines."""
    return {"netkin": __version__, "torch": str(torch.__version__)}


def run_task(
    function: str, context: Mapping[str, Any], plain: PlainCall, task: Task, messages: Sequence[Message]
) -> tuple[dict[str, Any], Message]:
    """Return the seconds that a task took, or its fault, and its result.

    Args:
        function: as "module:function".
        context: what all tasks of a call share: `versions`, the `folder` that names are relative to, the `command`, and
            a `token`, as long as which lasts models and data are kept.
        plain: the call.
        task: what it is told.
        messages: the results of the tasks that it follows.
    """
    begin = time.perf_counter()
    try:
        _require_same_versions(context["versions"])
        _enter(context["folder"])
        cache.start_call(context["token"])
        module, _, name = function.partition(":")
        with as_command(context["command"]), showing(False):
            message = getattr(importlib.import_module(module), name)(plain, task, *messages)
    except Exception as fault:
        status = plain_fault(fault)
        return status, (status, {})
    return {"seconds": time.perf_counter() - begin}, message


def plain_fault(fault: Exception) -> dict[str, Any]:
    """Return a fault as plain values, and whether its node is to blame."""
    model, chain = getattr(fault, "model", None), [fault, fault.__cause__, fault.__context__]
    of_node = any(isinstance(error, OSError) and error.errno in OF_ITS_NODE for error in chain)
    kind, argument = "WorkerError", None
    if isinstance(fault, NetkinError):
        kind, argument, sentence = type(fault).__name__, fault.argument, str(fault)
    elif model is not None:
        kind, sentence = "ForwardError", f"{model!r} could not be run: {in_short(fault)}"
    else:
        sentence = f"a worker on {platform.node()} failed: {in_short(fault)}"
    return {"fault": {"kind": kind, "sentence": sentence, "argument": argument, "model": model}, "of_node": of_node}


def fault_from(plain: Mapping[str, Any]) -> NetkinError:
    """Return the error of a fault as plain values."""
    fault: NetkinError = getattr(errors, plain["kind"], WorkerError)(plain["sentence"], argument=plain["argument"])
    blame(fault, plain["model"])
    return fault


def _require_same_versions(wanted: Mapping[str, str]) -> None:
    here, there = (
        " and ".join(f"{name} {number}" for name, number in numbers.items()) for numbers in (versions(), wanted)
    )
    if here != there:
        raise WorkerError(
            f"the worker on {platform.node()} runs {here}, and this process {there}; install the same on all."
        )


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as fault:
        raise WorkerError(
            f"the worker on {platform.node()} has no folder {folder!r}, in which this call was made; a cluster needs a "
            "file system that all its machines share."
        ) from fault


class WorkerCache:
    """What this process has loaded for a call and keeps for its next tasks."""

    def __init__(self) -> None:
        self.token, self.things, self.models = "", dict[str, Any](), dict[str, nn.Module]()

    def start_call(self, token: str) -> None:
        """Forget all that belongs to another call."""
        if token != self.token:
            self.token, self.things, self.models = token, {}, {}

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, which is called once for each key."""
        if key not in self.things:
            self.things[key] = make()
        return self.things[key]

    def loaded(self, plain: PlainCall, names: Sequence[str]) -> dict[str, nn.Module]:
        """Return the models of these names; others are forgotten."""
        self.models = {name: model for name, model in self.models.items() if name in names}
        for name in names:
            if name not in self.models:
                with about(name):
                    self.models[name] = load_model(plain["models"][name], seed=plain["seeds"][name])
        return {name: self.models[name] for name in names}


cache = WorkerCache()


@contextmanager
def about(model: str) -> Iterator[None]:
    """Inside the `with`, a fault gets the name of the model that it is about."""
    try:
        yield
    except Exception as fault:
        blame(fault, model)
        raise


def data_of(plain: PlainCall) -> tuple[Any, str]:
    """Return the data of a call, as all its models take them, and the text that identifies them."""

    def load() -> tuple[Any, str]:
        data = DataSpec(**plain["data"]).load(plain["data_for"])
        return data, data_identity(data)

    return (None, "") if plain["data"] is None else cache.once("data", load)


def data_identity(data: Batches | Borrowed) -> str:
    """Return a text that identifies data: of those in memory all, of a user's loader its first batch."""
    if isinstance(data, Batches):
        return settings_digest([data.stored, data.labels, *([data.texts, data.split_by] if data.texts else [])])
    if not is_ordered(data):
        return "in another order each time"
    first = next(iter(batches_of(data)), None)
    return f"{settings_digest(first, strict=False)}, the first batch of {examples_in(data)} examples"


def is_ordered(data: Any) -> bool:
    """Return whether data give their examples in the same order each time."""
    return not reshuffles(loader_of(data))


# --- before the work --------------------------------------------------------------------------------------------------


def inspect(plain: PlainCall, task: Task) -> Message:
    """Load a model and run it on the first batch; return its digests, and what the data are."""
    name = task["model"]
    header: dict[str, Any] = {"identity": "", "examples": None, "ordered": False}
    data, identity = data_of(plain)
    with about(name):
        call = call_from(plain, cache.loaded(plain, [name]), data, [(name, name)])
        sides = call.sides()
        if data is not None:
            feed = call.feed(sides, measures_from(plain["measures"]))
            stream = Stream(sides, feed, Reads(reduce=_keep_witness))
            with stream.open():
                stream.learn()
                next(iter(stream))
            header |= {"identity": identity, "examples": feed.expected, "ordered": is_ordered(data)}
        (origin,) = (side.origin for side in sides)
    header |= {"weights": origin["weights"], "form": origin["form"], "settings": call.settings()}
    return header | {"limit": _limit(plain)}, {}


def _keep_witness(key: Any, rows: Tensor, *_: Any) -> KeptLayer:
    """Return what is kept of a layer to learn whether its rows are finite."""
    return KeptLayer(None, witness=rows.sum(), length=len(rows))


def plan(plain: PlainCall, task: Task) -> Message:
    """Return the schedule of some pairs of models that fits a worker's memory."""
    call = _call_of(plain, task)
    return asdict(Survey(call, measures_from(plain["measures"]), keeps_rows=False).schedule()), {}


def explain(plain: PlainCall, task: Task) -> Message:
    """Return how a worker would go about all pairs of many models."""
    return asdict(Many(_call_of(plain, task), measures_from(plain["measures"])).explain(keeps_rows=False)), {}


def _call_of(plain: PlainCall, task: Task) -> Call:
    """Return the call for some pairs, whose models are loaded when they are needed."""
    names = {name: plain["models"][name] for pair in task["pairs"] for name in pair}
    limit = _limit(plain) if task["limit"] is None else task["limit"]
    return call_from(plain, names, data_of(plain)[0], task["pairs"], limit)


def _limit(plain: PlainCall) -> int:
    """Return how many bytes the statistics of a task may take on its device."""
    return int(memory_limit(None, plain["device"]) * min(plain["gpus"] or 1, 1))


# --- the work ---------------------------------------------------------------------------------------------------------


def collect(plain: PlainCall, task: Task) -> Message:
    """Return the statistics of some models over a part of the data."""
    return _collected(plain, task).to_arrays()


def merge(plain: PlainCall, task: Task, *parts: Message) -> Message:
    """Return the statistics of two parts together."""
    first, second = (from_arrays(*part) for part in parts)
    return first.merge(second).to_arrays()


def whole(plain: PlainCall, task: Task, merged: Message) -> Message:
    """Return the statistics of all parts."""
    return _complete(from_arrays(*merged), task).to_arrays()


def tables(plain: PlainCall, task: Task, merged: Message) -> Message:
    """Return the comparisons of some pairs of models, from the statistics of all parts."""
    return _tables(from_arrays(*merged), plain, task)


def compare(plain: PlainCall, task: Task) -> Message:
    """Return the comparisons of some pairs of models, as one process makes them."""
    return _tables(_collected(plain, task), plain, task)


def _tables(comparer: Comparer, plain: PlainCall, task: Task) -> Message:
    return packed_columns(comparisons_of(_complete(comparer, task), measures_from(plain["measures"]), task["pairs"]))


def _collected(plain: PlainCall, task: Task) -> Comparer:
    data, identity = data_of(plain)
    if identity != task["identity"]:
        raise SourceError(
            f"the data {plain['data']['name']!r} are not the same on all machines, or have changed: {identity} on "
            f"{platform.node()}, and {task['identity']} before."
        )
    if task["sample"] is not None:
        spec = plain["spec"]
        data = cache.once("sample", partial(HeldExamples, data, spec["examples"], task["sample"], spec["seed"]))
        plain = {**plain, "spec": {**plain["spec"], "examples": None}}
    call = call_from(plain, cache.loaded(plain, task["models"]), data, task["pairs"], task["limit"], task["part"])
    comparer = call.collect(measures_from(plain["measures"]))
    for name, digest in task["weights"].items():
        here = comparer.record.origins[name]["weights"]
        if here != digest:
            with about(name):
                raise SourceError(
                    f"the weights of {name!r} are not the same on all machines, or have changed: {here} on "
                    f"{platform.node()}, and {digest} before."
                )
    return comparer


def _complete(comparer: Comparer, task: Task) -> Comparer:
    """Return the statistics of all data, which must hold every example once."""
    comparer.note(part="")
    if task["examples"] is not None and comparer.examples not in (0, task["examples"]):
        raise InvalidValue(
            f"all parts together hold {comparer.examples:,} examples and the data {task['examples']:,}; each must be "
            "read once, none dropped."
        )
    return comparer
