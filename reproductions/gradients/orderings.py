"""Similarities of all pairs of networks at once, and the share of their orderings that the paper calls right.

Section 5.1 asks three things of a measure: that (1) two networks of one data set are closer than two of different sets,
(2) CIFAR-10 and CIFAR-100 are closer than either is to SVHN, and (3) CIFAR-10 is closer to SVHN than CIFAR-100 is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.errors import NoValue
from reproductions.claims import Measured
from reproductions.gradients.nets import SEEDS, SETS, WORDS
from reproductions.gradients.readings import Kept
from reproductions.laboratory import Lab

DESIDERATA = (1, 2, 3)
RIGHT = 0.75  # a share of orderings half way from chance to all
KERNELS = {"features": "features", "gradients": "gradients", "hadamard": "both"}
BY_T = "by the 95% interval of Student's t, errors by the jackknife over networks"
NEARLY = (1e-12, 1e-10, 1e-8)  # of the trace, added to the diagonal of kernels before their roots are taken
ROUNDS = 40  # of the iteration for polar factors: singular values above 1.5^-40 of the norm become 1


def kernels(kept: Sequence[Kept], label: str, kernel: str) -> Tensor:
    """Return the kernel matrices of some networks, networks × blocks × M × M, in double precision.

    "hadamard" is the product of the sketched kernels of features and gradients, as in the authors' code.
    """
    if kernel == "hadamard":
        return kernels(kept, label, "features") * kernels(kept, label, "gradients")
    return torch.stack([one[f"{label}/{kernel}"] for one in kept])


def folded(kernel: Tensor, buckets: int) -> Tensor:
    """Return kernels of fewer buckets: those of M/m buckets each are summed, as a sketch into m would have done."""
    m = kernel.shape[-1] // buckets
    return kernel.unflatten(-1, (m, buckets)).sum(-2).unflatten(-2, (m, buckets)).sum(-3)


def cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the alignments of kernels centred over buckets, blocks × networks × networks."""
    return torch.einsum("ilab,jlab->lij", unit(x), unit(y))


def cka_of_blocks(x: Tensor, y: Tensor) -> np.ndarray:
    """Return the alignments of all blocks of all networks, networks × blocks × networks × blocks."""
    return torch.einsum("iak,jbk->iajb", unit(x).flatten(2), unit(y).flatten(2)).cpu().numpy()


def unit(kernel: Tensor) -> Tensor:
    """Return kernels centred over buckets and scaled to norm 1."""
    rows = kernel - kernel.mean(-1, keepdim=True)
    centred = rows - rows.mean(-2, keepdim=True)
    return centred / centred.norm(dim=(-2, -1), keepdim=True)


def nbs(x: Tensor, y: Tensor) -> Tensor:
    """Return the normalised Bures similarities of kernels, blocks × networks × networks."""
    R, S = (_roots(one) for one in (x, y))
    found = torch.empty(x.shape[1], len(x), len(y), dtype=torch.float64)
    for i in range(len(x)):
        for j in range(i if x is y else 0, len(y)):
            found[:, i, j] = nuclear_norms(R[i].mT @ S[j]).cpu()
            if x is y:
                found[:, j, i] = found[:, i, j]
    return found


def _roots(kernel: Tensor) -> Tensor:
    """Return lower triangular roots of kernels scaled to trace 1; some have fewer directions than buckets."""
    scaled = kernel / kernel.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    for nearly in NEARLY:
        found, faults = torch.linalg.cholesky_ex(scaled + nearly * torch.eye(kernel.shape[-1]).to(scaled))
        if not bool(faults.any()):
            return found
    raise NoValue(f"{int((faults > 0).sum())} kernels have eigenvalues below -{NEARLY[-1]:g} of their trace.")


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Return the sums of the singular values of matrices; on a GPU by polar factors, since it has no fast SVD."""
    return polar_sums(matrices) if matrices.is_cuda else torch.linalg.svdvals(matrices).sum(-1)


def polar_sums(matrices: Tensor) -> Tensor:
    """Return the sums of singular values as ``tr UᵀA``, U the polar factor of A by the Newton–Schulz iteration."""
    factor = matrices / matrices.norm(dim=(-2, -1), keepdim=True)
    for _ in range(ROUNDS):
        factor = 1.5 * factor - 0.5 * factor @ (factor.mT @ factor)
    return (factor * matrices).sum((-2, -1))


def crossed(index: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> np.ndarray:
    """Return similarities in which one network is sketched as in `x` and the other as in `y`, either way round."""
    found = index(x, y)
    return ((found + found.mT) / 2).cpu().numpy()


def noise(kernel: Tensor, groups: Sequence[int], seed: int) -> Tensor:
    """Return kernels with the spectra of these whose directions are random, and shared within a group of networks."""
    made, M = torch.empty_like(kernel), kernel.shape[-1]
    values = torch.linalg.eigvalsh(kernel).clamp(min=0).cpu()
    for block in range(kernel.shape[1]):
        for group in dict.fromkeys(groups):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * block + group)
            Q = torch.linalg.qr(torch.randn(M, M, generator=generator, dtype=torch.float64))[0]
            for i in (i for i, own in enumerate(groups) if own == group):
                made[i, block] = (Q * values[i, block] @ Q.mT).to(made)
    return made


def shares(similarity: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares of right orderings, desiderata × blocks; `sets` are the networks of each set of images.

    `similarity` is blocks × networks × networks. Each share is over all orderings that the desideratum names.
    """
    ten, hundred, digits = (list(own) for own in sets)
    between = [
        similarity[:, a][:, :, b][..., None] > similarity[:, a][:, :, c][:, :, None]
        for a, b, c in ((ten, hundred, digits), (hundred, ten, digits))
    ]
    third = similarity[:, digits][:, :, ten][..., None] > similarity[:, digits][:, :, hundred][:, :, None]
    second = np.mean([one.mean((1, 2, 3)) for one in between], 0)
    return np.stack([_within_sets(similarity, sets), second, third.mean((1, 2, 3))])


