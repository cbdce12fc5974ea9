"""Measures that whiten: canonical correlations and measures derived from them; `dft_cca` of feature maps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from netkin.arrays import exact_products, summing_dtype
from netkin.errors import InflatedWarning, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.measures.cuts import Cut
from netkin.measures.directions import arccos, leading, partial_roots, partly_whitened, root, spectrum, ties
from netkin.measures.registry import AFFINE, FEW_EXAMPLES, RIGID, measure
from netkin.statistics import Moments, Spectra
from netkin.statistics.covariances import PairSide
from netkin.statistics.decompositions import Decomposition, largest
from netkin.statistics.linear_algebra import squared_norm

HOTELLING = "Hotelling (1936), doi:10.1093/biomet/28.3-4.321"
SVCCA = "Raghu et al. (2017), arXiv:1706.05806"


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=AFFINE,
    whitens=True,
    needs="correlations",
    convention="mean canonical correlation over the smaller numerical rank, columns centred",
    reference=HOTELLING,
    means="The mean canonical correlation: how well the directions of the narrower layer can be found in the other "
    "by a linear map. 1 means that they all can.",
    cannot_see=f"Every direction counts equally, so noise weighs as much as signal. {FEW_EXAMPLES}",
)
def cca_mean(moments: Moments) -> Tensor:
    """Return the mean canonical correlation of two layers, from 0 to 1.

    Every direction counts equally, however little it varies. One means that the layer of smaller rank is a linear
    function of the other; so it is whenever there are fewer examples than neurons, which a warning points out.
    """
    return moments.correlations.mean()


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=AFFINE,
    whitens=True,
    needs="correlations",
    convention="mean squared canonical correlation over the smaller numerical rank, columns centred",
    reference="Ramsay et al. (1984), doi:10.1007/BF02294202; Kornblith et al. (2019), arXiv:1905.00414",
    means="The mean squared canonical correlation: the share of variance, over whitened directions, that the "
    "layers explain in each other.",
    cannot_see=f"Every direction counts equally, so noise weighs as much as signal. {FEW_EXAMPLES}",
)
def cca_mean_squared(moments: Moments) -> Tensor:
    """Return the mean squared canonical correlation of two layers, from 0 to 1 (R² of CCA)."""
    return moments.correlations.square().mean()


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=AFFINE,
    whitens=True,
    needs="correlations",
    convention="root of the mean squared canonical correlation over the smaller numerical rank, columns centred",
    reference="Chen, Miao & Qiu (2023), Inner Product-based Neural Network Similarity, NeurIPS 36, eq. 1",
    means="The root mean square of the canonical correlations. 1 means that all directions of the narrower layer "
    "can be found in the other by a linear map.",
    cannot_see=f"Every direction counts equally, so noise weighs as much as signal. {FEW_EXAMPLES}",
)
def cca_rms(moments: Moments) -> Tensor:
    """Return the root mean square of the canonical correlations of two layers, from 0 to 1."""
    return moments.correlations.square().mean().sqrt()


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    whitens=True,
    needs=lambda pair, settings: _leading_part(pair, *_holding(pair, **settings)),
    convention="CCA mean of the fewest principal directions holding `variance` of Σσ², over the smaller number kept",
    reference=SVCCA,
    means="The mean canonical correlation of each layer's leading principal directions; the rest is treated "
    "as noise. 1 means that the smaller set of directions lies within the other.",
    cannot_see=f"Directions below the cut are ignored, and above it all count equally. {FEW_EXAMPLES}",
)
def svcca(moments: Moments, *, variance: float = 0.99) -> Tensor:
    """Return the mean canonical correlation of two layers' leading principal directions, from 0 to 1.

    Each layer keeps the fewest directions that hold `variance` of its variance, Σσ²; the rest is taken for noise.
    """
    return _truncated(moments, *_holding(moments, variance), share=variance)


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    whitens=True,
    needs=lambda pair, settings: _leading_part(pair, *_holding(pair, **settings, by="sum")),
    convention="CCA mean of the fewest principal directions holding `variance` of Σσ, over the smaller number kept",
    reference=f"appendix of {SVCCA}",
    means="Like svcca, with the cut taken on the sum of singular values not of their squares; it keeps more "
    "directions.",
    cannot_see=f"Directions below the cut are ignored, and above it all count equally. {FEW_EXAMPLES}",
)
def svcca_by_sum(moments: Moments, *, variance: float = 0.99) -> Tensor:
    """Return `svcca` with the cut taken on Σσ instead of Σσ², from 0 to 1; it keeps more directions."""
    return _truncated(moments, *_holding(moments, variance, "sum"), share=variance, weigh=torch.sqrt)


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    whitens=True,
    needs=lambda pair, settings: _leading_part(pair, *_first(pair, **settings)),
    convention="CCA mean of the `k` leading principal directions, or of all where there are fewer",
    reference=SVCCA,
    means="The mean canonical correlation of a fixed number of leading principal directions of each layer.",
    cannot_see="Everything beyond those directions is ignored, however much variance it has.",
)
def svcca_k(moments: Moments, *, k: int = 10) -> Tensor:
    """Return the mean canonical correlation of two layers' `k` leading principal directions, from 0 to 1."""
    return _truncated(moments, *_first(moments, k))


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by={"scaling", "translation"},
    symmetric=False,
    whitens=True,
    needs="variates",
    convention="weights from the whitened canonical variates of X and the neurons of X, columns centred",
    reference="Morcos et al. (2018), arXiv:1806.05759",
    means="The canonical correlations averaged by how much of the first layer (the row's) each accounts for. 1 "
    "means that what it mostly does can be found in the second (the column's).",
    cannot_see=f"Not symmetric: exchanging the models changes the values. {FEW_EXAMPLES}",
)
def pwcca(moments: Moments) -> Tensor:
    """Return the canonical correlations averaged by how much of X each accounts for, from 0 to 1.

    ``Σ αᵢρᵢ / Σ αᵢ`` with ``αᵢ = Σⱼ |⟨hᵢ, xⱼ⟩|``, hᵢ the whitened canonical variates of X and xⱼ its neurons. Not
    symmetric, and not unchanged by a rotation of X: it depends on single neurons. Where some correlations are equal, as
    those of directions that both layers have, any turn of their variates is as good, and there is no value.
    """
    if moments.spans_all:
        return moments.correlations.mean()
    correlations = moments.variates[1]
    largest = correlations.flatten().argsort(descending=True, stable=True)[: min(moments.x.rank, moments.y.rank)]
    weights, chosen = moments.variate_weights.flatten()[largest], correlations.flatten()[largest].clamp(max=1)
    tied = max((len(tie) for tie in ties(chosen.detach())), default=0)
    if tied == len(chosen):  # whatever the weights
        return chosen.mean()
    if tied:
        raise NoValue(
            f"{tied} of {len(chosen)} canonical correlations are equal, so that nothing tells their directions apart "
            "and their weights are not determined; use more examples, or a measure without weights such as `cca_mean`."
        )
    return (weights * chosen).sum() / weights.sum()


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    symmetric=False,
    whitens=True,
    convention="least squares from X to Y on the numerical range of X, columns centred",
    reference="Kornblith et al. (2019), arXiv:1905.00414",
    means="The share of the variance of the second layer (the column's) that a linear map of the first (the row's) "
    "predicts.",
    cannot_see=f"Not symmetric: a wide layer may predict a narrow one and not the other way round. {FEW_EXAMPLES}",
)
def linear_regression_r2(moments: Moments) -> Tensor:
    """Return the share of Y's variance that a linear map of X predicts, from 0 to 1.

    ``1 - ‖Y - X(X⁺Y)‖² / ‖Y‖²`` of the centred layers. Not symmetric: a wide layer may predict a narrow one and not
    be predicted by it.
    """
    moments.x.trace  # noqa: B018  refuses a constant layer
    if moments.spans_all and moments.x.rank >= moments.y.rank:
        return torch.ones_like(moments.y.trace)
    return (squared_norm(moments.explained) / moments.y.trace).clamp(max=1)


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=AFFINE,
    whitens=True,
    convention="left singular vectors of the centred layers, over the larger numerical rank",
    reference="May et al. (2019), arXiv:1909.01264",
    means="How far the two layers span the same space over the examples. 1 means the same span; a span inside a "
    "larger one scores the ratio of their ranks.",
    cannot_see=f"How much the examples vary along each direction does not count at all. {FEW_EXAMPLES}",
)
def eigenspace_overlap(moments: Moments) -> Tensor:
    """Return how far two layers span the same space over the examples, from 0 to 1.

    ``‖UxᵀUy‖² / max(rank)``, U the left singular vectors. A layer whose span lies inside that of a wider one scores
    the ratio of their ranks.
    """
    return _overlap(moments)


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=AFFINE - {"translation"},
    whitens=True,
    needs="uncentred directions",
    convention="left singular vectors of the layers as they are, not centred, over the larger numerical rank",
    reference="definition 1 of May et al. (2019), arXiv:1909.01264",
    means="How far the two layers span the same space over the examples, their means with it. 1 means the same span.",
    cannot_see="A mean that both layers have counts as similarity; how much the examples vary does not count at all. "
    f"{FEW_EXAMPLES}",
)
def eigenspace_overlap_uncentered(moments: Moments) -> Tensor:
    """Return `eigenspace_overlap` without centring, as its paper has it, from 0 to 1.

    A mean that is not zero is one more direction of a layer, which nearly all layers share.
    """
    return _overlap(moments.uncentred)


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.pi / 2),
    unit="radians",
    unchanged_by={"rotation", "translation"},
    is_metric=True,
    whitens=lambda settings: settings["alpha"] < 1,
    needs=lambda pair, settings: _partly_whitened(pair, **settings)[0],
    convention="angular Procrustes after X(αI + (1-α)C^(-1/2)), columns centred; C = XᵀX, or XᵀX/n by covariance",
    reference="Williams et al. (2021), arXiv:2110.14739",
    means="The angle that is left after partial whitening and the best rotation. 0 means the same shape; it is a "
    "metric.",
    cannot_see="Between no whitening and whole whitening the scale of the data counts, and unless it whitens by "
    f"the covariance the number of examples. {FEW_EXAMPLES}",
)
def shape_distance(moments: Moments, *, alpha: float = 0.5, whitening: str = "second_moment") -> Tensor:
    """Return the angle left between two partly whitened layers after the best rotation, from 0 to π/2.

    ``alpha=1`` whitens nothing and is `procrustes_angular`; ``alpha=0`` whitens wholly and is, at equal full ranks,
    the arc cosine of `cca_mean`. In between the scale of the data counts, and with ``whitening="second_moment"``, the
    paper's ``C = XᵀX``, the number of examples as well: the more there are, the nearer is it to `procrustes_angular`.
    With ``whitening="covariance"``, ``C = XᵀX/n``, it tends to a value of its own.
    """
    whitened, size = _partly_whitened(moments, alpha, whitening)
    values = moments.decomposed(whitened)
    return arccos(values.to(summing_dtype(values.device)).sum() / size)


