"""Dropping tokens: multiply-adds and measured time of vision transformers in use, beside the plain ones.

`python bench/token_speed.py` prints the table of docs/dropping-tokens.md in a minute. It runs in one thread and takes
the time of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import netkin as nk
from netkin.sources.architectures import VisionTransformer, seeded, vit

NETWORKS = {
    "`netkin:vit`, batch of 16": (vit, 16, 32),
    "DeiT-Tiny's sizes, batch of 2": (partial(VisionTransformer, 224, 16, 192, 12, 3, 1000), 2, 224),
}


def row(plain: nn.Module, images: torch.Tensor, keep: float, similarity: bool) -> str:
    """Return the shares of multiply-adds and of time that a network with fewer tokens takes."""
    sparse = nk.sparsify_tokens(plain, keep, similarity=similarity).eval()
    work = nk.token_costs(sparse, images[:1]).multiply_adds / nk.token_costs(plain, images[:1]).multiply_adds
    with torch.inference_mode():
        whole, single = (ratio(partial(sparse, some), partial(plain, some)) for some in (images, images[:1]))
    return f"{keep} | {'yes' if similarity else 'no'} | {work:.2f} | {whole:.2f} | {single:.2f} |"


def ratio(work: Callable[[], Any], floor: Callable[[], Any], repeats: int = 15) -> float:
    """Return the median of the ratios of neighbouring times, by the processor's clock."""
    floor()
    return median(seconds(work) / seconds(floor) for _ in range(repeats))


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor's time for `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| network | keep | Eq. 13 | multiply-adds | time, batch | time, one image |\n|---|---|---|---|---|---|")
    for name, (build, count, size) in NETWORKS.items():
        plain, images = seeded(build).eval(), torch.randn(count, 3, size, size)
        for keep in (0.7, 0.9):
            for similarity in (False, True):
                print(f"| {name} |", row(plain, images, keep, similarity), flush=True)


if __name__ == "__main__":
    main()
