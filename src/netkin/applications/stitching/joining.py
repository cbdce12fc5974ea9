"""Joining: the head of one model, a transformation, and the tail of another, as one ordinary module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from netkin.applications.stitching.ends import Meeting, Pair
from netkin.applications.stitching.matching import LinearMap
from netkin.applications.stitching.transformations import Transformation
from netkin.arrays import HALF
from netkin.comparing.subjects import lent
from netkin.errors import ForwardError, ValueFault
from netkin.representations.cutting import Tail, Traces, agrees, reaches_around, run_until, tail
from netkin.representations.guests import evaluating, guest
from netkin.representations.hooks import main_tensor
from netkin.representations.inputs import Forward, device_of, dtype_of, feed


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

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the output of the second model for what the first makes of the inputs.

        Both models get them as they are given here. A single one may also be a batch, which is fed as `nk.stitch` does:
        of a tuple the first element, a mapping as keywords without its labels.
        """
        if len(inputs) == 1 and not keywords:
            return self.finish(self.transformation(self.begin(inputs[0])), inputs[0])
        batch = (inputs, keywords)
        return self.finish(self.transformation(self.begin(batch, _called)), batch, _called)

    def begin(self, batch: Any, forward: Forward | None = None) -> Tensor:
        """Return what the first model gives at its layer; nothing after it is computed."""
        with evaluating(self.a):
            given = run_until(self.a, self.layer_a, batch, forward)
        return main_tensor(given, self.layer_a).to(self.transformation.shift)

    def finish(self, output: Tensor, batch: Any, forward: Forward | None = None) -> Any:
        """Return what the second model makes of `output` at its layer."""
        given = dtype_of(self.b)
        if given in HALF:  # the transformation is more precise, so that training can take small steps
            output = output.to(given)
        with evaluating(self.b), _differentiable(self.b):
            return self.tail(output, batch, forward)

    @property
    def tail(self) -> Tail:
        """What the second model does after its layer."""
        self.cut()
        return self._tail[0]

    def cut(self) -> None:
        """Cut the second model now, unless that was done: once it has hooks it can't be."""
        if self._tail:
            return
        with evaluating(self.b):  # what depends on the mode is fixed when the model is traced
            found = tail(self.b, self.layer_b)
        uncut = found.graph is not None and not self.cuts
        self._tail.append(Tail(self.layer_b, self.b, None, "its cut gave other numbers") if uncut else found)

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


def stitched_network(
    a: nn.Module,
    b: nn.Module,
    pair: Pair,
    linear: LinearMap,
    meeting: Meeting,
    *,
    rank: int | None = None,
    cuts: bool = True,
) -> Stitched:
    """Return layers of two models joined by a map, which is where `b` is, in the precision of `b`, or float32 at least.

    With `rank` the map is a bottleneck; `cuts` tells whether `b` can be cut there (see `Cutting`).
    """
    given = dtype_of(b)
    transformation = Transformation(linear, meeting, rank=rank)
    transformation.to(device_of(b), torch.float32 if given in HALF else given)
    transformation.set(linear)  # again, where it may be float64 by now
    return Stitched(a, pair[0], b, pair[1], transformation, cuts=cuts)


@contextmanager
def both_lent(a: nn.Module, b: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Lend two models to `device` while the `with` lasts."""
    with ExitStack() as stack:
        for model in [a] if a is b else [a, b]:
            stack.enter_context(lent(model, device))
        yield


def _called(model: nn.Module, batch: Any) -> Any:
    inputs, keywords = batch
    return model(*inputs, **keywords)


def _differentiable(model: nn.Module) -> AbstractContextManager[Any]:
    """Let gradients go back through recurrent layers: in evaluation mode cuDNN's can't, torch's own can."""
    recurrent = torch.is_grad_enabled() and any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


class Cutting:
    """Tells after which layers `b` can be cut: the tail then gives the model's own numbers on a batch of few examples.

    A layer with a path around it is refused: the model's own features would reach its output beside the stitch.
    """

    def __init__(self, b: nn.Module, batch: Any, name: str = "b"):
        self.b, self.batch, self.name = b, batch, name
        self._traces: Traces = {}

    @cached_property
    def _whole(self) -> Any:
        return feed(self.b, self.batch)

    def is_true(self, layer: str) -> bool:
        """Tell whether the model can be cut after a layer."""
        with guest(self.b, exact=True):
            output = main_tensor(run_until(self.b, layer, self.batch), layer)
            found = tail(self.b, layer, traces=self._traces)
            if found.graph is not None and agrees(found, output, self.batch, self._whole):
                return True
            if layer and reaches_around(self.b, layer, output, self.batch):
                raise ValueFault(
                    f"layer {layer!r} of {self.name!r} has a path around it, by which its own features would reach its "
                    f"output beside the stitch; {_advice(self.b, layer, self.batch)}."
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
