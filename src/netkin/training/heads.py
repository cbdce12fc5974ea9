"""Heads that are trained on what fixed networks give them, and ensembles of such networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import InvalidValue
from netkin.representations.inputs import device_of, dtype_of
from netkin.settings import evaluating
from netkin.training.example_order import in_order, placed


@torch.no_grad()
def before_head(model: nn.Module, head: str, inputs: Tensor) -> Tensor:
    """Return what a model gives to its head, in evaluation mode; a layer whose output is not the model's is refused."""
    seen: dict[str, Any] = {}

    def see(module: nn.Module, received: tuple[Any, ...], output: Any) -> None:
        seen["input"], seen["output"] = received[0], output

    handle, features = model.get_submodule(head).register_forward_hook(see), list[Tensor]()
    try:
        with evaluating(model):
            for batch in in_order(inputs):
                seen.clear()
                output = model(placed(batch, device_of(model), dtype_of(model)))
                if not seen or not torch.equal(seen["output"], output):
                    raise InvalidValue(f"the head must be the last layer of the network, and {head!r} is not.")
                features.append(seen["input"])
    finally:
        handle.remove()
    return torch.cat(features)


@torch.no_grad()
def probabilities(head: nn.Module, features: Tensor) -> Tensor:
    """Return the probabilities of classes that a head gives to features, in float64 on the host."""
    with evaluating(head):
        return head(features).double().softmax(-1).cpu()


def ensemble_accuracy(members: Sequence[Tensor], labels: Tensor) -> float:
    """Return the accuracy of the mean of several networks' probabilities."""
    predicted = torch.stack(list(members)).mean(0).argmax(-1)
    return float((predicted == labels.cpu()).double().mean())
