"""Texts of values, functions and models that change with anything in them: what digests are made of."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from netkin.errors import InvalidValue
from netkin.identity.code import (
    IN_FULL,
    HookParts,
    changes_of,
    closed_over,
    constants,
    globals_read,
    is_installed,
    methods_reached,
    own_values,
    qualified,
)  # fmt: skip
from netkin.identity.data import PLAIN, tensor_of

LAZY = "is a lazy module without weights yet; run the model once on your own data first, which draws them."
DEEPEST = 120  # objects inside each other; what lies deeper counts by its kind
# kinds of objects of Python's own that hold what other work changes
_UNSTEADY = {"_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "random", "socket"}
_UNSTEADY |= {"subprocess", "threading", "weakref"}
# the training flag, hooks, where parts are registered, what torch.compile and that of Lightning leave, and where
# accelerate has put the parts of a model
OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_torch_compile", "_compile_kwargs", "_hf_hook", "hf_device_map"})
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
_OF_EVERY_CLASS = frozenset({*vars(type("", (), {})), "__slots__", "__firstlineno__", "__annotations__"})


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
        raise InvalidValue(f"weight {name!r} lies on the meta device and holds no values; load the weights first.")
    if is_lazy(tensor):
        raise InvalidValue(f"layer {name.rpartition('.')[0]!r} {LAZY}")
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
            return f"{qualified(type(value))}.{value.name}"
        if isinstance(value, np.generic):
            return self.of(value.item(), place, strict)
        if isinstance(value, (*PLAIN, *IN_FULL)):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._within:
            return "itself"
        if len(self._within) > DEEPEST:
            return qualified(type(value))
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
            own = [value.__code__, list(closed_over(value).values()), value.__defaults__, value.__kwdefaults__]
            return f"function {self._all([*own, dict(globals_read(value))], place)}"
        if isinstance(value, CodeType):
            arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
            flags = value.co_flags & ~getattr(inspect, "CO_HAS_DOCSTRING", 0)
            return f"code {self._all([value.co_code, constants(value), value.co_names, arguments, flags], place)}"
        if isinstance(value, MethodType):
            return f"method {self._all([value.__func__, value.__self__], place)}"
        if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType):
            return f"method {value.__qualname__} of {self._all([value.__self__], place)}"
        if isinstance(value, functools.partial):
            return f"partial {self._all([value.func, value.args, value.keywords], place)}"
        if isinstance(value, property):
            return f"property {self._all([value.fget, value.fset], place)}"
        if isinstance(value, type) and not is_installed(value.__module__):
            named = {name: one for name, one in vars(value).items() if name not in _OF_EVERY_CLASS}
            named = {name: getattr(one, "__func__", one) for name, one in named.items()}
            return f"{qualified(value)} {self._all([named, *value.__bases__], place)}"
        if callable(value) and hasattr(value, "__wrapped__"):  # as by `functools.lru_cache`
            return f"wrapper {self._all([value.__wrapped__], place)}"
        return qualified(value) if callable(value) and hasattr(value, "__qualname__") else ""

    def _read_object(self, value: Any, place: str, strict: bool) -> str:
        if strict and not callable(value):
            raise InvalidValue(
                f"`{place}` is an object of type {type(value).__name__}, which has no digest; use numbers, texts, "
                "lists, mappings, arrays or functions."
            )
        if type(value).__module__.partition(".")[0] in _UNSTEADY:
            return qualified(type(value))
        own = own_values(value)
        return f"{self._all([type(value)], place)} {self._all([own], place) if own else _without_places(repr(value))}"

    def form(self, model: nn.Module, steady: bool) -> dict[str, str]:
        """Return what a model is beside its weights: see `form_of`."""
        found = {}
        for place, module in without_wrappers(model).named_modules():
            methods = methods_reached(type(module), "forward")
            found[place] = f"{qualified(type(module))} {self._all([methods], place)}"
            for name, value in _attributes(module, methods, steady).items():
                try:
                    text = self.of(value, name, _is_of_a_package(value))
                    found[f"{place}.{name}"] = text if isinstance(value, (int, float)) else digest_of(text)
                except InvalidValue:  # it may hold the state of a whole program, such as a trainer
                    found[f"{place}.{name}"] = _without_places(repr(value))
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, kind).values()
                own = [one for one in hooks if not is_installed(getattr(one, "__module__", ""))]
                if own:
                    found[f"{place} {kind}"] = self._all([HookParts(one, ()).found for one in own], place)
        return found


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside `DataParallel`, `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, (nn.DataParallel, DistributedDataParallel)) or "_orig_mod" in model._modules:
        model = model._modules["_orig_mod" if "_orig_mod" in model._modules else "module"]  # type: ignore[assignment]
    return model


def _attributes(module: nn.Module, methods: Mapping[str, Any], steady: bool) -> dict[str, Any]:
    """Return the attributes of a module that are neither its parts nor lists of its weights nor devices.

    With `steady` those are left out that a forward pass changes: by the code of its methods, or by a hook before it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
    own |= {name: module._buffers[name] for name in sorted(module._non_persistent_buffers_set)}
    own = {name: one for name, one in own.items() if not (isinstance(one, list) and _has_weights(one))}
    devices = [
        name for name, one in own.items() if isinstance(one, (str, torch.device)) and _DEVICE.fullmatch(str(one))
    ]
    own = {name: one for name, one in own.items() if name not in devices}  # weights count wherever they lie, too
    if not steady:
        return own
    changes = [changes_of(one.__code__) for one in methods.values() if isinstance(one, FunctionType)]
    changed = {name for name, one in own.items() if any(some.has("attribute", name, one) for some in changes)}
    changed |= {name for name in own if isinstance(getattr(type(module), name, None), functools.cached_property)}
    changed |= {name for name, one in own.items() if isinstance(one, Tensor) and module._forward_pre_hooks}
    return {name: one for name, one in own.items() if name not in changed}


def _is_of_a_package(value: Any) -> bool:
    return is_installed(type(value).__module__) and not isinstance(value, (list, tuple, Mapping, set))


def _has_weights(values: list[Any]) -> bool:
    return any(isinstance(one, nn.Parameter) for one in values)


def _without_places(text: str) -> str:
    """Return a repr without addresses, which are others in another process."""
    return re.sub(r"0x[0-9a-fA-F]+", "", text)
