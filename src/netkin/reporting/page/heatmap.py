"""A heatmap as an HTML table, accessible to screen readers, selectable and printable; small pictures for a run."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from netkin.reporting.charts import StepAxis
from netkin.reporting.grids import (
    SHADES,
    Grid,
    Scale,
    frames,
    grid_of,
    ink,
    kept_columns,
    palette,
    scales_of,
    shades,
    trimmed,
    zoomed,
)
from netkin.reporting.page.document import Markup, joined, name, tag
from netkin.reporting.words import bound, direction, grouped_reasons, meaning_of, number, range_of, shortened
from netkin.results import Comparison, Series, Values
from netkin.results.labels import NOT_ASKED, listing, plural
from netkin.results.records import plain, plain_fields
from netkin.results.values import student_quantile

MOST = 5  # reasons shown in one place
LONG = 140  # letters of a reason that is shown without folding
FEW = 12  # columns, up to which the cells show their values at first
LETTER = 7.4  # pixels that a letter of a label takes at most
CELL = 66  # pixels that a cell takes at most
LEAST, BROAD = 34, 420  # pixels that a cell with its value needs; of a picture that leaves no room beside it
LEGEND = 360  # pixels that the legend of a picture takes
FREE = 0.42  # of a cell that the line through the best matches leaves to the number
MEANING = ("means", "cannot_see")  # fields of a quantity that are the same in every comparison of a page
CLEAR = SHADES - 1  # the last colour is left transparent, so that the hatching behind shows


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
    """Return the CSS class that shows values in the cells where they are few enough to be read, or hides them."""
    return "values-shown" if max((len(grid.columns) for grid in grids), default=0) <= FEW else "values-hidden"


def legend(grid: Grid) -> Markup:
    """Return the bar of colours with the values at its far and its close end, or the poor and the good one."""
    scale = grid.scale
    ends = (f"{bound(scale.far)} {scale.words[0]}", f"{scale.words[1]} {bound(scale.close)}")
    where = "the only value" if scale.low == scale.high else "range of the values here"
    note = tag("span", where, class_="note") if scale.open_ended else None
    bar = tag("span", class_="bar", role="img", aria_label=f"colours from {ends[0]} to {ends[1]}")
    return tag("div", tag("span", ends[0]), bar, tag("span", ends[1]), note, class_="legend")


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
    """Return short lines between matches whose cells touch at a corner; longer ones would run through numbers."""
    places = [(j + 0.5, i + 0.5) for i, j in grid.best.items()]
    pieces = []
    for (x, y), (u, v) in pairwise(places):
        if (abs(u - x), abs(v - y)) != (1, 1):
            continue
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


def figure_of(grid: Grid, caption: str, key: str, *notes: Markup | None, heading: Markup | None = None,
              among: Sequence[Grid] = (), numbered: bool = False) -> Markup:  # fmt: skip
    """Return a heatmap with its heading, legend, place for the value pointed at, downloads and, beside it, notes.

    Columns that have no value in the grid, or in any `among` several that are shown one after the other, are left out.

    Args:
        grid: What is shown.
        caption: What is read aloud before the table.
        key: By which the script finds the numbers.
        notes: What stands beside the picture.
        heading: What stands above it.
        among: Heatmaps that take its place later.
        numbered: Whether its cells always show their values, also where those of other heatmaps are too many.
    """
    columns = kept_columns(among or [grid])
    shown = trimmed(grid, columns)
    readout = tag("p", "Point at a cell, or reach the table by Tab and use the arrow keys.", class_="readout")
    live = tag("div", readout, role="status", aria_live="polite")
    buttons = [tag("button", kind.upper(), type="button", data_save=kind) for kind in ("svg", "png")]
    saving = tag("div", "Save this picture as ", *buttons, class_="saving controls")
    width = " wide" if len(shown.columns) > 30 else " small" if len(shown.columns) <= 8 else ""
    width += " listed" if shown.listed else ""
    labels = _room(shortened(shown.rows))
    width += " broad" if labels + LEAST * len(shown.columns) > BROAD else ""
    width += " numbered" if numbered else ""
    drawn = tag("div", legend(shown), heatmap(shown, caption), live, _left_out(grid, columns), saving,
                class_="picture")  # fmt: skip
    beside = tag("div", *notes, class_="beside") if any(notes) else None
    cut = None if shown is grid else " ".join(map(str, columns))
    inside = tag("div", drawn, beside, class_="inside")
    most = max(labels + CELL * len(shown.columns), LEGEND)
    return tag("figure", heading, inside, class_=f"card{width}", data_grid=key, data_measure=grid.id, data_columns=cut,
               style=f"--most:{most}px")  # fmt: skip


def _left_out(grid: Grid, columns: Sequence[int]) -> Markup | None:
    """Say which columns are not shown, as they have no value at all."""
    gone = [name for k, name in enumerate(grid.columns) if k not in columns]
    more = f" and {len(gone) - MOST} more" if len(gone) > MOST else ""
    told = f"Not shown, without any value: {plural(len(gone), 'column')} ({', '.join(gone[:MOST])}{more})."
    return tag("p", told, class_="errors") if gone else None


def panes(grids: Sequence[Grid], chosen: Sequence[int], names: Sequence[str]) -> Markup:
    """Return the heatmaps of the chosen places as small pictures, each a button that opens its step."""
    buttons = [tag("button", picture(grids[k]), names[k], type="button", data_place=k) for k in chosen]
    return tag("ul", *(tag("li", one) for one in buttons), class_="panes", aria_label="The run at a glance")


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


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def card(table: Values, grid: Grid, key: str, caption: str, *notes: Markup | None, axes: Markup,
         among: Sequence[Grid] = ()) -> Markup:  # fmt: skip
    """Return the card of a measure's table, drawn as `grid`; see `figure_of`.

    Args:
        table: The measure's table.
        grid: What is shown of it.
        key: By which the script finds the numbers.
        caption: What is read aloud before the table.
        notes: What stands beside the picture.
        axes: What rows and columns are.
        among: Heatmaps that take its place later.
    """
    line = tag("p", f"{direction(table)} · {range_of(table)} · {table.exactness}", class_="facts-line")
    means, cannot_see = meaning_of(table)
    says = tag("div", tag("p", means), tag("p", tag("strong", "What it can't see. "), cannot_see), class_="means")
    head = joined(tag("h3", grid.id, class_="code"), line, axes)
    return figure_of(grid, caption, key, says, *notes, heading=head, among=among)


def missing_values(grid: Grid, said: Collection[str] = ()) -> Markup | None:
    """Return why values of a heatmap are missing, but for reasons that are `said` elsewhere."""
    counted = {reason: count for reason, count in grid.reasons().most_common() if reason not in said}
    return reason_list(grouped_reasons(counted), f"No value for {plural(sum(counted.values()), 'pair')}")


def reason_list(told: Sequence[str], summary: str, who: str = "") -> Markup | None:
    """Return reasons beside a sample of the hatching: a short one as it is, else folded under a summary."""
    mark = tag("span", class_="hole sample", aria_hidden="true")
    if not told:
        return None
    if len(told) == 1 and len(told[0]) <= LONG:
        return tag("p", mark, f"no value{f' {who}' if who else ''}: {told[0]}", class_="reasons")
    items = [tag("li", text) for text in told]
    first = f": {re.split('[;.] ', told[0])[0]}" if len(told) == 1 else f", for {len(told)} reasons"
    title = tag("summary", mark, f"{summary}{first}")
    return tag("details", title, tag("ul", *items), class_="reasons")


def shared_reasons(grids: Sequence[Grid]) -> tuple[list[str], Markup | None]:
    """Return the reasons that several measures share, and the list with each of them once.

    A layer that is constant has no value by any measure; the page says so once.
    """
    found = [grid.reasons() for grid in grids]
    most = {reason: max(own[reason] for own in found) for own in found for reason in own}
    shared = {reason: count for reason, count in most.items() if sum(reason in own for own in found) > 1}
    whole = all(reason in own for own in found for reason in shared)
    who = "by every measure" if whole else "by several measures"
    summary = f"No value {who} for {plural(sum(shared.values()), 'pair')}"
    return list(shared), reason_list(grouped_reasons(shared), summary, who)


# --- what the page carries as data, for hover texts and downloads -----------------------------------------------------


def embedded(
    comparisons: Sequence[Comparison],
    grids: Sequence[Sequence[Grid]],
    summaries: Sequence[Grid],
    names: Mapping[str, str],
) -> dict[str, Any]:
    """Return all numbers and labels, for JSON, where a hole is null; `names` are shorter ones of the models."""
    drawn = zip(comparisons, grids, strict=True)
    tables = [table for comparison in comparisons for table in comparison.tables.values()]
    return _colours() | {
        "meanings": {table.id: {name: getattr(table.quantity, name) for name in MEANING} for table in tables},
        "comparisons": [_comparison(comparison, own, names) for comparison, own in drawn],
        "summaries": [_summary(grid, comparisons) for grid in summaries],
    }


def embedded_tables(tables: Sequence[tuple[str, str, Values]]) -> dict[str, Any]:
    """Return tables that compare no models, each with what its rows and its columns are called, for their heatmaps."""
    made = [
        Comparison(
            a=rows, b=columns, layers_a=table.layers_a, layers_b=table.layers_b, tables={table.id: table}, shapes_a={},
            shapes_b={}, widths_a={}, widths_b={}, data="", examples=0, seed=0, version="",
        )
        for rows, columns, table in tables
    ]  # fmt: skip
    names = {side: side for one in made for side in (one.a, one.b)}
    return embedded(made, [[] for _ in made], [], names)


def embedded_series(series: Series, axis: StepAxis) -> dict[str, Any]:
    """Return the numbers of a series as the page shows them, with four decimals, so that many steps stay small."""
    final = series.comparisons[-1]
    read_off = {"caveats": plain(series.caveats), "complete": series.complete}
    places = [[final.layers_a.index(layer), final.layers_b.index(layer)] for layer in series.layers]
    more = {"layers": list(series.layers), "own": places, "places": [float(f"{x:.4g}") for x in axis.places]}
    tables = [_frames(series, measure) for measure in series.measures]
    return _colours() | {
        "series": _facts(final, "tables")
        | _facts(series, "comparisons", "between")
        | read_off
        | more
        | {"tables": tables}
    }


def _facts(record: Any, *left_out: str) -> dict[str, Any]:
    return {name: plain(value) for name, value in plain_fields(record).items() if name not in left_out}


def _frames(series: Series, measure: str) -> dict[str, Any]:
    """Return a measure at every step; a reason for a hole is written once and named by its number."""
    table, grids = series.table(measure), frames(series, measure)
    own = zoomed(table, series.own(measure))
    reasons = list(dict.fromkeys(reason for grid in grids for reason in grid.missing.values()))
    numbered = {reason: k for k, reason in enumerate(reasons)}
    powers = any("e" in text for grid in grids for line in grid.texts for text in line)  # of ten
    shown = {"scale": _scale(grids[0].scale), "axis": {"far": own.far, "close": own.close}, "powers": powers}
    steps = [_frame(grid, numbered) for grid in grids]
    return _about_table(table) | shown | {"reasons": reasons, "frames": steps}


def _frame(grid: Grid, numbered: Mapping[str, int]) -> dict[str, Any]:
    missing = [[i, j, numbered[reason]] for (i, j), reason in grid.missing.items()]
    errors = None if grid.errors is None else _rounded(grid.errors)
    return {"values": _rounded(grid.values), "errors": errors, "missing": missing, "best": _best(grid)}


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[float(number(value)) if math.isfinite(value) else None for value in row] for row in values.tolist()]


def _colours() -> dict[str, Any]:
    return {"palette": palette(), "ink": [ink(colour) for colour in palette()]}


def _comparison(comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str]) -> dict[str, Any]:
    tables = list(comparison.tables.values())
    scales, places = scales_of(tables), {table.id: k for k, table in enumerate(tables)}
    shown = {"shown": [names[comparison.a], names[comparison.b]], "unasked": NOT_ASKED, "pairs": listing(comparison)}
    lists = [_list(grid, places) for grid in grids if grid.listed]
    return (
        _facts(comparison, "tables")
        | shown
        | {"lists": lists, "tables": [_table(table, scales[table.id]) for table in tables]}
    )


def _list(grid: Grid, places: Mapping[str, int]) -> dict[str, Any]:
    """Return a list's name, its rows and columns, and which table each column is; the tables hold the numbers."""
    of = [places[id_] for id_ in grid.listed]
    return {"id": grid.id, "rows": list(grid.rows), "columns": list(grid.columns), "of": of}


