"""The digest of data: a sum over numbered examples, so that parts can be digested separately and merged."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.errors import InvalidValue, ShapeError

PLAIN = (bool, int, float, complex, str, bytes)
LABELS = frozenset({"labels", "label", "targets", "target", "y"})  # in a mapping
PENDING = 256  # batches whose hashes wait on their device
# words hashed at a time, elsewhere 2^24: products that leave a processor's cache take ten times as long, and longer
# ones are split among threads of torch, which wait for each other
AT_ONCE = {"cpu": 2**15 - 1}
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


class DataDigest:
    """A digest of a set of numbered examples, independent of batches, their order and their device.

    An example's hash is that of its content and its number, and the digest is the sum of them modulo 2⁶⁴; so parts
    can be digested apart and merged. Another order of examples, another precision or any other bit gives another
    digest. Tokens that an `attention_mask` leaves out at the end count as none, so that the length to which a batch is
    padded on the right does not matter; padding on the left does. An example that comes twice is refused.

    Content: each array of the batch that is as long as it, seen as 32-bit words w, gives Σ wᵢ cᵢ with constants of its
    own, taken from its place in the batch, its dtype and its shape. (Words of 64 bits would lose their signs in pairs.)
    They are computed on the arrays' device, which is waited for once in 256 batches, or when the digest is read.

    Example:
        >>> images = torch.arange(12.0).reshape(4, 3)
        >>> whole, parts = DataDigest(), DataDigest()
        >>> whole.update(images, range(4))
        >>> for start in (2, 0):
        ...     parts.update(images[start : start + 2], range(start, start + 2))
        >>> whole == parts, whole.count, len(whole.hex)
        (True, 4, 16)
    """

    def __init__(self, labels: bool = False):
        self.labels = labels  # whether they count
        self._sum, self._ranges = 0, np.empty((0, 2), np.int64)
        self._pending: list[tuple[Tensor, Any]] = []  # contents and numbers

    def update(self, batch: Any, numbers: Any) -> None:
        """Add the examples of a batch; `numbers` are their indices in the whole data."""
        numbers = numbers.long() if isinstance(numbers, Tensor) else np.asarray(numbers, np.int64)
        if not len(numbers):
            return
        self._pending.append((contents(batch, len(numbers), self.labels), numbers))
        if len(self._pending) >= PENDING:
            self._fold()

    def merge(self, other: DataDigest) -> None:
        """Add the examples of another digest; those that are in both are refused."""
        self._fold()
        other._fold()
        self._ranges = _merge_ranges(np.concatenate([self._ranges, other._ranges]))
        self._sum = (self._sum + other._sum) % 2**64

    @property
    def hex(self) -> str:
        """The digest as 16 hex digits."""
        self._fold()
        return f"{self._sum:016x}"

    @property
    def count(self) -> int:
        """How many examples were added."""
        return int(np.diff(self._ranges).sum()) + sum(len(numbers) for _, numbers in self._pending)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The numbers of the examples, as ascending ranges (first, one behind the last)."""
        self._fold()
        return [(start, stop) for start, stop in self._ranges.tolist()]

    def common(self, other: DataDigest) -> tuple[int, int] | None:
        """Return the first range of numbers that both digests hold; None where they hold none in common."""
        self._fold()
        other._fold()
        # of the other's ranges the first that ends behind the start of each of mine, which alone may be met first
        places = np.searchsorted(other._ranges[:, 1], self._ranges[:, 0], side="right")
        mine, theirs = self._ranges[places < len(other._ranges)], other._ranges[places[places < len(other._ranges)]]
        starts, stops = np.maximum(mine[:, 0], theirs[:, 0]), np.minimum(mine[:, 1], theirs[:, 1])
        overlaps = np.flatnonzero(starts < stops)
        return (int(starts[overlaps[0]]), int(stops[overlaps[0]])) if len(overlaps) else None

    def to_json(self) -> str:
        """Return all that `from_json` needs, as JSON."""
        return json.dumps({"digest": self.hex, "labels": self.labels, "ranges": self._ranges.tolist()})

    @classmethod
    def from_json(cls, text: str) -> DataDigest:
        """Return the digest that `to_json` wrote; more examples can be added to it."""
        stored = json.loads(text)
        digest = cls(labels=bool(stored["labels"]))
        digest._sum = int(stored["digest"], 16)
        digest._ranges = _merge_ranges(np.array(stored["ranges"], np.int64).reshape(-1, 2))
        return digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DataDigest):
            return NotImplemented
        return (self.labels, self.count, self.hex) == (other.labels, other.count, other.hex)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"DataDigest({self.hex}, {self.count:,} examples{', with labels' if self.labels else ''})"

    def _fold(self) -> None:
        """Fold what waits into the sum: one wait for the device."""
        if not self._pending:
            return
        hashes = torch.cat([content.to(self._pending[0][0].device) for content, _ in self._pending])
        numbers = np.concatenate([torch.as_tensor(numbers).cpu().numpy() for _, numbers in self._pending])
        self._pending = []
        self._ranges = _merge_ranges(np.concatenate([self._ranges, _ranges(numbers)]))
        self._sum = (self._sum + summed_hashes(hashes, numbers)) % 2**64


