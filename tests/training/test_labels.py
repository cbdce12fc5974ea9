"""Labels of a training: class numbers of any whole type, and what a loss of one's own reads."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from netkin.errors import ShapeError
from netkin.training import accuracy, train, train_many


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def labelled(n=40, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16, torch.bool])
def test_class_numbers_of_any_whole_type_train_like_those_of_64_bits(dtype):
    inputs, labels = labelled()
    try:
        labels.to(dtype)[:1][torch.tensor([0])]
    except RuntimeError:
        pytest.skip(f"torch {torch.__version__} takes no elements of {dtype}")
    found = []
    for own in (labels % 2, (labels % 2).to(dtype)):
        data, models = (inputs, own), [net(), net(), net(1), net(2)]
        histories = [train(models[0], data, epochs=1, batch=8, test=data)]
        histories.append(train(models[1], [data], epochs=1, test=[data]))
        histories += train_many(models[2:], data, epochs=1, batch=8, test=data, method="stacked")
        found.append((models, [one[-1]["accuracy"] for one in histories], accuracy(models[0], data)))
    weights = ([model[0].weight for model in models] for models, *_ in found)
    assert all(map(torch.equal, *weights))
    assert found[0][1:] == found[1][1:]


def test_fractions_are_no_class_numbers_in_a_test_either():
    inputs, labels = labelled()
    with pytest.raises(ShapeError, match="float32, are no logits and class numbers"):
        train(net(), (inputs, labels), epochs=1, test=(inputs, labels.float()))


def test_the_test_reads_the_labels_of_ones_own_loss_as_they_are():
    inputs, labels = labelled()
    seen = []

    def loss(outputs, given):
        seen.append(given.dtype)
        return cross_entropy(outputs, given.long() % 3)

    history = train(net(), (inputs, labels.int() + 3), epochs=1, test=(inputs, labels.int() + 3), loss=loss)
    assert {*seen} == {torch.int32}
    assert "test_loss" in history[-1]
