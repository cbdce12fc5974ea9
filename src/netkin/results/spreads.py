"""Spreads: means and standard deviations over several comparisons, layer by layer; of one alone its values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from netkin.errors import NoValue
from netkin.results.listings import column_label, is_worth, pair_label
from netkin.results.text import HOLE, grid, terminal_width, wrapped

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

NAMED = 6  # pairs of layers with fewer values that are named


@dataclass(frozen=True)
class Cells:
    """One measure over several comparisons: mean, standard deviation and number of values of every pair of layers."""

    facts: Values
    means: np.ndarray
    deviations: np.ndarray
    counts: np.ndarray

    @property
    def column(self) -> str:
        """What tells this table from others of its name: how layers were stitched, or the whole id."""
        return column_label(self.facts)

    @property
    def block(self) -> str:
        """The tables that stand side by side with this one go by the same word."""
        return self.facts.name if is_worth(self.facts) else "similarity"

    def written(self, i: int, j: int) -> str:
        """Return a mean with its deviation, as far as there are such."""
        mean, deviation = self.means[i, j], self.deviations[i, j]
        if math.isnan(mean):
            return HOLE
        return f"{mean:.2f}" if math.isnan(deviation) else f"{mean:.2f} ± {deviation:.2f}"


@dataclass(frozen=True)
class Spread:
    """Means and standard deviations over comparisons, for the layers that all of them have: ``spread["cka"].means``."""

    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    tables: dict[str, Cells]
    comparisons: int

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Spread:
        """Return the spread over comparisons; refused where they share no layers."""
        rows = _shared([one.layers_a for one in comparisons])
        columns = _shared([one.layers_b for one in comparisons])
        if not (rows and columns):
            raise NoValue("the comparisons share no names of layers, so there is nothing to take a mean over.")
        ids = dict.fromkeys(name for one in comparisons for name in one.tables)
        tables = {name: _cells([one.tables[name] for one in comparisons if name in one], rows, columns) for name in ids}
        return cls(rows, columns, tables, len(comparisons))

    def __getitem__(self, measure: str) -> Cells:
        if measure not in self.tables:
            raise NoValue(f"no measure {measure!r} here; there are {', '.join(self.tables) or 'none'}.")
        return self.tables[measure]

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The places that have a value by any measure."""
        known = np.zeros((len(self.layers_a), len(self.layers_b)), dtype=bool)
        for cells in self.tables.values():
            known |= cells.counts > 0
        return [(i, j) for i, j in np.argwhere(known).tolist()]

    @property
    def is_profile(self) -> bool:
        """Whether each layer stands beside one other at most, so that a list says it all."""
        rows = [i for i, _ in self.pairs]
        return len(rows) == len(set(rows))

    def label(self, i: int, j: int) -> str:
        """Return the name of a pair of layers."""
        return pair_label([cells.facts for cells in self.tables.values()], self.layers_a[i], self.layers_b[j])

    def blocks(self) -> dict[str, list[Cells]]:
        """Return the tables that stand side by side: the similarities, then each score by all methods."""
        found: dict[str, list[Cells]] = {}
        for cells in self.tables.values():
            found.setdefault(cells.block, []).append(cells)
        return found

    def lines(self, width: int) -> Iterator[str]:
        """Yield the tables as text: layers by methods, or layers by layers where each meets many."""
        for word, side_by_side in self.blocks().items():
            if self.is_profile:
                labels = [self.label(i, j) for i, j in self.pairs]
                entries = [[cells.written(i, j) for cells in side_by_side] for i, j in self.pairs]
                yield from ["", word, *grid(labels, [cells.column for cells in side_by_side], entries, width)]
                continue
            for cells in side_by_side:
                entries = [[cells.written(i, j) for j in range(len(self.layers_b))] for i in range(len(self.layers_a))]
                yield from ["", cells.facts.id, *grid(self.layers_a, self.layers_b, entries, width)]
        if self.comparisons > 1:
            yield "\n" + wrapped(f"mean ± standard deviation over {self.told_count()}", width)

    def told_count(self) -> str:
        """Return over how many pairs of models the means are and, where some have no value, where they are fewer."""
        counts = {pair: self._counts(*pair) for pair in self.pairs}
        least, most = (choose((n for own in counts.values() for n in own), default=0) for choose in (min, max))
        pairs = f"{_range([least, most])} {'pair' if most == 1 else 'pairs'} of models"
        told = [f"{self.label(*pair)} {_range(own)}" for pair, own in counts.items() if min(own) < most]
        rest = [f"and {len(told) - NAMED} more"] if len(told) > NAMED else []
        return f"{pairs}, fewer where values are missing: {', '.join(told[:NAMED] + rest)}" if told else pairs

    def _counts(self, i: int, j: int) -> list[int]:
        """Return how many values each table has at a place, as far as it has any."""
        return [int(cells.counts[i, j]) for cells in self.tables.values() if cells.counts[i, j]]


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _shared(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for name in names[0] if all(name in others for others in names)) if names else ()


def _cells(tables: Sequence[Values], rows: Sequence[str], columns: Sequence[str]) -> Cells:
    stacked = np.array([_picked(table, rows, columns) for table in tables])
    counts = np.isfinite(stacked).sum(axis=0)
    total = np.where(np.isfinite(stacked), stacked, 0.0).sum(axis=0)
    means = np.divide(total, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    squares = np.where(np.isfinite(stacked), (stacked - means) ** 2, 0.0).sum(axis=0)
    variance = np.divide(squares, counts - 1, out=np.full(counts.shape, np.nan), where=counts > 1)
    return Cells(tables[0], means, np.sqrt(variance), counts)


def _picked(table: Values, rows: Sequence[str], columns: Sequence[str]) -> Any:
    places = [table.layers_a.index(name) for name in rows], [table.layers_b.index(name) for name in columns]
    return table.values[np.ix_(*places)]
