"""Training the small network of the demo, the same way each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from netkin.sources.architectures import digits, seeded
from netkin.sources.datasets import load_data


def untrained_digits_net(seed: int) -> nn.Module:
    """Return a `netkin:digits` network as it is before training, its weights drawn from `seed`."""
    return seeded(digits, seed).eval()


def trained_digits_net(seed: int, epochs: int = 12, progress: Callable[[int, float], None] | None = None) -> nn.Module:
    """Return a `netkin:digits` network trained on `digits:train`; its first weights and its batches follow from `seed`.

    `progress(epoch, loss)` is called after each epoch with the mean loss of its batches.
    """
    model = untrained_digits_net(seed).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=0.05, total_iters=epochs - 1)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        losses = [_step(model, optimizer, *batch) for batch in _shuffled_digits(generator)]
        schedule.step()
        if progress:
            progress(epoch, sum(losses) / len(losses))
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of examples whose label `model` gets right, from 0 to 1."""
    right = torch.cat([model(images).argmax(dim=1) == labels for images, labels in data])
    return right.float().mean().item()


def _shuffled_digits(generator: torch.Generator, batch_size: int = 32) -> list[tuple[Tensor, Tensor]]:
    data = load_data("digits:train", batch_size=10_000)
    images, labels = next(iter(data))
    order = torch.randperm(len(images), generator=generator)
    return [(images[rows], labels[rows]) for rows in order.split(batch_size)]


@torch.enable_grad()
def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
