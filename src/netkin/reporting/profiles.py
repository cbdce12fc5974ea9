"""The profile: how close corresponding layers are, from the first to the last, for every measure in one chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from netkin.reporting.grids import grid_of
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.matching import partners
from netkin.reporting.wording import number, shortened
from netkin.results import Comparison, Values

WIDTH, HEIGHT = 960, 236  # of the field of the lines, with its margins above, left and right
LEFT, RIGHT, TOP = 64, 20, 16
LETTER = 4.6  # how deep a letter of a slanted name reaches
KINDS = 8  # colours and marks repeat after so many measures


@dataclass(frozen=True)
class Point:
    """One mark of the chart: where it stands and what it says."""

    x: float
    y: float
    says: str


def profile(comparison: Comparison) -> Markup | None:
    """Return the chart of corresponding layers with its key and its numbers, or None where none correspond."""
    pairs, how = partners(comparison)
    if not pairs or not comparison.tables:
        return None
    labels = [_pair_name(comparison, i, j) for i, j in pairs]
    lines = [_line(table, pairs, labels) for table in comparison.tables.values()]
    chart = tag("div", _chart(comparison, lines, labels), class_="chart")
    words = tag("p", f"Layers of the {how}, from the first to the last. Each measure has its own scale, closer is up.")
    return tag("section", tag("h2", "Profile of corresponding layers"), tag("div", words, _key(comparison), chart,
               _numbers(comparison, pairs, labels), class_="card"), class_="profile")  # fmt: skip


def _pair_name(comparison: Comparison, i: int, j: int) -> str:
    a, b = comparison.layers_a[i], comparison.layers_b[j]
    return a if a == b else f"{a} × {b}"


def _line(table: Values, pairs: Sequence[tuple[int, int]], labels: Sequence[str]) -> list[Point]:
    closeness = grid_of(table).scale.closeness(table.values)
    step = (WIDTH - LEFT - RIGHT) / max(len(pairs) - 1, 1)
    return [
        Point(LEFT + k * step, _height(closeness[i, j]), f"{label}, {table.id}: {number(table.values[i, j])}")
        for k, ((i, j), label) in enumerate(zip(pairs, labels, strict=True))
        if math.isfinite(table.values[i, j])
    ]


def _height(closeness: float) -> float:
    return TOP + (1 - float(closeness)) * (HEIGHT - TOP)


def _chart(comparison: Comparison, lines: Sequence[Sequence[Point]], labels: Sequence[str]) -> Markup:
    drawn = [
        _drawn(k, points, measure) for k, (points, measure) in enumerate(zip(lines, comparison.tables, strict=True))
    ]
    depth = round(HEIGHT + 34 + LETTER * max(map(len, shortened(labels, 16))))
    view, label = f"0 0 {WIDTH} {depth}", "Profile of corresponding layers; the arrow keys go from point to point"
    return tag("svg", *_frame(), *_ticks(labels), *drawn, viewBox=view, role="group", aria_label=label, class_="lines")


def _frame() -> Iterator[Markup]:
    for part, word in ((0.0, "far"), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, "close")):
        y = _height(part)
        yield tag("line", x1=LEFT - 6, x2=WIDTH - RIGHT + 6, y1=y, y2=y, class_="rule")
        yield tag("text", word, x=LEFT - 14, y=y + 4, text_anchor="end")


def _ticks(labels: Sequence[str]) -> Iterator[Markup]:
    """Name the layers below the chart, as many as can be read."""
    step, short = (WIDTH - LEFT - RIGHT) / max(len(labels) - 1, 1), shortened(labels, 16)
    every = math.ceil(16 / step)
    for k in range(0, len(labels), every):
        x, y = LEFT + k * step, HEIGHT + 20
        turned = f"rotate(-38 {x:.1f} {y})"
        yield tag("text", short[k], tag("title", labels[k]), x=f"{x:.1f}", y=y, text_anchor="end", transform=turned)


def _drawn(kind: int, points: Sequence[Point], measure: str) -> Markup:
    path = " ".join(f"{p.x:.1f},{p.y:.1f}" for p in points)
    marks = [_mark(kind, point) for point in points]
    return tag("g", tag("polyline", points=path), *marks, class_=f"line k{kind % KINDS}", data_measure=measure)


def _mark(kind: int, point: Point) -> Markup:
    place = f"translate({point.x:.1f} {point.y:.1f})"
    return tag("path", d=outline(kind), transform=place, role="img", aria_label=point.says, class_="mark")


def outline(kind: int) -> str:
    """Return a circle, square, triangle or diamond, so that lines are told apart without colours."""
    shapes = (
        "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
        "M-4-4h8v8h-8z",
        "M0-5.5l5 9h-10z",
        "M0-5.5l5.5 5.5l-5.5 5.5l-5.5-5.5z",
    )
    return shapes[kind % len(shapes)]


def _key(comparison: Comparison) -> Markup:
    items = []
    for kind, table in enumerate(comparison.tables.values()):
        mark = tag("path", d=outline(kind), transform="translate(14 8)", class_="mark")
        line = tag("polyline", points="0,8 28,8")
        sample = tag(
            "svg", tag("g", line, mark, class_=f"line k{kind % KINDS}"), viewBox="0 0 28 16", aria_hidden="true"
        )
        turned = "" if table.higher_is_closer else " (a distance: lower is up)"
        items.append(tag("li", sample, table.id, turned))
    return tag("ul", *items, class_="key")


def _numbers(comparison: Comparison, pairs: Sequence[tuple[int, int]], labels: Sequence[str]) -> Markup:
    tables = list(comparison.tables.values())
    head = tag("tr", tag("th", "layer", scope="col"), *(tag("th", table.id, scope="col") for table in tables))
    rows = [
        tag("tr", tag("th", name(label), scope="row"), joined(*(tag("td", _number(table, i, j)) for table in tables)))
        for (i, j), label in zip(pairs, labels, strict=True)
    ]
    body = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="plain numbers"), class_="scroll")
    return tag("details", tag("summary", "The same as a table"), body)


def _number(table: Values, i: int, j: int) -> str:
    return number(table.values[i, j]) if math.isfinite(table.values[i, j]) else "–"
