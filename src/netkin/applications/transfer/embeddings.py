"""One number for a network on some data: norms of mean embeddings and of weights.

A mean embedding is the mean of a data set in the feature space of a model's features and gradients:
Tang et al. (2020), sections 5.3, 5.4 and appendix F. The Fisher–Rao norm is that of Liang et al. (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.transfer.fisher import filter_weights, refuse_odd_outputs
from netkin.arrays import refuse_non_finite, summing_dtype
from netkin.errors import UnknownName, ValueFault, did_you_mean
from netkin.identity.data import contents
from netkin.progress import ProgressOption, reported
from netkin.representations.gradients import ExampleLosses, ModelReading, RowsByLayer, Taps, Target, logits_of
from netkin.representations.guests import guest
from netkin.representations.inputs import Forward, Transform, batch_length, batches_of, call, labels_of, prepared
from netkin.representations.layers import Spec, unwrapped
from netkin.representations.shapes import Shape
from netkin.sources.names import by_name
from netkin.statistics.outer_products import LayerEmbeddings

DISTRIBUTIONS = ("model", "tempered", "labels")


@by_name(models="model", data="data")
def layer_embeddings(
    model: nn.Module,
    data: Any,
    layers: Spec = None,
    *,
    target: str | ExampleLosses = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
    shape: Shape | Mapping[str, Shape] = None,
    examples: int | None = None,
    sample: int = 2048,
    buckets: int = 0,
    seed: int = 0,
    forward: Forward | None = None,
    transform: Transform | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> LayerEmbeddings:
    """Return the mean embeddings of a data set at a model's layers, from one forward and one backward pass.

    ``made.embedding(layer)`` holds ‖μ‖, ‖K‖, Tr K and what Eqs. 19 and 48 make of them; ``made.sketched(layer)`` the
    same as the authors' code reads it off a sketch. Default layers from which no path leads to the loss are left out.

    Args:
        model: the model, which is left as it was.
        data: a loader, an iterable of batches, or one array of inputs; with target="labels" batches hold labels.
        layers: names, globs, module types or a list of those; None for the default layers.
        target: the loss of the gradients: "tempered", "labels", "predicted" or a function (see `nk.gradients`).
        beta: the exponent by which the prediction is tempered, from 0 to below 1.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" numbers.
        shape: what one example is, one row each, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        sample: of how many examples rows are kept: beyond it ‖K‖ is estimated from their pairs.
        buckets: into how many buckets to sketch, for `sketched`; 0 for none.
        seed: of the sample and of the buckets.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    wanted = Target(target, beta, outputs)
    reading = ModelReading(model, wanted, shape, forward, transform, exact_model, one_row=True)
    made = list[LayerEmbeddings]()

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        if not made:
            made.append(LayerEmbeddings(list(features), sample=sample, buckets=buckets, seed=seed))
        what = contents(batch, batch_length(batch)).cpu().numpy() if buckets else None
        made[0].update(features, gradients, contents=what)

    reading.run(take, data, layers, examples, progress)
    return made[0]


@by_name(models="model", data="data")
def mean_embedding_norm(model: nn.Module, data: Any, layers: Spec = None, **options: Any) -> dict[str, float]:
    """Return for each layer ‖μ‖, the norm of the mean over the examples of g fᵀ; options as in `layer_embeddings`.

    It is ``√(mean of K)`` over all pairs of examples, with K = K_f ∘ K_g, neither centred nor sketched. The paper reads
    a large one as a data set to which the model must adapt.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(model.weight)
        >>> found = mean_embedding_norm(model, torch.tensor([[4.0, 0.0]]), "")  # g is p - q = (.1012, -.1012)
        >>> round(found[""], 3)
        0.573
    """
    made = layer_embeddings(model, data, layers, **options)
    return {name: made.embedding(name).norm for name in made.names}


@by_name(models="model", data="data")
def adaptation_score(model: nn.Module, data: Any, layers: Spec = None, **options: Any) -> dict[str, float]:
    """Return for each layer ``log(‖μ‖ / (‖K‖/N²))``, Eq. 48, with the exact K; options as in `layer_embeddings`.

    Section 5.4 of the paper reads a high score as a data set that is similar to the model's own, appendix F as one to
    which the model must adapt. It grows with log N: compare data sets with the same number of `examples`.
    """
    made = layer_embeddings(model, data, layers, **options)
    return {name: made.embedding(name).adaptation_score for name in made.names}


