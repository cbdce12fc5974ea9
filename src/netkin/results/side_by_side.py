"""Two saved results of one kind side by side: which numbers differ, and what differs in how they were made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netkin import files
from netkin.errors import InvalidValue
from netkin.results.labels import HOLE, plural
from netkin.results.packing import load
from netkin.results.records import FrozenRecord, plain
from netkin.results.text import aligned, terminal_width, wrapped

SHOWN = 12  # numbers that the text lists
LONGEST = 60  # characters of a fact in the text
# the columns of the long form by which numbers of two results are matched, and the number; models are not among those
# of a comparison, as two files often name them differently
MATCHED: dict[str, tuple[tuple[str, ...], str]] = {
    "comparison": (("measure", "layer_a", "layer_b"), "value"),
    "comparisons": (("measure", "model_a", "model_b", "layer_a", "layer_b"), "value"),
    "series": (("measure", "", "layer_a", "layer_b"), "value"),  # the unit of a series, such as "step", is a column
    "ranking": (("score", "model"), "value"),
    "federation": (("client",), "accuracy"),
    "task accuracies": (("seed", "after", "task"), "accuracy"),
    "sparsity": (("network", "layer"), "sparsity"),
    "compressed": (("layer",), "accuracy"),
}
FOLDED = ("identity", "provenance")  # whose entries are facts of their own
LEFT_OUT = ("kind", "format", "state", "tables", "comparisons", "layers", "summary", *FOLDED)


@dataclass(frozen=True)
class Change:
    """A number in the old and in the new result, by the names of what it is of; None where there is none."""

    names: tuple[str, ...]
    old: float | None
    new: float | None

    @property
    def difference(self) -> float:
        """The new number less the old one; NaN where one is missing."""
        return math.nan if self.old is None or self.new is None else self.new - self.old


@dataclass(frozen=True, repr=False)
class SideBySide(FrozenRecord):
    """Two results of one kind: their numbers, matched by name, and the facts about them that differ.

    Args:
        kind: the kind of both results.
        columns: what the names of the numbers are, such as measure, layer_a and layer_b.
        changes: the numbers of both, in the order of the old result.
        facts: what else differs, such as data, seed and weights, in the old result and in the new one.
    """

    kind: str
    columns: tuple[str, ...]
    changes: tuple[Change, ...]
    facts: Mapping[str, tuple[Any, Any]]

    @property
    def moved(self) -> tuple[Change, ...]:
        """The numbers that both results have and that differ, the largest difference first."""
        moved = [change for change in self.changes if abs(change.difference) > 0]
        return tuple(sorted(moved, key=lambda change: -abs(change.difference)))

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says instead of the changes: each as a mapping."""
        rows = [
            dict(zip(self.columns, change.names, strict=True))
            | {"old": change.old, "new": change.new, "difference": change.difference}
            for change in self.changes
        ]
        return {"changes": rows, "facts": {name: {"old": old, "new": new} for name, (old, new) in self.facts.items()}}

    def __str__(self) -> str:
        width = terminal_width()
        parts = ["\n".join(wrapped(line, width) for line in self._summaries()), "\n".join(self._table())]
        if self.facts:
            facts = [
                (name.replace("_", " "), *map(_shortened, _differing(old, new)))
                for name, (old, new) in self.facts.items()
            ]
            lines = [wrapped(f"  {name}: {old} → {new}", width) for name, old, new in facts]
            parts.append("\n".join(["what else differs", *lines]))
        return "\n\n".join(filter(None, parts))

    def _summaries(self) -> Iterator[str]:
        """Yield a line for each measure or score, or one for all."""
        by_measure = self.columns[:1] in (("measure",), ("score",))
        groups: dict[str, list[Change]] = {}
        for change in self.changes:
            groups.setdefault(change.names[0] if by_measure else self.kind, []).append(change)
        for name, changes in groups.items():
            both = [abs(change.difference) for change in changes if not math.isnan(change.difference)]
            said = [f"{plural(len(both), 'number')} in both"]
            if both:
                mean = sum(both) / len(both)
                said.append(f"largest difference {max(both):.3g}, mean {mean:.3g}" if max(both) else "all equal")
            for which, other in (("old", "new"), ("new", "old")):
                alone = sum(getattr(change, which) is not None and getattr(change, other) is None for change in changes)
                said += [f"{alone:,} only in the {which} result"] if alone else []
            yield f"{name}: {', '.join(said)}"

    def _table(self) -> list[str]:
        moved = self.moved[:SHOWN]
        if not moved:
            return []
        rows = [
            [" ".join(change.names), f"{change.old:.5g}", f"{change.new:.5g}", f"{change.difference:+.2g}"]
            for change in moved
        ]
        lines = aligned([["", "old", "new", "difference"], *rows])
        left = len(self.moved) - len(moved)
        return lines + ([f"and {plural(left, 'smaller difference')}; --json lists all"] if left else [])


def side_by_side(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> SideBySide:
    """Return two saved results of one kind side by side; of other files, such as statistics, the facts alone."""
    headers = files.read_header(old), files.read_header(new)
    kinds = [str(header.get("kind")) for header in headers]
    if kinds[0] != kinds[1]:
        raise InvalidValue(
            f"{str(old)!r} holds a {kinds[0]!r} and {str(new)!r} a {kinds[1]!r}; give two results of one kind."
        )
    kind, facts = kinds[0], list(map(_facts, headers))
    differing = {
        name: (facts[0].get(name), facts[1].get(name))
        for name in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(name) != facts[1].get(name)
    }
    if kind not in MATCHED:
        return SideBySide(kind, (), (), differing)
    columns, first = _numbers(kind, load(old))
    _, second = _numbers(kind, load(new))
    changes = [Change(names, first.get(names), second.get(names)) for names in dict.fromkeys([*first, *second])]
    return SideBySide(kind, columns, tuple(changes), differing)


def _numbers(kind: str, result: Any) -> tuple[tuple[str, ...], dict[tuple[str, ...], float | None]]:
    """Return the columns that name the numbers of a result, and the numbers; None for those that are missing."""
    columns, rows = result.long_form()
    matched, number = MATCHED[kind]
    named = tuple(name or columns[0] for name in matched)
    places, value = [columns.index(name) for name in named], columns.index(number)
    return named, {tuple(str(row[place]) for place in places): plain(row[value]) for row in rows}


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a header says beside the numbers, with the entries of its provenance one by one."""
    facts = {name: value for name, value in header.items() if name not in LEFT_OUT}
    for name in FOLDED:
        facts |= header.get(name) or {}
    return facts


def _differing(old: Any, new: Any) -> tuple[Any, Any]:
    """Return two facts; of two lists or mappings what one of them has alone."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        old, new = ([f"{name} {one[name]}" for name in names if name in one] for one in (old, new))
    if isinstance(old, list) and isinstance(new, list):
        return [item for item in old if item not in new], [item for item in new if item not in old]
    return old, new


def _shortened(value: Any) -> str:
    """Return a fact as text of one line."""
    if isinstance(value, list):
        value = ", ".join(str(item.get("sentence", item) if isinstance(item, Mapping) else item) for item in value)
    text = " ".join(str(HOLE if value in (None, "") else value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
