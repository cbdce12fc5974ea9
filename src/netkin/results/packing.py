"""Results as files and as JSON documents: one description of each, made of its fields.

A record is described by its fields, a mapping or a tuple by its items, and reasons by the pairs that have them. A file
holds the description as its header, with the arrays beside it. A document, which `--json` prints and pages carry, is
the same description with its arrays as lists, and with what is read off the result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from netkin import files
from netkin.errors import FileError
from netkin.results.records import plain

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

Header = dict[str, Any]
NamedArrays = dict[str, np.ndarray]
Record = TypeVar("Record")
ARRAYS = ("values", "errors", "replicates")  # of a table
_HINTS: dict[Any, dict[str, Any]] = {}  # the types of the fields of each kind of record


# --- a record as a description, and back ------------------------------------------------------------------------------


def packed(record: Any, key: str = "") -> tuple[Header, NamedArrays]:
    """Return a record as a header for JSON and its arrays, whose names begin with `key`."""
    arrays: NamedArrays = {}
    return {name: _packed(getattr(record, name), f"{key}{name}", arrays) for name in _hints(type(record))}, arrays


def unpacked(kind: type[Record], header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Record:
    """Return the record that `packed` took apart."""
    return as_record(kind, {name: value for name, value in header.items() if name not in ("kind", "format")}, arrays)


def _packed(value: Any, key: str, arrays: NamedArrays) -> Any:
    if isinstance(value, np.ndarray):
        arrays[key] = value
        return {"array": key}
    if is_dataclass(value):
        return {name: _packed(getattr(value, name), f"{key}/{name}", arrays) for name in _hints(type(value))}
    if isinstance(value, Mapping):
        if any(isinstance(pair, tuple) for pair in value):
            return by_reason(value)
        return {str(name): _packed(one, f"{key}/{name}", arrays) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_packed(one, f"{key}/{place}", arrays) for place, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):  # which JSON does not know
        return {"float": str(value)}
    return value


def by_reason(reasons: Mapping[tuple[str, str], str]) -> dict[str, list[list[str]]]:
    """Return the pairs of each reason; one reason is often that of a whole table."""
    found: dict[str, list[list[str]]] = {}
    for pair, reason in reasons.items():
        found.setdefault(reason, []).append(list(pair))
    return found


def as_record(kind: type[Record], values: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> Record:
    """Return a record from the descriptions of its fields: lists become tuples, and mappings records."""
    hints = _hints(kind)
    return kind(**{name: as_type(value, hints[name], arrays or {}) for name, value in values.items()})


def as_type(value: Any, hint: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a value of the type `hint` from its description; nothing is checked, as files have checksums."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not NoneType]
        hint, value = (kinds[0], value) if len(kinds) == 1 else (Any, value)
        return None if value is None else as_type(value, hint, arrays)
    if origin is tuple:
        each = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(as_type(one, own, arrays) for one, own in zip(value, each, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        if get_origin(inner[0]) is tuple:
            return {tuple(pair): reason for reason, pairs in value.items() for pair in pairs}
        return {as_type(name, inner[0], arrays): as_type(one, inner[1], arrays) for name, one in value.items()}
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return as_record(hint, value, arrays)
    if hint is np.ndarray and isinstance(value, Mapping):
        return arrays[value["array"]]
    return float(value["float"]) if isinstance(value, Mapping) and value.keys() == {"float"} else value


def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields."""
    if kind not in _HINTS:
        hints = get_type_hints(kind)
        _HINTS[kind] = {field.name: hints[field.name] for field in fields(kind)}
    return _HINTS[kind]


