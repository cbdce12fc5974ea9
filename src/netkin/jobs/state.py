"""The state of a job on disk: its progress, whether its process is alive, and the request to cancel it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import FileError, InvalidValue

FORMAT = 1
STATE, LOCK, CANCEL, PARTS = "job.json", "lock", "cancel", "parts"  # what lies in a job's folder
SUFFIX = ".job"  # of the folder beside a result
RESTART = "start again with `overwrite=True`"
WORDS = {"chunks": "`errors`", "measures digest": "the code of its measures"}
OF_MODELS = {"models": "the weights", "weights": "the weights", "architectures": "the architecture"}  # of each model
# 16, 24 or 32 hex digits; without a word before them at least one letter, or 24 digits, else they are a number
_DIGEST = re.compile(
    r"(?:[,;] )?(?:(?:mark |digest )(?:[0-9a-f]{32}|[0-9a-f]{24}|[0-9a-f]{16})"
    r"|(?<![\w.])(?:[0-9a-f]{32}|[0-9a-f]{24}|(?=\d*[a-f])[0-9a-f]{16}))\b"
)
EPOCH = "1970-01-01T00:00:00.000+00:00"
SILENT = 60  # seconds without a heartbeat after which a process on another machine is taken for dead
SILENT_HERE = 600  # the same on this machine, where its number may be that of another process by now


@dataclass(frozen=True)
class State:
    """How far a job has come: so many of the total are done, parts or what else `unit` names.

    `status` is "running", "done", "interrupted", "cancelled" or "failed", as its process wrote it last; `condition` is
    the same but for a process that was killed. `message` is the current work, `error` the reason of a failure;
    `identity` what its parts belong to, and `call` what made it.
    """

    kind: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""
    status: str = "running"
    done: int = 0
    total: int | None = None
    message: str = ""
    error: str = ""
    started: str = ""
    heartbeat: str = ""
    pid: int = 0
    host: str = ""
    folder: str = ""
    unit: str = "parts"

    @property
    def condition(self) -> str:
        """The status, or "killed" where the process that was running is no more."""
        return "killed" if self.status == "running" and not self.is_alive else self.status

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive, by its last heartbeat; on its own machine it must also be there."""
        is_here = self.host == socket.gethostname()
        return _exists(self.pid) and self.age < SILENT_HERE if is_here else self.age < SILENT

    @property
    def age(self) -> float:
        """The seconds since the last heartbeat."""
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.heartbeat)).total_seconds()

    @property
    def progress(self) -> str:
        """How much is done, as text."""
        unit = self.unit.removesuffix("s") if (self.done if self.total is None else self.total) == 1 else self.unit
        return f"{self.done:,}{'' if self.total is None else f' of {self.total:,}'} {unit}"

    def __str__(self) -> str:
        told = {"running": self.message, "failed": self.error, "damaged": self.error}
        said = told.get(self.condition, "")
        return f"{self.folder}: {self.kind}, {self.condition}, {self.progress}{said and f' ({said})'}"


def write(state: State) -> None:
    """Write a state into its job's folder, whole or not at all."""
    header = {name: value for name, value in asdict(state).items() if name != "folder"}
    files.write_text(file := Path(state.folder) / STATE, json.dumps({"format": FORMAT, **header}, indent=1))
    files.restrict(file, Path(state.folder) / PARTS)


def restrict_to_readers(folder: Path) -> None:
    """Let a job's folder and all in it be read by those alone who may read the result beside it, where there is one."""
    result = Path(str(folder).removesuffix(SUFFIX))
    for place in (folder, *folder.rglob("*")) if result.is_file() else ():
        if not place.is_symlink():  # it would be the file elsewhere that changes
            files.restrict(place, result)


def read(path: str | os.PathLike[str]) -> State:
    """Return the state of the job at `path`: its folder, or the result beside which the folder lies.

    Example:
        >>> read("no such job")
        Traceback (most recent call last):
        netkin.errors.FileError: there is no job at 'no such job'; `netkin jobs` lists those below a folder.
    """
    folder = folder_of(path)
    if not (folder / STATE).exists():
        raise FileError(f"there is no job at {str(path)!r}; `netkin jobs` lists those below a folder.")
    file = folder / STATE
    contents = files.read_whole(file)
    with files.damage_reported(file):
        header = json.loads(contents.decode("utf-8"))
        if int(header.pop("format")) > FORMAT:
            raise FileError(f"{str(file)!r} was written by a newer netkin; update with `pip install -U netkin`.")
        return _checked(State(**header, folder=str(folder)))


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a job that is named by it or by the result beside it."""
    given = Path(path)
    return given if (given / STATE).exists() else beside(given)


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


def list_jobs(folder: str | os.PathLike[str] = ".") -> list[State]:
    """Return the states of all jobs in a folder and below, the one with the newest heartbeat first.

    The path of a result stands for the job beside it.
    """
    if not Path(folder).is_dir():
        if (beside(folder) / STATE).exists():
            return [read(folder)]
        what = f"{str(folder)!r} has no job beside it" if Path(folder).exists() else f"there is no {str(folder)!r}"
        raise FileError(f"{what}; name a folder to look for jobs in.")
    return sorted(map(_read_if_whole, _places(Path(folder))), key=lambda state: state.heartbeat, reverse=True)


def _read_if_whole(folder: Path) -> State:
    """Return the state of a job, or, where it can't be read, one that says why, so that others are still listed."""
    try:
        return read(folder)
    except FileError as fault:
        return State("job", status="damaged", error=str(fault), heartbeat=EPOCH, folder=str(folder))


