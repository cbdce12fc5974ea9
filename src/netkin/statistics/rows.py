"""Rows of layers, as a pair and as a side of a pair of moments.

`RowsSide` takes whichever product of its rows is smaller, the covariance ``XᵀX`` or the Gram matrix ``XXᵀ``; where a
product has lost the digits of the small directions, it decomposes the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netkin.arrays import paired, require_finite, summing_dtype
from netkin.results.caveats import Caveat
from netkin.statistics.collector import Pair
from netkin.statistics.covariances import PairSide, principal_directions
from netkin.statistics.linear_algebra import centred, few_for_bias, power_of_two, rbf_kernel, self_product, squared_norm
from netkin.statistics.storage import Cached

if TYPE_CHECKING:
    from netkin.statistics.moments import Moments


class SampledRows(Cached):
    """One layer's rows, with the Gram matrix and side that all its pairs share."""

    def __init__(self, X: Tensor, name: str, resolution: float | None = None):
        self.X, self.name, self.resolution = X, name, resolution

    def side(self, precision: torch.dtype | None = None) -> RowsSide:
        """Return the rows as a side of `Moments`, with products in `precision` (None: their own)."""
        return self.once(
            ("side", precision), lambda: RowsSide(self.X, self.name, precision, resolution=self.resolution)
        )

    def centred_kernel(self, centring: Callable[[Tensor], Tensor], fraction: float) -> Tensor:
        """Return the centred RBF kernel of the rows, which all pairs of this layer share."""
        self.side().trace  # noqa: B018  refuses a constant layer
        return self.once((centring, fraction), lambda: centring(rbf_kernel(self.X, fraction)))


class Rows(Pair):
    """A pair of layers, row by row."""

    def __init__(self, x: SampledRows, y: SampledRows):
        self.x, self.y, self.n = x, y, len(x.X)

    @classmethod
    def of(cls, X: Any, Y: Any) -> Rows:
        """Return two matrices whose rows are the same examples as a pair."""
        X, Y = paired(X, Y)
        return cls(SampledRows(X, "`X`"), SampledRows(Y, "`Y`"))

    def caveats(self, facts: Any, settings: Mapping[str, Any]) -> list[Caveat]:
        if not (facts.debiased_as and "fraction" in settings) or self.n < 2:
            return []
        kernels = [sample.centred_kernel(centred, settings["fraction"]).detach() for sample in (self.x, self.y)]
        d, e = (float(torch.trace(K) / K.norm()) ** 2 for K in kernels)  # as of moments, which have C for K
        few = few_for_bias(self.n, (d * e) ** 0.5 / (self.n - 1), (d, e), facts.debiased_as)
        return [] if few is None else [few]

    def moments(self, precision: torch.dtype | None = torch.float64) -> Moments:
        """Return the moments of the pair."""
        from netkin.statistics.moments import Moments  # which reads rows

        return Moments(self.x.side(precision), self.y.side(precision))


class RowsSide(PairSide):
    """A side that still has its rows.

    Of a layer wider than its rows only the Gram matrix is kept beside the rows as they came: a centred copy would
    double the memory, and is made again when `to_features` is requested. `width` is the layer's own where `X` holds its
    rows turned into their row space; such a side has no features.
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
        wanted = precision or X.dtype
        self._X, self._precision = X, summing_dtype(X.device) if wanted == torch.float64 else wanted
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
            require_finite(self._X, self.name)
            mean = (X / self.n).sum(0, keepdim=True)  # finite values whose sum overflowed
        return mean

    def _recentre(self) -> None:
        """Take off what rounding has left of the mean, where that is not negligible: features stuck at large values."""
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

    @property
    def traces(self) -> Tensor:
        return self.total.reshape(1)

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
        """The rows, in their own row space if there are fewer of them than features: ``U√Λ``, with ``XXᵀ = UΛUᵀ``."""
        if not self.is_wide:
            return self.rows
        if self._X.requires_grad:
            return self.rows @ self.to_features[0].mT
        values, vectors = self._row_space
        return vectors * values.sqrt()

    @cached_property
    def second(self) -> Tensor:
        if self.stands_principal:
            return torch.diag(self._row_space[0]).unsqueeze(0)
        return self_product(self.coordinates).unsqueeze(0)

    @property
    def needs_gradient(self) -> bool:
        return self._X.requires_grad

    @property
    def to_decompose(self) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
        if "_row_space" in self.__dict__ or "eigen" in self.__dict__:
            return None
        size = min(self.n, self.width)
        return (1, size, size), self._precision, self._X.device

    @staticmethod
    def find_directions(sides: Sequence[Any]) -> None:
        for side in sides:  # into the dictionary: before Python 3.12 a cached property has one lock for all instances
            if side.stands_principal:
                side.__dict__["_row_space"] = side._find_row_space()
            else:
                side.__dict__["eigen"] = side._find_eigen()

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        return self._find_eigen()

    def _find_eigen(self) -> tuple[Tensor, Tensor]:
        if self.stands_principal:
            values = self._row_space[0]
            return values.unsqueeze(0), torch.eye(self.n, dtype=values.dtype, device=values.device).unsqueeze(0)
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = principal_directions(self.second.detach())
        if not self.loses_digits(values):
            return values, vectors
        roots, turned = torch.linalg.svd(triangular(self.coordinates.detach().mT))[1:]
        return roots.square().unsqueeze(0), turned.mT.unsqueeze(0)

    @cached_property
    def whitened(self) -> Tensor:
        """The rows after the whitener, n × rank: orthonormal columns that span the layer's numerical range."""
        return self.coordinates @ self.whitener[0]

    def factor(self, basis: Tensor, real: Tensor) -> Tensor:
        return torch.linalg.qr(self.coordinates @ basis[0])[1].unsqueeze(0)

    @cached_property
    def to_features(self) -> Tensor:
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
        return self._find_row_space()

    def _find_row_space(self) -> tuple[Tensor, Tensor]:
        self.trace  # noqa: B018  refuses a constant layer
        values, vectors = torch.linalg.eigh(self.gram.detach())
        # what is only rounding is set to zero, as its roots would count; a negative eigenvalue shows how large it is
        noise = torch.maximum(-2 * values[0], 4 * self.rounding * values[-1])
        values, vectors = torch.where(values > noise, values, 0).flip(-1).clamp(min=0), vectors.flip(-1)
        if not self.loses_digits(values) or int(self.above_rounding(values).sum()) >= self.n - 1:
            return values, vectors  # every direction that n examples have is kept: which is which does not matter
        vectors, roots, _ = torch.linalg.svd(triangular(self.rows.detach()).mT)
        return roots.square(), vectors


def triangular(rows: Tensor) -> Tensor:
    """Return the triangular R with ``RᵀR = XXᵀ`` without taking the product, of n × p rows with n ≤ p, by parts."""
    factor = rows.new_zeros(0, len(rows))
    for part in rows.split(max(4 * len(rows), 1024), dim=1):
        factor = torch.linalg.qr(torch.cat([factor, part.mT]), mode="r")[1]
    return factor
