"""`federate`: clients that train one network together, each on its own data, in a simulation of many at once.

`split_by_classes` gives each client examples of a few classes.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netkin import files
from netkin.applications.federated.algorithms import plan_for
from netkin.applications.federated.local_training import as_examples, checked_clients, refuse_way
from netkin.applications.federated.simulation import FederationRequest, Simulation, Wire, plain_wire
from netkin.errors import ForwardError, ShapeError, UnknownName, ValueFault, refuse_below
from netkin.identity import described_call
from netkin.jobs import Job
from netkin.progress import ProgressOption, showing
from netkin.representations.inputs import device_of, dtype_of
from netkin.representations.layers import refuse_lazy, unwrapped
from netkin.results.federation import KIND, Federation
from netkin.settings import evaluating
from netkin.sources.batches import LabelledData
from netkin.sources.names import by_name
from netkin.training import Recipe
from netkin.training.example_order import placed
from netkin.training.recipe import recipe_of

USUAL = Recipe(epochs=1, rate=0.01, momentum=0.9, batch=32)  # rate and momentum of section A.2


@by_name(models="model")
def federate(
    model: nn.Module,
    clients: Any,
    algorithm: str = "fedavg",
    *,
    test: Any = None,
    test_every: int | None = None,
    coefficients: str | None = None,
    rounds: int = 10,
    share: float = 1.0,
    recipe: Recipe | None = None,
    head: str | None = None,
    pull: float = 0.1,
    head_epochs: int | None = None,
    public: Any = None,
    pretrain_epochs: int = 10,
    finetune: int = 0,
    wire: Wire | None = None,
    how: str = "auto",
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: ProgressOption = None,
    **settings: Any,
) -> Federation:
    """Let clients train a network together, each on its own data, and return what became of them.

    In each round some clients receive what is shared, train, and send it back; the server takes the mean, weighted by
    numbers of examples. The model itself is left alone. Clients train at once, stacked where that is faster; the
    numbers are those of one by one up to rounding. A client that drops out, fails, sends NaN or other shapes, or comes
    late leaves the round to the others and is named in the result.

    With `coefficients` each client's atoms are its own: the network is made of `AtomConv2d`, as `nk.decompose` makes
    it. They are "fixed" (as the model has them, random in a new network), "pretrained" (on `public` data, then fixed),
    "evolving" (they travel and are averaged after each round), or "federated" (all travels as the algorithm has it,
    and atoms become personal by `finetune`). "local" with "evolving" ones is the paper's own method, in which nothing
    else travels.

    Args:
        model: the network that all clients begin with, on the device on which they train.
        clients: a mapping from names to arrays ``(inputs, labels)``, or a list of these.
        algorithm: "fedavg", "fedprox", "fedper", "fedrep", "ditto", "local" or "pretrain".
        test: test data of each client in the same form, or one ``(inputs, labels)`` for all.
        test_every: test all clients after every so many rounds too; by default at the end alone.
        coefficients: None, "fixed", "pretrained", "evolving" or "federated".
        rounds: how many rounds there are.
        share: which share of the clients is drawn for each round.
        recipe: how a client trains in a round; one epoch at a rate of 0.01 with momentum 0.9 if not given.
        head: the layer that is the head; by default the last `nn.Linear`.
        pull: the factor of ½ ‖w − w received‖² in the loss of "fedprox" and of "ditto"'s personal networks.
        head_epochs: for how many epochs "fedrep" trains what is personal first; as in the recipe if not given.
        public: arrays ``(inputs, labels)`` for pretraining.
        pretrain_epochs: the number of epochs of that pretraining.
        finetune: for how many epochs each client trains by itself at last: atoms and head, or without atoms all.
        wire: a function of a `ClientUpdate` that returns those that arrive at the server then, for trials with faults.
        how: "auto", "stacked" or "one by one", as in `nk.train_many`.
        seed: from which the draws of clients and the order of their examples follow.
        save: a file for the result; the same call resumes from it after an interruption, also with more rounds.
        overwrite: whether something else in the file is deleted, and the work starts again.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        **settings: settings of the recipe.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> own = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(3)]
        >>> found = federate(net, own, "fedavg", rounds=2)
        >>> found.numbers, len(found.rounds)
        (10, 2)
    """
    refuse_lazy(unwrapped(model))
    _refuse_settings(rounds, share, pull, finetune, head_epochs, pretrain_epochs)
    refuse_way(how)
    train_data, tests = checked_clients(clients, test)
    _refuse_no_tests(test_every, tests)
    plan = plan_for(unwrapped(model), algorithm, coefficients, head)
    pretrains = plan.algorithm.pretrains or coefficients == "pretrained"
    asked = FederationRequest(
        model=unwrapped(model), plan=plan, clients=train_data, tests=tests, rounds=rounds, share=share,
        recipe=local_recipe(recipe, settings), pull=pull, head_epochs=head_epochs,
        public=_public(public) if pretrains else None, pretrain_epochs=pretrain_epochs, finetune=finetune,
        test_every=test_every, wire=wire or plain_wire, how=how, seed=seed,
    )  # fmt: skip
    _refuse_misfits(asked)
    files.refuse_output(save, KIND, overwrite=overwrite)
    identity = {} if save is None else asked.identity
    call = described_call("nk.federate", model=model, algorithm=algorithm, coefficients=coefficients, rounds=rounds,
                          share=share, finetune=finetune or None, seed=seed)  # fmt: skip
    with showing(progress), Job.beside(save, KIND, identity, call=call, overwrite=overwrite) as job:
        found = Simulation(asked, job).run(call)
        if save is not None:
            found.save(save, overwrite=overwrite)
    return found


def local_recipe(recipe: Recipe | None, settings: dict[str, Any]) -> Recipe:
    """Return how a client trains in a round: the usual way, or a recipe, with some settings changed."""
    start = USUAL if recipe is None else recipe
    if settings.get("steps") is not None and "epochs" not in settings and recipe is None:
        settings = settings | {"epochs": None}
    return recipe_of(start, settings)


def _public(public: Any) -> LabelledData:
    if public is None:
        raise ValueFault("pretraining needs data that no client owns; give `public=(inputs, labels)`.")
    found = as_examples(public, "`public`")
    if not len(found[1]):
        raise ValueFault("`public` holds no examples.")
    return found


def _refuse_settings(rounds: Any, share: Any, pull: Any, finetune: Any, head_epochs: Any, pretrain_epochs: Any) -> None:
    refuse_below(1, rounds=rounds, pretrain_epochs=pretrain_epochs)
    refuse_below(1, **({} if head_epochs is None else {"head_epochs": head_epochs}))
    refuse_below(0, finetune=finetune)
    if not 0 < share <= 1:
        raise ValueFault(f"`share` is a share of the clients, above 0 and at most 1; got {share!r}.")
    if not 0 <= pull < float("inf"):
        raise ValueFault(f"`pull` must be a number of 0 or more; got {pull!r}.")


def _refuse_no_tests(every: Any, tests: Mapping[str, LabelledData]) -> None:
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueFault(f"`test_every` is a number of rounds, 1 or more; got {every!r}.")
    if every is not None and not tests:
        raise ValueFault("`test_every` needs data to test on; give `test=`.")


@torch.no_grad()
def _refuse_misfits(asked: FederationRequest) -> None:
    """Refuse labels beyond the network's outputs, which on a GPU would end the process."""
    shapes = Counter(tuple(inputs.shape[1:]) for inputs, _ in asked.clients.values())
    usual, _ = shapes.most_common(1)[0]
    inputs = next(one for one, _ in asked.clients.values() if tuple(one.shape[1:]) == usual)
    model = copy.deepcopy(asked.model)
    with evaluating(model):
        try:
            outputs = model(placed(inputs[:2], device_of(model), dtype_of(model)))
        except Exception as fault:
            raise ForwardError(f"the model can't run on the clients' examples of shape {usual}: {fault}") from fault
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        raise ShapeError("a federation trains classifiers, which give a matrix of scores, a row for each example.")
    for name, (_, labels) in [*asked.clients.items(), *asked.tests.items()]:
        if int(labels.max()) >= outputs.shape[1]:
            raise ShapeError(
                f"client {name!r} has labels up to {int(labels.max())}, and the network {outputs.shape[1]} outputs."
            )


