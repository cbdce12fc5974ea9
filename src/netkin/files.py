"""The file format of netkin, and atomic writing of files, which never overwrites without permission.

A netkin file is a safetensors file whose metadata hold a JSON header under ``netkin``; any safetensors reader can open
the arrays. The header begins with a checksum of its own text and contains one of the arrays.
"""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from netkin.errors import FileError

LOCKS = find_spec("fcntl") is not None  # without them it is unknown which unfinished files are still being written
if LOCKS:
    import fcntl

Location = str | os.PathLike[str]
FORMAT = 3
LARGEST = 2**23  # bytes of a JSON document, of which Python makes up to thirty times as many
UNFINISHED = ".unfinished"
AGAIN = "take another copy of the file, or make it again"
_START, _DIGITS, _REST, _OF_ARRAYS = '{"checksum": "', 32, '", ', "checksum of arrays"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    path: Location, kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, overwrite: bool = False
) -> None:
    """Write a header and named arrays to `path`.

    Args:
        path: The file, which appears whole or not at all.
        kind: What it holds, as in the table of `nk.load`.
        header: Texts, numbers, lists and mappings.
        arrays: NumPy arrays by their names.
        overwrite: Whether there may be a file already.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    content = {"kind": kind, "format": FORMAT, _OF_ARRAYS: _digest(arrays), **header}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_plain)
    with _faults_of_writing(path):
        whole = f"{_START}{_hashed(text)}{_REST}{text[1:]}"
        contents = save(arrays, {"netkin": whole})
    write_bytes(path, contents, overwrite=overwrite)


def write_bytes(path: Location, contents: bytes, *, overwrite: bool = False) -> None:
    """Write `contents` to `path`, whole or not at all; a file that is there already is refused unless `overwrite`."""
    _require_free(path, overwrite, "")
    with _faults_of_writing(path):
        _replace(Path(os.path.realpath(path)), contents)


def write_text(path: Location, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to `path` as UTF-8; else as `write_bytes`."""
    with _faults_of_writing(path):
        contents = text.encode("utf-8")
    write_bytes(path, contents, overwrite=overwrite)


@contextmanager
def _faults_of_writing(path: Location) -> Iterator[None]:
    """Inside the `with`, what keeps a file from being written becomes a sentence that names it."""
    try:
        yield
    except (OSError, ValueError) as fault:  # a name may hold a null character, and a text half a character
        raise FileError(f"cannot write {str(path)!r}: {getattr(fault, 'strerror', None) or fault}.") from fault


def remove(path: Location) -> None:
    """Delete a file, if it is there."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as fault:
        raise FileError(f"cannot delete {str(path)!r}: {fault.strerror or fault}.") from fault


def require_output(path: Location | None, *, overwrite: bool = False, option: str = "") -> None:
    """Refuse, before any work, a place where a result can't or should not be written.

    Args:
        path: Where it is to be written; None is refused nowhere.
        overwrite: Whether there may be a file already.
        option: The option of a command that names the path.
    """
    if path is None:
        return
    _require_free(path, overwrite, option)
    with _faults_of_writing(path):
        _try_to_write(Path(os.path.realpath(path)))


def _try_to_write(target: Path) -> None:
    """Write a block beside the target and remove it again."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, "the file is write-protected")
    with _begun(target) as (_, file):
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def _require_free(path: Location, overwrite: bool, option: str) -> None:
    """Refuse a path that is taken; an empty file, as `mktemp` makes one, holds nothing."""
    if os.path.exists(path) and not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no ordinary file"
        raise FileError(f"cannot write {str(path)!r}: it {what}.")
    if is_filled(path) and not overwrite:
        allowed = "--overwrite" if option else "`overwrite=True`"
        raise FileError(
            f"{option or 'this'} would write over {str(path)!r}; choose another name, or give {allowed}.",
            argument=None if option else "overwrite",  # a command names its options in the sentence
        )


def _replace(target: Path, contents: bytes) -> None:
    """Write beside the target, then rename; the target's permissions stay."""
    remove_unfinished(target)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    with _begun(target) as (unfinished, file):
        if mode is not None:
            os.chmod(unfinished, mode)
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
        if not LOCKS:  # else the lock is held until it has its name
            file.close()
        os.replace(unfinished, target)


@contextmanager
def _begun(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Give a new file in the target's own folder, locked as long as it is open; unless renamed it is removed again."""
    while True:
        path = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}{UNFINISHED}")
        try:  # Ctrl-C may come as soon as the file is there
            with open(path, "xb") as file:
                with suppress(OSError):  # a file system without locks
                    if LOCKS:
                        fcntl.flock(file, fcntl.LOCK_EX)
                if path.exists():  # and no other process has removed it before it was locked
                    yield path, file
                    return
        finally:
            with suppress(OSError):  # it has its name, or the folder gives no access
                path.unlink()


