"""Results as files and as JSON documents, and back: one description of each, which pages show too."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from netkin import files
from netkin.errors import FileError, NoValue
from netkin.results.quantity import Quantity
from netkin.results.records import (
    HeaderFacts,
    NamedArrays,
    checked,
    columns_of,
    plain,
    plain_fields,
    records_of,
    typed,
)

if TYPE_CHECKING:
    from netkin.results.comparison import Comparison
    from netkin.results.comparisons import Comparisons
    from netkin.results.compression import Compression
    from netkin.results.federation import Federation
    from netkin.results.ranking import Ranking
    from netkin.results.series import Series
    from netkin.results.task_accuracies import TaskAccuracies, TaskEnsembles
    from netkin.results.values import Values
    from netkin.results.weight_sparsity import SparsityStudy

ARRAYS = ("values", "errors", "replicates")  # of a table
OPTIONAL = ARRAYS[1:]  # that it may be without
_APART = (*ARRAYS, "missing", "error_reasons", "tables", "comparisons", "between")  # written in ways of their own
_DERIVED = ("best_matches", "low", "high")  # of a table in a document
_DERIVED_OF_SERIES = ("layers", "caveats", "complete", "measures")
_DERIVED_OF_RANKING = ("conclusion", "ranks")


def facts(record: Comparison | Ranking | Series | Values) -> HeaderFacts:
    """Return the facts of a result as text and numbers for JSON, without its arrays and its parts."""
    found = {
        name: value
        for name, value in plain_fields(record).items()
        if name not in _APART or (name == "missing" and isinstance(value, tuple))
    }
    return {name: value.to_header() if isinstance(value, Quantity) else plain(value) for name, value in found.items()}


# --- files ------------------------------------------------------------------------------------------------------------


def packed(result: Comparison | Ranking, key: str = "") -> tuple[HeaderFacts, NamedArrays]:
    """Return a comparison or ranking as a header for JSON and its arrays, whose names begin with `key`."""
    arrays: NamedArrays = {}
    for position, table in enumerate(result.tables.values()):
        found = {name: getattr(table, name) for name in ARRAYS}
        arrays |= {f"{key}{position}/{name}": array for name, array in found.items() if array is not None}
    return facts(result) | {"tables": [_table_header(table) for table in result.tables.values()]}, arrays


def packed_many(comparisons: Iterable[Comparison]) -> tuple[list[HeaderFacts], NamedArrays]:
    """Return several comparisons as headers and arrays."""
    headers, arrays = [], NamedArrays()
    for position, comparison in enumerate(comparisons):
        header, own = packed(comparison, f"{position}/")
        headers.append(header)
        arrays |= own
    return headers, arrays


def unpacked(header: Mapping[str, Any], arrays: NamedArrays, key: str = "") -> Comparison:
    """Return the comparison that `packed` took apart into a header and arrays."""
    from netkin.results.comparison import Comparison

    return checked(Comparison, _without(header, "tables") | {"tables": _tables(header, arrays, key)})


def ranking_unpacked(header: Mapping[str, Any], arrays: NamedArrays) -> Ranking:
    """Return the ranking that `packed` took apart into a header and arrays."""
    from netkin.results.ranking import Ranking

    return checked(Ranking, _without(header, "tables") | {"tables": _tables(header, arrays, "")})


def _tables(header: Mapping[str, Any], arrays: NamedArrays, key: str) -> dict[str, Values]:
    tables = [_table(own, arrays, f"{key}{i}") for i, own in enumerate(_listed(header, "tables"))]
    return {table.id: table for table in tables}


def all_unpacked(header: Mapping[str, Any], arrays: NamedArrays) -> Comparisons:
    """Return the comparisons that `save` took apart into a header and arrays."""
    from netkin.results.comparisons import Comparisons

    # documents, and files of older versions, have a header for each
    found = unpacked_columns(header["columns"], arrays) if "columns" in header else _parts(header, arrays)
    return Comparisons(found, typed(header.get("failed", {}), dict[str, str], "failed"))


def series_unpacked(header: Mapping[str, Any], arrays: NamedArrays) -> Series:
    """Return the series that `save` took apart into a header and arrays."""
    from netkin.results.series import Series

    own: HeaderFacts = {"comparisons": tuple(_parts(header, arrays))}
    if header.get("between") is not None:
        own["between"] = unpacked(header["between"], arrays, "between/")
    return checked(Series, _without(header, *own) | own)


def _parts(header: Mapping[str, Any], arrays: NamedArrays) -> list[Comparison]:
    return [unpacked(own, arrays, f"{position}/") for position, own in enumerate(_listed(header, "comparisons"))]


def _listed(header: Any, name: str) -> list[Any]:
    if not isinstance(header, Mapping) or not isinstance(header[name], list):
        raise TypeError(f"`{name}` must be a list")
    return header[name]


def _without(header: Mapping[str, Any], *names: str) -> HeaderFacts:
    return {name: value for name, value in header.items() if name not in ("kind", "format", *names)}


def _table_header(table: Values) -> HeaderFacts:
    missing = [[*pair, reason] for pair, reason in table.missing.items()]
    reasons: dict[str, list[list[str]]] = {}  # which are often one for a whole table
    for pair, reason in table.error_reasons.items():
        reasons.setdefault(reason, []).append(list(pair))
    return facts(table) | {"missing": missing, "error_reasons": reasons}


def _table(header: Mapping[str, Any], arrays: NamedArrays, key: str) -> Values:
    """Return a table from its header and arrays."""
    from netkin.results.values import Values

    missing = {(layer_a, layer_b): reason for layer_a, layer_b, reason in header["missing"]}
    reasons = {(a, b): reason for reason, pairs in header.get("error_reasons", {}).items() for a, b in pairs}
    own = {"missing": missing, "error_reasons": reasons, "values": arrays[f"{key}/values"]}
    own |= {name: arrays.get(f"{key}/{name}") for name in OPTIONAL}
    return checked(Values, {**header, **own, "quantity": Quantity.from_header(header["quantity"])})


def packed_columns(comparisons: Sequence[Comparison]) -> tuple[HeaderFacts, NamedArrays]:
    """Return many comparisons as columns, a header for JSON and arrays: see `columns_of`."""
    from netkin.results.comparison import Comparison
    from netkin.results.values import Values

    tables = [table for one in comparisons for table in one.tables.values()]
    arrays: NamedArrays = {"tables of each": np.array([len(one.tables) for one in comparisons], dtype=np.int64)}
    for name in ARRAYS:
        found = [getattr(table, name) for table in tables]
        arrays[name] = np.concatenate([np.zeros(0), *(one.ravel() for one in found if one is not None)])
        arrays[f"has {name}"] = np.array([one is not None for one in found], dtype=bool)
    return {
        "comparisons": columns_of(comparisons, Comparison, arrays),
        "tables": columns_of(tables, Values, arrays),
    }, arrays


def unpacked_columns(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Comparison]:
    """Return the comparisons that `packed_columns` took apart."""
    from netkin.results.comparison import Comparison

    tables, counts = _tables_of_columns(header["tables"], arrays), arrays["tables of each"].tolist()
    return [
        Comparison(**own, tables={table.id: table for table in (next(tables) for _ in range(count))})
        for own, count in zip(records_of(header["comparisons"], Comparison, arrays), counts, strict=True)
    ]


def _tables_of_columns(columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[Values]:
    from netkin.results.values import Values

    has = zip(*(arrays[f"has {name}"].tolist() for name in ARRAYS), strict=True)
    starts = dict.fromkeys(ARRAYS, 0)
    for own, present in zip(records_of(columns, Values, arrays), has, strict=True):
        table = len(own["layers_a"]), len(own["layers_b"])
        shapes = {"values": table, "errors": table, "replicates": (len(own["chunk_sizes"]), *table)}
        numbers: dict[str, Any] = {}
        for name in (name for name, is_there in zip(ARRAYS, present, strict=True) if is_there):
            stop = starts[name] + math.prod(shapes[name])
            numbers[name] = arrays[name][starts[name] : stop].reshape(shapes[name])
            starts[name] = stop
        yield Values(**own, **numbers)


# --- documents --------------------------------------------------------------------------------------------------------


def document(
    result: Comparison
    | Comparisons
    | Series
    | Ranking
    | Federation
    | Compression
    | SparsityStudy
    | TaskAccuracies
    | TaskEnsembles,
) -> HeaderFacts:
    """Return everything a result holds, and what is read off it, as lists, mappings, texts and numbers.

    It is what `--json` prints; written to a file, `nk.load` makes the same result of it. The weights of a federation
    are left out.
    """
    from netkin.results.comparison import Comparison
    from netkin.results.comparisons import Comparisons
    from netkin.results.ranking import COLUMNS, Ranking
    from netkin.results.series import Series

    if not isinstance(result, (Comparison, Comparisons, Series, Ranking)):
        return {"format": files.FORMAT, **result.to_document()}
    if isinstance(result, (Comparison, Ranking)):
        own = facts(result) | {"tables": {name: _table_document(table) for name, table in result.tables.items()}}
        if isinstance(result, Comparison):
            return {"kind": "comparison", "format": files.FORMAT, **own}
        ranks = [dict(zip(COLUMNS, plain(row), strict=True)) for row in result.rows()]
        return {"kind": "ranking", "format": files.FORMAT, "conclusion": result.conclusion, "ranks": ranks, **own}
    if not isinstance(result, Series):
        found = [document(one) for one in result.values()]
        return {"kind": "comparisons", "format": files.FORMAT, "comparisons": found, "failed": dict(result.failed)}
    derived = {name: plain(getattr(result, name)) for name in ("layers", "caveats", "complete")}
    measures = {measure: _way_document(result, measure) for measure in result.measures}
    found = [document(one) for one in result.comparisons]
    own = facts(result) | derived | {"measures": measures, "comparisons": found}
    own |= {} if result.between is None else {"between": document(result.between)}
    return {"kind": "series", "format": files.FORMAT, **own}


def from_document(content: Mapping[str, Any]) -> Any:
    """Return the result that `document` described."""
    kind = content["kind"]
    if kind in DOCUMENTS:
        module, name = DOCUMENTS[kind]
        return getattr(import_module(module), name)(content)
    if kind in ("comparison", "ranking"):
        return RESULTS[kind](*_taken_apart(_without(content, *_DERIVED_OF_RANKING), ""))
    taken = [_taken_apart(one, f"{k}/") for k, one in enumerate(_listed(content, "comparisons"))]
    arrays = {name: array for _, own in taken for name, array in own.items()}
    header = _without(content, *_DERIVED_OF_SERIES) | {"comparisons": [one for one, _ in taken]}
    if content.get("between") is not None:
        header["between"], own = _taken_apart(content["between"], "between/")
        arrays |= own
    return (series_unpacked if kind == "series" else all_unpacked)(header, arrays)


def _taken_apart(content: Mapping[str, Any], key: str) -> tuple[HeaderFacts, NamedArrays]:
    """Return the header and the arrays that a comparison of that document has in a file."""
    tables: list[HeaderFacts] = []
    arrays: NamedArrays = {}
    for position, own in enumerate(content["tables"].values()):
        lists = {"values": own["values"], "errors": own["standard_errors"], "replicates": own["replicates"]}
        for name, array in lists.items():
            if array is not None:
                arrays[f"{key}{position}/{name}"] = np.array(array, dtype=np.float64)  # null becomes NaN
        rest = {name: value for name, value in own.items() if name not in (*_DERIVED, *lists, "standard_errors")}
        missing = [[one["layer_a"], one["layer_b"], one["reason"]] for one in own["missing"]]
        reasons: dict[str, list[list[str]]] = {}
        for one in own["error_reasons"]:
            reasons.setdefault(one["reason"], []).append([one["layer_a"], one["layer_b"]])
        tables.append(rest | {"missing": missing, "error_reasons": reasons})
    return {**content, "tables": tables}, arrays


def _table_document(table: Values) -> HeaderFacts:
    ends = zip(("low", "high"), table.interval(), strict=True)
    arrays = {"values": table.values, "standard_errors": table.errors, "replicates": table.replicates}
    arrays |= {name: end if table.chunk_sizes else None for name, end in ends}
    matches = [
        {"layer_a": row, "layer_b": match.layer, **{name: own for name, own in vars(match).items() if name != "layer"}}
        for row, match in table.best_matches().items()
    ]
    reasons = {"missing": _reasons(table.missing), "error_reasons": _reasons(table.error_reasons)}
    return facts(table) | plain(arrays | reasons | {"best_matches": matches})


def _reasons(reasons: Mapping[tuple[str, str], str]) -> list[dict[str, str]]:
    return [{"layer_a": a, "layer_b": b, "reason": reason} for (a, b), reason in reasons.items()]


def _way_document(series: Series, measure: str) -> HeaderFacts:
    marks = series.marks(measure)
    reached = {str(mark): series.reached(mark, measure) for mark in marks}
    trends = {str(mark): _trend_document(series, mark, measure) for mark in marks}
    return {"own": plain(series.own(measure)), "reached": reached, "bottom_up": trends}


def _trend_document(series: Series, threshold: float, measure: str) -> HeaderFacts:
    try:
        return asdict(series.bottom_up(threshold, measure))
    except NoValue as reason:
        return {"tau": None, "reason": str(reason)}


# --- any file ---------------------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[Mapping[str, Any], NamedArrays], Any]] = {
    "comparison": unpacked,
    "comparisons": all_unpacked,
    "ranking": ranking_unpacked,
    "series": series_unpacked,
}
# who reads the other kinds, from a path and, for some, that many models; modules are imported for this table's sake
# alone, never because a file names one
READERS: dict[str, tuple[str, str, int]] = {
    "statistics": ("netkin.comparing.pass_statistics", "load_statistics", 0),
    "stitch": ("netkin.applications.stitching.network", "load_stitch", 2),
    "federation": ("netkin.results.federation", "load_federation", 0),
    "compressed": ("netkin.applications.compression.factoring", "load_compressed", 1),
    "recording": ("netkin.applications.dynamics.recorder", "load_recording", 0),
    "kernel ridge": ("netkin.applications.transfer.ridge", "load_kernel_ridge", 1),
    "sparsity": ("netkin.results.weight_sparsity", "load_sparsity", 0),
    "task accuracies": ("netkin.results.task_accuracies", "load_tasks", 0),
    "task ensembles": ("netkin.results.task_accuracies", "load_tasks", 0),
}
# who makes results of the documents of other kinds
DOCUMENTS: dict[str, tuple[str, str]] = {
    "compressed": ("netkin.results.compression", "compression_from"),
    "federation": ("netkin.results.federation", "federation_from"),
    "sparsity": ("netkin.results.weight_sparsity", "sparsity_from"),
    "task accuracies": ("netkin.results.task_accuracies", "tasks_from"),
    "task ensembles": ("netkin.results.task_accuracies", "tasks_from"),
}
COLLECTORS = (
    "CrossMoments", "LayerEmbeddings", "LayerFilters", "LayerGrams", "LayerKernels", "LayerMoments", "LayerRows",
    "LayerSketches", "LayerSpectra", "LinearRows", "Outputs",
)  # fmt: skip


def load(path: str | os.PathLike[str], *models: Any) -> Any:
    """Return the result that was saved at `path`, of any kind.

    A `Comparison`, `Comparisons`, `Ranking`, `Series`, `Federation`, `SparsityStudy`, `TaskAccuracies`, `TaskEnsembles`
    or `Claim`, also as a JSON document, or several in a list; statistics to compare from, and single collectors; a
    recording to make series of; a stitch, with the two `models` that it joins; a compressed model, with the original
    one; and fits of `nk.kernel_ridge`, with their model.
    Without models a stitch and a compressed model give their records. Torch is imported only for what needs it.
    """
    start = files.read_start(path, 1)
    if start == b"[":
        listed = files.read_list(path)
        if not listed:
            raise FileError(f"{str(path)!r} holds an empty list; a list must hold one result or more.")
        return [_from_json(path, one, models) for one in listed]
    if start == b"{":
        return _from_json(path, files.read_document(path), models)
    kind = files.read_header(path)["kind"]
    if kind in READERS:
        module, name, count = READERS[kind]
        if models and len(models) != count:
            raise FileError(f"{str(path)!r} holds a {kind!r}, which takes {count or 'no'} models; got {len(models)}.")
        return getattr(import_module(module), name)(path, *models)
    if models:
        raise FileError(f"{str(path)!r} holds {kind!r}, which takes no models; got {len(models)}.")
    if kind in COLLECTORS:
        return getattr(import_module("netkin.statistics"), kind).from_file(path)
    header, arrays = files.read(path)
    if kind not in RESULTS:
        if kind == "training":
            raise FileError(
                f"{str(path)!r} holds where a training stands, which is no result; the same `nk.train(..., save=...)` "
                "goes on from it, and when it is done gives its history and weights at once."
            )
        known = ", ".join(map(repr, [*RESULTS, *READERS, "claim"]))
        raise FileError(f"{str(path)!r} holds {kind!r}, which is no result; those are {known}.")
    with files.damage_reported(path):
        return RESULTS[kind](header, arrays)


def _from_json(path: str | os.PathLike[str], content: Mapping[str, Any], models: tuple[Any, ...]) -> Any:
    kind = content.get("kind")
    if models or kind not in (*RESULTS, *DOCUMENTS, "claim"):
        other = "; those that can be opened are claims and documents of --json."
        told = ", which takes no models." if models else other
        raise FileError(f"{str(path)!r} is a JSON file of kind {kind!r}{told}")
    if kind == "claim":
        return import_module("netkin.results.claim").Claim.from_content(path, content)
    if content.get("format") != files.FORMAT:
        raise FileError(f"{str(path)!r} has format {content.get('format')!r}; this netkin reads {files.FORMAT}.")
    with files.damage_reported(path):
        return from_document(content)
