"""The directions of a layer's input in order of importance, and projections on the first k of them.

First come the canonical directions, by their correlation with what the layer is compared with. Ten logits have at most
ten of them; after those come the other directions of the layer, uncorrelated over the examples with all before, by the
variance that they hold. So k can be at most the layer's rank, at which nothing is lost.

One layer becomes two: the first maps its input to k directions, the second applies the layer to these. ``W x + b``
becomes ``(W D)(E x) + b'``. The input is projected about its mean, so that ``b' = b + W (mean - D E mean)`` restores
the part of the mean that the projection removes. A convolution becomes a 1 × 1 convolution to k channels and its own
kernel on these. Where it pads with zeros, the mean is missing beyond the border and a bias would be wrong there: one
more channel then carries the constant 1, which is padded with zeros at the border like the input.

A file of a compressed model holds which modules were factored, the weights, and the table.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from netkin import files
from netkin.errors import FileError, InvalidValue
from netkin.measures.directions import svcca_directions
from netkin.representations.layers import layer_label, modules, unwrapped
from netkin.results.compression import Compression, TakenApart
from netkin.results.records import packed, unpacked
from netkin.sources.names import by_name
from netkin.statistics import Moments

PROJECTIONS = ("least_squares", "orthogonal")
LinearOrConv = nn.Linear | nn.Conv2d


@dataclass(frozen=True, eq=False)
class Factors:
    """Two maps and a mean: an input x becomes ``mean + decode @ encode @ (x - mean)``."""

    encode: Tensor  # k × p
    decode: Tensor  # p × k
    mean: Tensor

    @property
    def lost_mean(self) -> Tensor:
        """The part of the mean that the two maps do not let through, which a bias takes up."""
        return self.mean - self.decode @ (self.encode @ self.mean)


@dataclass(frozen=True, eq=False)
class Subspace:
    """All directions of a layer's input, the ones to keep first.

    Over the examples ``(X - mean) @ encode`` are the directions, of unit variance and uncorrelated; `decode` says how
    each neuron follows each of them.
    """

    mean: Tensor
    encode: Tensor  # p × rank
    decode: Tensor  # rank × p
    covariance: Tensor  # p × p

    @property
    def rank(self) -> int:
        return len(self.decode)

    @cached_property
    def basis(self) -> Tensor:
        """Orthonormal rows, rank × p, whose first k span the weights of the first k directions."""
        return torch.linalg.qr(self.encode / torch.linalg.vector_norm(self.encode, dim=0))[0].mT

    def first(self, k: int, projection: str) -> Factors:
        """Return the maps to the first `k` directions and back."""
        if projection == "orthogonal":
            return Factors(self.basis[:k], self.basis[:k].mT, self.mean)
        # of unit length, as weights of half precision would overflow where a direction hardly varies
        lengths = torch.linalg.vector_norm(self.encode[:, :k], dim=0)
        return Factors((self.encode[:, :k] / lengths).mT, self.decode[:k].mT * lengths, self.mean)

    def held(self, projection: str) -> Tensor:
        """Return the shares of the input's variance that the first 1, 2, ... directions hold."""
        if projection == "orthogonal":
            parts = ((self.basis @ self.covariance) * self.basis).sum(1)
        else:
            parts = self.decode.square().sum(1)
        return (parts.cumsum(0) / torch.diagonal(self.covariance).sum()).clamp(max=1)


def subspace(moments: Moments, cut: float = 0.99) -> Subspace:
    """Return the directions of the x side, ordered against the y side; SVCCA keeps the share `cut` of each variance."""
    found = svcca_directions(moments, variance=cut)
    side, aligned, root = moments.x, len(found.correlations), moments.n**0.5
    values, vectors = (part[0, ..., found.x.kept : side.rank] for part in side.eigen)
    # what SVCCA cut off is no noise to us: with all directions the layer must be what it was
    encode = torch.cat([found.x.transform, vectors * (side.scale / values.sqrt())], 1) * root
    decode = torch.cat([found.x.patterns, vectors.mT * (values.sqrt() / side.scale).unsqueeze(1)]) / root
    order = _by_variance(decode, aligned)
    covariance = side.second[0] / (side.scale**2 * moments.n)
    return Subspace(found.x.mean, encode[:, order], decode[order], covariance)


def _by_variance(decode: Tensor, aligned: int) -> Tensor:
    """Return the order that leaves the first `aligned` directions in place and puts the others by falling variance."""
    rest = decode[aligned:].square().sum(1).argsort(descending=True, stable=True)
    return torch.cat([torch.arange(aligned, device=rest.device), rest + aligned])


