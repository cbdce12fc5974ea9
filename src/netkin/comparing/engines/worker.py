"""Tasks of a cluster's worker: inspect models, collect a share of the data, merge shares, compute measures, or all.

Each task is a function of plain values and of the results of other tasks, and returns a header for JSON and arrays. A
worker finds it by its name, loads models and data by theirs and keeps them until the next call. A fault comes back as a
sentence, as what a process raises can't always be unpickled elsewhere.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin import __version__, errors
from netkin.arrays import require_finite
from netkin.comparing.alignment import Pairs
from netkin.comparing.all_pairs import AllPairs
from netkin.comparing.engines import DataSpec, Terms, named_models, terms_for
from netkin.comparing.feed import HeldExamples
from netkin.comparing.many_models import explained
from netkin.comparing.pairs_plan import Planner
from netkin.comparing.pass_statistics import Statistics, from_arrays
from netkin.comparing.planning import memory_limit
from netkin.comparing.request import Options, Request
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import InvalidValue, NetkinError, SourceError, WorkerError, blame
from netkin.identity import settings_digest
from netkin.measures.registry import Measure, find
from netkin.progress import commanded, showing
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, loader_of, reshuffles
from netkin.results.packing import packed_columns
from netkin.sources import load_model
from netkin.sources.batches import Batches, Borrowed
from netkin.sources.names import current_directory_importable, find_function, in_short
from netkin.statistics.collector import Study

Message = tuple[dict[str, Any], dict[str, np.ndarray]]  # what JSON can hold, and arrays by their names
OF_ITS_NODE = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS)  # another node may do better


def versions() -> dict[str, str]:
    """Return what must be the same on all machines."""
    return {"netkin": __version__, "torch": str(torch.__version__)}


def run_task(
    function: str, arguments: Mapping[str, Any], call: Mapping[str, Any], *given: Message
) -> tuple[Any, Message | None]:
    """Return how a task ended, and its result; a fault is returned as ``{"fault": [its class, sentence], ...}``.

    Args:
        function: as "module:function".
        arguments: its arguments as plain values.
        call: what all tasks of a call share: `versions`, the `folder` that names are relative to, and its `token`.
        given: the results of the tasks that it follows.
    """
    begin, made = time.perf_counter(), None
    outcome: dict[str, Any] = {"host": platform.node()}
    try:
        _refuse_other_versions(call["versions"])
        _enter(call["folder"])
        cache.start_call(call["token"])
        with commanded(call["command"]), showing(False):
            home, _, name = function.partition(":")
            header, arrays = getattr(importlib.import_module(home), name)(arguments, *given)
        made = json.loads(json.dumps(header, default=lambda number: number.item())), arrays
    except Exception as fault:
        outcome |= as_outcome(fault)
    return outcome | {"seconds": time.perf_counter() - begin}, made


def as_outcome(fault: Exception) -> dict[str, Any]:
    """Return a fault as plain values: class, sentence, the model it is about, and whether its node is at fault."""
    model, chain = getattr(fault, "model", None), [fault, fault.__cause__, fault.__context__]
    of_node = any(isinstance(one, OSError) and one.errno in OF_ITS_NODE for one in chain)
    if isinstance(fault, NetkinError):
        is_named = model is None or repr(model) in str(fault)
        words = [type(fault).__name__, str(fault) if is_named else f"{model!r}: {fault}"]
    elif model is not None:
        words = ["ForwardError", f"{model!r} could not be run: {in_short(fault)}"]
    else:
        words = ["WorkerError", f"a worker on {platform.node()} failed: {in_short(fault)}"]
    return {"fault": words, "model": model, "of_node": of_node}


def as_fault(fault: Sequence[str], where: str = "") -> NetkinError:
    """Return the error for a class and a sentence."""
    kind = getattr(errors, fault[0], WorkerError)
    return kind(f"{where}: {fault[1]}" if where else fault[1])


def _refuse_other_versions(asked: Mapping[str, str]) -> None:
    mine = versions()
    if mine == asked:
        return
    one, other = (" and ".join(f"{name} {number}" for name, number in own.items()) for own in (mine, asked))
    raise WorkerError(f"the worker on {platform.node()} runs {one}, and this process {other}; install the same on all.")


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as fault:
        raise WorkerError(
            f"the worker on {platform.node()} has no folder {folder!r}, in which this call was made; a cluster needs a "
            "file system that all its machines share."
        ) from fault


class WorkerCache:
    """What this process has loaded for a call and keeps for its next tasks: models, data, and the latest statistics."""

    def __init__(self) -> None:
        self.token, self.things, self.models = "", dict[str, Any](), dict[str, nn.Module]()
        self.statistics = dict[str, Statistics]()  # the latest, by the name of the task that made them

    def start_call(self, token: str) -> None:
        """Forget all that belongs to another call."""
        if token != self.token:
            self.token, self.things, self.models, self.statistics = token, {}, {}, {}

    def read(self, name: str, message: Message) -> Statistics:
        """Return the statistics that a task made, which may be in the cache."""
        if name not in self.statistics:
            self.statistics = {name: from_arrays(*message)}
        return self.statistics[name]

    def write(self, name: str, statistics: Statistics) -> Message:
        """Return statistics as the result of a task, and keep them if they are in the host's memory."""
        self.statistics = {name: statistics} if statistics.study.device is None else {}
        return statistics.to_arrays()

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, which is called once for each key."""
        if key not in self.things:
            self.things[key] = make()
        return self.things[key]

    def loaded(self, terms: Terms, names: Sequence[str]) -> dict[str, nn.Module]:
        """Return the models of these names; others are forgotten."""
        self.models = {name: model for name, model in self.models.items() if name in names}
        for name in names:
            if name not in self.models:
                spec = terms["models"][name]
                with about(name):
                    self.models[name] = load_model(spec["model"], seed=spec["seed"])
        return {name: self.models[name] for name in names}

    def data(self, spec: Mapping[str, Any] | None, models: Sequence[str] = ()) -> tuple[Any, str]:
        """Return the data of that description, and the text that identifies them."""
        if spec is None:
            return None, ""

        def make() -> tuple[Any, str]:
            found = DataSpec(**spec).load(models)
            return found, data_identity(found)

        return self.once(f"data {sorted(spec.items())}", make)


cache = WorkerCache()


@contextmanager
def about(model: str) -> Iterator[None]:
    """Inside the `with`, a fault gets the name of the model that it is about."""
    try:
        yield
    except Exception as fault:
        blame(fault, model)
        raise


def data_of(terms: Terms) -> tuple[Any, str]:
    """Return the data of a call, as all its models take them, and the text that identifies them."""
    return cache.data(terms["data"], terms["data_for"])


# --- a call of plain values -------------------------------------------------------------------------------------------


def measures_of(plain: Sequence[Sequence[str]]) -> list[Measure]:
    """Return the measures that `plain_measures` named."""
    with current_directory_importable():
        for home in dict.fromkeys(home for home, _ in plain):
            __import__(home)
    return [find(name) for _, name in plain]


def request_of(terms: Terms, models: Mapping[str, Any], data: Any, of: Sequence[Sequence[str]], **more: Any) -> Request:
    """Return the call for some of its models, already loaded, and the pairs of them that are compared."""
    return Request(models, *asked_of(terms, list(models), of), data, terms["examples"], **more)


def asked_of(terms: Terms, models: Sequence[str], of: Sequence[Sequence[str]]) -> tuple[Options, Pairs, Study]:
    """Return the request for some models, which of them are compared, and the study."""
    given = dict(terms_for(terms, models)["options"])
    for what in ("transforms", "forward"):
        given[what] = {name: text and find_function(text) for name, text in given[what].items()}
    which = terms["pairs"]
    pairs = Pairs([(a, b) for a, b in of], which if isinstance(which, str) else [(x, y) for x, y in which])
    return Options(**given), pairs, Study({}, [], **terms["study"])


def data_identity(data: Batches | Borrowed) -> str:
    """Return a text that identifies data: of those in memory all, of a user's loader its first batch."""
    if isinstance(data, Batches):
        return settings_digest([data.stored, data.labels])
    if not is_ordered(data):
        return "in another order each time"
    first = next(iter(batches_of(data)), None)
    return f"{settings_digest(first, strict=False)}, the first batch of {examples_in(data)} examples"


