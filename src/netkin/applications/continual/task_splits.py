"""Tasks: the classes of a data set, split into groups that are learnt one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netkin.errors import NameClash, ShapeError, ValueFault
from netkin.identity import DataDigest
from netkin.sources.batches import LabelledData
from netkin.training.example_order import labelled_arrays


@dataclass(frozen=True, eq=False)
class Task:
    """One task: examples to train and to test on, ``(inputs, labels)`` each, with labels from 0 to `classes` - 1."""

    name: str
    train: LabelledData
    test: LabelledData
    classes: int

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            inputs, labels = map(torch.as_tensor, getattr(self, name))
            object.__setattr__(self, name, (inputs, labels.long()))
        for part, (inputs, labels) in (("train", self.train), ("test", self.test)):
            if not len(labels) or len(inputs) != len(labels):
                raise ValueFault(
                    f"task {self.name!r} has {len(inputs):,} inputs and {len(labels):,} labels to {part} on; it needs "
                    "as many of both, and at least one."
                )
            if int(labels.min()) < 0 or int(labels.max()) >= self.classes:
                raise ValueFault(
                    f"task {self.name!r} has labels from {int(labels.min())} to {int(labels.max())} to {part} on; "
                    f"with {self.classes} classes they must lie from 0 to {self.classes - 1}."
                )

    def digest(self) -> str:
        """Return a digest that identifies its examples."""
        found = [DataDigest(labels=True), DataDigest(labels=True)]
        for one, part in zip(found, (self.train, self.test), strict=True):
            one.update(part, range(len(part[1])))
        return f"{self.name}, {self.classes} classes: {', '.join(one.hex for one in found)}"


def split_tasks(train: Any, test: Any, tasks: int = 5, *, seed: int | None = None) -> tuple[Task, ...]:
    """Return tasks of equally many classes each, in the order of the classes, or in one drawn from `seed`.

    `train` and `test` are names as for `nk.load_data`, batches with labels, or arrays ``(inputs, labels)``. A task is
    named by its classes.

    Example:
        >>> [task.name for task in split_tasks("digits:train", "digits:test")]
        ['0-1', '2-3', '4-5', '6-7', '8-9']
    """
    parts = labelled_arrays(train, "`train`"), labelled_arrays(test, "`test`")
    classes = parts[0][1].unique()
    if isinstance(tasks, bool) or not isinstance(tasks, int) or not 1 <= tasks <= len(classes) // 2:
        raise ValueFault(
            f"`tasks` is a number of tasks with 2 classes or more each, 1 to {len(classes) // 2} for {len(classes)} "
            f"classes; got {tasks!r}."
        )
    if len(classes) % tasks:
        raise ValueFault(f"{len(classes)} classes can't be split into {tasks} tasks of equally many.")
    if seed is not None:
        classes = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    return tuple(_task(group, *parts) for group in classes.split(len(classes) // tasks))


def refuse_tasks(tasks: Sequence[Task], least: int = 1) -> tuple[Task, ...]:
    """Return tasks as a tuple; too few of them, other objects and duplicate names are refused."""
    found = tuple(tasks)
    stranger = next((type(one).__name__ for one in found if not isinstance(one, Task)), None)
    if stranger is not None:
        raise ValueFault(f"`tasks` holds tasks, as `nk.split_tasks` makes them; got a {stranger}.")
    if len(found) < least:
        raise ValueFault(f"a sequence needs {least} task{'s' if least > 1 else ''} or more; got {len(found)}.")
    names = [task.name for task in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise NameClash(f"tasks must have distinct names; {twice!r} occurs {names.count(twice)} times.")
    for task in found:
        shapes = {tuple(one.shape[1:]) for one in (found[0].train[0], task.train[0], task.test[0])}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            raise ShapeError(f"all tasks must have inputs of one shape; {task.name!r} makes it {listed}.")
    return found


def _task(group: Tensor, train: LabelledData, test: LabelledData) -> Task:
    listed = group.tolist()
    alone = listed == list(range(listed[0], listed[0] + len(listed)))
    name = f"{listed[0]}-{listed[-1]}" if alone else ",".join(map(str, listed))
    return Task(name, _of_classes(group, *train), _of_classes(group, *test), len(group))


def _of_classes(group: Tensor, inputs: Tensor, labels: Tensor) -> LabelledData:
    places = (labels[:, None] == group.to(labels.device)).nonzero()
    return inputs[places[:, 0]], places[:, 1]
