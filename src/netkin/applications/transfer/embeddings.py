"""Mean embeddings: where the features and gradients of a model put a data set, and how far that is from the origin.

Tang et al. (2020), sections 5.3, 5.4 and appendix F.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from netkin.identity.data import contents
from netkin.progress import ProgressOption
from netkin.representations.gradients import Loss, ModelReading, Rows, Target
from netkin.representations.inputs import Forward, Transform, batch_length
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.statistics.outer_products import LayerEmbeddings


def layer_embeddings(
    model: nn.Module,
    data: Any,
    layers: Spec = None,
    *,
    target: str | Loss = "tempered",
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

    def take(batch: Any, features: Rows, gradients: Rows) -> None:
        if not made:
            made.append(LayerEmbeddings(list(features), sample=sample, buckets=buckets, seed=seed))
        what = contents(batch, batch_length(batch)).cpu().numpy() if buckets else None
        made[0].update(features, gradients, contents=what)

    reading.run(take, data, layers, examples, progress)
    return made[0]


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


def adaptation_score(model: nn.Module, data: Any, layers: Spec = None, **options: Any) -> dict[str, float]:
    """Return for each layer ``log(‖μ‖ / (‖K‖/N²))``, Eq. 48, with the exact K; options as in `layer_embeddings`.

    Section 5.4 of the paper reads a high score as a data set that is similar to the model's own, appendix F as one to
    which the model must adapt. It grows with log N: compare data sets with the same number of `examples`.
    """
    made = layer_embeddings(model, data, layers, **options)
    return {name: made.embedding(name).adaptation_score for name in made.names}
