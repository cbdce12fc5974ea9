"""States: what is kept of one layer at one moment of training, enough for every linear measure unchanged by rotation.

Of n rows and d features n × d numbers are kept, as they came. A layer wider than its rows is turned into its row space:
n × n numbers at most, in float64, whose inner products, also with the mean, are the layer's own. So a state takes no
more than n · min(n, d) numbers, however large the feature maps behind it are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from netkin.errors import NoValue, ValueFault
from netkin.statistics.linear_algebra import self_product
from netkin.statistics.row_sides import RowsSide


@dataclass(frozen=True)
class LayerState:
    """One layer at one step: its `rows` up to a rotation, on the CPU, its own `width` and what one example is.

    A layer that held NaN or Inf has no columns, and `fault` says what was found. `resolution` is the rounding unit of
    the data as they came, which the rows no longer show; 0 where they do.
    """

    rows: Tensor
    width: int
    shape: str
    fault: str = ""
    resolution: float = 0.0

    @property
    def bytes(self) -> int:
        """The memory that the rows take."""
        return self.rows.nbytes

    def side(self, name: str) -> RowsSide:
        """Return the layer as one side of a pair, with products in float64."""
        if self.fault:
            raise NoValue(f"{name} {self.fault}")
        return RowsSide(self.rows, name, torch.float64, width=self.width, resolution=self.resolution or None)


def state_of(rows: Tensor, shape: str, resolution: float = 0.0) -> LayerState:
    """Return what is kept of a layer's rows; nothing that shares their memory.

    `resolution` is the rounding unit of the layer's output, where it is not that of the rows.

    Example:
        >>> state = state_of(torch.randn(8, 1000), "flatten")
        >>> tuple(state.rows.shape), state.width
        ((8, 8), 1000)
    """
    count, width = rows.shape
    if not torch.isfinite(rows.sum()):
        wrong = int((~torch.isfinite(rows)).sum())
        if wrong:
            found = f"held {wrong:,} NaN or Inf among {rows.numel():,} values when the probe was taken."
            return LayerState(torch.zeros(count, 0), width, shape, found)
    kept = turned(rows) if width > count else rows.detach().to("cpu", copy=True).contiguous()
    return LayerState(kept, width, shape, resolution=resolution or torch.finfo(rows.dtype).eps)


def bytes_of(count: int, width: int, itemsize: int) -> int:
    """Return the most memory that the state of a layer of `count` rows and `width` features can take."""
    return 8 * count * count if width > count else itemsize * count * width


def turned(rows: Tensor) -> Tensor:
    """Return rows of n numbers at most with the same mean, lengths and angles as `rows`, in float64 on the CPU.

    The mean is taken off and joins the rows as one more, brought to their size, so that a large mean does not drown
    them. Of the n centred rows the last is minus the sum of the others: with A the first n - 1 and the mean, and
    ``AAᵀ = LLᵀ``, the rows of L stand for those of A.
    """
    side = RowsSide(rows.detach().to("cpu") if rows.device.type == "mps" else rows.detach(), precision=torch.float64)
    mean = side.mean * side.scale
    length = float(mean.norm())
    try:
        size = float(side.norm) / len(rows) ** 0.5
    except NoValue:  # a constant layer is nothing but its mean
        return torch.full((len(rows), 1), length / side.scale, dtype=torch.float64)
    weight = size / length if length else 1.0
    centred = side.rows
    gram = _bordered(self_product(centred.mT), centred @ mean.mT * weight, (weight * length) ** 2)
    inside = _factor(gram, side.rounding)
    return ((inside[:-1] + inside[-1:] / weight) / side.scale).contiguous()


def _factor(gram: Tensor, rounding: float) -> Tensor:
    """Return rows with the inner products of n centred rows and one more, on the CPU.

    Where the first n - 1 rows and the one more depend on each other, ``U√Λ`` of ``UΛUᵀ`` takes the place of L.
    """
    count = len(gram) - 1
    free = torch.arange(count + 1, device=gram.device) != count - 1
    factor, failed = torch.linalg.cholesky_ex(gram[free][:, free])
    pivots = torch.diagonal(factor).square()
    if not int(failed) and bool((pivots > count * rounding * torch.diagonal(gram).max()).all()):
        factor = factor.cpu()
        return torch.cat([factor[:-1], -factor[:-1].sum(0, keepdim=True), factor[-1:]])
    values, vectors = torch.linalg.eigh(gram.cpu())
    real = values > count * rounding * values.max()
    return vectors[:, real] * values[real].sqrt()


def _bordered(gram: Tensor, border: Tensor, corner: float) -> Tensor:
    """Return a Gram matrix with one more example, by its products with the others and with itself."""
    last = torch.cat([border.mT, border.new_full((1, 1), corner)], dim=1)
    return torch.cat([torch.cat([gram, border], dim=1), last])


def refuse_unfit(name: str, unchanged_by: frozenset[str], linear: bool) -> None:
    """Refuse a measure that these states don't suffice for."""
    if not linear:
        raise ValueFault(
            f"a recorder keeps what linear measures read, and {name!r} is none; save checkpoints and use `nk.dynamics`."
        )
    if "rotation" not in unchanged_by:
        raise ValueFault(
            f"a recorder keeps each layer up to a rotation, and {name!r} looks at single units; save checkpoints and "
            "use `nk.dynamics`."
        )
