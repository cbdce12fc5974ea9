"""The recipe: how a network is trained, apart from its data and seed; and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau

from netkin.errors import InvalidValue, UnknownName, did_you_mean, require_at_least, require_listed

Record = dict[str, float]
METHODS = (
    "begin",
    "loss",
    "after_backward",
    "after_step",
    "after_epoch",
    "should_stop",
    "state_dict",
    "load_state_dict",
)
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "steps", "linear", "cosine")
ORDERS = ("shuffled", "drawn", "given")
PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained; with a network, its data and a seed a training can be repeated.

    Args:
        epochs: Number of passes over the examples; either this or `steps`.
        steps: Number of updates, whatever number of epochs that makes.
        batch: Examples in a batch, for data that come as arrays or as a data set.
        optimizer: The optimizer; in Python also a function of the parameters that returns one of torch.
        lr: The learning rate at its highest.
        momentum: Momentum of "sgd".
        nesterov: Whether the momentum of "sgd" is Nesterov's.
        weight_decay: The weight decay.
        schedule: How `lr` goes: "constant", "steps" (a tenth after half, a hundredth after three quarters),
            "linear" or "cosine" (down to `end`), by epochs where `epochs` are given, else by steps; in Python also a
            function of an optimizer that returns a scheduler of torch.
        warmup: For how many epochs (or steps) `lr` first rises in a straight line.
        end: The fraction of `lr` at which "linear" and "cosine" end.
        clip: The largest norm of the gradient of all weights; by default it is not clipped.
        smoothing: The label smoothing of the cross entropy.
        precision: "float32" (the model's own), "bf16" or "fp16" by autocast, or "auto": bf16 on a GPU.
        order: "shuffled" (every example once an epoch), "drawn" (each batch at random from all), or "given".
        drop_last: Whether the examples that fill no whole batch wait for the next shuffle.
        shift: By how many pixels images are moved at most, each way, at random.
        flip: Whether images are mirrored left to right, every other one at random.

    Example:
        >>> Recipe(epochs=4, lr=0.1, schedule="steps").rates([0.1], 4)
        [[0.1], [0.1], [0.010000000000000002], [0.001]]
    """

    epochs: int | None = None
    steps: int | None = None
    batch: int = 128
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str | Callable[[Optimizer], LRScheduler] = "constant"
    warmup: int = 0
    end: float = 0.0
    clip: float | None = None
    smoothing: float = 0.0
    precision: str = "float32"
    order: str = "shuffled"
    drop_last: bool = False
    shift: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            got = "neither" if self.epochs is None else "both"
            raise InvalidValue(
                f"a recipe needs either `epochs` or `steps`, such as epochs=10; got {got}.", argument="epochs"
            )
        counts = {"epochs": self.epochs, "steps": self.steps, "batch": self.batch}
        require_at_least(1, **{name: count for name, count in counts.items() if count is not None})
        require_at_least(0, warmup=self.warmup, shift=self.shift)
        for name in ("lr", "momentum", "weight_decay", "end", "smoothing"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidValue(
                    f"`{name}` must be a number of 0 or more; got {getattr(self, name)!r}.", argument=name
                )
        if self.clip is not None and not self.clip > 0:
            raise InvalidValue(f"`clip` must be a norm above 0, or None; got {self.clip!r}.", argument="clip")
        if not callable(self.optimizer):
            require_listed("optimizer", self.optimizer, OPTIMIZERS)
        if not callable(self.schedule):
            require_listed("schedule", self.schedule, SCHEDULES)
        require_listed("precision", self.precision, (*PRECISIONS, "auto"))
        require_listed("order", self.order, ORDERS)
        if self.warmup and self.warmup >= (self.epochs or self.steps or 0):
            raise InvalidValue(
                f"the warm-up, {self.warmup}, must be shorter than the training; got {self.words}.", argument="warmup"
            )

    @property
    def words(self) -> str:
        """What differs from the defaults, as text."""
        differs = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return ", ".join(f"{field.name}={_word(getattr(self, field.name))}" for field in differs)

    def but(self, **changes: Any) -> Recipe:
        """Return the same recipe with some settings changed."""
        return replace(self, **changes)

    def dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the precision that autocast lowers to on a device; None where it does not."""
        if self.precision == "auto":
            return torch.bfloat16 if device.type == "cuda" else None
        return PRECISIONS[self.precision]

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return an optimizer of the parameters."""
        parameters = list(parameters)
        if not parameters:
            raise InvalidValue("the model has no weights that can be trained; those of quantised layers are fixed.")
        if not isinstance(self.optimizer, str):
            made = self.optimizer(parameters)
            _require_no_closure(made)
            return made
        if self.optimizer == "sgd":
            settings: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov}
            return torch.optim.SGD(parameters, self.lr, weight_decay=self.weight_decay, **settings)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, self.lr, weight_decay=self.weight_decay)

    def rates(self, first: Sequence[float], count: int) -> list[list[float]]:
        """Return the learning rates of `count` epochs (or steps), each of the groups that begin at `first`.

        A schedule of torch is run once beforehand on an optimizer of nothing, so that the rate is a function of the
        step alone and a training can go on from any.
        """
        rising = [[rate * (done + 1) / (self.warmup + 1) for rate in first] for done in range(self.warmup)]
        return rising + self._falling(first, count - self.warmup)

    def _falling(self, first: Sequence[float], count: int) -> list[list[float]]:
        if self.schedule == "constant":
            return [list(first)] * count
        if self.schedule == "steps":
            shares = [done / count for done in range(count)]
            factors = [0.01 if share >= 0.75 else 0.1 if share >= 0.5 else 1.0 for share in shares]
            return [[rate * factor for rate in first] for factor in factors]
        if self.schedule == "cosine":  # each group by itself, since torch's has one end for all
            ends = [partial(CosineAnnealingLR, T_max=count, eta_min=self.end * rate) for rate in first]
            each = [_rates_of(end, [rate], count) for end, rate in zip(ends, first, strict=True)]
            return [[rate for group in epoch for rate in group] for epoch in zip(*each, strict=True)]
        linear = partial(LinearLR, start_factor=1, end_factor=self.end, total_iters=count)
        return _rates_of(linear if isinstance(self.schedule, str) else self.schedule, first, count)


