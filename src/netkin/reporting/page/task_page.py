"""The page of continual learning: the accuracies of each method, its forgetting and its storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import ValueFault
from netkin.reporting.grids import Grid, grid_of
from netkin.reporting.page.document import (
    Markup,
    document,
    facts,
    folded,
    folded_note,
    identity,
    is_identity,
    joined,
    name,
    plain_table,
    section,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import embedded_tables, figure_of, holes, values_class
from netkin.reporting.page.line_chart import figure_of_curve
from netkin.results import TaskAccuracies, TaskEnsembles
from netkin.results.packing import document as described
from netkin.results.task_accuracies import accuracy_text
from netkin.results.text import plural

STORED = {"each task": "numbers for a task", "in all": "numbers in all"}
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
SO_FAR = "Mean accuracy over the tasks learnt so far"
CONTROL = (
    "“Together” is the mean of the probabilities of the task's own network and of its members'; “further” a control, "
    "the own network alone with its head trained further for as long as all heads of the members."
)

TaskRecord = TaskAccuracies | TaskEnsembles


def task_page(records: Sequence[TaskRecord]) -> str:
    """Return the HTML page of one way to learn tasks or of several, and of ensembles with networks of other tasks."""
    ways, ensembles = parted(records)
    labels, grids = way_names(ways), [grid_of(way.table()) for way in ways]
    title = _title(records[0].tasks, ways)
    sentence = _sentence(dict(zip(labels, ways, strict=True)), ensembles)
    parts, bar = _main(ways, labels, grids, ensembles), toolbar(best=None, cells=bool(grids))
    data = embedded_tables([(f"{label}, after", "on", way.table()) for label, way in zip(labels, ways, strict=True)])
    documents = [described(one) for one in records]
    data |= {"document": documents[0] if len(documents) == 1 else documents, "table": _rows(ways, labels, ensembles),
             "name": "tasks in a row"}  # fmt: skip
    kind, versions = f"tasks {values_class(grids)}", [one.version for one in records]
    return document(title, sentence, parts, data, kind=kind, versions=versions, controls=bar, note=HONEST)


def parted(records: Sequence[TaskRecord]) -> tuple[list[TaskAccuracies], list[TaskEnsembles]]:
    """Return the ways to learn tasks and the ensembles of them; those of other tasks are refused."""
    first = records[0]
    for one in records:
        if one.tasks != first.tasks:
            raise ValueFault(
                f"one page shows one sequence of tasks; got {', '.join(first.tasks)} and {', '.join(one.tasks)}. Write "
                "a page for each."
            )
    ways = [one for one in records if isinstance(one, TaskAccuracies)]
    return ways, [one for one in records if isinstance(one, TaskEnsembles)]


def way_names(ways: Sequence[TaskAccuracies]) -> list[str]:
    """Return a name for each way: its method, with its options or a number where several have one method."""
    times = Counter(way.method for way in ways)
    named = [
        f"{way.method} ({how})" if times[way.method] > 1 and (how := _options(way)) else way.method for way in ways
    ]
    again = Counter(named)
    return [f"{label} ({k})" if again[label] > 1 else label for k, label in enumerate(named, start=1)]


def _options(record: TaskRecord) -> str:
    given = getattr(record, "options", {}).items()
    return ", ".join(f"{key}={value}" for key, value in given if value is not None)


def _title(tasks: Sequence[str], ways: Sequence[TaskAccuracies]) -> str:
    counted = plural(len(tasks), "task")
    if not ways:
        return f"{counted}, with networks of other tasks beside their own"
    return f"{counted} learnt in a row" + (f" by {ways[0].method!r}" if len(ways) == 1 else f" by {len(ways)} methods")


def _sentence(ways: Mapping[str, TaskAccuracies], ensembles: Sequence[TaskEnsembles]) -> str:
    """Return the one sentence that says what was found."""
    if len(ways) == 1:
        found = {key: accuracy_text(*own) for key, own in next(iter(ways.values())).metrics().items()}
        return f"After the last task the mean accuracy over all of them, ACC, is {found['ACC']}; BWT is {found['BWT']}."
    if not ways:
        alone, together, further = (
            accuracy_text(*ensembles[0].metrics()[key]) for key in ("alone", "together", "further")
        )
        return f"Alone the networks reach {alone}, together {together}; alone and trained further {further}."
    ranked = sorted(ways, key=lambda label: -ways[label].metrics()["ACC"][0])
    listed = [f"{label} {accuracy_text(*ways[label].metrics()['ACC'])}" for label in ranked]
    return f"Mean accuracy over all tasks after the last, ACC: {', '.join(listed)}."


def _main(
    ways: Sequence[TaskAccuracies], labels: Sequence[str], grids: Sequence[Grid], ensembles: Sequence[TaskEnsembles]
) -> Iterator[Markup | None]:
    first: TaskRecord = ways[0] if ways else ensembles[0]
    yield facts([plural(len(first.tasks), "task"), plural(len(first.seeds), "seed"), first.recipe, first.created[:10]])
    yield warnings(list(dict.fromkeys(note for way in ways for note in way.warnings)))
    if ways:
        yield tag("h2", "What was learnt and what was forgotten", class_="quiet")
        meaning = folded_note("What ACC, BWT and FWT are", tag("p", MEANING))
        chart = tag("div", figure_of_curve(SO_FAR, so_far_curve(ways, labels)), class_="card")
        yield tag("div", chart, tag("div", _ways_table(ways, labels), meaning, class_="card"), class_="cards")
        figures = [_heatmap(*one) for one in zip(range(len(ways)), labels, grids, strict=True)]
        yield tag("section", tag("h2", "Accuracy on each task after each"), tag("div", *figures, class_="cards"),
                  data_chosen=True)  # fmt: skip
    for one in ensembles:
        yield _ensembles(one)
    yield _origins(ways, labels, ensembles)


def _ways_table(ways: Sequence[TaskAccuracies], labels: Sequence[str]) -> Markup:
    """Return ACC, BWT, FWT and what is kept, a row for each way."""
    head = ["method", "ACC", "BWT", "FWT", *STORED.values()]
    rows = []
    for label, way in zip(labels, ways, strict=True):
        metrics, kept = way.metrics().values(), [f"{way.storage.get(key, 0):,}" for key in STORED]
        rows.append([name(label), *(accuracy_text(*own) for own in metrics), *kept])
    return plain_table(head, rows, kind="numbers", label="The ways of learning")


def so_far_curve(ways: Sequence[TaskAccuracies], labels: Sequence[str]) -> dict[str, list[Any]]:
    """Return the mean accuracy over the tasks learnt so far, after each task, a line for each way."""
    return _over_seeds("after task", ways[0].tasks, {label: w.so_far for label, w in zip(labels, ways, strict=True)})


def _over_seeds(across: str, tasks: Sequence[str], lines: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return the mean over seeds, seeds × tasks, of each line, with standard errors where there are several seeds."""
    curve: dict[str, list[Any]] = {across: list(tasks)}
    for label, values in lines.items():
        curve[label] = _nulls(values.mean(0))
        if len(values) > 1:
            curve[f"{label} ±"] = _nulls(values.std(0, ddof=1) / math.sqrt(len(values)))
    return curve