@by_name(models="model", data="data")
def fisher_rao_norm(
    model: nn.Module,
    data: Any,
    *,
    depth: int | None = None,
    labels: str = "model",
    beta: float = 0.5,
    outputs: str = "categorical",
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> float:
    """Return ``(L + 1) √E⟨f, ∇ loss⟩²``, with f the network's output and L its number of hidden layers.

    Liang et al. (2019), arXiv:1711.01530; Eq. 3 of Tang et al. (2020). For a network without biases whose activations
    are piecewise linear it is ``√(θᵀ F θ)``, with F the Fisher information and θ all weights; for others it is what the
    formula says.

    Args:
        model: the model, which is left as it was.
        data: a loader, an iterable of batches, or one array of inputs; with labels="labels" batches hold labels.
        depth: L; None for one less than the modules with a matrix or a kernel of weights.
        labels: where y is from: "model", the prediction p; "tempered", p^β; both as exact means; "labels" of the data.
        beta: the exponent by which the prediction is tempered, from 0 to below 1.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" means of Gaussians.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(model.weight)
        >>> round(fisher_rao_norm(model, torch.tensor([[2.0, 0.0]])), 3)  # 2 √(p (1 - p)), p = 1/(1 + e^-2)
        0.648
    """
    if labels not in DISTRIBUTIONS:
        hint = did_you_mean(str(labels), DISTRIBUTIONS) or "."
        raise UnknownName(
            f"no distribution of y named {labels!r}{hint} There are {', '.join(map(repr, DISTRIBUTIONS))}."
        )
    target = Target("labels" if outputs == "continuous" or labels == "labels" else "tempered", beta, outputs)
    factor, total, seen = _layer_count(model, depth), 0.0, 0
    with torch.inference_mode(False), guest(model, exact=exact_model):
        for batch in reported(batches_of(data, examples), "reading", "batches", progress):
            batch = Taps.lend(prepared(model, batch, transform))
            logits = logits_of(call(model, batch, forward)).detach()
            refuse_non_finite(logits, "the model's output")
            squares = _squared_products(logits, labels_of(batch), labels, target)
            total, seen = total + float(squares.sum()), seen + len(squares)
    return factor * (total / seen) ** 0.5


def fisher_rao_distance(a: float, b: float) -> float:
    """Return ``|a - b| / √(a b)`` of two Fisher–Rao norms: section 4 of Tang et al. (2020).

    Example:
        >>> fisher_rao_distance(1.0, 4.0)
        1.5
    """
    if not (a > 0 and b > 0):
        raise ValueFault(f"the distance is that of two norms above 0; got {a:g} and {b:g}.")
    return abs(a - b) / (a * b) ** 0.5


def _layer_count(model: nn.Module, depth: int | None) -> int:
    """Return L + 1."""
    if depth is not None and depth < 0:
        raise ValueFault(f"`depth`, the number of hidden layers, must be at least 0; got {depth}.")
    found = {id(m): any(one.ndim > 1 for one in filter_weights(m).values()) for m in unwrapped(model).modules()}
    if depth is None and not any(found.values()):
        raise ValueFault("the model has no layer with a matrix of weights to count; pass `depth`.")
    return sum(found.values()) if depth is None else depth + 1


def _squared_products(logits: Tensor, given: Any, labels: str, target: Target) -> Tensor:
    """Return the mean of ``⟨f, ∇ loss⟩²`` over y, for each example."""
    f = logits.to(summing_dtype(logits.device))
    if labels == "labels":
        with torch.enable_grad():
            inner = f.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(target.losses(inner, given).sum(), inner)
        return (f * gradient).flatten(1).sum(1).square()
    refuse_odd_outputs(f, target.outputs)
    factor = target.beta if labels == "tempered" else 1.0
    if target.outputs == "continuous":  # a Gaussian of variance 1, or 1/β
        if not factor:
            raise ValueFault("a Gaussian is tempered with `beta` above 0; got 0, at which it has no width.")
        return f.square().sum(1) / factor
    if target.outputs == "multilabel":
        p, q = f.sigmoid(), (factor * f).sigmoid()
        return (f * (p - q)).sum(1).square() + (f.square() * q * (1 - q)).sum(1)
    from_mean = (f * f.softmax(1)).sum(1, keepdim=True) - f
    return ((factor * f).softmax(1) * from_mean.square()).sum(1)
