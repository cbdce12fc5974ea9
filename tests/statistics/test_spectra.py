"""Spectra: theorem 1 of the SVCCA paper, and what they are on other data."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk
from netkin.measures import measures
from netkin.statistics import LayerSpectra, Moments, Spectra

LINEAR = [name for name, found in measures().items() if found.facts.reads is Moments]
READABLE = [name for name in LINEAR if name not in ("pwcca", "cka_debiased")]
WHOLE = [name for name in READABLE if "svcca" not in name]  # what no cut between two conjugates can change
CENTRED = [name for name in WHOLE if "translation" in measures()[name].facts.unchanged_by]
CIRCULAR = {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "dtype": torch.float64}


def closed(base):
    """Return a data set with every circular translation of every image."""
    height, width = base.shape[2:]
    return torch.cat([base.roll((i, j), (2, 3)) for i in range(height) for j in range(width)])


@pytest.fixture(scope="module")
def layers():
    """The outputs of circular convolutions and poolings on data closed under translation: 8 × 8 and 4 × 4 maps."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, **CIRCULAR), nn.ReLU(), nn.Conv2d(3, 4, **CIRCULAR), nn.MaxPool2d(2),
        nn.Conv2d(4, 3, **CIRCULAR), nn.ReLU(), nn.AvgPool2d(2),
    )  # fmt: skip
    outputs, maps = {}, closed(torch.randn(10, 2, 8, 8, dtype=torch.float64))
    with torch.no_grad():
        for name, layer in net.named_children():
            outputs[name] = maps = layer(maps)
    # shifted by any step, an image keeps the mean of its first layers' maps
    outputs["invariant"] = outputs["1"].mean((2, 3)).square() @ torch.randn(3, 2, dtype=torch.float64)
    return outputs


def flattened(x, y):
    return Moments.of(x.flatten(1), y.flatten(1))


@pytest.fixture(scope="module")
def both(layers):
    """Return a function that gives two layers as spectra and flattened, made once for all measures."""
    return cache(lambda x, y: (Spectra.of(layers[x], layers[y]), flattened(layers[x], layers[y])))


def splits_a_pair(side, variance, by):
    """Tell whether a cut keeps one of two directions of the same size, that of k and that of -k."""
    values = side.eigen[0].flatten().sort(descending=True).values
    weights = values if by == "variance" else values.sqrt()
    kept = int((weights.cumsum(0) - weights < variance * weights.sum() * (1 - 1e-12)).sum())
    return kept < len(values) and float(values[kept] / values[kept - 1]) > 1 - 1e-6


# --- theorem 1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, y", [("1", "1"), ("0", "2"), ("4", "5"), ("3", "5")])
def test_covariances_between_different_frequencies_vanish(layers, x, y):
    X, Y = (np.fft.fft2(layers[name].numpy(), norm="ortho") for name in (x, y))
    X, Y = (Z.reshape(*Z.shape[:2], -1) - Z.reshape(*Z.shape[:2], -1).mean(0) for Z in (X, Y))
    covariance = np.einsum("nck,ndl->kcld", X.conj(), Y) / len(X)
    off = covariance.copy()
    off[np.arange(X.shape[2]), :, np.arange(X.shape[2])] = 0
    assert np.abs(covariance).max() > 1e-3
    assert np.abs(off).max() < 1e-12 * np.abs(covariance).max()


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("x, y", [("0", "2"), ("0", "1"), ("4", "5")], ids=str)
def test_maps_of_equal_size_give_the_value_of_flattened_maps(both, name, x, y):
    dft, full = (float(measures()[name](moments)) for moments in both(x, y))
    assert dft == pytest.approx(full, abs=1e-8, rel=1e-9)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("x, y", [("1", "3"), ("5", "2"), ("0", "6"), ("4", "6")], ids=str)
def test_maps_of_different_size_give_the_value_of_flattened_maps(both, name, x, y):
    dft, full = (float(measures()[name](moments)) for moments in both(x, y))
    assert dft == pytest.approx(full, abs=1e-8, rel=1e-9)


@pytest.mark.parametrize("by", ["variance", "sum"])
@pytest.mark.parametrize("variance", [0.99, 0.9, 0.7, 0.5])
@pytest.mark.parametrize("x, y", [("0", "2"), ("1", "2"), ("4", "5"), ("1", "3"), ("5", "2")], ids=str)
def test_the_cut_is_taken_over_all_frequencies_together(both, x, y, variance, by):
    name = f"svcca(variance={variance})" if by == "variance" else f"svcca_by_sum(variance={variance})"
    spectra, full = both(x, y)
    dft, flat = (float(nk.measures.find(name)(moments)) for moments in (spectra, full))
    # where the cut falls within a pair of conjugates one of them is kept, and nobody can say which
    whole = not any(splits_a_pair(side, variance, by) for side in (spectra.x, spectra.y))
    assert dft == pytest.approx(flat, abs=1e-8 if whole else 0.05)


