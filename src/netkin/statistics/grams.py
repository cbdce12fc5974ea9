"""`Grams` and `LayerGrams`: mini-batch Gram matrices, for kernels and for features too wide for moments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import at_least_single, paired, require_finite, summing_dtype, to_device
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.statistics.collector import (
    CostEstimate,
    Key,
    Pair,
    PairBlock,
    RowCollector,
    Settings,
    Study,
    chunk_of,
    keys_of,
    label,
    one_feed,
    require_pair,
    require_size,
    row_numbers,
    sum_of_chunks,
)
from netkin.statistics.linear_algebra import gram_product, offset_is_large, power_of_two, rbf_kernel, u_centred
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

KERNELS = ("linear", "rbf")


@dataclass(frozen=True, eq=False)
class Grams(Pair):
    """A pair of layers: HSIC₁ of the two and of each with itself, the mean over mini-batches of `batch` examples.

    A mini-batch of m examples has the weight m(m - 3).
    """

    cross: Tensor
    x: Tensor
    y: Tensor
    batch: int
    batches: int
    left_out: int

    @classmethod
    def of(cls, X: Any, Y: Any, *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4) -> Grams:
        """Return the statistic of two matrices cut into mini-batches in the order of their rows."""
        X, Y = paired(X, Y)
        collector = LayerGrams([(["X"], ["Y"])], batch=batch, kernel=kernel, fraction=fraction)
        collector.add({"X": X, "Y": Y}, {}, None)
        return collector["X", "Y"]

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mini-batches and the kernel that a measure requests, where its parameters say."""
        return {name: settings.get(name, default) for name, default in asdict(GramSettings()).items()}


@dataclass
class IncompleteBatch(Stored):
    """The rows of a mini-batch that lacks some: their numbers, and those of every layer in the same order."""

    numbers: np.ndarray
    rows: dict[Key, list[Tensor]]

    def restricted(self, keys: Iterable[Key]) -> IncompleteBatch:
        """Return the rows of some layers alone."""
        return IncompleteBatch(self.numbers, {key: self.rows[key] for key in keys})

    def joined(self, other: IncompleteBatch) -> IncompleteBatch:
        """Return the rows of both, which are of different examples."""
        numbers = np.concatenate([self.numbers, other.numbers])
        return IncompleteBatch(numbers, {name: [*parts, *other.rows[name]] for name, parts in self.rows.items()})

    def in_order(self) -> Iterator[tuple[Key, Tensor]]:
        """Yield every layer with its rows by rising numbers."""
        order = torch.from_numpy(np.argsort(self.numbers))
        for name, parts in self.rows.items():
            together = torch.cat([part.to(parts[0].device) for part in parts])
            yield name, together[order.to(together.device)]


class Kernel(NamedTuple):
    """The kernel matrix of one mini-batch, taken while the model ran."""

    matrix: Tensor


@dataclass(frozen=True)
class GramSettings(Settings):
    """The size of a mini-batch, and the kernel; mini-batches of one size can't replace those of another."""

    batch: int = 128
    kernel: str = "linear"
    fraction: float = 0.4


