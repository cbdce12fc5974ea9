"""The interface of collectors: statistics of many layers, which a pass updates and measures read pair by pair."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from netkin.arrays import as_matrix, require_finite
from netkin.errors import NoValue, ShapeError, UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

# Entries of the cross moments of pairs that are read together. Narrow layers are decomposed on the host, a pair in a
# thread: with 16 threads pairs of 2**24 entries kept all of them busy, and 400 pairs took 3.5 s in place of 4.3 s.
READ = 2**20 * min(max(os.cpu_count() or 4, 4), 16)
ADVICE = "shape='pool', the measure 'cka_minibatch', fewer `examples=`"

Key = Hashable  # (model, layer) in a study; any name in a collector that is fed by hand
PairBlock = tuple[Sequence[Key], Sequence[Key]]

SALT = 0x6E65746B  # of the hash that gives an example its chunk, so that chunks and samples are independent


# --- what a study is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSize:
    """The size of one layer, as the first batch showed it."""

    model: str
    name: str
    width: int
    rows: int
    examples: int = 1
    shape: str = "matrix"
    space: tuple[int, ...] = ()  # the size of its map, where maps may be resized or are taken by their frequencies
    itemsize: int = 4
    spectral: bool = False  # whether it is compared by its frequencies, or with a layer that is
    resolution: float = 0.0  # the rounding unit of the data before halves were raised; 0 where the rows show it

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.name

    @cached_property
    def kind(self) -> str:
        """The shape without the positions of tokens that it is of."""
        return self.shape.partition("[")[0]

    @property
    def rows_per_example(self) -> float:
        return self.rows / self.examples

    def rows_of(self, examples: int) -> int:
        """Return the number of rows of that many examples."""
        return int(examples * self.rows_per_example)


@dataclass(frozen=True)
class Study:
    """What collectors are priced and started with: the layers and pairs, over all parts of the data.

    `examples` is None where the length of the data is unknown; `seen` is true where `examples` are those that were
    read so far, and not all. `chunks` is how many partial sums are kept apart for standard errors, 0 for none.
    """

    layers: Mapping[Key, LayerSize]
    pair_blocks: Sequence[PairBlock]
    examples: int | None = None
    limit: int = 2**62
    chunks: int = 0
    seed: int = 0
    seen: bool = False
    tokens: int | None = None  # how many tokens are sampled; None for all, where their statistics fit
    device: Any = None  # where the sums are kept

    @property
    def sizes(self) -> list[LayerSize]:
        return list(self.layers.values())

    @property
    def spectral(self) -> bool:
        return any(layer.spectral for layer in self.layers.values())

    @property
    def doubles(self) -> bool:
        """Whether some layer comes in float64, in which products then are taken."""
        return any(layer.itemsize == 8 for layer in self.layers.values())

    @property
    def resolutions(self) -> dict[Key, float]:
        return {key: layer.resolution for key, layer in self.layers.items()}

    def pairs(self) -> Iterator[tuple[LayerSize, LayerSize]]:
        """Yield the layers of every wanted pair."""
        for left, right in self.pair_blocks:
            yield from ((self.layers[x], self.layers[y]) for x in left for y in right)

    def read_at_once(
        self, entries: Callable[[LayerSize, LayerSize], int], extent: Callable[[LayerSize], int] | None = None
    ) -> int:
        """Return how many entries the pairs that are read together have at most, if one has so many `entries`.

        `extent` is that of a layer in the matrices of its pairs, its width if None (see `Collector.extent`).
        """
        by_models: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for x, y in self.pairs():
            full = x.width * y.width if extent is None else extent(x) * extent(y)
            by_models.setdefault((x.model, y.model), []).append((full, entries(x, y)))
        most = 0.0
        for pairs in by_models.values():  # together are those whose products of extents add up to `READ`, or one alone
            share = max(size / full for full, size in pairs)
            most = max(most, min(sum(size for _, size in pairs), share * max(READ, *(full for full, _ in pairs))))
        return math.ceil(most)


@dataclass(frozen=True)
class CostEstimate:
    """What a collector would cost: bytes at its peak, and the text that a plan shows.

    Of the candidates that fit the memory the one of the lowest `rank` is taken. `why` follows the words where a
    measure's collector is explained.
    """

    bytes: int
    words: str
    what: str
    rank: int = 0
    why: str = ""
    advice: str = ADVICE


@dataclass(frozen=True)
class Settings(Stored):
    """What a measure needs from a collector; without own fields every measure needs the same."""

    def joined(self, other: Self) -> Self | None:
        """Return the least that serves both; None where one collector can't."""
        return self if self == other else None


