"""`Federation`: accuracies of clients, bytes sent, and similarities of clients; saved and opened."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from netkin import __version__
from netkin.errors import ShapeError, require_listed
from netkin.results.caveats import Caveat
from netkin.results.comparison import Comparison
from netkin.results.distances import user_clusters
from netkin.results.labels import plural
from netkin.results.packing import LongForm, Result
from netkin.results.quantity import ACCURACY, Quantity
from netkin.results.records import FrozenRecord, now, optional
from netkin.results.text import terminal_width, wrapped
from netkin.results.values import Values

COLUMNS = ("client", "examples", "accuracy", "asked", "counted")  # of the rows; a similarity adds "cluster"


@dataclass(frozen=True)
class RoundRecord(FrozenRecord):
    """One round: the selected clients, whose updates were used, why the others were not, and the mean training loss.

    `accuracy` is that of each client after the round, where clients were tested then.
    """

    round: int
    asked: tuple[str, ...]
    counted: tuple[str, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None
    accuracy: Mapping[str, float] = field(default_factory=dict)

    def fault_text(self, client: str) -> str:
        """Return what went wrong with a client, and whether its update of this round counted all the same."""
        return self.faults[client] + " (its update of this round counted)" * (client in self.counted)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Federation(Result):
    """The result of a federation: immutable, with the networks of all clients and the provenance.

    `accuracy` is that of each client on its own test data, without those in `unjudged`, which holds the reasons;
    `untuned` holds the reasons why the fine-tuning of a client failed, whose network is then that of the last round.
    `shared` holds the weights that all clients have in common, `personal` the others, with a row for each client;
    `parts` maps each weight to its part of the network. In each round every selected client receives `numbers` numbers,
    those of the weights in `travels`, and sends as many; `leaks` describes what that reveals. `similarity` is None
    where all clients end with one network.
    """

    kind: ClassVar[str] = "federation"
    left_out: ClassVar[tuple[str, ...]] = ("shared", "personal")  # of documents: the weights

    algorithm: str
    coefficients: str | None
    clients: tuple[str, ...]
    examples: Mapping[str, int]
    accuracy: Mapping[str, float]
    rounds: tuple[RoundRecord, ...]
    parts: Mapping[str, str]
    travels: tuple[str, ...]
    numbers: int
    leaks: str
    shared: Mapping[str, np.ndarray]
    personal: Mapping[str, np.ndarray]
    similarity: Comparison | None = None
    unjudged: Mapping[str, str] = field(default_factory=dict)
    untuned: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    version: str = __version__
    created: str = field(default_factory=now)
    caveats: tuple[Caveat, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What was federated, and by how many."""
        source = f" with {self.coefficients} coefficients" if self.coefficients else ""
        return f"{self.algorithm}{source}: {plural(len(self.clients), 'client')}, {plural(len(self.rounds), 'round')}"

    @property
    def mean_accuracy(self) -> float:
        """The plain mean of the clients' accuracies, NaN without any."""
        return float(np.mean(list(self.accuracy.values()))) if self.accuracy else float("nan")

    @property
    def faults(self) -> tuple[tuple[int, str, str], ...]:
        """What went wrong: the round, the client and the reason of each; the client may have counted all the same."""
        return tuple((record.round, client, why) for record in self.rounds for client, why in record.faults.items())

    @cached_property
    def clusters(self) -> tuple[int, ...] | None:
        """The cluster of each client, as `nk.user_clusters` finds them by the similarity; None without one."""
        return None if self.similarity is None else user_clusters(self.similarity)

    @property
    def accuracies(self) -> Mapping[int, Mapping[str, float]]:
        """The accuracy of each client after each round in which clients were tested, by the rounds' numbers."""
        return {record.round: record.accuracy for record in self.rounds if record.accuracy}

    @property
    def quantity(self) -> Quantity:
        """What the accuracies are."""
        return replace(ACCURACY, convention="on the client's own test data")

    def accuracy_table(self) -> Values | None:
        """Return the accuracy of each client after each round in which clients were tested; None without such."""
        rounds = self.accuracies
        if not rounds:
            return None
        values = np.array([[tested.get(client, math.nan) for tested in rounds.values()] for client in self.clients])
        columns = tuple(f"round {number}" for number in rounds)
        missing = {
            (self.clients[i], columns[j]): self.unjudged.get(self.clients[i], "it was not tested then")
            for i, j in np.argwhere(np.isnan(values)).tolist()
        }
        return Values(
            quantity=self.quantity, layers_a=self.clients, layers_b=columns, values=values, missing=missing,
            statistic="accuracies", axes=("client", "round"),
        )  # fmt: skip

    def state(self, client: str) -> dict[str, np.ndarray]:
        """Return all weights and buffers of a client's network."""
        require_listed("client", client, self.clients)
        row = self.clients.index(client)
        return {**self.shared, **{name: rows[row] for name, rows in self.personal.items()}}

    def model(self, client: str, like: Any) -> Any:
        """Return the network of a client: a copy of `like`, the network that was federated, with its weights."""
        made, state = copy.deepcopy(_unwrapped(like)), self.state(client)
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if name not in state or state[name].shape != tuple(tensor.shape):
                held = "none" if name not in state else f"one of shape {state[name].shape}"
                raise ShapeError(
                    f"`like` has a weight {name!r} of shape {tuple(tensor.shape)}, and the federation {held}; give "
                    "the network that was federated.",
                    argument="like",
                )
            tensor.detach().copy_(tensor.new_tensor(state[name]))
        return made

    def __str__(self) -> str:
        lines = [self.title]
        if self.accuracy:
            values = sorted(self.accuracy.values())
            lines.append(f"accuracy: mean {self.mean_accuracy:.4f}, from {values[0]:.4f} to {values[-1]:.4f}")
        lines.append(f"travels: {self.travels_in_words}")
        lines.append(f"leaks: {self.leaks}")
        lines += [
            f"round {record.round}, client {client}: {record.fault_text(client)}"
            for record in self.rounds
            for client in record.faults
        ]
        lines += [f"client {client} could not be fine-tuned: {why}" for client, why in self.untuned.items()]
        lines += [f"client {client} has no accuracy: {why}" for client, why in self.unjudged.items()]
        if self.similarity is not None:
            lines.append(f"clusters by {self.similarity.measures[0]}: {'; '.join(map(', '.join, self.groups()))}")
        lines += [f"note: {caveat}" for caveat in self.caveats]
        return "\n".join(wrapped(line, terminal_width()) for line in lines)

    def groups(self) -> list[list[str]]:
        """Return the clients of each cluster; none where there is no similarity."""
        groups: dict[int, list[str]] = {}
        for client, cluster in zip(self.clients, self.clusters or (), strict=False):
            groups.setdefault(cluster, []).append(client)
        return list(groups.values())

    def __repr__(self) -> str:
        return f"Federation({self.algorithm!r}, {len(self.clients)} clients, {len(self.rounds)} rounds)"

    @property
    def travels_in_words(self) -> str:
        """Which parts of the network travel, and how many numbers they are."""
        if not self.travels:
            return "nothing"
        kinds = dict.fromkeys(self.parts[name] for name in self.travels)
        return f"{', '.join(kinds)}: {self.numbers:,} numbers each way, for each client in each round"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each client: its examples, accuracy, updates asked for and counted, and any cluster."""
        clusters = self.clusters or (None,) * len(self.clients)
        return [
            {"client": client, "examples": self.examples[client], "accuracy": self.accuracy.get(client)}
            | {kind: sum(client in getattr(record, kind) for record in self.rounds) for kind in ("asked", "counted")}
            | ({} if cluster is None else {"cluster": cluster + 1})
            for client, cluster in zip(self.clients, clusters, strict=True)
        ]

    def to_pandas(self) -> Any:
        """Return `rows` as a data frame, with the clients as its index."""
        columns, rows = self.long_form()
        return optional("pandas").DataFrame(list(rows), columns=columns).set_index("client")

    def long_form(self) -> LongForm:
        """Return `rows` as the names of their columns and their values."""
        rows = self.rows()
        return tuple(rows[0] if rows else COLUMNS), (tuple(row.values()) for row in rows)

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields."""
        return {"quantity": self.quantity, "mean_accuracy": self.mean_accuracy, "clusters": self.clusters}


def _unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of torch, which is not imported here."""
    while "_orig_mod" in model._modules or type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
        model = model._modules["_orig_mod" if "_orig_mod" in model._modules else "module"]
    return model
