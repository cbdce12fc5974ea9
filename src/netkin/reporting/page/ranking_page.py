"""The page of a ranking: which pretrained model to start from, by each score."""

from __future__ import annotations

import math

import numpy as np

from netkin.reporting.blocks import Name, Page, PageBlock, Ranked, RankingBlock, Section, Table, Text
from netkin.reporting.charts import axis_up
from netkin.reporting.parts import origins, table_of
from netkin.reporting.words import range_of, sentence, short_names
from netkin.results import Ranking, Values
from netkin.results.labels import plural
from netkin.results.ranking import SENTENCE

FEATURES = "features of "  # begins a word of provenance on each model
DOTS = (
    "A dot is a model's score, its bar the 95 % interval over the examples. Models drawn like the first are those "
    "that these examples cannot distinguish from it: the difference to the first, taken chunk by chunk, may be chance."
)
EXAMPLES_ALONE = (
    "Standard errors are those of the examples alone. How the agreement with fine-tuning, τ, was measured, netkin's "
    "guide “Which model to start from” says."
)


def ranking_page(ranking: Ranking) -> Page:
    """Return the page of a ranking."""
    cost = ranking.cost_in_words.partition(": ")[2]
    data = [ranking.data, plural(ranking.examples, "example"), plural(ranking.classes, "class")]
    cards = Section("", [_score(ranking, score) for score in ranking.scores], "cards")
    reliability = ranking.reliability_in_words
    notes = [Text(DOTS, style="note"), Text(reliability, style="note") if reliability else None]
    reasons = list(ranking.reasons())
    return Page(
        title=ranking.title,
        sentence=ranking.conclusion,
        facts=[*data, cost, ranking.created[:10]],
        caveats=ranking.caveats,
        blocks=[
            Section("Which model to start from", [cards, *notes], quiet=True),
            Section("The ranking", [_table(ranking), Text(items=reasons, style="reasons") if reasons else None]),
        ],
        origins=_origins(ranking),
        style="ranking",
        versions=[ranking.version],
        note=EXAMPLES_ALONE,
        name=["ranking", ranking.data],
        csv=table_of(ranking),
        results=[ranking],
    )


def _score(ranking: Ranking, score: str) -> RankingBlock:
    """Return the ranking by one score, with what that is."""
    table, by_score = ranking.table(score), ranking.by(score)
    passes, tau = ranking.costs.get(score), ranking.reliability_text(score)
    cost = "" if passes is None else f"{passes:g} forward pass{'es' if passes != 1 else ''}"
    places = _places(by_score)
    axis = axis_up([end for place in places for end in (place.value, place.low, place.high)]) if places else None
    lead = [by_score.lead_in_words] if places and score != ranking.score else []  # that of the rank is above all
    return RankingBlock(
        title=score,
        direction=f"{'higher' if table.higher_is_closer else 'lower'} is better",
        line=", ".join(filter(None, [range_of(table), cost, tau and f"τ with fine-tuning {tau}"])),
        places=places,
        axis=axis,
        notes=[*lead, sentence(table.quantity.convention)],
    )


def _places(ranking: Ranking) -> list[Ranked]:
    """Return the models that have a value, the first first, with the ends of their intervals."""
    table = ranking.table()
    low, high = (np.where(np.isnan(end[0]), table.values[0], end[0]) for end in table.interval())
    texts = {model: first for model, (first, *_) in zip(ranking.models, ranking.cells(), strict=True)}
    known = [(k, table.layers_b[k]) for k in map(table.layers_b.index, ranking.models)
             if math.isfinite(table.values[0, k])]  # fmt: skip
    close = {ranking.best, *(ranking.unclear() if ranking.lead.clear is not None else ())} if known else {}
    return [
        Ranked(model, float(table.values[0, k]), float(low[k]), float(high[k]), texts[model], model in close)
        for k, model in known
    ]


def _table(ranking: Ranking) -> Table:
    """Return a row for each model, the score of the rank first."""
    short = short_names(ranking.models, SENTENCE)
    names = [Name(short[model], model if short[model] != model else "", f"{place}. ")
             for place, model in enumerate(ranking, start=1)]  # fmt: skip
    rows = [[name, *cells] for name, cells in zip(names, ranking.cells(), strict=True)]
    return Table(["model", *ranking.columns()], rows, label="The ranking", style="numbers")


def _origins(ranking: Ranking) -> list[PageBlock | None]:
    told = {
        "data": ranking.data, "examples": f"{ranking.examples:,}", "classes": ranking.classes,
        "ranked by": ranking.score, "made": ranking.created, "netkin": ranking.version,
    }  # fmt: skip
    about = {key: value for key, value in ranking.provenance.items() if not key.startswith(FEATURES)}
    head = ["score", "what it says", "forward passes", "standard errors"]
    rows = [[score, ranking.table(score).quantity.convention, f"{ranking.costs.get(score, math.nan):g}",
             _chunks(ranking.table(score))] for score in ranking.scores]  # fmt: skip
    scores = Table(head, rows, "The scores", "The scores", folded=True, open=True)
    read = {model: ranking.provenance.get(f"{FEATURES}{model}", "not read") for model in ranking.models}
    sizes = [[Name(model), f"{ranking.parameters.get(model, 0):,}", features] for model, features in read.items()]
    models = Table(["model", "parameters", "features"], sizes, "The models", "The models", folded=True)
    return origins(told, about, scores, models)


def _chunks(table: Values) -> str:
    return f"jackknife over {len(table.chunk_sizes)} chunks of examples" if table.chunk_sizes else "not asked for"
