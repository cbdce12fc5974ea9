"""Feed: the data of a pass as batches for each runner, whole or in parts; data and rows held for many passes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DistributedSampler

from netkin.comparing.subjects import Keep, ModelRunner, RecordedRunner, Runner, Tensors, WeightsRunner
from netkin.errors import InvalidValue, ShapeError
from netkin.representations import batches_of
from netkin.representations.gradients import Target
from netkin.representations.inputs import (
    examples_in,
    length_if_known,
    loader_of,
    part_of,
    pick,
    reshuffles,
    sampler_of,
)
from netkin.statistics.collector import hashes

SLICE = 512  # examples of recorded rows taken at a time


class Feed:
    """The data of a pass: batches for each runner, in step where they are not the same for all.

    `expected` is how many examples all parts together will give, if that is known, and `length` how many come here;
    `start` is the number of the first one here. With `shared` the part is that of one process of several: a loader
    with a `DistributedSampler` gives it by itself, and its examples have the numbers that the sampler gives.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        data: Any,
        examples: int | None,
        part: Any = None,
        start: int = 0,
        paired: bool = True,
        shared: bool = False,
    ):
        self.runners, self._examples, self.start, self.paired = runners, examples, start, paired
        self._shared = shared
        self.known: int | None = None  # examples in the latest batch, where they can be counted
        self._numbers: dict[int, np.ndarray] = {}  # of the examples of data that samplers have split
        self._part = None if part is None else parse_part(part)
        recorded = [runner for runner in runners if isinstance(runner, RecordedRunner)]
        if recorded:
            self._of_recorded(recorded, data, examples)
        else:
            self._data = {runner: data if runner.data is None else runner.data for runner in runners}
            for runner, own in self._data.items():
                if isinstance(runner, WeightsRunner):
                    raise runner.refusal
                if own is None:
                    alone = all(other.data is None for other in runners)
                    what = "`data` is missing" if alone else f"{runner.name!r} has no data"
                    raise InvalidValue(f"{what}: pass a loader, an iterable of batches or one array of inputs.")
            if paired:
                _refuse_other_orders(self._data)
            counts = [examples_in(own, examples) for own in self._by_id().values()]
            unknown = None in counts
            self.expected = counts[0] if paired else None if unknown else sum(count or 0 for count in counts)
        self.length = self.expected
        if self._part is not None and not (shared and self._take_sampled(*self._part)):
            self._cut(*self._part)

    @property
    def is_one(self) -> bool:
        """Whether all runners get the same data."""
        return len({id(data) for data in self._data.values()}) == 1

    def examples_of(self, runner: Runner) -> int | None:
        """Return how many examples a runner will get, if that is known."""
        return self.expected if self.paired else examples_in(self._data[runner], self._examples)

    def _of_recorded(self, recorded: Sequence[RecordedRunner], data: Any, examples: int | None) -> None:
        if len(recorded) < len(self.runners):
            raise InvalidValue(
                "a model and recorded rows can't be compared: nothing tells whether they saw the same examples. "
                "Record both."
            )
        counts = {runner.name: runner.examples for runner in recorded}
        if len(set(counts.values())) > 1:
            (a, n), (b, m) = next(iter(counts.items())), next(c for c in counts.items() if c[1] != recorded[0].examples)
            raise ShapeError(f"{a!r} holds {n:,} examples and {b!r} {m:,}; record both on the same examples.")
        if data is not None:
            raise InvalidValue("recorded rows are compared as they are; leave `data` out.")
        if examples is not None and examples < 1:
            raise InvalidValue(f"`examples` must be at least 1; got {examples}.")
        self.expected = min(recorded[0].examples, examples or recorded[0].examples)
        self._data = dict.fromkeys(recorded, slices(0, self.expected))

    def _cut(self, which: int, count: int) -> None:
        """Leave of all data the part `which` of `count`, a contiguous range of examples."""
        if self.expected is None:
            way = f"shared by {count:,} processes; pass a data set, an array or a loader that has a length."
            raise InvalidValue(
                "data that do not tell how many they are can't be "
                + (way if self._shared else "split into parts; give each part `start`.")
            )
        if count > self.expected:
            way = f"shared by {count:,} processes; start" if self._shared else f"split into {count:,} parts; take"
            raise InvalidValue(f"{self.expected:,} examples can't be {way} fewer.")
        is_recorded, cut, lengths = isinstance(self.runners[0], RecordedRunner), {}, []
        first = self.expected * (which - 1) // count
        for key, data in self._by_id().items():
            own = self.expected if is_recorded else examples_in(data, self._examples) or self.expected
            ends = own * (which - 1) // count, own * which // count
            cut[key] = slices(*ends) if is_recorded else part_of(data, *ends)
            lengths.append(ends[1] - ends[0])
        self._data = {runner: cut[id(data)] for runner, data in self._data.items()}
        self._examples, self.start = None, self.start + first
        self.length = lengths[0] if self.paired else sum(lengths)

    def _take_sampled(self, which: int, count: int) -> bool:
        """Number the examples by the data's own `DistributedSampler`; tell whether they have one."""
        found = {key: sampled_numbers(data, which - 1, count) for key, data in self._by_id().items()}
        if all(numbers is None for numbers in found.values()):
            return False
        self._numbers = {key: numbers for key, numbers in found.items() if numbers is not None}
        if len(self._numbers) < len(found):
            raise InvalidValue(
                "some of the data are split by a `DistributedSampler` and others are not; split all alike."
            )
        first, *others = self._numbers.values()
        if self.paired and not all(np.array_equal(first, other) for other in others):
            raise InvalidValue("the samplers of the two data sets give other examples; let them have the same seed.")
        if self._examples is not None:
            raise InvalidValue("`examples` does not go with a `DistributedSampler`; take a `Subset` of the data set.")
        totals = [len(sampler_of(data).dataset) for data in self._by_id().values()]
        self.expected, self.length = (totals[0], len(first)) if self.paired else (sum(totals), None)
        return True

    def _by_id(self) -> dict[int, Any]:
        return {id(data): data for data in self._data.values()}

    def numbers(self, runner: Runner, seen: int, count: int) -> np.ndarray:
        """Return the numbers of a runner's next `count` examples, after it has `seen` some."""
        numbers = self._numbers.get(id(self._data[runner]))
        return self.start + seen + np.arange(count) if numbers is None else numbers[seen : seen + count]

    def __iter__(self) -> Iterator[dict[Runner, Any]]:
        """Yield for each runner its batch; those that hold the same data object share one iteration."""
        every = self._by_id()
        recorded = isinstance(self.runners[0], RecordedRunner)
        # what a sampler repeats, so that all processes get as many, comes last
        own = {key: len(numbers) for key, numbers in self._numbers.items()}
        iterators = [
            data if recorded else batches_of(data, own.get(key, self._examples)) for key, data in every.items()
        ]
        for batches in zip_longest(*iterators):
            of_data = dict(zip(every, batches, strict=True))
            found = {runner: of_data[id(data)] for runner, data in self._data.items()}
            if self.paired and len(every) > 1:
                _refuse_uneven(found)
            found = {runner: batch for runner, batch in found.items() if batch is not None}
            first = next(iter(found.values()))
            self.known = first.stop - first.start if recorded else length_if_known(first)
            yield found


