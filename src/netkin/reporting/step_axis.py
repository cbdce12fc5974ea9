"""The axis of training steps: linear or logarithmic, as parts them more evenly, with a place for step 0 too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netkin.reporting.axes import Axis


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
