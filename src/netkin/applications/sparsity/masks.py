"""Masks: which weights of a network stay zero when it is trained, copied or saved; and which weights are small.

A mask is a parametrization of torch (`torch.nn.utils.parametrize`), so that a masked layer computes with weights that
are exactly zero where the mask is, whatever an optimizer, momentum or weight decay does to the tensor behind them. The
masks are buffers: they travel with `state_dict`, to other devices and with copies.

The *prunable* weights are those of linear and convolutional layers. Biases, embeddings, norms and whatever a module
keeps as a parameter of its own (as `in_proj_weight` of `nn.MultiheadAttention`) are left dense.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from netkin import files
from netkin.errors import InvalidValue, ShapeError
from netkin.representations.layer_weights import own_weights
from netkin.representations.layers import Spec, choose, layer_label, modules, require_weights, unwrapped
from netkin.results.weight_sparsity import LayerSparsity, WeightSparsity
from netkin.settings import evaluating
from netkin.sources.names import by_name

MaskableLayer = (
    nn.Linear
    | nn.Conv1d
    | nn.Conv2d
    | nn.Conv3d
    | nn.ConvTranspose1d
    | nn.ConvTranspose2d
    | nn.ConvTranspose3d
)  # fmt: skip
KINDS = "linear and convolutional layers"


class WeightMask(nn.Module):
    """The parametrization of a weight that is exactly zero wherever the boolean `mask` is False."""

    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with zeros where it is masked; also where it is not finite there."""
        return torch.where(self.mask, weight, 0.0)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return what is kept behind a weight: zeros too, so that decay and momentum have nothing to work on."""
        return self.forward(weight)


def prunable_layers(model: nn.Module, layers: Spec = None) -> dict[str, MaskableLayer]:
    """Return the linear and convolutional layers of a model by name, or those of them that `layers` requests.

    Example:
        >>> list(prunable_layers(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))))
        ['0', '3']
    """
    require_weights(unwrapped(model))
    known = modules(model)
    names = list(known) if layers is None else choose(model, layers)
    found: dict[str, MaskableLayer] = {}
    for name in names:
        module = known[name]
        if isinstance(module, MaskableLayer) and not any(module is one for one in found.values()):
            found[name] = module
    if not found:
        asked = "the model has" if layers is None else f"layers={layers!r} names"
        raise InvalidValue(f"there is nothing to prune: {asked} no {KINDS}, whose weights can be masked.")
    return found


def mask_of(layer: nn.Module) -> WeightMask | None:
    """Return the mask on a layer's weight, or None where it has none."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    return next((one for one in layer.parametrizations["weight"] if isinstance(one, WeightMask)), None)  # type: ignore


def own_mask(layer: nn.Module) -> WeightMask:
    """Return the mask of a layer that has one."""
    own = mask_of(layer)
    assert own is not None
    return own


def masked_layers(model: nn.Module) -> dict[str, MaskableLayer]:
    """Return the layers of a model that have masks, by the first name of each."""
    first = {id(module): (name, module) for name, module in reversed(modules(model).items())}
    return {name: one for name, one in reversed(first.values()) if mask_of(one) is not None}  # type: ignore[misc]


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all masks of a model, by layer."""
    return {name: mask_of(layer).mask.clone() for name, layer in masked_layers(model).items()}  # type: ignore[union-attr]


def weight_behind(layer: nn.Module) -> Tensor:
    """Return the parameter that an optimizer changes: a layer's weight, or what lies behind its mask."""
    behind = layer.parametrizations["weight"].original if mask_of(layer) is not None else layer.weight  # type: ignore
    return behind  # type: ignore[return-value]


