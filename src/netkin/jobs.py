"""Jobs: long work in parts, each saved to disk as soon as it is finished, that can be monitored, cancelled and resumed.

A terminal, a notebook and a server read the same state, without torch.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from hashlib import blake2b
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from filelock import FileLock, Timeout

from netkin import files
from netkin.errors import FileError, InvalidValue, UnsavedWarning, outside
from netkin.progress import also_calling

FORMAT = 2
STATE, LOCK, CANCEL, PARTS = "job.json", "lock", "cancel", "parts"  # what lies in a job's folder
SUFFIX = ".job"  # of the folder beside a result
HEARTBEAT = 2.0  # seconds
SILENT = 60  # seconds without a heartbeat after which a process is taken for dead
PATIENCE = 10.0  # seconds; workers of a killed process hold its lock a little longer than it lives
RESTART = "start again with `overwrite=True`"
AGAIN = "delete this file and repeat the call, which computes the part again"
# digests tell a reader nothing; 16 hexadecimal digits or more, a letter among them, that are not part of a number
_DIGEST = re.compile(r"(?:[,;] )?(?:mark |digest )?(?<![\w.])(?=\d*[a-f])[0-9a-f]{16,}\b")

Unpacked = TypeVar("Unpacked")
Computed = Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, np.ndarray]]
Identity = Mapping[str, Any]
Compare = Callable[[Any, Any], str]  # of a field, as it was and as it is; returns how they differ, "" if they do not


class Cancelled(KeyboardInterrupt):
    """A running job was cancelled; handled like Ctrl-C."""


@dataclass(frozen=True)
class Part:
    """A finished part: its values, for JSON, its arrays, and how many seconds it took when it was computed."""

    name: str
    values: Mapping[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class State:
    """How far a job has come: so many of the total are done, parts or what else `unit` names.

    `status` is "running", "done", "interrupted", "cancelled" or "failed", as its process wrote it last; `condition` is
    the same but for a process that was killed. `message` is the current work, `error` the reason of a failure;
    `identity` what its parts belong to, and `call` what made it. `heartbeat` is when the state was written, at least
    every two seconds while its process lives.
    """

    kind: str
    identity: Identity = field(default_factory=dict)
    call: str = ""
    status: str = "running"
    done: int = 0
    total: int | None = None
    unit: str = "parts"
    message: str = ""
    error: str = ""
    heartbeat: str = "1970-01-01T00:00:00.000+00:00"
    pid: int = 0
    host: str = ""
    folder: str = ""

    @property
    def condition(self) -> str:
        """The status, or "killed" where the process that was running is no more."""
        age = datetime.now(timezone.utc) - datetime.fromisoformat(self.heartbeat)
        is_alive = age.total_seconds() < SILENT and (self.host != gethostname() or _is_running(self.pid))
        return "killed" if self.status == "running" and not is_alive else self.status

    @property
    def progress(self) -> str:
        """How much is done, as text."""
        unit = self.unit.removesuffix("s") if (self.done if self.total is None else self.total) == 1 else self.unit
        return f"{self.done:,}{'' if self.total is None else f' of {self.total:,}'} {unit}"

    def __str__(self) -> str:
        condition = self.condition
        reason = {"running": self.message, "failed": self.error, "damaged": self.error}.get(condition, "")
        return f"{self.folder}: {self.kind}, {condition}, {self.progress}{reason and f' ({reason})'}"


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
        identity: Identity,
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
        self._counts_parts = True  # or what `advance` reports
        self._expected: set[str] | None = None
        self._finished: set[str] = set()
        self._writing_state = threading.Lock()  # the heartbeat does it, too
        self._stack = ExitStack()
        self._last = time.perf_counter()  # when the last part was finished

    @classmethod
    def beside(cls, result: str | os.PathLike[str] | None, kind: str, identity: Identity, **options: Any) -> Job:
        """Return the job that makes a result: its folder lies beside it, as ``ab.netkin.job`` beside ``ab.netkin``."""
        job = cls(None if result is None else beside(result), kind, identity, **options)
        job.result = None if result is None else Path(result)
        return job

    # --- its parts ----------------------------------------------------------------------------------------------------

    def expect(self, names: Iterable[str], unit: str = "parts") -> None:
        """Declare which parts there will be, and what they are, as "rounds"; those already saved are done."""
        self._state = replace(self._state, unit=unit)
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

    def recall(self, name: str, unpack: Callable[[Part], Unpacked]) -> Unpacked | None:
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

    def is_written(self, name: str) -> bool:
        """Return whether a part lies in the folder as it was kept last."""
        return name not in self._in_memory and self.has(name)

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

    def save(self, make_result: Callable[[], Any]) -> None:
        """Write the result as far as it is made, to its path; without one it is not made."""
        if self.result is not None:
            result = make_result()
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
        if not self._counts_parts:
            return self._state
        total = None if self._expected is None else len(self._expected)
        lost = set() if self.folder is None else self._finished & self._in_memory.keys()
        return replace(self._state, done=len(self._finished) - len(lost), total=total)

    def advance(self, done: int, total: int | None, unit: str) -> None:
        """Report the progress of work without parts, as the "steps" of a training; a request to cancel ends it."""
        self._counts_parts = False
        done = self._state.done if self._lacks_results else done  # for the next call
        self._state = replace(self._state, done=done, total=total, unit=unit)
        self._write_state()
        self.check()

    def check(self) -> None:
        """Raise `Cancelled` if that was requested; `find` and `part` do so as well."""
        if self.folder is not None and (self.folder / CANCEL).exists():
            self._state = replace(self._state, status="cancelled")
            raise Cancelled(f"cancelled: {self.state.progress} are done in {str(self.folder)!r}.")

    def note_state(self, field: str, model: str, names: Iterable[str]) -> None:
        """Record which attributes of a model were seen to change when it ran, for the function that compares the field.

        They are kept under "state" in the model's entry of the field, its form.
        """
        form = self._state.identity[field][model]
        form["state"] = sorted({*form.get("state", ()), *names})
        self._write_state()

    def _write_state(self) -> None:
        if self.folder is not None:
            with self._writing_state, self.writing(self.folder / STATE):
                _write(self.state)

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
        require_output(self.result, overwrite=self.overwrite)
        (folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._stack.callback(_take_lock(folder).release)
        for place in (folder, folder / PARTS, *filter(None, [self.result])):
            files.remove_unfinished(place)
        (folder / CANCEL).unlink(missing_ok=True)
        if self.result is not None:  # those who may not read the result may not read its parts
            files.restrict(folder, self.result)
        self._continue_or_begin(folder)
        self._state = replace(self._state, status="running", pid=os.getpid(), host=gethostname())
        _write(self.state)
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT):
                self._write_state()

        def withdraw_cancel() -> None:
            with self.writing(folder / CANCEL):
                files.remove(folder / CANCEL)

        def note_progress(done: int, total: int | None, what: str, unit: str) -> None:  # the next heartbeat writes it
            counted = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
            self._state = replace(self._state, message=f"{what}: {counted}")

        heartbeat = threading.Thread(target=beat, daemon=True, name=f"heartbeat of {folder.name}")
        heartbeat.start()
        for at_the_end in (self._write_state, withdraw_cancel, heartbeat.join, stop.set):  # the last of them first
            self._stack.callback(at_the_end)
        self._stack.enter_context(also_calling(note_progress))

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
                    require_same_work(held, self._state, self.compare)
                merged = {
                    name: {**value, **held.identity[name]} if isinstance(value, Mapping) else value
                    for name, value in self._state.identity.items()
                }
                self._state = replace(self._state, identity=merged)
        elif parts:
            raise FileError(f"{str(folder)!r} holds parts of a job without its {STATE}; delete it, or {RESTART}.")

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


def _take_lock(folder: Path) -> FileLock:
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


# --- jobs of other processes ------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> State:
    """Return the state of the job at `path`: its folder, or the result beside which the folder lies.

    Example:
        >>> read("no such job")
        Traceback (most recent call last):
        netkin.errors.FileError: there is no job at 'no such job'; `netkin jobs list` lists those below a folder.
    """
    folder = Path(path) if (Path(path) / STATE).exists() else beside(path)
    if not (folder / STATE).exists():
        raise FileError(f"there is no job at {str(path)!r}; `netkin jobs list` lists those below a folder.")
    content = files.read_json(folder / STATE)
    with files.damage_reported(folder / STATE):
        files.require_format(folder / STATE, content.pop("format"), FORMAT)
        state = State(**content, folder=str(folder))
        str(state)  # whatever a listing asks of it must be there
        return state


def _write(state: State) -> None:
    """Write a state, as of now, into its job's folder."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    header = {"format": FORMAT, **asdict(state), "heartbeat": now}
    del header["folder"]
    files.write_text(Path(state.folder) / STATE, json.dumps(header, indent=1), overwrite=True)


