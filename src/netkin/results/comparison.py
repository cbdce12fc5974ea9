"""The comparison of two models: a table for each measure, with labels and provenance.

Below it what is read from a table of all pairs of networks: distances, clusters, the dendrogram, a 2-d embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any, ClassVar, overload

import numpy as np

from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean
from netkin.results.caveats import Caveat
from netkin.results.labels import NOT_ASKED, fits
from netkin.results.packing import Result
from netkin.results.records import distinct, freeze, now, optional
from netkin.results.text import comparison_as_text
from netkin.results.values import Match, Values

NUMBERS = ("measure", "layer_a", "layer_b", "value", "error", "low", "high", "reason")  # columns of the long form


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Result):
    """Two models compared, layer by layer: frozen, labelled, and with its provenance.

    `c["cka"]` is a measure's table and `c["cka"]["layer1", "layer2"]` a number in it; with one measure
    `c["layer1", "layer2"]` is that number at once.
    """

    kind: ClassVar[str] = "comparison"

    a: str
    b: str
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    tables: Mapping[str, Values]
    shapes_a: Mapping[str, str]
    shapes_b: Mapping[str, str]
    widths_a: Mapping[str, int]
    widths_b: Mapping[str, int]
    data: str
    examples: int
    seed: int
    version: str
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze(self, layers_a=distinct(self.layers_a, "rows"), layers_b=distinct(self.layers_b, "columns"))

    @property
    def measures(self) -> tuple[str, ...]:
        """The ids of the measures, in the order they were requested."""
        return tuple(self.tables)

    @property
    def needs_no_data(self) -> bool:
        """Whether the numbers come from the weights alone, so that no examples were run."""
        return self.examples == 0

    @overload
    def __getitem__(self, key: str) -> Values: ...

    @overload
    def __getitem__(self, key: tuple[str, str]) -> float: ...

    def __getitem__(self, key: str | tuple[str, str]) -> Values | float:
        """Return a measure's table, or with one measure the value of a pair of layers."""
        return self._named(key) if isinstance(key, str) else self._only()[key]

    def __contains__(self, measure: object) -> bool:
        return isinstance(measure, str) and len(self._found(measure)) == 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        data = "weights alone" if self.needs_no_data else f"{self.examples:,} examples"
        size = f"{len(self.layers_a)} × {len(self.layers_b)} layers, {data}"
        return f"Comparison({self.a!r}, {self.b!r}, measures={list(self.measures)}, {size})"

    def __str__(self) -> str:
        return comparison_as_text(self)

    def table(self, measures: str | None = None) -> Values:
        """Return the table of the measure that is named; with one measure it need not be named."""
        return self._only() if measures is None else self._named(measures)

    def best_matches(self, measures: str | None = None) -> dict[str, Match]:
        """Return for every layer of the first model its closest layer of the second and the value there."""
        return self.table(measures).best_matches()

    def to_numpy(self, measures: str | None = None) -> np.ndarray:
        """Return a measure's matrix; of several, where none is named, measures × rows × columns."""
        if measures is None and len(self.tables) != 1:
            return np.array([table.values for table in self.tables.values()])
        return self.table(measures).to_numpy()

    def to_pandas(self, measures: str | None = None, *, long: bool = False) -> Any:
        """Return a measure's table as a data frame, or one row for each number.

        One row for each number, with its standard error, the ends of its 95 % interval and the reason why it or its
        error is missing, comes back where `long` is requested, and where there are several measures and none is named.
        """
        if long or (measures is None and len(self.tables) != 1):
            return optional("pandas").DataFrame(list(self.numbers(measures)), columns=list(NUMBERS))
        return self.table(measures).to_pandas()

    def to_xarray(self) -> Any:
        """Return a data set with an array for each measure, for its standard errors and replicates, and provenance."""
        arrays = {name: table.to_xarray() for name, table in self.tables.items()}
        sides, parts = ("layer_a", "layer_b"), {len(table.chunk_sizes) for table in self.tables.values()} - {0}
        for name, table in self.tables.items():
            if table.errors is not None:
                arrays[f"{name} standard error"] = (sides, table.errors.copy())
            if table.replicates is not None:
                chunk = "chunk" if len(parts) == 1 else f"chunk of {len(table.replicates)}"
                arrays[f"{name} replicates"] = ((chunk, *sides), table.replicates.copy())
        words = ("a", "b", "data", "examples", "seed", "version", "created")
        facts = dict(self.provenance) | {word: getattr(self, word) for word in words}
        return optional("xarray").Dataset(arrays, attrs=facts)

    def _repr_html_(self) -> str:
        """Show the heatmaps in a notebook."""
        return import_module("netkin.reporting").notebook_view(self)

    def _found(self, measure: str) -> list[Values]:
        """Return the table of that id, else all that fit what is asked."""
        if measure in self.tables:
            return [self.tables[measure]]
        return [table for table in self.tables.values() if fits(measure, table.id, table.quantity.parameters)]

    def _named(self, measure: str) -> Values:
        tables = self._found(measure)
        if not tables:
            hint = did_you_mean(measure, self.tables) or "."
            raise UnknownName(f"no measure {measure!r} in this comparison{hint} It holds {self._listed()}.")
        if len(tables) > 1:
            ids = " and ".join(repr(table.id) for table in tables)
            raise UnknownName(f"{measure!r} may mean {ids}; ask for one of them by its whole id.")
        return tables[0]

    def _only(self) -> Values:
        if len(self.tables) != 1:
            first = next(iter(self.tables), "cka")
            raise UnknownName(
                f"this comparison holds {len(self.tables)} measures: {self._listed()}. Name one, as in "
                f"`c[{first!r}]` or `measures={first!r}`."
            )
        return next(iter(self.tables.values()))

    def _listed(self) -> str:
        return ", ".join(self.tables) or "none"

    def numbers(self, measures: str | None = None) -> Iterator[tuple[str, str, str, float, float, float, float, str]]:
        """Yield `NUMBERS` for each value and each hole requested, of the measure that is named or of all.

        The reason is why there is no value or, with a value, why it has no standard error.
        """
        for table in self.tables.values() if measures is None else [self.table(measures)]:
            arrays = (table.values, table.to_errors(), *table.interval())
            for (i, a), (j, b) in product(enumerate(self.layers_a), enumerate(self.layers_b)):
                reason = table.missing.get((a, b), table.error_reasons.get((a, b), ""))
                if reason != NOT_ASKED:
                    value, error, low, high = (float(array[i, j]) for array in arrays)
                    yield table.id, a, b, value, error, low, high, reason


