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
from netkin.reporting.blocks import Heatmap, Lines, Name, Page, PageBlock, Section, Table, Text
from netkin.reporting.charts import profile_charts
from netkin.reporting.grids import Grid, grids_of, summary_grids
from netkin.reporting.parts import (
    about,
    common_facts,
    conventions,
    counted_reasons,
    grouped,
    layer_table,
    maps_of,
    measured,
    missing_values,
    origins,
    shared_reasons,
)
from netkin.reporting.words import closest_and_farthest, headline, number_with_error, short_names
from netkin.results import Comparison, Comparisons, Values
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
    is_score,
    listing,
    pair_label,
    partners,
    plural,
    tables_by_name,
)
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
FEW = 12  # models, up to which their means always stand in the cells
MOST = 5  # reasons why errors are missing, shown in one place
NAMED = 4  # pairs of models in the sentence at the top
BESIDE = 20  # columns, up to which one heatmap has its profile beside it
CHOOSABLE = 4  # with more heatmaps than these the page offers a choice among them

Names = Mapping[str, str]  # of models, with shorter ones


def comparison_page(results: Sequence[Comparison]) -> Page:
    """Return the page of one comparison or several."""
    whole = sorted(results, key=lambda comparison: comparison.a == comparison.b)  # a task beside itself is seen last
    comparisons, names = _without_folders(whole)
    pages = [
        single_page(comparison, names, place, origin)
        for place, (comparison, origin) in enumerate(zip(comparisons, whole, strict=True))
    ]
    versions = [comparison.version for comparison in comparisons]
    if len(pages) == 1:
        return replace(pages[0], results=whole, versions=versions)
    summaries, note = summary_grids(comparisons), buckets_note(comparisons)
    return Page(
        title=_title(comparisons, names),
        sentence=_sentence(comparisons, names, summaries),
        caveats=[Caveat("other-buckets", note)] if note and summaries else [],
        blocks=[summary_section(comparisons, summaries), spread_section(comparisons)],
        choices=[replace(page, label=label, title=_pair(one, names), whole=_pair(one))
                 for page, label, one in zip(pages, _labels(comparisons, names), comparisons, strict=True)],
        versions=versions, results=whole,
    )  # fmt: skip


def _without_folders(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], dict[str, str]]:
    """Return comparisons whose models and data are named without folders, and shorter names of these models.

    Whole paths, as they were typed, stand in the provenance alone.
    """
    models = [model for comparison in comparisons for model in (comparison.a, comparison.b)]
    bare, short, data = bare_names(models), short_names(models), bare_names(one.data for one in comparisons)
    shown = [replace(one, a=bare[one.a], b=bare[one.b], data=data[one.data]) for one in comparisons]
    return shown, {name: short[model] if short[model] != model else name for model, name in bare.items()}


def _pair(comparison: Comparison, names: Names | None = None) -> str:
    a, b = ((names or {}).get(model, model) for model in (comparison.a, comparison.b))
    return f"{a} and {b}"


def _title(comparisons: Sequence[Comparison], names: Names) -> str:
    if _of_tasks(comparisons):
        return f"{plural(len(names), 'task')}, block by block"
    return f"{plural(len(names), 'model')} in {len(comparisons)} comparisons"


def _single_title(comparison: Comparison, names: Names) -> str:
    if has_networks(comparison):
        return f"{plural(len(comparison.layers_a), 'network')}, each with every other"
    if has_classes(comparison):
        what = "which layers follow which classes"
        return what.capitalize() if comparison.a == UNNAMED else f"{names[comparison.a]}: {what}"
    stitched = f"{names[comparison.a]} stitched into {names[comparison.b]}"
    return f"{stitched if _is_stitched(comparison) else _pair(comparison, names)}{_where(comparison)}"


def _where(comparison: Comparison) -> str:
    """Return at which pair of layers, or that there are several."""
    pairs = listing(comparison)
    if len(pairs) != 1:
        return ", layer by layer"
    ((i, j),) = pairs
    return f" at {pair_label(comparison.tables.values(), comparison.layers_a[i], comparison.layers_b[j])}"


def _is_stitched(comparison: Comparison) -> bool:
    return any(map(is_score, comparison.tables.values()))


def _of_tasks(comparisons: Sequence[Comparison]) -> bool:
    return all(is_of_tasks(table) for one in comparisons for table in one.tables.values())


def _sentence(comparisons: Sequence[Comparison], names: Names, summaries: Sequence[Grid]) -> str:
    if _of_tasks(comparisons):
        return f"{', '.join(names.values())}: {len(comparisons)} pairs, each task beside itself too."
    if not summaries or any(map(_is_stitched, comparisons)):
        more = [f"and {len(comparisons) - NAMED} more"] if len(comparisons) > NAMED else []
        return f"{'; '.join([*(_pair(one, names) for one in comparisons[:NAMED]), *more])}."
    grid = summaries[0]
    models = [names[model] for model in grid.rows]
    return closest_and_farthest(grid.id, models, grid.values, grid.scale.higher_is_closer, "models")


