"""Fitting: what direct methods need of all pairs of layers, summed in one pass over the data or read from statistics.

Rows are positions of maps, tokens of sequences, or examples. Both models run once on each batch, and only sums are
kept, so memory does not grow with the number of examples. What `nk.collect` has kept serves as well, without a pass.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.direct import LinearMap, find, least_squares, matched, reduced_rank
from netkin.applications.stitching.ends import Meeting, Pair, fitting_mask, product_layout, refuse_unfit_rank
from netkin.applications.stitching.joints import Joints, joints, watch_layers
from netkin.applications.stitching.map_training import JobPart, train_map
from netkin.applications.stitching.network import Stitch, stitched_network
from netkin.applications.stitching.task_loss import How, TaskLoss, Way, find_ways
from netkin.comparing.study import Statistics
from netkin.comparing.subjects import lent
from netkin.errors import InflatedWarning, UnknownName, ValueFault, outside
from netkin.identity import UnorderedDigest, settings_digest, weights_digest
from netkin.memory import size_in_words
from netkin.representations import batches_of, guest
from netkin.representations.inputs import attention_mask, batch_length, examples_in
from netkin.representations.layers import layer_label
from netkin.sources.names import by_name
from netkin.statistics import CrossMoments, LayerMoments, LayerRows, LinearRows, Moments, OneSidedMoments
from netkin.statistics.collector import Collector, Key
from netkin.statistics.cross_moments import are_firm

LayerKey = tuple[str, str]  # a model and a layer, as statistics name them
MEANS = {"maps": "pool", "tokens": "mean", "rows": "matrix"}  # the shapes in which statistics hold what a stitch maps
PLACES = {"maps": "positions", "tokens": "tokens", "rows": "matrix"}


class Fit:
    """What is known of the pairs of layers that can be joined; direct methods read their maps from their `moments`.

    Of a pair these are those of the first layer in the form of the second; of the second the mean may be all.
    """

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        names: tuple[str, str],
        found: Joints,
        moments: Callable[[Pair], Moments],
        data: tuple[str, int],
    ):
        self.models, self.names, self.joints, self.moments = models, names, found, moments
        self.digest, self.examples = data

    def map(self, pair: Pair, how: str) -> LinearMap:
        """Return the map that a direct method finds; it warns where any data would be fitted exactly."""
        moments = self.moments(pair)
        method, parameters = find(how)
        if method in (least_squares, reduced_rank):
            _refuse_coarse(moments, how)
        unknowns = moments.x.width + parameters.get("affine", True)
        if moments.n < unknowns and method in (least_squares, reduced_rank):
            warnings.warn(
                f"{moments.n:,} rows of {moments.x.name} are fewer than the {unknowns:,} unknowns for each unit, so "
                f"{how!r} meets these rows whatever they are; give more data, {10 * unknowns:,} rows or so, or choose "
                "'ridge'.",
                InflatedWarning,
                stacklevel=outside(),
            )
        return matched(moments, how)

    def stitch(self, pair: Pair, way: Way, seed: int, origin: Mapping[str, str]) -> Stitch:
        """Return the stitch of a pair by a method, before any training; `origin` is where it comes from."""
        meeting, rank = self.joints.meetings[pair], None if way.training is None else way.training.rank
        refuse_unfit_rank(rank, meeting)  # by its own name: the start would call it `k`
        linear = self.map(pair, way.start)
        network = stitched_network(*self.models, pair, linear, meeting, rank=rank, cuts=self.joints.cuts[pair[1]])
        asked = {"layers": pair, "how": way.identity, "start": way.start, "seed": seed, "resize": meeting.resize}
        provenance = {**origin, "data digest": str(self.digest), "settings digest": settings_digest(asked)}
        examples = 0 if way.is_blind else self.examples
        return Stitch(network, way.id, examples, names=self.names, seed=seed, provenance=provenance)


def fit_by_pass(a: nn.Module, b: nn.Module, batches: Iterable[Any], found: Joints, names: tuple[str, str]) -> Fit:
    """Return the fitted sums for the pairs of layers of `a` and `b` that can be joined.

    Args:
        a: the first model.
        b: the second model.
        batches: the examples.
        found: which pairs can be joined, and how.
        names: what messages call the models.
    """
    sums = CrossMoments(_keys(pair, meeting, names) for pair, meeting in found.meetings.items())
    digest = UnorderedDigest()
    with guest(a, b, exact=True), _both(a, b, found.meetings, sums, names) as fold:
        for batch in batches:
            fold(batch)
            digest.update(batch, batch_length(batch))
    keys = {pair: _keys(pair, meeting, names) for pair, meeting in found.meetings.items()}
    return Fit((a, b), names, found, lambda pair: sums.pair(*keys[pair]), (str(digest), digest.count))


def fit_saved(statistics: Statistics, a: nn.Module, b: nn.Module, found: Joints, names: tuple[str, str]) -> Fit:
    """Return the same sums from saved statistics of the two models, without a pass.

    Pairs that they can't serve are refused in its joints; where they can serve none, that is refused here.

    Args:
        statistics: what `nk.collect` or `nk.load` returned.
        a: the first model.
        b: the second model.
        found: which pairs can be joined, and how.
        names: what messages call the models.
    """
    sides = _saved_sides(statistics, (a, b), names)
    places: dict[Pair, tuple[Collector, Key, Key]] = {}
    refused = dict(found.refused)
    for pair, meeting in found.meetings.items():
        try:
            places[pair] = _saved_place(statistics, ((sides[0], pair[0]), (sides[1], pair[1])), meeting)
        except (UnknownName, ValueFault) as reason:
            refused[pair] = reason
    if found.meetings and not places:
        raise refused[next(iter(found.meetings))]
    served = replace(found, meetings={pair: found.meetings[pair] for pair in places}, refused=refused)
    data = (statistics.digest.hex, statistics.examples)
    return Fit((a, b), names, served, lambda pair: _saved_moments(*places[pair]), data)


def _saved_sides(
    statistics: Statistics, models: tuple[nn.Module, nn.Module], names: tuple[str, str]
) -> tuple[str, str]:
    """Return what statistics call two models; those of other models are refused."""
    if len(statistics.pairs.of) != 1:
        raise ValueFault(f"`statistics` must be of one pair of models; these are of {len(statistics.pairs.of)}.")
    for model, side, name in zip(models, statistics.pairs.of[0], names, strict=True):
        if statistics.origins[side].get("weights") != weights_digest(model):
            raise ValueFault(
                f"`statistics` were collected of other weights than those of {name!r}; collect them again with this "
                "model, or give the models in the order in which they were compared."
            )
    return statistics.pairs.of[0]


def _saved_place(
    statistics: Statistics, keys: tuple[LayerKey, LayerKey], meeting: Meeting
) -> tuple[Collector, Key, Key]:
    """Return the collector that holds the moments of two layers as a stitch maps them, and their keys there."""
    _refuse_other_form(statistics, keys, meeting)
    x, y = statistics.alignment.pair(*keys)
    both = " and ".join(f"{layer!r} of {model!r}" for model, layer in keys)
    if y != keys[1] or (x != keys[0] and meeting.resize != "average"):
        raise ValueFault(
            f"`statistics` hold the maps of {both} averaged down to the smaller size, and this stitch needs "
            f"{meeting.words}; leave `statistics` out for this pair."
        )
    kept = [one for one in statistics.every() if isinstance(one, (LayerMoments, LinearRows, CrossMoments))]
    if not kept:
        raise ValueFault("`statistics` hold no moments; collect them with a linear measure, such as measures=['cka'].")
    if not any(x in left and y in right for left, right in statistics.study.rectangles):
        raise ValueFault(
            f"`statistics` hold no moments of {both} together; collect with pairs='all', or list the pair."
        )
    for collector in kept:
        if {x, y} <= {*collector.names}:
            return collector, x, y
    raise ValueFault(f"the rows of {both} did not pair up when `statistics` were collected; leave them out.")


def _refuse_coarse(moments: Moments, how: str) -> None:
    """Refuse to whiten a layer by products in float32 where its units nearly depend on each other."""
    x = moments.x
    if isinstance(moments, OneSidedMoments) or x.rounding < torch.finfo(torch.float32).eps or are_firm(x.second[0]):
        return
    raise ValueFault(
        f"`statistics` hold {x.name} by products in float32, which are too coarse for {how!r} as its units nearly "
        "depend on each other; collect with measures=['linear_regression_r2'], which takes float64."
    )


def _saved_moments(collector: Collector, x: Key, y: Key) -> Moments:
    if isinstance(collector, LinearRows):  # rows are as exact as they came, whatever products were taken for
        return LayerRows.pair(collector, x, y).moments()
    return collector.pair(x, y)


def _refuse_other_form(statistics: Statistics, keys: tuple[LayerKey, LayerKey], meeting: Meeting) -> None:
    """Refuse statistics whose rows are not what a stitch of these layers maps."""
    given = {layer.key: layer for layers in statistics.layers.values() for layer in layers}
    for key, end in zip(keys, (meeting.a, meeting.b), strict=True):
        if key not in given:
            raise UnknownName(f"`statistics` hold no layer {key[1]!r} of {key[0]!r}; collect with layers that name it.")
        if meeting.a.form != meeting.b.form and meeting.b.kind != "rows":
            raise ValueFault(f"`statistics` hold no {meeting.words} for {key[1]!r}; leave them out for this pair.")
        wanted = (MEANS if meeting.b.kind == "rows" else PLACES)[end.kind]
        if given[key].shape.partition(",")[0] != wanted:
            raise ValueFault(
                f"`statistics` hold layer {key[1]!r} of {key[0]!r} by {given[key].shape!r}, and a stitch maps it by "
                f"{wanted!r}; collect with shape={wanted!r}."
            )


def train_stitch(
    found: Stitch, data: Any, settings: TaskLoss, *, validation: Any, examples: int | None, place: JobPart | None = None
) -> Stitch:
    """Return a stitch after its transformation was trained, in place, with the record of that.

    Args:
        found: the stitch to begin with.
        data: the examples.
        settings: how it is trained.
        validation: the examples it is evaluated on meanwhile.
        examples: how many of `data` are read.
        place: where the training's state is kept, in a job of which it is a part.
    """
    done = train_map(found.network, data, settings, validation=validation, examples=examples, place=place)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    origin = {**found.provenance, "data digest": done.data}
    return replace(found, examples=done.examples, history=done.history, training=ended, provenance=origin)


@contextmanager
def lend_both(a: nn.Module, b: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Lend two models to `device` while the `with` lasts."""
    with lent(a, device), nullcontext() if a is b else lent(b, device):
        yield


