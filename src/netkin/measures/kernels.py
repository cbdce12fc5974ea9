"""Measures that read kernel matrices: mini-batch CKA and CKA with an RBF kernel."""

from __future__ import annotations

from torch import Tensor

from netkin.errors import NoValue
from netkin.measures.registry import LEADING, RIGID, measure
from netkin.statistics import Grams, Rows
from netkin.statistics.products import centred, u_centred

MEDIAN = "its kernel width is a median"
KORNBLITH = "Kornblith et al. (2019), arXiv:1905.00414"


@measure(
    higher_is_closer=True,
    bounds=(-1.0, 1.0),
    unchanged_by=RIGID,
    convention="HSIC₁ summed over mini-batches, one ratio at the end; a remainder under 4 examples left out",
    shows=("batch",),
    smooth=lambda settings: settings["kernel"] == "linear" or MEDIAN,
    reference="Nguyen et al. (2021), arXiv:2010.15327",
    means="Debiased CKA added up over mini-batches, so that layers of any width fit into memory. Unrelated layers "
    "lie around 0; 1 means a rotated, rescaled, shifted copy.",
    cannot_see="Relations between examples of different batches are not looked at, so the batch size matters. "
    f"{LEADING}",
)
def cka_minibatch(grams: Grams, *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4) -> Tensor:
    """Return CKA estimated from mini-batches of `batch` examples, from -1 to 1.

    The unbiased HSIC₁ of each mini-batch is added up, and one ratio is taken at the end. Memory does not depend on the
    width of the layers; the value does depend on the batch size, which is therefore part of the id. `kernel` is
    "linear" or "rbf", as wide as `fraction` of the median distance in a mini-batch.
    """
    if not (float(grams.x.detach()) > 0 and float(grams.y.detach()) > 0):
        raise NoValue(
            f"the unbiased HSIC of a layer with itself is zero: it is constant within each of the {grams.batches} "
            "mini-batches, or all examples there are equally far apart."
        )
    return grams.cross / (grams.x.sqrt() * grams.y.sqrt())


@measure(
    higher_is_closer=True,
    bounds=(0.0, 1.0),
    unchanged_by=RIGID,
    convention="biased HSIC, RBF kernel with σ = `fraction` × the median distance over distinct pairs",
    smooth=MEDIAN,
    debiased_as="cka_rbf_debiased",
    reference=KORNBLITH,
    means="How alike the two layers arrange near neighbours among the examples; a smaller fraction looks more locally.",
    cannot_see="Distances much larger than the kernel's width all look the same. On few examples unrelated layers "
    "score above 0.",
)
def cka_rbf(rows: Rows, *, fraction: float = 0.4) -> Tensor:
    """Return how alike two layers arrange the examples by a kernel that sees near neighbours, from 0 to 1.

    `cka` with the kernel ``exp(-d²/2σ²)``; the smaller `fraction`, the more local.
    """
    K, L = (sample.centred_kernel(centred, fraction) for sample in (rows.x, rows.y))
    return _cosine(K, L, fraction).clamp(max=1)


@measure(
    higher_is_closer=True,
    bounds=(-1.0, 1.0),
    unchanged_by=RIGID,
    convention="unbiased HSIC₁, RBF kernel with σ = `fraction` × the median distance over distinct pairs, not clamped",
    smooth=MEDIAN,
    reference=f"{KORNBLITH}; Song et al. (2012), JMLR 13",
    means="How alike the two layers arrange near neighbours, with the bias of small samples taken off. Unrelated "
    "layers lie around 0.",
    cannot_see="Distances much larger than the kernel's width all look the same, and with a narrow kernel few "
    "pairs decide.",
)
def cka_rbf_debiased(rows: Rows, *, fraction: float = 0.4) -> Tensor:
    """Return `cka_rbf` with the bias of small samples taken off, from -1 to 1."""
    if rows.n < 4:
        raise NoValue(f"the unbiased HSIC needs at least 4 examples; got {rows.n}.")
    K, L = (sample.centred_kernel(u_centred, fraction) for sample in (rows.x, rows.y))
    return _cosine(K, L, fraction)


def _cosine(K: Tensor, L: Tensor, fraction: float) -> Tensor:
    sizes = K.norm() * L.norm()
    if not float(sizes.detach()) > 0:
        raise NoValue(
            f"the HSIC of a layer with itself is zero: fraction={fraction} makes its RBF kernel the same for all."
        )
    return (K * L).sum() / sizes
