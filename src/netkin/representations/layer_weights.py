"""The weights with which a layer computes: its parameters, or what is computed from them before it runs.

A parametrization of torch computes a weight (`torch.nn.utils.parametrize`: masks of netkin, `weight_norm`,
`spectral_norm`, `orthogonal`), and so do the older hooks of `torch.nn.utils` (`weight_norm`, `spectral_norm`, `prune`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from netkin.representations.layers import modules, require_weights, unwrapped
from netkin.settings import evaluating

WeightHook = WeightNorm | SpectralNorm | BasePruningMethod
PARTS = ("g", "v", "orig", "u", "mask")  # what such hooks keep of a weight, after its name
REMEDY = (
    "make it plain first, by `nk.bake_masks` where these are masks, else by torch's `remove_parametrizations`, "
    "`remove_weight_norm`, `remove_spectral_norm` or `prune.remove`"
)


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights and biases with which a module itself computes, by name; not those of modules inside it.

    Example:
        >>> own_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))["weight"].shape
        torch.Size([3, 2])
    """
    computed = _computed(module)
    raw = {f"{name}_{part}" for name in computed for part in PARTS}
    return computed | {name: weight for name, weight in module.named_parameters(recurse=False) if name not in raw}


def computed_by(module: nn.Module) -> dict[str, str]:
    """Return which weights of a module are computed, by name, each with the name of what computes it."""
    makers = {_name_of(hook): type(hook).__name__ for hook in _hooks(module).values()}
    for name, steps in module.parametrizations.items() if is_parametrized(module) else ():  # type: ignore[operator,union-attr]
        makers[name] = " and ".join(type(step).__name__.lstrip("_") for step in steps)
    return makers


def with_plain_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which every weight is a plain parameter; the model itself where all are.

    The copy computes the same, and its parameters have the names that they have without parametrizations or hooks.
    """
    inner = unwrapped(model)
    if not any(computed_by(module) for module in inner.modules()):
        return inner
    require_weights(inner)
    made = copied(inner)
    for module in modules(made).values():
        if computed := _computed(module):
            _make_plain(module, computed)
    return made


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model, also where hooks compute weights, which `copy.deepcopy` by itself refuses."""
    results = (value for module in model.modules() for value in vars(module).values())
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in results if isinstance(value, Tensor)})


def parts_of_computed_weights(names: Iterable[str]) -> dict[str, list[str]]:
    """Return which names in a state dict are parts of a weight that is computed from them, by the weight's name.

    Example:
        >>> parts_of_computed_weights(["0.weight", "0.bias", "1.weight_g", "1.weight_v", "1.bias"])
        {'1.weight': ['1.weight_g', '1.weight_v']}
    """
    known, parts = dict.fromkeys(names), dict[str, list[str]]()
    for name in known:
        above, mark, inside = f".{name}".rpartition(".parametrizations.")
        weight, _, part = name.rpartition("_")
        if mark:
            parts.setdefault(f"{above}.{inside.partition('.')[0]}".strip("."), []).append(name)
        elif part == "orig" or (part in ("g", "v") and {f"{weight}_g", f"{weight}_v"} <= known.keys()):
            parts.setdefault(weight, []).append(name)
    return {weight: names for weight, names in parts.items() if weight not in known}


def _computed(module: nn.Module) -> dict[str, Tensor]:
    """Return the computed weights of a module; vectors of spectral norm stay where they are."""
    computed = dict[str, Tensor]()
    with evaluating(module), torch.no_grad():
        for hook in _hooks(module).values():
            computed[_name_of(hook)] = _value(hook, module).detach()
        for name in module.parametrizations if is_parametrized(module) else ():  # type: ignore[union-attr]
            computed[name] = getattr(module, name).detach()
    return computed


def _hooks(module: nn.Module) -> dict[int, WeightHook]:
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, WeightHook)}


def _name_of(hook: WeightHook) -> str:
    return hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name


def _value(hook: WeightHook, module: nn.Module) -> Tensor:
    if isinstance(hook, BasePruningMethod):
        return hook.apply_mask(module)
    return hook.compute_weight(module, False) if isinstance(hook, SpectralNorm) else hook.compute_weight(module)


def _make_plain(module: nn.Module, computed: dict[str, Tensor]) -> None:
    """Give a module parameters in place of what computes its weights."""
    if is_parametrized(module):
        module.__class__ = type_before_parametrizations(module)
        del module._modules["parametrizations"]
    for key in _hooks(module):
        del module._forward_pre_hooks[key]
    for name in (f"{name}_{part}" for name in computed for part in PARTS):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    rest, module._parameters = module._parameters, {}
    for name, value in computed.items():
        vars(module).pop(name, None)
        setattr(module, name, nn.Parameter(value.clone()))
    module._parameters |= rest  # a bias comes after its weight again
