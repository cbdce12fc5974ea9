"""Tables of texts that fit a terminal.

Layers whose names do not fit get numbers, so that a shortened name is never taken for another.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from netkin.results.labels import brief, told_apart


def grid(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> list[str]:
    """Return the lines of a table with named rows and columns, none longer than `width`."""
    if not (rows and columns):
        return ["no layers"]
    lines = _block(list(rows), list(columns), entries)
    return lines if len(lines[0]) <= width else list(_numbered(rows, columns, entries, width))


def _numbered(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> Iterator[str]:
    """Number the layers; where the table is still too wide, show its columns in several blocks, one below the other."""
    cell = max(len(str(len(columns))), *(len(entry) for line in entries for entry in line)) + 2
    whole, limit = _listed(brief(rows)), max(width // 3, 12)
    short = whole if max(map(len, whole)) <= limit else _listed(map(told_apart(rows).__getitem__, rows))
    labels = [_cut(label, limit) for label in short]
    named = _block(labels, list(columns), entries)
    if len(named[0]) <= width:  # columns keep their names where only those of the rows are too long
        yield from named
        yield from [] if labels == whole else [wrapped(f"rows: {', '.join(_listed(rows))}", width)]
        return
    many = max((width - max(map(len, labels))) // cell, 1)
    if many < len(columns) and sys.stdout.isatty():
        kept = _ends(len(columns), max(many - 1, 1))
        yield from _middle_left_out(labels, entries, kept, cell)
        yield from _legend(rows, columns, labels == whole, width, kept)
        shown = f"{len(kept)} of {len(columns)} columns are shown; `| less` behind the command"
        yield wrapped(f"{shown}, --json, --report or, in Python, `to_pandas()` show all", width)
        return
    for start in range(0, len(columns), many):
        numbers = [str(i + 1) for i in range(start, min(start + many, len(columns)))]
        yield from _block(labels, numbers, [line[start : start + many] for line in entries], cell)
    yield from _legend(rows, columns, labels == whole, width)


def _ends(count: int, many: int) -> list[int]:
    """Return the places of the first and the last columns, as many as fit."""
    last = many // 2
    return [*range(many - last), *range(count - last, count)]


def _middle_left_out(labels: list[str], entries: list[list[str]], kept: list[int], cell: int) -> list[str]:
    """Return the table with some columns, and an ellipsis for those between the first and the last of them."""
    lines = [[str(i + 1) for i in kept], *([line[i] for i in kept] for line in entries)]
    for line in lines:
        line.insert(len(kept) - len(kept) // 2, "…")
    return _block(labels, lines[0], lines[1:], cell)


def _legend(
    rows: Sequence[str], columns: Sequence[str], readable: bool, width: int, kept: Sequence[int] | None = None
) -> Iterator[str]:
    """Say what the numbers stand for, unless the rows' labels say it; of the columns those that are `kept`."""
    if not readable:
        yield wrapped(f"rows: {', '.join(_listed(rows))}", width)
    same, named = tuple(rows) == tuple(columns), _listed(columns)
    named = named if kept is None else [named[i] for i in kept]
    yield wrapped("columns have the numbers of the rows" if same else f"columns: {', '.join(named)}", width)


def _listed(names: Iterable[str]) -> list[str]:
    return [f"{i} {name}" for i, name in enumerate(names, start=1)]


def fits(rows: Sequence[str], columns: Sequence[str], entries: list[list[str]], width: int) -> bool:
    return not (rows and columns) or len(_block(list(rows), list(columns), entries)[0]) <= width


def _block(rows: list[str], columns: list[str], entries: list[list[str]], cell: int = 0) -> list[str]:
    margin = max(map(len, rows))
    sizes = [max(len(name) + 2, cell, *(len(line[j]) + 2 for line in entries)) for j, name in enumerate(columns)]
    body = zip(["", *rows], [columns, *entries], strict=True)
    lines = [(label.ljust(margin), zip(line, sizes, strict=True)) for label, line in body]
    return [(label + "".join(entry.rjust(size) for entry, size in line)).rstrip() for label, line in lines]


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