def factorable(name: str, module: nn.Module) -> LinearOrConv:
    """Return the module if it can be factored into two; otherwise raise an error with the reason."""
    if not name:
        raise InvalidValue(
            "the model is itself the layer; put it into an `nn.Sequential` and name it '0'.", argument="layers"
        )
    kinds = [kind for kind in (nn.Linear, nn.Conv2d) if isinstance(module, kind)]
    if not kinds or type(module).forward is not kinds[0].forward:
        raise InvalidValue(
            f"{layer_label(name)} is {_a(type(module).__name__)}; `compress` takes `nn.Linear` and `nn.Conv2d` "
            "modules, and restricts their inputs.",
            argument="layers",
        )
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        raise InvalidValue(
            f"{layer_label(name)} is a convolution in {module.groups} groups, each of which sees its own channels; "
            "`compress` takes convolutions with groups=1.",
            argument="layers",
        )
    return module


def require_no_hooks(name: str, layer: LinearOrConv) -> None:
    """Refuse a layer with hooks, which would be lost with it."""
    count = len(layer._forward_hooks) + len(layer._forward_pre_hooks)
    if count:
        hooks = "1 hook" if count == 1 else f"{count} hooks"
        raise InvalidValue(
            f"{layer_label(name)} has {hooks} of its own, which the two layers would not have; remove it first."
        )


def width_of(layer: LinearOrConv) -> int:
    """Return how many features or channels a layer is fed."""
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def factored(layer: LinearOrConv, factors: Factors) -> nn.Sequential:
    """Return two modules that do what `layer` does to inputs in the span of the directions."""
    weight = layer.weight.detach().to(factors.mean)
    lost = factors.lost_mean
    if float(lost.norm()) <= 1e-9 * float(factors.mean.norm()):
        lost = torch.zeros_like(lost)
    parts = (
        _linear(layer, weight, factors, lost) if isinstance(layer, nn.Linear) else _conv(layer, weight, factors, lost)
    )
    return nn.Sequential(*parts).train(layer.training).requires_grad_(layer.weight.requires_grad)


def empty_factors(
    layer: LinearOrConv, between: int, first_bias: bool, second_bias: bool
) -> tuple[LinearOrConv, LinearOrConv]:
    """Return the two modules that replace `layer`, `between` wide in the middle, their weights not set."""
    place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        first: LinearOrConv = skip_init(nn.Linear, layer.in_features, between, bias=first_bias, **place)
        return first, skip_init(nn.Linear, between, layer.out_features, bias=second_bias, **place)
    # where nothing lies between the strides, only every so many places need be looked at
    early, late = (layer.stride, 1) if is_pointwise(layer) else (1, layer.stride)
    shape = {"padding": layer.padding, "dilation": layer.dilation, "padding_mode": layer.padding_mode}
    first = skip_init(nn.Conv2d, layer.in_channels, between, 1, stride=early, bias=first_bias, **place)
    second = skip_init(
        nn.Conv2d, between, layer.out_channels, layer.kernel_size, stride=late, bias=second_bias, **shape, **place
    )
    return first, second


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Return whether a convolution has a kernel of one position."""
    return layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "same", "valid")


def pads_with_zeros(layer: nn.Conv2d) -> bool:
    """Return whether the convolution pads with zeros."""
    some = max(layer.kernel_size) > 1 if layer.padding == "same" else layer.padding not in ((0, 0), "valid")
    return some and layer.padding_mode == "zeros"


def put(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace the layer `name` by `replacement` everywhere in the model."""
    old = modules(model)[name]
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and unwrapped(child) is old:
                module._modules[key] = replacement


def _linear(layer: nn.Linear, weight: Tensor, factors: Factors, lost: Tensor) -> tuple[LinearOrConv, LinearOrConv]:
    bias = _bias(layer, weight @ lost)
    first, second = empty_factors(layer, len(factors.encode), False, bias is not None)
    _set(first, factors.encode, None)
    _set(second, weight @ factors.decode, bias)
    return first, second


def _conv(layer: nn.Conv2d, weight: Tensor, factors: Factors, lost: Tensor) -> tuple[LinearOrConv, LinearOrConv]:
    kernels = torch.einsum("ochw,ck->okhw", weight, factors.decode)
    from_mean = torch.einsum("ochw,c->ohw", weight, lost)
    ends_at_border = pads_with_zeros(layer) and bool(from_mean.any())
    encode = factors.encode
    if ends_at_border:  # one channel more, of which every kernel sees the part of the mean inside the border
        kernels = torch.cat([kernels, from_mean.unsqueeze(1)], 1)
        encode = torch.cat([encode, torch.zeros_like(encode[:1])])
    bias = _bias(layer, torch.zeros_like(from_mean[:, 0, 0]) if ends_at_border else from_mean.sum((1, 2)))
    first, second = empty_factors(layer, len(encode), ends_at_border, bias is not None)
    constant = torch.zeros_like(encode[:, 0]).index_fill_(0, torch.tensor(len(encode) - 1, device=encode.device), 1)
    _set(first, encode[:, :, None, None], constant if ends_at_border else None)
    _set(second, kernels, bias)
    return first, second


