"""The plan: which collector is used for which measure, its cost, and whether it fits the memory; `explain` shows it.

No collector is named here. A measure names its pair type, the pair type its candidate collectors, and each of these
estimates its own cost for the given study.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from netkin.comparing.alignment import Alignment, Pairs, size_of_layer, size_of_weights
from netkin.comparing.feed import Feed
from netkin.comparing.subjects import RecordedRunner, Runner
from netkin.errors import InvalidValue, MemoryLimit, NetkinError, blame
from netkin.measures.registry import Measure
from netkin.memory import format_bytes, free_memory, total_memory
from netkin.representations.gradients import Target
from netkin.statistics.collector import Collector, CostEstimate, LayerSize, Study, unfit_for_spectra

LITTLE = 2**24  # bytes that are taken whatever is free
THOUSANDS = ("", " thousand", " million", " billion", " trillion")


@dataclass(frozen=True)
class Need:
    """What some measures must have collected: the candidates of their pair type, and settings that serve them all."""

    candidates: tuple[type[Collector], ...]
    settings: Any
    measures: tuple[str, ...]

    @cached_property
    def feeds(self) -> frozenset[str]:
        return self.candidates[0].feeds_for(self.settings)

    @cached_property
    def target(self) -> Target | None:
        """The loss whose gradients are wanted, if any are."""
        return Target(**self.candidates[0].loss_for(self.settings)) if "gradients" in self.feeds else None

    def chosen(self, study: Study) -> tuple[type[Collector], CostEstimate]:
        """Return the first candidate that fits the memory, in the order of their ranks, and its price."""
        offers = [(one, price) for one in self.candidates if (price := one.cost(self.settings, study)) is not None]
        if not offers:
            name = self.measures[0].partition("(")[0]
            unfit = unfit_for_spectra(name) if study.spectral else f"no collector of {name!r} fits these layers."
            raise InvalidValue(unfit)
        offers.sort(key=lambda offer: offer[1].rank)
        for kind, price in offers:
            if price.bytes <= study.limit:
                return kind, price
        kind, price = min(offers, key=lambda offer: offer[1].bytes)
        refuse_over(study, price.bytes, price.what, price.ways)
        return kind, price


def needs_of(measures: Sequence[Measure]) -> list[Need]:
    """Return what must be collected for some measures, without duplicates."""
    needs: list[Need] = []
    for measure in measures:
        candidates = ready_collectors(measure)
        wanted = candidates[0].settings_for(measure)
        for place, need in enumerate(needs):
            joined = need.settings.joined(wanted) if need.candidates == candidates else None
            if joined is not None:
                needs[place] = Need(candidates, joined, (*need.measures, measure.id))
                break
        else:
            needs.append(Need(candidates, wanted, (measure.id,)))
    return needs


def weights_alone(measures: Sequence[Measure]) -> bool:
    """Return whether some measures are read from weights alone, so that no data are needed."""
    return all(need.feeds == {"weights"} for need in needs_of(measures))


def weights_of(runner: Runner, needs: Sequence[Need]) -> dict[str, Mapping[str, Tensor]]:
    """Return the weights of a runner's layers; where none were named, of those that some collector is for."""
    found = runner.weights()
    if runner.names_layers:
        return found
    kinds = [(kind, need.settings) for need in needs for kind in need.candidates]
    fit = {name: own for name, own in found.items() if any(kind.takes(settings, own) for kind, settings in kinds)}
    if not fit:
        measures = ", ".join(dict.fromkeys(name for need in needs for name in need.measures))
        raise InvalidValue(
            f"{runner.name!r} has no layer with {kinds[0][0].needs}, which {measures} would be read from."
        )
    return fit


