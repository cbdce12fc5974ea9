"""`sparsify`: masks for a share of a network's weights, at random by layer ratios or by a pruning score.

Pruning scores estimate before training how much each weight matters; the highest are kept. SNIP: Lee et al.
(2019), arXiv:1810.02340. GraSP: Wang et al. (2020), arXiv:2002.07376. SynFlow: Tanaka et al. (2020), arXiv:2006.05467.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from netkin.applications.sparsity.masks import (
    MaskableLayer,
    layer_table,
    mask_of,
    mask_of_largest,
    masks_of,
    prunable_layers,
    put_masks,
    weight_behind,
)
from netkin.errors import EmptyLayerWarning, InvalidValue, outside, require_at_least, require_listed
from netkin.progress import ProgressOption, reporting, showing
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import device_of, dtype_of, inputs_of, labels_of, outputs_of
from netkin.representations.layers import Spec
from netkin.results.weight_sparsity import WeightSparsity
from netkin.settings import model_lock, random_states_kept, seed_all
from netkin.sources.names import by_name
from netkin.training import Recipe
from netkin.training.example_order import batch_order, placed
from netkin.training.loop import Loss, default_loss

RANDOM = ("uniform", "erk")
METHODS = (*RANDOM, "magnitude", "snip", "grasp", "synflow")
TEMPERATURE = 200.0  # GraSP divides logits by it, as in its authors' code
ROUNDS = 100  # of SynFlow, each pruning a little more
Scores = dict[str, Tensor]


@by_name(data="data")
def sparsify(
    model: nn.Module,
    sparsity: float,
    *,
    method: str = "erk",
    layers: Spec = None,
    data: Any = None,
    examples: int = 128,
    loss: Loss | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> WeightSparsity:
    """Mask a share of the model's weights where it lies, and return what is left of each layer.

    Masked weights are exactly zero from now on, whatever optimizer, momentum or weight decay do; `nk.train` and
    `nk.train_many` work as before. The number of masked weights is the whole number nearest to `sparsity` times the
    prunable weights, those of linear and convolutional layers. A model with masks is pruned further: what is masked
    stays so. Layers that have lost all weights are named in a warning.

    The methods are "uniform" (at random, the same share of each layer), "erk" (at random, a layer's share of weights
    that stay in proportion to the sum of its weight's sizes over their product, Erdős–Rényi-Kernel), "magnitude" (the
    smallest go, over all layers), and over all layers by scores before training "snip", "grasp" and "synflow".

    Args:
        model: The network, which is changed.
        sparsity: The share of masked weights, from 0 to below 1.
        method: One of the six above.
        layers: Which layers to prune; all linear and convolutional ones by default.
        data: For "snip" and "grasp" labelled examples, for "synflow" inputs, whose shape is all that matters there.
        examples: How many of them are taken, shuffled by `seed`; a loader's first batch is taken as it is.
        loss: A function of ``(outputs, labels)`` for "snip" and "grasp"; by default the cross entropy.
        seed: Of random masks and of the order of the examples.
        progress: None shows a bar of SynFlow's rounds, False nothing; or a function of ``(done, total, what)``.

    Example:
        >>> model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
        >>> sparsify(model, 0.9, method="uniform").left, int((model[0].weight != 0).sum())
        (150, 100)
    """
    _require_settings(sparsity, method, examples)
    chosen = prunable_layers(model, layers)
    kept = _kept_of(chosen, sparsity)
    masks: Mapping[str, Tensor]
    if method in RANDOM:
        shapes = {name: tuple(layer.weight.shape) for name, layer in chosen.items()}
        counts = layer_counts(shapes, kept, method)
        _require_enough_weights(chosen, counts)
        masks = masks_by_layer(_left_alone(chosen, random_scores(model, list(chosen), seed)), counts)
    elif method == "synflow":
        batch = batch_for(data, examples, seed, method)
        with showing(progress):
            masks = synflow_masks(
                model, list(chosen), batch, kept, lambda scores, count: _overall(chosen, scores, count, method)
            )
    else:
        masks = _overall(chosen, _scores(model, list(chosen), method, data, examples, loss, seed), kept, method)
    put_masks(model, masks)
    table = layer_table(model, chosen)
    warn_of_empty(table)
    return table


def layer_counts(shapes: Mapping[str, Sequence[int]], kept: int, method: str) -> dict[str, int]:
    """Return how many weights each layer keeps, `kept` in all, by "uniform" or "erk" ratios.

    ERK: the density of a layer is in proportion to the sum of its weight's sizes over their product, for a convolution
    (n_in + n_out + width + height) / (n_in n_out width height); a layer that would need more weights than it has stays
    dense. Fractions are rounded so that the sum is exact: those with the largest remainders are rounded up.

    Example:
        >>> layer_counts({"a": (10, 10), "b": (100, 100)}, 505, "erk")
        {'a': 46, 'b': 459}
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if method == "uniform":
        wanted = {name: kept * size / sum(sizes.values()) for name, size in sizes.items()}
    else:
        wanted = _erk({name: sum(shape) for name, shape in shapes.items()}, sizes, kept)
    counts = {name: min(int(value), sizes[name]) for name, value in wanted.items()}
    rest = kept - sum(counts.values())
    open_ = [name for name in sizes if counts[name] < sizes[name]]
    by_remainder = sorted(open_, key=lambda name: counts[name] - wanted[name])  # stable: earlier layers first
    for name in by_remainder[:rest]:
        counts[name] += 1
    return counts


