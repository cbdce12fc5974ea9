"""What stitches show: their rank and sparsity, the distance of two and the loss on the line between them.

Beside the similarities of layers, their scores show where similar layers can't replace each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netkin.applications.stitching.evaluating import Answers
from netkin.applications.stitching.maps import LinearMap
from netkin.applications.stitching.network import Stitch, Stitched, stitched_network
from netkin.arrays import as_tensor
from netkin.errors import InvalidValue, ShapeError
from netkin.progress import ProgressOption, showing
from netkin.representations import inference_mode_of
from netkin.representations.inputs import feed, reported_batches
from netkin.results import Values
from netkin.results.caveats import Caveat
from netkin.sources.names import by_name

HIGH, LOW = 0.8, 0.5  # similarities
GOOD, USELESS = 0.9, 0.5  # relative accuracies, or agreements
BASELINES = ("identity", "random")  # methods that fit nothing
MOST = 6  # pairs named in a warning


def rank(stitch: Stitch | LinearMap | Any, *, tolerance: float = 1e-5) -> int:
    """Return the rank of a stitch, its map or a matrix: how many singular values exceed `tolerance` times the largest.

    What lies below the default is rounding, in float32 weights or of the fit.
    """
    return int(torch.linalg.matrix_rank(_matrix(stitch), rtol=tolerance))


def sparsity(stitch: Stitch | LinearMap | Any, *, threshold: float = 1e-4) -> float:
    """Return the share of entries below `threshold` in size, those that the paper sets to zero, as `rank` takes it."""
    if not threshold > 0:
        raise InvalidValue(f"`threshold` must be above 0; got {threshold}.", argument="threshold")
    return float((_matrix(stitch).abs() < threshold).double().mean())


def distance(first: Stitch, second: Stitch, *, relative: bool = False) -> float:
    """Return the Frobenius distance of two stitches' matrices; `relative`, as a share of the norms' mean."""
    _require_same_layers(first, second)
    x, y = first.map.weight, second.map.weight
    apart = float(torch.linalg.matrix_norm(x - y.to(x)))
    return apart / (float(torch.linalg.matrix_norm(x) + torch.linalg.matrix_norm(y.to(x))) / 2) if relative else apart


def interpolate(first: Stitch, second: Stitch, weight: float) -> Stitch:
    """Return the stitch at ``(1 - weight) first + weight second``, matrix and shift alike.

    So 0 gives the first and 1 the second, as in `torch.lerp`; the paper's λM₁ + (1 - λ)M₂ runs the other way.

    Example:
        >>> from netkin.applications.stitching import stitch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> one, other = (stitch(model, "1", model, "1", torch.randn(50, 4), by) for by in ("identity", "random"))
        >>> bool(torch.allclose(interpolate(one, other, 0.0).map.weight, one.map.weight))
        True
    """
    _require_same_layers(first, second)
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.number)) or not np.isfinite(weight):
        raise InvalidValue(
            f"`weight` must be a finite number, 0 for the first stitch and 1 for the second; got {weight!r}.",
            argument="weight",
        )
    method = f"interpolate({first.method}, {second.method}, {weight:g})"
    between = _between(first, second, float(weight))
    return replace(first, network=between, method=method, evaluation=None, history=(), training=None)


@dataclass(frozen=True)
class Barrier:
    """What the stitched network can do along the line from one stitch to another.

    `weights` run from 0, the first, to 1, the second. `cross_entropies` are to the second model's answers; without
    labels the accuracies are empty.
    """

    weights: tuple[float, ...]
    cross_entropies: tuple[float, ...]
    accuracies: tuple[float, ...]
    relative_accuracies: tuple[float, ...]
    examples: int

    @property
    def height(self) -> float:
        """How far the cross-entropy rises above the straight line between the ends, at most; 0 without a barrier."""
        return _height(self.weights, self.cross_entropies)

    @property
    def drop(self) -> float:
        """How far the relative accuracy falls below the straight line between the ends, at most."""
        if not self.relative_accuracies:
            raise InvalidValue(
                "the second model itself gets none of these right, so there is no relative accuracy."
                if self.accuracies
                else "there is no accuracy without labels; give batches `(inputs, labels)`."
            )
        return _height(self.weights, [-value for value in self.relative_accuracies])

    def plot(self, path: str | os.PathLike[str] | None = None, ax: Any = None, *, overwrite: bool = False) -> Any:
        """Return a figure of the way from one stitch to the other, or draw it into `ax`; write it to a `path` given."""
        barriers = import_module("netkin.reporting.figures")
        title = f"barrier {self.height:.4f}, {self.examples:,} examples"
        numbers = (self.weights, self.cross_entropies, self.relative_accuracies)
        return barriers.plot_barrier(*numbers, title, path, ax, overwrite=overwrite)

    def __str__(self) -> str:
        accuracies = self.relative_accuracies or [float("nan")] * len(self.weights)
        lines = zip(self.weights, self.cross_entropies, accuracies, strict=True)
        table = (
            f"{weight:.3g}\t{loss:.4f}\t{'–' if np.isnan(share) else f'{share:.4f}'}" for weight, loss, share in lines
        )
        return "\n".join(["weight\tcross-entropy\trelative accuracy", *table, f"barrier {self.height:.4f}"])


@by_name(data="data")
def barrier(
    first: Stitch,
    second: Stitch,
    data: Any,
    *,
    points: int = 11,
    examples: int | None = None,
    progress: ProgressOption = None,
) -> Barrier:
    """Return the loss along the straight line between two stitches of the same models and layers, in one pass.

    Args:
        first: the stitch at one end.
        second: the stitch at the other.
        data: the examples on which the loss is taken.
        points: how many stitches on the line, with its ends.
        examples: how many examples of `data` are read.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
    """
    _require_same_layers(first, second)
    if points < 3:
        raise InvalidValue(
            f"`points` must be at least 3, the ends and something between; got {points}.", argument="points"
        )
    weights = [float(weight) for weight in np.linspace(0, 1, points)]
    network, said = first.network, [Answers() for _ in weights]
    between = [_between(first, second, weight).transformation for weight in weights]
    network.cut()
    with showing(progress), inference_mode_of(network.a, network.b, exact=True):
        for batch in reported_batches(data, examples, "interpolating"):
            own, head = feed(network.b, batch), network.begin(batch)
            for transformation, answers in zip(between, said, strict=True):
                answers.update(network.finish(transformation(head), batch), own, batch)
    return _barrier(weights, said)


def _barrier(weights: list[float], said: list[Answers]) -> Barrier:
    counts = [answers.counts for answers in said if answers.counts is not None]
    right = [count.accuracy_a for count in counts] if said[0].labelled else []
    whole = said[0].accuracies[1]
    return Barrier(
        weights=tuple(weights),
        cross_entropies=tuple(count.cross_entropy_ab for count in counts),
        accuracies=tuple(right),
        relative_accuracies=tuple(share / whole for share in right) if whole else (),
        examples=said[0].examples,
    )


def _between(first: Stitch, second: Stitch, weight: float) -> Stitched:
    x, y, network = first.map, second.map, first.network
    mixed = LinearMap(_mix(x.weight, y.weight, weight), _mix(x.bias, y.bias, weight))
    adapter = first.transformation.adapter
    return stitched_network(network.a, network.b, first.layers, mixed, adapter, cuts=network.cuts)


def _mix(x: Tensor, y: Tensor, weight: float) -> Tensor:
    return (1 - weight) * x + weight * y.to(x)


def _matrix(stitch: Stitch | LinearMap | Any) -> Tensor:
    linear = stitch.map if isinstance(stitch, Stitch) else stitch
    matrix = as_tensor(linear.weight if isinstance(linear, LinearMap) else linear, "stitch")
    if matrix.ndim != 2:
        raise ShapeError(
            f"`stitch` must be a stitch, its map or a matrix; got shape {tuple(matrix.shape)}.", argument="stitch"
        )
    return matrix


def _height(weights: Any, losses: Any) -> float:
    losses, weights = np.asarray(losses), np.asarray(weights)
    return float(max(0.0, np.max(losses - ((1 - weights) * losses[0] + weights * losses[-1]))))


def _require_same_layers(first: Stitch, second: Stitch) -> None:
    if first.layers != second.layers:
        raise InvalidValue(
            f"the stitches join different layers ({' → '.join(first.layers)} and {' → '.join(second.layers)}); give "
            "two stitches of the same layers."
        )
    one, other = first.transformation.adapter, second.transformation.adapter
    if (one.a, one.b, one.resize) != (other.a, other.b, other.resize):
        words = [f"{each.a} to {each.b}{f' ({each.resize})' if each.resize else ''}" for each in (one, other)]
        raise InvalidValue(
            f"one stitch joins {words[0]}, the other {words[1]}, so no line leads from one to the other; make both "
            "with the same data and `resize`."
        )
    if first.network.a is not second.network.a or first.network.b is not second.network.b:
        raise InvalidValue(
            "the stitches join different models, even if of the same kind, so no line leads from one to the other; "
            "give two stitches of the same models."
        )


def contrasts(similarities: Sequence[Values], stitches: Mapping[str, Values]) -> Iterator[Caveat]:
    """Yield a caveat where layers are similar and their stitch is poor, and one where it is the reverse."""
    # cka, or else the first that ends at 1; without labels, how often predictions agree
    fit = [table for table in similarities if table.higher_is_closer and table.bounds[1] == 1]
    measure = next((table for table in fit if table.quantity.name == "cka"), fit[0] if fit else None)
    some = {table.quantity.name for table in stitches.values() if np.isfinite(table.values).any()}
    main = next((name for name in ("relative_accuracy", "agreement") if name in some), "")
    judged = [table for table in stitches.values() if table.quantity.name == main]
    if measure is None or not judged:
        return
    score = judged[0].quantity.name.replace("_", " ")
    fitted = [table for table in judged if str(table.quantity.parameters["method"]).partition("(")[0] not in BASELINES]
    useless = list(_pairs_that_pass(measure, fitted, HIGH, USELESS, are_similar=True))
    good = list(_pairs_that_pass(measure, judged, LOW, GOOD, are_similar=False))
    if useless:
        sentence = (
            f"a high similarity goes with a useless stitch ({measure.id} of {HIGH} or more, {score} below {USELESS}): "
        )
        yield Caveat("similar-but-useless", f"{sentence}{_list_some(useless)}.", len(useless))
    if good:
        sentence = f"a low similarity goes with a good stitch ({measure.id} below {LOW}, {score} of {GOOD} or more): "
        yield Caveat("dissimilar-but-good", f"{sentence}{_list_some(good)}.", len(good))


def _pairs_that_pass(
    measure: Values, judged: Sequence[Values], similarity: float, threshold: float, *, are_similar: bool
) -> Iterator[str]:
    """Yield as text the pairs of layers that lie above the one limit and, by some method, below the other."""
    for place, (x, y) in enumerate(product(measure.layers_a, measure.layers_b)):
        like, said = float(measure.values.flat[place]), []
        for table in judged:
            value = float(table.values.flat[place])
            if (
                (like >= similarity and value < threshold)
                if are_similar
                else (like < similarity and value >= threshold)
            ):
                said.append(f"{beside(value, threshold)} by {table.quantity.parameters['method']}")
        if said:
            yield f"{x if x == y else f'{x} → {y}'} ({measure.id} {beside(like, similarity)}; {', '.join(said)})"


def beside(value: float, limit: float) -> str:
    """Return a number with two decimals, or as many as show on which side of the limit it lies.

    Example:
        >>> beside(0.123, 0.5), beside(0.4998, 0.5)
        ('0.12', '0.4998')
    """
    rounded = (f"{value:.{digits}f}" for digits in range(2, 17))
    return next((text for text in rounded if (float(text) < limit) == (value < limit)), repr(value))


def _list_some(pairs: Sequence[str]) -> str:
    more = f", and {len(pairs) - MOST:,} more" if len(pairs) > MOST else ""
    return ", ".join(pairs[:MOST]) + more
