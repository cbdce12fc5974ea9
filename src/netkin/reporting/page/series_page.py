"""The page of a series: a heatmap with a slider over the steps, curves of the layers, and the order of convergence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from netkin.errors import NoValue
from netkin.reporting.charts import StepAxis, series_chart, spread
from netkin.reporting.grids import LEVELS, Grid, Scale, frames
from netkin.reporting.page.document import (
    Markup,
    common_facts,
    depth_rules,
    document,
    facts,
    folded,
    joined,
    layer_table,
    measure_table,
    name,
    origins,
    plain_table,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import card, embedded_series, legend, panes, picture, reason_list
from netkin.reporting.page.svg import key, line_chart
from netkin.reporting.words import (
    chance_in_words,
    early_in_words,
    number,
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
from netkin.results.packing import document as described
from netkin.results.series import Trend
from netkin.results.text import NO_DATA

LATE = "–"
LINES = {0.99: None, 0.999: "2 3"}  # the marks that are drawn, and their dashes
SCRIPTS = ("page", "heatmap", "saving", "timeline", "chart", "controls")
PANES = 6
FEW = 12  # columns, up to which the cells show their values before any script runs
ROUNDED = "Numbers in the CSV are rounded as shown; the JSON, like the saved series, holds them in full."


def series_page(series: Series) -> str:
    """Return the HTML page of a series."""
    axis, title = StepAxis.of(series.steps), f"{_bare(series.run)}, from {series.unit} to {series.unit}"
    # best matches soon lie on the diagonal, and their line would hide what is to be seen there
    controls = joined(toolbar(best=False), timeline(series)) if series.measures else None
    return document(
        title,
        series_headline(series),
        _main(series, axis),
        embedded_series(series, axis),
        [described(series)],
        kind=f"series {'values-shown' if len(series.comparisons[-1].layers_b) <= FEW else 'values-hidden'}",
        versions=[comparison.version for comparison in series.comparisons],
        controls=controls,
        note=ROUNDED,
        scripts=SCRIPTS if series.measures else ("page",),
        rules=depth_rules(),
    )


def _bare(name: str) -> str:
    """Return a name of a run or of data without its folder, which stands in the provenance alone."""
    return bare_names([name])[name]


def timeline(series: Series) -> Markup:
    """Return the bar with the slider through the steps, and with several measures the choice among them."""
    last = len(series) - 1
    slider = tag(
        "input", type="range", id="when", min=0, max=last, step=1, value=0, aria_label=series.unit.capitalize()
    )
    named = (("‹", "back", f"{series.unit} before"), ("Play", "play", None), ("›", "on", f"next {series.unit}"))
    buttons = [tag("button", text, type="button", id=key, aria_label=label) for text, key, label in named]
    shown = tag("output", _when(series, 0), id="shown", for_="when")
    options = [tag("option", measure, value=measure) for measure in series.measures]
    choice = tag("label", "Measure", tag("select", *options, id="measure")) if len(options) > 1 else None
    label = f"Which {series.unit} is shown"
    return tag("div", tag("div", *buttons, class_="turning"), slider, shown, choice, class_="timeline controls",
               role="group", aria_label=label)  # fmt: skip


def _when(series: Series, place: int) -> str:
    return f"{series.unit} {series.steps[place]:,} · {place + 1} of {len(series)}"


def _main(series: Series, axis: StepAxis) -> Iterable[Markup | None]:
    grids = {measure: frames(series, measure) for measure in series.measures}
    yield _facts(series)
    yield warnings(_all_caveats(series))
    yield reason_list(missing_in_words(series, list(grids.values())), "No value for some pairs of layers")
    for place, measure in enumerate(series.measures):
        yield _measure(series, axis, measure, grids[measure], place)
    yield _origins(series, grids)


def _facts(series: Series) -> Markup:
    final, layers = series.comparisons[-1], series.comparisons[-1].layers_b
    steps = f"{plural(len(series), series.unit)}, {series.steps[0]:,} to {series.final_step:,}"
    size = f"{len(final.layers_a)} × {plural(len(layers), 'layer')}"
    data = [NO_DATA] if final.needs_no_data else [_bare(final.data), plural(final.examples, "example")]
    return facts([*data, steps, size, plural(len(series.measures), "measure"), final.created[:10]])


def _all_caveats(series: Series) -> list[Caveat]:
    said = list(series.caveats)
    if not series.complete and not any(caveat.code == "interrupted" for caveat in said):
        sentence = "This series was interrupted: the numbers come from a part of the data or of the steps."
        said.append(Caveat("interrupted", sentence))
    return said


def _measure(series: Series, axis: StepAxis, measure: str, grids: Sequence[Grid], place: int) -> Markup:
    """Return all that is shown of one measure: its heatmap, the run at a glance, the layers' lines, and their order."""
    table, names = series.table(measure), [f"{series.unit} {step:,}" for step in series.steps]
    final = f"the final {series.unit} {series.final_step:,}"
    axes = tag("p", "↓ layers at ", tag("span", names[0], class_="when"), f"  → layers at {final}", class_="axes")
    caption = f"{measure}: layers of the checkpoint in rows, of the final one in columns"
    strip = panes(grids, spread(axis, PANES), names)
    heatmap = card(table, grids[0], f"series {place}", caption, axes=axes, among=grids)
    lines = layer_lines(series, measure) if series.layers else None
    settled = [settling(series, measure), step_maps(series, measure)] if series.layers else []
    return tag(
        "section",
        tag("h2", "Every layer with every final layer", class_="quiet"),
        strip,
        tag("div", heatmap, lines, class_="cards"),
        *settled,
        class_="measure", data_measure=measure, data_chosen=True, hidden=place > 0,
    )  # fmt: skip


