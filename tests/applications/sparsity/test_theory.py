"""The theory of the CKA sparsity paper: what holds, what holds once misprints are mended, and what does not."""

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn

import netkin as nk
from netkin.measures.kernels import batch_gram, gram_cosines
from sparsity_worlds import batches, double_sum, outputs, staged

pytestmark = pytest.mark.filterwarnings("ignore::netkin.errors.InflatedWarning")  # few examples will do here


def two_layers(n=7, p=4, q=5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p))
    return X, np.tanh(X @ rng.normal(size=(p, q))) + rng.normal(size=(n, q))


def centred(X):
    return X - X.mean(0)


def covariance(*parts):
    return np.cov(np.concatenate(parts, axis=1).T)


# --- lemmas 1 and 2 ---------------------------------------------------------------------------------------------------


def log_determinant(S):
    return np.linalg.slogdet(S)[1]


def test_equation_2_lacks_a_half():
    rho = 0.6

    def integrand(y, x):
        joint = np.exp(-(x * x - 2 * rho * x * y + y * y) / 2 / (1 - rho**2)) / (2 * np.pi * np.sqrt(1 - rho**2))
        return joint * np.log(joint / (np.exp(-(x * x + y * y) / 2) / (2 * np.pi)))

    by_definition, _ = integrate.dblquad(integrand, -7, 7, -7, 7)
    printed = -log_determinant(np.array([[1, rho], [rho, 1]]))  # ln|Σ_X| = ln|Σ_Y| = 0
    assert by_definition == pytest.approx(printed / 2, abs=1e-6)


def test_the_gaussian_mutual_information_is_half_of_equation_2():
    X, Y = two_layers(n=400)
    printed = log_determinant(covariance(X)) + log_determinant(covariance(Y)) - log_determinant(covariance(X, Y))
    assert float(nk.gaussian_mutual_information(X, Y)) == pytest.approx(printed / 2, rel=1e-9)


def test_uncorrelated_layers_have_cka_zero_and_gaussian_information_zero_and_others_neither():
    X, Y = two_layers(n=60)
    basis, _ = np.linalg.qr(centred(X))
    apart = centred(Y) - basis @ (basis.T @ centred(Y))  # what X does not explain
    assert np.abs(centred(X).T @ apart).max() < 1e-12
    assert float(nk.cka(X, apart)) == pytest.approx(0, abs=1e-12)
    assert float(nk.gaussian_mutual_information(X, apart)) == pytest.approx(0, abs=1e-12)
    assert float(nk.cka(X, Y)) > 0.01
    assert float(nk.gaussian_mutual_information(X, Y)) > 0.01


def test_without_centring_a_product_of_zero_is_no_covariance_of_zero():
    x, y = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])
    assert (x.T @ y).item() == 0
    assert np.corrcoef(x[:, 0], y[:, 0])[0, 1] == pytest.approx(-1)
    assert float(nk.cka(x, y)) == pytest.approx(1)


def test_for_isotropic_gaussians_cka_and_information_rise_together():
    values = []
    for rho in (0.0, 0.3, 0.6, 0.9):
        S = np.block([[np.eye(3), rho * np.eye(3)], [rho * np.eye(3), np.eye(3)]])
        cka = 3 * rho**2 / 3  # ‖Σ_XY‖² / (‖Σ_X‖ ‖Σ_Y‖)
        values.append((cka, -log_determinant(S) / 2))
    assert values == sorted(values)
    assert values[0] == (0, pytest.approx(0))


def test_less_cka_may_be_more_information():
    # one small direction is all but copied, or the large one is somewhat like
    def pair(small, large):
        S = np.diag([100.0, 1.0, 100.0, 1.0])
        S[0, 2] = S[2, 0] = 100 * large
        S[1, 3] = S[3, 1] = small
        Sx, Sy, Sxy = S[:2, :2], S[2:, 2:], S[:2, 2:]
        cka = (Sxy**2).sum() / np.sqrt((Sx**2).sum() * (Sy**2).sum())
        return cka, (log_determinant(Sx) + log_determinant(Sy) - log_determinant(S)) / 2

    copied, alike = pair(small=0.999, large=0.0), pair(small=0.0, large=0.7)
    assert copied[0] < 1e-3 < alike[0]
    assert copied[1] > 3 > 0.4 > alike[1]


def test_uncorrelated_is_not_independent_unless_the_pair_is_gaussian():
    x = np.random.default_rng(0).normal(size=(20_000, 1))
    y = x**2  # a function of x: the mutual information is infinite
    assert float(nk.cka(x, y)) < 1e-3
    assert float(nk.gaussian_mutual_information(x, y)) < 1e-3
    assert float(nk.cka(x**2, y)) == pytest.approx(1)


