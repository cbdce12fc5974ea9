"""Operations: how many multiply-adds the statistics of a pass take, the models' own aside.

They are counted as the products are written; that a product of a layer with itself needs only half is left aside.
"""

from __future__ import annotations

import math

from netkin.comparing.costs import CAP, Needs, half, spectral_rectangles, views
from netkin.comparing.meeting import Layer, Meeting


def of_statistics(needs: Needs, meeting: Meeting, examples: int, linear: str) -> int:
    """Return the multiply-adds of all statistics for so many examples; `linear` is the plan's choice."""
    total = _of_moments(meeting, examples) if linear == "moments" else 0
    total += _of_rows(meeting, examples) if linear == "rows" else 0
    total += examples * _of_spectra(meeting) if linear == "spectra" else 0
    total += needs.rows * _of_sample(meeting, examples)
    return total + sum(_of_grams(meeting, examples, batch) for batch, _, _ in needs.grams)


def _of_moments(meeting: Meeting, examples: int) -> int:
    """Count XᵀX of every layer and XᵀY of every pair."""
    own = sum(_rows(layer, examples) * layer.width**2 for layer in meeting.layers.values())
    return own + sum(_rows(x, examples) * x.width * y.width for x, y in _pairs(meeting))


def _of_spectra(meeting: Meeting) -> int:
    """Count for one example the transforms, and the complex products of every view and every pair."""
    total = 0
    for layer, grid in views(meeting):
        places = math.prod(grid)
        total += int(layer.width * math.log2(places)) + 4 * half(grid) * (layer.width // places) ** 2
    return total + sum(4 * count * sum(left) * sum(right) for left, right, count in spectral_rectangles(meeting))


def _of_rows(meeting: Meeting, examples: int) -> int:
    """Count XᵀX or XXᵀ of every layer, whichever is smaller, and what pairs make of them."""

    def side(layer: Layer) -> int:
        return min(layer.width, _rows(layer, examples))

    own = sum(_rows(layer, examples) * layer.width * side(layer) for layer in meeting.layers.values())
    return own + sum(_rows(x, examples) * side(x) * side(y) for x, y in _pairs(meeting))


def _of_sample(meeting: Meeting, examples: int) -> int:
    """Count the distances between all rows of the sample, and one product of kernels for each pair."""
    own = sum(min(_rows(layer, examples), CAP) ** 2 * layer.width for layer in meeting.layers.values())
    return own + sum(min(_rows(x, examples), CAP) ** 2 for x, _ in _pairs(meeting))


def _of_grams(meeting: Meeting, examples: int, batch: int) -> int:
    """Count each mini-batch's Gram matrices, and one product of them for each pair."""
    own = sum(_rows(layer, examples) * batch * layer.width for layer in meeting.layers.values())
    return own + sum(_rows(x, examples) * batch for x, _ in _pairs(meeting))


def _rows(layer: Layer, examples: int) -> int:
    return int(examples * layer.rows_per_example)


def _pairs(meeting: Meeting) -> list[tuple[Layer, Layer]]:
    found = meeting.layers
    return [(found[x], found[y]) for left, right in meeting.rectangles for x in left for y in right]
