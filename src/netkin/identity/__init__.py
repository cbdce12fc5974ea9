"""Identity: digests of weights, data, settings and functions, short texts that change with anything in them.

Results and parts of results carry them, so that a mismatch of weights or data is detected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeVar, cast

from torch import nn

from netkin.errors import InvalidValue
from netkin.identity.code import HookParts
from netkin.identity.data import PLAIN, DataDigest, UnorderedDigest
from netkin.identity.objects import Texts, digest_of, weights_digest
from netkin.progress import command, commanded

__all__ = [
    "DataDigest",
    "HookParts",
    "UnorderedDigest",
    "described_call",
    "form_digest",
    "form_of",
    "function_digest",
    "in_words",
    "settings_digest",
    "weights_digest",
    "with_call",
]
# arguments on which no number depends, and which a call is named without
WITHOUT_EFFECT = ("each", "overwrite", "partial", "progress", "save")
LONGEST = 200  # characters of an argument in the text of a call
Function = TypeVar("Function", bound=Callable[..., Any])


def form_digest(model: nn.Module) -> str:
    """Return a text of 24 hex digits that changes with what a model is beside its weights, however often it has run.

    It is that of `form_of` without attributes that the forward code itself changes, such as counters.
    """
    return digest_of(str(sorted(form_of(model, steady=True).items())))


def form_of(model: nn.Module, *, steady: bool = False) -> dict[str, str]:
    """Return what a model is beside its weights and buffers: its modules' kinds, attributes and forward code.

    Modules of installed packages count by their names and attributes. A wrapper of torch does not count, nor does an
    attribute that names a device; nor, with `steady`, one that the forward code itself changes.

    Example:
        >>> form_of(nn.Dropout(0.1)) == form_of(nn.Dropout(0.2))
        False
    """
    return Texts().form(model, steady)


def settings_digest(value: Any, *, strict: bool = True) -> str:
    """Return a text of 24 hex digits that changes with any value in nested settings, but not with a mapping's order.

    Lists and tuples are alike, 1, 1.0 and True are not. Arrays and models count with all their values, functions as
    in `function_digest`; other objects are refused, or, if not `strict`, count with their attributes.

    Example:
        >>> settings_digest({"k": 8, "seed": 0}) == settings_digest({"seed": 0, "k": 8})
        True
    """
    return digest_of(Texts().of(value, "settings", strict))


def in_words(value: Any) -> str:
    """Return a setting as readable text that changes with it: functions have their name and their digest.

    Example:
        >>> in_words({"conv": "pool", "fc": [1, None]})
        'conv: pool, fc: [1, None]'
        >>> in_words(lambda x: x + 1).split()[0]
        '<lambda>'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(in_words, value))}]"
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__qualname__', type(value).__qualname__)} {function_digest(value)}"
    return getattr(value, "__qualname__", None) or str(value)


def function_digest(function: Callable[..., Any]) -> str:
    """Return a text of 24 hex digits that changes with a function's code, as far as it can be inspected.

    Of a function written in Python these count: its code, constants, defaults, the values it closes over and what it
    reads by a global name, functions and classes with their own code; of a method also its object, of a partial its
    arguments, of a callable object its attributes and the code by which it is called. What installed packages define
    counts by its name, docstrings and comments not at all. Another version of Python may give another digest.

    Example:
        >>> function_digest(lambda x: x + 1) == function_digest(lambda x: x + 2)
        False
    """
    if not callable(function):
        raise InvalidValue(f"a function is needed; got {type(function).__name__}.")
    return digest_of(Texts().of(function, "function", False))


def described_call(name: str, /, **options: Any) -> str:
    """Return the command for which work is done, or the call `name` with its options: what makes the result again.

    Example:
        >>> described_call("nk.compress", model=nn.Linear(2, 3), layers=["0"], k=2, test=None)
        "nk.compress(model=Linear, layers=['0'], k=2)"
    """
    arguments = [f"{key}={_in_short(value)}" for key, value in options.items() if value is not None]
    return command() or f"{name}({', '.join(arguments)})"


def with_call(function: Function) -> Function:
    """Let the results of a function name the call that made them, unless a command or another such call is at work."""
    signature = inspect.signature(function)
    names = function.__qualname__.split(".")
    name, is_method = ".".join(names if len(names) > 1 else ["nk", *names]), len(names) > 1

    @functools.wraps(function)
    def called(*given: Any, **keywords: Any) -> Any:
        try:
            bound = {} if command() else dict(signature.bind(*given, **keywords).arguments)
        except TypeError:  # the function itself says what is wrong
            bound = {}
        if not bound:
            return function(*given, **keywords)
        asked = {key: value for key, value in list(bound.items())[is_method:] if key not in WITHOUT_EFFECT}
        with commanded(described_call(name, **asked)):
            return function(*given, **keywords)

    return cast("Function", called)


def _in_short(value: Any) -> str:
    """Return a value as text of up to `LONGEST` characters, objects by their names; no more items are read than fit."""
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_in_short, islice(value, LONGEST)))
        text = f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key!r}: {_in_short(one)}' for key, one in islice(value.items(), LONGEST))}}}"
    elif value is None or isinstance(value, PLAIN):
        text = repr(value)
    else:
        named = getattr(value, "name", None)
        return named if isinstance(named, str) else str(getattr(value, "__qualname__", type(value).__name__))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
