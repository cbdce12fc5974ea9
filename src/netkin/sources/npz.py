"""NumPy archives: `npz:FILE`, read without pickles and never larger in memory than announced."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from netkin.errors import SourceError, ValueFault
from netkin.sources.batches import Examples, as_they_are
from netkin.sources.normalising import normalisation
from netkin.sources.reading import refuse_absent, refuse_bomb, unreadable

INPUTS = ("x", "images", "inputs", "data")
LABELS = ("y", "labels")


def npz(file: str, channels: str = "first", normalise: str = "none") -> Examples:
    """Return the examples of a NumPy archive: its array `x`, `images`, `inputs` or `data`, or its only one.

    Labels are its `y` or `labels`. Bytes are taken as pixels from 0 to 255 and normalised; all other numbers are fed as
    they are. `channels=last` says that images lie as n × height × width × channels.
    """
    path = Path(file).expanduser()
    if channels not in ("first", "last"):
        raise ValueFault(f"`channels` must be 'first' or 'last'; got {channels!r}.")
    inputs, labels = _arrays(path)
    if channels == "last":
        inputs = np.moveaxis(inputs, -1, 1)
    _refuse_unpaired(inputs, labels, path)
    stored = torch.from_numpy(np.ascontiguousarray(inputs))
    prepare = normalisation(normalise, inputs.shape[1]) if inputs.dtype == np.uint8 and inputs.ndim == 4 else None
    prepare = prepare or (normalisation("none", 1) if inputs.dtype == np.uint8 else as_they_are)
    return stored, None if labels is None else torch.from_numpy(np.ascontiguousarray(labels)), prepare


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    refuse_absent(path, "npz file")
    try:
        refuse_bomb(path, str(path), path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            keys = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            inputs, labels = _chosen(keys, path)
            return _array(archive, inputs, path), None if labels is None else _array(archive, labels, path)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(f"{str(path)!r} is damaged or no npz file; write it with `numpy.savez`.") from error


def _chosen(keys: list[str], path: Path) -> tuple[str, str | None]:
    labels = next((key for key in LABELS if key in keys), None)
    others = [key for key in keys if key != labels]
    inputs = next((key for key in INPUTS if key in keys), others[0] if len(others) == 1 else None)
    if inputs is None:
        have = ", ".join(map(repr, keys[:10])) or "nothing"
        raise SourceError(
            f"{str(path)!r} holds {have}; call its examples {', '.join(map(repr, INPUTS[:-1]))} or {INPUTS[-1]!r}, and "
            f"its labels {' or '.join(map(repr, LABELS))}."
        )
    return inputs, labels


def _array(archive: zipfile.ZipFile, key: str, path: Path) -> np.ndarray:
    """Return one array, after its header was seen to promise no more than there is."""
    entry = archive.getinfo(f"{key}.npy")
    with archive.open(entry) as file:
        shape, dtype = _header(file)
        if dtype.kind not in "biuf":
            kind = "Python objects" if dtype.hasobject else f"values of type {dtype}"
            raise SourceError(
                f"{key!r} in {str(path)!r} holds {kind}; only numbers are read, and nothing is unpickled."
            )
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise SourceError(
                f"{key!r} in {str(path)!r} promises shape {shape}, more than its {entry.file_size:,} bytes."
            )
    with archive.open(entry) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def _refuse_unpaired(inputs: np.ndarray, labels: np.ndarray | None, path: Path) -> None:
    if inputs.ndim < 2 or not len(inputs):
        raise SourceError(
            f"the examples in {str(path)!r} have shape {inputs.shape}; the first axis must be the examples, and there "
            "must be another."
        )
    if labels is not None and len(labels) != len(inputs):
        raise SourceError(f"{str(path)!r} holds {len(inputs):,} examples and {len(labels):,} labels.")
