"""Families: networks that are trained from one start on several sets of images, and what probing data say of them.

A family is known by the seed of its start. Its members are called by what they were trained on and a number, as in
``cifar100/1``; all have the coefficients of the start, and each an order of the examples of its own.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import netkin as nk
from netkin.representations.filters import atom_layers
from netkin.training import accuracy
from reproductions.commit import commit
from reproductions.gradients.nets import settle
from reproductions.laboratory import Images, Lab, keep_weights
from reproductions.subspaces.nets import WORDS, atoms_of, recipe, shuffled, start, train_all

NET = "vgg11"
STARTS = {"cpu": 3, "gpu": 5}
TRAINING: dict[str, dict[str, Any]] = {
    "cpu": {"steps": 200, "batch": 50, "lr": 0.05},
    "gpu": {"steps": 500, "batch": 256, "lr": 0.1},
}
PROBED = {"cpu": 500, "gpu": 1_000}  # images of each probe
PROBES = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "svhn": "SVHN", "mnist": "MNIST", "noise": "Gaussian noise"}
MEASURES = {"cca_rms": "CCA", "cka": "CKA"}
START, FRESH = "start", "fresh"  # untrained: the start itself, and one with atoms of another draw
SHUFFLED, REDRAWN = "shuffled", "redrawn"  # CIFAR-100 with shuffled labels, and from the atoms of another draw
MEMBERS = (
    "cifar100/0", "cifar100/1", "cifar10/0", "cifar10/1", "svhn/0", "svhn/1", "shuffled/0", "shuffled/1", "redrawn/0",
)  # fmt: skip
PAIRS = {  # that are compared on probes
    "CIFAR-100": ("cifar100/0", "cifar100/1"),
    "SVHN": ("svhn/0", "svhn/1"),
    "CIFAR-100 and SVHN": ("cifar100/0", "svhn/0"),
    "CIFAR-100 and shuffled labels": ("cifar100/0", "shuffled/0"),
    "untrained": (START, FRESH),
}
REDRAW = 1_000  # added to the seed of a start for atoms of another draw
WALK = 1_000_000  # added to the seed of a walk: with that of the start its first step would be the start's own atoms
Atoms = Mapping[str, Tensor]  # of each layer


@dataclass(frozen=True)
class Family:
    """What is kept of the networks from one start: atoms, similarities on probes by layer, and accuracies."""

    atoms: Mapping[str, Atoms]
    probed: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]  # by probe, pair and measure
    accuracies: Mapping[str, float]

    @cached_property
    def _cosines(self) -> nk.Comparison:
        return cosines(self.atoms)

    def by_layer(self, first: str, second: str) -> list[float]:
        """Return the atom similarity of each layer, the mean over the members of two kinds, as "cifar100" or "svhn"."""
        pairs = [(a, b) for a in self.members(first) for b in self.members(second) if a != b]
        names = list(self.atoms[START])
        return [mean(self._cosines.tables[f"atom_cosine of {name}"][pair] for pair in pairs) for name in names]

    def similarity(self, first: str, second: str) -> float:
        """Return the atom similarity of the networks, the mean over layers, and over the members of two kinds."""
        return mean(self.by_layer(first, second))

    def members(self, kind: str) -> list[str]:
        """Return the networks of a kind."""
        return [name for name in self.atoms if name.partition("/")[0] == kind]


def cosines(atoms: Mapping[str, Atoms]) -> nk.Comparison:
    """Return the atom similarities of all pairs of networks with the same coefficients, by layer too."""
    states = {name: {f"{layer}.atoms": one for layer, one in own.items()} for name, own in atoms.items()}
    return nk.atom_similarity(states, by_layer=True, progress=False)


def families(lab: Lab) -> list[Family]:
    """Return the families of all starts; those that are not kept yet are trained and read."""
    for name in PROBES:
        if name != "noise":
            lab.images_of(name)
    return [family(lab, seed) for seed in lab.seeds(STARTS[lab.scale])]


def family(lab: Lab, seed: int) -> Family:
    """Return one family, from its file if there is one."""
    path = place(lab, seed)
    if not path.exists():
        made = grown(lab, seed)
        atoms = {f"{name}:{layer}": one for name, own in made.atoms.items() for layer, one in own.items()}
        keep_weights(path, atoms, probed=json.dumps(made.probed), accuracies=json.dumps(made.accuracies))
    found: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        words = file.metadata()
        for key in list(file.keys()):
            name, _, layer = key.partition(":")
            found.setdefault(name, {})[layer] = file.get_tensor(key)
    return Family(found, json.loads(words["probed"]), json.loads(words["accuracies"]))


def place(lab: Lab, seed: int) -> Path:
    """Return the file of a family, by its training, its data and the code."""
    facts = [seed, lab.scale, lab.recipe(f"{NET}-atoms").words, nk.__version__, commit()]
    facts += [lab.images_of(name).words for name in PROBES if name != "noise"]
    mark = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return lab.cache / f"subspaces-family-{seed}-{mark}.safetensors"


def grown(lab: Lab, seed: int) -> Family:
    """Return the family of a start, trained and read now."""
    models = {name: beginning(lab, name, seed) for name in MEMBERS}
    data = {name: images(lab, name, seed) for name in MEMBERS}
    train_all(
        lab, NET, list(models.values()), [one.train for one in data.values()],
        seeds=[100 * seed + k for k in range(len(MEMBERS))], **TRAINING[lab.scale],
    )  # fmt: skip
    found = {name: accuracy(model, data[name].test, precision="auto") for name, model in models.items()}
    for name, model in ((START, start(lab, NET, seed)), (FRESH, redrawn(start(lab, NET, seed), seed))):
        settle(model, lab.images_of("cifar100").train_images[:1024])
        models[name] = model.eval()
    return Family({name: atoms_of(model) for name, model in models.items()}, probed(lab, models), found)


def beginning(lab: Lab, name: str, seed: int) -> nn.Module:
    """Return a member before its training."""
    kind, classes = name.partition("/")[0], len(images(lab, name, seed).classes)
    model = start(lab, NET, seed, classes=classes)
    return redrawn(model, seed) if kind == REDRAWN else model


@torch.no_grad()
def redrawn(model: nn.Module, seed: int) -> nn.Module:
    """Return a network with the same coefficients and the atoms of another draw."""
    made, draw = copy.deepcopy(model), torch.Generator().manual_seed(REDRAW + seed)
    for _, layer in atom_layers(made):
        fresh = torch.randn(layer.atoms.shape, generator=draw).to(layer.atoms)
        layer.atoms.copy_(fresh * (layer.atoms.norm() / fresh.norm()))
    return made


def images(lab: Lab, name: str, seed: int) -> Images:
    """Return what a member is trained on."""
    kind, _, number = name.partition("/")
    found = lab.images_of(kind if kind in PROBES else "cifar100")
    return shuffled(found, 10 * seed + int(number)) if kind == SHUFFLED else found


def probes(lab: Lab) -> dict[str, Tensor]:
    """Return the images of each probe: test images of four sets, and noise of one standard deviation."""
    count = PROBED[lab.scale]
    found = {name: lab.images_of(name).test_images[:count] for name in PROBES if name != "noise"}
    like = found["cifar100"]
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    return found | {"noise": noise}


def probed(lab: Lab, models: Mapping[str, nn.Module]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return CCA and CKA of pairs of networks at the output of each convolution, whose places are rows."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for probe, pixels in probes(lab).items():
        found[probe] = {}
        for words, (a, b) in PAIRS.items():
            names = [name for name, _ in atom_layers(models[a])]
            one = nk.compare(
                models[a], models[b], data=list(pixels.split(250)), measures=list(MEASURES), layers=names,
                pairs="corresponding", shape="positions", progress=False,
            )  # fmt: skip
            found[probe][words] = {m: [float(one.tables[m][name, name]) for name in names] for m in MEASURES}
    return found


def wandered(states: Sequence[Atoms], seed: int) -> list[dict[str, Tensor]]:
    """Return atoms that walk at random, from the first state and in each layer as far from state to state."""
    draw = torch.Generator().manual_seed(WALK + seed)
    found = [dict(states[0])]
    for before, after in pairwise(states):
        moved: dict[str, Tensor] = {}
        for name, own in found[-1].items():
            step = torch.randn(own.shape, generator=draw)
            moved[name] = own + step * ((after[name] - before[name]).norm() / step.norm())
        found.append(moved)
    return found


def in_words(lab: Lab, found: Sequence[Family]) -> str:
    """Say which networks these are, and how well they do."""
    kinds = {"CIFAR-100": "cifar100", "CIFAR-10": "cifar10", "SVHN": "svhn", "shuffled labels of CIFAR-100": SHUFFLED}
    right = {}
    for words, kind in kinds.items():
        right[words] = mean(own for one in found for name, own in one.accuracies.items() if name.startswith(kind + "/"))
    changed = recipe(lab, NET).but(**TRAINING[lab.scale])
    return (
        f"{WORDS[NET]} with 9 atoms a layer, {len(found)} starts; atoms and the head are trained for {changed.steps:,} "
        f"steps of {changed.batch} images at a rate of {changed.lr:g}; coefficients and the scales of batch norms "
        f"are fixed. Test accuracy: {', '.join(f'{words} {100 * own:.0f}%' for words, own in right.items())}. The "
        "paper names neither the architecture nor the training here, and its CelebA is not among the probes."
    )
