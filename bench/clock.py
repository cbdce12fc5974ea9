"""Timing: work and floor alternate in one process, and the median of the ratios of neighbours is the figure."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long `work` takes once."""
    start = clock()
    work()
    return clock() - start


def ratio(
    work: Callable[[], Any],
    floor: Callable[[], Any],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the best times of both, taken in turn, and the median of their ratios: a busy moment slows both alike."""
    floor()
    times = [(seconds(floor, clock), seconds(work, clock)) for _ in range(repeats)]
    best_floor, best_work = (min(column) for column in zip(*times, strict=True))
    middle = median(later / earlier for earlier, later in times)
    return {"floor_seconds": best_floor, "seconds": best_work, "ratio": middle}


def peak_megabytes() -> float:
    """Return the most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
