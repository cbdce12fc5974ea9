"""Where a measure cuts the spectra of two layers, how near the next cuts are, and what its value would be there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXCHANGE, MORE, FEWER = range(3)  # the next direction in place of the last one kept; one direction more; one fewer


@dataclass(frozen=True, eq=False)
class Cut:
    """The leading principal directions that a measure kept of two layers.

    `spectra` are the eigenvalues of either layer and `kept` the marks of those that were kept, (blocks, r); `weigh`
    gives what a `share` of the spectrum is taken of, which is None where the number of directions is fixed.
    `value_of` returns the measure's value of the pair for other marks; the pair is not held, since it holds this.
    """

    spectra: tuple[Tensor, Tensor]
    kept: tuple[Tensor, Tensor]
    value_of: Callable[[Any, Tensor, Tensor], Tensor]
    share: float | None = None
    weigh: Callable[[Tensor], Tensor] = torch.Tensor.clone

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of directions that were kept."""
        return int(self.kept[0].sum()), int(self.kept[1].sum())

    def margins(self, counts: tuple[int, int]) -> np.ndarray:
        """Return how far these spectra, cut to `counts`, are from each other cut, (2, 3); NaN where there is none.

        The last direction is exchanged where the logarithm of two eigenvalues' ratio passes zero; the number changes
        where the share that is held passes the one that is wanted.
        """
        return np.array([self._margins(values, count) for values, count in zip(self.spectra, counts, strict=True)])

    def _margins(self, spectrum: Tensor, count: int) -> list[float]:
        falling, margins = spectrum.flatten().sort(descending=True).values, [math.nan] * 3
        if count > len(falling):  # of fewer examples than these directions
            return margins
        other = _next(falling, count)
        if other is not None:
            margins[EXCHANGE] = math.log(float(falling[count - 1] / falling[other]))
        if self.share is not None:
            weights = self.weigh(falling)
            held = weights.cumsum(0) / weights.sum()
            if count < int((falling > 0).sum()):
                margins[MORE] = float(held[count - 1]) - self.share
            if count > 1:
                margins[FEWER] = self.share - float(held[count - 2])
        return margins

    def other_values(self, pair: Any) -> np.ndarray:
        """Return the pair's values with the other cuts, (3, 3): of x, of y, and of both; NaN where there is none."""
        x, y = (self._other_marks(*side) for side in zip(self.spectra, self.kept, strict=True))
        values = np.full((3, 3), math.nan)
        for move in range(3):
            for place, (left, right) in enumerate(
                ((x[move], self.kept[1]), (self.kept[0], y[move]), (x[move], y[move]))
            ):
                if left is not None and right is not None:
                    values[place, move] = float(self.value_of(pair, left, right))
        return values

    def _other_marks(self, spectrum: Tensor, kept: Tensor) -> list[Tensor | None]:
        falling, order = spectrum.flatten().sort(descending=True, stable=True)
        count, marks = int(kept.sum()), list[Tensor | None]()
        other = _next(falling, count)
        more = count if self.share is not None and count < int((falling > 0).sum()) else None
        fewer = count - 1 if self.share is not None and count > 1 else None
        for taken, left in ((other, None if other is None else count - 1), (more, None), (None, fewer)):
            changed = kept.flatten().clone()
            for place, mark in ((taken, True), (left, False)):
                if place is not None:
                    changed[order[place]] = mark
            marks.append(None if taken is left is None else changed.reshape(kept.shape))
        return marks


def _next(falling: Tensor, count: int) -> int | None:
    """Return the place of the direction that comes after those kept; an equal one is of a conjugate frequency."""
    others = ((falling[count:] > 0) & (falling[count:] < falling[count - 1])).nonzero().flatten()
    return count + int(others[0]) if len(others) else None
