"""Federated learning: clients that train a network together, with personal atoms, and ensembles of similar users.

`federate` simulates all clients in one process, as a job whose rounds are its parts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from netkin.applications.experiment import Experiment
from netkin.applications.federated.algorithms import (
    ALGORITHMS,
    SOURCES,
    ClientUpdate,
    FederatedPlan,
    RoundWork,
    Wire,
    averaged,
    mean_loss,
    plan_for,
    read_updates,
    received_updates,
    require_fraction,
    sampled,
)
from netkin.applications.federated.ensembles import Ensembles, similar_users_ensemble, user_similarity, with_similarity
from netkin.applications.federated.local_training import (
    CountedTraining,
    LocalTraining,
    as_array,
    checked_clients,
    load_state,
    local_recipe,
    public_examples,
    require_fitting_labels,
    state_of,
)
from netkin.comparing.spec import declarations, option, take_declared, takes_options
from netkin.errors import FileError, ForwardError, InvalidValue, require_at_least
from netkin.identity import described_call, forms_by_name, function_digest, settings_digest
from netkin.jobs import Computed, Job, Part
from netkin.progress import reporting
from netkin.representations.layers import require_copyable, unwrapped
from netkin.results.caveats import Caveat
from netkin.results.distances import adjusted_rand, user_clusters
from netkin.results.federation import Federation, RoundRecord
from netkin.results.labels import plural
from netkin.results.records import as_record, plain_fields
from netkin.settings import without_vmap_warnings
from netkin.sources.batches import LabelledData
from netkin.sources.names import by_name
from netkin.sources.weights import StateDict
from netkin.training import Recipe, accuracy, train
from netkin.training.chance import chance_caveat
from netkin.training.class_splits import ClientSplit, split_by_classes
from netkin.training.example_order import Arrays
from netkin.training.many import require_method
from netkin.training.work_plan import Planning, Work, WorkPlan, memory_of_training, planned, training_work

__all__ = [
    "ALGORITHMS", "SOURCES", "ClientSplit", "ClientUpdate", "Ensembles", "Federation", "adjusted_rand",
    "explain_federate", "federate", "plan_for", "similar_users_ensemble", "split_by_classes", "user_clusters",
    "user_similarity",
]  # fmt: skip

STANDING, PRETRAINING = "standing", "pretraining"


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedExperiment(Experiment):
    """A network that clients train together, each on its own data, and how they do it."""

    clients: Mapping[str, LabelledData]
    tests: Mapping[str, LabelledData]
    plan: FederatedPlan
    recipe: Recipe
    rounds: int = option(10, "the number of rounds.")
    client_fraction: float = option(1.0, "the share of the clients that is drawn for each round.")
    prox: float = option(
        0.1, "for fedprox, and for the personal networks of ditto: the factor of ½ ‖w − w received‖² in the loss."
    )
    head_epochs: int | None = option(
        None, "for fedrep: how many epochs personal weights are trained first; by default as many as in the recipe."
    )
    public: Any = option(None, "examples for pretraining, which no client has.", "arrays ``(inputs, labels)``.")
    pretrain_epochs: int = option(10, "the number of epochs of pretraining.")
    finetune: int = option(
        0, "the number of epochs that each client trains alone at the end: atoms and head, or without atoms all."
    )
    test_every: int | None = option(
        None, "test all clients every N rounds, and after the last.", "None for the last alone."
    )
    wire: Wire | None = option(
        None, "a function of a `ClientUpdate` that returns those that arrive at the server, for trials with faults."
    )
    method: str = option("auto", '"auto", "stacked" or "one by one", as in `nk.train_many`.')

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, rounds=self.rounds, pretrain_epochs=self.pretrain_epochs)
        require_at_least(0, finetune=self.finetune)
        counts = {"head_epochs": self.head_epochs, "test_every": self.test_every}
        require_at_least(1, **{name: count for name, count in counts.items() if count is not None})
        require_fraction(self.client_fraction)
        if not 0 <= self.prox < float("inf"):
            raise InvalidValue(f"`prox` must be a number of 0 or more; got {self.prox!r}.", argument="prox")
        require_method(self.method)
        if self.test_every and not self.tests:
            raise InvalidValue("`test_every` needs data to test on; give `test=`.", argument="test_every")
        pretrains = self.plan.algorithm.pretrains or self.plan.coefficients == "pretrained"
        object.__setattr__(self, "public", public_examples(self.public) if pretrains else None)

    @property
    def model(self) -> nn.Module:
        """The network, as all clients begin with it."""
        return cast("nn.Module", self.models["model"])

    @cached_property
    def training(self) -> LocalTraining:
        """What trains the clients; it holds copies of the network on the experiment's device."""
        return LocalTraining(copy.deepcopy(self.model), self.recipe, self.method)

    @property
    def names(self) -> list[str]:
        """The names of the clients, in their order."""
        return list(self.clients)

    @property
    def numbers(self) -> dict[str, int]:
        """How many examples each client has."""
        return {name: len(labels) for name, (_, labels) in self.clients.items()}

    def is_tested(self, number: int) -> bool:
        """Return whether all clients are tested after a round."""
        return bool(self.test_every) and (number % (self.test_every or 1) == 0 or number == self.rounds)

    def work(
        self, base: StateDict, names: Sequence[str], number: int, training: CountedTraining | None = None
    ) -> RoundWork:
        """Return the work of some clients in a round."""
        clients = [(name, self.clients[name]) for name in names]
        return RoundWork(
            training or self.training, self.plan, base, clients, number, self.seed, self.prox, self.head_epochs
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What all rounds depend on; more of them may follow."""
        still = [name for name, weight in self.model.named_parameters() if not weight.requires_grad]
        data = {"public": self.public, **{f"client {name}": examples for name, examples in self.clients.items()}}
        tested: dict[str, Any] = {}
        if self.test_every:  # the accuracies in the records depend on it
            whole = self.recipe.but(drop_last=False, shift=0, flip=False)
            tested = {"tested every": self.test_every, "test data": _digest(self.tests, whole)}
        return tested | {
            "model": settings_digest([state_of(self.model), still, self.plan.parts]),
            "architecture": forms_by_name({"model": self.model}),
            "algorithm": self.plan.algorithm.name, "coefficients": self.plan.coefficients or "none",
            "recipe": settings_digest(self.recipe), "client fraction": self.client_fraction,
            "prox": self.prox,
            "head epochs": self.head_epochs or 0, "seed": self.seed,
            "pretraining epochs": self.pretrain_epochs if self.public is not None else 0,
            "set of data": _digest(data, self.recipe),
            "wire": "none" if self.wire is None else function_digest(self.wire),
        }  # fmt: skip


DECLARED = declarations(FederatedExperiment)


@planned
@by_name(models="model")
@takes_options("examples transform forward partial", DECLARED)
def federate(
    model: nn.Module,
    clients: Any,
    algorithm: str = "fedavg",
    *,
    test: Any = None,
    coefficients: str | None = None,
    head: str | None = None,
    recipe: Recipe | None = None,
    **settings: Any,
) -> Planning[WorkPlan, Federation]:
    """Let clients train a network together, each on its own data; return their accuracies, networks and rounds.

    In each round some clients receive what is shared, train, and send it back; the server takes the mean, weighted by
    numbers of examples. The model itself is left alone. Clients train at once, stacked where that is faster; the
    numbers are those of one by one up to rounding. If a client drops out, fails, comes late, sends weights that can
    not be averaged, or claims another number of examples than it has, the round uses the updates of the others and the
    result names the client, with the reason.

    With `coefficients` each client's atoms are its own: the network is made of `AtomConv2d`, as `nk.decompose` makes
    it. They are "fixed" (as the model has them, random in a new network), "pretrained" (on `public` data, then fixed),
    "evolving" (they travel and are averaged after each round), or "federated" (all travels as the algorithm has it,
    and atoms become personal by `finetune`). "local" with "evolving" ones is the paper's own method, in which nothing
    else travels. The same call resumes from `save` after an interruption, also with more rounds.

    Args:
        model: the network that all clients begin with.
        clients: a mapping from names to arrays ``(inputs, labels)``, or a list of these.
        algorithm: "fedavg", "fedprox", "fedper", "fedrep", "ditto", "local" or "pretrain".
        test: test data of each client in the same form, or one ``(inputs, labels)`` for all.
        coefficients: None, "fixed", "pretrained", "evolving" or "federated".
        head: the layer that is the head; by default the last linear layer.
        recipe: how a client trains in a round; one epoch at a rate of 0.01 with momentum 0.9 if not given.
        **settings: settings of the recipe.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> own = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(3)]
        >>> found = federate(net, own, "fedavg", rounds=2)
        >>> found.numbers, len(found.rounds)
        (10, 2)
    """
    model = unwrapped(model)
    require_copyable(model)
    options = take_declared(settings, DECLARED)
    train_data, tests = checked_clients(clients, test)
    experiment = FederatedExperiment(
        models={"model": model}, clients=train_data, tests=tests, recipe=local_recipe(recipe, settings),
        plan=plan_for(model, algorithm, coefficients, head), **options,
    )  # fmt: skip
    call = described_call(
        "nk.federate", model=model, algorithm=algorithm, coefficients=coefficients, rounds=experiment.rounds,
        client_fraction=experiment.client_fraction, finetune=experiment.finetune or None, seed=experiment.seed,
    )  # fmt: skip
    yield lambda: _work_plan(experiment)
    with experiment.lending(model), without_vmap_warnings():
        require_fitting_labels(model, train_data, tests)
        with experiment.job(Federation.kind, lambda: experiment.identity, call) as job:
            federation = _federated(experiment, job, call)
            job.save(lambda: federation)
    return federation


explain_federate = federate.explain


def _work_plan(experiment: FederatedExperiment) -> WorkPlan:
    with experiment.lending(experiment.model):
        require_fitting_labels(experiment.model, experiment.clients, experiment.tests)
    plan, base, work = experiment.plan, state_of(experiment.model), list[Work]()
    state, tests, most = _beginning(experiment, base), int(bool(experiment.tests)), 0
    if experiment.public is not None:
        recipe = experiment.recipe.but(epochs=experiment.pretrain_epochs, steps=None)
        work.append(training_work("pretraining", Arrays(experiment.public, recipe, 0), recipe))
    rounds = CountedTraining(experiment.recipe)
    for number in range(1, experiment.rounds + 1):
        names = sampled(experiment.names, experiment.client_fraction, experiment.seed, number)
        most = max(most, len(names))
        kept = [state.kept[experiment.names.index(name)] for name in names]
        plan.algorithm.local(state.shared, kept, experiment.work(base, names, number, rounds))
        tests += experiment.is_tested(number)
    work.append(_together(f"{plural(experiment.rounds, 'round')} of {plural(most, 'client')}", rounds))
    if experiment.finetune:
        tuning = CountedTraining(experiment.recipe)
        starts = [state.of_client(place) for place in range(len(experiment.names))]
        last = experiment.work(base, experiment.names, experiment.rounds + 1, tuning)
        last.train(starts, plan.personal_at_last, epochs=experiment.finetune)
        work.append(_together("fine-tuning", tuning))
    if experiment.tests:
        count = sum(len(labels) for _, labels in experiment.tests.values())
        work.append(Work(f"testing all clients {plural(tests, 'time')}", tests * count))
    size = sum(weight.nbytes for weight in base.values())
    memory = {
        "weights that clients keep": len(experiment.names) * sum(base[name].nbytes for name in plan.kept),
        "copies of the network": most * size,
        **memory_of_training(experiment.model, experiment.recipe, copies=most),
    }
    numbers = sum(base[name].numel() for name in plan.travelling)
    return WorkPlan(tuple(work), memory, (f"each client of a round sends {plural(numbers, 'number')}",))


def _together(what: str, counted: CountedTraining) -> Work:
    return Work(what, sum(one.examples or 0 for one in counted.work), sum(one.steps or 0 for one in counted.work))


def _digest(data: Mapping[str, LabelledData | None], recipe: Recipe) -> str:
    digests = {name: Arrays(arrays, recipe, 0).digest() for name, arrays in data.items() if arrays is not None}
    return settings_digest(digests)


@dataclass
class FederationState:
    """Where a federation stands: the weights that are shared, those that each client keeps, and the rounds so far.

    `base` are the weights that no round changes, with which all begin. `changed_in` holds for each client the round in
    which it changed its weights last, 0 for none.
    """

    base: StateDict
    shared: StateDict
    kept: list[StateDict]
    changed_in: list[int]
    records: list[RoundRecord] = field(default_factory=list)

    def of_client(self, place: int) -> StateDict:
        """Return all weights of a client."""
        return self.base | self.shared | self.kept[place]


def _federated(experiment: FederatedExperiment, job: Job, call: str) -> Federation:
    """Return the federation, from its first round or from where it stopped."""
    tuning, rounds = f"fine-tuning after round {experiment.rounds}", map(_round, range(1, experiment.rounds + 1))
    pretraining, finetuning = [PRETRAINING] * (experiment.public is not None), [tuning] * bool(experiment.finetune)
    job.expect([*pretraining, *rounds, *finetuning], "parts" if pretraining or finetuning else "rounds")
    base = state_of(experiment.model)
    if experiment.public is not None:
        base |= _tensors(job.part(PRETRAINING, lambda: _pretrained(experiment)).arrays, base)
    state = _resumed(job, experiment, base) or _beginning(experiment, base)
    with reporting(experiment.rounds, "federating", "rounds", done=len(state.records)) as report:
        for _ in rounds_of(experiment, state):
            _keep(job, experiment, state)
            report.update()
            job.check()
    untuned: Mapping[str, str] = {}
    if experiment.finetune:
        tuned = job.part(tuning, lambda: _finetuned(experiment, state))
        untuned = tuned.values.get("failed", {})
        state.kept = _unstacked(_tensors(tuned.arrays, base), len(experiment.clients))
    return _finished(experiment, state, untuned, call)


def _beginning(experiment: FederatedExperiment, base: StateDict) -> FederationState:
    count = len(experiment.clients)
    kept = {name: base[name] for name in experiment.plan.kept}
    return FederationState(base, {name: base[name] for name in experiment.plan.travelling}, [kept] * count, [0] * count)


def rounds_of(experiment: FederatedExperiment, state: FederationState) -> Iterator[RoundRecord]:
    """Let the clients of each further round work, change the state by what arrives, and yield the round's record."""
    plan = experiment.plan
    for number in range(len(state.records) + 1, experiment.rounds + 1):
        asked = sampled(experiment.names, experiment.client_fraction, experiment.seed, number)
        places = [experiment.names.index(name) for name in asked]
        work = experiment.work(state.base, asked, number)
        sent, own = plan.algorithm.local(state.shared, [state.kept[place] for place in places], work)
        few = len(asked) < len(experiment.names)  # a view would keep the weights of all clients of the round
        for turn, (place, weights) in enumerate(zip(places, own, strict=True)):
            if turn not in work.failed:
                state.kept[place] = {name: weights[name].clone() if few else weights[name] for name in plan.kept}
                state.changed_in[place] = number
        faults = {asked[turn]: why for turn, why in work.failed.items()}
        working = {name: weights for name, weights in zip(asked, sent, strict=True) if name not in faults}
        counted = list(working)
        if plan.travelling:
            counted, lost = _exchange(experiment, state, working, number)
            faults |= lost
        _require_any_client(experiment, state, asked, work)
        loss = mean_loss([work.losses[asked.index(name)] for name in counted])
        accuracies = _accuracies(experiment, state)[0] if experiment.is_tested(number) else {}
        state.records.append(RoundRecord(number, tuple(asked), tuple(counted), faults, loss, accuracies))
        yield state.records[-1]


