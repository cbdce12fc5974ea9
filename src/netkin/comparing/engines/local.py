"""The default engine: this process reads all data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from netkin.comparing.engines.engine import PassEngine, Result

if TYPE_CHECKING:
    from netkin.comparing.request import Request
    from netkin.comparing.study import Statistics


class Local(PassEngine):
    """One process."""

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepared(self, request: Request, settings: dict[str, str]) -> AbstractContextManager[None]:
        return nullcontext()

    def least(self, number: int) -> int:
        return number

    def attend(self) -> None:
        return None

    def opening(self, statistics: Statistics) -> AbstractContextManager[None]:
        return nullcontext()

    def joined(self, statistics: Statistics, length: int | None) -> Statistics:
        return statistics

    def shared(self, make: Callable[[], Result]) -> Result:
        return make()
