"""How a measure's values become places on the colour scale, where 1 is always the close or the good end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netkin.reporting.colours import SHADES
from netkin.results import Values
from netkin.results.listings import by_name, is_apart, is_worth

EXPECTED = {"relative_accuracy": (0.0, 1.0)}  # ends that an open scale shows at least, so that colours say how much


@dataclass(frozen=True)
class Scale:
    """The ends of a measure's scale and its direction; `worth` says that its values judge stitches."""

    low: float
    high: float
    higher_is_closer: bool
    open_ended: bool = False
    worth: bool = False

    @classmethod
    def of(cls, table: Values, values: np.ndarray | None = None) -> Scale:
        """Return the scale of a measure: its bounds or, where one is open, the range of the values.

        So it is between tasks of different data too, whose values lie far from the upper bound whatever they are.
        """
        values = table.values if values is None else values
        if all(map(math.isfinite, table.bounds)) and not is_apart(table):
            return cls(*table.bounds, table.higher_is_closer, worth=is_worth(table))
        known = np.concatenate([values[np.isfinite(values)], EXPECTED.get(table.name, ())])
        ends = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        return cls(*ends, table.higher_is_closer, ends != EXPECTED.get(table.name), is_worth(table))

    @property
    def words(self) -> tuple[str, str]:
        """What the far and the close end are called: layers are far or close, stitches are poor or good."""
        return ("poor", "good") if self.worth else ("far", "close")

    @property
    def better(self) -> str:
        """Which way values are closer, or better."""
        return f"{'higher' if self.higher_is_closer else 'lower'} is {'better' if self.worth else 'closer'}"

    @property
    def far(self) -> float:
        """The value at the far end."""
        return self.low if self.higher_is_closer else self.high

    @property
    def close(self) -> float:
        """The value at the close end."""
        return self.high if self.higher_is_closer else self.low

    def closeness(self, values: np.ndarray) -> np.ndarray:
        """Return where the values lie between the far end, 0, and the close end, 1; NaN stays NaN.

        Example:
            >>> Scale(0, 2, higher_is_closer=False).closeness(np.array([0.0, 0.5, 2.0])).tolist()
            [1.0, 0.75, 0.0]
        """
        if self.high <= self.low:  # all values alike
            return np.where(np.isnan(values), np.nan, 0.5)
        place = np.clip((values - self.low) / (self.high - self.low), 0, 1)
        return place if self.higher_is_closer else 1 - place

    def shade_numbers(self, values: np.ndarray) -> np.ndarray:
        """Return the number of each value's shade, and -1 for a hole."""
        place = self.closeness(values)
        return np.where(np.isnan(place), -1, np.rint(np.nan_to_num(place) * (SHADES - 1))).astype(int)


def scales_of(tables: Sequence[Values]) -> dict[str, Scale]:
    """Return the scales of tables by their ids; those of one name share one, so that they can be compared."""
    together = {name: np.concatenate([t.values.ravel() for t in own]) for name, own in by_name(tables).items()}
    return {table.id: Scale.of(table, together[table.name]) for table in tables}
