"""From statistics to tables: every measure for every pair, with reasons where there is no value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from netkin import __version__
from netkin.comparing.comparer import Comparer, provenance_of_all
from netkin.comparing.cut_errors import CutMargins, reason_of_one
from netkin.errors import NetkinError, NoValue
from netkin.measures.cuts import Cut
from netkin.measures.registry import Measure, value_of
from netkin.progress import Interruption, reported
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat, grouped
from netkin.results.labels import NOT_ASKED
from netkin.results.values import jackknife_error
from netkin.settings import exact_products
from netkin.statistics.collector import READ
from netkin.statistics.decompositions import one_thread

INTERRUPTED = "interrupted before this pair was reached"
AT_ONCE = 400  # pairs that are prepared together, at most
TOGETHER = 256  # pairs of models that are read together without each chunk in turn


def comparison_of(
    comparer: Comparer,
    measures: Sequence[Measure],
    pair: tuple[str, str],
    interruption: Interruption | None = None,
) -> Comparison:
    """Return the comparison of two models by some measures."""
    return comparisons_of(comparer, measures, [pair], interruption)[0]


def comparisons_of(
    comparer: Comparer,
    measures: Sequence[Measure],
    pairs: Sequence[tuple[str, str]],
    interruption: Interruption | None = None,
) -> list[Comparison]:
    """Return the comparisons of some pairs of models; what is computed of a layer serves all its pairs."""
    interruption, made = interruption or Interruption(False), list[Comparison]()
    step, known = TOGETHER if comparer.study.chunks else 1, provenance_of_all(comparer)
    for start in range(0, len(pairs), step):
        every = [Tables(comparer, measures, a, b, known) for a, b in pairs[start : start + step]]
        for tables in every:
            tables.fill(interruption)
        if comparer.study.chunks and any(comparer.collectors) and "measuring" not in interruption.ended:
            with interruption.ending("measuring"):
                _replicate(comparer, every)
        made += [tables.comparison(interruption.ended) for tables in every]
    return made


def _replicate(comparer: Comparer, every: Sequence[Tables]) -> None:
    """Compute every value again without each chunk in turn."""
    for tables in every:
        tables.open_replicates()
    most = max((len(sizes) for tables in every for sizes in tables.sizes.values()), default=0)
    for chunk in reported(range(most), "leaving out", "chunks"):
        for collector in comparer.every():  # what was computed with all chunks, or without another one
            collector.clear_cache()
        for tables in every:
            tables.replicate(chunk)


class Tables:
    """The tables of one pair of models, filled pair by pair; `known` is the provenance that all pairs share."""

    def __init__(self, comparer: Comparer, measures: Sequence[Measure], a: str, b: str, known: Mapping[str, str]):
        self.comparer, self.measures, self.a, self.b, self.known = comparer, measures, a, b, known
        self.mirrored = a == b  # so that symmetric measures need one value for both orders of a pair
        names = {model: [layer.name for layer in comparer.layers[model]] for model in (a, b)}
        self.layers_a, self.layers_b = names[a], names[b]
        self.wanted = comparer.pairs.layer_pairs(names, a, b)
        self.values = {m.id: np.full((len(self.layers_a), len(self.layers_b)), np.nan) for m in measures}
        everything = [(x, y) for x in self.layers_a for y in self.layers_b]
        asked = set(self.wanted)
        self.holes = {
            m.id: {pair: INTERRUPTED if pair in asked else NOT_ASKED for pair in everything} for m in measures
        }
        self.replicates: dict[str, np.ndarray] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.ranks: dict[str, dict[str, int]] = {"a": {}, "b": {}}  # the directions that layers were cut to
        self.caveats: list[Caveat] = []  # one for each value that it holds for
        self.cuts: dict[tuple[str, str, str], CutMargins] = {}  # where a measure cut the spectra of a pair
        self.jumps: dict[str, set[tuple[str, str]]] = {}  # pairs of which it keeps others without some chunk
        self._places: dict[tuple[str, str, str], tuple[Any, Any, Any]] = {}  # where measures read pairs
        self.ended = set(comparer.ended)

    def fill(self, interruption: Interruption) -> None:
        """Compute every wanted value; a requested interruption leaves the rest as holes."""
        if "measuring" not in interruption.ended:  # in the tables of another pair of models
            with interruption.ending("measuring"), torch.no_grad(), exact_products():
                for x, y, read in reported(self._prepare(), "measuring", "pairs", total=len(self.wanted)):
                    self._pair(x, y, read)

    def open_replicates(self) -> None:
        """Make room for the replicates of those measures that the jackknife serves."""
        for measure in self.measures:
            if not measure.jackknife_reason:
                self.sizes[measure.id] = self.comparer.collector(measure).chunk_sizes
                shape = (len(self.sizes[measure.id]), len(self.layers_a), len(self.layers_b))
                self.replicates[measure.id] = np.full(shape, np.nan)

    def replicate(self, chunk: int) -> None:
        """Compute every value again without one chunk."""
        here = [one for one in self.measures if any(self.sizes.get(one.id, ())[chunk : chunk + 1])]
        with torch.no_grad(), exact_products():
            for x, y, read in self._prepare(here, chunk):
                self._replicate_pair(chunk, here, x, y, read)

    def comparison(self, ended: Set[str]) -> Comparison:
        """Return the tables with their provenance, after the stages that `ended` early."""
        self.ended |= ended
        layers, a, b, tables = self.comparer.layers, self.a, self.b, self.tables()
        origins = {"a": self.comparer.origins[a], "b": self.comparer.origins[b]}
        # random weights, or no layers to be seen
        remarks = ((what, origin.get(what)) for origin in origins.values() for what in ("random weights", "one layer"))
        models = [Caveat(what.replace(" ", "-"), sentence) for what, sentence in remarks if sentence]
        # forms are for merges; a result names their digest
        known = {f"{what} {side}": own[what] for side, own in origins.items() for what in own if what != "form"}
        return Comparison(
            a=self.comparer.names.get(a, a),
            b=self.comparer.names.get(b, b),
            layers_a=tuple(self.layers_a),
            layers_b=tuple(self.layers_b),
            tables=tables,
            shapes_a={layer.name: layer.shape for layer in layers[a] if self.comparer.examples},
            shapes_b={layer.name: layer.shape for layer in layers[b] if self.comparer.examples},
            widths_a={layer.name: layer.width for layer in layers[a]},
            widths_b={layer.name: layer.width for layer in layers[b]},
            data=self.comparer.data,
            examples=self.comparer.examples,
            seed=self.comparer.study.seed,
            caveats=tuple(dict.fromkeys([*self.comparer.caveats, *models, *self.caveats_of_values()])),
            version=__version__,
            provenance=known | dict(self.known) | self.ranks_in_words(),
            complete=not self.ended,
        )

    def _prepare(
        self, measures: Sequence[Measure] | None = None, without: int | None = None
    ) -> Iterator[tuple[str, str, dict[int, Any]]]:
        """Yield the wanted pairs with what collectors gave for them.

        Pair types that have a `prepare` see many pairs together, before any is measured.
        """
        able = [measure for measure in measures or self.measures if hasattr(measure.facts.reads, "prepare")]
        seen: set[tuple[str, str]] = set()
        for block in self._blocks():
            for (x, y), read in zip(block, self._reads(block, able, seen, without), strict=True):
                yield x, y, read
                read.clear()  # or the last pair would be held beside all that is read next

    def _reads(
        self, block: list[tuple[str, str]], able: Sequence[Measure], seen: set[tuple[str, str]], without: int | None
    ) -> list[dict[int, Any]]:
        """Return what collectors gave for some pairs, prepared for the measures that are `able` to share work."""
        reads: list[dict[int, Any]] = [{} for _ in block]
        given: dict[int, tuple[Any, list[Measure]]] = {}
        for (x, y), read in zip(block, reads, strict=True):
            for measure in able:
                if self.mirrored and measure.facts.symmetric and (y, x) in seen:
                    continue  # its value is there already
                with suppress(NetkinError):  # which is reported when the pair is measured
                    pair = self._read(measure, x, y, read, without)
                    given.setdefault(id(pair), (pair, []))[1].append(measure)
            seen.add((x, y))
        for prepare in dict.fromkeys(type(pair).prepare for pair, _ in given.values()):
            prepare([(pair, asked) for pair, asked in given.values() if type(pair).prepare is prepare])
        return reads

    def _blocks(self) -> Iterator[list[tuple[str, str]]]:
        """Yield the wanted pairs in their order, as many at once as fit in memory."""
        rows, columns = self._extents(self.a), self._extents(self.b)
        block: list[tuple[str, str]] = []
        size = 0
        for x, y in self.wanted:
            one = rows[x] * columns[y]
            if block and (len(block) == AT_ONCE or size + one > READ):
                yield block
                block, size = [], 0
            block.append((x, y))
            size += one
        if block:
            yield block

    def _extents(self, model: str) -> dict[str, int]:
        """Return how many rows or columns each layer of a model has in the matrices of its pairs."""
        layers, held = self.comparer.layers[model], list(self.comparer.every())
        return {
            layer.name: max((one.extent(layer, self.comparer.examples) for one in held), default=layer.width)
            for layer in layers
        }

    def _replicate_pair(self, chunk: int, measures: Sequence[Measure], x: str, y: str, read: dict[int, Any]) -> None:
        i, j = self.layers_a.index(x), self.layers_b.index(y)
        for measure in measures:
            table = self.replicates[measure.id][chunk]
            if np.isnan(self.values[measure.id][i, j]):
                continue
            if self.mirrored and measure.facts.symmetric and not np.isnan(table[j, i]):
                table[i, j] = table[j, i]
                continue
            try:
                pair = self._read(measure, x, y, read, chunk)
                with one_thread(getattr(pair, "is_small", False)):
                    table[i, j], cut = _value_and_cut(measure, pair)
            except NoValue:  # without this chunk, and so there is no standard error
                continue
            except Exception as fault:
                self._add_pair(fault, measure, x, y)
                raise
            if cut is not None:
                self.cuts[measure.id, x, y].add(chunk, cut)
                if cut.counts != self.cuts[measure.id, x, y].counts:
                    self.jumps.setdefault(measure.id, set()).add((x, y))

    def _pair(self, x: str, y: str, read: dict[int, Any]) -> None:
        """Measure one pair; `read` is what each collector gave for it, which its measures share."""
        for measure in self.measures:
            if self.mirrored and measure.facts.symmetric and (y, x) not in self.holes[measure.id] and x != y:
                self._set(measure, x, y, self.values[measure.id][self.layers_a.index(y), self.layers_b.index(x)])
                continue
            try:
                value = self._value(measure, x, y, read)
            except NoValue as reason:
                self.holes[measure.id][x, y] = self.comparer.alignment.with_own_names(str(reason))
            except Exception as fault:
                self._add_pair(fault, measure, x, y)
                raise
            else:
                self._set(measure, x, y, value)

    def _add_pair(self, fault: Exception, measure: Measure, x: str, y: str) -> None:
        """Let a fault say which pair of layers was measured, and by what; one of another package in a note."""
        names = [self.comparer.names.get(model, model) for model in (self.a, self.b)]
        pair = f"{measure.id} of layer {x!r} of {names[0]!r} and layer {y!r} of {names[1]!r}"
        if isinstance(fault, NetkinError):
            fault.args = (f"{pair}: {fault}",)
        elif hasattr(fault, "add_note"):  # from Python 3.11 on
            fault.add_note(f"while measuring {pair}")

    def _value(self, measure: Measure, x: str, y: str, read: dict[int, Any]) -> float:
        pair = self._read(measure, x, y, read)
        with one_thread(getattr(pair, "is_small", False)):
            self.caveats += measure.caveats(pair)
            value, cut = _value_and_cut(measure, pair)
            if cut is not None and self.comparer.study.chunks:
                self.cuts[measure.id, x, y] = CutMargins(cut, pair, self.comparer.study.chunks)
        ranks = pair.ranks(measure.facts) if hasattr(pair, "ranks") else None
        if ranks is not None:
            self.ranks["a"][x], self.ranks["b"][y] = ranks
        return value

    def _read(self, measure: Measure, x: str, y: str, read: dict[int, Any], without: int | None = None) -> Any:
        """Return the pair as its collector gives it, once for all measures that share the collector."""
        key = (measure.id, x, y)
        if key not in self._places:
            self._places[key] = self.comparer.place(measure, (self.a, x), (self.b, y))
        collector, a, b = self._places[key]
        if id(collector) not in read:
            read[id(collector)] = collector.pair(a, b) if without is None else collector.pair(a, b, without)
        return read[id(collector)]

    def _set(self, measure: Measure, x: str, y: str, value: float) -> None:
        self.values[measure.id][self.layers_a.index(x), self.layers_b.index(y)] = value
        del self.holes[measure.id][x, y]

    def tables(self) -> dict[str, Values]:
        """Return the tables by the measures' ids."""
        return {measure.id: self.table(measure) for measure in self.measures}

    def table(self, measure: Measure) -> Values:
        """Return the table of one measure."""
        values = self.values[measure.id]
        rows, columns = {x: i for i, x in enumerate(self.layers_a)}, {y: j for j, y in enumerate(self.layers_b)}
        holes = {(x, y): why for (x, y), why in self.holes[measure.id].items() if np.isnan(values[rows[x], columns[y]])}
        return Values(
            quantity=measure.quantity,
            layers_a=tuple(self.layers_a),
            layers_b=tuple(self.layers_b),
            values=values,
            missing=holes,
            statistic=self._statistic(measure),
            exactness=self._exactness(measure),
            **self._errors(measure),
        )

    def _errors(self, measure: Measure) -> dict[str, Any]:
        """Return the replicates of a table and its chunks, or why it has none, where standard errors are requested."""
        if not self.comparer.study.chunks:
            return {}
        held = [size > 0 for size in self.sizes.get(measure.id, ())]
        if sum(held) > 1:
            sizes = tuple(size for size in self.sizes[measure.id] if size)
            reasons = self._doubts_of_cuts(measure, self.replicates[measure.id][held], sizes)
            return {"replicates": self.replicates[measure.id][held], "chunk_sizes": sizes, "error_reasons": reasons}
        reason = measure.jackknife_reason or (
            "fewer than two chunks hold any examples or mini-batches; take more data"
            if self.sizes.get(measure.id)
            else f"its statistic, {self._statistic(measure)}, keeps no chunks of the examples"
        )
        return {"error_reasons": dict.fromkeys(self.wanted, reason)}

    def _doubts_of_cuts(self, measure: Measure, replicates: np.ndarray, sizes: Sequence[int]) -> dict[Any, str]:
        """Return why pairs have no error: their value hangs on where spectra are cut, by a share or at rounding."""
        if not measure.facts.whitens:
            return {}
        values, found = self.values[measure.id], dict[Any, str]()
        errors = jackknife_error(values, replicates, sizes)
        for i, j in np.argwhere(np.isfinite(errors)).tolist():
            pair = self.layers_a[i], self.layers_b[j]
            mirrored = self.mirrored and measure.facts.symmetric and (measure.id, *pair) not in self.cuts
            cut = self.cuts.get((measure.id, *(pair[::-1] if mirrored else pair)))
            reason = cut.reason(values[i, j], errors[i, j], replicates[:, i, j], self.sizes[measure.id]) if cut else ""
            found[pair] = reason or reason_of_one(values[i, j], replicates[:, i, j], sizes)
        return {pair: reason for pair, reason in found.items() if reason}

    def _statistic(self, measure: Measure) -> str:
        """Return what the values were read from."""
        if not any(self.comparer.collectors):
            return str(measure.facts.reads.__name__)
        collector = self.comparer.collector(measure)
        return collector.holds or collector.kind

    def _exactness(self, measure: Measure) -> str:
        found: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
        for x, y in self.wanted:
            with suppress(NoValue):  # of pairs that are not compared
                collector, a, b = self.comparer.place(measure, (self.a, x), (self.b, y))
                found.setdefault(id(collector), (collector, []))[1].append((a, b))
        notes = [collector.exactness_of(pairs) for collector, pairs in found.values()]
        return max(notes, key=len, default="exact")

    def ranks_in_words(self) -> dict[str, str]:
        """Return how many directions each layer was cut to by measures that whiten, for the provenance."""
        layers = self.comparer.layers
        widths = {layer.key: layer.width for model in (self.a, self.b) for layer in layers[model]}
        found: dict[str, str] = {}
        for side, model in (("a", self.a), ("b", self.b)):
            cut = [f"{layer} {rank:,} of {widths[model, layer]:,}" for layer, rank in self.ranks[side].items()]
            found |= {f"directions {side}": ", ".join(cut)} if cut else {}
        return found

    def caveats_of_values(self) -> Iterator[Caveat]:
        """Yield the caveats of values, of standard errors and of an interruption."""
        yield from grouped(self.caveats)
        yield from self._doubts_of_errors()
        if "reading" in self.ended:
            sentence = f"interrupted: these numbers rest on the first {self.comparer.examples:,} examples."
            yield Caveat("interrupted", sentence)
        if "measuring" in self.ended:
            yield Caveat("interrupted", "interrupted: some pairs were not reached, and have no value.")

    def _doubts_of_errors(self) -> Iterator[Caveat]:
        """Yield what makes standard errors rough: chunks that hold nothing, cuts that jump between chunks."""
        rough: dict[tuple[int, ...], list[Measure]] = {}
        for measure in self.measures:
            sizes = self.sizes.get(measure.id, ())
            if 1 < sum(map(bool, sizes)) < len(sizes):
                rough.setdefault(sizes, []).append(measure)
        for sizes, of in rough.items():
            batches = self.comparer.collector(of[0]).reduces
            sentence = (
                f"the standard errors of {', '.join(one.id for one in of)} rest on {sum(map(bool, sizes))} chunks, as "
                f"{sum(sizes):,} {'mini-batches' if batches else 'examples'} do not fill all of the {len(sizes)}; take "
                f"more examples or {'smaller mini-batches' if batches else 'fewer `chunks=`'}."
            )
            yield Caveat("few-chunks", sentence)
        for name, pairs in self.jumps.items():
            sentence = (
                f"without some chunk {name} keeps another number of directions, of {len(pairs):,} pairs; such jumps "
                "make a standard error too large, unless the table has a reason in its place."
            )
            yield Caveat("jumping-cuts", sentence, len(pairs))


def _value_and_cut(measure: Measure, pair: Any) -> tuple[float, Cut | None]:
    """Return a measure's value of a pair, and where it cut the spectra of the layers, if it did."""
    if hasattr(pair, "cut"):
        pair.cut = None
    return value_of(measure, pair), getattr(pair, "cut", None)
