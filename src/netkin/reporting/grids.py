"""The content of a heatmap: named rows and columns, values, the scale of the values and its colours.

Rows and columns are layers, layers and methods, or models. On the scale 1 is the close or good end. Colours go from
dark violet (far) to bright yellow (close), with lightness rising in even steps. Lightness alone orders them, so that
they read the same to colour-blind people and on a black-and-white print. The anchors are given in OKLCh, and mixed in
OKLab, where equal steps look equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import numpy as np

from netkin.results import Comparison, Comparisons, Series, Values
from netkin.results.labels import (
    column_label,
    is_apart,
    is_of_tasks,
    is_score,
    listing,
    pair_label,
    tables_by_name,
)
from netkin.results.text import cells, values_and_errors

ROOM = 30  # columns, up to which cells have room for standard errors
MOST_BLOCKS = 200  # rows, up to which the blocks of tasks are shown in one picture
SHARED, APART = "pairs with the same examples in the same buckets", "pairs with other examples or other buckets"
EXPECTED = {"relative_accuracy": (0.0, 1.0)}  # ends that an open scale shows at least, so that colours say how much
# lightness, chroma, hue in degrees, at equal distances along the scale
ANCHORS = ((0.25, 0.09, 300.0), (0.42, 0.13, 275.0), (0.59, 0.10, 225.0), (0.76, 0.12, 165.0), (0.93, 0.16, 105.0))
SHADES = 256
NEGLIGIBLE = 0.1  # below 0 that estimates of no similarity fall by chance
# lines of layers, the first darkest, each clear of the page behind it: on white, on black, and on either
DEPTHS = {
    "light": ((0.30, 0.14, 300.0), (0.40, 0.14, 258.0), (0.48, 0.09, 205.0), (0.55, 0.13, 145.0), (0.62, 0.16, 50.0)),
    "both": ((0.53, 0.17, 300.0), (0.55, 0.15, 258.0), (0.58, 0.10, 205.0), (0.61, 0.14, 145.0), (0.64, 0.16, 50.0)),
    "dark": ((0.60, 0.16, 300.0), (0.68, 0.13, 258.0), (0.76, 0.11, 205.0), (0.83, 0.13, 145.0), (0.93, 0.09, 80.0)),
}
LEVELS = 32  # of depth
# lines and groups in a notebook, whose page may be light or dark
GROUPS = ("#3b82c4", "#d0722a", "#2f9e77", "#c75f96", "#8a74cc", "#a38a1f", "#2a93b3", "#7d838f")

# Ottosson's OKLab: to the cones' cube roots, then from the cones to linear sRGB
_TO_CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


@dataclass(frozen=True)
class Scale:
    """The ends of a measure's scale and its direction; `is_score` is whether its values are scores of stitches."""

    low: float
    high: float
    higher_is_closer: bool
    open_ended: bool = False
    is_score: bool = False

    @classmethod
    def of(cls, table: Values, values: np.ndarray | None = None) -> Scale:
        """Return the scale of a measure: its bounds or, where one is open, the range of the values.

        So it is between tasks of different data too, whose values lie far from the upper bound whatever they are. The
        scale of a similarity that may be negative begins at 0 where none of the values is clearly below.
        """
        values = table.values if values is None else values
        if all(map(math.isfinite, table.bounds)) and not is_apart(table):
            low, high = table.bounds
            # a debiased similarity of nothing lies about 0: from -1 on, half of the colours would never be seen
            if table.higher_is_closer and low < 0 < high and not (values < -NEGLIGIBLE * high).any():
                low = 0.0
            return cls(low, high, table.higher_is_closer, is_score=is_score(table))
        known = np.concatenate([values[np.isfinite(values)], EXPECTED.get(table.quantity.name, ())])
        ends = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        return cls(*ends, table.higher_is_closer, ends != EXPECTED.get(table.quantity.name), is_score(table))

    @property
    def words(self) -> tuple[str, str]:
        """What the far and the close end are called: layers are far or close, stitches are poor or good."""
        return ("poor", "good") if self.is_score else ("far", "close")

    @property
    def better(self) -> str:
        """Which way values are closer, or better."""
        return f"{'higher' if self.higher_is_closer else 'lower'} is {'better' if self.is_score else 'closer'}"

    @property
    def far(self) -> float:
        """The value at the far end."""
        return self.low if self.higher_is_closer else self.high

    @property
    def close(self) -> float:
        """The value at the close end."""
        return self.high if self.higher_is_closer else self.low

    def closeness(self, values: np.ndarray) -> np.ndarray:
        """Return where the values lie between the far end, 0, and the close end, 1; NaN stays NaN.

        Example:
            >>> Scale(0, 2, higher_is_closer=False).closeness(np.array([0.0, 0.5, 2.0])).tolist()
            [1.0, 0.75, 0.0]
        """
        if self.high <= self.low:  # all values alike
            return np.where(np.isnan(values), np.nan, 0.5)
        place = np.clip((values - self.low) / (self.high - self.low), 0, 1)
        return place if self.higher_is_closer else 1 - place

    def shade_numbers(self, values: np.ndarray) -> np.ndarray:
        """Return the number of each value's shade, and -1 for a hole."""
        place = self.closeness(values)
        return np.where(np.isnan(place), -1, np.rint(np.nan_to_num(place) * (SHADES - 1))).astype(int)


