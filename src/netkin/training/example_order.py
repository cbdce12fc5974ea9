"""Batch orders: the order of the examples, and the augmentation of images by shifts and flips.

All of it follows from a seed. Data are one of these: arrays with a row for each example, as a tuple ``(inputs,
labels)``, a mapping or the inputs alone; a data set; or a loader or list of batches, which gives its own order.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, IterableDataset

from netkin.arrays import label_tensor, plain_array, require_finite
from netkin.errors import InvalidValue, ShapeError, outside
from netkin.identity import DataDigest, settings_digest
from netkin.representations.hooks import leaves, mapped, rebuilt
from netkin.representations.inputs import batch_length, batches_of, inputs_of, labels_of
from netkin.settings import generator_states, load_generator_states, loaders_kept, random_states_kept
from netkin.sources.datasets import load_data
from netkin.training.recipe import Recipe

TEST_BATCH = 1000  # examples
LOADED_AT_ONCE = 10_000  # examples in a batch of data that are loaded whole
_WARNED: ContextVar[set[str] | None] = ContextVar("warned", default=None)  # sentences that need not be repeated


@dataclass(frozen=True)
class BatchIndices:
    """The examples of one batch by their rows, and for each how far it is moved and whether it is mirrored."""

    rows: Tensor
    moves: Tensor | None = None  # down and across
    flips: Tensor | None = None

    def part(self, start: int, size: int) -> BatchIndices:
        """Return the pick of some of its examples."""
        moves, flips = (one if one is None else one[..., start : start + size] for one in (self.moves, self.flips))
        return BatchIndices(self.rows[start : start + size], moves, flips)


def arrays_in(data: Any) -> Any:
    """Return data that are arrays with a row for each example, or the name of such, as tensors; None for all others."""
    if isinstance(data, str):
        return labelled_arrays(data, "`data`")
    if isinstance(data, (Tensor, np.ndarray)):
        return torch.as_tensor(plain_array(data))
    if not isinstance(data, (tuple, Mapping)) or not data:
        return None
    found = [leaf for _, leaf in leaves(data)]
    if not all(isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim for leaf in found):
        return None
    lengths = {len(leaf) for leaf in found}
    if len(lengths) > 1:
        raise ShapeError(
            f"the arrays of `data` must have a row for each example; got {' and '.join(map(str, sorted(lengths)))} "
            "rows. Batches are given as a list.",
            argument="data",
        )
    return mapped(lambda leaf: torch.as_tensor(plain_array(leaf)), data)


def labelled_arrays(data: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return inputs and class numbers as tensors, of a name as for `nk.load_data`, of batches or of arrays.

    `what` names the data in a refusal.
    """
    given = load_data(data, LOADED_AT_ONCE) if isinstance(data, str) else data
    arrays = arrays_in(given)
    with loaders_kept(given):
        parts = [_inputs_and_labels(batch, what) for batch in ([arrays] if arrays is not None else batches_of(given))]
    for inputs, _ in parts:
        if inputs.shape[1:] != parts[0][0].shape[1:]:
            raise ShapeError(
                f"the examples of {what} must have one shape to be trained on; got some of shape "
                f"{tuple(parts[0][0].shape[1:])} and others of {tuple(inputs.shape[1:])}. Resize them first."
            )
    inputs, labels = map(torch.cat, zip(*parts, strict=True))
    return inputs, labels


def _inputs_and_labels(batch: Any, what: str) -> tuple[Tensor, Tensor]:
    """Return the inputs of a batch and its class numbers, as many of both, or refuse it."""
    inputs, labels = inputs_of(batch), labels_of(batch)
    if labels is None or not isinstance(inputs, (Tensor, np.ndarray)):
        fact = "there are no labels here" if labels is None else f"the inputs here are a {type(inputs).__name__}"
        raise InvalidValue(f"{what} must be arrays `(inputs, labels)`, or batches of both; {fact}.")
    inputs, labels = torch.as_tensor(plain_array(inputs)), label_tensor(labels)
    if inputs.layout != torch.strided:
        raise InvalidValue(f"the inputs of {what} are sparse; make them dense with `to_dense()`.")
    require_finite(inputs, f"a batch of {what}")
    unfit = (labels < 0) | (labels != labels.long())
    if labels.ndim != 1 or len(labels) != len(inputs) or bool(unfit.any()):
        raise ShapeError(
            f"{what} must have a class number of 0 or more for each of the {len(inputs):,} examples of a batch; got "
            f"labels of shape {tuple(labels.shape)} and {str(labels.dtype).removeprefix('torch.')}"
            f"{f', down to {labels.min()}' if bool((labels < 0).any()) else ''}."
        )
    return inputs, labels.long()


