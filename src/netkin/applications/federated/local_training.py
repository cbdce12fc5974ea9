"""Local training: clients that train copies of a network at the same time; and checks of their data and settings.

Copies are stacked into one where that is faster. A client whose training fails does not affect the others: its group is
halved until it is isolated, and it is reported.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.applications.federated.algorithms import FederatedPlan, mixed
from netkin.errors import (
    ForwardError,
    InvalidValue,
    NameClash,
    NetkinError,
    ShapeError,
    UnknownName,
    did_you_mean,
    require_at_least,
)
from netkin.progress import showing
from netkin.representations.inputs import device_of, dtype_of
from netkin.settings import evaluating
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Recipe
from netkin.training.class_splits import as_examples
from netkin.training.example_order import placed
from netkin.training.loop import default_loss
from netkin.training.many import WAYS, Trainings
from netkin.training.recipe import recipe_of

Trained = list[tuple[StateDict, bool, float]]  # weights, whether they are finite, and the last loss
USUAL = Recipe(epochs=1, rate=0.01, momentum=0.9, batch=32)  # rate and momentum of section A.2
HELD = 4  # stacked networks that are held at a time, for the phases of a round


class LocalTraining:
    """Trains copies of a model from given weights; copies, and their recordings on a GPU, are used again."""

    def __init__(self, model: nn.Module, recipe: Recipe, how: str = "auto"):
        self.model, self.recipe, self.how = model, recipe, how
        self.held: dict[Any, Trainings] = {}  # by what they train, how many and on what
        self._copies: list[nn.Module] = []
        self._finite: dict[int, tuple[Tensor, bool]] = {}

    def train(
        self, starts: Sequence[StateDict], data: Sequence[LabelledData], seeds: Sequence[int], only: Sequence[str],
        *, epochs: int | None = None, toward: StateDict | None = None, pull: float = 0.0,
    ) -> list[tuple[StateDict, float] | str]:  # fmt: skip
        """Return the weights and the loss of each client after its training, or why it failed.

        Args:
            starts: the weights and buffers of each client, all of them.
            data: the examples of each client.
            seeds: from which the order of the examples follows.
            only: the names of the weights that are trained; what else is among them is left alone.
            epochs: how many, instead of the recipe's.
            toward: weights to which those that are trained are pulled.
            pull: the factor of ``½ ‖w − toward‖²`` in the loss.
        """
        recipe = self.recipe if epochs is None else self.recipe.but(epochs=epochs, steps=None)
        call = _Call(self, list(starts), list(data), list(seeds), frozenset(only), recipe, toward, pull)
        if not any(name in call.only for name, _ in self.model.named_parameters()):
            return [(start, float("nan")) for start in starts]
        for key, places in self._alike(call.data, recipe).items():
            call.run(places, key)
        return call.found

    def _alike(self, data: Sequence[LabelledData], recipe: Recipe) -> dict[Any, list[int]]:
        """Return the places of clients whose data are of one form, so that they can be stacked, by that form."""
        found: dict[Any, list[int]] = {}
        whole = recipe.drop_last or recipe.order == "drawn"  # all batches are of one size, however many examples
        for place, (inputs, _) in enumerate(data):
            if id(inputs) not in self._finite:  # data with NaN are apart, since their training will fail
                finite = not inputs.is_floating_point() or bool(inputs.isfinite().all())
                self._finite[id(inputs)] = inputs, finite
            key = tuple(inputs.shape[whole:]), inputs.dtype, self._finite[id(inputs)][1]
            found.setdefault(key, []).append(place)
        return found

    def hold(self, key: Any, call: Trainings) -> None:
        """Keep networks that were stacked, for the next time; the oldest give way."""
        self.held[key] = call
        while len(self.held) > HELD:
            self.held.pop(next(iter(self.held)))

    def copies(self, count: int) -> list[nn.Module]:
        """Return so many copies of the model."""
        while len(self._copies) < count:
            self._copies.append(copy.deepcopy(self.model))
        return self._copies[:count]


@dataclass
class _Call:
    training: LocalTraining
    starts: list[StateDict]
    data: list[LabelledData]
    seeds: list[int]
    only: frozenset[str]
    recipe: Recipe
    toward: StateDict | None
    pull: float
    found: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = [""] * len(self.starts)
        self.toward = self.toward if self.pull else None

    def run(self, places: list[int], form: Any) -> None:
        """Train clients whose data are of one form, at once; where that fails, each half by itself."""
        try:
            found = self._again(places, form) or self._anew(places, form)
        except Exception as fault:  # whatever it is, it is one client's; where it is all clients', the round says so
            if _is_asked_for(fault):
                raise
            if len(places) == 1:
                self.found[places[0]] = _in_words(fault)
                return
            middle = len(places) // 2
            self.run(places[:middle], form)
            self.run(places[middle:], form)
            return
        for place, (state, fine, loss) in zip(places, found, strict=True):
            self.found[place] = (state, loss) if fine else f"its weights are not finite after a mean loss of {loss:.3g}"

    def _anew(self, places: list[int], form: Any) -> Trained:
        """Train copies of the model, and hold them where they were stacked."""
        models = self.training.copies(len(places))
        for model, place in zip(models, places, strict=True):
            load_state(model, self.starts[place])
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in self.only)
        recipe, loss, trained = self.recipe, None, models
        if self.toward is not None:
            trained = [_Pulled(model, self.toward, self.only, self.pull) for model in models]
            recipe, loss = recipe.but(smoothing=0.0), _WithPull(default_loss(recipe))
        data, seeds = [self.data[place] for place in places], [self.seeds[place] for place in places]
        call = Trainings(trained, data, recipe, None, seeds, loss)
        with showing(False):
            histories = call.run(self.training.how if len(places) > 1 else "one by one")
        if call.stacked is not None:
            self.training.hold(self._key(places, form), call)
        states = [state_of(model) for model in models]
        return [(state, _is_finite(state), own[-1]["loss"]) for state, own in zip(states, histories, strict=True)]

    def _again(self, places: list[int], form: Any) -> Trained | None:
        """Train as networks did that are held, by their recording; None where there are none for it."""
        call = self.training.held.get(self._key(places, form))
        if call is None:
            return None
        starts, inner = [self.starts[place] for place in places], ""
        if self.toward is not None:
            inner, pulled = "net.", call.models[0]
            anchors = {f"anchor{k}": self.toward[name] for k, name in enumerate(pulled.names)}  # type: ignore[arg-type]
            starts = [anchors | {f"net.{name}": one for name, one in start.items()} for start in starts]
        with showing(False):
            found = call.again(starts, [self.data[place] for place in places], [self.seeds[place] for place in places])
        if found is None:
            return None
        states = [{name.removeprefix(inner): one for name, one in own.items() if name.startswith(inner)}
                  for own in found[0]]  # fmt: skip
        return list(zip(states, found[1], (history[-1]["loss"] for history in found[2]), strict=True))

    def _key(self, places: list[int], form: Any) -> Any:
        return len(places), form, self.only, self.recipe, self.pull if self.toward is not None else None


class _Pulled(nn.Module):
    """A network that gives, beside its outputs, half the squared distance of its weights to others, times a factor."""

    def __init__(self, net: nn.Module, toward: StateDict, only: frozenset[str], pull: float):
        super().__init__()
        self.net, self.pull = net, pull
        self.names = [name for name, _ in net.named_parameters() if name in only and name in toward]
        for number, name in enumerate(self.names):
            self.register_buffer(f"anchor{number}", toward[name].detach())

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        weights = dict(self.net.named_parameters())
        apart = [(weights[name] - getattr(self, f"anchor{k}")).square().sum() for k, name in enumerate(self.names)]
        return self.net(inputs), sum(apart, torch.zeros((), device=inputs.device)) * (self.pull / 2)


class _WithPull:
    """The loss of a pulled network: that of its outputs, and its pull."""

    def __init__(self, loss: Any):
        self.loss = loss

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        scores, pull = outputs
        return self.loss(scores, labels) + pull


class RoundWork:
    """The training of one round's clients for the algorithms; `failed` holds the reasons where there is no result."""

    def __init__(
        self, training: LocalTraining, plan: FederatedPlan, base: StateDict,
        clients: Sequence[tuple[str, LabelledData]], *, seed: int, number: int, pull: float, head_epochs: int | None,
    ):  # fmt: skip
        self.training, self.plan, self.base, self.clients = training, plan, base, list(clients)
        self.seed, self.number, self.pull, self.head_epochs = seed, number, pull, head_epochs
        self.failed: dict[int, str] = {}
        self.losses: dict[int, float] = {}
        self._phase = 0

    def train(
        self, starts: Sequence[StateDict], only: Sequence[str] | None = None, *, toward: StateDict | None = None,
        epochs: int | None = None,
    ) -> list[StateDict]:  # fmt: skip
        """Return the weights of all clients, trained from `starts`; those of a client that failed are left alone."""
        self._phase += 1
        names = [name for name in (self.plan.trained if only is None else only) if name in self.plan.trained]
        places = [place for place in range(len(self.clients)) if place not in self.failed]
        found = self.training.train(
            [self.base | starts[place] for place in places],
            [self.clients[place][1] for place in places],
            [mixed(self.seed, self.number, self.clients[place][0], self._phase) for place in places],
            names, epochs=epochs, toward=toward, pull=self.pull,
        )  # fmt: skip
        after = list(starts)
        for place, one in zip(places, found, strict=True):
            if isinstance(one, str):
                self.failed[place] = f"its training failed: {one}"
            else:
                after[place], self.losses[place] = one
        return after


