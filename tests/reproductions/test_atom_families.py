"""The claims about probing data, starts and layers of atoms: what they measure is what they say, on made-up images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from netkin.representations.filters import atom_layers
from netkin.sources.architectures import alexnet, vgg11
from netkin.training import Recipe
from reproductions import laboratory
from reproductions.laboratory import Images, Lab, Network
from reproductions.subspaces import atom_dynamics, families, nets, probing

CLASSES = {"cifar10": 10, "cifar100": 100, "svhn": 10, "mnist": 10}


def made_up(name, seed):
    """Return 200 and 100 images, each a noisy picture of its class."""
    draw, parts = torch.Generator().manual_seed(seed), []
    pictures = torch.randn(CLASSES[name], 3, 4, 4, generator=draw)
    for count in (200, 100):
        labels = torch.arange(count) % CLASSES[name]
        noise = torch.randn(count, 3, 32, 32, generator=draw)
        parts += [nn.functional.interpolate(pictures[labels], scale_factor=8) + noise, labels]
    return Images(name, tuple(map(str, range(CLASSES[name]))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory of four made-up sets, with narrow networks that are trained for few steps."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = Recipe(steps=6, batch=10, lr=0.01, drop_last=True)
        patch.setitem(laboratory.RECIPES, "cpu", {
            "alexnet-atoms": Network(lambda: alexnet(width=2), recipe),
            "vgg11-atoms": Network(lambda: vgg11(width=2), recipe),
        })  # fmt: skip
        patch.setitem(families.TRAINING, "cpu", {"steps": 4})
        patch.setitem(families.PROBED, "cpu", 30)
        patch.setitem(families.STARTS, "cpu", 2)
        patch.setitem(atom_dynamics.SEEDS, "cpu", 2)
        patch.setitem(atom_dynamics.TRAINING, "cpu", {"epochs": 3, "batch": 100, "lr": 0.01})
        patch.setitem(atom_dynamics.PAIRS, "cpu", 2)
        patch.setitem(atom_dynamics.TASK_TRAINING, "cpu", {"steps": 10, "batch": 10})
        lab = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        lab.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(CLASSES)}
        yield lab


@pytest.fixture(scope="module")
def found(lab):
    return families.families(lab)


def cosine(a, b):
    a, b = (np.asarray(one, dtype=float).ravel() for one in (a, b))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


# --- families ---------------------------------------------------------------------------------------------------------


def test_members_share_coefficients_and_start_but_for_a_redrawn_one(lab):
    begin = dict(atom_layers(nets.start(lab, "vgg11", 1)))
    for name in families.MEMBERS:
        for layer, one in atom_layers(families.beginning(lab, name, 1)):
            assert torch.equal(one.coefficients, begin[layer].coefficients)
            assert torch.equal(one.atoms, begin[layer].atoms) == (name != "redrawn/0")
            assert one.atoms.norm().item() == pytest.approx(begin[layer].atoms.norm().item(), rel=1e-5)


@pytest.mark.slow
def test_each_member_has_images_labels_and_an_order_of_its_own(lab, found):
    sets = {name: families.images(lab, name, 0) for name in families.MEMBERS}
    assert [len(sets[name].classes) for name in ("cifar100/0", "cifar10/1", "svhn/0")] == [100, 10, 10]
    first, second = (sets[f"shuffled/{k}"].train_labels for k in (0, 1))
    true = sets["cifar100/0"].train_labels
    assert not torch.equal(first, true)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, true.sort().values)
    a, b = (found[0].atoms[f"cifar100/{k}"]["conv1"] for k in (0, 1))
    assert not torch.equal(a, b)


@pytest.mark.slow
def test_a_family_is_trained_once_and_kept_as_atoms_alone(lab, found, monkeypatch):
    monkeypatch.setattr(families, "train_all", None)
    again = families.families(lab)
    assert [one.probed for one in again] == [one.probed for one in found]
    assert set(again[0].atoms) == {*families.MEMBERS, "start", "fresh"}
    sizes = [path.stat().st_size for path in lab.cache.glob("subspaces-family-*")]
    assert len(sizes) == 2
    assert max(sizes) < 11 * 8 * 81 * 4 + 40_000  # eleven networks of eight layers of 81 numbers, and words


def test_a_family_of_another_training_has_another_file(lab, monkeypatch):
    old = families.place(lab, 0)
    words = lab.images_of("mnist")
    monkeypatch.setitem(lab._sets, "mnist", Images("other", *list(vars(words).values())[1:]))
    assert families.place(lab, 0) != old != families.place(lab, 1)


@pytest.mark.slow
def test_similarities_are_mean_cosines_over_members_and_layers(found):
    one = found[1]
    pairs = [(f"cifar100/{i}", f"svhn/{j}") for i in (0, 1) for j in (0, 1)]
    expected = [
        np.mean([cosine(one.atoms[a][layer], one.atoms[b][layer]) for a, b in pairs]) for layer in one.atoms["start"]
    ]
    assert one.by_layer("cifar100", "svhn") == pytest.approx(expected)
    assert one.similarity("cifar100", "svhn") == pytest.approx(np.mean(expected))
    within = [cosine(own, one.atoms["svhn/1"][layer]) for layer, own in one.atoms["svhn/0"].items()]
    assert one.similarity("svhn", "svhn") == pytest.approx(np.mean(within))


@pytest.mark.slow
def test_probed_values_are_cca_and_cka_of_the_places_of_maps(lab):
    models = {
        name: nets.start(lab, "vgg11", seed).eval() for seed, name in enumerate([*families.MEMBERS, "start", "fresh"])
    }
    table = families.probed(lab, models)
    for probe, pixels in families.probes(lab).items():
        for pair, layer in (("SVHN", 4), ("untrained", 6)):
            X, Y = (places(models[name], f"conv{layer + 1}", pixels) for name in families.PAIRS[pair])
            U, V = (np.linalg.svd(Z, full_matrices=False)[0] for Z in (X, Y))
            U, V = U[:, : np.linalg.matrix_rank(X)], V[:, : np.linalg.matrix_rank(Y)]
            rho = np.linalg.svd(U.T @ V, compute_uv=False)
            cca = np.sqrt((rho**2).sum() / min(U.shape[1], V.shape[1]))  # Eq. 1
            K, L = X @ X.T, Y @ Y.T
            cka = (K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum())  # Eq. 2, of centred rows
            assert table[probe][pair]["cca_rms"][layer] == pytest.approx(cca, abs=1e-4)
            assert table[probe][pair]["cka"][layer] == pytest.approx(cka, abs=1e-4)


def places(model, layer, pixels):
    kept = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, __, output: kept.append(output))
    with torch.no_grad():
        model(pixels)
    handle.remove()
    rows = kept[0].movedim(1, -1).flatten(0, -2).double().numpy()
    return rows - rows.mean(0)


def test_a_walk_goes_as_far_as_training_in_each_layer_and_elsewhere():
    draw = torch.Generator().manual_seed(3)
    states = [{"a": torch.randn(9, 3, 3, generator=draw), "b": torch.randn(9, 3, 3, generator=draw)} for _ in range(3)]
    walk, other = families.wandered(states, 0), families.wandered(states, 1)
    assert torch.equal(walk[0]["a"], states[0]["a"])
    for k in (0, 1):
        for name in "ab":
            far, own = ((some[k + 1][name] - some[k][name]).norm() for some in (states, walk))
            assert own == pytest.approx(far.item(), rel=1e-5)
    assert abs(cosine(walk[2]["a"] - walk[1]["a"], other[2]["a"] - other[1]["a"])) < 0.5


def test_a_walk_does_not_begin_along_the_atoms_of_a_start_with_its_seed(lab):
    begin, end = (nets.atoms_of(nets.start(lab, "vgg11", seed)) for seed in (3, 4))
    walk = families.wandered([begin, end], 3)[-1]
    assert all(abs(cosine(walk[layer] - own, own)) < 0.4 for layer, own in begin.items())


# --- probing data -----------------------------------------------------------------------------------------------------


def family(within=0.95, other=0.5, to_start=0.7, own=0.8, rest=0.6, untrained=0.0):
    """Return a made-up family with given atom similarities; `rest` is CCA and CKA with the other probes."""
    angle = {"cifar100": within, "cifar10": within, "svhn": other, "shuffled": other, "redrawn": 0.0}
    atoms, place = {"start": [1.0] + [0.0] * 30, "fresh": [0.0, 1.0] + [0.0] * 29}, 2
    common = np.eye(31)[2]
    for name in families.MEMBERS:
        place += 1
        kind = name.partition("/")[0]
        shared = np.sqrt(max(angle[kind] - to_start**2, 0))  # what the networks of a kind have in common
        direction = common if kind in ("cifar100", "cifar10") else np.eye(31)[place + 10]
        vector = to_start * np.eye(31)[0] + shared * direction
        vector = vector + np.sqrt(max(1 - vector @ vector, 0)) * np.eye(31)[place]
        atoms[name] = np.eye(31)[1] if kind == "redrawn" else vector
    as_atoms = {name: {"conv1": torch.tensor(np.array(one)).reshape(1, 1, 31)} for name, one in atoms.items()}
    levels = {"untrained": (0.6 + untrained, 0.6)}
    probed = {
        probe: {
            pair: {m: [levels.get(pair, (own, rest))[probe != "cifar100"]] for m in ("cca_rms", "cka")}
            for pair in families.PAIRS
        }
        for probe in families.PROBES
    }
    return families.Family(as_atoms, probed, dict.fromkeys(families.MEMBERS, 0.5))


@pytest.mark.parametrize(
    "changes, verdict",
    [
        ({}, "holds"),
        ({"untrained": 0.4}, "holds in part"),  # untrained networks drop more
        ({"own": 0.5}, "holds in part"),
        ({"to_start": 0.97, "within": 0.95}, "holds in part"),  # nearer to the start than to each other
        ({"own": 0.5, "to_start": 0.97}, "does not hold"),
    ],
)
def test_the_verdict_about_probes_follows_from_drops_and_from_the_controls_of_atoms(lab, monkeypatch, changes, verdict):
    some = [family(**changes, rest=0.6 + 0.001 * k) for k in range(3)]
    monkeypatch.setattr(probing, "families", lambda _: some)
    finding = probing.probing_data(lab)
    assert finding.verdict == verdict
    if not changes:
        assert finding.measured["CCA with CIFAR-100 minus other probes"].value == pytest.approx(0.199)
        assert finding.measured[probing.ATOMS].value == pytest.approx(0.95)
        assert finding.controls[probing.ATOMS].value == pytest.approx(0.49)
        assert finding.controls["atom similarity of one of CIFAR-100 and the start"].value == pytest.approx(0.7)


@pytest.mark.parametrize("to_start, verdict", [(0.7, "holds"), (0.985, "does not hold")])
def test_the_verdict_about_data_sets_follows_from_both_kinds_of_untrained_networks(lab, monkeypatch, to_start, verdict):
    some = [family(to_start=to_start - 0.002 * k, within=0.96) for k in range(4)]
    monkeypatch.setattr(probing, "families", lambda _: some)
    finding = probing.across_data_sets(lab)
    assert finding.verdict == verdict
    assert finding.measured[probing.UNTRAINED].value == pytest.approx(0, abs=1e-6)
    walks = [1 / (3 - 2 * (to_start - 0.002 * k)) for k in range(4)]  # steps of that length at right angles
    assert finding.controls[probing.ACROSS].value == pytest.approx(np.mean(walks), abs=0.1)


@pytest.mark.slow
def test_both_claims_about_families_measure_a_control_for_every_number_they_decide_by(lab, found):
    for claim in (probing.probing_data, probing.across_data_sets):
        finding = claim(lab)
        assert set(probing.DROPS.values()) <= set(finding.controls) or probing.ACROSS in finding.controls
        assert "2 starts" in finding.note
        assert finding.seeds == range(2)


# --- the regression of Fig. 10b ---------------------------------------------------------------------------------------


def test_a_fitted_network_has_the_least_squares_slope_and_the_weights_of_x_it_began_with():
    begin, model = (probing._network(3, relu=False).double() for _ in range(2))
    inputs, targets = probing._examples(0, 1_000)
    probing.training.train(
        model, (inputs, targets), probing.FITTING.but(steps=400), loss=nn.functional.mse_loss, progress=False
    )
    y, z = inputs[:, 0, 0, 1].numpy(), targets[:, 0].numpy()
    slope = model(torch.tensor([[[[0.0, 1.0]]]], dtype=torch.float64)).item()
    assert slope == pytest.approx((y @ z) / (y @ y), rel=0.02)
    assert torch.equal(model[0].atoms[..., 0], begin[0].atoms[..., 0])
    assert not torch.equal(model[0].atoms[..., 1], begin[0].atoms[..., 1])
    assert torch.equal(model[0].coefficients, begin[0].coefficients)


@pytest.mark.slow
def test_orthogonal_probes_leave_cca_and_cka_at_one(lab, monkeypatch):
    monkeypatch.setattr(probing, "TRIALS", 3)
    finding = probing.orthogonal_probes(lab)
    assert finding.verdict == "holds in part"
    for name in ("CCA", "CKA"):
        assert finding.measured[f"{name} with orthogonal probes"].value == pytest.approx(1)
        assert finding.controls[f"{name} with the training data"].value == pytest.approx(1)
    assert finding.measured[probing.SIMILAR].value > 0.999
    assert finding.controls[probing.SIMILAR].value < 0.9
    assert finding.measured[probing.BLIND].value == 1


# --- layers in training -----------------------------------------------------------------------------------------------


def test_a_layer_is_settled_from_where_its_similarity_to_the_end_stays_high():
    table = np.ones((5, 5))
    table[:, -1] = [0.5, 0.995, 0.98, 0.9995, 1.0]
    assert atom_dynamics.settled(table, 0.99) == 3 / 4  # it fell below once more after the first epoch
    assert atom_dynamics.settled(table, 0.999) == 3 / 4
    assert atom_dynamics.settled(table, 0.4) == 0
    table[:, -1] = [0.5, 0.5, 0.5, 0.9, 1.0]
    assert atom_dynamics.settled(table, 0.99) == 1


def test_all_epochs_are_compared_with_each_other_by_layer(lab):
    (one,) = atom_dynamics.followed(lab, [1])
    states = {0: nets.atoms_of(nets.start(lab, "vgg11", 1))}
    model = nets.start(lab, "vgg11", 1)
    nets.train_all(
        lab, "vgg11", [model], [lab.images_of("cifar10").train], seeds=[1], steps=None, epochs=3, batch=100,
        callback=lambda _, model, step: states.__setitem__(step, nets.atoms_of(model)), callback_steps=[2, 4, 6],
    )  # fmt: skip
    for k, layer in enumerate(states[0]):
        for i, j in ((0, 3), (1, 2), (2, 3)):
            assert one["trained"][k][i][j] == pytest.approx(
                cosine(states[2 * i][layer], states[2 * j][layer]), abs=1e-6
            )
    assert one["random walk"][0][0][0] == pytest.approx(1)
    assert one["random walk"] != one["trained"]


def settling(*epochs, count=10):
    """Return a run whose layers are settled after the given numbers of epochs."""
    run = np.ones((len(epochs), count + 1, count + 1))
    for own, epoch in zip(run, epochs, strict=True):
        own[:epoch, -1] = 0.5
    return run.tolist()


@pytest.mark.parametrize(
    "learned, walk, verdict",
    [
        ((2, 4, 6, 8), (7, 7, 7, 7), "holds"),
        ((2, 4, 6, 8), (1, 4, 7, 9), "does not hold"),  # the walk is as much from the bottom up
        ((8, 6, 4, 2), (7, 7, 7, 7), "does not hold"),
        ((4, 8, 6, 5), (7, 7, 7, 7), "undecided"),
    ],
)
def test_the_verdict_about_settling_compares_with_the_walk(lab, monkeypatch, learned, walk, verdict):
    def followed(lab, seeds):
        (seed,) = seeds
        early = (learned[0] - (seed == 1), *learned[1:])
        swapped = early if verdict != "undecided" or seed else (5, 4, 6, 8)
        return [{"trained": settling(*swapped), "random walk": settling(*walk), "accuracy": 0.5}]

    monkeypatch.setattr(atom_dynamics, "followed", followed)
    monkeypatch.setitem(atom_dynamics.SEEDS, "cpu", 3)
    finding = atom_dynamics.bottom_up(lab)
    assert finding.verdict == verdict
    assert finding.controls[atom_dynamics.FIRST].value == pytest.approx(walk[0] / 10)


@pytest.mark.slow
def test_two_tasks_are_compared_layer_by_layer_with_one_task_twice(lab):
    (one,) = atom_dynamics.parted(lab, ["alexnet", 1])
    tables = {way: np.array(one[way]) for way in ("two tasks", "one task twice", "random walk", "a task and the start")}
    assert {table.shape for table in tables.values()} == {(11, 5)}
    assert all(np.abs(table[0]).max() < 1e-12 for table in tables.values())
    every, begin = nets.tasks(lab), nets.start(lab, "alexnet", 1)
    models = nets.copies(begin, 3)
    sets = [every[k].train for k in (2, 3, 2)]
    nets.train_all(lab, "alexnet", models, sets, seeds=[10, 11, 12], steps=10, batch=10, lr=0.03)
    first, other, again = (nets.atoms_of(model) for model in models)
    start = nets.atoms_of(begin)
    for way, a, b in (
        ("two tasks", first, other),
        ("one task twice", first, again),
        ("a task and the start", first, start),
    ):
        assert tables[way][-1] == pytest.approx([1 - cosine(a[layer], b[layer]) for layer in start], abs=1e-6)


def test_groups_of_layers_are_quarters_and_what_lies_between_in_units_of_the_mean():
    found = atom_dynamics._contrasts(np.array([1.0, 3, 4, 4, 4, 4, 2, 2]))  # mean 3: first 2, middle 4, last 2
    assert found[atom_dynamics.LEAST] == pytest.approx((20 / 6 - 2) / 3)
    assert found[atom_dynamics.MOST] == found[atom_dynamics.MIDDLE] == pytest.approx(2 / 3)
    found = atom_dynamics._contrasts(np.array([1.0, 2, 3, 4, 5]))  # AlexNet: 1, 2 to 4, and 5
    assert found[atom_dynamics.MOST] == pytest.approx((3 - 5) / 3)
    assert found["mean difference"] == 3


@pytest.mark.parametrize(
    "two, one, verdict",
    [
        ([1, 3, 4, 3, 2], [2, 2, 2, 2, 2], "holds"),
        ([1, 3, 4, 3, 2], [2, 6, 8, 6, 4], "undecided"),  # the same by noise alone
        ([1, 3, 4, 3, 2], [1, 9, 12, 9, 2], "does not hold"),
        ([1, 2, 3, 4, 5], [2, 2, 2, 2, 2], "holds in part"),  # first least, but last most
    ],
)
def test_the_verdict_about_layers_compares_with_one_task_twice(lab, monkeypatch, two, one, verdict):
    def parted(lab, task):
        noise = 1 + 0.001 * task[1] * np.arange(5)
        own = {
            "two tasks": two * noise,
            "one task twice": one / noise,
            "random walk": noise,
            "a task and the start": noise,
        }
        return [{way: [values.tolist()] * 2 for way, values in own.items()} | {"accuracies": [0.5]}]

    monkeypatch.setattr(atom_dynamics, "parted", parted)
    monkeypatch.setitem(atom_dynamics.PAIRS, "cpu", 3)
    finding = atom_dynamics.two_tasks(lab)
    assert finding.verdict == verdict
    assert finding.measured["AlexNet: mean difference"].value == pytest.approx(np.mean(two), rel=0.01)


@pytest.mark.slow
def test_the_claims_about_layers_run_on_networks(lab):
    for claim, numbers in ((atom_dynamics.bottom_up, 2), (atom_dynamics.two_tasks, 2)):
        finding = claim(lab)
        assert finding.seeds == (0, 1)
        assert all(one.n == numbers for one in finding.measured.values())
        assert set(finding.measured) - {"test accuracy"} <= set(finding.controls)
