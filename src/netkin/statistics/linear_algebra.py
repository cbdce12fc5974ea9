"""Matrix products, Gram and kernel matrices of one set of examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.errors import InvalidValue, NoValue
from netkin.results.caveats import Caveat
from netkin.settings import rounded_products

ENTRIES = 2**22  # of a matrix that is made by parts, at a time
CHANCE = 0.1  # the score of unrelated layers from which on CKA with its bias misleads


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


def u_centred(kernel: Tensor) -> Tensor:
    """Return `kernel` with zero diagonal, U-centred in float64 (Song 2012; Székely & Rizzo 2014).

    The mean product of two such matrices is HSIC₁. What is added to all features alike falls out here.
    """
    m, rounding = kernel.shape[-1], torch.finfo(kernel.dtype).eps
    kernel = kernel.to(summing_dtype(kernel.device), copy=True)  # and then in place: copies cost more than the sums
    size = kernel.detach().norm(dim=(-2, -1), keepdim=True)
    diagonal = torch.eye(m, dtype=torch.bool, device=kernel.device)
    sums = kernel.masked_fill_(diagonal, 0).sum(-1, keepdim=True)
    shares = sums / (m - 2) - sums.sum(-2, keepdim=True) / (2 * (m - 1) * (m - 2))
    kernel.sub_(shares).sub_(shares.mT).masked_fill_(diagonal, 0)
    return kernel.mul_(_above_rounding(kernel, size, rounding))


def centred(kernel: Tensor) -> Tensor:
    """Return ``HKH``: `kernel` with the mean of every row and column taken off, in float64."""
    rounding = torch.finfo(kernel.dtype).eps
    kernel = kernel.to(summing_dtype(kernel.device))
    size = kernel.detach().norm(dim=(-2, -1), keepdim=True)
    kernel = (
        kernel - kernel.mean(-1, keepdim=True) - kernel.mean(-2, keepdim=True) + kernel.mean((-2, -1), keepdim=True)
    )
    return kernel * _above_rounding(kernel, size, rounding)


def _above_rounding(kernel: Tensor, size: Tensor, rounding: float) -> Tensor:
    """Return one, or zero where centring has left nothing but rounding."""
    return kernel.detach().norm(dim=(-2, -1), keepdim=True) > 8 * rounding * size


def about_medians(rows: Tensor) -> Tensor:
    """Return rows in float64 about the median of every feature, in a scale in which no square over- or underflows.

    Distances and U-centred Gram matrices do not depend on the point that rows are taken about. About their mean a
    single far example would make all others large, and their small differences would be lost.
    """
    centred = _less_medians(rows)
    return centred * (power_of_two(centred) or 1.0)


def _less_medians(rows: Tensor) -> Tensor:
    rows = rows.to(summing_dtype(rows.device))
    return rows - rows.detach().median(0).values


def _gram_about_medians(rows: Tensor) -> Tensor:
    """Return ``XXᵀ`` of `about_medians`, some features at a time, so that wide layers are not held twice."""
    parts = rows.split(max(1, ENTRIES // len(rows)), dim=1)
    scale = min((power_of_two(_less_medians(part)) or math.inf for part in parts), default=math.inf)
    gram = rows.new_zeros(len(rows), len(rows), dtype=summing_dtype(rows.device))
    for part in parts if scale < math.inf else ():
        part = _less_medians(part) * scale
        gram = gram + part @ part.mT
    return gram


def u_products(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of K̃L̃, K̃² and L̃², the U-centred Gram matrices of two sets of rows, some rows at a time."""
    n, step = len(X), max(1, ENTRIES // len(X))
    shares = []
    for rows in (X, Y):
        sums = torch.cat([_off_diagonal(rows, start, step).sum(1) for start in range(0, n, step)])
        shares.append(sums / (n - 2) - sums.sum() / (2 * (n - 1) * (n - 2)))
    products = []
    for start in range(0, n, step):
        K, L = (
            (_off_diagonal(rows, start, step) - share[start : start + step, None] - share)
            for rows, share in zip((X, Y), shares, strict=True)
        )
        diagonal = torch.arange(start, start + len(K), device=X.device)[:, None] == torch.arange(n, device=X.device)
        K, L = K.masked_fill(diagonal, 0), L.masked_fill(diagonal, 0)
        products.append(torch.stack([(K * L).sum(), K.square().sum(), L.square().sum()]))
    xy, xx, yy = torch.stack(products).sum(0)
    return xy, xx, yy


def _off_diagonal(rows: Tensor, start: int, step: int) -> Tensor:
    """Return some rows of ``XXᵀ`` with zeros on its diagonal."""
    part = rows[start : start + step] @ rows.mT
    places = torch.arange(len(part), device=rows.device)
    return part.index_put((places, places + start), part.new_zeros(()))


def few_for_bias(n: int, chance: float, dimensions: tuple[float, float], debiased: str) -> Caveat | None:
    """Return a caveat if the biased CKA of unrelated layers would be high."""
    if not chance > CHANCE:
        return None
    x, y = dimensions
    sentence = (
        f"{n:,} examples are few for layers of {x:.3g} and {y:.3g} effective dimensions: those with nothing "
        f"in common would score {chance:.2f} on average; use `{debiased}`, or more examples."
    )
    return Caveat(f"few-examples-without-{debiased}", sentence, size=chance)


def rbf_kernel(rows: Tensor, fraction: float) -> Tensor:
    """Return ``exp(-d²/2σ²)`` with σ = `fraction` × the median distance over distinct pairs of rows."""
    if not 0 < fraction < math.inf:
        raise InvalidValue(f"`fraction` must be above 0; got {fraction}.", argument="fraction")
    gram = _gram_about_medians(rows)
    norms = torch.diagonal(gram)
    squares = (norms.unsqueeze(0) + norms.unsqueeze(1) - 2 * gram).clamp(min=0)
    del gram, norms
    distinct = squares[tuple(torch.triu_indices(len(rows), len(rows), 1, device=rows.device))]
    if distinct.numel() == 0:
        raise NoValue("an RBF kernel needs at least two examples; got one.")
    width = median(distinct)  # of the squares: the square of the median, as the root is monotone
    del distinct
    if not float(width.detach()) > 0:
        raise NoValue(
            "more than half of the examples are the same point, so the RBF width is zero; use other examples."
        )
    # bounded, as the narrowest kernels would otherwise divide zero by zero
    return torch.exp(-squares / width * min(0.5 / fraction / fraction, 1e300))


def median(values: Tensor) -> Tensor:
    """Return the square of the median of the roots of `values`, the two middle ones averaged when even in number."""
    middle = len(values) // 2
    upper = torch.kthvalue(values, middle + 1).values
    if len(values) % 2:
        return upper
    return ((torch.kthvalue(values, middle).values.sqrt() + upper.sqrt()) / 2).square()


def offset_is_large(gram: Tensor) -> bool:
    """Return whether the features of a Gram matrix are so far from the origin that float32 would lose their spread."""
    gram = gram.detach()
    offset = float(gram.sum(dtype=summing_dtype(gram.device))) / gram.numel()
    spread = float(torch.diagonal(gram).sum(dtype=summing_dtype(gram.device))) / len(gram) - offset
    # up to here mini-batch CKA of two ResNet-18 is right to 2e-6, on a GPU with inputs of the product in TF32
    return offset > (10 if gram.is_cuda else 1000) * max(spread, 0.0)


def power_of_two(rows: Tensor) -> float:
    """Return the power of two that brings the largest entry of `rows` to between a half and one; 0 if all are zero."""
    largest = float(torch.linalg.vector_norm(rows.detach(), torch.inf))
    lowest = -1000 if rows.dtype == torch.float64 else -120  # a factor that the precision can hold
    return 2.0 ** -max(math.frexp(largest)[1], lowest) if 0 < largest < math.inf else 0.0
