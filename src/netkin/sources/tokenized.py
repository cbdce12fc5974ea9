"""Texts: those of a file, a table, a folder or a list become rows of tokens, one for each text or all of one length.

A file is read once as a stream, to learn where its texts are; they are read again when their batch is fed. Nothing in a
file is run: tables are columns of values, and a tokenizer renders its chat template in the sandbox of Jinja.
"""

from __future__ import annotations

import csv
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.errors import InvalidValue, SourceError, UnknownName, did_you_mean, import_optional
from netkin.sources.batches import LoadedExamples, as_they_are
from netkin.sources.models import load_tokenizer
from netkin.sources.names import content, in_short, reading, require_file

EACH = ("window", "line", "paragraph", "document", "row")
TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
COLUMNS = ("text", "messages", "prompt", "content", "sentence")  # taken where none is named and one of them is there
LONGEST = 512  # tokens of a text, unless `length` says otherwise or the model takes fewer
BLOCK = 2**22  # bytes of a file that are read together
AT_ONCE = 1024  # texts that are read or split into tokens together

Chat = list[dict[str, Any]]  # messages with their roles


class Texts(ABC):
    """Texts or chats that can be read by their number.

    Args:
        name: what a refusal calls them.
        content: a text that identifies them.
    """

    name: str
    content: str

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are."""

    @abstractmethod
    def read(self, places: Sequence[int]) -> list[Any]:
        """Return the texts with these numbers: strings, or lists of messages."""


class ListedTexts(Texts):
    """Texts or chats in memory."""

    def __init__(self, name: str, texts: Sequence[Any]):
        self.name, self._texts = name, texts
        self.content = _digest(repr(one).encode() for one in texts)

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, places: Sequence[int]) -> list[Any]:
        return [self._texts[place] for place in places]


class SpannedTexts(Texts):
    """Pieces of a file, read where they are; of JSON one column."""

    def __init__(self, path: Path, spans: np.ndarray, content: str, column: str = ""):
        self.name, self.content, self._path, self._spans, self._column = str(path), content, path, spans, column

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, places: Sequence[int]) -> list[Any]:
        texts = []
        with self._path.open("rb") as file:
            for place in places:
                start, stop = self._spans[place].tolist()
                file.seek(start)
                texts.append(self._text(file.read(stop - start).rstrip(), start, place))
        return texts

    def _text(self, piece: bytes, start: int, place: int) -> Any:
        try:
            text = piece.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise _no_utf8(self._path, start + error.start) from error
        return text if not self._column else _of_json(text, self._column, f"row {place + 1:,} of {self.name!r}")


class FiledTexts(Texts):
    """Whole files, each of them a text."""

    def __init__(self, folder: Path, paths: Sequence[Path]):
        self.name, self._paths = str(folder), paths
        self.content = _digest(blake2b(content(path)).digest() for path in paths)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, places: Sequence[int]) -> list[Any]:
        return [written(self._paths[place]) for place in places]


class ColumnTexts(Texts):
    """A column of Arrow, which maps the file into memory where it can."""

    def __init__(self, name: str, column: Any):
        self.name, self._column = name, column
        buffers = (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None)
        self.content = _digest([str(len(column)).encode()], buffers)

    def __len__(self) -> int:
        return len(self._column)

    def read(self, places: Sequence[int]) -> list[Any]:
        return [self._column[place].as_py() for place in places]


def _digest(*pieces: Iterable[Any]) -> str:
    """Return a digest of pieces of bytes, one after the other."""
    digest = blake2b(digest_size=16)
    for piece in chain(*pieces):
        digest.update(piece)
    return digest.hexdigest()


# --- where the texts are ----------------------------------------------------------------------------------------------


def text(
    file: str | Sequence[Any],
    window: int = 64,
    tokenizer: str = "",
    each: str = "",
    column: str = "",
    length: int = 0,
    _limits: Mapping[str, int] | None = None,
) -> LoadedExamples:
    """Return texts as rows of tokens, or one text in pieces of characters.

    Without a tokenizer it is one text in pieces of `window` characters one after the other, each character as a whole
    number: its place among all characters of the text, sorted. Labels are the same pieces one character later; what is
    left at the end is dropped.

    Args:
        file: a file of text, a table (JSON lines, CSV, parquet, arrow), a folder of one of these, or texts in a list.
        window: how many characters or tokens a piece has, special tokens included.
        tokenizer: the folder of a Hugging Face model, or a tokenizer.
        each: what an example is: "window", pieces of all texts together; or "line", "paragraph", "document", "row".
        column: of a table, the texts or the chats.
        length: where a text is cut, in tokens.
        _limits: how many tokens and ids a model takes, by the name of what says so.
    """
    if each and each not in EACH:
        raise UnknownName(f"`each` can't be {each!r}{did_you_mean(each, EACH) or ';'} it is {', '.join(EACH)}.")
    path = Path(file).expanduser() if isinstance(file, str) else None
    is_table = _is_table(path)
    each = each or ("row" if is_table else "window")
    if path is not None and not path.is_dir():
        require_file(path, "text file")
    if not tokenizer and (each != "window" or is_table):
        raise SourceError(
            f"a tokenizer is needed to make tokens of {'texts' if path is None else repr(str(path))}; feed a Hugging "
            "Face model that has one in its folder, or name such a folder: `text,tokenizer=DIR:FILE`."
        )
    if path is not None and not is_table and each == "window":
        if column or length:
            raise InvalidValue("`column` and `length` do not go with windows of a plain text; say what `each` is.")
        return (
            _characters(path, window) if not tokenizer else _windows([written(path)], window, tokenizer, path, _limits)
        )
    if path is None:
        texts: Texts = ListedTexts("the list of texts", list(file))
    else:
        texts = _texts_in(path, "row" if each == "window" else each, column)
    if not len(texts):
        raise SourceError(f"{texts.name!r} holds no text.")
    if each == "window":
        if length:
            raise InvalidValue("`length` cuts texts, and windows take all of them; give `window=` instead.")
        return _windows(_each_of(texts), window, tokenizer, path or Path(texts.name), _limits)
    name, tokenizer = tokenizer_name(tokenizer), _loaded_tokenizer(tokenizer)
    rows = TokenizedTexts(texts, tokenizer, name, length, dict(_limits or {}), _identity(tokenizer))
    return torch.arange(len(texts)), None, rows


def _is_table(path: Path | None) -> bool:
    return path is None or path.suffix.lower() in TABLES or path.is_dir()


def is_texts(data: Any) -> bool:
    """Return whether data are a list of texts, or of chats: lists of messages with a role."""
    if not (isinstance(data, (list, tuple)) and data):
        return False
    return all(isinstance(one, str) for one in data) or all(_is_chat(one) for one in data)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value)
    )


def _texts_in(path: Path, each: str, column: str) -> Texts:
    """Return the texts of a file, a table or a folder."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return _texts_of_folder(path, each, column)
    require_file(path, "text file")
    if suffix not in TABLES:
        if column:
            raise InvalidValue(
                f"{str(path)!r} is no table, so it has no column {column!r}; tables end in {', '.join(TABLES)}."
            )
        if each == "row":
            raise InvalidValue(f"{str(path)!r} is no table, so it has no rows; give `each=line`.")
        if each == "document":
            raise InvalidValue(
                f"{str(path)!r} is one document, and one example can't be compared on; give the folder of several, or "
                "`each=paragraph`."
            )
        return SpannedTexts(path, *_spans(path, by_paragraph=each == "paragraph"))
    if each != "row":
        raise InvalidValue(f"{str(path)!r} is a table, whose rows are the examples; leave `each={each}` out.")
    if suffix in (".jsonl", ".ndjson"):
        spans, digest = _spans(path)
        texts = SpannedTexts(path, spans, digest)
        first = _of_json(texts.read([0])[0], "", f"row 1 of {str(path)!r}") if len(texts) else {}
        return SpannedTexts(path, spans, digest, _column_of(list(first), column, path))
    if suffix in (".csv", ".tsv"):
        return _csv_column(path, column, "\t" if suffix == ".tsv" else ",")
    return _arrow_column(path, [path], column)


