"""Texts of values, functions and models that change with anything in them: what digests are made of."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path, PurePath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from netkin.errors import ValueFault
from netkin.identity.data import PLAIN, tensor_of

LAZY = "is a lazy module without weights yet; run the model once on your own data first, which draws them."
DEEPEST = 120  # objects inside each other; what lies deeper counts by its kind
# kinds of objects of Python's own that hold what other work changes
_UNSTEADY = {"_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "random", "socket"}
_UNSTEADY |= {"subprocess", "threading", "weakref"}
_MUTATING = frozenset({"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"})
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME")
# the training flag, hooks, where parts are registered, and what torch.compile and that of Lightning leave
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_torch_compile", "_compile_kwargs"})
_OF_EVERY_CLASS = frozenset({*vars(type("", (), {})), "__slots__", "__firstlineno__", "__annotations__"})
_IN_FULL = (type(None), torch.dtype, torch.device, slice, range, PurePath, type(...))  # whose repr is complete


def weights_digest(weights: nn.Module | Mapping[str, Tensor], precision: torch.dtype | None = None) -> str:
    """Return a text of 24 hex digits that changes with any weight: names, shapes, precisions and all bits.

    Of a model, parameters and persistent buffers count, in the order of its state dict, wherever they lie; a wrapper of
    torch (`DataParallel`, `DistributedDataParallel`, `torch.compile`) does not. With `precision` floating weights are
    rounded to it first, so that a model and its copy in that precision have the same digest.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> half = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
        >>> weights_digest(half) == weights_digest(model)
        False
        >>> weights_digest(half, torch.bfloat16) == weights_digest(model, torch.bfloat16)
        True
    """
    state = without_wrappers(weights).state_dict() if isinstance(weights, nn.Module) else weights
    total = blake2b(digest_size=12)
    for name, one in state.items():
        name = name.replace("_orig_mod.", "")
        if isinstance(one, Tensor):
            _add_tensor(total, name, one, precision)
        else:  # what a module adds to its state dict by `get_extra_state`
            total.update(f"{name} {Texts().of(one, name, strict=False)};".encode())
    return total.hexdigest()


def _add_tensor(total: Any, name: str, tensor: Tensor, precision: torch.dtype | None) -> None:
    """Add a tensor's name, precision, shape and bytes to a hash."""
    if tensor.is_meta:
        raise ValueFault(f"weight {name!r} lies on the meta device and holds no values; load the weights first.")
    if is_lazy(tensor):
        raise ValueFault(f"layer {name.rpartition('.')[0]!r} {LAZY}")
    if tensor.is_nested:
        for place, part in enumerate(tensor.unbind()):
            _add_tensor(total, f"{name}[{place}]", part, precision)
        return
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()
    shape, kind = tuple(tensor.shape), "complex " if tensor.is_complex() else ""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    if precision is not None and tensor.is_floating_point():
        tensor = tensor.to(precision)
    total.update(f"{name} {kind}{tensor.dtype} {shape};".encode())
    total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest_of(text: str) -> str:
    """Return 24 hex digits for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class Texts:
    """Texts that two values share only if they are the same; what was read once is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[Any, str]] = {}  # with the value, so that its id stays its own
        self._within: list[int] = []  # the ids of all that the value being read lies in

    def of(self, value: Any, place: str, strict: bool) -> str:
        """Return the text of a value found at a place; `strict` refuses objects that are no plain values."""
        if isinstance(value, Enum):
            return f"{_qualified(type(value))}.{value.name}"
        if isinstance(value, np.generic):
            return self.of(value.item(), place, strict)
        if isinstance(value, (*PLAIN, *_IN_FULL)):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._within:
            return "itself"
        if len(self._within) > DEEPEST:
            return _qualified(type(value))
        if (id(value), strict) not in self._known:
            self._within.append(id(value))
            try:
                self._known[id(value), strict] = value, self._read(value, place, strict)
            finally:
                self._within.pop()
        return self._known[id(value), strict][1]

    def _read(self, value: Any, place: str, strict: bool) -> str:
        if isinstance(value, Mapping):
            texts = sorted(((self.of(key, place, strict), key) for key in value), key=itemgetter(0))
            pairs = [f"{text}: {self.of(value[key], f'{place}[{key!r}]', strict)}" for text, key in texts]
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, np.ndarray) and value.dtype == object:
            value = value.tolist()
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.of(one, f'{place}[{i}]', strict) for i, one in enumerate(value))}]"
        if isinstance(value, (set, frozenset)):
            return f"set {sorted(self.of(one, place, strict) for one in value)}"
        if isinstance(value, (Tensor, np.ndarray)):
            return f"array {weights_digest({'': value if isinstance(value, Tensor) else tensor_of(value, place)})}"
        if isinstance(value, nn.Module):
            return f"{weights_digest(value)} {digest_of(str(self.form(value, steady=True)))}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            return f"{self.of(type(value), place, strict)} {self.of(fields, place, strict)}"
        return self._read_callable(value, place) or self._read_object(value, place, strict)

    def _all(self, values: Any, place: str) -> str:
        """Return a short text of several values, whatever they are."""
        return digest_of(str([self.of(value, place, False) for value in values]))

    def _read_callable(self, value: Any, place: str) -> str:
        """Return the text of a function or a class, empty for others."""
        if isinstance(value, FunctionType):
            own = [value.__code__, closed_over(value), value.__defaults__, value.__kwdefaults__]
            return f"function {self._all([*own, dict(_globals_read(value))], place)}"
        if isinstance(value, CodeType):
            arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
            flags = value.co_flags & ~getattr(inspect, "CO_HAS_DOCSTRING", 0)
            return f"code {self._all([value.co_code, _constants(value), value.co_names, arguments, flags], place)}"
        if isinstance(value, MethodType):
            return f"method {self._all([value.__func__, value.__self__], place)}"
        if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType):
            return f"method {value.__qualname__} of {self._all([value.__self__], place)}"
        if isinstance(value, functools.partial):
            return f"partial {self._all([value.func, value.args, value.keywords], place)}"
        if isinstance(value, property):
            return f"property {self._all([value.fget, value.fset], place)}"
        if isinstance(value, type) and not _is_installed(value.__module__):
            named = {name: one for name, one in vars(value).items() if name not in _OF_EVERY_CLASS}
            named = {name: getattr(one, "__func__", one) for name, one in named.items()}
            return f"{_qualified(value)} {self._all([named, *value.__bases__], place)}"
        if callable(value) and hasattr(value, "__wrapped__"):  # as by `functools.lru_cache`
            return f"wrapper {self._all([value.__wrapped__], place)}"
        return _qualified(value) if callable(value) and hasattr(value, "__qualname__") else ""

    def _read_object(self, value: Any, place: str, strict: bool) -> str:
        if strict and not callable(value):
            raise ValueFault(
                f"`{place}` is an object of type {type(value).__name__}, which has no digest; use numbers, texts, "
                "lists, mappings, arrays or functions."
            )
        if type(value).__module__.partition(".")[0] in _UNSTEADY:
            return _qualified(type(value))
        names = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
        slots = [name for some in names for name in ([some] if isinstance(some, str) else some) if hasattr(value, name)]
        own = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        return f"{self._all([type(value)], place)} {self._all([own], place) if own else _without_places(repr(value))}"

    def form(self, model: nn.Module, steady: bool) -> dict[str, str]:
        """Return what a model is beside its weights: see `form_of`."""
        found = {}
        for place, module in without_wrappers(model).named_modules():
            methods = _code_from(type(module), "forward")
            found[place] = f"{_qualified(type(module))} {self._all([methods], place)}"
            for name, value in _attributes(module, methods, steady).items():
                try:
                    found[f"{place}.{name}"] = digest_of(self.of(value, name, True))
                except ValueFault:  # an object of a kind of its own
                    found[f"{place}.{name}"] = _without_places(repr(value))
        return found


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, (nn.DataParallel, DistributedDataParallel)) or "_orig_mod" in model._modules:
        model = model._modules["_orig_mod" if "_orig_mod" in model._modules else "module"]  # type: ignore[assignment]
    return model


