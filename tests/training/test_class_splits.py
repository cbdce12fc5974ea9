import pytest
import torch

import netkin as nk
from netkin.errors import InvalidValue, NameClash, ShapeError
from netkin.sources.batches import Batches
from netkin.training.class_splits import Task, require_tasks, split_by_classes, split_tasks
from refusals import refusals, refused


def arrays(classes=6, each=5):
    labels = torch.arange(classes).repeat(each)
    return labels.float()[:, None], labels


def test_every_example_is_in_the_task_of_its_class_under_its_place_in_it():
    tasks = split_tasks(arrays(), arrays(), 3, seed=4)
    seen = []
    for task in tasks:
        classes = [int(one) for one in task.name.replace("-", ",").split(",")]
        assert len(task.train[1]) == 10
        assert task.classes == 2
        for value, label in zip(task.train[0][:, 0].tolist(), task.train[1].tolist(), strict=True):
            assert classes[label] == value
        seen += classes
    assert sorted(seen) == list(range(6))


def test_the_order_of_classes_follows_from_the_seed():
    orders = [[task.name for task in split_tasks(arrays(), arrays(), 3, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_names_batches_and_arrays_give_the_same_tasks():
    named = split_tasks("digits:train", "digits:test", 5)
    batches = split_tasks(list(nk.load_data("digits:train")), list(nk.load_data("digits:test")), 5)
    assert [one.digest() for one in named] == [one.digest() for one in batches]
    assert sum(len(task.train[1]) for task in named) == nk.load_data("digits:train").examples


@pytest.fixture
def named():
    """Examples of eight classes that have names, as those of a folder of images have."""
    inputs, labels = arrays(classes=8)
    return Batches("images:zoo", inputs, labels, classes=("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"))


def test_tasks_are_named_by_their_classes_where_these_have_names(named):
    assert [task.name for task in split_tasks(named, named, 4)] == ["ant, bee", "cat, dog", "eel, fox", "gnu, hen"]
    assert [task.name for task in split_tasks(named, named, 2)] == ["ant to dog", "eel to hen"]
    mixed = [task.name for task in split_tasks(named, named, 2, seed=0)]
    assert all(name.endswith(" and 2 more") for name in mixed)
    assert len(set(mixed)) == 2


def test_classes_of_clients_are_named(named):
    clients = split_by_classes(named, clients=4, classes=2, partition="groups")
    assert str(clients).splitlines()[0] == "0: 10 examples of classes ant, bee"
    assert repr(clients) == "ClientSplit(4 clients, 40 examples)"


def test_data_and_tasks_are_shown_in_a_line(named):
    assert repr(named) == "Batches('images:zoo', 40 examples, with labels, batch_size=128)"
    task = split_tasks(named, named, 4)[0]
    assert repr(task) == "Task('ant, bee', 2 classes, 10 examples to train and 10 to test on)"


def test_a_batch_without_examples_adds_none():
    inputs, labels = arrays()
    tasks = split_tasks([arrays(), (inputs[:0], labels[:0])], arrays(), 3)
    assert [one.digest() for one in tasks] == [one.digest() for one in split_tasks(arrays(), arrays(), 3)]


@pytest.mark.parametrize("count", [0, 4, 6, True, 2.0])
def test_numbers_of_tasks_that_leave_no_two_classes_or_a_remainder_are_refused(count):
    with pytest.raises(InvalidValue, match=r"whole number from 1 to 3|can't be split into"):
        split_tasks(arrays(), arrays(), count)


def test_five_classes_are_no_two_tasks():
    with refused(InvalidValue, "tasks"):
        split_tasks(arrays(5), arrays(5), 2)


def test_data_without_labels_are_refused():
    with pytest.raises(InvalidValue, match="`train` must be arrays .* no labels here"):
        split_tasks(torch.zeros(4, 3), arrays(), 3)


def test_a_class_that_is_missing_from_the_test_leaves_no_task():
    inputs, labels = arrays()
    with pytest.raises(InvalidValue, match="task '4-5' has 0 inputs and 0 labels to test on"):
        split_tasks(arrays(), (inputs[labels < 4], labels[labels < 4]), 3)


def test_labels_outside_the_classes_are_refused():
    with pytest.raises(InvalidValue, match="labels from 0 to 5 to train on; with 3 classes they must lie from 0 to 2"):
        Task("a", arrays(), arrays(), 3)


def test_sequences_of_no_tasks_of_other_things_and_of_one_name_are_refused():
    task = Task("a", arrays(), arrays(), 6)
    refusals(
        (lambda: require_tasks([]), InvalidValue, "tasks"),
        (lambda: require_tasks(["a"]), InvalidValue, "tasks"),
        (lambda: require_tasks([task, task]), NameClash, "tasks"),
    )


def test_tasks_with_inputs_of_other_shapes_are_refused():
    one, other = Task("a", arrays(), arrays(), 6), (torch.zeros(3, 2), torch.arange(3))
    with pytest.raises(ShapeError, match=r"inputs of one shape; 'b' makes it \(1,\) and \(2,\)"):
        require_tasks([one, Task("b", other, other, 3)])


def test_arrays_of_numpy_make_a_task():
    inputs, labels = (one.numpy() for one in arrays())
    task = Task("a", (inputs, labels.astype("int32")), (inputs, labels), 6)
    assert task.digest() == Task("a", arrays(), arrays(), 6).digest()
