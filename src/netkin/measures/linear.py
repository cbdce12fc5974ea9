"""Linear measures: cosines, angles and distances of layers by their moments, and of filters by their weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netkin.errors import NoValue
from netkin.measures.directions import arccos, root
from netkin.measures.registry import LEADING, RIGID, measure
from netkin.statistics import Filters, Moments, Sequences

KORNBLITH = "Kornblith et al. (2019), arXiv:1905.00414"
WILLIAMS = "Williams et al. (2021), arXiv:2110.14739"
CHEN = "Chen, Miao & Qiu (2023), Inner Product-based Neural Network Similarity"


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    convention="biased HSIC, linear kernel, columns centred",
    debiased_as="cka_debiased",
    reference=KORNBLITH,
    means="How similarly the two layers arrange the examples. 1 means a rotated, rescaled, shifted copy; 0 means that "
    "no direction of one correlates with any direction of the other.",
    cannot_see=f"{LEADING} Wide layers on few examples score high even when unrelated; cka_debiased does not.",
)
def cka(moments: Moments) -> Tensor:
    """Return how similarly two layers arrange the examples, from 0 to 1.

    ``‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`` of the centred layers in the Frobenius norm: the cosine of their Gram matrices. One means
    a rotated, rescaled, shifted copy; zero means that no direction of one correlates with any of the other.
    Directions of large variance count most. Few examples lift it, which a warning points out: `cka_debiased` does not
    mind.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(100, 3))
        >>> round(cka(X, 3 * X[:, ::-1] + 5), 6)
        1.0
    """
    return _alignment(moments).clamp(max=1)


@measure(
    higher_is_closer=True,
    bounds=(-1.0, 1.0),
    unchanged_by=RIGID,
    precise=True,
    debiases=True,
    convention="unbiased HSIC₁, linear kernel, U-centred; never clamped",
    reference="Song et al. (2012), JMLR 13; Nguyen et al. (2021), arXiv:2010.15327",
    means="How similarly the two layers arrange the examples, without the bias of small samples. Unrelated "
    "layers lie around 0, on either side of it; 1 means a rotated, rescaled, shifted copy.",
    cannot_see=f"{LEADING} A value slightly below 0 is chance; it does not mean the opposite.",
)
def cka_debiased(moments: Moments) -> Tensor:
    """Return `cka` with the bias of small samples taken off, from -1 to 1.

    ``HSIC₁(K,L) / √(HSIC₁(K,K) HSIC₁(L,L))``. Unrelated layers give values around zero, also negative ones, however
    wide they are; plain `cka` of wide unrelated layers is far above zero. Needs four examples.
    """
    moments.x.trace, moments.y.trace  # noqa: B018  refuse constant layers
    if moments.n < 4:
        raise NoValue(f"the unbiased HSIC needs at least 4 examples; got {moments.n}.")
    cross, *products = moments.unbiased
    for side, product in zip((moments.x, moments.y), products, strict=True):
        if not float(product.detach()) > 0:
            raise NoValue(
                f"the unbiased HSIC of {side.name} with itself is zero but for rounding: its {moments.n} examples are "
                "equally far apart, or a few outweigh all others. Pass more."
            )
    return cross / (products[0].sqrt() * products[1].sqrt())


@measure(
    higher_is_closer=True,
    bounds=(-1.0, 1.0),
    unchanged_by=RIGID,
    precise=True,
    debiases=True,
    convention="HSIC of terms across different sequences, linear kernel; never clamped",
    reference="Song et al. (2012), JMLR 13, with sequences in the place of examples",
    means="How similarly the two layers arrange tokens, without the bias that tokens of one sequence, which are alike, "
    "leave in cka_debiased. Unrelated layers lie around 0; 1 means a rotated, rescaled, shifted copy.",
    cannot_see=f"{LEADING} Of what tokens of one sequence share with each other alone it sees nothing.",
)
def cka_debiased_by_sequence(sequences: Sequences) -> Tensor:
    """Return `cka_debiased` of tokens that are independent across sequences, and not within them, from -1 to 1.

    The ratio of `cka_debiased`, with ``HSIC`` of terms in which each token is of another sequence: with C_g the sum of
    ``x yᵀ`` over the n_g tokens of a sequence, s_g and t_g those of x and y, the mean over all quadruples of different
    sequences of ``n_f n_e ⟨C_g, C_h⟩ - 2 n_e s_hᵀ C_g t_f + (s_g·s_f)(t_h·t_e)``. Needs four sequences, and is read
    from a sample of tokens. Called by itself it takes each layer as a list of sequences, tokens × features.
    """
    cross, *products = sequences.estimates
    for side, product in zip((sequences.x, sequences.y), products, strict=True):
        if not float(product.detach()) > 0:
            raise NoValue(
                f"the HSIC across sequences of {side.name} with itself is not above zero: its {sequences.count:,} "
                "sequences are too few, or have nothing in common. Pass more."
            )
    return cross / (products[0].sqrt() * products[1].sqrt())


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by={"rotation", "scaling"},
    convention="kernel alignment, linear kernel, not centred",
    reference="Cristianini et al. (2001); eq. 10 of Tang et al. (2020), arXiv:2003.11498",
    means="The cosine of the two layers' Gram matrices as they are, without centring.",
    cannot_see="A mean that both layers share counts as similarity: positive activations score high whatever they "
    "encode.",
)
def cka_uncentered(moments: Moments) -> Tensor:
    """Return the cosine of two layers' Gram matrices without centring, from 0 to 1.

    A mean that both layers share counts as similarity here: positive activations score high whatever they encode.
    """
    return _alignment(moments.uncentred).clamp(max=1)


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.pi / 2),
    unit="radians",
    unchanged_by=RIGID,
    is_metric=True,
    precise=True,
    convention="arccos of cka",
    reference=WILLIAMS,
    means="The angle between the two layers' Gram matrices. 0 means a rotated, rescaled, shifted copy; π/2 means "
    "nothing in common. It is a metric, so that distances between many models fit together.",
    cannot_see=f"{LEADING} Wide layers on few examples come out too close.",
)
def angular_cka(moments: Moments) -> Tensor:
    """Return the angle between two layers' centred Gram matrices, from 0 to π/2.

    ``arccos(cka)``, a metric: the way from A to C is never longer than by B.
    """
    return arccos(_alignment(moments))


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    precise=True,
    needs="cross spectrum",
    convention="columns centred",
    reference="Muzellec & Cuturi (2018), arXiv:1805.07594; Tang et al. (2020), arXiv:2003.11498",
    means="The cosine that is left between the two layers after the best rotation. 1 means a rotated, rescaled, "
    "shifted copy. Small directions count more here than in CKA.",
    cannot_see="Wide layers on few examples score high even when unrelated.",
)
def nbs(moments: Moments) -> Tensor:
    """Return the normalised Bures similarity of two layers, from 0 to 1.

    ``‖XᵀY‖* / (‖X‖ ‖Y‖)`` of the centred layers, in the nuclear norm: the cosine that is left after the best rotation.
    """
    return _bures(moments).clamp(max=1)


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by={"rotation", "scaling"},
    precise=True,
    needs="uncentred cross spectrum",
    convention="not centred",
    reference="eq. 13 of Tang et al. (2020), arXiv:2003.11498",
    means="The cosine that is left between the two layers after the best rotation, without centring.",
    cannot_see="A mean that both layers share counts as similarity, so positive activations score high whatever they "
    "encode.",
)
def nbs_uncentered(moments: Moments) -> Tensor:
    """Return `nbs` without centring, from 0 to 1; a mean that both layers share counts as similarity."""
    return _bures(moments.uncentred).clamp(max=1)


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.sqrt(2)),
    unchanged_by=RIGID,
    is_metric=True,
    precise=True,
    needs="cross spectrum",
    convention="columns centred, unit Frobenius norm",
    reference=WILLIAMS,
    means="The distance that is left between the two layers after the best rotation. 0 means a rotated, rescaled, "
    "shifted copy; √2 means no linear structure in common.",
    cannot_see="A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
)
def procrustes_distance(moments: Moments) -> Tensor:
    """Return the distance left between two layers after the best rotation, from 0 to √2.

    With both layers centred and scaled to unit norm, ``√(2 - 2 ‖XᵀY‖*)`` in the nuclear norm. Zero means that one
    layer is a rotated, rescaled, shifted copy of the other; √2 means that they share no linear structure at all.
    """
    return root(2 - 2 * _bures(moments))


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.pi / 2),
    unit="radians",
    unchanged_by=RIGID,
    is_metric=True,
    precise=True,
    needs="cross spectrum",
    convention="arccos of nbs; columns centred, unit Frobenius norm",
    reference=WILLIAMS,
    means="The angle that is left between the two layers after the best rotation: 0 for a rotated, rescaled, "
    "shifted copy, π/2 for nothing in common. It is a metric.",
    cannot_see="A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
)
def procrustes_angular(moments: Moments) -> Tensor:
    """Return the angle left between two layers after the best rotation, from 0 to π/2."""
    return arccos(_bures(moments))


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.inf),
    unchanged_by={"rotation", "translation"},
    is_metric=True,
    precise=True,
    needs="cross spectrum",
    convention="columns centred, sizes kept",
    reference=WILLIAMS,
    means="The distance that is left after the best rotation, with the sizes of the layers kept. 0 means a "
    "rotated, shifted copy of the same size.",
    cannot_see="It grows with the number of examples and with the scale of the layers, so compare it only within "
    "one picture.",
)
def procrustes_size_and_shape(moments: Moments) -> Tensor:
    """Return the distance left between two layers after the best rotation, their sizes kept, from 0 up.

    ``√(‖X‖² + ‖Y‖² - 2 ‖XᵀY‖*)`` of the centred layers. It grows with the number of examples and with their scale.
    """
    x, y = moments.x, moments.y
    scale = min(x.scale, y.scale)  # the unit of the larger layer, so that no square overflows
    a, b = scale / x.scale, scale / y.scale
    return root(x.trace * a**2 + y.trace * b**2 - 2 * moments.nuclear * a * b) / scale


@measure(
    higher_is_closer=False,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    precise=True,
    needs="cross spectrum",
    convention="columns centred, unit Frobenius norm, best scale: as SciPy and TorchMetrics",
    reference="Gower (1975), doi:10.1007/BF02291478",
    means="The share of one layer that the other can't explain after the best rotation and scaling. 0 is a perfect "
    "fit.",
    cannot_see="A linear map that is no rotation counts as a difference, even if the next layer could undo it.",
)
def procrustes_disparity(moments: Moments) -> Tensor:
    """Return the squared misfit left after the best rotation and scaling, from 0 to 1.

    ``1 - ‖XᵀY‖*²`` at unit norm; the number that ``scipy.spatial.procrustes`` calls the disparity.
    """
    return (1 - _bures(moments).square()).clamp(min=0)


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.inf),
    unchanged_by={"rotation"},
    convention="lengths of the mean rows",
    reference="Klabunde et al. (2024), arXiv:2408.00531",
    means="How much the lengths of the two layers' mean activations differ. 0 means that they are equal.",
    cannot_see="It sees nothing of how the examples are arranged: two unrelated layers can be at 0.",
)
def magnitude_difference(moments: Moments) -> Tensor:
    """Return how much the lengths of two layers' mean activations differ, from 0 up.

    ``| ‖mean x‖ - ‖mean y‖ |``. It does not depend on how the examples are arranged.
    """
    x, y = ((side.mean * side.scale).norm().to(moments.x.total) / side.scale for side in (moments.x, moments.y))
    return (x - y).abs()


def _alignment(moments: Moments) -> Tensor:
    moments.x.trace, moments.y.trace  # noqa: B018  refuse constant layers
    return moments.cross_squared / (moments.x.squared.sqrt() * moments.y.squared.sqrt())


def _bures(moments: Moments) -> Tensor:
    return moments.nuclear / (moments.x_norm * moments.y_norm)


# --- filters, which need weights and no data: atoms, the subspaces they span, and raw weights -------------------------


@measure(
    higher_is_closer=True, bounds=(-1.0, 1.0), unchanged_by={"scaling"}, reference=CHEN,
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
    higher_is_closer=False, bounds=(0.0, torch.pi), unchanged_by={"scaling"}, reference=CHEN, is_metric=True,
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
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by={"scaling"}, reference=CHEN,
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
    higher_is_closer=True, bounds=(-1.0, 1.0), unchanged_by={"scaling"}, reference="none; the plain baseline of atoms",
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
    all_angles = mean_cosines(units, 1).arccos()
    near = ((all_angles < 1e-3) | (all_angles > torch.pi - 1e-3)).nonzero()
    x, y = units[near[:, 0]], units[near[:, 1]]
    all_angles[near[:, 0], near[:, 1]] = 2 * torch.atan2((x - y).norm(dim=1), (x + y).norm(dim=1))
    return all_angles


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
        cosines = torch.mm(rows, single.T, out=scratch[: len(rows)])
        cosines[torch.arange(len(rows)), start + torch.arange(len(rows))] = -torch.inf  # itself
        places[start : start + len(rows)] = cosines.topk(count, dim=1, sorted=True).indices.cpu()
    exact = torch.stack([(vectors * vectors[column]).sum(1) for column in places.T], 1) / layers
    order = exact.argsort(dim=1, descending=True, stable=True)
    return places.gather(1, order), exact.gather(1, order).clamp(-1, 1)
