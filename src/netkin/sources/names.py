"""Specifications as text: `NAME,option=value,...` and `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from netkin.errors import SourceError, UnknownName, ValueFault, did_you_mean


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


def find_function(spec: str, known: Iterable[str] = ()) -> Callable[[], Any]:
    """Return the function that `spec` names; `known` are the words before a colon that mean something else to us."""
    module_name, _, name = spec.partition(":")
    with current_directory_importable():
        module = _module(module_name, spec, list(known))
    found = getattr(module, name, None)
    if found is None:
        near = did_you_mean(name, [each for each in vars(module) if not each.startswith("_")])
        raise SourceError(f"module {module_name!r} has no function {name!r}{near or '.'}")
    if not callable(found):
        raise SourceError(f"{spec!r} must be a function without arguments; it is of type {type(found).__name__}.")
    return found


def call(function: Callable[[], Any], spec: str) -> Any:
    """Return what `function` returns; what it raises becomes one sentence that names `spec`."""
    try:
        with current_directory_importable():
            return function()
    except (Exception, SystemExit) as error:
        raise SourceError(f"{spec!r} was called without arguments and raised {in_short(error)}") from error


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Let modules of the current directory be imported inside the `with`."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if directory in sys.path:
            sys.path.remove(directory)


def _module(name: str, spec: str, known: list[str]) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise SourceError(_not_found(name, spec, known))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise SourceError(_not_found(name, spec, known)) from error
        raise SourceError(f"module {name!r} of {spec!r} could not be imported: {in_short(error)}") from error


def _not_found(name: str, spec: str, known: list[str]) -> str:
    near = did_you_mean(name, known)
    advice = near or "; run netkin in the folder that holds it, or install its package."
    return f"found no module {name!r} for {spec!r}{advice}"


def in_short(error: BaseException) -> str:
    """Return an error's type and the first line of its message as the end of a sentence."""
    lines = str(error).strip().splitlines()
    sentence = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
