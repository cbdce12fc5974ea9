"""Stitches that claims share: each is made once and kept in a file, with what it is worth on the test images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import netkin as nk
from netkin.applications.stitching import Stitch, fit_all, load_stitch
from netkin.errors import NoValue
from netkin.identity import weights_digest
from netkin.representations.inputs import feed
from reproductions.laboratory import Lab, cache_with_notes
from reproductions.matching.nets import KINDS, UNTRAINED, images, network, published, recipe_key, train_all, whose

Batches = list[tuple[Tensor, Tensor]]
Key = TypeVar("Key", bound=Hashable)
FEW = 8  # pieces of work that are too few for processes of their own
MAPS = 500  # test images on which whole maps are compared
BEFORE = "Stitches lie before the ReLUs: after batch norms, if any, and after sums of blocks."


@dataclass(frozen=True)
class Setting:
    """How stitches are fitted and judged at one scale: on so many images, in so many rounds of Adam."""

    fit: int
    test: int
    epochs: int
    batch: int
    every: int  # so many steps the stitch is judged, on `sample` of the images that it is fitted on
    sample: int

    @property
    def options(self) -> dict[str, Any]:
        """The options of training."""
        own = {name: getattr(self, name) for name in ("epochs", "batch", "every", "sample")}
        return own | {"lr": 1e-3, "weight_decay": 1e-4, "memory": 16 * 2**30}


SETTINGS = {
    "cpu": Setting(fit=2_000, test=1_000, epochs=2, batch=50, every=20, sample=200),
    "gpu": Setting(fit=20_000, test=10_000, epochs=10, batch=400, every=50, sample=1_000),
}


def length(scale: str, networks: str, **options: Any) -> str:
    """Return how long networks and stitches are trained; `options` override those of the scale."""
    epochs = options.get("epochs", SETTINGS[scale].epochs)
    stitches = f"stitches {epochs} epochs of {SETTINGS[scale].fit:,} images"
    return f"networks {networks}; {stitches}" if networks else stitches


@dataclass(frozen=True)
class Wanted:
    """A stitch: of two networks at the same layer, by a method, with options where that is the task loss."""

    a: str
    b: str
    layer: str
    method: str = "least_squares"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def trained(self) -> bool:
        """Whether it takes a training of its own."""
        return self.method == "task_loss"


def task_loss(pair: tuple[str, str], layer: str, **options: Any) -> Wanted:
    """Return a wish for a stitch trained on the task loss; `options` override those of the scale."""
    return Wanted(*pair, layer, "task_loss", tuple(sorted(options.items())))


def made(lab: Lab, wanted: Iterable[Wanted]) -> dict[Wanted, Stitch]:
    """Return the stitches; those that are in no file yet are made, on a GPU several at a time."""
    wanted = list(dict.fromkeys(wanted))
    train_all(lab, [name for one in wanted for name in (one.a, one.b) if not name.startswith(UNTRAINED)])
    work = _work([one for one in wanted if not place(lab, one).exists()])
    if len(work) < FEW:
        for part in work:
            make(lab, part)
    else:
        lab.over(make, work)
    return {one: load_stitch(place(lab, one), network(lab, one.a), network(lab, one.b)) for one in wanted}


def shares(lab: Lab, wanted: Mapping[Key, Sequence[Wanted]]) -> dict[Key, list[float]]:
    """Return the relative accuracies of stitches, by the same keys."""
    found = made(lab, [one for ones in wanted.values() for one in ones])
    return {key: [found[one].relative_accuracy for one in ones] for key, ones in wanted.items()}


def number(stitch: Stitch, name: str) -> float:
    """Return one number of what a stitch is worth on the test images; one that does not exist is refused."""
    value = None if stitch.evaluation is None else getattr(stitch.evaluation, name)
    if value is None:
        raise NoValue(
            f"the stitch of {' and '.join(stitch.layers)} by {stitch.method} has no {name.replace('_', ' ')}; it takes "
            "labelled test images, a second network that gets some of them right, and activations that vary."
        )
    return float(value)


def origin(lab: Lab, *kinds: str) -> str:
    """Return in words where numbers come from: whose networks, stitched at which layers, on how many images."""
    fitted, judged = size(fitting(lab)), size(judging(lab))
    counts = f"They are fitted on {fitted:,} of the training images and judged on {judged:,} of the test images."
    return f"{whose(lab, *kinds)} {BEFORE} {counts}"


def size(batches: Batches) -> int:
    """Return how many images there are."""
    return sum(len(labels) for _, labels in batches)


def _work(missing: Sequence[Wanted]) -> list[list[Wanted]]:
    """Return the stitches in pieces of work: direct ones of the same networks together, trained ones alone."""
    together: dict[Any, list[Wanted]] = {}
    for one in missing:
        together.setdefault(one if one.trained else (one.a, one.b), []).append(one)
    return list(together.values())


def make(lab: Lab, wanted: list[Wanted]) -> None:
    """Make stitches of the same two networks, judge them, and keep them in files."""
    a, b, setting = network(lab, wanted[0].a), network(lab, wanted[0].b), SETTINGS[lab.scale]
    task = KINDS[wanted[0].b.rpartition("/")[0]].data
    data, test = fitting(lab, task), judging(lab, task)
    if wanted[0].trained:
        (one,) = wanted
        options = setting.options | dict(one.options)
        stitches = {one: nk.stitch(a, one.layer, b, one.layer, data, one.method, test, **options)}
    else:
        layers, methods = (list(dict.fromkeys(getattr(one, name) for one in wanted)) for name in ("layer", "method"))
        found = fit_all(a, b, [(layer, layer) for layer in layers], data, methods, test)
        stitches = {one: found[(one.layer, one.layer), one.method] for one in wanted}
    for one, stitch in stitches.items():
        place(lab, one).parent.mkdir(parents=True, exist_ok=True)
        stitch.save(place(lab, one), overwrite=True)


def fitting(lab: Lab, task: str = "cifar10") -> Batches:
    """Return the images that stitches are fitted on."""
    found, setting = images(lab, task), SETTINGS[lab.scale]
    return _batches(found.train_images[: setting.fit], found.train_labels[: setting.fit])


def judging(lab: Lab, task: str = "cifar10", count: int | None = None) -> Batches:
    """Return the images that stitches are judged on."""
    found, count = images(lab, task), count or SETTINGS[lab.scale].test
    return _batches(found.test_images[:count], found.test_labels[:count])


def place(lab: Lab, one: Wanted) -> Path:
    """Return where a stitch is kept."""
    setting = SETTINGS[lab.scale]
    options = setting.options | dict(one.options) if one.trained else {}
    facts = [
        lab.scale,
        _weights_key(lab, one.a),
        _weights_key(lab, one.b),
        one.layer,
        one.method,
        sorted(options.items()),
    ]
    text = json.dumps([*facts, sorted(options.items()), setting.fit, setting.test, lab.images().words])
    return lab.cache / "stitches" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.netkin"


def cka_of_maps(lab: Lab, stitch: Stitch, count: int = MAPS) -> float:
    """Return the CKA of transformed activations with the second network's own, an example being a whole map.

    So the authors' programs take it; the evaluation of a stitch takes it place by place.
    """
    return float(nk.cka(nk.Moments.of(*maps(lab, stitch, count), None)))  # as the paper has it, biased


@torch.no_grad()
def maps(lab: Lab, stitch: Stitch, count: int = MAPS) -> tuple[Tensor, Tensor]:
    """Return transformed activations and the second network's own on test images, a row being a whole map."""
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    for inputs, _ in judging(lab, count=count):
        kept[0].append(stitch.transformation(stitch.network.begin(inputs)).flatten(1))
        with nk.recording(stitch.network.b, [stitch.layers[1]]) as outputs:
            feed(stitch.network.b, inputs)
        kept[1].append(outputs[stitch.layers[1]].flatten(1))
    return torch.cat(kept[0]), torch.cat(kept[1])


@cache_with_notes
def _weights_key(lab: Lab, name: str) -> str:
    """Return what tells a network's weights from all others: trained anew on a GPU they are never quite the same."""
    return recipe_key(lab, name) + ("" if published(lab, name) else weights_digest(network(lab, name)))


def _batches(inputs: Tensor, labels: Tensor, size: int = 500) -> Batches:
    return list(zip(inputs.split(size), labels.split(size), strict=True))
