"""What the user's code reads and changes, by its bytecode: names, globals and closures, and what hooks depend on."""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, MutableSet
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netkin.identity.data import PLAIN

IN_FULL = (type(None), torch.dtype, torch.device, slice, range, PurePath, type(...))  # whose repr is complete
_MUTATING = frozenset({"add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove"})
_MUTATING |= {"setdefault", "update"}
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_ITEMS = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}  # with how many values lie above the container


def methods_reached(kind: type, *names: str) -> dict[str, Any]:
    """Return methods of a class, and the methods and plain values that they name, inherited ones too.

    What installed packages define is left out.
    """
    found, waiting, known = dict[str, Any](), list(names), set[str]()
    classes = [one for one in kind.__mro__ if not is_installed(one.__module__)]
    while waiting:
        name = waiting.pop()
        own = {one.__qualname__: vars(one)[name] for one in classes if name in vars(one) and name not in known}
        known.add(name)
        for place, value in own.items():
            value = value.func if isinstance(value, functools.cached_property) else value
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, (FunctionType, list, tuple, Tensor, *PLAIN)):
                found[f"{place}.{name}"] = value
                waiting += names_in(value.__code__) if isinstance(value, FunctionType) else []
    return found


def globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads by a global name, and from modules of the user's, but does not change itself.

    What installed packages define is left out.
    """
    steps = [step for code in codes_in(function.__code__) for step in dis.get_instructions(code)]
    names = dict.fromkeys(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    known, changes = function.__globals__, changes_of(function.__code__)
    for name, value in [(name, known[name]) for name in names if name in known]:
        if changes.has("variable", name, value):
            continue
        if isinstance(value, ModuleType):
            read = {} if is_installed(value.__name__) else dict.fromkeys(names_read(function.__code__))
            yield from ((f"{name}.{one}", vars(value)[one]) for one in read if one in vars(value))
        elif not (isinstance(value, (type, FunctionType, BuiltinMethodType)) and is_installed(value.__module__)):
            yield name, value


@dataclass(frozen=True)
class Changes:
    """The names that code changes, each an "attribute" or a "variable", which is global or closed over.

    Attributes are those of its first argument, `self`, and of what it reaches from there or from variables. `sets` are
    names on which the method `add` is called, which changes a set, but neither a tensor nor a number.
    """

    names: set[tuple[str, str]] = field(default_factory=set)
    sets: set[tuple[str, str]] = field(default_factory=set)

    def has(self, kind: str, name: str, value: Any) -> bool:
        """Return whether the attribute or variable of that name and value is changed."""
        return (kind, name) in self.names or ((kind, name) in self.sets and isinstance(value, MutableSet))

    def join(self, other: Changes) -> None:
        """Add what other code changes."""
        self.names.update(other.names)
        self.sets.update(other.sets)


def changes_of(code: CodeType) -> Changes:
    """Return what code assigns to, and whose lists, mappings and tensors it changes in place."""
    found = Changes()
    for one in codes_in(code):
        steps = list(dis.get_instructions(one))
        own = {*one.co_varnames[: min(1, one.co_argcount)], *code.co_varnames[: min(1, code.co_argcount)]}
        # ``log = self.log`` gives the same list another name
        stores = {place: _local(step, "STORE_FAST", 0) for place, step in enumerate(steps) if place}
        aliases = {name: _loaded(steps, place - 1, own, {}) for place, name in stores.items() if name}
        for place, step in enumerate(steps):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF"):
                found.names.add(("variable", step.argval))
            elif step.opname in ("STORE_ATTR", "DELETE_ATTR") and _is_lasting(steps, place - 1, own):
                found.names.add(("attribute", step.argval))
            at = _changed_place(steps, place)
            name = None if at is None else _loaded(steps, at, own, aliases)
            if name is not None:
                (found.sets if step.argval == "add" else found.names).add(name)
    return found


def _local(step: dis.Instruction, operation: str, place: int) -> str | None:
    """Return the local name that a step stores or loads, the first or last (0 or -1) of two; None for other steps.

    Variants count, as ``LOAD_FAST_BORROW``, and from Python 3.13 on ``STORE_FAST_LOAD_FAST`` of two names.
    """
    if operation not in step.opname or (isinstance(step.argval, str) and not step.opname.startswith(operation)):
        return None
    return step.argval if isinstance(step.argval, str) else step.argval[place]


def _loaded(steps: list[dis.Instruction], at: int, own: set[str], aliases: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which attribute or variable the step at a place loads, or None for what lasts no longer than a call."""
    step = steps[at]
    if step.opname in _VARIABLES:
        return "variable", step.argval
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return ("attribute", step.argval) if _is_lasting(steps, at, own) else None
    return aliases.get(_local(step, "LOAD_FAST", -1) or "")


