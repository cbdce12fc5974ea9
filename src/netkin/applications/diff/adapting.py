"""Adapting: copies of what a module is called with, in other types and on another device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from netkin.representations.hooks import KeyPath, parts, rebuilt
from netkin.representations.inputs import FLOATING


class _Converting(TorchFunctionMode):
    """Inside the `with`, `copy.deepcopy` gives tensors another type, on another device."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None):
        super().__init__()
        self.dtype, self.device = dtype, device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = converted(tensor, self.dtype, self.device)
        return memo[id(tensor)]


def converted(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Return a copy of a tensor, a floating one in another type."""
    return tensor.detach().to(device, dtype if tensor.dtype in FLOATING else None, copy=True)


def adapted(
    value: Any,
    dtypes: Mapping[KeyPath, torch.dtype],
    default: torch.dtype | None = None,
    device: torch.device | None = None,
    path: KeyPath = (),
) -> Any:
    """Return a copy of a structure whose floating tensors have the types of their places, or else the default one.

    Objects that are no structures, such as caches, are copied whole, with their tensors in the default type.
    """
    if isinstance(value, Tensor):
        return converted(value, dtypes.get(path, default), device)
    inside = parts(value)
    if inside:
        copies = {key: adapted(part, dtypes, default, device, (*path, key)) for key, part in inside.items()}
        return rebuilt(value, copies)
    if value is None or callable(value) or isinstance(value, (str, int, float, bytes, torch.dtype, torch.device)):
        return value
    with _Converting(default, device):
        return copy.deepcopy(value)


def is_floating(leaf: Any) -> bool:
    """Return whether something is a dense tensor of floating numbers."""
    return isinstance(leaf, Tensor) and leaf.dtype in FLOATING and not leaf.is_nested and leaf.layout == torch.strided
