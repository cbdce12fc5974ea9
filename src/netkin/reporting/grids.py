"""What a heatmap shows: named rows and columns, values and holes, whether of layers or of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from netkin.reporting.scales import Scale
from netkin.results import Comparison, Comparisons, Series, Values
from netkin.results.text import cells

SAME_MODEL = "a model is not compared with itself here"
NOT_COMPARED = "these two were not compared"
NOTHING_SHARED = "compared, but without a value for any pair of layers that count"


@dataclass(frozen=True)
class Grid:
    """One heatmap: rows of the first model against columns of the second, or models against models."""

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

    @property
    def texts(self) -> Sequence[Sequence[str]]:
        """The values as the cells show them."""
        return cells(self.values) if self.written is None else self.written

    @property
    def letters(self) -> int:
        """How many letters the widest number takes."""
        return max(self.widest, *(len(text) for line in self.texts for text in line), 0)


def grid_of(table: Values) -> Grid:
    """Return the heatmap of a measure's table, with the best match of each row marked."""
    rows, columns = _places(table.layers_a), _places(table.layers_b)
    holes = {(rows[a], columns[b]): reason for (a, b), reason in table.holes.items()}
    best = {rows[a]: columns[b] for a, (b, _) in table.best_matches().items()}
    return Grid(table.id, table.layers_a, table.layers_b, table.values, Scale.of(table), table.errors, holes, best)


def summary_grids(comparisons: Sequence[Comparison]) -> list[Grid]:
    """Return for each measure the models × models heatmap of means; none where a pair of models occurs twice."""
    pairs = [(c.a, c.b) for c in comparisons]
    if len(pairs) < 2 or len(set(pairs)) < len(pairs):
        return []
    measures = dict.fromkeys(measure for c in comparisons for measure in c.measures)
    return [_summary(Comparisons([c for c in comparisons if measure in c.tables]), measure) for measure in measures]


def _summary(comparisons: Comparisons, measure: str) -> Grid:
    values, models = comparisons.summary(measure), comparisons.models
    holes = {(i, j): _why(comparisons, models[i], models[j]) for i, j in np.argwhere(np.isnan(values)).tolist()}
    table = next(iter(comparisons.values())).tables[measure]
    return Grid(measure, models, models, values, Scale.of(table, values), holes=holes)


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
