"""What `LayerSpectra` adds up: of each layer its mean map, of each view its own blocks, of each pair the cross blocks.

A view is a layer on a grid: its own, or a smaller one on which it meets smaller maps. Blocks are sums of ``conj(x) yᵀ``
over the examples, of maps shifted by the first examples' mean and scaled by a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.statistics.frequencies import Grid, frequencies, regrouped
from netkin.statistics.kernels import power_of_two
from netkin.statistics.spectral_sides import SpectralSide

Key = tuple[str, Grid]
Blocks = tuple[Tensor, Tensor]  # of one view and some examples, (frequencies, n, c), and their conjugates


class Desk:
    """A place to work on, cleared for each layer: memory asked for anew would cost more than the sums themselves."""

    def __init__(self) -> None:
        self._place = torch.empty(0)

    def difference(self, maps: Tensor, shift: Tensor) -> Tensor:
        """Return ``maps - shift`` until the next one is asked for; a fresh tensor where gradients are wanted."""
        if maps.requires_grad:
            return maps - shift
        place = self._place
        if place.numel() < maps.numel() or (place.dtype, place.device) != (shift.dtype, shift.device):
            place = self._place = torch.empty(maps.numel(), dtype=shift.dtype, device=shift.device)
        return torch.sub(maps, shift, out=place[: maps.numel()].view(maps.shape))


class Layer:
    """One layer's shift and scale, and the sum of its maps about the shift."""

    def __init__(self, shift: Tensor, scale: float = 1.0, resolution: float = 0.0, n: int = 0, varies: bool = False):
        self.shift, self.scale, self.resolution, self.n, self.varies = shift, scale, resolution, n, varies
        self.total = torch.zeros_like(shift)

    @classmethod
    def starting(cls, maps: Tensor, precision: torch.dtype) -> Layer:
        double = summing_dtype(maps.device)
        shift = maps.detach().mean(0, dtype=double)
        if precision == torch.float32:  # what is taken off must be exact in the precision of the products
            shift = shift.to(maps.dtype).to(double)
        return cls(shift)

    @property
    def size(self) -> tuple[int, ...]:
        """The channels and the size of the map."""
        return tuple(self.shift.shape)

    @property
    def space(self) -> Grid:
        return self.size[1:]

    def centred(self, maps: Tensor, precision: torch.dtype, desk: Desk) -> Tensor:
        """Return maps about the shift, in the layer's scale, and count them."""
        self.resolution = max(self.resolution, torch.finfo(maps.dtype).eps)
        centred = desk.difference(maps, self.shift.to(_working(maps, precision)))
        if not self.varies:
            self._take_scale(centred)
        centred = centred if self.scale == 1 else centred * self.scale
        self.total = self.total + centred.sum(0)  # of few examples, so that float32 will do
        self.n += len(maps)
        return centred

    def _take_scale(self, centred: Tensor) -> None:
        """Choose the scale, once the layer varies; ordinary numbers are left as they are."""
        scale = power_of_two(centred)
        self.varies = scale > 0
        if scale and not 2.0**-20 < scale < 2.0**20:
            self.scale = scale

    @property
    def mean_map(self) -> Tensor:
        """The mean of all maps, in their own units."""
        return self.shift + self.total / (self.n * self.scale)

    def moved_to(self, target: Layer) -> Tensor:
        """Return the mean of this layer's maps as `target` sees it."""
        return (self.mean_map.to(target.shift) - target.shift) * target.scale

    def add(self, other: Layer) -> None:
        """Add the sum of another part of the data."""
        self.total = self.total + other.n * other.moved_to(self)
        self.n, self.resolution = self.n + other.n, max(self.resolution, other.resolution)


class View:
    """A layer on a grid, and its own blocks."""

    def __init__(self, layer: Layer, grid: Grid, own: Tensor | None = None):
        self.layer, self.frequencies = layer, frequencies(grid, layer.shift.device)
        self.width = math.prod(layer.size) // math.prod(grid)
        self.own = layer.shift.new_zeros(len(self.frequencies), self.width, self.width, dtype=self.dtype)
        if own is not None:
            self.own = own

    @property
    def dtype(self) -> torch.dtype:
        """That of the sums: complex where there is a grid."""
        return self.layer.shift.dtype.to_complex() if self.frequencies.grid else self.layer.shift.dtype

    def take(self, centred: Tensor) -> Blocks:
        """Add the own blocks of some examples, and return their transform."""
        blocks = self.frequencies.blocks(regrouped(centred, self.frequencies.grid))
        if not self.frequencies.grid:
            blocks = blocks.clone()  # they still lie on the desk
        conjugate = blocks.conj().resolve_conj()
        add_product(self.own, conjugate, blocks)
        return blocks, conjugate

    def spectrum(self, one: Tensor) -> Tensor:
        """Return the transform of a single map, (frequencies, c)."""
        return self.frequencies.blocks(regrouped(one.unsqueeze(0), self.frequencies.grid))[:, 0]

    @property
    def centred(self) -> Tensor:
        """The own blocks about the mean."""
        total = self.spectrum(self.layer.total)
        return self.own - outer(total, total) / self.layer.n

    def side(self, name: str, rounding: float) -> SpectralSide:
        """Return the view as a side of `Spectra`."""
        mean = self.frequencies.whole(self.spectrum(self.layer.mean_map))
        return SpectralSide(
            name, self.layer.n, mean, self.centred, self.frequencies,
            scale=self.layer.scale, resolution=self.layer.resolution, rounding=rounding,
        )  # fmt: skip

    def add(self, other: View) -> None:
        """Add the blocks of another part of the data, whose layer is not yet added to this one's."""
        ratio, moved = self.layer.scale / other.layer.scale, self.spectrum(other.layer.moved_to(self.layer))
        self.own += ratio**2 * other.centred.to(self.own) + other.layer.n * outer(moved, moved)


