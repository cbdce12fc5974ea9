"""Models by name: `BUILDER[@WEIGHTS]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from netkin.errors import SourceError
from netkin.sources.architectures import architecture, seeded
from netkin.sources.functions import call, find_function
from netkin.sources.weights import load_weights


def load_model(spec: str) -> nn.Module:
    """Return the model that `spec` names, on the CPU and in evaluation mode.

    `spec` is `BUILDER[@WEIGHTS]`. The builder is `netkin:NAME`, one of our reference architectures, or
    `package.module:function`, which is called without arguments and may lie in the current directory. The weights are a
    `.safetensors` file or a state dict saved by torch. Without weights the model has fresh ones, always drawn from seed
    0; torch's own random numbers go on undisturbed.

    Example:
        >>> load_model("netkin:digits").fc
        Linear(in_features=64, out_features=10, bias=True)
    """
    # no builder's name holds an "@", while a path may
    builder, at, weights = spec.partition("@")
    if at and not weights:
        raise SourceError(f"{spec!r} names no weights after the '@'; write {spec + 'FILE'!r} or leave the '@' out.")
    model = seeded(_builder(builder))
    if weights:
        load_weights(model, Path(weights).expanduser(), name=builder)
    return model.eval()


def _builder(name: str) -> Callable[[], nn.Module]:
    prefix, colon, rest = name.partition(":")
    if not colon or not rest:
        raise SourceError(_not_a_builder(name))
    if prefix == "netkin":
        return architecture(rest)
    return partial(_called, find_function(name, known=["netkin"]), name)


def _called(function: Callable[[], nn.Module], name: str) -> nn.Module:
    model = call(function, name)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{name!r} must return a torch.nn.Module; it returned an object of type {type(model).__name__}."
        )
    return model


def _not_a_builder(name: str) -> str:
    if Path(name).is_file():
        return (
            f"{name!r} is a file, and weights alone do not say what network they belong to; "
            f"write {'netkin:tiny10@' + name!r} or {'package.module:function@' + name!r}."
        )
    return (
        f"{name!r} is no model; write BUILDER[@WEIGHTS], where BUILDER is `netkin:tiny10` or `package.module:function`."
    )