def local_recipe(recipe: Recipe | None, settings: dict[str, Any]) -> Recipe:
    """Return how a client trains in a round: the usual way, or a recipe, with some settings changed."""
    start = USUAL if recipe is None else recipe
    if settings.get("steps") is not None and "epochs" not in settings and recipe is None:
        settings = settings | {"epochs": None}
    return recipe_of(start, settings)


def refuse_settings(rounds: Any, share: Any, pull: Any, finetune: Any, head_epochs: Any, pretrain_epochs: Any) -> None:
    """Refuse numbers of rounds and epochs, a share and a pull that make no sense."""
    require_at_least(1, rounds=rounds, pretrain_epochs=pretrain_epochs)
    require_at_least(1, **({} if head_epochs is None else {"head_epochs": head_epochs}))
    require_at_least(0, finetune=finetune)
    if not 0 < share <= 1:
        raise InvalidValue(
            f"`share` is a share of the clients, above 0 and at most 1; got {share!r}.", argument="share"
        )
    if not 0 <= pull < float("inf"):
        raise InvalidValue(f"`pull` must be a number of 0 or more; got {pull!r}.", argument="pull")


def refuse_no_tests(every: Any, tests: Mapping[str, LabelledData]) -> None:
    """Refuse to test every so many rounds where that is no number of rounds, or where there are no tests."""
    if every is None:
        return
    require_at_least(1, test_every=every)
    if not tests:
        raise InvalidValue("`test_every` needs data to test on; give `test=`.", argument="test_every")


