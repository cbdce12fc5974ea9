"""Federated algorithms: what a client does in a round, what it sends and reveals, and which updates the server uses.

Each is written once, as a function of the weights that were received, what each client keeps, and a `RoundWork` that
knows the clients' data and trains. The simulator lets it train many clients at once, Flower one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.federated.local_training import CountedTraining, LocalTraining
from netkin.errors import InvalidValue, UnknownName, did_you_mean, require_listed
from netkin.representations.filters import atom_layers
from netkin.representations.layers import modules
from netkin.sources.batches import LabelledData
from netkin.sources.weights import StateDict

PARTS = ("atoms", "coefficients", "head", "body")  # of a network
# where the coefficients come from, while the atoms of each client are its own
SOURCES = {
    "fixed": "as the model has them, and never trained: random in a new network",
    "pretrained": "trained on public data first, then fixed",
    "evolving": "trained by the clients, and averaged after each round",
    "federated": "trained with all else by the algorithm; atoms become personal by fine-tuning alone",
}


ClientStep = Callable[[StateDict, Sequence[StateDict], "RoundWork"], tuple[list[StateDict], list[StateDict]]]


def _train_all(
    received: StateDict, kept: Sequence[StateDict], work: RoundWork
) -> tuple[list[StateDict], list[StateDict]]:
    """Train everything at once, from what was received and what was kept."""
    found = work.train([received | own for own in kept])
    return found, found


def _train_near(
    received: StateDict, kept: Sequence[StateDict], work: RoundWork
) -> tuple[list[StateDict], list[StateDict]]:
    """Add ``prox / 2 ‖w − received‖²`` to each client's loss."""
    found = work.train([received | own for own in kept], toward=received)
    return found, found


def _train_in_turn(
    received: StateDict, kept: Sequence[StateDict], work: RoundWork
) -> tuple[list[StateDict], list[StateDict]]:
    """Train what is personal first, and then what travels."""
    found = work.train([received | own for own in kept], work.plan.kept, epochs=work.head_epochs)
    found = work.train(found, work.plan.travelling)
    return found, found


def _train_twice(
    received: StateDict, kept: Sequence[StateDict], work: RoundWork
) -> tuple[list[StateDict], list[StateDict]]:
    """Train the common network, and beside it a personal one that is pulled toward the common one as received."""
    sent = work.train([received] * len(kept))
    return sent, work.train([received | own for own in kept], work.plan.kept, toward=received)


@dataclass(frozen=True)
class FederatedAlgorithm:
    """One algorithm: which parts of a network travel, what a client does, and where it was published."""

    name: str
    shares: frozenset[str]
    local: ClientStep
    reference: str
    pretrains: bool = False


_ALL, _BUT_HEAD = frozenset(PARTS), frozenset(PARTS) - {"head"}
ALGORITHMS = {
    one.name: one
    for one in (
        FederatedAlgorithm("fedavg", _ALL, _train_all, "McMahan et al. (2017), arXiv:1602.05629"),
        FederatedAlgorithm("fedprox", _ALL, _train_near, "Li et al. (2020), arXiv:1812.06127"),
        FederatedAlgorithm("fedper", _BUT_HEAD, _train_all, "Arivazhagan et al. (2019), arXiv:1912.00818"),
        FederatedAlgorithm("fedrep", _BUT_HEAD, _train_in_turn, "Collins et al. (2021), arXiv:2102.07078"),
        FederatedAlgorithm("ditto", _ALL, _train_twice, "Li et al. (2021), arXiv:2012.04221"),
        FederatedAlgorithm("local", frozenset(), _train_all, "each client by itself"),
        FederatedAlgorithm("pretrain", frozenset(), _train_all, "public data first, then by itself", pretrains=True),
    )
}


