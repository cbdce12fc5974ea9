"""`AllPairs`: all pairs of many models, compared pass by pass according to the plan, or explained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import Engine, PassEngine, named_engine
from netkin.comparing.feed import CachedRunner
from netkin.comparing.pairs_plan import ModelBlock, PairsPlan, PairsWay, Planner, loaded
from netkin.comparing.planning import weights_alone
from netkin.comparing.request import Options, Request, name_of
from netkin.comparing.subjects import ModelRunner, Runner, Subject
from netkin.errors import MemoryLimit, ValueFault
from netkin.measures.registry import Measure
from netkin.memory import size_in_words
from netkin.progress import reported
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, length_if_known, pick, shuffles_anew
from netkin.results import Comparison
from netkin.statistics.collector import Study
from netkin.statistics.numbered_rows import hashes

TRIAL = 8  # batches at most on which two models are compared to see how long reading takes
HOUR = 3600.0


class AllPairs:
    """One call of `compare_many` or `explain_many`.

    Live models are first run all together: the first batch shows whether they fit.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        options: Options,
        pairs: Pairs,
        study: Study,
        data: Any,
        examples: int | None,
        rows: int | None = None,
        partial: bool = False,
        engine: str | Engine = "local",
    ):
        self.given, self.options, self.pairs, self.study = given, options, pairs, study
        self.data, self.examples, self.rows, self.partial, self.engine = data, examples, rows, partial, engine
        self.models: dict[str, Any] = {}  # those that run now
        self.failed: Mapping[str, str] = {}  # those that a cluster left out, and why
        if rows is not None:
            self._refuse_rows(rows)

    def _refuse_rows(self, rows: Any) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueFault(f"`rows` is how many examples may stand for all of them, from 1 on; got {rows!r}.")
        if any(isinstance(one, Subject) or not isinstance(one, (str, nn.Module)) for one in self.given.values()):
            raise ValueFault(
                "`rows` goes with models that all see `data`; leave it out, or give them no data of their own."
            )

    def compare(self, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparison of every pair, in the order of the pairs."""
        running = named_engine(self.engine)
        if not isinstance(running, PassEngine):  # which goes through them by a plan of its own
            return self._elsewhere(running, measures)
        if self._is_tried_first:
            try:
                return self._pass(self._everything, measures, self.given, self.data)
            except MemoryLimit:
                if not self._is_repeatable:
                    raise
        if weights_alone(measures):
            return self._pass(self._everything, measures, self._live(self._everything.models), self.data)
        planner = self._planner(measures)
        ways, _ = planner.ways(self.rows, keeps=self.engine == "local")
        return self._through(ways[planner.chosen(ways)], measures, planner)

    def _elsewhere(self, engine: Engine, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparisons that the workers of a cluster make, of all models that do not fail."""
        if self.rows is not None:
            raise ValueFault("`rows` is for one process; leave it out, as a cluster goes through all examples.")
        with engine.working():
            call = engine.request(
                self.given, self.options, self.pairs, self.study, self.data, self.examples, self.partial
            )
            made: list[Comparison] = call.compare(measures, {})
            self.failed = call.failed
            return made

    @property
    def _everything(self) -> ModelBlock:
        return ModelBlock(tuple(self.given), tuple(self.pairs.of))

    def _live(self, names: Sequence[str]) -> dict[str, Any]:
        """Return models, of which those given by name are loaded."""
        return {name: loaded(self.given[name], name, list(self.given)) for name in names}

    @property
    def _is_tried_first(self) -> bool:
        named = any(isinstance(one, str) for one in self.given.values())
        return not named and self.rows is None

    @property
    def _is_repeatable(self) -> bool:
        """Whether each pass over the data gives the same examples in the same order."""
        own = [one.data for one in self.given.values() if isinstance(one, Subject)]
        return self.engine == "local" and not any(
            isinstance(data, Iterator) or shuffles_anew(data) for data in (self.data, *own)
        )

    def _planner(self, measures: Sequence[Measure]) -> Planner:
        if isinstance(self.data, Iterator):
            raise ValueFault(
                "many models take several passes, and a stream can be read only once; pass a loader or a list."
            )
        running = named_engine(self.engine)
        with running.working():
            made = Planner(self.given, self.options, self.pairs, self.study, measures, self.data, self.examples)
            if isinstance(running, PassEngine):
                made.study = replace(made.study, limit=running.least(made.study.limit))
        return made

    def _through(self, way: PairsWay, measures: Sequence[Measure], planner: Planner) -> list[Comparison]:
        """Go a way: take its passes one after the other."""
        count = way.examples if way.is_sample else None
        data = HeldExamples(self.data, self.examples, count, self.study.seed) if way.keeps_rows or count else self.data
        made: dict[tuple[str, str], Comparison] = {}
        digest, held = "", way.rows
        for block in reported(way.blocks, "comparing", "passes"):
            things = self._runners(block, way, held)
            found = self._pass(block, measures, things, data)
            digest = self._same_data(digest, found[0])
            made |= {(one.a, one.b): _as_sample(one, way, planner) for one in found}
            if not all(one.complete for one in found):
                break
        return [made[pair] for pair in self.pairs.of if pair in made]

    def _same_data(self, before: str, one: Comparison) -> str:
        """Refuse data that give other examples in another pass."""
        digest = one.provenance.get("data digest", "")
        if before and digest != before:
            raise ValueFault(
                "the data give other examples, or another order, in each pass, and so many models need several; pass a "
                "loader with shuffle=False and without random transforms, or a higher `memory=`."
            )
        return digest

    def _runners(self, block: ModelBlock, way: PairsWay, limit: int) -> dict[str, Any]:
        """Return what runs in a pass: models given by name are loaded, and forgotten when no pass in a row has them."""
        keeps = set(self.given) if way.keeps_rows else set(block.models)
        self.models = {name: one for name, one in self.models.items() if name in keeps}
        for name in block.models:
            if name not in self.models:
                (model,) = self._live([name]).values()
                self.models[name] = self._cached(name, model, limit) if way.keeps_rows else model
        return {name: self.models[name] for name in block.models}

    def _cached(self, name: str, model: nn.Module, limit: int) -> Runner:
        runner = self.options.runner(name, model)
        assert isinstance(runner, ModelRunner)
        return CachedRunner(runner, limit)

    def _pass(
        self, block: ModelBlock, measures: Sequence[Measure], things: Mapping[str, Any], data: Any
    ) -> list[Comparison]:
        """Take one pass, and return the comparisons of its pairs."""
        running = named_engine(self.engine)
        examples = None if isinstance(data, HeldExamples) else self.examples
        with running.working():
            pairs = Pairs(block.pairs, self.pairs.which)
            request = running.request(things, self.options, pairs, self.study, data, examples, self.partial)
            return list(request.compare(measures, {}))

    # --- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, measures: Sequence[Measure]) -> PairsPlan:
        """Return the plan, with the time that it takes by a trial with two models."""
        planner = self._planner(measures)
        try:
            ways, why = planner.ways(self.rows, keeps=self.engine == "local")
        except MemoryLimit as refusal:
            return _refused(planner, str(refusal))
        planner.speed = replace(planner.speed, pair=self._trial(measures))
        return _explained(planner, ways, why)

    def _trial(self, measures: Sequence[Measure]) -> float:
        """Return how long it takes to read the measures of two models, after a few batches."""
        first = self.pairs.of[0]
        block = ModelBlock(first, (first,))
        request = Request(
            self._live(first), self.options, Pairs(block.pairs, self.pairs.which), self.study, self.data, self.examples
        )
        batches = []
        for batch in request._feed(measures):
            batches.append(next(iter(batch.values())))
            if len(batches) == TRIAL:
                break
        request.data, request.examples = batches, None
        request.study = replace(request.study, chunks=min(request.study.chunks, 2))
        statistics = request.collect(measures, {})
        begin = time.perf_counter()
        statistics.compare([measure.id for measure in measures])
        once = (time.perf_counter() - begin) / (request.study.chunks + 1)
        return once * (self.study.chunks + 1)


class HeldExamples:
    """Examples of data that are held in memory, so that each pass gets the same batches: all, or some of them.

    Those with the smallest hashes of (seed, number) are taken, which no order of passes changes.
    """

    def __init__(self, data: Any, examples: int | None, count: int | None = None, seed: int = 0):
        self.name, self.remarks = name_of(data), tuple(getattr(data, "remarks", ()))
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


def _as_sample(one: Comparison, way: PairsWay, planner: Planner) -> Comparison:
    """Return a comparison that says of what sample its values are, if they are of one."""
    if not way.is_sample:
        return one
    words = f"a sample of {one.examples:,} of {planner.total:,} examples"
    tables = {
        name: replace(table, exactness=words if table.exactness == "exact" else f"{table.exactness}, of {words}")
        for name, table in one.tables.items()
    }
    return replace(one, tables=tables, provenance=dict(one.provenance) | {"sample": f"{words}, seed {one.seed}"})


def _refused(planner: Planner, refusal: str) -> PairsPlan:
    way = PairsWay((ModelBlock(tuple(planner.given), ()),), planner.total, 0, 0, 0, 0, None)
    lines = (*_beginning(planner), f"would be refused: {refusal}")
    count = len(planner.pairs.of)
    return PairsPlan(
        len(planner.given), count, way, {}, 0, 0, planner.study.limit, planner.result(), None, lines, refusal
    )


def _explained(planner: Planner, ways: Mapping[str, PairsWay], why: Mapping[str, str]) -> PairsPlan:
    name, count, result = planner.chosen(ways), len(planner.pairs.of), planner.result()
    way = ways[name]
    parts = planner.speed.seconds(way, count)
    others = {other: _in_words(planner, one, result) for other, one in ways.items() if other != name} | dict(why)
    lines = [*_beginning(planner), f"way: {way.words}"]
    lines += [f"  {other}: {words}" for other, words in others.items()]
    lines += [
        f"forward passes: {way.runs * way.batches:,}"
        + (
            ", one of each model on each batch"
            if way.runs_once
            else f", {way.runs / len(planner.given):.1f} of each model on each batch"
        ),
        f"memory: {size_in_words(way.bytes)} for statistics, rows and models, whose limit is "
        f"{size_in_words(planner.study.limit)}, and {size_in_words(result)} for the result",
        f"  statistics of a pass {size_in_words(way.statistics)}, rows that are kept {size_in_words(way.rows)}, models "
        f"that are loaded {size_in_words(way.models)}",
        f"time: {_hours(sum(parts))} on this machine: {_hours(parts[0])} for forward passes, {_hours(parts[1])} for "
        f"statistics, {_hours(parts[2])} for reading the measures",
    ]
    return PairsPlan(
        len(planner.given), count, way, others, way.runs * way.batches, way.bytes + result, planner.study.limit, result,
        sum(parts), tuple(lines),
    )  # fmt: skip


def _beginning(planner: Planner) -> Iterator[str]:
    kinds = len(planner.kinds)
    yield f"models: {len(planner.given):,}, of {kinds:,} architecture{'s' * (kinds > 1)}"
    for first, names in planner.kinds.items():
        widest = max(planner.layers[first], key=lambda layer: layer.width)
        layers = f"{len(planner.layers[first]):,} layer{'s' * (len(planner.layers[first]) > 1)}"
        whom = f"{first} and {len(names) - 1:,} others" if len(names) > 1 else first
        yield f"  {whom}: {layers}, the widest {widest.name!r} with {widest.width:,} features"
    yield f"pairs of models: {len(planner.pairs.of):,}"
    total = "not known before they are read" if planner.total is None else f"{planner.total:,}"
    yield f"examples: {total}, in batches of up to {planner.batch:,}; data {name_of(planner.data)}"


def _in_words(planner: Planner, way: PairsWay, result: int) -> str:
    seconds = sum(planner.speed.seconds(way, len(planner.pairs.of)))
    size = size_in_words(way.bytes + result)
    return f"{way.words}, {way.runs * way.batches:,} forward passes, {size}, {_hours(seconds)}"


def _hours(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    return f"{seconds / HOUR:.2g} hours" if seconds > HOUR / 10 else f"{seconds:.2g} seconds"
