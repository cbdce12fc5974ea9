"""Results as files, as JSON documents and as CSV; many comparisons as columns; and who opens which kind of file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from netkin import files
from netkin.errors import FileError
from netkin.results.records import (
    FrozenRecord,
    Header,
    NamedArrays,
    as_type,
    describe_value,
    field_types,
    packed,
    plain,
    unpacked,
)

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

ResultType = TypeVar("ResultType", bound="Result")
ARRAYS = ("values", "errors", "replicates")  # of a table
FACTS = "facts"  # of many comparisons, compressed
LongForm = tuple[Sequence[str], Iterable[Sequence[Any]]]  # the names of the columns, and the rows


class Result(FrozenRecord):
    """A record that is saved by its fields, in a file that names its kind."""

    kind: ClassVar[str]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the result, with all its labels, to one file, whole or not at all.

        A file that is there is written over only with `overwrite`.
        """
        files.write(path, self.kind, *packed(self), overwrite=overwrite)

    @classmethod
    def load(cls: type[ResultType], path: str | os.PathLike[str]) -> ResultType:
        """Return the result that was saved at `path`."""
        header, arrays = files.read(path, cls.kind)
        with files.damage_reported(path):
            return unpacked(cls, header, arrays)

    def long_form(self) -> LongForm:
        """Return the numbers as one table, as the names of its columns and its rows."""
        raise NotImplementedError(f"{type(self).__name__} has no table of its numbers.")

    def to_csv(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the numbers as one table in UTF-8, with a row for each of them, that pandas, R and others read.

        A number that is missing is an empty field. A file that is there is written over only with `overwrite`.
        """
        write_csv([self], path, overwrite=overwrite)

    def plot(
        self,
        measures: str | Sequence[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        ax: Any = None,
        *,
        steps: Sequence[int] | None = None,
        profile: bool | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Return the result as a matplotlib figure, drawn into `ax` or written to `path` where one is given.

        Args:
            measures: One measure or score to draw, or several; by default all.
            path: A file that ends in .png, .svg or .pdf.
            ax: Axes of yours to draw into: one heatmap, or the lines of a series or a federation alone.
            steps: Steps of a series whose heatmaps are drawn above its lines; by default a few spread over the run.
            profile: Whether the profile of corresponding layers is drawn below the heatmaps of a comparison; by default
                where there are standard errors.
            overwrite: Write also over a file that is there.
        """
        draw = import_module("netkin.reporting").plot
        return draw(self, measures, path, ax, steps=steps, profile=profile, overwrite=overwrite)

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        return import_module("netkin.reporting").notebook_view(self)


def document(result: Any) -> Header:
    """Return everything a result holds, and what is read off it, as lists, mappings, texts and numbers.

    It is what `--json` prints. Numbers that are not finite are null, and the weights of a federation are left out.
    """
    return {"kind": result.kind, "format": files.FORMAT, **plain(result)}


def write_csv(results: Sequence[Any], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the tables of results of one kind, one below the other, to a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for place, result in enumerate(results):
        columns, rows = result.long_form()
        if place == 0:
            writer.writerow(columns)
        writer.writerows(map(_fields, rows))
    files.write_text(path, text.getvalue(), overwrite=overwrite)


def _fields(row: Sequence[Any]) -> list[Any]:
    """Return a row of a CSV file: numbers in full, what is missing empty."""
    values = [value.item() if isinstance(value, np.generic) else value for value in row]
    return ["" if value is None or value != value else value for value in values]


# --- many comparisons as columns --------------------------------------------------------------------------------------

# Comparisons of one study differ in little but their numbers. As columns they take the room of their numbers and of a
# few whole numbers, and what many share is written once. The texts are compressed into an array, as a header is limited
# to 100 MB.


def packed_columns(comparisons: Sequence[Comparison]) -> tuple[Header, NamedArrays]:
    """Return many comparisons as columns: for each field its distinct values, and which of them each record has."""
    tables = [table for comparison in comparisons for table in comparison.tables.values()]
    table_counts = [len(comparison.tables) for comparison in comparisons]
    arrays: NamedArrays = {"tables of each": np.array(table_counts, dtype=np.int64)}
    for name in ARRAYS:
        numbers = [getattr(table, name) for table in tables]
        arrays[name] = np.concatenate([np.zeros(0), *(array.ravel() for array in numbers if array is not None)])
        arrays[f"has {name}"] = np.array([array is not None for array in numbers], dtype=bool)
    columns = {"comparisons": _columns(comparisons, arrays), "tables": _columns(tables, arrays)}
    arrays[FACTS] = np.frombuffer(zlib.compress(json.dumps(columns).encode()), dtype=np.uint8)
    return {}, arrays


def unpacked_columns(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Comparison]:
    """Return the comparisons that `packed_columns` took apart."""
    from netkin.results.comparison import Comparison

    columns = json.loads(zlib.decompress(arrays[FACTS].tobytes()))
    tables, counts = _tables_of_columns(columns["tables"], arrays), arrays["tables of each"].tolist()
    return [
        Comparison(**facts, tables={table.id: table for table in (next(tables) for _ in range(count))})
        for facts, count in zip(_records(columns["comparisons"], Comparison, arrays), counts, strict=True)
    ]


def _tables_of_columns(columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Values]:
    from netkin.results.values import Values

    has = zip(*(arrays[f"has {name}"].tolist() for name in ARRAYS), strict=True)
    starts = dict.fromkeys(ARRAYS, 0)
    for facts, present in zip(_records(columns, Values, arrays), has, strict=True):
        table = len(facts["layers_a"]), len(facts["layers_b"])
        shapes = {"values": table, "errors": table, "replicates": (len(facts["chunk_sizes"]), *table)}
        numbers: dict[str, Any] = {}
        for name in (name for name, is_there in zip(ARRAYS, present, strict=True) if is_there):
            stop = starts[name] + math.prod(shapes[name])
            numbers[name] = arrays[name][starts[name] : stop].reshape(shapes[name])
            starts[name] = stop
        yield Values(**facts, **numbers)


def _columns(records: Sequence[Any], arrays: NamedArrays) -> Header:
    """Return the distinct values of each field, for JSON; which of them each record has is put into `arrays`."""
    columns: Header = {}
    for name in field_types(type(records[0])) if records else ():
        if name in ARRAYS or name == "tables":
            continue
        values = [getattr(record, name) for record in records]
        # told apart as texts, where 1 and 1.0 differ; many records share few objects, which are described once
        texts = {
            id(value): json.dumps(describe_value(value, {}))
            for value in {id(value): value for value in values}.values()
        }
        places: dict[str, int] = {}
        column = [places.setdefault(texts[id(value)], len(places)) for value in values]
        arrays[f"{type(records[0]).__name__} {name}"] = np.array(column, dtype=np.int32)
        columns[name] = [json.loads(text) for text in places]
    return columns


def _records(columns: Mapping[str, Any], kind: type[Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Header]:
    """Yield the fields of each record; those that are equal are one object."""
    fields = []
    for name, descriptions in columns.items():
        values = [as_type(description, field_types(kind)[name], {}) for description in descriptions]
        fields.append([values[place] for place in arrays[f"{kind.__name__} {name}"].tolist()])
    for row in zip(*fields, strict=True):
        yield dict(zip(columns, row, strict=True))


# --- any file ---------------------------------------------------------------------------------------------------------

RESULTS: dict[str, tuple[str, str]] = {
    "comparison": ("netkin.results.comparison", "Comparison"),
    "comparisons": ("netkin.results.comparisons", "Comparisons"),
    "diff": ("netkin.results.diff", "Diff"),
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


def load(path: str | os.PathLike[str], *models: Any) -> Any:
    """Return the result that was saved at `path`, of any kind.

    A `Comparison`, `Comparisons`, `Diff`, `Ranking`, `Series`, `Federation`, `SparsityStudy`, `TaskAccuracies` or
    `TaskEnsembles`; statistics to compare from; a recording to make series of; a stitch, with the two `models` that it
    joins; a compressed model, with the original one; and fits of `nk.kernel_ridge`, with their model. Without models a
    stitch and a compressed model give their records. Torch is imported only for what needs it.
    """
    kind = files.read_header(path)["kind"]
    if kind in READERS:
        module, name, count = READERS[kind]
        if models and len(models) != count:
            raise FileError(f"{str(path)!r} holds a {kind!r}, which takes {count or 'no'} models; got {len(models)}.")
        return getattr(import_module(module), name)(path, *models)
    if models:
        raise FileError(f"{str(path)!r} holds {kind!r}, which takes no models; got {len(models)}.")
    if kind in RESULTS:
        module, name = RESULTS[kind]
        return getattr(import_module(module), name).load(path)
    known = ", ".join(map(repr, [*RESULTS, *READERS]))
    raise FileError(f"{str(path)!r} holds {kind!r}, which is no result; those are {known}.")
