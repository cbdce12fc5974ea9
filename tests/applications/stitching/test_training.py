"""Task-loss training: what it reaches in known worlds, its gradient, its manners and its refusals."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.applications.stitching import stitch
from netkin.applications.stitching.evaluating import evaluate_all
from netkin.applications.stitching.training import TaskLoss, objective, portion, train_map
from netkin.errors import ForwardError, InvalidValue, ShapeError
from netkin.representations import replacing
from quickly import slow_after
from refusals import refused
from task_loss_worlds import convnet, images, joined, quiet_world, trained_from, two_perceptrons, two_taggers

# --- known worlds -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("init", ["least_squares", "random", "identity"])
def test_the_task_loss_finds_the_quiet_units_that_variance_overlooks(init):
    a, b, data = quiet_world()
    (direct,) = evaluate_all([joined(a, "turn", b, "turn", data, TaskLoss(rank=2))], data)
    network, training = trained_from(a, "turn", b, "turn", data, init=init, rank=2, epochs=60, lr=0.03)
    assert direct.agreement < 0.6
    assert direct.r2 > 0.9
    assert training.final["agreement"] == 1.0
    assert training.final["r2"] < 0
    assert evaluate_all([network], data)[0].agreement == 1.0
    assert torch.linalg.matrix_rank(network.transformation.matrix) == 2


@pytest.mark.slow
def test_a_random_start_reaches_the_loss_of_the_least_squares_start():
    a, b, data = quiet_world()
    losses = [
        trained_from(a, "turn", b, "turn", data, init=init, epochs=60, lr=0.03)[1].final["loss"]
        for init in ("least_squares", "random")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("labels", ["soft", "true"])
def test_training_beats_its_start(labels):
    a, b, data = two_perceptrons()
    _, training = trained_from(a, "1", b, "1", data, labels=labels, epochs=15, lr=0.02)
    first, last = training.history[0], training.final
    assert last["loss"] < first["loss"] - 0.005
    assert last["r2"] < first["r2"]  # least squares had the best


@pytest.mark.slow
def test_an_l1_penalty_makes_entries_zero_and_lowers_the_penalised_loss():
    a, b, data = two_perceptrons()
    network, training = trained_from(a, "1", b, "1", data, l1=3e-3, epochs=60, lr=0.01)
    dense, _ = trained_from(a, "1", b, "1", data, epochs=60, lr=0.01)
    sparsity = float((network.transformation.matrix == 0).double().mean())
    assert 0.2 < sparsity < 1
    assert not (dense.transformation.matrix == 0).any()
    matrix = network.transformation.matrix.detach()
    assert training.final["objective"] == pytest.approx(training.final["loss"] + 3e-3 * float(matrix.abs().sum()))
    assert training.final["objective"] < training.history[0]["objective"]
    assert (matrix[matrix != 0].abs() >= 1e-4).all()


def test_the_threshold_cuts_after_training():
    a, b, data = two_perceptrons()
    loose, _ = trained_from(a, "1", b, "1", data, l1=1e-3, threshold=0.05, epochs=3)
    matrix = loose.transformation.matrix.detach()
    assert (matrix[matrix != 0].abs() >= 0.05).all()
    assert (matrix == 0).any()


def test_any_loss_will_do():
    a, b, data = two_perceptrons()

    def distance(answers, own, labels):
        assert labels.shape == (len(own),)
        return (answers - own).square().mean()

    network, training = trained_from(a, "1", b, "1", data, labels=distance, init="random", epochs=20, lr=0.01)
    inputs = torch.cat([x for x, _ in data])
    with torch.no_grad():
        assert training.final["loss"] == pytest.approx(float((network(inputs) - b(inputs)).square().mean()), rel=1e-4)
    assert training.final["loss"] < training.history[0]["loss"]


def test_a_model_that_is_no_classifier_can_be_stitched_by_a_loss_of_its_own():
    a, b, data = two_perceptrons()
    b = nn.Sequential(*list(b)[:2], nn.Linear(8, 1))
    loss = lambda answers, own, _: (answers - own).square().mean()  # noqa: E731
    _, training = trained_from(a, "1", b, "1", data, labels=loss, init="random", epochs=5)
    assert training.final["accuracy"] is None
    assert training.final["agreement"] is None
    assert training.final["loss"] < training.history[0]["loss"]


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 3])
def test_the_gradient_is_that_of_the_whole_objective(rank):
    a, b, data = two_perceptrons(torch.float64, examples=100)
    settings = TaskLoss(rank=rank, cka_penalty=0.7)
    network = joined(a, "1", b, "1", data, settings)
    gradients = own_gradients(network, portion(network, data[0]), settings)
    for weight, gradient in zip(network.transformation.parameters(), gradients, strict=True):
        for place in list(np.ndindex(*weight.shape))[::7]:
            assert float(gradient[place]) == pytest.approx(slope(network, data[0], weight, place), abs=1e-7)


def own_gradients(network, one, settings):
    value = objective(network, one, settings)
    return torch.autograd.grad(value, list(network.transformation.parameters()))


@torch.no_grad()
def slope(network, batch, weight, place, step=1e-5):
    """Return the slope of the objective by finite differences, written out with both models run whole."""
    values = []
    for sign in (1, -1):
        weight[place] += sign * step
        values.append(float(slow_objective(network, batch)))
        weight[place] -= sign * step
    return (values[0] - values[1]) / (2 * step)


def slow_objective(network, batch):
    inputs, _ = batch
    hidden = torch.relu(network.a[0](inputs)) @ network.transformation.matrix + network.transformation.shift
    own = torch.relu(network.b[0](inputs))
    with replacing(network.b, "1", lambda _: hidden):
        answers = network.b(inputs)
    return torch.nn.functional.cross_entropy(answers, network.b(inputs).softmax(1)) + 0.7 * nk.cka(hidden, own)


def test_the_gradient_by_hooks_is_that_of_the_cut():
    a, b, data = convnet(0).eval(), convnet(1).eval(), images()
    settings = TaskLoss(cka_penalty=0.5)
    gradients = []
    for cuts in (True, False):
        network = joined(a, "3", b, "3", data, settings, cuts)
        assert (network.tail.graph is not None) is cuts
        one = portion(network, data[0])
        assert (one.batch is None) is cuts
        gradients.append(own_gradients(network, one, settings))
    for cut, hooked in zip(*gradients, strict=True):
        torch.testing.assert_close(cut, hooked)


def test_the_penalty_sees_activations_before_a_step_in_place():
    a, b, data = convnet(0).eval(), convnet(1).eval(), images()
    settings = TaskLoss(cka_penalty=2.0)
    network = joined(a, "5", b, "5", data, settings)  # an in-place ReLU comes next
    one = portion(network, data[0])
    transformed = network.transformation(one.head)
    value = objective(network, one, settings).detach()
    wanted = objective(network, one, TaskLoss()).detach() + 2 * nk.cka(
        nk.positions(transformed.detach()), nk.positions(one.own)
    )
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)


# --- what is left alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", slow_after(1, [True, False]))
@pytest.mark.parametrize("itself", [True, False])
def test_both_networks_stay_as_they_were_bit_for_bit(cuts, itself):
    a, data = convnet(0), images()
    b = a if itself else convnet(1).train()
    b[0].weight.requires_grad_(False)
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    flags = [[(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] for model in (a, b)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    network, training = trained_from(a, "3", b, "3", data, cuts, epochs=3, cka_penalty=0.1, lr=0.01)
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(weight.grad is None for weight in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert flags == [
        [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] for model in (a, b)
    ]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(weight.grad is None and weight.requires_grad for weight in network.transformation.parameters())
    assert training.final["objective"] < training.history[0]["objective"]


def test_no_gradient_is_computed_for_the_weights_of_either_model():
    a, b, data = two_perceptrons()
    seen = []
    b[2].register_full_backward_hook(lambda module, given, got: seen.append(module.weight.requires_grad))
    trained_from(a, "1", b, "1", data, cuts=False, epochs=1)
    assert seen
    assert not any(seen)


def test_the_same_seed_gives_the_same_stitch_and_another_another():
    a, b, data = two_perceptrons()
    matrices = []
    for seed in (0, 0, 1):
        torch.randn(seed + 1)  # whatever the global state
        network, _ = trained_from(a, "1", b, "1", data, epochs=2, lr=0.01, seed=seed)
        matrices.append(network.transformation.matrix)
    assert torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[0], matrices[2])


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_record_is_what_evaluate_says():
    a, b, data = convnet(0).eval(), convnet(1).eval(), images()
    network, training = trained_from(a, "3", b, "3", data, epochs=2, every=2)
    assert [record["step"] for record in training.history] == [0, 2, 4, 6]
    assert [record["epoch"] for record in training.history] == pytest.approx([0, 2 / 3, 4 / 3, 2])
    evaluation = evaluate_all([network], data)[0]
    assert training.final["loss"] == pytest.approx(evaluation.cross_entropy, rel=1e-5)
    for name in ("accuracy", "agreement", "cka", "r2", "cca", "svcca"):
        assert training.final[name] == pytest.approx(getattr(evaluation, name), rel=1e-5), name
        assert training.history[-1][name] == training.final[name]


def test_the_stitch_is_judged_on_other_data_if_they_are_given():
    a, b, data = two_perceptrons()
    network = joined(a, "1", b, "1", data)
    training = train_map(network, data[:6], TaskLoss(epochs=2), validation=data[6:])
    assert training.final["loss"] == pytest.approx(evaluate_all([network], data[6:])[0].cross_entropy, rel=1e-5)


def test_steps_end_a_training_within_an_epoch():
    a, b, data = two_perceptrons()
    _, training = trained_from(a, "1", b, "1", data, steps=11)
    assert training.steps == training.step == 11
    assert not training.stopped
    assert [record["step"] for record in training.history] == [0, 8, 11]


@pytest.mark.parametrize("cka_of", ["places", "examples"])
def test_sequences_leave_out_padding(cka_of):
    a, b, data, other = two_taggers()
    options = {"labels": "true", "epochs": 5, "cka_penalty": 0.1, "cka_of": cka_of}
    runs = [trained_from(a, "inner.1", b, "inner.1", one, **options) for one in (data, other)]
    torch.testing.assert_close(runs[0][0].transformation.matrix, runs[1][0].transformation.matrix)
    assert runs[0][1].final == pytest.approx(runs[1][1].final)


def test_bfloat16_autocast_trains_too():
    a, b, data = two_perceptrons()
    _, training = trained_from(a, "1", b, "1", data, epochs=10, lr=0.01, autocast=True)
    assert training.final["loss"] < training.history[0]["loss"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_nan_in_training_is_one_sentence_and_the_transformation_is_as_before():
    a, b, data = two_perceptrons()
    network = joined(a, "1", b, "1", data)
    before = copy.deepcopy(network.transformation.state_dict())
    calls = []

    def breaks(answers, own, labels):
        calls.append(answers.requires_grad)
        value = (answers - own).square().mean()
        return value * float("nan") if sum(calls) == 5 else value

    fault = r"training came to NaN or Inf at step 5 of 80 with `lr=0.001`; the transformation is as it was before"
    with pytest.raises(ForwardError, match=fault):
        train_map(network, data, TaskLoss(labels=breaks))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.transformation.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in network.parameters())


def test_a_rate_that_bursts_is_noticed():
    a, b, data = two_perceptrons()
    with pytest.raises(ForwardError, match="NaN or Inf at step"):
        trained_from(a, "1", b, "1", data, labels=lambda x, y, _: (x - y).square().mean(), lr=1e30)


def test_a_network_that_gives_nan_before_training_is_refused():
    a, b, data = two_perceptrons()
    network = joined(a, "1", b, "1", data)
    with torch.no_grad():
        b[2].bias[0] = float("nan")
    with pytest.raises(ForwardError, match="NaN or Inf on the sample before training; test both models on these data"):
        train_map(network, data, TaskLoss())


def test_a_loss_must_be_one_number():
    a, b, data = two_perceptrons()
    with pytest.raises(ShapeError, match=r"must return one number as a tensor; got a tensor of shape \(50, 3\)"):
        trained_from(a, "1", b, "1", data, labels=lambda answers, own, labels: answers - own)
    with pytest.raises(ShapeError, match="got float"):
        trained_from(a, "1", b, "1", data, labels=lambda answers, own, labels: 1.0)


def test_true_labels_must_be_there():
    a, b, data = two_perceptrons()
    with refused(InvalidValue, "labels"):
        trained_from(a, "1", b, "1", [x for x, _ in data], labels="true")


def test_a_second_model_without_gradient_is_refused():
    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            return self.last(self.first(inputs).detach())

    a, _, data = two_perceptrons()
    with pytest.raises(ForwardError, match="no gradient comes back .* layer 'first', .* use a direct method"):
        trained_from(a, "1", Closed(), "first", data)


# --- as one call ------------------------------------------------------------------------------------------------------


def test_stitch_trains_by_the_same_road():
    a, b, data = two_perceptrons()
    made = stitch(a, "1", b, "1", data, "task_loss(rank=3, epochs=2)", data, lr=0.01)
    network, training = trained_from(a, "1", b, "1", data, rank=3, epochs=2, lr=0.01)
    assert torch.equal(made.transformation.matrix, network.transformation.matrix)
    assert made.history == training.history
    assert made.method == "task_loss(rank=3, epochs=2, lr=0.01)"
    assert made.evaluation.accuracy == training.final["accuracy"]


def test_progress_goes_to_stderr_only_when_it_takes_long(capsys):
    a, b, data = two_perceptrons()
    trained_from(a, "1", b, "1", data, epochs=1)
    assert capsys.readouterr() == ("", "")
