"""Small reference networks whose layers have clear names; `netkin:NAME` on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netkin.errors import ForwardError, UnknownName, did_you_mean
from netkin.sources.efficientnets import efficientnet_lite0, efficientnet_lite1, efficientnet_lite2
from netkin.sources.names import split_options, typed_options

Built = TypeVar("Built")


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut around them."""

    growth = 1

    def __init__(self, inputs: int, outputs: int, stride: int, option: str) -> None:
        super().__init__()
        (self.conv1, self.bn1), self.relu1 = _convolution(inputs, outputs, 3, stride), nn.ReLU()
        self.conv2, self.bn2 = _convolution(outputs, outputs, 3)
        changes = stride != 1 or inputs != outputs
        projection = nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.downsample = (
            (projection if option == "B" else PaddedShortcut(outputs - inputs, stride)) if changes else None
        )
        self.relu2 = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output for a batch of feature maps."""
        inner = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(features)))))
        return self.relu2(inner + (features if self.downsample is None else self.downsample(features)))


class Bottleneck(nn.Module):
    """A 3 × 3 convolution between two of 1 × 1, the last with four times the channels, and a shortcut around them."""

    growth = 4

    def __init__(self, inputs: int, width: int, stride: int, option: str) -> None:
        super().__init__()
        outputs = self.growth * width
        (self.conv1, self.bn1), self.relu1 = _convolution(inputs, width, 1), nn.ReLU()
        (self.conv2, self.bn2), self.relu2 = _convolution(width, width, 3, stride), nn.ReLU()
        (self.conv3, self.bn3), self.relu3 = _convolution(width, outputs, 1), nn.ReLU()
        projection = nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.downsample = projection if stride != 1 or inputs != outputs else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output for a batch of feature maps."""
        inner = self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(features))))))
        shortcut = features if self.downsample is None else self.downsample(features)
        return self.relu3(self.bn3(self.conv3(inner)) + shortcut)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)


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
    """Stages `layer1`, `layer2`, ... of blocks, basic ones or others; each stage after the first halves the maps."""

    def __init__(
        self, blocks: tuple[int, ...], widths: tuple[int, ...], option: str = "B", head: str = "fc", classes: int = 10,
        block: type[BasicBlock | Bottleneck] = BasicBlock,
    ) -> None:  # fmt: skip
        super().__init__()
        (self.conv1, self.bn1), self.relu = _convolution(3, widths[0], 3), nn.ReLU()
        inputs = widths[0]
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            strides = [1 if number == 1 else 2] + [1] * (count - 1)
            stage = nn.Sequential()
            for place, stride in enumerate(strides):
                stage.add_module(str(place), block(inputs, width, stride, option))
                inputs = block.growth * width
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


def resnet50(classes: int = 10) -> ResNet:
    """Return a fresh ResNet-50 for 3 × 32 × 32 images: stages of 3, 4, 6 and 3 bottlenecks, up to 2,048 channels."""
    return ResNet((3, 4, 6, 3), (64, 128, 256, 512), classes=classes, block=Bottleneck)


