"""What share of a network's weights is zero, masked or small, layer by layer; and a study of several networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from netkin.errors import InvalidValue
from netkin.results.comparison import Comparison
from netkin.results.packing import LongForm, Result
from netkin.results.quantity import ACCURACY
from netkin.results.records import now
from netkin.results.text import aligned

COLUMNS = ("layer", "kind", "weights", "left", "zeros", "sparsity", "rms")  # of the long form


@dataclass(frozen=True)
class LayerSparsity:
    """The weights of one layer; `left` are not masked, `zeros` are exactly zero, `rms` is over those that are left.

    In a layer without a mask `left` are those that are not zero: in a file, masks are baked in.
    `below` counts those whose size is below each ε of the table, `below_relative` those below each relative ε times
    `rms`; `below_left` and `below_relative_left` count among weights that are left.
    """

    layer: str
    kind: str
    shape: tuple[int, ...]
    weights: int
    left: int
    zeros: int
    rms: float
    below: tuple[int, ...] = ()
    below_left: tuple[int, ...] = ()
    below_relative: tuple[int, ...] = ()
    below_relative_left: tuple[int, ...] = ()

    @property
    def sparsity(self) -> float:
        """The share of weights that are masked, or zero where there is no mask."""
        return 1 - self.left / self.weights


@dataclass(frozen=True)
class WeightSparsity:
    """How sparse a network is: a row for each prunable layer, and for which ε small weights were counted.

    Example:
        >>> row = LayerSparsity("fc", "Linear", (2, 5), 10, 4, 6, 0.5)
        >>> table = WeightSparsity((row,))
        >>> table.sparsity, table.left, table.emptied
        (0.6, 4, ())
    """

    layers: tuple[LayerSparsity, ...]
    epsilons: tuple[float, ...] = ()
    relative: tuple[float, ...] = ()
    dense_parameters: int = 0  # those that can't be pruned: biases, norms, embeddings

    @property
    def weights(self) -> int:
        """All prunable weights."""
        return sum(row.weights for row in self.layers)

    @property
    def left(self) -> int:
        """Those that are not masked or, in layers without a mask, not zero."""
        return sum(row.left for row in self.layers)

    @property
    def zeros(self) -> int:
        """Those that are exactly zero, masked or not."""
        return sum(row.zeros for row in self.layers)

    @property
    def sparsity(self) -> float:
        """The share of prunable weights that are masked, or zero in layers without a mask."""
        return 1 - self.left / self.weights

    @property
    def emptied(self) -> tuple[str, ...]:
        """The layers in which no weight is left."""
        return tuple(row.layer for row in self.layers if not row.left)

    def shares(self, *, relative: bool = False, of_left: bool = False) -> tuple[float, ...]:
        """Return the ε-sparsity of the whole network for each ε, among all weights or among those that are left."""
        key = f"below{'_relative' * relative}{'_left' * of_left}"
        count = self.left if of_left else self.weights
        columns = zip(*(getattr(row, key) for row in self.layers), strict=True)
        return tuple(sum(column) / count if count else math.nan for column in columns)

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: sums over the layers."""
        facts: dict[str, Any] = {}
        for key, relative in (("epsilon_sparsity", False), ("relative_epsilon_sparsity", True)):
            values = self.relative if relative else self.epsilons
            shares = self.shares(relative=relative), self.shares(relative=relative, of_left=True)
            facts[key] = [
                {"epsilon": epsilon, "of_all": of_all, "of_left": of_left}
                for epsilon, of_all, of_left in zip(values, *shares, strict=True)
            ]
        return facts | {name: getattr(self, name) for name in ("weights", "left", "zeros", "sparsity", "emptied")}

    def __str__(self) -> str:
        head = ["layer", "kind", "weights", "left", "sparsity", "r.m.s."]
        rows = [[row.layer or "(model)", row.kind, f"{row.weights:,}", f"{row.left:,}", f"{row.sparsity:.4f}",
                 f"{row.rms:.4g}"] for row in self.layers]  # fmt: skip
        whole = ["all", "", f"{self.weights:,}", f"{self.left:,}", f"{self.sparsity:.4f}", ""]
        dense = f"{self.dense_parameters:,} other parameters (biases, norms, embeddings, layers left out) stay dense"
        lines = [*aligned([head, *rows, whole]), dense]
        for relative, values in ((False, self.epsilons), (True, self.relative)):
            shares = zip(
                values, self.shares(relative=relative), self.shares(relative=relative, of_left=True), strict=True
            )
            lines += [f"{of_all:.2%} of all weights and {of_left:.2%} of those left are below "
                      f"{epsilon:g}{' × r.m.s. of their layer' * relative}"
                      for epsilon, of_all, of_left in (shares if values else ())]  # fmt: skip
        lines += [f"no weight is left in {', '.join(self.emptied)}"] if self.emptied else []
        return "\n".join(lines)


