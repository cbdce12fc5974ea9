"""Clients that train by themselves from one start, and what their atoms tell of their data.

Claim: subspaces/user-clusters. The networks are those of the claims about federations too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import netkin as nk
from netkin.applications.federated import Federation
from netkin.representations.filters import atom_layers
from netkin.sources.architectures import seeded
from netkin.training import Recipe
from reproductions.claims import Finding, Measured, claim, gains, line, verdict
from reproductions.laboratory import Images, Lab
from reproductions.subspaces.nets import ATOMS, RELU_GAIN

HEAD = "head"
WIDTHS = {"cpu": (8, 16, 16), "gpu": (32, 64, 64)}
SIDE = {"cpu": 16, "gpu": 32}  # pixels of an image
GROUP = 5  # classes of CIFAR-100 that a group of clients has
WELL, APART = 0.5, 0.9  # adjusted Rand index
Examples = tuple[Tensor, Tensor]
Clients = dict[str, Examples]


@dataclass(frozen=True)
class Setting:
    """Who the clients are, and how long they train."""

    groups: int  # of CIFAR-100's classes
    clients: int  # of each group
    digits: int  # clients with images of SVHN
    stages: tuple[int, ...]  # the rounds after which clients are compared
    recipe: Recipe  # of a round
    seeds: int


_RECIPE = Recipe(epochs=5, batch=25, lr=0.01, momentum=0.9, drop_last=True)  # rate and momentum of section A.2
SETTINGS = {
    "cpu": Setting(6, 3, 4, (1, 2, 4), _RECIPE.but(batch=16), 3),
    "gpu": Setting(20, 5, 20, (1, 4, 8), _RECIPE, 5),
}
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)  # of a client's images where clients take unequal numbers of steps

GROUPS = "adjusted Rand index, clusters by atoms against groups"
SETS = "adjusted Rand index, two clusters against CIFAR-100 and SVHN"
UNEQUAL = "the same of clients with unequal numbers of steps, against groups"
BY_FILTERS = "clusters by whole filters against groups"
BY_HEADS = "clusters by heads against groups"
BY_WAY = "clusters by the distance from the start against groups"
BY_STEPS = "clients with unequal numbers of steps, against their numbers of steps"


def network(scale: str, classes: int, seed: int) -> nn.Module:
    """Return an AlexNet with three convolutions of random atoms and coefficients, as in section 3.3."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *WIDTHS[scale]), WIDTHS[scale], strict=False):
            layers += [nk.AtomConv2d(inputs, outputs, 3, padding=1, atoms=ATOMS), nn.ReLU(), nn.MaxPool2d(2)]
        width = WIDTHS[scale][-1] * (SIDE[scale] // 8) ** 2
        made = nn.Sequential(*layers, nn.Flatten())
        made.add_module(HEAD, nn.Linear(width, classes))
        with torch.no_grad():
            for _, layer in atom_layers(made):
                layer.coefficients.mul_(RELU_GAIN)
                layer.bias.zero_()  # type: ignore[union-attr]
        return made

    return seeded(build, seed)


def images(lab: Lab, name: str) -> Images:
    """Return a set of images as large as the networks of the scale take them."""
    whole, times = lab.images_of(name), 32 // SIDE[lab.scale]
    smaller = [nn.functional.avg_pool2d(one, times) for one in (whole.train_images, whole.test_images)]
    return Images(whole.name, whole.classes, smaller[0], whole.train_labels, smaller[1], whole.test_labels)


def images_a_class(lab: Lab, *names: str) -> int:
    """Return the training images a class of the first set; the record names all sets, whichever process read them."""
    first, *_ = map(lab.images_of, names)
    return len(first.train_labels) // len(first.classes)


def grouped_clients(lab: Lab, seed: int) -> tuple[Clients, dict[str, int]]:
    """Return clients in groups that share classes of CIFAR-100, a last group with SVHN, and the group of each.

    All have equally many images. The classes of a group count from 0, so that heads do not tell them.
    """
    setting, natural, digits = SETTINGS[lab.scale], images(lab, "cifar100"), images(lab, "svhn")
    own = natural.train_labels < setting.groups * GROUP
    count = setting.groups * setting.clients
    split = nk.split_by_classes(
        (natural.train_images[own], natural.train_labels[own]), count, GROUP, partition="groups", equal=True, seed=seed
    )
    found = {name: (inputs, labels % GROUP) for name, (inputs, labels) in split.train.items()}
    each = min(len(labels) for _, labels in found.values())
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(seed))
    for k in range(setting.digits):
        rows = order[k * each : (k + 1) * each].to(digits.train_labels.device)
        found[str(count + k)] = digits.train_images[rows], digits.train_labels[rows]
    return found, {name: min(int(name) // setting.clients, setting.groups) for name in found}


def shortened(clients: Clients, groups: Mapping[str, int], seed: int) -> tuple[Clients, dict[str, int]]:
    """Return clients of which each has a share of its images, and which share: in each group all shares in turn."""
    found, levels, turn = Clients(), dict[str, int](), dict[int, int]()
    for name, (inputs, labels) in clients.items():
        place = turn.setdefault(groups[name], 0)
        turn[groups[name]] += 1
        levels[name] = place % len(SHARES)
        draw = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed * 1_000 + int(name)))
        rows = draw[: round(SHARES[levels[name]] * len(labels))].to(labels.device)
        found[name] = inputs[rows], labels[rows]
    return found, levels


