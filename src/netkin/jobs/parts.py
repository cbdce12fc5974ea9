"""The finished parts of a job: files in its folder, or in memory where there is none or where they can't be written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from netkin import files
from netkin.errors import FileError, UnsavedWarning, outside
from netkin.jobs.state import STATE

LONGEST = 100  # characters of a part's name that its file's name shows


@dataclass(frozen=True)
class Part:
    """A finished part: its values, for JSON, its arrays, and how many seconds it took when it was computed."""

    name: str
    values: Mapping[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float | None = None
    created: str = ""


class UnwrittenFiles:
    """Files that could not be written, as on a full disk: the work goes on, and they are named when it is done."""

    def __init__(self) -> None:
        self.faults: dict[str, FileError] = {}

    @contextmanager
    def writing(self, path: files.Location) -> Iterator[None]:
        """Inside the `with`, a file that can't be written is noted; one that is written later is forgotten."""
        try:
            yield
        except FileError as fault:
            self.faults[str(path)] = fault
        else:
            self.faults.pop(str(path), None)

    @property
    def are_needed(self) -> bool:
        """Whether any of them holds results; the state of a job, which is written again and again, does not."""
        return any(Path(path).name != STATE for path in list(self.faults))

    def sentence(self, result: files.Location | None, kept: str) -> str:
        """Return which file could not be written, why, and what is kept; the `result` before others."""
        first = min(list(self.faults), key=lambda path: (path != str(result), Path(path).name == STATE))
        return f"{str(self.faults[first]).removesuffix('.')}; {kept}."

    def warn(self, result: files.Location | None, kept: str) -> None:
        """Warn of what could not be written, if anything."""
        if self.faults:
            warnings.warn(self.sentence(result, kept), UnsavedWarning, stacklevel=outside())


class Parts:
    """Parts by their names; `held` are those in memory, all of them where there is no folder."""

    def __init__(self, folder: Path | None, unwritten: UnwrittenFiles):
        self.folder, self.unwritten = folder, unwritten
        self.held: dict[str, Part] = {}

    def has(self, name: str) -> bool:
        """Return whether a part is finished."""
        return name in self.held or (self.folder is not None and self.path(name).exists())

    def read(self, name: str) -> Part:
        """Return a finished part."""
        return self.held[name] if name in self.held else _read_part(self.path(name), name)

    def keep(self, part: Part) -> None:
        """Write a part, in place of one of the same name; what can't be written stays in memory."""
        if self.folder is not None:
            header = {"name": part.name, "values": part.values, "seconds": part.seconds, "created": part.created}
            with self.unwritten.writing(path := self.path(part.name)):
                files.write(path, "part", header, part.arrays)
                files.restrict(path, self.folder)
                self.held.pop(part.name, None)
                return
        self.held[part.name] = part

    def keep_held(self) -> None:
        """Try once more to write what could not be written; there may be room by now."""
        for part in list(self.held.values()) if self.folder is not None else ():
            self.keep(part)

    def drop(self, name: str) -> None:
        """Delete a part; while others can't be written its file stays, from which they can be made again."""
        self.held.pop(name, None)
        if self.folder is None:
            return
        with self.unwritten.writing(path := self.path(name)):
            if not self.held:
                files.remove(path)

    def path(self, name: str) -> Path:
        """Return the file of a part."""
        assert self.folder is not None
        return self.folder / f"{_file_name(name)}.netkin"


@contextmanager
def damaged_part_reported(path: Path | str) -> Iterator[None]:
    """Inside the `with`, report a part that is damaged, and what to do: without its file it is computed again."""
    try:
        with files.damage_reported(path):
            yield
    except FileError as fault:
        words = str(fault).removesuffix(".").removesuffix(f"; {files.AGAIN}")
        is_short = type(fault.__cause__).__name__ in ("MemoryError", "OutOfMemoryError")  # the latter is torch's
        if is_short or not any(damage in words for damage in ("is damaged", "is no netkin file")):
            raise
        raise FileError(f"{words}; delete this file and repeat the call, which computes the part again.") from fault


def _read_part(path: Path, name: str) -> Part:
    with damaged_part_reported(path):
        header, arrays = files.read(path, "part")
        if header["name"] != name:
            raise ValueError(f"it holds the part {header['name']!r}")
        return Part(name, dict(header["values"]), arrays, header["seconds"], header["created"])


def _file_name(name: str) -> str:
    """Return a name that any file system takes: a readable beginning, and a digest for long ones."""
    written = quote(name, safe=" ,=()'+@")
    if len(written) <= LONGEST and written == written.lower().strip() and written:
        return written
    # case-insensitive file systems would confuse two parts
    return f"{written[:LONGEST].strip()} {blake2b(name.encode(), digest_size=8).hexdigest()}"
