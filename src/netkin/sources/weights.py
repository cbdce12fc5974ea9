"""Weights: files of safetensors and torch state dicts, read without running code from them; and random ones."""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from netkin.errors import FileError, SourceError
from netkin.files import read_header
from netkin.sources.names import refuse_absent, unreadable
from netkin.sources.pickles import Refused, vet_torch_file

WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+")
_MARKS = re.compile(r"(^|\.)_")  # EfficientNet has `_blocks.0._bn1`
_SHOWN = 5
_TRAINED_WITH = "Choose the builder these weights were trained with"
_SAVED_AS = {
    "sparse": "Save sparse tensors as `tensor.to_dense()`",
    "nested": "Save nested tensors as `tensor.to_padded_tensor(0)`",
    "without values": "Save the weights of a model that is not on the device 'meta'",
}

StateDict = dict[str, Tensor]  # weights and buffers by name


def load_weights(model: nn.Module, path: str | Path, name: str = "the model") -> None:
    """Put the weights of the file at `path` into `model`, or refuse if any is missing, unexpected or of another shape.

    `name` is what a refusal calls the model.
    """
    wanted = model.state_dict()
    state = renamed(read_state(Path(path)), wanted)
    faults = mismatches(state, wanted)
    if faults:
        raise SourceError(
            f"the weights in {str(path)!r} do not fit {name}: {'; '.join(faults)}. "
            f"{next((_SAVED_AS[kind] for kind in map(_kind, state.values()) if kind in _SAVED_AS), _TRAINED_WITH)}."
        )
    model.load_state_dict(state)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a weights file; nothing in it is unpickled beyond tensors and plain containers."""
    refuse_absent(path, "weights file")
    if path.suffix == ".pt2":
        raise SourceError(f"{str(path)!r} is an exported program, which is a whole model; name it alone.")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    return _unwrapped(content, path)


def renamed(state: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return `state` under the `wanted` names, where only prefixes like `module.` or `_` keep a name from fitting."""
    wanted = set(wanted)
    counts = Counter(_bare(name) for name in wanted)
    by_bare_name = {_bare(name): name for name in wanted - state.keys() if counts[_bare(name)] == 1}
    fitting = {name: tensor for name, tensor in state.items() if name in wanted}
    others = {name: tensor for name, tensor in state.items() if name not in wanted}
    return fitting | {by_bare_name.pop(_bare(name), name): tensor for name, tensor in others.items()}


def _bare(name: str) -> str:
    """Return `name` without what DataParallel, `torch.compile` and others put before it, and private parts' marks."""
    return _MARKS.sub(r"\1", _PREFIXES.sub("", name).replace("._orig_mod.", "."))


