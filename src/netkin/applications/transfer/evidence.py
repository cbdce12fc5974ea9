"""Evidence: what a pretrained model gives for labelled data, from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.arrays import as_matrix
from netkin.errors import ForwardError, NoValue, ShapeError, ValueFault
from netkin.progress import ProgressOption, reported
from netkin.representations import Reader, guest, layers
from netkin.representations.gradients import logits_of
from netkin.representations.inputs import Forward, Transform, batches_of, call, labels_of

Array = np.ndarray


@dataclass(frozen=True)
class Evidence:
    """What a model gives for labelled data: features and probabilities, a row for each example, and the labels."""

    features: Array
    labels: Array
    probabilities: Array | None = None

    @classmethod
    def of(cls, features: Any, labels: Any, probabilities: Any = None) -> Evidence:
        """Return checked evidence, in float64, with labels counted from 0 without gaps."""
        rows = as_matrix(features, "features").detach().cpu().double().numpy()
        given = np.asarray(labels)
        if given.shape != (len(rows),):
            raise ShapeError(
                f"there are {len(rows):,} rows of features and labels of shape {given.shape}; give one each."
            )
        if given.dtype.kind not in "iub":
            raise ValueFault(f"labels of classes are whole numbers; got {given.dtype}.")
        classes, compact = np.unique(given, return_inverse=True)
        if len(classes) < 2:
            raise ValueFault(
                f"all {len(rows):,} examples have the label {classes[0]}; a score needs two classes or more."
            )
        return cls(rows, compact, None if probabilities is None else _probabilities(probabilities, len(rows)))

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def one_hot(self) -> Array:
        return np.eye(self.classes)[self.labels]

    @property
    def source(self) -> Array:
        """The probabilities of the classes that the model knows."""
        if self.probabilities is None:
            raise NoValue(
                "this score reads the model's probabilities, and the model has no classes of its own; ask for scores "
                "that read features, such as 'logme'."
            )
        return self.probabilities

    def by_class(self) -> Iterator[Array]:
        """Yield the features of each class."""
        for one in range(self.classes):
            yield self.features[self.labels == one]


def evidence_of(
    model: nn.Module,
    data: Any,
    layer: str | None = None,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    progress: ProgressOption = None,
) -> Evidence:
    """Return what a model gives for labelled data.

    Args:
        model: the model, which is left as it was.
        data: a loader, or an iterable of batches of (inputs, labels).
        layer: the layer whose outputs are the features, by default the last one before the model's output.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    chosen, outputs = layer or _before_last(model), list[Any]()

    def noted(whole: nn.Module, batch: Any) -> Any:
        outputs.append(call(whole, batch, forward))
        return outputs[-1]

    read, rows, labels, logits = Reader(model, [chosen], forward=noted, transform=transform), [], [], []
    with guest(model):
        for batch in reported(batches_of(data, examples), "reading", "batches", progress):
            given = labels_of(batch)
            if given is None:
                raise ValueFault("a transfer score needs labels, and the batches hold none; give (inputs, labels).")
            rows.append(read(batch)[chosen].cpu())
            labels.append(torch.as_tensor(given).cpu())
            logits.append(_class_logits(outputs[-1]))
            outputs.clear()
    known = [one for one in logits if one is not None]
    probabilities = torch.cat(known).softmax(1) if len(known) == len(rows) else None
    return Evidence.of(torch.cat(rows), torch.cat(labels).numpy(), probabilities)


def _before_last(model: nn.Module) -> str:
    names = layers(model)
    if len(names) < 2:
        raise ValueFault(f"the model has {len(names)} layer to choose from; name the one whose outputs are features.")
    return names[-2]


def _class_logits(output: Any) -> Tensor | None:
    """Return the logits of the model's own classes; None where it has none, such as a model without a head."""
    try:
        found = logits_of(output)
    except ForwardError:
        return None
    return found.float().cpu() if found.ndim == 2 and found.shape[1] > 1 else None


def _probabilities(given: Any, count: int) -> Array:
    found = as_matrix(given, "probabilities").detach().cpu().double().numpy()
    if len(found) != count or (found < 0).any() or not np.allclose(found.sum(1), 1, atol=1e-3):
        raise ShapeError(
            f"`probabilities` must hold for each of {count:,} examples numbers of 0 or more that sum to 1; got shape "
            f"{found.shape}."
        )
    return found / found.sum(1, keepdims=True)
