"""The directions of a layer's input in the order in which they are worth keeping, and the projections on the first k.

First come the canonical directions, by their correlation with what the layer is compared with. Ten logits have at most
ten of them; after those come the other directions of the layer, uncorrelated over the examples with all before, by the
variance that they hold. So k may be anything up to the layer's rank, where nothing is lost any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from netkin.measures.directions import svcca_directions
from netkin.statistics import Moments

PROJECTIONS = ("least_squares", "orthogonal")


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
    each unit follows each of them.
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