class Saved:
    """What is saved by its fields, in a file that names its kind."""

    kind: ClassVar[str]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the result, with all its labels, to one file, whole or not at all.

        A file that is there is written over only with `overwrite`.
        """
        files.write(path, self.kind, *packed(self), overwrite=overwrite)

    @classmethod
    def load(cls: type[Record], path: str | os.PathLike[str]) -> Record:
        """Return the result that was saved at `path`."""
        header, arrays = files.read(path, cls.kind)  # type: ignore[attr-defined]
        with files.damage_reported(path):
            return unpacked(cls, header, arrays)


# --- many comparisons as columns --------------------------------------------------------------------------------------

# Comparisons of one study differ in little but their numbers. As columns they take the room of their numbers and of a
# few whole numbers, and a text that many share is written once.


def packed_columns(comparisons: Sequence[Comparison]) -> tuple[Header, NamedArrays]:
    """Return many comparisons as columns: for each field its distinct values, and which of them each record has."""
    tables = [table for one in comparisons for table in one.tables.values()]
    arrays: NamedArrays = {"tables of each": np.array([len(one.tables) for one in comparisons], dtype=np.int64)}
    for name in ARRAYS:
        found = [getattr(table, name) for table in tables]
        arrays[name] = np.concatenate([np.zeros(0), *(one.ravel() for one in found if one is not None)])
        arrays[f"has {name}"] = np.array([one is not None for one in found], dtype=bool)
    return {"comparisons": _columns(comparisons, arrays), "tables": _columns(tables, arrays)}, arrays


def unpacked_columns(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Comparison]:
    """Return the comparisons that `packed_columns` took apart."""
    from netkin.results.comparison import Comparison

    tables, counts = _tables_of_columns(header["tables"], arrays), arrays["tables of each"].tolist()
    return [
        Comparison(**own, tables={table.id: table for table in (next(tables) for _ in range(count))})
        for own, count in zip(_records(header["comparisons"], Comparison, arrays), counts, strict=True)
    ]


def _tables_of_columns(columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Values]:
    from netkin.results.values import Values

    has = zip(*(arrays[f"has {name}"].tolist() for name in ARRAYS), strict=True)
    starts = dict.fromkeys(ARRAYS, 0)
    for own, present in zip(_records(columns, Values, arrays), has, strict=True):
        table = len(own["layers_a"]), len(own["layers_b"])
        shapes = {"values": table, "errors": table, "replicates": (len(own["chunk_sizes"]), *table)}
        numbers: dict[str, Any] = {}
        for name in (name for name, is_there in zip(ARRAYS, present, strict=True) if is_there):
            stop = starts[name] + math.prod(shapes[name])
            numbers[name] = arrays[name][starts[name] : stop].reshape(shapes[name])
            starts[name] = stop
        yield Values(**own, **numbers)


def _columns(records: Sequence[Any], arrays: NamedArrays) -> Header:
    """Return the distinct values of each field, for JSON; which of them each record has is put into `arrays`."""
    columns: Header = {}
    for name, hint in _hints(type(records[0])).items() if records else ():
        if name in ARRAYS or name == "tables":
            continue
        values, key = [getattr(record, name) for record in records], f"{type(records[0]).__name__} {name}"
        if get_origin(hint) is Mapping:  # of which many share some entries, as the weights of a model
            # by the type too, as the numbers 1 and 1.0 are equal
            items, each = _distinct((item, one, type(one)) for mapping in values for item, one in mapping.items())
            columns[name] = [[_packed(item, "", {}), _packed(one, "", {})] for item, one, _ in items]
            rest = iter(each)
            kept, places = _distinct(tuple([next(rest) for _ in mapping]) for mapping in values)
            arrays[f"{key}: sizes"] = np.array([len(one) for one in kept], dtype=np.int32)
            arrays[f"{key}: entries"] = np.array([place for one in kept for place in one], dtype=np.int32)
        elif is_dataclass(hint):  # as text, where 1 and 1.0 differ; of few objects that many records share
            texts = {
                number: json.dumps(_packed(one, "", {})) for number, one in {id(one): one for one in values}.items()
            }
            kept, places = _distinct(texts[id(one)] for one in values)
            columns[name] = [json.loads(text) for text in kept]
        else:
            kept, places = _distinct(values)
            columns[name] = [_packed(one, "", {}) for one in kept]
        arrays[key] = np.array(places, dtype=np.int32)
    return columns


def _distinct(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct values in the order in which they come, and the place of each there."""
    known: dict[Any, int] = {}
    places = [known.setdefault(value, len(known)) for value in values]
    return list(known), places


