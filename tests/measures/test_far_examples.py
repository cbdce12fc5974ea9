"""One example far from the others: distances keep the differences of the rest."""

import numpy as np
import pytest

from netkin.errors import NoValue
from netkin.statistics import LayerGrams, linear_algebra
from transcriptions import TRANSCRIPTIONS

RBF = [
    ("cka_rbf", {}),
    ("cka_rbf_debiased", {}),
    ("cka_rbf", {"fraction": 0.8}),
    ("cka_minibatch", {"batch": 64, "kernel": "rbf"}),
    ("cka_minibatch", {"batch": 20, "kernel": "rbf", "fraction": 0.8}),
]


@pytest.mark.parametrize("name, parameters", RBF, ids=str)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [6, 90])
def test_one_large_entry_costs_no_distance(worlds, value, name, parameters, size, dtype, width):
    X, Y = (Z.astype(dtype) for Z in worlds.related(64, width, 5))
    X[3, 2] = size
    exact = TRANSCRIPTIONS[name](X.astype(np.float64), Y.astype(np.float64), **parameters)
    assert value(name, X, Y, **parameters) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("name, parameters", RBF, ids=str)
def test_wide_layers_are_taken_by_parts(worlds, value, monkeypatch, name, parameters):
    X, Y = worlds.related(64, 300, 5)
    X[:, 250:] *= 1e3
    exact = TRANSCRIPTIONS[name](X, Y, **parameters)
    monkeypatch.setattr(linear_algebra, "ENTRIES", 64 * 70)
    assert value(name, X, Y, **parameters) == pytest.approx(exact, abs=1e-9)


def test_rows_that_are_the_same_point_have_no_width_still(value):
    X = np.zeros((9, 2))
    X[0] = 1e6
    with pytest.raises(NoValue, match="more than half of the examples are the same point"):
        value("cka_rbf", X, np.random.default_rng(0).normal(size=(9, 2)))


def test_nan_in_a_mini_batch_is_refused_by_any_kernel(worlds):
    X = worlds.normal(8, 3)
    X[2, 1] = np.nan
    for kernel in ("linear", "rbf"):
        with pytest.raises(ValueError, match="layer 'x' holds 1 NaN or Inf among 24 values"):
            LayerGrams([(["x"], ["x"])], batch=8, kernel=kernel).update({"x": X})
