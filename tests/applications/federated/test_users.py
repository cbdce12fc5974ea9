"""How alike clients are, the groups they form, and ensembles of similar ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, silhouette_score
from torch import nn

import netkin as nk
from netkin.applications.federated import (
    adjusted_rand,
    federate,
    similar_users_ensemble,
    split_by_classes,
    user_clusters,
    user_similarity,
)
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from netkin.representations.filters import AtomConv2d
from netkin.results.distances import silhouette
from netkin.training.heads import before_head
from refusals import refusals, refused
from table_worlds import sentences
from worlds import data_parallel


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        AtomConv2d(1, 6, 3, stride=2, padding=1, atoms=4), nn.ReLU(),
        AtomConv2d(6, 8, 3, stride=2, padding=1, atoms=4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    train, test = (
        tuple(map(torch.cat, zip(*nk.load_data(f"digits:{part}", batch_size=5000), strict=True)))
        for part in ("train", "test")
    )
    return split_by_classes(train, 10, 2, test=test, partition="groups")


@pytest.fixture(scope="module")
def federation(digits):
    options = {"coefficients": "fixed", "rounds": 3, "lr": 0.05, "batch": 8, "drop_last": True}
    return federate(network(), digits.train, "local", test=digits.test, **options)


def test_the_similarity_of_clients_is_the_mean_cosine_of_their_atoms(federation):
    found = user_similarity(federation).to_numpy()
    for i in range(10):
        for j in range(10):
            cosines = []
            for layer in ("0.atoms", "2.atoms"):
                u, v = (federation.state(federation.clients[k])[layer].astype(float).ravel() for k in (i, j))
                cosines.append(u @ v / np.sqrt((u @ u) * (v @ v)))
            assert found[i, j] == pytest.approx(np.mean(cosines), abs=1e-12)
    assert np.array_equal(federation.similarity.to_numpy(), found)


def test_angles_are_those_of_the_cosines_and_agree_with_the_similarity_of_networks(federation):
    found = user_similarity(federation, "atom_angular")
    models = {name: federation.model(name, network()) for name in federation.clients}
    other = nk.atom_similarity(models, "atom_angular")
    assert np.allclose(found.to_numpy(), other.to_numpy(), atol=1e-9)
    assert np.allclose(user_similarity(federation).to_numpy(), nk.atom_similarity(models).to_numpy(), atol=1e-12)
    turned = user_similarity(federation, gauge="orthonormal")
    assert np.allclose(turned.to_numpy(), nk.atom_similarity(models, gauge="orthonormal").to_numpy(), atol=1e-12)
    assert turned.measures == ("atom_cosine(gauge=orthonormal)",)
    assert not np.allclose(turned.to_numpy(), user_similarity(federation).to_numpy(), atol=1e-6)
    with refused(UnknownName, "gauge"):
        user_similarity(federation, gauge="free")


def test_any_other_measure_is_the_mean_over_layers_of_pairs_of_networks(federation, digits):
    images = digits.test["0"][0][:20]
    found = user_similarity(federation, "cka", like=network(), data=images)
    pair = [federation.model(name, network()).eval() for name in ("2", "7")]
    single = nk.compare(*pair, images, "cka", pairs="corresponding").table().values
    assert found["2", "7"] == found["7", "2"] == pytest.approx(np.nanmean(np.diag(single)), abs=1e-9)
    assert found.examples == 20
    by_weights = user_similarity(federation, "weight_cosine", like=network())
    assert by_weights.needs_no_data
    with refused(InvalidValue, "like"):
        user_similarity(federation, "cka")


def test_clients_with_the_same_classes_form_the_clusters(federation, digits):
    truth = [digits.classes[name] for name in federation.clients]
    assert adjusted_rand(user_clusters(federation.similarity, 5), truth) == 1
    assert adjusted_rand(user_clusters(federation.similarity), truth) == 1
    control = nk.user_clusters(np.random.default_rng(0).uniform(size=(10, 10)), 5)
    assert adjusted_rand(control, truth) < 0.5


def test_clusters_of_a_distance_are_those_of_the_similarity(federation):
    assert user_clusters(user_similarity(federation, "atom_angular"), 5) == user_clusters(federation.similarity, 5)
    assert user_clusters(federation.similarity, 1) == (0,) * 10
    assert user_clusters(federation.similarity, 10) == tuple(range(10))
    assert user_clusters(np.eye(2)) == (0, 1)


def test_the_index_and_the_silhouette_agree_with_another_library():
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, other = rng.integers(0, 4, 30), rng.integers(0, 3, 30)
        assert adjusted_rand(one.tolist(), other.tolist()) == pytest.approx(adjusted_rand_score(one, other))
        apart = rng.uniform(size=(30, 30))
        apart = (apart + apart.T) / 2
        np.fill_diagonal(apart, 0)
        assert silhouette(apart, one) == pytest.approx(silhouette_score(apart, one, metric="precomputed"))
    assert adjusted_rand([0, 0, 0], [1, 1, 1]) == adjusted_rand([0, 1, 2], [2, 1, 0]) == 1


@pytest.mark.parametrize(("measure", "why"), [
    ("pwcca", "gives each direction a value of its own"),
])  # fmt: skip
def test_measures_that_give_no_number_for_a_pair_of_clients_are_refused(federation, digits, measure, why):
    with pytest.raises(InvalidValue, match=f"'{measure}' {why}, and clients are compared by one number"):
        user_similarity(federation, measure, like=network(), data=digits.test["0"][0])


def test_layers_without_a_value_are_not_counted(digits):
    net = nn.Sequential(network()[0], nn.Flatten(), nn.Linear(96, 4), nn.Linear(4, 10))
    nn.init.zeros_(net[2].weight).requires_grad_(False)
    found = federate(net, {name: digits.train[name] for name in ("0", "9")}, "local", rounds=1)
    alike = user_similarity(found, "weight_cosine", like=net)
    assert "mean over 2 pairs of layers" in alike.table().quantity.convention
    pair = nk.compare(*(found.model(name, net) for name in ("0", "9")), measures="weight_cosine", pairs="corresponding")
    assert alike["0", "9"] == pytest.approx(np.mean([pair[one, one] for one in ("0", "3")]))


def test_coefficients_far_from_orthonormal_are_told_where_the_stored_atoms_are_compared(federation):
    stored, turned = user_similarity(federation), user_similarity(federation, gauge="orthonormal")
    assert "the coefficients of layer '0' are not orthonormal" in sentences(stored)[0]
    assert sentences(turned) == ()


def test_the_network_may_be_wrapped(federation, digits):
    wrapped = data_parallel(network())
    own = federation.model("0", wrapped)
    assert torch.equal(own[0].atoms, federation.model("0", network())[0].atoms)
    plain, found = (
        similar_users_ensemble(federation, one, digits.train, digits.test, epochs=1, members=1)
        for one in (network(), wrapped)
    )
    assert found.together == plain.together


def test_atoms_that_are_not_finite_have_no_similarity(federation):
    name = next(key for key in federation.personal if key.endswith("atoms"))
    held = np.array(federation.personal[name])
    held[0] = np.nan
    with pytest.raises(InvalidValue, match="atoms of layer .* of '.*' hold.* NaN"):
        nk.user_similarity(replace(federation, personal=dict(federation.personal) | {name: held}))


def test_what_can_not_be_compared_is_refused(digits):
    data = {name: digits.train[name] for name in ("0", "5")}
    refusals(
        (lambda: user_similarity(federate(network(), data, "local", rounds=1)), NoValue, ""),
        (lambda: user_similarity(federate(network(), data, "fedavg", rounds=1)), NoValue, ""),
        (lambda: user_similarity(federate(nk.recompose(network()), data, "local", rounds=1)), InvalidValue, ""),
    )
    with pytest.raises(InvalidValue, match="needs two clients or more; got 1"):
        user_similarity(federate(network(), {"0": data["0"]}, "local", coefficients="fixed", rounds=1))
    dead = network()
    dead[0].atoms.data.zero_()
    dead[0].atoms.requires_grad_(False)
    found = federate(dead, data, "local", coefficients="fixed", rounds=1)
    assert found.similarity is None
    assert "the atoms of layer '0' of '0' are all zero" in found.provenance["no similarity"]
    refusals(
        (lambda: user_similarity(found), NoValue, ""),
        (lambda: user_clusters(np.eye(2), 3), InvalidValue, "count"),
        (lambda: user_clusters(np.ones((2, 3))), ShapeError, ""),
        (lambda: adjusted_rand([0], [0, 1]), ShapeError, ""),
    )


def slow_ensemble(federation, data, test, name, members, epochs, rate, batch):
    """Return the accuracy of the mean probabilities, each head trained by torch's own optimizer on all its examples."""
    total = 0
    for member in members:
        model = federation.model(member, network()).eval()
        with torch.no_grad():
            features = model[:-1](data[name][0])
        optimizer = torch.optim.SGD(model[-1].parameters(), rate, momentum=0.9)
        for _ in range(epochs):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model[-1](features), data[name][1]).backward()
            optimizer.step()
        total = total + model(test[name][0]).softmax(1)
    return float((total.argmax(1) == test[name][1]).double().mean())


