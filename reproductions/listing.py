"""Claims as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netkin.results.claim import SCALES, Claim, record_path
from reproductions import claims
from reproductions.claims import Statement
from reproductions.running import Outcome


def listed(names: Sequence[str]) -> list[Statement]:
    """Return the claims that `names` mean, papers or single claims; without names, those of all papers."""
    return [statement for name in names or claims.papers() for statement in claims.named(name)]


def list_as_text(statements: Sequence[Statement], out: str | Path) -> str:
    """Return a line for each claim: its id, its figure, its verdict at each scale and its sentence."""
    rows = [["claim", "figure", *SCALES, "sentence"]]
    rows += [[one.id, one.figure, *_verdicts(one, out), _shortened(one.sentence)] for one in statements]
    return _aligned(rows)


def list_as_document(statements: Sequence[Statement], out: str | Path) -> list[dict[str, Any]]:
    """Return the claims as plain dictionaries, each with its verdict at each scale."""
    words = ("id", "figure", "sentence", "expected", "criterion", "scales")
    return [
        {word: getattr(one, word) for word in words} | {"verdicts": dict(zip(SCALES, _verdicts(one, out), strict=True))}
        for one in statements
    ]


def outcomes_as_text(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each claim that was run: its verdict, the time it took and the first number."""
    rows = [["claim", "figure", "scale", "verdict", "time", "measured"]]
    return _aligned(rows + [_row(outcome) for outcome in outcomes])


def outcomes_as_document(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return what became of each claim, as plain dictionaries."""
    return [
        {"id": one.statement.id, "verdict": one.claim.verdict if one.claim else None, "fault": one.fault or None}
        | {"measured": {name: vars(value) for name, value in one.claim.measured.items()} if one.claim else {}}
        for one in outcomes
    ]


def _row(outcome: Outcome) -> list[str]:
    claim, statement = outcome.claim, outcome.statement
    if claim is None:
        return [statement.id, statement.figure, "", "failed", "", outcome.fault]
    first = next((f"{name}: {value}" for name, value in claim.measured.items()), "")
    return [claim.id, claim.figure, claim.scale, claim.verdict, f"{claim.seconds:.0f} s", first]


def _verdicts(statement: Statement, out: str | Path) -> list[str]:
    paths = {scale: record_path(out, statement.id, scale) for scale in SCALES}
    return [
        Claim.load(path).verdict if path.exists() else "not yet" if scale in statement.scales else "–"
        for scale, path in paths.items()
    ]


def _shortened(sentence: str, longest: int = 60) -> str:
    return sentence if len(sentence) <= longest else f"{sentence[:longest].rsplit(' ', 1)[0]} …"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
