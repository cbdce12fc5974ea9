"""One layer as a pair of moments sees it: its mean, its second moment and what follows from them.

A side comes in two forms. `RowsSide` holds the centred rows and takes whichever product is smaller, the covariance
``XᵀX`` or the Gram matrix ``XXᵀ``; where a product has lost the digits of the small directions, it decomposes the rows
themselves. `CovarianceSide` holds moments that were streamed and has no rows any more.
Everything is kept in units of ``1 / scale``, a power of two, so that no square over- or underflows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from netkin.arrays import refuse_non_finite, summing_dtype
from netkin.errors import NoValue
from netkin.statistics.frequencies import Frequencies
from netkin.statistics.products import power_of_two, self_product, squared_norm

Made = TypeVar("Made")

WITHOUT_ROWS = "is held as spectra, which have no rows and no debiasing sums; use the shape 'flatten' for this measure."

AT_ONCE = 32  # layers whose second moments are decomposed in one call

LOST = 2.0**32  # whitening by an eigenvalue of a product costs eps·λmax/λ: from here on over 2e-10 in float64


class Side(ABC):
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
        """The centred second moment, (blocks, r, r), in coordinates that a rotation turns into the units."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """The sum of all centred squares, before anybody asks whether the layer varies."""

    @property
    @abstractmethod
    def squared(self) -> Tensor:
        """``‖XᵀX‖²`` in the Frobenius norm."""

    @property
    @abstractmethod
    def units(self) -> Tensor:
        """The map from the coordinates of `second` to the layer's own units, (blocks, r, width)."""

    @property
    @abstractmethod
    def norm_squares(self) -> Tensor:
        """``Σ ‖xᵢ‖⁴`` over the centred examples."""

    @cached_property
    def trace(self) -> Tensor:
        """The sum of all centred squares; a layer that does not vary is refused here, for every measure alike."""
        if not self.varies:
            raise NoValue(
                f"{self.name} is constant over the {self.n:,} examples (width {self.width:,}); a measure needs a layer "
                "that varies. Pass more or other examples, or leave the layer out."
            )
        return self.total

    @cached_property
    def varies(self) -> bool:
        """Whether any unit moves by more than the rounding of its mean; what every measure but those of means needs."""
        spread = 2 * self.step * self.scale * self.mean.detach().abs().to(self.total)
        noise = self.n * spread.square().mean(0)  # a transform spreads rounding over its frequencies evenly
        if float(self.total.detach()) > len(self.mean) * float(noise.sum()):
            return True
        return bool((self.variances.detach().to(noise) > noise).any())  # one stuck far off must not hide the others

    @property
    def step(self) -> float:
        """The rounding unit at which a unit still counts as constant: halves are exact in float32."""
        return min(self.resolution, torch.finfo(torch.float32).eps)

    @property
    @abstractmethod
    def variances(self) -> Tensor:
        """The sum of centred squares of every unit, (blocks, width)."""

    @property
    def norm(self) -> Tensor:
        return self.trace.sqrt()

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (blocks, r), falling, and eigenvectors (blocks, r, r) of the second moment, without gradient."""
        self.trace  # noqa: B018  refuses a constant layer
        return principal_directions(self.second.detach())

    @cached_property
    def kept(self) -> Tensor:
        """Which eigenvalues stand above rounding: the numerical range, (blocks, r) of booleans."""
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
        size for all entries has no eigenvalue above ``(1 + √(p/n))²`` times that of a single unit (Marchenko & Pastur).
        A unit's noise is at most what it varies: one that is stuck at a large value has none.
        """
        variances = self.variances.detach().to(self.total)
        offsets = self.n * (self.mean.detach().abs().to(variances) * self.scale).square()
        # a transform spreads rounding over its frequencies evenly
        rounded = self.resolution**2 / 3 * (variances + offsets).mean(0)
        loudest = torch.minimum(rounded, variances.mean(0)).max()
        return (1 + math.sqrt(self.block_width / self.n)) ** 2 * float(loudest)

    def loses_digits(self, values: Tensor) -> bool:
        """Say whether eigenvalues of a product, with its rounding, are too far apart to whiten by the smallest kept."""
        kept = values[self.above_rounding(values)]
        return kept.numel() > 0 and float(kept.min()) < LOST * self.rounding * float(kept.max())

    @cached_property
    def condition(self) -> float:
        """The condition number of the layer: how many times its largest kept direction exceeds the smallest."""
        values = self.eigen[0][self.kept]
        return math.sqrt(float(values.max()) / float(values.min()))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` gives, made once for all pairs of this layer that ask by the same key."""
        made = self.__dict__.setdefault("_made", {})
        if key not in made:
            made[key] = make()
        return made[key]

    @property
    def stands_principal(self) -> bool:
        """Whether the coordinates of `second` are the principal directions themselves."""
        return False

    @property
    def decomposed(self) -> bool:
        """Whether the principal directions are known already, without gradient."""
        return ("eigen" in self.__dict__ or self.stands_principal) and not self.needs_gradient

    @cached_property
    def inverse_roots(self) -> Tensor:
        """``1/σ`` of every principal direction in the numerical range, zero elsewhere, (blocks, k); no gradient."""
        widest = int(self.kept.sum(-1).max())
        kept, values = self.kept[..., :widest], self.eigen[0][..., :widest]
        return kept * torch.where(kept, values, 1).rsqrt()

    @cached_property
    def loadings(self) -> Tensor:
        """How the units follow the whitened directions, (blocks, k, width)."""
        return self.whitener.mH @ self.second @ self.units

    @cached_property
    def uncentred(self) -> Side:
        """The same layer about the origin instead of its mean."""
        mean = self.mean * self.scale
        second = self.second + self.n * mean.conj().unsqueeze(-1) * mean.unsqueeze(-2)
        return CovarianceSide(
            self.name, self.n, torch.zeros_like(mean), second,
            scale=self.scale, resolution=self.resolution, rounding=self.rounding,
        )  # fmt: skip

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
        basis, kept = self.spanning(keep)
        if not self.needs_gradient:
            values = self.eigen[0][..., : kept.shape[-1]]
            return basis * torch.where(kept, values, 1).rsqrt().unsqueeze(-2)
        return torch.linalg.solve_triangular(self.factor(basis, kept), basis, upper=True, left=False)

    def spanning(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the directions marked in `keep`, (blocks, r, k), and which of these k columns are real.

        The span of the kept directions turns with the data; to first order by ``V⊥ (V⊥ᵀ C V) / (λ - λ⊥)``, written out
        here so that the derivative divides by the gap at the cut alone and not by gaps between kept directions.
        """
        values, vectors = self.eigen
        widest = int(keep.sum(-1).max())
        kept = keep[..., :widest]
        basis = vectors[..., :widest] * kept.unsqueeze(-2)
        if self.needs_gradient:
            gaps = values[..., None, :widest] - values[..., :, None]
            across = (self.kept & ~keep).unsqueeze(-1) & kept.unsqueeze(-2)
            basis = basis + vectors @ ((vectors.mH @ self.second @ basis) / torch.where(across, gaps, torch.inf))
        return basis, kept

    def factor(self, basis: Tensor, kept: Tensor) -> Tensor:
        """Return the upper triangular R for which ``RᴴR`` is the second moment in the coordinates of `basis`."""
        return torch.linalg.cholesky(self.inside(basis, kept)).mH

    def inside(self, basis: Tensor, kept: Tensor) -> Tensor:
        """Return the second moment in the coordinates of `basis`, (blocks, k, k); ones where a column is not real."""
        inside = basis.mH @ self.second @ basis
        ones = torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device)
        return torch.where(kept.unsqueeze(-1) & kept.unsqueeze(-2), inside, ones)


class RowsSide(Side):
    """A side that still has its rows.

    Of a layer wider than its rows only the Gram matrix is kept beside the rows as they came: a centred copy would
    double the memory, and is made again when the units themselves are asked for. `width` is the layer's own where `X`
    holds its rows turned into their row space; such a side has no units.
    """

    def __init__(
        self,
        X: Tensor,
        name: str = "`X`",
        precision: torch.dtype | None = None,
        centred: bool = True,
        width: int | None = None,
        resolution: float | None = None,
    ):
        self.name, self.n = name, len(X)
        self.width = self.block_width = width or X.shape[1]
        self.resolution = resolution or torch.finfo(X.dtype).eps
        self._X, self._precision = X, precision or X.dtype
        self.rounding = torch.finfo(self._precision).eps
        self.mean = self._mean() if centred else X.new_zeros(1, X.shape[1], dtype=self._precision)
        self.scale, self._shift = 1.0, self.mean
        self._left: Tensor | None = None
        self._rows: Tensor | None = self._centred()
        self._norm = torch.linalg.vector_norm(self._rows)
        if centred:
            self._recentre()
        if not 1e-12 < float(self._norm.detach()) < 1e15:
            self._rescale()
        if self.is_wide and not X.requires_grad:
            self._rows = None

    def _mean(self) -> Tensor:
        X = self._X.to(self._precision)
        mean = X.mean(0, keepdim=True)
        if not bool(torch.isfinite(mean.detach().sum())):
            refuse_non_finite(self._X, self.name)
            mean = (X / self.n).sum(0, keepdim=True)  # finite values whose sum overflowed
        return mean

    def _recentre(self) -> None:
        """Take off what rounding has left of the mean, where that is not negligible: units stuck at large values."""
        left = self.rows.detach().mean(0, keepdim=True)
        if self.n * float(squared_norm(left)) > 1e-10 * float(self._norm.detach()) ** 2:
            self._left, self.mean = left, self.mean + left
            self._rows = self.rows - left
            self._norm = torch.linalg.vector_norm(self._rows)

    def _centred(self) -> Tensor:
        rows = self._X.to(self._precision) - self._shift
        return rows if self._left is None else rows - self._left

    def _rescale(self) -> None:
        scale = power_of_two(self.rows)
        if scale:
            self.scale = scale
            self._rows = self.rows * self.scale
            self._norm = torch.linalg.vector_norm(self._rows)

    @property
    def rows(self) -> Tensor:
        """The rows, centred and scaled."""
        if self._rows is not None:
            return self._rows
        rows = self._centred()
        return rows if self.scale == 1 else rows * self.scale

    @property
    def is_wide(self) -> bool:
        return self.width > self.n

    @property
    def stands_principal(self) -> bool:
        return self.is_wide and not self._X.requires_grad

    @property
    def total(self) -> Tensor:
        return self._norm.to(summing_dtype(self._norm.device)).square()

    @cached_property
    def gram(self) -> Tensor:
        """``XXᵀ`` of the centred rows, n × n."""
        return self_product(self.rows.mT)

    @property
    def variances(self) -> Tensor:
        return self.rows.square().sum(0, keepdim=True)

    @cached_property
    def uncentred(self) -> RowsSide:
        """The same rows about the origin instead of their mean."""
        return RowsSide(
            self._X, self.name, self._precision, centred=False, width=self.width, resolution=self.resolution
        )

    @cached_property
    def squared(self) -> Tensor:
        return squared_norm(self.gram if self.is_wide else self.second)

    @cached_property
    def row_norms(self) -> Tensor:
        """The squared length of every centred row."""
        norms = torch.diagonal(self.gram) if self.is_wide else self.rows.square().sum(1)
        return norms.to(summing_dtype(norms.device))

    @property
    def norm_squares(self) -> Tensor:
        return self.row_norms.square().sum()

    @cached_property
    def coordinates(self) -> Tensor:
        """The rows, in their own row space if there are fewer of them than units: ``U√Λ``, with ``XXᵀ = UΛUᵀ``."""
        if not self.is_wide:
            return self.rows
        if self._X.requires_grad:
            return self.rows @ self.units[0].mT
        values, vectors = self._row_space
        return vectors * values.sqrt()

    @cached_property
    def second(self) -> Tensor:
        if self.stands_principal:
            return torch.diag(self._row_space[0]).unsqueeze(0)
        return self_product(self.coordinates).unsqueeze(0)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        if self.stands_principal:
            values = self._row_space[0]
            return values.unsqueeze(0), torch.eye(self.n, dtype=values.dtype, device=values.device).unsqueeze(0)
        values, vectors = super().eigen
        if not self.loses_digits(values):
            return values, vectors
        roots, turned = torch.linalg.svd(triangular(self.coordinates.detach().mT))[1:]
        return roots.square().unsqueeze(0), turned.mT.unsqueeze(0)

    @cached_property
    def whitened(self) -> Tensor:
        """The rows after the whitener, n × rank: orthonormal columns that span the layer's numerical range."""
        return self.coordinates @ self.whitener[0]

    def factor(self, basis: Tensor, kept: Tensor) -> Tensor:
        return torch.linalg.qr(self.coordinates @ basis[0])[1].unsqueeze(0)

    @cached_property
    def units(self) -> Tensor:
        if not self.is_wide:
            return torch.eye(self.width, dtype=self.rows.dtype, device=self.rows.device).unsqueeze(0)
        values, vectors = self._row_space
        real = values > self.n * self.rounding * values.max()
        turned = torch.where(real, vectors / values.sqrt(), 0)
        basis = turned[:, real] if self._X.requires_grad else turned
        return (basis.mT @ self.rows.detach()).unsqueeze(0)

    @cached_property
    def _row_space(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, falling, and eigenvectors of the Gram matrix, without gradient."""
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = torch.linalg.eigh(self.gram.detach())
        values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
        if not self.loses_digits(values) or int(self.above_rounding(values).sum()) >= self.n - 1:
            return values, vectors  # every direction that n examples have is kept: which is which does not matter
        vectors, roots, _ = torch.linalg.svd(triangular(self.rows.detach()).mT)
        return roots.square(), vectors


class CovarianceSide(Side):
    """A side of streamed moments: `second` (blocks, c, c).

    With `frequencies` its blocks are the chosen ones of a grid. Measures see a block for each frequency: the chosen
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
        self.lacks = Side.lacks if frequencies is None else WITHOUT_ROWS

    def whole(self, blocks: Tensor) -> Tensor:
        """Return blocks of the chosen frequencies with those of their conjugates."""
        return self.frequencies.whole(blocks) if self.frequencies else blocks

    @property
    def in_complex(self) -> CovarianceSide:
        """The same side in complex numbers, to meet one that has several frequencies."""
        made = copy(self)
        made.mean, made.chosen = (
            self.mean.to(self.mean.dtype.to_complex()),
            self.chosen.to(self.chosen.dtype.to_complex()),
        )
        return made

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
    def units(self) -> Tensor:
        if self.frequencies:
            raise NoValue(f"{self.name} is held as spectra: a frequency has part in all places, so there are no units.")
        return torch.eye(self.width, dtype=self.chosen.dtype, device=self.chosen.device).expand_as(self.chosen)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = principal_directions(self.chosen.detach())
        return self.whole(values), self.whole(vectors)


def principal_directions(second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of second moments (..., r, r), falling, and their eigenvectors."""
    values, vectors = torch.linalg.eigh(second)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


def decompose(sides: Iterable[Side]) -> None:
    """Find the principal directions of streamed layers, of those of one width together; others find their own."""
    alike: dict[Any, list[CovarianceSide]] = {}
    for side in dict.fromkeys(sides):
        if isinstance(side, CovarianceSide) and not side.needs_gradient and not side.decomposed and side.varies:
            alike.setdefault((side.chosen.shape, side.chosen.dtype, side.chosen.device), []).append(side)
    for group in alike.values():
        for at in range(0, len(group), AT_ONCE):
            some = group[at : at + AT_ONCE]
            values, vectors = principal_directions(torch.stack([side.chosen for side in some]))
            for side, *found in zip(some, values, vectors, strict=True):
                side.__dict__["eigen"] = tuple(map(side.whole, found))


def triangular(rows: Tensor) -> Tensor:
    """Return the triangular R with ``RᵀR = XXᵀ`` without taking the product, of n × p rows with n ≤ p, by parts."""
    factor = rows.new_zeros(0, len(rows))
    for part in rows.split(max(4 * len(rows), 1024), dim=1):
        factor = torch.linalg.qr(torch.cat([factor, part.mT]), mode="r")[1]
    return factor
