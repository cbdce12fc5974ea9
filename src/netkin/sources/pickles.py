"""CIFAR's pickles, read without running anything that is in them.

A pickle is a program. The reader here lets it build numbers, text, lists, dictionaries and plain arrays of bytes. The
few names of NumPy that such files call are answered by stand-ins of our own, which note what they are given; any other
name is refused before it is even looked up.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from netkin.errors import SourceError
from netkin.sources.reading import content

# the largest published file, the training part of CIFAR-100, holds 155 MB
LARGEST = 400 * 1024**2


class _Refused(Exception):
    """The pickle asks for more than plain arrays."""


def read_plain_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary pickled at `path`: its arrays of bytes as NumPy arrays, all else plain."""
    pickled = content(path, "file of the Python version", LARGEST)
    try:
        found = _plain(_Reader(io.BytesIO(pickled), encoding="bytes").load())
    except _Refused as refusal:
        raise SourceError(
            f"{str(path)!r} asks for {refusal}, which no CIFAR file needs, and netkin runs nothing that comes in a "
            "file; get the published one again."
        ) from None
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(f"{str(path)!r} is damaged or no pickle; get the published file again.") from error
    if not isinstance(found, dict):
        raise SourceError(f"{str(path)!r} holds a {type(found).__name__} instead of a dictionary.")
    return {_text(key): value for key, value in found.items()}


class _Type:
    """Stands for `numpy.ndarray`, which a file names but never calls."""


class _Dtype:
    """Stands for `numpy.dtype`: notes its code and believes nothing else."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        """Take no notice: for bytes, the state says nothing that the code does not."""


class _Array:
    """Stands for an array until its bytes arrive."""

    values: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.values = _bytes_array(raw, shape, dtype, "F" if is_fortran else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    array = _Array()
    array.values = _bytes_array(raw, shape, dtype, _text(order))
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise _Refused("an encoding")
    return text.encode("latin1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Type,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}


def _build(reader: Any) -> None:
    """Give a stand-in its state; Python's own way would also set attributes of classes and functions."""
    state, built = reader.stack.pop(), reader.stack[-1]
    if not isinstance(built, (_Array, _Dtype)):
        raise _Refused("a changed object")
    built.__setstate__(state)


class _Reader(pickle._Unpickler):
    # the reader in Python: the one in C gives a memo of any size that a file asks for
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise _Refused(repr(f"{module}.{name}"[:80]))
        return STAND_INS[module, name]

    def persistent_load(self, _: Any) -> Any:
        raise _Refused("something outside the file")


def _bytes_array(raw: Any, shape: Any, dtype: Any, order: str) -> np.ndarray:
    sizes = [size for size in shape if type(size) is int and size >= 0]
    if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", "uint8", "B"):
        raise _Refused("an array of other things than bytes")
    if len(sizes) != len(shape) or math.prod(sizes) != len(raw) or not isinstance(raw, (bytes, bytearray)):
        raise ValueError("an array's bytes do not fit its shape")
    return np.frombuffer(bytes(raw), dtype=np.uint8).reshape(sizes, order="F" if order == "F" else "C")


def _plain(found: Any) -> Any:
    """Return `found` with arrays in the places of their stand-ins, one level deep, as CIFAR's files are."""
    if isinstance(found, dict):
        return {key: value.values if isinstance(value, _Array) else value for key, value in found.items()}
    return found


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
