"""`Spectra` and `LayerSpectra`: moments for each spatial frequency, for DFT-CCA of conv layers.

On data closed under translation features of different frequencies don't correlate, so that the covariance of flattened
maps falls into blocks of c × c, one for each place of the map (theorem 1 of Raghu et al. 2017, arXiv:1706.05806), and
these blocks are all there is. On other data they are a part; `off_block_share` is the share outside them.

`LayerSpectra` is a transform in front of `LayerMoments`: maps are shifted and scaled, transformed, and added up in
blocks. A *view* is a layer on a grid: its own, or a smaller one for comparison with smaller maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_maps, require_finite, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.statistics.collector import (
    CostEstimate,
    Key,
    LayerSize,
    PairBlock,
    Study,
    keys_of,
    label,
    one_feed,
    require_pair,
    unfit_for_spectra,
)
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.frequencies import (
    Grid,
    common_grid,
    frequencies,
    mismatch_in_words,
    off_block_share,
    placed,
    regrouped,
)
from netkin.statistics.layer_moments import (
    Columns,
    LayerMoments,
    LinearSettings,
    Parts,
    by_chunk,
    first_shift,
    joined,
)
from netkin.statistics.layer_rows import LayerRows
from netkin.statistics.linear_algebra import power_of_two
from netkin.statistics.moments import Moments

if TYPE_CHECKING:
    from typing_extensions import Self

FOLD = 64  # examples gathered before they are transformed
SAMPLE = 64  # examples whose maps are kept, to estimate the share off the blocks
CHUNK = 256  # examples transformed at a time, at most
CACHED = 2**19  # numbers of one layer transformed at a time on a CPU: what its caches hold
SPECTRA_ADVICE = """shape='pool', pairs='corresponding', resize='average'"""  # out of spectra that are too large

View = tuple[Key, Grid]


class Spectra(Moments):
    """A pair of layers in blocks, one for each frequency of their maps; the linear measures read it like any moments.

    `pwcca` and `cka_debiased` alone have no value here: they depend on single features, or need sums that are not kept.
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
            require_finite(maps, name)
        collector = LayerSpectra([(["X"], ["Y"])], precision=precision or X.dtype)
        collector._fold({"X": [X], "Y": [Y.to(X.device)]}, {})
        return collector.pair("X", "Y")


