"""Examples dealt out to clients by classes."""

import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue, NetkinError, UnknownName
from netkin.training.class_splits import split_by_classes
from refusals import refused


def examples(count=200, classes=10):
    return torch.arange(count)[:, None].float(), torch.arange(count) % classes


@pytest.mark.parametrize(("partition", "clients", "classes"), [("groups", 10, 2), ("random", 7, 3), ("random", 100, 5)])
def test_no_example_goes_to_two_clients_and_each_has_its_classes_alone(partition, clients, classes):
    found = split_by_classes(examples(2000), clients, classes, partition=partition)
    rows = torch.cat([inputs.flatten() for inputs, _ in found.train.values()])
    assert len(rows) == len(rows.unique())
    assert len(found.train) == clients
    for name, (inputs, labels) in found.train.items():
        assert set(labels.tolist()) == set(found.classes[name])
        assert len(found.classes[name]) == classes
        assert torch.equal(inputs.flatten().long() % 10, labels)


def test_all_classes_have_about_as_many_clients():
    found = split_by_classes(examples(2000), 100, 2)
    held = torch.tensor([one for own in found.classes.values() for one in own]).bincount()
    assert held.tolist() == [20] * 10


def test_the_examples_of_a_class_are_divided_alike_among_its_clients():
    found = split_by_classes(examples(), 30, 2, partition="groups")
    counts = [[int((labels == one).sum()) for one in found.classes[name]] for name, (_, labels) in found.train.items()]
    assert {one for own in counts for one in own} == {3, 4}
    assert max(map(sum, counts)) - min(map(sum, counts)) <= 2


def test_clients_can_have_equally_many_examples():
    found = split_by_classes(examples(203), 30, 3, equal=True)
    counts = [labels.bincount().tolist() for _, labels in found.train.values()]
    assert {one for own in counts for one in own} == {0, 2}
    assert {len(labels) for _, labels in found.train.values()} == {6}


def test_test_data_are_dealt_by_the_same_classes_and_a_seed_gives_the_same_split():
    found = split_by_classes(examples(), 10, 2, test=examples(60), seed=3)
    assert all(set(labels.tolist()) <= set(found.classes[name]) for name, (_, labels) in found.test.items())
    again = split_by_classes(examples(), 10, 2, test=examples(60), seed=3)
    other = split_by_classes(examples(), 10, 2, test=examples(60), seed=4)
    assert all(torch.equal(found.train[name][0], again.train[name][0]) for name in found.train)
    assert found.classes != other.classes
    assert str(found).splitlines()[0].startswith("0: 20 examples of classes")


@pytest.mark.parametrize(
    ("options", "kind", "argument"),
    [
        ({"clients": 0, "classes": 1}, InvalidValue, "clients"),
        ({"clients": 3, "classes": 11}, InvalidValue, "classes"),
        ({"clients": 7, "classes": 2, "partition": "groups"}, InvalidValue, "clients"),
        ({"clients": 4, "classes": 2, "partition": "dirichlet"}, UnknownName, "partition"),
    ],
)
def test_a_split_that_can_not_be_is_refused(options, kind, argument):
    with refused(kind, argument):
        split_by_classes(examples(), **options)


def test_data_without_labels_are_refused():
    with pytest.raises(NetkinError, match=r"`data` must be arrays `\(inputs, labels\)`"):
        split_by_classes(torch.zeros(5, 2), 2, 1)


def test_a_split_takes_data_by_their_name():
    found = split_by_classes("digits:train", 5, 2, test="digits:test", partition="groups")
    inputs, labels = map(torch.cat, zip(*nk.load_data("digits:train", batch_size=100), strict=True))
    again = split_by_classes((inputs, labels), 5, 2, partition="groups")
    assert all(torch.equal(one, other) for name in found.train for one, other in
               zip(found.train[name], again.train[name], strict=True))  # fmt: skip
    assert sum(len(own) for _, own in found.test.values()) == 360
