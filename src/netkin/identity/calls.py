"""How a result was asked for: the command that was typed, or the call in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

PLAIN = (bool, int, float, str, type(None))
LONGEST = 200  # characters of one argument
_command: ContextVar[str] = ContextVar("command", default="")


@contextmanager
def commanded(text: str) -> Iterator[None]:
    """Inside the `with`, results say that they were asked for by this command line."""
    token = _command.set(text)
    try:
        yield
    finally:
        _command.reset(token)


def call_text(function: Callable[..., Any], given: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """Return the command that was typed, or else the call of `function` with those arguments that are no defaults.

    Models, data and other objects are told by their types; arguments named in `without` are left out.

    Example:
        >>> def stitched(model, data, how="least_squares", *, seed=0): ...
        >>> call_text(stitched, {"model": object(), "data": [1, 2], "how": "random", "seed": 0})
        "stitched(model=<object>, data=[1, 2], how='random')"
    """
    if _command.get():
        return _command.get()
    known = {name: one for name, one in inspect.signature(function).parameters.items() if name in given}
    told = [name for name in known if name not in without and not _is_default(given[name], known[name].default)]
    return f"{function.__name__}({', '.join(f'{name}={_told(given[name])}' for name in told)})"


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (_is_plain(value) and _is_plain(default) and value == default)


def _told(value: Any) -> str:
    text = f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
    if isinstance(value, Mapping):
        text = f"{{{', '.join(f'{_told(key)}: {_told(one)}' for key, one in value.items())}}}"
    elif isinstance(value, PLAIN):
        text = repr(value)
    elif isinstance(value, (list, tuple)) and not any(map(_is_data, value)):
        text = f"[{', '.join(map(_told, value))}]"
    return text if len(text) <= LONGEST else f"<{type(value).__qualname__}>"


def _is_data(value: Any) -> bool:
    return hasattr(value, "shape") or (isinstance(value, (list, tuple)) and any(map(_is_data, value)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))
