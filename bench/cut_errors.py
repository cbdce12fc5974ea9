"""How often ±1.96 standard errors hold the mean where a spectrum is cut: the table of docs/collecting.md."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

import netkin as nk

DRAWS, TOGETHER = 300, 20
Layers = dict[str, np.ndarray]


def falling(count: int, power: float) -> np.ndarray:
    """Return the standard deviations of directions whose variances fall by a power of their number."""
    return np.arange(1, count + 1) ** (-power / 2)


def turned(rng: np.random.Generator, n: int, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a layer and a turned copy with noise."""
    X, Q = rng.normal(size=(n, len(spread))) * spread, np.linalg.qr(rng.normal(size=(len(spread), len(spread))))[0]
    return X, X @ Q + 0.02 * rng.normal(size=X.shape)


def mapped(rng: np.random.Generator, n: int, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a layer and a linear map of it with noise; the map is the same in every draw."""
    X = rng.normal(size=(n, len(spread))) * spread
    fixed = np.random.default_rng(99).normal(size=(len(spread), len(spread))) / len(spread) ** 0.5
    return X, X @ fixed + 0.1 * spread * rng.normal(size=X.shape)


def shared(rng: np.random.Generator, n: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Return two layers that share all of ten directions but the sixth, whose variance is near that of the fifth."""
    x, y = 2.0 ** -np.arange(10), 2.0 ** -np.arange(10)
    x[5] = x[4] * (1 - gap)
    common = np.array([1, 1, 1, 1, 1, 0, 1, 1, 1, 1]) * 0.8
    X = rng.normal(size=(n, 10))
    Y = common * X + np.sqrt(1 - common**2) * rng.normal(size=X.shape)
    return X * np.sqrt(x), Y * np.sqrt(y)


def relu(rng: np.random.Generator, n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ReLU features of points, of two networks with weights in common."""
    fixed, points = np.random.default_rng(99), rng.normal(size=(n, 10))
    weights = fixed.normal(size=(10, width))
    X, Y = (np.maximum(points @ (weights + 0.3 * fixed.normal(size=weights.shape)), 0) for _ in range(2))
    return X, Y


CASES = (
    ("a turned copy with noise, eigenvalues i^(−1/2), 5,000 × 32", turned, (5000, falling(32, 0.5)),
     ("svcca_k(k=5)", "svcca_k", "svcca(variance=0.9)", "svcca_by_sum(variance=0.9)")),
    ("the same, i^(−1)", turned, (5000, falling(32, 1)), ("svcca_k(k=5)", "svcca_k", "svcca(variance=0.9)")),
    ("the same, i^(−2)", turned, (5000, falling(32, 2)), ("svcca_k(k=5)", "svcca(variance=0.9)")),
    ("one direction at the cut shared, one not, eigenvalues 2 % apart, 2,000 × 10", shared, (2000, 0.02),
     ("svcca_k(k=5)",)),
    ("the same, 40 % apart", shared, (2000, 0.4), ("svcca_k(k=5)",)),
    ("a linear map with noise, eigenvalues i^(−2), 2,000 × 64", mapped, (2000, falling(64, 2)),
     ("svcca_k(k=5)", "svcca(variance=0.9)")),
    ("ReLU features, 2,000 × 32", relu, (2000, 32), ("svcca(variance=0.99)",)),
)  # fmt: skip


def draws(make, settings) -> Iterator[tuple[Layers, Layers]]:
    """Yield layers by number, some draws at a time."""
    rng = np.random.default_rng(0)
    for _ in range(0, DRAWS, TOGETHER):
        pairs = {str(case): make(rng, *settings) for case in range(TOGETHER)}
        yield {case: X for case, (X, _) in pairs.items()}, {case: Y for case, (_, Y) in pairs.items()}


def main() -> None:
    """Print the table."""
    from netkin.results.values import jackknife_error

    print("| layers, n × p | measure | coverage of the mean, all errors | without an error | coverage of the rest | "
          "true spread | all errors | the rest |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for what, make, settings, measures in CASES:
        tables = [
            nk.compare(X, Y, measures=list(measures), pairs="corresponding", errors=True, progress=False)
            for X, Y in draws(make, settings)
        ]
        for measure in measures:
            found = [table[measure] for table in tables]
            values = np.concatenate([np.diag(table.values) for table in found])
            told = np.concatenate([np.diag(table.errors) for table in found])
            errors = np.concatenate([
                np.diag(jackknife_error(table.values, table.replicates, table.chunk_sizes)) for table in found
            ])  # fmt: skip
            inside, known = np.abs(values - values.mean()) <= 1.96 * errors, np.isfinite(told)
            rest = f"{inside[known].mean():.2f} | " if known.mean() >= 0.05 else "– | "
            size = f"{np.sqrt((told[known] ** 2).mean()):.1g}" if known.mean() >= 0.05 else "–"
            print(f"| {what} | `{measure}` | {inside.mean():.2f} | {1 - known.mean():.0%} | {rest}{values.std():.1g} | "
                  f"{np.sqrt((errors**2).mean()):.1g} | {size} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
