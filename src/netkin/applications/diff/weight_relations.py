"""Weight relations: how each tensor of one model follows from its counterpart: cast, scaled, quantised, low rank, …

They are read from the weights alone; no data are run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.quantisation import quantised, units
from netkin.identity.weight_hash import offloaded_weight
from netkin.representations.inputs import FLOATING
from netkin.representations.layers import modules
from netkin.results.diff import SAME, WeightDiff

RANK = 64  # up to which a difference counts as of low rank
SLACK = 1.3  # times what rounding leaves of a difference, in size and in its largest singular value
CLEAR = 16  # units of rounding, by which a shift exceeds what it could be by chance
SPARSE = 0.05  # share of the weights that became zero
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def weight_relations(model: nn.Module, other: nn.Module, names: Mapping[str, str]) -> dict[str, WeightDiff]:
    """Return how the tensors of `other` follow from those of `model`, by the names in `model`, or in `other` if new.

    `names` are those of modules, with those of their counterparts. Buffers that count, such as batches, are left out.
    """
    mine, theirs = _tensors(model), _tensors(other)
    ties = _ties(mine), _ties(theirs)
    found: dict[str, WeightDiff] = {}
    for name, tensor in mine.items():
        module, _, key = name.rpartition(".")
        own = names.get(module)
        counterpart = None if own is None else f"{own}.{key}".lstrip(".")
        there = theirs.pop(counterpart, None) if counterpart else None
        found[name] = WeightDiff(relation="gone")
        if counterpart is not None and there is not None:
            found[name] = relation(offloaded_weight(model, name, tensor), offloaded_weight(other, counterpart, there))
        tied = _tied(ties[0].get(name), ties[1].get(counterpart or ""))
        if tied:
            found[name] = replace(found[name], detail=", ".join(filter(None, (found[name].detail, tied))))
    return found | {name: WeightDiff(relation="new") for name in theirs}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, those too that are not saved; whole numbers only as packed weights."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    named = {
        name.replace("_orig_mod.", ""): tensor for name, tensor in tensors if tensor.ndim or tensor.dtype in FLOATING
    }
    return with_adapters(model, named)


def with_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors with those of PEFT's adapters added to the weights that they change."""
    adapted: dict[str, Any] = {name: module for name, module in modules(model).items() if is_adapted(module)}
    found = {}
    for name, tensor in tensors.items():
        owner = next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        if owner is None:
            found[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            layer, key = adapted[owner], name.removeprefix(f"{owner}.base_layer.")
            if key == "weight" and tensor.dtype in FLOATING and not layer.merged:
                for adapter in layer.active_adapters:
                    tensor = tensor.detach() + layer.get_delta_weight(adapter).detach().to(tensor)
            found[f"{owner}.{key}"] = tensor
    return found


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer with one of PEFT's adapters that add to its weight."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors that are others under a second name, with their first names."""
    first: dict[int, str] = {}
    return {name: first[id(tensor)] for name, tensor in tensors.items() if first.setdefault(id(tensor), name) != name}


def _tied(mine: str | None, theirs: str | None) -> str:
    """Return how a tensor is tied to another; the name is that in the first model that has it so."""
    if mine and theirs:
        return f"tied to {mine}"
    return f"tied to {mine} in a alone" if mine else f"tied to {theirs} in b alone" if theirs else ""


def relation(first: Tensor, second: Tensor) -> WeightDiff:
    """Return how the second tensor follows from the first.

    Example:
        >>> weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        >>> relation(weight, weight.bfloat16()).relation, relation(weight, weight * 0.5).detail
        ('cast', '0.5')
    """
    first, second = _plain(first), _plain(second).to(first.device)
    if first.dtype not in FLOATING or second.dtype not in FLOATING:
        return _of_whole_numbers(first, second)
    if first.shape != second.shape:
        is_turned = first.ndim == 2 and first.shape == second.T.shape
        found = relation(first.T, second) if is_turned else None
        if found and found.relation in SAME:
            return WeightDiff(relation="transposed", error=found.error, detail=found.detail)
        return WeightDiff(relation="changed", error=1.0, detail=f"{tuple(first.shape)} and {tuple(second.shape)}")
    if torch.equal(first, second):
        return WeightDiff(relation="equal" if first.dtype == second.dtype else "cast", detail=_types(first, second))
    return _of_values(first, second, first.double(), second.double())


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as one of torch's own; those of quantising packages know what numbers they stand for."""
    tensor = tensor.detach().float() if tensor.dtype in EIGHT_BITS else tensor.detach()
    return tensor.dequantize() if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_quantized else tensor


def _of_whole_numbers(first: Tensor, second: Tensor) -> WeightDiff:
    if first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second):
        return WeightDiff(relation="equal")
    if first.dtype in FLOATING and second.dtype.itemsize == 1:  # packed: two of 4 bits may share a byte
        bits = "8 bits" if first.numel() == second.numel() else f"{8 * second.numel() / first.numel():g} bits"
        return WeightDiff(relation="quantised", error=1.0, detail=f"{bits}, kept as {_type(second)}")
    return WeightDiff(relation="changed", error=1.0, detail=_types(first, second))


