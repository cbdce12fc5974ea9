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
    own = {"bounds": bounds, "holes": holes, "values": arrays[f"{key}/values"], "errors": arrays.get(f"{key}/errors")}
    return {**header, **own}


def _arrays(table: Values, key: str) -> Arrays:
    errors = {} if table.errors is None else {f"{key}/errors": table.errors}
    return {f"{key}/values": table.values, **errors}


def _table_header(table: Values) -> dict[str, Any]:
    header = {name: value for name, value in plain_fields(table).items() if name not in ("values", "errors")}
    header["holes"] = [[*pair, reason] for pair, reason in table.holes.items()]
    # JSON has no infinity: an open end is null
    header["bounds"] = [bound if math.isfinite(bound) else None for bound in table.bounds]
    return header
