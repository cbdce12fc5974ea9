"""CKA of one batch as a term of a loss: of two layers, or of all pairs of many; finite, with gradients everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from netkin.arrays import at_least_single
from netkin.errors import ShapeError
from netkin.statistics.linear_algebra import centred, u_centred


def batch_cka(X: Tensor, Y: Tensor) -> Tensor:
    """Return the CKA of a batch of rows, as `cka` gives it, without once waiting for the device.

    Of few wide rows, such as whole maps, it is taken from their n × n Gram matrices. Rows that do not vary have none;
    theirs counts as 0, and its gradient is 0 too.
    """
    with torch.autocast(X.device.type, enabled=False):  # it would round the products
        X, Y = (rows.to(at_least_single(rows.dtype)) for rows in (X, Y))
        X, Y = (_unit(rows, rows.mean(0)) for rows in (X, Y))
        if len(X) < max(X.shape[1], Y.shape[1]):
            K, L = X @ X.mT, Y @ Y.mT
            cross = (K * L).sum()
        else:
            K, L = X.mT @ X, Y.mT @ Y
            cross = (X.mT @ Y).square().sum()
        return cross / (K.square().sum() * L.square().sum()).clamp(min=1e-30).sqrt()


def batch_gram(rows: Tensor) -> Tensor:
    """Return ``XXᵀ`` of a batch of rows about their mean, n × n; zeros where they do not vary.

    The mean carries no gradient, as what `gram_cosines` makes of this does not depend on it. Rows of a length between
    1e-18 and 1e18 neither vanish nor overflow.
    """
    with torch.autocast(rows.device.type, enabled=False):
        X = rows.to(at_least_single(rows.dtype))
        mean = X.detach().mean(0)
        gram = _SelfProduct.apply(X - mean)
        # rounding of the mean is no variation
        least = (8 * torch.finfo(X.dtype).eps) ** 2 * len(X) * mean.square().sum()
        return gram * (gram.detach().diagonal().sum() > least)


def gram_cosines(grams: Tensor, debiased: bool = False) -> Tensor:
    """Return the CKA of every pair of layers, L × L, from their Gram matrices over one batch, L × n × n.

    The matrices are centred (with `debiased` U-centred, for `cka_debiased`), flattened and scaled to length one; one
    product has the cosines of all pairs. A layer that does not vary has no CKA: its row is 0, and so is its gradient. A
    layer with itself is exactly 1, without gradient.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> grams = torch.stack([batch_gram(X), batch_gram(3 * X + 5), batch_gram(torch.ones(3, 1))])
        >>> gram_cosines(grams).round(decimals=4).tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if debiased and grams.shape[-1] < 4:
        raise ShapeError(f"the unbiased HSIC needs at least 4 examples; got {grams.shape[-1]}.")
    flat = (u_centred if debiased else centred)(grams).flatten(1)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    unit = flat / torch.where(size > 0, size, torch.inf)
    same = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    return torch.where(same, (size > 0).to(flat.dtype), unit @ unit.mT).to(grams.dtype)


class _SelfProduct(torch.autograd.Function):
    """``XXᵀ``, whose gradient takes one product where that of ``X @ X.mT`` takes two."""

    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        ctx.save_for_backward(X)
        return X @ X.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with torch.autocast(X.device.type, enabled=False):
            return (gradient + gradient.mT) @ X


def _unit(X: Tensor, mean: Tensor) -> Tensor:
    """Return rows about their mean, scaled to length one so that none overflows; zeros if they do not vary."""
    rows = X - mean
    size = torch.linalg.vector_norm(rows.detach())
    offset = len(X) ** 0.5 * torch.linalg.vector_norm(mean.detach())
    # rounding of the mean is no variation: it would be blown up to length one
    varies = size > 8 * torch.finfo(rows.dtype).eps * offset
    return rows / torch.where(varies, size.clamp(min=1e-30), torch.inf)
