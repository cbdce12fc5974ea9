"""Federated learning: clients that train a network together, with personal atoms, and ensembles of similar users.

`federate` simulates all clients in one process, as a job whose rounds are its parts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin import jobs
from netkin.applications.federated.algorithms import (
    ALGORITHMS,
    SOURCES,
    ClientUpdate,
    FederatedPlan,
    Wire,
    averaged,
    mean_loss,
    plain_wire,
    plan_for,
    read_updates,
    received_updates,
    sampled,
)
from netkin.applications.federated.ensembles import Ensembles, similar_users_ensemble, user_similarity, with_similarity
from netkin.applications.federated.local_training import (
    LocalTraining,
    RoundWork,
    as_array,
    checked_clients,
    load_state,
    local_recipe,
    public_examples,
    refuse_misfits,
    refuse_no_tests,
    refuse_settings,
    state_of,
)
from netkin.errors import FileError, ForwardError
from netkin.identity import COMPARE, described_call, forms_by_name, function_digest, settings_digest
from netkin.jobs import Computed, Job, Part
from netkin.progress import ProgressOption, reporting, showing
from netkin.representations.layers import refuse_uncopyable, unwrapped
from netkin.results.caveats import Caveat
from netkin.results.distances import adjusted_rand, user_clusters
from netkin.results.federation import Federation, RoundRecord
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

__all__ = [
    "ALGORITHMS", "SOURCES", "ClientSplit", "ClientUpdate", "Ensembles", "Federation", "adjusted_rand", "federate",
    "plan_for", "similar_users_ensemble", "split_by_classes", "user_clusters", "user_similarity",
]  # fmt: skip

STANDING, PRETRAINING = "standing", "pretraining"


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
    numbers are those of one by one up to rounding. If a client drops out, fails, comes late, sends weights that can
    not be averaged, or claims another number of examples than it has, the round uses the updates of the others and the
    result names the client, with the reason.

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
    model = unwrapped(model)
    refuse_uncopyable(model)
    refuse_settings(rounds, share, pull, finetune, head_epochs, pretrain_epochs)
    require_method(how)
    train_data, tests = checked_clients(clients, test)
    refuse_no_tests(test_every, tests)
    plan = plan_for(model, algorithm, coefficients, head)
    pretrains = plan.algorithm.pretrains or coefficients == "pretrained"
    request = FederationRequest(
        model=model, plan=plan, clients=train_data, tests=tests, rounds=rounds, share=share,
        recipe=local_recipe(recipe, settings), pull=pull, head_epochs=head_epochs,
        public=public_examples(public) if pretrains else None, pretrain_epochs=pretrain_epochs, finetune=finetune,
        test_every=test_every, wire=wire or plain_wire, method=how, seed=seed,
    )  # fmt: skip
    refuse_misfits(model, train_data, tests)
    jobs.refuse_output(save, overwrite=overwrite)
    identity = {} if save is None else request.identity
    call = described_call("nk.federate", model=model, algorithm=algorithm, coefficients=coefficients, rounds=rounds,
                          share=share, finetune=finetune or None, seed=seed)  # fmt: skip
    with (
        showing(progress),
        without_vmap_warnings(),
        Job.beside(save, Federation.kind, identity, call=call, overwrite=overwrite, compare=COMPARE) as job,
    ):
        federation = _federated(request, job, call)
        job.save(lambda: federation)
    return federation


@dataclass(frozen=True, eq=False)
class FederationRequest:
    """The validated arguments of a federation."""

    model: nn.Module
    plan: FederatedPlan
    clients: Mapping[str, LabelledData]
    tests: Mapping[str, LabelledData]
    rounds: int
    share: float
    recipe: Recipe
    pull: float
    head_epochs: int | None
    public: LabelledData | None
    pretrain_epochs: int
    finetune: int
    test_every: int | None
    wire: Wire
    method: str
    seed: int

    @property
    def names(self) -> list[str]:
        """The names of the clients, in their order."""
        return list(self.clients)

    @property
    def examples(self) -> dict[str, int]:
        """How many examples each client has."""
        return {name: len(labels) for name, (_, labels) in self.clients.items()}

    def is_tested(self, number: int) -> bool:
        """Return whether all clients are tested after a round."""
        return bool(self.test_every) and (number % (self.test_every or 1) == 0 or number == self.rounds)

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
            "recipe": settings_digest(self.recipe), "share": self.share, "pull": self.pull,
            "head epochs": self.head_epochs or 0, "seed": self.seed,
            "pretraining epochs": self.pretrain_epochs if self.public is not None else 0,
            "set of data": _digest(data, self.recipe), "wire": function_digest(self.wire),
        }  # fmt: skip


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


def _federated(request: FederationRequest, job: Job, call: str) -> Federation:
    """Return the federation, from its first round or from where it stopped."""
    tuning = f"fine-tuning after round {request.rounds}"
    numbers = range(1, request.rounds + 1)
    pretraining, finetuning = [PRETRAINING] * (request.public is not None), [tuning] * bool(request.finetune)
    job.expect([*pretraining, *(f"round {number}" for number in numbers), *finetuning])
    base = state_of(request.model)
    if request.public is not None:
        base |= _tensors(job.part(PRETRAINING, lambda: _pretrained(request)).arrays, base)
    state = _resumed(job, request, base) or _beginning(request, base)
    training = LocalTraining(copy.deepcopy(request.model), request.recipe, request.method)
    with reporting(request.rounds, "federating", "rounds", done=len(state.records)) as report:
        for _ in rounds_of(request, training, state):
            _keep(job, request, state)
            report.update()
            job.check()
    untuned: Mapping[str, str] = {}
    if request.finetune:
        tuned = job.part(tuning, lambda: _finetuned(request, training, state))
        untuned = tuned.values.get("failed", {})
        state.kept = _unstacked(_tensors(tuned.arrays, base), len(request.clients))
    return _finished(request, training, state, untuned, call)


def _beginning(request: FederationRequest, base: StateDict) -> FederationState:
    count = len(request.clients)
    kept = {name: base[name] for name in request.plan.kept}
    return FederationState(base, {name: base[name] for name in request.plan.travelling}, [kept] * count, [0] * count)


def rounds_of(request: FederationRequest, training: LocalTraining, state: FederationState) -> Iterator[RoundRecord]:
    """Let the clients of each further round work, change the state by what arrives, and yield the round's record."""
    plan = request.plan
    for number in range(len(state.records) + 1, request.rounds + 1):
        asked = sampled(request.names, request.share, request.seed, number)
        places = [request.names.index(name) for name in asked]
        work = _work(request, training, state, asked, number)
        sent, own = plan.algorithm.local(state.shared, [state.kept[place] for place in places], work)
        few = len(asked) < len(request.names)  # a view would keep the weights of all clients of the round
        for turn, (place, weights) in enumerate(zip(places, own, strict=True)):
            if turn not in work.failed:
                state.kept[place] = {name: weights[name].clone() if few else weights[name] for name in plan.kept}
                state.changed_in[place] = number
        faults = {asked[turn]: why for turn, why in work.failed.items()}
        working = {name: weights for name, weights in zip(asked, sent, strict=True) if name not in faults}
        counted = list(working)
        if plan.travelling:
            counted, lost = _exchange(request, state, working, number)
            faults |= lost
        _refuse_nobody(request, state, asked, work)
        loss = mean_loss([work.losses[asked.index(name)] for name in counted])
        accuracies = _accuracies(request, training, state)[0] if request.is_tested(number) else {}
        state.records.append(RoundRecord(number, tuple(asked), tuple(counted), faults, loss, accuracies))
        yield state.records[-1]


