"""Shrinking: what makes the matrix of a stitch sparse while it is trained by Adam, and after."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adam


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
