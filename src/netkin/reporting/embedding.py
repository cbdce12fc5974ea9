"""What a page carries as data, for the hover text and the downloads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netkin.reporting.axes import StepAxis
from netkin.reporting.grids import Grid, frames, grid_of
from netkin.reporting.layer_lines import zoomed
from netkin.reporting.scales import Scale, ink, palette, scales_of
from netkin.reporting.wording import number, shortened
from netkin.results import Comparison, Series, Values
from netkin.results.jackknife import quantile
from netkin.results.labels import NOT_ASKED, listing
from netkin.results.packing import facts, plain

MEANING = ("means", "cannot_see")  # fields of a table that are the same in every comparison of a page


def embedded(
    comparisons: Sequence[Comparison],
    grids: Sequence[Sequence[Grid]],
    summaries: Sequence[Grid],
    names: Mapping[str, str],
) -> dict[str, Any]:
    """Return all numbers and labels, fit for JSON, where a hole is null; `names` are shorter ones of the models."""
    drawn = zip(comparisons, grids, strict=True)
    tables = [table for comparison in comparisons for table in comparison.tables.values()]
    return _colours() | {
        "meanings": {table.id: {name: getattr(table, name) for name in MEANING} for table in tables},
        "comparisons": [_comparison(comparison, own, names) for comparison, own in drawn],
        "summaries": [_summary(grid, comparisons) for grid in summaries],
    }


def embedded_tables(tables: Sequence[tuple[str, str, Values]]) -> dict[str, Any]:
    """Return tables that compare no models, each with what its rows and its columns are called, for their heatmaps."""
    made = [
        Comparison(
            a=rows, b=columns, layers_a=table.layers_a, layers_b=table.layers_b, tables={table.id: table}, shapes_a={},
            shapes_b={}, widths_a={}, widths_b={}, data="", examples=0, seed=0, version="",
        )
        for rows, columns, table in tables
    ]  # fmt: skip
    names = {side: side for one in made for side in (one.a, one.b)}
    return embedded(made, [[] for _ in made], [], names)


def embedded_series(series: Series, axis: StepAxis) -> dict[str, Any]:
    """Return the numbers of a series as the page says them, with four decimals, so that many steps stay small."""
    final = series.comparisons[-1]
    read_off = {"warnings": list(series.warnings), "complete": series.complete}
    places = [[final.layers_a.index(layer), final.layers_b.index(layer)] for layer in series.layers]
    more = {"layers": list(series.layers), "own": places, "places": [float(f"{x:.4g}") for x in axis.places]}
    tables = [_frames(series, measure) for measure in series.measures]
    return _colours() | {"series": facts(final) | facts(series) | read_off | more | {"tables": tables}}


def _frames(series: Series, measure: str) -> dict[str, Any]:
    """Return a measure at every step; a reason for a hole is written once and named by its number."""
    table, grids, own = (
        series.table(measure),
        frames(series, measure),
        zoomed(series.table(measure), series.own(measure)),
    )
    reasons = list(dict.fromkeys(reason for grid in grids for reason in grid.holes.values()))
    numbered = {reason: k for k, reason in enumerate(reasons)}
    shown = {"scale": _scale(grids[0].scale), "axis": {"far": own.far, "close": own.close}, "powers": _powers(grids)}
    steps = [_frame(grid, numbered) for grid in grids]
    return _about_table(table) | shown | {"reasons": reasons, "frames": steps}


def _frame(grid: Grid, numbered: Mapping[str, int]) -> dict[str, Any]:
    holes = [[i, j, numbered[reason]] for (i, j), reason in grid.holes.items()]
    errors = None if grid.errors is None else _rounded(grid.errors)
    return {"values": _rounded(grid.values), "errors": errors, "holes": holes, "best": _best(grid)}


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[float(number(value)) if math.isfinite(value) else None for value in row] for row in values.tolist()]


def _powers(grids: Sequence[Grid]) -> bool:
    """Tell whether the cells write their numbers as powers of ten."""
    return any("e" in text for grid in grids for line in grid.texts for text in line)


def _colours() -> dict[str, Any]:
    return {"palette": palette(), "ink": [ink(colour) for colour in palette()]}


def _comparison(comparison: Comparison, grids: Sequence[Grid], names: Mapping[str, str]) -> dict[str, Any]:
    tables = list(comparison.tables.values())
    scales, places = scales_of(tables), {table.id: k for k, table in enumerate(tables)}
    shown = {"shown": [names[comparison.a], names[comparison.b]], "unasked": NOT_ASKED, "pairs": listing(comparison)}
    lists = [_list(grid, places) for grid in grids if grid.listed]
    return facts(comparison) | shown | {"lists": lists, "tables": [_table(table, scales[table.id]) for table in tables]}


def _list(grid: Grid, places: Mapping[str, int]) -> dict[str, Any]:
    """Return a list's name, its rows and columns, and which table each column is; the tables hold the numbers."""
    of = [places[id_] for id_ in grid.listed]
    return {"id": grid.id, "rows": list(grid.rows), "columns": list(grid.columns), "of": of}


