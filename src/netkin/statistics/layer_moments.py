"""`LayerMoments`: the collector of moments, one pass over the data for all pairs of layers.

Every layer's rows x are shifted, scaled and given one or two more columns: ``[x, 1]``, or ``[x, ‖x‖², 1]`` when the
debiasing sums are wanted. Side by side, one product of these matrices then holds everything: the cross moments, the
sums, the counts, and ``Σ x‖y‖²`` and ``Σ ‖x‖²‖y‖²`` as well. A change of shift or scale is a linear map of such
columns, so merging rebases by a few row operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netkin.arrays import as_matrix, refuse_non_finite, summing_dtype
from netkin.errors import NoValue, ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.statistics.kernels import power_of_two
from netkin.statistics.moments import Moments
from netkin.statistics.sides import CovarianceSide, squared_norm
from netkin.statistics.statistic import Statistic, refuse_missing, refuse_other_width

if TYPE_CHECKING:
    from typing_extensions import Self

Rectangle = tuple[Sequence[str], Sequence[str]]
FOLD = 512  # rows gathered before a product is taken: small batches waste the product and the float64 sums


class LayerMoments(Statistic):
    """Moments of many layers; `collector[a, b]` is the pair that a measure reads.

    `rectangles` says which pairs are wanted: each is (names, names), and all of the first are paired with all of the
    second by one product. `precision` is that of the products; sums are kept in float64.

    Example:
        >>> collector = LayerMoments([(["a"], ["b"])])
        >>> for _ in range(3):
        ...     X = torch.randn(10, 4)
        ...     collector.update({"a": X, "b": 2 * X})
        >>> collector["a", "b"].n
        30
    """

    kind = "LayerMoments"

    def __init__(
        self,
        rectangles: Sequence[Rectangle],
        *,
        precision: torch.dtype = torch.float64,
        debiased: bool = False,
    ):
        self.rectangles = [(list(left), list(right)) for left, right in rectangles]
        self.names = list(dict.fromkeys(name for pair in self.rectangles for side in pair for name in side))
        self.precision, self.debiased = precision, debiased
        self._layers: dict[str, _Layer] = {}
        self._blocks: list[_Block] = []
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self.names}
        self._batches = 0
        self._sides: dict[str, CovarianceSide] = {}

    def update(self, rows: Mapping[str, Any]) -> None:
        """Fold in one batch: a matrix of rows for every layer, the same examples in each."""
        refuse_missing(self.names, rows)
        matrices = {name: self._matrix(name, rows[name]) for name in self.names}
        for name, matrix in matrices.items():
            # what waits must not change when the caller's array does
            self._waiting[name].append(matrix if len(matrix) >= FOLD else matrix.clone())
        self._batches += 1
        # a GPU is kept busy by few large products rather than by many small ones
        enough = 8 * FOLD if matrices[self.names[0]].is_cuda else FOLD
        if max(sum(len(part) for part in parts) for parts in self._waiting.values()) >= enough:
            self._fold()

    def _matrix(self, name: str, rows: Any) -> Tensor:
        matrix = as_matrix(rows, name, check=False).detach()
        waiting = [part.shape[1] for part in self._waiting[name]]
        before = self._layers[name].width if name in self._layers else waiting[0] if waiting else matrix.shape[1]
        refuse_other_width(name, matrix.shape[1], before, f" in batch {self._batches}")
        if matrix.device.type == "cpu":
            refuse_non_finite(matrix, f"layer {name!r} in batch {self._batches}")
        return matrix

    def __getitem__(self, pair: tuple[str, str]) -> Moments:
        """Return the moments of the layers `a` and `b`, in that order."""
        self._fold()
        a, b = pair
        block, turned = self._find(a, b)
        x, y = (self._layers[name] for name in ((b, a) if turned else (a, b)))
        cross = block.pair(x.name, y.name)
        n, mean_x, mean_y = float(cross[-1, -1]), cross[:-1, -1] / cross[-1, -1], cross[-1, :-1] / cross[-1, -1]
        cross = _shifted(
            _shifted(cross, -mean_x[: x.width], 1.0, self.debiased).T, -mean_y[: y.width], 1.0, self.debiased
        ).T
        moments = Moments(
            self._side(x), self._side(y), cross[: x.width, : y.width].unsqueeze(0),
            cross[-2, -2] if self.debiased else None,
        )  # fmt: skip
        if int(n) != moments.x.n or int(n) != moments.y.n:
            raise ShapeError(f"layers {a!r} and {b!r} were fed different numbers of rows.")
        return moments.swapped if turned else moments

    @property
    def groups(self) -> list[Rectangle]:
        """Which layers have been found to give the same rows, and are crossed by one product."""
        return [(block.left, block.right) for block in self._blocks]

    @property
    def widths(self) -> dict[str, int]:
        """The number of features of every layer seen so far."""
        return {name: layer.width for name, layer in self._layers.items()}

    @property
    def n(self) -> int:
        """The number of rows of the first layer so far."""
        return self.rows_of(self.names[0])

    def rows_of(self, name: str) -> int:
        """Return how many rows layer `name` has given so far."""
        self._fold()
        return self._layers[name].n if name in self._layers else 0

    def merge(self, other: Self) -> Self:
        """Return the moments of the data of both."""
        self._refuse_unlike(other, layers="rectangles", precision="precision", debiased="debiased")
        self._fold()
        other._fold()
        first, second = (self, other) if self._layers else (other, self)
        merged = first._copy()
        if first._layers and second._layers:
            merged._add(second)
        return merged

    def _copy(self) -> Self:
        tensors, header = self._state()
        return self._restored({name: tensor.clone() for name, tensor in tensors.items()}, header)

    def _add(self, other: LayerMoments) -> None:
        self._refuse_unlike(other, widths="widths", rows="groups")
        for name in self.names:
            mine, theirs = self._layers[name], other._layers[name]
            if theirs.varies and not mine.varies:
                self._rescale(mine, theirs.scale)
            mine.own += theirs.rebased(mine, theirs.rebased(mine, theirs.own.to(mine.own.device)).T).T
            mine.resolution = max(mine.resolution, theirs.resolution)
        for block, addend in zip(self._blocks, other._blocks, strict=True):
            for x in block.left:
                for y in block.right:
                    theirs_x, theirs_y = other._layers[x], other._layers[y]
                    part = theirs_x.rebased(self._layers[x], addend.pair(x, y).to(block.sums.device))
                    block.pair(x, y).add_(theirs_y.rebased(self._layers[y], part.T).T)
        self._batches += other._batches

    def _side(self, layer: _Layer) -> CovarianceSide:
        if layer.name not in self._sides:
            if not bool(torch.isfinite(layer.own.sum())):
                raise ValueFault(
                    f"layer {layer.name!r} gave NaN or Inf; mend the model or leave out the examples that cause them."
                )
            self._sides[layer.name] = layer.side(torch.finfo(self.precision).eps)
        return self._sides[layer.name]

    def _find(self, a: str, b: str) -> tuple[_Block, bool]:
        for name in (a, b):
            if name not in self.names:
                raise UnknownName(f"no layer {name!r} in these moments{did_you_mean(name, self.names)}")
        if not self._layers:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        for turned in (False, True):
            left, right = (b, a) if turned else (a, b)
            for block in self._blocks:
                if left in block.left and right in block.right:
                    return block, turned
        if self._layers[a].n != self._layers[b].n:
            raise NoValue(
                f"layer {a!r} gives {self._layers[a].n:,} rows and layer {b!r} {self._layers[b].n:,} "
                "for the same examples; compare layers of the same size, or choose another shape."
            )
        raise NoValue(f"the pair {a!r}, {b!r} was not collected, or their rows did not pair up batch by batch.")

    # --- folding -------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Take the products of the rows that wait."""
        if not self._waiting[self.names[0]]:
            return
        rows = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in self._waiting.items()}
        lengths = {name: tuple(len(part) for part in parts) for name, parts in self._waiting.items()}
        self._waiting, self._sides = {name: [] for name in self.names}, {}
        if not self._layers:
            self._begin(rows, lengths)
        columns = {name: self._columns(name, matrix) for name, matrix in rows.items()}
        for block in self._blocks:
            block.refuse_unpaired(lengths)
            block.add(columns)
        for name, layer in self._layers.items():
            layer.own += columns[name].T @ columns[name]

    def _begin(self, rows: Mapping[str, Tensor], lengths: Mapping[str, tuple[int, ...]]) -> None:
        extra = 2 if self.debiased else 1
        for name, matrix in rows.items():
            self._layers[name] = _Layer.starting(name, matrix, extra, self.precision)
        for left, right in self.rectangles:
            for length in dict.fromkeys(lengths[name] for name in left):
                here = [name for name in left if lengths[name] == length]
                there = [name for name in right if lengths[name] == length]
                if there:
                    self._blocks.append(_Block.starting(here, there, self._layers))

    def _columns(self, name: str, matrix: Tensor) -> Tensor:
        layer = self._layers[name]
        layer.resolution = max(layer.resolution, torch.finfo(matrix.dtype).eps)
        if self.precision == torch.float64:
            matrix = matrix.to(layer.shift.dtype)
        centred = matrix - layer.shift.to(matrix)
        if not layer.varies or (centred.device.type == "cpu" and _outgrows(centred, layer.scale)):
            self._rescale(layer, power_of_two(centred))
        columns = torch.empty(len(matrix), len(layer.own), dtype=self._product_dtype(matrix), device=centred.device)
        torch.mul(centred, layer.scale, out=columns[:, : layer.width])
        if self.debiased:
            columns[:, -2] = columns[:, : layer.width].square().sum(1)
        columns[:, -1] = 1
        return columns

    def _product_dtype(self, matrix: Tensor) -> torch.dtype:
        return self.precision if self.precision == torch.float32 else summing_dtype(matrix.device)

    def _rescale(self, layer: _Layer, scale: float) -> None:
        """Count a layer in another unit: when it varies for the first time, or outgrows the unit it had."""
        ratio = (scale or 1.0) / layer.scale
        layer.own = _shifted(_shifted(layer.own, None, ratio, self.debiased).T, None, ratio, self.debiased).T
        for block in self._blocks:
            block.rescale(layer.name, ratio, self.debiased)
        layer.scale, layer.varies = scale or 1.0, scale > 0

    # --- files ---------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self._fold()
        tensors = {f"block.{i}": block.sums for i, block in enumerate(self._blocks)}
        for i, layer in enumerate(self._layers.values()):
            tensors |= {f"own.{i}": layer.own, f"shift.{i}": layer.shift}
        header = {
            "rectangles": self.rectangles,
            "precision": "float32" if self.precision == torch.float32 else "float64",
            "debiased": self.debiased,
            "batches": self._batches,
            "layers": [[layer.name, layer.scale, layer.resolution] for layer in self._layers.values()],
            "blocks": [[block.left, block.right] for block in self._blocks],
        }
        return tensors, header

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        rectangles = [(left, right) for left, right in header["rectangles"]]
        statistic = cls(rectangles, precision=getattr(torch, header["precision"]), debiased=header["debiased"])
        statistic._batches = header["batches"]
        for i, (name, scale, resolution) in enumerate(header["layers"]):
            own, shift = tensors[f"own.{i}"], tensors[f"shift.{i}"]
            statistic._layers[name] = _Layer(name, shift, scale, resolution, own, header["debiased"])
        for i, (left, right) in enumerate(header["blocks"]):
            statistic._blocks.append(_Block(left, right, statistic._layers, tensors[f"block.{i}"]))
        return statistic


