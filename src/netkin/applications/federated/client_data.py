"""The data of clients: split by classes, or given by the caller, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netkin.errors import NameClash, ShapeError, UnknownName, ValueFault
from netkin.sources.batches import LabelledData
from netkin.training.course import arrays_in, labelled_arrays

DEALS = ("random", "groups")


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """The examples of each client by its name, for training and for tests, and which classes they are of."""

    train: Mapping[str, LabelledData]
    test: Mapping[str, LabelledData]
    classes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {len(self.train[name][1]):,} examples of classes {', '.join(map(str, own))}"
            for name, own in self.classes.items()
        )


def split_by_classes(
    data: Any,
    clients: int,
    classes: int,
    *,
    test: Any = None,
    deal: str = "random",
    equal: bool = False,
    seed: int = 0,
) -> ClientSplit:
    """Return labelled examples split among clients, each of which gets examples of a few classes only.

    No example goes to two clients: those of a class are divided evenly among its clients.

    Args:
        data: arrays ``(inputs, labels)``, or a name as for `nk.load_data`.
        clients: how many clients there are.
        classes: how many classes each has.
        test: arrays to test on, split in the same way, if any.
        deal: "random" draws each client's classes so that all classes have about as many clients; "groups" cuts the
            classes into groups, in order, and gives each group to as many clients, one after the other.
        equal: whether examples are left out so that all clients have as many to train on, of each of their classes.
        seed: of the drawing.

    Example:
        >>> found = split_by_classes((torch.zeros(12, 2), torch.arange(12) % 4), clients=4, classes=2, deal="groups")
        >>> found.classes
        {'0': (0, 1), '1': (0, 1), '2': (2, 3), '3': (2, 3)}
        >>> [len(labels) for _, labels in found.train.values()]
        [3, 3, 3, 3]
    """
    inputs, labels = as_examples(data, "`data`")
    every = labels.unique().tolist()
    _refuse_counts(clients, classes, len(every))
    if deal not in DEALS:
        raise UnknownName(f"classes are dealt by {' or '.join(map(repr, DEALS))}; got deal={deal!r}.")
    generator = torch.Generator().manual_seed(seed)
    held = _grouped(every, clients, classes) if deal == "groups" else _drawn(every, clients, classes, generator)
    names = [str(number) for number in range(clients)]
    train = _dealt(inputs, labels, held, names, generator, equal)
    tests = {} if test is None else _dealt(*as_examples(test, "`test`"), held, names, generator)
    return ClientSplit(train, tests, dict(zip(names, held, strict=True)))


def checked_clients(clients: Any, test: Any) -> tuple[dict[str, LabelledData], dict[str, LabelledData]]:
    """Return the examples of all clients by name, for training and for tests; refuse what can't be trained on.

    `test` has some for each client, or is one pair of arrays for all of them, or None.
    """
    train = {name: as_examples(own, f"client {name!r}") for name, own in _named(clients).items()}
    if not train:
        raise ValueFault("a federation needs clients; give a mapping from names to `(inputs, labels)`.")
    empty = [name for name, (_, labels) in train.items() if not len(labels)]
    if empty:
        raise ValueFault(
            f"{len(empty)} of {len(train)} clients have no examples to train on: {_listed(empty)}; leave them out, or "
            "deal out fewer clients."
        )
    if test is None:
        return train, {}
    if isinstance(test, tuple):
        whole = as_examples(test, "`test`")
        return train, dict.fromkeys(train, whole)
    tests = {name: as_examples(own, f"the test data of client {name!r}") for name, own in _named(test).items()}
    strange, missing = [name for name in tests if name not in train], [name for name in train if name not in tests]
    if strange or missing:
        raise UnknownName(
            f"`test` must have data for each client; it has {len(strange)} of others ({_listed(strange)}) and lacks "
            f"{len(missing)} ({_listed(missing)})."
        )
    return train, {name: tests[name] for name in train if len(tests[name][1])}


def as_examples(data: Any, what: str) -> LabelledData:
    """Return arrays of inputs and class numbers, or those that a name as for `nk.load_data` means, as tensors."""
    data = labelled_arrays(data, what) if isinstance(data, str) else data
    found = arrays_in(tuple(data)) if isinstance(data, (tuple, list)) else None
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(one, Tensor) for one in found):
        raise ValueFault(f"{what} must be arrays `(inputs, labels)`; got {type(data).__name__}.")
    inputs, labels = found
    if labels.ndim != 1 or labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
        raise ShapeError(
            f"{what} must have class numbers of 0 or more as labels, one for each example; got "
            f"{str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}."
        )
    return inputs, labels.long()


def _named(clients: Any) -> dict[str, Any]:
    if isinstance(clients, Mapping):
        found = {str(name): own for name, own in clients.items()}
        if len(found) < len(clients):
            raise NameClash("clients must have distinct names, also as texts.")
        return found
    if isinstance(clients, Sequence) and not isinstance(clients, (str, bytes, tuple)):
        return {str(number): own for number, own in enumerate(clients)}
    raise ValueFault(
        f"clients are a mapping from names to `(inputs, labels)`, or a list of these; got {type(clients).__name__}."
    )


def _refuse_counts(clients: Any, classes: Any, available: int) -> None:
    for name, value in (("clients", clients), ("classes", classes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueFault(f"`{name}` must be a whole number of 1 or more; got {value!r}.")
    if classes > available:
        raise ValueFault(f"a client can't have {classes} classes: the data have {available}.")


def _grouped(every: list[int], clients: int, classes: int) -> list[tuple[int, ...]]:
    groups = [tuple(every[start : start + classes]) for start in range(0, len(every), classes)]
    if len(every) % classes or clients % len(groups):
        raise ValueFault(
            f"{len(every)} classes in groups of {classes} can't be given to {clients} clients, as many to each group; "
            "choose numbers that divide each other, or deal='random'."
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


def _dealt(
    inputs: Tensor, labels: Tensor, held: list[tuple[int, ...]], names: list[str], generator: torch.Generator,
    equal: bool = False,
) -> dict[str, LabelledData]:  # fmt: skip
    """Divide the examples of each class among the clients that hold it; the first of them changes with the class."""
    rows: list[list[Tensor]] = [[] for _ in held]
    owners = {one: [k for k, own in enumerate(held) if one in own] for one in sorted({c for own in held for c in own})}
    counts = labels.bincount(minlength=max(owners) + 1).tolist()
    most = min(counts[one] // len(own) for one, own in owners.items()) if equal else None
    for turn, (one, own) in enumerate(owners.items()):
        places = (labels == one).nonzero().flatten().cpu()
        order = places[torch.randperm(len(places), generator=generator)]
        first = turn % len(own)
        for owner, part in zip(own[first:] + own[:first], order.tensor_split(len(own)), strict=True):
            rows[owner].append(part[:most])
    joined = [torch.cat(own).to(labels.device) for own in rows]
    return {name: (inputs[own], labels[own]) for name, own in zip(names, joined, strict=True)}


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more
