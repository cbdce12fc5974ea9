"""A page as HTML: the templates with what they need of a block, such as positions in a drawing.

Text is escaped by the templates. A policy in the document forbids every request: it loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files as resources
from itertools import pairwise
from typing import Any

import numpy as np

from netkin.reporting.blocks import (
    Bars,
    Heatmap,
    Lines,
    Name,
    Page,
    PageBlock,
    RankingBlock,
    Scatter,
    Section,
    Tree,
    blocks_of,
    page_document,
)
from netkin.reporting.charts import Axis, Chart, Line, tick_text
from netkin.reporting.grids import GROUPS, SHADES, Grid, depths, ink, kept_columns, palette, shades, trimmed
from netkin.reporting.words import bound, number, number_with_error, sentence, shortened
from netkin.results.caveats import Caveat
from netkin.results.labels import plural

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# as JSON escapes, none of these can end a script or start a tag; U+2028 and U+2029 end a line in older JavaScript
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
_BETWEEN_TAGS = re.compile(r">\n\s*<")
MOST = 3  # caveats of one kind, listed side by side, and columns without values that are named
FEW = 12  # columns, up to which the cells show their values at first
LETTER = 7.4  # pixels that a letter of a label takes at most
CELL = 66  # pixels that a cell takes at most
LEAST, BROAD = 34, 420  # pixels that a cell with its value needs; of a picture that leaves no room beside it
LEGEND = 360  # pixels that the legend of a picture takes
FREE = 0.42  # of a cell that the line through the best matches leaves to the number
CLEAR = SHADES - 1  # the last colour is left transparent, so that the hatching behind shows
SIDE = 1000  # units of a chart's drawing, which is stretched to the size of its place
KINDS = 8  # colours of lines; they and their dashes repeat after so many
SHAPES = ("round", "square")  # of the dots
LABEL = 0.05  # of the height that a name at a line's end takes
CROWDED = 40  # points in a line, beyond which it has no dots
NARROW = 270  # pixels of a chart on a phone
LETTER_DEPTH = 5.2  # how deep a letter of a slanted name reaches, in pixels
ROW, WIDTH, LETTER_WIDTH = 16, 340, 8  # of a tree or plane in pixels; a letter is as wide as on a phone
LINES_AWAY = 4  # lines by which the name of a point may be moved
LONGEST = 60  # letters of a model's name beside a chart
SHOWN, CELLS = 4, 2500  # heatmaps in a notebook at most, and cells, beyond which only the first is shown
WRITTEN = 16  # columns, up to which cells show their values in a notebook
FEW_PARTS = (2, 3, 4)  # into which an axis of a hundred pixels is divided, the fewest that give two numbers


def html_of(page: Page) -> str:
    """Return the HTML document of a page."""
    text = _template("page.html").render(page=page, **_setting(page))
    main, _, rest = text.partition("</main>")  # text between tags ends no line, so that these lines are the templates'
    head, _, body = main.partition("</head>")
    made = f"{head}</head>{_BETWEEN_TAGS.sub('><', body)}</main>{rest}"
    # a lone half of a surrogate pair, as in a badly decoded file name, has no UTF-8
    return made.encode("utf-8", "replace").decode("utf-8")


def render(block: PageBlock, card: bool = False) -> Any:
    """Return the HTML of one block; a `card` stands by itself."""
    return _markup(_template(f"{block.kind}.html", block.package).render(block=block, card=card, **view_of(block)))


def view_of(block: PageBlock) -> dict[str, Any]:
    """Return what a template needs of a block beside its fields."""
    return _VIEWS.get(type(block), lambda _: {})(block)


def notebook_of(page: Page) -> str:
    """Return the blocks of a page that are not folded, with inline styles and without scripts, for a notebook."""
    shown = list(_unfolded(page))
    maps = [block for block in shown if isinstance(block, Heatmap) and not block.frames]
    few = maps[:SHOWN] if sum(block.grid.values.size for block in maps[:SHOWN]) <= CELLS else maps[:1]
    left_out = [block.grid.id for block in maps[len(few) :]]
    left_out += [block.measure for block in page.blocks if isinstance(block, Section) and block.hidden]
    text = _template("notebook.html").render(page=page, heatmaps=few, parts=shown, left_out=left_out)
    return _BETWEEN_TAGS.sub("><", text.strip()).encode("utf-8", "replace").decode("utf-8")


def _unfolded(part: Page | Section) -> Iterator[PageBlock]:
    for block in filter(None, part.blocks):
        if isinstance(block, Section):
            yield from () if block.hidden or block.layout in ("folded", "open") else _unfolded(block)
        elif not getattr(block, "folded", False):
            yield block


@cache
def _environment(package: str) -> Any:
    jinja2 = import_module("jinja2")
    loaders = [jinja2.PackageLoader(one) for one in dict.fromkeys([package, PageBlock.package])]
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.globals |= {"render": render, "asset": asset, "shortened": shortened, "plural": plural, "picture": picture_url,
                     "palette": palette, "depths": depths, "ink": ink, "number": number}  # fmt: skip
    made.globals |= {"legend_ends": legend_ends, "alike": alike, "view_of": view_of, "chart_view": chart_view,
                     "notebook_rows": notebook_rows, "sentence": sentence, "groups": GROUPS}  # fmt: skip
    made.tests["name"] = lambda value: isinstance(value, Name)
    made.tests["block"] = lambda value: isinstance(value, PageBlock)
    return made


def _template(name: str, package: str = PageBlock.package) -> Any:
    return _environment(package).get_template(name)


def _markup(text: str) -> Any:
    return import_module("markupsafe").Markup(text)


def asset(filename: str) -> Any:
    """Return a style sheet or a script of ours."""
    return _markup(resources("netkin.reporting").joinpath("assets", filename).read_text(encoding="utf-8"))


def _setting(page: Page) -> dict[str, Any]:
    """Return what the frame of a page depends on: its blocks, and the scripts that these need."""
    heatmaps = [block for block in blocks_of(page) if isinstance(block, Heatmap)]
    controlled = bool(heatmaps or page.csv)
    scripts = ["page", "chart"]
    if controlled:
        scripts = ["page", "heatmap", "saving", *(["timeline"] if page.timeline else []), "chart", "controls"]
    layered = [block.grid for block in heatmaps if block.level == "layers"]
    few = max((len(grid.columns) for grid in layered), default=0) <= FEW
    best = None if not any(block.grid.best for block in heatmaps) else page.best
    text = json.dumps(page_document(page), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return {"policy": POLICY, "scripts": scripts, "controlled": controlled, "cells": bool(heatmaps), "few": few,
            "best": best, "data": _markup(text.translate(_UNSAFE))}  # fmt: skip


def alike(caveats: Sequence[Caveat]) -> list[list[str]]:
    """Return the sentences of caveats, those of one code together where they are many."""
    codes: dict[str, list[str]] = {}
    for caveat in caveats:
        codes.setdefault(caveat.code, []).append(str(caveat))
    groups = []
    for sentences in codes.values():
        groups += [sentences] if len(sentences) > MOST else [[sentence] for sentence in sentences]
    return groups


# --- heatmaps ---------------------------------------------------------------------------------------------------------


def heatmap_view(block: Heatmap) -> dict[str, Any]:
    """Return a heatmap without the columns that have no value in any of its steps, and the sizes it needs."""
    columns = kept_columns(block.frames or [block.grid])
    grid = trimmed(block.grid, columns)
    rows, heads = shortened(grid.rows), shortened(grid.columns)
    label, wide = _room(rows), len(grid.columns) > 30
    kinds = {
        "wide": wide,
        "small": not wide and len(grid.columns) <= 8,
        "listed": bool(grid.listed),
        "broad": label + LEAST * len(grid.columns) > BROAD,
        "numbered": block.numbered,
    }
    numbers, tails, texts = grid.scale.shade_numbers(grid.values).tolist(), grid.tails, grid.texts
    cells = [
        [
            ("hole" if shade < 0 else f"c{shade}", grid.best.get(i) == j, texts[i][j], tails[i][j] if tails else "")
            for j, shade in enumerate(line)
        ]
        for i, line in enumerate(numbers)
    ]
    gone = [own for k, own in enumerate(block.grid.columns) if k not in columns]
    return {
        "grid": grid, "kinds": [kind for kind, holds in kinds.items() if holds], "label": label, "head": _room(heads),
        "heads": list(zip(grid.columns, heads, strict=True)), "rows": list(zip(grid.rows, rows, cells, strict=True)),
        "gone": gone, "most_named": MOST, "shown_columns": "" if not gone else " ".join(map(str, columns)),
        "widest": max(label + CELL * len(grid.columns), LEGEND), "points": [(j, i) for i, j in grid.best.items()],
        "gaps": gaps(grid), "borders": grid.borders,
    }  # fmt: skip


def legend_ends(grid: Grid) -> tuple[str, str, str]:
    """Return the words at the far and the close end of the bar of colours, and a note where a bound is open."""
    scale = grid.scale
    where = "the only value" if scale.low == scale.high else "range of the values here"
    ends = f"{bound(scale.far)} {scale.words[0]}", f"{scale.words[1]} {bound(scale.close)}"
    return *ends, where if scale.open_ended else ""


def gaps(grid: Grid) -> str:
    """Return short lines between matches whose cells touch at a corner; longer ones would run through numbers."""
    places = [(j + 0.5, i + 0.5) for i, j in grid.best.items()]
    pieces = []
    for (x, y), (u, v) in pairwise(places):
        if (abs(u - x), abs(v - y)) == (1, 1):
            ends = [x + FREE * (u - x), y + FREE * (v - y), u - FREE * (u - x), v - FREE * (v - y)]
            pieces.append("M{:.3g} {:.3g}L{:.3g} {:.3g}".format(*ends))
    return "".join(pieces)


def notebook_rows(grid: Grid) -> Iterator[tuple[str, str, list[tuple[str, bool, str, str, str]]]]:
    """Yield for each row its name, whole and short, and of its cells the colour, mark, text, error and full text."""
    shades, few = grid.scale.shade_numbers(grid.values), len(grid.columns) <= WRITTEN
    for i, names in enumerate(zip(grid.rows, shortened(grid.rows), strict=True)):
        cells = []
        for j, shade in enumerate(shades[i].tolist()):
            error = math.nan if grid.errors is None else float(grid.errors[i, j])
            value = number_with_error(float(grid.values[i, j]), error)
            told = f"no value, {grid.missing[i, j]}" if shade < 0 else value
            text, tail = (grid.texts[i][j], grid.tails[i][j] if grid.tails else "") if few else ("", "")
            colour = "" if shade < 0 else palette()[shade]
            cells.append((colour, grid.best.get(i) == j, text, tail, f"{grid.pair(i, j)}: {told}"))
        yield *names, cells


def _room(labels: Sequence[str]) -> int:
    return round(max((len(label) for label in labels), default=0) * LETTER) + 14


def png(grid: Grid) -> bytes:
    """Return a heatmap as a PNG with one pixel a cell and holes transparent."""
    numbers = grid.scale.shade_numbers(grid.values)
    pixels = np.where(numbers < 0, CLEAR, np.minimum(numbers, CLEAR - 1)).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    size = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)  # 8 bits, with a table of colours
    colours, clear = shades().astype(np.uint8).tobytes(), b"\xff" * CLEAR + b"\0"
    parts = [(b"IHDR", size), (b"PLTE", colours), (b"tRNS", clear), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def picture_url(grid: Grid) -> str:
    """Return the address of a heatmap as a small image, which holds it."""
    return f"data:image/png;base64,{base64.b64encode(png(grid)).decode()}"


# --- line charts ------------------------------------------------------------------------------------------------------


def chart_view(chart: Chart, labels: bool = False) -> dict[str, Any]:
    """Return the drawing of a chart: the paths of its lines, its ticks and, with `labels`, names at the lines' ends."""
    lefts, ticks, slanted = chart.lefts, chart.ticks(), _is_slanted(chart)
    lines = [_line_view(chart, k, [(x + chart.aside(k)) * SIDE for x in lefts])
             for k in range(len(chart.lines))]  # fmt: skip
    deepest = max((len(short) for _, short, _ in ticks), default=0)
    short = shortened([line.name for line in chart.lines], 16)
    up = [(tick_text(value), 100 * (1 - chart.up.place(value))) for value in chart.up.ticks()]
    return {
        "chart": chart, "lines": lines, "rules": [_units(SIDE * top / 100) for _, top in up], "up": up,
        "across": [(100 * place, text, full) for place, text, full in ticks], "slanted": slanted,
        "depth": round(24 + LETTER_DEPTH * deepest) if slanted else 26, "short_names": short,
        "ends": list(end_labels(chart)) if labels else [],
        "longest_name": max(map(len, short), default=0) if labels else 0,
    }  # fmt: skip


