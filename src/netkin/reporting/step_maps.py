"""Every step of a run against every other, a small picture for each layer, with lines where the layer has settled."""

from __future__ import annotations

import numpy as np

from netkin.reporting.grids import Grid
from netkin.reporting.heatmaps import legend, picture
from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.scales import Scale
from netkin.results import Series

LINES = {0.99: None, 0.999: "2 3"}  # the marks that are drawn, and their dashes


def step_maps(series: Series, measure: str) -> Markup | None:
    """Return the pictures of all layers that have all pairs of steps, or None where there are none."""
    known = {} if series.between is None else series.between.tables
    layers = [layer for layer in series.layers if f"{measure} of {layer}" in known]
    if not layers:
        return None
    together = np.concatenate([series.between_steps(layer, measure).ravel() for layer in layers])
    table = series.table(measure)
    seen = together[np.isfinite(together)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else table.bounds
    scale = Scale(low, high, table.higher_is_closer, open_ended=True)
    figures = [_figure(series, measure, layer, scale) for layer in layers]
    grid = _grid(series, measure, layers[0], scale)
    words = (
        f"Rows and columns are the {series.unit}s, {series.steps[0]:,} to {series.final_step:,}. White lines mark the "
        f"{series.unit} from which on a layer stays at 0.99 of its final state (full) and at 0.999 (dotted)."
    )
    told = tag("p", words) if series.marks(measure) else tag("p", words.partition(" White")[0])
    return tag(
        "section", tag("h2", f"Every {series.unit} with every other"),
        tag("div", told, legend(grid), tag("ul", *figures, class_="panes maps"), class_="card"),
    )  # fmt: skip


def _grid(series: Series, measure: str, layer: str, scale: Scale) -> Grid:
    values, names = series.between_steps(layer, measure), tuple(map(str, series.steps))
    return Grid(f"{measure} of {layer}", names, names, values, scale)


def _figure(series: Series, measure: str, layer: str, scale: Scale) -> Markup:
    """Return a layer's picture, with the lines over it and their steps below."""
    marks = {mark: series.reached(mark, measure)[layer] for mark in LINES if mark in series.marks(measure)}
    known = [(mark, series.steps.index(step)) for mark, step in marks.items() if step is not None]
    lines = [_cross(at, len(series), LINES[mark], *ink) for mark, at in known for ink in (("#000", 4), ("#fff", 2))]
    over = tag("svg", *lines, viewBox=f"0 0 {len(series)} {len(series)}", aria_hidden="true")
    told = [f"{mark} {'not before the last' if step is None else f'from {step:,}'}" for mark, step in marks.items()]
    box = tag("div", picture(_grid(series, measure, layer, scale)), over, class_="map")
    return tag("li", box, tag("strong", name(layer)), tag("span", ", ".join(told), class_="note"))


def _cross(at: int, size: int, dashes: str | None, colour: str, width: int) -> Markup:
    return tag("path", d=f"M{at} 0V{size}M0 {at}H{size}", fill="none", stroke=colour, stroke_width=width,
               stroke_dasharray=dashes, vector_effect="non-scaling-stroke")  # fmt: skip
