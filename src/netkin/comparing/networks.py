"""Similarity of many networks by their atoms: all pairs from one product, or the nearest neighbours of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.arrays import require_finite
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean, require_at_least
from netkin.identity import with_call
from netkin.measures.linear import angles, mean_cosines, nearest
from netkin.measures.registry import find
from netkin.progress import ProgressOption, command, showing, with_progress
from netkin.representations.filters import atom_layers
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat
from netkin.sources.names import by_name
from netkin.sources.weights import random_weights
from netkin.statistics.layer_filters import gauge_caveat, orthonormal_gauge, require_gauge

ATOM_MEASURES = ("atom_cosine", "atom_angular")
AtomParts = tuple[Tensor, Tensor | None]  # atoms, and coefficients where they are known


@dataclass(frozen=True, eq=False)
class AtomVectors:
    """The atoms of many networks that share coefficients: a row each, with a unit vector for each layer."""

    names: tuple[str, ...]
    layers: tuple[str, ...]
    sizes: tuple[int, ...]  # numbers in each layer's atoms
    rows: Tensor
    caveat: Caveat | None = None  # where the cosines depend on how filters were split
    drawn: Mapping[str, str] = field(default_factory=dict)  # what provenance says of random weights

    def of(self, layer: str) -> Tensor:
        """Return the unit vectors of one layer."""
        return self.rows.split(self.sizes, 1)[self.layers.index(layer)]


@dataclass(frozen=True, eq=False)
class NearestNetworks:
    """For each network the most similar others, the nearest first: their places and mean cosines, N × k each."""

    names: tuple[str, ...]
    layers: tuple[str, ...]
    places: np.ndarray
    values: np.ndarray

    def __getitem__(self, name: str) -> list[tuple[str, float]]:
        """Return the most similar networks of one, each with its mean cosine."""
        if name not in self.names:
            raise UnknownName(f"no network named {name!r} here{did_you_mean(name, self.names) or '.'}")
        row = self.names.index(name)
        pairs = zip(self.places[row].tolist(), self.values[row].tolist(), strict=True)
        return [(self.names[place], value) for place, value in pairs]

    def __str__(self) -> str:
        lines = {name: ", ".join(f"{other} {value:.3f}" for other, value in self[name]) for name in self.names}
        return "\n".join(f"{name}: {others}" for name, others in lines.items())


@with_call
@by_name(models="models")
def atom_similarity(
    models: Mapping[str, Any] | Iterable[Any],
    measures: str = "atom_cosine",
    *,
    gauge: str = "stored",
    by_layer: bool = False,
    progress: ProgressOption = None,
) -> Comparison:
    """Return how similar networks with shared coefficients are: networks in rows and columns, without any data.

    The value of two networks is the plain mean over their layers. All pairs come from one product of matrices.

    Args:
        models: networks with `AtomConv2d` layers, or their state dicts, by name or in a row; each is read once. Where
            all are state dicts without coefficients, as a store of atoms has them, these are taken to be shared.
        measures: "atom_cosine" or "atom_angular".
        gauge: "stored" for the atoms as they are, "orthonormal" for those that go with orthonormal coefficients.
        by_layer: whether there is a table for each layer too.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> from netkin.representations.filters import AtomConv2d
        >>> nets = [nn.Sequential(AtomConv2d(3, 8, 3, atoms=4)) for _ in range(3)]
        >>> for net in nets:
        ...     _ = net[0].coefficients.data.copy_(nets[0][0].coefficients)
        >>> round(atom_similarity(nets)["0", "0"], 6)
        1.0
    """
    measure = measures
    if measure not in ATOM_MEASURES:
        raise UnknownName(
            f"all pairs at once are there by {' or '.join(map(repr, ATOM_MEASURES))}; got {measure!r}. "
            "`nk.compare_many` takes any measure."
        )
    vectors = atom_vectors(models, gauge=gauge, progress=progress)
    whole = {f"{measure}(gauge=orthonormal)" if gauge != "stored" else measure: _of_all(vectors, measure)}
    apart = {f"{measure} of {layer}": _values(vectors.of(layer), measure) for layer in vectors.layers if by_layer}
    tables = {name: _table(name, values, vectors, measure, gauge) for name, values in (whole | apart).items()}
    return Comparison(
        a="networks", b="networks", layers_a=vectors.names, layers_b=vectors.names, tables=tables,
        shapes_a={}, shapes_b={}, widths_a=dict.fromkeys(vectors.names, vectors.rows.shape[1]),
        widths_b=dict.fromkeys(vectors.names, vectors.rows.shape[1]), data="", examples=0, seed=0, version=__version__,
        caveats=() if vectors.caveat is None else (vectors.caveat,),
        provenance={"call": command(), "layers": ", ".join(vectors.layers), "gauge": gauge} | dict(vectors.drawn),
    )  # fmt: skip


@by_name(models="models")
def nearest_networks(
    models: Mapping[str, Any] | Iterable[Any], k: int = 5, *, gauge: str = "stored", progress: ProgressOption = None
) -> NearestNetworks:
    """Return the `k` most similar others of each network by mean `atom_cosine`, without the matrix of all pairs.

    `models` and `gauge` are as in `atom_similarity`.
    """
    vectors = atom_vectors(models, gauge=gauge, progress=progress)
    require_at_least(1, len(vectors.names) - 1, k=k)
    places, values = nearest(vectors.rows, len(vectors.layers), k)
    return NearestNetworks(vectors.names, vectors.layers, places.numpy(), values.numpy())


def atom_vectors(
    models: Mapping[str, Any] | Iterable[Any], *, gauge: str = "stored", progress: ProgressOption = None
) -> AtomVectors:
    """Return the atoms of networks, which must share their coefficients; each network is read once, one at a time."""
    require_gauge(gauge)
    if isinstance(models, nn.Module):
        raise InvalidValue("`models` are several networks, by name or in a row; got one.", argument="models")
    networks = models.items() if isinstance(models, Mapping) else ((str(k), model) for k, model in enumerate(models))
    names, rows, first = list[str](), list[Tensor](), dict[str, AtomParts]()
    total, drawn = len(models) if isinstance(models, Sized) else None, list[str]()
    with showing(progress):
        for name, model in with_progress(networks, "reading atoms", "networks", total=total):
            layers = _parts(name, model)
            first = first or layers
            _require_same_form(name, layers, names[0] if names else name, first)
            names.append(name)
            drawn += random_weights([model]).values()
            rows.append(torch.cat([_unit(name, layer, *parts, gauge) for layer, parts in layers.items()]))
    if len(names) < 2:
        raise InvalidValue(f"a similarity needs two networks or more; got {len(names)}.", argument="models")
    sizes = tuple(atoms.numel() for atoms, _ in first.values())
    return AtomVectors(
        tuple(names), tuple(first), sizes, torch.stack(rows), _caveat(first) if gauge == "stored" else None,
        {"random weights": " ".join(drawn)} if drawn else {},
    )  # fmt: skip


def _caveat(first: Mapping[str, AtomParts]) -> Caveat | None:
    known = {
        f"layer {layer!r}": alpha.cpu().double().flatten(1) for layer, (_, alpha) in first.items() if alpha is not None
    }
    return gauge_caveat({layer: A @ A.T for layer, A in known.items()})


def _parts(name: str, model: Any) -> dict[str, AtomParts]:
    """Return the atoms and coefficients of each layer of a network or of its state dict."""
    layers: dict[str, AtomParts]
    if isinstance(model, nn.Module):
        layers = {layer: (module.atoms.detach(), module.coefficients.detach()) for layer, module in atom_layers(model)}
    elif isinstance(model, Mapping):
        layers = dict(_of_state(model))
    else:
        raise InvalidValue(f"{name!r} must be a torch module or a state dict; got {type(model).__name__}.")
    if not layers:
        raise InvalidValue(
            f"{name!r} has no layers made of atoms; `nk.share_coefficients` gives networks of one architecture some.",
            argument="atoms",
        )
    return layers


def _of_state(state: Mapping[str, Tensor]) -> Iterator[tuple[str, AtomParts]]:
    for key, tensor in state.items():
        layer, _, weight = key.rpartition(".")
        alpha = state.get(f"{layer}.coefficients" if layer else "coefficients")
        if weight == "atoms":
            yield layer, (tensor.detach(), None if alpha is None else alpha.detach())


def _require_same_form(name: str, layers: Mapping[str, Any], before: str, first: Mapping[str, Any]) -> None:
    """Refuse a network whose layers, atoms or coefficients are not those of the first one."""
    if list(layers) != list(first):
        apart = sorted(set(layers) ^ set(first)) or list(layers)
        raise ShapeError(f"{name!r} and {before!r} must have the same layers of atoms; they differ in {apart[0]!r}.")
    for layer, (atoms, alpha) in layers.items():
        D, A = first[layer]
        if atoms.shape != D.shape:
            raise ShapeError(
                f"layer {layer!r} has atoms of {times(atoms.shape)} in {name!r} and {times(D.shape)} in {before!r}; "
                "compare networks with as many atoms of one kernel size."
            )
        if not _same(alpha, A):
            raise NoValue(
                f"layer {layer!r} has coefficients of its own in {name!r}, other than in {before!r}, so that their "
                "atoms can't be compared; `nk.share_coefficients` makes networks that share them."
            )


def _same(alpha: Tensor | None, other: Tensor | None) -> bool:
    """Return whether coefficients are the same; those of networks that hold their atoms alone are taken to be."""
    if alpha is None or other is None:
        return alpha is other
    if (alpha.data_ptr(), alpha.device, alpha.stride()) == (other.data_ptr(), other.device, other.stride()):
        return alpha.shape == other.shape
    return alpha.shape == other.shape and torch.equal(alpha.to(other.device), other)


def _unit(name: str, layer: str, atoms: Tensor, alpha: Tensor | None, gauge: str) -> Tensor:
    require_finite(atoms, f"the atoms of layer {layer!r} of {name!r}")
    D = atoms.double().cpu().flatten(1)
    if gauge == "orthonormal":
        if alpha is None:
            raise InvalidValue(f"{name!r} holds atoms alone, and gauge='orthonormal' needs their coefficients too.")
        D = orthonormal_gauge(D, alpha)
    size = D.norm()
    if not bool(size > 0):
        raise NoValue(f"the atoms of layer {layer!r} of {name!r} are all zero, and have no cosine with others.")
    return (D / size).flatten()


def _of_all(vectors: AtomVectors, measure: str) -> np.ndarray:
    if measure == "atom_cosine":
        return mean_cosines(vectors.rows, len(vectors.layers)).numpy()
    return np.mean([_values(vectors.of(layer), measure) for layer in vectors.layers], axis=0)


def _values(units: Tensor, measure: str) -> np.ndarray:
    return (mean_cosines(units, 1) if measure == "atom_cosine" else angles(units)).numpy()


def _table(name: str, values: np.ndarray, vectors: AtomVectors, measure: str, gauge: str) -> Values:
    declared = find(measure).quantity
    convention = declared.convention + ("" if " of " in name else f"; mean over {len(vectors.layers)} layers")
    return Values(
        quantity=replace(declared, id=name, parameters={"gauge": gauge}, symmetric=True, convention=convention),
        layers_a=vectors.names, layers_b=vectors.names, values=values, statistic="Filters",
        axes=("network", "network"),
    )  # fmt: skip


def times(shape: Iterable[int]) -> str:
    """Return a shape as text, such as "3 × 3"."""
    return " × ".join(map(str, shape))
