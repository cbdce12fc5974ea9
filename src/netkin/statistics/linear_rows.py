"""`LinearRows`: all rows of layers that are wider than the examples are many, read as moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from netkin.memory import size_in_words
from netkin.statistics.collector import (
    Collector,
    Key,
    LayerSize,
    Price,
    Rectangle,
    Study,
    chunk_of,
    keys_of,
    place_of,
)
from netkin.statistics.layer_moments import LayerMoments, LinearSettings
from netkin.statistics.moments import Moments
from netkin.statistics.rows import LayerRows

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearRows(LayerRows):
    """All rows of layers wider than the examples are many, read as moments; they fold into moments when merged."""

    kind = "LinearRows"
    settings_for = LinearSettings.of
    stored = ("rectangles", "precision", *LayerRows.stored)

    def __init__(self, rectangles: Sequence[Rectangle], *, precision: torch.dtype = torch.float64, chunks: int = 0):
        self.rectangles, self.precision = [(list(left), list(right)) for left, right in rectangles], precision
        super().__init__(keys_of(self.rectangles), chunks=chunks)

    @classmethod
    def price(cls, settings: LinearSettings, study: Study) -> Price | None:
        streamed = LayerMoments.price(settings, study)
        if streamed is None:
            return None
        sizes, n = study.sizes, study.examples
        # data that do not tell how many they are begin with one batch, and are watched
        count = n if n is not None else max(layer.examples for layer in sizes)
        product = settings.precision(study).itemsize
        size = sum(_bytes(settings, layer, layer.rows_of(count), product, study.chunks) for layer in sizes)
        if n is None:
            words = f"Rows, as moments would need {size_in_words(streamed.bytes)}; watched, to stay below "
            return Price(size, words + size_in_words(study.limit), "the rows of the first batch", None, 2)
        wide = any(layer.width > layer.rows_of(n) for layer in sizes)
        why = "some layers are wider than that" if wide else f"moments would need {size_in_words(streamed.bytes)}"
        return Price(
            size, f"Rows, all {n:,} examples, as {why}", f"the rows of {'the first ' * study.seen}{n:,} examples",
            cls._operations(study, n), 0 if wide and size < streamed.bytes else 2,
        )  # fmt: skip

    @staticmethod
    def _operations(study: Study, n: int) -> int:
        """Count XᵀX or XXᵀ of every layer, whichever is smaller, and what pairs make of them."""

        def side(layer: LayerSize) -> int:
            return min(layer.width, layer.rows_of(n))

        own = sum(layer.rows_of(n) * layer.width * side(layer) for layer in study.sizes)
        return own + sum(x.rows_of(n) * side(x) * side(y) for x, y in study.pairs())

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        made = cls(study.rectangles, precision=settings.precision(study), chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def serves(self, settings: LinearSettings) -> str:
        return settings.lacking(self.precision, debiased=True)

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        """Return the moments of the layers `a` and `b`, in that order."""
        place_of(self.rectangles, a, b, self.names, "rows")
        return super().pair(a, b, without).moments(self.precision)

    def like(self, other: Collector) -> Collector:
        """Return the moments of these rows, where `other` holds moments."""
        if not isinstance(other, LayerMoments):
            return self
        moments = LayerMoments(self.rectangles, precision=other.precision, debiased=other.debiased, chunks=self.chunks)
        moments.resolutions, layers = self.resolutions, self._layers
        if all(layer.parts for layer in layers.values()):
            self.settle()
            chunks = {name: [chunk_of(part, self.chunks) for part in layer.examples] for name, layer in layers.items()}
            moments._counts += self._counts
            moments._fold({name: layer.parts for name, layer in layers.items()}, chunks)
        return moments

    def merge(self, other: Self) -> Self:
        """Return the rows of both."""
        self._refuse_unlike(other, layers="rectangles", precision="precision")
        return super().merge(other)


def _bytes(settings: LinearSettings, layer: LayerSize, n: int, product: int, chunks: int) -> int:
    """Return the bytes of a layer's rows, and of what is kept of it while its pairs are measured."""
    width, twice = layer.width, 2 if settings.uncentred else 1
    if width <= n:
        sides = twice * n * width + width**2 * (3 if settings.whitens else 1)
    else:
        sides = twice * n * n * (5 if settings.whitens else 3 if settings.rotates else 1)
    return layer.itemsize * n * width * (2 if chunks else 1) + product * sides
