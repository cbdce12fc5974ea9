"""Sums of columns: of each layer with itself, and of some layers against some others, filled by one product.

They have two leading axes, chunks of the examples and blocks; see `netkin.statistics.layer_moments`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.statistics.collector import Key, label, summed
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.linear_algebra import squared_norm
from netkin.statistics.statistic import Stored

Parts = list[tuple[int, slice]]  # which rows, sorted by chunk, belong to which chunk
SAMPLE = 256  # rows whose median estimates that of all


class Columns(NamedTuple):
    """Some rows of a layer, (blocks, n, columns), their conjugate, and which of them belong to which chunk.

    The last column is one, unless `totals` hold the sums of the rows of each part, (blocks, parts, width): products of
    16 columns take half the time of those of 17.
    """

    values: Tensor
    conjugate: Tensor
    parts: Parts
    totals: Tensor | None = None

    @property
    def with_ones(self) -> Columns:
        """The same with a column of ones."""
        if self.totals is None:
            return self
        values, conjugate = (torch.nn.functional.pad(one, (0, 1), value=1) for one in (self.values, self.conjugate))
        return Columns(values, conjugate, self.parts)


class LayerSums(Stored):
    """One layer's shift (blocks, width), scale and own sums (chunks, blocks, columns, columns)."""

    stored = ("key", "shift", "scale", "resolution", "own", "width", "debiased", "varies")

    def __init__(self, key: Key, shift: Tensor, scale: float, resolution: float, own: Tensor, debiased: bool):
        self.key, self.shift, self.scale, self.resolution, self.own = key, shift, scale, resolution, own
        self.width, self.debiased = shift.shape[1], debiased
        self.varies = bool(own[..., : self.width, : self.width].any())  # until then the scale is free

    @property
    def counts(self) -> Tensor:
        """The number of rows in each chunk."""
        return self.own[:, 0, -1, -1].real

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    def centred(self, without: int | None) -> tuple[int, Tensor, Tensor]:
        """Return the count, the mean (blocks, width) and the second moment about it, without one chunk."""
        own, width = summed(self.own, without), self.width
        count = own[0, -1, -1].real.detach()
        mean = self.shift.to(own.dtype) + own[:, -1, :width] / (count * self.scale)
        second = own[:, :width, :width] - own[:, :width, -1:] @ own[:, -1:, :width] / count
        return int(count), mean, second

    def side(self, without: int | None, rounding: float) -> CovarianceSide:
        n, mean, second = self.centred(without)
        if without is not None:
            second = self._without_noise(second, summed(self.own, without), rounding)
        return CovarianceSide(
            label(self.key), n, mean, second, scale=self.scale, resolution=self.resolution, rounding=rounding,
            norm_squares=self._norm_squares(without) if self.debiased else None,
        )  # fmt: skip

    def _without_noise(self, second: Tensor, own: Tensor, rounding: float) -> Tensor:
        """Return a second moment without the noise of features that are constant where a chunk is left out."""
        sizes, spreads = (torch.diagonal(one, dim1=-2, dim2=-1)[:, : self.width].real for one in (own, second))
        still = spreads <= 16 * rounding * sizes
        return second.masked_fill(still.unsqueeze(-1) | still.unsqueeze(-2), 0)

    def _norm_squares(self, without: int | None) -> Tensor:
        own = summed(self.own, without)
        back = own[0, : self.width, -1] / own[0, -1, -1]
        return _norm_product(own[0], back, back)