def _line_view(chart: Chart, k: int, lefts: Sequence[float]) -> dict[str, Any]:
    line = chart.lines[k]
    heights = [None if value is None else (1 - chart.up.place(value)) * SIDE for value in line.values]
    given = len(lefts) - line.given
    last = max((j for j in range(given) if heights[j] is not None), default=0)
    free = [y if j < given else None for j, y in enumerate(heights)]
    kind = k if line.kind is None else line.kind
    dots = "".join(f"M{_units(x)} {_units(y)}h0" for x, y in zip(lefts, free, strict=True) if y is not None)
    bars = ((lefts[j], line.bar(j)) for j in range(len(line.values)))
    whiskers = [
        f"M{_units(x)} {_units((1 - chart.up.place(bar[0])) * SIDE)}V{_units((1 - chart.up.place(bar[1])) * SIDE)}"
        for x, bar in bars
        if bar
    ]
    return {
        "name": line.name, "kind": "" if line.depth is not None else f" k{kind % KINDS}",
        "colour": f"var(--k{kind % KINDS})" if line.depth is None else f"var(--d{line.depth})",
        "shape": SHAPES[(kind + kind // KINDS) % 2], "whiskers": whiskers,
        "way": "" if line.dotted else _path(lefts, free),
        "given": _path(lefts[last:], heights[last:]) if line.given else "",
        "dots": dots if line.dotted or (len(chart.places) <= CROWDED and not line.filled) else "",
        "band": _band(lefts, free) if line.filled else "",
    }  # fmt: skip


def _path(lefts: Sequence[float], heights: Sequence[float | None]) -> str:
    """Return a line that is broken where a value is missing."""
    pieces, drawn = [], False
    for x, y in zip(lefts, heights, strict=True):
        if y is not None:
            pieces.append(f"{'L' if drawn else 'M'}{_units(x)} {_units(y)}")
        drawn = y is not None
    return "".join(pieces)


def _band(lefts: Sequence[float], heights: Sequence[float | None]) -> str:
    """Return the outline of what lies below a line, without the places where a value is missing."""
    known = [(x, y) for x, y in zip(lefts, heights, strict=True) if y is not None]
    line = "".join(f"L{_units(x)} {_units(y)}" for x, y in known)
    return f"M{_units(known[0][0])} {SIDE}{line}L{_units(known[-1][0])} {SIDE}Z" if known else ""


def _units(length: float) -> str:
    return f"{round(length, 1) + 0.0:g}"


def _is_slanted(chart: Chart) -> bool:
    """Return whether names below a chart are slanted: where they would not fit side by side on a phone."""
    ticks = chart.ticks()
    widest = max((len(short) for _, short, _ in ticks), default=0)
    return chart.along is None and (8 * widest + 6) * (len(ticks) if chart.marked else len(chart.places)) > NARROW


def end_labels(chart: Chart) -> Iterator[tuple[int, float]]:
    """Yield lines with the heights of their last free values, moved apart; of very many lines, some."""
    ends = [_last(line, chart) for line in chart.lines]
    known = [k for k, y in enumerate(ends) if y is not None]
    chosen = known[:: -(-len(known) // int(1 / LABEL))] if known else []
    yield from zip(*_apart(chosen, [ends[k] or 0.0 for k in chosen]), strict=True)


def _last(line: Line, chart: Chart) -> float | None:
    """Return the height of the last value that is not so by construction, from 0 at the top."""
    free = [value for value in line.values[: len(line.values) - line.given] if value is not None]
    return 1 - chart.up.place(free[-1]) if free else None


def _apart(keys: Sequence[int], heights: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return keys from the top down with heights that leave each a line of words, as near to their own as can be."""
    order = sorted(range(len(keys)), key=lambda k: heights[k])
    placed: list[float] = []
    for k in order:
        placed.append(max(heights[k], placed[-1] + LABEL if placed else 0.0))
    limit = 1.0
    for k in range(len(placed) - 1, -1, -1):  # what was pushed out below goes up again
        placed[k] = min(placed[k], limit)
        limit = placed[k] - LABEL
    return [keys[k] for k in order], placed


def bars_view(block: Bars) -> dict[str, Any]:
    """Return the path of a histogram's bars, beside the axes that a line chart has."""
    lefts, width = [SIDE * left for left in block.chart.lefts], SIDE / len(block.shares)
    tops = [SIDE * (1 - block.chart.up.place(share)) for share in block.shares]
    path = "".join(f"M{x:.1f} {SIDE}V{top:.1f}h{width * 0.9:.2f}V{SIDE}z" for x, top in zip(lefts, tops, strict=False))
    return {"view": chart_view(block.chart), "path": path}


# --- rankings, trees and planes ---------------------------------------------------------------------------------------


def ranking_view(block: RankingBlock) -> dict[str, Any]:
    """Return the positions of dots, intervals and ticks along the axis, in percent."""
    if block.axis is None:
        return {"rows": [], "ticks": []}
    axis = block.axis
    short = shortened([place.name for place in block.places], LONGEST)
    rows = [
        (label, place, *(100 * axis.place(end) for end in (place.value, place.low, place.high)))
        for label, place in zip(short, block.places, strict=True)
    ]
    numbers = next((found for parts in FEW_PARTS if len(found := axis.ticks(parts)) > 1), axis.ticks())
    return {"rows": rows, "ticks": [(tick_text(tick), 100 * axis.place(tick)) for tick in numbers]}


def tree_view(block: Tree) -> dict[str, Any]:
    """Return the lines of a tree in pixels, the nearest on the right."""
    far = max(x for branch in block.branches for x, _ in branch)
    axis, low = Axis(far or 1.0, 0), len(block.names) * ROW
    points = [" ".join(f"{WIDTH * axis.place(x):.1f},{(y + 0.5) * ROW:.1f}" for x, y in branch)
              for branch in block.branches]  # fmt: skip
    leaves = [(block.names[leaf], (k + 0.5) * ROW + 4, block.groups[leaf]) for k, leaf in enumerate(block.leaves)]
    ticks = [(tick_text(tick), WIDTH * axis.place(tick)) for tick in axis.ticks()]
    room = max(map(len, block.names)) * LETTER_WIDTH + 12
    return {"branches": points, "placed": leaves, "ticks": ticks, "low": low, "width": WIDTH,
            "size": f"-12 0 {WIDTH + 12 + room:.0f} {low + 36}"}  # fmt: skip


def scatter_view(block: Scatter) -> dict[str, Any]:
    """Return the points of a plane in pixels, whose two axes have one scale, with room for their names."""
    places, names = np.array(block.points), block.names
    middle, span = (places.max(0) + places.min(0)) / 2, float(np.ptp(places, axis=0).max()) or 1.0
    scale = (WIDTH - 60) / span
    tall = max(float(np.ptp(places[:, 1])) * scale + 60, WIDTH / 3)
    shown = (places - middle) * scale * [1, -1] + [WIDTH / 2, tall / 2]
    half = np.array([WIDTH, tall]) / 2 / scale
    across, down = Axis(*(middle[0] + [-half[0], half[0]])), Axis(*(middle[1] + [half[1], -half[1]]))
    step = float(np.diff(across.ticks()).min())
    if len(_multiples(down, step)) < 2:
        step /= 2
    few = len(names) <= 4 * math.isqrt(WIDTH)
    aside = label_places([(x, y) for x, y in shown.tolist()], names, LETTER_WIDTH, 14, WIDTH) if few else []
    ends = [(x + dx, x + dx + LETTER_WIDTH * len(own))
            for x, (dx, _), own in zip(shown[:, 0], aside, names, strict=False)]  # fmt: skip
    left, right = max([44, *(4 - low for low, _ in ends)]), max([12, *(high - WIDTH for _, high in ends)])
    dots = [(own, x, y, block.groups[k]) for k, (own, (x, y)) in enumerate(zip(names, shown.tolist(), strict=True))]
    return {
        "dots": dots, "aside": aside, "width": WIDTH, "tall": tall,
        "columns": [(tick_text(x), WIDTH * across.place(x)) for x in _multiples(across, step)],
        "lines": [(tick_text(y), tall * down.place(y)) for y in _multiples(down, step)],
        "size": f"{-left:.0f} -4 {left + WIDTH + right:.0f} {tall + 40:.0f}",
    }  # fmt: skip


def _multiples(axis: Axis, step: float) -> list[float]:
    low, high = sorted((axis.low, axis.high))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def label_places(
    points: Sequence[tuple[float, float]], names: Sequence[str], letter: float, line: float, wide: float = math.inf
) -> list[tuple[float, float]]:
    """Return where the name of each point begins, from the point: beside it, or a few lines away where that is free.

    Args:
        points: Their places; y grows downwards.
        names: Their names.
        letter: How wide a letter is, in the units of the points.
        line: How high a line is.
        wide: Where the drawing, which begins at 0, ends; a name that reaches beyond is placed elsewhere if it can be.

    Example:
        >>> label_places([(0, 0), (2, 1), (90, 0)], ["a", "b", "c"], letter=6, line=12)
        [(6, 0), (-12, 0), (6, 0)]
    """
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    placed = []
    for (x, y), label in zip(points, names, strict=True):
        width = letter * len(label)
        rows = sorted(range(-LINES_AWAY, LINES_AWAY + 1), key=lambda k: (abs(k), -k))
        offsets = [(dx, k * line) for k in rows for dx in (6, -6 - width)]
        boxes = [(x + dx, y + dy - line / 2, x + dx + width, y + dy + line / 2) for dx, dy in offsets]
        free = [k for k, box in enumerate(boxes) if not any(_meet(box, other) for other in taken)]
        inside = [k for k in free if boxes[k][0] >= 0 and boxes[k][2] <= wide] if wide < math.inf else free
        best = next(iter(inside or free), 0)
        taken.append(boxes[best])
        placed.append(offsets[best])
    return placed


def _meet(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


_VIEWS: Mapping[Any, Any] = {
    Heatmap: heatmap_view,
    Lines: lambda block: {"view": chart_view(block.chart, bool(block.key_title))},
    Bars: bars_view,
    RankingBlock: ranking_view,
    Tree: tree_view,
    Scatter: scatter_view,
}
