"""CIFAR-10 and CIFAR-100 as they are published: binary files, or Python pickles that are read without running them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.errors import SourceError, ValueFault
from netkin.sources.batches import Examples
from netkin.sources.normalising import normalisation
from netkin.sources.pickles import read_plain_pickle
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
