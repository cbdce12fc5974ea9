"""`compare`, `collect`, `explain`, `model_directions`: two models or recorded rows in; a labelled result out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.comparing.alignment import Pairs, size_of_weights
from netkin.comparing.comparer import Comparer, measures_of
from netkin.comparing.engines import Local, PassEngine, named_engine
from netkin.comparing.feed import Feed, data_name
from netkin.comparing.plan import (
    Need,
    Plan,
    explain_plan,
    memory_limit,
    needs_of,
    ready_collectors,
    weights_alone,
    weights_of,
)
from netkin.comparing.sides import (
    ModelInput,
    Reads,
    RecordedSide,
    Side,
    function_name,
    require_same_tokenizer,
    with_own_data,
)
from netkin.comparing.spec import (
    Measures,
    Options,
    Run,
    Spec,
    functions_by_name,
    layers_by_name,
    split,
    takes_options,
)
from netkin.comparing.stream import Stream
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import InflatedWarning, InvalidValue, NameClash, outside, require_utf8
from netkin.identity import function_digest, in_words, with_call
from netkin.measures import Directions, svcca_directions
from netkin.measures.registry import Measure, find
from netkin.measures.registry import measures as all_measures
from netkin.memory import is_cuda
from netkin.progress import Interruption, reporting, showing
from netkin.representations import dft
from netkin.representations.cutting import known_layer
from netkin.representations.shapes import require_known_layers, require_positions, with_positions
from netkin.results import Comparison
from netkin.settings import loaders_kept
from netkin.sources.batches import Batches
from netkin.sources.names import by_name
from netkin.sources.tokenized import joined_counts
from netkin.statistics.collector import Key, LayerSize, Study

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Call", "collect", "compare", "compare_sides", "explain", "merge", "model_directions"]

One = nn.Module | Mapping[str, Any] | ModelInput


@with_call
@by_name(models="a b", data="data", recordings=True)
@takes_options(without="part start rows save overwrite")
def compare(
    a: One, b: One | None = None, data: Any = None, measures: Measures = ("cka",), **options: Unpack[Options]
) -> Comparison:
    """Return how similar the layers of two models are, by every measure requested, from one pass over the data.

    Each model runs once on each batch, and one iteration over `data` feeds both. `a` and `b` may also be what was
    recorded before: files that `nk.recorded` opens, or mappings of layer names to arrays; a recording with the ids or
    the tokens of its examples is also compared with a model. Without `b` the layers of `a` are compared with each
    other.

    Args:
        a: a model, an `nk.recorded`, a mapping of layer names to arrays, or an `nk.ModelInput` with data of its own.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> comparison = compare({"x": X}, {"twice": 2 * X, "square": X**2})
        >>> round(comparison["x", "twice"], 6)
        1.0
    """
    spec, run = split({**options, "measures": measures})
    engine = named_engine(run.engine)
    with showing(run.progress), engine.working():
        return engine.compare(call_of(a, b, data, spec, run, by_name=engine.by_name), measures_of(measures))[0]


@by_name(models="a b", data="data", recordings=True)
@takes_options(without="part start rows engine save overwrite")
def explain(
    a: One, b: One | None = None, data: Any = None, measures: Measures = ("cka",), **options: Unpack[Options]
) -> Plan:
    """Return what `compare` would do with the same arguments, and what that costs; nothing is collected.

    The first batch is read and a few of its examples are run through each model, twice, to learn the layers' names and
    widths; a loader can be walked through again afterwards. What `compare` would then refuse, over pairs or memory,
    is the same sentence in the plan's `refused`; models that can't be run on the data are refused at once.

    Args:
        a: a model, an `nk.recorded`, a mapping of layer names to arrays, or an `nk.ModelInput` with data of its own.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(50, 8))
        >>> plan = explain({"x": X, "half": X[:, :4]}, {"y": X**2}, measures=["cka", "svcca"])
        >>> plan.pairs, plan.examples, plan.passes
        (2, 50, 0)
    """
    spec, run = split({**options, "measures": measures})
    return call_of(a, b, data, spec, run).explain(measures_of(measures))


@with_call
@by_name(models="a b", data="data", recordings=True)
@takes_options(without="rows save overwrite")
def collect(
    a: One, b: One | None = None, data: Any = None, measures: Measures | None = None, **options: Unpack[Options]
) -> Comparer:
    """Return what one pass of two models over the data leaves: saved, merged and read by any measure later.

    ``collect(a, b, data=d).compute("nbs")`` is ``compare(a, b, data=d, measures="nbs")``. Parts of the data may be
    collected apart, in any order and on any machine, and merged: ``nk.merge([first, second])``.

    Args:
        a: a model, an `nk.recorded`, a mapping of layer names to arrays, or an `nk.ModelInput` with data of its own.
        b: the second one.
        data: a loader, an iterable of batches or one array of inputs.
        measures: those to be served; without them all linear ones.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 8))
        >>> parts = [collect({"x": X}, {"y": X**2}, part=(i, 3)) for i in (1, 2, 3)]
        >>> round(merge(parts).compute("cka")["x", "y"] - compare({"x": X}, {"y": X**2})["x", "y"], 12)
        0.0
    """
    spec, run = split({**options, "measures": measures})
    engine = named_engine(run.engine)
    with showing(run.progress), engine.working():
        call = call_of(a, b, data, spec, run, by_name=engine.by_name)
        wanted = linear_measures(call.models) if measures is None else measures_of(measures)
        return engine.collect(call, wanted)


def merge(parts: Sequence[Comparer]) -> Comparer:
    """Return the comparer of all parts of the data together, in any order."""
    comparers = list(parts)
    if not comparers:
        raise InvalidValue("there is nothing to merge; pass at least one part.")
    while len(comparers) > 1:  # by halves, so that no part is added to all others one by one
        comparers = [functools.reduce(Comparer.merge, comparers[i : i + 2]) for i in range(0, len(comparers), 2)]
    return comparers[0]


def compare_sides(a: Side, b: Side, data: Any, spec: Spec) -> Comparison:
    """Return the comparison of two sides, for those whose rows and columns are not the layers of two models.

    `a` is run before `b` on each batch, so that `b` may reuse what `a` has computed.
    """
    return _call_of_sides(a, b, data, spec).compare(measures_of(spec.measures))[0]


def explain_sides(a: Side, b: Side, data: Any, spec: Spec) -> Plan:
    """Return what `compare_sides` would do with the same arguments, and what that costs."""
    return _call_of_sides(a, b, data, spec).explain(measures_of(spec.measures))


def _call_of_sides(a: Side, b: Side, data: Any, spec: Spec) -> Call:
    return Call({a.name: a, b.name: b}, data, spec, Run(), [(a.name, b.name)])


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call: models by their names, the data, which pairs of models are compared, and how.

    Args:
        models: with all that holds for each of them, as `inputs_of` gives them; sides are taken as they are.
        data: a loader, an iterable of batches or one array of inputs.
        spec: what is compared, and how.
        run: how the call runs.
        of: the pairs of models.
        engine: which processes take part.
        limit: the most bytes that statistics may take; None for that of the spec, or of the device.
    """

    models: Mapping[str, ModelInput | Side]
    data: Any
    spec: Spec
    run: Run
    of: Sequence[tuple[str, str]]
    engine: PassEngine = field(default_factory=Local)
    limit: int | None = None

    def sides(self) -> list[Side]:
        """Return what stands for each model in a stream."""
        return [
            source if isinstance(source, Side) else source.side(name, self.spec.exact_model)
            for name, source in self.models.items()
        ]

    @property
    def pairs(self) -> Pairs:
        return Pairs(self.of, self.spec.pairs)

    def study(self, sides: Sequence[Side]) -> Study:
        """Return what is known of the statistics before the layers are."""
        device = (
            next((side.device for side in sides if is_cuda(side.device)), None) if torch.cuda.is_available() else None
        )
        limit = self.limit if self.limit is not None else memory_limit(self.spec.limit, device)
        return Study(
            {}, [], limit=limit, chunks=self.spec.chunk_count, seed=int(self.spec.seed), tokens=self.spec.tokens,
            device=device,
        )  # fmt: skip

    def feed(self, sides: Sequence[Side], measures: Sequence[Measure]) -> Feed:
        """Return the data of this call as batches for each side."""
        paired = any(not kind.by_content for need in needs_of(measures) for kind in need.candidates)
        share, part = self.engine.part, cast("tuple[int, int] | None", self.spec.part)
        options = {"part": part is not None, "start": self.spec.start is not None, "partial": self.run.partial}
        for name, is_set in options.items():
            if share is not None and is_set:
                raise InvalidValue(
                    f"`{name}` is for one process, and here {share[1]} share the data; leave it out.", argument=name
                )
        feed = Feed(
            sides, self.data, self.spec.examples, share or part, self.spec.start or 0, paired, shared=share is not None
        )
        if feed.expected is not None:
            self._require_enough_examples(feed.expected)
        return feed

    def start_stream(self, sides: Sequence[Side], measures: Sequence[Measure]) -> Stream:
        """Return a stream that has run few examples of its first batch, which show the layers."""
        stream = Stream(sides, self.feed(sides, measures), Reads(resizes=bool(self.spec.resize)))
        with stream.open():
            stream.learn()
        require_same_tokenizer(sides, [size.shape for size in stream.sizes.values()])
        return stream

    def _require_enough_examples(self, examples: int) -> None:
        """Refuse more chunks than examples, but of a part that is given apart, which may be small."""
        if self.spec.start is None and examples < self.spec.chunk_count:
            raise InvalidValue(
                f"chunks={self.spec.chunks} are more than the {examples:,} examples; take fewer chunks or more "
                "examples.",
                argument="chunks",
            )

    # --- the work -----------------------------------------------------------------------------------------------------

    def compare(self, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparison of every pair of models."""
        comparer, interruption = self._collected(measures)
        return self.engine.once(lambda: comparisons_of(comparer, measures, self.of, interruption))

    def collect(self, measures: Sequence[Measure]) -> Comparer:
        """Return what one pass over the data leaves; of several processes the first has all of it."""
        comparer, _ = self._collected(measures)
        return self.engine.once(lambda: comparer)

    def _collected(self, measures: Sequence[Measure]) -> tuple[Comparer, Interruption]:
        """Return what one pass leaves, on the first of several processes what all of theirs leave together."""
        sides, interruption = self.sides(), Interruption(self.run.partial)
        with loaders_kept(self.data, *(side.data for side in sides)):
            feed = None if weights_alone(measures) else self.feed(sides, measures)
            with self.engine.prepare(sides, self._terms(measures, feed)):
                study = self.study(sides)
                study = replace(
                    study, limit=self.engine.least(study.limit), examples=None if feed is None else feed.expected
                )
                comparer = Comparer.of(self.spec, measures, self.pairs, study)
                if feed is None:  # no measure needs data
                    comparer.begin(self._sizes_of_weights(sides, comparer.needs))
                    self._take_weights(comparer, sides)
                    comparer.finish({side.name: side.origin for side in sides}, {})
                    return comparer, interruption
                self._read(comparer, sides, feed, interruption)
                self._describe(comparer, sides)
                if feed.expected is None and not interruption.ended:  # a stream, which tells its length at the end
                    self._require_enough_examples(comparer.examples)
            return self.engine.join(comparer, feed.length), interruption

    def _read(self, comparer: Comparer, sides: Sequence[Side], feed: Feed, interruption: Interruption) -> None:
        """Run every model once on each batch, and fold in what they give; Ctrl-C waits for the end of a batch."""
        stream = Stream(sides, feed, comparer.reads)
        with ExitStack() as stack:
            stack.enter_context(interruption.ending("reading", lambda: comparer.examples > 0))
            stack.enter_context(interruption.handling())
            stack.enter_context(stream.open())
            sizes = list(stream.learn().values())
            require_same_tokenizer(sides, [size.shape for size in sizes])
            comparer.begin(sizes)
            self._take_weights(comparer, sides)
            report = stack.enter_context(reporting(feed.length, "reading", "examples"))
            for place, batch in enumerate(stream):
                with ExitStack() as folding:
                    if interruption.wanted:  # which waits for the end of the batch
                        folding.enter_context(interruption.deferring())
                    if place == 0:
                        folding.enter_context(self.engine.opening(comparer))
                    report.update(comparer.take(batch))
                self.engine.check_others()
            comparer.flush()
        comparer.note(ended=sorted(interruption.ended))

    def _take_weights(self, comparer: Comparer, sides: Sequence[Side]) -> None:
        """Feed the weights of all layers to the collectors that read them."""
        if not any(need.of_weights for need in comparer.needs):
            return
        weights: dict[Key, dict[str, Tensor]] = {}
        for side in sides:
            layers = [layer for model, layer in comparer.alignment.given if model == side.name]
            for layer, tensors in side.weights(layers).items():
                weights[side.name, layer] = {name: tensor.detach() for name, tensor in tensors.items()}
        comparer.take_weights(weights)

    def _sizes_of_weights(self, sides: Sequence[Side], needs: Sequence[Need]) -> list[LayerSize]:
        return [
            size_of_weights(side.name, layer, tensors)
            for side in sides
            for layer, tensors in weights_of(side, needs).items()
        ]

    def _describe(self, comparer: Comparer, sides: Sequence[Side]) -> None:
        """Record in a comparer the models, the data and what was requested."""
        comparer.finish({side.name: side.origin for side in sides}, {side.name: side.left_out for side in sides})
        sources = {id(side.data): side.data for side in sides if side.data is not None}
        data_sets = list(sources.values()) or [self.data]
        part = self.engine.part if self.spec.part is None else self.spec.part
        comparer.note(
            data=" and ".join(map(data_name, data_sets)), settings=self.settings(),
            part="" if part is None else "/".join(map(str, part)), texts=self._texts(comparer, sides),
        )  # fmt: skip

    def _texts(self, comparer: Comparer, sides: Sequence[Side]) -> dict[str, dict[str, int]]:
        """Return what was made of the texts that were read here: by model where they have data of their own."""
        ranges = [tuple(number - (self.spec.start or 0) for number in ends) for ends in comparer.ranges]
        data = {"": self.data} | {side.name: side.data for side in sides if side.data is not None}
        counted = dict[str, dict[str, int]]()
        for name, batches in data.items():
            for ends in ranges if isinstance(batches, Batches) else ():
                if counts := batches.counts(*ends):
                    counted[name] = joined_counts(counted.get(name, {}), counts)
        return counted

    def explain(self, measures: Sequence[Measure]) -> Plan:
        """Return the plan of the pass, without taking it."""
        sides = self.sides()
        study = self.study(sides)
        if weights_alone(measures):
            sizes = self._sizes_of_weights(sides, needs_of(measures))
            return explain_plan(sizes, measures, self.pairs, replace(study, examples=0))
        for data in (self.data, *(side.data for side in sides)):
            if isinstance(data, Iterator):
                raise InvalidValue(
                    "`explain` reads the first batch, and what it takes from an iterator is gone; pass a loader or a "
                    "list."
                )
        with loaders_kept(self.data, *(side.data for side in sides)):
            stream = self.start_stream(sides, measures)
        feed = stream.feed
        require_positions((size.shape for size in stream.sizes.values()), self.spec.positions)
        return explain_plan(
            list(stream.sizes.values()),
            measures,
            self.pairs,
            replace(study, examples=feed.expected),
            left_out={side.name: side.left_out for side in sides if side.left_out},
            batch=stream.batch_length,
            seen=[feed.examples_of(side) for side in sides if not isinstance(side, RecordedSide)],
            runs=not all(isinstance(side, RecordedSide) for side in sides),
        )

    # --- what the numbers depend on -----------------------------------------------------------------------------------

    def settings(self, digest: Callable[[Any], str] = function_digest) -> dict[str, str]:
        """Return all that changes the numbers, beside weights and data, as text; functions by their digests."""
        spec, sources = self.spec, inputs_in(self.models)
        functions = {f"transform of {name}": source.transform for name, source in sources.items()}
        functions |= {f"forward of {name}": source.forward for name, source in sources.items()}
        settings = {what: digest(function) for what, function in functions.items() if function is not None}
        shapes = {"": spec.shape}
        shapes |= {f" of {name}": source.shape for name, source in sources.items() if source.shape != spec.shape}
        for whose, by_layer in shapes.items():
            for layer, shape in by_layer.items() if isinstance(by_layer, Mapping) else [("all", by_layer)]:
                settings[f"shape of {layer}{whose}"] = digest(shape) if callable(shape) else str(shape)
        return settings | {
            "resize": str(bool(spec.resize)), "pairs": self.pairs.words, "chunks": str(spec.chunk_count),
            "seed": str(spec.seed), "tokens": str(spec.tokens), "exact_model": str(spec.exact_model),
            "version": __version__,
        }  # fmt: skip

    def _terms(self, measures: Sequence[Measure], feed: Feed | None) -> dict[str, str]:
        """Return all that processes which share the work must agree on, beside weights and data."""
        names = {"models": ", ".join(self.models), "measures": ", ".join(measure.id for measure in measures)}
        settings = {"layers": in_words(self.spec.layers), "examples": str(feed and feed.expected)}
        # by the names of functions: what they hold, as a device, may be a process's own
        return names | settings | {"torch": str(torch.__version__)} | self.settings(function_name)


def call_of(a: Any, b: Any, data: Any, spec: Spec, run: Run, *, by_name: bool = False) -> Call:
    """Return one call for two models, or one that is compared with itself; `by_name` if names are loaded elsewhere."""
    names = spec.names
    require_utf8(names)
    # whether one model is compared with itself; one name may mean two networks with other random weights
    apart = isinstance(a, str) or (isinstance(spec.layers, Mapping) and "b" in spec.layers)
    alone = b is None or (b is a and spec.transforms is None and spec.forward is None and not apart)
    models: dict[str, Any] = {names[0]: a} if alone else {names[0]: a, names[1]: b}
    if not alone and len(models) < 2:
        raise NameClash(f"both models are named {names[0]!r}; give them two `names`.", argument="names")
    require_known_layers(spec.shape, *(getattr(model, "model", model) for model in models.values()))
    of = [(names[0], names[0] if alone else names[1])]
    sources = inputs_of(models, spec, run)
    sources |= {} if by_name else {name: source.loaded() for name, source in inputs_in(sources).items()}
    sources, data = with_own_data(sources, data)
    return Call(sources, data, spec, run, of)


def inputs_of(models: Mapping[str, Any], spec: Spec, run: Run) -> dict[str, ModelInput | Side]:
    """Return models by name, each with the layers, shape, functions and device that hold for it; sides as they are."""
    names, inputs = list(models), dict[str, ModelInput | Side]()
    layers = layers_by_name(spec.layers, names)
    forward = functions_by_name("forward", spec.forward, names)
    transforms = functions_by_name("transforms", spec.transforms, names)
    for name, model in models.items():
        source = model if isinstance(model, (ModelInput, Side)) else ModelInput(model)
        if isinstance(source, ModelInput):
            source = replace(
                source,
                layers=layers[name] if source.layers is None else source.layers,
                shape=spec.shape if source.shape is None else with_positions(source.shape, spec.positions),
                forward=source.forward or forward[name],
                transform=source.transform or transforms[name],
                device=source.device or run.device,
            )
        inputs[name] = source
    return inputs


def inputs_in(models: Mapping[str, ModelInput | Side]) -> dict[str, ModelInput]:
    """Return those models that are inputs, and not sides."""
    return {name: source for name, source in models.items() if isinstance(source, ModelInput)}


def linear_measures(models: Mapping[str, ModelInput | Side]) -> list[Measure]:
    """Return all measures that the collectors of `cka` serve, as far as the layers' shape allows."""
    shapes = [source.shape for source in inputs_in(models).values()]
    by_layer = [list(shape.values()) if isinstance(shape, Mapping) else [shape] for shape in shapes]
    collectors = ready_collectors(find("cka"))
    alike = [
        measure for measure in all_measures().values() if getattr(measure.facts.reads, "collectors", ()) == collectors
    ]
    if not any(shape in ("dft", dft) for shape in chain.from_iterable(by_layer) if shape is not None):
        return alike
    return [measure for measure in alike if "rotation" in measure.facts.unchanged_by and not measure.facts.debiases]


@by_name(models="a b", data="data")
@takes_options(
    without="part start rows engine save overwrite layers pairs resize names errors chunks seed partial exact_model"
)
def model_directions(
    a: nn.Module,
    layer: str,
    b: nn.Module | None = None,
    layer_b: str | None = None,
    data: Any = None,
    *,
    variance: float = 0.99,
    by: str = "variance",
    **options: Unpack[Options],
) -> Directions:
    """Return the SVCCA directions of a layer of `a` with a layer of `b`; each model runs once on each batch.

    Without `layer_b` it is the layer of the same name. Without `b` it is a layer of `a` itself, and the model's own
    output, the logits of a classifier, where none is named. The first side, ``.x``, belongs to `a`.

    Args:
        a: the first model.
        layer: its layer.
        b: the second model.
        layer_b: its layer.
        data: a loader, an iterable of batches or one array of inputs.
        variance: the share that the kept directions of each layer hold.
        by: "variance" for Σσ², "sum" for Σσ.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model_directions(model, "1", data=torch.randn(200, 4)).y.width
        3
    """
    other = layer_b if layer_b is not None else "" if b is None else layer
    for model, name in ((a, layer), (a if b is None else b, other)):
        if isinstance(model, nn.Module):
            known_layer(model, name)
    alone = b is None or (b is a and options.get("transforms") is None and options.get("forward") is None)
    models: dict[str, Any] = {"a": a} if alone else {"a": a, "b": b}
    layers = {"a": [*dict.fromkeys([layer, other])]} if alone else {"a": [layer], "b": [other]}
    spec, run = split({**options, "layers": layers, "pairs": [(layer, other)], "measures": ["svcca"]})
    pair = ("a", "a" if alone else "b")
    with showing(run.progress):
        comparer = Call(inputs_of(models, spec, run), data, spec, run, [pair]).collect([find("svcca")])
    moments = comparer.pair(find("svcca"), ("a", layer), (pair[1], other))
    if moments.few_examples:
        warnings.warn(str(moments.few_examples), InflatedWarning, stacklevel=outside())
    return svcca_directions(moments, variance=variance, by=by)
