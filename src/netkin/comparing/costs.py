"""Costs: how many bytes the statistics of a pass will hold, while reading and while measuring."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from netkin.comparing.meeting import Layer, Meeting
from netkin.comparing.pairing import Rectangle
from netkin.errors import ValueFault
from netkin.measures.registry import Measure
from netkin.statistics import Grams, Moments, Rows
from netkin.statistics.frequencies import Grid, common_grid
from netkin.statistics.layer_moments import FOLD
from netkin.statistics.spectra import FOLD as FOLD_SPECTRA
from netkin.statistics.spectra import SAMPLE, examples_at_once

CAP = 2048  # rows that measures on rows look at: their distance matrices grow with the square
DOUBLE = 8
GramKey = tuple[int, str, float]


@dataclass(frozen=True)
class Needs:
    """What a list of measures must have collected."""

    moments: bool
    rows: int  # how many measures look at rows, each with a kernel matrix of its own
    grams: tuple[GramKey, ...]
    precise: bool  # products in float64
    debiased: bool
    whitens: bool  # each layer is decomposed, and what comes of it is kept
    uncentred: bool  # somebody looks at the layers about the origin
    not_spectral: str = ""  # a measure that can't be read from spectra, if there is one

    @classmethod
    def of(cls, measures: Sequence[Measure]) -> Needs:
        linear = [m.facts for m in measures if m.facts.reads is Moments]
        return cls(
            moments=bool(linear),
            rows=sum(m.facts.reads is Rows for m in measures),
            grams=tuple(dict.fromkeys(gram_key(m) for m in measures if m.facts.reads is Grams)),
            precise=any(facts.precise for facts in linear),
            debiased=any(facts.debiases for facts in linear),
            whitens=any(facts.whitens for facts in linear),
            uncentred=any("translation" not in facts.unchanged_by for facts in linear),
            not_spectral=next((m.name for m in measures if not _from_spectra(m)), ""),
        )

    def refuse_spectral(self) -> None:
        """Refuse measures that spectra can't serve."""
        if self.not_spectral:
            raise ValueFault(
                f"{self.not_spectral!r} can't be read from spectra, which hold moments for each frequency and no rows; "
                "with shape='dft' use linear measures that a rotation leaves unchanged, such as 'cca_mean', 'svcca' or "
                "'cka', or take shape='flatten'."
            )

    def precision(self, layers: Collection[Layer]) -> torch.dtype:
        """Return the precision of the products: never less than the data's own."""
        doubles = any(layer.itemsize == DOUBLE for layer in layers)
        return torch.float64 if self.precise or doubles else torch.float32


def gram_key(measure: Measure) -> GramKey:
    """Return which `LayerGrams` serves a measure: batch size, kernel and width of the kernel."""
    settings = measure.settings
    return settings["batch"], settings["kernel"], settings["fraction"]


def _from_spectra(measure: Measure) -> bool:
    """Tell whether a measure reads moments, and neither single units nor the debiasing sums."""
    facts = measure.facts
    return facts.reads is Moments and "rotation" in facts.unchanged_by and not facts.debiases


