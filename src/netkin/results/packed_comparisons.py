"""Many comparisons as columns: for each field its distinct values, and which of them each comparison has.

Comparisons of one study differ in little but their numbers. As columns they take the room of their numbers and of a few
whole numbers, and a text that many share is written, and checked when it is read, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from netkin.results.comparison import Comparison
from netkin.results.packing import HeaderFacts, NamedArrays, parameters, plain, read_parameter
from netkin.results.records import typed
from netkin.results.values import Values

NUMBERS = ("values", "errors", "replicates")  # of a table; it may be without the last two


def packed_columns(comparisons: Sequence[Comparison]) -> tuple[HeaderFacts, NamedArrays]:
    """Return comparisons as a header for JSON and arrays."""
    tables = [table for one in comparisons for table in one.tables.values()]
    arrays: NamedArrays = {"tables of each": np.array([len(one.tables) for one in comparisons], dtype=np.int64)}
    for name in NUMBERS:
        found = [getattr(table, name) for table in tables]
        arrays[name] = np.concatenate([np.zeros(0), *(one.ravel() for one in found if one is not None)])
        arrays[f"has {name}"] = np.array([one is not None for one in found], dtype=bool)
    return {
        "comparisons": _columns(comparisons, Comparison, arrays),
        "tables": _columns(tables, Values, arrays),
    }, arrays


def unpacked_columns(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Comparison]:
    """Return the comparisons that `packed_columns` took apart."""
    tables, counts = _tables(header["tables"], arrays), arrays["tables of each"].tolist()
    return [
        Comparison(**own, tables={table.id: table for table in (next(tables) for _ in range(count))})
        for own, count in zip(_records(header["comparisons"], Comparison, arrays), counts, strict=True)
    ]


# --- fields -----------------------------------------------------------------------------------------------------------


def _hints(kind: type[Any]) -> HeaderFacts:
    """Return the types of the fields that are no arrays and no tables."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.name not in (*NUMBERS, "tables")}


def _columns(records: Sequence[Any], kind: type[Any], arrays: NamedArrays) -> HeaderFacts:
    """Return the distinct values of each field, for JSON; which of them each record has is put into `arrays`."""
    found: HeaderFacts = {}
    for name, hint in _hints(kind).items():
        own, key = [getattr(record, name) for record in records], f"{kind.__name__} {name}"
        if get_origin(hint) is Mapping:  # of which many share some entries, as the weights of a model
            found[name], own = _entries(own)
            distinct, places = _distinct(own)
            arrays[f"{key}: sizes"] = np.array([len(one) for one in distinct], dtype=np.int32)
            arrays[f"{key}: entries"] = np.array([place for one in distinct for place in one], dtype=np.int32)
        else:
            distinct, places = _distinct(own)
            found[name] = plain(distinct)
        arrays[key] = np.array(places, dtype=np.int32)
    return found


def _distinct(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct values in the order in which they come, and the place of each there."""
    known: dict[Any, int] = {}
    places = [known.setdefault(value, len(known)) for value in values]
    return list(known), places


def _entries(mappings: Sequence[Mapping[Any, Any]]) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Return the distinct entries (key, value) of all mappings, for JSON, and the places of those that each has."""
    # by the type too, as the numbers 1 and 1.0 are equal
    distinct, places = _distinct((key, one, type(one)) for mapping in mappings for key, one in mapping.items())
    each = iter(places)
    written = [[plain(key), parameters({"": one})[""]] for key, one, _ in distinct]
    return written, [tuple([next(each) for _ in mapping]) for mapping in mappings]


def _records(columns: Mapping[str, Any], kind: type[Any], arrays: Mapping[str, np.ndarray]) -> Iterator[HeaderFacts]:
    """Yield the fields of each record; those that are equal are one object."""
    found, hints = [], _hints(kind)
    for name, written in columns.items():
        key = f"{kind.__name__} {name}"
        values = _checked(name, written, hints[name])
        if get_origin(hints[name]) is Mapping:
            each = iter(arrays[f"{key}: entries"].tolist())
            values = [dict([values[next(each)] for _ in range(size)]) for size in arrays[f"{key}: sizes"].tolist()]
        found.append([values[place] for place in arrays[key].tolist()])
    for row in zip(*found, strict=True):
        yield dict(zip(columns, row, strict=True))


def _checked(name: str, written: Sequence[Any], hint: Any) -> list[Any]:
    """Return the distinct values of a field, or of a mapping's entries, each of the type that the record declares."""
    if name == "bounds":
        return [(-math.inf if low is None else low, math.inf if high is None else high) for low, high in written]
    if get_origin(hint) is not Mapping:
        return [typed(one, hint, name) for one in written]
    key_hint, value_hint = get_args(hint)
    return [(typed(key, key_hint, name), typed(read_parameter(one), value_hint, name)) for key, one in written]


def _tables(columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Values]:
    has = zip(*(arrays[f"has {name}"].tolist() for name in NUMBERS), strict=True)
    starts = dict.fromkeys(NUMBERS, 0)
    for own, present in zip(_records(columns, Values, arrays), has, strict=True):
        table = len(own["layers_a"]), len(own["layers_b"])
        shapes = {"values": table, "errors": table, "replicates": (len(own["chunk_sizes"]), *table)}
        numbers: dict[str, Any] = {}
        for name in (name for name, is_there in zip(NUMBERS, present, strict=True) if is_there):
            stop = starts[name] + math.prod(shapes[name])
            numbers[name] = arrays[name][starts[name] : stop].reshape(shapes[name])
            starts[name] = stop
        yield Values(**own, **numbers)
