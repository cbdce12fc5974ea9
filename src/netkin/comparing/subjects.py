"""Subjects: what is compared. A model with its own data, rows that were recorded before, or a set of weights.

What the user passes is a `Subject`, or becomes one. Inside a pass a *runner* stands for it, which gives for each batch
what is kept of each layer's rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netkin.arrays import as_tensor, resolution_of
from netkin.errors import InvalidValue, ShapeError, UnknownName, did_you_mean
from netkin.identity import Form, form_of, weights_digest
from netkin.representations import Recorder, inference_mode_of, model_lock, model_precision, rows_of, shape_for
from netkin.representations.activations import LayerFacts, Recorded
from netkin.representations.filters import layer_weights
from netkin.representations.gradients import Taps, Target, logits_of
from netkin.representations.inputs import Forward, Transform, labels_of, length_if_known, require_finite_inputs
from netkin.representations.layer_weights import REMEDY, parts_of_computed_weights
from netkin.representations.layers import (
    Spec,
    choose,
    matching_names,
    modules,
    split_call,
    unwrapped,
    whole_remark,
)
from netkin.representations.shapes import Shape
from netkin.sources.datasets import load_data
from netkin.sources.models import load_model
from netkin.sources.weights import remark_on

Keep = Callable[[str, Tensor, Tensor | None], Any]  # of a layer, its rows and which tokens they are
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """One side of a comparison: a model, with data, layers, shape and functions of its own where they are given.

    Subjects that hold the same data object share one iteration over it, so that shuffling loaders stay paired. A
    `thing` may also be a mapping of layer names to recorded arrays; with `weights`, a state dict, there is none.

    Args:
        thing: the model, or a mapping of layer names to arrays recorded before.
        data: a loader, an iterable of batches or one array of inputs, for this subject alone.
        layers: which layers, as in `nk.layers`; by default those of the comparison.
        shape: what one example is; by default that of the comparison.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the model runs.
        weights: the weights alone, by name, for statistics that need no data.
    """

    thing: Any = None
    data: Any = None
    layers: Any = None
    shape: Any = None
    forward: Any = None
    transform: Any = None
    device: Any = None
    weights: Tensors | None = None

    def __post_init__(self) -> None:
        """Load what is given by its name."""
        if isinstance(self.thing, str):
            object.__setattr__(self, "thing", load_model(self.thing))
        if isinstance(self.data, str):
            object.__setattr__(self, "data", load_data(self.data))


class Runner(ABC):
    """One side of a pass: for each batch it gives what is kept of each layer's rows."""

    name: str
    kind: str
    data: Any = None  # its own, where it has some
    shapes: dict[str, str]  # what one example is, of each layer that has given rows
    hands_over = False  # whether its rows are its own, and so need no copy to be kept
    device: Any = None  # where its rows are made, if it is known beforehand
    resizes = False  # whether its feature maps may be averaged down to the size of others
    targets: Sequence[Target] = ()  # the losses whose gradients are wanted
    wants_outputs = False  # whether the outputs of the whole model are wanted
    has_content = True  # whether its batches identify the examples
    names_layers = True  # whether its layers were chosen by the user
    _transform: Transform | None = None

    @property
    @abstractmethod
    def origin(self) -> dict[str, str]:
        """What it is and how it is run, as text for the provenance of a result."""

    def length(self, batch: Any) -> int | None:
        """Return the number of examples in a batch, if it is known."""
        return length_if_known(batch)

    @abstractmethod
    def ready(self, keep: Keep) -> Any:
        """Return a context in which `rows` may be called; `keep` reduces (layer, rows) to what is kept."""

    @abstractmethod
    def rows(self, batch: Any) -> dict[str, Any]:
        """Return what is kept of each layer for one batch."""

    def gradients(self, target: Target) -> dict[str, Tensor]:
        """Return the gradients of a loss at the layers' outputs, in rows like the latest ones."""
        raise InvalidValue(f"{self.name!r} holds recorded rows, which have no gradients; pass the model.")

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the logits of the model for its latest batch, and the labels in it or None."""
        raise InvalidValue(f"{self.name!r} holds recorded rows, which have no outputs; pass the model.")

    def space(self, layer: str) -> tuple[int, ...]:
        """Return the size of the map that a layer's latest rows came from, where they are places of a map."""
        return ()

    def valid(self, layer: str) -> Tensor | None:
        """Return which tokens of each example the latest rows are, where examples have different numbers of them."""
        return None

    @property
    def left_out(self) -> dict[str, str]:
        """Why default layers gave no rows, by their names."""
        return {}

    def learn(self, batch: Any) -> dict[str, LayerFacts]:
        """Return what few examples of a batch show of each layer."""
        raise InvalidValue(f"{self.name!r} can't be run.")

    def resolution(self, layer: str) -> float:
        """Return the rounding unit of a layer's output as it came; 0 where its rows show it."""
        return 0.0

    def content(self, batch: Any) -> Any:
        """Return what of a batch the digest of the data is taken of."""
        return batch

    def require_finite_inputs(self, batch: Any, number: int) -> None:
        """Refuse the batch of this number if NaN or Inf are in its inputs, and not made by the model."""
        require_finite_inputs(batch, self._transform, number)

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        """Return the tensors of each layer, by their names in it, in the order of modules; of `layers` if given."""
        raise InvalidValue(f"{self.name!r} has no weights; pass the model, or `nk.Subject(weights=...)`.")


