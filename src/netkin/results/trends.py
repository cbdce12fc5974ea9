"""Bottom-up convergence as a number: Kendall's rank correlation of layers' depth and their step of convergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from netkin.errors import NoValue

THRESHOLDS = (0.9, 0.99, 0.999)  # of a similarity to the final state


@dataclass(frozen=True)
class Trend:
    """Kendall's τ-b between depth and step: 1 if layers settle from the bottom up, -1 if from the top down.

    `error` is its standard error by the jackknife over layers (None below three layers); `p` the probability of a τ at
    least as far from 0 if layers settled in random order, exact also with ties. Of the `layers` counted, `never` did
    not reach the threshold before the last step; all that is known of them is that they are later, so they tie there.
    """

    tau: float
    error: float | None
    p: float
    layers: int
    never: int

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2f}"
        never = f", {self.never} of them never before the end" if self.never else ""
        return f"τ = {self.tau:.2f}{error}, p = {self.p:.2g} ({self.layers} layers{never})"


def trend(steps: Sequence[float], never: int = 0) -> Trend:
    """Return the trend of layers that are done at `steps`, the lowest layer first.

    Example:
        >>> print(trend([100, 200, 200, 500]))
        τ = 0.91 ± 0.16, p = 0.17 (4 layers)
    """
    if len(set(steps)) < 2:
        layers = f"{len(steps)} {'layer' if len(steps) == 1 else 'layers'}"
        late = never and never == len(steps)
        which = (
            "of which none reaches the threshold before the end"
            if late
            else ("that reach the threshold at the same step")
        )
        raise NoValue(
            f"there is no order among {layers} {which}; choose another threshold, or compare more checkpoints."
        )
    return Trend(kendall(steps), _jackknife(steps), _p(steps), len(steps), never)


def kendall(steps: Sequence[float]) -> float:
    """Return Kendall's τ-b of `steps` against their places, 0 where all are the same.

    Example:
        >>> kendall([1, 2, 3]), kendall([3, 2, 1]), kendall([5, 5, 5])
        (1.0, -1.0, 0.0)
    """
    score, untied, pairs = _score(steps), _untied(steps), len(steps) * (len(steps) - 1) // 2
    if not untied:
        return 0.0
    root = isqrt(untied * pairs)
    # a whole root keeps a perfect order at exactly 1
    return score / root if root * root == untied * pairs else float(score / np.sqrt(float(untied * pairs)))


def _score(steps: Sequence[float]) -> int:
    """Return the number of pairs in order less the number of pairs out of order."""
    values = np.asarray(steps)
    return int(np.triu(np.sign(values[None, :] - values[:, None])).sum())


def _untied(steps: Sequence[float]) -> int:
    n, tied = len(steps), sum(count * (count - 1) // 2 for count in Counter(steps).values())
    return n * (n - 1) // 2 - tied


def _jackknife(steps: Sequence[float]) -> float | None:
    """Return the standard error from leaving each layer out in turn; a rest without any order counts as 0."""
    n = len(steps)
    if n < 3:
        return None
    left = np.array([kendall([*steps[:i], *steps[i + 1 :]]) for i in range(n)])
    return float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))


def _p(steps: Sequence[float]) -> float:
    """Return the share of all orders of `steps` whose score lies as far from 0 as theirs.

    The orders of a multiset by their number of inversions are counted by the Gaussian multinomial coefficient
    Π(1 - qⁱ) / Π Π(1 - qʲ), i up to n and j up to the size of each group of ties (Stanley, Enumerative
    Combinatorics 1, prop. 1.7.1).
    """
    untied, score = _untied(steps), _score(steps)
    counts = np.zeros(untied + 1, dtype=object)
    counts[0] = 1
    for i in range(1, len(steps) + 1):
        counts[i:] = counts[i:] - counts[: max(len(counts) - i, 0)]
    for size in Counter(steps).values():
        for j in range(1, size + 1):
            counts = _divided(counts, j)
    scores = untied - 2 * np.arange(untied + 1)
    return float(counts[np.abs(scores) >= abs(score)].sum() / counts.sum())


def _divided(counts: np.ndarray, j: int) -> np.ndarray:
    """Return the power series `counts` over 1 - qʲ: each term takes up the one `j` places before."""
    padded = np.concatenate([counts, np.zeros(-len(counts) % j, dtype=object)])
    return padded.reshape(-1, j).cumsum(axis=0).ravel()[: len(counts)]
