"""Results as plain text that fits a terminal.

Layers whose names do not fit get numbers, so that a shortened name is never taken for another.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from netkin.results.listings import (
    NOT_ASKED,
    by_name,
    column_label,
    has_classes,
    is_worth,
    listed_pairs,
    listing,
    pair_label,
)

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.comparisons import Comparisons
    from netkin.results.values import Values

HOLE = "–"


def comparison_as_text(comparison: Comparison) -> str:
    """Return all tables of a comparison under a heading that says what was compared on what."""
    width = terminal_width()
    parts = ["\n".join(_heading(comparison, width))]
    parts += list(_tables(comparison, width))
    parts += [wrapped(f"warning: {warning}", width) for warning in comparison.warnings]
    return "\n\n".join(parts)


def _tables(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield a matrix for each measure or, where each layer meets one other at most, a list for all of one name."""
    tables, pairs = list(comparison.tables.values()), listing(comparison)
    for some in by_name(tables).values() if pairs else [[table] for table in tables]:
        yield _list_as_text(some, pairs, width) if pairs else _matrix_as_text(some[0], width)


def heading_as_text(comparison: Comparison) -> str:
    """Return what was compared on what."""
    return "\n".join(_heading(comparison, terminal_width()))


def values_as_text(table: Values) -> str:
    """Return one measure's table under a line that says what its numbers are."""
    width, pairs = terminal_width(), listed_pairs([table])
    return _list_as_text([table], pairs, width) if pairs else _matrix_as_text(table, width)


def _matrix_as_text(table: Values, width: int) -> str:
    lines = [wrapped(_about(table), width), *grid(table.layers_a, table.layers_b, cells(table.values), width)]
    return "\n".join([*lines, *(wrapped(line, width) for line in reasons(table.holes))])


def _list_as_text(tables: Sequence[Values], pairs: Sequence[tuple[int, int]], width: int) -> str:
    """Return tables of one name side by side, a row for each pair of layers."""
    rows, columns = zip(*pairs, strict=True)
    labels = [pair_label(tables, tables[0].layers_a[i], tables[0].layers_b[j]) for i, j in pairs]
    entries = cells(np.array([table.values[rows, columns] for table in tables]).T)
    holes = {(f"{a} {b}", why): why for t in tables for (a, b), why in t.holes.items() if why != NOT_ASKED}
    lines = [wrapped(_about(table), width) for table in tables]
    lines += grid(labels, list(map(column_label, tables)), entries, width)
    return "\n".join([*lines, *(wrapped(line, width) for line in reasons(holes))])


def _about(table: Values) -> str:
    return f"{table.id}: {direction(table)}, {_range(table)}, {table.exactness}{_error(table)}"


def summary_as_text(comparisons: Comparisons) -> str:
    """Return for each measure a table of models by models: the mean over corresponding layers."""
    width, models = terminal_width(), comparisons.models
    lines = [wrapped(f"{len(models)} models, {len(comparisons)} pairs: means over layers of the same name", width)]
    for measure in comparisons.measures:
        lines += ["", measure, *grid(models, models, cells(comparisons.summary(measure)), width)]
    return "\n".join(lines)


def cells(values: np.ndarray) -> list[list[str]]:
    """Return numbers with two decimals, holes as a dash; very large or very small ones as powers of ten.

    Example:
        >>> cells(np.array([[0.123, -0.001], [float("nan"), 12.0]]))
        [['0.12', '0.00'], ['–', '12.00']]
    """
    largest = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
    style = ".2f" if largest == 0 or 0.1 <= largest < 1e5 else ".1e"
    return [[_cell(value, style) for value in row] for row in values.tolist()]


