"""A figure for each kind of result: which heatmaps and line charts it has, and their positions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.reporting.charts import (
    Axis,
    Chart,
    Line,
    StepAxis,
    axis_across,
    axis_up,
    chart_of,
    profile_charts,
    series_chart,
    spread,
)
from netkin.reporting.figures.drawing import (
    bar_beside,
    empty_figure,
    heatmap_into,
    ink_of,
    is_dark,
    lines_into,
    name_lines,
    plane_into,
    tree_into,
    write_words,
)
from netkin.reporting.grids import Grid, depths, frames, grid_of, grids_of, summary_grids
from netkin.reporting.page.diff_page import diff_chart
from netkin.reporting.page.federation_page import federation_heatmaps
from netkin.reporting.page.smaller_networks_page import compression_charts
from netkin.reporting.page.task_page import ranked_places, way_names
from netkin.reporting.words import short_names, shortened
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies, Values
from netkin.results.compression import Compression
from netkin.results.diff import Diff
from netkin.results.distances import distances_of
from netkin.results.labels import has_errors, is_worth, partners
from netkin.results.records import plain
from netkin.results.weight_sparsity import SparsityStudy

PROFILE = 2.6  # inches that the profile is high
PANES = 5  # steps of a series, unless they are chosen
NAMED = 16  # names on an axis of a small heatmap at most
MAP = 3.6  # inches: the side of a tree or a plane of models
NAME = 34  # letters in a line of a model's name
MAPPED = 60  # models that can be named in these
PANE, LINES = 2.1, 2.9  # inches: a heatmap's side, the height of the lines
Profiled = tuple[Comparison, list[Values]]


# --- comparisons ------------------------------------------------------------------------------------------------------


def comparison_figure(
    results: Comparison | Comparisons, measure: str | None, ax: Any, steps: Sequence[int] | None, profile: bool | None
) -> Any:
    """Return a heatmap for each measure, and below them the profile where one is requested or has errors."""
    if steps is not None:
        raise InvalidValue(f"`steps` chooses among those of a series; this is a {type(results).__name__}.")
    grids = _grids(results, measure)
    names = _names(results, grids[0]) if isinstance(results, Comparison) else ("", "")
    profiled = _profiled(results, measure, profile) if isinstance(results, Comparison) else None
    if ax is None and isinstance(results, Comparisons) and (maps := _maps(results, grids)):
        return _mapped(grids, maps)
    if ax is None:
        return _panels(grids, names, profiled)
    if profile and profiled:
        profile_into(ax, *profiled)
        return ax.figure
    return _inside(ax, grids, names)


def _profiled(comparison: Comparison, measure: str | None, wanted: bool | None) -> Profiled | None:
    """Return the comparison and its tables whose profile is drawn; None where it is not requested."""
    tables = list(comparison.tables.values()) if measure is None else [comparison.table(measure)]
    found = bool(partners(comparison)[0])
    if wanted and not found:
        raise InvalidValue("no layers correspond, so that there is no profile to draw.")
    drawn = found and (any(map(has_errors, tables)) if wanted is None else wanted)
    return (comparison, tables) if drawn else None


def profile_into(ax: Any, comparison: Comparison, tables: Sequence[Values]) -> None:
    """Draw the values of corresponding layers, from the first to the last, with bars for their 95 % intervals.

    Measures on one scale are drawn by their values; others, in one pair of axes, by where these lie between far and
    close.
    """
    charts, bars = profile_charts(comparison, tables), "95 % intervals" if any(map(has_errors, tables)) else ""
    if len(charts) == 1:
        lines_into(ax, charts[0], _up_words(charts[0]), legend=True)
        return
    lines = [_placed(line, chart.up) for chart in charts for line in chart.lines]
    lines_into(ax, replace(charts[0], lines=lines, up=Axis(0, 1)), bars, legend=True)
    ax.set_yticks([0, 1], ["far", "close"])


def _up_words(chart: Chart) -> str:
    bars = ", 95 % intervals" if any(line.bar(k) for line in chart.lines for k in range(len(line.values))) else ""
    return f"{chart.title.partition(' (')[0]}{bars}"


def _placed(line: Line, up: Axis) -> Line:
    """Return a line by where its values lie between the ends of their axis."""
    bars = [line.bar(k) for k in range(len(line.values))]
    ends = [None if bar is None else (up.place(bar[0]), up.place(bar[1])) for bar in bars]
    return replace(line, values=[None if value is None else up.place(value) for value in line.values], ends=ends)


def _panels(grids: Sequence[Grid], names: tuple[str, str], profiled: Profiled | None) -> Any:
    columns = min(len(grids), 5 if grids[0].listed else 3 if len(grids) in (3, 5, 6, 9) else 2)
    rows = math.ceil(len(grids) / columns)
    width, height = _inches(grids[0])
    charts = [] if profiled is None else profile_charts(*profiled)
    heights = [height] * rows + [PROFILE] * len(charts)
    figure = empty_figure(width * columns, sum(heights))
    places = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, grid in enumerate(grids):
        ax = figure.add_subplot(places[divmod(place, columns)])
        first, last = place % columns == 0, place + columns >= len(grids)  # names are written once for all panels
        bar_beside(ax, heatmap_into(ax, grid, (names[0] if first else "", names[1] if last else "")), grid)
        if not first and grid.rows == grids[0].rows:
            ax.yaxis.set_ticklabels([])
        if not last and grid.columns == grids[-1].columns:
            ax.xaxis.set_ticklabels([])
    for k, chart in enumerate(charts):
        lines_into(figure.add_subplot(places[rows + k, :]), chart, _up_words(chart))
    return figure


def _maps(many: Comparisons, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
    """Return how far apart models are by each measure; none where they are few or many, or some pair has no value."""
    if not 3 <= len(many.models) <= MAPPED or any(grid.models for grid in grids):  # blocks of tasks have no map
        return {}
    found, tables = {}, many.summaries().tables
    for grid in grids:
        with suppress(NoValue):
            found[grid.id] = distances_of(tables[grid.id])
    return found if len(found) == len(grids) and not any(map(is_worth, tables.values())) else {}


def _mapped(grids: Sequence[Grid], maps: Mapping[str, np.ndarray]) -> Any:
    """Return a row for each measure: the heatmap of models by models, their tree, and their places in a plane."""
    width, height = _inches(grids[0])
    figure = empty_figure(width + 2 * MAP, max(height, MAP) * len(grids))
    places = figure.add_gridspec(len(grids), 3, width_ratios=[width, MAP, MAP])
    for row, grid in enumerate(grids):
        heat, tree, plane = (figure.add_subplot(places[row, column]) for column in range(3))
        bar_beside(heat, heatmap_into(heat, grid, ("", "")), grid)
        tree_into(tree, maps[grid.id], grid.rows)
        unit = f"angle in rad, arccos of {grid.id}" if grid.scale.higher_is_closer else grid.id
        write_words(tree.set_xlabel, unit, fontsize=8)
        plane_into(plane, maps[grid.id], grid.rows)
    return figure


def _inches(grid: Grid) -> tuple[float, float]:
    """Return the size of a panel: cells of a fair size, and room for names and the bar of colours."""
    longest = [max((len(name) for name in shortened(names)), default=0) for names in (grid.rows, grid.columns)]
    cell = min(0.42, max(0.09, 5.0 / max(len(grid.columns), len(grid.rows), 1)))
    width = max(cell * len(grid.columns), 1.6) + 0.075 * longest[0] + 1.2
    return width, max(cell * len(grid.rows), 1.6) + 0.075 * longest[1] + 0.7


def _grids(results: Comparison | Comparisons, measure: str | None) -> list[Grid]:
    if isinstance(results, Comparison):
        grids = grids_of(results, measure)
    else:
        everything = summary_grids(list(results.values()))
        grids = [grid for grid in everything if measure in (None, grid.id)]
    if not grids:
        raise InvalidValue(
            f"nothing to draw: {f'no summary of {measure!r}' if measure else 'this result holds no measure'}."
        )
    return grids


def _names(comparison: Comparison, grid: Grid) -> tuple[str, str]:
    """Return the labels of the rows and of the columns."""
    apart = short_names([comparison.a, comparison.b])
    a, b = apart[comparison.a], apart[comparison.b]
    return (f"{a} {'→' if grid.scale.worth else 'and'} {b}", "") if grid.listed else (a, b)


def _inside(ax: Any, grids: Sequence[Grid], names: tuple[str, str]) -> Any:
    if len(grids) != 1:
        ids = ", ".join(grid.id for grid in grids)
        raise ShapeError(f"one pair of axes takes one heatmap, and here are {len(grids)}: {ids}. Name a measure.")
    bar_beside(ax, heatmap_into(ax, grids[0], names), grids[0])
    return ax.figure


# --- runs -------------------------------------------------------------------------------------------------------------


def series_figure(series: Series, measures: Sequence[str], steps: Sequence[int] | None) -> Any:
    """Return a figure with a row of heatmaps and a chart of lines for each measure."""
    places = _places(series, steps)
    longest = max((len(name) for name in shortened(series.layers)), default=0)
    width = max(PANE * len(places) + 0.07 * longest + 1.2, 6.5)
    heights = [PANE + 0.07 * longest + 0.5, LINES]
    figure = empty_figure(width, sum(heights) * len(measures))
    parts = figure.subfigures(2 * len(measures), 1, height_ratios=heights * len(measures))
    for k, measure in enumerate(measures):
        grids = frames(series, measure)
        titles = [f"{series.unit} {series.steps[place]:,}" for place in places]
        _panes(parts[2 * k], [grids[place] for place in places], titles, series.unit)
        series_into(parts[2 * k + 1].add_subplot(), series, measure)
    return figure


def _panes(part: Any, grids: Sequence[Grid], titles: Sequence[str], unit: str) -> None:
    axes = part.subplots(1, len(grids), squeeze=False)[0]
    for place, (ax, grid, title) in enumerate(zip(axes, grids, titles, strict=True)):
        across = f"at the final {unit}" if place == len(grids) // 2 else ""  # written once for all panes
        image = heatmap_into(ax, grid, ("" if place else f"at this {unit}", across), best=False, most=NAMED)
        if place:
            ax.yaxis.set_ticklabels([])
        write_words(ax.set_title, title, fontsize=9)
    bar_beside(list(axes), image, grids[-1])


def _places(series: Series, steps: Sequence[int] | None) -> list[int]:
    if steps is None:
        return spread(StepAxis.of(series.steps), PANES)
    for step in steps:
        series[step]  # refuses a step that it has not
    return [series.steps.index(step) for step in steps]


def series_into(ax: Any, series: Series, measure: str) -> None:
    """Draw each layer's way to its final state into axes, coloured from the first layer to the last."""
    chart = series_chart(series, measure, depths("dark" if is_dark(ax) else "light"))
    if chart is not None:
        lines_into(ax, chart, f"{measure}\nwith its final state", marks=".", legend=True)


