"""The options of task-loss training, its losses and its sparse steps."""

import pytest
import torch
from sklearn.linear_model import Lasso
from torch.nn import functional

from netkin.applications.stitching.training import (
    LOSSES,
    TaskLoss,
    drop_padding,
    require_labels,
    scores,
    shrink,
    soft,
)
from netkin.errors import InvalidValue, ShapeError, UnknownName
from refusals import refused

# --- how it is written ------------------------------------------------------------------------------------------------


def test_it_is_written_as_measures_are():
    settings = TaskLoss.read("task_loss(init=procrustes, rank=8, l1=0)")
    assert (settings.init, settings.rank, settings.l1) == ("procrustes", 8, 0)
    assert str(settings) == "task_loss(init=procrustes, rank=8)"
    assert TaskLoss.read(str(settings)) == settings
    assert TaskLoss.read("task_loss") == TaskLoss()
    assert TaskLoss.read("task_loss(rank=8)", {"epochs": 3}) == TaskLoss(rank=8, epochs=3)


@pytest.mark.parametrize(
    "how, options, kind, argument",
    [
        ("least_squares", {}, UnknownName, "method"),
        ("task_loss(lrr=0.1)", {}, UnknownName, "lrr"),
        ("task_loss", {"l2": 0.1}, UnknownName, "l2"),
    ],
)
def test_other_ways_of_writing_it_are_refused(how, options, kind, argument):
    with refused(kind, argument):
        TaskLoss.read(how, options)


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"rank": 0}, "rank"),
        ({"epochs": 2.5}, "epochs"),
        ({"every": True}, "every"),
        ({"l1": -1}, "l1"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"lr": 0}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"cka_penalty": float("nan")}, "cka_penalty"),
        ({"cka_of": "maps"}, "cka_of"),
        ({"seed": -1}, "seed"),
        ({"labels": "hard"}, "labels"),
        ({"l1": 0.1, "rank": 4}, "l1"),
    ],
)
def test_options_out_of_range_are_refused(options, argument):
    with pytest.raises((UnknownName, InvalidValue)) as fault:
        TaskLoss(**options)
    assert fault.value.argument == argument


@pytest.mark.parametrize(
    ("init", "fault"), [("least_square", "did you mean 'least_squares'"), (3, "no matching method")]
)
def test_a_start_that_is_no_direct_method_is_refused(init, fault):
    with pytest.raises(UnknownName, match=fault):
        TaskLoss(init=init)


def test_least_squares_of_a_rank_starts_from_the_best_map_of_that_rank():
    assert TaskLoss(rank=4).start == "reduced_rank(k=4)"
    assert TaskLoss(rank=4, init="procrustes").start == "procrustes"
    assert TaskLoss(init="random", seed=7).start == "random(seed=7)"
    assert TaskLoss().start == "least_squares"


# --- losses -----------------------------------------------------------------------------------------------------------


def test_the_losses_are_cross_entropies_to_soft_and_true_labels():
    answers, own = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([0, 2, 1, 1, 0])
    logs = answers - answers.logsumexp(1, keepdim=True)
    shares = own.exp() / own.exp().sum(1, keepdim=True)
    assert LOSSES["soft"](answers, own, None) == pytest.approx(float(-(shares * logs).sum(1).mean()))
    assert LOSSES["true"](answers, own, labels) == pytest.approx(float(-logs[range(5), labels].mean()))


def test_places_of_sequences_count_unless_padded_or_unlabelled():
    answers = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels, mask = torch.tensor([[0, -100, 2], [3, 1, 0]]), torch.tensor([[True, True, True], [True, False, False]])
    left, own, right = drop_padding(answers, 2 * answers, labels, mask)
    torch.testing.assert_close(left, answers[[0, 0, 1], [0, 2, 0]])
    torch.testing.assert_close(own, 2 * left)
    assert right.tolist() == [0, 2, 3]
    assert LOSSES["true"](left, own, right) == functional.cross_entropy(left, right)
    whole, _, _ = drop_padding(answers, None, None, None)
    assert scores(whole).shape == (6, 4)


def test_answers_that_are_no_scores_need_a_loss_of_their_own():
    with pytest.raises(ShapeError, match=r"shape \(5, 1\) and is no row of scores .* pass a function"):
        scores(torch.ones(5, 1))


@pytest.mark.parametrize(
    "labels, kind, argument",
    [
        (None, InvalidValue, "labels"),
        (torch.ones(4, 3), ShapeError, "labels"),
        (torch.tensor([0, 3, 4]), InvalidValue, "labels"),
        (torch.tensor([0, -1]), InvalidValue, "labels"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(labels, kind, argument):
    with refused(kind, argument):
        require_labels(labels, torch.ones(1, 3))


def test_labels_of_sequences_are_one_for_each_place():
    with refused(ShapeError, "labels"):
        require_labels(torch.tensor([0, 1, 2, 0]), torch.ones(1, 5, 3))


# --- sparse steps -----------------------------------------------------------------------------------------------------


def quadratic():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    Y = X @ torch.tensor([[2.0], [-1.0], [0.3], [0], [0], [0]], dtype=torch.float64)
    return X, Y + 0.3 * torch.randn(50, 1, generator=generator, dtype=torch.float64)


def test_the_proximal_step_comes_to_the_lasso():
    X, Y = quadratic()
    weight = torch.nn.Parameter(torch.ones(6, 1, dtype=torch.float64))
    adam, alpha = torch.optim.Adam([weight], lr=0.02), 0.15
    for _ in range(1500):
        adam.zero_grad()
        ((X @ weight - Y).square().sum() / 100).backward()
        adam.step()
        shrink(adam, weight, alpha)
    wanted = Lasso(alpha=alpha, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(X.numpy(), Y.numpy()).coef_
    torch.testing.assert_close(weight.detach().flatten(), torch.as_tensor(wanted), rtol=0, atol=1e-4)
    assert ((weight == 0).flatten().numpy() == (wanted == 0)).all()
    assert 0 < int((weight == 0).sum()) < 6


def test_an_entry_without_gradient_vanishes():
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    adam = torch.optim.Adam([weight], lr=0.01)
    weight[0].backward()
    adam.step()
    shrink(adam, weight, 0.1)
    assert weight.tolist() == pytest.approx([1 - 0.01 - 0.001, 0.0])


def test_answers_for_fewer_examples_are_refused():
    with pytest.raises(ShapeError, match="gave 3 answers and the second model 4 for the same batch"):
        soft(torch.ones(3, 2), torch.ones(4, 2))
