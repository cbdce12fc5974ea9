"""Whether the jackknife serves a value that depends on where spectra are cut; a reason in place of an error if not.

The jackknife moves the data by 1/√K of what another sample would, so that a cut may stand still in all its replicates
and fall elsewhere in the next sample. How likely that is follows from the margin of the cut and the margin's own
jackknife error; how much it matters, from the value at the other cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.measures.cuts import EXCHANGE, Cut
from netkin.results.values import carried_by_one, jackknife_error

JUMPS = 10  # an error that is so many times that of most replicates is made by the others
RARE = 1e-3  # of samples: another cut that is less likely does not change what 95 % of them give
EXCHANGED = (
    "two eigenvalues at the cut are too near to each other: in other samples the next direction would be kept in place "
    "of the last one, which changes the value by more than its error; cut where the spectrum has a gap"
)
RECOUNTED = (
    "other samples would keep one direction more or fewer, which changes the value by more than its error; cut where "
    "the number does not depend on the sample"
)


class CutMargins:
    """The margins of one pair's cut with all chunks, and without each; and the values that other cuts would give."""

    def __init__(self, cut: Cut, pair: Any, chunks: int):
        self.counts, self.others = cut.counts, cut.other_values(pair)
        self.margins, self.replicates = cut.margins(self.counts), np.full((chunks, 2, 3), math.nan)

    def add(self, chunk: int, cut: Cut) -> None:
        """Note the margins of the same cut without a chunk."""
        self.replicates[chunk] = cut.margins(self.counts)

    def reason(self, value: float, error: float, replicates: np.ndarray, sizes: Sequence[int]) -> str:
        """Return why replicates give no error, if by another cut alone the value would spread by more; else "".

        A cut that changes by d in a share p of samples adds the variance p(1 - p) d². Both layers' cuts change together
        as often as the rarer of the two.
        """
        # SciPy is slow to import, and results without errors need nothing of it
        from scipy.special import ndtr

        steady = steady_error(replicates)
        has_examples = [size > 0 for size in sizes]
        errors = jackknife_error(self.margins, self.replicates[has_examples], [size for size in sizes if size])
        known = errors > 0
        chances = np.where(known, ndtr(-self.margins / np.where(known, errors, 1)), 0)  # of a margin below zero
        chances = np.vstack([chances, chances.min(axis=0)])  # of x, of y, of both
        spread = np.sqrt(chances * (1 - chances)) * np.abs(self.others - value)
        doubtful = np.argwhere((chances > RARE) & (spread > (steady if error > JUMPS * steady else error)))
        if not len(doubtful):
            return ""
        return EXCHANGED if EXCHANGE in doubtful[:, 1] else RECOUNTED


def steady_error(replicates: np.ndarray) -> float:
    """Return the standard error by the median deviation of replicates, which a few jumps of the cut do not move.

    The jackknife takes (K - 1)/√K times the spread of its replicates: with jumps, many times the true error.
    """
    count = len(replicates)
    spread = 1.4826 * np.median(np.abs(replicates - np.median(replicates)))  # of normal replicates
    return float(spread * (count - 1) / math.sqrt(count))


def reason_of_one(value: float, replicates: np.ndarray, sizes: Sequence[int]) -> str:
    """Return why replicates give no error, if one chunk has nearly all of it; else ""."""
    if not bool(carried_by_one(value, replicates, sizes)):
        return ""
    return f"one of the {len(sizes)} chunks alone makes most of the error, which then tells nothing of other samples"
