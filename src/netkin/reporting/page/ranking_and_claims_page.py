"""Pages of a ranking, which model is first and why, and of reproductions, what papers claim and what was found."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netkin import files
from netkin.errors import ValueFault
from netkin.reporting.charts import Axis, axis_up, tick_text
from netkin.reporting.page.document import (
    CHARTS,
    Markup,
    document,
    facts,
    folded,
    identity,
    is_identity,
    joined,
    name,
    plain_table,
    section,
    tag,
    warnings,
)
from netkin.reporting.page.line_chart import figure_of_curve
from netkin.reporting.words import number_with_error, range_of, sentence, short_names, shortened
from netkin.results import Ranking, Values
from netkin.results.claim import EMPIRICAL, FAILS, HOLDS, IDENTITY, IN_PART, UNDECIDED, Claim
from netkin.results.packing import document as described
from netkin.results.ranking import SENTENCE
from netkin.results.text import plural

LONGEST = 20  # letters of a model's name beside a chart
FEATURES = "features of "  # begins a word of provenance on each model
MEANING = (
    "A dot is a model's score, its bar the 95 % interval over the examples. Models drawn like the first are those "
    "that these examples cannot distinguish from it: the difference to the first, taken chunk by chunk, may be chance."
)
HONEST = (
    "Standard errors are those of the examples alone. How well a score predicts the accuracy after fine-tuning, and "
    "which score is best at it, is measured in netkin's guide “Which model to start from”."
)


def ranking_page(ranking: Ranking) -> str:
    """Return the HTML page of a ranking."""
    title, said, data = ranking.title, ranking.conclusion, {"ranking": described(ranking)}
    return document(
        title, said, _main(ranking), data, kind="ranking", versions=[ranking.version], note=HONEST, scripts=CHARTS
    )


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
    drawn = _chart(ranked) if known else tag("p", "It has no value for any model.")
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


SIGNS = {HOLDS: ("●", "whole"), IN_PART: ("◐", "part"), UNDECIDED: ("?", "open"), FAILS: ("○", "not")}
SCALE_WORDS = {"cpu": "small scale, on a CPU", "gpu": "the paper's setting as far as our data go, on a GPU"}


def report_claims(claims: Iterable[Claim], path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the claims as a single HTML page to `path`, whole or not at all, and return the path."""
    files.write_text(path, claims_page(claims), "page", overwrite=overwrite)
    return Path(path)


def claims_page(claims: Iterable[Claim]) -> str:
    """Return the HTML page of recorded claims, in the order in which they are given."""
    listed = list(claims)
    if not listed:
        raise ValueFault("a page of reproductions needs at least one recorded claim; got none.")
    parts = [_paper(paper, by_id) for paper, by_id in grouped(listed).items()]
    said, versions = f"What papers claim, measured again: {tally(listed)}.", [claim.version for claim in listed]
    return document("Reproductions", said, parts, {}, kind="claims", versions=versions, scripts=CHARTS)


def grouped(claims: Iterable[Claim]) -> dict[str, dict[str, list[Claim]]]:
    """Return the claims by paper and by id; an id has its scales."""
    papers: dict[str, dict[str, list[Claim]]] = {}
    for claim in claims:
        papers.setdefault(claim.paper, {}).setdefault(claim.id, []).append(claim)
    return papers


def tally(claims: Sequence[Claim]) -> str:
    """Return as text how many claims hold, at the largest measured scale of each; identities are counted separately."""
    parts = [_counted([one for one in claims if one.kind == EMPIRICAL], "claim")]
    parts += [_counted([one for one in claims if one.kind == IDENTITY], "identity")]
    return "; ".join(filter(None, parts))


def _counted(claims: Sequence[Claim], what: str) -> str:
    last = {claim.id: claim.verdict for claim in sorted(claims, key=lambda claim: claim.scale)}
    counts = Counter(last.values())
    told = ", ".join(f"{counts[verdict]} {_plural(verdict, counts[verdict])}" for verdict in SIGNS if counts[verdict])
    several = {"claim": "claims", "identity": "identities"}[what]
    return f"{len(last)} {what if len(last) == 1 else several}, of which {told}" if last else ""


def _plural(verdict: str, count: int) -> str:
    words = {UNDECIDED: "is undecided"}.get(verdict, verdict)
    return words if count == 1 else words.replace("holds", "hold").replace("does", "do").replace("is ", "are ")


def _paper(paper: str, by_id: Mapping[str, Sequence[Claim]]) -> Markup:
    claims = [claim for scales in by_id.values() for claim in scales]
    reference = next((claim.provenance["paper"] for claim in claims if "paper" in claim.provenance), "")
    words = tag("p", reference, class_="headline") if reference else None
    overview = tag("div", tag("div", _overview(claims), class_="scroll"), class_="card")
    return tag("section", tag("h2", paper), words, overview, *(_claim(scales) for scales in by_id.values()))


