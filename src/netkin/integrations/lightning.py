"""Lightning: callbacks that record learning dynamics, freeze layers, or add the CKA sparsity loss.

They work with `lightning.pytorch` and with `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.applications.sparsity import CKASparsityLoss
from netkin.errors import InvalidValue, MissingExtra, UnknownName, import_optional
from netkin.integrations.training_loops import LateFreezing, LateRecorder, with_term

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def dynamics_callback(
    probe: Any, *, model: str | Callable[[nn.Module], nn.Module] | None = None, log: bool = True, **options: Any
) -> Any:
    """Return a Lightning callback whose `recorder` probes before training, after each epoch and at the end.

    `options` are those of `DynamicsRecorder`, where `every` counts optimizer steps instead of epochs. By default the
    LightningModule itself is run; `model` names the attribute that holds the network, or is a function that finds it.
    With `log` the numbers also go to the trainer's own loggers. Probes travel in Lightning's checkpoints, so that a run
    that is resumed continues where it stopped.
    """
    return _rebuilt(_packages("dynamics_callback"), LateRecorder(probe, model, options), log)


def freezing_callback(schedule: str | Mapping[str, float] = "linear", **options: Any) -> Any:
    """Return a Lightning callback that freezes the layer groups of the LightningModule during training.

    `options` are those of `FreezeTraining`; `steps` is what the trainer estimates unless it is given. `freezing` holds
    it once training has begun. Its state travels in Lightning's checkpoints. With several processes the strategy must
    be ``"ddp_find_unused_parameters_true"``.
    """
    return _class("FreezeTrainingCallback", _FreezingHooks, _packages("freezing_callback"))(schedule, options)


def sparsity_callback(*, model: str | None = None, **options: Any) -> Any:
    """Return a Lightning callback that adds the CKA sparsity loss to what `training_step` returns.

    `options` are those of `CKASparsityLoss`, and `model` names the attribute that holds the network, by default the
    LightningModule itself. `penalty` holds the loss once training has begun. Its state travels in Lightning's
    checkpoints.
    """
    return _class("SparsityLossCallback", _SparsityHooks, _packages("sparsity_callback"))(model, options)


class _DynamicsHooks:
    """Records learning dynamics while Lightning trains."""

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
        return _rebuilt, (_packages("dynamics_callback"), self.recording, self.log)


class _FreezingHooks(LateFreezing):
    """Freezes groups of layers while Lightning trains."""

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
        return freezing_callback, (self.schedule,), {"options": self.options}


class _SparsityHooks:
    """Adds the CKA sparsity loss while Lightning trains."""

    def __init__(self, model: str | None, options: Mapping[str, Any]):
        self.model, self.options = model, dict(options)
        self.penalty: CKASparsityLoss | None = None
        self._restored: dict[str, Any] = {}
        self._module: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise InvalidValue(
                "under manual optimization Lightning takes no loss of `training_step`; add `term()` of a "
                "`CKASparsityLoss` to yours."
            )
        watched = pl_module if self.model is None else getattr(pl_module, self.model, None)
        if not isinstance(watched, nn.Module):
            raise UnknownName(f"`model={self.model!r}` finds no module in {type(pl_module).__name__}.")
        self.penalty = CKASparsityLoss(watched, **self.options)
        if self._restored:
            self.penalty.load_state_dict(self._restored)
        if self.model is None:
            self.penalty.count_by_hand()  # Lightning calls `training_step`, and never the module itself
        self._module = pl_module
        pl_module.training_step = _penalised(pl_module.training_step, self.penalty, self.model is None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return self._restored if self.penalty is None else self.penalty.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # the model is not in its place yet

    def _end(self) -> None:
        if self._module is not None and self.penalty is not None:
            self.penalty.close()
            vars(self._module).pop("training_step", None)
            self._module = None

    def __reduce__(self) -> tuple[Any, ...]:
        # its class is made when it is needed, so pickle can't find it by name
        return functools.partial(sparsity_callback, model=self.model, **self.options), ()


def _penalised(step: Callable[..., Any], penalty: CKASparsityLoss, by_hand: bool) -> Callable[..., Any]:
    """Return a `training_step` whose loss has the term added."""

    @functools.wraps(step)
    def with_penalty(*args: Any, **keywords: Any) -> Any:
        if by_hand:
            penalty.begin_batch()
        output = step(*args, **keywords)
        return None if output is None else with_term(output, penalty.term())

    return with_penalty


def _packages(what: str) -> tuple[str, ...]:
    """Return the packages whose trainer may call us: those imported already, else the first that can be."""
    imported = tuple(name for name in PACKAGES if sys.modules.get(name) is not None)
    if imported:
        return imported
    try:
        import_optional(PACKAGES[0], "lightning", what)
    except MissingExtra as missing:
        try:
            import_optional(PACKAGES[1], "lightning", what)
        except MissingExtra:
            raise missing from None
        return PACKAGES[1:]
    return PACKAGES[:1]


@functools.cache
def _class(name: str, hooks: type, packages: tuple[str, ...]) -> Any:
    """Return the class of a callback, which each of the packages takes for its own; checkpoints know it by its name."""
    bases = [import_optional(package, "lightning", name).Callback for package in packages]
    return type(name, (hooks, *bases), {"__module__": __name__, "__doc__": hooks.__doc__})


def _rebuilt(packages: tuple[str, ...], recording: LateRecorder, log: bool) -> Any:
    return _class("DynamicsCallback", _DynamicsHooks, packages)(recording, log)


def _to_loggers(trainer: Any, step: int, values: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step)