@pytest.fixture(scope="module")
def slow_ensembles(federation, digits):
    """Of each client: its three nearest, and its accuracy with them and alone, by the slow transcription."""
    alike, found = federation.similarity.to_numpy(), {}
    for place, name in enumerate(federation.clients):
        order = [federation.clients[k] for k in np.argsort(-alike[place]) if k != place][:3]
        accuracies = (
            slow_ensemble(federation, digits.train, digits.test, name, members, 5, 0.5, 1000)
            for members in ((name, *order), (name,))
        )
        found[name] = ((name, *order), *accuracies)
    return found


@pytest.mark.parametrize("method", ["stacked", "one by one"])
def test_an_ensemble_is_that_of_a_slow_transcription(federation, digits, slow_ensembles, method):
    found = similar_users_ensemble(
        federation, network(), digits.train, digits.test, epochs=5, lr=0.5, batch=1000, method=method
    )
    for name, (members, together, alone) in slow_ensembles.items():
        assert found.members[name] == members
        assert found.together[name] == pytest.approx(together)
        assert found.alone[name] == pytest.approx(alone)
    assert found.gain == pytest.approx(np.mean([found.together[n] - found.alone[n] for n in found.alone]))
    assert found.numbers == 3 * sum(one[0].size for one in federation.personal.values())
    assert "3 similar clients by atom_cosine" in str(found)