def user_clusters(similarity: Comparison | np.ndarray, count: int | None = None) -> tuple[int, ...]:
    """Return the cluster of each client, numbered from 0 in the order of the clients, by average linkage.

    Without `count` there are as many clusters as give the largest mean silhouette, at least two.

    Example:
        >>> alike = np.array([[1, 0.9, 0.1, 0.2], [0.9, 1, 0.2, 0.1], [0.1, 0.2, 1, 0.8], [0.2, 0.1, 0.8, 1]])
        >>> user_clusters(alike)
        (0, 0, 1, 1)
    """
    return clusters_of(_distances(similarity), count)


def are_angles(table: Values) -> bool:
    """Return whether `distances_of` gives angles, the arccosines of a similarity between -1 and 1."""
    return table.higher_is_closer and table.bounds[0] >= -1 and table.bounds[1] <= 1


def distances_of(table: Values) -> np.ndarray:
    """Return how far apart networks are by a table of all pairs: symmetric, with zeros on the diagonal.

    A similarity between -1 and 1 becomes its arccosine, an angle; one without such bounds what it lacks to the largest
    value. Of a measure that is not symmetric the mean of both directions counts, or the one that is known.
    """
    _refuse_missing(table)
    values = np.where(np.eye(len(table.values), dtype=bool), np.nan, table.values)
    if table.higher_is_closer:
        values = np.arccos(np.clip(values, -1, 1)) if are_angles(table) else np.nanmax(values) - values
    both = np.stack([values, values.T])
    known = np.isfinite(both)
    apart = np.where(known, both, 0).sum(0) / np.maximum(known.sum(0), 1)
    np.fill_diagonal(apart, 0)
    return apart


def tree_of(distances: np.ndarray) -> np.ndarray:
    """Return SciPy's table of which groups join at which mean distance, the nearest first.

    Example:
        >>> tree_of(np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])).tolist()
        [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 4.0, 3.0]]
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    return linkage(squareform(distances, checks=False), method="average")


def branches_of(tree: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return a tree as lines to draw, each of four points (distance, place), and which leaf is at each place.

    Example:
        >>> lines, leaves = branches_of(tree_of(np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])))
        >>> leaves, lines[-1].tolist()
        ([2, 0, 1], [[0.0, 0.0], [4.0, 0.0], [4.0, 1.5], [1.0, 1.5]])
    """
    from scipy.cluster.hierarchy import dendrogram

    drawn = dendrogram(tree, no_plot=True)
    places = (np.array(drawn["icoord"]) - 5) / 10  # SciPy puts leaves at 5, 15, 25, ...
    return np.stack([np.array(drawn["dcoord"]), places], axis=2), drawn["leaves"]