class LayerGrams(RowCollector):
    """HSIC₁ of many pairs of layers, summed over mini-batches; `collector[a, b]` is the pair that a measure reads.

    Each mini-batch's Gram matrices are U-centred (Song 2012) and flattened to rows, so that one product holds the
    HSIC of all pairs. A mini-batch is a range of `batch` example numbers; rows of one that is not complete wait for the
    rest, also in a file. One that stays incomplete counts as it is, and under four examples it is left out and counted.
    """

    holds = "Grams"
    reduces = True

    def __init__(
        self, pair_blocks: Sequence[PairBlock], *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4,
        chunks: int = 0,
    ):  # fmt: skip
        if kernel not in KERNELS:
            raise UnknownName(f"no kernel named {kernel!r}; choose one of {', '.join(KERNELS)}.", argument="kernel")
        if batch < 4:
            raise InvalidValue(
                f"a mini-batch needs at least 4 examples for HSIC₁; got batch={batch}.", argument="batch"
            )
        self.batch, self.kernel, self.fraction = batch, kernel, fraction
        self.pair_blocks = [(list(left), list(right)) for left, right in pair_blocks]
        super().__init__(keys_of(self.pair_blocks), chunks)  # whose `counts` are of mini-batches here
        self.sums = torch.zeros(max(chunks, 1), len(self.names), len(self.names), dtype=torch.float64)
        self.weights = np.zeros(max(chunks, 1))  # the sum of the mini-batches' m(m - 3)
        self.waiting: dict[int, IncompleteBatch] = {}
        self.rows_each: int | None = None  # of an example; 0 once examples have different numbers of them
        self.scales: dict[Key, float] = {}
        self.centres: dict[Key, bool] = {}

    @classmethod
    def settings_for(cls, measure: Any) -> GramSettings:
        return GramSettings(**Grams.options(None, measure.settings))

    @classmethod
    def cost(cls, settings: GramSettings, study: Study) -> CostEstimate | None:
        if study.spectral:
            return None
        batch, layers = settings.batch, study.sizes
        waits = [layer for layer in layers if layer.rows != batch]
        waiting = sum((batch + min(batch, layer.rows)) * layer.width * layer.itemsize for layer in waits)
        # a layer in order, about its mean and in its scale; all kernel matrices as they came, together and U-centred
        passing = 3 * batch * max((layer.width * layer.itemsize for layer in layers), default=0)
        kernels = batch**2 * (len(layers) * (8 + 2 * max((layer.itemsize for layer in layers), default=0)) + 16)
        return CostEstimate(
            waiting + passing + kernels, f"Grams of mini-batches of {batch}, {settings.kernel} kernel",
            "the Gram matrices", why=", by which it is defined",
        )  # fmt: skip

    @classmethod
    def start(cls, settings: GramSettings, study: Study) -> Self:
        return cls(study.pair_blocks, chunks=study.chunks, **asdict(settings))

    def serves(self, settings: GramSettings) -> str:
        mine = GramSettings(self.batch, self.kernel, self.fraction)
        return "" if settings == mine else f"mini-batches of {settings.batch} with a {settings.kernel} kernel"

    def reduce(self, key: Key, rows: Tensor, numbers: np.ndarray) -> Any:
        """Return a layer's kernel matrix at once, if its rows make up exactly one mini-batch; else the rows."""
        each = divmod(len(rows), len(numbers)) if len(numbers) else (0, 0)
        is_regular = each[1] == 0 and self.rows_each in (None, each[0])
        require_size(key, tuple(rows.shape[1:]), self.sizes.setdefault(key, tuple(rows.shape[1:])))
        if is_regular and self._is_whole(row_numbers(numbers, len(rows))):
            return Kernel(self._kernel(key, rows))
        return rows

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add one batch: for every layer a matrix of rows, or what `reduce` made of it, of the same examples.

        Rows of layers with `owners`, whose examples have different numbers of rows, are counted as they come, and so
        are all that come after them.
        """
        rows = one_feed(self, rows)
        kernels = {name: reduced.matrix for name, reduced in rows.items() if isinstance(reduced, Kernel)}
        matrices = self.check_rows(rows, [name for name in self.names if name not in kernels])
        self.add(matrices, kernels, numbers, bool(owners))

    def add(
        self, matrices: Mapping[Key, Tensor], kernels: dict[Key, Tensor], numbers: Any, uneven: bool = False
    ) -> None:
        """Add matrices of rows, and kernel matrices of layers that were reduced; those of rows may need gradients."""
        places = self._row_numbers(numbers, len(next(iter((*matrices.values(), *kernels.values())))), uneven)
        self.clear_cache()
        if self._is_whole(places):
            kernels |= {name: self._kernel(name, matrix) for name, matrix in matrices.items()}
            self._add(int(places[0]) // self.batch, kernels)
            return
        assert not kernels, "a mini-batch that was whole when reduced is whole when folded in"
        for place in np.unique(places // self.batch).tolist():
            here = np.flatnonzero(places // self.batch == place)
            part = {name: [matrix[torch.from_numpy(here).to(matrix.device)]] for name, matrix in matrices.items()}
            self._wait(place, IncompleteBatch(places[here], part))

    def _row_numbers(self, numbers: Any, count: int, uneven: bool) -> np.ndarray:
        """Return the numbers of rows: they follow from those of their examples while all have as many rows."""
        if numbers is not None:
            each = 0 if uneven or count % len(numbers) else count // len(numbers)
            self.rows_each = each if self.rows_each in (None, each) else 0
        if numbers is None or not self.rows_each:
            return self.number_examples(None, count)
        return self.number_examples(row_numbers(np.asarray(numbers, dtype=np.int64), count), count)

    def _is_whole(self, places: np.ndarray) -> bool:
        """Return whether rows of these numbers are one mini-batch in its order."""
        return len(places) == self.batch and places[0] % self.batch == 0 and bool((np.diff(places) == 1).all())

    def _wait(self, place: int, part: IncompleteBatch) -> None:
        """Add rows to an incomplete mini-batch, and fold it in once it is complete."""
        if place in self.waiting:
            part = self.waiting[place].joined(part)
        if len(part.numbers) == self.batch:
            self.waiting.pop(place, None)
            self._add(place, {name: self._kernel(name, rows) for name, rows in part.in_order()})
        else:
            self.waiting[place] = part

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Grams:
        require_pair(a, b, self.names, "Gram matrices", self.pair_blocks)
        finished = self._with_remainder()
        stays = np.arange(len(finished.counts)) != (-1 if without is None else without)
        batches, weight = int(finished.counts[stays].sum()), float(finished.weights[stays].sum())
        if batches == 0:
            waiting = sum(len(part.numbers) for part in self.waiting.values())
            raise NoValue(f"HSIC₁ needs at least 4 examples in a mini-batch; {waiting} were seen.")
        x, y, means = self.names.index(a), self.names.index(b), sum_of_chunks(finished.sums, without) / weight
        return Grams(means[x, y], means[x, x], means[y, y], self.batch, batches, self._left_out)

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        count = int(self._with_remainder().counts.sum())
        left_out = f"; {self._left_out} examples left out" if self._left_out else ""
        return f"mini-batch estimate ({count:,} batch{'es' * (count != 1)} of up to {self.batch}{left_out})"

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(self._with_remainder().counts.tolist()) if self.chunks else ()

    @property
    def _left_out(self) -> int:
        """How many rows lie in incomplete mini-batches that are too small for HSIC₁."""
        return sum(len(part.numbers) for part in self.waiting.values() if len(part.numbers) < 4)

    def _with_remainder(self) -> LayerGrams:
        """Return the sums with those incomplete mini-batches that are large enough."""

        def finish() -> LayerGrams:
            finished = copy(self)
            finished.sums, finished.counts, finished.weights = (
                self.sums.clone(),
                self.counts.copy(),
                self.weights.copy(),
            )
            finished.scales, finished.centres = dict(self.scales), dict(self.centres)
            for place, part in sorted(self.waiting.items()):
                if len(part.numbers) >= 4:
                    finished._add(place, {name: finished._kernel(name, rows) for name, rows in part.in_order()})
            finished.sums = finished.sums.cpu()  # which are read number by number
            return finished

        return self.once("finished", finish)

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        """Return the sums of both; incomplete mini-batches of one range are put together."""
        self._require_alike(
            other, layers="pair_blocks", kernel="kernel", fraction="fraction", batch="batch", chunks="chunks"
        )
        if self.sizes and other.sizes:
            self._require_alike(other, widths="sizes")
        self._require_even(other)
        merged, theirs = self._copy(), other._copy()
        merged.sizes = self.sizes | other.sizes
        for name in self.names:
            scales = [side.scales[name] for side in (merged, theirs) if name in side.scales]
            for side in (merged, theirs) if scales else ():
                side._rescale(name, min(scales))
        merged.sums = merged.sums + theirs.sums.to(merged.sums.device)
        merged.counts, merged.weights = self.counts + other.counts, self.weights + other.weights
        merged.next_number = max(self.next_number, other.next_number)
        merged.rows_each = self.rows_each if other.rows_each is None else other.rows_each
        for place, part in theirs.waiting.items():
            merged._wait(place, part)
        return merged

    def _require_even(self, other: LayerGrams) -> None:
        """Refuse parts whose mini-batches depend on what came before them."""
        known = {collector.rows_each for collector in (self, other)} - {None}
        if 0 in known or len(known) > 1:
            raise ShapeError(
                "mini-batches of rows can't be merged where examples have different numbers of rows, as which rows a "
                "mini-batch holds depends on all before it. Choose a shape with one row an example, such as 'mean' or "
                "'pool', or take all data in one pass."
            )

    def restricted(self, keys: Collection[Key]) -> Self:
        """Return the sums of some layers alone, in a collector of their own."""
        sides = [([x for x in left if x in keys], [y for y in right if y in keys]) for left, right in self.pair_blocks]
        part = self._copy()
        part.pair_blocks = [(left, right) for left, right in sides if left and right]
        part.names = keys_of(part.pair_blocks)
        places = [self.names.index(key) for key in part.names]
        part.sums = self.sums[:, places][:, :, places]
        part.waiting = {place: batch.restricted(part.names) for place, batch in self.waiting.items()}
        return part

    # --- one mini-batch -----------------------------------------------------------------------------------------------

    def _kernel(self, name: Key, rows: Tensor) -> Tensor:
        """Return the kernel matrix of one mini-batch, whose features are centred first where their offset is large."""
        rows = rows.to(at_least_single(rows.dtype))
        if self.kernel == "rbf":
            return self._rbf(name, rows)
        gram = self._gram(name, rows, centred=self.centres.get(name, False))
        if name not in self.centres or (gram.device.type == "cpu" and not self.centres[name]):
            self.centres[name] = offset_is_large(gram)
            gram = self._gram(name, rows, centred=True) if self.centres[name] else gram
        return gram

    def _rbf(self, name: Key, rows: Tensor) -> Tensor:
        """Return the RBF kernel; nothing but zeros where it has no width, so that this layer alone has no value."""
        require_finite(rows, f"{label(name)} in mini-batch {self.counts.sum()}")  # of which zeros would tell nothing
        try:
            return rbf_kernel(rows, self.fraction)
        except NoValue:
            return torch.zeros(len(rows), len(rows), dtype=summing_dtype(rows.device), device=rows.device)

    def _gram(self, name: Key, rows: Tensor, centred: bool) -> Tensor:
        """Return ``XXᵀ`` in this layer's scale, which is chosen again if squares would leave the range of float32."""
        if centred:
            rows = rows - rows.mean(0, dtype=summing_dtype(rows.device)).to(rows.dtype)
        scale = self.scales.get(name, 1.0)
        gram = gram_product(rows if scale == 1 else rows * scale)
        if name in self.scales and gram.device.type != "cpu":
            return gram
        size = float(torch.diagonal(gram.detach()).sum())
        if 1e-20 < size < 1e25 or (name in self.scales and size <= 1e-20):
            self.scales[name] = scale
            return gram
        scale = power_of_two(rows)
        if not scale:  # all zero so far: the scale is still free
            return gram
        self._rescale(name, scale)
        return gram_product(rows * scale)

    def _add(self, place: int, kernels: Mapping[Key, Tensor]) -> None:
        """Add m(m - 3) HSIC₁ of all pairs, and of each layer with itself, for the mini-batch of that number.

        So weighted, a small remainder counts little: its HSIC₁ varies most.
        """
        first = kernels[self.names[0]]
        flat = u_centred(torch.stack([kernels[name].to(first.device) for name in self.names])).flatten(1)
        chunk = int(chunk_of(np.array([place]), self.chunks)[0])
        self.sums = to_device(self.sums, flat.device)
        self.sums[chunk] += flat @ flat.T
        self.counts[chunk] += 1
        self.weights[chunk] += len(first) * (len(first) - 3)

    def _rescale(self, name: Key, scale: float) -> None:
        """Count layer `name` in another scale from now on; HSIC is quadratic in the features of either side."""
        ratio = scale / self.scales.get(name, scale)  # until one is chosen the sums are zero
        self.scales[name], factor = scale, ratio**2 if self.kernel == "linear" else 1.0
        if name in self.names:
            place = self.names.index(name)
            self.sums[:, place] *= factor
            self.sums[:, :, place] *= factor
