"""Progress of long work: a bar in a terminal, calls of a function, or nothing.

Every long call takes ``progress=``: None shows a bar where stderr is a terminal, False shows nothing, and a function is
called as ``progress(done, total, what)``; it may raise to end the work. With ``partial=True`` Ctrl-C ends a call early,
and what is finished is kept (`Interruption`).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from netkin.errors import InvalidValue

ProgressOption = Literal[False] | Callable[[int, int | None, str], object] | None
Item = TypeVar("Item")

PAUSE = 0.1  # seconds between two calls of a function
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"  # never seconds a unit
DELAY = 2  # seconds before a bar is shown
_chosen: ContextVar[ProgressOption] = ContextVar("progress", default=None)
_functions: ContextVar[tuple[Callable[..., object], ...]] = ContextVar("progress functions", default=())
_subject: ContextVar[str] = ContextVar("subject", default="")
_whole: ContextVar[tuple[str, str, Report] | None] = ContextVar("whole", default=None)
_command: ContextVar[str] = ContextVar("command", default="")


@contextmanager
def showing(progress: ProgressOption) -> Iterator[None]:
    """Inside the `with`, `progress` is the default of all calls; None changes nothing.

    With it a long call passes its `progress` on to all that it calls.
    """
    if not (progress is None or progress is False or callable(progress)):
        raise InvalidValue(
            "`progress` is None (a bar in a terminal), False (nothing) or a function of (done, total, what); got "
            f"{progress!r}.",
            argument="progress",
        )
    token = _chosen.set(_chosen.get() if progress is None else progress)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def also_calling(function: Callable[..., object]) -> Iterator[None]:
    """Inside the `with`, `function` is called with all progress and its `unit` as well, however that is shown."""
    token = _functions.set((*_functions.get(), function))
    try:
        yield
    finally:
        _functions.reset(token)


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Inside the `with`, all progress names what it is about, as the network that is trained: "training (convnet)"."""
    token = _subject.set(subject)
    try:
        yield
    finally:
        _subject.reset(token)


@contextmanager
def together(total: int | None, what: str, unit: str, *, done: int = 0) -> Iterator[None]:
    """Inside the `with`, progress of that name and unit, which comes in parts, is counted as one up to `total`.

    Without a total each part is counted by itself.
    """
    if total is None:
        yield
        return
    with reporting(total, what, unit, done=done) as report:
        token = _whole.set((what, unit, report))
        try:
            yield
        finally:
            _whole.reset(token)


@contextmanager
def reporting(
    total: int | None, what: str, unit: str, progress: ProgressOption = None, *, done: int = 0
) -> Iterator[Report]:
    """Give an object whose `update(n)` reports that n more are done; a function is also called at the end.

    Args:
        total: How many there will be, None where that is not known.
        what: What is being done, as "reading".
        unit: What is counted, as "examples".
        progress: None, False or a function; None is what `showing` chose around it.
        done: How many were done before.
    """
    whole = _whole.get()
    if whole is not None and whole[:2] == (what, unit):
        yield whole[2]
        return
    with showing(progress):
        chosen = _chosen.get()
    what = f"{what} ({_subject.get()})" if _subject.get() else what
    others = [_Calls(partial(function, unit=unit), total, what, done).add for function in _functions.get()]
    if callable(chosen):
        calls = _Calls(chosen, total, what, done)
        yield Report([calls.add, *others])
        calls.finish()
    else:
        hidden = chosen is False or not sys.stderr.isatty()
        shown = {"bar_format": BAR} if total else {}
        with tqdm(
            total=total, desc=what, unit=f" {unit}", initial=done, delay=DELAY, leave=False, disable=hidden, **shown
        ) as bar:
            yield Report([bar.update, *others])


@contextmanager
def announce(what: str) -> Iterator[None]:
    """Inside the `with`, show what is being waited for, where progress is shown; a function gets it with 0 done."""
    chosen = _chosen.get()
    if callable(chosen):
        chosen(0, None, what)
    hidden = callable(chosen) or chosen is False or not sys.stderr.isatty()
    with tqdm(desc=what, bar_format="{desc} ...", leave=False, disable=hidden):
        yield


def with_progress(
    items: Iterable[Item], what: str, unit: str, progress: ProgressOption = None, *, total: int | None = None
) -> Iterator[Item]:
    """Yield the items, and report each when the next is requested.

    Args:
        items: What is gone through.
        what: What is being done, as "reading".
        unit: What is counted, as "examples".
        progress: None, False or a function; None is what `showing` chose around it.
        total: How many there are, where `items` has no length.
    """
    count = len(items) if total is None and isinstance(items, Sized) else total
    with reporting(count, what, unit, progress) as report:
        for item in items:
            yield item
            report.update()


class Report:
    """The receiver of progress updates, which it forwards."""

    def __init__(self, receivers: Sequence[Callable[[int], object]]):
        self._receivers = receivers

    def update(self, count: int = 1) -> None:
        """Report that so many more are done."""
        for receive in self._receivers:
            receive(count)


class _Calls:
    """Calls a function, ten times a second at most, and once more at the end if that was not reported."""

    def __init__(self, function: Callable[[int, int | None, str], object], total: int | None, what: str, done: int):
        self._function, self._total, self._what, self._done = function, total, what, done
        self._last, self._at = -1, monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if monotonic() - self._at >= PAUSE:
            self._tell()

    def finish(self) -> None:
        if self._last != self._done:
            self._tell()

    def _tell(self) -> None:
        self._last, self._at = self._done, monotonic()
        self._function(self._done, self._total, self._what)


@contextmanager
def as_command(text: str) -> Iterator[None]:
    """Inside the `with`, the work is done for that command, which results then name as their origin."""
    token = _command.set(text)
    try:
        yield
    finally:
        _command.reset(token)


def command() -> str:
    """Return the command for which the work is done; empty where there is none."""
    return _command.get()


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