class ModelRunner(Runner):
    """A model, run once on each batch."""

    hands_over = True

    def __init__(
        self,
        name: str,
        model: nn.Module,
        layers: Spec,
        shape: Shape | Mapping[str, Shape],
        forward: Forward | None,
        transform: Transform | None,
        device: torch.device | str | None,
        exact: bool = False,
    ):
        self.name, self.model, self.kind = name, model, type(model).__name__
        self._layers, self._shape, self._device, self._exact = layers, shape, device, exact
        self._forward, self._transform = forward, transform
        self._recorder: Recorder | None = None
        self._recorded = Recorded({})
        self._digest, self.names_layers = "", layers is not None
        self._form: Form | None = None
        self.device = device or next(iter(_devices_of(model)))

    @property
    def shapes(self) -> dict[str, str]:  # type: ignore[override]
        return {layer: facts.shape for layer, facts in self._facts.items()}

    @property
    def _facts(self) -> dict[str, LayerFacts]:
        return (self._recorder and self._recorder.facts) or {}

    @property
    def origin(self) -> dict[str, str]:
        device = ", ".join(sorted(map(str, _devices_of(self.model)))) if self._device is None else str(self._device)
        functions = {"transform": self._transform, "forward": self._forward}
        names = {what: "none" if given is None else function_name(given) for what, given in functions.items()}
        precision = {"precision": model_precision(self.model, exact=self._exact)}
        self._digest = self._digest or weights_digest(self.model)
        form = self._form or form_of(self.model)
        identity = {"weights": self._digest, "architecture": str(form), "form": form.to_json()}
        random = {"random weights": remark} if (remark := remark_on(unwrapped(self.model))) else {}
        whole = "" if self.names_layers else whole_remark(self.model, self.name)
        known = random | ({"one layer": whole} if whole else {})
        return {"model": self.kind, "device": device} | names | precision | identity | known

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        # a guest keeps the random state of the device, too
        with model_lock(), on_device(self.model, self._device), inference_mode_of(self.model, exact=self._exact):
            form = form_of(self.model)  # before the model runs, which may change its attributes
            taps = Taps(self.model, self.targets) if self.targets else None
            self._recorder = Recorder(
                self.model, self._layers, shape=self._shape, forward=self._forward, transform=self._transform,
                reduce=keep, taps=taps, keeps_output=self.wants_outputs, as_run=True,  # the order of a comparison
            )  # fmt: skip
            self._digest = weights_digest(self.model)
            with self._recorder.open():
                yield
            self._form = form.after(self.model)

    def rows(self, batch: Any) -> dict[str, Any]:
        assert self._recorder is not None
        self._recorded = self._recorder(batch)
        return self._recorded.rows

    def gradients(self, target: Target) -> dict[str, Tensor]:
        return self._recorded.gradients[target]

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        return logits_of(self._recorded.output).detach(), labels_of(batch)

    def space(self, layer: str) -> tuple[int, ...]:
        return self._facts[layer].space if layer in self._facts else ()

    def valid(self, layer: str) -> Tensor | None:
        return self._recorded.valid.get(layer)

    @property
    def left_out(self) -> dict[str, str]:
        return self._recorder.left_out if self._recorder else {}

    def learn(self, batch: Any) -> dict[str, LayerFacts]:
        assert self._recorder is not None
        return self._recorder.learn(batch)

    def resolution(self, layer: str) -> float:
        return self._facts[layer].resolution if layer in self._facts else 0.0

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        known = modules(self.model)
        if layers is None and self._layers is None:
            return {name: own for name, module in known.items() if (own := layer_weights(module))}
        names = choose(self.model, self._layers) if layers is None else layers
        return {name: layer_weights(known[split_call(name)[0]]) for name in names}