# --- the layers' lines and when they settle ---------------------------------------------------------------------------


def layer_lines(series: Series, measure: str) -> Markup | None:
    """Return the chart of a measure with its key and its numbers, or None where no layer has a final state."""
    chart = series_chart(series, measure, [f"var(--d{k})" for k in range(LEVELS)])
    if chart is None:
        return None
    table = series.table(measure)
    word = "similarity to its final state" if table.higher_is_closer else "distance from its final state, closer is up"
    readout = tag("p", "Point at a line, or reach it by Tab and use the arrow keys.", class_="readout")
    note = tag("p", f"The last {series.unit}, drawn faintly, is so by construction: there every layer equals itself.",
               class_="note") if chart.lines[0].given else None  # fmt: skip
    title = tag("h3", "Each layer on its way to its final state")
    return tag("div", title, line_chart(chart, labels=True, upwards=f"{measure}: each layer's {word}"), note,
               tag("div", readout, role="status", aria_live="polite"),
               tag("span", "Layers from the first to the last:", class_="note"), key(chart.lines, shorter=True),
               _numbers(series, series.own(measure)), class_="card ways",
               data_lines=series.measures.index(measure))  # fmt: skip


def _numbers(series: Series, own: np.ndarray) -> Markup:
    rows = [
        [f"{step:,}", *(number(value) if math.isfinite(value) else "–" for value in line)]
        for step, line in zip(series.steps, own.tolist(), strict=True)
    ]
    table = plain_table([series.unit, *series.layers], rows, kind="numbers", label="Each layer at each step")
    return tag("details", tag("summary", "The same as a table"), table)


def settling(series: Series, measure: str) -> Markup:
    """Return the table of the steps at which layers reach 0.9, 0.99 and 0.999, and the order among them as text."""
    title = tag("h3", "When each layer settles")
    marks = series.marks(measure)
    if not marks:
        why = f"{measure} is no similarity that ends at 1, so there is no mark to reach."
        ask = f"`series.reached(threshold, {measure!r})` tells the {series.unit}s for a threshold of yours."
        return tag("div", title, tag("p", f"{why} {ask}"), class_="card settling")
    found = [series.reached(threshold, measure) for threshold in marks]
    rows = [[name(layer), *(_step(one[layer]) for one in found)] for layer in series.layers]
    head = ["layer", *(f"{threshold} from {series.unit}" for threshold in marks)]
    orders = [tag("li", words) for words in orders_in_words(series, marks, measure)]
    late = any(step is None for one in found for step in one.values())
    note = tag("p", f"{LATE}  not before the last {series.unit}", class_="note") if late else None
    table = plain_table(head, rows, kind="numbers")
    return tag("div", title, tag("p", settling_rule(series, measure)), table, note, tag("h3", "From the bottom up?"),
               tag("p", scale_of_tau()), tag("ul", *orders), class_="card settling")  # fmt: skip


def orders_in_words(series: Series, marks: Sequence[float], measure: str) -> list[Markup]:
    """Return whether lower layers settle first, at each threshold; one reason for having no order is given once."""
    found, without = [], dict[str, list[str]]()
    for threshold in marks:
        try:
            found.append(_order(series, series.bottom_up(threshold, measure), threshold, measure))
        except NoValue as reason:
            without.setdefault(sentence(str(reason)), []).append(str(threshold))
    reasons = [joined(tag("strong", f"At {', '.join(at)}: no order."), f" {why}") for why, at in without.items()]
    return [*found, *reasons]


