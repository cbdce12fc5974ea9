"""`AllPairs`: all pairs of many models, compared pass by pass according to the plan, or explained."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
from torch import nn
from torch.utils.data import RandomSampler

from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import Engine, Local, PassEngine, named_engine
from netkin.comparing.feed import CachedRunner
from netkin.comparing.model_blocks import ModelBlock
from netkin.comparing.pairs_job import PairsJob, digest_of, identity_of_study, unpacked_way
from netkin.comparing.pairs_plan import PairsPlan, PairsWay, Planner, loaded, refused_plan, told_plan
from netkin.comparing.planning import weights_alone
from netkin.comparing.request import Options, Request, name_of
from netkin.comparing.study import Statistics
from netkin.comparing.subjects import ModelRunner, Runner, Subject
from netkin.errors import MemoryLimit, ValueFault
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.progress import reported
from netkin.representations import batches_of
from netkin.representations.inputs import examples_in, length_if_known, pick, sampler_of, shuffles_anew
from netkin.results import Comparison
from netkin.statistics.collector import Study
from netkin.statistics.numbered_rows import hashes

TRIAL = 8  # batches at most on which two models are compared to see how long reading takes
SHARES = 8  # into which the data of all passes are split, whose sums a job keeps


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
        self._refuse_other_data("rows")

    def _refuse_other_data(self, option: str) -> None:
        if any(isinstance(one, Subject) or not isinstance(one, (str, nn.Module)) for one in self.given.values()):
            raise ValueFault(
                f"`{option}` goes with models that all see `data`; leave it out, or give them no data of their own."
            )

    def compare(self, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparison of every pair, in the order of the pairs."""
        running = named_engine(self.engine)
        if not isinstance(running, PassEngine):  # which goes through them by a plan of its own
            return self._elsewhere(running, measures)
        if self._is_tried_first:
            try:
                return self._pass(self._everything, measures, self._live(list(self.given)), self.data)
            except MemoryLimit:
                if not self._is_repeatable:
                    raise
        if weights_alone(measures):
            return self._pass(self._everything, measures, self._live(self._everything.models), self.data)
        return self._through(self._cheapest(measures)[0], measures)

    def _cheapest(self, measures: Sequence[Measure]) -> tuple[PairsWay, int]:
        """Return the way to go, and the memory limit that it keeps."""
        planner = self._planner(measures)
        ways, _ = planner.ways(self.rows, keeps=self.engine == "local")
        return ways[planner.chosen(ways)], planner.study.limit

    def _elsewhere(self, engine: Engine, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparisons that the workers of a cluster make, of all models that do not fail."""
        with engine.working():
            call = self._call_elsewhere(engine)
            made: list[Comparison] = call.compare(measures, {})
            self.failed = call.failed
            return [_as_sample(one, call.sampled_of) for one in made]

    def _call_elsewhere(self, engine: Engine) -> Any:
        call = engine.request(self.given, self.options, self.pairs, self.study, self.data, self.examples, self.partial)
        call.rows = self.rows
        return call

    # --- as a job -----------------------------------------------------------------------------------------------------

    def keep(self, measures: Sequence[Measure], save: str | os.PathLike[str], overwrite: bool) -> list[Comparison]:
        """Return the comparison of every pair, whose finished parts lie beside the file `save`."""
        self._refuse_keeping()
        job = Job.beside(save, "comparison", self._identity(measures), call=self._call(measures), overwrite=overwrite)
        with job:
            way, limit = self._planned(job, measures)
            self.study = replace(self.study, limit=limit)
            return self._through(way, measures, PairsJob(job, measures, way.blocks))

    def _refuse_keeping(self) -> None:
        if self.engine != "local":
            raise ValueFault(
                "`save` is for one process and for engine='ray'; under torchrun leave it out, and let one rank call "
                "`.save(path)` of the result."
            )
        if self.partial:
            raise ValueFault("with `save` all that is finished is kept, also after Ctrl-C; leave `partial` out.")
        if isinstance(self.data, Iterator):
            raise ValueFault("a stream can be read only once, and a job is continued; pass a loader or a list.")
        self._refuse_other_data("save")

    def _identity(self, measures: Sequence[Measure]) -> dict[str, Any]:
        weights = {name: weights_digest(self._live([name])[name]) for name in self.given}
        data = "none" if weights_alone(measures) else digest_of(self.data, self.examples)
        settings = Request({}, self.options, self.pairs, self.study)._settings()
        return identity_of_study(weights, data, self.options.layers, settings | {"rows": str(self.rows)}, measures)

    def _call(self, measures: Sequence[Measure]) -> str:
        told = {"data": name_of(self.data)} if self.data is not None else {}
        return described_call(
            "nk.compare_many", models=list(self.given), **told, measures=[one.id for one in measures],
            layers=self.options.layers, pairs=self.pairs.which, examples=self.examples,
        )  # fmt: skip

    def _planned(self, job: Job, measures: Sequence[Measure]) -> tuple[PairsWay, int]:
        """Return the way and the memory limit with which the job was begun."""

        def plan() -> dict[str, Any]:
            everything = PairsWay((self._everything,), None, 0, 0, 0, 0, None), self.study.limit
            way, limit = everything if weights_alone(measures) else self._cheapest(measures)
            return {"way": asdict(way), "limit": limit}

        kept = job.part(f"plan of {settings_digest(self.pairs.of)}", plan).values
        return unpacked_way(kept["way"]), kept["limit"]

    @property
    def _everything(self) -> ModelBlock:
        return ModelBlock(tuple(self.given), tuple(self.pairs.of))

    def _live(self, names: Sequence[str]) -> dict[str, Any]:
        """Return models, of which those given by name are loaded."""
        return {name: loaded(self.given[name], name, list(self.given)) for name in names}

    @property
    def _is_tried_first(self) -> bool:
        named = any(isinstance(one, str) for one in self.given.values())
        return self.rows is None and (not named or isinstance(self.data, Iterator))

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

    def _through(self, way: PairsWay, measures: Sequence[Measure], parts: PairsJob | None = None) -> list[Comparison]:
        """Go a way: take its passes one after the other, with `parts` those that are not there already."""
        count = way.examples if way.is_sample else None
        data = HeldExamples(self.data, self.examples, count, self.study.seed) if way.keeps_rows or count else self.data
        made: dict[tuple[str, str], Comparison] = {}
        digest, total = "", examples_in(self.data, self.examples) if way.is_sample else None
        for block in reported(way.blocks, "comparing", "passes"):
            found = self._compared(block, way, measures, data, parts)
            digest = self._same_data(digest, found[0])
            made |= {(one.a, one.b): _as_sample(one, total) for one in found}
            if not all(one.complete for one in found):
                break
        return [made[pair] for pair in self.pairs.of if pair in made]

    def _compared(
        self, block: ModelBlock, way: PairsWay, measures: Sequence[Measure], data: Any, parts: PairsJob | None
    ) -> list[Comparison]:
        if parts is None:
            return self._pass(block, measures, self._runners(block, way, way.rows), data)

        def collect(share: int, shares: int) -> Statistics:
            part = None if shares == 1 else (share, shares)
            request = self._request(block, self._runners(block, way, way.rows), data, part)
            return cast(Statistics, request.collect(measures, {}))

        return parts.compared(block, self._shares(way), collect)

    def _shares(self, way: PairsWay) -> int:
        """Return into how many shares the data of a pass are split, whose sums a job keeps."""
        whole = way.keeps_rows or way.is_sample or way.examples is None
        if whole or isinstance(sampler_of(self.data), RandomSampler):
            return 1
        return max(1, min(SHARES // len(way.blocks), way.batches))

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
        with running.working():
            return list(self._request(block, things, data, running=running).compare(measures, {}))

    def _request(
        self, block: ModelBlock, things: Mapping[str, Any], data: Any, part: Any = None, running: Engine | None = None
    ) -> Any:
        examples = None if isinstance(data, HeldExamples) else self.examples
        pairs, engine = Pairs(block.pairs, self.pairs.which), running or Local()
        return engine.request(things, self.options, pairs, self.study, data, examples, self.partial, part)

    # --- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, measures: Sequence[Measure], keeps: bool = True) -> PairsPlan:
        """Return the plan, with the time that it takes by a trial with two models; `keeps` whether rows may be kept."""
        running = named_engine(self.engine)
        if not isinstance(running, PassEngine):
            plan: PairsPlan = self._call_elsewhere(running).explain(measures)
            return plan
        planner = self._planner(measures)
        try:
            ways, why = planner.ways(self.rows, keeps=keeps and self.engine == "local")
        except MemoryLimit as refusal:
            return refused_plan(planner, str(refusal))
        planner.speed = replace(planner.speed, pair=self._trial(measures))
        return told_plan(planner, ways, why)

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


def _as_sample(one: Comparison, total: int | None) -> Comparison:
    """Return a comparison that says of what sample of the `total` its values are, if they are of one."""
    if total is None:
        return one
    words = f"a sample of {one.examples:,} of {total:,} examples"
    tables = {
        name: replace(table, exactness=words if table.exactness == "exact" else f"{table.exactness}, of {words}")
        for name, table in one.tables.items()
    }
    return replace(one, tables=tables, provenance=dict(one.provenance) | {"sample": f"{words}, seed {one.seed}"})
