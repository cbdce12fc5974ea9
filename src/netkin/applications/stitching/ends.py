"""Ends: what kind of activations a layer gives, and how those of one layer are brought into the form of another's.

Feature maps are n × c × space, tokens n × t × d, rows n × d. A map becomes tokens, one for each position, with its
mean in front for each class token; tokens become a map again without their class tokens.

Three dimensions are n × c × length, a map of one dimension, where the module's type says so: a convolution, pooling or
normalisation of channels (`Conv1d`, `MaxPool1d`, `BatchNorm1d`, `GroupNorm`, ...), an ``nn.Sequential`` that ends in
one, or an activation or dropout that follows one inside an ``nn.Sequential``. All others are tokens. Tokens without
class tokens become such a one-dimensional map.

The transformation of a stitch: a 1 × 1 convolution, a linear layer, or one linear layer for every token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cat, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from netkin.applications.stitching.direct import LinearMap
from netkin.errors import ShapeError, UnknownName, ValueFault
from netkin.representations import resize_to, rows_of
from netkin.representations.layers import children
from netkin.results.values import Pair as Pair

PLACES = 32  # maps with fewer places are turned into rows: products of single examples would be too small
RESIZES = ("average", "bilinear", "nearest")
CLASS_TOKENS = 5  # at most: one for the class and four registers
OF_CHANNELS = (
    nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.GroupNorm, nn.MaxPool1d,
    nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d, nn.MaxUnpool1d,
)  # fmt: skip


@dataclass(frozen=True)
class End:
    """One layer's side of a stitch: the kind and the sizes of its output."""

    kind: str
    width: int
    space: tuple[int, ...] = ()  # of a map
    tokens: int = 0

    @classmethod
    def of(cls, output: Tensor, name: str, *, line: bool = False) -> End:
        """Return the end that a layer's `output` is; three dimensions are tokens, or a map of one where `line`."""
        if output.ndim in (4, 5) or (output.ndim == 3 and line):
            return cls("maps", output.shape[1], tuple(output.shape[2:]))
        if output.ndim == 3:
            return cls("tokens", output.shape[2], tokens=output.shape[1])
        if output.ndim == 2:
            return cls("rows", output.shape[1])
        raise ShapeError(
            f"{name} gives an output of shape {tuple(output.shape)}; a stitch joins feature maps, tokens or rows."
        )

    @property
    def is_line(self) -> bool:
        """Whether this is a map of one dimension."""
        return len(self.space) == 1

    @property
    def form(self) -> str:
        """The kind, with maps of one dimension as a kind of their own."""
        return "lines" if self.is_line else self.kind

    def spread(self, output: Tensor) -> Tensor:
        """Return activations in an unambiguous form: a map of one dimension has two, n × c × 1 × length."""
        return output.unsqueeze(2) if self.is_line else output

    def rows(self, output: Tensor, mask: Any = None) -> Tensor:
        """Return activations of this end as rows: one for each place, valid token or example."""
        spread = self.spread(output)
        return rows(spread, fitting_mask(mask, spread))

    def places(self, other: End) -> tuple[int, ...]:
        """Return the size of the map that this end is, or is laid out as for `other`: a line or a square."""
        if self.kind == "maps":
            return self.space
        if other.is_line:
            return (self.tokens,)
        side = math.isqrt(self.tokens)
        if self.tokens - side**2 > CLASS_TOKENS:
            raise ShapeError(
                f"{self} are no square of places with up to {CLASS_TOKENS} class tokens before it, so they can't be "
                "laid out as a map; stitch them with tokens."
            )
        return side, side

    def __str__(self) -> str:
        size = f" of length {self.space[0]}" if self.is_line else f" of {'×'.join(map(str, self.space))}"
        sizes = {"maps": size, "tokens": f", {self.tokens} a sequence"}
        return f"{self.kind} of width {self.width}{sizes.get(self.kind, '')}"


