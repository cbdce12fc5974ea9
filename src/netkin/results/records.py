"""Immutable records, which compare, copy and pickle by their fields; their arrays and mappings are read-only."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from importlib import import_module
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

import numpy as np

from netkin.errors import MissingExtra, NameClash, refuse_half_characters

MOST = 4096  # values that are shared at once
PLAIN = frozenset({str, int, float, bool, NoneType})

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
