"""The laboratory: data, networks and trained runs that the claims of all papers share.

At cpu scale everything is small enough for minutes on a CPU; at gpu scale it is the papers' setting as far as the
data go. Trained runs are kept in `reproductions/.cache`, so that claims which look at the same networks share them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from netkin import files
from netkin.errors import SourceError, UnknownName, did_you_mean
from netkin.sources import load_data
from netkin.sources.architectures import ConvNet, ResNet, seeded, svcca_convnet, thin, tiny10
from reproductions import training
from reproductions.training import Images, Record

HERE = Path(__file__).parent
PARTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.9, 1.0)  # of the training time: where runs are kept
TOGETHER = 6  # processes that share a GPU


@dataclass(frozen=True)
class Recipe:
    """How a network is built and trained at one scale."""

    build: Callable[[], nn.Module]
    epochs: int
    batch: int
    rate: float


def _narrow_tiny10() -> nn.Module:
    """Return a Tiny-10 of half the width."""
    channels = (3, 8, 8, 16, 16, 16, 32, 32, 32)
    return ConvNet(channels, kernels=(3, 3, 3, 3, 3, 3, 3, 1), strides=(1, 1, 2, 1, 1, 2, 1, 1), padding=0)


RECIPES: dict[str, dict[str, Recipe]] = {
    "cpu": {
        "convnet": Recipe(lambda: svcca_convnet(width=16), epochs=10, batch=64, rate=0.02),
        "resnet": Recipe(lambda: ResNet((2, 2, 2), (8, 16, 32)), epochs=10, batch=64, rate=0.05),
        "tiny10": Recipe(_narrow_tiny10, epochs=4, batch=50, rate=0.05),
        "resnet20w1": Recipe(lambda: ResNet((1, 1, 1), (8, 16, 32)), epochs=4, batch=50, rate=0.05),
    },
    "gpu": {
        "convnet": Recipe(svcca_convnet, epochs=30, batch=256, rate=0.05),
        "resnet": Recipe(lambda: thin(32), epochs=30, batch=512, rate=0.2),
        "tiny10": Recipe(tiny10, epochs=10, batch=512, rate=0.2),
        **{f"resnet20w{w}": Recipe(partial(thin, 20, width=w), epochs=30, batch=512, rate=0.2) for w in (1, 2, 3, 4)},
    },
}


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
        model = self.build()
        model.load_state_dict(dict(self.checkpoints[step]))
        return model.eval().to(next(self.model.parameters()).device)


class Lab:
    """What a claim works with.

    `data` is a folder with CIFAR-10 and tiny Shakespeare, `NETKIN_DATA` if not given; `checkpoints` one with networks
    that the authors of a paper trained, `NETKIN_CHECKPOINTS` if not given.
    """

    def __init__(
        self,
        scale: str = "cpu",
        *,
        device: str | torch.device | None = None,
        data: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
    ):
        if scale not in RECIPES:
            raise UnknownName(f"no scale {scale!r}; there are {' and '.join(RECIPES)}.")
        self.scale = scale
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() and scale == "gpu" else "cpu"))
        place = data or os.environ.get("NETKIN_DATA")
        self.data = Path(place) if place else None
        self.cache = Path(cache or HERE / ".cache")
        files = checkpoints or os.environ.get("NETKIN_CHECKPOINTS")
        self.checkpoints = Path(files) if files else None

    def seeds(self, count: int) -> range:
        """Return the seeds of `count` repetitions."""
        return range(count)

    @cached_property
    def _images(self) -> Images:
        if self.data is None:
            if self.scale == "gpu":
                raise SourceError("the gpu scale needs CIFAR-10; pass --data DIR or set NETKIN_DATA.")
            return _digits(self.device)
        return _cifar10(self.data, self.device, *((50_000, 10_000) if self.scale == "gpu" else (5_000, 2_000)))

    def images(self) -> Images:
        """Return CIFAR-10, 5,000 and 2,000 of it at cpu scale; without the files the bundled digits, enlarged."""
        return self._images

    def probe(self, count: int) -> Tensor:
        """Return the first `count` test images."""
        return self.images().test_images[:count]

    def text(self) -> Path:
        """Return the path of tiny Shakespeare."""
        place = None if self.data is None else self.data / "shakespeare" / "input.txt"
        if place is None or not place.exists():
            raise SourceError(
                "this claim reads tiny Shakespeare, `shakespeare/input.txt` in the data folder; pass --data DIR."
            )
        return place

    def checkpoint(self, name: str) -> Path:
        """Return the path of a file of weights that the authors of a paper published."""
        place = None if self.checkpoints is None else self.checkpoints / name
        if place is None or not place.exists():
            raise SourceError(
                f"this claim reads the paper's own network {name!r}; pass --checkpoints DIR or set NETKIN_CHECKPOINTS."
            )
        return place

    def accuracy(self, model: nn.Module, split: str = "test") -> float:
        """Return the share of images of a part, "test" or "train", that `model` gets right."""
        images = self.images()
        return training.accuracy(model, getattr(images, f"{split}_images"), getattr(images, f"{split}_labels"))

    def recipe(self, name: str) -> Recipe:
        """Return how the network `name` is built and trained at this scale."""
        known = RECIPES[self.scale]
        if name not in known:
            raise UnknownName(f"no network {name!r} in the laboratory{did_you_mean(name, known) or '.'}")
        return known[name]

    def fresh(self, name: str, seed: int) -> nn.Module:
        """Return the network `name` before training, on the laboratory's device."""
        model = seeded(self.recipe(name).build, seed).to(self.device)
        if self.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def total_steps(self, name: str, epochs: int | None = None) -> int:
        """Return the number of updates of a training of the network `name`."""
        recipe = self.recipe(name)
        return (epochs or recipe.epochs) * training.steps_per_epoch(self.images(), recipe.batch)

    def train(self, model: nn.Module, name: str, seed: int, **options: Any) -> list[Record]:
        """Train `model` by the recipe of `name`, which `options` of `training.train` override."""
        recipe = self.recipe(name)
        settings = {"epochs": recipe.epochs, "batch": recipe.batch, "rate": recipe.rate, "seed": seed} | options
        return training.train(model, self.images(), **settings)

    def over(self, work: Callable[[Lab, Any], Any], tasks: Iterable[Any]) -> list[Any]:
        """Return ``work(lab, task)`` of each task, in their order: one after the other, on a GPU several at a time.

        Small networks leave a GPU waiting for launches, so that several processes train nearly as many runs in the
        time of one. `work` must then be a function at the top level of a module, and what it returns must be picklable.
        """
        tasks = list(tasks)
        if self.device.type != "cuda" or len(tasks) < 2:
            return [work(self, task) for task in tasks]
        spawning = torch.multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(TOGETHER, len(tasks)), spawning) as pool:
            return list(pool.map(partial(_apart, work, self._setting), tasks))

    @property
    def _setting(self) -> dict[str, Any]:
        names = ("scale", "data", "cache", "checkpoints")
        return {name: getattr(self, name) for name in names} | {"device": str(self.device)}

    def trained_all(self, names_and_seeds: Iterable[tuple[str, int]]) -> list[Run]:
        """Return several runs; those not in the cache are trained, on a GPU several at a time."""
        wanted = list(names_and_seeds)
        missing = [(name, seed) for name, seed in wanted if not self._place(name, seed, {}).exists()]
        self.over(_train, missing)
        return [self.trained(name, seed) for name, seed in wanted]

    def trained(self, name: str, seed: int = 0, **options: Any) -> Run:
        """Return a run of the network `name`, from the cache if it was trained before with the same settings."""
        path = self._place(name, seed, options)
        if not path.exists():
            self._train_and_keep(path, name, seed, options)
        return self._read(path, name)

    def _place(self, name: str, seed: int, options: Mapping[str, Any]) -> Path:
        recipe = self.recipe(name)
        settings = [recipe.epochs, recipe.batch, recipe.rate, self.images().words, sorted(options.items())]
        mark = hashlib.sha256(json.dumps([*settings, str(recipe.build())]).encode()).hexdigest()[:10]
        return self.cache / f"{name}-{self.scale}-{seed}-{mark}.safetensors"

    def _train_and_keep(self, path: Path, name: str, seed: int, options: dict[str, Any]) -> None:
        model, kept = self.fresh(name, seed), {}
        total = self.total_steps(name, options.get("epochs"))
        wanted = {round(part * total) for part in PARTS}

        def keep(step: int) -> None:
            if step in wanted:
                kept.update({f"{step}/{key}": value.cpu().clone() for key, value in model.state_dict().items()})

        keep(0)
        history = self.train(model, name, seed, each_step=keep, **options)
        keep_weights(path, kept, history=json.dumps(history))

    def _read(self, path: Path, name: str) -> Run:
        with safe_open(path, "pt") as file:
            history = json.loads(file.metadata()["history"])
        checkpoints: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(path).items():
            step, _, rest = key.partition("/")
            checkpoints.setdefault(int(step), {})[rest] = value
        checkpoints = dict(sorted(checkpoints.items()))
        build = self.recipe(name).build
        model = build()
        model.load_state_dict(checkpoints[max(checkpoints)])
        return Run(model.eval().to(self.device), checkpoints, history, build)


