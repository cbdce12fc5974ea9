"""What is seen of layers' inputs, and how many of their directions are kept.

The moments of each input are streamed, against the logits or against the input of another model's layer. Every position
of a feature map is a row, and every valid token of a sequence; the logits of an example are repeated for each of its
rows. A layer that runs several times in a forward pass gives the rows of all its calls. The size is a number, a share
of the variance, or the fewest directions that keep the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.compression.factoring import LinearOrConv, Subspace, is_pointwise, pads_with_zeros, width_of
from netkin.arrays import exact_products, label_tensor, refuse_beyond_classes, require_finite
from netkin.errors import ForwardError, InvalidValue, MemoryLimit, ShapeError, UnknownName, did_you_mean
from netkin.identity import DataDigest
from netkin.memory import format_bytes, free_memory
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.hooks import apart, main_tensor, uncompiled
from netkin.representations.inputs import (
    Forward,
    Transform,
    attention_mask,
    call,
    labels_of,
    length_if_known,
    prepared,
    reported_batches,
)
from netkin.representations.layers import layer_label, modules
from netkin.statistics import LayerMoments, Moments

K = int | float | Mapping[str, int | float] | None


@dataclass(frozen=True)
class Feeding:
    """How data reach a model, the same in every pass."""

    examples: int | None = None
    forward: Forward | None = None
    transform: Transform | None = None

    def batches(self, data: Any, what: str) -> Iterator[Any]:
        """Yield the batches of `data`, with a bar where that takes long."""
        return reported_batches(data, self.examples, what)

    def output(self, model: nn.Module, batch: Any) -> Any:
        """Return what the model makes of a batch."""
        return call(model, prepared(model, batch, self.transform), self.forward)


@dataclass
class Inputs:
    """The moments of layers' inputs, the examples they come from, and facts about the layers from the first batch."""

    statistic: LayerMoments
    beside: str
    examples: int = 0
    digest: DataDigest = field(default_factory=DataDigest)
    # for each layer in the order in which they ran: the places of its input and of its output for one example
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> Moments:
        return self.statistic[layer, f"{layer} ({self.beside})"]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer: a row for each place, and how many places there are in and out, examples first."""

    rows: Tensor
    lead: tuple[int, ...]
    places_out: int


@dataclass(frozen=True, eq=False)
class Reading:
    """What one model did with one batch."""

    calls: dict[str, list[LayerCall]]
    output: Any
    mask: Any

    def rows(self, layer: str) -> Tensor:
        return torch.cat([_valid(call.rows, call.lead, self.mask) for call in self.calls[layer]])

    def logits(self, layer: str, number: int) -> Tensor:
        """Return the logits for each row of the layer."""
        logits = main_tensor(self.output, "").detach()
        require_finite(logits, f"the model's output in batch {number}")
        return torch.cat(
            [_valid(_beside(logits, call.lead, layer), call.lead, self.mask) for call in self.calls[layer]]
        )


def collected(model: nn.Module, layers: Sequence[str], data: Any, other: nn.Module | None, feeding: Feeding) -> Inputs:
    """Return the moments of what layers are fed, from one pass; against the logits where there is no other model."""
    beside = "logits" if other is None else "other model"
    found = Inputs(LayerMoments([([name], [f"{name} ({beside})"]) for name in layers]), beside)
    subjects = [model] if other is None else [model, other]
    with ExitStack() as stack:
        stack.enter_context(inference_mode_of(*subjects, exact=True))
        readers = [stack.enter_context(_reading(subject, layers, feeding)) for subject in subjects]
        for number, batch in enumerate(feeding.batches(data, "reading inputs")):
            readings = [read(batch) for read in readers]
            with exact_products():
                rows = _rows(readings, layers, beside, number)
                if not number:
                    _refuse_too_wide(rows)
                found.statistic.update(rows)
            _learn(found, readings[0])
            length = length_if_known(batch) or 0
            found.digest.update(batch, range(found.digest.count, found.digest.count + length))
    return found


def run_order(model: nn.Module, layers: Sequence[str], data: Any, feeding: Feeding) -> list[str]:
    """Return the layers in the order in which they first run."""
    with inference_mode_of(model), _reading(model, layers, feeding) as read:
        return list(read(next(batches_of(data))).calls)


def _rows(readings: list[Reading], layers: Sequence[str], beside: str, number: int) -> dict[str, Tensor]:
    own = {name: readings[0].rows(name) for name in layers}
    if len(readings) == 1:
        return own | {f"{name} ({beside})": readings[0].logits(name, number) for name in layers}
    for name in layers:
        here, there = ([call.lead for call in reading.calls[name]] for reading in readings)
        if here != there:
            raise ShapeError(
                f"{layer_label(name)} is fed {_sizes(here)} places in the one model and {_sizes(there)} in the other; "
                "compress against a model of the same architecture, or against the logits."
            )
    return own | {f"{name} ({beside})": readings[1].rows(name).to(own[name].device) for name in layers}


def _refuse_too_wide(rows: Mapping[str, Tensor]) -> None:
    """Refuse layers whose moments would not fit the memory: sums, a covariance, its eigenvectors and a copy."""
    widths = {name: matrix.shape[1] for name, matrix in rows.items()}
    device = next(iter(rows.values())).device
    needed = 8 * 4 * sum(width**2 for width in widths.values())
    free = free_memory(device)
    if needed > free:
        widest = max(widths, key=lambda name: widths[name])
        raise MemoryLimit(
            f"the moments of these layers need {format_bytes(needed)} and {format_bytes(free)} are free; the widest "
            f"is {widest!r} with {widths[widest]:,} features. Leave it out, or take one at a time: "
            "order='from_the_top'."
        )


def _learn(found: Inputs, reading: Reading) -> None:
    examples = next(iter(reading.calls.values()))[0].lead[0]
    found.examples += examples
    for name, calls in reading.calls.items():
        places_in = sum(prod(call.lead) for call in calls) // examples
        found.places.setdefault(name, (places_in, sum(call.places_out for call in calls) // examples))


@contextmanager
def _reading(model: nn.Module, names: Sequence[str], feeding: Feeding) -> Iterator[Callable[[Any], Reading]]:
    """Inside the `with`, give a function that runs the model on a batch and tells what the layers were fed."""
    calls: dict[str, list[LayerCall]] = {}
    known = modules(model)

    def read(batch: Any) -> Reading:
        calls.clear()
        batch = prepared(model, batch, feeding.transform)
        output = call(model, batch, feeding.forward)
        absent = next((name for name in names if name not in calls), None)
        if absent is not None:
            raise ForwardError(
                f"{layer_label(absent)} did not run: the model does not call it, or reads its weights itself; "
                "choose layers that run."
            )
        return Reading(dict(calls), output, attention_mask(batch))

    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        for name in names:
            hook = known[name].register_forward_hook(partial(_keep, calls, name), with_kwargs=True)
            stack.callback(hook.remove)
        yield read


def _keep(
    calls: dict[str, list[LayerCall]], name: str, module: nn.Module, fed: tuple[Any, ...], keywords: Any, output: Tensor
) -> None:
    tensor = fed[0] if fed else keywords["input"]
    if tensor.ndim < 2 or (isinstance(module, nn.Conv2d) and tensor.ndim < 4):
        raise ShapeError(
            f"{layer_label(name)} is fed shape {tuple(tensor.shape)}, without an axis of examples; feed batches."
        )
    last = 1 if isinstance(module, nn.Conv2d) else -1
    places, out = tensor.detach().movedim(last, -1), output.movedim(last, -1)
    rows = apart(places.flatten(0, -2), tensor)  # a later step may write into what a layer was fed
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    calls.setdefault(name, []).append(LayerCall(rows, tuple(places.shape[:-1]), prod(out.shape[:-1])))


def _beside(logits: Tensor, lead: tuple[int, ...], layer: str) -> Tensor:
    """Return one row of logits for each place of a layer's input."""
    if logits.ndim == 2 and len(logits) == lead[0]:
        return logits.repeat_interleave(prod(lead[1:]), 0)
    if logits.ndim == 3 and tuple(logits.shape[:2]) == lead:
        return logits.flatten(0, 1)
    raise ShapeError(
        f"the model's output has shape {tuple(logits.shape)} and {layer_label(layer)} is fed {_sizes([lead])} places; "
        "the logits must be n × classes, or n × tokens × classes for a layer of tokens. Compress against another model."
    )


