"""Recordings: what layers gave for examples, in files that others or `nk.activations(save=)` wrote, read in pieces.

A recording is a file of arrays or a folder of shards: safetensors, npz or npy. Only what is asked for is read, so that
it may be larger than the memory. Its examples are known by their ids, their tokens or their content, where the files
hold these; so a recording pairs with another one in any order, and with a model that runs on the data again.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from netkin.errors import FileError, InvalidValue, ShapeError, SourceError, UnknownName
from netkin.files import read_json, write_bytes, write_text
from netkin.identity.data import LABELS
from netkin.sources.names import near, split_options

SUFFIXES = (".npz", ".npy", ".safetensors")
HEADER = "recording.json"
KIND, FORMAT = "recording", 1
IDS, TOKENS, MASKS = ("ids", "example_ids"), ("token_ids", "input_ids"), ("attention_mask", "mask")
LENGTHS, CONTENT, TOKEN_HASHES = "lengths", "content", "token_hashes"  # of our own shards
BESIDE = {*IDS, *TOKENS, *MASKS, LENGTHS, CONTENT, TOKEN_HASHES}  # arrays that are no layers
# What vLLM's ExampleHiddenStatesConnector writes for each request, as REQUEST.safetensors: `hidden_states`, tokens ×
# layers × width in the model's type, and `token_ids`, int64; with it lies REQUEST.safetensors.lock, locked until the
# file is whole. Nothing in it says which layers: number i of `eagle_aux_hidden_state_layer_ids` is the residual stream
# before block i, and the number of blocks that after the last one, before the final norm. See
# vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py at 015a95c, and the page
# "Hidden State Extraction" of vLLM's documentation.
HIDDEN, HIDDEN_TOKENS, LOCK, COLUMN = "hidden_states", "token_ids", ".lock", "column"
AT_ONCE = 2**26  # bytes that are read, and written into a shard, at a time
NUMPY_KINDS = "fiub"
NUMBER = r"(?<=.)[-_.]\d+-of-\d+$"  # of a shard of a layer, at the end of an npy file's name
LAYER = re.compile(r"(.*[^a-z])?(layer|block)s?[-_.]?\d+", re.IGNORECASE)  # a file's name, if it holds a layer


# --- layers in files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Some examples of one layer: the rows `start` to `stop` of an array, or one example whose rows are tokens.

    Args:
        path: the file.
        key: the name of the array in it; empty for a file of one array.
        examples: how many it holds.
        column: which part of the second axis is the layer; None for all.
        offsets: where the rows of each example begin, and where the last ones end; None for one row each.
    """

    path: Path
    key: str
    examples: int
    column: int | None = None
    offsets: np.ndarray | None = None

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows of these examples."""
        first, last = (start, stop) if self.offsets is None else (int(self.offsets[start]), int(self.offsets[stop]))
        return _array(self.path, self.key).read(first, last, self.column)


@dataclass(frozen=True)
class RecordedLayer:
    """One layer of a recording: its examples in pieces, of which only those that are asked for are read.

    Args:
        name: its name.
        pieces: its examples, in their order.
        shape: that of one example; without the number of tokens where examples have their own.
        dtype: of its numbers, as they are in the files.
        masks: which tokens of each example count, in pieces like the layer's; None where all do.
    """

    name: str
    pieces: Sequence[Piece]
    shape: tuple[int, ...]
    dtype: torch.dtype
    masks: Sequence[Piece] | None = None

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return sum(piece.examples for piece in self.pieces)

    @property
    def is_ragged(self) -> bool:
        """Whether examples have their own numbers of tokens."""
        return any(piece.offsets is not None for piece in self.pieces)

    def longest(self) -> int:
        """Return the most tokens of an example; 1 where all examples have one row."""
        lengths = [int(np.diff(piece.offsets).max()) for piece in self.pieces if piece.offsets is not None]
        return max(lengths, default=1)

    @property
    def resolution(self) -> float:
        """The rounding unit of the numbers."""
        return torch.finfo(self.dtype if self.dtype.is_floating_point else torch.float32).eps

    @property
    def bytes(self) -> int:
        """How many bytes an example takes at most."""
        return self.longest() * int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, places: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the examples at these places, and which of their tokens count; None where all do."""
        if not self.is_ragged:
            rows = torch.cat([piece.read(*ends) for piece, ends in self._runs(places)])
            if self.masks is None:
                return rows, None
            return rows, torch.cat([self.masks[at].read(*ends) for at, ends in self._numbered_runs(places)]) != 0
        sequences = [sequence for piece, ends in self._runs(places) for sequence in _sequences(piece, *ends)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        padded = pad_sequence(sequences, batch_first=True)
        return padded, torch.arange(padded.shape[1])[None] < lengths[:, None]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([piece.examples for piece in self.pieces])

    def _numbered_runs(self, places: np.ndarray) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (number of the piece, (start, stop)) for examples that lie one behind the other."""
        which = np.searchsorted(self._ends, places, side="right")
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(which) != 0)) + 1
        for run in np.split(np.arange(len(places)), breaks):
            if len(run):
                piece = int(which[run[0]])
                first = int(places[run[0]] - (self._ends[piece] - self.pieces[piece].examples))
                yield piece, (first, first + len(run))

    def _runs(self, places: np.ndarray) -> Iterator[tuple[Piece, tuple[int, int]]]:
        return ((self.pieces[piece], ends) for piece, ends in self._numbered_runs(places))


def _sequences(piece: Piece, start: int, stop: int) -> list[Tensor]:
    if piece.offsets is None:
        return list(piece.read(start, stop))
    return list(piece.read(start, stop).split(np.diff(piece.offsets[start : stop + 1]).tolist()))


# --- arrays in files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, of which rows are read."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mapped: Any = None  # how NumPy maps it: type and offset; None in a file of safetensors

    def read(self, start: int, stop: int, column: int | None = None) -> Tensor:
        """Return rows of it, which are the caller's own."""
        with refusing_damage(self.path):
            if self.mapped is None:
                with safe_open(self.path, "pt") as file:
                    part = file.get_slice(self.key)
                    rows: Tensor = part[start:stop] if column is None else part[start:stop, column]
                    return rows
            dtype, offset, order = self.mapped
            array = np.memmap(self.path, dtype, "r", offset, self.shape, order)
            copied = np.array(array[start:stop] if column is None else array[start:stop, column])
            return torch.from_numpy(copied.astype(dtype.newbyteorder("="), copy=False))


@lru_cache(maxsize=4096)  # reading headers again for each batch would take longer than reading rows
def _arrays_at(path: Path, changed: int) -> dict[str, StoredArray]:
    """Return the arrays in a file by name, without reading them; `changed` tells when it was written."""
    with refusing_damage(path):
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                return {"": _numpy_array(path, "", file, 0)}
        return _npz(path)


def _array(path: Path, key: str) -> StoredArray:
    return arrays_in(path)[key]


def arrays_in(path: Path) -> dict[str, StoredArray]:
    """Return the arrays in a file of safetensors, npz or npy, by name; that of an npy file has no name."""
    with refusing_damage(path):
        changed = path.stat().st_mtime_ns
    return _arrays_at(path, changed)


def _safetensors(path: Path) -> dict[str, StoredArray]:
    arrays = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118  not a dict
            part = file.get_slice(key)
            shape = tuple(part.get_shape())
            dtype = SAFE_DTYPES.get(part.get_dtype())
            if dtype is None:
                raise SourceError(f"{str(path)!r} holds {key!r} as {part.get_dtype()}, which is not read here.")
            arrays[key] = StoredArray(path, key, shape, dtype)
    return arrays


SAFE_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _npz(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of an npz file, which lie in it as they are unless they were compressed."""
    arrays = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise SourceError(
                    f"{str(path)!r} is compressed, so that no part of it can be read alone; write it with "
                    "`numpy.savez`, or as safetensors."
                )
            file.seek(entry.header_offset + 26)  # the lengths of the name and of the extra field, 30 bytes on
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            key = entry.filename.removesuffix(".npy")
            arrays[key] = _numpy_array(path, key, file, entry.header_offset + 30 + name + extra)
    return arrays


def _numpy_array(path: Path, key: str, file: Any, start: int) -> StoredArray:
    file.seek(start)
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise SourceError(f"{str(path)!r} has version {version} of the npy format, which is not read here.")
    shape, is_fortran, dtype = readers[version](file)
    if dtype.kind in "U":  # ids may be texts
        return StoredArray(path, key, shape, torch.uint8, (dtype, file.tell(), "C"))
    if dtype.kind not in NUMPY_KINDS:
        raise SourceError(
            f"{str(path)!r} holds {key or 'objects'!r} of type {dtype}; arrays of numbers are read, and nothing is "
            "unpickled."
        )
    plain = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    return StoredArray(path, key, shape, plain, (dtype, file.tell(), "F" if is_fortran else "C"))


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """Inside the `with`, what can't be read of a file becomes a sentence that names it."""
    try:
        yield
    except OSError as fault:
        raise FileError(f"cannot read {str(path)!r}: {fault.strerror or fault}.") from fault
    except (SafetensorError, zipfile.BadZipFile, ValueError, EOFError, KeyError) as fault:
        if isinstance(fault, (SourceError, FileError)):
            raise
        raise FileError(
            f"{str(path)!r} is damaged, or still being written ({fault}); wait for it, or take another copy."
        ) from fault


# --- a recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecordedRows:
    """What layers gave for examples, in files: opened by `nk.recorded`, and read in pieces.

    Args:
        name: the path of it.
        layers: by name.
        layout: who wrote it, in a word: "arrays", "netkin" or "vllm".
        ids: those of the examples, numbers or texts; None where the files hold none.
        token_hashes: of the tokens of each example; None where the files don't hold them.
        content: hashes of what was fed to the model, by example; None where the files don't hold them.
        tokens: the token ids of each example, in pieces like those of a layer; None where there are none.
        facts: what is known of the model and of the data that were recorded.
    """

    name: str
    layers: Mapping[str, RecordedLayer]
    layout: str = "arrays"
    ids: np.ndarray | None = None
    token_hashes: np.ndarray | None = None
    content: np.ndarray | None = None
    tokens: RecordedLayer | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return next(iter(self.layers.values())).examples

    @property
    def at_once(self) -> int:
        """How many examples may be read at a time."""
        return max(1, AT_ONCE // max(sum(layer.bytes for layer in self.layers.values()), 1))

    def __repr__(self) -> str:
        return f"RecordedRows({self.name!r}, {self.examples:,} examples, {len(self.layers)} layers)"

    # --- which example is which ---

    def order_of(self, other: RecordedRows) -> np.ndarray | None:
        """Return where the examples of another recording are in this one; None where both come in one order.

        Examples are known by their tokens, if both have them, else by their ids. Other examples are refused.
        """
        if self.token_hashes is not None and other.token_hashes is not None:
            return _places(self, _numbered(self.token_hashes), other, _numbered(other.token_hashes), "of other tokens")
        if (self.ids is None) != (other.ids is None):
            has, lacks = (self, other) if other.ids is None else (other, self)
            raise InvalidValue(
                f"{has.name!r} has ids of its examples and {lacks.name!r} has none, so that nothing tells which belong "
                "together; write `ids` into both."
            )
        if self.ids is None or other.ids is None:
            return None
        places = _places(self, _distinct(self), other, _distinct(other), "of other ids")
        if self.content is not None and other.content is not None:
            mine = self.content if places is None else self.content[places]
            apart = np.flatnonzero(mine != other.content)
            if len(apart):
                raise InvalidValue(
                    f"{_count(len(apart))} of {other.name!r} had other inputs than in {self.name!r} under the same "
                    f"ids, the first {other.ids[apart[0]]!s}; record both on the same data."
                )
        return places

    @property
    def pairs_with_data(self) -> bool:
        """Whether it is known of each example which one of some data it is."""
        return self.token_hashes is not None or self.content is not None or _are_numbers(self.ids)

    def places_of(self, numbers: np.ndarray, tokens: np.ndarray | None, content: np.ndarray | None) -> np.ndarray:
        """Return where examples of data are that a model runs on again.

        Args:
            numbers: those of the examples in the data.
            tokens: hashes of the examples' tokens; None where the data hold none.
            content: hashes of what the model gets.
        """
        if self.token_hashes is not None and tokens is not None:
            return self._found(self._by_tokens, tokens.tolist(), numbers, "tokens")
        if not _are_numbers(self.ids):
            why = "its examples are known by their tokens" if self.ids is None else "its ids are texts"
            raise InvalidValue(
                f"{self.name!r} can't be paired with these data: {why}, which the batches don't hold. Give token data "
                "with 'input_ids', or record both sides."
            )
        places = self._found(self._by_id, numbers.tolist(), numbers, "numbers")
        if self.content is not None and content is not None:
            apart = np.flatnonzero(self.content[places] != content)
            if len(apart):
                raise InvalidValue(
                    f"{_count(len(apart))} of the data, the first number {numbers[apart[0]]}, are not those that "
                    f"{self.name!r} holds under these numbers; take the data, in the order and padding, that were "
                    "recorded.",
                    argument="data",
                )
        return places

    @cached_property
    def _by_tokens(self) -> dict[Any, int]:
        return {} if self.token_hashes is None else _lookup(self.token_hashes)

    @cached_property
    def _by_id(self) -> dict[Any, int]:
        return {} if self.ids is None else _lookup(self.ids)

    def _found(self, known: Mapping[Any, int], keys: list[Any], numbers: np.ndarray, what: str) -> np.ndarray:
        """Return the places of some keys; what is not there is refused."""
        missing = [number for key, number in zip(keys, numbers.tolist(), strict=True) if key not in known]
        if missing:
            raise InvalidValue(
                f"{self.name!r} does not hold {_count(len(missing))} of a batch, the first number {missing[0]} of the "
                f"data, by their {what}; it holds {self.examples:,} examples. Record the same data.",
                argument="data",
            )
        return np.array([known[key] for key in keys], np.int64)


def _are_numbers(ids: np.ndarray | None) -> bool:
    return ids is not None and ids.dtype.kind in "iu"


def _count(examples: int) -> str:
    return f"{examples:,} example{'s' * (examples != 1)}"


def _lookup(keys: np.ndarray) -> dict[Any, int]:
    """Return where keys are first; of examples that are equal any is as good."""
    every = keys.tolist()
    return dict(zip(reversed(every), range(len(every) - 1, -1, -1), strict=True))


def _numbered(keys: np.ndarray) -> list[tuple[Any, int]]:
    """Return keys with how often each came before, so that examples which are equal pair in their order."""
    seen, numbered = Counter[Any](), []
    for key in keys.tolist():
        numbered.append((key, seen[key]))
        seen[key] += 1
    return numbered


def _distinct(recording: RecordedRows) -> list[Any]:
    assert recording.ids is not None
    keys: list[Any] = recording.ids.tolist()
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise InvalidValue(f"{recording.name!r} has the id {twice!r} twice; give each example its own.")
    return keys


def _places(a: RecordedRows, mine: list[Any], b: RecordedRows, theirs: list[Any], what: str) -> np.ndarray | None:
    """Return where the keys of `b` are among those of `a`; None where both are in one order."""
    if mine == theirs:
        return None
    known = {key: place for place, key in enumerate(mine)}
    for first, second, keys, others in ((b, a, theirs, known), (a, b, mine, set(theirs))):
        strange = [place for place, key in enumerate(keys) if key not in others]
        if strange:
            which = f"number {strange[0]}" if first.ids is None else f"{first.ids[strange[0]]!s}"
            raise InvalidValue(
                f"{first.name!r} holds {_count(len(strange))} {what} than {second.name!r}, the first {which}; record "
                "both on the same examples."
            )
    return np.array([known[key] for key in theirs], np.int64)


def token_hash(tokens: Any) -> int:
    """Return the hash of a sequence of token ids."""
    plain = np.asarray(tokens).astype("<i8")
    return int.from_bytes(blake2b(plain.tobytes(), digest_size=8).digest(), "little", signed=True)


# --- opening ----------------------------------------------------------------------------------------------------------


def names_recording(text: Any) -> bool:
    """Return whether a text names a recording: a folder, or a file of safetensors, npz or npy."""
    if not isinstance(text, str):
        return False
    path = text.partition(",")[0]
    if path.partition("@")[0].count(":") or not path:
        return False
    return Path(path).suffix in SUFFIXES or path.endswith(("/", os.sep)) or Path(path).expanduser().is_dir()


def recorded(source: str | os.PathLike[str], layers: Sequence[int] | None = None) -> RecordedRows:
    """Return what layers gave for examples, recorded in a file or a folder: a side of `nk.compare` and of `nk.diff`.

    A file of safetensors or npz holds an array for each layer, examples first; a folder holds such files as shards, in
    the order of their names, or an npy file for each layer. `ids` among the arrays (or in ``ids.npy`` or ``ids.txt``)
    are numbers or names of the examples, `attention_mask` tells which tokens count. What `nk.activations(save=)` and
    vLLM's `extract_hidden_states` write is known too. Nothing is read yet but headers and ids.

    Args:
        source: the path, after which ``,layers=0-32`` or ``,layers=2+16+29`` may give `layers` as text.
        layers: of a folder that vLLM wrote, the `eagle_aux_hidden_state_layer_ids`, in the order of the columns.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.savez(folder / "a.npz", relu=np.ones((5, 3)), ids=np.arange(5))
        >>> recorded(folder / "a.npz").layers["relu"].shape
        (3,)
    """
    text, options = os.fspath(source), dict[str, str]()
    if not Path(text).expanduser().exists():  # a path may hold a comma
        text, options = split_options(text)
    if strange := set(options) - {"layers"}:
        raise UnknownName(f"a recording has no option {strange.pop()!r}; it has layers.")
    given = _numbers_of(options["layers"]) if "layers" in options else layers
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise SourceError(f"{text!r} is no recording; one ends in .npz, .npy or .safetensors, or is a folder.")
        return _of_vllm(text, [path], given) if _is_vllm(path) else _of_shards(text, None, [path], given)
    if not path.is_dir():
        raise SourceError(f"found no file or folder {text!r}{near(path) or '.'}")
    if (path / HEADER).is_file():
        return _of_netkin(text, path)
    if (path / "config.json").is_file():
        raise SourceError(f"{text!r} is the folder of a Hugging Face model, and no recording; name it 'hf:{text}'.")
    files = sorted((file for file in path.iterdir() if _is_shard(file)), key=_in_order)
    locks = [file for file in path.iterdir() if file.name.endswith(".safetensors" + LOCK)]
    if lost := [file for file in locks if not file.with_name(file.name.removesuffix(LOCK)).exists()]:
        raise SourceError(
            f"{text!r} lacks {len(lost)} of {len(locks)} shards that were begun, the first "
            f"{lost[0].name.removesuffix(LOCK)!r}; wait for the engine, or remove its lock."
        )
    if not files:
        raise SourceError(f"{text!r} holds no recording: it has no files of {', '.join(SUFFIXES)}.")
    if _is_vllm(files[0]):
        return _of_vllm(text, files, given)
    return _of_shards(text, path, files, given)


def _is_shard(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.name != "ids.npy"


def _is_vllm(path: Path) -> bool:
    return path.suffix == ".safetensors" and {HIDDEN, HIDDEN_TOKENS} == set(arrays_in(path))


def _in_order(path: Path) -> list[Any]:
    """Return what to sort shards by: numbers in names by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _numbers_of(text: str) -> list[int]:
    if found := re.fullmatch(r"(\d+)-(\d+)", text):
        return list(range(int(found[1]), int(found[2]) + 1))
    if not re.fullmatch(r"\d+(\+\d+)*", text):
        raise InvalidValue(f"`layers` of a recording are written 0-32 or 2+16+29; got {text!r}.", argument="layers")
    return [int(part) for part in text.split("+")]


def _require_all_pairs(name: str, files: Sequence[Path]) -> None:
    """Refuse numbered shards of which some are missing, as their names tell."""
    of = [re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\.\w+)", file.name) for file in files]
    if all(of):
        numbers, total = {int(found[2]) for found in of if found}, max(int(found[3]) for found in of if found)
        base = 0 if 0 in numbers else 1
        wanted = range(base, base + total)
    else:
        ends = [re.fullmatch(r"(.*?)(\d+)(\.\w+)", file.name) for file in files]
        if not all(ends) or len({(found[1], found[3]) for found in ends if found}) > 1:
            return
        numbers = {int(found[2]) for found in ends if found}
        wanted = range(min(numbers) if min(numbers) == 1 else 0, max(numbers) + 1)
    missing = [number for number in wanted if number not in numbers]
    if missing:
        raise SourceError(
            f"{name!r} lacks {len(missing)} of {len(wanted)} shards, the first number {missing[0]}; copy all of them."
        )


def _of_shards(name: str, folder: Path | None, files: Sequence[Path], given: Any) -> RecordedRows:
    """Return the recording in files of arrays: shards with the same layers, or an npy file for each layer."""
    if given is not None:
        raise InvalidValue(
            "`layers` numbers the columns of what vLLM wrote; here arrays have names.", argument="layers"
        )
    by_layer: dict[str, list[tuple[Path, str, StoredArray]]] = {}
    if of_layers := [file for file in files if file.suffix != ".npy" and LAYER.fullmatch(file.stem)]:
        raise SourceError(
            f"{name!r} holds {of_layers[0].name!r}, which seems to be of one layer, and files are read as shards of "
            "the examples; put all layers of some examples into each file, or write an npy file for each layer."
        )
    npy = [file for file in files if file.suffix == ".npy"]
    if npy and len(npy) < len(files):
        raise SourceError(f"{name!r} holds npy files beside others; give all layers in files of one kind.")
    is_numbered = bool(npy) and all(re.search(NUMBER, file.stem) for file in npy)  # shards, and not layers
    for file in files:
        for key, array in arrays_in(file).items():
            layer = key or (re.sub(NUMBER, "", file.stem) if is_numbered else file.stem)
            by_layer.setdefault(layer, []).append((file, key, array))
    groups = [[file for file, _, _ in pieces] for pieces in by_layer.values()] if npy else [list(files)]
    for group in groups:
        if len(group) > 1:
            _require_all_pairs(name, group)
    whole = {
        layer: pieces
        for layer, pieces in by_layer.items()
        if layer not in BESIDE and not (layer in LABELS and _are_classes(pieces[0][2]))
    }
    if not whole:
        raise SourceError(f"{name!r} holds no layers: only {', '.join(map(repr, by_layer))}.")
    shards = max(map(len, whole.values()))
    for layer, pieces in whole.items():
        if len(pieces) < shards and not npy:
            raise SourceError(
                f"{name!r} holds layer {layer!r} in {len(pieces)} of {shards} shards; give all shards the same layers."
            )
    counts = [array.shape[:1] for _, _, array in next(iter(whole.values()))]
    for key in (*MASKS, *TOKENS):
        if key in by_layer and [array.shape[:1] for _, _, array in by_layer[key]] != counts:
            raise ShapeError(f"{name!r} does not hold {key!r} for all examples; give all shards the same arrays.")
    masks = next((_pieces(by_layer[key]) for key in MASKS if key in by_layer), None)
    layers = {}
    for layer, pieces in whole.items():
        array = pieces[0][2]
        for file, _, other in pieces:
            if (other.shape[1:], other.dtype) != (array.shape[1:], array.dtype) or not other.shape:
                raise ShapeError(
                    f"{name!r} holds layer {layer!r} as {_form(array)} and in {file.name!r} as {_form(other)}; record "
                    "all shards alike."
                )
        mask = masks if len(array.shape) == 3 and masks is not None else None
        layers[layer] = RecordedLayer(layer, _pieces(pieces), tuple(array.shape[1:]), array.dtype, mask)
    tokens = next((by_layer[key] for key in TOKENS if key in by_layer), None)
    known = None if tokens is None else RecordedLayer("", _pieces(tokens), tokens[0][2].shape[1:], torch.int64, masks)
    count = next(iter(layers.values())).examples
    ids = _ids(name, folder, by_layer, count)
    return RecordedRows(name, layers, ids=ids, tokens=known, token_hashes=_hashes(known))


def _are_classes(array: StoredArray) -> bool:
    return len(array.shape) == 1 and not array.dtype.is_floating_point


def _form(array: StoredArray) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {array.shape[1:]}"


def _pieces(found: Iterable[tuple[Path, str, StoredArray]]) -> list[Piece]:
    return [Piece(path, key, array.shape[0] if array.shape else 0) for path, key, array in found]


def _ids(name: str, folder: Path | None, arrays: Mapping[str, Any], count: int) -> np.ndarray | None:
    """Return the ids of the examples, from an array in the shards or a file beside them."""
    ids: np.ndarray | None = None
    if key := next((key for key in IDS if key in arrays), None):
        ids = np.concatenate([_plain(array) for _, _, array in arrays[key]])
    elif folder is not None and (folder / "ids.npy").is_file():
        ids = _plain(arrays_in(folder / "ids.npy")[""])
    elif folder is not None and (folder / "ids.txt").is_file():
        with refusing_damage(folder / "ids.txt"):
            ids = np.array((folder / "ids.txt").read_text(encoding="utf-8").splitlines())
    if ids is not None and ids.shape != (count,):
        raise ShapeError(f"{name!r} holds {count:,} examples and ids of shape {ids.shape}; give each example one.")
    if ids is not None and ids.dtype.kind not in "iuU":
        raise InvalidValue(f"{name!r} has ids of type {ids.dtype}; they are whole numbers or texts.")
    return ids


def _plain(array: StoredArray) -> np.ndarray:
    """Return a whole small array."""
    if array.mapped is not None and array.mapped[0].kind == "U":
        with refusing_damage(array.path):
            return np.array(np.memmap(array.path, array.mapped[0], "r", array.mapped[1], array.shape))
    return array.read(0, array.shape[0]).numpy()


def _hashes(tokens: RecordedLayer | None) -> np.ndarray | None:
    if tokens is None:
        return None
    hashes = []
    for place in range(tokens.examples):
        ids, mask = tokens.read(np.array([place]))
        hashes.append(token_hash(ids[0] if mask is None else ids[0][mask[0]]))
    return np.array(hashes, np.int64)


def _of_vllm(name: str, files: Sequence[Path], given: Sequence[int] | None) -> RecordedRows:
    """Return what vLLM wrote: each file is one example, whose rows are its tokens."""
    arrays = [arrays_in(file) for file in files]
    for file, held in zip(files, arrays, strict=True):
        if not {HIDDEN, HIDDEN_TOKENS} <= held.keys():
            raise SourceError(f"{str(file)!r} lacks {HIDDEN!r} or {HIDDEN_TOKENS!r}, which the other files have.")
        states, count = held[HIDDEN], sum(held[HIDDEN_TOKENS].shape)
        if len(states.shape) != 3 or states.shape[0] != count or not count:
            raise ShapeError(
                f"{str(file)!r} holds hidden states of shape {states.shape} for {count:,} tokens; tokens × layers × "
                "width are expected."
            )
        if states.shape[1:] != arrays[0][HIDDEN].shape[1:]:
            raise ShapeError(
                f"{str(file)!r} holds hidden states {states.shape[1:]} and {str(files[0])!r} "
                f"{arrays[0][HIDDEN].shape[1:]}, layers × width; take the files of one engine."
            )
    first = arrays[0][HIDDEN]
    columns = first.shape[1]
    numbers = list(range(columns)) if given is None else list(given)
    if len(numbers) != columns or len(set(numbers)) < columns:
        raise InvalidValue(
            f"{name!r} holds {columns} layers and `layers` numbers {len(set(numbers))}; give the "
            "eagle_aux_hidden_state_layer_ids of the engine.",
            argument="layers",
        )

    def pieces(key: str, column: int | None = None) -> list[Piece]:
        lengths = [held[key].shape[0] for held in arrays]
        return [Piece(file, key, 1, column, np.array([0, length])) for file, length in zip(files, lengths, strict=True)]

    stem = COLUMN if given is None else HIDDEN  # which layers they are is not known unless it was said
    layers = {
        f"{stem}.{number}": RecordedLayer(f"{stem}.{number}", pieces(HIDDEN, column), first.shape[2:], first.dtype)
        for column, number in enumerate(numbers)
    }
    tokens = RecordedLayer("", pieces(HIDDEN_TOKENS), (), torch.int64)
    return RecordedRows(
        name, layers, "vllm", ids=np.array([file.stem for file in files]), tokens=tokens, token_hashes=_hashes(tokens),
    )  # fmt: skip


# --- our own recordings -----------------------------------------------------------------------------------------------


def _of_netkin(name: str, folder: Path) -> RecordedRows:
    """Return what `nk.activations(save=)` wrote."""
    header = header_of(folder)
    if not header["finished"]:
        raise SourceError(
            f"{name!r} is not finished: it holds {header['examples']:,} examples. Run the same `nk.activations` again, "
            "which continues."
        )
    files = [folder / shard["file"] for shard in header["shards"]]
    if missing := [file for file in files if not file.is_file()]:
        raise SourceError(
            f"{name!r} lacks {len(missing)} of {len(files)} shards, the first {missing[0].name!r}; copy all of them."
        )
    arrays = [arrays_in(file) for file in files]
    lengths = [held[LENGTHS].read(0, held[LENGTHS].shape[0]).numpy() if LENGTHS in held else None for held in arrays]
    layers = {}
    for layer in header["layers"]:
        ragged = layer in header["ragged"]
        pieces = []
        for file, shard, of_examples in zip(files, header["shards"], lengths, strict=True):
            offsets = np.concatenate([[0], np.cumsum(of_examples)]) if ragged and of_examples is not None else None
            pieces.append(Piece(file, layer, int(shard["examples"]), None, offsets))
        array = arrays[0][layer]
        layers[layer] = RecordedLayer(layer, pieces, tuple(array.shape[1:]), array.dtype)

    def joined(key: str) -> np.ndarray | None:
        found = [held[key] for held in arrays if key in held]
        return np.concatenate([one.read(0, one.shape[0]).numpy() for one in found]) if found else None

    return RecordedRows(
        name, layers, "netkin", ids=joined("ids"), token_hashes=joined(TOKEN_HASHES), content=joined(CONTENT),
        facts=header["facts"],
    )  # fmt: skip


def header_of(folder: Path) -> dict[str, Any]:
    """Return the header of a folder that `nk.activations(save=)` wrote."""
    header = read_json(folder / HEADER)
    if not isinstance(header, dict) or header.get("kind") != KIND or header.get("format") != FORMAT:
        raise FileError(f"{str(folder / HEADER)!r} is no header of a recording in format {FORMAT}; record again.")
    return header


class RecordingWriter:
    """Writes a recording shard by shard, so that little is held; a folder that was left half-written is continued.

    Args:
        folder: where the shards lie, beside their header.
        facts: of the model and the data; a folder with other ones is refused.
        overwrite: whether what is there may be deleted.
    """

    def __init__(self, folder: str | os.PathLike[str], facts: Mapping[str, Any], overwrite: bool = False):
        self.folder, self.facts = Path(folder).expanduser(), dict(facts)
        self.shards: list[dict[str, Any]] = []
        self.layers: list[str] = []
        self.ragged: list[str] = []
        self._rows: list[dict[str, Tensor]] = []
        self._bytes = 0
        self.done: list[np.ndarray] = []  # the content of examples that are written already, by shard
        self._begin(overwrite)

    @property
    def examples(self) -> int:
        """How many examples are in finished shards."""
        return sum(int(shard["examples"]) for shard in self.shards)

    def _begin(self, overwrite: bool) -> None:
        if self.folder.is_file():
            raise FileError(f"cannot record into {str(self.folder)!r}: it is a file; name a folder.", argument="save")
        there = list(self.folder.iterdir()) if self.folder.is_dir() else []
        header = header_of(self.folder) if (self.folder / HEADER).is_file() and not overwrite else None
        if header is None and there and not overwrite:
            raise FileError(
                f"{str(self.folder)!r} holds other files; record into a new folder, or give `overwrite=True`.",
                argument="save",
            )
        if header is not None and (header["finished"] or header["facts"] != self.facts):
            apart = next((key for key in self.facts if header["facts"].get(key) != self.facts[key]), "")
            why = f"was begun with other {apart}" if apart else "is finished"
            raise FileError(
                f"the recording in {str(self.folder)!r} {why}; record into a new folder, or give `overwrite=True`.",
                argument="save",
            )
        if header is None:
            for file in there:
                if file.name == HEADER or re.fullmatch(r"\d{5,}\.safetensors", file.name):
                    file.unlink()
            return
        self.shards, self.layers, self.ragged = header["shards"], header["layers"], header["ragged"]
        for shard in self.shards:
            held = arrays_in(self.folder / shard["file"])
            self.done.append(held[CONTENT].read(0, held[CONTENT].shape[0]).numpy())

    def add(self, rows: Mapping[str, Tensor], beside: Mapping[str, np.ndarray], lengths: np.ndarray | None) -> None:
        """Add a batch: the rows of each layer, and what is known of its examples.

        Args:
            rows: by layer; of those with more rows than examples all tokens of one example after the other.
            beside: arrays with one number for each example.
            lengths: how many tokens the examples have; None where no mask tells.
        """
        count = len(next(iter(beside.values())))
        tensors: dict[str, Tensor] = {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in beside.items()}
        ragged = []
        for layer, matrix in rows.items():
            if layer in BESIDE:
                raise InvalidValue(f"a recording can't hold a layer called {layer!r}.", argument="layers")
            if len(matrix) == count:
                tensors[layer] = matrix
            elif lengths is not None and len(matrix) == int(lengths.sum()):
                tensors[layer] = matrix
                ragged.append(layer)
            else:
                tensors[layer] = matrix.reshape(count, len(matrix) // count, *matrix.shape[1:])
        if ragged and lengths is not None:
            tensors[LENGTHS] = torch.from_numpy(np.ascontiguousarray(lengths))
        if self.layers and (self.layers != list(rows) or self.ragged != ragged):
            raise ShapeError(
                "layers give one row for each example in some batches and several in others; choose a shape such as "
                "'mean'."
            )
        self.layers, self.ragged = list(rows), ragged
        self._rows.append({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= AT_ONCE:
            self._write()

    def finish(self) -> None:
        """Write what is left, and note that all is there."""
        self._write()
        self._note(finished=True)

    def _write(self) -> None:
        if not self._rows:
            return
        shapes = {name: {batch[name].shape[1:] for batch in self._rows} for name in self._rows[0]}
        if uneven := next((name for name, found in shapes.items() if len(found) > 1), None):
            raise ShapeError(
                f"layer {uneven!r} has other sizes in other batches; pad all batches to one length, or choose a shape "
                "such as 'mean' or 'pool'."
            )
        joined = {name: torch.cat([batch[name] for batch in self._rows]) for name in self._rows[0]}
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{len(self.shards):05d}.safetensors"
        write_bytes(self.folder / name, to_safetensors(joined), overwrite=True)
        self.shards.append({"file": name, "examples": len(joined[CONTENT])})
        self._rows, self._bytes = [], 0
        self._note(finished=False)

    def _note(self, finished: bool) -> None:
        header = {
            "kind": KIND, "format": FORMAT, "finished": finished, "examples": self.examples, "layers": self.layers,
            "ragged": self.ragged, "shards": self.shards, "facts": self.facts,
        }  # fmt: skip
        write_text(self.folder / HEADER, json.dumps(header, indent=1), overwrite=True)
