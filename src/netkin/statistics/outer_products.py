"""`LayerEmbeddings` and `MeanEmbedding`: the mean of ψ(x) = g fᵀ over a data set, and the size of the kernel of ψ.

Features f and gradients g of an example at a layer give the matrix ``g fᵀ``. Its mean μ over the examples is where the
kernel ``K = K_f ∘ K_g`` puts the data set: ``‖μ‖² = ΣK / N²`` (Tang et al. 2020, section 5.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.arrays import as_matrix, summing_dtype
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName, did_you_mean
from netkin.statistics.collector import label, name_of
from netkin.statistics.layer_rows import CAP, LayerRows
from netkin.statistics.sketches import Placing, SketchSettings

WIDEST = 4096  # features up to which Σ g fᵀ is kept, in 128 MB of float64


@dataclass(frozen=True)
class MeanEmbedding:
    """The norms of the kernel of features and gradients of one layer, on one data set of N examples.

    `norm` is ``‖μ‖ = √ΣK / N``, `kernel_norm` is ``‖K‖``, `trace` is ``Tr K``; none of them is centred. `error` is the
    standard error of `norm` over draws of the examples. `exactness` is what of it is exact, estimated or sketched.
    """

    norm: float
    kernel_norm: float
    trace: float
    examples: int
    error: float
    exactness: str

    @property
    def by_cka(self) -> float:
        """``‖μ‖ / (‖K‖/N²)``, the first form of Eq. 19; it grows with N."""
        return self.norm / self._positive(self.kernel_norm) * self.examples**2

    @property
    def by_nbs(self) -> float:
        """``‖μ‖ / (√Tr K / N)``, the second form of Eq. 19; it grows with √N."""
        return self.norm / self._positive(self.trace) ** 0.5 * self.examples

    @property
    def adaptation_score(self) -> float:
        """``log(‖μ‖ / (‖K‖/N²))``, Eq. 48; compare it only between data sets of the same size."""
        return float(np.log(self._positive(self.by_cka)))

    @staticmethod
    def _positive(size: float) -> float:
        if not size > 0:
            raise NoValue("every example's feature or gradient is zero at this layer, so that nothing can be divided.")
        return size


class ProductSums:
    """What is summed of one layer: Σ g fᵀ unless it is too wide, Tr K, ΣK_ii², and the sketches of f and g."""

    def __init__(self) -> None:
        self.n, self.trace, self.squares = 0, 0.0, 0.0
        self.products: Tensor | None = None
        self.sketches: tuple[Tensor, ...] = ()

    def add(self, f: Tensor, g: Tensor, placing: Placing | None) -> None:
        """Add the features and gradients of a batch."""
        diagonal = f.square().sum(1) * g.square().sum(1)
        self.n += len(f)
        self.trace += float(diagonal.sum())
        self.squares += float(diagonal.square().sum())
        if f.shape[1] <= WIDEST:
            products = g.mT @ f
            self.products = products if self.products is None else self.products + products
        if placing is not None:
            sketches = (placing.sums(f), placing.sums(g))
            self.sketches = tuple(map(torch.add, self.sketches, sketches)) if self.sketches else sketches


class LayerEmbeddings:
    """The mean embeddings of many layers on one data set, from one pass.

    Exact of all examples are μ (of layers up to 4,096 wide), Tr K and the diagonal of K. ‖K‖ needs all pairs of
    examples: it is exact up to `sample` examples, and else estimated, without bias in ‖K‖², from the pairs of a sample.

    Args:
        names: the layers.
        sample: of how many examples the rows are kept, for pairs of them.
        buckets: into how many buckets features and gradients are sketched, for `sketched`; 0 for none.
        seed: of the sample and of the buckets.
    """

    def __init__(self, names: Sequence[str], *, sample: int = CAP, buckets: int = 0, seed: int = 0):
        if sample < 2 or buckets < 0:
            raise InvalidValue(
                f"`sample` must be at least 2 and `buckets` at least 0; got {sample} and {buckets}: the size of a "
                "kernel is read off pairs of examples.",
                argument="sample",
            )
        self.names, self.sample, self.buckets, self.seed = list(names), sample, buckets, seed
        self.features, self.gradients = (LayerRows(self.names, cap=sample, seed=seed) for _ in range(2))
        self._layers = {name: ProductSums() for name in self.names}

    def __repr__(self) -> str:
        return f"LayerEmbeddings of {', '.join(map(str, self.names))}"

    def update(
        self,
        features: Mapping[str, Any],
        gradients: Mapping[str, Any],
        numbers: np.ndarray | None = None,
        contents: np.ndarray | None = None,
    ) -> None:
        """Add the features and gradients of a batch.

        `numbers` are those of its examples, by default counted on. Buckets follow from `contents`, numbers that tell
        what the examples are, so that their order does not matter; without them from `numbers`.
        """
        count = len(next(iter(features.values())))
        ids = self._layers[self.names[0]].n + np.arange(count) if numbers is None else np.asarray(numbers)
        pairs = {name: _paired(features[name], gradients[name], name, len(ids)) for name in self.names}
        self.features.update({name: f for name, (f, _) in pairs.items()}, ids)
        self.gradients.update({name: g for name, (_, g) in pairs.items()}, ids)
        devices = {f.device for f, _ in pairs.values()} if self.buckets else ()
        what = ids if contents is None else contents
        placings = {device: Placing(SketchSettings(self.buckets, seed=self.seed), what, device) for device in devices}
        for name, (f, g) in pairs.items():
            dtype = summing_dtype(f.device)
            self._layers[name].add(f.to(dtype), g.to(dtype), placings.get(f.device))

    def mean(self, name: str) -> Tensor:
        """Return μ, the mean of ``g fᵀ``."""
        sums = self._sums(name)
        if sums.products is None:
            raise NoValue(f"{label(name)} is wider than {WIDEST:,}, and its mean embedding was not kept.")
        return sums.products / sums.n

    def embedding(self, name: str) -> MeanEmbedding:
        """Return the norms of one layer."""
        sums, rows = self._sums(name), [matrix.sample(name).X for matrix in (self.features, self.gradients)]
        f, g = (matrix.to(summing_dtype(matrix.device)) for matrix in rows)
        K = (f @ f.mT) * (g @ g.mT)
        squares = _over_all_pairs(K.square(), sums.squares, sums.n)
        if sums.products is None:
            norm, along = max(_over_all_pairs(K, sums.trace, sums.n), 0.0) ** 0.5 / sums.n, K.mean(1)
        else:
            norm, along = float(sums.products.norm()) / sums.n, ((g @ sums.products.to(g)) * f).sum(1) / sums.n
        used = len(K) if sums.products is None else sums.n
        # the derivative of ‖μ‖ by the weight of an example is ⟨ψ, μ⟩/‖μ‖
        error = float(along.std()) / norm / used**0.5 if norm and len(K) > 1 else float("nan")
        return MeanEmbedding(norm, squares**0.5, sums.trace, sums.n, error, _exactness(sums, len(K)))

    def sketched(self, name: str) -> MeanEmbedding:
        """Return the norms as the authors' code has them: of ``K̃_f ∘ K̃_g`` over the buckets, in place of K.

        Random signs cancel in that product, so that these are other numbers: ‖μ‖² is too large on average, by
        ``Σ (‖f_i‖²‖g_j‖² + K_ij) / (M N²)`` over i ≠ j.
        """
        sums = self._sums(name)
        if not sums.sketches:
            raise NoValue("nothing was sketched; pass `buckets=512`.")
        F, G = sums.sketches
        K = (F @ F.mT) * (G @ G.mT)
        norm = max(float(K.sum()), 0.0) ** 0.5 / sums.n
        words = f"sketched in {self.buckets:,} buckets"
        return MeanEmbedding(norm, float(K.norm()), float(K.trace()), sums.n, float("nan"), words)

    def _sums(self, name: str) -> ProductSums:
        if name not in self._layers:
            hint = did_you_mean(name, self.names) or ";"
            known = ", ".join(map(str, self.names))
            raise UnknownName(f"no layer {name_of(name)!r} in these embeddings{hint} there are {known}.")
        if not self._layers[name].n:
            raise NoValue("no batch has been folded in yet; call `update` first.")
        return self._layers[name]


def _paired(features: Any, gradients: Any, name: str, count: int) -> tuple[Tensor, Tensor]:
    f, g = (as_matrix(rows, name_of(name)).detach() for rows in (features, gradients))
    if f.shape != g.shape or len(f) != count:
        raise ShapeError(
            f"{label(name)} has features of shape {tuple(f.shape)} and gradients of shape {tuple(g.shape)} for "
            f"{count:,} examples; an embedding takes one row of each for an example, as the shapes 'pool', 'mean' and "
            "'flatten' give."
        )
    return f, g


def _over_all_pairs(values: Tensor, diagonal: float, n: int) -> float:
    """Return the sum over all pairs of n examples: of the diagonal as given, of the others from those of a sample."""
    m = len(values)
    others = float(values.sum() - values.diagonal().sum())
    return diagonal if m < 2 else diagonal + others * (n * (n - 1) / (m * (m - 1)))


def _exactness(sums: ProductSums, m: int) -> str:
    if m == sums.n:
        return "exact"
    which = "‖K‖" if sums.products is not None else "‖μ‖ and ‖K‖"
    return f"exact, but {which} from pairs of {m:,} of {sums.n:,} examples"
