"""Caching: what training reads again in every epoch, kept in memory where it fits.

The first model's activations are computed once and kept if all of them fit the limit; then neither the data nor the
first model is needed again. Otherwise the data are read anew in every epoch, in their own order, and only the second
model's answers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from netkin.applications.stitching.joining import Stitched
from netkin.applications.stitching.losses import refuse_unfit_labels
from netkin.applications.stitching.portions import Portion, joined, picked, portion
from netkin.applications.stitching.records import Sampling
from netkin.applications.stitching.task_loss import TaskLoss
from netkin.comparing.plan import size_of
from netkin.errors import MemoryLimit
from netkin.representations import batches_of
from netkin.representations.feeding import batch_length, inputs_of, take
from netkin.representations.nesting import leaves


@dataclass(frozen=True)
class Kept:
    """All that training needs, in memory: batches as they came, or, dealt out anew, `batch` examples each."""

    portions: tuple[Portion, ...]
    seed: int
    batch: int | None
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
    """Data that are read in every epoch; `answers` are the second model's to each batch, with the batch's mark."""

    network: Stitched
    data: Any
    examples: int | None
    settings: TaskLoss
    answers: tuple[tuple[str, Tensor | None], ...]
    words: str

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return len(self.answers)

    def epoch(self, number: int, start: int = 0) -> Iterator[Portion]:
        """Yield the portions of an epoch in the data's own order, from step `start` on."""
        numbered = enumerate(batches_of(self.data, self.examples))
        for place, batch in islice(numbered, start, len(self.answers)):
            mark, answers = self.answers[place]
            known = answers is not None and mark == marked(batch)
            asked = self.settings.looks_at_own and not known
            one = portion(self.network, batch, answers=asked, own=bool(self.settings.cka_penalty))
            yield replace(one, answers=answers) if known else one


def gathered(
    network: Stitched, data: Any, examples: int | None, settings: TaskLoss, sampling: Sampling | None
) -> Kept | Reread:
    """Return what training reads in every epoch; `sampling`, where there is one, picks its examples on the way."""
    kept: list[Portion] = []
    answers: list[tuple[str, Tensor | None]] = []
    size, seen, few = 0, 0, None
    for batch in tqdm(batches_of(data, examples), desc="gathering", unit=" batches", delay=2, leave=False):
        fits = size <= settings.memory
        one = portion(network, batch, head=fits, answers=settings.looks_at_own, own=fits and bool(settings.cka_penalty))
        if settings.labels == "true":
            few = portion(network, take(batch, 1), head=False, own=False) if few is None else few
            refuse_unfit_labels(one.labels, few.answers)
        if sampling is not None:
            sampling.offer(network, batch)
        size, seen = size + one.bytes, seen + batch_length(batch)
        answers.append((marked(batch), one.answers))
        kept.append(one)
        if size > settings.memory:
            kept.clear()
    if kept:
        return _kept(kept, size, seen, settings)
    return _reread(network, data, examples, settings, tuple(answers))


def marked(batch: Any) -> str:
    """Return what tells the inputs of one batch from those of another: a digest of all their bits."""
    digest = blake2b(digest_size=16)
    for _, leaf in leaves(inputs_of(batch)):
        if isinstance(leaf, (Tensor, np.ndarray)):
            bits = torch.as_tensor(leaf).detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(bits.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _kept(portions: list[Portion], size: int, examples: int, settings: TaskLoss) -> Kept:
    dealt = portions if settings.batch is None else [joined(portions)]
    words = (
        f"activations of the first model on {examples:,} examples kept in memory ({size_of(size)} of at most "
        f"{size_of(settings.memory)}): after one pass it is needed no more, nor are the data"
    )
    return Kept(tuple(dealt), settings.seed, settings.batch, words)


def _reread(
    network: Stitched,
    data: Any,
    examples: int | None,
    settings: TaskLoss,
    answers: tuple[tuple[str, Tensor | None], ...],
) -> Reread:
    if settings.batch is not None:
        raise MemoryLimit(
            f"`batch={settings.batch}` deals the examples out anew, for which the first model's activations must be in "
            f"memory, and they need more than `memory={settings.memory}` bytes; leave `batch` out, or allow more."
        )
    words = (
        f"activations of the first model not kept, as they need more than {size_of(settings.memory)}: the data are "
        "read and the first model runs in every epoch, in the data's own order"
    )
    return Reread(network, data, examples, settings, answers, words)


def _mixed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
