"""The simulation: all clients of a federation in one process, as a job whose rounds are its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import files
from netkin.applications.federated.algorithms import (
    ClientUpdate,
    FederatedPlan,
    averaged,
    mean_loss,
    received_updates,
    sampled,
)
from netkin.applications.federated.ensembles import user_similarity
from netkin.applications.federated.local_training import LocalTraining, RoundWork, load_state, state_of
from netkin.errors import FileFault, ForwardError, NoValue, ValueFault
from netkin.identity import function_digest, settings_digest
from netkin.jobs import Job
from netkin.progress import reporting
from netkin.results import Comparison
from netkin.results.federation import Federation, RoundRecord
from netkin.results.records import checked, plain_fields
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Recipe, accuracy, train
from netkin.training.example_order import Arrays
from netkin.training.restarts import form_of

Wire = Callable[[ClientUpdate], Iterable[ClientUpdate]]
REACHED, PRETRAINING = "standing", "pretraining"


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
            "model": settings_digest([state_of(self.model), form_of(self.model), still, self.plan.parts]),
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

    def run(self, call: str) -> Federation:
        """Return the federation, from its first round or from where it stopped."""
        last = [f"fine-tuning after round {self.asked.rounds}"] * bool(self.asked.finetune)
        first = [PRETRAINING] * (self.asked.public is not None)
        self.job.expect([*first, *map(_part_name, range(1, self.asked.rounds + 1)), *last])
        if self.asked.public is not None:
            self.base |= self._restored(self.job.part(PRETRAINING, self._pretrained).arrays, "base")
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
        held = self.job.find(REACHED)
        if held is None:
            own = {name: self.base[name] for name in self.plan.kept}
            return _Progress({name: self.base[name] for name in self.plan.travelling}, [own] * len(self.names))
        with files.damage_reported(f"{self.job.folder}: {REACHED}"):
            records = [checked(RoundRecord, one) for one in held.values["records"]]
            shared = self._restored(held.arrays, "shared")
            kept = self._unstacked(self._restored(held.arrays, "kept"))
        if len(records) > self.asked.rounds:
            raise FileFault(
                f"{str(self.job.folder)!r} holds {len(records)} rounds, more than the {self.asked.rounds} asked for; "
                "ask for as many or more, or give another path."
            )
        for one in records:  # the process may have been killed between the two writings
            self.job.part(_part_name(one.round), partial(_plain, one))
        return _Progress(shared, kept, records)

    def _keep(self, reached: _Progress) -> None:
        if self.job.folder is not None:
            shared = {f"shared/{name}": as_array(one) for name, one in reached.shared.items()}
            records = {"records": [_plain(one) for one in reached.records]}
            self.job.keep(REACHED, records, self._packed(reached.kept) | shared)
        self.job.keep(_part_name(reached.records[-1].round), _plain(reached.records[-1]))

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
        for name, state in working:
            weights = {key: state[key] for key in self.plan.travelling}
            came = self.asked.wire(ClientUpdate(name, number, weights, len(self.asked.clients[name][1])))
            arriving += _updates(came)
        good, faults = received_updates(arriving, [name for name, _ in working], number, reached.shared)
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
            travels=self.plan.travelling,
            numbers=sum(self.base[name].numel() for name in self.plan.travelling), leaks=self.plan.leaks, shared=common,
            personal={key.partition("/")[2]: one for key, one in self._packed(reached.kept).items()},
            seed=self.asked.seed, provenance={"call": call, "recipe": self.asked.recipe.words},
        )  # fmt: skip
        return _with_similarity(found)

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


def _with_similarity(found: Federation) -> Federation:
    """Return the federation with its clients' similarity by atoms, where these are their own and comparable."""
    parts = {found.parts[name] for name in found.personal}
    if "atoms" not in parts or "coefficients" in parts or len(found.clients) < 2:
        return found
    try:
        alike: Comparison = user_similarity(found)
    except NoValue as fault:  # atoms that are all zero, as one client has them: the federation is worth keeping
        return replace(found, provenance={**found.provenance, "no similarity": str(fault)})
    return replace(found, similarity=alike)


def _updates(came: Any) -> list[ClientUpdate]:
    """Return what a wire let arrive; anything but updates is refused."""
    found = list(came) if isinstance(came, Iterable) else [came]
    if not all(isinstance(one, ClientUpdate) for one in found):
        raise ValueFault(f"`wire` must return a list of the updates that arrive, `[update]` or `[]`; got {came!r}.")
    return found


def plain_wire(update: ClientUpdate) -> Iterable[ClientUpdate]:
    """Let every update arrive as it is."""
    return [update]


def _part_name(number: int) -> str:
    return f"round {number}"


def _plain(record: RoundRecord) -> dict[str, Any]:
    return plain_fields(record)


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor for a file or a message, bfloat16 as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
