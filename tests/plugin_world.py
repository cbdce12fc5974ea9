"""What a package outside netkin could offer: two statistics of its own, one fed by weights, and their measures.

Loading this module registers them, as an entry point of the group ``netkin.measures`` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import netkin as nk
from netkin.results.caveats import Caveat
from netkin.statistics import Collector, CostEstimate, Grams, Pair, Settings
from netkin.statistics.collector import chunk_of

PROMISES = {"higher_is_closer": True, "bounds": (-1.0, 1.0), "reference": "nobody (2024)"}


# --- how often two layers are on the same side of a threshold ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Signs(Pair):
    """A pair of layers: Σ s t over examples, where s and t say on which side of a threshold the rows' sums lie."""

    total: torch.Tensor
    n: int

    @classmethod
    def of(cls, X, Y, *, threshold=0.0):
        signs = [torch.as_tensor(Z).sum(1).sub(threshold).sign().double() for Z in (X, Y)]
        return cls((signs[0] * signs[1]).sum(), len(signs[0]))

    @classmethod
    def options(cls, facts, settings):
        return {"threshold": settings["threshold"]}

    def caveats(self, facts, settings):
        few = Caveat("few-signs", f"{self.n} examples are few for signs; take 10.")
        return [few] if self.n < 10 else []


@dataclass(frozen=True)
class SignSettings(Settings):
    """The threshold; two of them need two collectors."""

    threshold: float = 0.0


class LayerSigns(Collector):
    """Σ s t of all pairs of layers, chunk by chunk."""

    holds = "Signs"
    numbers_rows = False

    def __init__(self, names, threshold=0.0, chunks=0):
        self.names, self.threshold, self.chunks = list(names), threshold, chunks
        self.sums = torch.zeros(max(chunks, 1), len(self.names), len(self.names), dtype=torch.float64)
        self.counts = np.zeros(max(chunks, 1), dtype=np.int64)

    @classmethod
    def settings_for(cls, measure):
        return SignSettings(measure.settings["threshold"])

    @classmethod
    def cost(cls, settings, study):
        size = 8 * max(study.chunks, 1) * len(study.layers) ** 2
        return CostEstimate(size, f"Signs about {settings.threshold:g}", "the signs")

    @classmethod
    def start(cls, settings, study):
        return cls(study.layers, settings.threshold, study.chunks)

    def serves(self, settings):
        return "" if settings.threshold == self.threshold else f"the threshold {settings.threshold:g}"

    def update(self, rows, numbers=None, **more):
        signs = {key: rows["activations"][key].sum(1).sub(self.threshold).sign().double() for key in self.names}
        chunks = chunk_of(np.asarray(numbers), self.chunks)
        for chunk in np.unique(chunks).tolist():
            here = torch.from_numpy(np.flatnonzero(chunks == chunk))
            S = torch.stack([signs[key][here] for key in self.names])
            self.sums[chunk] += S @ S.T
            self.counts[chunk] += len(here)

    def merge(self, other):
        self._require_alike(other, layers="names", threshold="threshold", chunks="chunks")
        merged = type(self)(self.names, self.threshold, self.chunks)
        merged.sums, merged.counts = self.sums + other.sums, self.counts + other.counts
        return merged

    def pair(self, a, b, without=None):
        stays = np.arange(len(self.counts)) != (-1 if without is None else without)
        sums = self.sums[torch.from_numpy(stays)].sum(0)
        return Signs(sums[self.names.index(a), self.names.index(b)], int(self.counts[stays].sum()))

    @property
    def chunk_sizes(self):
        return tuple(self.counts.tolist()) if self.chunks else ()


Signs.collectors = (LayerSigns,)


@nk.measure(unchanged_by=[], **PROMISES)
def sign_agreement(signs: Signs, *, threshold: float = 0.0):
    """Return how much more often two layers are on the same side of a threshold than on different sides."""
    return signs.total / signs.n


# --- how alike two layers' weights are --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kernels(Pair):
    """A pair of layers' weights."""

    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def of(cls, X, Y):
        return cls(*(torch.as_tensor(Z).double().flatten() for Z in (X, Y)))


class LayerKernels(Collector):
    """The weights of every layer, as they are."""

    holds = "weights"
    feeds = frozenset({"weights"})

    def __init__(self):
        self.weights = {}

    @classmethod
    def cost(cls, settings, study):
        return CostEstimate(8 * sum(layer.width for layer in study.sizes), "weights, as they are", "the weights")

    @classmethod
    def start(cls, settings, study):
        return cls()

    def update(self, rows, numbers=None):
        self.weights = {key: own.get("weight") for key, own in rows["weights"].items()}

    def merge(self, other):
        return self  # all parts of the data have the same models

    def pair(self, a, b, without=None):
        for key in (a, b):
            if self.weights[key] is None:
                raise nk.NoValue(f"layer {key[1]!r} of {key[0]!r} has no weights")
        if self.weights[a].shape != self.weights[b].shape:
            raise nk.NoValue(f"the weights of {a[1]!r} and {b[1]!r} differ in shape")
        return Kernels.of(self.weights[a], self.weights[b])


Kernels.collectors = (LayerKernels,)


@nk.measure(unchanged_by=["scaling"], **PROMISES)
def kernel_cosine(kernels: Kernels):
    """Return the cosine between the weights of two layers."""
    return kernels.x @ kernels.y / (kernels.x.norm() * kernels.y.norm())


# --- a further measure of a statistic that netkin has -----------------------------------------------------------------


@nk.measure(unchanged_by=["rotation", "scaling", "translation"], **PROMISES)
def batch_alignment(grams: Grams):
    """Return the same as `cka_minibatch`, by a function without parameters."""
    return grams.cross / (grams.x * grams.y).sqrt()