def _labels(comparisons: Sequence[Comparison], names: Names) -> list[str]:
    """Return what the comparisons are called in the list to choose from."""
    pairs = [_pair(comparison, names) for comparison in comparisons]
    times = Counter(pairs)
    return [
        f"{k}: {label}, {one.data}" if times[label] > 1 else label
        for k, (label, one) in enumerate(zip(pairs, comparisons, strict=True), start=1)
    ]


# --- many models ------------------------------------------------------------------------------------------------------


def summary_section(comparisons: Sequence[Comparison], summaries: Sequence[Grid]) -> Section | None:
    """Return the heatmaps of models by models with their maps, or of the blocks of tasks; None where there are none.

    The tree and the plane by one measure stand beside its heatmap.
    """
    if not summaries:
        return None
    blocks = bool(summaries[0].models)
    title = "Tasks by tasks, block by block" if blocks else "Models by models"
    sides = ("tasks", "tasks") if blocks else ("models", "models")
    places = {(one.a, one.b): k for k, one in enumerate(comparisons)}
    figures = [
        Heatmap(
            grid, f"summary {k}", f"{grid.id}, {title.lower()}", title=grid.id, line=grid.note, sides=sides,
            notes=[missing_values(grid, [SAME_MODEL])],
            opens=[[places.get((a, b), places.get((b, a))) for b in grid.models or grid.rows]
                   for a in grid.models or grid.rows],
            level="layers" if blocks else "models", numbered=not blocks and len(grid.columns) <= FEW,
        )
        for k, grid in enumerate(summaries)
    ]  # fmt: skip
    maps = {} if blocks else _maps_by_measure(comparisons)
    beside = next(iter(maps.values())) if maps and len(figures) == 1 else []
    cards = Section("", [*figures, *beside], "cards", "mapped" if beside else "")
    words = Text(BLOCKS if blocks else _means_in_words(summaries))
    choose = Text("Choose a cell to open its comparison.", style="controls")
    below = [] if beside else _maps_section(maps)
    return Section(title, [cards, words, choose, *below], style="summary", quiet=True)


def _maps_by_measure(comparisons: Sequence[Comparison]) -> dict[str, list[PageBlock]]:
    """Return the maps of models by measure; none where pairs are missing or occur twice."""
    if len({(one.a, one.b) for one in comparisons}) < max(len(comparisons), 3):
        return {}
    found = {id_: maps_of(table) for id_, table in Comparisons(comparisons).summaries().tables.items()}
    return {id_: maps for id_, maps in found.items() if maps}


def _maps_section(maps: Mapping[str, Sequence[PageBlock]]) -> list[Section]:
    """Return the maps of the models, those after the first folded."""
    if not maps:
        return []
    (first, figures), *rest = maps.items()
    folded = [Section(f"The same by {id_}", [Section("", own, "cards")], "folded") for id_, own in rest]
    return [Section(f"A map of the models by {first}", [Section("", figures, "cards"), *folded])]


def _means_in_words(summaries: Sequence[Grid]) -> str:
    """Return what the cells are means over, and how many pairs of layers are behind them."""
    numbers = sorted({int(n) for grid in summaries if grid.counts is not None for n in grid.counts.ravel() if n})
    several = f"n pairs of layers, {numbers[0]} to {numbers[-1]}," if numbers else "pairs of layers"
    return MEANS.format(counted=f"{plural(numbers[0], 'pair')} of layers" if len(numbers) == 1 else several)


def spread_section(comparisons: Sequence[Comparison]) -> Section | None:
    """Return means and deviations over comparisons with stitches, or None where there are none."""
    if not any(is_score(table) for one in comparisons for table in one.tables.values()):
        return None
    try:
        spread = spread_of(comparisons)
    except NoValue:  # no names of layers in common
        return None
    words = Text(SPREAD.format(counted=plural(len(comparisons), "pair")))
    cards = Section("", list(_spread_tables(spread)), "cards")
    return Section("Layer by layer, over all pairs of models", [words, cards], style="spread")


def _spread_tables(spread: Comparison) -> Iterator[Table]:
    """Yield a matrix for each measure or, where each layer meets one other at most, a list for all of one name."""
    pairs = listing(spread)
    for name, tables in tables_by_name(spread.tables.values()).items() if pairs else ():
        labels, columns, cells = list_cells(tables, pairs)
        rows = [[Name(label), *line] for label, line in zip(labels, cells, strict=True)]
        yield Table(["layer", *map(Name, columns)], rows, name, style="numbers")
    for table in () if pairs else spread.tables.values():
        lines = zip(table.layers_a, with_errors(table.values, table.to_errors()), strict=True)
        rows = [[Name(layer), *line] for layer, line in lines]
        yield Table(["from ↓ into →", *map(Name, table.layers_b)], rows, table.id, style="numbers")


