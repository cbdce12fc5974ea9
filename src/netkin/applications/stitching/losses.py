"""Losses of a stitched network: to the second model's answers, to the true labels, what its CKA is of, the L1 norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Adam

from netkin.applications.stitching.ends import End, fitting_mask
from netkin.errors import ShapeError, UnknownName, ValueFault

ROWS = ("places", "examples")  # what a row is, of which the CKA is taken
Loss = Callable[[Tensor, Any, Any], Tensor]  # (answers, the second model's own answers, labels)


def soft(answers: Tensor, own: Tensor, labels: Any = None) -> Tensor:
    """Return the cross-entropy to the second model's soft answers, which the stitched network then imitates."""
    return functional.cross_entropy(scores(answers), scores(own).softmax(1))


def true(answers: Tensor, own: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy to the true labels."""
    return functional.cross_entropy(scores(answers), labels.flatten().long())


LOSSES: dict[str, Loss] = {"soft": soft, "true": true}


def loss_named(labels: str | Loss) -> Loss:
    """Return the loss that `labels` asks for."""
    if callable(labels):
        return labels
    if labels not in LOSSES:
        raise UnknownName(f"`labels` is 'soft', 'true' or a function (answers, own_answers, labels); got {labels!r}.")
    return LOSSES[labels]


def scores(answers: Tensor) -> Tensor:
    """Return a classifier's answers as a matrix, one row an example or a place of a sequence."""
    rows = answers.flatten(0, 1) if answers.ndim == 3 else answers
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise ShapeError(
            f"the second model's output has shape {tuple(answers.shape)} and is no row of scores for each example; "
            "pass a function (answers, own_answers, labels) as `labels`."
        )
    return rows


def counted(answers: Tensor, own: Any, labels: Any, mask: Tensor | None) -> tuple[Tensor, Any, Any]:
    """Return answers, the second model's own and labels, without places of sequences that are padding or unlabelled."""
    if answers.ndim != 3:
        return answers, own, labels
    of_places = isinstance(labels, Tensor) and labels.shape == answers.shape[:2] and not labels.is_floating_point()
    counts = mask if mask is not None and mask.shape == answers.shape[:2] else None
    if of_places:
        counts = labels >= 0 if counts is None else counts & (labels >= 0)  # -100 marks what does not count
    if counts is None:
        return answers, own, labels
    return answers[counts], None if own is None else own[counts], labels[counts] if of_places else labels


def refuse_unfit_labels(labels: Any, answers: Tensor | None) -> None:
    """Refuse labels that are missing or no class numbers; `answers` are some scores, which tell the classes."""
    assert answers is not None
    classes = scores(answers).shape[1]
    if not isinstance(labels, Tensor):
        raise ValueFault("labels='true' needs labels, and the data have none; give batches (inputs, labels).")
    if labels.ndim != answers.ndim - 1 or labels.is_floating_point() or labels.is_complex():
        wanted = "one for each example" if answers.ndim == 2 else "one for each place of a sequence"
        raise ShapeError(
            f"labels='true' needs class numbers, {wanted}; got labels of shape {tuple(labels.shape)} and "
            f"{labels.dtype}. Give whole numbers, or a function (answers, own_answers, labels) as `labels`."
        )
    below = (labels < 0) & (answers.ndim == 2)  # in sequences -100 marks what does not count
    outside = labels[below | (labels >= classes)]
    if len(outside):
        raise ValueFault(
            f"labels='true' needs labels from 0 to {classes - 1}, as the second model has {classes} classes; "
            f"{len(outside):,} of {labels.numel():,} lie outside, such as {int(outside[0])}. Leave out those examples, "
            "or go by the second model's answers: labels='soft'."
        )


def cka_rows(output: Tensor, mask: Tensor | None, end: End, of: str) -> Tensor:
    """Return what the CKA penalty compares: a row a place, or a row an example, where padding counts as zero."""
    if of == "places":
        return end.rows(output, mask)
    valid = None if end.kind == "maps" else fitting_mask(mask, output)
    return (output if valid is None else output.masked_fill(~valid.unsqueeze(-1), 0)).flatten(1)


@torch.no_grad()
def shrink(optimizer: Adam, weight: Tensor, l1: float) -> None:
    """Take the proximal step of ``l1 Σ|w|`` that belongs to Adam's last step, so that entries become exactly zero.

    Adam divides the gradient of every entry by ``√v + ε``; in that metric the step shrinks the entry by
    ``rate · l1 / (√v + ε)`` (ProxGen; Yun, Lozano and Yang, NeurIPS 2021). It rests where the gradient of the task
    loss is l1 against the sign of the entry, or at most l1 where the entry is zero: at a minimum of the penalised loss.
    A plain subgradient would leave such entries to tremble about zero by the learning rate.
    """
    state, group = optimizer.state[weight], optimizer.param_groups[0]
    seen = 1 - group["betas"][1] ** float(state["step"])  # the step is counted on the CPU
    metric = (state["exp_avg_sq"] / seen).sqrt() + group["eps"]
    weight.copy_(weight.sign() * (weight.abs() - group["lr"] * l1 / metric).clamp(min=0))


@torch.no_grad()
def cut(weight: Tensor, threshold: float) -> None:
    """Set all entries below the threshold to zero."""
    weight.masked_fill_(weight.abs() < threshold, 0)