@dataclass(frozen=True)
class LinearCost:
    """What a sparse format of PyTorch makes of a linear layer: bytes, and seconds for a batch, measured.

    `error` is by how much the outputs differ from the dense layer's of the same weights, relative to their size; where
    there is no such format for the layer `reason` says why, and the numbers are NaN.
    """

    layer: str
    format: str
    sparsity: float
    dense_bytes: int
    bytes: float
    dense_seconds: float
    seconds: float
    error: float
    reason: str = ""


@dataclass(frozen=True, eq=False)
class SparsityStudy(Result):
    """Networks side by side: how sparse they are, how their weights are distributed, what pruning costs and saves.

    `edges` and `histograms` count the weights that are left. `curve` has the list "sparsity" and the accuracy of each
    network with so large a share of its smallest weights taken away. `interlayer` compares each network's layers with
    each other. `sizes` are the bytes of the state dict in a file, dense and with zeros packed.
    """

    kind: ClassVar[str] = "sparsity"

    networks: Mapping[str, WeightSparsity]
    edges: tuple[float, ...]
    histograms: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, tuple[int, int]]
    curve: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    interlayer: Mapping[str, Comparison] = field(default_factory=dict)
    costs: Mapping[str, tuple[LinearCost, ...]] = field(default_factory=dict)
    costs_on: str = ""
    data: str = ""
    examples: int = 0
    version: str = ""
    created: str = field(default_factory=now)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "sparsity" in self.networks:
            raise InvalidValue("a network can't be called 'sparsity', as the x axis of the curve is; rename it.")

    @property
    def names(self) -> tuple[str, ...]:
        """The networks."""
        return tuple(self.networks)

    @property
    def shapes(self) -> str:
        """What one example of a layer is where similarities were taken, as "pool"."""
        shapes = {shape for comparison in self.interlayer.values() for shape in comparison.shapes_a.values()}
        return ", ".join(sorted(shapes))

    def accuracy(self, name: str) -> float:
        """Return the accuracy of a network as it is; NaN where it was not taken."""
        taken = dict(zip(self.curve.get("sparsity", ()), self.curve.get(name, ()), strict=True))
        return taken.get(0.0, math.nan)

    def mean_similarity(self, name: str) -> float:
        """Return the mean of `cka_debiased` over all pairs of different layers of a network; NaN without any."""
        if name not in self.interlayer:
            return math.nan
        (table,) = self.interlayer[name].tables.values()
        values = [float(table.values[i, j]) for i in range(len(table.values)) for j in range(i)]
        known = [value for value in values if math.isfinite(value)]
        return sum(known) / len(known) if known else math.nan

    def long_form(self) -> LongForm:
        """Return a row for each layer of each network."""
        rows = (
            (name, *(getattr(row, column) for column in COLUMNS))
            for name, network in self.networks.items()
            for row in network.layers
        )
        return ("network", *COLUMNS), rows

    def derived_fields(self) -> dict[str, Any]:
        """Return what a document says beside the fields: mean similarities, accuracies, and what these are."""
        accuracies = {name: self.accuracy(name) for name in self.names if math.isfinite(self.accuracy(name))}
        means = {name: self.mean_similarity(name) for name in self.interlayer}
        return {"mean_similarity": means, "accuracy": accuracies, "quantity": ACCURACY}

    def __str__(self) -> str:
        parts = [f"{name}\n{table}\n{self._summary(name)}" for name, table in self.networks.items()]
        return "\n\n".join(parts + ([_curve_text(self.curve)] if self.curve else []))

    def _summary(self, name: str) -> str:
        dense, packed = self.sizes[name]
        lines = [f"in a file: {dense:,} bytes dense, {packed:,} with zeros packed"]
        mean = self.mean_similarity(name)
        if math.isfinite(mean):
            lines.append(f"mean cka_debiased of two layers: {mean:.4f}, on {self.examples:,} examples ({self.shapes})")
        if math.isfinite(self.accuracy(name)):
            lines.append(f"accuracy as it is: {self.accuracy(name):.4f}")
        for row in self.costs.get(name, ()):
            lines.append(cost_in_words(row))
        return "\n".join(lines)


def cost_in_words(row: LinearCost) -> str:
    """Return a sentence on what a format makes of a layer."""
    if row.reason:
        return f"{row.layer} in {row.format}: {row.reason}"
    return (
        f"{row.layer} in {row.format}: {row.bytes / row.dense_bytes:.2f} × the bytes, "
        f"{row.seconds / row.dense_seconds:.2f} × the time of the dense layer"
    )


def _curve_text(curve: Mapping[str, tuple[float, ...]]) -> str:
    columns = [[name, *(f"{value:.4f}" for value in values)] for name, values in curve.items()]
    return "accuracy without the smallest weights\n" + "\n".join(
        aligned([list(row) for row in zip(*columns, strict=True)])
    )
