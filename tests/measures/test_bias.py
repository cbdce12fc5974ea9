"""The bias of few examples: what unrelated layers score, and when that is said."""

import warnings

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InflatedWarning, NoValue
from netkin.measures import find
from netkin.statistics import LayerMoments, Moments, Spectra, linear_algebra
from netkin.statistics.linear_algebra import CHANCE, u_centred, u_products
from transcriptions import debiased_alignment, rbf_kernel


def expected(K, L):
    """Return the mean alignment of two centred kernels over all orders of the examples: tr K tr L / ((n-1) ‖K‖ ‖L‖)."""
    H = np.eye(len(K)) - 1 / len(K)
    K, L = H @ K @ H, H @ L @ H
    return np.trace(K) * np.trace(L) / ((len(K) - 1) * np.linalg.norm(K) * np.linalg.norm(L))


def said(name, *pair):
    """Return the chance level that the caveat of a measure names, or None."""
    caveats = find(name).caveats(find(name).pair(*pair) if len(pair) == 2 else pair[0])
    return float(str(caveats[0]).partition("would score ")[2].partition(" ")[0]) if caveats else None


WORLDS = [
    (16, 400, 400, 0),
    (100, 400, 400, 0),
    (50, 20, 30, 0),
    (200, 512, 256, 1),
    (30, 2, 300, 0),
    (40, 64, 64, 0.5),
]


@pytest.mark.parametrize("n, p, q, decay", WORLDS)
def test_the_warning_names_what_unrelated_layers_score(worlds, value, n, p, q, decay):
    X, Y = (worlds.normal(n, k) * np.arange(1, k + 1) ** (-decay / 2) for k in (p, q))
    scores = [value("cka", X, Y[worlds.rng.permutation(n)]) for _ in range(30)]
    assert np.mean(scores) > CHANCE
    assert said("cka", X, Y) == pytest.approx(np.mean(scores), abs=0.02)
    assert said("cka", X, Y) == pytest.approx(expected(X @ X.T, Y @ Y.T), abs=0.005)


@pytest.mark.parametrize("n, p, q, decay", [(1000, 30, 40, 0), (2000, 512, 256, 1), (300, 512, 512, 2), (100, 5, 5, 0)])
def test_enough_examples_for_the_layers_dimensions_need_no_warning(worlds, n, p, q, decay):
    X, Y = (worlds.normal(n, k) * np.arange(1, k + 1) ** (-decay / 2) for k in (p, q))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nk.cka(X, Y) < CHANCE
        assert nk.cka(X, X) == pytest.approx(1)


def test_the_sentence_has_the_numbers_and_a_way_out(worlds):
    sentence = (
        "16 examples are few for layers of 14.6 and 14.6 effective dimensions: those with nothing in common "
        "would score 0.97 on average; use `cka_debiased`, or more examples\\."
    )
    with pytest.warns(InflatedWarning, match=sentence) as caught:
        nk.cka(worlds.normal(16, 400), worlds.normal(16, 400))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.8])
def test_the_rbf_kernel_is_warned_about_by_its_own_dimensions(worlds, fraction):
    X, Y = worlds.normal(60, 4), worlds.normal(60, 6)
    measure = find(f"cka_rbf(fraction={fraction})")
    (caveat,) = measure.caveats(measure.pair(X, Y))
    chance = expected(rbf_kernel(X, fraction), rbf_kernel(Y, fraction))
    assert f"would score {chance:.2f} on average; use `cka_rbf_debiased`" in str(caveat)


def test_streamed_moments_and_frequencies_are_warned_about_alike(worlds):
    X, Y = worlds.normal(30, 50), worlds.normal(30, 60)
    collector = LayerMoments([(["x"], ["y"])])
    collector.update({"x": X, "y": Y})
    assert said("cka", collector["x", "y"]) == said("cka", X, Y)
    maps, others = worlds.normal(20, 6, 4, 4), worlds.normal(20, 5, 4, 4)
    shuffled = [float(nk.cka(Spectra.of(maps, others[worlds.rng.permutation(20)]))) for _ in range(60)]
    assert said("cka", Spectra.of(maps, others)) == pytest.approx(np.mean(shuffled), abs=0.01)


def test_measures_without_that_bias_and_constant_layers_are_not_warned_about(worlds):
    X, Y = worlds.normal(16, 400), worlds.normal(16, 400)
    for name in ("cka_debiased", "nbs", "procrustes_distance", "cka_uncentered"):
        assert find(name).caveats(find(name).pair(X, Y)) == []
    assert find("cka").caveats(Moments.of(np.ones((16, 3)), Y)) == []


# --- debiased, with examples far from the others ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_large_entry_leaves_the_unbiased_hsic_its_value(worlds, size, dtype):
    X, Y = (Z.astype(dtype) for Z in worlds.related(100, 6, 5))
    X[3, 2] = size
    exact = debiased_alignment(*(exact_gram(Z) for Z in (X, Y)))
    assert nk.cka_debiased(X, Y) == pytest.approx(float(exact), abs=1e-8)
    assert nk.cka_debiased(Y, X) == pytest.approx(float(exact), abs=1e-8)


def exact_gram(Z):
    """Return ZZᵀ in long double."""
    return Z.astype(np.longdouble) @ Z.astype(np.longdouble).T


def test_a_large_entry_in_streamed_moments_is_right_or_has_no_value(worlds):
    for size in (1e4, 1e6, 1e9, 1e10):
        X, Y = worlds.related(100, 6, 5)
        X[3, 2] = size
        collector = LayerMoments([(["x"], ["y"])], debiased=True)
        collector.update({"x": X, "y": Y})
        if size < 1e7:
            exact = debiased_alignment(*(exact_gram(Z) for Z in (X, Y)))
            assert float(nk.cka_debiased(collector["x", "y"])) == pytest.approx(float(exact), abs=1e-4)
        else:
            with pytest.raises(NoValue, match="its 100 examples are equally far apart, or a few outweigh all others"):
                nk.cka_debiased(collector["x", "y"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_examples_equally_far_apart_have_no_unbiased_hsic_however_turned(worlds, dtype):
    X, Y = worlds.rotation(30).astype(dtype), worlds.normal(30, 3).astype(dtype)
    with pytest.raises(NoValue, match="the unbiased HSIC of `X` with itself is zero but for rounding: its 30 examples"):
        nk.cka_debiased(X, Y)


def test_the_value_of_many_examples_is_the_same_by_parts(worlds, monkeypatch):
    monkeypatch.setattr(linear_algebra, "ENTRIES", 100_000)
    X, Y = worlds.related(700, 3, 4)
    X, Y = torch.tensor(X), torch.tensor(Y)
    whole = u_products(X, Y)
    K, L = (u_centred(Z @ Z.T) for Z in (X, Y))
    expected = torch.stack([(K * L).sum(), (K * K).sum(), (L * L).sum()])
    assert torch.allclose(torch.stack(whole), expected, rtol=1e-10)
