"""Decompositions of many pairs of layers at once: measures declare what they need, and threads share the matrices.

Singular values come from eigenvalues of the smaller products wherever these are as exact. The eigenvalues of ``AAᴴ``
cost a half to a tenth of the singular values of A, and lose the small ones: their error is that of the largest. Not so
if A stands in the principal directions of its layers, falling from the first entry: then the product is graded, and the
reduction that starts from its large corner keeps every eigenvalue about as exact as its own size. Whether it did is
tested by the determinant, which a Cholesky factor gives a second time; matrices that fail are decomposed themselves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.errors import NetkinError, NoValue
from netkin.statistics.linear_algebra import self_product

ERROR = 1e-12  # of the sum of the singular values, from which on a matrix is decomposed itself
COARSE_ERROR = 1e-8  # the same on a GPU
MISMATCH = 1e-3  # of the logarithms of two determinants, above which nothing is known of the error
WORTH_THREADS = 2**22  # multiplications of decompositions from which on threads are started
TOGETHER = 32  # matrices of one shape that are decomposed in one call, at most
APART = 1e-7  # of squared singular values, the smallest over the largest, down to which vectors are taken from products
AMORTISED = 2  # pairs for each layer from which on its principal directions pay for themselves
Part = TypeVar("Part")
_ALL = threading.local()  # how many threads there are, while this one runs alone


class Decomposition(NamedTuple):
    """A matrix of a pair, (blocks, m, n), whose singular values a measure reads, or its left vectors too."""

    key: Hashable  # by which the pair keeps the result
    matrix: Callable[[], Tensor]
    graded: bool = True  # whether it is in the principal directions of both layers
    vectors: bool = False


def prepare(wanted: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Compute the decompositions that measures declare in `needs`, of pairs each with its measures.

    Matrices of one shape are decomposed together. Afterwards every pair gives the values that it would give alone.
    """
    for pair, _ in wanted:
        pair.bring_to_host()
    with one_thread(all(pair.is_small for pair, _ in wanted)):
        _align([pair for pair, measures in wanted if any(measure.facts.whitens for measure in measures)])
        _align([pair.uncentred for pair, measures in wanted if "uncentred directions" in _needs_of(measures)])
        spectra = [pair for pair, measures in wanted if "cross spectrum" in _needs_of(measures)]
        spectra += [pair.uncentred for pair, measures in wanted if "uncentred cross spectrum" in _needs_of(measures)]
        _decompose_busy([pair for pair in spectra if pair.worth_turning and pair.x.varies and pair.y.varies])
        _decompose_needed(wanted)


def _needs_of(measures: Sequence[Any]) -> set[Any]:
    return {measure.facts.needs for measure in measures}


def _align(pairs: Sequence[Any]) -> None:
    """Find the principal directions of pairs, and of streamed ones the whitened cross moments; threads share them."""
    decompose(side for pair in pairs for side in (pair.x, pair.y))
    alike: dict[Any, list[Any]] = {}
    for pair in pairs:
        if pair.is_streamed and all(side.decomposed and side.varies for side in (pair.x, pair.y)):
            alike.setdefault((pair.cross.shape, pair.cross.dtype, pair.cross.device), []).append(pair)
    decompose_alike(_align_alike, alike)


def _align_alike(pairs: Sequence[Any]) -> None:
    for pair in pairs:  # into the dictionary: before Python 3.12 a cached property has one lock for all instances
        with suppress(NoValue):  # which is reported when the pair is measured
            if pair.is_centred:
                pair.__dict__["principal"] = type(pair).principal.func(pair)
            if not pair.spans_all:
                pair.__dict__["alignment"] = type(pair).alignment.func(pair)


def _decompose_busy(pairs: Sequence[Any]) -> None:
    """Find the principal directions of layers with many pairs, whose cross moments are then decomposed in these."""
    sides = dict.fromkeys(side for pair in pairs for side in (pair.x, pair.y))
    if len(pairs) >= AMORTISED * len(sides):
        decompose(sides)