@measure(
    higher_is_closer=False,
    bounds=(0.0, math.inf),
    unchanged_by=RIGID,
    is_metric=True,
    precise=True,
    convention="rows centred on their mean and scaled to unit mean square norm; plug-in estimate",
    reference="Boix-Adserà et al. (2022), arXiv:2210.06545",
    means="How differently ridge regressions on the two layers can predict, at worst over all targets. 0 means "
    "that every linear task is solved equally well.",
    cannot_see="Its size depends on the ridge, so compare it only at one ridge; what no linear map reads out goes "
    "unseen.",
)
def gulp(moments: Moments, *, ridge: float = 1e-2) -> Tensor:
    """Return how differently ridge regression on two layers can predict, at worst over all targets, from 0 up.

    ``√(tr(AΣxAΣx) + tr(BΣyBΣy) - 2 tr(AΣxyBΣyx))`` with ``A = (Σx + ridge·I)⁻¹``, B likewise. A large `ridge` sees the
    leading directions alone; a small one is nearer to CCA.
    """
    if not 0 < ridge < math.inf:
        raise InvalidValue(f"`ridge` must be above 0; got {ridge}.", argument="ridge")
    if not moments.needs_gradient:
        (x, x_own), (y, y_own) = (_ridge_weights(side, ridge) for side in (moments.x, moments.y))
        mixed = (x.unsqueeze(-2) @ moments.principal.abs().square() @ y.unsqueeze(-1)).sum()
        return root(x_own + y_own - 2 * mixed / (moments.x.trace * moments.y.trace))
    cross = moments.cross / (moments.x_norm * moments.y_norm)
    left = torch.linalg.solve(_ridged(moments.x, ridge), cross)
    right = torch.linalg.solve(_ridged(moments.y, ridge), cross.mH)
    mixed = (left * right.mH.conj()).real.sum()
    return root(_self_term(moments.x, ridge) + _self_term(moments.y, ridge) - 2 * mixed)


