"""`Sequences` and `SequenceRows`: tokens by the sequence they are of, for estimates across sequences.

Tokens of one sequence are not independent, so that products of two of them, of one sequence, bias an estimate that is
unbiased for independent rows. Here each term of HSIC is taken of tokens of as many different sequences as it has.

With s_g and t_g the sums of a sequence's tokens in the two layers, C_g that of their products ``x yᵀ`` and n_g their
number, ``E[n]⁴ ‖Cov(x, y)‖²`` is the mean over all quadruples of different sequences g, h, f, e of

    n_f n_e ⟨C_g, C_h⟩ - 2 n_e s_hᵀ C_g t_f + (s_g · s_f) (t_h · t_e),

which has no bias for sequences of any lengths, and is HSIC₁ where each has one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_matrix, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.statistics.collector import CostEstimate, Key, Pair, Study, chunk_of, require_pair
from netkin.statistics.layer_moments import LinearSettings
from netkin.statistics.rows import RowsSide
from netkin.statistics.token_rows import TOKENS, TokenRows, room_of

FEWEST = 4  # sequences that the estimate takes


class SequenceGram:
    """The products of a layer's tokens but those of one sequence, and their sums by sequence.

    Args:
        rows: the tokens about their mean.
        sequences: for each token the number of its sequence, from 0.
    """

    def __init__(self, rows: Tensor, sequences: Tensor):
        self.counts = torch.bincount(sequences).to(rows)
        self.lengths = self.counts[sequences]  # of each token's sequence
        self.products = (rows @ rows.mT).masked_fill_(sequences[:, None] == sequences, 0)
        by_sequence = rows.new_zeros(len(rows), len(self.counts))
        self.by_sequence = by_sequence.index_add_(1, sequences, self.products)
        self.sums = rows.new_zeros(len(self.counts), len(self.counts)).index_add_(0, sequences, self.by_sequence)


def hsic_across(x: SequenceGram, y: SequenceGram) -> Tensor:
    """Return the sum over all quadruples of different sequences, see above, over their number."""
    n, lengths, counts, m = x.counts.sum(), x.lengths, x.counts, len(x.counts)
    double = summing_dtype(lengths.device)
    # ⟨C_g, C_h⟩ n_f n_e, summed over f and e: (n - n_g - n_h)² - Σ n² + n_g² + n_h²
    alike = x.products * y.products
    rows, weighted = alike.sum(1).to(double), (alike @ lengths).to(double)
    del alike
    own = 2 * lengths * (lengths - n)
    first = (n**2 - counts.square().sum()) * rows.sum() + 2 * (own * rows).sum() + 2 * (lengths * weighted).sum()
    # n_e s_hᵀ C_g t_f, summed over e: n - n_g - n_h - n_f
    a, b = x.by_sequence.sum(1), y.by_sequence.sum(1)
    p, q = x.by_sequence @ counts, y.by_sequence @ counts
    left = n - lengths
    same = x.by_sequence * y.by_sequence  # of h = f
    second = (left * a * b - p * b - a * q).sum() - (left * same.sum(1)).sum() + 2 * (same @ counts).sum()
    s, t = x.sums, y.sums
    third = s.sum() * t.sum() - 4 * (s.sum(1) * t.sum(1)).sum() + 2 * (s * t).sum()
    return (first - 2 * second + third) / (m * (m - 1) * (m - 2) * (m - 3))


class Sequences(Pair):
    """Two layers by their tokens, of the same sequences."""

    takes_matrices: ClassVar[bool] = False  # a layer is a list of them

    def __init__(self, x: RowsSide, y: RowsSide, count: int, estimates: Callable[[], tuple[Tensor, Tensor, Tensor]]):
        self.x, self.y, self.n, self.count, self._estimates = x, y, x.n, count, estimates

    @classmethod
    def of(cls, X: Any, Y: Any) -> Sequences:
        """Return the pair of two layers, each a list of sequences, tokens × features, of the same lengths."""
        layers = [[as_matrix(one, f"sequence {i} of {name}") for i, one in enumerate(Z)] for Z, name in _named(X, Y)]
        lengths = [[len(one) for one in layer] for layer in layers]
        if lengths[0] != lengths[1]:
            raise ShapeError(
                f"`X` and `Y` must hold the same sequences; got {len(lengths[0]):,} with {sum(lengths[0]):,} tokens "
                f"and {len(lengths[1]):,} with {sum(lengths[1]):,}, or others of other lengths."
            )
        numbers = torch.repeat_interleave(torch.arange(len(lengths[0])), torch.tensor(lengths[0]))
        x, y = (
            RowsSide(torch.cat(layer), name, torch.float64) for layer, name in zip(layers, ("`X`", "`Y`"), strict=True)
        )
        return cls(x, y, len(lengths[0]), lambda: _estimates(*(SequenceGram(side.rows, numbers) for side in (x, y))))

    @property
    def estimates(self) -> tuple[Tensor, Tensor, Tensor]:
        """HSIC across sequences of the two layers, of x with itself and of y with itself."""
        self.x.trace, self.y.trace  # noqa: B018  refuse constant layers
        if self.count < FEWEST:
            raise NoValue(f"an estimate across sequences needs at least {FEWEST} of them; got {self.count:,}.")
        return self._estimates()


def _named(X: Any, Y: Any) -> list[tuple[Any, str]]:
    return [(X, "`X`"), (Y, "`Y`")]


def _estimates(x: SequenceGram, y: SequenceGram) -> tuple[Tensor, Tensor, Tensor]:
    return hsic_across(x, y), hsic_across(x, x), hsic_across(y, y)


class SequenceRows(TokenRows):
    """A sample of the tokens of layers with the sequences that they are of."""

    keeps_examples = True

    @classmethod
    def cost(cls, settings: LinearSettings, study: Study) -> CostEstimate:
        sampled = super().cost(settings, study)
        if sampled is None:  # there is no other collector
            raise InvalidValue(
                "'cka_debiased_by_sequence' reads tokens by their sequences, and no layer gives tokens; take "
                "shape='tokens', or the measure 'cka_debiased'.",
                argument="shape",
            )
        cap, item = study.tokens or TOKENS, settings.precision(study).itemsize
        # products by token and by sequence, of those held and of one that passes by, and a product of both
        grams = 2 * min(room_of(study), item * cap**2 * len(study.sizes)) + 5 * item * cap**2
        why = ", of which those of one sequence are left out of products"
        return replace(sampled, bytes=sampled.bytes + grams, why=why, rank=0)

    def _side(self, key: Key, without: int | None) -> Any:
        def make() -> RowsSide:
            sample = self.sample(key, without)
            side = RowsSide(sample.X, sample.name, self.precision, resolution=sample.resolution)
            side.__dict__["_rows"] = None  # made again when it is asked for
            return side

        return self.once(("side", key, without), make)

    def pair(self, a: Key, b: Key, without: int | None = None) -> Any:
        require_pair(a, b, self.names, "rows", self.pair_blocks)
        x, y = self._side(a, without), self._side(b, without)
        self.require_alike_rows(a, b)  # once both are in order

        def estimates() -> tuple[Tensor, Tensor, Tensor]:
            return self._squares(a, b, without)[a, b], self._own(a, without), self._own(b, without)

        return Sequences(x, y, int(self._sequences(a, without).max()) + 1, estimates)

    def _own(self, key: Key, without: int | None) -> Tensor:
        def make() -> Tensor:
            gram = self._gram(key, without)
            return hsic_across(gram, gram)

        return self.once(("own", key, without), make)

    def _gram(self, key: Key, without: int | None) -> Any:
        side = self._side(key, without)
        return SequenceGram(side.rows, self._sequences(key, without).to(side.rows.device))

    def _product(self, one: Any, other: Any) -> Tensor:
        return hsic_across(one, other)

    def _sequences(self, key: Key, without: int | None) -> Tensor:
        """Return for each sampled token the number of its sequence, from 0."""
        self.sample(key, without)  # puts the rows in order
        examples = np.concatenate(self.layers[key].examples)
        if without is not None:
            examples = examples[chunk_of(examples, self.chunks) != without]
        return torch.from_numpy(np.unique(examples, return_inverse=True)[1])
