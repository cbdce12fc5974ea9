"""Static figures for papers, drawn with matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from netkin import files
from netkin.errors import MissingExtra, ShapeError, ValueFault
from netkin.reporting.colours import shades
from netkin.reporting.grids import Grid, grid_of, summary_grids
from netkin.reporting.wording import shortened
from netkin.results import Comparison, Comparisons

KINDS = (".png", ".svg", ".pdf")
TICKS = 32  # names on an axis at most
STYLE = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "netkin"}


def plot(
    results: Comparison | Comparisons,
    measure: str | None = None,
    path: str | os.PathLike[str] | None = None,
    ax: Any = None,
) -> Any:
    """Return a figure with a heatmap for each measure, or for `measure` alone; write it where a `path` is given.

    With `ax`, matplotlib axes of yours, the one heatmap is drawn there. The ending of `path` chooses PNG, SVG or PDF.
    """
    kind = _kind(path)
    _matplotlib("matplotlib")
    grids = _grids(results, measure)
    names = (results.a, results.b) if isinstance(results, Comparison) else ("", "")
    figure = _panels(grids, names) if ax is None else _inside(ax, grids, names)
    if path is not None:
        _write(figure, path, kind)
    return figure


def _grids(results: Comparison | Comparisons, measure: str | None) -> list[Grid]:
    if isinstance(results, Comparison):
        tables = results.tables.values() if measure is None else [results.table(measure)]
        grids = [grid_of(table) for table in tables]
    else:
        everything = summary_grids(list(results.values()))
        grids = [grid for grid in everything if measure in (None, grid.id)]
    if not grids:
        raise ValueFault(
            f"nothing to draw: {f'no summary of {measure!r}' if measure else 'this result holds no measure'}."
        )
    return grids


def _kind(path: str | os.PathLike[str] | None) -> str:
    kind = "" if path is None else Path(path).suffix.lower()
    if path is not None and kind not in KINDS:
        raise ValueFault(f"a figure ends in {', '.join(KINDS)}; got {str(path)!r}.")
    return kind.lstrip(".")


def _matplotlib(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as fault:
        raise MissingExtra(
            "a figure needs the package 'matplotlib'; install it with `pip install 'netkin[figures]'`."
        ) from fault


def _inside(ax: Any, grids: Sequence[Grid], names: tuple[str, str]) -> Any:
    if len(grids) != 1:
        ids = ", ".join(grid.id for grid in grids)
        raise ShapeError(f"one pair of axes takes one heatmap, and here are {len(grids)}: {ids}. Name a measure.")
    _draw(ax, grids[0], names)
    return ax.figure


def _panels(grids: Sequence[Grid], names: tuple[str, str]) -> Any:
    """Return a figure of its own, so that no global state of matplotlib's is touched."""
    columns = min(len(grids), 3 if len(grids) in (3, 5, 6, 9) else 2)
    rows = math.ceil(len(grids) / columns)
    width, height = _inches(grids[0])
    figure = _matplotlib("matplotlib.figure").Figure(figsize=(width * columns, height * rows), layout="constrained")
    _matplotlib("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    for place, grid in enumerate(grids, start=1):
        _draw(figure.add_subplot(rows, columns, place), grid, names)
    return figure


def _inches(grid: Grid) -> tuple[float, float]:
    """Return the size of a panel: cells of a fair size, and room for names and the bar of colours."""
    longest = [max((len(name) for name in shortened(names)), default=0) for names in (grid.rows, grid.columns)]
    cell = min(0.42, max(0.09, 5.0 / max(len(grid.columns), len(grid.rows), 1)))
    width = max(cell * len(grid.columns), 1.6) + 0.075 * longest[0] + 1.2
    return width, max(cell * len(grid.rows), 1.6) + 0.075 * longest[1] + 0.7


def _draw(ax: Any, grid: Grid, names: tuple[str, str]) -> None:
    colours = _matplotlib("matplotlib.colors").ListedColormap(shades() / 255, name="netkin")
    colours = colours if grid.scale.higher_is_closer else colours.reversed()
    low, high = (
        (grid.scale.low, grid.scale.high)
        if grid.scale.high > grid.scale.low
        else (grid.scale.low - 0.5, grid.scale.low + 0.5)
    )
    image = ax.imshow(
        np.ma.masked_invalid(grid.values), cmap=colours, vmin=low, vmax=high, interpolation="nearest", aspect="equal"
    )
    _hatch(ax, grid)
    _mark_best(ax, grid)
    _name_axis(ax.xaxis, grid.columns, names[1], upright=True)
    _name_axis(ax.yaxis, grid.rows, names[0])
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.85, pad=0.03)
    bar.outline.set_visible(False)
    if not grid.scale.higher_is_closer:
        bar.ax.invert_yaxis()  # close is up, as everywhere
    bar.ax.tick_params(labelsize=7, width=0.6)
    _text(bar.set_label, f"{grid.id} ({'higher' if grid.scale.higher_is_closer else 'lower'} is closer)", fontsize=8)


def _hatch(ax: Any, grid: Grid) -> None:
    """Hatch what has no value."""
    rectangle = _matplotlib("matplotlib.patches").Rectangle
    for i, j in grid.holes:
        ax.add_patch(rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="/////", edgecolor="#999999", linewidth=0))


def _mark_best(ax: Any, grid: Grid) -> None:
    if not grid.best:
        return
    size = min(16.0, 600.0 / max(len(grid.columns), len(grid.rows)))
    ax.scatter(
        list(grid.best.values()), list(grid.best), s=size, c="white", edgecolors="black", linewidths=0.5, zorder=3
    )


def _name_axis(axis: Any, layers: Sequence[str], model: str, upright: bool = False) -> None:
    every = math.ceil(len(layers) / TICKS) or 1
    labels = shortened(layers)[::every]
    axis.set_ticks(range(0, len(layers), every))
    axis.set_ticklabels(labels, fontsize=7, rotation=90 if upright else 0)
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
    axis.set_tick_params(length=0 if every == 1 else 2, width=0.6, pad=3)
    _text(axis.set_label_text, model, fontsize=9)


def _text(write: Any, words: str, **style: Any) -> None:
    """Write words as they are: a dollar sign in a name starts no formula."""
    write(words.replace("$", r"\$"), **style)


def _write(figure: Any, path: str | os.PathLike[str], kind: str) -> None:
    """Write the figure, with text as text in SVG and at 300 dots an inch in PNG."""
    buffer = io.BytesIO()
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with _matplotlib("matplotlib").rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=300, bbox_inches="tight", metadata=dated)
    files.write_bytes(path, buffer.getvalue())