# --- one comparison ---------------------------------------------------------------------------------------------------


def single_page(comparison: Comparison, names: Names, place: int, origin: Comparison) -> Page:
    """Return all that is shown of a comparison.

    Args:
        comparison: What is shown, with names without folders.
        names: Shorter names of the models.
        place: Which of the comparisons of the page it is.
        origin: The same with the names of models and data in full, for the provenance.
    """
    grids = grids_of(comparison)
    sections = [
        _measures(comparison, grids, names, place),
        None if has_networks(comparison) else profile(comparison, f"profile {place}"),
    ]
    blocks = sections[::-1] if _is_list(grids) else sections  # a list is best seen as lines first
    if len(grids) == 1 and len(grids[0].columns) <= BESIDE and all(sections):
        blocks = [Section("", blocks, "halves")]
    tables, shown = list(comparison.tables), [names[comparison.a], names[comparison.b]]
    return Page(
        title=_single_title(comparison, names),
        whole=_pair(comparison),
        sentence=headline(comparison, names),
        facts=_facts(comparison, grids),
        caveats=_caveats(comparison),
        blocks=blocks,
        origins=_origins(origin, shown),
        name=[tables[0] if len(tables) == 1 else "similarity", *shown],
    )


def _is_list(grids: Sequence[Grid]) -> bool:
    return any(grid.listed for grid in grids)


def _measures(comparison: Comparison, grids: Sequence[Grid], names: Names, place: int) -> Section:
    said, reasons = shared_reasons(grids)
    maps = maps_of(next(iter(comparison.tables.values()))) if has_networks(comparison) else []
    title = f"Every layer with every {'class' if has_classes(comparison) else 'layer'}"
    title = "Every network with every other" if has_networks(comparison) else title
    figures = [_figure(comparison, grid, names, f"table {place} {k}", said) for k, grid in enumerate(grids)]
    cards = Section("", [*figures, *maps], "cards", "mapped" if maps and len(grids) == 1 else "")
    choice = [grid.id for grid in grids] if len(grids) > CHOOSABLE else []
    return Section("Layer by layer" if _is_list(grids) else title, [reasons, cards], quiet=True, choice=choice,
                   shown=CHOOSABLE)  # fmt: skip


def _figure(comparison: Comparison, grid: Grid, names: Names, key: str, said: Collection[str]) -> Heatmap:
    """Return the heatmap of a measure, or the list of all tables of one name."""
    a, b = (Name(names[model], model) for model in (comparison.a, comparison.b))
    tables, ids = [comparison.tables[id_] for id_ in grid.listed or (grid.id,)], list(comparison.tables)
    more: dict[str, Any] = {
        "axes": (a, " → " if grid.scale.is_score else " and ", b) if grid.listed else ("↓ ", a, "  → ", b),
        "sides": (names[comparison.a], names[comparison.b]),
        "order": [ids.index(table.id) for table in tables],
        "fitted_with": tables[0].quantity.name,
    }
    if grid.listed:
        pairs = [(comparison.layers_a[i], comparison.layers_b[j]) for i, j in listing(comparison)]
        more |= {"columns": tables, "pairs": pairs}
    else:
        more["about"] = about(comparison)
    matches = [] if grid.listed else _matches(tables[0])
    errors = [note for table in tables for note in _errors(table, len(tables) > 1)]
    caption = f"{grid.id}: {_sides(comparison, grid, names)}"
    return measured(tables[0], grid, key, caption, missing_values(grid, said), *errors, *matches, **more)


def _sides(comparison: Comparison, grid: Grid, names: Names) -> str:
    if grid.listed:
        return "pairs of layers in rows, how they were compared in columns"
    if has_networks(comparison):
        return "networks in rows and in columns"
    if has_classes(comparison):
        return "layers in rows, classes in columns"
    return f"layers of {names[comparison.a]} in rows, of {names[comparison.b]} in columns"


def _facts(comparison: Comparison, grids: Sequence[Grid]) -> list[str]:
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    size = f"{rows} × {plural(columns, 'layer')}"
    if has_classes(comparison):
        size = f"{plural(rows, 'layer')} × {plural(columns, 'class')}"
    if has_networks(comparison):
        size = plural(rows, "network")
    if _is_list(grids):
        size = f"{plural(len(grids[0].rows), 'pair')} of layers"
    data = [NO_DATA] if comparison.needs_no_data else [comparison.data, plural(comparison.examples, "example")]
    return [*data, size, *_counted(comparison), comparison.created[:10]]