@dataclass(frozen=True)
class FederatedPlan:
    """What becomes of each weight under an algorithm: it travels, it is kept by its client, or it is fixed.

    Weights are named as in the model; `parts` maps each to its part of the network. A weight without
    gradients is fixed and the same for all.
    """

    algorithm: FederatedAlgorithm
    coefficients: str | None
    parts: Mapping[str, str]
    trained: tuple[str, ...]
    travelling: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def personal_at_last(self) -> tuple[str, ...]:
        """Which weights a client changes when it fine-tunes its network: atoms and head, or without atoms all."""
        if self.coefficients is None:
            return self.trained
        return tuple(name for name in self.trained if self.parts[name] in ("atoms", "head"))

    @property
    def leaks(self) -> str:
        """What others can learn of a client's data from what it sends, as text."""
        atoms = any(self.parts[name] == "atoms" for name in self.kept)
        handed = " To be compared with others, a client hands its atoms over once." * atoms
        if not self.travelling:
            return "Nothing travels in the rounds, and nothing leaks." + handed
        parts = [part for part in PARTS if any(self.parts[name] == part for name in self.travelling)]
        texts = [f"The server sees each client's {' and '.join(parts)} after its training, and its number of examples."]
        texts += [_LEAKS[part] for part in parts if part in _LEAKS]
        texts.append(
            "Averaging alone gives no protection: without secure aggregation or added noise each update can be read."
        )
        return " ".join(texts) + handed


_LEAKS = {
    "head": "Rows of the head that moved tell which classes a client has, and its bias about how many of each.",
    "body": "From the change of weights and biases examples of small batches can be reconstructed.",
    "coefficients": "Coefficients mix all channels: how they moved tells more of the examples than atoms do.",
    "atoms": "Atoms are few numbers; they tell how alike the data of two clients are.",
}


def plan_for(
    model: nn.Module, algorithm: str, coefficients: str | None = None, head: str | None = None
) -> FederatedPlan:
    """Return what becomes of each weight of a model under an algorithm.

    Args:
        model: the network, as all clients have it at first.
        algorithm: a name in `ALGORITHMS`.
        coefficients: a name in `SOURCES`, with which each client's atoms are its own; None for any network.
        head: the layer that is the head; by default the last `nn.Linear`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3))
        >>> plan_for(net, "fedper").travelling
        ('0.weight', '0.bias')
    """
    require_listed("federated algorithm", algorithm, ALGORITHMS, "algorithm")
    if coefficients is not None:
        require_listed("source of coefficients", coefficients, SOURCES, "coefficients")
    found = ALGORITHMS[algorithm]
    parts = parts_of(model, head)
    if coefficients is not None and "atoms" not in parts.values():
        raise InvalidValue(
            "the model has no layers made of atoms; make some by `nk.decompose(model, atoms=...).model`, or give "
            "coefficients=None.",
            argument="coefficients",
        )
    if coefficients == "federated" and not found.shares:
        raise InvalidValue(
            f"with {algorithm!r} no coefficients are trained together; take 'fixed', 'pretrained' or 'evolving' ones.",
            argument="coefficients",
        )
    if "head" not in found.shares and "head" not in parts.values() and found.shares:
        head_of(model, head)
    fixed = {"coefficients"} if coefficients in ("fixed", "pretrained") else set()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and parts[name] not in fixed]
    if not trained:
        raise InvalidValue("none of the model's weights may be trained; see their `requires_grad`.")
    moving = [*trained, *(name for name, buffer in model.named_buffers() if buffer.is_floating_point())]
    travelling = tuple(name for name in moving if parts[name] in _shared(found, coefficients))
    counts = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
    own = _kept(found, coefficients, moving, travelling, parts)
    return FederatedPlan(found, coefficients, parts, tuple(trained), travelling, (*own, *counts))


def _shared(algorithm: FederatedAlgorithm, coefficients: str | None) -> frozenset[str]:
    found = set(algorithm.shares)
    if coefficients in ("fixed", "pretrained", "evolving") and algorithm.name != "ditto":
        found -= {"atoms"}
    return frozenset(found | ({"coefficients"} if coefficients == "evolving" else set()))


def _kept(
    algorithm: FederatedAlgorithm, coefficients: str | None, moving: Sequence[str], travelling: Sequence[str],
    parts: Mapping[str, str],
) -> list[str]:  # fmt: skip
    if algorithm.name != "ditto":
        return [name for name in moving if name not in travelling]
    return [name for name in moving if parts[name] != "coefficients" or coefficients is None]