@measure(
    higher_is_closer=True,
    bounds=(0.0, math.inf),
    unit="nats",
    unchanged_by=AFFINE,
    whitens=True,
    needs="correlations",
    convention="Gaussian, from the canonical correlations over the smaller numerical rank, in nats",
    reference="Kullback (1959); lemmas 1 and 2 of Ni et al. (2023), arXiv:2307.07389",
    means="The information that the two layers share, in nats, if they are jointly Gaussian. 0 means none.",
    cannot_see=f"Layers are not Gaussian, and nearly equal directions make it very large. {FEW_EXAMPLES}",
)
def gaussian_mutual_information(moments: Moments) -> Tensor:
    """Return the information that two layers share if they are jointly Gaussian, in nats, from 0 up.

    ``-½ Σ log(1 - ρᵢ²)``. If some direction of one is a linear function of the other it is infinite: no value.
    """
    left_over = 1 - moments.correlations.square()
    exact = int((left_over <= max(moments.n, moments.x.width, moments.y.width) * moments.x.rounding).sum())
    if exact:
        features = moments.x.block_width + moments.y.block_width
        raise NoValue(
            f"the mutual information is infinite: {exact} of {len(left_over)} canonical correlations are 1 at "
            f"{moments.n:,} examples; use more than the {features:,} features of both."
        )
    return -left_over.log().sum() / 2


