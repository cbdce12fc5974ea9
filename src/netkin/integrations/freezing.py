"""Freeze training inside the training loops of others: callbacks for Lightning and for the Hugging Face `Trainer`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netkin.applications.freezing import FreezeTraining
from netkin.errors import FileFault, ValueFault
from netkin.integrations.packages import lightning_packages, needed

FILE = "freezing.pt"


def lightning_callback(schedule: str | Mapping[str, float] = "linear", **options: Any) -> Any:
    """Return a Lightning callback that freezes the LightningModule's units as training goes on.

    `options` are those of `FreezeTraining`; `steps` is what the trainer estimates unless it is given. `freezing` holds
    it once training has begun. Its state travels in Lightning's checkpoints. With several processes the strategy must
    be ``"ddp_find_unused_parameters_true"``.
    """
    return _lightning(lightning_packages("lightning_callback"))(schedule, options)


def trainer_callback(schedule: str | Mapping[str, float] = "linear", **options: Any) -> Any:
    """Return a `TrainerCallback` that freezes the units of the `Trainer`'s model as training goes on.

    `options` are those of `FreezeTraining`; `steps` is the Trainer's own number unless it is given. `freezing` holds it
    once training has begun. Its state is written beside each checkpoint, so that a run that is resumed goes on where it
    was.
    """
    return _hugging_face()(schedule, options)


class _Freezes:
    """A `FreezeTraining` that is made when training begins, as only then the model is known."""

    def __init__(self, schedule: Any, options: Mapping[str, Any]):
        self.schedule, self.options = schedule, dict(options)
        self.freezing: FreezeTraining | None = None

    def begin(self, model: nn.Module, steps: Any) -> FreezeTraining:
        """Look at the model for the first time."""
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


class _Hooks(_Freezes):
    """What the callback for Lightning does."""

    def __init__(self, schedule: Any, options: Mapping[str, Any]):
        super().__init__(schedule, options)
        self._restored: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        freezing = self.begin(trainer.strategy.model, trainer.estimated_stepping_batches)
        if self._restored:
            freezing.load_state_dict(self._restored)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.at(trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.freezing is None else self.freezing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # the model is not in its place yet

    def __reduce__(self) -> tuple[Any, ...]:
        # its class is made when it is needed, so pickle can't find it by name
        return lightning_callback, (self.schedule,), {"options": self.options}


class _Events(_Freezes):
    """What the callback for the Hugging Face Trainer does."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        _refuse_waiting(args, model)
        freezing, saved = self.begin(model, state.max_steps), _file(args, state)
        if saved.exists():
            freezing.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        elif state.global_step and self.schedule == "similarity":
            raise FileFault(f"{str(saved)!r} is missing, and without it what was frozen is unknown; begin anew.")
        self.at(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.at(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _file(args, state)
        if self.freezing is not None and state.is_world_process_zero and path.parent.is_dir():
            torch.save(self.freezing.state_dict(), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.end()


@functools.cache
def _lightning(packages: tuple[str, ...]) -> Any:
    bases = [needed(name, "lightning", "lightning_callback").Callback for name in packages]
    return type("FreezeTrainingCallback", (_Hooks, *bases), {"__module__": __name__, "__doc__": _Hooks.__doc__})


@functools.cache
def _hugging_face() -> Any:
    base = needed("transformers", "hf", "trainer_callback").TrainerCallback
    return type("FreezeTrainingCallback", (_Events, base), {"__module__": __name__, "__doc__": _Events.__doc__})


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE


def _refuse_waiting(args: Any, model: Any) -> None:
    """Refuse several processes whose wrapper would wait for the gradients of frozen parameters."""
    looks = args.ddp_find_unused_parameters
    if looks is None:  # the Trainer's own default
        looks = not (args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False))
    waits = not looks or getattr(args, "ddp_static_graph", None)  # which older versions do not have
    if args.parallel_mode.value == "distributed" and waits:
        raise ValueFault(
            "with several processes the Trainer would wait for the gradients of frozen parameters; pass "
            "`ddp_find_unused_parameters=True` and no static graph in its arguments."
        )
