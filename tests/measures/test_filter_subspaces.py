"""Measures that are fed by weights: atoms, the subspaces that they span, and plain weights."""

import copy
import math
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

import netkin as nk
from netkin.errors import InflatedWarning, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.measures import measures
from netkin.measures.linear import mean_cosines, nearest
from refusals import refusals, refused
from table_worlds import sentences

OURS = ("atom_cosine", "atom_angular", "grassmann", "weight_cosine")
GRASSMANN = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")


def atoms(seed, m=4, k=3):
    return torch.randn(m, k, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair_of_nets(m=4, seed=0):
    """Return two networks that share their coefficients and differ in their atoms."""
    torch.manual_seed(seed)
    a = nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=m), nn.ReLU(), nk.AtomConv2d(8, 8, 3, atoms=m), nn.Flatten())
    b = copy.deepcopy(a)
    for layer in (b[0], b[2]):
        nn.init.normal_(layer.atoms)
    return a, b


def cosine(x, y):
    x, y = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
    return float(sum(x * y) / math.sqrt(sum(x * x) * sum(y * y)))


def test_the_cosine_is_that_of_eq_5_of_the_paper():
    D, E = atoms(0), atoms(1)
    assert float(nk.atom_cosine(D, E)) == pytest.approx(cosine(D, E), abs=1e-12)
    assert float(nk.atom_angular(D, E)) == pytest.approx(math.acos(cosine(D, E)), abs=1e-12)
    assert float(nk.weight_cosine(D, E)) == pytest.approx(cosine(D, E), abs=1e-12)
    assert nk.atom_cosine(D.numpy(), (2 * D).numpy()) == pytest.approx(1)


def test_the_subspaces_have_scipys_principal_angles():
    D, E = atoms(0, m=3), atoms(1, m=3)
    angles = scipy.linalg.subspace_angles(D.reshape(3, 9).numpy().T, E.reshape(3, 9).numpy().T)
    assert float(nk.grassmann(D, E)) == pytest.approx(np.cos(angles).mean(), abs=1e-12)
    mixed = torch.einsum("ab,bhw->ahw", torch.randn(3, 3, dtype=torch.float64), D)
    assert float(nk.grassmann(D, mixed)) == pytest.approx(1, abs=1e-10)


def test_dependent_atoms_count_as_the_subspace_that_they_span():
    D, E = atoms(0, m=3), atoms(1, m=2)
    D[2] = D[0] - 2 * D[1]
    angles = scipy.linalg.subspace_angles(D[:2].reshape(2, 9).numpy().T, E.reshape(2, 9).numpy().T)
    longer = torch.cat([E, E[:1]])
    assert float(nk.grassmann(D, longer)) == pytest.approx(np.cos(angles).mean(), abs=1e-10)
    assert float(nk.grassmann(D, D)) == pytest.approx(1)


