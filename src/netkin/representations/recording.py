"""Recording: what chosen layers gave in the latest forward, safe from whatever happens to it later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import ForwardError
from netkin.representations.calls import watching
from netkin.representations.layers import Spec, choose, spoken
from netkin.representations.nesting import at, path_to_tensor


@contextmanager
def recording(
    model: nn.Module, layers: Spec = None, reduce: Callable[[str, Tensor], Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Give a mapping that holds, after each forward of `model`, the outputs of the chosen layers by name.

    It is emptied when the next forward begins. A layer that ran several times gives ``relu``, ``relu#2``, ``relu#3``;
    one that did not run is absent. Of an output with several parts the first floating tensor is kept, in mappings and
    dataclasses ``last_hidden_state`` or ``logits`` before others. It is a copy, so that an in-place ReLU after the
    layer does not change it. `reduce` is called with the name and the tensor while the model runs, and what it returns
    is kept instead. Modules under ``torch.compile`` run uncompiled inside the `with`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
        >>> with recording(model, ["0"]) as outputs:
        ...     _ = model(torch.ones(3, 4))
        >>> outputs["0"].shape
        torch.Size([3, 8])
    """
    outputs: dict[str, Any] = {}
    with watching(model, choose(model, layers), keeping(outputs, reduce), begin=outputs.clear):
        yield outputs


def keeping(outputs: dict[str, Any], reduce: Callable[[str, Tensor], Any] | None) -> Callable[[str, Any], None]:
    """Return a reaction to a layer's call that puts its tensor, reduced or copied, into `outputs`."""

    def keep(name: str, output: Any) -> None:
        tensor = main_tensor(output, name)
        outputs[name] = tensor.clone() if reduce is None else apart(reduce(name, tensor), tensor)

    return keep


def main_tensor(output: Any, name: str) -> Tensor:
    """Return the tensor that represents the output of layer `name`: the first floating one in it."""
    path = () if isinstance(output, Tensor) and output.is_floating_point() else path_to_tensor(output)
    if path is None:
        raise ForwardError(
            f"{spoken(name)} gives no floating tensor to record, but {type(output).__name__}; choose another layer."
        )
    tensor = at(output, path)
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "sparse"
        raise ForwardError(
            f"{spoken(name)} gives a {kind} tensor, and only dense ones can be recorded; choose a layer after it."
        )
    return tensor


def apart(value: Any, output: Tensor) -> Any:
    """Return `value`, copied if it is a tensor that shares its memory with `output`."""
    if isinstance(value, tuple):
        parts = [apart(part, output) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if not isinstance(value, Tensor) or value.device != output.device or value.layout != torch.strided:
        return value
    same = value.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return value.clone() if same else value
