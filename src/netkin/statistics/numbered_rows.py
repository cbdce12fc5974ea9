"""The numbers of examples and of their rows, and rows that are kept by them.

An example's number identifies it in every batch and part of the data; which chunk it falls in, and whether its rows
are among those sampled, follow from the number alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin.errors import ShapeError
from netkin.statistics.statistic import Stored

SALT = 0x6E65746B  # of the hash that gives an example its chunk, so that chunks and samples are independent


def row_numbers(numbers: np.ndarray, count: int, owners: np.ndarray | None = None) -> np.ndarray:
    """Return a number for each of `count` rows of the examples `numbers`.

    `owners` holds for each row the index of its example, where examples have different numbers of rows.
    """
    if owners is not None:
        within = np.arange(count) - np.searchsorted(owners, owners)
        return numbers[owners] * 2**20 + within
    if count == len(numbers):
        return numbers
    if count % len(numbers):  # examples of unequal length, identified only by their order
        return numbers[0] * 2**20 + np.arange(count)
    return (numbers[:, None] * (count // len(numbers)) + np.arange(count // len(numbers))).ravel()


def row_examples(numbers: np.ndarray, count: int, owners: np.ndarray | None = None) -> np.ndarray:
    """Return for each of `count` rows the number of its example."""
    if owners is not None:
        return numbers[owners]
    if count % len(numbers):
        raise ShapeError(
            f"{count:,} rows can't be told apart by {len(numbers):,} examples; pass `owners`, the place of each row's "
            "example in the batch."
        )
    return np.repeat(numbers, count // len(numbers))


def hashes(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return a well-mixed 64-bit number for every (seed, number): SplitMix64's finaliser, with 30, 30, 31 as shifts."""
    with np.errstate(over="ignore"):
        mixed = numbers.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
        return mixed ^ (mixed >> np.uint64(31))


def chunk_of(numbers: np.ndarray, chunks: int) -> np.ndarray:
    """Return the chunk of every example: a salted hash of its number, so that no order of the data matters."""
    return (hashes(SALT, numbers) % np.uint64(max(chunks, 1))).astype(np.int64)


def summed(sums: Tensor, without: int | None) -> Tensor:
    """Return the sum over chunks, the leading axis, but for one that is left out."""
    if len(sums) == 1:
        return sums[0]
    if without is None:
        return sums.sum(0)
    # no subtraction: the chunk left out may hold an example far from all others
    return sums[:without].sum(0) + sums[without + 1 :].sum(0)


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
