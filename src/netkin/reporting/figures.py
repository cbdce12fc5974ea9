"""Static figures for papers, drawn with matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from netkin.errors import ShapeError, ValueFault
from netkin.reporting.drawing import (
    bar_beside,
    empty_figure,
    heatmap_into,
    kind_of,
    matplotlib,
    refuse_file,
    write_figure,
)
from netkin.reporting.grids import Grid, grids_of, summary_grids
from netkin.reporting.naming import told_apart
from netkin.reporting.series_figures import lines_into, series_figure
from netkin.reporting.wording import shortened
from netkin.results import Comparison, Comparisons, Series


def plot(
    results: Comparison | Comparisons | Series,
    measure: str | None = None,
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
    *,
    steps: Sequence[int] | None = None,
) -> Any:
    """Return a figure with a heatmap for each measure, or for `measure` alone; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, the one heatmap is drawn there. The ending of `path` chooses PNG, SVG or PDF.
    A series becomes heatmaps at `steps`, or at a few spread over the run, above the lines of its layers; into `ax` go
    the lines alone.
    """
    kind = kind_of(path)
    refuse_file(measure)
    matplotlib("matplotlib")
    figure = (
        _of_series(results, measure, ax, steps) if isinstance(results, Series) else _of(results, measure, ax, steps)
    )
    if path is not None:
        write_figure(figure, path, kind)
    return figure


def _of_series(series: Series, measure: str | None, ax: Any, steps: Sequence[int] | None) -> Any:
    measures = list(series.measures) if measure is None else [series.table(measure).id]
    if not measures:
        raise ValueFault("nothing to draw: this result holds no measure.")
    if ax is None:
        return series_figure(series, measures, steps)
    if len(measures) != 1:
        told = ", ".join(measures)
        raise ShapeError(f"one pair of axes takes one measure, and here are {len(measures)}: {told}. Name a measure.")
    lines_into(ax, series, measures[0])
    return ax.figure


def _of(results: Comparison | Comparisons, measure: str | None, ax: Any, steps: Sequence[int] | None) -> Any:
    if steps is not None:
        raise ValueFault(f"`steps` chooses among those of a series; this is a {type(results).__name__}.")
    grids = _grids(results, measure)
    names = _names(results, grids[0]) if isinstance(results, Comparison) else ("", "")
    return _panels(grids, names) if ax is None else _inside(ax, grids, names)


def _grids(results: Comparison | Comparisons, measure: str | None) -> list[Grid]:
    if isinstance(results, Comparison):
        grids = grids_of(results, measure)
    else:
        everything = summary_grids(list(results.values()))
        grids = [grid for grid in everything if measure in (None, grid.id)]
    if not grids:
        raise ValueFault(
            f"nothing to draw: {f'no summary of {measure!r}' if measure else 'this result holds no measure'}."
        )
    return grids


def _names(comparison: Comparison, grid: Grid) -> tuple[str, str]:
    """Return what stands beside the rows and below the columns."""
    apart = told_apart([comparison.a, comparison.b])
    a, b = apart[comparison.a], apart[comparison.b]
    return (f"{a} {'→' if grid.scale.worth else 'and'} {b}", "") if grid.listed else (a, b)


def _inside(ax: Any, grids: Sequence[Grid], names: tuple[str, str]) -> Any:
    if len(grids) != 1:
        ids = ", ".join(grid.id for grid in grids)
        raise ShapeError(f"one pair of axes takes one heatmap, and here are {len(grids)}: {ids}. Name a measure.")
    bar_beside(ax, heatmap_into(ax, grids[0], names), grids[0])
    return ax.figure


def _panels(grids: Sequence[Grid], names: tuple[str, str]) -> Any:
    columns = min(len(grids), 5 if grids[0].listed else 3 if len(grids) in (3, 5, 6, 9) else 2)
    rows = math.ceil(len(grids) / columns)
    width, height = _inches(grids[0])
    figure = empty_figure(width * columns, height * rows)
    for place, grid in enumerate(grids, start=1):
        ax = figure.add_subplot(rows, columns, place)
        bar_beside(ax, heatmap_into(ax, grid, names), grid)
    return figure


def _inches(grid: Grid) -> tuple[float, float]:
    """Return the size of a panel: cells of a fair size, and room for names and the bar of colours."""
    longest = [max((len(name) for name in shortened(names)), default=0) for names in (grid.rows, grid.columns)]
    cell = min(0.42, max(0.09, 5.0 / max(len(grid.columns), len(grid.rows), 1)))
    width = max(cell * len(grid.columns), 1.6) + 0.075 * longest[0] + 1.2
    return width, max(cell * len(grid.rows), 1.6) + 0.075 * longest[1] + 0.7
