"""Small pictures of a heatmap at several steps, side by side: a training run at a glance."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from netkin.reporting.colours import SHADES, shades
from netkin.reporting.grids import Grid
from netkin.reporting.markup import Markup, tag

HOLE = SHADES - 1  # the last colour is left transparent, so that the hatching behind shows


def panes(grids: Sequence[Grid], chosen: Sequence[int], names: Sequence[str]) -> Markup:
    """Return the heatmaps of the chosen places as small pictures, each a button that opens its step."""
    items = [tag("li", _pane(grids[k], k, names[k])) for k in chosen]
    return tag("ul", *items, class_="panes", aria_label="The run at a glance")


def png(grid: Grid) -> bytes:
    """Return a heatmap as a PNG with one pixel a cell and holes transparent."""
    numbers = grid.scale.shade_numbers(grid.values)
    pixels = np.where(numbers < 0, HOLE, np.minimum(numbers, HOLE - 1)).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    size = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)  # 8 bits, with a table of colours
    colours, clear = shades().astype(np.uint8).tobytes(), b"\xff" * HOLE + b"\0"
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
