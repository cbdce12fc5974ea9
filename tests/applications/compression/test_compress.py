"""What `compress` promises around the numbers: order, search, manners, an ordinary module."""

import copy
import io
import pickle
import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import netkin as nk
from netkin.applications.compression import fewest, has_labels
from netkin.errors import UnknownName
from netkin.training import accuracy, untrained_digits_net
from refusals import refused

LAYERS = ["conv3", "conv4", "fc"]


def net(*widths):
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# --- order and search -------------------------------------------------------------------------------------------------


def test_from_the_top_the_last_layer_comes_first_and_each_sees_the_net_so_far(digits_net, digits_data):
    train, _ = digits_data
    small = nk.compress(digits_net, LAYERS, k=0.35, data=train, order="from_the_top")
    step = digits_net
    for layer in reversed(LAYERS):
        step = nk.compress(step, layer, k=0.35, data=train)
    assert [row.layer for row in small.compression] == ["fc", "conv4", "conv3"]
    images = next(iter(train))[0]
    torch.testing.assert_close(small(images), step(images), rtol=1e-4, atol=1e-4)
    assert step.compression.replaced == small.compression.replaced
    assert [one.layer for one in small.compression.replaced] == ["fc", "conv4", "conv3"]


def test_the_order_is_that_of_running_and_not_of_registration():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.first = nn.Linear(6, 3), nn.Linear(4, 6)

        def forward(self, x):
            return self.out(self.first(x).relu())

    small = nk.compress(Crossed(), ["out", "first"], k=2, data=torch.randn(50, 4), order="from_the_top")
    assert [row.layer for row in small.compression] == ["out", "first"]


@pytest.mark.parametrize("order", ["at_once", "from_the_top"])
def test_the_accuracy_falls_by_no_more_than_was_allowed(digits_net, digits_data, order):
    train, test = digits_data
    table = nk.compress(digits_net, LAYERS, accuracy_drop=0.02, data=train, test=test, order=order).compression
    assert table.accuracy_before == pytest.approx(accuracy(digits_net, test))
    for place, row in enumerate(table, start=1):
        assert row.accuracy >= table.accuracy_before - 0.02 * place / 3 - 1e-9
    assert table.accuracy_after == table.layers[-1].accuracy
    assert table.parameters_after < table.parameters_before


def test_the_recorded_accuracy_is_that_of_the_network(digits_net, digits_data):
    train, test = digits_data
    small = nk.compress(digits_net, LAYERS, k={"conv3": 8, "conv4": 0.25, "fc": 6}, data=train, test=test)
    assert small.compression.accuracy_after == pytest.approx(accuracy(small, test))
    assert [row.kept for row in small.compression] == [8, 8, 6]


def test_a_search_finds_the_fewest(digits_net, digits_data):
    train, test = digits_data
    drop = 0.01
    row = nk.compress(digits_net, "fc", accuracy_drop=drop, data=train, test=test).compression["fc"]
    one_less = nk.compress(digits_net, "fc", k=row.kept - 1, data=train, test=test).compression
    assert one_less.accuracy_after < one_less.accuracy_before - drop


@pytest.mark.parametrize("least", [1, 2, 7, 64])
def test_halving_finds_the_least_number_that_is_enough(least):
    asked = []
    assert fewest(lambda k: asked.append(k) or k >= least, 64) == least
    assert len(asked) <= 8


def test_halving_says_so_when_nothing_is_enough():
    assert fewest(lambda k: False, 64) is None


def test_a_layer_whose_every_direction_is_needed_is_left_as_it_is(draw):
    """Eight classes, told apart by the largest of eight inputs."""
    model, inputs = nn.Sequential(nn.Linear(8, 8)).double(), draw(300, 8)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8)), model[0].bias.zero_()
    small = nk.compress(model, "0", accuracy_drop=0.05, data=[(inputs, inputs.argmax(1))])
    row = small.compression["0"]
    assert (row.kept, row.accuracy, row.variance, row.parameters_after) == (8, 1.0, 1.0, 72)
    assert row.notes == ("left as it is: no k that saves parameters (up to 3) keeps the accuracy.",)
    assert small.compression.replaced == ()
    assert torch.equal(small(inputs), model(inputs))


def test_few_rows_are_told(draw):
    table = nk.compress(net(4, 30, 30, 3).double(), "2", k=5, data=draw(20, 4)).compression
    assert "2: its directions come from 20 rows of 30 features; more would find them better." in str(table)


def test_a_rise_of_multiply_adds_is_told(draw):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    table = nk.compress(model, "0", k=7, data=draw(40, 8, 9, 9)).compression
    assert "0: saves no multiply-adds: its 1 × 1 convolution has more positions than the layer's output." in str(table)


# --- manners ----------------------------------------------------------------------------------------------------------


def test_the_models_are_left_as_they_were(digits_data):
    model, other = untrained_digits_net(0).train(), untrained_digits_net(1).train()
    model.bn1.eval()
    before, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    others, state = copy.deepcopy(other.state_dict()), torch.random.get_rng_state()
    small = nk.compress(model, ["conv2", "fc"], k=0.5, data=digits_data[0], against=other)
    assert torch.equal(torch.random.get_rng_state(), state)
    for kept, one in ((before, model), (others, other)):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in one.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
    assert [module.training for module in model.modules()] == flags
    assert not hasattr(model, "compression")
    assert not any(module._forward_hooks for module in small.modules())
    assert small.conv2[0].training
    assert not small.bn1.training


def test_no_hook_stays_after_a_crash():
    model, seen = net(4, 6, 3), []

    class Crash(Exception):
        pass

    def forward(model, batch):
        seen.append(model)
        model(batch)
        raise Crash

    with pytest.raises(Crash):
        nk.compress(model, "2", k=2, data=torch.ones(5, 4), forward=forward)
    assert not any(module._forward_hooks for one in (model, *seen) for module in one.modules())


