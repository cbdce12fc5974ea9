"""Small reference networks whose layers have clear names; `netkin:NAME` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from netkin.errors import UnknownName, did_you_mean
from netkin.sources.classics import alexnet, svcca_convnet, vgg11
from netkin.sources.options import fitted, split_options
from netkin.sources.residual import resnet18, thin
from netkin.sources.sequences import char_lstm, vit


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
    "alexnet": alexnet,
    "vgg11": vgg11,
    "svcca_convnet": svcca_convnet,
    "char_lstm": char_lstm,
    "vit": vit,
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
        known = ", ".join(f"`netkin:{each}`" for each in ARCHITECTURES)
        near = did_you_mean(plain, ARCHITECTURES)
        raise UnknownName(f"no reference architecture named {plain!r}{near or '.'} We have {known}.")
    builder = ARCHITECTURES[plain]
    return partial(builder, **fitted(builder, options, f"netkin:{plain}")) if options else builder


def described(name: str) -> str:
    """Return one line on the reference architecture `name`."""
    builder = ARCHITECTURES[name]
    if isinstance(builder, partial):
        shortcuts = "shortcuts without parameters" if name.endswith("a") else "1 × 1-convolution shortcuts"
        return f"CIFAR ResNet-{builder.args[0]} with {shortcuts}."
    return (builder.__doc__ or "").strip().splitlines()[0].replace("Return a fresh ", "")


def seeded(builder: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return what `builder` makes with torch's random numbers starting at `seed`; afterwards they go on undisturbed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return builder()
