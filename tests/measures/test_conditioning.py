"""Layers whose directions differ in size by orders of magnitude: accurate from rows, with a warning from moments."""

import numpy as np
import pytest
import torch

from netkin.measures import find, measures
from netkin.statistics import LayerMoments, Moments
from transcriptions import rounding_noise

EPS = np.finfo(np.float64).eps
CONDITIONS = [1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e10, 1e12]
ALL = [name for name, found in measures().items() if found.facts.whitens and "invertible" in found.facts.unchanged_by]


def stretched(worlds, n, p, q, condition):
    """Return two related layers, the first with directions of sizes from 1 down to 1/condition."""
    X, Y = worlds.related(n, p, q)
    sizes = np.logspace(0, -np.log10(condition), p)
    return X @ worlds.rotation(p) @ np.diag(sizes) @ worlds.rotation(p), Y


def orthonormal(X):
    """Return an orthonormal basis of the numerical range of centred `X`, in long double."""
    Xc = (X - X.mean(axis=0)).astype(np.longdouble)
    s, Vt = np.linalg.svd(Xc.astype(np.float64), full_matrices=False)[1:]
    rank = int((s**2 > max(max(X.shape) * EPS * s[0] ** 2, rounding_noise(X, EPS))).sum())
    columns, basis = Xc @ Vt[:rank].T.astype(np.longdouble), np.zeros((len(X), 0), dtype=np.longdouble)
    for column in columns.T:
        for _ in range(3):
            column = column - basis @ (basis.T @ column)
        basis = np.column_stack([basis, column / np.sqrt((column**2).sum())])
    return basis


def mean_correlation(X, Y):
    return np.linalg.svd((orthonormal(X).T @ orthonormal(Y)).astype(np.float64), compute_uv=False).mean()


@pytest.mark.parametrize("condition", CONDITIONS)
def test_correlations_are_exact_whatever_the_condition_of_a_layer(worlds, value, condition):
    X, Y = stretched(worlds, 300, 12, 10, condition)
    exact = mean_correlation(X, Y)
    assert value("cca_mean", X, Y) == pytest.approx(exact, abs=1e-9)  # by products 2e-8 at 1e5, 5e-7 at 1e6
    assert value("cca_mean", Y, X) == pytest.approx(exact, abs=1e-9)
    assert value("svcca_k", X, Y, k=1000) == pytest.approx(exact, abs=1e-9)
    assert value("shape_distance", X, Y[:, :0:-1], alpha=0.0) == pytest.approx(
        value("shape_distance", X @ worlds.rotation(12), Y[:, 1:], alpha=0.0), abs=1e-8
    )


@pytest.mark.parametrize("condition", CONDITIONS[:6])
def test_regression_is_exact_whatever_the_condition_of_a_layer(worlds, value, condition):
    X, Y = stretched(worlds, 300, 12, 10, condition)
    Q, Yc = orthonormal(X), Y - Y.mean(axis=0)
    exact = float(((Q.T @ Yc) ** 2).sum() / (Yc**2).sum())
    assert value("linear_regression_r2", X, Y) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize("condition", [1e3, 1e5, 1e6])
def test_wide_layers_of_low_rank_are_exact_too(worlds, value, condition):
    X, Y = stretched(worlds, 80, 12, 10, condition)
    wide = X @ np.linalg.qr(worlds.normal(150, 12))[0].T  # the same directions over more units than examples
    assert value("cca_mean", wide, Y) == pytest.approx(mean_correlation(X, Y), abs=1e-9)


@pytest.mark.parametrize("condition", [1e2, 1e5, 1e6])
def test_a_gradient_does_not_cost_the_value(worlds, value, condition):
    X, Y = stretched(worlds, 300, 12, 10, condition)
    x = torch.tensor(X, requires_grad=True)
    found = value("cca_mean", x, torch.tensor(Y))
    assert float(found.detach()) == pytest.approx(mean_correlation(X, Y), abs=1e-8)
    found.backward()
    # moving X along itself rescales it, which changes no correlation
    assert float((x.grad * x.detach()).sum()) == pytest.approx(0, abs=1e-6)


def streamed(X, Y):
    collector = LayerMoments([(["a"], ["b"])])
    collector.update({"a": X, "b": Y})
    return collector["a", "b"]


@pytest.mark.parametrize("name", ALL)
def test_moments_without_rows_warn_of_the_condition(worlds, name):
    found, pair = find(name), streamed(*stretched(worlds, 300, 8, 6, 1e6))
    (caveat,) = found.caveats(pair)
    assert str(caveat).startswith(
        "layer 'a' has the condition number 2e+06: of its smallest directions, read from moments"
    )
    assert "right to 6e-04 only; measure its rows" in str(caveat)


def test_well_conditioned_moments_rows_and_leading_directions_need_no_warning(worlds):
    X, Y = stretched(worlds, 300, 8, 6, 1e6)
    assert find("cca_mean").caveats(streamed(*stretched(worlds, 300, 8, 6, 1e4))) == []
    assert find("cca_mean").caveats(Moments.of(X, Y)) == []
    assert find("svcca").caveats(streamed(X, Y)) == []
    assert find("cka").caveats(streamed(X, Y)) == []
    assert find("cca_mean").caveats(streamed(np.ones((300, 8)), Y)) == []  # has no value, which says its own reason
    assert streamed(X, Y).x.condition == pytest.approx(np.linalg.cond(X - X.mean(axis=0)), rel=1e-3)


@pytest.mark.parametrize("measure", ["nbs", "procrustes_distance", "procrustes_size_and_shape"])
def test_directions_that_a_wide_layer_does_not_have_add_nothing_to_a_nuclear_norm(worlds, measure):
    """The roots of eigenvalues that are nothing but rounding would add up to about 1e-8."""
    n, related = 40, worlds.normal(40, 5)
    X, Y = related @ worlds.normal(5, 150) + 1, related @ worlds.normal(5, 30) + worlds.normal(40, 30)
    Xc, Yc = X - X.mean(0), Y - Y.mean(0)
    nuclear = np.linalg.svd(Xc.T @ Yc, compute_uv=False)[:5].sum()
    sizes = np.linalg.norm(Xc), np.linalg.norm(Yc)
    share = nuclear / sizes[0] / sizes[1]
    size_and_shape = np.sqrt(sizes[0] ** 2 + sizes[1] ** 2 - 2 * nuclear)
    wanted = {"nbs": share, "procrustes_distance": np.sqrt(2 - 2 * share), "procrustes_size_and_shape": size_and_shape}
    assert X.shape == (n, 150)
    assert float(find(measure).function(X, Y)) == pytest.approx(wanted[measure], rel=1e-11)
