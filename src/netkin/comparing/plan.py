"""The plan: which statistic serves which measure, what it will cost, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from netkin.comparing import costs
from netkin.comparing.costs import Needs
from netkin.comparing.meeting import Layer, Meeting
from netkin.errors import MemoryLimit

WAYS = "shape='pool', the measure 'cka_minibatch', fewer `examples=`"
SPECTRAL_WAYS = """shape='pool', pairs='corresponding', resize='average'"""


@dataclass(frozen=True)
class Plan:
    """The statistics chosen, their memory in bytes and the reason; `explain` adds what else the work will take."""

    linear: str  # "moments", "spectra", "rows" or "" where no linear measure is asked for
    bytes: int
    limit: int
    lines: tuple[str, ...]
    widths: dict[str, dict[str, int]] = field(default_factory=dict)  # of each model's layers
    pairs: int = 0
    measures: dict[str, str] = field(default_factory=dict)  # the statistic that each is read from
    examples: int | None = None
    passes: int | None = None  # forward passes of all models together
    operations: int | None = None  # multiply-adds of the statistics
    refused: str = ""  # the sentence that `compare` would refuse with

    def __str__(self) -> str:
        return "\n".join(self.lines)


def make_plan(needs: Needs, meeting: Meeting, examples: int | None, memory: int | None) -> Plan:
    """Choose the statistics for the layers that meet; refuse what does not fit `memory`, naming the ways out.

    `examples` is how many the data will give, None where nobody knows.
    """
    limit = free_memory() // 4 if memory is None else memory
    layers, lines, total, linear = meeting.layers.values(), [], 0, ""
    if needs.moments:
        linear, total, line = _linear(needs, meeting, examples, limit)
        lines.append(line)
    if needs.rows:
        size = costs.of_sample(needs, layers, examples)
        lines.append(f"Rows, a sample of at most {costs.CAP:,}: {size_of(size)}")
        total += size
    for key in needs.grams:
        size = costs.of_grams(key, layers)
        lines.append(f"Grams of mini-batches of {key[0]}, {key[1]} kernel: {size_of(size)}")
        total += size
    refuse_over(limit, total, layers, "the statistics")
    return Plan(linear, total, limit, tuple(lines))


def _linear(needs: Needs, meeting: Meeting, examples: int | None, limit: int) -> tuple[str, int, str]:
    """Choose between streamed moments and kept rows for the linear measures."""
    layers = meeting.layers.values()
    if meeting.spectral:
        size = costs.of_spectra(needs, meeting)
        refuse_over(limit, size, layers, "spectra", SPECTRAL_WAYS)
        return "spectra", size, f"Spectra, streamed, products in {_precision(needs, layers)}: {size_of(size)}"
    moments = costs.of_moments(needs, layers, meeting.rectangles)
    streamed = "moments", moments, f"Moments, streamed, products in {_precision(needs, layers)}: {size_of(moments)}"
    if examples is None:
        return streamed if moments <= limit else _open_ended(needs, layers, moments, limit)
    rows = costs.of_rows(needs, layers, examples)
    wide = any(layer.width > examples * layer.rows_per_example for layer in layers)
    if moments <= limit and not (wide and rows < moments):
        return streamed
    refuse_over(
        limit, min(moments, rows), layers, "moments" if moments < rows else f"the rows of {examples:,} examples"
    )
    why = "some layers are wider than that" if wide else f"moments would need {size_of(moments)}"
    return "rows", rows, f"Rows, all {examples:,} examples, as {why}: {size_of(rows)}"


def _open_ended(needs: Needs, layers: Collection[Layer], moments: int, limit: int) -> tuple[str, int, str]:
    """Keep the rows of data of unknown length, as moments don't fit; the limit is watched after each batch."""
    first = costs.of_rows(needs, layers, max(layer.examples for layer in layers))
    refuse_over(limit, first, layers, "the rows of the first batch")
    return "rows", first, f"Rows, as moments would need {size_of(moments)}; watched, to stay below {size_of(limit)}"


def refuse_over(limit: int, size: int, layers: Collection[Layer], what: str, ways: str = WAYS) -> None:
    """Refuse a size over the limit, naming the widest layer and the ways out."""
    if size <= limit:
        return
    widest = max(layers, key=lambda layer: layer.width)
    raise MemoryLimit(
        f"{what} need {size_of(size)} and the limit is {size_of(limit)}; the widest layer is {widest.name!r} of "
        f"{widest.model!r} with {widest.width:,} features. Use {ways}, fewer `layers=`, or a higher `memory=`."
    )


def free_memory() -> int:
    """Return how many bytes of memory are free now."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _precision(needs: Needs, layers: Collection[Layer]) -> str:
    return "float64" if needs.precision(layers) == torch.float64 else "float32"


def size_of(count: float) -> str:
    """Return a number of bytes in the unit that people would use."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
