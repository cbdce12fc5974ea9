"""Pickles, read without running anything that is in them: CIFAR's own, and a trial reading of torch's.

A pickle is a program. The reader here supports the instructions that build numbers, text, bytes, lists, tuples and
dictionaries; names are replaced by placeholders, which record their arguments. What a file of a few bytes
could use to fill the memory or to compute for ever is refused: keys that are nested tuples, buffers of an announced
size, text that is encoded again and again.

`read_plain_pickle` gives the arrays of CIFAR's files. `vet_torch_file` reads the pickle of a torch file this way before
`torch.load(weights_only=True)` does, which runs no code but trusts every size; before torch 2.10 it also set entries in
what is no dictionary and took storages to be as long as the file said, which corrupts memory (CVE-2026-24747).
"""

from __future__ import annotations

import _compat_pickle
import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from netkin.errors import SourceError
from netkin.sources.names import content, refuse_bomb

# the largest published file, the training part of CIFAR-100, holds 155 MB
LARGEST = 400 * 1024**2
_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1"),
    *("BININT2", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
    *("BINUNICODE8", "SHORT_BINUNICODE", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "REDUCE"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "PERSID", "BINPERSID"),
)
_ITEM_SIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **{"Half": 2, "BFloat16": 2, "Short": 2, "Float": 4, "Int": 4, "QInt32": 4, "Double": 8, "Long": 8},
    **{"ComplexFloat": 8, "ComplexDouble": 16},
}
_PLAIN = (str, bytes, int, float, type(None))


class Refused(Exception):
    """The pickle needs more than the reader supports."""


def read_plain_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary pickled at `path`: its arrays of bytes as NumPy arrays, all else plain."""
    pickled = content(path, "file of the Python version", LARGEST)
    try:
        found = _plain(_Reader(io.BytesIO(pickled), _ArrayNames(len(pickled)), _refuse_outside).load())
    except Refused as refusal:
        raise SourceError(
            f"{str(path)!r} asks for {refusal}, which no CIFAR file needs, and netkin runs nothing that comes in a "
            "file; get the published one again."
        ) from None
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(f"{str(path)!r} is damaged or no pickle; get the published file again.") from error
    if not isinstance(found, dict):
        raise SourceError(f"{str(path)!r} holds a {type(found).__name__} instead of a dictionary.")
    return {_text(key): value for key, value in found.items()}


def vet_torch_file(path: Path) -> None:
    """Raise `Refused` for a file saved by torch that would take memory or time out of proportion; nothing runs."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":  # as torch distinguishes its two layouts
            refuse_bomb(file, str(path), size)
            pickled, sizes = _zipped_pickle(file)
            _Reader(io.BytesIO(pickled), _TorchNames(len(pickled)), _Storages(size, sizes)).load()
            return
        file.seek(0)
        rest = _Rest(file, size)
        names, storages = _TorchNames(size), _Storages(size)
        for _ in range(5):  # a magic number, the protocol, the machine, the content and the list of storages
            _Reader(rest, names, storages).load()  # type: ignore[arg-type]


def _zipped_pickle(file: BinaryIO) -> tuple[bytes, dict[str, int]]:
    """Return the pickle in an archive, and how many bytes each storage has there, by its number."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len({name.partition("/")[0] for name in names}) > 1:  # torch reads the folder of the first entry
            raise Refused("entries of several folders")
        if len({name.lower() for name in names}) < len(names):  # torch looks names up without regard to case
            raise Refused("two entries of one name")
        inside = [name for name in names if name.partition("/")[2] == "data.pkl"]
        if any(name.endswith("constants.pkl") for name in names):
            raise Refused("TorchScript, which is a program: return `torch.jit.load(...)` from a function of yours")
        entries = {one.filename.partition("/")[2]: one.file_size for one in archive.infolist()}
        sizes = {name.removeprefix("data/"): size for name, size in entries.items() if name.startswith("data/")}
        return archive.read(inside[0]), sizes


class _Rest:
    """A file that is never read beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.readline = file, size, file.readline

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))


