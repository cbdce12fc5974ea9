"""ε-sparsity: what share of a network's weights is smaller than ε, absolutely or beside its layer's r.m.s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from netkin.applications.sparsity.masks import Layer, mask_of, prunable_layers
from netkin.errors import ValueFault
from netkin.representations.layers import Spec, unwrapped
from netkin.results.weight_sparsity import LayerSparsity, WeightSparsity

EPSILONS = (1e-4, 1e-3, 1e-2)
RELATIVE = (0.01, 0.1, 0.5)


def epsilon_sparsity(
    model: nn.Module, epsilon: float, *, relative: bool = False, of_left: bool = False, layers: Spec = None
) -> float:
    """Return the share of prunable weights whose size is below `epsilon`, from 0 to 1.

    As ε falls to zero this becomes the share of weights that are exactly zero, the sparsity: below the smallest weight
    that is not zero both are equal. With `relative`, ε is in units of each layer's root mean square over weights that
    are left, which a rescaling of the layer does not change; a layer without any counts as wholly below. Left are
    weights that are not masked or, in layers without a mask, not exactly zero.

    Args:
        model: The network, masked or not.
        epsilon: A size above 0.
        relative: Whether `epsilon` is times the layer's r.m.s.
        of_left: Count among weights that are left alone.
        layers: Which layers; all linear and convolutional ones by default.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> model.weight.data = torch.tensor([[0.0, 0.01, 1.0]])
        >>> round(epsilon_sparsity(model, 0.1), 4), round(epsilon_sparsity(model, 1e-6), 4)
        (0.6667, 0.3333)
    """
    _refuse_epsilons([epsilon])
    chosen = prunable_layers(model, layers)
    either = {"relative": [epsilon]} if relative else {"epsilons": [epsilon]}
    table = layer_table(model, chosen, **either)
    if of_left and not table.left:
        raise ValueFault("no weight is left, so that there is no share of those that are left.")
    return table.shares(relative=relative, of_left=of_left)[0]


@torch.no_grad()
def layer_table(
    model: nn.Module,
    layers: Mapping[str, Layer],
    epsilons: Sequence[float] = (),
    relative: Sequence[float] = (),
) -> WeightSparsity:
    """Return the counts of zero, masked and small weights of each layer."""
    _refuse_epsilons([*epsilons, *relative])
    rows = tuple(_row(name, layer, epsilons, relative) for name, layer in layers.items())
    total = sum(weight.numel() for weight in unwrapped(model).parameters())
    return WeightSparsity(rows, tuple(epsilons), tuple(relative), total - sum(row.weights for row in rows))


def _row(name: str, layer: Layer, epsilons: Sequence[float], relative: Sequence[float]) -> LayerSparsity:
    sizes, left = weight_sizes(layer)
    kept = sizes[left]
    rms = kept.square().mean().sqrt().item() if len(kept) else 0.0
    scaled = [epsilon * rms if rms else float("inf") for epsilon in relative]  # all are zero where there is no scale
    kind = next(base.__name__ for base in type(layer).__mro__ if not base.__name__.startswith("Parametrized"))
    return LayerSparsity(
        name, kind, tuple(layer.weight.shape), len(sizes), len(kept), int((sizes == 0).sum()), rms,
        *(tuple(int((part < epsilon).sum()) for epsilon in values)
          for values, part in ((epsilons, sizes), (epsilons, kept), (scaled, sizes), (scaled, kept))),
    )  # fmt: skip


def weight_sizes(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the sizes of a layer's weights in double precision, in a row, and which of them are left.

    These are the weights that are not masked; in a layer without a mask, as one of a file into which masks were baked,
    those that are not exactly zero.
    """
    sizes, own = layer.weight.detach().double().abs().flatten(), mask_of(layer)
    if not torch.isfinite(sizes).all():
        raise ValueFault(
            f"{int((~torch.isfinite(sizes)).sum()):,} of {len(sizes):,} weights of a layer are not finite."
        )
    return sizes, sizes != 0 if own is None else own.mask.flatten()


def _refuse_epsilons(values: Sequence[float]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueFault(f"ε is a size above 0 that weights are held against; got {value!r}.")
