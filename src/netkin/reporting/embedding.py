"""What the page carries as data: every number as saved, for the hover text and the downloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netkin.reporting.colours import ink, palette
from netkin.reporting.grids import Grid, grid_of
from netkin.results import Comparison, Values


def embedded(comparisons: Sequence[Comparison], summaries: Sequence[Grid]) -> dict[str, Any]:
    """Return all numbers and labels, fit for JSON, where a hole is null."""
    return {
        "palette": palette(),
        "ink": [ink(colour) for colour in palette()],
        "comparisons": [_comparison(comparison) for comparison in comparisons],
        "summaries": [_summary(grid, comparisons) for grid in summaries],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    words = ("a", "b", "layers_a", "layers_b", "data", "examples", "seed", "version", "created", "warnings", "complete")
    own = {word: _plain(getattr(comparison, word)) for word in words}
    maps = {word: _plain(dict(getattr(comparison, word))) for word in _MAPS}
    return own | maps | {"tables": [_table(table) for table in comparison.tables.values()]}


_MAPS = ("shapes_a", "shapes_b", "widths_a", "widths_b", "provenance")


def _table(table: Values) -> dict[str, Any]:
    words = ("id", "name", "higher_is_closer", "symmetric", "conventions", "statistic", "exactness")
    own = {word: _plain(getattr(table, word)) for word in words} | {"parameters": _plain(dict(table.parameters))}
    bounds = [value if math.isfinite(value) else None for value in table.bounds]
    errors = None if table.errors is None else _numbers(table.errors)
    return own | {"bounds": bounds, "errors": errors} | _drawable(grid_of(table))


def _drawable(grid: Grid) -> dict[str, Any]:
    holes = [[i, j, reason] for (i, j), reason in grid.holes.items()]
    best = [grid.best.get(i) for i in range(len(grid.rows))]
    scale = {"low": grid.scale.low, "high": grid.scale.high, "open_ended": grid.scale.open_ended}
    return {"values": _numbers(grid.values), "holes": holes, "best": best, "scale": scale}


def _summary(grid: Grid, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    places = {(c.a, c.b): k for k, c in enumerate(comparisons)}
    opens = [[places.get((a, b), places.get((b, a))) for b in grid.columns] for a in grid.rows]
    facts = {"id": grid.id, "models": list(grid.rows), "higher_is_closer": grid.scale.higher_is_closer}
    return facts | {"opens": opens, "errors": None} | _drawable(grid)


def _numbers(values: np.ndarray) -> list[list[float | None]]:
    return [[value if math.isfinite(value) else None for value in row] for row in values.tolist()]


def _plain(value: Any) -> Any:
    """Return `value` as JSON knows it: NumPy's numbers become Python's."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, (str, bool, int, type(None))) or _finite(value) else str(value)


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
