"""A measure's card: its heatmap between what it says and what it can't see, and why values are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from netkin.reporting.grids import Grid
from netkin.reporting.heatmaps import figure_of
from netkin.reporting.markup import Markup, joined, tag
from netkin.reporting.meanings import meaning_of
from netkin.reporting.wording import direction, range_of, reasons
from netkin.results import Values

MOST = 5  # reasons told in one place


def card(table: Values, grid: Grid, key: str, caption: str, *notes: Markup | None, axes: Markup) -> Markup:
    """Return the card of a measure's table, drawn as `grid`."""
    facts = tag("p", f"{direction(table)} · {range_of(table)} · {table.exactness}", class_="facts-line")
    meaning = meaning_of(table)
    blind = tag("p", tag("strong", "What it can't see. "), meaning.blind)
    says = tag("figcaption", tag("p", meaning.says), blind)
    return figure_of(grid, caption, key, *notes, says, heading=joined(tag("h3", grid.id), facts, axes))


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
