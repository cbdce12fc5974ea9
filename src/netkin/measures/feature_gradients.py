"""Measures of kernels of features and gradients together: Tang et al. (2020), exact or sketched.

A layer is represented by a kernel matrix over examples, made of its features f and of the gradients g of the loss:
``features`` and ``gradients`` alone, their ``sum``, ``product`` (of f ∘ g), ``hadamard`` (K_f ∘ K_g, the kernel of
ψ = g fᵀ), ``transport``, and with sketches ``psi``: ψ itself sketched, which `hadamard` of two sketches is not.
"""

from __future__ import annotations

from torch import Tensor

from netkin.measures.registry import measure
from netkin.statistics.kernel_pairs import Kernels
from netkin.statistics.sketches import Sketch

PAPER = "Tang et al. (2020), arXiv:2003.11498"
ROTATION = frozenset({"rotation", "scaling"})
SPREAD = "it is random by its seed: repeat it over seeds"


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER,
    convention="kernels centred over examples; gradients of the tempered loss", shows=("kernel",),
)  # fmt: skip
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

    Args:
        kernel: "features", "gradients", "sum", "product", "hadamard" or "transport".
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.alignment(kernel, "examples")


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER,
    convention="Eq. 10 as printed: not centred", shows=("kernel",),
)  # fmt: skip
def kernel_cka_uncentered(
    pair: Kernels,
    *,
    kernel: str = "hadamard",
    target: str = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
) -> Tensor:
    """Return the alignment of two layers' kernels of features and gradients without centring, from 0 to 1.

    Args:
        kernel: "features", "gradients", "sum", "product", "hadamard" or "transport".
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.alignment(kernel)


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER,
    convention="Eq. 11 as printed: not centred", shows=("kernel",),
)  # fmt: skip
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

    Args:
        kernel: "features", "gradients", "sum", "product", "hadamard" or "transport".
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.bures(kernel)


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER, smooth=SPREAD,
    convention="sketched; centred over the examples of each data set", shows=("kernel", "buckets"),
)  # fmt: skip
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
    """Return the centred alignment of two layers' sketched kernels, which may be of different data, from 0 to 1.

    Args:
        kernel: "psi", "features", "gradients", "sum" or "product".
        buckets: into how many sums the examples of each data set go.
        stacks: into how many of these sums each example goes.
        seed: of the buckets and the signs of the examples.
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.alignment(kernel, "examples")


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER, smooth=SPREAD,
    convention="sketched; centred over buckets, as the authors' code does", shows=("kernel", "buckets"),
)  # fmt: skip
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
    """Return the alignment of two layers' sketched kernels, centred about the mean of the buckets, from 0 to 1.

    Args:
        kernel: "psi", "features", "gradients", "sum", "product", "hadamard" or "transport".
        buckets: into how many sums the examples of each data set go.
        stacks: into how many of these sums each example goes.
        seed: of the buckets and the signs of the examples.
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.alignment(kernel, "buckets")


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER, smooth=SPREAD,
    convention="sketched; Eq. 10 as printed: not centred", shows=("kernel", "buckets"),
)  # fmt: skip
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
    """Return the alignment of two layers' sketched kernels without centring, from 0 to 1.

    Args:
        kernel: "psi", "features", "gradients", "sum", "product", "hadamard" or "transport".
        buckets: into how many sums the examples of each data set go.
        stacks: into how many of these sums each example goes.
        seed: of the buckets and the signs of the examples.
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.alignment(kernel)


@measure(
    higher_is_closer=True, bounds=(0.0, 1.0), unchanged_by=ROTATION, reference=PAPER, smooth=SPREAD,
    convention="sketched; Eq. 11 as printed: not centred", shows=("kernel", "buckets"),
)  # fmt: skip
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
    """Return the normalised Bures similarity of two layers' sketched kernels, from 0 to 1.

    Args:
        kernel: "psi", "features", "gradients", "sum", "product", "hadamard" or "transport".
        buckets: into how many sums the examples of each data set go.
        stacks: into how many of these sums each example goes.
        seed: of the buckets and the signs of the examples.
        target: the loss of the gradients: "tempered", "labels" or "predicted" (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered.
        outputs: what the models give: "categorical" or "multilabel" logits, or "continuous" numbers.
    """
    return pair.bures(kernel)
