"""The paper's networks: its own where their files are at hand, and others of the same kinds, trained here.

A network is called by its kind and its seed, as in ``tiny10/3``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from netkin.errors import SourceError
from netkin.jobs import beside
from netkin.sources import load_data
from netkin.sources.architectures import BasicBlock, ConvNet, seeded, tiny10
from netkin.sources.weights import load_weights
from netkin.training import Recipe, train, train_many
from reproductions.laboratory import Images, Lab, cache_with_notes, keep_weights, note_images, note_result

PLAIN = 0.2  # of the learning rate with batch norm, where there is none
ADAM = 2e-3  # the learning rate of Adam
UNTRAINED = "untrained-"  # before the name of a network as it was before training


@dataclass(frozen=True)
class Kind:
    """How networks of a kind come to be; `file` names those of the authors by seed, of which there are `count`."""

    recipe: str
    file: str = ""
    count: int = 0
    data: str = "cifar10"
    norm: bool = True
    optimizer: str = "sgd"


KINDS = {
    "tiny10": Kind("tiny10", "tiny10_cifar10_seed{}.pt", 12),
    **{f"resnet20w{width}": Kind(f"resnet20w{width}") for width in (1, 2, 3)},
    "tiny10-cifar100": Kind("tiny10", data="cifar100"),
    "tiny10-svhn": Kind("tiny10", data="svhn"),
    "tiny10-sgd": Kind("tiny10"),
    "tiny10-adam": Kind("tiny10", optimizer="adam"),
    "tiny10-plain-sgd": Kind("tiny10", norm=False),
    "tiny10-plain-adam": Kind("tiny10", norm=False, optimizer="adam"),
}
SETS = {"cifar100": ("CIFAR-100", 100), "svhn": ("SVHN", 10)}


@cache_with_notes
def network(lab: Lab, name: str) -> nn.Module:
    """Return a network in evaluation mode, on the laboratory's device."""
    kind, seed = _apart(name)
    if name.startswith(UNTRAINED):
        model = lab.settled(seeded(lambda: _built(lab, name), seed))
    elif published(lab, name):
        model = tiny10()
        load_weights(model, lab.checkpoint(kind.file.format(seed)))
    else:
        model = _built(lab, name)
        model.load_state_dict(load_file(_trained_file(lab, name)))
    return _with_sums(model).eval().requires_grad_(False).to(lab.device)


def published(lab: Lab, name: str) -> bool:
    """Tell whether a network is the authors' own: those who give their files and CIFAR-10 get them."""
    kind, _ = _apart(name)
    return bool(kind.file and lab.checkpoints and lab.data)


