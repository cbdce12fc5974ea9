"""How a training of a stitch ends: what it is judged by, patience, and a warning where it came to nothing."""

import warnings

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications.stitching.evaluating import evaluate_all
from netkin.applications.stitching.training import TaskLoss, train_map
from netkin.errors import InvalidValue
from refusals import refused
from task_loss_worlds import joined, trained_from, two_perceptrons

WORSE = r"training ended worse than it began: what is minimised is {} on the sample, and was {} before; take a `lr` "


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 3])
def test_decay_is_part_of_what_is_minimised_and_judged(rank):
    a, b, data = two_perceptrons()
    network, training = trained_from(a, "1", b, "1", data, rank=rank, weight_decay=0.2, epochs=30, lr=0.01)
    weights = [weight.detach() for weight in network.transformation.parameters()]
    assert len(weights) == (2 if rank is None else 3)
    size = sum(float(weight.square().sum()) for weight in weights)
    assert training.final["objective"] == pytest.approx(training.final["loss"] + 0.1 * size, rel=1e-5)
    assert training.final["objective"] < training.history[0]["objective"]
    assert training.final["loss"] > training.history[0]["loss"]  # the price of smaller weights


def test_patience_goes_by_what_is_minimised():
    a, b, data = two_perceptrons()
    _, training = trained_from(a, "1", b, "1", data, weight_decay=0.2, patience=3, epochs=10, lr=0.01)
    losses = [record["loss"] for record in training.history]
    assert np.argmin(losses) == 1  # by the loss alone it would have ended after four epochs
    assert training.step == 80


def test_patience_ends_training_and_takes_the_best():
    a, b, data = two_perceptrons()
    settings = TaskLoss(lr=0.3, patience=3, every=1, epochs=50)
    network = joined(a, "1", b, "1", data[:2], settings)
    training = train_map(network, data[:2], settings, validation=data[2:])
    objectives = [record["objective"] for record in training.history]
    assert training.stopped
    assert training.steps < 100
    assert training.step == int(np.argmin(objectives))
    assert training.steps == training.step + 3
    assert training.final["objective"] == min(objectives)
    assert training.final["loss"] == pytest.approx(evaluate_all([network], data[2:])[0].cross_entropy, rel=1e-5)


@pytest.mark.parametrize("rate, ended", [(1e6, r"\d\.\d+e\+\d+"), (1.0, r"\d+\.\d+")])
def test_a_training_that_ends_worse_than_it_began_warns_with_both_numbers(rate, ended):
    a, b, data = two_perceptrons()
    fault = WORSE.format(ended, r"0\.\d+") + f"smaller than {rate:g}".replace("+", r"\+") + ", or .* by `patience=`"
    with pytest.warns(UserWarning, match=fault) as caught:
        found = nk.stitch(a, "1", b, "1", data, "task_loss", lr=rate, epochs=2)
    assert found.training["final"]["objective"] > found.history[0]["objective"]
    assert caught[0].filename == __file__


def test_with_patience_nothing_is_worse_than_the_start():
    a, b, data = two_perceptrons()
    network, training = trained_from(a, "1", b, "1", data, lr=1e6, epochs=4, patience=2)
    assert training.step == 0
    assert torch.equal(network.transformation.matrix, joined(a, "1", b, "1", data).transformation.matrix)


def test_a_training_that_stays_where_it_was_says_nothing():
    _, b, data = two_perceptrons()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network, training = trained_from(b, "1", b, "1", data, init="identity", lr=1e-6, epochs=2)
    assert training.step > 0
    assert network.transformation.matrix.diagonal().detach().numpy() == pytest.approx(1, abs=1e-3)


def test_a_rank_above_the_widths_is_refused_by_its_own_name():
    a, b, data = two_perceptrons()
    with refused(InvalidValue, "rank"):
        nk.stitch(a, "1", b, "1", data, "task_loss", rank=999)
