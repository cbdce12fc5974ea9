"""`Spectra` and `LayerSpectra`: moments for each spatial frequency, what DFT-CCA of conv layers reads.

On data closed under translation features of different frequencies don't correlate, so that the covariance of flattened
maps falls into blocks of c × c, one for each place of the map (theorem 1 of Raghu et al. 2017, arXiv:1706.05806), and
these blocks are all there is. On other data they are a part; `off_block_share` tells how much lies outside them.

`LayerSpectra` is a transform in front of `LayerMoments`: maps are shifted and scaled, transformed, and added up in
blocks. A *view* is a layer on a grid: its own, or a smaller one on which it meets smaller maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_maps, refuse_non_finite, summing_dtype
from netkin.errors import NoValue, ShapeError, ValueFault
from netkin.statistics.collector import (
    Collector,
    Key,
    Numbers,
    Price,
    Rectangle,
    Study,
    chunk_of,
    keys_of,
    label,
    name_of,
    one_feed,
    place_of,
    refuse_missing,
)
from netkin.statistics.frequencies import (
    Grid,
    apart,
    common_grid,
    frequencies,
    in_words,
    off_block_share,
    placed,
    regrouped,
)
from netkin.statistics.layer_moments import LayerMoments, LinearSettings, Parts, by_chunk, first_shift
from netkin.statistics.moments import Moments
from netkin.statistics.products import power_of_two
from netkin.statistics.rows import LayerRows
from netkin.statistics.sides import CovarianceSide
from netkin.statistics.spectral_costs import CHUNK, crosses, examples_at_once, half, operations, transform_bytes, views

if TYPE_CHECKING:
    from typing_extensions import Self

FOLD = 64  # examples gathered before they are transformed
SAMPLE = 64  # examples whose maps are kept, to tell how much lies off the blocks
WAYS = """shape='pool', pairs='corresponding', resize='average'"""

View = tuple[Key, Grid]


class Spectra(Moments):
    """A pair of layers in blocks, one for each frequency of their maps; the linear measures read it like any moments.

    `pwcca` and `cka_debiased` alone have no value here: they look at single units, or need sums that are not kept.
    """

    @classmethod
    def of(cls, X: Any, Y: Any, precision: torch.dtype | None = torch.float64) -> Spectra:
        """Return the spectra of two layers' maps, n × c × h × w, of the same examples, differentiably.

        A larger map is regrouped to the grid of the smaller; a matrix, n × d, or a map of one place has part in the
        zero frequency alone.
        """
        X, Y = placed(as_maps(X, "X")), placed(as_maps(Y, "Y"))
        if len(X) != len(Y):
            raise ShapeError(
                f"`X` and `Y` must describe the same examples; got {len(X)} and {len(Y)}. "
                "Run both models on the same probe batch."
            )
        for name, maps in (("`X`", X), ("`Y`", Y)):
            refuse_non_finite(maps, name)
        collector = LayerSpectra([(["X"], ["Y"])], precision=precision or X.dtype, sample=0)
        collector.called = {"X": "`X`", "Y": "`Y`"}
        collector._fold({"X": X, "Y": Y.to(X.device)}, np.arange(len(X)))
        return collector.pair("X", "Y")


class LayerSpectra(Collector):
    """Spectra of many layers; `collector[a, b]` is the pair that a measure reads.

    `rectangles` says which pairs are wanted: each is (names, names), all of the first with all of the second.
    `precision` is that of transforms and products; sums are kept in float64. Of `sample` examples the maps are kept, to
    tell how much of the covariance lies off the blocks.

    Example:
        >>> collector = LayerSpectra([(["a"], ["b"])])
        >>> for _ in range(3):
        ...     maps = torch.randn(20, 3, 8, 8)
        ...     collector.update({"a": maps, "b": maps.flip(1)})
        >>> collector["a", "b"].n
        60
    """

    kind = "LayerSpectra"
    holds = "Spectra"
    numbers_rows = False
    settings_for = LinearSettings.of
    stored = (
        "rectangles", "names", "precision", "sample", "seed", "chunks", "called", "resolutions", "_shifts", "_moments",
        "_waiting", "_waiting_numbers", "_kept", "_batches", "_numbers", "_counts",
    )  # fmt: skip

    def __init__(
        self,
        rectangles: Sequence[Rectangle],
        *,
        precision: torch.dtype = torch.float64,
        sample: int = SAMPLE,
        seed: int = 0,
        chunks: int = 0,
    ):
        self.rectangles = [(list(left), list(right)) for left, right in rectangles]
        self.names = keys_of(self.rectangles)
        self.precision, self.sample, self.seed, self.chunks = precision, sample, seed, chunks
        self.called: dict[Key, str] = {}  # what messages call a layer, where not by its name
        self._shifts: dict[Key, Tensor] = {}  # what is taken off the maps of each layer
        self._moments = LayerMoments([], precision=precision, chunks=chunks)
        self._waiting: dict[Key, list[Tensor]] = {name: [] for name in self.names}
        self._waiting_numbers: list[np.ndarray] = []
        self._kept = LayerRows(self.names, cap=sample, seed=seed) if sample else None
        self._batches, self._numbers = 0, Numbers()
        self._counts = np.zeros(max(chunks, 1), dtype=np.int64)
        self.resolutions: Mapping[Key, float] = {}  # of data that came in half precision
        self.release()

    @classmethod
    def price(cls, settings: LinearSettings, study: Study) -> Price | None:
        if not study.spectral:
            return None
        cls._refuse_unfit(settings)
        seen, met = views(study), crosses(study)
        sums = sum(blocks * sum(left) * sum(right) for left, right, blocks in met)
        pairs = max((2 * blocks * max(left) * max(right) for left, right, blocks in met), default=0)
        own = sum(half(grid) * (layer.width // math.prod(grid)) ** 2 for layer, grid in seen)
        sides = 2 * own * (3 if settings.whitens else 1)
        maps = sum(layer.width * layer.itemsize for layer in study.sizes)
        reading = FOLD * maps + transform_bytes(study, seen)
        total = 16 * max(study.chunks, 1) * (own + sums) + 2 * SAMPLE * maps + max(reading, 16 * (sides + pairs))
        precision = str(settings.precision(study)).removeprefix("torch.")
        count = None if study.examples is None else study.examples * operations(seen, met)
        return Price(
            total, f"Spectra, streamed, products in {precision}", "spectra", count,
            why=", as they hold any number of examples", ways=WAYS,
        )  # fmt: skip

    @classmethod
    def _refuse_unfit(cls, settings: LinearSettings) -> None:
        if settings.unfit_for_spectra:
            raise ValueFault(cls.unfit(settings.unfit_for_spectra))

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        made = cls(study.rectangles, precision=settings.precision(study), seed=study.seed, chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    @classmethod
    def of(cls, maps: Mapping[Key, Any], *, precision: torch.dtype = torch.float64) -> Self:
        """Return the spectra of all pairs of some layers' maps, differentiably."""
        collector = cls([(list(maps), list(maps))], precision=precision, sample=0)
        given = {key: placed(as_maps(array, name_of(key))) for key, array in maps.items()}
        _refuse_unpaired(given)
        for key, array in given.items():
            refuse_non_finite(array, label(key))
        collector._counts += len(next(iter(given.values())))
        collector._fold(given, np.arange(collector.n))
        return collector

    def serves(self, settings: LinearSettings) -> str:
        self._refuse_unfit(settings)
        return settings.lacking(self.precision, debiased=False)

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Spectra:
        """Return the spectra of the layers `a` and `b`, in that order."""
        self.settle()
        place_of(self.rectangles, a, b, self.names, "spectra")
        if not self._shifts:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        grid = common_grid(self._grid(a), self._grid(b))
        if grid is None:
            raise NoValue(apart(self._label(a), self._grid(a), self._label(b), self._grid(b)))
        x, y = (a, grid or self._grid(a)), (b, grid or self._grid(b))
        block, turned = self._moments._find(x, y)
        cross, _ = block.centred(*((y, x) if turned else (x, y)), without, False)
        cross = cross.mH if turned else cross
        first, second = (self._side(view, cross.is_complex(), without) for view in (x, y))
        if not grid and cross.is_complex():  # a layer without space meets the zero frequency of a map alone
            others = math.prod(x[1] or y[1]) - 1
            return Spectra(first, second, torch.cat([cross, cross.new_zeros(others, *cross.shape[1:])]))
        return Spectra(first, second, frequencies(grid, cross.device).whole(cross))

    def _grid(self, key: Key) -> Grid:
        return tuple(self._shifts[key].shape[1:])

    def _side(self, view: View, in_complex: bool, without: int | None) -> CovarianceSide:
        if (view, in_complex, without) not in self._sides:
            layer, here = self._moments._layers[view], frequencies(view[1], self._shifts[view[0]].device)
            n, mean, half = layer.centred(without)
            side = CovarianceSide(
                self._label(view[0]), n, here.whole(mean), half, scale=layer.scale, resolution=layer.resolution,
                rounding=torch.finfo(self.precision).eps, frequencies=here,
            )  # fmt: skip
            if not bool(torch.isfinite(side.total)):
                raise ValueFault(
                    f"{side.name} gave NaN or Inf; mend the model or leave out the examples that cause them."
                )
            side = side.in_complex if in_complex and not side.mean.is_complex() else side
            self._sides[view, in_complex, without] = side
        return self._sides[view, in_complex, without]

    def release(self) -> None:
        self._sides: dict[tuple[View, bool, int | None], CovarianceSide] = {}
        self._shares: dict[View, float] = {}
        self._workspace = torch.empty(0)

    @property
    def n(self) -> int:
        """The number of examples so far."""
        return int(self._counts.sum())

    @property
    def sizes(self) -> dict[Key, tuple[int, ...]]:
        """The channels and the size of the map of every layer seen so far."""
        return {name: tuple(shift.shape) for name, shift in self._shifts.items()}

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(self._counts.tolist()) if self.chunks else ()

    @property
    def sampled(self) -> int:
        """The number of examples whose maps are kept."""
        return self._kept.n if self._kept else 0

    def off_block_share(self, name: Key, other: Key | None = None) -> float:
        """Return which share of the energy of a layer's covariance lies off its blocks, from the sample.

        The blocks are those of the grid on which it meets the layer `other`; by default those of its own grid.
        """
        self.settle()
        if self._kept is None or not self._kept.n:
            raise NoValue("no examples have been kept; collect with `sample=64`, and call `update` first.")
        own = self._grid(name)
        grid = own if other is None else common_grid(own, self._grid(other)) or own
        if (name, grid) not in self._shares:
            rows = self._kept.sample(name).X
            self._shares[name, grid] = off_block_share(rows.reshape(len(rows), *self._shifts[name].shape), grid)
        return self._shares[name, grid]

    def told(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        """Return how exact blocks for each frequency are for the layers of these pairs."""
        self.settle()
        exact = "exact for data closed under translation"
        mapped = [(x, y) for pair in pairs for x, y in (pair, pair[::-1]) if self._grid(x)]
        if self.sampled < 4 or not mapped:
            return exact
        shares = [self.off_block_share(*pair) for pair in mapped]
        ends = dict.fromkeys(f"{share:.1%}" for share in (min(shares), max(shares)))
        sample = f" (on a sample of {self.sampled:,} of {self.n:,} examples)" if self.sampled < self.n else ""
        return f"{exact}; here {' to '.join(ends)} of a layer's covariance energy lies off the blocks{sample}"

    # --- folding ------------------------------------------------------------------------------------------------------

    def update(self, maps: Mapping[Any, Any], numbers: Any = None, *, owners: Any = None) -> None:
        """Fold in one batch: maps n × c × space, or a matrix, for every layer, the same examples in each."""
        maps = one_feed(self, maps)
        refuse_missing(self.names, maps)
        given = {name: self._checked(name, maps[name]) for name in self.names}
        _refuse_unpaired(given)
        places = self._numbers.take(numbers, len(given[self.names[0]]))
        self._counts += np.bincount(chunk_of(places, self.chunks), minlength=len(self._counts))
        if self._kept is not None:
            self._kept.update({name: array.flatten(1) for name, array in given.items()}, places)
        self._batches += 1
        self._waiting_numbers.append(places)
        fold = sum(map(len, self._waiting_numbers)) >= FOLD
        for name, array in given.items():
            # what waits must not change when the caller's array does
            self._waiting[name].append(array if fold else array.clone())
        if fold:
            self.settle()

    def _checked(self, name: Key, maps: Any) -> Tensor:
        array, waiting = placed(as_maps(maps, name_of(name)).detach()), self._waiting[name]
        before = self.sizes.get(name) or (tuple(waiting[0].shape[1:]) if waiting else None)
        if before is not None and tuple(array.shape[1:]) != before:
            raise ShapeError(
                f"{self._label(name)} gave {_sized(array.shape[1:])} in batch {self._batches} and {_sized(before)} "
                "before; bring all inputs to one size, or choose the shape 'pool'."
            )
        if array.device.type == "cpu":
            refuse_non_finite(array, f"{self._label(name)} in batch {self._batches}")
        return array

    def _label(self, name: Key) -> str:
        return self.called.get(name, label(name))

    def settle(self) -> None:
        """Transform what waits."""
        if self._waiting_numbers:
            maps = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in self._waiting.items()}
            numbers = np.concatenate(self._waiting_numbers)
            self._waiting, self._waiting_numbers = {name: [] for name in self.names}, []
            self._fold(maps, numbers)

    def _fold(self, maps: Mapping[Key, Tensor], numbers: np.ndarray) -> None:
        self._sides, self._shares = {}, {}
        if not self._shifts:
            self._begin(maps)
        chunks = chunk_of(numbers, self.chunks)
        step = self._step(maps[self.names[0]].device)
        for start in range(0, len(numbers), step):
            here = slice(start, start + step)
            order, parts = by_chunk([chunks[here]]) if self.chunks else (None, [(0, slice(None))])
            self._add({name: array[here] for name, array in maps.items()}, order, parts)

    def _add(self, maps: Mapping[Key, Tensor], order: Tensor | None, parts: Parts) -> None:
        """Add the products of a few examples."""

        def columns_of(view: Any) -> tuple[Tensor, Parts]:
            name, grid = view
            array = maps[name] if order is None else maps[name][order.to(maps[name].device)]
            blocks = frequencies(grid, array.device).blocks(regrouped(self._centred(name, view, array), grid))
            columns = blocks.new_ones(*blocks.shape[:2], blocks.shape[2] + 1)
            if blocks.requires_grad:
                return torch.cat([blocks, columns[..., -1:]], -1), parts
            columns[..., :-1] = blocks
            return columns, parts

        self._moments.add_columns(columns_of)

    def _centred(self, name: Key, view: View, maps: Tensor) -> Tensor:
        """Return maps about the shift, in the layer's scale: before the transform, which would spread their offset."""
        layer = self._moments._layers[view]
        layer.resolution = max(layer.resolution, torch.finfo(maps.dtype).eps)
        centred = self._difference(maps, self._shifts[name].to(_working(maps, self.precision)))
        if not layer.varies:
            scale = power_of_two(centred)
            usual = 2.0**-20 < scale < 2.0**20  # ordinary numbers are left as they are
            self._moments.rescale(view, 1.0 if usual else scale)
        return centred if layer.scale == 1 else centred * layer.scale

    def _difference(self, maps: Tensor, shift: Tensor) -> Tensor:
        """Return ``maps - shift`` in memory that is used again: asking for it anew would cost more than the sums."""
        if maps.requires_grad:
            return maps - shift
        memory = self._workspace
        if memory.numel() < maps.numel() or (memory.dtype, memory.device) != (shift.dtype, shift.device):
            memory = self._workspace = torch.empty(maps.numel(), dtype=shift.dtype, device=shift.device)
        return torch.sub(maps, shift, out=memory[: maps.numel()].view(maps.shape))

    def _step(self, device: torch.device) -> int:
        """Return how many examples to take at a time."""
        if device.type != "cpu":
            return 8 * CHUNK
        widest = max((layer.width for layer in self._moments._layers.values()), default=0)
        step = examples_at_once(max(shift.numel() for shift in self._shifts.values()), widest)
        # sums are kept in float64, and adding to them costs float32 more than its caches save
        return step if self.precision == torch.float64 else 2 * step

    def _begin(self, maps: Mapping[Key, Tensor]) -> None:
        """Find out, now that sizes are known, on which grids the layers meet."""
        self._shifts = {name: first_shift(array) for name, array in maps.items()}
        joined = (
            self._joined(x, y)
            for left, right in self.rectangles
            for x in self._by_size(left)
            for y in self._by_size(right)
        )
        self._open([rectangle for rectangle in joined if rectangle])

    def _open(self, rectangles: list[Rectangle]) -> None:
        self._moments = LayerMoments(rectangles, precision=self.precision, chunks=self.chunks)
        for view in self._moments.names:
            name, grid = cast(View, view)
            shift, here = self._shifts[name], frequencies(grid, self._shifts[name].device)
            blocks = here.blocks(regrouped(shift.unsqueeze(0), grid))
            self._moments.open_layer(view, blocks[:, 0], self.resolutions.get(name, 0.0))
        self._moments.open_blocks(dict.fromkeys(self._moments.names))

    def _by_size(self, names: Sequence[Key]) -> list[list[Key]]:
        sizes = {name: self._grid(name) for name in names}
        return [[name for name in names if sizes[name] == size] for size in dict.fromkeys(sizes.values())]

    def _joined(self, left: list[Key], right: list[Key]) -> Rectangle | None:
        """Return layers of one size and layers of another as views on the grid that they have in common."""
        ours, theirs = self._grid(left[0]), self._grid(right[0])
        grid = common_grid(ours, theirs)
        if grid is None:
            return None
        return [(name, grid or ours) for name in left], [(name, grid or theirs) for name in right]

    # --- merging and files --------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        """Return the spectra of the data of both."""
        facts = {"layers": "rectangles", "precision": "precision", "sample": "sample", "seed": "seed"}
        self._refuse_unlike(other, **facts, chunks="chunks")
        self.settle()
        other.settle()
        first, second = (self, other) if self._shifts else (other, self)
        merged = first._copy()
        if first._shifts and second._shifts:
            self._refuse_unlike(other, sizes="sizes")
            merged._moments = first._moments.merge(second._moments)
            if merged._kept is not None and second._kept is not None:
                start = 0 if first._numbers.given and second._numbers.given else first._numbers.next
                merged._kept = merged._kept.merge(second._kept.renumbered(start))
            merged._batches, merged._counts = first._batches + second._batches, first._counts + second._counts
            merged._numbers.next = max(first._numbers.next, second._numbers.next)
        return merged


def _working(maps: Tensor, precision: torch.dtype) -> torch.dtype:
    """Return the precision to work in: never less than the data's own."""
    double = summing_dtype(maps.device)
    return double if precision == torch.float64 else torch.promote_types(maps.dtype, torch.float32)


def _refuse_unpaired(maps: Mapping[Key, Tensor]) -> None:
    first, *others = maps
    for name in others:
        if len(maps[name]) != len(maps[first]):
            raise ShapeError(
                f"layers {name_of(first)!r} and {name_of(name)!r} gave {len(maps[first]):,} and {len(maps[name]):,} "
                "examples in one batch; feed all layers the same examples."
            )


def _sized(size: Sequence[int]) -> str:
    channels, *space = size
    return f"{channels} channels of {in_words(space)}" if space else f"{channels} features"
