"""Static figures for papers, drawn with matplotlib, which is imported only when needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from netkin.errors import InvalidValue, ShapeError
from netkin.reporting.blocks import (
    Heatmap,
    Lines,
    Page,
    PageBlock,
    Pictures,
    RankingBlock,
    blocks_of,
)
from netkin.reporting.charts import Axis, Chart, Line, StepAxis, axis_up, spread
from netkin.reporting.figures.drawing import (
    caption_below,
    empty_figure,
    kind_of,
    matplotlib,
    require_measure_name,
    write_figure,
    write_words,
)
from netkin.reporting.figures.panels import PANELS, block_into, chart_into, figure_of
from netkin.reporting.grids import LEVELS
from netkin.reporting.page import Results, page_of
from netkin.reporting.words import figure_caption
from netkin.results import Comparison, Comparisons, Ranking, Series
from netkin.results.labels import has_errors

PANES = 5  # steps of a series, unless they are chosen
# by the kind of page what is drawn into axes, by default its heatmap; what is named may be there once alone
INTO_AXES: dict[str, tuple[Any, str]] = {
    "series": (Lines, "measure"),
    "federation": (Lines, ""),
    "compression": (Lines, ""),
    "ranking": (RankingBlock, ""),
}


def plot(
    results: Results,
    measures: str | Sequence[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
    *,
    steps: Sequence[int] | None = None,
    profile: bool | None = None,
    title: str | None = None,
    caption: bool = True,
    overwrite: bool = False,
) -> Any:
    """Return a figure with the pictures of a result's page, or of some measures; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, one picture is drawn there: a heatmap, the lines of a series or a federation,
    or a ranking by one score. The ending of `path` chooses PNG, SVG or PDF. A series becomes heatmaps at `steps`, or at
    a few spread over the run, above the lines of its layers. Below the heatmaps of a comparison is the `profile` of its
    corresponding layers with bars for 95 % intervals: by default where there are standard errors; with True always, and
    then alone into `ax`.

    Args:
        results: What a report shows: a comparison, several, a series, a ranking, a federation, ways to learn tasks in a
            row, a sparsity study, or a compression.
        measures: One measure or score or several to draw; by default all.
        path: File to write the figure to.
        ax: Matplotlib axes to draw into, for one measure.
        steps: Steps of a series to draw.
        profile: Whether to draw the profile.
        title: Title above the whole figure.
        caption: Whether to write a caption below the figure; never below your own axes.
        overwrite: Write also over a file that is no figure of netkin's.
    """
    kind = kind_of(path)
    require_measure_name(measures)
    matplotlib("matplotlib")
    if measures is not None:
        results = _with_measures(results, [measures] if isinstance(measures, str) else measures)
    if isinstance(results, Comparisons) and len(results) == 1:
        (results,) = results.values()  # there is nothing to sum up
    if profile and not isinstance(results, Comparison):
        raise InvalidValue(f"`profile` is for a comparison; this is a {type(results).__name__}.", argument="profile")
    if steps is not None and not isinstance(results, Series):
        what = type(results).__name__
        raise InvalidValue(f"`steps` chooses among those of a series; this is a {what}.", argument="steps")
    for step in steps or ():
        cast("Series", results)[step]  # refuses a step that it has not
    page = page_of(results)
    errors = isinstance(results, Comparison) and any(map(has_errors, results.tables.values()))
    blocks = list(_drawn(page, errors if profile is None else profile, steps))
    if not blocks:
        lacking = "this result holds no measure" if measures is None else f"no summary of {measures!r}"
        raise InvalidValue(f"nothing to draw: {lacking}.")
    if profile and not any(isinstance(block, Lines) for block in blocks):
        raise InvalidValue("no layers correspond, so that there is no profile to draw.", argument="profile")
    figure = figure_of(blocks) if ax is None else _into(ax, page, blocks, bool(profile))
    if title is not None:
        figure.suptitle(title)
    if caption and ax is None:
        caption_below(figure, figure_caption(results))
    if path is not None:
        write_figure(figure, path, kind, overwrite=overwrite)
    return figure


def _with_measures(results: Any, measures: Sequence[str]) -> Any:
    """Return results with some of their measures or scores, in that order."""
    if isinstance(results, Comparison):
        return replace(results, tables={table.id: table for table in map(results.table, measures)})
    if isinstance(results, Comparisons):
        each = (_with_measures(one, [name for name in measures if name in one]) for one in results.values())
        return Comparisons(list(each), results.failed)
    if isinstance(results, Series):
        return replace(results, comparisons=tuple(_with_measures(one, measures) for one in results.comparisons))
    if isinstance(results, Ranking):
        tables = {table.id: table for table in map(results.table, measures)}
        return replace(results, tables=tables, score=next(iter(tables)))
    what = type(results).__name__
    raise InvalidValue(
        f"`measures` chooses among those of comparisons, series and rankings; this is a {what}.", argument="measures"
    )


def _drawn(page: Page, profile: bool, steps: Sequence[int] | None) -> Iterator[PageBlock]:
    """Yield the pictures of a page; of a run its heatmaps at some steps, in place of the page's own choice."""
    for block in blocks_of(replace(page, origins=(), choices=())):
        if isinstance(block, Heatmap) and block.frames and page.timeline:
            timeline = page.timeline
            chosen = spread(StepAxis.of(timeline.steps), PANES) if steps is None else map(timeline.steps.index, steps)
            places = list(chosen)
            names = [f"{timeline.unit} {timeline.steps[place]:,}" for place in places]
            sides = (f"at this {timeline.unit}", f"at the final {timeline.unit}")
            yield Pictures([block.frames[place] for place in places], names, block.key, sides, places)
        elif isinstance(block, Lines):
            yield from [block] if profile or not block.key.startswith("profile") else []
        elif isinstance(block, Pictures):
            yield from [block] if block.marks else []
        elif type(block) in PANELS:
            yield block


