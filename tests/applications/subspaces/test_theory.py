"""The statements of the paper's theory, each checked as printed: those that hold, and those with a counterexample.

`Z = A D` with A = αX, as the paper writes it; columns of D are what its Toeplitz form is for. Guide: docs/subspaces.md.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import netkin as nk

RNG = np.random.default_rng


def norm(*matrices):
    return math.prod(np.linalg.norm(matrix) for matrix in matrices)


def cosine(D, E):
    return float((D * E).sum() / norm(D, E))


def root(S, power=0.5):
    values, vectors = np.linalg.eigh(S)
    return vectors * values**power @ vectors.T


def cca(Z, Y):
    """Eq. 1, with Q = Z (ZᵀZ)^(-1/2)."""
    Q, P = (M @ root(M.T @ M, -0.5) for M in (Z, Y))
    return float(np.sqrt((np.linalg.svd(Q.T @ P, compute_uv=False) ** 2).mean()))


def turn(angle):
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def condition(S):
    return np.linalg.cond(S)


def constant(A, *Zs):
    """The factor of Theorem 2.5: C / (γ c^(3/2) T)."""
    M, c = A.T @ A, Zs[0].shape[1]
    gamma = max(condition(Z.T @ Z) for Z in Zs)
    return float(np.linalg.eigvalsh(M)[0] / (gamma * c**1.5 * np.trace(M)))


# --- Proposition 2.1 --------------------------------------------------------------------------------------------------


def bound_and_change(channels, outputs, m, image, seed, constant_image=False):
    """Return Prop. 2.1's bound and the change of the features when the atoms of one layer change."""
    torch.manual_seed(seed)
    layer = nk.AtomConv2d(
        channels, outputs, 3, padding=1, padding_mode="circular", bias=False, atoms=m, dtype=torch.float64
    )
    x = torch.ones(1, channels, image, image) if constant_image else torch.randn(1, channels, image, image)
    x = x.double()
    patches = nn.functional.unfold(nn.functional.pad(x, (1, 1, 1, 1), mode="circular"), 3)
    largest = patches.norm(dim=1).max()  # λ, over all input channels
    with torch.no_grad():
        before, D = layer(x), layer.atoms.clone()
        layer.atoms.copy_(torch.ones_like(D) if constant_image else torch.randn_like(D))
        layer.atoms.add_(D * constant_image)
        change = (layer(x) - before).norm()
        bound = layer.coefficients.norm() * largest * image * (layer.atoms - D).norm()
    return float(bound), float(change)


@pytest.mark.parametrize("channels, outputs, m", [(1, 1, 4), (3, 8, 4), (16, 16, 9)])
def test_proposition_2_1_holds_for_one_layer_of_any_width_and_is_loose(channels, outputs, m):
    shares = []
    for seed in range(10):
        bound, change = bound_and_change(channels, outputs, m, 12, seed)
        assert change <= bound
        shares.append(change / bound)
    assert max(shares) < 0.5  # and it gets looser with more channels: see the guide


def test_proposition_2_1_is_reached_by_a_constant_image_one_atom_and_a_constant_change():
    bound, change = bound_and_change(1, 1, 1, 8, 0, constant_image=True)
    assert change == pytest.approx(bound, rel=1e-9)


def test_proposition_2_1_is_about_one_layer_and_two_exceed_it():
    x = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    layers = [
        nk.AtomConv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False, atoms=1, dtype=torch.float64)
        for _ in range(2)
    ]
    with torch.no_grad():
        for layer in layers:
            layer.atoms.fill_(1.0)
            layer.coefficients.fill_(10.0)
        before = layers[1](layers[0](x))
        layers[0].atoms.mul_(2)
        change = (layers[1](layers[0](x)) - before).norm()
        alpha = torch.stack([layer.coefficients for layer in layers]).norm()
        bound = alpha * 3 * 8 * 3  # λ = 3, √|B| = 8, ‖ΔD‖ = 3
    assert float(change) > 10 * float(bound)


