"""`Moments` of a pair of layers, from which linear measures are computed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from netkin.arrays import paired, resolution_of, summing_dtype
from netkin.errors import NoValue
from netkin.results.caveats import Caveat
from netkin.statistics.collector import Pair
from netkin.statistics.covariances import CovarianceSide, PairSide
from netkin.statistics.decompositions import Decomposition, decomposed, largest, prepare
from netkin.statistics.linear_algebra import about_medians, few_for_bias, squared_norm, u_products
from netkin.statistics.rows import RowsSide

CANCELLED = 1e-7  # what may be left of sums that cancel before float64 has lost nine digits of it
ON_HOST = 1024  # the widest layers of a GPU that are read on the CPU


class Moments(Pair):
    """A pair of layers: the number of examples, an x side, a y side and their cross moment.

    `Moments.of(X, Y)` takes them from two matrices, differentiably. `LayerMoments` streams them.
    """

    prepare = staticmethod(prepare)
    # what measures may declare in `needs`, so that it is decomposed for many pairs at once
    decompositions = ("cross spectrum", "correlations", "variates", "uncentred cross spectrum", "uncentred directions")

    def __init__(
        self,
        x: PairSide,
        y: PairSide,
        cross: Tensor | None = None,
        norm_product: Tensor | None = None,
        centred: bool = True,
    ):
        self.x, self.y, self.n, self.is_centred = x, y, x.n, centred
        self._cross, self._norm_product = cross, norm_product
        self.cut: Any = None  # where the measure that was read last cut the spectra of the layers, if it did
        self.results: dict[Hashable, Any] = {}  # singular values, and vectors

    @classmethod
    def of(cls, X: Any, Y: Any, precision: torch.dtype | None = torch.float64) -> Moments:
        """Return the moments of two matrices whose rows are the same examples.

        `precision` is that of the products; None keeps the matrices' own.
        """
        pair = paired(X, Y, check=False)  # the sides notice NaN and Inf by the mean that they take anyway
        x, y = (
            RowsSide(rows, name, precision, resolution=resolution_of(array, rows))
            for array, rows, name in zip((X, Y), pair, ("`X`", "`Y`"), strict=True)
        )
        return cls(x, y)

    @classmethod
    def options(cls, facts: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"precision": torch.float64 if facts.precise else None}

    def ranks(self, facts: Any) -> tuple[int, int] | None:
        """Return how many directions either layer was cut to, for a measure that whitens about the means; else None."""
        centred = facts.whitens and "translation" in facts.unchanged_by
        return (self.x.rank, self.y.rank) if centred and self.x.varies and self.y.varies else None

    def caveats(self, facts: Any, settings: Mapping[str, Any]) -> list[Caveat]:
        caveats = [self.few_examples] if facts.whitens else []
        if facts.whitens and "invertible" in facts.unchanged_by:  # all directions count alike, the smallest too
            caveats += [side.lost_digits for side in (self.x, self.y)]
        if facts.debiased_as:
            caveats.append(self._few_for_bias(facts.debiased_as))
        return [caveat for caveat in caveats if caveat is not None]

    def _few_for_bias(self, debiased: str) -> Caveat | None:
        """Return a caveat if unrelated layers of these spectra would score high by the bias of few examples.

        Over all orders of the examples of one layer, ``‖XᵀY‖²`` of the centred layers is ``tr XᵀX · tr YᵀY / (n - 1)``
        on average. Over the norms this is ``√(d e) / (n - 1)``, with ``d = (tr C)² / tr C²`` the layer's effective
        dimension; blocks add up.
        """
        x, y = self.x, self.y
        if not (x.varies and y.varies):
            return None
        sizes = [float(side.squared.detach()) ** 0.5 for side in (x, y)]
        traces = [side.traces.detach() for side in (x, y)]
        shared = min(len(trace) for trace in traces)
        chance = float((traces[0][:shared] * traces[1][:shared]).sum()) / ((self.n - 1) * sizes[0] * sizes[1])
        d, e = (float(trace.sum()) ** 2 / size**2 for trace, size in zip(traces, sizes, strict=True))
        return few_for_bias(self.n, chance, (d, e), debiased)

    @property
    def swapped(self) -> Moments:
        """The same pair with its sides swapped, sharing what each side has computed."""
        cross = None if self._cross is None else self._cross.mH
        return Moments(self.y, self.x, cross, self._norm_product, self.is_centred)

    @property
    def x_norm(self) -> Tensor:
        return self.x.norm

    @property
    def y_norm(self) -> Tensor:
        return self.y.norm

    @cached_property
    def cross(self) -> Tensor:
        """``XᵀY`` of the centred sides, (blocks, p, q), in the coordinates of the sides' second moments."""
        if self._cross is not None:
            return self._cross
        x, y = _rows(self.x), _rows(self.y)
        return (x.coordinates.mT @ y.coordinates.to(x.coordinates.dtype)).unsqueeze(0)

    @cached_property
    def cross_squared(self) -> Tensor:
        """``‖XᵀY‖²``; from the Gram matrices where a side is wider than its rows."""
        x, y = self.x, self.y
        if isinstance(x, RowsSide) and isinstance(y, RowsSide) and (x.is_wide or y.is_wide):
            double = summing_dtype(x.gram.device)
            return (x.gram.to(double) * y.gram.to(double)).sum()
        return squared_norm(self.cross)

    @cached_property
    def norm_product(self) -> Tensor:
        """``Σ ‖xᵢ‖² ‖yᵢ‖²`` over the centred examples: all that debiasing needs beyond the moments."""
        if self._norm_product is not None:
            return self._norm_product
        return (_rows(self.x).row_norms * _rows(self.y).row_norms).sum()

    @cached_property
    def unbiased(self) -> tuple[Tensor, Tensor, Tensor]:
        """``n(n-3) HSIC₁`` of the two layers, of x with itself and of y with itself: zero where only rounding is left.

        From sums about the means, where ``1ᵀK̃1 = -Σ‖xᵢ‖²`` and ``1ᵀK̃L̃1 = Σ‖xᵢ‖²‖yᵢ‖²``. One example far from the
        others makes these cancel; then the rows are used, where they were kept.
        """
        x, y = self.x, self.y
        products = [self._hsic(side.squared, side.norm_squares, side, side) for side in (x, y)]
        sizes = [side.squared.detach() + side.norm_squares.detach() for side in (x, y)]
        if any(product < CANCELLED * size for product, size in zip(products, sizes, strict=True)):
            if isinstance(x, RowsSide) and isinstance(y, RowsSide):
                return self._unbiased_of_rows(x, y)
            products = [
                product * (product > 64 * x.rounding * size) for product, size in zip(products, sizes, strict=True)
            ]
        return self._hsic(self.cross_squared, self.norm_product, x, y), products[0], products[1]

    def _hsic(self, squared: Tensor, norm_product: Tensor, x: PairSide, y: PairSide) -> Tensor:
        n = self.n
        return squared - norm_product + x.trace * y.trace / ((n - 1) * (n - 2)) - 2 * norm_product / (n - 2)

    def _unbiased_of_rows(self, x: RowsSide, y: RowsSide) -> tuple[Tensor, Tensor, Tensor]:
        rows = [about_medians(side.rows) for side in (x, y)]
        cross, *owns = u_products(*rows)
        for i, (side, Z) in enumerate(zip((x, y), rows, strict=True)):
            norms = Z.detach().square().sum(1)
            # rounding moves a product of two rows by about eps ‖xᵢ‖ ‖xⱼ‖, that of the data by chance in each feature
            noise = max((2 * side.resolution) ** 2 / side.width, (8 * torch.finfo(Z.dtype).eps) ** 2)
            owns[i] = owns[i] * (owns[i] > noise * (norms.sum().square() - norms.square().sum()))
        return cross, owns[0], owns[1]

    @property
    def is_streamed(self) -> bool:
        """Whether the moments were streamed, without rows."""
        return isinstance(self.x, CovarianceSide) and isinstance(self.y, CovarianceSide)

    @property
    def is_small(self) -> bool:
        """Whether the moments are streamed and of so few features that no product gains by threads."""
        return self.is_streamed and max(self.x.block_width, self.y.block_width) <= ON_HOST

    def bring_to_host(self) -> None:
        """Read small layers on the CPU, whose threads decompose them sooner than a GPU does."""
        x, y, cross = self.x, self.y, self._cross
        if cross is None or not cross.is_cuda or cross.requires_grad or not self.is_small:
            return
        if isinstance(x, CovarianceSide) and isinstance(y, CovarianceSide):
            self.x, self.y, self._cross = x.on_host, y.on_host, cross.cpu()
            self._norm_product = None if self._norm_product is None else self._norm_product.cpu()

    def decomposition(self, need: str) -> Decomposition | None:
        """Return what is decomposed for a need that a measure declares; None if nothing is."""
        if need == "cross spectrum":
            return self._cross_spectrum
        if need not in ("correlations", "variates") or self.spans_all:
            return None
        return Decomposition(need, lambda: self.alignment, vectors=need == "variates")

    @property
    def _cross_spectrum(self) -> Decomposition:
        self.x.trace, self.y.trace  # noqa: B018  refuse constant layers
        known = self.worth_turning and self.x.decomposed and self.y.decomposed
        return Decomposition("cross spectrum", lambda: self.principal if known else self.cross, graded=known)

    def decomposed(self, request: Decomposition) -> Any:
        """Return the singular values of a matrix of this pair, (blocks, k), or left vectors and values; once a key."""
        if request.key not in self.results:
            (self.results[request.key],) = decomposed([request.matrix()], request.graded, request.vectors)
        return self.results[request.key]

    @property
    def needs_gradient(self) -> bool:
        return self.x.needs_gradient or self.y.needs_gradient

    @cached_property
    def nuclear(self) -> Tensor:
        """``‖XᵀY‖*``, the sum of the singular values of the cross moment."""
        values = self.decomposed(self._cross_spectrum)
        return values.to(summing_dtype(values.device)).sum()

    @property
    def worth_turning(self) -> bool:
        """Whether `principal` pays where only singular values are needed: about the origin it saves a CPU nothing."""
        return self.is_centred or self.x.mean.device.type != "cpu"

    @cached_property
    def principal(self) -> Tensor:
        """The cross moment in the principal directions of both sides, (blocks, r, s), without gradient."""
        x, y, turned = self.x, self.y, self.cross.detach()
        turned = turned if x.stands_principal else x.eigen[1].mH.to(turned.dtype) @ turned
        return turned if y.stands_principal else turned @ y.eigen[1].to(turned.dtype)

    @cached_property
    def alignment(self) -> Tensor:
        """``QxᵀQy``, the cross moment of the whitened sides, (blocks, k, l)."""
        x, y = self.x, self.y
        if isinstance(x, RowsSide) and isinstance(y, RowsSide) and any(s.loses_digits(s.eigen[0]) for s in (x, y)):
            return (x.whitened.mT @ y.whitened.to(x.whitened.dtype)).unsqueeze(0)
        if self.needs_gradient or not self.is_centred:  # a mean may outweigh all else: whitened before it is multiplied
            return x.whitener.mH @ self.cross @ y.whitener
        left, right = x.inverse_roots, y.inverse_roots
        leading = self.principal[..., : left.shape[-1], : right.shape[-1]]
        return leading * left.unsqueeze(-1) * right.unsqueeze(-2)

    def leading_alignment(self, keep_x: Tensor, keep_y: Tensor) -> Tensor:
        """Return `alignment` of the principal directions marked for either side, (blocks, k, l)."""
        wide = isinstance(self.x, RowsSide) and self.n < self.x.width + self.y.width  # few rows are multiplied sooner
        if self.needs_gradient or (wide and "alignment" not in self.__dict__):
            return self.mapped(self.x.whitening(keep_x), self.y.whitening(keep_y))
        k, l = (int(keep.sum(-1).max()) for keep in (keep_x, keep_y))
        part = self.alignment[..., :k, :l]
        if len(keep_x) == len(keep_y) == 1:
            return part
        return part * keep_x[..., :k].unsqueeze(-1) * keep_y[..., :l].unsqueeze(-2)

    @cached_property
    def explained(self) -> Tensor:
        """``QxᵀY``, what the whitened x side holds of the y side, (blocks, k, q), up to a rotation of y."""
        x, y = self.x, self.y
        if isinstance(x, RowsSide) and isinstance(y, RowsSide):
            return (x.whitened.mT @ y.coordinates.to(x.whitened.dtype)).unsqueeze(0)
        if "principal" in self.__dict__ and not self.needs_gradient:
            return self.principal[..., : x.inverse_roots.shape[-1], :] * x.inverse_roots.unsqueeze(-1)
        return x.whitener.mH @ self.cross

    def mapped(self, F: Tensor, G: Tensor) -> Tensor:
        """Return ``FᵀXᵀYG`` for maps of the sides' coordinates, (blocks, k, l); of rows without the product XᵀY."""
        x, y = self.x, self.y
        if isinstance(x, RowsSide) and isinstance(y, RowsSide):
            left, right = x.coordinates @ F[0], y.coordinates @ G[0]
            return (left.mT @ right.to(left.dtype)).unsqueeze(0)
        return F.mH @ self.cross @ G

    @cached_property
    def correlations(self) -> Tensor:
        """The canonical correlations, falling, as many as the smaller rank."""
        count = min(self.x.rank, self.y.rank)
        if self.spans_all:
            return torch.ones(count, dtype=summing_dtype(self.cross.device), device=self.cross.device)
        if "variates" in self.results:
            return largest(self.results["variates"][1], count)
        return largest(self.decomposed(Decomposition("correlations", lambda: self.alignment)), count)

    @property
    def variates(self) -> tuple[Tensor, Tensor]:
        """The canonical variates of x in its whitened directions, (blocks, k, m), and the correlations, (blocks, m)."""
        return self.decomposed(Decomposition("variates", lambda: self.alignment, vectors=True))

    @cached_property
    def variate_weights(self) -> Tensor:
        """``Σⱼ |⟨hᵢ, xⱼ⟩|`` of the canonical variates hᵢ and the features xⱼ of x, (blocks, m)."""
        return (self.variates[0].mH @ self.x.loadings).abs().sum(-1)

    @property
    def spans_all(self) -> bool:
        """Whether one side spans everything that n examples can do, so that it explains the other by itself."""
        # blocks count their examples together, and a constant has no gradient
        unclear = len(self.x.kept) > 1 or self.x.needs_gradient or self.y.needs_gradient
        return not unclear and max(self.x.rank, self.y.rank) == self.n - (1 if self.is_centred else 0)

    @cached_property
    def uncentred(self) -> Moments:
        """The same pair about the origin instead of the means."""
        x, y = self.x, self.y
        if isinstance(x, RowsSide) and isinstance(y, RowsSide):
            return Moments(x.uncentred, y.uncentred, centred=False)
        return Moments(x.uncentred, y.uncentred, self._cross_about_origin, centred=False)

    @property
    def _cross_about_origin(self) -> Tensor:
        x, y = self.x, self.y
        shared = min(len(x.mean), len(y.mean))  # a layer without space has part in the first block alone
        mean_x, mean_y = x.mean[:shared] * x.scale, y.mean[:shared] * y.scale
        means = x.n * mean_x.conj().unsqueeze(-1) * mean_y.unsqueeze(-2)
        rest = self.cross[shared:]
        return torch.cat([self.cross[:shared] + means, rest]) if len(rest) else self.cross + means

    @property
    def few_examples(self) -> Caveat | None:
        """A caveat if there are too few examples for a measure that whitens, else None."""
        x, y = self.x.block_width, self.y.block_width
        if self.n >= x + y:
            return None
        where = " at each frequency" if max(len(self.x.mean), len(self.y.mean)) > 1 else ""
        sentence = (
            f"{self.n:,} examples are fewer than the {x:,} + {y:,} features of the two layers{where}: "
            f"values of measures that whiten (CCA, SVCCA, regression) are inflated; {x + y:,} examples would do, "
            f"and {10 * (x + y):,} would leave little of that."
        )
        return Caveat("few-examples", sentence, size=x + y)


def _rows(side: PairSide) -> RowsSide:
    if not isinstance(side, RowsSide):
        raise NoValue(f"{side.name} {side.lacks}")
    return side
