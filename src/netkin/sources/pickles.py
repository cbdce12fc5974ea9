"""Pickles, read without running anything that is in them: CIFAR's own, and a trial reading of torch's.

A pickle is a program. The reader here supports the instructions that build numbers, text, bytes, lists, tuples and
dictionaries; names are replaced by placeholders, which record their arguments.

`read_plain_pickle` gives the arrays of CIFAR's files. `vet_torch_file` reads the pickle of a torch file this way before
`torch.load(weights_only=True)` does, which runs no code; before torch 2.10 it set entries in what is no dictionary and
took storages to be as long as the file said, which corrupts memory (CVE-2026-24747).
"""

from __future__ import annotations

import _compat_pickle
import io
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from netkin.sources.names import Refused

_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1"),
    *("BININT2", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
    *("BINUNICODE8", "SHORT_BINUNICODE", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES", "BYTEARRAY8", "EMPTY_TUPLE"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "GLOBAL"),
    *("STACK_GLOBAL", "REDUCE", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "PERSID"),
    "BINPERSID",
)
_ITEM_SIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **{"Half": 2, "BFloat16": 2, "Short": 2, "Float": 4, "Int": 4, "QInt32": 4, "Double": 8, "Long": 8},
    **{"ComplexFloat": 8, "ComplexDouble": 16},
}


def read_plain_pickle(pickled: bytes) -> dict[str, Any]:
    """Return a pickled dictionary: its arrays of bytes as NumPy arrays, all else plain."""
    value = _Reader(io.BytesIO(pickled), _array_name, _raise_outside).load()
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} instead of a dictionary")
    return {_text(key): part.values if isinstance(part, _Array) else part for key, part in value.items()}


def vet_torch_file(path: Path) -> None:
    """Raise `Refused` for a file saved by torch that is not safe for its own reader; nothing in it runs."""
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":  # as torch distinguishes its two layouts
            pickled, sizes = _zipped_pickle(file)
            _Reader(io.BytesIO(pickled), _torch_name, _Storages(sizes)).load()
            return
        file.seek(0)
        storages = _Storages(None, path.stat().st_size)
        for _ in range(5):  # a magic number, the protocol, the machine, the content and the list of storages
            _Reader(file, _torch_name, storages).load()


def _zipped_pickle(file: BinaryIO) -> tuple[bytes, dict[str, int]]:
    """Return the pickle in an archive, and how many bytes each storage has there, by its number."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len({name.partition("/")[0] for name in names}) > 1:  # torch reads the folder of the first entry
            raise Refused("entries of several folders")
        if len({name.lower() for name in names}) < len(names):  # torch looks names up without regard to case
            raise Refused("two entries of one name")
        pickles = [name for name in names if name.partition("/")[2] == "data.pkl"]
        if any(name.endswith("constants.pkl") for name in names):
            raise Refused("TorchScript, which is a program: return `torch.jit.load(...)` from a function of yours")
        entries = {entry.filename.partition("/")[2]: entry.file_size for entry in archive.infolist()}
        sizes = {name.removeprefix("data/"): size for name, size in entries.items() if name.startswith("data/")}
        return archive.read(pickles[0]), sizes


class _Reader(pickle._Unpickler):
    """A reader of the instructions above; what they name, and what lies outside the file, comes from two functions."""

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS
    }

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    load_setitem: Callable[[], None]
    load_setitems: Callable[[], None]

    def __init__(self, file: BinaryIO, names: Callable[[str, str], Any], outside: Callable[[Any], Any]) -> None:
        super().__init__(file, encoding="bytes")
        self._names, self._outside = names, outside

    def find_class(self, module: str, name: str) -> Any:
        return self._names(module, name)

    def persistent_load(self, number: Any) -> Any:
        return self._outside(number)

    def _set_items(self) -> None:
        self._require_dictionary(self.metastack[-1][-1])
        self.load_setitems()

    def _set_item(self) -> None:
        self._require_dictionary(self.stack[-3])
        self.load_setitem()

    def _require_dictionary(self, target: Any) -> None:
        if not isinstance(target, dict):  # in a tensor it would write wherever the key says
            raise Refused("entries set in what is no dictionary")

    def _build(self) -> None:
        # Python's own way would also set attributes of classes and functions
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            target.take(state)
        elif not isinstance(target, dict):  # an ordered one brings attributes that say nothing of its content
            raise Refused("a changed object")

    def _new_object(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(kind(*arguments))

    dispatch |= {
        pickle.SETITEMS[0]: _set_items,
        pickle.SETITEM[0]: _set_item,
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: _new_object,
    }


class StandIn:
    """A placeholder for an object made by a name; its state is accepted but not used."""

    def __init__(self, *_: Any) -> None:
        pass

    def take(self, state: Any) -> None:
        """Ignore the state in the file."""


# --- CIFAR ------------------------------------------------------------------------------------------------------------


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


def _array_name(module: str, name: str) -> Any:
    """Return a placeholder for one of the few names of NumPy that CIFAR's files call; any other is refused."""
    known: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): StandIn,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): lambda text, _: str.encode(text, "latin1"),
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


def _raise_outside(_: Any) -> Any:
    raise Refused("something outside the file")


def _bytes_array(raw: Any, shape: Any, dtype: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", "uint8", "B"):
        raise Refused("an array of other things than bytes")
    if not isinstance(raw, (bytes, bytearray)) or math.prod(shape) != len(raw):
        raise ValueError("an array's bytes do not fit its shape")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch_name(module: str, name: str) -> Any:
    """Return what stands for any name: torch decides which it allows; its mappings are such here as well."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
    return dict if full in ("collections.OrderedDict", "collections.Counter") else _Call(full)


class _Call(StandIn):
    """A name of torch, and what a call of it returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> StandIn:
        kind = self.name.rpartition(".")[2]
        if kind == "_rebuild_from_type_v2":  # it calls its first argument
            inner = arguments[0]
            if not (isinstance(inner, _Call) and inner.name.startswith("torch._utils._rebuild_")):
                raise Refused("a call within a call")
            inner(*arguments[2])
        if kind == "_rebuild_qtensor":
            raise Refused("quantised tensors: save them as `tensor.dequantize()`")
        if kind.startswith("_rebuild_device_tensor") or kind.endswith(("Tensor", "Storage")):  # of no values
            raise Refused(f"a new {kind}")
        return _Call(f"{self.name}()")


class _Storages:
    """Refuses the storages that a file names if they are longer than what the file holds of them.

    In the older layout, without the `sizes` of each, torch takes their memory before it reads them: together no more
    than the file has.
    """

    def __init__(self, sizes: dict[str, int] | None, of_file: int = 0) -> None:
        self._sizes, self._of_file, self._seen = sizes, of_file, dict[Any, int]()

    def __call__(self, named: Any) -> StandIn:
        _, kind, number, _, count, *_ = named
        if type(count) is not int or count < 0:
            raise Refused("a storage of no length")
        name = kind.name.rpartition(".")[2].removesuffix("Storage") if isinstance(kind, _Call) else ""
        if name not in _ITEM_SIZES:
            raise Refused("a storage of an unknown type")
        self._seen[number] = _ITEM_SIZES[name] * count
        held = self._of_file if self._sizes is None else self._sizes.get(_text(number), 0)
        taken = sum(self._seen.values()) if self._sizes is None else self._seen[number]
        if taken > held:
            raise Refused("more numbers than it holds")
        return StandIn()


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
