"""What the file of a comparer holds of its statistics, and what these compute once and keep.

A file holds all attributes of an object but those whose names begin with an underscore: numbers, texts, tensors,
arrays, and lists, tuples, mappings and `Stored` objects of these. Nothing but such classes is made when a file is read,
and none of their code is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from netkin.errors import FileError

if TYPE_CHECKING:
    from typing_extensions import Self

Made = TypeVar("Made")
_CLASSES: dict[str, type[Stored]] = {}


def _name_of_class(kind: type) -> str:
    """Return the name of a class in files: one of netkin by its own name, wherever its module is."""
    package = kind.__module__.partition(".")[0]
    return f"{'netkin' if package == 'netkin' else kind.__module__}.{kind.__qualname__}"


class Cached:
    """An object that keeps what was computed from its attributes, by a key, until it is cleared."""

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once for each key."""
        made = vars(self).setdefault("_made", {})
        if key not in made:
            made[key] = make()
        return made[key]

    def clear_cache(self) -> None:
        """Forget what was computed."""
        vars(self).pop("_made", None)


class Stored(Cached):
    """An object that a file can hold, by its attributes; those that begin with an underscore can be computed again."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[_name_of_class(cls)] = cls

    def flush(self) -> None:
        """Bring the object into the form in which it is stored."""

    def _copy(self) -> Self:
        tensors: dict[str, Tensor] = {}
        written = to_plain(self, tensors, "")
        return from_plain(written, {name: tensor.clone() for name, tensor in tensors.items()})


def to_plain(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` as JSON; tensors and arrays are put into `tensors` under their `path`."""
    if isinstance(value, Tensor):
        tensors[path], name = _known_to_numpy(value.detach())
        return {name: path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(value)
        return {"array": path}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    if isinstance(value, Stored):
        value.flush()
        attributes = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        holds = {name: to_plain(part, tensors, f"{path}.{name}") for name, part in attributes.items()}
        return {"class": _name_of_class(type(value)), "holds": holds}
    if isinstance(value, Mapping):
        items = enumerate(value.items())
        return {"mapping": [[to_plain(key, tensors, ""), to_plain(x, tensors, f"{path}.{i}")] for i, (key, x) in items]}
    if isinstance(value, (tuple, list)):
        parts = [to_plain(part, tensors, f"{path}.{i}") for i, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise FileError(
        f"a file can't hold a {type(value).__name__}; let what is saved be tensors, numbers, texts, lists and mappings."
    )


def _known_to_numpy(tensor: Tensor) -> tuple[Tensor, str]:
    """Return a tensor in the same bits, of a type that NumPy knows, and the name of what it was."""
    if tensor.is_complex():
        return torch.view_as_real(tensor), "complex"
    return (tensor.view(torch.int16), "bfloat16") if tensor.dtype == torch.bfloat16 else (tensor, "tensor")


def from_plain(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `to_plain` wrote."""
    if isinstance(written, list):
        return [from_plain(part, tensors) for part in written]
    if not isinstance(written, dict):
        return written
    if "class" in written:
        kind = _CLASSES[written["class"]]
        made = kind.__new__(kind)
        vars(made).update({name: from_plain(part, tensors) for name, part in written["holds"].items()})
        return made
    ((kind, value),) = written.items()
    makers = {
        "tensor": lambda: tensors[value],
        "complex": lambda: torch.view_as_complex(tensors[value]),
        "bfloat16": lambda: tensors[value].view(torch.bfloat16),
        "float": lambda: float(value),
        "array": lambda: tensors[value].numpy(),
        "dtype": lambda: getattr(torch, value),
        "slice": lambda: slice(*value),
        "mapping": lambda: {from_plain(key, tensors): from_plain(part, tensors) for key, part in value},
        "tuple": lambda: tuple(from_plain(part, tensors) for part in value),
    }
    return makers[kind]()
