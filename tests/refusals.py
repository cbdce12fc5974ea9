"""Refusals: the class of an error and the argument that it names, which is all that tests ask of most of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(kind: type[Exception], argument: str = "") -> Iterator[pytest.ExceptionInfo]:
    """Inside the `with`, an error of exactly this class is raised, which names this argument, or none."""
    with pytest.raises(kind) as refusal:
        yield refusal
    assert (refusal.type, getattr(refusal.value, "argument", None) or "") == (kind, argument)


def refusals(*rows: tuple[Callable[[], Any], type[Exception], str]) -> None:
    """Assert that each call is refused by an error of its class, which names its argument: (call, class, argument)."""
    for call, kind, argument in rows:
        with refused(kind, argument):
            call()
