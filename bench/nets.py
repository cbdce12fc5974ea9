"""The two networks of the bench and what they are fed: the same numbers in every process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from netkin.sources.architectures import seeded
from netkin.sources.residual import resnet18


def nets() -> tuple[nn.Module, nn.Module]:
    """Return two CIFAR ResNet-18 with batch-norm statistics that are not all zero and one."""
    return _lively(seeded(resnet18, 0)), _lively(seeded(resnet18, 1))


def _lively(model: nn.Module) -> nn.Module:
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