def _overlap(moments: Moments) -> Tensor:
    overlap = moments.correlations.sum() if moments.spans_all else squared_norm(moments.alignment)
    return (overlap / max(moments.x.rank, moments.y.rank)).clamp(max=1)


def _partly_whitened(moments: Moments, alpha: float, whitening: str) -> tuple[Decomposition, Tensor]:
    """Return the cross moment of partly whitened layers, and the product of their sizes."""
    if not 0 <= alpha <= 1:
        raise InvalidValue(f"`alpha` must lie between 0 and 1; got {alpha}.", argument="alpha")
    if whitening not in ("second_moment", "covariance"):
        raise UnknownName(
            f"`whitening` is 'second_moment' (XᵀX) or 'covariance' (XᵀX/n); got {whitening!r}.", argument="whitening"
        )
    examples = moments.n if whitening == "covariance" else 1
    if moments.needs_gradient or "alignment" not in moments.__dict__:
        (x, x_size), (y, y_size) = (partly_whitened(side, alpha, examples) for side in (moments.x, moments.y))
        matrix = lambda: moments.mapped(x, y)  # noqa: E731
    else:
        (x, x_size), (y, y_size) = (partial_roots(side, alpha, examples) for side in (moments.x, moments.y))
        matrix = lambda: moments.alignment * x.unsqueeze(-1) * y.unsqueeze(-2)  # noqa: E731
    return Decomposition(("partly whitened", alpha, examples), matrix), x_size * y_size


def _leading_part(moments: Moments, keep_x: Tensor, keep_y: Tensor) -> Decomposition:
    """Return the cross moment of the whitened layers in the leading directions that are marked."""
    counts = [tuple(keep.sum(-1).tolist()) for keep in (keep_x, keep_y)]  # of every block
    return Decomposition(("leading", *counts), lambda: moments.leading_alignment(keep_x, keep_y))


