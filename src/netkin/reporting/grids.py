"""The content of a heatmap: named rows and columns, values and holes; layers by layers, layers by methods, or models.

Also which layer of one model corresponds to a layer of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from netkin.reporting.scales import Scale, scales_of
from netkin.results import Comparison, Comparisons, Series, Values
from netkin.results.labels import (
    column_label,
    has_classes,
    is_apart,
    is_of_tasks,
    is_worth,
    listing,
    pair_label,
    tables_by_name,
)
from netkin.results.text import cells, values_and_errors

SAME_MODEL = "a model is not compared with itself here"
NOT_COMPARED = "these two were not compared"
ROOM = 30  # columns, up to which cells have room for standard errors
MOST_BLOCKS = 200  # rows, up to which the blocks of tasks are shown in one picture
SHARED, APART = "pairs with the same examples in the same buckets", "pairs with other examples or other buckets"
NOTHING_SHARED = "compared, but without a value for any pair of layers that count"


@dataclass(frozen=True)
class Grid:
    """One heatmap: rows of the first model against columns of the second, or models against models.

    A list has a row for each pair of layers and a column for each table of `listed`.
    """

    id: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray
    scale: Scale
    errors: np.ndarray | None = None
    holes: Mapping[tuple[int, int], str] = field(default_factory=dict)
    best: Mapping[int, int] = field(default_factory=dict)
    written: Sequence[Sequence[str]] | None = None  # where another picture decides how the numbers are written
    widest: int = 4
    listed: tuple[str, ...] = ()
    models: tuple[str, ...] = ()  # whose rows, and columns, these are where there are several
    note: str = ""  # which pairs of models it shows, where not all
    elsewhere: str = ""  # why the others have no value here

    @property
    def borders(self) -> list[int]:
        """The places at which the rows, and columns, of another model begin."""
        return [k for k, (one, other) in enumerate(pairwise(self.models), start=1) if one != other]

    @property
    def texts(self) -> Sequence[Sequence[str]]:
        """The values as the cells show them."""
        if self.errors is not None and self.tails:
            return values_and_errors(self.values, self.errors)[0]
        return cells(self.values) if self.written is None else self.written

    @property
    def tails(self) -> Sequence[Sequence[str]]:
        """The standard errors as the cells show them, as ±0.02; none at all where there are none, or no room."""
        known = self.errors is not None and bool(np.isfinite(self.errors).any())
        if self.errors is None or not known or self.written is not None or len(self.columns) > ROOM:
            return []
        return values_and_errors(self.values, self.errors)[1]

    @property
    def letters(self) -> int:
        """How many letters the widest number takes; errors are written smaller."""
        smaller = [len(tail) - 1 for line in self.tails for tail in line]
        return max(self.widest, *(len(text) for line in self.texts for text in line), *smaller, 0)

    def pair(self, i: int, j: int) -> str:
        """Return what a cell is about."""
        return f"{self.rows[i]}, {self.listed[j]}" if self.listed else f"{self.rows[i]} × {self.columns[j]}"

    def reasons(self) -> Counter[str]:
        """Return for each reason how many pairs have no value for it; in a list a row is one pair."""
        if not self.listed:
            return Counter(self.holes.values())
        return Counter(reason for reason, _ in {(reason, i) for (i, _), reason in self.holes.items()})


def kept_columns(grids: Sequence[Grid]) -> list[int]:
    """Return the columns that have a value in any of the grids, or all where none has."""
    known = np.any([np.isfinite(grid.values).any(0) for grid in grids], axis=0)
    if not known.any() or grids[0].models:
        return list(range(len(grids[0].columns)))
    return np.flatnonzero(known).tolist()


def trimmed(grid: Grid, columns: Sequence[int]) -> Grid:
    """Return the heatmap of some columns alone.

    Example:
        >>> grid = Grid("cka", ("a", "b"), ("x", "y"), np.array([[np.nan, 1], [np.nan, 0.5]]), Scale(0, 1, True))
        >>> trimmed(grid, kept_columns([grid])).columns
        ('y',)
    """
    if len(columns) == len(grid.columns):
        return grid
    over = {place: k for k, place in enumerate(columns)}
    return replace(
        grid,
        columns=tuple(grid.columns[j] for j in columns),
        values=grid.values[:, columns],
        errors=None if grid.errors is None else grid.errors[:, columns],
        holes={(i, over[j]): why for (i, j), why in grid.holes.items() if j in over},
        best={i: over[j] for i, j in grid.best.items()},
        written=None if grid.written is None else [[line[j] for j in columns] for line in grid.written],
        listed=tuple(grid.listed[j] for j in columns) if grid.listed else (),
    )


def grids_of(comparison: Comparison, measure: str | None = None) -> list[Grid]:
    """Return the heatmaps of a comparison, or of `measure` alone; tables of one name share their scale.

    Where each layer is compared with at most one other, they are lists: pairs of layers by all tables of one name.
    """
    tables = list(comparison.tables.values()) if measure is None else [comparison.table(measure)]
    scales, pairs = scales_of(tables), listing(comparison)
    if not pairs:
        return [replace(grid_of(table), scale=scales[table.id]) for table in tables]
    first = sorted(
        tables_by_name(tables).items(), key=lambda item: not is_worth(item[1][0])
    )  # scores of stitches first
    return [_list(name, own, pairs, scales[own[0].id]) for name, own in first]


def grid_of(table: Values) -> Grid:
    """Return the heatmap of a measure's table, with the best match of each row that has several values marked."""
    rows, columns = _places(table.layers_a), _places(table.layers_b)
    holes = {(rows[a], columns[b]): reason for (a, b), reason in table.holes.items()}
    # networks are each their own best match; classes, tasks and clients have none
    choices = np.isfinite(table.values).sum(axis=1) * (table.axes == ("layer", "layer"))
    best = {rows[a]: columns[b] for a, (b, _) in table.best_matches().items() if choices[rows[a]] > 1}
    return Grid(table.id, table.layers_a, table.layers_b, table.values, Scale.of(table), table.errors, holes, best)


