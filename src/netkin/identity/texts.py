"""Texts of values and functions that change with anything in them: what digests and forms are made of.

Plain values and arrays count with all they hold, functions with their source; what is neither counts by its kind, and
is named as unknown. Nothing is searched for what it may refer to.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.errors import InvalidValue
from netkin.identity.data import PLAIN, tensor_of
from netkin.identity.weight_hash import weights_digest

IN_FULL = (type(None), torch.dtype, torch.device, slice, range, PurePath, type(...))  # whose repr is complete
DEEPEST = 40  # values inside each other; a deeper one is unknown


def digest_of(text: str) -> str:
    """Return 24 hex digits for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def settings_digest(value: Any, *, strict: bool = True) -> str:
    """Return a text of 24 hex digits that changes with any value in nested settings, but not with a mapping's order.

    Lists and tuples are alike, 1, 1.0 and True are not. Arrays and models count with all their values, functions as
    in `function_digest`; other objects are refused, or, if not `strict`, count by their kind.

    Example:
        >>> settings_digest({"k": 8, "seed": 0}) == settings_digest({"seed": 0, "k": 8})
        True
    """
    unknown: list[str] = []
    text = text_of(value, "settings", unknown)
    unknown = [place for place in unknown if "()" not in place]  # what functions hold is not refused
    if strict and unknown:
        raise InvalidValue(
            f"`{unknown[0]}` has no digest; use numbers, texts, lists, mappings, arrays or functions.",
            argument=unknown[0],
        )
    return digest_of(text)


def function_digest(function: Callable[..., Any]) -> str:
    """Return a text of 24 hex digits that changes with a function: its name, source, defaults and the values it holds.

    These are values that it closes over, arguments of a partial, and attributes of the object whose method it is, as
    far as they are plain values, arrays or functions; a model counts where it is itself the function. Comments in the
    source count. What it reads by a global name does not, nor does the source of torch; a function without a source
    (written in C, or typed into an interpreter) is known by its name. Python 3.10 can't tell several lambdas in one
    line apart.

    Example:
        >>> import math
        >>> function_digest(math.sin) == function_digest(math.cos)
        False
    """
    if not callable(function):
        raise InvalidValue(f"a function is needed; got {type(function).__name__}.", argument="function", value=function)
    return digest_of(text_of(function, "function", []))


def source_digest(function: Any) -> str:
    """Return a digest of the source of a function, or of an object's class, whatever values it holds."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return digest_of(source_of(function) if hasattr(function, "__qualname__") else class_text(type(function), "", []))


class Unknown(Exception):
    """A value is neither plain nor an array nor a function."""


def text_of(value: Any, place: str, unknown: list[str], within: tuple[Any, ...] = (), *, deep: bool = True) -> str:
    """Return a text that changes with anything in a value.

    Args:
        value: Any value.
        place: What it is called.
        unknown: Grows by the places of what counts by its kind alone.
        within: All that the value lies in.
        deep: Whether models and objects count with what they hold; else the first of them raises `Unknown`.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Enum):
        return f"{qualified(type(value))}.{value.name}"
    if isinstance(value, (*PLAIN, *IN_FULL)):
        return repr(value)
    if any(value is outer for outer in within) or len(within) > DEEPEST:
        return "itself"
    text = functools.partial(text_of, unknown=unknown, within=(*within, value), deep=deep)
    if isinstance(value, Mapping):
        pairs = sorted((text(key, place), text(value[key], f"{place}[{key!r}]")) for key in value)
        return f"{{{', '.join(f'{key}: {inner}' for key, inner in pairs)}}}"
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return f"[{', '.join(text(inner, f'{place}[{number}]') for number, inner in enumerate(value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(text(inner, place) for inner in value)}"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"array {weights_digest({'': value if isinstance(value, Tensor) else tensor_of(value, place)})}"
    if hasattr(value, "__qualname__") or isinstance(value, functools.partial):
        return callable_text(value, place, unknown, within)
    if not deep:
        raise Unknown
    if isinstance(value, nn.Module):
        from netkin.identity.form import form_of  # which reads the attributes of models by this function

        return f"model {weights_digest(value)} {form_of(value).digest}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{qualified(type(value))} {text(fields, place)}"
    if callable(value):
        return callable_text(value, place, unknown, within)
    unknown.append(place)
    return qualified(type(value))