def _table(table: Values, scale: Scale) -> dict[str, Any]:
    errors = None if table.errors is None else plain(table.errors)
    more = {"errors": errors, "without_error": _without_error(table), "margins": _margins(table)}
    return _about_table(table) | more | _drawable(replace(grid_of(table), scale=scale))


def _without_error(table: Values) -> list[list[Any]]:
    """Return each reason why values have no error with their places, or null where it is that of all values."""
    rows, columns = ({name: k for k, name in enumerate(names)} for names in (table.layers_a, table.layers_b))
    found: dict[str, list[list[int]]] = {}
    for (a, b), reason in table.error_reasons.items():
        found.setdefault(reason, []).append([rows[a], columns[b]])
    known = table.values.size - len(table.holes)
    return [[reason, None if len(places) == known else places] for reason, places in found.items()]


def _margins(table: Values) -> list[list[Any] | None]:
    """Return for each row the second best column, and how far it is behind with the standard error of that."""
    matches = table.best_matches()
    found = [matches.get(row) for row in table.layers_a] if table.replicates is not None else []
    return [[m.second, m.margin, m.margin_error] if m and m.margin_error is not None else None for m in found]


def _about_table(table: Values) -> dict[str, Any]:
    """Return what a table says of itself but for its layers and its meaning, which are said elsewhere."""
    own = {name: value for name, value in facts(table).items() if name not in ("layers_a", "layers_b", *MEANING)}
    return own | {"quantile": quantile(len(table.chunk_sizes)) if table.chunk_sizes else None}


def _drawable(grid: Grid, unasked: str = NOT_ASKED) -> dict[str, Any]:
    # that a pair was not asked for is said of hundreds of them; the page says it once
    holes = [[i, j, reason] for (i, j), reason in grid.holes.items() if reason != unasked]
    return {"values": plain(grid.values), "holes": holes, "best": _best(grid), "scale": _scale(grid.scale)}


def _scale(scale: Scale) -> dict[str, Any]:
    return {"low": scale.low, "high": scale.high, "open_ended": scale.open_ended, "words": list(scale.words)}


def _best(grid: Grid) -> list[int | None]:
    return [grid.best.get(i) for i in range(len(grid.rows))]


def _summary(grid: Grid, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    places, models = {(c.a, c.b): k for k, c in enumerate(comparisons)}, grid.models or grid.rows
    opens = [[places.get((a, b), places.get((b, a))) for b in models] for a in models]
    about = {
        "id": grid.id,
        "models": list(grid.rows),
        "labels": shortened(grid.rows),
        "higher_is_closer": grid.scale.higher_is_closer,
    }
    errors = None if grid.errors is None else plain(grid.errors)
    kind = {"sides": "tasks" if grid.models else "models", "unasked": grid.elsewhere}
    return about | kind | {"opens": opens, "errors": errors} | _drawable(grid, grid.elsewhere)
