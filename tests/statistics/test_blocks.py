"""Blocks: a pair of sides in several blocks is the pair of the block-diagonal matrices."""

import pytest
import torch

from netkin.measures import measures
from netkin.statistics import LayerSpectra, Moments
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.layer_moments import medians

LINEAR = [name for name, found in measures().items() if found.facts.reads is Moments]
COMPLEX = [name for name in LINEAR if name not in ("pwcca", "magnitude_difference")]
# an embedding doubles every eigenvalue: what is a ratio, a mean or an angle stays
ALIKE = ["cka", "cca_mean", "cca_rms", "linear_regression_r2", "nbs", "procrustes_distance", "shape_distance"]
N = 40


def side(name, second, mean):
    facts = {"scale": 1.0, "resolution": 1e-15, "rounding": 2.2e-16, "norm_squares": torch.tensor(150.0)}
    return CovarianceSide(name, N, mean, second, **facts)


def pair(x, y, mean_x, mean_y, cross):
    return Moments(side("x", x, mean_x), side("y", y, mean_y), cross, torch.tensor(90.0, dtype=torch.float64))


def blocks(dtype, p=3, q=4):
    """Return second moments, means and cross moments of two layers in two blocks; only the first block has a mean."""
    torch.manual_seed(0)
    hidden = torch.randn(2, N, 2, dtype=dtype)
    X, Y = (
        hidden @ torch.randn(2, 2, width, dtype=dtype) + torch.randn(2, N, width, dtype=dtype) / 2 for width in (p, q)
    )
    X, Y = (Z - Z.mean(1, keepdim=True) for Z in (X, Y))
    mean_x, mean_y = torch.randn(2, p, dtype=dtype), torch.randn(2, q, dtype=dtype)
    mean_x[1], mean_y[1] = 0, 0
    return X.mH @ X, Y.mH @ Y, mean_x, mean_y, X.mH @ Y


def joined(matrices):
    return torch.block_diag(*matrices).unsqueeze(0)


def embedded(matrices):
    """Return complex matrices as real ones of twice the size that multiply alike."""
    upper, lower = torch.cat([matrices.real, -matrices.imag], -1), torch.cat([matrices.imag, matrices.real], -1)
    return torch.cat([upper, lower], -2)


def value(name, moments):
    return float(measures()[name](moments))


@pytest.mark.parametrize("name", LINEAR)
def test_two_blocks_are_one_block_diagonal_matrix(name):
    x, y, mean_x, mean_y, cross = blocks(torch.float64)
    one = pair(joined(x), joined(y), mean_x.reshape(1, -1), mean_y.reshape(1, -1), joined(cross))
    assert value(name, pair(x, y, mean_x, mean_y, cross)) == pytest.approx(value(name, one), abs=1e-9)


@pytest.mark.parametrize("name", COMPLEX)
def test_two_complex_blocks_are_one_block_diagonal_matrix(name):
    x, y, mean_x, mean_y, cross = blocks(torch.complex128)
    one = pair(joined(x), joined(y), mean_x.reshape(1, -1), mean_y.reshape(1, -1), joined(cross))
    assert value(name, pair(x, y, mean_x, mean_y, cross)) == pytest.approx(value(name, one), abs=1e-9)


@pytest.mark.parametrize("name", ALIKE)
def test_complex_blocks_give_what_real_matrices_of_twice_the_size_give(name):
    x, y, mean_x, mean_y, cross = blocks(torch.complex128)
    means = (torch.zeros(2, 2 * mean.shape[1], dtype=torch.float64) for mean in (mean_x, mean_y))
    real = pair(embedded(x), embedded(y), *means, embedded(cross))
    assert value(name, pair(x, y, mean_x, mean_y, cross)) == pytest.approx(value(name, real), abs=1e-9)


@pytest.mark.parametrize("name", LINEAR)
def test_blocks_may_differ_in_rank(name):
    x, y, mean_x, mean_y, cross = blocks(torch.float64, 3, 3)
    y[1, :, 1:], y[1, 1:], cross[1, :, 1:] = 0, 0, 0
    one = pair(joined(x), joined(y), mean_x.reshape(1, -1), mean_y.reshape(1, -1), joined(cross))
    assert value(name, pair(x, y, mean_x, mean_y, cross)) == pytest.approx(value(name, one), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_medians_are_those_of_torch(count, dtype):
    maps = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(count)).to(dtype)
    assert torch.equal(medians(maps), maps.median(0).values)


@pytest.mark.parametrize("width", [1, 3])
def test_medians_leave_the_rows_as_they_are(width):
    rows = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    medians(rows)
    assert torch.equal(rows, before)


def test_layers_by_twos_and_all_at_once_have_the_same_sums():
    draw = torch.Generator().manual_seed(0)
    maps = {name: torch.randn(90, 3, 4, 4, generator=draw) for name in "abc"} | {
        "d": torch.randn(90, 5, generator=draw)
    }
    by_twos = LayerSpectra([([x], [y]) for x in maps for y in maps], chunks=3)
    together = LayerSpectra([(list(maps), list(maps))], chunks=3)
    for collector in (by_twos, together):
        collector.update(maps)
    for x in maps:
        for y in maps:
            for without in (None, 1):
                ours, theirs = (one.pair(x, y, without) for one in (by_twos, together))
                torch.testing.assert_close(ours.cross, theirs.cross, rtol=0, atol=1e-12)
                torch.testing.assert_close(ours.x.second, theirs.x.second, rtol=0, atol=1e-12)
