"""Aligned directions: which directions of one layer correspond to which of another.

A layer of p neurons over n examples is n × p; a *direction* is a weighted sum of its neurons, and so again one number
for each example. SVCCA keeps the leading principal directions of each layer, finds the pairs of directions within them
that correlate most, and orders the pairs by their correlation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from netkin.arrays import as_matrix, exact_products, summing_dtype
from netkin.errors import InflatedWarning, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.statistics import Moments
from netkin.statistics.covariances import PairSide

RULES = ("variance", "sum")
TIE = 1e-8  # correlations nearer to each other than this are one: rounding alone would order their directions


@dataclass(frozen=True, eq=False, repr=False)
class AlignedSide:
    """One layer's directions, in the layer's own neurons: those paired with the other layer's first, then the rest.

    ``(X - mean) @ transform`` are the directions over the examples of X; over those that the moments came from they
    are orthonormal. `patterns` is how each neuron follows each direction: ``transformᵀ XᵀX`` of the centred examples.
    `kept` is how many principal directions were kept, `variance` the share of the layer's variance that they hold, and
    `singular_values` are all those of the centred layer that are above rounding.
    """

    mean: Tensor
    transform: Tensor
    patterns: Tensor
    singular_values: Tensor
    kept: int
    variance: float
    side: PairSide = field(repr=False)

    @property
    def width(self) -> int:
        return len(self.mean)

    @property
    def n(self) -> int:
        """The number of examples that the directions were found on."""
        return self.side.n

    @property
    def activity(self) -> Tensor:
        """The mean square of every neuron, about the origin."""
        return self.mean.square() + self.side.variances[0].detach().to(self.mean) / (self.n * self.side.scale**2)

    def directions(self, X: Any) -> Tensor:
        """Return the directions over the examples of `X`, n × kept; of pairs the first `len(correlations)` columns."""
        matrix = as_matrix(X, "X").to(self.transform)
        if matrix.shape[1] != self.width:
            raise ShapeError(
                f"`X` has {matrix.shape[1]:,} features and the directions are of a layer with {self.width:,}; "
                "pass the layer that they were found on."
            )
        return (matrix - self.mean) @ self.transform

    def basis(self, k: int) -> Tensor:
        """Return k × p with orthonormal rows that span the weights of the first `k` directions."""
        weights = self.transform[:, : self.require_count(k)]
        return torch.linalg.qr(weights / torch.linalg.vector_norm(weights, dim=0))[0].mT

    def projection(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the maps that project every neuron on the first `k` directions: p × k to them, k × p back.

        Over the examples each neuron becomes the sum of directions that is nearest to it:
        ``mean + (X - mean) @ encode @ decode``, section 2.1 of the SVCCA paper.
        """
        return self.transform[:, : self.require_count(k)], self.patterns[:k]

    def covariance(self, neurons: Tensor) -> Tensor:
        """Return the rows of XᵀX of the centred examples for some neurons."""
        maps = self.side.to_features[0].detach()
        return (maps[:, neurons].mT @ self.side.second[0].detach() @ maps).to(self.mean) / self.side.scale**2

    def require_count(self, k: Any) -> int:
        """Return `k` if there are that many directions."""
        if not isinstance(k, Integral):
            raise InvalidValue(
                f"`k` must be a whole number of directions, up to {self.kept:,}; got {k!r}.", argument="k"
            )
        if not 1 <= int(k) <= self.kept:
            raise InvalidValue(
                f"`k` must lie between 1 and {self.kept:,}, the directions kept of {self.width:,} features; got {k:,}. "
                "A higher `variance` keeps more.",
                argument="k",
            )
        return int(k)

    def __repr__(self) -> str:
        return f"AlignedSide({self.kept} directions of {self.width} features, {100 * self.variance:.2f}% of variance)"


@dataclass(frozen=True, eq=False, repr=False)
class Directions:
    """Pairs of aligned directions of two layers: their correlations, falling, and each side."""

    correlations: Tensor
    x: AlignedSide
    y: AlignedSide

    @property
    def similarity(self) -> float:
        """The mean correlation: the value of `svcca`, or of `svcca_by_sum`."""
        return float(self.correlations.mean())

    def __repr__(self) -> str:
        return f"Directions({len(self.correlations)} pairs, mean correlation {self.similarity:.3f}, {self.x}, {self.y})"