def test_an_invertible_map_leaves_the_information_and_moves_cka():
    X, Y = two_layers(n=200)
    stretched = X * np.array([100.0, 1, 1, 1])
    information = [float(nk.gaussian_mutual_information(one, Y)) for one in (X, stretched)]
    assert information[0] == pytest.approx(information[1], rel=1e-9)
    assert abs(float(nk.cka(X, Y)) - float(nk.cka(stretched, Y))) > 0.05


# --- theorem 1 --------------------------------------------------------------------------------------------------------


def filled(weight, epsilon, seed=0):
    """Return the weight with its zeros replaced by values below ε in size."""
    noise = (2 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)).double() - 1) * epsilon
    return torch.where(weight == 0, noise, weight)


def test_a_sparse_layer_is_the_limit_of_layers_with_small_weights():
    draw = torch.Generator().manual_seed(0)
    W = torch.randn(30, 40, generator=draw).double()
    W[torch.rand(30, 40, generator=draw) < 0.9] = 0
    W = W + 0.1 * W.sign()  # the least weight is far from zero
    X, zeros = torch.randn(40, 16, generator=draw).double(), int((W == 0).sum())
    for epsilon in (1e-2, 1e-4, 1e-6):
        near = filled(W, epsilon)
        assert epsilon < W[W != 0].abs().min()
        assert int((near.abs() < epsilon).sum()) == zeros  # its ε-sparsity is the sparsity of W
        change = float((near @ X - W @ X).norm())
        assert 0 < change <= epsilon * zeros**0.5 * float(X.norm())


def test_a_deep_network_has_the_same_limit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    for weight in model.parameters():
        weight.data[torch.rand(weight.shape) < 0.8] = 0
    x, changes = torch.randn(32, 6).double(), []
    sparse, given = model(x).detach(), [weight.detach().clone() for weight in model.parameters()]
    for epsilon in (1e-3, 1e-5, 1e-7):
        for weight, own in zip(model.parameters(), given, strict=True):
            weight.data = filled(own, epsilon)
        changes.append((model(x) - sparse).norm().item())
    assert changes[0] > 50 * changes[1] > 50 * 50 * changes[2] > 0


def test_small_weights_are_not_zero_where_they_are_many():
    epsilon, X = 1e-3, torch.ones(1_000_000, 1).double()
    W = torch.full((1, 1_000_000), 0.9 * epsilon).double()
    assert bool((W.abs() < epsilon).all())  # all of them count as sparse, and pruning takes everything
    assert float(W @ X) == pytest.approx(900)


def test_a_norm_lets_absolute_epsilon_sparsity_be_anything():
    model = staged().double()
    x = batches(1)[0][0].double()
    model.layer1[0].norm.eps = model.layer1[1].norm.eps = 1e-30
    before, weight = model(x), model.layer1[1].conv.weight
    share = float((weight.abs() < 1e-3).double().mean())
    with torch.no_grad():
        weight.mul_(1e-4)
        model.layer1[1].conv.bias.mul_(1e-4)
    torch.testing.assert_close(model(x), before)
    assert share < 0.1
    assert float((weight.abs() < 1e-3).double().mean()) == 1


# --- theorem 2 --------------------------------------------------------------------------------------------------------


def printed_product(X, Y):
    """Return eqs. 7 and 8 as printed: a double sum over the rows of both."""
    n = len(X)
    return np.array(
        [
            [sum(X[t, k] * Y[u, l] for t in range(n) for u in range(n)) for l in range(Y.shape[1])]
            for k in range(X.shape[1])
        ]
    )


def test_equations_7_and_8_have_one_sum_too_many():
    X, Y = two_layers()
    single = [
        [sum(X[t, k] * Y[t, l] for t in range(len(X))) for l in range(Y.shape[1])] for k in range(X.shape[1])
    ]  # fmt: skip
    assert np.array(single) == pytest.approx(X.T @ Y)
    assert printed_product(X, Y) == pytest.approx(np.outer(X.sum(0), Y.sum(0)))
    assert np.abs(printed_product(centred(X), centred(Y))).max() < 1e-12  # so that eq. 9 would be 0 / 0


