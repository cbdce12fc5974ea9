"""The training loop: one network, any data and loss, hooks, exact restarts; the digits network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from netkin.arrays import label_tensor, require_classes
from netkin.errors import FileError, ForwardError, InvalidValue, ShapeError, require_at_least
from netkin.files import Location, damage_reported
from netkin.identity import COMPARE, described_call
from netkin.jobs import Job, require_output
from netkin.progress import ProgressOption, Report, reporting
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import (
    batch_length,
    device_of,
    dtype_of,
    examples_in,
    inputs_of,
    labels_of,
    outputs_of,
)
from netkin.representations.layers import require_weights, unwrapped
from netkin.settings import evaluating, load_random_state, model_lock, random_state, random_states_kept, seed_all
from netkin.sources.architectures import digits, seeded
from netkin.sources.datasets import load_data
from netkin.sources.names import by_name
from netkin.sources.weights import save_weights
from netkin.training.example_order import TEST_BATCH, arrays_in, batch_order, batch_order_to_train, in_order, placed
from netkin.training.recipe import Hook, Recipe, Record, as_hooks, recipe_of, set_rates
from netkin.training.saving import (
    KIND,
    STATE,
    ChangingAttributes,
    PartSaving,
    identity_of,
    load_model_state,
    model_state,
)
from netkin.training.work_plan import Planning, Work, WorkPlan, memory_of_training, planned, training_work

Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[Any, int], Tensor]  # what is minimised, of a batch and the step


@planned
def train(
    model: nn.Module,
    data: Any,
    recipe: Recipe | None = None,
    *,
    test: Any = None,
    seed: int = 0,
    loss: Loss | None = None,
    hooks: Sequence[Any] = (),
    save: Location | None = None,
    every: int | None = None,
    overwrite: bool = False,
    progress: ProgressOption = None,
    **settings: Any,
) -> Planning[WorkPlan, list[Record]]:
    """Train `model` where it lies, and return a record of each epoch: loss, seconds, and what a test gave.

    The same model, data, recipe and seed give the same weights, bit for bit on a CPU. The model's training flags and
    the random states of torch, NumPy and Python are afterwards as they were found.

    Args:
        model: The network, on the device on which it is to be trained.
        data: Arrays ``(inputs, labels)``, wherever they lie, a data set, a loader or list of batches, or a name as for
            `nk.load_data`.
        recipe: How it is trained; its settings can also be given by name, as ``epochs=10``, and override it.
        test: Data on which loss and accuracy are taken after each epoch, of the same forms.
        seed: From which the order of the examples, their augmentation and dropout follow.
        loss: A function of ``(outputs, labels)``; by default the cross entropy of class numbers.
        hooks: Objects with some of the methods of `Hook`, or functions of ``(model, step)``.
        save: A file for the trained weights, as `nk.load_model` reads them behind an `@`: of safetensors where its name
            ends so, else of torch. After each epoch the state of the training is kept in a folder beside it, and the
            same call resumes from there, bit for bit as if it had not stopped. `netkin jobs` shows its progress, and
            cancels it.
        every: Keep the state after so many steps, not after each epoch.
        overwrite: Whether another file or training that is there is deleted, and this one starts again.
        progress: None shows a bar, False nothing; or a function of ``(done, total, what)``.
        **settings: Settings of the recipe.

    Example:
        >>> inputs = torch.linspace(-1, 1, 64)[:, None]
        >>> history = train(nn.Linear(1, 1), (inputs, 3 * inputs), epochs=99, lr=0.1, loss=nn.functional.mse_loss)
        >>> len(history), history[-1]["loss"] < 1e-3
        (99, True)
    """
    chosen = recipe_of(recipe, settings)
    require_trainable(model)
    _require_settings(chosen, loss, save, every)
    require_output(save, overwrite=overwrite)
    yield lambda: _plan(model, data, chosen, test, seed)
    with model_lock(), evaluating(model), random_states_kept(model, data=[data, test]), torch.enable_grad():
        model.train()  # `evaluating` puts each flag back
        order, made_hooks = batch_order_to_train(data, chosen, seed), as_hooks(hooks)
        minimised, dtype = loss or default_loss(chosen), chosen.dtype(device_of(model))
        evaluate = partial(loss_and_accuracy, model, test, minimised, dtype, by_classes=loss is None)
        loop = Loop(
            model, order, chosen, supervised(model, minimised, made_hooks), made_hooks, seed=seed, every=every,
            evaluate=None if test is None else evaluate,
        )  # fmt: skip
        identity = {}
        if save is not None:  # this reads all data
            tested = None if test is None else lambda: batch_order(test, Recipe(steps=1), 0).digest()
            identity = identity_of(model, chosen, seed, loss, made_hooks, order.digest, tested)
        call = described_call("nk.train", model=model, recipe=chosen.words, seed=seed, save=str(save))
        with Job.beside(save, KIND, identity, call=call, overwrite=overwrite, compare=COMPARE) as job:
            saving = PartSaving(None if save is None else job, STATE, is_whole=True, test=test)
            history = loop.run(saving, progress)
            if save is not None:
                with job.writing(save):
                    save_weights(model, save, overwrite=True)
    model.zero_grad(set_to_none=True)
    return history


explain_train = train.explain


def _plan(model: nn.Module, data: Any, recipe: Recipe, test: Any, seed: int) -> WorkPlan:
    with random_states_kept(model, data=[data, test]):
        order = batch_order_to_train(data, recipe, seed)
        work = [training_work("training", order, recipe)]
        if test is not None:
            given, steps = arrays_in(test), work[0].steps
            count = examples_in(test) if given is None else batch_length(given)
            epochs = recipe.epochs or (steps and order.per_epoch and -(-steps // order.per_epoch))
            work.append(Work("testing after each epoch", None if count is None or not epochs else epochs * count))
    return WorkPlan(tuple(work), memory_of_training(model, recipe))


@torch.no_grad()
@by_name(models="model", data="data")
def accuracy(model: nn.Module, data: Any, *, batch: int = TEST_BATCH, precision: str = "float32") -> float:
    """Return the share of labelled examples (or tokens) that `model`, in evaluation mode, gets right, from 0 to 1.

    Labels below 0 do not count. The model and all random states are left as they were found.
    """
    require_weights(model)
    dtype = Recipe(steps=1, precision=precision).dtype(device_of(model))
    with model_lock(), random_states_kept(model, data=[data]):
        return loss_and_accuracy(model, data, None, dtype, batch)["accuracy"]


class Loop:
    """One training, from its first step or from where it stopped to its last.

    What is minimised is `objective(batch, step)`; what the test gives after each epoch, `evaluate()`.
    """

    def __init__(
        self, model: nn.Module, order: Any, recipe: Recipe, objective: Objective, hooks: Sequence[Any] = (), *,
        seed: int = 0, every: int | None = None, evaluate: Callable[[], Record] | None = None,
    ):  # fmt: skip
        self.model, self.order, self.recipe, self.objective = model, order, recipe, objective
        self.hooks, self.seed, self.every, self.evaluate = hooks, seed, every, evaluate
        self.device = device_of(model)
        self.dtype = recipe.dtype(self.device)
        self.optimizer = recipe.optimizer_of(model.parameters())
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.rates = self._rates()
        self.step = self.epoch = self.within = 0  # `within` counts the steps of the epoch that is not done
        self.seconds, self.losses, self.history = 0.0, list[Tensor](), list[Record]()
        self.epoch_state: Tensor = order.state
        self.random_state: dict[str, Any] | None = None  # where a training that stopped within an epoch goes on

    def _rates(self) -> list[list[float]]:
        first = [float(group["lr"]) for group in self.optimizer.param_groups]
        return self.recipe.rates(first, self.recipe.epochs or self.recipe.steps or 0)

    @property
    def total(self) -> int | None:
        """How many steps there are in all, None where the length of the data is unknown."""
        per_epoch = self.order.per_epoch
        return self.recipe.steps or (None if per_epoch is None else (self.recipe.epochs or 0) * per_epoch)

    @property
    def done(self) -> bool:
        ended = self.step == self.recipe.steps or self.epoch == self.recipe.epochs
        return ended or any(hook.should_stop(self.step) for hook in self.hooks)

    def run(self, saving: PartSaving, progress: ProgressOption = None) -> list[Record]:
        """Begin, or go on where it stopped, and return the records of all epochs."""
        self.saving = saving
        if saving.keeps:
            self.attributes = ChangingAttributes(self.model, self.hooks)
        for hook in self.hooks:
            hook.begin(self.model, self.optimizer)
        self.rates = self._rates()  # a hook may have added groups
        found = saving.read()
        if found is None:
            self._keep()  # a place that can't be written is found before the work
        else:
            self._load(found)
        with reporting(self.total, "training", "steps", progress, done=self.step) as report:
            while not self.done:
                self._epoch(report)
        return self.history

    def _epoch(self, report: Report) -> None:
        seed_all(self.device, self.seed, self.epoch)
        batches = self.order.epoch(self.within)
        if self.random_state is not None:
            with damage_reported(self.saving.where):
                load_random_state(self.device, self.random_state)
            self.random_state = None
        started, before = self._now(), self.seconds
        for batch in batches:
            self._update(batch)
            self.seconds = before + time.perf_counter() - started
            report.update()
            if self.every and self.step % self.every == 0:
                self._keep()
            if self.done:
                break
        self.seconds = before + self._now() - started
        if not self.within:
            raise InvalidValue(f"the data gave no batches in epoch {self.epoch + 1}; pass data that can be read again.")
        self._finish_epoch()

    def _update(self, batch: Any) -> None:
        step = self.step + 1
        set_rates(self.optimizer, self.rates[self.step if self.recipe.epochs is None else self.epoch])
        with autocasting(self.device, self.dtype):
            value = self.objective(batch, step)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(value).backward()
        self.scaler.unscale_(self.optimizer)
        with torch.no_grad():
            for hook in self.hooks:
                hook.after_backward(self.model, step)
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step, self.within = step, self.within + 1
        self.losses.append(value.detach())
        with torch.no_grad():
            for hook in self.hooks:
                hook.after_step(self.model, step)

    def _finish_epoch(self) -> None:
        record = epoch_record(self.epoch + 1, self.step, self.losses, self.recipe)
        self.history.append(record | (self.evaluate() if self.evaluate else {}) | {"seconds": self.seconds})
        self.seconds, self.losses = 0.0, []
        for hook in self.hooks:
            hook.after_epoch(self.model, self.history[-1])
        if self.within == (self.order.per_epoch or self.within):  # else more steps would go on within this epoch
            self.epoch, self.within, self.epoch_state = self.epoch + 1, 0, self.order.state
        if self.every is None or self.done:
            self._keep()

    def _keep(self) -> None:
        if not self.saving.keeps:
            return
        state = {
            "model": model_state(self.model), "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(), "hooks": [hook.state_dict() for hook in self.hooks],
            "epoch_state": self.epoch_state, "random": random_state(self.device) if self.within else None,
            "losses": torch.stack(self.losses) if self.losses else None, "seconds": self.seconds,
            "attributes": self.attributes.changed(), "history": self.history, "step": self.step, "epoch": self.epoch,
            "within": self.within,
        }  # fmt: skip
        self.saving.write(state, self.total)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["step"] > (self.total or state["step"]):
            raise FileError(
                f"{self.saving.where!r} holds a training of {state['step']:,} steps, and {self.total:,} are asked for; "
                "ask for as many or more, or give another path."
            )
        with damage_reported(self.saving.where):
            load_model_state(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.epoch_state, self.random_state = state["epoch_state"], state["random"]
            self.order.load(self.epoch_state)
            self.losses = [] if state["losses"] is None else list(state["losses"].to(self.device))
            self.seconds, self.history = state["seconds"], state["history"]
            self.step, self.epoch, self.within = state["step"], state["epoch"], state["within"]
            hook_states = list(zip(self.hooks, state["hooks"], strict=True))
            if not (0 <= self.within <= self.step and self.epoch <= len(self.history)):
                raise ValueError(f"it stands at step {self.step:,} of epoch {self.epoch + 1}")
        for hook, hook_state in hook_states:
            hook.load_state_dict(hook_state)
        self.attributes.load(state["attributes"])
        self.saving.tell(self.step, self.total)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def supervised(model: nn.Module, loss: Loss, hooks: Sequence[Any]) -> Objective:
    """Return what is minimised on a batch of inputs and labels: the loss, and what hooks add to it."""
    device, dtype = device_of(model), dtype_of(model)

    def objective(batch: Any, step: int) -> Tensor:
        batch = placed(batch, device, dtype)
        inputs = inputs_of(batch)
        outputs = outputs_of(model, inputs)
        value = loss(outputs, labels_of(batch))
        for hook in hooks:
            extra = hook.loss(model, inputs, outputs, step)
            value = value if extra is None else value + extra
        return value

    return objective


def default_loss(recipe: Recipe) -> Loss:
    """Return the cross entropy of class numbers, with the recipe's label smoothing."""
    return partial(_cross_entropy, smoothing=recipe.smoothing)


