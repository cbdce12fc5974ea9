"""The profile: how close corresponding layers are, from the first to the last, for every measure in one chart.

Of several comparisons, means and deviations layer by layer, as tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from netkin.errors import NoValue
from netkin.reporting.grids import partners
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.scales import Scale, scales_of
from netkin.reporting.wording import bound, number_with_error, shortened
from netkin.results import Comparison, Spread, Values
from netkin.results.labels import by_name, is_worth, pair_label
from netkin.results.text import has_errors

WIDTH, HEIGHT = 960, 236  # of the field of the lines, with its margins above, left and right
LEFT, RIGHT, TOP = 64, 20, 16
LINE = 14  # from one line of words to the next
LETTER = 4.6  # how deep a letter of a slanted name reaches
KINDS = 8  # colours and marks repeat after so many measures
MEANS = "Mean ± standard deviation over {counted}. Layers that not all models have are left out."


@dataclass(frozen=True)
class Point:
    """One mark of the chart: where it stands and what it says."""

    x: float
    y: float
    says: str
    ends: tuple[float, float] | None = None  # of the interval, lower end first


def profile(comparison: Comparison) -> Markup | None:
    """Return the chart of corresponding layers with its key and its numbers, or None where none correspond."""
    pairs, how = partners(comparison)
    if not pairs or not comparison.tables:
        return None
    tables = list(comparison.tables.values())
    labels = [pair_label(tables, comparison.layers_a[i], comparison.layers_b[j]) for i, j in pairs]
    scales = scales_of(tables)
    apart = _apart(tables, len(pairs))
    lines = [_line(table, scales[table.id], pairs, labels, apart[k]) for k, table in enumerate(tables)]
    ends = _ends(list(scales.values()))
    chart = tag("div", _chart(comparison, lines, labels, ends), class_="chart")
    title = "Profile of corresponding layers" if how else "Profile of the pairs that were compared"
    return tag("section", tag("h2", title), tag("div", tag("p", _words(tables, how, ends)), _key(tables, scales), chart,
               _numbers(comparison, pairs, labels), class_="card"), class_="profile")  # fmt: skip


def _words(tables: Sequence[Values], how: str, ends: tuple[str, str]) -> str:
    which = f"Layers of the {how}, from the first to the last" if how else "Pairs of layers, from the first to the last"
    shared = ", the same for all its methods or parameters" if len(by_name(tables)) < len(tables) else ""
    bars = " Bars are 95 % intervals." if any(map(has_errors, tables)) else ""
    return f"{which}. Each measure has its own scale{shared}; {ends[1]} is up.{bars}"


def _ends(scales: Sequence[Scale]) -> tuple[str, str]:
    """Return what the lower and the upper end of the chart are called by all measures."""
    words = list(dict.fromkeys(scale.words for scale in scales))
    return " or ".join(low for low, _ in words), " or ".join(high for _, high in words)


def _apart(tables: Sequence[Values], count: int) -> list[float]:
    """Return how far to the side each measure's points stand, so that bars do not hide each other."""
    if not any(map(has_errors, tables)):
        return [0.0] * len(tables)
    gap = min(7.0, (WIDTH - LEFT - RIGHT) / max(count - 1, 1) / (len(tables) + 1))
    return [gap * (k - (len(tables) - 1) / 2) for k in range(len(tables))]


def _line(
    table: Values, scale: Scale, pairs: Sequence[tuple[int, int]], labels: Sequence[str], aside: float
) -> list[Point]:
    closeness, ends = scale.closeness(table.values), [scale.closeness(end) for end in table.interval()]
    step, errors = (WIDTH - LEFT - RIGHT) / max(len(pairs) - 1, 1), table.to_errors()
    points = []
    for k, ((i, j), label) in enumerate(zip(pairs, labels, strict=True)):
        if not math.isfinite(table.values[i, j]):
            continue
        says = f"{label}, {table.id}: {number_with_error(table.values[i, j], errors[i, j])}"
        low, high = sorted(_height(end[i, j]) for end in ends)
        bar = (high, low) if math.isfinite(errors[i, j]) and math.isfinite(low) else None
        points.append(Point(LEFT + k * step + aside, _height(closeness[i, j]), says, bar))
    return points


def _height(closeness: float) -> float:
    return TOP + (1 - float(closeness)) * (HEIGHT - TOP)


