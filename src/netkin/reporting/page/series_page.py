"""The page of a series: a heatmap with a slider over the steps, curves of the layers, and the order of convergence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.blocks import Heatmap, Lines, Name, Page, PageBlock, Pictures, Section, Table, Text, Timeline
from netkin.reporting.charts import StepAxis, series_chart, spread
from netkin.reporting.grids import Grid, Scale, frames
from netkin.reporting.parts import about, common_facts, conventions, layer_table, measured, origins, reason_list
from netkin.reporting.words import (
    chance_in_words,
    early_in_words,
    scale_of_tau,
    sentence,
    series_headline,
    settled_first,
    settling_rule,
    tau,
    verdict,
)
from netkin.results import Series
from netkin.results.caveats import Caveat
from netkin.results.labels import bare_names, plural
from netkin.results.series import Trend
from netkin.results.text import NO_DATA

LATE = "–"
DASHED = {0.99: False, 0.999: True}  # the marks that are drawn
PANES = 6
ROUNDED = "Numbers in the CSV are rounded as shown; the JSON, like the saved series, holds them in full."


def series_page(series: Series) -> Page:
    """Return the page of a series."""
    axis = StepAxis.of(series.steps)
    grids = {measure: frames(series, measure) for measure in series.measures}
    missing = reason_list(missing_in_words(series, list(grids.values())), "No value for some pairs of layers")
    sections = [_measure(series, axis, measure, grids[measure], k) for k, measure in enumerate(series.measures)]
    places = [float(f"{place:.4g}") for place in axis.places]
    return Page(
        title=f"{_bare(series.run)}, from {series.unit} to {series.unit}",
        sentence=series_headline(series),
        facts=_facts(series),
        caveats=_caveats(series),
        blocks=[missing, *sections],
        origins=_origins(series, grids),
        style="series",
        versions=[comparison.version for comparison in series.comparisons],
        note=ROUNDED,
        name=[_bare(series.run)],
        timeline=Timeline(series.unit, series.steps, places, series.measures) if series.measures else None,
        results=[series],
        best=False,  # best matches soon lie on the diagonal, and their line would hide what is to be seen there
    )


def _bare(name: str) -> str:
    """Return a name of a run or of data without its folder, which stands in the provenance alone."""
    return bare_names([name])[name]


def _facts(series: Series) -> list[str]:
    final, layers = series.comparisons[-1], series.comparisons[-1].layers_b
    steps = f"{plural(len(series), series.unit)}, {series.steps[0]:,} to {series.final_step:,}"
    size = f"{len(final.layers_a)} × {plural(len(layers), 'layer')}"
    data = [NO_DATA] if final.needs_no_data else [_bare(final.data), plural(final.examples, "example")]
    return [*data, steps, size, plural(len(series.measures), "measure"), final.created[:10]]


def _caveats(series: Series) -> list[Caveat]:
    said = list(series.caveats)
    if not series.complete and not any(caveat.code == "interrupted" for caveat in said):
        words = "This series was interrupted: the numbers come from a part of the data or of the steps."
        said.append(Caveat("interrupted", words))
    return said


def _measure(series: Series, axis: StepAxis, measure: str, grids: Sequence[Grid], place: int) -> Section:
    """Return all that is shown of one measure: its heatmap, the run at a glance, the layers' lines, and their order."""
    names, chosen = [f"{series.unit} {step:,}" for step in series.steps], spread(axis, PANES)
    sides = (f"at this {series.unit}", f"at the final {series.unit}")
    glance = Pictures([grids[k] for k in chosen], [names[k] for k in chosen], f"series {place}", sides, chosen)
    heatmap = _heatmap(series, measure, grids, place, names[0])
    lines = layer_lines(series, measure, f"ways {place}") if series.layers else None
    settled = [settling(series, measure), step_maps(series, measure)] if series.layers else []
    cards = Section("", [heatmap, lines], "cards")
    return Section("Every layer with every final layer", [glance, cards, *settled], style="measure", quiet=True,
                   measure=measure, hidden=place > 0)  # fmt: skip


def _heatmap(series: Series, measure: str, grids: Sequence[Grid], place: int, first: str) -> Heatmap:
    caption = f"{measure}: layers of the checkpoint in rows, of the final one in columns"
    axes = ("↓ layers at ", first, f"  → layers at the final {series.unit} {series.final_step:,}")
    return measured(
        series.table(measure), grids[0], f"series {place}", caption, axes=axes, frames=grids,
        step=first, sides=(_bare(series.run), "final"), about=about(series.comparisons[-1]),
    )  # fmt: skip


