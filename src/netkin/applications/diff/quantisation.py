"""Quantisation: whether a tensor's values lie on a grid or in a codebook, of how many bits, and what shares a scale.

Rounded weights are often kept as plain numbers, in a type that rounds them once more. So each value may lie off the
grid by that rounding, and only values that their own type keeps much finer than the grid are evidence for it: bfloat16
has a grid of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELY = 4  # bits; a grid of more may fit what has few in smaller groups
LEVELS = 256  # of a grid, which has 8 bits
ENTRIES = 16  # of a codebook
GROUPS = (256, 128, 64, 32, 16)  # of consecutive weights that share a scale
SAMPLED = 64  # rows, columns and groups that are looked at
VALUES = 4096  # of them each
FIRST = 64  # values with which most steps are found not to fit
EVIDENCE = 30.0  # in nats, beyond what the choice of a step for each group explains
FINE = 8  # a value is evidence where its type has so many numbers in a step
FLOATS = ((torch.float8_e5m2, 4, range(-14, 16)), (torch.float8_e4m3fn, 8, range(-6, 9)))  # the narrower ones first


@dataclass(frozen=True)
class _Groups:
    """Values that share a scale, groups × values, and what is said of them."""

    said: str
    values: Tensor
    eps: float  # of the type that they were kept in
    tiny: float  # its smallest number of full precision

    @property
    def units(self) -> Tensor:
        """The distances of the values from the next numbers of their type."""
        return units(self.values, self.eps, self.tiny)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude in each group, as a column."""
        return self.values.abs().amax(1, keepdim=True)


def units(values: Tensor, eps: float, tiny: float) -> Tensor:
    """Return the distances of values from the next numbers of a type."""
    return eps * torch.exp2(torch.frexp(values.abs().clamp(min=tiny))[1].double() - 1)


def quantised(tensor: Tensor) -> str:
    """Return how a tensor was quantised, such as "8 bits, a scale per row", or nothing where it was not.

    Example:
        >>> weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
        >>> scale = weight.abs().amax(1, keepdim=True) / 7
        >>> quantised((weight / scale).round() * scale), quantised(weight)
        ('4 bits, a scale per row', '')
    """
    if tensor.ndim < 2 or min(tensor.shape[0], tensor[0].numel()) < 4:
        return ""
    found = ""
    for groups in _granularities(tensor.detach().flatten(1)):
        if bits := _on_a_grid(groups):
            said = _in_bits(bits) + groups.said
            if bits <= LIKELY:
                return said
            found = found or said
        elif not found and (said := _of_eight_bit_floats(groups) or _in_a_codebook(groups)):
            return said + groups.said
    return found


def _granularities(rows: Tensor) -> Iterator[_Groups]:
    """Yield the ways in which values may share scales, from the coarsest; of each some groups, by a fixed seed."""
    kept = torch.finfo(rows.dtype)
    drawn = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(length, generator=drawn)[:SAMPLED].to(rows.device) for length in rows.shape]
    some, others = (values.cpu().double() for values in (rows[chosen[0]], rows[:, chosen[1]].T))

    def few(said: str, values: Tensor) -> _Groups:
        filled = values[values.abs().amax(1) > 0]
        filled = filled[torch.randperm(len(filled), generator=drawn)[:SAMPLED]]
        return _Groups(said, filled[:, torch.randperm(filled.shape[1], generator=drawn)[:VALUES]], kept.eps, kept.tiny)

    yield few("", some.reshape(1, -1))
    yield few(", a scale per row", some)
    yield few(", a scale per column", others)
    for size in GROUPS:
        for values, where in ((some, ""), (others, " down the columns")):
            if values.shape[1] % size == 0 and values.shape[1] > size:
                yield few(f", in groups of {size}{where}", values.reshape(-1, size))


