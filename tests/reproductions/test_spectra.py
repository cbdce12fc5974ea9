"""The claims that look at convolutional layers by frequency, or place by place, on small made-up networks."""

import numpy as np
import pytest
import torch
from torch import nn

from reproductions.svcca.networks import _corner, _gap, _halves
from reproductions.svcca.subspaces import _mixed, _spectra, circular, off_diagonal, shifts


def test_all_shifts_of_an_image_are_there_once():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    moved = shifts(image, step=2)
    assert len(moved) == 4
    assert len({tuple(one.flatten().tolist()) for one in moved}) == 4
    assert {float(one[0, 0, 0]) for one in moved} == {0.0, 2.0, 8.0, 10.0}


def test_a_circular_network_turns_shifts_into_shifts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1))
    wrapped, image = circular(model), torch.randn(1, 1, 6, 6).double()
    assert torch.allclose(wrapped(image.roll((2, 1), (2, 3))), wrapped(image).roll((2, 1), (2, 3)))
    assert not torch.allclose(wrapped(image), model.double()(image))
    assert model[0].padding_mode == "zeros"


def test_maps_closed_under_shifts_have_a_diagonal_covariance_in_the_fourier_basis():
    maps = shifts(torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), step=1)
    assert off_diagonal(torch.fft.fft2(maps, norm="ortho").flatten(2)) < 1e-12
    assert off_diagonal(maps.flatten(2)) > 0.1


def test_the_share_off_the_diagonal_is_that_of_the_covariance():
    channels = torch.randn(50, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = []
    for channel in range(2):
        squares = np.cov(channels[:, channel].numpy().T) ** 2
        expected.append(1 - np.trace(squares) / squares.sum())
    assert off_diagonal(channels) == pytest.approx(np.mean(expected))


def test_halves_are_means_of_corners():
    values = np.arange(20.0).reshape(4, 5)
    assert _halves(values) == {
        "lower with lower": values[:2, :2].mean(),
        "lower convnet with upper ResNet": values[:2, 2:].mean(),
        "upper convnet with lower ResNet": values[2:, :2].mean(),
        "upper with upper": values[2:, 2:].mean(),
    }


def test_the_control_of_the_diagonal_fails_where_the_claim_holds_exactly():
    maps = shifts(torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), step=1)
    mixed = _mixed(maps, seed=0)
    assert torch.equal(mixed.flatten(2).sort(2).values, maps.flatten(2).sort(2).values)
    assert off_diagonal(_spectra(maps)) < 1e-12 < 0.1 < off_diagonal(_spectra(mixed))


def test_the_corner_is_compared_with_the_nearest_other():
    halves = _halves(np.array([[0.9, 0.1], [0.6, 0.3]]))
    assert _gap(halves) == pytest.approx(0.9 - 0.3)
    assert _corner(halves) == pytest.approx(0.3 - 0.1)
