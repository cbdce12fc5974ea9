"""Every measure once more, slowly, in NumPy: definitions written down as printed, with nothing shared with the package.

X is n × p and Y is n × q, both float64 arrays. `TRANSCRIPTIONS` maps a measure's name to its definition.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

EPS = np.finfo(np.float64).eps


def centred(X):
    """Return `X` with every column's mean taken away."""
    return X - X.mean(axis=0, keepdims=True)


def spectrum(X, resolution=EPS, centre=True):
    """Return left singular vectors, singular values and right singular vectors of the numerical range of `X`, centred.

    Squares of singular values count as rank above the rounding of float64 products, and above that of the data, which
    came in a precision of the given `resolution`.
    """
    U, s, Vt = np.linalg.svd(centred(X) if centre else X, full_matrices=False)
    kept = s**2 > max(max(X.shape) * EPS * s[0] ** 2, rounding_noise(X, resolution))
    return U[:, kept], s[kept], Vt[kept]


def rounding_noise(X, resolution):
    """Return ⅓ eps² (1 + √(p/n))² max_j Σ_i x_ij²; a unit that varies by less than its rounding counts as it varies."""
    n, p = X.shape
    noise = [min(resolution**2 / 3 * (x**2).sum(), ((x - x.mean()) ** 2).sum()) for x in X.T]
    return (1 + np.sqrt(p / n)) ** 2 * max(noise)


def nuclear(S):
    """Return the sum of the singular values of `S`."""
    return np.linalg.svd(S, compute_uv=False).sum()


def norm(X):
    """Return the Frobenius norm."""
    return np.sqrt((X**2).sum())


# --- kernels ----------------------------------------------------------------------------------------------------------


def alignment(K, L):
    """Return ⟨K, L⟩ / (‖K‖ ‖L‖), eq. 10 of Tang et al. (2020)."""
    return np.trace(K.T @ L) / (norm(K) * norm(L))


def centred_alignment(K, L):
    """Return the alignment of the doubly centred kernels (Kornblith 2019, with biased HSIC)."""
    H = np.eye(len(K)) - np.ones((len(K), len(K))) / len(K)
    return alignment(H @ K @ H, H @ L @ H)


def hsic1(K, L):
    """Return Song's (2012) unbiased HSIC of two Gram matrices, term by term."""
    n = len(K)
    K, L, one = K - np.diag(np.diag(K)), L - np.diag(np.diag(L)), np.ones(n)
    traces = np.trace(K @ L)
    means = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    mixed = 2 / (n - 2) * (one @ K @ L @ one)
    return (traces + means - mixed) / (n * (n - 3))


def debiased_alignment(K, L):
    """Return HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L))."""
    return hsic1(K, L) / np.sqrt(hsic1(K, K) * hsic1(L, L))


def rbf_kernel(X, fraction):
    """Return exp(−d² / 2σ²) with σ a fraction of the median distance between distinct rows."""
    distances = np.sqrt(((X[:, None, :] - X[None, :, :]) ** 2).sum(axis=2))
    sigma = fraction * np.median(distances[np.triu_indices(len(X), 1)])
    return np.exp(-(distances**2) / (2 * sigma**2))


def cka(X, Y):
    return centred_alignment(X @ X.T, Y @ Y.T)


def cka_uncentered(X, Y):
    return alignment(X @ X.T, Y @ Y.T)


def cka_debiased(X, Y):
    return debiased_alignment(X @ X.T, Y @ Y.T)


def angular_cka(X, Y):
    return np.arccos(min(1.0, cka(X, Y)))


def cka_rbf(X, Y, fraction=0.4):
    return centred_alignment(rbf_kernel(X, fraction), rbf_kernel(Y, fraction))


def cka_rbf_debiased(X, Y, fraction=0.4):
    return debiased_alignment(rbf_kernel(X, fraction), rbf_kernel(Y, fraction))


def cka_minibatch(X, Y, batch=128, kernel="linear", fraction=0.4):
    """Sum HSIC₁ over batches (Nguyen 2021), weighted by m(m - 3), one ratio at the end; under four rows left out."""
    xy = xx = yy = 0.0
    for start in range(0, len(X), batch):
        x, y = X[start : start + batch], Y[start : start + batch]
        if len(x) >= 4:
            K, L = (z @ z.T if kernel == "linear" else rbf_kernel(z, fraction) for z in (x, y))
            weight = len(x) * (len(x) - 3)
            xy, xx, yy = xy + weight * hsic1(K, L), xx + weight * hsic1(K, K), yy + weight * hsic1(L, L)
    return xy / np.sqrt(xx * yy)


