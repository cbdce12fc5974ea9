"""Frequencies: half of them stand for all, and those that alias lie in one block."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import NoValue, ShapeError
from netkin.statistics.frequencies import common_grid, frequencies, off_block_share, regrouped
from refusals import refusals

CPU = torch.device("cpu")
GRIDS = [(8, 8), (5, 7), (4, 6), (1, 6), (6, 1), (2, 2), (9,), (3, 4, 5)]


def transform(maps):
    """Return the whole transform, one n × c matrix for each place of the grid, by NumPy."""
    axes = tuple(range(2, maps.ndim))
    return np.moveaxis(np.fft.fftn(maps, axes=axes, norm="ortho").reshape(*maps.shape[:2], -1), 2, 0)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_chosen_frequencies_and_their_conjugates_are_all_of_them(worlds, grid):
    maps = worlds.normal(3, 2, *grid)
    here = frequencies(grid, CPU)
    whole = here.whole(here.blocks(torch.from_numpy(maps))).numpy()
    every = transform(maps)
    assert len(whole) == len(every) == np.prod(grid)
    order = [int(np.argmin(np.abs(every - one).sum((1, 2)))) for one in whole]
    assert sorted(order) == list(range(len(every)))
    assert whole == pytest.approx(every[order], abs=1e-12)
    assert order[0] == 0


@pytest.mark.parametrize("grid, count", [((8, 8), 34), ((32, 32), 514), ((5, 7), 18), ((), 1), ((2, 2), 4)])
def test_one_of_each_conjugate_pair_is_computed(grid, count):
    here = frequencies(grid, CPU)
    assert len(here) == count
    assert len(here) + len(here.twice) == np.prod(grid)
    assert here.total(torch.ones(count)) == np.prod(grid)


def test_a_layer_without_space_is_one_real_block(worlds):
    rows = torch.from_numpy(worlds.normal(5, 3))
    assert torch.equal(frequencies((), CPU).blocks(rows), rows.unsqueeze(0))


@pytest.mark.parametrize(
    "a, b, common",
    [
        ((8, 8), (8, 8), (8, 8)),
        ((8, 8), (4, 4), (4, 4)),
        ((4, 4), (8, 8), (4, 4)),
        ((8, 4), (4, 8), (4, 4)),
        ((6, 6), (4, 4), None),
        ((8, 8), (4, 3), None),
        ((8, 8), (8, 8, 8), None),
        ((8, 8), (), ()),
        ((), (), ()),
        ((7, 5), (1, 5), (1, 5)),
    ],
)
def test_maps_meet_where_one_size_divides_the_other(a, b, common):
    assert common_grid(a, b) == common


def test_regrouping_puts_frequencies_that_alias_into_one_block(worlds):
    """The block of frequency k of the 4 × 4 grid spans those frequencies of the 8 × 8 grid that are k modulo 4."""
    maps = worlds.normal(60, 2, 8, 8)
    small = transform(regrouped(torch.from_numpy(maps), (4, 4)).numpy())
    large = transform(maps)
    for k in range(4):
        for m in range(4):
            aliased = np.concatenate([large[8 * i + j] for i in (k, k + 4) for j in (m, m + 4)], axis=1)
            map_between = np.linalg.lstsq(aliased, small[4 * k + m], rcond=None)[0]
            assert aliased @ map_between == pytest.approx(small[4 * k + m], abs=1e-10)
            assert map_between.conj().T @ map_between == pytest.approx(np.eye(8), abs=1e-10)


def test_regrouping_commutes_with_the_steps_that_both_maps_share(worlds):
    maps = torch.from_numpy(worlds.normal(2, 3, 8, 6))
    shifted = regrouped(maps.roll((2, 3), (2, 3)), (4, 2))
    assert torch.equal(shifted, regrouped(maps, (4, 2)).roll((1, 1), (2, 3)))


def full_share(covariance, channels, grid):
    """Return the share of energy off the blocks of a covariance of flattened maps, with all of it written out."""
    places = int(np.prod(grid))
    fourier = transform(np.eye(places).reshape(places, 1, *grid))[..., 0]
    turned = np.kron(np.eye(channels), fourier)
    energy = np.abs(turned @ covariance @ turned.conj().T).reshape(channels, places, channels, places) ** 2
    return 1 - np.einsum("ikjk->", energy) / energy.sum()


def test_the_share_off_the_blocks_is_that_of_the_covariance_behind_the_data(worlds):
    factor = worlds.normal(32, 32) * np.linspace(2, 0.1, 32)
    maps = (worlds.normal(2000, 32) @ factor.T).reshape(-1, 2, 4, 4)
    assert off_block_share(maps + 100) == pytest.approx(full_share(factor @ factor.T, 2, (4, 4)), abs=0.03)
    few = [off_block_share(maps[i : i + 40]) for i in range(0, 2000, 40)]
    assert np.mean(few) == pytest.approx(full_share(factor @ factor.T, 2, (4, 4)), abs=0.03)


def test_the_share_is_that_of_the_larger_blocks_on_a_smaller_grid(worlds):
    maps = worlds.normal(50, 2, 4, 4) * np.linspace(0.1, 2, 16).reshape(4, 4)
    regrouped_maps = regrouped(torch.from_numpy(maps), (2, 2))
    assert off_block_share(maps, (2, 2)) == pytest.approx(off_block_share(regrouped_maps), abs=1e-12)
    assert off_block_share(maps, (2, 2)) < off_block_share(maps)
    assert off_block_share(maps, ()) == pytest.approx(0, abs=1e-12)


def test_data_closed_under_translation_have_nothing_off_the_blocks(worlds):
    base = worlds.normal(4, 2, 4, 4)
    closed = np.concatenate([np.roll(base, (i, j), (2, 3)) for i in range(4) for j in range(4)])
    assert off_block_share(closed) == 0


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_the_share_knows_no_units(worlds, factor):
    maps = worlds.normal(20, 2, 4, 4) * np.linspace(0.1, 2, 16).reshape(4, 4)
    assert off_block_share(maps * factor) == pytest.approx(off_block_share(maps), abs=1e-12)


def test_constant_maps_have_no_energy_anywhere():
    assert nk.off_block_share(torch.ones(5, 2, 4, 4)) == 0


def test_too_few_examples_or_axes_are_refused():
    refusals(
        (lambda: off_block_share(torch.randn(3, 2, 4, 4)), NoValue, ""),
        (lambda: off_block_share(torch.randn(3)), ShapeError, "maps"),
        (lambda: off_block_share(torch.randn(0, 2, 4, 4)), ShapeError, "maps"),
    )