def _truncated(moments: Moments, keep_x: Tensor, keep_y: Tensor, **rule: Any) -> Tensor:
    """Return the mean canonical correlation of the marked directions; `rule` is what the cut was made by."""
    spectra, kept = (spectrum(moments.x), spectrum(moments.y)), (keep_x, keep_y)
    moments.cut = Cut(spectra, kept, _mean_correlation, **rule)
    values = moments.decomposed(_leading_part(moments, keep_x, keep_y))
    return largest(values, int(min(keep_x.sum(), keep_y.sum()))).mean()


def _mean_correlation(moments: Moments, keep_x: Tensor, keep_y: Tensor) -> Tensor:
    """Return the mean canonical correlation of any marked directions, not of leading ones alone."""
    k, l = moments.alignment.shape[-2:]
    if len(keep_x) == len(keep_y) == 1:
        part = moments.alignment[:, keep_x[0, :k]][..., keep_y[0, :l]]
    else:
        part = moments.alignment * keep_x[..., :k].unsqueeze(-1) * keep_y[..., :l].unsqueeze(-2)
    return largest(torch.linalg.svdvals(part), int(min(keep_x.sum(), keep_y.sum()))).mean()


def _holding(moments: Moments, variance: float, by: str = "variance") -> tuple[Tensor, Tensor]:
    """Mark the fewest directions of both layers that hold `variance`."""
    return leading(moments.x, variance, by), leading(moments.y, variance, by)


def _first(moments: Moments, k: int) -> tuple[Tensor, Tensor]:
    """Mark the `k` leading principal directions of both layers, (blocks, r), or all that there are."""
    if k < 1:
        raise InvalidValue(f"`k` must be at least 1; got {k}.", argument="k")

    def cut(side: PairSide) -> Tensor:
        values = spectrum(side)
        order = values.flatten().argsort(descending=True)[:k]
        keep = torch.zeros_like(values, dtype=torch.bool).flatten()
        keep[order] = True
        return keep.reshape(values.shape) & (values > 0)

    return moments.x.once(("first", k), lambda: cut(moments.x)), moments.y.once(("first", k), lambda: cut(moments.y))


def _ridge_weights(side: PairSide, ridge: float) -> tuple[Tensor, Tensor]:
    """Return ``1/(λ + ridge)`` for the principal directions, (blocks, r), at unit trace, and ``tr(AΣAΣ)``."""

    def weights() -> tuple[Tensor, Tensor]:
        values = side.eigen[0] / side.trace
        return 1 / (values + ridge), (values / (values + ridge)).square().sum()

    return side.once(("ridge", ridge), weights)


def _ridged(side: PairSide, ridge: float) -> Tensor:
    second = side.second / side.trace
    return second + ridge * torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)


def _self_term(side: PairSide, ridge: float) -> Tensor:
    regularised = torch.linalg.solve(_ridged(side, ridge), side.second / side.trace)
    return (regularised * regularised.mT).sum().real


def dft_cca(X: Any, Y: Any, *, variance: float | None = None) -> Any:
    """Return the mean canonical correlation of two conv layers' maps, n × c × h × w, frequency by frequency, 0 to 1.

    Correlations of all frequencies are pooled and divided by the smaller total rank, so that on data closed under
    translation this is `cca_mean` of the flattened maps, and with `variance`, say 0.99, `svcca`, whose cut is taken
    over all frequencies together. A larger map is regrouped to the grid of the smaller one, which must divide it; a
    matrix, n × d, is paired with the zero frequency only. On other data see `nk.off_block_share`.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(40, 3, 8, 8))
        >>> round(dft_cca(X, np.roll(X, 1, axis=3)), 6)
        1.0
    """
    with exact_products():
        spectra = Spectra.of(X, Y)
        if len(spectra.x.mean) == len(spectra.y.mean) == 1 and not spectra.cross.is_complex():
            raise ShapeError("neither `X` nor `Y` is a map, n × c × h × w; use `cca_mean` or `svcca` for matrices.")
        if spectra.few_examples:
            warnings.warn(str(spectra.few_examples), InflatedWarning, stacklevel=2)
        value = cca_mean(spectra) if variance is None else svcca(spectra, variance=variance)
    return value if isinstance(X, Tensor) or isinstance(Y, Tensor) else float(value)
