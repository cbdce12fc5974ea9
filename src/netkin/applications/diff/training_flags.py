"""Training flags: modules that train in one model and not in the other, which may be all that parts them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from netkin.errors import InvalidValue
from netkin.representations.layers import modules
from netkin.results.diff import ArgumentDiff


def training_alone(
    a: nn.Module, b: nn.Module, names: Mapping[str, str]
) -> tuple[list[nn.Module], tuple[ArgumentDiff, ...]]:
    """Return the modules that train while their counterparts don't, and how to say it.

    Dropout that is on in one model alone is refused, as it would hide all else.
    """
    mine, theirs = modules(a), modules(b)
    pairs = {name: (mine[name], theirs[other]) for name, other in names.items()}
    apart = {
        name: pair for name, pair in pairs.items() if pair[0].training != pair[1].training and any(map(_heeds, pair))
    }
    alone = [module for pair in apart.values() for module in pair if module.training]
    for name, pair in apart.items():
        side, module = next((side, module) for side, module in zip("ab", pair, strict=True) if module.training)
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise InvalidValue(
                f"dropout is on in {side} ({name!r}, p = {module.p:g}) and off in the other model, which hides all "
                f"other differences; call `{side}.eval()`, or train both, which are then both run in evaluation mode.",
                argument=side,
            )
    differences = (
        ArgumentDiff(name="training", module=name, how=f"{first.training} and {second.training}")
        for name, (first, second) in apart.items()
    )
    return alone, tuple(differences)


def _heeds(module: nn.Module) -> bool:
    """Return whether what a module computes depends on its flag, as its code says."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or "training" in code.co_names


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is in another, by their names."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@contextmanager
def training(alone: list[nn.Module]) -> Iterator[None]:
    """Inside the `with`, which lies in one that evaluates and puts flags back, some modules train.

    What they note meanwhile, such as a batch norm's running mean, is put back.
    """
    buffers = [buffer for module in alone for buffer in module.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        for module in alone:
            module.training = True
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
