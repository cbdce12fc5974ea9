"""All pairs of several models: their comparisons, one number for each pair, and means over the pairs by layer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from netkin import files
from netkin.errors import NameClash, NoValue, UnknownName, did_you_mean
from netkin.results.caveats import Caveat, grouped
from netkin.results.comparison import MODELS, NUMBERS, Comparison
from netkin.results.distances import clusters_of, distances_of, plane_of, tree_of
from netkin.results.labels import NOT_ASKED, plural, same_depth
from netkin.results.packing import LongForm, Result, packed_columns, unpacked_columns
from netkin.results.records import freeze, frozen_mapping, optional
from netkin.results.text import summary_as_text
from netkin.results.values import Pair, Values

FIRST = 32  # pairs of models that the header of a file names
WITHOUT_ERRORS: dict[str, Any] = {"errors": None, "replicates": None, "chunk_sizes": (), "error_reasons": {}}
SAME_MODEL = "no model was compared with itself"
NO_NUMBER = "nothing was compared by this measure, or no pair of layers has a value"


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

    def summary(self, measures: str | None = None) -> np.ndarray:
        """Return one number for each pair of models, models × models in the order of `models`.

        It is the mean over layers at the same relative depth, by one rule for all pairs: layer i of n lies at
        i / (n - 1), and each layer of the model with fewer layers is paired with the nearest one of the other.

        NaN means that there is no number: on the diagonal (unless a model was compared with itself), for a missing
        pair, for a pair whose layers at the same depth were not all asked for, for one without any value, and for the
        other direction of a measure that is not symmetric. `summaries` has the reasons, and `layer_counts` how many
        pairs of layers are behind each number.
        """
        means = np.full((len(self.models), len(self.models)), np.nan)
        for place, values in self._values_behind(measures).items():
            means[place] = values.mean() if isinstance(values, np.ndarray) and len(values) else np.nan
        return means

    def layer_counts(self, measures: str | None = None) -> np.ndarray:
        """Return over how many pairs of layers each number of `summary` is the mean; 0 where it has none."""
        counts = np.zeros((len(self.models), len(self.models)), dtype=int)
        for place, values in self._values_behind(measures).items():
            counts[place] = len(values) if isinstance(values, np.ndarray) else 0
        return counts

    def _values_behind(self, measure: str | None) -> dict[tuple[int, int], np.ndarray | str]:
        """Return for each pair of models, by their places, the values behind its number or why it has none."""
        models = {name: place for place, name in enumerate(self.models)}
        behind: dict[tuple[int, int], np.ndarray | str] = {}
        having = [pair for pair, comparison in self.pairs.items() if measure is None or measure in comparison]
        for a, b in having or self.pairs:  # where none has it, the first refuses
            table = self.pairs[a, b].table(measure)
            behind[models[a], models[b]] = _at_same_depth(table)
            if table.quantity.symmetric and (b, a) not in self.pairs:
                behind[models[b], models[a]] = behind[models[a], models[b]]
        return behind

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """The caveats of all pairs, each once."""
        return grouped(caveat for comparison in self.pairs.values() for caveat in comparison.caveats)

    def summaries(self) -> Comparison:
        """Return the summaries of all measures as one comparison, with the models in rows and columns.

        It is labelled, as in ``many.summaries()["cka"]["seed0", "seed1"]``, and is saved, printed and drawn like any.
        """
        tables = {name: self._networks(name) for name in self.measures}
        names = {"a": "networks", "b": "networks", "layers_a": self.models, "layers_b": self.models}
        return _joint(list(self.pairs.values()), tables=tables, **names)

    def _networks(self, measure: str) -> Values:
        """Return the summary of a measure as a table of networks, with the reasons why values are missing."""
        table = next(comparison[measure] for comparison in self.pairs.values() if measure in comparison)
        values, behind, counts = self.summary(measure), self._values_behind(measure), self.layer_counts(measure)
        missing = {
            (a, b): self._missing(a, b, behind.get((i, j)))
            for i, a in enumerate(self.models)
            for j, b in enumerate(self.models)
            if np.isnan(values[i, j])
        }
        numbers = counts[counts > 0].tolist() or [0]
        least, most = min(numbers), max(numbers)
        mean = (
            f"mean over {least if least == most else f'{least} to {most}'} pairs of layers at the same relative depth"
        )
        convention = "; ".join(filter(None, [table.quantity.convention, mean]))
        return replace(
            table, quantity=replace(table.quantity, convention=convention), layers_a=self.models, layers_b=self.models,
            values=values, missing=missing, axes=("network", "network"), **WITHOUT_ERRORS,
        )  # fmt: skip

    def _missing(self, a: str, b: str, behind: np.ndarray | str | None) -> str:
        if isinstance(behind, str):
            return behind
        if (a, b) in self.pairs:
            return NO_NUMBER
        if a == b:
            return SAME_MODEL
        other = (b, a) in self.pairs
        return "compared in the other direction alone" if other else "these two were not compared"

    def spread(self) -> Comparison:
        """Return the means over the pairs of models, layer by layer, as `spread_of` has them."""
        return spread_of(list(self.pairs.values()))

    def tree(self, measures: str | None = None) -> np.ndarray:
        """Return which models join at which distance, by average linkage, as `scipy.cluster.hierarchy` has it.

        Similarities between -1 and 1 are read as angles, their arccosines; the leaves are numbered as `models`.
        """
        return tree_of(distances_of(self.summaries().table(measures)))

    def plane(self, measures: str | None = None) -> dict[str, tuple[float, float]]:
        """Return a place in the plane for each model, by classical scaling of the distances of `tree`."""
        places, _ = plane_of(distances_of(self.summaries().table(measures)))
        return {name: (float(x), float(y)) for name, (x, y) in zip(self.models, places, strict=True)}

    def clusters(self, count: int | None = None, measures: str | None = None) -> dict[str, int]:
        """Return the cluster of each model, by cutting `tree`; without `count` where the mean silhouette is largest."""
        distances = distances_of(self.summaries().table(measures))
        return dict(zip(self.models, clusters_of(distances, count), strict=True))

    def to_pandas(self, measures: str | None = None, *, long: bool = False) -> Any:
        """Return the summary of a measure as a data frame of models by models, or one row for each number.

        One row for each pair of layers of each pair of models comes back where `long` is requested, and where there
        are several measures and none is named.
        """
        frame = optional("pandas").DataFrame
        if not long and (measures is not None or len(self.measures) == 1):
            return frame(self.summary(measures), index=list(self.models), columns=list(self.models))
        columns, rows = self.long_form(measures)
        return frame(list(rows), columns=columns)

    def long_form(self, measures: str | None = None) -> LongForm:
        """Return a row for each number of each pair of models, of the measure that is named or of all."""
        rows = ((*pair, *row) for pair, comparison in self.pairs.items() for row in comparison.numbers(measures))
        return MODELS + NUMBERS, rows

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all comparisons to one file, whole or not at all; over one that is there only with `overwrite`."""
        _, arrays = packed_columns(list(self.pairs.values()))
        header = {"comparisons": [f"{a} and {b}" for a, b in list(self.pairs)[:FIRST]], "tables": list(self.measures)}
        for name in ("data", "examples", "version"):
            header[name] = list(dict.fromkeys(getattr(comparison, name) for comparison in self.pairs.values()))
        files.write(path, self.kind, header | {"failed": dict(self.failed)}, arrays, overwrite=overwrite)

    def derived_fields(self) -> dict[str, Any]:
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


