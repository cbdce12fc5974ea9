"""The plan: which statistic serves which measure, what it will cost, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from netkin.errors import MemoryLimit
from netkin.measures.registry import Measure
from netkin.statistics import Grams, Moments, Rows

CAP = 4096  # examples that measures on rows look at: their distance matrices grow with the square
GramKey = tuple[int, str, float]


@dataclass(frozen=True)
class Needs:
    """What a list of measures must have collected."""

    moments: bool
    rows: bool
    grams: tuple[GramKey, ...]
    precision: torch.dtype
    debiased: bool

    @classmethod
    def of(cls, measures: Sequence[Measure]) -> Needs:
        linear = [m for m in measures if m.facts.reads is Moments]
        grams = [gram_key(m) for m in measures if m.facts.reads is Grams]
        return cls(
            moments=bool(linear),
            rows=any(m.facts.reads is Rows for m in measures),
            grams=tuple(dict.fromkeys(grams)),
            precision=torch.float64 if any(m.facts.precise for m in linear) else torch.float32,
            debiased=any(m.facts.debiases for m in linear),
        )


@dataclass(frozen=True)
class Layer:
    """What the plan knows of one layer after the first batch."""

    model: str
    name: str
    width: int
    rows_per_example: float

    @property
    def key(self) -> str:
        return f"{self.model}/{self.name}"


@dataclass(frozen=True)
class Plan:
    """The statistics chosen, their memory in bytes and the reason."""

    linear: str  # "moments", "rows" or "" where no linear measure is asked for
    bytes: int
    limit: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def gram_key(measure: Measure) -> GramKey:
    """Return which `LayerGrams` serves a measure: batch size, kernel and width of the kernel."""
    settings = measure.settings
    return settings["batch"], settings["kernel"], settings["fraction"]


def make_plan(
    needs: Needs,
    layers: Sequence[Layer],
    rectangles: Sequence[tuple[Sequence[str], Sequence[str]]],
    examples: int | None,
    memory: int | None,
) -> Plan:
    """Choose the statistics for `layers`; refuse, naming the layer and the ways out, what does not fit `memory`."""
    limit = free_memory() // 4 if memory is None else memory
    by_key = {layer.key: layer for layer in layers}
    lines, total, linear = [], 0, ""
    if needs.moments:
        linear, size, line = _linear(needs, by_key, rectangles, examples, limit)
        lines.append(line)
        total += size
    if needs.rows:
        size = int(min(CAP, examples or CAP) * sum(layer.width for layer in layers) * 4)
        _refuse_over(limit, size, layers, f"a sample of {CAP:,} rows")
        lines.append(f"Rows of at most {CAP:,} examples: {_size(size)}")
        total += size
    for batch, kernel, _ in needs.grams:
        lines.append(f"Grams of mini-batches of {batch} ({kernel} kernel): {_size(len(layers) * batch**2 * 8)}")
        total += len(layers) * batch**2 * 8
    return Plan(linear, total, limit, tuple(lines))


def _linear(
    needs: Needs,
    layers: dict[str, Layer],
    rectangles: Sequence[tuple[Sequence[str], Sequence[str]]],
    examples: int | None,
    limit: int,
) -> tuple[str, int, str]:
    """Choose between streamed moments and kept rows for the linear measures."""
    moments = _moments_bytes(layers, rectangles)
    rows = _rows_bytes(layers, examples) if examples else None
    wide = any(layer.width > (examples or 0) * layer.rows_per_example for layer in layers.values())
    precision = "float64" if needs.precision == torch.float64 else "float32"
    if rows is not None and rows <= limit and wide and rows < moments:
        return "rows", rows, f"Rows, all {examples:,} examples, as some layers are wider than that: {_size(rows)}"
    if moments <= limit:
        return "moments", moments, f"Moments, streamed, products in {precision}: {_size(moments)}"
    if rows is not None and rows <= limit:
        return "rows", rows, f"Rows, all {examples:,} examples, as moments would need {_size(moments)}: {_size(rows)}"
    least = moments if rows is None else min(moments, rows)
    _refuse_over(
        limit, least, list(layers.values()), "moments" if least == moments else f"the rows of {examples:,} examples"
    )
    raise AssertionError  # unreachable: the least does not fit


def _moments_bytes(layers: dict[str, Layer], rectangles: Sequence[tuple[Sequence[str], Sequence[str]]]) -> int:
    own = sum(layer.width**2 for layer in layers.values())
    cross = sum(sum(layers[x].width for x in left) * sum(layers[y].width for y in right) for left, right in rectangles)
    return 8 * (own + cross)


def _rows_bytes(layers: dict[str, Layer], examples: int) -> int:
    """Rows in float32, and for each layer the Gram or covariance matrix that its pairs share."""
    counts = [(layer.width, int(examples * layer.rows_per_example)) for layer in layers.values()]
    return sum(4 * width * n + 8 * min(width, n) ** 2 + 8 * n * min(width, n) for width, n in counts)


def _refuse_over(limit: int, size: int, layers: Sequence[Layer], what: str) -> None:
    if size <= limit:
        return
    widest = max(layers, key=lambda layer: layer.width)
    raise MemoryLimit(
        f"{what} need {_size(size)} and the limit is {_size(limit)}; the widest layer is {widest.name!r} of "
        f"{widest.model!r} with {widest.width:,} features. Use shape='pool', the measure 'cka_minibatch', fewer "
        "`examples=`, fewer `layers=`, or a higher `memory=`."
    )


def free_memory() -> int:
    """Return how many bytes of memory are free now."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
