"""Pretrained networks to choose from, the data they are chosen for, and how well each does there in the end.

A run is called by its architecture and its source, as in ``vgg11/svhn``, and a candidate by the steps behind it too,
as in ``vgg11/svhn/100``. A set of images may be a half of another's classes, as in ``cifar100/1``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import netkin as nk
from netkin.applications.transfer.evidence import feature_layer
from netkin.sources.architectures import ConvNet, ResNet, seeded, thin, tiny10, vgg11
from netkin.training import Hook, Recipe, accuracy, train
from reproductions.laboratory import Images, Lab, architecture_digest, cache_with_notes, keep_weights

SOURCES = ("cifar10", "cifar100", "svhn", "cifar100/0")
TARGETS = ("cifar10", "cifar100", "svhn", "mnist", "cifar100/1")
SEEN = {"cifar10": {"cifar10"}, "cifar100": {"cifar100", "cifar100/1"}, "svhn": {"svhn"}, "cifar100/0": {"cifar100"}}
BATCH = 1_000  # images that a network reads at a time


@dataclass(frozen=True)
class Setting:
    """How long candidates are trained, and what is given for a target; the probe gets all training images."""

    recipe: Recipe
    snapshots: tuple[int, ...]  # the steps after which a run becomes a candidate
    tuning: Recipe
    tuned_on: int
    examples: int  # that the scores read
    iterations: int  # of the probe's optimiser


_TRAINING = Recipe(
    steps=800, batch=512, lr=0.1, weight_decay=5e-4, schedule="cosine", warmup=50, precision="auto", shift=4
)
_TUNING = Recipe(
    epochs=12, batch=250, lr=0.02, weight_decay=5e-4, schedule="cosine", warmup=1, precision="auto", shift=4
)
SETTINGS = {
    "cpu": Setting(
        _TRAINING.but(steps=160, batch=100, warmup=10), (20, 160), _TUNING.but(epochs=4, batch=50), 500, 500, 50
    ),
    "gpu": Setting(_TRAINING, (100, 800), _TUNING, 5_000, 2_000, 100),
}


def _small_resnet() -> nn.Module:
    return ResNet((1, 1, 1), (8, 16, 32))


def _small_chain() -> nn.Module:
    return ConvNet((3, 8, 16, 32), kernels=(3, 3, 3), strides=(2, 2, 2), padding=1)


ARCHITECTURES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "cpu": {"resnet8": _small_resnet, "chain": _small_chain},
    "gpu": {"resnet20": partial(thin, 20), "resnet20w2": partial(thin, 20, width=2), "tiny10": tiny10, "vgg11": vgg11},
}


def runs(lab: Lab) -> list[str]:
    """Return the trainings from which the candidates come, long ones first."""
    return [f"{architecture}/{source}" for architecture in reversed(ARCHITECTURES[lab.scale]) for source in SOURCES]


def candidates(lab: Lab, target: str) -> list[str]:
    """Return the networks that never saw an image of the target."""
    fair = [run for run in runs(lab) if target not in SEEN[run.partition("/")[2]]]
    return [f"{run}/{step}" for run in fair for step in SETTINGS[lab.scale].snapshots]


def images_of(lab: Lab, name: str) -> Images:
    """Return a set of images, or the half of its classes that ends the name."""
    whole, _, half = name.partition("/")
    return _half(lab, whole, int(half)) if half else lab.images_of(whole)


@cache_with_notes
def _half(lab: Lab, name: str, half: int) -> Images:
    """Return the images of the first (0) or second (1) half of the classes, which are counted from 0 again."""
    images = lab.images_of(name)
    count = len(images.classes) // 2
    first, parts = half * count, dict[str, Tensor]()
    for part in ("train", "test"):
        pixels, labels = getattr(images, part)
        inside = (labels >= first) & (labels < first + count)
        parts |= {f"{part}_images": pixels[inside], f"{part}_labels": labels[inside] - first}
    words = f"{images.name}, classes {first} to {first + count - 1}"
    return replace(images, name=words, classes=images.classes[first : first + count], **parts)


class _Snapshots(Hook):
    """Keeps a network after some of its steps, each in its file with the accuracy on its source."""

    def __init__(self, lab: Lab, run: str):
        self.lab, self.run = lab, run

    def after_step(self, model: nn.Module, step: int) -> None:
        """Keep the network if it is wanted."""
        if step in SETTINGS[self.lab.scale].snapshots:
            reached = accuracy(model, images_of(self.lab, self.run.partition("/")[2]).test, precision="auto")
            keep_weights(_path(self.lab, f"{self.run}/{step}"), model.state_dict(), accuracy=str(reached))


def train_run(lab: Lab, run: str) -> None:
    """Train one network on its source and keep it after the wanted steps; nothing is done where all are kept."""
    setting = SETTINGS[lab.scale]
    if all(_path(lab, f"{run}/{step}").exists() for step in setting.snapshots):
        return
    images, seed = images_of(lab, run.partition("/")[2]), runs(lab).index(run)
    model = lab.placed(seeded(partial(_built, lab, run), seed))
    train(model, images.train, setting.recipe, seed=seed, hooks=[_Snapshots(lab, run)], progress=False)


def candidate(lab: Lab, name: str) -> tuple[nn.Module, float]:
    """Return a candidate in evaluation mode, and its accuracy on its source."""
    path, run = _path(lab, name), name.rpartition("/")[0]
    model = _built(lab, run)
    model.load_state_dict(load_file(path))
    with safe_open(path, "pt") as file:
        return lab.placed(model).eval(), float(file.metadata()["accuracy"])


def _built(lab: Lab, run: str) -> nn.Module:
    architecture, _, source = run.partition("/")
    return _with_head(ARCHITECTURES[lab.scale][architecture](), len(images_of(lab, source).classes))


def _with_head(model: nn.Module, classes: int) -> nn.Module:
    """Return the network with a fresh last layer."""
    name, old = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)][-1]
    model.set_submodule(name, nn.Linear(old.in_features, classes).to(old.weight))
    return model


def _path(lab: Lab, name: str) -> Path:
    run, setting = name.rpartition("/")[0], SETTINGS[lab.scale]
    source = images_of(lab, run.partition("/")[2]).words
    facts = [setting.recipe.words, architecture_digest(_built(lab, run)), source, runs(lab).index(run)]
    mark = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]
    return lab.cache / f"candidate-{name.replace('/', '-')}-{lab.scale}-{mark}.safetensors"


# --- what a candidate reaches on a target -----------------------------------------------------------------------------


def given(lab: Lab, target: str, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` training images of a target with their labels, drawn once; a larger draw begins with a smaller."""
    images, labels = images_of(lab, target).train
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count].to(labels.device)
    return images[order], labels[order]


