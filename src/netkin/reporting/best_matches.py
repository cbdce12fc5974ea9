"""Which layer of one model stands where a layer of the other does."""

from __future__ import annotations

from collections.abc import Sequence

from netkin.results import Comparison
from netkin.results.listings import has_classes, listing


def partners(comparison: Comparison) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of layers that correspond, and in what; none where the columns are classes.

    Of a comparison that is a list of pairs it is these; they may correspond in nothing but having been asked for.
    """
    if has_classes(comparison):
        return [], ""
    (found, how), listed = corresponding(comparison.layers_a, comparison.layers_b), listing(comparison)
    return (listed, how if set(listed) <= set(found) else "") if listed else (found, how)


def corresponding(rows: Sequence[str], columns: Sequence[str]) -> tuple[list[tuple[int, int]], str]:
    """Return the pairs of places that correspond, and in what: name, place, or relative depth.

    Example:
        >>> corresponding(["in", "mid", "out"], ["in", "out"])
        ([(0, 0), (2, 1)], 'same name')
        >>> corresponding(["a", "b", "c"], ["x", "y", "z", "u", "v"])
        ([(0, 0), (1, 2), (2, 4)], 'same relative depth')
    """
    places = {name: j for j, name in enumerate(columns)}
    named = [(i, places[name]) for i, name in enumerate(rows) if name in places]
    if named or not (rows and columns):
        return named, "same name"
    if len(rows) == len(columns):
        return [(i, i) for i in range(len(rows))], "same place"
    return [(i, _relative(i, len(rows), len(columns))) for i in range(len(rows))], "same relative depth"


def _relative(place: int, count: int, other: int) -> int:
    return round(place * (other - 1) / (count - 1)) if count > 1 else 0
