"""The file format of netkin, and atomic writing of files, which never overwrites without permission.

A netkin file is a safetensors file whose metadata hold a JSON header under ``netkin``; any safetensors reader can open
the arrays. The header begins with a checksum of its own text and contains one of the arrays.
"""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from netkin.documents import (
    Location,
    damage_reported,
    mapping_of,
    parse,
    read_document,
    read_json,
    read_start,
    read_whole,
    refuse_special,
)
from netkin.documents import read_list as read_list
from netkin.errors import FileError

LOCKS = find_spec("fcntl") is not None  # without them it is unknown which unfinished files are still being written
if LOCKS:
    import fcntl

FORMAT = 2  # 1: no checksums, and tables without kind, axes and unit
UNFINISHED = ".unfinished"
AGAIN = "take another copy of the file, or make it again"
MARK = "netkin"  # the generator of pages, the program that made figures and weights, in their metadata
# the fields of metadata by which pages and figures that netkin has written are known: HTML, PNG, SVG and PDF
_PAGE = rb'<!DOCTYPE html>\s*<html[^>]*><head>(<meta[^>]*>)*?<meta name="generator" content="netkin">'
_FIGURES = rb"\x89PNG\r\n.*?\0\0\0\x0ftEXtSoftware\0netkin\x0c\xdaF7|%PDF-.*\n<< /Creator \(netkin\) /Producer \("
_FIGURES += rb"|<\?xml.*?<metadata>.*?<dc:creator>\s*<cc:Agent>\s*<dc:title>netkin</dc:title>"
WORDS = {"comparisons": "set of comparisons", "compressed": "compressed model", "claim": "record of a claim"}
WORDS |= {"sparsity": "sparsity study", "task accuracies": "table of task accuracies"}
WORDS |= {"task ensembles": "table of task ensembles", "kernel ridge": "kernel ridge regression"}
WORDS |= {"page": "page of netkin's", "figure": "figure of netkin's", "weights": "weights that netkin wrote"}
_WEIGHTS = (".pt", ".pth", ".th", ".bin", ".ckpt", ".safetensors", ".pt2")  # how files of them end
_START, _DIGITS, _REST, _OF_ARRAYS = '{"checksum": "', 32, '", ', "checksum of arrays"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    path: Location, kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, overwrite: bool = False
) -> None:
    """Write a header and named arrays to `path`, where nothing or a result of this kind may be.

    Args:
        path: the file, which appears whole or not at all.
        kind: what it holds, as in the table of `nk.load`.
        header: texts, numbers, lists and mappings.
        arrays: NumPy arrays by their names.
        overwrite: write also over a file that holds something else.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    content = {"kind": kind, "format": FORMAT, _OF_ARRAYS: _digest(arrays), **header}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_plain)
    _refuse_half_characters(path, text)
    whole = f"{_START}{_hashed(text)}{_REST}{text[1:]}"
    write_bytes(path, save(arrays, {"netkin": whole}), kind, overwrite=overwrite)


def write_bytes(path: Location, contents: bytes, kind: str | None = None, *, overwrite: bool = False) -> None:
    """Write `contents` to `path`, whole or not at all; with a `kind`, over nothing but a file of that kind."""
    if kind is not None:
        _refuse_occupied(path, kind, overwrite)
    try:
        _replace(Path(os.path.realpath(path)), contents)
    except (OSError, ValueError) as fault:  # a name may hold a null character
        raise FileError(f"cannot write {str(path)!r}: {getattr(fault, 'strerror', None) or fault}.") from fault


def write_text(path: Location, text: str, kind: str | None = None, *, overwrite: bool = False) -> None:
    """Write `text` to `path` as UTF-8; else as `write_bytes`."""
    _refuse_half_characters(path, text)
    write_bytes(path, text.encode("utf-8"), kind, overwrite=overwrite)


def _refuse_half_characters(path: Location, text: str) -> None:
    """Refuse a text that has no form in UTF-8, as a name of a file has that was no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        around = text[max(fault.start - 20, 0) : fault.end + 20]
        raise FileError(f"cannot write {str(path)!r}: {around!r} in it is not UTF-8; give other names.") from fault


def remove(path: Location) -> None:
    """Delete a file, if it is there."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as fault:
        raise FileError(f"cannot delete {str(path)!r}: {fault.strerror or fault}.") from fault


def refuse_output(
    path: Location | None, kind: str, *, inputs: Iterable[Location] = (), overwrite: bool = False, option: str = ""
) -> None:
    """Refuse, before any work, a place where a result can't or should not be written.

    Args:
        path: where it is to be written; None is refused nowhere.
        kind: what is to be written; a file that holds anything else is refused, as is one without folder,
            permission or space to write.
        inputs: what the work reads; the same file is refused, by whatever name or link, and weights in a folder.
        overwrite: whether both kinds of files may be written over.
        option: the option of a command that names the path.
    """
    if path is None:
        return
    _refuse_occupied(path, kind, overwrite, option)
    for one in inputs if os.path.exists(path) and not overwrite else ():
        if _is_read_from(path, one) or (os.path.isfile(one) and os.path.samefile(one, path)):
            read = f"read as {str(one)!r}" if os.path.isfile(one) else f"in the folder {str(one)!r}, which is read"
            raise FileError(f"{option or 'this'} would write over {str(path)!r}, which is {read}; {_instead(option)}.")
    try:
        _try_to_write(Path(os.path.realpath(path)))
    except (OSError, ValueError) as fault:
        raise FileError(f"cannot write {str(path)!r}: {getattr(fault, 'strerror', None) or fault}.") from fault


def is_inside(path: Location, folder: Location) -> bool:
    """Return whether a path lies in a folder, or in one below it."""
    return os.path.isdir(folder) and Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def _is_read_from(path: Location, folder: Location) -> bool:
    """Return whether a file is read with a folder: weights of a run or a model; results of ours may lie beside them."""
    return Path(path).suffix.lower() in _WEIGHTS and is_inside(path, folder)


def _try_to_write(target: Path) -> None:
    """Write a block beside the target and remove it again."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, "the file is write-protected")
    with _begun(target) as (_, file):
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def _instead(option: str) -> str:
    return f"choose another name, or give {'--force' if option else '`overwrite=True`'}"


