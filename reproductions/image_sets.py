"""Sets of images that claims read, all in the form of CIFAR-10: 3 × 32 × 32, normalised, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from netkin.identity import DataDigest
from netkin.sources import load_data
from netkin.sources.examples import STATISTICS

SIZES = {"cpu": (5_000, 2_000), "gpu": (50_000, 10_000)}  # training and test images, at most
SETS = {"cifar10": ("CIFAR-10", 10), "cifar100": ("CIFAR-100", 100), "svhn": ("SVHN", 10), "mnist": ("MNIST", 10)}


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

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of its two parts, images and labels, by name; they do not depend on the device."""
        parts = {"training": self.train, "test": self.test}
        return {f"{self.name}, {len(own[0]):,} {name} images": labelled_digest(*own) for name, own in parts.items()}

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.train_images, self.train_labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        return self.test_images, self.test_labels


def labelled_digest(inputs: Tensor, labels: Tensor) -> str:
    """Return the digest of examples and their labels."""
    digest = DataDigest(labels=True)
    digest.update((inputs, labels), range(len(inputs)))
    return digest.hex


def cifar10(place: Path, device: torch.device, train: int, test: int) -> Images:
    """Return the first images of CIFAR-10's two parts."""
    parts = []
    for name, count in (("cifar10-train", train), ("cifar10", test)):
        batches = list(load_data(f"{name}:{place}", batch_size=5_000))
        parts += [torch.cat(part)[:count].to(device) for part in zip(*batches, strict=True)]
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return Images("CIFAR-10", names, *parts)


def named_set(name: str, place: Path, device: torch.device, train: int, test: int) -> Images:
    """Return a set of images in the form of CIFAR-10: grey ones in three channels, small ones with a black margin."""
    words, classes = SETS[name]
    parts: list[Tensor] = []
    for part, count in (("-train", train), ("", test)):
        batches = list(load_data(f"{name}{part},normalise=none:{place}", batch_size=5_000))
        pixels, labels = (torch.cat(one)[:count].to(device) for one in zip(*batches, strict=True))
        margin = (32 - pixels.shape[-1]) // 2
        coloured = nn.functional.pad(pixels, [margin] * 4).expand(-1, 3, -1, -1)
        parts += [(coloured - _as_channels(0, pixels)) / _as_channels(1, pixels), labels]
    return Images(words, tuple(map(str, range(classes))), *parts)


def _as_channels(which: int, pixels: Tensor) -> Tensor:
    """Return the mean (0) or the standard deviation (1) of CIFAR-10's pixels, by channel."""
    return torch.tensor(STATISTICS["cifar10"][which]).to(pixels).view(-1, 1, 1)


def enlarged_digits(device: torch.device) -> Images:
    """Return the bundled digits in the form of CIFAR images: three channels, each pixel four times as large."""
    parts = []
    for name in ("digits:train", "digits:test"):
        images, labels = (torch.cat(part) for part in zip(*load_data(name, batch_size=5_000), strict=True))
        larger = nn.functional.interpolate((images - 0.3) / 0.38, scale_factor=4).repeat(1, 3, 1, 1)
        parts += [larger.to(device), labels.to(device)]
    return Images("digits, enlarged", tuple(map(str, range(10))), *parts)