def _exchange(
    experiment: FederatedExperiment, state: FederationState, working: Mapping[str, StateDict], number: int
) -> tuple[list[str], dict[str, str]]:
    """Send the clients' weights over the wire, take the mean of those that count, and say why others do not."""
    arriving: list[ClientUpdate] = []
    for name, weights in working.items():
        travelling = {key: weights[key] for key in experiment.plan.travelling}
        update = ClientUpdate(name, number, travelling, experiment.numbers[name])
        arriving += [update] if experiment.wire is None else read_updates(experiment.wire(update))
    good, faults = received_updates(arriving, list(working), number, state.shared, experiment.numbers)
    if good:
        state.shared = averaged(good, state.shared)
    return [update.client for update in good], faults


def _require_any_client(
    experiment: FederatedExperiment, state: FederationState, asked: Sequence[str], work: RoundWork
) -> None:
    """Refuse to go on where no client has ever worked: that is no client's fault."""
    several = len(asked) > 1 or len(experiment.names) == 1
    if several and len(work.failed) == len(asked) and not any(record.counted for record in state.records):
        turn, why = next(iter(work.failed.items()))
        raise ForwardError(f"all {len(asked)} clients of the round failed; of client {asked[turn]!r}, {why}")


def _pretrained(experiment: FederatedExperiment) -> Computed:
    """Return the weights to begin with: all of them, or the coefficients alone, after training on public data."""
    plan, model = experiment.plan, copy.deepcopy(experiment.model)
    if plan.coefficients == "fixed":
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad and plan.parts[name] != "coefficients")
    recipe = experiment.recipe.but(epochs=experiment.pretrain_epochs, steps=None)
    history = train(model, experiment.public, recipe, seed=experiment.seed, progress=False)
    state = state_of(model)
    names = [name for name in state if plan.algorithm.pretrains or plan.parts[name] == "coefficients"]
    return {"loss": history[-1]["loss"]}, {name: as_array(state[name]) for name in names}


