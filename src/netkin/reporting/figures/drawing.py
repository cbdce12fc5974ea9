"""What every figure needs: matplotlib, which is imported only when needed, words that start no formula, and files."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import InvalidValue, MissingExtra
from netkin.reporting.words import shortened

KINDS = (".png", ".svg", ".pdf")
TICKS = 32  # names on an axis at most
STYLE = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "netkin"}


def kind_of(path: str | os.PathLike[str] | None) -> str:
    """Return the kind of file that the ending of `path` names, or refuse the ending."""
    kind = "" if path is None else Path(path).suffix.lower()
    if path is not None and kind not in KINDS:
        raise InvalidValue(f"a figure ends in {', '.join(KINDS)}; got {str(path)!r}.")
    return kind.lstrip(".")


def require_measure_name(measure: object) -> None:
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


def caption_below(figure: Any, words: str) -> None:
    """Write a caption below everything, in lines that are as long as the figure is wide."""
    letters = max(40, int(figure.get_size_inches()[0] * 17))
    text = "\n".join(["", *textwrap.wrap(words, letters)])  # the empty line keeps it apart from names above
    write_words(figure.supxlabel, text, fontsize=8, x=0.01, ha="left")


def ink_of(ax: Any) -> str:
    """Return the colour in which axes are labelled, which can be read on their background."""
    return str(ax.xaxis.label.get_color())


def is_dark(ax: Any) -> bool:
    """Return whether the background of axes is dark."""
    red, green, blue = matplotlib("matplotlib.colors").to_rgb(ax.get_facecolor())
    return 0.3 * red + 0.6 * green + 0.1 * blue < 0.5


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
