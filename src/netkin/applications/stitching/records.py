"""Records: what a stitch is worth at a step of its training, on a sample that stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netkin.applications.stitching.ends import rows
from netkin.applications.stitching.fitting import fitting_mask
from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.losses import Loss, counted
from netkin.applications.stitching.portions import Portion, picked, portion
from netkin.arrays import summing_dtype
from netkin.errors import NoValue, ShapeError
from netkin.measures import cca_mean, cka, svcca
from netkin.representations import batches_of
from netkin.representations.feeding import batch_length
from netkin.representations.nesting import mapped
from netkin.representations.recording import main_tensor
from netkin.statistics import LayerMoments, Moments

Record = dict[str, Any]


class Sampling:
    """Picks at most `limit` examples, spread evenly over batches whose number nobody knows beforehand.

    Every `stride`-th example is picked; when they become too many every other one is let go.
    """

    def __init__(self, limit: int):
        self.limit, self.stride, self._seen = limit, 1, 0
        self._pieces: list[tuple[int, int, Portion]] = []  # place of the first, number, and the examples

    def offer(self, network: Stitched, batch: Any) -> None:
        """Pick from a batch, and run both models on what was picked."""
        length, first = batch_length(batch), -self._seen % self.stride
        if first < length:
            few = picked(batch, length, slice(first, None, self.stride))
            count = len(range(first, length, self.stride))
            self._pieces.append((self._seen + first, count, portion(network, few)))
        self._seen += length
        while self.count > self.limit:
            self._thin()

    @property
    def count(self) -> int:
        """How many examples are picked now."""
        return sum(count for _, count, _ in self._pieces)

    @property
    def portions(self) -> list[Portion]:
        """The examples picked."""
        return [piece for _, _, piece in self._pieces]

    def _thin(self) -> None:
        pieces, stride = [], self.stride
        self.stride *= 2
        for place, count, piece in self._pieces:
            first = 0 if place % self.stride == 0 else 1
            left = len(range(first, count, 2))
            if left:
                thinner = picked(piece, count, slice(first, None, 2))
                pieces.append((place + first * stride, left, _own_memory(thinner)))
        self._pieces = pieces


@dataclass(frozen=True)
class Sample:
    """The examples on which a stitch is judged while it is trained."""

    portions: list[Portion]

    @classmethod
    def of(cls, network: Stitched, data: Any, limit: int) -> Sample:
        """Return a sample of data that are not trained on."""
        sampling = Sampling(limit)
        for batch in batches_of(data):
            sampling.offer(network, batch)
        return cls(sampling.portions)

    @torch.no_grad()
    def record(self, network: Stitched, loss: Loss) -> Record:
        """Return loss, accuracy, agreement with the second model, and the likeness of the activations at the joint.

        `r2` is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative. None stands where the sample
        has no labels, the answers are no scores, or the activations do not vary.
        """
        tally = _Tally()
        for one in self.portions:
            transformed = network.transformation(one.head)
            answers = main_tensor(network.finish(transformed.clone(), one.batch), "")
            tally.update(transformed, answers, one, loss)
        return tally.record()


class _Tally:
    def __init__(self) -> None:
        self._moments = LayerMoments([(["stitched"], ["b"])])
        self._loss, self._distance, self._examples = 0.0, 0.0, 0
        self._right, self._same = _Share(), _Share()

    def update(self, transformed: Tensor, answers: Tensor, one: Portion, loss: Loss) -> None:
        assert one.own is not None
        mask = fitting_mask(one.mask, one.own)
        ours, theirs = rows(transformed, mask), rows(one.own, mask)
        self._distance += float((ours - theirs).to(summing_dtype(ours.device)).square().sum())
        self._moments.update({"stitched": ours, "b": theirs})
        answers, own, labels = counted(answers, one.answers, one.labels, one.mask)
        self._loss += float(_single(loss(answers, own, labels))) * len(answers)
        self._examples += len(answers)
        if answers.ndim in (2, 3) and answers.shape[-1] > 1:
            self._same.add(answers.argmax(-1), own.argmax(-1))
            self._right.add(answers.argmax(-1), labels)

    def record(self) -> Record:
        pair = self._moments["stitched", "b"]
        return {
            "loss": self._loss / self._examples,
            "accuracy": self._right.value,
            "agreement": self._same.value,
            "cka": _if_any(cka, pair),
            "r2": _if_any(lambda pair: 1 - self._distance / (float(pair.y.trace) / pair.y.scale**2), pair),
            "cca": _if_any(cca_mean, pair),
            "svcca": _if_any(svcca, pair),
        }


class _Share:
    """The share of answers that are as they should be; None once they can't be compared."""

    def __init__(self) -> None:
        self._right, self._all, self._known = 0, 0, True

    def add(self, said: Tensor, wanted: Any) -> None:
        if not isinstance(wanted, Tensor) or wanted.numel() != said.numel() or wanted.is_floating_point():
            self._known = False
        else:
            self._right += int((said.flatten() == wanted.flatten()).sum())
            self._all += said.numel()

    @property
    def value(self) -> float | None:
        return self._right / self._all if self._known and self._all else None


def _single(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(f"the loss given as `labels` must return one number as a tensor; got {got}.")
    return value


def _own_memory(piece: Portion) -> Portion:
    """Return a portion whose tensors are no views that hold on to what was let go."""
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, piece)


def _if_any(measure: Callable[[Moments], Any], pair: Moments) -> float | None:
    """Return a value, or None where a layer does not vary and there is none."""
    try:
        return float(measure(pair))
    except NoValue:
        return None
