"""One layer as two: the first maps its input to k directions, the second does the layer's work on these.

``W x + b`` becomes ``(W D)(E x) + b'``. The input is projected about its mean, so that ``b' = b + W (mean - D E mean)``
takes up what the projection would lose of the mean. A convolution becomes a 1 × 1 convolution to k channels and its own
kernel on these. Where it pads with zeros, the mean is missing beyond the border and a bias would be wrong there: one
more channel then carries the constant 1, which the padding ends at the border as it ends the input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from netkin.applications.compression.subspaces import Factors
from netkin.errors import ValueFault
from netkin.representations.layers import layer_label, modules, unwrapped

Layer = nn.Linear | nn.Conv2d


def refuse_unfit(name: str, module: nn.Module) -> Layer:
    """Return the module if it can be taken apart into two, else say why not."""
    if not name:
        raise ValueFault("the model is itself the layer; put it into an `nn.Sequential` and name it '0'.")
    kinds = [kind for kind in (nn.Linear, nn.Conv2d) if isinstance(module, kind)]
    if not kinds or type(module).forward is not kinds[0].forward:
        raise ValueFault(
            f"{layer_label(name)} is {_a(type(module).__name__)}; `compress` takes `nn.Linear` and `nn.Conv2d` "
            "modules, and restricts their inputs."
        )
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        raise ValueFault(
            f"{layer_label(name)} is a convolution in {module.groups} groups, each of which sees its own channels; "
            "`compress` takes convolutions with groups=1."
        )
    return module


def refuse_hooked(name: str, layer: Layer) -> None:
    """Refuse a layer with hooks, which see its calls or set its weights, and would be lost with it."""
    count = len(layer._forward_hooks) + len(layer._forward_pre_hooks)
    if count:
        hooks = "1 hook" if count == 1 else f"{count} hooks"
        raise ValueFault(
            f"{layer_label(name)} has {hooks} of its own, which the two layers would not have; remove it first."
        )


def width_of(layer: Layer) -> int:
    """Return how many features or channels a layer is fed."""
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def factored(layer: Layer, factors: Factors) -> nn.Sequential:
    """Return two modules that do what `layer` does to inputs in the span of the directions."""
    weight = layer.weight.detach().to(factors.mean)
    lost = factors.lost_mean
    if float(lost.norm()) <= 1e-9 * float(factors.mean.norm()):
        lost = torch.zeros_like(lost)
    parts = (
        _linear(layer, weight, factors, lost) if isinstance(layer, nn.Linear) else _conv(layer, weight, factors, lost)
    )
    return nn.Sequential(*parts).train(layer.training).requires_grad_(layer.weight.requires_grad)


def empty_factors(layer: Layer, between: int, first_bias: bool, second_bias: bool) -> tuple[Layer, Layer]:
    """Return the two modules that stand for `layer`, `between` wide in the middle, their weights not set."""
    place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        first: Layer = skip_init(nn.Linear, layer.in_features, between, bias=first_bias, **place)
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
    """Tell whether a convolution looks at single places alone."""
    return layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "same", "valid")


def pads_with_zeros(layer: nn.Conv2d) -> bool:
    """Tell whether the convolution sees zeros beyond the border."""
    some = max(layer.kernel_size) > 1 if layer.padding == "same" else layer.padding not in ((0, 0), "valid")
    return some and layer.padding_mode == "zeros"


def put(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put `replacement` in the place of the layer `name`, wherever the model has it."""
    old = modules(model)[name]
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and unwrapped(child) is old:
                module._modules[key] = replacement


def _linear(layer: nn.Linear, weight: Tensor, factors: Factors, lost: Tensor) -> tuple[Layer, Layer]:
    bias = _bias(layer, weight @ lost)
    first, second = empty_factors(layer, len(factors.encode), False, bias is not None)
    _set(first, factors.encode, None)
    _set(second, weight @ factors.decode, bias)
    return first, second


def _conv(layer: nn.Conv2d, weight: Tensor, factors: Factors, lost: Tensor) -> tuple[Layer, Layer]:
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


def _bias(layer: Layer, more: Tensor) -> Tensor | None:
    """Return the layer's bias and what is added to it; None where there is neither."""
    if layer.bias is None:
        return more if bool(more.any()) else None
    return layer.bias.detach().to(more) + more


@torch.no_grad()
def _set(layer: Layer, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.copy_(weight)
    if bias is not None:
        assert layer.bias is not None
        layer.bias.copy_(bias)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"
