"""`WorkPlan`: what a long call would take, which it says before it does it.

A call that can be planned is written as a generator under `@planned`: it checks what it was given, yields a function
that makes its plan, and then does the work. So the plan is refused for whatever the call is refused for at its start.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar, cast

from torch import nn

from netkin.memory import format_bytes
from netkin.representations.inputs import examples_in
from netkin.results.labels import plural
from netkin.training.example_order import Arrays, BatchOrder
from netkin.training.recipe import Recipe

P = ParamSpec("P")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Plan = TypeVar("Plan")
Plan_co = TypeVar("Plan_co", covariant=True)


@dataclass(frozen=True)
class Work:
    """One kind of work that a call would do.

    Args:
        what: what it is for, such as "training".
        examples: how many examples go through a model, each counted as often as it does; None where that is unknown.
        steps: how many training steps these examples make; 0 where nothing is trained, None where it is unknown.
        backward: how many backward passes follow each forward pass.
    """

    what: str
    examples: int | None
    steps: int | None = 0
    backward: int = 0

    def __str__(self) -> str:
        through = f"{_number(self.examples, 'example')} forward"
        if self.steps != 0:
            return f"{self.what}: {_number(self.steps, 'step')}, {through} and backward"
        times = {0: "", 1: " and backward"}.get(self.backward, f" and {self.backward:,} times backward")
        return f"{self.what}: {through}{times}"


@dataclass(frozen=True)
class WorkPlan:
    """What a call would take; nothing is computed, but a few examples may be run to learn sizes.

    Args:
        work: the kinds of work in their order.
        memory: bytes above the models and the data, by what takes them.
        notes: what else is known beforehand, as sentences.
        refused: the sentence with which the work would be refused; empty if it would not.
    """

    work: tuple[Work, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def steps(self) -> int | None:
        """The number of training steps; None where it is unknown."""
        return _sum(part.steps for part in self.work)

    @property
    def examples(self) -> int | None:
        """How many examples go through a model, each counted as often as it does; None where that is unknown."""
        return _sum(part.examples for part in self.work)

    def __str__(self) -> str:
        lines = [str(part) for part in self.work]
        if len(self.work) > 1:
            steps = f"{_number(self.steps, 'training step')}, " if self.steps != 0 else ""
            backward = _sum(
                part.examples and part.examples * (1 if part.steps != 0 else part.backward) for part in self.work
            )
            also = f", {_number(backward, 'example')} backward" if backward != 0 else ""
            lines.append(f"in all: {steps}{_number(self.examples, 'example')} forward{also}")
        sizes = ", ".join(f"{format_bytes(size)} of {what}" for what, size in self.memory.items() if size)
        lines += [f"memory above the models and the data: {sizes}"] * bool(sizes)
        return "\n".join([*lines, *self.notes, *[f"would be refused: {self.refused}"] * bool(self.refused)])


Planning = Generator[Callable[[], Plan], None, Result]  # what the generator of a call gives: its plan and its result


class Planned(Protocol[P, Result_co, Plan_co]):
    """A call that has a plan: `explain` takes the same arguments and returns it."""

    @property
    def explain(self) -> Callable[P, Plan_co]: ...

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> Result_co: ...


def planned(function: Callable[P, Planning[Plan, Result]]) -> Planned[P, Result, Plan]:
    """Make a call of a generator that yields a function which makes its plan, and then does the work.

    Example:
        >>> @planned
        ... def double(numbers):
        ...     yield lambda: WorkPlan((Work("doubling", len(numbers)),))
        ...     return [2 * number for number in numbers]
        >>> double([1, 2]), str(double.explain([1, 2]))
        ([2, 4], 'doubling: 2 examples forward')
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Result:
        work = function(*arguments, **options)
        next(work)
        try:
            next(work)
        except StopIteration as end:
            return cast("Result", end.value)
        raise AssertionError(f"{function.__qualname__} yields more than its plan")

    @functools.wraps(function)
    def explain(*arguments: P.args, **options: P.kwargs) -> Plan:
        work = function(*arguments, **options)
        try:
            return next(work)()
        finally:
            work.close()

    name, text = function.__name__, inspect.cleandoc(function.__doc__ or "")
    described = text.partition("\nArgs:\n")[2].partition("\nExample:")[0]
    explain.__name__ = explain.__qualname__ = f"explain_{name}"
    explain.__doc__ = (
        f"Return what `{name}` would do with the same arguments, and what that takes; at most a few examples run.\n"
        + (f"\nArgs:\n{described.rstrip()}\n" if described else "")
    )
    signature = inspect.signature(function)
    plan, _, result = str(signature.return_annotation).removeprefix("Planning[").removesuffix("]").partition(", ")
    for made, returned in ((call, result), (explain, plan)):
        made.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[union-attr]
    call.explain = explain  # type: ignore[attr-defined]
    return cast("Planned[P, Result, Plan]", call)


def training_work(what: str, order: BatchOrder, recipe: Recipe, times: int = 1) -> Work:
    """Return the work of a training by a recipe, which is done `times` times.

    Example:
        >>> import torch
        >>> recipe = Recipe(epochs=3, batch=4)
        >>> print(training_work("training", Arrays(torch.zeros(10, 2), recipe, 0), recipe))
        training: 9 steps, 30 examples forward and backward
    """
    batches = order.per_epoch
    if batches is None:
        return Work(what, None, recipe.steps and times * recipe.steps)
    count = order.count if isinstance(order, Arrays) else examples_in(order.data)
    if isinstance(order, Arrays) and (recipe.drop_last or recipe.order == "drawn"):
        count = batches * recipe.batch
    steps = recipe.steps or batches * (recipe.epochs or 0)
    examples = None
    if count is not None:
        whole, rest = divmod(steps, max(batches, 1))
        examples = whole * count + min(-(-count // max(batches, 1)) * rest, count)
    return Work(what, None if examples is None else times * examples, times * steps)


def memory_of_training(model: nn.Module, recipe: Recipe, copies: int = 1) -> dict[str, int]:
    """Return the bytes that a training takes above the model, apart from what it makes of a batch."""
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    numbers = {"sgd": int(recipe.momentum > 0), "adam": 2, "adamw": 2}  # that the optimizer keeps of a weight
    kept = numbers.get(recipe.optimizer, 0) if isinstance(recipe.optimizer, str) else 0
    return {"gradients": copies * trained, "what the optimizer keeps": copies * kept * trained}


def _sum(counts: Iterator[int | None] | Sequence[int | None]) -> int | None:
    found = list(counts)
    return None if None in found else sum(count or 0 for count in found)


def _number(count: int | None, what: str) -> str:
    return f"an unknown number of {what}s" if count is None else plural(count, what)
