"""What linear measures need from collectors, and the costs of moments, rows and spectra: bytes and multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from netkin.memory import is_cuda, size_in_words
from netkin.statistics.collector import Key, LayerSize, Price, Settings, Study
from netkin.statistics.frequencies import Grid, common_grid

ON_GPU = 8  # times as many rows wait on a GPU, which is kept busy by few large products
CHUNK = 256  # examples transformed at a time, at most
CACHED = 2**19  # numbers of one layer transformed at a time on a CPU: what its caches hold
WAYS = """shape='pool', pairs='corresponding', resize='average'"""  # out of spectra that are too large


@dataclass(frozen=True)
class LinearSettings(Settings):
    """What the linear measures need: precision, sums, and the memory for reading them."""

    precise: bool = False  # products in float64
    debiased: bool = False  # the debiasing sums
    whitens: bool = False  # each layer is decomposed
    rotates: bool = False  # wide layers are rotated into their row space
    uncentred: bool = False  # layers are looked at about the origin
    unfit_for_spectra: str = ""  # a measure that depends on single units or debiases

    @classmethod
    def of(cls, measure: Any) -> LinearSettings:
        facts = measure.facts
        unfit = "rotation" not in facts.unchanged_by or facts.debiases
        return cls(
            facts.precise, facts.debiases, facts.whitens, facts.precise and not facts.debiases,
            "translation" not in facts.unchanged_by, measure.name if unfit else "",
        )  # fmt: skip

    def joined(self, other: LinearSettings) -> LinearSettings:
        both = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return LinearSettings(*(mine or theirs for mine, theirs in both))

    def precision(self, study: Study) -> torch.dtype:
        """Return the precision of the products: never less than the data's own."""
        return torch.float64 if self.precise or study.doubles else torch.float32

    def precision_name(self, study: Study) -> str:
        return str(self.precision(study)).removeprefix("torch.")

    def lacking(self, precision: torch.dtype, debiased: bool) -> str:
        """Return what a collector with such products and sums lacks; empty if nothing."""
        lacks = ["products in float64"] if self.precise and precision != torch.float64 else []
        lacks += ["the debiasing sums"] if self.debiased and not debiased else []
        return " and ".join(lacks)


def price_of_moments(settings: LinearSettings, study: Study, fold: int) -> Price:
    """Return what streamed moments cost, of which `fold` rows wait for a product."""
    extra, n, item = 2 if settings.debiased else 1, study.examples, settings.precision(study).itemsize
    widths = {key: layer.width + extra for key, layer in study.layers.items()}
    blocks = [(sum(widths[x] for x in left), sum(widths[y] for y in right)) for left, right in study.rectangles]
    own, twice = sum(layer.width**2 for layer in study.sizes), 2 if settings.uncentred else 1
    sums = 8 * max(study.chunks, 1) * (sum(width**2 for width in widths.values()) + sum(x * y for x, y in blocks))
    widest = max(widths.values(), default=0)
    rows = max(map(_rows_together(study, fold * (ON_GPU if is_cuda(study.device) else 1)), study.sizes), default=0)
    # columns of all layers, those of one block again side by side, its product, and a layer on its way to its columns
    folding = item * rows * (sum(widths.values()) + max((x + y for x, y in blocks), default=0) + 3 * widest)
    folding += 0 if item == 8 else item * max((x * y for x, y in blocks), default=0)
    pairs, sides = study.read_at_once(lambda x, y: x.width * y.width), twice * own * (3 if settings.whitens else 1)
    reading = 8 * (sides + pairs * _matrices(settings) + 3 * widest**2)
    decomposing = 8 * twice * (4 * own + pairs) if settings.whitens else 0
    operations = None
    if n is not None:  # XᵀX of every layer and XᵀY of every pair
        operations = sum(layer.rows_of(n) * layer.width**2 for layer in study.sizes)
        operations += sum(x.rows_of(n) * x.width * y.width for x, y in study.pairs())
    waiting = sum(fold * layer.width * layer.itemsize for layer in study.sizes)
    return Price(
        sums + max(folding, reading, decomposing),
        f"Moments, streamed, products in {settings.precision_name(study)}", "moments", operations, 1,
        ", as they hold any number of examples",
        held=sums + max(waiting, 8 * sides),
    )  # fmt: skip


def _matrices(settings: LinearSettings) -> int:
    """Return how many matrices of the size of a cross moment a pair holds while it is measured."""
    return (6 if settings.rotates else 1) + (2 if settings.uncentred else 0)


