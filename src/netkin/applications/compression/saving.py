"""Files of compressed models: which modules were factored, the weights, and the table."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from netkin import files
from netkin.applications.compression.factoring import empty_factors, put, refuse_hooked, refuse_unfit
from netkin.errors import FileFault, ValueFault
from netkin.representations.layers import modules, unwrapped
from netkin.results.compression import KIND, Compression, TakenApart


def save_compressed(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a compressed model's weights and its table to one file; over one of another kind only with `overwrite`."""
    record = getattr(unwrapped(model), "compression", None)
    if not isinstance(record, Compression):
        raise ValueFault("the model was not compressed by netkin: it has no table `compression`; save its state dict.")
    state = unwrapped(model).state_dict()
    halves = [name for name, tensor in state.items() if tensor.dtype == torch.bfloat16]
    arrays = {name: _array(tensor) for name, tensor in state.items()}
    files.write(path, KIND, {**record.to_header(), "bfloat16": halves}, arrays, overwrite=overwrite)


@overload
def load_compressed(path: str | os.PathLike[str], model: nn.Module) -> nn.Module: ...


@overload
def load_compressed(path: str | os.PathLike[str], model: None = None) -> Compression: ...


def load_compressed(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module | Compression:
    """Return the compressed model that was saved at `path`; `model` is the original, built anew, and stays as it is.

    Its weights do not matter. What comes back is in the model's training mode, on its device and in its precision.
    Without a model the table comes back alone.
    """
    header, arrays = files.read(path, kind=KIND)
    with files.damage_reported(path):
        halves = set(header.pop("bfloat16"))
        state = {name: _tensor(array, name in halves) for name, array in arrays.items()}
        record = Compression.from_header({k: v for k, v in header.items() if k not in ("kind", "format")})
    if model is None:
        return record
    net = copy.deepcopy(unwrapped(model))
    for part in record.replaced:
        _take_apart(net, part, path)
    wanted = net.state_dict()
    # files of earlier versions have no arrays without axes
    scalars = {name for name, one in wanted.items() if one.ndim == 0}
    state = {name: one.reshape(()) if name in scalars and one.numel() == 1 else one for name, one in state.items()}
    _refuse_other_weights(wanted, state, path)
    net.load_state_dict(state)
    net.compression = record  # type: ignore[assignment]
    return net


def _take_apart(net: nn.Module, part: TakenApart, path: Any) -> None:
    """Put two modules of the saved sizes in the place of one layer."""
    known = modules(net)
    if part.layer not in known:
        raise FileFault(f"{str(path)!r} holds a model with a layer {part.layer!r} taken apart; this model has none.")
    layer = refuse_unfit(part.layer, known[part.layer])
    refuse_hooked(part.layer, layer)
    parts = nn.Sequential(*empty_factors(layer, part.between, part.first_bias, part.second_bias))
    put(net, part.layer, parts.train(layer.training).requires_grad_(layer.weight.requires_grad))


def _refuse_other_weights(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Any) -> None:
    odd = [name for name in {**wanted, **state} if _shape(wanted, name) != _shape(state, name)]
    if odd:
        raise FileFault(
            f"{str(path)!r} does not fit this model: {odd[0]!r} is {_shape(state, odd[0])} in the file and "
            f"{_shape(wanted, odd[0])} in the model ({len(odd)} differ); build the architecture that was compressed."
        )


def _shape(state: Mapping[str, Tensor], name: str) -> str:
    return " × ".join(map(str, state[name].shape)) or "one number" if name in state else "absent"


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: np.ndarray, is_half: bool) -> Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if is_half else tensor
