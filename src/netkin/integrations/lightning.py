"""Lightning: a callback that records learning dynamics, for `lightning.pytorch` and `pytorch_lightning` alike."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.errors import MissingExtra
from netkin.integrations.late_recorder import LateRecorder
from netkin.integrations.packages import needed

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def dynamics_callback(
    probe: Any, *, model: str | Callable[[nn.Module], nn.Module] | None = None, log: bool = True, **options: Any
) -> Any:
    """Return a Lightning callback whose `recorder` probes before training, after each epoch and at the end.

    `options` are those of `DynamicsRecorder`, where `every` counts optimizer steps instead of epochs. By default the
    LightningModule itself is run; `model` names the attribute that holds the network, or is a function that finds it.
    With `log` the numbers also go to the trainer's own loggers. Probes travel in Lightning's checkpoints, so that a run
    that is resumed goes on where it was.
    """
    return _kind(_packages())(LateRecorder(probe, model, options), log)


class _Hooks:
    """What the callback does, whichever package it is for."""

    def __init__(self, recording: LateRecorder, log: bool):
        self.recording, self.log = recording, log
        self._restored: dict[str, Any] = {}

    @property
    def recorder(self) -> DynamicsRecorder | None:
        """The recorder, once training has begun."""
        return self.recording.recorder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        logs = [functools.partial(_to_loggers, trainer)] if self.log else []
        self.recording.begin(pl_module, logs, self._restored, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.recording.step(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.recording.epoch(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.recording.end(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return self.recording.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # the model is not in its place yet

    def __reduce__(self) -> tuple[Any, ...]:
        # its class is made when it is needed, so pickle can't find it by name
        return _rebuilt, (_packages(), self.recording, self.log)


def _packages() -> tuple[str, ...]:
    """Return the packages whose trainer may call us: those imported already, else the first that can be."""
    imported = tuple(name for name in PACKAGES if sys.modules.get(name) is not None)
    if imported:
        return imported
    try:
        needed(PACKAGES[0], "lightning", "dynamics_callback")
    except MissingExtra as missing:
        try:
            needed(PACKAGES[1], "lightning", "dynamics_callback")
        except MissingExtra:
            raise missing from None
        return PACKAGES[1:]
    return PACKAGES[:1]


@functools.cache
def _kind(packages: tuple[str, ...]) -> Any:
    bases = [needed(name, "lightning", "dynamics_callback").Callback for name in packages]
    return type("DynamicsCallback", (_Hooks, *bases), {"__module__": __name__, "__doc__": _Hooks.__doc__})


def _rebuilt(packages: tuple[str, ...], recording: LateRecorder, log: bool) -> Any:
    return _kind(packages)(recording, log)


def _to_loggers(trainer: Any, step: int, values: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step)
