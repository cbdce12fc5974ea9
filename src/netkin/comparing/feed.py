"""Feed: the data of a pass as batches for each runner, whole or a part of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from netkin.comparing.subjects import RecordedRunner, Runner
from netkin.errors import ShapeError, ValueFault
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, part_of, shuffles_anew

SLICE = 512  # examples of recorded rows taken at a time


class Feed:
    """The data of a pass: batches for each runner, in step where they are not the same for all.

    `expected` is how many examples all parts together will give, if that is known, and `length` how many come here;
    `start` is the number of the first one here.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        data: Any,
        examples: int | None,
        part: Any = None,
        start: int = 0,
        paired: bool = True,
    ):
        self.runners, self._examples, self.start, self.paired = runners, examples, start, paired
        self._part = None if part is None else parsed_part(part)
        recorded = [runner for runner in runners if isinstance(runner, RecordedRunner)]
        if recorded:
            self._of_recorded(recorded, data, examples)
        else:
            self._data = {runner: data if runner.data is None else runner.data for runner in runners}
            for runner, own in self._data.items():
                if own is None:
                    alone = all(other.data is None for other in runners)
                    what = "`data` is missing" if alone else f"{runner.name!r} has no data"
                    raise ValueFault(f"{what}: pass a loader, an iterable of batches or one array of inputs.")
            if paired:
                _refuse_other_orders(self._data)
            self.expected = self._counted(examples)
        self.length = self.expected
        if self._part is not None:
            self._cut(*self._part)

    @property
    def is_one(self) -> bool:
        """Whether all runners see the same data."""
        return len({id(data) for data in self._data.values()}) == 1

    def examples_of(self, runner: Runner) -> int | None:
        """Return how many examples a runner will see, if that is known."""
        return self.expected if self.paired else examples_in(self._data[runner], self._examples)

    def _counted(self, examples: int | None) -> int | None:
        """Return how many examples come, if that is known: where they are not paired, those of all data together."""
        counts = [examples_in(data, examples) for data in {id(data): data for data in self._data.values()}.values()]
        if self.paired:
            return counts[0]
        return None if None in counts else sum(count or 0 for count in counts)

    def _of_recorded(self, recorded: Sequence[RecordedRunner], data: Any, examples: int | None) -> None:
        if len(recorded) < len(self.runners):
            raise ValueFault(
                "a model and recorded rows can't be compared: nothing tells whether they saw the same examples. "
                "Record both."
            )
        counts = {runner.name: runner.examples for runner in recorded}
        if len(set(counts.values())) > 1:
            (a, n), (b, m) = next(iter(counts.items())), next(c for c in counts.items() if c[1] != recorded[0].examples)
            raise ShapeError(f"{a!r} holds {n:,} examples and {b!r} {m:,}; record both on the same examples.")
        if data is not None:
            raise ValueFault("recorded rows are compared as they are; leave `data` out.")
        if examples is not None and examples < 1:
            raise ValueFault(f"`examples` must be at least 1; got {examples}.")
        self.expected = min(recorded[0].examples, examples or recorded[0].examples)
        self._data = dict.fromkeys(recorded, slices(0, self.expected))

    def _cut(self, which: int, count: int) -> None:
        """Leave of all data the part `which` of `count`, a contiguous range of examples."""
        if self.expected is None:
            raise ValueFault(
                "data that do not tell how many they are can't be split into parts; give each part `start`."
            )
        if count > self.expected:
            raise ValueFault(f"{self.expected:,} examples can't be split into {count:,} parts; take fewer.")
        is_recorded, cut = isinstance(self.runners[0], RecordedRunner), {}
        first, last = self.expected * (which - 1) // count, self.expected * which // count
        for key, data in {id(data): data for data in self._data.values()}.items():
            own = self.expected if is_recorded else examples_in(data, self._examples) or self.expected
            ends = own * (which - 1) // count, own * which // count
            cut[key] = slices(*ends) if is_recorded else part_of(data, *ends)
        self._data = {runner: cut[id(data)] for runner, data in self._data.items()}
        self._examples, self.start, self.length = None, self.start + first, last - first

    def __iter__(self) -> Iterator[dict[Runner, Any]]:
        """Yield for each runner its batch; those that hold the same data object share one iteration."""
        every = {id(data): data for data in self._data.values()}
        recorded = isinstance(self.runners[0], RecordedRunner)
        iterators = [data if recorded else batches_of(data, self._examples) for data in every.values()]
        for batches in zip_longest(*iterators):
            of_data = dict(zip(every, batches, strict=True))
            found = {runner: of_data[id(data)] for runner, data in self._data.items()}
            if self.paired and len(every) > 1:
                _refuse_uneven(found)
            yield {runner: batch for runner, batch in found.items() if batch is not None}


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
    shuffled = next((runner for runner, own in data.items() if shuffles_anew(own)), None)
    other = next((runner for runner, own in data.items() if shuffled and own is not data[shuffled]), None)
    if shuffled and other:
        raise ValueFault(
            f"the data of {shuffled.name!r} are shuffled and do not pair with those of {other.name!r}; give both the "
            "same loader, loaders with shuffle=False, or generators with the same seed."
        )


def slices(start: int, stop: int) -> list[slice]:
    """Return a range of recorded examples, some at a time."""
    return [slice(first, min(first + SLICE, stop)) for first in range(start, stop, SLICE)]


def parsed_part(part: Any) -> tuple[int, int]:
    """Return a part, written as "3/16" or (3, 16), as two numbers."""
    try:
        which, count = map(int, part.split("/")) if isinstance(part, str) else map(operator.index, part)
    except (TypeError, ValueError):
        raise ValueFault(f"a part is written as '3/16', the third of sixteen; got {part!r}.") from None
    if not 1 <= which <= count:
        raise ValueFault(f"parts are numbered from 1 to their count; got {which}/{count}.")
    return which, count
