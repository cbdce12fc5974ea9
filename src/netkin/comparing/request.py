"""One call of `compare`, `collect` or `explain`: what is compared, on what data, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from netkin import __version__
from netkin.comparing.alignment import Pairs
from netkin.comparing.collecting import Pass
from netkin.comparing.engines import Local, PassEngine
from netkin.comparing.feed import Feed, data_name, parse_part
from netkin.comparing.pass_statistics import Statistics
from netkin.comparing.planning import (
    Plan,
    make_explanation,
    memory_limit,
    needs_of,
    ready_collectors,
    refuse_stream,
    weights_alone,
)
from netkin.comparing.subjects import ModelRunner, RecordedRunner, Runner, Subject, WeightsRunner, function_name
from netkin.comparing.tabulating import comparisons_of
from netkin.errors import InvalidValue, UnknownName, refuse_half_characters
from netkin.identity import function_digest, in_words
from netkin.measures.registry import Measure, find
from netkin.measures.registry import measures as all_measures
from netkin.memory import is_cuda
from netkin.progress import Interruption
from netkin.representations import dft, positions
from netkin.representations.layers import Spec
from netkin.representations.shapes import shape_name
from netkin.results import Comparison
from netkin.settings import loaders_kept
from netkin.statistics.collector import Study


class Options:
    """Options for all models, or for each; they make runners of what was passed."""

    def __init__(
        self,
        layers: Any,
        places: Mapping[str, str],
        shape: Any,
        resize: str | None,
        transforms: Any,
        forward: Any,
        device: torch.device | str | None,
        exact_model: bool = False,
    ):
        if resize not in (None, "average"):
            raise UnknownName(f"`resize` is None or 'average'; got {resize!r}.")
        if resize and shape not in ("positions", positions, "dft", dft):
            raise InvalidValue(
                f"`resize` goes with shape='positions' or shape='dft'; got shape={shape!r}.", argument="resize"
            )
        _refuse_beside_dft(shape)
        refuse_half_characters(places)
        self.layers, self.places, self.device, self.exact_model = layers, places, device, exact_model
        self.shape, self.resizes = shape, bool(resize)
        self.transforms = _one_each("transforms", transforms, list(places))
        self.forward = _one_each("forward", forward, list(places))

    def layers_of(self, name: str) -> Spec:
        if not isinstance(self.layers, Mapping):
            return self.layers
        unknown = set(self.layers) - set(self.places.values()) - set(self.places)
        if unknown:
            raise InvalidValue(
                f"`layers` names {sorted(unknown)[0]!r}; the models are {', '.join(map(repr, self.places))}."
            )
        return self.layers.get(name, self.layers.get(self.places[name]))

    def runner(self, name: str, thing: Any) -> Runner:
        """Return what runs in a pass for a model, a mapping of recorded arrays, a subject or a runner."""
        subject = thing if isinstance(thing, Subject) else Subject(thing)
        runner = self._runner(name, subject)
        runner.data = subject.data if runner.data is None else runner.data
        runner.resizes = runner.resizes or self.resizes
        return runner

    def _runner(self, name: str, subject: Subject) -> Runner:
        thing = subject.thing
        layers = self.layers_of(name) if subject.layers is None else subject.layers
        shape = self.shape if subject.shape is None else subject.shape
        if isinstance(thing, Runner):
            return thing
        if thing is None and subject.weights is not None:
            return WeightsRunner(name, subject.weights, layers)
        if isinstance(thing, nn.Module):
            forward, transform = subject.forward or self.forward[name], subject.transform or self.transforms[name]
            device = subject.device or self.device
            return ModelRunner(name, thing, layers, shape, forward, transform, device, self.exact_model)
        if isinstance(thing, Mapping):
            return RecordedRunner(name, thing, layers, shape)
        raise InvalidValue(
            f"{name!r} must be a torch module or a mapping of layer names to arrays; got {type(thing).__name__}."
            + (" `nk.load_model` makes a model of a text." if isinstance(thing, str) else "")
            + " `torch.export.unflatten` makes a module of it." * isinstance(thing, torch.export.ExportedProgram)
        )


def _refuse_beside_dft(shape: Any) -> None:
    """Refuse a mapping of shapes in which some layers go by frequencies and others by places or tokens."""
    shapes = [shape_name(one) for one in shape.values()] if isinstance(shape, Mapping) else []
    several = next((one for one in shapes if one in ("positions", "tokens")), None)
    if "dft" in shapes and several:
        raise InvalidValue(
            f"with 'dft' every layer must give one row per example, and {several!r} gives several; "
            "use 'pool' or 'mean' for the others."
        )


def _one_each(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    if given is None or callable(given) or isinstance(given, str):
        return dict.fromkeys(names, given)
    if isinstance(given, Mapping):
        return {name: given.get(name) for name in names}
    if len(given) != len(names):
        raise InvalidValue(
            f"`{what}` must be one function or one for each of the {len(names)} models; got {len(given)}."
        )
    return dict(zip(names, given, strict=True))


def linear_measures(given: Mapping[str, Any], shape: Any) -> list[Measure]:
    """Return all measures that the collectors of `cka` serve, as far as the layers' shape allows."""
    shapes = shape.values() if isinstance(shape, Mapping) else [shape]
    own = [runner_shape for thing in given.values() if (runner_shape := getattr(thing, "shape", None))]
    spectral = any(shape in ("dft", dft) for shape in (*shapes, *own) if shape is not None)
    collectors = ready_collectors(find("cka"))
    alike = [one for one in all_measures().values() if getattr(one.facts.reads, "collectors", ()) == collectors]
    fit = [one for one in alike if "rotation" in one.facts.unchanged_by and not one.facts.debiases]
    return fit if spectral else alike


