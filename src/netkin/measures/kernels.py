"""Measures that read kernel matrices: mini-batch CKA, CKA with an RBF kernel, and kernels of features and gradients.

With features and gradients (Tang et al. 2020, exact or sketched) a layer is represented by a kernel matrix over
examples, made of its features f and of the gradients g of the loss: ``features`` and ``gradients`` alone, their
``sum``, ``product`` (of f ∘ g), ``hadamard`` (K_f ∘ K_g, the kernel of ψ = g fᵀ), ``transport``, and with sketches
``psi``: ψ itself sketched, which `hadamard` of two sketches is not.

`batch_cka` and `gram_cosines` are the CKA of one batch as a term of a loss: of two layers, or of all pairs of many;
finite, with gradients everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from netkin.arrays import at_least_single
from netkin.errors import NoValue, ShapeError
from netkin.measures.registry import LEADING, RIGID, MeasureFunction, Parameters, measure
from netkin.statistics import Grams, Rows
from netkin.statistics.kernel_pairs import Kernels
from netkin.statistics.linear_algebra import centred, u_centred
from netkin.statistics.sketches import Sketch

MEDIAN = "its kernel width is a median"
KORNBLITH = "Kornblith et al. (2019), arXiv:1905.00414"
PAPER = "Tang et al. (2020), arXiv:2003.11498"
SPREAD = "it is random by its seed: repeat it over seeds"
EXACT = '"features", "gradients", "sum", "product", "hadamard" or "transport"'
MEANINGS = {  # of the parameters that these measures share
    "buckets": "into how many sums the examples of each data set go.",
    "stacks": "into how many of these sums each example goes.",
    "seed": "of the buckets and the signs of the examples.",
    "target": 'the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).',
    "beta": "the exponent by which the prediction is tempered.",
    "outputs": 'what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.',
}
P = ParamSpec("P")
S = TypeVar("S")


@measure(
    higher_is_closer=True,
    bounds=(-1.0, 1.0),
    unchanged_by=RIGID,
    convention="m(m - 3) HSIC₁ summed over mini-batches of m examples, one ratio at the end; "
    "a remainder under 4 examples left out",
    shows=("batch",),
    smooth=lambda settings: settings["kernel"] == "linear" or MEDIAN,
    reference="Nguyen et al. (2021), arXiv:2010.15327",
    means="Debiased CKA added up over mini-batches, so that layers of any width fit into memory. Unrelated layers "
    "lie around 0; 1 means a rotated, rescaled, shifted copy.",
    cannot_see=f"Relations between examples of different batches are ignored, so the batch size matters. {LEADING}",
)
def cka_minibatch(grams: Grams, *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4) -> Tensor:
    """Return CKA estimated from mini-batches of `batch` examples, from -1 to 1.

    The unbiased HSIC₁ of the mini-batches is added up, and one ratio is taken at the end. Memory does not depend on the
    width of the layers; the value does depend on the batch size, which is therefore part of the id. `kernel` is
    "linear" or "rbf", as wide as `fraction` of the median distance in a mini-batch.

    A mini-batch of m examples has the weight m(m - 3), the factor by which HSIC₁ divides, so that a short last batch
    counts little. Implementations that give every mini-batch the same weight, as the paper prints it, agree where all
    are of one size, and differ where the last one is shorter.
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
    means="How similarly the two layers arrange near neighbours among the examples; a smaller fraction is more local.",
    cannot_see="Distances much larger than the kernel's width all look the same. On few examples unrelated layers "
    "score above 0.",
)
def cka_rbf(rows: Rows, *, fraction: float = 0.4) -> Tensor:
    """Return how similarly two layers arrange the examples by a kernel that sees near neighbours, from 0 to 1.

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
    means="How similarly the two layers arrange near neighbours, without the bias of small samples. Unrelated "
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


def of_kernels(
    convention: str, kernels: str = EXACT, *, means: str, cannot_see: str, centred: bool = False
) -> Callable[[Callable[Concatenate[S, P], Tensor]], MeasureFunction[S, P]]:
    """Register a measure of kernels, and describe its parameters below its docstring.

    `kernels` are those it takes, `centred` says whether they are centred about the mean of the examples.
    """

    def register(function: Callable[Concatenate[S, P], Tensor]) -> MeasureFunction[S, P]:
        names = list(inspect.signature(function).parameters)[1:]
        said = [f"\n    {name}: {({'kernel': f'{kernels}.'} | MEANINGS)[name]}" for name in names]
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:{''.join(said)}"
        facts: dict[str, Any] = {"shows": ("kernel",)}
        if "seed" in names:
            facts = {"shows": ("kernel", "buckets"), "smooth": SPREAD}
        made = measure(
            higher_is_closer=True, bounds=(0.0, 1.0), reference=PAPER, convention=convention, means=means,
            cannot_see=cannot_see, unchanged_by=partial(_kernel_invariances, sketched="seed" in names, centred=centred),
            **facts,
        )  # fmt: skip
        return made(function)

    return register


def _kernel_invariances(settings: Parameters, sketched: bool, centred: bool) -> set[str]:
    """Return what leaves a value as it is, where gradients change as the layer's do: by 1/c if features do by c.

    Unit by unit, products of features and gradients depend on the units. So does the sketch of ψ, which is that of the
    kernel on average alone. What is added to features changes no gradient.
    """
    kernel = settings["kernel"]
    changes = {"rotation"} if kernel != "product" and not (sketched and kernel == "psi") else set()
    changes |= {"scaling"} if kernel not in ("sum", "transport") else set()
    changes |= {"translation"} if kernel == "gradients" or (centred and kernel in ("features", "sum")) else set()
    return changes


@of_kernels(
    "kernels centred over examples; gradients of the tempered loss",
    centred=True,
    means="How similarly the two layers arrange the examples, by features and by gradients of the loss. "
    "With the kernel 'hadamard' two examples are close if both their features and their gradients are.",
    cannot_see=f"{LEADING} Gradients are those of a prediction that is made flatter, not of the labels. Few "
    "examples score high by themselves.",
)
def kernel_cka(
    pair: Kernels,
    *,
    kernel: str = "hadamard",
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the centred alignment of two layers' kernels of features and gradients, from 0 to 1.

    ``⟨HKH, HLH⟩ / (‖HKH‖ ‖HLH‖)``. With kernel="features" it is `cka`. Called with two layers, each is a tuple
    (features, gradients).
    """
    return pair.alignment(kernel, "examples")


