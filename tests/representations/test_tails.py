"""Tails: what follows a layer gives the same output, and computes nothing that comes before."""

import pytest
import torch
from torch import nn

from netkin.errors import UnknownName
from netkin.representations.cutting import Tail, agrees, reaches_around, run_until, tail
from netkin.representations.hooks import main_tensor
from netkin.sources.architectures import architecture, seeded
from refusals import refused
from stitching_worlds import built, drawn


class Skips(nn.Module):
    """A residual path around `inner`."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.inner(x))


class Repeats(nn.Module):
    """One ReLU for two places."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(4, 4), nn.Linear(4, 3), nn.ReLU()

    def forward(self, x):
        return self.relu(self.two(self.relu(self.one(x))))


class Branches(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.one(x)
        return self.two(x if x.sum() > 0 else -x)


class Recurs(nn.Module):
    """A layer that gives a tuple, of which the first part is used, or also the last state."""

    def __init__(self, state=False):
        super().__init__()
        self.state = state
        self.one, self.two = nn.LSTM(4, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x, (h, _) = self.one(x)
        x, _ = self.two(x)
        return self.out(x) + (self.out(h[0]).unsqueeze(1) if self.state else 0)


class Counts(nn.Module):
    """Reads the number of examples off its input after the layer, or also how long they are."""

    def __init__(self, how):
        super().__init__()
        self.how, self.one, self.two = how, nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x):
        states = self.one(x)
        if self.how == "unpacked":
            count, _ = x.shape
        else:
            count = {"size": lambda: x.size(0), "shape": lambda: x.shape[0], "sizes": lambda: x.size()[0]}[self.how]()
        return self.two(states.view(count, 2, 3)).mean(1)


class Regroups(Counts):
    """Gives two rows for each example at the layer, and takes its number of examples off the input."""

    def forward(self, x):
        return self.two(self.one(x.repeat(2, 1)).view(2 * x.shape[0], 2, 3)[: x.shape[0]]).mean(1)


def ran_in(model, function):
    """Return the names of the modules that run while `function` is called."""
    names, handles = [], []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: names.append(name)))
    try:
        function()
    finally:
        for handle in handles:
            handle.remove()
    return names


@pytest.mark.parametrize(
    "name, layer",
    [
        ("tiny10", "conv3"), ("tiny10", "relu8"), ("resnet20", "layer2.0"), ("resnet20", "layer1"),
        ("resnet20", "layer3.2.relu2"), ("svcca_convnet", "pool1"), ("resnet20", "conv1"), ("vit", "blocks.2"),
    ],
)  # fmt: skip
def test_a_tail_gives_the_models_output_and_runs_nothing_before_the_layer(name, layer):
    model, images = seeded(architecture(name)).eval(), drawn(3, 3, 32, 32, dtype=torch.float32)
    output = run_until(model, layer, images)
    found = tail(model, layer)
    assert found.graph is not None, found.why
    assert agrees(found, output, images, model(images))
    assert torch.equal(found(output, None), model(images))
    before = ran_in(model, lambda: run_until(model, layer, images))
    after = ran_in(model, lambda: found(output, None))
    assert not set(before) & set(after) - {"", *_enclosing(layer)}
    assert "nothing before it is computed" in found.cut_words


def _enclosing(layer):
    keys = layer.split(".")
    return {".".join(keys[:depth]) for depth in range(1, len(keys))}


def test_another_output_gives_what_hooks_give():
    model, images = seeded(architecture("resnet20")).eval(), drawn(3, 3, 32, 32, dtype=torch.float32)
    output = drawn(*run_until(model, "layer2.1", images).shape, dtype=torch.float32, seed=1)
    hooked = Tail("layer2.1", model, None, "as a test")
    assert torch.allclose(tail(model, "layer2.1")(output, images), hooked(output, images), atol=1e-6)
    assert "computed for nothing (as a test)" in hooked.cut_words


