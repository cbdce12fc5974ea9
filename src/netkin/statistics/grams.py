"""`Grams`: what measures read of mini-batch Gram matrices, and what they ask of their collector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from netkin.arrays import paired
from netkin.statistics.collector import Settings

DEFAULTS = {"batch": 128, "kernel": "linear", "fraction": 0.4}  # of measures that have no such parameter


@dataclass(frozen=True, eq=False)
class Grams:
    """A pair of layers: HSIC₁ of the two and of each with itself, the mean over mini-batches of `batch` examples.

    A mini-batch of m examples has the weight m(m - 3).
    """

    cross: Tensor
    x: Tensor
    y: Tensor
    batch: int
    batches: int
    left_out: int

    collectors: ClassVar[tuple[Any, ...]] = ()

    @classmethod
    def of(cls, X: Any, Y: Any, *, batch: int = 128, kernel: str = "linear", fraction: float = 0.4) -> Grams:
        """Return the statistic of two matrices cut into mini-batches in the order of their rows."""
        X, Y = paired(X, Y)
        (kind,) = cls.collectors
        return kind.of({"X": X, "Y": Y}, batch=batch, kernel=kernel, fraction=fraction)["X", "Y"]

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mini-batches and the kernel that a measure asks for, where its parameters say."""
        return {name: settings.get(name, default) for name, default in DEFAULTS.items()}

    def caution(self, facts: Any, settings: Mapping[str, Any]) -> str:
        """Return an empty string: mini-batches are not inflated by few examples."""
        return ""


@dataclass(frozen=True)
class GramSettings(Settings):
    """The size of a mini-batch, and the kernel; mini-batches of one size can't stand for those of another."""

    batch: int = 128
    kernel: str = "linear"
    fraction: float = 0.4
