"""A model that ends in a softmax has the numbers of the same model without it: its probabilities are no logits."""

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import ForwardError
from netkin.representations.gradients import class_logits
from quickly import slow_but


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 5, bias=False))


def data(n=60):
    rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(1)) * 2
    return [(rows[:40], torch.arange(40) % 3), (rows[40:], torch.arange(n - 40) % 3)]


def scores_of(model):
    return nk.transfer_scores(model, data(), ["leep", "nce", "logme", "knn", "kernel_ridge_hadamard"])


def norm(labels):
    return lambda model: nk.fisher_rao_norm(model, data(), labels=labels)


def ridge(model):
    return nk.kernel_ridge(model, data(), layers="1", progress=False).fits["1"].coefficients


READERS = {
    "scores": lambda model: list(scores_of(model).values()),
    "norm": norm("model"),
    "norm, tempered": norm("tempered"),
    "norm, labels": norm("labels"),
    "task2vec": lambda model: nk.task2vec(model, data()).values,
    "task2vec, drawn": lambda model: nk.task2vec(model, data(), samples=3).values,
    "gradients": lambda model: nk.gradients(model, "1", data())["1"],
    "gradients, labels": lambda model: nk.gradients(model, "1", data(), target="labels")["1"],
    "kernel_cka": lambda model: (
        nk.compare(model, body().apply(_other), data(), ["kernel_cka(kernel=gradients)"], layers=["0", "1"])
        .table()
        .values
    ),
    "kernel ridge": ridge,
    "mean embedding": lambda model: list(nk.mean_embedding_norm(model, data(), "1").values()),
    "adaptation": lambda model: list(nk.adaptation_score(model, data(), "1").values()),
}


def _other(module):
    if isinstance(module, nn.Linear):
        torch.manual_seed(module.in_features)
        nn.init.normal_(module.weight)


@pytest.mark.parametrize("end", slow_but([nn.Softmax, nn.LogSoftmax], nn.Softmax))
@pytest.mark.parametrize("reader", READERS)
def test_a_softmax_at_the_end_changes_no_number(reader, end):
    plain, ended = body(), nn.Sequential(*body(), end(1))
    wanted = np.asarray(READERS[reader](plain))
    assert np.asarray(READERS[reader](ended)) == pytest.approx(wanted, rel=2e-3, abs=1e-5 * float(np.abs(wanted).max()))


def eye():
    layer = nn.Linear(3, 3, bias=False)
    nn.init.eye_(layer.weight)
    return layer


def test_leep_of_a_certain_model_that_ends_in_a_softmax_is_near_zero():
    labels = torch.arange(60) % 3
    model = nn.Sequential(*(eye() for _ in range(2)), nn.Softmax(1))
    found = nk.transfer_scores(model, [(500 * torch.eye(3)[labels], labels)], ["leep"])  # its zeros are exact
    assert found["leep"] == pytest.approx(0, abs=1e-6)


def test_a_probability_of_zero_has_no_logit_and_is_refused():
    model = nn.Sequential(eye(), nn.Softmax(1))
    with pytest.raises(ForwardError, match="12 probabilities of exactly 0 among 18"):
        nk.gradients(model, "0", 500 * torch.eye(3)[torch.arange(6) % 3])


@pytest.mark.parametrize("outputs", ["multilabel", "continuous"])
def test_outputs_that_are_no_classes_are_taken_as_they_are(outputs):
    rows = torch.randn(6, 3).softmax(1)
    labels = torch.zeros(6, 3)
    found = nk.gradients(nn.Identity(), "", [(rows, labels)], target="labels", outputs=outputs)[""]
    assert torch.allclose(found, (rows.sigmoid() if outputs == "multilabel" else rows) - labels, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_of_every_precision_are_seen_and_logits_left_alone(dtype):
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    seen, rounded = class_logits(logits.softmax(1).to(dtype)), 1e-2 if dtype.itemsize == 2 else 1e-5
    assert torch.allclose(seen.softmax(1).float(), logits.softmax(1), rtol=rounded)
    for other in (logits, logits.abs(), logits.relu(), torch.zeros(8, 2), torch.rand(8, 2)):
        assert torch.equal(class_logits(other.to(dtype)), other.to(dtype))
