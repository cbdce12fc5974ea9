"""`compare_many` and `explain_many`: all pairs of several models, in one pass, or in blocks where memory is short.

One pass runs all models, if its statistics fit the memory. Else the models are split into groups; a pass runs two of
them, and every pair of models is compared in one pass. A model would then run in several passes: its rows are kept from
the first, where they fit beside the statistics. Where they do not, and `rows` allows it, a sample of the examples is
taken, whose rows are kept; else models run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import RandomSampler

from netkin import jobs
from netkin.comparing.alignment import Pairs
from netkin.comparing.compare import Call, inputs_in, inputs_of
from netkin.comparing.comparer import Comparer, measures_of
from netkin.comparing.engines import Engine, Local, named_engine
from netkin.comparing.feed import HeldExamples, data_name
from netkin.comparing.pairs_job import PairsJob, data_digest, identity_of_study
from netkin.comparing.plan import Plan, aligned, make_plan, needs_of, weights_alone
from netkin.comparing.sides import ModelInput, Side, named_models, with_own_data
from netkin.comparing.spec import Measures, Options, Run, Spec, split, takes_options
from netkin.errors import InvalidValue, MemoryLimit, blame, require_utf8
from netkin.identity import (
    COMPARE,
    forms_by_name,
    settings_digest,
    state_noted,
    weights_digest,
    with_call,
)
from netkin.jobs import Job
from netkin.measures.registry import Measure
from netkin.memory import format_bytes
from netkin.progress import command, showing, with_progress
from netkin.representations.hooks import leaves
from netkin.representations.inputs import examples_in, sampler_of
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.results.records import as_record
from netkin.results.values import Pair
from netkin.settings import loaders_kept, random_states_kept
from netkin.sources.datasets import is_to_load, load_data, require_no_characters
from netkin.sources.models import names_weights, require_known_model
from netkin.sources.recordings import names_recording
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
    engine, wanted = named_engine(run.engine), measures_of(measures)  # which may be misspelt, before data are loaded
    with showing(run.progress), loaders_kept(data):
        call = _call(models, data, spec, run, engine)
        if run.save is not None:
            jobs.require_output(run.save, overwrite=run.overwrite)
        return engine.compare_many(call, wanted)


@takes_options(without="names part start")
def explain_many(
    models: Mapping[str, Any] | Sequence[Any],
    data: Any = None,
    measures: Measures = ("cka",),
    **options: Unpack[Options],
) -> ManyPlan:
    """Return the plan of `compare_many` with the same arguments: passes and bytes, before anything starts.

    A few examples of the first batch are run through one model of each architecture.

    Args:
        models: a mapping from names to models, texts for `nk.load_model`, recorded mappings or inputs, or a list.
        data: a loader, an iterable of batches or one array of inputs.

    Example:
        >>> nets = {f"net {seed}": torch.nn.Linear(4, 8) for seed in range(10)}
        >>> plan = explain_many(nets, torch.randn(50, 4), progress=False)
        >>> plan.pairs, plan.passes, len(plan.schedule.blocks)
        (45, 10, 1)
    """
    spec, run = split({**options, "measures": measures})
    engine, wanted = named_engine(run.engine), measures_of(measures)
    with showing(run.progress), loaders_kept(data):
        return engine.explain_many(_call(models, data, spec, run, engine), wanted)


def _call(models: Any, data: Any, spec: Spec, run: Run, engine: Engine) -> Call:
    """Return the call for all pairs of some models."""
    named = named_models(models)
    if len(named) < 2:
        raise InvalidValue(f"`compare_many` needs at least two models; got {len(named)}.", argument="models")
    require_utf8(named)
    require_no_characters(data, list(named.values()))
    if is_to_load(data, named.values()) and not engine.by_name:
        for model in named.values():
            if isinstance(model, str) and not names_recording(model):
                require_known_model(model)
        data = load_data(data, models=list(named.values()))
    of = list(combinations(named, 2))
    sources, data = with_own_data(inputs_of(named, spec, run), data)
    return Call(sources, data, spec, run, of)


# --- the schedule of all pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelBlock:
    """Models that run together in one pass, and the pairs of them that are compared in it."""

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class PairsSchedule:
    """How all pairs are split into passes: the blocks of models, and their cost.

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
        names = [name for block in self.blocks for name in block.models]
        return len(set(names)) if self.rows else len(names)

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
        passes = "1 pass of all models together" if count == 1 else f"{count:,} passes of up to {most:,} models"
        rows = ", rows kept from the first" if self.rows else ""
        return passes + rows + (f", on a sample of {self.examples:,} examples" if self.is_sample else "")


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
    pairs_at: dict[tuple[int, int], list[Pair]] = {}  # by the two groups of a pass
    for a, b in pairs:
        i, j = sorted((group[a], group[b]))
        # the pairs inside a group go with the pass of this group and the next, so that no pass has two such sets
        home = (i, j) if i != j else (min(i, (i + 1) % count), max(i, (i + 1) % count))
        pairs_at.setdefault(home, []).append((a, b))
    ordered = sorted(pairs_at, key=lambda groups: (groups[0], groups[1] if groups[0] % 2 else -groups[1]))
    return [
        ModelBlock(tuple(name for name in names if group[name] in groups), tuple(pairs_at[groups]))
        for groups in ordered
    ]


