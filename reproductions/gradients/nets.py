"""The paper's networks: ResNets trained on three sets of images, and those of the controls.

A network is called by its kind, its set and its seed, as in ``trained/svhn/3``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from netkin.sources.architectures import seeded
from netkin.training import Recipe, accuracy, train_many
from reproductions.laboratory import Images, Lab

SETS = ("cifar10", "cifar100", "svhn")
WORDS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
SEEDS = {"cpu": 3, "gpu": 10}  # the paper has ten ResNet-18s for each set
LONG = "200 epochs of batches of 128"
TOGETHER = 5  # networks that are trained at once on a GPU
CUT = 10  # classes of CIFAR-100 that are left
NEEDS = "Reads CIFAR-10, CIFAR-100 and SVHN, in the folders of --data that `netkin list data` names."


@dataclass(frozen=True)
class Kind:
    """How networks of a kind come to be: the recipe's name, the share of its steps, and whose labels they learn."""

    recipe: str = "resnet18"
    steps: float = 1.0
    labels: str = "true"


KINDS = {
    "trained": Kind(),
    "shuffled": Kind(steps=0.2, labels="shuffled"),
    "cut": Kind(steps=0.3),  # CIFAR-100 with its first ten classes
    "untrained": Kind(steps=0.0),
    "deep": Kind("resnet50"),
}


def names(lab: Lab, kind: str, sets: Iterable[str] = SETS) -> list[str]:
    """Return the networks of a kind, set by set."""
    return [f"{kind}/{name}/{seed}" for name in sets for seed in lab.seeds(SEEDS[lab.scale])]


def apart(name: str) -> tuple[str, str, int]:
    """Return the kind, the set and the seed of a network."""
    kind, given, seed = name.split("/")
    return kind, given, int(seed)


def images(lab: Lab, name: str) -> Images:
    """Return a set of images; at cpu scale with half the pixels a side, "cut" with the first ten classes alone."""
    kind, given, _ = apart(name)
    found = lab.images_of(given)
    if lab.scale == "cpu":
        smaller = [nn.functional.avg_pool2d(one, 2) for one in (found.train_images, found.test_images)]
        found = replace(found, train_images=smaller[0], test_images=smaller[1])
    return _cut(found) if kind == "cut" else found


def _cut(found: Images) -> Images:
    (inputs, labels), (others, other_labels) = (
        (inputs[labels < CUT], labels[labels < CUT]) for inputs, labels in (found.train, found.test)
    )
    return Images(found.name, found.classes[:CUT], inputs, labels, others, other_labels)


def recipe(lab: Lab, name: str) -> Recipe:
    """Return how a network is trained."""
    kind = KINDS[apart(name)[0]]
    whole = lab.recipe(kind.recipe).recipe
    steps = max(1, round(kind.steps * (whole.steps or 0)))
    return whole.but(steps=steps, warmup=min(whole.warmup, steps // 2))


def fresh(lab: Lab, name: str) -> nn.Module:
    """Return a network before training, with as many outputs as its set has classes."""
    kind, given, seed = apart(name)
    model = seeded(lab.recipe(KINDS[kind].recipe).build, seed)
    classes = CUT if kind == "cut" else len(lab.images_of(given).classes)
    if classes != 10:
        width = model.get_submodule("fc").in_features
        model.fc = seeded(lambda: nn.Linear(width, classes), seed)  # type: ignore[arg-type]
    return lab.placed(model)


def trained(lab: Lab, wanted: list[str]) -> Iterable[tuple[str, nn.Module, float]]:
    """Yield networks of one kind and set in evaluation mode, each with its accuracy on the test images."""
    for start in range(0, len(wanted), TOGETHER):
        some = wanted[start : start + TOGETHER]
        models, data = [fresh(lab, name) for name in some], images(lab, some[0])
        if KINDS[apart(some[0])[0]].steps:
            seeds, true = [apart(name)[2] for name in some], data.train
            sets = [true if KINDS[apart(name)[0]].labels == "true" else _shuffled(*true, name) for name in some]
            train_many(models, data_of_each=sets, recipe=recipe(lab, some[0]), seeds=seeds)
        for name, model in zip(some, models, strict=True):
            if not KINDS[apart(name)[0]].steps:
                settle(model, data.train_images[:1024])
            yield name, model.eval().requires_grad_(False), accuracy(model, data.test, precision="auto")


def _shuffled(inputs: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return images with their labels in an order of the network's own."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(apart(name)[2]))
    return inputs, labels[order.to(labels.device)]


@torch.no_grad()
def settle(model: nn.Module, inputs: Tensor) -> None:
    """Give the batch norms of a network that was not trained the statistics of some images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over the batches
    model.train()
    for part in inputs.split(256):
        model(part)
