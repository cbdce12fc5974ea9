"""Measures of filters, which need weights and no data: atoms, the subspaces they span, and raw weights."""

from __future__ import annotations

import torch
from torch import Tensor

from netkin.measures.registry import measure
from netkin.statistics.layer_filters import Filters

PAPER = "Chen, Miao & Qiu (2023), Inner Product-based Neural Network Similarity"
SCALING = frozenset({"scaling"})


@measure(
    higher_is_closer=True, bounds=(-1.0, 1.0), unchanged_by=SCALING, reference=PAPER,
    convention="Eq. 5: all atoms of a layer as one vector, under shared coefficients",
    means="How similar the filter atoms of two layers are that share their coefficients. 1 means the same filters up "
    "to a factor, 0 filters at right angles, -1 opposite ones.",
    cannot_see="What the networks do with data. Networks from one initialisation are similar for that reason alone; "
    "atoms under coefficients that are not orthonormal can be split in other ways, with other values.",
)  # fmt: skip
def atom_cosine(pair: Filters, *, gauge: str = "stored") -> Tensor:
    """Return the cosine between the atoms of two layers that share their coefficients, from -1 to 1.

    ``⟨vec Dᵤ, vec Dᵥ⟩ / (‖Dᵤ‖ ‖Dᵥ‖)``. With orthonormal coefficients it is the cosine of the filters themselves.

    Args:
        gauge: "stored" for the atoms as they are, "orthonormal" for those that go with orthonormal coefficients.

    Example:
        >>> D = torch.eye(4).reshape(4, 2, 2)
        >>> float(atom_cosine(D, 3 * D)), float(atom_cosine(D, -D))
        (1.0, -1.0)
    """
    x, y = pair.atoms(gauge)
    return (x @ y).clamp(-1, 1)


@measure(
    higher_is_closer=False, bounds=(0.0, torch.pi), unchanged_by=SCALING, reference=PAPER, is_metric=True,
    convention="arccos of `atom_cosine`", unit="radians",
    means="The angle between the filter atoms of two layers that share their coefficients, a metric: 0 means the "
    "same filters up to a factor, π/2 filters at right angles.",
    cannot_see="What the networks do with data. Networks from one initialisation are close for that reason alone.",
)  # fmt: skip
def atom_angular(pair: Filters, *, gauge: str = "stored") -> Tensor:
    """Return the angle between the atoms of two layers that share their coefficients, from 0 to π.

    The arccosine of `atom_cosine`, which is a metric of atoms up to a factor.

    Args:
        gauge: "stored" for the atoms as they are, "orthonormal" for those that go with orthonormal coefficients.
    """
    x, y = pair.atoms(gauge)
    return 2 * torch.atan2((x - y).norm(), (x + y).norm())  # exact for small angles, where arccos is not


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=frozenset({"scaling"}), reference=PAPER,
    convention="Eq. 4: mean cosine of principal angles, over the larger rank",
    means="How similar the spaces are that the filters of two layers span: the mean cosine of their principal "
    "angles. 1 means the same space, whatever the filters in it.",
    cannot_see="How filters lie within their space. As many atoms as a kernel has numbers span everything, and "
    "give 1 always.",
)  # fmt: skip
def grassmann(pair: Filters, *, atoms: int = 0) -> Tensor:
    """Return the mean cosine of the principal angles between two layers' filter subspaces, from 0 to 1.

    The subspace is the span of the layer's atoms or, with `atoms`, of so many leading directions of its filters, which
    plain convolutions have too, of any widths. No coefficients need be shared. As many independent atoms as a kernel
    has numbers span everything, and the value is 1 whatever the layers are.

    Args:
        atoms: how many leading directions of the filters; 0 for the span of the layer's own atoms.
    """
    x, y = pair.bases(atoms)
    return torch.linalg.svdvals(x @ y.T).clamp(max=1).sum() / max(len(x), len(y))


@measure(
    higher_is_closer=True, bounds=(-1.0, 1.0), unchanged_by=SCALING, reference="none; the plain baseline of atoms",
    convention="all weights of a layer as one vector, without its bias",
    means="The cosine between all weights of two layers. 1 means the same weights up to a factor.",
    cannot_see="That neurons may stand in another order: networks that compute the same can be at 0. Networks from "
    "one initialisation are similar for that reason alone.",
)  # fmt: skip
def weight_cosine(pair: Filters) -> Tensor:
    """Return the cosine between the weights of two layers of one shape, from -1 to 1.

    Neurons in another order make another value, though the networks compute the same.
    """
    x, y = pair.weights()
    return (x @ y).clamp(-1, 1)


# --- many networks ----------------------------------------------------------------------------------------------------


def mean_cosines(vectors: Tensor, layers: int) -> Tensor:
    """Return all mean cosines of networks, N × N: rows of `vectors` are the unit vectors of all layers side by side."""
    return (vectors @ vectors.T / layers).clamp(-1, 1)


def angles(units: Tensor) -> Tensor:
    """Return all angles between unit vectors, N × N; also those near 0 and π, where an arccosine is not exact."""
    found = mean_cosines(units, 1).arccos()
    near = ((found < 1e-3) | (found > torch.pi - 1e-3)).nonzero()
    x, y = units[near[:, 0]], units[near[:, 1]]
    found[near[:, 0], near[:, 1]] = 2 * torch.atan2((x - y).norm(dim=1), (x + y).norm(dim=1))
    return found


def nearest(vectors: Tensor, layers: int, count: int, *, block: int = 1024) -> tuple[Tensor, Tensor]:
    """Return the places and the mean cosines of the `count` most similar others of each network, N × count each.

    Blocks of rows are compared with all others, so that no N × N matrix is held at once. Candidates are found in
    float32; their cosines are then taken in the precision of `vectors`.
    """
    single = vectors.float()
    places = torch.empty(len(vectors), count, dtype=torch.int64)
    scratch = single.new_empty(min(block, len(vectors)), len(vectors))
    for start in range(0, len(vectors), block):
        rows = single[start : start + block]
        found = torch.mm(rows, single.T, out=scratch[: len(rows)])
        found[torch.arange(len(rows)), start + torch.arange(len(rows))] = -torch.inf  # itself
        places[start : start + len(rows)] = found.topk(count, dim=1, sorted=True).indices.cpu()
    exact = torch.stack([(vectors * vectors[column]).sum(1) for column in places.T], 1) / layers
    order = exact.argsort(dim=1, descending=True, stable=True)
    return places.gather(1, order), exact.gather(1, order).clamp(-1, 1)
