"""From statistics to tables: every measure for every pair, with holes where there is no value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from tqdm import tqdm

from netkin.comparing.collecting import Collection
from netkin.errors import NoValue
from netkin.measures.registry import Measure, value_of
from netkin.results import Values
from netkin.results.listings import NOT_ASKED
from netkin.statistics import Grams, Moments, Rows, Spectra

INTERRUPTED = "interrupted before this pair was reached"


class Tables:
    """The tables of one pair of models, filled pair by pair."""

    def __init__(self, collection: Collection, measures: Sequence[Measure], a: str, b: str):
        self.collection, self.measures, self.a, self.b = collection, measures, a, b
        self.layers_a = [layer.name for layer in collection.layers[a]]
        self.layers_b = [layer.name for layer in collection.layers[b]]
        names = {model: [layer.name for layer in layers] for model, layers in collection.layers.items()}
        self.wanted = collection.pairs.listed(names, a, b)
        self.values = {m.id: np.full((len(self.layers_a), len(self.layers_b)), np.nan) for m in measures}
        everything = [(x, y) for x in self.layers_a for y in self.layers_b]
        asked = set(self.wanted)
        self.holes = {
            m.id: {pair: INTERRUPTED if pair in asked else NOT_ASKED for pair in everything} for m in measures
        }
        self.notes: dict[str, str] = {}
        self.few: list[tuple[int, str]] = []

    def fill(self) -> None:
        """Compute every wanted value; an interruption that was asked for leaves the rest as holes."""
        mirrored, interruption = self.a == self.b, self.collection.interruption
        if "measuring" in interruption.ended:  # in the tables of another pair of models
            return
        with interruption.ending("measuring"), torch.no_grad():
            for x, y in tqdm(self.wanted, desc="measuring", unit=" pairs", delay=2, leave=False):
                self._pair(x, y, mirrored)

    def _pair(self, x: str, y: str, mirrored: bool) -> None:
        statistics: dict[type, object] = {}
        for measure in self.measures:
            if mirrored and measure.facts.symmetric and (y, x) not in self.holes[measure.id] and x != y:
                self._copy(measure, x, y)
                continue
            try:
                value = self._value(measure, x, y, statistics)
            except NoValue as reason:
                self.holes[measure.id][x, y] = self.collection.meeting.plainly(str(reason))
            else:
                self._set(measure, x, y, value)

    def _value(self, measure: Measure, x: str, y: str, statistics: dict[type, object]) -> float:
        reads = measure.facts.reads
        statistic = statistics.get(reads) if reads is not Grams else None
        if statistic is None:
            statistic = statistics[reads] = self.collection.statistic(measure, f"{self.a}/{x}", f"{self.b}/{y}")
        if isinstance(statistic, Moments) and measure.facts.whitens and statistic.few_examples:
            self.few.append((statistic.x.width + statistic.y.width, statistic.few_examples))
        if isinstance(statistic, Grams):
            self._note_batches(measure, statistic)
        return value_of(measure, statistic)

    def _note_batches(self, measure: Measure, grams: Grams) -> None:
        left_out = f"; {grams.left_out} examples left out" if grams.left_out else ""
        batches = "1 batch" if grams.batches == 1 else f"{grams.batches:,} batches"
        self.notes[measure.id] = f"mini-batch estimate ({batches} of up to {grams.batch}{left_out})"

    def _set(self, measure: Measure, x: str, y: str, value: float) -> None:
        self.values[measure.id][self.layers_a.index(x), self.layers_b.index(y)] = value
        del self.holes[measure.id][x, y]

    def _copy(self, measure: Measure, x: str, y: str) -> None:
        self._set(measure, x, y, self.values[measure.id][self.layers_a.index(y), self.layers_b.index(x)])

    def tables(self) -> dict[str, Values]:
        """Return the tables by the measures' ids."""
        return {measure.id: self._table(measure) for measure in self.measures}

    def _table(self, measure: Measure) -> Values:
        facts, values = measure.facts, self.values[measure.id]
        rows, columns = {x: i for i, x in enumerate(self.layers_a)}, {y: j for j, y in enumerate(self.layers_b)}
        holes = {(x, y): why for (x, y), why in self.holes[measure.id].items() if np.isnan(values[rows[x], columns[y]])}
        return Values(
            id=measure.id,
            name=measure.name,
            parameters=measure.settings,
            layers_a=tuple(self.layers_a),
            layers_b=tuple(self.layers_b),
            values=values,
            holes=holes,
            higher_is_closer=facts.higher_is_closer,
            bounds=facts.bounds,
            symmetric=facts.symmetric,
            conventions=facts.convention,
            statistic=self._statistic(measure),
            exactness=self._exactness(measure),
        )

    def _statistic(self, measure: Measure) -> str:
        """Return what the values were read from; linear measures read rows where those were kept, or spectra."""
        kinds = {"rows": Rows, "spectra": Spectra}
        reads = measure.facts.reads
        return (kinds.get(self.collection.plan.linear, reads) if reads is Moments else reads).__name__

    def _exactness(self, measure: Measure) -> str:
        sampled = self.collection.sampled if measure.facts.reads is Rows else ""
        return sampled or self.notes.get(measure.id) or self._off_blocks or "exact"

    @cached_property
    def _off_blocks(self) -> str:
        """How exact blocks for each frequency are, for the layers of these tables; empty without spectra."""
        if self.collection.spectra is None:
            return ""
        shares = self.collection.off_block_shares([(f"{self.a}/{x}", f"{self.b}/{y}") for x, y in self.wanted])
        if not shares:
            return "exact for data closed under translation"
        ends = dict.fromkeys(f"{share:.1%}" for share in (min(shares), max(shares)))
        return (
            f"exact for data closed under translation; here {' to '.join(ends)} of a layer's covariance energy "
            f"lies off the blocks{self.collection.off_block_sample}"
        )

    def warnings(self) -> tuple[str, ...]:
        """Return what a reader of these tables must know, in sentences."""
        said = []
        if self.few:
            pairs = len({text for _, text in self.few})
            said.append(max(self.few)[1] + (f" This holds for {len(self.few):,} values." if pairs > 1 else ""))
        if "reading" in self.collection.interruption.ended:
            said.append(f"interrupted: these numbers rest on the first {self.collection.examples:,} examples.")
        if "measuring" in self.collection.interruption.ended:
            said.append("interrupted: some pairs were not reached, and have no value.")
        return tuple(said)