def _into(ax: Any, page: Page, blocks: Sequence[PageBlock], profile: bool) -> Any:
    """Draw the one picture that belongs into axes, and return their figure."""
    kind, what = (Lines, "") if profile else INTO_AXES.get(page.style, (Heatmap, "heatmap"))
    chosen: list[Any] = [block for block in blocks if isinstance(block, kind)]
    if not chosen:
        raise InvalidValue("nothing of this result is drawn into axes; leave out `ax`.", argument="ax")
    if what and len(chosen) > 1:
        ids = page.timeline.measures if page.timeline else [block.grid.id for block in chosen]
        told = ", ".join(ids)
        raise ShapeError(f"one pair of axes takes one {what}, and here are {len(chosen)}: {told}. Name a measure.")
    if profile and len(chosen) > 1:
        _profiles_into(ax, [block.chart for block in chosen])
    else:
        block_into(ax, chosen[0])
    return ax.figure.figure  # of a part of a figure, the whole


def _profiles_into(ax: Any, charts: Sequence[Chart]) -> None:
    """Draw profiles on several scales into one pair of axes, by where values lie between far and close."""
    lines = [_placed(line, chart.up) for chart in charts for line in chart.lines]
    bars = "95 % intervals" if any(any(line.ends) for line in lines) else ""
    chart_into(ax, replace(charts[0], lines=lines, up=Axis(0, 1)), bars)
    ax.set_yticks([0, 1], ["far", "close"])


def _placed(line: Line, up: Axis) -> Line:
    """Return a line by where its values lie between the ends of their axis."""
    bars = [line.bar(k) for k in range(len(line.values))]
    ends = [None if bar is None else (up.place(bar[0]), up.place(bar[1])) for bar in bars]
    return replace(line, values=[None if value is None else up.place(value) for value in line.values], ends=ends)


def plot_matrix(
    matrix: np.ndarray,
    names: tuple[str, str] = ("rows", "columns"),
    title: str = "",
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
    *,
    overwrite: bool = False,
) -> Any:
    """Return a figure of a matrix, on one scale to both sides of zero; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, it is drawn there. The ending of `path` chooses PNG, SVG or PDF.

    Args:
        matrix: Numbers of any sign.
        names: What rows and columns are.
        title: Above the figure.
        path: File to write to.
        ax: Matplotlib axes to draw into.
        overwrite: Write also over a file that is no figure of netkin's.
    """
    kind = kind_of(path)
    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim != 2 or not matrix.size:
        raise ShapeError(f"a picture needs a matrix; got shape {matrix.shape}.")
    matplotlib("matplotlib")
    axes = empty_figure(4.6, 4.0).add_subplot() if ax is None else ax
    _draw(axes, matrix, names, title)
    if path is not None:
        write_figure(axes.figure, path, kind, overwrite=overwrite)
    return axes.figure


def _draw(ax: Any, matrix: np.ndarray, names: tuple[str, str], title: str) -> None:
    largest = float(np.abs(matrix).max()) or 1.0
    image = ax.imshow(matrix, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest", aspect="auto")
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.85, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, width=0.6)
    ax.spines[:].set_visible(False)
    ax.tick_params(labelsize=7, width=0.6)
    write_words(ax.set_ylabel, names[0], fontsize=9)
    write_words(ax.set_xlabel, names[1], fontsize=9)
    write_words(ax.set_title, title, fontsize=9)


def plot_barrier(
    weights: Sequence[float],
    losses: Sequence[float],
    accuracies: Sequence[float] = (),
    title: str = "",
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
    *,
    overwrite: bool = False,
) -> Any:
    """Return a figure of losses along a line, beside the straight one between its ends; write it to `path` if given.

    With `ax`, matplotlib axes of yours, it is drawn there. Accuracies have a scale of their own, on the right.

    Args:
        weights: Of the second stitch, along the line.
        losses: At each weight.
        accuracies: At each weight, relative ones; none if they are not known.
        title: Above the figure.
        path: File to write to, ending in .png, .svg or .pdf.
        ax: Matplotlib axes to draw into.
        overwrite: Write also over a file that is no figure of netkin's.
    """
    kind = kind_of(path)
    matplotlib("matplotlib")
    axes = empty_figure(4.6, 3.2).add_subplot() if ax is None else ax
    axes.plot([weights[0], weights[-1]], [losses[0], losses[-1]], color="#999999", linewidth=0.8, linestyle="--")
    _along_weights(axes, weights, losses, 0, "cross-entropy")
    if accuracies:
        _along_weights(axes.twinx(), weights, accuracies, LEVELS - 1, "relative accuracy")
    write_words(axes.set_title, title, fontsize=9)
    if path is not None:
        write_figure(axes.figure, path, kind, overwrite=overwrite)
    return axes.figure


def _along_weights(ax: Any, weights: Sequence[float], values: Sequence[float], depth: int, name: str) -> None:
    line, along = Line(name, values, depth=depth), Axis(weights[0], weights[-1])
    chart_into(ax, Chart(name, "weight of the second stitch", weights, [line], axis_up(values), along), name)
    ax.yaxis.label.set_color(ax.lines[-1].get_color())
    ax.spines["right"].set_visible(True)
