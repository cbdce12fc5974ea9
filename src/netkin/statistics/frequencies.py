"""Frequencies: a feature map in the basis in which shifting it round its grid is a multiplication.

The maps of a layer are n × c × space. The discrete Fourier transform of every channel, scaled to keep lengths, gives
for each frequency k of the grid a complex matrix n × c. Of real maps those of k and -k are conjugate, so half are
computed.

Two maps of different sizes, 8 × 8 and 4 × 4 say, are shifted alike by steps of two places in the one and one in the
other. `regrouped` turns the larger into a 4 × 4 map of four times the channels, one for each place within a step. Up to
a unitary map that puts all frequencies equal modulo 4 into one block, see `docs/decisions/0007-common-frequencies.md`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netkin.arrays import as_maps, summing_dtype
from netkin.errors import NoValue
from netkin.statistics.collector import shape_in_words
from netkin.statistics.linear_algebra import power_of_two

Grid = tuple[int, ...]  # the size of a map; empty for a layer without space


@dataclass(frozen=True)
class Frequencies:
    """The frequencies of one grid, one of each conjugate pair; the first is zero."""

    grid: Grid
    chosen: Tensor  # their places in the transform of a real map, laid out flat
    twice: Tensor  # which of the chosen stand for a pair

    def __len__(self) -> int:
        return len(self.chosen)

    def blocks(self, maps: Tensor) -> Tensor:
        """Return the transform of maps n × c × grid as (chosen frequencies, n, c)."""
        if not self.grid:
            return maps.unsqueeze(0)
        transform = torch.fft.rfftn(maps, dim=tuple(range(2, maps.ndim)), norm="ortho")
        return transform.flatten(2).permute(2, 0, 1).index_select(0, self.chosen)

    def whole(self, blocks: Tensor) -> Tensor:
        """Return blocks of the chosen frequencies and then those of their conjugates: one a place of the grid."""
        return torch.cat([blocks, blocks[self.twice].conj()]) if len(self.twice) else blocks

    def total(self, squares: Tensor) -> Tensor:
        """Return the sum over all frequencies of real numbers that are alike for k and -k, one for each chosen one."""
        return squares.sum() + squares[self.twice].sum()


@functools.cache
def frequencies(grid: Grid, device: torch.device) -> Frequencies:
    """Return the frequencies of `grid`, with their places on `device`."""
    if not grid:
        places = torch.zeros(1, dtype=torch.long, device=device)
        return Frequencies(grid, places, places[:0])
    half = (*grid[:-1], grid[-1] // 2 + 1)
    places = torch.cartesian_prod(*(torch.arange(size) for size in half)).reshape(-1, len(grid))
    opposite = -places % torch.tensor(grid)
    number, opposite_number = _number(places, grid), _number(opposite, grid)
    # a conjugate that lies in the half as well is left out, the lower number stays
    chosen = torch.nonzero((number <= opposite_number) | (opposite[:, -1] >= half[-1])).flatten()
    twice = torch.nonzero((number != opposite_number)[chosen]).flatten()
    return Frequencies(grid, chosen.to(device), twice.to(device))


def common_grid(a: Grid, b: Grid) -> Grid | None:
    """Return the grid on which maps of two sizes are shifted alike; None if on some axis neither divides the other.

    A layer without space has the empty grid in common with every other: its values do not move when an image does.

    Example:
        >>> common_grid((8, 8), (4, 4)), common_grid((8, 4), (4, 8)), common_grid((6, 6), (4, 4))
        ((4, 4), (4, 4), None)
    """
    if not a or not b:
        return ()
    if len(a) != len(b) or any(max(pair) % min(pair) for pair in zip(a, b, strict=True)):
        return None
    return tuple(map(min, a, b))


def mismatch_in_words(a: str, size_a: Grid, b: str, size_b: Grid) -> str:
    """Return why two layers share no frequencies, and what to do."""
    return (
        f"{a} has maps of {shape_in_words(size_a)} and {b} of {shape_in_words(size_b)}, of which neither divides the "
        """other, so they share no frequencies; say resize="average" to average maps down to one size."""
    )


def placed(maps: Tensor) -> Tensor:
    """Return maps with their space; those of a single place are a layer without space, n × c."""
    return maps.flatten(1) if math.prod(maps.shape[2:]) == 1 else maps


def regrouped(maps: Tensor, grid: Grid) -> Tensor:
    """Return maps n × c × space as maps on a smaller `grid`, every place within a step a channel of its own.

    Example:
        >>> regrouped(torch.arange(4.0).reshape(1, 1, 2, 2), (1, 2)).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0]
        >>> regrouped(torch.zeros(5, 3, 8, 8), (4, 4)).shape
        torch.Size([5, 12, 4, 4])
    """
    space = tuple(maps.shape[2:])
    if space == grid:
        return maps
    split = [part for size, here in zip(space, grid, strict=True) for part in (here, size // here)]
    places, steps = range(2, 2 + 2 * len(grid), 2), range(3, 3 + 2 * len(grid), 2)
    return maps.reshape(*maps.shape[:2], *split).permute(0, 1, *steps, *places).reshape(len(maps), -1, *grid)


def off_block_share(maps: Any, grid: Grid | None = None) -> float:
    """Return which share of the energy of a layer's covariance, ``‖XᵀX‖²``, lies between different frequencies.

    `maps` are n × c × space, at least 4 of them; `grid` is the one on which the layer is compared, by default its
    own. The covariance itself is never formed: its energy is estimated without bias from the Gram matrix of all
    places, by HSIC₁, and so is that of each frequency; what the few examples alone put off the blocks is left aside.
    Zero for data closed under translation.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> off_block_share(torch.randn(200, 2, 4, 4, generator=draw)) < 0.2
        True
    """
    maps = placed(as_maps(maps, "maps"))
    if len(maps) < 4:
        raise NoValue(f"the energy off the blocks needs at least 4 examples; got {len(maps)}.")
    maps = maps.detach().to(summing_dtype(maps.device))
    maps = (maps - maps.mean(0)) * (power_of_two(maps - maps.mean(0)) or 1.0)
    here = frequencies(tuple(maps.shape[2:]) if grid is None else grid, maps.device)
    whole = float(_energies(maps.flatten(1).unsqueeze(0)))
    blocks = here.blocks(regrouped(maps, here.grid) if here.grid else maps.flatten(1))
    inside = float(here.total(_energies(blocks)))
    return max(0.0, 1 - inside / whole) if whole > 0 else 0.0


def _energies(blocks: Tensor) -> Tensor:
    """Return n(n-3) HSIC₁ of the linear kernel of centred rows (blocks, n, c) with itself (Song et al. 2012, eq. 5).

    About their mean the rows of a Gram matrix add up to zero, so that without its diagonal they add up to minus that.
    """
    n, width = blocks.shape[-2:]
    squares = (blocks.mH @ blocks if width < n else blocks @ blocks.mH).abs().square().sum((-2, -1))
    norms = blocks.abs().square().sum(-1)
    return squares - norms.square().sum(-1) * (1 + 2 / (n - 2)) + norms.sum(-1).square() / ((n - 1) * (n - 2))


def _number(places: Tensor, grid: Grid) -> Tensor:
    """Return the number of each frequency in the order of the full grid."""
    number = torch.zeros(len(places), dtype=torch.long)
    for axis, size in enumerate(grid):
        number = number * size + places[:, axis]
    return number