def _table(table: Values, scale: Scale) -> dict[str, Any]:
    errors = None if table.errors is None else plain(table.errors)
    more = {"errors": errors, "without_error": _without_error(table), "margins": _margins(table)}
    return _about_table(table) | more | _drawable(replace(grid_of(table), scale=scale))


def _without_error(table: Values) -> list[list[Any]]:
    """Return each reason why values have no error with their places, or null where it is that of all values."""
    rows, columns = ({name: k for k, name in enumerate(names)} for names in (table.layers_a, table.layers_b))
    found: dict[str, list[list[int]]] = {}
    for (a, b), reason in table.error_reasons.items():
        found.setdefault(reason, []).append([rows[a], columns[b]])
    known = table.values.size - len(table.missing)
    return [[reason, None if len(places) == known else places] for reason, places in found.items()]


def _margins(table: Values) -> list[list[Any] | None]:
    """Return for each row the second best column, and how far it is behind with the standard error of that."""
    matches = table.best_matches()
    found = [matches.get(row) for row in table.layers_a] if table.replicates is not None else []
    return [[m.second, m.margin, m.margin_error] if m and m.margin_error is not None else None for m in found]


def _about_table(table: Values) -> dict[str, Any]:
    """Return what a table says of itself but for its layers and its meaning, which are said elsewhere."""
    about = {"exactness": table.exactness, "statistic": table.statistic, "chunk_sizes": list(table.chunk_sizes)}
    words = {name: value for name, value in plain(table.quantity).items() if name not in MEANING}
    return words | about | {"quantile": student_quantile(len(table.chunk_sizes)) if table.chunk_sizes else None}


