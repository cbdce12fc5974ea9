"""Immutable records, which compare, copy and pickle by their fields; and many records as columns.

Their arrays and mappings are read-only. `checked` makes a record of a file's content, and checks that every field has
the type that the record declares. Columns hold for each field its distinct values, and which of them each record has.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from netkin.errors import MissingExtra, NameClash, refuse_half_characters

MOST = 4096  # values that are shared at once
PLAIN = frozenset({str, int, float, bool, NoneType})

APART = ("values", "errors", "replicates", "tables")  # fields that columns leave out: arrays, and records in records

NamedArrays = dict[str, np.ndarray]
HeaderFacts = dict[str, Any]
RecordType = TypeVar("RecordType")
KeyType = TypeVar("KeyType")
ItemType = TypeVar("ItemType")

_SHARED: dict[Any, Any] = {}


def now() -> str:
    """Return the time at which a record is made, in UTC, to the second."""
    return sys.intern(datetime.now(timezone.utc).isoformat(timespec="seconds"))


def freeze(record: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def frozen_array(array: Any) -> np.ndarray:
    """Return a float64 copy of `array` that refuses to be written to."""
    copy = np.array(array, dtype=np.float64, order="C")
    copy.flags.writeable = False
    return copy


def frozen_mapping(mapping: Mapping[KeyType, ItemType], *, shared: bool = False) -> Mapping[KeyType, ItemType]:
    """Return a copy of `mapping` that refuses to be written to; one `shared` by all equal ones saves memory."""
    if not shared or not PLAIN.issuperset(map(type, mapping.values())):
        return MappingProxyType(dict(mapping))
    # by the types too, as the numbers 1 and 1.0 are equal
    key = MappingProxyType, *[(name, type(one), one) for name, one in mapping.items()]
    return _SHARED.get(key) or _share(key, MappingProxyType(dict(mapping)))


def _share(key: Any, value: ItemType) -> ItemType:
    if len(_SHARED) >= MOST:
        _SHARED.clear()
    return _SHARED.setdefault(key, value)


def distinct(names: Any, what: str) -> tuple[str, ...]:
    """Return `names` as a tuple, one for all equal names; a name that occurs twice is refused."""
    names = tuple(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise NameClash(f"{what} must have distinct names; {twice!r} occurs {names.count(twice)} times.")
    if names not in _SHARED:
        refuse_half_characters(names)
    return _SHARED.get(names) or _share(names, names)


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of `record`, its mappings as ordinary dictionaries."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def checked(kind: type[RecordType], values: Any) -> RecordType:
    """Make a record of what a file holds; a field of another type than the record declares is refused."""
    if not isinstance(values, Mapping):
        raise TypeError(f"a {kind.__name__} must be a mapping; got {type(values).__name__}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: typed(value, hints.get(name, Any), name) for name, value in values.items()})


def typed(value: Any, hint: Any, place: str) -> Any:
    """Return a value from JSON as the type `hint`: lists as tuples, mappings as records where the type is one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(value, inner, place)
    if origin is tuple and isinstance(value, (list, tuple)):
        several = inner[1:] == (...,)
        if several or len(inner) == len(value):
            wanted = [inner[0]] * len(value) if several else inner
            return tuple(typed(one, own, place) for one, own in zip(value, wanted, strict=True))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {typed(key, inner[0], place): typed(one, inner[1], place) for key, one in value.items()}
    if origin in (list, Sequence) and isinstance(value, list):
        return [typed(one, inner[0], place) for one in value]
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return checked(hint, value)
    if hint is Any or (origin is None and _is_plain(value, hint)):
        return value
    raise TypeError(f"`{place}` can't be {_short(value)}")


def refuse_misfit(fits: Mapping[str, bool]) -> None:
    """Refuse what a file holds where one of its parts, by name, does not fit the others."""
    wrong = next((part for part, fine in fits.items() if not fine), None)
    if wrong is not None:
        raise ValueError(f"its {wrong} do not fit the rest")


def _one_of(value: Any, hints: tuple[Any, ...], place: str) -> Any:
    for hint in hints:
        try:
            return typed(value, hint, place)
        except TypeError:
            continue
    raise TypeError(f"`{place}` can't be {_short(value)}")


def _is_plain(value: Any, hint: Any) -> bool:
    """Return whether a value is of a plain type: a whole number of 64 bits at most, a number, a text, an array."""
    if hint in (int, float) and not isinstance(value, bool):
        if isinstance(value, int):
            return -(2**63) <= value < 2**63
        return hint is float and isinstance(value, float) and not math.isnan(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, NoneType)) else f"a {type(value).__name__}"
    return text if len(text) < 40 else f"{text[:36]}..."


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def optional(package: str) -> Any:
    """Return the optional `package`, or refuse with the name of the extra that brings it."""
    try:
        return import_module(package)
    except ImportError as fault:
        raise MissingExtra(
            f"`to_{package}` needs the package {package!r}; install it with `pip install 'netkin[{package}]'`."
        ) from fault