def _texts_of_folder(folder: Path, each: str, column: str) -> Texts:
    """Return the texts of a folder: a data set of `datasets`, files of parquet or arrow, or files of text."""
    if (folder / "dataset_dict.json").is_file():
        splits = [inner.name for inner in sorted(folder.iterdir()) if inner.is_dir()]
        raise SourceError(f"{str(folder)!r} holds {', '.join(splits)}; name one of them: {str(folder / splits[0])!r}.")
    if (folder / "state.json").is_file():  # written by `save_to_disk`, in this order
        with reading(folder / "state.json", "state of a data set", "save it again with `save_to_disk`"):
            state = json.loads(content(folder / "state.json"))
            files = [folder / Path(part["filename"]).name for part in state["_data_files"]]
        return _arrow_column(folder, files, column)
    for suffix in (".parquet", ".arrow"):
        if files := sorted(folder.glob(f"*{suffix}")):
            return _arrow_column(folder, files, column)
    documents = sorted(path for path in folder.rglob("*.txt") if not path.name.startswith("."))
    if not documents or each not in ("row", "document"):
        raise SourceError(
            f"{str(folder)!r} holds no texts that are known: it must be a folder of `save_to_disk`, or hold files that "
            "end in .parquet, .arrow or, for `each=document`, .txt."
        )
    return FiledTexts(folder, documents)


