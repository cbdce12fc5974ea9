"""Methods of continual learning: what each trains, on which data, and what it keeps of a task.

All have one network with a linear head for each task; the task of an example is given at test time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.utils.parametrize import type_before_parametrizations

from netkin.errors import InvalidValue, UnknownName, require_at_least, require_listed
from netkin.representations.filters import atom_layers, decompose, put
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import device_of, dtype_of
from netkin.representations.layer_weights import copied
from netkin.representations.layers import modules, unwrapped
from netkin.settings import called_with, evaluating
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict
from netkin.training import Hook, Recipe, train
from netkin.training.class_splits import Task
from netkin.training.example_order import Arrays, placed
from netkin.training.work_plan import Work, training_work

CHUNK = 16  # examples whose gradients are taken at once


class TaskHeads(nn.ModuleList):
    """A linear head for each task; `active` is the one that answers, None for all side by side, -1 for none."""

    active: int | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of the active head, those of all heads in a row, or the features as they came."""
        if self.active is None:
            return torch.cat([head(features) for head in self], dim=-1)
        return features if self.active < 0 else self[self.active](features)


def with_heads(model: nn.Module, head: str | None, classes: Sequence[int], seed: int) -> tuple[nn.Module, str]:
    """Return a copy of `model` with a head for each task, drawn from `seed`, and their name in it."""
    made = copied(unwrapped(model))
    known = {name: one for name, one in modules(made).items() if name and isinstance(one, nn.Linear)}
    known = {name: one for name, one in known.items() if type_before_parametrizations(one) is nn.Linear}
    name = list(known)[-1] if head is None and known else head
    if name is None or name not in known:
        why = f"none is named {head!r}" if head else "it has none"
        raise UnknownName(
            f"the network must end in a linear layer that heads can replace, and {why}; give `head=`.", argument="head"
        )
    old, heads = known[name], []
    for task, count in enumerate(classes):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 10_000 + task)
            heads.append(nn.Linear(old.in_features, count).to(old.weight))
    put(made, old, TaskHeads(heads))
    return made, name


