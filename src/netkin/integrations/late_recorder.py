"""Training loops of others: what the callbacks for Lightning and the Hugging Face Trainer share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.errors import UnknownName


class LateRecorder:
    """A recorder that is made when training begins, as only then the model is known.

    `options` are those of `DynamicsRecorder`; its `every` counts optimizer steps, None means once an epoch.
    """

    def __init__(self, probe: Any, model: str | Callable[[nn.Module], nn.Module] | None, options: Mapping[str, Any]):
        self.probe, self.model, self.options = probe, model, dict(options)
        self.recorder: DynamicsRecorder | None = None

    def begin(self, trained: nn.Module, logs: list[Any], state: Mapping[str, Any], step: int) -> None:
        """Make the recorder, go on from `state` up to `step`, and look at the model before it learns."""
        self.recorder = DynamicsRecorder(self._inside(trained), self.probe, **self.options)
        self.recorder.logs += logs
        self.recorder.load_state_dict(state)
        self.recorder.forget(after=step)
        self.look(step)

    def step(self, step: int) -> None:
        """Probe after an optimizer step, if `every` counts steps and it is time."""
        if self.options.get("every") is not None:
            self.look(step, anyway=False)

    def epoch(self, step: int) -> None:
        """Probe after an epoch, unless `every` counts steps."""
        if self.options.get("every") is None:
            self.look(step)

    def end(self, step: int) -> None:
        """Look a last time, and tell the logs."""
        self.look(step)
        if self.recorder is not None:
            self.recorder.finish()

    def look(self, step: int, anyway: bool = True) -> None:
        """Probe unless this step has been looked at: several batches may make one step."""
        if self.recorder is not None and step not in self.recorder.steps[-1:]:
            self.recorder.probe(step, anyway=anyway)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {} if self.recorder is None else self.recorder.state_dict()

    def _inside(self, trained: nn.Module) -> nn.Module:
        if self.model is None:
            return trained
        found = getattr(trained, self.model, None) if isinstance(self.model, str) else self.model(trained)
        if not isinstance(found, nn.Module):
            raise UnknownName(f"`model={self.model!r}` finds no module in {type(trained).__name__}.")
        return found