class CrossSums(Stored):
    """The sums of some layers against some others, filled by one product; (chunks, blocks, columns, columns)."""

    stored = ("sums", "keys", "rows", "columns")

    def __init__(self, left: Sequence[Key], right: Sequence[Key], layers: Mapping[Key, LayerSums], sums: Tensor):
        self.sums = sums
        self.rows, self.columns = _slices(left, layers), _slices(right, layers)
        self.keys = list(dict.fromkeys([*left, *right]))

    @classmethod
    def starting(cls, left: Sequence[Key], right: Sequence[Key], layers: Mapping[Key, LayerSums]) -> CrossSums:
        x, y = layers[left[0]].own, layers[right[0]].own
        # a layer without space is paired with the zero frequency of a map only
        blocks, dtype = min(x.shape[1], y.shape[1]), torch.promote_types(x.dtype, y.dtype)
        size = [sum(layers[name].own.shape[-1] for name in side) for side in (left, right)]
        return cls(left, right, layers, torch.zeros(len(x), blocks, *size, dtype=dtype, device=x.device))

    def pair(self, x: Key, y: Key) -> Tensor:
        """Return a view of the sums of layer `x` against layer `y`."""
        return self.sums[..., self.rows[x], self.columns[y]]

    def centred(self, x: Key, y: Key, without: int | None, debiased: bool) -> tuple[Tensor, Tensor | None]:
        """Return the cross moment about the means, (blocks, p, q), and ``Σ ‖x‖²‖y‖²`` about them if it is kept."""
        sums, extra = summed(self.pair(x, y), without), 2 if debiased else 1
        count = sums[0, -1, -1].real
        cross = sums[:, :-extra, :-extra] - sums[:, :-extra, -1:] @ sums[:, -1:, :-extra] / count
        if not debiased:
            return cross, None
        return cross, _norm_product(sums[0], sums[0, :-extra, -1] / count, sums[0, -1, :-extra] / count)

    def add(self, held: Mapping[Key, Columns]) -> None:
        """Add the products of the columns `held`, chunk by chunk."""
        x, y = ([held[key] for key in side] for side in (self.rows, self.columns))
        totals: list[Tensor] = []
        if len(x) == len(y) == 1 and x[0].totals is not None and y[0].totals is not None:
            totals = [self._side_by_side([one]) for one in (x[0].totals.conj(), y[0].totals)]
        else:
            x, y = ([one.with_ones for one in side] for side in (x, y))
        left = self._side_by_side([one.conjugate for one in x])
        same = self.rows == self.columns and not left.is_complex()
        right = left if same else self._side_by_side([one.values for one in y])
        for i, (chunk, rows) in enumerate(x[0].parts):
            add_product(self.sums[chunk], left[:, rows], right[:, rows], [one[:, i] for one in totals])

    def _side_by_side(self, columns: list[Tensor]) -> Tensor:
        together = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
        together = together[: self.sums.shape[1]]
        return together.to(together.dtype.to_complex()) if self.sums.is_complex() else together

    def split(self, groups: Mapping[Key, Any], layers: Mapping[Key, LayerSums]) -> list[CrossSums]:
        """Return this block, or several where layers that gave the same rows so far give different ones from now on."""
        found = dict.fromkeys(groups[key] for key in self.keys)
        if len(found) == 1:
            return [self]
        sides = [[[key for key in side if groups[key] == one] for side in (self.rows, self.columns)] for one in found]
        return [self._part(left, right, layers) for left, right in sides if left and right]

    def _part(self, left: list[Key], right: list[Key], layers: Mapping[Key, LayerSums]) -> CrossSums:
        rows, columns = (
            torch.cat([torch.arange(side[key].start, side[key].stop) for key in keys]).to(self.sums.device)
            for side, keys in ((self.rows, left), (self.columns, right))
        )
        return CrossSums(left, right, layers, self.sums.index_select(-2, rows).index_select(-1, columns))


