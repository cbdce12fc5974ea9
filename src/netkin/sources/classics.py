"""Plain chains of layers for 3 × 32 × 32 images: AlexNet, VGG11 and the convolutional network of the SVCCA paper."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

Step = tuple[str, nn.Module]


class Chain(nn.Module):
    """Layers run one after the other, in the order of their names' registration.

    Feature maps are flattened on their way into a linear layer, so that no layer is there for its shape alone.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        super().__init__()
        for name, step in steps:
            self.add_module(name, step)
        # by name, since another module may come to stand in a linear layer's place
        self.flattened = frozenset(name for name, step in self.named_children() if isinstance(step, nn.Linear))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        features = images
        for name, step in self.named_children():
            features = step(features.flatten(1) if name in self.flattened else features)
        return features


def alexnet(classes: int = 10) -> Chain:
    """Return a fresh AlexNet in its CIFAR form: 3 × 3 convolutions, the first with stride 2, and no dropout."""
    return Chain(_alexnet(classes))


def vgg11(classes: int = 10) -> Chain:
    """Return a fresh VGG11 in its CIFAR form: eight convolutions with batch norm, five pools and one linear head."""
    return Chain(_vgg11(classes))


def svcca_convnet(classes: int = 10, width: int = 64) -> Chain:
    """Return a fresh network with the layers of the SVCCA paper's convnet.

    Footnote 1 of Raghu et al. (2017): conv-conv-bn-pool-conv-conv-conv-bn-pool-fc-bn-fc-bn-out. The paper gives 512
    units for a fully connected layer and no other size; channels (`width` and twice that), 3 × 3 kernels and 2 × 2
    pools are ours.
    Each convolution and each hidden linear layer is followed by its ReLU, so that norms follow activations.
    """
    return Chain(_svcca_convnet(classes, width))


def _alexnet(classes: int) -> Iterator[Step]:
    channels = (3, 64, 192, 384, 256, 256)
    for number in range(1, 6):
        stride = 2 if number == 1 else 1
        yield f"conv{number}", nn.Conv2d(channels[number - 1], channels[number], 3, stride, padding=1)
        yield f"relu{number}", nn.ReLU()
        if number in (1, 2, 5):
            yield f"pool{number}", nn.MaxPool2d(2)
    for number, inputs in ((6, 256 * 2 * 2), (7, 4096)):
        yield f"fc{number}", nn.Linear(inputs, 4096)
        yield f"relu{number}", nn.ReLU()
    yield "fc8", nn.Linear(4096, classes)


def _vgg11(classes: int) -> Iterator[Step]:
    channels, pools = (3, 64, 128, 256, 256, 512, 512, 512, 512), iter(range(1, 6))
    for number in range(1, 9):
        yield f"conv{number}", nn.Conv2d(channels[number - 1], channels[number], 3, padding=1)
        yield f"bn{number}", nn.BatchNorm2d(channels[number])
        yield f"relu{number}", nn.ReLU()
        if number in (1, 2, 4, 6, 8):
            yield f"pool{next(pools)}", nn.MaxPool2d(2)
    yield "fc", nn.Linear(512, classes)


def _svcca_convnet(classes: int, width: int) -> Iterator[Step]:
    channels = (3, width, width, 2 * width, 2 * width, 2 * width)
    for number in range(1, 6):
        yield f"conv{number}", nn.Conv2d(channels[number - 1], channels[number], 3, padding=1)
        yield f"relu{number}", nn.ReLU()
        if number in (2, 5):
            stage = 1 if number == 2 else 2
            yield f"bn{stage}", nn.BatchNorm2d(channels[number])
            yield f"pool{stage}", nn.MaxPool2d(2)
    for number, inputs in ((1, 2 * width * 8 * 8), (2, 512)):
        yield f"fc{number}", nn.Linear(inputs, 512)
        yield f"relu{5 + number}", nn.ReLU()
        yield f"bn{2 + number}", nn.BatchNorm1d(512)
    yield "out", nn.Linear(512, classes)
