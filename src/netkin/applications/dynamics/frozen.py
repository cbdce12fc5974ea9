"""Frozen: parts of a model that are held still, and let go again as they were."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn


class Frozen:
    """Parameters that get no gradients and norms that stay in evaluation mode, until `release`.

    An optimizer passes over parameters without a gradient: it neither moves them nor updates what it keeps for them.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[nn.Parameter, bool]] = {}
        self._norms: dict[int, tuple[nn.Module, Any]] = {}

    def add(self, parameters: Iterable[nn.Parameter], norms: Iterable[nn.Module]) -> None:
        """Hold these too."""
        for parameter in parameters:
            self._parameters.setdefault(id(parameter), (parameter, parameter.requires_grad))
            parameter.requires_grad_(False)
            parameter.grad = None
        for norm in norms:
            if id(norm) not in self._norms:
                self._norms[id(norm)] = (norm, vars(norm).get("train"))
                _still(norm)

    def release(self) -> None:
        """Give parameters their flags back, and norms the mode that `train` or `eval` asked for last."""
        for parameter, flag in self._parameters.values():
            parameter.requires_grad_(flag)
        for norm, train in self._norms.values():
            _moving(norm, train)
        self._parameters.clear()
        self._norms.clear()


class _Asked:
    """The training mode that a held module would have."""

    def __init__(self, mode: bool):
        self.mode = mode


def _still(norm: nn.Module) -> None:
    # not a hook, which compiled code would not see; a partial, so that the model can still be copied and pickled
    vars(norm)["train"] = partial(_stay, norm, _Asked(norm.training))
    norm.training = False


def _stay(norm: nn.Module, asked: _Asked, mode: bool = True) -> nn.Module:
    """Stand in for ``norm.train(mode)``: note what was asked for, and stay in evaluation mode."""
    asked.mode = mode
    norm.training = False
    return norm


def _moving(norm: nn.Module, train: Any) -> None:
    norm.training = vars(norm).pop("train").args[1].mode
    if train is not None:
        vars(norm)["train"] = train