class Chain(nn.Module):
    """Layers run one after the other, in the order of their names' registration.

    Feature maps are flattened on their way into a linear layer, so that no layer is there for its shape alone.
    """

    def __init__(self, steps: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, step in steps.items():
            self.add_module(name, step)
        # by name, since another module may come to stand in a linear layer's place
        self.flattened = frozenset(name for name, step in self.named_children() if isinstance(step, nn.Linear))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        features = images
        for name, step in self.named_children():
            features = step(features.flatten(1) if name in self.flattened else features)
        return features


def alexnet(classes: int = 10, width: int = 64) -> Chain:
    """Return a fresh AlexNet in its CIFAR form: 3 × 3 convolutions, the first with stride 2, and no dropout."""
    channels = (3, width, 3 * width, 6 * width, 4 * width, 4 * width)  # all in proportion to the first layer's
    steps: dict[str, nn.Module] = {}
    for number in range(1, 6):
        stride = 2 if number == 1 else 1
        steps[f"conv{number}"] = nn.Conv2d(channels[number - 1], channels[number], 3, stride, padding=1)
        steps[f"relu{number}"] = nn.ReLU()
        if number in (1, 2, 5):
            steps[f"pool{number}"] = nn.MaxPool2d(2)
    for number, inputs in ((6, 4 * width * 2 * 2), (7, 64 * width)):
        steps[f"fc{number}"] = nn.Linear(inputs, 64 * width)
        steps[f"relu{number}"] = nn.ReLU()
    return Chain(steps | {"fc8": nn.Linear(64 * width, classes)})


def vgg11(classes: int = 10, width: int = 64) -> Chain:
    """Return a fresh VGG11 in its CIFAR form: eight convolutions with batch norm, five pools and one linear head."""
    channels, pools = (3, *(width * growth for growth in (1, 2, 4, 4, 8, 8, 8, 8))), iter(range(1, 6))
    steps: dict[str, nn.Module] = {}
    for number in range(1, 9):
        steps[f"conv{number}"] = nn.Conv2d(channels[number - 1], channels[number], 3, padding=1)
        steps[f"bn{number}"] = nn.BatchNorm2d(channels[number])
        steps[f"relu{number}"] = nn.ReLU()
        if number in (1, 2, 4, 6, 8):
            steps[f"pool{next(pools)}"] = nn.MaxPool2d(2)
    return Chain(steps | {"fc": nn.Linear(8 * width, classes)})


def svcca_convnet(classes: int = 10, width: int = 64) -> Chain:
    """Return a fresh network with the layers of the SVCCA paper's convnet.

    Footnote 1 of Raghu et al. (2017): conv-conv-bn-pool-conv-conv-conv-bn-pool-fc-bn-fc-bn-out. The paper gives 512
    units for a fully connected layer and no other size; channels (`width` and twice that), 3 × 3 kernels and 2 × 2
    pools are ours.
    Each convolution and each hidden linear layer is followed by its ReLU, so that norms follow activations.
    """
    channels = (3, width, width, 2 * width, 2 * width, 2 * width)
    steps: dict[str, nn.Module] = {}
    for number in range(1, 6):
        steps[f"conv{number}"] = nn.Conv2d(channels[number - 1], channels[number], 3, padding=1)
        steps[f"relu{number}"] = nn.ReLU()
        if number in (2, 5):
            stage = 1 if number == 2 else 2
            steps[f"bn{stage}"] = nn.BatchNorm2d(channels[number])
            steps[f"pool{stage}"] = nn.MaxPool2d(2)
    for number, inputs in ((1, 2 * width * 8 * 8), (2, 512)):
        steps[f"fc{number}"] = nn.Linear(inputs, 512)
        steps[f"relu{5 + number}"] = nn.ReLU()
        steps[f"bn{2 + number}"] = nn.BatchNorm1d(512)
    return Chain(steps | {"out": nn.Linear(512, classes)})


class CharLSTM(nn.Module):
    """Characters, their embedding, LSTM layers `lstm1`, `lstm2`, ..., and scores for the next character."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.vocabulary, self.depth = vocabulary, depth
        self.embedding = nn.Embedding(vocabulary, width)
        for number in range(1, depth + 1):
            self.add_module(f"lstm{number}", nn.LSTM(width, width, batch_first=True))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Return scores for the next character at every place of sequences of whole numbers."""
        if not torch.compiler.is_compiling():
            self._require_known_characters(int(characters.max()))
        states = self.embedding(characters)
        for number in range(1, self.depth + 1):
            states, _ = self.get_submodule(f"lstm{number}")(states)
        return self.out(states)

    def _require_known_characters(self, largest: int) -> None:
        if largest >= self.vocabulary:
            raise ForwardError(
                f"the text has a character number {largest} and this network knows {self.vocabulary} characters; "
                f"build it with `netkin:char_lstm,vocabulary={largest + 1}` or more."
            )


class Embed(nn.Module):
    """Patches of an image as tokens after a class token, with their places added."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return n × tokens × width."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.places


class Attention(nn.Module):
    """Multi-head self-attention without a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return as many tokens of the same width."""
        # n × t × 3·heads·d becomes three of n × heads × t × d
        parts = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and with a path around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after both steps."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """`embed`, then `blocks`, a `norm`, and a `head` that reads the class token, which is the first."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = Embed(size, patch, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image."""
        return self.head(self.norm(self.blocks(self.embed(images)))[:, 0])


def char_lstm(vocabulary: int = 65, width: int = 128, depth: int = 2) -> CharLSTM:
    """Return a fresh character LSTM: embedding, LSTM layers, scores; 65 characters unless `vocabulary` says other."""
    return CharLSTM(vocabulary, width, depth)


def vit(classes: int = 10, depth: int = 6) -> VisionTransformer:
    """Return a fresh small vision transformer for 3 × 32 × 32 images: patches of 4, width 192, 6 blocks of 3 heads."""
    return VisionTransformer(32, 4, 192, depth, 3, classes)


class ConvNet(nn.Module):
    """Convolution, batch norm and ReLU several times over, then the mean over positions and a linear head.

    Layers are `conv1`, `bn1`, `relu1`, `conv2` and so on, and `fc`. Weights lie in all but the ReLUs, so that a state
    dict has the keys of the first two and of `fc`.
    """

    def __init__(
        self, channels: tuple[int, ...], kernels: tuple[int, ...], strides: tuple[int, ...], padding: int
    ) -> None:
        super().__init__()
        self.depth = len(kernels)
        blocks = zip(pairwise(channels), kernels, strides, strict=True)
        for number, ((inputs, outputs), kernel, stride) in enumerate(blocks, start=1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, kernel, stride, padding))
            self.add_module(f"bn{number}", nn.BatchNorm2d(outputs))
            self.add_module(f"relu{number}", nn.ReLU())
        self.fc = nn.Linear(channels[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten scores for each image."""
        features = images
        for number in range(1, self.depth + 1):
            for kind in ("conv", "bn", "relu"):
                features = self.get_submodule(f"{kind}{number}")(features)
        return self.fc(features.mean(dim=(2, 3)))


def tiny10() -> nn.Module:
    """Return a fresh Tiny-10 for 3 × 32 × 32 images in ten classes: eight blocks, no padding, 86,778 parameters."""
    channels = (3, 16, 16, 32, 32, 32, 64, 64, 64)
    return ConvNet(channels, kernels=(3, 3, 3, 3, 3, 3, 3, 1), strides=(1, 1, 2, 1, 1, 2, 1, 1), padding=0)


def digits() -> nn.Module:
    """Return a fresh network for the bundled digits, which `netkin demo` trains: four blocks, 33,482 parameters."""
    return ConvNet((1, 16, 32, 32, 64), kernels=(3, 3, 3, 3), strides=(1, 1, 2, 1), padding=1)


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "tiny10": tiny10,
    "digits": digits,
    **{f"resnet{depth}": partial(thin, depth, "B", "fc") for depth in (20, 32, 44, 56)},
    **{f"resnet{depth}a": partial(thin, depth, "A", "linear") for depth in (20, 32, 44, 56)},
    "resnet18": resnet18,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "svcca_convnet": svcca_convnet,
    "char_lstm": char_lstm,
    "vit": vit,
    "efficientnet_lite0": efficientnet_lite0,
    "efficientnet_lite1": efficientnet_lite1,
    "efficientnet_lite2": efficientnet_lite2,
}


def architecture(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds the reference architecture `name`, which may carry options.

    `resnet20` to `resnet56` have 1 × 1-convolution shortcuts (option B) and the head `fc`; `resnet20a` to `resnet56a`
    have shortcuts without parameters (option A) and the head `linear`.

    Example:
        >>> architecture("resnet20a,classes=100")().linear
        Linear(in_features=64, out_features=100, bias=True)
    """
    plain, options = split_options(name)
    if plain not in ARCHITECTURES:
        known = ", ".join(f"`netkin:{name}`" for name in ARCHITECTURES)
        near = did_you_mean(plain, ARCHITECTURES)
        raise UnknownName(f"no reference architecture named {plain!r}{near or '.'} There are {known}.")
    builder = ARCHITECTURES[plain]
    return partial(builder, **typed_options(builder, options, f"netkin:{plain}")) if options else builder


def seeded(builder: Callable[[], Built], seed: int = 0) -> Built:
    """Return what `builder` makes with torch's random numbers starting at `seed`; afterwards they go on undisturbed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return builder()
