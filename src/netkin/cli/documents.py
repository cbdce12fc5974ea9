"""Results as JSON for other programs: no NaN and no Infinity, null instead."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netkin.results import Comparison, Series, Trend, Values

_COMPARISON = (
    "a",
    "b",
    "layers_a",
    "layers_b",
    "data",
    "examples",
    "seed",
    "version",
    "created",
    "warnings",
    "complete",
)
_MAPPINGS = ("shapes_a", "shapes_b", "widths_a", "widths_b", "provenance")
_TABLE = ("id", "name", "higher_is_closer", "symmetric", "conventions", "statistic", "exactness")


def as_json(content: Any) -> str:
    """Return `content` as JSON text; numbers that are not finite become null."""
    return json.dumps(_finite(content), indent=2, ensure_ascii=False)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return everything a comparison holds, as plain lists, dictionaries, texts and numbers."""
    document = {name: getattr(comparison, name) for name in _COMPARISON}
    document |= {name: dict(getattr(comparison, name)) for name in _MAPPINGS}
    return document | {"tables": {name: _table_document(table) for name, table in comparison.tables.items()}}


def series_document(series: Series) -> dict[str, Any]:
    """Return everything a series holds, and what is read off it, as plain lists, dictionaries, texts and numbers."""
    document = {name: getattr(series, name) for name in ("run", "unit", "steps", "final_step", "missing", "layers")}
    document |= {"warnings": series.warnings, "complete": series.complete, "provenance": dict(series.provenance)}
    measures = {measure: _way_document(series, measure) for measure in series.measures}
    return document | {"measures": measures, "comparisons": list(map(comparison_document, series.comparisons))}


def _way_document(series: Series, measure: str) -> dict[str, Any]:
    marks = series.marks(measure)
    reached = {str(mark): series.reached(mark, measure) for mark in marks}
    trends = {str(mark): _trend_document(series, mark, measure) for mark in marks}
    return {"own": series.own(measure).tolist(), "reached": reached, "bottom_up": trends}


def _trend_document(series: Series, threshold: float, measure: str) -> dict[str, Any]:
    from netkin.errors import NoValue

    try:
        trend: Trend = series.bottom_up(threshold, measure)
        return asdict(trend)
    except NoValue as reason:
        return {"tau": None, "reason": str(reason)}


def _table_document(table: Values) -> dict[str, Any]:
    facts = {name: getattr(table, name) for name in _TABLE}
    facts |= {"bounds": table.bounds, "parameters": dict(table.parameters), "values": table.values.tolist()}
    matches = [{"layer_a": row, "layer_b": match.layer, **vars(match)} for row, match in table.best_matches().items()]
    for match in matches:
        del match["layer"]
    return facts | _error_document(table) | {"holes": _reasons(table.holes), "best_matches": matches}


def _error_document(table: Values) -> dict[str, Any]:
    """Return standard errors, 95 % intervals and replicates, null where errors were not asked for."""
    ends = (end.tolist() if table.chunk_sizes else None for end in table.interval())
    arrays = {"standard_errors": table.errors, "replicates": table.replicates}
    document = {name: None if array is None else array.tolist() for name, array in arrays.items()}
    document |= dict(zip(("low", "high"), ends, strict=True)) | {"chunk_sizes": list(table.chunk_sizes)}
    return document | {"error_reasons": _reasons(table.error_reasons)}


def _reasons(reasons: Mapping[tuple[str, str], str]) -> list[dict[str, str]]:
    return [{"layer_a": a, "layer_b": b, "reason": reason} for (a, b), reason in reasons.items()]


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
