"""Settling: units are frozen when what they make of a few examples has stopped changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from netkin.errors import ForwardError, NoValue, ValueFault
from netkin.measures import Measure, find
from netkin.measures.registry import value_of
from netkin.representations import activations, batches_of
from netkin.representations.inputs import Forward, device_of
from netkin.representations.shapes import Shape


class Settling:
    """The similarity schedule: in order, each unit once it has long enough been like its own recent past.

    Every `every` steps the probe examples run through the model, once however often a step is told. A unit's value is
    the least similarity of its output to its outputs at the last `past` probes; a unit has settled after `patience`
    probes in a row with a value of at least `threshold`. The last unit is never frozen. In a distributed run the first
    process decides for all.
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
        """Look at the model if it is time, and return how many units have settled, in order."""
        if done >= self.due and frozen < len(self.names) - 1:
            self.due = (done // self.every + 1) * self.every
            self._look(done, self.names[frozen:])
        settled = [self.streak[name] >= self.patience for name in self.names[frozen:-1]]
        return frozen + [*settled, False].index(False)

    def when(self, number: int | None) -> int | None:
        """Return the unit's place in the order; the last one is never frozen."""
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
        """Return each unit's least similarity to the last probes, once there are enough of them."""
        place = device_of(self.model)
        now = activations(self.model, names, self.probe, shape=self.shape, forward=self.forward, device=place)
        then, self.rows = self.rows[-self.past :], [*self.rows[-self.past + 1 :], now][-self.past :]
        if len(then) < self.past:
            return {}
        return {name: self._least(name, now[name], [probe[name] for probe in then]) for name in names}

    def _least(self, name: str, now: Tensor, then: list[Tensor]) -> float | None:
        try:
            return min(self._value(name, now, rows) for rows in then)
        except NoValue:  # a unit that gives the same for all examples has not settled, and will have a value later
            return None

    def _value(self, name: str, now: Tensor, then: Tensor) -> float:
        pair = self.measure.pair(now, then)
        few = getattr(pair, "few_examples", None) if self.measure.facts.whitens else None
        if few:
            raise ValueFault(f"the probe is too small for unit {name!r}: {few}")
        return value_of(self.measure, pair)


def _similarity(spec: Any, threshold: float) -> Measure:
    found = find(spec)
    low, high = found.facts.bounds
    if not found.facts.higher_is_closer:
        raise ValueFault(f"{found.id!r} is a distance, which falls as units settle; choose a similarity such as 'cka'.")
    if not low <= threshold <= high:
        raise ValueFault(f"{found.id} lies between {low:g} and {high:g}; a threshold of {threshold:g} does not.")
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
        except BaseException as raised:  # told to the others first, who wait
            fault, answer[1] = raised, f"{type(raised).__name__}: {raised}"
    dist.broadcast_object_list(answer, src=0)
    if fault is not None:
        raise fault
    if answer[1]:
        raise ForwardError(f"the first process could not look at the model: {answer[1]}")
    return answer[0]
