"""The covariance of one layer of a pair: its mean, its second moment and what follows from them.

A side comes in two forms. `RowsSide` holds the centred rows, see `netkin.statistics.rows`. `CovarianceSide` holds
moments that were streamed and has no rows any more.
Everything is kept in units of ``1 / scale``, a power of two, so that no square over- or underflows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from netkin.errors import NoValue
from netkin.results.caveats import Caveat
from netkin.statistics.frequencies import Frequencies, frequencies
from netkin.statistics.linear_algebra import squared_norm
from netkin.statistics.storage import Cached

WITHOUT_ROWS = "is held as spectra, which have no rows and no debiasing sums; use the shape 'flatten' for this measure."

COARSE = 1e-4  # the error of a correlation from which on a warning is given
LOST = 2.0**32  # whitening by an eigenvalue of a product costs eps·λmax/λ: from here on over 2e-10 in float64


class PairSide(Cached, ABC):
    """One layer's own moments; matrices have a leading axis of blocks."""

    name: str
    n: int
    width: int
    block_width: int  # the number of features in each block
    scale: float
    mean: Tensor
    resolution: float  # the rounding unit of the data as they came, before halves were raised to float32
    rounding: float  # the rounding unit of the products
    lacks = "was streamed without the debiasing sums; collect with `debiased=True`."

    @property
    @abstractmethod
    def second(self) -> Tensor:
        """The centred second moment, (blocks, r, r), in coordinates that a rotation turns into the features."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """The sum of all centred squares, also of a constant layer."""

    @property
    @abstractmethod
    def squared(self) -> Tensor:
        """``‖XᵀX‖²`` in the Frobenius norm."""

    @property
    @abstractmethod
    def to_features(self) -> Tensor:
        """The map from the coordinates of `second` to the layer's own features, (blocks, r, width)."""

    @property
    @abstractmethod
    def norm_squares(self) -> Tensor:
        """``Σ ‖xᵢ‖⁴`` over the centred examples."""

    @cached_property
    def trace(self) -> Tensor:
        """The sum of all centred squares; a layer that does not vary is refused here, for every measure."""
        if not self.varies:
            raise NoValue(
                f"{self.name} is constant over the {self.n:,} examples (width {self.width:,}); a measure needs a layer "
                "that varies. Pass more or other examples, or leave the layer out."
            )
        return self.total

    @property
    def traces(self) -> Tensor:
        """The sum of the centred squares of each block."""
        return self.variances.to(self.total).sum(-1)

    @cached_property
    def varies(self) -> bool:
        """Whether any feature varies by more than the rounding of its mean, as all measures but those of means need."""
        spread = 2 * self.step * self.scale * self.mean.detach().abs().to(self.total)
        noise = self.n * spread.square().mean(0)  # a transform spreads rounding over its frequencies evenly
        if float(self.total.detach()) > len(self.mean) * float(noise.sum()):
            return True
        return bool((self.variances.detach().to(noise) > noise).any())  # one stuck far off must not hide the others

    @property
    def step(self) -> float:
        """The rounding unit at which a feature still counts as constant: halves are exact in float32."""
        return min(self.resolution, torch.finfo(torch.float32).eps)

    @property
    @abstractmethod
    def variances(self) -> Tensor:
        """The sum of centred squares of every feature, (blocks, width)."""

    @property
    def norm(self) -> Tensor:
        return self.trace.sqrt()

    @property
    @abstractmethod
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (blocks, r), falling, and eigenvectors (blocks, r, r) of the second moment, without gradient."""

    @cached_property
    def kept(self) -> Tensor:
        """Which eigenvalues are above rounding: the numerical range, (blocks, r) of booleans."""
        kept = self.above_rounding(self.eigen[0])
        if not bool(kept.any()):
            raise NoValue(
                f"{self.name} varies by no more than the rounding of its data, {self.resolution:.1g} of their size, so "
                "that nothing is left to whiten. Record it in a higher precision, or take its offset off first."
            )
        return kept

    def above_rounding(self, values: Tensor) -> Tensor:
        """Mark the eigenvalues, (blocks, r), that the rounding of neither products nor data explains."""
        products = max(self.n, self.width) * self.rounding * float(values.max())
        return values > max(products, self.noise)

    @cached_property
    def noise(self) -> float:
        """The largest eigenvalue that the rounding of the data alone may give the second moment.

        It moves an entry x by noise of variance up to ``(eps x)²/12``, of which four times are taken; and noise of one
        size for all entries has no eigenvalue above ``(1 + √(p/n))²`` times that of a single feature (Marchenko &
        Pastur). A feature's noise is at most what it varies: one that is stuck at a large value has none.
        """
        variances = self.variances.detach().to(self.total)
        offsets = self.n * (self.mean.detach().abs().to(variances) * self.scale).square()
        # a transform spreads rounding over its frequencies evenly
        rounded = self.resolution**2 / 3 * (variances + offsets).mean(0)
        loudest = torch.minimum(rounded, variances.mean(0)).max()
        return (1 + math.sqrt(self.block_width / self.n)) ** 2 * float(loudest)

    def loses_digits(self, values: Tensor) -> bool:
        """Return whether a product's eigenvalues, with rounding, are too far apart to whiten by the smallest kept."""
        real = values[self.above_rounding(values)]
        return real.numel() > 0 and float(real.min()) < LOST * self.rounding * float(real.max())

    @cached_property
    def condition(self) -> float:
        """The condition number of the layer: how many times its largest kept direction exceeds the smallest."""
        values = self.eigen[0][self.kept]
        return math.sqrt(float(values.max()) / float(values.min()))

    @property
    def lost_digits(self) -> Caveat | None:
        """A caveat if the products have lost the digits of the layer's small directions, and its rows are gone."""
        return None

    @property
    def stands_principal(self) -> bool:
        """Whether the coordinates of `second` are the principal directions themselves."""
        return False

    @property
    @abstractmethod
    def to_decompose(self) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
        """Shape, dtype and device of the matrix whose eigenvectors are the principal directions; None once found."""

    @staticmethod
    @abstractmethod
    def find_directions(sides: Sequence[Any]) -> None:
        """Find the principal directions of sides of this kind whose matrices have one shape."""

    @property
    def decomposed(self) -> bool:
        """Whether the principal directions are known already, without gradient."""
        return ("eigen" in self.__dict__ or self.stands_principal) and not self.needs_gradient

    @cached_property
    def inverse_roots(self) -> Tensor:
        """``1/σ`` of every principal direction in the numerical range, zero elsewhere, (blocks, k); no gradient."""
        widest = int(self.kept.sum(-1).max())
        real, values = self.kept[..., :widest], self.eigen[0][..., :widest]
        return real * torch.where(real, values, 1).rsqrt()

    @cached_property
    def loadings(self) -> Tensor:
        """How the features follow the whitened directions, (blocks, k, width)."""
        return self.whitener.mH @ self.second @ self.to_features

    @property
    @abstractmethod
    def uncentred(self) -> PairSide:
        """The same layer about the origin instead of its mean."""

    @cached_property
    def rank(self) -> int:
        """How many directions the layer is cut to where it is whitened."""
        return int(self.kept.sum())

    @property
    def needs_gradient(self) -> bool:
        return self.second.requires_grad

    @cached_property
    def whitener(self) -> Tensor:
        """The matrix F (blocks, r, k) for which XF has orthonormal columns, on the numerical range."""
        return self.whitening(self.kept)

    def whitening(self, keep: Tensor) -> Tensor:
        """Return the whitener of the principal directions marked in `keep` (blocks, r); zero columns elsewhere.

        The directions are entered through a basis without gradient and whitened there by a triangular factor: for every
        measure unchanged by rotation the first derivative is exact, and finite where `eigh` alone would divide by zero.
        """
        basis, real = self.spanning(keep)
        if not self.needs_gradient:
            values = self.eigen[0][..., : real.shape[-1]]
            return basis * torch.where(real, values, 1).rsqrt().unsqueeze(-2)
        return torch.linalg.solve_triangular(self.factor(basis, real), basis, upper=True, left=False)

    def spanning(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the directions marked in `keep`, (blocks, r, k), and which of these k columns are real.

        The span of the kept directions turns with the data; to first order by ``V⊥ (V⊥ᵀ C V) / (λ - λ⊥)``, written out
        here so that the derivative divides by the gap at the cut alone and not by gaps between kept directions.
        """
        values, vectors = self.eigen
        widest = int(keep.sum(-1).max())
        real = keep[..., :widest]
        basis = vectors[..., :widest] * real.unsqueeze(-2)
        if self.needs_gradient:
            gaps = values[..., None, :widest] - values[..., :, None]
            across = (self.kept & ~keep).unsqueeze(-1) & real.unsqueeze(-2)
            turning = vectors.mH @ self.second @ basis / torch.where(across, gaps, 1)
            basis = basis + vectors @ torch.where(across, turning, 0)
        return basis, real

    def factor(self, basis: Tensor, real: Tensor) -> Tensor:
        """Return the upper triangular R for which ``RᴴR`` is the second moment in the coordinates of `basis`."""
        return torch.linalg.cholesky(self.inside(basis, real)).mH

    def inside(self, basis: Tensor, real: Tensor) -> Tensor:
        """Return the second moment in the coordinates of `basis`, (blocks, k, k); ones where a column is not real."""
        inside = basis.mH @ self.second @ basis
        ones = torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device)
        return torch.where(real.unsqueeze(-1) & real.unsqueeze(-2), inside, ones)


class CovarianceSide(PairSide):
    """A side of streamed moments: `second` (blocks, c, c).

    With `frequencies` its blocks are the chosen ones of a grid. Measures get a block for each frequency: the chosen
    ones first, then their conjugates. Decompositions are taken of the chosen ones alone.
    """

    def __init__(
        self,
        name: str,
        n: int,
        mean: Tensor,
        second: Tensor,
        *,
        scale: float,
        resolution: float,
        rounding: float,
        norm_squares: Tensor | None = None,
        frequencies: Frequencies | None = None,
    ):
        self.name, self.n, self.mean, self.scale = name, n, mean, scale
        self.resolution, self.rounding, self._norm_squares = resolution, rounding, norm_squares
        self.chosen, self.frequencies, self.block_width = second, frequencies, second.shape[-1]
        self.width = self.block_width * (math.prod(frequencies.grid) if frequencies else 1)
        self.lacks = PairSide.lacks if frequencies is None else WITHOUT_ROWS

    def whole(self, blocks: Tensor) -> Tensor:
        """Return blocks of the chosen frequencies with those of their conjugates."""
        return self.frequencies.whole(blocks) if self.frequencies else blocks

    @property
    def in_complex(self) -> CovarianceSide:
        """The same side in complex numbers, to be paired with one that has several frequencies."""
        made = copy(self)
        made.mean, made.chosen = (tensor.to(tensor.dtype.to_complex()) for tensor in (self.mean, self.chosen))
        return made

    @cached_property
    def uncentred(self) -> CovarianceSide:
        mean = self.mean * self.scale
        second = self.second + self.n * mean.conj().unsqueeze(-1) * mean.unsqueeze(-2)
        return type(self)(
            self.name, self.n, torch.zeros_like(mean), second,
            scale=self.scale, resolution=self.resolution, rounding=self.rounding,
        )  # fmt: skip

    @cached_property
    def on_host(self) -> CovarianceSide:
        """The same side in the memory of the host."""
        norm_squares = None if self._norm_squares is None else self._norm_squares.cpu()
        return CovarianceSide(
            self.name, self.n, self.mean.cpu(), self.chosen.cpu(), scale=self.scale, resolution=self.resolution,
            rounding=self.rounding, norm_squares=norm_squares,
            frequencies=None if self.frequencies is None else frequencies(self.frequencies.grid, torch.device("cpu")),
        )  # fmt: skip

    @property
    def lost_digits(self) -> Caveat | None:
        error = self.rounding * self.condition**2 if self.varies else 0.0
        if error < COARSE:
            return None
        sentence = (
            f"{self.name} has the condition number {self.condition:.0e}: of its smallest directions, read from "
            f"moments, correlations are right to {error:.0e} only; measure its rows, or its leading directions by "
            "`svcca`."
        )
        return Caveat("lost-digits", sentence, size=self.condition)

    @property
    def norm_squares(self) -> Tensor:
        if self._norm_squares is None:
            raise NoValue(f"{self.name} {self.lacks}")
        return self._norm_squares

    @cached_property
    def second(self) -> Tensor:
        return self.whole(self.chosen)

    @property
    def needs_gradient(self) -> bool:
        return self.chosen.requires_grad

    @property
    def variances(self) -> Tensor:
        return self.whole(torch.diagonal(self.chosen, dim1=-2, dim2=-1)).real

    @cached_property
    def total(self) -> Tensor:
        return self.variances.sum()

    @cached_property
    def squared(self) -> Tensor:
        twice = squared_norm(self.chosen[self.frequencies.twice]) if self.frequencies else 0
        return squared_norm(self.chosen) + twice

    @cached_property
    def to_features(self) -> Tensor:
        if self.frequencies:
            raise NoValue(
                f"{self.name} is held as spectra, whose frequencies cover all positions of a map, and has no features."
            )
        return torch.eye(self.width, dtype=self.chosen.dtype, device=self.chosen.device).expand_as(self.chosen)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = principal_directions(self.chosen.detach())
        return self.whole(values), self.whole(vectors)

    @property
    def to_decompose(self) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
        return None if self.decomposed else (self.chosen.shape, self.chosen.dtype, self.chosen.device)

    @staticmethod
    def find_directions(sides: Sequence[Any]) -> None:
        values, vectors = principal_directions(torch.stack([side.chosen for side in sides]))
        for side, *eigen in zip(sides, values, vectors, strict=True):
            side.__dict__["eigen"] = tuple(map(side.whole, eigen))


def principal_directions(second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of second moments (..., r, r), falling, and their eigenvectors."""
    values, vectors = torch.linalg.eigh(second)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)
