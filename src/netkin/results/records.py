"""Records: immutable, compared, copied and pickled by their fields, and described by these for files and documents.

A record is described by its fields, a mapping or a tuple by its items, and reasons by the pairs that have them. A file
holds the description as its header, with the arrays beside it. A document, which `--json` prints and pages carry, is
the same description with its arrays as lists, and with what is read off the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from netkin.errors import NameClash, import_optional, require_utf8

MOST = 4096  # values that are shared at once
PLAIN = frozenset({str, int, float, bool, NoneType})

Header = dict[str, Any]
NamedArrays = dict[str, np.ndarray]
RecordType = TypeVar("RecordType")
ValueType = TypeVar("ValueType")

_SHARED: dict[Any, Any] = {}
_TYPES: dict[Any, dict[str, Any]] = {}  # of the fields of each kind of record


def now() -> str:
    """Return the time at which a record is made, in UTC, to the second."""
    return sys.intern(datetime.now(timezone.utc).isoformat(timespec="seconds"))


def optional(package: str) -> Any:
    """Return the optional `package`, or refuse with the name of the extra that brings it."""
    return import_optional(package, package, f"`to_{package}`")


# --- immutable records ------------------------------------------------------------------------------------------------


class FrozenRecord:
    """A dataclass that compares, copies and pickles by its fields, whose arrays and mappings are read-only.

    Fields that are declared as arrays, mappings or tuples become such, whatever they were given as.
    """

    def __post_init__(self) -> None:
        freeze(self, **{name: _frozen(getattr(self, name), hint) for name, hint in field_types(type(self)).items()})

    def __eq__(self, other: object) -> bool:
        return _same(plain_fields(self), plain_fields(other)) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **plain_fields(self)), ()


def freeze(record: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields."""
    if kind not in _TYPES:
        hints = get_type_hints(kind)
        _TYPES[kind] = {field.name: hints[field.name] for field in fields(kind)}
    return _TYPES[kind]


def _frozen(value: Any, hint: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return value if value is None else _frozen(value, inner[0])
    if hint is np.ndarray:
        return frozen_array(value, np.float64)
    if isinstance(value, Mapping):
        of_items = inner[1] if inner else None
        if of_items is np.ndarray:  # weights, which keep their precision
            return MappingProxyType({name: frozen_array(array) for name, array in value.items()})
        return frozen_mapping({name: _frozen(item, of_items) for name, item in value.items()})
    if origin is tuple:
        hints = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(kind(item) if kind in (int, float) else item for item, kind in zip(value, hints, strict=True))
    return value


def frozen_array(array: Any, dtype: Any = None) -> np.ndarray:
    """Return a copy of `array` that refuses to be written to."""
    copy = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def frozen_mapping(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a copy of `mapping` that refuses to be written to; one for all equal ones, which saves memory."""
    if not PLAIN.issuperset(map(type, mapping.values())):
        return MappingProxyType(dict(mapping))
    # by the types too, as the numbers 1 and 1.0 are equal
    key = MappingProxyType, *[(name, type(value), value) for name, value in mapping.items()]
    return _SHARED.get(key) or _share(key, MappingProxyType(dict(mapping)))


def distinct(names: Any, what: str) -> tuple[str, ...]:
    """Return `names` as a tuple, one for all equal names; a name that occurs twice is refused."""
    names = tuple(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise NameClash(f"{what} must have distinct names; {twice!r} occurs {names.count(twice)} times.")
    if names not in _SHARED:
        require_utf8(names)
    return _SHARED.get(names) or _share(names, names)


def _share(key: Any, value: ValueType) -> ValueType:
    if len(_SHARED) >= MOST:
        _SHARED.clear()
    return _SHARED.setdefault(key, value)


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of `record`, its mappings as ordinary dictionaries."""
    return {name: _thawed(getattr(record, name)) for name in field_types(type(record))}


def _thawed(value: Any) -> Any:
    return {key: _thawed(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _same(first: Any, second: Any) -> bool:
    """Return whether two fields hold the same, where a hole equals a hole."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second, equal_nan=True)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())
    return type(first) is not np.ndarray and type(second) is not np.ndarray and bool(first == second)


# --- records as descriptions, and back --------------------------------------------------------------------------------


def packed(record: Any) -> tuple[Header, NamedArrays]:
    """Return a record as a header for JSON and its arrays."""
    arrays: NamedArrays = {}
    return {name: describe_value(getattr(record, name), arrays, name) for name in field_types(type(record))}, arrays


def plain(value: Any) -> Any:
    """Return `value` in a form for JSON documents: records and arrays become mappings and lists.

    NumPy's numbers become Python's, what is not finite becomes null, and a record adds what its method `derived` reads
    off it, without its fields that are `left_out`.
    """
    return describe_value(value, None)


def describe_value(value: Any, arrays: NamedArrays | None, key: str = "") -> Any:
    """Return the description of a value for a file, whose arrays are put into `arrays`, or without these a document."""
    if isinstance(value, np.ndarray):
        if arrays is None:
            return plain(value.tolist())
        arrays[key] = value
        return {"array": key}
    if is_dataclass(value):
        value = (
            _shown_fields(value)
            if arrays is None
            else {name: getattr(value, name) for name in field_types(type(value))}
        )
    if isinstance(value, Mapping):
        if any(isinstance(pair, tuple) for pair in value):
            return by_reason(value)
        return {str(name): describe_value(item, arrays, f"{key}/{name}") for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe_value(item, arrays, f"{key}/{place}") for place, item in enumerate(value)]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):  # which JSON does not know
        return None if arrays is None else {"float": str(value)}
    return value if arrays is not None or isinstance(value, (str, bool, int, float, NoneType)) else str(value)


def _shown_fields(record: Any) -> Header:
    """Return what a document says of a record."""
    names = () if isinstance(record, Mapping) else field_types(type(record))
    shown = {name: getattr(record, name) for name in names if name not in getattr(record, "left_out", ())}
    return shown | (record.derived_fields() if hasattr(record, "derived_fields") else {})


def by_reason(reasons: Mapping[tuple[str, str], str]) -> dict[str, list[list[str]]]:
    """Return the pairs of each reason; one reason is often that of a whole table."""
    pairs: dict[str, list[list[str]]] = {}
    for pair, reason in reasons.items():
        pairs.setdefault(reason, []).append(list(pair))
    return pairs


def unpacked(kind: type[RecordType], header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> RecordType:
    """Return the record that `packed` took apart."""
    return as_record(kind, {name: value for name, value in header.items() if name not in ("kind", "format")}, arrays)


def as_record(
    kind: type[RecordType], values: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
) -> RecordType:
    """Return a record from the descriptions of its fields: lists become tuples, and mappings records."""
    hints = field_types(kind)
    return kind(**{name: as_type(value, hints[name], arrays or {}) for name, value in values.items()})


def as_type(value: Any, hint: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a value of the type `hint` from its description; nothing is checked, as files have checksums."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not NoneType]
        hint, value = (kinds[0], value) if len(kinds) == 1 else (Any, value)
        return None if value is None else as_type(value, hint, arrays)
    if origin is tuple:
        hints = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(as_type(item, of_item, arrays) for item, of_item in zip(value, hints, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        if get_origin(inner[0]) is tuple:
            return {tuple(pair): reason for reason, pairs in value.items() for pair in pairs}
        return {as_type(name, inner[0], arrays): as_type(item, inner[1], arrays) for name, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return as_record(hint, value, arrays)
    if hint is np.ndarray and isinstance(value, Mapping):
        return arrays[value["array"]]
    return float(value["float"]) if isinstance(value, Mapping) and value.keys() == {"float"} else value
