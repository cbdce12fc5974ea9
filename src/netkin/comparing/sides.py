"""Inputs: what is compared. A model with its own data, rows that were recorded before, or a set of weights.

What the user passes is a `ModelInput`, or becomes one. In a stream a *side* stands for it, which gives each layer's
rows for a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from netkin.arrays import as_tensor, resolution_of
from netkin.errors import InvalidValue, ShapeError, UnknownName, did_you_mean
from netkin.identity import Form, form_of, weights_digest
from netkin.identity.data import contents
from netkin.identity.weight_hash import weight_values
from netkin.representations import Recorder, inference_mode_of, model_lock, model_precision, rows_of, shape_for
from netkin.representations.activations import content_hashes, token_hashes
from netkin.representations.batch_axis import FEW, LayerFacts
from netkin.representations.filters import layer_weights
from netkin.representations.gradients import Taps, Target
from netkin.representations.inputs import Transform, device_of, length_if_known, require_finite_inputs
from netkin.representations.layer_recorder import Recorded
from netkin.representations.layer_weights import REMEDY, parts_of_computed_weights
from netkin.representations.layers import (
    Spec,
    choose,
    matching_names,
    modules,
    require_weights,
    split_call,
    unwrapped,
    whole_remark,
)
from netkin.representations.shapes import Shape, split_positions
from netkin.sources.batches import Batches, OwnBatches
from netkin.sources.datasets import is_to_load, load_data
from netkin.sources.models import load_model
from netkin.sources.names import unique_names
from netkin.sources.recordings import RecordedLayer, RecordedRows, names_recording, recorded
from netkin.sources.weights import remark_on

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One side of a comparison: a model, with data, layers, shape and functions of its own where they are given.

    Sides that hold the same data object share one iteration over it, so that shuffling loaders stay paired. With
    `weights`, a state dict, there is no model.

    Args:
        model: the model, or its name, or rows recorded before: an `nk.recorded`, or a mapping of layer names to arrays.
        data: a loader, an iterable of batches or one array of inputs, for this side alone.
        layers: which layers, as in `nk.layers`; by default those of the comparison.
        shape: what one example is; by default that of the comparison.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the model runs.
        weights: the weights alone, by name, for statistics that need no data.
    """

    model: Any = None
    data: Any = None
    layers: Any = None
    shape: Any = None
    forward: Any = None
    transform: Any = None
    device: Any = None
    weights: Tensors | None = None

    def loaded(self, seed: int = 0) -> ModelInput:
        """Return it with its model and data loaded, where they are names; random weights are drawn from `seed`."""
        model = load_side(self.model, seed) if isinstance(self.model, str) else self.model
        models = [self.model]
        data = load_data(self.data, models=models) if is_to_load(self.data, models) else self.data
        return replace(self, model=model, data=data)

    def side(self, name: str, exact: bool = False, keep: float = 0) -> Side:
        """Return what stands for it in a stream; see `ModelSide` for `exact` and `keep`."""
        side: Side
        if self.model is None and self.weights is not None:
            side = WeightsSide(name, self.weights, self.layers)
        elif isinstance(self.model, nn.Module):
            side = ModelSide(name, self, exact, keep)
        elif isinstance(self.model, (Mapping, RecordedRows)):
            side = RecordedSide(name, self.model, self.layers, self.shape)
        else:
            raise InvalidValue(
                f"{name!r} must be a torch module or a mapping of layer names to arrays; got "
                f"{type(self.model).__name__}."
                + " `torch.export.unflatten` makes a module of it."
                * isinstance(self.model, torch.export.ExportedProgram)
            )
        side.data = self.data
        return side


def with_own_data(models: Mapping[str, Any], data: Any) -> tuple[dict[str, Any], Any]:
    """Return models and data, where data that were made for each of several models are those of the models."""
    if not isinstance(data, OwnBatches):
        return dict(models), data
    own = zip(models.items(), data.of, strict=True)
    return {name: replace(source, data=batches) for (name, source), batches in own}, None


def require_same_tokenizer(sides: Sequence[Side], shapes: Iterable[str]) -> None:
    """Refuse to pair tokens of models that split texts in different ways."""
    split_by = {data.split_by for data in (side.data for side in sides) if isinstance(data, Batches)}
    if len(split_by) > 1 and any(split_positions(shape)[0] == "tokens" for shape in shapes):
        raise InvalidValue(
            "the models have different tokenizers, so that their tokens are not the same pieces of a text and do not "
            "pair; take a shape with one row for each text, such as 'mean' or 'last'.",
            argument="shape",
            value="tokens",
        )


