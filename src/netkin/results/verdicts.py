"""Verdicts on claims, each with the decisions that it follows from, and these in words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from netkin.errors import InvalidValue

HOLDS, IN_PART, UNDECIDED, FAILS = VERDICTS = ("holds", "holds in part", "undecided", "does not hold")
Decision = bool | None  # None: the numbers do not decide
Function = TypeVar("Function", bound=Callable[..., Any])
LESS = ", less that of "  # in the name of a difference between a number and a control's
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Verdict(str):
    """A verdict, and the parts of the criterion from which it follows, in their order: True, False or None.

    Example:
        >>> found = Verdict("holds in part", (True, False))
        >>> found, found.parts
        ('holds in part', (True, False))
    """

    parts: tuple[Decision, ...]

    def __new__(cls, words: str, parts: Sequence[Decision] = ()) -> Verdict:
        made = super().__new__(cls, checked_verdict(words))
        made.parts = decisions(parts)
        return made


def decisions(parts: Sequence[Any]) -> tuple[Decision, ...]:
    """Return decisions as plain values: True, False or None.

    Example:
        >>> decisions([True, None, 0])
        (True, None, False)
    """
    plain = (part.decision if isinstance(part, Joined) else part for part in parts)
    return tuple(None if part is None else bool(part) for part in plain)


@dataclass(frozen=True)
class Joined:
    """The decision on several conditions together, which knows each of them."""

    decision: Decision
    conditions: tuple[Decision, ...]

    def __bool__(self) -> bool:
        return bool(self.decision)


def keeping_conditions(function: Function) -> Function:
    """Decorate a function that joins conditions, so that it gives a `Joined`."""

    @functools.wraps(function)
    def joined(*conditions: Any) -> Joined:
        known = decisions(conditions)
        return Joined(function(*known), known)

    return cast("Function", joined)


def keeping_parts(function: Function) -> Function:
    """Decorate a function that gives a verdict in words, so that it gives a `Verdict` with the parts.

    A criterion of one part that joins several conditions has these for its parts.
    """

    @functools.wraps(function)
    def decided(*parts: Any) -> Verdict:
        alone = parts[0] if len(parts) == 1 else None
        return Verdict(function(*decisions(parts)), alone.conditions if isinstance(alone, Joined) else parts)

    return cast("Function", decided)


def parts_in_words(parts: Sequence[Decision], criterion: str) -> str:
    """Return which of several parts of a criterion hold and which do not, by their numbers; nothing of fewer than two.

    Example:
        >>> parts_in_words([True, False, True, None], "Four parts. ...")
        'of its four parts 1 and 3 hold, 2 fails and 4 is undecided'
        >>> parts_in_words([True, True], "Holds if a > b, and c > d.")
        'both of its conditions hold'
    """
    if len(parts) < 2:
        return ""
    what = "parts" if " part" in f" {criterion.lower()}".replace("one part:", "") else "conditions"
    count = NUMBERS[len(parts)] if len(parts) < len(NUMBERS) else str(len(parts))
    if all(parts):
        return f"both of its {what} hold" if len(parts) == 2 else f"all {count} of its {what} hold"
    verbs = {True: ("holds", "hold"), False: ("fails", "fail"), None: ("is undecided", "are undecided")}
    groups = {decision: [str(k) for k, part in enumerate(parts, 1) if part is decision] for decision in verbs}
    told = [f"{_listed(places)} {verbs[part][len(places) > 1]}" for part, places in groups.items() if places]
    return f"of its {count} {what} {_listed(told)}"


def differences_in_words(name: str, measured: Mapping[str, Any]) -> str:
    """Return by how much a number is above those of its controls, run by run, where that was measured."""
    found = {other.removeprefix(name + LESS): one for other, one in measured.items() if other.startswith(name + LESS)}
    told = [f"that of {control} by {one.value:.2g}{_interval(one)}" for control, one in found.items()]
    return f"; run by run it exceeds {_listed(told)}" if told else ""


def _interval(one: Any) -> str:
    ends = one.interval
    return "" if ends is None else f" (95% interval {ends[0]:.2g} to {ends[1]:.2g})"


def checked_verdict(verdict: str) -> str:
    """Return `verdict` if it is one of ours; refuse it otherwise."""
    refuse_stranger("verdict", verdict, VERDICTS)
    return verdict


def refuse_stranger(what: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not one of those known."""
    if value not in known:
        raise InvalidValue(f"a {what} is one of {', '.join(map(repr, known))}; got {value!r}.")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
