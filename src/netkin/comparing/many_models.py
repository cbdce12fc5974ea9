"""`compare_many` and `explain_many`: all pairs of several models, and the plan of the passes in words."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from numbers import Integral, Real
from typing import Any

import torch

from netkin import jobs
from netkin.comparing.alignment import Pairs
from netkin.comparing.all_pairs import AllPairs
from netkin.comparing.engines import Engine, PassEngine, named_engine
from netkin.comparing.feed import data_name
from netkin.comparing.pairs_plan import ModelBlock, PairsWay, Planner, unpacked_way
from netkin.comparing.pass_statistics import found_measures
from netkin.comparing.request import Options
from netkin.errors import FileError, InvalidValue, MemoryLimit, UnsavedWarning, outside
from netkin.identity import with_call
from netkin.measures.registry import Measure
from netkin.memory import format_bytes
from netkin.progress import ProgressOption, showing
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape
from netkin.results import Comparisons
from netkin.settings import loaders_kept
from netkin.sources.datasets import load_data, refuse_characters
from netkin.sources.models import refuse_unknown_model
from netkin.sources.names import numbered
from netkin.statistics.collector import Study

HOUR = 3600.0  # seconds
MOST = 2.0**62  # bytes, where `memory` is infinite


@with_call
def compare_many(
    models: Mapping[str, Any] | Sequence[Any],
    data: Any = None,
    measures: str | Callable[..., Any] | Sequence[Any] = ("cka",),
    *,
    layers: Spec | Mapping[str, Spec] = None,
    pairs: Any = "all",
    examples: int | None = None,
    shape: Shape | Mapping[str, Shape] = None,
    resize: str | None = None,
    memory: int | None = None,
    rows: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    transforms: Any = None,
    forward: Any = None,
    partial: bool = False,
    errors: bool = False,
    chunks: int = 20,
    exact_model: bool = False,
    engine: str | Engine = "local",
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: ProgressOption = None,
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
        models: a mapping from names to models, texts for `nk.load_model`, recorded mappings or subjects, or a list.
        data: a loader, an iterable of batches or one array of inputs.
        measures: one measure or several, by name with parameters, or as functions.
        layers: which layers, for all models or by name of the model.
        pairs: "all", "corresponding" or a list of (layer, layer).
        examples: the number of examples after which the pass ends.
        shape: what one example is (see `nk.shapes`).
        resize: "average" averages the larger of two maps down.
        memory: the most bytes that statistics may take, with the rows and models that are held beside them.
        rows: how many examples may be sampled, where models would run several times otherwise; the result
            names the sample.
        seed: seed of the sample of rows that kernel measures read.
        device: where the models run.
        transforms: a function of the inputs, or one for each model.
        forward: a function ``forward(model, batch)``, or one for each model.
        partial: whether Ctrl-C returns what is finished.
        errors: whether values get standard errors.
        chunks: how many chunks of the examples are left out in turn for them.
        exact_model: whether float32 in a model on a GPU must not be rounded to TF32.
        engine: "local" for this process, "distributed" for those that torchrun started, "ray" or an `nk.Ray` for a
            cluster; models, data and functions are then given by name, and models that fail are left out.
        save: the file for the result, beside which finished parts are kept, and where the same call continues.
        overwrite: whether another result or job that is there is deleted, and the work starts again.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> many = compare_many({"a": {"x": X}, "b": {"x": X + 1}, "c": {"x": X**2}})
        >>> round(many["a", "b"]["x", "x"], 6)
        1.0
    """
    given = locals()  # all that was asked
    with showing(progress), loaders_kept(data):
        found = found_measures(measures)  # which may be misspelt, before data are loaded
        return _compared(_all_pairs(given), found, save, overwrite)


def _compared(
    every: AllPairs, measures: list[Measure], save: str | os.PathLike[str] | None, overwrite: bool
) -> Comparisons:
    if save is None:
        return Comparisons(every.compare(measures), every.failed)
    jobs.refuse_output(save, overwrite=overwrite)
    if isinstance(running := named_engine(every.engine), PassEngine):
        return every.keep(measures, save, overwrite)
    every.engine = running.beside(save, overwrite)
    made = Comparisons(every.compare(measures), every.failed)
    try:
        made.save(save, overwrite=True)
    except FileError as fault:  # the numbers come first
        told = f"{str(fault).removesuffix('.')}; the same call writes it from the parts that were saved."
        warnings.warn(told, UnsavedWarning, stacklevel=outside())
    return made


