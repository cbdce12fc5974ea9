"""Feed: the data of a pass as batches for each side, whole or in parts; and examples held for many passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, SequentialSampler, Subset

from netkin.comparing.sides import RecordedSide, Side, WeightsSide
from netkin.errors import InvalidValue, ShapeError
from netkin.representations import batches_of
from netkin.representations.inputs import (
    examples_in,
    length_if_known,
    loader_of,
    part_of,
    pick,
    reshuffles,
    sampler_of,
)
from netkin.sources.recordings import RecordedRows
from netkin.statistics.collector import hashes

SLICE = 512  # examples of recorded rows taken at a time


class Feed:
    """The data of a pass: batches for each side, in step where they are not the same for all.

    `expected` is how many examples all parts together will give, if that is known, and `length` how many come here;
    `start` is the number of the first one here. With `shared` the part is that of one process of several: a loader
    with a `DistributedSampler` gives it by itself, and its examples have the numbers that the sampler gives.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        data: Any,
        examples: int | None,
        part: tuple[int, int] | None = None,
        start: int = 0,
        paired: bool = True,
        shared: bool = False,
    ):
        self.sides, self._examples, self.start, self.paired, self._shared = sides, examples, start, paired, shared
        self._numbers: dict[int, np.ndarray] = {}  # of the examples of data that samplers have split
        recorded = [side for side in sides if isinstance(side, RecordedSide)]
        self._order: dict[Side, np.ndarray] = {}  # where a recorded side has the examples, if in another order
        self._step = min((side.at_once for side in recorded if side.at_once is not None), default=SLICE)
        # with data as well, these say which of the recorded examples are meant
        by_data = data is not None and all(side.recording is not None for side in recorded)
        self.is_recorded = bool(recorded) and len(recorded) == len(sides) and not by_data
        if self.is_recorded:
            self.expected: int | None = self._recorded_examples(recorded, data)
            self._data: dict[Side, Any] = dict.fromkeys(sides, self._slices(0, self.expected))
        else:
            live = next((side.data for side in sides if side.data is not None), None)
            recorded_data = live if data is None else data  # of a recorded side, those that a model runs on
            self._data = {
                side: (recorded_data if isinstance(side, RecordedSide) else data) if side.data is None else side.data
                for side in sides
            }
            self._require_data()
            for side in recorded:
                if side.recording is not None:
                    require_numbered(self._data[side], side.recording)
            if paired:
                _require_same_orders(self._data)
            counts = [examples_in(source, examples) for source in self._sources.values()]
            self.expected = counts[0] if paired else None if None in counts else sum(count or 0 for count in counts)
        self.length = self.expected
        if part is not None and not (shared and self._take_sampled(*part)):
            self._cut(*part)

    @property
    def _sources(self) -> dict[int, Any]:
        """The data of all sides, each object once."""
        return {id(data): data for data in self._data.values()}

    @property
    def is_one(self) -> bool:
        """Whether all sides get the same data."""
        return len(self._sources) == 1

    def examples_of(self, side: Side) -> int | None:
        """Return how many examples a side will get, if that is known."""
        return self.expected if self.paired else examples_in(self._data[side], self._examples)

    def _recorded_examples(self, recorded: Sequence[RecordedSide], data: Any) -> int:
        first, examples = recorded[0].name, recorded[0].examples
        for side in recorded[1:]:
            if side.recording is not None and recorded[0].recording is not None:
                order = side.recording.order_of(recorded[0].recording)
                self._order |= {} if order is None else {side: order}
        for side in recorded:
            if side.examples != examples:
                raise ShapeError(
                    f"{first!r} holds {examples:,} examples and {side.name!r} {side.examples:,}; record both on the "
                    "same examples."
                )
        if data is not None:
            raise InvalidValue("recorded rows are compared as they are; leave `data` out.")
        return min(examples, self._examples or examples)

    def _require_data(self) -> None:
        for side, data in self._data.items():
            if isinstance(side, WeightsSide):
                side.require_no_data()
            if data is None:
                alone = all(other.data is None for other in self.sides)
                what = "`data` is missing" if alone else f"{side.name!r} has no data"
                raise InvalidValue(
                    f"{what}: pass a loader, an iterable of batches or one array of inputs.", argument="data"
                )

    def _cut(self, which: int, count: int) -> None:
        """Leave of all data the part `which` of `count`, a contiguous range of examples."""
        argument = None if self._shared else "part"
        if self.expected is None:
            remedy = f"shared by {count:,} processes; pass a data set, an array or a loader that has a length."
            raise InvalidValue(
                "data that do not tell how many they are can't be "
                + (remedy if self._shared else "split into parts; give each part `start`."),
                argument=argument,
            )
        if count > self.expected:
            remedy = f"shared by {count:,} processes; start" if self._shared else f"split into {count:,} parts; take"
            raise InvalidValue(f"{self.expected:,} examples can't be {remedy} fewer.", argument=argument)
        parts, lengths = {}, []
        for key, data in self._sources.items():
            examples = self.expected if self.is_recorded else examples_in(data, self._examples) or self.expected
            ends = examples * (which - 1) // count, examples * which // count
            parts[key] = self._slices(*ends) if self.is_recorded else part_of(data, *ends)
            lengths.append(ends[1] - ends[0])
        self._data = {side: parts[id(data)] for side, data in self._data.items()}
        self._examples, self.start = None, self.start + self.expected * (which - 1) // count
        self.length = lengths[0] if self.paired else sum(lengths)

    def _take_sampled(self, which: int, count: int) -> bool:
        """Number the examples by the data's own `DistributedSampler`; tell whether they have one."""
        sources = self._sources
        numbers = {key: sampled_numbers(data, which - 1, count) for key, data in sources.items()}
        self._numbers = {key: sampled for key, sampled in numbers.items() if sampled is not None}
        if not self._numbers:
            return False
        first, *others = self._numbers.values()
        if self.paired and not all(np.array_equal(first, other) for other in others):
            raise InvalidValue("the samplers of the two data sets give other examples; let them have the same seed.")
        if self._examples is not None:
            raise InvalidValue(
                "`examples` does not go with a `DistributedSampler`; take a `Subset` of the data set.",
                argument="examples",
            )
        totals = [len(sampler_of(data).dataset) for data in sources.values()]
        self.expected, self.length = (totals[0], len(first)) if self.paired else (sum(totals), None)
        return True

    def numbers(self, side: Side, seen: int, count: int) -> np.ndarray:
        """Return the numbers of a side's next `count` examples, after it has `seen` some."""
        numbers = self._numbers.get(id(self._data[side]))
        return self.start + seen + np.arange(count) if numbers is None else numbers[seen : seen + count]

    def __iter__(self) -> Iterator[dict[Side, Any]]:
        """Yield for each side its batch; those that hold the same data object share one iteration."""
        sources, seen = self._sources, 0
        # what a sampler repeats, so that all processes get as many, comes last
        counts = {key: len(numbers) for key, numbers in self._numbers.items()}
        iterators = [
            data if self.is_recorded else batches_of(data, counts.get(key, self._examples))
            for key, data in sources.items()
        ]
        for batches in zip_longest(*iterators):
            by_source = dict(zip(sources, batches, strict=True))
            step = {side: by_source[id(data)] for side, data in self._data.items()}
            if self.paired and len(sources) > 1:
                _require_even({side: batch for side, batch in step.items() if not isinstance(side, RecordedSide)})
            given = {side: batch for side, batch in step.items() if batch is not None}
            yield {side: self._of_side(side, batch, seen) for side, batch in given.items()}
            seen += length_if_known(next(iter(by_source.values()))) or 0

    def _of_side(self, side: Side, batch: Any, seen: int) -> Any:
        """Return the batch of a side: of recorded rows where the examples of a batch of data are."""
        if isinstance(batch, slice):
            return self._order[side][batch] if side in self._order else batch
        if not isinstance(side, RecordedSide):
            return batch
        return side.places(batch, self.numbers(side, seen, length_if_known(batch) or 0))

    def _slices(self, start: int, stop: int) -> list[slice]:
        """Return a range of recorded examples, some at a time."""
        return slices(start, stop, min(self._step, SLICE))


