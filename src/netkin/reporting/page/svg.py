"""Drawings as SVG: the line chart, and a dendrogram and a 2-d embedding of models.

Lines are scaled to the available width, with numbered axes, names and error bars. The drawing is an SVG without a size
of its own (strokes do not scale); labels beside it are HTML, so that the same chart fits a phone and a wide screen.
`assets/chart.js` shows the nearest point, zooms, and brings a line to the front.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.charts import Axis, Chart, Curve, Line, chart_of, tick_text
from netkin.reporting.page.document import Markup, folded, joined, name, tag
from netkin.reporting.words import shortened
from netkin.results import Comparison, Comparisons, Values
from netkin.results.distances import are_angles, branches_of, distances_of, plane_of, tree_of
from netkin.results.labels import is_of_tasks, is_worth

SIDE = 1000  # units of the drawing
KINDS = 8  # colours of lines; they and their dashes repeat after so many
SHAPES = ("round", "square")  # of the dots
LABEL = 0.05  # of the height that a name at a line's end takes
CROWDED = 40  # points in a line, beyond which it has no dots
NARROW = 270  # pixels of a chart on a phone
LETTER_DEPTH = 5.2  # how deep a letter of a slanted name reaches, in pixels
MOST_NETWORKS = 200  # that a tree can show
ROW, WIDTH, LETTER_WIDTH = 16, 340, 8  # of a tree or plane in pixels; a letter is as wide as on a phone
LINES_AWAY = 4  # lines by which the name of a point may be moved
TREE = "Average linkage of {what}. Groups that join far left have little in common."
PLANE = "Classical multidimensional scaling of the same distances; it keeps {share:.0%} of their squared spread."
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
    depth = round(24 + LETTER_DEPTH * max(len(short) for _, short, _ in chart.ticks())) if _is_slanted(chart) else 26
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


# --- a dendrogram and a 2-d embedding of models -----------------------------------------------------------------------


def maps_by_measure(comparisons: Sequence[Comparison]) -> dict[str, list[Markup]]:
    """Return the maps of models by measure; none where pairs are missing or occur twice, or tasks are compared."""
    pairs = {(one.a, one.b) for one in comparisons}
    tables = [table for one in comparisons for table in one.tables.values()]
    if len(pairs) < max(len(comparisons), 3) or any(is_of_tasks(table) for table in tables):
        return {}
    found = {id_: map_figures(table) for id_, table in Comparisons(comparisons).summaries().tables.items()}
    return {id_: figures for id_, figures in found.items() if figures}


def maps_section(maps: Mapping[str, Sequence[Markup]]) -> Markup | None:
    """Return the maps of the models with their heading, those after the first folded."""
    if not maps:
        return None
    (first, cards), *rest = ((id_, tag("div", *figures, class_="cards")) for id_, figures in maps.items())
    title = tag("h2", f"A map of the models by {first}")
    return joined(title, cards, *(folded(f"The same by {id_}", own) for id_, own in rest))


def map_figures(table: Values) -> list[Markup]:
    """Return the tree and the plane, or nothing where networks are few or many, or some pair has no value."""
    if not 3 <= len(table.layers_a) <= MOST_NETWORKS or is_worth(table):
        return []
    try:
        distances = distances_of(table)
    except NoValue:  # for some pair of networks
        return []
    names, (places, share) = shortened(table.layers_a), plane_of(distances)
    unit = {"radians": "rad", "": table.quantity.name}.get(table.quantity.unit, table.quantity.unit)
    what, unit = (
        (f"angles, arccos of {table.quantity.name}", "rad") if are_angles(table) else (table.quantity.name, unit)
    )
    parts = {
        "Dendrogram": (_tree(distances, names, unit), TREE.format(what=what)),
        "2-d embedding": (_plane(places, names, unit), PLANE.format(share=share)),
    }
    return [
        tag("figure", tag("h3", title), drawing, tag("figcaption", words), class_="card map")
        for title, (drawing, words) in parts.items()
    ]


def _tree(distances: np.ndarray, names: Sequence[str], unit: str) -> Markup:
    branches, leaves = branches_of(tree_of(distances))
    axis, low = Axis(float(branches[:, :, 0].max()) or 1.0, 0), len(names) * ROW
    lines = [
        tag("polyline", points=" ".join(f"{WIDTH * axis.place(x):.1f},{(y + 0.5) * ROW:.1f}" for x, y in line),
            fill="none", stroke="currentColor")
        for line in branches
    ]  # fmt: skip
    labels = [_word(names[leaf], WIDTH + 6, (k + 0.5) * ROW + 4) for k, leaf in enumerate(leaves)]
    base = tag("line", x1=0, x2=WIDTH, y1=low, y2=low, stroke="currentColor", stroke_opacity=0.4)
    numbers = [
        _word(tick_text(tick), WIDTH * axis.place(tick), low + 14, text_anchor="middle") for tick in axis.ticks()
    ]
    room = max(map(len, names)) * LETTER_WIDTH + 12
    drawn = [*lines, *labels, base, *numbers, _word(unit, WIDTH / 2, low + 30, text_anchor="middle")]
    size = f"-12 0 {WIDTH + 12 + room:.0f} {low + 36}"
    return tag("svg", *drawn, viewBox=size, role="img", aria_label="Tree of the networks")


def _word(text: str, x: float, y: float, **how: Any) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", fill="currentColor", font_size=11, **how)


def _plane(places: np.ndarray, names: Sequence[str], unit: str) -> Markup:
    """Return the picture of points in a plane, whose two axes have one scale, in the unit of the distances."""
    middle, span = (places.max(0) + places.min(0)) / 2, float(np.ptp(places, axis=0).max()) or 1.0
    scale = (WIDTH - 60) / span
    tall = max(float(np.ptp(places[:, 1])) * scale + 60, WIDTH / 3)
    shown = (places - middle) * scale * [1, -1] + [WIDTH / 2, tall / 2]
    half = np.array([WIDTH, tall]) / 2 / scale
    frame = _frame(Axis(*(middle[0] + [-half[0], half[0]])), Axis(*(middle[1] + [half[1], -half[1]])), tall, unit)
    dots = [tag("circle", tag("title", name), cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill="currentColor")
            for (x, y), name in zip(shown, names, strict=True)]  # fmt: skip
    few = len(names) <= 4 * math.isqrt(WIDTH)
    aside = label_places([(x, y) for x, y in shown.tolist()], names, LETTER_WIDTH, 14, WIDTH) if few else []
    labels = [
        _word(name, x + 6, y + dy + 4) if dx > 0 else _word(name, x - 6, y + dy + 4, text_anchor="end")
        for (x, y), (dx, dy), name in zip(shown, aside, names, strict=False)
    ]
    ends = [
        (x + dx, x + dx + LETTER_WIDTH * len(name))
        for x, dx, name in zip(shown[:, 0], (d for d, _ in aside), names, strict=False)
    ]
    left, right = max([44, *(4 - low for low, _ in ends)]), max([12, *(high - WIDTH for _, high in ends)])
    leaders = [
        tag("line", x1=f"{x:.1f}", y1=f"{y:.1f}", x2=f"{x + max(dx, -6):.1f}", y2=f"{y + dy:.1f}",
            stroke="currentColor", stroke_opacity=0.4)
        for (x, y), (dx, dy) in zip(shown, aside, strict=False) if dy
    ]  # fmt: skip
    size = f"{-left:.0f} -4 {left + WIDTH + right:.0f} {tall + 40:.0f}"
    return tag("svg", *frame, *leaders, *dots, *labels, viewBox=size, role="img", aria_label="Networks in a plane")


def _frame(across: Axis, down: Axis, tall: float, unit: str) -> list[Markup]:
    """Return the numbered axes of a plane with their lines; both have ticks at one distance."""
    step = float(np.diff(across.ticks()).min())
    if len(_multiples(down, step)) < 2:
        step /= 2
    columns, rows = _multiples(across, step), _multiples(down, step)
    box = tag("rect", x=0, y=0, width=WIDTH, height=f"{tall:.1f}", fill="none", stroke="currentColor",
              stroke_opacity=0.25)  # fmt: skip
    numbers = [_word(tick_text(x), WIDTH * across.place(x), tall + 14, text_anchor="middle") for x in columns]
    numbers += [_word(tick_text(y), -6, tall * down.place(y) + 4, text_anchor="end") for y in rows]
    lines = [(WIDTH * across.place(x), 0.0, WIDTH * across.place(x), tall) for x in columns]
    lines += [(0.0, tall * down.place(y), float(WIDTH), tall * down.place(y)) for y in rows]
    drawn = [
        tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke="currentColor",
            stroke_opacity=0.12)
        for x1, y1, x2, y2 in lines
    ]  # fmt: skip
    return [box, *drawn, *numbers, _word(unit, WIDTH / 2, tall + 30, text_anchor="middle")]


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
    found = []
    for (x, y), label in zip(points, names, strict=True):
        width = letter * len(label)
        rows = sorted(range(-LINES_AWAY, LINES_AWAY + 1), key=lambda k: (abs(k), -k))
        offsets = [(dx, k * line) for k in rows for dx in (6, -6 - width)]
        boxes = [(x + dx, y + dy - line / 2, x + dx + width, y + dy + line / 2) for dx, dy in offsets]
        free = [k for k, box in enumerate(boxes) if not any(_meet(box, other) for other in taken)]
        inside = [k for k in free if boxes[k][0] >= 0 and boxes[k][2] <= wide] if wide < math.inf else free
        best = next(iter(inside or free), 0)
        taken.append(boxes[best])
        found.append(offsets[best])
    return found


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