def formula(X, Y):
    """Return CKA and its derivative to each entry of X, by eq. 10 with single sums; rows are used as they are."""
    K = np.sqrt(((Y.T @ Y) ** 2).sum())
    p1, p2 = ((X.T @ Y) ** 2).sum(), ((X.T @ X) ** 2).sum()
    derivative = np.empty_like(X)
    for k, l in np.ndindex(*X.shape):
        p1_prime = 2 * sum((X.T @ Y)[l, m] * Y[k, m] for m in range(Y.shape[1]))
        p2_prime = 4 * sum((X.T @ X)[l, m] * X[k, m] for m in range(X.shape[1]))
        derivative[k, l] = p1_prime * p2**-0.5 / K - p1 * p2**-1.5 * p2_prime / 2 / K
    return p1 / K / np.sqrt(p2), derivative


def test_the_derivative_of_theorem_2_is_that_of_autograd():
    X, Y = (centred(one) for one in two_layers())
    rows = torch.tensor(X + 3, requires_grad=True)  # the loss centres by itself
    value = gram_cosines(torch.stack([batch_gram(rows), batch_gram(torch.tensor(Y))]))[0, 1]
    (gradient,) = torch.autograd.grad(value, rows)
    expected, derivative = formula(X, Y)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert gradient.numpy() == pytest.approx(derivative, abs=1e-12)
    assert np.abs(derivative.sum(0)).max() < 1e-12  # so centring changes nothing in it


def test_the_derivative_without_centring_is_that_of_the_uncentred_measure():
    X, Y = two_layers()
    rows = torch.tensor(X, requires_grad=True)
    value = nk.cka_uncentered(rows, torch.tensor(Y))
    (gradient,) = torch.autograd.grad(value, rows)
    expected, derivative = formula(X, Y)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    assert gradient.numpy() == pytest.approx(derivative, abs=1e-9)


def test_the_loss_has_no_limit_where_a_layer_does_not_vary():
    X, Y = two_layers()
    other = np.random.default_rng(1).normal(size=X.shape)
    ways = [[float(nk.cka(t * way, Y)) for t in (1.0, 1e-3, 1e-6)] for way in (X, other)]
    assert ways[0] == pytest.approx([ways[0][0]] * 3)
    assert ways[1] == pytest.approx([ways[1][0]] * 3)
    assert abs(ways[0][0] - ways[1][0]) > 0.05  # both come to the same constant layer, with different values


# --- theorem 3 --------------------------------------------------------------------------------------------------------


def test_the_double_sum_is_twice_the_pairs_and_the_number_of_layers():
    model, x = staged(), batches(1)[0][0]
    with nk.CKASparsityLoss(model, beta=1.0, samples=None) as penalty:
        model(x)
        term = penalty.term().item()
    pairs = sum(
        float(nk.cka(one.detach().flatten(1), other.detach().flatten(1)))
        for stage in outputs(model, x)
        for place, one in enumerate(stage)
        for other in stage[:place]
    )
    assert term == pytest.approx(2 * pairs + 5, rel=1e-5)


def test_descending_the_loss_lowers_the_information_of_gaussian_layers_until_both_are_gone():
    # X_j = (1 - c) X_i + noise of three isotropic layers; both sums fall together, to zero
    rng, values = np.random.default_rng(0), []
    X, noise = rng.normal(size=(2000, 3)), [rng.normal(size=(2000, 3)) for _ in range(2)]
    for share in (0.9, 0.6, 0.3, 0.0):
        first = share * X + np.sqrt(1 - share**2) * noise[0]
        layers = [X, first, share * first + np.sqrt(1 - share**2) * noise[1]]
        pairs = [(one, other) for place, one in enumerate(layers) for other in layers[:place]]
        values.append((sum(float(nk.cka(*pair)) for pair in pairs),
                       sum(float(nk.gaussian_mutual_information(*pair)) for pair in pairs)))  # fmt: skip
    assert values == sorted(values, reverse=True)
    assert values[-1][0] < 0.01
    assert values[-1][1] < 0.02


@pytest.mark.slow
def test_gradient_steps_on_the_double_sum_drive_it_to_the_number_of_layers():
    draw = torch.Generator().manual_seed(0)
    layers = [torch.randn(40, 3, generator=draw).double() for _ in range(2)]
    layers = [one.requires_grad_() for one in (layers[0], layers[0] + layers[1])]
    optimizer = torch.optim.Adam(layers, 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        value = double_sum([layers])
        value.backward()
        optimizer.step()
    assert value.item() == pytest.approx(2, abs=1e-3)  # i = j gives 1 each, which nothing lowers
    information = float(nk.gaussian_mutual_information(*(one.detach() for one in layers)))
    assert information < 0.01
