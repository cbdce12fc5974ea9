"""Standard errors of tokens by sequences: how often their 95 % intervals hold what they are to hold.

`python bench/token_errors.py` measures the coverage in several worlds whose tokens depend on each other within a
sequence, with 20, 50 and 200 sequences, and writes bench/token_errors.json; with `--table` it prints that as a table.

An interval is to hold the mean of the measure over data of this size, which a standard error is about: the mean of all
trials. For measures without bias that is the value of the population, which is told beside it (`bias`).

The criterion, fixed before the first run: each coverage is between 93 and 97 %, or is outside by no more than 2.6 of its
own standard errors (0.5 % for 2,000 trials), in all worlds with 20 sequences or more.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import netkin as nk
from netkin.results.values import student_quantile

RECORD = Path(__file__).with_name("token_errors.json")
TRIALS = 2000
SEQUENCES = (20, 50, 200)
MEASURES = ("cka", "cka_debiased", "cka_debiased_by_sequence", "nbs")
SAMPLED = 400  # tokens, in the worlds that are sampled
LOW, HIGH = 0.93, 0.97

Draw = np.random.Generator
Layers = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def chain(draw: Draw, count: int, length: int, width: int, memory: float) -> np.ndarray:
    """Return sequences in which each token is `memory` of the one before and the rest new."""
    steps = draw.normal(size=(count, length, width))
    for t in range(1, length):
        steps[:, t] = memory * steps[:, t - 1] + math.sqrt(1 - memory**2) * steps[:, t]
    return steps


def related(hidden: np.ndarray, draw: Draw, mixes: tuple[np.ndarray, np.ndarray], noise: float) -> list[np.ndarray]:
    """Return two layers that see the same hidden tokens, each with noise of its own."""
    return [hidden @ mix + noise * draw.normal(size=(*hidden.shape[:2], mix.shape[1])) for mix in mixes]


FIXED = np.random.default_rng(7)
SMALL = FIXED.normal(size=(4, 6)), FIXED.normal(size=(4, 6))
WIDE = FIXED.normal(size=(16, 48)) / 2, FIXED.normal(size=(16, 64)) / 2


def autoregressive(draw: Draw, count: int) -> Layers:
    """Tokens that depend on the one before, narrow layers."""
    x, y = related(chain(draw, count, 12, 4, 0.8), draw, SMALL, 0.7)
    return x, y, None


def wide(draw: Draw, count: int) -> Layers:
    """The same in layers of 48 and 64 features."""
    x, y = related(chain(draw, count, 12, 16, 0.8), draw, WIDE, 0.7)
    return x, y, None


def ragged(draw: Draw, count: int) -> Layers:
    """The same in sequences of 2 to 24 tokens."""
    x, y = related(chain(draw, count, 24, 4, 0.8), draw, SMALL, 0.7)
    return x, y, np.arange(24) < draw.integers(2, 25, (count, 1))


def topics(draw: Draw, count: int) -> Layers:
    """Tokens that share a topic of their sequence, which makes up most of them."""
    hidden = draw.normal(size=(count, 1, 4)) + 0.5 * draw.normal(size=(count, 12, 4))
    x, y = related(hidden, draw, SMALL, 0.7)
    return x, y, None


def unrelated(draw: Draw, count: int) -> Layers:
    """Two layers with nothing in common, whose tokens depend on the one before."""
    return chain(draw, count, 12, 8, 0.8), chain(draw, count, 12, 8, 0.8), None


WORLDS: dict[str, tuple[Callable[[Draw, int], Layers], int | None]] = {
    "AR(1), 6 features": (autoregressive, None),
    "AR(1), 48 and 64 features": (wide, None),
    "AR(1), 2 to 24 tokens": (ragged, None),
    "topics": (topics, None),
    "topics, a sample of 400 tokens": (topics, SAMPLED),
    "unrelated": (unrelated, None),
}


def measured(layers: Layers, tokens: int | None, measures: tuple[str, ...], errors: bool = True) -> nk.Comparison:
    """Return the comparison of two layers of tokens."""
    x, y, valid = layers
    chunks: Any = {"errors": True, "chunks": 20} if errors else {}
    comparer = nk.Comparer(measures, shape="tokens", tokens=tokens, **chunks)
    comparer.update({"a": {"x": x}, "b": {"y": y}}, valid=None if valid is None else torch.from_numpy(valid))
    return comparer.compute(progress=False)  # type: ignore[return-value]


def coverage(world: str, sequences: int, trials: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return for each measure how often intervals hold its mean over the trials, and its bias."""
    make, tokens = WORLDS[world]
    draw = np.random.default_rng([seed, sequences, list(WORLDS).index(world)])
    values, errors, counts = (np.full((trials, len(MEASURES)), np.nan) for _ in range(3))
    for trial in range(trials):
        found = measured(make(draw, sequences), tokens, MEASURES)
        for place, measure in enumerate(MEASURES):
            table = found[measure]
            values[trial, place] = table.values[0, 0]
            errors[trial, place] = table.to_errors()[0, 0]
            counts[trial, place] = len(table.chunk_sizes)
    exact = measured(make(draw, 20_000 if "48" not in world else 5_000), None, ("cka_debiased",), errors=False)
    result = {}
    for place, measure in enumerate(MEASURES):
        centre = values[:, place].mean()
        has_error = np.isfinite(errors[:, place])
        reach = np.array([student_quantile(int(count)) for count in counts[has_error, place]])
        inside = np.abs(values[has_error, place] - centre) <= reach * errors[has_error, place]
        spread = values[:, place].std(ddof=1)
        result[measure] = {
            "coverage": float(inside.mean()), "trials": int(has_error.sum()), "mean": float(centre),
            "spread": float(spread), "error": float(np.sqrt(np.mean(errors[has_error, place] ** 2))),
        }  # fmt: skip
        if "debiased" in measure:
            result[measure]["bias"] = float(centre - exact["cka_debiased"].values[0, 0])
    return result


def within(row: dict[str, float]) -> bool:
    """Return whether a coverage meets the criterion."""
    slack = 2.6 * math.sqrt(0.95 * 0.05 / row["trials"])
    return LOW - slack <= row["coverage"] <= HIGH + slack


def table(record: dict[str, Any]) -> str:
    """Return the record as a table for the guide."""
    lines = [
        "| world | sequences | " + " | ".join(f"`{m}`" for m in MEASURES) + " |",
        "|---" * (2 + len(MEASURES)) + "|",
    ]
    for world, by_count in record["coverage"].items():
        for sequences, rows in by_count.items():
            cells = [f"{rows[m]['coverage']:.1%}" + ("" if within(rows[m]) else " (outside)") for m in MEASURES]
            lines.append(f"| {world} | {sequences} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(trials: int = TRIALS) -> None:
    """Measure all worlds, and write the record after each."""
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "date": date.today().isoformat(), "netkin": nk.__version__, "torch": torch.__version__, "trials": trials,
        "criterion": [LOW, HIGH], "coverage": {},
    }  # fmt: skip
    for world in WORLDS:
        for sequences in SEQUENCES:
            rows = coverage(world, sequences, trials)
            record["coverage"].setdefault(world, {})[str(sequences)] = rows
            words = ", ".join(f"{m} {r['coverage']:.1%}{'' if within(r) else ' OUTSIDE'}" for m, r in rows.items())
            print(f"{world}, {sequences} sequences: {words}", flush=True)
            if trials == TRIALS:
                RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(RECORD.read_text())))
    else:
        main(*map(int, sys.argv[1:]))
