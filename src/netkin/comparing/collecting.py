"""One pass over the data: every subject runs once on each batch, and the statistics fold it in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from netkin.arrays import exact_products, refuse_non_finite
from netkin.comparing import costs
from netkin.comparing.costs import GramKey, Needs, gram_key
from netkin.comparing.interrupting import Interruption
from netkin.comparing.meeting import AVERAGED, COMMON, DFT, Layer, Meeting
from netkin.comparing.pairing import Pairs, Rectangle
from netkin.comparing.plan import Plan, make_plan, refuse_over
from netkin.comparing.subjects import Subject
from netkin.errors import NameClash, ShapeError, ValueFault
from netkin.measures.registry import Measure
from netkin.statistics import LayerGrams, LayerMoments, LayerRows, LayerSpectra, Moments, Rows

ONE_ROW = (AVERAGED, "cls", DFT, "flatten", "last", "matrix", "mean", "pool")  # shapes that give one row an example

# rows, Gram matrices, the sum of the rows where there are no Gram matrices, number of rows
Kept = tuple[Tensor | None, tuple[Tensor, ...], Tensor | None, int]
Doubt = tuple[Tensor, Any, int]  # whether each layer is finite, the batch, its number


class Collection:
    """The statistics of one pass, and what was learnt about the layers on the way."""

    def __init__(
        self, subjects: Sequence[Subject], needs: Needs, pairs: Pairs, memory: int | None, seed: int, partial: bool
    ):
        self.subjects, self.needs, self.pairs, self.memory, self.seed = subjects, needs, pairs, memory, seed
        self.interruption = Interruption(partial)
        self.expected: int | None = None
        self.examples, self.batches, self.plan, self.meeting = 0, 0, Plan("", 0, 0, ()), Meeting([], [])
        self.layers: dict[str, list[Layer]] = {}
        self._seen: dict[str, Layer] = {}
        self._precision = torch.float64
        self._doubt: Doubt | None = None  # a batch not looked at yet
        self._searching: int | None = None  # the batch that is run again to find NaN and Inf
        self._resizes = any(subject.resizes for subject in subjects)
        self._moments: LayerMoments | None = None
        self.spectra: LayerSpectra | None = None
        self._all_rows: LayerRows | None = None
        # layers with as many rows share a sample and a set of Gram matrices
        self._samples: dict[int, LayerRows] = {}
        self._grams: dict[tuple[GramKey, int], LayerGrams] = {}

    def run(self, batches: Iterable[Any], expected: int | None) -> None:
        """Take the pass; an interruption that was asked for ends it after the batch at hand."""
        self.expected = expected
        with ExitStack() as stack:
            stack.enter_context(self.interruption.ending("reading", lambda: self.examples > 0))
            stack.enter_context(self.interruption.noticed())
            for subject in self.subjects:
                stack.enter_context(subject.ready(self._keeper(subject)))
            bar = stack.enter_context(tqdm(total=expected, desc="reading", unit=" examples", delay=2, leave=False))
            for batch in batches:
                bar.update(self._take(batch))
            self._settle()

    def statistic(self, measure: Measure, a: str, b: str) -> Any:
        """Return the pair of layers `a` and `b` ("model/layer") as the measure reads it."""
        a, b = self.meeting.pair(a, b)
        if measure.facts.reads is Moments:
            return self._moments_of(a, b)
        rows = self.meeting.layers[a].rows
        return self._samples[rows][a, b] if measure.facts.reads is Rows else self._grams[gram_key(measure), rows][a, b]

    @property
    def sampled(self) -> str:
        """What measures on rows saw, if that was a part: "a sample of 2,048 of 10,000 examples"; else empty."""
        largest = max(self._samples.values(), key=lambda sample: sample.seen, default=None)
        if largest is None or largest.seen <= largest.n:
            return ""
        unit = "examples" if largest.seen == self.examples else "rows"
        return f"a sample of {largest.n:,} of {largest.seen:,} {unit}"

    def off_block_shares(self, pairs: Iterable[tuple[str, str]]) -> list[float]:
        """Return of every map in these pairs how much of its covariance lies off the blocks by which it met."""
        if self.spectra is None or self.spectra.sampled < 4:
            return []
        met = [self.meeting.pair(a, b) for a, b in pairs if not self.meeting.apart(a, b)]
        mapped = [pair for a, b in met for pair in ((a, b), (b, a)) if self.meeting.layers[pair[0]].space]
        return [self.spectra.off_block_share(*pair) for pair in mapped]

    @property
    def off_block_sample(self) -> str:
        """What those shares rest on, if that was a part: ", on a sample of 64 of 10,000 examples"; else empty."""
        if self.spectra is None or self.spectra.sampled == self.spectra.n:
            return ""
        return f" (on a sample of {self.spectra.sampled:,} of {self.spectra.n:,} examples)"

    def _moments_of(self, a: str, b: str) -> Moments:
        """Return the moments of a pair, streamed or from the rows that were kept."""
        if self._moments is not None:
            return self._moments[a, b]
        if self.spectra is not None:
            return self.spectra[a, b]
        assert self._all_rows is not None
        return self._all_rows[a, b].moments(self._precision)

    # --- one batch ----------------------------------------------------------------------------------------------------

    def _take(self, batch: Any) -> int:
        """Run every subject on one batch, fold in what they gave and return the number of examples."""
        kept: dict[str, Kept] = {
            f"{subject.name}/{layer}": value
            for subject in self.subjects
            for layer, value in subject.rows(batch).items()
        }
        self._look(kept, batch)
        count = self._examples_in(kept, batch)
        with self.interruption.held(), exact_products():
            if not self.layers:
                self._begin(count)
            self._fold(kept)
            self.examples, self.batches = self.examples + count, self.batches + 1
        if self.plan.linear == "rows" and self.examples > (self.expected or 0):
            self._refuse_outgrown()
        return count

    def _keeper(self, subject: Subject) -> Callable[[str, Tensor], Kept]:
        """Return what a hook keeps of a layer's rows: Gram matrices at once, the rows only if somebody needs them."""

        def keep(layer: str, rows: Tensor) -> Kept:
            key = f"{subject.name}/{layer}"
            if not self.layers:
                self._learn(key, layer, subject, rows)
            number = self.batches if self._searching is None else self._searching
            where = f"layer {layer!r} of {subject.name!r} in batch {number}"
            if self._searching is not None:
                refuse_non_finite(rows, where)
            try:
                grams = () if self._resizes else self._grams_of(key, rows)
            except ValueFault:
                refuse_non_finite(rows, where)
                raise
            needed = self.needs.moments or self.needs.rows or self._resizes
            return rows if needed else None, grams, None if grams else rows.sum(), len(rows)

        return keep

    def _learn(self, key: str, layer: str, subject: Subject, rows: Tensor) -> None:
        known = self._seen.get(key)
        if known is not None and known.model != subject.name:
            raise NameClash(
                f"layer {known.name!r} of {known.model!r} and layer {layer!r} of {subject.name!r} read alike; "
                "give the models other `names`."
            )
        shape = subject.shapes[layer]
        self._seen[key] = Layer.of(subject.name, layer, rows, shape, subject.space, subject.resizes)
        if shape == DFT:
            self.needs.refuse_spectral()

    def _grams_of(self, key: str, rows: Tensor) -> tuple[Tensor, ...]:
        group = self._seen[key].rows
        for gram in self.needs.grams:
            if (gram, group) not in self._grams:  # before the first batch has named the layers
                self._grams[gram, group] = LayerGrams([], batch=gram[0], kernel=gram[1], fraction=gram[2])
        return tuple(self._grams[gram, group].reduce(key, rows) for gram in self.needs.grams)

    def _look(self, kept: Mapping[str, Kept], batch: Any) -> None:
        """Look for NaN and Inf, at the price of one number for each layer.

        On a GPU one batch behind: by then its numbers are there, and nobody waits for the batch at hand.
        """
        fine = torch.isfinite(_witnesses(list(kept.values())))
        if fine.is_cuda:
            self._settle()
        self._doubt = (fine, batch, self.batches)
        if not fine.is_cuda:
            self._settle()

    def _settle(self) -> None:
        """Refuse the batch in doubt if it holds NaN or Inf; where they are is asked in a second run."""
        (fine, batch, number), self._doubt = self._doubt or (torch.ones(1), None, 0), None
        if bool(fine.all()):
            return
        self._searching = number
        for subject in self.subjects:
            subject.rows(batch)
        self._searching = None

    def _examples_in(self, kept: Mapping[str, Kept], batch: Any) -> int:
        """Return the number of examples in a batch, which all models must have kept."""
        single = {key: rows for key, (*_, rows) in kept.items() if self._seen[key].shape in ONE_ROW}
        if len(set(single.values())) > 1:
            (a, n), (b, m) = min(single.items(), key=lambda one: one[1]), max(single.items(), key=lambda one: one[1])
            raise ShapeError(
                f"layer {a!r} gave {n:,} rows and layer {b!r} {m:,} for the same batch; models and "
                "transforms must keep every example."
            )
        return next(iter(single.values()), None) or self.subjects[0].length(batch) or min(v[3] for v in kept.values())

    def _fold(self, kept: Mapping[str, Kept]) -> None:
        rows = self.meeting.rows(_together({key: value[0] for key, value in kept.items() if value[0] is not None}))
        for statistic in (self._moments, self.spectra, self._all_rows, *self._samples.values()):
            if statistic is not None:
                statistic.update({name: rows[name] for name in statistic.names})
        for (gram, _), collector in self._grams.items():
            place = self.needs.grams.index(gram)
            if self._resizes:
                collector.update(rows)
            elif collector.names:
                collector.fold({name: kept[name][1][place] for name in collector.names})

    # --- the first batch ----------------------------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        """Plan and make the statistics, now that the first batch has told names and widths."""
        everything = [replace(layer, examples=count) for layer in self._seen.values()]
        names = {s.name: [layer.name for layer in everything if layer.model == s.name] for s in self.subjects}
        self.meeting = Meeting(everything, self.pairs.rectangles(names))
        regrouped = self.meeting.regrouped
        shown = [replace(layer, shape=COMMON) if layer.key in regrouped else layer for layer in everything]
        self.layers = {s.name: [layer for layer in shown if layer.model == s.name] for s in self.subjects}
        self._precision = self.needs.precision(self.meeting.layers.values())
        if self.meeting.layers:
            self.plan = make_plan(self.needs, self.meeting, self.expected, self.memory)
            self._make_statistics(self.meeting.rectangles)

    def _make_statistics(self, rectangles: Sequence[Rectangle]) -> None:
        names = list(self.meeting.layers)
        if self.plan.linear == "moments":
            self._moments = LayerMoments(rectangles, precision=self._precision, debiased=self.needs.debiased)
        if self.plan.linear == "spectra":
            self.spectra = LayerSpectra(rectangles, precision=self._precision, seed=self.seed)
        if self.plan.linear == "rows":
            self._all_rows = LayerRows(names, seed=self.seed)
        for rows in dict.fromkeys(layer.rows for layer in self.meeting.layers.values()):
            here = [name for name in names if self.meeting.layers[name].rows == rows]
            if self.needs.rows:
                self._samples[rows] = LayerRows(here, cap=costs.CAP, seed=self.seed)
            for batch, kernel, fraction in self.needs.grams:
                collector = self._grams.setdefault(
                    ((batch, kernel, fraction), rows), LayerGrams([], batch=batch, kernel=kernel, fraction=fraction)
                )
                collector.pair_up([(left, right) for left, right in rectangles if left[0] in here])

    def _refuse_outgrown(self) -> None:
        layers = self.meeting.layers.values()
        size = costs.of_rows(self.needs, layers, self.examples)
        refuse_over(self.plan.limit, size, layers, f"the rows of the first {self.examples:,} examples")


def _together(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all rows on one device: an accelerator, if any of them is there."""
    devices = dict.fromkeys(matrix.device for matrix in rows.values())
    if len(devices) < 2:
        return rows
    home = next(device for device in devices if device.type != "cpu")
    return {key: matrix.to(home) for key, matrix in rows.items()}


def _witnesses(kept: Sequence[Kept]) -> Tensor:
    """Return one number for each layer that is finite if its rows are."""
    if all(grams and grams[0].shape == kept[0][1][0].shape for _, grams, _, _ in kept):
        return _stacked([grams[0] for _, grams, _, _ in kept]).flatten(1).sum(1)
    return _stacked([grams[0].sum() if total is None else total for _, grams, total, _ in kept])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.to(tensors[0]) for tensor in tensors])
