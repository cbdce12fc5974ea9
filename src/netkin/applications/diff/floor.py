"""The floor: what rounding alone does to a module's output, on the same inputs.

It has three parts. The module runs in the precision of its counterpart, its tensors and inputs cast to the types that
the other model has; it runs one precision up, which tells what its own arithmetic has rounded; and the output itself is
rounded to its type. Between models of one precision the first is zero, and another attention kernel would be an alarm
without the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from netkin.representations.inputs import FLOATING
from netkin.representations.layers import modules

ABOVE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
# of a number that is rounded to the nearest, in units of its type's epsilon: the root mean square
ROUNDING = 0.2

DtypeOf = Callable[[nn.Module, str], torch.dtype]  # by the module that holds a tensor, and its name there


def floating_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors that a module holds itself: weights, buffers and plain attributes."""
    for table in _tables(module):
        for name, tensor in table.items():
            if isinstance(tensor, Tensor) and tensor.dtype in FLOATING:
                yield name, tensor


def floating_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the floating parameters of a module and of those in it, each with the module that holds it."""
    for inner in module.modules():
        for name, tensor in inner.named_parameters(recurse=False):
            if tensor.dtype in FLOATING:
                yield inner, name, tensor


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, vars(module)


class InsteadOfFloat32(TorchFunctionMode):
    """Inside the `with`, code that asks for float32 gets another type."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].to(self.dtype)
        args = [self.dtype if value is torch.float32 else value for value in args]
        named = {key: self.dtype if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **named)


def for_saved(dtype: torch.dtype) -> DtypeOf:
    """Return what tells this type for weights and saved buffers, and for other tensors their own.

    Engines compute what is not saved, as the frequencies of rotary embeddings, in float32 whatever the weights are.
    """

    def dtype_of(module: nn.Module, name: str) -> torch.dtype:
        is_buffer = name in module._buffers and name not in module._non_persistent_buffers_set
        own: Tensor = getattr(module, name)
        return dtype if is_buffer or name in module._parameters else own.dtype

    return dtype_of


@contextmanager
def cast_tensors(module: nn.Module, dtype_of: DtypeOf) -> Iterator[None]:
    """Inside the `with`, the floating tensors of a module and of those in it have other types.

    Weights that accelerate has offloaded are fetched in the type that stands for them.
    """
    before: dict[int, tuple[nn.Module, str, Tensor, Tensor]] = {}  # by identity, as modules may share tensors
    try:
        for inner in module.modules():
            for name, tensor in floating_tensors(inner):
                if id(tensor) not in before:
                    before[id(tensor)] = inner, name, tensor, tensor.data
                    dtype = dtype_of(inner, name)
                    if dtype != tensor.dtype:
                        tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for inner, name, tensor, data in before.values():
            if tensor.dtype != data.dtype:
                tensor.data = data
            for table in _tables(inner) if tensor.is_meta else ():
                if name in table:  # by another one, since it was fetched
                    table[name] = tensor


def run_in_precision(model: nn.Module, dtype: torch.dtype, run: Callable[[], Any]) -> Any:
    """Return what `run` gives while the weights of a model are in another precision.

    What is not saved with them stays as it is; a model that does not run so is cast whole.
    """
    try:
        with cast_tensors(model, for_saved(dtype)):
            return run()
    except RuntimeError:  # of types that don't go together; a `ForwardError` is one too
        with cast_tensors(model, lambda *_: dtype):
            return run()


def counterpart_dtypes(model: nn.Module, other: nn.Module, names: Mapping[str, str], default: torch.dtype) -> DtypeOf:
    """Return what tells the type that the other model has for a tensor of `model`.

    A tensor without a counterpart has the type of the other's first floating tensor in that module, or else `default`.
    """
    theirs, dtypes, shared = modules(other), dict[tuple[int, str], torch.dtype](), dict[int, torch.dtype]()
    for name, module in modules(model).items():
        counterpart = theirs.get(names.get(name, ""))
        known = {} if counterpart is None or name not in names else dict(floating_tensors(counterpart))
        usual = next((tensor.dtype for tensor in known.values()), default)
        for key, tensor in floating_tensors(module):
            dtypes[id(module), key] = shared.setdefault(id(tensor), known[key].dtype if key in known else usual)
    return lambda module, key: dtypes.get((id(module), key), default)


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type of the least precision."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def rounding_of(*dtypes: torch.dtype) -> float:
    """Return how far rounding to the coarsest of these types moves a number, relatively: the root mean square."""
    return ROUNDING * torch.finfo(coarser(*dtypes)).eps
