"""Users: how alike clients are by a named measure, and which groups they form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor, nn

from netkin import __version__
from netkin.applications.federated.federation import Federation
from netkin.comparing.compare import compare_many
from netkin.errors import NoValue, ShapeError, ValueFault
from netkin.measures.filter_subspaces import angles, mean_cosines
from netkin.measures.registry import find
from netkin.progress import ProgressOption
from netkin.results import Comparison, Values
from netkin.statistics.layer_filters import gauge_caution, orthonormal_gauge, refuse_gauge

BY_ATOMS = ("atom_cosine", "atom_angular")


def user_similarity(
    federation: Federation,
    measure: str = "atom_cosine",
    *,
    gauge: str = "stored",
    like: nn.Module | None = None,
    data: Any = None,
    progress: ProgressOption = None,
) -> Comparison:
    """Return how alike the networks of all clients are, with the clients in rows and columns.

    `atom_cosine` and `atom_angular` read the personal atoms alone, which each client hands over once: neither data nor
    a network are run. Any other measure compares the clients' networks layer by layer, and its value is the plain mean
    over their layers; those of outputs of layers need examples.

    Args:
        federation: one that has ended.
        measure: the name of a measure.
        gauge: of atoms: "stored" for them as they are, "orthonormal" for those that go with orthonormal coefficients.
        like: the network that was federated, for measures other than of atoms.
        data: examples for measures that need some.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    if len(federation.clients) < 2:
        raise ValueFault(f"a similarity needs two clients or more; got {len(federation.clients)}.")
    if measure not in BY_ATOMS:
        return _by_networks(federation, measure, like, data, progress)
    refuse_gauge(gauge)
    name = measure if gauge == "stored" else f"{measure}(gauge={gauge})"
    caution = _caution(federation) if gauge == "stored" else ""
    values = _by_atoms(federation, measure, gauge)
    return _as_comparison(federation.clients, values, name, "Filters", warnings=(caution,) * bool(caution))


def _as_comparison(
    names: Sequence[str], values: np.ndarray, measure: str, statistic: str, *, data: str = "", examples: int = 0,
    warnings: tuple[str, ...] = (),
) -> Comparison:  # fmt: skip
    """Return values of all pairs of clients as a comparison, and on which data they were found, if on any."""
    found = find(measure)
    facts = found.facts
    table = Values(
        id=measure, name=found.name, parameters=found.parameters, layers_a=tuple(names), layers_b=tuple(names),
        values=values, higher_is_closer=facts.higher_is_closer, bounds=facts.bounds, symmetric=True,
        conventions=f"{facts.convention}; mean over the layers".lstrip("; "), statistic=statistic,
        axes=("network", "network"), unit=facts.unit,
    )  # fmt: skip
    widths = dict.fromkeys(names, 0)
    return Comparison(
        a="clients", b="clients", layers_a=tuple(names), layers_b=tuple(names), tables={measure: table}, shapes_a={},
        shapes_b={}, widths_a=widths, widths_b=widths, data=data, examples=examples, seed=0, version=__version__,
        warnings=warnings,
    )  # fmt: skip


def _by_atoms(federation: Federation, measure: str, gauge: str) -> np.ndarray:
    layers = [_unit(name, federation, gauge) for name, part in federation.parts.items() if part == "atoms"]
    if not layers:
        raise ValueFault(
            f"the clients' networks have no atoms that {measure!r} could compare; federate a network made by "
            "`nk.decompose`, or name another measure."
        )
    own = next((n for n, part in federation.parts.items() if part == "coefficients" and n in federation.personal), None)
    if own is not None:
        raise NoValue(
            f"the clients have coefficients of their own, as {own!r}, so that their atoms can't be compared; federate "
            "with `coefficients=`, by which they are shared."
        )
    if not any(federation.parts[name] == "atoms" for name in federation.personal):
        raise NoValue(
            "all clients have the same atoms, which tell nothing of them; federate with `coefficients=`, by which they "
            "are personal, or with `finetune=`."
        )
    if measure == "atom_cosine":
        return mean_cosines(torch.cat(layers, 1), len(layers)).numpy()
    return torch.stack([angles(x) for x in layers]).mean(0).numpy()


