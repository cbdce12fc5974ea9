"""Fitting: what direct methods need of all pairs of layers, summed in one pass over the data or read from statistics.

Rows are positions of maps, tokens of sequences, or examples. Both models run once on each batch, and only sums are
kept, so memory does not grow with the number of examples. What `nk.collect` has kept serves as well, without a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netkin.applications.stitching.joining import Adapter, Joints, LayerOutput, Pair
from netkin.applications.stitching.maps import find, least_squares, reduced_rank
from netkin.applications.stitching.network import Stitch, require_rank, stitched_network
from netkin.applications.stitching.request import StitchMethod
from netkin.comparing.comparer import Comparer
from netkin.errors import InvalidValue, UnknownName
from netkin.identity import UnorderedDigest, settings_digest
from netkin.representations import inference_mode_of
from netkin.representations.cutting import run_layers
from netkin.representations.inputs import attention_mask, batch_length
from netkin.representations.layers import layer_label
from netkin.representations.shapes import fitting_mask, product_layout
from netkin.results.caveats import Caveat
from netkin.statistics import CrossMoments, LayerMoments, LayerRows, LinearRows, Moments
from netkin.statistics.collector import Collector, Key
from netkin.statistics.cross_moments import are_firm

LayerKey = tuple[str, str]  # a model and a layer, as statistics name them
MEANS = {"maps": "pool", "tokens": "mean", "rows": "matrix"}  # the shapes in which statistics hold what a stitch maps
PLACES = {"maps": "positions", "tokens": "tokens", "rows": "matrix"}


@dataclass(frozen=True)
class FittedMoments:
    """What is known of the pairs of layers that can be joined; direct methods read their maps from their `moments`.

    Of a pair these are those of the first layer in the form of the second; of the second the mean may be all. `digest`
    and `examples` are those of the data, and `statistics` the saved ones from which it is read, if it is.
    """

    joints: Joints
    moments: Callable[[Pair], Moments]
    digest: str
    examples: int
    statistics: Comparer | None = None

    def few_rows(self, pair: Pair, method: str) -> Caveat | None:
        """Return a caveat where a direct method would fit any data exactly."""
        moments = self.moments(pair)
        function, parameters = find(method)
        unknowns = moments.x.width + parameters.get("affine", True)
        if moments.n >= unknowns or function not in (least_squares, reduced_rank):
            return None
        sentence = (
            f"{moments.n:,} rows of {moments.x.name} are fewer than the {unknowns:,} unknowns for each neuron, so "
            f"{method!r} fits any such rows exactly; give more data, about {10 * unknowns:,} rows, or choose 'ridge'."
        )
        return Caveat("few-rows", sentence, size=0)  # the first stands for all

    def stitch(self, pair: Pair, method: StitchMethod, seed: int, origin: Mapping[str, str]) -> Stitch:
        """Return the stitch of a pair by a method, before any training; `origin` is where it comes from."""
        adapter, rank = self.joints.adapters[pair], None if method.training is None else method.training.rank
        require_rank(rank, adapter)  # by its own name: the start would call it `k`
        moments, (function, parameters) = self.moments(pair), find(method.start)
        if function in (least_squares, reduced_rank) and self.statistics is not None:
            _require_precision(moments, method.start)
        linear, cuts = function(moments, **parameters), self.joints.cuts[pair[1]]
        network = stitched_network(*self.joints.models, pair, linear, adapter, rank=rank, cuts=cuts)
        settings = {
            "layers": pair,
            "method": method.identity,
            "start": method.start,
            "seed": seed,
            "resize": adapter.resize,
        }
        provenance = {**origin, "data digest": self.digest, "settings digest": settings_digest(settings)}
        examples = 0 if method.is_blind else self.examples
        return Stitch(network, method.id, examples, names=self.joints.names, seed=seed, provenance=provenance)


def fit_by_pass(batches: Iterable[Any], found: Joints) -> FittedMoments:
    """Return the sums for the pairs of layers that can be joined, from one pass of both models over the batches."""
    keys: dict[Pair, tuple[str, str]] = {}  # the names under which a pair is summed
    forms: dict[str, dict[str, Adapter]] = {}  # those in which a layer of the first model is wanted, each once
    aims: dict[str, tuple[str, LayerOutput]] = {}
    for pair, adapter in found.adapters.items():
        x, y = (f"{layer_label(layer)} of {name!r}" for layer, name in zip(pair, found.names, strict=True))
        count = f"{adapter.b.tokens} tokens" if adapter.words and adapter.b.tokens else ""
        form = ", ".join(filter(None, [adapter.words, count]))
        keys[pair] = f"{x} ({form})" if form else x, y
        forms.setdefault(pair[0], {})[keys[pair][0]], aims[pair[1]] = adapter, (y, adapter.b)
    (a, b), sums, digest = found.models, CrossMoments(keys.values()), UnorderedDigest()

    def first(layer: str, output: Tensor) -> None:
        for key, adapter in forms[layer].items():
            form = adapter.b.spread(adapter(output))
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
    return FittedMoments(found, lambda pair: sums.pair(*keys[pair]), str(digest), digest.count)


def fit_saved(every: Sequence[Comparer], found: Joints, weights: Sequence[str]) -> FittedMoments:
    """Return the same sums without a pass, from those saved statistics that are of the two models, in either order.

    `weights` are the digests of the models. Pairs that they can't serve are refused in its joints; where they can serve
    none, that is refused here.
    """
    statistics, sides = _saved_sides(every, found.names, weights)
    moments, refused = dict[Pair, Callable[[], Moments]](), dict(found.refused)
    for pair, adapter in found.adapters.items():
        try:
            moments[pair] = _saved_moments(statistics, ((sides[0], pair[0]), (sides[1], pair[1])), adapter)
        except (UnknownName, InvalidValue) as reason:
            refused[pair] = reason
    if found.adapters and not moments:
        raise refused[next(iter(found.adapters))]
    served = replace(found, adapters={pair: found.adapters[pair] for pair in moments}, refused=refused)
    return FittedMoments(served, lambda pair: moments[pair](), statistics.digest.hex, statistics.examples, statistics)


def _saved_sides(every: Sequence[Comparer], names: Pair, weights: Sequence[str]) -> tuple[Comparer, Pair]:
    """Return the statistics of two models, and what they call them; those of other models are refused."""
    for statistics in every:
        for x, y in statistics.pairs.of:
            for sides in ((x, y), (y, x)):
                if [statistics.record.origins[side].get("weights") for side in sides] == list(weights):
                    return statistics, sides
    known = {origin.get("weights") for statistics in every for origin in statistics.record.origins.values()}
    strange = next((name for name, own in zip(names, weights, strict=True) if own not in known), None)
    if strange is not None:
        raise _unfit(
            f"`statistics` were collected of other weights than those of {strange!r}; collect them with this model."
        )
    raise _unfit(f"no `statistics` are of {names[0]!r} and {names[1]!r} together; collect those of this pair too.")


def _saved_moments(statistics: Comparer, keys: tuple[LayerKey, LayerKey], adapter: Adapter) -> Callable[[], Moments]:
    """Return what reads the moments of two layers as a stitch maps them; statistics without them are refused."""
    given = {layer.key: layer for layers in statistics.layers.values() for layer in layers}
    for (model, layer), end in zip(keys, (adapter.a, adapter.b), strict=True):
        if (model, layer) not in given:
            sentence = f"`statistics` hold no layer {layer!r} of {model!r}; collect with layers that name it."
            raise UnknownName(sentence, argument="statistics")
        if adapter.a.form != adapter.b.form and adapter.b.kind != "rows":
            raise _unfit(f"`statistics` hold no {adapter.words} for {layer!r}; leave them out for this pair.")
        held, wanted = given[model, layer].shape, (MEANS if adapter.b.kind == "rows" else PLACES)[end.kind]
        if held.partition(",")[0] != wanted:
            raise _unfit(
                f"`statistics` hold layer {layer!r} of {model!r} by {held!r}, and a stitch maps it by {wanted!r}; "
                f"collect with shape={wanted!r}."
            )
    x, y = statistics.alignment.pair(*keys)
    both = " and ".join(f"{layer!r} of {model!r}" for model, layer in keys)
    if y != keys[1] or (x != keys[0] and adapter.resize != "average"):
        raise _unfit(
            f"`statistics` hold the maps of {both} averaged down to the smaller size, and this stitch needs "
            f"{adapter.words}; leave `statistics` out for this pair."
        )
    kept = [one for one in statistics.every() if isinstance(one, (LayerMoments, LinearRows))]
    if not kept:
        raise _unfit("`statistics` hold no moments; collect them with a linear measure, such as measures=['cka'].")
    blocks = statistics.study.pair_blocks
    if not any((x in left and y in right) or (y in left and x in right) for left, right in blocks):
        raise _unfit(f"`statistics` hold no moments of {both} together; collect with pairs='all', or list the pair.")
    for one in kept:
        if {x, y} <= {*one.names}:
            return partial(_pair, one, x, y)
    raise _unfit(f"the rows of {both} did not pair up when `statistics` were collected; leave them out.")


def _pair(collector: Collector, x: Key, y: Key) -> Moments:
    if isinstance(collector, LinearRows):  # rows are as exact as they came, whatever products were taken for
        return LayerRows.pair(collector, x, y).moments()
    return collector.pair(x, y)


def _require_precision(moments: Moments, method: str) -> None:
    """Refuse to whiten a layer by products in float32 where its neurons nearly depend on each other."""
    x = moments.x
    if x.rounding >= torch.finfo(torch.float32).eps and not are_firm(x.second[0]):
        raise _unfit(
            f"`statistics` hold {x.name} by products in float32, which are too coarse for {method!r} as its neurons "
            "nearly depend on each other; collect with measures=['linear_regression_r2'], which takes float64."
        )


def _unfit(sentence: str) -> InvalidValue:
    return InvalidValue(sentence, argument="statistics")