def _types(first: Tensor, second: Tensor) -> str:
    return "" if first.dtype == second.dtype else f"{_type(first)} to {_type(second)}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_values(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> WeightDiff:
    size = float(x.norm())
    if not size:
        return WeightDiff(relation="changed", error=1.0, detail="from zero")
    if not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return WeightDiff(relation="changed", error=math.inf, detail="not finite")
    error = float((y - x).norm()) / size
    unit = _rounding_of(first, x) + _rounding_of(second, y)
    if bool(((y - x).abs() <= unit).all()):
        return WeightDiff(relation="cast", error=error, detail=_types(first, second))
    if through := _through(first, second):
        return WeightDiff(relation="cast", error=error, detail=f"through {through}")
    factor = float((x * y).sum()) / size**2
    if factor and bool(
        ((y - factor * x).abs() <= 2 * (abs(factor) * _rounding_of(first, x) + _rounding_of(second, y))).all()
    ):
        return WeightDiff(relation="scaled", error=error, detail=f"{factor:.6g}")
    if not bool(y.any()):
        return WeightDiff(relation="zero", error=error)
    shift = float((y - x).mean())
    is_even = y.numel() > 1 and bool(((y - x - shift).abs() <= 2 * unit).all())
    if is_even and abs(shift) > CLEAR * float(unit.max()):
        return WeightDiff(relation="shifted", error=error, detail=f"{shift:.6g}")
    zeroed = (y == 0) & (x != 0)
    share = float(zeroed.double().mean())
    if share and bool((zeroed | ((y - x).abs() <= unit)).all()):
        if y.ndim > 1 and share >= SPARSE:
            return WeightDiff(relation="sparse", error=error, detail=_zeros(y))
        return WeightDiff(
            relation="changed", error=error, detail=f"{int(zeroed.sum()):,} of {y.numel():,} values zeroed"
        )
    if order := _order(x, y):
        return WeightDiff(relation="permuted", error=error, detail=order)
    if (
        x.ndim == 2
        and x.shape == y.T.shape
        and bool(((y - x.T).abs() <= _rounding_of(first, x).T + _rounding_of(second, y)).all())
    ):
        return WeightDiff(relation="transposed", error=error)
    if rank := _rank(y - x, first, second, x, y):
        return WeightDiff(relation="low rank", error=error, detail=f"rank {rank}")
    if bits := _as_eight_bits(first, second) or quantised(second):
        return WeightDiff(relation="quantised", error=error, detail=bits)
    zeros = f", {_zeros(y)}" if share >= SPARSE and y.ndim > 1 else ""
    return WeightDiff(relation="changed", error=error, detail=(_rows(x, y) + zeros).removeprefix(", "))