def memories_of(weight: Tensor, optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer remembers of each element of a weight, such as its momentum."""
    remembered = optimizer.state.get(weight, {})
    return [value for value in remembered.values() if isinstance(value, Tensor) and value.shape == weight.shape]


def mask_of_largest(values: Tensor, count: int) -> Tensor:
    """Return a mask that keeps the `count` largest values; of equals the first.

    Example:
        >>> mask_of_largest(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), 2)
        tensor([[False,  True],
                [ True, False]])
    """
    order = values.flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[order[:count]] = True
    return mask.reshape(values.shape)


@torch.no_grad()
def put_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Mask the weights of layers, in place of masks that they have; weights that are masked become zero.

    Weights that an earlier mask held at zero and this one sets free begin at zero. Optimizers of the model go on: the
    parameters are the same tensors, under the name ``LAYER.parametrizations.weight.original``.
    """
    known = modules(model)
    for name, mask in masks.items():
        _require_fitting_mask(model, name, known[name], mask)  # all, before any is masked
    for name, mask in masks.items():
        layer = known[name]
        mask = mask.to(weight_behind(layer).device, torch.bool)
        own = mask_of(layer)
        if own is None:
            parametrize.register_parametrization(layer, "weight", WeightMask(mask.clone()))
        else:
            own.mask.copy_(mask)
            behind = weight_behind(layer)
            behind.copy_(own(behind))


