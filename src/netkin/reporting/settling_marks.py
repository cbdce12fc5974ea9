"""When layers settle: the step from which on each stays near its final state, and whether lower layers come first."""

from __future__ import annotations

import math
from itertools import combinations

from netkin.errors import NoValue
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.origins import plain_table
from netkin.results import Series, Trend

CHANCE = 0.05  # an order that chance brings about more often only leans one way
LATE = "–"


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
    return tag("div", title, tag("p", _rule(series, measure)), table, note, tag("h3", "From the bottom up?"),
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


def _rule(series: Series, measure: str) -> str:
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