# --- Proposition 2.4 --------------------------------------------------------------------------------------------------


def orthonormal(seed, m=4):
    return np.linalg.qr(RNG(seed).normal(size=(9, m)))[0].T


@pytest.mark.parametrize("seed", range(20))
def test_orthonormal_atoms_have_a_cosine_of_at_most_grassmann(seed):
    D, E = orthonormal(2 * seed), orthonormal(2 * seed + 1)
    assert nk.atom_cosine(D, E) <= nk.grassmann(D, E) + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_proposition_2_4_holds_where_the_product_of_the_atoms_is_positive_semidefinite(seed):
    D, E = orthonormal(2 * seed), orthonormal(2 * seed + 1)
    U, _, Vt = np.linalg.svd(D @ E.T)
    turned = U @ Vt @ E  # now D turnedᵀ = U S Uᵀ
    assert nk.atom_cosine(D, turned) == pytest.approx(nk.grassmann(D, turned), abs=1e-10)
    assert nk.grassmann(D, turned) == pytest.approx(nk.grassmann(D, E), abs=1e-10)


def test_proposition_2_4_does_not_hold_for_orthonormal_atoms_alone():
    D = orthonormal(0)
    other = D[[1, 2, 3, 0]]  # the same atoms in another order
    assert nk.grassmann(D, other) == pytest.approx(1)
    assert nk.atom_cosine(D, other) == pytest.approx(0, abs=1e-12)


def test_without_orthonormal_atoms_neither_bounds_the_other():
    E = np.eye(9)
    D, F = np.stack([10 * E[0], E[1]]), np.stack([10 * E[0], E[2]])
    assert nk.atom_cosine(D, F) > 0.98
    assert nk.grassmann(D, F) == pytest.approx(0.5)
    assert nk.atom_cosine(D, -D) < nk.grassmann(D, -D)


# --- Theorem 2.5 and Lemma A.3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_lemma_a3_holds_for_semidefinite_matrices_and_not_for_others(seed):
    A, B = (M @ M.T for M in RNG(seed).normal(size=(2, 5, 5)))
    assert np.trace(A @ B) >= np.linalg.eigvalsh(A)[0] * np.trace(B) - 1e-9
    B = np.diag([1.0, -1, 0, 0, 0])  # of trace 0, and no longer semidefinite
    worst = min(np.trace(A @ P @ B @ P.T) for P in (np.eye(5), np.eye(5)[[1, 0, 2, 3, 4]]))
    assert worst < 0


@pytest.mark.parametrize("seed", range(10))
def test_theorem_2_5_holds_for_near_atoms_where_it_says_little(seed):
    rng = RNG(seed)
    A, D = rng.normal(size=(60, 6)), rng.normal(size=(6, 4))
    E = D + 0.3 * rng.normal(size=(6, 4))
    factor = constant(A, A @ D, A @ E)
    assert factor * cca(A @ D, A @ E) <= cosine(D, E)
    # σ_min ≤ T / 6, so that the left side can't be over 1 / (c^1.5 · 6), whatever the networks are
    assert factor <= 1 / (4**1.5 * 6)


def test_theorem_2_5_fails_for_opposite_atoms():
    A, D = RNG(0).normal(size=(60, 6)), RNG(1).normal(size=(6, 4))
    assert cca(A @ D, -A @ D) == pytest.approx(1)
    assert cosine(D, -D) == pytest.approx(-1)
    assert constant(A, A @ D, -A @ D) > 0


def test_theorem_2_5_fails_for_atoms_at_right_angles_so_that_no_constant_helps():
    A, D = RNG(0).normal(size=(60, 2)), RNG(1).normal(size=(2, 2))
    E = D @ turn(math.pi / 2)
    assert cca(A @ D, A @ E) == pytest.approx(1)
    assert cosine(D, E) == pytest.approx(0, abs=1e-12)


