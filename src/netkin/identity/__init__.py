"""Identity: digests of weights, data, settings and functions, short texts that change with anything in them.

Results and parts of results carry them, so that a mismatch of weights or data is detected.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netkin.errors import ValueFault
from netkin.identity.data import PLAIN, DataDigest, UnorderedDigest, tensor_of
from netkin.progress import command, commanded

__all__ = [
    "DataDigest",
    "UnorderedDigest",
    "described_call",
    "form_digest",
    "form_of",
    "function_digest",
    "in_words",
    "settings_digest",
    "weights_digest",
    "with_call",
]
# arguments on which no number depends, and which a call is named without
WITHOUT_EFFECT = ("each", "overwrite", "partial", "progress", "save")
LONGEST = 200  # characters of an argument in the text of a call
Function = TypeVar("Function", bound=Callable[..., Any])
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # the training flag, hooks, and where parts are registered
CHANGING = frozenset({"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"})
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
    if isinstance(weights, (nn.DataParallel, DistributedDataParallel)):
        weights = weights.module
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    total = blake2b(digest_size=12)
    for name, one in state.items():
        name = name.replace("_orig_mod.", "")
        if isinstance(one, Tensor):
            _add_tensor(total, name, one, precision)
        else:  # what a module adds to its state dict by `get_extra_state`
            total.update(f"{name} {_text(one, name, strict=False)};".encode())
    return total.hexdigest()


def _add_tensor(total: Any, name: str, tensor: Tensor, precision: torch.dtype | None) -> None:
    """Add a tensor's name, precision, shape and bytes to a hash."""
    if tensor.is_meta:
        raise ValueFault(f"weight {name!r} lies on the meta device and holds no values; load the weights first.")
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


def form_digest(model: nn.Module) -> str:
    """Return a text of 24 hex digits that changes with what a model is beside its weights, however often it has run.

    It is that of `form_of`, without attributes that the forward code itself changes, such as counters.
    """
    return _digest(_text(form_of(model, steady=True), "model", strict=True))


def form_of(
    model: nn.Module, within: tuple[int, ...] = (), seen: dict[int, int] | None = None, *, steady: bool = False
) -> dict[str, str]:
    """Return what a model is beside its weights and buffers: its modules' kinds, attributes and forward code.

    Modules of installed packages count by their names and attributes. `within` and `seen` are those of `_text`;
    `steady` leaves out attributes that the forward code changes.

    Example:
        >>> form_of(nn.Dropout(0.1)) == form_of(nn.Dropout(0.2))
        False
    """
    found, within, seen = dict[str, str](), (*within, id(model)), {} if seen is None else seen
    for place, module in model.named_modules():
        methods = _forward_code(type(module))
        code = _text(methods, place, strict=False, within=within, seen=seen)
        found[place] = f"{_qualified(type(module))} {code}"
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        own = _unchanged_by(methods, own) if steady and methods else own
        found |= {f"{place}.{name}": _attribute(value, within, seen) for name, value in own.items()}
    return found


def _attribute(value: Any, within: tuple[int, ...], seen: dict[int, int]) -> str:
    try:
        return _digest(_text(value, "attribute", strict=True, within=within, seen=seen))
    except ValueFault:  # an object of a kind of its own; where it lies is another place in another process
        return re.sub(r"0x[0-9a-f]+", "", repr(value))


def settings_digest(value: Any, *, strict: bool = True) -> str:
    """Return a text of 24 hex digits that changes with any value in nested settings, but not with a mapping's order.

    Lists and tuples are alike, 1, 1.0 and True are not. Arrays and models count with all their values, functions as
    in `function_digest`; other objects are refused, or, if not `strict`, count with their attributes.

    Example:
        >>> settings_digest({"k": 8, "seed": 0}) == settings_digest({"seed": 0, "k": 8})
        True
    """
    return _digest(_text(value, "settings", strict=strict))


