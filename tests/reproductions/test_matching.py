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
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Lab, Network
from reproductions.matching import indices, kinds, nets, restricted, starts, stitches, sweeps
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
pytestmark = [
    pytest.mark.slow,  # what verdicts follow from numbers is tested quickly in test_matching_verdicts.py
    pytest.mark.filterwarnings("ignore:the second model itself gets:netkin.errors.InflatedWarning"),
]


def small_tiny10():
    channels = (3, 4, 4, 8, 8, 8, 8, 8, 8)
    return ConvNet(channels, kernels=(3, 3, 3, 3, 3, 3, 3, 1), strides=(1, 1, 2, 1, 1, 2, 1, 1), padding=0)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, with_few_images):
    """A laboratory of digits with small networks, trained for an epoch, and stitches of few images."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"):
            patch.delenv(name, raising=False)
        recipe = Recipe(epochs=2, batch=50, lr=0.05, drop_last=True)
        residual = {f"resnet20w{w}": Network(lambda w=w: ResNet((1, 1, 1), (4 * w, 4 * w, 4 * w)), recipe)
                    for w in (1, 2, 3)}  # fmt: skip
        patch.setitem(laboratory.RECIPES, "cpu", residual | {"tiny10": Network(small_tiny10, recipe)})
        for module in (indices, kinds, restricted, starts, sweeps):
            patch.setitem(module.PAIRS, "cpu", 2)
        patch.setitem(stitches.SETTINGS, "cpu", Setting(fit=100, test=60, epochs=1, batch=50, every=3, sample=50))
        for module in (starts.LONGER, restricted.LONGER):
            patch.setitem(module, "cpu", {"lr": 1e-2, "epochs": 1, "every": 3})
        yield with_few_images(Lab("cpu", cache=tmp_path_factory.mktemp("cache")), 250, 60)


DATA, CHECKPOINTS = (os.environ.get(name) for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"))


def test_task_loss_and_direct_matching_are_compared_at_every_layer(lab):
    found = sweeps.task_loss_matching(lab)
    curve = found.curves["Relative accuracy of Tiny-10 stitched at each layer"]
    assert curve["layer"] == [f"Layer {k}" for k in range(1, 9)]
    assert curve["task loss"][0] == pytest.approx(_mean_share(lab, task_loss), abs=1e-6)
    assert curve["least squares"][0] == pytest.approx(_mean_share(lab, Wanted), abs=1e-6)
    gain = np.mean(curve["from a random map"]) - np.mean(curve["least squares"])
    assert found.measured[f"Tiny-10: {sweeps.GAIN}"].value == pytest.approx(gain)
    residual = found.curves["Relative accuracy of ResNet-20 stitched at each layer"]
    worst = int(np.argmin(residual["task loss"]))
    assert found.measured[sweeps.WORST].value == pytest.approx(residual["task loss"][worst])
    assert found.controls[sweeps.WORST].value == pytest.approx(residual["from an untrained network"][worst])
    assert "Trained here, 2 epochs: tiny10, resnet20w1; each network is in two of the pairs." in found.note
    assert "fitted on 100 of the training images and judged on 60 of the test images." in found.note
    assert "needs CelebA, which netkin does not read" in found.note


def _mean_share(lab, wish):
    """The relative accuracy at the first layer in the mean over two pairs, evaluated anew."""
    shares = []
    for pair in nets.pairs(lab, "tiny10", 2):
        wanted = task_loss(pair, "bn1") if wish is task_loss else Wanted(*pair, "bn1")
        (stitch,) = made(lab, [wanted]).values()
        (inputs, labels), *_ = judging(lab)
        right = (stitch.network(inputs).argmax(1) == labels).float().mean()
        shares.append((right / (stitch.network.b(inputs).argmax(1) == labels).float().mean()).item())
    return sum(shares) / 2


def test_an_untrained_network_is_the_one_that_training_began_with(lab):
    begun = seeded(lab.recipe("tiny10").build, 1)
    control = nets.network(lab, "untrained-tiny10/1")
    assert torch.equal(control.conv3.weight, begun.conv3.weight)
    assert not torch.equal(control.conv3.weight, nets.network(lab, "tiny10/1").conv3.weight)
    assert control.bn3.running_var.std() > 0  # of training images
    assert nets.untrained(("tiny10/0", "tiny10/1")) == ("untrained-tiny10/0", "tiny10/1")


def test_networks_trained_together_are_those_trained_alone(lab, tmp_path):
    together = Lab("cpu", cache=tmp_path)
    together.__dict__["_images"] = lab.images()
    names = ["tiny10-sgd/0", "tiny10-sgd/1"]
    nets._train_together(together, names)
    for name in names:
        ours, alone = (nets.network(one, name).state_dict() for one in (together, lab))
        for key, value in alone.items():
            torch.testing.assert_close(ours[key], value, atol=1e-4, rtol=1e-3)


def test_cka_of_stitches_is_taken_three_ways_and_judged_by_whole_maps(lab):
    found = sweeps.cka_of_stitches(lab)
    assert "here those of 60 test images" in found.note
    curve = found.curves["CKA at the layers of Tiny-10"]
    assert found.measured["Tiny-10: CKA of whole maps"].value == pytest.approx(np.mean(curve["CKA of whole maps"]))
    control = np.mean(curve["CKA of whole maps, control"])
    assert found.controls["Tiny-10: CKA of whole maps"].value == pytest.approx(control)
    assert found.measured["Tiny-10: CKA of whole maps"].value > found.measured["Tiny-10: CKA place by place"].value


def test_indices_are_followed_while_a_stitch_is_trained(lab):
    found = indices.indices_and_training(lab)
    curve = found.curves["Tiny-10, Layer 3, while the stitch is trained"]
    assert curve["step"][0] == 0
    for name in ("CKA", "SVCCA", "cross-entropy"):
        assert found.measured[f"change of {name}"].value == pytest.approx(curve[name][-1] - curve[name][0])
    control = found.curves["Tiny-10, Layer 3, from a random map"]
    assert found.controls["change of CKA"].value == pytest.approx(control["CKA"][-1] - control["CKA"][0])
    assert "on 50 of the images of the fit" in found.note


def test_an_invertible_map_changes_nothing_for_cca(lab):
    found = indices.cca_invariance(lab)
    assert found.verdict == "holds"
    assert abs(found.measured["change of CCA"].value) < 0.01
    assert found.measured["change of R²"].value < 0


def test_cka_is_driven_down_and_the_network_left_as_it_was(lab, monkeypatch):
    monkeypatch.setitem(indices.RATE, "cpu", 0.05)
    before = {key: value.clone() for key, value in nets.network(lab, "resnet20w1/0").state_dict().items()}
    found = indices.low_cka(lab)
    course = found.curves["While CKA is penalised"]
    assert (course["CKA"][0], course["relative accuracy"][0]) == pytest.approx((1, 1))
    assert course["CKA"][-1] == pytest.approx(found.measured["CKA in the end"].value, abs=1e-4)
    assert course["CKA"][-1] < found.controls["CKA in the end"].value
    assert course["epoch"] == list(range(indices.EPOCHS["cpu"] + 1))
    after = nets.network(lab, "resnet20w1/0").state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_gain_at_a_rank_is_what_the_task_loss_has_more_than_the_svd(lab, monkeypatch):
    monkeypatch.setattr(restricted, "RANKS", (2, 4))
    found = restricted.low_rank(lab)
    for layer in restricted.LAYERS:
        curve = found.curves[f"Relative accuracy at {layer}"]
        for at, k in enumerate(curve["rank"]):
            name = f"{layer}, rank {k}: relative accuracy, task loss minus SVD"
            direct, trained = (curve[how][at] for how in restricted.HOWS)
            assert found.measured[name].value == pytest.approx(trained - direct)
            full, least = (found.controls[f"{layer}, full rank: relative accuracy by {how}"].value
                           for how in ("task loss", "least squares"))  # fmt: skip
            assert found.controls[name].value == pytest.approx(full - least)
        couples = nets.pairs(lab, "tiny10", 2)
        squares = shares(lab, {"": [Wanted(*pair, f"bn{layer[-1]}", "least_squares") for pair in couples]})[""]
        assert least == pytest.approx(np.mean(squares))


def test_random_and_least_squares_starts_are_compared_with_those_of_a_network_before_training(lab, monkeypatch):
    monkeypatch.setitem(starts.STARTS, "cpu", 2)
    found = starts.starts(lab)
    curve = found.curves["Relative accuracies, sorted"]
    random, direct = curve["random"], curve["least squares"]
    near = np.mean([abs(value - np.mean(direct)) <= 0.05 for value in random])
    assert found.measured["worst of the random starts"].value == min(random)
    assert found.measured["relative accuracy from random starts"].value == pytest.approx(np.mean(random))
    assert found.measured[starts.NEAR].value == near
    (pair, *_) = nets.pairs(lab, "tiny10", 2)
    first = nets.UNTRAINED + pair[0]
    wanted = [task_loss((first, pair[1]), "bn3", init="random", seed=k, **starts.LONGER["cpu"]) for k in (0, 1)]
    assert not torch.equal(nets.network(lab, first).fc.weight, nets.network(lab, pair[0]).fc.weight)
    alike = shares(lab, {"": wanted})[""]
    assert found.controls["relative accuracy from random starts"].value == pytest.approx(np.mean(alike))


def test_the_drop_between_stitches_is_that_of_the_worst_point_of_five(lab, monkeypatch):
    monkeypatch.setitem(starts.EARLY, "cpu", (3,))
    monkeypatch.setitem(starts.LATE, "cpu", (7,))
    monkeypatch.setattr(starts, "GOOD", 0.0)
    found = starts.mode_connectivity(lab)
    assert found.measured["Layer 3: pairs of stitches of at least 0%"].value == 2
    assert "followed on 60 test images" in found.note
    pair = nets.pairs(lab, "tiny10", 2)[0]
    wanted = [task_loss(pair, "bn3", init="random", seed=seed, **starts.LONGER["cpu"]) for seed in (0, 1)]
    first, second = made(lab, wanted).values()
    on_the_line = [interpolate(first, second, weight).evaluate(judging(lab)) for weight in (0, 0.25, 0.5, 0.75, 1)]
    kept = [one.relative_accuracy for one in on_the_line]
    fallen = np.linspace(kept[0], kept[-1], len(kept)) - np.array(kept)
    other = found.measured["Layer 3: drop between stitches"].value * 2 - max(0, *fallen)
    assert other >= -1e-6  # the drop of the other pair
    assert found.controls[starts.DROP] == found.measured["drop between stitches of the first three layers"]


def test_stitches_that_are_not_good_enough_are_not_joined(lab, monkeypatch):
    monkeypatch.setitem(starts.EARLY, "cpu", (3,))
    monkeypatch.setitem(starts.LATE, "cpu", (7,))
    monkeypatch.setattr(starts, "GOOD", 9.0)
    found = starts.mode_connectivity(lab)
    assert found.verdict == "undecided"
    assert found.measured["Layer 3: pairs of stitches of at least 900%"].value == 0


def test_the_line_without_penalty_begins_at_the_measured_accuracy(lab, monkeypatch):
    monkeypatch.setitem(restricted.PENALTIES, "cpu", (1e-2, 1e-1))
    found = restricted.sparse_matching(lab)
    assert found.measured["largest sparsity of task loss matching"].value > 0
    curve = found.curves["Relative accuracy of sparse stitches"]
    for words in ("direct", "task loss"):
        whole = found.measured[f"relative accuracy of {words} matching without penalty"].value
        assert curve[words][0] == pytest.approx(whole)


def test_a_pruned_stitch_keeps_its_largest_entries_and_is_left_as_it_was(lab):
    pair = nets.pairs(lab, "tiny10", 2)[0]
    (stitch,) = made(lab, [task_loss(pair, "bn5")]).values()
    before = stitch.map.weight.clone()
    line = restricted._pruned(lab, stitch)
    assert line[0] == (0.0, stitch.relative_accuracy)
    assert [share for share, _ in line[1:]] == list(restricted.BETWEEN)
    assert torch.equal(stitch.transformation.as_map().weight, before)


def test_networks_of_four_ways_of_training_are_judged_by_their_worst_layer(lab):
    found = kinds.ways_of_training(lab)
    plain = nets.network(lab, "tiny10-plain-adam/0")
    assert isinstance(plain.bn1, torch.nn.Identity)
    assert isinstance(nets.network(lab, "tiny10-adam/0").bn1, torch.nn.BatchNorm2d)
    curve = found.curves["Relative accuracy by layer"]
    for words in kinds.WAYS.values():
        worst = int(np.argmin(curve[words]))
        name = f"{words}: relative accuracy of the worst layer"
        assert found.measured[name].value == pytest.approx(curve[words][worst])
        assert found.controls[name].value == pytest.approx(curve[f"{words}, control"][worst])


def test_networks_of_other_data_are_judged_at_layers_fixed_beforehand(lab, monkeypatch):
    with pytest.raises(SourceError, match="this claim reads SVHN; pass --data DIR or set NETKIN_DATA"):
        kinds.other_data(lab)
    digits = lab.images()
    upside_down = replace(
        digits, name="SVHN", train_images=digits.train_images.flip(2), test_images=digits.test_images.flip(2)
    )
    monkeypatch.setattr(nets, "_other", lambda lab, name: upside_down)
    found = kinds.other_data(lab)
    curve = found.curves["Relative accuracy by layer"]
    assert list(curve) == ["layer", "SVHN → CIFAR-10", "SVHN → CIFAR-10, control"]
    name = "SVHN → CIFAR-10: relative accuracy at Layers 2 and 4"
    assert found.measured[name].value == pytest.approx(np.mean(curve["SVHN → CIFAR-10"]))
    assert found.controls[name].value == pytest.approx(np.mean(curve["SVHN → CIFAR-10, control"]))


def test_a_stitch_is_made_once_and_then_read(lab, monkeypatch):
    (pair, *_) = nets.pairs(lab, "tiny10", 2)
    wanted = task_loss(pair, "bn5", lr=2e-3)
    (first,) = made(lab, [wanted]).values()
    monkeypatch.setattr(stitches.nk, "stitch", None)
    (second,) = made(lab, [wanted]).values()
    assert torch.equal(first.map.weight, second.map.weight)
    assert first.evaluation == second.evaluation
    assert place(lab, wanted) != place(lab, task_loss(pair, "bn5", lr=3e-3))


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
    (pair, *_) = nets.pairs(lab, "tiny10", 2)
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
    for kind in ("tiny10", "resnet20w1"):
        model, names = nets.network(lab, f"{kind}/0"), nets.layers(lab, kind).values()
        with nk.recording(model, list(names)) as outputs:
            model(inputs)
        assert all(outputs[name].min() < 0 for name in names)


def test_a_stitch_without_the_number_asked_for_is_refused(lab):
    (pair, *_) = nets.pairs(lab, "tiny10", 2)
    wanted = Wanted(*pair, "bn2", "identity")
    a, b = (nets.network(lab, name) for name in pair)
    stitch = nk.stitch(a, "bn2", b, "bn2", fitting(lab), "identity")
    place(lab, wanted).parent.mkdir(parents=True, exist_ok=True)
    stitch.save(place(lab, wanted), overwrite=True)
    with pytest.raises(NoValue, match="there is no relative accuracy without labelled test data"):
        shares(lab, {"identity": [wanted]})
    with pytest.raises(
        NoValue, match="the stitch of bn2 and bn2 by identity has no cka; it takes labelled test images"
    ):
        number(stitch, "cka")


def test_the_authors_networks_are_asked_for_by_name(lab, tmp_path):
    with pytest.raises(
        SourceError, match="own network 'tiny10_cifar10_seed0.pt'; pass --checkpoints DIR or set NETKIN"
    ):
        lab.checkpoint("tiny10_cifar10_seed0.pt")
    own = Lab("cpu", data=tmp_path, checkpoints=tmp_path)
    assert nets.published(own, "tiny10/0")
    assert not nets.published(own, "resnet20w1/0")
    assert nets.whose(own, "tiny10") == "The tiny10 networks are the paper's own; the first 6 pairs share none."
    assert nets.pairs(own, "tiny10", 9)[1:3] == [("tiny10/2", "tiny10/3"), ("tiny10/4", "tiny10/5")]
    assert not nets.published(SimpleNamespace(data=None, checkpoints=tmp_path), "tiny10/0")


@pytest.mark.skipif(not (DATA and CHECKPOINTS), reason="needs the authors' networks")
def test_the_authors_networks_are_as_good_as_they_say():
    lab = Lab("cpu", data=DATA, checkpoints=CHECKPOINTS)
    assert lab.accuracy(nets.network(lab, "tiny10/0")) == pytest.approx(0.866, abs=0.012)