class Pair:
    """Two layers over the same examples, as a measure reads them; the annotation of its first argument."""

    of: ClassVar[Callable[..., Any]]  # a class method that makes it of two matrices, with what `options` returns
    collectors: ClassVar[tuple[Any, ...]] = ()  # that can give it
    takes_matrices: ClassVar[bool] = True  # whether a matrix of each layer is enough for `of`
    decompositions: ClassVar[tuple[str, ...]] = ()  # what measures may declare in `needs`

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a measure with these facts and settings requests of `of`."""
        return {}

    def caveats(self, facts: Any, settings: Mapping[str, Any]) -> list[Caveat]:
        """Return why the measure's value of this pair would mislead, if it would."""
        return []


class Collector(Stored, ABC):
    """A small, mergeable statistic of the data for many layers, driven by the pass.

    A collector needs `update`, `merge`, `pair`, `cost` and `start`; what else stands here suits most.
    A pass calls ``update({feed: {(model, layer): rows}}, numbers)`` with the numbers
    of the batch's examples, and ``owners={key: places}`` where a layer's examples have different numbers of rows.
    Weights come once and without numbers, as ``{"weights": {(model, layer): {name: tensor}}}``; outputs, of a whole
    model, as ``{"outputs": {model: (logits, labels)}}``, beside the rows of its layers and with None for no labels.
    """

    kind: ClassVar[str]  # its name in sentences, by default that of the class
    holds: ClassVar[str] = ""  # what a result says that its values were read from
    feeds: ClassVar[frozenset[str]] = frozenset({"activations"})
    # whether examples are known by hashes of their content and not by numbers, so that each model may have its own data
    by_content: ClassVar[bool] = False
    numbers_rows: ClassVar[bool] = True  # whether each row needs a number, and not each example alone
    reduces: ClassVar[bool] = False  # whether `reduce` makes a layer smaller as soon as it has fired
    needs: ClassVar[str] = "weights"  # what a layer must have to be compared by its weights when none are named

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = vars(cls).get("kind", cls.__name__)

    @classmethod
    def settings_for(cls, measure: Any) -> Settings:
        """Return the settings that `measure` needs."""
        return Settings()

    @classmethod
    def feeds_for(cls, settings: Any) -> frozenset[str]:
        """Return the feeds that serve these settings."""
        return cls.feeds

    def extent(self, layer: LayerSize, examples: int) -> int:
        """Return how many rows or columns a layer has in the matrices of its pairs."""
        return layer.width

    @classmethod
    @abstractmethod
    def cost(cls, settings: Any, study: Study) -> CostEstimate | None:
        """Return what collecting costs, None where this collector is not for such layers."""

    @classmethod
    def takes(cls, settings: Any, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a layer with these weights is among those compared when none are named."""
        return True

    @classmethod
    @abstractmethod
    def start(cls, settings: Any, study: Study) -> Self:
        """Return an empty collector for the layers and pairs of a study."""

    @abstractmethod
    def update(self, rows: Mapping[Any, Any], numbers: Any = None, *, owners: Mapping[Key, Any] | None = None) -> None:
        """Fold one batch in."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the statistic of the data of both; neither is changed."""

    def _require_alike(self, other: Any, **facts: str) -> None:
        """Refuse to merge with a collector of another kind, or one that differs in some fact, read off an attribute."""
        if type(self) is not type(other):
            raise ShapeError(f"a {self.kind} can't be merged with a {getattr(other, 'kind', type(other).__name__)}.")
        for what, attribute in facts.items():
            mine, theirs = getattr(self, attribute), getattr(other, attribute)
            if mine != theirs:
                raise ShapeError(f"these statistics can't be merged: their {what} differ, {mine!r} and {theirs!r}.")

    @abstractmethod
    def pair(self, a: Key, b: Key, without: int | None = None) -> Any:
        """Return the layers `a` and `b` as a measure reads them; `without` one chunk of the examples."""

    def __getitem__(self, pair: tuple[Key, Key]) -> Any:
        return self.pair(*pair)

    def serves(self, settings: Any) -> str:
        """Return what this collector lacks for a measure that needs `settings`; empty if nothing."""
        return ""

    def reduce(self, key: Key, rows: Tensor, numbers: np.ndarray) -> Tensor:
        """Return what must be kept of a layer's rows until the batch is folded in."""
        return rows

    def like(self, other: Collector) -> Collector:
        """Return this collector in the form that can be merged with `other`."""
        return self

    def frame(self) -> Mapping[Key, tuple[Tensor, float]]:
        """Return the shift and the scale of each layer, with which other parts of the data add up as plain sums."""
        return {}

    def take_frame(self, frame: Mapping[Key, tuple[Tensor, float]]) -> None:
        """Begin with the shifts and scales of another part."""

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        """Return how exact the values of these pairs are, as text."""
        return "exact"

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """The number of examples, or of mini-batches, in each chunk; empty where no chunks are kept."""
        return ()


class RowCollector(Collector):
    """A collector of rows, given for all its layers at once and of the same examples.

    An example's number identifies it in every batch and part of the data; which chunk it falls in, and whether its rows
    are among those sampled, follow from the number alone.
    """

    def __init__(self, names: Sequence[Key], chunks: int = 0):
        self.names, self.chunks = list(names), chunks
        self.sizes: dict[Key, tuple[int, ...]] = {}  # of one row of every layer seen so far
        self.counts = np.zeros(max(chunks, 1), dtype=np.int64)  # of examples in each chunk
        self.next_number = 0  # of an example that comes without one
        self.resolutions: Mapping[Key, float] = {}  # of data that came in half precision

    @staticmethod
    def as_rows(array: Any, name: str) -> Tensor:
        """Return what a layer gave in the form that is collected."""
        return as_matrix(array, name, check=False)

    def check_rows(self, rows: Mapping[Any, Any], names: Sequence[Key] | None = None) -> dict[Key, Tensor]:
        """Return the rows of all layers in one batch, or of those of these `names`, of the sizes seen before.

        On the CPU NaN and Inf are refused, unless the pass has looked for them; a GPU is not waited for.
        """
        rows, names = one_feed(self, rows), self.names if names is None else names
        missing = [name for name in names if name not in rows]
        if missing:
            raise ShapeError(
                f"this batch lacks rows for {name_of(missing[0])!r}; every update needs all {len(self.names)} layers."
            )
        if isinstance(rows, Owned):  # the pass has made them, and looked at them
            layers = {name: rows[name] for name in names}
        else:
            layers = {name: self.as_rows(rows[name], name_of(name)).detach() for name in names}
            for name, layer in layers.items():
                if layer.device.type == "cpu":
                    require_finite(layer, label(name))
        sizes = {name: tuple(layer.shape[1:]) for name, layer in layers.items()}
        if any(self.sizes.get(name, size) != size for name, size in sizes.items()):
            for name, size in sizes.items():
                require_size(name, size, self.sizes.get(name, size))
        self.sizes |= sizes
        return layers

    def number_examples(self, numbers: Any, count: int) -> np.ndarray:
        """Return the numbers of `count` examples, counted as they come unless given."""
        places = self.next_number + np.arange(count) if numbers is None else np.asarray(numbers, dtype=np.int64)
        self.next_number = max(self.next_number, int(places.max(initial=-1)) + 1)
        return places

    @property
    def widths(self) -> dict[Key, int]:
        """The number of features of every layer seen so far."""
        return {name: size[0] for name, size in self.sizes.items()}

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(self.counts.tolist()) if self.chunks else ()


def unfit_for_spectra(measure: str) -> str:
    """Return why a measure has no value of layers that are compared by their frequencies."""
    return (
        f"{measure!r} can't be read from spectra, which hold moments for each frequency and no rows; with shape='dft' "
        "use linear measures that a rotation leaves unchanged, such as 'cca_mean', 'svcca' or 'cka', or take "
        "shape='flatten'."
    )


class Owned(dict[Key, Any]):
    """Rows by key that nothing else will change, so that a collector may keep them without a copy."""


def one_feed(collector: Collector, rows: Mapping[Any, Any]) -> Mapping[Key, Any]:
    """Return the rows of a collector's only feed, given alone or as ``{feed: {key: rows}}``."""
    (feed,) = collector.feeds
    inner = rows.get(feed)
    return inner if isinstance(inner, Mapping) else rows


def label(key: Key) -> str:
    """Return how a sentence names a layer."""
    return f"layer {name_of(key)!r}"


def name_of(key: Key) -> str:
    """Return a key as one text: ``model/layer``."""
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)


