"""What is said of accuracies that are no better than chance, and when nothing is said."""

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

from federated_worlds import clients, network
from netkin.applications.continual import Task, learn_tasks
from netkin.applications.federated import federate
from netkin.training.chance import chance_caveat, chance_of
from quickly import slow_after

HALVES = torch.arange(200) % 2


def said_of(accuracy, labels=HALVES):
    return chance_caveat({"2-3": accuracy}, {"2-3": labels}, units="tasks", method="atoms")


def at_chance(result):
    return [caveat for caveat in result.caveats if caveat.code == "at-chance"]


def test_chance_is_the_share_of_the_most_frequent_class():
    assert chance_of(torch.tensor([2, 2, 2, 5])) == 0.75
    assert chance_of(torch.tensor([[0, -100], [1, 0]])) == pytest.approx(2 / 3)


def test_an_accuracy_at_chance_is_named_with_its_number_and_with_chance():
    caveat = said_of(0.52)
    for part in ("'atoms'", "2-3", "0.520", "0.500"):
        assert part in caveat.sentence
    assert said_of(0.9) is None


def test_guesses_are_called_chance_as_often_as_promised():
    right = np.random.default_rng(0).binomial(200, 0.5, size=400) / 200
    missed = sum(said_of(accuracy) is None for accuracy in right)
    assert missed <= binom.isf(0.001, 400, 0.05)


def test_a_class_that_is_frequent_is_no_success():
    mostly = torch.tensor([0] * 180 + [1] * 20)
    assert said_of(0.9, mostly) is not None
    assert said_of(0.99, mostly) is None


def blobs(seed, shuffled):
    """Return two classes of images that differ in their mean, or whose labels are drawn."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(120) % 2
    images = torch.randn(120, 1, 4, 4, generator=generator).double() + 2 * labels[:, None, None, None]
    return images, labels[torch.randperm(120, generator=generator)] if shuffled else labels


@pytest.mark.parametrize("method", slow_after(1, ["finetune", "joint", "atoms"]))
def test_a_sequence_of_tasks_says_if_its_labels_can_not_be_learnt(method):
    options = {"epochs": 4, "batch": 16, "lr": 0.05, "progress": False}
    for shuffled in (True, False):
        tasks = [Task(str(k), blobs(k, shuffled), blobs(k + 9, shuffled), 2) for k in range(2)]
        record = learn_tasks(network(), tasks, method, **options).record
        assert len(at_chance(record)) == shuffled
        assert ("not clearly better than chance" in str(record)) == shuffled


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_a_federation_says_if_its_labels_can_not_be_learnt(algorithm):
    options = {"rounds": 4, "batch": 16, "lr": 0.05, "progress": False}
    for shuffled in (True, False):
        train, test = ({f"c{k}": blobs(start + k, shuffled) for k in range(3)} for start in (0, 9))
        federation = federate(network(), train, algorithm, test=test, **options)
        caveats = at_chance(federation)
        assert len(caveats) == shuffled
        assert ("not clearly better than chance" in str(federation)) == shuffled
        assert all(("3 clients" in caveat.sentence) == (algorithm == "fedper") for caveat in caveats)


def test_chance_of_one_network_is_that_of_all_examples():
    """Each client has one class: a constant is right for a client, and rarely for all of them."""
    train = {f"c{k}": (images, torch.full_like(labels, k)) for k, (images, labels) in enumerate(clients(3).values())}
    with_counter = nn.Sequential(network(), nn.BatchNorm1d(3)).double()  # which each client keeps for itself
    common = federate(with_counter, train, "fedavg", test=train, rounds=1, lr=1e-6, progress=False)
    (caveat,) = at_chance(common)
    assert "all clients together" in caveat.sentence
    assert "reaches 0.333" in caveat.sentence


def test_without_test_data_nothing_is_said_of_chance():
    assert at_chance(federate(network(), clients(3), "fedavg", rounds=1, progress=False)) == []
