"""Reading of user files: those that are absent, not readable or too large are refused in one sentence."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from netkin.errors import SourceError, did_you_mean

# what a file may take in memory, and how much larger than on disk it may become beyond a size that is harmless
LARGEST = 4 * 1024**3
HARMLESS = 100 * 1024**2
RATIO = 100


def refuse_absent(path: Path, what: str = "file") -> None:
    """Refuse a path that is no file, and suggest the most similar name in its folder."""
    try:
        if path.is_dir():
            raise SourceError(f"{str(path)!r} is a folder; name the {what} in it.")
        if path.exists() and not path.is_file():
            raise SourceError(f"{str(path)!r} is a pipe or a device and is not opened; copy it to a plain file.")
        if not path.is_file():
            raise SourceError(f"found no {what} {str(path)!r}{near(path) or '.'}")
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error


def near(path: Path) -> str:
    """Return a suggestion of the most similar name in the folder of `path`, or an empty string."""
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, beside)


def content(path: Path, what: str = "file", largest: int = LARGEST) -> bytes:
    """Return all bytes of the file at `path`, of which there may be `largest`."""
    refuse_absent(path, what)
    try:
        size = path.stat().st_size
        if size > largest:
            raise SourceError(f"{str(path)!r} holds {size:,} bytes; a {what} holds at most {largest:,}.")
        return path.read_bytes()
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object that the JSON file at `path` holds."""
    try:
        found = json.loads(content(path, what, HARMLESS))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{str(path)!r} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise SourceError(f"{str(path)!r} is no {what}: it holds a {type(found).__name__} instead of an object.")
    return found


def most_in_memory(size: int) -> int:
    """Return how many bytes a file of `size` bytes may become in memory."""
    return min(LARGEST, max(HARMLESS, RATIO * size))


def unreadable(path: Path, error: OSError) -> str:
    """Return the sentence for a file that the system does not let us read."""
    return f"{str(path)!r} cannot be read: {(error.strerror or type(error).__name__).lower()}."


@contextmanager
def refusing_unreadable(place: str) -> Iterator[None]:
    """Turn what the system does not let us read inside the `with` into a refusal that names it."""
    try:
        yield
    except OSError as error:
        raise SourceError(unreadable(Path(error.filename or place), error)) from error


def refuse_bomb(file: Path | BinaryIO, name: str, size: int) -> None:
    """Refuse a zip archive of `size` bytes whose parts would be far larger in memory; nothing is unpacked."""
    with zipfile.ZipFile(file) as archive:
        declared = sum(entry.file_size for entry in archive.infolist())
    if declared > most_in_memory(size):
        raise SourceError(
            f"{name!r} holds {size:,} bytes that would become {declared:,} in memory; netkin reads archives up to "
            f"{LARGEST:,} bytes that grow at most {RATIO} times."
        )
