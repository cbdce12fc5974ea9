"""A heatmap as an HTML table, readable aloud, selectable, printable, sharp at any size; of a run, small pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from netkin.reporting.grids import Grid
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.scales import SHADES, ink, palette, shades
from netkin.reporting.wording import bound, shortened

FEW = 12  # columns, up to which the cells show their values at first
LETTER = 7.4  # pixels that a letter of a label takes at most
FREE = 0.42  # of a cell that the line through the best matches leaves to the number
CLEAR = SHADES - 1  # the last colour is left transparent, so that the hatching behind shows


def shade_rules() -> str:
    """Return the style rules of all shades, with a colour of text that is readable on each."""
    return "".join(f".c{i}{{background:{shade};color:{ink(shade)}}}" for i, shade in enumerate(palette()))


def heatmap(grid: Grid, caption: str) -> Markup:
    """Return the table of a grid in a box that scrolls, with the line through any best matches laid over it."""
    rows, columns = shortened(grid.rows), shortened(grid.columns)
    counts = f"--rows:{len(rows)};--cols:{len(columns)};--letters:{grid.letters}"
    sizes = f"{counts};--label:{_room(rows)}px;--head:{_room(columns)}px"
    table = tag("table", tag("caption", caption), _head(grid, columns), _body(grid, rows), role="grid", class_="heat")
    over = (None if grid.listed else best_line(grid), border_lines(grid) if grid.borders else None)
    sheet = tag("div", table, *over, class_="sheet")
    return tag("div", sheet, class_="box with-errors" if grid.tails else "box", style=sizes)


def values_class(grids: Sequence[Grid]) -> str:
    """Say whether values stand in the cells before any script runs: where they are few enough to be read."""
    return "values-shown" if max((len(grid.columns) for grid in grids), default=0) <= FEW else "values-hidden"


def legend(grid: Grid) -> Markup:
    """Return the bar of colours with the values at its far and its close end, or the poor and the good one."""
    scale = grid.scale
    ends = (f"{bound(scale.far)} {scale.words[0]}", f"{scale.words[1]} {bound(scale.close)}")
    note = tag("span", "range of the values here", class_="note") if scale.open_ended else None
    bar = tag("span", class_="bar", role="img", aria_label=f"colours from {ends[0]} to {ends[1]}")
    return tag("div", tag("span", ends[0]), bar, tag("span", ends[1]), note, class_="legend")


def bar_rule() -> str:
    """Return the style rule of the legend's bar."""
    stops = ",".join(palette()[i] for i in range(0, 256, 15))
    return f".bar{{background:linear-gradient(90deg,{stops})}}"


def best_line(grid: Grid) -> Markup:
    """Return a drawing, one unit a cell, of the way through the best match of each row."""
    points = [f"{j + 0.5},{i + 0.5}" for i, j in grid.best.items()]
    lines = [tag("polyline", points=" ".join(points), class_=side) for side in ("under", "over")]
    lines += [tag("path", d=_gaps(grid), class_=f"gaps {side}") for side in ("under", "over")]
    dots = [tag("circle", cx=j + 0.5, cy=i + 0.5, r=0.13) for i, j in grid.best.items()]
    view = f"0 0 {len(grid.columns)} {len(grid.rows)}"
    return tag("svg", *lines, *dots, viewBox=view, class_="path", aria_hidden="true", focusable="false")


def border_lines(grid: Grid) -> Markup:
    """Return a drawing, one unit a cell, of the borders between the rows and columns of different models."""
    rows, columns = len(grid.rows), len(grid.columns)
    path = "".join(f"M0 {k}H{columns}M{k} 0V{rows}" for k in grid.borders)
    lines = tag("path", d=path)
    return tag("svg", lines, viewBox=f"0 0 {columns} {rows}", class_="borders", aria_hidden="true", focusable="false")


def _gaps(grid: Grid) -> str:
    """Return the line from match to match with the cells of the matches left free."""
    places = [(j + 0.5, i + 0.5) for i, j in grid.best.items()]
    pieces = []
    for (x, y), (u, v) in pairwise(places):
        free = FREE / max(abs(u - x), abs(v - y))
        ends = [x + free * (u - x), y + free * (v - y), u - free * (u - x), v - free * (v - y)]
        pieces.append("M{:.3g} {:.3g}L{:.3g} {:.3g}".format(*ends))
    return "".join(pieces)


