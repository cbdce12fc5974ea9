"""What measures other than the paper's say of independently trained networks, and sketches with fewer buckets.

Claims: gradients/other-measures and gradients/buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import netkin as nk
from netkin.applications.transfer.fisher import TaskEmbedding
from reproductions.claims import Finding, all_of, claim, verdict
from reproductions.gradients.nets import LONG, SEEDS, names
from reproductions.gradients.orderings import (
    BY_T,
    DESIDERATA,
    RIGHT,
    cka,
    folded,
    groups,
    jackknifed,
    kernels,
    mean_shares,
    pair_means,
    pairs_curve,
    scores,
    similarity,
)  # fmt: skip
from reproductions.gradients.readings import BUCKETS, SEEN, Kept, networks_in_words, read_all
from reproductions.laboratory import Lab

FEW = {"cpu": 32, "gpu": 128}
TOO_FEW = {"cpu": 4, "gpu": 8}
ALIKE = 0.95  # correlation of two pictures
NEAR = 0.1  # difference of shares


@claim(
    "gradients/other-measures",
    figure="Fig. 2",
    sentence="when it [Task2Vec] is used to compare independently trained models, it doesn't provide insightful "
    "similarity scores. A distance measure based on the FR norm is presented in Fig. 3, and it does not meet the "
    "desiderata.",
    expected={"Task2Vec, worst desideratum": "not met", "Fisher–Rao distance, worst desideratum": "not met",
              "Task2Vec, SVHN with itself minus SVHN with others": "below 0",
              "Fisher–Rao distance, CIFAR-100 told from SVHN": "no"},
    control="CKA of features and gradients between the same networks, as the paper compares them",
    criterion="Independently trained ResNet-18s, each on the test images of its own set. Four parts: of Task2Vec, by "
    "its plain cosine, and "
    f"of the Fisher–Rao distance, the share of right orderings is below {RIGHT} in the worst of the three desiderata, "
    "and below that of the control in its worst; pairs of SVHN networks are less similar by Task2Vec than SVHN with "
    "CIFAR networks (Fig. 2); and by the Fisher–Rao distance the share of orderings in which networks of CIFAR-100 and "
    f"of SVHN are each closer to their own kind than to the other is below {RIGHT} (Fig. 3). All {BY_T}.",
    papers_training=LONG,
)  # fmt: skip
def other_measures(lab: Lab) -> Finding:
    """Whole networks compared by Task2Vec and by Fisher–Rao norms."""
    wanted, sets = names(lab, "trained"), groups(lab)
    kept = read_all(lab, wanted)
    tables = {"Task2Vec": task2vec_similarity(kept), "Fisher–Rao distance": fisher_rao_similarity(kept)}
    ours = similarity(kept, "whole", "hadamard", cka)
    worst = int(np.argmin(mean_shares(ours, sets)))
    measured, controls, parts = {}, {}, []
    for name, table in tables.items():
        bad = int(np.argmin(mean_shares(table, sets)))
        own = jackknifed(partial(_one, table, bad), sets)
        gain = jackknifed(partial(_gap, table, bad, ours, worst), sets)
        measured[f"{name}, worst desideratum"] = own
        controls[f"{name}, worst desideratum"] = jackknifed(partial(_one, ours, worst), sets)
        parts.append(all_of(own.below(RIGHT), gain.below(0)))
    inside = jackknifed(partial(_inside, tables["Task2Vec"]), sets)
    told = jackknifed(partial(_told, tables["Fisher–Rao distance"]), sets)
    measured["Task2Vec, SVHN with itself minus SVHN with others"] = inside
    measured["Fisher–Rao distance, CIFAR-100 told from SVHN"] = told
    for name, table in tables.items():
        measured |= {f"{name}, desideratum {d}": one for d, one in zip(DESIDERATA, scores(table, sets), strict=True)}
    controls["Task2Vec, SVHN with itself minus SVHN with others"] = jackknifed(partial(_inside, ours), sets)
    controls["Fisher–Rao distance, CIFAR-100 told from SVHN"] = jackknifed(partial(_told, ours), sets)
    curves: dict[str, dict[str, list[Any]]] = {}
    for name, table in tables.items():
        means = pair_means(table, sets)
        curves[f"Similarity by {name}"] = {"sets": list(means), "similarity": [float(one[0]) for one in means.values()]}
    note = (
        f"Task2Vec is the diagonal of the Fisher information of all filters but the head's, on {SEEN[lab.scale]} test "
        "images, one y drawn for each, the mean over each filter; similarity is the plain cosine. y of the Fisher–Rao "
        "norm is from the "
        f"prediction, in exact mean; similarity is minus the distance. {networks_in_words(lab, {'trained': wanted})}"
    )
    return Finding(
        verdict(*parts, inside.below(0), told.below(RIGHT)), measured, controls, note, curves,
        lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


@claim(
    "gradients/buckets",
    figure="App. C",
    sentence="We tested both M = 512 and M = 128, and there is no significant difference between these two settings.",
    expected={"correlation of the pictures": "about 1", "largest difference of shares": "about 0"},
    control="a sketch with too few buckets, 8 of 512 (4 of 128 at cpu scale)",
    criterion="CKA of K̃_f ∘ K̃_g between ResNet-18s on the test images, from a sketch of M = 512 buckets and from an "
    "independent one of M = 128 (128 and 32 at cpu scale). Two parts: over the six pairs of sets and all blocks the "
    f"mean similarities of the two are correlated above {ALIKE}, and more than those of the control; and the shares of "
    f"right orderings, in the mean over blocks and two seeds, differ by less than {NEAR} for each desideratum. All "
    f"{BY_T}.",
    measures=["sketched_cka_by_buckets"],
    papers_training=LONG,
)
def buckets(lab: Lab) -> Finding:
    """The picture of Fig. 1 from many and from few buckets."""
    wanted, sets = names(lab, "trained"), groups(lab)
    kept = read_all(lab, wanted)
    seeds = ("whole", "other")  # sketches of the same images with two seeds
    many, few, control = (
        [fewer(kept, label, count) for label in seeds]
        for count in (BUCKETS[lab.scale], FEW[lab.scale], TOO_FEW[lab.scale])
    )
    alike, chance, again = (jackknifed(partial(_likeness, many[0], one[1]), sets) for one in (few, control, many))
    gain = jackknifed(lambda some: _likeness(many[0], few[1], some) - _likeness(many[0], control[1], some), sets)
    apart, too_far = (jackknifed(partial(_differences, one, many), sets) for one in (few, control))
    far = max(range(3), key=lambda d: abs(apart[d].value))
    measured = {"correlation of the pictures": alike, "largest difference of shares": apart[far]}
    measured["correlation of the pictures, as many buckets and another seed"] = again
    measured |= {f"difference of shares, desideratum {d}": one for d, one in zip(DESIDERATA, apart, strict=True)}
    controls = {"correlation of the pictures": chance, "largest difference of shares": too_far[far]}
    curves = {
        f"M = {count}": pairs_curve(tables[0], sets)
        for count, tables in ((BUCKETS[lab.scale], many), (FEW[lab.scale], few), (TOO_FEW[lab.scale], control))
    }
    return Finding(
        verdict(all_of(alike.above(ALIKE), gain.above(0)), all_of(*(one.within(-NEAR, NEAR) for one in apart))),
        measured, controls, networks_in_words(lab, {"trained": wanted}), curves, lab.seeds(SEEDS[lab.scale]),
    )  # fmt: skip


def fewer(kept: Sequence[Kept], label: str, count: int) -> np.ndarray:
    """Return the similarities of networks, each with one sketch of so many buckets."""
    parts = [folded(kernels(kept, label, part), count) for part in ("features", "gradients")]
    return cka(parts[0] * parts[1], parts[0] * parts[1]).cpu().numpy()


def task2vec_similarity(kept: Sequence[Kept]) -> np.ndarray:
    """Return the cosines of the Task2Vec embeddings of independent networks, 1 × networks × networks."""
    found = [one["task2vec"].cpu().numpy() for one in kept]
    made = [TaskEmbedding(one, (("filters", len(one)),), str(place), 0, "") for place, one in enumerate(found)]
    return np.array([[[nk.task2vec_cosine(a, b, independent=True) for a in made] for b in made]])


def fisher_rao_similarity(kept: Sequence[Kept]) -> np.ndarray:
    """Return minus the Fisher–Rao distances, 1 × networks × networks."""
    found = [float(one["fisher-rao"]) for one in kept]
    return -np.array([[[nk.fisher_rao_distance(a, b) for a in found] for b in found]])


def _one(table: np.ndarray, d: int, sets: Sequence[Sequence[int]]) -> float:
    return float(mean_shares(table, sets)[d])


def _gap(a: np.ndarray, d: int, b: np.ndarray, e: int, sets: Sequence[Sequence[int]]) -> float:
    return _one(a, d, sets) - _one(b, e, sets)


def _likeness(one: np.ndarray, other: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return the correlation of the mean similarities of pairs of sets, over pairs and blocks."""
    flat = [np.concatenate(list(pair_means(table, sets).values())) for table in (one, other)]
    return float(np.corrcoef(flat[0], flat[1])[0, 1])


def _differences(few: Sequence[np.ndarray], many: Sequence[np.ndarray], sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return by how much the shares of right orderings differ, in the mean over sketches."""
    return np.mean([mean_shares(a, sets) - mean_shares(b, sets) for a, b in zip(few, many, strict=True)], 0)


def _inside(table: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return how much more alike SVHN's networks are than they are to others, in the mean over blocks."""
    own, others = list(sets[2]), [*sets[0], *sets[1]]
    inside = np.mean([table[:, i, j] for i in own for j in own if i != j])
    return float(inside - table[:, own][:, :, others].mean())


def _told(table: np.ndarray, sets: Sequence[Sequence[int]]) -> float:
    """Return the share of orderings in which CIFAR-100's and SVHN's networks are closer to their own kind."""
    right = [
        (table[:, i, j] > table[:, i, k]).mean()
        for own, other in ((sets[1], sets[2]), (sets[2], sets[1]))
        for i in own for j in own for k in other if i != j
    ]  # fmt: skip
    return float(np.mean(right))
