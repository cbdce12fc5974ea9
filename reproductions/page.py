"""The page of reproductions: what papers claim, and what was found when it was measured again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from netkin import files
from netkin.errors import InvalidValue
from netkin.reporting.page.document import CHARTS, Markup, document, folded_note, plain_table, tag
from netkin.reporting.page.svg import figure_of_curve
from netkin.reporting.words import sentence
from reproductions.record import EMPIRICAL, FAILS, HOLDS, IDENTITY, IN_PART, UNDECIDED, Claim

SIGNS = {HOLDS: ("●", "whole"), IN_PART: ("◐", "part"), UNDECIDED: ("?", "open"), FAILS: ("○", "not")}
NOT_RECORDED = "not recorded"  # in records before format 3
SCALE_WORDS = {"cpu": "small networks, few images", "gpu": "larger networks, all images; shorter than in the paper"}
NOT_STATED = "not stated"
Notes = Mapping[tuple[str, str], Sequence[str]]
Trainings = Mapping[tuple[str, str], tuple[str, str]]


def report_claims(
    claims: Iterable[Claim],
    path: str | os.PathLike[str],
    *,
    notes: Notes | None = None,
    trainings: Trainings | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the claims as a single HTML page to `path`, whole or not at all, and return the path.

    Args:
        claims: The records to show.
        path: The file of the page.
        notes: What was said of records after they were measured, by id and scale, as `later_notes` gives it.
        trainings: How long the paper trained and how long we did, by id and scale, as `running.trainings` gives it.
        overwrite: Whether to replace a file that is there.
    """
    files.write_text(path, claims_page(claims, notes, trainings), overwrite=overwrite)
    return Path(path)


def claims_page(claims: Iterable[Claim], notes: Notes | None = None, trainings: Trainings | None = None) -> str:
    """Return the HTML page of recorded claims, in the order in which they are given, with what stands beside them."""
    listed = list(claims)
    if not listed:
        raise InvalidValue("a page of reproductions needs at least one recorded claim; got none.")
    papers = grouped(listed).items()
    parts = [_contents([paper for paper, _ in papers])]
    parts += [_overview(paper, by_id) for paper, by_id in papers]
    parts += [_claims(paper, by_id, notes or {}, trainings or {}) for paper, by_id in papers]
    said = f"What papers claim, measured again: {tally(listed)}, each at the largest scale at which it was measured."
    versions = [claim.version for claim in listed]
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


def _contents(papers: Sequence[str]) -> Markup:
    """Return links to the table of each paper, and to its claims one by one."""
    tables = [tag("a", paper, href=f"#table-of-{paper}") for paper in papers]
    claims = [tag("a", paper, href=f"#claims-of-{paper}") for paper in papers]
    lines = [tag("p", f"{words}: ", *links) for words, links in (("Tables", tables), ("Claim by claim", claims))]
    return tag("nav", *lines, class_="contents")


def _overview(paper: str, by_id: Mapping[str, Sequence[Claim]]) -> Markup:
    """Return the table of a paper's claims, each with a link to all that was found."""
    claims = [claim for scales in by_id.values() for claim in scales]
    reference = next((claim.provenance["paper"] for claim in claims if "paper" in claim.provenance), "")
    words = tag("p", reference, class_="headline") if reference else None
    card = tag("div", tag("div", _table(claims), class_="scroll"), class_="card")
    return tag("section", tag("h2", paper), words, card, id=f"table-of-{paper}")


def _claims(paper: str, by_id: Mapping[str, Sequence[Claim]], notes: Notes, trainings: Trainings) -> Markup:
    claims = [_claim(scales, notes, trainings) for scales in by_id.values()]
    return tag("section", tag("h2", f"{paper}, claim by claim"), *claims, id=f"claims-of-{paper}")


def _table(claims: Sequence[Claim]) -> Markup:
    rows = []
    for claim in claims:
        link = tag("a", claim.name, href=f"#{anchor(claim)}")
        cells = {name: tag("td", cell, data_label=name) for name, cell in claim.row.items()}
        cells |= {"claim": tag("th", link, scope="row"), "verdict": tag("td", _verdict(claim.verdict))}
        rows.append(tag("tr", *(cells[word] for word in _columns(claim))))
    head = tag("tr", *(tag("th", word, scope="col") for word in _columns(claims[0])))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="plain numbers overview")


