"""Rounds: which updates of clients count, why others do not, and their mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from netkin.applications.federated.algorithms import State


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """What a client sends after its training in a round."""

    client: str
    round: int
    weights: Mapping[str, Tensor]
    examples: int


def sampled(names: Sequence[str], share: float, seed: int, number: int) -> list[str]:
    """Return the clients of a round, drawn anew for each: a share of all, at least one, in their own order."""
    count = max(1, round(share * len(names)))
    if count == len(names):
        return list(names)
    generator = torch.Generator().manual_seed(mixed(seed, number))
    return [names[place] for place in sorted(torch.randperm(len(names), generator=generator)[:count].tolist())]


def mixed(*what: Any) -> int:
    """Return a seed that follows from several numbers and texts."""
    return int.from_bytes(blake2b(" ".join(map(str, what)).encode(), digest_size=6).digest(), "little")


def received_updates(
    updates: Iterable[ClientUpdate], asked: Sequence[str], number: int, expected: Mapping[str, Tensor]
) -> tuple[list[ClientUpdate], dict[str, str]]:
    """Return the updates that count, in the order of `asked`, and why the others do not, by client.

    Args:
        updates: what came, in whatever order.
        asked: the clients of this round.
        number: the round.
        expected: weights as each client should send them.
    """
    good, faults = dict[str, ClientUpdate](), dict[str, str]()
    for one in updates:
        reason = _fault(one, asked, number, expected)
        if not reason and one.client in good:
            reason = "sent more than one update; the first counts"
        if reason:
            faults[one.client] = reason
        else:
            good[one.client] = one
    missing = {name: "dropped out: no update came" for name in asked if name not in good and name not in faults}
    return [good[name] for name in asked if name in good], faults | missing


def averaged(updates: Sequence[ClientUpdate], like: Mapping[str, Tensor]) -> State:
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


def _fault(update: ClientUpdate, asked: Sequence[str], number: int, expected: Mapping[str, Tensor]) -> str:
    if update.round != number:
        return f"came late: an update of round {update.round} in round {number}"
    if update.client not in asked:
        return f"was not asked in round {number}"
    if isinstance(update.examples, bool) or not isinstance(update.examples, int) or update.examples < 1:
        return f"claims {update.examples!r} examples"
    apart = sorted(set(update.weights) ^ set(expected))
    if apart:
        return f"sent {len(update.weights)} weights, not {len(expected)}; they differ in {apart[0]!r}"
    for name, own in update.weights.items():
        if not isinstance(own, Tensor) or own.shape != expected[name].shape:
            shape = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            return f"sent {name!r} of shape {shape}, not {tuple(expected[name].shape)}"
        if not own.is_floating_point():
            return f"sent {name!r} as {str(own.dtype).removeprefix('torch.')}"
        bad = own.numel() - int(own.isfinite().sum())
        if bad:
            return f"sent {bad:,} values of {name!r} that are not finite"
    return ""


def mean_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of losses that are finite; None where there is none."""
    found = [one for one in losses if math.isfinite(one)]
    return sum(found) / len(found) if found else None
