"""Hugging Face: a callback for the `Trainer` of `transformers` that records learning dynamics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.applications.dynamics.recordings import read
from netkin.integrations.late_recorder import LateRecorder
from netkin.integrations.packages import needed

FILE = "dynamics.netkin"


def dynamics_callback(
    probe: Any, *, model: str | Callable[[nn.Module], nn.Module] | None = None, **options: Any
) -> Any:
    """Return a `TrainerCallback` whose `recorder` probes before training, after each epoch and at the end.

    `options` are those of `DynamicsRecorder`, where `every` counts optimizer steps instead of epochs. `model` names the
    attribute of the trained model to look at, or is a function that finds it. Probes are written beside each checkpoint
    that the Trainer saves, so that a run that is resumed goes on where it was.
    """
    return _kind()(LateRecorder(probe, model, options))


class _Events:
    """What the callback does."""

    def __init__(self, recording: LateRecorder):
        self.recording = recording

    @property
    def recorder(self) -> DynamicsRecorder | None:
        """The recorder, once training has begun."""
        return self.recording.recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        saved = _file(args, state)
        self.recording.begin(model, [], read(saved) if saved.exists() else {}, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.epoch(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _file(args, state)
        if self.recorder is not None and path.parent.is_dir():
            self.recorder.save(path)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.end(state.global_step)


@functools.cache
def _kind() -> Any:
    base = needed("transformers", "hf", "dynamics_callback").TrainerCallback
    return type("DynamicsCallback", (_Events, base), {"__module__": __name__, "__doc__": _Events.__doc__})


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
