"""Alignment: which layers are paired, and on which grid they give the same rows for the same examples.

Layers with the same number of rows are compared as they are. With ``resize="average"`` feature maps of different sizes
are compared at the smaller size: the larger map is averaged down, in addition to its rows at full size, under a name
such as ``layer1@8x8``. With the shape `dft` maps are compared at their common frequencies, unless larger ones are
averaged down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from netkin.comparing.spec import checked_pairs
from netkin.errors import NoValue, ShapeError, UnknownName, did_you_mean
from netkin.representations.batch_axis import LayerFacts
from netkin.representations.shapes import positions, resize_to
from netkin.statistics.collector import Key, LayerSize, PairBlock, name_of, shape_in_words
from netkin.statistics.frequencies import common_grid, mismatch_in_words

DFT = "dft"
AVERAGED = "dft, larger maps averaged down"
COMMON = "dft, frequencies common to maps of different sizes"
AVERAGED_POSITIONS = "positions, larger maps averaged down"
ONE_ROW = (AVERAGED, COMMON, "cls", DFT, "flatten", "last", "matrix", "mean", "pool")  # one row an example


class Pairs:
    """The pairs requested: `of` the models, and of the layers of each "all", "corresponding", "band:K" or a list."""

    def __init__(self, of: Sequence[tuple[str, str]], which: Any = "all"):
        self.of = [(a, b) for a, b in of]
        self.which = checked_pairs(which)

    def pair_blocks(self, layers: Mapping[str, Sequence[str]]) -> list[PairBlock]:
        """Return the pairs as (keys, keys), each meaning all of the first against all of the second."""
        if self.which == "all":
            return [([(a, x) for x in layers[a]], [(b, y) for y in layers[b]]) for a, b in self.of]
        return [([(a, x)], [(b, y)]) for a, b in self.of for x, y in self.layer_pairs(layers, a, b)]

    def layer_pairs(self, layers: Mapping[str, Sequence[str]], a: str, b: str) -> list[tuple[str, str]]:
        """Return the pairs of layers wanted of models `a` and `b`."""
        if self.which == "all":
            return [(x, y) for x in layers[a] for y in layers[b]]
        if self.which == "corresponding":
            return corresponding(layers[a], layers[b])
        if isinstance(self.which, str):
            return band(layers[a], layers[b], int(self.which.removeprefix("band:")))
        for x, y in self.which:
            _require_layer(x, a, layers[a])
            _require_layer(y, b, layers[b])
        return list(self.which)

    @property
    def words(self) -> str:
        return self.which if isinstance(self.which, str) else f"{len(self.which):,} listed"


def corresponding(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return layers of the same name in both; if no name is shared, layers of the same place.

    Example:
        >>> corresponding(["conv1", "fc"], ["conv1", "conv2", "fc"])
        [('conv1', 'conv1'), ('fc', 'fc')]
    """
    shared = [(name, name) for name in a if name in b]
    if shared:
        return shared
    if len(a) != len(b):
        raise ShapeError(
            f"the models share no layer names and have {len(a)} and {len(b)} layers, so none correspond; "
            "take pairs='all', or in Python a list of those to compare, `pairs=[(layer, layer), ...]`."
        )
    return list(zip(a, b, strict=True))


def band(a: Sequence[str], b: Sequence[str], width: int) -> list[tuple[str, str]]:
    """Return each layer of `a` with the layers of `b` at its relative depth, and up to `width` before and behind.

    Example:
        >>> band(["1", "2", "3"], ["1", "2", "3"], 1)
        [('1', '1'), ('1', '2'), ('2', '1'), ('2', '2'), ('2', '3'), ('3', '2'), ('3', '3')]
        >>> band(["in", "out"], ["in", "1", "2", "3", "out"], 0)
        [('in', 'in'), ('out', 'out')]
    """
    scale = (len(b) - 1) / max(len(a) - 1, 1)
    middles = [round(place * scale) for place in range(len(a))]
    return [
        (x, b[j])
        for x, middle in zip(a, middles, strict=True)
        for j in range(max(middle - width, 0), min(middle + width + 1, len(b)))
    ]


def size_of_layer(model: str, name: str, facts: LayerFacts, resizes: bool) -> LayerSize:
    """Return a layer as a run of few examples showed it; `resizes` whether maps may be averaged down."""
    spectral, shape, space = facts.shape == DFT, facts.shape, facts.space if resizes else ()
    if resizes:
        shape = AVERAGED if spectral else AVERAGED_POSITIONS if space else "matrix"
    if spectral:  # maps of a single place are a layer without space
        space = facts.size[2:] if math.prod(facts.size[2:]) > 1 else ()
    return LayerSize(
        model, name, math.prod(facts.size[1:]), facts.size[0], facts.examples, shape, space, facts.dtype.itemsize,
        spectral, facts.resolution,
    )  # fmt: skip


def size_of_weights(model: str, layer: str, tensors: Mapping[str, Tensor]) -> LayerSize:
    """Return a layer as its weights show it."""
    width = sum(tensor.numel() for tensor in tensors.values())
    itemsize = max((tensor.element_size() for tensor in tensors.values()), default=4)
    return LayerSize(model, layer, width, 1, shape="weights", itemsize=itemsize)