def explain_many(*given: Any, **options: Any) -> PairsPlan:
    """Return how `compare_many` would go about the same arguments: passes, bytes and hours, before anything starts.

    One model of each architecture is run on the first batch, and two models are compared on a few batches to see how
    long that takes; with engine="ray" on the cluster, whose memory and number of workers count.

    Args:
        *given: the models, the data and the measures, as in `nk.compare_many`.
        **options: all options of `nk.compare_many`, which mean the same.

    Example:
        >>> nets = {f"net {seed}": torch.nn.Linear(4, 8) for seed in range(10)}
        >>> plan = explain_many(nets, torch.randn(50, 4), progress=False)
        >>> plan.pairs, plan.passes, len(plan.way.blocks)
        (45, 10, 1)
    """
    return _explain(*given, **options)


def _explain(*given: Any, **options: Any) -> PairsPlan:
    bound = CALL.bind(*given, **options)
    bound.apply_defaults()
    asked = bound.arguments
    with showing(asked["progress"]), loaders_kept(asked["data"]):
        return explained(_all_pairs(asked), found_measures(asked["measures"]))


def _all_pairs(asked: Mapping[str, Any]) -> AllPairs:
    """Return the call for all pairs of some models."""
    given = _named(asked["models"])
    if len(given) < 2:
        raise InvalidValue(f"`compare_many` needs at least two models; got {len(given)}.")
    options = Options(
        asked["layers"], {name: name for name in given}, asked["shape"], asked["resize"], asked["transforms"],
        asked["forward"], asked["device"], asked["exact_model"],
    )  # fmt: skip
    study = study_of(asked["memory"], asked["seed"], asked["errors"], asked["chunks"])
    pairs = Pairs(list(combinations(given, 2)), asked["pairs"])
    data = asked["data"]
    refuse_characters(data, list(given.values()))
    if isinstance(data, str) and asked["engine"] in ("local", "distributed"):  # others load where they work
        for one in given.values():
            if isinstance(one, str):
                refuse_unknown_model(one)
        data = load_data(data, models=list(given.values()))
    rest = (asked[name] for name in ("examples", "rows", "partial", "engine"))
    return AllPairs(given, options, pairs, study, data, *rest)


def _named(models: Any) -> dict[str, Any]:
    """Return models by their names: those of a list by their numbers, or by what names them."""
    if isinstance(models, Mapping):
        return dict(models)
    if isinstance(models, str) or not isinstance(models, Iterable):
        raise InvalidValue(f"`models` must be a mapping from names to models, or a list; got {models!r}.")
    found = list(models)
    if found and all(isinstance(one, str) for one in found):
        return dict(zip(numbered(found), found, strict=True))
    return {str(place): model for place, model in enumerate(found)}


def study_of(memory: Any, seed: Any, errors: bool, chunks: int) -> Study:
    """Return the study of a call."""
    if errors and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 2):
        raise InvalidValue(f"standard errors need at least 2 chunks of the examples; got chunks={chunks!r}.")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, Real) or not float(memory) > 0):
        raise InvalidValue(f"`memory` is a number of bytes, such as 2e9; got {memory!r}.")
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise InvalidValue(f"`seed` is a whole number; got {seed!r}.")
    # without a limit the device decides, once it is known
    limit = -1 if memory is None else int(min(float(memory), MOST))
    return Study({}, [], limit=limit, chunks=chunks if errors else 0, seed=int(seed))


# --- the plan in words ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairsPlan:
    """How all pairs of many models will be compared, and the cost; `str` describes it.

    `passes` counts forward passes of all models over a batch. `bytes` is all that is held at once, of which the `limit`
    concerns all but the `result`; `seconds` is estimated from a trial with two models. `disk` is the most bytes that
    a job with `save` takes.
    """

    models: int
    pairs: int
    way: PairsWay
    others: Mapping[str, str]  # other ways and what they would take, or why they can't be gone
    passes: int
    bytes: int
    limit: int
    result: int
    seconds: float | None
    lines: tuple[str, ...] = ()
    refused: str = ""
    disk: int = 0
    warnings: tuple[str, ...] = ()  # which models have random weights

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"warning: {one}" for one in self.warnings)])


def unpacked_plan(told: Mapping[str, Any]) -> PairsPlan:
    """Return the plan that was taken apart by `asdict` and has been JSON since."""
    tuples = {name: tuple(told[name]) for name in ("lines", "warnings")}
    return PairsPlan(**dict(told) | {"way": unpacked_way(told["way"])} | tuples)


