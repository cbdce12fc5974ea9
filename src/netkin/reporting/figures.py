"""Static figures for papers, drawn with matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.errors import ShapeError, ValueFault
from netkin.reporting.drawing import (
    bar_beside,
    empty_figure,
    heatmap_into,
    kind_of,
    matplotlib,
    name_axis,
    refuse_file,
    write_figure,
    write_words,
)
from netkin.reporting.federation_page import federation_figure, rounds_into
from netkin.reporting.grids import Grid, grid_of, grids_of, partners, summary_grids
from netkin.reporting.ranking_page import ranking_figure, ranking_into
from netkin.reporting.scales import scales_of
from netkin.reporting.series_figures import lines_into, series_figure
from netkin.reporting.sparsity_page import sparsity_figure
from netkin.reporting.task_page import way_names
from netkin.reporting.wording import shortened, told_apart
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, Values
from netkin.results.labels import pair_label
from netkin.results.text import has_errors
from netkin.results.weight_sparsity import SparsityStudy

PROFILE = 2.6  # inches that the profile is high
MARKS = "os^D"
Profiled = tuple[Comparison, list[Values]]


def plot(
    results: Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | SparsityStudy
    | TaskAccuracies
    | Sequence[TaskAccuracies],
    measure: str | None = None,
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
    *,
    steps: Sequence[int] | None = None,
    profile: bool | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> Any:
    """Return a figure with a heatmap for each measure, or for `measure` alone; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, the one heatmap is drawn there. The ending of `path` chooses PNG, SVG or PDF.
    A series becomes heatmaps at `steps`, or at a few spread over the run, above the lines of its layers; into `ax` go
    the lines alone. Below the heatmaps of a comparison stands the `profile` of its corresponding layers with bars for
    95 % intervals: by default where there are standard errors; with True always, and then alone into `ax`. A ranking
    becomes a panel for each score, or for the score that `measure` names; a federation its accuracies by round beside
    the similarity of its clients, of which the lines alone go into `ax`; tasks learnt in a row their accuracy matrix; a
    sparsity study its networks side by side.

    Args:
        results: A comparison, several, a series, a ranking, a federation, ways to learn tasks in a row, or a sparsity
            study.
        measure: The one measure to draw; by default all.
        path: File to write the figure to.
        ax: Matplotlib axes to draw into, for one measure.
        steps: Steps of a series to draw.
        profile: Whether to draw the profile.
        title: Title above the whole figure.
        overwrite: Write also over a file that is no figure of netkin's.
    """
    kind = kind_of(path)
    refuse_file(measure)
    matplotlib("matplotlib")
    if isinstance(results, Comparisons) and len(results) == 1:
        (results,) = results.values()  # there is nothing to sum up
    if profile and not isinstance(results, Comparison):
        raise ValueFault(f"`profile` is for a comparison; this is a {type(results).__name__}.")
    if isinstance(results, Series):
        figure = _of_series(results, measure, ax, steps)
    elif isinstance(results, Ranking):
        figure = _of_ranking(results, measure, ax)
    elif isinstance(results, SparsityStudy):
        figure = sparsity_figure(results)
    elif isinstance(results, (Comparison, Comparisons)):
        figure = _of(results, measure, ax, steps, profile)
    else:
        figure = _of_training(results, measure, ax, steps)
    if title is not None:
        figure.suptitle(title)
    if path is not None:
        write_figure(figure, path, kind, overwrite=overwrite)
    return figure


def _of_ranking(ranking: Ranking, score: str | None, ax: Any) -> Any:
    if ax is None:
        return ranking_figure(ranking, ranking.scores if score is None else [ranking.table(score).id])
    ranking_into(ax, ranking if score is None else ranking.by(score))
    return ax.figure


def _of_training(results: Any, measure: str | None, ax: Any, steps: Sequence[int] | None) -> Any:
    """Return what became of clients or of tasks."""
    if measure is not None or steps is not None:
        raise ValueFault(
            "`measure` and `steps` are for comparisons, series and rankings; a federation and tasks have none."
        )
    if not isinstance(results, Federation):
        return _of_tasks(results if isinstance(results, (list, tuple)) else [results], ax)
    if ax is None:
        return federation_figure(results)
    rounds_into(ax, results)
    return ax.figure


def _of_tasks(given: Sequence[Any], ax: Any) -> Any:
    """Return the accuracy matrix of each way to learn tasks, a heatmap each."""
    records = [getattr(one, "record", one) for one in given]
    strange = next((type(one).__name__ for one in records if not isinstance(one, TaskAccuracies)), None)
    if strange or not records:
        raise ValueFault(
            "a figure shows comparisons, a series, a ranking, a federation or ways to learn tasks; got "
            f"{strange or 'none'}."
        )
    labels = [f"accuracy, {label}" if len(records) > 1 else "accuracy" for label in way_names(records)]
    grids = [replace(grid_of(way.table()), id=label) for label, way in zip(labels, records, strict=True)]
    names = ("after task", "on task")
    return _panels(grids, names, None) if ax is None else _inside(ax, grids, names)


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


def _of(
    results: Comparison | Comparisons, measure: str | None, ax: Any, steps: Sequence[int] | None, profile: bool | None
) -> Any:
    if steps is not None:
        raise ValueFault(f"`steps` chooses among those of a series; this is a {type(results).__name__}.")
    grids = _grids(results, measure)
    names = _names(results, grids[0]) if isinstance(results, Comparison) else ("", "")
    profiled = _profiled(results, measure, profile) if isinstance(results, Comparison) else None
    if ax is None:
        return _panels(grids, names, profiled)
    if profile and profiled:
        profile_into(ax, *profiled)
        return ax.figure
    return _inside(ax, grids, names)


def _profiled(comparison: Comparison, measure: str | None, wanted: bool | None) -> Profiled | None:
    """Return the comparison and its tables whose profile is drawn; None where it is not asked for."""
    tables = list(comparison.tables.values()) if measure is None else [comparison.table(measure)]
    found = bool(partners(comparison)[0])
    if wanted and not found:
        raise ValueFault("no layers correspond, so that there is no profile to draw.")
    drawn = found and (any(map(has_errors, tables)) if wanted is None else wanted)
    return (comparison, tables) if drawn else None


def profile_into(ax: Any, comparison: Comparison, tables: Sequence[Values]) -> None:
    """Draw the values of corresponding layers, from the first to the last, with bars for their 95 % intervals.

    Measures on one scale are drawn by their values, others by where these lie between far and close.
    """
    pairs, _ = partners(comparison)
    rows, columns = ([pair[side] for pair in pairs] for side in (0, 1))
    scales = scales_of(tables)
    alike = len(set(scales.values())) == 1
    for k, table in enumerate(tables):
        values, *ends = (array[rows, columns] for array in (table.values, *table.interval()))
        if not alike:
            values, *ends = map(scales[table.id].closeness, (values, *ends))
        reach = [np.nan_to_num(np.abs(values - end)) for end in np.sort(ends, axis=0)]
        places = np.arange(len(pairs)) + 0.06 * (k - (len(tables) - 1) / 2)
        ax.errorbar(places, values, yerr=reach, marker=MARKS[k % len(MARKS)], markersize=3, linewidth=1, capsize=2)
    labels = [pair_label(tables, comparison.layers_a[i], comparison.layers_b[j]) for i, j in pairs]
    _name_profile(ax, labels, tables, alike)


def _name_profile(ax: Any, labels: Sequence[str], tables: Sequence[Values], alike: bool) -> None:
    bars = "95 % intervals" if any(map(has_errors, tables)) else ""
    name_axis(ax.xaxis, labels, "", upright=True)
    said = [tables[0].name if alike and len({table.name for table in tables}) == 1 else "value" if alike else "", bars]
    write_words(ax.set_ylabel, ", ".join(filter(None, said)), fontsize=8)
    if not alike:
        ax.set_ylim(-0.04, 1.04)
        ax.set_yticks([0, 1], ["far", "close"])
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    legend = ax.legend([table.id for table in tables], fontsize=7, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


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


def _panels(grids: Sequence[Grid], names: tuple[str, str], profiled: Profiled | None) -> Any:
    columns = min(len(grids), 5 if grids[0].listed else 3 if len(grids) in (3, 5, 6, 9) else 2)
    rows = math.ceil(len(grids) / columns)
    width, height = _inches(grids[0])
    heights = [height] * rows + [PROFILE] * (profiled is not None)
    figure = empty_figure(width * columns, sum(heights))
    places = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, grid in enumerate(grids):
        ax = figure.add_subplot(places[divmod(place, columns)])
        bar_beside(ax, heatmap_into(ax, grid, names), grid)
    if profiled is not None:
        profile_into(figure.add_subplot(places[rows, :]), *profiled)
    return figure


def _inches(grid: Grid) -> tuple[float, float]:
    """Return the size of a panel: cells of a fair size, and room for names and the bar of colours."""
    longest = [max((len(name) for name in shortened(names)), default=0) for names in (grid.rows, grid.columns)]
    cell = min(0.42, max(0.09, 5.0 / max(len(grid.columns), len(grid.rows), 1)))
    width = max(cell * len(grid.columns), 1.6) + 0.075 * longest[0] + 1.2
    return width, max(cell * len(grid.rows), 1.6) + 0.075 * longest[1] + 0.7