def _spans(path: Path, by_paragraph: bool = False) -> tuple[np.ndarray, str]:
    """Return where the lines or paragraphs of a file begin and end, without blank ones, and a digest of the file."""
    digest, ends, dark = blake2b(digest_size=16), list[np.ndarray](), list[np.ndarray]()
    place, open_line = 0, 0  # bytes read; of a line that goes on in the next block, those that are no white space
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            values = np.frombuffer(block, np.uint8)
            newlines = np.flatnonzero(values == ord("\n"))
            seen = np.concatenate([[open_line], values > ord(" ")]).cumsum()
            ends.append(newlines + place)
            dark.append(np.diff(seen[newlines], prepend=0))
            place, open_line = place + len(block), int(seen[-1] - (seen[newlines[-1]] if len(newlines) else 0))
    stops = np.concatenate([*ends, [place]])
    is_held = np.concatenate([*dark, [open_line]]) > 0
    starts = np.concatenate([[0], stops[:-1] + 1])
    first, last = is_held, is_held
    if by_paragraph:  # lines that follow or precede a blank one
        first = is_held & ~np.concatenate([[False], is_held[:-1]])
        last = is_held & ~np.concatenate([is_held[1:], [False]])
    return np.stack([starts[first], stops[last]], 1), digest.hexdigest()


def _csv_column(path: Path, column: str, delimiter: str) -> Texts:
    """Return a column of a CSV file, whose first row has the names."""
    with (
        reading(path, "CSV file in UTF-8", "write it again"),
        path.open(encoding="utf-8-sig", newline="") as file,
        _long_values(),
    ):
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        names = next(rows, [])
        place = names.index(_column_of(names, column, path))
        texts = list[str]()
        for number, row in enumerate(rows, 2):
            if len(row) != len(names) and row:
                raise SourceError(
                    f"row {number:,} of {str(path)!r} has {len(row)} values and the first has {len(names)} names; "
                    "quote values that hold the separator."
                )
            texts += [row[place]] if row else []
    return ListedTexts(str(path), texts)


