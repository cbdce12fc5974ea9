"""Groups: what freeze training freezes one after the other, and what is frozen along with each.

A group is named after one module. Where none are named they are found among the default layers: the blocks of a network
made of blocks (a residual network, a transformer), else every layer with weights that is no norm. All other modules
belong to a group, by the order in which they run:

- modules without weights, and norms, belong to the group that runs just before them;
- other weights belong to the next group, since nothing before a frozen group may be trained. So the stem of a residual
  network is frozen with its first block. What runs after the last group is never frozen.

A parameter that no layer holds, but the model itself or a module around the groups, goes with the first group that
depends on it; if it is parametrized, what computes it is a piece that runs, like a module. Until `FirstStep` has seen a
training step, the order in which modules run is taken to be that of registration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from netkin.errors import ForwardError, InvalidValue
from netkin.representations.hooks import leaves
from netkin.representations.layers import (
    Spec,
    children,
    choose,
    layer_label,
    layers,
    modules,
    own_parameters,
    split_call,
    unwrapped,
)

NORM = re.compile(r"norm(act)?(\dd)?$", re.IGNORECASE)  # BatchNorm2d, LayerNorm, LlamaRMSNorm, BatchNormAct2d, ...
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
STILL_IN_EVALUATION = (_NormBase, _SpectralNorm)  # whose buffers no evaluation changes


class LayerGroups:
    """The groups of a model in the order they run, and which module belongs to which group.

    A piece is a module, or a parameter that lies on a module around groups; `order` holds their names as they run.
    """

    def __init__(self, model: nn.Module, spec: Spec = None):
        _require_hookable(model)
        self.names = tuple(find_groups(model) if spec is None else named_groups(model, spec))
        self.modules = _with_parametrizations(modules(model), self.names)
        self.order = _with_names_in_order(list(_pieces(self.modules, self.names, "")), self.names)
        self.owner = self._owners()

    def reorder(self, order: Sequence[str]) -> None:
        """Let the pieces go with groups by another order in which they run."""
        self.order = list(order)
        self.owner = self._owners()

    def members(self, number: int) -> list[str]:
        """Return the names of the pieces that are frozen with group `number`."""
        return [piece for piece in self.order if self.owner[piece] == number]

    def parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Return the parameters of group `number` by name."""
        return {name: tensor for piece in self.members(number) for name, tensor in self._parameters_of(piece)}

    def norms(self, number: int) -> list[nn.Module]:
        """Return those modules of group `number` that are known to change as they run in training mode."""
        inner = {id(module): module for piece in self._pieces_of(number) for module in piece.modules()}
        return [module for module in inner.values() if keeps_statistics(module)]

    def with_buffers(self, number: int) -> list[nn.Module]:
        """Return those modules of group `number` that might change buffers as they run, whatever their mode.

        What a piece as a whole changes, it changes in any module inside it.
        """
        found: dict[int, nn.Module] = {}
        for piece in self._pieces_of(number):
            own = [one for one in piece.modules() if one._buffers and not isinstance(one, STILL_IN_EVALUATION)]
            found |= {id(one): one for one in ([piece, *own] if own else [])}
        return list(found.values())

    def _pieces_of(self, number: int) -> list[nn.Module]:
        return [self.modules[piece] for piece in self.members(number) if piece in self.modules]

    def owners(self) -> dict[int, dict[str, int | None]]:
        """Return for each parameter, by its id, all names it goes by and the group that each name belongs to."""
        found: dict[int, dict[str, int | None]] = {}
        for piece in self.order:
            for name, tensor in self._parameters_of(piece):
                found.setdefault(id(tensor), {})[name] = self.owner[piece]
        return found

    def loose(self) -> dict[str, nn.Parameter]:
        """Return the parameters that no module of a group or beside one holds."""
        return {name: tensor for name in self.order if name not in self.modules
                for _, tensor in self._parameters_of(name)}  # fmt: skip

    def _parameters_of(self, piece: str) -> Iterator[tuple[str, nn.Parameter]]:
        if piece not in self.modules:
            above, _, key = piece.rpartition(".")
            yield piece, self.modules[above]._parameters[key]  # type: ignore[misc]
            return
        for name, module in modules(self.modules[piece]).items():
            for key, tensor in own_parameters(module).items():
                yield ".".join(filter(None, (piece, name, key))), tensor

    def _owners(self) -> dict[str, int | None]:
        numbers, owner = {name: number for number, name in enumerate(self.names)}, {}
        upcoming: int | None = None
        for piece in reversed(self.order):
            upcoming = numbers.get(piece, upcoming)
            owner[piece] = upcoming
        for before, piece in pairwise(self.order):
            if piece not in numbers and piece in self.modules and not has_weights(self.modules[piece]):
                owner[piece] = owner[before]
        return owner


