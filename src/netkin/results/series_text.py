"""A series as plain text that fits a terminal: each layer on its way to its final state, and when it gets there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from netkin.errors import NoValue
from netkin.results.text import HOLE, cells, direction, grid, terminal_width, wrapped

if TYPE_CHECKING:
    from netkin.results.series import Series

LEGEND = "τ: 1 if layers settle from the bottom up, -1 if from the top down; p: how often chance does as much"
CELL = 8  # characters that a step takes at most, as a column


def series_as_text(series: Series) -> str:
    """Return for each measure the layers by steps, and the step at which each layer reaches 0.9, 0.99 and 0.999."""
    width, final = terminal_width(), series.comparisons[-1]
    steps = f"{len(series)} {series.unit}s, {series.steps[0]} to {series.final_step}"
    parts = [wrapped(f"{series.run}: each layer against its own final state at {steps}", width)]
    parts[0] += "\n" + wrapped(f"on {final.data}: {final.examples:,} examples, seed {final.seed}", width)
    for measure in series.measures:
        parts.append("\n".join(_way(series, measure, width)))
        parts.append("\n".join(_arrivals(series, measure, width)))
    parts += [wrapped(f"warning: {warning}", width) for warning in series.warnings]
    return "\n\n".join(part for part in parts if part)


def _way(series: Series, measure: str, width: int) -> Iterator[str]:
    """Yield the layers by as many steps as fit, evenly chosen, the first and the last among them."""
    margin = max(map(len, series.layers), default=0)
    places = _spread(len(series), max((width - margin) // (max(len(str(s)) for s in series) + CELL // 2), 2))
    some = f", {len(places)} of {len(series)} {series.unit}s shown" if len(places) < len(series) else ""
    yield wrapped(f"{measure}: {direction(series.table(measure))}, layers by {series.unit}s{some}", width)
    yield from grid(series.layers, [str(series.steps[i]) for i in places], cells(series.own(measure)[places].T), width)


def _spread(count: int, most: int) -> list[int]:
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def _arrivals(series: Series, measure: str, width: int) -> Iterator[str]:
    """Yield when each layer is there, for a similarity that ends at 1; a distance has no such mark of its own."""
    marks = series.marks(measure)
    if not marks:
        return
    found = [series.reached(threshold, measure) for threshold in marks]
    entries = [[HOLE if one[layer] is None else str(one[layer]) for one in found] for layer in series.layers]
    yield wrapped(f"the {series.unit} from which on a layer stays at or above a similarity", width)
    yield from grid(series.layers, list(map(str, marks)), entries, width)
    if any(HOLE in row for row in entries):
        yield f"{HOLE}  not before the last {series.unit}"
    trends = [f"bottom-up at {threshold}: {_trend(series, threshold, measure)}" for threshold in marks]
    yield from (wrapped(line, width) for line in [*trends, *[LEGEND] * any("τ" in line for line in trends)])


def _trend(series: Series, threshold: float, measure: str) -> str:
    try:
        return str(series.bottom_up(threshold, measure))
    except NoValue as reason:
        return str(reason)
