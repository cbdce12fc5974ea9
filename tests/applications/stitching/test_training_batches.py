"""What the training of a stitch keeps in memory, what it reads again, and what it is judged on."""

import pytest
import torch

from netkin.applications.stitching.training import Portion, Sampling, TaskLoss, train_map
from netkin.applications.stitching.training import join as joined_portions
from netkin.errors import InvalidValue, MemoryLimit, ShapeError
from refusals import refused
from task_loss_worlds import joined, trained_from, two_perceptrons


def counting(model):
    runs = []
    model.register_forward_pre_hook(lambda module, inputs: runs.append(len(inputs[0])))
    return runs


@pytest.mark.parametrize("epochs", [1, 7])
def test_after_the_first_pass_no_time_is_spent_in_the_first_model(epochs):
    a, b, data = two_perceptrons()
    network = joined(a, "1", b, "1", data)
    in_a, in_head_of_b = counting(a[0]), counting(b[0])
    training = train_map(network, data, TaskLoss(epochs=epochs, sample=100))
    assert sum(in_a) == sum(in_head_of_b) == 400  # the sample is picked out of what is gathered
    assert "400 examples kept in memory" in training.kept


def test_true_labels_need_the_second_model_for_the_sample_alone():
    a, b, data = two_perceptrons()
    network = joined(a, "1", b, "1", data)
    in_head_of_b = counting(b[0])
    train_map(network, data, TaskLoss(epochs=2, labels="true", sample=10))
    assert sum(in_head_of_b) < 150


def test_activations_that_do_not_fit_are_computed_again_with_the_same_result():
    a, b, data = two_perceptrons()
    one_batch = joined(a, "1", b, "1", data)
    in_a, in_head_of_b = counting(a[0]), counting(b[0])
    training = train_map(one_batch, data[:1], TaskLoss(epochs=6, memory=100, cka_penalty=0.1))
    assert "more than 100 B: the data are read and the first model runs in every epoch" in training.kept
    assert sum(in_a) == 50 * (1 + 6) == sum(in_head_of_b)
    again = joined(a, "1", b, "1", data)
    train_map(again, data[:1], TaskLoss(epochs=6, cka_penalty=0.1))
    assert torch.equal(one_batch.transformation.matrix, again.transformation.matrix)


def test_data_that_come_in_another_order_are_answered_anew():
    a, b, data = two_perceptrons()

    class Shuffled:
        def __init__(self):
            self.round = 0

        def __iter__(self):
            self.round += 1
            return iter(data[self.round % 8 :] + data[: self.round % 8])

    settings = TaskLoss(epochs=3, memory=0, lr=0.01)
    network = joined(a, "1", b, "1", data, settings)
    training = train_map(network, Shuffled(), settings)
    kept, _ = trained_from(a, "1", b, "1", data, epochs=3, lr=0.01)
    assert training.final["loss"] < training.history[0]["loss"]
    torch.testing.assert_close(network.transformation.matrix, kept.transformation.matrix, rtol=0, atol=0.1)


def test_examples_are_dealt_out_anew_only_if_asked():
    a, b, data = two_perceptrons()
    sizes = []

    def watched(answers, own, labels):
        sizes.append(len(answers))
        return (answers - own).square().mean()

    for batch in (None, 150):
        sizes.clear()
        trained_from(a, "1", b, "1", data, labels=watched, batch=batch, epochs=2, sample=400)
        steps = sizes[8:]  # the first look at the sample
        assert steps[:3] == ([50, 50, 50] if batch is None else [150, 150, 100])
    with refused(MemoryLimit, "memory"):
        trained_from(a, "1", b, "1", data, batch=150, memory=9)


@pytest.mark.parametrize("cuts", [True, False])
def test_dealt_out_anew_every_example_keeps_its_own_answers(cuts):
    _, b, data = two_perceptrons()
    _, training = trained_from(b, "1", b, "1", data, cuts, init="identity", batch=64, epochs=2, lr=1e-9)
    own = torch.cat([b(x) for x, _ in data]).detach().double().softmax(1)
    entropy = float(-(own * own.log()).sum(1).mean())
    assert training.history[-1]["training_loss"] == pytest.approx(entropy, abs=0.01)
    assert training.final["loss"] == pytest.approx(entropy, rel=1e-5)


def test_one_tensor_of_inputs_is_enough():
    a, b, data = two_perceptrons()
    inputs = torch.cat([x for x, _ in data])
    _, training = trained_from(a, "1", b, "1", inputs, epochs=2)
    assert training.final["accuracy"] is None
    assert training.final["agreement"] > 0
    assert training.steps == 2 * 4  # batches of 128


@pytest.mark.parametrize("sizes", [[50] * 9, [450], [7, 300, 1, 142], [1] * 450])
def test_the_sample_is_spread_evenly(sizes):
    a, b, _ = two_perceptrons()
    inputs = torch.randn(450, 6, generator=torch.Generator().manual_seed(5))
    data = inputs.split(sizes)
    network, sampling = joined(a, "1", b, "1", [inputs]), Sampling(100)
    for batch in data:
        sampling.offer(network, batch)
    heads = torch.cat([one.head for one in sampling.portions])
    assert 50 <= len(heads) <= 100
    torch.testing.assert_close(heads, a[:2](inputs)[:: sampling.stride].detach())


def test_data_that_run_dry_are_refused():
    a, b, data = two_perceptrons()

    class Drying:
        def __init__(self):
            self.left = len(data)

        def __iter__(self):
            self.left -= 1
            return iter(data[: self.left])

    network = joined(a, "1", b, "1", data)
    with refused(InvalidValue, "data"):
        train_map(network, Drying(), TaskLoss(memory=0))


def test_batches_of_different_shapes_are_not_dealt_out_anew():
    with refused(ShapeError, "batch"):
        joined_portions([Portion(head=torch.ones(2, 4, 5)), Portion(head=torch.ones(2, 3, 5))])
