"""Batches of examples in the same order each time, all of them or a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from netkin.arrays import label_tensor, plain_array
from netkin.errors import InvalidValue, NetkinError, SourceError
from netkin.identity.data import contents
from netkin.sources.names import in_short

LabelledData = tuple[Tensor, Tensor]  # inputs and labels
# what is stored, its labels, and how a batch of the stored becomes what a model is fed
LoadedExamples = tuple[Tensor, Tensor | None, Callable[[Tensor], Any]]


@dataclass(frozen=True, eq=False, repr=False)
class Batches:
    """Examples with their labels, handed out batch by batch, in the same order each time.

    `stored` holds all examples as compactly as they came; `prepare` makes of some of them what a model is fed. Without
    labels a batch is the examples alone.
    """

    name: str
    stored: Tensor
    labels: Tensor | None = None
    batch_size: int = 128
    prepare: Callable[[Tensor], Any] = torch.Tensor.float
    are_characters: bool = False  # of a text that no tokenizer has split
    classes: tuple[str, ...] = ()  # their names, in the order of the labels, where the data have any
    is_sample: bool = False  # drawn by `sample`, so that examples are not at their own numbers

    def __repr__(self) -> str:
        labels = "" if self.labels is None else ", with labels"
        return f"Batches({self.name!r}, {self.examples:,} examples{labels}, batch_size={self.batch_size})"

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return len(self.stored)

    @property
    def texts(self) -> str:
        """What identifies the texts, of which the numbers are stored; empty where the examples are."""
        return getattr(getattr(self.prepare, "texts", None), "content", "")

    @property
    def split_by(self) -> str:
        """What identifies the tokenizer that has split texts; empty for other data."""
        return getattr(self.prepare, "split_by", "")

    @property
    def images(self) -> Any:
        """All examples at once, as a model is fed them."""
        return self.prepare(self.stored)

    def counts(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Return what was made of the texts among the examples `start` to `stop`; empty for other data."""
        count = getattr(self.prepare, "counts", None)
        return {} if count is None else count(self.stored[start:stop])

    def part(self, start: int, stop: int) -> Batches:
        """Return the examples `start` to `stop`, without preparing any others."""
        labels = None if self.labels is None else self.labels[start:stop]
        return replace(self, stored=self.stored[start:stop], labels=labels)

    def __len__(self) -> int:
        """Return the number of batches; the last may be smaller."""
        return -(-self.examples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.examples, self.batch_size):
            rows = slice(start, start + self.batch_size)
            images = self.prepare(self.stored[rows])
            yield images if self.labels is None else (images, self.labels[rows])


