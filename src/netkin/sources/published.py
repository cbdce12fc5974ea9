"""MNIST in its idx files, and SVHN's cropped digits in their MATLAB files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from netkin.errors import SourceError
from netkin.sources.batches import Examples
from netkin.sources.images import normalisation

_NAMES = {"train": "train", "test": "t10k"}
_MAGIC = {"images": 2051, "labels": 2049}
LARGEST = 1024**3  # far more than any of their files takes in memory


def mnist(directory: str, normalise: str = "mnist", *, _part: str = "test") -> Examples:
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
    # read no more than was promised: a gzip file may be a bomb
    stored = file.read(min(expected, LARGEST) + 1)
    if len(stored) != expected or not expected:
        raise SourceError(f"{str(path)!r} promises {expected:,} bytes of {what} and holds {_amount(stored, expected)}.")
    return np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(numbers[1], *sizes)


def _amount(stored: bytes, expected: int) -> str:
    return "more" if len(stored) > expected else f"{len(stored):,}"


def svhn(directory: str, normalise: str = "svhn", *, _part: str = "test") -> Examples:
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

    try:
        kinds = {name: (shape, kind) for name, shape, kind in whosmat(str(path), appendmat=False)}
        _refuse_other_than_svhn(kinds, path)
        found = loadmat(str(path), appendmat=False, variable_names=["X", "y"])
    except SourceError:
        raise
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(f"{str(path)!r} is damaged or no MATLAB file of version 5; get it again.") from error
    images, labels = found["X"], found["y"].ravel()
    if images.dtype != np.uint8 or not np.isin(labels, range(11)).all():
        raise SourceError(f"{str(path)!r} must hold bytes as images and labels from 1 to 10; it is not SVHN.")
    return images, labels


def _refuse_other_than_svhn(kinds: dict[str, Any], path: Path) -> None:
    """Refuse by the declared sizes, before anything is unpacked."""
    (images, kind), (labels, _) = (kinds.get(name, ((), "")) for name in ("X", "y"))
    fits = len(images) == 4 and images[:3] == (32, 32, 3) and kind == "uint8" and labels == (images[3], 1)
    if not fits or not 0 < images[3] * 3072 <= LARGEST:
        raise SourceError(
            f"{str(path)!r} must hold X of 32 × 32 × 3 × n and y of n × 1; it holds {kinds or 'nothing'}."
        )