def _bias(layer: LinearOrConv, more: Tensor) -> Tensor | None:
    """Return the layer's bias and what is added to it; None where there is neither."""
    if layer.bias is None:
        return more if bool(more.any()) else None
    return layer.bias.detach().to(more) + more


@torch.no_grad()
def _set(layer: LinearOrConv, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.copy_(weight)
    if bias is not None:
        assert layer.bias is not None
        layer.bias.copy_(bias)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"


# --- files of compressed models ---------------------------------------------------------------------------------------


def replacement(name: str, layer: nn.Module) -> TakenApart | None:
    """Return what replaces a layer, as a file needs it; None where the layer is left as it was."""
    if not isinstance(layer, nn.Sequential):
        return None
    first, second = layer[0], layer[1]
    assert isinstance(first.weight, Tensor)
    return TakenApart(name, len(first.weight), first.bias is not None, second.bias is not None)


def save_compressed(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a compressed model's weights and its table to one file; over one of another kind only with `overwrite`."""
    record = getattr(unwrapped(model), "compression", None)
    if not isinstance(record, Compression):
        raise InvalidValue(
            "the model was not compressed by netkin: it has no table `compression`; save its state dict."
        )
    state = unwrapped(model).state_dict()
    halves = [name for name, tensor in state.items() if tensor.dtype == torch.bfloat16]
    arrays = {name: _array(tensor) for name, tensor in state.items()}
    files.write(path, Compression.kind, {**packed(record)[0], "bfloat16": halves}, arrays, overwrite=overwrite)


@overload
def load_compressed(path: str | os.PathLike[str], model: nn.Module) -> nn.Module: ...


@overload
def load_compressed(path: str | os.PathLike[str], model: None = None) -> Compression: ...


@by_name(models="model")
def load_compressed(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module | Compression:
    """Return the compressed model that was saved at `path`; `model` is the original network, which is not changed.

    Its weights do not matter. What comes back is in the model's training mode, on its device and in its precision.
    Without a model the table comes back alone.
    """
    header, arrays = files.read(path, kind=Compression.kind)
    with files.damage_reported(path):
        halves = set(header.pop("bfloat16"))
        state = {name: _tensor(array, name in halves) for name, array in arrays.items()}
        record = unpacked(Compression, header, {})
        sizes = {size for tensor in state.values() for size in tensor.shape}
        for part in record.replaced:  # before a layer of any size is made
            if part.between not in sizes or part.between < 1:
                raise ValueError(f"no weights of {part.layer!r} have {part.between:,} directions in between")
    if model is None:
        return record
    net = copy.deepcopy(unwrapped(model))
    for part in record.replaced:
        _take_apart(net, part, path)
    wanted = net.state_dict()
    _require_fitting_weights(wanted, state, path)
    net.load_state_dict(state)
    net.compression = record  # type: ignore[assignment]
    return net


def _take_apart(net: nn.Module, part: TakenApart, path: Any) -> None:
    """Put two modules of the saved sizes in place of one layer."""
    known = modules(net)
    if part.layer not in known:
        raise FileError(f"{str(path)!r} holds a model with a layer {part.layer!r} taken apart; this model has none.")
    layer = factorable(part.layer, known[part.layer])
    require_no_hooks(part.layer, layer)
    parts = nn.Sequential(*empty_factors(layer, part.between, part.first_bias, part.second_bias))
    put(net, part.layer, parts.train(layer.training).requires_grad_(layer.weight.requires_grad))


def _require_fitting_weights(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Any) -> None:
    odd = [name for name in {**wanted, **state} if _shape(wanted, name) != _shape(state, name)]
    if odd:
        raise FileError(
            f"{str(path)!r} does not fit this model: {odd[0]!r} is {_shape(state, odd[0])} in the file and "
            f"{_shape(wanted, odd[0])} in the model ({len(odd)} differ); build the architecture that was compressed."
        )


def _shape(state: Mapping[str, Tensor], name: str) -> str:
    return " × ".join(map(str, state[name].shape)) or "one number" if name in state else "absent"


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: np.ndarray, is_half: bool) -> Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if is_half else tensor
