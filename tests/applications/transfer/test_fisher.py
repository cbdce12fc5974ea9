"""Task2Vec and the Fisher–Rao norm against loops over single examples, closed forms and the identities of the paper."""

import copy
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine
from torch import nn

import netkin as nk
from netkin.applications.transfer import fisher
from netkin.applications.transfer.fisher import (
    TaskEmbedding,
    fisher_rao_distance,
    fisher_rao_norm,
    task2vec,
    task2vec_distance,
)
from netkin.errors import ForwardError, NoValue, ShapeError, UnknownName, ValueFault


class Twice(nn.Module):
    """Its head comes first and runs last; it calls one layer two times, with an in-place step after each."""

    def __init__(self):
        super().__init__()
        self.head, self.first, self.again = nn.Linear(6, 3), nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, batch):
        batch = self.first(batch).relu_()
        return {"logits": self.head(self.again(self.again(batch)).relu_()), "more": batch.detach()}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, batch):
        return self.head(self.inner(batch)[0][:, -1])


class Asking(nn.Module):
    """Asks for a number in the middle, which can't be done for many examples at once."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        rows = self.first(batch)
        return self.head(rows.relu() if rows.abs().max().item() > 0 else rows)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        rows = self.first(batch)
        return self.head(rows - rows.mean(0))


@pytest.fixture
def convnet():
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*first, nn.Linear(80, 4)).double()
    model[1].running_mean.normal_()
    return model


@pytest.fixture
def pictures():
    return torch.randn(9, 3, 11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def rows():
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def made(kind):
    torch.manual_seed(3)
    return kind().double().eval()


def slow_fisher(model, names, data, loss_terms):
    """The mean over examples of squared gradients, one example and one y at a time, then the mean within each filter.

    `loss_terms(outputs)` gives pairs of the probability of a y and its log-likelihood.
    """
    known = dict(model.named_parameters())
    weights = [known[name] for name in names]
    totals = [torch.zeros_like(one) for one in weights]
    for i in range(len(data)):
        output = model(data[i : i + 1].clone())
        logits = output["logits"] if isinstance(output, dict) else output
        for p, log_likelihood in loss_terms(logits[0]):
            for total, one in zip(totals, torch.autograd.grad(log_likelihood, weights, retain_graph=True), strict=True):
                total += float(p) * one**2 / len(data)
    return np.concatenate([total.flatten(1).mean(1).numpy() if total.ndim > 1 else total.numpy() for total in totals])


def of_classes(logits):
    for log_p in logits.log_softmax(0):
        yield log_p.detach().exp(), log_p


def of_many(logits):
    for y in product([0.0, 1.0], repeat=len(logits)):
        log_p = -nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(y).to(logits), reduction="sum")
        yield log_p.detach().exp(), log_p


def of_numbers(logits):
    for signs in product([-1.0, 1.0], repeat=len(logits)):  # draws with the mean and variance of the Gaussian
        y = logits.detach() + torch.tensor(signs).to(logits)
        yield 0.5 ** len(logits), -(y - logits).square().sum() / 2


# --- Task2Vec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outputs, terms", [("categorical", of_classes), ("multilabel", of_many), ("continuous", of_numbers)]
)
def test_the_embedding_agrees_with_a_loop_over_single_examples(convnet, pictures, outputs, terms):
    found = task2vec(convnet, pictures, outputs=outputs)
    names = ["0.weight", "1.weight", "3.weight"]
    slow = slow_fisher(convnet.eval(), names, pictures, terms)
    assert found.filters == (("0.weight", 4), ("1.weight", 4), ("3.weight", 5))
    assert slow.min() > 1e-6
    assert found.values == pytest.approx(slow, rel=1e-10)
    assert (found.examples, found.labels) == (9, f"expected, 4 outputs, {outputs}")


def test_the_fisher_information_of_a_logistic_regression_is_the_known_one(rows):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    p = (rows @ model.weight.T + model.bias).softmax(1).detach().numpy()
    wanted = (p * (1 - p)).T @ (rows.numpy() ** 2) / len(rows)  # E x_j² p_k (1 - p_k)
    assert task2vec(model, rows, backbone="").values == pytest.approx(wanted.mean(1), rel=1e-12)


@pytest.mark.parametrize(
    "kind, names",
    [
        (Twice, ["first.weight", "again.weight"]),
        (Recurrent, ["inner.weight_ih_l0", "inner.weight_hh_l0"]),
        (Asking, ["first.weight"]),
    ],
)
def test_any_model_is_taken_and_the_head_is_what_runs_last(kind, names, rows):
    model = made(kind)
    data = rows if kind is not Recurrent else torch.stack([rows, rows.flip(0), rows * 2], 1)
    found = task2vec(model, data)
    assert [name for name, _ in found.filters] == names
    assert found.values == pytest.approx(slow_fisher(model, names, data, of_classes), rel=1e-9)


def test_many_examples_at_once_and_one_after_the_other_agree(convnet, pictures, monkeypatch):
    def refused(*given):
        raise RuntimeError("not this way")

    with monkeypatch.context() as changed:
        changed.setattr(fisher._Fisher, "_of_one_alone", refused)
        at_once = task2vec(convnet, pictures, samples=3)
    monkeypatch.setattr(fisher._Fisher, "_of_one", refused)
    assert task2vec(convnet, pictures, samples=3).values == pytest.approx(at_once.values, rel=1e-12)


def test_a_hugging_face_classifier_is_taken():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3,
        max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).double().eval()
    batch = {"input_ids": torch.arange(15).reshape(3, 5), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    batch["attention_mask"][1, 3:] = 0
    found = task2vec(model, [batch | {"labels": torch.tensor([0, 1, 2])}])
    names = [name for name, _ in found.filters]
    assert "classifier.weight" not in names
    assert "bert.pooler.dense.weight" in names

    def one(i):
        return model(**{key: value[i : i + 1] for key, value in batch.items()}).logits

    wanted = np.zeros(8)
    for i in range(3):
        for p, log_p in of_classes(one(i)[0]):
            (step,) = torch.autograd.grad(log_p, [model.bert.pooler.dense.weight], retain_graph=True)
            wanted += float(p) * (step**2).mean(1).numpy() / 3
    assert found.values[-8:] == pytest.approx(wanted, rel=1e-9)


def test_draws_of_y_come_from_the_prediction_whatever_the_batches(convnet, pictures):
    exact, drawn = task2vec(convnet, pictures).values, task2vec(convnet, pictures, samples=2000)
    assert drawn.labels == "2000 draws from the prediction, seed 0, 4 outputs, categorical"
    assert drawn.values == pytest.approx(exact, rel=0.1)
    in_parts = task2vec(convnet, [pictures[:2], pictures[2:7], pictures[7:]], samples=5)
    assert in_parts.values == pytest.approx(task2vec(convnet, pictures, samples=5).values, rel=1e-12)
    assert not np.allclose(in_parts.values, task2vec(convnet, pictures, samples=5, seed=1).values)


def test_one_draw_is_the_gradient_of_one_class(convnet, pictures):
    one = pictures[:1]
    by_class = [
        slow_fisher(
            convnet.eval(), ["0.weight", "1.weight", "3.weight"], one, lambda f, y=y: [(1.0, f.log_softmax(0)[y])]
        )
        for y in range(4)
    ]
    found = task2vec(convnet, one, samples=1).values
    assert sum(np.allclose(found, wanted, rtol=1e-9) for wanted in by_class) == 1


def test_the_model_is_left_as_it_was(convnet, pictures):
    convnet.train()
    convnet[0].weight.requires_grad_(False)
    convnet[3].weight.grad = torch.ones_like(convnet[3].weight)
    before, state = copy.deepcopy(convnet), torch.get_rng_state()
    task2vec(convnet, pictures, samples=2)
    fisher_rao_norm(convnet, pictures)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in convnet.modules())
    assert not any(module._forward_hooks for module in convnet.modules())
    for (name, now), then in zip(convnet.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then), name
        assert now.requires_grad == then.requires_grad, name
        assert (now.grad is None) if name != "3.weight" else bool((now.grad == 1).all()), name
    assert all(torch.equal(*pair) for pair in zip(convnet.buffers(), before.buffers(), strict=True))


def test_frozen_weights_count_like_others(convnet, pictures):
    wanted = task2vec(convnet, pictures).values
    assert task2vec(convnet.requires_grad_(False), pictures).values == pytest.approx(wanted, rel=1e-12)


def test_the_modules_of_the_backbone_can_be_named(convnet, pictures):
    whole = task2vec(convnet, pictures, backbone="")
    assert whole.filters == (("0.weight", 4), ("1.weight", 4), ("3.weight", 5), ("5.weight", 4))
    part = task2vec(convnet, pictures, backbone=["0", "3"])
    assert part.filters == (("0.weight", 4), ("3.weight", 5))
    assert part.values == pytest.approx(np.delete(whole.values, [4, 5, 6, 7, 13, 14, 15, 16]), rel=1e-12)


def test_examples_are_counted_and_labels_not_read(convnet, pictures):
    loader = [(pictures[:4], torch.zeros(4)), (pictures[4:], torch.zeros(5))]
    found = task2vec(convnet, loader, examples=6)
    assert found.examples == 6
    assert found.values == pytest.approx(task2vec(convnet, pictures[:6]).values, rel=1e-12)


def test_half_precision_gives_the_same_to_its_digits(convnet, pictures):
    wanted = task2vec(convnet, pictures).values
    found = task2vec(convnet.bfloat16(), pictures.float()).values
    assert found == pytest.approx(wanted, rel=0.2)
    assert not np.array_equal(found, wanted)


def test_a_model_that_mixes_examples_is_refused(rows):
    with pytest.raises(ForwardError, match="layer 'first' the examples of a batch are mixed"):
        task2vec(made(Mixing), rows)


@pytest.mark.parametrize(
    "options, kind, sentence",
    [
        ({"samples": 0}, ValueFault, "at least 1 class for an example, of categorical outputs; got 0"),
        ({"samples": 1, "outputs": "multilabel"}, ValueFault, "got 1 for multilabel ones.*exact mean"),
        ({"outputs": "categoric"}, UnknownName, "no kind of outputs named 'categoric'; did you mean 'categorical'"),
        ({"backbone": "2"}, ValueFault, "no weights are left for the embedding.*name the `backbone`"),
        ({"backbone": "third"}, UnknownName, "no layer named 'third'"),
        ({"forward": lambda model, batch: model(batch).unsqueeze(1)}, ShapeError, r"the model gives \(1, 4\)"),
    ],
)
def test_what_task2vec_can_not_do_is_told(convnet, pictures, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        task2vec(convnet, pictures, **options)


def test_a_network_that_is_all_head_is_refused(rows):
    with pytest.raises(ValueFault, match="only layer with weights is its head"):
        task2vec(nn.Linear(4, 3).double(), rows)


def embedding(values, network="a"):
    return TaskEmbedding(np.array(values), (("0.weight", len(values)),), network, 5, "expected")


def test_the_distance_is_the_cosine_distance_of_shares():
    a, b = embedding([1.0, 2.0, 0.0, 5.0]), embedding([3.0, 0.5, 0.0, 0.0])
    F, G = np.array([1.0, 2.0, 5.0]), np.array([3.0, 0.5, 0.0])
    assert task2vec_distance(a, b) == pytest.approx(cosine(F / (F + G), G / (F + G)), abs=1e-14)
    assert task2vec_distance(b, a) == pytest.approx(task2vec_distance(a, b), abs=1e-14)
    assert task2vec_distance(a, a) == pytest.approx(0, abs=1e-14)


def test_embeddings_of_two_networks_are_compared_only_if_that_is_said(convnet, pictures):
    other = copy.deepcopy(convnet)
    nn.init.normal_(other[0].weight)
    a, b = task2vec(convnet, pictures), task2vec(other, pictures)
    with pytest.raises(ValueFault, match="networks with different weights.*independent=True"):
        task2vec_distance(a, b)
    assert 0 < task2vec_distance(a, b, independent=True) < 1
    nn.init.normal_(convnet[5].weight)  # another head on the same backbone is the same network
    assert 0 < task2vec_distance(a, task2vec(convnet, pictures)) < 1


def test_embeddings_that_can_not_be_compared_are_refused():
    with pytest.raises(ShapeError, match="2 and 1 filters, of other weights"):
        task2vec_distance(embedding([1.0, 2.0]), embedding([1.0]))
    with pytest.raises(NoValue, match="no Fisher information"):
        task2vec_distance(embedding([1.0]), embedding([0.0]))


# --- the Fisher–Rao norm ----------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueFault, match="two norms above 0; got 0 and 1"):
        fisher_rao_distance(0.0, 1.0)


@pytest.mark.parametrize(
    "options, kind, sentence",
    [
        ({"labels": "modell"}, UnknownName, "no distribution of y named 'modell'; did you mean 'model'"),
        ({"outputs": "numbers"}, UnknownName, "no kind of outputs named 'numbers'"),
        ({"depth": -1}, ValueFault, "number of hidden layers, must be at least 0; got -1"),
        ({"beta": 1.0}, ValueFault, "`beta` must be at least 0 and below 1; got 1"),
        ({"labels": "labels"}, ValueFault, "target='labels' needs labels"),
        ({"labels": "tempered", "beta": 0.0, "outputs": "continuous"}, ValueFault, "`beta` above 0"),
        ({"forward": lambda model, batch: model(batch).unsqueeze(1)}, ShapeError, r"the model gives \(1, 4\)"),
    ],
)
def test_what_has_no_fisher_rao_norm_is_told(convnet, pictures, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fisher_rao_norm(convnet, pictures, **options)


def test_a_model_without_weights_needs_a_depth(rows):
    with pytest.raises(ValueFault, match="no layer with a matrix of weights to count; pass `depth`"):
        fisher_rao_norm(nn.Identity(), rows)
