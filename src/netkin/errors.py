"""The exceptions and warnings of netkin.

NetkinError
├── ShapeError (ValueError)        arrays whose shapes do not fit together
├── InvalidValue (ValueError)        NaN, Inf, complex numbers, parameters out of range
├── NoValue (ValueError)           a measure has no value for this pair: becomes a hole with its reason
├── UnknownName (LookupError)      no measure, layer, model or data set of that name
├── NameClash (ValueError)         two objects have the same name
├── ForwardError (RuntimeError)    a model could not be run, or ran other than expected
├── MemoryLimit (MemoryError)      the work does not fit the memory limit
├── SourceError (ValueError)       a model, data set or package of measures could not be loaded
├── FileError (ValueError)         a netkin file that is damaged, of another kind or of another version
├── MissingExtra (ImportError)     an optional package is needed; the message names the extra
└── WorkerError (RuntimeError)     another process that shares the work has failed

InflatedWarning (UserWarning)      a number is right but easily misread
PackageWarning (UserWarning)       the measures of an installed package could not be loaded
EmptyLayerWarning (UserWarning)    pruning has left no weight in some layers
UnsavedWarning (UserWarning)       a result is complete, and the file it was to be saved in could not be written
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class NetkinError(Exception):
    """The root of every refusal; its text is one clear sentence with the numbers and what to do.

    `argument` names the argument at fault, if one is, and `value` what it was: what shows a refusal in words of its
    own, such as the command line, reads these and not the sentence.
    """

    def __init__(self, sentence: str = "", *, argument: str | None = None, value: Any = None):
        super().__init__(sentence)
        self.argument, self.value = argument, value


class ShapeError(NetkinError, ValueError):
    """Arrays whose shapes do not fit together."""


class InvalidValue(NetkinError, ValueError):
    """NaN, Inf, complex numbers or a parameter out of range."""


class NoValue(NetkinError, ValueError):
    """A measure has no value for this pair."""


class UnknownName(NetkinError, LookupError):
    """No measure, layer, model or data set of that name."""


class NameClash(NetkinError, ValueError):
    """Two objects have the same name."""


class ForwardError(NetkinError, RuntimeError):
    """A model could not be run, or ran other than expected."""


class MemoryLimit(NetkinError, MemoryError):
    """The work does not fit the memory limit."""


class SourceError(NetkinError, ValueError):
    """A model, data set or package of measures could not be loaded."""


class FileError(NetkinError, ValueError):
    """A file of ours that is damaged, of another kind or of another version, or that can not be written."""


class MissingExtra(NetkinError, ImportError):
    """An optional package is needed."""


class WorkerError(NetkinError, RuntimeError):
    """Another process that shares the work has failed; the message is its own."""


class InflatedWarning(UserWarning):
    """A number is right but easily misread."""


class PackageWarning(UserWarning):
    """The measures of an installed package could not be loaded; all others work."""


class EmptyLayerWarning(UserWarning):
    """Pruning has left no weight in some layers."""


class UnsavedWarning(UserWarning):
    """A result is complete, and the file it was to be saved in could not be written, as on a full disk."""


def blame(fault: Exception, model: str | None) -> None:
    """Give a fault the name of the model that it is about, as its attribute `model`."""
    fault.model = model  # type: ignore[attr-defined]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'cka'?"`` for the known name nearest to `name`, or an empty string.

    Example:
        >>> did_you_mean("ckaa", ["cka", "nbs"])
        "; did you mean 'cka'?"
    """

    def nearness(candidate: str) -> tuple[bool, float, float, str]:
        begun = len(name) > 2 and candidate.lower().startswith(name.lower())
        return begun, _likeness(name.lower(), candidate.lower()), _likeness(name, candidate), candidate

    near = max(known, key=nearness, default="")
    begun, likeness, *_ = nearness(near)
    return f"; did you mean {near!r}?" if near and (begun or likeness >= 0.6) else ""


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()


def require_listed(what: str, name: Any, known: Iterable[Any], argument: str = "") -> None:
    """Refuse a name that is none of those known, such as that of an optimizer, by the argument `what` or another."""
    names = list(known)
    if name not in names:
        hint = did_you_mean(str(name), map(str, names)) or "."
        raise UnknownName(
            f"no {what} named {name!r}{hint} There are {', '.join(map(str, names))}.",
            argument=argument or what,
            value=name,
        )


def require_at_least(least: int, most: int | None = None, /, **values: Any) -> None:
    """Refuse values, given by their names, that are no whole numbers of `least` or more, and up to `most` if given."""
    for name, value in values.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or int(value) < least or (most is not None and value > most):
            range_ = f"of {least} or more" if most is None else f"from {least} to {most:,}"
            raise InvalidValue(f"`{name}` must be a whole number {range_}; got {value!r}.", argument=name, value=value)


def require_utf8(names: Iterable[Any], instead: str = "") -> None:
    """Refuse names that have no form in UTF-8, with which a result could be neither saved nor drawn."""
    for name in names:
        try:
            str(name).encode("utf-8")
        except UnicodeEncodeError as fault:
            raise InvalidValue(f"a name must be text in UTF-8; got {name!r}{instead}.") from fault


def outside() -> int:
    """Return the `stacklevel` by which a warning shows the line of the caller outside netkin."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "netkin":
        frame, level = frame.f_back, level + 1
    return level


def import_optional(module: str, extra: str, what: str) -> Any:
    """Return a module of an optional package, or refuse with the name of the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingExtra(f"{what} needs {module!r} ({fault}); `pip install 'netkin[{extra}]'` brings it.") from fault
