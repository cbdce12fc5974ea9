"""`compare_many` and `explain_many`: all pairs of several models, in one pass, or in blocks where memory is short.

One pass runs all models, if its statistics fit the memory. Else the models are split into groups; a pass runs two of
them, and every pair of models is compared in one pass. A model would then run in several passes: its rows are kept from
the first, where they fit beside the statistics. Where they do not, and `rows` allows it, a sample of the examples is
taken, whose rows are kept; else models run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import RandomSampler

from netkin import jobs
from netkin.comparing.alignment import Pairs
from netkin.comparing.compare import Call
from netkin.comparing.comparer import Comparer, found_measures
from netkin.comparing.engines import Engine, Local, PassEngine, named_engine
from netkin.comparing.feed import HeldExamples, data_name
from netkin.comparing.pairs_job import PairsJob, data_digest, identity_of_study
from netkin.comparing.plan import Plan, aligned, make_plan, needs_of, weights_alone
from netkin.comparing.sides import ModelInput, Reads
from netkin.comparing.spec import Measures, Options, Run, Spec, split, takes_options
from netkin.comparing.stream import Stream
from netkin.errors import InvalidValue, MemoryLimit, blame, refuse_half_characters
from netkin.identity import (
    COMPARE,
    described_call,
    forms_by_name,
    settings_digest,
    state_noted,
    weights_digest,
    with_call,
)
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.memory import format_bytes
from netkin.progress import reported, showing
from netkin.representations.hooks import leaves
from netkin.representations.inputs import examples_in, sampler_of
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.results.values import Pair
from netkin.settings import loaders_kept, random_states_kept
from netkin.sources import load_model
from netkin.sources.datasets import load_data, refuse_characters
from netkin.sources.models import names_weights, refuse_unknown_model
from netkin.sources.names import numbered
from netkin.sources.weights import remark_on
from netkin.statistics.collector import LayerSize

if TYPE_CHECKING:
    from typing_extensions import Unpack

GROUP = 128  # models of a group at most: larger ones save little, and a pass of two has 24,512 pairs
SHARES = 8  # into which the data of all passes are split, whose sums a job keeps
RESULT, TABLE = 7_400, 600  # bytes of a comparison and of each of its tables: 6,900 measured for 500,000, and a reserve


@with_call
@takes_options(without="names part start")
def compare_many(
    models: Mapping[str, Any] | Sequence[Any],
    data: Any = None,
    measures: Measures = ("cka",),
    **options: Unpack[Options],
) -> Comparisons:
    """Return the comparisons of all pairs of several models; each model runs once on each batch, if memory allows.

    Models in a list are named 0, 1, 2, ... A text is a model by name, as `nk.load_model` takes it, which is loaded when
    its turn comes. What does not fit the memory in one pass is split into several, in each of which some models are
    compared with some others, with the same numbers; `nk.explain_many` shows how.

    With `save` the result is written to that file, and what is finished lies beside it, in a folder such as
    ``many.netkin.job`` (see `netkin.jobs`): the same call continues there, also after the process was killed. Other
    weights, data or options are refused unless `overwrite`. Files that can't be written, as on a full disk, end
    nothing: an `nk.UnsavedWarning` names one, and the result is returned.

    Args:
        models: a mapping from names to models, texts for `nk.load_model`, recorded mappings or inputs, or a list.
        data: a loader, an iterable of batches or one array of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> many = compare_many({"a": {"x": X}, "b": {"x": X + 1}, "c": {"x": X**2}})
        >>> round(many["a", "b"]["x", "x"], 6)
        1.0
    """
    spec, run = split({**options, "measures": measures})
    engine = named_engine(run.engine)
    with showing(run.progress), loaders_kept(data):
        wanted = found_measures(measures)  # which may be misspelt, before data are loaded
        call = _call(models, data, spec, run, engine)
        if run.save is not None:
            jobs.refuse_output(run.save, overwrite=run.overwrite)
        return engine.compare_many(call, wanted)


@takes_options(without="names part start")
def explain_many(
    models: Mapping[str, Any] | Sequence[Any],
    data: Any = None,
    measures: Measures = ("cka",),
    **options: Unpack[Options],
) -> ManyPlan:
    """Return how `compare_many` would go about the same arguments: passes and bytes, before anything starts.

    A few examples of the first batch are run through one model of each architecture.

    Args:
        models: a mapping from names to models, texts for `nk.load_model`, recorded mappings or inputs, or a list.
        data: a loader, an iterable of batches or one array of inputs.

    Example:
        >>> nets = {f"net {seed}": torch.nn.Linear(4, 8) for seed in range(10)}
        >>> plan = explain_many(nets, torch.randn(50, 4), progress=False)
        >>> plan.pairs, plan.passes, len(plan.way.blocks)
        (45, 10, 1)
    """
    spec, run = split({**options, "measures": measures})
    engine = named_engine(run.engine)
    with showing(run.progress), loaders_kept(data):
        wanted = found_measures(measures)
        return engine.explain_many(_call(models, data, spec, run, engine), wanted)


def _call(models: Any, data: Any, spec: Spec, run: Run, engine: Engine) -> Call:
    """Return the call for all pairs of some models."""
    named = _named(models)
    if len(named) < 2:
        raise InvalidValue(f"`compare_many` needs at least two models; got {len(named)}.", argument="models")
    refuse_half_characters(named)
    refuse_characters(data, list(named.values()))
    if isinstance(data, str) and isinstance(engine, PassEngine):  # others load where they work
        for thing in named.values():
            if isinstance(thing, str):
                refuse_unknown_model(thing)
        data = load_data(data, models=list(named.values()))
    of = list(combinations(named, 2))
    return Call(named, data, spec, run, of, engine=engine if isinstance(engine, PassEngine) else Local())


def _named(models: Any) -> dict[str, Any]:
    """Return models by their names: those of a list by their numbers, or by what names them."""
    if isinstance(models, Mapping):
        return dict(models)
    if isinstance(models, str) or not isinstance(models, Iterable):
        raise InvalidValue(
            f"`models` must be a mapping from names to models, or a list; got {models!r}.", argument="models"
        )
    listed = list(models)
    if listed and all(isinstance(thing, str) for thing in listed):
        return dict(zip(numbered(listed), listed, strict=True))
    return {str(place): model for place, model in enumerate(listed)}


# --- the way through all pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelBlock:
    """Models that run together in one pass, and the pairs of them that are compared in it."""

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class PairsWay:
    """The way through all pairs: its blocks, and what it takes.

    Args:
        blocks: one for each pass.
        examples: how many are read; None where that is not known.
        batches: how many a pass reads.
        statistics: bytes of the statistics of one pass.
        rows: bytes of the rows and inputs that are kept from pass to pass.
        models: bytes of the models that are loaded at once.
        is_sample: whether the examples are a sample.
    """

    blocks: tuple[ModelBlock, ...]
    examples: int | None = None
    batches: int = 0
    statistics: int = 0
    rows: int = 0
    models: int = 0
    is_sample: bool = False

    @property
    def sample(self) -> int | None:
        """How many examples are sampled; None where all are taken."""
        return self.examples if self.is_sample else None

    @property
    def runs(self) -> int:
        """How often models run on all examples, taken together."""
        every = [name for block in self.blocks for name in block.models]
        return len(set(every)) if self.rows else len(every)

    @property
    def runs_once(self) -> bool:
        """Whether each model runs once on each batch."""
        return self.runs == len({name for block in self.blocks for name in block.models})

    @property
    def bytes(self) -> int:
        return self.statistics + self.rows + self.models

    @property
    def words(self) -> str:
        """What is done, in a few words."""
        count, most = len(self.blocks), max(len(block.models) for block in self.blocks)
        one = "1 pass of all models together"
        rows = ", rows kept from the first" if self.rows else ""
        sample = f", on a sample of {self.examples:,} examples" if self.is_sample else ""
        return (one if count == 1 else f"{count:,} passes of up to {most:,} models") + rows + sample


def way_from(values: Mapping[str, Any]) -> PairsWay:
    """Return the way that was taken apart by `asdict` and has been JSON since."""
    blocks = tuple(
        ModelBlock(tuple(block["models"]), tuple((a, b) for a, b in block["pairs"])) for block in values["blocks"]
    )
    return PairsWay(**dict(values) | {"blocks": blocks})


def plan_from(values: Mapping[str, Any]) -> ManyPlan:
    """Return the plan that was taken apart by `asdict`."""
    texts = {name: tuple(values[name]) for name in ("lines", "warnings")}
    return ManyPlan(**dict(values) | texts | {"way": way_from(values["way"])})


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


class Survey:
    """The sizes of models, and of the data, from a few examples of one model of each architecture."""

    def __init__(self, call: Call, measures: Sequence[Measure]):
        self.call, self.measures, self.total = call, measures, cast("int | None", None)
        self.inputs, self.batch = 0, 1  # bytes and examples of the first batch
        self.layers: dict[str, list[LayerSize]] = {}
        self.loaded: dict[str, int] = {}  # bytes of the models that are loaded when they are needed
        alike: dict[Any, list[str]] = {}
        for name, thing in call.models.items():
            alike.setdefault(_architecture(name, thing, call), []).append(name)
        self.kinds = {names[0]: names for names in alike.values()}
        self.limit, self.study = 0, call.study([])
        with random_states_kept(data=[call.data]):
            for first, names in self.kinds.items():
                try:
                    self._inspect(first, names)
                except Exception as fault:
                    blame(fault, first)
                    raise

    def _inspect(self, first: str, names: Sequence[str]) -> None:
        """Learn the layers of models that are alike from one of them."""
        thing = self.call.models[first]
        model = live(self.call, first)
        call = replace(self.call.of_some({first: model}, []), engine=Local())
        sides = call.sides()
        self.study = call.study(sides) if sides[0].device is not None else self.study
        feed = call.feed(sides, self.measures)
        self.total = feed.expected
        stream = Stream(sides, feed, Reads(resizes=bool(self.call.spec.resize)))
        with stream.open():
            sizes = list(stream.learn().values())
        self.batch = stream.batch_length
        arrays = (
            leaf for _, leaf in leaves(list(stream.first.values())) if isinstance(leaf, (torch.Tensor, np.ndarray))
        )
        self.inputs = max(self.inputs, sum(array.nbytes for array in arrays))
        state = leaves(model.state_dict()) if isinstance(thing, str) else ()
        held = sum(tensor.nbytes for _, tensor in state if isinstance(tensor, torch.Tensor))
        for name in names:
            self.layers[name] = [replace(size, model=name) for size in sizes]
            self.loaded[name] = held

    # --- the way ------------------------------------------------------------------------------------------------------

    def way(self, limit: int, keeps: bool) -> PairsWay:
        """Return the way that fits `limit` bytes; `keeps` whether rows may be kept."""
        blocks = self._way(limit, self.total, keeps=False)
        if blocks is not None and blocks.runs_once:
            return blocks
        if keeps and (replayed := self._way(limit, self.total, keeps=True)):
            return replayed
        rows = self.call.spec.rows
        if rows is not None and self.total is not None and rows < self.total:
            sampled = self._way(limit, rows, keeps=False)
            if sampled is not None and not sampled.runs_once and keeps:
                sampled = self._way(limit, rows, keeps=True) or sampled
            if sampled is not None:
                return sampled
        if blocks is None:
            self._pass_plan(limit, 1, self.total, 0)  # which refuses
            raise MemoryLimit(
                f"two models need {format_bytes(self._loaded(1, False))} and the limit is {format_bytes(limit)}; "
                "use a higher `memory=`.",
                argument="memory",
            )
        return blocks

    def _way(self, limit: int, examples: int | None, *, keeps: bool) -> PairsWay | None:
        """Return the blocks of most models that fit beside all else that is held; None where none do."""
        rows, count = self._rows(examples) if keeps else 0, len(self.call.models)
        sizes = dict.fromkeys(min(-(-count // groups), GROUP) for groups in range(2, count + 1))
        try:
            plan = self._pass_plan(limit, 1, examples, rows)
        except MemoryLimit:
            return None
        for size in sizes:
            with suppress(MemoryLimit):
                plan = self._pass_plan(limit, size, examples, rows)
                break
        batches = -(-(examples or 1) // self.batch)
        return PairsWay(
            tuple(blocks_of(self.call.of, size)), examples, batches, plan.bytes, rows, self._loaded(size, keeps),
            examples != self.total,
        )  # fmt: skip

    def _rows(self, examples: int | None) -> int:
        """Return the bytes of all rows of all models, and of the inputs."""
        count = examples or 0
        each = sum(size.rows_of(count) * size.width * size.itemsize for own in self.layers.values() for size in own)
        return each + self.inputs * count // self.batch

    def _loaded(self, size: int, keeps: bool) -> int:
        heavy = sorted(self.loaded.values(), reverse=True)
        return sum(heavy if keeps else heavy[: 2 * size])

    def _pass_plan(self, limit: int, size: int, examples: int | None, rows: int) -> Plan:
        """Return the plan of the largest pass of two groups of models; refuse one that does not fit."""
        left = limit - rows - self._loaded(size, rows > 0)
        heavy = sorted(self.layers, key=lambda name: -sum(one.width**2 for one in self.layers[name]))[: 2 * size]
        whole = len(heavy) == len(self.layers)
        own = heavy if whole else heavy[:size]
        pairs = list(combinations(own, 2)) + ([] if whole else [(a, b) for a in own for b in heavy[size:]])
        sizes = [one for name in heavy for one in self.layers[name]]
        study = replace(self.study, examples=examples, limit=left)
        _, study = aligned(sizes, Pairs(pairs, self.call.spec.pairs), study)
        return make_plan(needs_of(self.measures), study)

    @property
    def keepable(self) -> str:
        """Why rows can't be kept; empty where they can."""
        if any(need.feeds != {"activations"} for need in needs_of(self.measures)):
            return "the measures read gradients, outputs or weights"
        if not all(isinstance(thing, (str, nn.Module)) for thing in self.call.models.values()):
            return "some models have data of their own or are recorded already"
        return "" if self.total is not None else "the data do not tell how many they are"

    # --- what it leaves -----------------------------------------------------------------------------------------------

    def result(self) -> int:
        """Return the bytes of the result."""
        cells = sum(len(self.layers[a]) * len(self.layers[b]) for a, b in self.call.of)
        values = 8 * cells * len(self.measures) * (1 + self.call.spec.chunk_count)
        return (RESULT + TABLE * len(self.measures)) * len(self.call.of) + values