def _rounding_of(tensor: Tensor, values: Tensor) -> Tensor:
    """Return how far rounding to a tensor's type may move its values: half of the distance to the next number."""
    kept = torch.finfo(tensor.dtype)
    return 0.5 * units(values, kept.eps, kept.tiny)


def _through(first: Tensor, second: Tensor) -> str:
    """Return the type through which a tensor went, whose numbers the second has in a wider type."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(first.to(dtype).to(second.dtype), second):
            return str(dtype).removeprefix("torch.")
    return ""


def _as_eight_bits(first: Tensor, second: Tensor) -> str:
    for dtype in EIGHT_BITS:
        if torch.equal(first.float().to(dtype).to(second.dtype), second):
            return f"8 bits ({str(dtype).removeprefix('torch.')}), no scale"
    return ""


def _zeros(y: Tensor) -> str:
    """Return the share of zeros, and whether there are two in each four."""
    zeros = (y == 0).flatten(1)
    said = f"{float(zeros.double().mean()):.1%} zeros"
    for along in (zeros, zeros.T):
        if along.shape[1] % 4 == 0 and bool((along.reshape(-1, 4).sum(1) >= 2).all()):
            return said + ", 2:4"
    return said


def _order(x: Tensor, y: Tensor) -> str:
    """Return whether the rows or the columns of the second are those of the first in another order."""
    if x.ndim < 2:
        return ""
    x, y = x.flatten(1), y.flatten(1)
    for rows, mine, theirs in (("rows", x, y), ("columns", x.T, y.T)):
        drawn = torch.randn(mine.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        places = [(values @ drawn.to(values.device)).argsort() for values in (mine, theirs)]
        if torch.equal(mine[places[0]], theirs[places[1]]):
            return f"{int((mine != theirs).any(1).sum()):,} of {len(mine):,} {rows}"
    return ""


def _rows(x: Tensor, y: Tensor) -> str:
    """Return how many rows or columns differ, where these are at most half."""
    if x.ndim < 2:
        return ""
    apart = (x != y).flatten(1)
    for rows, each in (("row", apart.any(1)), ("column", apart.any(0))):
        if (count := int(each.sum())) <= len(each) / 2:
            return f"{count:,} of {len(each):,} {rows}s"
    return ""


def _rank(difference: Tensor, first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> int:
    """Return the rank of a difference if it is low but for rounding, else 0.

    What is left beside the largest directions must be no more than rounding, of the second tensor alone or of both, or
    of arithmetic in single precision. A random matrix has singular values up to the norm of its largest row plus that
    of its largest column; those above are counted.
    """
    shape = difference.flatten(1).shape if difference.ndim > 1 else (0, 0)
    count = min(RANK + 1, min(shape) // 2 + 1)
    if min(shape) < 4:
        return 0
    values = _largest_values(difference.flatten(1), count)
    rest = float(difference.norm()) ** 2 - values.square().cumsum(0)
    arithmetic = 2.0**-22 * torch.maximum(x.abs(), y.abs())
    for own in (
        arithmetic,
        arithmetic + _rounding_of(second, y),
        arithmetic + _rounding_of(first, x) + _rounding_of(second, y),
    ):
        spread = own.flatten(1) / math.sqrt(3)  # the standard deviation of what is rounded by at most so much
        edge = float(spread.norm(dim=1).max() + spread.norm(dim=0).max())
        rank = int((values > SLACK * edge).sum())
        if 0 < rank < count and float(rest[rank - 1]) <= (SLACK * float(spread.norm())) ** 2:
            return rank
    return 0


def _largest_values(matrix: Tensor, count: int) -> Tensor:
    """Return the largest singular values of a matrix, by a few steps of subspace iteration."""
    drawn = torch.randn(matrix.shape[1], count, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    basis = drawn.to(matrix.device)
    for _ in range(3):
        basis = torch.linalg.qr(matrix.T @ (matrix @ basis))[0]
    return torch.linalg.svdvals(matrix @ basis)