@torch.no_grad()
def put_back(model: nn.Module, state: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Give a model, masked or not, the weights and buffers of a dense one, and masks."""
    own, layers = model.state_dict(), masked_layers(model)
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        target = weight_behind(layers[layer]) if layer in layers and kind == "weight" else own[name]
        target.copy_(value)
    put_masks(model, masks)


def bake_masks(model: nn.Module) -> nn.Module:
    """Make masks plain: each masked weight becomes an ordinary parameter with zeros in it; return the same model.

    Its state dict then has the names and shapes of the unmasked model, and loads without netkin. Further training would
    move the zeros.
    """
    for layer in masked_layers(model).values():
        _own_class(layer)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        for name in [one for one in layer._parameters if one != "weight"]:  # the bias comes after the weight again
            layer._parameters[name] = layer._parameters.pop(name)
    return model


def save_sparse(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the state dict of a model with its masks baked in, in which zeros take next to no room.

    It is an ordinary file of `torch.save`, compressed: ``model.load_state_dict(torch.load(path))`` reads it without
    netkin (not with ``mmap=True``). The model keeps its masks. A file is written over only with `overwrite`.
    """
    files.write_bytes(path, packed_bytes(baked_state(model)), overwrite=overwrite)


def packed_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return what `torch.save` writes of a state dict, compressed, as `torch.load` reads it."""
    plain, small = io.BytesIO(), io.BytesIO()
    torch.save(dict(state), plain)
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
    return small.getvalue()


def baked_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the model has without masks, with zeros where they are; the model stays as it is."""
    inner, found = unwrapped(model), {}
    masked = masked_layers(model)
    inside = tuple(f"{name}.parametrizations.weight." if name else "parametrizations.weight." for name in masked)
    for key, value in inner.state_dict().items():
        if not key.startswith(inside):
            found[key] = value.detach().cpu() if isinstance(value, Tensor) else value  # of quantised layers
    for name, layer in masked.items():
        found[f"{name}.weight" if name else "weight"] = layer.weight.detach().cpu().contiguous()
    return found


def _own_class(layer: nn.Module) -> None:
    """Give a layer a class of its own: torch takes `weight` off the class, which copies of a masked layer share."""
    own = type(layer)
    parts = {name: value for name, value in vars(own).items() if name not in ("__dict__", "__weakref__")}
    layer.__class__ = type(own.__name__, own.__bases__, parts)


def _require_fitting_mask(model: nn.Module, name: str, layer: nn.Module, mask: Tensor) -> None:
    if not isinstance(layer, MaskableLayer):
        raise InvalidValue(f"{layer_label(name)} is a {type(layer).__name__}; masks go on {KINDS}.")
    if mask.shape != layer.weight.shape:
        shapes = f"{tuple(layer.weight.shape)}; got {tuple(mask.shape)}"
        raise ShapeError(f"the mask of {layer_label(name)} must have the shape of its weight, {shapes}.")
    if mask_of(layer) is not None:
        return
    if "weight" not in layer._parameters:
        raise InvalidValue(
            f"the weight of {layer_label(name)} is computed by something else already (a parametrization, "
            "`weight_norm`, or a mask of `torch.nn.utils.prune`); make it plain first, or leave the layer out."
        )
    owners = [f"{place}.{own}".lstrip(".") for place, module in unwrapped(model).named_modules()
              for own, weight in module._parameters.items() if weight is layer.weight]  # fmt: skip
    if len(owners) > 1:
        raise InvalidValue(
            f"the weight of {layer_label(name)} is shared as {' and '.join(map(repr, owners))}, and a mask would end "
            "that; leave the layer out with `layers=`."
        )


# --- how small weights are --------------------------------------------------------------------------------------------


@by_name(models="model")
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
    _require_epsilons([epsilon])
    chosen = prunable_layers(model, layers)
    either = {"relative": [epsilon]} if relative else {"epsilons": [epsilon]}
    table = layer_table(model, chosen, **either)
    if of_left and not table.left:
        raise InvalidValue("no weight is left, so that there is no share of those that are left.")
    return table.shares(relative=relative, of_left=of_left)[0]


def masked_share(model: nn.Module, layers: Sequence[str]) -> float:
    """Return the share of the weights of some layers that are masked."""
    masks, chosen = masks_of(model), prunable_layers(model, layers)
    total = sum(layer.weight.numel() for layer in chosen.values())
    return int(sum(int((~mask).sum()) for mask in masks.values())) / total


@torch.no_grad()
def layer_table(
    model: nn.Module,
    layers: Mapping[str, MaskableLayer],
    epsilons: Sequence[float] = (),
    relative: Sequence[float] = (),
) -> WeightSparsity:
    """Return the counts of zero, masked and small weights of each layer."""
    _require_epsilons([*epsilons, *relative])
    with evaluating(model):  # where spectral norm only reads its vectors
        rows = tuple(_row(name, layer, epsilons, relative) for name, layer in layers.items())
    total = sum(weight.numel() for weight in unwrapped(model).parameters())
    return WeightSparsity(rows, tuple(epsilons), tuple(relative), total - sum(row.weights for row in rows))


def _row(name: str, layer: MaskableLayer, epsilons: Sequence[float], relative: Sequence[float]) -> LayerSparsity:
    sizes, left = weight_sizes(name, layer)
    kept = sizes[left]
    rms = kept.square().mean().sqrt().item() if len(kept) else 0.0
    scaled = [epsilon * rms if rms else float("inf") for epsilon in relative]  # all are zero where there is no scale
    kind = parametrize.type_before_parametrizations(layer).__name__
    return LayerSparsity(
        name, kind, tuple(layer.weight.shape), len(sizes), len(kept), int((sizes == 0).sum()), rms,
        *(tuple(int((part < epsilon).sum()) for epsilon in values)
          for values, part in ((epsilons, sizes), (epsilons, kept), (scaled, sizes), (scaled, kept))),
    )  # fmt: skip


def weight_sizes(name: str, layer: MaskableLayer) -> tuple[Tensor, Tensor]:
    """Return the sizes of a layer's weights in double precision, in a row, and which of them are left.

    These are the weights that are not masked; in a layer without a mask, as one of a file into which masks were baked,
    those that are not exactly zero.
    """
    sizes, own = own_weights(layer)["weight"].detach().double().abs().flatten(), mask_of(layer)
    if not torch.isfinite(sizes).all():
        raise InvalidValue(
            f"{int((~torch.isfinite(sizes)).sum()):,} of {len(sizes):,} weights of {layer_label(name)} are not finite."
        )
    return sizes, sizes != 0 if own is None else own.mask.flatten()


def _require_epsilons(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
            raise InvalidValue(f"ε is a size above 0 that weights are compared with; got {value!r}.")
