"""Similar clients by a named measure, and ensembles of their networks, each with heads tuned on its own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.applications.federated.algorithms import head_of, mixed
from netkin.applications.federated.local_training import (
    LocalTraining,
    checked_clients,
    load_state,
    refuse_way,
    state_of,
)
from netkin.comparing.many_models import compare_many
from netkin.errors import ForwardError, InvalidValue, NoValue, UnknownName
from netkin.identity import with_call
from netkin.measures.linear import angles, mean_cosines
from netkin.measures.registry import find
from netkin.progress import ProgressOption, command, reported, showing
from netkin.representations.inputs import device_of, dtype_of
from netkin.representations.layers import unwrapped
from netkin.results import Comparison, Values
from netkin.results.caveats import Caveat, grouped
from netkin.results.federation import Federation
from netkin.results.records import FrozenRecord
from netkin.settings import evaluating
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.statistics.layer_filters import gauge_caveat, orthonormal_gauge, require_gauge
from netkin.training import Recipe
from netkin.training.example_order import in_order, placed
from netkin.training.recipe import recipe_of

BY_ATOMS = ("atom_cosine", "atom_angular")
CHOICES = ("similar", "random", "dissimilar")
ClientMember = tuple[str, str]  # a client, and a member of its ensemble
USUAL = Recipe(epochs=100, rate=0.01, batch=32)  # section A.2: 100 epochs


@with_call
def user_similarity(
    federation: Federation,
    measures: str = "atom_cosine",
    *,
    gauge: str = "stored",
    like: nn.Module | None = None,
    data: Any = None,
    progress: ProgressOption = None,
) -> Comparison:
    """Return how similar the networks of all clients are, with the clients in rows and columns.

    `atom_cosine` and `atom_angular` read the personal atoms alone, which each client hands over once: neither data nor
    a network are run. Any other measure compares the clients' networks layer by layer, and its value is the plain mean
    over their layers; those of outputs of layers need examples.

    Args:
        federation: one that has ended.
        measures: the name of a measure.
        gauge: of atoms: "stored" for them as they are, "orthonormal" for those that go with orthonormal coefficients.
        like: the network that was federated, for measures other than of atoms.
        data: examples for measures that need some.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    if len(federation.clients) < 2:
        raise InvalidValue(f"a similarity needs two clients or more; got {len(federation.clients)}.")
    measure = measures
    if measure not in BY_ATOMS:
        return _by_networks(federation, measure, like, data, progress)
    require_gauge(gauge)
    federation.refuse_without_weights()
    name = measure if gauge == "stored" else f"{measure}(gauge={gauge})"
    caveat = _caveat(federation) if gauge == "stored" else None
    values = _by_atoms(federation, measure, gauge)
    return as_comparison(federation.clients, values, name, "Filters", caveats=() if caveat is None else (caveat,))


def as_comparison(
    names: Sequence[str], values: np.ndarray, measure: str, statistic: str, data: str = "", examples: int = 0,
    *, caveats: tuple[Caveat, ...] = (),
) -> Comparison:  # fmt: skip
    """Return values of all pairs of clients as a comparison, and on which data they were found, if on any."""
    found = find(measure)
    convention = f"{found.quantity.convention}; mean over the layers".lstrip("; ")
    quantity = replace(found.quantity, id=measure, parameters=found.parameters, symmetric=True, convention=convention)
    table = Values(
        quantity=quantity, layers_a=tuple(names), layers_b=tuple(names), values=values, statistic=statistic,
        axes=("network", "network"),
    )  # fmt: skip
    widths = dict.fromkeys(names, 0)
    return Comparison(
        a="clients", b="clients", layers_a=tuple(names), layers_b=tuple(names), tables={measure: table}, shapes_a={},
        shapes_b={}, widths_a=widths, widths_b=widths, data=data, examples=examples, seed=0, version=__version__,
        caveats=caveats, provenance={"call": command()} if command() else {},
    )  # fmt: skip