# --- the layers' lines and when they settle ---------------------------------------------------------------------------


def layer_lines(series: Series, measure: str, key: str) -> Lines | None:
    """Return the chart of a measure with its numbers, or None where no layer has a final state."""
    chart = series_chart(series, measure)
    if chart is None:
        return None
    closer = series.table(measure).higher_is_closer
    word = "similarity to its final state" if closer else "distance from its final state, closer is up"
    note = f"The last {series.unit}, drawn faintly, is so by construction: there every layer equals itself."
    return Lines(
        chart, key, "Each layer on its way to its final state", note if chart.lines[0].given else "",
        upwards=f"{measure}: each layer's {word}", key_title="Layers from the first to the last:",
        tabled="The same as a table",
    )  # fmt: skip


def settling(series: Series, measure: str) -> Section:
    """Return the table of the steps at which layers reach 0.9, 0.99 and 0.999, and the order among them as text."""
    title, marks = "When each layer settles", series.marks(measure)
    if not marks:
        why = f"{measure} is no similarity that ends at 1, so there is no mark to reach."
        ask = f"`series.reached(threshold, {measure!r})` tells the {series.unit}s for a threshold of yours."
        return Section(title, [Text(f"{why} {ask}")], "card", "settling")
    reached = [series.reached(threshold, measure) for threshold in marks]
    rows = [[Name(layer), *(_step(steps[layer]) for steps in reached)] for layer in series.layers]
    head = ["layer", *(f"{threshold} from {series.unit}" for threshold in marks)]
    late = any(step is None for steps in reached for step in steps.values())
    note = Text(f"{LATE}  not before the last {series.unit}", style="note") if late else None
    orders = Text(scale_of_tau(), title="From the bottom up?", items=orders_in_words(series, marks, measure))
    blocks = [Text(settling_rule(series, measure)), Table(head, rows, style="numbers"), note, orders]
    return Section(title, blocks, "card", "settling")


def orders_in_words(series: Series, marks: Sequence[float], measure: str) -> list[Text]:
    """Return whether lower layers settle first, at each threshold; one reason for having no order is given once."""
    orders, without = [], dict[str, list[str]]()
    for threshold in marks:
        try:
            orders.append(_order(series, series.bottom_up(threshold, measure), threshold, measure))
        except NoValue as reason:
            without.setdefault(sentence(str(reason)), []).append(str(threshold))
    return [*orders, *(Text(why, f"At {', '.join(at)}: no order.") for why, at in without.items())]


def _order(series: Series, trend: Trend, threshold: float, measure: str) -> Text:
    """Return whether lower layers settle first, as a verdict, a number with its error, and counted pairs."""
    said = [f"{settled_first(series, threshold, measure)} {chance_in_words(trend)}"]
    layers = plural(trend.layers, "layer")
    if trend.never:
        said.append(f"{trend.never} of {layers} get there only at the end, and count as equally late.")
    if trend.early:
        said.append(f"This is over {layers}{early_in_words(series, trend)}.")
    return Text(" ".join(said), f"At {threshold}: {verdict(trend)}, τ = {tau(trend)}.")


def _step(step: int | None) -> str:
    return LATE if step is None else f"{step:,}"


# --- every step with every other --------------------------------------------------------------------------------------