def keep_weights(path: Path, weights: Mapping[str, Tensor], **words: str) -> None:
    """Write named weights to a file that appears whole or not at all, in a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, save({key: value.detach().cpu().contiguous() for key, value in weights.items()}, words))


def _cifar10(place: Path, device: torch.device, train: int, test: int) -> Images:
    parts = []
    for name, count in (("cifar10-train", train), ("cifar10", test)):
        batches = list(load_data(f"{name}:{place}", batch_size=5_000))
        parts += [torch.cat(part)[:count].to(device) for part in zip(*batches, strict=True)]
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return Images("CIFAR-10", names, *parts)


def _digits(device: torch.device) -> Images:
    """Return the bundled digits in the form of CIFAR images: three channels, each pixel four times as large."""
    parts = []
    for name in ("digits:train", "digits:test"):
        images, labels = (torch.cat(part) for part in zip(*load_data(name, batch_size=5_000), strict=True))
        larger = nn.functional.interpolate((images - 0.3) / 0.38, scale_factor=4).repeat(1, 3, 1, 1)
        parts += [larger.to(device), labels.to(device)]
    return Images("digits, enlarged", tuple(map(str, range(10))), *parts)


def _apart(work: Callable[[Lab, Any], Any], setting: Mapping[str, Any], task: Any) -> Any:
    """Do one task in a process of its own, which keeps its laboratory from task to task."""
    return work(_lab(tuple(setting.items())), task)


@cache
def _lab(setting: tuple[tuple[str, Any], ...]) -> Lab:
    return Lab(**dict(setting))


def _train(lab: Lab, name_and_seed: tuple[str, int]) -> None:
    lab.trained(*name_and_seed)
