"""Batches: examples handed out in the same order each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# what is stored, its labels, and how a batch of the stored becomes what a model is fed
Examples = tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]


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


def as_they_are(examples: Tensor) -> Tensor:
    """Return `examples`, which need nothing done to them."""
    return examples
