"""Neurons: some units of a layer, chosen by chance, by size or by an aligned subspace, to hold directions against.

What becomes of the other units is said by `rest`. ``"mean"`` holds them at their mean over the examples.
``"predicted"`` gives each the best linear prediction from the chosen ones, which is the projection that directions are
given: every unit, as a vector over the examples, goes to the nearest one in the span of the chosen units.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from netkin.errors import UnknownName, ValueFault
from netkin.measures import AlignedSide, Directions

REST = ("mean", "predicted")


@dataclass(frozen=True, eq=False, repr=False)
class Neurons:
    """Chosen units of a layer, and the map that restricts it to them: ``mean + (x - mean) @ encode @ decode``."""

    chosen: tuple[int, ...]
    mean: Tensor
    encode: Tensor
    decode: Tensor

    def __repr__(self) -> str:
        return f"Neurons({len(self.chosen)} of {len(self.mean)})"


def random_neurons(
    directions: AlignedSide | Directions, k: int, *, rest: str = "mean", generator: torch.Generator | None = None
) -> Neurons:
    """Return `k` units drawn by chance, the same ones each time unless a `generator` is given.

    Example:
        >>> from netkin.measures import svcca_directions
        >>> X = torch.randn(99, 6, generator=torch.Generator().manual_seed(0))
        >>> random_neurons(svcca_directions(X, X), k=2)
        Neurons(2 of 6)
    """
    side = side_of(directions)
    drawn = torch.randperm(side.width, generator=generator or torch.Generator().manual_seed(0))
    return _chosen_neurons(side, drawn[: _count("k", k, side)], rest)


def largest_neurons(directions: AlignedSide | Directions, k: int, *, rest: str = "mean") -> Neurons:
    """Return the `k` units of largest activation: the root of their mean square over the examples."""
    side = side_of(directions)
    return _chosen_neurons(side, _largest(side.activity, _count("k", k, side)), rest)


def aligned_neurons(directions: AlignedSide | Directions, k: int, m: int) -> Neurons:
    """Return the `m` units most aligned with the first `k` directions: those that vary most inside their span.

    The layer is first projected on the `k` directions; of what comes out the `m` units are kept and the others held at
    their mean, as in Fig. 2b of the SVCCA paper. No other `m` units keep more of the projected layer's variance.
    """
    side = side_of(directions)
    encode, decode = side.projection(k)
    chosen = _largest(decode.square().sum(0), _count("m", m, side))
    masked = torch.zeros_like(decode)
    masked[:, chosen] = decode[:, chosen]
    return Neurons(tuple(chosen.tolist()), side.mean, encode, masked)


def side_of(directions: AlignedSide | Directions) -> AlignedSide:
    """Return the side that is meant: of a pair the first."""
    if isinstance(directions, Directions):
        return directions.x
    if not isinstance(directions, AlignedSide):
        raise ValueFault(
            f"directions come from `nk.svcca_directions` or `nk.model_directions`; got {type(directions).__name__}."
        )
    return directions


def _chosen_neurons(side: AlignedSide, chosen: Tensor, rest: str) -> Neurons:
    if rest not in REST:
        raise UnknownName(f"`rest` is 'mean' or 'predicted'; got {rest!r}.")
    chosen = chosen.sort().values.to(side.mean.device)
    units = torch.eye(side.width, dtype=side.mean.dtype, device=side.mean.device)
    decode = units[chosen] if rest == "mean" else _prediction(side.covariance(chosen), chosen)
    return Neurons(tuple(chosen.tolist()), side.mean, units[:, chosen], decode)


def _prediction(covariance: Tensor, chosen: Tensor) -> Tensor:
    """Return the least-squares map from the chosen units to all, k × p; dead and doubled units are harmless."""
    return torch.linalg.pinv(covariance[:, chosen], rtol=1e-12, hermitian=True) @ covariance


def _largest(sizes: Tensor, count: int) -> Tensor:
    return sizes.argsort(descending=True, stable=True)[:count]


def _count(name: str, count: Any, side: AlignedSide) -> int:
    if not isinstance(count, Integral):
        raise ValueFault(f"`{name}` must be a whole number of units, up to {side.width:,}; got {count!r}.")
    if not 1 <= int(count) <= side.width:
        raise ValueFault(f"`{name}` must lie between 1 and the layer's {side.width:,} units; got {count:,}.")
    return int(count)