def sampled_numbers(data: Any, rank: int, ranks: int) -> np.ndarray | None:
    """Return the numbers of the examples that a loader's `DistributedSampler` gives, without those that it repeats.

    None where the data have no such sampler.
    """
    sampler = sampler_of(data)
    if not isinstance(sampler, DistributedSampler):
        return None
    total, given = len(sampler.dataset), f"rank {sampler.rank} of {sampler.num_replicas}"  # type: ignore[arg-type]
    if (sampler.rank, sampler.num_replicas) != (rank, ranks):
        raise InvalidValue(
            f"the `DistributedSampler` is for {given} and this is rank {rank} of {ranks}; leave its `rank` and "
            "`num_replicas` out."
        )
    if sampler.total_size < total or (loader_of(data).drop_last and len(sampler) % (loader_of(data).batch_size or 1)):
        raise InvalidValue(
            f"the `DistributedSampler` or its loader drops some of the {total:,} examples; set drop_last=False in "
            "both: what the sampler repeats is left out here."
        )
    numbers = np.fromiter(sampler, np.int64)
    numbers = numbers[rank + ranks * np.arange(len(numbers)) < total]  # behind them come those that are repeated
    if len(np.unique(numbers)) < len(numbers):
        raise InvalidValue(f"the sampler of {given} repeats examples in a way of its own; pass the data set instead.")
    return numbers


def _refuse_uneven(batches: Mapping[Runner, Any]) -> None:
    lengths = {runner.name: 0 if batch is None else runner.length(batch) for runner, batch in batches.items()}
    (a, n), *others = lengths.items()
    for b, m in others:
        if n != m and n is not None and m is not None:
            raise ShapeError(
                f"the data of {a!r} gave {n:,} examples in a batch and those of {b!r} {m:,}; give both the same "
                "examples in batches of the same size."
            )


def _refuse_other_orders(data: Mapping[Runner, Any]) -> None:
    """Refuse a loader that shuffles beside other data, as nothing pairs their examples."""
    shuffled = next((runner for runner, own in data.items() if reshuffles(own)), None)
    other = next((runner for runner, own in data.items() if shuffled and own is not data[shuffled]), None)
    if shuffled and other:
        raise InvalidValue(
            f"the data of {shuffled.name!r} are shuffled and do not pair with those of {other.name!r}; give both the "
            "same loader, loaders with shuffle=False, or generators with the same seed."
        )


def content_of(batches: Mapping[Runner, Any]) -> Any:
    """Return what of the batches of all runners the digest of the data is taken of, each thing once."""
    every = [runner.content(own) for runner, own in batches.items()]
    apart = list({id(content): content for content in every}.values())
    return apart[0] if len(apart) == 1 else {f"data {place}": content for place, content in enumerate(apart)}


def slices(start: int, stop: int) -> list[slice]:
    """Return a range of recorded examples, some at a time."""
    return [slice(first, min(first + SLICE, stop)) for first in range(start, stop, SLICE)]