def callable_text(value: Any, place: str, unknown: list[str], within: tuple[Any, ...] = ()) -> str:
    """Return the text of a function, a class, or an object that can be called: its source, and the values it holds.

    Of these, models and objects count by their kind; the function is then among the unknown, with brackets.
    """
    held: Mapping[str, Any] = {}
    if isinstance(value, functools.partial):
        name = callable_text(value.func, place, unknown, within)
        held = {"arguments": value.args, **value.keywords}
    elif isinstance(value, MethodType):
        name = f"{qualified(type(value.__self__))} {callable_text(value.__func__, place, unknown, within)}"
        held = {} if isinstance(value.__self__, (nn.Module, type)) else getattr(value.__self__, "__dict__", {})
    elif isinstance(value, FunctionType):
        name = source_of(value)
        unknown += [] if has_source(value) else [f"{place}()"]
        held = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__, **_closed_over(value)}
    elif isinstance(value, type):
        name = class_text(value, place, unknown)
    elif hasattr(value, "__qualname__"):
        name, owner = qualified(value), getattr(value, "__self__", None)
        held = {"self": owner} if isinstance(owner, (str, bytes, list, tuple, dict)) else {}  # as `"a".upper`
    else:
        name, held = class_text(type(value), place, unknown), getattr(value, "__dict__", {})
    texts = {}
    for key, inner in sorted(held.items()):
        try:
            texts[key] = text_of(inner, f"{place}()", unknown, (*within, value), deep=False)
        except Unknown:
            texts[key] = qualified(type(inner))
            unknown.append(f"{place}()")
    return f"{name} {texts}"


def class_text(kind: type, place: str, unknown: list[str]) -> str:
    """Return a class by its name, and by the source of its methods and its plain values, inherited ones too.

    Methods without a source are added to `unknown`. Classes of torch and of Python itself are known by their names.
    """
    parts = []
    for base in kind.__mro__:
        if is_of_torch(base.__module__) or base.__module__ == "builtins":
            continue
        for name, member in vars(base).items():
            functions = [getattr(member, part, None) for part in ("__func__", "fget", "fset", "func")]
            functions = [function for function in (member, *functions) if isinstance(function, FunctionType)]
            for function in functions:
                parts.append(f"{name} {source_of(function)}")
                if not (has_source(function) or name.startswith("__")):
                    unknown.append(f"{place}.{name}()".lstrip("."))
            if not (functions or isinstance(member, type) or name.startswith("__")):
                with suppress(Unknown):
                    parts.append(f"{name} {text_of(member, name, [], deep=False)}")
    return f"{qualified(kind)} {digest_of(str(sorted(parts)))}" if parts else qualified(kind)


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function closes over, by name, as far as they are there yet."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is assigned later
            values[name] = cell.cell_contents
    return values


def qualified(named: Any) -> str:
    """Return the module and the name of a class or function."""
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def is_of_torch(module: str | None) -> bool:
    """Return whether a module belongs to torch, whose functions and classes are known by their names."""
    return (module or "").partition(".")[0] == "torch"


# --- sources ----------------------------------------------------------------------------------------------------------

# as reading a file takes longer than digesting a small network; equal code in two files may have other comments
_sources: dict[tuple[CodeType, str], str] = {}


def source_of(function: Any) -> str:
    """Return the name and the source of a function; the name alone of one that torch defines or that has no source."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or is_of_torch(function.__module__):
        return qualified(function)
    if (key := (code, code.co_filename)) not in _sources:
        _sources[key] = _read_source(function, code)
    return f"{qualified(function)} {_sources[key]}"


def has_source(function: Any) -> bool:
    """Return whether a function of Python is known by more than its name, or by that of torch."""
    function = inspect.unwrap(function)
    return source_of(function) != f"{qualified(function)} "


def _read_source(function: Any, code: CodeType) -> str:
    if code.co_filename == "<string>":  # from Python 3.13 on these are taken for lines of `python -c`
        return ""
    try:
        lines, start = inspect.findsource(function)
        if code.co_name == "<lambda>":
            return _source_of_lambda("".join(lines), code)
        return textwrap.dedent("".join(inspect.getblock(lines[start:]))).strip()
    except (OSError, TypeError, SyntaxError, IndexError, tokenize.TokenError):
        return ""


def _source_of_lambda(text: str, code: CodeType) -> str:
    """Return the source of a lambda without the statement around it; of all on its line if it can't be told which."""
    lambdas = [node for node in _lambdas(text) if node.lineno == code.co_firstlineno]
    if len(lambdas) > 1 and hasattr(code, "co_positions"):  # from Python 3.11 on
        places = {(line, column, last, end) for line, last, column, end in code.co_positions()}
        bodies = [(node, node.body) for node in lambdas]
        lambdas = [
            node
            for node, body in bodies
            if (body.lineno, body.col_offset, body.end_lineno, body.end_col_offset) in places
        ] or lambdas
    return "\n".join(ast.get_source_segment(text, node) or "" for node in lambdas)


@functools.lru_cache(maxsize=8)
def _lambdas(text: str) -> list[ast.Lambda]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