class Request:
    """One call: what is compared, on what data, and how."""

    failed: Mapping[str, str] = MappingProxyType({})  # models that were left out, and why; none of one process

    def __init__(
        self,
        given: Mapping[str, Any],
        options: Options,
        pairs: Pairs,
        study: Study,
        data: Any = None,
        examples: int | None = None,
        partial: bool = False,
        part: Any = None,
        start: int | None = None,
        engine: PassEngine | None = None,
    ):
        self.engine = engine or Local()
        self.given, self.options, self.pairs, self.study, self.data = given, options, pairs, study, data
        self.examples, self.partial, self.part, self.start = examples, partial, part, start
        self.runners = [options.runner(name, thing) for name, thing in given.items()]
        here = [runner.device for runner in self.runners if is_cuda(runner.device)] if torch.cuda.is_available() else []
        device = next(iter(here), None)
        limit = memory_limit(None, device) if study.limit < 0 else study.limit
        self.study = replace(study, device=device, limit=limit)

    def compare(self, measures: Sequence[Measure], names: Mapping[str, str]) -> list[Comparison]:
        """Return the comparison of every pair of models."""
        statistics, interruption = self._collect(measures)
        statistics.names = dict(names)
        pairs = self.pairs.of
        return self.engine.shared(lambda: comparisons_of(statistics, measures, pairs, interruption))

    def collect(self, measures: Sequence[Measure], names: Mapping[str, str]) -> Statistics:
        """Return what one pass over the data left; results call the models by `names`."""
        statistics, _ = self._collect(measures)
        statistics.names = dict(names)
        return self.engine.shared(lambda: statistics)

    def _collect(self, measures: Sequence[Measure]) -> tuple[Statistics, Interruption]:
        """Return what the pass left and whether it was interrupted; of several processes the first has all of it."""
        with loaders_kept(*self._all_data):
            return self._pass(measures)

    @property
    def _all_data(self) -> list[Any]:
        """The data of the call and those of each model."""
        return [self.data, *(runner.data for runner in self.runners)]

    def _pass(self, measures: Sequence[Measure]) -> tuple[Statistics, Interruption]:
        feed = None if weights_alone(measures) else self.feed_for(measures)
        with self.engine.prepared(self, self._terms(measures, feed)):
            study = self.study if feed is None else replace(self.study, examples=feed.expected)
            one = Pass(self.runners, measures, self.pairs, study, engine=self.engine, partial=self.partial)
            if feed is None:
                return one.collect_weights(), one.interruption
            statistics = self._with_origin(one.run(feed), measures)
            if feed.expected is None and not one.interruption.ended:  # a stream, which tells its length at the end
                self._refuse_few(statistics.examples)
        return self.engine.joined(statistics, feed.length), one.interruption

    def _with_origin(self, statistics: Statistics, measures: Sequence[Measure]) -> Statistics:
        """Return statistics that say of what data they are, and what was requested."""
        own = {id(one.data): one.data for one in self.runners if one.data is not None}
        every = list(own.values()) or [self.data]
        statistics.data, statistics.settings = " and ".join(map(data_name, every)), self._settings()
        statistics.warnings += [remark for data in every for remark in getattr(data, "remarks", ())]
        statistics.asked = [measure.id for measure in measures]
        part = self.engine.part if self.part is None else self.part
        statistics.part = "" if part is None else "/".join(map(str, parse_part(part)))
        return statistics

    def _terms(self, measures: Sequence[Measure], feed: Feed | None) -> dict[str, str]:
        """Return all that processes which share the work must agree on, beside weights and data."""
        names = {"models": ", ".join(self.given), "measures": ", ".join(measure.id for measure in measures)}
        settings = {"layers": in_words(self.options.layers), "examples": str(feed and feed.expected)}
        # by the names of functions: what they hold, as a device, may be a process's own
        return names | settings | {"torch": str(torch.__version__)} | self._settings(function_name)

    def explain(self, measures: Sequence[Measure]) -> Plan:
        """Return the plan of the pass, without taking it."""
        if weights_alone(measures):
            return make_explanation(self.runners, measures, self.pairs, None, replace(self.study, examples=0))
        for own in self._all_data:
            refuse_stream(own)
        with loaders_kept(*self._all_data):
            feed = self.feed_for(measures)
            study = replace(self.study, examples=feed.expected)
            return make_explanation(self.runners, measures, self.pairs, feed, study)

    def feed_for(self, measures: Sequence[Measure]) -> Feed:
        """Return the data of this call as batches for each runner."""
        paired = any(kind.pairs_rows for need in needs_of(measures) for kind in need.candidates)
        share = self.engine.part
        given = {"part": self.part is not None, "start": self.start is not None, "partial": self.partial}
        if share is not None and any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise InvalidValue(f"`{name}` is for one process, and here {share[1]} share the data; leave it out.")
        part = self.part if share is None else share
        feed = Feed(self.runners, self.data, self.examples, part, self.start or 0, paired, shared=share is not None)
        if feed.expected is not None:
            self._refuse_few(feed.expected)
        return feed

    def _refuse_few(self, examples: int) -> None:
        """Refuse more chunks than examples, but of a part that is given apart, which may be small."""
        if self.start is None and examples < self.study.chunks:
            raise InvalidValue(
                f"chunks={self.study.chunks} are more than the {examples:,} examples; take fewer chunks or more "
                "examples.",
                argument="chunks",
                value=self.study.chunks,
            )

    def _settings(self, digest: Callable[[Any], str] = function_digest) -> dict[str, str]:
        """Return all that changes the numbers, beside weights and data, as text; functions by their digests."""
        options = self.options
        given = {f"transform of {name}": one for name, one in options.transforms.items()}
        given |= {f"forward of {name}": one for name, one in options.forward.items()}
        functions = {what: digest(one) for what, one in given.items() if one is not None}
        shapes = options.shape.items() if isinstance(options.shape, Mapping) else [("all", options.shape)]
        settings = {f"shape of {layer}": digest(one) if callable(one) else str(one) for layer, one in shapes}
        return settings | functions | {
            "resize": str(options.resizes), "pairs": self.pairs.words, "chunks": str(self.study.chunks),
            "seed": str(self.study.seed), "exact_model": str(options.exact_model), "version": __version__,
        }  # fmt: skip
