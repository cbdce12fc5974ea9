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
from freezing import freezing
from gradients import gradients, sketched, sketched_flatten, sketching
from nets import batches, convolutions, forward_both, minibatch_in_float64, nets
from probing import probing
from reading import reading
from scaling import ray_checkpoints, thousand_checkpoints, two_processes
from sparsity import sparsity_listing, sparsity_loss, sparsity_loss_whole
from spectral import dft_cca, dft_resnet
from stitching import stitching
from subspaces import atom_conv, atom_pairs
from torch import Tensor

import netkin as nk
from netkin.statistics import Moments
from training import in_turn

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


def compressed_linear() -> dict[str, Any]:
    """A square layer of 2,048 units at 0.35 of its width, one product of 1,024 rows."""
    draw = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048))
    return _compressed(model, torch.randn(1024, 64, generator=draw), torch.randn(1024, 2048, generator=draw))


def compressed_conv() -> dict[str, Any]:
    """A 3 × 3 layer of 128 channels at 0.35 of them, on 32 maps of 16 × 16."""
    draw = torch.Generator().manual_seed(0)
    head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    convs = (torch.nn.Conv2d(8, 128, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(128, 128, 3, padding=1))
    images, maps = (torch.randn(32, channels, 16, 16, generator=draw) for channels in (8, 128))
    return _compressed(torch.nn.Sequential(*convs, *head), images, maps)


@torch.no_grad()
def _compressed(model: torch.nn.Sequential, data: Tensor, fed: Tensor) -> dict[str, Any]:
    """The time of layer '2' compressed to 0.35 of its width, against that of the layer as it was."""
    small: Any = nk.compress(model, "2", k=0.35, data=data)
    row = small.compression["2"]
    shares = {
        "parameters": row.parameters_after / row.parameters_before,
        "multiply_adds": row.multiply_adds_after / row.multiply_adds_before,
    }
    return ratio(lambda: small[2](fed), lambda: model[2](fed), repeats=21) | shares


def freezing_resnet20() -> dict[str, Any]:
    return freezing("resnet20", batch=32, repeats=5)


def freezing_svcca_convnet() -> dict[str, Any]:
    return freezing("svcca_convnet", batch=32, repeats=5)


def probing_pool() -> dict[str, Any]:
    return probing("pool")


def probing_flatten() -> dict[str, Any]:
    return probing("flatten")


def training_seeds() -> dict[str, Any]:
    return in_turn("seeds")


def training_clients() -> dict[str, Any]:
    return in_turn("clients")


def training_small() -> dict[str, Any]:
    return in_turn("small")


def dft_resnet_cka() -> dict[str, Any]:
    return dft_resnet("cka")


def dft_resnet_cca() -> dict[str, Any]:
    return dft_resnet("cca_mean")


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
        compressed_linear, compressed_conv, freezing_resnet20, freezing_svcca_convnet,
        reading, probing_pool, probing_flatten, stitching, dft_cca, dft_resnet_cka, dft_resnet_cca,
        training_seeds, training_clients, training_small, gradients, sketched, sketched_flatten, sketching,
        atom_conv, atom_pairs, sparsity_loss, sparsity_loss_whole, sparsity_listing, two_processes,
        thousand_checkpoints, ray_checkpoints,
    )
}  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(TASKS[sys.argv[1]]()))