def _at_same_depth(table: Values) -> np.ndarray | str:
    """Return the values of layers at the same relative depth, or why there is no mean over them."""
    places = same_depth(*table.values.shape)
    pairs = [(table.layers_a[i], table.layers_b[j]) for i, j in places]
    absent = sum(table.missing.get(pair) == NOT_ASKED for pair in pairs)
    if absent:
        counted = f"{absent} of the {plural(len(pairs), 'pair')} of layers at the same relative depth"
        return f"{counted} were not asked for; ask for all pairs"
    values = np.array([table.values[place] for place in places])
    return values[np.isfinite(values)]


def spread_of(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the means over comparisons, for the layers that all of them have, with standard deviations as `errors`."""
    rows, columns = (
        tuple(name for name in names[0] if all(name in others for others in names))
        for names in ([c.layers_a for c in comparisons], [c.layers_b for c in comparisons])
    )
    if not (rows and columns):
        raise NoValue("the comparisons share no names of layers, so there is nothing to take a mean over.")
    measures = dict.fromkeys(name for comparison in comparisons for name in comparison.tables)
    tables = {
        name: _mean_table([c.tables[name] for c in comparisons if name in c.tables], rows, columns)
        for name in measures
    }  # fmt: skip
    joint = _joint(comparisons, a="each model", b="each other one", layers_a=rows, layers_b=columns, tables=tables)
    return replace(joint, caveats=())  # they are about single pairs


def _mean_table(tables: Sequence[Values], rows: tuple[str, ...], columns: tuple[str, ...]) -> Values:
    stacked = np.array([
        table.values[np.ix_([table.layers_a.index(a) for a in rows], [table.layers_b.index(b) for b in columns])]
        for table in tables
    ])  # fmt: skip
    known = np.isfinite(stacked)
    counts = known.sum(axis=0)
    means = np.where(known, stacked, 0.0).sum(axis=0) / np.where(counts > 0, counts, np.nan)
    squares = np.where(known, (stacked - means) ** 2, 0.0).sum(axis=0)
    missing = {}
    for a, b in ((rows[i], columns[j]) for i, j in np.argwhere(counts == 0).tolist()):
        reasons = {table.missing[a, b] for table in tables}
        missing[a, b] = NOT_ASKED if reasons == {NOT_ASKED} else "no pair of models has a value here"
    fewer = ", fewer where values are missing" if len({*counts[counts > 0].tolist()} - {len(tables)}) else ""
    error = f"standard deviation over {plural(len(tables), 'pair')} of models{fewer}"
    return replace(
        tables[0], quantity=replace(tables[0].quantity, error=error), layers_a=rows, layers_b=columns, values=means,
        missing=missing, **WITHOUT_ERRORS | {"errors": np.sqrt(squares / np.where(counts > 1, counts - 1, np.nan))},
    )  # fmt: skip


def _joint(comparisons: Sequence[Comparison], **fields: Any) -> Comparison:
    """Return a comparison of what several have together, with the caveats of all and the origin that they share."""
    if not comparisons:
        raise NoValue("there are no comparisons here to take means over.")
    shared = set.intersection(*(set(comparison.provenance.items()) for comparison in comparisons))
    empty: dict[str, Any] = {name: {} for name in ("shapes_a", "shapes_b", "widths_a", "widths_b")}
    return replace(
        comparisons[0], **fields, **empty,
        provenance={key: text for key, text in comparisons[0].provenance.items() if (key, text) in shared},
        caveats=grouped(caveat for comparison in comparisons for caveat in comparison.caveats),
        complete=all(comparison.complete for comparison in comparisons),
    )  # fmt: skip
