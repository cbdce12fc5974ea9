"""The line chart: lines scaled to the available width, with numbered axes, names and error bars.

The drawing is an SVG without a size of its own (strokes do not scale); labels beside it are HTML, so that the same
chart fits a phone and a wide screen. `assets/chart.js` shows the nearest point, zooms, and brings a line to the front.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from netkin.reporting.charts import Chart, Line, chart_of, tick_text
from netkin.reporting.page.document import Markup, name, tag
from netkin.reporting.words import shortened
from netkin.results.claim import Curve

SIDE = 1000  # units of the drawing
KINDS = 8  # colours of lines; they and their dashes repeat after so many
SHAPES = ("round", "square")  # of the dots
LABEL = 0.05  # of the height that a name at a line's end takes
CROWDED = 40  # points in a line, beyond which it has no dots
NARROW = 270  # pixels of a chart on a phone
LETTER = 5.2  # how deep a letter of a slanted name reaches, in pixels
# styles that a notebook needs in place, where no style sheet is
FILLS = "position:absolute;inset:0;width:100%;height:100%;overflow:visible"
STROKE = {"fill": "none", "stroke": "currentColor", "stroke_linejoin": "round", "vector_effect": "non-scaling-stroke"}
TICK = "position:absolute;font-size:12px;line-height:1;white-space:nowrap"


def figure_of_curve(title: str, curve: Curve, note: str = "") -> Markup | None:
    """Return a curve as a figure with its title, its key and its chart; None where it holds no value at all."""
    chart = chart_of(title, curve)
    if chart is None:
        return None
    words = tag("p", tag("strong", title), f" · {note}" if note else None, class_="facts-line")
    return tag("figure", words, key(chart.lines), line_chart(chart), class_="curve")


def line_chart(chart: Chart, labels: bool = False, upwards: str = "") -> Markup:
    """Return the chart; with `labels`, lines have their names at their ends; `upwards` names the axis of the values."""
    words = f"{chart.title}; the arrow keys go from point to point, + and − zoom"
    facts = {"x": [round(x, 4) for x in chart.lefts], "names": chart.names, "up": [chart.up.low, chart.up.high]}
    facts |= {"across": chart.across, "lines": [_facts(k, chart) for k in range(len(chart.lines))]}
    over = list(end_labels(chart)) if labels else []
    field = tag("div", drawing(chart), *tick_names(chart), *over, class_="field", role="group", aria_label=words,
                data_chart=json.dumps(facts, ensure_ascii=False, separators=(",", ":")))  # fmt: skip
    plot = tag("div", field, class_="plot labelled" if labels else "plot")
    return beside_axes(chart, plot, upwards, max(map(len, _short_names(chart)), default=0) if labels else 0)


def beside_axes(chart: Chart, plot: Markup, upwards: str, names: int = 0) -> Markup:
    """Return a drawing with the names of its axes and room for the longest of the `names` at the lines' ends."""
    depth = round(24 + LETTER * max(len(short) for _, short, _ in chart.ticks())) if _is_slanted(chart) else 26
    up = tag("p", f"↑ {upwards}", class_="axis") if upwards else None
    below = tag("p", f"{chart.axis_name} →", class_="axis")
    return tag("div", up, plot, below, class_="chart", style=f"--depth:{depth}px;--names:{names}")


def _facts(k: int, chart: Chart) -> dict[str, object]:
    """Return what the script must know of a line: its name, its values and their errors, if there are any."""
    line = chart.lines[k]
    found = {"name": line.name, "aside": round(chart.aside(k), 4), "values": _rounded(line.values)}
    return found | {"errors": _rounded(line.errors)} if any(line.errors) else found


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def drawing(chart: Chart) -> Markup:
    """Return the lines alone, in a drawing that is stretched to the size of its place."""
    lefts, dots = chart.lefts, len(chart.places) <= CROWDED
    beside = [[(x + chart.aside(k)) * SIDE for x in lefts] for k in range(len(chart.lines))]
    lines = [_line(k, line, chart, beside[k], dots) for k, line in enumerate(chart.lines)]
    return stretched(chart, lines)


def stretched(chart: Chart, parts: Sequence[Markup]) -> Markup:
    """Return a drawing of 1000 × 1000 units, stretched to the size of its place, with rules at the numbers upwards."""
    rules = [_rule(1 - chart.up.place(tick)) for tick in chart.up.ticks()]
    view = {"viewBox": f"0 0 {SIDE} {SIDE}", "preserveAspectRatio": "none", "style": FILLS}
    return tag("svg", *rules, *parts, aria_hidden="true", focusable="false", **view)


def _line(kind: int, line: Line, chart: Chart, lefts: Sequence[float], dots: bool) -> Markup:
    heights = [None if value is None else (1 - chart.up.place(value)) * SIDE for value in line.values]
    given = len(lefts) - line.given
    last = max((k for k in range(given) if heights[k] is not None), default=0)
    free, fixed = [y if k < given else None for k, y in enumerate(heights)], heights[last:] if line.given else []
    parts = [tag("path", d=_path(lefts, free), class_="way", stroke_width=1.8, **STROKE)]
    if fixed:
        parts.append(
            tag("path", d=_path(lefts[last:], fixed), class_="given", stroke_width=1.2, opacity=0.35, **STROKE)
        )
    parts += [_whisker(lefts[k], *(1 - chart.up.place(end) for end in bar)) for k, bar in _bars(line)]
    kind = kind if line.kind is None else line.kind
    points = "".join(f"M{_units(x)} {_units(y)}h0" for x, y in zip(lefts, free, strict=True) if y is not None)
    if dots and points:
        parts.append(tag("path", d=points, class_="dots", stroke_width=7, stroke_linecap=shape(kind), **STROKE))
    style = f"color:{line.colour}" if line.colour else None
    return tag("g", *parts, class_=f"line k{kind % KINDS}" if not line.colour else "line", style=style)


