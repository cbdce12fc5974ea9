"""Cross moments: streamed sums against the plain formulas, in both precisions, and what they refuse."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from netkin.applications.stitching.maps import METHODS, matched
from netkin.errors import InvalidValue, NoValue, ShapeError
from netkin.measures import cca_mean
from netkin.representations import recording
from netkin.representations.shapes import product_layout
from netkin.sources import load_data
from netkin.sources.architectures import tiny10
from netkin.sources.weights import load_weights
from netkin.statistics import CrossMoments, Moments
from netkin.statistics.cross_moments import product


def gathered(A, B, sizes=(17, 40)):
    """Return the moments of two layers' outputs, taken in uneven batches."""
    sums, start = CrossMoments([("x", "y")]), 0
    for size in (*sizes, len(A)):
        sums.first("x", product_layout(A[start : start + size]))
        sums.second("y", product_layout(B[start : start + size]))
        sums.batch_is_over()
        start += size
    return sums.pair("x", "y")


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


@pytest.mark.parametrize("form", ["rows", "large maps", "small maps"])
@pytest.mark.parametrize("smallest", [1e-2, 1e-4])
def test_units_of_different_sizes_are_matched_alike_in_float32(form, smallest):
    A, B = outputs(form, torch.float32, offset=0.0)
    axis = 1 if A.ndim == 4 else -1
    A = (A.movedim(axis, -1) * torch.logspace(0, np.log10(smallest), 5)).movedim(-1, axis)
    truth = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    B = (A.double().movedim(axis, -1) @ truth).movedim(-1, axis)
    errors = (matched(gathered(A, B)).weight - truth) * as_rows(A).std(0).unsqueeze(1)
    assert float(errors.abs().max()) < 1e-6 * float(B.std())


@pytest.mark.parametrize("form", ["rows", "large maps", "small maps"])
def test_units_that_nearly_depend_on_each_other_are_multiplied_in_float64(form):
    A, B = outputs(form, torch.float32)
    A.select(1 if A.ndim == 4 else -1, 4).mul_(1e-3).add_(A.select(1 if A.ndim == 4 else -1, 3))
    expected = matched(Moments.of(as_rows(A).double(), as_rows(B).double())).weight
    found = matched(gathered(A, B)).weight
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_a_unit_below_the_rounding_of_float32_counts_as_none():
    A, B = outputs("large maps", torch.float32)
    A[:, 4] = A[:, 3] * (1 + 1e-7)
    weight = matched(gathered(A, B)).weight
    assert torch.isfinite(weight).all()
    assert weight.abs().max() < 10


def test_of_several_best_maps_the_smallest_is_taken():
    A, B = outputs("rows")
    A = torch.column_stack([A, torch.full((90,), 3.0), A[:, 0] + 0.01 * A[:, 1], 1e-3 * A[:, 2]])
    rows = A - A.mean(0)
    expected = np.linalg.pinv(rows.numpy(), rcond=1e-10) @ (B - B.mean(0)).numpy()
    assert matched(gathered(A, B)).weight.numpy() == pytest.approx(expected, abs=1e-7)


def test_masked_tokens_are_left_out():
    A, B = outputs("tokens")
    mask = torch.rand(90, 7, generator=torch.Generator().manual_seed(1)) > 0.4
    sums = CrossMoments([("x", "y")])
    sums.first("x", product_layout(A, mask))
    sums.second("y", product_layout(B, mask))
    expected = matched(Moments.of(A[mask], B[mask]))
    assert torch.allclose(matched(sums.pair("x", "y")).weight, expected.weight, atol=1e-8)


def test_several_pairs_share_their_layers():
    A, B = outputs("large maps")
    sums = CrossMoments([("x", "y"), ("x", "z"), ("w", "y")])
    for name, output in (("x", A), ("w", B)):
        sums.first(name, product_layout(output))
    for name, output in (("y", B), ("z", A)):
        sums.second(name, product_layout(output))
    same = matched(sums.pair("x", "z")).weight
    assert torch.allclose(same, torch.eye(5, dtype=torch.float64), atol=1e-8)
    one = sums.pair("x", "y")
    assert one.x is sums.pair("x", "z").x


