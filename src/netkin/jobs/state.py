"""The state of a job on disk: its progress, whether its process is alive, and the request to cancel it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import FileError, InvalidValue

FORMAT = 2
STATE, LOCK, CANCEL, PARTS = "job.json", "lock", "cancel", "parts"  # what lies in a job's folder
SUFFIX = ".job"  # of the folder beside a result
RESTART = "start again with `overwrite=True`"
EPOCH = "1970-01-01T00:00:00.000+00:00"
SILENT = 60  # seconds without a heartbeat after which a process is taken for dead
# digests tell a reader nothing; 16 hexadecimal digits or more, a letter among them, that are not part of a number
_DIGEST = re.compile(r"(?:[,;] )?(?:mark |digest )?(?<![\w.])(?=\d*[a-f])[0-9a-f]{16,}\b")

Identity = Mapping[str, Any]
Compare = Callable[[Any, Any], str]  # of a field, as it was and as it is; returns how they differ, "" if they do not


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
    heartbeat: str = EPOCH
    pid: int = 0
    host: str = ""
    folder: str = ""

    @property
    def condition(self) -> str:
        """The status, or "killed" where the process that was running is no more."""
        return "killed" if self.status == "running" and not self._is_alive else self.status

    @property
    def _is_alive(self) -> bool:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(self.heartbeat)
        return age.total_seconds() < SILENT and (self.host != socket.gethostname() or _exists(self.pid))

    @property
    def progress(self) -> str:
        """How much is done, as text."""
        unit = self.unit.removesuffix("s") if (self.done if self.total is None else self.total) == 1 else self.unit
        return f"{self.done:,}{'' if self.total is None else f' of {self.total:,}'} {unit}"

    def __str__(self) -> str:
        said = {"running": self.message, "failed": self.error, "damaged": self.error}.get(self.condition, "")
        return f"{self.folder}: {self.kind}, {self.condition}, {self.progress}{said and f' ({said})'}"


def write(state: State) -> None:
    """Write a state, as of now, into its job's folder."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    header = {"format": FORMAT, **asdict(state), "heartbeat": now}
    del header["folder"]
    files.write_text(Path(state.folder) / STATE, json.dumps(header, indent=1), overwrite=True)


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


def refuse_output(result: str | os.PathLike[str] | None, *, overwrite: bool = False, option: str = "") -> None:
    """Refuse, before any work, a result that can't be written, or that is there without the job that made it."""
    if result is not None:
        files.refuse_output(result, overwrite=overwrite or (beside(result) / STATE).exists(), option=option)


def list_jobs(folder: str | os.PathLike[str] = ".") -> list[State]:
    """Return the states of all jobs in a folder and below, the one with the newest heartbeat first.

    The path of a result stands for the job beside it.
    """
    if not Path(folder).is_dir():
        return [read(folder)]
    return sorted(map(_read_if_whole, _folders_below(Path(folder))), key=lambda state: state.heartbeat, reverse=True)


def _folders_below(folder: Path) -> Iterator[Path]:
    for place, inner, names in os.walk(folder):
        if STATE in names and PARTS in inner:
            yield Path(place)
            inner.clear()


def _read_if_whole(folder: Path) -> State:
    """Return the state of a job, or, where it can't be read, one that says why, so that others are still listed."""
    try:
        return read(folder)
    except FileError as fault:
        return State("job", status="damaged", error=str(fault), folder=str(folder))


def cancel(path: str | os.PathLike[str]) -> State:
    """Request that the job at `path` stops after its current part, and return its state; finished parts are kept."""
    state = read(path)
    if state.condition != "running":
        raise InvalidValue(
            f"{state.folder!r} is {state.condition}, with {state.progress} done; only a running job can be cancelled."
        )
    files.write_text(Path(state.folder) / CANCEL, "", overwrite=True)
    return state


def refuse_other(held: State, asked: State, compare: Mapping[str, Compare] | None = None) -> None:
    """Refuse to go on with work of another kind or identity, in a sentence that names what differs.

    Fields are equal, or what `compare` has for them finds no difference; those that are mappings, as of models by name,
    may have gained or lost entries.
    """
    if held.kind != asked.kind:
        raise FileError(
            f"{held.folder!r} holds a {held.kind}, not a {asked.kind}; give another path or delete it, or {RESTART}.",
            argument="overwrite",
        )
    differing = list(_differing(held.identity, asked.identity, compare or {}))
    if differing:
        data = ({held.identity.get(name), asked.identity.get(name)} for name in held.identity if "data" in name)
        redrawn = any(len(one) > 1 and not one & {None, "none"} for one in data)
        hint = "a loader that shuffles or draws at random gives other data each time; " if redrawn else ""
        raise FileError(
            f"{held.folder!r} holds a {held.kind} that differs in {' and '.join(differing)}; {hint}ask for the same "
            f"again, give another path or delete it, or {RESTART}.",
            argument="overwrite",
        )


def _differing(held: Identity, asked: Identity, compare: Mapping[str, Compare]) -> Iterator[str]:
    for name in dict.fromkeys([*held, *asked]):
        before, now = held.get(name), asked.get(name)
        if name in compare:
            if difference := compare[name](before, now):
                yield f"{name} ({difference})"
        elif isinstance(before, Mapping) and isinstance(now, Mapping):
            both = [key for key in before if key in now and before[key] != now[key]]
            yield from (f"{name} of {key!r}{_change(before[key], now[key])}" for key in both)
        elif before != now:
            yield name.removesuffix(" digest") + _change(before, now)


def _change(before: Any, now: Any) -> str:
    """Return two values in brackets, without digests; empty if nothing else is left."""
    shown = [_DIGEST.sub("", value).strip() if isinstance(value, str) else value for value in (before, now)]
    return "" if str(shown[0]) == str(shown[1]) or "" in shown else f" ({shown[0]!r}, not {shown[1]!r})"


def _exists(pid: int) -> bool:
    """Return whether there is a process of that number on this machine."""
    if pid <= 0 or os.name == "nt":  # those are groups of processes; there a signal 0 would end the process
        return pid > 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
