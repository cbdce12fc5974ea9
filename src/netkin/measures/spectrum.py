"""Small facts about matrices that several measures use."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.errors import ValueFault
from netkin.statistics.sides import Side

TIE = 1e-8  # correlations nearer to each other than this are one: rounding alone would order their directions


def arccos(cosine: Tensor) -> Tensor:
    """Return the angle whose cosine is given, with the rounding over ±1 taken off; there its gradient is zero."""
    inside = cosine.abs() < 1
    ends = (1 - cosine.sign()) * (math.pi / 2)
    return torch.where(inside, torch.arccos(torch.where(inside, cosine, 0)), ends)


def root(square: Tensor) -> Tensor:
    """Return the square root of what may be a rounding below zero; there its gradient is zero."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


def spectrum(side: Side) -> Tensor:
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


def leading(side: Side, variance: float, by: str = "variance") -> Tensor:
    """Mark the fewest principal directions of a layer, (blocks, r), that hold `variance` of Σσ², or by "sum" of Σσ."""
    if not 0 < variance <= 1:
        raise ValueFault(f"`variance` must lie above 0 and at most at 1; got {variance}.")

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


def partial_roots(side: Side, alpha: float, examples: int) -> tuple[Tensor, Tensor]:
    """Return σ of every kept direction after ``αI + (1-α)C^(-1/2)``, (blocks, k), and the layer's size after it."""
    kept = side.inverse_roots > 0
    roots = side.eigen[0][..., : kept.shape[-1]].sqrt()
    alpha, whole = _shares(side, alpha, examples)
    weights = kept * (alpha * roots + whole)
    return weights, weights.square().sum().sqrt()


def _shares(side: Side, alpha: float, examples: int) -> tuple[float, float]:
    """Return the factors of the layer as it is and of the whitened layer; a common one cancels later."""
    return alpha / max(1.0, side.scale), (1 - alpha) * min(1.0, side.scale) * math.sqrt(examples)


def partly_whitened(side: Side, alpha: float, examples: int) -> tuple[Tensor, Tensor]:
    """Return ``αI + (1-α)C^(-1/2)``, ``C = XᵀX/examples``, on the numerical range of a layer, and its size after it."""
    basis, kept = side.spanning(side.kept)
    roots = torch.where(kept, side.eigen[0][..., : kept.shape[-1]], 1).sqrt()
    alpha, whole = _shares(side, alpha, examples)
    values = alpha + whole / roots
    if not side.needs_gradient:
        return basis * values.unsqueeze(-2), (kept * values * roots).square().sum().sqrt()
    # C is diagonal in its own basis: the root's value there, and its derivative by divided differences
    inside = side.inside(basis, kept)
    pairs = roots.unsqueeze(-1) * roots.unsqueeze(-2) * (roots.unsqueeze(-1) + roots.unsqueeze(-2))
    change = (inside - torch.diag_embed(roots.square())) / pairs
    within = torch.diag_embed(values) - whole * change
    size = (torch.diagonal(within @ inside @ within, dim1=-2, dim2=-1).real * kept).sum().sqrt()
    return basis @ within, size
