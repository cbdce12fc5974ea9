"""`LayerGrams` and `Grams`: mini-batch Gram matrices, for kernels and for features too wide for moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from netkin.arrays import as_matrix, paired, refuse_non_finite, summing_dtype
from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.statistics.kernels import offset_is_large, power_of_two, rbf_kernel, u_centred
from netkin.statistics.sides import gram_product
from netkin.statistics.statistic import Statistic, refuse_missing, refuse_other_width

if TYPE_CHECKING:
    from typing_extensions import Self

    from netkin.statistics.layer_moments import Rectangle

KERNELS = ("linear", "rbf")
DEFAULTS = {"batch": 128, "kernel": "linear", "fraction": 0.4}  # of measures that have no such parameter


class Grams(NamedTuple):
    """A pair of layers: HSIC₁ of the two and of each with itself, averaged over mini-batches of `batch` examples."""

    cross: Tensor
    x: Tensor
    y: Tensor
    batch: int
    batches: int
    left_out: int

    @classmethod
    def of(cls, X: Any, Y: Any, *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4) -> Grams:
        """Return the statistic of two matrices cut into mini-batches in the order of their rows."""
        X, Y = paired(X, Y)
        collector = LayerGrams([(["X"], ["Y"])], batch=batch, kernel=kernel, fraction=fraction)
        for start in range(0, len(X), batch):
            part = {"X": X[start : start + batch], "Y": Y[start : start + batch]}
            collector.fold({name: collector.reduce(name, rows) for name, rows in part.items()})  # keeps the gradient
        return collector["X", "Y"]

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mini-batches and the kernel that a measure asks for, where its parameters say."""
        return {name: settings.get(name, default) for name, default in DEFAULTS.items()}

    def caution(self, facts: Any, settings: Mapping[str, Any]) -> str:
        """Return an empty string: mini-batches are not inflated by few examples."""
        return ""