class _Reader(pickle._Unpickler):
    # the reader in Python: the one in C gives a memo of any size that a file asks for
    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS
    }

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: BinaryIO, names: Callable[[str, str], Any], outside: Callable[[Any], Any]) -> None:
        super().__init__(file, encoding="bytes")
        self._names, self._outside = names, outside

    def find_class(self, module: str, name: str) -> Any:
        return self._names(module, name)

    def persistent_load(self, number: Any) -> Any:
        return self._outside(number)

    def _set_items(self) -> None:
        pairs = self.pop_mark()
        self._put(self.stack[-1], pairs)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], [key, value])

    def _dictionary(self) -> None:
        pairs = self.pop_mark()
        self.append({})
        self._put(self.stack[-1], pairs)

    def _put(self, target: dict[Any, Any], pairs: list[Any]) -> None:
        if not isinstance(target, dict):  # in a tensor it would write wherever the key says
            raise Refused("entries set in what is no dictionary")
        refuse_nested(pairs[::2])
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _byte_array(self) -> None:
        # Python's own would take the memory before it sees how much the file holds
        count = int.from_bytes(self.read(8), "little")
        found = self.read(count)
        if len(found) != count:
            raise EOFError("the file ends within a buffer")
        self.append(bytes(found))

    def _build(self) -> None:
        # Python's own way would also set attributes of classes and functions
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, StandIn):
            built.take(state)
        elif not isinstance(built, dict):  # an ordered one brings attributes that say nothing of its content
            raise Refused("a changed object")

    def _new_object(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(kind(*arguments))

    dispatch |= {
        pickle.SETITEMS[0]: _set_items,
        pickle.SETITEM[0]: _set_item,
        pickle.DICT[0]: _dictionary,
        pickle.BYTEARRAY8[0]: _byte_array,
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: _new_object,
    }


def refuse_nested(keys: Iterable[Any]) -> None:
    """Refuse keys other than plain values and flat tuples of them: hashing nested ones may take for ever."""
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > 100 or not all(isinstance(part, _PLAIN) for part in parts):
            raise Refused("keys that are no plain values")


class StandIn:
    """A placeholder for an object made by a name; its state is accepted but not used."""

    def __init__(self, *_: Any) -> None:
        pass

    def take(self, state: Any) -> None:
        """Ignore the state in the file."""


class _Dtype(StandIn):
    """Stands for `numpy.dtype`: notes its code; for bytes, the state says nothing that the code does not."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)


class _Array(StandIn):
    """A placeholder for an array until its bytes are read."""

    values: np.ndarray

    def take(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.values = _bytes_array(raw, shape, dtype, "F" if is_fortran else "C")


class _Names:
    """Replaces names by placeholders, which may not copy more than the size of the file."""

    def __init__(self, size: int) -> None:
        self._left = size

    def spend(self, count: int) -> None:
        """Count the bytes copied out of the file, which a valid one needs once."""
        self._left -= count
        if self._left < 0:
            raise Refused("copies of its content")

    def encode(self, text: Any, encoding: Any = "") -> bytes:
        """Return text as the bytes it stands for; other encodings may make it grow."""
        if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
            raise Refused("an encoding")
        self.spend(len(text))
        return text.encode("latin1")


class _ArrayNames(_Names):
    """The few names of NumPy that CIFAR's files call; any other is refused before it is even looked up."""

    def __call__(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): StandIn,
            ("numpy", "dtype"): _Dtype,
            ("_codecs", "encode"): self.encode,
            **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
            **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
        }
        if (module, name) not in known:
            raise Refused(repr(f"{module}.{name}"[:80]))
        return known[module, name]


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    array = _Array()
    array.values = _bytes_array(raw, shape, dtype, _text(order))
    return array


def _refuse_outside(_: Any) -> Any:
    raise Refused("something outside the file")


def _bytes_array(raw: Any, shape: Any, dtype: Any, order: str) -> np.ndarray:
    sizes = [size for size in shape[:4] if type(size) is int and size >= 0]
    if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", "uint8", "B"):
        raise Refused("an array of other things than bytes")
    if not isinstance(raw, bytes) or len(sizes) != len(shape) or math.prod(sizes) != len(raw):
        raise ValueError("an array's bytes do not fit its shape")
    return np.frombuffer(raw, dtype=np.uint8).reshape(sizes, order="F" if order == "F" else "C")


def _plain(found: Any) -> Any:
    """Return `found` with arrays in the places of their stand-ins, one level deep, as CIFAR's files are."""
    if isinstance(found, dict):
        return {key: value.values if isinstance(value, _Array) else value for key, value in found.items()}
    return found


class _TorchNames(_Names):
    """Any name: torch decides which it allows; those that take memory or time by their arguments are examined."""

    def __call__(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
        own = {
            "collections.OrderedDict": self._mapping,
            "collections.Counter": self._mapping,
            "builtins.set": self._set,
            "builtins.bytearray": self._bytearray,
            "_codecs.encode": self.encode,
            "torch._tensor._rebuild_from_type_v2": self._typed,
        }
        return own.get(full) or _Call(full)

    def _mapping(self, pairs: Any = ()) -> dict[Any, Any]:
        refuse_nested(pair[0] for pair in pairs)
        return {pair[0]: pair[1] for pair in pairs}

    def _set(self, items: Any = ()) -> StandIn:
        refuse_nested(items)
        return StandIn()

    def _bytearray(self, content: Any = b"", *_: Any) -> StandIn:
        if not isinstance(content, bytes):
            raise Refused("a buffer of an announced size")
        self.spend(len(content))
        return StandIn()

    def _typed(self, function: Any, *_: Any) -> StandIn:
        if not (isinstance(function, _Call) and function.name.startswith("torch._utils._rebuild_")):
            raise Refused("a call within a call")
        return StandIn()


class _Call(StandIn):
    """A name of torch, and what comes of calling it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> StandIn:
        kind = self.name.rpartition(".")[2]
        if kind == "_rebuild_qtensor":
            raise Refused("quantised tensors: save them as `tensor.dequantize()`")
        if kind.startswith("_rebuild_device_tensor") or kind.endswith(("Tensor", "Storage")):
            raise Refused(f"a new {kind}")
        return _Call(f"{self.name}()")


class _Storages:
    """Notes the storages that a file names: none may be longer than what the file holds of it.

    In the older layout, without the `sizes` of each, torch takes their memory before it reads them: no more than the
    file has.
    """

    def __init__(self, size: int, sizes: dict[str, int] | None = None) -> None:
        self._size, self._sizes, self._seen = size, sizes, dict[Any, int]()

    def __call__(self, named: Any) -> StandIn:
        _, kind, number, _, count, *_ = named
        if type(count) is not int or count < 0:
            raise Refused("a storage of no length")
        name = kind.name.rpartition(".")[2].removesuffix("Storage") if isinstance(kind, _Call) else ""
        if name not in _ITEM_SIZES:
            raise Refused("a storage of an unknown type")
        refuse_nested([number])
        self._seen[number] = _ITEM_SIZES[name] * count
        held = self._size if self._sizes is None else self._sizes.get(_text(number), 0)
        taken = sum(self._seen.values()) if self._sizes is None else self._seen[number]
        if taken > held:
            raise Refused("more numbers than it holds")
        return StandIn()


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
