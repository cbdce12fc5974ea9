"""Cutting: run a model up to a layer, run it from a layer on, or put something else in a layer's place.

Unlike `activations`, these leave gradients and training mode as the caller set them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from netkin.errors import ForwardError, UnknownName
from netkin.representations.guests import model_lock
from netkin.representations.hooks import main_tensor, watching
from netkin.representations.inputs import Forward, feed
from netkin.representations.layers import children, choose, layer_label, modules, split_call
from netkin.representations.nesting import copied, path_to_tensor, replaced_at


class _Reached(BaseException):
    """Stops a forward once the layer has run; not an `Exception`, so that no model catches it on the way."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


def run_until(model: nn.Module, layer: str, batch: Any, forward: Forward | None = None) -> Any:
    """Return the output of `layer` for `batch`; what comes after it is not computed.

    Of a layer that runs several times the first call is meant; ``"relu#2"`` is the second.
    """

    def stop(name: str, output: Any) -> None:
        raise _Reached(output)

    try:
        with model_lock(), watching(model, [_one_call(model, layer)], stop):
            feed(model, batch, forward)
    except _Reached as reached:
        return reached.output
    raise _did_not_run(layer)


def run_from(model: nn.Module, layer: str, output: Any, batch: Any, forward: Forward | None = None) -> Any:
    """Return the model's output for `batch` as if `layer` had given `output`.

    `output` is what `run_until` returns, or a tensor that takes the place of the first floating tensor in it. Where the
    way from the model to the layer leads through ``nn.Sequential`` only, `output` goes straight to what comes next and
    nothing before it is computed; elsewhere the whole model runs. `output` itself is never changed.
    """
    name = _one_call(model, layer)
    if forward is None and _is_in_sequence(model, layer):
        return _tail(modules(model), layer, copied(output))
    ran = []

    def put(_: str, original: Any) -> Any:
        ran.append(True)
        return _in_place_of(original, copied(output))

    with model_lock(), watching(model, [name], put):
        result = feed(model, batch, forward)
    if not ran:
        raise _did_not_run(layer)
    return result


@contextmanager
def replacing(model: nn.Module, layer: str, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with`, the layer gives ``function(output)``; of an output in parts only the first floating tensor.

    ``"relu"`` means every call of `relu`, ``"relu#2"`` only the second in a forward.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> with replacing(model, "0", lambda output: -output.abs()):
        ...     model(torch.ones(2, 4)).max().item()
        0.0
    """
    known_layer(model, layer)

    def put(name: str, original: Any) -> Any:
        # copied, since a later in-place step would otherwise write into what the function keeps
        return _in_place_of(original, function(main_tensor(original, name)).clone())

    with watching(model, [layer], put):
        yield


def _in_place_of(original: Any, output: Any) -> Any:
    path = path_to_tensor(original)
    if not isinstance(output, Tensor) or path is None:
        return output
    return replaced_at(original, path, output)


def _one_call(model: nn.Module, layer: str) -> str:
    return layer if known_layer(model, layer)[1] else f"{layer}#1"


def known_layer(model: nn.Module, layer: str) -> tuple[str, int | None]:
    """Return the module's name and the call that `layer` means, if it is one layer of the model."""
    stem, call = split_call(layer)
    if stem not in modules(model):
        matching = choose(model, layer)
        raise UnknownName(f"{layer!r} stands for {len(matching)} layers, and one is needed; choose {matching[0]!r}.")
    return stem, call


def _is_in_sequence(model: nn.Module, layer: str) -> bool:
    """Tell whether what follows `layer` is a plain run through the rest of nested `nn.Sequential`s."""
    known = modules(model)
    if layer not in known:
        return False
    above = [known[name] for name in _names_above(layer)]
    once = sum(module is known[layer] for module in known.values()) == 1
    return once and all(type(module).forward is nn.Sequential.forward and not _is_hooked(module) for module in above)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _names_above(layer: str) -> list[str]:
    """Return the names of the modules that enclose `layer`, the nearest first."""
    keys = layer.split(".") if layer else []
    return [".".join(keys[:depth]) for depth in reversed(range(len(keys)))]


def _tail(known: dict[str, nn.Module], layer: str, output: Any) -> Any:
    """Return what the rest of the enclosing sequences make of `output`."""
    for above in _names_above(layer):
        key = layer.removeprefix(above).strip(".").split(".")[0]
        steps = children(known[above])
        for step in list(steps)[list(steps).index(key) + 1 :]:
            output = steps[step](output)
    return output


def _did_not_run(layer: str) -> ForwardError:
    return ForwardError(f"{layer_label(layer)} did not run in the forward of this batch; choose a layer that does.")