def _rows_together(study: Study, fold: int) -> Callable[[LayerSize], int]:
    """Return how many rows of a layer are folded in at once: whole batches, until some layer has `fold` rows."""
    batches = -(-fold // max((layer.rows for layer in study.sizes), default=1))
    every = study.examples
    return lambda layer: min(batches * layer.rows, layer.rows_of(every) if every else batches * layer.rows)


def price_of_rows(settings: LinearSettings, study: Study, streamed: Price) -> Price:
    """Return what all rows cost, where moments would take the price `streamed`."""
    sizes, n = study.sizes, study.examples
    # data of unknown length begin with one batch, and are monitored
    count = n if n is not None else max(layer.examples for layer in sizes)
    item = settings.precision(study).itemsize
    held = sum(_bytes(settings, layer, layer.rows_of(count), item, study.chunks) for layer in sizes)
    smaller = {layer.key: min(layer.width, layer.rows_of(count)) for layer in sizes}  # of XᵀX and XXᵀ
    pairs = item * study.read_at_once(lambda x, y: smaller[x.key] * smaller[y.key]) * _matrices(settings)
    # rows in another precision and about their mean, and the parts of a product
    passing = max(2 * item * layer.rows_of(count) * layer.width + 24 * smaller[layer.key] ** 2 for layer in sizes)
    size = held + pairs + passing
    if n is None:
        words = f"Rows, as moments would need {size_in_words(streamed.bytes)}; watched, to stay below "
        return Price(size, words + size_in_words(study.limit), "the rows of the first batch", None, 2)
    wide = any(layer.width > layer.rows_of(n) for layer in sizes)
    why = "some layers are wider than that" if wide else f"moments would need {size_in_words(streamed.bytes)}"
    operations = sum(layer.rows_of(n) * layer.width * smaller[layer.key] for layer in sizes)
    operations += sum(x.rows_of(n) * smaller[x.key] * smaller[y.key] for x, y in study.pairs())
    return Price(
        size, f"Rows, all {n:,} examples, as {why}", f"the rows of {'the first ' * study.seen}{n:,} examples",
        operations, 0 if wide and held < streamed.held else 2,
    )  # fmt: skip


def _bytes(settings: LinearSettings, layer: LayerSize, n: int, item: int, chunks: int) -> int:
    """Return the bytes of a layer's rows, and of what is kept of it while its pairs are measured."""
    width, twice = layer.width, 2 if settings.uncentred else 1
    if width <= n:
        sides = twice * n * width + width**2 * (3 if settings.whitens else 1)
    else:
        sides = twice * n * n * (5 if settings.whitens else 3 if settings.rotates else 1)
    return layer.itemsize * n * width * (2 if chunks else 1) + item * sides


def price_of_spectra(settings: LinearSettings, study: Study, fold: int, sample: int) -> Price:
    """Return what streamed spectra cost, of which `fold` maps wait to be transformed and `sample` are kept."""
    seen, cross = views(study), sum(_cross_entries(x, y) for x, y in study.pairs())
    own = sum(half(grid) * (layer.width // math.prod(grid)) ** 2 for layer, grid in seen)
    sides = 2 * own * (3 if settings.whitens else 1)
    pairs = 2 * study.read_at_once(_cross_entries) * _matrices(settings)
    maps = sum(layer.width * layer.itemsize for layer in study.sizes)
    reading = fold * maps + transform_bytes(study, seen)
    total = 16 * max(study.chunks, 1) * (own + cross) + 2 * sample * maps + max(reading, 16 * (sides + pairs))
    # of one example the transforms, and the complex products of every view and every pair
    each = 4 * (own + cross) + sum(int(layer.width * math.log2(math.prod(grid))) for layer, grid in seen)
    return Price(
        total, f"Spectra, streamed, products in {settings.precision_name(study)}", "spectra",
        None if study.examples is None else study.examples * each,
        why=", as they hold any number of examples", ways=WAYS,
    )  # fmt: skip


def _cross_entries(x: LayerSize, y: LayerSize) -> int:
    """Return the entries of a cross moment, of which one of each conjugate pair of blocks is summed."""
    grid = common_grid(x.space, y.space) or ()
    widths = [layer.width // math.prod(grid or layer.space) for layer in (x, y)]
    return half(grid) * widths[0] * widths[1]


def views(study: Study) -> list[tuple[LayerSize, Grid]]:
    """Return every layer on every grid on which it is compared."""
    found: dict[tuple[Key, Grid], None] = {}
    for left, right in study.rectangles:
        grid = common_grid(study.layers[left[0]].space, study.layers[right[0]].space)
        found |= {(key, grid or study.layers[key].space): None for key in (*left, *right)}
    return [(study.layers[key], grid) for key, grid in found]


def half(grid: Grid) -> int:
    """Return how many frequencies of a grid are summed: one of each conjugate pair."""
    return math.prod(grid) // 2 + 1


def transform_bytes(study: Study, views: list[tuple[LayerSize, Grid]]) -> int:
    """Return the bytes of what is transformed at a time: the steps of a layer, its conjugate, and both side by side."""
    largest = max(layer.width for layer, _ in views)
    step = examples_at_once(largest, max(layer.width // math.prod(grid) for layer, grid in views))
    once = all(len(side) == 1 for rectangle in study.rectangles for side in rectangle)
    held = 2 * largest if once else sum(layer.width for layer, _ in views)
    return 8 * step * (5 * largest + 4 * held)


def examples_at_once(largest: int, widest: int) -> int:
    """Return how many maps of at most so many numbers to transform at a time, for blocks of at most such a width.

    Few fit the caches, but blocks far wider than that would be read and written too often.
    """
    return min(max(CACHED // largest, widest // 2, 16), CHUNK)
