"""Gathering: what direct matching reads of pairs of layers, summed over batches.

That is the second moment of the first layer, its cross moment with the second, and both means; the second layer's own
second moment is not needed, which saves a third of the work. Maps are multiplied example by example as they lie in
memory, without being turned into rows.

Float32 activations are multiplied in float32, one example's places or a thousand rows at a time, and summed in float64;
the first layer is shifted by the mean of some first examples, into a copy that no later step in place can reach. An
entry then errs by about 1e-7 of the spreads of its two units, which is little where the units are far from depending on
each other. Where some first examples say that they are not, or can't tell, and where squares would leave float32, all
is multiplied in float64.
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
ROWS = 1024  # so many are multiplied at a time in float32
SAMPLE = 8  # times the width: rows by which a layer's shift and precision are chosen
WIDEST = 512  # for wider layers these are too many to look at
FIRM = 1e-3  # the least eigenvalue of correlations, over the largest, from which float32 is enough
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
        aim = Aim(y.name, y.n, y.mean.unsqueeze(0), y.resolution)
        return Matching(x.side(y.total.device), aim, cross.unsqueeze(0))


class Aim(CovarianceSide):
    """The second layer of a pair: its mean alone."""

    def __init__(self, name: str, n: int, mean: Tensor, resolution: float):
        nothing = mean.new_empty(*mean.shape, 0)
        super().__init__(name, n, mean, nothing, scale=1.0, resolution=resolution, rounding=resolution)
        self.width = mean.shape[-1]

    @property
    def second(self) -> Tensor:
        """Refuse: it was not gathered."""
        raise NoValue(f"of {self.name} only the mean was gathered, which is enough for matching and for no measure.")

    @cached_property
    def units(self) -> Tensor:
        return torch.eye(self.width, dtype=self.mean.dtype, device=self.mean.device).unsqueeze(0)

    @property
    def about_origin(self) -> Aim:
        """The same layer about the origin."""
        return Aim(self.name, self.n, torch.zeros_like(self.mean), self.resolution)


class Source(CovarianceSide):
    """The first layer of a pair, whose rank is told from correlations: small units count as large ones do."""

    def __init__(self, name: str, n: int, mean: Tensor, second: Tensor, resolution: float, rounding: float):
        super().__init__(name, n, mean, second, scale=1.0, resolution=resolution, rounding=rounding)

    @cached_property
    def whitener(self) -> Tensor:
        """The matrix F for which XF has orthonormal columns, and ``FFᵀ XᵀY`` is the smallest solution."""
        self.trace  # noqa: B018  refuses a constant layer
        noise = self.n * (2 * self.resolution * self.mean.abs()).square()
        live = (self.variances > noise)[0]
        spreads = self.variances[0, live].sqrt().unsqueeze(1)
        values, vectors = torch.linalg.eigh(self.second[0][live][:, live] / spreads / spreads.mT)
        kept = values > max(self.n, self.width) * self.rounding * values.max()
        factor = vectors[:, kept] / spreads * values[kept].rsqrt()
        idle, _ = torch.linalg.qr(vectors[:, ~kept] / spreads)  # directions in which the layer does not vary
        whole = factor.new_zeros(1, self.width, factor.shape[1])
        whole[0, live] = factor - idle @ (idle.mT @ factor)
        return whole

    @property
    def about_origin(self) -> Source:
        """The same layer about the origin."""
        means = self.mean.unsqueeze(-1)
        second = self.second + self.n * means * means.mT
        return Source(self.name, self.n, torch.zeros_like(self.mean), second, self.resolution, self.rounding)


class Matching(Moments):
    """The moments of a pair whose second layer has no second moment."""

    @cached_property
    def uncentred(self) -> Moments:
        """The same pair about the origin."""
        x, y = self.x, self.y
        assert isinstance(x, Source)
        assert isinstance(y, Aim)
        cross = self.cross + x.n * x.mean.unsqueeze(-1) * y.mean.unsqueeze(-2)
        return Matching(x.about_origin, y.about_origin, cross)


class _Layer:
    """One layer's sums; a centred one is shifted by the mean of some first examples."""

    def __init__(self, name: str, *, centred: bool):
        self.name, self.centred, self.n, self.batches, self.width = name, centred, 0, 0, 0
        self.shift: Tensor | None = None
        self._room: Tensor | None = None
        self.total: Tensor = torch.zeros(())
        self.own: Tensor = torch.zeros(())
        self.resolution, self.dtype = 0.0, torch.float32
        self._sides: dict[torch.device, Source] = {}

    def take(self, output: Tensor) -> Tensor:
        """Count one batch and return it shifted, in the precision of the products."""
        if not self.batches:
            self._begin(output)
        raw, output = output, output.to(self.dtype) if self.shift is None else self._shifted(output, self.shift)
        total = output.sum(0, dtype=self.total.dtype) if output.ndim == 2 else output.sum(2).sum(0).to(self.total)
        if output.device.type == "cpu" and not bool(torch.isfinite(total).all()):
            refuse_non_finite(raw, f"{self.name} in batch {self.batches}")
        self._sides, self.total, self.batches = {}, self.total + total, self.batches + 1
        self.n += output.numel() // self.width
        return output

    def _shifted(self, output: Tensor, shift: Tensor) -> Tensor:
        # into the same memory each time: fresh memory of this size costs as much as the products
        if self._room is None or self._room.shape != output.shape:
            self._room = torch.empty(output.shape, dtype=self.dtype, device=output.device)
        return torch.sub(output, shift, out=self._room)

    def _begin(self, output: Tensor) -> None:
        """Choose the shift and the precision by some of the first examples; any shift near the mean will do."""
        self.width, self.resolution = output.shape[1], torch.finfo(output.dtype).eps
        double = summing_dtype(output.device)
        some = _some(output, SAMPLE * self.width).to(double)
        if not bool(torch.isfinite(some).all()):
            refuse_non_finite(output, f"{self.name} in batch 0")
        mean = some.mean(0)
        about = some - mean if self.centred else some
        largest = float(about.abs().max())
        safe = largest == 0 or SAFE[0] < largest < SAFE[1]
        if output.dtype == torch.float64 or not safe or (self.centred and not _is_firm(about)):
            self.dtype = double
        if self.centred:
            self.shift = mean.to(self.dtype).unsqueeze(1) if output.ndim == 3 else mean.to(self.dtype)
        self.total = torch.zeros(self.width, dtype=double, device=output.device)

    @property
    def mean(self) -> Tensor:
        mean = self.total / self.n
        return mean if self.shift is None else mean + self.shift.flatten().to(mean)

    def side(self, device: torch.device) -> Source:
        """Return the layer as the first side of its pairs, which share what it computes."""
        if device not in self._sides:
            self._sides[device] = self._side(device)
        return self._sides[device]

    def _side(self, device: torch.device) -> Source:
        second = self.own - torch.outer(self.total, self.total) / self.n
        if not bool(torch.isfinite(second).all()):
            precision = str(self.dtype).removeprefix("torch.")
            raise ValueFault(
                f"{self.name} gave NaN or Inf, or numbers whose squares leave {precision}; mend the model or leave out "
                "the examples that cause them."
            )
        mean = self.mean.to(device).unsqueeze(0)
        return Source(self.name, self.n, mean, second.to(device).unsqueeze(0), self.resolution, self._rounding)

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
    double = summing_dtype(x.device)
    if x.ndim == 3:
        return (x @ y.mT).sum(0, dtype=double)
    if both == double:
        return x.mT @ y
    parts = zip(x.split(ROWS), y.split(ROWS), strict=True)
    return torch.stack([(a.mT @ b).to(double) for a, b in parts]).sum(0)


def _some(output: Tensor, rows: int) -> Tensor:
    """Return some first activations as rows."""
    if output.ndim == 2:
        return output[:rows]
    return output[: -(-rows // output.shape[2])].movedim(1, 2).flatten(0, 1)


def _is_firm(about: Tensor) -> bool:
    """Tell whether centred rows show that no unit nearly depends on others; units that rest say nothing."""
    if about.shape[1] > WIDEST or len(about) < 2 * about.shape[1]:
        return False
    spreads = torch.linalg.vector_norm(about, dim=0)
    units = about[:, spreads > 0] / spreads[spreads > 0]
    values = torch.linalg.eigvalsh(units.mT @ units)
    return not len(values) or bool(values[0] > FIRM * values[-1])


def _refuse_unpaired(pair: tuple[str, str], ours: Tensor, theirs: Tensor) -> None:
    if ours.ndim != theirs.ndim or len(ours) != len(theirs) or ours.shape[2:] != theirs.shape[2:]:
        raise ShapeError(
            f"{pair[0]} and {pair[1]} gave activations of shapes {tuple(ours.shape)} and {tuple(theirs.shape)} for one "
            "batch; a stitch needs the same examples and places of both."
        )