class UnorderedDigest:
    """A digest of a set of examples, inputs and labels, independent of their order and batches.

    Unlike `DataDigest` it numbers nothing, so that a shuffled loader gives the same.

    Example:
        >>> images, labels = torch.arange(12.0).reshape(4, 3), torch.arange(4)
        >>> one, other = UnorderedDigest(), UnorderedDigest()
        >>> one.update((images, labels), 4)
        >>> for place in (2, 0, 3, 1):
        ...     other.update((images[[place]], labels[[place]]), 1)
        >>> str(one) == str(other)
        True
    """

    def __init__(self) -> None:
        self.count, self._sum = 0, 0
        self._pending: list[Tensor] = []  # contents, wherever they were computed

    def update(self, batch: Any, length: int) -> None:
        """Add the `length` examples of a batch."""
        self._pending.append(contents(batch, length, labels=True))
        self.count += length
        if len(self._pending) >= PENDING:
            self._fold()

    def _fold(self) -> None:
        self._sum += sum(summed_hashes(hashes) for hashes in self._pending)
        self._pending = []

    def __str__(self) -> str:
        self._fold()
        return f"{self.count:,} examples, mark {self._sum % 2**64:016x}"


def contents(batch: Any, length: int, labels: bool = False) -> Tensor:
    """Return the hashes of the contents of a batch's `length` examples, an int64 vector on the arrays' device."""
    leaves = dict(_leaves(batch if labels else _drop_labels(batch)))
    rows = {path: leaf for path, leaf in leaves.items() if _has_rows(leaf, length)}
    mask = next((_rows_of(leaf, path) for path, leaf in rows.items() if path.endswith("/attention_mask")), None)
    parts = [_hashes(path, _rows_of(leaf, path), mask) for path, leaf in rows.items()]
    if not parts:
        raise ShapeError(
            f"the batch, of type {type(batch).__name__}, holds no array of {length:,} examples, as many as there are "
            "numbers; give batches of arrays with one row for each example."
        )
    others = [_describe(path, leaf) for path, leaf in leaves.items() if path not in rows]  # for the whole batch
    start = int.from_bytes(blake2b(b"".join(others), digest_size=8).digest(), "little", signed=True) if others else 0
    return sum(part.to(parts[0].device) for part in parts) + start  # type: ignore[return-value]


def summed_hashes(contents: Tensor, numbers: np.ndarray | None = None) -> int:
    """Return the sum modulo 2⁶⁴ of the examples' hashes, mixed with their numbers if these are given."""
    hashes = contents.cpu().numpy().view(np.uint64)
    if numbers is not None:
        hashes = hashes + mixed(numbers.astype(np.uint64) + np.uint64(GAMMA))
    return int(mixed(hashes).sum(dtype=np.uint64))