def mixed_loss(outputs: Any, labels: Tensor, classes: Sequence[int], smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of examples of several tasks, each among the classes of its own task.

    `outputs` are the logits of all heads in a row, and labels count all classes of all tasks in a row.
    """
    logits, start = main_tensor(outputs, ""), 0
    total = logits.new_zeros(())
    for count in classes:
        rows = (labels >= start) & (labels < start + count)
        if bool(rows.any()):
            own, right = logits[rows, start : start + count], labels[rows] - start
            total = total + cross_entropy(own, right, reduction="sum", label_smoothing=smoothing)
        start += count
    return total / len(labels)


class Learner:
    """One way of learning tasks in a row.

    `shared` are the weights that all tasks have in common, `own[t]` those of task t alone, `memory[t]` what else is
    kept of task t. Together they are all that it has learnt: their numbers are what it stores.
    """

    name: str
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: nn.Module, head: str | None, tasks: Sequence[Task], seed: int, **options: Any):
        self.tasks, self.seed, self.classes = tasks, seed, [task.classes for task in tasks]
        self.settings = {**self.options, **options}
        self.model, self.head = with_heads(self.prepared(model), head, self.classes, seed)
        self.heads = next(one for one in self.model.modules() if isinstance(one, TaskHeads))
        self.memory: list[StateDict] = [{} for _ in tasks]
        state, private = self._state(), self.private()
        self.shared = {name: one for name, one in state.items() if not self._of_heads(name) and name not in private}
        self.own = [{name: state[name] for name in (*private, *self.head_weights(t))} for t in range(len(tasks))]

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network in the form in which it is trained."""
        return model

    def private(self) -> list[str]:
        """Return the task-specific weights and buffers, apart from the head."""
        return []

    def trained(self, task: int) -> Sequence[str]:
        """Return the parameters that learn on a task: the body and the task's head."""
        return [*self.body(), *self.head_weights(task)]

    def learns(self, task: int) -> bool:
        """Return whether a new task requires training."""
        return True

    def hooks(self, task: int, recipe: Recipe) -> list[Hook]:
        """Return what changes the training on a task."""
        return []

    def finish(self, task: int) -> None:
        """Store what later tasks need of this one."""

    def work(self, task: int, recipe: Recipe) -> list[Work]:
        """Return what learning a task would take."""
        return [training_work("training", Arrays(self.tasks[task].train, recipe, 0), recipe)]

    def learn(self, task: int, recipe: Recipe) -> None:
        """Learn one task, after those before it."""
        self._load(task)
        self.heads.active = task
        free = set(self.trained(task))
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name in free)
        self._train(task, recipe, self.seed * 10_000 + task)
        self._keep(task)
        self.finish(task)

    def network(self, task: int) -> nn.Module:
        """Return a copy of a task's network, in evaluation mode."""
        self._load(task)
        self.heads.active = task
        return copied(self.model).eval().requires_grad_(True)

    def state(self) -> dict[str, Any]:
        """Return all that was learnt."""
        return {"shared": self.shared, "own": self.own, "memory": self.memory}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        place = device_of(self.model)

        def moved(one: Mapping[str, Tensor]) -> StateDict:
            return {name: tensor.to(place) for name, tensor in one.items()}

        self.shared, self.own = moved(state["shared"]), [moved(one) for one in state["own"]]
        self.memory = [moved(one) for one in state["memory"]]

    def storage(self) -> dict[str, int]:
        """Return how many numbers are kept: shared by all tasks, of each further task, and in all."""
        each = [_count(own) + _count(memory) for own, memory in zip(self.own, self.memory, strict=True)]
        shared = _count(self.shared)
        return {"shared": shared, "each task": max(each), "in all": shared + sum(each)}

    def body(self) -> list[str]:
        """Return the parameters that belong to no head."""
        return [name for name, _ in self.model.named_parameters() if not self._of_heads(name)]

    def _train(self, task: int, recipe: Recipe, seed: int) -> None:
        train(self.model, self.tasks[task].train, recipe, seed=seed, hooks=self.hooks(task, recipe), progress=False)

    def _load(self, task: int) -> None:
        state = dict(self.shared)
        for one in (*self.own, self.own[task]):
            state |= one
        self.model.load_state_dict(state)

    def _keep(self, task: int) -> None:
        state = self._state()
        self.shared = {name: state[name] for name in self.shared}
        self.own[task] = {name: state[name] for name in self.own[task]}
        for other in range(len(self.tasks)):
            self.own[other] |= {name: state[name] for name in self.head_weights(other)}

    def _state(self) -> StateDict:
        return {name: one.detach().clone() for name, one in self.model.state_dict().items()}

    def _of_heads(self, name: str) -> bool:
        return name.startswith(f"{self.head}.")

    def head_weights(self, task: int) -> list[str]:
        """Return the names of the weights of a task's head."""
        return [f"{self.head}.{task}.weight", f"{self.head}.{task}.bias"]


class FineTuning(Learner):
    """The network is trained on each task in turn, and nothing holds it back: the lower reference."""

    name = "finetune"


class AtomLearner(Learner):
    """Atoms, coefficients and all else learn on the first task; afterwards atoms and head only (Chen et al. 2023, 3.4).

    Every further task begins from the atoms of the first one. Buffers, as the means of batch norms, are each task's
    own, so that no task changes the network of another.
    """

    name = "atoms"
    options: ClassVar[Mapping[str, Any]] = {"atoms": None}

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network made of atoms."""
        return decompose(model, atoms=self.settings["atoms"]).model

    def private(self) -> list[str]:
        """Return the atoms and the buffers."""
        weights = {name for name, _ in self.model.named_parameters()}
        return [*self._atoms(), *(name for name in self.model.state_dict() if name not in weights)]

    def trained(self, task: int) -> Sequence[str]:
        """Return everything for the first task, then the atoms and the task's head."""
        return [*(self._atoms() if task else self.body()), *self.head_weights(task)]

    def finish(self, task: int) -> None:
        """Let every later task begin from the atoms of the first one."""
        for later in range(1, len(self.tasks)) if task == 0 else ():
            self.own[later] |= {name: self.own[0][name] for name in self.private()}

    def _atoms(self) -> list[str]:
        return [f"{name}.atoms" for name, _ in atom_layers(self.model)]


class SeparateLearner(Learner):
    """Every task has a network for itself, trained from the start: nothing is shared and nothing forgotten."""

    name = "separate"

    def private(self) -> list[str]:
        """Return everything but the heads."""
        return [name for name in self.model.state_dict() if not self._of_heads(name)]