class LayerSpectra(LayerMoments):
    """Spectra of many layers; `collector[a, b]` is the pair that a measure reads.

    `pair_blocks` are the wanted pairs: each is (names, names), all of the first with all of the second.
    `precision` is that of transforms and products; sums are kept in float64. The maps of a sample of examples are kept,
    to tell how much of the covariance lies off the blocks.

    Example:
        >>> collector = LayerSpectra([(["a"], ["b"])])
        >>> for _ in range(3):
        ...     maps = torch.randn(20, 3, 8, 8)
        ...     collector.update({"a": maps, "b": maps.flip(1)})
        >>> collector["a", "b"].n
        60
    """

    holds = "Spectra"
    _workspace = torch.empty(0)  # memory that one step after the other uses

    def __init__(
        self,
        pair_blocks: Sequence[PairBlock],
        *,
        precision: torch.dtype = torch.float64,
        seed: int = 0,
        chunks: int = 0,
    ):
        super().__init__(pair_blocks, precision=precision, chunks=chunks)
        self.seed = seed
        self.shifts: dict[Key, Tensor] = {}  # what is taken off the maps of each layer
        self.sampled_rows = LayerRows(self.names, cap=SAMPLE, seed=seed)

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate | None:
        if not study.spectral:
            return None
        cls._require_fit_for_spectra(settings)
        seen, cross = views(study), sum(_cross_entries(x, y) for x, y in study.pairs())
        squares = sum(half(grid) * (layer.width // math.prod(grid)) ** 2 for layer, grid in seen)
        sides = 2 * squares * (3 if settings.whitens else 1)
        pairs = 2 * study.read_at_once(_cross_entries) * settings.matrices
        maps = sum(layer.width * layer.itemsize for layer in study.sizes)
        reading = FOLD * maps + transform_bytes(study, seen)
        total = 16 * max(study.chunks, 1) * (squares + cross) + 2 * SAMPLE * maps + max(reading, 16 * (sides + pairs))
        return CostEstimate(
            total, f"Spectra, streamed, products in {settings.precision_name(study)}", "spectra",
            why=", as they hold any number of examples", advice=SPECTRA_ADVICE,
        )  # fmt: skip

    @classmethod
    def _require_fit_for_spectra(cls, settings: LinearSettings) -> None:
        if settings.unfit_for_spectra:
            raise InvalidValue(unfit_for_spectra(settings.unfit_for_spectra))

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        made = cls(study.pair_blocks, precision=settings.precision(study), seed=study.seed, chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def serves(self, settings: LinearSettings) -> str:
        self._require_fit_for_spectra(settings)
        return settings.lacking(self.precision, debiased=False)

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Spectra:
        self.flush()
        require_pair(a, b, self.names, "spectra", self.pair_blocks)
        grid = common_grid(self._grid(a), self._grid(b))
        if grid is None:
            raise NoValue(mismatch_in_words(label(a), self._grid(a), label(b), self._grid(b)))
        x, y = (a, grid or self._grid(a)), (b, grid or self._grid(b))
        block, turned = self._find(x, y)
        cross, _ = block.centred(*((y, x) if turned else (x, y)), without, False)
        cross = cross.mH if turned else cross
        first, second = (self._side((view, cross.is_complex()), without) for view in (x, y))
        if not grid and cross.is_complex():  # a layer without space is paired with the zero frequency of a map only
            others = math.prod(x[1] or y[1]) - 1
            return Spectra(first, second, torch.cat([cross, cross.new_zeros(others, *cross.shape[1:])]))
        return Spectra(first, second, frequencies(grid, cross.device).whole(cross))

    def _grid(self, key: Key) -> Grid:
        return tuple(self.shifts[key].shape[1:])

    def _new_side(self, key: Any, without: int | None) -> CovarianceSide:
        view, in_complex = key
        layer, here = self.layers[view], frequencies(view[1], self.shifts[view[0]].device)
        n, mean, half = layer.centred(without)
        side = CovarianceSide(
            label(view[0]), n, here.whole(mean), half, scale=layer.scale, resolution=layer.resolution,
            rounding=torch.finfo(self.precision).eps, frequencies=here,
        )  # fmt: skip
        return side.in_complex if in_complex and not side.mean.is_complex() else side

    @property
    def n(self) -> int:
        """The number of examples so far."""
        return int(self.counts.sum())

    def off_block_share(self, name: Key, other: Key | None = None) -> float:
        """Return which share of the energy of a layer's covariance lies off its blocks, from the sample.

        The blocks are those of the grid on which it is compared with the layer `other`; by default those of its own
        grid.
        """
        self.flush()
        size = self._grid(name)
        grid = size if other is None else common_grid(size, self._grid(other)) or size
        rows = self.sampled_rows.sample(name).X
        maps = rows.reshape(len(rows), *self.shifts[name].shape)
        return self.once(("off the blocks", name, grid), lambda: off_block_share(maps, grid))

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        """Return how exact blocks for each frequency are for the layers of these pairs."""
        self.flush()
        exact = "exact for data closed under translation"
        mapped = [(x, y) for pair in pairs for x, y in (pair, pair[::-1]) if self._grid(x)]
        sampled = self.sampled_rows.n
        if sampled < 4 or not mapped:
            return exact
        shares = [self.off_block_share(*pair) for pair in mapped]
        ends = dict.fromkeys(f"{share:.1%}" for share in (min(shares), max(shares)))
        sample = f" (on a sample of {sampled:,} of {self.n:,} examples)" if sampled < self.n else ""
        return f"{exact}; here {' to '.join(ends)} of a layer's covariance energy lies off the blocks{sample}"

    # --- folding ------------------------------------------------------------------------------------------------------

    def frame(self) -> dict[Key, tuple[Tensor, float]]:
        self.flush()
        return {name: (shift, 0.0) for name, shift in self.shifts.items()}

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add one batch: maps n × c × space, or a matrix, for every layer, the same examples in each."""
        super().update(rows, numbers)
        maps = one_feed(self, rows)
        self.sampled_rows.update({name: as_maps(maps[name]).detach().flatten(1) for name in self.names}, numbers)

    def _enough(self, rows: Tensor) -> int:
        return FOLD

    @staticmethod
    def as_rows(array: Any, name: str) -> Tensor:
        return placed(as_maps(array, name))

    def _fold(self, waiting: Mapping[Key, list[Tensor]], chunks: Mapping[Key, list[np.ndarray]]) -> None:
        """Transform what waits, some examples at a time."""
        maps = {name: joined(parts) for name, parts in waiting.items()}
        if not self.shifts:
            self._begin(maps)
        of_examples = np.concatenate(chunks[self.names[0]]) if self.chunks else np.zeros(0)
        step = self._step(maps[self.names[0]].device)
        for start in range(0, len(maps[self.names[0]]), step):
            here = slice(start, start + step)
            order, parts = by_chunk([of_examples[here]]) if self.chunks else (None, [(0, slice(None))])
            self._transform({name: array[here] for name, array in maps.items()}, order, parts)
        self._workspace = torch.empty(0)

    def _transform(self, maps: Mapping[Key, Tensor], order: Tensor | None, parts: Parts) -> None:
        """Add the products of a few examples."""

        def columns_of(view: Any) -> Columns:
            name, grid = view
            array = maps[name] if order is None else maps[name][order.to(maps[name].device)]
            centred, here = self._centred(name, view, array), frequencies(grid, array.device)
            blocks = here.blocks(regrouped(centred, grid) if grid else centred.clone())  # of memory that is used again
            totals = torch.stack([blocks[:, rows].sum(1) for _, rows in parts], 1)
            return Columns(blocks, blocks.conj().resolve_conj(), parts, totals)

        self._add_columns(columns_of)

    def _centred(self, name: Key, view: View, maps: Tensor) -> Tensor:
        """Return maps about the shift, in the layer's scale: before the transform, which would spread their offset."""
        layer = self.layers[view]
        layer.resolution = max(layer.resolution, torch.finfo(maps.dtype).eps)
        single = torch.promote_types(maps.dtype, torch.float32)  # never less precise than the data
        working = summing_dtype(maps.device) if self.precision == torch.float64 else single
        centred = self._difference(maps, self.shifts[name].to(working))
        if not layer.varies:
            scale = power_of_two(centred)
            usual = 2.0**-20 < scale < 2.0**20  # ordinary numbers are left as they are
            self._rescale(view, 1.0 if usual else scale)
        return centred if layer.scale == 1 else centred * layer.scale

    def _difference(self, maps: Tensor, shift: Tensor) -> Tensor:
        """Return ``maps - shift`` in memory that is used again: allocating it again would cost more than the sums."""
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
        widest = max((layer.width for layer in self.layers.values()), default=0)
        step = examples_at_once(max(shift.numel() for shift in self.shifts.values()), widest)
        # sums are kept in float64, and adding to them costs float32 more than its caches save
        return step if self.precision == torch.float64 else 2 * step

    def _begin(self, maps: Mapping[Key, Tensor]) -> None:
        """Find out, now that sizes are known, on which grids the layers are compared."""
        shifts = {name: shift.to(maps[name].device) for name, (shift, _) in self._first_frame.items()}
        self.shifts = shifts or {name: first_shift(array, self.precision) for name, array in maps.items()}
        pair_blocks = list[PairBlock]()
        for left, right in self.pair_blocks:
            for x, y in product(self._by_size(left), self._by_size(right)):
                grid = common_grid(self._grid(x[0]), self._grid(y[0]))
                if grid is not None:
                    views = [[(name, grid or self._grid(name)) for name in side] for side in (x, y)]
                    pair_blocks.append((views[0], views[1]))
        for view in keys_of(pair_blocks):
            name, grid = cast(View, view)
            shift, here = self.shifts[name], frequencies(grid, self.shifts[name].device)
            blocks = here.blocks(regrouped(shift.unsqueeze(0), grid))
            self._open_layer(view, blocks[:, 0], self.resolutions.get(name, 0.0))
        self._open_blocks(pair_blocks, dict.fromkeys(self.layers))

    def _by_size(self, names: Sequence[Key]) -> list[list[Key]]:
        sizes = {name: self._grid(name) for name in names}
        return [[name for name in names if sizes[name] == size] for size in dict.fromkeys(sizes.values())]

    # --- merging and files --------------------------------------------------------------------------------------------

    def _add(self, other: LayerMoments) -> None:
        self._require_alike(other, sizes="sizes")
        super()._add(other)

    def merge(self, other: Self) -> Self:
        self._require_alike(other, seed="seed")
        merged = super().merge(other)
        merged.sampled_rows = self.sampled_rows.merge(other.sampled_rows)
        return merged


def _cross_entries(x: LayerSize, y: LayerSize) -> int:
    """Return the entries of a cross moment, of which one of each conjugate pair of blocks is summed."""
    grid = common_grid(x.space, y.space) or ()
    widths = [layer.width // math.prod(grid or layer.space) for layer in (x, y)]
    return half(grid) * widths[0] * widths[1]


def views(study: Study) -> list[tuple[LayerSize, Grid]]:
    """Return every layer on every grid on which it is compared."""
    keys: dict[tuple[Key, Grid], None] = {}
    for left, right in study.pair_blocks:
        grid = common_grid(study.layers[left[0]].space, study.layers[right[0]].space)
        keys |= {(key, grid or study.layers[key].space): None for key in (*left, *right)}
    return [(study.layers[key], grid) for key, grid in keys]


def half(grid: Grid) -> int:
    """Return how many frequencies of a grid are summed: one of each conjugate pair."""
    return math.prod(grid) // 2 + 1


def transform_bytes(study: Study, views: list[tuple[LayerSize, Grid]]) -> int:
    """Return the bytes of what is transformed at a time: the steps of a layer, its conjugate, and both side by side."""
    largest = max(layer.width for layer, _ in views)
    step = examples_at_once(largest, max(layer.width // math.prod(grid) for layer, grid in views))
    once = all(len(side) == 1 for rectangle in study.pair_blocks for side in rectangle)
    held = 2 * largest if once else sum(layer.width for layer, _ in views)
    return 8 * step * (5 * largest + 4 * held)


def examples_at_once(largest: int, widest: int) -> int:
    """Return how many maps of at most so many numbers to transform at a time, for blocks of at most such a width.

    Few fit the caches, but blocks far wider than that would be read and written too often.
    """
    return min(max(CACHED // largest, widest // 2, 16), CHUNK)
