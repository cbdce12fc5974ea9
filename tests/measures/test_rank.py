"""The numerical rank: what rounding of the data and of the products leaves of a layer."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import NoValue
from netkin.measures import measures
from netkin.statistics import LayerMoments, Moments, Spectra
from netkin.statistics.covariances import CovarianceSide
from netkin.statistics.rows import RowsSide
from transcriptions import spectrum
from worlds import Worlds

AFFINE = {"rotation", "scaling", "translation", "invertible"}
ALL = [name for name, found in measures().items() if found.facts.whitens and found.facts.unchanged_by == AFFINE]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def of_rank(worlds, n, p, rank, offset=0.0):
    """Return a layer of the given rank about an offset."""
    return worlds.normal(n, rank) @ worlds.normal(rank, p) + offset


def resolution(dtype):
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, p, rank", [(1000, 256, 32), (100, 16, 4), (60, 200, 10), (300, 40, 40)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_the_rank_is_that_of_the_data_before_they_were_rounded(worlds, dtype, n, p, rank, offset):
    if offset and dtype in (torch.bfloat16, torch.float16):
        rank = min(rank, 10)  # an offset of ten leaves halves little room for small directions
    X = torch.tensor(of_rank(worlds, n, p, rank, offset)).to(dtype)
    side = Moments.of(X, X).x
    assert side.rank == len(spectrum(X.double().numpy(), resolution(dtype))[1])
    assert side.rank == rank


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotated_copy_of_low_rank_is_alike_in_every_precision(worlds, value, dtype):
    X = of_rank(worlds, 1000, 256, 32)
    pair = [torch.tensor(Z).to(dtype) for Z in (X, X @ worlds.rotation(256))]
    assert float(value("cca_mean", *pair)) == pytest.approx(1, abs=1e-5)  # 0.5 by noise that counted as rank
    assert float(value("eigenspace_overlap", *pair)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_offset_adds_no_rank(dtype):
    torch.manual_seed(0)
    layer, x, Y = torch.nn.Linear(4, 16).to(dtype), torch.randn(100, 4, dtype=dtype), torch.randn(100, 6, dtype=dtype)
    raised = (layer(x) + 10).detach()
    assert float(nk.cca_mean(raised, Y)) == pytest.approx(float(nk.cca_mean(x, Y)), abs=1e-6)
    collector = LayerMoments([(["x"], ["y"])])
    collector.update({"x": raised, "y": Y})
    assert collector["x", "y"].x.rank == 4
    assert float(nk.cca_mean(collector["x", "y"])) == pytest.approx(float(nk.cca_mean(x, Y)), abs=1e-6)


def test_numpy_halves_are_known_as_halves(worlds):
    X = of_rank(worlds, 400, 64, 8).astype(np.float16)
    assert Moments.of(X, X).x.resolution == np.finfo(np.float16).eps
    assert Moments.of(X, X).x.rank == Moments.of(torch.from_numpy(X), X).x.rank == 8
    assert Moments.of(X.astype(np.float32), X).x.resolution == np.finfo(np.float32).eps


def test_all_sides_cut_alike(worlds):
    X = of_rank(worlds, 200, 24, 5, offset=10.0).astype(np.float32)
    rows = RowsSide(torch.tensor(X), precision=torch.float64)
    streamed = CovarianceSide(
        "X", 200, rows.mean, rows.second, scale=1.0, resolution=rows.resolution, rounding=rows.rounding
    )
    wide = RowsSide(torch.tensor(X[:12]), precision=torch.float64)
    assert rows.noise == pytest.approx(streamed.noise)
    assert (rows.rank, streamed.rank, wide.rank) == (5, 5, 5)


def test_frequencies_share_the_rounding_of_their_maps(worlds):
    hidden = worlds.normal(150, 3, 4, 4)
    maps = np.einsum("ncxy,cd->ndxy", hidden, worlds.normal(3, 12)) + 10
    single, double = (Spectra.of(maps.astype(dtype), maps.astype(dtype)).x.rank for dtype in (np.float32, np.float64))
    assert single == double == 3 * 16


def test_rounding_of_small_directions_is_not_taken_for_the_directions(worlds):
    # a direction a thousand times smaller than the others, well above the rounding of its units
    X = worlds.normal(200, 6) * np.array([1, 1, 1, 1, 1, 1e-3]) @ worlds.rotation(6)
    for dtype, rank in ((np.float64, 6), (np.float32, 6)):
        assert Moments.of(X.astype(dtype), X.astype(dtype)).x.rank == rank


def test_a_stuck_unit_has_no_rounding_of_its_own():
    X = Worlds(1).normal(100, 4) * 0.01
    stuck = np.concatenate([X, np.full((100, 1), 1e6)], axis=1).astype(np.float32)
    assert Moments.of(stuck, X).x.rank == 4


@pytest.mark.parametrize("name", [*ALL, "svcca", "svcca_k", "pwcca", "linear_regression_r2", "shape_distance"])
def test_a_layer_that_is_nothing_but_rounding_cannot_be_whitened(worlds, value, name):
    X = torch.tensor(1 + 0.003 * worlds.normal(60, 3)).bfloat16()
    assert len(X.unique()) > 3
    with pytest.raises(NoValue, match="`X` varies by no more than the rounding of its data, 0.008 of their size"):
        value(name, X, worlds.normal(60, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_that_vary_little_are_not_called_constant(worlds, value, dtype):
    X = torch.tensor(1 + 0.01 * worlds.normal(60, 3)).to(dtype)
    assert X.float().std() > 0
    assert float(value("cka", X, X)) == pytest.approx(1)