def parts_of(model: nn.Module, head: str | None = None) -> dict[str, str]:
    """Return which part each weight and buffer of a model belongs to: atoms, coefficients, head or body."""
    linear = any(isinstance(module, nn.Linear) for module in modules(model).values())
    start = f"{head_of(model, head)}." if head is not None or linear else None
    layers = [name for name, _ in atom_layers(model)]
    whole = {f"{layer}.{part}".lstrip("."): part for layer in layers for part in ("atoms", "coefficients")}
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: whole.get(name, "head" if start and name.startswith(start) else "body") for name in names}


def head_of(model: nn.Module, head: str | None = None) -> str:
    """Return the name of the head: the one that is given, or the last linear layer."""
    known = modules(model)
    if head is not None:
        if head not in known or not head:
            raise UnknownName(
                f"the model has no layer {head!r} to be its head{did_you_mean(head, known) or '.'}", argument="head"
            )
        return head
    linear = [name for name, module in known.items() if isinstance(module, nn.Linear) and name]
    if not linear:
        raise InvalidValue(
            "the model has no `nn.Linear` that could be its head; name a layer by `head=`.", argument="head"
        )
    return linear[-1]


@dataclass(eq=False)
class RoundWork:
    """The training of one round's clients; `failed` holds the reasons where there is no result."""

    training: LocalTraining | CountedTraining
    plan: FederatedPlan
    base: StateDict
    clients: Sequence[tuple[str, LabelledData]]
    number: int
    seed: int
    prox: float
    head_epochs: int | None
    failed: dict[int, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    phase: int = 0

    def train(
        self, starts: Sequence[StateDict], only: Sequence[str] | None = None, *, toward: StateDict | None = None,
        epochs: int | None = None,
    ) -> list[StateDict]:  # fmt: skip
        """Return the weights of all clients, trained from `starts`; those of a client that failed are left alone."""
        self.phase += 1
        names = [name for name in (self.plan.trained if only is None else only) if name in self.plan.trained]
        places = [place for place in range(len(self.clients)) if place not in self.failed]
        outcomes = self.training.train(
            [self.base | starts[place] for place in places],
            [self.clients[place][1] for place in places],
            [mixed(self.seed, self.number, self.clients[place][0], self.phase) for place in places],
            names, epochs=epochs, toward=toward, prox=self.prox,
        )  # fmt: skip
        after = list(starts)
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, str):
                self.failed[place] = f"its training failed: {outcome}"
            else:
                after[place], self.losses[place] = outcome
        return after


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """What a client sends after its training in a round."""

    client: str
    round: int
    weights: Mapping[str, Tensor]
    examples: int


Wire = Callable[[ClientUpdate], Iterable[ClientUpdate]]


def read_updates(came: Any) -> list[ClientUpdate]:
    """Return the updates that a wire let arrive; anything else is refused."""
    found = list(came) if isinstance(came, Iterable) else [came]
    if not all(isinstance(one, ClientUpdate) for one in found):
        raise InvalidValue(
            f"`wire` must return a list of the updates that arrive, `[update]` or `[]`; got {came!r}.", argument="wire"
        )
    return found


def require_fraction(fraction: Any) -> None:
    """Refuse a share of the clients that is not above 0 and at most 1."""
    if not 0 < fraction <= 1:
        sentence = f"`client_fraction` is a share of the clients, above 0 and at most 1; got {fraction!r}."
        raise InvalidValue(sentence, argument="client_fraction")


def sampled(names: Sequence[str], fraction: float, seed: int, number: int) -> list[str]:
    """Return the clients of a round, drawn for each round: a fraction of all, at least one, in their own order."""
    count = max(1, round(fraction * len(names)))
    if count == len(names):
        return list(names)
    generator = torch.Generator().manual_seed(mixed(seed, number))
    return [names[place] for place in sorted(torch.randperm(len(names), generator=generator)[:count].tolist())]