class Meeting:
    """How the activations of end `a` take the form of end `b`, in their own width; refused where they cannot."""

    def __init__(self, a: End, b: End, resize: str | None = None):
        if resize not in (None, *RESIZES):
            *most, final = map(repr, RESIZES)
            raise UnknownName(f"`resize` is None, {', '.join(most)} or {final}; got {resize!r}.")
        if a.kind == "rows" and b.kind != "rows":
            raise ShapeError(
                f"rows have no places, so {a} can't be stitched into {b}; choose an earlier layer of the first."
            )
        if a.kind == b.kind == "tokens" and a.tokens != b.tokens:
            raise ShapeError(
                f"sequences of {a.tokens} and {b.tokens} tokens can't be stitched token by token; choose layers with "
                "as many tokens, or a layer of rows of the second."
            )
        self.a, self.b = a, b
        self.resize = self._choose_resize(resize)

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes of the two maps, or None where none is involved."""
        if self.b.kind == "rows" or self.a.kind == self.b.kind == "tokens":
            return None
        ours, theirs = self.a.places(self.b), self.b.places(self.a)
        if len(ours) != len(theirs):
            raise ShapeError(
                f"{self.a} and {self.b} have different numbers of dimensions and can't be stitched; choose layers with "
                "as many, or a layer of rows of the second."
            )
        return ours, theirs

    def _choose_resize(self, resize: str | None) -> str | None:
        """Return the name of the resize that is needed, if one is."""
        sizes = self._sizes
        if sizes is None or sizes[0] == sizes[1]:
            return None
        shrinks = all(x >= y for x, y in zip(*sizes, strict=True))
        return resize or ("average" if shrinks else "bilinear")

    def __call__(self, output: Tensor) -> Tensor:
        """Return the activations of `a` in the form of `b`."""
        if self.b.kind == "rows":
            return output if self.a.kind == "rows" else rows_of(self.a.spread(output))[0].to(output.dtype)
        sizes = self._sizes
        if sizes is None:
            return output
        maps = output if self.a.kind == "maps" else _as_maps(output, sizes[0])
        if self.resize:
            maps = _resize(maps, sizes[1], self.resize)
        return maps if self.b.kind == "maps" else _as_tokens(maps, self.b.tokens)

    @property
    def words(self) -> str:
        """What is done, as text; empty where nothing is."""
        steps = [] if self.a.form == self.b.form else [f"{self.a.form} as {self.b.form}"]
        sizes = self._sizes
        if self.resize and sizes:
            ours, theirs = ("×".join(map(str, size)) for size in sizes)
            steps.append(f"{ours} resized to {theirs} ({self.resize})")
        return ", ".join(steps)


def rows(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return activations as rows: one for each place, valid token or example."""
    if output.ndim == 2:
        return rows_of(output)[0]
    return rows_of(output, "tokens", mask)[0] if output.ndim == 3 else rows_of(output, "positions")[0]