class LayerGrams(Statistic):
    """HSIC₁ of many pairs of layers, summed over mini-batches; `collector[a, b]` is the pair that a measure reads.

    Each mini-batch's Gram matrices are U-centred (Song 2012) and flattened to rows, so that one product holds the
    HSIC of all pairs. Batches of another size are gathered or cut to `batch` examples (None: as the first one); a
    remainder under four examples is left out and counted.
    """

    kind = "LayerGrams"

    def __init__(
        self,
        rectangles: Sequence[Rectangle],
        *,
        batch: int | None = None,
        kernel: str = "linear",
        fraction: float = 0.4,
    ):
        if kernel not in KERNELS:
            raise UnknownName(f"no kernel named {kernel!r}; choose one of {', '.join(KERNELS)}.")
        if batch is not None and batch < 4:
            raise ValueFault(f"a mini-batch needs at least 4 examples for HSIC₁; got batch={batch}.")
        self.batch, self.kernel, self.fraction = batch, kernel, fraction
        self.pair_up(rectangles)
        self.widths: dict[str, int] = {}
        self._waiting: dict[str, Tensor] = {}
        self._scales: dict[str, float] = {}
        self._centres: dict[str, bool] = {}
        self._batches = self._left_out = 0
        self._finished: tuple[list[Tensor], Tensor, int] | None = None

    def pair_up(self, rectangles: Sequence[Rectangle]) -> None:
        """Say which pairs are wanted, where the layers' names are learnt from the first batch."""
        self.rectangles = [(list(left), list(right)) for left, right in rectangles]
        self.names = list(dict.fromkeys(name for pair in self.rectangles for side in pair for name in side))
        self._cross = [torch.zeros(len(left), len(right), dtype=torch.float64) for left, right in self.rectangles]
        self._own = torch.zeros(len(self.names), dtype=torch.float64)

    def reduce(self, name: str, rows: Tensor) -> Tensor:
        """Return what must be kept of a layer's rows: their kernel matrix, if they make up exactly one mini-batch."""
        if self.batch is None:
            self.batch = max(4, len(rows))
        refuse_other_width(name, rows.shape[1], self.widths.setdefault(name, rows.shape[1]))
        return self._kernel(name, rows) if self._is_whole(len(rows)) else rows.clone()

    def update(self, rows: Mapping[str, Any]) -> None:
        """Fold in one batch: a matrix of rows for every layer, the same examples in each."""
        refuse_missing(self.names, rows)
        matrices = {name: as_matrix(rows[name], name, check=False).detach() for name in self.names}
        self.fold({name: self.reduce(name, matrix) for name, matrix in matrices.items()})

    def fold(self, reduced: Mapping[str, Tensor]) -> None:
        """Fold in one batch of what `reduce` returned."""
        counts = {len(reduced[name]) for name in self.names}
        if len(counts) > 1:
            raise ShapeError(f"the layers gave different numbers of rows for one batch: {sorted(counts)}.")
        self._finished = None
        if self._is_whole(next(iter(counts))):
            self._add(*self._hsic(reduced))
            return
        for name in self.names:
            self._waiting[name] = (
                torch.cat([self._waiting[name], reduced[name]]) if name in self._waiting else reduced[name]
            )
        while self._left >= (self.batch or 0):
            self._add(
                *self._hsic({name: self._kernel(name, rows[: self.batch]) for name, rows in self._waiting.items()})
            )
            self._waiting = {name: rows[self.batch :] for name, rows in self._waiting.items()}

    def __getitem__(self, pair: tuple[str, str]) -> Grams:
        """Return the HSIC of the layers `a` and `b`, in that order."""
        cross, own, batches = self._with_remainder()
        if batches == 0 or self.batch is None:
            raise NoValue(f"HSIC₁ needs at least 4 examples in a mini-batch; {self._left} were seen.")
        values = self._find(cross, *pair)
        x, y = (own[self.names.index(name)] / batches for name in pair)
        left_out = self._left_out + (self._left if self._left < 4 else 0)
        return Grams(values / batches, x, y, self.batch, batches, left_out)

    def merge(self, other: Self) -> Self:
        """Return the sums of both.

        What waits for a full mini-batch on either side becomes a smaller one of its own, or is left out if under four
        examples: put together, it would depend on the order of merging.
        """
        self._refuse_unlike(other, layers="rectangles", kernel="kernel", fraction="fraction")
        if self.batch and other.batch and self.batch != other.batch:
            self._refuse_unlike(other, batch="batch")
        if self.widths and other.widths:
            self._refuse_unlike(other, widths="widths")
        merged, theirs = self._closed(), other._closed()
        merged.batch = self.batch or other.batch
        for name in self.names:
            scales = [part._scales[name] for part in (merged, theirs) if name in part._scales]
            for part in (merged, theirs) if scales else ():
                part._rescale(name, min(scales))
        merged._add(theirs._cross, theirs._own)
        merged._batches += theirs._batches - 1
        merged._left_out += theirs._left_out
        return merged

    def _closed(self) -> Self:
        """Return a copy in which nothing waits any more."""
        tensors, header = self._state()
        closed = self._restored({name: tensor.clone() for name, tensor in tensors.items()}, header)
        cross, own, closed._batches = self._with_remainder()
        closed._cross, closed._own = [values.clone() for values in cross], own.clone()
        closed._left_out += self._left if self._left < 4 else 0
        closed._waiting = {}
        return closed

    @property
    def _left(self) -> int:
        """How many examples wait for a full mini-batch."""
        return len(next(iter(self._waiting.values()))) if self._waiting else 0

    def _is_whole(self, count: int) -> bool:
        return count == self.batch and not self._left

    def _kernel(self, name: str, rows: Tensor) -> Tensor:
        """Return the kernel matrix of one mini-batch, whose features are centred first where their offset is large."""
        rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        if self.kernel == "rbf":
            return self._rbf(name, rows)
        gram = self._gram(name, rows, centred=self._centres.get(name, False))
        if name not in self._centres or (gram.device.type == "cpu" and not self._centres[name]):
            self._centres[name] = offset_is_large(gram)
            gram = self._gram(name, rows, centred=True) if self._centres[name] else gram
        return gram

    def _rbf(self, name: str, rows: Tensor) -> Tensor:
        """Return the RBF kernel; nothing but zeros where it has no width, so that this layer alone has no value."""
        refuse_non_finite(rows, f"layer {name!r} in mini-batch {self._batches}")
        try:
            return rbf_kernel(rows, self.fraction)
        except NoValue:
            return torch.zeros(len(rows), len(rows), dtype=summing_dtype(rows.device), device=rows.device)

    def _gram(self, name: str, rows: Tensor, centred: bool) -> Tensor:
        """Return ``XXᵀ`` in this layer's unit, which is chosen anew if squares would leave the range of float32."""
        given, rows = rows, _centred(rows) if centred else rows
        scale = self._scales.get(name, 1.0)
        gram = gram_product(rows if scale == 1 else rows * scale)
        if name in self._scales and gram.device.type != "cpu":
            return gram
        size = float(torch.diagonal(gram.detach()).sum())
        if 1e-20 < size < 1e25 or (name in self._scales and size <= 1e-20):
            self._scales[name] = scale
            return gram
        refuse_non_finite(given, f"layer {name!r} in mini-batch {self._batches}")
        scale = power_of_two(rows)
        if not scale:  # all zero so far: the unit is still free
            return gram
        self._rescale(name, scale)
        return gram_product(rows * scale)

    def _hsic(self, kernels: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return HSIC₁ of all pairs, and of each layer with itself, for one mini-batch."""
        device = kernels[self.names[0]].device
        flat = u_centred(torch.stack([kernels[name].to(device) for name in self.names])).flatten(1)
        pairs = kernels[self.names[0]].shape[0] * (kernels[self.names[0]].shape[0] - 3)
        every = flat @ flat.T / pairs if len(self.rectangles) > 1 else None
        cross = []
        for left, right in self.rectangles:
            rows, columns = self._places(left), self._places(right)
            if every is None:
                cross.append(flat[rows] @ flat[columns].T / pairs)
            else:
                cross.append(every[rows][:, columns])
        return cross, flat.square().sum(1) / pairs

    def _places(self, names: Sequence[str]) -> Any:
        """Return where layers stand among all: a slice if they are neighbours, which costs a GPU no copy."""
        places = [self.names.index(name) for name in names]
        start, stop = places[0], places[0] + len(places)
        return slice(start, stop) if places == list(range(start, stop)) else places

    def _add(self, cross: Sequence[Tensor], own: Tensor) -> None:
        self._cross = [mine.to(theirs.device) + theirs for mine, theirs in zip(self._cross, cross, strict=True)]
        self._own = self._own.to(own.device) + own
        self._batches += 1

    def _with_remainder(self) -> tuple[list[Tensor], Tensor, int]:
        if self._finished is None:
            cross, own, batches = self._cross, self._own, self._batches
            if self._left >= 4:
                more, own_more = self._hsic({name: self._kernel(name, rows) for name, rows in self._waiting.items()})
                cross, own = (
                    [a.to(b.device) + b for a, b in zip(cross, more, strict=True)],
                    own.to(own_more.device) + own_more,
                )
                batches += 1
            self._finished = ([values.cpu() for values in cross], own.cpu(), batches)  # read number by number
        return self._finished

    def _find(self, cross: Sequence[Tensor], a: str, b: str) -> Tensor:
        for name in (a, b):
            if name not in self.names:
                raise UnknownName(f"no layer {name!r} in these Gram matrices{did_you_mean(name, self.names)}")
        for values, (left, right) in zip(cross, self.rectangles, strict=True):
            if a in left and b in right:
                return values[left.index(a), right.index(b)]
            if b in left and a in right:
                return values[left.index(b), right.index(a)]
        raise NoValue(f"the pair {a!r}, {b!r} was not collected.")

    def _rescale(self, name: str, scale: float) -> None:
        """Count layer `name` in another unit from now on; HSIC is quadratic in the features of either side."""
        ratio = scale / self._scales.get(name, scale)  # until a unit is chosen the sums are zero
        self._scales[name] = scale
        factor = ratio**2 if self.kernel == "linear" else 1.0
        for values, (left, right) in zip(self._cross, self.rectangles, strict=True):
            if name in left:
                values[left.index(name)] *= factor
            if name in right:
                values[:, right.index(name)] *= factor
        if name in self.names:
            self._own[self.names.index(name)] *= factor**2

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"cross.{i}": values for i, values in enumerate(self._cross)} | {"own": self._own}
        tensors |= {f"waiting.{i}": self._waiting[name] for i, name in enumerate(self.names) if self._left}
        header = {
            "rectangles": self.rectangles,
            "batch": self.batch,
            "kernel": self.kernel,
            "fraction": self.fraction,
            "batches": self._batches,
            "left_out": self._left_out,
            "widths": self.widths,
            "scales": self._scales,
            "centres": self._centres,
        }
        return tensors, header

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        rectangles = [(left, right) for left, right in header["rectangles"]]
        statistic = cls(rectangles, batch=header["batch"], kernel=header["kernel"], fraction=header["fraction"])
        statistic._cross = [tensors[f"cross.{i}"] for i in range(len(rectangles))]
        statistic._own, statistic._batches = tensors["own"], header["batches"]
        statistic._left_out, statistic.widths = header["left_out"], dict(header["widths"])
        statistic._scales, statistic._centres = dict(header["scales"]), dict(header["centres"])
        if "waiting.0" in tensors:
            statistic._waiting = {name: tensors[f"waiting.{i}"] for i, name in enumerate(statistic.names)}
        return statistic


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(0, dtype=summing_dtype(rows.device)).to(rows.dtype)