@dataclass(frozen=True)
class Reads:
    """What is read of each model beside its rows.

    Args:
        reduce: makes of (model, layer, rows, which tokens they are or None) what is kept until the batch is folded in;
            that of a stream is given (key, rows, which tokens, numbers of the examples).
        targets: the losses whose gradients are taken.
        outputs: whether outputs are wanted.
        hashes: whether examples are known by their content.
        resizes: whether feature maps may be averaged down to the size of others.
    """

    reduce: Any = None
    targets: Sequence[Target] = ()
    outputs: bool = False
    hashes: bool = False
    resizes: bool = False


class Side(ABC):
    """One side of a stream: for a batch it gives what is kept of each layer's rows."""

    name: str
    data: Any = None  # its own, where it has some
    device: Any = None  # where its rows are made, if it is known beforehand
    owns_rows = False  # whether its rows are its own, and so need no copy to be kept
    names_layers = True  # whether its layers were chosen by the user
    transform: Transform | None = None
    left_out: Mapping[str, str] = MappingProxyType({})  # why default layers give no rows, by their names

    @property
    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What it is and how it is run, for the provenance of a result."""

    @abstractmethod
    def open(self, reads: Reads) -> AbstractContextManager[None]:
        """Return a context in which it may be read."""

    @abstractmethod
    def learn(self, batch: Any) -> Mapping[str, LayerFacts]:
        """Return what few examples of a batch show of each layer."""

    @abstractmethod
    def read(self, batch: Any) -> Recorded:
        """Return what it gives for one batch."""

    def length(self, batch: Any) -> int | None:
        """Return the number of examples in a batch, if it is known."""
        return length_if_known(batch)

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        """Return the tensors of each layer, by their names in it, in the order of modules; of `layers` if given."""
        raise InvalidValue(f"{self.name!r} has no weights; pass the model, or `nk.ModelInput(weights=...)`.")

    def require_finite_inputs(self, batch: Any, number: int) -> None:
        """Refuse the batch of this number if NaN or Inf are in its inputs, and not made by the model."""
        require_finite_inputs(batch, self.transform, number)


class ModelSide(Side):
    """A model, run once on each batch.

    Rows are kept from pass to pass up to `keep` bytes, of batches that are recognised as the same objects, so that the
    passes must be fed from one list; beyond them, or where gradients or outputs are read, the model runs in each pass.
    With `exact` float32 on a GPU is not rounded to TF32.
    """

    owns_rows = True

    def __init__(self, name: str, source: ModelInput, exact: bool = False, keep: float = 0):
        self.name, self.model, self.keep = name, source.model, keep
        self._source, self._exact = source, exact
        self.transform, self.names_layers = source.transform, source.layers is not None
        self._recorder: Recorder | None = None
        self._reads = Reads()
        # with the batch itself, as the number of an object is free for others once it is gone
        self._kept: dict[int, tuple[Any, Recorded]] = {}
        self._room = keep
        self._digest = ""
        self._form: Form | None = None
        _require_device(source.device)
        self.device = source.device or device_of(self.model)

    @property
    def origin(self) -> dict[str, Any]:
        devices = _devices_of(self.model) if self._source.device is None else [self._source.device]
        functions = {"transform": self.transform, "forward": self._source.forward}
        names = {what: "none" if function is None else function_name(function) for what, function in functions.items()}
        self._digest = self._digest or weights_digest(self.model)
        form = self._form or form_of(self.model)
        random = remark_on(unwrapped(self.model))
        whole = "" if self.names_layers else whole_remark(self.model, self.name)
        remarks = {"random weights": random, "one layer": whole}
        return {
            "model": type(self.model).__name__,
            "device": ", ".join(sorted({str(device) for device in devices})).replace("meta", "offloaded by accelerate"),
            **names,
            "precision": model_precision(self.model, exact=self._exact),
            "weights": self._digest,
            "architecture": str(form),
            "form": form.to_json(),
            **{what: remark for what, remark in remarks.items() if remark},
        }

    @contextmanager
    def open(self, reads: Reads) -> Iterator[None]:
        # the random state of the device is kept, too
        source = self._source
        with model_lock(), on_device(self.model, source.device), inference_mode_of(self.model, exact=self._exact):
            form = form_of(self.model)  # before the model runs, which may change its attributes
            before, self._reads = self._recorder, reads  # which has learnt the layers, where there was one
            self._recorder = Recorder(
                self.model, source.layers, shape=source.shape, forward=source.forward, transform=self.transform,
                reduce=None if reads.reduce is None or self.keep else partial(reads.reduce, self.name),
                taps=Taps(self.model, reads.targets) if reads.targets else None,
                keeps_output=reads.outputs, learnt=None if before is None else before.learnt,
                as_run=True,  # the order of a comparison
            )  # fmt: skip
            self._digest = weights_digest(self.model)
            with self._recorder.open():
                yield
            self._form = form.after(self.model)

    def learn(self, batch: Any) -> Mapping[str, LayerFacts]:
        assert self._recorder is not None
        return self._recorder.facts or self._recorder.learn(batch)

    def read(self, batch: Any) -> Recorded:
        assert self._recorder is not None
        return self._replayed(batch, self._recorder) if self.keep else self._recorder(batch)

    def _replayed(self, batch: Any, recorder: Recorder) -> Recorded:
        """Return what the model gives for a batch, or gave in an earlier pass."""
        reduce, runs = self._reads.reduce, self._reads.targets or self._reads.outputs
        _, recorded = self._kept.get(id(batch), (None, None)) if not runs else (None, None)
        if recorded is None:
            recorded = recorder(batch)
            size = sum(rows.nbytes for rows in recorded.rows.values())
            if not runs and size <= self._room:
                self._room -= size
                self._kept[id(batch)] = (batch, recorded)
        if reduce is None:
            return recorded
        rows = {
            layer: reduce(self.name, layer, matrix, recorded.valid.get(layer))
            for layer, matrix in recorded.rows.items()
        }
        return replace(recorded, rows=rows)

    @property
    def left_out(self) -> Mapping[str, str]:  # type: ignore[override]
        return self._recorder.learnt.left_out if self._recorder and self._recorder.learnt else {}

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        known = modules(self.model)
        if layers is None and not self.names_layers:
            return {name: tensors for name in known if (tensors := self._layer_weights(name, known))}
        names = choose(self.model, self._source.layers) if layers is None else layers
        return {name: self._layer_weights(split_call(name)[0], known) for name in names}

    def _layer_weights(self, layer: str, known: Mapping[str, nn.Module]) -> Tensors:
        model, before = unwrapped(self.model), f"{layer}." if layer else ""
        weights = layer_weights(known[layer])
        return {name: weight_values(model, before + name, tensor) for name, tensor in weights.items()}


class RecordedSide(Side):
    """Rows that were recorded before, in arrays whose first axis is the examples, or in files.

    Its batches are slices of the examples, or their places.
    """

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, Any] | RecordedRows,
        layers: Spec = None,
        shape: Shape | Mapping[str, Shape] = None,
    ):
        self.recording = arrays if isinstance(arrays, RecordedRows) else None
        known = list(arrays.layers if isinstance(arrays, RecordedRows) else arrays)
        if hasattr(arrays, "_metadata") or any(str(layer).rpartition(".")[2] == "weight" for layer in known):
            raise InvalidValue(
                f"{name!r} is a state dict, which holds weights, and not what layers gave for examples. Load it into "
                "its model to compare what layers give; to compare weights, pass `nk.ModelInput(weights=...)` and a "
                "measure that reads them, such as 'weight_cosine'."
            )
        self.name, self._shape = name, shape
        self._reduce: Any = None
        chosen = _chosen(name, known, layers)
        self._layers: dict[str, RecordedLayer | HeldLayer] = {
            layer: arrays.layers[layer]
            if isinstance(arrays, RecordedRows)
            else HeldLayer.of(arrays[layer], f"{name}/{layer}")
            for layer in chosen
        }
        counts = {layer: held.examples for layer, held in self._layers.items()}
        (first, n), (other, m) = (extreme(counts.items(), key=lambda item: item[1]) for extreme in (min, max))
        if n < m:
            raise ShapeError(
                f"{name!r} holds {n:,} examples of layer {first!r} and {m:,} of layer {other!r}; "
                "record all on the same data."
            )
        if n == 0:
            raise ShapeError(f"{name!r} holds no examples of layer {first!r}; record it on at least one.")
        self.examples = n

    @property
    def at_once(self) -> int | None:
        """How many examples may be read at a time; None where they are in memory."""
        return None if self.recording is None else self.recording.at_once

    @property
    def origin(self) -> dict[str, Any]:
        if self.recording is None:
            devices = {str(held.device) for held in self._layers.values() if isinstance(held, HeldLayer)}
            return {"model": "recorded", "device": ", ".join(sorted(devices))}
        known = {what: self.recording.facts[what] for what in ("weights", "precision") if what in self.recording.facts}
        return {"model": "recorded", "device": "cpu", "recording": self.recording.layout, **known}

    def length(self, batch: slice | np.ndarray) -> int:
        return len(_places(batch))

    @contextmanager
    def open(self, reads: Reads) -> Iterator[None]:
        if reads.targets or reads.outputs:
            what = "gradients" if reads.targets else "outputs"
            raise InvalidValue(f"{self.name!r} holds recorded rows, which have no {what}; pass the model.")
        self._reduce = reads.reduce
        yield

    def places(self, batch: Any, numbers: np.ndarray) -> np.ndarray:
        """Return where the examples of a batch of data are, which have these numbers."""
        if self.recording is None or not self.recording.pairs_with_data:
            raise InvalidValue(
                f"a model and the recorded rows of {self.name!r} can't be compared: nothing tells whether they saw the "
                "same examples. Record with `nk.activations(save=)`, or give the files `ids` that are the examples' "
                "numbers; or record both."
            )
        return self.recording.places_of(numbers, token_hashes(batch), content_hashes(batch, len(numbers)))

    def learn(self, batch: slice | np.ndarray) -> dict[str, LayerFacts]:
        few, facts = _places(batch)[: FEW[1]], {}
        for layer, held in self._layers.items():
            rows, shape, _ = self._rows(layer, few)
            space = tuple(held.shape[1:]) if shape == "positions" else ()
            facts[layer] = LayerFacts(0, shape, tuple(rows.shape), rows.dtype, len(few), space, held.resolution)
        return facts

    def read(self, batch: slice | np.ndarray) -> Recorded:
        rows, valid = dict[str, Any](), dict[str, Tensor]()
        for layer in self._layers:
            matrix, shape, mask = self._rows(layer, _places(batch))
            if shape == "tokens" and mask is not None:
                valid[layer] = mask
            rows[layer] = matrix if self._reduce is None else self._reduce(self.name, layer, matrix, valid.get(layer))
        return Recorded(rows, valid=valid)

    def _rows(self, layer: str, places: np.ndarray) -> tuple[Tensor, str, Tensor | None]:
        output, mask = self._layers[layer].read(places)
        try:
            output = output if output.is_floating_point() else as_tensor(output, f"{self.name}/{layer}")
            rows, shape = rows_of(output, shape_for(layer, self._shape), mask)
        except ShapeError as fault:
            raise ShapeError(f"layer {layer!r} of {self.name!r}: {fault}") from fault
        return rows, shape, mask

    def content(self, batch: slice | np.ndarray) -> dict[str, Tensor]:
        """Return what identifies the examples of a batch: their rows, or of sequences hashes of these."""
        found = {}
        for layer, held in self._layers.items():
            rows, mask = held.read(_places(batch))
            if mask is not None:  # how far a batch is padded is no matter
                each = [contents(row[valid][None], 1) for row, valid in zip(rows, mask, strict=True)]
                rows = torch.cat(each)
            found[f"layer {layer}"] = rows
        return found

    def require_finite_inputs(self, batch: Any, number: int) -> None:
        """Nothing: what was recorded is itself what is looked at."""


@dataclass(frozen=True)
class HeldLayer:
    """Rows of a layer that are in memory."""

    array: Tensor
    resolution: float

    @classmethod
    def of(cls, array: Any, name: str) -> HeldLayer:
        """Return what an array holds, as floating numbers."""
        tensor = as_tensor(array, name)
        return cls(tensor, resolution_of(array, tensor))

    @property
    def examples(self) -> int:
        return len(self.array) if self.array.ndim else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.array.device

    def read(self, places: np.ndarray) -> tuple[Tensor, None]:
        """Return the examples at these places; those that lie one behind the other are no copy."""
        start, stop = int(places[0]), int(places[-1]) + 1
        is_run = stop - start == len(places) and bool((np.diff(places) == 1).all())
        return self.array[start:stop] if is_run else self.array[torch.from_numpy(places).to(self.device)], None


def _places(batch: slice | np.ndarray) -> np.ndarray:
    return np.arange(batch.start, batch.stop) if isinstance(batch, slice) else batch


def load_side(text: str, seed: int = 0) -> Any:
    """Return what a text names: a recording, or a model, whose random weights are drawn from `seed`."""
    return recorded(text) if names_recording(text) else load_model(text, seed=seed)


class WeightsSide(Side):
    """A state dict, for statistics that are fed by weights alone."""

    def __init__(self, name: str, tensors: Tensors, layers: Spec = None):
        self.name, self._tensors, self._layers = name, tensors, layers
        self.names_layers = layers is not None

    @property
    def origin(self) -> dict[str, Any]:
        devices = ", ".join(sorted({str(tensor.device) for tensor in self._tensors.values()}))
        return {"model": "weights", "device": devices, "weights": weights_digest(self._tensors)}

    def require_no_data(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what needs data to be run."""
        raise InvalidValue(f"{self.name!r} is a set of weights, which can't be run; pass the model for other measures.")

    open = learn = read = require_no_data

    def weights(self, layers: Sequence[str] | None = None) -> dict[str, Tensors]:
        for weight, parts in parts_of_computed_weights(self._tensors).items():
            raise InvalidValue(
                f"{self.name!r} holds {' and '.join(map(repr, parts[:2]))}, from which {weight!r} is computed, not the "
                f"weight itself; pass the model, or {REMEDY}."
            )
        by_layer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            layer, _, parameter = name.rpartition(".")
            by_layer.setdefault(layer, {})[parameter] = tensor
        names = _chosen(self.name, list(by_layer), self._layers) if layers is None else layers
        return {layer: by_layer.get(layer, {}) for layer in names}


