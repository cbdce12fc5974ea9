"""Pages of tasks: which pretrained model to start from, and the accuracy and forgetting of tasks learnt in a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from netkin.errors import InvalidValue
from netkin.reporting.charts import Axis, axis_up, tick_text
from netkin.reporting.grids import Grid, grid_of
from netkin.reporting.page.document import (
    CHARTS,
    Markup,
    document,
    facts,
    folded,
    folded_note,
    joined,
    name,
    origins,
    plain_table,
    tag,
    toolbar,
    warnings,
)
from netkin.reporting.page.heatmap import embedded_tables, figure_of, missing_values, values_class
from netkin.reporting.page.svg import figure_of_curve
from netkin.reporting.words import range_of, sentence, short_names, shortened
from netkin.results import Ranking, TaskAccuracies, TaskEnsembles, Values
from netkin.results.caveats import grouped
from netkin.results.labels import plural
from netkin.results.packing import document as described
from netkin.results.ranking import SENTENCE
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
SO_FAR = "Mean accuracy over the tasks learnt so far"
CONTROL = (
    "“Together” is the mean of the probabilities of the task's own network and of its members'; “further” a control, "
    "the own network alone with its head trained further for as long as all heads of the members."
)
FEW_PARTS = (2, 3, 4)  # into which an axis of a hundred pixels is divided, the fewest that give two numbers
LONGEST = 60  # letters of a model's name beside a chart
FEATURES = "features of "  # begins a word of provenance on each model
DOTS = (
    "A dot is a model's score, its bar the 95 % interval over the examples. Models drawn like the first are those "
    "that these examples cannot distinguish from it: the difference to the first, taken chunk by chunk, may be chance."
)
EXAMPLES_ALONE = (
    "Standard errors are those of the examples alone. How the agreement with fine-tuning, τ, was measured, netkin's "
    "guide “Which model to start from” says."
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
    data |= {"table": _rows(ways, labels, ensembles), "name": "tasks in a row"}
    every = [described(one) for one in records]
    documents = every if len(every) == 1 else [every]  # of several one list is saved
    kind, versions = f"tasks {values_class(grids)}", [one.version for one in records]
    return document(title, sentence, parts, data, documents, kind=kind, versions=versions, controls=bar, note=HONEST)


def parted(records: Sequence[TaskRecord]) -> tuple[list[TaskAccuracies], list[TaskEnsembles]]:
    """Return the ways to learn tasks and the ensembles of them; those of other tasks are refused."""
    first = records[0]
    for one in records:
        if one.tasks != first.tasks:
            raise InvalidValue(
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
    return ", ".join(f"{key}={value}" for key, value in given if str(value) != "None")


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
    yield warnings(grouped(caveat for way in ways for caveat in way.caveats))
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
    return figure_of(grid, caption, f"table {place} 0", missing_values(grid), heading=head)


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
    head, made_of = ["", "recipe", "options", "seeds", "made", "netkin"], zip((*labels, *also), records, strict=True)
    rows = [[label, one.recipe, _options(one) or "–", ", ".join(map(str, one.seeds)), one.created, one.version]
            for label, one in made_of]  # fmt: skip
    made = folded("How each was made", plain_table(head, rows, label="How each was made"), True)
    return origins(general, first.provenance, made)


# --- a ranking of models for a task -----------------------------------------------------------------------------------


def ranking_page(ranking: Ranking) -> str:
    """Return the HTML page of a ranking."""
    title, said, data = ranking.title, ranking.conclusion, {"ranking": described(ranking)}
    return document(
        title,
        said,
        _ranking_parts(ranking),
        data,
        kind="ranking",
        versions=[ranking.version],
        note=EXAMPLES_ALONE,
        scripts=CHARTS,
    )


def _ranking_parts(ranking: Ranking) -> Iterator[Markup | None]:
    classes = plural(ranking.classes, "class")
    cost = ranking.cost_in_words.partition(": ")[2]
    yield facts([ranking.data, plural(ranking.examples, "example"), classes, cost, ranking.created[:10]])
    yield warnings(ranking.caveats)
    yield tag("h2", "Which model to start from", class_="quiet")
    yield tag("div", *(_score_card(ranking, score) for score in ranking.scores), class_="cards")
    yield tag("p", DOTS, class_="note")
    yield tag("p", ranking.reliability_in_words, class_="note") if ranking.reliability_in_words else None
    yield tag("h2", "The ranking")
    yield tag("div", _ranking_table(ranking), class_="card")
    yield tag("ul", *(tag("li", reason) for reason in ranking.reasons()), class_="reasons")
    yield _ranking_origins(ranking)


def _ranking_table(ranking: Ranking) -> Markup:
    """Return the ranking as a table: a row for each model, the score of the rank first."""
    short = short_names(ranking.models, SENTENCE)
    told = [tag("bdi", short[one], title=one if short[one] != one else None) for one in ranking]
    labels = [joined(f"{place}. ", one) for place, one in enumerate(told, start=1)]
    rows = [[label, *cells] for label, cells in zip(labels, ranking.cells(), strict=True)]
    return plain_table(["model", *ranking.columns()], rows, kind="numbers", label="The ranking")


def _score_card(ranking: Ranking, score: str) -> Markup:
    ranked, table = ranking.by(score), ranking.table(score)
    passes = ranking.costs.get(score)
    cost = "" if passes is None else f"{passes:g} forward pass{'es' if passes != 1 else ''}"
    better = "higher is better" if table.higher_is_closer else "lower is better"
    tau = ranking.reliability_text(score)
    words = ", ".join(filter(None, [better, range_of(table), cost, tau and f"τ with fine-tuning {tau}"]))
    known = bool(np.isfinite(table.values).any())
    drawn = _dots(ranked) if known else tag("p", "It has no value for any model.")
    said = ranked.lead_in_words if known and score != ranking.score else None  # that of the rank is above all
    note = tag(
        "figcaption",
        tag("p", said) if said else None,
        tag("p", sentence(table.quantity.convention), class_="facts-line"),
    )
    return tag("figure", tag("h3", score), tag("p", words, class_="facts-line"), drawn, note, class_="card curve")


def _dots(ranking: Ranking) -> Markup:
    """Return a dot with its interval for each model, from the first to the last, with the numbers beside."""
    places = ranked_places(ranking)
    axis = axis_up([number for _, value, low, high in places for number in (value, low, high)])
    close = {ranking.best, *(ranking.unclear() if ranking.lead.clear is not None else ())}
    short = shortened([model for model, *_ in places], LONGEST)
    texts = {model: first for model, (first, *_) in zip(ranking.models, ranking.cells(), strict=True)}
    rows = [_dot_row(axis, place, place[0] in close, label, texts[place[0]])
            for place, label in zip(places, short, strict=True)]  # fmt: skip
    numbers = next((found for parts in FEW_PARTS if len(found := axis.ticks(parts)) > 1), axis.ticks())
    ticks = [tag("span", tick_text(tick), style=f"left:{100 * axis.place(tick):.4g}%") for tick in numbers]
    return tag("div", *rows, tag("div", tag("div", *ticks, class_="ticks"), class_="row"), class_="dotted")


def ranked_places(ranking: Ranking) -> list[tuple[str, float, float, float]]:
    """Return the models that have a value, with it and the ends of its interval; without one, the value itself."""
    table = ranking.table()
    low, high = (np.where(np.isnan(end[0]), table.values[0], end[0]) for end in table.interval())
    known = [k for k in map(table.layers_b.index, ranking.models) if math.isfinite(table.values[0, k])]
    return [(table.layers_b[k], float(table.values[0, k]), float(low[k]), float(high[k])) for k in known]


def _dot_row(axis: Axis, place: tuple[str, float, float, float], close: bool, label: str, text: str) -> Markup:
    model, value, low, high = place
    at, left, right = (100 * axis.place(number) for number in (value, low, high))
    bar = tag("span", class_="interval", style=f"left:{left:.4g}%;width:{right - left:.4g}%") if low < high else None
    dot = tag("span", class_="dot", style=f"left:{at:.4g}%")
    track = tag("div", bar, dot, class_=f"track {'k0' if close else 'k7'}", aria_hidden="true")
    interval = f"95 % interval {low:.4g} to {high:.4g}" if low < high else None
    told = tag("span", text, class_="value", title=interval)
    return tag("div", tag("span", name(label), title=model, class_="model"), track, told, class_="row")


def _ranking_origins(ranking: Ranking) -> Markup:
    told = {
        "data": ranking.data,
        "examples": f"{ranking.examples:,}",
        "classes": ranking.classes,
        "ranked by": ranking.score,
        "made": ranking.created,
        "netkin": ranking.version,
    }
    about = {key: value for key, value in ranking.provenance.items() if not key.startswith(FEATURES)}
    head = ["score", "what it says", "forward passes", "standard errors"]
    rows = [[score, ranking.table(score).quantity.convention, f"{ranking.costs.get(score, math.nan):g}",
             _chunks(ranking.table(score))] for score in ranking.scores]  # fmt: skip
    scores = folded("The scores", plain_table(head, rows, label="The scores"), True)
    read = {model: ranking.provenance.get(f"{FEATURES}{model}", "not read") for model in ranking.models}
    sizes = [[name(model), f"{ranking.parameters.get(model, 0):,}", features] for model, features in read.items()]
    models = folded("The models", plain_table(["model", "parameters", "features"], sizes, label="The models"))
    return origins(told, about, scores, models)


def _chunks(table: Values) -> str:
    return f"jackknife over {len(table.chunk_sizes)} chunks of examples" if table.chunk_sizes else "not asked for"
