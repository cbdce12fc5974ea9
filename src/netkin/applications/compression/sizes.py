"""How many directions of a layer are kept: a number, a share of the variance, or the fewest that keep the accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.compression.factoring import Layer, Subspace, is_pointwise, pads_with_zeros, width_of
from netkin.applications.compression.layer_inputs import Feeding
from netkin.arrays import refuse_non_finite
from netkin.errors import ShapeError, UnknownName, ValueFault, did_you_mean
from netkin.representations import batches_of, guest
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import labels_of
from netkin.representations.layers import layer_label

K = int | float | Mapping[str, int | float] | None


@dataclass(frozen=True)
class Size:
    """One of three rules; the other two are None."""

    k: K
    variance: float | None
    accuracy_drop: float | None

    def __post_init__(self) -> None:
        given = [name for name in ("k", "variance", "accuracy_drop") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueFault(
                "pass one of `k`, `variance` and `accuracy_drop`, which says how many directions are kept; got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none of them'}."
            )
        if self.variance is not None and not 0 < self.variance <= 1:
            raise ValueFault(f"`variance` must lie above 0 and at most at 1; got {self.variance}.")
        if self.accuracy_drop is not None and not 0 <= self.accuracy_drop < 1:
            raise ValueFault(
                f"`accuracy_drop` must lie from 0 to below 1, 0.01 for one in a hundred; got {self.accuracy_drop}."
            )

    def wanted(self, name: str, layer: Layer, space: Subspace, projection: str) -> int:
        """Return how many directions `k` or `variance` requests, which may be more than there are."""
        if self.k is not None:
            return _count(self.k[name] if isinstance(self.k, Mapping) else self.k, name, width_of(layer))
        held = space.held(projection)
        short = int((held < (self.variance or 0) * (1 - 1e-9)).sum())  # rounding must not ask for one more
        return min(short + 1, space.rank)

    def refuse_unfit(self, layers: Mapping[str, Layer]) -> None:
        """Refuse a `k` that does not fit some layer, before the work."""
        if isinstance(self.k, Mapping):
            _refuse_other_names(self.k, layers)
        for name, layer in layers.items() if self.k is not None else ():
            _count(self.k[name] if isinstance(self.k, Mapping) else self.k, name, width_of(layer))


def parameters(module: nn.Module) -> int:
    """Return how many numbers a module has learnt, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def most_that_saves(layer: Layer) -> int:
    """Return the largest k for which the two layers have fewer parameters than the one, 0 if there is none.

    Counted with all that the two may need: a bias, and where zeros are padded a channel for the mean.
    """
    out, taps = layer.weight.shape[0], layer.weight[0, 0].numel()
    constant = isinstance(layer, nn.Conv2d) and pads_with_zeros(layer)
    each = width_of(layer) + out * taps + constant
    return max(0, (parameters(layer) - out - constant * each - 1) // each)


def multiply_adds(layer: nn.Module, places: tuple[int, int]) -> int:
    """Return the multiplications of a layer, or of the two that replace it, on one example of that many positions."""
    into, out = places
    if isinstance(layer, nn.Sequential):
        first, second = layer[0], layer[1]
        early = out if isinstance(second, nn.Conv2d) and is_pointwise(second) else into
        return early * _weights(first) + out * _weights(second)
    return out * _weights(layer)


def _weights(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.numel()


def _count(k: Any, name: str, width: int) -> int:
    """Return `k` directions, or the share `k` of the width, as a number from 1 to the width."""
    fact = f"{layer_label(name)} is fed {width:,} features"
    if isinstance(k, bool) or not isinstance(k, Real):
        raise ValueFault(f"`k` must be a whole number, or a share such as 0.35; got {type(k).__name__}.")
    if isinstance(k, Integral):
        if not 1 <= int(k) <= width:
            raise ValueFault(f"{fact}, so `k` must lie between 1 and {width:,}; got {int(k):,}.")
        return int(k)
    if not 0 < float(k) <= 1:
        raise ValueFault(f"{fact}; `k` must be a whole number up to that, or a share above 0 and up to 1.0; got {k}.")
    return max(1, round(float(k) * width))


def _refuse_other_names(k: Mapping[str, Any], layers: Iterable[str]) -> None:
    names = list(layers)
    for name in k:
        if name not in names:
            hint = did_you_mean(str(name), names) or "."
            raise UnknownName(f"`k` speaks of {name!r}, which is not among the layers{hint}")
    missing = next((name for name in names if name not in k), None)
    if missing is not None:
        raise UnknownName(f"`k` says nothing of {layer_label(missing)}; give every layer its number.")


def has_labels(data: Any) -> bool:
    """Return whether the first batch of the data has labels that are class numbers."""
    labels = labels_of(next(batches_of(data)))
    if labels is None or isinstance(labels, (str, bytes, Mapping)):
        return False
    try:
        return not torch.as_tensor(labels).is_floating_point()
    except (TypeError, ValueError):  # names, boxes of several sizes and whatever else may stand there
        return False


def accuracy(model: nn.Module, data: Any, feeding: Feeding) -> float:
    """Return the share of labelled examples, or tokens, whose largest logit is that of their label."""
    right = seen = 0
    with guest(model, exact=True):
        for number, batch in enumerate(feeding.batches(data, "measuring accuracy")):
            logits = main_tensor(feeding.output(model, batch), "")
            refuse_non_finite(logits, f"the model's output in batch {number}")
            labels = _labels(batch, logits, number)
            right += int((logits.argmax(-1) == labels)[labels >= 0].sum())  # -100 marks what does not count
            seen += int((labels >= 0).sum())
    if not seen:
        raise ValueFault("none of the labels is a class number of 0 or more; give labels that are.")
    return right / seen


def _labels(batch: Any, logits: Tensor, number: int) -> Tensor:
    found = labels_of(batch)
    if found is None:
        raise ValueFault(f"batch {number} has no labels, which the accuracy needs; give batches `(inputs, labels)`.")
    labels = torch.as_tensor(found, device=logits.device)
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise ShapeError(
            f"labels must be class numbers of shape {tuple(logits.shape[:-1])}, one for each row of logits; got shape "
            f"{tuple(labels.shape)} of {str(labels.dtype).removeprefix('torch.')} in batch {number}."
        )
    return labels


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return a number from 1 to `most` that is enough while half a search below it found none; None if none is.

    The search halves its range each time, as if more were always better.

    Example:
        >>> fewest(lambda k: k >= 5, 100)
        5
    """
    if not enough(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
