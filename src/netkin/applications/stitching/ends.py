"""Ends: what kind of activations a layer gives, and how those of one layer are brought into the form of another's.

Feature maps are n × c × space, tokens n × t × d, rows n × d. A map becomes tokens by laying out its places, with its
mean in front for each class token; tokens become a map again without their class tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, cat
from torch.nn import functional

from netkin.errors import ShapeError, UnknownName
from netkin.representations import resize_to, rows_of

RESIZES = ("average", "bilinear", "nearest")
CLASS_TOKENS = 5  # at most: one for the class and four registers


@dataclass(frozen=True)
class End:
    """One layer's side of a stitch: the kind and the sizes of its output."""

    kind: str
    width: int
    space: tuple[int, ...] = ()  # of a map
    tokens: int = 0

    @classmethod
    def of(cls, output: Tensor, name: str) -> End:
        """Return the end that a layer's `output` is."""
        if output.ndim in (4, 5):
            return cls("maps", output.shape[1], tuple(output.shape[2:]))
        if output.ndim == 3:
            return cls("tokens", output.shape[2], tokens=output.shape[1])
        if output.ndim == 2:
            return cls("rows", output.shape[1])
        raise ShapeError(
            f"{name} gives an output of shape {tuple(output.shape)}; a stitch joins feature maps, tokens or rows."
        )

    @property
    def grid(self) -> tuple[int, int]:
        """The square of places that tokens are laid out in; tokens beyond it are class tokens."""
        side = math.isqrt(self.tokens)
        return side, side

    @property
    def class_tokens(self) -> int:
        """How many tokens stand before those that are laid out."""
        return self.tokens - math.prod(self.grid)

    @property
    def places(self) -> tuple[int, ...]:
        """The size of the map that this end is or can be laid out as."""
        if self.kind == "tokens" and self.class_tokens > CLASS_TOKENS:
            raise ShapeError(
                f"{self} are no square of places with up to {CLASS_TOKENS} class tokens before it, so they can't be "
                "laid out as a map; stitch them with tokens."
            )
        return self.space if self.kind == "maps" else self.grid

    def __str__(self) -> str:
        sizes = {"maps": f" of {'×'.join(map(str, self.space))}", "tokens": f", {self.tokens} a sequence"}
        return f"{self.kind} of width {self.width}{sizes.get(self.kind, '')}"


class Meeting:
    """How the activations of end `a` take the form of end `b`, in their own width; refused where they cannot."""

    def __init__(self, a: End, b: End, resize: str | None = None):
        if resize not in (None, *RESIZES):
            raise UnknownName(f"`resize` is None, 'average', 'bilinear' or 'nearest'; got {resize!r}.")
        if a.kind == "rows" and b.kind != "rows":
            raise ShapeError(
                f"rows have no places, so {a} can't be stitched into {b}; choose an earlier layer of the first."
            )
        if a.kind == b.kind == "tokens" and a.tokens != b.tokens:
            raise ShapeError(f"sequences of {a.tokens} and {b.tokens} tokens can't be stitched token by token.")
        self.a, self.b = a, b
        self.resize = self._chosen(resize)

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes of the two maps, or None where none is involved."""
        if self.b.kind == "rows" or self.a.kind == self.b.kind == "tokens":
            return None
        ours, theirs = self.a.places, self.b.places
        if len(ours) != len(theirs):
            raise ShapeError(f"{self.a} and {self.b} have different numbers of dimensions and can't be stitched.")
        return ours, theirs

    def _chosen(self, resize: str | None) -> str | None:
        """Return the name of the resize that is needed, if one is."""
        sizes = self._sizes
        if sizes is None or sizes[0] == sizes[1]:
            return None
        shrinks = all(x >= y for x, y in zip(*sizes, strict=True))
        return resize or ("average" if shrinks else "bilinear")

    def __call__(self, output: Tensor) -> Tensor:
        """Return the activations of `a` in the form of `b`."""
        if self.b.kind == "rows":
            return output if self.a.kind == "rows" else rows_of(output)[0].to(output.dtype)
        if self.a.kind == self.b.kind == "tokens":
            return output
        maps = output if self.a.kind == "maps" else _as_maps(output, self.a)
        sizes = self._sizes
        if self.resize and sizes:
            maps = _resized(maps, sizes[1], self.resize)
        return maps if self.b.kind == "maps" else _as_tokens(maps, self.b.class_tokens)

    @property
    def words(self) -> str:
        """What is done, in words; empty where nothing is."""
        steps = [] if self.a.kind == self.b.kind else [f"{self.a.kind} as {self.b.kind}"]
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


def _as_maps(tokens: Tensor, end: End) -> Tensor:
    return tokens[:, end.class_tokens :].transpose(1, 2).unflatten(2, end.grid)


def _as_tokens(maps: Tensor, class_tokens: int) -> Tensor:
    places = maps.flatten(2).transpose(1, 2)
    means = places.mean(1, keepdim=True).expand(-1, class_tokens, -1)
    return cat([means, places], 1)


def _resized(maps: Tensor, size: tuple[int, ...], how: str) -> Tensor:
    if how == "average":
        return resize_to(maps, size).to(maps.dtype)
    if how == "nearest":
        return functional.interpolate(maps, size, mode=how)
    mode = "bilinear" if len(size) == 2 else "trilinear"
    return functional.interpolate(maps, size, mode=mode, align_corners=False)
