"""Standing: how the layers of two probes stand to each other, as numbers and as a labelled comparison."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from netkin.applications.dynamics.states import LayerState
from netkin.comparing.alignment import Alignment, Pairs
from netkin.comparing.interrupting import Interruption
from netkin.comparing.study import Statistics
from netkin.comparing.tabulating import Tables, comparison_of
from netkin.measures.registry import Measure
from netkin.progress import showing
from netkin.results import Comparison
from netkin.statistics import LayerSize, LinearRows, Moments, Study
from netkin.statistics.row_sides import RowsSide


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


class StateRows(LinearRows):
    """The states of two moments as a collector, so that they are tabulated like rows that a pass has kept."""

    def __init__(self, a: Moment, b: Moment):
        super().__init__([([layer.key for layer in a.layers], [layer.key for layer in b.layers])])
        self._moments = {a.name: a, b.name: b}

    def pair(self, a: Any, b: Any, without: int | None = None) -> Moments:
        """Return the layers `a` and `b`, each (moment, layer), as linear measures read them."""
        x, y = (self._moments[name].side(layer) for name, layer in (a, b))
        return Moments(x, y)


def between(a: Moment, b: Moment, measure: Measure) -> dict[str, float]:
    """Return each layer at moment `a` against itself at moment `b`, without those that have no value."""
    shared = [(layer, layer) for layer in b.states if layer in a.states]
    if not shared:
        return {}
    tables = Tables(_statistics(a, b, shared), [measure], a.name, b.name)
    with showing(False):
        tables.fill(Interruption(False))
    values = tables.table(measure)
    return {layer: values[layer, layer] for layer, _ in shared if (layer, layer) not in values.holes}


def comparison(a: Moment, b: Moment, measures: Sequence[Measure], pairs: Any, origin: Origin) -> Comparison:
    """Return the layers at moment `a` against those at moment `b`."""
    with showing(False):
        found = comparison_of(_statistics(a, b, pairs), measures, (a.name, b.name))
    ranks = {name: text for name, text in found.provenance.items() if name.startswith("directions")}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return replace(found, data=origin.data, provenance={**origin.provenance, **versions, **ranks})


def _statistics(a: Moment, b: Moment, pairs: Any) -> Statistics:
    """Return the states of two moments as what a pass leaves."""
    layers = list({layer.key: layer for layer in (*a.layers, *b.layers)}.values())
    study = Study({layer.key: layer for layer in layers}, [], examples=a.examples)
    made = Statistics([], Pairs([(a.name, b.name)], pairs), study, Alignment(layers, []), [])
    made.models, made.examples, made.collectors = [a.name, b.name], a.examples, [[StateRows(a, b)]]
    made.origins = {a.name: {}, b.name: {}}
    return made
