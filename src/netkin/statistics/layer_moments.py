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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_matrix, require_finite, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.statistics.block_sums import (
    Columns,
    CrossSums,
    LayerSums,
    add_product,
    add_sums,
    by_chunk,
    common_blocks,
    first_shift,
    joined,
    outgrows,
    rescale,
)
from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    Key,
    Numbers,
    Owned,
    PairBlock,
    Study,
    chunk_of,
    keys_of,
    label,
    name_of,
    one_feed,
    refuse_missing,
    refuse_other_width,
    refuse_unknown,
    row_examples,
)
from netkin.statistics.covariances import Side
from netkin.statistics.linear_algebra import power_of_two
from netkin.statistics.linear_settings import ON_GPU, LinearSettings, price_of_moments
from netkin.statistics.moments import Moments

if TYPE_CHECKING:
    from typing_extensions import Self

FOLD = 512  # rows gathered before a product is taken: small batches waste the product and the float64 sums
CHUNKED_FOLD = 2048  # the same where products are taken chunk by chunk


class LayerMoments(Collector):
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

    kind = "LayerMoments"
    holds = "Moments"
    numbers_rows = False
    settings_for = LinearSettings.of
    stored: ClassVar[tuple[str, ...]] = (
        "pair_blocks", "names", "precision", "debiased", "chunks", "resolutions", "_layers", "_blocks", "_waiting",
        "_batches", "_numbers", "_counts", "sizes",
    )  # fmt: skip

    def __init__(
        self,
        pair_blocks: Sequence[PairBlock],
        *,
        precision: torch.dtype = torch.float64,
        debiased: bool = False,
        chunks: int = 0,
    ):
        self.pair_blocks = [(list(left), list(right)) for left, right in pair_blocks]
        self.names = keys_of(self.pair_blocks)
        self.precision, self.debiased, self.chunks = precision, debiased, chunks
        self._layers: dict[Key, LayerSums] = {}
        self._blocks: list[CrossSums] = []
        self._waiting: list[tuple[dict[Key, Tensor], dict[Key, np.ndarray]]] = []  # rows, and the chunk of each
        self._batches, self._numbers = 0, Numbers()
        self._counts = np.zeros(max(chunks, 1), dtype=np.int64)  # of examples
        self.sizes: dict[Key, tuple[int, ...]] = {}  # of one row of every layer seen so far
        self.resolutions: Mapping[Key, float] = {}  # of data that came in half precision
        self.clear_cache()

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate | None:
        return None if study.spectral else price_of_moments(settings, study, CHUNKED_FOLD if study.chunks else FOLD)

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        precision = settings.precision(study)
        made = cls(study.pair_blocks, precision=precision, debiased=settings.debiased, chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    @classmethod
    def of(cls, rows: Mapping[Key, Any], *, precision: torch.dtype = torch.float64, debiased: bool = True) -> Self:
        """Return the moments of all pairs of some layers' rows, differentiably."""
        collector = cls([(list(rows), list(rows))], precision=precision, debiased=debiased)
        collector._fold({key: [as_matrix(matrix, name_of(key))] for key, matrix in rows.items()}, {})
        return collector

    def add_rows(self, rows: Mapping[Key, list[Tensor]], chunks: Mapping[Key, list[np.ndarray]], counts: Any) -> None:
        """Add rows of all layers and the chunk of each row; `counts` are their examples. The lists are emptied."""
        self.sizes = {name: tuple(parts[0].shape[1:]) for name, parts in rows.items()}
        self._counts += counts
        self._fold(rows, chunks)

    def serves(self, settings: LinearSettings) -> str:
        return settings.lacking(self.precision, self.debiased)

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add one batch: a matrix of rows for every layer, the same examples in each.

        `numbers` are those of the examples, counted as they come unless given; `owners` tells for layers whose examples
        have different numbers of rows the place of each row's example in the batch.
        """
        rows = one_feed(self, rows)
        owned = isinstance(rows, Owned)  # matrices that the pass has looked at
        as_before = owned and {name: tuple(one.shape[1:]) for name, one in rows.items()} == self.sizes
        matrices = dict(rows) if as_before else self._matrices(rows, owned)
        self.sizes = {name: tuple(one.shape[1:]) for name, one in matrices.items()}
        places = self._numbers.take(numbers, min(map(len, matrices.values())))
        chunks: dict[Key, np.ndarray] = {}
        if self.chunks:
            self._counts += np.bincount(chunk_of(places, self.chunks), minlength=self.chunks)
            for name, matrix in matrices.items():
                chunks[name] = chunk_of(row_examples(places, len(matrix), (owners or {}).get(name)), self.chunks)
        else:
            self._counts += len(places)
        self._batches += 1
        enough, waiting = self._enough(matrices[self.names[0]]), [*(parts for parts, _ in self._waiting), matrices]
        fold = any(sum(len(parts[name]) for parts in waiting) >= enough for name in self.names)
        if not (fold or owned):  # what waits must not change when the caller's array does
            matrices = {name: matrix.clone() for name, matrix in matrices.items()}
        self._waiting.append((matrices, chunks))
        if fold:
            self.flush()

    def _enough(self, rows: Tensor) -> int:
        """Return how many rows are worth a product."""
        return (CHUNKED_FOLD if self.chunks else FOLD) * (ON_GPU if rows.is_cuda else 1)

    def _matrices(self, rows: Mapping[Key, Any], owned: bool) -> dict[Key, Tensor]:
        """Return one batch as matrices of the widths seen before, free of NaN and Inf."""
        refuse_missing(self.names, rows)
        widths, matrices = self.widths, {}
        for name in self.names:
            matrix = matrices[name] = as_matrix(rows[name], name_of(name), check=False).detach()
            refuse_other_width(name, matrix.shape[1], widths.get(name, matrix.shape[1]), f" in batch {self._batches}")
            if matrix.device.type == "cpu" and not owned:
                require_finite(matrix, f"{label(name)} in batch {self._batches}")
        return matrices

    def flush(self) -> None:
        """Take the products of the rows that wait."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            chunks = {name: [chunks[name] for _, chunks in waiting] for name in self.names if self.chunks}
            # nothing else holds the rows then, so that they go as they are folded in
            self._fold({name: [parts.pop(name) for parts, _ in waiting] for name in self.names}, chunks)

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        """Return the moments of the layers `a` and `b`, in that order, `without` one chunk of the examples."""
        self.flush()
        if not {(a, b), (b, a)} & self._homes.keys():  # of many networks there are many pair_blocks to look through
            refuse_unknown(a, b, self.names, "moments", self.pair_blocks)
        block, turned = self._find(a, b)
        x, y = (b, a) if turned else (a, b)
        cross, norm_product = block.centred(x, y, without, self.debiased)
        moments = Moments(self._side(x, without), self._side(y, without), cross, norm_product)
        if moments.x.n != moments.y.n:
            raise ShapeError(f"layers {name_of(a)!r} and {name_of(b)!r} were fed different numbers of rows.")
        return moments.swapped if turned else moments

    def _side(self, key: Key, without: int | None) -> Side:
        if (key, without) not in self._sides:
            side = self._new_side(key, without)
            total = side.total.detach()
            if not bool(torch.isfinite(total.square())):
                gave = "numbers whose squares are too large" if bool(torch.isfinite(total)) else "NaN or Inf"
                raise InvalidValue(f"{side.name} gave {gave}; fix the model or leave out the examples that cause them.")
            self._sides[key, without] = side
        return self._sides[key, without]

    def _new_side(self, key: Any, without: int | None) -> Side:
        return self._layers[key].side(without, torch.finfo(self.precision).eps)

    def clear_cache(self) -> None:
        self._sides: dict[tuple[Key, int | None], Side] = {}
        self._homes: dict[tuple[Key, Key], CrossSums] = getattr(self, "_homes", {})  # until the blocks change

    def _find(self, a: Key, b: Key) -> tuple[CrossSums, bool]:
        if not self._layers:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        if not self._homes:
            for block in reversed(self._blocks):
                self._homes |= {(x, y): block for x in block.rows for y in block.columns}
        for turned, key in ((False, (a, b)), (True, (b, a))):
            if key in self._homes:
                return self._homes[key], turned
        counts = [self._layers[key].n for key in (a, b)]
        if counts[0] != counts[1]:
            raise NoValue(
                f"{label(a)} gives {counts[0]:,} rows and {label(b)} {counts[1]:,} "
                "for the same examples; compare layers of the same size, or choose another shape."
            )
        raise NoValue(f"the rows of {name_of(a)!r} and {name_of(b)!r} did not pair up batch by batch.")

    @property
    def widths(self) -> dict[Key, int]:
        """The number of features of every layer seen so far."""
        return {name: size[0] for name, size in self.sizes.items()}

    @property
    def n(self) -> int:
        """The number of rows of the first layer so far."""
        return self.rows_of(self.names[0])

    def rows_of(self, name: Key) -> int:
        """Return how many rows layer `name` has given so far."""
        self.flush()
        return self._layers[name].n if name in self._layers else 0

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(self._counts.tolist()) if self.chunks else ()

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        """Return the moments of the data of both."""
        self._refuse_unlike(other, layers="pair_blocks", precision="precision", debiased="debiased", chunks="chunks")
        self.flush()
        other.flush()
        first, second = (self, other) if self._layers else (other, self)
        merged = first._copy()
        if first._layers and second._layers:
            merged._add(second)
        return merged

    def _add(self, other: LayerMoments) -> None:
        self._refuse_unlike(other, widths="widths")
        self._blocks, self._homes = common_blocks(self._blocks, other._blocks, self._layers), {}
        other_blocks = common_blocks(other._blocks, self._blocks, other._layers)
        for name, mine in self._layers.items():
            if other._layers[name].varies and not mine.varies:
                self._rescale(name, other._layers[name].scale)
        add_sums(self._layers, self._blocks, other._layers, other_blocks)
        self._batches += other._batches
        self._counts = self._counts + other._counts
        self._numbers.next = max(self._numbers.next, other._numbers.next)

    def frame(self) -> dict[Key, tuple[Tensor, float]]:
        self.flush()
        return {key: (layer.shift, layer.scale if layer.varies else 0.0) for key, layer in self._layers.items()}

    # --- folding ------------------------------------------------------------------------------------------------------

    def _fold(self, waiting: Mapping[Key, list[Tensor]], chunks: Mapping[Key, list[np.ndarray]]) -> None:
        lengths = {name: tuple(map(len, parts)) for name, parts in waiting.items()}
        rows = {name: joined(parts) for name, parts in waiting.items()}
        if not self._layers:
            for name, matrix in rows.items():
                shift, scale = self.given_frame.get(name) or (first_shift(matrix, self.precision).unsqueeze(0), 0.0)
                layer = self._open_layer(name, shift.to(matrix.device), self.resolutions.get(name, 0.0))
                layer.scale, layer.varies = scale or 1.0, scale > 0
            self._open_blocks(self.pair_blocks, lengths)
        self._blocks = [part for block in self._blocks for part in block.split(lengths, self._layers)]
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
        own = torch.zeros(max(self.chunks, 1), len(shift), columns, columns, dtype=double, device=shift.device)
        self._layers[key] = LayerSums(key, shift, 1.0, resolution, own, self.debiased)
        return self._layers[key]

    def _open_blocks(self, pair_blocks: Sequence[PairBlock], groups: Mapping[Key, Any]) -> None:
        """Begin the sums of all wanted pairs of layers that are alike in `groups`."""
        for left, right in pair_blocks:
            for group in dict.fromkeys(groups[name] for name in left):
                here = [name for name in left if groups[name] == group]
                there = [name for name in right if groups[name] == group]
                if there:
                    self._blocks.append(CrossSums.starting(here, there, self._layers))

    def _add_columns(self, columns_of: Callable[[Key], Columns]) -> None:
        """Add the products of some rows, whose columns are made when a pair needs them and held no longer."""
        self._sides, self._homes = {}, {}
        uses = Counter(key for block in self._blocks for key in block.keys)
        held: dict[Key, Columns] = {}
        for block in self._blocks:
            for key in block.keys:
                if key not in held:
                    held[key] = self._own(key, columns_of)
            block.add(held)
            uses.subtract(block.keys)
            held = {key: columns for key, columns in held.items() if uses[key]}
        for key in self._layers:
            if key not in uses:
                self._own(key, columns_of)

    def _own(self, key: Key, columns_of: Callable[[Key], Columns]) -> Columns:
        """Add a layer's product with itself; return its columns."""
        made = columns_of(key)
        for i, (chunk, rows) in enumerate(made.parts):
            totals = [] if made.totals is None else [made.totals[:, i].conj(), made.totals[:, i]]
            add_product(self._layers[key].own[chunk], made.conjugate[:, rows], made.values[:, rows], totals)
        return made

    def _columns(self, name: Key, matrix: Tensor) -> Tensor:
        layer = self._layers[name]
        layer.resolution = max(layer.resolution, torch.finfo(matrix.dtype).eps)
        double = self.precision == torch.float64
        shift = layer.shift[0] if double else layer.shift[0].to(matrix)
        dtype = summing_dtype(matrix.device) if double else self.precision
        columns = torch.empty(1, len(matrix), layer.own.shape[-1], dtype=dtype, device=matrix.device)
        inner = columns[0, :, : layer.width]
        # straight into the columns, unless these are coarser and the scale must be chosen first
        fits = not matrix.requires_grad and torch.promote_types(matrix.dtype, shift.dtype) == dtype
        centred = torch.sub(matrix, shift, out=inner if fits else None)
        if not layer.varies or (centred.device.type == "cpu" and outgrows(centred, layer.scale)):
            self._rescale(name, power_of_two(centred))
        if centred.requires_grad:  # which nothing written in place would keep
            rows = centred * layer.scale
            norms = [rows.square().sum(1, keepdim=True)] if self.debiased else []
            return torch.cat([rows, *norms, torch.ones_like(rows[:, :1])], 1).unsqueeze(0)
        if centred is not inner or layer.scale != 1:
            torch.mul(centred, layer.scale, out=inner)
        if self.debiased:
            torch.sum(inner.square(), 1, out=columns[0, :, -2])
        columns[..., -1] = 1
        return columns

    def _rescale(self, key: Key, scale: float) -> None:
        """Count a layer in another scale: when it varies for the first time, or outgrows the scale it had."""
        rescale(self._layers[key], self._blocks, scale)