# --- canonical correlations -------------------------------------------------------------------------------------------


def orthonormal_basis(X):
    """Return an orthonormal basis of the column space of centred `X`, by QR with pivoting."""
    Xc = centred(X)
    Q, R, _ = scipy.linalg.qr(Xc, mode="economic", pivoting=True)
    return Q[:, : len(spectrum(X)[1])] if abs(R[0, 0]) else Q[:, :0]


def correlations(Qx, Qy):
    """Return the cosines of the principal angles between two orthonormal bases, largest first."""
    return np.linalg.svd(Qx.T @ Qy, compute_uv=False)


def canonical(X, Y):
    """Return the canonical correlations of two layers."""
    return correlations(orthonormal_basis(X), orthonormal_basis(Y))


def cca_mean(X, Y):
    return canonical(X, Y).mean()


def cca_mean_squared(X, Y):
    return (canonical(X, Y) ** 2).mean()


def cca_rms(X, Y):
    return np.sqrt((canonical(X, Y) ** 2).mean())


def leading(X, weight, share):
    """Return the fewest left singular vectors of centred `X` that hold `share` of the weights of its values."""
    U, s, _ = spectrum(X)
    held = np.cumsum(weight(s)) / weight(s).sum()
    return U[:, : int(np.argmax(held >= share - 1e-12)) + 1]


def svcca(X, Y, variance=0.99):
    return correlations(*(leading(Z, lambda s: s**2, variance) for Z in (X, Y))).mean()


def svcca_by_sum(X, Y, variance=0.99):
    return correlations(*(leading(Z, lambda s: s, variance) for Z in (X, Y))).mean()


def svcca_k(X, Y, k=10):
    return correlations(*(spectrum(Z)[0][:, :k] for Z in (X, Y))).mean()


def pwcca(X, Y):
    """Weigh each ρᵢ by Σⱼ |⟨hᵢ, xⱼ⟩|, hᵢ the canonical variates of X (Morcos 2018)."""
    Qx, Qy = orthonormal_basis(X), orthonormal_basis(Y)
    U, rho, _ = np.linalg.svd(Qx.T @ Qy, full_matrices=False)
    H = Qx @ U
    alpha = np.abs(H.T @ centred(X)).sum(axis=1)
    return (alpha * rho).sum() / alpha.sum()


def gaussian_mutual_information(X, Y):
    return -0.5 * np.log(1 - canonical(X, Y) ** 2).sum()


def eigenspace_overlap(X, Y):
    Ux, Uy = spectrum(X)[0], spectrum(Y)[0]
    return norm(Ux.T @ Uy) ** 2 / max(Ux.shape[1], Uy.shape[1])


def eigenspace_overlap_uncentered(X, Y):
    """Definition 1 of May et al. (2019): ‖UᵀŨ‖² / max(d, k), U and Ũ the left singular vectors of the matrices."""
    Ux, Uy = (spectrum(Z, centre=False)[0] for Z in (X, Y))
    return norm(Ux.T @ Uy) ** 2 / max(Ux.shape[1], Uy.shape[1])


# --- regression, Procrustes, shapes -----------------------------------------------------------------------------------


def linear_regression_r2(X, Y):
    Xc, Yc = centred(X), centred(Y)
    map_ = np.linalg.pinv(Xc, rcond=np.sqrt(max(X.shape) * EPS)) @ Yc
    return 1 - norm(Yc - Xc @ map_) ** 2 / norm(Yc) ** 2


def nbs_uncentered(X, Y):
    """Eq. 13 of Tang et al. (2020) as printed."""
    return nuclear(X.T @ Y) / (norm(X) * norm(Y))


def nbs(X, Y):
    return nbs_uncentered(centred(X), centred(Y))


def nbs_of_grams(K, L):
    """Eq. 11 of Tang et al. (2020): the trace of a root of a product of Gram matrices (roots double the rounding)."""
    root = psd_power(K, 0.5)
    inner = np.linalg.eigvalsh(root @ L @ root)
    return np.sqrt(np.clip(inner, 0, None)).sum() / np.sqrt(np.trace(K) * np.trace(L))