def _cross_entropy(outputs: Any, labels: Any, smoothing: float) -> Tensor:
    logits = main_tensor(outputs, "")
    if labels is None:
        raise InvalidValue("the batches have no labels; give `(inputs, labels)`, or a `loss=` that needs none.")
    labels = label_tensor(labels, logits.device)
    if class_axis(logits, labels) != 1:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    return cross_entropy(logits, labels.long(), label_smoothing=smoothing)


def class_axis(logits: Tensor, labels: Tensor) -> int:
    """Return along which axis of the logits the classes lie: 1, or the last one for tokens."""
    shape, wanted = tuple(logits.shape), tuple(labels.shape)
    at_one, at_last = (shape[:1] + shape[2:]) == wanted, shape[:-1] == wanted
    if labels.is_floating_point() or (at_one == at_last and len(shape) != 2) or not (at_one or at_last):
        raise ShapeError(
            f"outputs of shape {shape} and labels of shape {wanted}, {str(labels.dtype).removeprefix('torch.')}, are "
            "no logits and class numbers, of which accuracy or cross entropy could be taken; to train on others, pass "
            "`loss=`, a function of both."
        )
    return 1 if at_one else len(shape) - 1


def class_numbers(outputs: Any, given: Any) -> Tensor:
    """Return labels as class numbers of a model's logits; those below 0 do not count, too large ones are refused."""
    logits = main_tensor(outputs, "")
    labels = label_tensor(given, logits.device)
    classes = logits.shape[class_axis(logits, labels)]  # refuses fractions
    require_classes(labels.long(), classes)
    return labels.long()


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context in which operations run in a lower precision, or one that changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def epoch_record(epoch: int, step: int, losses: Sequence[Tensor], recipe: Recipe) -> Record:
    """Return the record of an epoch that ended with a step; a mean loss that is no number ends the training."""
    loss = torch.stack(list(losses)).mean().item()
    if not abs(loss) < float("inf"):
        raise ForwardError(
            f"the mean loss of epoch {epoch} is {loss}, up to step {step:,}; take a smaller `lr` than "
            f"{recipe.lr:g}, a `warmup` or a `clip`."
        )
    return {"epoch": epoch, "step": step, "loss": loss}


