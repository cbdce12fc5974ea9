"""What is measured of netkin: `python bench/tasks.py NAME` prints one JSON object."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from clock import peak_megabytes, ratio
from nets import batches, convolutions, forward_both, minibatch_in_float64, nets
from torch import Tensor

import netkin as nk
from netkin.statistics import Moments

LINEAR = [name for name, measure in nk.measures.measures().items() if measure.facts.reads is Moments]


def cka_512() -> dict[str, Any]:
    return _cka_tall(512)


def cka_2048() -> dict[str, Any]:
    return _cka_tall(2048)


def _cka_tall(width: int) -> dict[str, Any]:
    X, Y = _related(10_000, width)
    figures = ratio(lambda: nk.cka(X, Y), lambda: (X.T @ X, X.T @ Y, Y.T @ Y))
    return figures | {f"error_at_offset_{offset}": _cka_error(X + offset, Y + offset) for offset in (0, 10, 1000)}


def cka_wide() -> dict[str, Any]:
    X, Y = _related(1_000, 65_536)
    figures = ratio(lambda: nk.cka(X, Y), lambda: (X @ X.T, Y @ Y.T))
    return figures | {f"error_at_offset_{offset}": _cka_error(X + offset, Y + offset) for offset in (0, 10, 1000)}


def _cka_error(X: Tensor, Y: Tensor) -> float:
    return abs(float(nk.cka(X, Y)) - float(nk.cka(X.double(), Y.double())))


def minibatch() -> dict[str, Any]:
    models, images = nets(), batches(3)
    layers = convolutions(models[0])
    return ratio(lambda: _minibatch(models, images, layers), lambda: forward_both(models, images), repeats=7)


def minibatch_error() -> dict[str, Any]:
    """Against the same estimator written out in float64, on the very activations."""
    models, images = nets(), batches(2)
    layers = convolutions(models[0])
    ours = _minibatch(models, images, layers).to_numpy()
    return {"error": float(np.abs(ours - minibatch_in_float64(models, images, layers)).max())}


def minibatch_memory() -> dict[str, Any]:
    models = nets()
    _minibatch(models, batches(2), convolutions(models[0]))
    return {"peak_megabytes": peak_megabytes()}


def forward_memory() -> dict[str, Any]:
    forward_both(nets(), batches(2))
    return {"peak_megabytes": peak_megabytes()}


def all_linear() -> dict[str, Any]:
    models, images = nets(), batches(78) + batches(1, 16)
    work = lambda: nk.compare(*models, images, measures=LINEAR, layers=convolutions(models[0]))  # noqa: E731
    return ratio(work, lambda: forward_both(models, images), repeats=1) | {"measures": len(LINEAR), "images": 10_000}


def cca() -> dict[str, Any]:
    X, Y = (matrix.double() for matrix in _related(10_000, 512))
    figures = ratio(lambda: nk.cca_mean(X, Y), lambda: _eigh_on_gram(X, Y))
    return figures | {"error": abs(float(nk.cca_mean(X, Y)) - _cca_by_qr(X, Y))}


def svcca() -> dict[str, Any]:
    X, Y = (matrix.double() for matrix in _related(10_000, 512))
    figures = ratio(lambda: nk.svcca(X, Y), lambda: _eigh_on_gram(X, Y))
    return figures | {"error": abs(float(nk.svcca(X, Y)) - _cca_by_qr(_principal(X), _principal(Y)))}


def _eigh_on_gram(X: Tensor, Y: Tensor) -> float:
    """The reference of the table: centre, three products, two eigendecompositions, one set of singular values."""
    X, Y = X - X.mean(0), Y - Y.mean(0)
    (a, V), (b, W) = torch.linalg.eigh(X.T @ X), torch.linalg.eigh(Y.T @ Y)
    return float(torch.linalg.svdvals((V / a.sqrt()).T @ (X.T @ Y) @ (W / b.sqrt())).mean())


def _cca_by_qr(X: Tensor, Y: Tensor) -> float:
    x, y = (np.linalg.qr((matrix - matrix.mean(0)).numpy())[0] for matrix in (X, Y))
    return float(np.linalg.svd(x.T @ y, compute_uv=False).mean())


def _principal(X: Tensor) -> Tensor:
    U, S, _ = np.linalg.svd((X - X.mean(0)).numpy(), full_matrices=False)
    kept = int(np.searchsorted(np.cumsum(S**2), 0.99 * np.sum(S**2))) + 1
    return torch.from_numpy(U[:, :kept] * S[:kept])


def _related(rows: int, width: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(rows, width, generator=draw)
    return X, X / 2 + torch.randn(rows, width, generator=draw)


def _minibatch(models: Any, images: list[Tensor], layers: list[str]) -> Any:
    return nk.compare(*models, images, measures=["cka_minibatch"], layers=layers, shape="flatten")


TASKS: dict[str, Callable[[], dict[str, Any]]] = {
    task.__name__: task
    for task in (
        cka_512, cka_2048, cka_wide, cca, svcca,
        minibatch, minibatch_error, minibatch_memory, forward_memory, all_linear,
    )
}  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(TASKS[sys.argv[1]]()))
