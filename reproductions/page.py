"""The page of reproductions: what papers claim, and what was found when it was measured again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from netkin import files
from netkin.errors import InvalidValue
from netkin.reporting.blocks import Lines, Page, PageBlock, Table
from netkin.reporting.html import html_of
from netkin.reporting.parts import curve
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
    said = f"What papers claim, measured again: {tally(listed)}, each at the largest scale at which it was measured."
    papers = [_paper(paper, by_id, notes or {}, trainings or {}) for paper, by_id in grouped(listed).items()]
    blocks = [lines for paper in papers for claim in paper.claims for lines in claim.curves]
    versions = [claim.version for claim in listed]
    return html_of(Page("Reproductions", said, blocks=[ClaimsBlock(blocks, papers)], style="claims", versions=versions))


@dataclass(frozen=True)
class ClaimView:
    """What is shown of a claim, at all its scales."""

    scales: Sequence[Claim]
    anchor: str
    findings: Sequence[tuple[str, str]]  # scale, and what was found at it
    training: str
    numbers: Table
    notes: Sequence[tuple[str, str]]
    curves: Sequence[Lines]
    made: Table


@dataclass(frozen=True)
class Paper:
    """The claims of a paper, and which columns their table has, the verdict first: it is what a reader looks for."""

    name: str
    reference: str
    columns: Sequence[str]
    claims: Sequence[ClaimView]


@dataclass(frozen=True)
class ClaimsBlock(PageBlock):
    """All claims, in tables and one by one; their charts are blocks, which a script reads."""

    kind: ClassVar[str] = "claims"
    package: ClassVar[str] = "reproductions"
    blocks: Sequence[Lines]
    papers: Sequence[Paper] = field(repr=False)
    signs: Mapping[str, tuple[str, str]] = field(default_factory=lambda: SIGNS, repr=False)


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


def _paper(paper: str, by_id: Mapping[str, Sequence[Claim]], notes: Notes, trainings: Trainings) -> Paper:
    claims = [claim for scales in by_id.values() for claim in scales]
    reference = next((claim.provenance["paper"] for claim in claims if "paper" in claim.provenance), "")
    columns = sorted(claims[0].row, key=lambda word: word != "verdict")
    return Paper(paper, reference, columns, [_view(scales, notes, trainings) for scales in by_id.values()])


def _view(scales: Sequence[Claim], later: Notes, trainings: Trainings) -> ClaimView:
    notes = [(f"At {claim.scale} scale.", claim.note) for claim in scales if claim.note]
    notes += [
        (f"Noted later, {claim.scale} scale.", note)
        for claim in scales
        for note in later.get((claim.id, claim.scale), ())
    ]
    findings = [(claim.scale, _finding(claim)) for claim in scales]
    training = training_in_words(scales, trainings)
    numbers, curves, made = _numbers(scales), _curves(scales), _made(scales)
    return ClaimView(scales, anchor(scales[0]), findings, training, numbers, notes, curves, made)


def training_in_words(scales: Sequence[Claim], trainings: Trainings) -> str:
    """Return how long the paper trained and how long we did at each scale; empty where we trained nothing."""
    known = {claim.scale: trainings.get((claim.id, claim.scale), ("", "")) for claim in scales}
    ours = [f"here {training} ({scale} scale)" for scale, (_, training) in known.items() if training]
    return "; ".join([f"the paper: {next(iter(known.values()))[0] or NOT_STATED}", *ours]) if ours else ""


def _finding(claim: Claim) -> str:
    """Return the conclusion without the sentence of the paper, which is quoted above it."""
    return sentence(claim.conclusion.partition(f"” ({claim.figure})")[2].lstrip(";, "))


def _numbers(scales: Sequence[Claim]) -> Table:
    """Return a table with a row for each number of the paper or of ours, and for each scale ours and the control's."""
    parts = [(claim, part) for claim in scales for part in ("measured", "controls") if getattr(claim, part)]
    names = dict.fromkeys([*scales[0].expected, *(word for claim, part in parts for word in getattr(claim, part))])
    rows = [
        [word, scales[0].expected.get(word, ""), *(getattr(claim, part).get(word, "") for claim, part in parts)]
        for word in names
    ]
    words = {"measured": "ours", "controls": "control"}
    head = ["", "the paper", *(f"{words[part]}, {claim.scale}" for claim, part in parts)]
    return Table(head, rows, label="The numbers", style="numbers")


def _curves(scales: Sequence[Claim]) -> list[Lines]:
    """Return the charts, those of one title beside each other."""
    titles = dict.fromkeys(title for claim in scales for title in claim.curves)
    charts = [
        curve(title, claim.curves[title], f"{claim.id} {claim.scale} {title}", f"{claim.scale} scale")
        for title in titles
        for claim in scales
        if title in claim.curves
    ]
    return [chart for chart in charts if chart is not None]


def _made(scales: Sequence[Claim]) -> Table:
    facts = [dict(_facts(claim)) for claim in scales]
    names = dict.fromkeys(name for own in facts for name in own)
    rows = [[name, *(own.get(name, "") for own in facts)] for name in names]
    title = "How it was measured"
    return Table(["", *(claim.scale for claim in scales)], rows, title, title, "numbers", folded=True)


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


def anchor(claim: Claim) -> str:
    """Return where a claim stands on the page."""
    return claim.id.replace("/", "-")
