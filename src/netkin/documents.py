"""Plain files and JSON documents, read within limits; whatever is wrong with one becomes a sentence that names it."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netkin.errors import FileError

DEEPEST = 100  # levels of lists and mappings, so that any reader gets through them
LARGEST = 2**30  # bytes of a file that is read whole; documents of ours are some kilobytes or megabytes
Location = str | os.PathLike[str]


def read_start(path: Location, size: int) -> bytes:
    """Return the first bytes of an ordinary file."""
    refuse_special(path)
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as fault:
        raise FileError(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault


def read_whole(path: Location) -> bytes:
    """Return all bytes of an ordinary file, of which there may be `LARGEST`."""
    refuse_special(path)
    if (size := os.path.getsize(path)) > LARGEST:
        raise FileError(f"{str(path)!r} holds {size:,} bytes; documents are read up to {LARGEST:,}.")
    return read_start(path, LARGEST)


def read_json(path: Location) -> dict[str, Any]:
    """Return the mapping in a JSON file."""
    contents = read_whole(path)
    with damage_reported(path):
        return mapping_of(parse(contents.decode("utf-8")))


def read_list(path: Location) -> list[dict[str, Any]]:
    """Return the mappings in a JSON file that holds a list of them."""
    contents = read_whole(path)
    with damage_reported(path):
        return [mapping_of(one) for one in parse(contents.decode("utf-8"))]


def read_document(path: Location) -> dict[str, Any]:
    """Return the mapping in a JSON file of a result; the state of a job is refused."""
    if "heartbeat" in (content := read_json(path)):
        shown = f"`netkin jobs {Path(path).parent}` shows it"
        raise FileError(f"{str(path)!r} is the state of a job, not a result; {shown}.")
    return content


def refuse_special(path: Location) -> None:
    """Refuse what is no ordinary file: a folder, and a pipe or a device, which would keep a reader waiting."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as fault:  # a name may hold a null character
        raise FileError(f"cannot read {str(path)!r}: {getattr(fault, 'strerror', None) or fault}.") from fault
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise FileError(f"cannot read {str(path)!r}: it is {what}.")


@contextmanager
def damage_reported(path: Location) -> Iterator[None]:
    """Turn any trouble with a file's contents into one sentence that names the file; a `FileError` is one already."""
    try:
        yield
    except FileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as fault:
        raise FileError(f"{str(path)!r} is damaged: {type(fault).__name__}: {fault}") from fault


def mapping_of(found: Any) -> dict[str, Any]:
    """Return a mapping that JSON held; anything else is refused."""
    if not isinstance(found, dict):
        raise TypeError(f"it must hold a mapping; got {type(found).__name__}")
    return found


def parse(text: str) -> Any:
    """Return what a JSON text holds; numbers that are not finite, and what lies too deep, are refused."""
    found = json.loads(text, parse_constant=_finite, parse_float=_finite)
    _refuse_deep(found)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()  # halves of characters could not be printed later
    return found


def _refuse_deep(found: Any) -> None:
    """Refuse lists and mappings that are nested deeper than any that netkin writes."""
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(DEEPEST):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (dict, list))]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _finite(digits: str) -> float:
    """Return the number that JSON gives as text; NaN, Infinity and what is too large are none."""
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits} is no number in JSON")
    return number
