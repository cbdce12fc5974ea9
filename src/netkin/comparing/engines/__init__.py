"""Engines: which process runs what. Their interface, and their names.

An engine is given a call (`netkin.comparing.compare.Call`). `Local` runs it here; `Distributed` runs it in the
processes that torchrun started, of which each reads its part of the data; `Ray` has parts of it collected by the
workers of a cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from netkin.errors import UnknownName, did_you_mean
from netkin.measures.registry import Measure

if TYPE_CHECKING:
    from netkin.comparing.compare import Call
    from netkin.comparing.comparer import Comparer
    from netkin.comparing.many_models import ManyPlan
    from netkin.comparing.sides import Side
    from netkin.results import Comparison, Comparisons

__all__ = ["ENGINES", "Engine", "Local", "PassEngine", "named_engine"]

ENGINES = ("local", "distributed", "ray")
Result = TypeVar("Result", bound="Comparer | list[Comparison]")


class Engine(ABC):
    """Does the work of one call of `compare`, `collect` or `compare_many`."""

    by_name: ClassVar[bool] = False  # whether models and data stay names, which are loaded where the work is done

    def working(self) -> AbstractContextManager[None]:
        """Return a context for a whole call; where several processes make it, a fault of one ends all."""
        return nullcontext()

    @abstractmethod
    def compare(self, call: Call, measures: Sequence[Measure]) -> list[Comparison]:
        """Return the comparison of every pair of models."""

    @abstractmethod
    def collect(self, call: Call, measures: Sequence[Measure]) -> Comparer:
        """Return what one pass over the data leaves."""

    @abstractmethod
    def compare_many(self, call: Call, measures: Sequence[Measure]) -> Comparisons:
        """Return the comparisons of all pairs."""

    @abstractmethod
    def explain_many(self, call: Call, measures: Sequence[Measure]) -> ManyPlan:
        """Return the plan of `compare_many`."""


class PassEngine(Engine):
    """An engine that runs the pass in this process alone, or in several, of which each reads its part of the data.

    Each of several processes does what is written here to agree with the others; for one alone there is nothing to do.
    """

    part: tuple[int, int] | None = None  # which part of the data this process reads; None for all of them

    def compare(self, call: Call, measures: Sequence[Measure]) -> list[Comparison]:
        return replace(call, engine=self).compare(measures)

    def collect(self, call: Call, measures: Sequence[Measure]) -> Comparer:
        return replace(call, engine=self).collect(measures)

    def compare_many(self, call: Call, measures: Sequence[Measure]) -> Comparisons:
        from netkin.comparing.many_models import Many  # which knows engines

        return Many(replace(call, engine=self), measures).compare()

    def explain_many(self, call: Call, measures: Sequence[Measure]) -> ManyPlan:
        from netkin.comparing.many_models import Many

        return Many(replace(call, engine=self), measures).explain()

    def prepare(self, sides: Sequence[Side], settings: Mapping[str, str]) -> AbstractContextManager[None]:
        """Return a context for the pass; processes that were called with other settings are refused."""
        return nullcontext()

    def least(self, number: int) -> int:
        """Return the minimum over the processes, so that all make the same plan."""
        return number

    def check_others(self) -> None:
        """Raise the fault of another process, if one has failed; called for each batch."""

    def opening(self, comparer: Comparer) -> AbstractContextManager[None]:
        """Return a context in which the first batch is folded in, all processes by the same shifts and scales."""
        return nullcontext()

    def join(self, comparer: Comparer, length: int | None) -> Comparer:
        """Return the comparer of all processes, of which this one had `length` examples to read."""
        return comparer

    def once(self, make: Callable[[], Result]) -> Result:
        """Return what `make` returns, which is called in one process only and given to all."""
        return make()


class Local(PassEngine):
    """This process reads all data."""


def named_engine(name: str | Engine) -> Engine:
    """Return the engine of that name, ready for one call; an engine is one already."""
    if isinstance(name, Engine):
        return name
    if name == "local":
        return Local()
    if name == "distributed":
        from netkin.comparing.engines.distributed import Distributed  # which needs torch's distributed package

        return Distributed()
    if name == "ray":
        from netkin.comparing.engines.ray import Ray

        return Ray()
    known = ", ".join(map(repr, ENGINES))
    raise UnknownName(
        f"no engine {name!r}{did_you_mean(str(name), ENGINES) or '.'} There are {known}.", argument="engine"
    )
