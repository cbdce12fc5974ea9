"""Image sets as they lie on disk: the digits that come with netkin, and CIFAR-10 in its binary layout."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netkin.errors import SourceError, UnknownName, did_you_mean

# what is stored, its labels, and how a batch of the stored becomes what a model is fed
Images = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]

DIGIT_PARTS = {"": slice(None), "train": slice(1437), "test": slice(1437, None)}
CIFAR10_FILES = {"test": ["test_batch.bin"], "train": [f"data_batch_{number}.bin" for number in range(1, 6)]}
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2023, 0.1994, 0.2010)
_RECORD = 1 + 3 * 32 * 32


def digits(part: str = "") -> Images:
    """Return the bundled digits, 1 × 8 × 8 with ink from 0 to 1: all, the `train` or the `test` part."""
    if part not in DIGIT_PARTS:
        near = did_you_mean(part, DIGIT_PARTS)
        raise UnknownName(f"the digits have no part {part!r}{near or '.'} We have `digits:train` and `digits:test`.")
    with files("netkin.sources").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    rows = DIGIT_PARTS[part]
    return images[rows].unsqueeze(1), labels[rows].long(), lambda ink: ink.float() / 16


def cifar10(directory: str, part: str = "test") -> Images:
    """Return CIFAR-10's `test` or `train` images in canonical order, each channel normalised as is usual."""
    folder = _cifar10_folder(Path(directory).expanduser(), CIFAR10_FILES[part])
    records = torch.cat([_records(folder / name) for name in CIFAR10_FILES[part]])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long(), _cifar10_normalised


def _cifar10_normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR10_MEAN, CIFAR10_STD))
    return (images.float() / 255 - mean) / std


def _cifar10_folder(directory: Path, names: list[str]) -> Path:
    for folder in (directory, directory / "cifar-10-batches-bin"):
        if (folder / names[0]).is_file():
            _refuse_missing(folder, names)
            return folder
    for folder in (directory, directory / "cifar-10-batches-py"):
        if (folder / "test_batch").is_file():
            raise SourceError(
                f"{str(folder)!r} holds CIFAR-10 in its Python version, which is pickled and not read here; "
                "get the binary version (cifar-10-binary.tar.gz)."
            )
    raise SourceError(
        f"found no CIFAR-10 in {str(directory)!r}: {names[0]!r} must lie in it or in its folder cifar-10-batches-bin. "
        "Unpack the binary version (cifar-10-binary.tar.gz) and name the folder."
    )


def _refuse_missing(folder: Path, names: list[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SourceError(f"{str(folder)!r} lacks {', '.join(missing)}; unpack all of cifar-10-binary.tar.gz.")


def _records(path: Path) -> Tensor:
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % _RECORD:
        raise SourceError(
            f"{str(path)!r} holds {len(content):,} bytes, no multiple of the {_RECORD:,} bytes of a CIFAR-10 image; "
            "the file is cut short or not CIFAR-10."
        )
    records = content.reshape(-1, _RECORD)
    if records[:, 0].max() > 9:
        raise SourceError(f"{str(path)!r} has a label of {records[:, 0].max()}; CIFAR-10 has labels from 0 to 9.")
    return torch.from_numpy(records)
