"""`LinearRows`: all rows of layers that are wider than the examples are many, read as moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from netkin.statistics.collector import (
    Collector,
    Key,
    Price,
    Rectangle,
    Study,
    chunk_of,
    keys_of,
    refuse_unknown,
)
from netkin.statistics.layer_moments import LayerMoments
from netkin.statistics.linear_costs import LinearSettings, price_of_rows
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
        return None if streamed is None else price_of_rows(settings, study, streamed)

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        made = cls(study.rectangles, precision=settings.precision(study), chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def serves(self, settings: LinearSettings) -> str:
        return settings.lacking(self.precision, debiased=True)

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        """Return the moments of the layers `a` and `b`, in that order."""
        refuse_unknown(a, b, self.names, "rows", self.rectangles)
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
            moments.sizes = {name: (layer.parts[0].shape[1],) for name, layer in layers.items()}
            moments._fold({name: list(layer.parts) for name, layer in layers.items()}, chunks)
        return moments

    def merge(self, other: Self) -> Self:
        """Return the rows of both."""
        self._refuse_unlike(other, layers="rectangles", precision="precision")
        return super().merge(other)
