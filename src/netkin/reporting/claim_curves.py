"""Small line charts of a claim's curves, drawn as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netkin.reporting.axes import Axis, axis_across, axis_up, tick_text
from netkin.reporting.markup import Markup, tag
from netkin.reporting.profiles import KINDS, outline
from netkin.reporting.wording import number, shortened
from netkin.results.claim import Curve

WIDTH, HEIGHT = 560, 250  # of the field of the lines, with its margins above, left and right
LEFT, RIGHT, TOP = 62, 20, 12
CROWDED = 40  # points in a line, beyond which marks are small
LETTER = 5.2  # how deep a letter of a slanted name reaches
ERROR = " ±"  # ends the name of a list that holds errors


@dataclass(frozen=True)
class Line:
    """A named line: heights above the places of the x axis, None where there is no value, with errors or without."""

    name: str
    values: Sequence[float | None]
    errors: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """What a curve's lists say: the x axis, by numbers or by names, and the lines above it."""

    across: str
    places: Sequence[Any]
    lines: Sequence[Line]

    @property
    def names(self) -> bool:
        """Whether the x axis holds names rather than numbers."""
        return any(not isinstance(place, (int, float)) for place in self.places)


def figure_of_curve(title: str, curve: Curve, note: str = "") -> Markup | None:
    """Return a curve as a figure with its title, its key and its chart; None where it holds no value at all."""
    chart = chart_of(curve)
    if not any(_heights(chart)):
        return None
    words = tag("p", tag("strong", title), f" · {note}" if note else None, class_="facts-line")
    drawn = tag("div", _drawn(chart, title), class_="chart")
    return tag("figure", words, _key(chart.lines), drawn, class_="curve")


def chart_of(curve: Curve) -> Chart:
    """Return the first list as the x axis and the others as lines; a list ``name ±`` holds the errors of ``name``.

    Example:
        >>> chart_of({"k": [1, 2], "kept": [0.5, 0.9], "kept ±": [0.1, 0.1]}).lines
        [Line(name='kept', values=[0.5, 0.9], errors=[0.1, 0.1])]
    """
    (across, places), *rest = curve.items()
    lists: Mapping[str, Sequence[Any]] = dict(rest)
    errors = {name.removesuffix(ERROR): values for name, values in lists.items() if name.endswith(ERROR)}
    names = [name for name in lists if not (name.endswith(ERROR) and name.removesuffix(ERROR) in lists)]
    none = [None] * len(places)
    return Chart(across, places, [Line(name, lists[name], errors.get(name, none)) for name in names])


def _heights(chart: Chart) -> list[list[float]]:
    """Return for each line the values it reaches, its errors included."""
    return [[y for value, error in _pairs(line) for y in (value - error, value + error)] for line in chart.lines]


def _pairs(line: Line) -> Iterator[tuple[float, float]]:
    for value, error in zip(line.values, line.errors, strict=True):
        if value is not None:
            yield value, error or 0.0


def _drawn(chart: Chart, title: str) -> Markup:
    up = axis_up([y for heights in _heights(chart) for y in heights])
    across = Axis(-0.5, len(chart.places) - 0.5) if chart.names else axis_across(chart.places)
    places = range(len(chart.places)) if chart.names else chart.places
    lefts = [LEFT + across.place(place) * (WIDTH - LEFT - RIGHT) for place in places]
    whole = all(isinstance(place, int) for place in chart.places)
    ticks, depth = _named(chart.places, lefts) if chart.names else _numbered(across, whole)
    label = tag("text", _axis_name(chart, across), x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT + depth, text_anchor="middle")
    lines = [_line(kind, line, chart, lefts, up) for kind, line in enumerate(chart.lines)]
    view = f"0 0 {WIDTH} {round(HEIGHT + depth + 10)}"
    words = f"{title}; the arrow keys go from point to point"
    return tag("svg", *_rules(up), *ticks, label, *lines, viewBox=view, role="group", aria_label=words, class_="lines")


def _axis_name(chart: Chart, across: Axis) -> str:
    return f"{chart.across} (in logarithms)" if across.logarithmic else chart.across


def _height(up: Axis, value: float) -> float:
    return TOP + (1 - up.place(value)) * (HEIGHT - TOP)