def in_words(value: Any) -> str:
    """Return a setting as readable text that changes with it: functions have their name and their digest.

    Example:
        >>> in_words({"conv": "pool", "fc": [1, None]})
        'conv: pool, fc: [1, None]'
        >>> in_words(lambda x: x + 1).split()[0]
        '<lambda>'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(in_words, value))}]"
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__qualname__', type(value).__qualname__)} {function_digest(value)}"
    return getattr(value, "__qualname__", None) or str(value)


def function_digest(function: Callable[..., Any]) -> str:
    """Return a text of 24 hex digits that changes with a function's code, as far as it can be inspected.

    Of a function written in Python these count: its code, constants, defaults, the values it closes over and what it
    reads by a global name, functions and classes with their own code; of a method also its object, of a partial its
    arguments, of a callable object its attributes and the code by which it is called. What installed packages define
    counts by its name, docstrings and comments not at all. Another version of Python may give another digest.

    Example:
        >>> function_digest(lambda x: x + 1) == function_digest(lambda x: x + 2)
        False
    """
    if not callable(function):
        raise ValueFault(f"a function is needed; got {type(function).__name__}.")
    return _digest(_text(function, "function", strict=False))


def described_call(name: str, /, **options: Any) -> str:
    """Return the command for which work is done, or the call `name` with its options: what makes the result again.

    Example:
        >>> described_call("nk.compress", model=nn.Linear(2, 3), layers=["0"], k=2, test=None)
        "nk.compress(model=Linear, layers=['0'], k=2)"
    """
    arguments = [f"{key}={_in_short(value)}" for key, value in options.items() if value is not None]
    return command() or f"{name}({', '.join(arguments)})"


def with_call(function: Function) -> Function:
    """Let the results of a function name the call that made them, unless a command or another such call is at work."""
    signature = inspect.signature(function)
    names = function.__qualname__.split(".")
    name, is_method = ".".join(names if len(names) > 1 else ["nk", *names]), len(names) > 1

    @functools.wraps(function)
    def called(*given: Any, **keywords: Any) -> Any:
        try:
            bound = {} if command() else dict(signature.bind(*given, **keywords).arguments)
        except TypeError:  # the function itself says what is wrong
            bound = {}
        if not bound:
            return function(*given, **keywords)
        asked = {key: value for key, value in list(bound.items())[is_method:] if key not in WITHOUT_EFFECT}
        with commanded(described_call(name, **asked)):
            return function(*given, **keywords)

    return cast("Function", called)


def _in_short(value: Any) -> str:
    """Return a value as text of up to `LONGEST` characters, objects by their names; no more items are read than fit."""
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_in_short, islice(value, LONGEST)))
        text = f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key!r}: {_in_short(one)}' for key, one in islice(value.items(), LONGEST))}}}"
    elif value is None or isinstance(value, PLAIN):
        text = repr(value)
    else:
        named = getattr(value, "name", None)
        return named if isinstance(named, str) else str(getattr(value, "__qualname__", type(value).__name__))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _text(
    value: Any, place: str, *, strict: bool, within: tuple[int, ...] = (), seen: dict[int, int] | None = None
) -> str:
    """Return a text that two values share only if they are the same; `strict` refuses what is no plain value.

    `within` are the ids of all that the value lies in, `seen` the functions and classes that have their text, by id.
    """
    if id(value) in within:
        return "itself"
    seen = {} if seen is None else seen
    if isinstance(value, (FunctionType, type)):
        if id(value) in seen:
            return f"number {seen[id(value)]}"
        seen[id(value)] = len(seen)
    inner = functools.partial(_text, strict=strict, within=(*within, id(value)), seen=seen)
    if isinstance(value, Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if isinstance(value, np.generic):
        return inner(value.item(), place)
    if isinstance(value, (*PLAIN, *_IN_FULL)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        pairs = [f"{inner(key, place)}: {inner(one, f'{place}[{key!r}]')}" for key, one in value.items()]
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(inner(one, f'{place}[{i}]') for i, one in enumerate(value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(inner(one, place) for one in value)}"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"array {weights_digest({'': value if isinstance(value, Tensor) else tensor_of(value, place)})}"
    if isinstance(value, nn.Module):
        return f"{weights_digest(value)} {_digest(str(form_of(value, within, seen, steady=True)))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return f"{inner(type(value), place)} {inner(fields, place)}"
    return _function_text(value, place, strict, functools.partial(inner, strict=False))


def _function_text(value: Any, place: str, strict: bool, inner: Callable[[Any, str], str]) -> str:
    """Return a text for a function, a class or, unless `strict`, any other object."""
    if isinstance(value, FunctionType):
        read = dict(_globals_read(value))
        parts = [value.__code__, closed_over(value), value.__defaults__, value.__kwdefaults__, read]
        return f"function {_digest(str([inner(part, place) for part in parts]))}"
    if isinstance(value, CodeType):
        arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        flags = value.co_flags & ~getattr(inspect, "CO_HAS_DOCSTRING", 0)
        parts = [value.co_code, _constants(value), value.co_names, arguments, flags]
        return f"code {_digest(str([inner(part, place) for part in parts]))}"
    if isinstance(value, MethodType):
        return f"method {inner(value.__func__, place)} of {inner(value.__self__, place)}"
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType):
        return f"method {value.__qualname__} of {inner(value.__self__, place)}"
    if isinstance(value, functools.partial):
        return f"partial {[inner(part, place) for part in (value.func, value.args, value.keywords)]}"
    if isinstance(value, type) and not _is_installed(value.__module__):
        own = {name: getattr(one, "__func__", one) for name, one in vars(value).items() if name not in _OF_EVERY_CLASS}
        return f"{_qualified(value)} {_digest(str([inner(one, place) for one in (own, *value.__bases__)]))}"
    if isinstance(value, property):
        return f"property {[inner(part, place) for part in (value.fget, value.fset)]}"
    if callable(value) and hasattr(value, "__qualname__"):
        return _qualified(value)
    if strict and not callable(value):
        raise ValueFault(
            f"`{place}` is an object of type {type(value).__name__}, which has no digest; use numbers, texts, lists, "
            "mappings, arrays or functions."
        )
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:  # as a logger, or a lock
        return _qualified(type(value))
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    own = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    return f"{inner(type(value), place)} {inner(own, place)}"


def _forward_code(kind: type[nn.Module]) -> dict[str, Any]:
    """Return the forward of a kind of module, and the methods and plain values that it names, inherited ones too.

    What installed packages define is left out.
    """
    found, waiting, known = dict[str, Any](), ["forward"], set[str]()
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


def _unchanged_by(methods: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes to which no method assigns; without lists and mappings if one changes any of these."""
    codes = [code for one in methods.values() if isinstance(one, FunctionType) for code in _codes_in(one.__code__)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    assigned = {step.argval for step in steps if step.opname in ("STORE_ATTR", "DELETE_ATTR")}
    changes = not CHANGING.isdisjoint(name for code in codes for name in code.co_names)
    changes = changes or any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in steps)
    fixed = {name: value for name, value in attributes.items() if name not in assigned}
    return {name: one for name, one in fixed.items() if not (changes and isinstance(one, (list, dict, set)))}


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads by a global name, and from modules of the user's; not what packages define."""
    names = dict.fromkeys(_names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):  # what it reads of a module of the user's
            read = [] if _is_installed(value.__name__) else [one for one in names if one in vars(value)]
            yield from ((f"{name}.{one}", vars(value)[one]) for one in read)
        elif isinstance(value, (type, FunctionType, BuiltinMethodType)):
            if not _is_installed(value.__module__):
                yield name, value
        elif name in function.__globals__:
            yield name, value


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
        return module != "__main__"
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
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found
