"""Hugging Face: callbacks for the `Trainer` that record dynamics, freeze layers, or add the CKA sparsity loss."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.dynamics import DynamicsRecorder
from netkin.applications.dynamics.recorder import read
from netkin.applications.sparsity import CKASparsityLoss
from netkin.errors import FileError, InvalidValue, import_optional
from netkin.integrations.training_loops import LateFreezing, LateRecorder, with_term

DYNAMICS, FREEZING, SPARSITY = "dynamics.netkin", "freezing.pt", "sparsity_loss.json"  # beside each checkpoint


def dynamics_callback(
    probe: Any, *, model: str | Callable[[nn.Module], nn.Module] | None = None, **options: Any
) -> Any:
    """Return a `TrainerCallback` whose `recorder` probes before training, after each epoch and at the end.

    `options` are those of `DynamicsRecorder`, where `every` counts optimizer steps instead of epochs. `model` names the
    attribute of the trained model to probe, or is a function that finds it. Probes are written beside each checkpoint
    that the Trainer saves, so that a resumed run continues where it stopped.
    """
    return _class("DynamicsCallback", _DynamicsEvents, "dynamics_callback")(LateRecorder(probe, model, options))


def freezing_callback(schedule: str | Mapping[str, float] = "linear", **options: Any) -> Any:
    """Return a `TrainerCallback` that freezes the layer groups of the `Trainer`'s model during training.

    `options` are those of `FreezeTraining`; `steps` is the Trainer's own number unless it is given. `freezing` holds it
    once training has begun. Its state is written beside each checkpoint, so that a run that is resumed goes on where it
    was.
    """
    return _class("FreezeTrainingCallback", _FreezingEvents, "freezing_callback")(schedule, options)


def sparsity_callback(**options: Any) -> Any:
    """Return a `TrainerCallback` that adds the CKA sparsity loss to the loss that the `Trainer`'s model returns.

    `options` are those of `CKASparsityLoss`. `penalty` holds the loss once training has begun. Its state is written
    beside each checkpoint, so that a resumed run continues where it stopped.
    """
    return _class("SparsityLossCallback", _SparsityEvents, "sparsity_callback")(options)


class _DynamicsEvents:
    """Records learning dynamics while the Trainer trains."""

    def __init__(self, recording: LateRecorder):
        self.recording = recording

    @property
    def recorder(self) -> DynamicsRecorder | None:
        """The recorder, once training has begun."""
        return self.recording.recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        saved = _checkpoint_file(args, state, DYNAMICS)
        self.recording.begin(model, [], read(saved) if saved.exists() else {}, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.epoch(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _checkpoint_file(args, state, DYNAMICS)
        if self.recorder is not None and path.parent.is_dir():
            self.recorder.save(path, overwrite=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.recording.end(state.global_step)


class _FreezingEvents(LateFreezing):
    """Freezes groups of layers while the Trainer trains."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        _require_unused_allowed(args, model)
        freezing, saved = self.begin(model, state.max_steps), _checkpoint_file(args, state, FREEZING)
        if saved.exists():
            freezing.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        elif state.global_step and self.schedule == "similarity":
            raise FileError(
                f"{str(saved)!r} is missing, and without it what was frozen is unknown; train from the start, without "
                "`resume_from_checkpoint`."
            )
        self.at(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.at(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _checkpoint_file(args, state, FREEZING)
        if self.freezing is not None and state.is_world_process_zero and path.parent.is_dir():
            torch.save(self.freezing.state_dict(), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.end()


class _SparsityEvents:
    """Adds the CKA sparsity loss while the Trainer trains."""

    def __init__(self, options: Mapping[str, Any]):
        self.options = dict(options)
        self.penalty: CKASparsityLoss | None = None
        self._handle: Any = None
        self._unused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._end()  # of a training that was interrupted, which the Trainer does not report
        self.penalty = CKASparsityLoss(model, **self.options)
        self._handle = self.penalty.model.register_forward_hook(functools.partial(self._add, args), with_kwargs=True)
        path = _checkpoint_file(args, state, SPARSITY)
        if path.exists():
            self.penalty.load_state_dict(json.loads(path.read_text()))
        elif state.global_step:
            raise FileError(
                f"{str(path)!r} is missing, and without it the batches so far are unknown; train from the start, "
                "without `resume_from_checkpoint`."
            )

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._require_used_loss()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._require_used_loss()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _checkpoint_file(args, state, SPARSITY)
        if self.penalty is not None and state.is_world_process_zero and path.parent.is_dir():
            path.write_text(json.dumps(self.penalty.state_dict()))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end()

    def _end(self) -> None:
        self._unused = False
        if self.penalty is not None:
            self._handle.remove()
            self.penalty.close()

    def _add(self, args: Any, model: nn.Module, inputs: Any, keywords: Mapping[str, Any], output: Any) -> Any:
        """Return the model's output with the term added to its loss."""
        if not torch.is_grad_enabled() or self.penalty is None:
            return None
        term = self.penalty.term()
        if keywords.get("num_items_in_batch") is not None:
            # such a loss is a share of that of all parts of a batch, which the Trainer adds up and does not divide
            term = term / args.gradient_accumulation_steps
            term = term / (args.world_size if args.average_tokens_across_devices else 1)
        if term.requires_grad:
            self._unused = True
            term.register_hook(self._use)
        return with_term(output, term)

    def _use(self, gradient: Tensor) -> None:
        self._unused = False

    def _require_used_loss(self) -> None:
        if self._unused:
            raise InvalidValue(
                "the Trainer does not use the loss that the model returns, to which the CKA sparsity loss was added; "
                "add `term()` of a `CKASparsityLoss` to yours in `compute_loss`."
            )


def _checkpoint_file(args: Any, state: Any, name: str) -> Path:
    """Return the path of a file beside the checkpoint that the Trainer writes at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / name


@functools.cache
def _class(name: str, events: type, what: str) -> Any:
    """Return the class of a callback, made when it is used."""
    base = import_optional("transformers", "hf", what).TrainerCallback
    return type(name, (events, base), {"__module__": __name__, "__doc__": events.__doc__})


def _require_unused_allowed(args: Any, model: Any) -> None:
    """Refuse several processes whose wrapper would wait for the gradients of frozen parameters."""
    looks = args.ddp_find_unused_parameters
    if looks is None:  # the Trainer's own default
        looks = not (args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False))
    waits = not looks or getattr(args, "ddp_static_graph", None)  # which older versions do not have
    if args.parallel_mode.value == "distributed" and waits:
        raise InvalidValue(
            "with several processes the Trainer would wait for the gradients of frozen parameters; pass "
            "`ddp_find_unused_parameters=True` and no static graph in its arguments."
        )
