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

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netkin.arrays import as_tensor, require_finite, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    Key,
    Settings,
    Study,
    label,
    name_of,
    one_feed,
    require_layers,
)
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.moments import Moments
from netkin.statistics.statistic import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS = 1024  # so many are multiplied at a time in float32
SAMPLE = 8  # times the width: rows by which a layer's shift and precision are chosen
WIDEST = 512  # for wider layers these are too many to check
FIRM = 1e-3  # the least eigenvalue of correlations, over the largest, from which float32 is enough
SAFE = (1e-12, 1e12)  # sizes whose squares and sums float32 holds


class CrossMoments(Collector):
    """The sums of pairs of layers over all batches so far.

    A pass gives all layers of a batch to `update`. A caller that runs the models itself gives each first layer as soon
    as it has run, then the second ones, and calls `batch_is_over`.
    """

    kind = "CrossMoments"
    holds = "cross moments"
    numbers_rows = False
    stored = ("pairs", "_cross", "_first", "_second")

    def __init__(self, pairs: Iterable[tuple[Key, Key]]):
        self.pairs = list(dict.fromkeys(pairs))
        self._first: dict[Key, OneSideSums] = {}
        self._second: dict[Key, OneSideSums] = {}
        self._cross: dict[tuple[Key, Key], Tensor] = {}
        self.clear_cache()

    @classmethod
    def cost(cls, settings: Settings, study: Study) -> CostEstimate | None:
        pairs = [(x, y) for x, y in study.pairs() if x.rows == y.rows and not study.spectral]
        if not pairs:
            return None
        firsts = {x.key: x for x, _ in pairs}.values()
        numbers = sum(x.width**2 for x in firsts) + sum(x.width * y.width for x, y in pairs)
        operations = sum(x.rows_of(study.examples or 1) * x.width**2 for x in firsts)
        operations += sum(x.rows_of(study.examples or 1) * x.width * y.width for x, y in pairs)
        words = f"second moments of {len(firsts):,} layers and cross moments of {len(pairs):,} pairs"
        return CostEstimate(8 * numbers, words, words, operations)

    @classmethod
    def start(cls, settings: Settings, study: Study) -> Self:
        return cls((x, y) for left, right in study.pair_blocks for x in left for y in right)

    @property
    def names(self) -> list[Key]:
        """Every layer once."""
        return list(dict.fromkeys(key for pair in self.pairs for key in pair))

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, **options: Any) -> None:
        """Add one batch: the rows, or maps n × c × places, of every layer."""
        rows = one_feed(self, rows)
        require_layers(self.names, rows)
        for key in dict.fromkeys(x for x, _ in self.pairs):
            self.first(key, as_tensor(rows[key], name_of(key)))
        for key in dict.fromkeys(y for _, y in self.pairs):
            self.second(key, as_tensor(rows[key], name_of(key)))
        self.batch_is_over()

    def first(self, key: Key, output: Tensor) -> None:
        """Take a first layer's rows or maps; they are held, shifted, until the batch is over."""
        output = output.detach()
        layer = self._first.setdefault(key, OneSideSums(key, centred=True))
        self._held[key] = held = layer.take(output)
        layer.own = layer.own + product(held, held)

    def second(self, key: Key, output: Tensor) -> None:
        """Take a second layer's rows or maps and multiply them with all first ones that it is paired with."""
        layer = self._second.setdefault(key, OneSideSums(key, centred=False))
        theirs = layer.take(output.detach())
        for pair in self.pairs:
            if pair[1] == key:
                ours = self._held[pair[0]].to(theirs.device)
                _require_paired(pair, ours, theirs)
                self._cross[pair] = self._cross.get(pair, 0) + product(ours, theirs)

    def batch_is_over(self) -> None:
        """Forget the activations that are held."""
        self._held.clear()

    def clear_cache(self) -> None:
        self._held: dict[Key, Tensor] = {}

    def flush(self) -> None:
        for sums in (*self._first.values(), *self._second.values()):
            sums.flush()

    def pair(self, a: Key, b: Key, without: int | None = None) -> OneSidedMoments:
        if without is not None:
            raise NoValue("cross moments are kept in no chunks; standard errors need other statistics.")
        if (a, b) not in self._cross:
            raise NoValue(f"the pair {name_of(a)!r}, {name_of(b)!r} was not collected, or no batch has come yet.")
        self.flush()
        x, y = self._first[a], self._second[b]
        cross = self._cross[a, b] - torch.outer(x.total.to(y.total), y.total) / y.n
        second = SecondSide(y.name, y.n, y.mean.unsqueeze(0), y.resolution)
        return OneSidedMoments(x.side(y.total.device), second, cross.unsqueeze(0))

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="pairs")
        if not (self._cross and other._cross):
            return (self if self._cross else other)._copy()
        merged = self._copy()
        for (x, y), cross in other._cross.items():
            before, moved = merged._cross[x, y], merged._first[x].shift_from(other._first[x])
            turned = torch.outer(moved, other._second[y].total.to(moved))
            merged._cross[x, y] = before + (cross.to(before) + turned.to(before))
        for mine, theirs in ((merged._first, other._first), (merged._second, other._second)):
            for key, sums in mine.items():
                sums.add(theirs[key])
        return merged


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

    @property
    def about_origin(self) -> SecondSide:
        """The same layer about the origin."""
        return SecondSide(self.name, self.n, torch.zeros_like(self.mean), self.resolution)


