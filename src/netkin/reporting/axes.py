"""The axes of charts: where a value stands between two ends, and which round numbers are written beside.

The axis of training steps is linear or logarithmic, as parts them more evenly, with a place for step 0 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers; in logarithms, powers of ten stand at equal distances."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where `value` stands, from 0 at the low end to 1 at the high end.

        Example:
            >>> Axis(0, 10).place(2.5), Axis(1, 100, logarithmic=True).place(10)
            (0.25, 0.5)
        """
        low, high, value = (math.log10(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return the round numbers on the axis.

        Example:
            >>> Axis(0, 1).ticks(), Axis(1, 200, logarithmic=True).ticks()
            ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 10.0, 100.0])
        """
        return self._powers() if self.logarithmic else _multiples(self.low, self.high, _step(self.high - self.low))

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
    power = 10.0 ** math.floor(math.log10(length / count))
    return next(factor * power for factor in ROUND if factor * power * count >= length * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, last + 1)]


@dataclass(frozen=True)
class StepAxis:
    """Where the steps of a series stand, between 0 and 1."""

    steps: tuple[int, ...]
    logarithmic: bool

    @classmethod
    def of(cls, steps: Sequence[int]) -> StepAxis:
        """Return the axis on which the steps stand more evenly.

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
        """Where the steps stand."""
        return [self.place(step) for step in self.steps]

    @property
    def least(self) -> int:
        """The smallest step above 0: on a logarithmic axis that begins with step 0, it is added to every step."""
        return next((step for step in self.steps if step > 0), 1)

    def place(self, step: float) -> float:
        """Return where any step stands: 0 for the first, 1 for the last.

        Example:
            >>> StepAxis((0, 100, 400), logarithmic=False).place(100)
            0.25
        """
        low, high = self._height(self.steps[0]), self._height(self.steps[-1])
        return (self._height(step) - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[int]:
        """Return the steps to be named, far enough from each other to be read.

        Example:
            >>> StepAxis((0, 10, 100, 1000), logarithmic=True).ticks(), StepAxis((0, 400), logarithmic=False).ticks()
            ([0, 10, 100, 1000], [0, 100, 200, 300, 400])
        """
        low, high = self.steps[0], self.steps[-1]
        if low == high:
            return [low]
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
