"""Meeting: two layers can be set beside each other where they give the same rows for the same examples.

Layers with as many rows meet as they are. With ``resize="average"`` feature maps of different sizes meet at the smaller
one: the larger map is averaged down, beside its rows at full size, and goes by a name such as ``a/layer1@8x8``. With
the shape `dft` maps meet at the frequencies that they have in common, unless larger ones are to be averaged down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from netkin.comparing.pairing import Rectangle
from netkin.errors import NoValue, ShapeError
from netkin.representations import positions, resize_to, rows_of
from netkin.statistics.frequencies import apart, common_grid, in_words, placed

DFT = "dft"
AVERAGED = "dft, larger maps averaged down"
COMMON = "dft, frequencies common to maps of different sizes"


@dataclass(frozen=True)
class Layer:
    """What the first batch told of one layer."""

    model: str
    name: str
    width: int
    rows: int
    examples: int = 1
    shape: str = "matrix"
    space: tuple[int, ...] = ()  # the size of its map, where maps may be resized or are taken by their frequencies
    itemsize: int = 4
    spectral: bool = False  # whether it is taken by its frequencies, or stands beside one that is

    @classmethod
    def of(cls, model: str, name: str, rows: Tensor, shape: str, space: tuple[int, ...], resizes: bool) -> Layer:
        """Return a layer as the rows or maps that it gave show it; `space` is known of maps that may be resized."""
        spectral = shape == DFT
        shape = AVERAGED if spectral and resizes else "matrix" if resizes and not (spectral or space) else shape
        space = tuple(placed(rows).shape[2:]) if spectral else space
        width, size = rows.shape[1:].numel(), rows.element_size()
        return cls(model, name, width, len(rows), shape=shape, space=space, itemsize=size, spectral=spectral)

    @property
    def key(self) -> str:
        return f"{self.model}/{self.name}"

    @property
    def rows_per_example(self) -> float:
        return self.rows / self.examples

    @property
    def size(self) -> tuple[int, ...]:
        return self.space if self.spectral else self.space or (self.rows,)

    @property
    def channels(self) -> int:
        return self.width // math.prod(self.space)

    def at(self, size: tuple[int, ...]) -> Layer:
        """Return this layer with its map averaged down to `size`."""
        if size == self.size:
            return self
        name, share = f"{self.name}@{'x'.join(map(str, size))}", (math.prod(size), math.prod(self.space))
        if self.spectral:
            return replace(self, name=name, width=self.width * share[0] // share[1], space=size)
        return replace(self, name=name, rows=self.rows * share[0] // share[1], space=size)


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
        given = list(layers)
        # beside layers taken by their frequencies all others count as layers without space
        self.spectral = any(layer.spectral for layer in given)
        self._given = {layer.key: replace(layer, spectral=self.spectral) for layer in given}
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
        return _at(x, size).key, _at(y, size).key

    def apart(self, a: str, b: str) -> str:
        """Return why the layers `a` and `b` don't meet; empty if they do."""
        x, y = self._given[a], self._given[b]
        return _apart(x, y) if _common(x, y) is None else ""

    @property
    def regrouped(self) -> set[str]:
        """The keys of layers that meet others at common frequencies."""
        spaces = {key: layer.space for key, layer in self.layers.items() if layer.shape == DFT and layer.space}
        sides = [(x, y) for left, right in self.rectangles for x in left for y in right if {x, y} <= spaces.keys()]
        return {key for x, y in sides if spaces[x] != spaces[y] for key in (x, y)}

    def rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows as the models gave them, and those of averaged maps."""
        return {**rows, **{key: _averaged(rows[x.key], x, y.space) for key, (x, y) in self._averaged.items()}}

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
        here = _at(layer, size)
        self.layers[here.key] = here
        if here is not layer:
            self._averaged[here.key] = (layer, here)
        return here.key


def _common(x: Layer, y: Layer) -> tuple[int, ...] | None:
    """Return the size at which two layers meet, if they do."""
    if x.size == y.size:
        return x.size
    if x.spectral and AVERAGED not in (x.shape, y.shape):
        return common_grid(x.space, y.space)
    if x.spectral and not (x.space and y.space):
        return ()
    if x.space and len(x.space) == len(y.space):
        return tuple(map(min, x.space, y.space))
    return None


def _at(layer: Layer, size: tuple[int, ...]) -> Layer:
    """Return a layer as it meets others at `size`: averaged down where that was asked for."""
    stays = layer.spectral and (layer.shape != AVERAGED or not size)
    return layer if stays else layer.at(size)


def _averaged(rows: Tensor, layer: Layer, size: tuple[int, ...]) -> Tensor:
    if not layer.spectral:
        maps = rows.reshape(-1, *layer.space, rows.shape[1]).movedim(-1, 1)
        return positions(resize_to(maps, size))
    if tuple(rows.shape[2:]) != layer.space:
        raise ShapeError(
            f"layer {layer.key!r} gave maps of {in_words(rows.shape[2:])} and of {in_words(layer.space)} before; "
            "bring all inputs to one size, or choose the shape 'pool'."
        )
    return resize_to(rows, size)


def _apart(x: Layer, y: Layer) -> str:
    if x.spectral:
        return apart(f"layer {x.name!r} of {x.model!r}", x.space, f"layer {y.name!r} of {y.model!r}", y.space)
    maps = x.shape == y.shape == "positions"
    return (
        f"layer {x.name!r} of {x.model!r} gives {x.rows_per_example:,g} rows an example and layer {y.name!r} of "
        f"{y.model!r} {y.rows_per_example:,g}; "
        + ("""say resize="average" to average the larger map down, or use """ if maps else "use ")
        + "a shape with one row an example, such as 'pool' or 'mean'."
    )