def _list(name: str, tables: Sequence[Values], pairs: Sequence[tuple[int, int]], scale: Scale) -> Grid:
    names = [(tables[0].layers_a[i], tables[0].layers_b[j]) for i, j in pairs]
    rows, ids = tuple(pair_label(tables, a, b) for a, b in names), tuple(table.id for table in tables)
    holes = {(k, m): t.holes[pair] for k, pair in enumerate(names) for m, t in enumerate(tables) if pair in t.holes}
    errors = None if all(table.errors is None for table in tables) else _picked([t.errors for t in tables], pairs)
    values, columns = _picked([table.values for table in tables], pairs), tuple(map(column_label, tables))
    return Grid(name, rows, columns, values, scale, errors, holes, listed=ids)


def _picked(matrices: Sequence[np.ndarray | None], pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return pairs by matrices, NaN where there is no matrix."""
    return np.array([[np.nan if matrix is None else matrix[pair] for matrix in matrices] for pair in pairs])


def summary_grids(comparisons: Sequence[Comparison]) -> list[Grid]:
    """Return for each measure the models × models heatmap of means, or the blocks of tasks.

    There are none where a pair of models occurs twice.
    """
    pairs = [(c.a, c.b) for c in comparisons]
    if len(pairs) < 2 or len(set(pairs)) < len(pairs):
        return []
    tables = {table.id: table for c in comparisons for table in c.tables.values()}
    layers = {name: own for c in comparisons for name, own in ((c.a, c.layers_a), (c.b, c.layers_b))}
    if all(map(is_of_tasks, tables.values())) and sum(map(len, layers.values())) <= MOST_BLOCKS:
        return [grid for id_ in tables for grid in _blocks(comparisons, id_, layers)]
    grids = {id_: _summary([c for c in comparisons if id_ in c.tables], table) for id_, table in tables.items()}
    for own in tables_by_name(tables.values()).values():
        together = np.concatenate([grids[table.id].values.ravel() for table in own])
        for table in own:
            grids[table.id] = replace(grids[table.id], scale=Scale.of(table, together))
    return list(grids.values())


def _summary(found: Sequence[Comparison], table: Values) -> Grid:
    comparisons = Comparisons(found)
    values, models = comparisons.summary(table.id), comparisons.models
    holes = {(i, j): _why(comparisons, models[i], models[j]) for i, j in np.argwhere(np.isnan(values)).tolist()}
    return Grid(table.id, models, models, values, Scale.of(table, values), holes=holes)


def _blocks(comparisons: Sequence[Comparison], id_: str, layers: Mapping[str, Sequence[str]]) -> Iterator[Grid]:
    """Yield all layers of all tasks against each other: the pairs that share examples and buckets, and the others."""
    keys = [(name, layer) for name, own in layers.items() for layer in own]
    for apart, note, other in ((False, SHARED, APART), (True, APART, SHARED)):
        chosen = [c for c in comparisons if id_ in c.tables and is_apart(c.tables[id_]) is apart]
        if chosen:
            grid = _block_grid(chosen, id_, keys, f"{other} have a picture of their own")
            yield replace(grid, models=tuple(name for name, _ in keys), note=note)


def _block_grid(chosen: Sequence[Comparison], id_: str, keys: Sequence[tuple[str, str]], elsewhere: str) -> Grid:
    place = {key: k for k, key in enumerate(keys)}
    values, reasons = np.full((len(keys), len(keys)), np.nan), dict[tuple[int, int], str]()
    errors = values.copy()
    for c in chosen:
        table, a, b = c.tables[id_], [place[c.a, x] for x in c.layers_a], [place[c.b, y] for y in c.layers_b]
        for whole, own in ((values, table.values), (errors, table.to_errors())):
            whole[np.ix_(a, b)], whole[np.ix_(b, a)] = own, own.T
        for (x, y), reason in table.holes.items():
            i, j = place[c.a, x], place[c.b, y]
            reasons[i, j] = reasons[j, i] = reason
    holes = {(i, j): reasons.get((i, j), elsewhere) for i, j in np.argwhere(np.isnan(values)).tolist()}
    labels, known = tuple(map("/".join, keys)), bool(np.isfinite(errors).any())
    scale = Scale.of(chosen[0].tables[id_], values)
    return Grid(id_, labels, labels, values, scale, errors if known else None, holes, elsewhere=elsewhere)


def frames(series: Series, measure: str) -> list[Grid]:
    """Return the heatmap of a measure at each step: all on one scale, their numbers written alike."""
    tables = [comparison.tables[measure] for comparison in series.comparisons]
    stacked = np.concatenate([table.values for table in tables])
    scale, texts, rows = Scale.of(tables[0], stacked), cells(stacked), len(tables[0].layers_a)
    widest = max([4, *(len(text) for line in texts for text in line)])
    return [
        replace(grid_of(table), scale=scale, written=texts[k * rows : (k + 1) * rows], widest=widest)
        for k, table in enumerate(tables)
    ]


def _why(comparisons: Comparisons, a: str, b: str) -> str:
    if (a, b) in comparisons:
        return NOTHING_SHARED
    return SAME_MODEL if a == b else NOT_COMPARED


def _places(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def partners(comparison: Comparison) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of layers that correspond, and in what; none where the columns are classes.

    Of a comparison that is a list of pairs it is these; they may correspond in nothing but having been requested.
    """
    if has_classes(comparison):
        return [], ""
    (found, how), listed = corresponding(comparison.layers_a, comparison.layers_b), listing(comparison)
    return (listed, how if set(listed) <= set(found) else "") if listed else (found, how)


def corresponding(rows: Sequence[str], columns: Sequence[str]) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of places that correspond, and in what: name, place, or relative depth.

    Example:
        >>> corresponding(["in", "mid", "out"], ["in", "out"])
        ([(0, 0), (2, 1)], 'same name')
        >>> corresponding(["a", "b", "c"], ["x", "y", "z", "u", "v"])
        ([(0, 0), (1, 2), (2, 4)], 'same relative depth')
    """
    places = {name: j for j, name in enumerate(columns)}
    named = [(i, places[name]) for i, name in enumerate(rows) if name in places]
    if named or not (rows and columns):
        return named, "same name"
    if len(rows) == len(columns):
        return [(i, i) for i in range(len(rows))], "same place"
    return [(i, _relative(i, len(rows), len(columns))) for i in range(len(rows))], "same relative depth"


def _relative(place: int, count: int, other: int) -> int:
    return round(place * (other - 1) / (count - 1)) if count > 1 else 0