def _decompose_needed(wanted: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Decompose what measures need of their pairs, matrices of one shape together."""
    alike: dict[Any, list[tuple[Any, Decomposition, Tensor]]] = {}
    for pair, measures in wanted:
        requests: dict[Hashable, tuple[Any, Decomposition]] = {}
        for measure in measures:
            with suppress(NetkinError):  # which is reported when the pair is measured
                holder, request = _request(pair, measure)
                if request is not None:
                    requests[holder is pair, request.key] = holder, request
        if (True, "variates") in requests:  # which bring the correlations along
            requests.pop((True, "correlations"), None)
        for holder, request in requests.values():
            with suppress(NetkinError):
                matrix = request.matrix()
                kind = (matrix.shape[1:], matrix.dtype, matrix.device, request.graded, request.vectors)
                alike.setdefault(kind, []).append((holder, request, matrix))
    decompose_alike(_decompose_group, alike)


def _request(pair: Any, measure: Any) -> tuple[Any, Decomposition | None]:
    """Return what a measure needs decomposed, if anything, and the pair that keeps it: this, or about the origin."""
    needs = measure.facts.needs
    if callable(needs):
        return pair, needs(pair, measure.settings)
    holder = pair.uncentred if needs.startswith("uncentred ") else pair
    return holder, holder.decomposition(needs.removeprefix("uncentred "))


def _decompose_group(group: Sequence[tuple[Any, Decomposition, Tensor]]) -> None:
    request = group[0][1]
    results = decomposed([matrix for *_, matrix in group], request.graded, request.vectors)
    for (pair, request, _), result in zip(group, results, strict=True):
        pair.results[request.key] = result
        if request.key == "variates":
            with suppress(NoValue):  # which is reported when the pair is measured
                pair.__dict__["variate_weights"] = type(pair).variate_weights.func(pair)


def decomposed(matrices: Sequence[Tensor], graded: bool, vectors: bool) -> Sequence[Any]:
    """Return the singular values of matrices of one shape, or their left vectors and values."""
    return left_vectors(matrices) if vectors else singular_values(matrices, graded)


def decompose(sides: Iterable[Any]) -> None:
    """Find the principal directions of layers, each thread those of its own; streamed ones of one width together."""
    alike: dict[Any, list[Any]] = {}
    for side in dict.fromkeys(sides):
        waiting = None if side.needs_gradient else side.to_decompose
        if waiting is not None and side.varies:
            alike.setdefault((*waiting, type(side)), []).append(side)
    decompose_alike(lambda some: type(some[0]).find_directions(some), alike)


def decompose_alike(work: Callable[[Sequence[Part]], None], alike: Mapping[Any, Sequence[Part]]) -> None:
    """Let `work` decompose groups of matrices; each has a key that begins with their shape, dtype and device.

    On the CPU every thread takes matrices for itself, the largest first: that is faster than to share small ones.
    No gradients are recorded there.
    """
    before = torch.get_num_threads()
    threads = getattr(_ALL, "threads", before)
    operations = sum(len(group) * math.prod(shape) * shape[-1] for (shape, *_), group in alike.items())
    shared = threads if operations > WORTH_THREADS and all(kind[2].type == "cpu" for kind in alike) else 1
    parts = []
    for _, group in sorted(alike.items(), key=lambda item: -math.prod(item[0][0])):
        step = min(TOGETHER, -(-len(group) // shared))
        parts += [group[at : at + step] for at in range(0, len(group), step)]
    if shared == 1:
        for part in parts:
            work(part)
        return
    try:
        with ThreadPoolExecutor(shared, initializer=_alone) as pool:
            list(pool.map(work, parts))  # which raises what a thread has raised
    finally:
        torch.set_num_threads(before)  # for threads that are started later; here it was never changed


def _alone() -> None:
    """Let this thread run without others, and without gradients."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Inside the `with`, if `wanted`, no operation is shared with other threads; `decompose_alike` still uses them all.

    Small matrices gain nothing by threads: these take longer to start than to compute, ten times as long where other
    programs keep the cores busy. A Python thread that uses torch for the first time meanwhile stays with one.
    """
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    _ALL.threads = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        del _ALL.threads


def singular_values(matrices: Sequence[Tensor], graded: bool = True) -> list[Tensor]:
    """Return the singular values of matrices of one shape, each (blocks, m, n), falling.

    `graded` if rows and columns fall from the first on.

    Example:
        >>> singular_values([torch.tensor([[[3.0, 0.0], [0.0, 0.5]]], dtype=torch.float64)])
        [tensor([[3.0000, 0.5000]], dtype=torch.float64)]
    """
    if not (graded or matrices[0].is_cuda) or not _fit_for_products(matrices):
        return [torch.linalg.svdvals(_tall(matrix)) for matrix in matrices]
    products = torch.cat([_product(matrix) for matrix in matrices])
    values, exact = _roots_on_a_gpu(products) if products.is_cuda else _roots(_without_rounding(products))
    results = list(values.split([len(matrix) for matrix in matrices]))
    if not bool(exact.all()):
        for i, exactly in enumerate(exact.split([len(matrix) for matrix in matrices])):
            if not bool(exactly.all()):
                results[i] = torch.linalg.svdvals(_tall(matrices[i]))
    return results


def left_vectors(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the left singular vectors (blocks, m, k) and the singular values of each (blocks, m, n), k the smaller."""
    if not _fit_for_products(matrices):
        return [_left_vectors(matrix) for matrix in matrices]
    squares, vectors = torch.linalg.eigh(torch.cat([_product(matrix) for matrix in matrices]))
    lost = squares[..., 0] <= APART * squares[..., -1]
    sizes, roots, vectors = [len(matrix) for matrix in matrices], squares.flip(-1).clamp(min=0).sqrt(), vectors.flip(-1)
    parts = zip(matrices, vectors.split(sizes), roots.split(sizes), lost.split(sizes), strict=True)
    return [
        _left_vectors(matrix) if bool(lost.any()) else (_left_from_right(matrix, V, s), s)
        for matrix, V, s, lost in parts
    ]


def largest(values: Tensor, count: int) -> Tensor:
    """Return the `count` largest correlations over all blocks, which rounding must not lift over one."""
    together = values.flatten().to(summing_dtype(values.device))
    return together.sort(descending=True).values[:count].clamp(max=1)


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
    return double and first.numel() > 0 and not any(matrix.requires_grad for matrix in matrices)


def _tall(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transpose where this is not wider: the faster way round for LAPACK."""
    return matrix if matrix.shape[-2] > matrix.shape[-1] else matrix.mH


def _left_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    vectors, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    return vectors, values


def _left_from_right(matrix: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
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


def _without_rounding(products: Tensor) -> Tensor:
    """Return products in which rows of rounding alone, as of dead features, are replaced by a diagonal as small."""
    sizes = torch.diagonal(products, dim1=-2, dim2=-1).real
    eps, largest = torch.finfo(sizes.dtype).eps, sizes.amax(-1, keepdim=True)
    real = sizes > (32 * eps) ** 2 * largest
    if bool(real.all()):
        return products
    cleared = products * (real.unsqueeze(-1) & real.unsqueeze(-2))
    return cleared + torch.diag_embed((~real * eps**2 * largest).to(cleared.dtype))
