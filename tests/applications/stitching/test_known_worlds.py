"""Known worlds: one network is the other with its hidden units turned, and the right method finds out how."""

import numpy as np
import pytest
import torch

from netkin.applications.stitching import fit_all, rank, sparsity, stitch
from quickly import slow_after
from stitching_worlds import SHAPES, built, drawn, labelled, turned

WIDTH = 6


def world(kind):
    """Return the matrix of a world, and its inverse where it has one."""
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    if kind == "rotated":
        return turn, turn.T
    if kind == "permuted":
        order = np.eye(WIDTH)[rng.permutation(WIDTH)]
        return order, order.T
    if kind == "scaled":
        sizes = np.diag(np.linspace(0.2, 3, WIDTH))
        return sizes, np.linalg.inv(sizes)
    return rng.normal(size=(WIDTH, 2)) @ rng.normal(size=(2, WIDTH)), None


RIGHT = {
    "rotated": ["least_squares", "procrustes", "least_squares(affine=False)"],
    "permuted": ["least_squares", "procrustes", "permutation"],
    "scaled": ["least_squares", "reduced_rank(k=6)"],
    "rank-reduced": ["least_squares", "reduced_rank(k=2)"],
}
WRONG = {
    "rotated": ["permutation", "reduced_rank(k=2)", "identity", "lasso(alpha=0.1)"],
    "permuted": ["reduced_rank(k=2)", "identity", "random"],
    "scaled": ["procrustes", "permutation", "reduced_rank(k=2)"],
    "rank-reduced": ["procrustes", "permutation", "reduced_rank(k=1)", "random"],
}


@pytest.mark.parametrize("form", slow_after(1, SHAPES))
@pytest.mark.parametrize("kind", RIGHT)
def test_the_right_method_recovers_a_world_and_the_wrong_class_of_maps_does_not(form, kind):
    network, shape = SHAPES[form]
    truth, back = (None if one is None else torch.tensor(one) for one in world(kind))
    a = built(network, WIDTH)
    b = turned(a, truth, back)
    data, test = labelled(b, *shape), labelled(b, *shape, seed=6)
    made = fit_all(a, b, [("mid", "mid")], data, RIGHT[kind] + WRONG[kind], test)
    for how in RIGHT[kind]:
        found = made[("mid", "mid"), how]
        assert torch.allclose(found.map.weight, truth, atol=1e-6), how
        assert found.relative_accuracy == 1.0
        assert found.evaluation.agreement == 1.0
        assert found.evaluation.r2 == pytest.approx(1)
        assert found.evaluation.cka == pytest.approx(1)
        assert torch.allclose(found.network(test[0][0]), b(test[0][0]), atol=1e-6)
    for how in WRONG[kind]:
        found = made[("mid", "mid"), how]
        assert not torch.allclose(found.map.weight, truth, atol=0.05), how
        assert found.evaluation.r2 < 0.999


def test_a_rotated_copy_has_the_same_function_and_a_stitch_into_it_that_of_both():
    a = built(SHAPES["maps"][0])
    b = turned(a, *map(torch.tensor, world("rotated")))
    x = drawn(5, 3, 12, 12)
    assert torch.allclose(a(x), b(x))
    assert torch.allclose(stitch(a, "mid", b, "mid", labelled(a, 3, 12, 12)).network(x), a(x))


def test_the_structure_of_a_world_is_seen():
    network, shape = SHAPES["rows"]
    a = built(network)
    low = turned(a, torch.tensor(world("rank-reduced")[0]))
    order = turned(a, torch.tensor(world("permuted")[0]))
    data = labelled(a, *shape)
    assert rank(stitch(a, "mid", low, "mid", data)) == 2
    assert rank(stitch(a, "mid", low, "mid", data, "procrustes")) == 6
    assert sparsity(stitch(a, "mid", order, "mid", data)) == pytest.approx(30 / 36)
    assert sparsity(stitch(a, "mid", low, "mid", data)) == 0


@pytest.mark.parametrize("form", SHAPES)
def test_float32_networks_are_recovered_to_their_precision(form):
    network, shape = SHAPES[form]
    a = built(network, dtype=torch.float32)
    b = turned(a, *(torch.tensor(one, dtype=torch.float32) for one in world("rotated")))
    found = stitch(a, "mid", b, "mid", labelled(b, *shape), test=labelled(b, *shape, seed=6))
    assert found.transformation.shift.dtype == torch.float32
    assert torch.allclose(found.map.weight, torch.tensor(world("rotated")[0]), atol=1e-4)
    assert found.relative_accuracy == 1.0


def test_other_widths_are_joined():
    a, b = built(SHAPES["maps"][0], 5), built(SHAPES["maps"][0], 9, seed=1)
    test = labelled(b, 3, 12, 12)
    for how in ("least_squares", "procrustes", "permutation", "identity", "random"):
        found = stitch(a, "mid", b, "mid", test, how, test)
        assert found.map.weight.shape == (5, 9)
        assert 0 <= found.relative_accuracy <= 1
