"""Lottery tickets: sparse networks found by training, pruning the smallest weights, and rewinding.

Frankle and Carbin (2019), arXiv:1803.03635; rewinding to an early step, Frankle et al. (2020), arXiv:1912.05671.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from netkin.applications.sparsity.masks import (
    baked_state,
    mask_of,
    masked_layers,
    masks_of,
    memories_of,
    prunable_layers,
    put_masks,
    weight_behind,
)
from netkin.applications.sparsity.sparsify import magnitude_scores, masks_overall, refuse_sparsity
from netkin.errors import ValueFault, refuse_below
from netkin.progress import ProgressOption, reporting, showing
from netkin.representations.layers import Spec, unwrapped
from netkin.sources.names import by_name
from netkin.training import Hook, Recipe, Record, train
from netkin.training.loop import Loss
from netkin.training.recipe import recipe_of


@dataclass(frozen=True)
class Ticket:
    """One round: the share of masked weights, the last record of its training, and which weights were left."""

    sparsity: float
    record: Record
    masks: Mapping[str, Tensor]


@dataclass(frozen=True)
class Tickets:
    """All rounds, from the dense network to the sparsest, and the weights to which each went back."""

    rounds: tuple[Ticket, ...]
    start: Mapping[str, Tensor]
    rewind: int

    def put_on(self, model: nn.Module, number: int = -1) -> nn.Module:
        """Give `model`, of the same form and without masks, the untrained ticket of a round, and return it."""
        unwrapped(model).load_state_dict(dict(self.start))
        put_masks(model, self.rounds[number].masks)
        return model

    def __str__(self) -> str:
        lines = [f"{len(self.rounds)} rounds, each back at step {self.rewind:,}"]
        for ticket in self.rounds:
            figures = ", ".join(
                f"{key} {ticket.record[key]:.4f}" for key in ("loss", "accuracy") if key in ticket.record
            )
            lines.append(f"sparsity {ticket.sparsity:.4f}: {figures}")
        return "\n".join(lines)


@by_name(models="model")
def lottery_tickets(
    model: nn.Module,
    data: Any,
    recipe: Recipe | None = None,
    *,
    sparsity: float,
    rounds: int | None = None,
    rewind: int = 0,
    layers: Spec = None,
    test: Any = None,
    seed: int = 0,
    loss: Loss | None = None,
    hooks: Sequence[Any] = (),
    save: str | os.PathLike[str] | None = None,
    progress: ProgressOption = None,
    **settings: Any,
) -> Tickets:
    """Find lottery tickets by iterative magnitude pruning, and return those of all rounds.

    The network is trained; then, round for round, its smallest weights over all prunable layers are masked, those that
    stay go back to where they were after step `rewind` of the first training, and it is trained again. In each round
    the same share of what is left goes, so that the last reaches `sparsity` to one weight. The model is afterwards the
    trained ticket of the last round.

    A later round takes the first `rewind` steps too and then puts weights, buffers and the optimizer's memory back, so
    that rates and order of the examples are those of a training from that step on.

    Args:
        model: The network without masks, at its start; it is changed.
        data: As for `nk.train`.
        recipe: How each round trains.
        sparsity: The share of masked weights in the last round, from 0 to below 1.
        rounds: After how many rounds it is reached; by default each takes about a fifth of what is left.
        rewind: The step to go back to; 0 is the start.
        layers: Which layers are pruned; all linear and convolutional ones by default.
        test: Data on which loss and accuracy are taken after each epoch.
        seed: Of each training.
        loss: A function of ``(outputs, labels)``.
        hooks: More hooks of each training.
        save: A folder in which each round's training is kept, so that the same call resumes where it stopped.
        progress: None shows a bar, False nothing; or a function of ``(done, total, what)``.
        **settings: Settings of the recipe.

    Example:
        >>> inputs = torch.randn(64, 20)
        >>> model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> found = lottery_tickets(model, (inputs, inputs[:, 0].gt(0).long()), sparsity=0.75, rounds=2, epochs=3)
        >>> [ticket.sparsity for ticket in found.rounds]
        [0.0, 0.5, 0.75]
    """
    chosen, steps = recipe_of(recipe, settings), _rounds(sparsity, rounds)
    inner, names = unwrapped(model), list(prunable_layers(model, layers))
    _refuse_settings(inner, rewind, chosen)
    first, kept_state = _copied(baked_state(inner)), _Rewinding(rewind)
    found: list[Ticket] = []
    with showing(progress), reporting(steps + 1, "lottery tickets", "rounds") as report:
        for number in range(steps + 1):
            if number:
                share = 1 - (1 - sparsity) ** (number / steps) if number < steps else sparsity  # the last is exact
                masks = _pruned(inner, names, share)
                _put_back(inner, first, masks)
            place = None if save is None else _place(save, number)
            own = [*hooks, kept_state.of_round(number)]
            history = train(model, data, chosen, test=test, seed=seed, loss=loss, hooks=own, save=place, progress=False)
            if rewind and not kept_state.state:
                raise ValueFault(f"rewind={rewind:,} lies beyond the last step, {int(history[-1]['step']):,}.")
            found.append(Ticket(_sparsity(inner, names), history[-1], masks_of(inner)))
            report.update()
    return Tickets(tuple(found), kept_state.state or first, rewind)


class _Rewinding:
    """What is kept of the first round at the step to go back to, and put back in all others."""

    def __init__(self, step: int):
        self.step, self.state, self.memory = step, dict[str, Tensor](), dict[str, dict[str, Tensor]]()

    def of_round(self, number: int) -> Hook:
        return _Keep(self) if number == 0 else _Restore(self)


class _Keep(Hook):
    """Keep weights, buffers and the optimizer's memory after a step."""

    def __init__(self, shared: _Rewinding):
        self.shared, self.settings = shared, shared.step

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == self.shared.step:
            self.shared.state = _copied(baked_state(model))
            self.shared.memory = {
                name: _tensors(one) for name, one in _memories(unwrapped(model), self.optimizer).items()
            }

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.shared.state, "memory": self.shared.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shared.state, self.shared.memory = dict(state["state"]), dict(state["memory"])


