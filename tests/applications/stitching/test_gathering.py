"""Gathering: streamed sums against the plain formulas, in both precisions, and what they refuse."""

import numpy as np
import pytest
import torch

from netkin.applications.stitching.gathering import Gathering, laid_out, product
from netkin.applications.stitching.matching import METHODS, matched
from netkin.errors import NoValue, ShapeError, ValueFault
from netkin.statistics import Moments


def gathered(A, B, sizes=(17, 40)):
    """Return the moments of two layers' outputs, taken in uneven batches."""
    gathering, start = Gathering([("x", "y")]), 0
    for size in (*sizes, len(A)):
        gathering.first("x", A[start : start + size])
        gathering.second("y", B[start : start + size])
        gathering.batch_is_over()
        start += size
    return gathering.moments(("x", "y"))


def as_rows(output):
    return output.movedim(1, -1).reshape(-1, output.shape[1]) if output.ndim == 4 else output.flatten(0, -2)


SHAPES = {"rows": (90, 5), "tokens": (90, 7, 5), "large maps": (90, 5, 6, 8), "small maps": (90, 5, 2, 3)}


def outputs(form, dtype=torch.float64, offset=3.0):
    """Return outputs of two layers of which one depends on the other."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(SHAPES[form], generator=generator, dtype=torch.float64)
    mix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    axis = 1 if A.ndim == 4 else -1
    B = (A.movedim(axis, -1) @ mix).tanh().movedim(-1, axis) + 10
    return (A + offset).to(dtype), B.to(dtype)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("how", [how for how in METHODS if how != "reduced_rank"] + ["reduced_rank(k=2)"])
def test_every_method_reads_the_same_from_streamed_sums_as_from_rows(form, how):
    A, B = outputs(form)
    expected = matched(Moments.of(as_rows(A), as_rows(B)), how)
    found = matched(gathered(A, B), how)
    assert torch.allclose(found.weight, expected.weight, atol=1e-8)
    assert torch.allclose(found.bias, expected.bias, atol=1e-8)


@pytest.mark.parametrize("how", ["least_squares", "ridge", "procrustes", "lasso", "permutation"])
def test_maps_without_a_shift_read_the_same_too(how):
    A, B = outputs("large maps")
    expected = matched(Moments.of(as_rows(A), as_rows(B)), f"{how}(affine=False)")
    found = matched(gathered(A, B), f"{how}(affine=False)")
    assert torch.allclose(found.weight, expected.weight, atol=1e-8)
    assert not found.bias.any()


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_products_cost_no_more_than_the_rounding_of_the_data(form, offset):
    A, B = outputs(form, torch.float32, offset)
    expected = matched(Moments.of(as_rows(A).double(), as_rows(B).double()))
    found = matched(gathered(A, B))
    assert float((found.weight - expected.weight).norm() / expected.weight.norm()) < 2e-5
    assert torch.allclose(found(as_rows(A).double()), expected(as_rows(A).double()), atol=2e-5)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_whose_squares_leave_float32_are_multiplied_in_float64(size):
    A, B = outputs("large maps", torch.float32)
    found = matched(gathered(A * size, B))
    assert torch.allclose(found.weight * size, matched(gathered(A, B)).weight, rtol=1e-3, atol=1e-6)


def test_ill_conditioned_float32_layers_are_matched_as_well_as_their_data_allow():
    rng = np.random.default_rng(0)
    A = torch.tensor(rng.normal(size=(400, 6, 6, 6)) * np.logspace(0, -2.3, 6)[None, :, None, None])
    B = torch.tensor(rng.normal(size=(6, 4)))
    B = (A.movedim(1, -1) @ B).movedim(-1, 1)
    found = matched(gathered(A.float(), B.float()))
    assert torch.allclose(found(as_rows(A)), as_rows(B), atol=1e-4)


def test_a_units_rank_below_the_rounding_of_float32_counts_as_none():
    A, B = outputs("large maps", torch.float32)
    A[:, 4] = A[:, 3] * (1 + 1e-7)
    weight = matched(gathered(A, B)).weight
    assert torch.isfinite(weight).all()
    assert weight.abs().max() < 10


def test_masked_tokens_are_left_out():
    A, B = outputs("tokens")
    mask = torch.rand(90, 7, generator=torch.Generator().manual_seed(1)) > 0.4
    gathering = Gathering([("x", "y")])
    gathering.first("x", A, mask)
    gathering.second("y", B, mask)
    expected = matched(Moments.of(A[mask], B[mask]))
    assert torch.allclose(matched(gathering.moments(("x", "y"))).weight, expected.weight, atol=1e-8)


def test_several_pairs_share_their_layers():
    A, B = outputs("large maps")
    gathering = Gathering([("x", "y"), ("x", "z"), ("w", "y")])
    for name, output in (("x", A), ("w", B)):
        gathering.first(name, output)
    for name, output in (("y", B), ("z", A)):
        gathering.second(name, output)
    same = matched(gathering.moments(("x", "z"))).weight
    assert torch.allclose(same, torch.eye(5, dtype=torch.float64), atol=1e-8)
    one = gathering.moments(("x", "y"))
    assert one.x is gathering.moments(("x", "z")).x


def test_layouts_and_products():
    maps = torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).reshape(2, 3, 8, 8)
    assert laid_out(maps).shape == (2, 3, 64)
    assert laid_out(maps[..., :2, :2]).shape == (8, 3)
    assert laid_out(maps.half()).dtype == torch.float32
    assert torch.equal(product(laid_out(maps), laid_out(maps)), as_rows(maps).T @ as_rows(maps))


def test_the_second_layers_own_moment_was_not_gathered():
    moments = gathered(*outputs("rows"))
    with pytest.raises(NoValue, match="of y only the mean was gathered, which is enough for matching"):
        moments.y.second  # noqa: B018


def test_what_does_not_pair_up_is_refused():
    gathering = Gathering([("x", "y")])
    gathering.first("x", torch.ones(4, 3, 6, 6))
    with pytest.raises(ShapeError, match=r"x and y gave activations of shapes \(4, 3, 36\) and \(5, 3, 36\)"):
        gathering.second("y", torch.ones(5, 3, 6, 6))


def test_nan_is_refused_with_its_batch():
    A, B = outputs("large maps", torch.float32)
    A[60, 2, 1, 1] = float("nan")
    with pytest.raises(ValueFault, match="x in batch 2 holds 1 NaN or Inf"):
        gathered(A, B)


def test_sums_that_leave_all_precision_are_refused():
    gathering = Gathering([("x", "y")])
    A, B = outputs("large maps")
    for scale in (1.0, 1e160):
        gathering.first("x", A * scale)
        gathering.second("y", B)
    with pytest.raises(ValueFault, match="x gave NaN or Inf; mend the model"):
        gathering.moments(("x", "y"))


def test_a_constant_layer_is_refused():
    A, B = outputs("large maps")
    with pytest.raises(NoValue, match="x is constant over"):
        matched(gathered(torch.ones_like(A), B))
