"""Cache: a model that meets many others keeps its rows, so that it runs once on each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from netkin.comparing.subjects import Keep, ModelRunner, Runner, Tensors


class CachedRunner(Runner):
    """A model whose rows of each batch are kept from pass to pass, up to `limit` bytes; beyond them it runs again.

    A batch is known again as the same object, so the passes must be fed from one list. Not for shapes that tell the
    size of a map beside its rows (``resize="average"``, ``"dft"``): only rows are kept.
    """

    def __init__(self, runner: ModelRunner, limit: int):
        self._runner, self.limit, self.held, self.runs = runner, limit, 0, 0
        self.name, self.kind = runner.name, runner.kind
        self.shapes: dict[str, str] = {}
        self._keep: Keep = lambda layer, rows: rows
        self._order: dict[str, None] = {}  # in which the layers run, which is that of a comparison
        # with the batch itself, as the number of an object is free for others once it is gone
        self._kept: dict[int, tuple[Any, dict[str, Tensor], dict[str, Tensor | None]]] = {}
        self._valid: dict[str, Tensor | None] = {}
        self._resolutions: dict[str, float] = {}
        self.device, self.names_layers = runner.device, runner.names_layers

    @property
    def origin(self) -> dict[str, str]:
        return self._runner.origin

    def length(self, batch: Any) -> int | None:
        return self._runner.length(batch)

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        with self._runner.ready(self._note):
            yield

    def rows(self, batch: Any) -> dict[str, Any]:
        _, rows, self._valid = self._kept.get(id(batch)) or self._run(batch)
        return {layer: self._keep(layer, matrix) for layer, matrix in rows.items()}

    def _note(self, layer: str, rows: Tensor) -> Tensor:
        self._order[layer] = None
        return rows

    def valid(self, layer: str) -> Tensor | None:
        return self._valid.get(layer)

    def resolution(self, layer: str) -> float:
        return self._resolutions.get(layer, 0.0)

    @property
    def left_out(self) -> dict[str, str]:
        return self._runner.left_out

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        return self._runner.weights(layers)

    def _run(self, batch: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor | None]]:
        found = self._runner.rows(batch)
        rows = {layer: found[layer] for layer in self._order}
        self.shapes |= self._runner.shapes
        self._resolutions |= {layer: self._runner.resolution(layer) for layer in rows}
        valid = {layer: self._runner.valid(layer) for layer in rows}
        self.runs += 1
        size = sum(matrix.nbytes for matrix in rows.values())
        if self.held + size <= self.limit:
            self.held += size
            self._kept[id(batch)] = (batch, rows, valid)
        return batch, rows, valid
