"""The page of a series: a heatmap with a slider through the steps, each layer's way, and the order of settling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from netkin.reporting.articles import card, reason_list
from netkin.reporting.axes import StepAxis, spread
from netkin.reporting.documents import document, facts, footer, header, toolbar, warnings
from netkin.reporting.embedding import embedded_series
from netkin.reporting.grids import Grid, frames
from netkin.reporting.heatmaps import panes
from netkin.reporting.layer_lines import depth_rules, layer_lines, series_headline, settling
from netkin.reporting.markup import Markup, joined, tag
from netkin.reporting.origins import (
    common_facts,
    folded,
    identity,
    is_identity,
    layer_table,
    measure_table,
    plain_table,
    section,
)
from netkin.reporting.step_maps import step_maps
from netkin.results import Series
from netkin.results.text import NO_DATA

SCRIPTS = ("telling", "heatmaps", "pictures", "saving", "timeline", "layer_lines", "controls", "theme", "scrolling")
PANES = 6
FEW = 12  # columns, up to which the cells show their values before any script runs
ROUNDED = "Its numbers are rounded as shown; the saved series holds them in full."


def series_page(series: Series) -> str:
    """Return the HTML page of a series."""
    axis, title = StepAxis.of(series.steps), f"{series.run}, from {series.unit} to {series.unit}"
    # best matches soon lie on the diagonal, and their line would hide what is to be seen there
    controls = joined(toolbar(best=False), timeline(series)) if series.measures else None
    versions = [comparison.version for comparison in series.comparisons]
    head, main = header(title, series_headline(series)), tag("main", *_main(series, axis))
    shown, data = joined(head, controls, main, footer(versions, ROUNDED)), embedded_series(series, axis)
    return document(
        title,
        shown,
        data,
        styles=("page", "series"),
        rules=depth_rules(),
        scripts=SCRIPTS if series.measures else ("telling", "theme", "scrolling"),
        kind="values-shown" if len(series.comparisons[-1].layers_b) <= FEW else "values-hidden",
    )


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
    yield warnings(_all_warnings(series))
    yield reason_list(missing_in_words(series, list(grids.values())))
    for place, measure in enumerate(series.measures):
        yield _measure(series, axis, measure, grids[measure], place)
    yield _origins(series, grids)


def _facts(series: Series) -> Markup:
    final, layers = series.comparisons[-1], series.comparisons[-1].layers_b
    steps = f"{len(series)} {series.unit}s, {series.steps[0]:,} to {series.final_step:,}"
    measures = f"{len(series.measures)} measure{'s' if len(series.measures) != 1 else ''}"
    size = f"{len(final.layers_a)} × {len(layers)} layers"
    data = [NO_DATA] if final.needs_no_data else [final.data, f"{final.examples:,} examples"]
    return facts([*data, steps, size, measures, final.created[:10]])


def _all_warnings(series: Series) -> list[str]:
    said = list(series.warnings)
    if not series.complete and not any("interrupted" in warning for warning in said):
        said.append("This series was interrupted: the numbers come from a part of the data or of the steps.")
    return said


def _measure(series: Series, axis: StepAxis, measure: str, grids: Sequence[Grid], place: int) -> Markup:
    """Return all that is shown of one measure: its heatmap, the run at a glance, the layers' lines, and their order."""
    table, names = series.table(measure), [f"{series.unit} {step:,}" for step in series.steps]
    final = f"the final {series.unit} {series.final_step:,}"
    axes = tag("p", "↓ layers at ", tag("span", names[0], class_="when"), f"  → layers at {final}", class_="axes")
    caption = f"{measure}: layers of the checkpoint in rows, of the final one in columns"
    strip = panes(grids, spread(axis, PANES), names)
    heatmap = card(table, grids[0], f"series {place}", caption, axes=axes)
    return tag(
        "section",
        tag("h2", "Every layer with every final layer", class_="quiet"),
        strip,
        tag("div", heatmap, class_="cards"),
        *(_ways(series, axis, measure) if series.layers else ()),
        class_="measure", data_measure=measure, data_chosen=True, hidden=place > 0,
    )  # fmt: skip


def _ways(series: Series, axis: StepAxis, measure: str) -> Iterable[Markup | None]:
    yield tag("h2", "Each layer on its way to its final state")
    yield layer_lines(series, measure, axis)
    yield settling(series, measure)
    yield step_maps(series, measure)


def missing_in_words(series: Series, grids: Sequence[Sequence[Grid]]) -> list[str]:
    """Return why values are missing, each reason once with the pairs, steps and measures it is about."""
    found: dict[str, list[tuple[int, int]]] = {}  # measure, pairs: one entry for each step that gives the reason
    for place, own in enumerate(grids):
        for grid in own:
            reasons = list(grid.holes.values())
            for reason in dict.fromkeys(reasons):
                found.setdefault(reason, []).append((place, reasons.count(reason)))
    return [f"{reason} ({_about(series, told)})" for reason, told in found.items()]


def _about(series: Series, told: Sequence[tuple[int, int]]) -> str:
    places, most = sorted({place for place, _ in told}), max(pairs for _, pairs in told)
    steps = max(sum(own == place for own, _ in told) for place in places)
    pairs = f"{most:,} {'pair' if most == 1 else 'pairs'}"
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
    missing = {measure: sum(len(grid.holes) for grid in own) for measure, own in grids.items()}
    whole = len(series) * len(final.layers_a) * len(final.layers_b)
    told = {measure: f"{count:,} of {whole:,}" for measure, count in missing.items()}
    same = final.layers_a == final.layers_b
    return section(
        _general(series),
        folded(
            "The measures, with every convention",
            measure_table(final.tables.values(), pairs_without_a_value=told),
            True,
        ),
        folded("The layers", layer_table(final, "a")) if same else None,
        None if same else folded("The layers of the checkpoints", layer_table(final, "a")),
        None if same else folded("The layers of the final checkpoint", layer_table(final, "b")),
        folded(f"The {series.unit}s", _steps(series)),
        identity(_unchanging(series)),
    )


def _general(series: Series) -> dict[str, Any]:
    """Return the facts that hold at every step; those that change stand in the table of steps."""
    final = series.comparisons[-1]
    steps = f"{series.unit} {series.final_step:,}"
    facts = {"run": series.run, "rows": f"{series.run} at each {series.unit}, {len(final.layers_a)} layers"}
    facts |= {"columns": f"{series.run} at the final {steps}, {len(final.layers_b)} layers"} | common_facts(final)
    facts["complete"] = "yes" if series.complete else "no, it was interrupted"
    if series.missing:
        facts[f"{series.unit}s missing"] = ", ".join(f"{step:,}" for step in series.missing)
    own = _unchanging(series).items()
    return facts | {key: value for key, value in own if key not in facts and not is_identity(key)}


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
