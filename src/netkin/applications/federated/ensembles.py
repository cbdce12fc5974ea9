"""Similar clients by a named measure, and ensembles of their networks, each with heads tuned on its own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.experiment import DECLARED, Experiment
from netkin.applications.federated.algorithms import head_of, mixed
from netkin.applications.federated.local_training import (
    LocalTraining,
    checked_clients,
    load_state,
    state_of,
)
from netkin.comparing.many_models import compare_many
from netkin.comparing.networks import ATOM_MEASURES, atom_similarity
from netkin.comparing.spec import take_declared, takes_options
from netkin.errors import ForwardError, InvalidValue, NoValue, UnknownName, require_at_least, require_listed
from netkin.identity import with_call
from netkin.measures.registry import find
from netkin.progress import ProgressOption, with_progress
from netkin.representations.layers import unwrapped
from netkin.results import Comparison
from netkin.results.federation import Federation
from netkin.results.records import FrozenRecord
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Recipe
from netkin.training.heads import before_head, ensemble_accuracy, probabilities
from netkin.training.many import require_method
from netkin.training.recipe import recipe_of

CHOICES = ("similar", "random", "dissimilar")
ClientMember = tuple[str, str]  # a client, and a member of its ensemble
USUAL = Recipe(epochs=100, lr=0.01, batch=32)  # section A.2: 100 epochs


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
    if measures in ATOM_MEASURES:
        return atom_similarity(_atoms_of_clients(federation), measures, gauge=gauge, progress=progress)
    if like is None:
        raise InvalidValue(
            f"{measures!r} compares the clients' networks; give `like=`, the network that was federated.",
            argument="like",
        )
    if not find(measures).facts.symmetric:
        raise InvalidValue(
            f"{measures!r} gives each direction a value of its own, and clients are compared by one number for each "
            "pair; take 'cka'.",
            argument="measures",
        )
    models = {name: federation.model(name, like).eval() for name in federation.clients}
    return compare_many(models, data, measures, pairs="corresponding", progress=progress).summaries()


def _atoms_of_clients(federation: Federation) -> dict[str, dict[str, Tensor]]:
    """Return the atoms of each client, and the coefficients that all share; what can't be compared is refused."""
    kinds = {name: part for name, part in federation.parts.items() if part in ("atoms", "coefficients")}
    if "atoms" not in kinds.values():
        raise InvalidValue(
            "the clients' networks have no atoms that could be compared; federate a network made by `nk.decompose`, or "
            "name a measure of other things."
        )
    personal = {name: part for name, part in kinds.items() if name in federation.personal}
    own = next((name for name, part in personal.items() if part == "coefficients"), None)
    if own is not None:
        raise NoValue(
            f"the clients have coefficients of their own, as {own!r}, so that their atoms can't be compared; federate "
            "with `coefficients=`, by which they are shared."
        )
    if not personal:
        raise NoValue(
            "all clients have the same atoms, which tell nothing of them; federate with `coefficients=`, by which they "
            "are personal, or with `finetune=`."
        )
    shared = {name: torch.tensor(federation.shared[name]) for name in kinds if name not in personal}
    atoms = {name: torch.tensor(federation.personal[name]) for name in personal}
    return {
        client: {name: atoms[name][row] if name in atoms else shared[name] for name in kinds}
        for row, client in enumerate(federation.clients)
    }


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
        method = f"{most} {self.chosen} clients" + f" by {self.measure}" * (self.chosen != "random")
        return f"ensembles with {method}: mean accuracy {together:.4f}, alone {alone:.4f}\nleaks: {self.leaks}"


@takes_options("test examples transform forward save overwrite partial", DECLARED)
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
    method: str = "auto",
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
        method: as in `nk.train_many`.
        **settings: settings of the recipe.
    """
    require_method(method)
    like = unwrapped(like)
    experiment = Experiment(models={"like": like}, **take_declared(settings, DECLARED))
    train, tests = checked_clients(clients, test)
    _require_same_clients(federation, train, tests, members, choose)
    alike = similarity or federation.similarity
    if alike is None and members and choose != "random":
        alike = user_similarity(federation)
    chosen = _chosen(federation.clients, alike, members, choose, experiment.seed)
    layer = head_of(like, head)
    tuned = recipe_of(recipe or USUAL, settings)
    with experiment.lending(like):
        found = _accuracies(federation, like, layer, train, tests, chosen, tuned, method, experiment.seed)
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


def _require_same_clients(
    federation: Federation,
    train: Mapping[str, LabelledData],
    tests: Mapping[str, LabelledData],
    members: Any,
    choose: str,
) -> None:
    if set(train) != set(federation.clients):
        apart = sorted(set(train) ^ set(federation.clients))
        raise UnknownName(f"the clients must be those of the federation; they differ in {apart[0]!r}.")
    require_at_least(0, len(federation.clients) - 1, members=members)
    require_listed("choice of members", choose, CHOICES, "choose")
    if not tests:
        raise InvalidValue("ensembles are judged on the clients' test data; give `test`.", argument="test")


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
    tests: Mapping[str, LabelledData], chosen: Mapping[str, tuple[str, ...]], recipe: Recipe, method: str, seed: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return for each client with test data its accuracy alone and in its ensemble; each network is made once."""
    pairs = [(name, member) for name in tests for member in chosen[name]]
    starts, features, seen = (
        dict[ClientMember, StateDict](),
        dict[ClientMember, LabelledData](),
        dict[ClientMember, Tensor](),
    )
    for member in with_progress(list(dict.fromkeys(member for _, member in pairs)), "running networks", "networks"):
        network = federation.model(member, like)
        for pair in (pair for pair in pairs if pair[1] == member):
            inputs, labels = train[pair[0]]
            starts[pair] = state_of(network.get_submodule(layer))
            features[pair] = before_head(network, layer, inputs), labels
            seen[pair] = before_head(network, layer, tests[pair[0]][0])
    training, seeds = LocalTraining(like.get_submodule(layer), recipe, method), [mixed(seed, *p, "head") for p in pairs]
    found = training.train([starts[p] for p in pairs], [features[p] for p in pairs], seeds, list(starts[pairs[0]]))
    tuned = dict[ClientMember, StateDict]()
    for pair, outcome in zip(pairs, found, strict=True):
        if isinstance(outcome, str):
            raise ForwardError(f"the head of client {pair[0]!r} with {pair[1]!r}: {outcome}")
        tuned[pair], _ = outcome
    (head,) = training.copies(1)
    accuracies = dict[str, tuple[float, float]]()
    for name, (_, labels) in tests.items():
        answers = []
        for member in chosen[name]:
            load_state(head, tuned[name, member])
            answers.append(probabilities(head, seen[name, member]))
        accuracies[name] = ensemble_accuracy(answers[:1], labels), ensemble_accuracy(answers, labels)
    return accuracies
