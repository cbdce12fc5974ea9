"""Jobs: long work in parts, each saved to disk as soon as it is finished, that can be monitored, cancelled and resumed.

A terminal, a notebook and a server read the same state, without torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from filelock import FileLock, Timeout

from netkin import files
from netkin.errors import FileError, UnsavedWarning, outside
from netkin.jobs.state import (
    CANCEL,
    LOCK,
    PARTS,
    RESTART,
    STATE,
    Compare,
    State,
    beside,
    cancel,
    list_jobs,
    read,
    refuse_other,
    refuse_output,
    write,
)
from netkin.progress import also_calling

__all__ = [
    "Cancelled", "Job", "Part", "State", "beside", "cancel", "list_jobs", "read", "refuse_other", "refuse_output",
]  # fmt: skip

HEARTBEAT = 2.0  # seconds
PATIENCE = 10.0  # seconds; workers of a killed process hold its lock a little longer than it lives
AGAIN = "delete this file and repeat the call, which computes the part again"

Recalled = TypeVar("Recalled")
Computed = Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


class Cancelled(KeyboardInterrupt):
    """A running job was cancelled; handled like Ctrl-C."""


@dataclass(frozen=True)
class Part:
    """A finished part: its values, for JSON, its arrays, and how many seconds it took when it was computed."""

    name: str
    values: Mapping[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


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
        compare: For a field of the identity that equality does not serve, the function that compares it: from the value
            of the job that is there and that of this one it returns how they differ in words, empty if they do not.

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
        compare: Mapping[str, Compare] | None = None,
    ):
        self.folder, self.overwrite, self.compare = None if folder is None else Path(folder), overwrite, compare
        self.result: Path | None = None
        self._state = State(kind, json.loads(json.dumps(identity)), call, folder=str(folder))  # as it will be read
        self._in_memory: dict[str, Part] = {}  # all without a folder, else those that could not be written
        self._unwritten: dict[str, FileError] = {}  # by the path of what could not be written
        self._expected: set[str] | None = None
        self._finished: set[str] = set()
        self._writing_state = threading.Lock()  # the heartbeat does it, too
        self._stack = ExitStack()
        self._last = time.perf_counter()  # when the last part was finished

    @classmethod
    def beside(
        cls, result: str | os.PathLike[str] | None, kind: str, identity: Mapping[str, Any], **options: Any
    ) -> Job:
        """Return the job that makes a result: its folder lies beside it, as ``ab.netkin.job`` beside ``ab.netkin``."""
        job = cls(None if result is None else beside(result), kind, identity, **options)
        job.result = None if result is None else Path(result)
        return job

    # --- its parts ----------------------------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """Declare which parts there will be; those already saved are done."""
        self._expected = set(names)
        self._finished = {name for name in self._expected if self.has(name)}
        self._write_state()

    def find(self, name: str) -> Part | None:
        """Return a finished part, or None; a request to cancel ends the work here."""
        self.check()
        if not self.has(name):
            return None
        part = self._in_memory.get(name) or self._read(name)
        self._count(name)
        return part

    def recall(self, name: str, unpack: Callable[[Part], Recalled]) -> Recalled | None:
        """Return what `unpack` makes of a finished part, or None; one that it can't read is refused as damaged."""
        part = self.find(name)
        with files.damage_reported(name if self.folder is None else self._path(name), AGAIN):
            return None if part is None else unpack(part)

    def part(self, name: str, compute: Callable[[], Computed]) -> Part:
        """Return a part: the finished one, or else what `compute` returns, values or values and arrays, kept."""
        part = self.find(name)
        if part is not None:
            return part
        self._last = time.perf_counter()
        computed = compute()
        values, arrays = computed if isinstance(computed, tuple) else (computed, {})
        return self.keep(name, values, arrays)

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
        part = Part(name, dict(values), dict(arrays or {}), seconds)
        self._save_part(part)
        before = len(self._finished)
        self._count(name)
        if len(self._finished) > before:  # else the next heartbeat is soon enough
            self._write_state()
        return part

    def drop(self, name: str, *, counted: bool = False) -> None:
        """Delete a part, such as the state of a finished training; `counted` whether it still counts as done."""
        self._in_memory.pop(name, None)
        # while others can't be written its file stays, from which they can be made again
        if self.folder is not None and not self._in_memory:
            with self.writing(self._path(name)):
                files.remove(self._path(name))
        if not counted:
            self._finished.discard(name)

    def has(self, name: str) -> bool:
        """Return whether a part is finished."""
        return name in self._in_memory or (self.folder is not None and self._path(name).exists())

    def _read(self, name: str) -> Part:
        header, arrays = files.read(path := self._path(name), "part", AGAIN)
        with files.damage_reported(path, AGAIN):
            return Part(header["name"], header["values"], arrays, header["seconds"])

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        written = quote(name.lower(), safe=" ,=()'+@")[:100]
        if written != name:  # which any file system takes, also one where case does not count
            written += f" {blake2b(name.encode(), digest_size=8).hexdigest()}"
        return self.folder / PARTS / f"{written}.netkin"

    def _save_part(self, part: Part) -> None:
        self._in_memory[part.name] = part
        if self.folder is not None:
            with self.writing(path := self._path(part.name)):
                header = {"name": part.name, "values": part.values, "seconds": part.seconds}
                files.write(path, "part", header, part.arrays, overwrite=True)
                del self._in_memory[part.name]

    def _count(self, name: str) -> None:
        self._last = time.perf_counter()
        if self._expected is None or name in self._expected:
            self._finished.add(name)

    # --- its result and its state -------------------------------------------------------------------------------------

    def save(self, made: Callable[[], Any]) -> None:
        """Write the result as far as it is `made`, to its path; without one it is not asked for."""
        if self.result is not None:
            result = made()
            with self.writing(self.result):
                result.save(self.result, overwrite=True)  # what may not be written over was refused before the work

    @contextmanager
    def writing(self, path: files.Location) -> Iterator[None]:
        """Inside the `with`, a file that can't be written does not end the work; it is named at the end."""
        try:
            yield
        except FileError as fault:
            self._unwritten[str(path)] = fault
        else:
            self._unwritten.pop(str(path), None)

    def forget(self) -> None:
        """Let go of what could not be written, since all that was made is kept elsewhere."""
        self._unwritten.clear()
        self._in_memory.clear()

    @property
    def state(self) -> State:
        """How far the job has come."""
        if self._state.unit != State.unit:
            return self._state
        total = None if self._expected is None else len(self._expected)
        lost = set() if self.folder is None else self._finished & self._in_memory.keys()
        return replace(self._state, done=len(self._finished) - len(lost), total=total)

    def advance(self, done: int, total: int | None, unit: str) -> None:
        """Report the progress of work without parts, as the "steps" of a training; a request to cancel ends it."""
        done = self._state.done if self._lacks_results else done  # for the next call
        self._state = replace(self._state, done=done, total=total, unit=unit)
        self._write_state()
        self.check()

    def check(self) -> None:
        """Raise `Cancelled` if that was requested; `find` and `part` do so as well."""
        if self.folder is not None and (self.folder / CANCEL).exists():
            self._state = replace(self._state, status="cancelled")
            raise Cancelled(f"cancelled: {self.state.progress} are done in {str(self.folder)!r}.")

    def note_state(self, field: str, names: Iterable[str], of: str | None = None) -> None:
        """Record which attributes of a model were seen to change when it ran, for the function that compares the field.

        They are kept in the job under "state" in the form of the model, which is the value of the field, or its entry
        `of` that name.
        """
        form = self._state.identity[field] if of is None else self._state.identity[field][of]
        form["state"] = sorted({*form.get("state", ()), *names})
        self._write_state()

    def _write_state(self) -> None:
        if self.folder is not None:
            with self._writing_state, self.writing(self.folder / STATE):
                write(self.state)

    # --- while it is open ---------------------------------------------------------------------------------------------

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

    def _open(self, folder: Path) -> None:
        """Take the folder's lock, continue the job in it or begin one, and start the heartbeat."""
        refuse_output(self.result, overwrite=self.overwrite)
        (folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._stack.callback(_locked(folder).release)
        for place in (folder, folder / PARTS, *filter(None, [self.result])):
            files.remove_unfinished(place)
        (folder / CANCEL).unlink(missing_ok=True)
        if self.result is not None:  # those who may not read the result may not read its parts
            files.restrict(folder, self.result)
        self._continue_or_begin(folder)
        self._state = replace(self._state, status="running", pid=os.getpid(), host=gethostname())
        write(self.state)
        self._stack.callback(self._write_state)  # the last word
        self._stack.callback(self._withdraw_cancel, folder / CANCEL)
        self._stack.enter_context(also_calling(self._note_progress))
        stop = threading.Event()
        heartbeat = threading.Thread(target=self._beat, args=[stop], daemon=True, name=f"heartbeat of {folder.name}")
        heartbeat.start()
        self._stack.callback(heartbeat.join)
        self._stack.callback(stop.set)

    def _continue_or_begin(self, folder: Path) -> None:
        """Refuse parts of another job, or with `overwrite` delete them; take over what was noted of the same job."""
        parts = list((folder / PARTS).glob("*.netkin"))
        if self.overwrite:
            for old in (*parts, folder / STATE):  # the state last, so that no parts are left without one
                old.unlink(missing_ok=True)
        elif (folder / STATE).exists():
            held = read(folder)
            if parts or files.is_filled(self.result) or held.kind != self._state.kind:  # else there is nothing to lose
                with files.damage_reported(folder / STATE):  # what is compared may be of any kind where it was harmed
                    refuse_other(held, self._state, self.compare)
                merged = {
                    name: {**value, **held.identity[name]} if isinstance(value, Mapping) else value
                    for name, value in self._state.identity.items()
                }
                self._state = replace(self._state, identity=merged)
        elif parts:
            raise FileError(f"{str(folder)!r} holds parts of a job without its {STATE}; delete it, or {RESTART}.")

    def _withdraw_cancel(self, request: Path) -> None:
        with self.writing(request):
            files.remove(request)

    def _note_progress(self, done: int, total: int | None, what: str, unit: str) -> None:
        # written by the next heartbeat
        counted = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
        self._state = replace(self._state, message=f"{what}: {counted}")

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT):
            self._write_state()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:  # there may be room by now
            for part in list(self._in_memory.values()):
                self._save_part(part)
        status, error = "done", ""
        if self._state.status == "cancelled":
            status = "cancelled"
        elif fault is None and self._lacks_results:
            status, error = "failed", self._unsaved
        elif isinstance(fault, KeyboardInterrupt) or (fault is None and self.state.done < (self.state.total or 0)):
            status = "interrupted"
        elif fault is not None:
            words = f"{type(fault).__name__}: {fault}"
            status, error = "failed", words.encode("utf-8", "backslashreplace").decode()
        self._state = replace(self._state, status=status, error=error, message="")
        self._stack.close()
        if self._unwritten:
            warnings.warn(self._unsaved, UnsavedWarning, stacklevel=outside())

    @property
    def _lacks_results(self) -> bool:
        """Whether results could not be written; the state, which is written again and again, holds none."""
        return any(Path(path).name != STATE for path in list(self._unwritten))

    @property
    def _unsaved(self) -> str:
        """Which file could not be written, the result before others, and what is kept."""
        first = min(self._unwritten, key=lambda path: (path != str(self.result), Path(path).name == STATE))
        words = str(self._unwritten[first]).removesuffix(".")
        return f"{words}; what is kept ({self.state.progress}) is continued by the same call."


def _locked(folder: Path) -> FileLock:
    """Return the lock of a folder, taken; a folder that another process works on is refused."""
    lock = FileLock(folder / LOCK, thread_local=False)
    owner = read(folder) if (folder / STATE).exists() else None
    try:
        lock.acquire(timeout=PATIENCE if owner is not None and owner.condition == "killed" else 0)
    except Timeout:
        who = "" if owner is None else f" ({owner.pid} on {owner.host}, {owner.progress} done)"
        raise FileError(
            f"{str(folder)!r} is being worked on by another process{who}; wait for it, watch it by "
            f"`netkin jobs watch {folder}`, or give another path."
        ) from None
    return lock
