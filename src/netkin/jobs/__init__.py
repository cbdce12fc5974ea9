"""Jobs: long work in parts, each saved to disk as soon as it is finished, that can be monitored, cancelled and resumed.

A terminal, a notebook and a server read the same state, without torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from netkin import files
from netkin.errors import FileError
from netkin.jobs.parts import Part, Parts, UnwrittenFiles, damaged_part_reported
from netkin.jobs.state import (
    CANCEL,
    LOCK,
    PARTS,
    RESTART,
    STATE,
    State,
    beside,
    cancel,
    list_jobs,
    read,
    refuse_other,
    restrict_to_readers,
    timestamp,
    write,
)
from netkin.progress import also_calling

__all__ = [
    "Cancelled", "Job", "Part", "State", "UnwrittenFiles", "beside", "cancel", "list_jobs", "read", "refuse_other",
]  # fmt: skip

HEARTBEAT = 2.0  # seconds
PATIENCE = 10.0  # seconds; workers of a killed process hold its lock a little longer than it lives

Recalled = TypeVar("Recalled")
Computed = Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


class Cancelled(KeyboardInterrupt):
    """A running job was cancelled; handled like Ctrl-C."""


class Result(Protocol):
    """What a job makes, as a `Comparison`."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None: ...


class Job:
    """One piece of long work, whose finished parts lie in a folder; the same job continues with the parts missing.

    `identity` holds what all parts depend on: digests of weights, data, settings and functions, as texts or numbers by
    name (see `netkin.identity`). Another `kind`, or finished parts of another identity, are refused in a sentence that
    names what differs. Its top-level names are fixed; a value that is a mapping may gain entries, as when models are
    added. What only one part depends on belongs into the part's name.

    While the `with` lasts the folder is locked: another process, or another thread, is refused. A process that was
    killed holds no lock. A cancel request (`netkin jobs cancel`) ends the work at the next part by `Cancelled`, a
    KeyboardInterrupt. Without a folder the parts stay in memory.

    What can't be written, as on a full disk, stays in memory too: the work goes on to its end, where an
    `UnsavedWarning` says which file it was, why, and what is kept. The same job continues from that.

    Args:
        folder: Where the parts are saved; it is created. For the job that makes a result, `Job.beside(path, ...)`.
        kind: The kind of work in one word, as "sweep".
        identity: What all parts depend on.
        call: The call or the command that does it.
        overwrite: Whether another job or result that is there is deleted, and the work starts again.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> def trained(seed):
        ...     print("training", seed)
        ...     return {"accuracy": 0.5 + seed / 10}
        >>> for attempt in range(2):
        ...     with Job(folder, "training", {"data digest": "5c1e", "epochs": 3}) as job:
        ...         job.expect([f"seed {seed}" for seed in range(2)])
        ...         parts = [job.part(f"seed {seed}", lambda seed=seed: trained(seed)) for seed in range(2)]
        training 0
        training 1
        >>> [part.values["accuracy"] for part in parts]
        [0.5, 0.6]
        >>> Job(folder, "training", {"data digest": "77ab", "epochs": 3}).__enter__()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        netkin.errors.FileError: '...' holds a training that differs in data ('5c1e', not '77ab'); ...
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        kind: str,
        identity: Mapping[str, Any],
        *,
        call: str = "",
        overwrite: bool = False,
    ):
        self.overwrite = overwrite
        self.folder = None if folder is None else Path(folder)
        self.result: Path | None = None
        self._state = State(kind, json.loads(json.dumps(identity)), call, folder=str(folder))  # as it will be read
        self._unwritten = UnwrittenFiles()
        self._parts = Parts(None if self.folder is None else self.folder / PARTS, self._unwritten)
        self._expected: set[str] | None = None
        self._finished: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._stack = ExitStack()
        self._last = time.perf_counter()

    @classmethod
    def beside(
        cls, result: str | os.PathLike[str] | None, kind: str, identity: Mapping[str, Any], **options: Any
    ) -> Job:
        """Return the job that makes a result: its folder lies beside it, as ``ab.netkin.job`` beside ``ab.netkin``."""
        made = cls(None if result is None else beside(result), kind, identity, **options)
        made.result = None if result is None else Path(result)
        return made

    @property
    def state(self) -> State:
        """How far the job has come."""
        if self._state.unit != State.unit:
            return self._state
        total = None if self._expected is None else len(self._expected)
        lost = set() if self.folder is None else self._finished & self._parts.held.keys()
        return replace(self._state, done=len(self._finished) - len(lost), total=total)

    @property
    def seconds(self) -> float:
        """How long all parts took that were found or kept, whenever that was."""
        return sum(self._seconds.values())

    def expect(self, names: Iterable[str]) -> None:
        """Declare which parts there will be; those already saved are done."""
        self._expected = set(names)
        self._finished = {name for name in self._expected if self.has(name)}
        self._write()

    def revise(self, name: str, entries: Mapping[str, str]) -> None:
        """Replace entries of a mapping in the identity, as the forms of models that running has told more about."""
        identity = self._state.identity
        self._state = replace(self._state, identity={**identity, name: {**identity[name], **entries}})
        self._write()

    def advance(self, done: int, total: int | None, unit: str) -> None:
        """Report the progress of work without parts, as the "steps" of a training; a request to cancel ends it."""
        # what could not be written is not done for the next call
        self._state = replace(
            self._state, done=self._state.done if self._unwritten.are_needed else done, total=total, unit=unit
        )
        self._write()
        self.check()

    def find(self, name: str) -> Part | None:
        """Return a finished part, or None; a request to cancel ends the work here."""
        self.check()
        if not self.has(name):
            return None
        found = self._parts.read(name)
        self._note(name)
        self._seconds[name] = found.seconds or 0.0
        return found

    def recall(self, name: str, unpack: Callable[[Part], Recalled]) -> Recalled | None:
        """Return what `unpack` makes of a finished part, or None; as in `unpacked`."""
        part = self.find(name)
        return None if part is None else self.unpacked(part, unpack)

    def unpacked(self, part: Part, unpack: Callable[[Part], Recalled]) -> Recalled:
        """Return what `unpack` makes of a part; one that it can't read is refused as damaged."""
        with damaged_part_reported(part.name if self.folder is None else self._parts.path(part.name)):
            return unpack(part)

    def keep(
        self,
        name: str,
        values: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        seconds: float | None = None,
    ) -> Part:
        """Keep a finished part at once, in place of one of the same name; in memory where it can't be written.

        Args:
            name: The unique name of the part.
            values: Texts, finite numbers, lists and mappings.
            arrays: Named arrays.
            seconds: How long it took; by default the time since the last part, or since the job began.
        """
        seconds = time.perf_counter() - self._last if seconds is None else seconds
        self._seconds[name] = seconds
        part = Part(name, dict(values), dict(arrays or {}), seconds, timestamp())
        self._parts.keep(part)
        before = len(self._finished)
        self._note(name)
        if len(self._finished) > before:  # else the next heartbeat is soon enough
            self._write()
        return part

    def part(self, name: str, compute: Callable[[], Computed]) -> Part:
        """Return a part: the finished one, or else what `compute` returns, values or values and arrays, kept."""
        found = self.find(name)
        if found is not None:
            return found
        self._last = time.perf_counter()
        made = compute()
        values, arrays = made if isinstance(made, tuple) else (made, {})
        return self.keep(name, values, arrays)

    def drop(self, name: str, *, counted: bool = False) -> None:
        """Delete a part, such as the state of a finished training; `counted` whether it still counts as done."""
        self._parts.drop(name)
        if not counted:
            self._finished.discard(name)

    def save(self, made: Callable[[], Result]) -> None:
        """Write the result as far as it is `made`, to its path; without one it is not asked for."""
        if self.result is not None:
            result = made()
            with self.writing(self.result):
                result.save(self.result, overwrite=self.overwrite)

    def forget(self) -> None:
        """Let go of what could not be written, since all that was made is kept elsewhere."""
        self._unwritten.faults.clear()
        self._parts.held.clear()

    def writing(self, path: files.Location) -> AbstractContextManager[None]:
        """Inside the `with`, a file that can't be written does not end the work; it is named at the end."""
        return self._unwritten.writing(path)

    def check(self) -> None:
        """Raise `Cancelled` if that was requested; `find` and `part` do so as well."""
        if self.folder is not None and (self.folder / CANCEL).exists():
            self._state = replace(self._state, status="cancelled")
            raise Cancelled(f"cancelled: {self.state.progress} are done in {str(self.folder)!r}.")

    def __enter__(self) -> Job:
        if self.folder is not None:
            try:
                self._open(self.folder)
            except BaseException as fault:
                self._stack.close()
                if isinstance(fault, OSError):
                    raise FileError(f"cannot write {str(self.folder)!r}: {fault.strerror or fault}.") from fault
                raise
        self._last = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.keep_held()
        status, error = self._ending(fault)
        self._state = replace(self._state, status=status, error=error, message="")
        self._stack.close()
        self._unwritten.warn(self.result, self._kept)

    def _open(self, folder: Path) -> None:
        """Take the folder's lock, continue the job in it or begin one, and start the heartbeat."""
        _refuse_no_job(folder)
        self._refuse_result(folder)
        (folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._stack.callback(_locked(folder).release)
        restrict_to_readers(folder)
        self._stop = threading.Event()
        self._clean(folder)
        if (folder / STATE).exists():
            held = read(folder)
            finished = any((folder / PARTS).glob("*.netkin")) or files.is_filled(self.result)
            if finished or held.kind != self._state.kind:  # else there is nothing to lose
                refuse_other(held, self._state)
                self._state = replace(self._state, identity=_merged_identity(held.identity, self._state.identity))
        self._state = replace(self._state, status="running", started=timestamp(), pid=os.getpid(), host=gethostname())
        write(replace(self.state, heartbeat=timestamp()))
        self._stack.callback(self._write)  # the last word
        self._stack.callback(self._withdraw_cancel, folder / CANCEL)
        self._stack.enter_context(also_calling(self._note_progress))
        beating = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat of {folder.name}")
        beating.start()
        self._stack.callback(beating.join)
        self._stack.callback(self._stop.set)

    def _refuse_result(self, folder: Path) -> None:
        """Refuse a result without a place to write it, or one whose parts are missing."""
        if self.result is None:
            return
        if not self.result.parent.is_dir():
            raise FileError(f"cannot write {str(self.result)!r}: there is no folder {str(self.result.parent)!r}.")
        if self.result.exists() and not self.result.is_file():
            raise FileError(f"cannot write {str(self.result)!r}: it is no ordinary file.")
        if files.is_filled(self.result) and not (self.overwrite or (folder / STATE).exists()):
            raise FileError(
                f"{str(self.result)!r} is there, and the parts it was made from are not in {str(folder)!r}; give "
                f"another path or delete it, or {RESTART}."
            )

    def _clean(self, folder: Path) -> None:
        """Remove what killed processes left, and with `overwrite` all that was finished."""
        for place in (folder, folder / PARTS, *filter(None, [self.result])):
            files.remove_unfinished(place)
        (folder / CANCEL).unlink(missing_ok=True)
        parts = list((folder / PARTS).glob("*.netkin"))
        if self.overwrite:  # the state last, so that no parts are left without one
            files.empty(self.result)
            for old in (*parts, folder / STATE):
                old.unlink(missing_ok=True)
        elif parts and not (folder / STATE).exists():
            raise FileError(f"{str(folder)!r} holds parts of a job without its {STATE}; delete it, or {RESTART}.")

    def _ending(self, fault: BaseException | None) -> tuple[str, str]:
        if self._state.status == "cancelled":
            return "cancelled", ""
        if fault is None and self._unwritten.are_needed:
            return "failed", self._unwritten.sentence(self.result, self._kept)
        if isinstance(fault, KeyboardInterrupt) or (fault is None and self.state.done < (self.state.total or 0)):
            return "interrupted", ""
        return ("done", "") if fault is None else ("failed", f"{type(fault).__name__}: {fault}")

    @property
    def _kept(self) -> str:
        return f"what is kept ({self.state.progress}) is continued by the same call"

    def _withdraw_cancel(self, request: Path) -> None:
        with self.writing(request):
            files.remove(request)

    def _note_progress(self, done: int, total: int | None, what: str, unit: str) -> None:
        # written by the next heartbeat
        counted = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
        self._state = replace(self._state, message=f"{what}: {counted}")

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            self._write()

    def _write(self) -> None:
        if self.folder is None:
            return
        with self._writing, self.writing(self.folder / STATE):
            write(replace(self.state, heartbeat=timestamp()))

    def _note(self, name: str) -> None:
        self._last = time.perf_counter()
        if self._expected is None or name in self._expected:
            self._finished.add(name)

    def has(self, name: str) -> bool:
        """Return whether a part is finished."""
        return self._parts.has(name)


def _locked(folder: Path) -> FileLock:
    """Return the lock of a folder, taken; a folder that another process works on is refused."""
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _wait_if_killed(lock, folder)
    return lock


def _wait_if_killed(lock: FileLock, folder: Path) -> None:
    """Wait for a lock that workers of a killed process hold a little longer; refuse that of a living one."""
    owner = read(folder) if (folder / STATE).exists() else None
    try:
        lock.acquire(timeout=PATIENCE if owner is not None and owner.condition == "killed" else 0)
    except Timeout:
        who = "" if owner is None else f" ({owner.pid} on {owner.host}, {owner.progress} done)"
        raise FileError(
            f"{str(folder)!r} is being worked on by another process{who}; wait for it, watch it by "
            f"`netkin jobs watch {folder}`, or give another path."
        ) from None


def _refuse_no_job(folder: Path) -> None:
    if not folder.exists() or (folder / STATE).exists():
        return
    strange = next((one for one in os.listdir(folder) if one not in (LOCK, PARTS) and not one.startswith(".")), None)
    if strange is not None:
        raise FileError(f"{str(folder)!r} holds {strange!r} and no job; give a new or an empty folder.")


def _merged_identity(held: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: held[name] | {key: one for key, one in value.items() if key not in held[name]}
        if isinstance(value, Mapping)
        else held[name]
        for name, value in asked.items()
    }
