"""Ten tasks of CIFAR-100 learnt in a row, and what ensembles of similar tasks gain. Claim: subspaces/task-ensembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

import netkin as nk
from netkin.applications.continual import LearntTasks
from netkin.sources.architectures import alexnet
from netkin.training import Recipe
from reproductions.claims import Finding, Measured, all_of, claim, gains, line, verdict
from reproductions.laboratory import Lab
from reproductions.recipes import length_words
from reproductions.subspaces.clients import images_a_class

TASKS, MEMBERS = 10, 3
CLOSE = 0.01  # accuracy


@dataclass(frozen=True)
class Setting:
    """How wide the AlexNet is, how tasks are trained, and how heads of other tasks' networks."""

    width: int
    recipe: Recipe
    heads: Recipe
    examples: int  # of each task, for the Fisher information and for replay
    probes: int
    seeds: int


_RECIPE = Recipe(epochs=10, batch=64, lr=0.02, momentum=0.9, shift=4, flip=True, drop_last=True)
SETTINGS = {
    "cpu": Setting(4, _RECIPE.but(epochs=4, batch=50, shift=2), Recipe(epochs=2, batch=50, lr=0.02), 10, 100, 3),
    "gpu": Setting(32, _RECIPE.but(clip=1.0), Recipe(epochs=5, batch=64, lr=0.01), 50, 1_000, 5),
}
BESIDE = ("finetune", "ewc", "replay", "joint")
SIMILARITIES = {"atom_cosine": "atoms", "cca_rms": "CCA", "cka": "CKA"}
GAIN = "accuracy gained by 3 tasks similar in "
OVER = "accuracy of the ensemble by atoms above that of "
LONGER, DRAWN, FAR = "the own network, its head trained as much longer", "3 random tasks", "the 3 least similar tasks"
SECONDS = "seconds for all pairs of tasks by "
ALONE = "accuracy of atoms alone"


@claim(
    "subspaces/task-ensembles",
    figure="Table 2",
    sentence="The model ensemble using our filter subspace similarity is significantly faster and consumes much fewer "
    "resources than probing-based methods, while maintaining comparable classification accuracy.",
    expected={f"{GAIN}atoms": 0.0208, f"{GAIN}CCA": 0.0172, f"{GAIN}CKA": 0.019, ALONE: 0.7811,
              f"{SECONDS}atoms": 0.0008, f"{SECONDS}CCA": 0.26, f"{SECONDS}CKA": 0.3},
    control=f"{LONGER}; {DRAWN}; {FAR}",
    criterion="Ten tasks of ten classes of CIFAR-100, AlexNet; coefficients and all else learn on the first task, "
    "atoms and head on the others; at test time the task is known, so that nothing is forgotten by construction. "
    "Members are networks of any other tasks, with heads trained on this one. Five parts: the ensemble by atoms is "
    f"above the own network; above {LONGER}; above {DRAWN}; above {FAR}; and within {CLOSE} of those by CCA and by "
    "CKA. Seed by seed, by the 95% interval of Student's t.",
    measures=["atom_cosine", "cca_rms", "cka"],
    training=lambda scale, _: f"{length_words(SETTINGS[scale].recipe)} a task; heads "
    f"{SETTINGS[scale].heads.epochs} epochs",
)  # fmt: skip
def task_ensembles(lab: Lab) -> Finding:
    """Gains of ensembles of tasks by three similarities, beside controls and other ways of learning in a row."""
    seeds = lab.seeds(SETTINGS[lab.scale].seeds)
    work = [[method, seed] for method in ("ewc", "replay", "atoms", "finetune", "joint") for seed in seeds]
    done = dict(zip(map(tuple, work), lab.over(learnt, work, keep=True), strict=True))
    found = [done["atoms", seed] for seed in seeds]
    own = {name: [one["accuracy"][name] for one in found] for name in found[0]["accuracy"]}
    measured = {f"{GAIN}{words}": gains(own[name], own["alone"]) for name, words in SIMILARITIES.items()}
    against = {name: gains(own["atom_cosine"], own[name]) for name in ("alone", LONGER, DRAWN, FAR)}
    measured |= {ALONE: Measured.over(own["alone"])}
    measured |= {f"{OVER}{name}": against[name] for name in (LONGER, DRAWN, FAR)}
    measured |= {f"{SECONDS}{words}": Measured.over([one["seconds"][name] for one in found], "s")
                 for name, words in SIMILARITIES.items()}  # fmt: skip
    controls = {f"{GAIN}atoms": gains(own[DRAWN], own["alone"])}
    controls |= {f"accuracy gained by {name}": gains(own[name], own["alone"]) for name in (FAR, LONGER)}
    parts = [
        *(one.above(0) for one in against.values()),
        all_of(*(gains(own["atom_cosine"], own[name]).within(-CLOSE, CLOSE) for name in ("cca_rms", "cka"))),
    ]
    others = {method: [done[method, seed] for seed in seeds] for method in BESIDE}
    return Finding(verdict(*parts), measured, controls, _note(lab, found), _curves(own, others), seeds)


