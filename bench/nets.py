"""The two networks of the bench and what they are fed: the same numbers in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import netkin as nk
from netkin.sources.architectures import resnet18, seeded


def nets() -> tuple[nn.Module, nn.Module]:
    """Return two CIFAR ResNet-18 with batch-norm statistics that are not all zero and one."""
    return lively(seeded(resnet18, 0)), lively(seeded(resnet18, 1))


def lively(model: nn.Module) -> nn.Module:
    """Return a model ready for evaluation, its batch-norm statistics such as training might leave."""
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0, 0.1, generator=draw)
            module.running_var.uniform_(0.5, 1.5, generator=draw)
    return model.eval()


def convolutions(model: nn.Module) -> list[str]:
    """Return the names of the twenty convolutions, whose outputs are compared."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]


def batches(count: int, size: int = 128) -> list[Tensor]:
    """Return `count` batches of noise in the shape of CIFAR images."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, 32, 32, generator=draw) for _ in range(count)]


@torch.no_grad()
def forward_both(models: tuple[nn.Module, nn.Module], images: list[Tensor]) -> None:
    """Run both networks on all batches and keep nothing: the floor."""
    for batch in images:
        for model in models:
            model(batch)


def minibatch_in_float64(models: Any, images: list[Tensor], layers: list[str]) -> np.ndarray:
    """Return mini-batch CKA of all pairs of layers, written out in float64 on the very activations."""
    sums = [_hsic_of_batch(models, batch, layers) for batch in images]
    cross, a, b = (sum(parts) for parts in zip(*sums, strict=True))
    return cross / np.sqrt(np.outer(a, b))


def _hsic_of_batch(models: Any, batch: Tensor, layers: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    grams = []
    for model in models:
        rows = nk.activations(model, layers, [batch], shape="flatten", device=batch.device)
        grams.append([(matrix.double() @ matrix.double().T).fill_diagonal_(0) for matrix in rows.values()])
    a, b = grams
    cross = np.array([[_hsic(K, L) for L in b] for K in a])
    return cross, np.array([_hsic(K, K) for K in a]), np.array([_hsic(L, L) for L in b])


def _hsic(K: Tensor, L: Tensor) -> float:
    n = len(K)  # Song et al. (2012), equation 5
    rows = 2 / (n - 2) * (K.sum(0) @ L.sum(0))
    return float(((K * L).sum() + K.sum() * L.sum() / ((n - 1) * (n - 2)) - rows) / (n * (n - 3)))
