"""How a result shows itself in a notebook: small heatmaps with their styles in them, and no script."""

from __future__ import annotations

from collections.abc import Sequence

from netkin.reporting.colours import ink, palette
from netkin.reporting.grids import Grid, grids_of, summary_grids
from netkin.reporting.markup import Markup, name, tag
from netkin.reporting.series_view import series_view
from netkin.reporting.wording import number, shortened
from netkin.results import Comparison, Comparisons, Series
from netkin.results.text import cells

SHOWN = 4  # measures at most
CELLS = 2500  # beyond so many only the first measure is shown


def notebook_view(results: Comparison | Comparisons | Series) -> str:
    """Return the heatmaps of a comparison, or of the summaries of many, or a series, as HTML for a notebook."""
    if isinstance(results, Series):
        return series_view(results)
    if isinstance(results, Comparison):
        grids = grids_of(results)
        sides = ("", "") if any(grid.listed for grid in grids) else (" (rows)", " (columns)")
        title = f"{results.a}{sides[0]} and {results.b}{sides[1]}"
        words = f"{title}, {results.data}, {results.examples:,} examples"
    else:
        grids, words = _summaries(results), f"{len(results.models)} models, {len(results)} pairs"
    shown = _few(grids)
    rest = [f"not shown here: {', '.join(grid.id for grid in grids[len(shown) :])}"] if len(shown) < len(grids) else []
    tables = tag(
        "div", *map(_small, shown), style="display:flex;flex-wrap:wrap;gap:16px;overflow:auto;max-height:640px"
    )
    warnings = results.warnings if isinstance(results, Comparison) else ()
    notes = [*(f"warning: {warning}" for warning in warnings), *rest]
    return tag("div", tag("p", words), tables, *(tag("p", tag("small", note)) for note in notes))


def _summaries(results: Comparisons) -> list[Grid]:
    comparisons = list(results.values())
    return (
        summary_grids(comparisons)
        if len(comparisons) > 1
        else [grid for comparison in comparisons for grid in grids_of(comparison)]
    )


def _few(grids: Sequence[Grid]) -> list[Grid]:
    return list(grids[:SHOWN] if sum(grid.values.size for grid in grids[:SHOWN]) <= CELLS else grids[:1])


def _small(grid: Grid) -> Markup:
    """Return one heatmap as a table whose cells carry their own colours."""
    style = "border-collapse:collapse;font-size:11px;width:auto"
    caption = tag("caption", grid.id, style="caption-side:top;text-align:left;font-weight:600;color:inherit")
    across = [
        tag("th", _upright(label), title=full)
        for full, label in zip(grid.columns, shortened(grid.columns), strict=True)
    ]
    return tag("table", caption, tag("tr", tag("th"), *across), *_rows(grid), style=style)


def _rows(grid: Grid) -> list[Markup]:
    texts, shades = cells(grid.values), grid.scale.shade_numbers(grid.values)
    few = len(grid.columns) <= 16
    return [
        tag(
            "tr",
            tag("th", name(label), title=grid.rows[i], style="text-align:right;padding:0 6px;font-weight:400"),
            *(_cell(grid, i, j, int(shades[i, j]), texts[i][j] if few else "") for j in range(len(grid.columns))),
        )
        for i, label in enumerate(shortened(grid.rows))
    ]


def _cell(grid: Grid, i: int, j: int, shade: int, text: str) -> Markup:
    pair, room = f"{grid.pair(i, j)}: ", "padding:3px 5px;min-width:10px;text-align:center"
    if shade < 0:
        return tag("td", "–", title=f"{pair}no value, {grid.holes[i, j]}", style=f"{room};background:#8884")
    colour = palette()[shade]
    ring = ";outline:2px solid #fff;outline-offset:-3px" if grid.best.get(i) == j else ""
    style = f"{room};background:{colour};color:{ink(colour)}{ring}"
    return tag("td", text, title=pair + number(float(grid.values[i, j])), style=style)


def _upright(label: str) -> Markup:
    return tag(
        "span", name(label), style="writing-mode:vertical-rl;transform:rotate(180deg);font-weight:400;max-height:160px"
    )
