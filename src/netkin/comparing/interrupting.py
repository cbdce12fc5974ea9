"""Interrupting: with ``partial=True`` Ctrl-C ends the work early, and what is finished is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interruption:
    """What Ctrl-C does to a comparison: nothing but stop it, or, if `wanted`, end one stage with what it has."""

    def __init__(self, wanted: bool):
        self.wanted = wanted
        self.ended: set[str] = set()  # the stages that were ended early
        self._holding = self._pending = False

    @contextmanager
    def ending(self, stage: str, has_something: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Inside the `with`, an interruption ends `stage` early, if it has something to show by then."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.wanted or self._holding or not has_something():
                raise
            self.ended.add(stage)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Inside the `with`, Ctrl-C waits for the end of what is inside `deferring`; a second one does not."""
        if not self.wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Hold Ctrl-C back inside the `with`, so that no statistic is left half updated."""
        self._holding = True
        yield
        self._holding = False  # stays true after a fault: then what was collected can't be trusted
        if self._pending:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: Any) -> None:
        if not self._holding or self._pending:
            raise KeyboardInterrupt
        self._pending = True
