"""Products of matrices with themselves, and sums of squares."""

from __future__ import annotations

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.settings import rounded_products


def self_product(matrix: Tensor) -> Tensor:
    """Return ``AᵀA``, a large one on the CPU by quarters, so that entries above the diagonal are not computed twice.

    The long axis is cut into as many parts as there are threads and more, since threads that share one product of few
    columns wait for each other: together a quarter less time than the plain product of 65,536 × 128.
    """
    length, width = matrix.shape
    if matrix.requires_grad or matrix.device.type != "cpu" or length * width**2 < 2**24:
        return matrix.mT @ matrix
    parts = max(8, torch.get_num_threads())
    whole, rest = matrix[: length - length % parts].unflatten(0, (parts, -1)), matrix[length - length % parts :]
    product, step = matrix.new_empty(width, width), -(-width // 4)
    for start in range(0, width, step):
        stop = min(start + step, width)
        block = torch.bmm(whole[..., start:stop].mT, whole[..., :stop]).sum(0)
        product[start:stop, :stop] = block + rest[:, start:stop].mT @ rest[:, :stop]
        product[:start, start:stop] = product[start:stop, :start].mT
    return product


def gram_product(rows: Tensor) -> Tensor:
    """Return ``XXᵀ`` of one mini-batch; of wide layers on a GPU with the inputs of its products rounded to TF32.

    U-centring and sums over all pairs of examples average that rounding away, see `docs/performance.md`; every other
    product keeps full float32.
    """
    if not rows.is_cuda or rows.dtype != torch.float32 or rows.shape[1] < 4096:
        return self_product(rows.mT)
    with rounded_products():
        # the longest products in eight parts: a fifth faster than in one
        parts = 8 if rows.shape[1] % 8 == 0 and rows.shape[1] >= 2**15 else 1
        whole = rows.unflatten(1, (parts, -1)).transpose(0, 1)
        return rows @ rows.mT if parts == 1 else torch.bmm(whole, whole.mT).sum(0)


def squared_norm(matrix: Tensor) -> Tensor:
    """Return the sum of squares of all entries, added up in float64."""
    values = matrix.abs() if matrix.is_complex() else matrix
    return values.to(summing_dtype(values.device)).square().sum()
