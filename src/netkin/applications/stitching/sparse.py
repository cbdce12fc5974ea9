"""The Lasso by coordinate descent on moments: all outputs at once, one input unit after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from netkin.errors import NoValue

SWEEPS = 20_000
TOLERANCE = 1e-10  # of the largest entry of the cross moment


def descended(second: Tensor, cross: Tensor, alpha: float) -> Tensor:
    """Return the M that minimises ``tr(MᵀSM)/2 - tr(CᵀM) + alpha Σ|M|``, S the second and C the cross moment."""
    S, C = second.cpu().double().numpy(), cross.cpu().double().numpy()
    weight, gradient = np.zeros_like(C), C.copy()  # the gradient's opposite, C - S M
    floor = TOLERANCE * max(np.abs(C).max(), alpha)
    live = np.flatnonzero(S.diagonal() > S.diagonal().max() * np.finfo(float).eps)
    for _ in range(SWEEPS):
        _sweep(S, weight, gradient, alpha, live)
        if unsettled(weight[live], gradient[live], alpha) <= floor:
            return torch.as_tensor(weight, device=cross.device)
    raise NoValue(
        f"the Lasso did not settle in {SWEEPS:,} sweeps at alpha={alpha:g} ({len(live):,} units); "
        "take a larger alpha, or more examples."
    )


def unsettled(weight: np.ndarray, gradient: np.ndarray, alpha: float) -> float:
    """Return how far a solution is from the conditions of Karush, Kuhn and Tucker.

    Where an entry is not zero the gradient must be ``alpha`` in its direction; elsewhere at most ``alpha``.
    """
    active = np.abs(gradient - alpha * np.sign(weight))
    resting = np.maximum(np.abs(gradient) - alpha, 0)
    return float(np.where(weight != 0, active, resting).max(initial=0.0))


def _sweep(S: np.ndarray, weight: np.ndarray, gradient: np.ndarray, alpha: float, live: np.ndarray) -> None:
    """Set each input unit's row to its best value while all others stay; `gradient` follows."""
    for j in live:
        pull = gradient[j] + S[j, j] * weight[j]
        best = np.sign(pull) * np.maximum(np.abs(pull) - alpha, 0) / S[j, j]
        change = best - weight[j]
        if change.any():
            gradient -= np.outer(S[:, j], change)
            weight[j] = best