def explained(every: AllPairs, measures: Sequence[Measure], keeps: bool = True) -> PairsPlan:
    """Return the plan, with the time that it takes by a trial with two models; `keeps` whether rows may be kept."""
    running = named_engine(every.engine)
    if not isinstance(running, PassEngine):
        plan: PairsPlan = every.call_on(running).explain(measures)
        return plan
    planner = every.planner(measures)
    try:
        ways, why = planner.ways(every.rows, keeps=keeps and every.engine == "local")
    except MemoryLimit as refusal:
        return replace(refused_plan(planner, str(refusal)), warnings=every.remarks())
    planner.speed = replace(planner.speed, pair=every.reading_seconds(measures))
    return replace(described_plan(planner, ways, why), warnings=every.remarks())


def refused_plan(planner: Planner, refusal: str) -> PairsPlan:
    """Return the plan of what no way can do, with the refusal."""
    way = PairsWay((ModelBlock(tuple(planner.given), ()),), planner.total, 0, 0, 0, 0, None)
    lines = (*_beginning(planner), f"would be refused: {refusal}")
    count = len(planner.pairs.of)
    return PairsPlan(
        len(planner.given), count, way, {}, 0, 0, planner.study.limit, planner.result(), None, lines, refusal
    )


def described_plan(planner: Planner, ways: Mapping[str, PairsWay], why: Mapping[str, str]) -> PairsPlan:
    """Return the plan of the cheapest way, with what the others would take."""
    name, count, result = planner.chosen(ways), len(planner.pairs.of), planner.result()
    way = ways[name]
    parts = planner.speed.seconds(way, count)
    others = {other: _way_in_words(planner, one, result) for other, one in ways.items() if other != name} | dict(why)
    lines = [*_beginning(planner), f"way: {way.words}"]
    lines += [f"  {other}: {words}" for other, words in others.items()]
    lines += [
        f"forward passes: {way.runs * way.batches:,}"
        + (
            ", one of each model on each batch"
            if way.runs_once
            else f", {way.runs / len(planner.given):.1f} of each model on each batch"
        ),
        f"memory: {format_bytes(way.bytes)} for statistics, rows and models, whose limit is "
        f"{format_bytes(planner.study.limit)}, and {format_bytes(result)} for the result",
        f"  statistics of a pass {format_bytes(way.statistics)}, rows that are kept {format_bytes(way.rows)}, models "
        f"that are loaded {format_bytes(way.models)}",
        in_files(*(disk := planner.disk(way))),
        f"time: {in_hours(sum(parts))} on this machine: {in_hours(parts[0])} for forward passes, {in_hours(parts[1])} "
        f"for statistics, {in_hours(parts[2])} for reading the measures",
    ]
    return PairsPlan(
        len(planner.given), count, way, others, way.runs * way.batches, way.bytes + result, planner.study.limit, result,
        sum(parts), tuple(lines), disk=disk[0],
    )  # fmt: skip


def in_files(most: int, left: int) -> str:
    """Return what a job takes on disk, in words."""
    return f"disk, with `save`: up to {format_bytes(most)} while it runs, {format_bytes(left)} when it is done"


def _beginning(planner: Planner) -> Iterator[str]:
    kinds = len(planner.kinds)
    yield f"models: {len(planner.given):,}, of {kinds:,} architecture{'s' * (kinds > 1)}"
    for first, names in planner.kinds.items():
        widest = max(planner.layers[first], key=lambda layer: layer.width)
        layers = f"{len(planner.layers[first]):,} layer{'s' * (len(planner.layers[first]) > 1)}"
        which = f"{first} and {len(names) - 1:,} others" if len(names) > 1 else first
        yield f"  {which}: {layers}, the widest {widest.name!r} with {widest.width:,} features"
    yield f"pairs of models: {len(planner.pairs.of):,}"
    total = "not known before they are read" if planner.total is None else f"{planner.total:,}"
    yield f"examples: {total}, in batches of up to {planner.batch:,}; data {data_name(planner.data)}"


def _way_in_words(planner: Planner, way: PairsWay, result: int) -> str:
    seconds = sum(planner.speed.seconds(way, len(planner.pairs.of)))
    size = format_bytes(way.bytes + result)
    return f"{way.words}, {way.runs * way.batches:,} forward passes, {size}, {in_hours(seconds)}"


def in_hours(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 1:
        return "under a second"
    number, unit = (seconds / HOUR, "hours") if seconds > HOUR / 10 else (seconds, "seconds")
    return f"{number:.2g} {unit}" if number < 100 else f"{number:,.0f} {unit}"


CALL = inspect.signature(compare_many)
explain_many.__signature__ = CALL.replace(return_annotation=PairsPlan)  # type: ignore[attr-defined]  # one for both
