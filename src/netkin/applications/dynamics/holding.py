"""Holding: data that are read several times stay in memory, if they fit, so that each pass gets the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.comparing.request import name_of
from netkin.errors import MemoryLimit, ValueFault
from netkin.identity import DataDigest, settings_digest
from netkin.memory import free_memory, size_in_words
from netkin.progress import reporting
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, length_if_known
from netkin.representations.nesting import leaves


class Held:
    """The batches of `data`, up to `examples` examples: a list where they take at most `limit` bytes, else read anew.

    A shuffled loader that does not fit gives its batches in another order each time; every pass still gets them all.
    """

    def __init__(self, data: Any, examples: int | None, limit: int):
        if data is None:
            raise ValueFault("`data` is missing: pass a loader, an iterable of batches or one array of inputs.")
        self.name, self._data, self.asked = name_of(data), data, examples
        self._batches = _listed(batches_of(data, examples), None if _in_memory(data) else limit)
        if self._batches is None and isinstance(data, Iterator):
            raise MemoryLimit(
                f"the data are a stream of more than {size_in_words(limit)}, which is read once for each checkpoint; "
                "pass a loader, or fewer `examples`."
            )

    @property
    def is_held(self) -> bool:
        """Whether each pass gets the same batches."""
        return self._batches is not None

    @property
    def examples(self) -> int | None:
        """The number of examples, if it is known from the batches."""
        counts = [length_if_known(batch) for batch in self._batches or [None]]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def digest(self) -> str:
        """The digest of all examples in their order, as a comparison's provenance has it; they may be read for it."""
        found, uncounted = DataDigest(), ""
        total = examples_in(self._data, self.asked)
        with reporting(total, "looking at the data", "examples") as report:
            for batch in self:
                length = length_if_known(batch)
                if length is None:
                    uncounted = settings_digest([uncounted, batch], strict=False)
                else:
                    found.update(batch, range(found.count, found.count + length))
                report.update(length or 0)
        return uncounted or found.hex

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches if self._batches is not None else batches_of(self._data, self.asked))


def spare(device: torch.device) -> int:
    """Return how many bytes may be held on `device`: a quarter of what is free there now."""
    return free_memory(device) // 4


def _listed(batches: Iterable[Any], limit: int | None) -> list[Any] | None:
    """Return the batches, or None where they take more than `limit` bytes."""
    held, size = [], 0
    for batch in batches:
        held.append(batch)
        size += sum(leaf.nbytes for _, leaf in leaves(batch) if _is_array(leaf))
        if limit is not None and size > limit:
            return None
    return held


def _in_memory(data: Any) -> bool:
    return _is_array(data) or isinstance(data, (list, Mapping))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))
