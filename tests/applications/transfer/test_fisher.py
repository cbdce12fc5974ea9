"""Task2Vec against loops over single examples and closed forms."""

import copy

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine
from torch import nn

from fisher_worlds import Twice, made, of_classes, of_many, of_numbers
from netkin.applications.transfer import fisher
from netkin.applications.transfer.fisher import (
    TaskEmbedding,
    fisher_rao_norm,
    task2vec,
    task2vec_cosine,
    task2vec_distance,
)
from netkin.errors import ForwardError, InvalidValue, NoValue, ShapeError, UnknownName


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


class Writing(Asking):
    """Writes into its input before it asks."""

    def forward(self, batch):
        batch += 1
        return super().forward(batch)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        rows = self.first(batch)
        return self.head(rows - rows.mean(0))


def slow_fisher(run, names, data, loss_terms, model=None):
    """The mean over examples of squared gradients, one example and one y at a time, then the mean within each filter.

    `loss_terms(outputs)` gives pairs of the probability of a y and its log-likelihood.
    """
    known = dict((model or run).named_parameters())
    weights = [known[name] for name in names]
    totals = [torch.zeros_like(one) for one in weights]
    for i in range(len(data)):
        output = run(data[i : i + 1].clone())
        logits = output["logits"] if isinstance(output, dict) else output
        for p, log_likelihood in loss_terms(logits[0]):
            for total, one in zip(totals, torch.autograd.grad(log_likelihood, weights, retain_graph=True), strict=True):
                total += float(p) * one**2 / len(data)
    return np.concatenate([total.flatten(1).mean(1).numpy() if total.ndim > 1 else total.numpy() for total in totals])


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
        (Writing, ["first.weight"]),
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


@pytest.mark.slow
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


def test_what_all_examples_share_goes_to_each(rows):
    class Shifted(Asking):
        def forward(self, rows, shift):
            return super().forward(rows + shift)

    shift = torch.arange(4.0, dtype=torch.float64)
    model = made(Shifted)
    wanted = slow_fisher(lambda x: model(x, shift), ["first.weight"], rows, of_classes, model)
    assert task2vec(model, [{"rows": rows, "shift": shift}]).values == pytest.approx(wanted, rel=1e-10)


def test_weights_that_the_head_shares_do_not_count():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.inner(self.table(ids).mean(1)))

    model, ids = made(Tied), torch.tensor([[0, 1], [2, 3], [4, 4]])
    found = task2vec(model, ids)
    assert found.filters == (("inner.weight", 4),)
    assert found.values == pytest.approx(slow_fisher(model, ["inner.weight"], ids, of_classes), rel=1e-10)
    table = task2vec(model, ids, backbone="table")  # its own gradient and that of the head, in one
    assert table.values == pytest.approx(slow_fisher(model, ["table.weight"], ids, of_classes), rel=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(convnet, pictures):
    wanted, drawn = task2vec(convnet, pictures), task2vec(convnet, pictures, samples=3)
    convnet.cuda()
    assert task2vec(convnet, pictures).values == pytest.approx(wanted.values, rel=1e-9)
    assert task2vec(convnet, pictures, samples=3).values == pytest.approx(drawn.values, rel=1e-9)
    assert fisher_rao_norm(convnet, pictures) == pytest.approx(fisher_rao_norm(convnet.cpu(), pictures), rel=1e-9)


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
        ({"samples": 0}, InvalidValue, "at least 1 class for an example, of categorical outputs; got 0"),
        ({"samples": 1, "outputs": "multilabel"}, InvalidValue, "got 1 for multilabel ones.*exact mean"),
        ({"outputs": "categoric"}, UnknownName, "no kind of outputs named 'categoric'; did you mean 'categorical'"),
        ({"backbone": "2"}, InvalidValue, "no weights are left for the embedding.*name the `backbone`"),
        ({"backbone": "third"}, UnknownName, "no layer named 'third'"),
        ({"forward": lambda model, batch: model(batch).unsqueeze(1)}, ShapeError, r"the model gives \(1, 4\)"),
    ],
)
def test_what_task2vec_can_not_do_is_told(convnet, pictures, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        task2vec(convnet, pictures, **options)


def test_outputs_without_a_choice_or_a_number_are_refused(rows):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()
    with pytest.raises(ShapeError, match="1 output for each example, and one class of one is certain"):
        task2vec(model, rows)
    assert task2vec(model, rows, outputs="multilabel").values.min() > 0
    rows[5, 0] = torch.nan
    with pytest.raises(InvalidValue, match="the Fisher information holds 5 NaN or Inf among 5 values"):
        task2vec(model, rows, outputs="multilabel")


def test_a_model_that_can_not_be_trained_is_refused_in_a_sentence(rows):
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, batch):
            hidden = self.first(batch).exp()
            return self.head(hidden.add_(1))  # over what the gradient of exp needs

    with pytest.raises(ForwardError, match="the gradient can't be taken: .*inplace operation.*instead[.]$"):
        task2vec(Overwriting(), rows.float())


