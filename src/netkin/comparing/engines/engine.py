"""The interface of engines; each call of `compare`, `collect` or `compare_many` has its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from netkin.comparing.request import Request
    from netkin.comparing.study import Statistics
    from netkin.results import Comparison

Result = TypeVar("Result", bound="Statistics | list[Comparison]")


class Engine(ABC):
    """Who does the work of a call."""

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
    """Who runs the pass: this process alone, or several, of which each reads its part of the data."""

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
    def attend(self) -> None:
        """Before each batch: hear whether another process has failed."""

    @abstractmethod
    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        """Return a context in which the first batch is folded in, all processes by the same shifts and scales."""

    @abstractmethod
    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        """Return the statistics of all processes, of which this one had `length` examples to read."""

    @abstractmethod
    def shared(self, make: Callable[[], Result]) -> Result:
        """Return what `make` returns, which is called in one process only and given to all."""