class JointLearner(Learner):
    """One network is trained on all tasks at once, at the end: a reference that is not continual learning."""

    name = "joint"

    def learns(self, task: int) -> bool:
        """Wait for the last task."""
        return task == len(self.tasks) - 1

    def trained(self, task: int) -> Sequence[str]:
        """Return all weights."""
        return [name for name, _ in self.model.named_parameters()]

    def work(self, task: int, recipe: Recipe) -> list[Work]:
        """Return the training on all tasks at once."""
        data = in_a_row([one.train for one in self.tasks], self.classes)
        return [training_work("training", Arrays(data, recipe, 0), recipe)]

    def _train(self, task: int, recipe: Recipe, seed: int) -> None:
        self.heads.active = None
        data = in_a_row([one.train for one in self.tasks], self.classes)

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return mixed_loss(outputs, labels, self.classes, recipe.smoothing)

        train(self.model, data, recipe.but(smoothing=0.0), seed=seed, loss=loss, progress=False)


class ElasticLearner(Learner):
    """Weights are drawn back to where earlier tasks left them, by Fisher information (Kirkpatrick et al. 2017)."""

    name = "ewc"
    options: ClassVar[Mapping[str, Any]] = {"strength": 1.0, "examples": 200}

    def work(self, task: int, recipe: Recipe) -> list[Work]:
        """Return the training, and the gradients of each class that the Fisher information takes."""
        own, count = super().work(task, recipe), min(self.settings["examples"], len(self.tasks[task].train[1]))
        if task == len(self.tasks) - 1:
            return own
        return [*own, Work("Fisher information", count, backward=max(self.classes))]

    def hooks(self, task: int, recipe: Recipe) -> list[Hook]:
        """Return the penalty for all earlier tasks."""
        return [_Elastic(self.memory[:task], self.settings["strength"])] if task else []

    def finish(self, task: int) -> None:
        """Keep the weights of the body, and their Fisher information on this task."""
        if task == len(self.tasks) - 1:
            return  # no later task needs them
        inputs, labels = self.tasks[task].train
        draw = torch.Generator().manual_seed(self.seed * 10_000 + task)
        rows = torch.randperm(len(labels), generator=draw)[: self.settings["examples"]]
        found = expected_fisher(self.model, inputs[rows.to(inputs.device)], self.body())
        weights = dict(self.model.named_parameters())
        self.memory[task] = {f"fisher of {name}": one for name, one in found.items()}
        self.memory[task] |= {f"weights of {name}": weights[name].detach().clone() for name in found}


class ReplayLearner(Learner):
    """Some examples of each task are kept, and every step learns from a batch of them too (experience replay)."""

    name = "replay"
    options: ClassVar[Mapping[str, Any]] = {"examples": 50}

    def work(self, task: int, recipe: Recipe) -> list[Work]:
        """Return the training; each batch of a later task is joined by as many examples that were kept."""
        own = super().work(task, recipe)
        return [*own, Work("examples that were kept", own[0].examples, backward=1)] if task else own

    def trained(self, task: int) -> Sequence[str]:
        """Return the body and the heads of all tasks that have come."""
        return [*self.body(), *(name for one in range(task + 1) for name in self.head_weights(one))]

    def hooks(self, task: int, recipe: Recipe) -> list[Hook]:
        """Return the loss on kept examples."""
        kept = [(one["inputs"], one["labels"]) for one in self.memory[:task]]
        seed = self.seed * 10_000 + task
        return [_Replay(self.heads, kept, self.classes, recipe.smoothing, seed)] if task else []

    def finish(self, task: int) -> None:
        """Keep examples, drawn at random."""
        inputs, labels = self.tasks[task].train
        draw = torch.Generator().manual_seed(self.seed * 10_000 + task)
        rows = torch.randperm(len(labels), generator=draw)[: self.settings["examples"]].to(labels.device)
        place = device_of(self.model)
        self.memory[task] = {"inputs": inputs[rows].to(place), "labels": labels[rows].to(place)}


def in_a_row(parts: Sequence[LabelledData], classes: Sequence[int]) -> LabelledData:
    """Return the examples of several tasks as one, their labels counting all classes in a row."""
    starts = [sum(classes[:position]) for position in range(len(parts))]
    inputs = torch.cat([part[0] for part in parts])
    return inputs, torch.cat([part[1] + start for part, start in zip(parts, starts, strict=True)])