def _finetuned(experiment: FederatedExperiment, state: FederationState) -> Computed:
    """Return why the training of some clients by themselves failed, and what each client keeps after it."""
    work = experiment.work(state.base, experiment.names, experiment.rounds + 1)
    starts = [state.of_client(place) for place in range(len(experiment.names))]
    personal = experiment.plan.personal_at_last
    tuned = work.train(starts, personal, epochs=experiment.finetune)
    buffers = [name for name, _ in experiment.model.named_buffers()]
    names = dict.fromkeys([*experiment.plan.kept, *personal, *buffers])
    kept = [{name: weights[name] for name in names} for weights in tuned]
    return {"failed": {experiment.names[turn]: why for turn, why in work.failed.items()}}, _stacked(kept)


# --- a state in parts of a job ----------------------------------------------------------------------------------------


def _keep(job: Job, experiment: FederatedExperiment, state: FederationState) -> None:
    """Keep the state after a round: its record, and of the clients those alone that have changed in it."""
    number = len(state.records)
    job.keep(_round(number), plain_fields(state.records[-1]))
    if job.folder is None:
        return
    changed = [place for place, last in enumerate(state.changed_in) if last == number]
    if changed and experiment.plan.kept:
        job.keep(_clients_after(number), {"places": changed}, _stacked([state.kept[place] for place in changed]))
    needed = {_clients_after(last) for last in state.changed_in if last and experiment.plan.kept}
    if not all(map(job.is_written, [*map(_round, range(1, number + 1)), *needed])):
        return  # the state of an earlier round is whole, and stays
    shared = {name: as_array(weight) for name, weight in state.shared.items()}
    job.keep(STANDING, {"rounds": number, "changed in": state.changed_in}, shared)
    for earlier in {_clients_after(earlier) for earlier in range(1, number)} - needed:
        if job.has(earlier):
            job.drop(earlier)


