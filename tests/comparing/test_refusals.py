"""What can't be compared is refused by the class of the error and the argument at fault: (call, class, argument)."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import (
    ForwardError,
    InvalidValue,
    MemoryLimit,
    NameClash,
    NoValue,
    ShapeError,
    SourceError,
    UnknownName,
)
from refusals import refused

ROWS = {"x": np.ones((4, 3))}


class Half(nn.Module):
    """Gives every other example."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, batch):
        return self.inner(batch[::2])


MODELS = {
    "dropped examples": (
        lambda a, b, data: nk.compare(a, b, data, transforms=(None, lambda x: x[:25])), ShapeError, "",
    ),
    "no data": (lambda a, b, data: nk.compare(a, b), InvalidValue, "data"),
    "empty data": (lambda a, b, data: nk.compare(a, b, []), InvalidValue, ""),
    "masked data": (
        lambda a, b, data: nk.compare(a, data=np.ma.masked_greater(data.numpy(), 1)), InvalidValue, "data",
    ),
    "a call that is not made": (lambda a, b, data: nk.compare(a, data=data[:2], layers="relu#3"), ForwardError, ""),
    "one model as many": (lambda a, b, data: nk.compare_many([a], []), InvalidValue, "models"),
    "no model of that name": (lambda a, b, data: nk.compare("first.pt", a, data), SourceError, ""),
    "no data of that name": (lambda a, b, data: nk.compare(a, b, "digit"), UnknownName, ""),
    "no such device": (lambda a, b, data: nk.compare(a, b, data, device="cuda:99"), UnknownName, "device"),
    "no such layer": (lambda a, b, data: nk.compare(a, b, data, layers="conv3"), UnknownName, "layers"),
    "layers of a stranger": (lambda a, b, data: nk.compare(a, b, data, layers={"c": "fc"}), InvalidValue, "layers"),
    "three functions": (lambda a, b, data: nk.compare(a, b, data, forward=(None,) * 3), InvalidValue, "forward"),
    "directions of no layer": (lambda a, b, data: nk.model_directions(a, "conf1", data=data), UnknownName, "layers"),
    "directions of layers": (lambda a, b, data: nk.model_directions(a, "conv?", data=data), UnknownName, ""),
    "directions of other places": (
        lambda a, b, data: nk.model_directions(a, "conv1", b, "conv2", data, shape="positions"), NoValue, "",
    ),
    "directions of frequencies": (
        lambda a, b, data: nk.model_directions(a, "conv1", b, data=data, shape="dft"), NoValue, "",
    ),
    "directions in no memory": (
        lambda a, b, data: nk.model_directions(a, "conv2", data=data, memory=10), MemoryLimit, "memory",
    ),
    "directions of half the examples": (
        lambda a, b, data: nk.model_directions(Half(), "inner", data=torch.randn(20, 4)), ShapeError, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_of_models(maps, images, name):
    call, kind, argument = MODELS[name]
    with refused(kind, argument):
        call(maps(), maps(), images)


@pytest.mark.parametrize(
    ("a", "b", "options", "kind", "argument"),
    [
        ({}, None, {}, InvalidValue, ""),
        ({"x": np.ones((0, 3))}, None, {}, ShapeError, ""),
        ({"x": np.ones((4, 3)), "y": np.ones((5, 3))}, None, {}, ShapeError, ""),
        (ROWS, {"x": np.ones((5, 3))}, {}, ShapeError, ""),
        (ROWS, nn.Identity(), {"data": []}, InvalidValue, ""),
        (ROWS, 3, {}, InvalidValue, ""),
        (ROWS, None, {"data": np.ones(4)}, InvalidValue, ""),
        (ROWS, None, {"measures": 3}, UnknownName, "measures"),
        (ROWS, None, {"memory": np.nan}, InvalidValue, "memory"),
        (ROWS, None, {"layers": "y"}, UnknownName, "layers"),
        (ROWS, None, {"layers": [nn.Linear]}, InvalidValue, "layers"),
        ({"x": np.ones((4, 3, 2, 2))}, None, {"shape": "cls"}, ShapeError, ""),
        ({"x": [["a"]]}, None, {}, InvalidValue, ""),
        (ROWS, ROWS, {"names": ("m", "m")}, NameClash, "names"),
    ],
)
def test_of_recorded_rows(a, b, options, kind, argument):
    with refused(kind, argument):
        nk.compare(a, b, **options)