def tuned_accuracy(lab: Lab, model: nn.Module, target: str) -> float:
    """Return the test accuracy after fine-tuning all weights, below a fresh last layer, on few images."""
    setting, images = SETTINGS[lab.scale], images_of(lab, target)
    tuned = seeded(partial(_with_head, copy.deepcopy(model), len(images.classes)))
    train(tuned, given(lab, target, setting.tuned_on), setting.tuning, seed=0, progress=False)
    return accuracy(tuned, images.test, precision="auto")


def probe_accuracy(lab: Lab, model: nn.Module, target: str) -> float:
    """Return the test accuracy of logistic regression on the features of all training images."""
    images, layer = images_of(lab, target), feature_layer(model)
    read = partial(nk.activations, model, [layer], device=lab.device, progress=False)
    train_rows, test_rows = (read(data=list(part.split(BATCH)))[layer] for part in (images.train[0], images.test[0]))
    weights = logistic(train_rows, images.train_labels, len(images.classes), SETTINGS[lab.scale].iterations)
    guess = (torch.cat([test_rows, torch.ones_like(test_rows[:, :1])], 1) @ weights).argmax(1)
    return float((guess == images.test_labels).float().mean())


def logistic(rows: Tensor, labels: Tensor, classes: int, iterations: int, decay: float = 1e-4) -> Tensor:
    """Return the weights, the intercept last, of logistic regression on standardised features, by L-BFGS."""
    mean, scale = rows.mean(0), rows.std(0).clamp(min=1e-6)
    unit = torch.cat([(rows - mean) / scale, torch.ones_like(rows[:, :1])], 1)
    weights = torch.zeros(unit.shape[1], classes, device=rows.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=iterations, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(unit @ weights, labels) + decay * weights[:-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = weights.detach()
    slopes = found[:-1] / scale[:, None]
    return torch.cat([slopes, found[-1:] - mean[None] @ slopes])
