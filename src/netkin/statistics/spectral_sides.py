"""One layer in blocks, one for each frequency of its maps: what a pair of `Spectra` holds of either layer."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from netkin.errors import NoValue
from netkin.statistics.frequencies import Frequencies
from netkin.statistics.products import squared_norm
from netkin.statistics.sides import Side


class SpectralSide(Side):
    """A side of streamed spectra; `half` are the second moments of the chosen frequencies, (chosen, c, c).

    Measures see a block for each frequency: the chosen ones first, then their conjugates. Decompositions are taken of
    the half alone.
    """

    lacks = "is held as spectra, which have no rows and no debiasing sums; use the shape 'flatten' for this measure."

    def __init__(
        self,
        name: str,
        n: int,
        mean: Tensor,
        half: Tensor,
        frequencies: Frequencies,
        *,
        scale: float,
        resolution: float,
        rounding: float,
    ):
        self.name, self.n, self.mean, self.scale = name, n, mean, scale
        self.resolution, self.rounding, self._half, self._frequencies = resolution, rounding, half, frequencies
        self.width = half.shape[-1] * math.prod(frequencies.grid)

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid whose frequencies the blocks are."""
        return self._frequencies.grid

    @property
    def block_width(self) -> int:
        return self._half.shape[-1]

    @property
    def in_complex(self) -> SpectralSide:
        """The same side in complex numbers, to meet one that has several frequencies."""
        dtype = torch.complex128 if self._half.dtype in (torch.float64, torch.complex128) else torch.complex64
        facts = {"scale": self.scale, "resolution": self.resolution, "rounding": self.rounding}
        return SpectralSide(self.name, self.n, self.mean.to(dtype), self._half.to(dtype), self._frequencies, **facts)

    @cached_property
    def second(self) -> Tensor:
        return self._frequencies.whole(self._half)

    @property
    def needs_gradient(self) -> bool:
        return self._half.requires_grad

    @property
    def variances(self) -> Tensor:
        return self._frequencies.whole(torch.diagonal(self._half, dim1=-2, dim2=-1)).real

    @cached_property
    def total(self) -> Tensor:
        return self.variances.sum()

    @cached_property
    def squared(self) -> Tensor:
        return squared_norm(self._half) + squared_norm(self._half[self._frequencies.twice])

    @property
    def units(self) -> Tensor:
        raise NoValue(f"{self.name} is held as spectra: a frequency has part in all places, so there are no units.")

    @property
    def norm_squares(self) -> Tensor:
        raise NoValue(f"{self.name} {self.lacks}")

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = torch.linalg.eigh(self._half.detach())
        whole = self._frequencies.whole
        return whole(values.flip(-1).clamp(min=0)), whole(vectors.flip(-1))

    def _varies(self) -> bool:
        """Tell whether any channel moves by more than the rounding of its mean, which a transform spreads evenly."""
        spread = 2 * self.step * self.scale * self.mean.detach().abs().to(self.total)
        noise = self.n * spread.square().mean(0)
        variances = self.variances.detach().to(noise)
        return bool(variances.sum() > len(self.mean) * noise.sum()) or bool((variances > noise).any())