class FirstSide(CovarianceSide):
    """The first layer of a pair, whose rank is determined from correlations: small features count as large ones do."""

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
        real = values > max(self.n, self.width) * self.rounding * values.max()
        factor = vectors[:, real] / spreads * values[real].rsqrt()
        idle, _ = torch.linalg.qr(vectors[:, ~real] / spreads)  # directions in which the layer does not vary
        whole = factor.new_zeros(1, self.width, factor.shape[1])
        whole[0, live] = factor - idle @ (idle.mT @ factor)
        return whole

    @property
    def about_origin(self) -> FirstSide:
        """The same layer about the origin."""
        means = self.mean.unsqueeze(-1)
        second = self.second + self.n * means * means.mT
        return FirstSide(self.name, self.n, torch.zeros_like(self.mean), second, self.resolution, self.rounding)


class OneSidedMoments(Moments):
    """The moments of a pair whose second layer has no second moment."""

    @cached_property
    def uncentred(self) -> Moments:
        """The same pair about the origin."""
        x, y = self.x, self.y
        assert isinstance(x, FirstSide)
        assert isinstance(y, SecondSide)
        cross = self.cross + x.n * x.mean.unsqueeze(-1) * y.mean.unsqueeze(-2)
        return OneSidedMoments(x.about_origin, y.about_origin, cross)