@contextmanager
def _long_values() -> Iterator[None]:
    """Let values of CSV be of any length inside the `with`."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _arrow_column(place: Path, files: Sequence[Path], column: str) -> Texts:
    """Return a column of files of parquet or arrow."""
    arrow, parquet = (
        import_optional(name, "arrow", "reading parquet and arrow") for name in ("pyarrow", "pyarrow.parquet")
    )
    chunks = []
    for path in files:
        require_file(path)
        with reading(path, f"file of {path.suffix.lstrip('.')}", "write it again"):
            if path.suffix == ".parquet":
                table = parquet.ParquetFile(path, memory_map=True)
                name = _column_of(table.schema_arrow.names, column, place)
                chunks += table.read(columns=[name]).column(name).chunks
            else:
                source = arrow.memory_map(str(path))
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                table = arrow.ipc.open_file(source).read_all() if is_file else arrow.ipc.open_stream(source).read_all()
                chunks += table.column(_column_of(table.schema.names, column, place)).chunks
    return ColumnTexts(str(place), arrow.chunked_array(chunks))


def _column_of(names: Sequence[str], column: str, path: Path) -> str:
    """Return the column that is named, or the one that holds texts by its name, or the only one."""
    if column in names:
        return column
    known = next((name for name in COLUMNS if name in names), names[0] if len(names) == 1 else "")
    if known and not column:
        return known
    hint = did_you_mean(column, names) if column else ""
    what = f"has no column {column!r}" if column else "has several columns"
    raise UnknownName(
        f"{str(path)!r} {what}{hint or ';'} it has {', '.join(map(repr, names)) or 'none'}. Name the one with the "
        "texts, as in `text,column=NAME:FILE`."
    )


def _of_json(line: str, column: str, where: str) -> Any:
    """Return a column of a line of JSON; without a column the whole object."""
    try:
        row = json.loads(line)
        return row[column] if column else dict(row)
    except (ValueError, TypeError, KeyError) as error:
        fault = f"has no {column!r}" if isinstance(error, KeyError) else "is no object of JSON"
        raise SourceError(f"{where} {fault}; each line of JSON is an object with the same names.") from error


def written(path: Path) -> str:
    """Return what is written in a file of text."""
    try:
        # universal newlines as Python's own `open` has them
        return content(path, "text file").decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _no_utf8(path, error.start) from error


def _no_utf8(path: Path, place: int) -> SourceError:
    return SourceError(f"{str(path)!r} is no text in UTF-8: byte {place:,} fits no character.")


def _each_of(texts: Texts) -> Iterator[Any]:
    for start in range(0, len(texts), AT_ONCE):
        yield from texts.read(range(start, min(start + AT_ONCE, len(texts))))


# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenizedTexts:
    """Makes rows of tokens of texts, whose numbers are what is stored; padded on the right.

    Chats are rendered by the chat template of the tokenizer. It notes which texts were cut at `length`.

    Args:
        texts: what is read.
        tokenizer: what splits it.
        name: what a refusal calls the tokenizer.
        length: the most tokens of a text; 0 for 512, or what the tokenizer and the model take.
        limits: how many tokens and ids a model takes: "tokens", "ids", and the name of the model.
        split_by: what identifies the tokenizer.
    """

    texts: Texts
    tokenizer: Any
    name: str
    length: int
    limits: dict[str, Any]
    split_by: str
    _cut: dict[int, bool] = field(default_factory=dict)  # by number, of those that were read

    def __post_init__(self) -> None:
        most = min(self.tokenizer.model_max_length, self.limits.get("tokens", sys.maxsize))
        if self.length > most:
            raise InvalidValue(
                f"`length` is {self.length:,}, and the model takes at most {most:,} tokens; give that or less.",
                argument="length",
                value=self.length,
            )
        self.length = self.length or min(LONGEST, most)
        special = self.tokenizer.num_special_tokens_to_add()
        if self.length <= special:
            raise InvalidValue(
                f"texts of {self.length} tokens have no room beside the {special} special ones that the tokenizer "
                f"adds; give more, as in `length={special + 16}`.",
                argument="length",
                value=self.length,
            )

    def __call__(self, stored: Tensor) -> dict[str, Tensor]:
        places = stored.tolist()
        rows = self._ids(places)
        empty = [place for place, ids in zip(places, rows, strict=True) if not ids]
        if empty:
            raise SourceError(
                f"{len(empty):,} texts of {self.texts.name!r} give no tokens, the first of them number "
                f"{empty[0] + 1:,}; leave them out."
            )
        require_known_ids(rows, self.tokenizer, self.name, self.limits)
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(width) < lengths[:, None]).long()}

    def _ids(self, places: Sequence[int]) -> list[list[int]]:
        texts = self.texts.read(places)
        chats = [place for place, one in zip(places, texts, strict=True) if not isinstance(one, str)]
        if chats and len(chats) < len(texts):
            raise SourceError(f"{self.texts.name!r} holds texts and chats, the first chat is number {chats[0] + 1:,}.")
        texts = [self._rendered(one, place) for place, one in zip(places, texts, strict=True)]
        # special tokens are part of a chat as its template renders it
        rows = self._encoded(texts, self.length + 1, not chats)
        cut = [number for number, row in enumerate(rows) if len(row) > self.length]
        self._cut |= {place: len(row) > self.length for place, row in zip(places, rows, strict=True)}
        for number, row in zip(
            cut, self._encoded([texts[number] for number in cut], self.length, not chats), strict=True
        ):
            rows[number] = row
        return rows

    def _rendered(self, one: Any, place: int) -> str:
        """Return a text as it is, and a chat as the template of the tokenizer renders it."""
        where = f"number {place + 1:,} of {self.texts.name!r}"
        if isinstance(one, str):
            return one
        if not _is_chat(one):
            raise SourceError(f"{where} is no text, nor a list of messages with a role and a content; got {one!r:.80}.")
        if not getattr(self.tokenizer, "chat_template", None):
            raise SourceError(
                f"{where} is a chat, and the tokenizer {self.name!r} has no chat template; give texts, or the "
                "tokenizer of a model for chats."
            )
        try:
            return self.tokenizer.apply_chat_template(list(one), tokenize=False)
        except Exception as error:  # a template may raise anything
            raise SourceError(
                f"{where} can't be rendered by the chat template of {self.name!r}: {in_short(error)}"
            ) from error

    def _encoded(self, texts: list[str], length: int, special: bool) -> list[list[int]]:
        options = {"truncation": True, "max_length": length, "add_special_tokens": special, "verbose": False}
        return self.tokenizer(texts, padding=False, **options)["input_ids"] if texts else []

    def counts(self, stored: Tensor) -> dict[str, int]:
        """Return how many texts these are, how many of them were cut, and where."""
        unread = [place for place in stored.tolist() if place not in self._cut]
        for start in range(0, len(unread), AT_ONCE):
            self._ids(unread[start : start + AT_ONCE])
        cut = sum(self._cut[place] for place in stored.tolist())
        return {"texts": len(stored), "cut": cut, "length": self.length}


@dataclass(frozen=True, eq=False)
class Packed:
    """Gives rows that hold tokens of all texts, one text after the other, as they are.

    Args:
        rows: how many there are.
        window: how many tokens each has.
        left: how many tokens are left at the end, which are not in a row.
        split_by: what identifies the tokenizer.
    """

    rows: int
    window: int
    left: int
    split_by: str

    def __call__(self, stored: Tensor) -> Tensor:
        return stored

    def counts(self, stored: Tensor) -> dict[str, int]:
        """Return how many of the rows these are, of how many, and how many tokens are left."""
        return {"rows": len(stored), "packed": self.rows, "window": self.window, "left": self.left}


def joined_counts(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of two parts of texts together."""
    added = {what: first[what] + second[what] for what in ("texts", "cut", "rows") if what in first and what in second}
    return {**first, **second, **added}


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Return what was made of texts as part of a sentence.

    Example:
        >>> counts_in_words({"texts": 512, "cut": 31, "length": 512})
        '512 texts, 31 of them cut at 512 tokens, padded on the right'
    """
    if "texts" not in counts:
        some = f"{counts['rows']:,} of the " if counts["rows"] < counts["packed"] else ""
        packed = f"{some}{counts['packed']:,} rows of {counts['window']:,} tokens into which the texts were packed"
        return f"{packed}, {counts['left']:,} tokens left over"
    texts = f"{counts['texts']:,} text{'s' * (counts['texts'] != 1)}"
    cut = f"{counts['cut']:,} of them cut" if counts["cut"] else "none cut"
    return f"{texts}, {cut} at {counts['length']:,} tokens, padded on the right"


def require_known_ids(rows: Iterable[Sequence[int]], tokenizer: Any, name: str, limits: Mapping[str, Any]) -> None:
    """Refuse ids that the embedding of a model does not have."""
    highest = max((max(row) for row in rows if len(row)), default=-1)
    if highest >= limits.get("ids", sys.maxsize):
        raise SourceError(
            f"the tokenizer {name!r} gives the id {highest:,} ({tokenizer.convert_ids_to_tokens(highest)!r}), and the "
            f"embedding of {limits['ids of']} has {limits['ids']:,}; take the tokenizer of that model, or give its "
            "embedding more rows by `model.resize_token_embeddings`."
        )


def tokenizer_name(tokenizer: Any) -> str:
    """Return the folder of a tokenizer, or what else it is called."""
    return (
        tokenizer
        if isinstance(tokenizer, str)
        else str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    )


def _identity(tokenizer: Any) -> str:
    """Return a text that changes with the pieces into which a tokenizer splits texts, and with their numbers."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    # without what the last call has set
    settings = {} if inner is None else json.loads(inner.to_str()) | {"truncation": None, "padding": None}
    held = repr(settings or sorted(tokenizer.get_vocab().items()))
    return blake2b(held.encode(), digest_size=16).hexdigest()


