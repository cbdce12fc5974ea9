"""Similarities of all pairs of networks, with and without images, and how two of them go together over the pairs.

CCA and CKA are taken at once for all networks, from one covariance of all their channels: the values are those of
`cca_rms` and `cka` with the positions of maps as rows, without the singular values of each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

import netkin as nk
from netkin.representations.filters import atom_layers
from reproductions.claims import Measured
from reproductions.gradients.orderings import jackknifed
from reproductions.laboratory import Lab
from reproductions.subspaces.nets import atoms_of

ATOM, WEIGHT, SPAN, CCA, CKA = "atom_cosine", "weight_cosine", "grassmann", "cca_rms", "cka"
PROBES = {"cpu": 200, "gpu": 1000}  # images, as many as the paper takes at gpu scale
BATCH = 50  # of images that all networks see at once
RANK = 1e-6  # of the largest eigenvalue of a covariance: smaller ones are rounding
SHUFFLES = 9999  # of the permutation test
Tables = dict[str, np.ndarray]  # by measure: layers × networks × networks


def probes(lab: Lab, of: str = "cifar100") -> Tensor:
    """Return the test images on which networks are compared."""
    return lab.images_of(of).test_images[: PROBES[lab.scale]]


def tables(models: Sequence[nn.Module], images: Tensor) -> Tables:
    """Return the similarities of all layers of atoms of all pairs of networks with shared coefficients."""
    found: dict[str, list[np.ndarray]] = {CCA: [], CKA: []}
    for C in covariances(models, images).values():
        found[CCA].append(canonical(C).cpu().numpy())
        found[CKA].append(alignment(C).cpu().numpy())
    atoms = [atoms_of(model) for model in models]
    weights = [{name: layer.weight.detach() for name, layer in atom_layers(model)} for model in models]
    for name in atoms[0]:
        found.setdefault(ATOM, []).append(cosines([one[name] for one in atoms]))
        found.setdefault(WEIGHT, []).append(cosines([one[name] for one in weights]))
        found.setdefault(SPAN, []).append(spans([one[name] for one in atoms]))
    return {name: np.stack(own) for name, own in found.items()}


def cosines(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the cosines of all pairs of tensors."""
    rows = torch.stack([one.flatten() for one in tensors]).double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    return (rows @ rows.T).cpu().numpy()


def spans(atoms: Sequence[Tensor]) -> np.ndarray:
    """Return the mean cosines of principal angles of all pairs of independent atoms, Eq. 4 of the paper."""
    Q = torch.linalg.qr(torch.stack([one.flatten(1).T for one in atoms]).double()).Q
    return torch.linalg.svdvals(Q.mT[:, None] @ Q).mean(-1).numpy()


@torch.no_grad()
def covariances(models: Sequence[nn.Module], images: Tensor) -> dict[str, Tensor]:
    """Return the covariances of the channels of all networks by layer, networks × channels × networks × channels."""
    names = [name for name, _ in atom_layers(models[0])]
    sums, products, rows = dict[str, Tensor](), dict[str, Tensor](), dict[str, int]()
    for part in images.split(BATCH):
        with ExitStack() as stack:
            outputs = [stack.enter_context(nk.recording(model, names)) for model in models]
            for model in models:
                model(part)
            for name in names:
                Z = torch.cat([one[name] for one in outputs], 1).movedim(1, -1).flatten(0, -2)
                sums[name] = sums.get(name, 0) + Z.sum(0, dtype=torch.float64)
                products[name] = products.get(name, 0) + (Z.T @ Z).double()
                rows[name] = rows.get(name, 0) + len(Z)
    means = {name: total / rows[name] for name, total in sums.items()}
    sizes = {name: 2 * (len(models), len(mean) // len(models)) for name, mean in means.items()}
    return {
        name: (products[name] / rows[name] - torch.outer(mean, mean)).reshape(sizes[name])
        for name, mean in means.items()
    }


def canonical(C: Tensor) -> Tensor:
    """Return the root mean squares of the canonical correlations of all pairs, Eq. 1 of the paper."""
    N, c = C.shape[:2]
    values, vectors = torch.linalg.eigh(torch.stack([C[i, :, i] for i in range(N)]))
    kept = values > RANK * values[:, -1:]
    whitening = vectors * (kept / values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()).unsqueeze(1)
    found = []
    for i in range(N):
        left = (whitening[i].T @ C[i].flatten(1)).reshape(c, N, c).movedim(1, 0)
        found.append((left @ whitening).square().sum((1, 2)))
    ranks = kept.sum(1)
    return (torch.stack(found) / torch.minimum(ranks[:, None], ranks)).sqrt()


def alignment(C: Tensor) -> Tensor:
    """Return the linear CKA of all pairs."""
    squares = C.square().sum((1, 3))
    own = squares.diagonal().sqrt()
    return squares / torch.outer(own, own)


# --- two similarities over the pairs ----------------------------------------------------------------------------------


def pairs_of(table: np.ndarray, some: Sequence[int]) -> np.ndarray:
    """Return the similarity of each pair of some networks, in the mean over layers."""
    mean, pairs = table.mean(0), list(combinations(some, 2))
    return mean[[i for i, _ in pairs], [j for _, j in pairs]]


def correlation(families: Sequence[Tables], one: str, other: str, some: Sequence[int]) -> float:
    """Return the correlation of two similarities over pairs of some networks, in the mean over their families."""
    found = [np.corrcoef(pairs_of(own[one], some), pairs_of(own[other], some))[0, 1] for own in families]
    return float(np.mean(found))


def correlated(families: Sequence[Tables], one: str, other: str) -> Measured:
    """Return the correlation with its error by the jackknife over networks: pairs with one in common are no two."""
    return jackknifed(lambda sets: correlation(families, one, other, sets[0]), [range(_size(families))])


def gained(ours: Sequence[Tables], one: str, control: Sequence[Tables], own: str, other: str) -> Measured:
    """Return how much more one similarity goes with another than in a control, networks being left out of both."""

    def gain(sets: list[list[int]]) -> float:
        return correlation(ours, one, other, sets[0]) - correlation(control, own, other, sets[0])

    return jackknifed(gain, [range(_size(ours))])


def mantel(families: Sequence[Tables], one: str, other: str, seed: int = 0) -> float:
    """Return how often networks in a random order correlate as much: the p-value of Mantel's test, one-sided."""
    draw, N = np.random.default_rng(seed), _size(families)
    orders = np.stack([np.arange(N), *(draw.permutation(N) for _ in range(SHUFFLES))])
    found = np.zeros(len(orders))
    for own in families:
        x, y = (_standard(own[name].mean(0)) for name in (one, other))
        found += np.einsum("pij,ij->p", x[orders[:, :, None], orders[:, None]], y)
    return float((found >= found[0] - 1e-9).mean())


def _standard(table: np.ndarray) -> np.ndarray:
    """Return a table with mean 0 and mean square 1 off its diagonal, where it has zeros."""
    off = ~np.eye(len(table), dtype=bool)
    found = np.where(off, table - table[off].mean(), 0)
    return found / np.sqrt((found[off] ** 2).mean())


def _size(families: Sequence[Tables]) -> int:
    return len(families[0][ATOM][0])
