"""Splits of labelled data by class: tasks that are learnt one after another, and examples of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netkin.errors import InvalidValue, NameClash, ShapeError, require_at_least, require_listed
from netkin.identity import DataDigest
from netkin.sources import load_data
from netkin.sources.batches import Batches, Borrowed, LabelledData, class_names
from netkin.training.example_order import LOADED_AT_ONCE, arrays_in, labelled_arrays

PARTITIONS = ("random", "groups")


@dataclass(frozen=True, eq=False, repr=False)
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
                raise InvalidValue(
                    f"task {self.name!r} has {len(inputs):,} inputs and {len(labels):,} labels to {part} on; it needs "
                    "as many of both, and at least one."
                )
            if int(labels.min()) < 0 or int(labels.max()) >= self.classes:
                raise InvalidValue(
                    f"task {self.name!r} has labels from {int(labels.min())} to {int(labels.max())} to {part} on; "
                    f"with {self.classes} classes they must lie from 0 to {self.classes - 1}."
                )

    def __repr__(self) -> str:
        counts = f"{len(self.train[1]):,} examples to train and {len(self.test[1]):,} to test on"
        return f"Task({self.name!r}, {self.classes} classes, {counts})"

    def digest(self) -> str:
        """Return a digest that identifies its examples."""
        found = [DataDigest(labels=True), DataDigest(labels=True)]
        for one, part in zip(found, (self.train, self.test), strict=True):
            one.update(part, range(len(part[1])))
        return f"{self.name}, {self.classes} classes: {', '.join(one.hex for one in found)}"


def split_tasks(train: Any, test: Any, tasks: int = 5, *, seed: int | None = None) -> tuple[Task, ...]:
    """Return tasks of equally many classes each, in the order of the classes, or in one drawn from `seed`.

    `train` and `test` are names as for `nk.load_data`, batches with labels, or arrays ``(inputs, labels)``. A task is
    named by its classes: by their names where the data have some, as folders of images do, else by their numbers.

    Example:
        >>> [task.name for task in split_tasks("digits:train", "digits:test")]
        ['0-1', '2-3', '4-5', '6-7', '8-9']
    """
    train = load_data(train, LOADED_AT_ONCE) if isinstance(train, str) else train
    parts = labelled_arrays(train, "`train`"), labelled_arrays(test, "`test`")
    classes, names = parts[0][1].unique(), class_names(train)
    require_at_least(1, len(classes) // 2, tasks=tasks)  # of 2 classes or more each
    if len(classes) % tasks:
        raise InvalidValue(
            f"{len(classes)} classes can't be split into {tasks} tasks of equally many.", argument="tasks"
        )
    if seed is not None:
        classes = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    return tuple(_task(group, names, *parts) for group in classes.split(len(classes) // tasks))


def require_tasks(tasks: Sequence[Task], least: int = 1) -> tuple[Task, ...]:
    """Return tasks as a tuple; too few of them, other objects and duplicate names are refused."""
    found = tuple(tasks)
    stranger = next((type(one).__name__ for one in found if not isinstance(one, Task)), None)
    if stranger is not None:
        raise InvalidValue(f"`tasks` holds tasks, as `nk.split_tasks` makes them; got a {stranger}.", argument="tasks")
    if len(found) < least:
        raise InvalidValue(
            f"a sequence needs {least} task{'s' if least > 1 else ''} or more; got {len(found)}.", argument="tasks"
        )
    names = [task.name for task in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise NameClash(
            f"tasks must have distinct names; {twice!r} occurs {names.count(twice)} times.", argument="tasks"
        )
    for task in found:
        shapes = {tuple(one.shape[1:]) for one in (found[0].train[0], task.train[0], task.test[0])}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            raise ShapeError(f"all tasks must have inputs of one shape; {task.name!r} makes it {listed}.")
    return found


def _task(group: Tensor, names: Sequence[str], train: LabelledData, test: LabelledData) -> Task:
    listed = group.tolist()
    in_a_row = listed == list(range(listed[0], listed[0] + len(listed)))
    name = f"{listed[0]}-{listed[-1]}" if in_a_row else ",".join(map(str, listed))
    if max(listed) < len(names):
        words = [names[number] for number in listed]
        name = ", ".join(words)
        if len(words) > 3:
            rest = f", {words[1]} and {len(words) - 2} more"
            name = f"{words[0]} to {words[-1]}" if in_a_row else f"{words[0]}{rest}"
    return Task(name, _of_classes(group, *train), _of_classes(group, *test), len(group))


def _of_classes(group: Tensor, inputs: Tensor, labels: Tensor) -> LabelledData:
    places = (labels[:, None] == group.to(labels.device)).nonzero()
    return inputs[places[:, 0]], places[:, 1]


# --- clients ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class ClientSplit:
    """The examples of each client by its name, for training and for tests, and which classes they are of.

    `names` are the names of all classes, where the data have some, as folders of images do.
    """

    train: Mapping[str, LabelledData]
    test: Mapping[str, LabelledData]
    classes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ClientSplit({len(self.train):,} clients, {sum(len(own[1]) for own in self.train.values()):,} examples)"

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {len(self.train[name][1]):,} examples of classes {', '.join(map(self._class_name, own))}"
            for name, own in self.classes.items()
        )

    def _class_name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else str(number)


def split_by_classes(
    data: Any,
    clients: int,
    classes: int,
    *,
    test: Any = None,
    partition: str = "random",
    equal: bool = False,
    seed: int = 0,
) -> ClientSplit:
    """Return labelled examples split among clients, each of which gets examples of a few classes only.

    No example goes to two clients: those of a class are divided evenly among its clients.

    Args:
        data: arrays ``(inputs, labels)``, or a name as for `nk.load_data`.
        clients: the number of clients.
        classes: the number of classes that each client has.
        test: arrays to test on, split in the same way, if any.
        partition: how classes are divided: "random" draws those of each client so that all classes have about as many
            clients; "groups" cuts the classes into groups, in order, and gives each group to as many clients.
        equal: leave examples out so that all clients have as many to train on, of each of their classes.
        seed: of the drawing.

    Example:
        >>> data = torch.zeros(12, 2), torch.arange(12) % 4
        >>> found = split_by_classes(data, clients=4, classes=2, partition="groups")
        >>> found.classes
        {'0': (0, 1), '1': (0, 1), '2': (2, 3), '3': (2, 3)}
        >>> [len(labels) for _, labels in found.train.values()]
        [3, 3, 3, 3]
    """
    data = load_data(data, LOADED_AT_ONCE) if isinstance(data, str) else data
    inputs, labels = as_examples(data, "`data`")
    every = labels.unique().tolist()
    _require_counts(clients, classes, len(every))
    require_listed("partition", partition, PARTITIONS)
    generator = torch.Generator().manual_seed(seed)
    held = _grouped(every, clients, classes) if partition == "groups" else _drawn(every, clients, classes, generator)
    names = [str(number) for number in range(clients)]
    train = _divided(inputs, labels, held, names, generator, equal)
    tests = {} if test is None else _divided(*as_examples(test, "`test`"), held, names, generator)
    return ClientSplit(train, tests, dict(zip(names, held, strict=True)), class_names(data))


def _require_counts(clients: Any, classes: Any, available: int) -> None:
    require_at_least(1, clients=clients, classes=classes)
    if classes > available:
        raise InvalidValue(f"a client can't have {classes} classes: the data have {available}.", argument="classes")


def _grouped(every: list[int], clients: int, classes: int) -> list[tuple[int, ...]]:
    groups = [tuple(every[start : start + classes]) for start in range(0, len(every), classes)]
    if len(every) % classes or clients % len(groups):
        raise InvalidValue(
            f"{len(every)} classes in groups of {classes} can't be given to {clients} clients, as many to each group; "
            "choose numbers that divide each other, or partition='random'.",
            argument="clients",
        )
    return [group for group in groups for _ in range(clients // len(groups))]


def _drawn(every: list[int], clients: int, classes: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Give each client the classes that have the fewest clients yet, ties drawn at random."""
    taken, found = torch.zeros(len(every)), []
    for _ in range(clients):
        rank = taken + torch.rand(len(every), generator=generator) / 2
        chosen = rank.argsort()[:classes]
        taken[chosen] += 1
        found.append(tuple(sorted(every[place] for place in chosen.tolist())))
    return found


