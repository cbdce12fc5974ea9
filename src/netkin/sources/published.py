"""Image sets as they are published: CIFAR-10 and CIFAR-100, MNIST and SVHN."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from netkin.errors import InvalidValue, SourceError
from netkin.sources.batches import LoadedExamples
from netkin.sources.examples import normalisation
from netkin.sources.names import content, refuse_absent
from netkin.sources.pickles import read_plain_pickle

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


def cifar10(directory: str, normalise: str = "cifar10", *, _part: str = "test") -> LoadedExamples:
    """Return CIFAR-10's `test` or `train` images in the order of the files."""
    prepare = normalisation(normalise)
    records = _records(Path(directory).expanduser(), CIFAR10, _part)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long(), prepare


def cifar100(
    directory: str, normalise: str = "cifar100", labels: str = "fine", *, _part: str = "test"
) -> LoadedExamples:
    """Return CIFAR-100's `test` or `train` images in the order of the files, with `fine` or `coarse` labels."""
    prepare = normalisation(normalise)
    if labels not in ("fine", "coarse"):
        raise InvalidValue(f"CIFAR-100 has `labels=fine` (100 classes) and `labels=coarse` (20); got {labels!r}.")
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
    pickled = read_plain_pickle(path)
    pixels = pickled.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS or not len(pixels):
        raise SourceError(f"{str(path)!r} has no 'data' of n × {_PIXELS:,} bytes; it is not {layout.title}.")
    columns = [_labels(pickled.get(key), len(pixels), key, path) for key in layout.labels]
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


_NAMES = {"train": "train", "test": "t10k"}
_MAGIC = {"images": 2051, "labels": 2049}


def mnist(directory: str, normalise: str = "mnist", *, _part: str = "test") -> LoadedExamples:
    """Return MNIST's `test` or `train` images, 1 × 28 × 28, from its idx files, gzipped or not."""
    prepare = normalisation(normalise, channels=1)
    folder = Path(directory).expanduser()
    images = _idx(folder, f"{_NAMES[_part]}-images-idx3-ubyte", "images", (28, 28))
    labels = _idx(folder, f"{_NAMES[_part]}-labels-idx1-ubyte", "labels", ())
    if len(images) != len(labels):
        raise SourceError(f"MNIST in {directory!r} has {len(images):,} images and {len(labels):,} labels.")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long(), prepare


def _idx(folder: Path, name: str, what: str, sizes: tuple[int, ...]) -> np.ndarray:
    places = [inner / (name + end) for inner in (folder, folder / "MNIST/raw", folder / "mnist") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise SourceError(
            f"found no MNIST in {str(folder)!r}: {name!r} or {name + '.gz'!r} must lie in it. Name the folder that "
            "holds the four idx files."
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _idx_array(cast(BinaryIO, file), path, what, sizes)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{str(path)!r} is damaged or cannot be read: {error}.") from error


def _idx_array(file: BinaryIO, path: Path, what: str, sizes: tuple[int, ...]) -> np.ndarray:
    header = file.read(8 + 4 * len(sizes))
    numbers = struct.unpack(f">{len(header) // 4}I", header[: len(header) // 4 * 4])
    if numbers[:1] != (_MAGIC[what],) or numbers[2:] != sizes:
        raise SourceError(
            f"{str(path)!r} does not begin as MNIST's {what} do; it needs the magic number {_MAGIC[what]}"
            + (f" and images of {' × '.join(map(str, sizes))}." if sizes else ".")
        )
    expected = math.prod((numbers[1], *sizes))
    stored = file.read(expected + 1)
    if len(stored) != expected or not expected:
        held = "more" if len(stored) > expected else f"{len(stored):,}"
        raise SourceError(f"{str(path)!r} promises {expected:,} bytes of {what} and holds {held}.")
    return np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(numbers[1], *sizes)


def svhn(directory: str, normalise: str = "svhn", *, _part: str = "test") -> LoadedExamples:
    """Return SVHN's `test` or `train` crops, 3 × 32 × 32; the label 10 of the files stands for the digit 0."""
    prepare = normalisation(normalise)
    name, folder = f"{_part}_32x32.mat", Path(directory).expanduser()
    path = next((place / name for place in (folder, folder / "svhn") if (place / name).is_file()), None)
    if path is None:
        raise SourceError(
            f"found no SVHN in {str(folder)!r}: {name!r} must lie in it. Name the folder of the "
            "cropped digits (format 2)."
        )
    images, labels = _matlab(path)
    return (
        torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))),
        torch.from_numpy(labels.astype(np.int64) % 10),
        prepare,
    )


def _matlab(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat, whosmat

    refuse_absent(path)
    try:
        kinds = {name: (shape, kind) for name, shape, kind in whosmat(path, appendmat=False)}
        (shape, kind), (of_labels, _) = (kinds.get(name, ((), "")) for name in ("X", "y"))
        if not (len(shape) == 4 and shape[:3] == (32, 32, 3) and kind == "uint8" and of_labels == (shape[3], 1)):
            raise SourceError(
                f"{str(path)!r} must hold X of 32 × 32 × 3 × n and y of n × 1; it holds {kinds or 'nothing'}."
            )
        arrays = loadmat(path, appendmat=False, variable_names=["X", "y"])
    except SourceError:
        raise
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(f"{str(path)!r} is damaged or no MATLAB file of version 5; get it again.") from error
    images, labels = arrays["X"], arrays["y"].ravel()
    if images.dtype != np.uint8 or not np.isin(labels, range(11)).all():
        raise SourceError(f"{str(path)!r} must hold bytes as images and labels from 1 to 10; it is not SVHN.")
    return images, labels