def parse_part(part: Any) -> tuple[int, int]:
    """Return a part, written as "3/16" or (3, 16), as two numbers."""
    try:
        which, count = map(int, part.split("/")) if isinstance(part, str) else map(operator.index, part)
    except (TypeError, ValueError):
        raise InvalidValue(f"a part is written as '3/16', the third of sixteen; got {part!r}.") from None
    if not 1 <= which <= count:
        raise InvalidValue(f"parts are numbered from 1 to their count; got {which}/{count}.")
    return which, count


def data_name(data: Any) -> str:
    """Return what a result calls its data: the attribute `name` of them or of a loader's data set, or their type."""
    if data is None:
        return "recorded"
    name = getattr(data, "name", None)
    if isinstance(name, str):
        return name
    inner = getattr(data, "dataset", None)
    if isinstance(own := getattr(inner, "name", None), str):
        return own
    return type(inner).__name__ if inner is not None else type(data).__name__


# --- held for many passes ---------------------------------------------------------------------------------------------


class HeldExamples:
    """Examples of data that are held in memory, so that each pass gets the same batches: all, or some of them.

    Those with the smallest hashes of (seed, number) are taken, which no order of passes changes.
    """

    def __init__(self, data: Any, examples: int | None, count: int | None = None, seed: int = 0):
        self.name, self.remarks = data_name(data), tuple(getattr(data, "remarks", ()))
        total = examples_in(data, examples)
        if count is None or total is None or count >= total:
            self.batches = list(batches_of(data, examples))
        else:
            chosen = np.argsort(hashes(seed, np.arange(total)), kind="stable")[:count]
            self.batches = list(_picked(batches_of(data, examples), np.isin(np.arange(total), chosen)))
        self.examples = sum(length_if_known(batch) or 0 for batch in self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _picked(batches: Iterator[Any], wanted: np.ndarray) -> Iterator[Any]:
    start = 0
    for batch in batches:
        length = length_if_known(batch) or 0
        places = np.flatnonzero(wanted[start : start + length]).tolist()
        start += length
        if places:
            yield pick(batch, places)


class CachedRunner(Runner):
    """A model whose rows of each batch are kept from pass to pass, up to `limit` bytes; beyond them it runs again.

    A batch is recognised as the same object, so the passes must be fed from one list. Not for shapes that tell the
    size of a map beside its rows (``resize="average"``, ``"dft"``): only rows are kept.
    """

    def __init__(self, runner: ModelRunner, limit: int):
        self._runner, self.limit, self.held, self.runs = runner, limit, 0, 0
        self.name, self.kind = runner.name, runner.kind
        self.shapes: dict[str, str] = {}
        self._keep: Keep = lambda layer, rows, valid: rows
        self._order: dict[str, None] = {}  # in which the layers run, which is that of a comparison
        # with the batch itself, as the number of an object is free for others once it is gone
        self._kept: dict[int, tuple[Any, dict[str, Tensor], dict[str, Tensor | None]]] = {}
        self._valid: dict[str, Tensor | None] = {}
        self._resolutions: dict[str, float] = {}
        self.device, self.names_layers = runner.device, runner.names_layers

    @property
    def origin(self) -> dict[str, str]:
        return self._runner.origin

    def length(self, batch: Any) -> int | None:
        return self._runner.length(batch)

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        self._runner.targets, self._runner.wants_outputs = self.targets, self.wants_outputs
        with self._runner.ready(self._note):
            yield

    def rows(self, batch: Any) -> dict[str, Any]:
        kept = None if self.targets or self.wants_outputs else self._kept.get(id(batch))  # rows alone are kept
        _, rows, self._valid = kept or self._run(batch)
        return {layer: self._keep(layer, matrix, self._valid[layer]) for layer, matrix in rows.items()}

    def require_finite_inputs(self, batch: Any, number: int) -> None:
        self._runner.require_finite_inputs(batch, number)

    def gradients(self, target: Target) -> dict[str, Tensor]:
        return self._runner.gradients(target)

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        return self._runner.outputs(batch)

    def _note(self, layer: str, rows: Tensor, valid: Tensor | None) -> Tensor:
        self._order[layer] = None
        return rows

    def valid(self, layer: str) -> Tensor | None:
        return self._valid.get(layer)

    def resolution(self, layer: str) -> float:
        return self._resolutions.get(layer, 0.0)

    @property
    def left_out(self) -> dict[str, str]:
        return self._runner.left_out

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        return self._runner.weights(layers)

    def _run(self, batch: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor | None]]:
        found = self._runner.rows(batch)
        rows = {layer: found[layer] for layer in self._order}
        self.shapes |= self._runner.shapes
        self._resolutions |= {layer: self._runner.resolution(layer) for layer in rows}
        valid = {layer: self._runner.valid(layer) for layer in rows}
        self.runs += 1
        size = sum(matrix.nbytes for matrix in rows.values())
        if self.held + size <= self.limit:
            self.held += size
            self._kept[id(batch)] = (batch, rows, valid)
        return batch, rows, valid