def step_maps(series: Series, measure: str) -> Section | None:
    """Return the pictures of all layers that have all pairs of steps, or None where there are none."""
    known = {} if series.between is None else series.between.tables
    layers = [layer for layer in series.layers if f"{measure} of {layer}" in known]
    if not layers:
        return None
    together = np.concatenate([series.between_steps(layer, measure).ravel() for layer in layers])
    table, seen = series.table(measure), together[np.isfinite(together)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else table.bounds
    scale = Scale(low, high, table.higher_is_closer, open_ended=True)
    names = tuple(map(str, series.steps))
    grids = [Grid(measure, names, names, series.between_steps(layer, measure), scale)
             for layer in layers]  # fmt: skip
    marks = {mark: series.reached(mark, measure) for mark in DASHED if mark in series.marks(measure)}
    lines = [[(series.steps.index(step), DASHED[mark]) for mark, steps in marks.items()
              if (step := steps[layer]) is not None] for layer in layers]  # fmt: skip
    notes = [
        ", ".join(f"{mark} {'not before the last' if steps[layer] is None else f'from {steps[layer]:,}'}"
                  for mark, steps in marks.items())
        for layer in layers
    ]  # fmt: skip
    words = f"Rows and columns are the {series.unit}s, {series.steps[0]:,} to {series.final_step:,}."
    if marks:
        words += (
            f" White lines mark the {series.unit} from which on a layer stays at 0.99 of its final state (full) and at "
            "0.999 (dotted)."
        )
    pictures = Pictures(grids, layers, "each layer", (series.unit, series.unit), notes=notes, marks=lines)
    return Section(f"Every {series.unit} with every other", [Section("", [Text(words), pictures], "card")])


# --- missing values and origins --------------------------------------------------------------------------------------


def missing_in_words(series: Series, grids: Sequence[Sequence[Grid]]) -> list[str]:
    """Return why values are missing, each reason once with the pairs, steps and measures it is about."""
    found: dict[str, list[tuple[int, int]]] = {}  # measure, pairs: one entry for each step that gives the reason
    for place, own in enumerate(grids):
        for grid in own:
            reasons = list(grid.missing.values())
            for reason in dict.fromkeys(reasons):
                found.setdefault(reason, []).append((place, reasons.count(reason)))
    return [f"{reason} ({_about(series, told)})" for reason, told in found.items()]


def _about(series: Series, told: Sequence[tuple[int, int]]) -> str:
    places, most = sorted({place for place, _ in told}), max(pairs for _, pairs in told)
    steps = max(sum(own == place for own, _ in told) for place in places)
    pairs = plural(most, "pair")
    when = (
        f"at all {len(series)} {series.unit}s"
        if steps == len(series)
        else f"at {steps} of {len(series)} {series.unit}s"
    )
    if len(series.measures) == 1:
        return f"{pairs} {when}"
    whole = len(places) == len(series.measures)
    return f"{pairs} {when}, by {'every measure' if whole else ', '.join(series.measures[k] for k in places)}"


def _origins(series: Series, grids: dict[str, list[Grid]]) -> list[PageBlock | None]:
    final = series.comparisons[-1]
    missing = {measure: sum(len(grid.missing) for grid in own) for measure, own in grids.items()}
    whole = len(series) * len(final.layers_a) * len(final.layers_b)
    told = {measure: f"{count:,} of {whole:,}" for measure, count in missing.items()}
    same = final.layers_a == final.layers_b
    return origins(
        _general(series),
        _unchanging(series),
        conventions(final.tables.values(), True, pairs_without_a_value=told),
        layer_table(final, "a", "The layers" if same else "The layers of the checkpoints"),
        None if same else layer_table(final, "b", "The layers of the final checkpoint"),
        _steps(series),
    )


def _general(series: Series) -> dict[str, Any]:
    """Return the facts that hold at every step; those that change stand in the table of steps."""
    final = series.comparisons[-1]
    steps = f"{series.unit} {series.final_step:,}"
    run = _bare(series.run)
    facts = {"run": series.run, "rows": f"{run} at each {series.unit}, {plural(len(final.layers_a), 'layer')}"}
    facts |= {"columns": f"{run} at the final {steps}, {plural(len(final.layers_b), 'layer')}"} | common_facts(final)
    facts["complete"] = "yes" if series.complete else "no, it was interrupted"
    if series.missing:
        facts[f"{series.unit}s missing"] = ", ".join(f"{step:,}" for step in series.missing)
    return facts


def _unchanging(series: Series) -> dict[str, str]:
    """Return the provenance that is the same at every step."""
    final, changing = series.comparisons[-1].provenance, _changing(series)
    return {key: value for key, value in final.items() if key not in changing} | dict(series.provenance)


def _changing(series: Series) -> list[str]:
    """Return the words of provenance that are not the same at every step."""
    words = dict.fromkeys(word for comparison in series.comparisons for word in comparison.provenance)
    return [word for word in words if len({c.provenance.get(word) for c in series.comparisons}) > 1]


def _steps(series: Series) -> Table:
    words, title = _changing(series), f"The {series.unit}s"
    rows = [
        [f"{step:,}", one.a, f"{one.examples:,}", *(one.provenance.get(word, "–") for word in words)]
        for step, one in zip(series.steps, series.comparisons, strict=True)
    ]
    return Table([series.unit, "checkpoint", "examples", *words], rows, title, title, folded=True)
