"""Many networks at once: all pairs of them, and the nearest of each."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.errors import InvalidValue, NoValue, ShapeError, UnknownName
from refusals import refusals, refused
from table_worlds import sentences


def family(count=6, m=4, even=False):
    """Return networks that share coefficients, in two groups that differ more than their members."""
    torch.manual_seed(0)
    start = nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=m), nn.ReLU(), nk.AtomConv2d(8, 8, (2, 3), atoms=m))
    if even:
        for layer in (start[0], start[2]):
            Q = torch.linalg.qr(layer.coefficients.data.flatten(1).T)[0].T
            layer.coefficients.data = Q.reshape(layer.coefficients.shape)
    centres = [[torch.randn_like(start[layer].atoms) for layer in (0, 2)] for _ in range(2)]
    found = {}
    for place in range(count):
        net = copy.deepcopy(start)
        for layer, centre in zip((0, 2), centres[place % 2], strict=True):
            net[layer].atoms.data = centre + 0.3 * torch.randn_like(centre)
        found[f"net{place}"] = net
    return found


def by_hand(nets, of, gauge="stored"):
    names, values = list(nets), np.zeros((len(nets), len(nets)))
    for i, x in enumerate(names):
        for j, y in enumerate(names):
            found = []
            for layer in (0, 2):
                one, other = (
                    (net[layer].atoms if gauge == "stored" else net[layer].weight) for net in (nets[x], nets[y])
                )
                u, v = (tensor.detach().double().numpy().ravel() for tensor in (one, other))
                found.append(of(float(np.clip(u @ v / np.linalg.norm(u) / np.linalg.norm(v), -1, 1))))
            values[i, j] = np.mean(found)
    return values


@pytest.mark.parametrize("gauge", ["stored", "orthonormal"])
@pytest.mark.parametrize("measure, of", [("atom_cosine", float), ("atom_angular", math.acos)])
def test_all_pairs_are_the_mean_over_layers(measure, of, gauge):
    nets = family()
    found = nk.atom_similarity(nets, measure, gauge=gauge, by_layer=True)
    np.testing.assert_allclose(
        found.table(next(iter(found))).values, by_hand(nets, of, gauge), atol=2e-4 if of is math.acos else 1e-6
    )
    layers = np.mean([found[f"{measure} of {layer}"].values for layer in ("0", "2")], axis=0)
    np.testing.assert_allclose(found.table(next(iter(found))).values, layers, atol=1e-12)
    assert found.layers_a == tuple(nets)
    assert found.needs_no_data


def test_it_is_what_comparing_the_networks_pair_by_pair_gives():
    nets = family()
    summary = nk.compare_many(nets, measures="atom_cosine", pairs="corresponding").summary("atom_cosine")
    found, apart = nk.atom_similarity(nets).to_numpy(), ~np.eye(6, dtype=bool)
    np.testing.assert_allclose(found[apart], summary[apart], atol=1e-9)


def test_groups_are_found_and_copies_are_at_angle_zero():
    nets = family()
    nets["copy"] = copy.deepcopy(nets["net0"])
    nearest = nk.nearest_networks(nets, 2)
    assert nearest["copy"][0] == ("net0", pytest.approx(1))
    assert {name for name, _ in nearest["net1"]} == {"net3", "net5"}
    assert "net1: net" in str(nearest)
    angles = nk.atom_similarity(nets, "atom_angular").to_numpy()
    assert angles[0, -1] < 1e-7
    assert np.diag(angles).max() < 1e-7
    with pytest.raises(UnknownName, match="no network named 'net9' here"):
        nearest["net9"]


def test_opposite_atoms_are_at_the_angle_that_the_measure_gives():
    nets = family(1)
    nets["opposite"] = copy.deepcopy(nets["net0"])
    for layer in (0, 2):
        nets["opposite"][layer].atoms.data.neg_()[0, 0, 0] *= 1 + 1e-6
    pair = nk.compare(*nets.values(), measures="atom_angular", pairs="corresponding")
    found = nk.atom_similarity(nets, "atom_angular", by_layer=True)
    for layer in ("0", "2"):
        assert found[f"atom_angular of {layer}"]["net0", "opposite"] == pytest.approx(pair[layer, layer], abs=1e-12)


def test_coefficients_that_are_far_from_orthonormal_are_told_once():
    nets = family(3)
    for net in nets.values():
        net[0].coefficients.data[0] *= 20
        net[2].coefficients.data[0] *= 40
    (warning,) = sentences(nk.atom_similarity(nets))
    assert "layer '2' are not orthonormal" in warning
    assert "and those of 1 other layer are not either, so that the cosine of atoms depends" in warning
    assert sentences(nk.atom_similarity(nets, gauge="orthonormal")) == ()


def test_the_nearest_are_those_of_the_whole_matrix():
    nets = family(20)
    everything, found = nk.atom_similarity(nets).to_numpy(), nk.nearest_networks(nets, 3)
    np.fill_diagonal(everything := everything.copy(), -2)
    np.testing.assert_array_equal(found.places, np.argsort(-everything, axis=1)[:, :3])
    np.testing.assert_allclose(found.values, -np.sort(-everything, axis=1)[:, :3], atol=1e-12)


def test_state_dicts_and_streams_are_read_one_at_a_time():
    nets = family()
    expected = nk.atom_similarity(nets).to_numpy()
    np.testing.assert_array_equal(nk.atom_similarity([net.state_dict() for net in nets.values()]).to_numpy(), expected)
    seen = []
    found = nk.atom_similarity((seen.append(name) or net for name, net in nets.items()))
    np.testing.assert_array_equal(found.to_numpy(), expected)
    assert found.layers_a == tuple("012345")
    assert len(seen) == 6


def test_a_store_of_atoms_alone_is_enough():
    nets = family()
    store = {name: {key: one for key, one in net.state_dict().items() if "atoms" in key} for name, net in nets.items()}
    np.testing.assert_array_equal(nk.atom_similarity(store).to_numpy(), nk.atom_similarity(nets).to_numpy())
    with pytest.raises(
        InvalidValue, match="'net0' holds atoms alone, and gauge='orthonormal' needs their coefficients"
    ):
        nk.atom_similarity(store, gauge="orthonormal")
    with pytest.raises(NoValue, match="has coefficients of its own in 'x', other than in 'net0'"):
        nk.atom_similarity(store | {"x": nets["net0"]})


def test_a_result_is_saved_shown_and_drawn(tmp_path):
    found = nk.atom_similarity(family())
    found.save(tmp_path / "all.netkin")
    assert nk.load(tmp_path / "all.netkin") == found
    assert "net3" in nk.report(found, tmp_path / "all.html").read_text()
    assert "from the weights alone" in str(found)


def test_networks_that_cannot_be_compared_are_named():
    nets = family(3)
    strange = copy.deepcopy(nets["net0"])
    strange[2].coefficients.data += 1
    refusals(
        (lambda: nk.atom_similarity(nets | {"x": strange}), NoValue, ""),
        (lambda: nk.atom_similarity(nets | {"x": next(iter(family(1, m=5).values()))}), ShapeError, ""),
        (lambda: nk.atom_similarity(nets | {"x": nn.Sequential(nets["net0"][0])}), ShapeError, ""),
        (lambda: nk.atom_similarity({"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(3, 8, 3)}), InvalidValue, "atoms"),
        (lambda: nk.atom_similarity({"a": 1, "b": 2}), InvalidValue, ""),
        (lambda: nk.atom_similarity([nets["net0"]]), InvalidValue, "models"),
        (lambda: nk.atom_similarity(nets["net0"]), InvalidValue, "models"),
    )
    zero, broken = copy.deepcopy(nets["net0"]), copy.deepcopy(nets["net0"])
    zero[0].atoms.data.zero_()
    with pytest.raises(NoValue, match="the atoms of layer '0' of 'x' are all zero, and have no cosine"):
        nk.atom_similarity(nets | {"x": zero})
    broken[2].atoms.data[0, 0, 0] = torch.nan
    with pytest.raises(InvalidValue, match="the atoms of layer '2' of 'x' holds 1 NaN or Inf among 24"):
        nk.atom_similarity(nets | {"x": broken})


def test_strange_options_are_refused():
    nets = family(3)
    with pytest.raises(UnknownName, match="got 'cka'. `nk.compare_many` takes any measure"):
        nk.atom_similarity(nets, "cka")
    with refused(UnknownName, "gauge"):
        nk.atom_similarity(nets, gauge="other")
    for k in (0, 3, True):
        with refused(InvalidValue, "k"):
            nk.nearest_networks(nets, k)