def expected_fisher(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> StateDict:
    """Return the diagonal of the Fisher information of the named weights, the mean over examples.

    It is ``Σ_c p(c|x) (∂ log p(c|x) / ∂w)²``, the exact expectation over the classes that the network itself
    predicts, without sampling labels. The network is in evaluation mode, so that examples do not affect each other.
    """
    place, weights = device_of(model), {n: one.detach() for n, one in model.named_parameters()}
    chosen = {name: weights[name] for name in names}

    def log_likelihood(own: StateDict, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logs = log_softmax(main_tensor(called_with(model, {**weights, **own}, x.unsqueeze(0)), "")[0], -1)
        return logs[label], logs.detach()

    each = vmap(grad(log_likelihood, has_aux=True), in_dims=(None, 0, None))
    total = {name: torch.zeros_like(one) for name, one in chosen.items()}
    with evaluating(model):
        for chunk in inputs.to(place, next(iter(chosen.values())).dtype).split(CHUNK):
            classes, label = 1, 0
            while label < classes:
                gradients, logs = each(chosen, chunk, torch.tensor(label, device=place))
                share, classes, label = logs.exp()[:, label], logs.shape[1], label + 1
                for name, one in gradients.items():
                    total[name] += torch.einsum("n,n...->...", share, one**2)
    return {name: one / len(inputs) for name, one in total.items()}


class _Elastic(Hook):
    def __init__(self, memory: Sequence[StateDict], strength: float):
        self.memory, self.strength, self.settings = memory, strength, strength

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return half the strength times the squared distances to earlier weights, weighted by Fisher information."""
        return elastic_penalty(dict(model.named_parameters()), self.memory, self.strength)


def elastic_penalty(weights: Mapping[str, Tensor], memory: Sequence[StateDict], strength: float) -> Tensor:
    """Return ``strength / 2 · Σ_tasks Σ_i F_i (w_i - w*_i)²``, Eq. 3 of Kirkpatrick et al. for several tasks."""
    terms = [
        (fisher * (weights[name.removeprefix("fisher of ")] - kept[f"weights of {name[10:]}"]) ** 2).sum()
        for kept in memory
        for name, fisher in kept.items()
        if name.startswith("fisher of ")
    ]
    return strength / 2 * torch.stack(terms).sum()


class _Replay(Hook):
    def __init__(
        self, heads: TaskHeads, kept: Sequence[LabelledData], classes: Sequence[int], smoothing: float, seed: int
    ):
        self.heads, self.classes, self.smoothing, self.seed = heads, list(classes), smoothing, seed
        self.settings = [self.classes, smoothing, seed]
        self.inputs, self.labels = in_a_row(kept, classes)

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return the loss of as many kept examples as the batch has, drawn from the seed and the step."""
        draw = torch.Generator().manual_seed(self.seed * 100_003 + step)
        rows = torch.randint(len(self.labels), (len(inputs),), generator=draw).to(self.labels.device)
        active, self.heads.active = self.heads.active, None
        try:
            inputs = placed(self.inputs[rows], device_of(model), dtype_of(model))
            return mixed_loss(model(inputs), self.labels[rows], self.classes, self.smoothing)
        finally:
            self.heads.active = active


LEARNERS: dict[str, type[Learner]] = {
    one.name: one for one in (AtomLearner, FineTuning, ElasticLearner, ReplayLearner, JointLearner, SeparateLearner)
}


def require_options(method: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown method, and options that it does not have or that make no sense."""
    require_listed("way of learning tasks", method, LEARNERS, "method")
    known = LEARNERS[method].options
    for name, value in options.items():
        if name not in known:
            offer = f"it has {', '.join(known)}" if known else "it has none"
            raise UnknownName(f"{method!r} has no option {name!r}; {offer}.", argument=name)
        if name == "strength" and (not isinstance(value, (int, float)) or not 0 <= value < float("inf")):
            raise InvalidValue(f"`strength` is a number of 0 or more; got {value!r}.", argument="strength")
        if name == "examples":
            require_at_least(1, examples=value)


def _count(state: StateDict) -> int:
    return sum(one.numel() for one in state.values())
