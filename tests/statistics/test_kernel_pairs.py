"""Kernels of features and gradients over the same examples."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from netkin.errors import NoValue, ShapeError
from netkin.statistics.kernel_pairs import Kernels
from refusals import refusals


def layer(n, d, seed):
    draw = np.random.default_rng(seed)
    spread = 1 / np.arange(1, d + 1)
    return draw.normal(size=(n, d)) * spread, draw.normal(size=(n, d)) * spread + 0.1


@pytest.mark.parametrize("kernel", ["features", "gradients", "sum", "product", "hadamard", "psi", "transport"])
def test_kernels_are_those_of_the_paper(kernel):
    F, G = layer(9, 4, 6)
    P, Q = layer(9, 3, 7)
    mine = [written_out(kernel, *one) for one in ((F, G), (P, Q))]
    pair = Kernels.of((F, G), (P, Q), kernel=kernel)
    assert np.allclose(
        at_scale(pair.x.kernel(kernel).numpy(), mine[0]), mine[0], atol=1e-7 if kernel == "transport" else 1e-12
    )
    K, L = mine
    assert pair.alignment(kernel).item() == pytest.approx(
        (K * L).sum() / np.linalg.norm(K) / np.linalg.norm(L), abs=1e-7
    )
    roots = [V[:, values > 1e-10] * np.sqrt(values[values > 1e-10]) for values, V in map(np.linalg.eigh, mine)]
    bures = np.linalg.svd(roots[0].T @ roots[1], compute_uv=False).sum() / np.sqrt(np.trace(K) * np.trace(L))
    assert pair.bures(kernel).item() == pytest.approx(bures, abs=1e-6)
    H = np.eye(9) - 1 / 9
    A, B = H @ K @ H, H @ L @ H
    centred = (A * B).sum() / np.linalg.norm(A) / np.linalg.norm(B)
    assert pair.alignment(kernel, "examples").item() == pytest.approx(centred, abs=1e-7)


def at_scale(found, wanted):
    """A kernel is known up to a power of two."""
    factor = np.linalg.norm(wanted) / np.linalg.norm(found)
    assert np.log2(factor) == pytest.approx(round(np.log2(factor)), abs=1e-6)
    return found * factor


def written_out(kernel, F, G):
    K, L = F @ F.T, G @ G.T
    if kernel == "transport":  # on the span of the features, as K^-½ asks
        values, V = np.linalg.eigh(K)
        V = V[:, values > 1e-10]
        small = V.T @ K @ V
        root = sqrtm(small).real
        inverse = np.linalg.inv(root)
        T = V @ (inverse @ sqrtm(root @ V.T @ L @ V @ root).real @ inverse) @ V.T
        half = (np.eye(len(K)) + T) / 2
        return half @ K @ half
    psi = np.stack([np.outer(g, f).ravel() for f, g in zip(F, G, strict=True)])
    products = {"features": K, "gradients": L, "sum": K + L, "product": (F * G) @ (F * G).T}
    return products.get(kernel, psi @ psi.T)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
@pytest.mark.parametrize("kernel", ["features", "sum", "product", "hadamard", "transport"])
def test_scales_of_layers_change_nothing(kernel, scale):
    (F, G), (P, Q) = layer(20, 4, 8), layer(20, 3, 9)
    plain = Kernels.of((F, G), (P, Q), kernel=kernel)
    scaled = Kernels.of((F * scale, G * scale), (P, Q), kernel=kernel)
    assert scaled.alignment(kernel).item() == pytest.approx(plain.alignment(kernel).item(), rel=1e-9)
    assert scaled.bures(kernel).item() == pytest.approx(plain.bures(kernel).item(), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_raised_first(dtype):
    F, G, P, Q = (torch.tensor(one).to(dtype) for pair in (layer(20, 4, 8), layer(20, 3, 9)) for one in pair)
    raised = Kernels.of((F.double(), G.double()), (P.double(), Q.double()))
    assert Kernels.of((F, G), (P, Q)).alignment("hadamard").item() == pytest.approx(raised.alignment("hadamard").item())


def test_alignment_is_at_most_the_bures_similarity_of_squares():
    """Eq. 14: CKA(K, L) ≤ NBS(K², L²)."""
    for seed in range(20):
        (F, G), (P, Q) = layer(12, 5, seed), layer(12, 4, seed + 100)
        pair = Kernels.of((F, G), (P, Q))
        K, L = (side.kernel("hadamard").numpy() for side in (pair.x, pair.y))
        nuclear = np.linalg.svd(K @ L, compute_uv=False).sum() / np.linalg.norm(K) / np.linalg.norm(L)
        assert pair.alignment("hadamard").item() <= nuclear + 1e-12


def test_what_has_no_kernels_is_refused():
    F, G = layer(10, 4, 0)
    refusals(
        (lambda: Kernels.of(F, (F, G)), ShapeError, ""),
        (lambda: Kernels.of((F, G), (F, G[:, :3])), ShapeError, ""),
        (lambda: Kernels.of((F, G), (F[:9], G[:9])), ShapeError, ""),
        (lambda: Kernels.of((F, 0 * G), (F, G)).alignment("gradients"), NoValue, ""),
    )
