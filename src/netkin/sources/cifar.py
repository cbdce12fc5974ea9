"""CIFAR-10 and CIFAR-100 as they are published: binary files, or Python pickles that are read without running them.

A pickle is a program. The reader here lets it build numbers, text, lists, dictionaries and plain arrays of bytes. The
few names of NumPy that such files call are answered by stand-ins of our own, which note what they are given; any other
name is refused before it is even looked up.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin.errors import SourceError, ValueFault
from netkin.sources.batches import Examples
from netkin.sources.images import normalisation
from netkin.sources.reading import content

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """How one of the two sets lies on disk: its folders, its files and the labels before each image."""

    title: str
    binary: str
    python: str
    files: dict[str, list[str]]
    labels: dict[str, int]  # in the order of the binary records: the pickle's key, and how many classes


CIFAR10 = Layout(
    title="CIFAR-10",
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    files={"test": ["test_batch"], "train": [f"data_batch_{number}" for number in range(1, 6)]},
    labels={"labels": 10},
)
CIFAR100 = Layout(
    title="CIFAR-100",
    binary="cifar-100-binary",
    python="cifar-100-python",
    files={"test": ["test"], "train": ["train"]},
    labels={"coarse_labels": 20, "fine_labels": 100},
)


def cifar10(directory: str, normalise: str = "cifar10", *, _part: str = "test") -> Examples:
    """Return CIFAR-10's `test` or `train` images in the order of the files."""
    prepare = normalisation(normalise)
    records = _records(Path(directory).expanduser(), CIFAR10, _part)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long(), prepare


def cifar100(directory: str, normalise: str = "cifar100", labels: str = "fine", *, _part: str = "test") -> Examples:
    """Return CIFAR-100's `test` or `train` images in the order of the files, with `fine` or `coarse` labels."""
    prepare = normalisation(normalise)
    if labels not in ("fine", "coarse"):
        raise ValueFault(f"CIFAR-100 has `labels=fine` (100 classes) and `labels=coarse` (20); got {labels!r}.")
    records = _records(Path(directory).expanduser(), CIFAR100, _part)
    return records[:, 2:].reshape(-1, 3, 32, 32), records[:, int(labels == "fine")].long(), prepare


def _records(directory: Path, layout: Layout, part: str) -> Tensor:
    """Return one row of bytes for each image: its labels, then its pixels."""
    names = layout.files[part]
    for folder in (directory, directory / layout.binary):
        if (folder / f"{names[0]}.bin").is_file():
            paths = _all_there(folder, [f"{name}.bin" for name in names])
            return torch.from_numpy(np.concatenate([_binary(path, layout) for path in paths]))
    for folder in (directory, directory / layout.python):
        if (folder / names[0]).is_file():
            paths = _all_there(folder, names)
            return torch.from_numpy(np.concatenate([_pickled(path, layout) for path in paths]))
    raise SourceError(
        f"found no {layout.title} in {str(directory)!r}: {names[0] + '.bin'!r} must lie in it or in its folder "
        f"{layout.binary}, or {names[0]!r} in it or in {layout.python}. Unpack the binary or the Python version and "
        "name the folder."
    )


def _all_there(folder: Path, names: list[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SourceError(f"{str(folder)!r} lacks {', '.join(missing)}; unpack all of the archive again.")
    return [folder / name for name in names]


def _binary(path: Path, layout: Layout) -> np.ndarray:
    size = len(layout.labels) + _PIXELS
    stored = np.frombuffer(bytearray(content(path)), dtype=np.uint8)
    if len(stored) == 0 or len(stored) % size:
        raise SourceError(
            f"{str(path)!r} holds {len(stored):,} bytes, no multiple of the {size:,} bytes of a {layout.title} image; "
            f"the file is cut short or not {layout.title}."
        )
    return _checked(stored.reshape(-1, size), path, layout)


def _pickled(path: Path, layout: Layout) -> np.ndarray:
    found = read_plain_pickle(path)
    pixels = found.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS or not len(pixels):
        raise SourceError(f"{str(path)!r} has no 'data' of n × {_PIXELS:,} bytes; it is not {layout.title}.")
    columns = [_labels(found.get(key), len(pixels), key, path) for key in layout.labels]
    return _checked(np.column_stack([*columns, pixels]), path, layout)


def _labels(values: Any, count: int, key: str, path: Path) -> np.ndarray:
    plain = isinstance(values, list) and all(type(value) is int and 0 <= value < 256 for value in values)
    if not plain or len(values) != count:
        raise SourceError(f"{str(path)!r} has no {key!r} of {count:,} whole numbers, one for each image.")
    return np.array(values, dtype=np.uint8)


def _checked(records: np.ndarray, path: Path, layout: Layout) -> np.ndarray:
    for column, classes in enumerate(layout.labels.values()):
        largest = records[:, column].max()
        if largest >= classes:
            raise SourceError(
                f"{str(path)!r} has a label of {largest}; {layout.title} has labels from 0 to {classes - 1}."
            )
    return records


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
