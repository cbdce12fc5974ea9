"""The plan: which collector is used for which measure, its cost, and whether it fits the memory.

No collector is named here. A measure names its pair type, the pair type its candidate collectors, and each of these
estimates its own cost for the given study. What the plan refuses, the work refuses, as it makes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor

from netkin.comparing.alignment import Alignment, Pairs
from netkin.errors import InvalidValue, MemoryLimit, NetkinError
from netkin.measures.registry import Measure
from netkin.memory import format_bytes, free_memory, total_memory
from netkin.representations.gradients import Target
from netkin.statistics.collector import Collector, CostEstimate, LayerSize, Study, unfit_for_spectra

LITTLE = 2**24  # bytes that are taken whatever is free


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
        if "gradients" not in self.feeds:
            return None
        return Target(self.settings.target, self.settings.beta, self.settings.outputs)

    @cached_property
    def of_weights(self) -> bool:
        """Whether it is read from weights, which come once and without data."""
        return self.feeds == {"weights"}

    @cached_property
    def reduces(self) -> bool:
        """Whether rows are made smaller as soon as a layer has run."""
        return all(kind.reduces for kind in self.candidates)

    def chosen(self, study: Study) -> tuple[type[Collector], CostEstimate]:
        """Return the first candidate that fits the memory, in the order of their ranks, and its cost."""
        offers = [(kind, cost) for kind in self.candidates if (cost := kind.cost(self.settings, study)) is not None]
        if not offers:
            name = self.measures[0].partition("(")[0]
            unfit = unfit_for_spectra(name) if study.spectral else f"no collector of {name!r} fits these layers."
            raise InvalidValue(unfit)
        offers.sort(key=lambda offer: offer[1].rank)
        for kind, cost in offers:
            if cost.bytes <= study.limit:
                return kind, cost
        kind, cost = min(offers, key=lambda offer: offer[1].bytes)
        require_within(study, cost.bytes, cost.what, cost.advice)
        return kind, cost


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
    return all(need.of_weights for need in needs_of(measures))


def weights_of(side: Any, needs: Sequence[Need]) -> dict[str, Mapping[str, Tensor]]:
    """Return the weights of a side's layers; where none were named, of those that some collector is for."""
    weights: dict[str, Mapping[str, Tensor]] = side.weights()
    if side.names_layers:
        return weights
    kinds = [(kind, need.settings) for need in needs for kind in need.candidates]
    fit = {
        layer: tensors
        for layer, tensors in weights.items()
        if any(kind.takes(settings, tensors) for kind, settings in kinds)
    }
    if not fit:
        measures = ", ".join(dict.fromkeys(name for need in needs for name in need.measures))
        raise InvalidValue(f"{side.name!r} has no layer with {kinds[0][0].needs}, which {measures} would be read from.")
    return fit


def ready_collectors(measure: Measure) -> tuple[type[Collector], ...]:
    """Return the collectors of a measure's pair type."""
    reads = measure.facts.reads
    if not reads.collectors:
        raise InvalidValue(
            f"{measure.name!r} can be called with two matrices and no more: {reads.__name__}, which it reads, names no "
            f"`collectors`; set `{reads.__name__}.collectors` to a tuple of `Collector` classes."
        )
    return tuple(reads.collectors)


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
    refused: str = ""  # the sentence that `compare` would refuse with

    def __str__(self) -> str:
        return "\n".join(self.lines)


def make_plan(needs: Sequence[Need], study: Study) -> Plan:
    """Choose a collector for each need; refuse what does not fit the memory, naming the ways out."""
    offers = [need.chosen(study) for need in needs]
    total = sum(cost.bytes for _, cost in offers)
    require_within(study, total, "the statistics")
    require_within(study, total, "the statistics", limit=max(free_memory(study.device), LITTLE))
    why = {name: cost.words + cost.why for need, (_, cost) in zip(needs, offers, strict=True) for name in need.measures}
    return Plan(
        total, study.limit, tuple(f"{cost.words}: {format_bytes(cost.bytes)}" for _, cost in offers),
        tuple(kind for kind, _ in offers), measures=why,
    )  # fmt: skip


def require_within(study: Study, size: int, what: str, advice: str = "", limit: int | None = None) -> None:
    """Refuse a size over the study's limit, or over what is free, naming the widest layer and the ways out."""
    most = study.limit if limit is None else limit
    if size <= most:
        return
    widest = max(study.sizes, key=lambda layer: layer.width)
    raise MemoryLimit(
        f"{what} need {format_bytes(size)} and {'the limit is' if limit is None else 'the free memory is'} "
        f"{format_bytes(most)}; the widest layer is {widest.name!r} of {widest.model!r} with {widest.width:,} "
        f"features. Use {advice or CostEstimate.advice}, fewer `layers=`, "
        + ("fewer `chunks=` or `pairs=`, " if study.chunks else "")
        + "or a higher `memory=`.",
        argument="memory",
    )


def memory_limit(memory: int | None, device: Any = None) -> int:
    """Return the bytes that statistics may take: the user's limit, or a quarter of all memory.

    What is free at the moment does not count, so that parts of one study choose the same collectors.
    """
    return total_memory(device) // 4 if memory is None else memory


