"""Recommending a pretrained model: what each gives, errors by leaving out chunks, and what can't be ranked."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import netkin as nk
from netkin.applications import experiment
from netkin.applications.transfer import recommend, scores
from netkin.applications.transfer.evidence import Evidence, evidence_of
from netkin.applications.transfer.scores import BESIDE, DEFAULT, RELIABILITY, SCORES
from netkin.errors import ForwardError, InvalidValue, NoValue, UnknownName
from netkin.results.values import jackknife_error
from netkin.statistics.collector import chunk_of
from refusals import refusals, refused
from table_worlds import sentences

RECORD = Path(__file__).parents[3] / "reproductions" / "results" / "gradients" / "recommender.gpu.json"


@pytest.fixture
def data():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    inputs = 0.8 * torch.eye(3, 6)[labels] + 0.5 * torch.randn(240, 6, generator=draw)
    return [(inputs[k : k + 80], labels[k : k + 80]) for k in range(0, 240, 80)]


@pytest.fixture
def models():
    """One whose features keep the inputs, one that adds noise of its own, and one that sees little."""
    torch.manual_seed(1)
    made = {name: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)) for name in ("blind", "sees", "half")}
    with torch.no_grad():
        for name, rank in (("sees", 6), ("half", 1), ("blind", 0)):
            made[name][0].weight.copy_(torch.diag(torch.tensor([1.0] * rank + [0.0] * (6 - rank))))
            made[name][0].weight += 1e-3 * torch.randn(6, 6)
    return made


def test_models_are_ranked_by_what_their_features_hold(models, data):
    ranking = recommend(models, data, score="knn", scores=["logme", "leep", "knn"], progress=False)
    assert ranking.best == "sees"
    assert ranking.scores == ("knn", "logme", "leep")
    assert ranking.examples == 240
    assert ranking.classes == 3
    assert ranking.parameters["sees"] == sum(weight.numel() for weight in models["sees"].parameters())
    for name, model in models.items():
        own = evidence_of(model, data, progress=False)
        for score in ranking.scores:
            assert ranking[name, score] == pytest.approx(SCORES[score].function(own), abs=1e-12)
    assert recommend(models, data, progress=False).scores == (DEFAULT, BESIDE)
    assert recommend(models, data, scores=(), progress=False).scores == (DEFAULT,)
    assert recommend(models, data, score="knn", progress=False).scores == ("knn",)


def test_the_reliability_of_scores_is_that_of_the_record():
    found = json.loads(RECORD.read_text())["measured"]
    assert set(RELIABILITY) == set(SCORES)
    for name, known in RELIABILITY.items():
        sign = 1 if SCORES[name].quantity.higher_is_closer else -1
        assert known == pytest.approx((sign * found[name]["value"], found[name]["error"]), abs=0.0051)
    assert max(RELIABILITY, key=lambda name: RELIABILITY[name][0]) == BESIDE


def test_a_ranking_holds_the_reliability_of_its_scores(models, data):
    ranking = recommend(models, data, progress=False)
    assert ranking.reliability == {name: RELIABILITY[name] for name in (DEFAULT, BESIDE)}
    assert "'sees' comes first by linear_probe, too." in ranking.conclusion
    assert "Kendall's τ" in ranking.reliability_in_words


def test_errors_are_those_of_models_run_anew_without_each_chunk(models, data):
    """The chunks leave the data before any model runs, and the jackknife is written out."""
    inputs, labels = (torch.cat(part) for part in zip(*data, strict=True))
    chunks = chunk_of(np.arange(240), 5)
    sizes = np.bincount(chunks)
    ranking = recommend(models, data, score="logme", chunks=5, progress=False)
    found = {}
    for name, model in models.items():
        left = [
            nk.transfer_scores(model, [(inputs[chunks != k], labels[chunks != k])], ["logme"], progress=False)["logme"]
            for k in range(5)
        ]
        found[name] = np.array(left)
        n, whole = 240, ranking[name]
        pseudo = n / sizes * whole - (n / sizes - 1) * found[name]
        estimate = 5 * whole - ((1 - sizes / n) * found[name]).sum()
        error = np.sqrt(((pseudo - estimate) ** 2 / (n / sizes - 1)).mean())
        place = ranking.table().layers_b.index(name)
        assert ranking.table().errors[0, place] == pytest.approx(error, rel=1e-6)
    apart = jackknife_error(ranking["sees"] - ranking["half"], found["sees"] - found["half"], sizes)
    assert ranking.behind()["half"].error == pytest.approx(float(apart), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCORES))
def test_an_error_is_near_the_spread_over_other_examples(name):
    """For counts of right answers the jackknife is known to say too much, up to twice or so; never far too little."""
    centres = np.random.default_rng(5).normal(size=(3, 6)) * 0.7

    def drawn(seed, n=150):
        draw = np.random.default_rng(seed)
        labels = draw.integers(0, 3, n)
        logits = np.eye(4)[labels] + draw.normal(size=(n, 4))
        P = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        features = centres[labels] + draw.normal(size=(n, 6))
        return Evidence.of(features, labels, P, 0.3 * features + draw.normal(size=(n, 6)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "BUCKETS", 32)
        score = SCORES[name].function
        spread = np.std([score(drawn(seed)) for seed in range(30)], ddof=1)
        one, chunks = drawn(100), chunk_of(np.arange(150), 10)
        left = [score(one.part(chunks != k)) for k in range(10)]
        error = jackknife_error(score(one), left, np.bincount(chunks))
    assert 0.45 * spread < error < 4 * spread


def test_an_example_keeps_its_fold_when_others_are_left_out():
    evidence = Evidence.of(np.random.default_rng(0).normal(size=(50, 3)), np.arange(50) % 2)
    inside = np.arange(50) % 7 != 0
    assert np.array_equal(scores.folds_of(evidence)[inside], scores.folds_of(evidence.part(inside)))
    assert len(np.unique(scores.folds_of(evidence))) == 5


def test_kernel_ridge_is_ridge_regression_from_the_other_folds(monkeypatch):
    """With more buckets than examples fall together, the sketch is the data with signs, and the kernel exact."""
    draw = np.random.default_rng(3)
    labels = draw.integers(0, 2, 40)
    evidence = Evidence.of(draw.normal(size=(2, 5))[labels] + 0.5 * draw.normal(size=(40, 5)), labels)
    monkeypatch.setattr(scores, "BUCKETS", 100_003)
    monkeypatch.setattr(scores, "fitted", lambda sums, n, kernel: _exact(sums))
    folds, right = scores.folds_of(evidence), 0
    for fold in range(5):
        inside = folds != fold
        F, Y = evidence.features[inside], np.eye(2)[labels[inside]]
        weights = np.linalg.solve(F.T @ F + 0.1 * np.eye(5), F.T @ Y)
        right += ((evidence.features[~inside] @ weights).argmax(1) == labels[~inside]).sum()
    assert scores.kernel_ridge_features(evidence) == right / 40


class _exact:
    def __init__(self, sums):
        F, Y = sums["features"], sums["labels"]
        self.weights = torch.linalg.solve(F.T @ F + 0.1 * torch.eye(5, dtype=F.dtype), F.T @ Y)

    def scores(self, rows):
        return rows["features"] @ self.weights


def test_embedding_scores_are_sums_over_examples():
    draw = np.random.default_rng(4)
    F, G = draw.normal(size=(30, 4)), draw.normal(size=(30, 4))
    evidence = Evidence.of(F, np.arange(30) % 2, None, G)
    mean = sum(np.outer(g, f) for f, g in zip(F, G, strict=True)) / 30
    K = np.array([[(F[i] @ F[j]) * (G[i] @ G[j]) for j in range(30)] for i in range(30)])
    assert scores.feature_embedding_norm(evidence) == pytest.approx(np.sqrt((mean**2).sum()))
    assert scores.feature_embedding_norm(evidence) == pytest.approx(np.sqrt(K.mean()))
    wanted = np.log(np.sqrt((mean**2).sum()) / (np.sqrt((K**2).sum()) / 900))
    assert scores.feature_adaptation(evidence) == pytest.approx(wanted)


def test_gradients_at_the_features_are_those_of_one_example_at_a_time(models, data):
    evidence = evidence_of(models["half"], data, gradients=True, progress=False)
    inputs = torch.cat([one for one, _ in data])[:5]
    for row, example in zip(evidence.gradients, inputs, strict=False):
        features = models["half"][:2](example[None]).detach().requires_grad_()
        p = models["half"][2](features)
        q = (0.5 * p.detach()).softmax(1)
        (-(q * p.log_softmax(1)).sum()).backward()
        assert np.allclose(row, features.grad[0].numpy(), atol=1e-7)


@pytest.mark.slow
def test_constant_features_have_values_or_reasons():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, inputs):
            return self.head(self.first(torch.zeros_like(inputs)))

    batch = [(torch.randn(90, 6), torch.arange(90) % 3)]
    ranking = recommend({"flat": Flat()}, batch, score="knn", scores=list(SCORES), chunks=3, progress=False)
    assert ("digits", "flat") not in ranking.table("linear_probe").missing
    assert ranking.table("linear_probe").values[0, 0] <= 0.5
    assert "gbc" in " ".join(ranking.reasons())


def test_what_a_model_can_not_do_leaves_a_hole(models, data):
    class Headless(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, inputs):
            return {"last_hidden_state": self.second(self.first(inputs).relu())}

    wide = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
    given = {"sees": models["sees"], "headless": Headless(), "wide": wide}
    ranking = recommend(given, data, score="knn", scores=["leep", "adaptation_score"], progress=False)
    assert ranking.models[-1] == "wide"
    assert ranking["headless"] > 0.3
    with pytest.raises(NoValue, match="reads the model's probabilities"):
        ranking["headless", "leep"]
    with pytest.raises(NoValue, match="the model gives no logits, but last_hidden_state"):
        ranking["headless", "adaptation_score"]
    with pytest.raises(NoValue, match=r"run on inputs of .* shape \(80, 6\) .RuntimeError.* given as `transform`"):
        ranking["wide"]
    assert not any(module._forward_hooks for module in wide.modules())
    with pytest.raises(ForwardError, match="no model could be scored; wide: Sequential could not be run"):
        recommend({"wide": wide}, data, progress=False)


def test_features_that_the_loss_does_not_reach_leave_a_hole_for_gradients(data):
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.head = nn.Linear(6, 5), nn.Linear(6, 4)

        def forward(self, inputs):
            self.side(inputs)
            return self.head(inputs)

    ranking = recommend({"aside": Aside()}, data, score="knn", scores=["kernel_ridge"], layers="side", progress=False)
    assert 0 < ranking["aside"] <= 1
    with pytest.raises(NoValue, match="no path leads from layer 'side' to the loss; choose layers"):
        ranking["aside", "kernel_ridge"]


def test_models_are_left_as_they_were(models, data):
    model = models["half"].train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    recommend({"half": model}, data, score="knn", scores=["adaptation_score"], progress=False)
    assert model.training
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_every_model_sees_the_same_examples(models, data):
    inputs, labels = (torch.cat(part) for part in zip(*data, strict=True))
    shuffled = DataLoader(TensorDataset(inputs, labels), batch_size=60, shuffle=True)
    with pytest.raises(InvalidValue, match="the same examples in the same order.*shuffle=False"):
        recommend(models, shuffled, progress=False)
    with pytest.raises(InvalidValue, match="the same examples in the same order"):
        recommend(models, iter(data), progress=False)

    class Turning:
        """Gives the same labels with other inputs each time."""

        def __init__(self):
            self.turn = 0

        def __iter__(self):
            self.turn += 1
            return iter([(inputs + self.turn, labels)])

    with pytest.raises(InvalidValue, match="'sees' was given other examples than 'blind'"):
        recommend(models, Turning(), progress=False)
    plain = DataLoader(TensorDataset(inputs, labels), batch_size=60)
    assert recommend(models, plain, score="knn", progress=False)["sees"] == pytest.approx(
        recommend(models, data, score="knn", progress=False)["sees"]
    )


def test_batches_and_places_do_not_change_a_ranking(models, data):
    inputs, labels = (torch.cat(part) for part in zip(*data, strict=True))
    one = recommend(models, data, score="logme", progress=False)
    other = recommend(dict(reversed(models.items())), [(inputs, labels)], score="logme", progress=False)
    assert one.models == other.models
    for name in one.models[1:]:
        assert one[name] == pytest.approx(other[name], rel=1e-6)
        assert one.behind()[name].error == pytest.approx(other.behind()[name].error, rel=1e-4)


def test_options_may_be_for_all_models_or_for_some(models, data):
    away = recommend(models, data, score="knn", transforms={"sees": torch.zeros_like}, progress=False)
    assert away.best == "half"
    deep = recommend(models, data, score="knn", layers={"half": "0"}, progress=False)
    plain = recommend(models, data, score="knn", progress=False)
    assert deep["sees"] == plain["sees"]
    assert deep["half"] != plain["half"]
    turned = recommend(models, data, score="knn", forwards=lambda model, batch: model(-batch[0]), progress=False)
    assert turned["sees"] != plain["sees"]
    with refused(InvalidValue, "layers"):
        recommend(models, data, layers={"none": "0"})


def test_few_examples_give_reasons_in_place_of_errors(models, data):
    inputs, labels = data[0]
    ranking = recommend(models, [(inputs[:12], labels[:12])], score="knn", progress=False)
    assert "12 examples do not fill 20 chunks" in " ".join(ranking.reasons())
    assert np.isnan(ranking.table().to_errors()).all()
    rare = labels.clone()
    rare[7] = 9
    ranking = recommend(models, [(inputs, rare)], score="knn", chunks=4, progress=False)
    assert "1 of the 4 classes has no example in a part of" in " ".join(ranking.reasons())
    assert any("1 of 4 classes have fewer than 5 examples, the rarest 1" in one for one in sentences(ranking))
    assert recommend(models, data, score="knn", errors=False, progress=False).table().errors is None


def test_wide_features_and_many_classes_are_told(models):
    inputs, labels = torch.randn(40, 6), torch.arange(40) % 2
    wide = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 2))
    ranking = recommend({"wide": wide}, [(inputs, labels)], score="h_score", chunks=2, progress=False)
    assert any("as wide as there are examples, 40: those of wide" in one for one in sentences(ranking))
    many = Evidence.of(torch.randn(1200, 3), np.arange(1200) % 600)
    with pytest.raises(NoValue, match="600 classes do not fit 512 buckets"):
        scores.kernel_ridge_features(many)


def test_models_and_data_by_name_are_loaded():
    heard = []
    named = ["netkin:digits"]
    ranking = recommend(
        named, "digits:test", score="knn", examples=100, chunks=5, progress=lambda *told: heard.append(told[2])
    )
    assert ranking.data == "digits:test, a sample of 100 of 360 (seed 0)"
    assert ranking.models == ("netkin:digits",)
    assert any("no weights, so they are random" in warning for warning in sentences(ranking))
    assert {"scoring", "reading"} <= set(heard)
    other = recommend(named, "digits:test", score="knn", examples=100, chunks=5, seed=1, progress=False)
    assert other.provenance["data digest"] != ranking.provenance["data digest"]


def test_models_by_name_without_weights_are_drawn_from_seeds_of_their_own():
    twice = {"a": "netkin:digits", "b": "netkin:digits"}
    ranking = recommend(twice, "digits:test", score="knn", examples=100, chunks=5, progress=False)
    drawn = [warning for warning in sentences(ranking) if "so they are random" in warning]
    assert [seed in one for seed, one in zip(("seed 0", "seed 1"), drawn, strict=True)] == [True, True]
    own = {name: nk.load_model("netkin:digits", seed=seed) for seed, name in enumerate("ab")}
    loaded = recommend(own, "digits:test", score="knn", examples=100, chunks=5, progress=False)
    origins = [[one.provenance[f"weights of {name}"] for name in "ab"] for one in (ranking, loaded)]
    assert origins[0] == origins[1]


def test_data_by_name_reach_each_model_as_its_own_folder_says(monkeypatch):
    """Two models with other processors get the same examples in other forms; labels must agree, inputs need not."""
    asked, plain = [], experiment.load_data

    def noted(spec, models=()):
        asked.append(list(models))
        found = plain(spec)
        return replace(found, prepare=lambda images: found.prepare(images) * len(models[0]))

    monkeypatch.setattr(experiment, "load_data", noted)
    monkeypatch.setattr(experiment, "load_model", lambda given, seed: nk.load_model("netkin:digits"))
    ranking = recommend(["hf:one", "hf:another"], "digits:test", score="knn", chunks=4, progress=False)
    assert asked == [["hf:one"], ["hf:another"]]
    assert len(ranking.behind()) == 2


def test_what_is_no_set_of_models_is_refused(models, data):
    refusals(
        (lambda: recommend("netkin:digits", data), InvalidValue, "models"),
        (lambda: recommend({}, data), InvalidValue, "models"),
    )
    with pytest.raises(UnknownName, match="no transfer score named 'logm'; did you mean 'logme'"):
        recommend(models, data, score="logm")
    with refused(InvalidValue, "chunks"):
        recommend(models, data, chunks=1)
    with pytest.raises(InvalidValue, match="needs labels, and the batches hold none"):
        recommend(models, [data[0][0]], progress=False)


def test_half_precision_is_scored_as_floats(models, data):
    half = models["sees"].bfloat16()
    ranking = recommend({"half": half}, data, score="knn", scores=["adaptation_score"], chunks=3, progress=False)
    assert 0.5 < ranking["half"] <= 1


@pytest.mark.skipif(not RECORD.exists(), reason="the recommender was not judged at gpu scale yet")
def test_the_default_is_what_the_record_speaks_for():
    note = json.loads(RECORD.read_text())["note"]
    assert f"by its rule, is {DEFAULT}." in note