def test_layouts_and_products():
    maps = torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).reshape(2, 3, 8, 8)
    assert product_layout(maps).shape == (2, 3, 64)
    assert product_layout(maps[..., :2, :2]).shape == (8, 3)
    assert product_layout(maps.half()).dtype == torch.float32
    assert torch.equal(product(product_layout(maps), product_layout(maps)), as_rows(maps).T @ as_rows(maps))


def test_only_the_first_layer_of_cross_moments_can_be_measured():
    with pytest.raises(NoValue, match="of y only the mean was gathered, which is enough for a map and for no measure"):
        cca_mean(gathered(*outputs("rows")))


def test_what_does_not_pair_up_is_refused():
    sums = CrossMoments([("x", "y")])
    sums.first("x", product_layout(torch.ones(4, 3, 6, 6)))
    with pytest.raises(ShapeError, match=r"x and y gave activations of shapes \(4, 3, 36\) and \(5, 3, 36\)"):
        sums.second("y", product_layout(torch.ones(5, 3, 6, 6)))


def test_nan_is_refused_with_its_batch():
    A, B = outputs("large maps", torch.float32)
    A[60, 2, 1, 1] = float("nan")
    with pytest.raises(InvalidValue, match="x in batch 2 holds 1 NaN or Inf"):
        gathered(A, B)


@pytest.mark.parametrize("form", ["rows", "large maps"])
def test_nan_among_the_first_examples_is_counted(form):
    A, B = outputs(form, torch.float32)
    A[1, 2] = float("inf")
    with pytest.raises(InvalidValue, match=f"x in batch 0 holds {A[1, 2].numel()} NaN or Inf among {A[:17].numel():,}"):
        gathered(A, B)


def test_numbers_that_leave_float32_later_are_no_nan():
    A, B = outputs("large maps", torch.float32)
    A[60:] *= 1e25
    with pytest.raises(InvalidValue, match="x gave NaN or Inf, or numbers whose squares leave float32; fix"):
        matched(gathered(A, B))


def test_sums_that_leave_all_precision_are_refused():
    sums = CrossMoments([("x", "y")])
    A, B = outputs("large maps")
    for scale in (1.0, 1e160):
        sums.first("x", product_layout(A * scale))
        sums.second("y", product_layout(B))
    with pytest.raises(InvalidValue, match="x gave NaN or Inf, or numbers whose squares leave float64; fix the model"):
        sums.pair("x", "y")


def test_a_constant_layer_is_refused():
    A, B = outputs("large maps")
    with pytest.raises(NoValue, match="x is constant over"):
        matched(gathered(torch.ones_like(A), B))


DATA, CHECKPOINTS = (os.environ.get(name) for name in ("NETKIN_DATA", "NETKIN_CHECKPOINTS"))


@pytest.mark.skipif(not (DATA and CHECKPOINTS), reason="needs NETKIN_DATA and NETKIN_CHECKPOINTS: the paper's networks")
@pytest.mark.parametrize("layer", ["bn1", "bn8", "relu4"])
def test_the_papers_networks_are_matched_in_float32_as_in_float64(layer):
    nets = [tiny10().eval() for _ in range(2)]
    for seed, net in enumerate(nets):
        load_weights(net, Path(CHECKPOINTS) / f"tiny10_cifar10_seed{seed}.pt")
    images, _ = next(iter(load_data(f"cifar10,normalise=cifar10:{DATA}", batch_size=300)))
    outputs = []
    for net in nets:
        with torch.no_grad(), recording(net, [layer]) as kept:
            net(images)
        outputs.append(kept[layer])
    expected = matched(Moments.of(*(as_rows(output).double() for output in outputs))).weight
    found = matched(gathered(*outputs)).weight
    assert float((found - expected).norm() / expected.norm()) < 1e-5