def test_the_step_of_eq_26_fails_where_the_cross_product_has_no_trace():
    Z = np.linalg.qr(RNG(0).normal(size=(20, 2)))[0]
    Y = Z @ turn(math.pi / 2)
    left = np.trace(np.linalg.inv(Z.T @ Z) @ Z.T @ Y @ np.linalg.inv(Y.T @ Y) @ Y.T @ Z)
    right = np.trace(np.linalg.inv(Z.T @ Z)) * np.trace(np.linalg.inv(Y.T @ Y)) * np.trace(Z.T @ Y) ** 2
    assert left == pytest.approx(2)
    assert right == pytest.approx(0, abs=1e-20)


def test_the_step_of_eq_27_fails_for_products_that_are_not_semidefinite():
    M, D, E = np.diag([10.0, 1.0]), np.eye(2), np.diag([1.0, -1.0])
    assert np.trace(D.T @ M @ E) == pytest.approx(9)
    assert np.trace(M) * np.trace(D.T @ E) == pytest.approx(0)


def test_theorem_a4_as_printed_lacks_gamma():
    """Eq. 21 fails with its constants where Eq. 35, which has γ, still holds."""
    angle, D = math.acos(0.1), np.diag([1.0, 0.1])
    E, A = D @ turn(angle), np.eye(2)
    assert cosine(D, E) == pytest.approx(0.1)
    without = 2**1.5 * np.trace(A) * cosine(D, E)  # c^1.5 T / C
    assert cca(D, E) == pytest.approx(1)
    assert without < 0.6
    assert without * max(condition(D.T @ D), condition(E.T @ E)) > 1


# --- Lemmas A.5 to A.8, Theorem 2.7 -----------------------------------------------------------------------------------


def delta(A, B):
    """Δ₁ of Lemma A.5 by its sum over rows and columns."""
    total = 0.0
    for i in range(A.shape[0]):
        for j in range(B.shape[1]):
            angle = math.acos(np.clip(A[i] @ B[:, j] / norm(A[i], B[:, j]), -1, 1))
            total += norm(A[i]) ** 2 * norm(B[:, j]) ** 2 * math.sin(angle) ** 2
    return total


def rest(A, B, C):
    """Δ₂ + Δ₃ of Lemma A.7."""
    second = (norm(A) ** 2 * delta(B, C) + norm(C) ** 2 * delta(A, B)) / 2
    return second + (delta(A, B @ C) + delta(A @ B, C)) / 2


def test_lemma_a5_is_an_identity_whose_remainder_is_not_small():
    A, B = RNG(0).normal(size=(6, 9)), RNG(1).normal(size=(9, 5))
    share = delta(A, B) / norm(A, B) ** 2
    assert norm(A @ B) == pytest.approx(norm(A, B) * math.sqrt(1 - share))
    assert share > 0.8  # the paper takes it for ≪ 1


def test_lemma_a6_is_an_identity_for_semidefinite_matrices():
    M = RNG(0).normal(size=(20, 5))
    S = M.T @ M
    half = root(S)
    assert norm(half) == pytest.approx(norm(S) ** 0.5 * (1 + delta(half, half) / norm(S) ** 2) ** 0.25)


def test_lemma_a7_is_an_identity_of_the_product_and_not_of_its_first_factor_as_printed():
    A, B, C = RNG(0).normal(size=(4, 5)), RNG(1).normal(size=(5, 6)), RNG(2).normal(size=(6, 3))
    found = norm(A, B, C) * math.sqrt(1 - rest(A, B, C) / norm(A, B, C) ** 2)
    assert norm(A @ B @ C) == pytest.approx(found)
    assert abs(norm(A) - found) > 1  # Eq. 42 has ‖A‖ on its left


