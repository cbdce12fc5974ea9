"""`project`: run a model with one layer restricted to few directions, or to few of its units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from netkin.applications.interpretation.neurons import Neurons, side_of
from netkin.arrays import exact_products, summing_dtype
from netkin.errors import ShapeError, ValueFault
from netkin.measures import AlignedSide, Directions
from netkin.representations import replacing
from netkin.representations.layers import layer_label

Restriction = tuple[Tensor, Tensor, Tensor]  # mean, p × k, k × p


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
