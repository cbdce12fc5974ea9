"""What a claim's numbers depend on, as a digest: its function and all that it reaches in `reproductions`, by syntax.

Comments, docstrings, type hints and formatting do not count, nor does the version of Python; nor, in a table by scale,
the other scale. Of a class all methods count, since frameworks call some by themselves, as `forward`; of the laboratory
and of measured numbers those that are named. Of netkin only the functions that decide on verdicts count: for the others
a record names the version.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from netkin.identity import function_digest
from netkin.results.claim import SCALES

Place = tuple[str, str]  # a module and a name in it; methods that count one by one are called "Class.method"
LABORATORY = f"{__package__}.laboratory"
LAB = (LABORATORY, "Lab")
MEASURED = ("netkin.results.claim", "Measured")
DECISIONS = {  # what of netkin turns numbers into verdicts
    MEASURED,
    ("netkin.results.values", "student_quantile"),
    *(("netkin.results.verdicts", name) for name in ("Joined", "decisions", "keeping_conditions", "keeping_parts")),
}
LEFT_OUT = {  # what changes no number: modules, definitions and methods
    # progress, notes of what was read, finished parts of killed claims, and a claim's words, which its record holds
    *(f"{__package__}.{name}" for name in ("digests", "running", "keeping", "claims.claim")),
    f"{__package__}.image_sets.labelled_digest",
    *(f"{__package__}.image_sets.Images.{name}" for name in ("words", "digests")),
    # recipes, of which a record holds those that it used, in words
    *(f"{__package__}.recipes.{name}" for name in ("RECIPES", "Network", "architecture_digest", "recipe_words")),
    # where tasks are done, which of them are done already, and the files of trained networks
    *(f"{LABORATORY}.Lab.{name}" for name in ("over", "_spread", "_counting", "_workers", "identity", "_setting")),
    *(f"{LABORATORY}.{name}" for name in ("Lab._place", "Lab._read", "keep_weights")),
}
COUNT_INSTEAD = {(LABORATORY, "Lab.over"): (LABORATORY, "task_seed")}  # all that the numbers of a task have from it
UNSEEN = {  # type hints; `ctx`, which follows from the place; and `kind`, the u of u"text"
    "annotation", "returns", "type_comment", "type_params", "ctx", "kind",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A module: the statements that define each of its names, and which names come from other modules."""

    defined: dict[str, list[ast.stmt]]
    imported: dict[str, Place]


def code_digest(function: Callable[..., Any], scale: str) -> str:
    """Return a text of 24 hex digits that changes with the code of `function` and of what it reaches at `scale`.

    A function that is not at the top level of a module is known by `netkin.identity.function_digest` alone.
    """
    start = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if not isinstance(function, FunctionType) or not _counts(start):
        return function_digest(function)
    return digest_of(reached_code(start, scale))


def digest_of(texts: dict[Place, str]) -> str:
    """Return the digest of definitions, in whichever modules they stand."""
    found = sorted((name, text) for (_, name), text in texts.items())
    return blake2b(repr(found).encode(), digest_size=12).hexdigest()


def reached_code(start: Place, scale: str) -> dict[Place, str]:
    """Return the text of a definition and of every other one that is reached from it by name."""
    texts: dict[Place, str] = {}
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place not in texts:
            texts[place], names = _definition(place, scale)
            waiting += names
    return texts


@cache
def _definition(place: Place, scale: str) -> tuple[str, list[Place]]:
    """Return the text of a definition as it counts at a scale, and the definitions that it names."""
    module = place[0]
    nodes = [part for node in _source(module).defined[place[1]] for part in _of_scale(node, scale)]
    named = [one for node in nodes for part in _parts(module, node) for one in _places(place, part)]
    found = dict.fromkeys(COUNT_INSTEAD.get(one, one) for one in named)
    return "\n".join(_text(module, node) for node in nodes), [one for one in found if _counts(one)]