def list_jobs(folder: str | os.PathLike[str] = ".") -> list[State]:
    """Return the states of all jobs in a folder and below, the one with the newest heartbeat first.

    The path of a result stands for the job beside it. A job that can't be read is listed as "damaged", with the reason.
    """
    if not Path(folder).is_dir():
        return [read(folder)]
    states = []
    for place in Path(folder).rglob(STATE):
        if (place.parent / PARTS).is_dir():
            try:
                states.append(read(place.parent))
            except FileError as fault:
                states.append(State("job", status="damaged", error=str(fault), folder=str(place.parent)))
    return sorted(states, key=lambda state: state.heartbeat, reverse=True)


def cancel(path: str | os.PathLike[str]) -> State:
    """Request that the job at `path` stops after its current part, and return its state; finished parts are kept."""
    state = read(path)
    if state.condition != "running":
        raise InvalidValue(
            f"{state.folder!r} is {state.condition}, with {state.progress} done; only a running job can be cancelled."
        )
    files.write_text(Path(state.folder) / CANCEL, "", overwrite=True)
    return state


def beside(result: str | os.PathLike[str]) -> Path:
    """Return the folder of the job that makes the result at a path.

    Example:
        >>> beside("ab.netkin").name
        'ab.netkin.job'
    """
    result = Path(result)
    if not result.name:
        raise FileError(f"a result is saved in a file; got the path {str(result)!r}, which names none.")
    return result.with_name(result.name + SUFFIX)


