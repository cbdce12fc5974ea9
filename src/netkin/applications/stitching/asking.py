"""Asking: the methods of a sweep as they were written, and what its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from netkin.applications.stitching.matching import find, identity, random, seeded
from netkin.applications.stitching.stitches import Stitch
from netkin.applications.stitching.task_loss import NAME, TaskLoss, is_task_loss
from netkin.errors import UnknownName, ValueFault
from netkin.identity import UnorderedDigest, function_digest
from netkin.representations.inputs import batch_length, watched
from netkin.results.labels import taken_apart

How = str | TaskLoss
FITTED, JUDGED, VALIDATED = "fitting data digest", "test data digest", "validation data digest"


@dataclass(frozen=True)
class Way:
    """One method of a sweep: its id, the direct method that gives its map, and how that is trained, if it is."""

    id: str
    start: str
    training: TaskLoss | None = None

    @property
    def identity(self) -> str:
        """The id, with the digest of a loss that is a function."""
        labels = "soft" if self.training is None else self.training.labels
        return f"{self.id}, loss {function_digest(labels)}" if callable(labels) else self.id

    @property
    def is_blind(self) -> bool:
        """Whether its map, before any training, is the same for any data."""
        return find(self.start)[0] in (identity, random)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a sweep."""

    ways: tuple[Way, ...]
    scores: tuple[str, ...]
    data: Any
    test: Any = None
    measures: Any = ("cka",)
    layers: Any = None
    pairs: Any = "corresponding"
    shape: Any = None
    resize: str | None = None
    examples: int | None = None
    test_examples: int | None = None
    validation: Any = None
    device: torch.device | str | None = None
    seed: int = 0
    each: Callable[[Stitch], None] | None = None

    def __post_init__(self) -> None:
        for name in ("data", "test", "validation"):
            if isinstance(getattr(self, name), Iterator):
                raise ValueFault(
                    f"`{name}` is an iterator, which gives its batches once, and a sweep reads them several times; "
                    "pass a loader or a list."
                )
        if self.data is None:
            raise ValueFault("`data` is missing: pass a loader, an iterable of batches or one array of inputs.")
        for name in ("examples", "test_examples"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueFault(f"`{name}` must be at least 1; got {count}.")

    @property
    def judging(self) -> tuple[Any, int | None]:
        """The data on which stitches are judged, and how many examples of them, at most; else those of the fitting."""
        if self.test is None:
            return self.data, self.examples if self.test_examples is None else self.test_examples
        return self.test, self.test_examples

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of the data, which are read for them, and in how many batches those to fit on come."""
        fitted, batches = digest_of(self.data, self.examples)
        same = self.judging[0] is self.data and self.judging[1] == self.examples
        judged = fitted if same else digest_of(*self.judging)[0]
        validated = "none" if self.validation is None else digest_of(self.validation)[0]
        return {FITTED: fitted, JUDGED: judged, VALIDATED: validated, "batches": str(batches)}

    @property
    def settings(self) -> dict[str, str]:
        """What the worth of a stitch depends on beside models, data, layers and method."""
        return {"resize": str(self.resize), "seed": str(self.seed)}


def listed(hows: How | Sequence[How]) -> list[How]:
    """Return methods as a list; none at all is refused."""
    found = [hows] if isinstance(hows, (str, TaskLoss)) else list(hows)
    if not found:
        raise ValueFault("`hows` is empty; name at least one method, e.g. 'least_squares'.")
    return found


def asked_ways(hows: How | Sequence[How], seed: int) -> tuple[Way, ...]:
    """Return the methods of a sweep, each once; one that does not exist is refused."""
    ways = {way.id: way for way in (way_of(how, seed) for how in listed(hows))}
    if any(way.training is not None and way.training.resume is not None for way in ways.values()):
        raise ValueFault("`resume` is for a single stitch; a sweep continues by `save`.")
    return tuple(ways.values())


def way_of(how: How, seed: int, options: Mapping[str, Any] | None = None) -> Way:
    """Return a method as it was asked for, with `options` of a training.

    `seed` is that of what is random, unless the method names one of its own.
    """
    if isinstance(how, TaskLoss) or is_task_loss(how):
        settings = _settings(how, seed, options or {})
        return Way(str(settings), settings.start, settings)
    find(how, others=[NAME])
    for option in options or {}:
        raise UnknownName(f"{how!r} has no option {option!r}; such options belong to 'task_loss'.")
    name, given = taken_apart(how) or (how, {})
    spelled = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else name
    return Way(spelled, seeded(spelled, seed))


def _settings(how: How, seed: int, options: Mapping[str, Any]) -> TaskLoss:
    if isinstance(how, TaskLoss):
        for option in options:
            raise ValueFault(f"`{option}` is given beside a `TaskLoss`; put it there.")
        return how
    given: Mapping[str, Any] = (taken_apart(how) or ("", {}))[1]
    return TaskLoss.read(how, {**({} if "seed" in given else {"seed": seed}), **options})


def digest_of(data: Any, examples: int | None = None) -> tuple[str, int]:
    """Return a text that changes with any example, input or label, but not with their order; and how many batches."""
    found, batches = UnorderedDigest(), 0
    for batch in watched(data, examples, "looking at the data"):
        found.update(batch, batch_length(batch))
        batches += 1
    return str(found), batches
