"""Sparse training: masks that move while a network trains, and lottery tickets, found by training, pruning, rewinding.

SET: Mocanu et al. (2018), arXiv:1707.04780. RigL: Evci et al. (2020), arXiv:1911.11134.
Tickets: Frankle and Carbin (2019), arXiv:1803.03635; rewinding to an early step, Frankle et al. (2020),
arXiv:1912.05671.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from netkin.applications.sparsity.masks import (
    MaskableLayer,
    baked_state,
    mask_of_largest,
    masked_layers,
    masked_share,
    masks_of,
    memories_of,
    own_mask,
    prunable_layers,
    put_back,
    put_masks,
    weight_behind,
)
from netkin.applications.sparsity.sparsify import magnitude_masks, require_sparsity
from netkin.errors import InvalidValue, require_at_least, require_listed
from netkin.progress import ProgressOption, reporting, showing
from netkin.representations.layers import Spec, unwrapped
from netkin.sources.names import by_name
from netkin.training import Hook, Recipe, Record, train
from netkin.training.loop import Loss
from netkin.training.recipe import recipe_of

METHODS = ("rigl", "set")


class DynamicMasks(Hook):
    """A hook of `nk.train` by which a sparse network drops its smallest weights now and then, and grows as many others.

    Each layer keeps its number of weights, so that the sparsity stays exact. "rigl" grows where the gradient of the
    batch is largest, also among the weights just dropped, drops a share that falls from `fraction` to zero in half a
    cosine, and at these steps moves masks instead of weights, as Algorithm 1 of its paper does. "set" grows at random
    among weights that were masked before, a constant share, after the step. Weights that grow begin at zero, and what
    an optimizer remembers of them and of dropped ones is forgotten. Masks of weights without gradients, as those of
    frozen layers, stay.

    In a loop of your own call `begin`, then `after_backward` and `after_step` as `nk.train` does, steps from 1.

    Args:
        method: "rigl" or "set".
        every: After how many steps masks move.
        until: The step from which on they stay; RigL's authors take three quarters of all steps.
        fraction: The share of a layer's weights that is dropped, at first.
        seed: Of what SET grows at random.

    Example:
        >>> from netkin.applications.sparsity import sparsify
        >>> from netkin.training import train
        >>> model, inputs = nn.Linear(20, 2), torch.randn(64, 20)
        >>> before = sparsify(model, 0.5)
        >>> moving = DynamicMasks("rigl", every=2, until=15)
        >>> history = train(model, (inputs, inputs[:, 0].gt(0).long()), steps=20, hooks=[moving])
        >>> int((model.weight != 0).sum()) == before.left, moving.moved > 0
        (True, True)
    """

    def __init__(
        self, method: str = "rigl", *, every: int = 100, until: int, fraction: float = 0.3, seed: int = 0
    ) -> None:
        require_listed("dynamic method", method, METHODS, "method")
        require_at_least(1, every=every, until=until)
        if not 0 < fraction < 1:
            raise InvalidValue(
                f"`fraction` is a share of the weights that are left, between 0 and 1; got {fraction!r}.",
                argument="fraction",
            )
        self.method, self.every, self.until, self.fraction, self.seed = method, every, until, fraction, seed
        self.settings = [method, every, until, fraction, seed]
        self.moved = 0  # weights that have been grown so far
        self._optimizer: Optimizer | None = None
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Find the masks, and the optimizer that is to forget what changes."""
        if not masked_layers(model):
            raise InvalidValue("the model has no masks that could move; `nk.sparsify(model, sparsity)` gives it some.")
        self._optimizer, self.moved = optimizer, 0
        self._prepare(model, 1)
        self._model = model

    def share(self, step: int) -> float:
        """Return what share of a layer's weights is dropped at a step; zero where masks stay."""
        if step % self.every or step >= self.until:
            return 0.0
        return (
            self.fraction if self.method == "set" else self.fraction / 2 * (1 + math.cos(math.pi * step / self.until))
        )

    @torch.no_grad()
    def after_backward(self, model: nn.Module, step: int) -> None:
        """Let RigL's masks move at its steps, in place of the weights."""
        self._stop_watching()
        gradients, self._gradients = self._gradients, {}
        if self.method != "rigl" or not self.share(step) or not _learning_layers(model):
            return
        if not gradients:
            raise InvalidValue(
                f"RigL saw no gradient of a masked weight before step {step:,}: a compiled model hides them, so train "
                "the plain one; a loop of your own calls `begin`, and then `after_backward` and `after_step` at each "
                "step, from 1."
            )
        gradients = {name: _over_processes(one) for name, one in gradients.items()}
        if not all(torch.isfinite(one).all() for one in gradients.values()):
            return  # loss scaling went too far, and skips this step
        layers = masked_layers(model)
        for name, gradient in gradients.items():  # a layer that is frozen or did not run has none, and stays
            layer, count = layers[name], self._count(layers[name], step)
            kept = _keep(layer, int(own_mask(layer).mask.sum()) - count)
            self._move(layer, kept | mask_of_largest(gradient.abs().masked_fill(kept, -1.0), count))
        for weight in model.parameters():
            weight.grad = None

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> None:
        """Let SET's masks move after its steps, and look out for the next gradient where RigL needs it."""
        if self.method == "set" and self.share(step):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            for layer in _learning_layers(model):
                left = own_mask(layer).mask
                priority = torch.rand(left.shape, generator=generator, dtype=torch.float64).to(left.device)
                count = min(self._count(layer, step), int((~left).sum()))  # as many as there is room to grow
                kept = _keep(layer, int(left.sum()) - count)
                self._move(layer, kept | mask_of_largest(priority.masked_fill(left, -1.0), count))
        self._prepare(model, step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return how many weights were grown, and whether the next step is watched."""
        return {"moved": self.moved, "watching": bool(self._handles)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the masks are the model's own."""
        self.moved = int(state["moved"])
        self._stop_watching()
        if state["watching"]:
            self._watch(self._model)

    def _prepare(self, model: nn.Module, step: int) -> None:
        self._stop_watching()
        if self.method == "rigl" and self.share(step):
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Keep the gradients of all weights in the next backward passes, those of masked ones too."""
        for name, layer in masked_layers(model).items():
            self._handles.append(own_mask(layer).register_forward_hook(partial(self._catch, name)))

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _catch(self, name: str, module: nn.Module, given: Any, weight: Tensor) -> None:
        if weight.requires_grad:
            weight.register_hook(partial(self._keep_gradient, name))

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        before = self._gradients.get(name)
        self._gradients[name] = gradient.detach() if before is None else before + gradient.detach()

    def _count(self, layer: MaskableLayer, step: int) -> int:
        return int(self.share(step) * int(own_mask(layer).mask.sum()))

    def _move(self, layer: MaskableLayer, mask: Tensor) -> None:
        """Give a layer its new mask; weights that come or go are zero, and so is what an optimizer knows of them."""
        own, weight = own_mask(layer), weight_behind(layer)
        grown, changed = mask & ~own.mask, mask ^ own.mask
        self.moved += int(grown.sum())
        own.mask.copy_(mask)
        weight.masked_fill_(changed, 0.0)
        for value in memories_of(weight, self._optimizer) if self._optimizer is not None else ():
            value.masked_fill_(changed, 0.0)


def _learning_layers(model: nn.Module) -> list[MaskableLayer]:
    """Return the layers with masks whose weights are not frozen."""
    return [layer for layer in masked_layers(model).values() if weight_behind(layer).requires_grad]


def _keep(layer: MaskableLayer, count: int) -> Tensor:
    """Return a mask of the `count` largest weights among those that are left."""
    return mask_of_largest(weight_behind(layer).abs().masked_fill(~own_mask(layer).mask, -1.0), count)


def _over_processes(gradient: Tensor) -> Tensor:
    """Return the mean over the processes that train together, so that their masks stay one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
        return gradient / torch.distributed.get_world_size()
    return gradient


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
        save: A folder for the weights of each round, in which the same call resumes where it stopped.
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
    _require_settings(inner, rewind, chosen)
    first, kept_state = _tensors(baked_state(inner)), _Rewinding(rewind)
    found: list[Ticket] = []
    if save is not None:
        Path(save).mkdir(parents=True, exist_ok=True)
    with showing(progress), reporting(steps + 1, "lottery tickets", "rounds") as report:
        for number in range(steps + 1):
            if number:
                share = 1 - (1 - sparsity) ** (number / steps) if number < steps else sparsity  # the last is exact
                masks = magnitude_masks(inner, names, share)
                put_back(inner, first, masks)
            place = None if save is None else Path(save) / f"round {number}.pt"
            own = [*hooks, kept_state.of_round(number)]
            history = train(model, data, chosen, test=test, seed=seed, loss=loss, hooks=own, save=place, progress=False)
            if rewind and not kept_state.state:
                raise InvalidValue(
                    f"rewind={rewind:,} lies beyond the last step, {int(history[-1]['step']):,}.", argument="rewind"
                )
            found.append(Ticket(masked_share(inner, names), history[-1], masks_of(inner)))
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
            self.shared.state = _tensors(baked_state(model))
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
        put_back(unwrapped(model), self.shared.state, masks_of(model))
        for name, own in _memories(unwrapped(model), self.optimizer).items():
            for key, value in self.shared.memory[name].items():
                own[key].copy_(value)
        for layer in masked_layers(model).values():
            for value in memories_of(weight_behind(layer), self.optimizer):
                value.copy_(own_mask(layer)(value))


def _memories(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return what an optimizer remembers of each parameter, by the name that this has without masks."""
    weights = {
        name.replace("parametrizations.weight.original", "weight"): one for name, one in model.named_parameters()
    }
    return {name: optimizer.state[one] for name, one in weights.items() if one in optimizer.state}


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors of a state."""
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def _rounds(sparsity: float, rounds: int | None) -> int:
    require_sparsity(sparsity)
    if rounds is None:
        return max(1, round(math.log(1 - sparsity) / math.log(0.8)))
    require_at_least(1, rounds=rounds)
    return rounds


def _require_settings(model: nn.Module, rewind: int, recipe: Recipe) -> None:
    if masked_layers(model):
        raise InvalidValue(
            "tickets begin with a dense network, and this model has masks; `nk.bake_masks` takes them off."
        )
    require_at_least(0, rewind=rewind)
    if recipe.steps is not None and rewind > recipe.steps:
        raise InvalidValue(f"rewind={rewind:,} lies beyond the last step, {recipe.steps:,}.", argument="rewind")
