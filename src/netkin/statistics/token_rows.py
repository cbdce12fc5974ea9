"""`TokenRows`: a sample of the tokens of layers, read as moments by their Gram matrices.

It serves where the moments of all pairs of layers, or all rows, would not fit the memory: language models have some
hundred layers, each thousands of features wide, and their tokens are many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.statistics.collector import CostEstimate, Key, LayerSize, Study, require_pair
from netkin.statistics.layer_moments import LinearSettings
from netkin.statistics.layer_rows import LinearRows, side_bytes
from netkin.statistics.linear_algebra import squared_norm
from netkin.statistics.moments import Moments
from netkin.statistics.rows import RowsSide

if TYPE_CHECKING:
    from typing_extensions import Self

TOKENS = 4096  # tokens that are kept: Gram matrices grow with the square
ROOM = 2**31  # bytes of Gram matrices that are held while the other layers pass by, at most
NARROW = 8  # up to a share of one in so many of its tokens a layer is narrow
HALVES = {torch.finfo(dtype).eps: dtype for dtype in (torch.bfloat16, torch.float16)}


class TokenRows(LinearRows):
    """A sample of the tokens of layers, those whose hash of (seed, example, position) is smallest.

    Tokens of models in half precision are kept in it. ``‖XᵀY‖²`` of all pairs is taken from Gram matrices, those of
    some layers at a time, and what needs more is computed from the rows.
    """

    holds = "Rows"
    cap: int

    def __init__(
        self,
        pair_blocks: Sequence[Any],
        *,
        precision: torch.dtype = torch.float64,
        chunks: int = 0,
        cap: int = TOKENS,
        seed: int = 0,
        dtypes: Mapping[Key, torch.dtype] | None = None,
        room: int = ROOM,
    ):
        super().__init__(pair_blocks, precision=precision, chunks=chunks)
        self.cap, self.seed, self.room = cap, seed, room
        self.dtypes = dict(dtypes or {})  # in which the rows of layers are kept, where not in their own

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate | None:
        if study.spectral or not any(layer.kind == "tokens" for layer in study.sizes):
            return None
        cap, item, n = study.tokens or TOKENS, settings.precision(study).itemsize, study.examples
        kept = sum((cap + max(cap // 4, layer.rows)) * layer.width * _itemsize(layer) for layer in study.sizes)
        widest = max(layer.width for layer in study.sizes)
        square = 0 if _is_narrow(widest, cap) else item * cap**2
        passing = 3 * (item * cap * widest + square)  # a layer about its mean, and its products
        if settings.whitens or settings.rotates or settings.uncentred:
            passing += sum(side_bytes(settings, layer, cap, item) for layer in study.sizes)
            passing += item * settings.matrices * study.read_at_once(lambda x, y: min(x.width, cap) * min(y.width, cap))
        else:
            passing += min(room_of(study), square * len(study.sizes))
        chunked = kept if study.chunks else 0  # the rows without a chunk are a copy
        why = "" if study.tokens else ", as statistics of all would not fit"
        return CostEstimate(
            kept + chunked + passing, f"Rows, a sample of at most {cap:,} tokens", "the sampled tokens",
            # before all rows of data of unknown length, which may prove to be too many
            -1 if study.tokens else 1 if n is None else 3, why, "fewer `tokens=`",
        )  # fmt: skip

    @classmethod
    def start(cls, settings: LinearSettings, study: Study) -> Self:
        halves = {key: HALVES[layer.resolution] for key, layer in study.layers.items() if _is_half(layer)}
        made = cls(
            study.pair_blocks, precision=settings.precision(study), chunks=study.chunks, cap=study.tokens or TOKENS,
            seed=study.seed, dtypes=halves, room=room_of(study),
        )  # fmt: skip
        made.resolutions = study.resolutions
        return made

    def check_rows(self, rows: Mapping[Any, Any], names: Sequence[Key] | None = None) -> dict[Key, Tensor]:
        layers = super().check_rows(rows, names)
        return {name: layer.to(self.dtypes.get(name, layer.dtype)) for name, layer in layers.items()}

    @property
    def slack(self) -> int:
        return self.cap // 4

    # --- reading ------------------------------------------------------------------------------------------------------

    def pair(self, a: Key, b: Key, without: int | None = None) -> Moments:
        require_pair(a, b, self.names, "rows", self.pair_blocks)
        sides = self._side(a, without), self._side(b, without)
        self.require_alike_rows(a, b)  # once both are in order
        if all(_is_narrow(side.width, side.n) for side in sides):
            return Moments(*sides)
        return TokenMoments(*sides, lambda: self._squares(a, b, without)[a, b])

    def _side(self, key: Key, without: int | None) -> TokenSide:
        def make() -> TokenSide:
            sample = self.sample(key, without)
            return TokenSide(sample.X, sample.name, self.precision, resolution=sample.resolution)

        return self.once(("side", key, without), make)

    def _squares(self, a: Key, b: Key, without: int | None) -> dict[tuple[Key, Key], Tensor]:
        """Return ``‖XᵀY‖²`` of some layers, `a` among them, with all that share a block of pairs with it."""
        left, right = next(
            (x, y) for one, other in self.pair_blocks for x, y in ((one, other), (other, one)) if a in x and b in y
        )
        size = max(self.room // (self.precision.itemsize * self.cap**2), 1)
        start = left.index(a) // size * size

        def make() -> dict[tuple[Key, Key], Tensor]:
            some = {key: self._gram(key, without) for key in left[start : start + size]}
            squares = {}
            for other in right:
                gram = some[other] if other in some else self._gram(other, without)
                for key, mine in some.items():
                    squares[key, other] = self._product(mine, gram)
            return squares

        return self.once(("squares", start, tuple(left), tuple(right), without), make)

    def _gram(self, key: Key, without: int | None) -> Any:
        """Return what is held of a layer while others pass by."""
        return self._side(key, without).gram

    def _product(self, one: Any, other: Any) -> Tensor:
        return _inner_product(one, other)

    def exactness_of(self, pairs: Sequence[tuple[Key, Key]]) -> str:
        seen = max(self.layers[key].seen for pair in pairs for key in pair)
        if seen <= self.cap:
            return "exact"
        return f"a sample of {self.cap:,} of {seen:,} tokens of {int(self.counts.sum()):,} sequences"

    def like(self, other: Any) -> Self:
        return self


class TokenMoments(Moments):
    """The moments of a pair of sampled layers, whose ``‖XᵀY‖²`` is computed for many pairs together."""

    def __init__(self, x: TokenSide, y: TokenSide, squares: Callable[[], Tensor]):
        super().__init__(x, y)
        self._squares = squares

    @property
    def cross_squared(self) -> Tensor:
        self.x.trace, self.y.trace  # noqa: B018  refuse constant layers, whose Gram matrices are rounding
        return self._squares()


class TokenSide(RowsSide):
    """A side of many: beside its rows as they came it keeps what is small, and makes the rest when it is asked for."""

    def __init__(self, X: Tensor, name: str, precision: torch.dtype, *, resolution: float | None):
        super().__init__(X, name, precision, resolution=resolution)
        self._rows = None
        if _is_narrow(self.width, self.n):
            return
        gram = self.gram
        # into the dictionary, where the cached properties of rows look for what is known
        norms = torch.diagonal(gram).to(summing_dtype(gram.device))
        self.__dict__ |= {"squared": squared_norm(gram), "row_norms": norms}

    @property
    def gram(self) -> Tensor:
        rows = self.rows
        return rows @ rows.mT


def _is_narrow(width: int, tokens: int) -> bool:
    """Return whether products of features take less than Gram matrices, those of all pairs together."""
    return NARROW * width <= tokens


def _inner_product(A: Tensor, B: Tensor) -> Tensor:
    """Return the sum of ``A B`` entry by entry, that of single precision row by row in it, without their product."""
    if A.dtype == torch.float64:
        return torch.dot(A.flatten(), B.flatten())
    return torch.linalg.vecdot(A, B).to(summing_dtype(A.device)).sum()


def room_of(study: Study) -> int:
    """Return the bytes of Gram matrices that may be held."""
    return min(ROOM, study.limit // 4)


def _is_half(layer: LayerSize) -> bool:
    """Return whether the tokens of a layer came in half precision."""
    return layer.kind == "tokens" and layer.resolution in HALVES


def _itemsize(layer: LayerSize) -> int:
    return 2 if _is_half(layer) else layer.itemsize
