"""What a file may hold of a statistic: the type, range and shape of each attribute, checked when it is read.

A class names its attributes in `stored`, each with one of these. Arrays name their axes: axes of one name have the same
length in all arrays of an object, and that of its attribute of this name where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

Sizes = dict[str, int]  # of axes by their names
LARGEST = 2**62  # of whole numbers, so that sums of two still have 64 bits
PRECISE = (torch.float32, torch.float64)  # of sums
DTYPES = (torch.float16, torch.bfloat16, *PRECISE)  # of rows
COMPLEX = (torch.complex64, torch.complex128)


class Field(NamedTuple):
    """What an attribute must be, in words, and whether a value is that; sizes of axes that it shows are added."""

    words: str
    holds: Callable[[Any, Sizes], bool]


def fields(**named: Field) -> Mapping[str, Field]:
    """Return the attributes that a file holds of an object, each with its field."""
    return MappingProxyType(named)


def check_fields(made: Any, named: Mapping[str, Field]) -> None:
    """Refuse an object whose attributes are not what its fields say."""
    sizes = {name: getattr(made, name) for name, field in named.items() if field is COUNT}
    for name, field in named.items():
        if not field.holds(getattr(made, name), sizes):
            raise ValueError(f"`{name}` of a {type(made).__name__} must be {field.words}")


def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a class; none where one of them names what is not there when the program runs."""
    try:
        return get_type_hints(kind)
    except NameError:
        return {}


def is_of(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; those that JSON has no values of fit anything.

    Example:
        >>> is_of(1, float), is_of("rbf", str | None), is_of(True, int), is_of((1, 2), tuple[int, ...])
        (True, True, False, True)
    """
    if get_origin(hint) in (Union, UnionType):
        return any(is_of(value, one) for one in get_args(hint))
    kind = get_origin(hint) or hint
    if kind is float:
        return type(value) in (int, float)
    return kind not in (bool, int, str, tuple, NoneType) or type(value) is kind


def refuse_unless(holds: bool, what: str) -> None:
    """Refuse an object whose attributes do not fit each other."""
    if not holds:
        raise ValueError(f"{what} do not fit each other")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_range(value: slice) -> bool:
    ends = value.start, value.stop
    return value.step is None and all(map(_is_whole, ends)) and 0 <= value.start <= value.stop


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_key, value))
    return value is None or isinstance(value, str) or _is_number(value)


FLAG = Field("true or false", lambda value, sizes: isinstance(value, bool))
TEXT = Field("a text", lambda value, sizes: isinstance(value, str))
WHOLE = Field("a whole number", lambda value, sizes: _is_whole(value))
COUNT = Field("a count", lambda value, sizes: _is_whole(value) and value >= 0)
NUMBER = Field("a number", lambda value, sizes: _is_number(value))
SIZE = Field("a number that is not negative", lambda value, sizes: _is_number(value) and value >= 0)
POSITIVE = Field("a positive number", lambda value, sizes: _is_number(value) and value > 0)
KEY = Field("a name or a tuple of names", lambda value, sizes: _is_key(value))
DTYPE = Field("a type of numbers", lambda value, sizes: value in DTYPES)
HASH = Field("a hash", lambda value, sizes: isinstance(value, int) and 0 <= value < 2**64)
SLICE = Field("a range", lambda value, sizes: isinstance(value, slice) and _is_range(value))
TENSOR = Field("a tensor", lambda value, sizes: isinstance(value, Tensor) and value.dtype in PRECISE)
EMPTY = Field("empty", lambda value, sizes: value == [])


def none_or(field: Field) -> Field:
    """Return the field of an attribute that may be None."""
    return Field(f"none, or {field.words}", lambda value, sizes: value is None or field.holds(value, sizes))


def one_of(*values: str) -> Field:
    """Return the field of a choice."""
    return Field(" or ".join(map(repr, values)), lambda value, sizes: isinstance(value, str) and value in values)


def object_of(kind: type[Any]) -> Field:
    """Return the field of an object of a class, and of none that is derived from it."""
    return Field(f"a {kind.__name__}", lambda value, sizes: type(value) is kind)


def list_of(field: Field, kind: type[Any] = list, count: int | None = None) -> Field:
    """Return the field of a list, or a tuple, of `count` values."""

    def holds(value: Any, sizes: Sizes) -> bool:
        right = isinstance(value, kind) and count in (None, len(value))
        return right and all(field.holds(one, sizes) for one in value)

    return Field(f"a {kind.__name__} in which each is {field.words}", holds)


def tuple_of(field: Field, count: int | None = None) -> Field:
    """Return the field of a tuple of `count` values."""
    return list_of(field, tuple, count)


def mapping_of(field: Field, key: Field = KEY) -> Field:
    """Return the field of a mapping, by layers unless the field of its keys is given."""

    def holds(value: Any, sizes: Sizes) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(key.holds(name, sizes) and field.holds(one, sizes) for name, one in value.items())

    return Field(f"a mapping in which each is {field.words}", holds)


def tensor(*axes: str | None, dtypes: tuple[torch.dtype, ...] = PRECISE) -> Field:
    """Return the field of a tensor of one of these `dtypes` with these axes."""

    def holds(value: Any, sizes: Sizes) -> bool:
        return isinstance(value, Tensor) and value.dtype in dtypes and _fits(tuple(value.shape), axes, sizes)

    return Field(f"a tensor of {_in_words(axes)}", holds)


def whole_numbers(*axes: str | None) -> Field:
    """Return the field of an array of whole numbers of 64 bits."""

    def holds(value: Any, sizes: Sizes) -> bool:
        return isinstance(value, np.ndarray) and value.dtype == np.int64 and _fits(value.shape, axes, sizes)

    return Field(f"whole numbers of 64 bits, {_in_words(axes)}", holds)


def numbers(*axes: str | None) -> Field:
    """Return the field of an array of numbers in float64."""

    def holds(value: Any, sizes: Sizes) -> bool:
        right = isinstance(value, np.ndarray) and value.dtype == np.float64
        return right and _fits(value.shape, axes, sizes) and bool(np.isfinite(value).all())

    return Field(f"numbers in float64, {_in_words(axes)}", holds)


def _fits(shape: tuple[int, ...], axes: tuple[str | None, ...], sizes: Sizes) -> bool:
    if len(shape) != len(axes):
        return False
    return all(name is None or sizes.setdefault(name, size) == size for name, size in zip(axes, shape, strict=True))


def _in_words(axes: tuple[str | None, ...]) -> str:
    return " × ".join("any" if axis is None else axis for axis in axes) or "no axes"


NAMES = list_of(KEY)
PAIR_BLOCKS = list_of(tuple_of(list_of(KEY), 2))
ANYTHING = Field("anything", lambda value, sizes: True)  # the object checks it itself
SETTINGS = mapping_of(ANYTHING, TEXT)
RESOLUTIONS = mapping_of(SIZE)