def _bars(line: Line) -> Iterator[tuple[int, tuple[float, float]]]:
    for k in range(len(line.values)):
        bar = line.bar(k)
        if bar is not None:
            yield k, bar


def _whisker(x: float, low: float, high: float) -> Markup:
    path = f"M{_units(x)} {_units(low * SIDE)}V{_units(high * SIDE)}"
    return tag("path", d=path, class_="whisker", stroke_width=1.4, opacity=0.75, **STROKE)


def shape(kind: int) -> str:
    """Return the shape of a line's dots; where colours begin again it changes, so that lines can be distinguished."""
    return SHAPES[(kind + kind // KINDS) % 2]


def _path(lefts: Sequence[float], heights: Sequence[float | None]) -> str:
    """Return a line that is broken where a value is missing."""
    pieces, drawn = [], False
    for x, y in zip(lefts, heights, strict=True):
        if y is not None:
            pieces.append(f"{'L' if drawn else 'M'}{_units(x)} {_units(y)}")
        drawn = y is not None
    return "".join(pieces)


def _units(length: float) -> str:
    return f"{round(length, 1) + 0.0:g}"


def _rule(place: float) -> Markup:
    y = _units(place * SIDE)
    return tag("line", x1=0, x2=SIDE, y1=y, y2=y, class_="rule", stroke="#8886", vector_effect="non-scaling-stroke")


def tick_names(chart: Chart) -> Iterator[Markup]:
    """Yield the numbers and names beside the drawing, as text that is not stretched with it."""
    for value in chart.up.ticks():
        style = f"{TICK};right:calc(100% + 8px);transform:translateY(-50%);top:{100 * (1 - chart.up.place(value)):.4g}%"
        yield tag("span", tick_text(value), class_="tick", style=style, aria_hidden="true")
    slanted = "transform:rotate(-38deg);transform-origin:100% 0;right:calc(100% - {at:.4g}% - 4px)"
    upright = "transform:translateX(-50%);left:{at:.4g}%"
    ticks, turned = chart.ticks(), _is_slanted(chart)
    for k, (place, short, full) in enumerate(ticks):
        where = (slanted if turned else upright).format(at=100 * place)
        kind = (
            "tick across second" if k % 2 and len(ticks) > 6 else "tick across"
        )  # left out where there is little room
        style = f"{TICK};top:calc(100% + 8px);{where}"
        yield tag("span", short, class_=kind, style=style, aria_hidden="true", title=full if full != short else None)


def _is_slanted(chart: Chart) -> bool:
    """Return whether names below a chart are slanted: where they would not fit side by side on a phone."""
    widest = max((len(short) for _, short, _ in chart.ticks()), default=0)
    return chart.along is None and (8 * widest + 6) * len(chart.places) > NARROW


def end_labels(chart: Chart) -> Iterator[Markup]:
    """Yield the lines' names at the height of their last free values, moved apart; of very many lines, some."""
    ends = [_last(line, chart) for line in chart.lines]
    known = [k for k, y in enumerate(ends) if y is not None]
    chosen = known[:: -(-len(known) // int(1 / LABEL))] if known else []
    short = _short_names(chart)
    for k, y in zip(*_apart(chosen, [ends[k] or 0.0 for k in chosen]), strict=True):
        style = f"{TICK};left:calc(100% + 8px);transform:translateY(-50%);top:{100 * y:.4g}%;color:{_colour(chart, k)}"
        yield tag("span", name(short[k]), class_="end", style=style, data_line=k, aria_hidden="true")


def _short_names(chart: Chart) -> list[str]:
    return shortened([line.name for line in chart.lines], 16)


def _colour(chart: Chart, k: int) -> str:
    line = chart.lines[k]
    return line.colour or f"var(--k{(k if line.kind is None else line.kind) % KINDS})"


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


def key(lines: Sequence[Line], shorter: bool = False) -> Markup:
    """Return the lines' names with a sample of each, as buttons that bring a line to the front."""
    labels = shortened([line.name for line in lines], 16) if shorter else [line.name for line in lines]
    items = [tag("li", _button(k, line, label)) for k, (line, label) in enumerate(zip(lines, labels, strict=True))]
    return tag("ul", *items, class_="key", style=f"--name:{max(map(len, labels), default=0)}")


def _button(number: int, line: Line, label: str) -> Markup:
    kind = number if line.kind is None else line.kind
    sample = [
        tag("path", d="M0 8H28", class_="way", stroke_width=1.8, **STROKE),
        tag("path", d="M14 8h0", class_="dots", stroke_width=7, stroke_linecap=shape(kind), **STROKE),
    ]
    style, own = (f"color:{line.colour}", "line") if line.colour else (None, f"line k{kind % KINDS}")
    drawn = tag("svg", tag("g", *sample, class_=own, style=style), viewBox="0 0 28 16", aria_hidden="true")
    whole = None if label == line.name else line.name
    return tag("button", drawn, name(label), type="button", data_line=number, aria_pressed="false", title=whole)
