"""Tasks: networks, each with its own data, compared block by block from sketches of features and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np

from netkin.comparing import Comparer, ModelInput, collect, explain
from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.comparer import measures_of
from netkin.comparing.plan import needs_of
from netkin.comparing.spec import Options, Spec, functions_by_name, layers_by_name, takes_options
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import InvalidValue, NetkinError, NoValue, require_at_least
from netkin.identity import with_call
from netkin.measures.registry import Measure, find
from netkin.progress import showing, with_progress
from netkin.results import Comparison, Comparisons
from netkin.results.caveats import Caveat, grouped
from netkin.results.values import Values
from netkin.sources.names import by_name
from netkin.statistics.sketches import LayerSketches
from netkin.training.work_plan import Planning, Work, WorkPlan, planned

if TYPE_CHECKING:
    from typing_extensions import Unpack

MEASURES = ("sketched_cka", "sketched_cka_by_buckets")  # by ψ itself, and the paper's product of two sketches
SEEDS = 5
CERTAIN = 5  # standard deviations above which two data sets have examples in common
SAME, APART = "the same examples in the same buckets", "no examples in common buckets"


@with_call
@planned
@by_name(models="tasks")
@takes_options("part start resize rows seed names errors chunks partial engine save overwrite")
def compare_tasks(
    tasks: Mapping[str, Any],
    measures: str | Callable[..., Any] | Sequence[Any] | None = None,
    *,
    seeds: int = SEEDS,
    share_buckets: bool = True,
    **options: Unpack[Options],
) -> Planning[WorkPlan, Comparisons]:
    """Return how similar all tasks are, block by block, each task also with itself; a task is a model with its data.

    Models may be of any architecture and data sets of any size. Each task takes one pass over its data, forward and
    backward, whatever the number of measures, seeds and tasks; all pairs are read from the sketches that the passes
    leave. Values are means over `seeds` of the sketch, and their standard errors those of these means: one sketch alone
    varies √seeds times as much. They hold nothing of how other data or networks of another training would differ.

    A pair that has the same examples in the same buckets can't be compared with one that does not: between different
    data no row belongs to another, and even one network with other buckets falls to a fraction of 1.

    Args:
        tasks: from names to (model, data), `nk.ModelInput`, or what `nk.collect` gave, or `nk.load` of its file.
        measures: measures of sketches; None for 'sketched_cka' and 'sketched_cka_by_buckets', or those of the sketches.
        seeds: the number of seeds over which values are averaged, from that of the measure on; kept ones have theirs.
        share_buckets: whether tasks that hold the same examples put them into the same buckets.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> many = compare_tasks({"few": (model, inputs[:20]), "many": (model, inputs[20:])}, "sketched_cka", seeds=2)
        >>> list(many), round(many["few", "few"]["0", "0"], 6)
        ([('few', 'few'), ('few', 'many'), ('many', 'many')], 1.0)
    """
    if not isinstance(tasks, Mapping) or not tasks:
        raise InvalidValue(
            f"`tasks` is a mapping from names to (model, data), with one task at least; got {_kind(tasks)}.",
            argument="tasks",
        )
    pairs, progress, names = options.pop("pairs", "all"), options.pop("progress", None), list(tasks)
    by_task = {"layers": layers_by_name(options.pop("layers", None), names)}
    by_task["transforms"] = functions_by_name("transforms", options.pop("transforms", None), names)
    by_task["forward"] = functions_by_name("forward", options.pop("forward", None), names)
    groups = _replicates(tasks, measures, seeds)
    step = 0 if share_buckets else max(map(len, groups))
    found: dict[str, Comparer] = {}

    def call(place: int, name: str) -> tuple[list[Measure], dict[str, Any]]:
        own = {option: values[name] for option, values in by_task.items()}
        return [_shifted(one, place * step) for group in groups for one in group], {**options, **own}

    yield lambda: _plan({name: (task, *call(place, name)) for place, (name, task) in enumerate(tasks.items())})
    with showing(progress):
        for place, (name, task) in enumerate(with_progress(list(tasks.items()), "sketching", "tasks")):
            wanted, how = call(place, name)
            with about_task(name):
                found[name] = _sketched(name, task, wanted, step, how)
        return _read(found, groups, step, pairs)


explain_compare_tasks = compare_tasks.explain


def _plan(calls: Mapping[str, tuple[Any, list[Measure], dict[str, Any]]]) -> WorkPlan:
    """Return what the sketches of the tasks would take; few examples of each are run, to learn the layers."""
    work, memory, refused, made = list[Work](), 0, list[str](), list[str]()
    for name, (task, wanted, how) in calls.items():
        if isinstance(task, Comparer):
            made.append(name)
            continue
        with about_task(name):
            plan = explain(model_input(task), None, None, wanted, names=(name, name), **how)
        backward = len({need.target for need in needs_of(wanted)} - {None})
        work.append(Work(f"sketching {name}", plan.examples, backward=backward))
        memory += plan.bytes
        refused += [f"task {name!r}: {plan.refused}"] if plan.refused else []
    notes = [f"sketches are there already: {', '.join(made)}"] if made else []
    return WorkPlan(tuple(work), {"sketches": memory}, tuple(notes), next(iter(refused), ""))


def _kind(given: Any) -> str:
    return f"an empty {type(given).__name__}" if isinstance(given, Mapping) else f"a {type(given).__name__}"


def seed_values(table: Values) -> np.ndarray:
    """Return the values of each seed by itself, seeds × rows × columns, of a table that `compare_tasks` made."""
    if table.replicates is None:
        return table.values[None].copy()
    n = len(table.replicates)  # each of which is the mean without one seed
    return n * table.values - (n - 1) * table.replicates


# --- the passes -------------------------------------------------------------------------------------------------------


def _replicates(tasks: Mapping[str, Any], measures: Any, seeds: int) -> list[list[Measure]]:
    """Return for each measure that measure with each seed: those of the first sketches where none are requested."""
    require_at_least(1, seeds=seeds)
    made = next((task for task in tasks.values() if isinstance(task, Comparer)), None)
    if measures is None and made is not None:
        groups: dict[str, list[Measure]] = {}
        for one in filter(_is_sketched, map(find, made.record.measures)):
            groups.setdefault(_shifted(one, -one.settings["seed"]).id, []).append(one)
        if groups:
            return list(groups.values())
    found = measures_of(MEASURES if measures is None else measures)
    for one in found:
        if not _is_sketched(one):
            raise InvalidValue(
                f"{one.name!r} pairs the examples of two models, and tasks have examples of their own; take a measure "
                "of sketches, such as 'sketched_cka(kernel=features)'."
            )
    return [[_shifted(one, seed) for seed in range(seeds)] for one in found]


def _is_sketched(measure: Measure) -> bool:
    return LayerSketches in getattr(measure.facts.reads, "collectors", ())


def _shifted(measure: Measure, by: int) -> Measure:
    """Return the measure with another seed, so many further."""
    return replace(measure, parameters=measure.parameters | {"seed": measure.settings["seed"] + by})


def _sketched(name: str, task: Any, wanted: Sequence[Measure], step: int, options: Mapping[str, Any]) -> Comparer:
    """Return the sketches of one task: from one pass over its data, or those that were made before."""
    if not isinstance(task, Comparer):
        return collect(model_input(task), None, None, list(wanted), names=(name, name), **options)
    if len(task.models) > 1:
        raise InvalidValue(f"a task is one model with its data; these sketches are of {len(task.models)}.")
    if step:
        raise InvalidValue("the buckets of these sketches are made already; pass (model, data) to make others.")
    for measure in wanted:
        task.collector(measure)
    return task


@contextmanager
def about_task(name: str) -> Iterator[None]:
    """Inside the `with`, refusals name the task."""
    try:
        yield
    except NetkinError as fault:
        raise type(fault)(f"task {name!r}: {fault}", argument=fault.argument, value=fault.value) from fault


def model_input(task: Any) -> ModelInput:
    """Return a task, given as (model, data), as a model with its data."""
    found = task if isinstance(task, ModelInput) else ModelInput(*task) if isinstance(task, (tuple, list)) else None
    if found is None or (isinstance(task, (tuple, list)) and len(task) != 2):
        raise InvalidValue(f"a task is (model, data), an `nk.ModelInput` or sketches; got {type(task).__name__}.")
    if isinstance(found.model, Mapping) or found.data is None:
        raise InvalidValue("a task needs a model that can be run, and data to run it on; got one of the two.")
    return found


# --- all pairs --------------------------------------------------------------------------------------------------------


def _read(found: Mapping[str, Comparer], groups: Sequence[Sequence[Measure]], step: int, pairs: Any) -> Comparisons:
    """Return the comparisons of all pairs of tasks, a table for each measure, its seeds taken together."""
    wanted = Pairs(list(combinations_with_replacement(found, 2)), pairs)
    made: dict[tuple[str, str], list[list[Comparison]]] = {pair: [[] for _ in groups] for pair in wanted.of}
    shared: dict[tuple[str, str], list[float]] = {pair: [] for pair in wanted.of}
    every = [(place, measure) for place, group in enumerate(groups) for measure in group]
    for place, measure in with_progress(every, "measuring", "sketches"):
        beside = _beside(found, measure, step, wanted)
        for pair in wanted.of:
            with showing(False):
                made[pair][place] += comparisons_of(beside, [measure], [pair])
            if place == 0:  # whose seeds the other measures have as well
                shared[pair].append(_share(beside, *pair))
    return Comparisons([_finished(found, pair, own, shared[pair]) for pair, own in made.items()])


def _beside(found: Mapping[str, Comparer], measure: Measure, step: int, pairs: Pairs) -> Comparer:
    """Return the sketches that one measure reads of all tasks, as if one pass had made them."""
    sizes = [
        replace(one, model=name, rows=max(one.rows // one.examples, 1), examples=1)
        for name, own in found.items()
        for one in own.alignment.given.values()
    ]
    alignment = Alignment(sizes, pairs.pair_blocks(_layers(found)))
    first = next(iter(found.values()))
    study = replace(first.study, layers=alignment.layers, pair_blocks=alignment.pair_blocks, examples=None, chunks=0)
    made = Comparer.of(Spec(), [], pairs, study)
    made.alignment, made.examples = alignment, sum(own.examples for own in found.values())
    origins = {name: next(iter(own.record.origins.values())) for name, own in found.items()}
    made.note(origins=origins, plan=first.record.plan, settings=first.record.settings)
    parts = {name: own.collector(_shifted(measure, k * step)) for k, (name, own) in enumerate(found.items())}
    made.collectors = [[_joined(parts)]]
    return made


def _joined(parts: Mapping[str, Any]) -> LayerSketches:
    """Return sketches of several models in one collector, with the settings of the first, whatever others' seeds."""
    layers: dict[Any, Any] = {
        (name, key[1]): sums for name, sketches in parts.items() for key, sums in sketches.layers.items()
    }
    made = LayerSketches(list(layers), next(iter(parts.values())).settings)
    made.layers = layers
    return made


