"""Lightning: a callback that records learning dynamics, for `lightning.pytorch` and `pytorch_lightning` alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.integrations.late_recorder import LateRecorder
from netkin.integrations.packages import lightning_packages, needed


def dynamics_callback(
    probe: Any, *, model: str | Callable[[nn.Module], nn.Module] | None = None, log: bool = True, **options: Any
) -> Any:
    """Return a Lightning callback whose `recorder` probes before training, after each epoch and at the end.

    `options` are those of `DynamicsRecorder`, where `every` counts optimizer steps instead of epochs. By default the
    LightningModule itself is run; `model` names the attribute that holds the network, or is a function that finds it.
    With `log` the numbers also go to the trainer's own loggers. Probes travel in Lightning's checkpoints, so that a run
    that is resumed goes on where it was.
    """
    return _kind(lightning_packages("dynamics_callback"))(LateRecorder(probe, model, options), log)


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
        return _rebuilt, (lightning_packages("dynamics_callback"), self.recording, self.log)


@functools.cache
def _kind(packages: tuple[str, ...]) -> Any:
    bases = [needed(name, "lightning", "dynamics_callback").Callback for name in packages]
    return type("DynamicsCallback", (_Hooks, *bases), {"__module__": __name__, "__doc__": _Hooks.__doc__})


def _rebuilt(packages: tuple[str, ...], recording: LateRecorder, log: bool) -> Any:
    return _kind(packages)(recording, log)


def _to_loggers(trainer: Any, step: int, values: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step)
