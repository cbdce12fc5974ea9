"""What all statistics share: they are updated, merged, written to a file and read back.

A file holds the attributes that a class names in `stored`: numbers, texts, tensors, arrays, and lists, tuples, mappings
and `Stored` objects of these. Nothing but such classes is made when a file is read, and none of their code is run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin import files
from netkin.errors import FileFault, ShapeError

if TYPE_CHECKING:
    from typing_extensions import Self

_CLASSES: dict[str, type[Stored]] = {}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Stored:
    """An object that a file can hold, by the attributes that its class names."""

    stored: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[_full_name(cls)] = cls

    def settle(self) -> None:
        """Bring the object into the form in which it is stored."""

    def release(self) -> None:
        """Forget what was computed from the stored attributes, and can be computed again."""

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a file must hold: named tensors, and the rest as JSON."""
        tensors: dict[str, Tensor] = {}
        self.settle()
        return tensors, {name: packed(getattr(self, name), tensors, name) for name in self.stored}

    @classmethod
    def _restored(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Self:
        """Return the object that `_state` described."""
        made = cls.__new__(cls)
        for name in cls.stored:
            setattr(made, name, unpacked(header[name], tensors))
        made.release()
        return made


class Statistic(Stored, ABC):
    """A small, mergeable summary of data that have been seen and forgotten."""

    kind: ClassVar[str]

    @abstractmethod
    def update(self, *args: Any, **options: Any) -> None:
        """Fold one batch in."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of the data of both; neither is changed."""

    def _copy(self) -> Self:
        tensors, header = self._state()
        return self._restored({name: tensor.clone() for name, tensor in tensors.items()}, header)

    def to_file(self, path: str | Path) -> None:
        """Write the statistic to one file, at once or not at all."""
        tensors, header = self._state()
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        files.write(path, kind=self.kind, header=header, arrays=arrays)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Return the statistic that was written to `path`; it goes on as if never stopped."""
        header, arrays = files.read(path, kind=cls.kind)
        with files.damage_reported(path):
            return cls._restored({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, header)

    def _refuse_unlike(self, other: Any, **facts: str) -> None:
        """Refuse to merge with a statistic of another kind, or one that differs in some fact, read off an attribute."""
        if type(self) is not type(other):
            raise ShapeError(f"a {self.kind} can't be merged with a {getattr(other, 'kind', type(other).__name__)}.")
        for what, attribute in facts.items():
            mine, theirs = getattr(self, attribute), getattr(other, attribute)
            if mine != theirs:
                raise ShapeError(f"these statistics can't be merged: their {what} differ, {mine!r} and {theirs!r}.")


def packed(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` as JSON; tensors and arrays are put into `tensors` under their `path`."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value).detach()
        tensors[path] = _plain(tensor)
        special = {torch.bfloat16: "bfloat16"}.get(tensor.dtype, "complex" if tensor.is_complex() else "tensor")
        return {"array" if isinstance(value, np.ndarray) else special: path}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop]}
    if isinstance(value, Stored):
        inside, header = value._state()
        tensors |= {f"{path}.{name}": tensor for name, tensor in inside.items()}
        return {"class": _full_name(type(value)), "path": f"{path}.", "holds": header}
    if isinstance(value, Mapping):
        parts = [
            [packed(key, tensors, ""), packed(one, tensors, f"{path}.{i}")]
            for i, (key, one) in enumerate(value.items())
        ]
        return {"mapping": parts}
    if isinstance(value, (tuple, list)):
        parts = [packed(one, tensors, f"{path}.{i}") for i, one in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise FileFault(
        f"a file can't hold a {type(value).__name__}; let what is saved be tensors, numbers, texts, lists and mappings."
    )


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor in the same bits, of a type that NumPy knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def unpacked(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `packed` wrote."""
    if isinstance(written, list):
        return [unpacked(one, tensors) for one in written]
    if not isinstance(written, dict):
        return written
    if "class" in written:
        path = written["path"]
        inside = {name.removeprefix(path): one for name, one in tensors.items() if name.startswith(path)}
        return _CLASSES[written["class"]]._restored(inside, written["holds"])
    ((kind, value),) = written.items()
    makers = {
        "tensor": lambda: tensors[value],
        "complex": lambda: torch.view_as_complex(tensors[value]),
        "bfloat16": lambda: tensors[value].view(torch.bfloat16),
        "float": lambda: float(value),
        "array": lambda: tensors[value].numpy(),
        "dtype": lambda: getattr(torch, value),
        "slice": lambda: slice(*value),
        "mapping": lambda: {unpacked(key, tensors): unpacked(one, tensors) for key, one in value},
        "tuple": lambda: tuple(unpacked(one, tensors) for one in value),
    }
    return makers[kind]()