def _is_lasting(steps: list[dis.Instruction], end: int, own: set[str]) -> bool:
    """Return whether the expression that ends at a step begins with `self` or with a variable, not with a local."""
    begin = _begin(steps, end)
    while begin and steps[begin].opname in ("COPY", "DUP_TOP"):  # as in ``self.count += 1``
        begin = _begin(steps, begin - 1)
    if begin is None:
        return False
    step = steps[begin]
    return step.opname in _VARIABLES or _local(step, "LOAD_FAST", -1) in own


def _begin(steps: list[dis.Instruction], end: int) -> int | None:
    """Return at which step the expression begins whose value the step `end` leaves on top of the stack."""
    height, place = 0, end + 1
    while height < 1 and place > 0:
        place -= 1
        height += dis.stack_effect(steps[place].opcode, steps[place].arg, jump=False)
    return place if height == 1 else None  # else one step loads several values


def _changed_place(steps: list[dis.Instruction], place: int) -> int | None:
    """Return which step loads the list, mapping or tensor that the step at `place` changes, or None."""
    step, name = steps[place], steps[place].argval
    if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        in_place = name in _MUTATING or (name.endswith("_") and not name.startswith("_"))  # as `add_` of a tensor
        return place - 1 if place and in_place else None
    if _adds_to_item(steps[place : place + 2]):
        above = 1
    elif step.opname in _ITEMS and not steps[place - 1].opname.startswith(("SWAP", "ROT_")):  # else as above
        above = _ITEMS[step.opname]
    else:
        return None
    end: int | None = place
    for _ in range(above):
        end = _begin(steps, end - 1) if end else None
    return end - 1 if end else None


def _adds_to_item(steps: list[dis.Instruction]) -> bool:
    """Return whether steps copy a container and a key, as ``counts[key] += 1`` does long before it stores."""
    copies = [step.opname == "COPY" and step.arg == 2 for step in steps]
    return steps[0].opname == "DUP_TOP_TWO" or (len(copies) == 2 and all(copies))


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in that of functions inside it."""
    yield from (name for one in codes_in(code) for name in one.co_names)


def names_read(code: CodeType) -> Iterator[str]:
    """Yield the names by which code may read attributes: those in it, and its texts, as in ``getattr(x, "rate")``."""
    yield from names_in(code)
    waiting = [one for some in codes_in(code) for one in some.co_consts]
    while waiting:
        one = waiting.pop()
        waiting += one if isinstance(one, (tuple, frozenset)) else ()
        if isinstance(one, str) and one.isidentifier():
            yield one


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package, netkin included."""
    if module is None or module.partition(".")[0] in {"netkin", *sys.stdlib_module_names}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def constants(code: CodeType) -> tuple[Any, ...]:
    """Return the constants of a function's code, with None in place of a docstring that only describes it."""
    marked = getattr(inspect, "CO_HAS_DOCSTRING", None)  # from Python 3.14 on
    # before, a function made by `def` has its docstring or None in the first place; lambdas and classes have neither
    may_have = code.co_flags & (inspect.CO_OPTIMIZED if marked is None else marked)
    if not may_have or code.co_name.startswith("<") or not code.co_consts or not isinstance(code.co_consts[0], str):
        return code.co_consts
    is_read = any(one.opcode in dis.hasconst and one.arg == 0 for one in dis.get_instructions(code))
    return code.co_consts if is_read else (None, *code.co_consts[1:])


