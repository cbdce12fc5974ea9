"""Parts that do not belong together, and data that have no parts, are refused."""

import pytest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.errors import InvalidValue, ShapeError
from netkin.sources.batches import Borrowed
from refusals import refusals, refused


@pytest.mark.parametrize(
    "change, words",
    [
        ({"part": "2/3"}, "these parts overlap: both hold the examples 16 to 24; merge each part once"),
        ({"part": "1/2"}, "overlap: both hold the examples 0 to 24"),
        ({"layers": ["conv1", "conv2"]}, r"their layers of 'a' differ, .*'fc', 3.*'conv2', 5"),
        ({"shape": "flatten"}, r"their layers of 'a' differ, .*'conv1', 4.*'conv1', 256"),
        ({"errors": True, "chunks": 4}, "their numbers of chunks differ, 0 and 4"),
        ({"seed": 3}, "their seeds differ, 0 and 3"),
        ({"measures": "cka_minibatch(batch=8)"}, r"their measures differ, cka and cka_minibatch\(batch=8\)"),
        ({"measures": None}, r"their measures differ, cka and (\w+, ){7}\w+ and 15 others"),
        ({"names": ("a", "c")}, r"their models differ, \['a', 'b'\] and \['a', 'c'\]"),
        ({"transforms": lambda images: 2 * images}, "their settings of 'transform of a' differ"),
        ({"pairs": "corresponding"}, "their pairs differ, all and corresponding"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(doubles, inputs, change, words):
    options = {"data": inputs, "measures": "cka", "layers": ["conv1", "fc"]}
    first = nk.collect(*doubles, part="1/2", **options)
    other = nk.collect(*doubles, **{**options, "part": "2/2", **change})
    with pytest.raises(ShapeError, match=words):
        nk.merge([first, other])


def test_other_weights_and_other_data_are_refused(doubles, inputs, maps):
    first = nk.collect(*doubles, inputs, "cka", part="1/2")
    refusals(
        (lambda: nk.merge([first, nk.collect(doubles[0], maps().double(), inputs, "cka", part="2/2")]), ShapeError, ""),
        (lambda: nk.merge([first, nk.collect(*doubles, TensorDataset(inputs), "cka", part="2/2")]), ShapeError, ""),
        (lambda: nk.merge([nk.collect(*doubles, half, "cka") for half in (inputs[:25], inputs[25:])]), ShapeError, ""),
        (lambda: nk.merge([]), InvalidValue, ""),
        (lambda: nk.merge(["1.stats", "2.stats"]), ShapeError, ""),
    )


def edited(model):
    """Give a model the code of a class of the same name that was edited."""

    class Edited(nn.Module):
        def forward(self, images):
            return self.fc(self.relu(self.conv2(self.conv1(-images))).mean((2, 3)))

    Edited.__qualname__, Edited.__module__ = type(model).__qualname__, type(model).__module__
    model.__class__ = Edited


@pytest.mark.parametrize(
    "change",
    [
        edited,
        lambda model: setattr(model, "relu", nn.Tanh()),
        lambda model: setattr(model.conv1, "padding_mode", "circular"),
    ],
    ids=["code", "activation", "attribute"],
)
def test_parts_of_another_forward_are_refused(doubles, inputs, tmp_path, change):
    nk.collect(*doubles, inputs, "cka", layers=["conv1", "fc"], part="1/2").save(tmp_path / "first.stats")
    same = nk.collect(*doubles, inputs, "cka", layers=["conv1", "fc"], part="2/2")
    assert nk.merge([nk.load(tmp_path / "first.stats"), same]).examples == len(inputs)
    change(doubles[0])
    other = nk.collect(*doubles, inputs, "cka", layers=["conv1", "fc"], part="2/2")
    with pytest.raises(ShapeError, match="the architecture of 'a' differs in '.*' .*, not .*"):
        nk.merge([nk.load(tmp_path / "first.stats"), other])


def shuffled(images):
    return DataLoader(TensorDataset(images), batch_size=8, shuffle=True)


class Unknown:
    """Data that do not tell how many they are."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return iter(self.images.split(8))


@pytest.mark.parametrize(
    "data, argument",
    [
        (shuffled, ""),
        (lambda images: Borrowed("mine", shuffled(images)), ""),
        (lambda images: iter(images.split(8)), "part"),
        (Unknown, "part"),
    ],
    ids=["shuffled", "shuffled under a name", "stream", "unknown length"],
)
def test_data_that_have_no_parts_are_refused(doubles, inputs, data, argument):
    with refused(InvalidValue, argument):
        nk.collect(*doubles, data(inputs), "cka", part="1/2")


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "a/b", (1,), 5, "1/51"])
def test_what_is_no_part_is_refused(doubles, inputs, part):
    with refused(InvalidValue, "part"):
        nk.collect(*doubles, inputs, "cka", part=part)