def unit(X):
    """Return `X` centred and scaled to Frobenius norm one."""
    return centred(X) / norm(centred(X))


def padded(X, Y):
    """Return both with as many columns, the narrower filled up with zeros."""
    width = max(X.shape[1], Y.shape[1])
    return (np.pad(Z, ((0, 0), (0, width - Z.shape[1]))) for Z in (X, Y))


def aligned_gap(X, Y):
    """Return min over rotations R of ‖X − Y R‖, by finding the rotation."""
    X, Y = padded(X, Y)
    R, _ = scipy.linalg.orthogonal_procrustes(Y, X)
    return norm(X - Y @ R)


def procrustes_distance(X, Y):
    return aligned_gap(unit(X), unit(Y))


def procrustes_size_and_shape(X, Y):
    return aligned_gap(centred(X), centred(Y))


def procrustes_angular(X, Y):
    X, Y = padded(unit(X), unit(Y))
    R, _ = scipy.linalg.orthogonal_procrustes(Y, X)
    return np.arccos(min(1.0, (X * (Y @ R)).sum()))


def procrustes_disparity(X, Y):
    """As SciPy defines it: Y also gets the best scale."""
    X, Y = padded(unit(X), unit(Y))
    R, scale = scipy.linalg.orthogonal_procrustes(Y, X)
    return norm(X - scale * Y @ R) ** 2


def psd_power(M, power):
    """Return a power of a positive semi-definite matrix on its numerical range."""
    values, vectors = np.linalg.eigh(M)
    kept = values > len(M) * EPS * values[-1]
    return (vectors[:, kept] * values[kept] ** power) @ vectors[:, kept].T


def partially_whitened(X, alpha, whitening):
    """Return Xc(αI + (1−α)(XcᵀXc)^(−1/2)) as eq. 8 of Williams (2021) has it; at full rank by SciPy's matrix root."""
    Xc = centred(X)
    M = Xc.T @ Xc if whitening == "second_moment" else np.cov(X.T, bias=True).reshape(X.shape[1], -1)
    full_rank = len(spectrum(X)[1]) == Xc.shape[1]
    inverse_root = np.linalg.inv(np.real(scipy.linalg.sqrtm(M))) if full_rank else psd_power(M, -0.5)
    return Xc @ (alpha * np.eye(len(M)) + (1 - alpha) * inverse_root)


def shape_distance(X, Y, alpha=0.5, whitening="second_moment"):
    A, B = (partially_whitened(Z, alpha, whitening) for Z in (X, Y))
    return np.arccos(min(1.0, nuclear(A.T @ B) / (norm(A) * norm(B))))


def gulp(X, Y, ridge=1e-2):
    n = len(X)
    X, Y = unit(X) * np.sqrt(n), unit(Y) * np.sqrt(n)
    Sx, Sy, Sxy = X.T @ X / n, Y.T @ Y / n, X.T @ Y / n
    A, B = np.linalg.inv(Sx + ridge * np.eye(len(Sx))), np.linalg.inv(Sy + ridge * np.eye(len(Sy)))
    squared = np.trace(A @ Sx @ A @ Sx) + np.trace(B @ Sy @ B @ Sy) - 2 * np.trace(A @ Sxy @ B @ Sxy.T)
    return np.sqrt(max(squared, 0.0))


def magnitude_difference(X, Y):
    return abs(norm(X.mean(axis=0)) - norm(Y.mean(axis=0)))


TRANSCRIPTIONS = {
    function.__name__: function
    for function in (
        cka, cka_debiased, cka_uncentered, angular_cka, cka_rbf, cka_rbf_debiased, cka_minibatch,
        cca_mean, cca_mean_squared, cca_rms, svcca, svcca_by_sum, svcca_k, pwcca, gaussian_mutual_information,
        eigenspace_overlap, eigenspace_overlap_uncentered, linear_regression_r2, nbs, nbs_uncentered,
        procrustes_distance, procrustes_angular,
        procrustes_size_and_shape, procrustes_disparity, shape_distance, gulp, magnitude_difference,
    )
}  # fmt: skip
