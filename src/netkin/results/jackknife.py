"""The delete-one-chunk jackknife: standard errors, bias and intervals from values computed without each chunk in turn.

Chunks need not be equal: these are the delete-m_j formulas of Busing, Meijer and van der Leeden, "Delete-m jackknife
for unequal m", Statistics and Computing 9 (1999). With equal chunks they are those of the delete-a-group jackknife.
Everywhere `replicates` has the chunks along its first axis, `value` the shape of the rest, and `sizes` are the
numbers of examples in the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.errors import ShapeError, ValueFault


def standard_error(value: Any, replicates: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the jackknife standard error, NaN where the value or a replicate is missing.

    Example:
        >>> data = np.array([1.0, 2.0, 4.0, 9.0])
        >>> without_one = [np.delete(data, k).mean() for k in range(4)]
        >>> error = standard_error(data.mean(), without_one, [1, 1, 1, 1])
        >>> bool(np.isclose(error, data.std(ddof=1) / 2))  # that of a mean
        True
    """
    value, replicates, shares = _checked(value, replicates, sizes)
    h = 1 / shares  # n / m_j
    pseudo_values = h * value - (h - 1) * replicates
    return np.sqrt(((pseudo_values - _corrected(value, replicates, shares)) ** 2 / (h - 1)).mean(axis=0))


def bias(value: Any, replicates: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the jackknife estimate of how much too large the value is, exact where the bias shrinks as 1/n."""
    value, replicates, shares = _checked(value, replicates, sizes)
    return value - _corrected(value, replicates, shares)


def interval(value: Any, error: Any, chunks: int, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the interval by Student's t with ``chunks - 1`` degrees of freedom."""
    value, reach = np.asarray(value, dtype=float), quantile(chunks, level) * np.asarray(error, dtype=float)
    return value - reach, value + reach


def quantile(chunks: int, level: float = 0.95) -> float:
    """Return how many standard errors an interval reaches to each side.

    Example:
        >>> round(quantile(20), 3)
        2.093
    """
    # SciPy is slow to import, and results without errors need nothing of it
    from scipy.special import stdtrit

    if chunks < 2:
        raise ValueFault(f"an interval needs at least 2 chunks; got {chunks}.")
    if not 0 < level < 1:
        raise ValueFault(f"the level of an interval must lie between 0 and 1, as 0.95; got {level}.")
    return float(stdtrit(chunks - 1, (1 + level) / 2))


def _corrected(value: np.ndarray, replicates: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the jackknife estimate, from which the bias of order 1/n is gone."""
    return len(replicates) * value - ((1 - shares) * replicates).sum(axis=0)


def _checked(value: Any, replicates: Any, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the value, the replicates, and each chunk's share of the examples, which lies along the first axis."""
    value, replicates = np.asarray(value, dtype=float), np.asarray(replicates, dtype=float)
    counts = np.asarray(sizes, dtype=float)
    if replicates.shape != (counts.size, *value.shape):
        raise ShapeError(
            f"replicates of {counts.size} chunks of a value of shape {value.shape} must have shape "
            f"{(counts.size, *value.shape)}; got {replicates.shape}."
        )
    refuse_chunks(sizes)
    return value, replicates, (counts / counts.sum()).reshape(-1, *[1] * value.ndim)


def refuse_chunks(sizes: Sequence[int]) -> None:
    """Refuse fewer than two chunks, and chunks without examples."""
    if len(sizes) < 2:
        raise ValueFault(f"a jackknife needs at least 2 chunks; got {len(sizes)}.")
    if min(sizes) < 1:
        raise ValueFault(f"every chunk needs at least one example; got sizes {', '.join(map(str, sizes))}.")