@torch.no_grad()
def loss_and_accuracy(
    model: nn.Module, data: Any, loss: Loss | None, dtype: torch.dtype | None, batch: int = TEST_BATCH,
    *, by_classes: bool = False,
) -> Record:  # fmt: skip
    """Return the loss and, where labels are class numbers, as `by_classes` demands, the accuracy in evaluation mode."""
    device, own = device_of(model), dtype_of(model)
    parts: list[tuple[Tensor, Tensor, Tensor, int]] = []
    with evaluating(model), autocasting(device, dtype):
        for one in in_order(data, batch):
            one = placed(one, device, own)
            outputs, labels = outputs_of(model, inputs_of(one)), labels_of(one)
            if labels is not None and (loss is None or by_classes):
                labels = class_numbers(outputs, labels)
            count = len(main_tensor(outputs, ""))
            value = torch.zeros(()) if loss is None else loss(outputs, labels).detach().double() * count
            parts.append((*count_right(outputs, labels), value, count))
    return _summed(parts, loss)


def _summed(parts: list[tuple[Tensor, Tensor, Tensor, int]], loss: Loss | None) -> Record:
    if not parts:
        raise InvalidValue("the data to test on gave no batches; pass a loader or a list that can be read again.")
    right, seen, losses, counts = zip(*parts, strict=True)
    counted, found = int(torch.stack(seen).sum()), {}
    if counted:
        found["accuracy"] = int(torch.stack(right).sum()) / counted
    elif loss is None:
        raise InvalidValue("none of the labels is a class number of 0 or more, so that there is no accuracy.")
    if loss is not None:
        found["test_loss"] = torch.stack(losses).sum().item() / sum(counts)
    return found


