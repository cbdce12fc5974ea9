"""`LayerMoments`: the collector of moments, one pass over the data for all pairs of layers.

Every layer's rows x are shifted, scaled and given one or two more columns: ``[x, 1]``, or ``[x, ‖x‖², 1]`` when the
debiasing sums are wanted. Side by side, one product of these matrices then holds everything: the cross moments, the
sums, the counts, and ``Σ x‖y‖²`` and ``Σ ‖x‖²‖y‖²`` as well. A change of shift or scale is a linear map of such
columns, so merging rebases by a few row operations.

Sums have two leading axes. The first are chunks of the examples, kept apart where standard errors are requested; they
share one shift and scale, so that leaving one out is a subtraction. The second are blocks: one, or one for each spatial
frequency, see `netkin.statistics.spectra`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.errors import InvalidValue, NoValue
from netkin.memory import is_cuda
from netkin.statistics.collector import (
    CostEstimate,
    Key,
    Owned,
    PairBlock,
    RowCollector,
    Settings,
    Study,
    chunk_of,
    keys_of,
    label,
    name_of,
    one_feed,
    require_as_many_rows,
    require_pair,
    row_examples,
    sum_of_chunks,
)  # fmt: skip
from netkin.statistics.covariances import CovarianceSide, PairSide
from netkin.statistics.linear_algebra import power_of_two, squared_norm
from netkin.statistics.moments import Moments
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

AT_ONCE = 2**20  # entries of a product that are added to sums of another precision at a time
FOLD = 512  # rows gathered before a product is taken: small batches waste the product and the float64 sums
CHUNKED_FOLD = 2048  # the same where products are taken chunk by chunk
ON_GPU = 8  # times as many rows wait on a GPU, which is kept busy by few large products
SAMPLE = 256  # rows whose median estimates that of all

Parts = list[tuple[int, slice]]  # which rows, sorted by chunk, belong to which chunk


@dataclass(frozen=True)
class LinearSettings(Settings):
    """What the linear measures need: precision, sums, and the memory for reading them."""

    precise: bool = False  # products in float64
    debiased: bool = False  # the debiasing sums
    whitens: bool = False  # each layer is decomposed
    rotates: bool = False  # wide layers are rotated into their row space
    uncentred: bool = False  # layers are looked at about the origin
    unfit_for_spectra: str = ""  # a measure that depends on single features or debiases

    @classmethod
    def of(cls, measure: Any) -> LinearSettings:
        facts = measure.facts
        unfit = "rotation" not in facts.unchanged_by or facts.debiases
        return cls(
            facts.precise, facts.debiases, facts.whitens, facts.precise and not facts.debiases,
            "translation" not in facts.unchanged_by, measure.name if unfit else "",
        )  # fmt: skip

    def joined(self, other: LinearSettings) -> LinearSettings:
        both = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return LinearSettings(*(mine or theirs for mine, theirs in both))

    def precision(self, study: Study) -> torch.dtype:
        """Return the precision of the products: never less than the data's own."""
        return torch.float64 if self.precise or study.doubles else torch.float32

    def precision_name(self, study: Study) -> str:
        return str(self.precision(study)).removeprefix("torch.")

    def lacking(self, precision: torch.dtype, debiased: bool) -> str:
        """Return what a collector with such products and sums lacks; empty if nothing."""
        lacks = ["products in float64"] if self.precise and precision != torch.float64 else []
        lacks += ["the debiasing sums"] if self.debiased and not debiased else []
        return " and ".join(lacks)

    @property
    def matrices(self) -> int:
        """How many matrices of the size of a cross moment a pair holds while it is measured."""
        return (6 if self.rotates else 1) + (2 if self.uncentred else 0)