def mixed(words: np.ndarray) -> np.ndarray:
    """Return words of 64 bits, each bit of which depends on all bits there were: SplitMix64's finaliser."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))


def _hashes(key: str, tensor: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the hash of each row of an array, whose constants follow from `key`, its dtype and its shape.

    Of whole numbers for each token those count that the mask leaves in: the others are zeros, which add nothing, and
    the length of the rows does not count.
    """
    shape: tuple[int, ...] = tuple(tensor.shape[1:])
    if mask is not None and mask.ndim == 2 and tensor.shape == mask.shape and not tensor.is_floating_point():
        tensor, shape = torch.where(mask.to(tensor.device) != 0, tensor, torch.zeros_like(tensor)), ()
    words = words_of(tensor)
    key = f"{key} {str(tensor.dtype).removeprefix('torch.')} {shape}"
    start, constants = _constants(key, words.shape[1], tensor.device)
    step = max(1, AT_ONCE.get(tensor.device.type, 2**24) // max(1, words.shape[1]))
    return torch.cat([(part * constants).sum(1) for part in words.split(step)]) + start


@functools.lru_cache(maxsize=32)
def _constants(key: str, count: int, device: torch.device) -> tuple[int, Tensor]:
    """Return where a sum starts and its odd constants: the sequence of SplitMix64 whose seed follows from `key`."""
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    sequence = mixed(np.uint64(seed) + np.arange(1, count + 2, dtype=np.uint64) * np.uint64(GAMMA))
    return int(sequence[0].view(np.int64)), torch.from_numpy((sequence[1:] | np.uint64(1)).view(np.int64)).to(device)


def words_of(tensor: Tensor) -> Tensor:
    """Return the bytes of each row as 32-bit words, filled up with zeros."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    width = math.prod(tensor.shape[1:]) * tensor.element_size()
    rows = tensor.reshape(-1).view(torch.uint8).reshape(len(tensor), width)
    if width % 4:
        rows = nn.functional.pad(rows, (0, -width % 4))
    elif rows.storage_offset() % 4:
        rows = rows.clone()
    return rows.reshape(-1).view(torch.int32).reshape(len(tensor), -(-width // 4))


def _leaves(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays, the lists of numbers or texts, and the single ones in a batch, with their place."""
    if isinstance(structure, (Tensor, np.ndarray, *PLAIN)) or _is_listing(structure):
        yield path, structure
    elif isinstance(structure, Mapping):
        for key in sorted(structure, key=str):
            yield from _leaves(structure[key], f"{path}/{key}")
    elif isinstance(structure, (tuple, list)):
        for place, inner in enumerate(structure):
            yield from _leaves(inner, f"{path}/{place}")
    elif dataclasses.is_dataclass(structure):
        fields = {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
        yield from _leaves(fields, path)


def _has_rows(leaf: Any, length: int) -> bool:
    """Return whether a leaf has one row for each of `length` examples."""
    return not isinstance(leaf, PLAIN) and (isinstance(leaf, list) or bool(leaf.ndim)) and len(leaf) == length


def _rows_of(leaf: Any, path: str) -> Tensor:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:  # nearly always
        return leaf
    return tensor_of(np.asarray(leaf) if isinstance(leaf, list) else leaf, path)


def _describe(path: str, leaf: Any) -> bytes:
    """Return bytes that change with a leaf that is the same for all examples of a batch."""
    if isinstance(leaf, PLAIN):
        return f"{path} {leaf!r};".encode()
    array = _rows_of(leaf, path).detach().resolve_conj().resolve_neg().contiguous().cpu()
    head = f"{path} {str(array.dtype).removeprefix('torch.')} {tuple(array.shape)};"
    return head.encode() + array.reshape(-1).view(torch.uint8).numpy().tobytes()


def _drop_labels(batch: Any) -> Any:
    if (isinstance(batch, tuple) or (isinstance(batch, list) and not _is_listing(batch))) and batch:
        batch = batch[0]
    return {key: batch[key] for key in batch if key not in LABELS} if isinstance(batch, Mapping) else batch


def _is_listing(structure: Any) -> bool:
    return isinstance(structure, list) and bool(structure) and all(isinstance(value, PLAIN) for value in structure)


def _ranges(numbers: np.ndarray) -> np.ndarray:
    """Return whole numbers as ranges of one each, or longer ones where they ascend without a gap."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts, stops = np.r_[0, breaks], np.r_[breaks, len(numbers)] - 1
    return np.stack([numbers[starts], numbers[stops] + 1], axis=1)


def _merge_ranges(ranges: np.ndarray) -> np.ndarray:
    """Return ranges as few ascending ones; numbers that are in two of them are refused."""
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    fresh = np.r_[True, ranges[1:, 0] > ends[:-1]][: len(ranges)]
    united = np.stack([ranges[fresh, 0], ends[np.r_[fresh[1:], True][: len(ranges)]]], axis=1)
    twice = int(np.diff(ranges).sum() - np.diff(united).sum())
    if twice:
        first = int(ranges[1:, 0][ranges[1:, 0] < ends[:-1]][0])
        raise InvalidValue(
            f"{twice:,} examples are counted twice, the first of them number {first}; parts of data must not overlap."
        )
    return united


def tensor_of(array: Tensor | np.ndarray, place: str) -> Tensor:
    """Return an array as a tensor that shares its memory where it can; texts as a hash for each."""
    if isinstance(array, Tensor):
        return array.to_dense()
    if array.dtype.kind in "US":
        hashes = [blake2b(repr(text).encode(), digest_size=8).digest() for text in array.reshape(-1).tolist()]
        return torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.int64).reshape(array.shape)
    if array.dtype.itemsize > {"f": 8, "i": 8, "u": 8, "b": 1, "c": 16}.get(array.dtype.kind, 0):
        raise InvalidValue(f"an array of dtype {array.dtype} has no digest{place and f' ({place})'}; give numbers.")
    array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array if array.flags.writeable else array.copy())
