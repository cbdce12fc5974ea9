"""Schedules: how many groups are frozen after a number of steps, planned beforehand or once groups stop changing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from netkin.errors import ForwardError, InvalidValue, NoValue, UnknownName, did_you_mean
from netkin.measures import Measure, find
from netkin.measures.registry import value_of
from netkin.representations import activations, batches_of
from netkin.representations.inputs import Forward, device_of
from netkin.representations.shapes import Shape


class Schedule(Protocol):
    """What decides how many groups are frozen."""

    kind: str

    def frozen(self, done: int, frozen: int) -> int:
        """Return how many groups are to be frozen after `done` steps, `frozen` of which are already."""
        ...

    def when(self, number: int | None) -> Any:
        """Return when group `number` is frozen: equal answers, the same time; None, never."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that a later run needs to go on, in plain values and tensors."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        ...


class FreezePlan:
    """Each group at its own step, known beforehand; those at or after the last step are never frozen."""

    def __init__(self, kind: str, at: Mapping[str, int], steps: int):
        self.kind, self.at, self.steps = kind, dict(at), steps

    def frozen(self, done: int, frozen: int) -> int:
        """Return how many groups, from the first on, are due."""
        due = [at < self.steps and at <= done for at in self.at.values()]
        return [*due, False].index(False)

    def when(self, number: int | None) -> int | None:
        """Return the step after which group `number` is frozen, or None."""
        at = self.steps if number is None else list(self.at.values())[number]
        return at if at < self.steps else None

    def state(self) -> dict[str, Any]:
        """Return the plan itself."""
        return {"at": dict(self.at), "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over another plan."""
        self.at, self.steps = dict(state["at"]), int(state["steps"])


def linear(names: Sequence[str], steps: int) -> FreezePlan:
    """Return the paper's schedule: group i of L is frozen at the fraction i/L of all steps, so the last one never.

    Example:
        >>> linear(["conv1", "conv2", "out"], steps=10).at
        {'conv1': 4, 'conv2': 7, 'out': 10}
    """
    if len(names) < 2:
        raise InvalidValue(
            f"'linear' freezes all groups but the last, and {names[0]!r} is the only one; name more with `layers=`, or "
            f"give fractions such as {{{names[0]!r}: 0.5}}."
        )
    at = {name: -(-number * steps // len(names)) for number, name in enumerate(names, start=1)}
    return FreezePlan("linear", at, steps)


def fractions(names: Sequence[str], given: Mapping[str, Any], steps: int) -> FreezePlan:
    """Return the schedule that freezes each group at its own fraction of all steps; one without a fraction never."""
    for name, fraction in given.items():
        if name not in names:
            known = ", ".join(map(repr, names))
            raise UnknownName(
                f"no group named {name!r}{did_you_mean(name, names) or ';'} the groups are {known}.",
                argument="schedule",
            )
        if not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
            raise InvalidValue(
                f"a fraction of the training lies between 0 and 1; got {fraction!r} for {name!r}.", argument="schedule"
            )
    for before, after in pairwise(names):
        if given.get(after, 1) < given.get(before, 1):
            raise InvalidValue(
                f"group {after!r} would be frozen at {given[after]} of the training while {before!r}, which runs "
                f"before it, is trained until {given.get(before, 1)}; freeze groups in the order in which they run.",
                argument="schedule",
            )
    # rounded first: 0.1 · 30 is a little more than 3
    return FreezePlan("fractions", {name: math.ceil(round(given.get(name, 1) * steps, 6)) for name in names}, steps)


class Settling:
    """The similarity schedule: in order, each group once it has been similar to its own recent past for long enough.

    Every `every` steps the probe examples run through the model, once even if a step is reported repeatedly. A group's
    value is the least similarity of its output to its outputs at the last `past` probes; a group has settled after
    `patience` probes in a row with a value of at least `threshold`. The last group is never frozen. In a distributed
    run the first process decides for all.
    """

    kind = "similarity"

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        probe: Any,
        *,
        measure: Any,
        threshold: float,
        patience: int,
        past: int,
        every: int,
        examples: int,
        shape: Shape,
        forward: Forward | None,
    ):
        self.model, self.names, self.measure = model, list(names), _similarity(measure, threshold)
        self.threshold, self.patience, self.past, self.every = threshold, patience, past, every
        self.shape, self.forward, self.due = shape, forward, 0
        self.probe = list(batches_of(probe, examples))
        self.rows: list[dict[str, Tensor]] = []
        self.streak = dict.fromkeys(names, 0)
        self.history: list[dict[str, Any]] = []

    def frozen(self, done: int, frozen: int) -> int:
        """Probe the model if it is due, and return how many groups have converged, in order."""
        if done >= self.due and frozen < len(self.names) - 1:
            self.due = (done // self.every + 1) * self.every
            self._look(done, self.names[frozen:])
        settled = [self.streak[name] >= self.patience for name in self.names[frozen:-1]]
        return frozen + [*settled, False].index(False)

    def when(self, number: int | None) -> int | None:
        """Return the group's place in the order; the last one is never frozen."""
        return number if number is not None and number < len(self.names) - 1 else None

    def state(self) -> dict[str, Any]:
        """Return what the last probes gave, and the values so far."""
        settings = {"measure": self.measure.id, "threshold": self.threshold, "patience": self.patience}
        settings |= {"past": self.past, "every": self.every, "due": self.due}
        return {**settings, "rows": list(self.rows), "streak": dict(self.streak), "history": list(self.history)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from where such a state was taken."""
        self.measure, self.threshold, self.patience = find(state["measure"]), state["threshold"], state["patience"]
        self.past, self.every, self.due = state["past"], state["every"], state["due"]
        place = device_of(self.model)
        self.rows = [{name: rows.to(place) for name, rows in probe.items()} for probe in state["rows"]]
        self.streak, self.history = dict(state["streak"]), list(state["history"])

    def _look(self, done: int, names: list[str]) -> None:
        values = _from_first_process(lambda: self._values(names))
        for name, value in values.items():
            held = value is not None and value >= self.threshold
            self.streak[name] = self.streak[name] + 1 if held else 0
        if values:
            self.history.append({"step": done, **values})

    def _values(self, names: list[str]) -> dict[str, float | None]:
        """Return each group's least similarity to the last probes, once there are enough of them."""
        place = device_of(self.model)
        now = activations(self.model, names, self.probe, shape=self.shape, forward=self.forward, device=place)
        then, self.rows = self.rows[-self.past :], [*self.rows[-self.past + 1 :], now][-self.past :]
        if len(then) < self.past:
            return {}
        return {name: self._least(name, now[name], [probe[name] for probe in then]) for name in names}

    def _least(self, name: str, now: Tensor, then: list[Tensor]) -> float | None:
        try:
            return min(self._value(name, now, rows) for rows in then)
        except NoValue:  # a group that gives the same for all examples has not settled, and will have a value later
            return None

    def _value(self, name: str, now: Tensor, then: Tensor) -> float:
        pair = self.measure.pair(now, then)
        few = getattr(pair, "few_examples", None) if self.measure.facts.whitens else None
        if few:
            raise InvalidValue(f"the probe is too small for group {name!r}: {few}", argument="probe")
        return value_of(self.measure, pair)


def _similarity(spec: Any, threshold: float) -> Measure:
    found = find(spec)
    low, high = found.facts.bounds
    if not found.facts.higher_is_closer:
        raise InvalidValue(
            f"{found.id!r} is a distance, which falls as groups settle; choose a similarity such as 'cka'.",
            argument="measures",
        )
    if not low <= threshold <= high:
        raise InvalidValue(
            f"{found.id} lies between {low:g} and {high:g}; a threshold of {threshold:g} does not.",
            argument="threshold",
        )
    return found


def _from_first_process(compute: Callable[[], Any]) -> Any:
    """Return what `compute` gives on the first process, on all of them; what it raises there ends all of them."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return compute()
    fault: BaseException | None = None
    answer: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            answer[0] = compute()
        except BaseException as raised:  # sent first to the other processes, which wait
            fault, answer[1] = raised, f"{type(raised).__name__}: {raised}"
    dist.broadcast_object_list(answer, src=0)
    if fault is not None:
        raise fault
    if answer[1]:
        raise ForwardError(f"the first process could not probe the model: {answer[1]}")
    return answer[0]
