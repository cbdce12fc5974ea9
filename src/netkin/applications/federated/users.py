"""Users: how alike clients are by a named measure, and which groups they form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.comparing.compare import compare_many
from netkin.errors import NoValue, ValueFault
from netkin.measures.filter_subspaces import angles, mean_cosines
from netkin.measures.registry import find
from netkin.progress import ProgressOption
from netkin.results import Comparison, Values
from netkin.results.federation import Federation
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
    return as_comparison(federation.clients, values, name, "Filters", warnings=(caution,) * bool(caution))


def as_comparison(
    names: Sequence[str], values: np.ndarray, measure: str, statistic: str, data: str = "", examples: int = 0,
    *, warnings: tuple[str, ...] = (),
) -> Comparison:  # fmt: skip
    """Return values of all pairs of clients as a comparison, and on which data they were found, if on any."""
    found = find(measure)
    facts = found.facts
    table = Values(
        id=measure, name=found.name, parameters=found.parameters, layers_a=tuple(names), layers_b=tuple(names),
        values=values, higher_is_closer=facts.higher_is_closer, bounds=facts.bounds, symmetric=True,
        conventions=f"{facts.convention}; mean over the layers".lstrip("; "), statistic=statistic,
        axes=("network", "network"), unit=facts.unit, means=facts.means, cannot_see=facts.cannot_see,
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
    return as_comparison(
        names, found, measure, one.table().statistic, data=one.data, examples=one.examples, warnings=told
    )


def _left_out(pair: Comparison) -> list[str]:
    """Return which layer the mean is taken without, if any has no value."""
    holes = [(layer, why) for (layer, other), why in pair.table().holes.items() if layer == other]
    return [f"means are without layer {layer!r}, where there is no value: {why}" for layer, why in holes[:1]]