def _attributes(module: nn.Module, methods: Mapping[str, Any], steady: bool) -> dict[str, Any]:
    """Return the attributes of a module that are neither its parts nor lists of its weights.

    With `steady` those are left out that a forward pass changes: by the code of its methods, or by a hook before it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    own = {name: one for name, one in own.items() if not (isinstance(one, list) and _has_weights(one))}
    if not steady:
        return own
    codes = [one.__code__ for one in methods.values() if isinstance(one, FunctionType)]
    changed = {name for code in codes for name in _changed_names(code)}
    changed |= {name for name in own if isinstance(getattr(type(module), name, None), functools.cached_property)}
    changed |= {name for name, one in own.items() if isinstance(one, Tensor) and module._forward_pre_hooks}
    return {name: one for name, one in own.items() if name not in changed}


def _has_weights(values: list[Any]) -> bool:
    return any(isinstance(one, nn.Parameter) for one in values)


def _without_places(text: str) -> str:
    """Return a repr without addresses, which are others in another process."""
    return re.sub(r"0x[0-9a-fA-F]+", "", text)


def _code_from(kind: type, *methods: str) -> dict[str, Any]:
    """Return methods of a class, and the methods and plain values that they name, inherited ones too.

    What installed packages define is left out.
    """
    found, waiting, known = dict[str, Any](), list(methods), set[str]()
    classes = [one for one in kind.__mro__ if not _is_installed(one.__module__)]
    while waiting:
        name = waiting.pop()
        own = {one.__qualname__: vars(one)[name] for one in classes if name in vars(one) and name not in known}
        known.add(name)
        for place, value in own.items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, (FunctionType, list, tuple, Tensor, *PLAIN)):
                found[f"{place}.{name}"] = value
                waiting += _names_in(value.__code__) if isinstance(value, FunctionType) else []
    return found


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads by a global name, and from modules of the user's, but does not change itself.

    What installed packages define is left out.
    """
    steps = [step for code in _codes_in(function.__code__) for step in dis.get_instructions(code)]
    names = dict.fromkeys(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    known = function.__globals__.keys() - _changed_names(function.__code__)
    for name in [name for name in names if name in known]:
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            read = [] if _is_installed(value.__name__) else [*_names_in(function.__code__)]
            yield from ((f"{name}.{one}", vars(value)[one]) for one in read if one in vars(value))
        elif not (isinstance(value, (type, FunctionType, BuiltinMethodType)) and _is_installed(value.__module__)):
            yield name, value


def _changed_names(code: CodeType, stores: tuple[str, ...] = (), loads: tuple[str, ...] = ()) -> set[str]:
    """Return the attributes and globals that code assigns to, or whose lists and mappings it changes.

    `stores` and `loads` are operations that count too, such as those of closures.
    """
    stores, loads = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", *stores), (*_LOADS, *loads)
    found = set()
    for one in _codes_in(code):
        steps = list(dis.get_instructions(one))
        for place, step in enumerate(steps):
            if step.opname in stores:
                found.add(step.argval)
            elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or _adds_to_item(steps[place : place + 2]):
                # the name is loaded just before
                found |= {load.argval for load in steps[max(place - 4, 0) : place] if load.opname in loads}
            elif step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _MUTATING and place:
                found |= {load.argval for load in steps[place - 1 : place] if load.opname in loads}
    return found


def _adds_to_item(steps: list[dis.Instruction]) -> bool:
    """Return whether steps copy a container and a key, as ``counts[key] += 1`` does long before it stores."""
    copies = [step.opname == "COPY" and step.arg == 2 for step in steps]
    return steps[0].opname == "DUP_TOP_TWO" or (len(copies) == 2 and all(copies))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in that of functions inside it."""
    yield from (name for one in _codes_in(code) for name in one.co_names)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package, netkin included."""
    if module is None or module.partition(".")[0] in {"netkin", *sys.stdlib_module_names}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _constants(code: CodeType) -> tuple[Any, ...]:
    """Return the constants of a function's code, with None in place of a docstring that only describes it."""
    marked = getattr(inspect, "CO_HAS_DOCSTRING", None)  # from Python 3.14 on
    # before, a function made by `def` has its docstring or None in the first place; lambdas and classes have neither
    may_have = code.co_flags & (inspect.CO_OPTIMIZED if marked is None else marked)
    if not may_have or code.co_name.startswith("<") or not code.co_consts or not isinstance(code.co_consts[0], str):
        return code.co_consts
    is_read = any(one.opcode in dis.hasconst and one.arg == 0 for one in dis.get_instructions(code))
    return code.co_consts if is_read else (None, *code.co_consts[1:])


def _qualified(named: Any) -> str:
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def closed_over(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over, as far as they are there yet."""
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


_NAMESPACES = (argparse.Namespace, SimpleNamespace)


class HookParts:
    """What a hook of a training does: its code, and the values that this reads and does not change itself.

    These are attributes of the hook, globals, closures and defaults: plain values, arrays and models, lists and
    mappings of them, functions of the user's with what they read in turn, and of the user's other objects the
    attributes that the code names. A hook with `settings` says itself which values matter.
    """

    def __init__(self, hook: Any, methods: tuple[str, ...]):
        own = [getattr(hook, name) for name in methods if callable(getattr(hook, name, None))]
        codes = list(_code_from(type(hook), *methods, "__call__").values())
        self._with_values = getattr(hook, "settings", None) is None
        self._names, self._changed = set[str](), set[str]()
        for _ in range(2):  # again once all names are known
            self._known: dict[int, Any] = {}  # with the value, so that its id stays its own
            self.found = [self._of(one) for one in (*(own or [hook]), *codes)]

    def _of(self, value: Any) -> Any:
        if isinstance(value, (*PLAIN, *_IN_FULL, Enum, np.generic, Tensor, np.ndarray, nn.Module)):
            return value
        if id(value) in self._known:
            return f"as before, {list(self._known).index(id(value))}"
        self._known[id(value)] = value
        if isinstance(value, functools.partial):
            return [self._of(value.func), self._of([*value.args, *value.keywords.items()])]
        if isinstance(value, MethodType):
            return [self._of(value.__func__), self._of(value.__self__) if self._with_values else None]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, Mapping):
            return [[self._of(key), self._of(one)] for key, one in value.items()]
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._of(one) for one in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
        return self._attributes(value)

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        self._names |= set(_names_in(code))
        self._changed |= _changed_names(code, ("STORE_DEREF",), ("LOAD_DEREF",))
        if not self._with_values:
            return code
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        read = {name: cell.cell_contents for name, cell in cells if name not in self._changed and _is_filled(cell)}
        read |= {} if _is_installed(function.__module__) else dict(_globals_read(function))
        return [code, self._of(read), self._of([function.__defaults__, function.__kwdefaults__])]

    def _attributes(self, value: Any) -> Any:
        """Return the kind of an object, and those of its attributes that the code names and does not change."""
        kind = value if isinstance(value, type) else type(value)
        if not self._with_values or (_is_installed(kind.__module__) and not isinstance(value, _NAMESPACES)):
            return _qualified(kind)
        own = getattr(value, "__dict__", {})
        return [
            _qualified(kind),
            self._of({one: own[one] for one in sorted(self._names - self._changed) if one in own}),
        ]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