@dataclass(frozen=True)
class OwnBatches:
    """The same examples as each of several models takes them, in the order of the models."""

    of: tuple[Batches, ...]

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(batches.name for batches in self.of))

    @property
    def examples(self) -> int:
        return self.of[0].examples

    def __iter__(self) -> Iterator[Any]:
        raise self.refusal

    @property
    def refusal(self) -> SourceError:
        """Why they are no data for one model, and what to do."""
        return SourceError(
            f"the models have different tokenizers, so that {self.name!r} are fed to each in its own way; give data to "
            "each of them, as in `nk.ModelInput(model, data=...)`, or choose one tokenizer by `tokenizer=DIR`."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Borrowed:
    """Batches from a user's function; if they can be iterated only once, `again` makes them anew each time."""

    name: str
    batches: Iterable[Any]
    again: Callable[[], Iterable[Any]] | None = None
    is_sample: bool = False

    def __repr__(self) -> str:
        return f"Borrowed({self.name!r}{'' if self.examples is None else f', {self.examples:,} examples'})"

    @property
    def examples(self) -> int | None:
        """How many examples there are, or None where the length of the data is unknown."""
        dataset = getattr(self.batches, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else None

    def __len__(self) -> int:
        """Return the number of batches; TypeError where the length of the data is unknown."""
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.again() if self.again else self.batches
        except NetkinError:
            raise
        except Exception as error:  # a function's own code may raise anything
            raise SourceError(f"{self.name!r} raised {in_short(error)}") from error


def class_names(data: Any) -> tuple[str, ...]:
    """Return the names of the classes of data, in the order of their labels; empty where the data have none.

    They are the folders of images, or what a Dataset, as those of torchvision, has as its attribute `classes`.
    """
    loader = getattr(data, "batches", data)
    names = data.classes if isinstance(data, Batches) else getattr(getattr(loader, "dataset", loader), "classes", ())
    are_names = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
    return tuple(names) if are_names and len(set(names)) == len(names) else ()


def as_they_are(examples: Tensor) -> Tensor:
    """Return `examples` unchanged."""
    return examples


Data = Batches | Borrowed | OwnBatches


def sample(data: Data, examples: int | None, *, seed: int = 0, balanced: bool = False) -> Data:
    """Return `examples` of the data, drawn at random from the whole set; `balanced`: as many of each class.

    They keep the order of the set, and the name of the data says what they are. Where the examples cannot be reached
    by number, as in a stream, the data stay as they are under a name that says that only the first are taken; who reads
    them stops after `examples`. As many as there are, or more, are the whole set.

    Example:
        >>> from netkin.sources import load_data
        >>> some = sample(load_data("digits:test"), 50)
        >>> some.name, some.examples
        ('digits:test, a sample of 50 of 360 (seed 0)', 50)
    """
    if examples is None:
        return data
    if isinstance(data, OwnBatches):  # as many of each, so that the same are drawn
        own = (sample(batches, examples, seed=seed, balanced=balanced) for batches in data.of)
        return OwnBatches(tuple(batches for batches in own if isinstance(batches, Batches)))
    if examples < 1:
        raise InvalidValue(f"`examples` must be at least 1; got {examples}.", argument="examples")
    total = data.examples if _is_indexable(data) else None
    if total is None:
        if balanced:
            raise SourceError(_without_labels(data))
        return replace(data, name=f"{data.name}, the first {examples:,} examples")
    if examples >= total and not balanced:
        return data
    drawn = torch.Generator().manual_seed(seed)
    places = _balanced(data, examples, drawn) if balanced else torch.randperm(total, generator=drawn)[:examples]
    kind = "a balanced sample" if balanced else "a sample"
    return _picked(data, places.sort().values, f"{data.name}, {kind} of {examples:,} of {total:,} (seed {seed})")


def overlap_remark(data: Any, test: Any, examples: int | None = None, test_examples: int | None = None) -> str:
    """Return a warning with the number of test examples whose inputs are among `data`; empty if none, or not known.

    It is known where both are in memory: loaded data, arrays, lists of batches, and loaders that read all of a
    `TensorDataset`.

    Args:
        data: what something was fitted to.
        test: what it is evaluated on.
        examples: how many of `data` are read, from the first; None for all.
        test_examples: how many of `test`.

    Example:
        >>> from netkin.sources import load_data
        >>> overlap_remark(sample(load_data("digits:train"), 300), load_data("digits:train"))[:60]
        '300 of the 1,437 test examples are also among the 300 of `da'
    """
    fitted, judged = _inputs(data, examples), _inputs(test, test_examples)
    if fitted is None or judged is None:
        return ""
    shared = int(torch.isin(*(contents(inputs, len(inputs)).cpu() for inputs in (judged, fitted))).sum())
    if not shared:
        return ""
    return (
        f"{shared:,} of the {len(judged):,} test examples are also among the {len(fitted):,} of `data`, which flatters "
        "the result; give other data as `test`."
    )


def _inputs(data: Any, examples: int | None) -> Tensor | np.ndarray | None:
    """Return the inputs of data that are in memory; None for others, which would have to be read."""
    inputs = data
    if isinstance(data, Batches):
        inputs = None if data.texts else data.stored
    elif isinstance(data, list) and data:
        firsts = [_first(batch) for batch in data]
        are_alike = all(isinstance(first, Tensor) and _has_rows(first) for first in firsts) and (
            len({(first.shape[1:], first.device) for first in firsts}) == 1
        )
        inputs = torch.cat(firsts) if are_alike else None
    elif isinstance(data, (DataLoader, Borrowed)):
        loader: Any = getattr(data, "batches", data)
        inputs = _first(loader.dataset[:]) if _reads_all(loader, in_order=examples is not None) else None
    return inputs[:examples] if _has_rows(inputs) else None


def _has_rows(array: Any) -> bool:
    """Return whether a value is a dense array of numbers with an axis of examples."""
    if isinstance(array, np.ndarray):
        return array.ndim > 0 and array.dtype.kind in "biufc"
    return isinstance(array, Tensor) and array.ndim > 0 and array.layout == torch.strided and not array.is_nested


def _reads_all(loader: Any, in_order: bool) -> bool:
    """Return whether a loader is known to read every example of a `TensorDataset`, and in their order if asked."""
    if not (isinstance(loader, DataLoader) and isinstance(loader.dataset, TensorDataset)):
        return False
    sampler, batches = loader.sampler, loader.batch_sampler
    is_plain = batches is None or (type(batches) is BatchSampler and not batches.drop_last)
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)
    return is_plain and (type(sampler) is SequentialSampler or (shuffles and not in_order))


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def _balanced(data: Batches | Borrowed, examples: int, drawn: torch.Generator) -> Tensor:
    """Return the positions of equally many examples of each class; a remainder goes to classes drawn at random."""
    labels = _labels(data)
    if labels is None:
        raise SourceError(_without_labels(data))
    classes, counts = labels.unique(return_counts=True)
    if examples < len(classes):
        raise InvalidValue(
            f"{examples:,} examples can't be spread over the {len(classes):,} classes of {data.name!r}; take at least "
            f"{len(classes):,}.",
            argument="examples",
        )
    wanted = torch.full((len(classes),), examples // len(classes))
    wanted[torch.randperm(len(classes), generator=drawn)[: examples % len(classes)]] += 1
    if (wanted > counts).any():
        rare = int(counts.argmin())
        raise InvalidValue(
            f"class {int(classes[rare])} of {data.name!r} has {int(counts[rare]):,} examples, too few for a balanced "
            f"sample of {examples:,} over {len(classes):,} classes; take at most {int(counts[rare]) * len(classes):,}.",
            argument="examples",
        )
    chosen = list[Tensor]()
    for number, count in zip(classes, wanted.tolist(), strict=True):
        places = (labels == number).nonzero().flatten()
        chosen.append(places[torch.randperm(len(places), generator=drawn)[:count]])
    return torch.cat(chosen)


def _picked(data: Batches | Borrowed, places: Tensor, name: str) -> Data:
    if isinstance(data, Batches):
        labels = None if data.labels is None else data.labels[places]
        return replace(data, name=name, stored=data.stored[places], labels=labels, is_sample=True)
    loader: Any = data.batches
    chosen = DataLoader(
        Subset(loader.dataset, places.tolist()),
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
    return replace(data, name=name, batches=chosen, is_sample=True)


def _is_indexable(data: Batches | Borrowed) -> bool:
    """Return whether every example of the data can be reached by its number."""
    if isinstance(data, Batches):
        return True
    loader = data.batches
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # a sampler or batch sampler of one's own may leave examples out, or repeat them
    whole = isinstance(loader.dataset, Sized) and isinstance(loader.sampler, Sized)
    plain = type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) is BatchSampler
    return plain and whole and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]


def _labels(data: Batches | Borrowed) -> Tensor | None:
    """Return the class numbers of all examples, or None where they are not known without running through the data."""
    labels = data.labels if isinstance(data, Batches) else _labels_of(data.batches.dataset)  # type: ignore[attr-defined]
    if labels is None:
        return None
    labels = label_tensor(labels)
    return labels if labels.ndim == 1 and not labels.is_floating_point() and len(labels) == data.examples else None


def _labels_of(dataset: Any) -> Any:
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    if isinstance(dataset, Subset):
        inner = _labels_of(dataset.dataset)
        return None if inner is None else torch.as_tensor(plain_array(inner))[torch.as_tensor(dataset.indices)]
    return getattr(dataset, "targets", getattr(dataset, "labels", None))


def _without_labels(data: Batches | Borrowed) -> str:
    return (
        f"the classes of {data.name!r} are not known, so no balanced sample of them can be drawn; use data with "
        "labels, such as an image folder, or a Dataset with the attribute `targets`."
    )