def _chosen(name: str, known: list[str], layers: Spec) -> list[str]:
    """Return the recorded layers that `layers` requests, by name or glob; all for None."""
    if not known:
        raise InvalidValue(f"{name!r} is an empty mapping; give it at least one layer.")
    if layers is None:
        return known
    wanted = [layers] if isinstance(layers, (str, type)) else list(layers)
    if not wanted or not all(isinstance(pattern, str) for pattern in wanted):
        sentence = f"the recorded layers of {name!r} are chosen by name or glob; got {wanted}."
        raise InvalidValue(sentence, argument="layers")
    chosen: dict[str, None] = {}
    for pattern in map(str, wanted):
        matching = [pattern] if pattern in known else matching_names(known, pattern)
        if not matching:
            sentence = f"{name!r} has no layer {pattern!r}{did_you_mean(pattern, known) or '.'}"
            raise UnknownName(sentence, argument="layers")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def function_name(function: Any) -> str:
    """Return what a function is called where it is defined."""
    return str(getattr(function, "__qualname__", type(function).__name__))


# --- devices ----------------------------------------------------------------------------------------------------------


def _devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices that a model lies on."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}


def _require_device(device: torch.device | str | None) -> None:
    try:
        torch.zeros(1, device=device).item()  # which the device 'meta' does not give
    except Exception as fault:  # torch says it in several ways
        raise UnknownName(
            f"there is no device {str(device)!r} here; leave `device` out to run the models where they are.",
            argument="device",
        ) from fault


@contextmanager
def on_device(model: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Move a model to `device` while the `with` lasts; one that accelerate has offloaded runs where it is."""
    _require_device(device)
    homes = _devices_of(model)
    require_weights(model)
    if device is not None and torch.device("meta") in homes:
        raise InvalidValue(
            f"the model is offloaded by accelerate, which fetches weights when a layer runs, so it can't be moved to "
            f"{str(device)!r}; leave `device` out to run it where it is.",
            argument="device",
            value=str(device),
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


def named_models(models: Any) -> dict[str, Any]:
    """Return several models by their names: those of a list by their numbers, or by the texts that name them."""
    if isinstance(models, Mapping):
        return dict(models)
    if isinstance(models, (str, nn.Module)) or not isinstance(models, Iterable):
        got = repr(models) if isinstance(models, str) else f"one {type(models).__name__}"
        raise InvalidValue(f"`models` must be a mapping from names to models, or a list; got {got}.", argument="models")
    listed = list(models)
    if listed and all(isinstance(model, str) for model in listed):
        return dict(zip(unique_names(listed), listed, strict=True))
    return {str(place): model for place, model in enumerate(listed)}
