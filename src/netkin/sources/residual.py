"""Residual networks in their CIFAR form: a 3 × 3 stem, stages of blocks, the mean over positions, a linear head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, option: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.downsample = (
            (projection if option == "B" else PaddedShortcut(outputs - inputs, stride)) if changes else None
        )
        self.relu2 = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output for a batch of feature maps."""
        inner = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(features)))))
        return self.relu2(inner + (features if self.downsample is None else self.downsample(features)))


class PaddedShortcut(nn.Module):
    """The shortcut without parameters: every second position, and zeros for the channels that are new."""

    def __init__(self, added: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = added, stride

    def forward(self, features: Tensor) -> Tensor:
        """Return smaller maps with more channels."""
        smaller = features[:, :, :: self.stride, :: self.stride]
        return F.pad(smaller, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))


class ResNet(nn.Module):
    """Stages `layer1`, `layer2`, ... of basic blocks; each stage after the first halves the maps."""

    def __init__(
        self, blocks: tuple[int, ...], widths: tuple[int, ...], option: str = "B", head: str = "fc", classes: int = 10
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        inputs = widths[0]
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            strides = [1 if number == 1 else 2] + [1] * (count - 1)
            stage = nn.Sequential()
            for place, stride in enumerate(strides):
                stage.add_module(str(place), BasicBlock(inputs, width, stride, option))
                inputs = width
            self.add_module(f"layer{number}", stage)
        self.stages, self.head = len(blocks), head
        self.add_module(head, nn.Linear(inputs, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        features = self.relu(self.bn1(self.conv1(images)))
        for number in range(1, self.stages + 1):
            features = self.get_submodule(f"layer{number}")(features)
        return self.get_submodule(self.head)(features.mean(dim=(2, 3)))


def thin(depth: int, option: str = "B", head: str = "fc", width: int = 1, classes: int = 10) -> ResNet:
    """Return a fresh CIFAR ResNet of `depth` 20, 32, 44 or 56: stages of 16, 32 and 64 channels, times `width`."""
    return ResNet(((depth - 2) // 6,) * 3, (16 * width, 32 * width, 64 * width), option, head, classes)


def resnet18(classes: int = 10) -> ResNet:
    """Return a fresh ResNet-18 for 3 × 32 × 32 images: four stages of two blocks, 64 to 512 channels."""
    return ResNet((2, 2, 2, 2), (64, 128, 256, 512), classes=classes)
