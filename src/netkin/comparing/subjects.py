"""Subjects: what is compared, a model that runs on each batch or rows that were recorded before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import as_tensor
from netkin.errors import ShapeError, ValueFault
from netkin.representations import Reader, device_of, guest, rows_of, shape_for
from netkin.representations.feeding import Forward, Transform
from netkin.representations.layers import Spec
from netkin.representations.shapes import Shape

Keep = Callable[[str, Tensor], Any]


class Subject(ABC):
    """One side of a comparison: for each batch it gives what is kept of each layer's rows."""

    name: str
    kind: str
    shapes: dict[str, str]

    @abstractmethod
    def ready(self, keep: Keep) -> Any:
        """Return a context in which `rows` may be called; `keep` says what to keep of (layer, rows)."""

    @abstractmethod
    def rows(self, batch: Any) -> dict[str, Any]:
        """Return what is kept of each layer for one batch."""


class ModelSubject(Subject):
    """A model, run once on each batch."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        layers: Spec,
        shape: Shape | Mapping[str, Shape],
        forward: Forward | None,
        transform: Transform | None,
        device: torch.device | str | None,
    ):
        self.name, self.model, self.kind = name, model, type(model).__name__
        self._layers, self._shape, self._forward, self._transform, self._device = (
            layers,
            shape,
            forward,
            transform,
            device,
        )
        self._reader: Reader | None = None

    @property
    def shapes(self) -> dict[str, str]:  # type: ignore[override]
        return self._reader.shapes if self._reader else {}

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(guest(self.model))
            stack.enter_context(_lent(self.model, self._device))
            self._reader = Reader(
                self.model,
                self._layers,
                shape=self._shape,
                forward=self._forward,
                transform=self._transform,
                keep=keep,
            )
            yield

    def rows(self, batch: Any) -> dict[str, Any]:
        assert self._reader is not None
        return self._reader(batch)


class RecordedSubject(Subject):
    """A mapping of layer names to arrays whose first axis is the examples."""

    def __init__(self, name: str, arrays: Mapping[str, Any], shape: Shape | Mapping[str, Shape]):
        if not arrays:
            raise ValueFault(f"{name!r} is an empty mapping; give it at least one layer.")
        self.name, self.kind, self.shapes = name, "recorded", {}
        self._arrays = {layer: as_tensor(array, f"{name}/{layer}") for layer, array in arrays.items()}
        self._shape = shape
        self._keep: Keep = lambda layer, rows: rows
        counts = {layer: len(array) if array.ndim else 0 for layer, array in self._arrays.items()}
        if len(set(counts.values())) > 1:
            (first, n), (other, m) = min(counts.items(), key=lambda c: c[1]), max(counts.items(), key=lambda c: c[1])
            raise ShapeError(
                f"{name!r} holds {n:,} examples of layer {first!r} and {m:,} of layer {other!r}; "
                "record all on the same data."
            )
        self.examples = next(iter(counts.values()))

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        yield

    def rows(self, batch: slice) -> dict[str, Any]:
        kept = {}
        for layer, array in self._arrays.items():
            rows, self.shapes[layer] = rows_of(array[batch], shape_for(layer, self._shape))
            kept[layer] = self._keep(layer, rows)
        return kept


@contextmanager
def _lent(model: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Move a model to `device` while the `with` lasts."""
    home = device_of(model)
    if device is None or torch.device(device) == home:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)
