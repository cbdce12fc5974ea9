"""Every step of a run against every other, layer by layer, by measures that are read from weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from netkin.applications.dynamics.holding import spare
from netkin.comparing.alignment import size_of_weights
from netkin.comparing.planning import needs_of
from netkin.comparing.subjects import ModelRunner
from netkin.errors import NoValue
from netkin.measures.registry import Measure, value_of
from netkin.progress import reported
from netkin.results import Comparison, Values
from netkin.sources.runs import Run
from netkin.statistics.collector import Collector, Key, Study


def between_steps(run: Run, measures: Sequence[Measure], final: Comparison) -> Comparison | None:
    """Return all pairs of steps, a table for each measure and layer; None where the weights take too much memory.

    `final` is the comparison of the last step with itself, whose layers and facts hold for all.
    """
    layers, steps = [name for name in final.layers_a if name in final.layers_b], [str(step) for step in run.steps]
    tables: dict[str, Values] = {}
    for measure in measures:
        collector = _collected(run, measure, layers)
        if collector is None:
            return None
        for layer in reported(layers, f"{measure.id} of all {run.unit}s", "layers"):
            table = _table(measure, collector, layer, steps)
            name, axes = f"{measure.id} of {layer}", (run.unit, run.unit)
            about = {"id": name, "layers_a": tuple(steps), "layers_b": tuple(steps), "axes": axes}
            values, holes = table
            tables[name] = replace(final.tables[measure.id], **about, values=values, holes=holes)  # type: ignore[arg-type]
    widths = dict.fromkeys(steps, sum(final.widths_a.values()))
    sides = {"layers_a": tuple(steps), "layers_b": tuple(steps), "widths_a": widths, "widths_b": widths}
    return replace(final, a=run.name, b=run.name, tables=tables, **sides)  # type: ignore[arg-type]


def _collected(run: Run, measure: Measure, layers: Sequence[str]) -> Collector | None:
    """Return a collector with the weights of all steps, or None where it would take too much memory."""
    (need,) = needs_of([measure])
    kind, rows = need.candidates[0], dict[Key, Mapping[str, Tensor]]()
    for step in run.steps:
        runner = ModelRunner(str(step), run.at(step), list(layers), None, None, None, None)
        weights = {
            name: {key: one.detach() for key, one in own.items()} for name, own in runner.weights(layers).items()
        }
        if not rows:
            sizes = [size_of_weights(str(one), name, own) for one in run.steps for name, own in weights.items()]
            study = Study({size.key: size for size in sizes}, [])
            price = kind.price(need.settings, study)
            if price is None or price.bytes > spare(torch.device("cpu")):
                return None
            collector = kind.start(need.settings, study)
        rows |= {(str(step), name): own for name, own in weights.items()}
    collector.update({"weights": rows}, np.arange(0))
    return collector


def _table(
    measure: Measure, collector: Collector, layer: str, steps: Sequence[str]
) -> tuple[np.ndarray, dict[tuple[str, str], str]]:
    values, holes = np.full((len(steps), len(steps)), np.nan), dict[tuple[str, str], str]()
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            if measure.facts.symmetric and j < i:
                values[i, j] = values[j, i]
                holes |= {(a, b): holes[b, a]} if (b, a) in holes else {}
                continue
            try:
                values[i, j] = value_of(measure, collector.pair((a, layer), (b, layer)))
            except NoValue as reason:
                holes[a, b] = str(reason)
    return values, holes
