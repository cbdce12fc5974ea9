"""The page of tasks that were learnt in a row: accuracy and forgetting by each method, and ensembles of networks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import InvalidValue
from netkin.reporting.blocks import Heatmap, Name, Page, PageBlock, Section, Table, Text
from netkin.reporting.grids import grid_of
from netkin.reporting.parts import curve, missing_values, origins, table_of
from netkin.results import TaskAccuracies, TaskEnsembles
from netkin.results.caveats import grouped
from netkin.results.labels import plural
from netkin.results.task_accuracies import accuracy_text

STORED = {"each task": "stored per task", "in all": "stored in all"}
MEANING = (
    "With R[i, j] the accuracy on task j after task i, of T tasks: ACC is the mean of R[T, j] over all tasks; BWT that "
    "of R[T, j] − R[j, j] over all but the last, below 0 where something was forgotten; FWT that of R[j − 1, j] − "
    "R[0, j] over all but the first, what was known of a task before it came. After ± stands the standard error over "
    "seeds."
)
HONEST = (
    "The protocol is task-incremental: the method is told which task an example belongs to, and chooses among the "
    "classes of that task alone. Chance is one in these. A task that has not come has an untrained head, so that FWT "
    "is chance against chance."
)
CONTROL = (
    "“Together” is the mean of the probabilities of the task's own network and of its members'; “further” a control, "
    "the own network alone with its head trained further for as long as all heads of the members."
)

TaskRecord = TaskAccuracies | TaskEnsembles
Accuracies = Mapping[str, TaskAccuracies]  # to learn tasks, by their names


def task_page(records: Sequence[TaskRecord]) -> Page:
    """Return the page of one way to learn tasks or of several, and of ensembles with networks of other tasks."""
    first = records[0]
    for record in records:
        if record.tasks != first.tasks:
            told = f"{', '.join(first.tasks)} and {', '.join(record.tasks)}"
            raise InvalidValue(f"one page shows one sequence of tasks; got {told}. Write a page for each.")
    accuracies = records_by_label([record for record in records if isinstance(record, TaskAccuracies)])
    ensembles = [record for record in records if isinstance(record, TaskEnsembles)]
    learnt = [_learnt(accuracies), _heatmaps(accuracies)] if accuracies else []
    return Page(
        title=_title(first.tasks, accuracies),
        sentence=_sentence(accuracies, ensembles),
        facts=[plural(len(first.tasks), "task"), plural(len(first.seeds), "seed"), first.recipe, first.created[:10]],
        caveats=list(grouped(caveat for record in accuracies.values() for caveat in record.caveats)),
        blocks=[*learnt, *(_ensembles(one, f"ensembles {k}") for k, one in enumerate(ensembles))],
        origins=_origins(accuracies, ensembles),
        style="tasks",
        versions=[record.version for record in records],
        note=HONEST,
        name=["tasks in a row"],
        csv=_rows(accuracies, ensembles),
        results=records if len(records) == 1 else [records],  # of several one list is saved
    )


def records_by_label(accuracies: Sequence[TaskAccuracies]) -> dict[str, TaskAccuracies]:
    """Return ways by their method, with its options or a number where several have one method."""
    times = Counter(record.method for record in accuracies)
    named = [
        f"{record.method} ({how})" if times[record.method] > 1 and (how := _options(record)) else record.method
        for record in accuracies
    ]
    again = Counter(named)
    labels = [f"{label} ({k})" if again[label] > 1 else label for k, label in enumerate(named, start=1)]
    return dict(zip(labels, accuracies, strict=True))


def _options(record: TaskRecord) -> str:
    given = getattr(record, "options", {}).items()
    return ", ".join(f"{key}={value}" for key, value in given if str(value) != "None")


def _title(tasks: Sequence[str], accuracies: Accuracies) -> str:
    counted = plural(len(tasks), "task")
    if not accuracies:
        return f"{counted}, with networks of other tasks beside their own"
    methods = [record.method for record in accuracies.values()]
    return f"{counted} learnt in a row by {f'{methods[0]!r}' if len(methods) == 1 else f'{len(methods)} methods'}"


def _sentence(accuracies: Accuracies, ensembles: Sequence[TaskEnsembles]) -> str:
    """Return the one sentence that says what was found."""
    reached = {
        label: {key: accuracy_text(*own) for key, own in record.metrics().items()}
        for label, record in accuracies.items()
    }
    if len(accuracies) == 1:
        (one,) = reached.values()
        return f"After the last task the mean accuracy over all of them, ACC, is {one['ACC']}; BWT is {one['BWT']}."
    if not accuracies:
        alone, together, further = (
            accuracy_text(*ensembles[0].metrics()[key]) for key in ("alone", "together", "further")
        )
        return f"Alone the networks reach {alone}, together {together}; alone and trained further {further}."
    ranked = sorted(accuracies, key=lambda label: -accuracies[label].metrics()["ACC"][0])
    listed = ", ".join(f"{label} {reached[label]['ACC']}" for label in ranked)
    return f"Mean accuracy over all tasks after the last, ACC: {listed}."


def _learnt(accuracies: Accuracies) -> Section:
    """Return the mean accuracy over the tasks learnt so far, and a table of ACC, BWT, FWT and what is kept."""
    tasks = next(iter(accuracies.values())).tasks
    so_far = _over_seeds("after task", tasks, {label: record.so_far for label, record in accuracies.items()})
    rows = []
    for label, record in accuracies.items():
        metrics, kept = record.metrics().values(), [f"{record.storage.get(key, 0):,}" for key in STORED]
        rows.append([Name(label), *(accuracy_text(*own) for own in metrics), *kept])
    head = ["method", "ACC", "BWT", "FWT", *STORED.values()]
    table = Table(head, rows, label="The ways of learning", style="numbers")
    meaning = Text(title="What ACC, BWT and FWT are", text=MEANING, folded=True)
    lines = curve("Mean accuracy over the tasks learnt so far", so_far, "so far")
    cards = Section("", [lines, Section("", [table, meaning], "card")], "cards")
    return Section("What was learnt and what was forgotten", [cards], quiet=True)


def _over_seeds(across: str, tasks: Sequence[str], lines: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return the mean over seeds, seeds × tasks, of each line, with standard errors where there are several seeds."""
    values: dict[str, list[Any]] = {across: list(tasks)}
    for label, own in lines.items():
        values[label] = _nulls(own.mean(0))
        if len(own) > 1:
            values[f"{label} ±"] = _nulls(own.std(0, ddof=1) / math.sqrt(len(own)))
    return values