def of_spectra(needs: Needs, meeting: Meeting) -> int:
    """Return the bytes of streamed spectra: sums and a sample of maps; while reading the maps that wait and their
    transforms, while measuring the layers' decompositions and the blocks of one pair."""
    sums, pairs = 0, [0]
    for left, right, blocks in spectral_rectangles(meeting):
        sums += blocks * sum(left) * sum(right)
        pairs.append(2 * blocks * max(left) * max(right))
    own = sum(half(grid) * (layer.width // math.prod(grid)) ** 2 for layer, grid in views(meeting))
    sides = 2 * own * (3 if needs.whitens else 1)
    maps = sum(layer.width * layer.itemsize for layer in meeting.layers.values())
    reading = FOLD_SPECTRA * maps + _transforms(meeting)
    return 2 * DOUBLE * (own + sums) + 2 * SAMPLE * maps + max(reading, 2 * DOUBLE * (sides + max(pairs)))


def _transforms(meeting: Meeting) -> int:
    """Return the bytes of what is transformed at a time: with its conjugate, and again side by side for products."""
    seen = views(meeting)
    largest = max(layer.width for layer, _ in seen)
    step = examples_at_once(largest, max(layer.width // math.prod(grid) for layer, grid in seen))
    once = all(len(side) == 1 for rectangle in meeting.rectangles for side in rectangle)
    held = 2 * largest if once else sum(layer.width for layer, _ in seen)
    return DOUBLE * step * (2 * largest + 4 * held)


def views(meeting: Meeting) -> list[tuple[Layer, Grid]]:
    """Return every layer on every grid on which it meets others."""
    found = {
        (key, common_grid(meeting.layers[left[0]].space, meeting.layers[right[0]].space) or meeting.layers[key].space)
        for left, right in meeting.rectangles
        for key in (*left, *right)
    }
    return [(meeting.layers[key], grid) for key, grid in sorted(found)]


def spectral_rectangles(meeting: Meeting) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield of every rectangle the widths of its blocks on both sides, and how many blocks are summed."""
    for left, right in meeting.rectangles:
        x, y = ([meeting.layers[key] for key in keys] for keys in (left, right))
        grid = common_grid(x[0].space, y[0].space) or ()
        widths = [[layer.width // math.prod(grid or layer.space) for layer in side] for side in (x, y)]
        yield widths[0], widths[1], half(grid)


def half(grid: Grid) -> int:
    """Return how many frequencies of a grid are summed: one of each conjugate pair."""
    return math.prod(grid) // 2 + 1


def of_moments(needs: Needs, layers: Collection[Layer], rectangles: Sequence[Rectangle]) -> int:
    """Return the bytes of streamed moments: sums in float64, and rows that wait or the layers' decompositions."""
    extra = 2 if needs.debiased else 1
    widths = {layer.key: layer.width + extra for layer in layers}
    cross = sum(sum(widths[x] for x in left) * sum(widths[y] for y in right) for left, right in rectangles)
    own = sum(width**2 for width in widths.values())
    waiting = sum(FOLD * layer.width * layer.itemsize for layer in layers)
    sides = sum(layer.width**2 for layer in layers) * (3 if needs.whitens else 1)
    return DOUBLE * (own + cross) + max(waiting, DOUBLE * sides)


def of_rows(needs: Needs, layers: Collection[Layer], examples: int) -> int:
    """Return the bytes of all rows, and of what is kept of each layer while its pairs are measured."""
    product = needs.precision(layers).itemsize
    return sum(_of_layer(needs, layer, int(examples * layer.rows_per_example), product) for layer in layers)


def of_sample(needs: Needs, layers: Collection[Layer], examples: int | None) -> int:
    """Return the bytes of a sample of rows, held up to twice its size while reading, and of its kernel matrices."""
    total = 0
    for layer in layers:
        seen = int(examples * layer.rows_per_example) if examples else 2 * CAP
        n = min(seen, CAP)
        centred = n * layer.width if layer.width <= n else 0
        measuring = layer.itemsize * (n * layer.width + centred + n * n) + DOUBLE * needs.rows * n * n
        total += max(layer.itemsize * min(seen, 2 * CAP) * layer.width, measuring)
    return total


def of_grams(key: GramKey, layers: Collection[Layer]) -> int:
    """Return the bytes of one mini-batch's kernel matrices, and of rows that wait where the data's batches differ."""
    batch = key[0]
    waiting = sum((batch + layer.rows) * layer.width * layer.itemsize for layer in layers if layer.rows != batch)
    return len(layers) * batch**2 * DOUBLE + waiting


def _of_layer(needs: Needs, layer: Layer, n: int, product: int) -> int:
    w, twice = layer.width, 2 if needs.uncentred else 1
    if w <= n:
        sides = twice * n * w + w * w * (3 if needs.whitens else 1)
    else:
        sides = twice * n * n * (5 if needs.whitens else 3 if needs.precise else 1)
    return layer.itemsize * n * w + product * sides
