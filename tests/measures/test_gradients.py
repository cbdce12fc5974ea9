"""Autograd through the measures: right in float64, finite where units are idle and spectra degenerate."""

import warnings

import pytest
import torch
from torch.autograd import gradcheck

import netkin as nk
from netkin.errors import InflatedWarning
from netkin.measures import measures
from netkin.statistics import Spectra
from quickly import slow_but

NORMS = [
    "cka", "cka_debiased", "cka_uncentered", "angular_cka", "cka_rbf", "cka_rbf_debiased", "cka_minibatch", "nbs",
    "nbs_uncentered", "procrustes_distance", "procrustes_angular", "procrustes_size_and_shape", "procrustes_disparity",
]  # fmt: skip
WHITENING = [
    "cca_mean", "cca_mean_squared", "cca_rms", "svcca", "svcca_by_sum", "svcca_k", "linear_regression_r2",
    "eigenspace_overlap", "eigenspace_overlap_uncentered", "shape_distance", "gulp", "gaussian_mutual_information",
]  # fmt: skip
DIFFERENTIABLE = NORMS + WHITENING
COVARIANCE = {"whitening": "covariance", "alpha": 0.3}
PARAMETERS = {"svcca": {"variance": 0.8}, "svcca_by_sum": {"variance": 0.8}, "svcca_k": {"k": 2}}


@pytest.fixture(autouse=True)
def _few_examples_are_fine_here():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InflatedWarning)
        yield


def leaf(array, dtype=torch.float64):
    return torch.tensor(array, dtype=dtype, requires_grad=True)


def checked(name, of_x, of_y, X, Y, *, entry_by_entry=False, **parameters):
    """Compare the derivative of a measure of ``of_x(X)`` and ``of_y(Y)`` with finite differences."""
    function = measures()[name].function
    torch.manual_seed(0)  # the quick check takes a random direction
    return gradcheck(
        lambda x, y: function(of_x(x), of_y(y), **parameters), (leaf(X), leaf(Y)),
        atol=1e-5, rtol=1e-4, fast_mode=not entry_by_entry,
    )  # fmt: skip


def as_is(x):
    return x


def with_idle_units(x):
    """Put a dead and a stuck unit beside the live ones."""
    return torch.cat([x, torch.zeros_like(x[:, :1]), torch.full_like(x[:, :1], 2.0)], dim=1)


def with_a_duplicate(x):
    return torch.cat([x, x[:, :1], x[:, 1:2]], dim=1)


def widened(x):
    """Spread the units over more units than there are rows, keeping the rank."""
    mixing = torch.randn(x.shape[1], len(x) + 6, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return x @ mixing


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_right(worlds, name):
    assert checked(name, as_is, as_is, *worlds.related(7, 3, 3), entry_by_entry=True, **PARAMETERS.get(name, {}))


def test_gradients_of_whitening_by_covariance_are_right(worlds):
    assert checked("shape_distance", as_is, as_is, *worlds.related(7, 3, 3), entry_by_entry=True, **COVARIANCE)
    assert checked("shape_distance", with_idle_units, as_is, *worlds.related(11, 3, 3), **COVARIANCE)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize(
    "change",
    slow_but([with_idle_units, with_a_duplicate, widened], with_idle_units),
    ids=lambda change: change.__name__,
)
def test_gradients_of_the_live_units_are_right_beside_idle_ones_and_with_few_rows(worlds, name, change):
    assert checked(name, change, as_is, *worlds.related(11, 3, 3), **PARAMETERS.get(name, {}))
    assert checked(name, as_is, change, *worlds.related(11, 3, 3), **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "gaussian_mutual_information"])
def test_gradients_with_more_units_than_rows_are_right(worlds, name):
    assert checked(name, as_is, as_is, *worlds.related(6, 9, 2), **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_at_equal_eigenvalues_are_right(worlds, name):
    X, Y = worlds.orthonormal(12, 4), worlds.related(12, 4, 3)[1]
    # every direction is kept, since a cut among equal ones would have no derivative
    keep_all = {"svcca": {"variance": 0.99}, "svcca_by_sum": {"variance": 0.99}, "svcca_k": {"k": 10}}
    assert checked(name, as_is, as_is, X, Y, **keep_all.get(name, {}))


@pytest.mark.parametrize("name", measures(matrices=True))
def test_gradients_are_finite_with_idle_units_of_their_own(worlds, name):
    X, Y = leaf(worlds.with_idle_units(20, 3)), leaf(worlds.with_idle_units(20, 4))
    measures()[name].function(X, Y).backward()
    assert X.grad.isfinite().all()
    assert Y.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "gaussian_mutual_information"])
def test_gradients_at_a_copy_of_oneself_are_finite(worlds, name):
    # two networks of one seed start here; a NaN would spoil the training
    for _ in range(8):
        X = worlds.normal(20, 4)
        x = leaf(X)
        measures()[name].function(x, torch.from_numpy(X)).backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", measures(matrices=True))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_come_in_the_precision_of_the_tensor(worlds, name, dtype):
    X, Y = worlds.related(20, 4, 3)
    x, y = leaf(X, dtype), torch.tensor(Y, dtype=dtype)
    value = measures()[name].function(x, y)
    value.backward()
    assert value.is_floating_point()
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_float32_gradients_are_near_the_float64_ones(worlds, name):
    X, Y = worlds.related(30, 5, 4)
    grads = []
    for dtype in (torch.float32, torch.float64):
        x, y = leaf(X, dtype), leaf(Y, dtype)
        measures()[name].function(x, y).backward()
        grads.append(torch.cat([x.grad.flatten(), y.grad.flatten()]).double())
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-4 * float(grads[1].abs().max()))


def test_a_gradient_step_brings_layers_nearer(worlds):
    X, Y = worlds.related(30, 5, 4)
    x, y = leaf(X), torch.from_numpy(Y)
    cka = measures()["cka"].function
    before = cka(x, y)
    before.backward()
    assert cka(x.detach() + 0.5 * x.grad, y) > before.detach()


def test_the_input_keeps_its_values_and_its_flags(worlds):
    X, Y = worlds.related(20, 4, 3)
    x, y = leaf(X), torch.from_numpy(Y.copy())
    for found in measures(matrices=True).values():
        found.function(x, y)
    assert torch.equal(x.detach(), torch.from_numpy(X))
    assert torch.equal(y, torch.from_numpy(Y))
    assert x.requires_grad
    assert not y.requires_grad


@pytest.mark.parametrize("options", [{}, {"alpha": 0.0}, {"whitening": "covariance"}], ids=str)
def test_shape_distance_has_a_gradient_through_frequencies(options):
    draw = torch.Generator().manual_seed(0)
    X, Y, step = (torch.randn(60, c, 4, 4, generator=draw, dtype=torch.float64) for c in (3, 2, 3))
    X.requires_grad_()
    (gradient,) = torch.autograd.grad(nk.shape_distance(Spectra.of(X, Y), **options), X)
    with torch.no_grad():
        ends = [nk.shape_distance(Spectra.of(X + h * step, Y), **options).item() for h in (1e-5, -1e-5)]
    assert (gradient * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)
