"""Channel decorrelation: a term of the loss that keeps the channels of a layer's output apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from netkin.errors import ShapeError, ValueFault
from netkin.representations.filters import AtomConv2d
from netkin.representations.hooks import main_tensor
from netkin.representations.layers import Spec, choose, modules, unwrapped
from netkin.training import Hook

if TYPE_CHECKING:
    from typing_extensions import Self


def channel_correlation(maps: Tensor) -> Tensor:
    """Return ``Σ_{i≠j} (ZᵀZ / rows)²_ij`` of a layer's output, n × channels × ... or n × channels.

    The rows of Z are the examples, and with maps their places, so that the value does not grow with the batch.

    Example:
        >>> float(channel_correlation(torch.tensor([[1.0, 1.0], [1.0, -1.0]])))
        0.0
        >>> float(channel_correlation(torch.tensor([[1.0, 2.0], [1.0, 2.0]])))
        8.0
    """
    if maps.ndim < 2:
        raise ShapeError(f"channels are the second axis of a layer's output; got shape {tuple(maps.shape)}.")
    with torch.autocast(maps.device.type, enabled=False):
        Z = maps.movedim(1, -1).flatten(0, -2).to(torch.promote_types(maps.dtype, torch.float32))
        gram = Z.T @ Z / len(Z)
        return (gram - gram.diagonal().diag()).square().sum()


class Decorrelation(Hook):
    """Adds β Σ_{i≠j} (ZᵀZ / rows)²_ij of some layers' outputs to the loss, while the `with` lasts.

    It is a hook of `nk.train`; in any other training loop add its `term()` to the loss after each forward pass. The
    paper's ZᵀZ is not divided by the rows, the examples times the places of a map: its β times rows² is the β here,
    3e-3 with 128 maps of 8 × 8 one of 2e5.

    Args:
        model: the network that is trained.
        beta: the factor of the term.
        layers: whose channels are kept apart, as in `nk.layers`; by default those of all convolutions.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
        >>> with Decorrelation(model, beta=0.1) as apart:
        ...     loss = model(torch.ones(2, 1, 3, 3)).sum() + apart.term()
        >>> loss.requires_grad, len(model[0]._forward_hooks)
        (True, 0)
    """

    def __init__(self, model: nn.Module, beta: float, layers: Spec = None):
        if not beta >= 0:
            raise ValueFault(f"`beta` is a number of 0 or more; got {beta!r}.")
        known = modules(model)
        convs = [name for name, one in known.items() if isinstance(one, (nn.Conv2d, AtomConv2d))]
        self.names = convs if layers is None else choose(model, layers)
        if not self.names:
            raise ValueFault("the model has no convolutions whose channels could be kept apart; name its `layers`.")
        self.model, self.beta, self.settings = unwrapped(model), beta, {"beta": beta, "layers": self.names}
        self._layers = [known[name] for name in self.names]
        self._terms: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [self.model.register_forward_pre_hook(self._forget)]
        self._handles += [layer.register_forward_hook(self._see) for layer in self._layers]
        return self

    def __exit__(self, *fault: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._terms = [], []

    def term(self) -> Tensor:
        """Return β times the sum over the layers, of the forward pass that was just taken."""
        if not self._handles:
            raise ValueFault("`Decorrelation` sees the outputs of a model inside its `with` alone.")
        if not self._terms:
            raise ValueFault("the term is that of a forward pass with gradients; run the model on a batch first.")
        found, self._terms = self._terms, []
        return self.beta * torch.stack(found).sum()

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, step: int) -> Tensor:
        """Return the term, which `nk.train` adds to its loss."""
        return self.term()

    def _forget(self, *call: Any) -> None:
        self._terms = []

    def _see(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # of a copy: a ReLU that works in place is about to change the output
            self._terms.append(channel_correlation(main_tensor(output, "").clone()))