def tasks(lab: Lab) -> tuple[Any, ...]:
    """Return the ten tasks, in the order of the classes."""
    whole = lab.images_of("cifar100")
    return nk.split_tasks(whole.train, whole.test, tasks=TASKS)


def begun(model: nn.Module) -> nn.Module:
    """Return the network with weights of the scale of He et al. and no biases, without which few steps teach little."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def learnt(lab: Lab, task: Sequence[Any]) -> dict[str, Any]:
    """Return what a way of learning reached with a seed: of atoms, also what ensembles of its networks reach."""
    method, seed = task
    setting = SETTINGS[lab.scale]
    options = {"ewc": {"examples": setting.examples}, "replay": {"examples": setting.examples}}.get(method)

    def build() -> nn.Module:
        return lab.placed(begun(alexnet(width=setting.width)))

    found = nk.learn_tasks(build, tasks(lab), method, setting.recipe, seeds=[seed], options=options, progress=False)
    record = found.record
    numbers = {
        "ACC": float(record.acc[0]),
        "each task": record.storage["each task"],
        "in all": record.storage["in all"],
    }
    if method == "joint":
        return numbers
    numbers |= {"BWT": float(record.bwt[0])}
    return numbers | ensembles(lab, found, seed) if method == "atoms" else numbers


def ensembles(lab: Lab, found: LearntTasks, seed: int) -> dict[str, Any]:
    """Return the accuracies of ensembles by each similarity and of their controls, and how long similarities took."""
    setting = SETTINGS[lab.scale]
    images = lab.images_of("cifar100").train_images
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: setting.probes]
    probes = images[rows.to(images.device)]

    def made(by: str, choice: str = "most similar") -> Any:
        return nk.ensemble_tasks(
            found, MEMBERS, setting.heads, similarity=by, data=None if by == "atom_cosine" else probes, choice=choice,
            candidates="all tasks", progress=False,
        )  # fmt: skip

    by = {name: made(name) for name in SIMILARITIES}
    controls = {DRAWN: made("atom_cosine", "random"), FAR: made("atom_cosine", "least similar")}
    accuracy = {name: float(one.together.mean()) for name, one in (by | controls).items()}
    plain = by["atom_cosine"]
    shared = [np.mean([len({*a} & {*b}) for a, b in zip(plain.members[0], by[name].members[0], strict=True)])
              for name in ("cca_rms", "cka")]  # fmt: skip
    return {
        "accuracy": accuracy | {"alone": float(plain.alone.mean()), LONGER: float(plain.further.mean())},
        "members in common": [float(one) for one in shared],
        "seconds": {name: _seconds(found, seed, name, probes) for name in SIMILARITIES},
    }


def _seconds(found: LearntTasks, seed: int, measure: str, probes: torch.Tensor) -> float:
    """Return how long the similarities of all pairs of tasks take."""
    networks = {name: found.network(name, seed) for name in found.record.tasks}
    started = perf_counter()
    if measure == "atom_cosine":
        nk.atom_similarity(networks)
    else:
        layers = [name for name in dict(next(iter(networks.values())).named_modules()) if name.startswith("conv")]
        nk.compare_many(networks, probes, [measure], layers=layers, pairs="corresponding", progress=False)
    return perf_counter() - started


def _note(lab: Lab, found: Sequence[Mapping[str, Any]]) -> str:
    setting = SETTINGS[lab.scale]
    common = np.mean([one["members in common"] for one in found], axis=0)
    return (
        f"AlexNet of width {setting.width}, {setting.recipe.epochs} epochs a task, "
        f"{images_a_class(lab, 'cifar100')} training images a class where the paper has 500, so "
        "that differences are compared and not accuracies; the heads of members learn for "
        f"{setting.heads.epochs} epochs. Of three members by atoms, {common[0]:.1f} are among those by CCA and "
        f"{common[1]:.1f} among those by CKA; by chance it would be 1. The paper does not say from which tasks members "
        "come, nor where the atoms of a task begin: here from all other tasks, and from those of the first task."
    )


def _curves(
    own: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, list[Any]]]:
    order = ["alone", *SIMILARITIES, DRAWN, FAR, LONGER]
    words = {"alone": "alone"} | {name: f"with tasks similar in {one}" for name, one in SIMILARITIES.items()}
    ways: dict[str, list[Any]] = {"way": ["atoms", *others]}
    ways |= line("ACC", [own["alone"], *([one["ACC"] for one in found] for found in others.values())])
    back = {method: [one["BWT"] for one in found] for method, found in others.items() if "BWT" in found[0]}
    return {
        "Accuracy of atoms and of ensembles": {"members": [words.get(name, name) for name in order]}
        | line("accuracy", [own[name] for name in order]),
        "Ways of learning tasks in a row": ways,
        "What they forget; atoms forget nothing by construction": {"way": list(back)} | line("BWT", back.values()),
    }
