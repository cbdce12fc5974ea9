"""Continual learning: the accuracy on each task after each task, and the measures derived from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from netkin.errors import require_listed
from netkin.results.caveats import Caveat
from netkin.results.labels import HOLE, plural
from netkin.results.packing import LongForm, Result
from netkin.results.quantity import ACCURACY, Quantity
from netkin.results.records import distinct, freeze, now, optional
from netkin.results.text import grid, terminal_width, wrapped
from netkin.results.values import Values

COLUMNS = ("seed", "after", "task", "accuracy")
START = "start"
NO_FORGETTING = (
    "{method!r} gives every task weights of its own that no later task changes, and is told which task an example "
    "belongs to: it forgets nothing by construction, so its BWT of 0 says nothing about the method."
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TaskAccuracies(Result):
    """The accuracy on every task after each of them was learnt, for every seed: immutable and labelled.

    `accuracies` is seeds × (tasks + 1) × tasks: the first row is the network before any training, row i + 1 that
    after task i; NaN where a method has nothing to test yet. The protocol is task-incremental: at test time the task
    is given, and predictions are among its classes only. `storage` counts the numbers that are kept.

    `result["2-3", "0-1"]` is the accuracy on task 0-1 after task 2-3 was learnt, the mean over seeds.
    """

    kind: ClassVar[str] = "task accuracies"

    method: str
    tasks: tuple[str, ...]
    classes: tuple[int, ...]
    seeds: tuple[int, ...]
    accuracies: np.ndarray
    storage: Mapping[str, int]
    recipe: str
    options: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze(self, tasks=distinct(self.tasks, "tasks"))

    @property
    def quantity(self) -> Quantity:
        """What the accuracies are."""
        return replace(
            ACCURACY, convention="task-incremental: among the classes of the task", error="standard error over seeds"
        )

    @property
    def acc(self) -> np.ndarray:
        """ACC of each seed: the mean accuracy over all tasks after the last, ``1/T Σ_j R[T, j]``."""
        return self.accuracies[:, -1].mean(1)

    @property
    def bwt(self) -> np.ndarray:
        """BWT of each seed: ``1/(T - 1) Σ_{j < T} R[T, j] - R[j, j]``; below 0 is forgetting. NaN for one task."""
        if len(self.tasks) < 2:
            return np.full(len(self.seeds), np.nan)
        when_learnt = np.diagonal(self.accuracies[:, 1:], axis1=1, axis2=2)
        return (self.accuracies[:, -1] - when_learnt)[:, :-1].mean(1)

    @property
    def fwt(self) -> np.ndarray:
        """FWT of each seed: ``1/(T - 1) Σ_{j > 1} R[j - 1, j] - R[0, j]``, before a task against the start.

        The head of a task that has not come is untrained, so that this is of little use for separate heads; how much
        earlier tasks helped is better seen against method "separate". NaN for one task.
        """
        if len(self.tasks) < 2:
            return np.full(len(self.seeds), np.nan)
        before = np.diagonal(self.accuracies[:, :-1], axis1=1, axis2=2)
        return (before - self.accuracies[:, 0])[:, 1:].mean(1)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return ACC, BWT and FWT, each as (mean over seeds, standard error); NaN where there is none."""
        return {name: _spread(getattr(self, name.lower())) for name in ("ACC", "BWT", "FWT")}

    def __getitem__(self, key: tuple[str, str]) -> float:
        """Return the accuracy on the second task after the first, or at the "start", the mean over seeds."""
        sides = ((START, *self.tasks), self.tasks) if isinstance(key, tuple) and len(key) == 2 else ()
        for name, known in zip(key, sides, strict=False):
            require_listed("task", name, known)
        return self.table()[key]

    def __repr__(self) -> str:
        return f"TaskAccuracies({self.method!r}, {len(self.tasks)} tasks, {len(self.seeds)} seeds)"

    def table(self, seed: int | None = None) -> Values:
        """Return the accuracy matrix of a seed, or the mean over all: trained tasks in rows, tested in columns."""
        if seed is not None:
            require_listed("seed", seed, self.seeds)
        chosen = self.accuracies if seed is None else self.accuracies[[self.seeds.index(seed)]]
        values, rows = chosen.mean(0), (START, *self.tasks)
        missing = {
            (rows[i], self.tasks[j]): "not trained yet" for i, j in zip(*np.isnan(values).nonzero(), strict=True)
        }
        errors = chosen.std(0, ddof=1) / math.sqrt(len(chosen)) if len(chosen) > 1 else None
        return Values(
            quantity=self.quantity, layers_a=rows, layers_b=self.tasks, values=values, errors=errors, missing=missing,
            statistic="accuracies", axes=("after", "task"),
        )  # fmt: skip

    def __str__(self) -> str:
        width, mean = terminal_width(), self.accuracies.mean(0)
        entries = [[HOLE if math.isnan(accuracy) else f"{accuracy:.3f}" for accuracy in row] for row in mean]
        tasks, seeds = plural(len(self.tasks), "task"), plural(len(self.seeds), "seed")
        lines = [wrapped(f"{tasks} learnt in a row by {self.method!r}, {seeds}; accuracy on", width)]
        lines += [*grid([START, *(f"after {task}" for task in self.tasks)], self.tasks, entries, width), ""]
        lines += [f"{name}: {accuracy_text(mean, error)}" for name, (mean, error) in self.metrics().items()]
        lines.append("numbers kept: " + ", ".join(f"{count:,} {what}" for what, count in self.storage.items()))
        return "\n".join([*lines, *(wrapped(f"note: {caveat}", width) for caveat in self.caveats)])

    def to_pandas(self) -> Any:
        """Return a row for each seed, task that was learnt and task that was tested."""
        return optional("pandas").DataFrame(list(self.rows()), columns=COLUMNS)

    def long_form(self) -> LongForm:
        """Return the rows with the method before them."""
        return ("method", *COLUMNS), ((self.method, *row) for row in self.rows())

    def rows(self) -> Iterator[tuple[int, str, str, float]]:
        """Yield the seed, the task that was learnt, the task that was tested, and the accuracy there."""
        for s, seed in enumerate(self.seeds):
            for i, after in enumerate((START, *self.tasks)):
                for j, task in enumerate(self.tasks):
                    yield seed, after, task, float(self.accuracies[s, i, j])

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: what the accuracies are, and ACC, BWT and FWT."""
        metrics = {name: {"mean": mean, "error": error} for name, (mean, error) in self.metrics().items()}
        return {"quantity": self.quantity, "metrics": metrics}

    @property
    def so_far(self) -> np.ndarray:
        """The mean accuracy over the tasks learnt so far, after each: seeds × tasks; NaN where nothing is learnt."""
        count = len(self.tasks)
        return np.stack([self.accuracies[:, k + 1, : k + 1].mean(1) for k in range(count)], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TaskEnsembles(Result):
    """What ensembles with networks of other tasks gain, for every seed and task: frozen and labelled.

    `alone` is the accuracy of the task's own network, `together` that of the ensemble, `further` a control: the own
    network whose head was trained further for as long as all heads of the members; seeds × tasks each. `members` are
    the tasks in each ensemble, by seed and task; `similarities` those of all tasks, seeds × tasks × tasks. `storage`
    is how many numbers the heads of the members add.
    """

    kind: ClassVar[str] = "task ensembles"

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    similarity: str
    choice: str
    candidates: str
    members: tuple[tuple[tuple[str, ...], ...], ...]
    similarities: np.ndarray
    alone: np.ndarray
    together: np.ndarray
    further: np.ndarray
    storage: int
    recipe: str = ""
    version: str = ""
    created: str = field(default_factory=now)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TaskEnsembles({self.similarity!r}, {self.choice!r}, {len(self.tasks)} tasks, {len(self.seeds)} seeds)"

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: what the accuracies are, and their means."""
        metrics = {name: {"mean": mean, "error": error} for name, (mean, error) in self.metrics().items()}
        return {"quantity": ACCURACY, "metrics": metrics}

    def members_of(self, task: str, seed: int | None = None) -> tuple[str, ...]:
        """Return the tasks whose networks are in the ensemble of a task, for a seed, by default the first."""
        chosen = self.seeds[0] if seed is None else seed
        require_listed("task", task, self.tasks)
        require_listed("seed", chosen, self.seeds)
        return self.members[self.seeds.index(chosen)][self.tasks.index(task)]

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return the mean accuracy alone, together and of the control, each with its standard error over seeds."""
        return {name: _spread(getattr(self, name).mean(1)) for name in ("alone", "together", "further")}

    def __str__(self) -> str:
        width = terminal_width()
        columns = [accuracies.mean(0) for accuracies in (self.alone, self.together, self.further)]
        entries = [
            [*(f"{accuracy:.3f}" for accuracy in row), ", ".join(self.members_of(task)) or HOLE]
            for task, *row in zip(self.tasks, *columns, strict=True)
        ]
        head = f"ensembles with tasks chosen as {self.choice} by {self.similarity}, among {self.candidates}"
        joined = "with" if len(self.seeds) == 1 else f"with (seed {self.seeds[0]})"
        lines = [wrapped(head, width), *grid(self.tasks, ["alone", "together", "further", joined], entries, width), ""]
        lines += [f"{name}: {accuracy_text(mean, error)}" for name, (mean, error) in self.metrics().items()]
        return "\n".join([*lines, f"numbers kept for heads of members: {self.storage:,}"])

    def to_pandas(self) -> Any:
        """Return a row for each seed and task."""
        columns, rows = self.long_form()
        return optional("pandas").DataFrame(list(rows), columns=columns)

    def long_form(self) -> LongForm:
        """Return a row for each seed and task."""
        rows = (
            (seed, task, ", ".join(self.members[s][t]), self.alone[s, t], self.together[s, t], self.further[s, t])
            for s, seed in enumerate(self.seeds)
            for t, task in enumerate(self.tasks)
        )
        return ("seed", "task", "members", "alone", "together", "further"), rows


def _spread(values: np.ndarray) -> tuple[float, float]:
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()), error


def accuracy_text(value: float, error: float) -> str:
    """Return an accuracy, or a difference of such, with its standard error as far as there are these.

    Example:
        >>> accuracy_text(-1e-18, 0.0125), accuracy_text(0.5, math.nan), accuracy_text(math.nan, math.nan)
        ('0.0000 ± 0.0125', '0.5000', '–')
    """
    if math.isnan(value):
        return HOLE
    return f"{round(value, 4) + 0.0:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")
