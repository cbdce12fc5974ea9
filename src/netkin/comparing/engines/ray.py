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
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netkin.comparing.comparer import Comparer, from_arrays
from netkin.comparing.engines import Engine, worker
from netkin.comparing.engines.plain import plain_call
from netkin.comparing.engines.worker import Message, fault_from
from netkin.comparing.many_models import ManyPlan, ModelBlock, PairsSchedule, as_sample
from netkin.comparing.pairs_job import groups_of, identity_of_study, label_of
from netkin.comparing.plan import weights_alone
from netkin.errors import InvalidValue, MissingExtra, NetkinError, SourceError, WorkerError, blame
from netkin.identity import COMPARE, described_call, settings_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.progress import announce, command, reporting
from netkin.results import Comparison, Comparisons
from netkin.results.packing import unpacked_columns
from netkin.results.records import as_record
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

    by_name = True

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
        return _Work(self, call, measures).explain()


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How a call is split, as it was when its job began."""

    schedule: PairsSchedule
    limit: int  # bytes of the statistics of a task
    shares: int  # parts of the data


@dataclass(frozen=True, eq=False)
class BlockWork:
    """Models that run together, their pairs, and the names of parts of the job: of the data, and of tables."""

    models: Sequence[str]
    pairs: Sequence[Pair]
    shares: Sequence[str]
    groups: Mapping[str, Sequence[Pair]]


@dataclass(frozen=True)
class Running:
    """A task that runs: its name, what it leaves, and the block that it is for, or the only model."""

    name: Any
    message: ObjectRef
    block: BlockWork | None = None
    model: str | None = None


class _Work:
    """One call on a cluster; `failed` models are left out."""

    def __init__(self, engine: Ray, call: Call, measures: Sequence[Measure]):
        self.engine, self.call, self.measures = engine, call, measures
        self.plain = plain_call(call, measures)
        self.gpus = self.plain["gpus"] = engine.gpus if self.plain["device"] == "cuda" else 0.0
        self.cluster = Cluster(engine.address)
        self.cluster.require_resources(self.gpus)
        self.plain_here = self.cluster.ray.put(self.plain)
        # bytes of the statistics of a task; None where the GPUs of workers decide
        self.limit = self.cluster.memory() if call.spec.limit is None and not self.gpus else call.spec.limit
        self.failed: dict[str, str] = {}

    def job(self, kind: str, name: str) -> Job:
        """Return the job of the call, after all models and the data were looked at."""
        self._inspect()
        settings = {what: text for model in self.models.values() for what, text in model["settings"].items()}
        settings |= {} if self.call.spec.rows is None else {"rows": str(self.call.spec.rows)}
        weights = {name: model["weights"] for name, model in self.models.items()}
        layers = {name: inputs["layers"] for name, inputs in self.plain["inputs"].items()}
        identity = identity_of_study(weights, self.identity, layers, settings, self.measures)
        identity["architecture"] = {name: json.loads(model["form"]) for name, model in self.models.items()}
        identity["examples"] = str(self.examples)
        data, run = self.plain["data"] and self.plain["data"]["name"], self.call.run
        options: dict[str, Any] = {
            "call": described_call(name, models=list(self.plain["models"].values()), data=data),
            "overwrite": self.engine.overwrite or run.overwrite, "compare": COMPARE,
        }  # fmt: skip
        if self.engine.job is None:
            return Job.beside(run.save, kind, identity, **options)
        job = Job(self.engine.job, kind, identity, **options)
        job.result = None if run.save is None else Path(run.save)
        return job

    # --- before the work ----------------------------------------------------------------------------------------------

    def _inspect(self) -> None:
        """Let workers run each model on the first batch; those that fail are left out."""
        tasks, inspected = {name: {"model": name} for name in self.plain["models"]}, dict[str, dict[str, Any]]()
        for name, result in self._results("inspect", tasks, "inspecting models"):
            if isinstance(result, NetkinError):
                self._set_aside(result)
            else:
                inspected[name] = result[0]
        self.models = {name: inspected[name] for name in tasks if name in inspected}
        first, *others = self.models.values()
        self.identity, self.examples, self.is_ordered = first["identity"], first["examples"], first["ordered"]
        for other in others:
            if other["identity"] != self.identity:
                raise SourceError(
                    f"the data are not the same on all machines: {self.identity} on one and {other['identity']} on "
                    "another."
                )

    def _set_aside(self, fault: NetkinError) -> None:
        """Leave out a model that failed; if only two are compared, or the fault is no model's, raise it."""
        model = getattr(fault, "model", None)
        self.failed[model or ""] = str(fault)
        if not model or len(self.call.of) == 1 or not self._sound(self.call.of):
            raise fault

    def _sound(self, pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        return tuple((a, b) for a, b in pairs if a not in self.failed and b not in self.failed)

    def _planned(self, job: Job, plans: bool) -> Split:
        """Return how the work is split, as it was when the job began; a worker finds out how many models fit."""
        pairs = self._sound(self.call.of)

        def make() -> dict[str, Any]:
            limit = min(model["limit"] for model in self.models.values()) if self.limit is None else self.limit
            schedule = PairsSchedule((ModelBlock(tuple(self.models), pairs),))
            if plans and not weights_alone(self.measures):
                schedule = as_record(PairsSchedule, self._answer("plan", {"pairs": pairs, "limit": limit}))
            return asdict(Split(schedule, limit, self._shares(schedule, job)))

        return as_record(Split, job.part(f"plan of {settings_digest(pairs)}", make).values)

    def _shares(self, schedule: PairsSchedule, job: Job) -> int:
        """Return into how many parts the data are split: as many as were requested, or of at least a batch each."""
        if self.examples is None or not self.is_ordered or schedule.is_sample:
            return 1
        if self.engine.shares is not None:
            return min(self.engine.shares, self.examples)
        slots = self.cluster.slots(self.gpus)
        usual = math.ceil(PARTS * slots / len(schedule.blocks)) if slots > 1 or job.folder else 1
        return max(1, min(usual, self.examples // self.plain["data"]["batch_size"]))

    def explain(self) -> ManyPlan:
        """Return the plan that a worker makes for its memory, and how many tasks run at once."""
        plan = as_record(ManyPlan, self._answer("explain", {"pairs": self.call.of, "limit": self.limit}))
        return replace(plan, lines=(*plan.lines, self.cluster.words(self.gpus)))

    def _answer(self, function: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of one task."""
        ((_, result),) = self._results(function, {function: task}, "planning")
        if isinstance(result, NetkinError):
            raise result
        return result[0]

    def _results(
        self, function: str, tasks: Mapping[str, Any], what: str
    ) -> Iterator[tuple[str, Message | NetkinError]]:
        return self.cluster.results(f"{WORKER}:{function}", self.plain_here, tasks, what, gpus=self.gpus)

    # --- the work -----------------------------------------------------------------------------------------------------

    def compared(self, job: Job, *, plans: bool = False) -> list[Comparison]:
        """Return the comparison of every pair of models but those that failed."""
        split = self._planned(job, plans)
        comparisons = chain.from_iterable(unpacked_columns(*message) for message in self._through(split, job, "tables"))
        by_pair = {(comparison.a, comparison.b): comparison for comparison in comparisons}
        total = self.examples if split.schedule.is_sample else None
        return [as_sample(by_pair[pair], total) for pair in self._sound(self.call.of)]

    def collected(self, job: Job) -> Comparer:
        """Return what a pass over all data leaves."""
        (message,) = self._through(self._planned(job, False), job, "whole")
        return from_arrays(*message)

    def _through(self, split: Split, job: Job, last: str) -> list[Message]:
        """Return the result of the `last` task for each group of pairs; blocks with a model that fails begin again."""
        failed: set[str] | None = None
        while failed != set(self.failed):
            failed = set(self.failed)
            blocks = [self._block(self._sound(block.pairs), split, last) for block in split.schedule.blocks]
            self._expect(blocks, job)
            self._finish(blocks, split, job, last)
        self._expect(blocks, job)
        parts = [job.find(name) for block in blocks for name in block.groups]
        return [(dict(part.values), part.arrays) for part in parts if part is not None]

    def _finish(self, blocks: Sequence[BlockWork], split: Split, job: Job, last: str) -> None:
        """Do what is missing of some blocks; those with a model that fails stay unfinished."""
        running = dict[Any, Running]()
        for block in blocks:
            self._start(block, split, job, last, running)
        with closing(self.cluster.finished(running, "comparing", job)) as finished:
            for task, result in finished:
                assert task.block is not None
                if isinstance(result, NetkinError):
                    self._set_aside(result)
                    self.cluster.cancel(running, [ref for ref, other in running.items() if other.block is task.block])
                elif job.folder is not None or task.name in task.block.groups:
                    job.keep(task.name, *self.cluster.ray.get(task.message), seconds=result["seconds"])
                    _drop_parts(task.block, job)

    def _block(self, pairs: Sequence[Pair], split: Split, last: str) -> BlockWork:
        sample, label = split.schedule.sample, label_of(pairs, split.schedule.sample)
        shares = [f"share {i} of {split.shares} of {label}" for i in range(1, split.shares + 1)]
        groups = {f"values of {label}": pairs} if pairs else {}
        models = list(dict.fromkeys(name for pair in pairs for name in pair))
        is_one = last == "whole" or split.shares == 1
        return BlockWork(models, pairs, shares, groups if is_one else groups_of(pairs, sample))

    def _start(
        self, block: BlockWork, split: Split, job: Job, last: str, running: MutableMapping[Any, Running]
    ) -> None:
        """Start what is missing of a block: parts, a tree of merges that is the same whichever ends first, tables."""

        def start(function: str, task: Mapping[str, Any], *messages: Any, name: str = "") -> Any:
            gpus = self.gpus if function in ("collect", "compare") else 0.0
            status, message = self.cluster.start(f"{WORKER}:{function}", self.plain_here, task, *messages, gpus=gpus)
            running.update({status: Running(name, message, block)} if name else {})
            return message

        if _is_done(block, job):
            _drop_parts(block, job)
            return
        sample = split.schedule.sample
        shared: dict[str, Any] = {
            "models": block.models, "pairs": block.pairs, "limit": split.limit, "sample": sample, "part": None,
            "identity": self.identity, "weights": {name: self.models[name]["weights"] for name in block.models},
            "examples": sample or self.examples,
        }  # fmt: skip
        if last == "tables" and split.shares == 1:  # so that nothing travels but values
            start("compare", shared, name=next(iter(block.groups)))
            return
        merged = []
        for place, name in enumerate(block.shares, start=1):
            part = job.find(name)
            if part is not None:
                merged.append(self.cluster.ray.put((dict(part.values), part.arrays)))
            else:
                which = {} if split.shares == 1 else {"part": (place, split.shares)}
                merged.append(start("collect", shared | which, name=name))
        while len(merged) > 1:
            twos = [merged[i : i + 2] for i in range(0, len(merged), 2)]
            merged = [start("merge", {}, *two) if len(two) == 2 else two[0] for two in twos]
        for name, pairs in block.groups.items():
            if not job.has(name):
                start(last, shared | {"pairs": pairs}, *merged, name=name)

    def _expect(self, blocks: Sequence[BlockWork], job: Job) -> None:
        """Tell the job which parts there will be; those of the data go when the tables are there."""
        job.expect(
            name for block in blocks for name in (*block.groups, *(() if _is_done(block, job) else block.shares))
        )


def _is_done(block: BlockWork, job: Job) -> bool:
    return all(map(job.has, block.groups))


def _drop_parts(block: BlockWork, job: Job) -> None:
    """Delete the parts that only finished tables needed, as they may be large."""
    for name in block.shares if _is_done(block, job) else ():
        job.drop(name, counted=True)


# --- the cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """The workers of a Ray cluster: one that is connected already, the one at `address`, or one on this machine."""

    def __init__(self, address: str | None = None):
        self.ray = _imported()
        if not self.ray.is_initialized():
            with announce("starting Ray" if address is None else f"connecting to Ray at {address}"):
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

    def require_resources(self, gpus: float) -> None:
        """Refuse a cluster that can do no task of this kind."""
        if not self.slots(gpus):
            what = f"a GPU, and each task needs {gpus:g} of one" if gpus else "a CPU, and each task needs one"
            raise InvalidValue(f"this Ray cluster has no node with {what}; start one that has.")

    def start(
        self, function: str, plain: Any, task: Mapping[str, Any], *messages: ObjectRef, gpus: float = 0.0
    ) -> list[ObjectRef]:
        """Start a task, a function of `netkin.comparing.engines.worker` or another module; return what it will leave.

        That is its status, which tells of its end, and its message, which other tasks may take as `messages`.
        """
        context = self._context | {"command": command()}
        return list(_remote(self.ray, gpus).remote(function, context, plain, dict(task), gpus, [], *messages))

    def results(
        self,
        function: str,
        plain: Any,
        tasks: Mapping[Any, Any],
        what: str,
        *,
        gpus: float = 0.0,
        job: Job | None = None,
    ) -> Iterator[tuple[Any, Message | NetkinError]]:
        """Yield what each of some tasks leaves, or its fault, by its name; one that is lost is a fault of that name."""
        running = {}
        for name, task in tasks.items():
            status, message = self.start(function, plain, task, gpus=gpus)
            running[status] = Running(name, message, model=str(name))
        with closing(self.finished(running, what, job)) as finished:
            for done, result in finished:
                yield done.name, result if isinstance(result, NetkinError) else self.ray.get(done.message)

    def finished(
        self, running: MutableMapping[ObjectRef, Running], what: str, job: Job | None = None
    ) -> Generator[tuple[Running, dict[str, Any] | NetkinError]]:
        """Yield each task as it ends, with its status or its fault; others may be added meanwhile.

        What is left running, as by Ctrl-C, is cancelled.
        """
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
        finally:
            self.cancel(running, list(running))

    def _result(self, status: ObjectRef, model: str | None) -> dict[str, Any] | NetkinError:
        """Return the status of a task that has ended, or its fault; one that is lost is that of its only model."""
        lost = self.ray.exceptions.RayError
        try:
            values: dict[str, Any] = self.ray.get(status)
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
        return fault_from(values["fault"]) if "fault" in values else values

    def cancel(self, running: MutableMapping[ObjectRef, Running], status: Iterable[ObjectRef]) -> None:
        """End some tasks."""
        for ref in status:
            running.pop(ref, None)
            with suppress(Exception):  # it may have ended by itself
                self.ray.cancel(ref, force=True)


def run(
    function: str, context: Mapping[str, Any], plain: Any, task: Mapping[str, Any], gpus: float, avoided: list[str],
    *sent: Message,
) -> tuple[dict[str, Any], Message]:  # fmt: skip
    """Do a task, in a worker of Ray; where this node is at fault, another one does it, whose results are named."""
    import ray

    messages = []
    for message in sent:
        while "elsewhere" in message[0]:
            message = ray.get(message[0]["elsewhere"][1])
        if "fault" in message[0]:
            return message[0], message
        messages.append(message)
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
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "num_returns": 2, "max_retries": ATTEMPTS - 1}
    if node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return ray.remote(run).options(**options)


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
