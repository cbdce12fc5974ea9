"""The one file format: safetensors, with a JSON header that names its kind and version.

The header lies in the safetensors metadata under ``netkin``; any safetensors reader can open the arrays.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from netkin.errors import FileFault

FORMAT = 1
Location = str | os.PathLike[str]


def write(path: Location, kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a header and named arrays to `path`; the file appears whole or not at all."""
    text = json.dumps({"kind": kind, "format": FORMAT, **header}, ensure_ascii=False, allow_nan=False, default=_plain)
    write_bytes(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}, {"netkin": text}))


def write_bytes(path: Location, contents: bytes) -> None:
    """Write `contents` to `path`; the file appears whole or not at all."""
    target = Path(os.path.realpath(path))
    try:
        _replace(target, contents)
    except OSError as fault:
        raise FileFault(f"cannot write {str(path)!r}: {fault.strerror or fault}.") from fault


def write_text(path: Location, text: str) -> None:
    """Write `text` to `path` as UTF-8; the file appears whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def remove_unfinished(path: Location) -> None:
    """Remove what killed processes left of their writes to `path`, or to the files in it where it is a folder."""
    target = Path(os.path.realpath(path))
    folder, name = (target, "*") if target.is_dir() else (target.parent, glob.escape(target.name))
    for left in folder.glob(f".{name}.{'[0-9a-f]' * 8}"):
        left.unlink(missing_ok=True)


def read(path: Location, kind: str | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of one of our files, of the given `kind` if one is given."""
    with _opened(path) as file:
        header = _header(path, file.metadata())
        _refuse_other_kind(path, header, kind)
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def read_header(path: Location, kind: str | None = None) -> dict[str, Any]:
    """Return the header of one of our files without reading its arrays, which may be large."""
    with _opened(path) as file:
        header = _header(path, file.metadata())
        _refuse_other_kind(path, header, kind)
        return header


@contextmanager
def _opened(path: Location) -> Iterator[Any]:
    """Open a file; what can't be read is refused in a sentence."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except OSError as fault:
        raise FileFault(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault
    except SafetensorError as fault:
        raise FileFault(f"{str(path)!r} is no netkin file, or only a part of one ({fault}).") from fault


@contextmanager
def damage_reported(path: Location) -> Iterator[None]:
    """Turn any trouble with a file's contents into one sentence that names the file; a `FileFault` is one already."""
    try:
        yield
    except FileFault:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as fault:
        raise FileFault(f"{str(path)!r} is damaged: {type(fault).__name__}: {fault}") from fault


def _plain(value: Any) -> Any:
    # widths and counts often arrive as NumPy's numbers, which JSON does not know
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a header holds text, numbers, lists and mappings; got {type(value).__name__}.")


def _replace(target: Path, contents: bytes) -> None:
    # in the target's own folder, so that the last step is a rename within one file system
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "xb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def _header(path: Location, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if "netkin" not in (metadata or {}):
        raise FileFault(f"{str(path)!r} is a safetensors file, but not one that netkin wrote.")
    with damage_reported(path):
        header = json.loads((metadata or {})["netkin"])
        newest = int(header["format"])
    if newest > FORMAT:
        raise FileFault(
            f"{str(path)!r} has format {newest} and this netkin reads up to format {FORMAT}; "
            "update with `pip install -U netkin`."
        )
    return header


def _refuse_other_kind(path: Location, header: Mapping[str, Any], kind: str | None) -> None:
    if kind not in (None, header.get("kind")):
        raise FileFault(
            f"{str(path)!r} holds {header.get('kind')!r}, not {kind!r}; load it as what it is, or write elsewhere."
        )
