"""`Federation`: what became of clients, what travelled, and how alike they are; saved and opened."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from netkin import __version__, files
from netkin.applications.federated.algorithms import PARTS
from netkin.applications.federated.rounds import RoundRecord
from netkin.errors import ShapeError, UnknownName, did_you_mean
from netkin.representations.layers import unwrapped
from netkin.results import Comparison
from netkin.results.packing import packed, unpacked
from netkin.results.records import checked, freeze, frozen_mapping, now, optional, plain_fields, rebuild, same_fields

KIND = "federation"
ARRAYS = ("shared", "personal")
MAPPINGS = ("examples", "accuracy", "parts", "unjudged", "untuned", "provenance")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Federation:
    """A federation that has ended: frozen, with the networks of all clients and how they came to be.

    `accuracy` is that of each client on its own test data, without those in `unjudged`, which says why; `untuned` says
    why the fine-tuning of a client failed, whose network is then as the last round left it. `shared` holds
    the weights that all clients have in common, `personal` the others, with a row for each client; `parts` tells which
    part of the network each weight is. In each round every client that is asked receives `numbers` numbers, those of
    the weights in `travels`, and sends as many; `leaks` says what that gives away. `similarity` is None where all
    clients end with one network.
    """

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
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            freeze(self, **{name: frozen_mapping(getattr(self, name))})
        for name in ARRAYS:
            freeze(self, **{name: frozen_mapping({key: _still(one) for key, one in getattr(self, name).items()})})

    @property
    def mean_accuracy(self) -> float:
        """The plain mean of the clients' accuracies, NaN without any."""
        return float(np.mean(list(self.accuracy.values()))) if self.accuracy else float("nan")

    @property
    def faults(self) -> tuple[tuple[int, str, str], ...]:
        """What went wrong: the round, the client and the reason of each; the client may have counted all the same."""
        return tuple((one.round, client, why) for one in self.rounds for client, why in one.faults.items())

    def state(self, client: str) -> dict[str, np.ndarray]:
        """Return all weights and buffers of a client's network."""
        if client not in self.clients:
            raise UnknownName(f"no client {client!r} here{did_you_mean(str(client), self.clients) or '.'}")
        row = self.clients.index(client)
        return {**self.shared, **{name: own[row] for name, own in self.personal.items()}}

    def model(self, client: str, like: nn.Module) -> nn.Module:
        """Return the network of a client: a copy of `like`, the network that was federated, with its weights."""
        made, state = copy.deepcopy(unwrapped(like)), self.state(client)
        with torch.no_grad():
            for name, own in (*made.named_parameters(), *made.named_buffers()):
                if name not in state or state[name].shape != tuple(own.shape):
                    held = "none" if name not in state else f"one of shape {state[name].shape}"
                    raise ShapeError(
                        f"`like` has a weight {name!r} of shape {tuple(own.shape)}, and the federation {held}; give "
                        "the network that was federated."
                    )
                own.copy_(torch.from_numpy(np.array(state[name])))
        return made

    def __str__(self) -> str:
        source = f" with {self.coefficients} coefficients" if self.coefficients else ""
        lines = [f"{self.algorithm}{source}: {len(self.clients)} clients, {len(self.rounds)} rounds"]
        if self.accuracy:
            values = sorted(self.accuracy.values())
            lines.append(f"accuracy: mean {self.mean_accuracy:.4f}, from {values[0]:.4f} to {values[-1]:.4f}")
        lines.append(f"travels: {self._travels_in_words}")
        lines.append(f"leaks: {self.leaks}")
        lines += [
            f"round {one.round}, client {client}: {one.told(client)}" for one in self.rounds for client in one.faults
        ]
        lines += [f"client {client} could not be fine-tuned: {why}" for client, why in self.untuned.items()]
        lines += [f"client {client} has no accuracy: {why}" for client, why in self.unjudged.items()]
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Federation):
            return NotImplemented
        mine, others = dict(self._arrays()), dict(other._arrays())
        alike = mine.keys() == others.keys() and all(np.array_equal(one, others[key]) for key, one in mine.items())
        return alike and same_fields(replace(self, shared={}, personal={}), replace(other, shared={}, personal={}))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (Federation, plain_fields(self))

    def __repr__(self) -> str:
        return f"Federation({self.algorithm!r}, {len(self.clients)} clients, {len(self.rounds)} rounds)"

    @property
    def _travels_in_words(self) -> str:
        if not self.travels:
            return "nothing"
        kinds = dict.fromkeys(self.parts[name] for name in self.travels)
        return f"{', '.join(kinds)}: {self.numbers:,} numbers each way, for each client in each round"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each client: its examples, its accuracy, and how often it counted."""
        counted = {name: sum(name in one.counted for one in self.rounds) for name in self.clients}
        rows = [
            {"client": name, "examples": self.examples[name], "accuracy": self.accuracy.get(name), "counted": times}
            for name, times in counted.items()
        ]
        return optional("pandas").DataFrame(rows).set_index("client")

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the federation to one file, whole or not at all; `nk.load` opens it."""
        header: dict[str, Any] = {name: dict(getattr(self, name)) for name in MAPPINGS}
        rest = ("algorithm", "coefficients", "clients", "travels", "numbers", "leaks", "seed", "version", "created")
        header |= {name: getattr(self, name) for name in rest}
        header["rounds"] = [plain_fields(one) for one in self.rounds]
        arrays = dict(self._arrays())
        if self.similarity is not None:
            header["similarity"], own = packed(self.similarity, "similarity/")
            arrays |= own
        files.write(path, KIND, header, arrays, overwrite=overwrite)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for kind in ARRAYS:
            yield from ((f"{kind}/{name}", one) for name, one in getattr(self, kind).items())