def _valid(rows: Tensor, lead: tuple[int, ...], mask: Any) -> Tensor:
    """Return the rows that are no padding, where the mask speaks of these places."""
    if mask is None or tuple(mask.shape) != lead:
        return rows
    return rows[(torch.as_tensor(mask) != 0).flatten().to(rows.device)]


def _sizes(leads: list[tuple[int, ...]]) -> str:
    return " and ".join(" × ".join(map(str, lead)) for lead in leads)


# --- how many directions are kept -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """One of three rules; the other two are None."""

    k: K
    variance: float | None
    accuracy_drop: float | None

    def __post_init__(self) -> None:
        given = [name for name in ("k", "variance", "accuracy_drop") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "pass one of `k`, `variance` and `accuracy_drop`, which says how many directions are kept; got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none of them'}.",
                argument=given[0] if given else "k",
            )
        if self.variance is not None and not 0 < self.variance <= 1:
            raise InvalidValue(
                f"`variance` must lie above 0 and at most at 1; got {self.variance}.", argument="variance"
            )
        if self.accuracy_drop is not None and not 0 <= self.accuracy_drop < 1:
            raise InvalidValue(
                f"`accuracy_drop` must lie from 0 to below 1, 0.01 for one in a hundred; got {self.accuracy_drop}.",
                argument="accuracy_drop",
            )

    def wanted(self, name: str, layer: LinearOrConv, space: Subspace, projection: str) -> int:
        """Return how many directions `k` or `variance` requests, which may be more than there are."""
        if self.k is not None:
            return _count(self.k[name] if isinstance(self.k, Mapping) else self.k, name, width_of(layer))
        held = space.held(projection)
        short = int((held < (self.variance or 0) * (1 - 1e-9)).sum())  # rounding must not ask for one more
        return min(short + 1, space.rank)

    def refuse_unfit(self, layers: Mapping[str, LinearOrConv]) -> None:
        """Refuse a `k` that does not fit some layer, before the work."""
        if isinstance(self.k, Mapping):
            _refuse_other_names(self.k, layers)
        for name, layer in layers.items() if self.k is not None else ():
            _count(self.k[name] if isinstance(self.k, Mapping) else self.k, name, width_of(layer))