class Alignment:
    """The alignment of the layers of the wanted pairs: `layers` by key, averaged ones too, and their `pair_blocks`."""

    def __init__(self, layers: Iterable[LayerSize], pair_blocks: Iterable[PairBlock]):
        sizes = list(layers)
        # beside layers taken by their frequencies all others count as layers without space
        spectral = any(layer.spectral for layer in sizes)
        self.given: dict[Key, LayerSize] = {layer.key: replace(layer, spectral=spectral) for layer in sizes}
        self.layers: dict[Key, LayerSize] = {}
        self.pair_blocks: list[PairBlock] = []
        self._averaged: dict[Key, tuple[LayerSize, LayerSize]] = {}
        for left, right in pair_blocks:
            for ours in self._by_size(left):
                for theirs in self._by_size(right):
                    if (size := _common(ours[0], theirs[0])) is not None:
                        self.pair_blocks.append(
                            ([self._at(x, size) for x in ours], [self._at(y, size) for y in theirs])
                        )

    def pair(self, a: Key, b: Key) -> tuple[Key, Key]:
        """Return the keys under which layers `a` and `b` are compared."""
        x, y = self.given[a], self.given[b]
        size = _common(x, y)
        if size is None:
            raise NoValue(_mismatch(x, y))
        return _at(x, size).key, _at(y, size).key

    def mismatch(self, a: Key, b: Key) -> str:
        """Return why the layers `a` and `b` are not compared; empty if they are."""
        x, y = self.given[a], self.given[b]
        return _mismatch(x, y) if _common(x, y) is None else ""

    @property
    def result_layers(self) -> list[LayerSize]:
        """The layers as a result shows them, with a note for maps compared at common frequencies with other sizes."""
        spaces = {key: layer.space for key, layer in self.layers.items() if layer.shape == DFT and layer.space}
        if not spaces:
            return list(self.given.values())
        sides = [(x, y) for left, right in self.pair_blocks for x in left for y in right if {x, y} <= spaces.keys()]
        common = {key for x, y in sides if spaces[x] != spaces[y] for key in (x, y)}
        return [replace(layer, shape=COMMON) if key in common else layer for key, layer in self.given.items()]

    def resized(self, rows: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the rows as the models gave them, and those of averaged maps."""
        return {**rows, **{key: _average(rows[x.key], x, y.space) for key, (x, y) in self._averaged.items()}}

    def _by_size(self, keys: Sequence[Key]) -> list[list[LayerSize]]:
        layers = [self.given[key] for key in keys]
        sizes = dict.fromkeys(map(_size, layers))
        return [[layer for layer in layers if _size(layer) == size] for size in sizes]

    def _at(self, layer: LayerSize, size: tuple[int, ...]) -> Key:
        here = _at(layer, size)
        self.layers[here.key] = here
        if here is not layer:
            self._averaged[here.key] = (layer, here)
        return here.key


def _size(layer: LayerSize) -> tuple[int, ...]:
    return layer.space if layer.spectral else layer.space or (layer.rows,)


def _common(x: LayerSize, y: LayerSize) -> tuple[int, ...] | None:
    """Return the size of feature maps at which two layers are compared, if there is one."""
    if _size(x) == _size(y):
        return _size(x)
    if x.spectral and AVERAGED not in (x.shape, y.shape):
        return common_grid(x.space, y.space)
    if x.spectral and not (x.space and y.space):
        return ()
    if x.space and len(x.space) == len(y.space):
        return tuple(map(min, x.space, y.space))
    return None


def _at(layer: LayerSize, size: tuple[int, ...]) -> LayerSize:
    """Return a layer as it is compared with others at `size`: averaged down where that was requested."""
    if size == _size(layer) or (layer.spectral and (layer.shape != AVERAGED or not size)):
        return layer
    name, share = f"{layer.name}@{'x'.join(map(str, size))}", (math.prod(size), math.prod(layer.space))
    if layer.spectral:
        return replace(layer, name=name, width=layer.width * share[0] // share[1], space=size)
    return replace(layer, name=name, rows=layer.rows * share[0] // share[1], space=size)


def _average(rows: Tensor, layer: LayerSize, size: tuple[int, ...]) -> Tensor:
    if not layer.spectral:
        maps = rows.reshape(-1, *layer.space, rows.shape[1]).movedim(-1, 1)
        return positions(resize_to(maps, size))
    if tuple(rows.shape[2:]) != layer.space:
        raise ShapeError(
            f"layer {name_of(layer.key)!r} gave maps of {shape_in_words(rows.shape[2:])} and of "
            f"{shape_in_words(layer.space)} before; bring all inputs to one size, or choose the shape 'pool'."
        )
    return resize_to(rows, size)


def _mismatch(x: LayerSize, y: LayerSize) -> str:
    if x.spectral:
        return mismatch_in_words(
            f"layer {x.name!r} of {x.model!r}", x.space, f"layer {y.name!r} of {y.model!r}", y.space
        )
    maps = x.shape == y.shape == "positions"
    return (
        f"layer {x.name!r} of {x.model!r} gives {x.rows_per_example:,g} rows an example and layer {y.name!r} of "
        f"{y.model!r} {y.rows_per_example:,g}; "
        + ("""say resize="average" to average the larger map down, or use """ if maps else "use ")
        + "a shape with one row an example, such as 'pool' or 'mean'."
    )


def _require_layer(name: str, model: str, layers: Sequence[str]) -> None:
    if name not in layers:
        raise UnknownName(
            f"`pairs` names layer {name!r}, which {model!r} does not give{did_you_mean(name, layers) or '.'}",
            argument="pairs",
        )
