"""What spectra cost: the views and blocks of a study, the bytes of their transforms and the multiply-adds."""

from __future__ import annotations

import math

from netkin.statistics.collector import Key, LayerSize, Study
from netkin.statistics.frequencies import Grid, common_grid

CHUNK = 256  # examples transformed at a time, at most
CACHED = 2**19  # numbers of one layer transformed at a time on a CPU: what its caches hold


def views(study: Study) -> list[tuple[LayerSize, Grid]]:
    """Return every layer on every grid on which it meets others."""
    found: dict[tuple[Key, Grid], None] = {}
    for left, right in study.rectangles:
        grid = common_grid(study.layers[left[0]].space, study.layers[right[0]].space)
        found |= {(key, grid or study.layers[key].space): None for key in (*left, *right)}
    return [(study.layers[key], grid) for key, grid in found]


def crosses(study: Study) -> list[tuple[list[int], list[int], int]]:
    """Return of every rectangle the widths of its blocks on both sides, and how many blocks are summed."""
    found = []
    for left, right in study.rectangles:
        x, y = ([study.layers[key] for key in keys] for keys in (left, right))
        grid = common_grid(x[0].space, y[0].space) or ()
        widths = [[layer.width // math.prod(grid or layer.space) for layer in side] for side in (x, y)]
        found.append((widths[0], widths[1], half(grid)))
    return found


def half(grid: Grid) -> int:
    """Return how many frequencies of a grid are summed: one of each conjugate pair."""
    return math.prod(grid) // 2 + 1


def operations(views: list[tuple[LayerSize, Grid]], crosses: list[tuple[list[int], list[int], int]]) -> int:
    """Count for one example the transforms, and the complex products of every view and every pair."""
    total = sum(4 * count * sum(left) * sum(right) for left, right, count in crosses)
    for layer, grid in views:
        places = math.prod(grid)
        total += int(layer.width * math.log2(places)) + 4 * half(grid) * (layer.width // places) ** 2
    return total


def transform_bytes(study: Study, views: list[tuple[LayerSize, Grid]]) -> int:
    """Return the bytes of what is transformed at a time: with its conjugate, and again side by side for products."""
    largest = max(layer.width for layer, _ in views)
    step = examples_at_once(largest, max(layer.width // math.prod(grid) for layer, grid in views))
    once = all(len(side) == 1 for rectangle in study.rectangles for side in rectangle)
    held = 2 * largest if once else sum(layer.width for layer, _ in views)
    return 8 * step * (2 * largest + 4 * held)


def examples_at_once(largest: int, widest: int) -> int:
    """Return how many maps of at most so many numbers to transform at a time, for blocks of at most such a width.

    Few fit the caches, but blocks far wider than that would be read and written too often.
    """
    return min(max(CACHED // largest, widest // 2, 16), CHUNK)