def first_shift(rows: Tensor, precision: torch.dtype) -> Tensor:
    """Return what is taken off all rows of a layer: the mean of its first ones, or the median where some are far.

    One far example would draw the mean off all others, and what is left of these without it would be rounding.
    """
    rows, double = rows.detach(), summing_dtype(rows.device)
    few = rows[:: max(1, len(rows) // SAMPLE)]  # medians take far longer than means
    mean, median = rows.mean(0, dtype=double), _medians(few)
    # what is taken off must be exact in the precision of the products
    mean = mean.to(rows.dtype).to(double) if precision == torch.float32 else mean
    spread = _medians((few - median).abs())
    return torch.where((mean - median).abs() > 4 * spread, median.to(double), mean)


def _medians(rows: Tensor) -> Tensor:
    """Return the median of every feature, the lower one of two, as torch does; on the CPU in a quarter of its time."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.median(0).values
    middle = (len(rows) - 1) // 2
    features = np.array(rows.flatten(1).numpy().T, order="C")  # a copy: rows of one feature would be sorted in place
    features.partition(middle, axis=1)
    return torch.from_numpy(features[:, middle].copy()).reshape(rows.shape[1:])


def outgrows(centred: Tensor, scale: float) -> bool:
    """Return whether fourth powers of these rows might leave float32."""
    return float(torch.linalg.vector_norm(centred.detach(), torch.inf)) * scale > 4096


def joined(parts: list[Tensor]) -> Tensor:
    """Return parts of the rows of a layer as one, and let go of them."""
    together = torch.cat(parts) if len(parts) > 1 else parts[0]
    parts.clear()
    return together


def by_chunk(chunks: list[np.ndarray]) -> tuple[Tensor, Parts]:
    """Return the order that sorts rows by their chunk, and where each chunk then lies."""
    every = np.concatenate(chunks)
    order = np.argsort(every, kind="stable")
    found, starts = np.unique(every[order], return_index=True)
    ends = [*starts[1:].tolist(), len(every)]
    parts = [(int(c), slice(a, b)) for c, a, b in zip(found, starts.tolist(), ends, strict=True)]
    return torch.from_numpy(order), parts


def rebased(origin: LayerSums, target: LayerSums, sums: Tensor, left: bool = False) -> Tensor:
    """Return `sums` of the columns (or with `left` the rows) of `origin` with the shift and scale of `target`."""
    if origin.scale == target.scale and torch.equal(origin.shift.to(target.shift), target.shift):
        return sums
    moved = ((origin.shift.to(target.shift) - target.shift) * target.scale)[: sums.shape[-3]].to(sums)
    ratio = target.scale / origin.scale
    if left:
        return _shifted(sums, moved.conj(), ratio, origin.debiased)
    return _shifted(sums.mT, moved, ratio, origin.debiased).mT


def _shifted(sums: Tensor, shift: Tensor, ratio: float, debiased: bool) -> Tensor:
    """Return `sums` (..., blocks, columns, any) with rows [x, ‖x‖², 1] turned into those of ``ratio · x + shift``."""
    width = sums.shape[-2] - (2 if debiased else 1)
    x, one, shift = sums[..., :width, :], sums[..., -1:, :], shift.unsqueeze(-1)
    parts = [x * ratio + shift * one]
    if debiased:
        norms = sums[..., width : width + 1, :] * ratio**2
        parts.append(norms + 2 * ratio * (shift.mT @ x) + squared_norm(shift) * one)
    return torch.cat([*parts, one], -2)


def rescale(layer: LayerSums, blocks: Sequence[CrossSums], scale: float) -> None:
    """Count a layer in another scale, in its own sums and in those of its pairs."""
    key, ratio = layer.key, (scale or 1.0) / layer.scale
    layer.scale, layer.varies = scale or 1.0, scale > 0
    if ratio == 1:
        return
    weights = torch.ones(layer.own.shape[-1], dtype=layer.own.dtype, device=layer.own.device)
    weights[: layer.width] = ratio
    if layer.debiased:
        weights[-2] = ratio**2
    layer.own.mul_(weights.unsqueeze(1)).mul_(weights)
    for block in blocks:
        if key in block.rows:
            block.sums[..., block.rows[key], :] *= weights.unsqueeze(1)
        if key in block.columns:
            block.sums[..., block.columns[key]] *= weights


def _norm_product(sums: Tensor, mean_x: Tensor, mean_y: Tensor) -> Tensor:
    """Return ``Σ ‖x‖²‖y‖²`` about the means, from sums of [x, ‖x‖², 1] against [y, ‖y‖², 1]."""
    x, y = (torch.cat([-2 * mean, mean.new_ones(1), squared_norm(mean)[None].to(mean)]) for mean in (mean_x, mean_y))
    return x @ sums @ y


def add_product(sums: Tensor, conjugate: Tensor, columns: Tensor, totals: Sequence[Tensor] = ()) -> None:
    """Add the products of (blocks, n, columns) over their rows to `sums` (blocks, columns, columns).

    With `totals`, the sums of both over their rows, a last column of ones is not among them and yet counted.
    """
    if totals:
        sums[:, :-1, :-1] += conjugate.mT @ columns
        sums[:, :-1, -1] += totals[0]
        sums[:, -1, :-1] += totals[1]
        sums[:, -1, -1] += columns.shape[1]
        return
    if len(sums) == 1:  # plain products are faster than batches of one
        sums, conjugate, columns = sums[0], conjugate[0], columns[0]
    if conjugate.dtype != sums.dtype:
        sums += conjugate.mT @ columns
    elif sums.ndim == 2:
        sums.addmm_(conjugate.mT, columns)
    else:
        sums.baddbmm_(conjugate.mT, columns)


def common_blocks(
    blocks: Sequence[CrossSums], others: Sequence[CrossSums], layers: Mapping[Key, LayerSums]
) -> list[CrossSums]:
    """Return the pairs of `blocks` that `others` hold as well, as blocks."""
    if [(list(x.rows), list(x.columns)) for x in blocks] == [(list(y.rows), list(y.columns)) for y in others]:
        return list(blocks)
    found = []
    for block in blocks:
        for other in others:
            left, right = [x for x in block.rows if x in other.rows], [y for y in block.columns if y in other.columns]
            found += [block._part(left, right, layers)] if left and right else []
    return found


def _slices(names: Sequence[Key], layers: Mapping[Key, LayerSums]) -> dict[Key, slice]:
    slices, start = {}, 0
    for name in names:
        slices[name] = slice(start, start + layers[name].own.shape[-1])
        start = slices[name].stop
    return slices


def add_sums(
    layers: Mapping[Key, LayerSums], blocks: Sequence[CrossSums], others: Mapping[Key, LayerSums],
    other_blocks: Sequence[CrossSums],
) -> None:  # fmt: skip
    """Add the sums of other data, brought to the shift and scale of these, to layers and blocks of the same pairs."""
    for block, addend in zip(blocks, other_blocks, strict=True):
        for x in block.rows:
            for y in block.columns:
                part = rebased(others[x], layers[x], addend.pair(x, y).to(block.sums), left=True)
                block.pair(x, y).add_(rebased(others[y], layers[y], part))
    for name, mine in layers.items():
        part = rebased(others[name], mine, others[name].own.to(mine.own), left=True)
        mine.own += rebased(others[name], mine, part)
        mine.resolution = max(mine.resolution, others[name].resolution)
