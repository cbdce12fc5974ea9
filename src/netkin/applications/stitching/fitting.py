"""Fitting: what direct methods need of all pairs of layers, summed in one pass over the data or read from statistics.

Rows are positions of maps, tokens of sequences, or examples. Both models run once on each batch, and only sums are
kept, so memory does not grow with the number of examples. What `nk.collect` has kept serves as well, without a pass.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.direct import LinearMap, find, least_squares, reduced_rank, refuse_unfit_rank
from netkin.applications.stitching.ends import FEW, End, Joints, Meeting, Pair, joints
from netkin.applications.stitching.map_training import JobPart, train_map
from netkin.applications.stitching.network import Stitch, stitched_network
from netkin.applications.stitching.task_loss import TaskLoss, Way
from netkin.applications.stitching.training_batches import BatchesDigest
from netkin.comparing.comparer import Comparer, load_comparer
from netkin.comparing.sides import on_device
from netkin.errors import InflatedWarning, InvalidValue, UnknownName, outside
from netkin.identity import UnorderedDigest, forms_by_name, settings_digest, weights_digest
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.cutting import run_layers
from netkin.representations.inputs import attention_mask, batch_length, watched
from netkin.representations.layers import layer_label
from netkin.representations.shapes import fitting_mask, product_layout
from netkin.results.caveats import Caveat
from netkin.sources.batches import overlap_remark
from netkin.statistics import CrossMoments, LayerMoments, LayerRows, LinearRows, Moments
from netkin.statistics.collector import Collector, Key
from netkin.statistics.cross_moments import are_firm

FITTED, JUDGED, VALIDATED = "fitting data digest", "test data digest", "validation data digest"
Saved = Comparer | str | os.PathLike[str] | Sequence[Comparer | str | os.PathLike[str]] | None
LayerKey = tuple[str, str]  # a model and a layer, as statistics name them
MEANS = {"maps": "pool", "tokens": "mean", "rows": "matrix"}  # the shapes in which statistics hold what a stitch maps
PLACES = {"maps": "positions", "tokens": "tokens", "rows": "matrix"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a sweep."""

    ways: tuple[Way, ...]
    data: Any
    scores: tuple[str, ...] = ()
    test: Any = None
    measures: Any = ("cka",)
    layers: Any = None
    pairs: Any = "corresponding"
    shape: Any = None
    resize: str | None = None
    examples: int | None = None
    test_examples: int | None = None
    validation: Any = None
    device: torch.device | str | None = None
    seed: int = 0
    each: Callable[[Stitch], None] | None = None
    statistics: Saved = None  # from which direct maps are read: one of them or several, or their files

    def __post_init__(self) -> None:
        if self.data is None and not self.saved:
            raise InvalidValue(
                "`data` is missing: pass a loader, an iterable of batches or one array of inputs.", argument="data"
            )
        if self.data is None and (self.test is None or any(way.training for way in self.ways)):
            raise InvalidValue(
                "statistics give the maps of direct methods alone: pass `data` for a training, and `test` to "
                "evaluate on."
            )
        for name in ("examples", "test_examples"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidValue(f"`{name}` must be at least 1; got {count}.")

    def refuse_iterators(self, what: str = "a sweep", names: Sequence[str] = ("data", "test", "validation")) -> None:
        """Refuse data that can be read once only, as `what` reads them several times."""
        for name in names:
            if isinstance(getattr(self, name), Iterator):
                raise InvalidValue(
                    f"`{name}` is an iterator, which gives its batches once, and {what} reads them several times; "
                    "pass a loader or a list."
                )

    @cached_property
    def saved(self) -> tuple[Comparer, ...]:
        """The statistics from which direct maps are read, opened."""
        given = self.statistics
        several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
        for one in several:
            if not isinstance(one, (Comparer, str, os.PathLike)):
                kind = type(one).__name__
                raise InvalidValue(
                    f"`statistics` is what `nk.collect` returned, its file, or a list of these; got {kind}.",
                    argument="statistics",
                )
        return tuple(one if isinstance(one, Comparer) else load_comparer(one) for one in several)

    @property
    def tried(self) -> tuple[Any, int | None]:
        """The data of which a few examples are tried out, and the maximal number of examples."""
        return self.judging if self.data is None else (self.data, self.examples)

    def joints(self, a: nn.Module, b: nn.Module, names: tuple[str, str]) -> Joints:
        """Return which layers of two models can be joined, tried out on the first examples."""
        first = next(batches_of(*self.tried))
        return joints(a, b, first, self.layers, self.pairs, resize=self.resize, names=names)

    @property
    def judging(self) -> tuple[Any, int | None]:
        """The data on which stitches are evaluated, and the maximal number of examples; else those of the fitting."""
        if self.test is None:
            return self.data, self.examples if self.test_examples is None else self.test_examples
        return self.test, self.test_examples

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of the data, which are read for them, and the batches and order of those to train on."""
        fitted, batches, order = ("none", 0, "") if self.data is None else digest_of(self.data, self.examples)
        same = self.judging[0] is self.data and self.judging[1] == self.examples
        judged = fitted if same else digest_of(*self.judging)[0]
        validated, _, then = ("none", 0, "") if self.validation is None else digest_of(self.validation)
        kept = ", ".join(one.digest.hex for one in self.saved)
        fitted = f"{kept} of statistics, data {fitted}" if kept else fitted
        return {FITTED: fitted, JUDGED: judged, VALIDATED: validated, "batches": f"{batches} batches{order}{then}"}

    def identity(
        self, models: Mapping[Pair, tuple[nn.Module, nn.Module]], marks: Mapping[Pair, Mapping[str, str]], several: bool
    ) -> dict[str, Any]:
        """Return what all stitches of models depend on; `marks` holds their weights. More may join several."""
        asked: dict[str, Any] = {key: text for key, text in self.digests.items() if key != "batches"}
        asked |= self.settings | {"architecture": forms_by_name(by_name(models, several))}
        if not several:
            (names,) = models
            return asked | {"names": f"{names[0]} into {names[1]}", **marks[names]}
        weights = {name: one for names, own in marks.items() for name, one in zip(names, own.values(), strict=True)}
        return asked | {"weights": weights}

    @cached_property
    def overlap(self) -> str:
        """How many test examples are among those of the fit, as a warning; empty if none are."""
        return "" if self.test is None else overlap_remark(self.data, self.test, self.examples, self.test_examples)

    @property
    def settings(self) -> dict[str, str]:
        """What the worth of a stitch depends on beside models, data, layers and method."""
        return {"resize": str(self.resize), "seed": str(self.seed)}


def digest_of(data: Any, examples: int | None = None) -> tuple[str, int, str]:
    """Return a text that changes with any example, input or label, but not with their order; and how many batches.

    The third is a text that changes with the order and with the sizes of the batches, empty for data that may shuffle.
    """
    found = BatchesDigest(data)
    for batch in watched(data, examples, "reading the data"):
        found.update(batch)
    return str(found.examples), len(found.sizes), found.order and f", order {found.order}"


@dataclass(frozen=True)
class Fit:
    """What is known of the pairs of layers that can be joined; direct methods read their maps from their `moments`.

    Of a pair these are those of the first layer in the form of the second; of the second the mean may be all. `digest`
    and `examples` are those of the data, and `statistics` the saved ones from which it is read, if it is.
    """

    joints: Joints
    moments: Callable[[Pair], Moments]
    digest: str
    examples: int
    statistics: Comparer | None = None

    def map(self, pair: Pair, how: str) -> LinearMap:
        """Return the map that a direct method finds."""
        moments = self.moments(pair)
        method, parameters = find(how)
        if method in (least_squares, reduced_rank) and self.statistics is not None:
            _refuse_coarse(moments, how)
        return method(moments, **parameters)

    def few_rows(self, pair: Pair, how: str) -> Caveat | None:
        """Return a caveat where a direct method would fit any data exactly."""
        moments = self.moments(pair)
        method, parameters = find(how)
        unknowns = moments.x.width + parameters.get("affine", True)
        if moments.n >= unknowns or method not in (least_squares, reduced_rank):
            return None
        sentence = (
            f"{moments.n:,} rows of {moments.x.name} are fewer than the {unknowns:,} unknowns for each neuron, so "
            f"{how!r} fits any such rows exactly; give more data, about {10 * unknowns:,} rows, or choose 'ridge'."
        )
        return Caveat("few-rows", sentence, size=0)  # the first stands for all

    def stitch(self, pair: Pair, way: Way, seed: int, origin: Mapping[str, str]) -> Stitch:
        """Return the stitch of a pair by a method, before any training; `origin` is where it comes from."""
        meeting, rank = self.joints.meetings[pair], None if way.training is None else way.training.rank
        refuse_unfit_rank(rank, meeting)  # by its own name: the start would call it `k`
        linear = self.map(pair, way.start)
        models, cuts = self.joints.models, self.joints.cuts[pair[1]]
        network = stitched_network(*models, pair, linear, meeting, rank=rank, cuts=cuts)
        asked = {"layers": pair, "how": way.identity, "start": way.start, "seed": seed, "resize": meeting.resize}
        provenance = {**origin, "data digest": self.digest, "settings digest": settings_digest(asked)}
        examples = 0 if way.is_blind else self.examples
        return Stitch(network, way.id, examples, names=self.joints.names, seed=seed, provenance=provenance)


def fit_by_pass(batches: Iterable[Any], found: Joints) -> Fit:
    """Return the sums for the pairs of layers that can be joined, from one pass of both models over the batches."""
    keys: dict[Pair, tuple[str, str]] = {}  # the names under which a pair is summed
    forms: dict[str, dict[str, Meeting]] = {}  # those in which a layer of the first model is wanted, each once
    aims: dict[str, tuple[str, End]] = {}
    for pair, meeting in found.meetings.items():
        x, y = (f"{layer_label(layer)} of {name!r}" for layer, name in zip(pair, found.names, strict=True))
        count = f"{meeting.b.tokens} tokens" if meeting.words and meeting.b.tokens else ""
        form = ", ".join(filter(None, [meeting.words, count]))
        keys[pair] = f"{x} ({form})" if form else x, y
        forms.setdefault(pair[0], {})[keys[pair][0]], aims[pair[1]] = meeting, (y, meeting.b)
    (a, b), sums, digest = found.models, CrossMoments(keys.values()), UnorderedDigest()

    def first(layer: str, output: Tensor) -> None:
        for key, meeting in forms[layer].items():
            form = meeting.b.spread(meeting(output))
            sums.first(key, product_layout(form, fitting_mask(mask, form)))

    def second(layer: str, output: Tensor) -> None:
        key, end = aims[layer]
        form = end.spread(output)
        sums.second(key, product_layout(form, fitting_mask(mask, form)))

    with inference_mode_of(a, b, exact=True):
        for batch in batches:
            mask = attention_mask(batch)
            run_layers(a, forms, batch, first, found.names[0])
            run_layers(b, aims, batch, second, found.names[1])
            sums.batch_is_over()
            digest.update(batch, batch_length(batch))
    return Fit(found, lambda pair: sums.pair(*keys[pair]), str(digest), digest.count)


def fit_saved(every: Sequence[Comparer], found: Joints, weights: Sequence[str]) -> Fit:
    """Return the same sums without a pass, from those saved statistics that are of the two models, in either order.

    `weights` are the digests of the models. Pairs that they can't serve are refused in its joints; where they can serve
    none, that is refused here.
    """
    statistics, sides = _saved_sides(every, found.names, weights)
    places: dict[Pair, tuple[Collector, Key, Key]] = {}
    refused = dict(found.refused)
    for pair, meeting in found.meetings.items():
        try:
            places[pair] = _saved_place(statistics, ((sides[0], pair[0]), (sides[1], pair[1])), meeting)
        except (UnknownName, InvalidValue) as reason:
            refused[pair] = reason
    if found.meetings and not places:
        raise refused[next(iter(found.meetings))]
    served = replace(found, meetings={pair: found.meetings[pair] for pair in places}, refused=refused)
    return Fit(
        served, lambda pair: _saved_moments(*places[pair]), statistics.digest.hex, statistics.examples, statistics
    )


def _saved_sides(
    every: Sequence[Comparer], names: tuple[str, str], weights: Sequence[str]
) -> tuple[Comparer, tuple[str, str]]:
    """Return the statistics of two models, and what they call them; those of other models are refused."""
    for statistics in every:
        for x, y in statistics.pairs.of:
            for sides in ((x, y), (y, x)):
                if [statistics.record.origins[side].get("weights") for side in sides] == list(weights):
                    return statistics, sides
    known = {origin.get("weights") for statistics in every for origin in statistics.record.origins.values()}
    strange = next((name for name, own in zip(names, weights, strict=True) if own not in known), None)
    if strange is not None:
        raise InvalidValue(
            f"`statistics` were collected of other weights than those of {strange!r}; collect them with this model.",
            argument="statistics",
        )
    raise InvalidValue(
        f"no `statistics` are of {names[0]!r} and {names[1]!r} together; collect those of this pair too."
    )


def _saved_place(statistics: Comparer, keys: tuple[LayerKey, LayerKey], meeting: Meeting) -> tuple[Collector, Key, Key]:
    """Return the collector that holds the moments of two layers as a stitch maps them, and their keys there."""
    _refuse_other_form(statistics, keys, meeting)
    x, y = statistics.alignment.pair(*keys)
    both = " and ".join(f"{layer!r} of {model!r}" for model, layer in keys)
    if y != keys[1] or (x != keys[0] and meeting.resize != "average"):
        raise InvalidValue(
            f"`statistics` hold the maps of {both} averaged down to the smaller size, and this stitch needs "
            f"{meeting.words}; leave `statistics` out for this pair.",
            argument="statistics",
        )
    kept = [one for one in statistics.every() if isinstance(one, (LayerMoments, LinearRows))]
    if not kept:
        raise InvalidValue(
            "`statistics` hold no moments; collect them with a linear measure, such as measures=['cka'].",
            argument="statistics",
        )
    pair_blocks = statistics.study.pair_blocks
    if not any((x in left and y in right) or (y in left and x in right) for left, right in pair_blocks):
        raise InvalidValue(
            f"`statistics` hold no moments of {both} together; collect with pairs='all', or list the pair.",
            argument="statistics",
        )
    for collector in kept:
        if {x, y} <= {*collector.names}:
            return collector, x, y
    raise InvalidValue(f"the rows of {both} did not pair up when `statistics` were collected; leave them out.")


def _refuse_coarse(moments: Moments, how: str) -> None:
    """Refuse to whiten a layer by products in float32 where its neurons nearly depend on each other."""
    x = moments.x
    if x.rounding < torch.finfo(torch.float32).eps or are_firm(x.second[0]):
        return
    raise InvalidValue(
        f"`statistics` hold {x.name} by products in float32, which are too coarse for {how!r} as its neurons nearly "
        "depend on each other; collect with measures=['linear_regression_r2'], which takes float64.",
        argument="statistics",
    )


def _saved_moments(collector: Collector, x: Key, y: Key) -> Moments:
    if isinstance(collector, LinearRows):  # rows are as exact as they came, whatever products were taken for
        return LayerRows.pair(collector, x, y).moments()
    return collector.pair(x, y)


def _refuse_other_form(statistics: Comparer, keys: tuple[LayerKey, LayerKey], meeting: Meeting) -> None:
    """Refuse statistics whose rows are not what a stitch of these layers maps."""
    given = {layer.key: layer for layers in statistics.layers.values() for layer in layers}
    for key, end in zip(keys, (meeting.a, meeting.b), strict=True):
        if key not in given:
            raise UnknownName(
                f"`statistics` hold no layer {key[1]!r} of {key[0]!r}; collect with layers that name it.",
                argument="statistics",
            )
        if meeting.a.form != meeting.b.form and meeting.b.kind != "rows":
            raise InvalidValue(
                f"`statistics` hold no {meeting.words} for {key[1]!r}; leave them out for this pair.",
                argument="statistics",
            )
        wanted = (MEANS if meeting.b.kind == "rows" else PLACES)[end.kind]
        if given[key].shape.partition(",")[0] != wanted:
            raise InvalidValue(
                f"`statistics` hold layer {key[1]!r} of {key[0]!r} by {given[key].shape!r}, and a stitch maps it by "
                f"{wanted!r}; collect with shape={wanted!r}.",
                argument="statistics",
            )


def by_name(models: Mapping[Pair, tuple[nn.Module, nn.Module]], several: bool) -> dict[str, nn.Module]:
    """Return the models of pairs by the names under which a sweep knows them, those of one pair as first and second."""
    pairs = [(names if several else ("first", "second"), pair) for names, pair in models.items()]
    return {name: model for names, pair in pairs for name, model in zip(names, pair, strict=True)}


def make_stitches(
    a: nn.Module, b: nn.Module, asked: Asked, names: tuple[str, str], call: str
) -> dict[tuple[Pair, Way], Stitch]:
    """Return the stitches of pairs of layers, before any training; a pair that can't be joined is refused."""
    if isinstance(names, str) or len(names) != 2:
        raise InvalidValue(
            f"`names` must be two, one for each model, such as ('old', 'new'); got {names!r}.", argument="names"
        )
    if not asked.pairs:
        raise InvalidValue("no pairs of layers to stitch were given.")
    data, examples = asked.tried
    few = asked.saved or all(way.is_blind for way in asked.ways)
    batches = watched(data, FEW if few else examples, "fitting")
    first = next(batches)
    found = joints(a, b, first, pairs=asked.pairs, resize=asked.resize, names=names)
    found.refuse()
    weights = [weights_digest(model) for model in (a, b)]
    if asked.saved:
        fit = fit_saved(asked.saved, found, weights)
        fit.joints.refuse()
    else:
        fit = fit_by_pass(chain([first], batches), found)
    origin = {"call": call, "weights a": weights[0], "weights b": weights[1]}
    made = {}
    for pair, way in product(found.meetings, asked.ways):
        made[pair, way] = fit.stitch(pair, way, asked.seed, origin)
        few_rows = fit.few_rows(pair, way.start)
        if few_rows is not None:
            warnings.warn(str(few_rows), InflatedWarning, stacklevel=outside())
    return made


def train_stitch(
    found: Stitch, data: Any, settings: TaskLoss, validation: Any, examples: int | None, place: JobPart | None = None
) -> Stitch:
    """Return a stitch after its transformation was trained, in place, with the record of that (see `train_map`)."""
    done = train_map(found.network, data, settings, validation=validation, examples=examples, place=place)
    ended = {"steps": done.steps, "step": done.step, "stopped": done.stopped, "kept": done.kept, "final": done.final}
    origin = {**found.provenance, "data digest": done.data}
    return replace(found, examples=done.examples, history=done.history, training=ended, provenance=origin)


@contextmanager
def lend_both(a: nn.Module, b: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Lend two models to `device` while the `with` lasts."""
    with on_device(a, device), nullcontext() if a is b else on_device(b, device):
        yield
