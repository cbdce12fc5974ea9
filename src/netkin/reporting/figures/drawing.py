"""Drawing with matplotlib, which is imported only when needed: the heatmap, the line chart, files."""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from netkin import files
from netkin.errors import InvalidValue, MissingExtra
from netkin.reporting.charts import Chart, Line, StepAxis
from netkin.reporting.grids import Grid, ink, palette, shades
from netkin.reporting.page.svg import label_places
from netkin.reporting.words import shortened
from netkin.results.distances import branches_of, plane_of, tree_of

KINDS = (".png", ".svg", ".pdf")
TICKS = 32  # names on an axis at most
MARKS = "os^D"
WRITTEN = 12  # rows and columns up to which cells show their values
CELL = 0.3  # inches that a cell with a value needs
ACROSS = 200  # points that a plane of models is wide, about
LISTED = 16  # lines that a legend lists; of more, some are named beside a bar of their colours
STYLE = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "netkin"}


def kind_of(path: str | os.PathLike[str] | None) -> str:
    """Return the kind of file that the ending of `path` names, or refuse the ending."""
    kind = "" if path is None else Path(path).suffix.lower()
    if path is not None and kind not in KINDS:
        raise InvalidValue(f"a figure ends in {', '.join(KINDS)}; got {str(path)!r}.")
    return kind.lstrip(".")


def refuse_file(measure: object) -> None:
    """Refuse the name of a file where that of a measure belongs."""
    if isinstance(measure, (str, os.PathLike)) and str(measure).lower().endswith(KINDS):
        raise InvalidValue(f"{str(measure)!r} is a file, and no measure; pass it as `path={str(measure)!r}`.")


def matplotlib(module: str) -> Any:
    """Return one of matplotlib's modules, or name the extra that brings it."""
    try:
        return import_module(module)
    except ImportError as fault:
        raise MissingExtra(
            "a figure needs the package 'matplotlib'; install it with `pip install 'netkin[figures]'`."
        ) from fault


def empty_figure(width: float, height: float) -> Any:
    """Return a figure of its own, so that no global state of matplotlib's is touched."""
    figure = matplotlib("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    matplotlib("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def heatmap_into(ax: Any, grid: Grid, names: tuple[str, str], *, best: bool = True, most: int = TICKS) -> Any:
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
    if grid.note:
        write_words(ax.set_title, grid.note, fontsize=8)
    name_axis(ax.xaxis, grid.columns, names[1], upright=True, most=most)
    name_axis(ax.yaxis, grid.rows, names[0], most=most)
    ax.spines[:].set_visible(False)
    return image


def bar_beside(axes: Any, image: Any, grid: Grid) -> None:
    """Put the colour bar beside one pair of axes or several; the close end is up."""
    figure = image.axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.03)
    bar.outline.set_visible(False)
    if not grid.scale.higher_is_closer:
        bar.ax.invert_yaxis()
    bar.ax.tick_params(labelsize=7, width=0.6)
    letters = 16 * bar.ax.bbox.height / figure.dpi
    write_words(bar.set_label, _lines(f"{grid.id} ({grid.scale.better})", letters), fontsize=8)


def _lines(words: str, letters: float) -> str:
    """Return the name of a measure in as many lines as it needs: broken before brackets, and between parameters."""
    if len(words) <= letters:
        return words
    return "\n".join(
        line for part in re.split(r" ?(?=\()", words) for line in textwrap.wrap(part, max(20, int(letters)))
    )


def caption_below(figure: Any, words: str) -> None:
    """Write a caption below everything, in lines that are as long as the figure is wide."""
    letters = max(40, int(figure.get_size_inches()[0] * 17))
    text = "\n".join(["", *textwrap.wrap(words, letters)])  # the empty line keeps it apart from names above
    write_words(figure.supxlabel, text, fontsize=8, x=0.01, ha="left")


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


def lines_into(ax: Any, chart: Chart, up: str = "", *, marks: str = MARKS, legend: bool | None = None) -> None:
    """Draw a line chart into axes, with bars for errors; `up` names the axis of the values.

    Values that are so by construction are joined by a faint line. A legend is there by default if lines are several.
    """
    for k, line in enumerate(chart.lines):
        _line_into(ax, chart, k, line, marks[(k if line.kind is None else line.kind) % len(marks)])
    if chart.along is None:
        name_axis(ax.xaxis, chart.names, "", upright=True)
    else:
        _number_axis(ax, chart)
        write_words(ax.set_xlabel, chart.across, fontsize=8)
    if chart.up.logarithmic:
        ax.set_yscale("log")
    margin = 0.0 if chart.up.logarithmic else 0.03 * (chart.up.high - chart.up.low)
    ax.set_ylim(chart.up.low - margin, chart.up.high + margin)
    write_words(ax.set_ylabel, up, fontsize=8)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1 if legend is None else legend:
        name_lines(ax, chart.lines, beside=chart.along is not None)


def ink_of(ax: Any) -> str:
    """Return the colour in which axes are labelled, which can be read on their background."""
    return str(ax.xaxis.label.get_color())


def is_dark(ax: Any) -> bool:
    """Return whether the background of axes is dark."""
    red, green, blue = matplotlib("matplotlib.colors").to_rgb(ax.get_facecolor())
    return 0.3 * red + 0.6 * green + 0.1 * blue < 0.5