def test_gradients_flow_through_a_tail():
    model = seeded(architecture("tiny10")).eval()
    output = drawn(2, 32, 12, 12, dtype=torch.float32).requires_grad_()
    tail(model, "relu4")(output, None).sum().backward()
    assert output.grad.abs().sum() > 0


def test_the_second_call_of_a_shared_module_is_its_own():
    model, x = built(Repeats), drawn(5, 4)
    found = tail(model, "relu#2")
    assert torch.equal(found(torch.ones(5, 3).double(), None), torch.ones(5, 3).double())
    assert torch.equal(tail(model, "relu")(run_until(model, "relu", x), None), model(x))


def test_the_first_part_of_a_tuple_is_enough():
    model, x = built(Recurs), drawn(2, 3, 4)
    output = main_tensor(run_until(model, "one", x), "one")
    found = tail(model, "one")
    assert found.graph is not None
    assert torch.allclose(found(output, None), model(x))


@pytest.mark.parametrize("how", ["size", "shape", "sizes", "unpacked"])
def test_the_number_of_examples_is_read_off_the_layer_instead_of_the_input(how):
    model, x = built(Counts, how), drawn(5, 4)
    found = tail(model, "one")
    assert found.graph is not None, found.why
    assert torch.equal(found(run_until(model, "one", x), None), model(x))
    other = drawn(7, 6, seed=1)
    assert torch.equal(found(other, None), model.two(other.view(7, 2, 3)).mean(1))


def test_a_layer_with_another_number_of_examples_than_the_input_is_noticed():
    model, x = built(Regroups, "shape"), drawn(5, 4)
    assert not agrees(tail(model, "one"), run_until(model, "one", x), x, model(x))


@pytest.mark.parametrize(
    "model, layer, why",
    [
        (built(Skips), "inner", "a path around the layer needs the model's own input"),
        (built(Branches), "one", "torch.fx can't trace it: TraceError, symbolically traced variables cannot be "),
        (built(Recurs, state=True), "one", "more than the first part of the layer's output is used"),
        (built(Skips), "", "nothing follows the model itself"),
    ],
)
def test_what_cannot_be_cut_says_why(model, layer, why):
    found = tail(model, layer)
    assert found.graph is None
    assert why in found.cut_words


def test_a_model_with_hooks_around_the_layer_is_not_cut():
    model = built(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    handle = model.register_forward_hook(lambda module, inputs, output: output + 1)
    assert "has hooks" in tail(model, "0").cut_words
    assert torch.equal(tail(model, "0")(-torch.ones(1, 2).double(), torch.ones(1, 2)), torch.ones(1, 2).double())
    handle.remove()


@pytest.mark.parametrize("layer, around", [("inner", True), ("first", False), ("last", False)])
def test_a_path_around_a_layer_is_noticed(layer, around):
    model, x = built(Skips), drawn(6, 4)
    assert reaches_around(model, layer, run_until(model, layer, x), x) is around


def test_whole_numbers_are_stirred_too():
    model = seeded(architecture("char_lstm")).eval()
    x = torch.randint(0, 65, (4, 7), generator=torch.Generator().manual_seed(0))
    output = main_tensor(run_until(model, "lstm1", x), "lstm1")
    assert not reaches_around(model, "lstm1", output, x)


def test_a_layer_that_does_not_exist_is_refused():
    with refused(UnknownName, "layers"):
        tail(seeded(architecture("resnet20")), "layer22")


def test_a_tail_that_computes_something_else_is_noticed():
    model, x = built(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())), drawn(4, 2)
    found = tail(model, "0")
    assert agrees(found, run_until(model, "0", x), x, model(x))
    assert not agrees(found, run_until(model, "0", x) + 1, x, model(x))


def test_a_mask_that_goes_past_a_layer_is_no_path_around_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, states, attention_mask):
            return self.two(self.one(states) * attention_mask.unsqueeze(-1))

    model = built(Masked)
    batch = {"states": drawn(3, 5, 4), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 3)}
    assert not reaches_around(model, "one", run_until(model, "one", batch), batch)
