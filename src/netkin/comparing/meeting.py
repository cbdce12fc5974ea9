"""Meeting: two layers can be set beside each other where they give the same rows for the same examples.

Layers with as many rows meet as they are. With ``resize="average"`` feature maps of different sizes meet at the smaller
one: the larger map is averaged down, beside its rows at full size, and goes by a name such as ``a/layer1@8x8``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from netkin.comparing.pairing import Rectangle
from netkin.errors import NoValue
from netkin.representations import positions, resize_to, rows_of


@dataclass(frozen=True)
class Layer:
    """What the first batch told of one layer."""

    model: str
    name: str
    width: int
    rows: int
    examples: int = 1
    shape: str = "matrix"
    space: tuple[int, ...] = ()  # the size of its map, where maps may be resized
    itemsize: int = 4

    @property
    def key(self) -> str:
        return f"{self.model}/{self.name}"

    @property
    def rows_per_example(self) -> float:
        return self.rows / self.examples

    @property
    def size(self) -> tuple[int, ...]:
        return self.space or (self.rows,)

    def at(self, size: tuple[int, ...]) -> Layer:
        """Return this layer with its map averaged down to `size`."""
        if size == self.size:
            return self
        rows = self.rows * math.prod(size) // math.prod(self.space)
        return replace(self, name=f"{self.name}@{'x'.join(map(str, size))}", rows=rows, space=size)


class ResizablePositions:
    """The shape `positions`, which also tells the size of the latest map; empty for a layer that has none."""

    __name__ = "positions, larger maps averaged down"

    def __init__(self) -> None:
        self.space: tuple[int, ...] = ()

    def __call__(self, output: Tensor) -> Tensor:
        rows, shape = rows_of(output, "positions")
        self.space = tuple(output.shape[2:]) if shape == "positions" else ()
        return rows


class Meeting:
    """Where the layers of the wanted pairs meet: `layers` by key, averaged ones included, and their `rectangles`."""

    def __init__(self, layers: Iterable[Layer], rectangles: Iterable[Rectangle]):
        self._given = {layer.key: layer for layer in layers}
        self.layers: dict[str, Layer] = {}
        self.rectangles: list[Rectangle] = []
        self._averaged: dict[str, tuple[Layer, Layer]] = {}
        for left, right in rectangles:
            for ours in self._by_size(left):
                for theirs in self._by_size(right):
                    self._join(ours, theirs)

    def pair(self, a: str, b: str) -> tuple[str, str]:
        """Return the keys under which layers `a` and `b` meet."""
        x, y = self._given[a], self._given[b]
        size = _common(x, y)
        if size is None:
            raise NoValue(_apart(x, y))
        return x.at(size).key, y.at(size).key

    def rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows as the models gave them, and those of averaged maps."""
        return {**rows, **{key: _averaged(rows[x.key], x.space, y.space) for key, (x, y) in self._averaged.items()}}

    def plainly(self, sentence: str) -> str:
        """Return a sentence with the layers' own names."""
        for key, (layer, _) in self._averaged.items():
            sentence = sentence.replace(repr(key), repr(layer.key))
        return sentence

    def _by_size(self, keys: Sequence[str]) -> list[list[Layer]]:
        layers = [self._given[key] for key in keys]
        sizes = dict.fromkeys(layer.size for layer in layers)
        return [[layer for layer in layers if layer.size == size] for size in sizes]

    def _join(self, ours: list[Layer], theirs: list[Layer]) -> None:
        size = _common(ours[0], theirs[0])
        if size is not None:
            self.rectangles.append(([self._at(x, size) for x in ours], [self._at(y, size) for y in theirs]))

    def _at(self, layer: Layer, size: tuple[int, ...]) -> str:
        here = layer.at(size)
        self.layers[here.key] = here
        if here is not layer:
            self._averaged[here.key] = (layer, here)
        return here.key


def _common(x: Layer, y: Layer) -> tuple[int, ...] | None:
    """Return the size at which two layers meet, if they do."""
    if x.size == y.size:
        return x.size
    if x.space and len(x.space) == len(y.space):
        return tuple(map(min, x.space, y.space))
    return None


def _averaged(rows: Tensor, space: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    maps = rows.reshape(-1, *space, rows.shape[1]).movedim(-1, 1)
    return positions(resize_to(maps, size))


def _apart(x: Layer, y: Layer) -> str:
    maps = x.shape == y.shape == "positions"
    return (
        f"layer {x.name!r} of {x.model!r} gives {x.rows_per_example:,g} rows an example and layer {y.name!r} of "
        f"{y.model!r} {y.rows_per_example:,g}; "
        + ("""say resize="average" to average the larger map down, or use """ if maps else "use ")
        + "a shape with one row an example, such as 'pool' or 'mean'."
    )
