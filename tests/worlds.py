"""Small worlds: pairs of matrices, some of them with answers that follow from algebra.

`Worlds(seed)` makes them; the fixture `worlds` hands out a seeded one.
"""

from __future__ import annotations

import numpy as np


class Worlds:
    """A maker of matrices whose randomness is its own."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)

    # --- ingredients --------------------------------------------------------------------------------------------------

    def normal(self, *shape):
        return self.rng.normal(size=shape)

    def rotation(self, p):
        """Return a random orthogonal matrix."""
        Q, R = np.linalg.qr(self.normal(p, p))
        return Q * np.sign(np.diag(R))

    def invertible(self, p):
        """Return an invertible matrix that stretches its directions very differently."""
        return self.rotation(p) @ np.diag(np.logspace(-1, 1.2, p)) @ self.rotation(p)

    def orthonormal(self, n, k):
        """Return `k` orthonormal columns of mean zero."""
        columns = self.normal(n, k)
        return np.linalg.qr(columns - columns.mean(axis=0))[0]

    # --- random worlds ------------------------------------------------------------------------------------------------

    def related(self, n, p, q):
        """Return two layers that share a few noisy directions and have means."""
        hidden = self.normal(n, 3)
        X = hidden @ self.normal(3, p) + self.normal(n, p) * self.rng.uniform(0.3, 1.5, size=p)
        Y = hidden @ self.normal(3, q) + self.normal(n, q) * self.rng.uniform(0.3, 1.5, size=q)
        return X + self.normal(p), Y - 2 * self.normal(q)

    def of_rank(self, n, p, rank):
        return self.normal(n, rank) @ self.normal(rank, p) + self.normal(p)

    def with_idle_units(self, n, p):
        """Return a layer with a dead unit, a stuck unit and a duplicated one among its `p` live ones."""
        X = self.normal(n, p)
        return np.concatenate([X, np.zeros((n, 1)), np.full((n, 1), 3.0), X[:, :1]], axis=1)

    def by_name(self, name):
        """Return one of the random worlds listed in `RANDOM`."""
        return getattr(self, f"_{name}")()

    def _wider_y(self):
        return self.related(60, 5, 9)

    def _wider_x(self):
        return self.related(61, 9, 5)

    def _few_examples(self):
        return self.related(9, 14, 4)

    def _few_examples_twice(self):
        return self.related(9, 14, 12)

    def _low_rank(self):
        return self.of_rank(50, 8, 3), self.related(50, 3, 6)[1]

    def _low_rank_and_wide(self):
        X, Y = self.related(20, 4, 5)
        return X @ self.normal(4, 30), Y

    def _idle_units(self):
        return self.with_idle_units(50, 4), self.with_idle_units(50, 6)

    def _many_units(self):
        return self.related(90, 16, 14)

    # --- worlds with known answers ------------------------------------------------------------------------------------

    def rotated_copy(self, n=50, p=8):
        """Return X and a rotated, rescaled, shifted copy of it."""
        X = self.normal(n, p) * np.linspace(0.5, 2, p)
        return X, 2.5 * X @ self.rotation(p) + self.normal(p)

    def sharing(self, n, p, q, shared):
        """Return two layers of orthonormal columns, `shared` of which are the same ones."""
        Q = self.orthonormal(n, p + q - shared)
        return Q[:, :p], Q[:, p - shared :]

    def correlated(self, n, rho, x_sizes, y_sizes):
        """Return two layers with canonical correlations `rho` and principal directions of the given sizes."""
        rho, k = np.asarray(rho), len(rho)
        Q = self.orthonormal(n, 2 * k)
        X, Y = Q[:, :k], Q[:, :k] * rho + Q[:, k:] * np.sqrt(1 - rho**2)
        return X * np.asarray(x_sizes), Y * np.asarray(y_sizes)

    def crossed_pairs(self):
        """Return four examples split into two pairs in two ways that have nothing in common."""
        return np.array([[1.0], [1.0], [-1.0], [-1.0]]), np.array([[1.0], [-1.0], [1.0], [-1.0]])


RANDOM = (
    "wider_y", "wider_x", "few_examples", "few_examples_twice", "low_rank", "low_rank_and_wide", "idle_units",
    "many_units",
)  # fmt: skip


def data_parallel(model):
    """Return a model in `nn.DataParallel` that runs where the model is, also on a machine with GPUs."""
    import sys
    from unittest import mock

    from torch import nn

    # with GPUs in sight the wrapper moves the model there, and its numbers could not be those of the CPU to the bit
    wrappers = sys.modules["torch.nn.parallel.data_parallel"]  # the package has a function of this name
    with mock.patch.object(wrappers, "_get_available_device_type", return_value=None):
        return nn.DataParallel(model)
