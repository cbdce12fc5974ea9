"""`AllPairs`: all pairs of many models, compared pass by pass by a plan."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, cast

from torch import nn
from torch.utils.data import RandomSampler

from netkin.comparing.alignment import Pairs
from netkin.comparing.engines import Engine, Local, PassEngine, named_engine
from netkin.comparing.feed import CachedRunner, HeldExamples, data_name
from netkin.comparing.pairs_job import PairsJob, data_digest, identity_of_study, read_plan
from netkin.comparing.pairs_plan import ModelBlock, PairsWay, Planner, load_if_named
from netkin.comparing.pass_statistics import Statistics
from netkin.comparing.planning import weights_alone
from netkin.comparing.request import Options, Request
from netkin.comparing.subjects import ModelRunner, Subject
from netkin.errors import InvalidValue, MemoryLimit
from netkin.identity import COMPARE, described_call, forms_by_name, settings_digest, state_noted, weights_digest
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.progress import reported
from netkin.representations.inputs import examples_in, reshuffles, sampler_of
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.sources.models import names_weights
from netkin.sources.weights import remark_on
from netkin.statistics.collector import Study

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
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
                raise InvalidValue(f"`rows` is the size of a sample of the examples, 1 or more; got {rows!r}.")
            self._refuse_other_data("rows")

    def _refuse_other_data(self, option: str) -> None:
        if any(isinstance(one, Subject) or not isinstance(one, (str, nn.Module)) for one in self.given.values()):
            raise InvalidValue(
                f"`{option}` goes with models that all see `data`; leave it out, or give them no data of their own."
            )

    def compare(self, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparison of every pair, in the order of the pairs."""
        running = named_engine(self.engine)
        if not isinstance(running, PassEngine):  # which goes through them by a plan of its own
            return self._on_cluster(running, measures)
        named = any(isinstance(one, str) for one in self.given.values())
        if self.rows is None and (not named or isinstance(self.data, Iterator)):
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
        planner = self.planner(measures)
        ways, _ = planner.ways(self.rows, keeps=self.engine == "local")
        return ways[planner.chosen(ways)], planner.study.limit

    def _on_cluster(self, engine: Engine, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparisons that the workers of a cluster make, of all models that do not fail."""
        with engine.working():
            call = self.call_on(engine)
            made: list[Comparison] = call.compare(measures, {})
            self.failed = call.failed
            return [_as_sample(one, call.sampled_of) for one in made]

    def call_on(self, engine: Engine) -> Any:
        """Return the call for the workers of a cluster."""
        call = engine.request(self.given, self.options, self.pairs, self.study, self.data, self.examples, self.partial)
        call.rows = self.rows
        return call

    # --- as a job -----------------------------------------------------------------------------------------------------

    def keep(self, measures: Sequence[Measure], save: str | os.PathLike[str], overwrite: bool) -> Comparisons:
        """Return the comparison of every pair, saved in the file `save`, beside which finished parts lie."""
        self._refuse_keeping()
        options: dict[str, Any] = {"call": self._call(measures), "overwrite": overwrite, "compare": COMPARE}
        job = Job.beside(save, "comparison", self._identity(measures), **options)
        live = {name: model for name, model in self.given.items() if isinstance(model, nn.Module)}
        with job, state_noted(job, live):
            way, limit = self._planned(job, measures)
            self.study = replace(self.study, limit=limit)
            found = self._through(way, measures, PairsJob(job, measures, way.blocks, way.sample))
            made = Comparisons(found, self.failed)
            job.save(lambda: made)
            return made

    def _refuse_keeping(self) -> None:
        if self.engine != "local":
            raise InvalidValue(
                "`save` is for one process and for engine='ray'; under torchrun leave it out, and let one rank call "
                "`.save(path)` of the result."
            )
        if self.partial:
            raise InvalidValue("with `save` all that is finished is kept, also after Ctrl-C; leave `partial` out.")
        if isinstance(self.data, Iterator):
            raise InvalidValue("a stream can be read only once, and a job is continued; pass a loader or a list.")
        self._refuse_other_data("save")

    def _identity(self, measures: Sequence[Measure]) -> dict[str, Any]:
        weights, forms = dict[str, str](), dict[str, Any]()
        for name in self.given:
            model = self._live([name])[name]
            weights[name] = weights_digest(model)
            forms |= forms_by_name({name: model} if isinstance(model, nn.Module) else {})
        data = "none" if weights_alone(measures) else data_digest(self.data, self.examples)
        settings = Request({}, self.options, self.pairs, self.study)._settings()
        own = identity_of_study(weights, data, self.options.layers, settings | {"rows": str(self.rows)}, measures)
        return own | {"architecture": forms}

    def _call(self, measures: Sequence[Measure]) -> str:
        told = {"data": data_name(self.data)} if self.data is not None else {}
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

        return read_plan(job.part(f"plan of {settings_digest(self.pairs.of)}", plan))

    @property
    def _everything(self) -> ModelBlock:
        return ModelBlock(tuple(self.given), tuple(self.pairs.of))

    def _live(self, names: Sequence[str]) -> dict[str, Any]:
        """Return models, of which those given by name are loaded."""
        return {name: load_if_named(self.given[name], name, list(self.given)) for name in names}

    @property
    def _is_repeatable(self) -> bool:
        """Whether each pass over the data gives the same examples in the same order."""
        own = [one.data for one in self.given.values() if isinstance(one, Subject)]
        return self.engine == "local" and not any(
            isinstance(data, Iterator) or reshuffles(data) for data in (self.data, *own)
        )

    def remarks(self) -> tuple[str, ...]:
        """Return which models have random weights; a model whose name says where its weights are is not loaded."""
        unsure = [name for name, one in self.given.items() if not (isinstance(one, str) and names_weights(one))]
        live = (self._live([name])[name] for name in unsure)
        models = (one.thing if isinstance(one, Subject) else one for one in live)
        said = (remark_on(unwrapped(one)) for one in models if isinstance(one, nn.Module))
        return tuple(dict.fromkeys(filter(None, said)))

    def planner(self, measures: Sequence[Measure]) -> Planner:
        """Return what was found out of the models and the data."""
        if isinstance(self.data, Iterator):
            raise InvalidValue(
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
        data = self.data
        if way.keeps_rows or way.is_sample:
            data = HeldExamples(data, self.examples, way.sample, self.study.seed)
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
            raise InvalidValue(
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
                self.models[name] = model
                if way.keeps_rows:
                    self.models[name] = CachedRunner(cast(ModelRunner, self.options.runner(name, model)), limit)
        return {name: self.models[name] for name in block.models}

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

    def pair_seconds(self, measures: Sequence[Measure]) -> list[float]:
        """Return the seconds of the forward passes of two models, of their statistics and of reading them."""
        planner = self.planner(measures)
        ways, _ = planner.ways(None, keeps=False)
        planner.speed = replace(planner.speed, pair=self.reading_seconds(measures))
        return list(planner.speed.seconds(ways["blocks"], 1))

    def reading_seconds(self, measures: Sequence[Measure]) -> float:
        """Return how long it takes to read the measures of two models, after a few batches."""
        first = self.pairs.of[0]
        pairs = Pairs([first], self.pairs.which)
        request = Request(self._live(first), self.options, pairs, self.study, self.data, self.examples)
        batches = [next(iter(batch.values())) for batch in islice(request.feed_for(measures), TRIAL)]
        request.data, request.examples = batches, None
        request.study = replace(request.study, chunks=min(request.study.chunks, 2))
        statistics = request.collect(measures, {})
        taken = []
        for _ in range(2):  # the first also loads what reading needs
            begin = time.perf_counter()
            statistics.compare([measure.id for measure in measures])
            taken.append(time.perf_counter() - begin)
        return min(taken) / (request.study.chunks + 1) * (self.study.chunks + 1)


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
