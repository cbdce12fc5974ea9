"""Stitches in files: the transformation, how it came to be, and which models it joins; not the models themselves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from netkin import files
from netkin.applications.stitching.ends import End, Meeting
from netkin.applications.stitching.evaluating import Evaluation
from netkin.applications.stitching.joining import Stitched, precise
from netkin.applications.stitching.matching import LinearMap
from netkin.applications.stitching.stitches import Stitch
from netkin.applications.stitching.transformations import Transformation
from netkin.errors import FileFault
from netkin.representations.feeding import device_of
from netkin.representations.layers import modules, split_call, unwrapped

KIND = "stitch"
FIELDS = ("method", "examples", "names", "seed", "history", "training", "version", "created")


def save_stitch(stitch: Stitch, path: str | os.PathLike[str]) -> None:
    """Write a stitch to one file."""
    network, transformation = stitch.network, stitch.transformation
    header = {name: getattr(stitch, name) for name in FIELDS} | {
        "layers": stitch.layers,
        "ends": [asdict(transformation.meeting.a), asdict(transformation.meeting.b)],
        "resize": transformation.meeting.resize,
        "rank": transformation.rank,
        "cuts": network.cuts,
        "evaluation": None if stitch.evaluation is None else asdict(stitch.evaluation),
        "models": [_described(network.a), _described(network.b)],
    }
    weights = {name: tensor.detach().cpu().double().numpy() for name, tensor in transformation.state_dict().items()}
    files.write(path, KIND, header, weights)


def load_stitch(path: str | os.PathLike[str], a: nn.Module, b: nn.Module) -> Stitch:
    """Return the stitch that was saved at `path`, joining `a` and `b`: the models of then, loaded anew.

    Other architectures, or models without the layers, are refused; other weights give a warning.
    """
    header, arrays = files.read(path, kind=KIND)
    with files.damage_reported(path):
        described, layers = header["models"], header["layers"]
        record = {name: header[name] for name in FIELDS} | {"names": tuple(header["names"])}
        record["history"] = tuple(header["history"])
        evaluation = None if header["evaluation"] is None else Evaluation(**header["evaluation"])
        transformation = _transformation(header, arrays)
        cuts = bool(header["cuts"])
    for which, model, then, layer in zip(("first", "second"), (a, b), described, layers, strict=True):
        _refuse_other(path, which, model, then, layer)
    transformation = transformation.to(device_of(b), precise(b))
    return Stitch(Stitched(a, layers[0], b, layers[1], transformation, cuts=cuts), **record, evaluation=evaluation)


def _transformation(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Transformation:
    first, second = (End(**{**end, "space": tuple(end["space"])}) for end in header["ends"])
    blank = LinearMap(torch.zeros(first.width, second.width), torch.zeros(second.width))
    transformation = Transformation(blank, Meeting(first, second, header["resize"]), rank=header["rank"]).double()
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    wanted, found = (
        {name: tuple(one.shape) for name, one in each.items()} for each in (transformation.state_dict(), state)
    )
    if wanted != found:
        raise ValueError(f"its weights have shapes {found}, and the layers need {wanted}")
    transformation.load_state_dict(state)
    return transformation


def _described(model: nn.Module) -> dict[str, Any]:
    """Return a model's class, the shapes of its tensors, and the mean size of each, to know it again by."""
    state = unwrapped(model).state_dict()
    return {
        "class": type(unwrapped(model)).__name__,
        "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
        "sizes": [float(tensor.detach().double().abs().mean()) if tensor.numel() else 0.0 for tensor in state.values()],
    }


def _refuse_other(path: Any, which: str, model: nn.Module, then: Mapping[str, Any], layer: str) -> None:
    now = _described(model)
    odd = [name for name in {**then["shapes"], **now["shapes"]} if _shape(then, name) != _shape(now, name)]
    if odd:
        raise FileFault(
            f"{str(path)!r} holds a stitch whose {which} model is another architecture, a {then['class']}: {odd[0]!r} "
            f"is {_shape(then, odd[0])} there and {_shape(now, odd[0])} in the {now['class']} given "
            f"({len(odd):,} differ)."
        )
    if split_call(layer)[0] not in modules(model):
        raise FileFault(f"{str(path)!r} holds a stitch at layer {layer!r} of the {which} model, and this one has none.")
    if any(abs(x - y) > 1e-3 * max(x, y) for x, y in zip(then["sizes"], now["sizes"], strict=True)):
        warnings.warn(
            f"the {which} model has other weights than when the stitch in {str(path)!r} was made; it fits those alone.",
            stacklevel=3,
        )


def _shape(described: Mapping[str, Any], name: str) -> str:
    shapes = described["shapes"]
    return " × ".join(map(str, shapes[name])) or "one number" if name in shapes else "absent"
