"""Ensembles of a task's network and those of the most similar tasks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin import __version__
from netkin.applications.continual.learners import Learner, TaskHeads
from netkin.applications.continual.sequences import LearntTasks
from netkin.applications.continual.task_splits import Examples
from netkin.comparing.compare import compare_many
from netkin.errors import NoValue, UnknownName, ValueFault
from netkin.measures.registry import find
from netkin.progress import ProgressOption, reporting
from netkin.representations.filters import atom_layers
from netkin.representations.guests import evaluating
from netkin.representations.inputs import device_of, dtype_of
from netkin.results.task_accuracies import TaskEnsembles
from netkin.training import Recipe, train
from netkin.training.course import TEST_BATCH
from netkin.training.recipe import recipe_of

CHOICES = ("most similar", "least similar", "random")
CANDIDATES = ("earlier tasks", "all tasks")


def ensemble_tasks(
    learnt: LearntTasks,
    k: int = 3,
    recipe: Recipe | None = None,
    *,
    similarity: str = "atom_cosine",
    data: Any = None,
    choice: str = "most similar",
    candidates: str = "earlier tasks",
    progress: ProgressOption = None,
    **settings: Any,
) -> TaskEnsembles:
    """Return what each task gains when networks of `k` other tasks answer with its own (Chen et al. 2023, 3.4).

    A network of another task has other classes: its body stays as it is, and gets a head that is trained on this
    task. The probabilities of all are averaged. A control is trained further for as long, alone.

    Args:
        learnt: tasks that were learnt by "atoms".
        k: how many other tasks join at most.
        recipe: how the heads are trained; its settings can also be given by name, as ``epochs=10``.
        similarity: a measure, by which networks are compared layer by layer, the mean over the layers of atoms.
        data: examples on which the networks are compared; measures of weights, as "atom_cosine", need none.
        choice: "most similar", or for controls "least similar" or "random".
        candidates: "earlier tasks", whose networks are there when a task and its data come; or "all tasks", for which
            the data of all tasks have to be kept.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        **settings: settings of the recipe.
    """
    chosen = recipe_of(recipe, settings).but(shift=0, flip=False)  # of features there is nothing to move
    _refuse(learnt, k, choice, candidates)
    names, seeds = learnt.record.tasks, learnt.record.seeds
    members, tables, found = [], [], []
    with reporting(len(seeds) * len(names), "ensembles", "tasks", progress) as report:
        for seed in seeds:
            learner = learnt.learner(seed)
            bodies = [_body(learner, task) for task in range(len(names))]
            networks = {name: learner.network(task) for task, name in enumerate(names)}
            table, sign = _similarities(networks, similarity, data)
            groups = [_members(sign * table, task, k, choice, candidates, seed) for task in range(len(names))]
            for task, group in enumerate(groups):
                found.append(_accuracies(learner, bodies, task, group, chosen))
                report.update()
            tables.append(table)
            members.append(tuple(tuple(names[one] for one in group) for group in groups))
    alone, together, further = np.array(found).reshape(len(seeds), len(names), 3).transpose(2, 0, 1)
    added = [len(group) * _head_size(learnt.learner(), task) for task, group in enumerate(members[0])]
    return TaskEnsembles(
        tasks=names, seeds=seeds, similarity=similarity, choice=choice, candidates=candidates, members=tuple(members),
        similarities=np.stack(tables), alone=alone, together=together, further=further, storage=sum(added),
        recipe=chosen.words, version=__version__, provenance=learnt.record.provenance,
    )  # fmt: skip


def _similarities(networks: Mapping[str, nn.Module], measure: str, data: Any) -> tuple[np.ndarray, int]:
    """Return the mean over layers of a measure of all pairs of networks, and 1 for a similarity, -1 for a distance."""
    facts, layers = find(measure).facts, [name for name, _ in atom_layers(next(iter(networks.values())))]
    if not facts.symmetric:
        raise ValueFault(
            f"{measure!r} gives each direction a value of its own, and tasks are compared by one number for each pair; "
            "take 'cka'."
        )
    many = compare_many(networks, data, [measure], layers=layers, pairs="corresponding", progress=False)
    for (a, b), comparison in many.items():
        why = next((why for (one, other), why in comparison.table().holes.items() if one == other), None)
        if why is not None:
            raise NoValue(f"{measure!r} has no value for tasks {a!r} and {b!r}: {why}")
    return many.summary(), 1 if facts.higher_is_closer else -1


def _members(closeness: np.ndarray, task: int, k: int, choice: str, candidates: str, seed: int) -> list[int]:
    others = [one for one in range(len(closeness)) if (one < task if candidates == CANDIDATES[0] else one != task)]
    if choice == "random":
        draw = np.random.default_rng([seed, task])
        return [int(one) for one in draw.permutation(others)[:k]]
    sign = 1 if choice == "least similar" else -1
    return sorted(others, key=lambda one: sign * closeness[task, one])[:k]


def _accuracies(
    learner: Learner, bodies: Sequence[nn.Module], task: int, group: Sequence[int], recipe: Recipe
) -> tuple[float, float, float]:
    """Return the accuracy of a task's own network, of the ensemble, and of the own one trained further."""
    own, (inputs, labels) = learner.tasks[task], learner.tasks[task].test
    head = learner.network(task).get_submodule(learner.head)[task]  # type: ignore[index]
    features = _features(bodies[task], inputs)
    parts = [head(features).softmax(-1)]
    for position, member in enumerate(group):
        other = _fitted(_features(bodies[member], own.train[0]), own.train, head, recipe, learner.seed + position)
        parts.append(other(_features(bodies[member], inputs)).softmax(-1))
    times = max(len(group), 1)
    longer = recipe.but(epochs=recipe.epochs and recipe.epochs * times, steps=recipe.steps and recipe.steps * times)
    further = _fitted(_features(bodies[task], own.train[0]), own.train, head, longer, learner.seed) if group else head
    answers = parts[0], torch.stack(parts).mean(0), further(features)
    right = [float((one.argmax(-1).cpu() == labels.cpu()).double().mean()) for one in answers]
    return right[0], right[1], right[2]