def refuse_way(how: str) -> None:
    """Refuse a way to train that `nk.train_many` does not have, before it is reported as a failure of clients."""
    if how not in ("auto", *WAYS):
        raise UnknownName(f"no way {how!r} to train{did_you_mean(how, WAYS) or '.'} There are auto, {', '.join(WAYS)}.")


def state_of(model: nn.Module) -> StateDict:
    """Return copies of all weights and buffers of a model."""
    return {name: one.detach().clone() for name, one in (*model.named_parameters(), *model.named_buffers())}


@torch.no_grad()
def load_state(model: nn.Module, state: StateDict) -> None:
    """Give a model all weights and buffers in `state`."""
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if name in state:
            own.copy_(state[name])


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor for a file or a message, bfloat16 as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _is_finite(state: StateDict) -> bool:
    return bool(torch.stack([one.isfinite().all() for one in state.values() if one.is_floating_point()]).all())


def _is_asked_for(fault: Exception) -> bool:
    """Return whether networks could not be trained in the way that was requested, which is no client's fault."""
    return isinstance(fault, NetkinError) and fault.argument == "how"


def _in_words(fault: Exception) -> str:
    said = (str(fault).strip().splitlines() or [""])[0]
    return said if isinstance(fault, ForwardError) else f"{type(fault).__name__}: {said}"


