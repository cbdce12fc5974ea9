"""Own code: a model borrows the modules that were changed on purpose from the reference, so that its code is seen.

Where all linear layers are quantised, every block differs by them, and a residual that one block lacks would be lost in
that. With the reference's layers in their places only the code in between is left to differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from netkin.applications.diff.adapting import adapted, is_floating
from netkin.representations.hooks import leaves
from netkin.representations.inputs import device_of, dtype_of


class _Borrowed(nn.Module):
    """A module of the reference that takes and gives the other model's types."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None):
        super().__init__()
        self.module, self.dtype = module, dtype  # of the module in whose place this one is

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as its number of features
            return getattr(self._modules["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on inputs in its own type."""
        tensors = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        dtype = next((tensor.dtype for tensor in tensors if is_floating(tensor)), self.dtype)
        given, named = adapted((args, kwargs), {}, dtype_of(self.module), device_of(self.module))
        return adapted(self.module(*given, **named), {}, dtype, tensors[0].device if tensors else None)


@contextmanager
def borrowing(
    other: nn.Module, reference: nn.Module, names: Mapping[str, str], borrowed: Iterable[str]
) -> Iterator[None]:
    """Inside the `with`, `other` has the reference's modules of some names in the places of their counterparts."""
    before: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for name in borrowed:
            above, _, key = names[name].rpartition(".")
            owner = other.get_submodule(above)
            module = owner.get_submodule(key)
            before.append((owner, key, module))
            owner._modules[key] = _Borrowed(reference.get_submodule(name), dtype_of(module))
        yield
    finally:
        for owner, key, module in before:
            owner._modules[key] = module