def load_federation(path: str | os.PathLike[str]) -> Federation:
    """Return the federation that was saved at `path`."""
    header, arrays = files.read(path, KIND)
    with files.damage_reported(path):
        found = {kind: dict[str, np.ndarray]() for kind in ARRAYS}
        for key, one in arrays.items():
            kind, _, name = key.partition("/")
            if kind in found:
                found[kind][name] = one
        own = {name: value for name, value in header.items() if name not in ("kind", "format", "similarity")}
        similarity = header.get("similarity")
        alike = None if similarity is None else unpacked(similarity, arrays, "similarity/")
        made = checked(Federation, own | found | {"similarity": alike})
        _refuse_misfit(made)
        return made


def _refuse_misfit(found: Federation) -> None:
    """Refuse what a file says where its clients, weights and arrays do not go together."""
    clients, names = set(found.clients), {*found.shared, *found.personal}
    atoms = [name for name, part in found.parts.items() if part == "atoms"]
    held = {**found.shared, **{name: one[0] for name, one in found.personal.items() if one.ndim and len(one)}}
    sound = {
        "clients": len(clients) == len(found.clients) and set(found.examples) == clients,
        "accuracies": clients.issuperset([*found.accuracy, *found.unjudged, *found.untuned]),
        "parts": set(found.parts) == names and set(found.parts.values()) <= set(PARTS),
        "travels": names.issuperset(found.travels) and not names.difference(held),
        "personal weights": all(one.ndim and len(one) == len(clients) for one in found.personal.values()),
        "atoms": all(held[name].ndim == 3 and held[name].dtype.kind == "f" for name in atoms if name in held),
        "similarity": found.similarity is None or found.similarity.layers_a == found.clients,
    }
    wrong = [what for what, fine in sound.items() if not fine]
    if wrong:
        raise ValueError(f"its {wrong[0]} do not fit the rest")


def _still(array: Any) -> np.ndarray:
    copied = np.array(array, order="C")
    copied.flags.writeable = False
    return copied
