"""The field's sanity check (Kornblith et al. 2019, table 2): does a measure find the same layer in another seed?

`python bench/sanity.py DATA CHECKPOINTS` reads CIFAR-10 in DATA and `tiny10_cifar10_seed*.pt` in CHECKPOINTS, compares
the eight post-ReLU layers of all pairs of seeds on the first 2,000 test images, and counts how often a layer is closer
to its own counterpart than to any other layer. A tie is a miss. Figures go to `bench/sanity.json` and `docs/sanity.md`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import netkin as nk
from netkin.statistics import Moments

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "sanity.json", HERE.parent / "docs" / "sanity.md"
TIE = 1e-10
PUBLISHED = {  # percent, Kornblith et al. (2019), table 2
    "cka": "99.3",
    "cca_mean": "1.4",
    "cca_mean_squared": "10.6",
    "svcca": "9.9",
    "pwcca": "11.1",
    "linear_regression_r2": "45.4",
}
HEAD = """# Sanity check: does a measure match a layer with its counterpart?

The sanity check of Kornblith et al. (2019), table 2, made by `bench/sanity.py`. For networks that differ in their
seed alone, the closest layer of another network is found for every layer, and counted if it is the layer's own
counterpart. A tie is a miss. Here: Tiny-10 networks trained on CIFAR-10, their eight post-ReLU layers,
`shape="flatten"`, the first 2,000 test images. Theirs: other networks of this kind, on other examples, so that the
two columns are not directly comparable.

Five of the eight layers are wider than 2,000: there CCA of any two layers is 1, which is why `cca_*`, `pwcca` and
regression tie (with a warning in the comparison). `gaussian_mutual_information` is infinite there and has no value.

| measure | matched | cases | seeds | theirs |
|---|---|---|---|---|
"""


def main() -> None:
    """Count, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--measure", action="append", help="by default all linear ones")
    parser.add_argument("--seeds", type=int, default=12, help="how many networks")
    parser.add_argument("--jobs", type=int, default=1, help="how many pairs of networks at a time")
    options = parser.parse_args()
    seeds, jobs = options.seeds, options.jobs
    linear = [name for name, measure in nk.measures.measures().items() if measure.facts.reads is Moments]
    asked = tuple(options.measure or linear)
    figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    work = functools.partial(found_in_pair, options.data, options.checkpoints, asked, threads)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pairs = list(pool.map(work, combinations(range(seeds), 2)))
    for measure in asked:
        found, cases = (sum(pair[measure][i] for pair in pairs) for i in (0, 1))
        figures[measure] = {"found": found, "cases": cases, "seeds": seeds}
    RESULTS.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(page(figures))


def found_in_pair(
    data: Path, checkpoints: Path, measures: tuple[str, ...], threads: int, seeds: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Return for every measure how many layers of two networks were found again, and of how many."""
    torch.set_num_threads(threads)
    models = [nk.load_model(f"netkin:tiny10@{checkpoints / f'tiny10_cifar10_seed{seed}.pt'}") for seed in seeds]
    images = nk.load_data(f"cifar10:{data}", batch_size=500)
    comparison = nk.compare(*models, images, list(measures), layers="relu*", shape="flatten", examples=2_000)
    print(f"seeds {seeds} done", file=sys.stderr, flush=True)
    return {measure: _counted(comparison[measure]) for measure in measures}


def _counted(table: Any) -> tuple[int, int]:
    return found_again(table.values * (1 if table.higher_is_closer else -1)), 2 * len(table.layers_a)


def found_again(closeness: np.ndarray) -> int:
    """Return how many rows, and how many columns, have their one largest entry on the diagonal."""
    both = 0
    for table in (closeness, closeness.T):
        others = np.where(np.eye(len(table), dtype=bool), -np.inf, np.nan_to_num(table, nan=-np.inf))
        own = np.nan_to_num(np.diag(table), nan=-np.inf)
        both += int((own > others.max(1) + TIE).sum())
    return both


def page(figures: dict[str, Any]) -> str:
    """Return the text of `docs/sanity.md`."""
    order = sorted(figures, key=lambda name: -figures[name]["found"] / figures[name]["cases"])
    rows = []
    for name in order:
        figure = figures[name]
        share = f"{100 * figure['found'] / figure['cases']:.1f} %"
        theirs = f"{PUBLISHED[name]} %" if name in PUBLISHED else ""
        rows.append(f"| `{name}` | {share} | {figure['found']} of {figure['cases']} | {figure['seeds']} | {theirs} |")
    return HEAD + "\n".join(rows) + "\n\nTheir SVCCA averaged over squared correlations found 15.1 %.\n"


if __name__ == "__main__":
    main()
