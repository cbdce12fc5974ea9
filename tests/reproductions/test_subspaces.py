"""The claims about filter subspaces, on small networks of made-up images: what they measure is what they say."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.representations.filters import atom_layers
from netkin.sources.architectures import ResNet, alexnet, resnet18, vgg11
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Images, Lab, Network
from reproductions.subspaces import bound, correlations, costs, decorrelated, nets, pairs

CLASSES = {"cifar10": 10, "cifar100": 20, "svhn": 10}


def made_up(name, seed, size=32):
    """Return 200 and 100 images, each a noisy picture of its class."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[name]
    pictures = torch.randn(classes, 3, 4, 4, generator=generator)
    parts = []
    for count in (200, 100):
        labels = torch.arange(count) % classes
        noise = torch.randn(count, 3, size, size, generator=generator)
        parts += [torch.nn.functional.interpolate(pictures[labels], scale_factor=size // 4) + noise, labels]
    return Images(name, tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of three made-up sets, with narrow networks that are trained for few steps."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=6, batch=10, lr=0.01, drop_last=True)
        patch.setitem(laboratory.RECIPES, "cpu", {
            "resnet18-atoms": Network(lambda: ResNet((1, 1), (4, 4)), recipe),
            "alexnet-atoms": Network(lambda: alexnet(width=2), recipe),
            "vgg11-atoms": Network(lambda: vgg11(width=2), recipe),
        })  # fmt: skip
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(CLASSES)}
        yield lab


# --- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nets.HEADS)
def test_only_atoms_and_linear_layers_are_trained(lab, name):
    begin = nets.start(lab, name)
    model = nets.copies(begin, 1)[0]
    nets.train_all(lab, name, [model], [nets.tasks(lab, 2)[0].train])
    before, after = dict(begin.named_parameters()), dict(model.named_parameters())
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    heads = {key for key in before if key.startswith("fc")}
    assert moved == heads | {f"{layer}.atoms" for layer, _ in atom_layers(begin)}
    assert not model.training


def test_a_start_depends_on_its_seed_alone_and_not_on_the_number_of_classes(lab):
    one, other, third = nets.start(lab, "vgg11", 1), nets.start(lab, "vgg11", 1, classes=7), nets.start(lab, "vgg11", 2)
    for (_, a), (_, b), (_, c) in zip(*map(atom_layers, (one, other, third)), strict=True):
        assert torch.equal(a.atoms, b.atoms)
        assert torch.equal(a.coefficients, b.coefficients)
        assert not torch.equal(a.coefficients, c.coefficients)
    assert other.fc.out_features == 7


def test_filters_keep_the_size_of_what_goes_through_a_relu(lab):
    found = list(atom_layers(nets.start(lab, "vgg11")))
    sizes = [float(layer.weight.detach().var() * 9 * layer.in_channels / 2) for _, layer in found]
    assert sum(sizes) / len(sizes) == pytest.approx(1, abs=0.25)
    assert all(layer.bias.abs().max() == 0 for _, layer in found)


def test_tasks_part_the_classes_of_a_set(lab):
    found = nets.tasks(lab, 4)
    assert [len(task.classes) for task in found] == [5] * 4
    assert sum(len(task.train_images) for task in found) == 200
    assert all(set(task.train_labels.tolist()) == set(range(5)) for task in found)
    whole = lab.images_of("cifar100")
    assert torch.equal(found[1].test_images, whole.test_images[(whole.test_labels >= 5) & (whole.test_labels < 10)])


def test_shuffled_labels_are_the_same_ones_in_another_order(lab):
    task = nets.tasks(lab, 4)[0]
    other = nets.shuffled(task, 0)
    assert torch.equal(other.train_labels.sort().values, task.train_labels.sort().values)
    assert not torch.equal(other.train_labels, task.train_labels)
    assert torch.equal(other.test_labels, task.test_labels)


def test_a_walk_goes_as_far_as_training_in_each_layer_and_elsewhere(lab):
    begin, task = nets.start(lab, "resnet18"), nets.tasks(lab, 2)[0]
    [model] = nets.train_all(lab, "resnet18", nets.copies(begin, 1), [task.train])
    walk = nets.walked(begin, model, 3, task.train_images)
    ends, ways = nets.atoms_of(model), nets.atoms_of(walk)
    for name, first in nets.atoms_of(begin).items():
        assert (ends[name] - first).norm() > 0
        torch.testing.assert_close((ends[name] - first).norm(), (ways[name] - first).norm())
        assert not torch.allclose(ends[name], ways[name])


# --- pairs of networks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(lab):
    """Four networks of one start, on two tasks each."""
    begin, tasks = nets.start(lab, "resnet18", atoms=6), nets.tasks(lab, 4)
    return nets.train_all(lab, "resnet18", nets.copies(begin, 4), [task.train for task in tasks], steps=20, lr=0.1)


@pytest.fixture(scope="module")
def found(lab, models):
    return pairs.tables(models, pairs.probes(lab))


@pytest.mark.slow
def test_all_similarities_are_those_of_the_library(lab, models, found):
    layers = list(nets.atoms_of(models[0]))
    options = {"layers": layers, "pairs": "corresponding", "progress": False}
    probed = nk.compare_many(models, pairs.probes(lab), ["cca_rms", "cka"], shape="positions", **options)
    weighed = nk.compare_many(models, measures=["atom_cosine", "weight_cosine", "grassmann"], **options)
    for many, names in ((probed, ("cca_rms", "cka")), (weighed, ("atom_cosine", "weight_cosine", "grassmann"))):
        for name in names:
            for i, j in combinations(range(4), 2):
                wanted = [many[str(i), str(j)][name][layer, layer] for layer in layers]
                np.testing.assert_allclose(found[name][:, i, j], wanted, atol=2e-5)


def test_a_layer_with_fewer_directions_than_channels_has_cca_1_with_itself():
    rows = np.random.default_rng(0).normal(size=(200, 3)) @ np.random.default_rng(1).normal(size=(3, 8))
    C = torch.from_numpy(np.cov(np.hstack([rows, rows[:, ::-1]]).T)).reshape(2, 8, 2, 8)
    np.testing.assert_allclose(pairs.canonical(C), 1, atol=1e-6)


@pytest.mark.slow
def test_correlations_and_their_errors_are_those_of_networks_left_out(found):
    table = {name: own.mean(0) for name, own in found.items()}

    def slow(some):
        listed = [(table["atom_cosine"][i, j], table["cca_rms"][i, j]) for i in some for j in some if i < j]
        return np.corrcoef(np.array(listed).T)[0, 1]

    got = pairs.correlated([found], "atom_cosine", "cca_rms")
    assert got.value == pytest.approx(slow(range(4)))
    without = [slow([i for i in range(4) if i != left]) for left in range(4)]
    assert got.error == pytest.approx(np.sqrt(3 / 4 * ((without - np.mean(without)) ** 2).sum()))
    assert got.n == 4


def test_a_gain_over_itself_is_nothing_and_families_are_averaged(found):
    same = pairs.gained([found], "atom_cosine", [found], "atom_cosine", "cca_rms")
    assert (same.value, same.error) == (0, 0)
    turned = found | {"cca_rms": -found["cca_rms"]}
    assert pairs.correlation([found, turned], "atom_cosine", "cca_rms", range(4)) == pytest.approx(0)


@pytest.mark.slow
def test_mantel_counts_orders_that_correlate_as_much():
    draw = np.random.default_rng(0)
    one = draw.normal(size=(6, 6))
    other = one + one.T + 0.3 * draw.normal(size=(6, 6))
    tables = {"atom_cosine": np.stack([one + one.T]), "cka": np.stack([other + other.T])}
    upper = np.triu_indices(6, 1)

    def slow(order):
        return np.corrcoef(tables["atom_cosine"][0][np.ix_(order, order)][upper], tables["cka"][0][upper])[0, 1]

    draw = np.random.default_rng(5)
    counted = sum(slow(draw.permutation(6)) >= slow(range(6)) - 1e-9 for _ in range(pairs.SHUFFLES))
    assert pairs.mantel([tables], "atom_cosine", "cka", seed=5) == pytest.approx((1 + counted) / (1 + pairs.SHUFFLES))


# --- the claims -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_correlations_are_found_of_networks_and_of_walks(lab, monkeypatch):
    monkeypatch.setitem(correlations.STARTS, "cpu", {"resnet18": 2, "alexnet": 1})
    monkeypatch.setitem(correlations.TRAINING, "cpu", {"resnet18": {}, "alexnet": {}})
    found = correlations.correlations(lab)
    assert set(found.controls) < set(found.measured)
    assert found.measured["ResNet-18: correlation of atoms with CCA"].n == 10
    assert 0 < found.measured["AlexNet: correlation of atoms with CKA, p by Mantel"].value <= 1
    assert [len(curve["CCA"]) for curve in found.curves.values()] == [45] * 4
    assert "differ by" in found.note


def noisy_tables(seed, noise):
    """Return tables that agree but for noise of a size for each measure."""
    draw = np.random.default_rng(seed)
    one = draw.normal(size=(1, 10, 10))
    found = {name: one + size * draw.normal(size=one.shape) for name, size in noise.items()}
    return {name: own + own.swapaxes(1, 2) for name, own in found.items()}


ALIKE = dict.fromkeys(("atom_cosine", "grassmann", "cca_rms", "cka"), 0.01) | {"weight_cosine": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained, walks, wanted",
    [
        (ALIKE, 9.0, "holds"),
        (dict.fromkeys(ALIKE, 9.0), 9.0, "does not hold"),
        (ALIKE | {"cka": 9.0}, 9.0, "holds in part"),
        (dict.fromkeys(ALIKE, 0.01), 0.01, "does not hold"),  # walks correlate just as much
    ],
)
def test_the_verdict_on_correlations_follows_from_networks_walks_and_weights(lab, monkeypatch, trained, walks, wanted):
    noise = dict.fromkeys(trained, walks)
    monkeypatch.setattr(
        correlations,
        "family",
        lambda lab, name, start: (noisy_tables(start, trained), noisy_tables(start, noise), [0.5]),
    )
    assert correlations.correlations(lab).verdict == wanted


@pytest.mark.parametrize(
    "ours, control, wanted",
    [((0.5, 0.8, 0.97), 0.6, "holds"), ((0.5, 0.6, 0.8), 0.6, "holds in part"), ((0.9, 0.6, 0.8), 0.9, "does not hold"),
     ((0.5, 0.8, 0.97), 0.97, "undecided")],
)  # fmt: skip
def test_the_verdict_on_decorrelation_follows_from_the_gain_and_the_control(lab, monkeypatch, ours, control, wanted):
    jitter = (-0.01, 0.0, 0.01)

    def families(lab, start):
        shaken = control + (0 if wanted != "undecided" else 3 * jitter[start])
        return [decorrelated.Family(value + jitter[start] / 10, 0.1, 0.5) for value in (*ours, shaken)]

    monkeypatch.setattr(decorrelated, "families", families)
    assert decorrelated.decorrelation(lab).verdict == wanted


def test_the_term_in_the_loss_is_that_of_the_library(lab):
    task = nets.tasks(lab, 2)[0]
    model = nets.start(lab, "alexnet", 3)
    wrapped = decorrelated.Penalised(nets.copies(model, 1)[0], decorrelated.channel_correlation)
    wrapped.beta.fill_(0.01)
    nets.train_all(lab, "alexnet", [wrapped], [task.train], loss=decorrelated.with_term, clip=1.0)
    with nk.Decorrelation(model, 0.01) as apart:
        nk.train(model, task.train, nets.recipe(lab, "alexnet"), hooks=[apart], clip=1.0, progress=False)
    plain = nets.train_all(lab, "alexnet", [nets.start(lab, "alexnet", 3)], [task.train], clip=1.0)[0]
    for name, atoms in nets.atoms_of(model).items():
        torch.testing.assert_close(nets.atoms_of(wrapped.model)[name], atoms)
        assert not torch.allclose(nets.atoms_of(plain)[name], atoms)


def test_the_term_begins_at_its_share_of_the_loss_of_guesses(lab):
    images = pairs.probes(lab)
    for term in (decorrelated.channel_correlation, decorrelated.channel_size):
        begin = decorrelated.Penalised(nets.start(lab, "alexnet"), term)
        begin.beta.fill_(decorrelated.factor(begin, images, 2.0))
        with torch.no_grad():
            assert float(begin(images)[0, -1]) == pytest.approx(2 * np.log(10), rel=1e-5)


def test_the_term_of_the_control_is_the_same_for_equal_channels():
    maps = torch.randn(5, 1, 4, 4).expand(5, 6, 4, 4)
    torch.testing.assert_close(decorrelated.channel_size(maps), decorrelated.channel_correlation(maps))


def test_correlations_of_channels_are_those_of_numpy(lab, models):
    with nk.recording(models[0], ["conv1"]) as outputs, torch.no_grad():
        models[0](pairs.probes(lab))
    rows = outputs["conv1"].movedim(1, -1).flatten(0, -2).numpy()
    wanted = np.sqrt((np.corrcoef(rows.T)[~np.eye(rows.shape[1], dtype=bool)] ** 2).mean())
    assert decorrelated.channel_correlations([_only_first(models[0])], pairs.probes(lab)) == pytest.approx(
        wanted, rel=1e-4
    )


def _only_first(model):
    return torch.nn.Sequential(model.conv1)


@pytest.mark.slow
def test_decorrelation_is_found_by_beta(lab, monkeypatch):
    monkeypatch.setitem(decorrelated.STARTS, "cpu", 2)
    monkeypatch.setitem(decorrelated.TRAINING, "cpu", {"clip": 1.0})
    found = decorrelated.decorrelation(lab)
    assert found.measured[decorrelated.GAIN].n == 2
    assert found.measured[decorrelated.NUMBER] == found.measured["correlation at β of 10"]
    assert list(found.controls) == [decorrelated.NUMBER, decorrelated.GAIN, decorrelated.APART]


def test_points_of_one_layer_are_below_the_line_and_those_of_others_are_not():
    ours, others = (bound.points((3, 4), 0, shared=shared) for shared in (True, False))
    assert bound.below(ours) == 1
    assert bound.below(others) < 1
    assert 0 < bound.reached(ours) < 0.5
    assert ours[0][0] > 100 * ours[-1][0]
    assert bound.below(bound.points((1, 1, 1), 0, shared=True, times=10)) < 0.5


def test_a_patch_is_the_largest_of_all_that_go_around_the_edges():
    image = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    around = np.pad(image[0].numpy(), [(0, 0), (1, 1), (1, 1)], mode="wrap")
    wanted = max(np.linalg.norm(around[:, i : i + 3, j : j + 3]) for i in range(5) for j in range(5))
    assert bound.largest_patch(image) == pytest.approx(wanted)


@pytest.mark.slow
def test_the_bound_is_judged_by_width(lab, monkeypatch):
    monkeypatch.setattr(bound, "POINTS", 20)
    found = bound.bound(lab)
    for name in bound.WIDTHS:
        assert found.measured[f"one layer, {name}: {bound.BELOW}"].value == 1
    assert next(iter(found.measured)) == f"two layers, one channel: {bound.BELOW}"


def test_operations_are_counted_as_by_hand():
    layers = [costs.Layer(inputs=3, channels=8, places=100, kernel=9, atoms=6)]
    forward, covariance = 50 * 100 * 9 * 3 * 8, 50 * 100 * 8 * 8
    wanted = (2 * (forward + covariance) + covariance) / (6 * 9)
    assert costs.saving(layers, "CKA", 2, 50) == pytest.approx(wanted)
    assert costs.saving(layers, "CCA", 2, 50) == pytest.approx(wanted + 3 * 8**3 / 54)
    assert costs.saving(layers, "CKA", 2, 50, "weights") == pytest.approx(wanted * 54 / (9 * 3 * 8))
    again = (20 * (forward + covariance) + 10 * covariance) / 10 / 54
    assert costs.saving(layers, "CKA", 5, 50, passes=2) == pytest.approx(again)


def test_the_forward_passes_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = resnet18()
    layers = costs.sizes(resnet18)
    with FlopCounterMode(depth=9, display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    plain = {name: one for name, one in model.named_modules() if getattr(one, "kernel_size", 0) == (3, 3)}
    wanted = sum(sum(counter.get_flop_counts()[f"ResNet.{name}"].values()) for name in plain)
    assert 2 * sum(one.places * one.kernel * one.inputs * one.channels for one in layers) == wanted


@pytest.mark.slow
def test_costs_are_counted_and_measured(lab, monkeypatch):
    monkeypatch.setitem(costs.REPEATS, "cpu", 2)
    found = costs.cost(lab)
    assert found.measured[costs.MORE].value < found.controls[costs.MORE].value == pytest.approx(1)
    assert found.measured[costs.TIMES.format("CCA")].n == 2
    assert found.measured["seconds of atoms"].value > 0
    assert not any("GPU memory" in name for name in found.measured)
