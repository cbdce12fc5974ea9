"""Whether the cosine of atoms goes with CCA, CKA and principal angles over networks of ten tasks.

Claim: subspaces/correlation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from torch import nn

from netkin.training import accuracy
from reproductions.claims import Decision, Finding, Measured, all_of, claim, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_of
from reproductions.subspaces import nets
from reproductions.subspaces.pairs import (
    ATOM,
    CCA,
    CKA,
    SPAN,
    WEIGHT,
    Tables,
    correlated,
    correlation,
    gained,
    mantel,
    pairs_of,
    probes,
    tables,
)

FEW_ATOMS = 6  # with nine the span of the atoms is everything, and Grassmann 1
STARTS = {"cpu": {"resnet18": 1, "alexnet": 2}, "gpu": {"resnet18": 3, "alexnet": 5}}
TRAINING: dict[str, dict[str, dict[str, Any]]] = {  # at rates that move atoms
    "cpu": {"resnet18": {"steps": 100, "lr": 0.3}, "alexnet": {"lr": 0.1, "clip": 1.0}},
    "gpu": {"resnet18": {"lr": 0.1}, "alexnet": {"lr": 0.1, "clip": 1.0}},
}
WORKED = ("resnet18", "alexnet")
HIGH = 0.8
RARE = 0.05
OTHERS = {CCA: "CCA", CKA: "CKA", SPAN: "Grassmann"}
BY_T = "by the 95% interval of Student's t, errors by the jackknife over networks"


def _named(name: str, other: str, what: str = "atoms") -> str:
    return f"{nets.WORDS[name]}: correlation of {what} with {OTHERS[other]}"


@claim(
    "subspaces/correlation",
    figure="Fig. 2",
    sentence="The CCA and filter subspace similarity are calculated among 45 pairs of models. The correlation between "
    "CCA and filter subspace similarity is 0.9327 … These findings clearly indicate that the proposed filter subspace "
    "similarity exhibits a strong linear relationship with well-established probing-based similarities",
    expected={_named("resnet18", CCA): 0.9327, _named("resnet18", CKA): 0.9550, _named("resnet18", SPAN): 0.9469,
              _named("alexnet", CCA): "0.8638 (Fig. 9)"},
    control="random walks from the start that went as far in each layer; and `weight_cosine` in the place of atoms",
    criterion="Ten networks from one start, trained by their atoms and heads alone on ten classes of CIFAR-100 each; "
    f"random coefficients; {FEW_ATOMS} atoms, since nine span everything. Similarities are means over layers, of "
    "outputs of convolutions with positions as rows, on test images of all classes. Correlations are over 45 pairs, in "
    "the mean over starts. Five parts: on ResNet-18 with CCA, CKA and Grassmann and on AlexNet with CCA the "
    f"correlation is above {HIGH}, rare in a Mantel permutation of the networks (p < {RARE}), and above that of the "
    f"random walks; and atoms correlate with CCA more than `weight_cosine` does, on both. All {BY_T}.",
    measures=[ATOM, WEIGHT, SPAN, CCA, CKA],
    training=lambda scale, _: ", ".join(
        f"{name} {length_of(f'{name}-atoms', scale, **own)}" for name, own in TRAINING[scale].items()
    ),
)  # fmt: skip
def correlations(lab: Lab) -> Finding:
    """Correlations over pairs of networks, and over pairs of random walks."""
    families = {name: [family(lab, name, start) for start in lab.seeds(STARTS[lab.scale][name])] for name in WORKED}
    trained = {name: [one[0] for one in own] for name, own in families.items()}
    walks = {name: [one[1] for one in own] for name, own in families.items()}
    measured, controls = dict[str, Measured](), dict[str, Measured]()
    parts = []
    for name, other in product(WORKED, OTHERS):
        words = _named(name, other)
        measured[words] = correlated(trained[name], ATOM, other)
        measured[f"{words}, p by Mantel"] = Measured(p := mantel(trained[name], ATOM, other))
        controls[words] = correlated(walks[name], ATOM, other)
        controls[f"{words}, p by Mantel"] = Measured(mantel(walks[name], ATOM, other))
        measured[_named(name, other, "weights")] = correlated(trained[name], WEIGHT, other)
        if name == "resnet18" or other == CCA:
            gain = gained(trained[name], ATOM, walks[name], ATOM, other)
            parts.append(all_of(measured[words].above(HIGH), p < RARE, gain.above(0)))
    parts.append(_beyond_weights(trained))
    accuracies = {name: mean(score for one in own for score in one[2]) for name, own in families.items()}
    return Finding(
        verdict(*parts), measured, controls, _note(lab, trained, accuracies), _curves(trained, walks),
        lab.seeds(max(STARTS[lab.scale].values())),
    )  # fmt: skip


def family(lab: Lab, name: str, start: int) -> tuple[Tables, Tables, list[float]]:
    """Return the similarities of networks of ten tasks from one start and of as long walks, and the accuracies."""
    begin, tasks = nets.start(lab, name, start, atoms=FEW_ATOMS), nets.tasks(lab)
    sets, own = [task.train for task in tasks], TRAINING[lab.scale][name]
    models = nets.train_all(lab, name, nets.copies(begin, len(tasks)), sets, **own)
    scores = [accuracy(model, task.test, precision="auto") for model, task in zip(models, tasks, strict=True)]
    return tables(models, probes(lab)), tables(walks_of(lab, begin, models), probes(lab)), scores


def walks_of(lab: Lab, begin: nn.Module, models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return random walks from the start, one for each network and as long."""
    images = lab.images_of("cifar100").train_images[:1000]
    return [nets.walked(begin, model, seed, images) for seed, model in enumerate(models)]


def _beyond_weights(trained: dict[str, list[Tables]]) -> Decision:
    """Tell whether atoms correlate with CCA more than weights do, on both architectures."""
    return all_of(*(gained(own, ATOM, own, WEIGHT, CCA).above(0) for own in trained.values()))


def _note(lab: Lab, trained: dict[str, list[Tables]], accuracies: dict[str, float]) -> str:
    told = []
    for name, own in trained.items():
        each = ", ".join(f"{correlation([one], ATOM, CCA, range(len(one[ATOM][0]))):.3f}" for one in own)
        apart = np.abs(np.array([one[ATOM] - one[WEIGHT] for one in own])).max()
        recipe = nets.recipe(lab, name).but(**TRAINING[lab.scale][name])
        told.append(
            f"{nets.WORDS[name]}: {recipe.words}; test accuracy {accuracies[name]:.3f} of ten classes; "
            f"with CCA, start by start, {each}; cosines of atoms and of weights differ by {apart:.1g} at most."
        )
    return f"{len(probes(lab)):,} probing images. {' '.join(told)}"


def _curves(trained: dict[str, list[Tables]], walks: dict[str, list[Tables]]) -> dict[str, dict[str, list[Any]]]:
    """Return CCA by the cosine of atoms, pair by pair of the first start."""
    curves = {}
    for kind, families in (("trained on ten tasks", trained), ("after random walks", walks)):
        for name, own in families.items():
            some = range(len(own[0][ATOM][0]))
            x, y = (pairs_of(own[0][one], some) for one in (ATOM, CCA))
            order = np.argsort(x)
            curves[f"{nets.WORDS[name]}s {kind}"] = {"cosine of atoms": x[order].tolist(), "CCA": y[order].tolist()}
    return curves
