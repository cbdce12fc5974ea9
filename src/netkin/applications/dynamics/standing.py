"""Standing: how the layers of two probes stand to each other, as numbers and as a labelled comparison."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from netkin import __version__
from netkin.applications.dynamics.states import LayerState
from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.tabulating import summed_cautions
from netkin.errors import NoValue
from netkin.measures.registry import Measure, value_of
from netkin.results import Comparison, Values
from netkin.results.listings import NOT_ASKED
from netkin.statistics import LayerSize, Moments
from netkin.statistics.sides import RowsSide

Pair = tuple[str, str]


class Moment:
    """The layers' states at one step, with the decompositions that all their pairs share."""

    def __init__(self, step: int, unit: str, states: Mapping[str, LayerState], examples: int):
        self.step, self.name, self.states, self.examples = step, f"{unit} {step}", dict(states), examples
        self._sides: dict[str, RowsSide] = {}

    def side(self, layer: str) -> RowsSide:
        """Return a layer as one side of a pair."""
        if layer not in self._sides:
            self._sides[layer] = self.states[layer].side(f"layer {f'{self.name}/{layer}'!r}")
        return self._sides[layer]

    def release(self) -> None:
        """Forget the decompositions, which take more memory than the states."""
        self._sides.clear()

    @property
    def layers(self) -> list[LayerSize]:
        """The layers as a comparison knows them."""
        return [
            LayerSize(self.name, name, state.width, len(state.rows), self.examples, state.shape)
            for name, state in self.states.items()
        ]


@dataclass(frozen=True)
class Origin:
    """What all comparisons of a recording share: the data's name and where the states came from."""

    data: str
    provenance: Mapping[str, str]


def between(a: Moment, b: Moment, measure: Measure) -> dict[str, float]:
    """Return each layer at moment `a` against itself at moment `b`, without those that have no value."""
    found = _found(a, b, [measure], [(layer, layer) for layer in b.states if layer in a.states])
    return {layer: value for (layer, _), value in found.values[measure.id].items()}


def comparison(a: Moment, b: Moment, measures: Sequence[Measure], pairs: Any, origin: Origin) -> Comparison:
    """Return the layers at moment `a` against those at moment `b`."""
    layers = {"a": list(a.states), "b": list(b.states)}
    found = _found(a, b, measures, Pairs([("a", "b")], pairs).listed(layers, "a", "b"))
    tables = {measure.id: _table(measure, layers["a"], layers["b"], found) for measure in measures}
    return Comparison(
        a=a.name,
        b=b.name,
        layers_a=tuple(layers["a"]),
        layers_b=tuple(layers["b"]),
        tables=tables,
        shapes_a={name: state.shape for name, state in a.states.items()},
        shapes_b={name: state.shape for name, state in b.states.items()},
        widths_a={name: state.width for name, state in a.states.items()},
        widths_b={name: state.width for name, state in b.states.items()},
        data=origin.data,
        examples=a.examples,
        seed=0,
        warnings=tuple(summed_cautions(found.cautions)),
        version=__version__,
        provenance={**origin.provenance, "torch": torch.__version__, "python": platform.python_version()},
    )


class _Found:
    """The values of the wanted pairs by measure, the reasons for those without, and what was said of few examples."""

    def __init__(self, measures: Sequence[Measure]):
        self.values: dict[str, dict[Pair, float]] = {measure.id: {} for measure in measures}
        self.holes: dict[str, dict[Pair, str]] = {measure.id: {} for measure in measures}
        self.cautions: Counter[str] = Counter()

    def add(self, measure: Measure, pair: Pair, moments: Moments) -> None:
        """Note the value of one pair, or why there is none."""
        try:
            for caution in measure.cautions(moments):
                self.cautions[caution] += 1
            self.values[measure.id][pair] = value_of(measure, moments)
        except NoValue as reason:
            self.holes[measure.id][pair] = str(reason)


def _found(a: Moment, b: Moment, measures: Sequence[Measure], wanted: Sequence[Pair]) -> _Found:
    """Return what the measures say of the wanted pairs; what they share of a pair is computed once."""
    found, alignment = _Found(measures), Alignment([*a.layers, *b.layers], [])
    with torch.no_grad():
        for x, y in wanted:
            try:
                alignment.pair((a.name, x), (b.name, y))
                moments = Moments(a.side(x), b.side(y))
            except NoValue as reason:
                for measure in measures:
                    found.holes[measure.id][x, y] = str(reason)
                continue
            for measure in measures:
                found.add(measure, (x, y), moments)
    return found


def _table(measure: Measure, rows: Sequence[str], columns: Sequence[str], found: _Found) -> Values:
    everything = [(x, y) for x in rows for y in columns]
    own, holes = found.values[measure.id], found.holes[measure.id]
    values = np.array([own.get(pair, np.nan) for pair in everything]).reshape(len(rows), len(columns))
    return Values(
        id=measure.id,
        name=measure.name,
        parameters=measure.settings,
        layers_a=tuple(rows),
        layers_b=tuple(columns),
        values=values,
        holes={pair: holes.get(pair, NOT_ASKED) for pair in everything if pair not in own},
        higher_is_closer=measure.facts.higher_is_closer,
        bounds=measure.facts.bounds,
        symmetric=measure.facts.symmetric,
        conventions=measure.facts.convention,
        unit=measure.facts.unit,
        statistic="Rows",
    )