DEALS = ("random", "groups")


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """The examples of each client by its name, for training and for tests, and which classes they are of."""

    train: Mapping[str, LabelledData]
    test: Mapping[str, LabelledData]
    classes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {len(self.train[name][1]):,} examples of classes {', '.join(map(str, own))}"
            for name, own in self.classes.items()
        )


def split_by_classes(
    data: Any,
    clients: int,
    classes: int,
    *,
    test: Any = None,
    deal: str = "random",
    equal: bool = False,
    seed: int = 0,
) -> ClientSplit:
    """Return labelled examples split among clients, each of which gets examples of a few classes only.

    No example goes to two clients: those of a class are divided evenly among its clients.

    Args:
        data: arrays ``(inputs, labels)``, or a name as for `nk.load_data`.
        clients: how many clients there are.
        classes: how many classes each has.
        test: arrays to test on, split in the same way, if any.
        deal: "random" draws each client's classes so that all classes have about as many clients; "groups" cuts the
            classes into groups, in order, and gives each group to as many clients, one after the other.
        equal: whether examples are left out so that all clients have as many to train on, of each of their classes.
        seed: of the drawing.

    Example:
        >>> found = split_by_classes((torch.zeros(12, 2), torch.arange(12) % 4), clients=4, classes=2, deal="groups")
        >>> found.classes
        {'0': (0, 1), '1': (0, 1), '2': (2, 3), '3': (2, 3)}
        >>> [len(labels) for _, labels in found.train.values()]
        [3, 3, 3, 3]
    """
    inputs, labels = as_examples(data, "`data`")
    every = labels.unique().tolist()
    _refuse_counts(clients, classes, len(every))
    if deal not in DEALS:
        raise UnknownName(f"classes are dealt by {' or '.join(map(repr, DEALS))}; got deal={deal!r}.")
    generator = torch.Generator().manual_seed(seed)
    held = _grouped(every, clients, classes) if deal == "groups" else _drawn(every, clients, classes, generator)
    names = [str(number) for number in range(clients)]
    train = _dealt(inputs, labels, held, names, generator, equal)
    tests = {} if test is None else _dealt(*as_examples(test, "`test`"), held, names, generator)
    return ClientSplit(train, tests, dict(zip(names, held, strict=True)))