def _work(
    request: FederationRequest, training: LocalTraining, state: FederationState, names: Sequence[str], number: int
) -> RoundWork:
    clients = [(name, request.clients[name]) for name in names]
    return RoundWork(
        training, request.plan, state.base, clients, seed=request.seed, number=number, pull=request.pull,
        head_epochs=request.head_epochs,
    )  # fmt: skip


def _exchange(
    request: FederationRequest, state: FederationState, working: Mapping[str, StateDict], number: int
) -> tuple[list[str], dict[str, str]]:
    """Send the clients' weights over the wire, take the mean of those that count, and say why others do not."""
    arriving: list[ClientUpdate] = []
    for name, weights in working.items():
        travelling = {key: weights[key] for key in request.plan.travelling}
        arriving += read_updates(request.wire(ClientUpdate(name, number, travelling, request.examples[name])))
    good, faults = received_updates(arriving, list(working), number, state.shared, request.examples)
    if good:
        state.shared = averaged(good, state.shared)
    return [update.client for update in good], faults


def _refuse_nobody(request: FederationRequest, state: FederationState, asked: Sequence[str], work: RoundWork) -> None:
    """Refuse to go on where no client has ever worked: that is no client's fault."""
    several = len(asked) > 1 or len(request.names) == 1
    if several and len(work.failed) == len(asked) and not any(record.counted for record in state.records):
        turn, why = next(iter(work.failed.items()))
        raise ForwardError(f"all {len(asked)} clients of the round failed; of client {asked[turn]!r}, {why}")


def _pretrained(request: FederationRequest) -> Computed:
    """Return the weights to begin with: all of them, or the coefficients alone, after training on public data."""
    plan, model = request.plan, copy.deepcopy(request.model)
    if plan.coefficients == "fixed":
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad and plan.parts[name] != "coefficients")
    recipe = request.recipe.but(epochs=request.pretrain_epochs, steps=None)
    history = train(model, request.public, recipe, seed=request.seed, progress=False)
    state = state_of(model)
    names = [name for name in state if plan.algorithm.pretrains or plan.parts[name] == "coefficients"]
    return {"loss": history[-1]["loss"]}, {name: as_array(state[name]) for name in names}