def checked_clients(clients: Any, test: Any) -> tuple[dict[str, LabelledData], dict[str, LabelledData]]:
    """Return the examples of all clients by name, for training and for tests; refuse what can't be trained on.

    `test` has some for each client, or is one pair of arrays for all of them, or None.
    """
    train = {name: as_examples(own, f"client {name!r}") for name, own in _named(clients).items()}
    if not train:
        raise InvalidValue("a federation needs clients; give a mapping from names to `(inputs, labels)`.")
    empty = [name for name, (_, labels) in train.items() if not len(labels)]
    if empty:
        raise InvalidValue(
            f"{len(empty)} of {len(train)} clients have no examples to train on: {_listed(empty)}; leave them out, or "
            "use fewer clients."
        )
    if test is None:
        return train, {}
    if isinstance(test, tuple):
        whole = as_examples(test, "`test`")
        return train, dict.fromkeys(train, whole)
    tests = {name: as_examples(own, f"the test data of client {name!r}") for name, own in _named(test).items()}
    strange, missing = [name for name in tests if name not in train], [name for name in train if name not in tests]
    if strange or missing:
        raise UnknownName(
            f"`test` must have data for each client; it has {len(strange)} of others ({_listed(strange)}) and lacks "
            f"{len(missing)} ({_listed(missing)}).",
            argument="test",
        )
    return train, {name: tests[name] for name in train if len(tests[name][1])}


def public_examples(public: Any) -> LabelledData:
    """Return the examples of `public` for pretraining; none are refused."""
    if public is None:
        raise InvalidValue(
            "pretraining needs data that no client owns; give `public=(inputs, labels)`.", argument="public"
        )
    found = as_examples(public, "`public`")
    if not len(found[1]):
        raise InvalidValue("`public` holds no examples.", argument="public")
    return found


def _named(clients: Any) -> dict[str, Any]:
    if isinstance(clients, Mapping):
        found = {str(name): own for name, own in clients.items()}
        if len(found) < len(clients):
            raise NameClash("clients must have distinct names, also as texts.")
        return found
    if isinstance(clients, Sequence) and not isinstance(clients, (str, bytes, tuple)):
        return {str(number): own for number, own in enumerate(clients)}
    raise InvalidValue(
        f"clients are a mapping from names to `(inputs, labels)`, or a list of these; got {type(clients).__name__}."
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more


@torch.no_grad()
def refuse_misfits(model: nn.Module, clients: Mapping[str, LabelledData], tests: Mapping[str, LabelledData]) -> None:
    """Refuse labels beyond the network's outputs, which on a GPU would end the process."""
    shapes = Counter(tuple(inputs.shape[1:]) for inputs, _ in clients.values())
    common, _ = shapes.most_common(1)[0]
    inputs = next(one for one, _ in clients.values() if tuple(one.shape[1:]) == common)
    model = copy.deepcopy(model)
    with evaluating(model):
        try:
            outputs = model(placed(inputs[:2], device_of(model), dtype_of(model)))
        except Exception as fault:
            raise ForwardError(f"the model can't run on the clients' examples of shape {common}: {fault}") from fault
    if not isinstance(outputs, Tensor) or outputs.is_nested or outputs.ndim != 2:
        raise ShapeError("a federation trains classifiers, which give a matrix of scores, a row for each example.")
    for name, (_, labels) in [*clients.items(), *tests.items()]:
        if int(labels.max()) >= outputs.shape[1]:
            raise ShapeError(
                f"client {name!r} has labels up to {int(labels.max())}, and the network {outputs.shape[1]} outputs."
            )