def test_a_network_that_is_all_head_is_refused(rows):
    with pytest.raises(InvalidValue, match="only layer with weights is its head"):
        task2vec(nn.Linear(4, 3).double(), rows)


def embedding(values, network="a"):
    return TaskEmbedding(np.array(values), (("0.weight", len(values)),), network, 5, "expected")


def test_the_distance_is_the_cosine_distance_of_shares():
    a, b = embedding([1.0, 2.0, 0.0, 5.0]), embedding([3.0, 0.5, 0.0, 0.0])
    F, G = np.array([1.0, 2.0, 5.0]), np.array([3.0, 0.5, 0.0])
    assert task2vec_distance(a, b) == pytest.approx(cosine(F / (F + G), G / (F + G)), abs=1e-14)
    assert task2vec_distance(b, a) == pytest.approx(task2vec_distance(a, b), abs=1e-14)
    assert task2vec_distance(a, a) == pytest.approx(0, abs=1e-14)


def test_the_plain_cosine_is_that_of_the_embeddings_and_the_largest_filters_decide_it():
    a, b = embedding([1.0, 2.0, 0.0, 5.0]), embedding([3.0, 0.5, 0.0, 0.0])
    assert task2vec_cosine(a, b) == task2vec_cosine(b, a) == pytest.approx(1 - cosine(a.values, b.values), abs=1e-14)
    assert task2vec_cosine(a, a) == pytest.approx(1, abs=1e-14)
    few, many = embedding([1000.0, 1.0, 0.0, 1.0]), embedding([1000.0, 0.0, 1.0, 0.0])
    assert task2vec_cosine(few, many) > 0.999
    assert task2vec_distance(few, many) > 0.6  # where every filter counts alike


def test_embeddings_of_two_networks_are_compared_only_if_that_is_said(convnet, pictures):
    other = copy.deepcopy(convnet)
    nn.init.normal_(other[0].weight)
    a, b = task2vec(convnet, pictures), task2vec(other, pictures)
    with pytest.raises(InvalidValue, match="networks with different weights.*independent=True"):
        task2vec_distance(a, b)
    assert 0 < task2vec_distance(a, b, independent=True) < 1
    nn.init.normal_(convnet[5].weight)  # another head on the same backbone is the same network
    assert 0 < task2vec_distance(a, task2vec(convnet, pictures)) < 1


def test_embeddings_that_can_not_be_compared_are_refused():
    for compared in (task2vec_distance, task2vec_cosine):
        with pytest.raises(ShapeError, match="2 and 1 filters, of other weights"):
            compared(embedding([1.0, 2.0]), embedding([1.0]))
        with pytest.raises(NoValue, match="no Fisher information"):
            compared(embedding([1.0]), embedding([0.0]))
        with pytest.raises(InvalidValue, match="independent=True"):
            compared(embedding([1.0]), embedding([1.0], network="b"))


def test_a_model_with_one_module_under_two_names_keeps_its_weights(rows):
    inner = nn.Linear(4, 4)
    model = nn.Sequential(inner, nn.ReLU(), inner, nn.ReLU(), nn.Linear(4, 3))
    before = dict(model.named_parameters())
    task2vec(model, rows)
    assert dict(model.named_parameters()) == before  # the same objects