def _layers(found: Mapping[str, Comparer]) -> dict[str, list[str]]:
    return {name: [one.name for one in own.alignment.given.values()] for name, own in found.items()}


def _share(beside: Comparer, a: str, b: str) -> float:
    """Return the cosine of the sums of signs in two tasks' buckets: on average shared examples over √(n n')."""
    x, y = (_signs(beside, name) for name in (a, b))
    return 0.0 if x is None or y is None else float(x @ y.to(x) / x.norm() / y.to(x).norm())


def _signs(beside: Comparer, task: str) -> Any:
    collector: Any = beside.collectors[0][0]
    for layer in beside.layers[task]:
        with suppress(NoValue):  # another layer has been fed
            return collector.sums(layer.key).signs
    return None


def _finished(
    found: Mapping[str, Comparer],
    pair: tuple[str, str],
    made: Sequence[Sequence[Comparison]],
    shares: Sequence[float],
) -> Comparison:
    """Return the comparison of two tasks with all that must be said of it."""
    (a, b), first = (found[name] for name in pair), made[0][0]
    pooled = [_pooled([next(iter(one.tables.values())) for one in group]) for group in made]
    share = _shared_examples(pair[0] == pair[1], shares, int(pooled[0].quantity.parameters["buckets"] or 1))
    buckets, apart = _in_common(pair, (a.examples, b.examples), share)
    tables = [_with_parameters(one, shared_examples=share) for one in pooled]
    said = [*a.caveats, *b.caveats, *([Caveat("other-buckets", apart)] if apart else [])]
    said += [caveat for group in made for one in group for caveat in one.caveats]
    n, origin = len(made[0]), dict(first.provenance)
    del origin["data digest"]  # of no data at all
    for side, own in (("a", a), ("b", b)):
        origin |= {f"data {side}": own.record.data, f"examples {side}": f"{own.examples:,}"}
        origin |= {f"data {side} digest": own.digest.hex} if own.digest.count else {}
    origin |= {"buckets": buckets, "values": f"mean over {n} seeds of the sketch" if n > 1 else "of one sketch"}
    origin |= {"standard errors": f"of the mean over {n} seeds; one sketch varies √{n} times as much"} if n > 1 else {}
    return replace(
        first,
        tables={table.id: table for table in tables},
        data=" and ".join(dict.fromkeys([a.record.data, b.record.data])),
        examples=a.examples if share == 1 else a.examples + b.examples,
        seed=int(tables[0].quantity.parameters["seed"] or 0),
        caveats=grouped(said),
        provenance=origin,
    )


