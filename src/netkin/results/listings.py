"""Listings: where each layer meets one other at most, a comparison is a list of pairs, and a matrix would be empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

NOT_ASKED = "this pair was not asked for"

Place = tuple[int, int]


def listing(comparison: Comparison) -> list[Place]:
    """Return the pairs of a comparison that is a list; none where a matrix has more to show."""
    return [] if has_classes(comparison) else listed_pairs(list(comparison.tables.values()))


def listed_pairs(tables: Sequence[Values]) -> list[Place]:
    """Return the places of the pairs that were asked for, or none where a layer was to meet several."""
    asked = np.zeros(tables[0].values.shape if tables else (0, 0), dtype=bool)
    for table in tables:
        asked |= _asked(table)
    alone = all((asked.sum(axis=axis) <= 1).all() for axis in (0, 1))
    return [(i, j) for i, j in np.argwhere(asked).tolist()] if alone else []


def _asked(table: Values) -> np.ndarray:
    rows, columns = ({name: k for k, name in enumerate(names)} for names in (table.layers_a, table.layers_b))
    asked = np.ones(table.values.shape, dtype=bool)
    for (a, b), reason in table.holes.items():
        asked[rows[a], columns[b]] = reason != NOT_ASKED
    return asked


def has_classes(comparison: Comparison) -> bool:
    """Say whether the columns are classes, as of `nk.class_sensitivity`, and so correspond to no layer."""
    return any(table.axes[1] == "class" for table in comparison.tables.values())


def has_networks(comparison: Comparison) -> bool:
    """Say whether rows and columns are whole networks, as of `nk.atom_similarity`, and no layers."""
    return any(table.axes[0] == "network" for table in comparison.tables.values())


def is_worth(table: Values) -> bool:
    """Tell whether a table says what stitches are worth, and not how alike layers are."""
    return table.kind == "worth"


def is_of_tasks(table: Values) -> bool:
    """Tell whether a table compares two tasks, each with data of its own."""
    return "shared_examples" in table.parameters


def is_apart(table: Values) -> bool:
    """Tell whether a table compares tasks that do not have the same examples in the same buckets."""
    return is_of_tasks(table) and table.parameters["shared_examples"] != 1


def pair_label(tables: Iterable[Values], a: str, b: str) -> str:
    """Return the name of a pair of layers: one name where both have the same."""
    return a if a == b else f"{a} {'→' if any(map(is_worth, tables)) else '×'} {b}"


def column_label(table: Values) -> str:
    """Return what tells a table from others of its name: how layers were stitched, or the whole id."""
    return str(table.parameters.get("how", table.id)) if is_worth(table) else table.id


def by_name(tables: Iterable[Values]) -> dict[str, list[Values]]:
    """Return the tables that have one name and other parameters together, such as a score by all methods."""
    found: dict[str, list[Values]] = {}
    for table in tables:
        found.setdefault(table.name, []).append(table)
    return found
