"""Coefficients that networks share, and what they explain."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, NameClash, ShapeError, UnknownName
from refusals import refusals


def small_net(seed=0, width=8, kernel=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, width, kernel), nn.BatchNorm2d(width), nn.ReLU(),
                         nn.Conv2d(width, 2 * width, 3), nn.Flatten(), nn.LazyLinear(2))  # fmt: skip


def drawn(model):
    model(torch.zeros(2, 3, 8, 8))
    return model


@pytest.fixture
def relatives():
    """Four networks a little away from one start."""
    start, found = drawn(small_net()), {}
    for name in "abcd":
        found[name] = copy.deepcopy(start)
        for layer in (0, 3):
            found[name][layer].weight.data += 0.03 * torch.randn_like(found[name][layer].weight)
    return found


def rows(layer):
    return layer.weight.detach().double().numpy().transpose(1, 0, 2, 3).reshape(-1, 9)


def test_joint_coefficients_are_the_leading_left_singular_vectors_of_all_filters(relatives):
    shared = nk.share_coefficients(relatives, atoms=5)
    for layer in (0, 3):
        F = [rows(net[layer]) for net in relatives.values()]
        U = np.linalg.svd(np.concatenate(F, 1))[0][:, :5]
        for k, name in enumerate(relatives):
            explained = np.linalg.norm(U.T @ F[k]) ** 2 / np.linalg.norm(F[k]) ** 2
            assert shared.explained[str(layer)][name] == pytest.approx(explained, rel=1e-9)
            made = shared.models[name][layer]
            np.testing.assert_allclose(rows(made), U @ U.T @ F[k], atol=1e-6)
            A = made.coefficients.detach().flatten(1)
            torch.testing.assert_close(A @ A.T, torch.eye(5), atol=1e-6, rtol=0)
            assert torch.equal(made.coefficients, shared.models["a"][layer].coefficients)


@pytest.mark.parametrize("count", [20, 40])  # 256 × 180 filters and 256 × 360
def test_the_coefficients_of_many_networks_are_singular_vectors_too(count):
    torch.manual_seed(0)
    common = torch.randn(16, 16, 3, 3)
    nets = [nn.Sequential(nn.Conv2d(16, 16, 3)) for _ in range(count)]
    for net in nets:
        net[0].weight.data.mul_(10).add_(common * torch.randn(3, 3))
    shared = nk.share_coefficients(nets, atoms=4)
    filters = [net[0].weight.detach().double().permute(1, 0, 2, 3).reshape(256, 9).numpy() for net in nets]
    U = np.linalg.svd(np.concatenate(filters, 1))[0][:, :4]
    found = shared.models["0"][0].coefficients.detach().double().reshape(4, 256).numpy()
    np.testing.assert_allclose(np.linalg.svd(found @ U)[1], 1, atol=1e-6)
    np.testing.assert_allclose(np.abs(found @ U), np.eye(4), atol=1e-5)
    for name, F in zip(shared.models, filters, strict=True):
        assert shared.explained["0"][name] == pytest.approx(np.sum((U.T @ F) ** 2) / np.sum(F**2), abs=1e-10)
    atoms = torch.cat([net[0].atoms.detach().flatten(1) for net in shared.models.values()], 1)
    assert (atoms.gather(1, atoms.abs().argmax(1, keepdim=True)) > 0).all()  # the signs do not depend on the machine


def test_no_other_coefficients_leave_a_smaller_error(relatives):
    shared = nk.share_coefficients(relatives, atoms=4)
    F = [rows(net[3]) for net in relatives.values()]
    left = sum(np.linalg.norm(f) ** 2 * (1 - s) for f, s in zip(F, shared.explained["3"].values(), strict=True))
    rng = np.random.default_rng(0)
    best = np.linalg.svd(np.concatenate(F, 1))[0][:, :4]
    for step in (0.01, 0.1, 1, 100):
        Q = np.linalg.qr(best + step * rng.normal(size=best.shape) / 10)[0]
        assert sum(np.linalg.norm(f - Q @ Q.T @ f) ** 2 for f in F) >= left


def test_coefficients_of_one_network_leave_that_network_as_it_is(relatives):
    shared = nk.share_coefficients(relatives, source="b")
    x = torch.randn(2, 3, 8, 8)
    assert shared.explained["3"]["b"] == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(shared.models["b"].eval()(x), relatives["b"].eval()(x), atol=1e-5, rtol=1e-4)
    U = np.linalg.svd(rows(relatives["b"][3]), full_matrices=False)[0]
    F = rows(relatives["c"][3])
    expected = np.linalg.norm(U.T @ F) ** 2 / np.linalg.norm(F) ** 2
    assert shared.explained["3"]["c"] == pytest.approx(expected, rel=1e-6)
    assert "coefficients of 'b'" in str(shared)


def test_shuffled_channels_are_explained_less_though_the_networks_compute_the_same(relatives):
    shared = nk.share_coefficients(relatives, atoms=5)
    moved = {}
    for k, (name, net) in enumerate(relatives.items()):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(k))
        moved[name] = copy.deepcopy(net).eval()
        moved[name][0].weight.data, moved[name][0].bias.data = net[0].weight.data[order], net[0].bias.data[order]
        moved[name][3].weight.data = net[3].weight.data[:, order]
        for part in ("weight", "bias", "running_mean", "running_var"):
            getattr(moved[name][1], part).data = getattr(net[1], part).data[order]
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(moved[name](x), net.eval()(x), atol=1e-5, rtol=1e-4)
    control = nk.share_coefficients(moved, atoms=5)
    for layer in ("0", "3"):
        kept, lost = (np.mean(list(one.explained[layer].values())) for one in (shared, control))
        assert lost < kept - 0.1
        assert shared.control[layer] < kept - 0.1
        assert abs(shared.control[layer] - lost) < 0.15
    apart, near = (nk.atom_similarity(one.models).to_numpy()[0, 1] for one in (control, shared))
    assert near > 0.9 > apart


def test_networks_with_nothing_in_common_are_explained_no_better_than_the_control():
    shared = nk.share_coefficients([drawn(small_net(seed)) for seed in range(4)], atoms=5)
    for layer in ("0", "3"):
        assert np.mean(list(shared.explained[layer].values())) == pytest.approx(shared.control[layer], abs=0.05)
    assert "channels shuffled" in str(shared)


def test_with_orthonormal_coefficients_the_cosine_is_that_of_the_filters(relatives):
    shared = nk.share_coefficients(relatives, atoms=5).models
    found = nk.compare(shared["a"], shared["b"], measures=["atom_cosine", "weight_cosine"], layers=["0", "3"])
    for layer in ("0", "3"):
        assert found["atom_cosine"][layer, layer] == pytest.approx(found["weight_cosine"][layer, layer], abs=1e-6)


def test_networks_of_different_widths_share_a_block_that_is_repeated():
    nets = {"narrow": drawn(small_net(0, 8)), "wide": drawn(small_net(1, 16))}
    shared = nk.share_coefficients(nets, atoms=4, block=4)
    assert shared.models["wide"][3].block == shared.models["narrow"][3].block == (4, 4)
    assert shared.models["wide"][0].block == (1, 4)
    means, copies = {}, {}
    for name, net in nets.items():
        W = net[3].weight.detach().double().numpy()
        o, i = W.shape[:2]
        means[name] = np.zeros((4, 4, 9))
        for b in range(o):
            for a in range(i):
                means[name][a % 4, b % 4] += W[b, a].ravel() * 16 / (o * i)
        copies[name] = o * i / 16
    U = np.linalg.svd(np.concatenate([np.sqrt(copies[n]) * means[n].reshape(16, 9) for n in nets], 1))[0][:, :4]
    for name, net in nets.items():
        expected = copies[name] * np.linalg.norm(U.T @ means[name].reshape(16, 9)) ** 2
        expected /= float(net[3].weight.detach().double().square().sum())
        assert shared.explained["3"][name] == pytest.approx(expected, rel=1e-6)
        made = shared.models[name][3].weight.detach().double()
        lost = float((made - net[3].weight.detach().double()).square().sum() / net[3].weight.detach().square().sum())
        assert 1 - lost == pytest.approx(expected, abs=1e-5)
    assert -1 < nk.atom_similarity(shared.models)["narrow", "wide"] < 1


def test_the_weights_of_a_repeated_block_are_those_of_the_whole_layer():
    nets = {"narrow": drawn(small_net(0, 8)), "wide": drawn(small_net(1, 16))}
    shared = nk.share_coefficients(nets, atoms=4, block=4).models
    plain = nk.recompose(shared["wide"])
    own = nk.compare(shared["wide"], plain, measures="weight_cosine", layers=["0", "3"], pairs="corresponding")
    assert [own[layer, layer] for layer in ("0", "3")] == pytest.approx([1, 1])
    apart = nk.compare(*shared.values(), measures="weight_cosine", layers=["3"])
    assert "weights of different shapes have no cosine" in apart["weight_cosine"].missing["3", "3"]


def test_the_networks_given_are_left_alone_and_atoms_may_be_trained_alone(relatives):
    before = {name: copy.deepcopy(net.state_dict()) for name, net in relatives.items()}
    shared = nk.share_coefficients(relatives, atoms=3, train_only="atoms")
    for name, net in relatives.items():
        assert all(torch.equal(one, before[name][key]) for key, one in net.state_dict().items())
        trained = [key for key, one in shared.models[name].named_parameters() if one.requires_grad]
        assert trained == ["0.atoms", "3.atoms"]


def test_networks_that_cannot_share_are_refused(relatives):
    wide, other = drawn(small_net(1, 16)), drawn(small_net(1, kernel=5))
    with pytest.raises(ShapeError, match="'0' is 8 × 3 channels in '0' and 16 × 3 in '1'; pass `block=`.*grassmann"):
        nk.share_coefficients([relatives["a"], wide])
    refusals(
        (lambda: nk.share_coefficients([relatives["a"], other]), ShapeError, ""),
        (lambda: nk.share_coefficients([relatives["a"], nn.Sequential(nn.Conv2d(3, 8, 3))]), ShapeError, ""),
        (lambda: nk.share_coefficients([relatives["a"]]), InvalidValue, "models"),
        (lambda: nk.share_coefficients(relatives, source="e"), UnknownName, "source"),
        (lambda: nk.share_coefficients(relatives, source=3), UnknownName, "source"),
        (lambda: nk.share_coefficients(relatives | {"joint": relatives["a"]}), NameClash, ""),
        (lambda: nk.share_coefficients(relatives["a"]), InvalidValue, "models"),
        (lambda: nk.share_coefficients(relatives, atoms=0), InvalidValue, "atoms"),
        (lambda: nk.share_coefficients(relatives, block=-2), InvalidValue, "block"),
        (lambda: nk.share_coefficients([nn.Linear(2, 2), nn.Linear(2, 2)]), InvalidValue, ""),
    )


def test_networks_of_atoms_keep_their_number_where_none_is_asked_for():
    torch.manual_seed(0)
    nets = [nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=4)) for _ in range(2)]
    nets[1][0].coefficients.data.copy_(nets[0][0].coefficients)
    shared = nk.share_coefficients(nets)
    assert [len(net[0].atoms) for net in shared.models.values()] == [4, 4]
    assert min(shared.explained["0"].values()) == pytest.approx(1)
    assert shared.control["0"] < 0.9


def test_more_atoms_than_a_kernel_has_numbers_can_make_the_shared_form_exact():
    nets = [drawn(small_net(seed)) for seed in range(3)]
    shared = nk.share_coefficients(nets, atoms=27)
    assert min(shared.explained["3"].values()) == pytest.approx(1, abs=1e-9)
    assert shared.models["0"][3].atoms.shape == (27, 3, 3)


def test_progress_is_told_layer_by_layer(relatives):
    seen = []
    nk.share_coefficients(relatives, progress=lambda *told: seen.append(told))
    assert seen[-1] == (2, 2, "sharing coefficients")