def aligned(sizes: Sequence[LayerSize], pairs: Pairs, study: Study) -> tuple[Alignment, Study]:
    """Return how layers of these sizes are paired, and the study of them."""
    names = {model: [size.name for size in sizes if size.model == model] for pair in pairs.of for model in pair}
    alignment = Alignment(sizes, pairs.pair_blocks(names))
    return alignment, replace(study, layers=alignment.layers, pair_blocks=alignment.pair_blocks)


# --- explaining -------------------------------------------------------------------------------------------------------


def explain_plan(
    sizes: Sequence[LayerSize],
    measures: Sequence[Measure],
    pairs: Pairs,
    study: Study,
    *,
    left_out: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    batch: int = 0,
    seen: Sequence[int | None] = (),
    runs: bool = False,
) -> Plan:
    """Return the plan in figures and in words; what the work would refuse, over pairs or memory, is in `refused`.

    Args:
        sizes: those of the layers.
        measures: what will be computed.
        pairs: the pairs of layers.
        study: what is known beside the layers.
        left_out: by model the default layers that give no rows, and why.
        batch: the number of examples in a batch; 0 where no data are read.
        seen: how many examples each model will see; None where that is not known.
        runs: whether models run, and rows are not recorded.
    """
    layers: dict[str, list[LayerSize]] = {}
    for size in sizes:
        layers.setdefault(size.model, []).append(size)
    names = {model: [size.name for size in of_model] for model, of_model in layers.items()}
    needs, chosen, wanted, mismatches, without_chunks, refused = needs_of(measures), Plan(0, 0, ()), [], [], 0, ""
    try:
        alignment, study = aligned(sizes, pairs, study)
        wanted = [((a, x), (b, y)) for a, b in pairs.of for x, y in pairs.layer_pairs(names, a, b)]
        mismatches = [reason for pair in wanted if (reason := alignment.mismatch(*pair))]
        if alignment.layers:
            chosen, without_chunks = make_plan(needs, study), make_plan(needs, replace(study, chunks=0)).bytes
    except NetkinError as refusal:
        refused = str(refusal)
    counts = [math.ceil(count / batch) for count in seen if count is not None and batch]
    plan = replace(
        chosen,
        widths={model: {size.name: size.width for size in of_model} for model, of_model in layers.items()},
        pairs=len(wanted),
        measures={measure.id: chosen.measures.get(measure.id, _pair_type(measure)) for measure in measures},
        examples=study.examples,
        passes=0 if not (batch and runs) else sum(counts) if len(counts) == len(seen) else None,
        refused=refused,
    )

    def lines() -> Iterator[str]:
        for model, of_model in layers.items():
            widest = max(of_model, key=lambda layer: layer.width)
            count = "1 layer" if len(of_model) == 1 else f"{len(of_model):,} layers"
            yield f"{model}: {count}, the widest {widest.name!r} with {widest.width:,} features ({widest.shape})"
        for model, reasons in left_out.items():
            yield from (f"  left out of {model!r}: {reason}" for reason in reasons.values())
        yield f"pairs: {plan.pairs:,}"
        if mismatches:
            yield f"  without a value: {len(mismatches):,}; {mismatches[0]}"
        yield f"examples: {_examples_in_words(study.examples, batch)}"
        each = "one of each model on each batch"
        if plan.passes == 0:
            yield f"forward passes: none{', the rows are recorded' * bool(batch)}"
        elif plan.passes is None:
            yield f"forward passes: {each}"
        else:
            yield f"forward passes: {plan.passes:,}, {each}, after two of a few examples that show the layers"
        if targets := list(dict.fromkeys(need.target for need in needs if need.target is not None)):
            losses = ", ".join(target.name for target in targets)
            yield f"backward passes: {len(targets)} after each of these, of the loss {losses}"
        yield "measures:"
        yield from (f"  {measure}: {statistic}" for measure, statistic in plan.measures.items())
        if plan.limit:
            yield f"memory: {format_bytes(plan.bytes)} for statistics; the limit is {format_bytes(plan.limit)}"
            yield from (f"  {line}" for line in chosen.lines if len(chosen.lines) > 1)
        if study.chunks:
            less = f", {format_bytes(without_chunks)} without them" if without_chunks else ""
            yield (
                f"error bars: {study.chunks} chunks of the examples, whose sums are in that memory{less}; "
                f"every value is read {study.chunks + 1} times"
            )
        if refused:
            yield f"would be refused: {refused}"

    return replace(plan, lines=tuple(lines()))


def _pair_type(measure: Measure) -> str:
    reads = measure.facts.reads
    return f"{reads.__name__}, collected by {' or '.join(kind.__name__ for kind in reads.collectors)}"


def _examples_in_words(examples: int | None, batch: int) -> str:
    if not batch:
        return "none, the weights alone are compared"
    if examples is None:
        return f"not known before they are read; batches of {batch:,}"
    count = math.ceil(examples / batch)
    return f"{examples:,}, in {'1 batch' if count == 1 else f'{count:,} batches of up to {batch:,}'}"