def ready_collectors(measure: Measure) -> tuple[type[Collector], ...]:
    """Return the collectors of a measure's pair type; refuse those that lack what the pass needs of them."""
    reads = measure.facts.reads
    given = getattr(reads, "collectors", ())
    found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not found:
        raise InvalidValue(
            f"{measure.name!r} can be called with two matrices and no more: {reads.__name__}, which it reads, names no "
            f"`collectors`; set `{reads.__name__}.collectors` to a tuple of `Collector` classes."
        )
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, Collector)):
            raise InvalidValue(
                f"{reads.__name__}.collectors, for {measure.name!r}, holds {kind!r}, which is no `Collector`."
            )
        lacks = sorted(getattr(kind, "__abstractmethods__", ()))
        lacks += [] if kind.stored else ["stored"]
        lacks += [] if isinstance(getattr(kind, "kind", None), str) else ["kind"]
        lacks += ["open_pairs"] if kind.reduces and not hasattr(kind, "open_pairs") else []
        if lacks:
            raise InvalidValue(
                f"the collector {kind.__name__} of {measure.name!r} lacks {', '.join(lacks)}; define it."
            )
        if kind.feeds != {"weights"} and not kind.feeds <= {"activations", "gradients", "outputs"}:
            raise InvalidValue(
                f"the collector {kind.__name__} of {measure.name!r} wants {' and '.join(sorted(kind.feeds))}; "
                "a pass feeds activations, gradients and outputs, or weights."
            )
    return found


@dataclass(frozen=True)
class Plan:
    """The collectors chosen, their memory in bytes and the reason; `explain` adds what else the work will take."""

    bytes: int
    limit: int
    lines: tuple[str, ...]
    kinds: tuple[type[Collector], ...] = ()  # the collector of each need
    widths: dict[str, dict[str, int]] = field(default_factory=dict)  # of each model's layers
    pairs: int = 0
    measures: dict[str, str] = field(default_factory=dict)  # the statistic that each is read from
    examples: int | None = None
    passes: int | None = None  # forward passes of all models together
    operations: int | None = None  # multiply-adds of the statistics
    refused: str = ""  # the sentence that `compare` would refuse with

    def __str__(self) -> str:
        return "\n".join(self.lines)


def make_plan(needs: Sequence[Need], study: Study) -> Plan:
    """Choose a collector for each need; refuse what does not fit the memory, naming the ways out."""
    offers = [need.chosen(study) for need in needs]
    total = sum(price.bytes for _, price in offers)
    refuse_over(study, total, "the statistics")
    refuse_over(study, total, "the statistics", limit=max(free_memory(study.device), LITTLE))
    counts = [price.operations for _, price in offers]
    why = {
        name: price.words + price.why for need, (_, price) in zip(needs, offers, strict=True) for name in need.measures
    }
    return Plan(
        total, study.limit, tuple(f"{price.words}: {format_bytes(price.bytes)}" for _, price in offers),
        tuple(kind for kind, _ in offers), measures=why,
        operations=None if None in counts else sum(count or 0 for count in counts),
    )  # fmt: skip


def refuse_over(study: Study, size: int, what: str, ways: str = "", limit: int | None = None) -> None:
    """Refuse a size over the study's limit, or over what is free, naming the widest layer and the ways out."""
    most = study.limit if limit is None else limit
    if size <= most:
        return
    widest = max(study.sizes, key=lambda layer: layer.width)
    raise MemoryLimit(
        f"{what} need {format_bytes(size)} and {'the limit is' if limit is None else 'the free memory is'} "
        f"{format_bytes(most)}; the widest layer is {widest.name!r} of {widest.model!r} with {widest.width:,} "
        f"features. Use {ways or CostEstimate.ways}, fewer `layers=`, "
        + ("fewer `chunks=` or `pairs=`, " if study.chunks else "")
        + "or a higher `memory=`.",
        argument="memory",
    )


def memory_limit(memory: int | None, device: Any = None) -> int:
    """Return the bytes that statistics may take: the user's limit, or a quarter of all memory.

    What is free at the moment does not count, so that parts of one study choose the same collectors.
    """
    return total_memory(device) // 4 if memory is None else memory


