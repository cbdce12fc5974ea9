"""Image sets as they are published: CIFAR-10 and CIFAR-100, MNIST and SVHN."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netkin.errors import InvalidValue, SourceError
from netkin.sources.batches import LoadedExamples
from netkin.sources.examples import normalisation
from netkin.sources.names import content, reading
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
    for read, ending, inner in ((_binary, ".bin", layout.binary), (_pickled, "", layout.python)):
        for folder in (directory, directory / inner):
            if (folder / f"{names[0]}{ending}").is_file():
                paths = [folder / f"{name}{ending}" for name in names]
                return torch.from_numpy(np.concatenate([_file_records(path, layout, read) for path in paths]))
    raise SourceError(
        f"found no {layout.title} in {str(directory)!r}: {names[0] + '.bin'!r} must lie in it or in its folder "
        f"{layout.binary}, or {names[0]!r} in it or in {layout.python}. Unpack the binary or the Python version and "
        "name the folder."
    )


def _file_records(path: Path, layout: Layout, read: Callable[[bytes, Layout], np.ndarray]) -> np.ndarray:
    stored = content(path, f"file of {layout.title}")
    with reading(path, f"file of {layout.title}", "unpack the published archive again"):
        records = read(stored, layout)
        for column, classes in enumerate(layout.labels.values()):
            largest = records[:, column].max()
            if largest >= classes:
                raise ValueError(f"a label of {largest}, where there are labels from 0 to {classes - 1}")
        return records


def _binary(stored: bytes, layout: Layout) -> np.ndarray:
    return np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(-1, len(layout.labels) + _PIXELS)


def _pickled(stored: bytes, layout: Layout) -> np.ndarray:
    pickled = read_plain_pickle(stored)
    labels = [np.frombuffer(bytes(pickled[key]), dtype=np.uint8) for key in layout.labels]
    return np.column_stack([*labels, np.reshape(pickled["data"], (len(labels[0]), _PIXELS))])


_MNIST = {"train": "train", "test": "t10k"}


def mnist(directory: str, normalise: str = "mnist", *, _part: str = "test") -> LoadedExamples:
    """Return MNIST's `test` or `train` images, 1 × 28 × 28, from its idx files, gzipped or not."""
    prepare = normalisation(normalise, channels=1)
    folder = Path(directory).expanduser()
    images = _idx(folder, f"{_MNIST[_part]}-images-idx3-ubyte", 28, 28)
    labels = _idx(folder, f"{_MNIST[_part]}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise SourceError(f"MNIST in {directory!r} has {len(images):,} images and {len(labels):,} labels.")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long(), prepare


def _idx(folder: Path, name: str, *sizes: int) -> np.ndarray:
    """Return the bytes of an idx file as n × sizes, after a number for their kind and one for each axis."""
    places = [inner / (name + end) for inner in (folder, folder / "MNIST/raw", folder / "mnist") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise SourceError(
            f"found no MNIST in {str(folder)!r}: {name!r} or {name + '.gz'!r} must lie in it. Name the folder that "
            "holds the four idx files."
        )
    with reading(path, "file of MNIST", "get the published one again"):
        stored = gzip.decompress(content(path)) if path.suffix == ".gz" else content(path)
        kind, count, *inner_sizes = struct.unpack_from(f">{2 + len(sizes)}I", stored)
        if (kind, *inner_sizes) != (2049 + len(sizes), *sizes) or not count:
            raise ValueError(f"it begins with the numbers {kind}, {count}" + "".join(f", {n}" for n in inner_sizes))
        values = np.frombuffer(bytearray(stored), dtype=np.uint8, offset=8 + 4 * len(sizes))
        return values.reshape(count, *sizes)


def svhn(directory: str, normalise: str = "svhn", *, _part: str = "test") -> LoadedExamples:
    """Return SVHN's `test` or `train` crops, 3 × 32 × 32; the label 10 of the files stands for the digit 0."""
    from scipy.io import loadmat

    prepare = normalisation(normalise)
    name, folder = f"{_part}_32x32.mat", Path(directory).expanduser()
    path = next((place / name for place in (folder, folder / "svhn") if (place / name).is_file()), None)
    if path is None:
        raise SourceError(
            f"found no SVHN in {str(folder)!r}: {name!r} must lie in it. Name the folder of the "
            "cropped digits (format 2)."
        )
    with reading(path, "file of SVHN", "get the published one again"):
        arrays = loadmat(path, appendmat=False, variable_names=["X", "y"])
        images, labels = arrays["X"], arrays["y"].ravel()
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)) or not np.isin(labels, range(11)).all():
            raise ValueError("X must be bytes of 32 × 32 × 3 × n, and y must be n labels from 1 to 10")
    stored = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return stored, torch.from_numpy(labels.astype(np.int64) % 10), prepare