class RecordedRunner(Runner):
    """A mapping of layer names to arrays whose first axis is the examples."""

    has_content = False

    def __init__(self, name: str, arrays: Mapping[str, Any], layers: Spec, shape: Shape | Mapping[str, Shape]):
        if hasattr(arrays, "_metadata") or any(str(layer).rpartition(".")[2] == "weight" for layer in arrays):
            raise InvalidValue(
                f"{name!r} is a state dict, which holds weights, and not what layers gave for examples. Load it into "
                "its model to compare what layers give; to compare weights, pass `nk.Subject(weights=...)` and a "
                "measure that reads them, such as 'weight_cosine'."
            )
        self.name, self.kind, self.shapes = name, "recorded", {}
        chosen = {layer: arrays[layer] for layer in _chosen(name, list(arrays), layers)}
        self._arrays = {layer: as_tensor(array, f"{name}/{layer}") for layer, array in chosen.items()}
        self._resolutions = {layer: resolution_of(chosen[layer], array) for layer, array in self._arrays.items()}
        self._shape = shape
        self._keep: Keep = lambda layer, rows, valid: rows
        counts = {layer: len(array) if array.ndim else 0 for layer, array in self._arrays.items()}
        (first, n), (other, m) = min(counts.items(), key=lambda c: c[1]), max(counts.items(), key=lambda c: c[1])
        if n < m:
            raise ShapeError(
                f"{name!r} holds {n:,} examples of layer {first!r} and {m:,} of layer {other!r}; "
                "record all on the same data."
            )
        if n == 0:
            raise ShapeError(f"{name!r} holds no examples of layer {first!r}; record it on at least one.")
        self.examples = n

    @property
    def origin(self) -> dict[str, str]:
        return {"model": self.kind, "device": ", ".join(sorted({str(array.device) for array in self._arrays.values()}))}

    def length(self, batch: slice) -> int:
        return int(batch.stop - batch.start)

    @contextmanager
    def ready(self, keep: Keep) -> Iterator[None]:
        self._keep = keep
        yield

    def rows(self, batch: slice) -> dict[str, Any]:
        kept = {}
        for layer, array in self._arrays.items():
            try:
                rows, self.shapes[layer] = rows_of(array[batch], shape_for(layer, self._shape))
            except ShapeError as fault:
                raise ShapeError(f"layer {layer!r} of {self.name!r}: {fault}") from fault
            kept[layer] = self._keep(layer, rows, None)
        return kept

    def learn(self, batch: slice) -> dict[str, LayerFacts]:
        few, self._keep = slice(batch.start, min(batch.start + 3, batch.stop)), lambda layer, rows, valid: rows
        return {
            layer: LayerFacts(
                0, self.shapes[layer], tuple(rows.shape), rows.dtype, self.length(few), self.space(layer),
                self.resolution(layer),
            )
            for layer, rows in self.rows(few).items()
        }  # fmt: skip

    def space(self, layer: str) -> tuple[int, ...]:
        return tuple(self._arrays[layer].shape[2:]) if self.shapes[layer] == "positions" else ()

    def resolution(self, layer: str) -> float:
        return self._resolutions[layer]

    def content(self, batch: slice) -> Any:
        return {f"layer {layer}": array[batch] for layer, array in self._arrays.items()}