def _of_scale(node: ast.stmt, scale: str) -> list[ast.AST]:
    """Return a statement, or of a table by scale the scale's part."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Dict) and value.keys:
        keys = [getattr(key, "value", None) for key in value.keys]
        if set(keys) <= set(SCALES):
            return [part for key, part in zip(keys, value.values, strict=True) if key == scale]
    return [node]


def _places(user: Place, node: ast.AST) -> list[Place]:
    """Return what a node of a definition may name: a name, an attribute of a module, or a method."""
    if isinstance(node, ast.Name):
        return [_home(user[0], node.id)]
    if not isinstance(node, ast.Attribute):
        return []
    owner = str(getattr(node.value, "id", "") or getattr(node.value, "attr", ""))
    if owner == "lab" or (owner == "self" and user[0] == LABORATORY):
        return [LAB, (LABORATORY, f"Lab.{node.attr}")]
    module = ".".join(_source(user[0]).imported.get(owner, ("", "")))
    return [_home(module, node.attr), (MEASURED[0], f"Measured.{node.attr}")]


def _home(module: str, name: str) -> Place:
    """Return where a name of a module is defined, as far as modules are read."""
    source = _source(module)
    if name in source.defined or name not in source.imported:
        return module, name
    return _home(*source.imported[name])


def _counts(place: Place) -> bool:
    """Return whether a place is a definition that can change numbers."""
    module, name = place
    is_own = module.partition(".")[0] == __package__ and not _is_left_out(place)
    return (is_own or (module, name.partition(".")[0]) in DECISIONS) and name in _source(module).defined


def _is_left_out(place: Place) -> bool:
    return place[0] in LEFT_OUT or ".".join(place) in LEFT_OUT


def _parts(module: str, node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it that counts, and type hints: objects of these classes are used."""
    yield node
    for _, value in _fields(module, node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _parts(module, child)


def _text(module: str, value: Any) -> str:
    """Return a part of a syntax tree as text, the same for all versions of Python that can read it."""
    if isinstance(value, list):
        return f"[{','.join(_text(module, one) for one in value)}]"
    if not isinstance(value, ast.AST):
        return ascii(value)
    fields = [(name, part) for name, part in _fields(module, value) if name not in UNSEEN and part not in (None, [])]
    return f"{type(value).__name__}({','.join(f'{name}={_text(module, part)}' for name, part in fields)})"


def _fields(module: str, node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node by name, without docstrings and without decorators and methods that are left out."""
    for name, value in ast.iter_fields(node):
        if name == "decorator_list":
            yield name, [one for one in value if not _is_left_out(_decorator_home(module, one))]
        elif name == "body" and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = [(one, f"{node.name}.{getattr(one, 'name', '')}") for one in _body(node)]
            yield name, [one for one, method in inner if not _is_left_out((module, method))]
        elif name == "values" and isinstance(node, ast.JoinedStr):
            yield name, _joined(value)
        else:
            yield name, value


def _body(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    """Return the statements of a function or class without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _joined(parts: list[ast.expr]) -> list[Any]:
    """Return the parts of an f-string, neighbouring texts as one: versions of Python split them in different ways."""
    found: list[Any] = []
    for part in parts:
        text = str(part.value) if isinstance(part, ast.Constant) else None
        if text is None:
            found.append(part)
        elif found and isinstance(found[-1], str):
            found[-1] += text
        elif text:
            found.append(text)
    return found


def _decorator_home(module: str, decorator: ast.expr) -> Place:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _home(module, getattr(called, "id", ""))


@cache
def _source(module: str) -> Source:
    """Return a module, read; one that is not of this package and does not decide on verdicts has nothing."""
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, Place] = {}
    tree = ast.parse(_read(module))
    for node in tree.body:
        for name, statements in _defined(module, node):
            defined.setdefault(name, []).extend(statements)
    for part in ast.walk(tree):
        if isinstance(part, ast.ImportFrom):
            imported |= {one.asname or one.name: (str(part.module), one.name) for one in part.names}
    return Source(defined, imported)


def _defined(module: str, node: ast.stmt) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    """Yield the names that a statement of a module defines or changes, each with what counts for it."""
    if isinstance(node, ast.ClassDef) and (module, node.name) in (LAB, MEASURED):
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        yield node.name, [one for one in _body(node) if one not in methods]
        yield from ((f"{node.name}.{one.name}", [one]) for one in methods)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name, [node]
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        yield from ((name, [node]) for name in names)


def _read(module: str) -> str:
    """Return the text of a module; nothing for what is no module, or none that counts."""
    if module.partition(".")[0] != __package__ and module not in {place[0] for place in DECISIONS}:
        return ""
    try:
        file = (sys.modules.get(module) or import_module(module)).__file__
    except ImportError:  # a name in a module, such as a class
        return ""
    return Path(file).read_text(encoding="utf-8") if file else ""