def keys_of(pair_blocks: Sequence[PairBlock]) -> list[Key]:
    """Return every layer of some pair_blocks once."""
    return list(dict.fromkeys(key for pair in pair_blocks for side in pair for key in side))


def require_pair(a: Key, b: Key, known: Sequence[Key], where: str, pair_blocks: Sequence[PairBlock] = ()) -> None:
    """Refuse a pair of which a layer is not known, or that is in none of the `pair_blocks`, either way round."""
    for key in (a, b):
        if key not in known:
            hint = did_you_mean(name_of(key), map(name_of, known))
            raise UnknownName(f"no layer {name_of(key)!r} in these {where}{hint}")
    sides = (side for left, right in pair_blocks for side in ((left, right), (right, left)))
    if pair_blocks and not any(a in left and b in right for left, right in sides):
        raise NoValue(f"the pair {name_of(a)!r}, {name_of(b)!r} was not collected.")


def require_as_many_rows(a: Key, rows_a: int, b: Key, rows_b: int) -> None:
    """Refuse a pair of layers that gave different numbers of rows."""
    if rows_a != rows_b:
        raise NoValue(
            f"{label(a)} gives {rows_a:,} rows and {label(b)} {rows_b:,} for the same examples; compare layers of the "
            "same size, or choose another shape."
        )


