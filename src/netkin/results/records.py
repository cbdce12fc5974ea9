"""Frozen records: their arrays and mappings cannot be written to, and they compare, copy and pickle by their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from netkin.errors import NameClash

Record = TypeVar("Record")
Key = TypeVar("Key")
Item = TypeVar("Item")


def now() -> str:
    """Return the time at which a record is made, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def freeze(record: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def frozen_array(array: Any) -> np.ndarray:
    """Return a float64 copy of `array` that refuses to be written to."""
    copy = np.array(array, dtype=np.float64, order="C")
    copy.flags.writeable = False
    return copy


def frozen_mapping(mapping: Mapping[Key, Item]) -> Mapping[Key, Item]:
    """Return a copy of `mapping` that refuses to be written to."""
    return MappingProxyType(dict(mapping))


def distinct(names: Any, what: str) -> tuple[str, ...]:
    """Return `names` as a tuple; a name that occurs twice is refused."""
    names = tuple(names)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise NameClash(f"{what} must have distinct names; {twice!r} occurs {names.count(twice)} times.")
    return names


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of `record`, its mappings as ordinary dictionaries."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def rebuild(kind: type[Record], values: dict[str, Any]) -> Record:
    """Make a record again from its plain fields; pickle and copy call this."""
    return kind(**values)


def same_fields(first: Any, second: Any) -> bool:
    """Tell whether two records hold the same, where a hole equals a hole."""
    one, other = plain_fields(first), plain_fields(second)
    return all(_same(one[name], other[name]) for name in one)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) != isinstance(second, np.ndarray):
        return False
    return np.array_equal(first, second, equal_nan=True) if isinstance(first, np.ndarray) else bool(first == second)