# --- rankings, federations, tasks, sparsity ---------------------------------------------------------------------------


def ranking_figure(ranking: Ranking, scores: Sequence[str]) -> Any:
    """Return a figure with a panel for each score."""
    columns = min(len(scores), 2 if len(scores) in (2, 4) else 3)
    rows, longest = math.ceil(len(scores) / columns), min(max(map(len, ranking.models)), NAME)
    figure = empty_figure((2.8 + 0.08 * longest) * columns, rows * (0.3 * len(ranking) + 1.0))
    for k, score in enumerate(scores):
        ranking_into(figure.add_subplot(rows, columns, k + 1), ranking.by(score))
    return figure


def ranking_into(ax: Any, ranking: Ranking) -> None:
    """Draw each model's score with its 95 % interval into axes, the first model on top."""
    places = ranked_places(ranking)
    names = short_names([model for model, *_ in places])
    values, low, high = (np.array([one[k] for one in places]) for k in (1, 2, 3))
    rows = np.arange(len(places))
    ax.errorbar(values, rows, xerr=[values - low, high - values], fmt="o", markersize=4, linewidth=1, capsize=2)
    ax.set_yticks(rows, [textwrap.fill(names[model], NAME) for model, *_ in places], fontsize=7)
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    better = "higher" if ranking.table().higher_is_closer else "lower"
    write_words(ax.set_xlabel, f"{ranking.score} ({better} is better)", fontsize=8)


