"""The claims about stitching, on small networks of digits: what they measure is what they say."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import SourceError
from netkin.sources.architectures import ConvNet
from netkin.sources.residual import ResNet
from reproductions import laboratory
from reproductions.laboratory import Lab, Recipe
from reproductions.matching import indices, nets, ranks, sparse, starts, stitches, sweeps, tasks, widths
from reproductions.matching.stitches import Setting, Wanted, cka_of_maps, judging, made, place, task_loss


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
        for module in (starts.LONGER, sparse.RATE):
            patch.setitem(module, "cpu", {"rate": 1e-2, "epochs": 1, "every": 3})
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"))
        whole = lab.images()
        part = {name: getattr(whole, name)[:count] for name, count in PARTS.items()}
        lab.__dict__["_images"] = replace(whole, **part)
        yield lab


DATA, CHECKPOINTS = (os.environ.get(name) for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"))
PARTS = {"train_images": 400, "train_labels": 400, "test_images": 100, "test_labels": 100}
VERDICTS = ("holds", "holds in part", "does not hold")


def test_task_loss_against_direct_matching(lab, monkeypatch):
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
    assert "Trained here, 2 epochs: tiny10, resnet20." in found.note
    assert "CelebA" in found.note


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


def test_the_other_claims_of_the_sweep(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    rotated, alike, labelled = sweeps.procrustes(lab), sweeps.cka_of_stitches(lab), sweeps.labels(lab)
    assert rotated.measured["Tiny-10, later layers: relative accuracy of Procrustes minus least squares"].n == 6
    assert 0 < alike.measured["Tiny-10: CKA of whole maps"].value <= 1
    assert labelled.measured["correlation of relative accuracies, soft labels with true ones"].n == 4
    assert {rotated.verdict, alike.verdict, labelled.verdict} <= set(VERDICTS)


def test_indices_while_training(lab, monkeypatch):
    monkeypatch.setitem(sweeps.PAIRS, "cpu", {"tiny10": 2, "resnet20": 1})
    found = indices.indices_and_training(lab)
    curve = found.curves["Tiny-10, Layer 3, while the stitch is trained"]
    assert curve["step"][0] == 0
    for name in ("CKA", "R²", "CCA", "SVCCA", "cross-entropy"):
        assert found.measured[f"change of {name}"].value == pytest.approx(curve[name][-1] - curve[name][0])
    assert abs(found.measured["change of CCA"].value) < 0.01  # an invertible map changes nothing


def test_low_cka(lab, monkeypatch):
    monkeypatch.setitem(indices.RATE, "cpu", 0.05)
    found = indices.low_cka(lab)
    course = found.curves["While CKA is penalised"]
    assert course["CKA"][0] == 1
    assert course["CKA"][-1] == found.measured["CKA in the end"].value < 0.999
    assert nets.network(lab, "resnet20/0").bn1.weight.grad is None


def test_the_penalty_is_the_cka_of_flattened_maps():
    torch.manual_seed(0)
    X, Y = torch.randn(20, 3, 4, 4), torch.randn(20, 5, 4, 4)
    torch.testing.assert_close(indices.map_cka(X, Y), nk.cka(X.flatten(1), Y.flatten(1)).float())


def test_low_rank(lab, monkeypatch):
    monkeypatch.setattr(ranks, "RANKS", (2, 4))
    found = ranks.low_rank(lab)
    direct, trained = (
        found.measured[f"Layer 6, rank 4: relative accuracy by {how}"].value for how in ("SVD", "task loss")
    )
    assert found.measured["Layer 6, rank 4: relative accuracy, task loss minus SVD"].value == pytest.approx(
        trained - direct
    )


def test_starts_and_what_lies_between(lab, monkeypatch):
    monkeypatch.setitem(starts.STARTS, "cpu", 2)
    monkeypatch.setitem(starts.AMONG, "cpu", (3, 7))
    monkeypatch.setattr(starts, "GOOD", 0.0)
    found, between = starts.starts(lab), starts.mode_connectivity(lab)
    assert (
        found.measured["worst of the random starts"].value
        <= found.measured["relative accuracy from random starts"].value
    )
    assert between.measured["Layer 3: stitches of at least 80%"].value == 2
    assert between.measured["Layer 7: drop between stitches"].value >= 0
    monkeypatch.setattr(starts, "GOOD", 9.0)
    assert starts.mode_connectivity(lab).verdict == "does not hold"  # no stitches are good enough to be joined


def test_sparsity(lab, monkeypatch):
    monkeypatch.setitem(sparse.PENALTIES, "cpu", (1e-2, 1e-1))
    found = sparse.sparse_matching(lab)
    assert found.measured["largest sparsity of task loss matching"].value > 0
    curve = found.curves["Relative accuracy of sparse stitches"]
    assert curve["direct"][0] == pytest.approx(
        found.measured["relative accuracy of direct matching without penalty"].value
    )


def test_ways_of_training(lab):
    found = tasks.ways_of_training(lab)
    plain = nets.network(lab, "tiny10-plain-adam/0")
    assert isinstance(plain.bn1, torch.nn.Identity)
    assert isinstance(nets.network(lab, "tiny10-adam/0").bn1, torch.nn.BatchNorm2d)
    assert len(found.curves["Relative accuracy by layer"]) == 5
    assert found.verdict in VERDICTS


def test_networks_of_other_data(lab, monkeypatch):
    with pytest.raises(SourceError, match="this claim reads SVHN; pass --data DIR or set NETKIN_DATA"):
        tasks.other_data(lab)
    digits = lab.images()
    upside_down = replace(
        digits, name="SVHN", train_images=digits.train_images.flip(2), test_images=digits.test_images.flip(2)
    )
    monkeypatch.setattr(nets, "_other", lambda lab, name: upside_down)
    found = tasks.other_data(lab)
    assert list(found.curves["Relative accuracy by layer"]) == ["layer", "SVHN → CIFAR-10"]
    assert found.measured["relative accuracy at the best half of the layers"].value > 0


@pytest.mark.slow
def test_widths(lab, monkeypatch):
    monkeypatch.setattr(widths, "LAYERS", ("Conv 1", "Layer 2.0"))
    monkeypatch.setattr(widths, "SEEDS", 2)
    found = widths.widths(lab)
    assert found.measured["rank correlation of width and relative accuracy"].n == 4 * 2 * 2
    assert found.curves["Relative accuracy by width"]["width"] == [1, 2, 3, 4]


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
    model = ResNet((1, 1, 1), (4, 4, 4)).eval()
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
    assert nets.origin(own, "tiny10", "resnet20") == "The tiny10 and resnet20 networks are the paper's own."
    assert not nets.published(SimpleNamespace(data=None, checkpoints=tmp_path), "tiny10/0")


@pytest.mark.skipif(not (DATA and CHECKPOINTS), reason="needs the authors' networks")
@pytest.mark.parametrize("name, accuracy", [("tiny10/0", 0.866), ("resnet20/1", 0.9195)])
def test_the_authors_networks_are_as_good_as_they_say(name, accuracy):
    lab = Lab("cpu", data=DATA, checkpoints=CHECKPOINTS)
    assert lab.accuracy(nets.network(lab, name)) == pytest.approx(accuracy, abs=0.012)
