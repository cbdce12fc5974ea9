"""The blocks of a page drawn with matplotlib: a function for each kind, and where they stand in a figure."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from netkin.reporting.blocks import Bars, Heatmap, Lines, Name, PageBlock, Pictures, RankingBlock, Scatter, Tree
from netkin.reporting.charts import Chart, Line, StepAxis
from netkin.reporting.figures.drawing import empty_figure, ink_of, is_dark, matplotlib, name_axis, write_words
from netkin.reporting.grids import Grid, depths, ink, palette, shades
from netkin.reporting.html import label_places
from netkin.reporting.words import short_names, shortened

MARKS = "os^D"
TICKS, NAMED = 32, 16  # names on an axis at most; on that of a step of a run
WRITTEN = 12  # rows and columns up to which cells show their values
CELL = 0.3  # inches that a cell with a value needs
ACROSS = 200  # points that a plane of models is wide, about
LISTED = 16  # lines that a legend lists; of more, some are named beside a bar of their colours
LINES = 2.7  # inches that a line chart is high
MAP = 3.6  # inches: the side of a tree or a plane of models
PANE, ABREAST = 2.1, 6  # inches: the side of a small heatmap; how many of these stand beside each other
NAME = 34  # letters in a line of a model's name
MAPPED = 60  # models that can be named in a tree or a plane

Sizes = tuple[int, float, float]  # how many stand beside each other, and the width and height of each, in inches


# --- where they stand -------------------------------------------------------------------------------------------------


def figure_of(blocks: Sequence[PageBlock]) -> Any:
    """Return a figure of blocks, in their order: those of one kind in rows, maps of models beside their heatmap."""
    groups = [list(group) for _, group in groupby(blocks, key=_kind)]
    for one, other in pairwise(groups):
        if one and isinstance(one[0], Heatmap) and isinstance(other[0], Tree) and len(other) == 2 * len(one):
            one[:] = [block for k, heatmap in enumerate(one) for block in (heatmap, *other[2 * k : 2 * k + 2])]
            other.clear()
    groups = [group for group in groups if group]
    sizes = [_sizes(group) for group in groups]
    heights = [height * math.ceil(len(group) / columns)
               for group, (columns, _, height) in zip(groups, sizes, strict=True)]  # fmt: skip
    figure = empty_figure(max(columns * width for columns, width, _ in sizes), sum(heights))
    parts = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, group, (columns, _, _) in zip(parts, groups, sizes, strict=True):
        _draw_group(part, group, columns)
    return figure


def _kind(block: PageBlock) -> str:
    return "map" if isinstance(block, (Tree, Scatter)) else block.kind


def _sizes(group: Sequence[PageBlock]) -> Sizes:
    block, count = group[0], len(group)
    if isinstance(block, Pictures):
        longest = max((len(name) for name in shortened(block.grids[0].rows)), default=0)
        rows, columns = math.ceil(len(block.grids) / ABREAST), min(len(block.grids), ABREAST)
        return 1, max(PANE * columns + 0.07 * longest + 1.2, 6.5), (PANE + 0.07 * longest + 0.5) * rows
    if isinstance(block, Heatmap) and any(isinstance(other, Tree) for other in group):
        width, height = _inches(block.grid)
        return 3, (width + 2 * MAP) / 3, max(height, MAP)
    if isinstance(block, Heatmap):
        return min(count, 5 if block.grid.listed else 3 if count in (3, 5, 6, 9) else 2), *_inches(block.grid)
    if isinstance(block, RankingBlock):
        longest = min(max((len(place.name) for place in block.places), default=0), NAME)
        most = max(len(other.places) for other in group if isinstance(other, RankingBlock))
        return min(count, 2 if count in (2, 4) else 3), 2.8 + 0.08 * longest, 0.3 * most + 1.0
    if isinstance(block, Bars):
        return min(count, 3), 4.2, 2.0
    if isinstance(block, Lines):
        named = 0.4 * len(block.chart.places) + 2.5 if block.chart.along is None else 0.0
        return 1, max(4.6, min(named, 9.0)), LINES
    return 2, MAP, MAP


def _inches(grid: Grid) -> tuple[float, float]:
    """Return the size of a heatmap: cells of a fair size, and room for names and the bar of colours."""
    longest = [max((len(name) for name in shortened(names)), default=0) for names in (grid.rows, grid.columns)]
    cell = min(0.42, max(0.09, 5.0 / max(len(grid.columns), len(grid.rows), 1)))
    width = max(cell * len(grid.columns), 1.6) + 0.075 * longest[0] + 1.2
    return width, max(cell * len(grid.rows), 1.6) + 0.075 * longest[1] + 0.7


def _draw_group(part: Any, group: Sequence[Any], columns: int) -> None:
    """Draw blocks in rows; the heatmaps of one group have the names of their rows and columns once."""
    if isinstance(group[0], Pictures):
        for inner, block in zip(part.subfigures(len(group), 1, squeeze=False)[:, 0], group, strict=True):
            pictures_into(inner, block)
        return
    maps = len({type(block) for block in group}) > 1
    widths = [_inches(group[0].grid)[0], MAP, MAP] if maps and isinstance(group[0], Heatmap) else [1] * columns
    rows = math.ceil(len(group) / columns)
    places = part.add_gridspec(rows, columns, width_ratios=widths)
    axes = [part.add_subplot(places[divmod(place, columns)]) for place in range(len(group))]
    for place, (ax, block) in enumerate(zip(axes, group, strict=True)):
        if maps or not isinstance(block, Heatmap):
            block_into(ax, block)
            continue
        first = place % columns == 0 or block.sides[0] != group[place - 1].sides[0]
        last = place + columns >= len(group)
        heatmap_into(ax, block, first=first, last=last)
        if not first and block.grid.rows == group[0].grid.rows:
            ax.yaxis.set_ticklabels([])
        if not last and block.grid.columns == group[-1].grid.columns:
            ax.xaxis.set_ticklabels([])


def block_into(ax: Any, block: PageBlock) -> None:
    """Draw a block into axes."""
    PANELS[type(block)](ax, block)


# --- heatmaps ---------------------------------------------------------------------------------------------------------


def heatmap_into(ax: Any, block: Heatmap, *, first: bool = True, last: bool = True) -> None:
    """Draw a heatmap with its bar of colours; the `first` in a row names rows, the `last` in a column columns."""
    rows, columns = ("", "") if block.level == "models" else block.sides
    if block.grid.listed:
        rows, columns = "".join(part.text if isinstance(part, Name) else part for part in block.axes), ""
    image = _grid_into(ax, block.grid, (rows if first else "", columns if last else ""))
    named = block.title.text if isinstance(block.title, Name) else ""
    title = block.grid.note or ("" if named in block.sides else named)
    write_words(ax.set_title, title, fontsize=8)
    _bar_beside(ax, image, block.grid)


def pictures_into(part: Any, block: Pictures) -> None:
    """Draw small heatmaps beside each other, with lines at marked rows and columns, into a part of a figure."""
    rows = math.ceil(len(block.grids) / ABREAST)
    axes = part.subplots(rows, min(len(block.grids), ABREAST), squeeze=False)
    for ax in axes.ravel()[len(block.grids) :]:
        ax.remove()
    drawn = axes.ravel()[: len(block.grids)].tolist()
    for place, (ax, grid) in enumerate(zip(drawn, block.grids, strict=True)):
        across = block.sides[1] if place == len(drawn) // 2 else ""  # written once for all of them
        image = _grid_into(ax, grid, ("" if place else block.sides[0], across), best=False, most=NAMED)
        if place % ABREAST:
            ax.yaxis.set_ticklabels([])
        for at, dotted in block.marks[place] if block.marks else ():
            for line in (ax.axhline, ax.axvline):
                line(at, color="white", linewidth=1, linestyle=":" if dotted else "-")
        write_words(ax.set_title, block.names[place], fontsize=9)
    _bar_beside(drawn, image, block.grids[0])


def _grid_into(ax: Any, grid: Grid, names: tuple[str, str], *, best: bool = True, most: int = TICKS) -> Any:
    """Draw a heatmap into axes, with the names of at most so many layers, and return its image."""
    colours = matplotlib("matplotlib.colors").ListedColormap(shades() / 255, name="netkin")
    colours = colours if grid.scale.higher_is_closer else colours.reversed()
    low, high = grid.scale.low, grid.scale.high
    low, high = (low, high) if high > low else (max(low - 0.5, 0) if low >= 0 else low - 0.5, low + 0.5)
    values = np.ma.masked_invalid(grid.values)
    image = ax.imshow(values, cmap=colours, vmin=low, vmax=high, interpolation="nearest", aspect="equal")
    _hatch(ax, grid)
    written = _has_room(ax, grid)
    if written:
        _write_values(ax, grid)
    if best:
        _mark_best(ax, grid, framed=written)
    for place in grid.borders:
        ax.axhline(place - 0.5, color="white", linewidth=2.5)
        ax.axvline(place - 0.5, color="white", linewidth=2.5)
    name_axis(ax.xaxis, grid.columns, names[1], upright=True, most=most)
    name_axis(ax.yaxis, grid.rows, names[0], most=most)
    ax.spines[:].set_visible(False)
    return image


def _bar_beside(axes: Any, image: Any, grid: Grid) -> None:
    """Put the colour bar beside one pair of axes or several; the close end is up."""
    figure = image.axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.03)
    bar.outline.set_visible(False)
    if not grid.scale.higher_is_closer:
        bar.ax.invert_yaxis()
    bar.ax.tick_params(labelsize=7, width=0.6)
    letters = 16 * bar.ax.bbox.height / figure.dpi
    write_words(bar.set_label, _wrapped(f"{grid.id} ({grid.scale.better})", letters), fontsize=8)


def _wrapped(words: str, letters: float) -> str:
    """Return the name of a measure in as many lines as it needs: broken before brackets, and between parameters."""
    if len(words) <= letters:
        return words
    return "\n".join(
        line for part in re.split(r" ?(?=\()", words) for line in textwrap.wrap(part, max(20, int(letters)))
    )


def _hatch(ax: Any, grid: Grid) -> None:
    """Hatch what has no value."""
    rectangle = matplotlib("matplotlib.patches").Rectangle
    for i, j in grid.missing:
        ax.add_patch(rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="/////", edgecolor="#999999", linewidth=0))


def _has_room(ax: Any, grid: Grid) -> bool:
    """Return whether cells are so few and large that their values can be written into them."""
    sides = (len(grid.columns), len(grid.rows))
    lengths = (ax.bbox.width / ax.figure.dpi, ax.bbox.height / ax.figure.dpi)
    return max(sides) <= WRITTEN and min(length / side for length, side in zip(lengths, sides, strict=True)) >= CELL


def _write_values(ax: Any, grid: Grid) -> None:
    numbers, colours = grid.scale.shade_numbers(grid.values), palette()
    for (i, j), shade in np.ndenumerate(numbers):
        if shade >= 0:
            ax.text(j, i, grid.texts[i][j], fontsize=6.5, ha="center", va="center", color=ink(colours[int(shade)]))


def _mark_best(ax: Any, grid: Grid, framed: bool) -> None:
    """Mark the best match of each row: by a dot or, where cells have values, by a frame."""
    if not grid.best:
        return
    if framed:
        rectangle = matplotlib("matplotlib.patches").Rectangle
        for i, j in grid.best.items():
            for colour, width in (("black", 2.2), ("white", 1.2)):
                ax.add_patch(rectangle((j - 0.44, i - 0.44), 0.88, 0.88, fill=False, edgecolor=colour, linewidth=width))
        return
    size = min(16.0, 600.0 / max(len(grid.columns), len(grid.rows)))
    ax.scatter(
        list(grid.best.values()), list(grid.best), s=size, c="white", edgecolors="black", linewidths=0.5, zorder=3
    )


# --- charts -----------------------------------------------------------------------------------------------------------


def lines_into(ax: Any, block: Lines) -> None:
    """Draw a line chart, with bars for errors; values that are so by construction are joined by a faint line."""
    bars = ", 95 % intervals" if any(any(line.ends) for line in block.chart.lines) else ""
    words = block.upwards or block.title or block.chart.title.partition(" (")[0]
    chart_into(ax, block.chart, f"{words}{bars}")


def chart_into(ax: Any, chart: Chart, up: str) -> None:
    """Draw lines; `up` names the axis of their values. If they are several, they are named beside or inside."""
    colours = depths("dark" if is_dark(ax) else "light")
    drawn = [_line_into(ax, chart, k, line, colours) for k, line in enumerate(chart.lines)]
    if chart.along is None:
        name_axis(ax.xaxis, chart.names, "", upright=True)
    else:
        _number_axis(ax, chart)
        write_words(ax.set_xlabel, chart.across, fontsize=8)
    if chart.up.logarithmic:
        ax.set_yscale("log")
    margin = 0.0 if chart.up.logarithmic else 0.03 * (chart.up.high - chart.up.low)
    ax.set_ylim(chart.up.low - margin, chart.up.high + margin)
    write_words(ax.set_ylabel, textwrap.fill(up, 44), fontsize=8)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1:
        _name_lines(ax, chart, drawn)


def _line_into(ax: Any, chart: Chart, k: int, line: Line, colours: Sequence[str]) -> Any:
    places, free, kind = _along(chart, k), len(line.values) - line.given, k if line.kind is None else line.kind
    values = np.array([math.nan if value is None else value for value in line.values])
    bars = [line.bar(j) or (value, value) for j, value in enumerate(values)]
    reach = [[abs(values[j] - bar[side]) for j, bar in enumerate(bars)] for side in (0, 1)]
    marks: dict[str, Any] = {"marker": MARKS[kind % 4], "markersize": 3} if chart.along is None else {"marker": "."}
    style = {"linewidth": 1.2, "color": f"C{kind % 10}" if line.depth is None else colours[line.depth]} | marks
    style |= {"linestyle": "none"} if line.dotted else {}
    shown = np.where(np.arange(len(values)) < free, values, math.nan)
    if any(line.bar(j) for j in range(free)):
        drawn = ax.errorbar(places, shown, yerr=np.nan_to_num(reach), capsize=2, **style)[0]
    else:
        (drawn,) = ax.plot(places, shown, **style)
    if line.filled:
        ax.fill_between(places, shown, chart.up.low, alpha=0.15, color=drawn.get_color(), linewidth=0)
    drawn.set_label(line.name.replace("$", r"\$"))
    known = [j for j in range(free) if math.isfinite(values[j])]
    if line.given and known:
        given = [*zip(places[known[-1] :], values[known[-1] :], strict=True)]
        faint = matplotlib("matplotlib.collections").LineCollection([given], colors=[drawn.get_color()])
        faint.set(alpha=0.3, linewidth=1.0)
        ax.add_collection(faint)
    return drawn


def _along(chart: Chart, k: int) -> list[float]:
    """Return the places of a line on the x axis; over names, lines with bars stand beside each other."""
    if chart.along is not None:
        return list(chart.places)
    return [j + chart.aside(k) * len(chart.places) for j in range(len(chart.places))]


def _number_axis(ax: Any, chart: Chart) -> None:
    axis = chart.along
    if isinstance(axis, StepAxis) and axis.logarithmic and axis.steps[0] == 0:
        ax.set_xscale("symlog", linthresh=axis.least, linscale=0.3)
    elif axis is not None and axis.logarithmic:
        ax.set_xscale("log")
    if isinstance(axis, StepAxis):
        ax.set_xticks(axis.ticks(), [text for _, text, _ in chart.ticks()])
        ax.minorticks_off()
    elif all(isinstance(place, int) for place in chart.places):
        ax.xaxis.get_major_locator().set_params(integer=True)


def _name_lines(ax: Any, chart: Chart, drawn: Sequence[Any]) -> None:
    """List few lines in a legend; of many, name some beside a bar of their colours."""
    names = shortened([line.name for line in chart.lines])
    if len(drawn) <= LISTED:
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if chart.along is not None else {}
        legend = ax.legend(drawn, names, fontsize=7, frameon=False, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return
    module = matplotlib("matplotlib.colors")
    norm = module.BoundaryNorm(np.arange(len(drawn) + 1) - 0.5, len(drawn))
    colours = module.ListedColormap([line.get_color() for line in drawn])
    mapped = matplotlib("matplotlib.cm").ScalarMappable(norm, colours)
    named = range(0, len(drawn), math.ceil(len(drawn) / LISTED))
    bar = ax.figure.colorbar(mapped, ax=ax, pad=0.02, ticks=named)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    bar.ax.set_yticklabels([names[k] for k in named], fontsize=6, parse_math=False)
    bar.ax.tick_params(length=2, width=0.6)
    bar.ax.invert_yaxis()  # the first on top, as in a heatmap


def bars_into(ax: Any, block: Bars) -> None:
    """Draw a histogram."""
    edges = block.chart.places
    ax.bar(edges[:-1], block.shares, width=edges[1] - edges[0], align="edge", linewidth=0, color=f"C{block.colour}")
    ax.set_ylim(block.chart.up.low, block.chart.up.high)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    write_words(ax.set_title, block.title, fontsize=8)
    write_words(ax.set_xlabel, block.chart.across, fontsize=8)
    write_words(ax.set_ylabel, block.upwards, fontsize=8)


# --- rankings, trees and planes ---------------------------------------------------------------------------------------


def ranking_into(ax: Any, block: RankingBlock) -> None:
    """Draw each model's score with its 95 % interval, the first model on top."""
    names, rows = short_names([place.name for place in block.places]), np.arange(len(block.places))
    values, low, high = (np.array([getattr(place, end) for place in block.places]) for end in ("value", "low", "high"))
    ax.errorbar(values, rows, xerr=[values - low, high - values], fmt="o", markersize=4, linewidth=1, capsize=2)
    ax.set_yticks(rows, [textwrap.fill(names[place.name], NAME) for place in block.places], fontsize=7)
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    write_words(ax.set_xlabel, f"{block.title} ({block.direction})", fontsize=8)


