"""Clusters: which groups the rows of a table of similarities form, and how well two groupings agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import ShapeError, ValueFault
from netkin.results.comparison import Comparison


def user_clusters(similarity: Comparison | np.ndarray, count: int | None = None) -> tuple[int, ...]:
    """Return the cluster of each client, numbered from 0 in the order of the clients, by average linkage.

    Without `count` there are as many clusters as give the largest mean silhouette, at least two.

    Example:
        >>> alike = np.array([[1, 0.9, 0.1, 0.2], [0.9, 1, 0.2, 0.1], [0.1, 0.2, 1, 0.8], [0.2, 0.1, 0.8, 1]])
        >>> user_clusters(alike)
        (0, 0, 1, 1)
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    apart = _distances(similarity)
    most = len(apart)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most):
        raise ValueFault(f"`count` is a number of clusters, 1 to {most}; got {count!r}.")
    tree = linkage(squareform(apart, checks=False), "average")
    if count is not None:
        return _numbered(fcluster(tree, count, "maxclust"))
    found = [_numbered(fcluster(tree, number, "maxclust")) for number in range(2, most)]
    return max(found, key=lambda one: _silhouette(apart, np.array(one)), default=tuple(range(most)))


def adjusted_rand(found: Sequence[Any], truth: Sequence[Any]) -> float:
    """Return the adjusted Rand index of two clusterings: 1 where they agree, about 0 where only by chance.

    Example:
        >>> adjusted_rand([0, 0, 1, 1], ["b", "b", "a", "a"])
        1.0
    """
    if len(found) != len(truth):
        raise ShapeError(f"two clusterings must be of the same clients; got {len(found)} and {len(truth)}.")
    table = np.zeros((len(set(found)), len(set(truth))))
    rows, columns = ({one: k for k, one in enumerate(dict.fromkeys(side))} for side in (found, truth))
    for one, other in zip(found, truth, strict=True):
        table[rows[one], columns[other]] += 1
    both, first, second = (_pairs(part).sum() for part in (table, table.sum(1), table.sum(0)))
    chance = first * second / max(_pairs(np.array(len(found))), 1)
    return 1.0 if first == second == both else float((both - chance) / ((first + second) / 2 - chance))


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
    order: Mapping[int, int] = {one: k for k, one in enumerate(dict.fromkeys(labels.tolist()))}
    return tuple(order[one] for one in labels.tolist())


def _silhouette(apart: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over clients of (b − a) / max(a, b): a to their own cluster, b to the nearest other."""
    members = (labels[:, None] == np.unique(labels)).astype(float)
    sums, sizes, rows = apart @ members, members.sum(0), np.arange(len(labels))
    own = members.argmax(1)
    a = sums[rows, own] / np.maximum(sizes[own] - 1, 1)
    others = sums / sizes
    others[rows, own] = np.inf
    b = others.min(1)
    return float(np.where(sizes[own] > 1, (b - a) / np.maximum(np.maximum(a, b), 1e-300), 0).mean())
