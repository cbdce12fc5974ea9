"""The Fisher–Rao norm against loops over single examples, and what holds and fails of the paper's bounds."""

from itertools import pairwise, product

import pytest
import torch
from torch import nn

import netkin as nk
from fisher_worlds import Twice, made, of_classes, of_many, of_numbers
from netkin.applications.transfer.fisher import fisher_rao_distance, fisher_rao_norm
from netkin.errors import InvalidValue, ShapeError, UnknownName
from refusals import refused


def plain(*widths, bias=False, seed=0):
    torch.manual_seed(seed)
    layers = [one for a, b in pairwise(widths) for one in (nn.Linear(a, b, bias=bias), nn.LeakyReLU(0.3))]
    return nn.Sequential(*layers[:-1]).double()


def along_weights(model, data, terms):
    """√E (Σ θ · ∂ loss/∂θ)², one example and one y at a time."""
    total, weights = 0.0, list(model.parameters())
    for i in range(len(data)):
        for p, log_likelihood in terms(model(data[i : i + 1])[0], i):
            steps = torch.autograd.grad(log_likelihood, weights, retain_graph=True)
            total += (
                float(p)
                * float(sum((w.detach() * g).sum() for w, g in zip(weights, steps, strict=True))) ** 2
                / len(data)
            )
    return total**0.5


@pytest.mark.parametrize(
    "outputs, terms", [("categorical", of_classes), ("multilabel", of_many), ("continuous", of_numbers)]
)
def test_without_biases_the_norm_is_that_of_the_weights_in_the_fisher_information(rows, outputs, terms):
    model = plain(4, 6, 5, 3)
    wanted = along_weights(model, rows, lambda f, i: terms(f))
    assert fisher_rao_norm(model, rows, outputs=outputs) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("outputs, labels", [("categorical", torch.arange(7) % 3), ("continuous", torch.ones(7, 3))])
def test_with_labels_the_same_identity_holds(rows, outputs, labels):
    model = plain(4, 6, 5, 3)

    def terms(f, i):
        loss = f.log_softmax(0)[labels[i]] if outputs == "categorical" else -(f - labels[i]).square().sum() / 2
        return [(1.0, loss)]

    found = fisher_rao_norm(model, [(rows, labels)], labels="labels", outputs=outputs)
    assert found == pytest.approx(along_weights(model, rows, terms), rel=1e-10)


def test_with_biases_the_identity_does_not_hold(rows):
    model = plain(4, 6, 5, 3, bias=True)
    wanted = along_weights(model, rows, lambda f, i: of_classes(f))
    assert abs(fisher_rao_norm(model, rows) / wanted - 1) > 0.01


@pytest.mark.parametrize("outputs", ["categorical", "multilabel"])
def test_the_tempered_norm_is_the_mean_over_tempered_draws(rows, outputs):
    model = plain(4, 6, 3)
    total = 0.0
    for f in model(rows).detach():
        p, q = (x.softmax(0) if outputs == "categorical" else x.sigmoid() for x in (f, 0.3 * f))
        for y in product([0.0, 1.0], repeat=3):
            y = torch.tensor(y).to(f)
            if outputs == "categorical" and y.sum() != 1:
                continue
            weight = (q * y).sum() if outputs == "categorical" else (q**y * (1 - q) ** (1 - y)).prod()
            total += float(weight * (f @ (p - y)) ** 2) / 7
    found = fisher_rao_norm(model, rows, labels="tempered", beta=0.3, outputs=outputs)
    assert found == pytest.approx(2 * total**0.5, rel=1e-12)


def test_eq_18_fails_where_outputs_are_shifted(rows):
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.bias += 100  # changes no prediction, and so neither p, q nor f·(p - y)
    bound = fisher_rao_norm(model, rows, labels="tempered") / 1
    norm = nk.mean_embedding_norm(model, rows, "")[""]
    assert norm > 5 * bound


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_left_of_eq_18_holds(rows, bias):
    for seed in range(5):
        model = plain(4, 6, 5, 3, bias=bias, seed=seed)
        made, bound = nk.layer_embeddings(model, rows), fisher_rao_norm(model, rows, labels="tempered") / 3
        f, g = nk.activations(model, None, rows), nk.gradients(model, None, rows)
        for name in made.names:
            sizes = f[name].square().sum(1) * g[name].square().sum(1)
            assert made.embedding(name).norm ** 2 <= float(sizes.mean())
        for name in ["4"] if bias else made.names:
            trace = float(made.mean(name).trace())
            assert abs(trace) <= bound
            assert bias or trace == pytest.approx(float(made.mean("4").trace()), abs=1e-14)


