"""`LayerRows` and `Rows`: the rows themselves, up to a stated cap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_matrix, paired, refuse_non_finite
from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.statistics.kernels import centred, few_for_bias, rbf_kernel
from netkin.statistics.moments import Moments
from netkin.statistics.sides import RowsSide
from netkin.statistics.statistic import Statistic, refuse_missing, refuse_other_width

if TYPE_CHECKING:
    from typing_extensions import Self


class Sample:
    """One layer's rows, with the Gram matrix and side that all its pairs share."""

    def __init__(self, X: Tensor, name: str):
        self.X, self.name = X, name
        self._sides: dict[torch.dtype | None, RowsSide] = {}
        self._kernels: dict[tuple[Callable[[Tensor], Tensor], float], Tensor] = {}

    def side(self, precision: torch.dtype | None = None) -> RowsSide:
        """Return the rows as a side of `Moments`, with products in `precision` (None: their own)."""
        if precision not in self._sides:
            self._sides[precision] = RowsSide(self.X, self.name, precision)
        return self._sides[precision]

    def centred_kernel(self, centring: Callable[[Tensor], Tensor], fraction: float) -> Tensor:
        """Return the centred RBF kernel of the rows, which all pairs of this layer share."""
        if (centring, fraction) not in self._kernels:
            side = self.side()
            side.trace  # noqa: B018  refuses a constant layer
            self._kernels[centring, fraction] = centring(rbf_kernel(self.X, fraction))
        return self._kernels[centring, fraction]


class Rows:
    """A pair of layers, row by row."""

    def __init__(self, x: Sample, y: Sample):
        if len(x.X) != len(y.X):
            raise NoValue(
                f"{x.name} gives {len(x.X):,} rows and {y.name} {len(y.X):,} for the same examples; "
                "compare layers of the same size, or choose another shape."
            )
        self.x, self.y, self.n = x, y, len(x.X)

    @classmethod
    def of(cls, X: Any, Y: Any) -> Rows:
        """Return two matrices whose rows are the same examples as a pair."""
        X, Y = paired(X, Y)
        return cls(Sample(X, "`X`"), Sample(Y, "`Y`"))

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: rows are the same for every measure."""
        return {}

    def caution(self, facts: Any, settings: Mapping[str, Any]) -> str:
        """Return a sentence if the measure's value of this pair would mislead, else an empty string."""
        if not (facts.debiased_as and "fraction" in settings) or self.n < 2:
            return ""
        kernels = [sample.centred_kernel(centred, settings["fraction"]).detach() for sample in (self.x, self.y)]
        d, e = (float(torch.trace(K) / K.norm()) ** 2 for K in kernels)  # as of moments, which have C for K
        return few_for_bias(self.n, (d * e) ** 0.5 / (self.n - 1), (d, e), facts.debiased_as)

    def moments(self, precision: torch.dtype | None = torch.float64) -> Moments:
        """Return the moments of the pair."""
        return Moments(self.x.side(precision), self.y.side(precision))