def _resumed(job: Job, experiment: FederatedExperiment, base: StateDict) -> FederationState | None:
    """Return where the federation stood, or None where it is new or one of its parts was deleted."""
    standing = job.find(STANDING)
    if standing is None:
        return None
    rounds, changed_in = (standing.values[name] for name in ("rounds", "changed in"))
    if rounds > experiment.rounds:
        raise FileError(
            f"{str(job.folder)!r} holds {rounds} rounds, more than the {experiment.rounds} asked for; ask for as many "
            "or more, or give another path.",
            argument="rounds",
        )

    def clients(part: Part) -> list[tuple[int, StateDict]]:
        places = part.values["places"]
        return list(zip(places, _unstacked(_tensors(part.arrays, base), len(places)), strict=True))

    changes = {*changed_in} - {0} if experiment.plan.kept else ()
    kept = {number: job.recall(_clients_after(number), clients) for number in changes}
    records = [
        job.recall(_round(number), lambda part: as_record(RoundRecord, part.values)) for number in range(1, rounds + 1)
    ]
    if None in records or None in kept.values():
        return None
    state = _beginning(experiment, base)
    state.shared, state.changed_in = _tensors(standing.arrays, base), list(changed_in)
    state.records = [record for record in records if record is not None]
    for number, clients_of_round in kept.items():
        for place, weights in clients_of_round or ():
            if changed_in[place] == number:
                state.kept[place] = weights
    return state