def require_output(result: str | os.PathLike[str] | None, *, overwrite: bool = False, option: str = "") -> None:
    """Refuse, before any work, a result that can't be written, or that is there without the job that made it."""
    if result is not None:
        files.require_output(result, overwrite=overwrite or (beside(result) / STATE).exists(), option=option)


def require_same_work(held: State, current: State, compare: Mapping[str, Compare] | None = None) -> None:
    """Refuse to go on with work of another kind or identity, in a sentence that names what differs.

    Fields are equal, or what `compare` has for them finds no difference; those that are mappings, as of models by name,
    may have gained or lost entries.
    """
    if held.kind != current.kind:
        raise FileError(
            f"{held.folder!r} holds a {held.kind}, not a {current.kind}; give another path or delete it, or {RESTART}.",
            argument="overwrite",
        )
    differing, is_redrawn = list[str](), False
    for name in dict.fromkeys([*held.identity, *current.identity]):
        before, now = held.identity.get(name), current.identity.get(name)
        if compare and name in compare:
            if difference := compare[name](before, now):
                differing.append(f"{name} ({difference})")
        elif isinstance(before, Mapping) and isinstance(now, Mapping):
            keys = [key for key in before if key in now and before[key] != now[key]]
            differing += [f"{name} of {key!r}{_describe_change(before[key], now[key])}" for key in keys]
        elif before != now:
            differing.append(name.removesuffix(" digest") + _describe_change(before, now))
            is_redrawn |= "data" in name and not {before, now} & {None, "none"}
    if differing:
        hint = "a loader that shuffles or draws at random gives other data each time; " if is_redrawn else ""
        raise FileError(
            f"{held.folder!r} holds a {held.kind} that differs in {' and '.join(differing)}; {hint}ask for the same "
            f"again, give another path or delete it, or {RESTART}.",
            argument="overwrite",
        )


def _describe_change(before: Any, now: Any) -> str:
    """Return two values in brackets, without digests; empty if nothing else is left."""
    shown = [_DIGEST.sub("", value).strip() if isinstance(value, str) else value for value in (before, now)]
    return "" if str(shown[0]) == str(shown[1]) or "" in shown else f" ({shown[0]!r}, not {shown[1]!r})"


def _is_running(pid: int) -> bool:
    """Return whether there is a process of that number on this machine."""
    if pid <= 0 or os.name == "nt":  # those are groups of processes; there a signal 0 would end the process
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True
