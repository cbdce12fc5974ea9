"""The page of comparisons: means of every pair of models, heatmaps or lists, profiles, and the provenance.

A measure's card has its heatmap, its meaning and limits, its standard errors, and the reasons for missing values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from netkin.errors import NoValue
from netkin.reporting.charts import Chart, profile_charts
from netkin.reporting.grids import Grid, grids_of, summary_grids
from netkin.reporting.page.document import (
    Markup,
    common_facts,
    document,
    facts,
    folded,
    grouped,
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
from netkin.reporting.page.heatmap import FEW, card, embedded, figure_of, missing_values, shared_reasons, values_class
from netkin.reporting.page.svg import key, line_chart, map_figures, maps_by_measure, maps_section
from netkin.reporting.words import closest_and_farthest, headline, number_with_error, short_names
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat
from netkin.results.comparisons import SAME_MODEL, spread_of
from netkin.results.labels import (
    bare_names,
    bias_note,
    buckets_note,
    column_label,
    error_summary,
    has_classes,
    has_errors,
    has_networks,
    is_of_tasks,
    is_worth,
    listing,
    pair_label,
    partners,
    plural,
    tables_by_name,
)
from netkin.results.packing import document as described
from netkin.results.text import NO_DATA, list_cells, match_note, with_errors

MEANS = (
    "Each cell is the mean over {counted} at the same relative depth, by one rule for all models: layer i of a model "
    "with m layers, counted from 0, lies at i/(m − 1), and each layer of the model with fewer layers is paired with "
    "the nearest one of the other."
)
BLOCKS = (
    "Each cell is a layer of one task with a layer of another. Colours of one picture can't be compared with another's."
)
SPREAD = (
    "Mean ± standard deviation over {counted} of models, fewer where values are missing. Layers that not all models "
    "have are left out."
)
UNNAMED = "layers"  # a model of class sensitivity that was given no name
MATCHES = "Best matches, and how far the second is behind"
MOST = 5  # reasons why errors are missing, shown in one place
NAMED = 4  # pairs of models in the sentence at the top
BESIDE = 20  # columns, up to which one heatmap has its profile beside it
CHOOSABLE = 4  # with more heatmaps than these the page offers a choice among them


def comparison_page(results: Sequence[Comparison]) -> str:
    """Return the HTML page of one comparison or several."""
    whole = sorted(results, key=lambda one: one.a == one.b)  # a task beside itself is seen last
    comparisons, names = _without_folders(whole)
    summaries = summary_grids(comparisons)
    title, versions = _title(comparisons, names), [c.version for c in comparisons]
    grids = [grids_of(comparison) for comparison in comparisons]
    said = _sentence(comparisons, names, summaries)
    several = len(comparisons) > 1
    heading, chooser = (None, _chooser(comparisons, names)) if several else (_pair(comparisons[0]), None)
    best = True if any(grid.best for own in grids for grid in own) else None
    parts = [summary_section(comparisons, summaries, buckets_note(comparisons)), spread_section(comparisons)]
    for place, (comparison, origin, own) in enumerate(zip(comparisons, whole, grids, strict=True)):
        parts.append(article(comparison, own, names, place, several, origin))
    blocks = [summary for summary in summaries if summary.models]
    kind = values_class([g for own in (*grids, blocks) for g in own])
    data, documents = embedded(comparisons, grids, summaries, names), [described(one) for one in whole]
    bar = toolbar(chooser, best=best)
    return document(title, said, parts, data, documents, kind=kind, versions=versions, whole=heading, controls=bar)


def _without_folders(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], dict[str, str]]:
    """Return comparisons whose models and data are named without folders, and shorter names of these models.

    Whole paths, as they were typed, stand in the provenance alone.
    """
    models = [model for comparison in comparisons for model in (comparison.a, comparison.b)]
    bare, short, data = bare_names(models), short_names(models), bare_names(one.data for one in comparisons)
    shown = [replace(one, a=bare[one.a], b=bare[one.b], data=data[one.data]) for one in comparisons]
    return shown, {name: short[model] if short[model] != model else name for model, name in bare.items()}


def _pair(comparison: Comparison, names: Mapping[str, str] | None = None) -> str:
    a, b = ((names or {}).get(model, model) for model in (comparison.a, comparison.b))
    return f"{a} and {b}"


def _title(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> str:
    if len(comparisons) == 1 and has_networks(comparisons[0]):
        return f"{plural(len(comparisons[0].layers_a), 'network')}, each with every other"
    if len(comparisons) == 1 and has_classes(comparisons[0]):
        what, (model, *_) = "which layers follow which classes", names.values()
        return what.capitalize() if comparisons[0].a == UNNAMED else f"{model}: {what}"
    if len(comparisons) == 1:
        return f"{_joined(comparisons[0], names)}{_where(comparisons[0])}"
    if _of_tasks(comparisons):
        return f"{plural(len(names), 'task')}, block by block"
    return f"{plural(len(names), 'model')} in {len(comparisons)} comparisons"


def _joined(comparison: Comparison, names: Mapping[str, str]) -> str:
    stitched = f"{names[comparison.a]} stitched into {names[comparison.b]}"
    return stitched if _is_stitched(comparison) else _pair(comparison, names)


def _where(comparison: Comparison) -> str:
    """Return at which pair of layers, or that there are several."""
    tables, pairs = list(comparison.tables.values()), listing(comparison)
    if len(pairs) != 1:
        return ", layer by layer"
    ((i, j),) = pairs
    return f" at {pair_label(tables, comparison.layers_a[i], comparison.layers_b[j])}"


def _is_stitched(comparison: Comparison) -> bool:
    return any(map(is_worth, comparison.tables.values()))


def _of_tasks(comparisons: Sequence[Comparison]) -> bool:
    return all(is_of_tasks(table) for one in comparisons for table in one.tables.values())


def _sentence(comparisons: Sequence[Comparison], names: Mapping[str, str], summaries: Sequence[Grid]) -> str:
    if len(comparisons) == 1:
        return headline(comparisons[0], names)
    if _of_tasks(comparisons):
        return f"{', '.join(names.values())}: {len(comparisons)} pairs, each task beside itself too."
    if not summaries or any(map(_is_stitched, comparisons)):
        more = [f"and {len(comparisons) - NAMED} more"] if len(comparisons) > NAMED else []
        return f"{'; '.join([*(_pair(one, names) for one in comparisons[:NAMED]), *more])}."
    grid = summaries[0]
    models = [names[model] for model in grid.rows]
    return closest_and_farthest(grid.id, models, grid.values, grid.scale.higher_is_closer, "models")


def _chooser(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> Markup:
    plain = [_pair(comparison, names) for comparison in comparisons]
    times = Counter(plain)
    told = [
        f"{k + 1}: {label}, {c.data}" if times[label] > 1 else label
        for k, (label, c) in enumerate(zip(plain, comparisons, strict=True))
    ]
    options = [tag("option", label, value=k) for k, label in enumerate(told)]
    return tag("label", "Comparison", tag("select", *options, id="chooser"))


# --- many models ------------------------------------------------------------------------------------------------------


def summary_section(comparisons: Sequence[Comparison], summaries: Sequence[Grid], note: str) -> Markup | None:
    """Return the heatmaps of models by models with their maps, or of the blocks of tasks; None where there are none.

    The tree and the plane by one measure stand beside its heatmap.
    """
    if not summaries:
        return None
    blocks = bool(summaries[0].models)
    words = tag("p", f"{BLOCKS if blocks else _means_in_words(summaries)} Choose a cell to open its comparison.")
    title = "Tasks by tasks, block by block" if blocks else "Models by models"
    figures = []
    for k, grid in enumerate(summaries):
        which = tag("p", grid.note, class_="facts-line") if grid.note else None
        heading = joined(tag("h3", grid.id, class_="code"), which)
        missing, caption = missing_values(grid, [SAME_MODEL]), f"{grid.id}, {title.lower()}"
        is_few = not blocks and len(grid.columns) <= FEW
        figures.append(figure_of(grid, caption, f"summary {k}", missing, heading=heading, numbered=is_few))
    maps = maps_by_measure(comparisons)
    beside = next(iter(maps.values())) if maps and len(figures) == 1 else []
    cards = tag("div", *figures, *beside, class_="cards mapped" if beside else "cards")
    parts = [tag("h2", title, class_="quiet"), cards, words, warnings([Caveat("other-buckets", note)] if note else [])]
    return tag("section", *parts, None if beside else maps_section(maps), class_="summary")


def _means_in_words(summaries: Sequence[Grid]) -> str:
    """Return what the cells are means over, and how many pairs of layers are behind them."""
    numbers = sorted({int(n) for grid in summaries if grid.counts is not None for n in grid.counts.ravel() if n})
    several = f"n pairs of layers, {numbers[0]} to {numbers[-1]}," if numbers else "pairs of layers"
    return MEANS.format(counted=f"{plural(numbers[0], 'pair')} of layers" if len(numbers) == 1 else several)


def spread_section(comparisons: Sequence[Comparison]) -> Markup | None:
    """Return means and deviations over comparisons with stitches, or None where there are none or one alone."""
    if len(comparisons) < 2 or not any(is_worth(t) for c in comparisons for t in c.tables.values()):
        return None
    try:
        spread = spread_of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = tag("p", SPREAD.format(counted=plural(len(comparisons), "pair")))
    cards = [tag("div", tag("h3", title), table, class_="card") for title, table in _spread_tables(spread)]
    return tag(
        "section",
        tag("h2", "Layer by layer, over all pairs of models"),
        words,
        tag("div", *cards, class_="cards"),
        class_="spread",
    )


def _spread_tables(spread: Comparison) -> Iterator[tuple[str, Markup]]:
    """Yield a matrix for each measure or, where each layer meets one other at most, a list for all of one name."""
    pairs = listing(spread)
    for name_, tables in tables_by_name(spread.tables.values()).items() if pairs else ():
        labels, columns, cells = list_cells(tables, pairs)
        yield name_, _spread_table("layer", columns, list(zip(labels, cells, strict=True)))
    for table in () if pairs else spread.tables.values():
        cells = with_errors(table.values, table.to_errors())
        rows = list(zip(table.layers_a, cells, strict=True))
        yield table.id, _spread_table("from ↓ into →", table.layers_b, rows)


def _spread_table(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Markup:
    return plain_table([corner, *map(name, columns)], [[name(label), *texts] for label, texts in rows], kind="numbers")


# --- one comparison ---------------------------------------------------------------------------------------------------


def article(
    comparison: Comparison,
    grids: Sequence[Grid],
    names: Mapping[str, str],
    place: int,
    several: bool,
    origin: Comparison,
) -> Markup:
    """Return all that is shown of a comparison.

    Args:
        comparison: What is shown, with names without folders.
        grids: Its heatmaps.
        names: Shorter names of the models.
        place: Which of the comparisons of the page it is.
        several: Whether there are more.
        origin: The same with the names of models and data in full, for the provenance.
    """
    title = tag("h2", f"{names[comparison.a]} and {names[comparison.b]}", title=f"{comparison.a} and {comparison.b}")
    head = [title, tag("p", headline(comparison, names))] if several else []
    found = [_measures(comparison, grids, names, place), None if has_networks(comparison) else profile(comparison)]
    shown = found[::-1] if _is_list(grids) else found  # a list is best seen as lines first
    if len(grids) == 1 and len(grids[0].columns) <= BESIDE and all(found):
        shown = [tag("div", *shown, class_="halves")]
    parts = [
        *head,
        _facts(comparison, grids),
        _warnings(comparison),
        *shown,
        _origins(origin, [names[comparison.a], names[comparison.b]]),
    ]
    return tag("article", *parts, class_="comparison", hidden=place > 0, data_chosen=True)


def _is_list(grids: Sequence[Grid]) -> bool:
    return any(grid.listed for grid in grids)


def _measures(comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int) -> Markup:
    said, told = shared_reasons(grids)
    maps = map_figures(next(iter(comparison.tables.values()))) if has_networks(comparison) else []
    alone = maps and len(grids) == 1
    whole = f"Every layer with every {'class' if has_classes(comparison) else 'layer'}"
    whole = "Every network with every other" if has_networks(comparison) else whole
    return tag(
        "section",
        tag("h2", "Layer by layer" if _is_list(grids) else whole, class_="quiet"),
        _choice(grids),
        told,
        tag(
            "div", *_figures(comparison, grids, names, place, said), *maps, class_="cards mapped" if alone else "cards"
        ),
    )


def _figures(
    comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int, said: Collection[str]
) -> Iterator[Markup]:
    a, b = (tag("span", name(names[model]), title=model) for model in (comparison.a, comparison.b))
    for k, grid in enumerate(grids):
        tables = [comparison.tables[id_] for id_ in grid.listed or (grid.id,)]
        between = (a, " → " if grid.scale.worth else " and ", b) if grid.listed else ("↓ ", a, "  → ", b)
        axes, key = tag("p", *between, class_="axes"), f"{'list' if grid.listed else 'table'} {place} {k}"
        matches = [] if grid.listed else map(_matches, tables)
        errors = [_errors(table, len(tables) > 1) for table in tables]
        notes, caption = (missing_values(grid, said), *errors, *matches), _sides(comparison, grid, names)
        yield card(tables[0], grid, key, f"{grid.id}: {caption}", *notes, axes=axes)


def _sides(comparison: Comparison, grid: Grid, names: Mapping[str, str]) -> str:
    if grid.listed:
        return "pairs of layers in rows, how they were compared in columns"
    if has_networks(comparison):
        return "networks in rows and in columns"
    if has_classes(comparison):
        return "layers in rows, classes in columns"
    return f"layers of {names[comparison.a]} in rows, of {names[comparison.b]} in columns"


def _facts(comparison: Comparison, grids: Sequence[Grid]) -> Markup:
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    size = f"{rows} × {plural(columns, 'layer')}"
    if has_classes(comparison):
        size = f"{plural(rows, 'layer')} × {plural(columns, 'class')}"
    if has_networks(comparison):
        size = plural(rows, "network")
    if _is_list(grids):
        size = f"{plural(len(grids[0].rows), 'pair')} of layers"
    data = [NO_DATA] if comparison.needs_no_data else [comparison.data, plural(comparison.examples, "example")]
    return facts([*data, size, *_counted(comparison), comparison.created[:10]])


def _counted(comparison: Comparison) -> list[str]:
    """Return how many measures there are or, of stitches, how many methods and scores beside similarities."""
    tables = list(comparison.tables.values())
    worths = [table for table in tables if is_worth(table)]
    measures = plural(len(tables) - len(worths), "measure")
    if not worths:
        return [measures]
    methods, scores = (
        len({read(table) for table in worths}) for read in (column_label, lambda table: table.quantity.name)
    )
    found = [plural(methods, "method"), plural(scores, "score")]
    return found + ([measures] if len(worths) < len(tables) else [])


def _warnings(comparison: Comparison) -> Markup | None:
    said = list(comparison.caveats)
    if not comparison.complete and not any(caveat.code == "interrupted" for caveat in said):
        sentence = "This comparison was interrupted: the numbers come from a part of the data or of the pairs."
        said.append(Caveat("interrupted", sentence))
    return warnings(said)


def _choice(grids: Sequence[Grid]) -> Markup | None:
    if len(grids) <= CHOOSABLE:
        return None
    boxes = [
        tag("label", tag("input", type="checkbox", value=grid.id, checked=k < CHOOSABLE), grid.id)
        for k, grid in enumerate(grids)
    ]
    return tag("fieldset", tag("legend", "Measures shown"), *boxes, class_="choice controls")


def _errors(table: Values, several: bool) -> Markup | None:
    """Return how large a table's standard errors are, why some are missing, and where its bias is larger.

    With `several` tables in one card each line says which it is about.
    """
    of = f" of {column_label(table)}" if several else ""
    told = [f"Standard errors{of}: {error_summary(table)}."] if has_errors(table) else []
    without = Counter(table.error_reasons.values()).most_common(MOST)
    told += [f"No standard error{of}: {reason} ({plural(count, 'pair')})." for reason, count in without]
    note = bias_note(table)
    bias = tag("p", tag("strong", "Bias. "), f"{note[0].upper()}{note[1:]}.", class_="bias") if note else None
    return joined(*(tag("p", line, class_="errors") for line in told), bias) if told or bias else None


def _matches(table: Values) -> Markup | None:
    """Return how sure the best matches are, with their leads over the second best; None where that is not known."""
    note = match_note(table)
    if not note:
        return None
    known = {row: match for row, match in table.best_matches().items() if match.clear is not None}
    rows = [[name(row), name(m.layer), _with(m.value, m.error), name(m.second or ""), _with(m.margin, m.margin_error),
             "yes" if m.clear else "no"] for row, m in known.items()]  # fmt: skip
    body = plain_table(["layer", "best", "value", "second", "difference", "clear"], rows, kind="matches", label=MATCHES)
    more = tag("details", tag("summary", MATCHES), body)
    return joined(tag("p", f"{note[0].upper()}{note[1:]}.", class_="errors"), more)


def _with(value: float | None, error: float | None) -> str:
    return number_with_error(math.nan if value is None else value, math.nan if error is None else error)


# --- the profile ------------------------------------------------------------------------------------------------------


def profile(comparison: Comparison) -> Markup | None:
    """Return charts of corresponding layers with their numbers, or None where fewer than two correspond."""
    tables, (pairs, how) = list(comparison.tables.values()), partners(comparison)
    charts = profile_charts(comparison, tables)
    if not charts or len(pairs) < 2:
        return None
    figures = [tag("figure", tag("p", chart.title, class_="facts-line"), key(chart.lines), line_chart(chart),
                   class_="curve") for chart in charts]  # fmt: skip
    title = "Profile of corresponding layers" if how else "Profile of the pairs that were compared"
    which = f"Layers of the {how}, from the first to the last" if how else "Pairs of layers, from the first to the last"
    bars = " Bars are 95 % intervals." if any(map(has_errors, tables)) else ""
    parts = [tag("p", f"{which}.{bars}"), tag("div", *figures, class_="curves"), _numbers(comparison, pairs, charts[0])]
    first = "quiet" if listing(comparison) else None  # then it is the first on the page
    return tag("section", tag("h2", title, class_=first), tag("div", *parts, class_="card"), class_="profile")


def _numbers(comparison: Comparison, pairs: Sequence[tuple[int, int]], chart: Chart) -> Markup:
    tables = list(comparison.tables.values())
    rows = [[name(label), *(number_with_error(t.values[pair], t.to_errors()[pair]) for t in tables)]
            for pair, label in zip(pairs, chart.places, strict=True)]  # fmt: skip
    table = plain_table(["layer", *(table.id for table in tables)], rows, kind="numbers", label="The same as a table")
    return tag("details", tag("summary", "The same as a table"), table)


# --- where the numbers come from --------------------------------------------------------------------------------------


def _origins(comparison: Comparison, names: Sequence[str]) -> Markup:
    models = {} if has_networks(comparison) else dict(zip("ab", names, strict=True))
    if has_classes(comparison):
        models.pop("b")
    conventions = measure_table(comparison.tables.values())
    return origins(
        _general(comparison) | common_facts(comparison),
        grouped(comparison.provenance, comparison.layers_b),
        folded("The measures, with every convention", conventions, len(comparison.tables) < 5),
        *(folded(f"The layers of {model}", layer_table(comparison, side)) for side, model in models.items()),
    )


def _general(comparison: Comparison) -> dict[str, Any]:
    """Return how many layers, classes or networks were compared."""
    if has_networks(comparison):
        return {"networks": f"{len(comparison.layers_a):,}"}
    sides = ("first model", "second model") if listing(comparison) else ("rows", "columns")
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    second = plural(columns, "class") if has_classes(comparison) else f"{comparison.b}, {plural(columns, 'layer')}"
    return dict(zip(sides, (f"{comparison.a}, {plural(rows, 'layer')}", second), strict=True))
