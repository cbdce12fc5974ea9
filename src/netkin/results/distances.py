"""What is read from a table of all pairs of networks: distances, clusters, the dendrogram, a 2-d embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.results.comparison import Comparison
from netkin.results.values import Values


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
    _require_all_pairs(table)
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
        raise InvalidValue(f"`count` is a number of clusters, 1 to {most}; got {count!r}.", argument="count")
    tree = tree_of(distances)
    if count is not None:
        return _numbered(fcluster(tree, count, "maxclust"))
    candidates = [_numbered(fcluster(tree, number, "maxclust")) for number in range(2, most)]
    return max(candidates, key=lambda clusters: silhouette(distances, np.array(clusters)), default=tuple(range(most)))


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


def _require_all_pairs(table: Values) -> None:
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


def silhouette(apart: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over clients of (b − a) / max(a, b): a to their own cluster, b to the nearest other."""
    if not labels.any():  # one cluster has no other: networks at equal distances join all at once
        return 0.0
    members = (labels[:, None] == np.unique(labels)).astype(float)
    sums, sizes, rows = apart @ members, members.sum(0), np.arange(len(labels))
    cluster = members.argmax(1)
    a = sums[rows, cluster] / np.maximum(sizes[cluster] - 1, 1)
    others = sums / sizes
    others[rows, cluster] = np.inf
    b = others.min(1)
    return float(np.where(sizes[cluster] > 1, (b - a) / np.maximum(np.maximum(a, b), 1e-300), 0).mean())
