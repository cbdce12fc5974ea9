"""Federated learning: clients that train a network together, with personal atoms, and ensembles of similar users.

`federate` simulates all clients in one process, as a job whose rounds are its parts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
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
    refuse_way,
    state_of,
)
from netkin.errors import FileError, ForwardError
from netkin.identity import COMPARE, described_call, forms_by_name, function_digest, settings_digest
from netkin.jobs import Job, Part
from netkin.progress import ProgressOption, reporting, showing
from netkin.representations.layers import refuse_uncopyable, unwrapped
from netkin.results.comparison import adjusted_rand, user_clusters
from netkin.results.federation import Federation, RoundRecord
from netkin.results.records import as_record, plain_fields
from netkin.settings import without_vmap_warnings
from netkin.sources.batches import LabelledData
from netkin.sources.names import by_name
from netkin.sources.weights import StateDict
from netkin.training import Recipe, accuracy, train
from netkin.training.class_splits import ClientSplit, split_by_classes
from netkin.training.example_order import Arrays

__all__ = [
    "ALGORITHMS", "SOURCES", "ClientSplit", "ClientUpdate", "Ensembles", "Federation", "adjusted_rand", "federate",
    "plan_for", "similar_users_ensemble", "split_by_classes", "user_clusters", "user_similarity",
]  # fmt: skip

REACHED, PRETRAINING = "standing", "pretraining"


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
    refuse_uncopyable(unwrapped(model))
    refuse_settings(rounds, share, pull, finetune, head_epochs, pretrain_epochs)
    refuse_way(how)
    train_data, tests = checked_clients(clients, test)
    refuse_no_tests(test_every, tests)
    plan = plan_for(unwrapped(model), algorithm, coefficients, head)
    pretrains = plan.algorithm.pretrains or coefficients == "pretrained"
    asked = FederationRequest(
        model=unwrapped(model), plan=plan, clients=train_data, tests=tests, rounds=rounds, share=share,
        recipe=local_recipe(recipe, settings), pull=pull, head_epochs=head_epochs,
        public=public_examples(public) if pretrains else None, pretrain_epochs=pretrain_epochs, finetune=finetune,
        test_every=test_every, wire=wire or plain_wire, how=how, seed=seed,
    )  # fmt: skip
    refuse_misfits(asked.model, train_data, tests)
    jobs.refuse_output(save, overwrite=overwrite)
    identity = {} if save is None else asked.identity
    call = described_call("nk.federate", model=model, algorithm=algorithm, coefficients=coefficients, rounds=rounds,
                          share=share, finetune=finetune or None, seed=seed)  # fmt: skip
    with (
        showing(progress),
        Job.beside(save, Federation.kind, identity, call=call, overwrite=overwrite, compare=COMPARE) as job,
    ):
        found = Simulation(asked, job).run(call)
        job.save(lambda: found)
    return found


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
    how: str
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        """What all rounds depend on; more of them may follow."""
        still = [name for name, weight in self.model.named_parameters() if not weight.requires_grad]
        source = self.plan.coefficients or "none"
        every = {"public": self.public, **{f"client {name}": own for name, own in self.clients.items()}}
        digests = {name: Arrays(own, self.recipe, 0).digest() for name, own in every.items() if own is not None}
        return self._tested | {
            "model": settings_digest([state_of(self.model), still, self.plan.parts]),
            "architecture": forms_by_name({"model": self.model}),
            "algorithm": self.plan.algorithm.name, "coefficients": source, "recipe": settings_digest(self.recipe),
            "share": self.share, "pull": self.pull, "head epochs": self.head_epochs or 0, "seed": self.seed,
            "pretraining epochs": self.pretrain_epochs if self.public is not None else 0,
            "set of data": settings_digest(digests), "wire": function_digest(self.wire),
        }  # fmt: skip

    @property
    def _tested(self) -> dict[str, Any]:
        """What the accuracies in the records depend on."""
        if not self.test_every:
            return {}
        whole = self.recipe.but(drop_last=False, shift=0, flip=False)
        digests = {name: Arrays(own, whole, 0).digest() for name, own in self.tests.items()}
        return {"tested every": self.test_every, "test data": settings_digest(digests)}


@dataclass
class _Progress:
    """The state of a federation: the round, what is shared, what each client keeps, and what was recorded."""

    shared: StateDict
    kept: list[StateDict]
    records: list[RoundRecord] = field(default_factory=list)
    untuned: Mapping[str, str] = field(default_factory=dict)


class Simulation:
    """A federation in one process, as a job whose rounds are its parts."""

    def __init__(self, asked: FederationRequest, job: Job):
        self.asked, self.job, self.plan, self.names = asked, job, asked.plan, list(asked.clients)
        self.training = LocalTraining(copy.deepcopy(asked.model), asked.recipe, asked.how)
        self.base = state_of(asked.model)

    @without_vmap_warnings()
    def run(self, call: str) -> Federation:
        """Return the federation, from its first round or from where it stopped."""
        last = [f"fine-tuning after round {self.asked.rounds}"] * bool(self.asked.finetune)
        first = [PRETRAINING] * (self.asked.public is not None)
        self.job.expect([*first, *(f"round {number}" for number in range(1, self.asked.rounds + 1)), *last])
        if self.asked.public is not None:
            part = self.job.part(PRETRAINING, self._pretrained)
            self.base |= self._restored(part.arrays, "base")
        reached = self._start()
        with reporting(self.asked.rounds, "federating", "rounds", done=len(reached.records)) as report:
            for number in range(len(reached.records) + 1, self.asked.rounds + 1):
                self.job.check()
                self._round(reached, number)
                self._keep(reached)
                report.update()
        for name in last:
            tuned = self.job.part(name, lambda: self._finetuned(reached))
            reached.kept = self._unstacked(self._restored(tuned.arrays, "kept"))
            reached.untuned = tuned.values.get("failed", {})
        return self._finished(reached, call)

    def _start(self) -> _Progress:
        """Return where the federation stood, or its beginning."""
        held = self.job.recall(REACHED, self._unpacked)
        if held is None:
            own = {name: self.base[name] for name in self.plan.kept}
            return _Progress({name: self.base[name] for name in self.plan.travelling}, [own] * len(self.names))
        if len(held.records) > self.asked.rounds:
            raise FileError(
                f"{str(self.job.folder)!r} holds {len(held.records)} rounds, more than the {self.asked.rounds} asked "
                "for; ask for as many or more, or give another path."
            )
        for one in held.records:  # the process may have been killed between the two writings
            self.job.part(f"round {one.round}", partial(plain_fields, one))
        return held

    def _unpacked(self, part: Part) -> _Progress:
        records = [as_record(RoundRecord, one) for one in part.values["records"]]
        kept = self._unstacked(self._restored(part.arrays, "kept"))
        return _Progress(self._restored(part.arrays, "shared"), kept, records)

    def _keep(self, reached: _Progress) -> None:
        if self.job.folder is not None:
            shared = {f"shared/{name}": as_array(one) for name, one in reached.shared.items()}
            records = {"records": [plain_fields(one) for one in reached.records]}
            self.job.keep(REACHED, records, self._packed(reached.kept) | shared)
        self.job.keep(f"round {reached.records[-1].round}", plain_fields(reached.records[-1]))

    def _round(self, reached: _Progress, number: int) -> None:
        """Let the clients of a round work, and change the state by what arrives."""
        asked = sampled(self.names, self.asked.share, self.asked.seed, number)
        places = [self.names.index(name) for name in asked]
        work = self._work(asked, number)
        sent, own = self.plan.algorithm.local(reached.shared, [reached.kept[place] for place in places], work)
        for place, (number_in_round, state) in zip(places, enumerate(own), strict=True):
            if number_in_round not in work.failed:
                few = len(asked) < len(self.names)  # a view would keep the weights of all clients of the round
                reached.kept[place] = {name: state[name].clone() if few else state[name] for name in self.plan.kept}
        failed = {asked[place]: why for place, why in work.failed.items()}
        working = [(name, state) for name, state in zip(asked, sent, strict=True) if name not in failed]
        counted, faults = self._exchange(reached, working, number) if self.plan.travelling else (
            [name for name, _ in working], {})  # fmt: skip
        self._refuse_nobody(reached, asked, failed)
        loss = mean_loss([work.losses[asked.index(name)] for name in counted])
        tested = self.asked.test_every and (number % self.asked.test_every == 0 or number == self.asked.rounds)
        accuracies = self._accuracies(reached)[0] if tested else {}
        reached.records.append(RoundRecord(number, tuple(asked), tuple(counted), failed | faults, loss, accuracies))

    def _exchange(
        self, reached: _Progress, working: Sequence[tuple[str, StateDict]], number: int
    ) -> tuple[list[str], dict[str, str]]:
        """Send the clients' weights over the wire, and take the mean of those that count."""
        arriving: list[ClientUpdate] = []
        examples = {name: len(labels) for name, (_, labels) in self.asked.clients.items()}
        for name, state in working:
            weights = {key: state[key] for key in self.plan.travelling}
            came = self.asked.wire(ClientUpdate(name, number, weights, examples[name]))
            arriving += read_updates(came)
        good, faults = received_updates(arriving, [name for name, _ in working], number, reached.shared, examples)
        if good:
            reached.shared = averaged(good, reached.shared)
        return [one.client for one in good], faults

    def _work(self, asked: Sequence[str], number: int) -> RoundWork:
        clients = [(name, self.asked.clients[name]) for name in asked]
        return RoundWork(
            self.training, self.plan, self.base, clients, seed=self.asked.seed, number=number, pull=self.asked.pull,
            head_epochs=self.asked.head_epochs,
        )  # fmt: skip

    def _refuse_nobody(self, reached: _Progress, asked: Sequence[str], failed: Mapping[str, str]) -> None:
        """Refuse to go on where no client has ever worked: that is no client's fault."""
        several = len(asked) > 1 or len(self.names) == 1
        if several and len(failed) == len(asked) and not any(one.counted for one in reached.records):
            name, why = next(iter(failed.items()))
            raise ForwardError(f"all {len(asked)} clients of the round failed; of client {name!r}, {why}")

    def _finetuned(self, reached: _Progress) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return why the training of some clients by themselves failed, and what each client keeps after it."""
        work = self._work(self.names, self.asked.rounds + 1)
        starts = [self._whole(reached, place) for place in range(len(self.names))]
        only = self.plan.personal_at_last
        found = work.train(starts, only, epochs=self.asked.finetune)
        buffers = [name for name, _ in self.asked.model.named_buffers()]
        kept = [{name: state[name] for name in {*self.plan.kept, *only, *buffers}} for state in found]
        return {"failed": {self.names[place]: why for place, why in work.failed.items()}}, self._packed(kept)

    def _whole(self, reached: _Progress, place: int) -> StateDict:
        return self.base | reached.shared | reached.kept[place]

    def _pretrained(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the weights to begin with: all of them, or the coefficients alone, after training on public data."""
        made = copy.deepcopy(self.asked.model)
        if self.plan.coefficients == "fixed":
            for name, weight in made.named_parameters():
                weight.requires_grad_(weight.requires_grad and self.plan.parts[name] != "coefficients")
        recipe = self.asked.recipe.but(epochs=self.asked.pretrain_epochs, steps=None)
        history = train(made, self.asked.public, recipe, seed=self.asked.seed, progress=False)
        state, whole = state_of(made), self.plan.algorithm.pretrains
        names = [name for name in state if whole or self.plan.parts[name] == "coefficients"]
        return {"loss": history[-1]["loss"]}, {f"base/{name}": as_array(state[name]) for name in names}

    # --- to and from files --------------------------------------------------------------------------------------------

    def _packed(self, kept: Sequence[StateDict]) -> dict[str, np.ndarray]:
        return {f"kept/{name}": as_array(torch.stack([own[name] for own in kept])) for name in kept[0]}

    def _restored(self, arrays: Mapping[str, np.ndarray], kind: str) -> StateDict:
        """Return the tensors of one kind in their own precision, where they lay."""
        found = {}
        for key, array in arrays.items():
            own, _, name = key.partition("/")
            if own == kind:
                found[name] = torch.from_numpy(np.array(array)).to(self.base[name].device, self.base[name].dtype)
        return found

    def _unstacked(self, stacked: StateDict) -> list[StateDict]:
        return [{name: one[place] for name, one in stacked.items()} for place in range(len(self.names))]

    def _finished(self, reached: _Progress, call: str) -> Federation:
        accuracies, unknown = self._accuracies(reached)
        personal = reached.kept[0].keys()
        common = {name: as_array(one) for name, one in (self.base | reached.shared).items() if name not in personal}
        found = Federation(
            algorithm=self.plan.algorithm.name, coefficients=self.plan.coefficients, clients=tuple(self.names),
            examples={name: len(labels) for name, (_, labels) in self.asked.clients.items()}, accuracy=accuracies,
            unjudged=unknown, untuned=reached.untuned, rounds=tuple(reached.records), parts=self.plan.parts,
            travels=self.plan.travelling, numbers=sum(self.base[name].numel() for name in self.plan.travelling),
            personal={key.partition("/")[2]: one for key, one in self._packed(reached.kept).items()}, shared=common,
            leaks=self.plan.leaks, seed=self.asked.seed, provenance={"call": call, "recipe": self.asked.recipe.words},
        )  # fmt: skip
        return with_similarity(found)

    def _accuracies(self, reached: _Progress) -> tuple[dict[str, float], dict[str, str]]:
        (model,) = self.training.copies(1)
        accuracies, unknown = dict[str, float](), dict[str, str]()
        for place, name in enumerate(self.names):
            if name not in self.asked.tests:
                unknown |= {name: "it has no test examples"} if self.asked.tests else {}
                continue
            load_state(model, self._whole(reached, place))
            try:
                accuracies[name] = accuracy(model, self.asked.tests[name])
            except Exception as fault:  # its data do not fit the network, as its training has said too
                unknown[name] = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
        return accuracies, unknown
