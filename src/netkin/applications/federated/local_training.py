"""Local training: clients that train copies of a network at the same time; and checks of their data and settings.

Copies are stacked into one where that is faster. A client whose training fails does not affect the others: its group is
halved until it is isolated, and it is reported.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.errors import ForwardError, InvalidValue, NameClash, ShapeError, UnknownName
from netkin.progress import showing
from netkin.representations.inputs import device_of, dtype_of
from netkin.settings import evaluating
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Recipe
from netkin.training.class_splits import as_examples
from netkin.training.example_order import Arrays, placed
from netkin.training.loop import default_loss
from netkin.training.many import Trainings, UnfitMethod
from netkin.training.recipe import recipe_of
from netkin.training.work_plan import Work, training_work

Client = tuple[StateDict, LabelledData, int]  # the weights it begins with, its examples, its seed
Trained = tuple[StateDict, bool, float]  # weights, whether they are finite, and the last loss
USUAL = Recipe(epochs=1, lr=0.01, momentum=0.9, batch=32)  # rate and momentum of section A.2
HELD = 4  # stacked networks that are held at a time, for the phases of a round


class LocalTraining:
    """Trains copies of a model from given weights; copies, and their recordings on a GPU, are used again."""

    def __init__(self, model: nn.Module, recipe: Recipe, method: str = "auto"):
        self.model, self.recipe, self.method = model, recipe, method
        self._stacked: dict[Any, Trainings] = {}  # by what they train, how many and on what
        self._copies: list[nn.Module] = []
        self._finite: dict[int, tuple[Tensor, bool]] = {}

    def train(
        self, starts: Sequence[StateDict], data: Sequence[LabelledData], seeds: Sequence[int], only: Sequence[str],
        *, epochs: int | None = None, toward: StateDict | None = None, prox: float = 0.0,
    ) -> list[tuple[StateDict, float] | str]:  # fmt: skip
        """Return the weights and the loss of each client after its training, or why it failed.

        Args:
            starts: the weights and buffers of each client, all of them.
            data: the examples of each client.
            seeds: from which the order of the examples follows.
            only: the names of the weights that are trained; what else is among them is left alone.
            epochs: how many, instead of the recipe's.
            toward: weights to which those that are trained are pulled.
            prox: the factor of ``½ ‖w − toward‖²`` in the loss.
        """
        if not any(name in only for name, _ in self.model.named_parameters()):
            return [(start, float("nan")) for start in starts]
        recipe = self.recipe if epochs is None else self.recipe.but(epochs=epochs, steps=None)
        phase = Phase(frozenset(only), recipe, toward if prox else None, prox)
        clients = list(zip(starts, data, seeds, strict=True))
        outcomes: dict[int, tuple[StateDict, float] | str] = {}
        for form, places in self._places_by_form(data, recipe).items():
            outcomes |= zip(places, self._outcomes([clients[place] for place in places], phase, form), strict=True)
        return [outcomes[place] for place in range(len(clients))]

    def copies(self, count: int) -> list[nn.Module]:
        """Return so many copies of the model."""
        while len(self._copies) < count:
            self._copies.append(copy.deepcopy(self.model))
        return self._copies[:count]

    def _places_by_form(self, data: Sequence[LabelledData], recipe: Recipe) -> dict[Any, list[int]]:
        """Return the places of clients whose data are of one form, so that they can be stacked, by that form."""
        places: dict[Any, list[int]] = {}
        whole = recipe.drop_last or recipe.order == "drawn"  # all batches are of one size, however many examples
        for place, (inputs, _) in enumerate(data):
            if id(inputs) not in self._finite:  # data with NaN are apart, since their training will fail
                finite = not inputs.is_floating_point() or bool(inputs.isfinite().all())
                self._finite[id(inputs)] = inputs, finite
            form = tuple(inputs.shape[whole:]), inputs.dtype, self._finite[id(inputs)][1]
            places.setdefault(form, []).append(place)
        return places

    def _outcomes(self, clients: list[Client], phase: Phase, form: Any) -> list[tuple[StateDict, float] | str]:
        """Train clients whose data are of one form, at once; where that fails, each half by itself."""
        try:
            trained = self._again(clients, phase, form) or self._anew(clients, phase, form)
        except UnfitMethod:
            raise
        except Exception as fault:  # whatever it is, it is one client's; where it is all clients', the round says so
            if len(clients) == 1:
                return [_in_words(fault)]
            middle = len(clients) // 2
            return [*self._outcomes(clients[:middle], phase, form), *self._outcomes(clients[middle:], phase, form)]
        return [
            (state, loss) if finite else f"its weights are not finite after a mean loss of {loss:.3g}"
            for state, finite, loss in trained
        ]

    def _anew(self, clients: list[Client], phase: Phase, form: Any) -> list[Trained]:
        """Train copies of the model, and hold them where they were stacked."""
        starts, data, seeds = (list(part) for part in zip(*clients, strict=True))
        models = self.copies(len(clients))
        for model, start in zip(models, starts, strict=True):
            load_state(model, start)
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in phase.only)
        recipe, loss, networks = phase.recipe, None, models
        if phase.toward is not None:
            networks = [_Proximal(model, phase.toward, phase.only, phase.prox) for model in models]
            recipe, loss = recipe.but(smoothing=0.0), _WithProximalTerm(default_loss(recipe))
        trainings = Trainings(networks, data, recipe, None, seeds, loss)
        with showing(False):
            histories = trainings.run(self.method if len(clients) > 1 else "one by one")
        if trainings.stacked is not None:
            self._stacked[len(clients), form, phase.key] = trainings
            while len(self._stacked) > HELD:  # the oldest give way
                self._stacked.pop(next(iter(self._stacked)))
        states = [state_of(model) for model in models]
        return [(state, _is_finite(state), own[-1]["loss"]) for state, own in zip(states, histories, strict=True)]

    def _again(self, clients: list[Client], phase: Phase, form: Any) -> list[Trained] | None:
        """Train as networks did that are held, by their recording; None where there are none for it."""
        trainings = self._stacked.get((len(clients), form, phase.key))
        if trainings is None:
            return None
        starts, data, seeds = (list(part) for part in zip(*clients, strict=True))
        inner = ""
        if phase.toward is not None:
            inner, proximal = "net.", trainings.models[0]
            anchors = {f"anchor{k}": phase.toward[name] for k, name in enumerate(proximal.names)}  # type: ignore[arg-type]
            starts = [anchors | {f"net.{name}": weight for name, weight in start.items()} for start in starts]
        with showing(False):
            trained = trainings.again(starts, data, seeds)
        if trained is None:
            return None
        states, finite, histories = trained
        states = [
            {name.removeprefix(inner): weight for name, weight in state.items() if name.startswith(inner)}
            for state in states
        ]
        return list(zip(states, finite, (history[-1]["loss"] for history in histories), strict=True))


class CountedTraining:
    """Stands for `LocalTraining` where a plan is made: it trains nothing, and notes what the training would be."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.work = recipe, list[Work]()

    def train(
        self, starts: Sequence[StateDict], data: Sequence[LabelledData], seeds: Sequence[int], only: Sequence[str],
        *, epochs: int | None = None, **options: Any,
    ) -> list[tuple[StateDict, float] | str]:  # fmt: skip
        """Note the training of each client, and return the weights with which it begins."""
        recipe = self.recipe if epochs is None else self.recipe.but(epochs=epochs, steps=None)
        if only:
            self.work += [training_work("training", Arrays(own, recipe, 0), recipe) for own in data]
        return [(start, float("nan")) for start in starts]