def gammas(Z, Y):
    """γ₁, γ₂ and γ₃ of Theorem 2.7."""
    S, T, B = Z.T @ Z, Y.T @ Y, Z.T @ Y
    first = norm(root(S), root(S, -0.5), root(T), root(T, -0.5))
    A, C = root(S, -0.5), root(T, -0.5)
    second = math.sqrt(1 - rest(A, B, C) / norm(A, B, C) ** 2)
    third = math.prod((1 + delta(root(one), root(one)) / norm(one) ** 2) ** -0.25 for one in (S, T))
    return first, second, third


def test_lemma_a8_is_an_identity():
    Z, Y = RNG(0).normal(size=(30, 4)), RNG(1).normal(size=(30, 4))
    S, T, B = Z.T @ Z, Y.T @ Y, Z.T @ Y
    first, second, _ = gammas(Z, Y)
    assert norm(root(S, -0.5) @ B @ root(T, -0.5)) == pytest.approx(first * norm(B) / norm(root(S), root(T)) * second)


@pytest.mark.parametrize("seed", range(5))
def test_theorem_2_7_with_its_constants_is_the_root_of_uncentred_cka_and_not_the_cosine_of_atoms(seed):
    rng = RNG(seed)
    A, D, E = rng.normal(size=(60, 6)), rng.normal(size=(6, 4)), rng.normal(size=(6, 4))
    Z, Y = A @ D, A @ E
    left = 2 * cca(Z, Y) / math.prod(gammas(Z, Y))  # √c = 2
    assert left == pytest.approx(math.sqrt(nk.cka_uncentered(Z, Y)), rel=1e-9)
    assert abs(left - cosine(D, E)) > 0.1


def test_eq_55_takes_a_norm_for_a_trace():
    D = RNG(0).normal(size=(6, 2))
    E = D @ turn(math.pi / 2)
    assert norm(D.T @ E) / norm(D, E) > 0.6
    assert cosine(D, E) == pytest.approx(0, abs=1e-12)


def test_under_assumption_2_6_cca_is_a_root_mean_square_of_channels_and_the_atoms_a_weighted_mean():
    """With decorrelated channels, ZᵀZ, YᵀY and ZᵀY diagonal: no line leads from one to the other."""
    Q = np.linalg.qr(RNG(0).normal(size=(40, 6)))[0]
    angles, sizes, others = np.array([0.2, 0.9, 1.3]), np.array([1.0, 2.0, 0.5]), np.array([0.3, 1.0, 4.0])
    D = np.concatenate([np.diag(sizes), np.zeros((3, 3))])
    E = np.concatenate([np.diag(others * np.cos(angles)), np.diag(others * np.sin(angles))])
    Z, Y = Q @ D, Q @ E
    for product in (Z.T @ Z, Y.T @ Y, Z.T @ Y):
        np.testing.assert_allclose(product, np.diag(np.diag(product)), atol=1e-12)
    assert cca(Z, Y) == pytest.approx(math.sqrt((np.cos(angles) ** 2).mean()))
    weights = sizes * others / norm(sizes, others)
    assert cosine(D, E) == pytest.approx((weights * np.cos(angles)).sum())
    assert cca(Z, -Y) == pytest.approx(cca(Z, Y))
    assert cosine(D, -E) == pytest.approx(-cosine(D, E))


def test_atoms_from_one_start_have_a_correlation_of_cca_and_cosine_that_is_not_a_line_through_zero():
    """What is left of Theorem 2.7: along one way both fall together, so that they correlate."""
    rng = RNG(0)
    A, D, E = rng.normal(size=(400, 9)), rng.normal(size=(9, 6)), rng.normal(size=(9, 6))
    steps = np.linspace(0, 1, 20)
    ours = [cosine(D, D + t * E) for t in steps]
    theirs = [cca(A @ D, A @ (D + t * E)) for t in steps]
    assert np.corrcoef(ours, theirs)[0, 1] > 0.9
    ratios = np.array(theirs) / np.array(ours)
    assert np.ptp(ratios) > 0.05