class LayerMoments(RowCollector):
    """Moments of many layers; `collector[a, b]` is the pair that a measure reads.

    `pair_blocks` are the wanted pairs: each is (names, names), and all of the first are paired with all of the
    second by one product. `precision` is that of the products; sums are kept in float64, in `chunks` parts.

    Example:
        >>> collector = LayerMoments([(["a"], ["b"])])
        >>> for _ in range(3):
        ...     X = torch.randn(10, 4)
        ...     collector.update({"a": X, "b": 2 * X})
        >>> collector["a", "b"].n
        30
    """

    holds = "Moments"
    numbers_rows = False
    settings_for = LinearSettings.of
    _first_frame: Mapping[Key, tuple[Tensor, float]] = MappingProxyType({})  # that of another part, to begin with
    _homes: Mapping[tuple[Key, Key], CrossSums] = MappingProxyType({})  # where pairs are summed, until blocks change

    def __init__(
        self,
        pair_blocks: Sequence[PairBlock],
        *,
        precision: torch.dtype = torch.float64,
        debiased: bool = False,
        chunks: int = 0,
    ):
        self.pair_blocks = [(list(left), list(right)) for left, right in pair_blocks]
        self.precision, self.debiased = precision, debiased
        self.layers: dict[Key, LayerSums] = {}
        self.blocks: list[CrossSums] = []
        self.waiting: list[tuple[dict[Key, Tensor], dict[Key, np.ndarray]]] = []  # rows, and the chunk of each
        super().__init__(keys_of(self.pair_blocks), chunks)

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate | None:
        if study.spectral:
            return None
        fold = CHUNKED_FOLD if study.chunks else FOLD
        extra, n, item = 2 if settings.debiased else 1, study.examples, settings.precision(study).itemsize
        widths = {key: layer.width + extra for key, layer in study.layers.items()}
        blocks = [(sum(widths[x] for x in left), sum(widths[y] for y in right)) for left, right in study.pair_blocks]
        squares, twice = sum(layer.width**2 for layer in study.sizes), 2 if settings.uncentred else 1
        sums = 8 * max(study.chunks, 1) * (sum(width**2 for width in widths.values()) + sum(x * y for x, y in blocks))
        widest = max(widths.values(), default=0)
        # whole batches are folded in at once, until some layer has `fold` rows
        most = max((layer.rows for layer in study.sizes), default=1)
        batches = -(-fold * (ON_GPU if is_cuda(study.device) else 1) // most)
        rows = min(batches * most, max((layer.rows_of(n) for layer in study.sizes), default=0) if n else batches * most)
        # columns of all layers, those of a block again side by side, its product, and a layer on its way to its columns
        folding = item * rows * (sum(widths.values()) + max((x + y for x, y in blocks), default=0) + 3 * widest)
        folding += 0 if item == 8 else item * max((x * y for x, y in blocks), default=0)
        pairs = study.read_at_once(lambda x, y: x.width * y.width)
        sides = twice * squares * (3 if settings.whitens else 1)
        reading = 8 * (sides + pairs * settings.matrices + 3 * widest**2)
        decomposing = 8 * twice * (4 * squares + pairs) if settings.whitens else 0
        return CostEstimate(
            sums + max(folding, reading, decomposing),
            f"Moments, streamed, products in {settings.precision_name(study)}", "moments", 1,
            ", as they hold any number of examples",
        )  # fmt: skip

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        precision = settings.precision(study)
        made = cls(study.pair_blocks, precision=precision, debiased=settings.debiased, chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def add_rows(self, rows: Mapping[Key, list[Tensor]], chunks: Mapping[Key, list[np.ndarray]], counts: Any) -> None:
        """Add rows of all layers and the chunk of each row; `counts` are their examples. The lists are emptied."""
        self.sizes = {name: tuple(parts[0].shape[1:]) for name, parts in rows.items()}
        self.counts += counts
        self._fold(rows, chunks)

    def serves(self, settings: LinearSettings) -> str:
        return settings.lacking(self.precision, self.debiased)

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add one batch: a matrix of rows for every layer, the same examples in each.

        `numbers` are those of the examples, counted as they come unless given; `owners` tells for layers whose examples
        have different numbers of rows the place of each row's example in the batch.
        """
        is_owned, matrices = isinstance(one_feed(self, rows), Owned), self.check_rows(rows)
        places = self.number_examples(numbers, min(map(len, matrices.values())))
        self.counts += np.bincount(chunk_of(places, self.chunks), minlength=len(self.counts))
        chunks: dict[Key, np.ndarray] = {}
        for name, matrix in matrices.items() if self.chunks else ():
            chunks[name] = chunk_of(row_examples(places, len(matrix), (owners or {}).get(name)), self.chunks)
        enough, waiting = self._enough(matrices[self.names[0]]), [*(parts for parts, _ in self.waiting), matrices]
        fold = any(sum(len(parts[name]) for parts in waiting) >= enough for name in self.names)
        if not (fold or is_owned):  # what waits must not change when the caller's array does
            matrices = {name: matrix.clone() for name, matrix in matrices.items()}
        self.waiting.append((matrices, chunks))
        if fold:
            self.flush()

    def _enough(self, rows: Tensor) -> int:
        """Return how many rows are worth a product."""
        return (CHUNKED_FOLD if self.chunks else FOLD) * (ON_GPU if rows.is_cuda else 1)

    def flush(self) -> None:
        """Take the products of the rows that wait."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            chunks = {name: [chunks[name] for _, chunks in waiting] for name in self.names if self.chunks}
            # nothing else holds the rows then, so that they go as they are folded in
            self._fold({name: [parts.pop(name) for parts, _ in waiting] for name in self.names}, chunks)

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        self.flush()
        if not {(a, b), (b, a)} & self._homes.keys():  # of many networks there are many pair_blocks to look through
            require_pair(a, b, self.names, "moments", self.pair_blocks)
        block, turned = self._find(a, b)
        x, y = (b, a) if turned else (a, b)
        cross, norm_product = block.centred(x, y, without, self.debiased)
        moments = Moments(self._side(x, without), self._side(y, without), cross, norm_product)
        return moments.swapped if turned else moments

    def _side(self, key: Any, without: int | None) -> PairSide:
        def make() -> PairSide:
            side = self._new_side(key, without)
            total = side.total.detach()
            if not bool(torch.isfinite(total.square())):
                gave = "numbers whose squares are too large" if bool(torch.isfinite(total)) else "NaN or Inf"
                raise InvalidValue(f"{side.name} gave {gave}; fix the model or leave out the examples that cause them.")
            return side

        return self.once((key, without), make)

    def _new_side(self, key: Any, without: int | None) -> PairSide:
        return self.layers[key].side(without, torch.finfo(self.precision).eps)

    def _find(self, a: Key, b: Key) -> tuple[CrossSums, bool]:
        if not self._homes:
            blocks = reversed(self.blocks)
            self._homes = {(x, y): block for block in blocks for x in block.rows for y in block.columns}
        for turned, key in ((False, (a, b)), (True, (b, a))):
            if key in self._homes:
                return self._homes[key], turned
        require_as_many_rows(a, self.layers[a].n, b, self.layers[b].n)
        raise NoValue(f"the rows of {name_of(a)!r} and {name_of(b)!r} did not pair up batch by batch.")

    @property
    def n(self) -> int:
        """The number of rows of the first layer so far."""
        return self.rows_of(self.names[0])

    def rows_of(self, name: Key) -> int:
        """Return how many rows layer `name` has given so far."""
        self.flush()
        return self.layers[name].n if name in self.layers else 0

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="pair_blocks", precision="precision", debiased="debiased", chunks="chunks")
        self.flush()
        other.flush()
        first, second = (self, other) if self.layers else (other, self)
        merged = first._copy()
        if first.layers and second.layers:
            merged._add(second)
        return merged

    def _add(self, other: LayerMoments) -> None:
        self._require_alike(other, widths="widths")
        self.blocks, self._homes = common_blocks(self.blocks, other.blocks, self.layers), {}
        other_blocks = common_blocks(other.blocks, self.blocks, other.layers)
        for name, mine in self.layers.items():
            if other.layers[name].varies and not mine.varies:
                self._rescale(name, other.layers[name].scale)
        add_sums(self.layers, self.blocks, other.layers, other_blocks)
        self.counts = self.counts + other.counts
        self.next_number = max(self.next_number, other.next_number)

    def frame(self) -> dict[Key, tuple[Tensor, float]]:
        self.flush()
        return {key: (layer.shift, layer.scale if layer.varies else 0.0) for key, layer in self.layers.items()}

    def take_frame(self, frame: Mapping[Key, tuple[Tensor, float]]) -> None:
        self._first_frame = frame

    # --- folding ------------------------------------------------------------------------------------------------------

    def _fold(self, waiting: Mapping[Key, list[Tensor]], chunks: Mapping[Key, list[np.ndarray]]) -> None:
        lengths = {name: tuple(map(len, parts)) for name, parts in waiting.items()}
        rows = {name: joined(parts) for name, parts in waiting.items()}
        if not self.layers:
            for name, matrix in rows.items():
                shift, scale = self._first_frame.get(name) or (first_shift(matrix, self.precision).unsqueeze(0), 0.0)
                layer = self._open_layer(name, shift.to(matrix.device), self.resolutions.get(name, 0.0))
                layer.scale, layer.varies = scale or 1.0, scale > 0
            self._open_blocks(self.pair_blocks, lengths)
        self.blocks = [part for block in self.blocks for part in block.split(lengths, self.layers)]
        sorted_rows = {name: by_chunk(chunks[name]) for name in self.names} if self.chunks else {}

        def columns_of(name: Key) -> Columns:
            order, parts = sorted_rows.get(name, (None, [(0, slice(None))]))
            matrix = rows.pop(name)  # columns are made once
            columns = self._columns(name, matrix if order is None else matrix[order.to(matrix.device)])
            return Columns(columns, columns, parts)

        self._add_columns(columns_of)

    def _open_layer(self, key: Key, shift: Tensor, resolution: float) -> LayerSums:
        """Begin the sums of a layer, whose rows are shifted by `shift` (blocks, width)."""
        columns, double = shift.shape[1] + (2 if self.debiased else 1), summing_dtype(shift.device)
        double = double.to_complex() if shift.is_complex() else double
        sums = torch.zeros(max(self.chunks, 1), len(shift), columns, columns, dtype=double, device=shift.device)
        self.layers[key] = LayerSums(key, shift, 1.0, resolution, sums, self.debiased)
        return self.layers[key]

    def _open_blocks(self, pair_blocks: Sequence[PairBlock], groups: Mapping[Key, Any]) -> None:
        """Begin the sums of all wanted pairs of layers that are alike in `groups`."""
        for left, right in pair_blocks:
            for group in dict.fromkeys(groups[name] for name in left):
                here = [name for name in left if groups[name] == group]
                there = [name for name in right if groups[name] == group]
                if there:
                    self.blocks.append(CrossSums.starting(here, there, self.layers))

    def _add_columns(self, columns_of: Callable[[Key], Columns]) -> None:
        """Add the products of some rows, whose columns are made when a pair needs them and held no longer."""
        self.clear_cache()
        self._homes = {}
        uses = Counter(key for block in self.blocks for key in block.keys)
        held: dict[Key, Columns] = {}
        for block in self.blocks:
            for key in block.keys:
                if key not in held:
                    held[key] = self._add_square(key, columns_of)
            block.add(held)
            uses.subtract(block.keys)
            held = {key: columns for key, columns in held.items() if uses[key]}
        for key in self.layers:
            if key not in uses:
                self._add_square(key, columns_of)

    def _add_square(self, key: Key, columns_of: Callable[[Key], Columns]) -> Columns:
        """Add a layer's product with itself; return its columns."""
        made = columns_of(key)
        for i, (chunk, rows) in enumerate(made.parts):
            totals = [] if made.totals is None else [made.totals[:, i].conj(), made.totals[:, i]]
            add_product(self.layers[key].sums[chunk], made.conjugate[:, rows], made.values[:, rows], totals)
        return made

    def _columns(self, name: Key, matrix: Tensor) -> Tensor:
        layer = self.layers[name]
        layer.resolution = max(layer.resolution, torch.finfo(matrix.dtype).eps)
        double = self.precision == torch.float64
        shift = layer.shift[0] if double else layer.shift[0].to(matrix)
        dtype = summing_dtype(matrix.device) if double else self.precision
        columns = torch.empty(1, len(matrix), layer.sums.shape[-1], dtype=dtype, device=matrix.device)
        inner = columns[0, :, : layer.width]
        # straight into the columns, unless these are coarser and the scale must be chosen first
        fits = torch.promote_types(matrix.dtype, shift.dtype) == dtype
        centred = torch.sub(matrix, shift, out=inner if fits else None)
        if not layer.varies or (centred.device.type == "cpu" and outgrows(centred, layer.scale)):
            self._rescale(name, power_of_two(centred))
        if centred is not inner or layer.scale != 1:
            torch.mul(centred, layer.scale, out=inner)
        if self.debiased:
            torch.sum(inner.square(), 1, out=columns[0, :, -2])
        columns[..., -1] = 1
        return columns

    def _rescale(self, key: Key, scale: float) -> None:
        """Count a layer in another scale: when it varies for the first time, or outgrows the scale it had."""
        rescale(self.layers[key], self.blocks, scale)


# --- the sums ---------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """Some rows of a layer, (blocks, n, columns), their conjugate, and which of them belong to which chunk.

    The last column is one, unless `totals` hold the sums of the rows of each part, (blocks, parts, width): products of
    16 columns take half the time of those of 17.
    """

    values: Tensor
    conjugate: Tensor
    parts: Parts
    totals: Tensor | None = None

    @property
    def with_ones(self) -> Columns:
        """The same with a column of ones."""
        if self.totals is None:
            return self
        pad = torch.nn.functional.pad
        return Columns(pad(self.values, (0, 1), value=1), pad(self.conjugate, (0, 1), value=1), self.parts)


class LayerSums(Stored):
    """One layer's shift (blocks, width), scale and sums (chunks, blocks, columns, columns)."""

    def __init__(self, key: Key, shift: Tensor, scale: float, resolution: float, sums: Tensor, debiased: bool):
        self.key, self.shift, self.scale, self.resolution, self.sums = key, shift, scale, resolution, sums
        self.width, self.debiased = shift.shape[1], debiased
        self.varies = bool(sums[..., : self.width, : self.width].any())  # until then the scale is free

    @property
    def counts(self) -> Tensor:
        """The number of rows in each chunk."""
        return self.sums[:, 0, -1, -1].real

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    def centred(self, without: int | None) -> tuple[int, Tensor, Tensor]:
        """Return the count, the mean (blocks, width) and the second moment about it, without one chunk."""
        sums, width = sum_of_chunks(self.sums, without), self.width
        count = sums[0, -1, -1].real.detach()
        mean = self.shift.to(sums.dtype) + sums[:, -1, :width] / (count * self.scale)
        second = sums[:, :width, :width] - sums[:, :width, -1:] @ sums[:, -1:, :width] / count
        return int(count), mean, second

    def side(self, without: int | None, rounding: float) -> CovarianceSide:
        n, mean, second = self.centred(without)
        if without is not None:
            second = self._without_noise(second, sum_of_chunks(self.sums, without), rounding)
        return CovarianceSide(
            label(self.key), n, mean, second, scale=self.scale, resolution=self.resolution, rounding=rounding,
            norm_squares=self._norm_squares(without) if self.debiased else None,
        )  # fmt: skip

    def _without_noise(self, second: Tensor, sums: Tensor, rounding: float) -> Tensor:
        """Return a second moment without the noise of features that are constant where a chunk is left out."""
        sizes, spreads = (torch.diagonal(A, dim1=-2, dim2=-1)[:, : self.width].real for A in (sums, second))
        still = spreads <= 16 * rounding * sizes
        return second.masked_fill(still.unsqueeze(-1) | still.unsqueeze(-2), 0)

    def _norm_squares(self, without: int | None) -> Tensor:
        sums = sum_of_chunks(self.sums, without)
        back = sums[0, : self.width, -1] / sums[0, -1, -1]
        return _norm_product(sums[0], back, back)


class CrossSums(Stored):
    """The sums of some layers against some others, filled by one product; (chunks, blocks, columns, columns)."""

    def __init__(self, left: Sequence[Key], right: Sequence[Key], layers: Mapping[Key, LayerSums], sums: Tensor):
        self.sums = sums
        self.rows, self.columns = _slices(left, layers), _slices(right, layers)
        self.keys = list(dict.fromkeys([*left, *right]))

    @classmethod
    def starting(cls, left: Sequence[Key], right: Sequence[Key], layers: Mapping[Key, LayerSums]) -> CrossSums:
        x, y = layers[left[0]].sums, layers[right[0]].sums
        # a layer without space is paired with the zero frequency of a map only
        blocks, dtype = min(x.shape[1], y.shape[1]), torch.promote_types(x.dtype, y.dtype)
        size = [sum(layers[name].sums.shape[-1] for name in side) for side in (left, right)]
        return cls(left, right, layers, torch.zeros(len(x), blocks, *size, dtype=dtype, device=x.device))

    def pair(self, x: Key, y: Key) -> Tensor:
        """Return a view of the sums of layer `x` against layer `y`."""
        return self.sums[..., self.rows[x], self.columns[y]]

    def centred(self, x: Key, y: Key, without: int | None, debiased: bool) -> tuple[Tensor, Tensor | None]:
        """Return the cross moment about the means, (blocks, p, q), and ``Σ ‖x‖²‖y‖²`` about them if it is kept."""
        sums, extra = sum_of_chunks(self.pair(x, y), without), 2 if debiased else 1
        count = sums[0, -1, -1].real
        cross = sums[:, :-extra, :-extra] - sums[:, :-extra, -1:] @ sums[:, -1:, :-extra] / count
        if not debiased:
            return cross, None
        return cross, _norm_product(sums[0], sums[0, :-extra, -1] / count, sums[0, -1, :-extra] / count)

    def add(self, held: Mapping[Key, Columns]) -> None:
        """Add the products of the columns `held`, chunk by chunk."""
        x, y = ([held[key] for key in side] for side in (self.rows, self.columns))
        totals: list[Tensor] = []
        if len(x) == len(y) == 1 and x[0].totals is not None and y[0].totals is not None:
            totals = [self._side_by_side([sums]) for sums in (x[0].totals.conj(), y[0].totals)]
        else:
            x, y = ([columns.with_ones for columns in side] for side in (x, y))
        left = self._side_by_side([columns.conjugate for columns in x])
        same = self.rows == self.columns and not left.is_complex()
        right = left if same else self._side_by_side([columns.values for columns in y])
        for i, (chunk, rows) in enumerate(x[0].parts):
            add_product(self.sums[chunk], left[:, rows], right[:, rows], [sums[:, i] for sums in totals])

    def _side_by_side(self, columns: list[Tensor]) -> Tensor:
        together = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
        together = together[: self.sums.shape[1]]
        return together.to(together.dtype.to_complex()) if self.sums.is_complex() else together

    def split(self, groups: Mapping[Key, Any], layers: Mapping[Key, LayerSums]) -> list[CrossSums]:
        """Return this block, or several where layers that gave the same rows so far give different ones from now on."""
        kinds = dict.fromkeys(groups[key] for key in self.keys)
        if len(kinds) == 1:
            return [self]
        sides = [[[key for key in side if groups[key] == kind] for side in (self.rows, self.columns)] for kind in kinds]
        return [self._part(left, right, layers) for left, right in sides if left and right]

    def _part(self, left: list[Key], right: list[Key], layers: Mapping[Key, LayerSums]) -> CrossSums:
        rows, columns = (
            torch.cat([torch.arange(side[key].start, side[key].stop) for key in keys]).to(self.sums.device)
            for side, keys in ((self.rows, left), (self.columns, right))
        )
        return CrossSums(left, right, layers, self.sums.index_select(-2, rows).index_select(-1, columns))


def first_shift(rows: Tensor, precision: torch.dtype) -> Tensor:
    """Return what is taken off all rows of a layer: the mean of its first ones, or the median where some are far.

    One far example would draw the mean off all others, and what is left of these without it would be rounding.
    """
    rows, double = rows.detach(), summing_dtype(rows.device)
    few = rows[:: max(1, len(rows) // SAMPLE)]  # medians take far longer than means
    mean, median = rows.mean(0, dtype=double), medians(few)
    # what is taken off must be exact in the precision of the products
    mean = mean.to(rows.dtype).to(double) if precision == torch.float32 else mean
    spread = medians((few - median).abs())
    return torch.where((mean - median).abs() > 4 * spread, median.to(double), mean)


def medians(rows: Tensor) -> Tensor:
    """Return the median of every feature, the lower one of two, as torch does; on the CPU in a quarter of its time."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.median(0).values
    middle = (len(rows) - 1) // 2
    features = np.array(rows.flatten(1).numpy().T, order="C")  # a copy: rows of one feature would be sorted in place
    features.partition(middle, axis=1)
    return torch.from_numpy(features[:, middle].copy()).reshape(rows.shape[1:])


def outgrows(centred: Tensor, scale: float) -> bool:
    """Return whether fourth powers of these rows might leave float32."""
    return float(torch.linalg.vector_norm(centred.detach(), torch.inf)) * scale > 4096


def joined(parts: list[Tensor]) -> Tensor:
    """Return parts of the rows of a layer as one, and let go of them."""
    together = torch.cat(parts) if len(parts) > 1 else parts[0]
    parts.clear()
    return together


def by_chunk(chunks: list[np.ndarray]) -> tuple[Tensor, Parts]:
    """Return the order that sorts rows by their chunk, and where each chunk then lies."""
    together = np.concatenate(chunks)
    order = np.argsort(together, kind="stable")
    present, starts = np.unique(together[order], return_index=True)
    ends = [*starts[1:].tolist(), len(together)]
    parts = [(int(c), slice(a, b)) for c, a, b in zip(present, starts.tolist(), ends, strict=True)]
    return torch.from_numpy(order), parts


def rebased(origin: LayerSums, target: LayerSums, sums: Tensor, left: bool = False) -> Tensor:
    """Return `sums` of the columns (or with `left` the rows) of `origin` with the shift and scale of `target`."""
    if origin.scale == target.scale and torch.equal(origin.shift.to(target.shift), target.shift):
        return sums
    moved = ((origin.shift.to(target.shift) - target.shift) * target.scale)[: sums.shape[-3]].to(sums)
    ratio = target.scale / origin.scale
    if left:
        return _shifted(sums, moved.conj(), ratio, origin.debiased)
    return _shifted(sums.mT, moved, ratio, origin.debiased).mT


def _shifted(sums: Tensor, shift: Tensor, ratio: float, debiased: bool) -> Tensor:
    """Return `sums` (..., blocks, columns, any) with rows [x, ‖x‖², 1] turned into those of ``ratio · x + shift``."""
    width = sums.shape[-2] - (2 if debiased else 1)
    x, ones, shift = sums[..., :width, :], sums[..., -1:, :], shift.unsqueeze(-1)
    parts = [x * ratio + shift * ones]
    if debiased:
        norms = sums[..., width : width + 1, :] * ratio**2
        parts.append(norms + 2 * ratio * (shift.mT @ x) + squared_norm(shift) * ones)
    return torch.cat([*parts, ones], -2)


def rescale(layer: LayerSums, blocks: Sequence[CrossSums], scale: float) -> None:
    """Count a layer in another scale, in its own sums and in those of its pairs."""
    key, ratio = layer.key, (scale or 1.0) / layer.scale
    layer.scale, layer.varies = scale or 1.0, scale > 0
    if ratio == 1:
        return
    weights = torch.ones(layer.sums.shape[-1], dtype=layer.sums.dtype, device=layer.sums.device)
    weights[: layer.width] = ratio
    if layer.debiased:
        weights[-2] = ratio**2
    layer.sums.mul_(weights.unsqueeze(1)).mul_(weights)
    for block in blocks:
        if key in block.rows:
            block.sums[..., block.rows[key], :] *= weights.unsqueeze(1)
        if key in block.columns:
            block.sums[..., block.columns[key]] *= weights


def _norm_product(sums: Tensor, mean_x: Tensor, mean_y: Tensor) -> Tensor:
    """Return ``Σ ‖x‖²‖y‖²`` about the means, from sums of [x, ‖x‖², 1] against [y, ‖y‖², 1]."""
    x, y = (torch.cat([-2 * mean, mean.new_ones(1), squared_norm(mean)[None].to(mean)]) for mean in (mean_x, mean_y))
    return x @ sums @ y


def add_product(sums: Tensor, conjugate: Tensor, columns: Tensor, totals: Sequence[Tensor] = ()) -> None:
    """Add the products of (blocks, n, columns) over their rows to `sums` (blocks, columns, columns).

    With `totals`, the sums of both over their rows, a last column of ones is not among them and yet counted.
    """
    if totals:
        _add(sums[:, :-1, :-1], conjugate.mT @ columns)
        sums[:, :-1, -1] += totals[0]
        sums[:, -1, :-1] += totals[1]
        sums[:, -1, -1] += columns.shape[1]
        return
    if len(sums) == 1:  # plain products are faster than batches of one
        sums, conjugate, columns = sums[0], conjugate[0], columns[0]
    if conjugate.dtype != sums.dtype:
        _add(sums, conjugate.mT @ columns)
    elif sums.ndim == 2:
        sums.addmm_(conjugate.mT, columns)
    else:
        sums.baddbmm_(conjugate.mT, columns)


def _add(sums: Tensor, product: Tensor) -> None:
    """Add a product of lower precision to its sums, some rows at a time: torch would copy all of it on the host."""
    if product.is_cuda or product.dtype == sums.dtype:
        sums += product
        return
    rows = AT_ONCE // product.shape[-1] + 1
    for start in range(0, product.shape[-2], rows):
        sums[..., start : start + rows, :] += product[..., start : start + rows, :]


def common_blocks(
    blocks: Sequence[CrossSums], others: Sequence[CrossSums], layers: Mapping[Key, LayerSums]
) -> list[CrossSums]:
    """Return the pairs of `blocks` that `others` hold as well, as blocks."""
    if [(list(x.rows), list(x.columns)) for x in blocks] == [(list(y.rows), list(y.columns)) for y in others]:
        return list(blocks)
    common = []
    for block in blocks:
        for other in others:
            left, right = [x for x in block.rows if x in other.rows], [y for y in block.columns if y in other.columns]
            common += [block._part(left, right, layers)] if left and right else []
    return common


def _slices(names: Sequence[Key], layers: Mapping[Key, LayerSums]) -> dict[Key, slice]:
    slices, start = {}, 0
    for name in names:
        slices[name] = slice(start, start + layers[name].sums.shape[-1])
        start = slices[name].stop
    return slices


def add_sums(
    layers: Mapping[Key, LayerSums], blocks: Sequence[CrossSums], others: Mapping[Key, LayerSums],
    other_blocks: Sequence[CrossSums],
) -> None:  # fmt: skip
    """Add the sums of other data, brought to the shift and scale of these, to layers and blocks of the same pairs."""
    for block, addend in zip(blocks, other_blocks, strict=True):
        for x in block.rows:
            for y in block.columns:
                part = rebased(others[x], layers[x], addend.pair(x, y).to(block.sums), left=True)
                block.pair(x, y).add_(rebased(others[y], layers[y], part))
    for name, mine in layers.items():
        part = rebased(others[name], mine, others[name].sums.to(mine.sums), left=True)
        mine.sums += rebased(others[name], mine, part)
        mine.resolution = max(mine.resolution, others[name].resolution)
