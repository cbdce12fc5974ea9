"""The Lasso on moments: coordinate descent for all outputs at once, then each output solved exactly.

Coordinate descent soon finds most entries that are not zero, and then creeps. From there a search over active sets
(feature-sign search; Lee, Battle, Raina and Ng 2006) comes to the exact minimum in a few steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from netkin.errors import NoValue

ROUNDS, SWEEPS = 400, 25  # of descent and search, and sweeps of descent in a round
EXACT = 1e-9  # by so much of alpha a gradient may err


def descended(second: Tensor, cross: Tensor, alpha: float) -> Tensor:
    """Return the M that minimises ``tr(MᵀSM)/2 - tr(CᵀM) + alpha Σ|M|``, S the second and C the cross moment."""
    S, C = second.cpu().double().numpy(), cross.cpu().double().numpy()
    found, left = np.zeros_like(C), np.arange(C.shape[1])
    weight, gradient = np.zeros_like(C), C.copy()  # the gradient's opposite, C - S M
    live = np.flatnonzero(S.diagonal() > 0)
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            _sweep(S, weight, gradient, alpha, live)
        solved = [_solved(S, C[:, k], weight[:, place], alpha) for place, k in enumerate(left)]
        open_ = np.array([one is None for one in solved], dtype=bool)
        for k, one in zip(left, solved, strict=True):
            found[:, k] = 0 if one is None else one
        left, weight, gradient = left[open_], weight[:, open_], gradient[:, open_]
        if not len(left):
            return torch.as_tensor(found, device=cross.device)
    raise NoValue(
        f"the Lasso did not settle in {ROUNDS * SWEEPS:,} sweeps at alpha={alpha:g} ({len(live):,} units); "
        "take a larger alpha, or more examples."
    )


def unsettled(weight: np.ndarray, gradient: np.ndarray, alpha: float) -> float:
    """Return how far a solution is from the conditions of Karush, Kuhn and Tucker.

    Where an entry is not zero the gradient must be ``alpha`` in its direction; elsewhere at most ``alpha``.
    """
    active = np.abs(gradient - alpha * np.sign(weight))
    resting = np.maximum(np.abs(gradient) - alpha, 0)
    return float(np.where(weight != 0, active, resting).max(initial=0.0))


def _solved(S: np.ndarray, c: np.ndarray, start: np.ndarray, alpha: float) -> np.ndarray | None:
    """Return one output's minimum, searched for from `start`; None where some steps do not lead to it."""
    weight, signs = start.copy(), np.sign(start)
    for _ in range(50 + 2 * len(c)):
        active = np.flatnonzero(signs)
        own, matrix = weight[active], S[np.ix_(active, active)]
        aim = _solution(matrix, c[active] - alpha * signs[active])
        if aim is not None and (np.sign(aim) == signs[active]).all():
            weight[active] = aim
            gradient = c - S @ weight
            worst = np.where(signs == 0, np.abs(gradient), 0.0).argmax()
            if signs[worst] != 0 or abs(gradient[worst]) <= alpha * (1 + EXACT):
                return weight
            signs[worst] = np.sign(gradient[worst])
        else:
            step = _idle(matrix, signs[active]) if aim is None else aim - own
            weight[active], signs[active] = _until_zero(own, signs[active], step)
    return None


def _until_zero(weight: np.ndarray, signs: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Go along a step until the first entry comes to zero, where it stays; return the weight and its signs."""
    turning = np.flatnonzero(step * signs < 0)
    shares = -weight[turning] / step[turning]
    first = turning[shares.argmin()]
    weight, signs = weight + shares.min() * step, signs.copy()
    weight[first] = signs[first] = 0
    return weight, signs


def _idle(matrix: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return a direction in which the fit does not change, turned so that the penalty does not grow."""
    _, vectors = np.linalg.eigh(matrix)
    step = vectors[:, 0]
    return step if step @ signs < 0 else -step


def _solution(matrix: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """Return the solution of linear equations, or None where they have none that is sure."""
    try:
        found = np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        return None
    missed = np.abs(matrix @ found - right).max(initial=0.0)
    return found if missed <= 1e-10 * np.abs(right).max(initial=0.0) else None


def _sweep(S: np.ndarray, weight: np.ndarray, gradient: np.ndarray, alpha: float, live: np.ndarray) -> None:
    """Set each input unit's row to its best value while all others stay; `gradient` follows."""
    for j in live:
        pull = gradient[j] + S[j, j] * weight[j]
        best = np.sign(pull) * np.maximum(np.abs(pull) - alpha, 0) / S[j, j]
        change = best - weight[j]
        if change.any():
            gradient -= np.outer(S[:, j], change)
            weight[j] = best
