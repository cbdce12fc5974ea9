"""Direct matching: the map from one layer's neurons to another's that fits best, from moments alone.

Every method is a function of `Moments` (so it streams, and its memory does not grow with the examples) that returns a
`LinearMap` between the layers' own neurons. Written as ``"reduced_rank(k=8)"`` a method and its parameters mean the
same in Python and on the command line.

The Lasso on moments: coordinate descent for all outputs at once, then each output solved exactly.

Coordinate descent soon finds most non-zero entries, and then converges slowly. From there a search over active sets
(feature-sign search; Lee, Battle, Raina and Ng 2006) comes to the exact minimum in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from netkin.errors import InvalidValue, NoValue, UnknownName, require_listed
from netkin.measures.registry import defaults_of, typed_parameters
from netkin.results.labels import parse_id
from netkin.statistics import Moments

ROUNDS, SWEEPS = 400, 25  # of descent and search, and sweeps of descent in a round
EXACT = 1e-9  # by so much of alpha a gradient may err


@dataclass(frozen=True)
class LinearMap:
    """The map ``x ↦ x @ weight + bias`` of rows, `weight` p × q and `bias` of length q, in float64."""

    weight: Tensor
    bias: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.to(rows) + self.bias.to(rows)


def least_squares(moments: Moments, *, affine: bool = True) -> LinearMap:
    """Return the map that leaves the least squared distance, ``A⁺B``; of several such the smallest.

    Eq. 2 of the paper. With `affine` the layers' means are subtracted first and mapped to each other.
    """
    pair = moments if affine else moments.uncentred
    return _map_in_features(pair, pair.x.whitener @ (pair.x.whitener.mH @ pair.cross))


def ridge(moments: Moments, *, alpha: float = 1.0, affine: bool = True) -> LinearMap:
    """Return the map that minimises ``‖AM - B‖² + alpha ‖M‖²``."""
    _require_above_zero("alpha", alpha)
    pair = moments if affine else moments.uncentred
    pair.x.trace  # noqa: B018  refuses a constant layer
    ones = torch.eye(pair.x.second.shape[-1], dtype=pair.x.second.dtype, device=pair.x.second.device)
    return _map_in_features(pair, torch.linalg.solve(pair.x.second + alpha * pair.x.scale**2 * ones, pair.cross))


def procrustes(moments: Moments, *, affine: bool = True) -> LinearMap:
    """Return the rotation (or reflection) that leaves the least squared distance: ``UVᵀ`` of ``AᵀB = USVᵀ``.

    Layers of different widths are padded with zeros; what is left of the square rotation has orthonormal rows or
    columns, but it is not the best among all maps that have.
    """
    pair = moments if affine else moments.uncentred
    left, _, right = torch.linalg.svd(_own_cross(pair), full_matrices=False)
    return _with_bias(pair, left @ right)


def reduced_rank(moments: Moments, *, k: int = 8, affine: bool = True) -> LinearMap:
    """Return the map of rank at most `k` that leaves the least squared distance: ``M VVᵀ``.

    M is the least-squares map and V the first `k` right singular vectors of ``AM`` (Izenman 1975).
    """
    if not 1 <= k <= min(moments.x.width, moments.y.width):
        raise InvalidValue(
            f"`k` must lie between 1 and the smaller width, {min(moments.x.width, moments.y.width):,}; got {k}.",
            argument="k",
        )
    pair = moments if affine else moments.uncentred
    whitened = pair.x.whitener.mH @ pair.cross
    _, vectors = torch.linalg.eigh(whitened.mH @ whitened)
    leading = vectors[..., -k:]
    return _map_in_features(pair, pair.x.whitener @ whitened @ leading @ leading.mH)


def lasso(moments: Moments, *, alpha: float = 0.01, affine: bool = True) -> LinearMap:
    """Return the sparse map that minimises ``‖AM - B‖² / 2n + alpha Σ|M|``, scikit-learn's objective.

    The paper's Eq. 3 prints the first norm without its square, which no Lasso solver minimises.
    """
    _require_above_zero("alpha", alpha)
    pair = moments if affine else moments.uncentred
    pair.x.trace  # noqa: B018  refuses a constant layer
    second = _in_features(pair.x.second, pair.x.to_features, pair.x.to_features) / (pair.x.scale**2 * pair.n)
    return _with_bias(pair, solve_lasso(second, _own_cross(pair) / pair.n, alpha))


def permutation(moments: Moments, *, affine: bool = True) -> LinearMap:
    """Return the matching of single neurons with single neurons that leaves the least squared distance.

    Of layers of different widths as many neurons are matched as the smaller one has; the others give or get nothing.
    """
    pair = moments if affine else moments.uncentred
    cross = _own_cross(pair)
    squares = pair.x.variances[0].to(cross).unsqueeze(1) / pair.x.scale**2
    rows, columns = linear_sum_assignment((squares - 2 * cross).cpu().numpy())  # what ‖a - b‖² has beside ‖b‖²
    weight = torch.zeros_like(cross)
    weight[torch.as_tensor(rows), torch.as_tensor(columns)] = 1
    return _with_bias(pair, weight)


def identity(moments: Moments) -> LinearMap:
    """Return the map that changes nothing: the baseline of stitching without a transformation."""
    weight = torch.eye(moments.x.width, moments.y.width, dtype=torch.float64, device=moments.x.mean.device)
    return LinearMap(weight, torch.zeros_like(weight[0]))


def random(moments: Moments, *, seed: int = 0) -> LinearMap:
    """Return a map of independent normal numbers of variance 1/p: the baseline of knowing nothing."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(moments.x.width, moments.y.width, generator=generator, dtype=torch.float64)
    weight = (weight / moments.x.width**0.5).to(moments.x.mean.device)
    return LinearMap(weight, torch.zeros_like(weight[0]))