def _round(number: int) -> str:
    return f"round {number}"


def _clients_after(number: int) -> str:
    return f"clients after round {number}"


def _stacked(states: Sequence[StateDict]) -> dict[str, np.ndarray]:
    return {name: as_array(torch.stack([state[name] for state in states])) for name in states[0]}


def _unstacked(stacked: StateDict, count: int) -> list[StateDict]:
    return [{name: rows[row] for name, rows in stacked.items()} for row in range(count)]


def _tensors(arrays: Mapping[str, np.ndarray], base: StateDict) -> StateDict:
    """Return arrays as tensors in the precision and at the place of the network's own."""
    return {
        name: torch.from_numpy(np.array(array)).to(base[name].device, base[name].dtype)
        for name, array in arrays.items()
    }


# --- the result -------------------------------------------------------------------------------------------------------


def _finished(
    experiment: FederatedExperiment, state: FederationState, untuned: Mapping[str, str], call: str
) -> Federation:
    plan, personal = experiment.plan, _stacked(state.kept)
    accuracies, unjudged = _accuracies(experiment, state)
    common = {name: as_array(weight) for name, weight in (state.base | state.shared).items() if name not in personal}
    federation = Federation(
        algorithm=plan.algorithm.name, coefficients=plan.coefficients, clients=tuple(experiment.names),
        examples=experiment.numbers, accuracy=accuracies, unjudged=unjudged, untuned=untuned,
        rounds=tuple(state.records), parts=plan.parts, travels=plan.travelling,
        numbers=sum(state.base[name].numel() for name in plan.travelling), personal=personal, shared=common,
        leaks=plan.leaks, seed=experiment.seed, provenance={"call": call, "recipe": experiment.recipe.words},
        caveats=_caveats(experiment, accuracies, personal),
    )  # fmt: skip
    return with_similarity(federation)