def _fitted(features: Tensor, train_part: Examples, head: nn.Module, recipe: Recipe, seed: int) -> nn.Module:
    """Return a head trained on features, from where `head` stands; without gradients."""
    made = copy.deepcopy(head).requires_grad_(True)
    train(made, (features, train_part[1].to(features.device)), recipe, seed=seed, progress=False)
    return made.requires_grad_(False)


def _body(learner: Learner, task: int) -> nn.Module:
    """Return the network of a task without its head."""
    network = learner.network(task).requires_grad_(False)
    next(one for one in network.modules() if isinstance(one, TaskHeads)).active = -1
    return network


@torch.no_grad()
def _features(body: nn.Module, inputs: Tensor) -> Tensor:
    place, dtype = device_of(body), dtype_of(body)
    with evaluating(body):
        return torch.cat([body(part.to(place, dtype)) for part in inputs.split(TEST_BATCH)])


def _head_size(learner: Learner, task: int) -> int:
    return sum(learner.own[task][name].numel() for name in learner._head(task))


def _refuse(learnt: LearntTasks, k: int, choice: str, candidates: str) -> None:
    if learnt.record.method != "atoms":
        raise ValueFault(
            f"ensembles are made of networks that were learnt by 'atoms', which share their coefficients; these were "
            f"learnt by {learnt.record.method!r}."
        )
    if len(learnt.tasks) < 2:
        raise ValueFault("an ensemble needs the networks of two tasks or more; there is 1.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k < len(learnt.tasks):
        raise ValueFault(f"`k` is a number of other tasks, 1 to {len(learnt.tasks) - 1}; got {k!r}.")
    for name, value, known in (("choice", choice, CHOICES), ("candidates", candidates, CANDIDATES)):
        if value not in known:
            raise UnknownName(f"`{name}` is {' or '.join(map(repr, known))}; got {value!r}.")
