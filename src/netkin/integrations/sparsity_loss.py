"""The CKA sparsity loss inside the training loops of others: callbacks for Lightning and the Hugging Face `Trainer`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.sparsity import CKASparsityLoss
from netkin.errors import FileFault, UnknownName, ValueFault
from netkin.integrations.packages import lightning_packages, needed

FILE = "sparsity_loss.json"


def lightning_callback(*, model: str | None = None, **options: Any) -> Any:
    """Return a Lightning callback that adds the CKA sparsity loss to what `training_step` returns.

    `options` are those of `CKASparsityLoss`, and `model` names the attribute that holds the network, by default the
    LightningModule itself. `penalty` holds the loss once training has begun. Its state travels in Lightning's
    checkpoints.
    """
    return _lightning(lightning_packages("lightning_callback"))(model, options)


def trainer_callback(**options: Any) -> Any:
    """Return a `TrainerCallback` that adds the CKA sparsity loss to the loss that the `Trainer`'s model returns.

    `options` are those of `CKASparsityLoss`. `penalty` holds the loss once training has begun. Its state is written
    beside each checkpoint, so that a run that is resumed goes on where it was.
    """
    return _hugging_face()(options)


class _Hooks:
    """What the callback for Lightning does."""

    def __init__(self, model: str | None, options: Mapping[str, Any]):
        self.model, self.options = model, dict(options)
        self.penalty: CKASparsityLoss | None = None
        self._restored: dict[str, Any] = {}
        self._module: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise ValueFault(
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
        return functools.partial(lightning_callback, model=self.model, **self.options), ()


class _Events:
    """What the callback for the Hugging Face Trainer does."""

    def __init__(self, options: Mapping[str, Any]):
        self.options = dict(options)
        self.penalty: CKASparsityLoss | None = None
        self._handle: Any = None
        self._unused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._end()  # of a training that was interrupted, which the Trainer does not tell
        self.penalty = CKASparsityLoss(model, **self.options)
        self._handle = self.penalty.model.register_forward_hook(functools.partial(self._add, args), with_kwargs=True)
        path = _file(args, state)
        if path.exists():
            self.penalty.load_state_dict(json.loads(path.read_text()))
        elif state.global_step:
            raise FileFault(f"{str(path)!r} is missing, and without it the batches so far are unknown; begin anew.")

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._refuse_unused()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._refuse_unused()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = _file(args, state)
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
        return _with_term(output, term)

    def _use(self, gradient: Tensor) -> None:
        self._unused = False

    def _refuse_unused(self) -> None:
        if self._unused:
            raise ValueFault(
                "the Trainer does not use the loss that the model returns, to which the CKA sparsity loss was added; "
                "add `term()` of a `CKASparsityLoss` to yours in `compute_loss`."
            )


def _penalised(step: Callable[..., Any], penalty: CKASparsityLoss, by_hand: bool) -> Callable[..., Any]:
    """Return a `training_step` whose loss has the term added."""

    @functools.wraps(step)
    def with_penalty(*args: Any, **keywords: Any) -> Any:
        if by_hand:
            penalty.begin_batch()
        output = step(*args, **keywords)
        return None if output is None else _with_term(output, penalty.term())

    return with_penalty


def _with_term(output: Any, term: Tensor) -> Any:
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


@functools.cache
def _lightning(packages: tuple[str, ...]) -> Any:
    bases = [needed(name, "lightning", "lightning_callback").Callback for name in packages]
    return type("SparsityLossCallback", (_Hooks, *bases), {"__module__": __name__, "__doc__": _Hooks.__doc__})


@functools.cache
def _hugging_face() -> Any:
    base = needed("transformers", "hf", "trainer_callback").TrainerCallback
    return type("SparsityLossCallback", (_Events, base), {"__module__": __name__, "__doc__": _Events.__doc__})


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
