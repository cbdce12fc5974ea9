"""Units: what freeze training freezes one after the other, and what is frozen along with each.

A unit is named after one module. Where none are named they are found among the default layers: the blocks of a network
made of blocks (a residual network, a transformer), else every layer with weights that is no norm. All other modules go
with a unit, by the order in which they run:

- what has no weights, and norms, go with what runs just before them;
- other weights go with the next unit, since nothing before a frozen unit may be live. So the stem of a residual network
  is frozen with its first block. What runs after the last unit is never frozen.

A parameter that no layer holds, but the model itself or a module around the units, goes with the first unit that
depends on it. Until a training step has shown it, the order in which modules run is taken to be that of registration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from torch import nn

from netkin.errors import ValueFault
from netkin.representations.layers import Spec, children, choose, layers, modules, split_call, unwrapped

NORM = re.compile(r"norm(act)?(\dd)?$", re.IGNORECASE)  # BatchNorm2d, LayerNorm, LlamaRMSNorm, BatchNormAct2d, ...
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Units:
    """The units of a model in the order they run, and which piece of the model goes with which.

    A piece is a module, or a parameter that lies on a module around units; `order` holds their names as they run.
    """

    def __init__(self, model: nn.Module, spec: Spec = None):
        self.modules = modules(model)
        self.names = tuple(find_units(model) if spec is None else named_units(model, spec))
        self.order = _with_names_in_order(list(_pieces(self.modules, self.names, "")), self.names)
        self.owner = self._owners()

    def reorder(self, order: Sequence[str]) -> None:
        """Let the pieces go with units by another order in which they run."""
        self.order = list(order)
        self.owner = self._owners()

    def members(self, number: int) -> list[str]:
        """Return the names of the pieces that are frozen with unit `number`."""
        return [piece for piece in self.order if self.owner[piece] == number]

    def parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Return the parameters of unit `number` by name."""
        return {name: tensor for piece in self.members(number) for name, tensor in self._parameters_of(piece)}

    def norms(self, number: int) -> list[nn.Module]:
        """Return those modules of unit `number` that change as they run in training mode."""
        pieces = [self.modules[piece] for piece in self.members(number) if piece in self.modules]
        inner = {id(module): module for piece in pieces for module in piece.modules()}
        return [module for module in inner.values() if keeps_statistics(module)]

    def owners(self) -> dict[int, dict[str, int | None]]:
        """Return for each parameter, by its id, all names it goes by and the unit that each name belongs to."""
        found: dict[int, dict[str, int | None]] = {}
        for piece in self.order:
            for name, tensor in self._parameters_of(piece):
                found.setdefault(id(tensor), {})[name] = self.owner[piece]
        return found

    def loose(self) -> dict[str, nn.Parameter]:
        """Return the parameters that no module of a unit or beside one holds."""
        return {name: tensor for name in self.order if name not in self.modules
                for _, tensor in self._parameters_of(name)}  # fmt: skip

    def _parameters_of(self, piece: str) -> Iterator[tuple[str, nn.Parameter]]:
        if piece not in self.modules:
            above, _, key = piece.rpartition(".")
            yield piece, self.modules[above]._parameters[key]  # type: ignore[misc]
            return
        for name, module in modules(self.modules[piece]).items():
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    yield ".".join(filter(None, (piece, name, key))), tensor

    def _owners(self) -> dict[str, int | None]:
        numbers, owner = {name: number for number, name in enumerate(self.names)}, {}
        upcoming: int | None = None
        for piece in reversed(self.order):
            upcoming = numbers.get(piece, upcoming)
            owner[piece] = upcoming
        for before, piece in pairwise(self.order):
            if piece not in numbers and self._follows(piece):
                owner[piece] = owner[before]
        return owner

    def _follows(self, piece: str) -> bool:
        return piece in self.modules and not has_weights(self.modules[piece])


def find_units(model: nn.Module) -> list[str]:
    """Return the names of the units of a model for which none were named.

    Example:
        >>> find_units(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
        ['0', '3']
    """
    known = modules(model)
    weighty = [name for name in layers(model) if has_weights(known[name])]
    if len(weighty) == 1 and weighty[0] and children(known[weighty[0]]):
        return [f"{weighty[0]}.{name}" for name in find_units(known[weighty[0]])]  # a shell around one module
    listed = [name for name in weighty if name and isinstance(known[name.rpartition(".")[0]], CONTAINERS)]
    is_of_blocks = any(_is_block(known[name]) for name in listed)
    return listed if is_of_blocks else weighty


def named_units(model: nn.Module, spec: Spec) -> list[str]:
    """Return the names of the modules that `spec` asks for, none of them inside another."""
    names = choose(model, spec)
    for name in names:
        if split_call(name)[1] is not None:
            raise ValueFault(f"{name!r} is one call of a layer, and its weights serve all calls; name the layer.")
        inside = next((other for other in names if other != name and _is_inside(other, name)), None)
        if inside is not None:
            raise ValueFault(f"unit {inside!r} lies inside unit {name!r}; name one of the two.")
    return names


def has_weights(module: nn.Module) -> bool:
    """Tell whether `module` holds parameters that are not those of a norm."""
    return any(True for inner in module.modules() if not _is_norm(inner) for _ in inner.parameters(recurse=False))


def keeps_statistics(module: nn.Module) -> bool:
    """Tell whether `module` changes as it runs in training mode: running statistics, or spectral norm's vectors."""
    running = any(getattr(module, key, None) is not None for key in ("running_mean", "running_var"))
    return running or type(module).__name__ == "_SpectralNorm"


def _is_norm(module: nn.Module) -> bool:
    return bool(NORM.search(type(module).__name__)) and not _is_block(module)


def _is_block(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in children(module).values())


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _pieces(known: dict[str, nn.Module], names: Sequence[str], name: str) -> Iterator[str]:
    """Yield the modules that are units or enclose none, and the parameters on those that enclose some."""
    if name in names or not any(_is_inside(unit, name) for unit in names):
        yield name
        return
    joined: Callable[[str], str] = lambda key: f"{name}.{key}" if name else key  # noqa: E731
    yield from (joined(key) for key, tensor in known[name]._parameters.items() if tensor is not None)
    for key in children(known[name]):
        yield from _pieces(known, names, joined(key))


def _with_names_in_order(order: list[str], names: Sequence[str]) -> list[str]:
    """Return `order` with the units in their own order, in the places where units stand."""
    upcoming = iter(names)
    return [next(upcoming) if piece in names else piece for piece in order]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, where parameters can be frozen one by one."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueFault(
                "`FullyShardedDataParallel` keeps parameters in flat shards, which cannot be frozen one by one; "
                "train with `DistributedDataParallel(model, find_unused_parameters=True)`."
            )
    return unwrapped(model)
