"""The paper's networks: coefficients at random and fixed, and atoms and linear layers that are trained from one start.

Networks are called by their architecture, "resnet18", "alexnet" or "vgg11"; how they are trained is in the laboratory's
recipes of that name with "-atoms".
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from netkin.representations.filters import atom_layers, decompose, freeze_except
from netkin.sources.architectures import seeded
from netkin.training import Recipe, train_many
from reproductions.gradients.nets import settle
from reproductions.laboratory import Images, Lab

HEADS = {"resnet18": ("fc",), "alexnet": ("fc6", "fc7", "fc8"), "vgg11": ("fc",)}
WORDS = {"resnet18": "ResNet-18", "alexnet": "AlexNet", "vgg11": "VGG11"}
ATOMS = 9  # of 3 × 3 kernels, the paper's typical setting; fewer leave their span to be compared
TOGETHER = 10  # networks that are trained at once
RELU_GAIN = 6**0.5  # from the scale of torch's own start to one that a ReLU keeps
Data = tuple[Tensor, Tensor]


def recipe(lab: Lab, name: str) -> Recipe:
    """Return how networks of an architecture are trained."""
    return lab.recipe(f"{name}-atoms").recipe


def start(lab: Lab, name: str, seed: int = 0, *, classes: int = 10, atoms: int = ATOMS) -> nn.Module:
    """Return a network before training, in which only atoms and linear layers have gradients.

    Atoms and coefficients are random and depend on the seed and the number of atoms alone. `classes` is the number of
    outputs; another number leaves all but the last layer as it is.
    """
    model = seeded(lab.recipe(f"{name}-atoms").build, seed)
    last = HEADS[name][-1]
    if classes != 10:
        width = model.get_submodule(last).in_features
        setattr(model, last, seeded(lambda: nn.Linear(width, classes), seed))  # type: ignore[arg-type]
    made = seeded(lambda: _drawn(model, atoms), seed)
    return lab.placed(freeze_except(made, ["atoms", *HEADS[name]]))


@torch.no_grad()
def _drawn(model: nn.Module, atoms: int) -> nn.Module:
    """Return the network with random atoms and coefficients, filters of the scale of He et al. and no biases."""
    made = decompose(model, atoms).model
    for _, layer in atom_layers(made):
        layer.reset_parameters()
        layer.coefficients.mul_(RELU_GAIN)
        if layer.bias is not None:
            layer.bias.zero_()
    return made


def tasks(lab: Lab, count: int = 10, of: str = "cifar100") -> list[Images]:
    """Return a set of images as tasks of as many classes each, in the order of the classes, which count from 0."""
    whole = lab.images_of(of)
    each = len(whole.classes) // count
    return [classes_of(whole, range(k * each, (k + 1) * each)) for k in range(count)]


def classes_of(whole: Images, classes: range) -> Images:
    """Return the images of some classes in a row, which count from 0."""
    parts: list[Tensor] = []
    for inputs, labels in (whole.train, whole.test):
        own = (labels >= classes.start) & (labels < classes.stop)
        parts += [inputs[own], labels[own] - classes.start]
    return Images(whole.name, whole.classes[classes.start : classes.stop], *parts)


def shuffled(data: Images, seed: int) -> Images:
    """Return images whose training labels are in an order of their own."""
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))
    return replace(data, train_labels=data.train_labels[order.to(data.train_labels.device)])


def train_all(
    lab: Lab,
    name: str,
    models: Sequence[nn.Module],
    data_of_each: Sequence[Data],
    *,
    seeds: Sequence[int] | None = None,
    callback: Any = None,
    callback_steps: Collection[int] = (),
    **changes: Any,
) -> list[nn.Module]:
    """Train networks by the recipe of `name`, several at once, and return them in evaluation mode.

    Args:
        lab: The laboratory.
        name: The architecture, whose recipe is taken.
        models: The networks, each of them a copy of its own.
        data_of_each: Images and labels for each.
        seeds: Of the order of the examples, one for each; 0, 1, 2, ... if not given.
        callback: A function of ``(number, model, step)`` that may read a network on its way.
        callback_steps: After which steps it is called; 0 is before the first.
        **changes: Settings of the recipe that are other than there, and options of `train_many`.
    """
    seeds = range(len(models)) if seeds is None else seeds
    for first in range(0, len(models), TOGETHER):
        some = slice(first, first + TOGETHER)
        seen = None if callback is None else _counted_from(callback, first)
        train_many(
            models[some], data_of_each=data_of_each[some], recipe=recipe(lab, name), seeds=list(seeds[some]),
            callback=seen, callback_steps=callback_steps, progress=False, **changes,
        )  # fmt: skip
    return [model.eval() for model in models]


def _counted_from(callback: Any, first: int) -> Any:
    return lambda number, model, step: callback(first + number, model, step)


def copies(model: nn.Module, count: int) -> list[nn.Module]:
    """Return so many copies of a start, which share nothing but its values."""
    return [copy.deepcopy(model) for _ in range(count)]


def atoms_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the atoms of each layer, on the CPU."""
    return {name: layer.atoms.detach().cpu().clone() for name, layer in atom_layers(model)}


@torch.no_grad()
def walked(begin: nn.Module, trained: nn.Module, seed: int, images: Tensor) -> nn.Module:
    """Return the start after a random walk that went in each layer as far from it as training did.

    The sum of many small random steps is one step in a random direction. Batch norms have the statistics of `images`.
    """
    made, draw = copy.deepcopy(begin), torch.Generator().manual_seed(seed)
    ends = dict(atom_layers(trained))
    for name, layer in atom_layers(made):
        far = (ends[name].atoms - layer.atoms).norm()
        step = torch.randn(layer.atoms.shape, generator=draw).to(layer.atoms)
        layer.atoms.add_(step * (far / step.norm()))
    if any(isinstance(module, nn.BatchNorm2d) for module in made.modules()):
        settle(made, images)
    return made.eval()