def scales_of(tables: Sequence[Values]) -> dict[str, Scale]:
    """Return the scales of tables by their ids; those of one name share one, so that they can be compared."""
    together = {name: np.concatenate([t.values.ravel() for t in own]) for name, own in tables_by_name(tables).items()}
    return {table.id: Scale.of(table, together[table.quantity.name]) for table in tables}


def zoomed(table: Values, own: np.ndarray) -> Scale:
    """Return the scale of a measure without the far part that no layer enters, in tenths.

    The lines of layers that are close throughout would else all lie on one another.
    """
    whole = Scale.of(table, own)
    if not np.isfinite(own).any():
        return whole
    least = math.floor(10 * float(np.nanmin(whole.closeness(own))) + 1e-9) / 10
    cut = min(least, 0.9) * (whole.high - whole.low)
    if whole.higher_is_closer:
        return Scale(whole.low + cut, whole.high, True, whole.open_ended)
    return Scale(whole.low, whole.high - cut, False, whole.open_ended)


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
    missing: Mapping[tuple[int, int], str] = field(default_factory=dict)
    best: Mapping[int, int] = field(default_factory=dict)
    written: Sequence[Sequence[str]] | None = None  # where another picture decides how the numbers are written
    widest: int = 4
    listed: tuple[str, ...] = ()
    models: tuple[str, ...] = ()  # whose rows, and columns, these are where there are several
    note: str = ""  # which pairs of models it shows, where not all
    elsewhere: str = ""  # why the others have no value here
    counts: np.ndarray | None = None  # over how many pairs of layers each value is the mean

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
        """The standard errors as the cells show them, as ±0.02; none at all where there are none, or no room.

        Under a mean it is the number of pairs of layers behind it, as n = 25, where that is not the same for all.
        """
        if self.counts is not None and len(set(self.counts[self.counts > 0].tolist())) > 1 and len(self.rows) <= ROOM:
            return [[f"n = {count}" if count else "" for count in line] for line in self.counts.tolist()]
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
            return Counter(self.missing.values())
        return Counter(reason for reason, _ in {(reason, i) for (i, _), reason in self.missing.items()})


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
        missing={(i, over[j]): why for (i, j), why in grid.missing.items() if j in over},
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
    # scores of stitches first
    first = sorted(tables_by_name(tables).items(), key=lambda item: not is_score(item[1][0]))
    return [_list(name, own, pairs, scales[own[0].id]) for name, own in first]