@dataclass(frozen=True, eq=False)
class Phase:
    """What is trained in a phase of a round: the names of the weights, and weights that they are pulled to."""

    only: frozenset[str]
    recipe: Recipe
    toward: StateDict | None
    prox: float

    @property
    def key(self) -> Any:
        """By what stacked networks are known that were trained in such a phase."""
        return self.only, self.recipe, None if self.toward is None else self.prox


class _Proximal(nn.Module):
    """A network that gives, beside its outputs, half the squared distance of its weights to others, times a factor."""

    def __init__(self, net: nn.Module, toward: StateDict, only: frozenset[str], prox: float):
        super().__init__()
        self.net, self.prox = net, prox
        self.names = [name for name, _ in net.named_parameters() if name in only and name in toward]
        for number, name in enumerate(self.names):
            self.register_buffer(f"anchor{number}", toward[name].detach())

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        weights = dict(self.net.named_parameters())
        apart = [(weights[name] - getattr(self, f"anchor{k}")).square().sum() for k, name in enumerate(self.names)]
        return self.net(inputs), sum(apart, torch.zeros((), device=inputs.device)) * (self.prox / 2)


class _WithProximalTerm:
    """The loss of a proximal network: that of its outputs, and its proximal term."""

    def __init__(self, loss: Any):
        self.loss = loss

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        scores, term = outputs
        return self.loss(scores, labels) + term


def local_recipe(recipe: Recipe | None, settings: dict[str, Any]) -> Recipe:
    """Return how a client trains in a round: the usual way, or a recipe, with some settings changed."""
    start = USUAL if recipe is None else recipe
    if settings.get("steps") is not None and "epochs" not in settings and recipe is None:
        settings = settings | {"epochs": None}
    return recipe_of(start, settings)


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


def _in_words(fault: Exception) -> str:
    said = (str(fault).strip().splitlines() or [""])[0]
    return said if isinstance(fault, ForwardError) else f"{type(fault).__name__}: {said}"


def checked_clients(clients: Any, test: Any) -> tuple[dict[str, LabelledData], dict[str, LabelledData]]:
    """Return the examples of all clients by name, for training and for tests; refuse what can't be trained on.

    `test` has some for each client, or is one pair of arrays for all of them, or None.
    """
    train = {name: as_examples(own, f"client {name!r}") for name, own in _named(clients).items()}
    if not train:
        raise InvalidValue(
            "a federation needs clients; give a mapping from names to `(inputs, labels)`.", argument="clients"
        )
    empty = [name for name, (_, labels) in train.items() if not len(labels)]
    if empty:
        raise InvalidValue(
            f"{len(empty)} of {len(train)} clients have no examples to train on: {_listed(empty)}; leave them out, or "
            "use fewer clients.",
            argument="clients",
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
    """Return the examples of `public` for pretraining; refuse data without examples."""
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
        f"clients are a mapping from names to `(inputs, labels)`, or a list of these; got {type(clients).__name__}.",
        argument="clients",
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more


@torch.no_grad()
def require_fitting_labels(
    model: nn.Module, clients: Mapping[str, LabelledData], tests: Mapping[str, LabelledData]
) -> None:
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