def svcca_directions(X: Any, Y: Any = None, /, *, variance: float = 0.99, by: str = "variance") -> Directions:
    """Return the aligned directions of two layers that SVCCA finds, from the most to the least correlated pair.

    Each layer keeps the fewest principal directions that hold `variance` of Σσ², or with ``by="sum"`` of Σσ, as the
    paper's appendix writes; the mean of the correlations is then `svcca`, or `svcca_by_sum`. ``variance=1`` is plain
    CCA. A side that keeps more directions than the other has the rest of them at the end, uncorrelated with the other
    layer, by falling variance. So are pairs of equal correlation ordered. Signs are such that the neuron that follows a
    direction of X most follows it upwards, and that correlations are positive.

    X and Y are two matrices of the same examples, or X is a `Moments`, for instance ``LayerMoments[a, b]``.

    Example:
        >>> X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        >>> found = svcca_directions(X, 3 * X.flip(1) + 1, variance=1.0)
        >>> [round(value, 6) for value in found.correlations.tolist()]
        [1.0, 1.0, 1.0, 1.0]
    """
    if by not in RULES:
        raise UnknownName(f"`by` is 'variance' (of Σσ²) or 'sum' (of Σσ); got {by!r}.", argument="by")
    with torch.no_grad(), exact_products():
        return _directions(_moments(X, Y), variance, by)


def _moments(X: Any, Y: Any) -> Moments:
    if not isinstance(X, Moments):
        if Y is None:
            raise InvalidValue(f"`svcca_directions` takes two matrices, or one `Moments`; got {type(X).__name__}.")
        X = Moments.of(as_matrix(X, "X").detach(), as_matrix(Y, "Y").detach())
        if X.few_examples:
            warnings.warn(str(X.few_examples), InflatedWarning, stacklevel=3)
    elif Y is not None:
        raise InvalidValue(
            "`svcca_directions` takes two matrices, or one `Moments`; got a `Moments` and something else."
        )
    return X


def _directions(moments: Moments, share: float, by: str) -> Directions:
    if len(moments.x.second) > 1:
        raise NoValue(
            f"directions are found in one block, and these moments have {len(moments.x.second):,}, one for each "
            "frequency; collect with the shape 'flatten', 'positions' or 'pool' instead of 'dft'."
        )
    x, y = (_LeadingDirections(side, share, by) for side in (moments.x, moments.y))
    x.turn, correlations, turned = torch.linalg.svd(moments.mapped(x.whitener[None], y.whitener[None])[0])
    y.turn = turned.mT
    count = len(correlations)
    for tied in ties(correlations):
        tie = slice(tied.start, tied.stop)
        x.rotate(tie)
        y.turn[:, tie] = y.turn[:, tie] @ x.settled
    for side in (x, y):
        side.rotate(slice(count, None))
    sign = x.signs[:count]
    return Directions(correlations.clamp(max=1), x.aligned(sign), y.aligned(sign))


class _LeadingDirections:
    """The kept directions of one layer, whitened, and their rotation towards the other."""

    def __init__(self, side: PairSide, share: float, by: str):
        values, keep = spectrum(side), leading(side, share, by)
        self.side, self.count = side, int(keep.sum())
        self.variance = float(values[keep].sum() / values.sum())
        self.singular_values = values[values > 0].sqrt() / side.scale
        self.whitener = side.whitening(keep)[0].detach()  # coordinates of the second moment to whitened directions
        self.follows = self.whitener.mT @ side.second[0].detach()  # and how the coordinates follow these
        self.turn = torch.eye(self.count).to(self.whitener)
        self.settled = self.turn

    def rotate(self, tie: slice) -> None:
        """Rotate directions with equal correlations so that they fall by the variance of the layer that they carry."""
        carried = self.turn[:, tie].mT @ self.follows
        self.settled = torch.linalg.eigh(carried @ carried.mT)[1].flip(-1)
        self.turn[:, tie] = self.turn[:, tie] @ self.settled

    @property
    def patterns(self) -> Tensor:
        return self.turn.mT @ self.follows @ self.side.to_features[0].detach() / self.side.scale

    @property
    def signs(self) -> Tensor:
        """The sign of the neuron that follows each direction most."""
        patterns = self.patterns
        return patterns.gather(1, patterns.abs().argmax(1, keepdim=True)).sign().flatten()

    def aligned(self, sign: Tensor) -> AlignedSide:
        signs = torch.cat([sign, self.signs[len(sign) :]])
        transform = self.side.to_features[0].detach().mT @ self.whitener @ self.turn * self.side.scale
        return AlignedSide(
            self.side.mean[0].detach().to(transform), transform * signs, self.patterns * signs.unsqueeze(1),
            self.singular_values, self.count, self.variance, self.side,
        )  # fmt: skip