def _nulls(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(one) else one for one in values.tolist()]


def _heatmaps(accuracies: Accuracies) -> Section:
    heatmaps = []
    for place, (label, record) in enumerate(accuracies.items()):
        table = record.table()
        grid = grid_of(table)
        heatmaps.append(
            Heatmap(
                grid, f"accuracy {place}", f"{label}: after which task in rows, on which in columns",
                title=Name(label), axes=("↓ after task  → on task",), sides=(f"{label}, after task", "on task"),
                notes=[missing_values(grid)], table=table,
            )
        )  # fmt: skip
    return Section("Accuracy on each task after each", [Section("", heatmaps, "cards")])


def _ensembles(ensembles: TaskEnsembles, key: str) -> Section:
    lines = {"alone": ensembles.alone, "together": ensembles.together, "further": ensembles.further}
    columns = [own.mean(0) for own in lines.values()]
    rows = [[Name(task), *(f"{value:.4f}" for value in values), ", ".join(ensembles.members_of(task)) or "–"]
            for task, *values in zip(ensembles.tasks, *columns, strict=True)]  # fmt: skip
    rows.append(["all", *(accuracy_text(*own) for own in ensembles.metrics().values()), ""])
    head = ["task", *lines, f"members with seed {ensembles.seeds[0]}"]
    chosen = f"Members are chosen as {ensembles.choice} by {ensembles.similarity}, among {ensembles.candidates}."
    chart = curve("Accuracy on each task", _over_seeds("task", ensembles.tasks, lines), key)
    table = Table(head, rows, label="Ensembles", style="numbers")
    cards = Section("", [chart, table], "cards")
    return Section("Ensembles of similar tasks", [cards, Text(f"{chosen} {CONTROL}")], quiet=True)


def _rows(accuracies: Accuracies, ensembles: Sequence[TaskEnsembles]) -> tuple[list[str], list[list[Any]]]:
    """Return all numbers as a table: of each way a row for each seed, task learnt and task tested."""
    tables = [table_of(record) for record in (accuracies.values() or ensembles)]
    for label, (_, rows) in zip(accuracies, tables, strict=False):
        for row in rows:
            row[0] = label
    return tables[0][0], [row for _, rows in tables for row in rows]


def _origins(accuracies: Accuracies, ensembles: Sequence[TaskEnsembles]) -> list[PageBlock | None]:
    records: list[tuple[str, TaskRecord]] = [*accuracies.items(), *(("ensembles", one) for one in ensembles)]
    first = records[0][1]
    general: dict[str, Any] = {"tasks": ", ".join(first.tasks), "seeds": ", ".join(map(str, first.seeds))}
    if isinstance(first, TaskAccuracies):
        general["classes of each"] = ", ".join(map(str, first.classes))
    head = ["", "recipe", "options", "seeds", "made", "netkin"]
    rows = [[label, one.recipe, _options(one) or "–", ", ".join(map(str, one.seeds)), one.created, one.version]
            for label, one in records]  # fmt: skip
    made = Table(head, rows, "How each was made", "How each was made", folded=True, open=True)
    return origins(general, first.provenance, made)