@claim(
    "subspaces/user-clusters",
    figure="Figs. 5, 7",
    sentence="a distinct cluster of the 20 SVHN clients is observed, indicating a higher similarity among these "
    "clients and dissimilarity with the CIFAR clients. Additionally, every group of 5 CIFAR clients, who share "
    "the same task, also exhibit a high similarity among themselves.",
    expected={GROUPS: "clearly seen", SETS: "distinct"},
    control="clusters by how far each client came from the start, by whole filters and by heads; and clients with "
    "unequal numbers of steps, clustered against these",
    criterion="Clients of equally many images train atoms and head from one start, without communication; clusters are "
    "found by average linkage on atom_cosine, as many as there are groups. Four parts. Their adjusted Rand index "
    f"with the groups is above {WELL}; it is above that of clusters by the distance from the start; two clusters have "
    f"one above {APART} with CIFAR-100 and SVHN; and where clients of each group take unequal numbers of steps, the "
    "index with the groups is above that with the numbers of steps. All seed by seed, by the 95% interval of "
    "Student's t.",
    measures=["atom_cosine"],
    papers_training="100 rounds of one epoch",
    training=lambda scale, _: f"{SETTINGS[scale].stages[-1]} rounds of {SETTINGS[scale].recipe.epochs} epochs",
)
def user_clusters(lab: Lab) -> Finding:
    """Clusters of clients by their atoms, against groups of data and numbers of steps."""
    seeds = lab.seeds(SETTINGS[lab.scale].seeds)
    found = lab.over(clustered, seeds, keep=True)
    values = {name: [one["last"][name] for one in found] for name in found[0]["last"]}
    measured = {name: Measured.over(values[name]) for name in (GROUPS, SETS, UNEQUAL)}
    controls = {GROUPS: Measured.over(values[BY_WAY]), UNEQUAL: Measured.over(values[BY_STEPS])}
    controls |= {name: Measured.over(values[name]) for name in (BY_FILTERS, BY_HEADS)}
    parts = [
        measured[GROUPS].above(WELL),
        gains(values[GROUPS], values[BY_WAY]).above(0),
        measured[SETS].above(APART),
        gains(values[UNEQUAL], values[BY_STEPS]).above(0),
    ]
    return Finding(verdict(*parts), measured, controls, _note(lab, found), _curves(lab, found), seeds)


