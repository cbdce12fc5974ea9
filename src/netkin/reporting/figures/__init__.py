"""Static figures for papers, drawn with matplotlib, which is imported only when needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.errors import InvalidValue, ShapeError
from netkin.reporting.charts import Axis, Chart, Line, axis_up
from netkin.reporting.figures.drawing import (
    caption_below,
    empty_figure,
    is_dark,
    kind_of,
    lines_into,
    matplotlib,
    refuse_file,
    write_figure,
    write_words,
)
from netkin.reporting.figures.layouts import (
    comparison_figure,
    compression_figure,
    diff_figure,
    federation_figure,
    ranking_figure,
    ranking_into,
    rounds_into,
    series_figure,
    series_into,
    sparsity_figure,
    task_figure,
)
from netkin.reporting.grids import depths
from netkin.reporting.words import figure_caption
from netkin.results import Comparison, Comparisons, Federation, Ranking, Series, TaskAccuracies
from netkin.results.compression import Compression
from netkin.results.diff import Diff
from netkin.results.weight_sparsity import SparsityStudy


def plot(
    results: Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | SparsityStudy
    | Compression
    | Diff
    | TaskAccuracies
    | Sequence[TaskAccuracies],
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
    """Return a figure with a heatmap for each measure, or for those named; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, the one heatmap is drawn there. The ending of `path` chooses PNG, SVG or PDF. A
    series becomes heatmaps at `steps`, or at a few spread over the run, above the lines of its layers; into `ax` go the
    lines alone. Below the heatmaps of a comparison is the `profile` of its corresponding layers with bars for 95 %
    intervals: by default where there are standard errors; with True always, and then alone into `ax`. A ranking becomes
    a panel for each score, or for the score that `measures` names; a federation its accuracies by round beside the
    similarity of its clients, of which the lines alone go into `ax`; tasks learnt one after another their accuracy
    matrix; a sparsity study its networks side by side.

    Args:
        results: A comparison, several, a series, a ranking, a federation, ways to learn tasks in a row, or a sparsity
            study.
        measures: One measure or several to draw; by default all.
        path: File to write the figure to.
        ax: Matplotlib axes to draw into, for one measure.
        steps: Steps of a series to draw.
        profile: Whether to draw the profile.
        title: Title above the whole figure.
        caption: Whether to write a caption below the figure; never below your own axes.
        overwrite: Write also over a file that is no figure of netkin's.
    """
    kind = kind_of(path)
    refuse_file(measures)
    matplotlib("matplotlib")
    if measures is not None and not isinstance(measures, str):
        results, measures = _with_measures(results, measures), None
    if isinstance(results, Comparisons) and len(results) == 1:
        (results,) = results.values()  # there is nothing to sum up
    if profile and not isinstance(results, Comparison):
        raise InvalidValue(f"`profile` is for a comparison; this is a {type(results).__name__}.")
    if isinstance(results, Series):
        figure = _of_series(results, measures, ax, steps)
    elif isinstance(results, Ranking):
        figure = _of_ranking(results, measures, ax)
    elif isinstance(results, SparsityStudy):
        figure = sparsity_figure(results)
    elif isinstance(results, Compression):
        figure = compression_figure(results)
    elif isinstance(results, Diff):
        figure = diff_figure(results)
    elif isinstance(results, (Comparison, Comparisons)):
        figure = comparison_figure(results, measures, ax, steps, profile)
    else:
        figure = _of_training(results, measures, ax, steps)
    if title is not None:
        figure.suptitle(title)
    if caption and ax is None:
        caption_below(figure, figure_caption(results))
    if path is not None:
        write_figure(figure, path, kind, overwrite=overwrite)
    return figure


def _with_measures(results: Any, measures: Sequence[str]) -> Any:
    """Return results with some of their measures, in that order."""
    if isinstance(results, Comparison):
        return replace(results, tables={table.id: table for table in map(results.table, measures)})
    if isinstance(results, Comparisons):
        each = (_with_measures(one, [name for name in measures if name in one]) for one in results.values())
        return Comparisons(list(each), results.failed)
    if isinstance(results, Series):
        return replace(results, comparisons=tuple(_with_measures(one, measures) for one in results.comparisons))
    raise InvalidValue(f"several `measures` are drawn of comparisons and series; this is a {type(results).__name__}.")


def _of_ranking(ranking: Ranking, score: str | None, ax: Any) -> Any:
    if ax is None:
        return ranking_figure(ranking, ranking.scores if score is None else [ranking.table(score).id])
    ranking_into(ax, ranking if score is None else ranking.by(score))
    return ax.figure


def _of_training(results: Any, measure: str | None, ax: Any, steps: Sequence[int] | None) -> Any:
    """Return what became of clients or of tasks."""
    if measure is not None or steps is not None:
        raise InvalidValue(
            "`measures` and `steps` are for comparisons, series and rankings; a federation and tasks have none."
        )
    if not isinstance(results, Federation):
        return task_figure(results if isinstance(results, (list, tuple)) else [results], ax)
    if ax is None:
        return federation_figure(results)
    rounds_into(ax, results)
    return ax.figure


def _of_series(series: Series, measure: str | None, ax: Any, steps: Sequence[int] | None) -> Any:
    measures = list(series.measures) if measure is None else [series.table(measure).id]
    if not measures:
        raise InvalidValue("nothing to draw: this result holds no measure.")
    if ax is None:
        return series_figure(series, measures, steps)
    if len(measures) != 1:
        told = ", ".join(measures)
        raise ShapeError(f"one pair of axes takes one measure, and here are {len(measures)}: {told}. Name a measure.")
    series_into(ax, series, measures[0])
    return ax.figure


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
    colours = depths("dark" if is_dark(axes) else "light")
    axes.plot([weights[0], weights[-1]], [losses[0], losses[-1]], color="#999999", linewidth=0.8, linestyle="--")
    _along_weights(axes, weights, losses, colours[0], "cross-entropy")
    if accuracies:
        _along_weights(axes.twinx(), weights, accuracies, colours[-1], "relative accuracy")
    write_words(axes.set_title, title, fontsize=9)
    if path is not None:
        write_figure(axes.figure, path, kind, overwrite=overwrite)
    return axes.figure


def _along_weights(ax: Any, weights: Sequence[float], values: Sequence[float], colour: str, name: str) -> None:
    along = Axis(weights[0], weights[-1])
    up = axis_up(values)
    chart = Chart(name, "weight of the second stitch", weights, [Line(name, values, colour=colour)], up, along)
    lines_into(ax, chart, name, marks=".")
    ax.yaxis.label.set_color(colour)
    ax.spines["right"].set_visible(True)
