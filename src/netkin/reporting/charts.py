"""The content of a line chart: named lines over numbers, training steps or names; and its axes.

The axis of training steps is linear or logarithmic, whichever spaces them more evenly, and includes step 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from netkin.reporting.grids import Scale, level, scales_of, zoomed
from netkin.reporting.words import shortened
from netkin.results import Comparison, Series, Values
from netkin.results.labels import column_label, is_score, pair_label, partners

ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
ERROR = " ±"  # ends the name of a list that holds errors
NAMED = 18  # names along an axis at most, which are slanted there
FEW = 8  # steps that are named one by one

Ends = tuple[float, float]
Curve = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Line:
    """A named line: a value above each place of the x axis, None where there is none, with standard errors or without.

    `ends` are those of the bars; by default a standard error to both sides. The last `given` values are so by
    construction. Its colour is that of a layer's `depth`, or of its `kind`, by default its number among the lines. What
    lies below a line that is `filled` is a band; one that is `dotted` has its points alone.
    """

    name: str
    values: Sequence[float | None]
    errors: Sequence[float | None] = ()
    ends: Sequence[Ends | None] = ()
    depth: int | None = None  # of `depths`
    kind: int | None = None
    given: int = 0
    filled: bool = False
    dotted: bool = False

    def bar(self, k: int) -> Ends | None:
        """Return the ends of the bar at place `k`, or None."""
        value, error = self.values[k], self.errors[k] if self.errors else None
        if value is None or not error:
            return None
        return self.ends[k] if self.ends else (value - error, value + error)

    @property
    def reach(self) -> list[float]:
        """All values of the line, the ends of its bars among them."""
        bars = [self.bar(k) for k in range(len(self.values))]
        return [value for value in self.values if value is not None] + [end for bar in bars if bar for end in bar]


@dataclass(frozen=True)
class Chart:
    """Lines above an x axis, by numbers, training steps or names; `up` is the axis of their values.

    `title` is its title, `across` the label of the x axis. Of places with names those that are `marked` have theirs
    below the axis, by default all.
    """

    title: str
    across: str
    places: Sequence[Any]
    lines: Sequence[Line]
    up: Axis
    along: Axis | StepAxis | None = None
    marked: Sequence[int] = ()

    @property
    def lefts(self) -> list[float]:
        """The positions, from 0 at the left to 1 at the right."""
        if self.along is None:
            return [(k + 0.5) / len(self.places) for k in range(len(self.places))]
        return [self.along.place(place) for place in self.places]

    def aside(self, k: int) -> float:
        """Return the horizontal offset of line `k`, as a share of the width, so that bars do not hide each other."""
        barred = any(line.bar(place) for line in self.lines for place in range(len(self.places)))
        if self.along is not None or not barred:
            return 0.0
        gap = min(0.012, 1 / len(self.places) / (len(self.lines) + 1))
        return gap * (k - (len(self.lines) - 1) / 2)

    @property
    def names(self) -> list[str]:
        """What the places are called."""
        return [f"{place:,}" if isinstance(place, int) else f"{place:g}" if isinstance(place, float) else str(place)
                for place in self.places]  # fmt: skip

    def ticks(self) -> list[tuple[float, str, str]]:
        """Return the ticks of the x axis: position, short label and full label."""
        if self.along is None:
            marked, lefts = self.marked or range(len(self.places)), self.lefts
            chosen = marked[:: math.ceil(len(marked) / NAMED) or 1]
            short = shortened([self.names[k] for k in (chosen if self.marked else marked)], 16)
            named = short if self.marked else [short[k] for k in chosen]
            return [(lefts[k], text, self.names[k]) for k, text in zip(chosen, named, strict=True)]
        whole = all(isinstance(place, int) for place in self.places)
        ticks = [tick for tick in self.along.ticks() if tick == round(tick) or not whole]
        text: Callable[[Any], str] = brief_count if isinstance(self.along, StepAxis) else tick_text
        return [(self.along.place(tick), text(tick), f"{tick:,g}") for tick in ticks]

    @property
    def axis_name(self) -> str:
        """What the x axis is called."""
        return f"{self.across} (logarithmic)" if getattr(self.along, "logarithmic", False) else self.across


def chart_of(title: str, curve: Curve) -> Chart | None:
    """Return a curve as a chart: its first list is the x axis, the others are lines; None where it holds no value.

    A list ``name ±`` holds the standard errors of ``name``.

    Example:
        >>> chart = chart_of("t", {"k": [1, 2], "kept": [0.5, 0.9], "kept ±": [0.1, None]})
        >>> [(line.name, line.values, line.errors) for line in chart.lines]
        [('kept', [0.5, 0.9], [0.1, None])]
    """
    (across, places), *rest = curve.items()
    lists: Mapping[str, Sequence[Any]] = dict(rest)
    errors = {name.removesuffix(ERROR): own for name, own in lists.items() if name.endswith(ERROR)}
    names = [name for name in lists if not (name.endswith(ERROR) and name.removesuffix(ERROR) in lists)]
    lines = [Line(name, lists[name], errors.get(name, ())) for name in names]
    reach = [value for line in lines for value in line.reach]
    named = any(not isinstance(place, (int, float)) for place in places)
    if not reach:
        return None
    return Chart(title, across, places, lines, axis_up(reach), None if named else axis_across(places))


def profile_charts(comparison: Comparison, tables: Sequence[Values]) -> list[Chart]:
    """Return charts of corresponding layers, from the first to the last; none where none correspond.

    Measures on one scale share a chart. Of stitches each score has its own, with one colour for each method.
    """
    (pairs, _), tables = partners(comparison), sorted(tables, key=lambda table: not is_score(table))  # scores first
    labels = [pair_label(tables, comparison.layers_a[i], comparison.layers_b[j]) for i, j in pairs]
    scales, named = (
        scales_of(tables),
        {table.id: column_label(table) if is_score(table) else table.id for table in tables},
    )
    kinds, found = list(dict.fromkeys(named.values())), dict[object, list[Values]]()
    for table in tables if pairs else ():
        found.setdefault(table.quantity.name if is_score(table) else scales[table.id], []).append(table)
    charts = []
    for own in found.values():
        scale = scales[own[0].id]
        lines = [_profile_line(table, pairs, named[table.id], kinds.index(named[table.id])) for table in own]
        what = (
            own[0].quantity.name
            if scale.is_score or len(own) == 1
            else f"{'similarity' if scale.higher_is_closer else 'distance'}"
        )
        charts.append(Chart(f"{what} ({scale.better})", "layer", labels, lines, _reaching(scale, lines)))
    return charts


def _reaching(scale: Scale, lines: Sequence[Line]) -> Axis:
    """Return the axis of a scale, made longer where values or the bars of errors go beyond its ends."""
    reach = [value for line in lines for value in line.reach]
    low, high = min(scale.low, *reach, scale.high), max(scale.high, *reach, scale.low)
    return Axis(low, high) if scale.higher_is_closer else Axis(high, low)


def _profile_line(table: Values, pairs: Sequence[tuple[int, int]], name: str, kind: int) -> Line:
    low, high = table.interval()
    values, errors, lows, highs = (
        [float(array[pair]) if math.isfinite(array[pair]) else None for pair in pairs]
        for array in (table.values, table.to_errors(), low, high)
    )
    ends = [None if u is None or v is None else (u, v) for u, v in zip(lows, highs, strict=True)]
    return Line(name, values, errors, ends, kind=kind)


def series_chart(series: Series, measure: str) -> Chart | None:
    """Return each layer's way to its final state, coloured from the first to the last; None without any value.

    The scale leaves out the far part that no layer enters. The value at the final step is so by construction.
    """
    own, errors, table = series.own(measure), own_errors(series, measure), series.table(measure)
    if not np.isfinite(own).any():
        return None
    scale, given = zoomed(table, own), int(len(series) > 1 and series.steps[-1] == series.final_step)
    lines = [
        Line(layer, _known(own[:, k]), _known(errors[:, k]), depth=level(k, own.shape[1]), given=given)
        for k, layer in enumerate(series.layers)
    ]
    title = f"{measure} of each layer with its own final state"
    return Chart(title, series.unit, series.steps, lines, Axis(scale.far, scale.close), StepAxis.of(series.steps))


def own_errors(series: Series, measure: str) -> np.ndarray:
    """Return the standard errors of `Series.own`, steps × layers; NaN where there are none."""
    tables = [comparison.tables[measure] for comparison in series.comparisons]
    places = [(tables[-1].layers_a.index(layer), tables[-1].layers_b.index(layer)) for layer in series.layers]
    return np.array([[table.to_errors()[place] for place in places] for table in tables]).reshape(len(tables), -1)


def _known(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers from its first end to its last, which may be the smaller one.

    In logarithms, powers of ten have equal distances.
    """

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of `value`, from 0 at the low end to 1 at the high end.

        Example:
            >>> Axis(0, 10).place(2.5), Axis(1, 100, logarithmic=True).place(10), Axis(2, 0).place(0.5)
            (0.25, 0.5, 0.75)
        """
        if self.logarithmic:  # zero lies at the lower end
            value = max(value, min(self.low, self.high))
        low, high, value = (math.log10(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return (value - low) / (high - low) if high != low else 0.5

    def ticks(self, count: int = 5) -> list[float]:
        """Return the round numbers on the axis, which divide it into at most about `count` parts.

        Example:
            >>> Axis(0, 1).ticks(), Axis(1, 200, logarithmic=True).ticks(), Axis(0, 0.7).ticks(2)
            ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 10.0, 100.0], [0.0, 0.5])
        """
        low, high = sorted((self.low, self.high))
        if low == high:
            return [low]
        return self._powers() if self.logarithmic else _multiples(low, high, _step(high - low, count))

    def _powers(self) -> list[float]:
        ends = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        powers = [10.0**k for k in range(ends[0], ends[1] + 1)]
        finer = [factor * 10.0**k for k in range(ends[0] - 1, ends[1] + 1) for factor in (1, 2, 5)]
        return powers if len(powers) > 2 else [x for x in finer if self.low <= x <= self.high]


def axis_across(values: Sequence[float]) -> Axis:
    """Return the axis of the x values: in logarithms where that parts them more evenly."""
    low, high = min(values), max(values)
    if low == high:
        return Axis(low - 0.5, high + 0.5)
    logarithmic = 0 < 10 * low <= high and _narrowest([math.log10(x) for x in values]) > 2 * _narrowest(values)
    return Axis(low, high, logarithmic)


def axis_up(values: Sequence[float]) -> Axis:
    """Return the axis of the y values, from one round number to another; 0 to 1 where most of that is used."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1 and high - low > 0.4:
        return Axis(0, 1)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = _step(high - low)
    return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def tick_text(value: float) -> str:
    """Return a tick's number in few letters.

    Example:
        >>> tick_text(0.25), tick_text(20000.0), tick_text(2e6)
        ('0.25', '20,000', '2e6')
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.6g}"


def _narrowest(values: Sequence[float]) -> float:
    """Return the smallest distance between neighbours, as a share of the whole."""
    ordered = sorted(set(values))
    return min(b - a for a, b in pairwise(ordered)) / (ordered[-1] - ordered[0])


def _step(length: float, count: int = 5) -> float:
    power = 10.0 ** max(-300, math.floor(math.log10(length) - math.log10(count)))  # of the smallest numbers too
    return next(factor * power for factor in ROUND if factor * power * count >= length * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, last + 1)]


@dataclass(frozen=True)
class StepAxis:
    """The positions of a series' steps, between 0 and 1."""

    steps: tuple[int, ...]
    logarithmic: bool

    @classmethod
    def of(cls, steps: Sequence[int]) -> StepAxis:
        """Return the axis on which the steps are spaced more evenly.

        Example:
            >>> StepAxis.of([0, 10, 100, 1000]).logarithmic, StepAxis.of([0, 100, 200, 300]).logarithmic
            (True, False)
        """
        linear, logarithmic = (cls(tuple(steps), kind) for kind in (False, True))
        if len(steps) < 3 or steps[0] < 0:
            return linear
        return linear if linear.unevenness <= logarithmic.unevenness else logarithmic

    @property
    def unevenness(self) -> float:
        """How much the gaps between steps differ, in units of their mean."""
        gaps = np.diff(self.places)
        return float(gaps.std() / gaps.mean())

    @property
    def places(self) -> list[float]:
        """The positions of the steps."""
        return [self.place(step) for step in self.steps]

    @property
    def least(self) -> int:
        """The smallest step above 0: on a logarithmic axis that begins with step 0, it is added to every step."""
        return next((step for step in self.steps if step > 0), 1)

    def place(self, step: float) -> float:
        """Return the position of any step: 0 for the first, 1 for the last.

        Example:
            >>> StepAxis((0, 100, 400), logarithmic=False).place(100)
            0.25
        """
        low, high = self._height(self.steps[0]), self._height(self.steps[-1])
        return (self._height(step) - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[int]:
        """Return the steps to be named, far enough from each other to be read; where they are few, those of the series.

        Example:
            >>> StepAxis((0, 10, 100, 1000), logarithmic=True).ticks(), StepAxis((0, 400), logarithmic=False).ticks()
            ([0, 10, 100, 1000], [0, 100, 200, 300, 400])
        """
        low, high = self.steps[0], self.steps[-1]
        if low == high:
            return [low]
        if 2 < len(self.steps) <= FEW:
            return self._apart(self.steps)
        if self.logarithmic:
            inside = [round(tick) for tick in Axis(self.least, high, logarithmic=True).ticks()]
            return self._apart([low, *(tick for tick in inside if tick > low)])
        return [round(tick) for tick in Axis(low, high).ticks() if tick == round(tick)]

    def _apart(self, ticks: Sequence[int], least: float = 0.09) -> list[int]:
        kept: list[int] = []
        for tick in ticks:
            if not kept or self.place(tick) - self.place(kept[-1]) >= least:
                kept.append(tick)
        return kept

    def _height(self, step: float) -> float:
        if not self.logarithmic:
            return float(step)
        return math.log(step + (self.least if self.steps[0] == 0 else 0))


def brief_count(count: int) -> str:
    """Return a number of steps in few letters.

    Example:
        >>> brief_count(900), brief_count(4000), brief_count(12500), brief_count(3_000_000)
        ('900', '4k', '12.5k', '3M')
    """
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return str(count)


def spread(axis: StepAxis, most: int) -> list[int]:
    """Return the numbers of at most `most` steps, spread evenly over the axis, the first and the last among them.

    Example:
        >>> spread(StepAxis(tuple(range(0, 101)), logarithmic=False), 3)
        [0, 50, 100]
    """
    places, count = np.array(axis.places), len(axis.steps)
    if count <= most:
        return list(range(count))
    return sorted({int(np.abs(places - goal).argmin()) for goal in np.linspace(0, 1, most)})