def _rates_of(schedule: Callable[[Optimizer], LRScheduler], first: Sequence[float], count: int) -> list[list[float]]:
    """Return the rates that a schedule of torch gives an optimizer of nothing, step by step."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in first], lr=1.0)
    scheduler, found = schedule(optimizer), []
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidValue(
            "a schedule gives the rates of all steps beforehand, and ReduceLROnPlateau waits for losses; pass another, "
            f"or one of {', '.join(map(repr, SCHEDULES))}.",
            argument="schedule",
        )
    for _ in range(count):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def _require_no_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer that computes the loss itself, several times a step."""
    parameters = signature(optimizer.step).parameters.values()
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters):
        raise InvalidValue(
            f"{type(optimizer).__name__} takes the loss as a function, which it calls several times a step, and here "
            "gets gradients alone; pass an optimizer whose `step()` needs nothing, such as 'sgd' or 'adam'.",
            argument="optimizer",
        )


def set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Give each group of an optimizer its learning rate of this step."""
    groups = optimizer.param_groups
    if len(groups) != len(rates):
        raise InvalidValue(
            f"the optimizer has {len(groups)} groups of parameters, and had {len(rates)} when the training began; a "
            "hook may add groups in `begin` alone."
        )
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


class Hook:
    """Callbacks that observe or change a training; override what you need.

    Any object with some of these methods is a hook, and so is a function of ``(model, step)``, which is called after
    each step. Steps and epochs are counted from 1. A training that was saved with another hook is not continued: a
    hook is identified by its source code and by its attribute `settings`, if it has one.

    Example:
        >>> class OnlyPositive(Hook):
        ...     def after_step(self, model, step):
        ...         for weight in model.parameters():
        ...             weight.clamp_(min=0)
    """

    settings: Any = None

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called before the first step, and again where a saved training resumes."""

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor | None:
        """Return what is added to the loss of this step, or None."""

    def after_backward(self, model: nn.Module, step: int) -> None:
        """Change the gradients before they are clipped and used."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Called after an update, to read or change the weights; no graph is built here."""

    def after_epoch(self, model: nn.Module, record: Record) -> None:
        """Read the record of an epoch that is done."""

    def should_stop(self, step: int) -> bool:
        """Return whether the training ends after this step, before its recipe is done."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the hook needs to resume: tensors, numbers, texts, lists and mappings.

        A hook without this method resumes with those of its attributes that have changed, as far as they are such.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class WrappedHook(Hook):
    """A hook made of whatever methods an object has, or of a function."""

    def __init__(self, what: Any):
        methods = {name: getattr(what, name) for name in METHODS if callable(getattr(what, name, None))}
        if not methods and callable(what):
            methods["after_step"] = what
        if not methods:
            raise InvalidValue(
                f"a hook is a function of (model, step), or has some of the methods {', '.join(METHODS)}; got "
                f"{type(what).__name__}.",
                argument="hooks",
            )
        for name, method in methods.items():
            setattr(self, name, method)
        self.given = what
        self.name = getattr(what, "__qualname__", type(what).__qualname__)
        self.settings = getattr(what, "settings", None)


def as_hooks(hooks: Iterable[Any]) -> list[Any]:
    """Return hooks with all methods, made of those that were given."""
    return [hook if isinstance(hook, Hook) else WrappedHook(hook) for hook in hooks]


def recipe_of(recipe: Recipe | None, settings: dict[str, Any]) -> Recipe:
    """Return a recipe with some settings changed, or one made of settings alone; unknown names are refused."""
    known = [field.name for field in fields(Recipe)]
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InvalidValue(
            f"a recipe is an `nk.Recipe`, or settings by name as `epochs=10`; got {recipe!r}.", argument="recipe"
        )
    for name in settings:
        if name not in known:
            raise UnknownName(
                f"a recipe has no {name!r}{did_you_mean(name, known) or '.'} It has {', '.join(known)}.",
                argument="recipe",
            )
    return Recipe(**settings) if recipe is None else recipe.but(**settings)


def _word(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)
