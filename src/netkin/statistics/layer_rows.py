"""`LayerRows`: the rows of many layers, up to a stated cap; `LinearRows` keeps all and reads them as moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin.errors import NoValue
from netkin.memory import format_bytes
from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    Key,
    LayerSize,
    PairBlock,
    RowCollector,
    Settings,
    Study,
    chunk_of,
    hashes,
    keys_of,
    label,
    name_of,
    require_as_many_rows,
    require_pair,
    require_size,
    row_examples,
    row_numbers,
)
from netkin.statistics.layer_moments import LayerMoments, LinearSettings
from netkin.statistics.linear_algebra import ENTRIES
from netkin.statistics.moments import Moments
from netkin.statistics.rows import Rows, SampledRows
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

CAP = 2048  # rows that measures on rows use: their distance matrices grow with the square


class KeptRows(Stored):
    """The rows of one layer, part by part, with their own numbers and, if chunks are kept, those of their examples."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.numbers: list[np.ndarray] = []
        self.examples: list[np.ndarray] = []
        self.seen, self.held = 0, 0
        self.bar: int | None = None  # rows whose hash is larger are not among those kept

    def update(self, rows: Tensor, numbers: np.ndarray, examples: np.ndarray | None, seed: int) -> None:
        """Add those rows that may be among the kept ones; they must not change when the caller's array does."""
        if self.bar is None:
            self.add(rows.clone(), numbers, examples)
            return
        chosen = np.flatnonzero(hashes(seed, numbers) <= self.bar)
        self.seen += len(rows) - len(chosen)
        index = torch.from_numpy(chosen).to(rows.device)
        self.add(rows[index], numbers[chosen], None if examples is None else examples[chosen])

    def add(self, rows: Tensor, numbers: np.ndarray, examples: np.ndarray | None) -> None:
        self.parts.append(rows)
        self.numbers.append(numbers)
        self.examples += [] if examples is None else [examples]
        self.seen, self.held = self.seen + len(rows), self.held + len(rows)

    def joined(self, other: KeptRows) -> KeptRows:
        """Return the rows of both, which are of different examples."""
        both = KeptRows()
        both.parts, both.numbers = [*self.parts, *other.parts], [*self.numbers, *other.numbers]
        both.examples = [*self.examples, *other.examples]
        both.seen, both.held = self.seen + other.seen, self.held + other.held
        return both

    def shrink(self, cap: int, seed: int) -> None:
        """Keep the rows with the smallest hashes, by rising numbers."""
        if self.parts:
            numbers = np.concatenate(self.numbers)
            mixed = hashes(seed, numbers)
            chosen = np.argsort(mixed, kind="stable")[:cap]
            self.bar = int(mixed[chosen[-1]]) if len(chosen) == cap else None
            self._keep(chosen[np.argsort(numbers[chosen], kind="stable")])

    def in_order(self, cap: int | None, seed: int) -> Tensor:
        """Return the rows by rising numbers, at most `cap`."""
        if cap is not None and self.held > cap:
            self.shrink(cap, seed)
        numbers = np.concatenate(self.numbers)
        if len(self.parts) > 1 or (np.diff(numbers) < 0).any():
            self._keep(np.argsort(numbers, kind="stable"))
        return self.parts[0]

    def _keep(self, chosen: np.ndarray) -> None:
        together = torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]
        if not np.array_equal(chosen, np.arange(len(together))):
            together = together[torch.from_numpy(chosen).to(together.device)]
        self.parts, self.numbers = [together], [np.concatenate(self.numbers)[chosen]]
        self.examples = [np.concatenate(self.examples)[chosen]] if self.examples else []
        self.held = len(chosen)


@dataclass(frozen=True)
class SampleSettings(Settings):
    """A sample of rows; `kernels` counts the measures, each of which holds a kernel matrix of its own."""

    cap: int = CAP
    kernels: int = 1

    def joined(self, other: SampleSettings) -> SampleSettings:
        return SampleSettings(max(self.cap, other.cap), self.kernels + other.kernels)