def _overview(claims: Sequence[Claim]) -> Markup:
    rows = []
    for claim in claims:
        link = tag("a", claim.name, href=f"#{_anchor(claim)}")
        cells = {name: tag("td", cell) for name, cell in claim.row.items()}
        cells |= {"claim": tag("th", link, scope="row"), "verdict": tag("td", _verdict(claim.verdict))}
        rows.append(tag("tr", *(cells[word] for word in _columns(claim))))
    return _claims_table(_columns(claims[0]), rows, "overview")


def _columns(claim: Claim) -> list[str]:
    """Return the columns of the overview, the verdict first: it is what a reader looks for."""
    return sorted(claim.row, key=lambda word: word != "verdict")


def _claim(scales: Sequence[Claim]) -> Markup:
    one = scales[0]
    verdicts = [tag("span", f"{claim.scale}: ", _verdict(claim.verdict), class_="stands") for claim in scales]
    parts = [
        tag("p", *verdicts, class_="first"),
        tag("h3", one.name),
        tag("p", one.figure, class_="facts-line"),
        tag("blockquote", one.sentence),
        *(tag("p", tag("strong", f"At {claim.scale} scale: "), claim.conclusion) for claim in scales),
        tag("p", tag("strong", "Criterion. "), one.criterion),
        tag("p", tag("strong", "Control. "), one.control) if one.control else None,
        _numbers(scales),
        *(tag("p", tag("strong", f"At {claim.scale} scale. "), claim.note) for claim in scales if claim.note),
        _curves(scales),
        _provenance(scales),
    ]
    return tag("article", *parts, class_="card claim", id=_anchor(one))


def _numbers(scales: Sequence[Claim]) -> Markup:
    """Return a table with a row for each number of the paper or of ours, and for each scale ours and the control's."""
    parts = [(claim, part) for claim in scales for part in ("measured", "controls") if getattr(claim, part)]
    names = dict.fromkeys([*scales[0].expected, *(word for claim, part in parts for word in getattr(claim, part))])
    rows = []
    for word in names:
        cells = [tag("td", getattr(claim, part).get(word, "")) for claim, part in parts]
        rows.append(tag("tr", tag("th", word, scope="row"), tag("td", scales[0].expected.get(word, "")), *cells))
    words = {"measured": "ours", "controls": "control"}
    head = ["", "the paper", *(f"{words[part]}, {claim.scale}" for claim, part in parts)]
    return tag("div", _claims_table(head, rows), class_="scroll")


def _curves(scales: Sequence[Claim]) -> Markup | None:
    """Return the charts, those of one title beside each other; None where there are none."""
    titles = dict.fromkeys(title for claim in scales for title in claim.curves)
    figures = [
        figure_of_curve(title, claim.curves[title], f"{claim.scale} scale")
        for title in titles
        for claim in scales
        if title in claim.curves
    ]
    return tag("div", *figures, class_="curves") if figures else None


def _provenance(scales: Sequence[Claim]) -> Markup:
    facts = [dict(_facts(claim)) for claim in scales]
    names = dict.fromkeys(name for own in facts for name in own)
    rows = [tag("tr", tag("th", name, scope="row"), *(tag("td", own.get(name, "")) for own in facts)) for name in names]
    table = _claims_table(["", *(claim.scale for claim in scales)], rows)
    return tag("details", tag("summary", "How it was measured"), tag("div", table, class_="scroll"))


def _facts(claim: Claim) -> Iterator[tuple[str, Any]]:
    yield "scale", SCALE_WORDS[claim.scale]
    yield "seeds", ", ".join(map(str, claim.seeds)) or "none"
    yield "time, without networks and stitches that other claims had made", claim.time
    yield "date", claim.created[:10]
    yield "measures", ", ".join(claim.measures) or "none"
    yield "digest of the code", claim.digest or "none"
    yield from ((f"network {name}", words) for name, words in claim.settings.items())
    yield from ((name, fact) for name, fact in claim.provenance.items() if name != "paper")


def _verdict(verdict: str) -> Markup:
    sign, kind = SIGNS[verdict]
    return tag("span", tag("span", sign, aria_hidden="true"), f" {verdict}", class_=f"verdict {kind}")


def _claims_table(head: Sequence[str], rows: Sequence[Markup], kind: str = "") -> Markup:
    top = tag("tr", *(tag("th", title, scope="col") for title in head))
    return tag("table", tag("thead", top), tag("tbody", *rows), class_=f"plain numbers {kind}".rstrip())


def _anchor(claim: Claim) -> str:
    return claim.id.replace("/", "-")
