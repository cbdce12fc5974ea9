"""Claims as tables and sentences for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from reproductions import claims
from reproductions.claims import Statement
from reproductions.page import training_in_words
from reproductions.record import record_path
from reproductions.running import Outcome, record_of, trainings

WIDEST = 44  # letters of a cell


def listed(names: Sequence[str]) -> list[Statement]:
    """Return the claims that `names` mean, papers or single claims; without names, those of all papers."""
    return [statement for name in names or claims.papers() for statement in claims.named(name)]


def list_as_text(statements: Sequence[Statement], out: str | Path) -> str:
    """Return a row for each claim and scale: one number of the paper's, one of ours, the control's and the verdict."""
    rows = [list(_row(one, scale, out).values()) for one in statements for scale in one.scales]
    head = ["claim", "figure", "number", "the paper", "ours", "control", "scale", "verdict"]
    return _aligned([head, *([_shortened(cell) for cell in row] for row in rows)])


def outcomes_as_text(outcomes: Sequence[Outcome]) -> str:
    """Return what became of each claim that was run: a sentence with what was claimed, the control and what follows.

    Below it stand the criterion by which it follows, and when and on which data it was measured.
    """
    return "\n".join(line for one in outcomes for line in (f"{one.statement.id}, {_sentence(one)}", *_facts(one)))


def _sentence(outcome: Outcome) -> str:
    claim = outcome.claim
    if claim is None:
        return f"failed: {outcome.fault}"
    unsaved = f" Its record is not kept: {outcome.fault}" if outcome.fault else ""
    return f"{claim.scale} scale, {claim.time}: {claim.verdict}. {claim.conclusion}{unsaved}"


def _facts(outcome: Outcome) -> Iterator[str]:
    claim = outcome.claim
    if claim is not None:
        facts = [claim.provenance.get(name, "") for name in ("data", "device")]
        facts += [f"seeds {', '.join(map(str, claim.seeds))}"] if claim.seeds else []
        yield f"  Criterion: {claim.criterion}"
        training = training_in_words([claim], trainings([claim]))
        if training:
            yield f"  Trained: {training}."
        yield f"  Measured on {claim.created[:10]}: {'; '.join(filter(None, facts))}."


def _row(statement: Statement, scale: str, out: str | Path) -> dict[str, str]:
    """Return the row of a record that is up to date, or one without numbers."""
    found = record_of(statement, scale, out)
    if found is not None:
        return found.row
    name = next(iter(statement.expected))
    words = {"claim": statement.id, "figure": statement.figure, "number": name}
    is_old = record_path(out, statement.id, scale).exists()
    return words | {
        "the paper": str(statement.expected[name]), "ours": "", "control": "", "scale": scale,
        "verdict": "measured before the claim changed" if is_old else "not yet",
    }  # fmt: skip


def _shortened(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 2].rsplit(' ', 1)[0]} …"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
