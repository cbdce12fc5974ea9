"""Gradients: how the loss of each example changes with a layer's output, at any layers in one backward pass.

The loss of an example depends on no other example in evaluation mode, so that the gradient of the sum of all losses
holds the gradient of every example's own loss in that example's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, log_softmax

from netkin.arrays import HALF, at_least_single, label_tensor
from netkin.errors import ForwardError, InvalidValue, NetkinError, ShapeError, require_listed
from netkin.representations.hooks import copied, leaves, main_tensor, parts, path_to_tensor, replaced_at
from netkin.representations.inputs import labels_of
from netkin.representations.layers import layer_label, unwrapped
from netkin.settings import plain_recurrence

TARGETS = ("tempered", "labels", "predicted")
OUTPUTS = ("categorical", "multilabel", "continuous")
IGNORED = -100  # the label of tokens that have no loss, as in torch

ExampleLosses = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Target:
    """The loss whose gradient is taken, one number for each example.

    `kind` "tempered" expects the loss under ``q ∝ p^β``, the model's own prediction made flatter, which is held
    constant: at the logits of a softmax the gradient is ``p - q``. "labels" takes the labels of the data, "predicted"
    the most likely class; a function ``loss(outputs, labels)`` gives the losses itself. `outputs` says what the model's
    outputs are: logits of one class of many ("categorical"), of many classes at once ("multilabel"), or numbers. Of a
    model that ends in a softmax the logarithms of its probabilities are the logits (see `class_logits`).

    Under a Gaussian around the output, flatter or not, the mean of y is the output, and so the expected gradient is
    zero: continuous outputs have no tempered target.
    """

    kind: str | ExampleLosses = "tempered"
    beta: float = 0.5
    outputs: str = "categorical"

    def __post_init__(self) -> None:
        if not callable(self.kind):
            require_listed("target", self.kind, TARGETS)
        require_listed("kind of outputs", self.outputs, OUTPUTS, "outputs")
        if not 0 <= self.beta < 1:
            raise InvalidValue(
                f"`beta` must be at least 0 and below 1; got {self.beta:g}. At 1 the prediction is not tempered, and "
                "every gradient is zero.",
                argument="beta",
            )
        if self.outputs == "continuous" and self.kind in ("tempered", "predicted"):
            raise InvalidValue(
                f"with continuous outputs the {self.kind} gradient of every example is zero, since the outputs are the "
                "mean of what they predict; pass target='labels', or a function of (outputs, labels).",
                argument="target",
            )

    @property
    def name(self) -> str:
        """What it is, as text for the provenance of a result."""
        if callable(self.kind):
            return getattr(self.kind, "__qualname__", type(self.kind).__name__)
        return f"tempered by {self.beta:g}" if self.kind == "tempered" else self.kind

    def losses(self, outputs: Tensor, labels: Any, mask: Tensor | None = None) -> Tensor:
        """Return the loss of each example; of tokens the sum, without those that `mask` leaves out."""
        if callable(self.kind):
            losses = self.kind(outputs, labels)
            if not isinstance(losses, Tensor) or losses.shape != (len(outputs),):
                got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
                raise ShapeError(
                    f"the target {self.name!r} must give one loss for each of {len(outputs)} examples; it gave {got}.",
                    argument="target",
                )
            return losses
        if self.outputs == "categorical":
            outputs = class_logits(_classes_last(outputs))
        outputs = outputs.to(at_least_single(outputs.dtype))
        if self.outputs == "continuous":
            return (outputs - _like(labels, outputs)).square().flatten(1).sum(1) / 2
        if self.outputs == "multilabel":
            return self._of_many(outputs, labels).flatten(1).sum(1)
        return self._of_classes(outputs, labels, mask)

    def _of_many(self, logits: Tensor, labels: Any) -> Tensor:
        wanted = (self.beta * logits).sigmoid() if self.kind == "tempered" else (logits > 0).to(logits)
        wanted = _like(labels, logits) if self.kind == "labels" else wanted.detach()
        return binary_cross_entropy_with_logits(logits, wanted, reduction="none")

    def _of_classes(self, logits: Tensor, labels: Any, mask: Tensor | None) -> Tensor:
        if logits.shape[-1] < 2:
            raise ShapeError(
                f"the model gives {logits.shape[-1]} output for each example, and one class of one is certain; pass "
                "outputs='multilabel' for the logit of yes or no, or outputs='continuous'."
            )
        if self.kind == "tempered":
            wanted = (self.beta * logits).softmax(-1).detach()
            losses = -(wanted * log_softmax(logits, -1)).sum(-1)
        else:
            chosen = logits.argmax(-1) if self.kind == "predicted" else _classes(labels, logits)
            flat = cross_entropy(logits.flatten(0, -2), chosen.flatten(), reduction="none", ignore_index=IGNORED)
            losses = flat.reshape(logits.shape[:-1])
        if mask is not None and losses.shape == mask.shape:
            losses = losses.masked_fill(~mask.to(losses.device), 0)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses


class Taps:
    """Where gradients are taken in a forward pass: a layer's output is stored, and the model continues with a copy.

    The copy keeps in-place steps after the layer away from what was noted.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target]):
        self.model, self.targets = unwrapped(model), list(targets)
        self.severed: dict[str, str] = {}  # why layers have no gradient, by name
        self._noted: dict[str, Tensor] = {}
        self._unchecked = True  # whether one example's loss depends on another example

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the model build a graph while the `with` lasts; what is noted is forgotten afterwards."""
        recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        # in evaluation mode cuDNN's recurrent layers have no backward pass
        with torch.inference_mode(False), torch.enable_grad(), plain_recurrence() if recurrent else nullcontext():
            try:
                yield
            finally:
                self._noted = {}

    @staticmethod
    def without_inference(batch: Any) -> Any:
        """Return a batch that a graph can hold: with copies of tensors that were made in inference mode."""
        strange = any(isinstance(leaf, Tensor) and leaf.is_inference() for _, leaf in leaves(batch))
        return copied(batch) if strange else batch

    def take(self, name: str, output: Any) -> Any:
        """Note the tensor of a layer's output and return the output with which the model is to go on."""
        path = path_to_tensor(output)
        if path is None:
            return output
        tensor = main_tensor(output, name)
        self._noted[name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return replaced_at(output, path, self._noted[name].clone())

    def gradients_at_layers(
        self, output: Any, batch: Any, axes: Mapping[str, int], mask: Tensor | None = None
    ) -> dict[Target, dict[str, Tensor]]:
        """Return for each target the gradients at the layers that were noted, without those that it does not reach.

        `axes` are those of the examples in the layers' outputs.
        """
        noted, logits, labels = self._noted, logits_of(output), labels_of(batch)
        gradients: dict[Target, dict[str, Tensor]] = {}
        for target in self.targets:
            losses = target.losses(logits, labels, mask)
            if not losses.requires_grad:
                raise ForwardError("the model's output has no gradient: a part of it was computed without a graph.")
            if self._unchecked:
                self._require_uncoupled(losses, noted, axes)
            gradients[target] = _gradients_at(losses.sum(), noted)
            for name in noted.keys() - gradients[target].keys():
                self.severed[name] = f"no path leads from {layer_label(name)} to the loss"
        self._unchecked = self._unchecked and len(logits) < 2
        return gradients

    def _require_uncoupled(self, losses: Tensor, noted: Mapping[str, Tensor], axes: Mapping[str, int]) -> None:
        """Refuse a model in which the loss of one example depends on another example."""
        if not bool(losses.isfinite().all()):
            return  # NaN would look like a mixture; it is refused with its layer when the rows are taken
        # sets between which halves, neighbours and examples at regular distances are parted: the Thue–Morse sequence
        chosen = torch.tensor([place.bit_count() % 2 == 1 for place in range(len(losses))], device=losses.device)
        for name, gradient in _gradients_at(losses[chosen].sum(), noted).items() if bool(chosen.any()) else ():
            rows = gradient.movedim(axes[name], 0)
            if len(rows) == len(chosen) and bool(rows[~chosen.to(rows.device)].any()):
                raise ForwardError(
                    f"after {layer_label(name)} the examples of a batch are mixed{_mixers(self.model)}, so that none "
                    "has a gradient of its own; let the model treat each example alone, as batch norm with running "
                    "statistics does."
                )


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output: the tensor itself, the part of that name, or the first floating one."""
    inside = parts(output)
    logits = inside.get("logits") if "logits" in inside else main_tensor(output, "")
    if not isinstance(logits, Tensor) or logits.ndim < 1 or "last_hidden_state" in inside:
        raise ForwardError(
            f"the model gives no logits, but {', '.join(map(str, inside)) or type(output).__name__}; pass a model with "
            "a head, or `forward=`, a function of (model, batch) that returns the logits."
        )
    return logits.unsqueeze(-1) if logits.ndim == 1 else logits


def class_logits(outputs: Tensor) -> Tensor:
    """Return a classifier's outputs as logits: of probabilities, as after `nn.Softmax`, their logarithms.

    These differ from the logits before the softmax by a constant for each row, on which no softmax depends.

    Example:
        >>> class_logits(torch.tensor([[0.25, 0.75]])).softmax(-1)
        tensor([[0.2500, 0.7500]])
    """
    if not are_probabilities(outputs):
        return outputs
    zeros = int((outputs == 0).sum())
    if zeros:
        raise ForwardError(
            f"the model gives {zeros:,} probabilities of exactly 0 among {outputs.numel():,}, whose logits can't be "
            "known; pass a model without the softmax at its end, or `forward=`, a function of (model, batch) that "
            "returns the logits."
        )
    return outputs.to(at_least_single(outputs.dtype)).log()


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether every row, along the last axis, is 0 or more everywhere and sums to 1."""
    rows = outputs.detach()
    tolerance = 1e-2 if rows.dtype in HALF else 1e-4  # of a sum of rounded numbers
    sums = rows.sum(-1, dtype=at_least_single(rows.dtype))
    return bool(((rows >= 0).all(-1) & ((sums - 1).abs() < tolerance)).all())


@contextmanager
def pulling() -> Iterator[None]:
    """Raise a clear error where a gradient can't be taken inside the `with`, as after a step in place."""
    try:
        yield
    except RuntimeError as fault:
        if isinstance(fault, (NetkinError, torch.OutOfMemoryError)):
            raise
        said = str(fault).strip().partition("\n")[0].partition(". Hint")[0].rstrip(".")
        raise ForwardError(f"the gradient can't be taken: {said}.") from fault


def _gradients_at(total: Tensor, noted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of `total` at the noted tensors that it depends on."""
    with pulling():
        gradients = torch.autograd.grad(total, list(noted.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(noted, gradients, strict=True) if gradient is not None}


def _mixers(model: nn.Module) -> str:
    """Return the first module that is known to mix examples, for a sentence; empty if none is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (module.training or module.running_mean is None):
            return f" ({layer_label(name)}, {type(module).__name__}, takes the statistics of the batch)"
    return ""


def _classes_last(outputs: Tensor) -> Tensor:
    """Return logits with the classes as the last axis: of maps n × classes × space they are the second."""
    return outputs.movedim(1, -1) if outputs.ndim > 3 else outputs


def _classes(labels: Any, logits: Tensor) -> Tensor:
    """Return labels as class numbers that fit the logits, or refuse them."""
    numbers = _require_labels(labels).to(logits.device)
    if numbers.is_floating_point() or numbers.is_complex():
        raise InvalidValue(f"labels of classes are whole numbers; got {numbers.dtype}.", argument="data")
    if numbers.shape != logits.shape[:-1]:
        raise ShapeError(
            f"the labels have shape {tuple(numbers.shape)}, and the logits ask for {tuple(logits.shape[:-1])}.",
            argument="data",
        )
    numbers, valid = numbers.long(), numbers != IGNORED
    if bool(((numbers < 0) | (numbers >= logits.shape[-1]))[valid].any()):
        low, high = int(numbers[valid].min()), int(numbers[valid].max())
        raise InvalidValue(
            f"the labels run from {low} to {high}, and the model has {logits.shape[-1]} classes, 0 to "
            f"{logits.shape[-1] - 1}; give labels of its own classes, or another `target`.",
            argument="data",
        )
    return numbers


def _like(labels: Any, outputs: Tensor) -> Tensor:
    values = _require_labels(labels).to(outputs)
    if values.numel() != outputs.numel() or len(values) != len(outputs):
        raise ShapeError(f"the labels have shape {tuple(values.shape)}, and the outputs {tuple(outputs.shape)}.")
    return values.reshape(outputs.shape)


def _require_labels(labels: Any) -> Tensor:
    if labels is None:
        raise InvalidValue(
            "target='labels' needs labels, and the batches hold none; give batches of (inputs, labels).",
            argument="data",
        )
    return label_tensor(labels)