class Arrays:
    """The order of batches of arrays, whose orders come from a generator of its own, begun at the seed."""

    def __init__(self, arrays: Any, recipe: Recipe, seed: int):
        self.arrays, self.recipe = arrays, recipe
        self.count = batch_length(arrays)
        self.place = next(leaf for _, leaf in leaves(arrays)).device  # where picks are handed out
        self.generator = torch.Generator().manual_seed(seed)
        if recipe.drop_last and self.count < recipe.batch:
            raise InvalidValue(
                f"{self.count:,} examples fill no batch of {recipe.batch:,}; take a smaller `batch` or "
                "drop_last=False.",
                argument="batch",
            )
        self._augmented = bool(recipe.shift or recipe.flip)
        if self._augmented:
            _require_images(arrays)

    @cached_property
    def _padded(self) -> Tensor:
        images = self.arrays if isinstance(self.arrays, Tensor) else self.arrays[0]
        return with_margin(images, self.recipe.shift)

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has."""
        whole, rest = divmod(self.count, self.recipe.batch)
        return whole + bool(rest and not self.recipe.drop_last)

    @property
    def state(self) -> Tensor:
        """The state of the generator before an epoch is drawn."""
        return self.generator.get_state()

    def load(self, state: Tensor) -> None:
        """Let the next epoch be the one that began at `state`."""
        self.generator.set_state(state)

    def epoch(self, skip: int = 0) -> Iterator[Any]:
        """Yield the batches of the next epoch after the first `skip`."""
        return map(self.batch, islice(self.batches(), skip, None))

    def batches(self) -> Iterator[BatchIndices]:
        """Yield what each batch of the next epoch is made of."""
        size = self.recipe.batch
        if self.recipe.order == "drawn":
            for _ in range(self.per_epoch):
                yield self._drawn(torch.randint(self.count, (size,), generator=self.generator))
            return
        shuffled = self.recipe.order == "shuffled"
        order = torch.randperm(self.count, generator=self.generator) if shuffled else torch.arange(self.count)
        every = self._drawn(order)
        for start in range(0, self.per_epoch * size, size):
            yield every.part(start, size)

    def batch(self, indices: BatchIndices) -> Any:
        """Return a batch: its rows of all arrays, the images among them moved and mirrored."""
        if not self._augmented:
            return mapped(lambda array: array[indices.rows], self.arrays)
        chosen = augmented(self._padded, indices, self.recipe)
        if isinstance(self.arrays, Tensor):
            return chosen
        return rebuilt(self.arrays, {0: chosen, **{i: one[indices.rows] for i, one in enumerate(self.arrays) if i}})

    def digest(self) -> str:
        """Return a digest of the examples."""
        found = DataDigest(labels=True)
        found.update(self.arrays, range(self.count))
        return f"{found.count:,} examples, digest {found.hex}"

    def _drawn(self, rows: Tensor) -> BatchIndices:
        shift, moves, flips = self.recipe.shift, None, None
        if shift:
            moves = torch.randint(0, 2 * shift + 1, (2, len(rows)), generator=self.generator).to(self.place)
        if self.recipe.flip:
            flips = (torch.rand(len(rows), generator=self.generator) < 0.5).to(self.place)
        return BatchIndices(rows.to(self.place), moves, flips)


class Loaded:
    """The order of batches that a loader, a list or a data set gives."""

    def __init__(self, data: Any, recipe: Recipe, seed: int):
        if recipe.shift or recipe.flip:
            raise InvalidValue(
                "`shift` and `flip` move images that are given as one array, `(images, labels)`; let a loader do it "
                "by itself.",
                argument="shift",
            )
        self.data, self.recipe = data, recipe
        self._own_order = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
        self.given = self._given()
        if self._own_order:
            self._rows = Arrays(torch.arange(len(data)), recipe, seed)
        elif isinstance(data, IterableDataset):
            self.data = DataLoader(data, recipe.batch, drop_last=recipe.drop_last)
        elif not isinstance(data, Iterable) or isinstance(data, (bytes, Tensor, Mapping)):
            raise InvalidValue(
                "`data` must be arrays `(inputs, labels)`, a data set, or a loader of batches; got "
                f"{type(data).__name__}.",
                argument="data",
            )
        elif isinstance(data, Iterator):
            raise InvalidValue(
                "`data` can be read only once; pass a loader or a list, which can be read again in each epoch.",
                argument="data",
            )

    def _given(self) -> dict[str, Any]:
        """Return the settings of batches that the data bring along, whatever the recipe says; None where unknown."""
        if isinstance(self.data, Dataset):
            return {} if self._own_order else {"order": "given"}
        first = batch_length(self.data[0]) if isinstance(self.data, Sequence) and len(self.data) else None
        sampler = getattr(self.data, "batch_sampler", None) or self.data  # a loader with a sampler has no size itself
        found = {"batch": getattr(sampler, "batch_size", first), "drop_last": getattr(sampler, "drop_last", None)}
        return found | {"order": "given"}

    @property
    def per_epoch(self) -> int | None:
        """How many batches an epoch has, None where the length of the data is unknown."""
        if self._own_order:
            return self._rows.per_epoch
        try:
            return len(self.data)
        except TypeError:
            return None

    @property
    def state(self) -> Tensor:
        """The states of the generators of the order."""
        if self._own_order:
            return self._rows.state
        return generator_states(self.data)

    def load(self, state: Tensor) -> None:
        """Let the next epoch be the one that began at `state`."""
        if self._own_order:
            self._rows.load(state)
        else:
            load_generator_states(self.data, state)

    def epoch(self, skip: int = 0) -> Iterator[Any]:
        """Yield the batches of the next epoch after the first `skip`."""
        if self._own_order:
            rows = [indices.rows.tolist() for indices in self._rows.batches()][skip:]
            return iter(DataLoader(self.data, batch_sampler=rows))
        batches = iter(self.data)
        # read now, so that what a loader draws at random is drawn before the random states are restored
        deque(islice(batches, skip), maxlen=0)
        return batches

    def digest(self) -> str:
        """Return a digest of the examples in their order and of the batches they come in; this reads all of them."""
        if getattr(self.data, "persistent_workers", False):
            raise InvalidValue(
                "with `save=` a loader can't have persistent_workers=True, since its workers draw random numbers from "
                "states that no file holds; pass persistent_workers=False, or leave `save` out."
            )
        found, sizes = DataDigest(labels=True), list[int]()
        with random_states_kept(data=[self.data]):
            for batch in DataLoader(self.data, self.recipe.batch) if self._own_order else self.data:
                length = batch_length(batch)
                found.update(batch, range(found.count, found.count + length))
                sizes.append(length)
        if self._own_order:
            return f"{found.count:,} examples, digest {found.hex}"
        return f"{found.count:,} examples in {len(sizes):,} batches, digest {settings_digest([found.hex, sizes])}"


BatchOrder = Arrays | Loaded


def batch_order(data: Any, recipe: Recipe, seed: int) -> BatchOrder:
    """Return the batch order of data of any form."""
    arrays = arrays_in(data)
    return Loaded(data, recipe, seed) if arrays is None else Arrays(arrays, recipe, seed)


def batch_order_to_train(data: Any, recipe: Recipe, seed: int) -> BatchOrder:
    """Return the batch order, and name the settings that differ from those of batches that were given."""
    order = batch_order(data, recipe, seed)
    given = order.given if isinstance(order, Loaded) else {}
    asked = {name: getattr(recipe, name) for name in given}
    unused = [name for name, value in asked.items() if value not in (given[name], getattr(Recipe, name))]
    if unused:
        _warn(
            f"{' and '.join(f'`{name}={asked[name]!r}`' for name in unused)} {'is' if len(unused) == 1 else 'are'} not "
            "used: the data come as batches, which keep their size and order. Give arrays `(inputs, labels)`, a data "
            "set, or a name such as 'digits:train'."
        )
    return order


@contextmanager
def each_warned_once() -> Iterator[None]:
    """Inside the `with`, in which several networks are trained, the same sentence about their data is given once."""
    token = _WARNED.set(set())
    try:
        yield
    finally:
        _WARNED.reset(token)


def _warn(sentence: str) -> None:
    before = _WARNED.get()
    if before is None or sentence not in before:
        warnings.warn(sentence, stacklevel=outside())
    if before is not None:
        before.add(sentence)


def augmented(padded: Tensor, indices: BatchIndices, recipe: Recipe) -> Tensor:
    """Return the picked images, moved and mirrored."""
    images = padded[indices.rows] if indices.moves is None else moved(padded, indices.rows, indices.moves, recipe.shift)
    return images if indices.flips is None else torch.where(indices.flips[:, None, None, None], images.flip(-1), images)


def moved(padded: Tensor, rows: Tensor, moves: Tensor, shift: int) -> Tensor:
    """Return the chosen images, each cut out of its form with a margin of `shift` pixels at its own place.

    `moves` holds how far down and how far across each is cut, two rows of numbers from 0 to ``2 * shift``.
    """
    height, width = (size - 2 * shift for size in padded.shape[-2:])
    down = moves[0][:, None] + torch.arange(height, device=padded.device)
    across = moves[1][:, None] + torch.arange(width, device=padded.device)
    images = padded[rows[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
    # channels last, a 1 × 1 convolution of few channels with stride 2 writes past its memory (oneDNN, issue 6035)
    return images if images.is_cuda else images.contiguous()


def in_order(data: Any, batch: int = TEST_BATCH) -> Iterator[Any]:
    """Yield the batches of data that are not trained on, in their own order."""
    return batch_order(data, Recipe(steps=1, batch=batch, order="given"), seed=0).epoch()


def placed(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch on the model's device, its floating tensors in the model's precision."""

    def to_device(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            leaf = torch.as_tensor(plain_array(leaf))
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None, non_blocking=True)

    return mapped(to_device, batch)


def with_margin(images: Tensor, shift: int) -> Tensor:
    """Return images with a margin of `shift` zeros around each, into which they can be moved."""
    return pad(images, (shift,) * 4) if shift else images


def _require_images(arrays: Any) -> None:
    images = arrays[0] if isinstance(arrays, tuple) else arrays
    if not isinstance(images, Tensor):
        raise ShapeError("`shift` and `flip` need images as one array, alone or first in a tuple.", argument="shift")
    if images.ndim != 4:
        raise ShapeError(
            f"`shift` and `flip` need images of shape (examples, channels, height, width); got {tuple(images.shape)}.",
            argument="shift",
        )
