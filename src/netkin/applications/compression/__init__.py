"""Compression: layers restricted to the few directions of their inputs that matter.

Section 4.4 of the SVCCA paper: ``W x`` becomes ``(W Pᵀ)(P x)``, P of k rows that span the top SVCCA directions of x.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from netkin.applications.compression.factoring import (
    PROJECTIONS,
    LinearOrConv,
    Subspace,
    factorable,
    factored,
    is_pointwise,
    load_compressed,
    pads_with_zeros,
    put,
    replacement,
    require_no_hooks,
    save_compressed,
    subspace,
    width_of,
)
from netkin.applications.compression.layer_inputs import Inputs, collected, run_order
from netkin.applications.experiment import Experiment
from netkin.arrays import label_tensor, require_finite
from netkin.comparing.feed import data_name
from netkin.comparing.spec import declarations, option, takes_options
from netkin.errors import ForwardError, InvalidValue, NetkinError, UnknownName, did_you_mean, require_listed
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import examples_in, feed, labels_of, length_if_known, reported_batches
from netkin.representations.layers import Spec, choose, layer_label, modules, require_weights, split_call, unwrapped
from netkin.results.compression import CompressedLayer, Compression
from netkin.results.labels import plural
from netkin.sources.batches import overlap_remark
from netkin.sources.models import load_model
from netkin.sources.names import by_name
from netkin.sources.weights import random_weights
from netkin.training.loop import class_numbers, count_right
from netkin.training.work_plan import Planning, Work, WorkPlan, planned

__all__ = ["CompressedLayer", "Compression", "compress", "explain_compress", "load_compressed", "save_compressed"]

ORDERS = ("at_once", "from_the_top")
K = int | float | Mapping[str, int | float] | None


@dataclass(frozen=True, kw_only=True)
class Compressing(Experiment):
    """How a model is compressed; one of `k`, `variance` and `accuracy_drop` sets how many directions are kept."""

    test: Any = option(None, "labelled examples for the accuracy; by default the data.")
    k: K = option(None, "how many directions of each layer's input to keep, or their share, such as 0.35.")
    variance: float | None = option(None, "the share of the input's variance to keep, from which k follows.")
    accuracy_drop: float | None = option(
        None, "by how much the accuracy may fall, as a share of the examples; k is then searched by halving."
    )
    against: str | nn.Module = option("logits", '"logits", or a model with whose same layers directions are shared.')
    projection: str = option(
        "least_squares", '"least_squares", the best guess of each neuron from the directions, or "orthogonal".'
    )
    order: str = option("at_once", '"at_once", or "from_the_top": one layer after the other, from the last.')
    cut: float = option(0.99, "the share of variance in which SVCCA looks for directions.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("k", "variance", "accuracy_drop") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "pass one of `k`, `variance` and `accuracy_drop`, which says how many directions are kept; got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none of them'}.",
                argument=given[0] if given else "k",
            )
        for name, share in {"variance": self.variance, "cut": self.cut}.items():
            if share is not None and not 0 < share <= 1:
                raise InvalidValue(f"`{name}` must lie above 0 and at most at 1; got {share}.", argument=name)
        if self.accuracy_drop is not None and not 0 <= self.accuracy_drop < 1:
            raise InvalidValue(
                f"`accuracy_drop` must lie from 0 to below 1, 0.01 for one in a hundred; got {self.accuracy_drop}.",
                argument="accuracy_drop",
            )
        require_listed("projection", self.projection, PROJECTIONS)
        require_listed("order", self.order, ORDERS)
        for name in ("data", "test"):
            if isinstance(getattr(self, name), Iterator):
                raise InvalidValue(
                    "the data are read several times, and an iterator only once; pass a loader or a list.",
                    argument=name,
                )

    def wanted(self, name: str, layer: LinearOrConv, space: Subspace) -> int:
        """Return how many directions `k` or `variance` requests, which may be more than there are."""
        if self.k is not None:
            return self.count(name, layer)
        held = space.held(self.projection)
        short = int((held < (self.variance or 0) * (1 - 1e-9)).sum())  # rounding must not ask for one more
        return min(short + 1, space.rank)

    def count(self, name: str, layer: LinearOrConv) -> int:
        """Return `k` of a layer, or the share `k` of its width, as a number from 1 to the width."""
        k: Any = self.k[name] if isinstance(self.k, Mapping) else self.k
        width = width_of(layer)
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
            raise InvalidValue(
                f"{fact}; `k` must be a whole number up to that, or a share above 0 and up to 1.0; got {k}.",
                argument="k",
            )
        return max(1, round(float(k) * width))

    def accuracy(self, net: nn.Module) -> float | None:
        """Return the accuracy on the test data, or on the data; None where these have no labels."""
        data, examples = (self.data, self.examples) if self.test is None else (self.test, None)
        if not has_labels(data):
            return None
        right = seen = 0
        with inference_mode_of(net, exact=True):
            for number, batch in enumerate(reported_batches(data, examples, "measuring accuracy")):
                logits, labels = main_tensor(self.run(net, batch), "").flatten(0, -2), labels_of(batch)
                require_finite(logits, f"the model's output in batch {number}")
                if labels is None:
                    raise InvalidValue(
                        f"batch {number} has no labels, which the accuracy needs; give batches `(inputs, labels)`."
                    )
                labels = label_tensor(labels)
                labels = labels.flatten() if labels.numel() == len(logits) else labels  # which is refused as it came
                some, counted = count_right(logits, class_numbers(logits, labels))
                right, seen = right + int(some), seen + int(counted)
        if not seen:
            raise InvalidValue("none of the labels is a class number of 0 or more; give labels that are.")
        return right / seen

    def run(self, net: nn.Module, batch: Any) -> Any:
        """Return what a model makes of a batch."""
        return feed(net, batch, self.forward, self.transform)

    def put(self, net: nn.Module, name: str, small: nn.Module) -> None:
        """Put the smaller layer into the net, and see that the net still runs."""
        put(net, name, small)
        try:
            with inference_mode_of(net):
                self.run(net, next(batches_of(self.data)))
        except Exception as fault:
            raise ForwardError(
                f"the model does not run with {layer_label(name)} taken apart ({type(fault).__name__}: {fault}); "
                "it may look at the layer instead of calling it. Leave this layer out."
            ) from fault


OPTIONS = declarations(Compressing)


@planned
@by_name(models="model", data="data test")
@takes_options(without="seed device save overwrite partial", declared=OPTIONS)
def compress(
    model: nn.Module, layers: Spec, *, data: Any = None, name: str | None = None, **options: Any
) -> Planning[WorkPlan, nn.Module]:
    """Return a copy of `model` in which each chosen linear or conv layer uses only k directions of its input.

    The directions are those of SVCCA: of the layer's input against the model's logits, or against the same layer's
    input in another model, by falling correlation; then, as ten logits have no more than ten, the layer's other
    directions by falling variance. A layer becomes an ``nn.Sequential`` of two plain ones, ``(W D)(E x) + b'``, where
    b' takes up the mean of what is projected away. With ``projection="least_squares"`` E x are the directions, each to
    a scale of its own, and D gives every neuron its best guess from them; with ``"orthogonal"`` E has orthonormal rows
    that span them, and D = Eᵀ.

    One of three arguments sets how many directions are kept. `k` is a number, a share of the layer's width such as
    0.35, or a mapping from layers to these. `variance` is the share of the input's variance that is to be held.
    `accuracy_drop` is by how much the accuracy may fall, divided evenly among the layers; k is
    then searched by halving. Accuracy is measured on `test`, or on `data`.

    With ``order="from_the_top"`` the layers are compressed one after the other, the last that runs first, each with
    directions taken from the network as compressed so far. The table is the copy's attribute `compression`; the
    model itself stays as it is.

    Args:
        model: the network.
        layers: which linear or conv layers (see `nk.layers`); of a glob those that fit, and the table names the rest.
        data: a loader, an iterable of batches or one array of inputs.
        name: what the table calls the model; by default its class.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> small = compress(model, "2", k=2, data=torch.randn(50, 8))
        >>> small[2]
        Sequential(
          (0): Linear(in_features=16, out_features=2, bias=False)
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """
    request = Compressing(models={name or type(unwrapped(model)).__name__: model}, data=data, **options)
    require_weights(unwrapped(model))
    other = _other(request.against)
    yield lambda: _plan(request, model, layers, other)
    with request.lending(model):
        fitting, left_out = _layers(request, model, layers, other)
        _require_labels(request)
        net = copy.deepcopy(unwrapped(model))
        names, inputs, start = list(fitting), None, request.accuracy(net)
        if request.order == "from_the_top":
            names = run_order(net, names, request)[::-1]
        else:
            inputs = collected(net, names, other, request)
        rows = list[CompressedLayer]()
        for place, layer in enumerate(names, start=1):
            seen = inputs or collected(net, [layer], other, request)
            # each layer may use up its even share of the drop, and what those before it have left
            floor = (start or 0) - (request.accuracy_drop or 0) * place / len(names)
            rows.append(_compressed(request, net, layer, seen, floor, rows[-1].accuracy if rows else start))
        net.compression = _record(request, model, net, rows, seen, start, other, left_out)  # type: ignore[assignment]
    return net


explain_compress = compress.explain


def _plan(request: Compressing, model: nn.Module, spec: Spec, other: nn.Module | None) -> WorkPlan:
    with request.lending(model):
        layers, left_out = _layers(request, model, spec, other)
        _require_labels(request)
        is_tested = has_labels(request.data if request.test is None else request.test)
        length = length_if_known(next(batches_of(request.data))) or 0
    count, times = examples_in(request.data, request.examples), len(layers)
    if request.accuracy_drop is not None:  # of which each layer has as many as the search for k may take
        times += sum(most.bit_length() + 1 for most in map(most_that_saves, layers.values()))
    limit = "at most " if request.accuracy_drop is not None else ""
    by_turns, wide = request.order == "from_the_top", [8 * 4 * width_of(layer) ** 2 for layer in layers.values()]
    passes = (len(layers) if by_turns else 1) * (1 if other is None else 2)
    work = [Work("reading the inputs of the layers", count and passes * count)]
    if is_tested:
        tested = count if request.test is None else examples_in(request.test)
        work.append(Work(f"measuring accuracy {limit}{plural(1 + times, 'time')}", tested and (1 + times) * tested))
    work.append(Work(f"trying {limit}{plural(times, 'smaller layer')} on a batch", (times + by_turns) * length))
    memory = {"moments": max(wide) if by_turns else sum(wide), "the copy that is compressed": _bytes_of(model)}
    notes = [f"{plural(len(layers), 'layer')} compressed, {request.order.replace('_', ' ')}"]
    notes += [f"left out: {_in_words(left_out)}"] if left_out else []
    return WorkPlan(tuple(work), memory, tuple(notes))


def _bytes_of(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


def _other(against: str | nn.Module) -> nn.Module | None:
    """Return the model that is compared with, or None for the logits."""
    if isinstance(against, nn.Module):
        return against
    if ":" in against:
        return load_model(against)
    if against != "logits":
        near = did_you_mean(str(against), ["logits"]) or "."
        raise UnknownName(f"`against` is 'logits' or another model; got {against!r}{near}", argument="against")
    return None


def _layers(
    request: Compressing, model: nn.Module, spec: Spec, other: nn.Module | None
) -> tuple[dict[str, LinearOrConv], dict[str, str]]:
    """Return the layers that are compressed, and why others that a glob names do not fit."""
    known, fitting, left_out = modules(model), dict[str, LinearOrConv](), dict[str, str]()
    names = choose(model, spec := [spec] if isinstance(spec, (str, type)) else list(spec or ()))
    for name in names:
        if split_call(name)[1] is not None:
            raise InvalidValue(
                f"{name!r} is one call of a layer, and all calls share its weights; name the layer.", argument="layers"
            )
    for name in names:
        try:
            fitting[name] = factorable(name, known[name])
            require_no_hooks(name, fitting[name])
            if request.k is not None and not isinstance(request.k, Mapping):
                request.count(name, fitting[name])
            if other is not None:
                there = modules(other)
                if name not in there:
                    hint = did_you_mean(name, there) or "."
                    raise UnknownName(
                        f"the model to compress against has no {layer_label(name)}{hint}", argument="against"
                    )
                factorable(name, there[name])
        except NetkinError as fault:
            if len(names) == 1 or name in spec:
                raise
            left_out[name] = str(fault)
            fitting.pop(name, None)
    if not fitting:
        raise InvalidValue(f"none of {len(names)} layers can be compressed; the first: {left_out[names[0]]}")
    if isinstance(request.k, Mapping):
        _require_layer_names(request.k, list(fitting))
        for name, layer in fitting.items():
            request.count(name, layer)
    return fitting, left_out


def _require_layer_names(k: Mapping[str, Any], names: list[str]) -> None:
    for name in k:
        if name not in names:
            hint = did_you_mean(str(name), names) or "."
            raise UnknownName(f"`k` names {name!r}, which is not among the layers{hint}", argument="k")
    missing = next((name for name in names if name not in k), None)
    if missing is not None:
        raise UnknownName(f"`k` has no number for {layer_label(missing)}; give one for every layer.", argument="k")


def _require_labels(request: Compressing) -> None:
    what = "data" if request.test is None else "test"
    needed = what == "test" or request.accuracy_drop is not None
    if needed and not has_labels(getattr(request, what)):
        raise InvalidValue(
            f"the accuracy is measured on `{what}`, whose batches have no labels; give batches "
            "`(inputs, labels)`, the labels whole numbers.",
            argument=what,
        )


def has_labels(data: Any) -> bool:
    """Return whether the first batch of the data has labels that are class numbers."""
    labels = labels_of(next(batches_of(data)))
    try:
        return labels is not None and not label_tensor(labels).is_floating_point()
    except InvalidValue:  # names, boxes of several sizes and whatever else may stand there
        return False


def _compressed(
    request: Compressing, net: nn.Module, name: str, inputs: Inputs, floor: float, before: float | None
) -> CompressedLayer:
    """Compress one layer of `net` in place and return its row."""
    layer, moments, places = modules(net)[name], inputs[name], inputs.places[name]
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    space, width = subspace(moments, request.cut), width_of(layer)
    kept, note = _directions_to_keep(request, net, name, layer, space, floor)
    small: nn.Module = layer
    notes, held, reached = [note], 1.0, before
    if kept is not None:
        small = factored(layer, space.first(kept, request.projection))
        request.put(net, name, small)
        held, reached = float(space.held(request.projection)[kept - 1]), request.accuracy(net)
        notes += [*size_remarks(layer, small, places), tied_remark(net, layer)]
    if moments.n < width:
        few = f"its directions come from {moments.n:,} rows of {width:,} features; more would find them better."
        notes.append(few)
    return CompressedLayer(
        layer=name,
        kind="Linear" if isinstance(layer, nn.Linear) else "Conv2d",
        width=width,
        kept=width if kept is None else kept,
        parameters_before=parameters(layer),
        parameters_after=parameters(small),
        multiply_adds_before=multiply_adds(layer, places),
        multiply_adds_after=multiply_adds(small, places),
        variance=held,
        accuracy=reached,
        notes=tuple(filter(None, notes)),
    )


def _directions_to_keep(
    request: Compressing, net: nn.Module, name: str, layer: LinearOrConv, space: Subspace, floor: float
) -> tuple[int | None, str]:
    """Return how many directions are kept, or None where the layer is better left as it is, and why.

    With `accuracy_drop` they are the fewest with which the accuracy stays at or above `floor`.
    """

    def enough(k: int) -> bool:
        request.put(net, name, factored(layer, space.first(k, request.projection)))
        reached = request.accuracy(net)
        put(net, name, layer)
        return reached is not None and reached >= floor - 1e-12

    if request.accuracy_drop is not None:
        most = min(most_that_saves(layer), space.rank)
        kept = fewest(enough, most) if most else None
        return kept, "" if kept else f"left as it is: no k that saves parameters (up to {most:,}) keeps the accuracy."
    wanted = request.wanted(name, layer, space)
    if request.variance is not None and wanted > most_that_saves(layer):
        held = f"{plural(wanted, 'direction')} {'holds' if wanted == 1 else 'hold'} that variance"
        return None, f"left as it is: {held}, which saves no parameters."
    if wanted > space.rank:
        return space.rank, f"only {space.rank:,} directions of its input vary, so no more than these are kept."
    return wanted, ""


def _record(
    request: Compressing, model: nn.Module, net: nn.Module, rows: list[CompressedLayer], seen: Inputs,
    start: float | None, other: nn.Module | None, left_out: Mapping[str, str],
) -> Compression:  # fmt: skip
    """Return the table, with digests of weights, data and settings, and the call."""
    there, layers, (name,) = modules(net), [row.layer for row in rows], request.models
    earlier = getattr(net, "compression", None)
    options = {option: getattr(request, option) for option in SETTINGS}
    given = {"model": unwrapped(model), "layers": layers, "data": data_name(request.data), "against": other}
    overlap = request.test is not None and overlap_remark(request.data, request.test, request.examples)
    provenance = {
        "weights": weights_digest(model),
        **({} if other is None else {"weights against": weights_digest(other)}),
        "data digest": seen.digest.hex,
        "settings digest": settings_digest({"layers": layers, **options}),
        "call": described_call("nk.compress", **given, **options),
        **({"left out": _in_words(left_out)} if left_out else {}),
        **({"overlap": overlap} if overlap else {}),
        **random_weights(map(unwrapped, filter(None, (model, other)))),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return Compression(
        layers=tuple(rows),
        against="logits" if other is None else f"another {type(unwrapped(other)).__name__}",
        projection=request.projection,
        order=request.order.replace("_", " "),
        examples=seen.examples,
        parameters_before=parameters(unwrapped(model)),
        parameters_after=parameters(net),
        accuracy_before=start,
        accuracy_after=rows[-1].accuracy,
        data=data_name(request.data),
        model=name,
        replaced=(
            *(earlier.replaced if isinstance(earlier, Compression) else ()),
            *filter(None, (replacement(layer, there[layer]) for layer in layers)),
        ),
        provenance=provenance,
    )


SETTINGS = (
    "k", "variance", "accuracy_drop", "projection", "cut", "examples", "forward", "transform", "order",
)  # fmt: skip


def _in_words(left_out: Mapping[str, str]) -> str:
    """Return which layers of a glob were left out, and why the first of them."""
    names = [*list(left_out)[:5], *([f"{len(left_out) - 5} more"] if len(left_out) > 5 else [])]
    return f"{', '.join(names)}. Why {names[0]!r}: {left_out[names[0]]}"


# --- what is saved ----------------------------------------------------------------------------------------------------


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
    """Return a remark if another layer still uses the weights; empty if none does."""
    if not any(parameter is layer.weight for parameter in net.parameters()):
        return ""
    return "its weights serve another layer, too, so that the network keeps them beside the smaller ones."


def size_remarks(layer: LinearOrConv, small: nn.Sequential, places: tuple[int, int]) -> list[str]:
    """Return remarks on what replacing a layer does not save."""
    remarks = []
    if isinstance(small[0], nn.Conv2d) and small[0].bias is not None:
        remarks.append("one extra channel carries the mean, because zero padding does not continue it at the border.")
    if parameters(small) >= parameters(layer):
        remarks.append(f"saves no parameters: that takes k of at most {most_that_saves(layer):,}.")
    elif multiply_adds(small, places) >= multiply_adds(layer, places):
        remarks.append("saves no multiply-adds: its 1 × 1 convolution has more positions than the layer's output.")
    return remarks


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return a number from 1 to `most` that is enough, found by halving the range; None if `most` is not.

    It is the smallest where more is always better.

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
