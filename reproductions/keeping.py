"""What a claim reads and what it makes: notes of the former, and the latter kept in the claim's job.

A record is to name all that its numbers depend on, whoever read it: the claim's own function, a worker process, or an
earlier run that was killed and had finished some parts. So every part carries its own notes, and joins them to those
that are being taken around it.

What a claim's own functions make is kept by decorators for results, for single networks and for trainings of several,
so that a claim that was killed continues after the last one that was finished. They add nothing to the code that
measures a claim: outside of a claim, and in worker processes, whose results are kept as a whole, the functions are as
they were.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from netkin.identity import DataDigest, settings_digest, weights_digest
from netkin.jobs import Job, Part
from netkin.sources.architectures import seeded
from netkin.sources.weights import read_state
from reproductions.image_sets import labelled_digest

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


# --- parts that are kept ----------------------------------------------------------------------------------------------

_job: ContextVar[Job | None] = ContextVar("job of a claim", default=None)


@contextmanager
def keeping_in(job: Job | None) -> Iterator[None]:
    """Inside the `with`, what is made by decorated functions, or task by task, is kept in that job."""
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


def noted_part(job: Job, name: str, compute: Callable[[], tuple[Mapping[str, Any], Mapping[str, np.ndarray]]]) -> Part:
    """Return a part of a job, found or computed as values and arrays; what computing it read is noted in both cases."""

    def computed() -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        with noting() as notes:
            values, arrays = compute()
        return {**values, "notes": asdict(notes)}, arrays

    part = job.part(name, computed)
    join(Notes(**part.values["notes"]))
    return part


def keep_result(function: Function) -> Function:
    """Decorate a function whose arguments and results are fit for JSON, so that each result is kept."""

    @functools.wraps(function)
    def keeping(*given: Any) -> Any:
        job = _job.get()
        if job is None:
            return function(*given)
        made = noted_part(job, part_name(function, given), lambda: ({"result": function(*given)}, {}))
        return made.values["result"]

    return cast("Function", keeping)


def keep_network(build: Callable[[], nn.Module]) -> Callable[[Function], Function]:
    """Return a decorator for a function that returns a trained network like those of `build`, fit for evaluation."""

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def keeping(*given: Any) -> nn.Module:
            def weights() -> dict[str, np.ndarray]:
                return {key: value.cpu().numpy() for key, value in function(*given).state_dict().items()}

            job = _job.get()
            if job is None:
                return cast("nn.Module", function(*given))
            part = noted_part(job, part_name(function, given), lambda: ({}, weights()))
            model = seeded(build)  # which takes no random numbers
            model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in part.arrays.items()})
            return model.eval().requires_grad_(False)

        return cast("Function", keeping)

    return decorated


def keep_training(function: Function) -> Function:
    """Decorate a function of (lab, name, models, data_of_each, ...) that trains the models and returns them.

    Of each model the weights that changed are kept. A training that is looked at on its way is done again as a whole.
    """

    @functools.wraps(function)
    def keeping(lab: Any, name: str, models: Sequence[nn.Module], data_of_each: Sequence[Any], **options: Any) -> Any:
        def weights() -> dict[str, np.ndarray]:
            before = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
            function(lab, name, models, data_of_each, **options)
            return _changed(before, models)

        job = _job.get()
        if job is None or options.get("look") is not None:
            return function(lab, name, models, data_of_each, **options)
        facts = [
            name,
            [weights_digest(model) for model in models],
            [labelled_digest(*data) for data in data_of_each],
            options,
        ]
        title = f"{function.__name__} {settings_digest(facts, strict=False)}"
        _load(models, noted_part(job, title, lambda: ({}, weights())).arrays)
        return [model.eval() for model in models]

    return cast("Function", keeping)


def _changed(before: Sequence[dict[str, torch.Tensor]], models: Sequence[nn.Module]) -> dict[str, np.ndarray]:
    """Return the weights of all models that are not as they were, by the model's number and their name."""
    return {
        f"{number}/{key}": value.cpu().numpy()
        for number, (old, model) in enumerate(zip(before, models, strict=True))
        for key, value in model.state_dict().items()
        if not torch.equal(value, old[key])
    }


@torch.no_grad()
def _load(models: Sequence[nn.Module], arrays: Mapping[str, np.ndarray]) -> None:
    """Give models the weights that were kept; the others stay as they are."""
    states = [model.state_dict() for model in models]
    for place, array in arrays.items():
        number, _, key = place.partition("/")
        states[int(number)][key].copy_(torch.from_numpy(array.copy()))
