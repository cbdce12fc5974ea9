"""Schedules: how many of the units are frozen once so many steps are done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Protocol

from netkin.errors import UnknownName, ValueFault, did_you_mean


class Schedule(Protocol):
    """What decides how many units are frozen."""

    kind: str

    def frozen(self, done: int, frozen: int) -> int:
        """Return how many units are to be frozen after `done` steps, `frozen` of which are already."""
        ...

    def when(self, number: int | None) -> Any:
        """Return when unit `number` is frozen: equal answers, the same time; None, never."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that a later run needs to go on, in plain values and tensors."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        ...


class FreezePlan:
    """Each unit at its own step, known beforehand; those at or after the last step are never frozen."""

    def __init__(self, kind: str, at: Mapping[str, int], steps: int):
        self.kind, self.at, self.steps = kind, dict(at), steps

    def frozen(self, done: int, frozen: int) -> int:
        """Return how many units, from the first on, are due."""
        due = [at < self.steps and at <= done for at in self.at.values()]
        return [*due, False].index(False)

    def when(self, number: int | None) -> int | None:
        """Return the step after which unit `number` is frozen, or None."""
        at = self.steps if number is None else list(self.at.values())[number]
        return at if at < self.steps else None

    def state(self) -> dict[str, Any]:
        """Return the plan itself."""
        return {"at": dict(self.at), "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over another plan."""
        self.at, self.steps = dict(state["at"]), int(state["steps"])


def linear(names: Sequence[str], steps: int) -> FreezePlan:
    """Return the paper's schedule: unit i of L is frozen at the fraction i/L of all steps, so the last one never.

    Example:
        >>> linear(["conv1", "conv2", "out"], steps=10).at
        {'conv1': 4, 'conv2': 7, 'out': 10}
    """
    if len(names) < 2:
        raise ValueFault(
            f"'linear' freezes all units but the last, and {names[0]!r} is the only one; name more with `layers=`, or "
            f"give fractions such as {{{names[0]!r}: 0.5}}."
        )
    at = {name: -(-number * steps // len(names)) for number, name in enumerate(names, start=1)}
    return FreezePlan("linear", at, steps)


def fractions(names: Sequence[str], given: Mapping[str, Any], steps: int) -> FreezePlan:
    """Return the schedule that freezes each unit at its own fraction of all steps; one without a fraction never."""
    for name, fraction in given.items():
        if name not in names:
            known = ", ".join(map(repr, names))
            raise UnknownName(f"no unit named {name!r}{did_you_mean(name, names) or ';'} the units are {known}.")
        if not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
            raise ValueFault(f"a fraction of the training lies between 0 and 1; got {fraction!r} for {name!r}.")
    for before, after in pairwise(names):
        if given.get(after, 1) < given.get(before, 1):
            raise ValueFault(
                f"unit {after!r} would be frozen at {given[after]} of the training while {before!r}, which runs before "
                f"it, is trained until {given.get(before, 1)}; freeze units in the order in which they run."
            )
    # rounded first: 0.1 · 30 is a little more than 3
    return FreezePlan("fractions", {name: math.ceil(round(given.get(name, 1) * steps, 6)) for name in names}, steps)
