"""Pictures of stitches: the map as a matrix, zero in white, and the loss on the way between two stitches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.errors import ShapeError
from netkin.reporting.drawing import empty_figure, kind_of, matplotlib, write_figure, write_words
from netkin.reporting.scales import depths


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
    colours = depths()
    axes.plot([weights[0], weights[-1]], [losses[0], losses[-1]], color="#999999", linewidth=0.8, linestyle="--")
    _line(axes, weights, losses, colours[0], "cross-entropy")
    if accuracies:
        _line(axes.twinx(), weights, accuracies, colours[-1], "relative accuracy")
    write_words(axes.set_xlabel, "weight of the second stitch", fontsize=9)
    write_words(axes.set_title, title, fontsize=9)
    if path is not None:
        write_figure(axes.figure, path, kind, overwrite=overwrite)
    return axes.figure


def _line(ax: Any, weights: Sequence[float], values: Sequence[float], colour: str, name: str) -> None:
    ax.plot(weights, values, color=colour, linewidth=1.4, marker=".", markersize=5)
    write_words(ax.set_ylabel, name, fontsize=9, color=colour)
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines["top"].set_visible(False)