def test_at_hidden_layers_biases_break_the_bound(rows):
    model = plain(4, 6, 3, bias=True)
    with torch.no_grad():
        model[0].bias += 50
        model[2].bias -= model[2].weight @ torch.full((6,), 50.0, dtype=torch.float64)
    made, bound = nk.layer_embeddings(model, rows), fisher_rao_norm(model, rows, labels="tempered") / 2
    assert abs(float(made.mean("0").trace())) > bound


def test_a_deep_linear_network_has_one_norm_at_all_layers_and_other_embeddings(rows):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)]).double()
    f, g = nk.activations(model, None, rows), nk.gradients(model, None, rows)
    products = [(f[name] * g[name]).sum(1).square().mean().sqrt() for name in f]
    assert len(products) == 4
    assert all(torch.allclose(one, products[0], rtol=1e-12) for one in products)
    norms = list(nk.mean_embedding_norm(model, rows).values())
    assert len({round(norm, 6) for norm in norms}) == 4


def test_the_depth_is_counted_or_given(convnet, pictures):
    one = fisher_rao_norm(convnet, pictures, depth=0)
    assert fisher_rao_norm(convnet, pictures) == pytest.approx(3 * one)  # two convolutions and a linear layer
    assert fisher_rao_norm(convnet, [pictures[:4], pictures[4:]], depth=16) == pytest.approx(17 * one)
    assert fisher_rao_norm(convnet, [pictures, pictures], examples=9, depth=0) == pytest.approx(one)


def test_models_with_other_outputs_are_taken(rows):
    model = made(Twice)
    f = model(rows)["logits"].detach()
    p = f.softmax(1)
    wanted = (p * ((f * p).sum(1, keepdim=True) - f) ** 2).sum(1).mean().sqrt()
    assert fisher_rao_norm(model, rows, depth=0) == pytest.approx(float(wanted), rel=1e-12)


def test_the_fisher_rao_distance_is_relative():
    assert fisher_rao_distance(2.0, 8.0) == fisher_rao_distance(8.0, 2.0) == 1.5
    assert fisher_rao_distance(3.0, 3.0) == 0
    with pytest.raises(InvalidValue, match="two norms above 0; got 0 and 1"):
        fisher_rao_distance(0.0, 1.0)


@pytest.mark.parametrize(
    "options, kind, sentence",
    [
        ({"labels": "modell"}, UnknownName, "no distribution of y named 'modell'; did you mean 'model'"),
        ({"outputs": "numbers"}, UnknownName, "no kind of outputs named 'numbers'"),
        ({"depth": -1}, InvalidValue, "number of hidden layers, must be at least 0; got -1"),
        ({"beta": 1.0}, InvalidValue, "`beta` must be at least 0 and below 1; got 1"),
        ({"labels": "labels"}, InvalidValue, "target='labels' needs labels"),
        ({"labels": "tempered", "beta": 0.0, "outputs": "continuous"}, InvalidValue, "`beta` above 0"),
        ({"forward": lambda model, batch: model(batch).unsqueeze(1)}, ShapeError, r"the model gives \(1, 4\)"),
    ],
)
def test_what_has_no_fisher_rao_norm_is_told(convnet, pictures, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fisher_rao_norm(convnet, pictures, **options)


def test_a_model_without_weights_needs_a_depth(rows):
    with refused(InvalidValue, "depth"):
        fisher_rao_norm(nn.Identity(), rows)


def test_outputs_without_a_choice_or_a_number_are_refused(rows):
    with pytest.raises(ShapeError, match="one class of one is certain"):
        fisher_rao_norm(nn.Linear(4, 1).double(), rows)
    rows[5, 0] = torch.nan
    with pytest.raises(InvalidValue, match="the model's output holds 3 NaN or Inf among 21 values"):
        fisher_rao_norm(nn.Linear(4, 3).double(), rows)