def is_by_text(place: Any, options: Mapping[str, Any]) -> bool:
    """Return whether every text is an example, so that tokenizers that differ give examples that pair."""
    path = Path(place).expanduser() if isinstance(place, str) else None
    return options.get("each", "row" if _is_table(path) else "window") != "window"


def _loaded_tokenizer(tokenizer: Any) -> Any:
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer


def _windows(texts: Iterable[Any], window: int, tokenizer: Any, path: Path, limits: Any) -> LoadedExamples:
    """Return all texts in rows of `window` tokens, special ones included, with the token for the end between texts."""
    name, tokenizer, limits = tokenizer_name(tokenizer), _loaded_tokenizer(tokenizer), limits or {}
    special = tokenizer.num_special_tokens_to_add()
    most = min(tokenizer.model_max_length, limits.get("tokens", sys.maxsize))
    if not special < window <= most:
        raise SourceError(
            f"a window of {window} tokens does not fit the model in {name!r}, which adds {special} special ones and "
            f"takes at most {most}; choose another, as in `text,window={special + 16}:FILE`."
        )
    before, ids, after = list[int](), list[int](), list[int]()
    for place, one in enumerate(texts):
        if not isinstance(one, str):
            raise SourceError(
                f"number {place + 1:,} of {str(path)!r} is no text; windows are cut of texts, and each chat is an "
                "example: leave `each=window` out."
            )
        # cut here, as `return_overflowing_tokens` of tokenizers 0.23.1 and 0.23.2 loses all but the first piece
        encoded = tokenizer(one, return_special_tokens_mask=True, verbose=False)
        own, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
        if 0 not in is_special:  # an empty text
            continue
        begin = is_special.index(0)
        before, after = own[:begin], own[len(own) - (special - begin) :]
        end = [] if not ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids += end + own[begin : len(own) - (special - begin)]
    length = window - special
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise _too_short(path, f"{len(ids) + special:,} tokens", window, f"needs {window}")
    require_known_ids([ids], tokenizer, name, limits)
    stored = torch.tensor([before + ids[start : start + length] + after for start in starts])
    return stored, None, Packed(len(stored), window, len(ids) - length * len(starts), _identity(tokenizer))


def _characters(path: Path, window: int) -> LoadedExamples:
    """Return a text in pieces of `window` characters, and the same one character later."""
    characters = np.frombuffer(written(path).encode("utf-32-le"), dtype=np.uint32)  # one number for each
    numbers = np.unique(characters, return_inverse=True)[1].astype(np.int64).ravel()
    count = (len(numbers) - 1) // window
    if count < 1:
        raise _too_short(path, f"{len(numbers):,} characters", window, f"and the one after it need {window + 1}")
    pieces, following = (numbers[start : start + count * window].reshape(count, window) for start in (0, 1))
    return torch.from_numpy(pieces.copy()), torch.from_numpy(following.copy()), as_they_are


def _too_short(path: Path, held: str, window: int, needed: str) -> SourceError:
    return SourceError(
        f"{str(path)!r} holds {held}; a window of {window} {needed}. Choose a shorter one, as in `text,window=16:FILE`."
    )