def is_ordered(data: Any) -> bool:
    """Return whether data give their examples in the same order each time."""
    return not reshuffles(loader_of(data))


# --- tasks ------------------------------------------------------------------------------------------------------------


def inspect_models(task: Mapping[str, Any]) -> Message:
    """Load models and run each on the first batch: return their digests, or why one fails, and what the data are."""
    terms, header = task["terms"], dict[str, Any]()
    data, identity = data_of(terms)
    if data is not None:
        header = {"identity": identity, "examples": examples_in(data, terms["examples"]), "ordered": is_ordered(data)}
    header["models"] = {name: _inspect(terms, name, data) for name in task["models"]}
    sound = [name for name, one in header["models"].items() if "weights" in one]
    settings = request_of(terms, cache.loaded(terms, sound), data, [])._settings() if sound else {}
    return header | {"settings": settings, "limit": memory_limit(None, terms["options"]["device"])}, {}


def _inspect(terms: Terms, name: str, data: Any) -> dict[str, Any]:
    def finite(layer: str, rows: torch.Tensor, valid: Any) -> torch.Tensor:
        require_finite(rows, f"layer {layer!r} of {name!r} in batch 0")
        return rows

    try:
        model = cache.loaded(terms, [*cache.models, name])[name]
        with about(name):
            (runner,) = request_of(terms, {name: model}, data, []).runners
            if data is not None:
                with runner.ready(finite):
                    runner.rows(next(iter(batches_of(data, terms["examples"]))))
            origin = runner.origin
            return {"weights": origin["weights"], **({"architecture": origin["form"]} if "form" in origin else {})}
    except Exception as fault:
        cache.models.pop(name, None)
        outcome = as_outcome(fault)
        if outcome["of_node"]:  # another may do better
            raise
        return outcome


