"""Routing: which experts a mixture of experts chooses for each token, and which tokens two models route differently.

Where two experts score nearly the same, rounding decides, and the token's output differs by far more than rounding.
That is no fault of the experts, nor of a router that scores as it should: such tokens are not counted. A router that
chooses otherwise at scores that are clearly apart is counted in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from netkin.results.diff import THRESHOLD


@dataclass(frozen=True)
class Choice:
    """Which of several scores were chosen for each token, and in which call of a module."""

    call: str
    scores: Tensor  # tokens × experts
    chosen: Tensor  # tokens × choices, in the order of the experts


class Choices(TorchFunctionMode):
    """Inside the `with`, notes what `topk` and `argmax` choose along the last axis of a matrix or larger tensor.

    `call` returns the name of the call that is at work.
    """

    def __init__(self, call: Callable[[], str] = str):
        super().__init__()
        self.call, self.made = call, list[Choice]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.__name__ in ("topk", "argmax") and args:
            chosen = result.indices if function.__name__ == "topk" else result[..., None]
            scores = args[0]
            if scores.is_floating_point() and 1 < scores.ndim == chosen.ndim and scores.shape[:-1] == chosen.shape[:-1]:
                self._note(scores.detach(), chosen.detach())
        return result

    def _note(self, scores: Tensor, chosen: Tensor) -> None:
        if 0 < chosen.shape[-1] < scores.shape[-1]:
            ordered = chosen.flatten(0, -2).sort(-1).values.cpu()
            self.made.append(Choice(self.call(), scores.flatten(0, -2).to("cpu", torch.float32, copy=True), ordered))


def score_limits(own: Sequence[Choice], floors: Sequence[Sequence[Choice]], scales: Sequence[float]) -> list[float]:
    """Return by how much rounding moves the scores of each router, generously.

    Args:
        own: the choices of a module.
        floors: those of the same module in other precisions.
        scales: by how much less rounding there is in the module itself than in each of these.
    """
    limits = []
    for place, one in enumerate(own):
        limit = 1e-7 * float(one.scores.abs().amax())
        for choices, scale in zip(floors, scales, strict=True):
            if place < len(choices) and is_alike(one, choices[place]):
                limit += scale * float((one.scores - choices[place].scores).abs().amax(1).median())
        limits.append(THRESHOLD**2 * limit)
    return limits


def rerouted(first: Sequence[Choice], second: Sequence[Choice], limits: Sequence[float] | None = None) -> Tensor | None:
    """Return for which tokens other experts were chosen because the scores differ, by as much as that takes.

    With `limits`, only where the scores of a router differ by no more than rounding may.
    """
    tokens: Tensor | None = None
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if not is_alike(one, other):
            continue
        lost = one.scores.gather(1, one.chosen).sum(1) - one.scores.gather(1, other.chosen).sum(1)
        moved = (one.scores - other.scores).abs().amax(1)
        apart = (one.chosen != other.chosen).any(1) & (lost <= 2 * one.chosen.shape[1] * moved)
        if limits is not None:
            apart &= moved <= limits[place]
        if tokens is None or len(tokens) == len(apart):
            tokens = apart if tokens is None else tokens | apart
    return tokens if tokens is not None and tokens.any() else None


def agreement(first: Choice, second: Choice, valid: Tensor | None) -> tuple[int, int]:
    """Return how many tokens have the same experts in both, of how many that count."""
    same = (first.chosen == second.chosen).all(1)
    counted = same if valid is None or valid.numel() != len(same) else same[valid.flatten()]
    return int(counted.sum()), len(counted)


def is_alike(first: Choice, second: Choice) -> bool:
    """Return whether two choices are of as many tokens, experts and choices."""
    return first.scores.shape == second.scores.shape and first.chosen.shape == second.chosen.shape