def _line_into(ax: Any, chart: Chart, k: int, line: Line, mark: str) -> None:
    places, free = _along(chart, k), len(line.values) - line.given
    values = np.array([math.nan if value is None else value for value in line.values])
    bars = [line.bar(j) or (value, value) for j, value in enumerate(values)]
    reach = [[abs(values[j] - bar[side]) for j, bar in enumerate(bars)] for side in (0, 1)]
    style: dict[str, Any] = {"marker": mark, "markersize": 5 if mark == "." else 3, "linewidth": 1.2}
    style |= {"color": line.colour} if line.colour else {} if line.kind is None else {"color": f"C{line.kind % 10}"}
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


def name_lines(ax: Any, lines: Sequence[Line], beside: bool) -> None:
    """List few lines in a legend, inside or `beside` the axes; of many, name some beside a bar of their colours."""
    names = shortened([line.name for line in lines])
    if len(lines) <= LISTED:
        handles, _ = ax.get_legend_handles_labels()
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if beside else {}
        legend = ax.legend(handles, names, fontsize=7, frameon=False, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return
    module = matplotlib("matplotlib.colors")
    norm = module.BoundaryNorm(np.arange(len(lines) + 1) - 0.5, len(lines))
    mapped = matplotlib("matplotlib.cm").ScalarMappable(norm, module.ListedColormap([line.colour for line in lines]))
    named = range(0, len(lines), math.ceil(len(lines) / LISTED))
    bar = ax.figure.colorbar(mapped, ax=ax, pad=0.02, ticks=named)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    bar.ax.set_yticklabels([names[k] for k in named], fontsize=6, parse_math=False)
    bar.ax.tick_params(length=2, width=0.6)
    bar.ax.invert_yaxis()  # the first on top, as in a heatmap


def tree_into(ax: Any, distances: np.ndarray, names: Sequence[str]) -> None:
    """Draw into axes which of some models join at which distance, the nearest on the right."""
    branches, leaves = branches_of(tree_of(distances))
    lines = matplotlib("matplotlib.collections").LineCollection(branches, colors=ink_of(ax), linewidths=0.8)
    ax.add_collection(lines)
    ax.set(xlim=(float(branches[:, :, 0].max()) * 1.03 or 1.0, 0), ylim=(len(names) - 0.5, -0.5))
    ax.yaxis.tick_right()
    name_axis(ax.yaxis, [names[leaf] for leaf in leaves], "", most=len(names))
    ax.tick_params(axis="x", labelsize=7, width=0.6)
    ax.spines[["left", "right", "top"]].set_visible(False)


def plane_into(ax: Any, distances: np.ndarray, names: Sequence[str]) -> None:
    """Draw into axes where models lie in a plane, by classical scaling."""
    places, share = plane_of(distances)
    ax.scatter(*places.T, s=14, color=ink_of(ax))
    half = max(float(np.abs(places).max()) * 1.3, 1e-12)
    labels, points = shortened(names), [(x, -y) for x, y in (places / half * (ACROSS / 2)).tolist()]
    for place, label, (dx, dy) in zip(places, labels, label_places(points, labels, 4, 8), strict=True):
        style = {"textcoords": "offset points", "fontsize": 7, "va": "center", "parse_math": False}
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": "#999999", "shrinkA": 0}
        ax.annotate(label, place, (dx, -dy), arrowprops=leader if dy else None, **style)
    ax.set(ylim=(-half, half), box_aspect=1)
    ticks = ax.get_yticks()
    ax.set(xticks=ticks, yticks=ticks, xlim=(-half, half), ylim=(-half, half))  # ticks may lie outside
    ax.tick_params(labelsize=7, width=0.6, length=2)
    write_words(ax.set_xlabel, f"multidimensional scaling, {share:.0%} of the squared spread", fontsize=8)
    ax.spines[:].set_color("#888888")


def name_axis(axis: Any, layers: Sequence[str], model: str, upright: bool = False, most: int = TICKS) -> None:
    """Name the layers along an axis, as many as can be read, and the model beside them."""
    every = math.ceil(len(layers) / most) or 1
    labels = shortened(layers)[::every]
    axis.set_ticks(range(0, len(layers), every))
    axis.set_ticklabels(labels, fontsize=7, rotation=90 if upright else 0)
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
    axis.set_tick_params(length=0 if every == 1 else 2, width=0.6, pad=3)
    write_words(axis.set_label_text, model, fontsize=9)


def write_words(write: Any, words: str, **style: Any) -> None:
    """Write text literally: a dollar sign in a name starts no formula."""
    write(words.replace("$", r"\$"), **style)


def write_figure(figure: Any, path: str | os.PathLike[str], kind: str, *, overwrite: bool = False) -> None:
    """Write the figure, with text as text in SVG and at 300 dots an inch in PNG."""
    buffer = io.BytesIO()
    dated = {
        "png": {"Software": "netkin"},
        "svg": {"Creator": "netkin", "Date": None},
        "pdf": {"Creator": "netkin", "CreationDate": None},
    }[kind]
    with matplotlib("matplotlib").rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=300, bbox_inches="tight", metadata=dated)
    files.write_bytes(path, buffer.getvalue(), overwrite=overwrite)
