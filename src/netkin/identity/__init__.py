"""Identity: digests of weights, data, settings and functions, and the forms of models.

Results and parts of results carry them, so that a mismatch of weights or data is detected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeVar, cast

from netkin.identity.data import PLAIN, DataDigest, UnorderedDigest
from netkin.identity.form import COMPARE, Form, form_difference, form_of, forms_by_name, state_noted
from netkin.identity.texts import function_digest, settings_digest, source_digest
from netkin.identity.weight_hash import weights_digest
from netkin.progress import as_command, command

__all__ = [
    "COMPARE",
    "DataDigest",
    "Form",
    "UnorderedDigest",
    "described_call",
    "form_difference",
    "form_of",
    "forms_by_name",
    "function_digest",
    "in_words",
    "settings_digest",
    "source_digest",
    "state_noted",
    "weights_digest",
    "with_call",
]
# arguments on which no number depends, and which a call is named without
WITHOUT_EFFECT = ("each", "overwrite", "partial", "progress", "save")
LONGEST = 200  # characters of an argument in the text of a call
Function = TypeVar("Function", bound=Callable[..., Any])


def in_words(value: Any) -> str:
    """Return a setting as readable text that changes with it: functions have their name and their digest.

    Example:
        >>> in_words({"conv": "pool", "fc": [1, None]})
        'conv: pool, fc: [1, None]'
        >>> in_words(lambda x: x + 1).split()[0]
        '<lambda>'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(in_words, value))}]"
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__qualname__', type(value).__qualname__)} {function_digest(value)}"
    return getattr(value, "__qualname__", None) or str(value)


def described_call(name: str, /, **options: Any) -> str:
    """Return the command for which work is done, or the call `name` with its options: what makes the result again.

    Example:
        >>> from torch import nn
        >>> described_call("nk.compress", model=nn.Linear(2, 3), layers=["0"], k=2, test=None)
        "nk.compress(model=Linear, layers=['0'], k=2)"
    """
    arguments = [f"{key}={_shorten(value)}" for key, value in options.items() if value is not None]
    return command() or f"{name}({', '.join(arguments)})"


def with_call(function: Function) -> Function:
    """Let the results of a function name the call that made them, unless a command or another such call is at work."""
    signature = inspect.signature(function)
    names = function.__qualname__.split(".")
    name, is_method = ".".join(names if len(names) > 1 else ["nk", *names]), len(names) > 1

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = {} if command() else dict(signature.bind(*arguments, **keywords).arguments)
        except TypeError:  # the function itself says what is wrong
            bound = {}
        if not bound:
            return function(*arguments, **keywords)
        shown = {key: value for key, value in list(bound.items())[is_method:] if key not in WITHOUT_EFFECT}
        with as_command(described_call(name, **shown)):
            return function(*arguments, **keywords)

    return cast("Function", called)


def _shorten(value: Any) -> str:
    """Return a value as text of up to `LONGEST` characters, objects by their names; no more items are read than fit."""
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_shorten, islice(value, LONGEST)))
        text = f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key!r}: {_shorten(inner)}' for key, inner in islice(value.items(), LONGEST))}}}"
    elif value is None or isinstance(value, PLAIN):
        text = repr(value)
    else:
        named = getattr(value, "name", None)
        return named if isinstance(named, str) else str(getattr(value, "__qualname__", type(value).__name__))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