def _order(series: Series, trend: Trend, threshold: float, measure: str) -> Markup:
    """Return whether lower layers settle first, as a verdict, a number with its error, and counted pairs."""
    start = f"At {threshold}: "
    late = f" {trend.never} of {plural(trend.layers, 'layer')} get there only at the end, and count as equally late."
    early = f" This is over {plural(trend.layers, 'layer')}{early_in_words(series, trend)}."
    return joined(
        tag("strong", f"{start}{verdict(trend)}, τ = {tau(trend)}."),
        f" {settled_first(series, threshold, measure)} {chance_in_words(trend)}",
        late if trend.never else None,
        early if trend.early else None,
    )


def _step(step: int | None) -> str:
    return LATE if step is None else f"{step:,}"


# --- every step with every other --------------------------------------------------------------------------------------


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
    figures = [_step_map(series, measure, layer, scale) for layer in layers]
    grid = _step_grid(series, measure, layers[0], scale)
    words = (
        f"Rows and columns are the {series.unit}s, {series.steps[0]:,} to {series.final_step:,}. White lines mark the "
        f"{series.unit} from which on a layer stays at 0.99 of its final state (full) and at 0.999 (dotted)."
    )
    told = tag("p", words) if series.marks(measure) else tag("p", words.partition(" White")[0])
    return tag(
        "section", tag("h2", f"Every {series.unit} with every other"),
        tag("div", told, legend(grid), tag("ul", *figures, class_="panes maps"), class_="card"),
    )  # fmt: skip


def _step_grid(series: Series, measure: str, layer: str, scale: Scale) -> Grid:
    values, names = series.between_steps(layer, measure), tuple(map(str, series.steps))
    return Grid(f"{measure} of {layer}", names, names, values, scale)


def _step_map(series: Series, measure: str, layer: str, scale: Scale) -> Markup:
    """Return a layer's picture, with the lines over it and their steps below."""
    marks = {mark: series.reached(mark, measure)[layer] for mark in LINES if mark in series.marks(measure)}
    known = [(mark, series.steps.index(step)) for mark, step in marks.items() if step is not None]
    lines = [_cross(at, len(series), LINES[mark], *ink) for mark, at in known for ink in (("#000", 4), ("#fff", 2))]
    over = tag("svg", *lines, viewBox=f"0 0 {len(series)} {len(series)}", aria_hidden="true")
    told = [f"{mark} {'not before the last' if step is None else f'from {step:,}'}" for mark, step in marks.items()]
    box = tag("div", picture(_step_grid(series, measure, layer, scale)), over, class_="framed")
    return tag("li", box, tag("strong", name(layer)), tag("span", ", ".join(told), class_="note"))


def _cross(at: int, size: int, dashes: str | None, colour: str, width: int) -> Markup:
    return tag("path", d=f"M{at} 0V{size}M0 {at}H{size}", fill="none", stroke=colour, stroke_width=width,
               stroke_dasharray=dashes, vector_effect="non-scaling-stroke")  # fmt: skip


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


def _origins(series: Series, grids: dict[str, list[Grid]]) -> Markup:
    final = series.comparisons[-1]
    missing = {measure: sum(len(grid.missing) for grid in own) for measure, own in grids.items()}
    whole = len(series) * len(final.layers_a) * len(final.layers_b)
    told = {measure: f"{count:,} of {whole:,}" for measure, count in missing.items()}
    same = final.layers_a == final.layers_b
    return origins(
        _general(series),
        _unchanging(series),
        folded(
            "The measures, with every convention",
            measure_table(final.tables.values(), pairs_without_a_value=told),
            True,
        ),
        folded("The layers", layer_table(final, "a")) if same else None,
        None if same else folded("The layers of the checkpoints", layer_table(final, "a")),
        None if same else folded("The layers of the final checkpoint", layer_table(final, "b")),
        folded(f"The {series.unit}s", _steps(series)),
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


def _steps(series: Series) -> Markup:
    words = _changing(series)
    rows = [
        [
            f"{step:,}",
            comparison.a,
            f"{comparison.examples:,}",
            *(comparison.provenance.get(word, "–") for word in words),
        ]
        for step, comparison in zip(series.steps, series.comparisons, strict=True)
    ]
    return plain_table([series.unit, "checkpoint", "examples", *words], rows, label=f"The {series.unit}s")
