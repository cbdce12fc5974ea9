"""Transfer scores against other roads to the same numbers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from sklearn.covariance import LedoitWolf
from sklearn.linear_model import Ridge
from sklearn.metrics import mutual_info_score
from sklearn.neighbors import KNeighborsClassifier

from netkin.applications.transfer import scores
from netkin.applications.transfer.evidence import Evidence, evidence_of
from netkin.applications.transfer.scores import SCORES, find_score, transfer_scores
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from refusals import refusals

WITHOUT_LABELS = ("mean_embedding_norm", "adaptation_score")
FORWARD = {name for name, one in SCORES.items() if not one.needs_gradients}


@pytest.fixture
def evidence():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 90)
    centres = draw.normal(size=(3, 6))
    features = centres[labels] + draw.normal(size=(90, 6)) * np.linspace(2, 0.5, 6)
    logits = draw.normal(size=(90, 4)) + np.eye(4)[labels]
    return Evidence.of(features, labels, np.exp(logits) / np.exp(logits).sum(1, keepdims=True))


def test_leep_is_the_likelihood_written_out(evidence):
    P, y, n = evidence.probabilities, evidence.labels, len(evidence.labels)
    total = 0.0
    for i in range(n):
        inner = 0.0
        for z in range(4):
            joint = sum(P[k, z] for k in range(n) if y[k] == y[i]) / n
            inner += joint / (sum(P[k, z] for k in range(n)) / n) * P[i, z]
        total += np.log(inner)
    assert scores.leep(evidence) == pytest.approx(total / n, abs=1e-12)


def test_nce_is_mutual_information_less_the_entropy_of_labels(evidence):
    y, z = evidence.labels, evidence.probabilities.argmax(1)
    shares = np.bincount(y) / len(y)
    wanted = mutual_info_score(y, z) + (shares * np.log(shares)).sum()
    assert scores.nce(evidence) == pytest.approx(wanted, abs=1e-12)


def test_h_score_is_the_sum_of_squared_correlations_with_the_labels(evidence):
    F, Y = (one - one.mean(0) for one in (evidence.features, evidence.one_hot))
    Q, U = np.linalg.qr(F)[0], np.linalg.svd(Y, full_matrices=False)[0][:, :2]
    assert scores.h_score(evidence) == pytest.approx(((Q.T @ U) ** 2).sum(), abs=1e-10)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_h_score_does_not_count_rounding_as_features(offset):
    """A wide linear layer spans what the narrow one before it spans, whatever its bias."""
    draw = np.random.default_rng(4)
    labels = draw.integers(0, 10, 1000)
    narrow = (draw.normal(size=(10, 20)) / 3)[labels] + draw.normal(size=(1000, 20))
    wide = narrow @ (draw.normal(size=(20, 256)) / 20**0.5) + offset
    Q = np.linalg.qr(narrow - narrow.mean(0))[0]
    known = sum((Q[labels == one].sum(0) ** 2).sum() / (labels == one).sum() for one in range(10))
    assert scores.h_score(Evidence.of(narrow.astype(np.float32), labels)) == pytest.approx(known, rel=1e-6)
    assert scores.h_score(Evidence.of(wide.astype(np.float32), labels)) == pytest.approx(known, rel=1e-3)


def test_h_score_does_not_count_the_rounding_of_a_model_in_half_precision():
    torch.manual_seed(0)
    labels, centres = torch.arange(1000) % 10, torch.randn(10, 8)
    inputs = (centres[labels] + torch.randn(1000, 8)).bfloat16()
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model[0].bias.data.fill_(30)  # beside which the features have few digits
    model = model.bfloat16()
    found = transfer_scores(model, [(inputs, labels)], ["h_score"], layer="0", progress=False)["h_score"]
    exact = model[0].float()(inputs.float()).detach()
    assert found == pytest.approx(scores.h_score(Evidence.of(exact, labels.numpy())), rel=0.05)


def test_the_regularised_h_score_shrinks_by_ledoit_and_wolf(evidence):
    few = Evidence.of(evidence.features[:12], evidence.labels[:12])
    fit = LedoitWolf().fit(few.features)
    means = np.stack([few.features[few.labels == one].mean(0) for one in range(3)]) - few.features.mean(0)
    G = means[few.labels]
    wanted = np.trace(np.linalg.inv(fit.covariance_) @ ((1 - fit.shrinkage_) * G.T @ G / 12))
    assert 0.05 < fit.shrinkage_ < 0.95
    assert scores.h_score_regularised(few) == pytest.approx(wanted, abs=1e-10)


def test_logme_is_the_greatest_evidence_of_a_gaussian_process(evidence):
    F, n = evidence.features, len(evidence.features)

    def negative(logs, y):
        alpha, beta = np.exp(logs)
        return -multivariate_normal(np.zeros(n), np.eye(n) / beta + F @ F.T / alpha).logpdf(y) / n

    best = np.mean([-minimize(negative, np.zeros(2), args=(y,), method="Nelder-Mead").fun for y in evidence.one_hot.T])
    assert scores.logme(evidence) == pytest.approx(best, abs=1e-5)


def test_transrate_is_a_difference_of_determinants(evidence):
    def rate(Z):
        return np.linalg.slogdet(np.eye(6) + Z.T @ Z / (len(Z) * 1e-4))[1] / 2

    Z = evidence.features - evidence.features.mean(0)
    wanted = rate(Z) - np.mean([rate(Z[evidence.labels == one]) for one in range(3)])
    assert scores.transrate(evidence) == pytest.approx(wanted, abs=1e-9)


def test_transrate_counts_small_classes_as_much_as_large_ones(evidence):
    def rate(Z):
        return np.linalg.slogdet(np.eye(6) + Z.T @ Z / (len(Z) * 1e-4))[1] / 2

    kept = np.flatnonzero((evidence.labels > 0) | (np.arange(90) < 20))  # few examples of class 0
    few = Evidence.of(evidence.features[kept], evidence.labels[kept])
    Z = few.features - few.features.mean(0)
    rates, shares = [rate(Z[few.labels == one]) for one in range(3)], np.bincount(few.labels) / len(kept)
    assert shares[0] < 0.2
    assert scores.transrate(few) == pytest.approx(rate(Z) - np.mean(rates), abs=1e-9)
    assert abs(scores.transrate(few) - (rate(Z) - shares @ rates)) > 0.05


def test_gbc_is_minus_the_integral_of_the_root_of_two_densities():
    draw = np.random.default_rng(1)
    labels = np.repeat([0, 1], 500)
    features = draw.normal(size=(1000, 1)) * np.where(labels, 2.0, 1.0)[:, None] + labels[:, None]
    rows = features - features.mean()
    a, b = rows[labels == 0, 0], rows[labels == 1, 0]
    x = np.linspace(-15, 15, 100_001)
    densities = [np.exp(-((x - one.mean()) ** 2) / 2 / one.var()) / np.sqrt(2 * np.pi * one.var()) for one in (a, b)]
    overlap = np.trapezoid(np.sqrt(densities[0] * densities[1]), x)
    assert scores.gbc(Evidence.of(features, labels)) == pytest.approx(-2 * overlap, abs=1e-6)


def test_knn_votes_as_another_library_does(evidence):
    two = Evidence.of(evidence.features, (evidence.labels > 0).astype(int))
    unit = two.features - two.features.mean(0)
    right = 0
    for i in range(len(unit)):
        others = np.arange(len(unit)) != i
        vote = KNeighborsClassifier(5, metric="cosine").fit(unit[others], two.labels[others]).predict(unit[i : i + 1])
        right += vote[0] == two.labels[i]
    assert scores.knn(two) == pytest.approx(right / len(unit))


def test_a_probe_separates_what_a_line_separates_and_no_more():
    draw = np.random.default_rng(2)
    features = draw.normal(size=(300, 8))
    assert scores.linear_probe(Evidence.of(features, (features[:, 0] > 0).astype(int))) > 0.9
    assert scores.linear_probe(Evidence.of(features, draw.integers(0, 2, 300))) < 0.62


@pytest.mark.parametrize("width", [5, 70])
def test_a_probe_is_ridge_regression_from_the_other_folds(width):
    draw = np.random.default_rng(4)
    labels = draw.integers(0, 3, 60)
    centres = 2.5 * draw.normal(size=(3, width)) / width**0.5
    features = centres[labels] + draw.normal(size=(60, width)) + 3
    evidence, right = Evidence.of(features, labels), np.zeros(len(scores.RIDGES))
    folds = scores.folds_of(evidence)
    for fold in range(5):
        inside = folds != fold
        largest = np.linalg.norm(features[inside] - features[inside].mean(0), 2) ** 2
        for k, ridge in enumerate(scores.RIDGES):
            fit = Ridge(ridge * largest, solver="svd").fit(features[inside], evidence.one_hot[inside])
            right[k] += (fit.predict(features[~inside]).argmax(1) == labels[~inside]).sum()
    assert 0.45 < scores.linear_probe(evidence) < 0.95
    assert scores.linear_probe(evidence) == pytest.approx(right.max() / 60)


@pytest.mark.parametrize("name", [name for name in SCORES if name not in WITHOUT_LABELS])
def test_every_score_prefers_features_that_know_the_labels(name):
    """And falls when the labels are shuffled, which no feature can know."""
    draw = np.random.default_rng(3)
    labels = draw.integers(0, 4, 200)
    logits = 2 * np.eye(5)[labels] + draw.normal(size=(200, 5))
    P = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    features, gradients = draw.normal(size=(4, 10))[labels] + draw.normal(size=(200, 10)), 1 + draw.random((200, 10))
    good = Evidence.of(features, labels, P, gradients)
    shuffled = Evidence.of(features, draw.permutation(labels), P, gradients)
    assert SCORES[name].function(good) > SCORES[name].function(shuffled)


def test_constant_features_are_probed_as_well_as_by_guessing():
    flat = Evidence.of(np.ones((60, 4)), np.arange(60) % 4 // 3)
    assert scores.linear_probe(flat) == 0.75  # the commoner class
    assert scores.kernel_ridge_features(flat) == 0.75


def test_labels_of_any_numbers_count_as_classes(evidence):
    other = Evidence.of(evidence.features, np.array([7, 100, -3])[evidence.labels], evidence.probabilities)
    assert other.classes == 3
    assert scores.h_score(other) == pytest.approx(scores.h_score(evidence))


def test_what_can_not_be_scored_is_refused(evidence):
    F = evidence.features
    refusals(
        (lambda: Evidence.of(F, np.zeros(89, dtype=int)), ShapeError, ""),
        (lambda: Evidence.of(F, np.full(90, 4)), InvalidValue, ""),
        (lambda: Evidence.of(F, np.linspace(0, 1, 90)), InvalidValue, ""),
        (lambda: Evidence.of(F, evidence.labels, F), ShapeError, "probabilities"),
        (lambda: scores.leep(Evidence.of(F, evidence.labels)), NoValue, ""),
    )
    with pytest.raises(UnknownName, match="no transfer score named 'logm'; did you mean 'logme'"):
        find_score("logm")


def test_scores_are_read_from_one_forward_pass_over_batches():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(inplace=True), torch.nn.Linear(6, 3)).train()
    inputs, labels, runs = torch.randn(60, 4), torch.randint(0, 2, (60,)), []
    model[0].register_forward_hook(lambda *_: runs.append(1))
    found = transfer_scores(model, [(inputs[:25], labels[:25]), (inputs[25:], labels[25:])], progress=False)
    assert len(runs) == 2 + 2  # two batches, and two runs of few examples
    assert model.training
    with torch.no_grad():
        features = model[:2](inputs)
        wanted = Evidence.of(features, labels.numpy(), model[2](features).softmax(1))
    assert found == {name: pytest.approx(SCORES[name].function(wanted), rel=1e-4) for name in FORWARD}


def test_models_without_classes_have_the_other_scores():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    data = [(torch.randn(40, 4), torch.arange(40) % 2)]
    assert FORWARD - set(transfer_scores(model, data)) == {"leep", "nce"}
    refusals(
        (lambda: transfer_scores(model, data, ["leep"]), NoValue, ""),
        (lambda: transfer_scores(model, [data[0][0]]), InvalidValue, ""),
        (lambda: transfer_scores(torch.nn.Sequential(torch.nn.Linear(4, 2)), data), InvalidValue, ""),
    )
    assert evidence_of(model, data, layer="0").features.shape == (40, 6)


def test_a_score_without_a_value_is_left_out_with_its_reason():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    torch.nn.init.zeros_(model[0].weight)
    data = [(torch.randn(40, 4), torch.arange(40) % 2)]
    with (
        pytest.warns(UserWarning, match="'gbc' is left out.*the same features"),
        pytest.warns(UserWarning, match="'h_score' is left out.*is constant"),
    ):
        found = transfer_scores(model, data, progress=False)
    assert set(found) == FORWARD - {"gbc", "h_score"}
    assert np.isfinite(list(found.values())).all()
    with pytest.raises(NoValue, match="'gbc' has no value.*the same features"):
        transfer_scores(model, data, ["gbc"], progress=False)


class Headless(torch.nn.Module):
    """Gives hidden states, as a Hugging Face model without a head does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 5)

    def forward(self, inputs):
        return {"last_hidden_state": self.second(self.first(inputs).relu())}


def test_a_model_without_a_head_has_the_scores_of_its_features():
    data = [(torch.randn(40, 4), torch.arange(40) % 2)]
    assert FORWARD - set(transfer_scores(Headless(), data, progress=False)) == {"leep", "nce"}
    assert {name for name, one in SCORES.items() if one.needs_head} == {"leep", "nce", *set(SCORES) - FORWARD}
