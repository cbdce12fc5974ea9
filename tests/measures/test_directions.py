"""Aligned directions: against SVD and CCA written out in NumPy, and in worlds whose directions are known."""

import numpy as np
import pytest
import torch

import netkin as nk
from netkin.errors import InflatedWarning, InvalidValue, NoValue, ShapeError, UnknownName
from netkin.measures import svcca_directions
from netkin.statistics import LayerMoments, Moments
from netkin.statistics.covariances import CovarianceSide
from refusals import refusals, refused
from transcriptions import centred, leading
from worlds import RANDOM

WEIGHTS = {"variance": lambda s: s**2, "sum": lambda s: s}
quiet = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")


def transcribed(X, Y, variance=0.99, by="variance"):
    """Return correlations and canonical variates: SVD of the rows, then SVD of the bases' product; appendix A."""
    bases = [leading(Z, WEIGHTS[by], variance) for Z in (X, Y)]
    U, rho, Vt = np.linalg.svd(bases[0].T @ bases[1], full_matrices=False)
    return rho, bases[0] @ U, bases[1] @ Vt.T


def streamed(X, Y, batch=7, scale=1.0):
    collector = LayerMoments([(["x"], ["y"])])
    for start in range(0, len(X), batch):
        collector.update({"x": X[start : start + batch] * scale, "y": Y[start : start + batch]})
    return collector["x", "y"]


@quiet
@pytest.mark.parametrize("by", ["variance", "sum"])
@pytest.mark.parametrize("variance", [0.8, 0.99, 1.0])
@pytest.mark.parametrize("name", RANDOM)
def test_directions_are_those_of_the_transcription(worlds, name, variance, by):
    X, Y = worlds.by_name(name)
    rho, Zx, Zy = transcribed(X, Y, variance, by)
    for found in (
        svcca_directions(X, Y, variance=variance, by=by),
        svcca_directions(streamed(X, Y), variance=variance, by=by),
    ):
        np.testing.assert_allclose(found.correlations, rho, atol=1e-7)
        apart = np.abs(np.subtract.outer(rho, rho) + np.eye(len(rho))).min(0) > 1e-3  # not tied with another
        for ours, theirs in ((found.x.directions(X), Zx), (found.y.directions(Y), Zy)):
            same = np.abs((ours[:, : len(rho)].numpy() * theirs).sum(0))
            np.testing.assert_allclose(same[apart], 1, atol=1e-5)


@quiet
@pytest.mark.parametrize("name", RANDOM)
def test_variates_are_orthonormal_and_pair_up(worlds, name):
    X, Y = worlds.by_name(name)
    found = svcca_directions(X, Y)
    Zx, Zy = found.x.directions(X), found.y.directions(Y)
    count = len(found.correlations)
    assert count == min(found.x.kept, found.y.kept)
    for Z in (Zx, Zy):
        torch.testing.assert_close(Z.mT @ Z, torch.eye(Z.shape[1], dtype=Z.dtype), atol=1e-7, rtol=0)
    pairing = torch.zeros(found.x.kept, found.y.kept, dtype=Zx.dtype)
    pairing[:count, :count] = torch.diag(found.correlations)
    torch.testing.assert_close(Zx.mT @ Zy, pairing, atol=1e-7, rtol=0)


@quiet
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("by, measure", [("variance", nk.svcca), ("sum", nk.svcca_by_sum)])
def test_the_mean_correlation_is_the_measure(worlds, name, by, measure):
    X, Y = worlds.by_name(name)
    for moments in (Moments.of(X, Y), streamed(X, Y)):
        for variance in (0.9, 0.99):
            found = svcca_directions(moments, variance=variance, by=by)
            assert found.similarity == pytest.approx(float(measure(moments, variance=variance)), abs=1e-9)
            assert float(found.correlations.max()) <= 1


