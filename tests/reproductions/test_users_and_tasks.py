"""The claims about clients, federations and tasks, on small networks of made-up images: they measure what they say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.representations.filters import atom_layers
from netkin.sources.architectures import alexnet
from netkin.training import Recipe
from reproductions import claims
from reproductions.laboratory import Images, Lab
from reproductions.subspaces import clients, continual, federations

CLASSES = {"cifar10": 10, "cifar100": 20, "svhn": 10}
QUICK = Recipe(epochs=1, batch=4, lr=0.01, momentum=0.9, drop_last=True)


def made_up(name, seed, each=12):
    """Return images of each class, noisy pictures of it; each set has a brightness of its own."""
    generator = torch.Generator().manual_seed(seed)
    pictures, parts = torch.randn(CLASSES[name], 3, 4, 4, generator=generator) + seed, []
    for count in (each, each // 2):
        labels = torch.arange(count * CLASSES[name]) % CLASSES[name]
        noise = 0.5 * torch.randn(len(labels), 3, 32, 32, generator=generator)
        parts += [nn.functional.interpolate(pictures[labels], scale_factor=8) + noise, labels]
    return Images(name, tuple(map(str, range(CLASSES[name]))), *parts)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(clients.WIDTHS, "cpu", (2, 3, 4))
        patch.setitem(clients.SETTINGS, "cpu", clients.Setting(3, 2, 3, (1, 2), QUICK, 2))
        few = federations.SETTINGS["cpu"]
        small = {"clients": 6, "used": {"cifar100": 10, "cifar10": 6}, "rounds": {"cifar100": 2, "cifar10": 2}}
        small |= {"share": 0.5, "recipe": QUICK, "finetune": 1, "public": 20, "pretrain": 1, "probes": 30, "seeds": 2}
        patch.setitem(federations.SETTINGS, "cpu", replace(few, **small, tuning=QUICK.but(epochs=2)))
        patch.setitem(continual.SETTINGS, "cpu", continual.Setting(1, QUICK, QUICK, 4, 40, 2))
        patch.setattr(continual, "TASKS", 4)
        found = Lab("cpu", cache=tmp_path_factory.mktemp("cache"), data=Path("nowhere"))
        found.__dict__["_sets"] = {name: made_up(name, seed) for seed, name in enumerate(CLASSES)}
        yield found


# --- clients ----------------------------------------------------------------------------------------------------------


def test_groups_share_classes_and_no_image(lab):
    found, groups = clients.grouped_clients(lab, 0)
    assert list(groups.values()) == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert {len(labels) for _, labels in found.values()} == {30}
    rows = torch.cat([inputs for inputs, _ in found.values()]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)
    whole = clients.images(lab, "cifar100")
    for name, group in groups.items():
        inputs, labels = found[name]
        if group < 3:
            places = [int((whole.train_images == one).flatten(1).all(1).nonzero()) for one in inputs]
            assert whole.train_labels[places].tolist() == (labels + 5 * group).tolist()


def test_other_seeds_deal_other_images(lab):
    first, second = (clients.grouped_clients(lab, seed)[0]["0"][0] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_clients_are_shortened_in_turn(lab):
    found, groups = clients.grouped_clients(lab, 0)
    fewer, levels = clients.shortened(found, groups, 0)
    assert list(levels.values()) == [0, 1, 0, 1, 0, 1, 0, 1, 2]
    assert [len(labels) for _, labels in fewer.values()] == [30, 24, 30, 24, 30, 24, 30, 24, 18]
    inside = (found["1"][0][:, None] == fewer["1"][0][None]).flatten(2).all(2)
    assert inside.any(0).all()


def test_filters_begin_at_the_scale_of_he(lab, monkeypatch):
    monkeypatch.setitem(clients.WIDTHS, "cpu", (64, 64, 64))
    made = clients.network("cpu", 10, 0)
    _, layer = list(atom_layers(made))[-1]
    assert float(layer.weight.detach().var() * 64 * 9) == pytest.approx(2, rel=0.3)
    assert made(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


@pytest.fixture(scope="module")
def trained(lab):
    data, _ = clients.grouped_clients(lab, 0)
    begin = nk.freeze_except(clients.network("cpu", 10, 0), ["atoms", clients.HEAD])
    return begin, data, clients.trained_clients(begin, data, clients.SETTINGS["cpu"], 0)


@pytest.mark.slow
def test_clients_train_atoms_and_head_by_themselves(trained):
    begin, data, (first, last) = trained
    assert [len(one.rounds) for one in (first, last)] == [1, 2]
    assert last.travels == ()
    assert {last.parts[name] for name in last.personal} == {"atoms", "head"}
    alone = nk.federate(begin, {"4": data["4"]}, "local", coefficients="fixed", rounds=2, recipe=QUICK, progress=False)
    for name, own in alone.state("4").items():
        np.testing.assert_allclose(own, last.state("4")[name], atol=1e-5)


def test_ways_and_filters_are_those_of_slow_sums(trained):
    begin, data, (_, last) = trained
    networks = [dict(atom_layers(last.model(name, begin))) for name in data]
    start = dict(atom_layers(begin))

    def cosine(x, y):
        x, y = (one.detach().double().numpy().ravel() for one in (x, y))
        return sum(x * y) / (sum(x * x) * sum(y * y)) ** 0.5

    expected = [np.mean([cosine(own[n].atoms, start[n].atoms) for n in start]) for own in networks]
    np.testing.assert_allclose(clients.ways(last, begin), expected, atol=1e-9)
    found = nk.user_similarity(last, gauge="orthonormal").table()["0", "5"]
    assert found == pytest.approx(
        np.mean([cosine(networks[0][n].weight, networks[5][n].weight) for n in start]), abs=1e-6
    )


@pytest.mark.slow
def test_the_claim_reads_what_clusters_tell(lab, monkeypatch):
    both = [clients.clustered(lab, seed) for seed in (0, 1)]
    monkeypatch.setattr(lab, "over", lambda work, tasks, keep: both)
    found = clients.user_clusters(lab)
    assert found.measured[clients.GROUPS].value == pytest.approx(np.mean([one["last"][clients.GROUPS] for one in both]))
    assert {clients.GROUPS, clients.UNEQUAL} < found.controls.keys()
    similar = found.curves["Mean similarity of two clients"]
    assert similar["of one group"][-1] > similar["of two groups"][-1]
    assert list(next(iter(found.curves.values()))["epoch"]) == [1, 2]


def reached(**changes):
    good = {clients.GROUPS: 0.9, clients.SETS: 1.0, clients.UNEQUAL: 0.7, clients.BY_STEPS: 0.1, clients.BY_WAY: 0.2}
    good |= {clients.BY_FILTERS: 0.9, clients.BY_HEADS: 0.3} | changes
    stage = {"stages": [0.5, 0.9], "inside": [0.9] * 2, "outside": [0.8] * 2, "chosen": 4, "start": 0.9, "images": 30}
    return [{"last": {key: value + wobble for key, value in good.items()}, **stage} for wobble in (-0.005, 0, 0.005)]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "holds"),
        ({clients.GROUPS: 0.4, clients.BY_WAY: 0.6, clients.SETS: 0.0, clients.UNEQUAL: 0.0}, "does not hold"),
        ({clients.BY_STEPS: 0.8}, "holds in part"),
        ({clients.BY_WAY: 0.95}, "holds in part"),
    ],
)
def test_clusters_hold_where_all_parts_do(lab, changes, verdict, monkeypatch):
    monkeypatch.setattr(lab, "over", lambda work, tasks, keep: reached(**changes))
    monkeypatch.setattr(lab, "seeds", range)
    assert clients.user_clusters(lab).verdict == verdict


# --- federations ------------------------------------------------------------------------------------------------------


def test_measures_of_all_pairs_are_those_of_the_library(trained, lab):
    begin, data, (_, last) = trained
    probes = clients.images(lab, "cifar100").train_images[:60]
    layers = [name for name, _ in atom_layers(begin)]
    models = {name: last.model(name, begin) for name in ("0", "3", "8")}
    for name, measure in federations.MEASURES.items():
        found = federations.by_features(last, begin, probes, measure)
        many = nk.compare_many(models, probes, [name], layers=layers, pairs="corresponding", progress=False)
        for (a, b), comparison in many.items():
            expected = np.diagonal(comparison.table().values).mean()
            assert found[list(data).index(a), list(data).index(b)].item() == pytest.approx(expected, abs=1e-5)


def test_similar_users_by_cca_are_found_on_the_named_probes(trained, lab):
    alike, seconds = federations.similarities(lab, trained[2][-1], trained[0], 0)
    assert [one.measures[0] for one in alike.values()] == ["atom_cosine", "cca_rms", "cka"]
    assert alike["cka"].examples == 30
    assert min(seconds.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("base", ["Ditto", "Pretrain"])
def test_a_base_and_its_ensembles_are_judged(lab, base, monkeypatch):
    asked, plain = [], nk.similar_users_ensemble

    def spy(*given, **options):
        asked.append((options["members"], options["choose"], options["recipe"].epochs))
        return plain(*given, **options)

    monkeypatch.setattr(federations.nk, "similar_users_ensemble", spy, raising=False)
    found = federations.joined(lab, [base, 0])
    assert asked == [(3, "similar", 2)] * 3 + [(3, "random", 2), (3, "dissimilar", 2), (0, "similar", 8)]
    assert all(0 <= one <= 1 for one in found["accuracy"].values())


def accuracies(**changes):
    good = {"base": 0.8, "atoms": 0.85, "cca_rms": 0.852, "cka": 0.849}
    good |= {federations.TUNED: 0.81, federations.DRAWN: 0.82, federations.FAR: 0.815} | changes
    return [{"accuracy": {name: one + wobble * (name != "base") for name, one in good.items()},
             "seconds": dict.fromkeys(federations.TIMES, 0.1)}
            for _ in federations.BASES for wobble in (-0.002, 0.002)]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "holds"), ({federations.DRAWN: 0.9}, "holds in part"), ({"atoms": 0.7}, "does not hold")],
)
def test_ensembles_hold_where_all_parts_do(lab, changes, verdict, monkeypatch):
    monkeypatch.setattr(lab, "over", lambda work, tasks, keep: accuracies(**changes))
    found = federations.user_ensembles(lab)
    assert found.verdict == verdict
    if not changes:
        assert found.measured[f"{federations.GAIN}atoms"].value == pytest.approx(0.05)
        assert found.controls[f"{federations.GAIN}atoms"].value == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("ours", "fixed", "verdict"), [(0.79, 0.5, "holds"), (0.6, 0.5, "does not hold"), (0.79, 0.9, "does not hold")]
)
def test_comparable_is_within_three_points_and_above_the_control(lab, ours, fixed, verdict, monkeypatch):
    values = dict.fromkeys(federations.METHODS, 0.8) | {"Ours": ours, federations.FIXED: fixed}
    monkeypatch.setattr(
        lab, "over", lambda work, tasks, keep: [values[method] + 0.001 * seed for _, method, seed in tasks]
    )
    found = federations.federated_accuracy(lab)
    assert found.verdict == verdict
    key = f"{federations.SINCE}{federations.SET_WORDS['cifar10']}"
    assert found.measured[key].value == pytest.approx(ours - 0.8)
    assert found.controls[key].value == pytest.approx(fixed - 0.8)


@pytest.mark.slow
def test_each_method_federates_in_its_own_way(lab, monkeypatch):
    asked, plain = [], nk.federate

    def spy(*given, **options):
        asked.append((given[2], options["coefficients"]))
        return plain(*given, **options)

    monkeypatch.setattr(federations.nk, "federate", spy, raising=False)
    for method in ("FedRep", "Ours", federations.FIXED):
        assert 0 <= federations.accuracy_of(lab, ["cifar10", method, 0]) <= 1
    assert asked == [("fedrep", None), ("local", "evolving"), ("local", "fixed")]


# --- tasks in a row ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ways_of_learning_are_measured_alike(lab):
    found = {method: continual.learnt(lab, [method, 0]) for method in ("atoms", "ewc", "joint")}
    assert found["atoms"]["BWT"] == 0
    assert "BWT" not in found["joint"]
    own = found["atoms"]["accuracy"]
    assert own["alone"] == pytest.approx(found["atoms"]["ACC"])
    assert {continual.LONGER, continual.DRAWN, continual.FAR, *continual.SIMILARITIES} < own.keys()
    assert found["atoms"]["each task"] < found["ewc"]["each task"]


def test_alexnet_begins_at_the_scale_of_he():
    made = continual.begun(alexnet(width=8))
    assert float(made.get_submodule("conv3").weight.detach().var() * 24 * 9) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "holds"), ({continual.LONGER: 0.9}, "holds in part"), ({"cka": 0.9}, "holds in part")],
)
def test_tasks_hold_where_all_parts_do(lab, changes, verdict, monkeypatch):
    good = {"alone": 0.6, "atom_cosine": 0.65, "cca_rms": 0.651, "cka": 0.649}
    good |= {continual.LONGER: 0.61, continual.DRAWN: 0.62, continual.FAR: 0.6} | changes

    def over(work, tasks, keep):
        own = {"members in common": [2.0, 1.0], "seconds": dict.fromkeys(continual.SIMILARITIES, 0.1)}
        scores = [{name: one + 0.001 * seed * (name != "alone") for name, one in good.items()} for _, seed in tasks]
        return [own | {"ACC": one["alone"], "BWT": -0.1, "accuracy": one} for one in scores]

    monkeypatch.setattr(lab, "over", over)
    found = continual.task_ensembles(lab)
    assert found.verdict == verdict
    assert list(found.curves["Ways of learning tasks in a row"]["way"]) == ["atoms", *continual.BESIDE]


def test_claims_without_data_say_what_they_read(monkeypatch):
    monkeypatch.delenv("NETKIN_DATA", raising=False)
    with pytest.raises(nk.NetkinError, match="reads CIFAR-100; pass --data"):
        clients.grouped_clients(Lab("cpu", data=None), 0)


def test_all_claims_have_a_control_and_are_found():
    ids = {one.id for one in claims.claims("subspaces")}
    wanted = {"user-clusters", "user-ensembles", "federated-accuracy", "task-ensembles"}
    assert {f"subspaces/{name}" for name in wanted} <= ids
    assert all(claims.named(f"subspaces/{name}")[0].control for name in wanted)
