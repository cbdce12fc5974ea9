"""Training the networks of the papers: one plain loop, on a CPU in float32 and on a GPU in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from netkin.errors import UnknownName, did_you_mean
from netkin.progress import reported

SHIFT = 4  # pixels by which a training image is moved at most, each way
SCHEDULES: dict[str, Callable[[float], float]] = {  # what the rate is multiplied by when a share of the epochs is done
    "steps": lambda done: 0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0,
    "constant": lambda done: 1.0,
}
Record = dict[str, float]


@dataclass(frozen=True)
class Images:
    """A labelled set of images in two parts, normalised, on one device."""

    name: str
    classes: tuple[str, ...]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def words(self) -> str:
        """What it is and how much of it, for provenance."""
        return f"{self.name}, {len(self.train_images):,} training and {len(self.test_images):,} test images"


def train(
    model: nn.Module,
    images: Images,
    *,
    epochs: int,
    seed: int,
    rate: float = 0.05,
    decay: float = 5e-4,
    batch: int = 128,
    schedule: str = "steps",
    optimizer: torch.optim.Optimizer | None = None,
    each_step: Callable[[int], Any] | None = None,
    each_epoch: Callable[[int], Any] | None = None,
) -> list[Record]:
    """Train `model` where it lies and return a record of each epoch: loss, test accuracy and seconds without testing.

    SGD with momentum 0.9 on randomly moved images. `schedule` is "steps" (a tenth of the rate after half of the epochs,
    a hundredth after three quarters) or "constant". `each_step(step)` is called after each update, counted from 1. On
    a GPU the forward pass runs in bfloat16.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(schedule, epochs))
    generator = torch.Generator().manual_seed(seed)
    history, step = [], 0
    for epoch in reported(range(1, epochs + 1), f"training, seed {seed}", "epochs"):
        model.train()
        started, losses = _now(images), []
        for inputs, labels in shuffled(images, batch, generator):
            losses.append(_update(model, optimizer, inputs, labels))
            step += 1
            if each_step:
                each_step(step)
        rates.step()
        seconds = _now(images) - started
        loss = torch.stack(losses).mean().item()
        right = accuracy(model, images.test_images, images.test_labels)
        history.append({"epoch": epoch, "loss": loss, "accuracy": right, "seconds": seconds})
        if each_epoch:
            each_epoch(epoch)
    model.eval()
    return history


def steps_per_epoch(images: Images, batch: int = 128) -> int:
    """Return how many whole batches an epoch has; what is left over waits for the next shuffle."""
    return len(images.train_images) // batch


def shuffled(images: Images, batch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training images in a random order, each moved by up to four pixels."""
    device = images.train_images.device
    padded = pad(images.train_images, (SHIFT,) * 4)
    order = torch.randperm(len(padded), generator=generator).to(device)
    moves = torch.randint(0, 2 * SHIFT + 1, (2, len(padded)), generator=generator).to(device)
    for start in range(0, len(padded) - batch + 1, batch):
        rows = order[start : start + batch]
        yield moved(padded, rows, moves[:, start : start + batch]), images.train_labels[rows]


def moved(padded: Tensor, rows: Tensor, moves: Tensor) -> Tensor:
    """Return the chosen images, each cut out of its padded form at its own place."""
    height, width = (size - 2 * SHIFT for size in padded.shape[-2:])
    down = moves[0][:, None] + torch.arange(height, device=padded.device)
    across = moves[1][:, None] + torch.arange(width, device=padded.device)
    images = padded[rows[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
    # channels last, a 1 × 1 convolution of few channels with stride 2 writes past its memory (oneDNN, issue 6035)
    return images if images.is_cuda else images.contiguous()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """Return the share of images that `model`, in evaluation mode, gets right; its mode is left as found."""
    training = model.training
    model.eval()
    with _autocast(images.device):
        parts = zip(images.split(batch), labels.split(batch), strict=True)
        right = torch.stack([(model(inputs).argmax(1) == truth).sum() for inputs, truth in parts])
    model.train(training)
    return right.sum().item() / len(labels)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    with _autocast(inputs.device):
        loss = cross_entropy(model(inputs), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _factor(schedule: str, epochs: int) -> Callable[[int], float]:
    if schedule not in SCHEDULES:
        hint = did_you_mean(schedule, SCHEDULES) or "."
        raise UnknownName(f"no schedule named {schedule!r}{hint} There are {' and '.join(SCHEDULES)}.")
    return lambda epoch: SCHEDULES[schedule](epoch / epochs)


def _now(images: Images) -> float:
    if images.train_images.is_cuda:
        torch.cuda.synchronize(images.train_images.device)
    return time.perf_counter()