def whose(lab: Lab, *kinds: str) -> str:
    """Return in words whose networks these are."""
    own = [kind for kind in kinds if published(lab, f"{kind}/0")]
    made = [kind for kind in kinds if kind not in own]
    apart = min((KINDS[kind].count // 2 for kind in own), default=0)
    words = [
        f"The {' and '.join(own)} networks are the paper's own; the first {apart} pairs share none." if own else ""
    ]
    if made:
        recipe = lab.recipe(KINDS[made[0]].recipe).recipe
        words += [f"Trained here, {recipe.epochs} epochs: {', '.join(made)}; each network is in two of the pairs."]
    return " ".join(filter(None, words))


def recipe_key(lab: Lab, name: str) -> str:
    """Return what tells this network from all others by how it came to be."""
    kind, seed = _apart(name)
    start = UNTRAINED if name.startswith(UNTRAINED) else ""
    if published(lab, name):
        return f"{start}{kind.file.format(seed)}"
    settings = [name, lab.scale, lab.recipe(kind.recipe).words, _recipe(lab, kind).words, str(_built(lab, name))]
    return start + hashlib.sha256(json.dumps([*settings, images(lab, kind.data).words]).encode()).hexdigest()[:12]


def train_all(lab: Lab, names: list[str]) -> None:
    """Train the networks that are not at hand, on a GPU all of a kind at once."""
    missing = [name for name in dict.fromkeys(names) if not published(lab, name) and not _path(lab, name).exists()]
    if lab.device.type != "cuda":
        for name in missing:
            _trained_file(lab, name)
        return
    for kind in dict.fromkeys(name.rpartition("/")[0] for name in missing):
        _train_together(lab, [name for name in missing if name.rpartition("/")[0] == kind])


def _train_together(lab: Lab, names: list[str]) -> None:
    """Train networks of one kind at once, and keep each in its file."""
    kind, seeds = _apart(names[0])[0], [_apart(name)[1] for name in names]
    built = [partial(_built, lab, name) for name in names]
    models = [lab.placed(seeded(build, seed)) for build, seed in zip(built, seeds, strict=True)]
    data = images(lab, kind.data)
    train_many(models, data.train, _recipe(lab, kind), test=data.test, seeds=seeds)
    for name, model in zip(names, models, strict=True):
        keep_weights(_path(lab, name), model.state_dict())


def pairs(lab: Lab, kind: str, count: int) -> list[tuple[str, str]]:
    """Return ordered pairs of networks, each with the next one; of the authors' first those that share none."""
    if published(lab, f"{kind}/0"):
        total = KINDS[kind].count
        firsts = [*range(0, total, 2), *range(1, total, 2)][:count]
        return [(f"{kind}/{k}", f"{kind}/{(k + 1) % total}") for k in firsts]
    names = [f"{kind}/{seed}" for seed in range(max(2, count))]
    train_all(lab, names)
    return [(names[k], names[(k + 1) % len(names)]) for k in range(count)]


def untrained(pair: tuple[str, str]) -> tuple[str, str]:
    """Return a pair whose first network is as it was before training."""
    return UNTRAINED + pair[0], pair[1]


def layers(lab: Lab, kind: str) -> dict[str, str]:
    """Return the layers where the paper stitches, before the ReLUs: after batch norms and sums of blocks."""
    model = network(lab, f"{kind}/0")
    if isinstance(model, ConvNet):
        return {f"Layer {number}": f"bn{number}" for number in range(1, model.depth + 1)}
    blocks = [name for name, module in model.named_modules() if isinstance(module, BasicBlock)]
    return {"Conv 1": "bn1"} | {name.replace("layer", "Layer "): f"{name}.relu2.sum" for name in blocks}


def images(lab: Lab, name: str = "cifar10") -> Images:
    """Return the images that networks were trained on, all normalised as CIFAR-10 is."""
    return lab.images() if name == "cifar10" else _other(lab, name)


@note_result(note_images)
@cache_with_notes
def _other(lab: Lab, name: str) -> Images:
    words, classes = SETS[name]
    if lab.data is None:
        raise SourceError(f"this claim reads {words}; pass --data DIR or set NETKIN_DATA.")
    parts: list[Any] = []
    for part, count in (("-train", len(lab.images().train_images)), ("", len(lab.images().test_images))):
        batches = load_data(f"{name}{part},normalise=cifar10:{lab.data}", batch_size=5_000)
        parts += [torch.cat(part)[:count].to(lab.device) for part in zip(*batches, strict=True)]
    return Images(words, tuple(map(str, range(classes))), *parts)


def _apart(name: str) -> tuple[Kind, int]:
    kind, _, seed = name.removeprefix(UNTRAINED).rpartition("/")
    return KINDS[kind], int(seed)


def _built(lab: Lab, name: str) -> nn.Module:
    kind, _ = _apart(name)
    if published(lab, name):
        return tiny10()
    model = lab.recipe(kind.recipe).build()
    classes = SETS[kind.data][1] if kind.data in SETS else 10
    if classes != 10:
        model.fc = nn.Linear(model.get_submodule("fc").in_features, classes)  # type: ignore[arg-type]
    return model if kind.norm else _without_norms(model)


def _without_norms(model: nn.Module) -> nn.Module:
    """Put nothing in the place of batch norms, and let weights start so that deep networks learn without them."""
    for name, module in list(model.named_children()):
        if isinstance(module, nn.BatchNorm2d):
            setattr(model, name, nn.Identity())
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _with_sums(model: nn.Module) -> nn.Module:
    """Give the sum at the end of each residual block a name, ``relu2.sum``, so that one can stitch before its ReLU."""
    for block in [module for module in model.modules() if isinstance(module, BasicBlock)]:
        block.relu2 = nn.Sequential(OrderedDict(sum=nn.Identity(), relu=nn.ReLU()))  # type: ignore[assignment]
    return model


def _path(lab: Lab, name: str) -> Path:
    return lab.cache / f"{name.replace('/', '-')}-{recipe_key(lab, name)}.safetensors"


def _trained_file(lab: Lab, name: str) -> Path:
    """Return the file of a network trained here, which is trained now if there is none."""
    path = _path(lab, name)
    if not path.exists():
        kind, seed = _apart(name)
        model, data = lab.placed(seeded(lambda: _built(lab, name), seed)), images(lab, kind.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".training")
        saved = unfinished if lab.device.type == "cpu" else None  # on a GPU writing would take longer than training
        train(model, data.train, _recipe(lab, kind), test=data.test, seed=seed, save=saved)
        keep_weights(path, model.state_dict())
        unfinished.unlink(missing_ok=True)
        shutil.rmtree(beside(unfinished), ignore_errors=True)  # the job, whose work is kept now
    return path


def _recipe(lab: Lab, kind: Kind) -> Recipe:
    recipe = lab.recipe(kind.recipe).recipe
    if kind.data != "cifar10":  # smaller sets, seen for as many steps
        share = len(lab.images().train_images) / len(images(lab, kind.data).train_images)
        recipe = recipe.but(epochs=round((recipe.epochs or 1) * share))
    if kind.optimizer == "adam":
        return recipe.but(optimizer="adam", lr=ADAM if kind.norm else ADAM / 2, weight_decay=0.0)
    return recipe if kind.norm else recipe.but(lr=recipe.lr * PLAIN)
