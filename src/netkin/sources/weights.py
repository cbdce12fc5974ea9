"""Weights: files of safetensors and torch state dicts, read without running code from them; and random ones."""

from __future__ import annotations

import io
import os
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

from netkin import files
from netkin.errors import SourceError
from netkin.settings import evaluating
from netkin.sources.names import Refused, reading, require_file
from netkin.sources.pickles import vet_torch_file

WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+")
_MARKS = re.compile(r"(^|\.)_")  # EfficientNet has `_blocks.0._bn1`
_SHOWN = 5
_TO_SAVE = "save `model.state_dict()` alone with torch, or as safetensors"

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
            "Choose the builder these weights were trained with."
        )
    with reading(Path(path), f"file of weights for {name}", _TO_SAVE):  # sparse ones, or such without values
        model.load_state_dict(state, strict=False)  # counts of batches may be absent, which `mismatches` allows


def save_weights(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the weights of a model to a file that `load_weights` reads: of safetensors where it ends so, else of torch.

    Weights that are computed from others, as masked ones are, are written as the model uses them, under their own name.
    """
    state = {name: value.detach().cpu().clone() for name, value in plain_state(model).items()}
    if Path(path).suffix == ".safetensors":
        contents = safetensors.torch.save(state)
    else:
        torch.save(state, buffer := io.BytesIO())
        contents = buffer.getvalue()
    files.write_bytes(path, contents, overwrite=overwrite)


@torch.no_grad()
def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a model by name, and of its parametrized weights what they are computed to."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    with evaluating(model):  # where spectral norms stay as they are
        for place, module in model.named_modules():
            for name in getattr(module, "parametrizations", ()):
                before = f"{place}." if place else ""
                behind = f"{before}parametrizations.{name}."
                state = {key: value for key, value in state.items() if not key.startswith(behind)}
                state[f"{before}{name}"] = getattr(module, name).contiguous()
    return state


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a weights file; nothing in it is unpickled beyond tensors and plain containers."""
    require_file(path, "weights file")
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
    """Return as text what is missing, unexpected or of another shape in `state`; nothing where it fits."""
    # files older than torch 0.4.1 do not count batches, and no evaluation reads that count
    missing = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in wanted]
    shapes = {name: (_shape(state[name]), _shape(wanted[name])) for name in wanted if name in state}
    differing = [
        f"{name} ({held} in the file, {needed} in the model)"
        for name, (held, needed) in shapes.items()
        if held and needed and held != needed
    ]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": differing}
    return [f"{len(names)} {fault}: {list_names(names)}" for fault, names in faults.items() if names]


def list_names(names: list[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _shape(tensor: Any) -> str:
    """Return a weight's shape as text; empty for what fits any: a lazy weight, and the state of a module's own kind."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return ""
    shape = " × ".join(str(size) for size in tensor.shape) or "one number"
    return f"{shape} complex" if tensor.is_complex() else shape  # a real weight would take the real parts


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with reading(path, "safetensors file", _TO_SAVE):
        return safetensors.torch.load_file(path)


def _read_torch(path: Path) -> Any:
    require_harmless(path)
    with reading(path, "weights file", _TO_SAVE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Refused("more than tensors") from error


def require_harmless(path: Path) -> None:
    """Refuse a file saved by torch that is not safe even for `torch.load(weights_only=True)`."""
    with reading(path, "weights file", _TO_SAVE):
        vet_torch_file(path)


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    wrappers = [name for name in WRAPPERS if isinstance(content, Mapping) and isinstance(content.get(name), Mapping)]
    state = content[wrappers[0]] if wrappers else content
    if not isinstance(state, Mapping) or not state:
        kind = "nothing" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SourceError(f"{str(path)!r} holds {kind} instead of a state dict.")
    others = [str(name) for name, value in state.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if others:
        raise SourceError(
            f"{str(path)!r} is no state dict: {list_names(others)} are no tensors. netkin looks for the "
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