def grid_of(table: Values) -> Grid:
    """Return the heatmap of a measure's table, with the best match of each row that has several values marked."""
    rows, columns = ({name: k for k, name in enumerate(names)} for names in (table.layers_a, table.layers_b))
    missing = {(rows[a], columns[b]): reason for (a, b), reason in table.missing.items()}
    # networks are each their own best match; classes, tasks and clients have none
    choices = np.isfinite(table.values).sum(axis=1) * (table.axes == ("layer", "layer"))
    best = {rows[a]: columns[b] for a, (b, _) in table.best_matches().items() if choices[rows[a]] > 1}
    return Grid(table.id, table.layers_a, table.layers_b, table.values, Scale.of(table), table.errors, missing, best)


def _list(name: str, tables: Sequence[Values], pairs: Sequence[tuple[int, int]], scale: Scale) -> Grid:
    names = [(tables[0].layers_a[i], tables[0].layers_b[j]) for i, j in pairs]
    rows, ids = tuple(pair_label(tables, a, b) for a, b in names), tuple(table.id for table in tables)
    missing = {
        (k, m): t.missing[pair] for k, pair in enumerate(names) for m, t in enumerate(tables) if pair in t.missing
    }
    errors = None if all(table.errors is None for table in tables) else _picked([t.errors for t in tables], pairs)
    values, columns = _picked([table.values for table in tables], pairs), tuple(map(column_label, tables))
    return Grid(name, rows, columns, values, scale, errors, missing, listed=ids)


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
    models, summary, counts = comparisons.models, comparisons.summaries()[table.id], comparisons.layer_counts(table.id)
    place = {name: k for k, name in enumerate(models)}
    missing = {(place[a], place[b]): why for (a, b), why in summary.missing.items()}
    scale = Scale.of(table, summary.values)
    return Grid(table.id, models, models, summary.values, scale, missing=missing, counts=counts)


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
        for (x, y), reason in table.missing.items():
            i, j = place[c.a, x], place[c.b, y]
            reasons[i, j] = reasons[j, i] = reason
    missing = {(i, j): reasons.get((i, j), elsewhere) for i, j in np.argwhere(np.isnan(values)).tolist()}
    labels, known = tuple(map("/".join, keys)), bool(np.isfinite(errors).any())
    scale = Scale.of(chosen[0].tables[id_], values)
    return Grid(id_, labels, labels, values, scale, errors if known else None, missing, elsewhere=elsewhere)


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


# --- colours ----------------------------------------------------------------------------------------------------------


@cache
def palette() -> tuple[str, ...]:
    """Return the shades from far to close as ``#rrggbb``."""
    return tuple("#{:02x}{:02x}{:02x}".format(*rgb) for rgb in shades().tolist())


def shades(count: int = SHADES) -> np.ndarray:
    """Return `count` colours from far to close as rows of red, green and blue, 0 to 255."""
    return _mixed(ANCHORS, count)


def depths(page: str = "light") -> list[str]:
    """Return the colours of lines from the first layer to the last, on a light page, a dark one or "both"."""
    return ["#{:02x}{:02x}{:02x}".format(*rgb) for rgb in _mixed(DEPTHS[page], LEVELS).tolist()]


def level(place: int, count: int) -> int:
    """Return the number of the colour of layer `place` among `count`.

    Example:
        >>> level(0, 5), level(4, 5), level(0, 1)
        (0, 31, 0)
    """
    return round(place / max(count - 1, 1) * (LEVELS - 1))


def _mixed(anchors: tuple[tuple[float, float, float], ...], count: int) -> np.ndarray:
    lightness, chroma, hue = np.array(anchors).T
    lab = np.stack([lightness, chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))])
    places, steps = np.linspace(0, 1, len(anchors)), np.linspace(0, 1, count)
    mixed = np.stack([np.interp(steps, places, channel) for channel in lab], axis=1)
    linear = np.clip((mixed @ _TO_CONES.T) ** 3 @ _TO_RGB.T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(255 * encoded).astype(int)


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on `colour`.

    Example:
        >>> ink("#fde725"), ink("#2a1a4a")
        ('#000', '#fff')
    """
    return "#000" if contrast(colour, "#000000") >= contrast(colour, "#ffffff") else "#fff"


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by the rule of WCAG 2, from 1 to 21."""
    dark, light = sorted([_luminance(first), _luminance(second)])
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
