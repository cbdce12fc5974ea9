"""`CrossMoments`: the moments of pairs of layers for direct stitching, summed over batches.

That is the second moment of the first layer, its cross moment with the second, and both means; the second layer's own
second moment is not needed, which saves a third of the work. Layers come as rows, or as maps n × c × places, which are
multiplied example by example as they lie in memory.

Float32 activations are multiplied in float32, one example's places or a thousand rows at a time, and summed in float64;
the first layer is shifted by the mean of some first examples, into a copy that no later step in place can reach. An
entry then errs by about 1e-7 of the spreads of its two features, which is little where the features are far from
depending on each other. Where the first examples show that they are not, or are too few, and where squares would
overflow float32, everything is multiplied in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from netkin.arrays import require_finite, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.moments import Moments
from netkin.statistics.storage import Cached

ROWS = 1024  # so many are multiplied at a time in float32
SAMPLE = 8  # times the width: rows by which a layer's shift and precision are chosen
WIDEST = 512  # for wider layers these are too many to check
FIRM = 1e-3  # the least eigenvalue of correlations, over the largest, from which float32 is enough
SAFE = (1e-12, 1e12)  # sizes whose squares and sums float32 holds


class CrossMoments:
    """The sums of pairs of layers, by their names, over all batches so far.

    A batch is given layer by layer as the models run: first `first` of all first layers, then `second` of the second
    ones, and `batch_is_over`.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]):
        self.pairs = list(dict.fromkeys(pairs))
        self._first: dict[str, OneSideSums] = {}
        self._second: dict[str, OneSideSums] = {}
        self._cross: dict[tuple[str, str], Tensor] = {}
        self._held: dict[str, Tensor] = {}  # the batch's first layers, shifted

    def first(self, name: str, output: Tensor) -> None:
        """Take a first layer's rows or maps; they are held, shifted, until the batch is over."""
        layer = self._first.setdefault(name, OneSideSums(name, centred=True))
        self._held[name] = rows = layer.take(output.detach())
        layer.second = layer.second + product(rows, rows)

    def second(self, name: str, output: Tensor) -> None:
        """Take a second layer's rows or maps and multiply them with all first ones that it is paired with."""
        layer = self._second.setdefault(name, OneSideSums(name, centred=False))
        right = layer.take(output.detach())
        for pair in self.pairs:
            if pair[1] == name:
                left = self._held[pair[0]].to(right.device)
                _require_paired(pair, left, right)
                self._cross[pair] = self._cross.get(pair, 0) + product(left, right)

    def batch_is_over(self) -> None:
        """Forget the activations that are held."""
        self._held.clear()

    def pair(self, a: str, b: str) -> Moments:
        """Return the moments of a pair, whose second side has a mean alone."""
        x, y = self._first[a], self._second[b]
        cross = self._cross[a, b] - torch.outer(x.total.to(y.total), y.total) / y.n
        second = SecondSide(y.name, y.n, y.mean.unsqueeze(0), y.resolution)
        return Moments(x.side(y.total.device), second, cross.unsqueeze(0))


class SecondSide(CovarianceSide):
    """The second layer of a pair: its mean alone."""

    def __init__(self, name: str, n: int, mean: Tensor, resolution: float):
        nothing = mean.new_empty(*mean.shape, 0)
        super().__init__(name, n, mean, nothing, scale=1.0, resolution=resolution, rounding=resolution)
        self.width = mean.shape[-1]

    @property
    def second(self) -> Tensor:
        """Refuse: it was not gathered."""
        raise NoValue(f"of {self.name} only the mean was gathered, which is enough for a map and for no measure.")

    variances = second

    @cached_property
    def to_features(self) -> Tensor:
        return torch.eye(self.width, dtype=self.mean.dtype, device=self.mean.device).unsqueeze(0)

    @cached_property
    def uncentred(self) -> SecondSide:
        return SecondSide(self.name, self.n, torch.zeros_like(self.mean), self.resolution)