def require_size(key: Key, size: tuple[int, ...], before: tuple[int, ...]) -> None:
    """Refuse a layer whose rows are not of the size that they had `before`."""
    if size != before:
        raise ShapeError(
            f"{label(key)} gave {shape_words(size)} and {shape_words(before)} before; bring all inputs to one "
            "size, or choose a shape whose size does not change, such as 'pool'."
        )


def shape_words(size: Sequence[int]) -> str:
    """Return the size of a row, or of a map with its channels: 3 channels of 8 × 8."""
    channels, *space = size
    return f"{channels} channels of {shape_in_words(space)}" if space else f"{channels} features"


def shape_in_words(shape: Sequence[int]) -> str:
    """Return a shape as people write it: 8 × 8."""
    return " × ".join(map(str, shape))


# --- numbers of examples ----------------------------------------------------------------------------------------------


def row_numbers(numbers: np.ndarray, count: int, owners: np.ndarray | None = None) -> np.ndarray:
    """Return a number for each of `count` rows of the examples `numbers`.

    `owners` holds for each row the index of its example, where examples have different numbers of rows.
    """
    if owners is not None:
        within = np.arange(count) - np.searchsorted(owners, owners)
        return numbers[owners] * 2**20 + within
    if count == len(numbers):
        return numbers
    if count % len(numbers):  # examples of unequal length, identified only by their order
        return numbers[0] * 2**20 + np.arange(count)
    return (numbers[:, None] * (count // len(numbers)) + np.arange(count // len(numbers))).ravel()


def row_examples(numbers: np.ndarray, count: int, owners: np.ndarray | None = None) -> np.ndarray:
    """Return for each of `count` rows the number of its example."""
    if owners is not None:
        return numbers[owners]
    if count % len(numbers):
        raise ShapeError(
            f"{count:,} rows can't be told apart by {len(numbers):,} examples; pass `owners`, the place of each row's "
            "example in the batch."
        )
    return np.repeat(numbers, count // len(numbers))


def hashes(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return a well-mixed 64-bit number for every (seed, number): SplitMix64's finaliser, with 30, 30, 31 as shifts."""
    with np.errstate(over="ignore"):
        mixed = numbers.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
        return mixed ^ (mixed >> np.uint64(31))


def chunk_of(numbers: np.ndarray, chunks: int) -> np.ndarray:
    """Return the chunk of every example: a salted hash of its number, so that no order of the data matters."""
    return (hashes(SALT, numbers) % np.uint64(max(chunks, 1))).astype(np.int64)


def sum_of_chunks(sums: Tensor, without: int | None) -> Tensor:
    """Return the sum over chunks, the leading axis, but for one that is left out."""
    if len(sums) == 1:
        return sums[0]
    if without is None:
        return sums.sum(0)
    # no subtraction: the chunk left out may hold an example far from all others
    return sums[:without].sum(0) + sums[without + 1 :].sum(0)
