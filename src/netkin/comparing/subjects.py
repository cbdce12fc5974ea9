"""Subjects: what is compared, a model that runs on each batch or rows that were recorded before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import as_tensor
from netkin.comparing.meeting import ResizablePositions
from netkin.errors import ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.representations import Reader, guest, rows_of, shape_for
from netkin.representations.inputs import Forward, Transform, length_if_known
from netkin.representations.layers import Spec, unwrapped
from netkin.representations.shapes import Shape

Keep = Callable[[str, Tensor], Any]


class Subject(ABC):
    """One side of a comparison: for each batch it gives what is kept of each layer's rows."""

    name: str
    kind: str
    shapes: dict[str, str]
    averages = False  # whether maps that are taken by their frequencies may be averaged down to the size of others
    _shape: Shape | Mapping[str, Shape]

    @property
    def resizes(self) -> bool:
        """Whether its feature maps may be averaged down to the size of others."""
        return self.averages or isinstance(self._shape, ResizablePositions)

    @property
    def space(self) -> tuple[int, ...]:
        """The size of the map that the latest rows came from, where maps may be resized."""
        return self._shape.space if isinstance(self._shape, ResizablePositions) else ()

    @property
    @abstractmethod
    def origin(self) -> dict[str, str]:
        """What it is and how it is run, in words for the provenance of a result."""

    @abstractmethod
    def length(self, batch: Any) -> int | None:
        """Return the number of examples in a batch, if the batch tells."""

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
        self._layers, self._shape, self._device = layers, shape, device
        self._forward, self._transform = forward, transform
        self._reader: Reader | None = None

    @property
    def shapes(self) -> dict[str, str]:  # type: ignore[override]
        return self._reader.shapes if self._reader else {}

    @property
    def origin(self) -> dict[str, str]:
        device = ", ".join(sorted(map(str, _homes(self.model)))) if self._device is None else str(self._device)
        functions = {"transform": self._transform, "forward": self._forward}
        return {"model": self.kind, "device": device} | {what: _called(given) for what, given in functions.items()}

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        with lent(self.model, self._device), guest(self.model):  # a guest keeps the random state of the device, too
            self._reader = Reader(
                self.model, self._layers, shape=self._shape, forward=self._forward, transform=self._transform, keep=keep
            )
            with self._reader.open():
                yield

    def length(self, batch: Any) -> int | None:
        return length_if_known(batch)

    def rows(self, batch: Any) -> dict[str, Any]:
        assert self._reader is not None
        return self._reader(batch)


class RecordedSubject(Subject):
    """A mapping of layer names to arrays whose first axis is the examples."""

    def __init__(self, name: str, arrays: Mapping[str, Any], layers: Spec, shape: Shape | Mapping[str, Shape]):
        self.name, self.kind, self.shapes = name, "recorded", {}
        chosen = {layer: arrays[layer] for layer in _chosen(name, list(arrays), layers)}
        self._arrays = {layer: as_tensor(array, f"{name}/{layer}") for layer, array in chosen.items()}
        self._shape = shape
        self._keep: Keep = lambda layer, rows: rows
        counts = {layer: len(array) if array.ndim else 0 for layer, array in self._arrays.items()}
        (first, n), (other, m) = min(counts.items(), key=lambda c: c[1]), max(counts.items(), key=lambda c: c[1])
        if n < m:
            raise ShapeError(
                f"{name!r} holds {n:,} examples of layer {first!r} and {m:,} of layer {other!r}; "
                "record all on the same data."
            )
        if n == 0:
            raise ShapeError(f"{name!r} holds no examples of layer {first!r}; record it on at least one.")
        self.examples = n

    @property
    def origin(self) -> dict[str, str]:
        return {"model": self.kind, "device": ", ".join(sorted({str(array.device) for array in self._arrays.values()}))}

    def length(self, batch: slice) -> int:
        return int(batch.stop - batch.start)

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        yield

    def rows(self, batch: slice) -> dict[str, Any]:
        kept = {}
        for layer, array in self._arrays.items():
            try:
                rows, self.shapes[layer] = rows_of(array[batch], shape_for(layer, self._shape))
            except ShapeError as fault:
                raise ShapeError(f"layer {layer!r} of {self.name!r}: {fault}") from fault
            kept[layer] = self._keep(layer, rows)
        return kept


def _chosen(name: str, known: list[str], layers: Spec) -> list[str]:
    """Return the recorded layers that `layers` asks for, by name or glob; all for None."""
    if not known:
        raise ValueFault(f"{name!r} is an empty mapping; give it at least one layer.")
    if layers is None:
        return known
    wanted = [layers] if isinstance(layers, (str, type)) else list(layers)
    if not wanted or not all(isinstance(one, str) for one in wanted):
        raise ValueFault(f"the recorded layers of {name!r} are chosen by name or glob; got {wanted}.")
    found = {str(one): [layer for layer in known if layer == one or fnmatchcase(layer, str(one))] for one in wanted}
    for one, matching in found.items():
        if not matching:
            raise UnknownName(f"{name!r} has no layer {one!r}{did_you_mean(one, known) or '.'}")
    return list(dict.fromkeys(layer for matching in found.values() for layer in matching))


def _called(function: Any) -> str:
    return "none" if function is None else getattr(function, "__qualname__", type(function).__name__)


def _homes(model: nn.Module) -> set[torch.device]:
    """Return the devices that a model lies on."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}


def _refuse_absent(device: torch.device | str | None) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(
            f"there is no device {str(device)!r} here; leave `device` out to run the models where they are."
        ) from fault


@contextmanager
def lent(model: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Move a model to `device` while the `with` lasts."""
    unwrapped(model)  # refuses what is no model
    _refuse_absent(device)
    homes = _homes(model)
    if any(home.type == "meta" for home in homes) or (device is not None and torch.device(device).type == "meta"):
        raise ValueFault("a model on the 'meta' device computes no numbers; load its weights and choose a real device.")
    if device is None or homes == {torch.device(device)}:
        yield
        return
    if len(homes) > 1:
        raise ValueFault(
            f"the model is spread over {', '.join(sorted(map(str, homes)))}; leave `device` out to run it where it is."
        )
    try:
        model.to(device)
        yield
    finally:
        model.to(homes.pop())
