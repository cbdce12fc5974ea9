"""Activations and gradients: layer outputs over data, and how losses change with them, as matrices.

`ModelReading` runs a model over data, once for both; `activations` and `gradients` return what it gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from netkin.errors import ForwardError, InvalidValue, ShapeError
from netkin.identity import in_words, weights_digest
from netkin.identity.data import contents
from netkin.progress import ProgressOption
from netkin.representations.batch_axis import LayerFacts
from netkin.representations.gradients import ExampleLosses, Taps, Target
from netkin.representations.hooks import inference_mode_of
from netkin.representations.inputs import (
    Forward,
    Transform,
    attention_mask,
    batch_length,
    batches_of,
    inputs_of,
    model_precision,
    pick,
    reported_batches,
)
from netkin.representations.layer_recorder import Recorder
from netkin.representations.layers import Spec, layer_label
from netkin.representations.shapes import Shape, require_known_layers
from netkin.sources.names import by_name
from netkin.sources.recordings import CONTENT, TOKEN_HASHES, RecordedRows, RecordingWriter, recorded, token_hash

RowsByLayer = dict[str, Tensor]  # by layer
Take = Callable[[Any, RowsByLayer, RowsByLayer], None]


@overload
def activations(
    model: nn.Module | str, layers: Spec = None, data: Any = None, *, save: None = None, **options: Any
) -> dict[str, Tensor]: ...
@overload
def activations(
    model: nn.Module | str, layers: Spec = None, data: Any = None, *, save: str | os.PathLike[str], **options: Any
) -> RecordedRows: ...
@by_name(models="model", data="data")  # type: ignore[misc]  # the overloads leave out what both share
def activations(
    model: nn.Module,
    layers: Spec = None,
    data: Any = None,
    *,
    shape: Shape | Mapping[str, Shape] = None,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    device: torch.device | str | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
    save: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> dict[str, Tensor] | RecordedRows:
    """Return what the chosen layers give for all of `data`, one matrix per layer, on the CPU or on `device`.

    `data` is a loader, any iterable of batches, or one array of inputs. A default layer that does not run, that
    gives no floating tensor (but None, a number, or nothing), or whose output does not hold the examples (a table of
    positions) is left out; one chosen by name is refused.

    With `save` nothing is held but a shard: rows are written into a folder, with the numbers and the digests of their
    examples, and what comes back is an `nk.recorded`, a side of `nk.compare`. A call that was interrupted is continued
    by the same call.

    Args:
        model: the model, which is left as it was.
        layers: names, globs, module types or a list of those; None for the default layers.
        data: a loader, an iterable of batches, or one array of inputs.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the matrices are put; None for the CPU.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32, as torch does in convolutions
            unless set otherwise.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        save: a folder for the rows, in shards.
        overwrite: whether a recording that is in that folder may be deleted.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: tuple(rows.shape) for name, rows in activations(model, ["0", "2"], torch.ones(5, 4)).items()}
        {'0': (5, 8), '2': (5, 2)}
    """
    require_known_layers(shape, model)
    reading = ModelReading(model, None, shape, forward, transform, exact_model)
    if save is not None:
        _record(reading, data, layers, examples, progress, save, overwrite)
        return recorded(save)
    batches: list[RowsByLayer] = []

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        batches.append({name: rows.to(device or "cpu") for name, rows in features.items()})

    reading.run(take, data, layers, examples, progress)
    return _joined(batches)


def _record(
    reading: ModelReading,
    data: Any,
    layers: Spec,
    examples: int | None,
    progress: ProgressOption,
    save: str | os.PathLike[str],
    overwrite: bool,
) -> None:
    """Write what layers give for data into a folder; examples that are there already are checked and passed over."""
    facts = {
        "weights": weights_digest(reading.model),
        "layers": in_words(layers),
        "shape": in_words(reading.shape),
        "transform": in_words(reading.transform),
        "forward": in_words(reading.forward),
        "precision": model_precision(reading.model, exact=reading.exact_model),
    }
    writer = RecordingWriter(save, facts, overwrite)
    start = writer.examples

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        nonlocal start
        count, mask, tokens = batch_length(batch), attention_mask(batch), token_hashes(batch)
        beside = {"ids": start + np.arange(count), CONTENT: content_hashes(batch, count)}
        beside |= {} if tokens is None else {TOKEN_HASHES: tokens}
        lengths = None if mask is None else (torch.as_tensor(mask) != 0).sum(1).cpu().numpy()
        writer.add(features, beside, lengths)
        start += count

    left = None if examples is None else max(examples - start, 0)
    if left != 0:
        rest = data if start == 0 else _unwritten(data, np.concatenate(writer.done), writer.folder)
        if start == 0 or (rest := _peeked(rest)) is not None:
            reading.run(take, rest, layers, left, progress)
    writer.finish()


def _unwritten(data: Any, done: np.ndarray, folder: Path) -> Iterator[Any]:
    """Yield what data give after the examples that are written, which must be the same ones as before."""
    seen = 0
    for batch in batches_of(data):
        count = batch_length(batch)
        known = done[seen : seen + count]
        if len(known) and not np.array_equal(content_hashes(batch, count)[: len(known)], known):
            raise InvalidValue(
                f"the data are not those of the recording begun in {str(folder)!r}: examples {seen:,} to "
                f"{seen + len(known) - 1:,} are others; give the same data in the same order and batches, or "
                "`overwrite=True`.",
                argument="data",
            )
        seen += count
        if len(known) < count:
            yield pick(batch, list(range(len(known), count))) if len(known) else batch


def _peeked(batches: Iterator[Any]) -> Iterator[Any] | None:
    """Return batches, or None where there are none."""
    first = next(batches, None)
    return None if first is None else chain([first], batches)


def token_hashes(batch: Any) -> np.ndarray | None:
    """Return hashes of the tokens of each example of a batch that holds `input_ids`, without those of padding."""
    inputs = inputs_of(batch)
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if ids is None or torch.as_tensor(ids).is_floating_point() or torch.as_tensor(ids).ndim != 2:
        return None
    ids, mask = torch.as_tensor(ids).cpu(), attention_mask(batch)
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() != 0
    return np.array([token_hash(row[kept]) for row, kept in zip(ids, valid, strict=True)], np.int64)


def content_hashes(batch: Any, length: int) -> np.ndarray:
    """Return hashes of what a model is fed with for each example of a batch."""
    return contents(batch, length).cpu().numpy()


@by_name(models="model", data="data")
def gradients(
    model: nn.Module,
    layers: Spec = None,
    data: Any = None,
    *,
    target: str | ExampleLosses = "tempered",
    beta: float = 0.5,
    outputs: str = "categorical",
    shape: Shape | Mapping[str, Shape] = None,
    examples: int | None = None,
    forward: Forward | None = None,
    transform: Transform | None = None,
    device: torch.device | str | None = None,
    exact_model: bool = False,
    progress: ProgressOption = None,
) -> dict[str, Tensor]:
    """Return the gradient of each example's loss at the chosen layers' outputs, one matrix per layer, on the CPU.

    Rows and columns are those of `nk.activations`. Where a shape averages (`pool`, `mean`), gradients are summed: what
    a step of the averaged feature, made at all places alike, does to the loss. The model is in evaluation mode and left
    as it was; weights get no gradients.

    Args:
        model: the model, which is left as it was.
        layers: names, globs, module types or a list of those; None for the default layers.
        data: a loader, an iterable of batches, or one array of inputs; with target="labels" batches hold labels.
        target: "tempered", "labels", "predicted", or a function of (outputs, labels) that gives one loss an example.
        beta: the exponent by which the prediction is tempered, from 0 (all classes alike) to below 1.
        outputs: what the model gives: "categorical" logits, "multilabel" logits or "continuous" numbers.
        shape: what one example is, for all layers or by name; None for `pool` and `mean`.
        examples: how many examples to read; None for all.
        forward: a function ``forward(model, batch)`` that runs the model.
        transform: a function of the inputs of a batch.
        device: where the matrices are put; None for the CPU.
        exact_model: whether float32 in the model on a GPU must not be rounded to TF32.
        progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> {name: tuple(rows.shape) for name, rows in gradients(model, ["0", "2"], torch.ones(5, 4)).items()}
        {'0': (5, 8), '2': (5, 2)}
    """
    reading = ModelReading(model, Target(target, beta, outputs), shape, forward, transform, exact_model)
    batches: list[RowsByLayer] = []

    def take(batch: Any, features: RowsByLayer, gradients: RowsByLayer) -> None:
        batches.append({name: rows.to(device or "cpu") for name, rows in gradients.items()})

    reading.run(take, data, layers, examples, progress)
    return _joined(batches)


@dataclass(frozen=True)
class ModelReading:
    """How a model is read: the loss of the gradients, None for features alone, and what one example is.

    With `one_row` a layer that gives several rows for an example is refused.
    """

    model: nn.Module
    target: Target | None
    shape: Shape | Mapping[str, Shape] = None
    forward: Forward | None = None
    transform: Transform | None = None
    exact_model: bool = False
    one_row: bool = False

    def run(
        self, take: Take, data: Any, layers: Spec = None, examples: int | None = None, progress: ProgressOption = None
    ) -> dict[str, float]:
        """Run the model over data in evaluation mode, and return the rounding unit of each layer's outputs.

        Args:
            take: called with each batch, and with the features and gradients of its examples by layer. Default layers
                from which no path leads to the loss are in neither; named ones are refused.
            data: a loader, an iterable of batches, or one array of inputs.
            layers: names, globs, module types or a list of those; None for the default layers.
            examples: how many examples to read; None for all.
            progress: None for a bar in a terminal, False for nothing, or a function of (done, total, what).
        """
        taps = None if self.target is None else Taps(self.model, [self.target])
        recorder = Recorder(
            self.model, layers, shape=self.shape, forward=self.forward, transform=self.transform, taps=taps
        )
        with inference_mode_of(self.model, exact=self.exact_model), recorder.open():
            for batch in reported_batches(data, examples, "reading", progress):
                recorded = recorder(batch)
                recorder.require_finite(recorded, batch)
                features, gradients = recorded.rows, recorded.gradients.get(self.target, {})
                if taps is not None:
                    if taps.severed and not (recorder.by_default and gradients):
                        why = next(iter(taps.severed.values()))
                        raise ForwardError(f"{why}; choose layers that the model's output needs.")
                    features = {name: rows for name, rows in features.items() if name in gradients}
                if self.one_row:
                    _require_one_row(features, batch_length(batch), recorder.facts)
                take(batch, features, gradients)
        return {name: fact.resolution for name, fact in recorder.facts.items()}


def _require_one_row(features: RowsByLayer, count: int, facts: Mapping[str, LayerFacts]) -> None:
    for name, rows in features.items():
        if len(rows) != count:
            raise ShapeError(
                f"{layer_label(name)} gives {len(rows):,} rows for {count:,} examples with the shape "
                f"{facts[name].shape!r}, and one row is needed for each; choose 'pool', 'mean', 'cls' or 'flatten'."
            )


def _joined(batches: list[RowsByLayer]) -> RowsByLayer:
    """Return the rows of all batches, one after the other, by layer."""
    for name in batches[0]:
        widths = sorted({batch[name].shape[1:].numel() for batch in batches})
        if len({batch[name].shape[1:] for batch in batches}) > 1:
            raise ShapeError(
                f"{layer_label(name)} has {widths[0]} features in one batch and {widths[-1]} in another; pad all "
                "batches to one length, or choose a shape such as 'mean' or 'pool'."
            )
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