@contextmanager
def collect_warnings(said: list[str]) -> Iterator[None]:
    """Collect `InflatedWarning`s inside the `with` for the comparison; other warnings are passed on."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", InflatedWarning)
        yield
    for one in heard:
        if issubclass(one.category, InflatedWarning):
            said.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@contextmanager
def _both(
    a: nn.Module, b: nn.Module, meetings: Mapping[Pair, Meeting], sums: CrossMoments, names: tuple[str, str]
) -> Iterator[Callable[[Any], None]]:
    """Give a function that folds a batch in, with the hooks of both models in place."""
    forms: dict[str, dict[str, Meeting]] = {}
    for pair, meeting in meetings.items():
        forms.setdefault(pair[0], {})[_keys(pair, meeting, names)[0]] = meeting
    aims = {pair[1]: meeting.b for pair, meeting in meetings.items()}
    masks: list[Any] = [None]

    def first(layer: str, output: Tensor) -> None:
        for key, meeting in forms[layer].items():
            form = meeting.b.spread(meeting(output))
            sums.first(key, product_layout(form, fitting_mask(masks[0], form)))

    def second(layer: str, output: Tensor) -> None:
        form = aims[layer].spread(output)
        sums.second(_label(layer, names[1]), product_layout(form, fitting_mask(masks[0], form)))

    with ExitStack() as stack:
        run_a = stack.enter_context(watch_layers(a, list(forms), first, names[0]))
        run_b = stack.enter_context(watch_layers(b, list(aims), second, names[1]))

        def fold(batch: Any) -> None:
            masks[0] = attention_mask(batch)
            run_a(batch)
            run_b(batch)
            sums.batch_is_over()

        yield fold


def _keys(pair: Pair, meeting: Meeting, names: tuple[str, str]) -> tuple[str, str]:
    """Return the names under which a pair is gathered: the first layer in each form that is wanted once."""
    count = f"{meeting.b.tokens} tokens" if meeting.words and meeting.b.tokens else ""
    form = ", ".join(filter(None, [meeting.words, count]))
    return f"{_label(pair[0], names[0])}{f' ({form})' if form else ''}", _label(pair[1], names[1])


def _label(layer: str, model: str) -> str:
    return f"{layer_label(layer)} of {model!r}"


# --- what it would take -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StitchPlan:
    """What a sweep of stitches would do: how many pairs of layers can be joined, and what that takes.

    `refused` has the reason of each pair that can't be joined, `passes` counts forward passes of the models together
    (None where the length of the data is unknown), `bytes` is the memory of the sums.
    """

    pairs: int
    joined: int
    refused: Mapping[Pair, str]
    methods: tuple[str, ...]
    passes: int | None
    bytes: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@by_name(models="a b", data="data test")
def explain_stitch(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    test: Any = None,
    hows: How | Sequence[How] = ("least_squares",),
    *,
    pairs: Any = "corresponding",
    layers: Any = None,
    resize: str | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("a", "b"),
) -> StitchPlan:
    """Return what `stitch_all` would do with the same arguments, and its cost; only a few examples are run.

    Args:
        a: the first model.
        b: the second model.
        data: the examples from which the maps would be found.
        test: the examples on which they would be evaluated; by default `data`.
        hows: one method or several.
        pairs: "corresponding", "all" or a list of (layer, layer).
        layers: which layers (see `nk.layers`).
        resize: how maps get another size.
        examples: how many examples of `data` would be read.
        test_examples: how many of `test`.
        device: where the models run meanwhile.
        seed: seed for random maps and for training.
        names: what the plan calls the two models.
    """
    ways = find_ways(hows, seed)
    with lend_both(a, b, device):
        found = joints(a, b, next(batches_of(data, examples)), layers, pairs, resize=resize, names=names)
    sizes = [(found.widths[0][x], found.widths[1][y]) for x, y in found.meetings]
    numbers = sum(width**2 for width in {x: found.widths[0][x] for x, _ in found.meetings}.values())
    fitting = examples_in(data, examples)
    judging = examples_in(data if test is None else test, test_examples or (examples if test is None else None))
    passes = None if fitting is None or judging is None else 2 * fitting + 4 * judging
    refused = {pair: str(reason) for pair, reason in found.refused.items()}
    taken = 8 * (numbers + sum(p * q for p, q in sizes))
    facts = (len(found.wanted), len(found.meetings), refused, tuple(way.id for way in ways), passes, taken)
    return StitchPlan(*facts, tuple(_plan_lines(found, names, ways, passes, taken)))


def _plan_lines(
    found: Joints, names: tuple[str, str], ways: Sequence[Way], passes: int | None, taken: int
) -> Iterator[str]:
    joined, wanted = len(found.meetings), len(found.wanted)
    yield f"stitches of {names[0]!r} into {names[1]!r}: {joined:,} of {wanted:,} pairs of layers can be joined"
    for reason, count in Counter(map(str, found.refused.values())).most_common():
        yield f"  {count:,} can't be joined: {reason}"
    resized = Counter(meeting.words for meeting in found.meetings.values() if meeting.words)
    yield from (f"  {count:,} brought into another form: {words}" for words, count in resized.most_common())
    whole = [layer for layer, cut in found.cuts.items() if not cut]
    if whole:
        yield f"  the second model runs whole behind {', '.join(map(repr, whole))}, as it can't be cut there"
    for way in ways:
        how = "read from the sums" if way.training is None else f"trained from {way.start}, {way.training.words}"
        yield f"method {way.id}: {how}"
    yield f"memory of the sums: {size_in_words(taken)}"
    yield "forward passes of each model: one for the maps, one for the similarities, one for the evaluation"
    yield "  the data do not tell how many examples they have" if passes is None else f"  {passes:,} examples in all"
    if any(way.training is not None for way in ways):
        yield "and those of the training, in which the first model runs once on each example where memory allows"
