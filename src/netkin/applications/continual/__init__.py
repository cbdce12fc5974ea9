"""Continual learning: a sequence of tasks with filter atoms for each, the usual baselines, and ensembles.

`learn_tasks` learns tasks one after another, for each seed: a job that saves every finished task. `ensemble_tasks`
predicts with a task's network and those of the most similar tasks together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from netkin import __version__
from netkin.applications.continual.learners import LEARNERS, AtomLearner, Learner, SeparateLearner, require_options
from netkin.applications.experiment import DECLARED, Experiment
from netkin.comparing.many_models import compare_many
from netkin.comparing.spec import take_declared, takes_options
from netkin.errors import ForwardError, InvalidValue, NoValue, require_at_least, require_listed
from netkin.identity import described_call, forms_by_name, settings_digest, weights_digest
from netkin.jobs import Job, Part
from netkin.measures.registry import find
from netkin.progress import ProgressOption, Report, reporting
from netkin.representations.filters import atom_layers
from netkin.representations.layer_weights import copied
from netkin.representations.layers import require_copyable, unwrapped
from netkin.results.caveats import Caveat
from netkin.results.labels import plural
from netkin.results.task_accuracies import NO_FORGETTING, TaskAccuracies, TaskEnsembles
from netkin.settings import model_lock, random_states_kept
from netkin.sources.architectures import seeded
from netkin.sources.batches import LabelledData
from netkin.sources.models import load_model
from netkin.training import Recipe, accuracy, train
from netkin.training.chance import chance_caveat
from netkin.training.class_splits import Task, require_tasks, split_tasks
from netkin.training.heads import before_head, ensemble_accuracy, probabilities
from netkin.training.recipe import recipe_of
from netkin.training.saving import pack_state, unpack_state
from netkin.training.work_plan import Planning, Work, WorkPlan, memory_of_training, planned

__all__ = [
    "LearntTasks",
    "Task",
    "TaskAccuracies",
    "TaskEnsembles",
    "ensemble_tasks",
    "explain_learn_tasks",
    "learn_tasks",
    "split_tasks",
]

Model = nn.Module | str | Callable[[], nn.Module]
CHOICES = ("most similar", "least similar", "random")
CANDIDATES = ("earlier tasks", "all tasks")


@dataclass(frozen=True, eq=False)
class LearntTasks:
    """Tasks that were learnt one after another: the record of it, and the network of every task."""

    record: TaskAccuracies
    tasks: tuple[Task, ...]
    learners: Mapping[int, Learner]  # by seed

    def network(self, task: str, seed: int | None = None) -> nn.Module:
        """Return a copy of the network of a task, learnt with a seed, by default the first."""
        require_listed("task", task, self.record.tasks)
        return self.learner(seed).network(self.record.tasks.index(task))

    def learner(self, seed: int | None = None) -> Learner:
        """Return what was learnt with a seed, by default the first."""
        chosen = self.record.seeds[0] if seed is None else seed
        require_listed("seed", chosen, self.learners)
        return self.learners[chosen]

    def __str__(self) -> str:
        return str(self.record)


@planned
@takes_options("test examples transform forward seed partial", DECLARED)
def learn_tasks(
    model: Model,
    tasks: Sequence[Task],
    method: str = "atoms",
    recipe: Recipe | None = None,
    *,
    seeds: Sequence[int] = (0,),
    head: str | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Planning[WorkPlan, LearntTasks]:
    """Learn tasks one after another, and return the accuracy on every task after each, with the networks.

    The protocol is task-incremental: every task has a head of its own, and at test time the task is known. "atoms"
    and "separate" then forget nothing by construction. On the CPU the same call gives the same numbers, bit for bit,
    also if it was interrupted and resumed from `save`.

    Args:
        model: a network, whose copies are trained, or for other weights with each seed a name as for `nk.load_model`
            or a function that builds one.
        tasks: the tasks in their order, as `nk.split_tasks` makes them.
        method: "atoms" (coefficients learn on the first task, afterwards atoms and head only), "finetune", "ewc",
            "replay", "joint" (all tasks at once, at the end) or "separate" (a network for each task).
        recipe: how each task is trained; its settings can also be given by name, as ``epochs=10``.
        seeds: from which weights, heads, orders and kept examples follow.
        head: the linear layer that is replaced by a head for each task; by default the last one.
        options: those of the method: ``atoms`` of "atoms" (None for as many as make the filters exact), ``strength``
            of the penalty and ``examples`` for the Fisher information of "ewc", ``examples`` of each task of "replay".
        **settings: settings of the recipe.
    """
    experiment = Experiment(models={"model": model}, **take_declared(settings, DECLARED))  # type: ignore[dict-item]
    found, chosen, own = require_tasks(tasks), recipe_of(recipe, settings), dict(options or {})
    require_options(method, own)
    networks = {seed: _built(model, seed).to(experiment.device) for seed in _seeds(seeds)}
    learners = {seed: LEARNERS[method](network, head, found, seed, **own) for seed, network in networks.items()}
    yield lambda: _plan(learners, chosen)
    identity = _identity(learners, found, method, chosen, own)
    call = described_call("nk.learn_tasks", model=model, method=method, recipe=chosen.words, seeds=list(networks))
    total, rows = len(networks) * len(found), []
    with (
        experiment.job("task sequence", lambda: identity, call) as job,
        reporting(total, f"learning by {method}", "tasks", experiment.progress) as report,
    ):
        for position, learner in enumerate(learners.values()):
            rows.append(_learnt(learner, chosen, job, report, (position * len(found), total)))
        record = _record(learners, rows, found, chosen, {"call": call} | identity)
        job.save(lambda: record)
    return LearntTasks(record, found, learners)


explain_learn_tasks = learn_tasks.explain


def _plan(learners: Mapping[int, Learner], recipe: Recipe) -> WorkPlan:
    (first, *_), count, work = learners.values(), len(learners), dict[str, list[Work]]()
    learning = [position for position in range(len(first.tasks)) if first.learns(position)]
    for position in learning:
        for part in first.work(position, recipe):
            work.setdefault(part.what, []).append(part)
    tested = (1 + len(learning)) * sum(len(task.test[1]) for task in first.tasks)
    kept = sum(tensor.nbytes for state in (first.shared, *first.own) for tensor in state.values())
    seeds = f"for each of {count} seeds " if count > 1 else ""
    return WorkPlan(
        (*(_together(parts, count) for parts in work.values()), Work("testing all tasks", count * tested)),
        {"weights of all tasks": count * kept, **memory_of_training(first.model, recipe)},
        (f"{seeds}{plural(len(first.tasks), 'task')}, tested before the first and after each",),
    )


def _together(parts: Sequence[Work], times: int) -> Work:
    examples, steps = (sum(getattr(part, name) for part in parts) for name in ("examples", "steps"))
    return replace(parts[0], examples=times * examples, steps=times * steps)


def _learnt(learner: Learner, recipe: Recipe, job: Job, report: Report, done: tuple[int, int]) -> np.ndarray:
    """Return the accuracies of a seed, from where it stopped; what was learnt is kept after each task."""
    name, tasks = f"seed {learner.seed}", learner.tasks
    rows = job.recall(name, lambda part: _resumed(learner, part))
    rows = [_tested(learner, -1)] if rows is None else rows
    for position in range(len(tasks)):
        if position + 1 >= len(rows):
            if learner.learns(position):
                learner.learn(position, recipe)
            rows.append(_tested(learner, position))
            values, arrays = pack_state(learner.state())
            job.keep(name, {"state": values}, {**arrays, "accuracies": np.array(rows)})
        report.update()
        job.advance(done[0] + position + 1, done[1], "tasks")
    return np.array(rows)


def _resumed(learner: Learner, part: Part) -> list[list[float]]:
    arrays = dict(part.arrays)
    rows = arrays.pop("accuracies")
    if rows.ndim != 2 or rows.shape[1] != len(learner.tasks) or not 2 <= len(rows) <= len(learner.tasks) + 1:
        raise ValueError(f"its accuracies are of shape {rows.shape}")
    learner.load(unpack_state(part.values["state"], arrays))
    for task in range(len(learner.tasks)):
        learner.network(task)  # weights that do not fit are reported as damage
    return [list(map(float, row)) for row in rows]


def _tested(learner: Learner, learnt: int) -> list[float]:
    """Return the accuracy on every task after task `learnt`; -1 for before the first."""
    if learnt >= 0 and not learner.learns(learnt):
        return [np.nan] * len(learner.tasks)
    with model_lock(), random_states_kept(learner.model):
        return [_accuracy(learner.network(position), task) for position, task in enumerate(learner.tasks)]


def _accuracy(network: nn.Module, task: Task) -> float:
    try:
        return accuracy(network, task.test)
    except (RuntimeError, TypeError) as fault:
        shape, kind = tuple(task.test[0].shape[1:]), str(task.test[0].dtype).removeprefix("torch.")
        reason = str(fault).partition("\n")[0].rstrip(".")
        raise ForwardError(
            f"the network can't be run on inputs of {shape}, {kind}, of task {task.name!r}: {reason}."
        ) from fault


def _record(
    learners: Mapping[int, Learner], rows: Sequence[np.ndarray], tasks: Sequence[Task], recipe: Recipe,
    identity: Mapping[str, Any],
) -> TaskAccuracies:  # fmt: skip
    first = next(iter(learners.values()))
    caveats = []
    if isinstance(first, (AtomLearner, SeparateLearner)):
        caveats.append(Caveat("no-forgetting", NO_FORGETTING.format(method=first.name)))
    if not all(first.learns(position) for position in range(len(tasks))):
        sentence = f"{first.name!r} trains once, with the data of all tasks: there are no accuracies in between."
        caveats.append(Caveat("trains-once", sentence))
    mean = np.stack(rows).mean(0)
    just_learnt = np.where(np.isnan(np.diagonal(mean[1:])), mean[-1], np.diagonal(mean[1:]))
    accuracies = {task.name: float(reached) for task, reached in zip(tasks, just_learnt, strict=True)}
    labels = {task.name: task.test[1] for task in tasks}
    at_chance = chance_caveat(accuracies, labels, units="tasks", method=first.name)
    caveats += [at_chance] if at_chance else []
    return TaskAccuracies(
        method=first.name, tasks=tuple(task.name for task in tasks), classes=tuple(task.classes for task in tasks),
        seeds=tuple(learners), accuracies=np.stack(rows), storage=first.storage(), recipe=recipe.words,
        options={name: str(value) for name, value in first.settings.items()}, version=__version__,
        caveats=tuple(caveats), provenance={name: str(identity[name]) for name in ("call", "network", "tasks")},
    )  # fmt: skip


def _identity(
    learners: Mapping[int, Learner], tasks: Sequence[Task], method: str, recipe: Recipe, options: Mapping[str, Any]
) -> dict[str, Any]:
    models = {f"seed {seed}": learner.model for seed, learner in learners.items()}
    return {
        "method": f"{method}; digest {settings_digest(dict(options))}",
        "recipe": f"{recipe.words}; digest {settings_digest(recipe)}",
        "seeds": ", ".join(map(str, learners)),
        "network": f"digest {settings_digest(list(map(weights_digest, models.values())))}",
        "architecture": forms_by_name(models),
        "tasks": f"{', '.join(task.name for task in tasks)}; digest {settings_digest([t.digest() for t in tasks])}",
    }


def _built(model: Model, seed: int) -> nn.Module:
    if isinstance(model, nn.Module):
        made = model
    elif isinstance(model, str):
        made = load_model(model, seed=seed)
    elif callable(model):
        try:
            made = seeded(model, seed)
        except TypeError as fault:
            builds = "a network, its name, or a function without arguments that builds one"
            raise InvalidValue(
                f"`model` is {builds}; got one that raised TypeError: {fault}.", argument="model"
            ) from fault
    else:
        raise InvalidValue(
            f"`model` is a network, its name, or a function that builds one; got {type(model).__name__}.",
            argument="model",
        )
    require_copyable(unwrapped(made))  # each task's network is a copy
    return copied(made) if made is model else made


def _seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(seeds) if isinstance(seeds, (list, tuple, range)) else ()
    if not numbers or len(set(numbers)) < len(numbers):
        sentence = f"`seeds` are one or more distinct whole numbers, as (0, 1, 2); got {seeds!r}."
        raise InvalidValue(sentence, argument="seeds", value=seeds)
    for number in numbers:
        require_at_least(0, seeds=number)
    return numbers


# --- ensembles of tasks -----------------------------------------------------------------------------------------------


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
    """Return what each task gains by an ensemble with the networks of `k` other tasks (Chen et al. 2023, 3.4).

    A network of another task has other classes: its body stays as it is, and gets a head that is trained on this
    task. The probabilities of all are averaged. As a control, the task's own network
    is trained alone for as long.

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
    _require_ensemble(learnt, k, choice, candidates)
    names, seeds = learnt.record.tasks, learnt.record.seeds
    members, tables, found = [], [], []
    with reporting(len(seeds) * len(names), "ensembles", "tasks", progress) as report:
        for seed in seeds:
            learner = learnt.learner(seed)
            networks = [learner.network(task) for task in range(len(names))]
            table, sign = _similarities(dict(zip(names, networks, strict=True)), similarity, data)
            groups = [_members(sign * table, task, k, choice, candidates, seed) for task in range(len(names))]
            for task, group in enumerate(groups):
                found.append(_accuracies(learner, networks, task, group, chosen))
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
        raise InvalidValue(
            f"{measure!r} gives each direction a value of its own, and tasks are compared by one number for each pair; "
            "take 'cka'.",
            argument="similarity",
        )
    many = compare_many(networks, data, [measure], layers=layers, pairs="corresponding", progress=False)
    for (a, b), comparison in many.items():
        why = next((why for (x, y), why in comparison.table().missing.items() if x == y), None)
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
    learner: Learner, networks: Sequence[nn.Module], task: int, group: Sequence[int], recipe: Recipe
) -> tuple[float, float, float]:
    """Return the accuracy of a task's own network, of the ensemble, and of the own one trained further."""
    own, (inputs, labels) = learner.tasks[task], learner.tasks[task].test
    network = networks[task]
    head = network.get_submodule(learner.head)[task]  # type: ignore[index]
    features = before_head(network, learner.head, inputs)
    answers = [probabilities(head, features)]
    for position, member in enumerate(group):
        body = networks[member]
        other = _fitted(before_head(body, learner.head, own.train[0]), own.train, head, recipe, learner.seed + position)
        answers.append(probabilities(other, before_head(body, learner.head, inputs)))
    times = max(len(group), 1)
    longer = recipe.but(epochs=recipe.epochs and recipe.epochs * times, steps=recipe.steps and recipe.steps * times)
    seen = before_head(network, learner.head, own.train[0])
    further = _fitted(seen, own.train, head, longer, learner.seed) if group else head
    kinds = answers[:1], answers, [probabilities(further, features)]
    alone, together, control = (ensemble_accuracy(kind, labels) for kind in kinds)
    return alone, together, control


def _fitted(features: Tensor, train_part: LabelledData, head: nn.Module, recipe: Recipe, seed: int) -> nn.Module:
    """Return a head trained on features, from where `head` stands; without gradients."""
    made = copy.deepcopy(head).requires_grad_(True)
    train(made, (features, train_part[1].to(features.device)), recipe, seed=seed, progress=False)
    return made.requires_grad_(False)


def _head_size(learner: Learner, task: int) -> int:
    return sum(learner.own[task][name].numel() for name in learner.head_weights(task))


def _require_ensemble(learnt: LearntTasks, k: int, choice: str, candidates: str) -> None:
    if learnt.record.method != "atoms":
        raise InvalidValue(
            f"ensembles are made of networks that were learnt by 'atoms', which share their coefficients; these were "
            f"learnt by {learnt.record.method!r}."
        )
    if len(learnt.tasks) < 2:
        raise InvalidValue("an ensemble needs the networks of two tasks or more; there is 1.")
    require_at_least(1, len(learnt.tasks) - 1, k=k)
    require_listed("choice", choice, CHOICES)
    require_listed("candidates", candidates, CANDIDATES)