def test_cuts_with_whole_pairs_are_among_those_tested(layers):
    spectra = [Spectra.of(layers[x], layers[y]) for x, y in (("0", "2"), ("1", "2"), ("4", "5"), ("1", "3"))]
    cuts = [(s, v, by) for s in spectra for v in (0.99, 0.9, 0.7, 0.5) for by in ("variance", "sum")]
    whole = [not any(splits_a_pair(side, v, by) for side in (s.x, s.y)) for s, v, by in cuts]
    assert sum(whole) > 8


@pytest.mark.parametrize("name", [name for name in READABLE if name != "svcca_k"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_without_space_meets_the_zero_frequency(both, name, turned):
    pair = ("1", "invariant")
    dft, full = (float(measures()[name](moments)) for moments in both(*(reversed(pair) if turned else pair)))
    assert dft == pytest.approx(full, abs=1e-8, rel=1e-9)


def test_with_a_layer_without_space_cca_is_that_of_the_channel_means(layers, value):
    dft = float(nk.cca_mean(Spectra.of(layers["1"], layers["invariant"])))
    assert dft == pytest.approx(float(value("cca_mean", layers["1"].mean((2, 3)), layers["invariant"])), abs=1e-8)


def test_two_layers_without_space_are_plain_moments(worlds):
    X, Y = worlds.related(60, 5, 9)
    for name in ("cca_mean", "cka", "cka_uncentered"):
        assert float(measures()[name](Spectra.of(X, Y))) == pytest.approx(measures()[name].function(X, Y), abs=1e-10)


# --- other data ------------------------------------------------------------------------------------------------------


def transcribed(X, Y, variance=None):
    """Return DFT-CCA of maps of equal size: section 3.1 of the paper, frequency by frequency, without any shortcut."""
    axes = tuple(range(2, X.ndim))
    X, Y = (np.fft.fftn(Z, axes=axes, norm="ortho").reshape(*Z.shape[:2], -1) for Z in (X, Y))
    X, Y = (Z - Z.mean(0) for Z in (X, Y))
    left, right = (_directions(Z, variance) for Z in (X, Y))
    correlations = [np.linalg.svd(x.conj().T @ y, compute_uv=False) for x, y in zip(left, right, strict=True)]
    count = min(sum(x.shape[1] for x in left), sum(y.shape[1] for y in right))
    return np.concatenate(correlations).sum() / count


def _directions(Z, variance):
    """Return orthonormal directions of each frequency: all, or those that a cut over all frequencies keeps."""
    parts = [np.linalg.svd(Z[..., k], full_matrices=False)[:2] for k in range(Z.shape[2])]
    sizes = np.sort(np.concatenate([s for _, s in parts]))[::-1] ** 2
    floor = 1e-12 * sizes[0]
    if variance is not None:
        floor = sizes[int(np.searchsorted(np.cumsum(sizes), variance * sizes.sum()))] * (1 - 1e-9)
    return [u[:, s**2 > floor] for u, s in parts]


WORLDS = {
    "square": ((3, 4, 4), (2, 4, 4)),
    "odd": ((3, 5, 7), (4, 5, 7)),
    "one channel": ((1, 6, 6), (1, 6, 6)),
    "a row": ((2, 1, 9), (3, 1, 9)),
    "one place": ((3, 1, 1), (2, 1, 1)),
    "a volume": ((2, 3, 4, 2), (2, 3, 4, 2)),
    "a line": ((2, 12), (3, 12)),
}


@pytest.fixture(params=WORLDS.values(), ids=WORLDS.keys())
def maps(request, worlds):
    """Return two layers' maps of 40 examples that have something in common, and means."""
    hidden = worlds.normal(40, 2, *request.param[0][1:])
    return [
        np.einsum("nc...,cd->nd...", hidden, worlds.normal(2, size[0]))
        + worlds.normal(40, *size)
        + worlds.normal(*size)
        for size in request.param
    ]


def test_any_data_give_what_the_paper_writes(maps):
    assert float(nk.cca_mean(Spectra.of(*maps))) == pytest.approx(transcribed(*maps), abs=1e-9)


def test_any_data_give_the_global_cut_of_the_paper(maps):
    spectra, cuts = Spectra.of(*maps), np.linspace(0.5, 0.95, 40)
    cut = next(c for c in cuts if not any(splits_a_pair(side, c, "variance") for side in (spectra.x, spectra.y)))
    assert float(nk.svcca(spectra, variance=cut)) == pytest.approx(transcribed(*maps, variance=cut), abs=1e-9)


@pytest.mark.parametrize("name", CENTRED)
def test_blocks_are_all_that_counts(maps, name):
    """The value is that of flattened data whose covariance has these blocks and nothing else."""
    X, Y = (torch.from_numpy(Z) for Z in maps)
    full = [_with_blocks_only(Z) for Z in (X, Y)]
    many, one = (float(measures()[name](moments)) for moments in (Spectra.of(X, Y), flattened(*full)))
    assert many == pytest.approx(one, abs=1e-8, rel=1e-8)


def _with_blocks_only(maps):
    """Return all circular translations of the centred maps: their second moment has the blocks, and zeros elsewhere."""
    centred = maps - maps.mean(0)
    shifts = [(i,) for i in range(maps.shape[2])]
    for axis in range(3, maps.ndim):
        shifts = [(*shift, i) for shift in shifts for i in range(maps.shape[axis])]
    return torch.cat([centred.roll(shift, tuple(range(2, maps.ndim))) for shift in shifts]) / len(shifts) ** 0.5


def test_about_the_origin_every_frequency_has_its_mean(maps):
    X, Y = (np.fft.fftn(Z, axes=tuple(range(2, Z.ndim)), norm="ortho").reshape(*Z.shape[:2], -1) for Z in maps)
    cross, own_x, own_y = (np.einsum("nck,ndk->kcd", A.conj(), B) for A, B in ((X, Y), (X, X), (Y, Y)))
    cosine = np.linalg.norm(cross) ** 2 / (np.linalg.norm(own_x) * np.linalg.norm(own_y))
    nuclear = np.linalg.svd(cross, compute_uv=False).sum() / (np.linalg.norm(X) * np.linalg.norm(Y))
    spectra = Spectra.of(*maps)
    assert float(nk.cka_uncentered(spectra)) == pytest.approx(cosine, abs=1e-10)
    assert float(nk.nbs_uncentered(spectra)) == pytest.approx(nuclear, abs=1e-10)
    lengths = [np.linalg.norm(Z.mean(0)) for Z in maps]
    assert float(nk.magnitude_difference(spectra)) == pytest.approx(abs(lengths[0] - lengths[1]), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_is_raised_first(worlds, dtype):
    X = torch.from_numpy(worlds.normal(60, 3, 4, 4)).to(dtype)
    Y = X.roll(1, 1) + torch.from_numpy(worlds.normal(60, 3, 4, 4)).to(dtype)
    exact = float(nk.cca_mean(Spectra.of(X.double(), Y.double())))
    assert float(nk.cca_mean(Spectra.of(X, Y))) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_offsets_do_no_harm(worlds, precision, offset):
    X, Y = (torch.from_numpy(worlds.normal(80, 3, 6, 6)).float() for _ in range(2))
    Y = X + Y / 2
    collector = LayerSpectra([(["x"], ["y"])], precision=precision)
    for part in range(0, 80, 16):
        collector.update({"x": X[part : part + 16] + offset, "y": Y[part : part + 16] - offset})
    exact = float(nk.cka(Spectra.of((X + offset).double(), (Y - offset).double())))
    assert float(nk.cka(collector["x", "y"])) == pytest.approx(exact, abs=2e-6)


@pytest.mark.parametrize("factor", [1e-300, 1e-30, 1e30, 1e200])
def test_tiny_and_huge_numbers_count_like_others(worlds, factor):
    X, Y = worlds.normal(50, 3, 4, 4), worlds.normal(50, 2, 4, 4)
    Y = Y + X[:, :2]
    for name in ("cka", "cca_mean", "nbs", "linear_regression_r2"):
        scaled, plain = (float(measures()[name](Spectra.of(Z, Y))) for Z in (X * factor, X))
        assert scaled == pytest.approx(plain, abs=1e-8), name


def test_gradients_are_those_of_finite_differences(worlds):
    torch.manual_seed(0)  # the quick check takes a random direction
    X = torch.from_numpy(worlds.normal(9, 1, 2, 4)).requires_grad_()
    Y = torch.from_numpy(worlds.normal(9, 2, 1, 2)).requires_grad_()
    for measure in (nk.cca_mean, nk.cka, nk.nbs, nk.linear_regression_r2):

        def value(x, y, measure=measure):
            return measure(Spectra.of(x, y))

        assert torch.autograd.gradcheck(value, (X, Y), atol=1e-6, fast_mode=True)