# --- explaining -------------------------------------------------------------------------------------------------------


def make_explanation(
    runners: Sequence[Runner], measures: Sequence[Measure], pairs: Pairs, feed: Feed | None, study: Study
) -> Plan:
    """Return the plan for these runners; `study` holds the number of examples and the memory limit.

    Without a `feed` the weights alone are examined.
    """
    findings = Findings(runners, measures, pairs, study)
    if feed is None:  # the layers are as their weights show them
        for one in runners:
            held = weights_of(one, needs_of(measures))
            findings.layers[one.name] = {name: size_of_weights(one.name, name, own) for name, own in held.items()}
    else:
        findings.inspect(feed)
    try:
        findings.align()
        findings.choose()
    except NetkinError as refusal:
        return findings.plan(str(refusal))
    return findings.plan()


def refuse_stream(data: Any) -> None:
    """Refuse data that can be read only once: reading the first batch would remove it."""
    if isinstance(data, Iterator):
        raise InvalidValue(
            "`explain` reads the first batch, and what it takes from an iterator is gone; pass a loader or a list."
        )


class Findings:
    """What has been found out so far; after a refusal the rest stays unknown."""

    def __init__(self, runners: Sequence[Runner], measures: Sequence[Measure], pairs: Pairs, study: Study) -> None:
        self.runners, self.measures, self.pairs, self.study = runners, measures, pairs, study
        self.layers: dict[str, dict[str, LayerSize]] = {runner.name: {} for runner in runners}
        self.batch = 0  # examples in the first batch
        self.seen: list[int | None] = []  # examples that each model will see
        self.wanted: list[tuple[tuple[str, str], tuple[str, str]]] = []
        self.holes: list[str] = []
        self.alignment = Alignment([], [])
        self.chosen = Plan(0, 0, ())
        self.unchunked = 0  # bytes without error bars

    def inspect(self, feed: Feed) -> None:
        """Run each model on the first examples of the first batch; note its layers as the whole batch shows them."""
        with ExitStack() as stack:
            for runner in self.runners:
                stack.enter_context(runner.ready(lambda layer, rows, valid: rows))
            for runner, batch in next(iter(feed)).items():
                self.batch = self.batch or runner.length(batch) or 1
                try:
                    learnt = runner.learn(batch)
                except Exception as fault:
                    blame(fault, runner.name)
                    raise
                for name, facts in learnt.items():
                    size = size_of_layer(runner, name, torch.empty(facts.size, dtype=facts.dtype, device="meta"))
                    rows = size.rows * self.batch // facts.examples
                    self.layers[runner.name][name] = replace(size, rows=rows, examples=self.batch)
        self.seen = list(map(feed.examples_of, self.runners))

    def align(self) -> None:
        """Find out which pairs are wanted, and which of them will have no value."""
        names = {model: list(found) for model, found in self.layers.items()}
        everything = [layer for found in self.layers.values() for layer in found.values()]
        self.alignment = Alignment(everything, self.pairs.pair_blocks(names))
        self.wanted = [((a, x), (b, y)) for a, b in self.pairs.of for x, y in self.pairs.layer_pairs(names, a, b)]
        self.holes = [reason for pair in self.wanted if (reason := self.alignment.mismatch(*pair))]

    def choose(self) -> None:
        """Choose the collectors as `compare` does, and count their work."""
        self.study = replace(self.study, layers=self.alignment.layers, pair_blocks=self.alignment.pair_blocks)
        if self.alignment.layers:
            self.chosen = make_plan(needs_of(self.measures), self.study)
            self.unchunked = make_plan(needs_of(self.measures), replace(self.study, chunks=0)).bytes

    def plan(self, refused: str = "") -> Plan:
        """Return all that is known, in figures and as text."""
        known = replace(
            self.chosen,
            widths={model: {name: one.width for name, one in found.items()} for model, found in self.layers.items()},
            pairs=len(self.wanted),
            measures={measure.id: self._statistic(measure) for measure in self.measures},
            examples=self.study.examples,
            passes=self._passes(),
            refused=refused,
        )
        return replace(known, lines=tuple(self._lines(known)))

    def _passes(self) -> int | None:
        if not self.batch or all(isinstance(runner, RecordedRunner) for runner in self.runners):
            return 0
        counts = [math.ceil(count / self.batch) for count in self.seen if count is not None]
        return sum(counts) if len(counts) == len(self.seen) else None

    def _statistic(self, measure: Measure) -> str:
        """Return which collector a measure is read from, and why; its pair type where none could be chosen."""
        names = [kind.__name__ for kind in measure.facts.reads.collectors]
        return self.chosen.measures.get(
            measure.id, f"{measure.facts.reads.__name__}, collected by {' or '.join(names)}"
        )

    def _lines(self, plan: Plan) -> Iterator[str]:
        """Yield the plan in words: what is compared, the runs of the models, the measures and what they take."""
        yield from self._lines_of_layers()
        yield f"pairs: {plan.pairs:,}"
        if self.holes:
            yield f"  without a value: {len(self.holes):,}; {self.holes[0]}"
        yield f"examples: {self._examples_in_words()}"
        yield f"forward passes: {self._passes_in_words(plan.passes)}"
        targets = list(dict.fromkeys(need.target for need in needs_of(self.measures) if need.target is not None))
        if targets:
            losses = ", ".join(target.name for target in targets)
            yield f"backward passes: {len(targets)} after each of these, of the loss {losses}"
        yield "measures:"
        yield from (f"  {measure}: {statistic}" for measure, statistic in plan.measures.items())
        yield from self._lines_of_costs(plan)
        if plan.refused:
            yield f"would be refused: {plan.refused}"

    def _lines_of_layers(self) -> Iterator[str]:
        for model, found in self.layers.items():
            widest = max(found.values(), key=lambda layer: layer.width)
            count = "1 layer" if len(found) == 1 else f"{len(found):,} layers"
            yield f"{model}: {count}, the widest {widest.name!r} with {widest.width:,} features ({widest.shape})"
        for runner in self.runners:
            yield from (f"  left out of {runner.name!r}: {reason}" for reason in runner.left_out.values())

    def _lines_of_costs(self, plan: Plan) -> Iterator[str]:
        if plan.limit:
            yield f"memory: {format_bytes(plan.bytes)} for statistics; the limit is {format_bytes(plan.limit)}"
            yield from (f"  {line}" for line in self.chosen.lines if len(self.chosen.lines) > 1)
        if self.study.chunks:
            without = f", {format_bytes(self.unchunked)} without them" if self.unchunked else ""
            yield (
                f"error bars: {self.study.chunks} chunks of the examples, whose sums are in that memory{without}; "
                f"every value is read {self.study.chunks + 1} times"
            )
        if plan.operations is not None:
            yield f"work: {_count_in_words(plan.operations)} multiply-adds for statistics, plus the forward passes"

    def _examples_in_words(self) -> str:
        if not self.batch:
            return "none, the weights alone are compared"
        if self.study.examples is None:
            return f"not known before they are read; batches of {self.batch:,}"
        count = math.ceil(self.study.examples / self.batch)
        batches = "1 batch" if count == 1 else f"{count:,} batches of up to {self.batch:,}"
        return f"{self.study.examples:,}, in {batches}"

    def _passes_in_words(self, passes: int | None) -> str:
        if passes is None:
            return "one of each model on each batch"
        if passes == 0:
            return "none, the rows are recorded" if self.batch else "none"
        return f"{passes:,}, one of each model on each batch, after two of a few examples that show the layers"


def _count_in_words(count: int) -> str:
    """Return a large number with three digits at most, as in "4.19 billion"."""
    power = min((len(str(count)) - 1) // 3, len(THOUSANDS) - 1)
    return f"{count / 1000**power:.3g}{THOUSANDS[power]}"
