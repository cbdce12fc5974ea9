"""The engine on Ray: parts of the data are collected by tasks, merged in a tree, and read where there is room.

Ray does again what a killed worker or node takes away. A task that finds its node at fault, as with a full disk, hands
itself on to another one.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import socket
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netkin.comparing.comparer import Comparer, from_arrays
from netkin.comparing.engines import Engine, worker
from netkin.comparing.engines.plain import plain_call
from netkin.comparing.engines.worker import Message, fault_from
from netkin.comparing.many import ManyPlan, ModelBlock, Way, as_sample, in_files, way_from
from netkin.comparing.pairs_job import groups_of, identity_of_study, label_of
from netkin.comparing.plan import weights_alone
from netkin.errors import InvalidValue, MissingExtra, NetkinError, SourceError, WorkerError, blame
from netkin.identity import COMPARE, described_call, settings_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.progress import announced, command, reporting
from netkin.results import Comparison, Comparisons
from netkin.results.packing import unpacked_columns
from netkin.results.values import Pair
from netkin.sources.names import in_short

if TYPE_CHECKING:
    from ray import ObjectRef

    from netkin.comparing.compare import Call

WORKER = worker.__name__  # where tasks are found
ANSWER = 10  # seconds in which a cluster must answer
ATTEMPTS = 4  # of a task whose worker, or node, fails
PARTS = 2  # of the data, for each task that can run at once
PAUSE = 1.0  # seconds between two checks of the job
PATIENCE = 30  # pauses without a node before it is said
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # by 0 Ray keeps to the loopback address, on any system


class Ray(Engine):
    """A cluster of Ray, by default one that is started on this machine and that no other can reach.

    Models, data and functions are given by name, as on the command line: ``nk.compare("nets:first@a.pt",
    "nets:second@b.pt", "images:photos", engine="ray")``. With `job` each finished part of the data is kept in that
    folder, and the same call continues there, also after the process was killed.

    Args:
        address: of a running cluster, as "10.0.0.1:6379", or "auto"; None starts one here, on the loopback address.
        job: the folder in which finished parts are kept.
        overwrite: whether another job in that folder is deleted, and the work starts again.
        gpus: the share of a GPU that each task requests, where models run on "cuda".
        shares: into how many parts the data are split; by default twice as many as tasks can run at once.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        job: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        gpus: float = 1.0,
        shares: int | None = None,
    ):
        if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not gpus > 0:
            sentence = f"`gpus` is the share of a GPU that a task needs, as 0.5; got {gpus!r}."
            raise InvalidValue(sentence, argument="gpus", value=gpus)
        if shares is not None and (isinstance(shares, bool) or not isinstance(shares, int) or shares < 1):
            sentence = f"`shares` is the number of parts of the data, from 1 on; got {shares!r}."
            raise InvalidValue(sentence, argument="shares", value=shares)
        self.address, self.job, self.overwrite, self.gpus, self.shares = address, job, overwrite, float(gpus), shares

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, call: Call, measures: Sequence[Measure]) -> list[Comparison]:
        work = _Work(self, call, measures)
        with work.job("comparison", "nk.compare") as job:
            return work.compared(job)

    def collect(self, call: Call, measures: Sequence[Measure]) -> Comparer:
        work = _Work(self, call, measures)
        with work.job("statistics", "nk.collect") as job:
            return work.collected(job)

    def compare_many(self, call: Call, measures: Sequence[Measure]) -> Comparisons:
        work = _Work(self, call, measures)
        with work.job("comparison", "nk.compare_many") as job:
            result = Comparisons(work.compared(job, plans=True), work.failed)
            job.save(lambda: result)
            return result

    def explain_many(self, call: Call, measures: Sequence[Measure]) -> ManyPlan:
        return _Work(self, call, measures).explained()


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How a call is split, as it was when its job began."""

    way: Way
    limit: int  # bytes of the statistics of a task
    shares: int  # parts of the data


@dataclass(eq=False)
class Block:
    """Models that run together, and what there is of their tables: by the names of parts, pairs and messages."""

    pairs: Sequence[Pair]
    groups: Mapping[str, Sequence[Pair]]
    shares: Sequence[str]  # the names of the parts of the data
    messages: dict[str, Message] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))

    @property
    def is_done(self) -> bool:
        return len(self.messages) == len(self.groups)


@dataclass(frozen=True, eq=False)
class Running:
    """A task that runs: its name and what it leaves.

    Args:
        name: that of the part, if it is one.
        message: its result.
        block: the block that it is for.
        is_part: whether it collects a part of the data.
        model: the only model that it is about.
    """

    name: str
    message: ObjectRef
    block: Any = None
    is_part: bool = False
    model: str | None = None


class _Work:
    """One call on a cluster; `failed` models are left out."""

    def __init__(self, engine: Ray, call: Call, measures: Sequence[Measure]):
        self.engine, self.call, self.measures = engine, call, measures
        self.plain = plain_call(call, measures)
        self.gpus = self.plain["gpus"] = engine.gpus if self.plain["device"] == "cuda" else 0.0
        self.cluster = Cluster(engine.address)
        self.cluster.refuse_too_small(self.gpus)
        self.plain_here = self.cluster.ray.put(self.plain)
        self.failed: dict[str, str] = {}
        self.models: dict[str, dict[str, Any]] = {}  # what inspection told of those that did not fail

    def job(self, kind: str, name: str) -> Job:
        """Return the job of the call, after all models and the data were looked at."""
        self._inspect()
        settings = {what: text for own in self.models.values() for what, text in own["settings"].items()}
        settings |= {} if self.call.spec.rows is None else {"rows": str(self.call.spec.rows)}
        weights = {model: own["weights"] for model, own in self.models.items()}
        identity = identity_of_study(weights, self.identity, self.call.spec.layers, settings, self.measures)
        identity["architecture"] = {model: json.loads(own["form"]) for model, own in self.models.items() if own["form"]}
        identity["examples"] = str(self.examples)
        data = self.plain["data"] and self.plain["data"]["name"]
        options: dict[str, Any] = {
            "call": described_call(name, models=list(self.plain["models"].values()), data=data),
            "overwrite": self.engine.overwrite or self.call.run.overwrite, "compare": COMPARE,
        }  # fmt: skip
        if self.engine.job is None:
            return Job.beside(self.call.run.save, kind, identity, **options)
        job = Job(self.engine.job, kind, identity, **options)
        job.result = None if self.call.run.save is None else Path(self.call.run.save)
        return job

    # --- before the work ----------------------------------------------------------------------------------------------

    def _inspect(self) -> None:
        """Let workers run each model on the first batch; those that fail are left out."""
        running = {}
        for name in self.plain["models"]:
            status, message = self._start("inspect", {"model": name}, gpus=self.gpus)
            running[status] = Running(name, message, model=name)
        with closing(self.cluster.finished(running, "inspecting models")) as finished:
            for task, result in finished:
                if isinstance(result, NetkinError):
                    self._set_aside(getattr(result, "model", None), result)
                else:
                    self.models[task.name] = self.cluster.ray.get(task.message)[0]
        first = next(iter(self.models.values()))
        self.identity, self.examples = first.get("identity", ""), first.get("examples")
        self.ordered = first.get("ordered", False)
        for model in self.models.values():
            if model.get("identity", "") != self.identity:
                raise SourceError(
                    f"the data are not the same on all machines: {self.identity} on one and {model['identity']} on "
                    "another."
                )
        self.models = {name: self.models[name] for name in self.plain["models"] if name in self.models}

    def _set_aside(self, model: str | None, fault: NetkinError) -> None:
        """Leave a model out that failed; where two are compared, or it is no model's fault, the fault is raised."""
        self.failed[model or ""] = str(fault)
        if not model or len(self.call.of) == 1 or not self._sound(self.call.of):
            raise fault

    def _sound(self, pairs: Iterable[Pair]) -> list[Pair]:
        return [(a, b) for a, b in pairs if a not in self.failed and b not in self.failed]

    @cached_property
    def limit(self) -> int | None:
        """How many bytes the statistics of a task may take; None where the worker's device decides."""
        return self.call.spec.limit if self.call.spec.limit is not None or self.gpus else self.cluster.memory()

    def _planned(self, job: Job, plans: bool) -> Split:
        """Return how the work is split, as it was when the job began; a worker finds out how many models fit."""
        pairs = self._sound(self.call.of)

        def make() -> dict[str, Any]:
            limit = min(model["limit"] for model in self.models.values()) if self.limit is None else self.limit
            way = asdict(Way((ModelBlock(tuple(self.models), tuple(pairs)),)))
            if plans and not weights_alone(self.measures):
                way = self._answer("plan", {"pairs": pairs, "limit": limit})
            return {"way": way, "limit": limit, "shares": self._shares(way_from(way), job)}

        values = job.part(f"plan of {settings_digest(pairs)}", make).values
        return Split(way_from(values["way"]), values["limit"], values["shares"])

    def _shares(self, way: Way, job: Job) -> int:
        """Return into how many parts the data are split: as many as were requested, or of at least a batch each."""
        if self.examples is None or not self.ordered or way.is_sample:
            return 1
        if self.engine.shares is not None:
            return min(self.engine.shares, self.examples)
        slots = self.cluster.slots(self.gpus)
        usual = math.ceil(PARTS * slots / len(way.blocks)) if slots > 1 or job.folder else 1
        return max(1, min(usual, self.examples // self.plain["data"]["batch_size"]))

    def explained(self) -> ManyPlan:
        """Return the plan that a worker makes for its memory, and how many tasks run at once."""
        values = self._answer("explain", {"pairs": self.call.of, "limit": self.limit})
        lines, way = tuple(values["lines"]), way_from(values["way"])
        plan = ManyPlan(**values | {"way": way, "lines": lines, "warnings": tuple(values["warnings"])})
        slots, blocks, lines = self.cluster.slots(self.gpus), len(way.blocks), (*lines, self.cluster.words(self.gpus))
        if plan.refused:
            return replace(plan, lines=lines)
        # every part of the data is kept until the tables of its block are there
        shares = max(1, min(self.engine.shares or math.ceil(PARTS * slots / blocks), way.batches))
        left = plan.disk - 2 * way.statistics
        disk = left + blocks * shares * way.statistics
        lines = tuple(in_files(disk, left) if line == in_files(plan.disk, left) else line for line in lines)
        return replace(plan, disk=disk, lines=lines)

    def _answer(self, function: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return what one task says."""
        status, message = self._start(function, task, gpus=self.gpus)
        with closing(self.cluster.finished({status: Running(function, message)}, "planning")) as finished:
            ((task_done, result),) = finished
        if isinstance(result, NetkinError):
            raise result
        return dict(self.cluster.ray.get(task_done.message)[0])

    def _start(self, function: str, task: Mapping[str, Any], *given: ObjectRef, gpus: float = 0.0) -> list[ObjectRef]:
        return self.cluster.start(f"{WORKER}:{function}", self.plain_here, task, *given, gpus=gpus)

    # --- the work -----------------------------------------------------------------------------------------------------

    def compared(self, job: Job, *, plans: bool = False) -> list[Comparison]:
        """Return the comparison of every pair of models but those that failed."""
        plan = self._planned(job, plans)
        made: dict[Pair, Comparison] = {}
        for block in self._through(plan, job, "tables"):
            for message in block.messages.values():
                made |= {(one.a, one.b): one for one in unpacked_columns(*message)}
        total = self.examples if plan.way.is_sample else None
        return [as_sample(made[pair], total) for pair in self._sound(self.call.of)]

    def collected(self, job: Job) -> Comparer:
        """Return what a pass over all data leaves."""
        (block,) = self._through(self._planned(job, False), job, "whole")
        (message,) = block.messages.values()
        return from_arrays(*message)

    def _through(self, plan: Split, job: Job, kind: str) -> list[Block]:
        """Return all blocks with what was made of them; one with a model that fails begins again without it."""
        blocks = [self._block(block.pairs, plan, kind) for block in plan.way.blocks]
        running: dict[ObjectRef, Running] = {}
        for block in blocks:
            self._recall(block, job)
        self._expect(blocks, job, kind)
        for block in blocks:
            self._submit(block, plan, job, kind, running)
        with closing(self.cluster.finished(running, "comparing", job)) as finished:
            for task, result in finished:
                block = task.block
                if isinstance(result, NetkinError):
                    model = getattr(result, "model", None)
                    self._set_aside(model, result)
                    for place, old in enumerate(blocks):
                        if model in old.models and not old.is_done:
                            self.cluster.cancel(running, [ref for ref, task in running.items() if task.block is old])
                            blocks[place] = self._block(self._sound(old.pairs), plan, kind)
                            self._recall(blocks[place], job)
                            self._submit(blocks[place], plan, job, kind, running)
                    self._expect(blocks, job, kind)
                elif task.is_part:
                    if job.folder is not None:
                        job.keep(task.name, *self.cluster.ray.get(task.message), seconds=result["seconds"])
                else:
                    block.messages[task.name] = self.cluster.ray.get(task.message)
                    if kind == "tables" and job.folder is not None:
                        job.keep(task.name, *block.messages[task.name], seconds=result["seconds"])
                        self._drop_parts(block, job)
        for block in blocks:
            self._drop_parts(block, job)
        self._expect(blocks, job, kind)
        return blocks

    def _block(self, pairs: Sequence[Pair], plan: Split, kind: str) -> Block:
        pairs = tuple(pairs)
        label = label_of(pairs, plan.way.sample)
        whole = {f"values of {label}": pairs}
        groups = whole if kind == "whole" or plan.shares == 1 else groups_of(pairs, plan.way.sample)
        shares = [f"share {i} of {plan.shares} of {label}" for i in range(1, plan.shares + 1)]
        return Block(pairs, groups if pairs else {}, shares)

    def _recall(self, block: Block, job: Job) -> None:
        """Take the tables that the job has."""
        for name in block.groups if job.folder is not None else ():
            part = job.find(name)
            if part is not None:
                block.messages[name] = dict(part.values), part.arrays

    def _submit(
        self, block: Block, plan: Split, job: Job, kind: str, running: MutableMapping[ObjectRef, Running]
    ) -> None:
        """Start what is missing of a block: parts, a tree of merges that is the same whichever ends first, tables."""
        if block.is_done:
            return
        way, examples = plan.way, self.examples
        shared = {
            "models": block.models, "pairs": block.pairs, "limit": plan.limit, "sample": way.sample,
            "identity": self.identity, "weights": {name: self.models[name]["weights"] for name in block.models},
            "examples": way.sample or examples, "part": None,
        }  # fmt: skip
        if kind == "tables" and plan.shares == 1:  # so that nothing travels but values
            (name,) = block.groups
            status, message = self._start("compare", shared, gpus=self.gpus)
            running[status] = Running(name, message, block)
            return
        merged: list[ObjectRef] = []
        for place, name in enumerate(block.shares, start=1):
            part = job.find(name) if job.folder is not None else None
            if part is not None:
                merged.append(self.cluster.ray.put((dict(part.values), part.arrays)))
                continue
            which = {} if plan.shares == 1 else {"part": (place, plan.shares)}
            status, message = self._start("collect", shared | which, gpus=self.gpus)
            running[status] = Running(name, message, block, is_part=True)
            merged.append(message)
        while len(merged) > 1:
            twos = [merged[i : i + 2] for i in range(0, len(merged), 2)]
            merged = [self._start("merge", {}, *two)[1] if len(two) == 2 else two[0] for two in twos]
        for name, pairs in block.groups.items():
            if name not in block.messages:
                status, message = self._start(kind, {"pairs": pairs, "examples": shared["examples"]}, *merged)
                running[status] = Running(name, message, block)

    def _drop_parts(self, block: Block, job: Job) -> None:
        """Delete the parts that only finished tables needed, as they may be large."""
        if block.is_done and all(map(job.has, block.groups)):
            for name in block.shares:
                job.drop(name, counted=True)

    def _expect(self, blocks: Sequence[Block], job: Job, kind: str) -> None:
        """Tell the job which parts there will be; parts of the data go when the tables are there."""
        tables = [name for block in blocks for name in block.groups if kind == "tables"]
        job.expect(tables + [name for block in blocks if not block.is_done or kind == "whole" for name in block.shares])


# --- the cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """The workers of a Ray cluster: one that is connected already, the one at `address`, or one on this machine."""

    def __init__(self, address: str | None = None):
        self.ray = _imported()
        if not self.ray.is_initialized():
            with announced("starting Ray" if address is None else f"connecting to Ray at {address}"):
                _connect(self.ray, address)
        elif address not in (None, "auto", here := self.ray.get_runtime_context().gcs_address):
            raise InvalidValue(
                f"this process is connected to the Ray cluster at {here}; leave `address` out, or call "
                "`ray.shutdown()` first.",
                argument="address",
            )
        self._context = {"versions": worker.versions(), "folder": os.getcwd(), "token": secrets.token_hex(8)}

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are there now."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def slots(self, gpus: float = 0.0) -> int:
        """Return how many tasks can be done at once, of those that need so much of a GPU."""
        return sum(_slots(node, gpus) for node in self.nodes)

    def words(self, gpus: float) -> str:
        """Return how much can be done at once, as a line of a plan."""
        slots, nodes = self.slots(gpus), len(self.nodes)
        return f"cluster: {slots:,} task{'s' * (slots > 1)} at once on {nodes:,} node{'s' * (nodes > 1)}"

    def memory(self) -> int:
        """Return how many bytes a task may take on any node: a quarter of its memory, or less where many fit."""
        sizes = [(node["Resources"].get("memory", 0), _slots(node)) for node in self.nodes]
        return int(min((size / max(4, 2 * slots) for size, slots in sizes if size and slots), default=2**30))

    def refuse_too_small(self, gpus: float) -> None:
        """Refuse a cluster that can do no task of this kind."""
        if not self.slots(gpus):
            what = f"a GPU, and each task needs {gpus:g} of one" if gpus else "a CPU, and each task needs one"
            raise InvalidValue(f"this Ray cluster has no node with {what}; start one that has.")

    def start(
        self, function: str, plain: Any, task: Mapping[str, Any], *given: ObjectRef, gpus: float = 0.0
    ) -> list[ObjectRef]:
        """Start a task, a function of `netkin.comparing.engines.worker` or another module; return what it will leave.

        That is its status, which tells of its end, and its message, which other tasks may be `given`.
        """
        context = self._context | {"command": command()}
        return list(_remote(self.ray, gpus).remote(function, context, plain, dict(task), gpus, [], *given))

    def finished(
        self, running: MutableMapping[ObjectRef, Running], what: str, job: Job | None = None
    ) -> Generator[tuple[Running, dict[str, Any] | NetkinError]]:
        """Yield each task as it ends, with its status or its fault; others may be added meanwhile.

        What is left running, as by Ctrl-C, is cancelled.
        """
        idle = 0
        try:
            with reporting(len(running), what, "tasks") as report:
                while running:
                    if job is not None:
                        job.check()
                    status = list(running)
                    ended = self.ray.wait(status, num_returns=len(status), timeout=0)[0]
                    for ref in ended or self.ray.wait(status, timeout=PAUSE)[0]:
                        if ref not in running:  # cancelled, as a model of its block has failed
                            continue
                        task = running.pop(ref)
                        result = self._result(ref, task.model)
                        if not isinstance(result, NetkinError) and "elsewhere" in result:
                            on, message = result["elsewhere"]
                            running[on] = replace(task, message=message)
                            continue
                        report.update()
                        yield task, result
                    idle = 0 if ended or self.slots() else idle + 1
                    if idle == PATIENCE:
                        warnings.warn(
                            f"no node of the cluster has room for a task, and {len(running)} wait; add one by `ray "
                            "start --address`, or stop: a job keeps what is finished.",
                            stacklevel=2,
                        )
        finally:
            self.cancel(running, list(running))

    def _result(self, status: ObjectRef, model: str | None) -> dict[str, Any] | NetkinError:
        """Return the status of a task that has ended, or its fault; one that is lost is that of its only model."""
        lost = self.ray.exceptions.RayError
        try:
            found: dict[str, Any] = self.ray.get(status)
        except lost as fault:
            cause = getattr(fault, "cause", fault)
            if not isinstance(cause, lost):  # all that a task of the same netkin may raise is in its status
                return WorkerError(
                    f"a worker could not run this netkin: {in_short(cause)} Install netkin "
                    f"{worker.versions()['netkin']} on all machines."
                )
            error = WorkerError(f"a task was lost {ATTEMPTS} times, the last time so: {in_short(fault)}")
            blame(error, model)
            return error
        return fault_from(found["fault"]) if "fault" in found else found

    def cancel(self, running: MutableMapping[ObjectRef, Running], status: Iterable[ObjectRef]) -> None:
        """End some tasks."""
        for ref in status:
            running.pop(ref, None)
            with suppress(Exception):  # it may have ended by itself
                self.ray.cancel(ref, force=True)


def run(
    function: str, context: Mapping[str, Any], plain: Any, task: Mapping[str, Any], gpus: float, avoided: list[str],
    *given: Message,
) -> tuple[dict[str, Any], Message]:  # fmt: skip
    """Do a task, in a worker of Ray; where this node is at fault, another one does it, whose results are named."""
    import ray

    messages = list(given)
    for place, message in enumerate(messages):
        while "elsewhere" in message[0]:
            message = ray.get(message[0]["elsewhere"][1])
        messages[place] = message
        if "fault" in message[0]:
            return message[0], message
    status, message = worker.run_task(function, context, plain, task, messages)
    if not status.get("of_node"):
        return status, message
    avoided = [*avoided, ray.get_runtime_context().get_node_id()]
    if len(avoided) == ATTEMPTS:
        status["fault"]["kind"] = "WorkerError"
        status["fault"]["sentence"] = f"a task failed {ATTEMPTS} times, the last time so: {status['fault']['sentence']}"
        return status, (status, {})
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _slots(node, gpus)]
    others = [node for node in others if node not in avoided]
    remote = _remote(ray, gpus, random.choice(others) if others else None)
    elsewhere = {"elsewhere": list(remote.remote(function, context, plain, task, gpus, avoided, *messages))}
    return elsewhere, (elsewhere, {})


def _remote(ray: Any, gpus: float, node: str | None = None) -> Any:
    """Return `run` as a function of Ray, on that node if it has room."""
    how: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "num_returns": 2, "max_retries": ATTEMPTS - 1}
    if node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        how["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return ray.remote(run).options(**how)


def _slots(node: Mapping[str, Any], gpus: float = 0.0) -> int:
    has = node["Resources"]
    return int(min(has.get("CPU", 0), has.get("GPU", 0) / gpus if gpus else has.get("CPU", 0)))


def _imported() -> Any:
    try:
        import ray
    except ImportError as absent:
        raise MissingExtra(
            "engine='ray' needs the package 'ray'; install it with `pip install 'netkin[ray]'`."
        ) from absent
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Connect to the cluster at an address, or start one on this machine that no other can reach."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        with _loopback(ray):
            ray.init(address="local", include_dashboard=False, **quiet)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    local = host in ("127.0.0.1", "localhost")  # where Ray would try another address of this machine
    try:
        if port.isdigit():  # where nothing listens Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
        with _loopback(ray) if local else nullcontext():
            ray.init(address=address, **quiet)
    except Exception as fault:  # Ray says it in several ways
        raise WorkerError(f"found no Ray cluster at {address!r}: {in_short(fault)}") from fault


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    """Inside the `with`, Ray and all that it starts listen on the loopback address alone."""
    constants, before = ray._private.ray_constants, os.environ.get(LOOPBACK)
    allowed = constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    os.environ[LOOPBACK], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = allowed
        os.environ.pop(LOOPBACK)
        if before is not None:
            os.environ[LOOPBACK] = before