@pytest.mark.slow
def test_controls_take_random_and_the_least_similar_clients(federation, digits):
    options = {"epochs": 1, "batch": 1000, "progress": False}
    far = similar_users_ensemble(federation, network(), digits.train, digits.test, choose="dissimilar", **options)
    alike = federation.similarity.to_numpy()
    assert far.members["4"][1:] == tuple(federation.clients[k] for k in np.argsort(alike[4])[:3])
    drawn = [
        similar_users_ensemble(federation, network(), digits.train, digits.test, choose="random", seed=s, **options)
        for s in (0, 0, 1)
    ]
    assert drawn[0].members == drawn[1].members != drawn[2].members
    none = similar_users_ensemble(federation, network(), digits.train, digits.test, members=0, **options)
    assert none.alone == none.together
    angles = user_similarity(federation, "atom_angular")
    by_angle = similar_users_ensemble(
        federation, network(), digits.train, digits.test, similarity=angles, members=1, **options
    )
    assert by_angle.measure == "atom_angular"
    assert by_angle.members["4"] == ("4", federation.clients[int(np.argsort(-alike[4])[1])])


def test_random_members_need_no_similarity_and_are_not_said_to_come_from_one(digits):
    net = nk.recompose(network())
    plain = federate(net, digits.train, "local", rounds=1, batch=8, drop_last=True)
    found = similar_users_ensemble(plain, net, digits.train, digits.test, choose="random", members=2, epochs=1)
    assert "ensembles with 2 random clients: mean accuracy" in str(found)
    assert all(len(set(own)) == 3 and own[0] == name for name, own in found.members.items())
    alone = similar_users_ensemble(plain, net, digits.train, digits.test, members=0, epochs=1)
    assert alone.together == alone.alone
    with pytest.raises(InvalidValue, match="have no atoms that could be compared"):
        similar_users_ensemble(plain, net, digits.train, digits.test, members=2, epochs=1)


def test_a_head_that_is_not_last_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.LogSoftmax(1))
    with pytest.raises(InvalidValue, match="the head must be the last layer of the network, and '1' is not"):
        before_head(net, "1", torch.randn(5, 4))
    assert not net[1]._forward_hooks


@pytest.mark.parametrize(
    ("options", "kind", "argument"),
    [
        ({"members": 10}, InvalidValue, "members"),
        ({"choose": "best"}, UnknownName, "choose"),
        ({"test": None}, InvalidValue, "test"),
        ({"method": "sideways"}, UnknownName, "method"),
    ],
)
def test_ensembles_that_can_not_be_are_refused(federation, digits, options, kind, argument):
    given = {"test": digits.test} | options
    with refused(kind, argument):
        similar_users_ensemble(federation, network(), digits.train, **given)


def test_clients_of_another_federation_are_refused(federation, digits):
    with pytest.raises(UnknownName, match="the clients must be those of the federation; they differ in '0'"):
        similar_users_ensemble(federation, network(), {"z": digits.train["0"]}, {"z": digits.test["0"]})
