"""SVHN's cropped digits in their MATLAB files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from netkin.errors import SourceError
from netkin.sources.batches import Examples
from netkin.sources.normalising import normalisation
from netkin.sources.reading import LARGEST


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
