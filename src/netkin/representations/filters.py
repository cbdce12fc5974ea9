"""Filters made of atoms: ``W[o, i] = Σ_a α[a, i, o] D[a]``, with m atoms D and coefficients α (Chen et al. 2023).

`AtomConv2d` is a convolution whose parameters are atoms and coefficients. `decompose` puts it in place of a
network's convolutions, `recompose` goes back. The coefficients that `decompose` finds are orthonormal, ``αᵀα = I``:
with any invertible A, atoms ``A D`` and coefficients ``α A⁻¹`` make the same network, with another cosine of atoms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from netkin.arrays import require_finite
from netkin.errors import InvalidValue, UnknownName, require_at_least
from netkin.representations.layer_weights import REMEDY, computed_by, copied, own_weights
from netkin.representations.layers import layer_label, modules, require_copyable, unwrapped
from netkin.sources.names import by_name


class AtomConv2d(nn.Module):
    """A convolution whose filters are linear combinations of a few atoms, in place of `nn.Conv2d`.

    `atoms` is m × height × width, `coefficients` is m × in_channels / groups × out_channels, and `weight` their
    product. Fused, that product is taken first and there is one convolution, which is faster; else there are the two
    of the paper: every input channel with every atom, and a 1 × 1 convolution with the coefficients.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: height and width of the atoms, or one number for both.
        stride: as in `nn.Conv2d`.
        padding: as in `nn.Conv2d`, "same" and "valid" included.
        dilation: as in `nn.Conv2d`.
        groups: as in `nn.Conv2d`.
        bias: whether there is one.
        padding_mode: as in `nn.Conv2d`: "zeros", "reflect", "replicate" or "circular".
        device: where the parameters lie.
        dtype: their precision.
        atoms: how many atoms there are.
        fused: whether the filters are made first, and there is one convolution.
        block: (rows, columns) of coefficients that are repeated over all channels, for networks of different widths.

    Example:
        >>> layer = AtomConv2d(3, 8, 3, padding=1, atoms=6)
        >>> layer(torch.zeros(2, 3, 10, 10)).shape, layer.weight.shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([2, 8, 10, 10]), torch.Size([8, 3, 3, 3]), 206)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        atoms: int,
        fused: bool = True,
        block: tuple[int, int] | None = None,
    ):
        super().__init__()
        shape = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        frame = nn.Conv2d(in_channels, out_channels, kernel_size, **shape, padding_mode=padding_mode, device="meta")  # type: ignore[arg-type]
        require_at_least(1, atoms=atoms)
        if frame.kernel_size == (1, 1):
            raise InvalidValue("a 1 × 1 kernel is a single number and has no atoms to be made of; use `nn.Conv2d`.")
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, frame.kernel_size
        self.stride, self.padding, self.dilation, self.groups = frame.stride, frame.padding, frame.dilation, groups
        self.padding_mode, self.fused, self.block = padding_mode, fused, _block(block, frame)
        self._around = _padding_around(frame)
        place = {"device": device, "dtype": dtype}
        self.atoms = nn.Parameter(torch.empty(atoms, *frame.kernel_size, **place))
        self.coefficients = nn.Parameter(torch.empty(atoms, *self.block, **place))
        self.bias = nn.Parameter(torch.empty(out_channels, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: those of the filters have the variance that `nn.Conv2d` would give them."""
        if self.atoms.is_meta:
            return  # there is nothing to draw, and torch would load its compiler for it, which takes seconds
        m, fan_in = len(self.atoms), self.in_channels // self.groups * self.atoms[0].numel()
        nn.init.normal_(self.atoms, std=m**-0.5)
        bound = fan_in**-0.5
        nn.init.uniform_(self.coefficients, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def weight(self) -> Tensor:
        """The filters, as `nn.Conv2d` has them: out_channels × in_channels / groups × height × width."""
        alpha = self._repeated()
        mixed = alpha.permute(2, 1, 0).reshape(-1, len(alpha)) @ self.atoms.flatten(1)
        return mixed.reshape(self.out_channels, -1, *self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of images, n × in_channels × height × width, or of one."""
        if self.fused:
            return self._convolved(x, self.weight, self.bias, self.groups)
        images = x if x.ndim == 4 else x.unsqueeze(0)
        n, channels = images.shape[:2]
        alone = images.reshape(n * channels, 1, *images.shape[2:])
        maps = self._convolved(alone, self.atoms.unsqueeze(1), None, 1)
        maps = maps.reshape(n, channels * len(self.atoms), *maps.shape[2:])
        mixing = self._repeated().permute(2, 1, 0).reshape(self.out_channels, -1, 1, 1)
        outputs = conv2d(maps, mixing, self.bias, groups=self.groups)
        return outputs if x.ndim == 4 else outputs.squeeze(0)

    def extra_repr(self) -> str:
        """Return what is not a default, as `nn.Conv2d` does."""
        options = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, atoms={len(self.atoms)}"]
        usual = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
        options += [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        options += [f"block={self.block}"] if self.block != (self.in_channels // self.groups, self.out_channels) else []
        return ", ".join(options + ["bias=False"] * (self.bias is None) + ["fused=False"] * (not self.fused))

    def _repeated(self) -> Tensor:
        """Return the coefficients of all channels, where a block of them is repeated."""
        across, along = self.in_channels // self.groups // self.block[0], self.out_channels // self.block[1]
        return self.coefficients if across == along == 1 else self.coefficients.repeat(1, across, along)

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = pad(x, self._around, mode=self.padding_mode), (0, 0)
        return conv2d(x, weight, bias, self.stride, padding, self.dilation, groups)


def _block(block: tuple[int, int] | None, frame: nn.Conv2d) -> tuple[int, int]:
    whole = (frame.in_channels // frame.groups, frame.out_channels)
    sizes = whole if block is None else tuple(block)
    if len(sizes) != 2 or min(sizes) < 1 or any(size % part for size, part in zip(whole, sizes, strict=True)):
        raise InvalidValue(f"a block of {sizes} coefficients can't be repeated over {whole[0]} × {whole[1]} channels.")
    return sizes[0], sizes[1]


def _padding_around(frame: nn.Conv2d) -> list[int]:
    """Return how far an image is padded left, right, above and below."""
    if isinstance(frame.padding, str):
        spread = [
            d * (k - 1) * (frame.padding == "same") for d, k in zip(frame.dilation, frame.kernel_size, strict=True)
        ]
        sides = [(total // 2, total - total // 2) for total in spread]
    else:
        sides = [(width, width) for width in frame.padding]
    return [width for side in reversed(sides) for width in side]


# --- from filters to atoms and back -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Decomposed:
    """A network of atoms, and what became of each convolution.

    `errors` are ``‖W − α D‖ / ‖W‖`` of each layer; `left` says which convolutions are as they were, and why.
    """

    model: nn.Module
    errors: Mapping[str, float]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            f"{name}: {len(layer.atoms)} atoms of {layer.kernel_size[0]} × {layer.kernel_size[1]}, error "
            f"{self.errors[name]:.2g}"
            for name, layer in atom_layers(self.model)
        ]
        return "\n".join([*lines, *(f"{name}: left as it is, {why}" for name, why in self.left.items())])


@by_name(models="model")
def decompose(
    model: nn.Module, atoms: int | None = None, *, fused: bool = True, train_only: str | Sequence[str] = ()
) -> Decomposed:
    """Return a copy of `model` whose convolutions are made of atoms, with the error of each layer.

    The atoms are the best for that number: the leading singular directions of the layer's filters. With all atoms,
    which is the default, the network is the same up to rounding; layers of atoms then keep their number. Kernels of
    1 × 1 are left as they are, and so are modules that are not plainly `nn.Conv2d`. No more atoms are made than a
    kernel has numbers, or a layer filters.

    Args:
        model: a network with convolutions.
        atoms: how many atoms a layer has at most; None for as many as make it exact.
        fused: whether the new layers make their filters first (see `AtomConv2d`).
        train_only: what may be trained further, "atoms" or layers by name, as in `freeze_except`; all where not given.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> decompose(model).errors["2"] < 1e-6, decompose(model, atoms=4).errors["2"] > 0.1
        (True, True)
    """
    made, layers, left = filters_in(model)
    if atoms is not None:
        require_at_least(1, atoms=atoms)
    errors = {}
    for name, layer in layers.items():
        F = filter_matrix(layer)
        U, D = leading_atoms(F, exact_count(layer) if atoms is None else atoms)
        composed = with_atoms(layer, U, D, fused=fused)
        errors[name] = float((F - filter_matrix(composed)).norm() / F.norm()) if bool(F.any()) else 0.0
        put(made, layer, composed)
    return Decomposed(freeze_except(made, train_only) if train_only else made, errors, left)


def recompose(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in which every `AtomConv2d` has become the `nn.Conv2d` with the same filters.

    Those with hooks, and subclasses of it, do more than that and stay as they are.
    """
    made = copied(unwrapped(model))
    for layer in [layer for _, layer in atom_layers(made) if not _why_left(layer)]:
        put(made, layer, _plain(layer))
    return made


def freeze_except(model: nn.Module, parts: str | Sequence[str]) -> nn.Module:
    """Return `model` itself, in which only the named parts have gradients: "atoms", and layers by name."""
    wanted, known = [parts] if isinstance(parts, str) else list(parts), modules(model)
    strange = [name for name in wanted if name != "atoms" and name not in known]
    if strange:
        raise UnknownName(f"no part {strange[0]!r} to be trained: name 'atoms', or layers of the model.")
    if "atoms" in wanted and not any(isinstance(module, AtomConv2d) for module in known.values()):
        raise InvalidValue("the model has no atoms to be trained; `nk.decompose` makes some of its filters.")
    model.requires_grad_(False)
    for name in wanted:
        atoms = [layer.atoms for _, layer in atom_layers(model)]
        for parameter in atoms if name == "atoms" else known[name].parameters():
            parameter.requires_grad_(True)
    return model


def filters_in(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Conv2d | AtomConv2d], dict[str, str]]:
    """Return a copy of a model, its layers with filters by name, and which convolutions have none."""
    require_copyable(unwrapped(model))
    made, left = copied(unwrapped(model)), dict[str, str]()
    convolutions: dict[str, nn.Conv2d | AtomConv2d] = {}
    users = Counter(id(weight) for _, module in _distinct(made) for weight in module.parameters(recurse=False))
    for name, module in _distinct(made):
        if isinstance(module, (AtomConv2d, nn.modules.conv._ConvNd)):
            tied = users[id(module._parameters.get("weight"))] > 1
            why = "its filters belong to another module too" if tied else _why_left(module)
            left |= {name: why} if why else {}
            convolutions |= {} if why else {name: module}  # type: ignore[dict-item]
    if not convolutions:
        reason = "".join(f"; {layer_label(name)} is left: {why}" for name, why in list(left.items())[:1])
        raise InvalidValue(f"the model has no convolution whose filters could be made of atoms{reason}.")
    for name, module in convolutions.items():
        require_finite(module.weight.detach(), f"the filters of {layer_label(name)}")
    return made, convolutions, left


def _distinct(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, by the first of its names."""
    seen: set[nn.Module] = set()
    for name, module in modules(model).items():
        if module not in seen:
            yield name, module
        seen.add(module)


def _why_left(module: nn.Module) -> str:
    for name, what in computed_by(module).items():
        return f"its {name} is computed ({what}), which would be lost; {REMEDY}"
    if type(module) not in (nn.Conv2d, AtomConv2d):
        return f"it is a {type(module).__name__} and no plain `nn.Conv2d`"
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    if hooks:
        return f"it has hooks of its own ({hooks}), which would be lost"
    return "its kernel of 1 × 1 is a single number" if module.kernel_size == (1, 1) else ""


def exact_count(layer: nn.Conv2d | AtomConv2d) -> int:
    """Return how many atoms make a layer's filters exactly: as many as it has, or as a kernel has numbers."""
    return len(layer.atoms) if isinstance(layer, AtomConv2d) else math.prod(layer.kernel_size)


def filter_matrix(layer: nn.Conv2d | AtomConv2d) -> Tensor:
    """Return a layer's filters as a matrix in float64: rows are (input, output) channels, columns places."""
    return layer.weight.detach().cpu().double().transpose(0, 1).flatten(2).flatten(0, 1)


def leading_atoms(F: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return orthonormal coefficients and atoms whose product is the nearest to `F`, as (U, D); signs are fixed."""
    U, S, Vt = torch.linalg.svd(F, full_matrices=False)
    U, D = U[:, :count], (S[:, None] * Vt)[:count]
    largest = Vt[:count].gather(1, Vt[:count].abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(U)
    return U * signs.T, D * signs


def with_atoms(
    layer: nn.Conv2d | AtomConv2d, U: Tensor, D: Tensor, *, fused: bool = True, block: Any = None
) -> AtomConv2d:
    """Return a convolution like `layer` with coefficients `U`, a column an atom, and atoms `D`, a row each."""
    made = AtomConv2d(**_like(layer), device="meta", atoms=len(D), fused=fused, block=block)
    values = {"atoms": D, "coefficients": U.T} | ({} if layer.bias is None else {"bias": layer.bias})
    for name, parameter in list(made.named_parameters()):
        # of a plain layer atoms and coefficients learn as its filters do
        value = values[name].detach().reshape(parameter.shape).to(**_place(layer), copy=True)
        setattr(made, name, nn.Parameter(value.contiguous(), getattr(layer, name, layer.weight).requires_grad))
    return made.train(layer.training)


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another everywhere in the model."""
    places = [(module, key) for module in model.modules() for key, child in module._modules.items() if child is old]
    if not places:
        raise InvalidValue("the model is itself the convolution; put it into an `nn.Sequential`.")
    for module, key in places:
        module._modules[key] = new


def _plain(layer: AtomConv2d) -> nn.Conv2d:
    made = nn.Conv2d(**_like(layer), device="meta")
    learns = layer.atoms.requires_grad or layer.coefficients.requires_grad
    made.weight = nn.Parameter(layer.weight.detach().clone(), learns)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return made.train(layer.training)


def _like(layer: nn.Conv2d | AtomConv2d) -> dict[str, Any]:
    """Return what makes a convolution of the same shape, by the names that `nn.Conv2d` has for it."""
    names = "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


def _place(layer: nn.Conv2d | AtomConv2d) -> dict[str, Any]:
    held = layer.atoms if isinstance(layer, AtomConv2d) else layer.weight
    return {"device": held.device, "dtype": held.dtype}


def layer_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a layer's own weights by name, and its filters too where coefficients are repeated over channels."""
    weights = own_weights(module)
    if isinstance(module, AtomConv2d) and module._repeated() is not module.coefficients:
        weights["weight"] = module.weight
    return weights


def atom_layers(model: nn.Module) -> Iterator[tuple[str, AtomConv2d]]:
    """Yield the layers of a network that are made of atoms, by name."""
    for name, module in _distinct(model):
        if isinstance(module, AtomConv2d):
            yield name, module