def _columns(claim: Claim) -> list[str]:
    """Return the columns of the overview, the verdict first: it is what a reader looks for."""
    return sorted(claim.row, key=lambda word: word != "verdict")


def _claim(scales: Sequence[Claim], later: Notes, trainings: Trainings) -> Markup:
    one = scales[0]
    verdicts = [tag("span", f"{claim.scale}: ", _verdict(claim.verdict), class_="stands") for claim in scales]
    told = [
        *(tag("p", tag("strong", f"At {claim.scale} scale. "), _finding(claim)) for claim in scales),
        tag("p", tag("strong", "Criterion. "), sentence(one.criterion)),
        tag("p", tag("strong", "Control. "), sentence(one.control)) if one.control else None,
    ]
    if training := training_in_words(scales, trainings):
        told.append(tag("p", tag("strong", "Training. "), sentence(training)))
    notes = [tag("p", tag("strong", f"At {claim.scale} scale. "), claim.note) for claim in scales if claim.note]
    notes += [
        tag("p", tag("strong", f"Noted later, {claim.scale} scale. "), note)
        for claim in scales
        for note in later.get((claim.id, claim.scale), ())
    ]
    parts = [
        tag("p", *verdicts, class_="first"),
        tag("h3", one.name),
        tag("p", one.figure, class_="facts-line"),
        tag("blockquote", one.sentence),
        tag("div", *told, class_="told"),
        _numbers(scales),
        tag("div", *notes, class_="told") if notes else None,
        _curves(scales),
        _provenance(scales),
    ]
    return tag("article", *parts, class_="card claim", id=anchor(one))


def training_in_words(scales: Sequence[Claim], trainings: Trainings) -> str:
    """Return how long the paper trained and how long we did at each scale; empty where we trained nothing."""
    known = {claim.scale: trainings.get((claim.id, claim.scale), ("", "")) for claim in scales}
    ours = [f"here {training} ({scale} scale)" for scale, (_, training) in known.items() if training]
    return "; ".join([f"the paper: {next(iter(known.values()))[0] or NOT_STATED}", *ours]) if ours else ""


def _finding(claim: Claim) -> str:
    """Return the conclusion without the sentence of the paper, which is quoted above it."""
    return sentence(claim.conclusion.partition(f"” ({claim.figure})")[2].lstrip(";, "))


def _numbers(scales: Sequence[Claim]) -> Markup:
    """Return a table with a row for each number of the paper or of ours, and for each scale ours and the control's."""
    parts = [(claim, part) for claim in scales for part in ("measured", "controls") if getattr(claim, part)]
    names = dict.fromkeys([*scales[0].expected, *(word for claim, part in parts for word in getattr(claim, part))])
    rows = [
        [word, scales[0].expected.get(word, ""), *(getattr(claim, part).get(word, "") for claim, part in parts)]
        for word in names
    ]
    words = {"measured": "ours", "controls": "control"}
    head = ["", "the paper", *(f"{words[part]}, {claim.scale}" for claim, part in parts)]
    return plain_table(head, rows, kind="numbers", label="The numbers")


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
    rows = [[name, *(own.get(name, "") for own in facts)] for name in names]
    table = plain_table(["", *(claim.scale for claim in scales)], rows, kind="numbers", label="How it was measured")
    return folded_note("How it was measured", table)


def _facts(claim: Claim) -> Iterator[tuple[str, Any]]:
    yield "scale", SCALE_WORDS[claim.scale]
    yield "seeds", ", ".join(map(str, claim.seeds)) or "none"
    yield "time, without networks and stitches that other claims had made", claim.time
    yield "date", claim.created[:10]
    yield "measures", ", ".join(claim.measures) or "none"
    yield "command", claim.call or NOT_RECORDED
    if not claim.data:
        yield "digests of the data", "none, as it reads no data" if claim.call else NOT_RECORDED
    yield from ((f"digest of {name}", digest) for name, digest in claim.data.items())
    yield from ((f"network {name}", words) for name, words in claim.settings.items())
    yield from ((name, fact) for name, fact in claim.provenance.items() if name != "paper")


def _verdict(verdict: str) -> Markup:
    sign, kind = SIGNS[verdict]
    return tag("span", tag("span", sign, aria_hidden="true"), f" {verdict}", class_=f"verdict {kind}")


def anchor(claim: Claim) -> str:
    """Return where a claim stands on the page."""
    return claim.id.replace("/", "-")
