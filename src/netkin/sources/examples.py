"""Examples in one file: `npz:FILE`, arrays of NumPy, and `text:FILE`, sequences of characters."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from netkin.errors import SourceError, ValueFault
from netkin.sources.batches import Examples, as_they_are
from netkin.sources.images import normalisation
from netkin.sources.pretrained import load_tokenizer
from netkin.sources.reading import content, refuse_absent, refuse_bomb, unreadable

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
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            kind = "Python objects" if dtype.hasobject else f"values of type {dtype}"
            raise SourceError(
                f"{key!r} in {str(path)!r} holds {kind}; only real numbers of at most 64 bits are read, and nothing is "
                "unpickled."
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
    if inputs.ndim < 2 or not inputs.size:
        raise SourceError(
            f"the examples in {str(path)!r} have shape {inputs.shape}; the first axis must be the examples, and there "
            "must be another, none of them empty."
        )
    if labels is not None and not labels.ndim:
        raise SourceError(f"the labels in {str(path)!r} are a single number; there must be one for each example.")
    if labels is not None and len(labels) != len(inputs):
        raise SourceError(f"{str(path)!r} holds {len(inputs):,} examples and {len(labels):,} labels.")


LARGEST = 256 * 1024**2


def text(file: str, window: int = 64, tokenizer: str = "") -> Examples:
    """Return a text in pieces of `window` characters one after the other, each character as a whole number.

    The number is the character's place among all characters of the text, sorted. Labels are the same pieces one
    character later; what is left at the end is dropped. With `tokenizer`, the folder of a Hugging Face model, pieces
    are `window` tokens of that model's, special ones included, and have no labels.
    """
    path = Path(file).expanduser()
    if tokenizer:
        return _tokens(_written(path), window, tokenizer, path), None, as_they_are
    numbers = _numbered(path)
    count = (len(numbers) - 1) // window
    if count < 1:
        raise _too_short(path, f"{len(numbers):,} characters", window, f"and the one after it need {window + 1}")
    pieces, following = (numbers[start : start + count * window].reshape(count, window) for start in (0, 1))
    return torch.from_numpy(pieces.copy()), torch.from_numpy(following.copy()), as_they_are


def _tokens(written: str, window: int, folder: str, path: Path) -> torch.Tensor:
    tokenizer = load_tokenizer(folder)
    special = tokenizer.num_special_tokens_to_add()
    if not special < window <= tokenizer.model_max_length:
        raise SourceError(
            f"a window of {window} tokens does not fit the model in {folder!r}, which adds {special} special ones and "
            f"takes at most {tokenizer.model_max_length}; choose another, as in `text,window={special + 16}:FILE`."
        )
    found = tokenizer(written, truncation=True, max_length=window, return_overflowing_tokens=True)["input_ids"]
    whole = [piece for piece in found if len(piece) == window]
    if not whole:
        raise _too_short(path, f"{len(found[0]):,} tokens", window, f"needs {window}")
    return torch.tensor(whole)


def _too_short(path: Path, held: str, window: int, needed: str) -> SourceError:
    return SourceError(
        f"{str(path)!r} holds {held}; a window of {window} {needed}. Choose a shorter one, as in `text,window=16:FILE`."
    )


def _written(path: Path) -> str:
    try:
        # universal newlines as Python's own `open` has them
        return content(path, "text file", LARGEST).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise SourceError(f"{str(path)!r} is no text in UTF-8: byte {error.start:,} fits no character.") from error


def _numbered(path: Path) -> np.ndarray:
    characters = np.frombuffer(_written(path).encode("utf-32-le"), dtype=np.uint32)  # one number for each
    return np.unique(characters, return_inverse=True)[1].astype(np.int64).ravel()
