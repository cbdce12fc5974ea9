"""The work of a compression, layer by layer: directions, how many of them, the smaller layer, the row of the table."""

from __future__ import annotations

import copy
import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.compression.accuracy import accuracy, fewest, has_labels
from netkin.applications.compression.factoring import Layer, factored, put, refuse_hooked, refuse_unfit, width_of
from netkin.applications.compression.layer_inputs import Feeding, Inputs, collected, in_order
from netkin.applications.compression.record import CompressedLayer, Compression, TakenApart
from netkin.applications.compression.sizes import Size, most_that_saves, multiply_adds, parameters
from netkin.applications.compression.subspaces import Subspace, subspace
from netkin.comparing.request import name_of
from netkin.errors import ForwardError, NameClash, UnknownName, ValueFault, did_you_mean
from netkin.identity import described_call, settings_digest, weights_digest
from netkin.representations import batches_of, guest
from netkin.representations.layers import Spec, choose, layer_label, modules, split_call, unwrapped


@dataclass(frozen=True)
class Work:
    """What was asked for."""

    model: nn.Module
    spec: Spec
    data: Any
    test: Any
    other: nn.Module | None
    projection: str
    cut: float
    size: Size
    feeding: Feeding

    def compressed(self, from_the_top: bool) -> nn.Module:
        """Return the compressed copy of the model, with its table."""
        layers = self._layers()
        self.size.refuse_unfit(layers)
        self._refuse_without_labels()
        net = copy.deepcopy(unwrapped(self.model))
        earlier = getattr(net, "compression", None)
        if not isinstance(earlier, Compression | None):
            raise NameClash("the model has an attribute `compression` of its own, where the table would go; rename it.")
        ordered = reversed(in_order(net, list(layers), self.data, self.feeding)) if from_the_top else layers
        rows, seen, before = self._steps(net, list(ordered), from_the_top)
        net.compression = self._record(net, rows, seen, before, from_the_top, earlier)  # type: ignore[assignment]
        return net

    def _steps(
        self, net: nn.Module, names: list[str], from_the_top: bool
    ) -> tuple[list[CompressedLayer], Inputs, float | None]:
        """Compress one layer after the other; return their rows, what was seen last, and the accuracy before."""
        start = before = self._accuracy(net)
        inputs = None if from_the_top else self._inputs(net, names)
        rows: list[CompressedLayer] = []
        for place, name in enumerate(names, start=1):
            seen = inputs or self._inputs(net, [name])
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
        remarks = [note, *_remarks(layer, small, inputs.places[name]), _tied(net, layer)]
        return _row(name, layer, small, kept, held, inputs, self._accuracy(net), remarks)

    def _directions_to_keep(
        self, net: nn.Module, name: str, layer: Layer, space: Subspace, floor: float
    ) -> tuple[int | None, str]:
        """Return how many directions are kept, or None where the layer is better left as it is, and why."""
        if self.size.accuracy_drop is not None:
            return self._searched(net, name, layer, space, floor)
        wanted = self.size.wanted(name, layer, space, self.projection)
        if self.size.variance is not None and wanted > most_that_saves(layer):
            return None, f"left as it is: {wanted:,} directions hold that variance, which saves no parameters."
        if wanted > space.rank:
            return space.rank, f"only {space.rank:,} directions of its input vary, so no more than these are kept."
        return wanted, ""

    def _searched(
        self, net: nn.Module, name: str, layer: Layer, space: Subspace, floor: float
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
            with guest(net):
                self.feeding.output(net, next(batches_of(self.data)))
        except Exception as fault:
            raise ForwardError(
                f"the model does not run with {layer_label(name)} taken apart ({type(fault).__name__}: {fault}); "
                "it may look at the layer instead of calling it. Leave this layer out."
            ) from fault

    def _inputs(self, net: nn.Module, names: list[str]) -> Inputs:
        return collected(net, names, self.data, self.other, self.feeding)

    def _accuracy(self, net: nn.Module) -> float | None:
        """Return the share of right answers on the test data, or on the data; None where these have no labels."""
        if self.test is not None:
            return accuracy(net, self.test, Feeding(None, self.feeding.forward, self.feeding.transform))
        return accuracy(net, self.data, self.feeding) if has_labels(self.data) else None

    def _refuse_without_labels(self) -> None:
        for what, data in (("test", self.test), ("data", self.data if self.test is None else None)):
            needed = what == "test" or self.size.accuracy_drop is not None
            if data is not None and needed and not has_labels(data):
                raise ValueFault(
                    f"right answers are counted on `{what}`, whose batches have no labels; give batches "
                    "`(inputs, labels)`, the labels whole numbers."
                )

    def _layers(self) -> dict[str, Layer]:
        known = modules(self.model)
        names = choose(self.model, self.spec)
        for name in names:
            if split_call(name)[1] is not None:
                raise ValueFault(f"{name!r} is one call of a layer, and all calls share its weights; name the layer.")
        layers = {name: refuse_unfit(name, known[name]) for name in names}
        for name, layer in layers.items():
            refuse_hooked(name, layer)
        if self.other is not None:
            there = modules(self.other)
            for name in layers:
                if name not in there:
                    hint = did_you_mean(name, there) or "."
                    raise UnknownName(f"the model to compress against has no {layer_label(name)}{hint}")
                refuse_unfit(name, there[name])
        return layers

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
        taken_apart = [
            _taken_apart(row.layer, there[row.layer]) for row in rows if isinstance(there[row.layer], nn.Sequential)
        ]
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
            data=name_of(self.data),
            replaced=(*(earlier.replaced if earlier else ()), *taken_apart),
            provenance=self._provenance([row.layer for row in rows], seen, from_the_top),
        )

    def _provenance(self, layers: list[str], seen: Inputs, from_the_top: bool) -> dict[str, str]:
        """Return by what the compression is known again: digests of weights, data and settings, and the call."""
        size = {"k": self.size.k, "variance": self.size.variance, "accuracy_drop": self.size.accuracy_drop}
        options = {**size, "projection": self.projection, "cut": self.cut, **vars(self.feeding)}
        options |= {"order": "from_the_top" if from_the_top else "at_once"}
        given = {"model": unwrapped(self.model), "layers": layers, "data": name_of(self.data), "against": self.other}
        return {
            "weights": weights_digest(self.model),
            **({} if self.other is None else {"weights against": weights_digest(self.other)}),
            "data digest": seen.digest.hex,
            "settings digest": settings_digest({"layers": layers, **options}),
            "call": described_call("nk.compress", **given, **options),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def _row(
    name: str,
    layer: Layer,
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


def _taken_apart(name: str, small: nn.Module) -> TakenApart:
    assert isinstance(small, nn.Sequential)
    first, second = small[0], small[1]
    assert isinstance(first.weight, Tensor)
    return TakenApart(name, len(first.weight), first.bias is not None, second.bias is not None)


def _tied(net: nn.Module, layer: Layer) -> str:
    """Say so where the net still needs the weights that were taken apart."""
    if not any(parameter is layer.weight for parameter in net.parameters()):
        return ""
    return "its weights serve another layer, too, so that the network keeps them beside the smaller ones."


def _remarks(layer: Layer, small: nn.Sequential, places: tuple[int, int]) -> list[str]:
    """Say what the numbers alone would not."""
    remarks = []
    if isinstance(small[0], nn.Conv2d) and small[0].bias is not None:
        remarks.append("one channel more carries the mean, which the zero padding ends at the border.")
    if parameters(small) >= parameters(layer):
        remarks.append(f"saves no parameters: that takes k of at most {most_that_saves(layer):,}.")
    elif multiply_adds(small, places) >= multiply_adds(layer, places):
        remarks.append("saves no multiply-adds: its 1 × 1 convolution looks at more places than the layer gives.")
    return remarks