class OneSideSums(Stored):
    """One layer's sums; a centred one is shifted by the mean of some first examples."""

    stored = ("key", "centred", "n", "batches", "width", "shift", "total", "own", "resolution", "dtype", "rounded")

    def __init__(self, key: Key, *, centred: bool):
        self.key, self.centred, self.n, self.batches, self.width = key, centred, 0, 0, 0
        self.shift: Tensor | None = None
        self.total: Tensor = torch.zeros(())
        self.own: Tensor = torch.zeros(())
        self.resolution, self.dtype, self.rounded = 0.0, torch.float32, False
        self.clear_cache()

    def clear_cache(self) -> None:
        self._sides: dict[torch.device, FirstSide] = {}
        self.flush()

    def flush(self) -> None:
        self._room: Tensor | None = None

    @property
    def name(self) -> str:
        """How a sentence names the layer."""
        return self.key if isinstance(self.key, str) else label(self.key)

    def take(self, output: Tensor) -> Tensor:
        """Count one batch and return it shifted, in the precision of the products."""
        if not self.batches:
            self._begin(output)
        raw, output = output, output.to(self.dtype) if self.shift is None else self._shifted(output, self.shift)
        total = output.sum(0, dtype=self.total.dtype) if output.ndim == 2 else output.sum(2).sum(0).to(self.total)
        if output.device.type == "cpu" and not bool(torch.isfinite(total).all()):
            require_finite(raw, f"{self.name} in batch {self.batches}")
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
        some = _some(output.detach(), SAMPLE * self.width).to(double)
        if not bool(torch.isfinite(some).all()):
            require_finite(output, f"{self.name} in batch 0")
        mean = some.mean(0)
        about = some - mean if self.centred else some
        largest = float(about.abs().max())
        safe = largest == 0 or SAFE[0] < largest < SAFE[1]
        if output.dtype == torch.float64 or not safe or (self.centred and not _is_firm(about)):
            self.dtype = double
        self.rounded = self.dtype == torch.float32
        if self.centred:
            self.shift = mean.to(self.dtype).unsqueeze(1) if output.ndim == 3 else mean.to(self.dtype)
        self.total = torch.zeros(self.width, dtype=double, device=output.device)

    @property
    def mean(self) -> Tensor:
        mean = self.total / self.n
        return mean if self.shift is None else mean + self.shift.flatten().to(mean)

    def side(self, device: torch.device) -> FirstSide:
        """Return the layer as the first side of its pairs, which share what it computes."""
        if device not in self._sides:
            self._sides[device] = self._side(device)
        return self._sides[device]

    def _side(self, device: torch.device) -> FirstSide:
        second = self.own - torch.outer(self.total, self.total) / self.n
        if not bool(torch.isfinite(second).all()):
            precision = str(self.dtype).removeprefix("torch.")
            raise InvalidValue(
                f"{self.name} gave NaN or Inf, or numbers whose squares leave {precision}; fix the model or leave out "
                "the examples that cause them."
            )
        mean, rounding = self.mean.to(device).unsqueeze(0), torch.finfo(self.dtype).eps
        if self.rounded:  # float32 products of single examples do not add up their errors
            rounding = torch.finfo(torch.float32).eps * self.width / max(self.n, self.width)
        return FirstSide(self.name, self.n, mean, second.to(device).unsqueeze(0), self.resolution, rounding)

    def shift_from(self, other: OneSideSums) -> Tensor:
        """Return how far the other's shift lies from this one's."""
        if self.shift is None or other.shift is None:
            return torch.zeros_like(self.total)
        return (other.shift.flatten().to(self.total) - self.shift.flatten().to(self.total)).to(self.total)

    def add(self, other: OneSideSums) -> None:
        """Add the sums of other data, brought to this shift."""
        if self.width != other.width:
            raise ShapeError(f"{self.name} has {self.width:,} and {other.width:,} features, and can't be merged.")
        moved, total = self.shift_from(other), other.total.to(self.total)
        if self.centred:
            turned = torch.outer(total, moved)
            self.own = self.own + other.own.to(self.own) + turned + turned.mT + other.n * torch.outer(moved, moved)
        self.total, self.n = self.total + total + other.n * moved, self.n + other.n
        self.batches, self._sides = self.batches + other.batches, {}
        self.resolution = max(self.resolution, other.resolution)
        self.rounded = self.rounded or other.rounded


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
    """Return whether centred rows show that no feature nearly depends on others; features that rest say nothing."""
    return about.shape[1] <= WIDEST and len(about) >= 2 * about.shape[1] and are_firm(about.mT @ about)


def are_firm(second: Tensor) -> bool:
    """Return whether by a second moment no feature nearly depends on others, so that float32 is enough to whiten it."""
    spreads = second.diagonal().sqrt()
    live = spreads > 0
    values = torch.linalg.eigvalsh(second[live][:, live] / spreads[live] / spreads[live].unsqueeze(1))
    return not len(values) or bool(values[0] > FIRM * values[-1])


def _require_paired(pair: tuple[Key, Key], ours: Tensor, theirs: Tensor) -> None:
    if ours.ndim != theirs.ndim or len(ours) != len(theirs) or ours.shape[2:] != theirs.shape[2:]:
        names, shapes = map(name_of, pair), (str(tuple(layer.shape)) for layer in (ours, theirs))
        raise ShapeError(
            f"{' and '.join(names)} gave activations of shapes {' and '.join(shapes)} for one batch; a stitch needs "
            "the same examples and places of both."
        )
