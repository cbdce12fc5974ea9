"""Options after a name: `NAME,option=value,...`, as in `char_lstm,vocabulary=80` or `images,size=64`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from netkin.errors import UnknownName, ValueFault, did_you_mean


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of `text`.

    Example:
        >>> split_options("images,size=64")
        ('images', {'size': '64'})
    """
    name, *rest = text.split(",")
    pairs = [part.partition("=") for part in rest]
    for option, equals, value in pairs:
        if not (option and equals and value):
            raise ValueFault(f"{option!r} in {text!r} is no option; write NAME,option=value.")
    return name, {option: value for option, _, value in pairs}


def fitted(function: Callable[..., Any], options: Mapping[str, Any], name: str, skip: int = 0) -> dict[str, Any]:
    """Return `options` as the keywords of `function`: whole numbers where its defaults are such, text elsewhere.

    Its first `skip` parameters are no options; a parameter whose name begins with an underscore is none either.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    known = {one.name: one.default for one in parameters if not one.name.startswith("_")}
    return {option: _value(option, value, known, name) for option, value in options.items()}


def _value(option: str, value: Any, known: Mapping[str, Any], name: str) -> Any:
    if option not in known:
        have = f" It has {', '.join(known)}." if known else " It has none."
        raise UnknownName(f"{name!r} has no option {option!r}{did_you_mean(option, known) or '.'}{have}")
    if not isinstance(known[option], int):
        return value
    if not str(value).isdecimal() or not 0 < int(value) < 2**31:
        raise ValueFault(f"option {option!r} of {name!r} must be a whole number from 1; got {value!r}.")
    return int(value)