def _counted(comparison: Comparison) -> list[str]:
    """Return how many measures there are or, of stitches, how many methods and scores beside similarities."""
    tables = list(comparison.tables.values())
    score_tables = [table for table in tables if is_score(table)]
    measures = plural(len(tables) - len(score_tables), "measure")
    if not score_tables:
        return [measures]
    methods, scores = len(set(map(column_label, score_tables))), len({table.quantity.name for table in score_tables})
    return [
        plural(methods, "method"),
        plural(scores, "score"),
        *([measures] if len(score_tables) < len(tables) else []),
    ]


def _caveats(comparison: Comparison) -> list[Caveat]:
    said = list(comparison.caveats)
    if not comparison.complete and not any(caveat.code == "interrupted" for caveat in said):
        sentence = "This comparison was interrupted: the numbers come from a part of the data or of the pairs."
        said.append(Caveat("interrupted", sentence))
    return said


def _errors(table: Values, several: bool) -> Iterator[Text]:
    """Yield how large a table's standard errors are, why some are missing, and where its bias is larger.

    With `several` tables in one card each line says which it is about.
    """
    of = f" of {column_label(table)}" if several else ""
    if has_errors(table):
        yield Text(f"Standard errors{of}: {error_summary(table)}.", style="errors")
    for reason in counted_reasons(table, MOST):
        yield Text(f"No standard error{of}: {reason}.", style="errors")
    note = bias_note(table)
    if note:
        yield Text(f"{note[0].upper()}{note[1:]}.", "Bias.", style="bias")


def _matches(table: Values) -> Iterator[Text | Table]:
    """Yield how sure the best matches are, and their leads over the second best, where that is known."""
    note = match_note(table)
    if not note:
        return
    yield Text(f"{note[0].upper()}{note[1:]}.", style="errors")
    known = {row: match for row, match in table.best_matches().items() if match.clear is not None}
    rows = [[Name(row), Name(m.layer), _with(m.value, m.error), Name(m.second or ""), _with(m.margin, m.margin_error),
             "yes" if m.clear else "no"] for row, m in known.items()]  # fmt: skip
    head = ["layer", "best", "value", "second", "difference", "clear"]
    yield Table(head, rows, MATCHES, MATCHES, "matches", folded=True)


def _with(value: float | None, error: float | None) -> str:
    return number_with_error(math.nan if value is None else value, math.nan if error is None else error)


# --- the profile ------------------------------------------------------------------------------------------------------


def profile(comparison: Comparison, key: str = "profile") -> Section | None:
    """Return charts of corresponding layers with their numbers, or None where fewer than two correspond."""
    tables, (pairs, how) = list(comparison.tables.values()), partners(comparison)
    charts = profile_charts(comparison, tables)
    if not charts or len(pairs) < 2:
        return None
    title = "Profile of corresponding layers" if how else "Profile of the pairs that were compared"
    which = f"Layers of the {how}, from the first to the last" if how else "Pairs of layers, from the first to the last"
    bars = " Bars are 95 % intervals." if any(map(has_errors, tables)) else ""
    rows = [[Name(label), *(number_with_error(t.values[pair], t.to_errors()[pair]) for t in tables)]
            for pair, label in zip(pairs, charts[0].places, strict=True)]  # fmt: skip
    as_table = "The same as a table"
    numbers = Table(["layer", *(table.id for table in tables)], rows, as_table, as_table, "numbers", folded=True)
    curves = Section("", [Lines(chart, f"{key} {k}") for k, chart in enumerate(charts)], "curves")
    card = Section("", [Text(f"{which}.{bars}"), curves, numbers], "card")
    return Section(title, [card], style="profile", quiet=bool(listing(comparison)))  # first on the page if a list


# --- where the numbers come from --------------------------------------------------------------------------------------


def _origins(comparison: Comparison, names: Sequence[str]) -> list[PageBlock | None]:
    models = {} if has_networks(comparison) else dict(zip("ab", names, strict=True))
    if has_classes(comparison):
        models.pop("b")
    return origins(
        _general(comparison) | common_facts(comparison),
        grouped(comparison.provenance, comparison.layers_b),
        conventions(comparison.tables.values(), len(comparison.tables) < 5),
        *(layer_table(comparison, side, f"The layers of {model}") for side, model in models.items()),
    )


def _general(comparison: Comparison) -> dict[str, Any]:
    """Return how many layers, classes or networks were compared."""
    if has_networks(comparison):
        return {"networks": f"{len(comparison.layers_a):,}"}
    sides = ("first model", "second model") if listing(comparison) else ("rows", "columns")
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    second = plural(columns, "class") if has_classes(comparison) else f"{comparison.b}, {plural(columns, 'layer')}"
    return dict(zip(sides, (f"{comparison.a}, {plural(rows, 'layer')}", second), strict=True))