def sampled_numbers(data: Any, rank: int, ranks: int) -> np.ndarray | None:
    """Return the numbers of the examples that a loader's `DistributedSampler` gives, without those that it repeats.

    None where the data have no such sampler.
    """
    sampler = sampler_of(data)
    if not isinstance(sampler, DistributedSampler):
        return None
    total, place = len(sampler.dataset), f"rank {sampler.rank} of {sampler.num_replicas}"  # type: ignore[arg-type]
    if (sampler.rank, sampler.num_replicas) != (rank, ranks):
        raise InvalidValue(
            f"the `DistributedSampler` is for {place} and this is rank {rank} of {ranks}; leave its `rank` and "
            "`num_replicas` out."
        )
    if sampler.total_size < total or (loader_of(data).drop_last and len(sampler) % (loader_of(data).batch_size or 1)):
        raise InvalidValue(
            f"the `DistributedSampler` or its loader drops some of the {total:,} examples; set drop_last=False in "
            "both: what the sampler repeats is left out here."
        )
    numbers = np.fromiter(sampler, np.int64)
    return numbers[rank + ranks * np.arange(len(numbers)) < total]  # behind them come those that are repeated


def _require_even(batches: Mapping[Side, Any]) -> None:
    lengths = {side.name: 0 if batch is None else side.length(batch) for side, batch in batches.items()}
    (a, n), *others = lengths.items()
    for b, m in others:
        if n != m and n is not None and m is not None:
            raise ShapeError(
                f"the data of {a!r} gave {n:,} examples in a batch and those of {b!r} {m:,}; give both the same "
                "examples in batches of the same size."
            )