def plane_of(distances: np.ndarray) -> tuple[np.ndarray, float]:
    """Return places in a plane by classical scaling, and the share of the squared spread that they keep."""
    centring = np.eye(len(distances)) - 1 / len(distances)
    values, vectors = np.linalg.eigh(-centring @ distances**2 @ centring / 2)
    leading = np.clip(values[::-1][:2], 0, None)
    total = np.abs(values).sum()
    return vectors[:, ::-1][:, :2] * np.sqrt(leading), float(leading.sum() / total) if total else 1.0


def clusters_of(distances: np.ndarray, count: int | None = None) -> tuple[int, ...]:
    """Return the cluster of each network, numbered from 0 in their order, by average linkage.

    Without `count` there are as many clusters as give the largest mean silhouette, at least two.
    """
    from scipy.cluster.hierarchy import fcluster

    most = len(distances)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most):
        raise InvalidValue(f"`count` is a number of clusters, 1 to {most}; got {count!r}.")
    tree = tree_of(distances)
    if count is not None:
        return _numbered(fcluster(tree, count, "maxclust"))
    candidates = [_numbered(fcluster(tree, number, "maxclust")) for number in range(2, most)]
    return max(candidates, key=lambda clusters: _silhouette(distances, np.array(clusters)), default=tuple(range(most)))


def adjusted_rand(clusters: Sequence[Any], truth: Sequence[Any]) -> float:
    """Return the adjusted Rand index of two clusterings: 1 where they agree, about 0 where only by chance.

    Example:
        >>> adjusted_rand([0, 0, 1, 1], ["b", "b", "a", "a"])
        1.0
    """
    if len(clusters) != len(truth):
        raise ShapeError(f"two clusterings must be of the same clients; got {len(clusters)} and {len(truth)}.")
    table = np.zeros((len(set(clusters)), len(set(truth))))
    rows, columns = ({cluster: k for k, cluster in enumerate(dict.fromkeys(side))} for side in (clusters, truth))
    for cluster, other in zip(clusters, truth, strict=True):
        table[rows[cluster], columns[other]] += 1
    both, first, second = (_pairs(part).sum() for part in (table, table.sum(1), table.sum(0)))
    chance = first * second / max(_pairs(np.array(len(clusters))), 1)
    return 1.0 if first == second == both else float((both - chance) / ((first + second) / 2 - chance))


def _refuse_missing(table: Values) -> None:
    """Refuse a table that lacks some pair of networks, in both directions."""
    known = np.isfinite(table.values)
    absent = np.argwhere(~(known | known.T) & ~np.eye(len(known), dtype=bool))
    if len(absent):
        i, j = absent[0]
        pair = (table.layers_a[i], table.layers_a[j])
        why = f": {table.missing[pair]}" if pair in table.missing else ""
        raise NoValue(
            f"{table.id} has no value for {pair[0]!r} and {pair[1]!r}{why.rstrip('.')}; a tree, a plane and clusters "
            "need one for every pair."
        )


def _pairs(counts: np.ndarray) -> Any:
    return counts * (counts - 1) / 2


def _distances(similarity: Comparison | np.ndarray) -> np.ndarray:
    if isinstance(similarity, Comparison):
        table = similarity.table()
        values = table.to_numpy()
        values = values.max() - values if table.higher_is_closer else values
    else:
        values = np.asarray(similarity, dtype=float)
        values = values.max() - values
    if values.ndim != 2 or len(values) != len(values.T) or len(values) < 2 or not np.isfinite(values).all():
        raise ShapeError(
            f"clusters come from the similarities of all pairs of two clients or more; got {values.shape}."
        )
    values = (values + values.T) / 2
    np.fill_diagonal(values, 0)
    return values


def _numbered(labels: np.ndarray) -> tuple[int, ...]:
    order: Mapping[int, int] = {label: k for k, label in enumerate(dict.fromkeys(labels.tolist()))}
    return tuple(order[label] for label in labels.tolist())


def _silhouette(apart: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over clients of (b − a) / max(a, b): a to their own cluster, b to the nearest other."""
    members = (labels[:, None] == np.unique(labels)).astype(float)
    sums, sizes, rows = apart @ members, members.sum(0), np.arange(len(labels))
    cluster = members.argmax(1)
    a = sums[rows, cluster] / np.maximum(sizes[cluster] - 1, 1)
    others = sums / sizes
    others[rows, cluster] = np.inf
    b = others.min(1)
    return float(np.where(sizes[cluster] > 1, (b - a) / np.maximum(np.maximum(a, b), 1e-300), 0).mean())