class FrozenRecord:
    """A record that compares, copies and pickles by its fields."""

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), plain_fields(self))


def rebuild(kind: type[RecordType], values: dict[str, Any]) -> RecordType:
    """Make a record again from its plain fields; pickle and copy call this."""
    return kind(**values)


def same_fields(first: Any, second: Any) -> bool:
    """Return whether two records hold the same, where a hole equals a hole."""
    one, other = plain_fields(first), plain_fields(second)
    return all(_same(one[name], other[name]) for name in one)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) != isinstance(second, np.ndarray):
        return False
    return np.array_equal(first, second, equal_nan=True) if isinstance(first, np.ndarray) else bool(first == second)


# --- as JSON ----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return `value` in a form for JSON: NumPy's numbers become Python's, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if is_dataclass(value):
        return plain(plain_fields(value))
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, bool, int, type(None))) else str(value)


def parameters(given: Mapping[str, Any]) -> HeaderFacts:
    """Return a measure's parameters in a form for JSON, which has no infinite numbers: as ``{"float": "inf"}``."""
    infinite = [name for name, value in given.items() if isinstance(value, float) and math.isinf(value)]
    return {name: {"float": str(value)} if name in infinite else plain(value) for name, value in given.items()}


def read_parameter(written: Any) -> Any:
    """Return the parameter that `parameters` wrote."""
    return float(written["float"]) if isinstance(written, Mapping) else written


# --- many records as columns ------------------------------------------------------------------------------------------

# Comparisons of one study differ in little but their numbers. As columns they take the room of their numbers and of a
# few whole numbers, and a text that many share is written, and checked when it is read, once.


def _types_of_columns(kind: type[Any]) -> HeaderFacts:
    """Return the types of the fields but for those that are written in ways of their own."""
    hints = _hints(kind)  # type: ignore[arg-type]
    return {one.name: hints[one.name] for one in fields(kind) if one.name not in APART}


def columns_of(records: Sequence[Any], kind: type[Any], arrays: NamedArrays) -> HeaderFacts:
    """Return the distinct values of each field, for JSON; which of them each record has is put into `arrays`."""
    found: HeaderFacts = {}
    for name, hint in _types_of_columns(kind).items():
        own, key = [getattr(record, name) for record in records], f"{kind.__name__} {name}"
        if get_origin(hint) is Mapping:  # of which many share some entries, as the weights of a model
            found[name], own = _entries(own)
            kept, places = _distinct(own)
            arrays[f"{key}: sizes"] = np.array([len(one) for one in kept], dtype=np.int32)
            arrays[f"{key}: entries"] = np.array([place for one in kept for place in one], dtype=np.int32)
        elif hasattr(hint, "to_header"):
            # as text, where 1, 1.0 and True differ; tables share few quantities
            texts = {key: json.dumps(one.to_header()) for key, one in {id(one): one for one in own}.items()}
            kept, places = _distinct(texts[id(one)] for one in own)
            found[name] = [json.loads(text) for text in kept]
        else:
            kept, places = _distinct(own)
            found[name] = plain(kept)
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
    entries, places = _distinct((key, one, type(one)) for mapping in mappings for key, one in mapping.items())
    each = iter(places)
    written = [[plain(key), parameters({"": one})[""]] for key, one, _ in entries]
    return written, [tuple([next(each) for _ in mapping]) for mapping in mappings]


def records_of(columns: Mapping[str, Any], kind: type[Any], arrays: Mapping[str, np.ndarray]) -> Iterator[HeaderFacts]:
    """Yield the fields of each record; those that are equal are one object."""
    found, hints = [], _types_of_columns(kind)
    for name, written in columns.items():
        key = f"{kind.__name__} {name}"
        values = _checked_column(name, written, hints[name])
        if get_origin(hints[name]) is Mapping:
            each = iter(arrays[f"{key}: entries"].tolist())
            values = [dict([values[next(each)] for _ in range(size)]) for size in arrays[f"{key}: sizes"].tolist()]
        found.append([values[place] for place in arrays[key].tolist()])
    for row in zip(*found, strict=True):
        yield dict(zip(columns, row, strict=True))


def _checked_column(name: str, written: Sequence[Any], hint: Any) -> list[Any]:
    """Return the distinct values of a field, or of a mapping's entries, each of the type that the record declares."""
    if hasattr(hint, "from_header"):
        return [hint.from_header(one) for one in written]
    if get_origin(hint) is not Mapping:
        return [typed(one, hint, name) for one in written]
    key_hint, value_hint = get_args(hint)
    return [(typed(key, key_hint, name), typed(read_parameter(one), value_hint, name)) for key, one in written]
