"""What all statistics share: they are updated, merged, written to a file and read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from netkin import files
from netkin.errors import ShapeError

if TYPE_CHECKING:
    from typing_extensions import Self


class Statistic(ABC):
    """A small, mergeable summary of data that have been seen and forgotten."""

    kind: ClassVar[str]
    fed_by: ClassVar[str] = "activations"

    @abstractmethod
    def update(self, *args: Any) -> None:
        """Fold one batch in."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of the data of both; neither is changed."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a file must hold: named tensors, and the rest as JSON."""

    @classmethod
    @abstractmethod
    def _restored(cls, tensors: dict[str, Tensor], header: dict[str, Any]) -> Self:
        """Return the statistic that `_state` described."""

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


def refuse_missing(names: Sequence[str], rows: Mapping[str, Any]) -> None:
    """Refuse a batch that lacks a layer."""
    missing = [name for name in names if name not in rows]
    if missing:
        raise ShapeError(f"this batch lacks rows for {missing[0]!r}; every update needs all {len(names)} layers.")


def refuse_other_width(name: str, width: int, before: int, when: str = "") -> None:
    """Refuse a layer whose width is not what it was `before`; `when` names the batch in the sentence."""
    if width != before:
        raise ShapeError(
            f"layer {name!r} gave {width} features{when} and {before} before; "
            "choose a shape whose width does not change."
        )