@of_kernels(
    "Eq. 10 as printed: not centred",
    means="The cosine of the two layers' kernels of features and gradients as they are, as the paper prints it.",
    cannot_see="A mean that both layers share counts as similarity: positive features score high whatever they encode.",
)
def kernel_cka_uncentered(
    pair: Kernels,
    *,
    kernel: str = "hadamard",
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the alignment of two layers' kernels of features and gradients without centring, from 0 to 1."""
    return pair.alignment(kernel)


@of_kernels(
    "Eq. 11 as printed: not centred",
    means="The cosine that is left between the two layers' features and gradients after the best rotation, as the "
    "paper prints it. Small directions count more than in CKA.",
    cannot_see="A mean that both layers share counts as similarity, and on few examples unrelated layers score high.",
)
def kernel_nbs(
    pair: Kernels,
    *,
    kernel: str = "hadamard",
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the normalised Bures similarity of two layers' kernels of features and gradients, from 0 to 1.

    ``tr (K^½ L K^½)^½ / √(tr K tr L)``.
    """
    return pair.bures(kernel)


@of_kernels(
    "sketched; centred over the examples of each data set",
    '"psi", "features", "gradients", "sum" or "product"',
    centred=True,
    means="How similar the kernels of two layers are, also on different data: each data set is summed into random "
    "buckets, and the buckets are compared.",
    cannot_see="Between different data sets no example belongs to another, so that shapes of spectra are compared "
    "and nothing else; the same data with other buckets fall to a fraction. It is random by its seed: repeat it.",
)
def sketched_cka(
    pair: Sketch,
    *,
    kernel: str = "psi",
    buckets: int = 512,
    stacks: int = 1,
    seed: int = 0,
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the centred alignment of two layers' sketched kernels, which may be of different data, from 0 to 1."""
    return pair.alignment(kernel, "examples")


@of_kernels(
    "sketched; centred over buckets, as the authors' code does",
    f'"psi", {EXACT}',
    means="The alignment of two sketched kernels, centred about the mean of the buckets, as the paper's own code does.",
    cannot_see="The mean of the buckets is nearly zero by their signs, so that this centring removes little. "
    "Random by its seed, and between different data sets the shapes of spectra decide.",
)
def sketched_cka_by_buckets(
    pair: Sketch,
    *,
    kernel: str = "hadamard",
    buckets: int = 512,
    stacks: int = 1,
    seed: int = 0,
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the alignment of two layers' sketched kernels, centred about the mean of the buckets, from 0 to 1."""
    return pair.alignment(kernel, "buckets")


@of_kernels(
    "sketched; Eq. 10 as printed: not centred",
    f'"psi", {EXACT}',
    means="The cosine of two sketched kernels as they are, as the paper prints it.",
    cannot_see="Random by its seed; between different data sets the shapes of spectra decide, and a large mean "
    "above all.",
)
def sketched_cka_uncentered(
    pair: Sketch,
    *,
    kernel: str = "hadamard",
    buckets: int = 512,
    stacks: int = 1,
    seed: int = 0,
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the alignment of two layers' sketched kernels without centring, from 0 to 1."""
    return pair.alignment(kernel)


@of_kernels(
    "sketched; Eq. 11 as printed: not centred",
    f'"psi", {EXACT}',
    means="The normalised Bures similarity of two sketched kernels, as the paper prints it.",
    cannot_see="Random by its seed; between different data sets the shapes of spectra decide. Few buckets raise it.",
)
def sketched_nbs(
    pair: Sketch,
    *,
    kernel: str = "hadamard",
    buckets: int = 512,
    stacks: int = 1,
    seed: int = 0,
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the normalised Bures similarity of two layers' sketched kernels, from 0 to 1."""
    return pair.bures(kernel)


# --- CKA of one batch, with gradients ---------------------------------------------------------------------------------


def batch_cka(X: Tensor, Y: Tensor) -> Tensor:
    """Return the CKA of a batch of rows, as `cka` gives it, without once waiting for the device.

    Of few wide rows, such as whole maps, it is taken from their n × n Gram matrices. Rows that do not vary have none;
    theirs counts as 0, and its gradient is 0 too.
    """
    with torch.autocast(X.device.type, enabled=False):  # it would round the products
        X, Y = (rows.to(at_least_single(rows.dtype)) for rows in (X, Y))
        X, Y = (_unit(rows, rows.mean(0)) for rows in (X, Y))
        if len(X) < max(X.shape[1], Y.shape[1]):
            K, L = X @ X.mT, Y @ Y.mT
            cross = (K * L).sum()
        else:
            K, L = X.mT @ X, Y.mT @ Y
            cross = (X.mT @ Y).square().sum()
        return cross / (K.square().sum() * L.square().sum()).clamp(min=1e-30).sqrt()


def batch_gram(rows: Tensor) -> Tensor:
    """Return ``XXᵀ`` of a batch of rows about their mean, n × n; zeros where they do not vary.

    The mean carries no gradient, as what `gram_cosines` makes of this does not depend on it. Rows of a length between
    1e-18 and 1e18 neither vanish nor overflow.
    """
    with torch.autocast(rows.device.type, enabled=False):
        X = rows.to(at_least_single(rows.dtype))
        mean = X.detach().mean(0)
        gram = _SelfProduct.apply(X - mean)
        # rounding of the mean is no variation
        least = (8 * torch.finfo(X.dtype).eps) ** 2 * len(X) * mean.square().sum()
        return gram * (gram.detach().diagonal().sum() > least)


def gram_cosines(grams: Tensor, debiased: bool = False) -> Tensor:
    """Return the CKA of every pair of layers, L × L, from their Gram matrices over one batch, L × n × n.

    The matrices are centred (with `debiased` U-centred, for `cka_debiased`), flattened and scaled to length one; one
    product has the cosines of all pairs. A layer that does not vary has no CKA: its row is 0, and so is its gradient. A
    layer with itself is exactly 1, without gradient.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> grams = torch.stack([batch_gram(X), batch_gram(3 * X + 5), batch_gram(torch.ones(3, 1))])
        >>> gram_cosines(grams).round(decimals=4).tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if debiased and grams.shape[-1] < 4:
        raise ShapeError(f"the unbiased HSIC needs at least 4 examples; got {grams.shape[-1]}.")
    flat = (u_centred if debiased else centred)(grams).flatten(1)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    unit = flat / torch.where(size > 0, size, torch.inf)
    same = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    return torch.where(same, (size > 0).to(flat.dtype), unit @ unit.mT).to(grams.dtype)


class _SelfProduct(torch.autograd.Function):
    """``XXᵀ``, whose gradient takes one product where that of ``X @ X.mT`` takes two."""

    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        ctx.save_for_backward(X)
        return X @ X.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with torch.autocast(X.device.type, enabled=False):
            return (gradient + gradient.mT) @ X


def _unit(X: Tensor, mean: Tensor) -> Tensor:
    """Return rows about their mean, scaled to length one so that none overflows; zeros if they do not vary."""
    rows = X - mean
    size = torch.linalg.vector_norm(rows.detach())
    offset = len(X) ** 0.5 * torch.linalg.vector_norm(mean.detach())
    # rounding of the mean is no variation: it would be blown up to length one
    varies = size > 8 * torch.finfo(rows.dtype).eps * offset
    return rows / torch.where(varies, size.clamp(min=1e-30), torch.inf)