def _shared_examples(is_one: bool, cosines: Sequence[float], buckets: int) -> float:
    """Return how many examples two tasks have in the same buckets, over √(n n'); 0 where that may be chance."""
    found, chance = float(np.mean(cosines)), CERTAIN * (buckets * len(cosines)) ** -0.5
    if is_one or found > max(chance, 1 - 1e-6):
        return 1.0
    return min(round(found, 2), 0.99) if found > chance else 0.0


def _in_common(pair: tuple[str, str], counts: tuple[int, int], share: float) -> tuple[str, str]:
    """Return what two tasks have in common, as text, and what a reader must know of it."""
    (a, b), (n, m) = map(repr, pair), counts
    if share == 1:
        return SAME, ""
    against = "they can't be compared with pairs with the same examples in the same buckets, such as a task with itself"
    if not share:
        spectra = "so that the values say how alike the spectra of their kernels are"
        return APART, f"{a} and {b} have no examples in common buckets, {spectra}: {against}."
    common = f"about {round(share * (n * m) ** 0.5):,} of the {n:,} and {m:,} examples"
    return f"{common} in the same buckets", f"{a} and {b} share {common}, which raises the values: {against}."


def _pooled(tables: Sequence[Values]) -> Values:
    """Return the means of tables that differ by their seed; a value that some seed lacks is a hole.

    The replicates are the means without each seed in turn, of which the jackknife makes the standard error of the mean.
    """
    first, n = tables[0], len(tables)
    if n == 1:
        return first
    values = np.array([table.values for table in tables])
    mean = values.mean(axis=0)  # NaN where one is
    named = f"{first.id.removesuffix(')')}{', ' if '(' in first.id else '('}seeds={n})"
    quantity = replace(_with_parameters(first, seeds=n).quantity, id=named, error=f"of the mean over {n} seeds")
    return replace(
        first,
        quantity=quantity,
        values=mean,
        missing={pair: reason for table in reversed(tables) for pair, reason in table.missing.items()},
        exactness=f"sketched, mean over {n} seeds",
        replicates=(n * mean - values) / (n - 1),
        chunk_sizes=(1,) * n,
    )


def _with_parameters(table: Values, **parameters: Any) -> Values:
    quantity = table.quantity
    return replace(table, quantity=replace(quantity, parameters={**quantity.parameters, **parameters}))
