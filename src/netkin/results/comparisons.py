"""All pairs of several models: their comparisons, one number for each pair, and the spread over pairs by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from netkin import files
from netkin.errors import NameClash, NoValue, UnknownName, did_you_mean
from netkin.results.caveats import Caveat, grouped
from netkin.results.comparison import NUMBERS, Comparison, clusters_of, distances_of, plane_of, tree_of
from netkin.results.labels import HOLE, NOT_ASKED, column_label, is_worth, pair_label, plural, same_depth
from netkin.results.packing import Result, packed_columns, unpacked_columns
from netkin.results.records import freeze, frozen_mapping, optional
from netkin.results.text import grid, summary_as_text, terminal_width, wrapped
from netkin.results.values import Pair, Values

NAMED = 6  # pairs of layers with fewer values that are named
FIRST = 32  # pairs of models that the header of a file names
SAME_MODEL = "no model was compared with itself"
# which layers of two models are behind their one number
MATCHES = {
    "depth": "pairs of layers at the same relative depth",
    "best": "best matches of the row's layers, which grow with the number of layers of the column's model",
}


@dataclass(frozen=True)
class Cells:
    """One measure over several comparisons: mean, standard deviation and number of values of every pair of layers."""

    facts: Values
    means: np.ndarray
    deviations: np.ndarray
    counts: np.ndarray

    @property
    def column(self) -> str:
        """What distinguishes this table from others of its name: how layers were stitched, or the whole id."""
        return column_label(self.facts)

    @property
    def block(self) -> str:
        """The name that this table shares with those shown side by side."""
        return self.facts.quantity.name if is_worth(self.facts) else "similarity"

    def written(self, i: int, j: int) -> str:
        """Return a mean with its deviation, as far as there are such."""
        mean, deviation = self.means[i, j], self.deviations[i, j]
        if math.isnan(mean):
            return HOLE
        return f"{mean:.2f}" if math.isnan(deviation) else f"{mean:.2f} ± {deviation:.2f}"


@dataclass(frozen=True)
class Spread:
    """Means and standard deviations over comparisons, for the layers that all of them have: ``spread["cka"].means``."""

    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    tables: dict[str, Cells]
    comparisons: int

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Spread:
        """Return the spread over comparisons; refused where they share no layers."""
        rows, columns = (_shared([getattr(each, side) for each in comparisons]) for side in ("layers_a", "layers_b"))
        if not (rows and columns):
            raise NoValue("the comparisons share no names of layers, so there is nothing to take a mean over.")
        tables: dict[str, list[Values]] = {}
        for comparison in comparisons:
            for name, table in comparison.tables.items():
                tables.setdefault(name, []).append(table)
        cells = {name: _cells(of_measure, rows, columns) for name, of_measure in tables.items()}
        return cls(rows, columns, cells, len(comparisons))

    def __getitem__(self, measure: str) -> Cells:
        if measure not in self.tables:
            raise NoValue(f"no measure {measure!r} here; there are {', '.join(self.tables) or 'none'}.")
        return self.tables[measure]

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_width()))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The places that have a value by any measure."""
        known = np.zeros((len(self.layers_a), len(self.layers_b)), dtype=bool)
        for cells in self.tables.values():
            known |= cells.counts > 0
        return [(i, j) for i, j in np.argwhere(known).tolist()]

    @property
    def is_profile(self) -> bool:
        """Whether each layer is compared with at most one other, so that a list is enough."""
        rows = [i for i, _ in self.pairs]
        return len(rows) == len(set(rows))

    def label(self, i: int, j: int) -> str:
        """Return the name of a pair of layers."""
        return pair_label([cells.facts for cells in self.tables.values()], self.layers_a[i], self.layers_b[j])

    def blocks(self) -> dict[str, list[Cells]]:
        """Return the tables that are shown side by side: the similarities, then each score by all methods."""
        blocks: dict[str, list[Cells]] = {}
        for cells in self.tables.values():
            blocks.setdefault(cells.block, []).append(cells)
        return blocks

    def lines(self, width: int) -> Iterator[str]:
        """Yield the tables as text: layers by methods, or layers by layers where each is compared with many."""
        for word, side_by_side in self.blocks().items():
            if self.is_profile:
                labels = [self.label(i, j) for i, j in self.pairs]
                entries = [[cells.written(i, j) for cells in side_by_side] for i, j in self.pairs]
                yield from ["", word, *grid(labels, [cells.column for cells in side_by_side], entries, width)]
                continue
            for cells in side_by_side:
                entries = [[cells.written(i, j) for j in range(len(self.layers_b))] for i in range(len(self.layers_a))]
                yield from ["", cells.facts.id, *grid(self.layers_a, self.layers_b, entries, width)]
        if self.comparisons > 1:
            yield "\n" + wrapped(f"mean ± standard deviation over {self.count_text()}", width)

    def count_text(self) -> str:
        """Return over how many pairs of models the means are and, where some have no value, where they are fewer."""
        counts = {pair: self._counts(*pair) for pair in self.pairs}
        least, most = (choose((n for numbers in counts.values() for n in numbers), default=0) for choose in (min, max))
        pairs = f"{_range([least, most])} {'pair' if most == 1 else 'pairs'} of models"
        fewer = [f"{self.label(*pair)} {_range(numbers)}" for pair, numbers in counts.items() if min(numbers) < most]
        rest = [f"and {len(fewer) - NAMED} more"] if len(fewer) > NAMED else []
        return f"{pairs}, fewer where values are missing: {', '.join(fewer[:NAMED] + rest)}" if fewer else pairs

    def _counts(self, i: int, j: int) -> list[int]:
        """Return how many values each table has at a place, as far as it has any."""
        return [int(cells.counts[i, j]) for cells in self.tables.values() if cells.counts[i, j]]


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _shared(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for name in names[0] if all(name in others for others in names)) if names else ()


