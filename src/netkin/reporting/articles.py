"""The article of one comparison: what to know first, heatmaps or lists, the profile, where the numbers come from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from netkin.reporting.cards import card, holes, reason_list, shared_reasons
from netkin.reporting.documents import facts, warnings
from netkin.reporting.grids import Grid
from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.origins import origins
from netkin.reporting.profiles import profile
from netkin.reporting.wording import headline
from netkin.results import Comparison
from netkin.results.listings import has_classes

CHOOSABLE = 4  # with more heatmaps than these the page offers a choice among them


def article(
    comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int, several: bool
) -> Markup:
    """Return all that is shown of a comparison, the one at `place` of `several`; `names` are shorter ones of models."""
    title = tag("h2", f"{names[comparison.a]} and {names[comparison.b]}", title=f"{comparison.a} and {comparison.b}")
    head = [title, tag("p", headline(comparison, names))] if several else []
    found = [_measures(comparison, grids, names, place), profile(comparison)]
    shown = found[::-1] if _is_list(grids) else found  # a list is best seen as lines first
    parts = [*head, _facts(comparison, grids), _warnings(comparison), *shown, origins(comparison, names)]
    return tag("article", *parts, class_="comparison", hidden=place > 0, data_chosen=True)


def _is_list(grids: Sequence[Grid]) -> bool:
    return any(grid.listed for grid in grids)


def _measures(comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str], place: int) -> Markup:
    said = shared_reasons(grids)
    whole = f"Every layer with every {'class' if has_classes(comparison) else 'layer'}"
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
        table = comparison.tables[grid.listed[0] if grid.listed else grid.id]
        between = (a, " → " if grid.scale.worth else " and ", b) if grid.listed else ("↓ ", a, "  → ", b)
        axes, key = tag("p", *between, class_="axes"), f"{'list' if grid.listed else 'table'} {place} {k}"
        yield card(table, grid, key, f"{grid.id}: {_sides(comparison, grid, names)}", holes(grid, said), axes=axes)


def _sides(comparison: Comparison, grid: Grid, names: Mapping[str, str]) -> str:
    if grid.listed:
        return "pairs of layers in rows, how they were compared in columns"
    if has_classes(comparison):
        return "layers in rows, classes in columns"
    return f"layers of {names[comparison.a]} in rows, of {names[comparison.b]} in columns"


def _facts(comparison: Comparison, grids: Sequence[Grid]) -> Markup:
    rows, columns = len(comparison.layers_a), len(comparison.layers_b)
    size = f"{rows} layers × {columns} classes" if has_classes(comparison) else f"{rows} × {columns} layers"
    if _is_list(grids):
        size = f"{len(grids[0].rows)} pair{'s' if len(grids[0].rows) != 1 else ''} of layers"
    measures = f"{len(comparison.tables)} measure{'s' if len(comparison.tables) != 1 else ''}"
    return facts([comparison.data, f"{comparison.examples:,} examples", size, measures, comparison.created[:10]])


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
