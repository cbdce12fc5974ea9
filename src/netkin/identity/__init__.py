"""Identity: digests of weights, data, settings and functions, short texts that change with anything in them.

Results and parts of results carry them, so that a mismatch of weights or data is detected.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath
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
    "function_digest",
    "in_words",
    "settings_digest",
    "weights_digest",
    "with_call",
]
WITHOUT_EFFECT = (
    "each",
    "overwrite",
    "partial",
    "progress",
    "save",
)  # arguments on which no number depends, and which a call is named without
LONGEST = 200  # characters of an argument in the text of a call
Function = TypeVar("Function", bound=Callable[..., Any])
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

    Of a function written in Python these count: its code, constants, defaults, the values it closes over and the plain
    global values it reads; of a method also its object, of a partial its arguments, of a callable object its
    attributes and the code by which it is called. Functions that it calls by a global name, builtins and classes count
    by their names, docstrings and comments not at all. Another version of Python may give another digest.

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


def _text(value: Any, place: str, *, strict: bool, within: tuple[int, ...] = ()) -> str:
    """Return a text that two values share only if they are the same; `strict` refuses what is no plain value."""
    if id(value) in within:
        return "itself"
    inner = functools.partial(_text, strict=strict, within=(*within, id(value)))
    if isinstance(value, Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if isinstance(value, np.generic):
        return _text(value.item(), place, strict=strict, within=within)
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
        return f"{_qualified(type(value))} {weights_digest(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return f"{_qualified(type(value))} {inner(fields, place)}"
    return _function_text(value, place, strict, functools.partial(_text, strict=False, within=(*within, id(value))))


def _function_text(value: Any, place: str, strict: bool, inner: Callable[[Any, str], str]) -> str:
    """Return a text for a function, a class or, unless `strict`, any other object."""
    if isinstance(value, FunctionType):
        read = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        plain = {name: one for name, one in read.items() if isinstance(one, PLAIN)}
        parts = [value.__code__, closed_over(value), value.__defaults__, value.__kwdefaults__, plain]
        return f"function {[inner(part, place) for part in parts]}"
    if isinstance(value, CodeType):
        arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        flags = value.co_flags & ~getattr(inspect, "CO_HAS_DOCSTRING", 0)
        parts = [value.co_code, _constants(value), value.co_names, arguments, flags]
        return f"code {[inner(part, place) for part in parts]}"
    if isinstance(value, MethodType):
        return f"method {inner(value.__func__, place)} of {inner(value.__self__, place)}"
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType):
        return f"method {value.__qualname__} of {inner(value.__self__, place)}"
    if isinstance(value, functools.partial):
        return f"partial {[inner(part, place) for part in (value.func, value.args, value.keywords)]}"
    if callable(value) and hasattr(value, "__qualname__"):
        return _qualified(value)
    if strict and not callable(value):
        raise ValueFault(
            f"`{place}` is an object of type {type(value).__name__}, which has no digest; use numbers, texts, lists, "
            "mappings, arrays or functions."
        )
    called = vars(type(value)).get("__call__")
    code = f" {inner(called, place)}" if isinstance(called, FunctionType) else ""
    return f"{_qualified(type(value))}{code} {inner(getattr(value, '__dict__', None), place)}"


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