def tree_into(ax: Any, block: Tree) -> None:
    """Draw which of some models join at which distance, the nearest on the right."""
    branches = np.array(block.branches)
    lines = matplotlib("matplotlib.collections").LineCollection(branches, colors=ink_of(ax), linewidths=0.8)
    ax.add_collection(lines)
    ax.set(xlim=(float(branches[:, :, 0].max()) * 1.03 or 1.0, 0), ylim=(len(block.names) - 0.5, -0.5))
    ax.yaxis.tick_right()
    name_axis(ax.yaxis, [block.names[leaf] for leaf in block.leaves], "", most=len(block.names))
    for label, leaf in zip(ax.get_yticklabels(), block.leaves, strict=True):
        label.set_color(_group_colours(ax, block)[leaf])
    ax.tick_params(axis="x", labelsize=7, width=0.6)
    ax.spines[["left", "right", "top"]].set_visible(False)
    write_words(ax.set_xlabel, block.unit, fontsize=8)


def scatter_into(ax: Any, block: Scatter) -> None:
    """Draw named points in a plane, whose axes have one scale."""
    places, colours = np.array(block.points), _group_colours(ax, block)
    ax.scatter(*places.T, s=14, color=colours)
    half = max(float(np.abs(places).max()) * 1.3, 1e-12)
    points = [(x, -y) for x, y in (places / half * (ACROSS / 2)).tolist()]
    named = label_places(points, block.names, 4, 8) if len(block.names) <= MAPPED else []
    for place, label, (dx, dy) in zip(places, block.names, named, strict=False):
        style = {"textcoords": "offset points", "fontsize": 7, "va": "center", "parse_math": False}
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": "#999999", "shrinkA": 0}
        ax.annotate(label, place, (dx, -dy), arrowprops=leader if dy else None, **style)
    ax.set(ylim=(-half, half), box_aspect=1)
    ticks = ax.get_yticks()
    ax.set(xticks=ticks, yticks=ticks, xlim=(-half, half), ylim=(-half, half))  # ticks may lie outside
    ax.tick_params(labelsize=7, width=0.6, length=2)
    write_words(ax.set_xlabel, textwrap.fill(block.caption, 64), fontsize=7)
    ax.spines[:].set_color("#888888")


def _group_colours(ax: Any, block: Tree | Scatter) -> list[str]:
    """Return a colour for each model: that of its group, where there are several."""
    return [f"C{group % 10}" if any(block.groups) else ink_of(ax) for group in block.groups]


PANELS: Mapping[type, Callable[[Any, Any], None]] = {
    Heatmap: heatmap_into,
    Lines: lines_into,
    Bars: bars_into,
    RankingBlock: ranking_into,
    Tree: tree_into,
    Scatter: scatter_into,
}
