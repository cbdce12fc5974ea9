"""Recipes: how the networks that the claims share are built and trained at each scale; and runs, those trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from netkin.sources.architectures import (
    Bottleneck,
    CharLSTM,
    ConvNet,
    ResNet,
    VisionTransformer,
    alexnet,
    resnet18,
    resnet50,
    seeded,
    svcca_convnet,
    thin,
    tiny10,
    vgg11,
    vit,
)
from netkin.training import Recipe, Record

CHARACTERS = 65  # of tiny Shakespeare
WINDOW = {"cpu": 32, "gpu": 64}  # characters of a piece of text
PARTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.9, 1.0)  # of the training time: where runs are kept


@dataclass(frozen=True)
class Network:
    """How a network is built and trained at one scale, on images or on text."""

    build: Callable[[], nn.Module]
    recipe: Recipe
    data: str = "images"

    @cached_property
    def words(self) -> str:
        """All that the trained network depends on, but for data and seed; reading it takes no random numbers."""
        return f"{self.recipe.words}; {self.data}; architecture {architecture_digest(seeded(self.build))}"


def architecture_digest(model: nn.Module) -> str:
    """Return what changes with a network's layers and the shapes of its weights, whatever torch prints of them."""
    layers = [
        [
            name,
            type(module).__name__,
            *(str(getattr(module, fact, "")) for fact in ("kernel_size", "stride", "padding")),
        ]
        for name, module in model.named_modules()
    ]
    shapes = [[name, list(weight.shape)] for name, weight in model.state_dict().items()]
    return hashlib.sha256(json.dumps([layers, shapes]).encode()).hexdigest()[:10]


def _narrow_tiny10() -> nn.Module:
    """Return a Tiny-10 of half the width."""
    channels = (3, 8, 8, 16, 16, 16, 32, 32, 32)
    return ConvNet(channels, kernels=(3, 3, 3, 3, 3, 3, 3, 1), strides=(1, 1, 2, 1, 1, 2, 1, 1), padding=0)


# randomly moved images, as in the SVCCA paper; at gpu scale those of the matching paper are mirrored too
_SMALL = Recipe(epochs=10, batch=64, weight_decay=5e-4, schedule="steps", precision="auto", drop_last=True, shift=4)
_LARGE = _SMALL.but(epochs=30, batch=512, schedule="cosine", warmup=2)
_TEXT = Recipe(steps=1500, batch=32, lr=4e-3, optimizer="adam", schedule="cosine", clip=1.0, order="drawn")
# of several sets of images, each seen for as many steps; not mirrored, since one holds digits
_TASKS = _LARGE.but(epochs=None, steps=500, lr=0.2, warmup=50, shift=2)
_FEW_TASKS = _TASKS.but(steps=400, batch=50, lr=0.05, shift=1)  # of images with half the pixels a side
# of deeper networks: as many images in batches of half the size, at half the rate
_DEEP_TASKS = _TASKS.but(steps=1000, batch=256, lr=0.1, warmup=100)
_FEW_DEEP_TASKS = _FEW_TASKS.but(steps=800, batch=25, lr=0.025, warmup=100)
# of networks with masks, and of dense ones to be pruned; and of vision transformers, before tokens are dropped
_SPARSE = _LARGE.but(epochs=None, steps=3000, batch=256, lr=0.2, warmup=150, flip=True)
_FEW_SPARSE = _SPARSE.but(steps=200, batch=50, lr=0.05, warmup=20, shift=2)
_PATCHES = _LARGE.but(epochs=10, optimizer="adamw", lr=1e-3, weight_decay=0.05, warmup=1, flip=True)
_FEW_PATCHES = _FEW_SPARSE.but(optimizer="adamw", lr=1e-3, weight_decay=0.05)
# of atoms and heads alone, on a tenth of a set of images or on a whole one; rate and momentum are the paper's
_ATOMS = Recipe(steps=200, batch=200, lr=0.01, schedule="cosine", precision="auto", drop_last=True, shift=2)
_FEW_ATOMS = _ATOMS.but(batch=50)
NARROW = (8, 16, 32, 64)  # channels of the stages at cpu scale
RECIPES: dict[str, dict[str, Network]] = {
    "cpu": {
        "convnet": Network(lambda: svcca_convnet(width=16), _SMALL.but(lr=0.02)),
        "resnet": Network(lambda: ResNet((2, 2, 2), (8, 16, 32)), _SMALL.but(lr=0.05)),
        "tiny10": Network(_narrow_tiny10, _SMALL.but(epochs=4, batch=50, lr=0.05)),
        **{
            f"resnet20w{width}": Network(
                partial(ResNet, (1, 1, 1), (8 * width, 16 * width, 32 * width)),
                _SMALL.but(epochs=4, batch=50, lr=0.05),
            )
            for width in (1, 2, 3)
        },
        "lstm": Network(lambda: CharLSTM(CHARACTERS, 64, 3), _TEXT, "text"),
        "resnet18": Network(lambda: ResNet((2, 2, 2, 2), NARROW), _FEW_TASKS),
        "resnet50": Network(lambda: ResNet((3, 4, 6, 3), NARROW, block=Bottleneck), _FEW_DEEP_TASKS),
        "resnet20-sparse": Network(lambda: ResNet((2, 2, 2), (8, 16, 32)), _FEW_SPARSE),
        "resnet56-sparse": Network(lambda: ResNet((4, 4, 4), (8, 16, 32)), _FEW_SPARSE),
        "resnet18-pretrained": Network(lambda: ResNet((2, 2, 2, 2), NARROW), _FEW_SPARSE),
        "vit-tokens": Network(lambda: VisionTransformer(16, 4, 48, 4, 3, 10), _FEW_PATCHES),
        "resnet18-atoms": Network(lambda: ResNet((2, 2, 2, 2), (4, 8, 16, 32)), _FEW_ATOMS),
        "alexnet-atoms": Network(lambda: alexnet(width=8), _FEW_ATOMS),
        "vgg11-atoms": Network(lambda: vgg11(width=8), _FEW_ATOMS),
    },
    "gpu": {
        "convnet": Network(svcca_convnet, _LARGE.but(lr=0.1)),
        "resnet": Network(lambda: thin(32), _LARGE.but(epochs=40, lr=0.2)),
        "tiny10": Network(tiny10, _LARGE.but(epochs=40, lr=0.2, flip=True)),
        **{
            f"resnet20w{width}": Network(partial(thin, 20, width=width), _LARGE.but(lr=0.2, flip=True))
            for width in (1, 2, 3)
        },
        "resnet18": Network(resnet18, _TASKS),
        "resnet50": Network(resnet50, _DEEP_TASKS),
        "resnet20-sparse": Network(lambda: thin(20), _SPARSE),
        "resnet56-sparse": Network(lambda: thin(56), _SPARSE),
        "resnet18-pretrained": Network(lambda: ResNet((2, 2, 2, 2), (32, 64, 128, 256)), _SPARSE),
        "vit-tokens": Network(vit, _PATCHES),
        "resnet18-atoms": Network(resnet18, _ATOMS),
        "alexnet-atoms": Network(alexnet, _ATOMS),
        "vgg11-atoms": Network(vgg11, _ATOMS),
        "lstm": Network(lambda: CharLSTM(CHARACTERS, 256, 3), _TEXT.but(steps=4000, batch=64, lr=2e-3), "text"),
    },
}