def live(call: Call, name: str) -> Any:
    """Return a model that was given by name, or the object itself; its place seeds random weights."""
    thing = call.models[name]
    return load_model(thing, seed=list(call.models).index(name)) if isinstance(thing, str) else thing


def _architecture(name: str, thing: Any, call: Call) -> Any:
    """Return a key that models with the same layers share."""
    functions = (getattr(call.spec, what) for what in ("forward", "transforms"))
    own = [one.get(name) if isinstance(one, Mapping) else one for one in functions]
    chosen = repr(call.layers_of(name)), *(id(one) if callable(one) else repr(one) for one in own)
    if isinstance(thing, str):
        return thing.partition("@")[0], *chosen
    if isinstance(thing, nn.Module):
        return type(thing), tuple((key, tuple(one.shape)) for key, one in thing.state_dict().items()), *chosen
    return name, *chosen


# --- the work ---------------------------------------------------------------------------------------------------------


class Many:
    """One call of `compare_many` or `explain_many` in this process, or in several that share the data."""

    def __init__(self, call: Call, measures: Sequence[Measure]):
        self.call, self.measures = call, measures
        self._sides: dict[str, Any] = {}  # that run now, or whose rows are kept
        if call.spec.rows is not None:
            self._refuse_other_data("rows")

    def _refuse_other_data(self, option: str) -> None:
        if any(
            isinstance(thing, ModelInput) or not isinstance(thing, (str, nn.Module))
            for thing in self.call.models.values()
        ):
            raise InvalidValue(
                f"`{option}` goes with models that all see `data`; leave it out, or give them no data of their own.",
                argument=option,
            )

    @property
    def _is_stream(self) -> bool:
        """Whether some data can be read only once: then one pass is all there is."""
        own = (thing.data for thing in self.call.models.values() if isinstance(thing, ModelInput))
        return any(isinstance(data, Iterator) for data in (self.call.data, *own))

    def way(self) -> tuple[PairsWay, int]:
        """Return the way through all pairs, and the memory limit that it keeps."""
        everything = PairsWay((ModelBlock(tuple(self.call.models), tuple(self.call.of)),))
        if self._is_stream or weights_alone(self.measures):
            return everything, self.call.study([]).limit
        with self.call.engine.working():
            survey = Survey(self.call, self.measures)
            limit = self.call.engine.least(survey.study.limit)
        return survey.way(limit, keeps=isinstance(self.call.engine, Local) and not survey.keepable), limit

    def comparisons(self) -> Comparisons:
        """Return the comparison of every pair, saved where that is asked for."""
        return Comparisons(self.compare()) if self.call.run.save is None else self.keep()

    def compare(self) -> list[Comparison]:
        """Return the comparison of every pair, in the order of the pairs."""
        way, limit = self.way()
        return self._through(way, replace(self.call, limit=limit))

    def keep(self) -> Comparisons:
        """Return the comparison of every pair, saved in a file, beside which finished parts lie."""
        run = self.call.run
        self._refuse_keeping()
        told = {"data": data_name(self.call.data)} if self.call.data is not None else {}
        text = described_call(
            "nk.compare_many", models=list(self.call.models), **told, measures=[one.id for one in self.measures],
            layers=self.call.spec.layers, pairs=self.call.spec.pairs, examples=self.call.spec.examples,
        )  # fmt: skip
        assert run.save is not None
        options: dict[str, Any] = {"call": text, "overwrite": run.overwrite, "compare": COMPARE}
        job = Job.beside(run.save, "comparison", self._identity(), **options)
        modules = {name: model for name, model in self.call.models.items() if isinstance(model, nn.Module)}
        with job, state_noted(job, modules):
            way, limit = self._planned(job)
            made = self._through(
                way, replace(self.call, limit=limit), PairsJob(job, self.measures, way.blocks, way.sample)
            )
            result = Comparisons(made)
            job.save(lambda: result)
            return result

    def _refuse_keeping(self) -> None:
        if not isinstance(self.call.engine, Local):
            raise InvalidValue(
                "`save` is for one process and for engine='ray'; under torchrun leave it out, and let one rank call "
                "`.save(path)` of the result.",
                argument="save",
            )
        if self.call.run.partial:
            raise InvalidValue(
                "with `save` all that is finished is kept, also after Ctrl-C; leave `partial` out.", argument="partial"
            )
        if self._is_stream:
            raise InvalidValue("a stream can be read only once, and a job is continued; pass a loader or a list.")
        self._refuse_other_data("save")

    def _identity(self) -> dict[str, Any]:
        weights, forms = dict[str, str](), dict[str, Any]()
        for name in self.call.models:
            model = live(self.call, name)
            weights[name] = weights_digest(model)
            forms |= forms_by_name({name: model} if isinstance(model, nn.Module) else {})
        data = "none" if weights_alone(self.measures) else data_digest(self.call.data, self.call.spec.examples)
        settings = self.call.settings() | {"rows": str(self.call.spec.rows)}
        identity = identity_of_study(weights, data, self.call.spec.layers, settings, self.measures)
        return identity | {"architecture": forms}

    def _planned(self, job: Job) -> tuple[PairsWay, int]:
        """Return the way and the memory limit with which the job was begun."""

        def plan() -> dict[str, Any]:
            way, limit = self.way()
            return {"way": asdict(way), "limit": limit}

        def read(part: Any) -> tuple[PairsWay, int]:
            return way_from(part.values["way"]), int(part.values["limit"])

        name = f"plan of {settings_digest(self.call.of)}"
        return job.recall(name, read) or read(job.part(name, plan))

    def _through(self, way: PairsWay, call: Call, parts: PairsJob | None = None) -> list[Comparison]:
        """Take the passes one after the other, with `parts` those that are not there already."""
        if way.rows or way.is_sample:
            call = replace(call, data=HeldExamples(call.data, call.spec.examples, way.sample, call.spec.seed))
            call = replace(call, spec=replace(call.spec, examples=None))
        made: dict[Pair, Comparison] = {}
        total = examples_in(self.call.data, self.call.spec.examples) if way.is_sample else None
        digest = ""
        for block in reported(way.blocks, "comparing", "passes"):
            found = self._compared(block, way, call, parts)
            digest = _same_data(digest, found[0])
            made |= {(one.a, one.b): as_sample(one, total) for one in found}
            if not all(one.complete for one in found):
                break
        return [made[pair] for pair in self.call.of if pair in made]

    def _compared(self, block: ModelBlock, way: PairsWay, call: Call, parts: PairsJob | None) -> list[Comparison]:
        if parts is None:
            with call.engine.working():
                return self._block_call(block, way, call).compare(self.measures)

        def collect(share: int, shares: int) -> Comparer:
            own = self._block_call(block, way, call)
            part = None if shares == 1 else (share, shares)
            return replace(own, spec=replace(own.spec, part=part)).collect(self.measures)

        return parts.compared(block, self._shares(way), collect)

    def _shares(self, way: PairsWay) -> int:
        """Return into how many shares the data of a pass are split, whose sums a job keeps."""
        whole = way.rows > 0 or way.is_sample or way.examples is None
        if whole or isinstance(sampler_of(self.call.data), RandomSampler):
            return 1
        return max(1, min(SHARES // len(way.blocks), way.batches))

    def _block_call(self, block: ModelBlock, way: PairsWay, call: Call) -> Call:
        """Return the call of a pass: models given by name are loaded, and forgotten when no pass in a row has them."""
        keeps = set(self.call.models) if way.rows else set(block.models)
        self._sides = {name: side for name, side in self._sides.items() if name in keeps}
        for name in block.models:
            if name not in self._sides:
                self._sides[name] = live(self.call, name)
                if way.rows:
                    (self._sides[name],) = call.of_some({name: self._sides[name]}, []).sides(keep=way.rows)
        return call.of_some({name: self._sides[name] for name in block.models}, list(block.pairs))

    # --- the plan in words --------------------------------------------------------------------------------------------

    def explained(self, *, keeps_rows: bool = True) -> ManyPlan:
        """Return the plan in figures and in words; what the work would refuse is in `refused`.

        `keeps_rows` is whether rows may be kept from pass to pass.
        """
        call = self.call
        if self._is_stream:
            raise InvalidValue(
                "`explain_many` reads the first batch, and what it takes from an iterator is gone; pass a loader or a "
                "list."
            )
        with call.engine.working():
            survey = Survey(call, self.measures)
            limit = call.engine.least(survey.study.limit)
        keeps = keeps_rows and isinstance(call.engine, Local) and not survey.keepable
        remarks = _remarks(call)
        try:
            way = survey.way(limit, keeps)
        except MemoryLimit as fault:
            everything = PairsWay((ModelBlock(tuple(call.models), ()),), survey.total)
            lines = (*_beginning(survey), f"would be refused: {fault}")
            return ManyPlan(
                len(call.models), len(call.of), everything, 0, 0, limit, survey.result(), lines, str(fault),
                warnings=remarks,
            )  # fmt: skip
        result, passes = survey.result(), way.runs * way.batches
        each = f"{way.runs / len(call.models):.1f} of each model on each batch"
        lines = (
            *_beginning(survey), f"way: {way.words}",
            f"forward passes: {passes:,}, {'one of each model on each batch' if way.runs_once else each}",
            f"memory: {format_bytes(way.bytes)} for statistics, rows and models, whose limit is {format_bytes(limit)}, "
            f"and {format_bytes(result)} for the result",
            f"  statistics of a pass {format_bytes(way.statistics)}, rows that are kept {format_bytes(way.rows)}, "
            f"models that are loaded {format_bytes(way.models)}",
        )  # fmt: skip
        return ManyPlan(
            len(call.models), len(call.of), way, passes, way.bytes + result, limit, result, lines, warnings=remarks
        )


@dataclass(frozen=True)
class ManyPlan:
    """How all pairs of many models will be compared, and the cost; `str` describes it.

    `passes` counts forward passes of all models over a batch. `bytes` is all that is held at once, of which the `limit`
    concerns all but the `result`.
    """

    models: int
    pairs: int
    way: PairsWay
    passes: int
    bytes: int
    limit: int
    result: int
    lines: tuple[str, ...] = ()
    refused: str = ""
    warnings: tuple[str, ...] = ()  # which models have random weights

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"warning: {remark}" for remark in self.warnings)])


