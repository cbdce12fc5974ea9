"""Runs: trained networks with their states on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from netkin.sources.architectures import seeded
from netkin.training import Record

PARTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.9, 1.0)  # of the training time: where runs are kept


@dataclass(frozen=True)
class Run:
    """A trained network with its states on the way and a record of each epoch."""

    model: nn.Module
    checkpoints: Mapping[int, Mapping[str, Tensor]]
    history: list[Record]
    build: Callable[[], nn.Module]

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end."""
        return self.history[-1]["accuracy"]

    def at(self, step: int) -> nn.Module:
        """Return the network as it was after `step` updates, in evaluation mode, where the final one lies."""
        model = seeded(self.build)  # which takes no random numbers
        model.load_state_dict(dict(self.checkpoints[step]))
        return model.eval().to(next(self.model.parameters()).device)

    def untrained(self) -> nn.Module:
        """Return the network as it was before training."""
        return self.at(min(self.checkpoints))


class Keeping:
    """A hook that keeps the states of a training at some of its steps, by step."""

    def __init__(self, total: int):
        self.settings = self.wanted = sorted({round(part * total) for part in PARTS})
        self.kept: dict[str, dict[str, Tensor]] = {}

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Keep the first state."""
        self.after_step(model, 0)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Keep the state if it is wanted."""
        if step in self.wanted and str(step) not in self.kept:
            self.kept[str(step)] = {key: value.cpu().clone() for key, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept so far."""
        return dict(self.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was kept."""
        self.kept = dict(state)
