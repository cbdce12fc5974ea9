"""All pairs of many models: which run together, so that each pass fits the memory, and the cost of all passes.

Models are split into groups; a pass runs two of them, and every pair of models is compared in one pass. A model then
runs in as many passes as there are other groups. Where the rows of all models fit in memory, they are kept, and each
model runs once; where a sample of the examples is allowed, that is a third option. The plan takes the cheapest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.feed import Feed
from netkin.comparing.planning import Findings, Plan, make_plan, needs_of
from netkin.comparing.request import Options, Request
from netkin.comparing.subjects import Subject
from netkin.errors import MemoryLimit, blame
from netkin.measures.registry import Measure
from netkin.memory import format_bytes
from netkin.representations.hooks import leaves
from netkin.representations.shapes import shape_name
from netkin.results.packing import as_record
from netkin.results.values import Pair
from netkin.settings import random_states_kept
from netkin.sources import load_model
from netkin.statistics.collector import LayerSize, Study

GROUP = 128  # models of a group at most: larger ones save little, and a pass of two has 24,512 pairs
RESULT, TABLE = 7_400, 600  # bytes of a comparison and of each of its tables: 6,900 measured for 500,000, and a reserve
FILED = 500  # bytes of a comparison in a file beside its values
SIDE = 192  # rows and columns of the products by which this machine's speed is taken


@dataclass(frozen=True)
class ModelBlock:
    """Models that run together in one pass, and the pairs of them that are compared in it."""

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class PairsWay:
    """One way through all pairs: its blocks, and what it takes."""

    blocks: tuple[ModelBlock, ...]
    examples: int | None
    batches: int
    statistics: int  # bytes of the statistics of one pass
    rows: int  # bytes of the rows and inputs that are kept from pass to pass
    models: int  # bytes of the models that are loaded at once
    operations: int | None
    is_sample: bool = False

    @property
    def sample(self) -> int | None:
        """How many examples are sampled; None where all are taken."""
        return self.examples if self.is_sample else None

    @property
    def keeps_rows(self) -> bool:
        return self.rows > 0

    @property
    def runs(self) -> int:
        """How often models run on all examples, taken together."""
        every = [name for block in self.blocks for name in block.models]
        return len(set(every)) if self.keeps_rows else len(every)

    @property
    def runs_once(self) -> bool:
        """Whether each model runs once on each batch."""
        return self.runs == len({name for block in self.blocks for name in block.models})

    @property
    def bytes(self) -> int:
        return self.statistics + self.rows + self.models

    @property
    def together(self) -> int:
        """The number of models in the largest pass."""
        return max(len(block.models) for block in self.blocks)

    @property
    def words(self) -> str:
        """What is done, in a few words."""
        count = len(self.blocks)
        passes = (
            "1 pass of all models together" if count == 1 else f"{count:,} passes of up to {self.together:,} models"
        )
        kept = ", rows kept from the first" if self.keeps_rows else ""
        return passes + kept + (f", on a sample of {self.examples:,} examples" if self.is_sample else "")


def unpacked_way(told: Mapping[str, Any]) -> PairsWay:
    """Return the way that was taken apart by `asdict` and has been JSON since."""
    way = as_record(PairsWay, dict(told) | {"operations": None})
    return replace(way, operations=told["operations"])  # which may be more than fit 64 bits


@dataclass(frozen=True)
class Speed:
    """How long work takes here: a model on a batch, a multiply-add, and reading a pair of models; None if unknown."""

    batch: float
    operation: float
    pair: float = 0.0

    def seconds(self, way: PairsWay, pairs: int) -> tuple[float, float, float]:
        """Return the seconds of the forward passes, of the statistics and of reading."""
        return way.runs * way.batches * self.batch, (way.operations or 0) * self.operation, pairs * self.pair


# --- blocks of models -------------------------------------------------------------------------------------------------


def blocks_of(pairs: Sequence[Pair], size: int) -> list[ModelBlock]:
    """Return blocks of at most `2 * size` models, each pair in exactly one; consecutive blocks share models.

    Example:
        >>> [block.models for block in blocks_of([("a", "b"), ("a", "c"), ("b", "c")], 1)]
        [('a', 'c'), ('a', 'b'), ('b', 'c')]
    """
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    count = -(-len(names) // size)
    if count < 3:
        return [ModelBlock(tuple(names), tuple(pairs))]
    group = {name: place * count // len(names) for place, name in enumerate(names)}
    found: dict[tuple[int, int], list[Pair]] = {}
    for a, b in pairs:
        i, j = sorted((group[a], group[b]))
        # the pairs inside a group go with the pass of this group and the next, so that no pass has two such sets
        home = (i, j) if i != j else (min(i, (i + 1) % count), max(i, (i + 1) % count))
        found.setdefault(home, []).append((a, b))
    ordered = sorted(found, key=lambda place: (place[0], place[1] if place[0] % 2 else -place[1]))
    return [ModelBlock(tuple(name for name in names if group[name] in place), tuple(found[place])) for place in ordered]


def pass_plan(
    layers: Mapping[str, Sequence[LayerSize]], which: Any, study: Study, measures: Sequence[Measure], size: int
) -> Plan:
    """Return the plan of the largest pass of two groups of models; refuse one that does not fit the study's limit.

    Args:
        layers: the layers of each model.
        which: the pairs of layers that are compared, as `pairs` of a comparison.
        study: the examples, the chunks and the limit.
        measures: what is to be read.
        size: how many models a group has.
    """
    heavy = sorted(layers, key=lambda name: -sum(one.width**2 for one in layers[name]))[: 2 * size]
    whole = len(heavy) == len(layers)
    own = heavy if whole else heavy[:size]
    pairs = list(combinations(own, 2)) + ([] if whole else [(a, b) for a in own for b in heavy[size:]])
    names = {name: [one.name for one in layers[name]] for name in heavy}
    pair_blocks = Pairs(pairs, which).pair_blocks(names)
    alignment = Alignment([one for name in heavy for one in layers[name]], pair_blocks)
    study = replace(study, layers=alignment.layers, pair_blocks=alignment.pair_blocks)
    return make_plan(needs_of(measures), study)


def largest_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, to an eighth, 0 if none does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    if high > most and fits(most):
        return most
    high = min(high, most)
    while high - low > max(low // 8, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- finding the plan -------------------------------------------------------------------------------------------------


class Planner:
    """What was found out of the models and the data, from few examples of one model of each architecture."""

    def __init__(
        self,
        given: Mapping[str, Any],
        options: Options,
        pairs: Pairs,
        study: Study,
        measures: Sequence[Measure],
        data: Any,
        examples: int | None,
    ):
        self.given, self.options, self.pairs, self.study, self.measures = given, options, pairs, study, measures
        self.data, self.asked = data, examples
        alike: dict[Any, list[str]] = {}
        for name, thing in given.items():
            alike.setdefault(_architecture(name, thing, options), []).append(name)
        self.kinds = {names[0]: names for names in alike.values()}
        self.layers: dict[str, list[LayerSize]] = {}
        self.sizes: dict[str, int] = {}  # bytes of the models that are loaded when they are needed
        self.inputs, self.batch, self.batches = 0, 1, 0
        self.total: int | None = None
        self._plans: dict[Any, Plan | None] = {}
        self.speed = Speed(0.0, _operation_seconds())
        with random_states_kept(data=[data]):
            for first, names in self.kinds.items():
                try:
                    self._inspect(first, names)
                except Exception as fault:
                    blame(fault, first)
                    raise

    def _inspect(self, first: str, names: Sequence[str]) -> None:
        """Learn the layers of models that are alike from one of them, and how long it takes for a batch."""
        model = load_if_named(self.given[first], first, list(self.given))
        request = Request({first: model}, self.options, Pairs([]), self.study, self.data, self.asked)
        self.study = replace(self.study, limit=request.study.limit, device=request.study.device)
        feed = Feed(request.runners, self.data, self.asked, paired=False)
        self.total = feed.expected
        found = Findings(request.runners, self.measures, Pairs([]), self.study)
        found.inspect(feed)
        (runner,), sizes = request.runners, list(found.layers[first].values())
        batch = next(iter(feed))[runner]
        self.batch = found.batch
        self.inputs = sum(one.nbytes for _, one in leaves(batch) if isinstance(one, (torch.Tensor, np.ndarray)))
        self.speed = replace(self.speed, batch=max(self.speed.batch, _forward_seconds(runner, batch)))
        by_name = isinstance(self.given[first], str)
        for name in names:
            self.layers[name] = [replace(one, model=name) for one in sizes]
            state = leaves(model.state_dict()) if by_name else ()
            self.sizes[name] = sum(one.nbytes for _, one in state if isinstance(one, torch.Tensor))

    @property
    def keepable(self) -> str:
        """Why rows can't be kept; empty where they can."""
        shapes = self.options.shape.values() if isinstance(self.options.shape, Mapping) else [self.options.shape]
        if self.options.resizes or any(shape_name(one) == "dft" for one in shapes):
            return "maps are compared with their places, which rows alone do not tell"
        if any(need.feeds != {"activations"} for need in needs_of(self.measures)):
            return "the measures read gradients, outputs or weights"
        if not all(isinstance(one, (str, nn.Module)) for one in self.given.values()):
            return "some models have data of their own or are recorded already"
        return "" if self.total is not None else "the data do not tell how many they are"

    def ways(self, rows: int | None, keeps: bool = True) -> tuple[dict[str, PairsWay], dict[str, str]]:
        """Return the ways that fit the memory, and why others do not; with `rows`, a sample of so many examples too."""
        found: dict[str, PairsWay] = {}
        why: dict[str, str] = {}
        counts = [self.total] + ([rows] if rows is not None and self.total is not None and rows < self.total else [])
        for count in counts:
            prefix = "sample, " if count != self.total else ""
            for name, kept in (("blocks", False), ("rows kept", True)):
                if kept and prefix + "blocks" in found and found[prefix + "blocks"].runs_once:
                    continue  # nothing would be saved
                reason = "" if keeps else "several processes share the data"
                if kept and (reason := reason or self.keepable):
                    why[prefix + name] = reason
                    continue
                try:
                    found[prefix + name] = self._way(count, kept)
                except MemoryLimit as fault:
                    why[prefix + name] = str(fault)
        if not found:
            raise MemoryLimit(why["blocks"])
        return found, why

    def chosen(self, ways: Mapping[str, PairsWay]) -> str:
        """Return the cheapest way; one on all examples in which each model runs once needs no sample."""
        pairs, exact = len(self.pairs.of), [name for name, way in ways.items() if not way.is_sample]
        once = [name for name in exact if ways[name].runs_once]
        return min(once or list(ways), key=lambda name: sum(self.speed.seconds(ways[name], pairs)))

    def result(self) -> int:
        """Return the bytes of the result."""
        return (RESULT + TABLE * len(self.measures)) * len(self.pairs.of) + self._values

    def disk(self, way: PairsWay) -> tuple[int, int]:
        """Return the most bytes that a job takes on disk beside its result, and what it and the result take at the end.

        The sums of a pass are written again after each share of the data, before the old file goes.
        """
        left = 2 * (self._values + FILED * (len(self.pairs.of) + 16))
        return 2 * way.statistics + left, left

    @property
    def _values(self) -> int:
        """The bytes of all values with their replicates."""
        cells = sum(len(self.layers[a]) * len(self.layers[b]) for a, b in self.pairs.of[:1]) * len(self.pairs.of)
        return 8 * cells * len(self.measures) * (1 + self.study.chunks)

    def _way(self, examples: int | None, keeps_rows: bool) -> PairsWay:
        """Return the blocks of most models that fit beside all else that is held."""
        rows = self._rows(examples) if keeps_rows else 0
        most, held = len(self.given), rows + self._loaded(1, keeps_rows)
        if held > self.study.limit:
            what = "the rows of all models" if keeps_rows else "two models"
            raise MemoryLimit(
                f"{what} need {format_bytes(held)}, and the limit is {format_bytes(self.study.limit)}; use fewer "
                "`layers=` or `examples=`, or a higher `memory=`.",
                argument="memory",
            )
        size = largest_fit(lambda one: self._priced(one, examples, rows) is not None, min(most // 2 + most % 2, GROUP))
        if size == 0:
            self._pass_plan(1, examples, rows)  # which refuses
        blocks = blocks_of(self.pairs.of, size)
        plan = self._priced(size, examples, rows)
        assert plan is not None
        batches = -(-(examples or 1) // self.batch)
        return PairsWay(
            tuple(blocks), examples, batches, plan.bytes, rows, self._loaded(size, keeps_rows),
            self._operations(blocks, examples), examples != self.total,
        )  # fmt: skip

    def _rows(self, examples: int | None) -> int:
        """Return the bytes of all rows of all models, and of the inputs."""
        count = examples or 0
        each = sum(one.rows_of(count) * one.width * one.itemsize for own in self.layers.values() for one in own)
        return each + self.inputs * count // self.batch

    def _loaded(self, size: int, keeps_rows: bool) -> int:
        heavy = sorted(self.sizes.values(), reverse=True)
        return sum(heavy if keeps_rows else heavy[: 2 * size])

    def _priced(self, size: int, examples: int | None, rows: int) -> Plan | None:
        """Return the plan of the largest pass of two groups of `size` models; None where it does not fit."""
        key = (size, examples, rows)
        if key not in self._plans:
            try:
                self._plans[key] = self._pass_plan(*key)
            except MemoryLimit:
                self._plans[key] = None
        return self._plans[key]

    def _pass_plan(self, size: int, examples: int | None, rows: int) -> Plan:
        left = self.study.limit - rows - self._loaded(size, rows > 0)
        study = replace(self.study, examples=examples, limit=left)
        return pass_plan(self.layers, self.pairs.which, study, self.measures, size)

    def _operations(self, blocks: Sequence[ModelBlock], examples: int | None) -> int | None:
        """Return the multiply-adds of the statistics of all passes: of every layer in every pass, and of every pair."""
        if examples is None:
            return None
        widths = {name: sum(one.width**2 for one in own) for name, own in self.layers.items()}
        rows = max(one.rows_of(examples) for own in self.layers.values() for one in own)
        own = sum(widths[name] for block in blocks for name in block.models)
        ends = (self.pairs.of[0], self.pairs.of[-1])
        return rows * (own + len(self.pairs.of) * sum(map(self._products, ends)) // 2)

    def _products(self, pair: Pair) -> int:
        """Return the entries of the cross moments of two models."""
        layers: dict[Any, int] = {one.key: one.width for name in pair for one in self.layers[name]}
        names = {name: [one.name for one in self.layers[name]] for name in pair}
        pair_blocks = Pairs([pair], self.pairs.which).pair_blocks(names)
        return sum(layers[x] * layers[y] for left, right in pair_blocks for x in left for y in right)


def load_if_named(thing: Any, name: str, names: Sequence[str]) -> Any:
    """Return a model that was given by name, or the object itself; its index seeds random weights."""
    return load_model(thing, seed=names.index(name)) if isinstance(thing, str) else thing


def _architecture(name: str, thing: Any, options: Options) -> Any:
    """Return a key that models with the same layers share."""
    chosen = repr(options.layers_of(name)), id(options.forward[name]), id(options.transforms[name])
    if isinstance(thing, str):
        return thing.partition("@")[0], *chosen
    if isinstance(thing, nn.Module) and not isinstance(thing, Subject):
        return type(thing), tuple((key, tuple(one.shape)) for key, one in thing.state_dict().items()), *chosen
    return name, *chosen


def _forward_seconds(runner: Any, batch: Any) -> float:
    """Return how long a model takes for a batch, the second time."""
    with runner.ready(lambda layer, rows, valid: rows):
        runner.rows(batch)
        begin = time.perf_counter()
        runner.rows(batch)
        return time.perf_counter() - begin


def _operation_seconds() -> float:
    """Return how long a multiply-add of a product takes here."""
    square = torch.ones(SIDE, SIDE, dtype=torch.float64)
    square @ square
    begin = time.perf_counter()
    for _ in range(4):
        square @ square
    return (time.perf_counter() - begin) / 4 / SIDE**3
