"""Singular values of many matrices at once, from eigenvalues of their smaller products wherever these are as exact.

The eigenvalues of ``AAᴴ`` cost a half to a tenth of the singular values of A, and lose the small ones: their error is
that of the largest. Not so if A stands in the principal directions of its layers, falling from the first entry: then
the product is graded, and the reduction that starts from its large corner keeps every eigenvalue about as exact as its
own size. Whether it did is tested by the determinant, which a Cholesky factor gives a second time; matrices that fail
are decomposed themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from netkin.statistics.products import self_product

ERROR = 1e-12  # of the sum of the singular values, from which on a matrix is decomposed itself
COARSE_ERROR = 1e-8  # the same on a GPU
MISMATCH = 1e-3  # of the logarithms of two determinants, above which nothing is known of the error
APART = 1e-7  # of squared singular values, the smallest over the largest, down to which vectors are taken from products


def singular_values(matrices: Sequence[Tensor], graded: bool = True) -> list[Tensor]:
    """Return the singular values of matrices of one shape, each (blocks, m, n), falling.

    `graded` if rows and columns fall from the first on.

    Example:
        >>> singular_values([torch.tensor([[[3.0, 0.0], [0.0, 0.5]]], dtype=torch.float64)])
        [tensor([[3.0000, 0.5000]], dtype=torch.float64)]
    """
    if not (graded or matrices[0].is_cuda) or not _fit_for_products(matrices):
        return [torch.linalg.svdvals(_tall(one)) for one in matrices]
    products = torch.cat([_product(one) for one in matrices])
    values, exact = _roots_on_a_gpu(products) if products.is_cuda else _roots(_without_nothing(products))
    found = list(values.split([len(one) for one in matrices]))
    if not bool(exact.all()):
        for i, exactly in enumerate(exact.split([len(one) for one in matrices])):
            if not bool(exactly.all()):
                found[i] = torch.linalg.svdvals(_tall(matrices[i]))
    return found


def left_vectors(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the left singular vectors (blocks, m, k) and the singular values of each (blocks, m, n), k the smaller."""
    if not _fit_for_products(matrices):
        return [_left_vectors(one) for one in matrices]
    squares, vectors = torch.linalg.eigh(torch.cat([_product(one) for one in matrices]))
    lost = squares[..., 0] <= APART * squares[..., -1]
    sizes, roots, vectors = [len(one) for one in matrices], squares.flip(-1).clamp(min=0).sqrt(), vectors.flip(-1)
    parts = zip(matrices, vectors.split(sizes), roots.split(sizes), lost.split(sizes), strict=True)
    return [_left_vectors(one) if bool(lost.any()) else (_left(one, V, s), s) for one, V, s, lost in parts]


def _roots_on_a_gpu(products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the roots of the eigenvalues, and for which products their sum is right to 1e-8.

    Singular values take seven times as long there, and nothing is known of grading: an eigenvalue is off by a few
    roundings of the largest one, and so its root by that over twice the root.
    """
    squares = torch.linalg.eigvalsh(products).flip(-1).clamp(min=0)
    values, eps = squares.sqrt(), torch.finfo(squares.dtype).eps
    lowest = (eps**0.5 * values[..., :1]).clamp(min=torch.finfo(squares.dtype).tiny)
    error = (2 * eps * squares[..., :1] / (2 * torch.maximum(values, lowest))).sum(-1)
    return values, error <= COARSE_ERROR * values.sum(-1)


def _fit_for_products(matrices: Sequence[Tensor]) -> bool:
    first = matrices[0]
    double = first.dtype in (torch.float64, torch.complex128)
    return double and first.numel() > 0 and not any(one.requires_grad for one in matrices)


def _tall(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transpose where this is not wider: the faster way round for LAPACK."""
    return matrix if matrix.shape[-2] > matrix.shape[-1] else matrix.mH


def _left_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    return vectors, values


def _left(matrix: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    """Return the left vectors, given those of the smaller product."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    return vectors if wide else matrix @ vectors / values.unsqueeze(-2)


def _product(matrix: Tensor) -> Tensor:
    """Return ``AAᴴ`` or ``AᴴA``, whichever is smaller."""
    tall = _tall(matrix)
    if len(tall) == 1 and not tall.is_complex():
        return self_product(tall[0]).unsqueeze(0)
    return tall.mH @ tall if matrix is tall else matrix @ matrix.mH


def _roots(products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the roots of the eigenvalues, falling, and of which products they are as exact as singular values."""
    squares = torch.linalg.eigvalsh(products).flip(-1)
    eps, tiny = torch.finfo(squares.dtype).eps, torch.finfo(squares.dtype).tiny
    values, enough = squares.clamp(min=tiny).sqrt(), ERROR * squares.clamp(min=0).sqrt().sum(-1)
    exact = 4 * eps * squares[..., 0] * (1 / values).sum(-1) <= enough  # if all are off by the rounding of the largest
    if not bool(exact.all()):
        exact[~exact] = _confirmed(products[~exact], values[~exact], enough[~exact])
    return values, exact


def _confirmed(products: Tensor, values: Tensor, enough: Tensor) -> Tensor:
    """Mark the products whose determinant agrees with their singular values, so that the error is small enough."""
    factors, failed = torch.linalg.cholesky_ex(products)
    roots = torch.diagonal(factors, dim1=-2, dim2=-1).real.clamp(min=torch.finfo(values.dtype).tiny)
    apart = 2 * (values.log().sum(-1) - roots.log().sum(-1)).abs()
    # if the smallest square is off by `apart` of itself, the others are off by as much of the smallest one
    error = apart * values.shape[-1] * values[..., -1]
    return (failed == 0) & (apart < MISMATCH) & (error <= enough)


def _without_nothing(products: Tensor) -> Tensor:
    """Return products with rows that are nothing but rounding set to a diagonal as small: dead units, lost ranks."""
    sizes = torch.diagonal(products, dim1=-2, dim2=-1).real
    eps, largest = torch.finfo(sizes.dtype).eps, sizes.amax(-1, keepdim=True)
    kept = sizes > (32 * eps) ** 2 * largest
    if bool(kept.all()):
        return products
    cleared = products * (kept.unsqueeze(-1) & kept.unsqueeze(-2))
    return cleared + torch.diag_embed((~kept * eps**2 * largest).to(cleared.dtype))