def _finetuned(request: FederationRequest, training: LocalTraining, state: FederationState) -> Computed:
    """Return why the training of some clients by themselves failed, and what each client keeps after it."""
    work = _work(request, training, state, request.names, request.rounds + 1)
    starts = [state.of_client(place) for place in range(len(request.names))]
    personal = request.plan.personal_at_last
    tuned = work.train(starts, personal, epochs=request.finetune)
    buffers = [name for name, _ in request.model.named_buffers()]
    names = {*request.plan.kept, *personal, *buffers}
    kept = [{name: weights[name] for name in names} for weights in tuned]
    return {"failed": {request.names[turn]: why for turn, why in work.failed.items()}}, _stacked(kept)


# --- a state in parts of a job ----------------------------------------------------------------------------------------


def _keep(job: Job, request: FederationRequest, state: FederationState) -> None:
    """Keep the state after a round: of the clients those alone that have changed in it."""
    number = len(state.records)
    job.keep(f"round {number}", plain_fields(state.records[-1]))
    if job.folder is None:
        return
    changed = [place for place, last in enumerate(state.changed_in) if last == number]
    if changed and request.plan.kept:
        job.keep(_clients_after(number), {"places": changed}, _stacked([state.kept[place] for place in changed]))
    needed = {_clients_after(last) for last in state.changed_in if last and request.plan.kept}
    if not all(map(job.is_written, needed)):
        return  # the state of an earlier round is whole, and stays
    records = [plain_fields(record) for record in state.records]
    shared = {name: as_array(weight) for name, weight in state.shared.items()}
    job.keep(STANDING, {"records": records, "changed in": state.changed_in}, shared)
    for earlier in {_clients_after(earlier) for earlier in range(1, number)} - needed:
        if job.has(earlier):
            job.drop(earlier)


def _resumed(job: Job, request: FederationRequest, base: StateDict) -> FederationState | None:
    """Return where the federation stood, or None where it is new."""

    def unpacked(part: Part) -> FederationState:
        state = _beginning(request, base)
        state.shared = _tensors(part.arrays, base)
        state.records = [as_record(RoundRecord, record) for record in part.values["records"]]
        state.changed_in = list(part.values["changed in"])
        return state

    def put_back(part: Part, number: int) -> None:
        places = part.values["places"]
        for place, weights in zip(places, _unstacked(_tensors(part.arrays, base), len(places)), strict=True):
            if state.changed_in[place] == number:
                state.kept[place] = weights

    found = job.recall(STANDING, unpacked)
    if found is None:
        return None
    state = found
    if len(state.records) > request.rounds:
        raise FileError(
            f"{str(job.folder)!r} holds {len(state.records)} rounds, more than the {request.rounds} asked for; ask for "
            "as many or more, or give another path."
        )
    for number in {*state.changed_in} - {0} if request.plan.kept else ():
        job.recall(_clients_after(number), partial(put_back, number=number))
    return state


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
    request: FederationRequest, training: LocalTraining, state: FederationState, untuned: Mapping[str, str], call: str
) -> Federation:
    plan, personal = request.plan, _stacked(state.kept)
    accuracies, unjudged = _accuracies(request, training, state)
    common = {name: as_array(weight) for name, weight in (state.base | state.shared).items() if name not in personal}
    federation = Federation(
        algorithm=plan.algorithm.name, coefficients=plan.coefficients, clients=tuple(request.names),
        examples=request.examples, accuracy=accuracies, unjudged=unjudged, untuned=untuned,
        rounds=tuple(state.records), parts=plan.parts, travels=plan.travelling,
        numbers=sum(state.base[name].numel() for name in plan.travelling), personal=personal, shared=common,
        leaks=plan.leaks, seed=request.seed, provenance={"call": call, "recipe": request.recipe.words},
        caveats=_caveats(request, accuracies, personal),
    )  # fmt: skip
    return with_similarity(federation)


def _caveats(
    request: FederationRequest, accuracies: Mapping[str, float], personal: Collection[str]
) -> tuple[Caveat, ...]:
    """Return what to know of the accuracies, of networks with personal weights or of the one that all clients share."""
    tests = {name: request.tests[name] for name in accuracies}
    labels = {name: classes for name, (_, classes) in tests.items()}
    is_shared = not any(name in personal for name, _ in request.model.named_parameters())
    if tests and is_shared:  # the most frequent class of one client does not serve the others
        sizes, together = [len(classes) for classes in labels.values()], "all clients together"
        accuracies = {together: float(np.average(list(accuracies.values()), weights=sizes))}
        different = {id(test): test[1].flatten() for test in tests.values()}  # one test set may serve all clients
        labels = {together: torch.cat(list(different.values()))}
    caveat = chance_caveat(accuracies, labels, units="clients", method=request.plan.algorithm.name)
    return (caveat,) if caveat else ()


def _accuracies(
    request: FederationRequest, training: LocalTraining, state: FederationState
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the accuracy of each client on its test data, and why others have none."""
    (model,) = training.copies(1)
    accuracies, unjudged = dict[str, float](), dict[str, str]()
    for place, name in enumerate(request.names):
        if name not in request.tests:
            unjudged |= {name: "it has no test examples"} if request.tests else {}
            continue
        load_state(model, state.of_client(place))
        try:
            accuracies[name] = accuracy(model, request.tests[name])
        except Exception as fault:  # its data do not fit the network, as its training has said too
            unjudged[name] = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
    return accuracies, unjudged
