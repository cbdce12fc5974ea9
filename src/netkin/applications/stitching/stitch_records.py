"""Records: what a stitch is worth at a step of its training, on a sample that stays the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from netkin.applications.stitching.ends import End
from netkin.applications.stitching.evaluating import Likeness
from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.losses import Loss, cka_rows, counted
from netkin.applications.stitching.portions import Portion, picked, portion
from netkin.errors import NoValue, ShapeError
from netkin.measures import cka
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import batch_length
from netkin.representations.nesting import mapped
from netkin.statistics import Moments

Record = dict[str, Any]


class Sampling:
    """Picks at most `limit` examples, spread evenly over batches whose number is not known beforehand.

    Every `stride`-th example is picked; when they become too many every other one is let go.
    """

    def __init__(self, limit: int):
        self.limit, self.stride, self._seen = limit, 1, 0
        self._pieces: list[tuple[int, int, Portion]] = []  # place of the first, number, and the examples

    def offer(self, network: Stitched, batch: Any, whole: Portion | None = None) -> None:
        """Pick from a batch, or from the `whole` of what both models make of it; else they run on what was picked."""
        length, first = batch_length(batch), -self._seen % self.stride
        if first < length:
            index = slice(first, None, self.stride)
            few = portion(network, picked(batch, length, index)) if whole is None else None
            few = few or _own_memory(picked(whole, length, index))
            self._pieces.append((self._seen + first, len(range(first, length, self.stride)), few))
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
    def of(cls, network: Stitched, batches: Iterable[Any], limit: int) -> Sample:
        """Return a sample of batches that are not trained on."""
        sampling = Sampling(limit)
        for batch in batches:
            sampling.offer(network, batch)
        return cls(sampling.portions)

    @torch.no_grad()
    def record(self, network: Stitched, loss: Loss, cka_of: str = "places") -> Record:
        """Return loss, accuracy, agreement with the second model, and the likeness of the activations at the joint.

        `r2` is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative. None stands where the sample
        has no labels, the answers are no scores, or the activations do not vary. All likeness is place by place; with
        ``cka_of="examples"`` there is `cka_of_examples` too.
        """
        tally = _Tally(network.transformation.meeting.b, loss, cka_of)
        for one in self.portions:
            transformed = network.transformation(one.head)
            tally.update(transformed, main_tensor(network.finish(transformed.clone(), one.batch), ""), one)
        return tally.record()


class _Tally:
    def __init__(self, end: End, loss: Loss, cka_of: str) -> None:
        self._end, self._criterion, self._cka_of = end, loss, cka_of
        self._likeness = Likeness(end)
        self._whole: tuple[list[Tensor], list[Tensor]] = ([], [])  # activations of both sides, a row an example
        self._loss, self._examples = 0.0, 0
        self._right, self._same = _Share(), _Share()

    def update(self, transformed: Tensor, answers: Tensor, one: Portion) -> None:
        assert one.own is not None
        self._likeness.update(transformed, one.own, one.mask)
        if self._cka_of == "examples":
            for side, output in zip(self._whole, (transformed, one.own), strict=True):
                side.append(cka_rows(output, one.mask, self._end, self._cka_of))
        answers, own, labels = counted(answers, one.answers, one.labels, one.mask)
        self._loss += float(_single(self._criterion(answers, own, labels))) * len(answers)
        self._examples += len(answers)
        if answers.ndim in (2, 3) and answers.shape[-1] > 1:
            self._same.add(answers.argmax(-1), own.argmax(-1))
            self._right.add(answers.argmax(-1), labels)

    def record(self) -> Record:
        said = {"loss": self._loss / self._examples, "accuracy": self._right.value, "agreement": self._same.value}
        if self._cka_of == "places":
            return said | self._likeness.values()
        X, Y = (_together(side, self._end) for side in self._whole)
        return said | self._likeness.values() | {"cka_of_examples": _cka_if_any(X, Y)}


def _cka_if_any(X: Tensor, Y: Tensor) -> float | None:
    try:
        return float(cka(Moments.of(X, Y, None)))
    except NoValue:  # activations that do not vary
        return None


def _together(parts: list[Tensor], end: End) -> Tensor:
    """Return rows of several portions as one matrix; shorter sequences end in zeros, as padding does."""
    least, most = (chosen(part.shape[1] for part in parts) for chosen in (min, max))
    if least != most and end.kind == "maps":
        raise ShapeError(
            f"cka_of='examples' compares whole maps, which must have one size; got {least:,} and {most:,} values an "
            "example. Give inputs of one size, or take cka_of='places'."
        )
    return torch.cat([functional.pad(part, (0, most - part.shape[1])) for part in parts])


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
