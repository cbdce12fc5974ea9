"""What a claim's numbers depend on, as a digest: its function and all that it reaches in `reproductions`, by source.

Comments, docstrings and spaces do not count, nor does the version of Python; nor, in a table by scale, the other scale.
The laboratory is left out: which of its recipes and data a claim used stands in the record by name.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

from netkin.identity import function_digest
from netkin.results.claim import SCALES

LABORATORY = f"{__package__}.laboratory"
Place = tuple[str, str]  # a module and a name in it


@dataclass(frozen=True)
class Source:
    """A module's lines without comments, what is defined in it, and which of its names come from other modules."""

    lines: list[str]
    defined: dict[str, ast.stmt]
    imported: dict[str, Place]


def code_digest(function: Callable[..., Any], scale: str) -> str:
    """Return a text of 24 hex digits that changes with the code of `function` and of what it reaches at `scale`.

    A function that is not at the top level of a module is known by `netkin.identity.function_digest` alone.
    """
    if not isinstance(function, FunctionType) or function.__name__ not in _defined(function.__module__):
        return function_digest(function)
    found = sorted(_reached((function.__module__, function.__name__), scale).items())
    return blake2b(repr(found).encode(), digest_size=12).hexdigest()


def _reached(start: Place, scale: str) -> dict[str, str]:
    """Return the text of every definition that is reached by name; of a class only the methods that are named."""
    texts: dict[str, str] = {}
    waiting, classes, attributes = [start], list[Place](), set[str]()
    while waiting:
        place = waiting.pop()
        if ".".join(place) in texts:
            continue
        node = _source(place[0]).defined[place[1]]
        if isinstance(node, ast.ClassDef):
            classes.append(place)
        waiting += _take(place, ".".join(place), _own(node, scale), texts, attributes)
        for module, name in classes:
            for method in _methods(_source(module).defined[name]):
                key = f"{module}.{name}.{method.name}"
                if key not in texts and (method.name in attributes or method.name.startswith("__")):
                    waiting += _take((module, name), key, [method], texts, attributes)
    return texts


def _take(place: Place, key: str, nodes: list[ast.AST], texts: dict[str, str], attributes: set[str]) -> list[Place]:
    """Note the text of some nodes of a module and the attributes they name; return the definitions they name."""
    source, found = _source(place[0]), list[Place]()
    texts[key] = "\n".join(_bare(source.lines, node) for node in nodes)
    for node in nodes:
        for part in _parts(node):
            if isinstance(part, ast.Name):
                found += _places(place[0], part.id)
            elif isinstance(part, ast.Attribute):
                attributes.add(part.attr)
                if isinstance(part.value, ast.Name) and part.value.id in source.imported:
                    module, name = source.imported[part.value.id]
                    found += _places(f"{module}.{name}", part.attr)
    return found


def _places(module: str, name: str) -> list[Place]:
    """Return where a name of a module is defined in this package, if it is."""
    if module == LABORATORY or module.partition(".")[0] != __package__:
        return []
    source = _source(module)
    return [(module, name)] if name in source.defined else _places(*source.imported.get(name, ("", "")))


def _own(node: ast.stmt, scale: str) -> list[ast.AST]:
    """Return the parts of a definition that count: a class without its methods, of a table the scale's part."""
    if isinstance(node, ast.ClassDef):
        return [one for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign))]
    value = getattr(node, "value", None)
    if isinstance(value, ast.Dict) and value.keys:
        keys = [getattr(key, "value", None) for key in value.keys]
        if set(keys) <= set(SCALES):
            return [part for key, part in zip(keys, value.values, strict=True) if key == scale]
    return [node]


def _methods(node: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (one for one in getattr(node, "body", []) if isinstance(one, ast.FunctionDef))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it but decorators that file a claim."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Call) and getattr(child.func, "id", "") == "claim"):
            yield from _parts(child)


def _bare(lines: list[str], node: ast.AST) -> str:
    """Return the source of a node without docstrings and spaces."""
    words = [part.body[0] for part in ast.walk(node) if _has_docstring(part)]  # type: ignore[attr-defined]
    left_out = {number for one in words for number in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    if isinstance(node, ast.expr):  # which may share its lines with others
        return ast.unparse(node)
    numbers = range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
    return "".join("".join(lines[number - 1] for number in numbers if number not in left_out).split())


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None


def _defined(module: str) -> dict[str, ast.stmt]:
    return _source(module).defined if module.partition(".")[0] == __package__ else {}


@cache
def _source(module: str) -> Source:
    """Return a module of this package, read; one that is not a file has nothing."""
    file = getattr(sys.modules.get(module), "__file__", None)
    text = Path(file).read_text(encoding="utf-8") if file else ""
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, Place] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {part.id: node for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == __package__:
            imported |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
    return Source(_uncommented(text), defined, imported)


def _uncommented(text: str) -> list[str]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return lines
