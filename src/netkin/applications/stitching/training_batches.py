"""Batches as the training of a stitch reads them in every epoch, kept in memory where they fit, and its sample.

The first model's activations are computed once and kept if all of them fit the limit; then neither the data nor the
first model is needed again. Otherwise the data are read again in every epoch, in their own order, and only the second
model's outputs are kept. A `Portion` holds the tensors of some examples. A fixed sample of them is what a stitch is
evaluated on while it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from netkin.applications.stitching.joining import End
from netkin.applications.stitching.evaluating import ActivationSimilarity, value_if_any
from netkin.applications.stitching.training import (
    TaskLoss,
    TaskLossFunction,
    cka_rows,
    drop_padding,
    refuse_unfit_labels,
)
from netkin.arrays import label_tensor
from netkin.errors import InvalidValue, MemoryLimit, ShapeError
from netkin.identity import DataDigest, UnorderedDigest, settings_digest
from netkin.measures import cka
from netkin.memory import format_bytes
from netkin.progress import reported
from netkin.representations import recording
from netkin.representations.hooks import leaves, main_tensor, mapped, parts, rebuilt
from netkin.representations.inputs import (
    attention_mask,
    batch_length,
    feed,
    inputs_of,
    labels_of,
    loader_of,
    prepared,
    take,
)
from netkin.sources.batches import Batches
from netkin.statistics import Moments

if TYPE_CHECKING:
    from netkin.applications.stitching.network import Stitched

ScoreRecord = dict[str, Any]
Read = Callable[[], Iterable[Any]]  # gives the batches, the same each time


@dataclass(frozen=True)
class Portion:
    """Some examples: what the first model gives at its layer, and what the second gives by itself.

    None means not needed, or to be computed from the `batch` again.
    """

    head: Tensor | None = None
    answers: Tensor | None = None  # the second model's own
    own: Tensor | None = None  # the second model's own activations at its layer
    labels: Any = None
    mask: Tensor | None = None  # which tokens of sequences are no padding
    batch: Any = None  # kept only where the second model needs it: it runs whole where it can't be cut

    @property
    def bytes(self) -> int:
        """How much memory the portion takes."""
        tensors = [leaf for _, leaf in leaves(self) if isinstance(leaf, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def keeps_order(data: Any) -> bool:
    """Return whether data give the same batches in the same order each time, as far as one can see from outside."""
    loader = loader_of(data)
    if isinstance(loader, DataLoader):
        plain = type(loader.batch_sampler) is BatchSampler
        return plain and isinstance(loader.batch_sampler.sampler, SequentialSampler)  # type: ignore[union-attr]
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    return isinstance(data, (Tensor, np.ndarray, Mapping, list, tuple, Batches))


class BatchesDigest:
    """A digest of batches that pass: `examples` in any order, and `order` for data that give the same each time."""

    def __init__(self, data: Any):
        self.examples, self.sizes = UnorderedDigest(), list[int]()
        self._ordered = DataDigest(labels=True) if keeps_order(data) else None

    def update(self, batch: Any) -> None:
        """Add a batch."""
        start, length = self.examples.count, batch_length(batch)
        if self._ordered is not None:
            self._ordered.update(batch, range(start, start + length))
        self.examples.update(batch, length)
        self.sizes.append(length)

    @property
    def order(self) -> str:
        """A text that changes with the order and with the sizes of the batches, empty for data that may shuffle."""
        return "" if self._ordered is None else settings_digest([self._ordered.hex, self.sizes])


@torch.no_grad()
def portion(network: Stitched, batch: Any, *, head: bool = True, answers: bool = True, own: bool = True) -> Portion:
    """Return what is wanted of a batch; of the models no more runs than that needs, and nothing keeps a graph."""
    said, activations, mask = None, None, attention_mask(batch)
    if answers or own:
        network.cut()  # before hooks are in place
        with recording(network.b, [network.layer_b]) if own else nullcontext() as kept:
            said = main_tensor(feed(network.b, batch), "").clone()
        activations = None if kept is None else kept[network.layer_b]
    return Portion(
        head=network.begin(batch) if head else None,
        answers=said if answers else None,
        own=activations,
        labels=_labels(network, batch),
        mask=None if mask is None else prepared(network.b, torch.as_tensor(mask) != 0),
        batch=batch if network.tail.graph is None else None,
    )


def check_labels(network: Stitched, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; labels that are missing, or no classes of the second model, are refused."""
    few = None
    for batch in batches:
        few = portion(network, take(batch, 1), head=False, own=False).answers if few is None else few
        refuse_unfit_labels(_labels(network, batch), few)
        yield batch