def plan_blocks(task: Mapping[str, Any]) -> Message:
    """Return pairs of many models in blocks, as few as the memory allows, so that each model runs seldom."""
    terms, names = task["terms"], named_models(task["pairs"])
    given = {name: terms["models"][name]["model"] for name in names}
    planner = Planner(
        given,
        *asked_of(terms, names, task["pairs"]),
        measures_of(task["measures"]),
        data_of(terms)[0],
        terms["examples"],
    )
    ways, _ = planner.ways(task["rows"], keeps=False)
    way = ways[planner.chosen(ways)]
    return {"blocks": [block.pairs for block in way.blocks], "sample": way.sample}, {}


def explain_pairs(task: Mapping[str, Any]) -> Message:
    """Return how this worker would go about all pairs of many models, and how long that would take."""
    terms, names = task["terms"], named_models(task["pairs"])
    given = {name: terms["models"][name]["model"] for name in names}
    asked, data = asked_of(terms, names, task["pairs"]), data_of(terms)[0]
    every = AllPairs(given, *asked, data, terms["examples"], task["rows"])
    return asdict(explained(every, measures_of(task["measures"]), keeps=False)), {}


def compare_models(task: Mapping[str, Any]) -> Message:
    """Return the comparisons of some models on all data, as one process makes them."""
    return _tables(_collected(task), task)


def collect_share(task: Mapping[str, Any]) -> Message:
    """Return the statistics of some models over a share of the data."""
    return cache.write(task["name"], _collected(task))


def _collected(task: Mapping[str, Any]) -> Statistics:
    cache.statistics = {}  # two would take twice the memory
    terms = task["terms"] | {"study": task["terms"]["study"] | {"limit": task["memory"]}}
    data, identity = data_of(terms)
    if identity != task["identity"]:
        raise SourceError(
            f"the data {terms['data']['name']!r} are not the same on all machines, or have changed: {identity} on "
            f"{platform.node()}, and {task['identity']} before."
        )
    if task["sample"] is not None:
        examples, seed = terms["examples"], terms["study"]["seed"]
        data = cache.once("sample", lambda: HeldExamples(data, examples, task["sample"], seed))
    models = cache.loaded(terms, named_models(task["pairs"]))
    which, count = task["share"]
    part = None if count == 1 else (which, count)
    statistics = request_of(terms, models, data, task["pairs"], part=part).collect(measures_of(task["measures"]), {})
    for name, digest in task["weights"].items():
        if statistics.origins[name]["weights"] != digest:
            with about(name):
                raise SourceError(
                    f"the weights of {name!r} are not the same on all machines, or have changed: "
                    f"{statistics.origins[name]['weights']} on {platform.node()}, and {digest} before."
                )
    return statistics


def merge_shares(task: Mapping[str, Any], *shares: Message) -> Message:
    """Return the statistics of two shares together."""
    first, *others = map(cache.read, task["after"], shares)
    for other in others:
        first = first.merge(other)
    return cache.write(task["name"], first)


def read_tables(task: Mapping[str, Any], *whole: Message) -> Message:
    """Return the comparisons of some pairs of models, from the statistics of all data."""
    return _tables(cache.read(task["after"], whole[0]), task)


def _tables(statistics: Statistics, task: Mapping[str, Any]) -> Message:
    whole, pairs = complete(statistics, task["examples"], task["names"]), [(a, b) for a, b in task["pairs"]]
    return packed_columns(comparisons_of(whole, measures_of(task["measures"]), pairs))


def complete(statistics: Statistics, examples: int | None, names: Mapping[str, str]) -> Statistics:
    """Return the statistics of all data, which must hold every example once."""
    statistics.part, statistics.names = "", dict(names)
    if examples is not None and statistics.examples not in (0, examples):
        raise InvalidValue(
            f"all shares together hold {statistics.examples:,} examples and the data {examples:,}; each must be read "
            "once, none dropped."
        )
    return statistics