class WeightsRunner(Runner):
    """A state dict, for statistics that are fed by weights alone."""

    def __init__(self, name: str, tensors: Tensors, layers: Spec):
        self.name, self.kind, self.shapes, self._tensors, self._layers = name, "weights", {}, tensors, layers
        self.names_layers = layers is not None

    @property
    def origin(self) -> dict[str, str]:
        devices = ", ".join(sorted({str(one.device) for one in self._tensors.values()}))
        return {"model": self.kind, "device": devices, "weights": weights_digest(self._tensors)}

    def ready(self, keep: Keep) -> Any:
        raise self.refusal

    def rows(self, batch: Any) -> dict[str, Any]:
        raise self.refusal

    @property
    def refusal(self) -> InvalidValue:
        """The refusal of what needs data to be run."""
        return InvalidValue(
            f"{self.name!r} is a set of weights, which can't be run; pass the model for other measures."
        )

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        for weight, parts in parts_of_computed_weights(self._tensors).items():
            raise InvalidValue(
                f"{self.name!r} holds {' and '.join(map(repr, parts[:2]))}, from which {weight!r} is computed, not the "
                f"weight itself; pass the model, or {REMEDY}."
            )
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            layer, _, own = name.rpartition(".")
            found.setdefault(layer, {})[own] = tensor
        names = _chosen(self.name, list(found), self._layers) if layers is None else layers
        return {layer: found.get(layer, {}) for layer in names}


def _chosen(name: str, known: list[str], layers: Spec) -> list[str]:
    """Return the recorded layers that `layers` requests, by name or glob; all for None."""
    if not known:
        raise InvalidValue(f"{name!r} is an empty mapping; give it at least one layer.")
    if layers is None:
        return known
    wanted = [layers] if isinstance(layers, (str, type)) else list(layers)
    if not wanted or not all(isinstance(one, str) for one in wanted):
        raise InvalidValue(f"the recorded layers of {name!r} are chosen by name or glob; got {wanted}.")
    found = {str(one): [one] if one in known else matching_names(known, str(one)) for one in wanted}
    for one, matching in found.items():
        if not matching:
            raise UnknownName(f"{name!r} has no layer {one!r}{did_you_mean(one, known) or '.'}")
    return list(dict.fromkeys(layer for matching in found.values() for layer in matching))


def function_name(function: Any) -> str:
    """Return what a function is called where it is defined."""
    return str(getattr(function, "__qualname__", type(function).__name__))


# --- devices ----------------------------------------------------------------------------------------------------------


def _devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices that a model lies on."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}


def _refuse_absent(device: torch.device | str | None) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(
            f"there is no device {str(device)!r} here; leave `device` out to run the models where they are."
        ) from fault


@contextmanager
def on_device(model: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Move a model to `device` while the `with` lasts."""
    unwrapped(model)  # refuses what is no model
    _refuse_absent(device)
    homes = _devices_of(model)
    if any(hasattr(module, "_hf_hook") for module in model.modules()) and torch.device("meta") in homes:
        raise InvalidValue(
            "the model is offloaded by accelerate, so that weights are fetched when a layer runs; "
            "load it with a `device_map` that keeps all of it on devices."
        )
    if any(home.type == "meta" for home in homes) or (device is not None and torch.device(device).type == "meta"):
        raise InvalidValue(
            "a model on the 'meta' device computes no numbers; load its weights and choose a real device."
        )
    if device is None or homes == {torch.device(device)}:
        yield
        return
    if len(homes) > 1:
        raise InvalidValue(
            f"the model is spread over {', '.join(sorted(map(str, homes)))}; leave `device` out to run it where it is."
        )
    try:
        model.to(device)
        yield
    finally:
        model.to(homes.pop())