@quiet
@pytest.mark.parametrize("name", RANDOM)
def test_singular_values_and_their_variance(worlds, name):
    X, Y = worlds.by_name(name)
    sigma = np.linalg.svd(centred(X), compute_uv=False)
    for found in (svcca_directions(X, Y).x, svcca_directions(streamed(X, Y)).x):
        np.testing.assert_allclose(found.singular_values, sigma[: len(found.singular_values)], rtol=1e-6)
        np.testing.assert_allclose(sigma[len(found.singular_values) :], 0, atol=1e-6)
        assert found.variance == pytest.approx((sigma[: found.kept] ** 2).sum() / (sigma**2).sum(), abs=1e-9)
        assert found.variance >= 0.99
        assert found.kept == 1 or (sigma[: found.kept - 1] ** 2).sum() / (sigma**2).sum() < 0.99


@quiet
@pytest.mark.parametrize("name", RANDOM)
def test_the_projection_takes_every_unit_to_its_nearest_in_the_span(worlds, name):
    X, Y = worlds.by_name(name)
    for found in (svcca_directions(X, Y), svcca_directions(streamed(X, Y))):
        for k in (1, found.x.kept):
            encode, decode = (part.numpy() for part in found.x.projection(k))
            mean, Z = X.mean(0), found.x.directions(X).numpy()[:, :k]
            projected = mean + (X - mean) @ encode @ decode
            np.testing.assert_allclose(projected, mean + Z @ np.linalg.lstsq(Z, X - mean, rcond=None)[0], atol=1e-6)
            np.testing.assert_allclose(mean + (projected - mean) @ encode @ decode, projected, atol=1e-6)  # idempotent


@quiet
@pytest.mark.parametrize("name", RANDOM)
def test_the_basis_is_orthonormal_and_spans_the_weights(worlds, name):
    found = svcca_directions(*worlds.by_name(name)).x
    basis = found.basis(found.kept)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(found.kept, dtype=basis.dtype), atol=1e-9, rtol=0)
    torch.testing.assert_close(found.transform @ torch.ones(found.kept, dtype=basis.dtype),
                               basis.mT @ (basis @ found.transform.sum(1)), atol=1e-9, rtol=1e-9)  # fmt: skip
    assert found.basis(1).shape == (1, found.width)


def test_known_directions_are_found(worlds):
    rho = np.array([0.9, 0.6, 0.3])
    X, Y = worlds.correlated(200, rho, [1.0, 2.0, 3.0], [3.0, 1.0, 2.0])
    R = worlds.rotation(3)
    found = svcca_directions(X @ R + 5, Y, variance=1.0)
    np.testing.assert_allclose(found.correlations, rho, atol=1e-12)
    np.testing.assert_allclose(found.x.mean, 5, atol=1e-12)
    signal = found.x.directions(X @ R + 5).numpy()
    np.testing.assert_allclose(np.abs(signal), np.abs(X / [1, 2, 3]), atol=1e-10)


def test_the_unpaired_rest_is_uncorrelated_and_falls_by_variance(worlds):
    Q = worlds.orthonormal(100, 5)
    X, Y = Q * [1.0, 4.0, 2.0, 3.0, 5.0], Q[:, [2]]
    found = svcca_directions(X, Y, variance=1.0)
    assert (len(found.correlations), found.x.kept, found.y.kept) == (1, 5, 1)
    np.testing.assert_allclose(found.x.directions(X), Q[:, [2, 4, 1, 3, 0]], atol=1e-10)


def test_tied_pairs_fall_by_variance(worlds):
    """All correlations of a layer with its rotated copy are 1; its directions are then its principal ones."""
    X = worlds.orthonormal(60, 4) * [1.0, 3.0, 2.0, 5.0]
    Y = X @ worlds.rotation(4)
    found = svcca_directions(X, Y, variance=1.0)
    np.testing.assert_allclose(found.correlations, 1, atol=1e-12)
    np.testing.assert_allclose(found.x.directions(X), X[:, [3, 1, 2, 0]] / [5, 3, 2, 1], atol=1e-9)
    np.testing.assert_allclose(found.y.directions(Y), found.x.directions(X), atol=1e-9)


