"""What `compress` refuses, each in one sentence."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.compression import layer_inputs
from netkin.errors import ForwardError, InvalidValue, MemoryLimit, NetkinError, ShapeError, UnknownName
from refusals import refused


def net(*widths):
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


NET, DATA = net(4, 8, 3), torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"k": 9}, InvalidValue, "layer '2' is fed 8 features, so `k` must lie between 1 and 8; got 9."),
        ({"k": 0}, InvalidValue, "must lie between 1 and 8; got 0."),
        ({"k": 1.5}, InvalidValue, "a whole number up to that, or a share above 0 and up to 1.0; got 1.5."),
        ({"k": "3"}, InvalidValue, "`k` must be a whole number, or a share such as 0.35; got str."),
        ({"k": True}, InvalidValue, "got bool."),
        ({"k": {"2": 3, "3": 1}}, UnknownName, "`k` names '3', which is not among the layers."),
        ({"k": {}}, UnknownName, "`k` has no number for layer '2'; give one for every layer."),
        ({}, InvalidValue, "pass one of `k`, `variance` and `accuracy_drop`.*got none of them."),
        ({"k": 2, "variance": 0.9}, InvalidValue, "got `k` and `variance`."),
        ({"variance": 0.0}, InvalidValue, "`variance` must lie above 0 and at most at 1; got 0.0."),
        ({"accuracy_drop": 1}, InvalidValue, "`accuracy_drop` must lie from 0 to below 1, .*; got 1."),
        ({"accuracy_drop": 0.1}, InvalidValue, "the accuracy is measured on `data`, whose batches have no labels"),
        ({"k": 2, "test": DATA}, InvalidValue, "the accuracy is measured on `test`, whose batches have no labels"),
        ({"k": 2, "against": "logit"}, UnknownName, "`against` is 'logits' or another model; got 'logit'; did you me"),
        ({"k": 2, "projection": "oblique"}, UnknownName, "no projection named 'oblique'. There are least_squares, ort"),
        ({"k": 2, "order": "from_top"}, UnknownName, "named 'from_top'; did you mean 'from_the_top'?"),
        (
            {"k": 2, "data": None},
            InvalidValue,
            "`data` must be an iterable of batches, or one array of inputs; got None",
        ),
        (
            {"k": 2, "data": iter([DATA])},
            InvalidValue,
            "read several times, and an iterator only once; pass a loader or",
        ),
        ({"k": 2, "data": torch.ones(20, 4)}, NetkinError, "layer '2' is constant over the 20 examples"),
        ({"k": 2, "data": DATA / 0}, InvalidValue, "the model's output in batch 0 holds .* NaN or Inf"),
        ({"k": 2, "cut": 2.0}, InvalidValue, "`cut` must lie above 0 and at most at 1; got 2.0."),
        ({"k": 2, "against": net(4, 3)}, UnknownName, "the model to compress against has no layer '2'."),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        nk.compress(NET, "2", **{"data": DATA, **options})


@pytest.mark.parametrize(
    "model, layers, kind, argument",
    [
        (NET, "3", UnknownName, "layers"),
        (nn.Sequential(NET), "0.22", UnknownName, "layers"),
        (NET, "1", InvalidValue, "layers"),
        (NET, "2#2", InvalidValue, "layers"),
        (nn.Linear(4, 3), "", InvalidValue, "layers"),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), "0", InvalidValue, "layers"),
        (nn.Sequential(nn.ConvTranspose2d(4, 8, 3)), "0", InvalidValue, "layers"),
    ],
)
def test_layers_that_cannot_be_compressed_are_refused(model, layers, kind, argument):
    with refused(kind, argument):
        nk.compress(model, layers, k=2, data=DATA)


def test_a_layer_that_does_not_run_is_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(
        ForwardError, match="layer 'idle' did not run: the model does not call it, or reads its weights"
    ):
        nk.compress(Idle(), "idle", k=2, data=DATA)


def test_a_model_that_reads_the_weights_itself_is_refused():
    class Nosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x) * self.fc.weight.norm()

    with pytest.raises(
        ForwardError, match="does not run with layer 'fc' taken apart .AttributeError.*Leave this layer"
    ):
        nk.compress(Nosy(), "fc", k=2, data=DATA)


def test_an_output_that_is_no_logits_is_refused(draw):
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).double()
    with pytest.raises(ShapeError, match=r"output has shape \(5, 8, 4, 4\) and layer '0' is fed 5 × 6 × 6 places"):
        nk.compress(model, "0", k=2, data=draw(5, 4, 6, 6))


def test_other_places_in_the_other_model_are_refused(draw):
    model, other = (
        nn.Sequential(nn.MaxPool2d(size), nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
        for size in (1, 2)
    )
    with pytest.raises(ShapeError, match="'1' is fed 5 × 6 × 6 places in the one model and 5 × 3 × 3 in the other"):
        nk.compress(model, "1", k=2, data=draw(5, 4, 6, 6), against=other)


def test_an_input_without_examples_is_refused(draw):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return torch.stack([self.fc(row) for row in x])

    with pytest.raises(ShapeError, match=r"layer 'fc' is fed shape \(4,\), without an axis of examples"):
        nk.compress(Alone().double(), "fc", k=2, data=draw(5, 4))


def test_labels_of_another_shape_are_refused(draw):
    batches = [(draw(5, 4), torch.zeros(4).long())]
    with pytest.raises(ShapeError, match=r"outputs of shape \(5, 3\) and labels of shape \(4,\), int64, are no logits"):
        nk.compress(net(4, 8, 3).double(), "2", k=2, data=batches)


def test_labels_missing_from_a_later_batch_are_refused(draw):
    batches = [(draw(5, 4), torch.zeros(5).long()), draw(5, 4)]
    with pytest.raises(InvalidValue, match="batch 1 has no labels, which the accuracy needs"):
        nk.compress(net(4, 8, 3).double(), "2", k=2, data=batches)


def test_too_wide_layers_are_refused(monkeypatch):
    monkeypatch.setattr(layer_inputs, "free_memory", lambda device=None: 1000)
    with pytest.raises(
        MemoryLimit, match="need 2 kB and 1 kB are free; the widest is '2' with 8 features. Leave it out"
    ):
        nk.compress(NET, "2", k=2, data=DATA)


def test_labels_of_which_none_counts_are_refused(draw):
    batches = [(draw(5, 4), torch.full((5,), -100))]
    with pytest.raises(InvalidValue, match="none of the labels is a class number of 0 or more; give labels that are"):
        nk.compress(net(4, 8, 3).double(), "2", k=2, data=batches)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_whose_hooks_would_be_lost_is_refused(draw, register):
    model = net(4, 8, 3).double()
    getattr(model[2], register)(lambda *given: None)
    with pytest.raises(
        InvalidValue, match="layer '2' has 1 hook of its own, which the two layers would not have; remove"
    ):
        nk.compress(model, "2", k=2, data=draw(20, 4))