def _caveats(
    experiment: FederatedExperiment, accuracies: Mapping[str, float], personal: Collection[str]
) -> tuple[Caveat, ...]:
    """Return what to know of the accuracies, of networks with personal weights or of the one that all clients share."""
    tests = {name: experiment.tests[name] for name in accuracies}
    labels = {name: classes for name, (_, classes) in tests.items()}
    is_shared = not any(name in personal for name, _ in experiment.model.named_parameters())
    if tests and is_shared:  # the most frequent class of one client does not serve the others
        sizes, together = [len(classes) for classes in labels.values()], "all clients together"
        accuracies = {together: float(np.average(list(accuracies.values()), weights=sizes))}
        different = {id(test): test[1].flatten() for test in tests.values()}  # one test set may serve all clients
        labels = {together: torch.cat(list(different.values()))}
    caveat = chance_caveat(accuracies, labels, units="clients", method=experiment.plan.algorithm.name)
    return (caveat,) if caveat else ()


def _accuracies(experiment: FederatedExperiment, state: FederationState) -> tuple[dict[str, float], dict[str, str]]:
    """Return the accuracy of each client on its test data, and why others have none."""
    (model,) = experiment.training.copies(1)
    accuracies, unjudged = dict[str, float](), dict[str, str]()
    for place, name in enumerate(experiment.names):
        if name not in experiment.tests:
            unjudged |= {name: "it has no test examples"} if experiment.tests else {}
            continue
        load_state(model, state.of_client(place))
        try:
            accuracies[name] = accuracy(model, experiment.tests[name])
        except Exception as fault:  # its data do not fit the network, as its training has said too
            unjudged[name] = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
    return accuracies, unjudged
