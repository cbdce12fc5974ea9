"""Joining: the head of one model, a transformation, and the tail of another, as one ordinary module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.transformations import Transformation
from netkin.errors import ForwardError, ValueFault
from netkin.representations.cutting import run_until
from netkin.representations.feeding import dtype_of
from netkin.representations.guests import evaluating, guest
from netkin.representations.recording import main_tensor
from netkin.representations.tails import Tail, agrees, reaches_around, tail

HALF = (torch.float16, torch.bfloat16)


class Stitched(nn.Module):
    """The head of `a` up to `layer_a`, the transformation, and what `b` does after `layer_b`.

    Both models run in evaluation mode, whatever their own mode is and `train()` says: a stitch must not move their
    statistics. Afterwards they have their own mode again.
    """

    def __init__(
        self,
        a: nn.Module,
        layer_a: str,
        b: nn.Module,
        layer_b: str,
        transformation: Transformation,
        *,
        cuts: bool = True,
    ):
        super().__init__()
        self.a, self.b, self.transformation = a, b, transformation
        self.layer_a, self.layer_b, self.cuts = layer_a, layer_b, cuts
        self._tail: list[Tail] = []  # in a list, so that it is no child of this module

    def forward(self, inputs: Any = None, **keywords: Any) -> Any:
        """Return the output of the second model for what the first makes of the inputs."""
        batch = keywords or inputs
        return self.finish(self.transformation(self.begin(batch)), batch)

    def begin(self, batch: Any) -> Tensor:
        """Return what the first model gives at its layer; nothing after it is computed."""
        with evaluating(self.a):
            return main_tensor(run_until(self.a, self.layer_a, batch), self.layer_a).to(self.transformation.shift)

    def finish(self, output: Tensor, batch: Any) -> Any:
        """Return what the second model makes of `output` at its layer."""
        given = dtype_of(self.b)
        if given in HALF:  # the transformation is more precise, so that training can take small steps
            output = output.to(given)
        with evaluating(self.b), _differentiable(self.b):
            return self.tail(output, batch)

    @property
    def tail(self) -> Tail:
        """What the second model does after its layer."""
        if not self._tail:
            with evaluating(self.b):  # what depends on the mode is fixed when the model is traced
                found = tail(self.b, self.layer_b)
            uncut = found.graph is not None and not self.cuts
            self._tail.append(Tail(self.layer_b, self.b, None, "its cut gave other numbers") if uncut else found)
        return self._tail[0]

    @property
    def how(self) -> str:
        """How both models were cut and what is wasted, in words."""
        met = self.transformation.meeting.words
        head = f"first model stopped after {self.layer_a!r}, nothing after it is computed"
        return "; ".join(filter(None, [head, met, f"second model {self.tail.how}"]))

    def train(self, mode: bool = True) -> Stitched:
        """Set the mode of the transformation alone."""
        self.training = mode
        self.transformation.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tail": []}  # made again from the models when needed

    def _apply(self, fn: Any, recurse: bool = True) -> Stitched:
        self._tail.clear()  # it may hold tensors that `fn` replaces
        super()._apply(fn, recurse)
        return self


def precise(b: nn.Module) -> torch.dtype | None:
    """Return the precision of a stitch into `b`: that of its weights, but no less than float32."""
    given = dtype_of(b)
    return torch.float32 if given in HALF else given


def _differentiable(model: nn.Module) -> AbstractContextManager[Any]:
    """Let gradients go back through recurrent layers: in evaluation mode cuDNN's can't, torch's own can."""
    recurrent = torch.is_grad_enabled() and any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


def cuts_truly(b: nn.Module, layer: str, batch: Any, name: str = "b") -> bool:
    """Tell whether `b` can be cut after `layer`: the tail then gives the model's own numbers.

    A layer with a path around it is refused: the model's own features would reach its output beside the stitch.
    """
    with guest(b):
        output = main_tensor(run_until(b, layer, batch), layer)
        found = tail(b, layer)
        if found.graph is not None and agrees(found, output, batch):
            return True
        if layer and reaches_around(b, layer, output, batch):
            raise ValueFault(
                f"layer {layer!r} of {name!r} has a path around it, by which its own features would reach its output "
                f"beside the stitch; {_advice(b, layer, batch)}."
            )
    return False


def _advice(b: nn.Module, layer: str, batch: Any) -> str:
    """Return what to choose instead: the nearest module around `layer` that has no path around itself."""
    above = layer.rpartition(".")[0]
    while above:
        with suppress(ForwardError):  # a list of modules does not run itself
            output = main_tensor(run_until(b, above, batch), above)
            if not reaches_around(b, above, output, batch):
                return f"choose {above!r}, which encloses both"
        above = above.rpartition(".")[0]
    return "choose a layer that all paths lead through"


def frozen(*models: nn.Module) -> list[tuple[Tensor, bool]]:
    """Switch off the gradients of all weights and return what was there before, for `thawed`."""
    before: list[tuple[Tensor, bool]] = [
        (weight, weight.requires_grad) for model in models for weight in model.parameters()
    ]
    for weight, _ in before:
        weight.requires_grad_(False)
    return before


def thawed(before: list[tuple[Tensor, bool]]) -> None:
    """Give all weights the gradient flags they had."""
    for weight, flag in before:
        weight.requires_grad_(flag)