class Cross:
    """The blocks of some layers, all of one size, against some others."""

    def __init__(
        self, left: Sequence[Key], right: Sequence[Key], views: Mapping[Key, View], sums: Tensor | None = None
    ):
        self.left, self.right = list(left), list(right)
        self._views = {key: views[key] for key in (*left, *right)}
        # a layer without space meets the zero frequency of a map, and that alone
        self.alone = not (left[0][1] and right[0][1])
        self._rows, self._columns = _slices(left, views), _slices(right, views)
        self.sums = self._zeros() if sums is None else sums

    def _zeros(self) -> Tensor:
        first = self._views[self.left[0]]
        count = 1 if self.alone else len(first.frequencies)
        size = (list(self._rows.values())[-1].stop, list(self._columns.values())[-1].stop)
        return first.own.new_zeros(count, *size, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        x, y = self._views[self.left[0]], self._views[self.right[0]]
        return x.dtype if x.dtype.is_complex else y.dtype

    @property
    def keys(self) -> list[Key]:
        """The views that take part, each once."""
        return list(self._views)

    def find(self, a: str, b: str) -> tuple[Key, Key] | None:
        """Return the views by which the layers `a` and `b` meet here, if they do."""
        left = next((key for key in self.left if key[0] == a), None)
        right = next((key for key in self.right if key[0] == b), None)
        return (left, right) if left and right else None

    def add(self, taken: Mapping[Key, Blocks]) -> None:
        """Add the products of some examples."""
        left = [taken[key][1] for key in self.left]
        right = [taken[key][0] for key in self.right]
        add_product(self.sums, self._side_by_side(left), self._side_by_side(right))

    def _side_by_side(self, blocks: list[Tensor]) -> Tensor:
        together = torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
        together = together[:1] if self.alone else together
        return together.to(together.dtype.to_complex()) if self.dtype.is_complex else together

    def pair(self, x: Key, y: Key) -> Tensor:
        """Return a view of the sums of one layer against another."""
        return self.sums[:, self._rows[x], self._columns[y]]

    def _centred(self, x: Key, y: Key) -> Tensor:
        """Return the chosen blocks of one layer against another, about their means."""
        total_x, total_y = (self._spectrum(key, self._views[key].layer.total) for key in (x, y))
        return self.pair(x, y) - outer(total_x, total_y) / self._views[x].layer.n

    def _spectrum(self, key: Key, one: Tensor) -> Tensor:
        spectrum = self._views[key].spectrum(one)
        return spectrum[:1] if self.alone else spectrum

    def whole(self, x: Key, y: Key) -> Tensor:
        """Return the blocks of one layer against another for all frequencies."""
        chosen = self._centred(x, y)
        if not self.alone:
            return self._views[x].frequencies.whole(chosen)
        count = math.prod(x[1] or y[1])
        return torch.cat([chosen, chosen.new_zeros(count - 1, *chosen.shape[1:])])

    def merge(self, other: Cross) -> None:
        """Add the blocks of another part of the data, whose layers are not yet added to these."""
        for x in self.left:
            for y in self.right:
                layers = [(self._views[key].layer, other._views[key].layer) for key in (x, y)]
                ratio = math.prod(mine.scale / theirs.scale for mine, theirs in layers)
                moved = [self._spectrum(k, b.moved_to(a)) for k, (a, b) in zip((x, y), layers, strict=True)]
                part = ratio * other._centred(x, y).to(self.sums)
                self.pair(x, y).add_(part + layers[0][1].n * outer(*moved))


def _working(maps: Tensor, precision: torch.dtype) -> torch.dtype:
    """Return the precision to work in: never less than the data's own."""
    double = summing_dtype(maps.device)
    return double if precision == torch.float64 else torch.promote_types(maps.dtype, torch.float32)


def add_product(sums: Tensor, conjugate: Tensor, blocks: Tensor) -> None:
    """Add the products of (frequencies, n, c) blocks over their examples to `sums`."""
    if conjugate.dtype == sums.dtype:
        sums.baddbmm_(conjugate.mT, blocks)
    else:
        sums += torch.bmm(conjugate.mT, blocks)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Return ``conj(x) yᵀ`` for each block."""
    return x.conj().unsqueeze(-1) * y.unsqueeze(-2)


def _slices(keys: Sequence[Key], views: Mapping[Key, View]) -> dict[Key, slice]:
    slices, start = {}, 0
    for key in keys:
        slices[key] = slice(start, start + views[key].width)
        start = slices[key].stop
    return slices