def qualified(named: Any) -> str:
    """Return the module and the name of a class or function."""
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def own_values(value: Any) -> dict[str, Any]:
    """Return the attributes that an object holds itself, in slots or not."""
    names = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for some in names for name in ([some] if isinstance(some, str) else some) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))


def closed_over(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function closes over, by name, as far as they are there yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


# --- hooks ------------------------------------------------------------------------------------------------------------

_NAMESPACES = (argparse.Namespace, SimpleNamespace)
# methods by which objects are made, copied and shown, not used
_MAKING = {"__init__", "__new__", "__post_init__", "__getstate__", "__setstate__", "__reduce__", "__repr__", "__str__"}


class HookParts:
    """What a hook of a training does: its code, and the values that this reads and does not change itself.

    These are attributes of the hook, globals, closures and defaults: plain values, arrays and models, lists and
    mappings of them, functions of the user's with what they read in turn, and of the user's other objects the methods
    and attributes that the code names. A hook with `settings` says itself which values matter.
    """

    def __init__(self, hook: Any, methods: tuple[str, ...]):
        own = [getattr(hook, name) for name in methods if callable(getattr(hook, name, None))]
        codes = list(methods_reached(type(hook), *methods, "__call__").values())
        self._with_values = getattr(hook, "settings", None) is None
        self._names, self.changes = set[str](), Changes()
        known = -1
        while known < (now := len(self._names) + len(self.changes.names) + len(self.changes.sets)):
            known = now  # until all names are known
            self._seen: dict[int, Any] = {}  # with the value, so that its id stays its own
            self.found = [self._of(one) for one in (*(own or [hook]), *codes)]

    def _of(self, value: Any) -> Any:
        if isinstance(value, (*PLAIN, *IN_FULL, Enum, np.generic, Tensor, np.ndarray, nn.Module)):
            return value
        if id(value) in self._seen:
            return f"as before, {list(self._seen).index(id(value))}"
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            return [self._of(value.func), self._of([*value.args, *value.keywords.items()])]
        if isinstance(value, MethodType):
            return [self._of(value.__func__), self._of(value.__self__) if self._with_values else None]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, Mapping):
            return [[self._of(key), self._of(one)] for key, one in value.items()]
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            return [self._of(one) for one in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
        return self._object(value)

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        self._names.update(names_read(code))
        self.changes.join(changes_of(code))
        if not self._with_values:
            return code
        closed = closed_over(function).items()
        read = {name: one for name, one in closed if not self.changes.has("variable", name, one)}
        read |= {} if is_installed(function.__module__) else dict(globals_read(function))
        return [code, self._of(read), self._of([function.__defaults__, function.__kwdefaults__])]

    def _object(self, value: Any) -> Any:
        """Return the kind of an object, and those of its attributes and methods that are read and not changed."""
        kind = value if isinstance(value, type) else type(value)
        if not self._with_values or (is_installed(kind.__module__) and not isinstance(value, _NAMESPACES)):
            return qualified(kind)
        special = {name for one in kind.__mro__ for name in vars(one) if name.startswith("__")} - _MAKING
        cached = {name for name in self._names if isinstance(getattr(kind, name, None), functools.cached_property)}
        code = methods_reached(kind, *sorted(self._names), *sorted(special))
        own = {name: one for name, one in own_values(value).items() if name in self._names - cached}
        return [qualified(kind), self._unchanged(own), self._unchanged(code)]

    def _unchanged(self, named: Mapping[str, Any]) -> Any:
        changed = {name for name, one in named.items() if self.changes.has("attribute", name.rpartition(".")[2], one)}
        return self._of({name: named[name] for name in sorted(named) if name not in changed})