class FirstSide(CovarianceSide):
    """The first layer of a pair, whose rank is determined from correlations: small features count as large ones do."""

    @cached_property
    def whitener(self) -> Tensor:
        """The matrix F for which XF has orthonormal columns, and ``FFᵀ XᵀY`` is the smallest solution."""
        self.trace  # noqa: B018  refuses a constant layer
        noise = self.n * (2 * self.resolution * self.mean.abs()).square()
        live = (self.variances > noise)[0]
        spreads = self.variances[0, live].sqrt().unsqueeze(1)
        values, vectors = torch.linalg.eigh(self.second[0][live][:, live] / spreads / spreads.mT)
        real = values > max(self.n, self.width) * self.rounding * values.max()
        factor = vectors[:, real] / spreads * values[real].rsqrt()
        idle, _ = torch.linalg.qr(vectors[:, ~real] / spreads)  # directions in which the layer does not vary
        whole = factor.new_zeros(1, self.width, factor.shape[1])
        whole[0, live] = factor - idle @ (idle.mT @ factor)
        return whole


class OneSideSums(Cached):
    """One layer's sums; a centred one is shifted by the mean of some first examples."""

    def __init__(self, name: str, *, centred: bool):
        self.name, self.centred, self.n, self.batches, self.width = name, centred, 0, 0, 0
        self.shift: Tensor | None = None
        self.total: Tensor = torch.zeros(())
        self.second: Tensor = torch.zeros(())
        self.resolution, self.dtype = 0.0, torch.float32
        self._room: Tensor | None = None

    def take(self, output: Tensor) -> Tensor:
        """Count one batch and return it shifted, in the precision of the products."""
        if not self.batches:
            self._begin(output)
        raw, output = output, output.to(self.dtype) if self.shift is None else self._shifted(output, self.shift)
        total = output.sum(0, dtype=self.total.dtype) if output.ndim == 2 else output.sum(2).sum(0).to(self.total)
        if output.device.type == "cpu" and not bool(torch.isfinite(total).all()):
            require_finite(raw, f"{self.name} in batch {self.batches}")
        self.clear_cache()
        self.total, self.batches = self.total + total, self.batches + 1
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
        some = _first_rows(output.detach(), SAMPLE * self.width).to(double)
        if not bool(torch.isfinite(some).all()):
            require_finite(output, f"{self.name} in batch 0")
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

    def side(self, device: torch.device) -> FirstSide:
        """Return the layer as the first side of its pairs, which share what it computes."""
        return self.once(device, lambda: self._side(device))

    def _side(self, device: torch.device) -> FirstSide:
        second = self.second - torch.outer(self.total, self.total) / self.n
        if not bool(torch.isfinite(second).all()):
            precision = str(self.dtype).removeprefix("torch.")
            raise InvalidValue(
                f"{self.name} gave NaN or Inf, or numbers whose squares leave {precision}; fix the model or leave out "
                "the examples that cause them."
            )
        mean, rounding = self.mean.to(device).unsqueeze(0), torch.finfo(self.dtype).eps
        if self.dtype == torch.float32:  # float32 products of single examples do not add up their errors
            rounding = torch.finfo(torch.float32).eps * self.width / max(self.n, self.width)
        second = second.to(device).unsqueeze(0)
        return FirstSide(self.name, self.n, mean, second, scale=1.0, resolution=self.resolution, rounding=rounding)


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


def _first_rows(output: Tensor, rows: int) -> Tensor:
    """Return some first activations as rows."""
    if output.ndim == 2:
        return output[:rows]
    return output[: -(-rows // output.shape[2])].movedim(1, 2).flatten(0, 1)


def _is_firm(about: Tensor) -> bool:
    """Return whether centred rows show that no feature nearly depends on others; features that rest say nothing."""
    return about.shape[1] <= WIDEST and len(about) >= 2 * about.shape[1] and are_firm(about.mT @ about)


def are_firm(second: Tensor) -> bool:
    """Return whether by a second moment no feature nearly depends on others, so that float32 is enough to whiten it."""
    spreads = second.diagonal().sqrt()
    live = spreads > 0
    values = torch.linalg.eigvalsh(second[live][:, live] / spreads[live] / spreads[live].unsqueeze(1))
    return not len(values) or bool(values[0] > FIRM * values[-1])


def _require_paired(pair: tuple[str, str], left: Tensor, right: Tensor) -> None:
    if left.ndim != right.ndim or len(left) != len(right) or left.shape[2:] != right.shape[2:]:
        shapes = (str(tuple(layer.shape)) for layer in (left, right))
        raise ShapeError(
            f"{' and '.join(pair)} gave activations of shapes {' and '.join(shapes)} for one batch; a stitch needs "
            "the same examples and places of both."
        )