def _divided(
    inputs: Tensor, labels: Tensor, held: list[tuple[int, ...]], names: list[str], generator: torch.Generator,
    equal: bool = False,
) -> dict[str, LabelledData]:  # fmt: skip
    """Divide the examples of each class among the clients that hold it; the first of them changes with the class."""
    rows: list[list[Tensor]] = [[] for _ in held]
    owners = {one: [k for k, own in enumerate(held) if one in own] for one in sorted({c for own in held for c in own})}
    counts = {one: int((labels == one).sum()) for one in owners}
    most = min(counts[one] // len(own) for one, own in owners.items()) if equal else None
    for turn, (one, own) in enumerate(owners.items()):
        places = (labels == one).nonzero().flatten().cpu()
        order = places[torch.randperm(len(places), generator=generator)]
        first = turn % len(own)
        for owner, part in zip(own[first:] + own[:first], order.tensor_split(len(own)), strict=True):
            rows[owner].append(part[:most])
    joined = [torch.cat(own).to(labels.device) for own in rows]
    return {name: (inputs[own], labels[own]) for name, own in zip(names, joined, strict=True)}


def as_examples(data: Any, what: str) -> LabelledData:
    """Return arrays of inputs and class numbers, or those that a name as for `nk.load_data` means, as tensors."""
    data = labelled_arrays(data, what) if isinstance(data, (str, Batches, Borrowed)) else data
    found = arrays_in(tuple(data)) if isinstance(data, (tuple, list)) else None
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(one, Tensor) for one in found):
        raise InvalidValue(f"{what} must be arrays `(inputs, labels)`; got {type(data).__name__}.")
    inputs, labels = found
    if labels.ndim != 1 or labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
        raise ShapeError(
            f"{what} must have class numbers of 0 or more as labels, one for each example; got "
            f"{str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}."
        )
    return inputs, labels.long()