class LayerRows(RowCollector):
    """The rows of many layers; `collector[a, b]` is the pair that a measure reads.

    Without a `cap` every row is kept, and a layer may have several rows an example (positions, tokens). With one the
    rows whose hash of (seed, number) is smallest are kept, so that merging in any order keeps the same ones; layers
    with as many rows an example keep those of the same numbers.
    """

    holds = "Rows"
    keeps_examples: ClassVar[bool] = False  # whether each row's example is kept also without chunks

    def __init__(self, names: Sequence[Key], *, cap: int | None = None, seed: int = 0, chunks: int = 0):
        self.cap, self.seed = cap, seed
        self.layers = {name: KeptRows() for name in names}
        super().__init__(names, chunks)

    @classmethod
    def settings_for(cls, measure: Any) -> Settings:
        return SampleSettings(CAP)

    @classmethod
    def cost(cls, settings: Any, study: Study) -> CostEstimate | None:
        if study.spectral:
            return None
        total, passing, n, cap = 0, 0, study.examples, settings.cap
        for layer in study.sizes:
            seen = layer.rows_of(n) if n else 2 * cap
            m, rows = min(seen, cap), layer.itemsize * min(seen, 2 * cap + layer.rows) * layer.width
            centred = m * layer.width if layer.width <= m else 0
            measuring = layer.itemsize * (m * layer.width + centred + m**2) + 8 * settings.kernels * m**2
            total += max(rows, measuring)
            # rows put in order, or about their medians, and the steps from their products to a kernel
            passing = max(passing, 2 * rows, 8 * (3 * min(m * layer.width, max(ENTRIES, m)) + 5 * m**2))
        why = ", as its kernel grows with the square of the examples"
        return CostEstimate(total + passing, f"Rows, a sample of at most {cap:,}", "the sampled rows", why=why)

    @classmethod
    def start(cls, settings: Any, study: Study) -> Self:
        made = cls(keys_of(study.pair_blocks), cap=settings.cap, seed=study.seed, chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def serves(self, settings: Any) -> str:
        enough = self.cap is None or self.cap >= settings.cap
        return "" if enough else f"a sample of {settings.cap:,} rows; it holds {self.cap:,}"

    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Add one batch: a matrix of rows for every layer; `numbers` are those of the examples."""
        matrices = self.check_rows(rows)
        places = self.number_examples(numbers, min(map(len, matrices.values())))
        self.counts += np.bincount(chunk_of(places, self.chunks), minlength=len(self.counts))
        for name, matrix in matrices.items():
            owner, layer = (owners or {}).get(name), self.layers[name]
            if owner is None and len(matrix) > len(places) and len(matrix) % len(places) == 0:
                # a row's number must not depend on how many rows other examples have, in this part or in another
                owner = np.repeat(np.arange(len(places)), len(matrix) // len(places))
            examples = row_examples(places, len(matrix), owner) if self.chunks or self.keeps_examples else None
            layer.update(matrix, row_numbers(places, len(matrix), owner), examples, self.seed)
            if self.cap is not None and layer.held > self.cap + self.slack:
                layer.shrink(self.cap, self.seed)
        self.clear_cache()

    @property
    def slack(self) -> int:
        """How many rows beyond the cap are held until those of small hashes are chosen."""
        return self.cap or 0

    @property
    def n(self) -> int:
        """The number of rows kept of the first layer."""
        held = self.layers[self.names[0]].held
        return held if self.cap is None else min(held, self.cap)

    @property
    def seen(self) -> int:
        """The number of rows of the layer with most of them, kept or not."""
        return max(layer.seen for layer in self.layers.values())

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Any:
        require_pair(a, b, self.names, "rows")
        samples = self.sample(a, without), self.sample(b, without)
        self.require_alike_rows(a, b)
        return Rows(*samples)

    def require_alike_rows(self, a: Key, b: Key) -> None:
        """Refuse two layers whose rows, once put in order, are not those of the same examples."""
        x, y = self.layers[a], self.layers[b]
        require_as_many_rows(a, x.seen, b, y.seen)
        if not np.array_equal(x.numbers[0], y.numbers[0]):
            raise NoValue(f"the rows of {name_of(a)!r} and {name_of(b)!r} did not pair up batch by batch.")

    def sample(self, name: Key, without: int | None = None) -> SampledRows:
        """Return the kept rows of one layer, without those of one chunk."""
        layer = self.layers[name]

        def make() -> SampledRows:
            rows = layer.in_order(self.cap, self.seed)
            if without is not None:
                stays = torch.from_numpy(chunk_of(np.concatenate(layer.examples), self.chunks) != without)
                rows = rows[stays.to(rows.device)]
                if not len(rows):
                    raise NoValue(f"all rows kept of {label(name)} are of one chunk of the examples.")
            return SampledRows(rows, label(name), self.resolutions.get(name) or None)

        return self.once((name, without), make)

    def flush(self) -> None:
        """Put the rows of each layer in order, at most as many as are to be kept."""
        for layer in self.layers.values():
            if layer.parts:
                layer.in_order(self.cap, self.seed)

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        if self.cap is None or self.seen <= self.cap:
            return "exact"
        unit = "examples" if self.seen == self.counts.sum() else "rows"
        return f"a sample of {self.cap:,} of {self.seen:,} {unit}"

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        if not self.chunks:
            return ()
        self.flush()
        examples = np.unique(np.concatenate(self.layers[self.names[0]].examples))
        return tuple(np.bincount(chunk_of(examples, self.chunks), minlength=self.chunks).tolist())

    # --- merging and files --------------------------------------------------------------------------------------------

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="names", cap="cap", seed="seed", chunks="chunks")
        for name in self.sizes.keys() & other.sizes.keys():
            require_size(name, other.sizes[name], self.sizes[name])
        merged = copy(self)
        merged.clear_cache()
        merged.sizes = self.sizes | other.sizes
        merged.counts, merged.layers = self.counts + other.counts, {}
        merged.next_number = max(self.next_number, other.next_number)
        for name in self.names:
            merged.layers[name] = self.layers[name].joined(other.layers[name])
            if self.cap is not None:
                merged.layers[name].shrink(self.cap, self.seed)
        return merged


class LinearRows(LayerRows):
    """All rows of layers wider than the examples are many, read as moments; they fold into moments when merged."""

    settings_for = LinearSettings.of

    def __init__(self, pair_blocks: Sequence[PairBlock], *, precision: torch.dtype = torch.float64, chunks: int = 0):
        self.pair_blocks, self.precision = [(list(left), list(right)) for left, right in pair_blocks], precision
        super().__init__(keys_of(self.pair_blocks), chunks=chunks)

    def extent(self, layer: LayerSize, examples: int) -> int:
        return min(layer.width, layer.rows_of(examples))

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate | None:
        streamed = LayerMoments.cost(settings, study)
        if streamed is None:
            return None
        sizes, n = study.sizes, study.examples
        # data of unknown length begin with one batch, and are monitored
        count = n if n is not None else max(layer.examples for layer in sizes)
        item = settings.precision(study).itemsize
        copies = 2 if study.chunks else 1
        held = sum(
            copies * layer.itemsize * layer.rows_of(count) * layer.width
            + side_bytes(settings, layer, layer.rows_of(count), item)
            for layer in sizes
        )
        smaller = {layer.key: min(layer.width, layer.rows_of(count)) for layer in sizes}  # of XᵀX and XXᵀ
        read = study.read_at_once(lambda x, y: smaller[x.key] * smaller[y.key], lambda layer: smaller[layer.key])
        pairs = item * read * settings.matrices
        # rows in another precision and about their mean, and the parts of a product
        passing = max(2 * item * layer.rows_of(count) * layer.width + 24 * smaller[layer.key] ** 2 for layer in sizes)
        size = held + pairs + passing
        if n is None:
            words = f"Rows, as moments would need {format_bytes(streamed.bytes)}; watched, to stay below "
            return CostEstimate(size, words + format_bytes(study.limit), "the rows of the first batch", 2)
        wide = any(layer.width > layer.rows_of(n) for layer in sizes)
        why = "some layers are wider than that" if wide else f"moments would need {format_bytes(streamed.bytes)}"
        return CostEstimate(
            size, f"Rows, all {n:,} examples, as {why}", f"the rows of {'the first ' * study.seen}{n:,} examples",
            0 if wide and size < streamed.bytes else 2,
        )  # fmt: skip

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        made = cls(study.pair_blocks, precision=settings.precision(study), chunks=study.chunks)
        made.resolutions = study.resolutions
        return made

    def serves(self, settings: LinearSettings) -> str:
        return settings.lacking(self.precision, debiased=True)

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        require_pair(a, b, self.names, "rows", self.pair_blocks)
        return super().pair(a, b, without).moments(self.precision)

    def like(self, other: Collector) -> Collector:
        """Return the moments of these rows, where `other` holds moments."""
        if not isinstance(other, LayerMoments):
            return self
        moments = LayerMoments(self.pair_blocks, precision=other.precision, debiased=other.debiased, chunks=self.chunks)
        moments.resolutions, layers = self.resolutions, self.layers
        if all(layer.parts for layer in layers.values()):
            self.flush()
            chunks = {name: [chunk_of(part, self.chunks) for part in layer.examples] for name, layer in layers.items()}
            moments.add_rows({name: list(layer.parts) for name, layer in layers.items()}, chunks, self.counts)
        return moments

    def merge(self, other: Self) -> Self:
        self._require_alike(other, layers="pair_blocks", precision="precision")
        return super().merge(other)


def side_bytes(settings: LinearSettings, layer: LayerSize, n: int, item: int) -> int:
    """Return the bytes of what is kept of a layer of n rows, beside them, while its pairs are measured."""
    width, twice = layer.width, 2 if settings.uncentred else 1
    if width <= n:
        return item * (twice * n * width + width**2 * (3 if settings.whitens else 1))
    return item * twice * n * n * (4 if settings.whitens else 3 if settings.rotates else 1)
