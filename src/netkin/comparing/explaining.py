"""Explaining: what a comparison would do and cost, from a look at two examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from netkin.comparing import operations
from netkin.comparing.costs import CAP, Needs, gram_key
from netkin.comparing.meeting import Layer, Meeting
from netkin.comparing.pairing import Pairs
from netkin.comparing.plan import Plan, make_plan, size_of
from netkin.comparing.subjects import RecordedSubject, Subject
from netkin.errors import NetkinError, ValueFault
from netkin.measures.registry import Measure
from netkin.representations.inputs import take
from netkin.statistics import Grams, Moments

LOOK = 2  # examples run: with a single one, a table of positions (1 × t × d) would pass for an example
THOUSANDS = ("", " thousand", " million", " billion", " trillion")


def explained(
    subjects: Sequence[Subject],
    measures: Sequence[Measure],
    pairs: Pairs,
    batches: Iterable[Any],
    examples: int | None,
    memory: int | None,
) -> Plan:
    """Return the plan for these subjects; `examples` is how many the data will give, None where nobody knows."""
    findings = _Findings(subjects, measures, pairs, examples)
    findings.look(batches)
    try:
        findings.meet()
        findings.choose(memory)
    except NetkinError as refusal:
        return findings.plan(str(refusal))
    return findings.plan()


def refuse_stream(data: Any) -> None:
    """Refuse data that can be read only once: a look at them would take the first batch away."""
    if isinstance(data, Iterator):
        raise ValueFault(
            "`explain` reads the first batch, and what it takes from an iterator is gone; pass a loader or a list."
        )


class _Findings:
    """What has been found out so far; after a refusal the rest stays unknown."""

    def __init__(
        self, subjects: Sequence[Subject], measures: Sequence[Measure], pairs: Pairs, examples: int | None
    ) -> None:
        self.subjects, self.measures, self.pairs, self.examples = subjects, measures, pairs, examples
        self.needs = Needs.of(measures)
        self.layers: dict[str, dict[str, Layer]] = {subject.name: {} for subject in subjects}
        self.batch = 0  # examples in the first batch
        self.wanted: list[tuple[str, str]] = []
        self.holes: list[str] = []
        self.meeting = Meeting([], [])
        self.chosen = Plan("", 0, 0, ())
        self.operations: int | None = None

    def look(self, batches: Iterable[Any]) -> None:
        """Run each subject on the first examples of the first batch; note its layers as the whole batch shows them."""
        with ExitStack() as stack:
            for subject in self.subjects:
                stack.enter_context(subject.ready(self._keeper(subject)))
            batch = next(iter(batches))
            self.batch = self.subjects[0].length(batch) or 1
            for subject in self.subjects:
                self._run(subject, batch)

    def _run(self, subject: Subject, batch: Any) -> None:
        try:
            names, seen = list(subject.rows(_beginning(batch))), min(LOOK, self.batch)
        except Exception:  # an exported program may take whole batches only; what else is wrong comes up again here
            names, seen = list(subject.rows(batch)), self.batch
        found = self.layers[subject.name]
        self.layers[subject.name] = {name: _grown(found[name], seen, self.batch) for name in names}

    def meet(self) -> None:
        """Find out which pairs are wanted, and which of them will have no value."""
        names = {model: list(found) for model, found in self.layers.items()}
        everything = [layer for found in self.layers.values() for layer in found.values()]
        self.meeting = Meeting(everything, self.pairs.rectangles(names))
        if self.meeting.spectral:
            self.needs.refuse_spectral()
        self.wanted = [(f"{a}/{x}", f"{b}/{y}") for a, b in self.pairs.of for x, y in self.pairs.listed(names, a, b)]
        self.holes = [reason for pair in self.wanted if (reason := self.meeting.apart(*pair))]

    def choose(self, memory: int | None) -> None:
        """Choose the statistics as `compare` does, and count their work."""
        if not self.meeting.layers:
            return
        self.chosen = make_plan(self.needs, self.meeting, self.examples, memory)
        if self.examples is not None:
            self.operations = operations.of_statistics(self.needs, self.meeting, self.examples, self.chosen.linear)

    def plan(self, refused: str = "") -> Plan:
        """Return all that is known, in figures and in words."""
        known = replace(
            self.chosen,
            widths={
                model: {name: layer.width for name, layer in found.items()} for model, found in self.layers.items()
            },
            pairs=len(self.wanted),
            measures={measure.id: self._statistic(measure) for measure in self.measures},
            examples=self.examples,
            passes=self._passes(),
            operations=self.operations,
            refused=refused,
        )
        return replace(known, lines=tuple(self._lines(known)))

    def _keeper(self, subject: Subject) -> Any:
        def keep(name: str, rows: Tensor) -> bool:
            shape = subject.shapes[name]
            self.layers[subject.name][name] = Layer.of(subject.name, name, rows, shape, subject.space, subject.resizes)
            return True

        return keep

    def _passes(self) -> int | None:
        if all(isinstance(subject, RecordedSubject) for subject in self.subjects):
            return 0
        return None if self.examples is None else len(self.subjects) * self._batches()

    def _batches(self) -> int:
        return math.ceil((self.examples or 0) / self.batch)

    def _statistic(self, measure: Measure) -> str:
        """Return which statistic a measure is read from, and why."""
        if measure.facts.reads is Moments:
            return self._linear()
        if measure.facts.reads is Grams:
            return f"Grams of mini-batches of {gram_key(measure)[0]}, by which it is defined"
        return f"Rows, a sample of at most {CAP:,}, as its kernel grows with the square of the examples"

    def _linear(self) -> str:
        if not self.chosen.linear:
            return "Moments, or rows where those take less memory"
        line = self.chosen.lines[0]
        chosen = line.rpartition(":")[0] or line
        return chosen if self.chosen.linear == "rows" else f"{chosen}, as they hold any number of examples"

    def _lines(self, plan: Plan) -> Iterator[str]:
        for model, found in self.layers.items():
            yield f"{model}: {_layers_in_words(found)}"
        yield f"pairs: {plan.pairs:,}"
        if self.holes:
            yield f"  without a value: {len(self.holes):,}; {self.holes[0]}"
        yield f"examples: {self._examples_in_words()}"
        yield f"forward passes: {self._passes_in_words(plan.passes)}"
        yield "measures:"
        yield from (f"  {measure}: {statistic}" for measure, statistic in plan.measures.items())
        if plan.limit:
            yield f"memory: {size_of(plan.bytes)} for statistics; the limit is {size_of(plan.limit)}"
        if plan.operations is not None:
            yield f"work: {_in_words(plan.operations)} multiply-adds for statistics, beside the forward passes"
        if plan.refused:
            yield f"would be refused: {plan.refused}"

    def _examples_in_words(self) -> str:
        if self.examples is None:
            return f"not known before they are read; batches of {self.batch:,}"
        batches = "1 batch" if self._batches() == 1 else f"{self._batches():,} batches of up to {self.batch:,}"
        return f"{self.examples:,}, in {batches}"

    def _passes_in_words(self, passes: int | None) -> str:
        if passes is None:
            return "one of each model on each batch"
        return "none, the rows are recorded" if passes == 0 else f"{passes:,}, one of each model on each batch"


def _beginning(batch: Any) -> Any:
    """Return the first examples of a batch, or all of it where they can't be counted."""
    if isinstance(batch, slice):
        return slice(batch.start, min(batch.stop, batch.start + LOOK))
    try:
        return take(batch, LOOK)
    except NetkinError:
        return batch


def _grown(layer: Layer, seen: int, batch: int) -> Layer:
    """Return a layer as a whole batch shows it, of which `seen` examples were run."""
    return replace(layer, rows=layer.rows * batch // seen, examples=batch)


def _layers_in_words(found: dict[str, Layer]) -> str:
    widest = max(found.values(), key=lambda layer: layer.width)
    count = "1 layer" if len(found) == 1 else f"{len(found):,} layers"
    return f"{count}, the widest {widest.name!r} with {widest.width:,} features ({widest.shape})"


def _in_words(count: int) -> str:
    """Return a large number with three digits at most, as in "4.19 billion"."""
    power = min((len(str(count)) - 1) // 3, len(THOUSANDS) - 1)
    return f"{count / 1000**power:.3g}{THOUSANDS[power]}"
