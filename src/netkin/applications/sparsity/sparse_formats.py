"""Sparse formats: what pruning really saves of a linear layer, measured with the formats that PyTorch has.

CSR keeps the weights that are not zero with their places, on any device. 2:4 semi-structured sparsity keeps two of each
four weights in a row, in half precision on a GPU with sparse tensor cores; it needs a mask of its own, which is made
here by size. Convolutions have no sparse format in PyTorch and stay dense, whatever is masked.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from netkin.applications.sparsity.masks import prunable_layers
from netkin.errors import ValueFault
from netkin.representations.layers import modules
from netkin.results.weight_sparsity import LinearCost

SECONDS = 0.05  # that each timing lasts
Apply = Callable[[Tensor], Tensor]


def linear_costs(
    model: nn.Module, *, batch: int = 128, layers: Sequence[str] | None = None, seconds: float = SECONDS
) -> list[LinearCost]:
    """Return size and time of linear layers in sparse formats, beside the dense layer on the same device.

    Args:
        model: The network, with masks or with zeros in its weights.
        batch: Rows of the inputs, which are drawn at random.
        layers: Which linear layers; the five largest by default.
        seconds: How long each is timed.
    """
    if batch < 1:
        raise ValueFault(f"`batch` must be a whole number of 1 or more; got {batch!r}.")
    known = {name: layer for name, layer in prunable_layers(model).items() if isinstance(layer, nn.Linear)}
    chosen = list(layers) if layers is not None else _largest(known)
    found = []
    for name in chosen:
        layer = modules(model)[name]
        if not isinstance(layer, nn.Linear):
            raise ValueFault(f"layer {name!r} is a {type(layer).__name__}; PyTorch has sparse formats for linear ones.")
        found.append(csr_cost(name, layer.weight.detach(), batch, seconds))
        if layer.weight.is_cuda:
            found.append(two_four_cost(name, layer.weight.detach(), batch, seconds))
    return found


def csr_cost(name: str, weight: Tensor, batch: int, seconds: float = SECONDS) -> LinearCost:
    """Return the cost of a weight matrix in compressed sparse rows."""
    inputs = _inputs(weight, batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the format is in beta
            packed = weight.to_sparse_csr()
            size = sum(part.numel() * part.element_size()
                       for part in (packed.values(), packed.col_indices(), packed.crow_indices()))  # fmt: skip
            return _cost(name, "CSR", weight, inputs, size, lambda given: (packed @ given.T).T, seconds)
    except RuntimeError as fault:
        return _none(name, "CSR", weight, fault)


def two_four_cost(name: str, weight: Tensor, batch: int, seconds: float = SECONDS) -> LinearCost:
    """Return the cost of a weight matrix in 2:4 form, in half precision, with a mask of its own."""
    halved = (weight * two_four_mask(weight)).half() if weight.shape[1] % 4 == 0 else weight.half()
    inputs = _inputs(halved, batch)
    try:
        if weight.shape[1] % 4:
            raise RuntimeError(f"its {weight.shape[1]:,} inputs are no multiple of four")
        if not weight.is_cuda:
            raise RuntimeError("it needs a GPU with sparse tensor cores")
        packed = torch.sparse.to_sparse_semi_structured(halved)
        size = halved.numel() // 2 * 2 + halved.numel() // 2 * 2 // 8  # halves, and two bits for each
        return _cost(name, "2:4", halved, inputs, size, lambda given: nn.functional.linear(given, packed), seconds)
    except (RuntimeError, NotImplementedError) as fault:
        return _none(name, "2:4", halved, fault)


def two_four_mask(weight: Tensor) -> Tensor:
    """Return the mask that keeps the two largest of each four weights in a row.

    Example:
        >>> two_four_mask(torch.tensor([[1.0, -3.0, 2.0, 0.5]]))
        tensor([[False,  True,  True, False]])
    """
    fours = weight.abs().reshape(-1, 4)
    places = fours.sort(dim=1, descending=True, stable=True).indices[:, :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, places, True).reshape(weight.shape)


@torch.no_grad()
def _cost(name: str, kind: str, weight: Tensor, inputs: Tensor, size: int, apply: Apply, seconds: float) -> LinearCost:
    dense = nn.functional.linear(inputs, weight)
    error = (apply(inputs) - dense).double().norm() / dense.double().norm().clamp(min=1e-300)
    first, second = (_seconds(work, inputs, seconds) for work in (lambda x: nn.functional.linear(x, weight), apply))
    bytes_ = weight.numel() * weight.element_size()
    return LinearCost(name, kind, _zeros(weight), bytes_, size, first, second, float(error))


def _none(name: str, kind: str, weight: Tensor, fault: Exception) -> LinearCost:
    said = " ".join(str(fault).split())[:160] or type(fault).__name__
    size = weight.numel() * weight.element_size()
    return LinearCost(name, kind, _zeros(weight), size, math.nan, math.nan, math.nan, math.nan, said)


def _zeros(weight: Tensor) -> float:
    return int((weight == 0).sum()) / weight.numel()


def _inputs(weight: Tensor, batch: int) -> Tensor:
    drawn = torch.randn(batch, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(weight.device, weight.dtype)


def _seconds(work: Apply, inputs: Tensor, lasting: float) -> float:
    """Return the median time of a call, over as many as fit into `lasting` seconds."""
    work(inputs)
    found: list[float] = []
    end = time.perf_counter() + lasting
    while not found or time.perf_counter() < end:
        started = _now(inputs)
        work(inputs)
        found.append(_now(inputs) - started)
    return sorted(found)[len(found) // 2]


def _now(inputs: Tensor) -> float:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()


def _largest(known: dict[str, nn.Linear], most: int = 5) -> list[str]:
    chosen = sorted(known, key=lambda name: -known[name].weight.numel())[:most]
    return [name for name in known if name in chosen]
