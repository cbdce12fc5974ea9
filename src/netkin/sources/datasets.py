"""Data sets by name: `digits`, `cifar10:DIR` or `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from netkin.errors import SourceError, UnknownName, ValueFault, did_you_mean
from netkin.sources.functions import call, find_function
from netkin.sources.images import Images, cifar10, digits


@dataclass(frozen=True, eq=False)
class Batches:
    """Examples with their labels, handed out batch by batch, in the same order each time.

    `stored` holds all examples as compactly as they came; `prepare` makes of some of them what a model is fed. Without
    labels a batch is the examples alone.
    """

    name: str
    stored: Tensor
    labels: Tensor | None = None
    batch_size: int = 128
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return len(self.stored)

    @property
    def images(self) -> Tensor:
        """All examples at once, as a model is fed them."""
        return self.prepare(self.stored)

    def __len__(self) -> int:
        """Return the number of batches; the last may be smaller."""
        return -(-self.examples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.examples, self.batch_size):
            rows = slice(start, start + self.batch_size)
            images = self.prepare(self.stored[rows])
            yield images if self.labels is None else (images, self.labels[rows])


@dataclass(frozen=True, eq=False)
class Borrowed:
    """Batches that a user's function made; what can be walked through only once is made `again` each time."""

    name: str
    batches: Iterable[Any]
    again: Callable[[], Iterable[Any]] | None = None

    @property
    def examples(self) -> int | None:
        """How many examples there are, or None where the data do not say."""
        dataset = getattr(self.batches, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else None

    def __len__(self) -> int:
        """Return the number of batches; TypeError where the data do not say."""
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.again() if self.again else self.batches)


def load_data(spec: str, batch_size: int = 128) -> Batches | Borrowed:
    """Return the data that `spec` names, as batches that can be walked through again and again.

    `digits` are the 1,797 bundled digits, `digits:train` the first 1,437 and `digits:test` the last 360.
    `cifar10:DIR` are the test images of CIFAR-10 in canonical order, `cifar10-train:DIR` the training images; DIR, or
    `cifar-10-batches-bin` in it, holds the files of the binary version. `package.module:function` is called without
    arguments and returns an iterable of batches, a Dataset, a DataLoader or a tensor; it may lie in the current
    directory.

    Example:
        >>> images, labels = next(iter(load_data("digits:test", batch_size=32)))
        >>> images.shape
        torch.Size([32, 1, 8, 8])
    """
    if batch_size < 1:
        raise ValueFault(f"a batch must hold at least one example; got batch_size={batch_size}.")
    name, colon, rest = spec.partition(":")
    if name in NAMED:
        stored, labels, prepare = NAMED[name](rest)
        return Batches(spec, stored, labels, batch_size, prepare)
    if not colon or not rest:
        near = did_you_mean(spec, NAMED)
        raise UnknownName(f"no data set named {spec!r}{near or '.'} Data is {KINDS}.")
    return _from_function(spec, batch_size)


NAMED: dict[str, Callable[[str], Images]] = {
    "digits": digits,
    "cifar10": partial(cifar10, part="test"),
    "cifar10-train": partial(cifar10, part="train"),
}
KINDS = "`digits`, `digits:train`, `digits:test`, `cifar10:DIR`, `cifar10-train:DIR` or `package.module:function`"


def _from_function(spec: str, batch_size: int) -> Batches | Borrowed:
    function = find_function(spec, known=NAMED)
    data = call(function, spec)
    if isinstance(data, Tensor):
        return Batches(spec, data, None, batch_size, prepare=lambda examples: examples)
    if isinstance(data, Dataset):
        return Borrowed(spec, DataLoader(data, batch_size=batch_size))
    _refuse_other_than_batches(data, spec)
    return Borrowed(spec, data, again=partial(call, function, spec) if isinstance(data, Iterator) else None)


def _refuse_other_than_batches(data: Any, spec: str) -> None:
    if isinstance(data, tuple):
        raise SourceError(
            f"{spec!r} returned a tuple of {len(data)}, which could be one batch or {len(data)}; return a list of "
            "batches, or a TensorDataset of examples and labels."
        )
    if isinstance(data, (str, bytes, Mapping)) or not hasattr(data, "__iter__"):
        raise SourceError(
            f"{spec!r} must return an iterable of batches, a Dataset, a DataLoader or a tensor; "
            f"it returned an object of type {type(data).__name__}."
        )