def grid(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> list[str]:
    """Return the lines of a table with named rows and columns, none longer than `width`."""
    if not (rows and columns):
        return ["no layers"]
    lines = _block(list(rows), list(columns), entries)
    return lines if len(lines[0]) <= width else list(_numbered(rows, columns, entries, width))


def brief(names: Sequence[str]) -> list[str]:
    """Return the names with the parts that all of them share as dots, unless that would make two of them alike.

    Example:
        >>> brief(["encoder.layer.0.out.dense", "encoder.layer.0.out.norm", "encoder.layer.1.out.norm"])
        ['…0…dense', '…0…norm', '…1…norm']
    """
    parts = [name.split(".") for name in names]
    shared = set.intersection(*map(set, parts)) if len(names) > 1 else set()
    dotted = (".".join("…" if part in shared else part for part in own) for own in parts)
    short = [re.sub(r"\.?…[.…]*", "…", name) for name in dotted]
    return short if len(set(short)) == len(names) and "…" not in short else list(names)


def _numbered(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> Iterator[str]:
    """Number the layers; where the table is still too wide, show its columns in several blocks, one below the other."""
    cell = max(len(str(len(columns))), *(len(entry) for line in entries for entry in line)) + 2
    whole, limit = [f"{i} {name}" for i, name in enumerate(brief(rows), start=1)], max(width // 3, 12)
    labels = [_cut(label, limit) for label in whole]
    many = max((width - max(map(len, labels))) // cell, 1)
    for start in range(0, len(columns), many):
        numbers = [str(i + 1) for i in range(start, min(start + many, len(columns)))]
        yield from _block(labels, numbers, [line[start : start + many] for line in entries], cell)
    yield from _legend(rows, columns, labels == whole, width)


def _legend(rows: Sequence[str], columns: Sequence[str], readable: bool, width: int) -> Iterator[str]:
    """Say what the numbers stand for, unless the rows' labels say it."""
    if not readable:
        yield wrapped(f"rows: {_listed(rows)}", width)
    same = tuple(rows) == tuple(columns)
    yield wrapped("columns have the numbers of the rows" if same else f"columns: {_listed(columns)}", width)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{i} {name}" for i, name in enumerate(names, start=1))


def _block(rows: list[str], columns: list[str], entries: list[list[str]], cell: int = 0) -> list[str]:
    margin = max(map(len, rows))
    sizes = [max(len(name) + 2, cell, *(len(line[j]) + 2 for line in entries)) for j, name in enumerate(columns)]
    body = zip(["", *rows], [columns, *entries], strict=True)
    return [label.ljust(margin) + "".join(e.rjust(s) for e, s in zip(line, sizes, strict=True)) for label, line in body]


def _heading(comparison: Comparison, width: int) -> Iterator[str]:
    yield wrapped(f"{comparison.a} (rows) and {comparison.b} (columns), layer by layer", width)
    yield wrapped(f"on {comparison.data}: {comparison.examples:,} examples, seed {comparison.seed}", width)
    columns = {} if has_classes(comparison) else comparison.shapes_b
    kinds = Counter([*comparison.shapes_a.values(), *columns.values()])
    if kinds:
        counted = ", ".join(f"{kind} ({count} layers)" for kind, count in kinds.most_common())
        yield wrapped(f"what one example is: {next(iter(kinds)) if len(kinds) == 1 else counted}", width)
    if not comparison.complete:
        yield wrapped("interrupted: the numbers come from a part of the data or the pairs", width)


def reasons(holes: Mapping[tuple[str, str], str], what: str = "pair") -> Iterator[str]:
    """Yield one line for each reason, the commonest first, five at most; `what` are those that are missing."""
    counted = Counter(holes.values()).most_common()
    for reason, count in counted[:5]:
        yield f"{HOLE}  {reason} ({count} {what if count == 1 else f'{what}s'})"
    if len(counted) > 5:
        yield f"{HOLE}  and {len(counted) - 5} other reasons; `holes` lists all"


def direction(table: Values) -> str:
    """Say which way a measure's numbers run."""
    if is_worth(table):
        return f"worth of a stitch ({'higher' if table.higher_is_closer else 'lower'} is better)"
    return "similarity (higher is closer)" if table.higher_is_closer else "distance (lower is closer)"


def _range(table: Values) -> str:
    low, high = (f"{bound:.4g}" for bound in table.bounds)
    if math.isinf(table.bounds[1]):
        return "unbounded" if math.isinf(table.bounds[0]) else f"from {low}"
    return f"at most {high}" if math.isinf(table.bounds[0]) else f"{low} to {high}"


def _error(table: Values) -> str:
    if table.errors is None or not np.isfinite(table.errors).any():
        return ""
    return f", standard errors up to {np.nanmax(table.errors):.2g}"


def _cell(value: float, style: str) -> str:
    text = HOLE if math.isnan(value) else format(value, style)
    return text.removeprefix("-") if text == "-0.00" else text


def _cut(label: str, width: int) -> str:
    """Keep the head, with its number, and as much of the tail as fits: the ends of layer names differ most."""
    head = width // 2
    return label if len(label) <= width else f"{label[:head]}…{label[len(label) - (width - head - 1) :]}"


def wrapped(text: str, width: int) -> str:
    """Return a sentence in lines of `width`, all but the first indented."""
    return textwrap.fill(text, width, subsequent_indent="   ", break_on_hyphens=False)


def terminal_width() -> int:
    """Return how many characters fit a line, 40 at least."""
    return max(shutil.get_terminal_size().columns, 40)
