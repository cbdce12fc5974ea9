"""`dft_cca`: two layers' maps, one number."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InflatedWarning, InvalidValue, NoValue, ShapeError
from netkin.statistics import Spectra
from refusals import refusals


@pytest.fixture
def maps(worlds):
    X = worlds.normal(60, 3, 6, 4)
    return X, np.roll(X[:, :2], 1, 3) + worlds.normal(60, 2, 6, 4)


def transcribed(X, Y):
    """Return the mean of all canonical correlations, frequency by frequency, by QR."""
    X, Y = (np.fft.fft2(Z - Z.mean(0), norm="ortho") for Z in (X, Y))
    correlations = []
    for k in np.ndindex(X.shape[2:]):
        x, y = (np.linalg.qr(Z[(slice(None), slice(None), *k)])[0] for Z in (X, Y))
        correlations.extend(np.linalg.svd(x.conj().T @ y, compute_uv=False))
    return np.mean(correlations)


def test_it_is_the_pooled_mean_of_all_correlations(maps):
    assert nk.dft_cca(*maps) == pytest.approx(transcribed(*maps), abs=1e-10)


def test_it_pools_rather_than_averages_frequency_by_frequency(worlds):
    """Frequencies of lower rank count for less: here zero frequency alone has the second channel."""
    X = worlds.normal(50, 2, 4, 4)
    X[:, 1] = X[:, 1].mean((1, 2), keepdims=True)
    Y = X.copy()
    Y[:, 1] = worlds.normal(50, 1, 1)
    assert nk.dft_cca(X, Y) == pytest.approx((16 + _small_correlation(X, Y)) / 17, abs=1e-9)


def _small_correlation(X, Y):
    x, y = (np.linalg.qr(Z.mean((2, 3)) - Z.mean((0, 2, 3)))[0] for Z in (X, Y))
    return np.linalg.svd(x.T @ y, compute_uv=False)[1]


def test_a_variance_makes_it_svcca(maps):
    spectra = Spectra.of(*maps)
    assert nk.dft_cca(*maps, variance=0.9) == float(nk.svcca(spectra, variance=0.9))
    assert nk.dft_cca(*maps, variance=0.9) != nk.dft_cca(*maps)


def test_arrays_give_a_number_and_tensors_a_tensor(maps):
    assert isinstance(nk.dft_cca(*maps), float)
    value = nk.dft_cca(*map(torch.from_numpy, maps))
    assert isinstance(value, torch.Tensor)
    assert float(value) == nk.dft_cca(*maps)


def test_it_is_unchanged_by_what_mixes_channels_or_shifts_maps(maps, worlds):
    X, Y = maps
    mixed = np.einsum("nchw,cd->ndhw", X, worlds.invertible(3)) + worlds.normal(3, 6, 4)
    kernel = worlds.normal(6, 4)
    filtered = np.fft.ifft2(np.fft.fft2(X) * np.fft.fft2(kernel)).real
    for other in (mixed, np.roll(X, (2, 1), (2, 3)), filtered):
        assert nk.dft_cca(other, Y) == pytest.approx(nk.dft_cca(X, Y), abs=1e-8)
    assert nk.dft_cca(worlds.normal(60, 3, 6, 4), Y) < nk.dft_cca(X, Y) - 0.05


def test_it_is_symmetric(maps, worlds):
    X, Y = maps
    small = worlds.normal(60, 2, 3, 2) + X[:, :2, ::2, ::2]
    assert nk.dft_cca(X, Y) == pytest.approx(nk.dft_cca(Y, X), abs=1e-12)
    assert nk.dft_cca(X, small) == pytest.approx(nk.dft_cca(small, X), abs=1e-12)


def test_activations_by_this_shape_are_what_it_takes(worlds):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten())
    images = torch.randn(40, 2, 8, 8)
    rows = nk.activations(model, ["0", "1", "2"], images, shape="dft")
    assert rows["0"].shape == (40, 3, 6, 6)
    assert rows["2"].shape == (40, 108)
    with torch.no_grad():
        assert float(nk.dft_cca(rows["0"], rows["1"])) == float(nk.dft_cca(model[0](images), model[:2](images)))


def test_few_examples_are_warned_of(worlds):
    with pytest.warns(InflatedWarning, match="4 examples are fewer than the 3 \\+ 3 features.*at each frequency"):
        nk.dft_cca(worlds.normal(4, 3, 4, 4), worlds.normal(4, 3, 4, 4))


def test_what_it_can_not_take_is_refused(worlds):
    maps = worlds.normal(20, 2, 4, 4)
    refusals(
        (lambda: nk.dft_cca(maps.reshape(20, 32), maps.reshape(20, 32)), ShapeError, ""),
        (lambda: nk.dft_cca(maps[:, 0, 0, 0], maps), ShapeError, "X"),
        (lambda: nk.dft_cca(maps, maps[1:]), ShapeError, ""),
        (lambda: nk.dft_cca(maps, maps[:, :, :3, :3]), NoValue, ""),
        (lambda: nk.dft_cca(maps, maps, variance=2), InvalidValue, "variance"),
        (lambda: nk.dft_cca(maps * 1j, maps), InvalidValue, "X"),
    )
