"""`Outputs`: the answers of two classifiers to the same examples, counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from netkin.arrays import as_tensor, label_tensor, require_finite, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError


class Outputs:
    """Accuracies and agreement of two classifiers as counts, and summed cross-entropies.

    `joint[i, j]` counts the examples that the first calls i and the second j.

    Example:
        >>> outputs = Outputs(classes=2)
        >>> outputs.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]]), [0, 1])
        >>> outputs.accuracy_a, outputs.accuracy_b, outputs.agreement
        (1.0, 0.5, 0.5)
    """

    def __init__(self, classes: int):
        if classes < 2:
            raise InvalidValue(f"a classifier has at least 2 classes; got {classes}.", argument="classes")
        self.classes, self.n, self.labelled = classes, 0, 0
        self.joint = torch.zeros(classes, classes, dtype=torch.int64)
        self.right_a, self.right_b, self.entropy = 0, 0, 0.0  # of the first to the second's answers

    def update(self, a: Any, b: Any, labels: Any = None) -> None:
        """Add one batch of logits, n × classes each, with the true labels if known."""
        a, b = self._logits(a, "a"), self._logits(b, "b")
        if len(a) != len(b):
            raise ShapeError(f"`a` and `b` must answer for the same examples; got {len(a)} and {len(b)}.", argument="a")
        labels = None if labels is None else self._labels(labels, a)
        answers_a, answers_b = a.argmax(1), b.argmax(1)
        self.n += len(a)
        counts = torch.bincount(answers_a * self.classes + answers_b, minlength=self.classes**2)
        self.joint += counts.reshape_as(self.joint).cpu()
        self.entropy += float(F.cross_entropy(a, b.softmax(1), reduction="sum"))
        if labels is not None:
            self.labelled += len(labels)
            self.right_a += int((answers_a == labels).sum())
            self.right_b += int((answers_b == labels).sum())

    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        labels = label_tensor(labels, logits.device)
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            raise ShapeError(
                f"labels must be a list of class numbers; got shape {tuple(labels.shape)} of {labels.dtype}.",
                argument="labels",
            )
        if len(labels) != len(logits):
            raise ShapeError(f"there are {len(labels)} labels for {len(logits)} examples.", argument="labels")
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if len(outside):
            raise InvalidValue(
                f"labels must lie between 0 and {self.classes - 1}; got {int(outside[0])}.", argument="labels"
            )
        return labels.long()

    def _logits(self, logits: Any, name: str) -> Tensor:
        logits = as_tensor(logits, name).detach()
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise ShapeError(
                f"`{name}` must be logits of shape (n, {self.classes}); got {tuple(logits.shape)}.", argument=name
            )
        require_finite(logits, f"`{name}`")
        return logits.to(summing_dtype(logits.device))

    @property
    def agreement(self) -> float:
        """The share of examples on which both give the same answer."""
        return self._share(float(self.joint.trace()), self.n)

    @property
    def accuracy_a(self) -> float:
        """The share of labelled examples that the first gets right."""
        return self._share(self.right_a, self.labelled)

    @property
    def accuracy_b(self) -> float:
        """The share of labelled examples that the second gets right."""
        return self._share(self.right_b, self.labelled)

    @property
    def cross_entropy_ab(self) -> float:
        """The mean cross-entropy of the first to the second's answers, in nats."""
        return self._share(self.entropy, self.n)

    def _share(self, part: float, whole: float) -> float:
        if not whole:
            raise NoValue(
                "no labelled examples were folded in; pass `labels` to `update`." if self.n else "no batch yet."
            )
        return part / whole