def _records(columns: Mapping[str, Any], kind: type[Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Header]:
    """Yield the fields of each record; those that are equal are one object."""
    found, hints = [], _hints(kind)
    for name, written in columns.items():
        hint, key = hints[name], f"{kind.__name__} {name}"
        if get_origin(hint) is Mapping:
            of_item, of_value = get_args(hint)
            items = [(as_type(item, of_item, {}), as_type(one, of_value, {})) for item, one in written]
            rest = iter(arrays[f"{key}: entries"].tolist())
            values = [dict([items[next(rest)] for _ in range(size)]) for size in arrays[f"{key}: sizes"].tolist()]
        else:
            values = [as_type(one, hint, {}) for one in written]
        found.append([values[place] for place in arrays[key].tolist()])
    for row in zip(*found, strict=True):
        yield dict(zip(columns, row, strict=True))


# --- documents --------------------------------------------------------------------------------------------------------


def document(result: Any) -> Header:
    """Return everything a result holds, and what is read off it, as lists, mappings, texts and numbers.

    It is what `--json` prints. Numbers that are not finite are null, and the weights of a federation are left out.
    """
    return {"kind": result.kind, "format": files.FORMAT, **_described(result)}


def _described(record: Any) -> Header:
    """Return the fields of a record but those that are `left_out`, and what its method `derived` reads off it."""
    names = [] if isinstance(record, Mapping) else [*_hints(type(record))]
    kept = [name for name in names if name not in getattr(record, "left_out", ())]
    derived = record.derived() if hasattr(record, "derived") else {}
    return {name: _in_document(getattr(record, name)) for name in kept} | _in_document(derived)


def _in_document(value: Any) -> Any:
    if is_dataclass(value):
        return _described(value)
    if isinstance(value, Mapping):
        if any(isinstance(pair, tuple) for pair in value):
            return by_reason(value)
        return {str(name): _in_document(one) for name, one in value.items()}
    return [_in_document(one) for one in value] if isinstance(value, (tuple, list)) else plain(value)


# --- any file ---------------------------------------------------------------------------------------------------------

RESULTS: dict[str, tuple[str, str]] = {
    "comparison": ("netkin.results.comparison", "Comparison"),
    "comparisons": ("netkin.results.comparisons", "Comparisons"),
    "federation": ("netkin.results.federation", "Federation"),
    "ranking": ("netkin.results.ranking", "Ranking"),
    "series": ("netkin.results.series", "Series"),
    "sparsity": ("netkin.results.weight_sparsity", "SparsityStudy"),
    "task accuracies": ("netkin.results.task_accuracies", "TaskAccuracies"),
    "task ensembles": ("netkin.results.task_accuracies", "TaskEnsembles"),
}
# who reads the other kinds, from a path and, for some, that many models; modules are imported for these tables' sake
# alone, never because a file names one
READERS: dict[str, tuple[str, str, int]] = {
    "statistics": ("netkin.comparing.comparer", "load_comparer", 0),
    "stitch": ("netkin.applications.stitching.network", "load_stitch", 2),
    "compressed": ("netkin.applications.compression.factoring", "load_compressed", 1),
    "recording": ("netkin.applications.dynamics.recorder", "load_recording", 0),
    "kernel ridge": ("netkin.applications.transfer.ridge", "load_kernel_ridge", 1),
}
COLLECTORS = (
    "LayerEmbeddings", "LayerFilters", "LayerGrams", "LayerKernels", "LayerMoments", "LayerRows", "LayerSketches",
    "LayerSpectra", "LinearRows", "Outputs",
)  # fmt: skip


def load(path: str | os.PathLike[str], *models: Any) -> Any:
    """Return the result that was saved at `path`, of any kind.

    A `Comparison`, `Comparisons`, `Ranking`, `Series`, `Federation`, `SparsityStudy`, `TaskAccuracies`, `TaskEnsembles`
    or `Claim`; statistics to compare from, and single collectors; a recording to make series of; a stitch, with the
    two `models` that it joins; a compressed model, with the original one; and fits of `nk.kernel_ridge`, with their
    model. Without models a stitch and a compressed model give their records. Torch is imported only for what needs it.
    """
    if files.read_start(path, 1) in (b"{", b"["):
        return import_module("netkin.results.claim").Claim.load(path)
    kind = files.read_header(path)["kind"]
    if kind in READERS:
        module, name, count = READERS[kind]
        if models and len(models) != count:
            raise FileError(f"{str(path)!r} holds a {kind!r}, which takes {count or 'no'} models; got {len(models)}.")
        return getattr(import_module(module), name)(path, *models)
    if models:
        raise FileError(f"{str(path)!r} holds {kind!r}, which takes no models; got {len(models)}.")
    if kind in COLLECTORS:
        return getattr(import_module("netkin.statistics"), kind).load(path)
    if kind in RESULTS:
        module, name = RESULTS[kind]
        return getattr(import_module(module), name).load(path)
    if kind == "training":
        raise FileError(
            f"{str(path)!r} holds where a training stands, which is no result; the same `nk.train(..., save=...)` "
            "goes on from it, and when it is done gives its history and weights at once."
        )
    known = ", ".join(map(repr, [*RESULTS, *READERS, "claim"]))
    raise FileError(f"{str(path)!r} holds {kind!r}, which is no result; those are {known}.")
