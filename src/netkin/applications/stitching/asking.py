"""Asking: the methods of a sweep as they were written, and what its numbers depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.stitching.matching import find
from netkin.applications.stitching.task_loss import TaskLoss, is_task_loss
from netkin.errors import ValueFault
from netkin.representations import batches_of
from netkin.representations.nesting import leaves
from netkin.results.identifiers import taken_apart
from netkin.sources.checkpoints import digest

How = str | TaskLoss


@dataclass(frozen=True)
class Way:
    """One method of a sweep: its id, the direct method that gives its map, and how that is trained, if it is."""

    id: str
    start: str
    training: TaskLoss | None = None


@dataclass(frozen=True)
class Asked:
    """What is asked of a sweep."""

    ways: tuple[Way, ...]
    data: Any
    test: Any
    measures: Any
    scores: tuple[str, ...]
    layers: Any = None
    pairs: Any = "corresponding"
    shape: Any = None
    resize: str | None = None
    examples: int | None = None
    validation: Any = field(default=None)
    device: torch.device | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("data", "test", "validation"):
            if isinstance(getattr(self, name), Iterator):
                raise ValueFault(
                    f"`{name}` is an iterator, which gives its batches once, and a sweep reads them several times; "
                    "pass a loader or a list."
                )
        if self.data is None:
            raise ValueFault("`data` is missing: pass a loader, an iterable of batches or one array of inputs.")

    @property
    def judged_on(self) -> Any:
        """The data on which stitches are judged."""
        return self.data if self.test is None else self.test

    def question(self, a: nn.Module, b: nn.Module) -> dict[str, str]:
        """Return what the worth of a stitch depends on beside its layers and its method."""
        limits = {"data": self.examples}
        given = {name: getattr(self, name) for name in ("data", "test", "validation")}
        digests = {f"{name} digest": digest_of(one, limits.get(name)) for name, one in given.items() if one is not None}
        own = {"weights a": digest(a.state_dict()), "weights b": digest(b.state_dict())}
        return own | digests | {"asked resize": str(self.resize), "asked seed": str(self.seed)}


def asked_ways(hows: How | Sequence[How], seed: int) -> tuple[Way, ...]:
    """Return the methods that are asked for, each once; one that does not exist is refused."""
    listed = [hows] if isinstance(hows, (str, TaskLoss)) else list(hows)
    if not listed:
        raise ValueFault("`hows` is empty; name at least one method, e.g. 'least_squares'.")
    return tuple({way.id: way for way in (_way(how, seed) for how in listed)}.values())


def digest_of(data: Any, examples: int | None = None) -> str:
    """Return a short text that changes with any example of the data, inputs and labels alike."""
    total = blake2b(digest_size=12)
    for batch in batches_of(data, examples):
        arrays = {str(path): torch.as_tensor(leaf) for path, leaf in leaves(batch) if _is_array(leaf)}
        total.update(digest(arrays).encode())
    return total.hexdigest()


def _way(how: How, seed: int) -> Way:
    if isinstance(how, TaskLoss) or is_task_loss(how):
        settings = how if isinstance(how, TaskLoss) else _settings(how, seed)
        if settings.resume is not None:
            raise ValueFault("`resume` is for a single stitch; a sweep continues by `save`.")
        return Way(str(settings), settings.start, settings)
    find(how)
    name, given = taken_apart(how) or (how, {})
    spelled = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else name
    return Way(spelled, f"random(seed={seed})" if spelled == "random" else spelled)


def _settings(how: str, seed: int) -> TaskLoss:
    given: Mapping[str, Any] = (taken_apart(how) or ("", {}))[1]
    return TaskLoss.read(how, {} if "seed" in given else {"seed": seed})


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))
