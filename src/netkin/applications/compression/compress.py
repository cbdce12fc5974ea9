"""`compress`: a network whose layers see only the directions of their inputs that matter, and so are smaller.

Section 4.4 of the SVCCA paper: ``W x`` becomes ``(W Pᵀ)(P x)``, P of k rows that span the top SVCCA directions of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from netkin.applications.compression.layer_inputs import Feeding
from netkin.applications.compression.sizes import K, Size
from netkin.applications.compression.stepping import Work
from netkin.applications.compression.subspaces import PROJECTIONS
from netkin.errors import UnknownName, ValueFault, did_you_mean
from netkin.progress import ProgressOption, showing
from netkin.representations.guests import random_states_kept
from netkin.representations.inputs import Forward, Transform
from netkin.representations.layers import Spec

ORDERS = ("at_once", "from_the_top")


def compress(
    model: nn.Module,
    layers: Spec,
    *,
    data: Any = None,
    k: K = None,
    variance: float | None = None,
    accuracy_drop: float | None = None,
    against: str | nn.Module = "logits",
    projection: str = "least_squares",
    order: str = "at_once",
    test: Any = None,
    cut: float = 0.99,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    progress: ProgressOption = None,
) -> nn.Module:
    """Return a copy of `model` in which each chosen linear or conv layer sees only k directions of its input.

    The directions are those of SVCCA: of the layer's input against the model's logits, or against the same layer's
    input in another model, by falling correlation; then, as ten logits have no more than ten, the layer's other
    directions by falling variance. A layer becomes an ``nn.Sequential`` of two plain ones, ``(W D)(E x) + b'``, where
    b' takes up the mean of what is projected away. With ``projection="least_squares"`` E x are the directions, each to
    a scale of its own, and D gives every unit its best guess from them; with ``"orthogonal"`` E has orthonormal rows
    that span them, and D = Eᵀ.

    One of three says how many directions are kept. `k` is a number, a share of the layer's width such as 0.35, or a
    mapping from layers to these. `variance` is the share of the input's variance that is to be held. `accuracy_drop`
    is by how much the share of right answers may fall, shared out evenly over the layers one after the other; k is then
    searched by halving. Right answers are counted on `test`, or on `data`.

    With ``order="from_the_top"`` the layers are compressed one after the other, the last that runs first, each with
    directions taken from the network as compressed so far. The table is the copy's attribute `compression`; the
    model itself stays as it is.

    Args:
        model: the network.
        layers: which linear or conv layers (see `nk.layers`).
        data: a loader, an iterable of batches or one array of inputs.
        k: directions to keep, or their share, for all layers or by layer.
        variance: the share of the input's variance to hold.
        accuracy_drop: by how much the share of right answers may fall.
        against: "logits", or another model, whose same layers are compared with.
        projection: "least_squares" or "orthogonal".
        order: "at_once" or "from_the_top".
        test: the examples on which right answers are counted; by default `data`.
        cut: the share of variance in which SVCCA looks for directions.
        examples: how many examples of `data` are read.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> small = compress(model, "2", k=2, data=torch.randn(50, 8))
        >>> small[2]
        Sequential(
          (0): Linear(in_features=16, out_features=2, bias=False)
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """
    _refuse_other("projection", projection, PROJECTIONS)
    _refuse_other("order", order, ORDERS)
    if isinstance(data, Iterator) or isinstance(test, Iterator):
        raise ValueFault("the data are read several times, and an iterator only once; pass a loader or a list.")
    if not 0 < cut <= 1:
        raise ValueFault(f"`cut` must lie above 0 and at most at 1; got {cut}.")
    size = Size(k, variance, accuracy_drop)
    with showing(progress), random_states_kept(model, data=[data, test]):
        work = Work(
            model, layers, data, test, _other(against), projection, cut, size, Feeding(examples, forward, transform)
        )
        return work.compressed(from_the_top=order == "from_the_top")


def _other(against: str | nn.Module) -> nn.Module | None:
    """Return the model that is compared with, or None for the logits."""
    if isinstance(against, nn.Module):
        return against
    if against != "logits":
        near = did_you_mean(str(against), ["logits"]) or "."
        raise UnknownName(f"`against` is 'logits' or another model; got {against!r}{near}")
    return None


def _refuse_other(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = did_you_mean(str(value), known) or "."
        raise UnknownName(f"`{what}` is {' or '.join(map(repr, known))}; got {value!r}{near}")