class _Layer:
    """One layer's shift, scale and own sums."""

    def __init__(self, name: str, shift: Tensor, scale: float, resolution: float, own: Tensor, debiased: bool):
        self.name, self.shift, self.scale, self.resolution, self.own = name, shift, scale, resolution, own
        self.width, self.debiased = len(shift), debiased
        self.varies = bool(own[: self.width, : self.width].any())  # until then the scale is free

    @classmethod
    def starting(cls, name: str, matrix: Tensor, extra: int, precision: torch.dtype) -> _Layer:
        double = summing_dtype(matrix.device)
        shift = matrix.mean(0, dtype=double)
        if precision == torch.float32:  # what is taken off must be exact in the precision of the products
            shift = shift.to(matrix.dtype).to(double)
        own = torch.zeros(matrix.shape[1] + extra, matrix.shape[1] + extra, dtype=double, device=matrix.device)
        return cls(name, shift, 1.0, torch.finfo(matrix.dtype).eps, own, extra == 2)

    @property
    def n(self) -> int:
        return int(self.own[-1, -1])

    def rebased(self, target: _Layer, sums: Tensor) -> Tensor:
        """Return `sums`, whose rows are this layer's columns, as if taken with the shift and scale of `target`."""
        moved = (self.shift - target.shift.to(self.shift)) * target.scale
        return _shifted(sums, moved.to(sums), target.scale / self.scale, self.debiased)

    def side(self, rounding: float) -> CovarianceSide:
        sums = self.own[: self.width, -1]
        second = self.own[: self.width, : self.width] - torch.outer(sums, self.own[-1, : self.width]) / self.own[-1, -1]
        mean = self.shift.to(sums) + sums / (self.own[-1, -1] * self.scale)
        return CovarianceSide(
            f"layer {self.name!r}", self.n, mean.unsqueeze(0), second.unsqueeze(0), scale=self.scale,
            resolution=self.resolution, rounding=rounding, norm_squares=self._norm_squares() if self.debiased else None,
        )  # fmt: skip

    def _norm_squares(self) -> Tensor:
        back = -self.own[: self.width, -1] / self.own[-1, -1]
        return _shifted(_shifted(self.own, back, 1.0, True).T, back, 1.0, True)[-2, -2]


