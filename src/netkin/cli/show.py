"""`netkin show`: what a saved file holds, read from its header alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import click

from netkin.cli.documents import aligned, as_json
from netkin.cli.options import FILE, JSON
from netkin.cli.refusals import refusing

EXAMPLE = """\b
Example:
  netkin show ab.netkin
"""
LONGEST = 100  # characters of a value
UNFOLDED = ("identity", "provenance")  # whose entries stand in lines of their own
LEFT_OUT = ("kind", "format", "state", *UNFOLDED)  # the state of a training tells a reader nothing
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@click.command(epilog=EXAMPLE)
@click.argument("file", type=FILE)
@JSON
@refusing
def show(file: Path, json: bool) -> None:
    """Say what kind of result FILE holds, how it came to be, and which arrays it has.

    Only the header is read, however large the file is, and no model is needed. A claim's record, which is JSON, is read
    whole.
    """
    from netkin import files

    claim = files.read_start(file, 1) == b"{"
    header = files.read_json(file) if claim else files.read_header(file)
    arrays = {} if claim else files.array_shapes(file)
    shapes = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in arrays.items()}
    click.echo(as_json({**header, "arrays": shapes}) if json else _described(file, header, arrays))


def _described(file: Path, header: Mapping[str, Any], arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    numbers = sum(prod(shape) for _, shape in arrays.values())
    size = sum(prod(shape) * WIDTHS.get(dtype, 1) for dtype, shape in arrays.values())
    told = {**header, **_many(header.get("comparisons"))}
    rows = [(name.replace("_", " "), _in_short(value)) for name, value in told.items() if name not in LEFT_OUT]
    for origin in (header.get(name) for name in UNFOLDED):
        rows += [(str(name), _in_short(value)) for name, value in origin.items()] if isinstance(origin, Mapping) else []
    rows.append(("arrays", f"{len(arrays):,} of {numbers:,} numbers, {size:,} bytes" if arrays else "none"))
    return f"{file}: {header.get('kind')}\n{aligned([(f'  {name}', value) for name, value in rows])}"


def _many(comparisons: Any) -> dict[str, Any]:
    """Return what several comparisons hold together: their pairs and all that they were made of and by."""
    if not isinstance(comparisons, list):
        return {}
    each = [one for one in comparisons if isinstance(one, Mapping)]
    pairs = [f"{one.get('a')} and {one.get('b')}" for one in each]
    ids = [table["id"] for one in each for table in one.get("tables", [])]
    same = {name: [one.get(name) for one in each] for name in ("data", "examples", "version")}
    return {"comparisons": pairs, "tables": list(dict.fromkeys(ids))} | {
        name: list(dict.fromkeys(values)) for name, values in same.items()
    }


def _in_short(value: Any) -> str:
    if isinstance(value, Mapping):
        return _cut(", ".join(_entry(name, one) for name, one in value.items())) or "none"
    if isinstance(value, list):
        ids = [one["id"] for one in value if isinstance(one, Mapping) and "id" in one]
        plain = ids or [one for one in value if isinstance(one, (str, int, float))]
        return _cut(", ".join(map(str, plain))) if plain else f"{len(value):,}" if value else "none"
    return " ".join(str(value).split())


def _entry(name: Any, value: Any) -> str:
    """Return a name with its value, where that is a text or a number.

    Example:
        >>> _entry("relu1", "pool"), _entry("accuracy", 0.97222), _entry("tables", [])
        ('relu1 pool', 'accuracy 0.9722', 'tables')
    """
    value = value.get("value", value) if isinstance(value, Mapping) else value  # a number of a claim
    plain = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{name} {plain}" if isinstance(value, (str, int, float)) else str(name)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
