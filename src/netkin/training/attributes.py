"""Attributes that models and hooks change while they run, which are found, and kept with a saved training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import outside
from netkin.identity import HookParts, settings_digest
from netkin.identity.data import PLAIN
from netkin.identity.objects import OF_EVERY_MODULE
from netkin.training.recipe import METHODS, Hook, WrappedHook

DEEPEST = 20  # lists in lists


class ChangingAttributes:
    """The plain attributes of a model's modules and of hooks, of which those that changed are saved.

    These are numbers, texts, tensors, and lists and mappings of them; weights and buffers are saved as such, and a hook
    with a `state_dict` says itself what it needs.
    """

    def __init__(self, model: nn.Module, hooks: Iterable[Any]):
        self.owners: dict[str, Any] = {f"model/{place}": module for place, module in model.named_modules()}
        self.hooks = [hook.given if isinstance(hook, WrappedHook) else hook for hook in hooks]
        without_state = [hook for hook in self.hooks if not _has_state(hook)]
        self.owners |= {f"hook/{number}": hook for number, hook in enumerate(without_state)}
        self.before = {place: settings_digest(value) for place, _, value in self._found()}

    def _found(self) -> Iterator[tuple[str, str, Any]]:
        for place, owner in self.owners.items():
            for name, value in getattr(owner, "__dict__", {}).items():
                if name not in OF_EVERY_MODULE and _is_plain(value):
                    yield f"{place}/{name}", name, value

    def changed(self) -> dict[str, Any]:
        """Return the attributes that are not as they were at the start, by their place."""
        return {
            place: copy.deepcopy(value)
            for place, _, value in self._found()
            if self.before.get(place) != settings_digest(value)
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put attributes back; what functions keep in lists and globals of others is not saved, and is warned of."""
        for place, value in state.items():
            owner, _, name = place.rpartition("/")
            known = getattr(self.owners[owner], name, None)
            setattr(self.owners[owner], name, value.to(known.device) if isinstance(known, Tensor) else value)
        for hook in self.hooks:
            lost = sorted(name for kind, name in HookParts(hook, METHODS).changes.names if kind == "variable")
            if lost and not (_has_state(hook) or getattr(hook, "settings", None) is not None):
                warnings.warn(
                    f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)!r} changes {', '.join(lost)}, "
                    "which a saved training does not hold: what it kept there before is missing. Keep it in attributes "
                    "of an object, or in a `state_dict`.",
                    stacklevel=outside(),
                )


def _has_state(hook: Any) -> bool:
    own = getattr(type(hook), "state_dict", None)
    return own is not None and own is not Hook.state_dict


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in (list, tuple, dict) and depth < DEEPEST:
        keys, values = (value.keys(), value.values()) if isinstance(value, dict) else ((), value)
        return all(isinstance(key, (bool, int, float, str, tuple)) for key in keys) and all(
            _is_plain(one, depth + 1) for one in values
        )
    if type(value) is Tensor:
        return value.layout == torch.strided and not (value.requires_grad or value.is_quantized or value.is_meta)
    return value is None or type(value) in (bool, int, float, str)


# --- what a forward pass changes --------------------------------------------------------------------------------------


def own_state(model: nn.Module) -> dict[str, Any]:
    """Return the buffers of a model, and what changes with the attributes of its modules, by name."""
    attributes = {
        f"{place}.{name}".lstrip("."): _mark(value)
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (*PLAIN, Tensor, type(None), Collection)) and name not in OF_EVERY_MODULE
    }
    return attributes | dict(model.named_buffers())


def _mark(value: Any) -> Any:
    """Return a tensor with how often it was written to, or the digest of another value."""
    return (value, value._version) if isinstance(value, Tensor) else settings_digest(value, strict=False)


def changed_since(before: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the names of attributes that were changed, and of buffers that were replaced, since `own_state`."""
    found = own_state(model)
    return [name for name in found if name not in before or not _is_same(before[name], found[name])]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1] == other[1]
    return one is other or (isinstance(one, str) and one == other)