class _Block:
    """The sums of some layers against some others, filled by one product."""

    def __init__(self, left: list[str], right: list[str], layers: Mapping[str, _Layer], sums: Tensor):
        self.left, self.right, self.sums = left, right, sums
        self._rows, self._columns = _slices(left, layers), _slices(right, layers)

    @classmethod
    def starting(cls, left: list[str], right: list[str], layers: Mapping[str, _Layer]) -> _Block:
        own = [sum(len(layers[name].own) for name in side) for side in (left, right)]
        first = layers[left[0]].own
        return cls(left, right, layers, torch.zeros(own[0], own[1], dtype=first.dtype, device=first.device))

    def pair(self, x: str, y: str) -> Tensor:
        """Return a view of the sums of layer `x` against layer `y`."""
        return self.sums[self._rows[x], self._columns[y]]

    def add(self, columns: Mapping[str, Tensor]) -> None:
        left = _side_by_side(columns, self.left)
        right = left if self.left == self.right else _side_by_side(columns, self.right)
        if left.dtype == self.sums.dtype:
            self.sums.addmm_(left.T, right)
        else:
            self.sums += left.T @ right

    def refuse_unpaired(self, lengths: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if layers that gave the same rows so far gave different ones in some batch."""
        first = self.left[0]
        for name in (*self.left, *self.right):
            if lengths[name] != lengths[first]:
                raise ShapeError(f"layers {first!r} and {name!r} gave different numbers of rows in one batch.")

    def rescale(self, name: str, ratio: float, debiased: bool) -> None:
        if name in self._rows:
            part = self.sums[self._rows[name]]
            part.copy_(_shifted(part, None, ratio, debiased))
        if name in self._columns:
            part = self.sums[:, self._columns[name]]
            part.copy_(_shifted(part.T, None, ratio, debiased).T)


def _shifted(sums: Tensor, shift: Tensor | None, ratio: float, debiased: bool) -> Tensor:
    """Return `sums` with its rows [x, ‖x‖², 1] (or [x, 1]) turned into those of ``ratio · x + shift``."""
    width = len(sums) - (2 if debiased else 1)
    x, one = sums[:width], sums[-1:]
    parts = [x * ratio]
    if shift is not None:
        parts[0] = parts[0] + shift.unsqueeze(1) * one
    if debiased:
        norms = sums[width : width + 1] * ratio**2
        if shift is not None:
            norms = norms + 2 * ratio * (shift @ x).unsqueeze(0) + squared_norm(shift) * one
        parts.append(norms)
    return torch.cat([*parts, one])


def _side_by_side(columns: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([columns[name] for name in names], 1) if len(names) > 1 else columns[names[0]]


def _slices(names: Sequence[str], layers: Mapping[str, _Layer]) -> dict[str, slice]:
    slices, start = {}, 0
    for name in names:
        slices[name] = slice(start, start + len(layers[name].own))
        start = slices[name].stop
    return slices


def _outgrows(centred: Tensor, scale: float) -> bool:
    """Say whether fourth powers of these rows might leave float32."""
    return float(torch.linalg.vector_norm(centred, torch.inf)) * scale > 4096