def _caution(federation: Federation) -> str:
    """Return a sentence where coefficients that all share are far from orthonormal."""
    known = {name: one for name, one in federation.shared.items() if federation.parts[name] == "coefficients"}
    flat = {name: torch.from_numpy(np.array(one, dtype=np.float64)).flatten(1) for name, one in known.items()}
    return gauge_caution({f"layer {name.rpartition('.')[0]!r}": A @ A.T for name, A in flat.items()})


def _unit(name: str, federation: Federation, gauge: str) -> Tensor:
    """Return the atoms of one layer of all clients as unit vectors, a row each."""
    count = len(federation.clients)
    held = federation.personal.get(name)
    rows = np.broadcast_to(federation.shared[name], (count, *federation.shared[name].shape)) if held is None else held
    found = torch.from_numpy(np.array(rows, dtype=np.float64)).flatten(2)
    alpha = federation.shared.get(f"{name.removesuffix('atoms')}coefficients")
    if gauge == "orthonormal" and alpha is not None:
        found = orthonormal_gauge(found, torch.from_numpy(np.array(alpha)))
    found = found.flatten(1)
    size = found.norm(dim=1, keepdim=True)
    if not bool((size > 0).all()):
        client = federation.clients[int((size.flatten() == 0).nonzero()[0])]
        raise NoValue(f"the atoms {name!r} of client {client!r} are all zero, and have no cosine with others.")
    return found / size


def _by_networks(
    federation: Federation, measure: str, like: nn.Module | None, data: Any, progress: ProgressOption
) -> Comparison:
    if like is None:
        raise ValueFault(f"{measure!r} compares the clients' networks; give `like=`, the network that was federated.")
    names, facts = federation.clients, find(measure).facts
    itself = facts.bounds[1] if facts.higher_is_closer else facts.bounds[0]
    if not facts.symmetric or not np.isfinite(itself):
        why = (
            "gives each direction a value of its own"
            if not facts.symmetric
            else "has no value of a network with itself"
        )
        raise ValueFault(f"{measure!r} {why}, and clients are compared by one number for each pair; take 'cka'.")
    models = {name: federation.model(name, like).eval() for name in names}
    many = compare_many(models, data, measure, pairs="corresponding", progress=progress)
    found = many.summary()
    np.fill_diagonal(found, itself)
    if np.isnan(found).any():
        i, j = np.argwhere(np.isnan(found))[0]
        raise NoValue(f"{measure!r} has no value for {names[i]!r} and {names[j]!r} at any layer.")
    one = next(iter(many.values()))
    told = tuple(dict.fromkeys(text for pair in many.values() for text in (*_left_out(pair), *pair.warnings)))[:3]
    return _as_comparison(
        names, found, measure, one.table().statistic, data=one.data, examples=one.examples, warnings=told
    )


def _left_out(pair: Comparison) -> list[str]:
    """Return which layer the mean is taken without, if any has no value."""
    holes = [(layer, why) for (layer, other), why in pair.table().holes.items() if layer == other]
    return [f"means are without layer {layer!r}, where there is no value: {why}" for layer, why in holes[:1]]


def user_clusters(similarity: Comparison | np.ndarray, count: int | None = None) -> tuple[int, ...]:
    """Return the cluster of each client, numbered from 0 in the order of the clients, by average linkage.

    Without `count` there are as many clusters as give the largest mean silhouette, at least two.

    Example:
        >>> alike = np.array([[1, 0.9, 0.1, 0.2], [0.9, 1, 0.2, 0.1], [0.1, 0.2, 1, 0.8], [0.2, 0.1, 0.8, 1]])
        >>> user_clusters(alike)
        (0, 0, 1, 1)
    """
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
    total = 0.0
    for k, own in enumerate(labels):
        same = (labels == own) & (np.arange(len(labels)) != k)
        if same.any():
            a = apart[k, same].mean()
            b = min(apart[k, labels == other].mean() for other in set(labels.tolist()) - {own})
            total += (b - a) / max(a, b, 1e-300)
    return total / len(labels)