def federation_figure(found: Federation) -> Any:
    """Return a figure with the lines by round, and beside them the similarity of the clients where there is one."""
    alike = found.similarity is not None
    figure = empty_figure(8.2 if alike else 4.4, 3.4)
    rounds_into(figure.add_subplot(1, 1 + alike, 1), found)
    if alike:
        *_, grid = federation_heatmaps(found)[-1]
        ax = figure.add_subplot(1, 2, 2)
        bar_beside(ax, heatmap_into(ax, grid, ("clients", "clients"), best=False), grid)
    return figure


def rounds_into(ax: Any, found: Federation) -> None:
    """Draw the accuracy of each client by round into axes, with the mean; where they were not tested, the loss."""
    rounds = found.accuracies
    if rounds:
        own = {client: [own.get(client) for own in rounds.values()] for client in found.clients}
        lines = [Line(client, values, colour="0.35" if is_dark(ax) else "0.7") for client, values in own.items()]
        mean = [float(np.mean(list(own.values()))) for own in rounds.values()]
        lines.append(Line("mean of the clients", mean, colour=ink_of(ax)))
    else:
        lines = [Line("mean", [one.loss for one in found.rounds], colour=ink_of(ax))]
    reach = [value for line in lines for value in line.reach] or [0.0]
    places = list(rounds) if rounds else [one.round for one in found.rounds]
    chart = Chart("by round", "round", places, lines, axis_up(reach), axis_across(places))
    lines_into(ax, chart, "accuracy of each client" if rounds else "mean training loss", marks=".", legend=False)
    for line in ax.lines[:-1]:
        line.set(linewidth=0.7, marker="")
    if rounds:
        ax.legend(handles=[ax.lines[-1]], fontsize=7, frameon=False)


