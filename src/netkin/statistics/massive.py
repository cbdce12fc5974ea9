"""Massive channels and first tokens: the few of either that alone hold most of ``‖XᵀX‖²``, of which CKA is a ratio.

Two layers that share nothing else have a linear CKA of ``√(h k)``, with h and k these shares of either layer, so that
above a half in both CKA may be high for them alone. Language models have such channels, and such a first token, on
which attention comes to rest (Sun et al. 2024, "Massive activations in large language models").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import summing_dtype
from netkin.results.caveats import Caveat
from netkin.statistics.collector import Key
from netkin.statistics.covariances import CovarianceSide, PairSide
from netkin.statistics.linear_algebra import squared_norm
from netkin.statistics.rows import RowsSide
from netkin.statistics.storage import Stored

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 0.5  # of ‖XᵀX‖²: above it the rest decides less than they do
FEW = 100  # one in so many channels counts as few
NARROW = 32  # in layers with fewer channels one of them may well hold most
NAMED = 4  # channels that a sentence names


class FirstTokens(Stored):
    """How many sequences and tokens each layer has given, and the sum of the first tokens."""

    def __init__(self) -> None:
        self.sequences: dict[Key, int] = {}
        self.tokens: dict[Key, int] = {}
        self.sums: dict[Key, Tensor] = {}

    def add(self, key: Key, rows: Tensor, places: Tensor | slice) -> None:
        """Count the rows of a batch, of which those at `places` are first tokens."""
        firsts = rows[places]
        first = firsts.sum(0, dtype=summing_dtype(rows.device))
        self.sequences[key] = self.sequences.get(key, 0) + len(firsts)
        self.tokens[key] = self.tokens.get(key, 0) + len(rows)
        self.sums[key] = self.sums[key] + first if key in self.sums else first

    def merged(self, other: Self) -> FirstTokens:
        """Return those of both."""
        both = FirstTokens()
        for key in self.sums.keys() & other.sums.keys():
            both.sequences[key] = self.sequences[key] + other.sequences[key]
            both.tokens[key] = self.tokens[key] + other.tokens[key]
            both.sums[key] = self.sums[key] + other.sums[key].to(self.sums[key].device)
        return both

    def share(self, key: Key, side: PairSide) -> float:
        """Return what share of ``‖XᵀX‖²`` comes of the first tokens having another mean than the rest.

        With f the share of first tokens and m their mean less that of all, the variance between the two groups is
        ``f/(1 - f) m mᵀ``.
        """
        f = self.sequences[key] / self.tokens[key]
        if f == 1:
            return 0.0
        apart = self.sums[key] / self.sequences[key] - side.mean[0].to(self.sums[key])
        between = f / (1 - f) * float(squared_norm(apart)) * side.scale**2
        return min(between**2 / (float(side.squared) / side.n**2), 1.0)


class Leading(NamedTuple):
    """The fewest channels that hold most of ``‖XᵀX‖²``, the largest first, and their share."""

    channels: list[int]
    share: float


def leading_channels(side: PairSide) -> Leading | None:
    """Return the few channels that hold most of ``‖XᵀX‖²``, if there are such."""
    return side.once("leading channels", lambda: _find_leading(side))


def _find_leading(side: PairSide) -> Leading | None:
    if side.width < NARROW or len(side.mean) > 1:
        return None
    largest = torch.topk(side.variances[0].detach(), max(side.width // FEW, 1)).indices
    if isinstance(side, CovarianceSide):
        square = side.second[0][largest][:, largest]
    elif isinstance(side, RowsSide):
        columns = side.rows[:, largest].to(summing_dtype(side.rows.device))
        square = columns.mT @ columns
    sums = square.detach().to(summing_dtype(square.device)).square().cumsum(0).cumsum(1).diagonal()
    shares = (sums / side.squared.detach()).tolist()
    count = next((place for place, share in enumerate(shares, 1) if share > MOST), None)
    return None if count is None else Leading(largest[:count].tolist(), min(shares[count - 1], 1.0))


def caveats_of_tokens(a: Key, x: PairSide, b: Key, y: PairSide, firsts: FirstTokens) -> list[Caveat]:
    """Return why CKA of two layers of tokens may be high for a few channels or for the first tokens alone."""
    if not (x.varies and y.varies):
        return []
    caveats = []
    if firsts.sums.keys() >= {a, b}:
        shares = [firsts.share(key, side) for key, side in ((a, x), (b, y))]
        if min(shares) > MOST:
            score = float(np.sqrt(shares[0] * shares[1]))
            sentence = (
                f"the first token of each sequence alone holds {shares[0]:.0%} of ‖XᵀX‖² of {x.name} and "
                f"{shares[1]:.0%} of {y.name}: layers that share nothing else would have a CKA of {score:.2f}; leave "
                "it out with `positions='1:'`."
            )
            caveats.append(Caveat("massive-first-tokens", sentence, size=score))
    leading, other = leading_channels(x), leading_channels(y)
    if leading is not None and other is not None:
        score = (leading.share * other.share) ** 0.5
        held = " and ".join(
            f"{_in_words(few.channels)} {few.share:.0%} of ‖XᵀX‖² of {side.name}"
            for few, side in ((leading, x), (other, y))
        )
        sentence = (
            f"few channels hold most of the variance that CKA weighs: {held}; layers that share nothing but these "
            f"would have a CKA of {score:.2f}; leave them out by a function as `shape`."
        )
        caveats.append(Caveat("massive-channels", sentence, size=score))
    return caveats


def _in_words(channels: list[int]) -> str:
    if len(channels) == 1:
        return f"channel {channels[0]} holds"
    more = f" and {len(channels) - NAMED} others" if len(channels) > NAMED else ""
    return f"the channels {', '.join(map(str, channels[:NAMED]))}{more} hold"


def first_places(valid: Tensor) -> Tensor:
    """Return which of the rows of a mask's tokens are the first of their sequence; sequences without any have none."""
    counts = valid.sum(1)
    return (counts.cumsum(0) - counts)[counts > 0]
