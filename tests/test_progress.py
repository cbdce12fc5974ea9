"""Progress: a bar in a terminal, calls of a function, or nothing."""

import io
import sys

import pytest
from tqdm import tqdm

from netkin import progress
from netkin.errors import InvalidValue
from netkin.progress import reporting, showing, with_progress
from refusals import refused


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand: `clock.now`."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(progress, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def calls():
    """A list of calls, and the function `calls.note` that they are calls of."""

    class Calls(list):
        def note(self, done, total, what):
            self.append((done, total, what))

    return Calls()


@pytest.fixture
def shown_on(monkeypatch):
    """Return a function that makes a stream stderr, on which bars are shown at once."""

    def put(stream):  # by the test itself: pytest changes stderr between a fixture and its test
        monkeypatch.setattr(progress, "DELAY", 0)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return put


def test_a_function_is_called_ten_times_a_second_and_at_the_end(clock, calls):
    with reporting(1000, "reading", "examples", calls.note) as report:
        for _ in range(100):
            clock.now += 0.03
            report.update(10)
    # every fourth step of 0.03 s is the first after 0.1 s
    assert calls == [(40 * k, 1000, "reading") for k in range(1, 26)]
    calls.clear()
    with reporting(None, "reading", "examples", calls.note, done=5) as report:
        report.update()
        report.update(3)
    assert calls == [(9, None, "reading")]


def test_work_in_parts_is_counted_together(calls, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0)
    with progress.showing(calls.note), progress.together(6, "reading", "examples", done=1):
        for size in (2, 3):
            with reporting(size, "reading", "examples") as report:
                report.update(size)
            with reporting(1, "measuring", "pairs") as report:
                report.update()
    assert calls == [(3, 6, "reading"), (1, 1, "measuring"), (6, 6, "reading"), (1, 1, "measuring")]


def test_work_that_ends_early_has_no_end_to_tell(calls):
    def stop():
        with reporting(3, "reading", "examples", calls.note) as report:
            report.update()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert calls == []


def test_a_function_may_end_the_work(clock):
    def end(done, total, what):
        raise KeyboardInterrupt(f"{what}: {done} of {total}")

    def work():
        for _ in with_progress(range(9), "reading", "examples", end):
            clock.now += 1

    with pytest.raises(KeyboardInterrupt, match="reading: 1 of 9"):
        work()


def test_items_are_counted_as_they_pass(clock, calls):
    for _ in with_progress(["a", "b"], "measuring", "pairs", calls.note):
        clock.now += 1
    assert calls == [(1, 2, "measuring"), (2, 2, "measuring")]
    calls.clear()
    assert list(with_progress(iter("abc"), "measuring", "pairs", calls.note, total=7)) == ["a", "b", "c"]
    assert list(with_progress(iter(""), "measuring", "pairs", calls.note)) == []
    assert calls == [(3, 7, "measuring"), (0, None, "measuring")]


def test_a_terminal_shows_a_bar(shown_on):
    terminal = shown_on(Terminal())
    assert list(with_progress(range(3), "measuring", "pairs")) == [0, 1, 2]
    assert "measuring" in terminal.getvalue()
    assert "/3 [" in terminal.getvalue()
    assert "pairs" in terminal.getvalue()


def test_slow_work_is_told_in_units_a_second():
    assert "3/4 [01:00<00:20,  0.05 steps/s]" in tqdm.format_meter(3, 4, 60.0, bar_format=progress.BAR, unit=" steps")


def test_nothing_is_shown_where_it_is_not_wanted(shown_on):
    terminal = shown_on(Terminal())
    list(with_progress(range(3), "measuring", "pairs", False))
    with showing(False):
        list(with_progress(range(3), "measuring", "pairs"))
        with showing(None):
            list(with_progress(range(3), "measuring", "pairs"))
    assert terminal.getvalue() == ""
    list(with_progress(range(3), "measuring", "pairs"))
    assert terminal.getvalue() != ""


def test_a_file_gets_no_bar(shown_on):
    file = shown_on(io.StringIO())
    assert list(with_progress(range(3), "measuring", "pairs")) == [0, 1, 2]
    assert file.getvalue() == ""


def test_a_long_call_hands_its_choice_on(calls):
    with showing(calls.note):
        list(with_progress("ab", "inner", "pairs"))
        list(with_progress("abc", "quiet", "pairs", False))
    assert calls == [(2, 2, "inner")]


@pytest.mark.parametrize("odd", [True, 3, "yes"])
def test_what_is_no_progress_is_refused(odd):
    with refused(InvalidValue, "progress"):
        list(with_progress("ab", "inner", "pairs", odd))


def test_progress_names_what_it_is_about(calls):
    with showing(calls.note), progress.about("convnet"):
        list(with_progress("ab", "training", "steps"))
        with progress.about("resnet"):
            list(with_progress("ab", "training", "steps"))
    assert calls == [(2, 2, "training (convnet)"), (2, 2, "training (resnet)")]


def test_what_is_waited_for_is_announced(shown_on, calls):
    with progress.showing(calls.note), progress.announce("starting Ray"):
        assert calls == [(0, None, "starting Ray")]
    terminal = shown_on(Terminal())
    with progress.announce("starting Ray"):
        assert "starting Ray ..." in terminal.getvalue()
    with progress.showing(False), progress.announce("in silence"):
        assert "silence" not in terminal.getvalue()
