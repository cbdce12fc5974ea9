"""Patching: the outputs of one model put into the other, block by block, and what is left of the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.diff.predictions import Predictions, logits_of
from netkin.representations.cutting import replacing
from netkin.representations.hooks import recording


def patched(
    a: nn.Module,
    b: nn.Module,
    blocks: Mapping[str, str],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
) -> tuple[float | None, dict[str, float]]:
    """Return the KL of the predictions for a batch, and what is left where a's output is put into b after each block.

    `blocks` are those of a, with their counterparts. What is left after a block comes from what follows it.
    """
    with recording(a, list(blocks)) as outputs:
        first = logits_of(run(a, batch))
        kept = {name: output.to("cpu") for name, output in outputs.items()}
    if first is None:
        return None, {}
    left: dict[str, float] = {}
    for name, theirs in blocks.items():
        if name not in kept:
            continue

        def put(output: Tensor, name: str = name) -> Tensor:
            return kept[name].to(output.device, output.dtype)

        with replacing(b, theirs, put):
            divergence = _divergence(a, batch, first, run(b, batch))
        if divergence is not None:
            left[name] = divergence
    return _divergence(a, batch, first, run(b, batch)), left


def _divergence(a: nn.Module, batch: Any, first: Tensor, output: Any) -> float | None:
    """Return the mean KL of an output's predictions from a's; None where there are none, or they are not finite."""
    second = logits_of(output)
    if second is None or not torch.isfinite(second).all():
        return None
    predictions = Predictions()
    predictions.update(a, batch, first, second)
    return max(predictions.divergence / max(predictions.count, 1), 0.0)
