"""Right answers: the share of labelled examples that a classifier gets right, and the search that keeps to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.compression.layer_inputs import Feeding
from netkin.arrays import refuse_non_finite
from netkin.errors import ShapeError, ValueFault
from netkin.representations import batches_of, guest
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import labels_of


def has_labels(data: Any) -> bool:
    """Tell whether the first batch of the data has labels that are class numbers."""
    labels = labels_of(next(batches_of(data)))
    if labels is None or isinstance(labels, (str, bytes, Mapping)):
        return False
    try:
        return not torch.as_tensor(labels).is_floating_point()
    except (TypeError, ValueError):  # names, boxes of several sizes and whatever else may stand there
        return False


def accuracy(model: nn.Module, data: Any, feeding: Feeding) -> float:
    """Return the share of labelled examples, or tokens, whose largest logit is that of their label."""
    right = seen = 0
    with guest(model, exact=True):
        for number, batch in enumerate(feeding.batches(data, "counting right answers")):
            logits = main_tensor(feeding.output(model, batch), "")
            refuse_non_finite(logits, f"the model's output in batch {number}")
            labels = _labels(batch, logits, number)
            right += int((logits.argmax(-1) == labels)[labels >= 0].sum())  # -100 marks what does not count
            seen += int((labels >= 0).sum())
    if not seen:
        raise ValueFault("none of the labels is a class number of 0 or more; give labels that are.")
    return right / seen


def _labels(batch: Any, logits: Tensor, number: int) -> Tensor:
    found = labels_of(batch)
    if found is None:
        raise ValueFault(f"batch {number} has no labels to count right answers by; give batches `(inputs, labels)`.")
    labels = torch.as_tensor(found, device=logits.device)
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise ShapeError(
            f"labels must be class numbers of shape {tuple(logits.shape[:-1])}, one for each row of logits; got shape "
            f"{tuple(labels.shape)} of {str(labels.dtype).removeprefix('torch.')} in batch {number}."
        )
    return labels


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return a number from 1 to `most` that is enough while half a search below it found none; None if none is.

    The search halves its range each time, as if more were always better.

    Example:
        >>> fewest(lambda k: k >= 5, 100)
        5
    """
    if not enough(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