def count_right(outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return how many examples, or tokens, are right and how many count; none where labels are no class numbers."""
    logits = main_tensor(outputs, "")
    none = torch.zeros((), dtype=torch.int64, device=logits.device)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != logits.ndim - 1:
        return none, none
    counts = labels >= 0
    return ((logits.argmax(class_axis(logits, labels)) == labels) & counts).sum(), counts.sum()


def require_trainable(model: nn.Module) -> None:
    """Refuse a network whose weights have no values yet, or that has no mode for training."""
    require_weights(unwrapped(model))
    if "_guards_fn" in unwrapped(model)._modules:
        raise InvalidValue(
            "the module of an exported program can't be trained, since it stays in the mode of its export; "
            "train the model it was made from."
        )


def _require_settings(recipe: Recipe, loss: Loss | None, save: Location | None, every: int | None) -> None:
    if loss is not None and recipe.smoothing:
        raise InvalidValue(
            "`smoothing` belongs to the cross entropy; build it into your own `loss`.", argument="smoothing"
        )
    if every is not None:
        require_at_least(1, every=every)
        if save is None:
            raise InvalidValue(
                f"every={every!r} says how often a training is saved; say where with `save=FILE`.", argument="every"
            )


def untrained_digits_net(seed: int) -> nn.Module:
    """Return a `netkin:digits` network as it is before training, its weights drawn from `seed`."""
    return seeded(digits, seed).eval()


def trained_digits_net(seed: int, epochs: int = 12, progress: Callable[[int, float], None] | None = None) -> nn.Module:
    """Return a `netkin:digits` network trained on `digits:train`; its first weights and its batches follow from `seed`.

    `progress(epoch, loss)` is called after each epoch with the mean loss of its batches.
    """
    model = untrained_digits_net(seed)
    falling = partial(LinearLR, start_factor=1, end_factor=0.05, total_iters=epochs - 1)
    recipe = Recipe(epochs=epochs, batch=32, optimizer="adam", lr=3e-3, schedule=falling)
    digits_train = map(torch.cat, zip(*load_data("digits:train", batch_size=10_000), strict=True))
    train(model, tuple(digits_train), recipe, seed=seed, hooks=[_Telling(progress)] if progress else [], progress=False)
    return model


class _Telling(Hook):
    def __init__(self, progress: Callable[[int, float], None]):
        self.progress = progress

    def after_epoch(self, model: nn.Module, record: Record) -> None:
        self.progress(int(record["epoch"]), record["loss"])