def refuse_other(held: State, asked: State) -> None:
    """Refuse to go on with work of another kind or identity, in a sentence that names what differs."""
    if held.kind != asked.kind:
        raise FileError(
            f"{held.folder!r} holds a {held.kind}, not a {asked.kind}; give another path or delete it, or {RESTART}."
        )
    models = (set(identity.get("models", ())) for identity in (held.identity, asked.identity))
    differing = dict(_differing(held.identity, asked.identity, set.symmetric_difference(*models)))
    if "measures" in differing:
        differing.pop(WORDS["measures digest"], None)
    if differing:
        words = " and ".join(name + _change(*values) for name, values in differing.items())
        redrawn = any(
            "data" in name and not any(one in (None, "none") for one in both) for name, both in differing.items()
        )
        hint = "a loader that shuffles or draws at random gives other data each time; " if redrawn else ""
        raise FileError(
            f"{held.folder!r} holds a {held.kind} that differs in {words}; {hint}ask for the same again, give "
            f"another path or delete it, or {RESTART}."
        )


def _differing(
    held: Mapping[str, Any], asked: Mapping[str, Any], added: Set[str], inside: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs, and how; `inside` a mapping, which may gain entries, only what both have.

    A setting "transform of NAME" must be in both, unless NAME is among the models that were `added`.
    """
    for name in dict.fromkeys([*held, *asked]):
        of = "" if inside in OF_MODELS else name.partition(" of ")[2]
        if inside and not (name in held and name in asked) and (not of or of in added):
            continue
        one, other = held.get(name), asked.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differing(one, other, added, name)
        elif one != other and inside == "architectures":
            from netkin.identity import Form, form_difference  # needs torch, which those who only read jobs do without

            if difference := form_difference(*(Form.from_json(str(form)) for form in (one, other))):
                yield f"{OF_MODELS[inside]} of {name!r}, {difference}", ("", "")
        elif one != other:
            words = f"{OF_MODELS[inside]} of {name!r}" if inside in OF_MODELS else name.removesuffix(" digest")
            yield WORDS.get(name, words), (one, other) if name != "chunks" else (_chunks(one), _chunks(other))


def _chunks(count: Any) -> str:
    return "none" if count == "0" else f"{count} chunks"


def _change(one: Any, other: Any) -> str:
    """Return two values in brackets, without digests, which tell a reader nothing; empty if nothing else is left."""
    shown = [_DIGEST.sub("", value).strip() if isinstance(value, str) else value for value in (one, other)]
    return "" if str(shown[0]) == str(shown[1]) or "" in shown else f" ({shown[0]!r}, not {shown[1]!r})"


def cancel(path: str | os.PathLike[str]) -> State:
    """Request that the job at `path` stops after its current part, and return its state; finished parts are kept."""
    state = read(path)
    if state.condition != "running":
        raise InvalidValue(
            f"{state.folder!r} is {state.condition}, with {state.progress} done; only a running job can be cancelled."
        )
    files.write_text(Path(state.folder) / CANCEL, "")
    return state


def timestamp() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _places(folder: Path) -> Iterator[Path]:
    for place, inner, names in os.walk(folder):
        if STATE in names and PARTS in inner:
            yield Path(place)
            inner.clear()


def _checked(state: State) -> State:
    """Return a state whose fields are of the kinds they should be."""
    kinds: dict[str, Any] = {"done": int, "pid": int, "identity": dict, "total": (int, type(None))}
    for name, value in vars(state).items():
        if not isinstance(value, kinds.get(name, str)):
            raise TypeError(f"`{name}` is of type {type(value).__name__}")
    if not isinstance(state.identity.get("models", {}), Mapping):
        raise TypeError(f"the models of `identity` are of type {type(state.identity['models']).__name__}")
    if datetime.fromisoformat(state.heartbeat).tzinfo is None:
        raise ValueError("`heartbeat` has no time zone")
    if not 0 <= state.pid < 2**31:
        raise ValueError("`pid` is the number of no process")
    return state


def _exists(pid: int) -> bool:
    """Return whether a process is alive; one that was killed and that its parent has not collected yet is not."""
    if pid <= 0:  # those are groups of processes
        return False
    if os.name == "nt":  # there a signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not on Linux
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"