MatchingFunction = Callable[..., LinearMap]


METHODS: dict[str, MatchingFunction] = {
    function.__name__: function
    for function in (least_squares, ridge, procrustes, reduced_rank, lasso, permutation, identity, random)
}


def matched(moments: Moments, method: str = "least_squares") -> LinearMap:
    """Return the map that a `method`, such as ``"reduced_rank(k=8)"``, finds for a pair of layers.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> matched(Moments.of(X, X @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])), "procrustes").weight.round()
        tensor([[ 0.,  1.],
                [-1., -0.]], dtype=torch.float64)
    """
    function, parameters = find(method)
    return function(moments, **parameters)


def find(method: str, *, others: Sequence[str] = ()) -> tuple[MatchingFunction, dict[str, Any]]:
    """Return the function and the parameters that `method` names; `others` are names that may have been meant."""
    apart = parse_id(method) if isinstance(method, str) else None
    if apart is None:
        raise UnknownName(
            f"{method!r} is no matching method; write a name, or one with parameters: 'reduced_rank(k=8)'.",
            argument="method",
        )
    name, given = apart
    require_listed("matching method", name, METHODS if name in METHODS else [*METHODS, *others], "method")
    return METHODS[name], typed_parameters(name, given, defaults_of(METHODS[name]))


def with_seed(method: str, seed: int) -> str:
    """Return a method with its seed spelled out, where it is random and names none.

    Example:
        >>> with_seed("random", 3), with_seed("ridge", 3)
        ('random(seed=3)', 'ridge')
    """
    return f"random(seed={seed})" if method == "random" else method


def _map_in_features(pair: Moments, inner: Tensor) -> LinearMap:
    """Return a map between the coordinates of a pair's second moments as one between the layers' own neurons."""
    return _with_bias(pair, _in_features(inner, pair.x.to_features, pair.y.to_features) * (pair.x.scale / pair.y.scale))


def _with_bias(pair: Moments, weight: Tensor) -> LinearMap:
    weight = weight.to(torch.float64)
    return LinearMap(weight, (pair.y.mean.to(weight) - pair.x.mean.to(weight) @ weight)[0])


def _own_cross(pair: Moments) -> Tensor:
    """Return ``AᵀB`` of the layers' own neurons."""
    return _in_features(pair.cross, pair.x.to_features, pair.y.to_features) / (pair.x.scale * pair.y.scale)


def _in_features(inner: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x.mT.to(inner) @ inner @ y.to(inner))[0]


def _require_above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InvalidValue(f"`{name}` must be above 0; got {value}.", argument=name)


def solve_lasso(second: Tensor, cross: Tensor, alpha: float) -> Tensor:
    """Return the M that minimises ``tr(MᵀSM)/2 - tr(CᵀM) + alpha Σ|M|``, S the second and C the cross moment."""
    S, C = second.cpu().double().numpy(), cross.cpu().double().numpy()
    found, left = np.zeros_like(C), np.arange(C.shape[1])
    weight, gradient = np.zeros_like(C), C.copy()  # the gradient's opposite, C - S M
    live = np.flatnonzero(S.diagonal() > 0)
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            _sweep(S, weight, gradient, alpha, live)
        solved = [_solve_output(S, C[:, k], weight[:, place], alpha) for place, k in enumerate(left)]
        open_ = np.array([one is None for one in solved], dtype=bool)
        for k, one in zip(left, solved, strict=True):
            found[:, k] = 0 if one is None else one
        left, weight, gradient = left[open_], weight[:, open_], gradient[:, open_]
        if not len(left):
            return torch.as_tensor(found, device=cross.device)
    raise NoValue(
        f"the Lasso did not settle in {ROUNDS * SWEEPS:,} sweeps at alpha={alpha:g} ({len(live):,} neurons); "
        "take a larger alpha, or more examples."
    )


def optimality_gap(weight: np.ndarray, gradient: np.ndarray, alpha: float) -> float:
    """Return how far a solution is from the conditions of Karush, Kuhn and Tucker.

    Where an entry is not zero the gradient must be ``alpha`` in its direction; elsewhere at most ``alpha``.
    """
    active = np.abs(gradient - alpha * np.sign(weight))
    resting = np.maximum(np.abs(gradient) - alpha, 0)
    return float(np.where(weight != 0, active, resting).max(initial=0.0))


def _solve_output(S: np.ndarray, c: np.ndarray, start: np.ndarray, alpha: float) -> np.ndarray | None:
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
            step = _idle_direction(matrix, signs[active]) if aim is None else aim - own
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


def _idle_direction(matrix: np.ndarray, signs: np.ndarray) -> np.ndarray:
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
    """Set each input neuron's row to its best value while all others stay; `gradient` follows."""
    for j in live:
        target = gradient[j] + S[j, j] * weight[j]
        best = np.sign(target) * np.maximum(np.abs(target) - alpha, 0) / S[j, j]
        change = best - weight[j]
        if change.any():
            gradient -= np.outer(S[:, j], change)
            weight[j] = best
