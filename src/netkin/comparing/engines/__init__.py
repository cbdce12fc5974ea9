"""Engines that run a pass over the data: their interface, the default one, and how they are found by name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from netkin.errors import UnknownName, did_you_mean

if TYPE_CHECKING:
    from netkin.comparing.pass_statistics import Statistics
    from netkin.comparing.request import Request
    from netkin.results import Comparison

__all__ = ["ENGINES", "Engine", "Local", "PassEngine", "Result", "named_engine"]

ENGINES = ("local", "distributed", "ray")
Result = TypeVar("Result", bound="Statistics | list[Comparison]")


class Engine(ABC):
    """What does the work of a call of `compare`, `collect` or `compare_many`; each call has its own."""

    @abstractmethod
    def working(self) -> AbstractContextManager[None]:
        """Return a context for a whole call; where several processes make it, a fault of one ends all."""

    def beside(self, result: str | os.PathLike[str], overwrite: bool) -> Engine:
        """Return an engine that keeps finished parts beside a result, where it has a job of its own."""
        return self

    @abstractmethod
    def request(self, *given: Any) -> Any:
        """Return the call, with what was given to `Request`."""


class PassEngine(Engine):
    """An engine that runs the pass in this process alone, or in several, of which each reads its part of the data."""

    part: tuple[int, int] | None = None  # which part of the data this process reads; None for all of them

    def request(self, *given: Any) -> Request:
        from netkin.comparing.request import Request  # which knows engines

        return partial(Request, engine=self)(*given)

    @abstractmethod
    def prepared(self, request: Request, settings: dict[str, str]) -> AbstractContextManager[None]:
        """Return a context for the pass; processes that were called with other settings are refused."""

    @abstractmethod
    def least(self, number: int) -> int:
        """Return the minimum over the processes, so that all make the same plan."""

    @abstractmethod
    def check_others(self) -> None:
        """Raise the fault of another process, if one has failed; called before each batch."""

    @abstractmethod
    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        """Return a context in which the first batch is folded in, all processes by the same shifts and scales."""

    @abstractmethod
    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        """Return the statistics of all processes, of which this one had `length` examples to read."""

    @abstractmethod
    def shared(self, make: Callable[[], Result]) -> Result:
        """Return what `make` returns, which is called in one process only and given to all."""


class Local(PassEngine):
    """This process reads all data."""

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepared(self, request: Request, settings: dict[str, str]) -> AbstractContextManager[None]:
        return nullcontext()

    def least(self, number: int) -> int:
        return number

    def check_others(self) -> None:
        return None

    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        return nullcontext()

    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        return statistics

    def shared(self, make: Callable[[], Result]) -> Result:
        return make()


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
    raise UnknownName(f"no engine {name!r}{did_you_mean(str(name), ENGINES) or '.'} There are {known}.")
