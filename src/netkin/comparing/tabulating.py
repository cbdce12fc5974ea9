"""From statistics to tables: every measure for every pair, with reasons where there is no value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from netkin import __version__
from netkin.comparing.comparer import Comparer, provenance_of_all
from netkin.comparing.cut_errors import CutMargins, reason_of_one
from netkin.errors import NetkinError, NoValue
from netkin.measures.cuts import Cut
from netkin.measures.registry import Measure, value_of
from netkin.progress import Interruption, with_progress
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat, grouped
from netkin.results.labels import NOT_ASKED
from netkin.results.values import Pair, jackknife_error
from netkin.settings import exact_products
from netkin.statistics.collector import READ, Collector, Key
from netkin.statistics.decompositions import one_thread
from netkin.statistics.massive import caveats_of_tokens
from netkin.statistics.moments import Moments
from netkin.statistics.sequence_rows import Sequences

FEWEST_SEQUENCES = 20  # from which tokens get standard errors
INTERRUPTED = "interrupted before this pair was reached"
AT_ONCE = 400  # pairs that are prepared together, at most
TOGETHER = 256  # pairs of models that are read together without each chunk in turn


def comparisons_of(
    comparer: Comparer,
    measures: Sequence[Measure],
    pairs: Sequence[Pair],
    interruption: Interruption | None = None,
) -> list[Comparison]:
    """Return the comparisons of some pairs of models; what is computed of a layer serves all its pairs."""
    interruption, comparisons = interruption or Interruption(False), list[Comparison]()
    chunks, shared = comparer.study.chunks, provenance_of_all(comparer)
    step = TOGETHER if chunks else 1
    for start in range(0, len(pairs), step):
        several = [Tables(comparer, measures, a, b) for a, b in pairs[start : start + step]]
        for tables in several:
            if "measuring" not in interruption.ended:
                with interruption.ending("measuring"):
                    tables.fill()
        if chunks and any(comparer.collectors) and "measuring" not in interruption.ended:
            with interruption.ending("measuring"):
                _replicate(comparer, several)
        ended = interruption.ended.union(comparer.record.ended)
        comparisons += [tables.comparison(shared, ended) for tables in several]
    return comparisons


def _replicate(comparer: Comparer, several: Sequence[Tables]) -> None:
    """Compute every value again without each chunk in turn."""
    for tables in several:
        tables.open_replicates()
    most = max((len(table.sizes) for tables in several for table in tables.of_measures), default=0)
    for chunk in with_progress(range(most), "leaving out", "chunks"):
        for collector in comparer.every():  # what was computed with all chunks, or without another one
            collector.clear_cache()
        for tables in several:
            tables.fill(chunk)


@dataclass(eq=False)
class MeasureTable:
    """What one measure gave for the pairs of layers of two models."""

    measure: Measure
    values: np.ndarray
    reasons: dict[Pair, str] = field(default_factory=dict)  # why pairs have no value
    sizes: tuple[int, ...] = ()  # of the chunks, where values without each of them are computed
    replicates: np.ndarray = field(default_factory=lambda: np.empty(0))  # these values
    cuts: dict[Pair, CutMargins] = field(default_factory=dict)  # where the spectra of a pair were cut
    jumps: set[Pair] = field(default_factory=set)  # pairs of which another number is kept without some chunk
    places: dict[Pair, tuple[Collector, Key, Key]] = field(default_factory=dict)  # where pairs are read


class Tables:
    """The tables of one pair of models, filled pair by pair."""

    def __init__(self, comparer: Comparer, measures: Sequence[Measure], a: str, b: str):
        self.comparer, self.a, self.b = comparer, a, b
        self.rows, self.columns = (
            {layer.name: place for place, layer in enumerate(comparer.layers[model])} for model in (a, b)
        )
        self.wanted = comparer.pairs.layer_pairs({a: list(self.rows), b: list(self.columns)}, a, b)
        size = (len(self.rows), len(self.columns))
        self.of_measures = [MeasureTable(measure, np.full(size, np.nan)) for measure in measures]
        self.ranks: dict[str, dict[str, int]] = {"a": {}, "b": {}}  # the directions that layers were cut to
        self.caveats: list[Caveat] = []  # one for each value that it holds for

    def open_replicates(self) -> None:
        """Make room for the replicates of those measures that the jackknife serves."""
        for table in self.of_measures:
            if not table.measure.jackknife_reason:
                table.sizes = self.comparer.collector(table.measure).chunk_sizes
                table.replicates = np.full((len(table.sizes), *table.values.shape), np.nan)

    def fill(self, without: int | None = None) -> None:
        """Compute every wanted value from all examples, or `without` one chunk of them."""
        tables = [table for table in self.of_measures if without is None or any(table.sizes[without : without + 1])]
        pairs = self._prepared(tables, without)
        if without is None:
            pairs = with_progress(pairs, "measuring", "pairs", total=len(self.wanted))
        with torch.no_grad(), exact_products():
            for x, y, read in pairs:
                for table in tables:
                    self._measure(table, x, y, read, without)

    def _measure(self, table: MeasureTable, x: str, y: str, read: dict[int, Any], without: int | None) -> None:
        """Compute one value; `read` is what each collector gave for the pair, which its measures share."""
        measure, place = table.measure, (self.rows[x], self.columns[y])
        values = table.values if without is None else table.replicates[without]
        if without is not None and np.isnan(table.values[place]):
            return
        if self._is_mirrored(measure) and not np.isnan(values[place[::-1]]):
            values[place] = values[place[::-1]]
            return
        try:
            pair = self._read(table, x, y, read, without)
            with one_thread(getattr(pair, "is_small", False)):
                if without is None:
                    self.caveats += [*measure.caveats(pair), *self._of_tokens(measure, pair, x, y)]
                values[place], cut = _value_and_cut(measure, pair)
                if without is None and cut is not None and self.comparer.study.chunks:
                    table.cuts[x, y] = CutMargins(cut, pair, self.comparer.study.chunks)
        except NoValue as reason:  # without a chunk: there is no standard error
            if without is None:
                table.reasons[x, y] = str(reason)
            return
        except Exception as fault:
            self._add_pair(fault, measure, x, y)
            raise
        if without is not None and cut is not None:
            table.cuts[x, y].add(without, cut)
            if cut.counts != table.cuts[x, y].counts:
                table.jumps.add((x, y))
        elif without is None and hasattr(pair, "ranks") and (ranks := pair.ranks(measure.facts)) is not None:
            self.ranks["a"][x], self.ranks["b"][y] = ranks

    def _of_tokens(self, measure: Measure, pair: Any, x: str, y: str) -> list[Caveat]:
        """Return why CKA of two layers of tokens may be high for a few channels, or for the first tokens alone."""
        keys = (self.a, x), (self.b, y)
        of_tokens = all(self.comparer.alignment.given[key].kind == "tokens" for key in keys)
        if not (
            of_tokens
            and isinstance(pair, (Moments, Sequences))
            and (measure.facts.debiased_as or measure.facts.debiases)
        ):
            return []
        return caveats_of_tokens(keys[0], pair.x, keys[1], pair.y, self.comparer.firsts)

    def _is_mirrored(self, measure: Measure) -> bool:
        """Return whether one value serves both orders of a pair."""
        return bool(self.a == self.b and measure.facts.symmetric)

    def _add_pair(self, fault: Exception, measure: Measure, x: str, y: str) -> None:
        """Let a fault say which pair of layers was measured, and by what; one of another package in a note."""
        names = [self.comparer.record.names.get(model, model) for model in (self.a, self.b)]
        pair = f"{measure.id} of layer {x!r} of {names[0]!r} and layer {y!r} of {names[1]!r}"
        if isinstance(fault, NetkinError):
            fault.args = (f"{pair}: {fault}",)
        elif hasattr(fault, "add_note"):  # from Python 3.11 on
            fault.add_note(f"while measuring {pair}")

    # --- reading pairs ------------------------------------------------------------------------------------------------

    def _prepared(
        self, tables: Sequence[MeasureTable], without: int | None
    ) -> Iterator[tuple[str, str, dict[int, Any]]]:
        """Yield the wanted pairs with what collectors gave for them, as many prepared at once as fit in memory."""
        sizes = [self._extents(model) for model in (self.a, self.b)]
        able = [table for table in tables if hasattr(table.measure.facts.reads, "prepare")]
        seen, rest = set[Pair](), list(self.wanted)
        while rest:
            count, size = 0, 0
            for x, y in rest[:AT_ONCE]:
                size += sizes[0][x] * sizes[1][y]
                if count and size > READ:
                    break
                count += 1
            block, rest = rest[:count], rest[count:]
            for (x, y), read in zip(block, self._reads(block, able, seen, without), strict=True):
                yield x, y, read
                read.clear()  # or the last pair would be held beside all that is read next

    def _reads(
        self, block: Sequence[Pair], able: Sequence[MeasureTable], seen: set[Pair], without: int | None
    ) -> list[dict[int, Any]]:
        """Return what collectors gave for some pairs, prepared for the measures that are `able` to share work."""
        reads: list[dict[int, Any]] = [{} for _ in block]
        prepared: dict[int, tuple[Any, list[Measure]]] = {}  # each pair with the measures that it is prepared for
        for (x, y), read in zip(block, reads, strict=True):
            for table in able:
                if self._is_mirrored(table.measure) and (y, x) in seen:
                    continue  # its value is there already
                with suppress(NetkinError):  # which is reported when the pair is measured
                    pair = self._read(table, x, y, read, without)
                    prepared.setdefault(id(pair), (pair, []))[1].append(table.measure)
            seen.add((x, y))
        for prepare in dict.fromkeys(type(pair).prepare for pair, _ in prepared.values()):
            prepare([(pair, measures) for pair, measures in prepared.values() if type(pair).prepare is prepare])
        return reads

    def _read(self, table: MeasureTable, x: str, y: str, read: dict[int, Any], without: int | None) -> Any:
        """Return the pair as its collector gives it, once for all measures that share the collector."""
        collector, a, b = self._place(table, x, y)
        if id(collector) not in read:
            read[id(collector)] = collector.pair(a, b) if without is None else collector.pair(a, b, without)
        return read[id(collector)]

    def _place(self, table: MeasureTable, x: str, y: str) -> tuple[Collector, Key, Key]:
        if (x, y) not in table.places:
            table.places[x, y] = self.comparer.place(table.measure, (self.a, x), (self.b, y))
        return table.places[x, y]

    def _extents(self, model: str) -> dict[str, int]:
        """Return how many rows or columns each layer of a model has in the matrices of its pairs."""
        collectors, count = list(self.comparer.every()), self.comparer.examples
        return {
            layer.name: max((collector.extent(layer, count) for collector in collectors), default=layer.width)
            for layer in self.comparer.layers[model]
        }

    # --- what comes of it ---------------------------------------------------------------------------------------------

    def comparison(self, shared: Mapping[str, str], ended: Set[str]) -> Comparison:
        """Return the tables with the provenance that all pairs have, after the stages that `ended` early."""
        comparer, layers, a, b = self.comparer, self.comparer.layers, self.a, self.b
        tables = {table.measure.id: self._values(table) for table in self.of_measures}
        record, origins = comparer.record, {"a": comparer.record.origins[a], "b": comparer.record.origins[b]}
        # random weights, or no layers to be seen
        remarks = ((what, origin.get(what)) for origin in origins.values() for what in ("random weights", "one layer"))
        models = [Caveat(what.replace(" ", "-"), sentence) for what, sentence in remarks if sentence]
        # forms are for merges; a result names their digest
        provenance = {
            f"{what} {side}": text
            for side, origin in origins.items()
            for what, text in origin.items()
            if what != "form"
        }
        return Comparison(
            a=record.names.get(a, a),
            b=record.names.get(b, b),
            layers_a=tuple(self.rows),
            layers_b=tuple(self.columns),
            tables=tables,
            shapes_a={layer.name: layer.shape for layer in layers[a] if comparer.examples},
            shapes_b={layer.name: layer.shape for layer in layers[b] if comparer.examples},
            widths_a={layer.name: layer.width for layer in layers[a]},
            widths_b={layer.name: layer.width for layer in layers[b]},
            data=record.data,
            examples=comparer.examples,
            seed=comparer.study.seed,
            caveats=tuple(dict.fromkeys([*comparer.caveats, *models, *self._caveats(ended)])),
            version=__version__,
            provenance=provenance | dict(shared) | self._ranks_in_words(),
            complete=not ended,
        )

    def _values(self, table: MeasureTable) -> Values:
        """Return the table of one measure."""
        measure, wanted = table.measure, set(self.wanted)
        places, statistic = dict[int, tuple[Collector, list[Any]]](), str(measure.facts.reads.__name__)
        if any(self.comparer.collectors):
            collector = self.comparer.collector(measure)
            statistic = collector.holds or collector.kind
        for x, y in self.wanted:
            with suppress(NoValue):  # of pairs that are not compared
                collector, *keys = self._place(table, x, y)
                places.setdefault(id(collector), (collector, []))[1].append(tuple(keys))
        exactness = [collector.exactness_of(pairs) for collector, pairs in places.values()]
        return Values(
            quantity=measure.quantity,
            layers_a=tuple(self.rows),
            layers_b=tuple(self.columns),
            values=table.values,
            missing={
                (x, y): table.reasons.get((x, y), INTERRUPTED if (x, y) in wanted else NOT_ASKED)
                for x, i in self.rows.items()
                for y, j in self.columns.items()
                if np.isnan(table.values[i, j])
            },
            statistic=statistic,
            exactness=max(exactness, key=len, default="exact"),
            **self._errors(table, statistic),
        )

    def _errors(self, table: MeasureTable, statistic: str) -> dict[str, Any]:
        """Return the replicates of a table and its chunks, or why it has none, where standard errors are requested."""
        if not self.comparer.study.chunks:
            return {}
        layers = [layer for model in (self.a, self.b) for layer in self.comparer.layers[model]]
        if self.comparer.examples < FEWEST_SEQUENCES and any(layer.kind == "tokens" for layer in layers):
            reason = (
                f"tokens of one sequence are not independent, and {self.comparer.examples:,} sequences are too few for "
                f"a standard error; take {FEWEST_SEQUENCES} or more"
            )
            return {"error_reasons": dict.fromkeys(self.wanted, reason)}
        has_examples = [size > 0 for size in table.sizes]
        if sum(has_examples) > 1:
            sizes, replicates = tuple(size for size in table.sizes if size), table.replicates[has_examples]
            reasons = self._doubts_of_cuts(table, replicates, sizes) if table.measure.facts.whitens else {}
            return {"replicates": replicates, "chunk_sizes": sizes, "error_reasons": reasons}
        reason = table.measure.jackknife_reason or (
            "fewer than two chunks hold any examples or mini-batches; take more data"
            if table.sizes
            else f"its statistic, {statistic}, keeps no chunks of the examples"
        )
        return {"error_reasons": dict.fromkeys(self.wanted, reason)}

    def _doubts_of_cuts(self, table: MeasureTable, replicates: np.ndarray, sizes: Sequence[int]) -> dict[Pair, str]:
        """Return why pairs have no error: their value hangs on where spectra are cut, by a share or at rounding."""
        values, reasons, layers = table.values, dict[Pair, str](), (list(self.rows), list(self.columns))
        errors = jackknife_error(values, replicates, sizes)
        for i, j in np.argwhere(np.isfinite(errors)).tolist():
            pair = layers[0][i], layers[1][j]
            is_mirrored = self._is_mirrored(table.measure) and pair not in table.cuts
            cut = table.cuts.get(pair[::-1] if is_mirrored else pair)
            reason = cut.reason(values[i, j], errors[i, j], replicates[:, i, j], table.sizes) if cut else ""
            reasons[pair] = reason or reason_of_one(values[i, j], replicates[:, i, j], sizes)
        return {pair: reason for pair, reason in reasons.items() if reason}

    def _ranks_in_words(self) -> dict[str, str]:
        """Return how many directions each layer was cut to by measures that whiten, for the provenance."""
        words: dict[str, str] = {}
        for side, model in (("a", self.a), ("b", self.b)):
            widths = {layer.name: layer.width for layer in self.comparer.layers[model]}
            cut = [f"{layer} {rank:,} of {widths[layer]:,}" for layer, rank in self.ranks[side].items()]
            words |= {f"directions {side}": ", ".join(cut)} if cut else {}
        return words

    def _caveats(self, ended: Set[str]) -> Iterator[Caveat]:
        """Yield the caveats of values, of rough standard errors and of an interruption."""
        yield from grouped(self.caveats)
        rough: dict[tuple[int, ...], list[Measure]] = {}  # by chunks of which some hold nothing
        for table in self.of_measures:
            if 1 < sum(map(bool, table.sizes)) < len(table.sizes):
                rough.setdefault(table.sizes, []).append(table.measure)
        for sizes, measures in rough.items():
            batches = self.comparer.collector(measures[0]).reduces
            names, filled = ", ".join(measure.id for measure in measures), sum(map(bool, sizes))
            sentence = (
                f"the standard errors of {names} rest on {filled} chunks, as {sum(sizes):,} "
                f"{'mini-batches' if batches else 'examples'} do not fill all of the {len(sizes)}; take more examples "
                f"or {'smaller mini-batches' if batches else 'fewer `chunks=`'}."
            )
            yield Caveat("few-chunks", sentence)
        for table in self.of_measures:
            if table.jumps:
                sentence = (
                    f"without some chunk {table.measure.id} keeps another number of directions, of "
                    f"{len(table.jumps):,} pairs; such jumps make a standard error too large, unless the table has a "
                    "reason in its place."
                )
                yield Caveat("jumping-cuts", sentence, len(table.jumps))
        if "reading" in ended:
            sentence = f"interrupted: these numbers rest on the first {self.comparer.examples:,} examples."
            yield Caveat("interrupted", sentence)
        if "measuring" in ended:
            yield Caveat("interrupted", "interrupted: some pairs were not reached, and have no value.")


def _value_and_cut(measure: Measure, pair: Any) -> tuple[float, Cut | None]:
    """Return a measure's value of a pair, and where it cut the spectra of the layers, if it did."""
    if hasattr(pair, "cut"):
        pair.cut = None
    return value_of(measure, pair), getattr(pair, "cut", None)