def test_precision_and_grad_flags_are_the_layers_own(draw):
    model = net(4, 8, 3).to(torch.bfloat16)
    model[2].requires_grad_(False)
    small = nk.compress(model, ["0", "2"], k=2, data=draw(40, 4).float())
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert [parameter.requires_grad for parameter in small[2].parameters()] == [False] * 3
    assert all(parameter.requires_grad for parameter in small[0].parameters())


def test_a_wrapped_model_is_compressed_inside_its_wrapper(draw):
    small = nk.compress(nn.DataParallel(net(4, 8, 3)), "2", k=2, data=draw(40, 4).float())
    assert isinstance(small, nn.Sequential)
    assert isinstance(small[2], nn.Sequential)


# --- an ordinary module -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(digits_net, digits_data):
    return nk.compress(digits_net, LAYERS, k=0.5, data=digits_data[0])


@pytest.fixture(scope="module")
def images(digits_data):
    return next(iter(digits_data[1]))[0]


def test_the_class_stays_and_the_parts_are_plain(small, digits_net):
    assert type(small) is type(digits_net)
    assert {type(part) for layer in LAYERS for part in small.get_submodule(layer)} == {nn.Linear, nn.Conv2d}


def test_it_pickles_copies_and_loads_its_state(small, images):
    for again in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert torch.equal(again(images), small(images))
        assert again.compression == small.compression
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    blank = copy.deepcopy(small)
    for parameter in blank.parameters():
        nn.init.zeros_(parameter)
    blank.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(blank(images), small(images))


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch below 2.8 can't export a model that reads `get_submodule`")
def test_it_can_be_exported(small, images):
    exported = torch.export.export(small, (images,)).module()
    torch.testing.assert_close(exported(images), small(images))


def test_it_learns(small, images):
    trained = copy.deepcopy(small).train()
    trained(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


def test_it_can_be_compressed_again(small, digits_data, images):
    again = nk.compress(small, ["conv2", "conv4.1"], k=0.5, data=digits_data[0])
    assert [one.layer for one in again.compression.replaced] == [*LAYERS, "conv2", "conv4.1"]
    assert again.compression.parameters_before == small.compression.parameters_after
    assert again(images).shape == small(images).shape


def test_the_svcca_convnet_takes_a_compressed_linear_layer(draw):
    model = nk.load_model("netkin:svcca_convnet,width=2")
    small = nk.compress(model, "fc1", k=5, data=draw(12, 3, 32, 32).float())
    assert small(draw(2, 3, 32, 32).float()).shape == (2, 10)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_prints(digits_net, digits_data):
    train, test = digits_data
    small = nk.compress(digits_net, ["conv4", "fc"], k=8, data=train, test=test)
    lines = str(small.compression).splitlines()
    assert lines[0] == "2 layers of ConvNet compressed against logits (least squares, at once, 500 examples)"
    assert lines[1].split() == ["layer", "width", "parameters", "multiply-adds", "variance", "accuracy"]
    assert re.match(r"conv4  32 → 8  18,496 → 5,545  294,912 → 87,552     0\.\d{3}    0\.9\d{3}", lines[2])
    assert len(lines[1]) == len(lines[2]) == len(lines[3])
    whole = lines[4]
    assert re.fullmatch(r"whole network: 33,482 → 20,483 parameters \(61%\), accuracy 0\.\d{4} → 0\.\d{4}", whole)
    assert lines[5].startswith(
        "conv4: one extra channel carries the mean, because zero padding does not continue it at the border."
    )


def test_the_table_as_a_frame(small):
    frame = small.compression.to_pandas()
    assert list(frame.index) == LAYERS
    assert frame.loc["fc", "kept"] == 32
    assert frame.loc["fc", "notes"] == "saves no parameters: that takes k of at most 8."
    with pytest.raises(AttributeError):
        small.compression.layers[0].kept = 3
    with refused(UnknownName, "layer"):
        small.compression["conv5"]


def test_without_labels_there_is_no_accuracy(draw):
    table = nk.compress(net(4, 8, 3).double(), "2", k=2, data=draw(40, 4)).compression
    assert (table.accuracy_before, table.accuracy_after, table["2"].accuracy) == (None, None, None)
    assert str(table).splitlines()[2].endswith("–")


@pytest.mark.parametrize(
    "batch, expected",
    [
        ((torch.ones(2, 3), torch.ones(2).long()), True),
        ([torch.ones(2, 3), [0, 1]], True),
        ({"x": torch.ones(2, 3), "labels": torch.ones(2).long()}, True),
        ((torch.ones(2, 3), torch.ones(2)), False),
        ((torch.ones(2, 3), {"boxes": 1}), False),
        ((torch.ones(2, 3), ["cat", "dog"]), False),
        ((torch.ones(2, 3),), False),
        (torch.ones(2, 3), False),
    ],
)
def test_labels_are_found_where_they_usually_are(batch, expected):
    assert has_labels([batch]) is expected


def test_a_function_hears_of_the_progress(digits_net, digits_data):
    heard = {}
    nk.compress(
        digits_net, "fc", k=4, data=digits_data[1], progress=lambda done, total, what: heard.update({what: done})
    )
    assert heard == {"reading inputs": 360, "measuring accuracy": 360}  # examples


def test_a_shuffling_loader_leaves_the_random_states_as_they_were():
    model, rows = net(8, 16, 16, 3), torch.randn(60, 8)
    loader = DataLoader(rows, 20, shuffle=True)
    before = torch.get_rng_state()
    nk.compress(model, "2", k=2, data=loader)
    assert torch.equal(torch.get_rng_state(), before)