def _chart(
    comparison: Comparison, lines: Sequence[Sequence[Point]], labels: Sequence[str], ends: tuple[str, str]
) -> Markup:
    drawn = [
        _drawn(k, points, measure) for k, (points, measure) in enumerate(zip(lines, comparison.tables, strict=True))
    ]
    depth = round(HEIGHT + 34 + LETTER * max(map(len, shortened(labels, 16))))
    view, label = f"0 0 {WIDTH} {depth}", "Profile of corresponding layers; the arrow keys go from point to point"
    parts = (*_frame(ends), *_ticks(labels), *drawn)
    return tag("svg", *parts, viewBox=view, role="group", aria_label=label, class_="lines")


def _frame(ends: tuple[str, str]) -> Iterator[Markup]:
    for part, words in ((0.0, ends[0]), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, ends[1])):
        y = _height(part)
        yield tag("line", x1=LEFT - 6, x2=WIDTH - RIGHT + 6, y1=y, y2=y, class_="rule")
        said = words.split(" or ")
        for k, word in enumerate(said):  # into the chart: upwards from the lower end, whose names of layers are near
            y_of = y + 4 + LINE * (k if part else k - len(said) + 1)
            yield tag("text", word, x=LEFT - 14, y=y_of, text_anchor="end")


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
    bars = [_bar(point.x, *point.ends) for point in points if point.ends]
    marks = [_mark(kind, point) for point in points]
    return tag("g", tag("polyline", points=path), *bars, *marks, class_=f"line k{kind % KINDS}", data_measure=measure)


def _bar(x: float, low: float, high: float) -> Markup:
    return tag("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}m-3.5 0h7M{x - 3.5:.1f} {low:.1f}h7", class_="whisker")


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


def _key(tables: Sequence[Values], scales: Mapping[str, Scale]) -> Markup:
    items = []
    for kind, table in enumerate(tables):
        mark = tag("path", d=outline(kind), transform="translate(14 8)", class_="mark")
        line = tag("polyline", points="0,8 28,8")
        sample = tag(
            "svg", tag("g", line, mark, class_=f"line k{kind % KINDS}"), viewBox="0 0 28 16", aria_hidden="true"
        )
        scale = scales[table.id]
        turned = "" if scale.higher_is_closer else f"; {scale.better}, so lower is up"
        ends = tag("span", f" ({bound(scale.low)} to {bound(scale.high)}{turned})", class_="note")
        items.append(tag("li", sample, tag("span", table.id, ends)))
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
    return number_with_error(table.values[i, j], table.to_errors()[i, j])


def spread_section(comparisons: Sequence[Comparison]) -> Markup | None:
    """Return means and deviations over comparisons with stitches, or None where there are none or one alone."""
    if len(comparisons) < 2 or not any(is_worth(t) for c in comparisons for t in c.tables.values()):
        return None
    try:
        spread = Spread.of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = tag("p", MEANS.format(counted=spread.told_count()))
    tables = _listed(spread) if spread.is_profile else _matrices(spread)
    cards = [tag("div", tag("h3", title), tag("div", table, class_="scroll"), class_="card") for title, table in tables]
    return tag(
        "section",
        tag("h2", "Layer by layer, over all pairs of models"),
        words,
        tag("div", *cards, class_="cards"),
        class_="spread",
    )


def _listed(spread: Spread) -> Iterator[tuple[str, Markup]]:
    """Yield for the similarities and each score a table of layers by methods."""
    for word, side_by_side in spread.blocks().items():
        rows = [(spread.label(i, j), [cells.written(i, j) for cells in side_by_side]) for i, j in spread.pairs]
        yield word, _table("layer", [cells.column for cells in side_by_side], rows)


def _matrices(spread: Spread) -> Iterator[tuple[str, Markup]]:
    """Yield for each measure a table of layers by layers."""
    for id_, cells in spread.tables.items():
        places = range(len(spread.layers_b))
        rows = [(a, [cells.written(i, j) for j in places]) for i, a in enumerate(spread.layers_a)]
        yield id_, _table("from ↓ into →", spread.layers_b, rows)


def _table(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Markup:
    head = tag("tr", tag("th", corner, scope="col"), *(tag("th", name(column), scope="col") for column in columns))
    body = [tag("tr", tag("th", name(label), scope="row"), *map(_cell, texts)) for label, texts in rows]
    return tag("table", tag("thead", head), tag("tbody", *body), class_="plain numbers")


def _cell(text: str) -> Markup:
    return tag("td", text)