def _refuse_counts(clients: Any, classes: Any, available: int) -> None:
    refuse_below(1, clients=clients, classes=classes)
    if classes > available:
        raise ValueFault(f"a client can't have {classes} classes: the data have {available}.")


def _grouped(every: list[int], clients: int, classes: int) -> list[tuple[int, ...]]:
    groups = [tuple(every[start : start + classes]) for start in range(0, len(every), classes)]
    if len(every) % classes or clients % len(groups):
        raise ValueFault(
            f"{len(every)} classes in groups of {classes} can't be given to {clients} clients, as many to each group; "
            "choose numbers that divide each other, or deal='random'."
        )
    return [group for group in groups for _ in range(clients // len(groups))]


def _drawn(every: list[int], clients: int, classes: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Give each client the classes that have the fewest clients yet, ties drawn at random."""
    taken, found = torch.zeros(len(every)), []
    for _ in range(clients):
        rank = taken + torch.rand(len(every), generator=generator) / 2
        chosen = rank.argsort()[:classes]
        taken[chosen] += 1
        found.append(tuple(sorted(every[place] for place in chosen.tolist())))
    return found


def _dealt(
    inputs: Tensor, labels: Tensor, held: list[tuple[int, ...]], names: list[str], generator: torch.Generator,
    equal: bool = False,
) -> dict[str, LabelledData]:  # fmt: skip
    """Divide the examples of each class among the clients that hold it; the first of them changes with the class."""
    rows: list[list[Tensor]] = [[] for _ in held]
    owners = {one: [k for k, own in enumerate(held) if one in own] for one in sorted({c for own in held for c in own})}
    counts = labels.bincount(minlength=max(owners) + 1).tolist()
    most = min(counts[one] // len(own) for one, own in owners.items()) if equal else None
    for turn, (one, own) in enumerate(owners.items()):
        places = (labels == one).nonzero().flatten().cpu()
        order = places[torch.randperm(len(places), generator=generator)]
        first = turn % len(own)
        for owner, part in zip(own[first:] + own[:first], order.tensor_split(len(own)), strict=True):
            rows[owner].append(part[:most])
    joined = [torch.cat(own).to(labels.device) for own in rows]
    return {name: (inputs[own], labels[own]) for name, own in zip(names, joined, strict=True)}
