"""Caching: what training reads again in every epoch, kept in memory where it fits.

The first model's activations are computed once and kept if all of them fit the limit; then neither the data nor the
first model is needed again. Otherwise the data are read anew in every epoch, in their own order, and only the second
model's answers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.portions import Portion, joined, picked, portion
from netkin.applications.stitching.stitch_records import Sampling
from netkin.applications.stitching.task_loss import TaskLoss
from netkin.errors import MemoryLimit
from netkin.identity import settings_digest
from netkin.memory import size_in_words
from netkin.progress import reported
from netkin.representations.inputs import batch_length, inputs_of

Read = Callable[[], Iterable[Any]]  # gives the batches, the same each time


@dataclass(frozen=True)
class InMemory:
    """All that training needs, in memory: batches as they came, or, dealt out anew, `batch` examples each."""

    portions: tuple[Portion, ...]
    seed: int
    batch: int | None
    examples: int
    words: str

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        if self.batch is None:
            return len(self.portions)
        head = self.portions[0].head
        assert head is not None
        return -(-len(head) // self.batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[Portion]:
        """Yield the portions of an epoch in its own random order, from step `start` on."""
        generator = torch.Generator().manual_seed(_mixed(self.seed, number))
        if self.batch is None:
            places = torch.randperm(len(self.portions), generator=generator)[start:]
            yield from (self.portions[place] for place in places.tolist())
            return
        (whole,) = self.portions
        assert whole.head is not None
        order = torch.randperm(len(whole.head), generator=generator).to(whole.head.device)
        for index in order.split(self.batch)[start:]:
            yield picked(whole, len(order), index)


@dataclass(frozen=True)
class Reread:
    """Data that are read in every epoch; `answers` are the second model's to each batch, with the batch's digest."""

    network: Stitched
    read: Read
    settings: TaskLoss
    answers: tuple[tuple[str, Tensor | None], ...]
    examples: int
    words: str

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return len(self.answers)

    def epoch(self, number: int, start: int = 0) -> Iterator[Portion]:
        """Yield the portions of an epoch in the data's own order, from step `start` on."""
        numbered = enumerate(self.read())
        for place, batch in islice(numbered, start, len(self.answers)):
            digest, answers = self.answers[place]
            known = answers is not None and digest == settings_digest(inputs_of(batch), strict=False)
            asked = self.settings.looks_at_own and not known
            one = portion(self.network, batch, answers=asked, own=bool(self.settings.cka_penalty))
            yield replace(one, answers=answers) if known else one


def gathered(
    network: Stitched, batches: Iterable[Any], read: Read, settings: TaskLoss, sampling: Sampling | None
) -> InMemory | Reread:
    """Return what training reads in every epoch, from a first pass over the `batches`; `read` gives them again.

    `sampling`, where there is one, picks its examples on the way, out of what is computed anyhow if that is enough.
    """
    kept: list[Portion] = []
    answers: list[tuple[str, Tensor | None]] = []
    size, seen, penalised = 0, 0, bool(settings.cka_penalty)
    for batch in reported(batches, "gathering", "batches"):
        fits = size <= settings.memory
        own = fits and (penalised or (sampling is not None and settings.looks_at_own))
        one = portion(network, batch, head=fits, answers=settings.looks_at_own, own=own)
        if sampling is not None:
            sampling.offer(network, batch, one if one.is_whole else None)
        one = one if penalised else replace(one, own=None)
        size, seen = size + one.bytes, seen + batch_length(batch)
        answers.append((settings_digest(inputs_of(batch), strict=False), one.answers))
        kept.append(one)
        if size > settings.memory:
            kept.clear()
    return _in_memory(kept, size, seen, settings) if kept else _reread(network, read, settings, tuple(answers), seen)


def _in_memory(portions: list[Portion], size: int, examples: int, settings: TaskLoss) -> InMemory:
    dealt = portions if settings.batch is None else [joined(portions)]
    words = (
        f"activations of the first model on {examples:,} examples kept in memory ({size_in_words(size)} of at most "
        f"{size_in_words(settings.memory)}): after one pass it is needed no more, nor are the data"
    )
    return InMemory(tuple(dealt), settings.seed, settings.batch, examples, words)


def _reread(
    network: Stitched, read: Read, settings: TaskLoss, answers: tuple[tuple[str, Tensor | None], ...], examples: int
) -> Reread:
    if settings.batch is not None:
        raise MemoryLimit(
            f"`batch={settings.batch}` deals the examples out anew, for which the first model's activations must be in "
            f"memory, and they need more than `memory={settings.memory}` bytes; leave `batch` out, or allow more."
        )
    words = (
        f"activations of the first model not kept, as they need more than {size_in_words(settings.memory)}: the data "
        "are read and the first model runs in every epoch, in the data's own order"
    )
    return Reread(network, read, settings, answers, examples, words)


def _mixed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