def _head(grid: Grid, labels: Sequence[str]) -> Markup:
    named = zip(grid.columns, labels, strict=True)
    headers = [tag("th", tag("span", name(label)), scope="col", **_whole(full, label)) for full, label in named]
    return tag("thead", tag("tr", tag("td", class_="corner"), *headers))


def _body(grid: Grid, labels: Sequence[str]) -> Markup:
    texts, shades = grid.texts, grid.scale.shade_numbers(grid.values).tolist()
    tails = [[f"<i>{tail}</i>" if tail else "" for tail in line] for line in grid.tails]
    texts = [list(map("".join, zip(*both, strict=True))) for both in zip(texts, tails, strict=True)] if tails else texts
    lines = zip(grid.rows, labels, texts, shades, strict=True)
    rows = [
        tag("tr", tag("th", name(label), scope="row", **_whole(full, label)), _cells(line, numbers, grid.best.get(i)))
        for i, (full, label, line, numbers) in enumerate(lines)
    ]
    return tag("tbody", *rows)


def _cells(texts: Sequence[str], shades: Sequence[int], best: int | None) -> Markup:
    """Return the cells of a row; thousands of them, so that they are kept short."""
    kinds = ["hole" if shade < 0 else f"c{shade}" for shade in shades]
    marked = [f'"{kind} best"' if j == best else kind for j, kind in enumerate(kinds)]
    return Markup("".join(f"<td class={kind}>{text}" for kind, text in zip(marked, texts, strict=True)))


def _whole(full: str, label: str) -> dict[str, str]:
    """Return the attributes that give a shortened name in full."""
    return {} if label == full else {"title": full, "aria_label": full}


def _room(labels: Sequence[str]) -> int:
    return round(max((len(label) for label in labels), default=0) * LETTER) + 14


def figure_of(grid: Grid, caption: str, key: str, *notes: Markup | None, heading: Markup | None = None) -> Markup:
    """Return a heatmap with its heading, legend, place for the value pointed at, downloads and notes."""
    readout = tag("p", "Point at a cell, or reach the table by Tab and use the arrow keys.", class_="readout")
    live = tag("div", readout, role="status", aria_live="polite")
    buttons = [tag("button", kind.upper(), type="button", data_save=kind) for kind in ("svg", "png")]
    saving = tag("div", "Save this picture as ", *buttons, class_="saving controls")
    width = " wide" if len(grid.columns) > 30 else " small" if len(grid.columns) <= 8 else ""
    width += " listed" if grid.listed else ""
    parts = joined(heading, legend(grid), heatmap(grid, caption), live, *notes, saving)
    return tag("figure", parts, class_=f"card{width}", data_grid=key, data_measure=grid.id)


def panes(grids: Sequence[Grid], chosen: Sequence[int], names: Sequence[str]) -> Markup:
    """Return the heatmaps of the chosen places as small pictures, each a button that opens its step."""
    items = [tag("li", _pane(grids[k], k, names[k])) for k in chosen]
    return tag("ul", *items, class_="panes", aria_label="The run at a glance")


def png(grid: Grid) -> bytes:
    """Return a heatmap as a PNG with one pixel a cell and holes transparent."""
    numbers = grid.scale.shade_numbers(grid.values)
    pixels = np.where(numbers < 0, CLEAR, np.minimum(numbers, CLEAR - 1)).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    size = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)  # 8 bits, with a table of colours
    colours, clear = shades().astype(np.uint8).tobytes(), b"\xff" * CLEAR + b"\0"
    parts = [(b"IHDR", size), (b"PLTE", colours), (b"tRNS", clear), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def picture(grid: Grid, style: str | None = None) -> Markup:
    """Return a heatmap as a small image; what it shows is said beside it."""
    source = f"data:image/png;base64,{base64.b64encode(png(grid)).decode()}"
    return tag("img", src=source, alt="", class_="hole", width=len(grid.columns), height=len(grid.rows), style=style)


def _pane(grid: Grid, place: int, label: str) -> Markup:
    return tag("button", picture(grid), label, type="button", data_place=place)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