def parameters(module: nn.Module) -> int:
    """Return how many numbers a module has learnt, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def most_that_saves(layer: LinearOrConv) -> int:
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


def tied_remark(net: nn.Module, layer: LinearOrConv) -> str:
    """Say so where the net still needs the weights that were taken apart."""
    if not any(parameter is layer.weight for parameter in net.parameters()):
        return ""
    return "its weights serve another layer, too, so that the network keeps them beside the smaller ones."


def size_remarks(layer: LinearOrConv, small: nn.Sequential, places: tuple[int, int]) -> list[str]:
    """Say what the numbers alone would not."""
    remarks = []
    if isinstance(small[0], nn.Conv2d) and small[0].bias is not None:
        remarks.append("one extra channel carries the mean, because zero padding does not continue it at the border.")
    if parameters(small) >= parameters(layer):
        remarks.append(f"saves no parameters: that takes k of at most {most_that_saves(layer):,}.")
    elif multiply_adds(small, places) >= multiply_adds(layer, places):
        remarks.append("saves no multiply-adds: its 1 × 1 convolution has more positions than the layer's output.")
    return remarks


def _count(k: Any, name: str, width: int) -> int:
    """Return `k` directions, or the share `k` of the width, as a number from 1 to the width."""
    fact = f"{layer_label(name)} is fed {width:,} features"
    if isinstance(k, bool) or not isinstance(k, Real):
        raise InvalidValue(
            f"`k` must be a whole number, or a share such as 0.35; got {type(k).__name__}.", argument="k"
        )
    if isinstance(k, Integral):
        if not 1 <= int(k) <= width:
            raise InvalidValue(f"{fact}, so `k` must lie between 1 and {width:,}; got {int(k):,}.", argument="k")
        return int(k)
    if not 0 < float(k) <= 1:
        raise InvalidValue(f"{fact}; `k` must be a whole number up to that, or a share above 0 and up to 1.0; got {k}.")
    return max(1, round(float(k) * width))


def _refuse_other_names(k: Mapping[str, Any], layers: Iterable[str]) -> None:
    names = list(layers)
    for name in k:
        if name not in names:
            hint = did_you_mean(str(name), names) or "."
            raise UnknownName(f"`k` names {name!r}, which is not among the layers{hint}", argument="k")
    missing = next((name for name in names if name not in k), None)
    if missing is not None:
        raise UnknownName(f"`k` has no number for {layer_label(missing)}; give one for every layer.", argument="k")


def has_labels(data: Any) -> bool:
    """Return whether the first batch of the data has labels that are class numbers."""
    labels = labels_of(next(batches_of(data)))
    try:
        return labels is not None and not label_tensor(labels).is_floating_point()
    except InvalidValue:  # names, boxes of several sizes and whatever else may stand there
        return False


def labelled_accuracy(model: nn.Module, data: Any, feeding: Feeding) -> float:
    """Return the share of labelled examples, or tokens, whose largest logit is that of their label."""
    right = seen = 0
    with inference_mode_of(model, exact=True):
        for number, batch in enumerate(feeding.batches(data, "measuring accuracy")):
            logits = main_tensor(feeding.output(model, batch), "")
            require_finite(logits, f"the model's output in batch {number}")
            labels = _labels(batch, logits, number)
            right += int((logits.argmax(-1) == labels)[labels >= 0].sum())  # -100 marks what does not count
            seen += int((labels >= 0).sum())
    if not seen:
        raise InvalidValue("none of the labels is a class number of 0 or more; give labels that are.")
    return right / seen


def _labels(batch: Any, logits: Tensor, number: int) -> Tensor:
    found = labels_of(batch)
    if found is None:
        raise InvalidValue(f"batch {number} has no labels, which the accuracy needs; give batches `(inputs, labels)`.")
    labels = label_tensor(found, logits.device)
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise ShapeError(
            f"labels must be class numbers of shape {tuple(logits.shape[:-1])}, one for each row of logits; got shape "
            f"{tuple(labels.shape)} of {str(labels.dtype).removeprefix('torch.')} in batch {number}."
        )
    refuse_beyond_classes(labels, logits.shape[-1], f" in batch {number}")
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
