"""The lines of the layers: each against its own final state over the steps, coloured by depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from netkin.reporting.axes import Axis
from netkin.reporting.colours import depths, level
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.origins import plain_table
from netkin.reporting.scales import Scale
from netkin.reporting.step_axis import StepAxis, brief_count
from netkin.reporting.wording import number, shortened
from netkin.results import Series, Values

SIDE = 1000  # units of the drawing, which is stretched to the width at hand
# styles that a notebook needs in place, where no style sheet is
FILLS = "position:absolute;inset:0;width:100%;height:100%;overflow:visible"
STROKE = {"fill": "none", "stroke": "currentColor", "stroke_linejoin": "round", "stroke_linecap": "round",
          "stroke_width": 1.8, "vector_effect": "non-scaling-stroke"}  # fmt: skip
TICK = "position:absolute;font-size:12px;line-height:1;white-space:nowrap"


def layer_lines(series: Series, measure: str, axis: StepAxis) -> Markup | None:
    """Return the chart of a measure with its key and its numbers, or None where no layer has a final state."""
    own, table = series.own(measure), series.table(measure)
    if not np.isfinite(own).any():
        return None
    scale = zoomed(table, own)
    colours = [f"var(--d{level(k, own.shape[1])})" for k in range(own.shape[1])]
    drawn, now = drawing(own, scale, axis, colours), tag("span", class_="now", aria_hidden="true")
    field = tag("div", drawn, *tick_names(scale, axis), now, class_="field", **_attributes(series, measure))
    kind = "logarithmic" if axis.logarithmic else "linear"
    below = tag("p", f"{series.unit} ({kind} axis) →", class_="axis")
    word = "similarity to its final state" if table.higher_is_closer else "distance from its final state, closer is up"
    readout = tag("p", "Point at a line, or reach it by Tab and use the arrow keys.", class_="readout")
    return tag("div", tag("p", f"↑ {measure}: each layer's {word}", class_="axis"), tag("div", field, class_="plot"),
               below, tag("div", readout, role="status", aria_live="polite"), _key(series), _numbers(series, own),
               class_="card ways", data_lines=series.measures.index(measure))  # fmt: skip


def zoomed(table: Values, own: np.ndarray) -> Scale:
    """Return the scale of a measure without the far part that no layer enters, in tenths.

    The lines of layers that are close throughout would else all lie on one another.
    """
    whole = Scale.of(table, own)
    if not np.isfinite(own).any():
        return whole
    least = math.floor(10 * float(np.nanmin(whole.closeness(own))) + 1e-9) / 10
    cut = min(least, 0.9) * (whole.high - whole.low)
    if whole.higher_is_closer:
        return Scale(whole.low + cut, whole.high, True, whole.open_ended)
    return Scale(whole.low, whole.high - cut, False, whole.open_ended)


def depth_rules() -> str:
    """Return the style rules of the layers' colours on light and dark pages, and on paper."""
    light, dark = (_variables(depths(page)) for page in ("light", "dark"))
    system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    paper = f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}"
    return f":root{{{light}}}{system}:root[data-theme=dark]{{{dark}}}{paper}"


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--d{i}:{colour};" for i, colour in enumerate(colours))


def _attributes(series: Series, measure: str) -> dict[str, str]:
    way = f"left and right go through the {series.unit}s, up and down through the layers"
    return {"role": "group", "aria_label": f"{measure} of each layer with its own final state; the arrow keys {way}"}


def drawing(own: np.ndarray, scale: Scale, axis: StepAxis, colours: Sequence[str]) -> Markup:
    """Return the lines alone, in a drawing that is stretched to the size of its place."""
    heights = (1 - scale.closeness(own)) * SIDE
    places = [place * SIDE for place in axis.places]
    lines = [
        tag("path", d=_path(places, column), class_="way", style=f"color:{colour}", **STROKE)
        for column, colour in zip(heights.T, colours, strict=True)
    ]
    rules = [_rule(float(1 - scale.closeness(np.array(tick)))) for tick in _ticks(scale)]
    view = {"viewBox": f"0 0 {SIDE} {SIDE}", "preserveAspectRatio": "none", "style": FILLS}
    return tag("svg", *rules, *lines, aria_hidden="true", **view)


def _path(places: Sequence[float], heights: np.ndarray) -> str:
    """Return a line that is broken where a value is missing; a value alone becomes a dot."""
    pieces, drawing = [], False
    for x, y in zip(places, heights.tolist(), strict=True):
        if math.isfinite(y):
            pieces.append(f"{'L' if drawing else 'M'}{x:.4g} {y:.4g}" + ("" if drawing else "h0"))
        drawing = math.isfinite(y)
    return "".join(pieces)


def _ticks(scale: Scale) -> list[float]:
    return Axis(scale.low, scale.high).ticks() if scale.high > scale.low else [scale.low]


def _rule(place: float) -> Markup:
    y = f"{place * SIDE:.4g}"
    return tag("line", x1=0, x2=SIDE, y1=y, y2=y, stroke="#8886", vector_effect="non-scaling-stroke")


def tick_names(scale: Scale, axis: StepAxis) -> Iterator[Markup]:
    """Name values and steps beside the drawing, as text that is not stretched with it."""
    for value in _ticks(scale):
        place = 100 * (1 - float(scale.closeness(np.array(value))))
        style = f"{TICK};right:calc(100% + 8px);transform:translateY(-50%);top:{place:.4g}%"
        yield tag("span", f"{value:g}", class_="tick", style=style, aria_hidden="true")
    for step in axis.ticks():
        place = 100 * axis.place(step)
        style = f"{TICK};top:calc(100% + 8px);transform:translateX(-50%);left:{place:.4g}%"
        yield tag("span", brief_count(step), class_="tick", style=style, aria_hidden="true")


def _key(series: Series) -> Markup:
    """Return the layers with their colours, as buttons that bring a line to the front."""
    labels, count = shortened(series.layers, 16), len(series.layers)
    items = [
        tag("li", _key_button(k, f"var(--d{level(k, count)})", layer, labels[k]))
        for k, layer in enumerate(series.layers)
    ]
    longest = max(map(len, labels), default=0)
    note = tag("span", "Layers from the first to the last:", class_="note")
    return joined(note, tag("ul", *items, class_="key layers", style=f"--name:{longest}"))


def _key_button(place: int, colour: str, layer: str, label: str) -> Markup:
    whole = None if label == layer else layer
    swatch = tag("span", class_="swatch", style=f"background:{colour}")
    return tag("button", swatch, name(label), type="button", data_layer=place, aria_pressed="false", title=whole)


def _numbers(series: Series, own: np.ndarray) -> Markup:
    rows = [
        [f"{step:,}", *(number(value) if math.isfinite(value) else "–" for value in line)]
        for step, line in zip(series.steps, own.tolist(), strict=True)
    ]
    table = plain_table([series.unit, *series.layers], rows, kind="numbers", label="Each layer at each step")
    return tag("details", tag("summary", "The same as a table"), table)