@quiet
def test_a_layer_that_spans_all_examples_leaves_principal_directions(worlds):
    X, Y = worlds.normal(20, 8) * np.linspace(1, 3, 8), worlds.normal(20, 40)
    found = svcca_directions(X, Y, variance=1.0)
    np.testing.assert_allclose(found.correlations, 1, atol=1e-9)
    U = np.linalg.svd(centred(X), full_matrices=False)[0]
    np.testing.assert_allclose(np.abs((found.x.directions(X).numpy() * U).sum(0)), 1, atol=1e-7)


@quiet
@pytest.mark.parametrize("name", RANDOM)
def test_signs_do_not_depend_on_chance(worlds, name):
    X, Y = worlds.by_name(name)
    one, other = svcca_directions(X, Y), svcca_directions(streamed(X, Y))
    strongest = one.x.patterns.abs().argmax(1, keepdim=True)
    assert bool((one.x.patterns.gather(1, strongest) > 0).all())
    apart = (one.correlations[:-1] - one.correlations[1:]).min() > 1e-3 if len(one.correlations) > 1 else True
    if apart:
        count = len(one.correlations)
        torch.testing.assert_close(one.y.transform[:, :count], other.y.transform[:, :count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e12])
def test_transforms_are_in_the_units_of_the_layer(worlds, scale):
    X, Y = worlds.related(80, 6, 5)
    one = svcca_directions(X, Y)
    for other in (svcca_directions(X * scale, Y), svcca_directions(streamed(X, Y, scale=scale))):
        torch.testing.assert_close(other.x.transform * scale, one.x.transform, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(other.x.patterns / scale, one.x.patterns, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(other.x.singular_values / scale, one.x.singular_values, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(other.x.activity / scale**2, one.x.activity, atol=1e-9, rtol=1e-6)


def test_float32_matrices_are_read_in_float64(worlds):
    X, Y = (Z.astype(np.float32) for Z in worlds.related(80, 6, 5))
    found = svcca_directions(X, Y)
    assert found.x.transform.dtype == torch.float64
    np.testing.assert_allclose(
        found.correlations, svcca_directions(X.astype(float), Y.astype(float)).correlations, atol=1e-9
    )
    assert found.x.directions(torch.from_numpy(X)).dtype == torch.float64


def test_idle_units_get_no_weight(worlds):
    X, Y = worlds.with_idle_units(50, 4), worlds.normal(50, 3)
    found = svcca_directions(X, Y, variance=1.0)
    assert found.x.kept == 4
    np.testing.assert_allclose(found.x.transform[4:6], 0, atol=1e-9)  # the dead and the stuck unit
    np.testing.assert_allclose(found.x.transform[6], found.x.transform[0], atol=1e-9)  # the double shares the weight


def test_matrices_with_gradients_are_read_without(worlds):
    X, Y = (torch.tensor(Z, requires_grad=True) for Z in worlds.related(40, 5, 4))
    plain = svcca_directions(X.detach(), Y.detach())
    for found in (svcca_directions(X, Y), svcca_directions(Moments.of(X, Y))):
        assert not found.x.transform.requires_grad
        assert not found.x.patterns.requires_grad
        torch.testing.assert_close(found.x.transform, plain.x.transform, atol=1e-9, rtol=1e-9)


def test_moments_of_a_swapped_pair_give_swapped_directions(worlds):
    moments = streamed(*worlds.related(60, 5, 9))
    one, other = svcca_directions(moments), svcca_directions(moments.swapped)
    torch.testing.assert_close(one.correlations, other.correlations)
    torch.testing.assert_close(one.x.transform.abs(), other.y.transform.abs())


# --- the paper's own examples -----------------------------------------------------------------------------------------


def test_cca_alone_cannot_tell_noise_from_signal_and_svcca_can(worlds):
    """B.0.1: B holds A and 150 directions of noise, C holds A and 150 directions of weight."""
    Q = worlds.orthonormal(1000, 350)
    A, noise, useful = Q[:, :50], Q[:, 50:200], Q[:, 200:350]
    B, C = np.hstack([A, 0.005 * noise]), np.hstack([A, useful])
    cca = [svcca_directions(A, other, variance=1.0) for other in (B, C)]
    for found in cca:
        np.testing.assert_allclose(found.correlations, 1, atol=1e-8)
    assert [found.y.kept for found in cca] == [200, 200]  # to CCA both are alike
    kept = [svcca_directions(A, other).y.kept for other in (B, C)]
    assert kept == [50, 198]  # 99% of equal variances over 200
    # two layers that share A alone: beside noise that is all they have, beside weight a quarter of it
    other = worlds.orthonormal(1000, 450)
    other -= Q @ (Q.T @ other)
    fresh = np.linalg.qr(other)[0][:, :150]
    for weight, expected in ((0.005, 1.0), (1.0, 0.25)):
        pair = [np.hstack([A, weight * rest]) for rest in (noise, fresh)]
        assert float(nk.cca_mean(*pair)) == pytest.approx(0.25, abs=1e-6)
        assert float(nk.svcca(*pair)) == pytest.approx(expected, abs=0.02)


def test_distorted_neurons_give_the_signal_back(worlds):
    """Fig. App. 1: three neurons permuted, rotated and scaled; CCA with the original recovers it."""
    signal = np.maximum(worlds.normal(500, 3) + np.array([0.5, 0.0, -0.5]), 0)
    distorted = (signal[:, [2, 0, 1]] @ worlds.rotation(3)) * [0.1, 1.0, 7.0]
    found = svcca_directions(signal, distorted, variance=1.0)
    np.testing.assert_allclose(found.correlations, 1, atol=1e-10)
    # what the distorted neurons say, carried over to the original ones pair by pair
    recovered = found.x.mean + found.y.directions(distorted) @ found.x.patterns
    np.testing.assert_allclose(recovered, signal, atol=1e-9)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_few_examples_are_warned_about(worlds):
    with pytest.warns(InflatedWarning, match="9 examples are fewer than the 14 . 4 features"):
        svcca_directions(*worlds.by_name("few_examples"))


@pytest.mark.parametrize("k", [0, 9, -1])
def test_more_directions_than_there_are_refused(worlds, k):
    found = svcca_directions(*worlds.related(60, 8, 8), variance=1.0).x
    for ask in (found.basis, found.projection):
        with pytest.raises(
            InvalidValue, match=rf"`k` must lie between 1 and 8, the directions kept of 8 features; got {k}"
        ):
            ask(k)
        with refused(InvalidValue, "k"):
            ask(2.5)


def test_another_layer_is_refused(worlds):
    found = svcca_directions(*worlds.related(60, 8, 5)).x
    with pytest.raises(ShapeError, match="`X` has 5 features and the directions are of a layer with 8"):
        found.directions(worlds.normal(10, 5))


def test_rules_and_shares_are_refused(worlds):
    X, Y = worlds.related(60, 8, 5)
    refusals(
        (lambda: svcca_directions(X, Y, by="size"), UnknownName, "by"),
        (lambda: svcca_directions(X, Y, variance=99), InvalidValue, "variance"),
    )


def test_what_is_no_pair_is_refused(worlds):
    X, Y = worlds.related(60, 8, 5)
    refusals(
        (lambda: svcca_directions(X), InvalidValue, ""),
        (lambda: svcca_directions(Moments.of(X, Y), Y), InvalidValue, ""),
        (lambda: svcca_directions(X, Y[1:]), ShapeError, ""),
    )


def test_a_constant_layer_is_refused(worlds):
    with pytest.raises(NoValue, match="`Y` is constant over the 30 examples"):
        svcca_directions(worlds.normal(30, 3), np.ones((30, 2)))


def test_blocks_of_frequencies_are_refused(worlds):
    second = torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    side = CovarianceSide("layer 'conv'", 50, torch.zeros(4, 3), second, scale=1.0, resolution=1e-16, rounding=1e-16)
    with pytest.raises(NoValue, match="these moments have 4, one for each frequency; .* instead of 'dft'"):
        svcca_directions(Moments(side, side, second))


def test_they_tell_what_they_are(worlds):
    found = svcca_directions(*worlds.rotated_copy(50, 4), variance=1.0)
    assert repr(found).startswith("Directions(4 pairs, mean correlation 1.000, AlignedSide(4 directions of 4 features")
    assert found.x.n == 50