def _require_same_orders(data: Mapping[Side, Any]) -> None:
    """Refuse a loader that shuffles beside other data, as nothing pairs their examples."""
    shuffled = next((side for side, source in data.items() if reshuffles(source)), None)
    other = next((side for side, source in data.items() if shuffled and source is not data[shuffled]), None)
    if shuffled and other:
        raise InvalidValue(
            f"the data of {shuffled.name!r} are shuffled and do not pair with those of {other.name!r}; give both the "
            "same loader, loaders with shuffle=False, or generators with the same seed."
        )


def require_numbered(data: Any, recording: RecordedRows) -> None:
    """Refuse data that give examples in another order than that of their numbers, by which a recording has them."""
    sampler = sampler_of(data)
    in_order = sampler is None or isinstance(sampler, (SequentialSampler, DistributedSampler))
    is_sample = getattr(data, "is_sample", False)
    if recording.token_hashes is None and (is_sample or not in_order):
        raise InvalidValue(
            f"{recording.name!r} knows its examples by their numbers in the data, and these are "
            f"{'a sample' if is_sample else 'shuffled'}; give all of the data in their own order.",
            argument="examples" if is_sample else "data",
        )


def slices(start: int, stop: int, step: int = SLICE) -> list[slice]:
    """Return a range of examples, some at a time."""
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def data_name(data: Any) -> str:
    """Return what a result calls its data: the attribute `name` of them or of a loader's data set, or their type."""
    if data is None:
        return "recorded"
    if isinstance(getattr(data, "dataset", None), Subset):
        return f"Subset of {data_name(data.dataset)}"
    dataset = getattr(data, "dataset", None)
    names = (getattr(data, "name", None), getattr(dataset, "name", None))
    return next((name for name in names if isinstance(name, str)), type(data if dataset is None else dataset).__name__)


# --- held for many passes ---------------------------------------------------------------------------------------------


class HeldExamples:
    """Examples of data that are held in memory, so that each pass gets the same batches: all, or some of them.

    Those with the smallest hashes of (seed, number) are taken, which no order of passes changes.
    """

    def __init__(self, data: Any, examples: int | None, count: int | None = None, seed: int = 0):
        self.name = data_name(data)
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
