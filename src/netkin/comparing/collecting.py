"""One pass over the data: every subject runs once on each batch, and the statistics fold it in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from netkin.comparing.pairing import Pairs
from netkin.comparing.plan import CAP, GramKey, Layer, Needs, Plan, make_plan
from netkin.comparing.subjects import Subject
from netkin.errors import NoValue, ShapeError
from netkin.measures.registry import Measure
from netkin.statistics import LayerGrams, LayerMoments, LayerRows, Moments, Rows


class Collection:
    """The statistics of one pass, and what was learnt about the layers on the way."""

    def __init__(self, subjects: Sequence[Subject], needs: Needs, pairs: Pairs, memory: int | None, seed: int):
        self.subjects, self.needs, self.pairs, self.memory, self.seed = subjects, needs, pairs, memory, seed
        self.expected: int | None = None
        self.examples, self.complete, self.plan = 0, True, Plan("", 0, 0, ())
        self.layers: dict[str, list[Layer]] = {}
        self.grams: dict[GramKey, LayerGrams] = {}
        self._moments: LayerMoments | None = None
        self._all_rows: LayerRows | None = None
        self._sample: LayerRows | None = None

    def run(self, batches: Iterable[Any], expected: int | None, partial: bool) -> None:
        """Take the pass; with `partial`, Ctrl-C ends it after the batch at hand."""
        self.expected = expected
        with ExitStack() as stack:
            stopping = stack.enter_context(_gentle_interrupt(partial))
            for subject in self.subjects:
                stack.enter_context(subject.ready(self._keeper(subject)))
            stack.enter_context(torch.no_grad())
            bar = stack.enter_context(tqdm(batches, desc="reading", unit="batch", delay=2, leave=False))
            try:
                for batch in bar:
                    self._fold([subject.rows(batch) for subject in self.subjects])
                    if stopping.is_set():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                if not partial or not self.examples:
                    raise
                self.complete = False

    def statistic(self, measure: Measure, a: str, b: str) -> Any:
        """Return the pair of layers `a` and `b` ("model/layer") as the measure reads it."""
        if measure.facts.reads is Moments:
            return self.moments(a, b)
        if measure.facts.reads is Rows:
            assert self._sample is not None
            return self._sample[a, b]
        settings = measure.settings
        return self.grams[settings["batch"], settings["kernel"], settings["fraction"]][a, b]

    def moments(self, a: str, b: str) -> Moments:
        """Return the moments of a pair, streamed or from the rows that were kept."""
        if self._moments is not None:
            return self._moments[a, b]
        assert self._all_rows is not None
        return self._all_rows[a, b].moments(self.needs.precision)

    @property
    def sampled(self) -> bool:
        """Whether measures on rows saw a sample of the examples only."""
        return self._sample is not None and self._sample.seen > self._sample.n

    @property
    def sample_size(self) -> int:
        """How many examples measures on rows saw."""
        return self._sample.n if self._sample is not None else 0

    def _keeper(self, subject: Subject) -> Any:
        """Return what a hook keeps of a layer's rows: Gram matrices at once, the rows only if somebody needs them."""

        def keep(layer: str, rows: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[int, int]]:
            key = f"{subject.name}/{layer}"
            grams = tuple(self._gram_collector(gram_key).reduce(key, rows) for gram_key in self.needs.grams)
            needs_rows = self.needs.moments or self.needs.rows
            return rows if needs_rows else None, grams, (rows.shape[0], rows.shape[1])

        return keep

    def _gram_collector(self, key: GramKey) -> LayerGrams:
        if key not in self.grams:  # before the first batch has named the layers
            self.grams[key] = LayerGrams([], batch=key[0], kernel=key[1], fraction=key[2])
        return self.grams[key]

    def _fold(self, kept: Sequence[dict[str, Any]]) -> None:
        count = _examples_in(kept)
        if not self.layers:
            self._begin(kept, count)
        flat = {
            f"{subject.name}/{layer}": value
            for subject, rows in zip(self.subjects, kept, strict=True)
            for layer, value in rows.items()
        }
        rows = {key: value[0] for key, value in flat.items()}
        for statistic in (self._moments, self._all_rows, self._sample):
            if statistic is not None:
                statistic.update({name: rows[name] for name in statistic.names})
        for place, gram_key in enumerate(self.needs.grams):
            self.grams[gram_key].fold({key: value[1][place] for key, value in flat.items()})
        self.examples += count

    def _begin(self, kept: Sequence[dict[str, Any]], count: int) -> None:
        """Plan and make the statistics, now that the first batch has told names and widths."""
        for subject, rows in zip(self.subjects, kept, strict=True):
            self.layers[subject.name] = [
                Layer(subject.name, layer, size[1], size[0] / count) for layer, (_, _, size) in rows.items()
            ]
        rectangles = self.pairs.rectangles({model: [layer.name for layer in ls] for model, ls in self.layers.items()})
        everything = [layer for layers in self.layers.values() for layer in layers]
        self.plan = make_plan(self.needs, everything, rectangles, self.expected, self.memory)
        names = list(dict.fromkeys(name for left, right in rectangles for name in (*left, *right)))
        if self.plan.linear == "moments":
            self._moments = LayerMoments(rectangles, precision=self.needs.precision, debiased=self.needs.debiased)
        if self.plan.linear == "rows":
            self._all_rows = LayerRows(names, seed=self.seed)
        if self.needs.rows:
            self._sample = LayerRows(names, cap=CAP, seed=self.seed)
        for collector in self.grams.values():
            collector.pair_up(rectangles)


def _examples_in(kept: Sequence[dict[str, Any]]) -> int:
    """Return the number of examples in a batch: the smallest number of rows any layer gave."""
    counts = [min(size[0] for _, _, size in rows.values()) for rows in kept if rows]
    if not counts:
        raise NoValue("no layer of any model ran; see `nk.layers(model)`.")
    if len(set(counts)) > 1:
        raise ShapeError(
            f"the models gave {counts[0]} and {counts[1]} rows for the same batch; both must keep one row an example."
        )
    return counts[0]


@contextmanager
def _gentle_interrupt(wanted: bool) -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag, so that no statistic is left half updated; a second one acts at once."""
    flag = threading.Event()
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def note(signum: int, frame: Any) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
