"""`LinearSettings`: what linear measures need of the sums of layers, and what streamed moments cost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from netkin.memory import is_cuda
from netkin.statistics.collector import CostEstimate, Settings, Study

ON_GPU = 8  # times as many rows wait on a GPU, which is kept busy by few large products


@dataclass(frozen=True)
class LinearSettings(Settings):
    """What the linear measures need: precision, sums, and the memory for reading them."""

    precise: bool = False  # products in float64
    debiased: bool = False  # the debiasing sums
    whitens: bool = False  # each layer is decomposed
    rotates: bool = False  # wide layers are rotated into their row space
    uncentred: bool = False  # layers are looked at about the origin
    unfit_for_spectra: str = ""  # a measure that depends on single features or debiases

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

    @property
    def matrices(self) -> int:
        """How many matrices of the size of a cross moment a pair holds while it is measured."""
        return (6 if self.rotates else 1) + (2 if self.uncentred else 0)


def price_of_moments(settings: LinearSettings, study: Study, fold: int) -> CostEstimate:
    """Return what streamed moments cost, of which `fold` rows wait for a product."""
    extra, n, item = 2 if settings.debiased else 1, study.examples, settings.precision(study).itemsize
    widths = {key: layer.width + extra for key, layer in study.layers.items()}
    blocks = [(sum(widths[x] for x in left), sum(widths[y] for y in right)) for left, right in study.pair_blocks]
    own, twice = sum(layer.width**2 for layer in study.sizes), 2 if settings.uncentred else 1
    sums = 8 * max(study.chunks, 1) * (sum(width**2 for width in widths.values()) + sum(x * y for x, y in blocks))
    widest = max(widths.values(), default=0)
    # whole batches are folded in at once, until some layer has `fold` rows
    most = max((layer.rows for layer in study.sizes), default=1)
    batches = -(-fold * (ON_GPU if is_cuda(study.device) else 1) // most)
    rows = min(batches * most, max((layer.rows_of(n) for layer in study.sizes), default=0) if n else batches * most)
    # columns of all layers, those of one block again side by side, its product, and a layer on its way to its columns
    folding = item * rows * (sum(widths.values()) + max((x + y for x, y in blocks), default=0) + 3 * widest)
    folding += 0 if item == 8 else item * max((x * y for x, y in blocks), default=0)
    pairs, sides = study.read_at_once(lambda x, y: x.width * y.width), twice * own * (3 if settings.whitens else 1)
    reading = 8 * (sides + pairs * settings.matrices + 3 * widest**2)
    decomposing = 8 * twice * (4 * own + pairs) if settings.whitens else 0
    operations = None
    if n is not None:  # XᵀX of every layer and XᵀY of every pair
        operations = sum(layer.rows_of(n) * layer.width**2 for layer in study.sizes)
        operations += sum(x.rows_of(n) * x.width * y.width for x, y in study.pairs())
    waiting = sum(fold * layer.width * layer.itemsize for layer in study.sizes)
    return CostEstimate(
        sums + max(folding, reading, decomposing),
        f"Moments, streamed, products in {settings.precision_name(study)}", "moments", operations, 1,
        ", as they hold any number of examples",
        held=sums + max(waiting, 8 * sides),
    )  # fmt: skip
