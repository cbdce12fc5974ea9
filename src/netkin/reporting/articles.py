"""The article of one comparison: what to know first, heatmaps or lists, the profile, where the numbers come from.

A measure's card is its heatmap between what it says and what it can't see, its errors, and why values are missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from netkin.reporting.documents import facts, warnings
from netkin.reporting.grids import Grid
from netkin.reporting.heatmaps import figure_of
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.network_maps import network_map
from netkin.reporting.origins import origins, plain_table
from netkin.reporting.profiles import profile
from netkin.reporting.wording import direction, headline, meaning_of, number_with_error, range_of, reasons
from netkin.results import Comparison, Values
from netkin.results.labels import column_label, has_classes, has_networks
from netkin.results.text import NO_DATA, bias_note, error_summary, has_errors, match_note

MATCHES = "Best matches, and how far the second is behind"
MOST = 5  # reasons told in one place
CHOOSABLE = 4  # with more heatmaps than these the page offers a choice among them


def article(
    comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int, several: bool
) -> Markup:
    """Return all that is shown of a comparison, the one at `place` of `several`; `names` are shorter ones of models."""
    title = tag("h2", f"{names[comparison.a]} and {names[comparison.b]}", title=f"{comparison.a} and {comparison.b}")
    head = [title, tag("p", headline(comparison, names))] if several else []
    networks = has_networks(comparison)
    beside = network_map(comparison) if networks else profile(comparison)
    found = [_measures(comparison, grids, names, place), beside]
    shown = found[::-1] if _is_list(grids) else found  # a list is best seen as lines first
    parts = [*head, _facts(comparison, grids), _warnings(comparison), *shown, origins(comparison, names)]
    return tag("article", *parts, class_="comparison", hidden=place > 0, data_chosen=True)


def _is_list(grids: Sequence[Grid]) -> bool:
    return any(grid.listed for grid in grids)


def _measures(comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int) -> Markup:
    said = shared_reasons(grids)
    whole = f"Every layer with every {'class' if has_classes(comparison) else 'layer'}"
    whole = "Every network with every other" if has_networks(comparison) else whole
    return tag(
        "section",
        tag("h2", "Layer by layer" if _is_list(grids) else whole, class_="quiet"),
        _choice(grids),
        reason_list(list(said.values())),
        tag("div", *_figures(comparison, grids, names, place, said), class_="cards"),
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
        notes, caption = (holes(grid, said), *errors, *matches), _sides(comparison, grid, names)
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
    size = f"{rows} layers × {columns} classes" if has_classes(comparison) else f"{rows} × {columns} layers"
    size = f"{rows} networks" if has_networks(comparison) else size
    if _is_list(grids):
        size = f"{len(grids[0].rows)} pair{'s' if len(grids[0].rows) != 1 else ''} of layers"
    measures = f"{len(comparison.tables)} measure{'s' if len(comparison.tables) != 1 else ''}"
    data = [NO_DATA] if comparison.needs_no_data else [comparison.data, f"{comparison.examples:,} examples"]
    return facts([*data, size, measures, comparison.created[:10]])


def _warnings(comparison: Comparison) -> Markup | None:
    said = list(comparison.warnings)
    if not comparison.complete and not any("interrupted" in warning for warning in said):
        said.append("This comparison was interrupted: the numbers come from a part of the data or of the pairs.")
    return warnings(said)


def _choice(grids: Sequence[Grid]) -> Markup | None:
    if len(grids) <= CHOOSABLE:
        return None
    boxes = [
        tag("label", tag("input", type="checkbox", value=grid.id, checked=k < CHOOSABLE), grid.id)
        for k, grid in enumerate(grids)
    ]
    return tag("fieldset", tag("legend", "Measures shown"), *boxes, class_="choice controls")


def card(table: Values, grid: Grid, key: str, caption: str, *notes: Markup | None, axes: Markup) -> Markup:
    """Return the card of a measure's table, drawn as `grid`."""
    line = tag("p", f"{direction(table)} · {range_of(table)} · {table.exactness}", class_="facts-line")
    means, cannot_see = meaning_of(table)
    says = tag("figcaption", tag("p", means), tag("p", tag("strong", "What it can't see. "), cannot_see))
    return figure_of(grid, caption, key, *notes, says, heading=joined(tag("h3", grid.id), line, axes))


def _errors(table: Values, several: bool) -> Markup | None:
    """Return how large a table's standard errors are, why some are missing, and where its bias is larger.

    With `several` tables in one card each line says which it is about.
    """
    of = f" of {column_label(table)}" if several else ""
    told = [f"Standard errors{of}: {error_summary(table)}."] if has_errors(table) else []
    without = Counter(table.error_reasons.values()).most_common(MOST)
    told += [f"No standard error{of}: {reason} ({count:,} {_pairs_of(count)})." for reason, count in without]
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


def _pairs_of(count: int) -> str:
    return "pair" if count == 1 else "pairs"


def holes(grid: Grid, said: Collection[str] = ()) -> Markup | None:
    """Return why values of a heatmap are missing, but for reasons that are `said` elsewhere."""
    return reason_list([text for reason, text in reasons(grid).items() if reason not in said])


def reason_list(told: Sequence[str]) -> Markup | None:
    """Return reasons beside a sample of the hatching, or None where there are none."""
    if not told:
        return None
    more = [f"and {len(told) - MOST} other reasons; point at a cell to read its own"] if len(told) > MOST else []
    mark = tag("span", class_="hole sample", aria_hidden="true")
    items = [tag("li", mark, f"no value: {text}") for text in told[:MOST]] + [tag("li", text) for text in more]
    return tag("ul", *items, class_="reasons")


def shared_reasons(grids: Sequence[Grid]) -> Mapping[str, str]:
    """Return the reasons that several measures give, each with the pairs and the measures it is about.

    A layer that is constant has no value by any measure; the page says so once.
    """
    found: dict[str, list[Grid]] = {}
    for grid in grids:
        for reason in grid.reasons():
            found.setdefault(reason, []).append(grid)
    return {
        reason: f"{reason} ({_pairs(reason, own)} {_by(own, len(grids))})"
        for reason, own in found.items()
        if len(own) > 1
    }


def _pairs(reason: str, grids: Sequence[Grid]) -> str:
    counts = sorted({grid.reasons()[reason] for grid in grids})
    most = counts[-1]
    several = f"{counts[0]:,} to {most:,}" if len(counts) > 1 else f"{most:,}"
    return f"{several} {'pair' if most == 1 else 'pairs'}"


def _by(grids: Sequence[Grid], count: int) -> str:
    return "by every measure" if len(grids) == count else f"by {', '.join(grid.id for grid in grids)}"
