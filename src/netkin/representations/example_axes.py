"""Axes: which axis of a layer's output counts the examples of a batch.

Mostly it is the first. But recurrent nets and transformers may give time × examples × features, and a table of
positions has no examples at all, whatever its length. So the model is run on another number of examples beside the
batch (2; 3 where the batch has 2), and the axis that has the one length there and the other here counts the examples.

This extra pass is spared where it could teach nothing: the batch's length occurs in no other axis of the inputs and in
no weight or buffer, the model looks nothing up in an `nn.Embedding`, and every output has that length as its first axis
alone, or not at all. Where it fails, as with exported programs of fixed size, the first axis counts the examples if it
alone has their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from netkin.representations.nesting import leaves


class UnclearAxis(BaseException):
    """Stops a forward whose outputs need the extra pass first; not an `Exception`, so that no model catches it."""


def is_plain(model: nn.Module, batch: Any, length: int) -> bool:
    """Tell whether an output whose first axis alone has the batch's `length` must hold the examples there."""
    if length < 3 or any(isinstance(module, nn.Embedding) for module in model.modules()):
        return False
    sizes = [leaf.shape[1:] for _, leaf in leaves(batch) if isinstance(leaf, (Tensor, np.ndarray))]
    held = [tensor.shape for tensor in (*model.parameters(), *model.buffers())]
    return not any(length in shape for shape in (*sizes, *held))


def axes_of_length(output: Tensor, length: int) -> list[int]:
    """Return the axes of `output` that have this length."""
    return [axis for axis, size in enumerate(output.shape) if size == length]


def example_axis(here: list[int], there: list[int] | None) -> int | None:
    """Return the axis that counts the examples, or None.

    `here` are the axes with as many entries as the batch has examples, `there` those with as many as the extra pass
    had; None if there was no such pass.
    """
    if there is None:
        return 0 if here == [0] else None
    both = [axis for axis in here if axis in there]
    return both[0] if len(both) == 1 or 0 in both else None


def without_examples(output: Tensor, length: int, learnt: bool) -> str:
    """Return the words for an output in which the examples were not found; `learnt` tells of the extra pass."""
    fact = f"gives an output of shape {tuple(output.shape)} for a batch of {length} examples"
    if learnt or not axes_of_length(output, length):
        return f"{fact}, and none of its axes counts them"
    return f"{fact}, and which of its axes counts them is unclear, as the model runs on batches of this size only"
