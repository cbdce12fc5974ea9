"""Compression: layers restricted to the few directions of their inputs that matter.

Section 4.4 of the SVCCA paper: ``W x`` becomes ``(W Pᵀ)(P x)``, P of k rows that span the top SVCCA directions of x.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from netkin.applications.compression.factoring import (
    PROJECTIONS,
    LinearOrConv,
    Subspace,
    factored,
    load_compressed,
    put,
    refuse_hooked,
    refuse_unfit,
    replacement,
    save_compressed,
    subspace,
    width_of,
)
from netkin.applications.compression.layer_sizes import (
    Feeding,
    Inputs,
    K,
    Size,
    collected,
    fewest,
    has_labels,
    labelled_accuracy,
    most_that_saves,
    multiply_adds,
    parameters,
    run_order,
    size_remarks,
    tied_remark,
)
from netkin.comparing.feed import data_name
from netkin.errors import ForwardError, InvalidValue, NameClash, NetkinError, UnknownName, did_you_mean
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.progress import ProgressOption, showing
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.inputs import Forward, Transform
from netkin.representations.layers import Spec, choose, layer_label, modules, refuse_lazy, split_call, unwrapped
from netkin.results.compression import CompressedLayer, Compression
from netkin.results.labels import plural
from netkin.settings import random_states_kept
from netkin.sources.batches import overlap_remark
from netkin.sources.models import load_model
from netkin.sources.names import by_name
from netkin.sources.weights import random_weights

__all__ = ["CompressedLayer", "Compression", "compress", "load_compressed", "save_compressed"]

ORDERS = ("at_once", "from_the_top")


@by_name(models="model", data="data test")
def compress(
    model: nn.Module,
    layers: Spec,
    *,
    data: Any = None,
    k: K = None,
    variance: float | None = None,
    accuracy_drop: float | None = None,
    against: str | nn.Module = "logits",
    projection: str = "least_squares",
    order: str = "at_once",
    test: Any = None,
    cut: float = 0.99,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    name: str | None = None,
    progress: ProgressOption = None,
) -> nn.Module:
    """Return a copy of `model` in which each chosen linear or conv layer uses only k directions of its input.

    The directions are those of SVCCA: of the layer's input against the model's logits, or against the same layer's
    input in another model, by falling correlation; then, as ten logits have no more than ten, the layer's other
    directions by falling variance. A layer becomes an ``nn.Sequential`` of two plain ones, ``(W D)(E x) + b'``, where
    b' takes up the mean of what is projected away. With ``projection="least_squares"`` E x are the directions, each to
    a scale of its own, and D gives every neuron its best guess from them; with ``"orthogonal"`` E has orthonormal rows
    that span them, and D = Eᵀ.

    One of three arguments sets how many directions are kept. `k` is a number, a share of the layer's width such as
    0.35, or a mapping from layers to these. `variance` is the share of the input's variance that is to be held.
    `accuracy_drop` is by how much the accuracy may fall, shared out evenly over the layers one after the other; k is
    then searched by halving. Accuracy is measured on `test`, or on `data`.

    With ``order="from_the_top"`` the layers are compressed one after the other, the last that runs first, each with
    directions taken from the network as compressed so far. The table is the copy's attribute `compression`; the
    model itself stays as it is.

    Args:
        model: the network.
        layers: which linear or conv layers (see `nk.layers`); of a glob those that fit, and the table names the rest.
        data: a loader, an iterable of batches or one array of inputs.
        k: directions to keep, or their share, for all layers or by layer.
        variance: the share of the input's variance to hold.
        accuracy_drop: by how much the accuracy may fall, as a share of the examples.
        against: "logits", or another model, whose same layers are compared with.
        projection: "least_squares" or "orthogonal".
        order: "at_once" or "from_the_top".
        test: labelled examples for the accuracy; by default `data`.
        cut: the share of variance in which SVCCA looks for directions.
        examples: how many examples of `data` are read.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs.
        name: what the table calls the model; by default its class.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> small = compress(model, "2", k=2, data=torch.randn(50, 8))
        >>> small[2]
        Sequential(
          (0): Linear(in_features=16, out_features=2, bias=False)
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """
    _refuse_other("projection", projection, PROJECTIONS)
    _refuse_other("order", order, ORDERS)
    if isinstance(data, Iterator) or isinstance(test, Iterator):
        raise InvalidValue("the data are read several times, and an iterator only once; pass a loader or a list.")
    if not 0 < cut <= 1:
        raise InvalidValue(f"`cut` must lie above 0 and at most at 1; got {cut}.", argument="cut")
    size = Size(k, variance, accuracy_drop)
    refuse_lazy(unwrapped(model))
    with showing(progress), random_states_kept(model, data=[data, test]):
        fed, called = Feeding(examples, forward, transform), name or type(unwrapped(model)).__name__
        work = CompressCall(model, layers, data, test, _other(against), projection, cut, size, fed, called)
        return work.compressed(from_the_top=order == "from_the_top")


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


def _refuse_other(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = did_you_mean(str(value), known) or "."
        raise UnknownName(f"`{what}` is {' or '.join(map(repr, known))}; got {value!r}{near}")


@dataclass(frozen=True)
class CompressCall:
    """One call of `compress`."""

    model: nn.Module
    spec: Spec
    data: Any
    test: Any
    other: nn.Module | None
    projection: str
    cut: float
    size: Size
    feeding: Feeding
    name: str
    left_out: dict[str, str] = field(default_factory=dict)  # why layers that a glob names do not fit

    def compressed(self, from_the_top: bool) -> nn.Module:
        """Return the compressed copy of the model, with its table."""
        layers = self._layers()
        self.size.refuse_unfit(layers)
        self._refuse_without_labels()
        net = copy.deepcopy(unwrapped(self.model))
        earlier = getattr(net, "compression", None)
        if not isinstance(earlier, Compression | None):
            raise NameClash("the model has an attribute `compression` of its own, where the table would go; rename it.")
        ordered = reversed(run_order(net, list(layers), self.data, self.feeding)) if from_the_top else layers
        rows, seen, before = self._steps(net, list(ordered), from_the_top)
        net.compression = self._record(net, rows, seen, before, from_the_top, earlier)  # type: ignore[assignment]
        return net

    def _steps(
        self, net: nn.Module, names: list[str], from_the_top: bool
    ) -> tuple[list[CompressedLayer], Inputs, float | None]:
        """Compress one layer after the other; return their rows, what was seen last, and the accuracy before."""
        start = before = self._accuracy(net)
        inputs = None if from_the_top else collected(net, names, self.data, self.other, self.feeding)
        rows: list[CompressedLayer] = []
        for place, name in enumerate(names, start=1):
            seen = inputs or collected(net, [name], self.data, self.other, self.feeding)
            # each layer may use up its even share of the drop, and what those before it have left
            floor = (start or 0) - (self.size.accuracy_drop or 0) * place / len(names)
            rows.append(self._step(net, name, seen, floor, before))
            before = rows[-1].accuracy
        return rows, seen, start

    def _step(self, net: nn.Module, name: str, inputs: Inputs, floor: float, before: float | None) -> CompressedLayer:
        """Compress one layer of `net` in place and return its row."""
        layer = modules(net)[name]
        assert isinstance(layer, (nn.Linear, nn.Conv2d))
        space = subspace(inputs[name], self.cut)
        kept, note = self._directions_to_keep(net, name, layer, space, floor)
        if kept is None:
            return _row(name, layer, layer, width_of(layer), 1.0, inputs, before, [note])
        small = factored(layer, space.first(kept, self.projection))
        self._put(net, name, small)
        held = float(space.held(self.projection)[kept - 1])
        remarks = [note, *size_remarks(layer, small, inputs.places[name]), tied_remark(net, layer)]
        return _row(name, layer, small, kept, held, inputs, self._accuracy(net), remarks)

    def _directions_to_keep(
        self, net: nn.Module, name: str, layer: LinearOrConv, space: Subspace, floor: float
    ) -> tuple[int | None, str]:
        """Return how many directions are kept, or None where the layer is better left as it is, and why."""
        if self.size.accuracy_drop is not None:
            return self._searched(net, name, layer, space, floor)
        wanted = self.size.wanted(name, layer, space, self.projection)
        if self.size.variance is not None and wanted > most_that_saves(layer):
            held = f"{plural(wanted, 'direction')} {'holds' if wanted == 1 else 'hold'} that variance"
            return None, f"left as it is: {held}, which saves no parameters."
        if wanted > space.rank:
            return space.rank, f"only {space.rank:,} directions of its input vary, so no more than these are kept."
        return wanted, ""

    def _searched(
        self, net: nn.Module, name: str, layer: LinearOrConv, space: Subspace, floor: float
    ) -> tuple[int | None, str]:
        """Search for the fewest directions with which the accuracy stays at or above `floor`."""

        def enough(k: int) -> bool:
            self._put(net, name, factored(layer, space.first(k, self.projection)))
            reached = self._accuracy(net)
            put(net, name, layer)
            return reached is not None and reached >= floor - 1e-12

        most = min(most_that_saves(layer), space.rank)
        kept = fewest(enough, most) if most else None
        return kept, "" if kept else f"left as it is: no k that saves parameters (up to {most:,}) keeps the accuracy."

    def _put(self, net: nn.Module, name: str, small: nn.Module) -> None:
        """Put the smaller layer into the net, and see that the net still runs."""
        put(net, name, small)
        try:
            with inference_mode_of(net):
                self.feeding.output(net, next(batches_of(self.data)))
        except Exception as fault:
            raise ForwardError(
                f"the model does not run with {layer_label(name)} taken apart ({type(fault).__name__}: {fault}); "
                "it may look at the layer instead of calling it. Leave this layer out."
            ) from fault

    def _accuracy(self, net: nn.Module) -> float | None:
        """Return the accuracy on the test data, or on the data; None where these have no labels."""
        if self.test is not None:
            return labelled_accuracy(net, self.test, Feeding(None, self.feeding.forward, self.feeding.transform))
        return labelled_accuracy(net, self.data, self.feeding) if has_labels(self.data) else None

    def _refuse_without_labels(self) -> None:
        for what, data in (("test", self.test), ("data", self.data if self.test is None else None)):
            needed = what == "test" or self.size.accuracy_drop is not None
            if data is not None and needed and not has_labels(data):
                raise InvalidValue(
                    f"the accuracy is measured on `{what}`, whose batches have no labels; give batches "
                    "`(inputs, labels)`, the labels whole numbers."
                )

    def _layers(self) -> dict[str, LinearOrConv]:
        known = modules(self.model)
        names = choose(self.model, spec := [self.spec] if isinstance(self.spec, (str, type)) else list(self.spec or ()))
        for name in names:
            if split_call(name)[1] is not None:
                raise InvalidValue(f"{name!r} is one call of a layer, and all calls share its weights; name the layer.")
        fitting: dict[str, LinearOrConv] = {}
        for name in names:
            try:
                fitting[name] = self._fitting(name, known)
            except NetkinError as fault:
                if len(names) == 1 or name in spec:
                    raise
                self.left_out[name] = str(fault)
        if not fitting:
            raise InvalidValue(f"none of {len(names)} layers can be compressed; the first: {self.left_out[names[0]]}")
        return fitting

    def _fitting(self, name: str, known: Mapping[str, nn.Module]) -> LinearOrConv:
        """Return a layer that can be compressed as requested, or raise an error with the reason."""
        layer = refuse_unfit(name, known[name])
        refuse_hooked(name, layer)
        if not isinstance(self.size.k, Mapping):
            self.size.refuse_unfit({name: layer})
        if self.other is not None:
            there = modules(self.other)
            if name not in there:
                hint = did_you_mean(name, there) or "."
                raise UnknownName(f"the model to compress against has no {layer_label(name)}{hint}")
            refuse_unfit(name, there[name])
        return layer

    def _record(
        self,
        net: nn.Module,
        rows: list[CompressedLayer],
        seen: Inputs,
        before: float | None,
        from_the_top: bool,
        earlier: Compression | None,
    ) -> Compression:
        there = modules(net)
        factors = [replacement(row.layer, there[row.layer]) for row in rows]
        return Compression(
            layers=tuple(rows),
            against="logits" if self.other is None else f"another {type(unwrapped(self.other)).__name__}",
            projection=self.projection,
            order="from the top" if from_the_top else "at once",
            examples=seen.examples,
            parameters_before=parameters(unwrapped(self.model)),
            parameters_after=parameters(net),
            accuracy_before=before,
            accuracy_after=rows[-1].accuracy,
            data=data_name(self.data),
            model=self.name,
            replaced=(*(earlier.replaced if earlier else ()), *filter(None, factors)),
            provenance=self._provenance([row.layer for row in rows], seen, from_the_top),
        )

    def _provenance(self, layers: list[str], seen: Inputs, from_the_top: bool) -> dict[str, str]:
        """Return what identifies the compression: digests of weights, data and settings, and the call."""
        size = {"k": self.size.k, "variance": self.size.variance, "accuracy_drop": self.size.accuracy_drop}
        options = {**size, "projection": self.projection, "cut": self.cut, **vars(self.feeding)}
        options |= {"order": "from_the_top" if from_the_top else "at_once"}
        given = {"model": unwrapped(self.model), "layers": layers, "data": data_name(self.data), "against": self.other}
        overlap = self.test is not None and overlap_remark(self.data, self.test, self.feeding.examples)
        return {
            "weights": weights_digest(self.model),
            **({} if self.other is None else {"weights against": weights_digest(self.other)}),
            "data digest": seen.digest.hex,
            "settings digest": settings_digest({"layers": layers, **options}),
            "call": described_call("nk.compress", **given, **options),
            **({"left out": _in_words(self.left_out)} if self.left_out else {}),
            **({"overlap": overlap} if overlap else {}),
            **random_weights(map(unwrapped, filter(None, (self.model, self.other)))),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }


def _in_words(left_out: Mapping[str, str]) -> str:
    """Return which layers of a glob were left out, and why the first of them."""
    names = [*list(left_out)[:5], *([f"{len(left_out) - 5} more"] if len(left_out) > 5 else [])]
    return f"{', '.join(names)}. Why {names[0]!r}: {left_out[names[0]]}"


def _row(
    name: str,
    layer: LinearOrConv,
    small: nn.Module,
    kept: int,
    held: float,
    inputs: Inputs,
    reached: float | None,
    notes: list[str],
) -> CompressedLayer:
    moments, width = inputs[name], width_of(layer)
    few = f"its directions come from {moments.n:,} rows of {width:,} features; more would find them better."
    return CompressedLayer(
        layer=name,
        kind="Linear" if isinstance(layer, nn.Linear) else "Conv2d",
        width=width,
        kept=kept,
        parameters_before=parameters(layer),
        parameters_after=parameters(small),
        multiply_adds_before=multiply_adds(layer, inputs.places[name]),
        multiply_adds_after=multiply_adds(small, inputs.places[name]),
        variance=held,
        accuracy=reached,
        notes=tuple(note for note in (*notes, few if moments.n < width else "") if note),
    )
