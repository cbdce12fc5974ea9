"""Projections: the memory and the products that comparing two language models takes, by the formulas of the plan.

`python bench/projection.py` prints the table of docs/performance.md. Nothing is run or measured: memory is what
`netkin compare --plan` would say, products are counted by hand. Two models are compared layer by layer, all blocks and
the embedding, over 512 sequences of 512 tokens in bfloat16, by `cka`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from netkin.comparing.alignment import Pairs
from netkin.comparing.plan import needs_of
from netkin.measures.registry import find
from netkin.memory import format_bytes
from netkin.statistics import LayerMoments, LayerSize, Study, TokenRows
from netkin.statistics.token_rows import ROOM

SEQUENCES, LENGTH, BATCH, SAMPLE = 512, 512, 8, 4096
LIMIT = 141e9 / 4  # a quarter of the memory of an H200, which statistics may take by default


@dataclass(frozen=True)
class Network:
    """The size of a language model."""

    name: str
    parameters: float
    layers: int
    width: int

    @property
    def forward(self) -> float:
        """The multiply-adds of the forward passes of two of them, but for attention."""
        return 2 * self.parameters * SEQUENCES * LENGTH


NETWORKS = (
    Network("6.7 billion", 6.7e9, 33, 4096),
    Network("13 billion", 13e9, 41, 5120),
    Network("70 billion", 70e9, 81, 8192),
)


def study(network: Network, pairs: str, shape: str) -> Study:
    """Return what the plan knows of two such networks."""
    resolution = torch.finfo(torch.bfloat16).eps
    rows = BATCH * LENGTH if shape == "tokens" else BATCH
    layers = {
        (model, str(i)): LayerSize(model, str(i), network.width, rows, BATCH, shape, itemsize=4, resolution=resolution)
        for model in "ab"
        for i in range(network.layers)
    }
    names = {model: [str(i) for i in range(network.layers)] for model in "ab"}
    blocks = Pairs([("a", "b")], pairs).pair_blocks(names)
    return Study(layers, blocks, examples=SEQUENCES, limit=int(LIMIT))


def memory(network: Network, kind: Any, pairs: str = "all") -> float:
    """Return the bytes of a statistic by its own formula."""
    (need,) = needs_of([find("cka")])
    return kind.cost(need.settings, study(network, pairs, "tokens")).bytes


def chosen(network: Network, shape: str) -> tuple[float, str]:
    """Return the bytes of the statistic that the plan takes, and its name."""
    (need,) = needs_of([find("cka")])
    kind, cost = need.chosen(study(network, "all", shape))
    return cost.bytes, kind.__name__


def products(network: Network, what: str) -> float:
    """Return the multiply-adds of a statistic's products."""
    layers, width, tokens = network.layers, network.width, SEQUENCES * LENGTH
    near = sum(len(right) * len(left) for left, right in study(network, "band:2", "tokens").pair_blocks)
    held = ROOM // (4 * SAMPLE**2)  # Gram matrices in float32, while those of the other model pass by
    grams = 2 * layers + layers + -(-layers // held) * layers  # for norms, those held, and those that pass by
    return {
        "sample": grams * SAMPLE**2 * width + layers**2 * SAMPLE**2,
        "band": tokens * width**2 * (near + 2 * layers),
        "all": tokens * width**2 * (layers**2 + 2 * layers),
        "mean": 2 * layers * SEQUENCES**2 * width + layers**2 * SEQUENCES**2,
    }[what]


def table() -> str:
    """Return the projections as a table."""
    lines = [
        "| two networks of | " + " | ".join(f"{n.name} ({n.layers} × {n.width:,})" for n in NETWORKS) + " |",
        "|---" * (1 + len(NETWORKS)) + "|",
    ]

    def row(words: str, cells: list[str]) -> None:
        lines.append(f"| {words} | {' | '.join(cells)} |")

    def cell(size: float, network: Network, what: str) -> str:
        return f"{format_bytes(int(size))}; {products(network, what) / network.forward:.2%}"

    row("`tokens`, a sample of 4,096, all pairs", [cell(memory(n, TokenRows), n, "sample") for n in NETWORKS])
    row("`mean` or `last`, all pairs", [cell(chosen(n, "mean")[0], n, "mean") for n in NETWORKS])
    row("`tokens`, moments, `band:2`", [cell(memory(n, LayerMoments, "band:2"), n, "band") for n in NETWORKS])
    row("`tokens`, moments, all pairs", [cell(memory(n, LayerMoments), n, "all") for n in NETWORKS])
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