def _drawable(grid: Grid, unasked: str = NOT_ASKED) -> dict[str, Any]:
    # that a pair was not asked for is said of hundreds of them; the page says it once
    missing = [[i, j, reason] for (i, j), reason in grid.missing.items() if reason != unasked]
    return {"values": plain(grid.values), "missing": missing, "best": _best(grid), "scale": _scale(grid.scale)}


def _scale(scale: Scale) -> dict[str, Any]:
    return {"low": scale.low, "high": scale.high, "open_ended": scale.open_ended, "words": list(scale.words)}


def _best(grid: Grid) -> list[int | None]:
    return [grid.best.get(i) for i in range(len(grid.rows))]


def _summary(grid: Grid, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    places, models = {(c.a, c.b): k for k, c in enumerate(comparisons)}, grid.models or grid.rows
    opens = [[places.get((a, b), places.get((b, a))) for b in models] for a in models]
    about = {
        "id": grid.id,
        "models": list(grid.rows),
        "labels": shortened(grid.rows),
        "higher_is_closer": grid.scale.higher_is_closer,
    }
    errors = None if grid.errors is None else plain(grid.errors)
    counts = None if grid.counts is None else grid.counts.tolist()
    kind = {"sides": "tasks" if grid.models else "models", "unasked": grid.elsewhere, "counts": counts}
    return about | kind | {"opens": opens, "errors": errors} | _drawable(grid, grid.elsewhere)
