"""Weight relations: how each tensor of one model follows from its counterpart: cast, scaled, quantised, low rank, …

They are read from the weights alone; no data are run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from netkin.applications.diff.floor import coarser
from netkin.representations.inputs import FLOATING
from netkin.results.diff import WeightDiff

GRID = 256  # values that a row takes at most, where it was rounded to 8 bits or fewer
RANK = 64  # up to which a difference counts as of low rank
CLEAR = 16  # units of rounding, by which a shift exceeds what it could be by chance
SAME = ("equal", "cast")


def weight_relations(model: nn.Module, other: nn.Module, names: Mapping[str, str]) -> dict[str, WeightDiff]:
    """Return how the tensors of `other` follow from those of `model`, by the names in `model`, or in `other` if new.

    `names` are those of modules, with those of their counterparts. Buffers that count, such as batches, are left out.
    """
    mine, theirs = _tensors(model), _tensors(other)
    found: dict[str, WeightDiff] = {}
    for name, tensor in mine.items():
        module, _, key = name.rpartition(".")
        own = names.get(module)
        counterpart = None if own is None else f"{own}.{key}".lstrip(".")
        there = theirs.pop(counterpart, None) if counterpart else None
        found[name] = WeightDiff(relation="gone") if there is None else relation(tensor, there)
    return found | {name: WeightDiff(relation="new") for name in theirs}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, those too that are not saved; whole numbers only as packed weights."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name.replace("_orig_mod.", ""): tensor for name, tensor in tensors if tensor.ndim or tensor.dtype in FLOATING
    }


def relation(first: Tensor, second: Tensor) -> WeightDiff:
    """Return how the second tensor follows from the first.

    Example:
        >>> weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        >>> relation(weight, weight.bfloat16()).relation, relation(weight, weight * 0.5).detail
        ('cast', '0.5')
    """
    first, second = first.detach(), second.detach().to(first.device)
    if first.shape != second.shape:
        return WeightDiff(relation="changed", error=1.0, detail=f"{tuple(first.shape)} and {tuple(second.shape)}")
    if torch.equal(first, second):
        return WeightDiff(relation="equal" if first.dtype == second.dtype else "cast")
    if first.dtype not in FLOATING or second.dtype not in FLOATING:
        bits = 8 * second.element_size()
        is_packed = first.dtype in FLOATING and second.dtype not in FLOATING
        return WeightDiff(relation="quantised" if is_packed else "changed", error=1.0, detail=f"{bits} bits")
    if not (first.isfinite().all() and second.isfinite().all()):
        return WeightDiff(relation="changed", error=math.inf, detail="with NaN or infinite values")
    x, y = first.double(), second.double()
    size = float(x.norm())
    if not size:
        return WeightDiff(relation="changed", error=1.0, detail="from zero")
    error, unit = float((y - x).norm()) / size, torch.finfo(coarser(first.dtype, second.dtype)).eps
    tiny = max(torch.finfo(tensor.dtype).tiny for tensor in (first, second))  # below which numbers have fewer digits
    if bool(((y - x).abs() <= unit * x.abs().clamp(min=tiny)).all()):
        return WeightDiff(relation="cast", error=error)
    factor = float((x * y).sum()) / size**2
    if factor and float((y - factor * x).norm()) <= unit * abs(factor) * size:
        return WeightDiff(relation="scaled", error=error, detail=f"{factor:.6g}")
    zeros = y == 0
    if zeros.all():
        return WeightDiff(relation="zero", error=error)
    shift = float((y - x).mean())
    is_even = bool(((y - x - shift).abs() <= unit * torch.maximum(x.abs(), y.abs())).all())
    if is_even and y.numel() > 1 and abs(shift) > CLEAR * unit * float(y.abs().max()):
        return WeightDiff(relation="shifted", error=error, detail=f"{shift:.6g}")
    if bool((zeros | ((y - x).abs() <= unit * x.abs())).all()):
        return WeightDiff(relation="sparse", error=error, detail=f"{float(zeros.double().mean()):.1%} zeros")
    levels = _levels(second)
    if levels:
        return WeightDiff(relation="quantised", error=error, detail=f"{levels} values in a row")
    rank = _rank(y - x, unit * size)
    if rank:
        return WeightDiff(relation="low rank", error=error, detail=f"rank {rank}")
    return WeightDiff(relation="changed", error=error)


def _levels(tensor: Tensor) -> int:
    """Return how many values a row takes at most, where these are few for its length; 0 where they are not."""
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor[None]
    counts = [len(row.unique()) for row in rows[:GRID]]
    length = rows.shape[1]
    return max(counts) if max(counts) <= GRID and max(counts) < length / 2 else 0


def _rank(difference: Tensor, least: float) -> int:
    """Return the rank of a difference if it is low, else 0: from a random projection, which has the same rank."""
    if difference.ndim != 2 or min(difference.shape) < 4:
        return 0
    count = min(RANK + 1, min(difference.shape) // 2 + 1)
    drawn = torch.randn(difference.shape[1], count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(difference @ drawn.to(difference.device))
    rank = int((values > max(1e-6 * float(values[0]), least)).sum())
    return rank if rank < count else 0