def _within_sets(similarity: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    right = []
    for own in sets:
        others = [i for other in sets if other is not own for i in other]
        for i in own:
            same = [j for j in own if j != i]
            right.append((similarity[:, i, same][:, :, None] > similarity[:, i, others][:, None]).mean((1, 2)))
    return np.mean(right, 0)


def jackknifed(score: Callable[[list[list[int]]], Any], sets: Sequence[Sequence[int]]) -> Any:
    """Return a score with its standard error by the jackknife over networks, as `Measured` or an array of them.

    One network is left out at a time; the errors of the sets add up. Degrees of freedom are those of one set.
    """
    whole, variance = np.asarray(score([list(own) for own in sets])), 0.0
    for place, own in enumerate(sets):
        without = []
        for left in own:
            kept = [list(one) for one in sets]
            kept[place].remove(left)
            without.append(np.asarray(score(kept)))
        variance = variance + (len(own) - 1) * np.var(without, axis=0)
    count = min(map(len, sets))
    made = [Measured(float(v), float(e), count) for v, e in zip(whole.ravel(), np.sqrt(variance).ravel(), strict=True)]
    return made[0] if whole.ndim == 0 else np.array(made, dtype=object).reshape(whole.shape)


def groups(lab: Lab) -> list[list[int]]:
    """Return the places of the networks of each set, as `names` gives them."""
    count = SEEDS[lab.scale]
    return [list(range(count * k, count * (k + 1))) for k in range(len(SETS))]


def similarity(kept: Sequence[Kept], label: str, kernel: str, index: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
    """Return the similarities of networks, each with one sketch, blocks × networks × networks."""
    found = kernels(kept, label, kernel)
    return index(found, found).cpu().numpy()


def on_halves(kept: Sequence[Kept], kernel: str, index: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
    """Return the similarities of networks of which one sees one half of its images and the other the other half."""
    return crossed(index, kernels(kept, "first", kernel), kernels(kept, "second", kernel))


def scores(table: np.ndarray, sets: Sequence[Sequence[int]]) -> list[Measured]:
    """Return the shares of right orderings in the mean over blocks, with their errors."""
    return list(jackknifed(lambda some: mean_shares(table, some), sets))


def mean_shares(table: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares of right orderings of each desideratum in the mean over blocks."""
    return shares(table, sets).mean(1)


def gains_in_shares(a: np.ndarray, b: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return by how much the shares of one table are above those of another."""
    return mean_shares(a, sets) - mean_shares(b, sets)


def pairs_curve(table: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """Return the mean similarities of pairs of sets as the lines of a chart."""
    means = pair_means(table, sets)
    return {"block": list(range(1, table.shape[0] + 1))} | {
        name: [float(value) for value in one] for name, one in means.items()
    }


def pair_means(table: np.ndarray, sets: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the mean similarities of pairs of sets, each by block."""
    found = {}
    for a, b in combinations_with_replacement(range(len(SETS)), 2):
        pairs = [(i, j) for i in sets[a] for j in sets[b] if i != j]
        found[f"{WORDS[SETS[a]]} with {WORDS[SETS[b]]}"] = np.mean([table[:, i, j] for i, j in pairs], 0)
    return found


def lines(name: str, found: Sequence[Measured]) -> dict[str, list[float]]:
    """Return a line of a chart with its errors."""
    return {name: [one.value for one in found], f"{name} ±": [one.error or 0.0 for one in found]}
