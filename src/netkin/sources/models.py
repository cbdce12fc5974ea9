"""Models by name: `BUILDER[@WEIGHTS]`, `hf:DIR`, or the path of a `.pt2` file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

from netkin.errors import FileFault, SourceError, did_you_mean
from netkin.files import read_header
from netkin.sources.architectures import ARCHITECTURES, architecture, seeded
from netkin.sources.exported import load_exported
from netkin.sources.names import call, find_function
from netkin.sources.pretrained import load_huggingface
from netkin.sources.reading import refusing_unreadable
from netkin.sources.weights import load_weights

# who rebuilds a compressed model from its file and the original network; imported when one is asked for
COMPRESSED = ("netkin.applications.compression", "load_compressed")


def load_model(spec: str, seed: int = 0) -> nn.Module:
    """Return the model that `spec` names, on the CPU and in evaluation mode.

    `spec` is one of

    - `BUILDER[@WEIGHTS]`. The builder is `netkin:NAME[,option=value]`, one of our reference architectures, or
      `package.module:function`, which is called without arguments and may lie in the current directory. The weights are
      a `.safetensors` file or a state dict saved by torch, or a compressed model as `nk.save_compressed` writes it,
      for which the builder makes the original network. Without weights the model has fresh ones, drawn from `seed`, and
      results say so; torch's global random state is not changed.
    - `hf:DIR`, a Hugging Face model in the folder that `save_pretrained` wrote.
    - the path of an exported program, which ends in `.pt2`.

    Example:
        >>> load_model("netkin:digits").fc
        Linear(in_features=64, out_features=10, bias=True)
    """
    with refusing_unreadable(spec):
        return _loaded(spec, seed).eval()


def remark_on(model: nn.Module) -> str:
    """Return that a model's weights are random, if it was loaded without any and has got no others since."""
    remark, versions = _drawn.get(model, ("", []))
    return remark if versions == _versions(model) else ""


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight was written to, as torch counts it."""
    return [-1 if weight.is_inference() else weight._version for weight in model.parameters()]


# what to say of models that were loaded without weights, and the state of those they have
_drawn: WeakKeyDictionary[nn.Module, tuple[str, list[int]]] = WeakKeyDictionary()


def _loaded(spec: str, seed: int) -> nn.Module:
    if spec.startswith("hf:") and spec != "hf:":
        return seeded(partial(load_huggingface, spec.removeprefix("hf:")))
    # no builder's name holds an "@", while a path may
    builder, at, weights = spec.partition("@")
    if spec.endswith(".pt2") and ":" not in builder:
        return load_exported(Path(spec).expanduser())
    if at and not weights:
        raise SourceError(f"{spec!r} names no weights after the '@'; write {spec + 'FILE'!r} or leave the '@' out.")
    model, draws = seeded(partial(_watched, _builder(builder)), seed)
    if weights and _is_compressed(Path(weights).expanduser()):
        module, function = COMPRESSED
        return getattr(import_module(module), function)(Path(weights).expanduser(), model)
    if weights:
        load_weights(model, Path(weights).expanduser(), name=builder)
    elif draws:
        unless = "" if builder.startswith("netkin:") else ", unless its function reads some"
        remark = f"{spec!r} was given no weights, so they are random, drawn from seed {seed}{unless}."
        _drawn[model] = remark, _versions(model)
    return model


def _is_compressed(path: Path) -> bool:
    """Return whether a file holds a compressed model, by the header that netkin writes."""
    try:
        return path.is_file() and read_header(path)["kind"] == "compressed"
    except FileFault:  # weights of others
        return False


def _watched(builder: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
    """Return what `builder` makes, and whether it drew random numbers of torch's."""
    before = torch.get_rng_state()
    return builder(), not torch.equal(before, torch.get_rng_state())


def _builder(name: str) -> Callable[[], nn.Module]:
    prefix, colon, rest = name.partition(":")
    if not colon or not rest:
        raise SourceError(_not_a_builder(name))
    if prefix == "netkin":
        return architecture(rest)
    return partial(_called, find_function(name, known=["netkin", "hf"]), name)


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
    if Path(name).is_dir():
        return f"{name!r} is a folder; for a Hugging Face model write {'hf:' + name!r}."
    near = did_you_mean(name, ARCHITECTURES).replace("'", "'netkin:", 1)
    return (
        f"{name!r} is no model{near or '.'} A model is BUILDER[@WEIGHTS], where BUILDER is `netkin:tiny10` or "
        "`package.module:function`; or it is `hf:DIR` or the path of a `.pt2` file."
    )
