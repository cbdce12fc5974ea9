"""Standard errors of tokens by sequences: how often their 95 % intervals hold what they are to hold.

`python bench/token_errors.py` measures the coverage in several worlds whose tokens depend on each other within a
sequence, with 20, 50 and 200 sequences, and writes bench/token_errors.json; with `--table` it prints that as a table.

An interval is to hold the mean of the measure over data of this size, which a standard error is about: the mean of all
trials. For measures without bias that is the value of the population, which is told beside it (`bias`).

The criterion, fixed before the first run: each coverage is between 93 and 97 %, or is outside by no more than 2.6
standard errors of itself (1.3 % for 2,000 trials), in all worlds with 20 sequences or more. Where tokens are sampled,
which takes longer, there are 500 trials. What the record holds is not measured again.
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
MEASURES = ("cka", "cka_debiased", "nbs")
ACROSS = "cka_debiased_by_sequence"  # where tokens are sampled
SAMPLED = 200  # tokens
TOGETHER = 40  # trials in one comparison
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


def autoregressive(draw: Draw, count: int, lengths: np.ndarray) -> Layers:
    """Tokens that depend on the one before, narrow layers."""
    x, y = related(chain(draw, count, 12, 4, 0.8), draw, SMALL, 0.7)
    return x, y, None


def wide(draw: Draw, count: int, lengths: np.ndarray) -> Layers:
    """The same in layers of 48 and 64 features."""
    x, y = related(chain(draw, count, 12, 16, 0.8), draw, WIDE, 0.7)
    return x, y, None


def ragged(draw: Draw, count: int, lengths: np.ndarray) -> Layers:
    """The same in sequences of 2 to 24 tokens."""
    x, y = related(chain(draw, count, 24, 4, 0.8), draw, SMALL, 0.7)
    return x, y, np.arange(24) < lengths


def topics(draw: Draw, count: int, lengths: np.ndarray) -> Layers:
    """Tokens that share a topic of their sequence, which makes up most of them."""
    hidden = draw.normal(size=(count, 1, 4)) + 0.5 * draw.normal(size=(count, 12, 4))
    x, y = related(hidden, draw, SMALL, 0.7)
    return x, y, None


def unrelated(draw: Draw, count: int, lengths: np.ndarray) -> Layers:
    """Two layers with nothing in common, whose tokens depend on the one before."""
    return chain(draw, count, 12, 8, 0.8), chain(draw, count, 12, 8, 0.8), None


WORLDS: dict[str, tuple[Callable[[Draw, int, np.ndarray], Layers], int | None]] = {
    "AR(1), 6 features": (autoregressive, None),
    "AR(1), 48 and 64 features": (wide, None),
    "AR(1), 2 to 24 tokens": (ragged, None),
    "topics": (topics, None),
    "topics, a sample of 200 tokens": (topics, SAMPLED),
    "unrelated": (unrelated, None),
}


def measured(trials: list[Layers], world: str, number: int, errors: bool = True) -> nk.Comparison:
    """Return the comparison of two layers of tokens for each of several trials, which share the numbers of sequences.

    `number` is that of the first sequence, on which chunks and samples hang.
    """
    tokens = WORLDS[world][1]
    measures = (*MEASURES, ACROSS) if tokens else MEASURES
    chunks: Any = {"errors": True, "chunks": 20} if errors else {}
    comparer = nk.Comparer(measures, shape="tokens", tokens=tokens, pairs="corresponding", **chunks)
    rows = {side: {f"trial {i}": layers[place] for i, layers in enumerate(trials)} for place, side in enumerate("ab")}
    valid = trials[0][2]
    comparer.update(
        rows, valid=None if valid is None else torch.from_numpy(valid), numbers=number + np.arange(len(trials[0][0]))
    )
    return comparer.compute(progress=False)  # type: ignore[return-value]


def coverage(world: str, sequences: int, trials: int) -> dict[str, dict[str, float]]:
    """Return for each measure how often intervals hold its mean over the trials, and its bias."""
    make, _ = WORLDS[world]
    draw = np.random.default_rng([sequences, list(WORLDS).index(world)])
    found: dict[str, list[tuple[float, float, int]]] = {}
    for start in range(0, trials, TOGETHER):
        lengths = draw.integers(2, 25, (sequences, 1))  # of ragged sequences, which all trials at once share
        several = [make(draw, sequences, lengths) for _ in range(min(TOGETHER, trials - start))]
        comparison = measured(several, world, start * 1000)
        for measure, table in comparison.tables.items():
            values, errors = np.diagonal(table.values), np.diagonal(table.to_errors())
            rows = found.setdefault(measure, [])
            rows += [(value, error, len(table.chunk_sizes)) for value, error in zip(values, errors, strict=True)]
    truth = population(world)
    result = {}
    for measure, rows in found.items():
        values, errors, counts = np.transpose(rows)
        has_error = np.isfinite(errors)
        reach = np.array([student_quantile(int(count)) for count in counts[has_error]])
        inside = np.abs(values[has_error] - values.mean()) <= reach * errors[has_error]
        result[measure] = {
            "coverage": float(inside.mean()), "trials": int(has_error.sum()), "mean": float(values.mean()),
            "spread": float(values.std(ddof=1)), "error": float(np.sqrt(np.mean(errors[has_error] ** 2))),
        }  # fmt: skip
        if "debiased" in measure:
            result[measure]["bias"] = float(values.mean() - truth)
    return result


def population(world: str) -> float:
    """Return the debiased CKA of very many sequences."""
    draw = np.random.default_rng(99)
    x, y, valid = WORLDS[world][0](draw, 10_000, draw.integers(2, 25, (10_000, 1)))
    comparer = nk.Comparer("cka_debiased", shape="tokens")
    comparer.update({"a": {"x": x}, "b": {"x": y}}, valid=None if valid is None else torch.from_numpy(valid))
    return float(comparer.compute(progress=False)["x", "x"])  # type: ignore[index]


def within(row: dict[str, float]) -> bool:
    """Return whether a coverage meets the criterion."""
    slack = 2.6 * math.sqrt(0.95 * 0.05 / row["trials"])
    return LOW - slack <= row["coverage"] <= HIGH + slack


def outside(record: dict[str, Any]) -> str:
    """Return the worlds in which some coverage misses the criterion, as text."""
    worlds = [
        world
        for world, by_count in record["coverage"].items()
        if not all(within(row) for rows in by_count.values() for row in rows.values())
    ]
    return ", ".join(worlds) or "none"


def table(record: dict[str, Any]) -> str:
    """Return the record as a table for the guide."""
    columns = (*MEASURES, ACROSS)
    head = " | ".join(f"`{measure}`" for measure in columns)
    lines = [f"| world | sequences | {head} |", "|---" * (2 + len(columns)) + "|"]
    for world, by_count in record["coverage"].items():
        for sequences, rows in by_count.items():
            cells = [f"{rows[measure]['coverage']:.1%}" if measure in rows else "" for measure in columns]
            lines.append(f"| {world} | {sequences} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(trials: int = TRIALS) -> None:
    """Measure all worlds, and write the record after each."""
    torch.set_num_threads(1)
    before = json.loads(RECORD.read_text()) if RECORD.exists() and trials == TRIALS else {"coverage": {}}
    record: dict[str, Any] = {
        "date": date.today().isoformat(), "netkin": nk.__version__, "torch": torch.__version__, "trials": trials,
        "criterion": [LOW, HIGH], "coverage": before["coverage"],
    }  # fmt: skip
    for world in WORLDS:
        for sequences in SEQUENCES:
            if str(sequences) in record["coverage"].get(world, {}):
                continue
            rows = coverage(world, sequences, trials // 4 if WORLDS[world][1] else trials)
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