class _Restore(Hook):
    """Restore what was kept after a step, as far as masks let it through."""

    def __init__(self, shared: _Rewinding):
        self.shared, self.settings = shared, shared.step

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def after_step(self, model: nn.Module, step: int) -> None:
        if step != self.shared.step:
            return
        _put_back(unwrapped(model), self.shared.state, masks_of(model))
        for name, own in _memories(unwrapped(model), self.optimizer).items():
            for key, value in self.shared.memory[name].items():
                own[key].copy_(value)
        for layer in masked_layers(model).values():
            mask, weight = mask_of(layer), weight_behind(layer)
            for value in memories_of(weight, self.optimizer):
                value.copy_(mask(value))  # type: ignore[misc]


def _memories(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return what an optimizer remembers of each parameter, by the name that this has without masks."""
    weights = {
        name.replace("parametrizations.weight.original", "weight"): one for name, one in model.named_parameters()
    }
    return {name: optimizer.state[one] for name, one in weights.items() if one in optimizer.state}


def _tensors(memory: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in memory.items() if isinstance(value, Tensor)}


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@torch.no_grad()
def _put_back(model: nn.Module, state: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Give a model, masked or not, the weights and buffers of a dense one, and masks."""
    own, layers = model.state_dict(), masked_layers(model)
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        target = weight_behind(layers[layer]) if layer in layers and kind == "weight" else own[name]
        target.copy_(value)
    put_masks(model, masks)


def _pruned(model: nn.Module, layers: Sequence[str], sparsity: float) -> dict[str, Tensor]:
    """Return masks without the smallest of all weights; those that were masked are zero, and so among them."""
    scores = magnitude_scores(model, layers)
    for name, mask in masks_of(model).items():
        scores[name] = scores[name].masked_fill(~mask, -1.0)
    total = sum(one.numel() for one in scores.values())
    return masks_overall(scores, total - round(float(sparsity) * total))


def _sparsity(model: nn.Module, layers: Sequence[str]) -> float:
    masks, chosen = masks_of(model), prunable_layers(model, layers)
    total = sum(layer.weight.numel() for layer in chosen.values())
    return int(sum(int((~mask).sum()) for mask in masks.values())) / total


def _place(folder: str | os.PathLike[str], number: int) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"round {number}.netkin"


def _rounds(sparsity: float, rounds: int | None) -> int:
    refuse_sparsity(sparsity)
    if rounds is None:
        return max(1, round(math.log(1 - sparsity) / math.log(0.8)))
    refuse_below(1, rounds=rounds)
    return rounds


def _refuse_settings(model: nn.Module, rewind: int, recipe: Recipe) -> None:
    if masked_layers(model):
        raise ValueFault(
            "tickets begin with a dense network, and this model has masks; `nk.bake_masks` takes them off."
        )
    if isinstance(rewind, bool) or not isinstance(rewind, int) or rewind < 0:
        raise ValueFault(f"`rewind` is the step to go back to, 0 or more; got {rewind!r}.")
    if recipe.steps is not None and rewind > recipe.steps:
        raise ValueFault(f"rewind={rewind:,} lies beyond the last step, {recipe.steps:,}.")
