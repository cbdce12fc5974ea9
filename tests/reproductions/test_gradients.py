"""The claims about features and gradients, on small networks of made-up images: what they measure is what they say."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import SourceError
from netkin.sources.architectures import Bottleneck, ResNet
from netkin.statistics.kernel_pairs import KernelPair
from netkin.statistics.sketches import LayerSketches, SketchSettings, places
from netkin.training import Recipe
from reproductions import claims, laboratory
from reproductions.gradients import block_maps, mean_norms, nets, orderings, other_measures, readings
from reproductions.laboratory import Images, Lab, Network

CLASSES = {"cifar10": 10, "cifar100": 20, "svhn": 10}


def made_up(name, seed):
    """Return 120 and 60 images, each a noisy picture of its class."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[name]
    pictures = torch.randn(classes, 3, 4, 4, generator=generator)
    parts = []
    for count in (120, 60):
        labels = torch.arange(count) % classes
        noise = torch.randn(count, 3, 16, 16, generator=generator)
        parts += [torch.nn.functional.interpolate(pictures[labels], scale_factor=4) + noise, labels]
    return Images(nets.WORDS[name], tuple(map(str, range(classes))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of three made-up sets, with networks of two stages, trained for few steps."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=12, batch=30, lr=0.05, drop_last=True)
        patch.setitem(laboratory.RECIPES, "cpu", {
            "resnet18": Network(lambda: ResNet((2, 2, 2, 2), (2, 2, 4, 4)), recipe),
            "resnet50": Network(lambda: ResNet((1, 1, 2, 1), (2, 2, 2, 2), block=Bottleneck), recipe),
        })  # fmt: skip
        patch.setitem(readings.BUCKETS, "cpu", 32)
        patch.setitem(readings.BATCH, "cpu", 40)
        patch.setitem(readings.NORMED, "cpu", 50)
        patch.setitem(readings.SEEN, "cpu", 8)
        patch.setitem(other_measures.FEW, "cpu", 8)
        patch.setitem(other_measures.TOO_FEW, "cpu", 4)
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(nets.SETS)}
        yield lab


@pytest.fixture(scope="module")
def kept(lab):
    return readings.read_all(lab, nets.names(lab, "trained"))


# --- what is read of a network ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_network_is_trained_and_read_once(lab, kept, monkeypatch):
    monkeypatch.setattr(nets, "train_many", None)
    again = readings.read_all(lab, nets.names(lab, "trained"))
    assert all(torch.equal(one["whole/psi"], other["whole/psi"]) for one, other in zip(kept, again, strict=True))
    assert not any("weight" in key for key in again[0])


def test_a_file_is_another_for_other_steps(lab, monkeypatch):
    old = readings.place(lab, "deep/svhn/0")
    monkeypatch.setitem(nets.KINDS, "deep", replace(nets.KINDS["deep"], steps=0.25))
    assert readings.place(lab, "deep/svhn/0") != old


@pytest.mark.slow
def test_sketched_kernels_are_those_of_signed_sums_of_flattened_maps(lab, kept):
    """A slow sum over examples, from hooks and a loss of our own."""
    model = retrained(lab, "trained/svhn/1")
    F, G = features_and_gradients(model, nets.images(lab, "trained/svhn/1").test_images, "layer2.0")
    for label, seed, part in (("whole", 0, slice(None)), ("first", 101, slice(0, None, 2)), ("other", 1, slice(None))):
        numbers = readings.numbers_of("trained/svhn/1", "test", 0, 60)
        buckets, signs = places(SketchSettings(32, 1, seed), numbers)
        S = np.zeros((32, 60))
        for example in range(60)[part]:
            S[buckets[0, example], example] += signs[0, example]
        for kernel, rows in (("features", F), ("gradients", G)):
            K = S @ rows @ rows.T @ S.T
            found = kept[7][f"{label}/{kernel}"][3].numpy()
            np.testing.assert_allclose(found, K / K.diagonal().mean(), atol=1e-5)


def retrained(lab, name):
    """Return the network of that name, trained anew beside the others of its set."""
    beside = [f"{name.rpartition('/')[0]}/{seed}" for seed in range(3)]
    return next(model for one, model, _ in nets.trained(lab, beside) if one == name)


def features_and_gradients(model, images, layer):
    kept = []
    module = model.get_submodule(layer)
    with torch.enable_grad():
        handle = module.register_forward_hook(lambda _, __, output: kept.append(output.requires_grad_()))
        logits = model(images)
        handle.remove()
        p = logits.softmax(1)
        q = (p**0.5 / (p**0.5).sum(1, keepdim=True)).detach()
        (gradient,) = torch.autograd.grad(-(q * p.log()).sum(), kept[0])
    return (one.detach().flatten(1).double().numpy() for one in (kept[0], gradient))


@pytest.mark.slow
def test_the_last_block_is_the_pooled_output(lab):
    model = retrained(lab, "trained/cifar10/0")
    inputs = nets.images(lab, "trained/cifar10/0").test_images[:8]
    fed = next(readings.rows(lab, model, inputs))
    asked = []
    handle = model.fc.register_forward_pre_hook(lambda _, given: asked.append(given[0]))
    p = model(inputs).softmax(1)
    handle.remove()
    q = p**0.5 / (p**0.5).sum(1, keepdim=True)
    torch.testing.assert_close(fed["activations"][readings.POOLED], asked[0])
    torch.testing.assert_close(fed["gradients"][readings.POOLED], (p - q) @ model.fc.weight, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_norms_are_those_of_the_mean_embedding(lab, kept):
    model = retrained(lab, "trained/cifar10/2")
    inputs = nets.images(lab, "trained/svhn/0").test_images[:50]
    F, G = features_and_gradients(model, inputs, "layer4.1")
    psi = np.einsum("na,nb->nab", G, F).reshape(50, -1)
    wanted = [np.linalg.norm(psi.mean(0)), np.linalg.norm(psi @ psi.T) / 50**2, np.sqrt((psi**2).sum()) / 50]
    np.testing.assert_allclose(kept[2]["norms"][nets.SETS.index("svhn"), 8], wanted, rtol=1e-3)


def test_labels_are_shuffled_by_the_seed_and_cifar100_is_cut_to_ten_classes(lab):
    inputs, labels = torch.arange(50.0), torch.arange(50)
    same, shuffled = nets._shuffled(inputs, labels, "shuffled/svhn/1")
    assert torch.equal(same, inputs)
    assert not torch.equal(shuffled, labels)
    assert torch.equal(shuffled.sort().values, labels)
    assert not torch.equal(shuffled, nets._shuffled(inputs, labels, "shuffled/svhn/2")[1])
    cut = nets.images(lab, "cut/cifar100/0")
    assert cut.train_labels.unique().tolist() == list(range(10))
    assert nets.fresh(lab, "cut/cifar100/0").fc.out_features == 10
    assert nets.fresh(lab, "trained/cifar100/0").fc.out_features == 20


def test_networks_before_training_take_the_statistics_of_their_own_set(lab):
    name = "untrained/svhn/0"
    model, inputs = nets.fresh(lab, name), nets.images(lab, name).train_images
    nets.settle(model, inputs)
    torch.testing.assert_close(
        model.bn1.running_mean, model.conv1(inputs).mean((0, 2, 3)).detach(), atol=1e-5, rtol=1e-4
    )


# --- similarities and orderings ---------------------------------------------------------------------------------------


@pytest.fixture
def stacks():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 2, 16, 20, generator=generator, dtype=torch.float64)
    rows[:, 1] = rows[:, 1, :, :3] @ torch.randn(3, 20, generator=generator, dtype=torch.float64)  # of rank 3
    return rows @ rows.mT


@pytest.mark.slow
def test_all_pairs_at_once_are_the_measures_of_netkin(lab, kept):
    features, gradients = (orderings.kernels(kept[:2], "whole", part) for part in readings.BOTH)
    side = [SimpleNamespace(kernel=lambda kind, centring, i=i: about_means(features[i, 4] * gradients[i, 4]), name="")
            for i in (0, 1)]  # fmt: skip
    wanted = KernelPair.alignment(SimpleNamespace(x=side[0], y=side[1], _size=KernelPair._size), "hadamard", "buckets")
    both = orderings.kernels(kept[:2], "whole", "hadamard")
    assert orderings.cka(both, both)[4, 0, 1] == pytest.approx(wanted.item(), rel=1e-10)


def about_means(K):
    H = torch.eye(len(K), dtype=K.dtype) - 1 / len(K)
    return H @ K @ H


def test_similarities_of_all_pairs_are_those_of_single_ones(stacks):
    ours, theirs = orderings.cka(stacks, stacks), orderings.nbs(stacks, stacks)
    K, L = (about_means(stacks[i, 0]) for i in (2, 5))
    assert ours[0, 2, 5] == pytest.approx(((K * L).sum() / K.norm() / L.norm()).item(), rel=1e-12)
    assert orderings.cka_of_blocks(stacks, stacks)[2, 0, 5, 1] == pytest.approx(
        torch.nn.functional.cosine_similarity(K.flatten(), about_means(stacks[5, 1]).flatten(), 0).item(), rel=1e-12
    )
    for block in (0, 1):
        K, L = (stacks[i, block].numpy() for i in (2, 5))
        roots = np.sqrt(np.linalg.eigvals(K @ L).real.clip(0)).sum()
        assert theirs[block, 2, 5] == pytest.approx(roots / np.sqrt(np.trace(K) * np.trace(L)), abs=1e-4)
        assert theirs[block, 2, 2] == pytest.approx(1, abs=1e-4)


def test_sums_of_singular_values_by_polar_factors(stacks):
    for matrices in (stacks[:, 0], stacks[:, 1], stacks[:, 0] * torch.logspace(0, -12, 16, dtype=torch.float64)):
        torch.testing.assert_close(
            orderings.polar_sums(matrices), torch.linalg.svdvals(matrices).sum(-1), rtol=1e-5, atol=0
        )


def test_a_sketch_with_fewer_buckets_is_the_folded_one():
    rows = torch.randn(300, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernels = {}
    for buckets in (64, 16):
        sketches = LayerSketches(["a"], SketchSettings(buckets, 1, 5, ("features",)))
        sketches.update({"activations": {"a": rows}}, 1000 + np.arange(300))
        side = sketches.side("a")
        kernels[buckets] = side.kernel("features") * (rows.square().sum() / side.kernel("features").trace())
    wide = kernels[64] * (kernels[16].trace() / orderings.folded(kernels[64], 16).trace())
    torch.testing.assert_close(orderings.folded(wide, 16), kernels[16])


def test_noise_keeps_spectra_and_forgets_directions(stacks):
    made = orderings.noise(stacks, [0, 0, 0, 1, 1, 1, 2, 2, 2], 1)
    torch.testing.assert_close(torch.linalg.eigvalsh(made), torch.linalg.eigvalsh(stacks), atol=1e-9, rtol=1e-9)
    commute = made[0, 0] @ made[1, 0] - made[1, 0] @ made[0, 0]
    assert commute.norm() < 1e-8 * made[0, 0].norm() ** 2  # networks of one set share their directions
    assert (made[0, 0] @ made[3, 0] - made[3, 0] @ made[0, 0]).norm() > 1e-2 * made[0, 0].norm() ** 2


def test_shares_count_the_orderings_that_the_paper_calls_right():
    """A loop over all orderings of section 5.1."""
    table = np.random.default_rng(0).normal(size=(2, 9, 9))
    table = table + table.transpose(0, 2, 1)
    sets = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    kind = [i // 3 for i in range(9)]
    for block in (0, 1):
        S, right = table[block], {1: [], 2: [], 3: []}
        for i, j, k in itertools.permutations(range(9), 3):
            if kind[i] == kind[j] != kind[k]:
                right[1].append(S[i, j] > S[i, k])
            if (kind[i], kind[j], kind[k]) == (0, 1, 2):
                right[2] += [S[i, j] > S[i, k], S[i, j] > S[j, k]]
                right[3].append(S[i, k] > S[j, k])
        found = orderings.shares(table, sets)[:, block]
        assert found == pytest.approx([np.mean(right[d]) for d in (1, 2, 3)])


def test_perfect_similarities_have_all_orderings_right_and_reversed_ones_none():
    closeness = np.array([[9, 5, 3], [5, 9, 1], [3, 1, 9.0]])
    table = np.kron(closeness, np.ones((3, 3)))[None]
    sets = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert orderings.shares(table, sets).tolist() == [[1], [1], [1]]
    assert orderings.shares(-table, sets).tolist() == [[0], [0], [0]]


def test_errors_are_over_networks_and_not_over_pairs():
    values = np.array([[1.0, 2.0, 4.0], [0.0, 5.0, 1.0], [3.0, 3.0, 3.0]])
    sets = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    found = orderings.jackknifed(lambda some: sum(values.ravel()[own].mean() for own in some), sets)
    assert found.value == pytest.approx(values.mean(1).sum())
    assert found.error == pytest.approx(np.sqrt(values.var(1, ddof=1).sum() / 3))
    assert found.n == 3


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(lab):
    return {one.id: one.measure(lab) for one in claims.named("gradients") if one.measure.__module__ in OURS}


OURS = {f"reproductions.gradients.{name}" for name in ("desiderata", "block_maps", "mean_norms", "other_measures")}


@pytest.mark.slow
def test_every_claim_measures_what_it_promises(found):
    assert len(found) == 6
    for statement in claims.named("gradients"):
        if statement.id in found:
            assert next(iter(statement.expected)) in found[statement.id].controls
            assert statement.expected.keys() <= found[statement.id].measured.keys()


@pytest.mark.slow
def test_shared_buckets_make_networks_of_one_set_alike(lab, kept, found):
    """The same by single calls: with one sketch of the set, and with disjoint halves."""
    curve = found["gradients/desiderata"].curves["Share of right orderings by CKA of features and gradients"]
    shared = dict(zip(curve["case"], curve["desideratum 1"], strict=True))
    assert shared["noise of the same spectra"] == 1
    assert shared["as in the paper: shared buckets"] > shared["independent buckets"] + 0.2
    first = orderings.kernels(kept, "first", "hadamard")[1, 4]
    second = orderings.kernels(kept, "second", "hadamard")[5, 4]
    turned = [orderings.kernels(kept, "second", "hadamard")[1, 4], orderings.kernels(kept, "first", "hadamard")[5, 4]]
    pairs = [(about_means(a), about_means(b)) for a, b in ((first, second), turned)]
    wanted = np.mean([((a * b).sum() / a.norm() / b.norm()).item() for a, b in pairs])
    assert orderings.on_halves(kept, "hadamard", orderings.cka)[4, 1, 5] == pytest.approx(wanted)


@pytest.mark.slow
def test_task2vec_and_fisher_rao_tables_are_those_of_netkin(lab, kept, found):
    models = [retrained(lab, f"trained/{name}/1") for name in ("cifar10", "svhn")]
    inputs = [nets.images(lab, f"trained/{name}/1").test_images for name in ("cifar10", "svhn")]
    a, b = (nk.task2vec(model, given[:8], samples=1, progress=False)
            for model, given in zip(models, inputs, strict=True))  # fmt: skip
    wanted = nk.task2vec_cosine(a, b, independent=True)
    assert other_measures.task2vec_similarity(kept)[0, 1, 7] == pytest.approx(wanted, rel=1e-5)
    norms = [nk.fisher_rao_norm(model, given, progress=False) for model, given in zip(models, inputs, strict=True)]
    table = other_measures.fisher_rao_similarity(kept)
    assert table[0, 1, 7] == pytest.approx(-abs(norms[0] - norms[1]) / np.sqrt(norms[0] * norms[1]), rel=1e-4)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_networks_of_both_depths_see_as_many_images(scale):
    shallow, deep = (nets.recipe(Lab(scale, device="cpu"), f"{kind}/svhn/0") for kind in ("trained", "deep"))
    assert deep.steps * deep.batch == shallow.steps * shallow.batch
    assert deep.lr / deep.batch == pytest.approx(shallow.lr / shallow.batch)
    assert deep.warmup * deep.batch == shallow.warmup * shallow.batch


def test_depths_meet_at_the_ends_of_their_stages(lab):
    assert mean_norms.common(lab, "trained") == [0, 2, 4, 6, 8, 9]
    assert mean_norms.common(lab, "deep") == [0, 1, 2, 4, 5, 6]


def test_orderings_of_norms_are_counted_by_source_and_target():
    table = np.array([[1, 2, 3], [2, 1, 3], [2, 2, 1.0]])[..., None]  # sources × targets, one block
    assert mean_norms._own_share(table, np.less) == 1
    assert mean_norms._own_share(table, np.greater) == 0
    assert mean_norms._digits_share(table) == 1
    assert mean_norms._digits_share(-table) == 0
    assert mean_norms._digits_highest(table) == pytest.approx(4 / 6)


def test_a_drop_is_held_against_those_that_the_paper_does_not_name():
    drops = np.array([[0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.7, 0.1]])
    assert block_maps._jumps(drops, 3) == pytest.approx([0.4])
    assert block_maps._jumps(drops, 8) == pytest.approx([0.6])
    assert block_maps._jumps(drops, 2) == pytest.approx([0.0])


def test_last_blocks_of_svhn_are_held_against_those_of_natural_images():
    maps = np.full((9, 10, 9, 10), 0.5)
    sets = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    maps[6:, 8:, :6, 8:] = 0.1
    maps[:6, 8:, 6:, 8:] = 0.1
    assert block_maps._unlike(maps, sets) == pytest.approx(-0.4)
    maps[3:6, :, :3, :7] = maps[3:6, :, 6:, :7] = 0.8
    assert block_maps._early_late(maps, sets) == pytest.approx(0.3 + 0.4 * 2 / 3 * 0.2 * 0.5)
    assert block_maps._early_more(maps, sets) == pytest.approx(0.3)


def test_the_gpu_scale_needs_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    with pytest.raises(SourceError, match="this claim reads CIFAR-10; pass --data DIR or set NETKIN_DATA"):
        mean_norms.factors(Lab("cpu", cache=tmp_path))
