"""What a claim reads, as notes for its record, and the job that keeps its finished tasks.

A record is to name all that its numbers depend on, whoever read it: the claim's own function, a worker process, or an
earlier run that was killed and had finished some tasks. So the result of every task carries its own notes, and joins
them to those that are being taken around it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from netkin.identity import DataDigest, weights_digest
from netkin.jobs import Job
from netkin.sources.weights import read_state

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Notes:
    """What was read: data sets in words, digests of data by name, and recipes by the names of their networks."""

    data: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)

    def join(self, other: Notes) -> None:
        """Add other notes to these; all are sorted, so that the order of reading does not matter."""
        self.data = sorted({*self.data, *other.data})
        for name, digest in other.digests.items():  # several of one name, as parts of a set may be, are all listed
            known = filter(None, self.digests.get(name, "").split(", "))
            self.digests[name] = ", ".join(sorted({*known, *digest.split(", ")}))
        self.digests = dict(sorted(self.digests.items()))
        self.recipes = dict(sorted((self.recipes | other.recipes).items()))


_taken: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextmanager
def noting() -> Iterator[Notes]:
    """Inside the `with`, note what is read; at its end, join that to the notes that are taken around it, if any."""
    notes = Notes()
    token = _taken.set(notes)
    try:
        yield notes
    finally:
        _taken.reset(token)
    join(notes)


def join(notes: Notes) -> None:
    """Add notes to those that are being taken, if any are."""
    around = _taken.get()
    if around is not None:
        around.join(notes)


def note_images(images: Any) -> None:
    """Note a set of images, with the digests of its two parts."""
    if _taken.get() is not None:
        join(Notes([images.words], images.digests))


def note_text(path: Path) -> None:
    """Note a file of text, with the digest of its bytes."""
    if _taken.get() is not None:
        words = f"{path.parent.name}, {path.stat().st_size:,} bytes of text"
        join(Notes([words], {words: _digest_of_file(_bytes_digest, path)}))


def note_weights(path: Path) -> None:
    """Note a file of weights, with their digest."""
    if _taken.get() is not None:
        join(Notes(digests={f"weights {path.name}": _digest_of_file(_weights_digest, path)}))


def note_recipe(name: str, network: Any) -> None:
    """Note how the network `name` is built and trained."""
    if _taken.get() is not None:
        join(Notes(recipes={name: network.words}))


def note_result(note: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Return a decorator by which a function notes what it returns."""

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def noting_function(*given: Any) -> Any:
            found = function(*given)
            note(found)
            return found

        return cast("Function", noting_function)

    return decorated


def cache_with_notes(function: Function) -> Function:
    """Remember what a function returns, as `functools.cache` does, and join what it read to the notes at every call."""
    known: dict[tuple[Any, ...], tuple[Any, Notes]] = {}

    @functools.wraps(function)
    def remembering(*given: Any) -> Any:
        if given not in known:
            with noting() as notes:
                found = function(*given)
            known[given] = found, notes
        found, notes = known[given]
        join(notes)
        return found

    return cast("Function", remembering)


def _digest_of_file(digest: Callable[[Path, int, int], str], path: Path) -> str:
    """Return the digest of a file's content, which is computed once unless the file changes."""
    facts = path.stat()
    return digest(path, facts.st_size, facts.st_mtime_ns)


@functools.cache
def _bytes_digest(path: Path, size: int, changed: int) -> str:
    digest, content = DataDigest(), path.read_bytes()
    if content:
        digest.update(torch.frombuffer(bytearray(content), dtype=torch.uint8), range(len(content)))
    return digest.hex


@functools.cache
def _weights_digest(path: Path, size: int, changed: int) -> str:
    return weights_digest(read_state(path))


# --- tasks that are kept ----------------------------------------------------------------------------------------------

_job: ContextVar[Job | None] = ContextVar("job of a claim", default=None)


@contextmanager
def keeping_in(job: Job | None) -> Iterator[None]:
    """Inside the `with`, the results of tasks are kept in that job."""
    token = _job.set(job)
    try:
        yield
    finally:
        _job.reset(token)


@contextmanager
def random_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Inside the `with`, torch draws from this seed; after it, as if nothing had been drawn."""
    with torch.random.fork_rng([device] if torch.cuda.is_available() and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def current_job() -> Job | None:
    """Return the job of the claim being measured; None outside of one, and in worker processes."""
    return _job.get()


def part_name(function: Callable[..., Any], given: Any) -> str:
    """Return the name under which a job keeps what a function returns for something that is fit for JSON."""
    return f"{function.__name__} {json.dumps(given)}"