def _on_a_grid(groups: _Groups) -> int:
    """Return the bits of a grid of equal steps, through zero or through the least value of each group; 0 of none."""
    lowest = groups.values.amin(1, keepdim=True) if groups.values.numel() else groups.values
    for origin in (torch.zeros_like(lowest), lowest):
        levels, evidence = 1, 0.0
        for values, unit, start in zip(groups.values, groups.units, origin, strict=True):
            found = _steps(values - start, unit + groups.eps * start.abs(), groups.eps)
            if found is None:
                break
            numbers, own = found
            evidence += own - math.log(LEVELS)
            levels = max(levels, 1 + int(numbers.max().clamp(min=0) - numbers.min().clamp(max=0)))
        else:
            if evidence >= EVIDENCE and 1 < levels <= LEVELS:
                return math.ceil(math.log2(levels))
    return 0


def _steps(values: Tensor, unit: Tensor, eps: float) -> tuple[Tensor, float] | None:
    """Return the values as whole numbers of the widest step that fits all, and how unlikely that is by chance, in nats.

    The largest value is a whole number of steps; which one is tried out.
    """
    steps = values.abs().max() / torch.arange(1, LEVELS, dtype=torch.float64)[:, None]
    for few in (slice(FIRST), slice(None)):
        own = values[few]
        numbers = (own / steps).round()
        squares = numbers.square().sum(1, keepdim=True)
        # the largest value was rounded by its type; all values together tell the step better
        steps = torch.where(squares > 0, (own * numbers).sum(1, keepdim=True) / squares.clamp(min=1), steps)
        numbers = (own / steps).round()
        room = (0.51 * unit[few] + 0.5 * eps * own.abs()) / steps + 1e-9
        fits = ((own / steps - numbers).abs() <= room).all(1) & (steps[:, 0] > 0)
        if not fits.any():
            return None
        steps, numbers, room = steps[fits], numbers[fits], room[fits]
    is_fine = FINE * unit <= steps[0]
    return numbers[0], -float((2 * room[0]).clamp(max=1.0).log()[is_fine].sum())


def _of_eight_bit_floats(groups: _Groups) -> str:
    """Return the name of an 8-bit float type whose numbers, times a scale, all values are."""
    for dtype, digits, exponents in FLOATS:
        if groups.values.numel() * -math.log(4 * digits * groups.eps) < EVIDENCE:
            continue
        # the leading digits and the exponent of the largest value in that type
        largest = [most / digits * 2.0**exponent for exponent in exponents for most in range(digits, 2 * digits)]
        each = zip(groups.values, groups.units, strict=True)
        if all(_fits(values, unit, dtype, groups.eps, largest) for values, unit in each):
            return f"8 bits ({str(dtype).removeprefix('torch.')})"
    return ""


def _fits(values: Tensor, unit: Tensor, dtype: torch.dtype, eps: float, largest: list[float]) -> bool:
    """Return whether values are numbers of a type by a scale, with which the largest becomes one of those given."""
    scales = values.abs().max() / torch.tensor(largest, dtype=torch.float64)[:, None]
    for few in (slice(FIRST), slice(None)):
        scaled = values[few] / scales
        apart = (scaled - scaled.float().to(dtype).double()).abs()
        scales = scales[(apart <= eps * scaled.abs() + 0.51 * unit[few] / scales).all(1)]
    return bool(len(scales))


def _in_a_codebook(groups: _Groups) -> str:
    """Return the bits of a codebook: all groups hold the same few values, as shares of their largest one."""
    if not groups.values.numel():
        return ""
    shares = (groups.values / groups.largest).flatten().sort().values
    parted = (shares.diff() > 4 * groups.eps).nonzero()[:, 0]
    count = len(parted) + 1
    if not 1 < count <= ENTRIES or len(shares) < FIRST * count:
        return ""
    ends = torch.cat([torch.tensor([-1]), parted, torch.tensor([len(shares) - 1])])
    if bool((shares[ends[1:]] - shares[ends[:-1] + 1] > 2.5 * groups.eps).any()):
        return ""
    return f"{_in_bits(math.ceil(math.log2(count)))}, a codebook of {count} values"


def _in_bits(count: int) -> str:
    return f"{count} bit{'s' if count > 1 else ''}"
