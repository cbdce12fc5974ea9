"""`project`: run a model with one layer restricted to few directions, or to few of its neurons.

Neurons are chosen at random, by size or by an aligned subspace, as a baseline for directions. `rest` defines the values
of the others. ``"mean"`` sets them to their mean over the examples. ``"predicted"`` gives each the best linear
prediction from the chosen ones, which is the projection that directions are given: every neuron, as a vector over the
examples, goes to the nearest one in the span of the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import exact_products, summing_dtype
from netkin.errors import ShapeError, UnknownName, ValueFault
from netkin.measures import AlignedSide, Directions
from netkin.representations import replacing
from netkin.representations.layers import layer_label

REST = ("mean", "predicted")
Restriction = tuple[Tensor, Tensor, Tensor]  # mean, p × k, k × p


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
    """Return `k` units chosen at random, the same ones each time unless a `generator` is given.

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


@contextmanager
def project(
    model: nn.Module, layer: str, directions: AlignedSide | Directions | Neurons, k: int | None = None
) -> Iterator[None]:
    """Inside the `with`, `layer` gives its output projected on the first `k` of its directions, or on chosen units.

    Of a pair of `directions` the first side is meant; without `k` all that were kept are used. The projection is that
    of section 2.1 of the SVCCA paper: every unit becomes its nearest sum of the directions, about the mean of the
    examples that they were found on. A feature map is projected channel by channel at each place, or as a whole where
    the directions are those of the flattened map; of tokens each one is. The model keeps its mode and its gradients.

    Example:
        >>> import torch
        >>> from netkin.comparing import model_directions
        >>> model, data = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(200, 4)
        >>> found = model_directions(model, "0", data=data, variance=1.0)
        >>> with project(model, "0", found, k=3):
        ...     few = model(data)
        >>> torch.allclose(few, model(data), atol=1e-5)
        True
    """
    with replacing(model, layer, partial(_projected, layer, _restriction(directions, k))):
        yield


def _restriction(directions: AlignedSide | Directions | Neurons, k: int | None) -> Restriction:
    if isinstance(directions, Neurons):
        if k is not None:
            raise ValueFault(
                f"{len(directions.chosen):,} units are chosen already; leave `k` out, or choose {k:,} units."
            )
        return directions.mean, directions.encode, directions.decode
    side = side_of(directions)
    return side.mean, *side.projection(side.kept if k is None else k)


def _projected(layer: str, restriction: Restriction, output: Tensor) -> Tensor:
    width = len(restriction[0])
    if output.ndim >= 4 and output.shape[1] == width:
        return _nearest(output.movedim(1, -1), restriction).movedim(-1, 1)
    if output.ndim in (2, 3) and output.shape[-1] == width:
        return _nearest(output, restriction)
    if output.ndim >= 3 and output.shape[1:].numel() == width:
        return _nearest(output.flatten(1), restriction).reshape(output.shape)
    raise ShapeError(
        f"{layer_label(layer)} gives an output of shape {tuple(output.shape)}, which does not fit the {width:,} "
        "features that the directions or units were found on; find them on this layer."
    )


def _nearest(rows: Tensor, restriction: Restriction) -> Tensor:
    """Return the rows restricted, in float64: directions may be as small as their singular values are large."""
    mean, encode, decode = (part.to(rows.device, summing_dtype(rows.device)) for part in restriction)
    with exact_products():
        return (mean + (rows.to(mean) - mean) @ encode @ decode).to(rows.dtype)