def product_layout(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return activations as products take them: maps n × c × places, if there are many places, otherwise rows."""
    if output.ndim > 3 and output[0, 0].numel() >= PLACES:
        maps = output.flatten(2)
        return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    return rows(output, mask)


def fitting_mask(mask: Any, output: Tensor) -> Any:
    """Return the batch's mask of valid tokens if it is one for this output, otherwise None."""
    fits = mask is not None and output.ndim == 3 and tuple(mask.shape) == tuple(output.shape[:2])
    return mask if fits else None


def gives_lines(known: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether three dimensions of a module's output are n × c × length; `known` are all modules of the model."""
    module = known[name]
    if isinstance(module, OF_CHANNELS):
        return True
    if _is_sequence(module) and len(children(module)):
        return gives_lines(known, _within(name, list(children(module))[-1]))
    before = _before(known, name) if _keeps_shape(module) else None
    return before is not None and gives_lines(known, before)


def _before(known: Mapping[str, nn.Module], name: str) -> str | None:
    """Return the module whose output a module takes, where it can be found from the enclosing `nn.Sequential`s."""
    above, _, key = name.rpartition(".")
    if not name or not _is_sequence(known[above]):
        return None
    keys = list(children(known[above]))
    return _within(above, keys[keys.index(key) - 1]) if key != keys[0] else _before(known, above)


def _within(above: str, key: str) -> str:
    return f"{above}.{key}" if above else key


def _is_sequence(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is nn.Sequential.forward  # a ScriptModule's type has none


def _keeps_shape(module: nn.Module) -> bool:
    if isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd)):
        return True
    return type(module).__module__ == nn.ReLU.__module__ and not isinstance(module, nn.MultiheadAttention)


def _as_maps(tokens: Tensor, places: tuple[int, ...]) -> Tensor:
    return tokens[:, tokens.shape[1] - math.prod(places) :].transpose(1, 2).unflatten(2, places)


def _as_tokens(maps: Tensor, count: int) -> Tensor:
    places = maps.flatten(2).transpose(1, 2)
    means = places.mean(1, keepdim=True).expand(-1, count - places.shape[1], -1)
    return cat([means, places], 1)


def _resize(maps: Tensor, size: tuple[int, ...], how: str) -> Tensor:
    if how == "average" and len(size) == 1:
        return resize_to(maps.unsqueeze(2), (1, *size)).squeeze(2).to(maps.dtype)
    if how == "average":
        return resize_to(maps, size).to(maps.dtype)
    if how == "nearest":
        return functional.interpolate(maps, size, mode=how)
    mode = ("linear", "bilinear", "trilinear")[len(size) - 1]
    return functional.interpolate(maps, size, mode=mode, align_corners=False)


class Transformation(nn.Module):
    """Brings activations of one layer into the form of another and maps their channels: ``x @ matrix + shift``.

    With `rank` the map is a bottleneck of two factors, which start as the best approximation of the matrix given.
    """

    def __init__(self, linear: LinearMap, meeting: Meeting, *, rank: int | None = None):
        super().__init__()
        p, q = meeting.a.width, meeting.b.width
        if linear.weight.shape != (p, q):
            raise ShapeError(f"the map is {tuple(linear.weight.shape)}, and the layers need {(p, q)}.")
        refuse_unfit_rank(rank, meeting)
        self.meeting, self.rank = meeting, rank
        narrowing = [] if rank is None else [_layer(meeting.b, p, rank, bias=False)]
        self.linear = nn.Sequential(*narrowing, _layer(meeting.b, rank or p, q, bias=True))
        self.set(linear)

    def forward(self, output: Tensor) -> Tensor:
        """Return what the second model's layer would have given."""
        return self.linear(self.meeting(output))

    @property
    def matrix(self) -> Tensor:
        """The map of channels, p × q."""
        first, *others = [weight.flatten(1).T for weight in self._weights]
        return first if not others else first @ others[0]

    @property
    def shift(self) -> Tensor:
        """What is added, of length q."""
        return self.linear[-1].get_parameter("bias")

    @property
    def _weights(self) -> list[Tensor]:
        return [part.get_parameter("weight") for part in self.linear]

    @torch.no_grad()
    def set(self, linear: LinearMap) -> None:
        """Take over a map; a bottleneck takes its best approximation in the Frobenius norm."""
        factors = [linear.weight] if self.rank is None else _factor(linear.weight, self.rank)
        for weight, factor in zip(self._weights, factors, strict=True):
            weight.copy_(factor.T.reshape(weight.shape))
        self.shift.copy_(linear.bias)

    def as_map(self) -> LinearMap:
        """Return the map of channels unchanged."""
        return LinearMap(self.matrix.detach().double(), self.shift.detach().double())


def refuse_unfit_rank(rank: int | None, meeting: Meeting) -> None:
    """Refuse a rank that no map between two layers has."""
    most = min(meeting.a.width, meeting.b.width)
    if rank is not None and not 1 <= rank <= most:
        raise ValueFault(f"`rank` must lie between 1 and the smaller width, {most:,}; got {rank}.")


def _layer(end: End, inputs: int, outputs: int, bias: bool) -> nn.Module:
    # its weights are set at once, so none are drawn: the random state of the user stays as it is
    if end.kind != "maps":
        return skip_init(nn.Linear, inputs, outputs, bias=bias)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(end.space) - 1]
    return skip_init(kind, inputs, outputs, kernel_size=1, bias=bias)


def _factor(weight: Tensor, rank: int) -> list[Tensor]:
    """Return two factors of equal size whose product is the best approximation of that rank."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = values[:rank].sqrt()
    return [left[:, :rank] * root, root.unsqueeze(1) * right[:rank]]