def _nulls(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(one) else one for one in values.tolist()]


def _heatmap(place: int, label: str, grid: Grid) -> Markup:
    head = joined(tag("h3", label), tag("p", "↓ after task  → on task", class_="axes"))
    caption = f"{label}: after which task in rows, on which in columns"
    return figure_of(grid, caption, f"table {place} 0", holes(grid), heading=head)


def _ensembles(one: TaskEnsembles) -> Markup:
    columns = [own.mean(0) for own in (one.alone, one.together, one.further)]
    rows = [[name(task), *(f"{value:.4f}" for value in values), ", ".join(one.members_of(task)) or "–"]
            for task, *values in zip(one.tasks, *columns, strict=True)]  # fmt: skip
    rows.append(["all", *(accuracy_text(*own) for own in one.metrics().values()), ""])
    head = ["task", "alone", "together", "further", f"members with seed {one.seeds[0]}"]
    words = f"Members are chosen as {one.choice} by {one.similarity}, among {one.candidates}. {CONTROL}"
    table = plain_table(head, rows, kind="numbers", label="Ensembles")
    lines = {"alone": one.alone, "together": one.together, "further": one.further}
    chart = figure_of_curve("Accuracy on each task", _over_seeds("task", one.tasks, lines))
    cards = [tag("div", shown, class_="card") for shown in (chart, table)]
    title = tag("h2", "Ensembles of similar tasks", class_="quiet")
    return tag("section", title, tag("div", *cards, class_="cards"), tag("p", words))


def _rows(
    ways: Sequence[TaskAccuracies], labels: Sequence[str], ensembles: Sequence[TaskEnsembles]
) -> tuple[list[str], list[list[Any]]]:
    """Return all numbers as a table: of each way a row for each seed, task learnt and task tested."""
    if not ways:
        rows = [[seed, task, *(float(own[s, t]) for own in (one.alone, one.together, one.further))] for one in ensembles
                for s, seed in enumerate(one.seeds) for t, task in enumerate(one.tasks)]  # fmt: skip
        return ["seed", "task", "alone", "together", "further"], rows
    found = [[label, *rest, None if math.isnan(value) else value]
             for label, way in zip(labels, ways, strict=True) for *rest, value in way.rows()]  # fmt: skip
    return ["method", "seed", "after", "task", "accuracy"], found


def _origins(ways: Sequence[TaskAccuracies], labels: Sequence[str], ensembles: Sequence[TaskEnsembles]) -> Markup:
    records: list[TaskRecord] = [*ways, *ensembles]
    first, also = records[0], ["ensembles"] * len(ensembles)
    general: dict[str, Any] = {"tasks": ", ".join(first.tasks), "seeds": ", ".join(map(str, first.seeds))}
    general |= {"classes of each": ", ".join(map(str, ways[0].classes))} if ways else {}
    general |= {key: value for key, value in first.provenance.items() if not is_identity(key) and key not in general}
    head, made_of = ["", "recipe", "options", "seeds", "made", "netkin"], zip((*labels, *also), records, strict=True)
    rows = [[label, one.recipe, _options(one) or "–", ", ".join(map(str, one.seeds)), one.created, one.version]
            for label, one in made_of]  # fmt: skip
    made = folded("How each was made", plain_table(head, rows, label="How each was made"), True)
    return section(general, made, identity(first.provenance))
