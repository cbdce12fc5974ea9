"""What the adapters share: packages that are imported when they are used, and helpers that need the model first."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.applications.freezing import FreezeTraining
from netkin.errors import MissingExtra, UnknownName, ValueFault

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module of an optional package, or refuse with the name of the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingExtra(f"{what} needs {module!r} ({fault}); `pip install 'netkin[{extra}]'` brings it.") from fault


def lightning_packages(what: str) -> tuple[str, ...]:
    """Return the packages whose trainer may call us: those imported already, else the first that can be."""
    imported = tuple(name for name in LIGHTNING if sys.modules.get(name) is not None)
    if imported:
        return imported
    try:
        needed(LIGHTNING[0], "lightning", what)
    except MissingExtra as missing:
        try:
            needed(LIGHTNING[1], "lightning", what)
        except MissingExtra:
            raise missing from None
        return LIGHTNING[1:]
    return LIGHTNING[:1]


def checkpoint_file(args: Any, state: Any, name: str) -> Path:
    """Return the path of a file beside the checkpoint that the Hugging Face Trainer writes at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / name


class LateRecorder:
    """A recorder that is made when training begins, as only then the model is known.

    `options` are those of `DynamicsRecorder`; its `every` counts optimizer steps, None means once an epoch.
    """

    def __init__(self, probe: Any, model: str | Callable[[nn.Module], nn.Module] | None, options: Mapping[str, Any]):
        self.probe, self.model, self.options = probe, model, dict(options)
        self.recorder: DynamicsRecorder | None = None

    def begin(self, trained: nn.Module, logs: list[Any], state: Mapping[str, Any], step: int) -> None:
        """Make the recorder, restore `state` up to `step`, and probe the model before training."""
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
        """Probe a last time, and finish the logs."""
        self.look(step)
        if self.recorder is not None:
            self.recorder.finish()

    def look(self, step: int, anyway: bool = True) -> None:
        """Probe unless this step has been probed: several batches may make one step."""
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


class LateFreezing:
    """A `FreezeTraining` that is made when training begins, as only then the model is known."""

    def __init__(self, schedule: Any, options: Mapping[str, Any]):
        self.schedule, self.options = schedule, dict(options)
        self.freezing: FreezeTraining | None = None

    def begin(self, model: nn.Module, steps: Any) -> FreezeTraining:
        """Probe the model for the first time."""
        self.freezing = FreezeTraining(model, self.schedule, **{"steps": steps, **self.options})
        return self.freezing

    def at(self, done: int) -> None:
        """Freeze what is due; several batches may make one step."""
        if self.freezing is not None and done > self.freezing.done:
            self.freezing.at(done)

    def end(self) -> None:
        """Give the model back."""
        if self.freezing is not None:
            self.freezing.close()


def with_term(output: Any, term: Tensor) -> Any:
    """Return what a model or a training step gave, with the term added to its loss."""
    if isinstance(output, Tensor):
        return output + term
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        return (output[0] + term, *output[1:])
    if isinstance(output, Mapping) and output.get("loss") is not None:
        changed: Any = output.copy() if hasattr(output, "copy") else dict(output)
        changed["loss"] = output["loss"] + term
        return changed
    raise ValueFault(
        "the model returns no loss to which the CKA sparsity loss could be added, as under label smoothing or "
        "`compute_loss_func`; add `term()` of a `CKASparsityLoss` to yours."
    )
