"""Other people's arithmetic: SciPy, rsatoolbox and scikit-learn, where they compute the same number."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial

from netkin import measures as m

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here

with warnings.catch_warnings():  # their warnings are not ours to mend
    warnings.simplefilter("ignore")
    import rsatoolbox.data as rsa_data
    import rsatoolbox.rdm as rsa
    from sklearn import linear_model
    from sklearn.metrics import r2_score


def theirs(X, Y, method):
    """Return what rsatoolbox says of the squared Euclidean distances of two layers."""
    rdms = [rsa.calc_rdm(rsa_data.Dataset(Z), method="euclidean") for Z in (X, Y)]
    return float(rsa.compare(*rdms, method=method).item())


@pytest.mark.parametrize("p, q", [(4, 7), (7, 4), (30, 5)])
def test_cka_is_rsatoolbox_cosine_cov(worlds, p, q):
    X, Y = worlds.related(20, p, q)
    assert m.cka(X, Y) == pytest.approx(theirs(X, Y, "cosine_cov"), abs=1e-9)


@pytest.mark.parametrize("p, q", [(4, 7), (7, 4), (30, 5)])
def test_nbs_is_rsatoolbox_bures(worlds, p, q):
    X, Y = worlds.related(20, p, q)
    assert m.nbs(X, Y) == pytest.approx(theirs(X, Y, "bures"), abs=1e-6)


def test_the_squared_size_and_shape_distance_is_rsatoolbox_bures_metric(worlds):
    X, Y = worlds.related(20, 6, 6)
    assert m.procrustes_size_and_shape(X, Y) ** 2 / 6 == pytest.approx(theirs(X, Y, "bures_metric"), rel=1e-6)


@pytest.mark.parametrize("p, q", [(5, 5), (8, 5), (3, 5)])
def test_the_disparity_is_scipys(worlds, p, q):
    X, Y = worlds.related(25, p, q)
    padded = (np.pad(Z, ((0, 0), (0, 8 - Z.shape[1]))) for Z in (X, Y))
    assert m.procrustes_disparity(X, Y) == pytest.approx(scipy.spatial.procrustes(*padded)[2], abs=1e-10)


def test_canonical_correlations_are_the_cosines_of_scipys_subspace_angles(worlds):
    X, Y = worlds.related(40, 5, 8)
    angles = scipy.linalg.subspace_angles(X - X.mean(axis=0), Y - Y.mean(axis=0))
    assert m.cca_mean(X, Y) == pytest.approx(np.cos(angles).mean())
    assert m.cca_mean_squared(X, Y) == pytest.approx((np.cos(angles) ** 2).mean())


@pytest.mark.parametrize("p, q", [(5, 8), (8, 5)])
def test_regression_explains_what_scikit_learn_explains(worlds, p, q):
    X, Y = worlds.related(40, p, q)
    predicted = linear_model.LinearRegression().fit(X, Y).predict(X)
    assert m.linear_regression_r2(X, Y) == pytest.approx(r2_score(Y, predicted, multioutput="variance_weighted"))
