"""The bias of few examples: what unrelated layers score, and when that is said."""

import warnings

import numpy as np
import pytest

import netkin as nk
from netkin.errors import InflatedWarning
from netkin.measures import find
from netkin.statistics import LayerMoments, Moments, Spectra
from netkin.statistics.kernels import CHANCE
from transcriptions import rbf_kernel


def expected(K, L):
    """Return the mean alignment of two centred kernels over all orders of the examples: tr K tr L / ((n-1) ‖K‖ ‖L‖)."""
    H = np.eye(len(K)) - 1 / len(K)
    K, L = H @ K @ H, H @ L @ H
    return np.trace(K) * np.trace(L) / ((len(K) - 1) * np.linalg.norm(K) * np.linalg.norm(L))


def said(name, *pair):
    """Return the chance level that the caution of a measure names, or None."""
    words = find(name).caution(find(name).pair(*pair) if len(pair) == 2 else pair[0])
    return float(words.partition("would score ")[2].partition(" ")[0]) if words else None


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
    words = measure.caution(measure.pair(X, Y))
    chance = expected(rbf_kernel(X, fraction), rbf_kernel(Y, fraction))
    assert f"would score {chance:.2f} on average; use `cka_rbf_debiased`" in words


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
        assert find(name).caution(find(name).pair(X, Y)) == ""
    assert find("cka").caution(Moments.of(np.ones((16, 3)), Y)) == ""