def arccos(cosine: Tensor) -> Tensor:
    """Return the angle whose cosine is given, with the rounding over ±1 taken off; there its gradient is zero."""
    inside = cosine.abs() < 1
    ends = (1 - cosine.sign()) * (math.pi / 2)
    return torch.where(inside, torch.arccos(torch.where(inside, cosine, 0)), ends)


def root(square: Tensor) -> Tensor:
    """Return the square root of what may be a rounding below zero; there its gradient is zero."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


def spectrum(side: PairSide) -> Tensor:
    """Return the eigenvalues of a layer's second moment in its numerical range, (blocks, r), zero elsewhere."""
    values, _ = side.eigen
    return (values * side.kept).to(summing_dtype(values.device))


def holding(weights: Tensor, share: float) -> Tensor:
    """Mark the fewest entries, largest first over all blocks, that hold `share` of the sum of `weights`.

    Example:
        >>> holding(torch.tensor([[6.0, 3.0, 1.0]]), 0.9)
        tensor([[ True,  True, False]])
    """
    ordered, order = weights.flatten().sort(descending=True, stable=True)
    # rounding must not ask for one direction more than the exact sum would
    before = ordered.cumsum(0) - ordered
    needed = before < share * ordered.sum() * (1 - 1e-12)
    needed[0] = True
    return torch.zeros_like(needed).scatter(0, order, needed).reshape(weights.shape)


def leading(side: PairSide, variance: float, by: str = "variance") -> Tensor:
    """Mark the fewest principal directions of a layer, (blocks, r), that hold `variance` of Σσ², or by "sum" of Σσ."""
    if not 0 < variance <= 1:
        raise InvalidValue(f"`variance` must lie above 0 and at most at 1; got {variance}.", argument="variance")

    def cut() -> Tensor:
        values = spectrum(side)
        return holding(values if by == "variance" else values.sqrt(), variance)

    return side.once(("leading", variance, by), cut)


def ties(falling: Tensor) -> Iterator[range]:
    """Yield the stretches of falling correlations that are equal but for rounding, two and more.

    Example:
        >>> list(ties(torch.tensor([1.0, 1.0, 0.6, 0.3, 0.3], dtype=torch.float64)))
        [range(0, 2), range(3, 5)]
    """
    breaks = (falling[:-1] - falling[1:] > TIE).nonzero().flatten().add(1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(falling)], strict=True):
        if stop - start > 1:
            yield range(start, stop)


def partial_roots(side: PairSide, alpha: float, examples: int) -> tuple[Tensor, Tensor]:
    """Return σ of every kept direction after ``αI + (1-α)C^(-1/2)``, (blocks, k), and the layer's size after it."""
    real = side.inverse_roots > 0
    roots = side.eigen[0][..., : real.shape[-1]].sqrt()
    alpha, whole = _shares(side, alpha, examples)
    weights = real * (alpha * roots + whole)
    return weights, weights.square().sum().sqrt()


def _shares(side: PairSide, alpha: float, examples: int) -> tuple[float, float]:
    """Return the factors of the layer as it is and of the whitened layer; a common one cancels later."""
    return alpha / max(1.0, side.scale), (1 - alpha) * min(1.0, side.scale) * math.sqrt(examples)


def partly_whitened(side: PairSide, alpha: float, examples: int) -> tuple[Tensor, Tensor]:
    """Return ``αI + (1-α)C^(-1/2)``, ``C = XᵀX/examples``, on the numerical range of a layer, and its size after it."""
    basis, real = side.spanning(side.kept)
    roots = torch.where(real, side.eigen[0][..., : real.shape[-1]], 1).sqrt()
    alpha, whole = _shares(side, alpha, examples)
    values = alpha + whole / roots
    if not side.needs_gradient:
        return basis * values.unsqueeze(-2), (real * values * roots).square().sum().sqrt()
    # C is diagonal in its own basis: the root's value there, and its derivative by divided differences
    inside = side.inside(basis, real)
    pairs = roots.unsqueeze(-1) * roots.unsqueeze(-2) * (roots.unsqueeze(-1) + roots.unsqueeze(-2))
    change = (inside - torch.diag_embed(roots.square())) / pairs
    within = torch.diag_embed(values) - whole * change
    size = (torch.diagonal(within @ inside @ within, dim1=-2, dim2=-1).real * real).sum().sqrt()
    return basis @ within, size