def _beginning(survey: Survey) -> Iterator[str]:
    kinds = len(survey.kinds)
    yield f"models: {len(survey.call.models):,}, of {kinds:,} architecture{'s' * (kinds > 1)}"
    for first, names in survey.kinds.items():
        widest = max(survey.layers[first], key=lambda layer: layer.width)
        layers = f"{len(survey.layers[first]):,} layer{'s' * (len(survey.layers[first]) > 1)}"
        which = f"{first} and {len(names) - 1:,} others" if len(names) > 1 else first
        yield f"  {which}: {layers}, the widest {widest.name!r} with {widest.width:,} features"
    yield f"pairs of models: {len(survey.call.of):,}"
    total = "not known before they are read" if survey.total is None else f"{survey.total:,}"
    yield f"examples: {total}, in batches of up to {survey.batch:,}; data {data_name(survey.call.data)}"


def _remarks(call: Call) -> tuple[str, ...]:
    """Return which models have random weights; a model whose name says where its weights are is not loaded."""
    unsure = [name for name, thing in call.models.items() if not (isinstance(thing, str) and names_weights(thing))]
    things = (live(call, name) for name in unsure)
    models = (thing.model if isinstance(thing, ModelInput) else thing for thing in things)
    remarks = (remark_on(unwrapped(model)) for model in models if isinstance(model, nn.Module))
    return tuple(dict.fromkeys(filter(None, remarks)))


def _same_data(before: str, comparison: Comparison) -> str:
    """Refuse data that give other examples in another pass."""
    digest = comparison.provenance.get("data digest", "")
    if before and digest != before:
        raise InvalidValue(
            "the data give other examples, or another order, in each pass, and so many models need several; pass a "
            "loader with shuffle=False and without random transforms, or a higher `memory=`."
        )
    return digest


def as_sample(comparison: Comparison, total: int | None) -> Comparison:
    """Return a comparison that says of what sample of the `total` its values are, if they are of one."""
    if total is None:
        return comparison
    words = f"a sample of {comparison.examples:,} of {total:,} examples"
    tables = {
        name: replace(table, exactness=words if table.exactness == "exact" else f"{table.exactness}, of {words}")
        for name, table in comparison.tables.items()
    }
    provenance = dict(comparison.provenance) | {"sample": f"{words}, seed {comparison.seed}"}
    return replace(comparison, tables=tables, provenance=provenance)