def length_words(recipe: Recipe) -> str:
    """Return how long a training is.

    Example:
        >>> length_words(Recipe(epochs=30, batch=512)), length_words(Recipe(steps=3000, batch=256))
        ('30 epochs of batches of 512', '3,000 steps of batches of 256')
    """
    many = f"{recipe.epochs} epochs" if recipe.steps is None else f"{recipe.steps:,} steps"
    return f"{many} of batches of {recipe.batch}"


def length_of(name: str, scale: str, **options: Any) -> str:
    """Return how long the network `name` is trained at a scale; `options` override its recipe's."""
    return length_words(RECIPES[scale][name].recipe.but(**options))


def lengths_of(names: Iterable[str], scale: str) -> str:
    """Return how long the networks of these names are trained; names stand only where lengths differ."""
    by_length: dict[str, list[str]] = {}
    for name in names:
        if name in RECIPES[scale]:
            by_length.setdefault(length_words(RECIPES[scale][name].recipe), []).append(name)
    if len(by_length) == 1:
        return next(iter(by_length))
    return ", ".join(f"{' and '.join(nets)} {length}" for length, nets in by_length.items())


def recipe_words(name: str, scale: str) -> str:
    """Return how the network `name` is built and trained at a scale, in words; nothing for one that is no more."""
    network = RECIPES[scale].get(name)
    return network.words if network else ""


@dataclass(frozen=True)
class Run:
    """A trained network with its states on the way and a record of each epoch."""

    model: nn.Module
    checkpoints: Mapping[int, Mapping[str, Tensor]]
    history: list[Record]
    build: Callable[[], nn.Module]

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end."""
        return self.history[-1]["accuracy"]

    def at(self, step: int) -> nn.Module:
        """Return the network as it was after `step` updates, in evaluation mode, where the final one lies."""
        model = seeded(self.build)  # which takes no random numbers
        model.load_state_dict(dict(self.checkpoints[step]))
        return model.eval().to(next(self.model.parameters()).device)

    def untrained(self) -> nn.Module:
        """Return the network as it was before training."""
        return self.at(min(self.checkpoints))


class Keeping:
    """A hook that keeps the states of a training at some of its steps, by step."""

    def __init__(self, total: int):
        self.settings = self.wanted = sorted({round(part * total) for part in PARTS})
        self.kept: dict[str, dict[str, Tensor]] = {}

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Keep the first state."""
        self.after_step(model, 0)

    def after_step(self, model: nn.Module, step: int) -> None:
        """Keep the state if it is wanted."""
        if step in self.wanted and str(step) not in self.kept:
            self.kept[str(step)] = {key: value.cpu().clone() for key, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept so far."""
        return dict(self.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was kept."""
        self.kept = dict(state)