def _by_atoms(federation: Federation, measure: str, gauge: str) -> np.ndarray:
    layers = [_unit(name, federation, gauge) for name, part in federation.parts.items() if part == "atoms"]
    if not layers:
        raise InvalidValue(
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


def _caveat(federation: Federation) -> Caveat | None:
    """Return a caveat where coefficients that all share are far from orthonormal."""
    known = {name: one for name, one in federation.shared.items() if federation.parts[name] == "coefficients"}
    flat = {name: torch.from_numpy(np.array(one, dtype=np.float64)).flatten(1) for name, one in known.items()}
    return gauge_caveat({f"layer {name.rpartition('.')[0]!r}": A @ A.T for name, A in flat.items()})


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
        client = federation.clients[int((~(size.flatten() > 0)).nonzero()[0])]
        why = "are all zero or not finite, and have no cosine with others"
        raise NoValue(f"the atoms {name!r} of client {client!r} {why}.")
    return found / size


def _by_networks(
    federation: Federation, measure: str, like: nn.Module | None, data: Any, progress: ProgressOption
) -> Comparison:
    if like is None:
        raise InvalidValue(f"{measure!r} compares the clients' networks; give `like=`, the network that was federated.")
    names, facts = federation.clients, find(measure).facts
    itself = facts.bounds[1] if facts.higher_is_closer else facts.bounds[0]
    if not facts.symmetric or not np.isfinite(itself):
        why = (
            "gives each direction a value of its own"
            if not facts.symmetric
            else "has no value of a network with itself"
        )
        raise InvalidValue(f"{measure!r} {why}, and clients are compared by one number for each pair; take 'cka'.")
    models = {name: federation.model(name, like).eval() for name in names}
    many = compare_many(models, data, measure, pairs="corresponding", progress=progress)
    found = many.summary()
    np.fill_diagonal(found, itself)
    if np.isnan(found).any():
        i, j = np.argwhere(np.isnan(found))[0]
        raise NoValue(f"{measure!r} has no value for {names[i]!r} and {names[j]!r} at any layer.")
    one = next(iter(many.values()))
    caveats = grouped(caveat for pair in many.values() for caveat in (*_left_out(pair), *pair.caveats))[:3]
    return as_comparison(
        names, found, measure, one.table().statistic, data=one.data, examples=one.examples, caveats=caveats
    )


def _left_out(pair: Comparison) -> list[Caveat]:
    """Return which layer the mean is taken without, if any has no value."""
    missing = [(layer, why) for (layer, other), why in pair.table().missing.items() if layer == other]
    sentences = [f"means are without layer {layer!r}, where there is no value: {why}" for layer, why in missing[:1]]
    return [Caveat("layer-without-value", sentence) for sentence in sentences]


def with_similarity(found: Federation) -> Federation:
    """Return the federation with its clients' similarity by atoms, where these are their own and comparable."""
    parts = {found.parts[name] for name in found.personal}
    if "atoms" not in parts or "coefficients" in parts or len(found.clients) < 2:
        return found
    try:
        alike: Comparison = user_similarity(found)
    except NoValue as fault:  # atoms that are all zero, as one client has them: the federation is worth keeping
        return replace(found, provenance={**found.provenance, "no similarity": str(fault)})
    return replace(found, similarity=alike)


@dataclass(frozen=True, eq=False)
class Ensembles(FrozenRecord):
    """What ensembles of networks gave: of each client its members, itself first, and accuracies on its test data.

    `alone` is the accuracy of the client's own network with its head tuned as in the ensemble, so that `together` is
    not better for the extra training alone. `numbers` is how many numbers each client receives of others, and `leaks`
    what that gives away.
    """

    measure: str
    chosen: str
    members: Mapping[str, tuple[str, ...]]
    alone: Mapping[str, float]
    together: Mapping[str, float]
    numbers: int
    leaks: str

    @property
    def gain(self) -> float:
        """By how much the ensembles are better than their first members, in the mean over the clients."""
        return float(np.mean([self.together[name] - self.alone[name] for name in self.together]))

    def __str__(self) -> str:
        alone, together = (np.mean(list(part.values())) for part in (self.alone, self.together))
        most = max((len(one) - 1 for one in self.members.values()), default=0)
        how = f"{most} {self.chosen} clients" + f" by {self.measure}" * (self.chosen != "random")
        return f"ensembles with {how}: mean accuracy {together:.4f}, alone {alone:.4f}\nleaks: {self.leaks}"


def similar_users_ensemble(
    federation: Federation,
    like: nn.Module,
    clients: Any,
    test: Any,
    *,
    members: int = 3,
    similarity: Comparison | None = None,
    choose: str = "similar",
    head: str | None = None,
    recipe: Recipe | None = None,
    how: str = "auto",
    seed: int = 0,
    progress: ProgressOption = None,
    **settings: Any,
) -> Ensembles:
    """Return how well each client does with an ensemble of its network and those of the most similar clients.

    The head of each member is tuned on the client's own data, while all else is held, in evaluation mode; the
    ensemble's prediction is the mean of its members' probabilities.

    Args:
        federation: one that has ended.
        like: the network that was federated.
        clients: the clients' examples, as in `federate`.
        test: their test data.
        members: how many other clients join each; 0 tunes the head alone.
        similarity: between the clients, by any measure; that of the federation if not given.
        choose: "similar" clients, or as controls "random" or the most "dissimilar" ones.
        head: the layer that is tuned, the last of the network; by default the last `nn.Linear`.
        recipe: how heads are tuned; 100 epochs at a rate of 0.01 if not given.
        how: as in `nk.train_many`.
        seed: of the random choice, and of the order of examples.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        **settings: settings of the recipe.
    """
    refuse_way(how)
    like = unwrapped(like)
    train, tests = checked_clients(clients, test)
    _refuse_others(federation, train, tests, members, choose)
    alike = similarity or federation.similarity
    if alike is None and members and choose != "random":
        alike = user_similarity(federation)
    chosen = _chosen(federation.clients, alike, members, choose, seed)
    layer = head_of(like, head)
    tuned = recipe_of(recipe or USUAL, settings)
    with showing(progress):
        found = _accuracies(federation, like, layer, train, tests, chosen, tuned, how, seed)
    alone, together = ({name: pair[k] for name, pair in found.items()} for k in (0, 1))
    numbers = members * sum(one[0].size for one in federation.personal.values())
    leaks = "Each client's personal weights go to every client whose ensemble it joins, which can run its network."
    return Ensembles(
        "" if alike is None else alike.measures[0],
        choose,
        chosen,
        alone,
        together,
        numbers,
        leaks if members else "Nothing travels.",
    )


def _refuse_others(
    federation: Federation,
    train: Mapping[str, LabelledData],
    tests: Mapping[str, LabelledData],
    members: Any,
    choose: str,
) -> None:
    if set(train) != set(federation.clients):
        apart = sorted(set(train) ^ set(federation.clients))
        raise UnknownName(f"the clients must be those of the federation; they differ in {apart[0]!r}.")
    most = len(federation.clients) - 1
    if isinstance(members, bool) or not isinstance(members, int) or not 0 <= members <= most:
        raise InvalidValue(f"`members` is a number of other clients, 0 to {most}; got {members!r}.", argument="members")
    if choose not in CHOICES:
        raise UnknownName(f"members are chosen as {', '.join(map(repr, CHOICES))}; got {choose!r}.")
    if not tests:
        raise InvalidValue("ensembles are judged on the clients' test data; give `test`.")


def _chosen(
    names: Sequence[str], alike: Comparison | None, members: int, choose: str, seed: int
) -> dict[str, tuple[str, ...]]:
    """Return the members of each client's ensemble: itself, and others by their similarity or at random."""
    found = dict[str, tuple[str, ...]]()
    for name in names:
        others = [one for one in names if one != name]
        if alike is None or choose == "random":
            generator = torch.Generator().manual_seed(mixed(seed, name, "members"))
            order = torch.randperm(len(others), generator=generator).numpy()
        else:
            table = alike.table()
            sign = -1 if table.higher_is_closer == (choose == "similar") else 1
            order = np.argsort([sign * table[name, one] for one in others], kind="stable")
        found[name] = (name, *(others[place] for place in order[:members]))
    return found


def _accuracies(
    federation: Federation, like: nn.Module, layer: str, train: Mapping[str, LabelledData],
    tests: Mapping[str, LabelledData], chosen: Mapping[str, tuple[str, ...]], recipe: Recipe, how: str, seed: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return for each client with test data its accuracy alone and in its ensemble; each network is made once."""
    pairs = [(name, member) for name in tests for member in chosen[name]]
    starts, features, seen = (
        dict[ClientMember, StateDict](),
        dict[ClientMember, LabelledData](),
        dict[ClientMember, Tensor](),
    )
    for member in reported(list(dict.fromkeys(member for _, member in pairs)), "running networks", "networks"):
        network = federation.model(member, like)
        for pair in (pair for pair in pairs if pair[1] == member):
            inputs, labels = train[pair[0]]
            starts[pair] = state_of(network.get_submodule(layer))
            features[pair] = before_head(network, layer, inputs), labels
            seen[pair] = before_head(network, layer, tests[pair[0]][0])
    training, seeds = LocalTraining(like.get_submodule(layer), recipe, how), [mixed(seed, *p, "head") for p in pairs]
    found = training.train([starts[p] for p in pairs], [features[p] for p in pairs], seeds, list(starts[pairs[0]]))
    heads = dict(zip(pairs, found, strict=True))
    failed = next((f"{pair[0]!r} with {pair[1]!r}: {one}" for pair, one in heads.items() if isinstance(one, str)), None)
    if failed is not None:
        raise ForwardError(f"the head of client {failed}")
    (head,) = training.copies(1)
    return {name: _accuracies_of(head, [(heads[name, member], seen[name, member]) for member in chosen[name]], labels)
            for name, (_, labels) in tests.items()}  # fmt: skip


@torch.no_grad()
def _accuracies_of(head: nn.Module, members: Sequence[tuple[Any, Tensor]], labels: Tensor) -> tuple[float, float]:
    """Return the accuracy of the first member, and of the mean of all members' probabilities."""
    shares = []
    for (state, _), features in members:
        load_state(head, state)
        with evaluating(head):
            shares.append(head(features).double().softmax(-1).cpu())
    return _share(shares[0].argmax(-1), labels), _share(torch.stack(shares).mean(0).argmax(-1), labels)


def _share(predicted: Tensor, labels: Tensor) -> float:
    return float((predicted == labels.cpu()).double().mean())


@torch.no_grad()
def before_head(model: nn.Module, head: str, inputs: Tensor) -> Tensor:
    """Return what a model gives to its head, in evaluation mode; a layer whose output is not the model's is refused."""
    seen: dict[str, Any] = {}

    def see(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        seen["input"], seen["output"] = given[0], output

    handle, found = model.get_submodule(head).register_forward_hook(see), list[Tensor]()
    try:
        with evaluating(model):
            for batch in in_order(inputs):
                seen.clear()
                output = model(placed(batch, device_of(model), dtype_of(model)))
                if not seen or not torch.equal(seen["output"], output):
                    raise InvalidValue(f"the head must be the last layer of the network, and {head!r} is not.")
                found.append(seen["input"])
    finally:
        handle.remove()
    return torch.cat(found)
