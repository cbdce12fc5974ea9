"""The layers of a run: each against its own final state over the steps, coloured by depth, and when they settle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.axes import Axis, StepAxis, brief_count
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.origins import plain_table
from netkin.reporting.scales import Scale, depths, level
from netkin.reporting.wording import number, shortened
from netkin.results import Series, Trend, Values

SIDE = 1000  # units of the drawing, which is stretched to the width at hand
# styles that a notebook needs in place, where no style sheet is
FILLS = "position:absolute;inset:0;width:100%;height:100%;overflow:visible"
STROKE = {"fill": "none", "stroke": "currentColor", "stroke_linejoin": "round", "stroke_linecap": "round",
          "stroke_width": 1.8, "vector_effect": "non-scaling-stroke"}  # fmt: skip
TICK = "position:absolute;font-size:12px;line-height:1;white-space:nowrap"
CHANCE = 0.05  # an order that chance brings about more often only leans one way
LATE = "–"


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


def settling(series: Series, measure: str) -> Markup:
    """Return the table of the steps at which layers reach 0.9, 0.99 and 0.999, and the order among them in words."""
    title = tag("h3", "When each layer settles")
    marks = series.marks(measure)
    if not marks:
        why = f"{measure} is no similarity that ends at 1, so there is no mark to reach."
        ask = f"`series.reached(threshold, {measure!r})` tells the {series.unit}s for a threshold of yours."
        return tag("div", title, tag("p", f"{why} {ask}"), class_="card settling")
    found = [series.reached(threshold, measure) for threshold in marks]
    rows = [[name(layer), *(_step(one[layer]) for one in found)] for layer in series.layers]
    head = ["layer", *(f"{threshold} from {series.unit}" for threshold in marks)]
    orders = [tag("li", order_in_words(series, threshold, measure)) for threshold in marks]
    late = any(step is None for one in found for step in one.values())
    note = tag("p", f"{LATE}  not before the last {series.unit}", class_="note") if late else None
    table = plain_table(head, rows, kind="numbers")
    return tag("div", title, tag("p", _settling_rule(series, measure)), table, note, tag("h3", "From the bottom up?"),
               tag("p", _scale_of_tau()), tag("ul", *orders), class_="card settling")  # fmt: skip


def order_in_words(series: Series, threshold: float, measure: str) -> Markup:
    """Return whether lower layers settle first, as a verdict, a number with its error, and counted pairs."""
    start = f"At {threshold}: "
    try:
        trend = series.bottom_up(threshold, measure)
    except NoValue as reason:
        return joined(tag("strong", f"{start}no order."), f" {_sentence(str(reason))}")
    late = f" {trend.never} of {trend.layers} layers get there only at the end, and count as equally late."
    return joined(
        tag("strong", f"{start}{verdict(trend)}, τ = {tau(trend)}."),
        f" {_pairs(series, threshold, measure)} {_chance(trend)}",
        late if trend.never else None,
    )


def verdict(trend: Trend) -> str:
    """Return which way the order runs; where chance may well have made it, that it leans that way at most."""
    if is_unclear(trend):
        return "no clear order"
    way = "bottom-up" if trend.tau > 0 else "top-down"
    return way if trend.p <= CHANCE else f"leaning {way}"


def is_unclear(trend: Trend) -> bool:
    """Tell whether τ is 0 or no farther from it than its own error, and chance would do as much."""
    return not trend.tau or (trend.p > CHANCE and abs(trend.tau) <= (trend.error or 0))


def tau(trend: Trend) -> str:
    """Return τ with its standard error."""
    return f"{trend.tau:.2f}" + ("" if trend.error is None else f" ± {trend.error:.2f}")


def series_headline(series: Series) -> str:
    """Return the one sentence that says what was found: in which order the layers settle."""
    if not series.layers:
        count = len(series.comparisons[-1].layers_a)
        steps = f"{len(series)} {series.unit}s"
        return f"{count} layers at {steps}, none of which the final checkpoint has under the same name."
    final = f"each with its final state at {series.unit} {series.final_step:,}"
    general = f"{len(series.layers)} layers at {len(series)} {series.unit}s, {final}"
    for threshold, measure in [(mark, m) for m in series.measures for mark in series.marks(m)]:
        try:
            return f"{general}. {_found(series, series.bottom_up(threshold, measure), threshold, measure)}"
        except NoValue:  # all layers get there together: the next mark may tell them apart
            continue
    return f"{general}."


def _found(series: Series, trend: Trend, threshold: float, measure: str) -> str:
    way = "from the bottom up" if trend.tau > 0 else "from the top down"
    says = f"settle {way}" if trend.p <= CHANCE else f"lean to settling {way}, which may be chance"
    says = "settle in no clear order of depth" if is_unclear(trend) else says
    reached = f"the {series.unit} at which they reach {threshold}"
    return f"By {measure}, layers {says}: Kendall's τ between depth and {reached} is {tau(trend)}."


def _settling_rule(series: Series, measure: str) -> str:
    return (
        f"The first {series.unit} from which on the {measure} of a layer with its own final state stays at the mark or "
        f"above. The last {series.unit} does not count: there every layer equals itself."
    )


def _scale_of_tau() -> str:
    return (
        "Kendall's τ says how far the order of settling follows depth: 1 if every layer settles after all layers below "
        "it, 0 if depth tells nothing, −1 if the top layers come first. After ± stands its standard error, from "
        "leaving out one layer at a time."
    )


def _pairs(series: Series, threshold: float, measure: str) -> str:
    """Count the pairs of layers in which the lower one settles first, a question anyone can check by hand."""
    steps = [math.inf if step is None else step for step in series.reached(threshold, measure).values()]
    apart = [(low, high) for low, high in combinations(steps, 2) if low != high]
    first = sum(low < high for low, high in apart)
    pairs = f"{first:,} of the {len(apart):,} pairs of layers that settle at different {series.unit}s"
    return f"In {pairs} the lower one comes first."


def _chance(trend: Trend) -> str:
    share = f"in {trend.p:.2g} of all cases" if trend.p >= 1e-4 else "in fewer than 1 of 10,000 cases"
    doubt = "" if trend.p <= CHANCE else ", so it may be no more than that"
    return f"Chance alone would bring a τ as far from 0 {share}{doubt}."


def _step(step: int | None) -> str:
    return LATE if step is None else f"{step:,}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