def find_groups(model: nn.Module) -> list[str]:
    """Return the names of the groups of a model for which none were named.

    Example:
        >>> find_groups(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
        ['0', '3']
    """
    known = modules(model)
    weighty = [name for name in layers(model) if has_weights(known[name])]
    if len(weighty) == 1 and weighty[0] and children(known[weighty[0]]):
        return [f"{weighty[0]}.{name}" for name in find_groups(known[weighty[0]])]  # a shell around one module
    listed = [name for name in weighty if name and isinstance(known[name.rpartition(".")[0]], CONTAINERS)]
    is_of_blocks = any(_is_block(known[name]) for name in listed)
    return listed if is_of_blocks else weighty


def named_groups(model: nn.Module, spec: Spec) -> list[str]:
    """Return the names of the modules that `spec` requests, none of them inside another."""
    names = choose(model, spec)
    for name in names:
        if split_call(name)[1] is not None:
            raise InvalidValue(
                f"{name!r} is one call of a layer, and its weights serve all calls; name the layer.", argument="layers"
            )
        inside = next((other for other in names if other != name and _is_inside(other, name)), None)
        if inside is not None:
            raise InvalidValue(f"group {inside!r} lies inside group {name!r}; name one of the two.", argument="layers")
    return names


def _require_hookable(model: nn.Module) -> None:
    for name, module in modules(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidValue(
                f"{layer_label(name) if name else 'the model'} is a ScriptModule, which takes no hooks and so can't be "
                "held still; train the module from which it was scripted or traced."
            )


def has_weights(module: nn.Module) -> bool:
    """Return whether `module` holds parameters that are not those of a norm."""
    return any(own_parameters(inner) for inner in modules(module).values() if not _is_norm(inner))


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether `module` changes as it runs in training mode: running statistics, or spectral norm's vectors."""
    running = any(getattr(module, key, None) is not None for key in ("running_mean", "running_var"))
    by_hook = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return running or by_hook or isinstance(module, _SpectralNorm)


def _is_norm(module: nn.Module) -> bool:
    return bool(NORM.search(type(module).__name__)) and not _is_block(module)


def _is_block(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in children(module).values())


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _pieces(known: dict[str, nn.Module], names: Sequence[str], name: str) -> Iterator[str]:
    """Yield the modules that are groups or enclose none, and the parameters on those that enclose some."""
    if name in names or not any(_is_inside(group, name) for group in names):
        yield name
        return
    joined: Callable[[str], str] = lambda key: f"{name}.{key}" if name else key  # noqa: E731
    yield from (joined(key) for key, tensor in known[name]._parameters.items() if tensor is not None)
    for key in [*_parametrized(known[name]), *children(known[name])]:
        yield from _pieces(known, names, joined(key))


def _parametrized(module: nn.Module) -> dict[str, nn.Module]:
    """Return what computes the parametrized weights of a module, by name in it."""
    lists = module.parametrizations.items() if is_parametrized(module) else ()  # type: ignore[operator,union-attr]
    return {f"parametrizations.{key}": one for key, one in lists}


def _with_parametrizations(known: dict[str, nn.Module], names: Sequence[str]) -> dict[str, nn.Module]:
    """Return all modules, and with those around groups what computes weights of theirs."""
    around = {
        name: one for name, one in known.items() if any(group != name and _is_inside(group, name) for group in names)
    }
    return known | {
        f"{name}.{key}".lstrip("."): one
        for name, module in around.items()
        for key, one in _parametrized(module).items()
    }


def _with_names_in_order(order: list[str], names: Sequence[str]) -> list[str]:
    """Return `order` with the groups in their own order, in the places where groups stand."""
    upcoming = iter(names)
    return [next(upcoming) if piece in names else piece for piece in order]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, where parameters can be frozen one by one."""
    inner = unwrapped(model)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InvalidValue(
                "`FullyShardedDataParallel` keeps parameters in flat shards, which cannot be frozen one by one; "
                "train with `DistributedDataParallel(model, find_unused_parameters=True)`."
            )
    return inner


class FirstStep:
    """Hooks that note, until `finish`, in which order a model's pieces run and on what each group depends.

    On what a group depends is read from the autograd graph of what goes into it: all parameters found there run before
    it. Compiled modules are not visible in it; then the order of registration is used.
    """

    def __init__(self, groups: LayerGroups):
        self.groups = groups
        self.seen: dict[str, None] = {}
        self.recomputed: set[str] = set()
        self.before: dict[str, list[Tensor]] = {}
        self._visited: set[Any] = set()
        pieces = [piece for piece in groups.order if piece in groups.modules]
        self._handles = [
            groups.modules[piece].register_forward_pre_hook(partial(self._called, piece), with_kwargs=True)
            for piece in pieces
        ]

    @property
    def has_seen(self) -> bool:
        """Whether the model has run; compiled code does not show it."""
        return bool(self.seen or self.recomputed)

    def close(self) -> None:
        """Take the hooks off the model and forget the graph."""
        for handle in self._handles:
            handle.remove()
        self._visited.clear()

    def finish(self) -> None:
        """Put the pieces in the order in which they ran, or refuse groups that did not run one after another."""
        self.close()
        names = self.groups.names
        absent = [name for name in names if name not in self.seen]
        if absent:
            raise ForwardError(self._why_absent(absent[0]))
        ran = [name for name in self.seen if name in names]
        if ran != list(names):
            raise ForwardError(f"the groups run in another order than they are frozen in; pass `layers={ran}`.")
        self.groups.reorder(self._order())
        self._require_frozen_first()

    def _called(self, piece: str, module: nn.Module, inputs: Any, keywords: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass: checkpointing computes it again
            self.recomputed.add(piece)
            return
        self.seen[piece] = None
        if piece in self.groups.names and piece not in self.before:
            self.before[piece] = list(self._upstream((inputs, keywords)))
        if len(self.before) == len(self.groups.names):
            self._visited.clear()

    def _upstream(self, values: Any) -> Iterator[Tensor]:
        """Yield the leaves of the graph of `values` that no group before had in its graph."""
        tensors = [leaf for _, leaf in leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
        yield from (tensor for tensor in tensors if tensor.grad_fn is None)
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while waiting:
            node: Any = waiting.pop()
            if node in self._visited:
                continue
            self._visited.add(node)
            if node.name() == "torch::autograd::AccumulateGrad":
                yield node.variable
            waiting.extend(following for following, _ in node.next_functions if following is not None)

    def _why_absent(self, name: str) -> str:
        if name in self.recomputed:
            return (
                f"group {name!r} is checkpointed with `use_reentrant=True`, which gives no gradients behind a frozen "
                "group; checkpoint with `use_reentrant=False`."
            )
        return f"group {name!r} did not run in the first training step; choose groups that always run."

    def _order(self) -> list[str]:
        """Return the pieces as they ran, each loose parameter before the first group that depends on it."""
        loose = {id(tensor): name for name, tensor in self.groups.loose().items()}
        order = [name for name, tensor in self.groups.loose().items() if not tensor.requires_grad]  # not in any graph
        for piece in self.seen:
            order += [loose[id(tensor)] for tensor in self.before.get(piece, []) if id(tensor) in loose]
            order.append(piece)
        return order + [piece for piece in self.groups.order if piece not in order]

    def _require_frozen_first(self) -> None:
        owners = self.groups.owners()
        for number, group in enumerate(self.groups.names):
            for tensor in self.before[group]:
                for name, owner in owners.get(id(tensor), {}).items():
                    if owner is None or owner > number:
                        raise ForwardError(
                            f"group {group!r} depends on {name!r}, which would still be trained when the group is "
                            "frozen; name groups with `layers=` such that each depends only on itself and those "
                            "before it."
                        )
