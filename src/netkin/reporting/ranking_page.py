"""The page and the figure of a ranking: which model comes first, how far others are behind, and what that rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from netkin.reporting.axes import Axis, axis_up, tick_text
from netkin.reporting.documents import document, facts, footer, header, warnings
from netkin.reporting.drawing import empty_figure, write_words
from netkin.reporting.markup import Markup, joined, name, tag
from netkin.reporting.origins import folded, identity, is_identity, plain_table, section
from netkin.reporting.wording import number_with_error, range_of, shortened, told_apart
from netkin.results import Ranking, Values
from netkin.results.packing import document as described
from netkin.results.ranking import SENTENCE

SCRIPTS = ("telling", "profile", "theme")
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 540, 176, 24, 28, 10, 34  # of a chart, in its own units
LONGEST = 20  # letters of a model's name beside a chart
RULES = (
    ".ranking .numbers :is(th,td){white-space:nowrap;width:auto}.ranking .plain:not(.facts){min-width:520px}"
    ".ranking .plain:not(.facts) th{overflow-wrap:break-word}"
    ".ranking .lines{min-width:400px}.ranking .lines text{font-size:12px}"
)
FEATURES = "features of "  # begins a word of provenance on each model
MEANING = (
    "A dot is a model's score, its bar the 95 % interval over the examples. Models drawn like the first are those "
    "that these examples do not tell from it: their difference to the first, taken chunk by chunk, may be chance."
)
HONEST = (
    "Standard errors are those of the examples alone. How well a score predicts the accuracy after fine-tuning, and "
    "which score is best at it, is measured in netkin's guide “Which model to start from”."
)


def ranking_page(ranking: Ranking) -> str:
    """Return the HTML page of a ranking."""
    shown = joined(
        header(ranking.title, ranking.conclusion), tag("main", *_main(ranking)), footer([ranking.version], HONEST)
    )
    data = {"ranking": described(ranking)}
    return document(ranking.title, shown, data, styles=("page", "claims"), scripts=SCRIPTS, kind="ranking", rules=RULES)


def _main(ranking: Ranking) -> Iterator[Markup | None]:
    classes = f"{ranking.classes} classes"
    cost = ranking.cost_in_words.partition(": ")[2]
    yield facts([ranking.data, f"{ranking.examples:,} examples", classes, cost, ranking.created[:10]])
    yield warnings(ranking.warnings)
    yield tag("h2", "Which model to start from", class_="quiet")
    yield tag("div", _table(ranking), class_="card")
    yield tag("ul", *(tag("li", reason) for reason in ranking.reasons()), class_="reasons")
    yield tag("h2", "The scores")
    yield tag("p", MEANING)
    yield tag("div", *(_card(ranking, score) for score in ranking.scores), class_="cards")
    yield _origins(ranking)


def _table(ranking: Ranking) -> Markup:
    """Return the ranking as a table: a row for each model, the score of the rank first."""
    short = told_apart(ranking.models, SENTENCE)
    told = [tag("bdi", short[one], title=one if short[one] != one else None) for one in ranking]
    labels = [joined(f"{place}. ", one) for place, one in enumerate(told, start=1)]
    rows = [[label, *cells] for label, cells in zip(labels, ranking.cells(), strict=True)]
    return plain_table(["model", *ranking.columns()], rows, kind="numbers", label="The ranking")


def _card(ranking: Ranking, score: str) -> Markup:
    ranked, table = ranking.by(score), ranking.table(score)
    cost = f"{ranking.costs[score]:g} forward pass{'es' if ranking.costs[score] != 1 else ''}" if ranking.costs else ""
    better = "higher is better" if table.higher_is_closer else "lower is better"
    words = ", ".join(filter(None, [better, range_of(table), cost]))
    known = bool(np.isfinite(table.values).any())
    drawn = tag("div", _chart(ranked), class_="chart") if known else tag("p", "It has a value for no model.")
    said = ranked.conclusion if known and score != ranking.score else None  # that of the rank stands above all
    note = tag("figcaption", tag("p", said), tag("p", table.conventions, class_="facts-line"))
    return tag("figure", tag("h3", score), tag("p", words, class_="facts-line"), drawn, note, class_="card curve")


def _chart(ranking: Ranking) -> Markup:
    """Return a dot with its interval for each model, from the first to the last."""
    places = _places(ranking)
    axis = axis_up([number for _, value, low, high in places for number in (value, low, high)])
    height = TOP + ROW * len(places) + BOTTOM
    close = {ranking.best, *(ranking.unclear() if ranking.lead.clear is not None else ())}
    rows = [
        _row(TOP + ROW * (k + 0.5), axis, one, one[0] in close, label)
        for k, (one, label) in enumerate(zip(places, shortened([m for m, *_ in places], LONGEST), strict=True))
    ]
    words = f"{ranking.score} of each model; the arrow keys go from point to point"
    view = f"0 0 {WIDTH} {height}"
    rules = list(_rules(axis, height))
    return tag("svg", *rules, *rows, viewBox=view, role="group", aria_label=words, class_="lines")


def _places(ranking: Ranking) -> list[tuple[str, float, float, float]]:
    """Return the models that have a value, with it and the ends of its interval; without one, the value itself."""
    table = ranking.table()
    low, high = (np.where(np.isnan(end[0]), table.values[0], end[0]) for end in table.interval())
    known = [k for k in map(table.layers_b.index, ranking.models) if math.isfinite(table.values[0, k])]
    return [(table.layers_b[k], float(table.values[0, k]), float(low[k]), float(high[k])) for k in known]


def _across(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _rules(axis: Axis, height: int) -> Iterator[Markup]:
    for tick in axis.ticks():
        x = round(_across(axis, tick), 1)
        yield tag("line", x1=x, x2=x, y1=TOP, y2=height - BOTTOM + 4, class_="rule")
        yield tag("text", tick_text(tick), x=x, y=height - BOTTOM + 20, text_anchor="middle")


def _row(y: float, axis: Axis, place: tuple[str, float, float, float], close: bool, label: str) -> Markup:
    model, value, low, high = place
    a, b, x = (round(_across(axis, number), 1) for number in (low, high, value))
    says = f"{model}: {number_with_error(value, math.nan)}" + (f", {low:.4g} to {high:.4g}" if low < high else "")
    bar = tag("path", d=f"M{a} {y}H{b}M{a} {y - 4}v8M{b} {y - 4}v8", class_="error") if low < high else None
    mark = tag("circle", cx=x, cy=y, r=6, role="img", aria_label=says, class_="mark")
    text = tag("text", label, tag("title", model), x=LEFT - 14, y=y + 4, text_anchor="end")
    return tag("g", text, tag("g", bar, mark, class_=f"line {'k0' if close else 'k7'}"))


def _origins(ranking: Ranking) -> Markup:
    told = {
        "data": ranking.data,
        "examples": f"{ranking.examples:,}",
        "classes": ranking.classes,
        "ranked by": ranking.score,
        "made": ranking.created,
        "netkin": ranking.version,
    }
    general = {key: value for key, value in ranking.provenance.items() if not is_identity(key)}
    told |= {key: value for key, value in general.items() if not key.startswith(FEATURES)}
    head = ["score", "what it says", "forward passes", "standard errors"]
    rows = [[score, ranking.table(score).conventions, f"{ranking.costs.get(score, math.nan):g}",
             _chunks(ranking.table(score))] for score in ranking.scores]  # fmt: skip
    scores = folded("The scores", plain_table(head, rows, label="The scores"), True)
    sizes = [[name(model), f"{ranking.parameters.get(model, 0):,}", general.get(f"{FEATURES}{model}", "not read")]
             for model in ranking.models]  # fmt: skip
    models = folded("The models", plain_table(["model", "parameters", "features"], sizes, label="The models"))
    return section(told, scores, models, identity(ranking.provenance))


def _chunks(table: Values) -> str:
    return f"jackknife over {len(table.chunk_sizes)} chunks of examples" if table.chunk_sizes else "not asked for"


# --- a figure for a paper ---------------------------------------------------------------------------------------------


def ranking_figure(ranking: Ranking, scores: Sequence[str]) -> Any:
    """Return a figure with a panel for each score."""
    columns = min(len(scores), 3)
    rows = math.ceil(len(scores) / columns)
    figure = empty_figure(3.6 * columns + 0.6, rows * (0.26 * len(ranking) + 1.0))
    for k, score in enumerate(scores):
        ranking_into(figure.add_subplot(rows, columns, k + 1), ranking.by(score))
    return figure


def ranking_into(ax: Any, ranking: Ranking) -> None:
    """Draw each model's score with its 95 % interval into axes, the first model on top."""
    places = _places(ranking)
    names = told_apart([model for model, *_ in places])
    values, low, high = (np.array([one[k] for one in places]) for k in (1, 2, 3))
    rows = np.arange(len(places))
    ax.errorbar(values, rows, xerr=[values - low, high - values], fmt="o", markersize=4, linewidth=1, capsize=2)
    ax.set_yticks(rows, [names[model] for model, *_ in places], fontsize=7)
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.invert_yaxis()
    ax.tick_params(labelsize=7, width=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    better = "higher" if ranking.table().higher_is_closer else "lower"
    write_words(ax.set_xlabel, f"{ranking.score} ({better} is better)", fontsize=8)
