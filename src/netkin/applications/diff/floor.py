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

DtypeOf = Callable[[Tensor], torch.dtype]


def floating_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors that a module holds itself: weights, buffers and plain attributes."""
    for table in (module._parameters, module._buffers, vars(module)):
        for name, tensor in table.items():
            if isinstance(tensor, Tensor) and tensor.dtype in FLOATING:
                yield name, tensor


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


@contextmanager
def cast_tensors(module: nn.Module, dtype_of: DtypeOf) -> Iterator[None]:
    """Inside the `with`, the floating tensors of a module and of those in it have other types."""
    before: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, as modules may share tensors
    try:
        for inner in module.modules():
            for _, tensor in floating_tensors(inner):
                dtype = dtype_of(tensor)
                if dtype != tensor.dtype:
                    before[id(tensor)] = tensor, tensor.data
                    tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in before.values():
            tensor.data = data


def counterpart_dtypes(model: nn.Module, other: nn.Module, names: Mapping[str, str], default: torch.dtype) -> DtypeOf:
    """Return what tells the type that the other model has for a tensor of `model`.

    A tensor without a counterpart has the type of the other's first floating tensor in that module, or else `default`.
    """
    theirs, dtypes = modules(other), dict[int, torch.dtype]()
    for name, module in modules(model).items():
        counterpart = theirs.get(names.get(name, ""))
        known = {} if counterpart is None or name not in names else dict(floating_tensors(counterpart))
        usual = next((tensor.dtype for tensor in known.values()), default)
        for key, tensor in floating_tensors(module):
            dtypes.setdefault(id(tensor), known[key].dtype if key in known else usual)
    return lambda tensor: dtypes.get(id(tensor), default)


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type of the least precision."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def rounding_of(*dtypes: torch.dtype) -> float:
    """Return how far rounding to the coarsest of these types moves a number, relatively: the root mean square."""
    return ROUNDING * torch.finfo(coarser(*dtypes)).eps