def _rules(up: Axis) -> Iterator[Markup]:
    for tick in up.ticks():
        y = round(_height(up, tick), 1)
        yield tag("line", x1=LEFT - 6, x2=WIDTH - RIGHT + 6, y1=y, y2=y, class_="rule")
        yield tag("text", tick_text(tick), x=LEFT - 12, y=y + 4, text_anchor="end")


def _numbered(across: Axis, whole: bool) -> tuple[list[Markup], float]:
    """Return the numbers below the chart, whole ones where all places are, and how deep they reach."""
    texts = []
    for tick in (tick for tick in across.ticks() if tick == round(tick) or not whole):
        x = LEFT + across.place(tick) * (WIDTH - LEFT - RIGHT)
        texts.append(tag("text", tick_text(tick), x=f"{x:.1f}", y=HEIGHT + 18, text_anchor="middle"))
    return texts, 38.0


def _named(names: Sequence[Any], lefts: Sequence[float]) -> tuple[list[Markup], float]:
    """Return the names below the chart, slanted and as many as can be read, and how deep they reach."""
    full = [str(name) for name in names]
    short = shortened(full, 14)
    every = math.ceil(16 * len(full) / (WIDTH - LEFT - RIGHT))
    texts = []
    for k in range(0, len(full), every):
        turned = f"rotate(-38 {lefts[k]:.1f} {HEIGHT + 16})"
        words = [short[k], tag("title", full[k])]
        texts.append(tag("text", *words, x=f"{lefts[k]:.1f}", y=HEIGHT + 16, text_anchor="end", transform=turned))
    return texts, 32 + LETTER * max(map(len, short))


def _line(kind: int, line: Line, chart: Chart, lefts: Sequence[float], up: Axis) -> Markup:
    points = [
        (x, value, error, f"{chart.across} {_place_text(place)}, {line.name}: {_with_error(value, error)}")
        for x, place, value, error in zip(lefts, chart.places, line.values, line.errors, strict=True)
        if value is not None
    ]
    heights = [None if value is None else _height(up, value) for value in line.values]
    parts = [tag("polyline", points=" ".join(part)) for part in _unbroken(lefts, heights)]
    bars = [_bar(x, _height(up, value - error), _height(up, value + error)) for x, value, error, _ in points if error]
    marks = [_mark(kind, x, _height(up, value), says, len(points)) for x, value, _, says in points]
    return tag("g", *parts, *bars, *marks, class_=f"line k{kind % KINDS}")


def _unbroken(lefts: Sequence[float], heights: Sequence[float | None]) -> Iterator[list[str]]:
    """Yield the stretches of a line between its holes."""
    part: list[str] = []
    for x, y in [*zip(lefts, heights, strict=True), (0.0, None)]:
        if y is not None:
            part.append(f"{x:.1f},{y:.1f}")
        elif part:
            yield part
            part = []


def _bar(x: float, low: float, high: float) -> Markup:
    ends = "".join(f"M{x - 3:.1f} {y:.1f}h6" for y in (low, high))
    return tag("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}{ends}", class_="error")


def _mark(kind: int, x: float, y: float, says: str, points: int) -> Markup:
    size = 0.8 if points <= CROWDED else 0.45
    place = f"translate({x:.1f} {y:.1f}) scale({size})"
    return tag("path", d=_shape(kind), transform=place, role="img", aria_label=says, class_="mark")


def _shape(kind: int) -> str:
    # where the colours begin again, the marks go on, so that no two of 32 lines look alike
    return outline(kind + kind // KINDS)


def _key(lines: Sequence[Line]) -> Markup:
    items = []
    for kind, line in enumerate(lines):
        mark = tag("path", d=_shape(kind), transform="translate(14 8)", class_="mark")
        sample = tag("g", tag("polyline", points="0,8 28,8"), mark, class_=f"line k{kind % KINDS}")
        items.append(tag("li", tag("svg", sample, viewBox="0 0 28 16", aria_hidden="true"), line.name))
    return tag("ul", *items, class_="key")


def _place_text(place: Any) -> str:
    return tick_text(place) if isinstance(place, (int, float)) else str(place)


def _with_error(value: float, error: float | None) -> str:
    return number(value) + (f" ± {number(error)}" if error else "")