def mixed(*what: Any) -> int:
    """Return a seed that follows from several numbers and texts."""
    return int.from_bytes(blake2b(" ".join(map(str, what)).encode(), digest_size=6).digest(), "little")


def received_updates(
    updates: Iterable[ClientUpdate],
    asked: Sequence[str],
    number: int,
    expected: Mapping[str, Tensor],
    examples: Mapping[str, int] | None = None,
) -> tuple[list[ClientUpdate], dict[str, str]]:
    """Return the updates that count, in the order of `asked`, and why the others do not, by client.

    Args:
        updates: the received updates, in any order.
        asked: the clients of this round.
        number: the round.
        expected: weights as each client should send them.
        examples: how many examples each client has, where that is known; a real server does not know it.
    """
    good, faults = dict[str, ClientUpdate](), dict[str, str]()
    for one in updates:
        reason = _fault(one, asked, number, expected, examples or {})
        if not reason and one.client in good:
            reason = "sent more than one update; the first counts"
        if reason:
            faults[one.client] = reason
        else:
            good[one.client] = one
    missing = {name: "dropped out: no update came" for name in asked if name not in good and name not in faults}
    return [good[name] for name in asked if name in good], faults | missing


def averaged(updates: Sequence[ClientUpdate], like: Mapping[str, Tensor]) -> StateDict:
    """Return the mean of updates, weighted by their numbers of examples, summed in float64, as precise as `like`.

    Example:
        >>> two = [ClientUpdate("a", 1, {"w": torch.tensor(1.0)}, 1), ClientUpdate("b", 1, {"w": torch.tensor(5.0)}, 3)]
        >>> averaged(two, {"w": torch.zeros(())})
        {'w': tensor(4.)}
    """
    total = sum(one.examples for one in updates)
    shares = [one.examples / total for one in updates]
    found = {}
    for name, own in like.items():
        parts = [one.weights[name].to(own.device, torch.float64) * s for one, s in zip(updates, shares, strict=True)]
        found[name] = torch.stack(parts).sum(0).to(own.dtype)
    return found


def _fault(
    update: ClientUpdate,
    asked: Sequence[str],
    number: int,
    expected: Mapping[str, Tensor],
    examples: Mapping[str, int],
) -> str:
    if update.round != number:
        return f"came late: an update of round {update.round} in round {number}"
    if update.client not in asked:
        return f"was not asked in round {number}"
    if isinstance(update.examples, bool) or not isinstance(update.examples, int) or update.examples < 1:
        return f"claims {update.examples!r} examples"
    if update.examples != examples.get(update.client, update.examples):
        return f"claims {update.examples:,} examples and has {examples[update.client]:,}"
    sent: Any = update.weights  # of another kind than it should be, perhaps
    if not isinstance(sent, Mapping):
        return f"sent a {type(sent).__name__} in place of weights by their names"
    apart = sorted(set(update.weights) ^ set(expected), key=str)
    if apart:
        return f"sent {len(update.weights)} weights, not {len(expected)}; they differ in {apart[0]!r}"
    for name, own in update.weights.items():
        if isinstance(own, Tensor) and (own.is_nested or own.is_meta or own.layout is not torch.strided):
            return f"sent {name!r} as a nested, sparse or meta tensor; send a dense one, with values"
        if not isinstance(own, Tensor) or own.shape != expected[name].shape:
            shape = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            return f"sent {name!r} of shape {shape}, not {tuple(expected[name].shape)}"
        if not own.is_floating_point():
            return f"sent {name!r} as {_dtype_name(own)}"
        # in the network's own precision: 1e200 is finite in float64, and infinite in a mean of float32
        bad = own.numel() - int(own.to(expected[name].dtype).isfinite().sum())
        if bad:
            rounded = "" if own.dtype == expected[name].dtype else f" in {_dtype_name(expected[name])}"
            return f"sent {bad:,} values of {name!r} that are not finite{rounded}"
    return ""


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def mean_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of losses that are finite; None where there is none."""
    found = [one for one in losses if math.isfinite(one)]
    return sum(found) / len(found) if found else None
