"""Pruning scores: how much each weight matters before training, by SNIP, GraSP, SynFlow or its size.

Higher means that a weight stays. SNIP: Lee et al. (2019), arXiv:1810.02340. GraSP: Wang et al. (2020),
arXiv:2002.07376. SynFlow: Tanaka et al. (2020), arXiv:2006.05467.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from netkin.applications.sparsity.masks import prunable_layers, put_masks, weight_behind
from netkin.errors import ValueFault
from netkin.progress import reporting
from netkin.representations.guests import model_lock, random_states_kept
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import device_of, dtype_of, inputs_of, labels_of
from netkin.training import Recipe, restarts
from netkin.training.course import course_of, placed
from netkin.training.loop import Loss, default_loss, outputs_of

TEMPERATURE = 200.0  # GraSP divides logits by it, as in its authors' code
ROUNDS = 100  # of SynFlow, each pruning a little more
Scores = dict[str, Tensor]


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
        raise ValueFault("SynFlow lets ones flow through a model, whose inputs must be one array of real numbers.")
    weights = {name: weight_behind(layer) for name, layer in prunable_layers(positive, layers).items()}
    with model_lock(), random_states_kept(positive), torch.enable_grad():
        flow = main_tensor(positive(torch.ones_like(inputs[:1])), "").sum()
        gradients = torch.autograd.grad(flow, list(weights.values()), materialize_grads=True)
    return {name: (weight.detach() * g).abs() for (name, weight), g in zip(weights.items(), gradients, strict=True)}


def batch_for(data: Any, examples: int, seed: int, method: str) -> Any:
    """Return the examples that a score is taken on: a shuffled batch of arrays, or the first batch of a loader."""
    if data is None:
        what = "the shape of inputs" if method == "synflow" else "a batch of labelled examples"
        raise ValueFault(f"method={method!r} needs {what}; give `data=`, as `(inputs, labels)`.")
    batch = next(islice(course_of(data, Recipe(steps=1, batch=examples), seed).epoch(), 1), None)
    if batch is None:
        raise ValueFault(f"method={method!r} needs a batch of examples, and the data gave none.")
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
        restarts.seed_all(work, 0, 0)
        value = loss(outputs_of(work, inputs_of(batch)), labels_of(batch))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueFault("the loss must be one number, a tensor of one element, for a batch.")
    return weights, value.reshape(())
