"""Gathering: what direct matching reads of pairs of layers, summed over batches.

That is the second moment of the first layer, its cross moment with the second, and both means; the second layer's own
second moment is not needed, which saves a third of the work. Maps are multiplied example by example as they lie in
memory, without being turned into rows.

Float32 activations are multiplied in float32, one example's places at a time, and summed over examples in float64. The
first layer is shifted by the mean of some first examples. So an entry errs by about 1e-7 / √examples of the layer's
largest variance, and directions with less than width · 1.2e-7 of that count as none. Float64 activations, and float32
ones so large or small that their squares leave float32, are multiplied in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from netkin.applications.stitching.ends import rows
from netkin.arrays import refuse_non_finite, summing_dtype
from netkin.errors import NoValue, ShapeError, ValueFault
from netkin.statistics import Moments
from netkin.statistics.sides import CovarianceSide

PLACES = 32  # maps with fewer places are turned into rows: products of single examples would be too small
SAMPLE = 512  # rows, or else the maps of eight examples, by which a layer's shift and precision are chosen
SAFE = (1e-12, 1e12)  # sizes whose squares and sums float32 holds


class Gathering:
    """Sums over all batches so far; each batch gives all first layers, then the second ones."""

    def __init__(self, pairs: Iterable[tuple[str, str]]):
        self.pairs = list(dict.fromkeys(pairs))
        self._first: dict[str, _Layer] = {}
        self._second: dict[str, _Layer] = {}
        self._cross: dict[tuple[str, str], Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def first(self, name: str, output: Tensor, mask: Tensor | None = None) -> None:
        """Take the output of a first layer, in the form of the second ones; it is held until the batch is over."""
        layer = self._first.setdefault(name, _Layer(name, centred=True))
        self._held[name] = held = layer.take(laid_out(output, mask))
        layer.own = layer.own + product(held, held)

    def second(self, name: str, output: Tensor, mask: Tensor | None = None) -> None:
        """Take the output of a second layer and multiply it with all first ones that it is paired with."""
        layer = self._second.setdefault(name, _Layer(name, centred=False))
        theirs = layer.take(laid_out(output, mask))
        for pair in self.pairs:
            if pair[1] == name:
                ours = self._held[pair[0]].to(theirs.device)
                _refuse_unpaired(pair, ours, theirs)
                self._cross[pair] = self._cross.get(pair, 0) + product(ours, theirs)

    def batch_is_over(self) -> None:
        """Forget the activations that are held."""
        self._held.clear()

    def moments(self, pair: tuple[str, str]) -> Moments:
        """Return what was gathered of a pair, as direct matching reads it."""
        x, y = self._first[pair[0]], self._second[pair[1]]
        cross = self._cross[pair] - torch.outer(x.total.to(y.total), y.total) / y.n
        return Matching(x.side(y.total.device), Aim(y), cross.unsqueeze(0))


class Aim(CovarianceSide):
    """The second layer of a pair: its mean alone."""

    def __init__(self, layer: _Layer):
        nothing = layer.total.new_empty(1, layer.width, 0)
        super().__init__(
            layer.name, layer.n, layer.mean.unsqueeze(0), nothing,
            scale=1.0, resolution=layer.resolution, rounding=layer.resolution,
        )  # fmt: skip
        self.width = layer.width

    @property
    def second(self) -> Tensor:
        """Refuse: it was not gathered."""
        raise NoValue(f"of {self.name} only the mean was gathered, which is enough for matching and for no measure.")

    @cached_property
    def units(self) -> Tensor:
        return torch.eye(self.width, dtype=self.mean.dtype, device=self.mean.device).unsqueeze(0)


class Matching(Moments):
    """The moments of a pair whose second layer has no second moment."""

    @cached_property
    def uncentred(self) -> Moments:
        """The same pair about the origin."""
        x, y = self.x, self.y
        means = x.mean.unsqueeze(-1)
        second = x.second + x.n * means * means.mT
        about = CovarianceSide(
            x.name, x.n, torch.zeros_like(x.mean), second,
            scale=1.0, resolution=x.resolution, rounding=x.rounding,
        )  # fmt: skip
        aim = Aim.__new__(Aim)
        aim.__dict__.update(y.__dict__ | {"mean": torch.zeros_like(y.mean)})
        return Matching(about, aim, self.cross + x.n * means * y.mean.unsqueeze(-2))


class _Layer:
    """One layer's sums; a centred one is shifted by the mean of some first examples."""

    def __init__(self, name: str, *, centred: bool):
        self.name, self.centred, self.n, self.batches, self.width = name, centred, 0, 0, 0
        self.shift: Tensor | None = None
        self._room: Tensor | None = None
        self.total: Tensor = torch.zeros(())
        self.own: Tensor = torch.zeros(())
        self.resolution, self.dtype = 0.0, torch.float32
        self._sides: dict[torch.device, CovarianceSide] = {}

    def take(self, output: Tensor) -> Tensor:
        """Count one batch and return it shifted, in the precision of the products."""
        if not self.batches:
            self._begin(output)
        output = output.to(self.dtype)
        if self.shift is not None:
            output = self._shifted(output, self.shift)
        total = output.sum(0, dtype=self.total.dtype) if output.ndim == 2 else output.sum(2).sum(0).to(self.total)
        if output.device.type == "cpu" and not bool(torch.isfinite(total).all()):
            refuse_non_finite(output, f"{self.name} in batch {self.batches}")
        self._sides, self.total, self.batches = {}, self.total + total, self.batches + 1
        self.n += output.numel() // self.width
        return output

    def _shifted(self, output: Tensor, shift: Tensor) -> Tensor:
        # into the same memory each time: fresh memory of this size costs as much as the products
        if self._room is None or self._room.shape != output.shape:
            self._room = torch.empty_like(output, memory_format=torch.contiguous_format)
        return torch.sub(output, shift, out=self._room)

    def _begin(self, output: Tensor) -> None:
        """Choose the shift and the precision by some of the first examples; any shift near the mean will do."""
        self.width, self.resolution = output.shape[1], torch.finfo(output.dtype).eps
        double, some = (
            summing_dtype(output.device),
            output[: SAMPLE if output.ndim == 2 else 8].to(summing_dtype(output.device)),
        )
        mean = some.mean((0, 2) if output.ndim == 3 else 0, keepdim=True)[0]
        largest = float((some - mean if self.centred else some).abs().max())
        if output.dtype == torch.float64 or not (largest == 0 or SAFE[0] < largest < SAFE[1]):
            self.dtype = double
        self.shift = mean.to(self.dtype) if self.centred else None
        self.total = torch.zeros(self.width, dtype=double, device=output.device)

    @property
    def mean(self) -> Tensor:
        mean = self.total / self.n
        return mean if self.shift is None else mean + self.shift.flatten().to(mean)

    def side(self, device: torch.device) -> CovarianceSide:
        """Return the layer as the first side of its pairs, which share what it computes."""
        if device not in self._sides:
            self._sides[device] = self._side(device)
        return self._sides[device]

    def _side(self, device: torch.device) -> CovarianceSide:
        second = self.own - torch.outer(self.total, self.total) / self.n
        if not bool(torch.isfinite(second).all()):
            raise ValueFault(f"{self.name} gave NaN or Inf; mend the model or leave out the examples that cause them.")
        return CovarianceSide(
            self.name, self.n, self.mean.to(device).unsqueeze(0), second.to(device).unsqueeze(0),
            scale=1.0, resolution=self.resolution, rounding=self._rounding,
        )  # fmt: skip

    @property
    def _rounding(self) -> float:
        """The rounding unit of the second moment: float32 products of single examples do not add up their errors."""
        unit = torch.finfo(self.dtype).eps
        return unit * self.width / max(self.n, self.width) if self.dtype == torch.float32 else unit


def laid_out(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return activations as products take them: maps n × c × places, if there are many places, otherwise rows."""
    if output.ndim > 3 and output[0, 0].numel() >= PLACES:
        maps = output.flatten(2)
        return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    return rows(output, mask)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``Σ x yᵀ`` over all places or rows, p × q, summed over examples in float64."""
    both = torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(both), y.to(both)
    if x.ndim == 2:
        return (x.mT @ y).to(summing_dtype(x.device))
    return (x @ y.mT).sum(0, dtype=summing_dtype(x.device))


def _refuse_unpaired(pair: tuple[str, str], ours: Tensor, theirs: Tensor) -> None:
    if ours.ndim != theirs.ndim or len(ours) != len(theirs) or ours.shape[2:] != theirs.shape[2:]:
        raise ShapeError(
            f"{pair[0]} and {pair[1]} gave activations of shapes {tuple(ours.shape)} and {tuple(theirs.shape)} for one "
            "batch; a stitch needs the same examples and places of both."
        )
