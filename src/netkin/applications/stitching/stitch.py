"""The public calls: `stitch`, `fit_all`, sweeps of one or many pairs of models, and what a sweep would take.

All take the same steps: pairs of layers are checked on a few examples, one pass over the data gives the sums, direct
methods compute their maps from them, and trained methods start from such a map.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn

from netkin.applications.stitching.maps import find
from netkin.applications.stitching.joining import Joints, Pair
from netkin.applications.stitching.evaluating import MEMORY, USUAL, evaluate_all, known_scores, warn_of_doubt
from netkin.applications.stitching.fitting import Asked, Saved, fit_saved, lend_both, make_stitches, train_stitch
from netkin.applications.stitching.network import Stitch
from netkin.applications.stitching.sweep import SweepFile, run_sweeps
from netkin.applications.stitching.training import How, as_list, find_way, find_ways
from netkin.comparing.feed import data_name
from netkin.errors import InvalidValue, UnknownName, did_you_mean
from netkin.identity import described_call, weights_digest
from netkin.memory import format_bytes, portions_in_memory
from netkin.progress import ProgressOption, showing
from netkin.representations import batches_of
from netkin.representations.inputs import batch_length, device_of, examples_in
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Comparisons
from netkin.settings import random_states_kept
from netkin.sources.names import by_name


@by_name(models="a b", data="data test")
def stitch(
    a: nn.Module,
    layer_a: str,
    b: nn.Module,
    layer_b: str,
    data: Any = None,
    how: How = "least_squares",
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    validation: Any = None,
    statistics: Saved = None,
    progress: ProgressOption = None,
    **training: Any,
) -> Stitch:
    """Return a network that runs `a` up to `layer_a`, maps its activations, and continues with `b` after `layer_b`.

    Args:
        a: the first model.
        layer_a: its layer.
        b: the second model.
        layer_b: its layer.
        data: the examples from which the map is found.
        how: a direct method: `least_squares`, `ridge(alpha=1.0)`, `procrustes`, `reduced_rank(k=8)`,
            `lasso(alpha=0.01)`, `permutation`, `identity` or `random`; or `task_loss`, which trains the map, also as a
            `TaskLoss`.
        test: the examples on which the stitch is evaluated at once.
        examples: how many examples of `data` are read.
        resize: how maps get another size; by default `average` where they shrink, else `bilinear`.
        device: where the models run meanwhile.
        seed: seed for random maps and for training.
        names: what the result calls the two models.
        validation: the examples on which a training is evaluated meanwhile; by default part of `data`.
        statistics: what `nk.collect` returned for the same models, or its file, from which a direct method then reads
            its map: of `data`, or without them of `test`, a few examples are tried out, and no more is read.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        training: options of `TaskLoss`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> round(stitch(model, "1", model, "1", batches, test=batches).relative_accuracy, 3)
        1.0
    """
    way, pair = find_way(how, seed, training), (layer_a, layer_b)
    given: dict[str, Any] = {"examples": examples, "resize": resize, "seed": seed}
    of: dict[str, Any] = {"a": unwrapped(a), "layer_a": layer_a, "b": unwrapped(b), "layer_b": layer_b}
    call = described_call("nk.stitch", **of, data=data_name(data), how=way.id, **given)
    asked = Asked(ways=(way,), data=data, test=test, pairs=[pair], statistics=statistics, **given)
    if way.training is not None:
        asked.refuse_iterators("a training", ("data",))
    with showing(progress), lend_both(a, b, device), random_states_kept(a, b, data=[data, test, validation]):
        one = make_stitches(a, b, asked, names, call)[pair, way]
        if way.training is not None:
            one = train_stitch(one, data, way.training, validation, examples)
        if test is not None:
            one = replace(one, evaluation=one.evaluate(test))
    one.transformation.to(device_of(b))
    return one


def fit_all(
    a: nn.Module,
    b: nn.Module,
    pairs: Sequence[Pair],
    data: Any = None,
    hows: Sequence[str] = ("least_squares",),
    test: Any = None,
    *,
    examples: int | None = None,
    resize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
    statistics: Saved = None,
) -> dict[tuple[Pair, str], Stitch]:
    """Return the stitches of many pairs of layers by direct methods, by ``(layer_a, layer_b), how``, from one pass.

    Args:
        a: the first model.
        b: the second model.
        pairs: a layer of the first and one of the second, for each stitch.
        data: the examples from which the maps are found.
        hows: direct methods as in `stitch`.
        test: the examples on which all stitches are evaluated, in one more pass.
        examples: how many examples of `data` are read.
        resize: how maps get another size.
        device: where the models run meanwhile.
        seed: seed for random maps.
        names: what the results call the two models.
        statistics: what `nk.collect` returned, or its file, read in place of a pass over `data`, as in `stitch`.
    """
    ways = {str(how): find_way(how, seed) for how in as_list(hows)}
    of: dict[str, Any] = {"a": unwrapped(a), "b": unwrapped(b), "pairs": list(pairs), "data": data_name(data)}
    given: dict[str, Any] = {"examples": examples, "resize": resize, "seed": seed}
    call = described_call("fit_all", **of, hows=list(ways), **given)
    for how in ways:
        find(how)  # refuses a training
    asked = Asked(ways=tuple(ways.values()), data=data, test=test, pairs=pairs, statistics=statistics, **given)
    with lend_both(a, b, device), random_states_kept(a, b, data=[data, test]):
        found = make_stitches(a, b, asked, names, call)
        made = {(pair, how): found[pair, way] for pair in dict.fromkeys(pairs) for how, way in ways.items()}
        if test is not None:
            judged = evaluate_all([one.network for one in made.values()], test, name=names[0])
            made = {key: replace(one, evaluation=e) for (key, one), e in zip(made.items(), judged, strict=True)}
            warn_of_doubt(judged[0])  # of the second model, which is the same in all
    for one in made.values():
        one.transformation.to(device_of(b))
    return made


@by_name(models="a b", data="data test")
def stitch_all(
    a: nn.Module,
    b: nn.Module,
    data: Any = None,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    pairs: Any = "corresponding",
    layers: Any = None,
    measures: Any = ("cka",),
    scores: str | Sequence[str] = USUAL,
    shape: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    validation: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    partial: bool = False,
    each: Callable[[Stitch], None] | None = None,
    names: tuple[str, str] = ("a", "b"),
    statistics: Saved = None,
    progress: ProgressOption = None,
) -> Comparison:
    """Return scores of stitches of layers of `a` into layers of `b`, together with the similarity of these layers.

    Tables such as ``relative_accuracy(how=least_squares)`` and those of `measures` are in one comparison, and its
    warnings name the layers where the two disagree. Pairs that can't be joined are missing with their reason.

    Args:
        a: the first model.
        b: the second model.
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated; by default `data`.
        hows: one method or several, as in `nk.stitch`; options of a training as ``"task_loss(epochs=3)"``.
        pairs: "corresponding", "all" (every layer into every layer) or a list of (layer, layer).
        layers: which layers (see `nk.layers`), for both models or by "a" and "b".
        measures: similarities of the same layers, tabulated too.
        scores: which numbers of an evaluation.
        shape: what one example is for the similarities; by default a place, as for stitches.
        resize: how maps get another size.
        examples: how many examples of `data` are read.
        test_examples: how many of `test`.
        validation: the examples on which a training is evaluated meanwhile.
        device: where the models run meanwhile.
        seed: seed for random maps and for training.
        save: the file that grows with the result. The same call continues there, also after the process was killed, and
            with more methods or layers; what is finished lies in a folder beside it (see `netkin.jobs`). If it can't be
            written, as on a full disk, an `nk.UnsavedWarning` says so, and the result is returned.
        overwrite: whether something else in the file is deleted, and the work starts again.
        partial: whether Ctrl-C returns what is finished.
        each: a function that is called with every `Stitch`.
        names: what the result calls the two models.
        statistics: what `nk.collect` returned for the same models, or its file, from which direct methods read their
            maps without running the models on `data`, which may then be left out. Of a list those of the two are taken.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> inputs = torch.eye(4).repeat(10, 1) + torch.arange(40).unsqueeze(1) / 40
        >>> batches = [(inputs, model(inputs).argmax(1))]
        >>> found = stitch_all(model, model, batches, batches, ["least_squares", "random"])
        >>> round(found["relative_accuracy(how=least_squares)"]["1", "1"], 3)
        1.0
    """
    asked = _request(
        data, test, hows, scores=scores, seed=seed, measures=measures, layers=layers, pairs=pairs, shape=shape,
        resize=resize, examples=examples, test_examples=test_examples, validation=validation, device=device, each=each,
        statistics=statistics,
    )  # fmt: skip
    with showing(progress):
        call = _describe_call("nk.stitch_all", asked, a=unwrapped(a), b=unwrapped(b))
        (found,) = run_sweeps(
            {(names[0], names[1]): (a, b)}, asked, SweepFile(save, overwrite, several=False), partial, call
        )
    return found


@by_name(models="models", data="data test")
def stitch_many(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    data: Any = None,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    partial: bool = False,
    progress: ProgressOption = None,
    **options: Any,
) -> Comparisons:
    """Return the sweeps of all ordered pairs of several models; `spread()` of them has the means over the pairs.

    Args:
        models: a mapping from names to models, or a list, whose names are then 0, 1, 2, ...
        data: the examples from which the maps are found.
        test: the examples on which they are evaluated.
        hows: one method or several.
        save: the file that grows with the result, and in which the same call continues.
        overwrite: whether something else in the file is deleted, and the work starts again.
        partial: whether Ctrl-C returns what is finished.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        options: those of `stitch_all`: `pairs`, `layers`, `measures`, `scores`, `shape`, `resize`, `examples`,
            `test_examples`, `validation`, `device`, `seed`, `each` and `statistics`: a list of what `nk.collect`
            returned for each two of the models, or of the files, each of which serves both orders of its models.
    """
    given = dict(models) if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(given) < 2:
        raise InvalidValue(f"`stitch_many` needs at least two models; got {len(given)}.")
    asked = _request(data, test, hows, **options)
    pairs_of_models = {(x, y): (given[x], given[y]) for x, y in permutations(given, 2)}
    call = _describe_call("nk.stitch_many", asked, models=list(given))
    with showing(progress):
        return Comparisons(run_sweeps(pairs_of_models, asked, SweepFile(save, overwrite, several=True), partial, call))


def _request(
    data: Any, test: Any, hows: How | Sequence[How], *, scores: Any = USUAL, seed: int = 0, **options: Any
) -> Asked:
    known = [field.name for field in fields(Asked)]
    for name in options:
        if name not in known:
            raise UnknownName(f"a sweep has no option {name!r}{did_you_mean(name, known) or '; see `nk.stitch_all`.'}")
    ways, wanted = find_ways(hows, seed), known_scores(scores)
    asked = Asked(ways=ways, scores=wanted, data=data, test=test, seed=seed, **options)
    asked.refuse_iterators()
    return asked


def _describe_call(name: str, asked: Asked, **models: Any) -> str:
    """Return the command or the call that requests a sweep."""
    options = {key: getattr(asked, key) for key in ("pairs", "layers", "measures", "scores", "shape", "resize", "seed")}
    counts = {"examples": asked.examples, "test_examples": asked.test_examples}
    test, hows = None if asked.test is None else data_name(asked.test), [way.id for way in asked.ways]
    return described_call(name, **models, data=data_name(asked.data), test=test, hows=hows, **options, **counts)


@dataclass(frozen=True)
class StitchPlan:
    """What a sweep of stitches would do: how many pairs of layers can be joined, and what that takes.

    `refused` has the reason of each pair that can't be joined. `passes` counts the forward passes of both models, one
    for each batch, and `examples` what goes through a model in them; both are None where the length of the data is
    unknown. The few examples that are tried out first, and trainings, do not count. `bytes` is the memory of the sums.
    """

    pairs: int
    joined: int
    refused: Mapping[Pair, str]
    methods: tuple[str, ...]
    passes: int | None
    bytes: int
    lines: tuple[str, ...]
    examples: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines)


@by_name(models="a b", data="data test")
def explain_stitch(
    a: nn.Module,
    b: nn.Module,
    data: Any = None,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    names: tuple[str, str] = ("a", "b"),
    **options: Any,
) -> StitchPlan:
    """Return what `stitch_all` would do with the same arguments, and its cost; only a few examples are run.

    Args:
        a: the first model.
        b: the second model.
        data: the examples from which the maps would be found.
        test: the examples on which they would be evaluated; by default `data`.
        hows: one method or several.
        names: what the plan calls the two models.
        options: those of `stitch_all` that decide what is computed, such as `pairs`, `layers` and `statistics`.
    """
    asked = _request(data, test, hows, **options)
    with lend_both(a, b, asked.device):
        found = asked.joints(a, b, names)
    if asked.saved:
        found = fit_saved(asked.saved, found, [weights_digest(model) for model in (a, b)]).joints
    widths = {x: found.widths[0][x] for x, _ in found.meetings}
    products = sum(widths[x] * found.widths[1][y] for x, y in found.meetings)
    taken = 0 if asked.saved else 8 * (sum(width**2 for width in widths.values()) + products)
    runs = _runs(asked, found)
    counts = [_counts(*given, times) for given, times in zip((asked.tried, asked.judging), runs, strict=True)]
    passes, examples = (None if None in both else sum(both) for both in zip(*counts, strict=True))
    refused = {pair: str(reason) for pair, reason in found.refused.items()}
    facts = (len(found.wanted), len(found.meetings), refused, tuple(way.id for way in asked.ways), passes, taken)
    plan = StitchPlan(*facts, (), examples)
    return replace(plan, lines=tuple(_plan_lines(plan, found, asked, runs)))


def _runs(asked: Asked, found: Joints) -> tuple[int, int]:
    """Return how often the two models run on each batch: of the data to fit on, and of those to evaluate on."""
    stitches = [(y, way.training is None) for _, y in found.meetings for way in asked.ways]
    portions = portions_in_memory([MEMORY * found.widths[1][y] ** 2 for y, direct in stitches if direct])
    trained = sum(not direct for _, direct in stitches)  # each is evaluated by itself
    whole = sum(not found.cuts[y] for y, _ in stitches)  # a second model that can't be cut runs for each stitch
    similarities = 1 if found.models[0] is found.models[1] else 2
    fitting = 0 if asked.saved or not found.meetings else 2
    return fitting, similarities + 2 * (len(portions) + trained) + whole


def _counts(data: Any, examples: int | None, times: int) -> tuple[int | None, int | None]:
    """Return the forward passes, and the examples in them, if the models run so many times on each batch."""
    count = examples_in(data, examples) if times else 0
    if not count:
        return count, count
    return times * -(-count // batch_length(next(batches_of(data, examples)))), times * count


def _plan_lines(plan: StitchPlan, found: Joints, asked: Asked, runs: tuple[int, int]) -> Iterator[str]:
    a, b = found.names
    yield f"stitches of {a!r} into {b!r}: {plan.joined:,} of {plan.pairs:,} pairs of layers can be joined"
    for reason, count in Counter(plan.refused.values()).most_common():
        yield f"  {count:,} can't be joined: {reason}"
    resized = Counter(meeting.words for meeting in found.meetings.values() if meeting.words)
    yield from (f"  {count:,} brought into another form: {words}" for words, count in resized.most_common())
    whole = [layer for layer, cut in found.cuts.items() if not cut]
    if whole:
        yield f"  the second model runs whole behind {', '.join(map(repr, whole))}, as it can't be cut there"
    source = "saved statistics" if asked.saved else "sums"
    for way in asked.ways:
        how = f"read from the {source}" if way.training is None else f"trained from {way.start}, {way.training.words}"
        yield f"method {way.id}: {how}"
    yield f"memory of the sums: {format_bytes(plan.bytes)}"
    counted = "" if plan.passes is None else f"{plan.passes:,}, of {plan.examples:,} examples in all"
    yield f"forward passes: {counted or 'unknown, as the data do not tell how many examples they have'}"
    yield f"  {runs[0]} on each batch for the maps; {runs[1]} on each of the test for similarities and evaluation"
    if any(way.training is not None for way in asked.ways):
        yield "and those of the training, in which the first model runs once on each example where memory allows"
