"""Patching: the outputs of one model put into the other, block by block, and what is left of the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.predictions import Predictions, logits_of
from netkin.representations.cutting import replacing
from netkin.representations.hooks import recording


def blocks_among(called: Iterable[str]) -> list[str]:
    """Return the blocks of a model: the modules that a list holds, of the longest list that lies in no other.

    Example:
        >>> blocks_among(["", "embed", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "norm"])
        ['layers.0', 'layers.1']
    """
    lists: dict[str, list[str]] = {}
    for name in called:
        if found := re.fullmatch(r"((?:.*\.)?[^.\d][^.]*)\.\d+", name):
            lists.setdefault(found[1], []).append(name)
    outer = {name: own for name, own in lists.items() if not re.search(r"\.\d+(\.|$)", name)}
    return max(outer.values(), key=len, default=[])


def patched(
    a: nn.Module,
    b: nn.Module,
    blocks: Mapping[str, str],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
) -> dict[str, float]:
    """Return the KL of the predictions that is left where a's output takes the place of b's after each block.

    `blocks` are those of a, with their counterparts. What is left after a block comes from what follows it.
    """
    with recording(a, list(blocks)) as outputs:
        first = logits_of(run(a, batch))
        kept = {name: output.to("cpu") for name, output in outputs.items()}
    left: dict[str, float] = {}
    for name, theirs in blocks.items():
        if first is None or name not in kept:
            continue

        def put(output: Tensor, name: str = name) -> Tensor:
            return kept[name].to(output.device, output.dtype)

        with replacing(b, theirs, put):
            second = logits_of(run(b, batch))
        predictions = Predictions()
        if second is not None and torch.isfinite(second).all():
            predictions.update(a, batch, first, second)
            left[name] = predictions.divergence / max(predictions.count, 1)
    return left
