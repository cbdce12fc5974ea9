"""The page and the figure of a ranking: which model is first, how far behind the others are, and the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from netkin.reporting.charts import Axis, axis_up, tick_text
from netkin.reporting.page.document import (
    Markup,
    document,
    facts,
    folded,
    footer,
    header,
    identity,
    is_identity,
    joined,
    name,
    plain_table,
    section,
    tag,
    warnings,
)
from netkin.reporting.words import number_with_error, range_of, sentence, short_names, shortened
from netkin.results import Ranking, Values
from netkin.results.packing import document as described
from netkin.results.ranking import SENTENCE
from netkin.results.text import plural

SCRIPTS = ("page", "chart")
LONGEST = 20  # letters of a model's name beside a chart
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
    return document(ranking.title, shown, data, scripts=SCRIPTS, kind="ranking")


def _main(ranking: Ranking) -> Iterator[Markup | None]:
    classes = plural(ranking.classes, "class")
    cost = ranking.cost_in_words.partition(": ")[2]
    yield facts([ranking.data, plural(ranking.examples, "example"), classes, cost, ranking.created[:10]])
    yield warnings(ranking.warnings)
    yield tag("h2", "Which model to start from", class_="quiet")
    yield tag("div", *(_card(ranking, score) for score in ranking.scores), class_="cards")
    yield tag("p", MEANING, class_="note")
    yield tag("h2", "The ranking")
    yield tag("div", _table(ranking), class_="card")
    yield tag("ul", *(tag("li", reason) for reason in ranking.reasons()), class_="reasons")
    yield _origins(ranking)


def _table(ranking: Ranking) -> Markup:
    """Return the ranking as a table: a row for each model, the score of the rank first."""
    short = short_names(ranking.models, SENTENCE)
    told = [tag("bdi", short[one], title=one if short[one] != one else None) for one in ranking]
    labels = [joined(f"{place}. ", one) for place, one in enumerate(told, start=1)]
    rows = [[label, *cells] for label, cells in zip(labels, ranking.cells(), strict=True)]
    return plain_table(["model", *ranking.columns()], rows, kind="numbers", label="The ranking")


def _card(ranking: Ranking, score: str) -> Markup:
    ranked, table = ranking.by(score), ranking.table(score)
    passes = ranking.costs.get(score)
    cost = "" if passes is None else f"{passes:g} forward pass{'es' if passes != 1 else ''}"
    better = "higher is better" if table.higher_is_closer else "lower is better"
    words = ", ".join(filter(None, [better, range_of(table), cost]))
    known = bool(np.isfinite(table.values).any())
    drawn = _chart(ranked) if known else tag("p", "It has a value for no model.")
    said = ranked.conclusion if known and score != ranking.score else None  # that of the rank is above all
    note = tag("figcaption", tag("p", said), tag("p", sentence(table.conventions), class_="facts-line"))
    return tag("figure", tag("h3", score), tag("p", words, class_="facts-line"), drawn, note, class_="card curve")


def _chart(ranking: Ranking) -> Markup:
    """Return a dot with its interval for each model, from the first to the last, with the numbers beside."""
    places = ranked_places(ranking)
    axis = axis_up([number for _, value, low, high in places for number in (value, low, high)])
    close = {ranking.best, *(ranking.unclear() if ranking.lead.clear is not None else ())}
    short = shortened([model for model, *_ in places], LONGEST)
    errors = dict(zip(ranking.table().layers_b, ranking.table().to_errors()[0].tolist(), strict=True))
    rows = [_row(axis, place, place[0] in close, label, errors[place[0]])
            for place, label in zip(places, short, strict=True)]  # fmt: skip
    ticks = [tag("span", tick_text(tick), style=f"left:{100 * axis.place(tick):.4g}%") for tick in axis.ticks()]
    return tag("div", *rows, tag("div", tag("div", *ticks, class_="ticks"), class_="row"), class_="dotted")


def ranked_places(ranking: Ranking) -> list[tuple[str, float, float, float]]:
    """Return the models that have a value, with it and the ends of its interval; without one, the value itself."""
    table = ranking.table()
    low, high = (np.where(np.isnan(end[0]), table.values[0], end[0]) for end in table.interval())
    known = [k for k in map(table.layers_b.index, ranking.models) if math.isfinite(table.values[0, k])]
    return [(table.layers_b[k], float(table.values[0, k]), float(low[k]), float(high[k])) for k in known]


def _row(axis: Axis, place: tuple[str, float, float, float], close: bool, label: str, error: float) -> Markup:
    model, value, low, high = place
    at, left, right = (100 * axis.place(number) for number in (value, low, high))
    bar = tag("span", class_="interval", style=f"left:{left:.4g}%;width:{right - left:.4g}%") if low < high else None
    dot = tag("span", class_="dot", style=f"left:{at:.4g}%")
    track = tag("div", bar, dot, class_=f"track {'k0' if close else 'k7'}", aria_hidden="true")
    interval = f"95 % interval {low:.4g} to {high:.4g}" if low < high else None
    told = tag("span", number_with_error(value, error), class_="value", title=interval)
    return tag("div", tag("span", name(label), title=model, class_="model"), track, told, class_="row")


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