def pick(structure: Any, length: int, index: Any) -> Any:
    """Return the examples at `index`, a slice or a tensor, of everything in a structure that has `length` of them."""
    if isinstance(structure, (Tensor, np.ndarray)):
        if not structure.ndim or len(structure) != length:
            return structure
        if isinstance(index, Tensor):  # brought to where the array is
            is_tensor = isinstance(structure, Tensor)
            index = index.to(structure.device, non_blocking=True) if is_tensor else index.cpu().numpy()
        return structure[index]
    if isinstance(structure, list) and len(structure) == length and not any(parts(one) for one in structure):
        if isinstance(structure[0], (Tensor, np.ndarray)):
            return [pick(one, length, index) for one in structure]
        return structure[index] if isinstance(index, slice) else [structure[i] for i in index.tolist()]
    inside = parts(structure)
    return rebuilt(structure, {key: pick(one, length, index) for key, one in inside.items()}) if inside else structure


def join(portions: Sequence[Any]) -> Any:
    """Return several portions, or anything alike in them, as one."""
    first = portions[0]
    if isinstance(first, (Tensor, np.ndarray)):
        shapes = [tuple(one.shape[1:]) for one in portions]
        if len(set(shapes)) > 1:
            raise ShapeError(
                f"batches of examples of different shapes, {shapes[0]} and "
                f"{next(shape for shape in shapes if shape != shapes[0])}, can't be put into other batches; leave "
                "`batch` out."
            )
        return torch.cat([torch.as_tensor(one) for one in portions])
    if isinstance(first, list) and not any(parts(one) or isinstance(one, (Tensor, np.ndarray)) for one in first):
        return [one for part in portions for one in part]
    inside = parts(first)
    return rebuilt(first, {key: join([parts(one)[key] for one in portions]) for key in inside}) if inside else first


def _labels(network: Stitched, batch: Any) -> Any:
    labels = labels_of(batch)
    plain = isinstance(labels, list) and not any(parts(one) or isinstance(one, Tensor) for one in labels)
    if plain or isinstance(labels, (Tensor, np.ndarray)):
        labels = label_tensor(labels)
    return prepared(network.b, labels)


class InMemory:
    """All that training needs, in memory: batches as they came, or regrouped, `batch` examples each."""

    def __init__(self, portions: Sequence[Portion], seed: int, batch: int | None, examples: int, words: str):
        self.portions, self.seed, self.batch, self.examples, self.words = portions, seed, batch, examples, words
        self.state = torch.zeros((), dtype=torch.int64)  # the number of the epoch, of which its order is a function

    def load(self, state: Tensor) -> None:
        """Let the next epoch be the one that began at `state`."""
        self.state = state.cpu()

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        if self.batch is None:
            return len(self.portions)
        head = self.portions[0].head
        assert head is not None
        return -(-len(head) // self.batch)

    def epoch(self, skip: int = 0) -> Iterator[Portion]:
        """Yield the portions of the next epoch in its own random order, after the first `skip`."""
        number, self.state = int(self.state), self.state + 1
        mixed = np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1)
        generator = torch.Generator().manual_seed(int(mixed))
        if self.batch is None:
            places = torch.randperm(len(self.portions), generator=generator)[skip:]
            yield from (self.portions[place] for place in places.tolist())
            return
        (whole,) = self.portions
        assert whole.head is not None
        order = torch.randperm(len(whole.head), generator=generator).to(whole.head.device)
        for index in order.split(self.batch)[skip:]:
            yield pick(whole, len(order), index)


@dataclass(frozen=True)
class Reread:
    """Data that are read in every epoch; `answers` are the second model's to each batch, with the batch's digest."""

    network: Stitched
    read: Read
    settings: TaskLoss
    answers: tuple[tuple[str, Tensor | None], ...]
    examples: int
    words: str

    state = torch.zeros(())  # the order is the data's own

    def load(self, state: Tensor) -> None:
        """Every epoch is alike."""

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return len(self.answers)

    def epoch(self, skip: int = 0) -> Iterator[Portion]:
        """Yield the portions of an epoch in the data's own order, after the first `skip`."""
        count = 0
        for count, batch in enumerate(islice(self.read(), self.per_epoch), 1):
            if count <= skip:
                continue
            digest, answers = self.answers[count - 1]
            known = answers is not None and digest == settings_digest(inputs_of(batch), strict=False)
            needs_answers = self.settings.looks_at_own and not known
            examples = portion(self.network, batch, answers=needs_answers, own=bool(self.settings.cka_penalty))
            yield replace(examples, answers=answers) if known else examples
        if count < self.per_epoch:
            raise InvalidValue(
                f"the data gave {self.per_epoch:,} batches at first and {count:,} when read again; pass data that give "
                "the same each time."
            )


