"""Rows that are kept by the numbers of their examples: those of a layer, and of a mini-batch, or its `Kernel`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.errors import ShapeError
from netkin.statistics.collector import hashes
from netkin.statistics.statistic import Stored


class KeptRows(Stored):
    """The rows of one layer, part by part, with their own numbers and, if chunks are kept, those of their examples."""

    stored = ("parts", "numbers", "examples", "seen", "held", "bar")

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.numbers: list[np.ndarray] = []
        self.examples: list[np.ndarray] = []
        self.seen, self.held = 0, 0
        self.bar: int | None = None  # rows whose hash is larger are not among those kept

    def update(self, rows: Tensor, numbers: np.ndarray, examples: np.ndarray | None, seed: int) -> None:
        """Add those rows that may be among the kept ones; they must not change when the caller's array does."""
        if self.bar is None:
            self.add(rows.clone(), numbers, examples)
            return
        chosen = np.flatnonzero(hashes(seed, numbers) <= self.bar)
        self.seen += len(rows) - len(chosen)
        index = torch.from_numpy(chosen).to(rows.device)
        self.add(rows[index], numbers[chosen], None if examples is None else examples[chosen])

    def add(self, rows: Tensor, numbers: np.ndarray, examples: np.ndarray | None) -> None:
        self.parts.append(rows)
        self.numbers.append(numbers)
        self.examples += [] if examples is None else [examples]
        self.seen, self.held = self.seen + len(rows), self.held + len(rows)

    def joined(self, other: KeptRows) -> KeptRows:
        """Return the rows of both, none of which may be the same."""
        both = KeptRows()
        both.parts, both.numbers = [*self.parts, *other.parts], [*self.numbers, *other.numbers]
        both.examples = [*self.examples, *other.examples]
        both.seen, both.held = self.seen + other.seen, self.held + other.held
        every = np.concatenate(both.numbers) if both.numbers else np.empty(0)
        if len(np.unique(every)) < len(every):
            raise ShapeError("both statistics hold rows of the same examples; give each part its own `indices`.")
        return both

    def shrink(self, cap: int, seed: int) -> None:
        """Keep the rows with the smallest hashes, by rising numbers."""
        if self.parts:
            every = np.concatenate(self.numbers)
            mixed = hashes(seed, every)
            chosen = np.argsort(mixed, kind="stable")[:cap]
            self.bar = int(mixed[chosen[-1]]) if len(chosen) == cap else None
            self._keep(chosen[np.argsort(every[chosen], kind="stable")])

    def in_order(self, cap: int | None, seed: int) -> Tensor:
        """Return the rows by rising numbers, at most `cap`."""
        if cap is not None and self.held > cap:
            self.shrink(cap, seed)
        every = np.concatenate(self.numbers)
        if len(self.parts) > 1 or (np.diff(every) < 0).any():
            self._keep(np.argsort(every, kind="stable"))
        return self.parts[0]

    def _keep(self, chosen: np.ndarray) -> None:
        together = torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]
        if not np.array_equal(chosen, np.arange(len(together))):
            together = together[torch.from_numpy(chosen).to(together.device)]
        self.parts, self.numbers = [together], [np.concatenate(self.numbers)[chosen]]
        self.examples = [np.concatenate(self.examples)[chosen]] if self.examples else []
        self.held = len(chosen)


@dataclass
class IncompleteBatch(Stored):
    """The rows of a mini-batch that lacks some: their numbers, and those of every layer in the same order."""

    numbers: np.ndarray
    rows: dict[Hashable, list[Tensor]]
    stored: ClassVar[tuple[str, ...]] = ("numbers", "rows")

    def restricted(self, keys: Iterable[Hashable]) -> IncompleteBatch:
        """Return the rows of some layers alone."""
        return IncompleteBatch(self.numbers, {key: self.rows[key] for key in keys})

    def joined(self, other: IncompleteBatch) -> IncompleteBatch:
        """Return the rows of both, none of which may be the same."""
        numbers = np.concatenate([self.numbers, other.numbers])
        if len(np.unique(numbers)) < len(numbers):
            raise ShapeError(
                "two batches hold the same examples by their numbers; give each example a number of its own."
            )
        return IncompleteBatch(numbers, {name: [*parts, *other.rows[name]] for name, parts in self.rows.items()})

    def in_order(self) -> Iterator[tuple[Hashable, Tensor]]:
        """Yield every layer with its rows by rising numbers."""
        order = torch.from_numpy(np.argsort(self.numbers))
        for name, parts in self.rows.items():
            together = torch.cat([part.to(parts[0].device) for part in parts])
            yield name, together[order.to(together.device)]


class Kernel(NamedTuple):
    """The kernel matrix of one mini-batch, taken while the model ran."""

    matrix: Tensor