def test_angles_of_near_copies_are_exact_where_an_arccosine_is_not():
    D = atoms(0)
    E = atoms(1)
    E -= (D * E).sum() / (D * D).sum() * D  # at right angles
    for angle in (1e-3, 1e-6, 1e-9):
        turned = math.cos(angle) * D / D.norm() + math.sin(angle) * E / E.norm()
        assert float(nk.atom_angular(D, turned)) == pytest.approx(angle, rel=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_the_angle_keeps_the_triangle_inequality(seed):
    generator = torch.Generator().manual_seed(seed)
    D, E = atoms(2 * seed), atoms(2 * seed + 1)
    t = float(torch.rand((), generator=generator)) * 2 - 0.5
    F = (1 - t) * D + t * E + 0.3 * torch.rand((), generator=generator) * torch.randn(4, 3, 3, generator=generator)
    xy, yz, xz = (float(nk.atom_angular(*both)) for both in ((D, E), (E, F), (D, F)))
    assert xz <= xy + yz + 1e-12
    assert xy <= xz + yz + 1e-12
    assert yz <= xy + xz + 1e-12
    assert min(xy, yz, xz) > 1e-3


def test_the_cosine_itself_is_no_metric():
    D, E = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    F = torch.tensor([[0.0, 1.0]])
    ways = [1 - nk.atom_cosine(*both) for both in ((D, E), (E, F), (D, F))]
    assert ways[2] > ways[0] + ways[1] + 0.1


@pytest.mark.parametrize("name", OURS)
def test_facts_are_complete_and_kept(name):
    facts, found = measures()[name].facts, measures()[name]
    D, E = atoms(0), atoms(1)
    low, high = facts.bounds
    assert found.summary.startswith("Return ")
    assert facts.convention
    for X, Y in ((D, E), (D, D), (D, -D), (3.7 * D, E), (D, 3.7 * E)):
        assert low - 1e-12 <= float(found.function(X, Y)) <= high + 1e-12
        assert float(found.function(X, Y)) == pytest.approx(float(found.function(Y, X)), abs=1e-12)
    for X, Y in ((3.7 * D, E), (D, 3.7 * E)):
        assert float(found.function(X, Y)) == pytest.approx(float(found.function(D, E)), abs=1e-12)
    turned = torch.einsum("ab,bhw->ahw", torch.linalg.qr(atoms(7, 4, 2).reshape(4, 4))[0], D)
    if name != "grassmann":  # which looks at the span alone
        assert abs(float(found.function(turned, E)) - float(found.function(D, E))) > 1e-3
    assert abs(float(found.function(D + 1, E)) - float(found.function(D, E))) > 1e-4


def test_opposite_atoms_are_opposite_and_span_the_same():
    D = atoms(0)
    assert float(nk.atom_cosine(D, -D)) == pytest.approx(-1)
    assert float(nk.atom_angular(D, -D)) == pytest.approx(math.pi)
    assert float(nk.grassmann(D, -D)) == pytest.approx(1)


def test_bad_atoms_are_refused():
    refusals(
        (lambda: nk.atom_cosine(atoms(0), torch.zeros(4, 3, 3)), NoValue, ""),
        (lambda: nk.grassmann(torch.zeros(4, 3, 3), atoms(0)), NoValue, ""),
        (lambda: nk.atom_cosine(atoms(0), atoms(0, m=5)), NoValue, ""),
        (lambda: nk.grassmann(atoms(0), atoms(0, k=5)), NoValue, ""),
        (lambda: nk.atom_cosine(atoms(0) * torch.nan, atoms(0)), InvalidValue, ""),
        (lambda: nk.atom_cosine(torch.ones(4), atoms(0)), ShapeError, "X"),
        (lambda: nk.atom_cosine(atoms(0), atoms(1), gauge="free"), UnknownName, "gauge"),
    )


# --- of networks ------------------------------------------------------------------------------------------------------


def test_networks_are_compared_without_data():
    a, b = pair_of_nets()
    found = nk.compare(a, b, measures=OURS, layers=["0", "2"], pairs="corresponding")
    assert found.needs_no_data
    for name, layer in (("0", 0), ("2", 2)):
        D, E = a[layer].atoms.detach(), b[layer].atoms.detach()
        assert found["atom_cosine"][name, name] == pytest.approx(cosine(D, E), abs=1e-6)
        assert found["atom_angular"][name, name] == pytest.approx(math.acos(cosine(D, E)), abs=1e-6)
        angles = scipy.linalg.subspace_angles(*(one.reshape(4, 9).double().numpy().T for one in (D, E)))
        assert found["grassmann"][name, name] == pytest.approx(np.cos(angles).mean(), abs=1e-6)
        W, V = (net[layer].weight.detach().numpy() for net in (a, b))
        assert found["weight_cosine"][name, name] == pytest.approx(cosine(W, V), abs=1e-6)


def test_by_default_layers_with_filters_are_compared():
    a, b = pair_of_nets()
    assert nk.compare(a, b, measures="atom_cosine").layers_a == ("0", "2")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert nk.compare(plain, measures="grassmann(atoms=2)").layers_a == ("0",)
    assert nk.compare(plain, measures="weight_cosine").layers_a == ("0", "1", "2", "4")
    with pytest.raises(
        InvalidValue, match="'a' has no layer with filters larger than 1 × 1, which atom_cosine would be"
    ):
        nk.compare(nn.Linear(2, 2), nn.Linear(2, 2), measures="atom_cosine")
    with pytest.raises(InvalidValue, match="'a' has no layer with filters larger than 1 × 1"):
        nk.explain(nn.Linear(2, 2), nn.Linear(2, 2), measures="atom_cosine")


def test_layers_that_share_no_coefficients_are_holes_with_the_remedy():
    a, b = pair_of_nets()
    other = nn.Sequential(nk.AtomConv2d(3, 8, 3, atoms=4), nn.Conv2d(3, 8, 3), nk.AtomConv2d(8, 8, 5, atoms=3))
    found = nk.compare(a, other, measures=["atom_cosine", "grassmann"])
    assert "`nk.share_coefficients` makes networks that share them" in found["atom_cosine"].missing["0", "0"]
    assert "plain filters have no atoms; `nk.share_coefficients`" in found["atom_cosine"].missing["0", "1"]
    assert "kernels of 3 × 3 and of 5 × 5" in found["atom_cosine"].missing["0", "2"]
    assert "say how many directions: 'grassmann(atoms=4)'" in found["grassmann"].missing["0", "1"]
    assert 0 < found["grassmann"]["0", "0"] < 1
    named = nk.compare(nn.Sequential(nn.Conv2d(3, 8, 1)), b, measures="atom_cosine", layers={"a": ["0"]})
    assert "a layer without filters larger than 1 × 1 has no atoms" in named["atom_cosine"].missing["0", "0"]


def test_leading_directions_of_plain_filters_are_those_of_an_svd_for_any_widths():
    torch.manual_seed(0)
    a, b = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Sequential(nn.Conv2d(16, 5, 3))
    found = nk.compare(a, b, measures="grassmann(atoms=3)")
    bases = [np.linalg.svd(net[0].weight.detach().double().numpy().reshape(-1, 9))[2][:3].T for net in (a, b)]
    assert found["0", "0"] == pytest.approx(np.cos(scipy.linalg.subspace_angles(*bases)).mean(), abs=1e-9)


def test_atoms_and_their_filters_have_one_subspace():
    a, b = pair_of_nets(m=3)
    whole = nk.compare(a, b, measures=["grassmann", "grassmann(atoms=3)"], pairs="corresponding")
    for layer in ("0", "2"):
        assert whole["grassmann(atoms=3)"][layer, layer] == pytest.approx(whole["grassmann"][layer, layer], abs=1e-6)


def test_as_many_atoms_as_numbers_span_everything_and_that_is_said():
    a, b = pair_of_nets(m=9)
    found = nk.compare(a, b, measures="grassmann", pairs="corresponding")
    assert found["0", "0"] == pytest.approx(1, abs=1e-6)
    assert any("9 independent atoms span the whole space" in sentence for sentence in sentences(found))
    with pytest.warns(InflatedWarning, match="take fewer than 9 atoms"):
        nk.grassmann(atoms(0, m=9), atoms(1, m=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nk.grassmann(atoms(0, m=8), atoms(1, m=8))


def test_the_gauge_changes_the_cosine_of_one_pair_of_networks_and_orthonormal_does_not():
    a, b = pair_of_nets()
    torch.manual_seed(3)
    seen = []
    for place in range(3):
        A = torch.eye(4) if not place else torch.randn(4, 4)
        u, v = copy.deepcopy(a), copy.deepcopy(b)
        for net in (u, v):
            net[0].atoms.data = torch.einsum("ab,bhw->ahw", A, net[0].atoms)
            net[0].coefficients.data = torch.einsum("ba,bio->aio", torch.linalg.inv(A), net[0].coefficients)
        torch.testing.assert_close(u[0].weight, a[0].weight, atol=1e-5, rtol=1e-4)
        found = nk.compare(u, v, measures=["atom_cosine", "atom_cosine(gauge=orthonormal)"], pairs=[("0", "0")])
        seen.append([found[name]["0", "0"] for name in found])
        if place:
            assert any("not orthonormal (their singular values differ by a factor" in one for one in sentences(found))
    stored, fixed = np.array(seen).T
    assert np.ptp(stored) > 0.05
    assert np.ptp(fixed) < 1e-5
    W, V = (net[0].weight.detach().numpy() for net in (a, b))
    assert fixed[0] == pytest.approx(cosine(W, V), abs=1e-6)


def test_state_dicts_files_and_merged_parts_give_the_same(tmp_path):
    a, b = pair_of_nets()
    asked = ["atom_cosine", "grassmann", "weight_cosine"]
    found = nk.compare(a, b, measures=asked).to_numpy()
    states = [nk.ModelInput(weights=net.state_dict()) for net in (a, b)]
    np.testing.assert_allclose(nk.compare(*states, measures=asked).to_numpy(), found, atol=1e-12)
    nk.collect(a, b, measures=asked).save(tmp_path / "ab.stats")
    np.testing.assert_allclose(nk.load(tmp_path / "ab.stats").compute(asked).to_numpy(), found, atol=1e-12)
    narrow = nk.collect(a, b, measures="atom_cosine")
    with pytest.raises(InvalidValue, match="can't serve 'weight_cosine': they hold LayerFilters without the weights"):
        narrow.compute("weight_cosine")


def test_a_pass_over_data_gives_them_too():
    a, b = pair_of_nets()
    x = torch.randn(20, 3, 8, 8)
    found = nk.compare(a, b, x, ["cka", "atom_cosine"], layers=["0", "2"], pairs="corresponding")
    assert found["atom_cosine"]["0", "0"] == nk.compare(a, b, measures="atom_cosine")["0", "0"]
    many = nk.compare_many({"a": a, "b": b, "c": a}, measures="atom_cosine")
    assert many["a", "c"]["0", "0"] == pytest.approx(1)


def test_halves_are_raised_before_anything_is_summed():
    a, b = (net.bfloat16() for net in pair_of_nets())
    found = nk.compare(a, b, measures=["atom_cosine", "weight_cosine"], pairs="corresponding")
    assert found["atom_cosine"]["0", "0"] == pytest.approx(
        cosine(a[0].atoms.float().detach(), b[0].atoms.float().detach())
    )
    plain = [nn.Sequential(nn.Conv2d(3, 8, 3)).half() for _ in range(2)]
    W, V = (net[0].weight.detach().float().numpy() for net in plain)
    assert nk.compare(*plain, measures="weight_cosine")["0", "0"] == pytest.approx(cosine(W, V), abs=1e-6)


def test_broken_weights_are_named():
    a, b = pair_of_nets()
    b[2].atoms.data[0, 0, 0] = torch.inf
    with pytest.raises(InvalidValue, match="'atoms' of layer '2' of 'b' holds 1 NaN or Inf among 36"):
        nk.compare(a, b, measures="atom_cosine")


# --- many at once -----------------------------------------------------------------------------------------------------


def test_blocks_of_a_product_find_the_same_neighbours_as_a_sort():
    torch.manual_seed(0)
    rows = nn.functional.normalize(torch.randn(53, 2, 20, dtype=torch.float64), dim=2).flatten(1)
    everything = mean_cosines(rows, 2)
    for block in (1, 7, 64):
        places, values = nearest(rows, 2, 5, block=block)
        for row in range(53):
            order = sorted((k for k in range(53) if k != row), key=lambda k: -float(everything[row, k]))
            assert places[row].tolist() == order[:5]
            assert values[row].tolist() == pytest.approx([float(everything[row, k]) for k in order[:5]], abs=1e-12)


def test_rounding_does_not_count_as_a_direction():
    torch.manual_seed(0)
    nets = [nn.Sequential(nk.AtomConv2d(6, 8, 3, atoms=3)) for _ in range(2)]
    nets[1][0].atoms.data = torch.einsum("ab,bhw->ahw", torch.randn(3, 3), nets[0][0].atoms.data)
    plain = [nk.recompose(net) for net in nets]
    for kind in (torch.float32, torch.bfloat16):
        found = nk.compare(*(net.to(kind) for net in plain), measures="grassmann(atoms=5)")
        assert found["0", "0"] == pytest.approx(1, abs=1e-3 if kind is torch.float32 else 0.02)


def test_a_strange_number_of_directions_is_refused():
    with refused(InvalidValue, "atoms"):
        nk.grassmann(atoms(0), atoms(1), atoms=-1)


def test_dependent_atoms_are_not_said_to_span_everything():
    D = atoms(0, m=9)
    D[8] = D[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(nk.grassmann(D, D)) == pytest.approx(1)


def test_an_unknown_layer_of_filters_is_refused():
    filters = nk.LayerFilters()
    filters.update({"weights": {"conv1": {"weight": torch.randn(2, 2, 3, 3)}}})
    with pytest.raises(UnknownName, match="no layer 'conv2' in these filters; did you mean 'conv1'"):
        filters["conv1", "conv2"]