def read_course(
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
            complete = not any(part is None for part in (one.head, one.answers, one.own))
            sampling.offer(network, batch, one if complete else None)
        one = one if penalised else replace(one, own=None)
        size, seen = size + one.bytes, seen + batch_length(batch)
        answers.append((settings_digest(inputs_of(batch), strict=False), one.answers))
        kept.append(one)
        if size > settings.memory:
            kept.clear()
    if kept:
        words = (
            f"activations of the first model on {seen:,} examples kept in memory ({format_bytes(size)} of at most "
            f"{format_bytes(settings.memory)}): after one pass it is needed no more, nor are the data"
        )
        dealt = tuple(kept) if settings.batch is None else (join(kept),)
        return InMemory(dealt, settings.seed, settings.batch, seen, words)
    if settings.batch is not None:
        raise MemoryLimit(
            f"`batch={settings.batch}` makes other batches of the examples, for which the first model's activations "
            f"must be in memory, and they need more than `memory={settings.memory}` bytes; leave `batch` out, or allow "
            "more."
        )
    words = (
        f"activations of the first model not kept, as they need more than {format_bytes(settings.memory)}: the data "
        "are read and the first model runs in every epoch, in the data's own order"
    )
    return Reread(network, read, settings, tuple(answers), seen, words)


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
            picked = pick(batch if whole is None else whole, length, index)
            few = portion(network, picked) if whole is None else _own_memory(picked)
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
                thinner = pick(piece, count, slice(first, None, 2))
                pieces.append((place + first * stride, left, _own_memory(thinner)))
        self._pieces = pieces


def _own_memory(piece: Portion) -> Portion:
    """Return a portion whose tensors are no views that hold on to what was let go."""
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, piece)


@torch.no_grad()
def sample_scores(
    network: Stitched, sample: Sequence[Portion], loss: TaskLossFunction, cka_of: str = "places"
) -> ScoreRecord:
    """Return loss, accuracy, agreement with the second model, and the similarity of the activations at the joint.

    `r2` is not refitted: ``1 - ‖AM + b - B‖² / ‖B - mean‖²``, which may be negative. None stands where the sample
    has no labels, the answers are no scores, or the activations do not vary. All similarities are place by
    place; with ``cka_of="examples"`` there is `cka_of_examples` too.
    """
    end, total, count = network.transformation.meeting.b, 0.0, 0
    similarity = ActivationSimilarity(end)
    whole = list[list[Tensor]]()  # activations of both sides, a row an example
    right, same = list[tuple[Tensor, Any]](), list[tuple[Tensor, Any]]()  # classes as answered and as wanted
    for one in sample:
        assert one.own is not None
        transformed = network.transformation(one.head)
        similarity.update(transformed, one.own, one.mask)
        if cka_of == "examples":
            whole.append([cka_rows(side, one.mask, end, cka_of) for side in (transformed, one.own)])
        answers = main_tensor(network.finish(transformed.clone(), one.batch), "")
        answers, own, labels = drop_padding(answers, one.answers, one.labels, one.mask)
        value = loss(answers, own, labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"the loss given as `labels` must return one number as a tensor; got {got}.")
        total, count = total + float(value) * len(answers), count + len(answers)
        if answers.ndim in (2, 3) and answers.shape[-1] > 1:
            same.append((answers.argmax(-1), own.argmax(-1)))
            right.append((answers.argmax(-1), labels))
    found = {"loss": total / count, "accuracy": _share(right), "agreement": _share(same), **similarity.values()}
    if cka_of == "examples":
        X, Y = (_together(side, end) for side in zip(*whole, strict=True))
        found["cka_of_examples"] = value_if_any(lambda: cka(Moments.of(X, Y, None)))
    return found


def _together(parts: Sequence[Tensor], end: End) -> Tensor:
    """Return rows of several portions as one matrix; shorter sequences end in zeros, as padding does."""
    least, most = (chosen(part.shape[1] for part in parts) for chosen in (min, max))
    if least != most and end.kind == "maps":
        raise ShapeError(
            f"cka_of='examples' compares whole maps, which must have one size; got {least:,} and {most:,} values an "
            "example. Give inputs of one size, or take cka_of='places'."
        )
    return torch.cat([functional.pad(part, (0, most - part.shape[1])) for part in parts])


def _share(pairs: Sequence[tuple[Tensor, Any]]) -> float | None:
    """Return the share of classes that are as wanted; None where some can't be compared."""
    for said, wanted in pairs:
        if not isinstance(wanted, Tensor) or wanted.numel() != said.numel() or wanted.is_floating_point():
            return None
    count = sum(said.numel() for said, _ in pairs)
    return sum(int((said.flatten() == wanted.flatten()).sum()) for said, wanted in pairs) / count if count else None