class LayerRows(Statistic):
    """The rows of many layers; `collector[a, b]` is the pair that a measure reads.

    Without a `cap` every row is kept, and a layer may have several rows an example (positions, tokens). With one every
    layer must have one row for each index, and of more than `cap` those are kept whose hash of (seed, index) is
    smallest, so that merging in any order keeps the same ones. `indices` names the examples; by default they are
    counted as they come.
    """

    kind = "LayerRows"

    def __init__(self, names: Sequence[str], *, cap: int | None = None, seed: int = 0):
        if cap is not None and cap < 1:
            raise ValueFault(f"`cap` must be at least 1; got {cap}.")
        self.names, self.cap, self.seed, self.seen = list(names), cap, seed, 0
        self._next = 0  # the number of the next example that comes without one
        self._parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        self._indices = np.empty(0, dtype=np.int64)
        self._samples: dict[str, Sample] = {}

    def update(self, rows: Mapping[str, Any], indices: Sequence[int] | None = None) -> None:
        """Fold in one batch: a matrix of rows for every layer; `indices` are the examples' places in the data."""
        matrices = self._checked(rows)
        places = self._places(matrices, indices)
        self.seen += len(places)
        self._next = max(self._next, int(places.max()) + 1)
        chosen = self.promising(places)
        self._indices = np.concatenate([self._indices, places[chosen.numpy()]])
        for name, matrix in matrices.items():
            # what is kept must not change when the caller's array does
            self._parts[name].append(matrix.clone() if self.cap is None else matrix[chosen.to(matrix.device)])
        self._samples = {}
        if self.cap is not None and len(self._indices) >= 2 * self.cap:
            self._shrink()

    def _checked(self, rows: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return one batch as matrices of the widths seen before, free of NaN and Inf."""
        refuse_missing(self.names, rows)
        matrices = {name: as_matrix(rows[name], name, check=False).detach() for name in self.names}
        for name, matrix in matrices.items():
            if matrix.device.type == "cpu":  # a GPU is not waited for: NaN is refused when the rows are read
                refuse_non_finite(matrix, f"layer {name!r}")
        self._refuse_other_widths({name: matrix.shape[1] for name, matrix in matrices.items()})
        return matrices

    def _places(self, matrices: Mapping[str, Tensor], indices: Sequence[int] | None) -> np.ndarray:
        """Return the indices of one batch's examples, none of which may have been seen before."""
        count = min(len(matrix) for matrix in matrices.values()) if indices is None else len(indices)
        places = self._next + np.arange(count) if indices is None else np.asarray(indices, dtype=np.int64)
        if self.cap is not None and any(len(matrix) != count for matrix in matrices.values()):
            raise ShapeError("a cap needs one row an example in every layer; choose `pool`, `mean` or `flatten`.")
        if len(np.unique(np.concatenate([self._indices, places]))) < len(self._indices) + len(places):
            raise ShapeError(
                "two batches hold the same examples by their `indices`; give each example a number of its own."
            )
        return places

    def promising(self, places: np.ndarray) -> Tensor:
        """Return which of the examples numbered `places` may be among those kept in the end."""
        if self.cap is None or len(self._indices) + len(places) <= self.cap:
            return torch.arange(len(places))
        hashes = _hashes(self.seed, np.concatenate([self._indices, places]))
        bar = np.partition(hashes, self.cap - 1)[self.cap - 1]
        return torch.from_numpy(np.flatnonzero(hashes[len(self._indices) :] <= bar))

    @property
    def widths(self) -> dict[str, int]:
        """The number of features of every layer seen so far."""
        return {name: parts[0].shape[1] for name, parts in self._parts.items() if parts}

    def _refuse_other_widths(self, widths: Mapping[str, int]) -> None:
        for name, width in self.widths.items():
            refuse_other_width(name, widths.get(name, width), width)

    def __getitem__(self, pair: tuple[str, str]) -> Rows:
        """Return the rows of the layers `a` and `b`, in that order."""
        for name in pair:
            if name not in self._parts:
                raise UnknownName(f"no layer {name!r} in these rows{did_you_mean(name, self.names)}")
        return Rows(self._sample(pair[0]), self._sample(pair[1]))

    @property
    def n(self) -> int:
        """The number of examples kept."""
        return len(self._indices) if self.cap is None else min(len(self._indices), self.cap)

    def merge(self, other: Self) -> Self:
        """Return the rows of both, up to the cap."""
        self._refuse_unlike(other, layers="names", cap="cap", seed="seed")
        self._refuse_other_widths(other.widths)
        merged = type(self)(self.names, cap=self.cap, seed=self.seed)
        merged.seen, merged._indices = self.seen + other.seen, np.concatenate([self._indices, other._indices])
        merged._next = max(self._next, other._next)
        if len(np.unique(merged._indices)) < len(merged._indices):
            raise ShapeError("both statistics hold rows of the same examples; give each part its own `indices`.")
        merged._parts = {name: [*self._parts[name], *other._parts[name]] for name in self.names}
        if self.cap is not None:
            merged._shrink()
        return merged

    def renumbered(self, start: int) -> Self:
        """Return the same rows with `start` added to the numbers of their examples."""
        moved = self.merge(type(self)(self.names, cap=self.cap, seed=self.seed))
        moved._indices, moved._next = moved._indices + start, moved._next + start
        return moved

    def _sample(self, name: str) -> Sample:
        if not self._parts[name]:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        if name not in self._samples:
            if self.cap is not None:
                self._shrink()
            self._samples[name] = Sample(self._together(name), f"layer {name!r}")
        return self._samples[name]

    def _shrink(self) -> None:
        """Keep the rows with the smallest hashes, in the order of their indices."""
        order = np.argsort(_hashes(self.seed, self._indices), kind="stable")[: self.cap]
        order = order[np.argsort(self._indices[order])]
        chosen = torch.from_numpy(order)
        for name in self.names if len(self._indices) else []:
            together = self._together(name)
            self._parts[name] = [together[chosen.to(together.device)]]
        self._indices = self._indices[order]

    def _together(self, name: str) -> Tensor:
        if len(self._parts[name]) > 1:
            self._parts[name] = [torch.cat(self._parts[name])]
        return self._parts[name][0]

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"rows.{i}": self._together(name) for i, name in enumerate(self.names) if self._parts[name]}
        header = {"names": self.names, "cap": self.cap, "seed": self.seed, "seen": self.seen, "next": self._next}
        return tensors | {"indices": torch.from_numpy(self._indices)}, header

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        statistic = cls(header["names"], cap=header["cap"], seed=header["seed"])
        statistic.seen, statistic._next, statistic._indices = header["seen"], header["next"], tensors["indices"].numpy()
        if "rows.0" in tensors:
            statistic._parts = {name: [tensors[f"rows.{i}"]] for i, name in enumerate(statistic.names)}
        return statistic


def _hashes(seed: int, indices: np.ndarray) -> np.ndarray:
    """Return a well-mixed 64-bit number for every (seed, index): the finaliser of SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = indices.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
        return mixed ^ (mixed >> np.uint64(31))
