"""`Cluster`: tasks that follow each other, run by the workers of Ray, also where workers and nodes are lost.

A task whose worker or node is lost is done again, on another node where there is one; so is one whose result was
lost with its node, unless that is a part of the job, which is read from its file. When no task waits and one takes
many times longer than those before, it is started on other nodes as well, and the first to end counts. What is left
running at the end of a call, or by Ctrl-C, is ended.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from netkin.comparing.engines import ClusterTask, worker
from netkin.comparing.engines.worker import Message
from netkin.errors import InvalidValue, MissingExtra, NetkinError, WorkerError, blame
from netkin.jobs import Job
from netkin.progress import announced, command, reporting
from netkin.sources.names import in_short

if TYPE_CHECKING:
    from ray import ObjectRef

ANSWER = 10  # seconds in which a cluster must answer
ATTEMPTS = 4  # of a task whose worker or node is lost
PAUSE = 1.0  # seconds between two checks of the job and of stragglers
PATIENCE = 30  # pauses without a node before it is said
REMEDY = "add one by `ray start --address`, or stop: a job keeps what is finished."
STRAGGLER = 4.0  # how many times longer than the median a task takes that is started a second time
LEAST = 20.0  # seconds below which nothing is a straggler
COPIES = 2  # of a straggler, on other nodes
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # by 0 Ray keeps to the loopback address, on any system


@dataclass
class Attempt:
    """A task that is running: its result to come, and when it was started."""

    task: ClusterTask
    message: ObjectRef
    begun: float = field(default_factory=time.monotonic)


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
                "`ray.shutdown()` first."
            )
        self._call = {"versions": worker.versions(), "folder": os.getcwd(), "token": secrets.token_hex(8)}
        self._run = self.ray.remote(_run)
        self.lost = self.ray.exceptions.RayError

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are there now."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def slots(self, gpus: float = 0.0) -> int:
        """Return how many tasks can be done at once, of those that need so much of a GPU."""
        return sum(_slots(node, gpus) for node in self.nodes)

    def memory(self) -> int:
        """Return how many bytes a task may take on any node: a quarter of its memory, or less where many fit."""
        sizes = [(node["Resources"].get("memory", 0), _slots(node, 0)) for node in self.nodes]
        return int(min((size / max(4, 2 * slots) for size, slots in sizes if size and slots), default=2**30))

    def refuse_too_small(self, gpus: float) -> None:
        """Refuse a cluster that can do no task of this kind."""
        if not self.slots(gpus):
            what = f"a GPU, and each task needs {gpus:g} of one" if gpus else "a CPU, and each task needs one"
            raise InvalidValue(f"this Ray cluster has no node with {what}; start one that has.")

    def results(
        self, tasks: Iterable[ClusterTask], job: Job, wanted: Sequence[str], what: str
    ) -> dict[str, Message | NetkinError]:
        """Return what the `wanted` tasks made, or their fault, after all that they follow.

        Parts that the job holds already are not done again. What depends on no fault is done all the same.

        Args:
            tasks: these and those that they follow, directly or not, each behind those that it follows.
            job: it keeps the results that are to be its parts.
            wanted: the names of those whose results are returned.
            what: what is being done, for progress.
        """
        graph = _TaskGraph(self, {one.name: one for one in tasks}, job, wanted)
        try:
            graph.run(what)
        finally:
            self.end(graph.running)
        return {name: graph.results[name] for name in wanted}

    # --- what a graph of tasks asks of Ray ----------------------------------------------------------------------------

    def start(
        self, task: ClusterTask, given: Sequence[ObjectRef], node: str | None = None
    ) -> tuple[ObjectRef, Attempt]:
        """Start a task, on that node if it has room, and return what to wait for."""
        how: dict[str, Any] = {"num_cpus": 1, "num_gpus": task.gpus, "num_returns": 2, "max_retries": 0}
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            how["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        call = self._call | {"command": command()}
        outcome, message = self._run.options(**how).remote(task.function, dict(task.arguments), call, *given)
        return outcome, Attempt(task, message)

    def others(self, than: str, gpus: float) -> list[str]:
        """Return the nodes that can do such tasks, in any order, but for one."""
        found = [node["NodeID"] for node in self.nodes if _slots(node, gpus) and node["NodeID"] != than]
        return random.sample(found, len(found))

    def ended(self, running: Iterable[ObjectRef]) -> list[ObjectRef]:
        """Return those that have ended, after waiting a little for one."""
        found = list(running)
        return self.ray.wait(found, num_returns=len(found), timeout=0)[0] or self.ray.wait(found, timeout=PAUSE)[0]

    def end(self, running: Iterable[ObjectRef]) -> None:
        """End what is still being done."""
        for reference in running:
            with suppress(Exception):  # it may have ended by itself
                self.ray.cancel(reference, force=True)


class _TaskGraph:
    """Some tasks: which wait for which, which run, and which results are there."""

    def __init__(self, cluster: Cluster, tasks: dict[str, ClusterTask], job: Job, wanted: Sequence[str]):
        self.cluster, self.tasks, self.job, self.wanted = cluster, tasks, job, wanted
        self.keeps = job.folder is not None
        self.waiting: dict[str, ClusterTask] = {}
        self.running: dict[ObjectRef, Attempt] = {}
        self.here: dict[str, ObjectRef] = {}  # what was made and is in the object store
        self.results: dict[str, Message | NetkinError] = {}  # what was wanted, and faults
        self.losses: dict[str, int] = {}  # how often each task was lost
        self.avoided: dict[str, str] = {}  # the node on which a task was lost
        self.seconds: dict[str, list[float]] = {}  # how long tasks took, by what they do
        self.copied: set[str] = set()  # tasks that were started on other nodes as well
        self.idle = 0  # pauses in which nothing could be started

    def run(self, what: str) -> None:
        """Do all that is needed."""
        self._plan()
        with reporting(len(self.waiting), what, "tasks") as report:
            while self.waiting or self.running:
                is_busy = self._start_ready()
                for ended in self.cluster.ended(self.running) if self.running else ():
                    if ended in self.running:  # and was not ended with another attempt
                        report.update(self._take(self.running.pop(ended), ended))
                self.job.check()
                if not is_busy:
                    self._copy_stragglers()

    def _plan(self) -> None:
        """Find out what must be done: what is wanted and not there, and what that follows; a fault spreads to those."""
        for name, task in self.tasks.items():
            faults = (self.results.get(one) for one in task.after if one not in self.here)
            fault = next((one for one in faults if isinstance(one, NetkinError)), None)
            if fault is not None and name not in self.results:
                self.results[name] = fault
        needed, unseen = set[str](), [name for name in self.wanted if name not in self.results]
        while unseen:
            name = unseen.pop()
            if name not in self.here and name not in needed and not self._recall(name):
                needed.add(name)
                unseen += self.tasks[name].after
        self.waiting = {name: task for name, task in self.tasks.items() if name in needed}
        needless = [ref for ref, one in self.running.items() if one.task.name not in self.waiting]
        self._end(needless)
        for one in self.running.values():
            self.waiting.pop(one.task.name, None)

    def _recall(self, name: str) -> bool:
        """Return whether the job has a task's result, and take it."""
        part = self.job.find(name) if self.tasks[name].kept and self.keeps else None
        if part is None:
            return False
        if name in self.wanted:
            self.results[name] = dict(part.values), part.arrays
        else:
            self.here[name] = self.cluster.ray.put((dict(part.values), part.arrays))
        return True

    def _start_ready(self) -> bool:
        """Start as many tasks as there is room for, and tell whether some that could be started still wait.

        Those that follow others come first, as they free memory.
        """
        ready = [one for one in self.waiting.values() if all(name in self.here for name in one.after)]
        for gpus in dict.fromkeys(one.gpus for one in ready):
            busy = sum(one.task.gpus == gpus for one in self.running.values())
            mine = sorted((one for one in ready if one.gpus == gpus), key=lambda one: not one.after)
            for task in mine[: max(self.cluster.slots(gpus) - busy, 0)]:
                self._start(self.waiting.pop(task.name))
        if not self.running:
            self.idle += 1
            if self.idle == PATIENCE:
                words = f"no node of the cluster has room for a task, and {len(self.waiting)} wait; {REMEDY}"
                warnings.warn(words, stacklevel=2)
            time.sleep(PAUSE)  # for nodes that come
        return any(one.name in self.waiting for one in ready)

    def _start(self, task: ClusterTask, node: str | None = None) -> None:
        avoided = self.avoided.get(task.name)
        node = next(iter(self.cluster.others(avoided, task.gpus)), None) if avoided and not node else node
        reference, attempt = self.cluster.start(task, [self.here[name] for name in task.after], node)
        self.running[reference] = attempt

    def _take(self, attempt: Attempt, reference: ObjectRef) -> int:
        """Take what a task left, and return how many are done by that: one, or none if it was lost."""
        task, message = attempt.task, None
        try:
            outcome = self.cluster.ray.get(reference)
            if "fault" not in outcome and (task.name in self.wanted or (task.kept and self.keeps)):
                message = self.cluster.ray.get(attempt.message)
        except self.cluster.lost as fault:
            _refuse_other_code(fault)
            return self._lose(task, in_short(fault), inputs=_has_lost_inputs(fault))
        if outcome.get("of_node"):
            return self._lose(task, outcome["fault"][1], node=outcome["node"], model=outcome["model"])
        if "fault" in outcome:
            self._fail(task, worker.as_fault(outcome["fault"], task.name), outcome["model"])
            return 1
        self.seconds.setdefault(task.function, []).append(outcome["seconds"])
        if message is not None and task.kept and self.keeps:
            self.job.keep(task.name, *message, seconds=outcome["seconds"])
        if task.name in self.wanted:
            assert message is not None
            self.results[task.name] = message
            if task.kept:
                self._drop_used(task)
        self.here[task.name] = attempt.message
        self._end([ref for ref, one in self.running.items() if one.task.name == task.name])
        self._release(task)
        return 1

    def _drop_used(self, task: ClusterTask) -> None:
        """Delete the parts that only finished tables needed, as they may be large."""
        left = [one for one in self.wanted if not isinstance(self.results.get(one), tuple)]
        for name in self._behind([task.name]) - self._behind(left) - set(self.wanted):
            self.job.drop(name, counted=True)

    def _behind(self, names: Iterable[str]) -> set[str]:
        """Return all that some tasks follow, directly or not."""
        found, unseen = set[str](), list(names)
        while unseen:
            after = set(self.tasks[unseen.pop()].after) - found
            found |= after
            unseen += after
        return found

    def _release(self, task: ClusterTask) -> None:
        """Forget what only tasks need that are done."""
        open_ = [*self.waiting.values(), *(one.task for one in self.running.values())]
        needed = {name for one in open_ for name in one.after}
        for name in (*task.after, task.name):
            if name not in needed:
                self.here.pop(name, None)

    def _fail(self, task: ClusterTask, fault: NetkinError, model: str | None) -> None:
        """Note a fault of the task itself, which any worker would raise; all tasks that follow it fail too."""
        blame(fault, model)
        self.results[task.name] = fault
        self._plan()

    def _lose(
        self, task: ClusterTask, why: str, node: str | None = None, model: str | None = None, inputs: bool = False
    ) -> int:
        """Note that a task was lost with its worker or node; it waits to be done again, if not too often.

        `node` is to be avoided, `model` could not be read there, and `inputs` says that what it follows is lost too.
        """
        if any(one.task.name == task.name for one in self.running.values()):
            return 0  # on another node it is still being done
        self.losses[task.name] = self.losses.get(task.name, 0) + 1
        if node is not None:
            self.avoided[task.name] = node
        if self.losses[task.name] >= ATTEMPTS:
            self._fail(task, WorkerError(f"{task.name} was lost {ATTEMPTS} times, the last time so: {why}"), model)
            return 1
        for name in task.after if inputs else ():
            self.here.pop(name, None)
        self._plan()
        return 0

    def _copy_stragglers(self) -> None:
        """Start what takes many times longer than others did on other nodes as well; the first to end counts."""
        for attempt in list(self.running.values()):
            task, known = attempt.task, self.seconds.get(attempt.task.function)
            slow = known and time.monotonic() - attempt.begun > max(LEAST, STRAGGLER * median(known))
            if slow and task.name not in self.copied:
                self.copied.add(task.name)
                # where it runs is not known, so that of two other places at least one is another
                for node in self.cluster.others("", task.gpus)[:COPIES]:
                    self._start(task, node)

    def _end(self, references: Sequence[ObjectRef]) -> None:
        self.cluster.end(references)
        for reference in references:
            self.running.pop(reference, None)


def _run(
    function: str, arguments: Mapping[str, Any], call: Mapping[str, Any], *given: Message
) -> tuple[Any, Message | None]:
    """Run a task in a worker of Ray."""
    import ray

    outcome, message = worker.run_task(function, arguments, call, *given)
    return outcome | {"node": ray.get_runtime_context().get_node_id()}, message


def _slots(node: Mapping[str, Any], gpus: float) -> int:
    has = node["Resources"]
    return int(min(has.get("CPU", 0), has.get("GPU", 0) / gpus if gpus else has.get("CPU", 0)))


# --- Ray itself -------------------------------------------------------------------------------------------------------


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


def _has_lost_inputs(fault: Exception) -> bool:
    from ray.exceptions import ObjectLostError

    return isinstance(fault, ObjectLostError) or isinstance(getattr(fault, "cause", None), ObjectLostError)


def _refuse_other_code(fault: Exception) -> None:
    """Refuse a worker that could not find or run the task's own function."""
    from ray.exceptions import RayTaskError

    if isinstance(fault, RayTaskError) and not _has_lost_inputs(fault):
        raise WorkerError(
            f"a worker could not run this netkin: {in_short(fault.cause)} Install netkin {worker.versions()['netkin']} "
            "on all machines."
        ) from fault