def _erk(sums: Mapping[str, int], sizes: Mapping[str, int], kept: int) -> dict[str, float]:
    dense: set[str] = set()
    while True:
        free = [name for name in sizes if name not in dense]
        scale = (kept - sum(sizes[name] for name in dense)) / max(sum(sums[name] for name in free), 1)
        densest = max((sums[name] / sizes[name] for name in free), default=0.0)
        if scale * densest <= 1:
            return {name: float(sizes[name]) if name in dense else scale * sums[name] for name in sizes}
        dense |= {name for name in free if sums[name] / sizes[name] == densest}


def masks_by_layer(scores: Scores, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Return masks that keep the best `counts` weights of each layer; of equals the first."""
    return {name: mask_of_largest(own, counts[name]) for name, own in scores.items()}


def magnitude_masks(model: nn.Module, layers: Sequence[str], sparsity: float) -> dict[str, Tensor]:
    """Return masks without the smallest of all weights; those that were masked are zero, and so among them."""
    scores = magnitude_scores(model, layers)
    for name, mask in masks_of(model).items():
        scores[name] = scores[name].masked_fill(~mask, -1.0)
    total = sum(one.numel() for one in scores.values())
    return masks_overall(scores, total - round(float(sparsity) * total))


def masks_overall(scores: Scores, kept: int) -> dict[str, Tensor]:
    """Return masks that keep the best `kept` weights of all layers together; of equals the first."""
    joined = torch.cat([own.flatten().double() for own in scores.values()])
    best = mask_of_largest(joined, kept).split([own.numel() for own in scores.values()])
    return {name: part.reshape(own.shape) for (name, own), part in zip(scores.items(), best, strict=True)}


def _scores(
    model: nn.Module, layers: list[str], method: str, data: Any, examples: int, loss: Loss | None, seed: int
) -> Scores:
    if method == "magnitude":
        return magnitude_scores(model, layers)
    batch = batch_for(data, examples, seed, method)
    return (snip_scores if method == "snip" else grasp_scores)(model, layers, batch, loss)


def _overall(layers: Mapping[str, MaskableLayer], scores: Scores, kept: int, method: str) -> dict[str, Tensor]:
    joined = torch.cat([own.flatten() for own in scores.values()])
    if not torch.isfinite(joined).all():
        bad = int((~torch.isfinite(joined)).sum())
        raise InvalidValue(
            f"{bad:,} of {joined.numel():,} scores of {method!r} are not finite; check weights and data."
        )
    if not joined.any():
        raise InvalidValue(
            f"all {joined.numel():,} scores of {method!r} are zero, so that weights can't be ranked"
            + ("; layer norms take constants, as SynFlow sends, to zero." if method == "synflow" else ".")
        )
    return masks_overall(_left_alone(layers, scores), kept)


def _left_alone(layers: Mapping[str, MaskableLayer], scores: Scores) -> Scores:
    """Return scores in which weights that are masked already come last."""
    found = {}
    for name, own in scores.items():
        before = mask_of(layers[name])
        found[name] = own if before is None else torch.where(before.mask, own.double(), -math.inf)
    return found


def _kept_of(layers: Mapping[str, MaskableLayer], sparsity: float) -> int:
    total = sum(layer.weight.numel() for layer in layers.values())
    kept = total - round(float(sparsity) * total)
    left = sum(_count_left(layer) for layer in layers.values())
    if kept == 0:
        raise InvalidValue(
            f"sparsity={float(sparsity)!r} would leave none of {total:,} weights; take a smaller one.",
            argument="sparsity",
        )
    if kept > left:
        raise InvalidValue(
            f"the model has masks that leave {left:,} of {total:,} weights, and sparsity={float(sparsity)!r} would "
            f"keep {kept:,}; take a sparsity of {1 - left / total:.6g} or more, or a model without masks.",
            argument="sparsity",
        )
    return kept


def _require_enough_weights(layers: Mapping[str, MaskableLayer], counts: Mapping[str, int]) -> None:
    for name, layer in layers.items():
        if counts[name] > _count_left(layer):
            raise InvalidValue(
                f"layer {name!r} would keep {counts[name]:,} weights at random, and its mask leaves "
                f"{_count_left(layer):,}; take a higher sparsity, or a model without masks.",
                argument="sparsity",
            )


def _count_left(layer: MaskableLayer) -> int:
    own = mask_of(layer)
    return layer.weight.numel() if own is None else int(own.mask.sum())


def warn_of_empty(table: WeightSparsity) -> None:
    """Warn, by name, of layers in which no weight is left."""
    empty = table.emptied
    if empty:
        warnings.warn(
            f"no weight is left in {len(empty)} of {len(table.layers)} layers: {', '.join(empty)}; their "
            "outputs are constant. Take a smaller sparsity, or another method.",
            EmptyLayerWarning,
            stacklevel=outside(),
        )


def _require_settings(sparsity: float, method: str, examples: int) -> None:
    require_sparsity(sparsity)
    require_listed("method of choosing weights", method, METHODS, "method")
    require_at_least(1, examples=examples)


def require_sparsity(*values: Any) -> None:
    """Refuse what is no share of masked weights, from 0 to below 1."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
            raise InvalidValue(
                f"sparsity is the share of masked weights, from 0 to below 1; got {value!r}.", argument="sparsity"
            )


def magnitude_scores(model: nn.Module, layers: Sequence[str]) -> Scores:
    """Return the size of each weight."""
    known = prunable_layers(model, layers)
    return {name: layer.weight.detach().abs() for name, layer in known.items()}


def random_scores(model: nn.Module, layers: Sequence[str], seed: int) -> Scores:
    """Return a number at random for each weight, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    known = prunable_layers(model, layers)
    return {name: torch.rand(layer.weight.shape, generator=generator, dtype=torch.float64).to(layer.weight.device)
            for name, layer in known.items()}  # fmt: skip


def snip_scores(model: nn.Module, layers: Sequence[str], batch: Any, loss: Loss | None = None) -> Scores:
    """Return ``|w ∂L/∂w|``, the first-order change of the loss of a batch if a weight were taken away."""
    weights, value = _loss_of(model, layers, batch, loss or default_loss(Recipe(steps=1)))
    gradients = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
    return {name: (weight.detach() * g).abs() for (name, weight), g in zip(weights.items(), gradients, strict=True)}


def grasp_scores(model: nn.Module, layers: Sequence[str], batch: Any, loss: Loss | None = None) -> Scores:
    """Return ``w ⊙ Hg``, by how much the squared norm of the gradient falls, to first order, without a weight.

    g and H are the gradient and the Hessian of the loss of a batch whose logits are divided by 200, among the weights
    of these layers. Where a weight's score is below zero its removal lets the gradient grow.
    """
    chosen = loss or default_loss(Recipe(steps=1))
    with sdpa_kernel(SDPBackend.MATH):  # the one attention that can be differentiated twice
        weights, value = _loss_of(
            model, layers, batch, lambda outputs, labels: chosen(main_tensor(outputs, "") / TEMPERATURE, labels)
        )
        listed = list(weights.values())
        gradients = torch.autograd.grad(value, listed, create_graph=True, materialize_grads=True)
        product = sum((g.detach() * g).sum() for g in gradients)
        assert isinstance(product, Tensor)
        turned = torch.autograd.grad(product, listed, materialize_grads=True)
    return {name: weight.detach() * hg for (name, weight), hg in zip(weights.items(), turned, strict=True)}


def synflow_masks(
    model: nn.Module,
    layers: Sequence[str],
    batch: Any,
    kept: int,
    choose: Callable[[Scores, int], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """Return masks that keep so many weights after 100 rounds of SynFlow, each on what the last has left.

    `choose` makes masks of scores and a number of weights to keep, which falls by one factor in all rounds.
    """
    work = _positive(model)
    start = sum(layer.weight.numel() for layer in prunable_layers(work, layers).values())
    masks: Mapping[str, Tensor] = {}
    with reporting(ROUNDS, "SynFlow", "rounds") as report:
        for done in range(1, ROUNDS + 1):
            left = kept if done == ROUNDS else max(kept, round(start * (kept / start) ** (done / ROUNDS)))
            masks = choose(_flow_scores(work, layers, batch), left)
            put_masks(work, masks)
            report.update()
    return masks


def synflow_scores(model: nn.Module, layers: Sequence[str], batch: Any) -> Scores:
    """Return ``|w| ∂R/∂|w|``, where R sums the outputs for an input of ones through the sizes of all weights.

    R is ``1ᵀ |W_L| ... |W_1| 1`` for linear layers in a row: biases, and the means that batch norms subtract, are left
    out of it.
    """
    return _flow_scores(_positive(model), layers, batch)


def _flow_scores(positive: nn.Module, layers: Sequence[str], batch: Any) -> Scores:
    inputs = inputs_of(placed(batch, device_of(positive), torch.float64))
    inputs = inputs[0] if isinstance(inputs, (tuple, list)) and inputs else inputs
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise InvalidValue("SynFlow lets ones flow through a model, whose inputs must be one array of real numbers.")
    weights = {name: weight_behind(layer) for name, layer in prunable_layers(positive, layers).items()}
    with model_lock(), random_states_kept(positive), torch.enable_grad():
        flow = main_tensor(positive(torch.ones_like(inputs[:1])), "").sum()
        gradients = torch.autograd.grad(flow, list(weights.values()), materialize_grads=True)
    return {name: (weight.detach() * g).abs() for (name, weight), g in zip(weights.items(), gradients, strict=True)}


def batch_for(data: Any, examples: int, seed: int, method: str) -> Any:
    """Return the examples that a score is taken on: a shuffled batch of arrays, or the first batch of a loader."""
    if data is None:
        what = "the shape of inputs" if method == "synflow" else "a batch of labelled examples"
        raise InvalidValue(f"method={method!r} needs {what}; give `data=`, as `(inputs, labels)`.", argument="data")
    with random_states_kept(data=[data]):
        batch = next(islice(batch_order(data, Recipe(steps=1, batch=examples), seed).epoch(), 1), None)
    if batch is None:
        raise InvalidValue(f"method={method!r} needs a batch of examples, and the data gave none.", argument="data")
    return batch


def _positive(model: nn.Module) -> nn.Module:
    """Return a copy in double precision and evaluation mode with the sizes of weights, and without biases."""
    work = copy.deepcopy(model).double().eval().requires_grad_(True)
    with torch.no_grad():
        for name, weight in (*work.named_parameters(), *work.named_buffers()):
            if name.rpartition(".")[2] in ("bias", "running_mean"):
                weight.zero_()
            elif weight.is_floating_point():
                weight.abs_()
    return work


def _loss_of(model: nn.Module, layers: Sequence[str], batch: Any, loss: Loss) -> tuple[Scores, Tensor]:
    """Return the weights of a copy of the model in training mode, and its loss on a batch, with a graph."""
    work = copy.deepcopy(model).train()
    weights = {name: weight_behind(layer).requires_grad_() for name, layer in prunable_layers(work, layers).items()}
    batch = placed(batch, device_of(work), dtype_of(work))
    with model_lock(), random_states_kept(work), torch.enable_grad():
        seed_all(device_of(work), 0, 0)
        value = loss(outputs_of(work, inputs_of(batch)), labels_of(batch))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InvalidValue("the loss must be one number, a tensor of one element, for a batch.")
    return weights, value.reshape(())
