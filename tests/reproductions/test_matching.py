"""The claims about stitching, on small networks of digits: what they measure is what they say."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.applications.stitching import interpolate
from netkin.errors import NoValue, SourceError
from netkin.sources.architectures import ConvNet, ResNet, seeded
from reproductions import laboratory
from reproductions.claims import verdict
from reproductions.laboratory import Lab, Recipe
from reproductions.matching import indices, nets, ranks, sparse, starts, stitches, sweeps, tasks, widths
from reproductions.matching.stitches import (
    Setting,
    Wanted,
    cka_of_maps,
    fitting,
    judging,
    made,
    maps,
    number,
    place,
    shares,
    task_loss,
)

# networks of two epochs are no better than chance, which is enough for what is tested here
pytestmark = pytest.mark.filterwarnings("ignore:the second model itself gets:netkin.errors.InflatedWarning")


def small_tiny10():
    channels = (3, 4, 4, 8, 8, 8, 8, 8, 8)
    return ConvNet(channels, kernels=(3, 3, 3, 3, 3, 3, 3, 1), strides=(1, 1, 2, 1, 1, 2, 1, 1), padding=0)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of digits with small networks, trained for an epoch, and stitches of few images."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"):
            patch.delenv(name, raising=False)
        residual = {f"resnet20w{w}": Recipe(lambda w=w: ResNet((1, 1, 1), (4 * w, 4 * w, 4 * w)), 2, 25, 0.05)
                    for w in (1, 2, 3, 4)}  # fmt: skip
        patch.setitem(laboratory.RECIPES, "cpu", residual | {"tiny10": Recipe(small_tiny10, 2, 50, 0.05)})
        patch.setitem(stitches.SETTINGS, "cpu", Setting(fit=150, test=100, epochs=1, batch=50, every=3, sample=50))
        for module in (starts.LONGER, sparse.LONGER):
            patch.setitem(module, "cpu", {"rate": 1e-2, "epochs": 1, "every": 3})
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"))
        whole = lab.images()
        part = {name: getattr(whole, name)[:count] for name, count in PARTS.items()}
        lab.__dict__["_images"] = replace(whole, **part)
        yield lab


DATA, CHECKPOINTS = (os.environ.get(name) for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"))
PARTS = {"train_images": 400, "train_labels": 400, "test_images": 100, "test_labels": 100}


def test_task_loss_and_direct_matching_are_compared_at_every_layer(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    found = sweeps.task_loss_matching(lab)
    curve = found.curves["Relative accuracy of Tiny-10 stitched at each layer"]
    assert curve["layer"] == [f"Layer {k}" for k in range(1, 9)]
    assert curve["task loss"][0] == pytest.approx(_mean_share(lab, task_loss), abs=1e-6)
    assert curve["least squares"][0] == pytest.approx(_mean_share(lab, Wanted), abs=1e-6)
    worst = found.measured["Tiny-10: relative accuracy of the worst layer by least squares"].value
    assert worst == pytest.approx(min(curve["least squares"]))
    untouched = found.measured["Tiny-10: cross-entropy without transformation"]
    assert untouched.n == 16
    direct = found.curves["Cross-entropy of Tiny-10 stitched at each layer"]["least squares"]
    assert untouched.value > sum(direct) / 8
    assert "Trained here, 2 epochs: tiny10, resnet20. Stitches lie before the ReLUs" in found.note
    assert "fitted on 150 of the training images and judged on 100 of the test images." in found.note
    assert "needs CelebA, which netkin does not read" in found.note


def _mean_share(lab, wish):
    """The relative accuracy at the first layer in the mean over two pairs, evaluated anew."""
    shares = []
    for pair in nets.ring(lab, "tiny10", 2):
        wanted = task_loss(pair, "bn1") if wish is task_loss else Wanted(*pair, "bn1")
        (stitch,) = made(lab, [wanted]).values()
        (inputs, labels), *_ = judging(lab)
        right = (stitch.network(inputs).argmax(1) == labels).float().mean()
        shares.append((right / (stitch.network.b(inputs).argmax(1) == labels).float().mean()).item())
    return sum(shares) / 2


def test_cka_of_stitches_is_taken_three_ways_and_judged_by_whole_maps(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    found = sweeps.cka_of_stitches(lab)
    assert "here those of 100 test images" in found.note
    values = {name: found.measured[f"{name}: CKA of whole maps"].value for name in ("ResNet-20", "Tiny-10")}
    assert found.verdict == verdict(abs(values["ResNet-20"] - 0.922) <= 0.098, abs(values["Tiny-10"] - 0.883) <= 0.050)
    curve = found.curves["CKA at the layers of Tiny-10"]
    for words in ("CKA of whole maps", "debiased CKA of whole maps", "CKA place by place"):
        assert found.measured[f"Tiny-10: {words}"].value == pytest.approx(np.mean(curve[words]))
    assert found.measured["Tiny-10: CKA of whole maps"].value > found.measured["Tiny-10: CKA place by place"].value


def test_soft_and_true_labels_are_compared_stitch_by_stitch(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    found = sweeps.labels(lab)
    curve = found.curves["Relative accuracy of stitches"]
    together, gap = found.measured.values()
    assert together.n == 4
    assert together.value == pytest.approx(np.corrcoef(curve["soft labels"], curve["true labels"])[0, 1])
    assert gap.value == pytest.approx(np.mean(curve["true labels"]) - np.mean(curve["soft labels"]))
    assert found.verdict == verdict(together.value >= 0.8, abs(gap.value) <= 0.02)


@pytest.mark.parametrize(
    "tiny, residual, judgement",
    [
        ((0.019, 0.0, 0.0), (0.0, -0.019, 0.0), "holds"),
        ((0.05, -0.05, 0.0), (0.0, 0.0, 0.0), "holds in part"),  # the gaps of two layers must not cancel out
        ((0.0, 0.0, -0.03), (0.03, 0.0, 0.0), "does not hold"),
    ],
)
def test_procrustes_must_equal_least_squares_at_each_later_layer(lab, monkeypatch, tiny, residual, judgement):
    gaps = {"tiny10": tiny, "resnet20": residual}
    made_up = {kind: _rotated(sweeps.LATER[kind], gaps[kind]) for kind in gaps}
    monkeypatch.setattr(sweeps, "sweeps", lambda lab, *hows: made_up)
    found = sweeps.procrustes(lab)
    assert found.verdict == judgement
    largest = found.measured["Tiny-10: largest difference at a later layer"]
    assert (largest.value, largest.n) == (pytest.approx(max(map(abs, tiny))), 2)
    name = "Tiny-10, Layer 7: relative accuracy of Procrustes minus least squares"
    assert found.measured[name].value == pytest.approx(tiny[1])


def _rotated(later, gaps):
    """Sweeps of two pairs: by least squares 0.9 throughout, by Procrustes more by the gaps in the later layers."""
    exact = {"first": [_worth(0.9)] * 2} | {layer: [_worth(0.9)] * 2 for layer in later}
    rotated = {"first": [_worth(0.5)] * 2}
    rotated |= {layer: [_worth(0.89 + gap), _worth(0.91 + gap)] for layer, gap in zip(later, gaps, strict=True)}
    return {"procrustes": sweeps.Sweep(rotated), "least_squares": sweeps.Sweep(exact)}


def _worth(share):
    """A stitch of this relative accuracy."""
    return SimpleNamespace(evaluation=SimpleNamespace(relative_accuracy=share, cross_entropy=1.0))


def test_indices_are_followed_while_a_stitch_is_trained(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    found = indices.indices_and_training(lab)
    curve = found.curves["Tiny-10, Layer 3, while the stitch is trained"]
    assert curve["step"][0] == 0
    for name in ("CKA", "R²", "CCA", "SVCCA", "cross-entropy"):
        assert found.measured[f"change of {name}"].value == pytest.approx(curve[name][-1] - curve[name][0])
    assert abs(found.measured["change of CCA"].value) < 0.01  # an invertible map changes nothing
    assert "on 50 of the images of the fit" in found.note


@pytest.mark.parametrize(
    "slopes, judgement",
    [((0.1, -0.1), "holds"), ((0.1, 0.11), "holds in part"), ((-0.1, -0.11), "holds in part"), ((0, 0), "holds")],
)
def test_svcca_must_not_correlate_with_the_performance_in_either_direction(lab, monkeypatch, slopes, judgement):
    courses = {slope: [_record(step, slope) for step in range(4)] for slope in slopes}
    stitches_made = {f"{k}": SimpleNamespace(history=courses[slope]) for k, slope in enumerate(slopes)}
    monkeypatch.setattr(indices, "made", lambda lab, wanted: stitches_made)
    found = indices.indices_and_training(lab)
    assert found.verdict == judgement
    expected = np.mean([np.sign(slope) for slope in slopes])
    assert found.measured["correlation of SVCCA with the performance"].value == pytest.approx(expected)


def _record(step, slope):
    """The record of a training in which all goes straight."""
    falling = {"loss": 2.0, "cka": 0.9, "r2": 0.8}
    record = {name: start - 0.1 * step for name, start in falling.items()}
    return record | {"step": step, "accuracy": 0.1 * step, "cca": 0.5, "svcca": 0.7 + slope * step}


def test_cka_is_driven_down_and_the_network_left_as_it_was(lab, monkeypatch):
    monkeypatch.setitem(indices.RATE, "cpu", 0.05)
    before = {key: value.clone() for key, value in nets.network(lab, "resnet20/0").state_dict().items()}
    found = indices.low_cka(lab)
    course = found.curves["While CKA is penalised"]
    assert (course["CKA"][0], course["relative accuracy"][0]) == pytest.approx((1, 1))
    assert course["CKA"][-1] == pytest.approx(found.measured["CKA in the end"].value, abs=1e-4)
    assert course["CKA"][-1] < 0.999
    assert course["epoch"] == list(range(indices.EPOCHS["cpu"] + 1))
    after = nets.network(lab, "resnet20/0").state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    low, kept = (found.measured[f"{name} in the end"].value for name in ("CKA", "relative accuracy"))
    assert found.verdict == verdict(low < 0.7, kept >= 0.98)


def test_the_gain_at_a_rank_is_what_the_task_loss_has_more_than_the_svd(lab, monkeypatch):
    monkeypatch.setattr(ranks, "RANKS", (2, 4))
    found = ranks.low_rank(lab)
    gains = []
    for layer in ranks.LAYERS:
        curve = found.curves[f"Relative accuracy at {layer}"]
        for k, direct, trained in zip(curve["rank"], curve["SVD"], curve["task loss"], strict=True):
            gains.append(found.measured[f"{layer}, rank {k}: relative accuracy, task loss minus SVD"].value)
            assert gains[-1] == pytest.approx(trained - direct)
    assert found.verdict == verdict(*(gain > 0 for gain in gains))
    (pair, *_) = nets.ring(lab, "tiny10", 2)
    (stitch,) = made(lab, [task_loss(pair, "bn6", rank=4)]).values()
    assert found.measured["Layer 6, rank 4: relative accuracy by task loss"].value == stitch.relative_accuracy


def test_random_and_least_squares_starts_are_compared(lab, monkeypatch):
    monkeypatch.setitem(starts.STARTS, "cpu", 2)
    found = starts.starts(lab)
    wanted = {init: starts.wishes(lab, "Layer 3", init, 2) for init in ("random", "least_squares")}
    random, direct = shares(lab, wanted).values()
    near = np.mean([abs(value - np.mean(direct)) <= 0.05 for value in random])
    assert found.measured["worst of the random starts"].value == min(random)
    assert found.measured["relative accuracy from random starts"].value == pytest.approx(np.mean(random))
    assert found.measured["share of random starts that end near the least-squares ones"].value == near
    steady = max(abs(value - np.mean(direct)) for value in direct) <= 0.05
    assert found.verdict == verdict(near >= 0.5, np.mean(direct) >= np.mean(random), steady)


def test_the_drop_between_stitches_is_that_of_the_worst_point_of_five(lab, monkeypatch):
    monkeypatch.setitem(starts.AMONG, "cpu", (3, 7))
    monkeypatch.setattr(starts, "GOOD", 0.0)
    found = starts.mode_connectivity(lab)
    assert found.measured["Layer 3: stitches of at least 0%"].value == 2
    assert "followed on 100 test images" in found.note
    drops = {}
    for layer in ("Layer 3", "Layer 7"):
        drops[layer] = found.measured[f"{layer}: drop between stitches"].value
        first, second = made(lab, starts.wishes(lab, layer, "random", 2)).values()
        on_the_line = [interpolate(first, second, weight).evaluate(judging(lab)) for weight in (0, 0.25, 0.5, 0.75, 1)]
        kept = [one.relative_accuracy for one in on_the_line]
        assert drops[layer] == pytest.approx(max(0, *_fallen(kept)), abs=1e-6)
    assert found.verdict == verdict(drops["Layer 7"] <= 0.05, drops["Layer 3"] > 0.05)


def _fallen(kept):
    """How far each point of a line lies below the straight one between its ends."""
    return np.linspace(kept[0], kept[-1], len(kept)) - np.array(kept)


def test_stitches_that_are_not_good_enough_are_not_joined(lab, monkeypatch):
    monkeypatch.setitem(starts.AMONG, "cpu", (3, 7))
    monkeypatch.setattr(starts, "GOOD", 9.0)
    found = starts.mode_connectivity(lab)
    assert found.verdict == "does not hold"
    assert found.measured["Layer 3: stitches of at least 900%"].value == 0


def test_the_line_without_penalty_begins_at_the_measured_accuracy(lab, monkeypatch):
    monkeypatch.setitem(sparse.PENALTIES, "cpu", (1e-2, 1e-1))
    found = sparse.sparse_matching(lab)
    assert found.measured["largest sparsity of task loss matching"].value > 0
    curve = found.curves["Relative accuracy of sparse stitches"]
    assert curve["direct"][0] == pytest.approx(
        found.measured["relative accuracy of direct matching without penalty"].value
    )


def test_networks_of_four_ways_of_training_are_judged_by_their_worst_layer(lab):
    found = tasks.ways_of_training(lab)
    plain = nets.network(lab, "tiny10-plain-adam/0")
    assert isinstance(plain.bn1, torch.nn.Identity)
    assert isinstance(nets.network(lab, "tiny10-adam/0").bn1, torch.nn.BatchNorm2d)
    curve = found.curves["Relative accuracy by layer"]
    for words in tasks.WAYS.values():
        worst = found.measured[f"{words}: relative accuracy of the worst layer"].value
        assert worst == pytest.approx(min(curve[words]))
    assert found.verdict == verdict(*(min(curve[words]) >= 0.80 for words in tasks.WAYS.values()))


def test_networks_of_other_data_are_judged_at_the_better_half_of_the_layers(lab, monkeypatch):
    with pytest.raises(SourceError, match="this claim reads SVHN; pass --data DIR or set NETKIN_DATA"):
        tasks.other_data(lab)
    digits = lab.images()
    upside_down = replace(
        digits, name="SVHN", train_images=digits.train_images.flip(2), test_images=digits.test_images.flip(2)
    )
    monkeypatch.setattr(nets, "_other", lambda lab, name: upside_down)
    found = tasks.other_data(lab)
    curve = found.curves["Relative accuracy by layer"]
    assert list(curve) == ["layer", "SVHN → CIFAR-10"]
    rising = sorted(curve["SVHN → CIFAR-10"])
    half = found.measured["relative accuracy at the best half of the layers"].value
    assert half == pytest.approx(np.mean(rising[1:]))
    assert found.verdict == verdict(half >= 0.80)
    assert "chosen by the same numbers" in found.note


def test_of_other_data_all_layers_count_and_the_best_and_the_worst_are_named():
    by_layer = {"Layer 2": [0.5, 0.7], "Layer 4": [0.9, 0.9], "Layer 6": [0.1, 0.3]}
    found = {words: one.value for words, one in tasks._worths(by_layer).items()}
    assert found == pytest.approx({
        "relative accuracy at the best half of the layers": 0.75,
        "relative accuracy over all layers": 3.4 / 6,
        "relative accuracy of the best layer, Layer 4": 0.9,
        "relative accuracy of the worst layer, Layer 6": 0.2,
    })  # fmt: skip


@pytest.mark.slow
def test_every_width_is_stitched_in_all_ordered_pairs(lab, monkeypatch):
    monkeypatch.setattr(widths, "LAYERS", ("Conv 1", "Layer 2.0"))
    monkeypatch.setattr(widths, "SEEDS", 2)
    found = widths.widths(lab)
    rank = found.measured["rank correlation of width and relative accuracy"]
    assert rank.n == 4 * 2 * 2
    curve = found.curves["Relative accuracy by width"]
    assert curve["width"] == [1, 2, 3, 4]
    for k, width in enumerate(curve["width"]):
        mean = (curve["Conv 1"][k] + curve["Layer 2.0"][k]) / 2
        assert found.measured[f"width {width}: relative accuracy"].value == pytest.approx(mean)
    assert "not independent, so the standard errors and p are too small" in found.note


def test_the_trend_over_widths_is_taken_within_layers(monkeypatch):
    monkeypatch.setattr(widths, "LAYERS", ("low", "high"))
    shares = {(w, layer): [base + 0.01 * w] for w in widths.WIDTHS for layer, base in (("low", 0.1), ("high", 0.9))}
    rank, p = widths._trend(shares)
    assert rank > 0.98
    assert p < 0.01


def test_a_stitch_is_made_once_and_then_read(lab, monkeypatch):
    (pair, *_) = nets.ring(lab, "tiny10", 2)
    wanted = task_loss(pair, "bn5", rate=2e-3)
    (first,) = made(lab, [wanted]).values()
    monkeypatch.setattr(stitches.nk, "stitch", None)
    (second,) = made(lab, [wanted]).values()
    assert torch.equal(first.map.weight, second.map.weight)
    assert first.evaluation == second.evaluation
    assert place(lab, wanted) != place(lab, task_loss(pair, "bn5", rate=3e-3))


def test_stitches_of_the_same_networks_share_one_pass(lab):
    wanted = [Wanted("a/0", "b/0", layer, how) for layer in "xy" for how in ("procrustes", "identity")]
    trained = [task_loss(("a/0", "b/0"), layer) for layer in "xy"]
    assert [len(part) for part in stitches._work([*wanted, *trained])] == [4, 1, 1]


def test_naming_the_sums_of_blocks_changes_no_answers(lab):
    inputs = lab.probe(20)
    model = seeded(lambda: ResNet((1, 1, 1), (4, 4, 4)), 0).eval()
    before = model(inputs)
    torch.testing.assert_close(nets._with_sums(model)(inputs), before)
    with nk.recording(model, ["layer2.0.relu2.sum", "layer2.0"]) as outputs:
        model(inputs)
    assert outputs["layer2.0.relu2.sum"].min() < 0 <= outputs["layer2.0"].min()


def test_cka_of_whole_maps_agrees_with_its_definition(lab):
    (pair, *_) = nets.ring(lab, "tiny10", 2)
    (stitch,) = made(lab, [Wanted(*pair, "bn4")]).values()
    inputs = lab.probe(60)
    with torch.no_grad():
        ours = stitch.transformation(nk.run_until(stitch.network.a, "bn4", inputs)).flatten(1).double().numpy()
        theirs = nk.run_until(stitch.network.b, "bn4", inputs).flatten(1).double().numpy()
    centring = np.eye(60) - 1 / 60
    K, L = (centring @ X @ X.T @ centring for X in (ours, theirs))
    expected = (K * L).sum() / np.linalg.norm(K) / np.linalg.norm(L)
    assert cka_of_maps(lab, stitch, 60) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(maps(lab, stitch, 60)[1], torch.from_numpy(theirs).float())


def test_stitches_lie_before_the_relus(lab):
    (inputs, _), *_ = judging(lab)
    for kind in ("tiny10", "resnet20"):
        model, names = nets.network(lab, f"{kind}/0"), nets.layers(lab, kind).values()
        with nk.recording(model, list(names)) as outputs:
            model(inputs)
        assert all(outputs[name].min() < 0 for name in names)


def test_a_stitch_without_the_number_asked_for_is_refused(lab):
    (pair, *_) = nets.ring(lab, "tiny10", 2)
    wanted = Wanted(*pair, "bn2", "identity")
    a, b = (nets.network(lab, name) for name in pair)
    stitch = nk.stitch(a, "bn2", b, "bn2", fitting(lab), "identity")
    place(lab, wanted).parent.mkdir(parents=True, exist_ok=True)
    stitch.save(place(lab, wanted))
    with pytest.raises(NoValue, match="there is no relative accuracy without labelled test data"):
        shares(lab, {"identity": [wanted]})
    with pytest.raises(
        NoValue, match="the stitch of bn2 and bn2 by identity has no cka; it takes labelled test images"
    ):
        number(stitch, "cka")


def test_sparse_lines_are_read_between_their_points():
    assert sparse._read([(0.0, 1.0), (0.9, 0.1), (0.5, 0.9)], [0.25, 0.7]) == pytest.approx([0.95, 0.5])
    assert np.isnan(sparse._read([(0.0, 1.0), (0.1, 0.9)], [0.85])).all()  # nothing is read beyond the sparsest


def test_a_line_that_ends_early_supports_no_claim(lab, monkeypatch):
    monkeypatch.setattr(sparse, "_line", lambda found: [(0.0, 1.0), (0.1, 0.9)])
    found = sparse.sparse_matching(lab)
    assert found.verdict == "does not hold"
    assert "relative accuracy of task loss matching at 80 to 90% sparsity" not in found.measured


def test_the_authors_networks_are_asked_for_by_name(lab, tmp_path):
    with pytest.raises(
        SourceError, match="own network 'tiny10_cifar10_seed0.pt'; pass --checkpoints DIR or set NETKIN"
    ):
        lab.checkpoint("tiny10_cifar10_seed0.pt")
    own = Lab("cpu", data=tmp_path, checkpoints=tmp_path)
    assert nets.published(own, "tiny10/0")
    assert not nets.published(own, "resnet20w1/0")
    assert nets.whose(own, "tiny10", "resnet20") == "The tiny10 and resnet20 networks are the paper's own."
    assert not nets.published(SimpleNamespace(data=None, checkpoints=tmp_path), "tiny10/0")


@pytest.mark.skipif(not (DATA and CHECKPOINTS), reason="needs the authors' networks")
@pytest.mark.parametrize("name, accuracy", [("tiny10/0", 0.866), ("resnet20/1", 0.9195)])
def test_the_authors_networks_are_as_good_as_they_say(name, accuracy):
    lab = Lab("cpu", data=DATA, checkpoints=CHECKPOINTS)
    assert lab.accuracy(nets.network(lab, name)) == pytest.approx(accuracy, abs=0.012)