def clustered(lab: Lab, seed: int) -> dict[str, Any]:
    """Return what clusters of a seed's clients tell, after each stage and at last."""
    setting = SETTINGS[lab.scale]
    clients, groups = grouped_clients(lab, seed)
    begin = lab.placed(nk.freeze_except(network(lab.scale, 10, seed), ["atoms", HEAD]))
    stages = list(trained_clients(begin, clients, setting, seed))
    fewer, levels = shortened(clients, groups, seed)
    *_, unequal = trained_clients(begin, fewer, setting, seed)
    last, truth = stages[-1], list(groups.values())
    counts = len(set(truth)), len(set(levels.values()))
    heads = last.personal[f"{HEAD}.weight"].reshape(len(clients), -1)
    indices = {
        GROUPS: index(last.similarity, truth, counts[0]),
        SETS: index(last.similarity, [one == max(truth) for one in truth], 2),
        UNEQUAL: index(unequal.similarity, truth, counts[0]),
        BY_STEPS: index(unequal.similarity, list(levels.values()), counts[1]),
        BY_FILTERS: index(nk.user_similarity(last, gauge="orthonormal"), truth, counts[0]),
        BY_HEADS: index(cosines(heads), truth, counts[0]),
        BY_WAY: index(-np.abs(np.subtract.outer(way := ways(last, begin), way)), truth, counts[0]),
    }
    return {
        "last": indices,
        "stages": [index(one.similarity, truth, counts[0]) for one in stages],
        "chosen": len(set(nk.user_clusters(last.similarity))),
        "inside": [_mean_where(one, truth, same=True) for one in stages],
        "outside": [_mean_where(one, truth, same=False) for one in stages],
        "start": float(np.mean(way)),
        "images": len(next(iter(clients.values()))[1]),
    }


def trained_clients(begin: nn.Module, clients: Clients, setting: Setting, seed: int) -> Sequence[Federation]:
    """Return the clients after each stage; none hears of another."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            nk.federate(
                begin, clients, "local", coefficients="fixed", rounds=rounds, recipe=setting.recipe, method="stacked",
                seed=seed, save=Path(folder) / "clients.netkin", progress=False,
            )
            for rounds in setting.stages
        ]  # fmt: skip


def index(similarity: Any, truth: Sequence[Any], count: int) -> float:
    """Return the adjusted Rand index of clusters with the truth."""
    return nk.adjusted_rand(nk.user_clusters(similarity, count), truth)


def cosines(rows: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs of rows."""
    unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(unit @ unit.T)


def ways(found: Federation, begin: nn.Module) -> np.ndarray:
    """Return how similar each client's atoms still are to those of the start, in the mean over layers."""
    start = {name: one.detach().cpu().double().numpy().ravel() for name, one in begin.named_parameters()}
    atoms = [name for name, part in found.parts.items() if part == "atoms"]
    own = {name: found.personal[name].reshape(len(found.clients), -1).astype(np.float64) for name in atoms}
    each = [own[n] @ start[n] / np.linalg.norm(own[n], axis=1) / np.linalg.norm(start[n]) for n in atoms]
    return np.asarray(np.mean(each, axis=0))


def _mean_where(found: Federation, truth: Sequence[int], *, same: bool) -> float:
    """Return the mean similarity of two clients of one group, or of two groups."""
    values = found.similarity.table().to_numpy()  # type: ignore[union-attr]
    alike = np.equal.outer(truth, truth)
    chosen = (alike if same else ~alike) & ~np.eye(len(truth), dtype=bool)
    return float(values[chosen].mean())


def _note(lab: Lab, found: Sequence[Mapping[str, Any]]) -> str:
    setting, one = SETTINGS[lab.scale], found[0]
    epochs = setting.stages[-1] * (setting.recipe.epochs or 0)
    chosen = ", ".join(str(own["chosen"]) for own in found)
    return (
        f"{setting.groups * setting.clients} clients of {setting.groups} groups of {GROUP} classes of CIFAR-100 and "
        f"{setting.digits} of SVHN, {one['images']} images each, of {SIDE[lab.scale]} pixels a side, for {epochs} "
        f"epochs; the paper has 100 epochs, and 500 images a class of CIFAR-100 where we take "
        f"{images_a_class(lab, 'cifar100', 'svhn')}. Where the number of clusters is not given, the silhouette finds "
        f"{chosen} for {setting.groups + 1} groups. Atoms have a mean cosine of {one['start']:.3f} with their start. "
        "Whole filters are cosines of filters, which are atoms in the orthonormal gauge."
    )


def _curves(lab: Lab, found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    setting = SETTINGS[lab.scale]
    epochs = [rounds * (setting.recipe.epochs or 0) for rounds in setting.stages]
    by_stage = {name: list(zip(*(one[name] for one in found), strict=True)) for name in ("stages", "inside", "outside")}
    return {
        "Adjusted Rand index of clusters by atoms": {"epoch": epochs} | line("against groups", by_stage["stages"]),
        "Mean similarity of two clients": {"epoch": epochs}
        | line("of one group", by_stage["inside"])
        | line("of two groups", by_stage["outside"]),
    }