def _refuse_occupied(path: Location, kind: str, overwrite: bool, option: str = "") -> None:
    """Refuse a file that holds something else than `kind`; an empty one holds nothing."""
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no ordinary file"
        raise FileError(f"cannot write {str(path)!r}: it {what}.")
    if overwrite or not os.path.getsize(path):
        return
    if (found := kind_of(path)) != kind:
        held = f"{_with_article(found)} and no" if found else "no"
        what = f"{option or 'this'} would write over {str(path)!r}, which holds {held} {WORDS.get(kind, kind)}"
        raise FileError(f"{what}; {_instead(option)}.")


def _with_article(kind: str) -> str:
    words = WORDS.get(kind, kind)
    return words if kind in ("statistics", "weights") else f"a {words}"


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


def read(path: Location, kind: str | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of one of our files, of the given `kind` if one is given."""
    with _opened(path) as file, damage_reported(path):
        header, wanted = _header(path, file.metadata())
        _refuse_other_kind(path, header, kind)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if wanted is not None and wanted != _digest(arrays):
            raise FileError(f"{str(path)!r} is damaged: its arrays are not those that were written; {AGAIN}.")
        return header, arrays


def read_header(path: Location, kind: str | None = None) -> dict[str, Any]:
    """Return the header of one of our files without reading its arrays, which may be large; a JSON document whole."""
    if read_start(path, 1) == b"{":
        content = read_document(path)
        _refuse_other_kind(path, content, kind)
        return content
    with _opened(path) as file, damage_reported(path):
        header, _ = _header(path, file.metadata())
        _refuse_other_kind(path, header, kind)
        return header


def array_shapes(path: Location) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each array in one of our files, without reading them."""
    with _opened(path) as file, damage_reported(path):
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {name: (str(one.get_dtype()), tuple(one.get_shape())) for name, one in slices.items()}


def kind_of(path: Location) -> str | None:
    """Return what kind of result a file holds: one of ours, a page or a figure; None for anything else."""
    try:
        start = read_start(path, 4096)
        start = read_whole(path) if start.startswith(b"%PDF") else start  # which says so at its end
    except FileError:
        return None
    if re.match(_PAGE, start):
        return "page"
    if re.match(_FIGURES, start, re.DOTALL):
        return "figure"
    with suppress(FileError):
        if start.lstrip()[:1] == b"{":
            return "claim" if read_json(path).get("kind") == "claim" else None
        with _opened(path) as file:
            return "weights" if (file.metadata() or {}).get("made by") == MARK else read_header(path)["kind"]
    return None


def is_filled(path: Location | None) -> bool:
    """Return whether there is a file that holds something; one that is empty counts as none."""
    return path is not None and os.path.isfile(path) and os.path.getsize(path) > 0


def empty(path: Location | None) -> None:
    """Put an empty file with the same permissions in place of a file; other names of the old one keep its contents."""
    if path is None or not is_filled(path):
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)
    os.unlink(path)
    Path(path).touch(mode=0o600)
    os.chmod(path, mode)


def restrict(path: Location, like: Location) -> None:
    """Take all access to a file or folder from the group and from others where they may not read another."""
    with suppress(OSError):  # there is no other, or it is for the owner to change
        readers = os.stat(like).st_mode
        allowed = 0o7700 | (0o070 if readers & stat.S_IRGRP else 0) | (0o007 if readers & stat.S_IROTH else 0)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & ~allowed:
            os.chmod(path, mode & allowed)


@contextmanager
def _opened(path: Location) -> Iterator[Any]:
    """Open a file; what can't be read is refused in a sentence."""
    refuse_special(path)
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except OSError as fault:
        raise FileError(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault
    except SafetensorError as fault:
        raise FileError(f"{str(path)!r} is no netkin file, or only a part of one ({fault}).") from fault


def _header(path: Location, metadata: Mapping[str, str] | None) -> tuple[dict[str, Any], str | None]:
    """Return a header and the checksum that the arrays must have; files from before there was one have none."""
    if "netkin" not in (metadata or {}):
        raise FileError(f"{str(path)!r} is a safetensors file, but not one that netkin wrote.")
    text = (metadata or {})["netkin"]
    header = mapping_of(parse(text))
    own, wanted = header.pop("checksum", None), header.pop(_OF_ARRAYS, None)
    rest = "{" + text[len(_START) + _DIGITS + len(_REST) :]
    if (own is not None or wanted is not None) and not (text.startswith(_START) and own == _hashed(rest)):
        raise FileError(f"{str(path)!r} is damaged: its header is not the one that was written; {AGAIN}.")
    if not isinstance(header["kind"], str):
        raise TypeError(f"its kind must be a text; got {type(header['kind']).__name__}")
    if (newest := int(header["format"])) > FORMAT:
        known = f"this netkin reads up to format {FORMAT}; update with `pip install -U netkin`"
        raise FileError(f"{str(path)!r} has format {newest} and {known}.")
    return header, wanted


def _refuse_other_kind(path: Location, header: Mapping[str, Any], kind: str | None) -> None:
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