class Survey:
    """The sizes of models, and of the data, from a few examples of one model of each architecture.

    The ways that it finds keep rows from pass to pass only with `keeps_rows`, and where one process runs all passes on
    data that are the same in each.
    """

    def __init__(self, call: Call, measures: Sequence[Measure], keeps_rows: bool = True):
        self.call, self.measures, self.total = call, measures, cast("int | None", None)
        self.inputs, self.batch = 0, 1  # bytes and examples of the first batch
        self.layers: dict[str, list[LayerSize]] = {}
        self.loaded: dict[str, int] = {}  # bytes of the models that are loaded when they are needed
        alike: dict[Any, list[str]] = {}
        for name, source in inputs_in(call.models).items():
            alike.setdefault(_architecture(name, source), []).append(name)
        self.kinds = {names[0]: names for names in alike.values()}
        self.study = call.study([])
        with call.engine.working(), random_states_kept(data=[call.data]):
            for first, names in self.kinds.items():
                try:
                    self._inspect(first, names)
                except Exception as fault:
                    blame(fault, first)
                    raise
            self.limit = call.engine.least(self.study.limit)
        reads_rows = all(need.feeds == {"activations"} for need in needs_of(measures))
        self.keeps_rows = (
            keeps_rows and call.engine.part is None and reads_rows and has_one_data(call) and self.total is not None
        )

    def _inspect(self, first: str, names: Sequence[str]) -> None:
        """Learn the layers of models that are alike from one of them."""
        source = loaded_input(self.call, first)
        call = replace(self.call, models={first: source}, of=[], engine=Local())
        sides = call.sides()
        self.study = call.study(sides) if sides[0].device is not None else self.study
        stream = call.start_stream(sides, self.measures)
        self.total, self.batch = stream.feed.expected, stream.batch_length
        arrays = (
            leaf for _, leaf in leaves(list(stream.first.values())) if isinstance(leaf, (torch.Tensor, np.ndarray))
        )
        self.inputs = max(self.inputs, sum(array.nbytes for array in arrays))
        is_by_name = isinstance(inputs_in(self.call.models)[first].model, str)
        state = leaves(source.model.state_dict()) if is_by_name and isinstance(source.model, nn.Module) else ()
        size_of_model = sum(tensor.nbytes for _, tensor in state if isinstance(tensor, torch.Tensor))
        for name in names:
            self.layers[name] = [replace(size, model=name) for size in stream.sizes.values()]
            self.loaded[name] = size_of_model

    # --- the schedule -------------------------------------------------------------------------------------------------

    def schedule(self) -> PairsSchedule:
        """Return the first that fits the memory: one pass, rows kept, a sample, models that run again."""
        whole, sample = self._schedule(self.total), self.call.spec.rows
        if whole is not None and whole.runs_once:
            return whole
        replayed = self._schedule(self.total, keeps=True) if self.keeps_rows else None
        if replayed is None and sample is not None and self.total is not None and sample < self.total:
            sampled = self._schedule(sample)
            if sampled is not None and not sampled.runs_once and self.keeps_rows:
                sampled = self._schedule(sample, keeps=True) or sampled
            replayed = sampled
        if whole is None and replayed is None:
            self._pass_plan(1, self.total, 0)  # which refuses
        return cast("PairsSchedule", replayed or whole)

    def _schedule(self, examples: int | None, *, keeps: bool = False) -> PairsSchedule | None:
        """Return the blocks of most models that fit beside all else that is held; None where none do."""
        rows, count = self._rows(examples) if keeps else 0, len(self.call.models)
        sizes = dict.fromkeys(min(-(-count // groups), GROUP) for groups in range(2, count + 1))
        try:
            plan = self._pass_plan(1, examples, rows)
        except MemoryLimit:
            return None
        for size in sizes:
            with suppress(MemoryLimit):
                plan = self._pass_plan(size, examples, rows)
                break
        batches = -(-(examples or 1) // self.batch)
        return PairsSchedule(
            tuple(blocks_of(self.call.of, size)), examples, batches, plan.bytes, rows, self._model_bytes(size, keeps),
            examples != self.total,
        )  # fmt: skip

    def _rows(self, examples: int | None) -> int:
        """Return the bytes of all rows of all models, and of the inputs."""
        count = examples or 0
        sizes = chain.from_iterable(self.layers.values())
        rows = sum(size.rows_of(count) * size.width * size.itemsize for size in sizes)
        return rows + self.inputs * count // self.batch

    def _model_bytes(self, size: int, keeps: bool) -> int:
        heavy = sorted(self.loaded.values(), reverse=True)
        return sum(heavy if keeps else heavy[: 2 * size])

    def _pass_plan(self, size: int, examples: int | None, rows: int) -> Plan:
        """Return the plan of the largest pass of two groups of models; refuse one that does not fit."""
        left = self.limit - rows - self._model_bytes(size, rows > 0)
        heavy = sorted(self.layers, key=lambda name: -sum(layer.width**2 for layer in self.layers[name]))[: 2 * size]
        pairs = list(combinations(heavy, 2))
        if len(heavy) < len(self.layers):  # the second group is compared among itself in another pass
            pairs = [(a, b) for a, b in pairs if a in heavy[:size]]
        sizes = [layer for name in heavy for layer in self.layers[name]]
        study = replace(self.study, examples=examples, limit=left)
        _, study = aligned(sizes, Pairs(pairs, self.call.spec.pairs), study)
        return make_plan(needs_of(self.measures), study)

    def result(self) -> int:
        """Return the bytes of the result."""
        cells = sum(len(self.layers[a]) * len(self.layers[b]) for a, b in self.call.of)
        values = 8 * cells * len(self.measures) * (1 + self.call.spec.chunk_count)
        return (RESULT + TABLE * len(self.measures)) * len(self.call.of) + values


def loaded_input(call: Call, name: str) -> ModelInput:
    """Return a model that may be given by name; its place seeds random weights."""
    return inputs_in(call.models)[name].loaded(seed=list(call.models).index(name))


def has_one_data(call: Call) -> bool:
    """Return whether all models are run, on the same data."""
    sources = inputs_in(call.models).values()
    return all(source.data is None and isinstance(source.model, (str, nn.Module)) for source in sources)


def _architecture(name: str, source: ModelInput) -> Any:
    """Return a key that models with the same layers share."""
    functions = (source.forward, source.transform)
    options = repr(source.layers), repr(source.shape), *(id(it) if callable(it) else repr(it) for it in functions)
    if source.data is None and isinstance(source.model, str):
        return source.model.partition("@")[0], *options
    if source.data is None and isinstance(source.model, nn.Module):
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in source.model.state_dict().items())
        return type(source.model), shapes, *options
    return name, *options


# --- the work ---------------------------------------------------------------------------------------------------------


class Many:
    """One call of `compare_many` or `explain_many` in this process, or in several that share the data."""

    def __init__(self, call: Call, measures: Sequence[Measure]):
        self.call, self.measures = call, measures
        self._sides: dict[str, ModelInput | Side] = {}  # that run now, or whose rows are kept
        if call.spec.rows is not None:
            self._require_common_data("rows")

    def _require_common_data(self, option: str) -> None:
        if not has_one_data(self.call):
            raise InvalidValue(
                f"`{option}` goes with models that all see `data`; leave it out, or give them no data of their own.",
                argument=option,
            )

    @property
    def _is_stream(self) -> bool:
        """Whether some data can be read only once: then one pass is all there is."""
        of_models = (source.data for source in inputs_in(self.call.models).values())
        return any(isinstance(data, Iterator) for data in (self.call.data, *of_models))

    def schedule(self) -> tuple[PairsSchedule, int]:
        """Return the schedule of all pairs, and the memory limit that it keeps."""
        everything = PairsSchedule((ModelBlock(tuple(self.call.models), tuple(self.call.of)),))
        if self._is_stream or weights_alone(self.measures):
            return everything, self.call.study([]).limit
        survey = Survey(self.call, self.measures)
        return survey.schedule(), survey.limit

    def compare(self) -> Comparisons:
        """Return the comparison of every pair; with `save` in a file, beside which finished parts lie."""
        run = self.call.run
        if run.save is None:
            schedule, limit = self.schedule()
            return Comparisons(self._through(schedule, replace(self.call, limit=limit)))
        self._require_savable()
        options: dict[str, Any] = {"call": command(), "overwrite": run.overwrite, "compare": COMPARE}
        job = Job.beside(run.save, "comparison", self._identity(), **options)
        sources = inputs_in(self.call.models)
        modules = {name: source.model for name, source in sources.items() if isinstance(source.model, nn.Module)}
        with job, state_noted(job, modules):
            schedule, limit = self._plan_of_job(job)
            examples = schedule.sample or examples_in(self.call.data, self.call.spec.examples)
            parts = PairsJob(job, self.measures, schedule.blocks, schedule.sample, examples)
            result = Comparisons(self._through(schedule, replace(self.call, limit=limit), parts))
            job.save(lambda: result)
            return result

    def _require_savable(self) -> None:
        if self.call.engine.part is not None:
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
        self._require_common_data("save")

    def _identity(self) -> dict[str, Any]:
        weights, forms = dict[str, str](), dict[str, Any]()
        for name in self.call.models:
            model = loaded_input(self.call, name).model
            weights[name] = weights_digest(model)
            forms |= forms_by_name({name: model})
        data = "none" if weights_alone(self.measures) else data_digest(self.call.data, self.call.spec.examples)
        settings = self.call.settings() | {"rows": str(self.call.spec.rows)}
        layers = {name: source.layers for name, source in inputs_in(self.call.models).items()}
        identity = identity_of_study(weights, data, layers, settings, self.measures)
        return identity | {"architecture": forms}

    def _plan_of_job(self, job: Job) -> tuple[PairsSchedule, int]:
        """Return the schedule and the memory limit with which the job was begun."""

        def plan() -> dict[str, Any]:
            schedule, limit = self.schedule()
            return {"schedule": asdict(schedule), "limit": limit}

        def read(part: Any) -> tuple[PairsSchedule, int]:
            return as_record(PairsSchedule, part.values["schedule"]), int(part.values["limit"])

        name = f"plan of {settings_digest(self.call.of)}"
        return job.recall(name, read) or read(job.part(name, plan))

    def _through(self, schedule: PairsSchedule, call: Call, parts: PairsJob | None = None) -> list[Comparison]:
        """Take the passes one after the other, with `parts` those that are not there already."""
        if schedule.rows or schedule.is_sample:
            call = replace(call, data=HeldExamples(call.data, call.spec.examples, schedule.sample, call.spec.seed))
            call = replace(call, spec=replace(call.spec, examples=None))
        by_pair: dict[Pair, Comparison] = {}
        total = examples_in(self.call.data, self.call.spec.examples) if schedule.is_sample else None
        digest = ""
        blocks = schedule.blocks
        for block in with_progress(blocks, "comparing", "passes") if len(blocks) > 1 else blocks:
            comparisons = self._compare_block(block, schedule, call, parts)
            digest = _same_data(digest, comparisons[0])
            by_pair |= {(comparison.a, comparison.b): as_sample(comparison, total) for comparison in comparisons}
            if not all(comparison.complete for comparison in comparisons):
                break
        return [by_pair[pair] for pair in self.call.of if pair in by_pair]

    def _compare_block(
        self, block: ModelBlock, schedule: PairsSchedule, call: Call, parts: PairsJob | None
    ) -> list[Comparison]:
        if parts is None:
            with call.engine.working():
                return self._block_call(block, schedule, call).compare(self.measures)

        def collect(share: int, shares: int) -> Comparer:
            of_block = self._block_call(block, schedule, call)
            part = None if shares == 1 else (share, shares)
            return replace(of_block, spec=replace(call.spec, part=part)).collect(self.measures)

        return parts.comparisons_of(block, self._shares(schedule), collect)

    def _shares(self, schedule: PairsSchedule) -> int:
        """Return into how many shares the data of a pass are split, whose sums a job keeps."""
        whole = schedule.rows > 0 or schedule.is_sample or schedule.examples is None
        if whole or isinstance(sampler_of(self.call.data), RandomSampler):
            return 1
        return max(1, min(SHARES // len(schedule.blocks), schedule.batches))

    def _block_call(self, block: ModelBlock, schedule: PairsSchedule, call: Call) -> Call:
        """Return the call of a pass: models given by name are loaded, and forgotten when no pass in a row has them."""
        keeps = set(self.call.models) if schedule.rows else set(block.models)
        self._sides = {name: side for name, side in self._sides.items() if name in keeps}
        for name in block.models:
            if name not in self._sides:
                source = loaded_input(self.call, name)
                self._sides[name] = source.side(name, call.spec.exact_model, schedule.rows) if schedule.rows else source
        return replace(call, models={name: self._sides[name] for name in block.models}, of=list(block.pairs))

    # --- the plan in words --------------------------------------------------------------------------------------------

    def explain(self, *, keeps_rows: bool = True) -> ManyPlan:
        """Return the plan in figures and in words; what the work would refuse is in `refused`.

        `keeps_rows` is whether rows may be kept from pass to pass.
        """
        call = self.call
        if self._is_stream:
            raise InvalidValue(
                "`explain_many` reads the first batch, and what it takes from an iterator is gone; pass a loader or a "
                "list."
            )
        survey = Survey(call, self.measures, keeps_rows)
        limit, result = survey.limit, survey.result()
        remarks = _remarks(call)
        try:
            schedule = survey.schedule()
        except MemoryLimit as fault:
            everything = PairsSchedule((ModelBlock(tuple(call.models), ()),), survey.total)
            lines = (*_beginning(survey), f"would be refused: {fault}")
            return ManyPlan(
                len(call.models), len(call.of), everything, 0, 0, limit, result, lines, str(fault), warnings=remarks
            )
        passes = schedule.runs * schedule.batches
        each = f"{schedule.runs / len(call.models):.1f} of each model on each batch"
        lines = (
            *_beginning(survey), f"schedule: {schedule.words}",
            f"forward passes: {passes:,}, {'one of each model on each batch' if schedule.runs_once else each}",
            f"memory: {format_bytes(schedule.bytes)} for statistics, rows and models, whose limit is "
            f"{format_bytes(limit)}, and {format_bytes(result)} for the result",
            f"  statistics of a pass {format_bytes(schedule.statistics)}, rows that are kept "
            f"{format_bytes(schedule.rows)}, models that are loaded {format_bytes(schedule.models)}",
        )  # fmt: skip
        return ManyPlan(
            len(call.models),
            len(call.of),
            schedule,
            passes,
            schedule.bytes + result,
            limit,
            result,
            lines,
            warnings=remarks,
        )


@dataclass(frozen=True)
class ManyPlan:
    """How all pairs of many models will be compared, and the cost; `str` describes it.

    `passes` counts forward passes of all models over a batch. `bytes` is all that is held at once, of which the `limit`
    concerns all but the `result`.
    """

    models: int
    pairs: int
    schedule: PairsSchedule
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
    inputs = inputs_in(call.models)
    unsure = [
        name for name, source in inputs.items() if not isinstance(source.model, str) or not names_weights(source.model)
    ]
    models = (loaded_input(call, name).model for name in unsure)
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
