"""Nested structures: the tuples, lists, mappings and dataclasses that models take and return, traversed and rebuilt.

A Hugging Face ``ModelOutput`` or ``BatchEncoding`` is a mapping like any other here; nothing is imported for them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

PREFERRED = ("last_hidden_state", "logits")
Path = tuple[Hashable, ...]


def parts(structure: Any) -> dict[Any, Any]:
    """Return what `structure` holds, by key, index or field name; nothing for what is no structure."""
    if isinstance(structure, Mapping):
        return dict(structure)
    if isinstance(structure, (tuple, list)):
        return dict(enumerate(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        return {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
    return {}


def rebuilt(structure: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of `structure`, of its own type, with the parts in `changed` put in their places."""
    if isinstance(structure, MutableMapping):
        return _set_items(copy.copy(structure), changed)
    if isinstance(structure, Mapping):
        return {**structure, **changed}
    if isinstance(structure, (tuple, list)):
        return _same_sequence(structure, [changed.get(index, part) for index, part in enumerate(structure)])
    return _set_fields(copy.copy(structure), changed)


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with `function` applied to everything in it that is not a structure itself."""
    inside = parts(structure)
    if not inside:
        return function(structure)
    return rebuilt(structure, {key: mapped(function, part) for key, part in inside.items()})


def copied(structure: Any) -> Any:
    """Return `structure` with copies of the tensors and arrays in it."""
    return mapped(copied_leaf, structure)


def copied_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor or array, with its gradient's history; anything else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def leaves(structure: Any) -> Iterator[tuple[Path, Any]]:
    """Yield everything in `structure` that is not a structure, depth first, with the path to it.

    In mappings and dataclasses `last_hidden_state` and `logits` come before the other parts.
    """
    inside = parts(structure)
    if not inside:
        yield (), structure
    for key in sorted(inside, key=_rank):
        for path, leaf in leaves(inside[key]):
            yield (key, *path), leaf


def path_to_tensor(output: Any) -> Path | None:
    """Return the way to the first floating tensor in a layer's `output`, or None if it has none."""
    return next((path for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def at(structure: Any, path: Path) -> Any:
    """Return what lies in `structure` at the end of `path`."""
    for key in path:
        structure = parts(structure)[key]
    return structure


def replaced_at(structure: Any, path: Path, part: Any) -> Any:
    """Return a copy of `structure` that holds `part` at the end of `path`."""
    if not path:
        return part
    inner = parts(structure)[path[0]]
    return rebuilt(structure, {path[0]: replaced_at(inner, path[1:], part)})


def _rank(key: Hashable) -> int:
    return PREFERRED.index(key) if key in PREFERRED else len(PREFERRED)


def _set_items(structure: Any, changed: Mapping[Any, Any]) -> Any:
    for key, part in changed.items():
        structure[key] = part
    return structure


def _set_fields(structure: Any, changed: Mapping[Any, Any]) -> Any:
    for name, part in changed.items():
        # frozen dataclasses refuse plain assignment, and nothing else holds this copy yet
        object.__setattr__(structure, name, part)
    return structure


def _same_sequence(structure: Any, items: list[Any]) -> Any:
    if hasattr(structure, "_make"):
        return structure._make(items)
    return type(structure)(items)
