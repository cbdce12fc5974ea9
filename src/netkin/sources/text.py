"""Text as sequences of characters: `text:FILE`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from netkin.errors import SourceError
from netkin.sources.batches import Examples, as_they_are
from netkin.sources.reading import content

LARGEST = 256 * 1024**2


def text(file: str, window: int = 64) -> Examples:
    """Return a text in pieces of `window` characters one after the other, each character as a whole number.

    The number is the character's place among all characters of the text, sorted. Labels are the same pieces one
    character later; what is left at the end is dropped.
    """
    path = Path(file).expanduser()
    numbers = _numbered(path)
    count = (len(numbers) - 1) // window
    if count < 1:
        raise SourceError(
            f"{str(path)!r} holds {len(numbers):,} characters; a window of {window} and the one after it need "
            f"{window + 1}. Choose a shorter one, as in `text,window=16:FILE`."
        )
    pieces, following = (numbers[start : start + count * window].reshape(count, window) for start in (0, 1))
    return torch.from_numpy(pieces.copy()), torch.from_numpy(following.copy()), as_they_are


def _numbered(path: Path) -> np.ndarray:
    try:
        written = content(path, "text file", LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{str(path)!r} is no text in UTF-8: byte {error.start:,} fits no character.") from error
    # one number for each character; universal newlines as Python's own `open` has them
    characters = np.frombuffer(written.replace("\r\n", "\n").encode("utf-32-le"), dtype=np.uint32)
    return np.unique(characters, return_inverse=True)[1].astype(np.int64).ravel()