def mismatches(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return as text what is missing, unexpected, of another kind or shape in `state`; nothing where it fits."""
    # files older than torch 0.4.1 do not count batches, and no evaluation reads that count
    missing = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in wanted]
    strange, differing = list[str](), list[str]()
    for name in (name for name in wanted if name in state):
        held, needed = _kind(state[name]), _kind(wanted[name])
        if held != needed:
            strange.append(f"{name} ({held} in the file, {needed} in the model)")
        elif held in ("nested", "no tensor") or is_lazy(wanted[name]) or is_lazy(state[name]):
            continue  # a lazy weight takes the shape of the other
        elif state[name].shape != wanted[name].shape:
            shapes = _shape(state[name]), _shape(wanted[name])
            differing.append(f"{name} ({shapes[0]} in the file, {shapes[1]} in the model)")
    faults = {"missing": missing, "unexpected": unexpected, "of another kind": strange, "of another shape": differing}
    return [f"{len(names)} {fault}: {listed(names)}" for fault, names in faults.items() if names]


def _kind(tensor: Any) -> str:
    """Return what sort of numbers a tensor holds, as far as copying one sort into another would lose something."""
    if not isinstance(tensor, Tensor):  # quantised modules keep their weights packed, and `get_extra_state` gives any
        return "no tensor"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "without values"
    if tensor.layout != torch.strided:
        return "sparse"
    return "quantised" if tensor.is_quantized else "complex" if tensor.is_complex() else "real"


def listed(names: list[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _shape(tensor: Tensor) -> str:
    return " × ".join(str(size) for size in tensor.shape) or "one number"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except PermissionError as error:
        raise SourceError(unreadable(path, error)) from error
    except Exception as error:  # its errors have no common root but Exception
        raise SourceError(f"{str(path)!r} is damaged or not a safetensors file: {error}.") from error


def _read_torch(path: Path) -> Any:
    refuse_hostile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(_why_unreadable(path, error)) from error


def refuse_hostile(path: Path) -> None:
    """Refuse a file saved by torch that is not safe even for `torch.load(weights_only=True)`."""
    try:
        vet_torch_file(path)
    except SourceError:
        raise
    except Refused as refusal:
        raise SourceError(
            f"{str(path)!r} holds or asks for {refusal}; netkin reads plain state dicts: save `model.state_dict()` "
            "alone, or as safetensors."
        ) from None
    except OSError as error:
        raise SourceError(unreadable(path, error)) from error
    except Exception as error:  # the bytes may be anything, and so may be the error
        raise SourceError(_why_unreadable(path, error)) from error


def _why_unreadable(path: Path, error: Exception) -> str:
    refused = re.search(r"GLOBAL (\S+) was not|(\S+) whose module \S+ is blocked", str(error))
    if isinstance(error, pickle.UnpicklingError) and refused:
        what = refused.group(1) or refused.group(2)
        return (
            f"{str(path)!r} holds more than tensors ({what}), and netkin runs nothing that comes in a file; "
            "save `model.state_dict()` alone, or as safetensors."
        )
    try:
        kind = str(read_header(path)["kind"])
    except FileError:  # a file of others
        kind = ""
    if kind == "compressed":
        return f"{str(path)!r} is a compressed model, not weights; name it where a model is asked for, as BUILDER@FILE."
    what = "a file of netkin's and no" if kind or path.suffix == ".netkin" else "damaged or not a"
    return f"{str(path)!r} is {what} weights file; save `model.state_dict()` with torch or as safetensors."


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    wrappers = [name for name in WRAPPERS if isinstance(content, Mapping) and isinstance(content.get(name), Mapping)]
    state = content[wrappers[0]] if wrappers else content
    if not isinstance(state, Mapping) or not state:
        kind = "nothing" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SourceError(f"{str(path)!r} holds {kind} instead of a state dict.")
    others = [str(name) for name, value in state.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if others:
        raise SourceError(
            f"{str(path)!r} is no state dict: {listed(others)} are no tensors. netkin looks for the "
            f"weights at the top and under {', '.join(repr(name) for name in WRAPPERS)}."
        )
    return dict(state)


# --- random weights ---------------------------------------------------------------------------------------------------

# what to say of models that were loaded without weights, and the state of those they have
_drawn: WeakKeyDictionary[nn.Module, tuple[str, list[int]]] = WeakKeyDictionary()


def keep_note(model: nn.Module, remark: str) -> None:
    """Keep a remark on a model, for as long as none of its weights is written to."""
    _drawn[model] = remark, _versions(model)


def remark_on(model: nn.Module) -> str:
    """Return that a model's weights are random, if it was loaded without any and has got no others since."""
    remark, versions = _drawn.get(model, ("", []))
    return remark if versions == _versions(model) else ""


def keep_remark(model: nn.Module, made: nn.Module) -> None:
    """Remark on a network that was made of the weights of a model what is remarked on that."""
    if remark := remark_on(model):
        keep_note(made, remark)


def random_weights(models: Iterable[Any]) -> dict[str, str]:
    """Return, for the provenance of a result, which of its models have random weights; empty if none has."""
    remarks = " ".join(filter(None, (remark_on(model) for model in models if isinstance(model, nn.Module))))
    return {"random weights": remarks} if remarks else {}


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight was written to, as torch counts it; of some it keeps no count."""
    weights = list(model.parameters())
    return [-1 if is_lazy(weight) or weight.is_inference() else weight._version for weight in weights]
