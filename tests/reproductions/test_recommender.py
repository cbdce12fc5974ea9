"""The judged recommender, on small sets of made-up images: what it says of ranks is what SciPy says."""

import importlib.util
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, weightedtau
from sklearn.linear_model import LogisticRegression

from netkin.applications.transfer import scores
from netkin.applications.transfer.scores import SCORES
from netkin.errors import SourceError
from netkin.training import Recipe
from reproductions.claims import named
from reproductions.gradients import candidates, recommender
from reproductions.gradients.candidates import Setting
from reproductions.laboratory import Images, Lab
from reproductions.record import Claim

DOCS = Path(__file__).parents[2] / "docs"
JUDGED = ("svhn", "mnist", "cifar100/1")
CLASSES = {"cifar10": 3, "cifar100": 4, "svhn": 3, "mnist": 2}


def made_up(name):
    """Images of 3 × 8 × 8 whose classes differ in a pattern, under noise."""
    draw = torch.Generator().manual_seed(len(name))
    patterns = torch.randn(CLASSES[name], 3, 8, 8, generator=draw)
    parts = []
    for count in (200, 60):
        labels = torch.arange(count) % CLASSES[name]
        parts += [patterns[labels] + 2 * torch.randn(count, 3, 8, 8, generator=draw), labels]
    return Images(name, tuple(map(str, range(CLASSES[name]))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETKIN_DATA", raising=False)
        recipe, tuning = Recipe(steps=6, batch=50, lr=0.05), Recipe(epochs=1, batch=50)
        patch.setitem(candidates.SETTINGS, "cpu", Setting(recipe, (2, 6), tuning, 100, 80, 20))
        patch.setattr(scores, "BUCKETS", 16)
        patch.setattr(recommender, "TARGETS", JUDGED)
        patch.setattr(recommender, "RESAMPLES", 50)
        patch.setattr(recommender, "RESAMPLES_WEIGHTED", 10)
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"))
        sets = {name: made_up(name) for name in CLASSES}
        lab.images_of = sets.__getitem__
        yield lab


@pytest.fixture(scope="module")
def finding(lab):
    return recommender.recommender(lab)


@pytest.mark.slow
def test_all_scores_are_judged_for_all_targets(lab, finding):
    assert {*SCORES, recommender.SHORT_PROBE, *recommender.NAIVE, recommender.RANDOM} == set(finding.measured)
    assert set(finding.controls) == set(SCORES)
    assert finding.curves["τ with fine-tuning on each target"]["target"] == list(JUDGED)
    best = finding.curves["Accuracy of the best and the worst candidate"]
    assert all(worst <= most for worst, most in zip(best["worst, fine-tuning"], best["best, fine-tuning"], strict=True))
    assert abs(finding.measured[recommender.RANDOM].value) < 0.1


def test_no_candidate_has_seen_its_target(lab):
    for target in candidates.TARGETS:
        sources = {name.partition("/")[2].rpartition("/")[0] for name in candidates.candidates(lab, target)}
        assert target not in sources
        assert len(candidates.candidates(lab, target)) >= 8
    assert "cifar100/0" in {
        name.partition("/")[2].rpartition("/")[0] for name in candidates.candidates(lab, "cifar100/1")
    }
    assert not any("cifar100" in name for name in candidates.candidates(lab, "cifar100"))
    first, second = (candidates.images_of(lab, f"cifar100/{half}") for half in (0, 1))
    assert len(first.train_labels) + len(second.train_labels) == 200
    assert first.classes + second.classes == lab.images_of("cifar100").classes
    assert second.train_labels.unique().tolist() == [0, 1]


@pytest.mark.parametrize("scale", ["gpu"])
def test_at_gpu_scale_twelve_or_more_models_meet_every_target(scale, tmp_path):
    lab = Lab(scale, device="cpu", cache=tmp_path)
    counts = [len(candidates.candidates(lab, target)) for target in candidates.TARGETS]
    assert min(counts) >= 12
    assert len(counts) >= 4


@pytest.mark.slow
def test_finished_pairs_are_kept_and_trained_networks_found_again(lab, finding, monkeypatch):
    monkeypatch.setattr(candidates, "train", lambda *_, **__: pytest.fail("a network was trained again"))
    for run in candidates.runs(lab):
        candidates.train_run(lab, run)
    model, accuracy = candidates.candidate(lab, "chain/svhn/6")
    assert not model.training
    assert 0 <= accuracy <= 1


def test_tau_of_weighted_rows_is_that_of_copied_rows():
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, 6, 12).astype(float), draw.normal(size=12)
    counts = draw.integers(0, 4, (12, 5))
    found = recommender.tau(first, second, counts.astype(float))
    for column, value in zip(counts.T, found, strict=True):
        rows = np.repeat(np.arange(12), column)
        assert value == pytest.approx(kendalltau(first[rows], second[rows]).statistic, abs=1e-12)
    signs = [np.sign(first[i] - first[j]) * np.sign(second[i] - second[j]) for i, j in combinations(range(12), 2)]
    untied = sum(first[i] != first[j] for i, j in combinations(range(12), 2))
    whole = recommender.tau(first, second, np.ones((12, 1)))[0]
    assert whole == pytest.approx(sum(signs) / np.sqrt(untied * 66))


def test_a_candidate_without_a_value_comes_last():
    results = {"a/s/1": {"scores": {"x": None}, "tuned": 0.1}, "b/s/1": {"scores": {"x": -5.0}, "tuned": 0.9}}
    score, reached = recommender.columns(results, "x", "tuned", "scores")
    assert recommender.tau(score, reached, np.ones((2, 1)))[0] == 1


def test_agreement_is_the_mean_over_targets_of_tau_within_them(lab):
    draw = np.random.default_rng(1)
    found = {
        target: {f"net{k}/s/1": {"scores": {"x": draw.normal()}, "tuned": draw.normal()} for k in range(9)}
        for target in ("one", "other")
    }
    draws = recommender.resampled([f"net{k}/s" for k in range(9)], 40)
    assert {int(sum(own[b] for own in draws.values())) for b in range(40)} == {9}
    made = recommender.agreement(found, draws, "x", "tuned")
    pairs = [recommender.columns(results, "x", "tuned", "scores") for results in found.values()]
    assert made.value == pytest.approx(np.mean([kendalltau(*pair).statistic for pair in pairs]))
    rows = np.repeat(np.arange(9), [draws[f"net{k}/s"][7] for k in range(9)])
    assert made.replicates[7] == pytest.approx(np.mean([kendalltau(s[rows], r[rows]).statistic for s, r in pairs]))
    heavy = recommender.weighted(found, draws, "x", "tuned")
    assert heavy.value == pytest.approx(np.mean([weightedtau(*pair).statistic for pair in pairs]))
    assert made.minus(made).interval == (0, 0)


def test_the_default_is_the_cheapest_that_is_not_clearly_behind():
    seconds = {"knn": 0.5, "logme": 0.2, "kernel_ridge": 0.1}
    assert recommender.default({"knn": (0, 0), "logme": (-0.1, 0.2), "kernel_ridge": (-0.1, 0.1)}, seconds) == "logme"
    assert (
        recommender.default({"knn": (0.1, 0.2), "logme": (0.1, 0.2), "kernel_ridge": (0, 0)}, seconds) == "kernel_ridge"
    )


def test_a_score_that_is_read_both_ways_counts_by_the_better_way():
    up, down = recommender.Agreement(0.3, np.array([0.2, 0.4])), recommender.Agreement(-0.5, np.array([-0.6, -0.4]))
    lags = recommender.behind({"logme": up, "adaptation_score": down, "knn": down, "parameters": up})
    assert {name: round(one.value, 6) for name, one in lags.items()} == {
        "logme": 0.2,
        "adaptation_score": 0,
        "knn": 1.0,
    }
    assert lags["logme"].interval == pytest.approx((0.01, 0.39))
    assert up.above_zero
    assert down.above_zero is False
    assert up.minus(recommender.Agreement(0.3, np.array([0.4, 0.2]))).above_zero is None


def test_the_probe_is_logistic_regression():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    rows = torch.randn(3, 5, generator=draw)[labels] + torch.randn(300, 5, generator=draw)
    weights = candidates.logistic(rows, labels, 3, 200, decay=1e-4)
    mean, scale = rows.mean(0), rows.std(0)
    # the penalty there is ‖W‖²/2 beside C times the summed loss
    peer = LogisticRegression(C=1 / (2e-4 * 300), max_iter=1000).fit(((rows - mean) / scale).numpy(), labels.numpy())
    ours = torch.cat([rows, torch.ones(300, 1)], 1) @ weights
    theirs = torch.from_numpy(peer.decision_function(((rows - mean) / scale).numpy()))
    assert torch.allclose(ours.softmax(1), theirs.softmax(1).float(), atol=5e-3)


def test_without_data_the_claim_says_what_it_reads(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    (statement,) = named("gradients/recommender")
    with pytest.raises(SourceError, match=r"reads CIFAR-\d+; pass --data DIR"):
        statement.measure(Lab("cpu", cache=tmp_path))


@pytest.mark.slow
def test_the_guide_holds_the_table_of_the_record(finding):
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    facts = {"id": "gradients/recommender", "figure": "Sec. 6", "sentence": "s", "expected": {}, "criterion": "c"}
    numbers = {"measured": finding.measured, "controls": finding.controls, "curves": finding.curves}
    record = Claim(**facts, **numbers, control="x", verdict=finding.verdict, scale="cpu", note=finding.note)
    lines = generate.judged_scores(record).splitlines()
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines[2:] if line.startswith("|")
    }
    assert set(rows) == set(finding.measured) - {recommender.RANDOM}
    assert rows["logme"][0].startswith(f"{finding.measured['logme'].value:.2f} ± ")
    assert rows["logme"][4:] == [f"{finding.controls['logme'].value:.2f}", "1 |"]
    taus = [float(row[0].split()[0]) for row in rows.values()]
    assert taus == sorted(taus, reverse=True)
    assert "the default of nk.recommend by its rule, is" in finding.note
    assert finding.note in "\n".join(lines)
    assert all(mark in (DOCS / "recommend.md").read_text() for mark in generate.MARKS)