def remove_unfinished(path: Location) -> None:
    """Remove what killed processes left of their writes to `path`, or to the files in it where it is a folder.

    Only files that no process has locked are removed, so that one which is being written stays.
    """
    target = Path(os.path.realpath(path))
    folder, name = (target, "*") if target.is_dir() else (target.parent, glob.escape(target.name[:50]))
    for left in folder.glob(f".{name}.{'[0-9a-f]' * 8}{UNFINISHED}") if LOCKS else ():
        with suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _plain(value: Any) -> Any:
    # widths and counts often arrive as NumPy's numbers, which JSON does not know
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a header holds text, numbers, lists and mappings; got {type(value).__name__}.")


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Location, kind: str | None = None, instead: str = AGAIN) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of one of our files, of the given `kind` if one is given.

    A refusal of a damaged file says what to do `instead` of reading it.
    """
    with _opened(path, instead) as file, damage_reported(path, instead):
        header, wanted = _header(path, file.metadata())
        _require_kind(path, header, kind)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if wanted != _digest(arrays):
            raise ValueError("its arrays are not those that were written")
        return header, arrays


def read_header(path: Location, kind: str | None = None, instead: str = AGAIN) -> dict[str, Any]:
    """Return the header of one of our files without reading its arrays, which may be large; else as `read`."""
    with _opened(path, instead) as file, damage_reported(path, instead):
        header, _ = _header(path, file.metadata())
        _require_kind(path, header, kind)
        return header


def array_shapes(path: Location) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each array in one of our files, without reading them."""
    with _opened(path) as file, damage_reported(path):
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {name: (str(array.get_dtype()), tuple(array.get_shape())) for name, array in slices.items()}


def is_filled(path: Location | None) -> bool:
    """Return whether there is a file that holds something; one that is empty counts as none."""
    return path is not None and os.path.isfile(path) and os.path.getsize(path) > 0


def restrict(path: Location, like: Location) -> None:
    """Take all access to a file or folder from the group and from others where they may not read another."""
    with suppress(OSError):  # there is no other, or it is for the owner to change
        readers = os.stat(like).st_mode
        allowed = 0o7700 | (0o070 if readers & stat.S_IRGRP else 0) | (0o007 if readers & stat.S_IROTH else 0)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & ~allowed:
            os.chmod(path, mode & allowed)


@contextmanager
def _opened(path: Location, instead: str = AGAIN) -> Iterator[Any]:
    """Open a file; what can't be read is refused in a sentence."""
    require_ordinary_file(path)
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except OSError as fault:
        raise FileError(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault
    except SafetensorError as fault:
        raise FileError(f"{str(path)!r} is no netkin file, or only a part of one ({fault}); {instead}.") from fault


def _header(path: Location, metadata: Mapping[str, str] | None) -> tuple[dict[str, Any], str]:
    """Return a header, and the checksum that the arrays must have."""
    if "netkin" not in (metadata or {}):
        raise FileError(f"{str(path)!r} is a safetensors file, but not one that netkin wrote.")
    text = (metadata or {})["netkin"]
    header = mapping_of(parse(text))
    require_format(path, header.get("format"), FORMAT)
    rest = "{" + text[len(_START) + _DIGITS + len(_REST) :]
    if not text.startswith(_START) or header.pop("checksum") != _hashed(rest):
        raise ValueError("its header is not the one that was written")
    if not isinstance(header["kind"], str):
        raise TypeError(f"its kind must be a text; got {type(header['kind']).__name__}")
    return header, header.pop(_OF_ARRAYS)


def require_format(path: Location, version: Any, known: int) -> None:
    """Refuse a file of another version of its format, older or newer."""
    if version != known:
        raise FileError(
            f"{str(path)!r} has format {version}, and this netkin reads format {known}; make it again, or read it with "
            "the netkin that wrote it."
        )


def _require_kind(path: Location, header: Mapping[str, Any], kind: str | None) -> None:
    if kind not in (None, held := header.get("kind")):
        raise FileError(f"{str(path)!r} holds {held!r}, not {kind!r}; load it as what it is, or write elsewhere.")


def _hashed(text: str) -> str:
    return blake2b(text.encode(), digest_size=_DIGITS // 2).hexdigest()


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a text that changes with any name, type, shape or byte of the arrays."""
    total = blake2b(digest_size=_DIGITS // 2)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape};".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


# --- JSON documents, and damage ---------------------------------------------------------------------------------------


def read_json(path: Location) -> Any:
    """Return what a JSON file holds; one that is larger than any that netkin writes is not parsed."""
    if (size := len(read_start(path, LARGEST + 1))) > LARGEST:
        raise FileError(f"{str(path)!r} holds {os.path.getsize(path):,} bytes; JSON is read up to {LARGEST:,}.")
    with damage_reported(path):
        return parse(read_start(path, size).decode("utf-8"))


def read_start(path: Location, size: int) -> bytes:
    """Return the first bytes of an ordinary file."""
    require_ordinary_file(path)
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as fault:
        raise FileError(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault


def require_ordinary_file(path: Location) -> None:
    """Refuse what is no ordinary file: a folder, and a pipe or a device, which would keep a reader waiting."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as fault:  # a name may hold a null character
        raise FileError(f"cannot read {str(path)!r}: {getattr(fault, 'strerror', None) or fault}.") from fault
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise FileError(f"cannot read {str(path)!r}: it is {what}.")


@contextmanager
def damage_reported(path: Location, instead: str = AGAIN) -> Iterator[None]:
    """Turn any trouble with a file's contents into one sentence that names the file, and what to do `instead`."""
    try:
        yield
    except FileError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as fault:
        raise FileError(f"{str(path)!r} is damaged: {type(fault).__name__}: {fault}; {instead}.") from fault


def mapping_of(content: Any) -> dict[str, Any]:
    """Return a mapping that JSON held; anything else is refused."""
    if not isinstance(content, dict):
        raise TypeError(f"it must hold a mapping; got {type(content).__name__}")
    return content


def parse(text: str) -> Any:
    """Return what a JSON text holds; numbers that are not finite are refused."""
    content = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()  # halves of characters could not be printed later
    return content


def _finite(digits: str) -> float:
    """Return the number that JSON gives as text; NaN, Infinity and what is too large are none."""
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits} is no number in JSON")
    return number
