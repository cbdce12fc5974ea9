"""A series as a figure for a paper: heatmaps at chosen steps, side by side, above the lines of the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.reporting.axes import StepAxis, brief_count, spread
from netkin.reporting.drawing import bar_beside, empty_figure, heatmap_into, matplotlib, write_words
from netkin.reporting.grids import Grid, frames
from netkin.reporting.layer_lines import zoomed
from netkin.reporting.scales import depths, level
from netkin.reporting.wording import shortened
from netkin.results import Series

PANES = 5  # unless steps are chosen
LISTED = 16  # layers that a legend lists; more are told by a bar of colours
NAMED = 16  # names on an axis of a small heatmap at most
PANE, LINES = 2.1, 2.9  # inches: a heatmap's side, the height of the lines


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
        lines_into(parts[2 * k + 1].add_subplot(), series, measure)
    return figure


def lines_into(ax: Any, series: Series, measure: str) -> None:
    """Draw each layer's way to its final state into axes, coloured from the first layer to the last."""
    own, axis, scale = (
        series.own(measure),
        StepAxis.of(series.steps),
        zoomed(series.table(measure), series.own(measure)),
    )
    colours = [depths()[level(k, len(series.layers))] for k in range(len(series.layers))]
    for column, colour, layer in zip(own.T, colours, shortened(series.layers), strict=True):
        ax.plot(series.steps, column, color=colour, linewidth=1.2, marker=".", markersize=3)
        ax.lines[-1].set_label(layer.replace("$", r"\$"))
    _scale_along(ax, axis, series.unit)
    margin = 0.03 * (scale.high - scale.low or 1)
    ends = (scale.far, scale.close)
    ax.set_ylim(*(end + (margin if end == max(ends) else -margin) for end in ends))
    write_words(ax.set_ylabel, f"{measure}\nwith its final state", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=7, width=0.6)
    _name_lines(ax, series.layers, colours)


def _scale_along(ax: Any, axis: StepAxis, unit: str) -> None:
    if axis.logarithmic and axis.steps[0] == 0:
        ax.set_xscale("symlog", linthresh=axis.least, linscale=0.3)
    elif axis.logarithmic:
        ax.set_xscale("log")
    ticks = axis.ticks()
    ax.set_xticks(ticks, [brief_count(tick) for tick in ticks])
    ax.minorticks_off()
    write_words(ax.set_xlabel, unit, fontsize=8)


def _name_lines(ax: Any, layers: Sequence[str], colours: Sequence[str]) -> None:
    """List few layers in a legend; of many, name some beside a bar of their colours."""
    if len(layers) <= LISTED:
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
        return
    module = matplotlib("matplotlib.colors")
    norm = module.BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    mapped = matplotlib("matplotlib.cm").ScalarMappable(norm, module.ListedColormap(list(colours)))
    named = range(0, len(layers), math.ceil(len(layers) / LISTED))
    bar = ax.figure.colorbar(mapped, ax=ax, pad=0.02, ticks=named)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    bar.ax.set_yticklabels([shortened(layers)[k] for k in named], fontsize=6, parse_math=False)
    bar.ax.tick_params(length=2, width=0.6)
    bar.ax.invert_yaxis()  # the first layer on top, as in a heatmap


def _panes(part: Any, grids: Sequence[Grid], titles: Sequence[str], unit: str) -> None:
    axes = part.subplots(1, len(grids), squeeze=False)[0]
    for place, (ax, grid, title) in enumerate(zip(axes, grids, titles, strict=True)):
        image = heatmap_into(
            ax, grid, ("" if place else f"at this {unit}", f"at the final {unit}"), best=False, most=NAMED
        )
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
