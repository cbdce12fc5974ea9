"""Dynamic sparse training: masks that move while a network trains, so that weights are dropped and others grown.

SET: Mocanu et al. (2018), arXiv:1707.04780. RigL: Evci et al. (2020), arXiv:1911.11134.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from netkin.applications.sparsity.masks import (
    MaskableLayer,
    mask_of,
    mask_of_largest,
    masked_layers,
    memories_of,
    weight_behind,
)
from netkin.errors import UnknownName, ValueFault, did_you_mean
from netkin.training import Hook

METHODS = ("rigl", "set")


class DynamicMasks(Hook):
    """A hook of `nk.train` by which a sparse network drops its smallest weights now and then, and grows as many others.

    Each layer keeps its number of weights, so that the sparsity stays exact. "rigl" grows where the gradient of the
    batch is largest, also among the weights just dropped, drops a share that falls from `fraction` to zero in half a
    cosine, and at these steps moves masks instead of weights, as Algorithm 1 of its paper does. "set" grows at random
    among weights that were masked before, a constant share, after the step. Weights that grow begin at zero, and what
    an optimizer remembers of them and of dropped ones is forgotten.

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
        if method not in METHODS:
            hint = did_you_mean(str(method), METHODS) or "."
            raise UnknownName(f"no dynamic method {method!r}{hint} There are {' and '.join(METHODS)}.")
        for name, value in (("every", every), ("until", until)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueFault(f"`{name}` must be a whole number of steps, 1 or more; got {value!r}.")
        if not 0 < fraction < 1:
            raise ValueFault(f"`fraction` is a share of the weights that are left, between 0 and 1; got {fraction!r}.")
        self.method, self.every, self.until, self.fraction, self.seed = method, every, until, fraction, seed
        self.settings = [method, every, until, fraction, seed]
        self.moved = 0  # weights that have been grown so far
        self._optimizer: Optimizer | None = None
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Find the masks, and the optimizer that is to forget what changes."""
        if not masked_layers(model):
            raise ValueFault("the model has no masks that could move; `nk.sparsify(model, sparsity)` gives it some.")
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
        if self.method != "rigl" or not self.share(step):
            return
        if not gradients:
            raise ValueFault(
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
            kept = _keep(layer, int(_mask(layer).sum()) - count)
            self._move(layer, kept | mask_of_largest(gradient.abs().masked_fill(kept, -1.0), count))
        for weight in model.parameters():
            weight.grad = None

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> None:
        """Let SET's masks move after its steps, and look out for the next gradient where RigL needs it."""
        if self.method == "set" and self.share(step):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            for layer in masked_layers(model).values():
                left = _mask(layer)
                worth = torch.rand(left.shape, generator=generator, dtype=torch.float64).to(left.device)
                count = min(self._count(layer, step), int((~left).sum()))  # as many as there is room to grow
                kept = _keep(layer, int(left.sum()) - count)
                self._move(layer, kept | mask_of_largest(worth.masked_fill(left, -1.0), count))
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
            mask = mask_of(layer)
            assert mask is not None
            self._handles.append(mask.register_forward_hook(partial(self._catch, name)))

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
        return int(self.share(step) * int(_mask(layer).sum()))

    def _move(self, layer: MaskableLayer, mask: Tensor) -> None:
        """Give a layer its new mask; weights that come or go are zero, and so is what an optimizer knows of them."""
        own, weight = mask_of(layer), weight_behind(layer)
        assert own is not None
        grown, changed = mask & ~own.mask, mask ^ own.mask
        self.moved += int(grown.sum())
        own.mask.copy_(mask)
        weight.masked_fill_(changed, 0.0)
        for value in memories_of(weight, self._optimizer) if self._optimizer is not None else ():
            value.masked_fill_(changed, 0.0)


def _mask(layer: MaskableLayer) -> Tensor:
    own = mask_of(layer)
    assert own is not None
    return own.mask


def _keep(layer: MaskableLayer, count: int) -> Tensor:
    """Return a mask of the `count` largest weights among those that are left."""
    return mask_of_largest(weight_behind(layer).abs().masked_fill(~_mask(layer), -1.0), count)


def _over_processes(gradient: Tensor) -> Tensor:
    """Return the mean over the processes that train together, so that their masks stay one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
        return gradient / torch.distributed.get_world_size()
    return gradient
