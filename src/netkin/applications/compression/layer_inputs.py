"""What layers are fed: the moments of their inputs, against the logits or the input of another model's layer.

Every position of a feature map is a row, and every valid token of a sequence; the logits of an example are repeated for
each of its rows. A layer that runs several times in a forward pass gives the rows of all its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.experiment import Experiment
from netkin.arrays import exact_products, require_finite
from netkin.errors import ForwardError, MemoryLimit, ShapeError
from netkin.identity import DataDigest
from netkin.memory import format_bytes, free_memory
from netkin.representations import batches_of, inference_mode_of
from netkin.representations.hooks import apart, main_tensor, uncompiled
from netkin.representations.inputs import attention_mask, call, length_if_known, prepare_batch, reported_batches
from netkin.representations.layers import layer_label, modules
from netkin.statistics import LayerMoments, Moments


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


def collected(model: nn.Module, layers: Sequence[str], other: nn.Module | None, experiment: Experiment) -> Inputs:
    """Return the moments of what layers are fed, from one pass; against the logits where there is no other model."""
    beside = "logits" if other is None else "other model"
    found = Inputs(LayerMoments([([name], [f"{name} ({beside})"]) for name in layers]), beside)
    subjects = [model] if other is None else [model, other]
    batches = reported_batches(experiment.data, experiment.examples, "reading inputs")
    with ExitStack() as stack:
        stack.enter_context(inference_mode_of(*subjects, exact=True))
        readers = [stack.enter_context(_reading(subject, layers, experiment)) for subject in subjects]
        for number, batch in enumerate(batches):
            readings = [read(batch) for read in readers]
            with exact_products():
                rows = _rows(readings, layers, beside, number)
                if not number:
                    _require_memory(rows)
                found.statistic.update(rows)
            _learn(found, readings[0])
            length = length_if_known(batch) or 0
            found.digest.update(batch, range(found.digest.count, found.digest.count + length))
    return found


def run_order(model: nn.Module, layers: Sequence[str], experiment: Experiment) -> list[str]:
    """Return the layers in the order in which they first run."""
    with inference_mode_of(model), _reading(model, layers, experiment) as read:
        return list(read(next(batches_of(experiment.data))).calls)


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


def _require_memory(rows: Mapping[str, Tensor]) -> None:
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
def _reading(model: nn.Module, names: Sequence[str], experiment: Experiment) -> Iterator[Callable[[Any], Reading]]:
    """Inside the `with`, give a function that runs the model on a batch and tells what the layers were fed."""
    calls: dict[str, list[LayerCall]] = {}
    known = modules(model)

    def read(batch: Any) -> Reading:
        calls.clear()
        batch = prepare_batch(model, batch, experiment.transform)
        output = call(model, batch, experiment.forward)
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
