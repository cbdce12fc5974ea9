"""Results as a header and named arrays, and back: what the files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from netkin.results.records import plain_fields

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

Arrays = dict[str, np.ndarray]

OPTIONAL = ("errors", "replicates")  # arrays that a table may be without


def packed(comparison: Comparison, key: str = "") -> tuple[dict[str, Any], Arrays]:
    """Return a comparison as a header fit for JSON and its arrays, whose names begin with `key`."""
    arrays: Arrays = {}
    for position, table in enumerate(comparison.tables.values()):
        arrays |= _arrays(table, f"{key}{position}")
    tables = [_table_header(table) for table in comparison.tables.values()]
    return plain_fields(comparison) | {"tables": tables}, arrays


def comparison_fields(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a comparison's header holds besides its tables, ready to make a comparison of."""
    return {name: value for name, value in header.items() if name not in ("kind", "format", "tables")}


def table_fields(header: Mapping[str, Any], arrays: Arrays, key: str) -> dict[str, Any]:
    """Return a table's header and arrays, ready to make a table of."""
    low, high = header["bounds"]
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    holes = {(layer_a, layer_b): reason for layer_a, layer_b, reason in header["holes"]}
    reasons = {(a, b): reason for reason, pairs in header.get("error_reasons", {}).items() for a, b in pairs}
    own = {"bounds": bounds, "holes": holes, "error_reasons": reasons, "values": arrays[f"{key}/values"]}
    return {**header, **own, **{name: arrays.get(f"{key}/{name}") for name in OPTIONAL}}


def _arrays(table: Values, key: str) -> Arrays:
    found = {name: getattr(table, name) for name in ("values", *OPTIONAL)}
    return {f"{key}/{name}": array for name, array in found.items() if array is not None}


def _table_header(table: Values) -> dict[str, Any]:
    header = {name: value for name, value in plain_fields(table).items() if name not in ("values", *OPTIONAL)}
    header["holes"] = [[*pair, reason] for pair, reason in table.holes.items()]
    # JSON has no infinity: an open end is null
    header["bounds"] = [bound if math.isfinite(bound) else None for bound in table.bounds]
    return header | {"error_reasons": _by_reason(table.error_reasons)}


def _by_reason(reasons: Mapping[tuple[str, str], str]) -> dict[str, list[list[str]]]:
    """Return the pairs by their reason, which is often one for a whole table."""
    found: dict[str, list[list[str]]] = {}
    for pair, reason in reasons.items():
        found.setdefault(reason, []).append(list(pair))
    return found
