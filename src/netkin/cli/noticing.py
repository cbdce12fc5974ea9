"""What two comparisons show, in plain words; every word follows from the numbers."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netkin.results import Comparison, Values


def observations(first: Comparison, second: Comparison) -> list[str]:
    """Return sentences about two comparisons that share their model `a`, their layers and their measures."""
    sentences = [_closer(first, second, measure) for measure in first.measures]
    leading = first.measures[0]
    sentences += [_extremes(comparison, leading) for comparison in (first, second)]
    sentences += [_matched(comparison) for comparison in (first, second)]
    return [sentence for sentence in sentences if sentence]


def corresponding(table: Values) -> dict[str, float]:
    """Return the value of every layer with the layer of the same name, without holes."""
    common = [name for name in table.layers_a if name in table.layers_b and (name, name) not in table.holes]
    return {name: table[name, name] for name in common}


def _closer(first: Comparison, second: Comparison, measure: str) -> str:
    tables = first[measure], second[measure]
    if not all(map(corresponding, tables)):
        return ""
    one, other = (fmean(corresponding(table).values()) for table in tables)
    kind = "a similarity" if tables[0].higher_is_closer else "a distance"
    verdict = _verdict(first, second, one, other, tables[0].higher_is_closer)
    return (
        f"{measure}, {kind}: layers of the same name average {one:.2f} for {_pair(first)} and {other:.2f} for "
        f"{_pair(second)}, so {verdict}."
    )


def _verdict(first: Comparison, second: Comparison, one: float, other: float, higher_is_closer: bool) -> str:
    if round(one, 2) == round(other, 2):
        return f"{first.a} is as close to {first.b} as to {second.b}"
    nearer = first if (one > other) == higher_is_closer else second
    return f"{first.a} is closer to {nearer.b}"


def _extremes(comparison: Comparison, measure: str) -> str:
    table = comparison[measure]
    values = corresponding(table)
    if len(values) < 2:
        return ""
    ordered = sorted(values, key=lambda name: values[name], reverse=table.higher_is_closer)
    near, far = ordered[0], ordered[-1]
    return (
        f"By {measure}, {_pair(comparison)} are most alike at {near} ({values[near]:.2f}) and differ most at {far} "
        f"({values[far]:.2f})."
    )


def _matched(comparison: Comparison) -> str:
    counts = ", ".join(_match_count(name, table) for name, table in comparison.tables.items())
    return f"Layers of {comparison.a} whose closest layer in {comparison.b} is the one of the same name: {counts}."


def _match_count(name: str, table: Values) -> str:
    matches = table.best_matches()
    return f"{sum(layer == match for layer, (match, _) in matches.items())} of {len(matches)} by {name}"


def _pair(comparison: Comparison) -> str:
    return f"{comparison.a} and {comparison.b}"
