"""How a measure is written as text, ``"svcca(variance=0.95)"``: its name, and parameters of the right types."""

from __future__ import annotations

import ast
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from netkin.errors import InvalidValue, UnknownName


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters that a text such as ``"svcca(variance=0.95)"`` gives."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        node = ast.Constant(None)
    if isinstance(node, ast.Name):
        return node.id, {}
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and not node.args
        and all(k.arg for k in node.keywords)
    ):
        names = [str(k.arg) for k in node.keywords]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise UnknownName(f"{spec!r} gives the parameter {twice!r} twice.")
        return node.func.id, {str(k.arg): _literal(spec, k.value) for k in node.keywords}
    raise UnknownName(f"{spec!r} is no measure; write a name, or a name with parameters as in 'svcca(variance=0.95)'.")


def _literal(spec: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):  # a bare word is a string: cka_minibatch(kernel=rbf)
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise UnknownName(f"{spec!r}: the value of a parameter must be a number or a word.") from None


def typed(key: str, value: Any, default: Any, annotation: Any) -> Any:
    """Return `value` in the type of the parameter, so that 1 and 1.0 are one id.

    The type is that of the annotation, or of the default where there is no annotation that names classes; a parameter
    that is None by default and not annotated takes anything.
    """
    classes = _classes(annotation) or (() if default is None else (type(default),))
    if not classes or type(value) in classes:
        return value
    if float in classes and type(value) is int and abs(value) < 2**1000:
        return float(value)
    names = " or ".join("None" if one is type(None) else one.__name__ for one in classes)
    raise InvalidValue(f"`{key}` must be of type {names}, like its default {default!r}; got {value!r}.")


def _classes(annotation: Any) -> tuple[type, ...]:
    """Return the plain classes that an annotation allows, or none if it says something else."""
    if annotation in (inspect.Parameter.empty, Any, object):
        return ()
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    plain = all(isinstance(part, type) and typing.get_origin(part) is None for part in parts)
    return parts if plain else ()


@functools.cache
def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword parameters of a function with their default values."""
    return {p.name: p.default for p in keywords_of(function)}


@functools.cache
def keywords_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the keyword parameters of a function, with their annotations as types."""
    hints = typing.get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return tuple(p.replace(annotation=hints.get(p.name, p.empty)) for p in parameters)