def task_figure(given: Sequence[Any], ax: Any) -> Any:
    """Return the accuracy matrix of each way to learn tasks, a heatmap each."""
    records = [getattr(one, "record", one) for one in given]
    strange = next((type(one).__name__ for one in records if not isinstance(one, TaskAccuracies)), None)
    if strange or not records:
        raise InvalidValue(
            "a figure shows comparisons, a series, a ranking, a federation, a sparsity study, a compression or tasks "
            "learnt in a row; got "
            f"{strange or 'none'}."
        )
    labels = [f"accuracy, {label}" if len(records) > 1 else "accuracy" for label in way_names(records)]
    grids = [replace(grid_of(way.table()), id=label) for label, way in zip(labels, records, strict=True)]
    names = ("after task", "on task")
    return _panels(grids, names, None) if ax is None else _inside(ax, grids, names)


def diff_figure(result: Diff) -> Any:
    """Return a figure of the errors of all modules, in the order of their calls, above the floor."""
    chart = diff_chart(result)
    if chart is None:
        raise InvalidValue("nothing to draw: no module could be replayed.")
    figure = empty_figure(7.2, 3.6)
    lines_into(figure.add_subplot(), chart, "relative error", marks=".")
    return figure


def compression_figure(table: Compression) -> Any:
    """Return a figure of what layers keep, and of the accuracy after each."""
    charts = compression_charts(table)
    figure = empty_figure(max(4.6, 0.4 * len(table) + 2.5), 2.6 * len(charts))
    for k, chart in enumerate(charts, start=1):
        lines_into(figure.add_subplot(len(charts), 1, k), chart, chart.title)
    return figure


def sparsity_figure(study: SparsityStudy) -> Any:
    """Return a figure with a column for each network: its weights, its layers' similarity; then accuracy."""
    names, count = short_names(study.names), len(study.networks)
    heights = [2.0] + [3.4] * bool(study.interlayer) + [2.4] * bool(study.curve)
    figure = empty_figure(4.2 * max(count, 1), sum(heights))
    places = figure.add_gridspec(len(heights), count, height_ratios=heights)
    most = max((max(counts) / max(sum(counts), 1) for counts in study.histograms.values()), default=1.0) or 1.0
    for column, one in enumerate(study.names):
        _histogram_into(figure.add_subplot(places[0, column]), study, one, names[one], most)
        if one in study.interlayer:
            (grid,) = grids_of(study.interlayer[one])
            ax = figure.add_subplot(places[1, column])
            bar_beside(ax, heatmap_into(ax, grid, (names[one], ""), best=False), grid)
    if study.curve:
        curve = {names.get(word, word): plain(values) for word, values in study.curve.items()}
        chart = chart_of("accuracy after pruning", curve)
        if chart is not None:
            ax = figure.add_subplot(places[len(heights) - 1, :])
            lines_into(ax, chart, "accuracy", legend=False)
            name_lines(ax, chart.lines, beside=False)
    return figure


def _histogram_into(ax: Any, study: SparsityStudy, one: str, title: str, most: float) -> None:
    counts, edges = study.histograms[one], study.edges
    shares = [count / max(sum(counts), 1) for count in counts]
    ax.bar(edges[:-1], shares, width=edges[1] - edges[0], align="edge", linewidth=0)
    ax.set_ylim(0, 1.05 * most)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    write_words(ax.set_title, f"{title}, sparsity {study.networks[one].sparsity:.3f}", fontsize=8)
    write_words(ax.set_xlabel, "weight", fontsize=8)
    write_words(ax.set_ylabel, "share of weights left", fontsize=8)