def _cells(tables: Sequence[Values], rows: Sequence[str], columns: Sequence[str]) -> Cells:
    stacked = np.array([_picked(table, rows, columns) for table in tables])
    counts = np.isfinite(stacked).sum(axis=0)
    total = np.where(np.isfinite(stacked), stacked, 0.0).sum(axis=0)
    means = np.divide(total, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    squares = np.where(np.isfinite(stacked), (stacked - means) ** 2, 0.0).sum(axis=0)
    variance = np.divide(squares, counts - 1, out=np.full(counts.shape, np.nan), where=counts > 1)
    return Cells(tables[0], means, np.sqrt(variance), counts)


def _picked(table: Values, rows: Sequence[str], columns: Sequence[str]) -> Any:
    places = [table.layers_a.index(name) for name in rows], [table.layers_b.index(name) for name in columns]
    return table.values[np.ix_(*places)]


@dataclass(frozen=True, eq=False, repr=False)
class Comparisons(Mapping[Pair, Comparison], Result):
    """The comparisons of several models with each other, by the names of the two: ``many["seed0", "seed1"]``.

    `failed` holds the reasons why models were left out, by name: engines that work in tasks continue with the others.
    """

    kind: ClassVar[str] = "comparisons"

    pairs: Mapping[Pair, Comparison]
    failed: Mapping[str, str]

    def __init__(
        self,
        comparisons: Iterable[Comparison] | Mapping[Pair, Comparison],
        failed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        pairs: dict[Pair, Comparison] = {}
        for comparison in comparisons.values() if isinstance(comparisons, Mapping) else comparisons:
            if pairs.setdefault((comparison.a, comparison.b), comparison) is not comparison:
                raise NameClash(
                    f"two comparisons of {comparison.a!r} with {comparison.b!r}; give the models distinct names."
                )
        freeze(self, pairs=frozen_mapping(pairs), failed=frozen_mapping(failed))

    def __getitem__(self, pair: Pair) -> Comparison:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UnknownName(f"ask for a pair of models, as in `many['first', 'second']`; got {pair!r}.")
        if pair not in self.pairs:
            raise UnknownName(f"no comparison of {pair[0]!r} with {pair[1]!r}{self._advice(pair)}")
        return self.pairs[pair]

    def __contains__(self, pair: object) -> bool:
        return pair in self.pairs

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Comparisons, (list(self.pairs.values()), dict(self.failed))

    def __repr__(self) -> str:
        return f"Comparisons({plural(len(self.models), 'model')}, {plural(len(self), 'pair')})"

    def __str__(self) -> str:
        return summary_as_text(self)

    # Mapping's own `get` waits for KeyError, which our refusal is not
    def get(self, pair: Pair, default: Any = None) -> Any:
        """Return the comparison of a pair, or `default` where there is none."""
        return self.pairs.get(pair, default)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, in the order in which they were given."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair))

    @property
    def measures(self) -> tuple[str, ...]:
        """The ids of the measures, in the order they were requested."""
        return tuple(dict.fromkeys(name for comparison in self.pairs.values() for name in comparison.measures))

    def summary(self, measures: str | None = None, *, match: str = "depth") -> np.ndarray:
        """Return one number for each pair of models, models × models in the order of `models`.

        It is the mean over layers at the same relative depth, by one rule for all pairs: layer i of n lies at
        i / (n - 1), and each layer of the model with fewer layers is paired with the nearest one of the other.

        With ``match="best"`` each layer of the row's model counts with its best match among the layers of the column's.
        Such a mean grows with the number of layers to choose from, so that deep models seem closer to all others; the
        two directions differ.

        NaN means that there is no number: on the diagonal (unless a model was compared with itself), for a missing
        pair, for a pair whose layers at the same depth (for best matches, all layers) were not all asked for, for one
        without any value, and for the other direction of a measure that is not symmetric. `summaries` has the
        reasons, and `layer_counts` how many pairs of layers are behind each number.
        """
        means = np.full((len(self.models), len(self.models)), np.nan)
        for place, known in self._behind(measures, match).items():
            means[place] = known.mean() if isinstance(known, np.ndarray) and len(known) else np.nan
        return means

    def layer_counts(self, measures: str | None = None, *, match: str = "depth") -> np.ndarray:
        """Return over how many pairs of layers each number of `summary` is the mean; 0 where it has none."""
        counts = np.zeros((len(self.models), len(self.models)), dtype=int)
        for place, known in self._behind(measures, match).items():
            counts[place] = len(known) if isinstance(known, np.ndarray) else 0
        return counts

    def _behind(self, measure: str | None, match: str) -> dict[tuple[int, int], np.ndarray | str]:
        """Return for each pair of models, by their places, the values behind its number or why it has none."""
        if match not in MATCHES:
            raise UnknownName(f"`match` is {' or '.join(map(repr, MATCHES))}; got {match!r}.")
        models = {name: place for place, name in enumerate(self.models)}
        behind: dict[tuple[int, int], np.ndarray | str] = {}
        having = [pair for pair, comparison in self.pairs.items() if measure is None or measure in comparison]
        for a, b in having or self.pairs:  # where none has it, the first refuses
            table = self.pairs[a, b].table(measure)
            rows, columns = _values_behind(table, match)
            behind[models[a], models[b]] = rows
            if table.quantity.symmetric and (b, a) not in self.pairs:
                behind[models[b], models[a]] = columns
        return behind

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """The caveats of all pairs, each once."""
        return grouped(caveat for comparison in self.pairs.values() for caveat in comparison.caveats)

    def summaries(self, *, match: str = "depth") -> Comparison:
        """Return the summaries of all measures as one comparison, with the models in rows and columns.

        It is labelled, as in ``many.summaries()["cka"]["seed0", "seed1"]``, and is saved, printed and drawn like any.
        `match` is that of `summary`.
        """
        first = next(iter(self.pairs.values()), None)
        if first is None:
            raise NoValue("there are no comparisons here to take summaries of.")
        shared = set.intersection(*(set(comparison.provenance.items()) for comparison in self.pairs.values()))
        origin = {key: text for key, text in first.provenance.items() if (key, text) in shared}
        empty: dict[str, Any] = {key: {} for key in ("shapes_a", "shapes_b", "widths_a", "widths_b")}
        return Comparison(
            a="networks", b="networks", layers_a=self.models, layers_b=self.models,
            tables={name: self._networks(name, match) for name in self.measures}, data=first.data,
            examples=first.examples,
            seed=first.seed, version=first.version, created=first.created, provenance=origin, **empty,
            caveats=self.caveats, complete=all(comparison.complete for comparison in self.pairs.values()),
        )  # fmt: skip

    def _networks(self, measure: str, match: str = "depth") -> Values:
        """Return the summary of a measure as a table of networks, with the reasons why values are missing."""
        table = next(comparison[measure] for comparison in self.pairs.values() if measure in comparison)
        values, behind = self.summary(measure, match=match), self._behind(measure, match)
        missing = {
            (a, b): self._missing(a, b, behind.get((i, j)))
            for i, a in enumerate(self.models)
            for j, b in enumerate(self.models)
            if np.isnan(values[i, j])
        }
        plain: dict[str, Any] = {"errors": None, "replicates": None, "chunk_sizes": (), "error_reasons": {}}
        plain |= {"layers_a": self.models, "layers_b": self.models, "axes": ("network", "network")}
        counts = self.layer_counts(measure, match=match)
        mean = f"mean over {_range(counts[counts > 0].tolist() or [0])} {MATCHES[match]}"
        convention = "; ".join(filter(None, [table.quantity.convention, mean]))
        symmetric = table.quantity.symmetric and match != "best"
        quantity = replace(table.quantity, symmetric=symmetric, convention=convention)
        return replace(table, quantity=quantity, values=values, missing=missing, **plain)

    def _missing(self, a: str, b: str, behind: np.ndarray | str | None) -> str:
        if isinstance(behind, str):
            return behind
        if (a, b) in self.pairs:
            return "nothing was compared by this measure, or no pair of layers has a value"
        if a == b:
            return SAME_MODEL
        other = (b, a) in self.pairs
        return "compared in the other direction alone" if other else "these two were not compared"

    def tree(self, measures: str | None = None, *, match: str = "depth") -> np.ndarray:
        """Return which models join at which distance, by average linkage, as `scipy.cluster.hierarchy` has it.

        Similarities between -1 and 1 are read as angles, their arccosines; the leaves are numbered as `models`. `match`
        is that of `summary`, here and in `plane` and `clusters`.
        """
        return tree_of(distances_of(self.summaries(match=match).table(measures)))

    def plane(self, measures: str | None = None, *, match: str = "depth") -> dict[str, tuple[float, float]]:
        """Return a place in the plane for each model, by classical scaling of the distances of `tree`."""
        places, _ = plane_of(distances_of(self.summaries(match=match).table(measures)))
        return {name: (float(x), float(y)) for name, (x, y) in zip(self.models, places, strict=True)}

    def clusters(
        self, count: int | None = None, measures: str | None = None, *, match: str = "depth"
    ) -> dict[str, int]:
        """Return the cluster of each model, by cutting `tree`; without `count` where the mean silhouette is largest."""
        distances = distances_of(self.summaries(match=match).table(measures))
        return dict(zip(self.models, clusters_of(distances, count), strict=True))

    def to_pandas(self, measures: str | None = None, *, long: bool = False) -> Any:
        """Return the summary of a measure as a data frame of models by models, or one row for each number.

        One row for each pair of layers of each pair of models comes back where `long` is requested, and where there
        are several measures and none is named.
        """
        frame = optional("pandas").DataFrame
        if not long and (measures is not None or len(self.measures) == 1):
            return frame(self.summary(measures), index=list(self.models), columns=list(self.models))
        rows = [(*pair, *row) for pair, comparison in self.pairs.items() for row in comparison.numbers(measures)]
        return frame(rows, columns=["model_a", "model_b", *NUMBERS])

    def to_xarray(self) -> Any:
        """Return a data set with an array for each measure: models, models, layers, layers; NaN where nothing is.

        Standard errors have arrays of their own, ``cka summary`` is the summary, and ``cka layers`` the number of pairs
        of layers behind each of its numbers. Models need not have the same layers.
        """
        package = optional("xarray")
        rows = list(dict.fromkeys(name for comparison in self.values() for name in comparison.layers_a))
        columns = list(dict.fromkeys(name for comparison in self.values() for name in comparison.layers_b))
        sides, ends = ("model_a", "model_b"), ("layer_a", "layer_b")
        arrays: dict[str, Any] = {}
        for measure in self.measures:
            arrays[f"{measure} summary"] = (sides, self.summary(measure))
            arrays[f"{measure} layers"] = (sides, self.layer_counts(measure))
            for title, field in ((measure, "values"), (f"{measure} standard error", "errors")):
                values = self._stacked(measure, field, rows, columns)
                arrays |= {} if values is None else {title: ((*sides, *ends), values)}
        coordinates = dict(zip((*sides, *ends), (self.models, self.models, rows, columns), strict=True))
        return package.Dataset(arrays, coords={key: list(names) for key, names in coordinates.items()})

    def _stacked(self, measure: str, field: str, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray | None:
        """Return one field of a measure's tables in one array; None where no table has it."""
        models, stacked = {name: place for place, name in enumerate(self.models)}, None
        for (a, b), comparison in self.pairs.items():
            values = getattr(comparison[measure], field) if measure in comparison else None
            if values is None:
                continue
            if stacked is None:
                stacked = np.full((len(models), len(models), len(rows), len(columns)), np.nan)
            of_rows = [rows.index(name) for name in comparison.layers_a]
            of_columns = [columns.index(name) for name in comparison.layers_b]
            stacked[models[a], models[b]][np.ix_(of_rows, of_columns)] = values
        return stacked

    def spread(self) -> Spread:
        """Return the mean and the standard deviation over the pairs of models, layer by layer."""
        return Spread.of(list(self.pairs.values()))

    def _repr_html_(self) -> str:
        """Show the summaries in a notebook."""
        return import_module("netkin.reporting").notebook_view(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all comparisons to one file, whole or not at all; over one that is there only with `overwrite`."""
        _, arrays = packed_columns(list(self.pairs.values()))
        header = {"comparisons": [f"{a} and {b}" for a, b in list(self.pairs)[:FIRST]], "tables": list(self.measures)}
        for name in ("data", "examples", "version"):
            header[name] = list(dict.fromkeys(getattr(comparison, name) for comparison in self.pairs.values()))
        files.write(path, self.kind, header | {"failed": dict(self.failed)}, arrays, overwrite=overwrite)

    def derived(self) -> dict[str, Any]:
        """Return what a document holds: a document of each pair."""
        return {"comparisons": list(self.pairs.values()), "failed": self.failed}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparisons:
        """Return the comparisons that were saved at `path`."""
        header, arrays = files.read(path, cls.kind)
        with files.damage_reported(path):
            return cls(unpacked_columns({}, arrays), header["failed"])

    def _advice(self, pair: Pair) -> str:
        if tuple(reversed(pair)) in self.pairs:
            return f", but one of {pair[1]!r} with {pair[0]!r}; ask for that."
        strange = next((name for name in pair if name not in self.models), "")
        if strange in self.failed:
            return f", as {strange!r} has failed: {self.failed[strange]}"
        hint = did_you_mean(str(strange), self.models) or "."
        return f"{hint} The models are {', '.join(self.models) or 'none'}."


def _values_behind(table: Values, match: str) -> tuple[np.ndarray | str, np.ndarray | str]:
    """Return the values behind the number of two models, and behind that of the other order, or why there is none."""
    shape = table.values.shape
    counted = list(np.ndindex(shape)) if match == "best" else same_depth(*shape)
    names = [(table.layers_a[i], table.layers_b[j]) for i, j in counted]
    absent = sum(table.missing.get(pair) == NOT_ASKED for pair in names)
    if absent:
        where = "" if match == "best" else " at the same relative depth"
        why = f"{absent} of the {plural(len(names), 'pair')} of layers{where} were not asked for; ask for all pairs"
        return why, why
    known = np.isfinite(table.values)
    if match == "depth":
        values = np.array([table.values[place] for place in counted if known[place]])
        return values, values
    closest = table.values if table.higher_is_closer else -table.values
    best = np.where(known, closest, -np.inf)
    both = [best.max(axis=axis)[known.any(axis=axis)] for axis in (1, 0)]
    rows, columns = both if table.higher_is_closer else (-side for side in both)
    return rows, columns
